"""External judges through `evaluate`, `compare`, `report` and `table`: a judge in an environment of its own."""

import json
import math
import shutil
import sys
import venv
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.corpora import run, run_command, tiny_job, typed_in_a_child, write_corpus
from support.paths import TESTS
from transformer.cli.commands import compose
from transformer.config.jobs import TrainJob
from transformer.decoding.translator import Translator
from transformer.errors import InputError, TransformerError
from transformer.run_dir import RunDir
from transformer.tools import significance
from transformer.tools.significance import compare_segments
from transformer.tools.tables.format import format_markdown
from transformer.tools.tables.measured import Table, TableRow, measure

# The share of the reference's words that the hypothesis has.
OVERLAP = """
import sys
if sys.argv[1] == "--version":
    print("overlap 1.0, in", sys.prefix)
    sys.exit()
hyp, ref, out = (open(path, "r" if number < 2 else "w", encoding="utf-8") for number, path in enumerate(sys.argv[1:]))
for one, other in zip(hyp, ref):
    words = set(other.split())
    print(len(words & set(one.split())) / max(1, len(words)), file=out)
"""


@pytest.fixture(scope="module")
def own_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has nothing of this one."""
    folder = tmp_path_factory.mktemp("judge")
    venv.create(folder / "venv", symlinks=True, with_pip=False)
    (folder / "overlap.py").write_text(OVERLAP, encoding="utf-8")
    return folder / "venv" / "bin" / "python"


@pytest.fixture(scope="module")
def command(own_python: Path) -> str:
    return f"{own_python} {own_python.parents[2] / 'overlap.py'} {{hyp}} {{ref}} {{out}}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainJob, TrainJob]:
    """Two finished runs on the same text."""
    folder = tmp_path_factory.mktemp("runs")
    corpus = write_corpus(folder / "text")
    jobs = [tiny_job(folder / name, corpus, max_steps=2, seed=seed) for name, seed in (("a", 1), ("b", 2))]
    for job in jobs:
        run(job)
    return jobs[0], jobs[1]


@pytest.fixture
def runs(trained: tuple[TrainJob, TrainJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copies of them, in the working directory; and some of the second's translations are the references."""
    for job in trained:
        shutil.copytree(job.run_dir, tmp_path / Path(job.run_dir).name)
    hypotheses, references = (tmp_path / "b" / "hypotheses" / f"test.{kind}" for kind in ("hyp", "ref"))
    lines = references.read_text(encoding="utf-8").split("\n")
    lines[9:-1] = hypotheses.read_text(encoding="utf-8").split("\n")[9:-1]
    hypotheses.write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(significance, "RESAMPLES", 200)
    monkeypatch.setattr(significance, "TRIALS", 400)
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], command: str, *overrides: str) -> Any:
    threads = ["threads=1"] if command == "evaluate" and "hypotheses" not in overrides[0] else []
    run_command(command, compose(command, [*overrides, *threads, "format=json"]))
    return json.loads(capsys.readouterr().out)


def overlaps(folder: Path, name: str) -> list[float]:
    """What the judge should say, counted here."""
    texts = ((folder / f"{name}.{kind}").read_text(encoding="utf-8").split("\n")[:-1] for kind in ("hyp", "ref"))
    words = [(set(one.split()), set(other.split())) for one, other in zip(*texts, strict=True)]
    return [len(one & other) / max(1, len(other)) for one, other in words]


@pytest.mark.ci
def test_evaluate_asks_a_judge_of_another_environment(
    runs: Path, own_python: Path, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads what the run keeps, and nothing is translated again."""

    def fail(*_: object) -> None:
        raise AssertionError("translated")

    monkeypatch.setattr(Translator, "translate", fail)
    found = printed(capsys, "evaluate", "run_dir=b", f"scorer.overlap={command}")["test_sets"]
    for name in ("test", "other"):
        judgement = found[name]["judges"]["overlap"]
        assert judgement["segments"] == pytest.approx(overlaps(runs / "b" / "hypotheses", name))
        assert judgement["system"] == pytest.approx(np.mean(judgement["segments"]))
        assert judgement["version"] == f"overlap 1.0, in {own_python.parents[1]}"
        kept = json.loads((runs / "b" / "judges" / f"{name}.overlap.json").read_text())
        assert kept == judgement
        assert set(kept["sha256"]) == {"src", "hyp", "ref"}
    assert found["test"]["judges"]["overlap"]["system"] > 0.5


@pytest.mark.ci
def test_evaluate_shows_judges_to_people_and_keeps_what_is_about_the_run_s_own_text(
    runs: Path, command: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = typed_in_a_child("evaluate", "run_dir=a", f"scorer.overlap={command}", "threads=1", cwd=runs)
    assert ended.status == 0, ended.said
    assert "overlap 0." in ended.printed.split("\n")[0]
    assert f"\n  overlap: {command}, overlap 1.0, in " in ended.printed
    run_command("evaluate", compose("evaluate", ["run_dir=a", "threads=1"]))
    assert capsys.readouterr().out == ended.printed, "what was said of the same translations"

    # Other translations: said, and not kept.
    overrides = ("run_dir=b", "search.max_extra=1", f"scorer.overlap={command}")
    assert printed(capsys, "evaluate", *overrides)["test_sets"]["test"]["judges"]["overlap"]["segments"]
    assert not (runs / "b" / "judges" / "test.overlap.json").exists()
    assert "test: the judges' scores are not kept: the run's own translations are different" in caplog.text


def test_evaluate_keeps_the_other_scores_where_a_judge_fails(
    runs: Path, command: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    broken = f"scorer.broken={sys.executable} -c 'raise SystemExit(3)' {{hyp}} {{out}}"
    found = printed(capsys, "evaluate", "run_dir=a", broken, f"scorer.overlap={command}")["test_sets"]
    assert [list(scores["judges"]) for scores in found.values()] == [["overlap"], ["overlap"]]
    assert caplog.text.count("scorer.broken gave no scores: it ended with status 3: it said nothing") == 2


def test_evaluate_judges_files(runs: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("b", "hypotheses")
    files = [f"hypotheses={folder}/test.hyp", f"references=[{folder}/test.ref,{folder}/test.ref]", "data.tgt_lang=de"]
    found = printed(capsys, "evaluate", *files, f"scorer.overlap={command}")
    assert found["judges"]["overlap"]["segments"] == pytest.approx(overlaps(folder, "test"))
    sources = command.replace("{hyp} {ref}", "{hyp} {src}")
    with pytest.raises(InputError, match=r"scorer\.mine: the judge reads sources: name their file with sources=FILE"):
        printed(capsys, "evaluate", *files, f"scorer.mine={sources}")
    found = printed(capsys, "evaluate", *files, f"scorer.mine={sources}", f"sources={folder}/test.src")
    assert len(found["judges"]["mine"]["segments"]) == len(overlaps(folder, "test"))


@pytest.mark.ci
def test_evaluate_takes_judges_from_a_file_of_the_user_s_own(
    runs: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"overlap: {command}\nother: {command}\n"
    Path("judges.yaml").write_text(text, encoding="utf-8")
    found = printed(capsys, "evaluate", "run_dir=a", "scorers=judges.yaml")
    assert sorted(found["test_sets"]["test"]["judges"]) == ["other", "overlap"]

    # Not from a run directory, whichever it is, nor by a link to a file there.
    Path("b", "judges.yaml").write_text(text, encoding="utf-8")
    Path("link.yaml").symlink_to(Path("b", "judges.yaml").absolute())
    for name in ("b/judges.yaml", "link.yaml"):
        with pytest.raises(
            InputError, match=r"this file came with the run directory .*: read it, then copy it elsewhere"
        ):
            printed(capsys, "evaluate", "run_dir=a", f"scorers={name}")
    for content in ("- x\n", "a: [b]\n", "a/b: c\n", "", ": : :\n"):
        Path("judges.yaml").write_text(content, encoding="utf-8")
        with pytest.raises(InputError, match=r"^judges\.yaml: not (YAML|a list of judges)"):
            printed(capsys, "evaluate", "run_dir=a", "scorers=judges.yaml")
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in pairwise("abcdefghij")
    )
    Path("judges.yaml").write_text(bomb, encoding="utf-8")
    with pytest.raises(InputError, match=r"judges\.yaml: (?!not a list)"):
        printed(capsys, "evaluate", "run_dir=a", "scorers=judges.yaml")
    with pytest.raises(InputError, match=r"^scorers=nix\.yaml: No such file"):
        printed(capsys, "evaluate", "run_dir=a", "scorers=nix.yaml")


def test_nothing_that_a_run_keeps_of_a_judge_is_run(
    runs: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command in a run is text: here it would write a file."""
    for name in ("a", "b"):
        printed(capsys, "evaluate", f"run_dir={name}", f"scorer.overlap={command}")
        for path in (runs / name / "judges").iterdir():
            kept = json.loads(path.read_text())
            hostile = f"touch {runs}/pwned `touch {runs}/pwned` \u001b[2J\n# forged"
            path.write_text(json.dumps({**kept, "command": hostile, "version": f"$(touch {runs}/pwned)"}))
    printed(capsys, "evaluate", "run_dir=a")
    run_command("compare", compose("compare", ["runs=[a,b]"]))
    assert (
        f"- overlap signature: `touch {runs}/pwned 'touch {runs}/pwned' \\x1b[2J\\n# forged" in capsys.readouterr().out
    )
    run_command(
        "report", compose("report", ["runs=[a,b]", "output=report.html", "checkpoints=0", "attention=0", "threads=1"])
    )
    assert "overlap" in Path("report.html").read_text(encoding="utf-8")
    assert not list(runs.rglob("pwned"))


@pytest.mark.ci
def test_compare_tests_what_a_judge_said(runs: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        printed(capsys, "evaluate", f"run_dir={name}", f"scorer.overlap={command}")
    found = printed(capsys, "compare", "runs=[a,b]")
    scores = found["test_sets"]["test"]["scores"][-1]
    assert (scores["metric"], scores["signature"].startswith(f"{command}, overlap 1.0, in ")) == ("overlap", True)
    a, b = scores["systems"]
    assert b["score"] == pytest.approx(np.mean(overlaps(runs / "b" / "hypotheses", "test")))
    assert (a["p_randomisation"], a["p_bootstrap"]) == (None, None)
    assert b["p_randomisation"] <= 0.05
    run_command("compare", compose("compare", ["runs=[a,b]"]))
    out = capsys.readouterr().out
    assert "overlap (μ ± 95% CI)" in out
    assert f"{b['score']:.4f} ({b['mean']:.4f} ± {b['half_width']:.4f})" in out

    # Another version, text that has changed since, and a damaged file: it does not count, and a note says so.
    path = runs / "b" / "judges" / "test.overlap.json"
    kept = json.loads(path.read_text())
    for changed, note in (
        ({**kept, "version": "2.0"}, "overlap did not judge test alike ("),
        ({**kept, "sha256": {**kept["sha256"], "hyp": "0" * 64}}, "overlap has not judged test of b: left out."),
        ({**kept, "segments": kept["segments"][1:]}, "overlap has not judged test of b: left out."),
        ({**kept, "segments": ["1"]}, "overlap has not judged test of b: left out."),
    ):
        path.write_text(json.dumps(changed))
        found = printed(capsys, "compare", "runs=[a,b]")
        assert [of["metric"] for of in found["test_sets"]["test"]["scores"]] == ["BLEU", "chrF2", "chrF2++", "TER"]
        assert any(said.startswith(note) for said in found["notes"]), found["notes"]


def test_compare_segments_has_the_p_of_all_exchanges() -> None:
    """Of eight segments, all 256 exchanges can be counted."""
    one = [0.1, 0.4, 0.3, 0.9, 0.5, 0.2, 0.7, 0.6]
    other = [0.3, 0.5, 0.2, 1.0, 0.9, 0.4, 0.8, 0.5]
    differences = [b - a for a, b in zip(one, other, strict=True)]
    sums = [
        abs(sum(sign * d for sign, d in zip(signs, differences, strict=True))) for signs in product((-1, 1), repeat=8)
    ]
    exact = sum(found >= abs(sum(differences)) - 1e-9 for found in sums) / 256
    found = compare_segments("x", [one, other, one], signature="s").systems
    assert found[1].p_randomisation == pytest.approx(exact, abs=0.02)
    assert found[1].score == pytest.approx(0.575)
    assert found[1].mean == pytest.approx(0.575, abs=0.02)
    assert found[2].p_randomisation is found[2].p_bootstrap is None
    assert found[1].half_width == pytest.approx(1.96 * np.std(other) / math.sqrt(8), rel=0.15)


def test_compare_segments_finds_no_difference_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both systems are drawn alike: about one of twenty trials has p at 0.05 or below."""
    monkeypatch.setattr(significance, "RESAMPLES", 10)
    monkeypatch.setattr(significance, "TRIALS", 400)
    draw = np.random.default_rng(3)
    trials = [compare_segments("x", draw.normal(size=(2, 60)).tolist(), signature="s").systems[1] for _ in range(60)]
    assert 0 <= sum(trial.is_significant for trial in trials) <= 8


def test_table_shows_what_judges_said(
    trained: tuple[TrainJob, TrainJob], command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(trained[0].run_dir, tmp_path / "a")
    run_command(
        "evaluate", compose("evaluate", [f"run_dir={tmp_path / 'a'}", f"scorer.overlap={command}", "threads=1"])
    )
    job = replace(trained[0], run_dir=str(tmp_path / "a"))
    measured = measure(job, RunDir(tmp_path / "a").read_results())
    rows = [TableRow("one", "", None, [measured], []), TableRow("two", "", None, [replace(measured, judges={})], [])]
    shown = format_markdown(Table("t", [], rows))
    header, _, one, two = [line for line in shown.split("\n") if line.startswith("|")]
    column = [cell.strip() for cell in header.split("|")].index("overlap, test")
    assert one.split("|")[column].strip() == f"{np.mean(overlaps(tmp_path / 'a' / 'hypotheses', 'test')):.4f}"
    assert two.split("|")[column].strip() == ""


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["scorer.x=nix {hyp} {out}"], r"scorer\.x: there is no program 'nix'"),
        (["scorer.9x=python {hyp} {out}"], "the name '9x' must begin with a letter"),
        (["scorer=python {hyp} {out}"], "scorer is a group of"),
        (["scorer.x=python {hyp} {out}", "sweep.beam_size=1,2"], "leave scorer out"),
        (["scorer_seconds=0"], "scorer_seconds=0.0 must be above 0"),
        (["sources=x"], "sources belong to hypotheses"),
    ],
)
def test_evaluate_refuses_bad_judges(runs: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(TransformerError, match=message):
        run_command("evaluate", compose("evaluate", ["run_dir=a", *overrides]))


def test_old_run_takes_a_judge(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(TESTS / "data" / "run_of_1bd6cd8", tmp_path / "old")
    found = printed(capsys, "evaluate", f"run_dir={tmp_path / 'old'}", f"scorer.overlap={command}")
    assert len(found["test_sets"]["test"]["judges"]["overlap"]["segments"]) == 40
