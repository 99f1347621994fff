"""A score of another package: chosen by a key, it is wherever the package's own are, and nothing else executes it."""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.corpora import Ended, in_a_child, tiny_job, typed_in_a_child, write_corpus
from transformer import registry
from transformer.tools import significance

# Of the words of a reference, the share that the translation has, sentence by sentence; how far the lengths of the
# whole are from those of the sources; and two that fail. Each use of the package leaves a mark.
MODULE = """
from pathlib import Path

from transformer.errors import InputError
from transformer.plugins import Measured, ScoreMetric

with open(Path(__file__).with_name("used"), "a") as file:
    file.write("used\\n")


def prepare_overlap(text):
    def measure(hypotheses, references, sources):
        shares = []
        for hypothesis, reference in zip(hypotheses, references[0], strict=True):
            words = set(reference.split())
            shares.append(len(words & set(hypothesis.split())) / len(words))
        return Measured(sum(shares) / len(shares), f"lang:{text.tgt_lang}|version:1", shares)

    return measure


def prepare_length(text):
    def measure(hypotheses, references, sources):
        if sources is None:
            raise InputError("lengthlap: there are no sources: name them by sources=FILE")
        counts = [sum(map(len, lines)) for lines in (hypotheses, sources)]
        return Measured(abs(1 - counts[0] / counts[1]), "version:2")

    return measure


def prepare_ill(text):
    return lambda hypotheses, references, sources: 1 / 0


def prepare_false(text):
    return lambda hypotheses, references, sources: Measured(0.5, "x", [0.1] * len(hypotheses))


OVERLAP = ScoreMetric("word overlap", prepare_overlap, digits=4)
LENGTH = ScoreMetric("length error", prepare_length, digits=3, higher_is_better=False)
ILL = ScoreMetric("ill", prepare_ill)
FALSE = ScoreMetric("false", prepare_false)
BAD_NAME = ScoreMetric("<b>bold</b>", prepare_ill)
"""

ENTRY_POINTS = """[transformer.plugins]
score.wordlap = foreign_scores:OVERLAP
score.lengthlap = foreign_scores:LENGTH
score.illlap = foreign_scores:ILL
score.falselap = foreign_scores:FALSE
score.badlap = foreign_scores:BAD_NAME
score.nolap = foreign_scores:MODULE_HAS_NONE
score.textlap = foreign_scores:prepare_ill
"""

BOTH = "scores=[wordlap,lengthlap]"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package, as it lies where packages are installed."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "foreign_scores.py").write_text(MODULE, encoding="utf-8")
    described = folder / "foreign_scores-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign-scores\nVersion: 1.0\n", encoding="utf-8")
    (described / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def runs(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that were scored by two scores of the package, in a folder."""
    folder = tmp_path_factory.mktemp("runs")
    corpus = replace(write_corpus(folder / "text"), scores=["wordlap", "lengthlap"])
    for name, seed in (("a", 1), ("b", 2)):
        with installed(package):
            job = tiny_job(folder / name, corpus, max_steps=30, seed=seed, learning_rate=1e-2)
            ended = in_a_child("train", job, tmp_path_factory.mktemp("streams"))
        assert ended.status == 0, ended.said
        assert re.search(r"^test .*, TER [0-9.]+, word overlap 0\.\d{4}, length error \d\.\d{3}$", ended.printed, re.M)
    return folder


class installed:
    """The package is found by this process, and by those that are forked from it."""

    def __init__(self, package: Path) -> None:
        self._patch = pytest.MonkeyPatch()
        self._package = package

    def __enter__(self) -> None:
        self._patch.syspath_prepend(self._package)
        registry._installed.cache_clear()

    def __exit__(self, *_: object) -> None:
        self._patch.undo()
        registry._installed.cache_clear()


@pytest.fixture(autouse=True)
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(significance, "RESAMPLES", 30)
    monkeypatch.setattr(significance, "TRIALS", 40)


@pytest.fixture
def found(package: Path) -> Iterator[None]:
    with installed(package):
        yield
    assert "foreign_scores" not in sys.modules, "it is used in processes of their own"


@pytest.fixture
def used(package: Path) -> Path:
    """The file that is there once the package was used."""
    mark = package / "used"
    mark.unlink(missing_ok=True)
    return mark


def typed(*arguments: str, cwd: Path) -> Ended:
    ended = typed_in_a_child(*arguments, cwd=cwd)
    assert ended.status == 0, ended.said
    return ended


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def results_of(run_dir: Path) -> Any:
    return json.loads((run_dir / "results.json").read_text(encoding="utf-8"))["test_sets"]


def overlaps(runs: Path, name: str) -> list[float]:
    pairs = zip(*(lines_of(runs / name / "hypotheses" / f"test.{kind}") for kind in ("hyp", "ref")), strict=True)
    return [sum(word in hyp.split() for word in {*ref.split()}) / len({*ref.split()}) for hyp, ref in pairs]


def length_error(folder: Path, kind: str) -> float:
    of_hypotheses, wanted = (sum(map(len, lines_of(folder / "hypotheses" / f"test.{text}"))) for text in ("hyp", kind))
    return abs(1 - of_hypotheses / wanted)


def test_train_keeps_the_score_in_its_results(runs: Path) -> None:
    for name in ("a", "b"):
        kept = results_of(runs / name)["test"]["others"]
        of_sentences = overlaps(runs, name)
        assert kept["wordlap"] == {
            "name": "word overlap",
            "value": pytest.approx(sum(of_sentences) / len(of_sentences)),
            "signature": "lang:de|version:1",
            "digits": 4,
            "higher_is_better": True,
        }
        assert (kept["lengthlap"]["digits"], kept["lengthlap"]["higher_is_better"]) == (3, False)
        assert kept["lengthlap"]["value"] == pytest.approx(length_error(runs / name, "src"))
        assert length_error(runs / name, "src") != length_error(runs / name, "ref"), "it tells nothing"
    assert overlaps(runs, "a") != overlaps(runs, "b")
    assert max(overlaps(runs, "a")) > 0


@pytest.mark.usefixtures("found")
def test_train_scores_a_finished_run_again_where_a_score_is_new(runs: Path, tmp_path: Path) -> None:
    """Without a step; and not a second time."""
    corpus = write_corpus(tmp_path / "text")
    job = tiny_job(tmp_path / "run", corpus, max_steps=2)
    assert in_a_child("train", job, tmp_path).status == 0
    assert results_of(tmp_path / "run")["test"]["others"] == {}

    more = replace(job, data=replace(corpus, scores=["wordlap", "illlap"]))
    first = in_a_child("train", more, tmp_path)
    assert (first.status, results_of(tmp_path / "run")["test"]["others"].keys()) == (0, {"wordlap"})
    assert "left out: the score illlap fails (ZeroDivisionError: division by zero)" in first.said

    one = replace(job, data=replace(corpus, scores=["wordlap"]))
    before = (tmp_path / "run" / "results.json").stat().st_mtime_ns
    assert in_a_child("train", one, tmp_path).status == 0
    assert (tmp_path / "run" / "results.json").stat().st_mtime_ns == before


@pytest.mark.usefixtures("found")
def test_evaluate_has_the_score_of_a_run_and_of_files(runs: Path) -> None:
    found = json.loads(typed("evaluate", "run_dir=a", BOTH, "format=json", cwd=runs).printed)
    assert found["test_sets"]["test"]["others"] == results_of(runs / "a")["test"]["others"]

    names = ("hypotheses=a/hypotheses/test.hyp", "references=a/hypotheses/test.ref", "data.tgt_lang=de")
    of_files = json.loads(typed("evaluate", *names, "scores=[wordlap]", "format=json", cwd=runs).printed)
    assert of_files["others"] == {"wordlap": results_of(runs / "a")["test"]["others"]["wordlap"]}
    shown = typed("evaluate", *names, "scores=[wordlap]", cwd=runs).printed
    assert shown.splitlines()[0].endswith(f", word overlap {of_files['others']['wordlap']['value']:.4f}")
    assert "\n  word overlap: lang:de|version:1\n" in shown


@pytest.mark.usefixtures("found")
def test_a_score_of_files_has_their_sources_where_they_are_named(runs: Path) -> None:
    names = ("references=a/hypotheses/test.ref", "data.tgt_lang=de", "scores=[lengthlap]", "format=json")
    one, two = "hypotheses=a/hypotheses/test.hyp", "hypotheses=[a/hypotheses/test.hyp,b/hypotheses/test.hyp]"
    sources = "sources=a/hypotheses/test.src"
    expected = [pytest.approx(length_error(runs / name, "src")) for name in ("a", "b")]

    found = json.loads(typed("evaluate", one, *names, sources, cwd=runs).printed)
    assert found["others"]["lengthlap"]["value"] == expected[0]
    [compared] = json.loads(typed("compare", two, *names, sources, cwd=runs).printed)["test_sets"].values()
    assert [system["score"] for system in compared["scores"][4]["systems"]] == expected

    for command in (("evaluate", one), ("compare", two)):
        ended = typed(*command, *names, cwd=runs)
        assert "left out: lengthlap: there are no sources: name them by sources=FILE" in ended.said


@pytest.mark.usefixtures("found")
def test_evaluate_executes_nothing_that_only_a_run_names(runs: Path, used: Path) -> None:
    ended = typed("evaluate", "run_dir=a", "format=json", cwd=runs)
    scores = json.loads(ended.printed)["test_sets"]["test"]
    assert (scores["others"], scores["ter"]) == ({}, results_of(runs / "a")["test"]["ter"])
    for name in ("wordlap", "lengthlap"):
        refusal = (
            f"left out: the score {name} comes with the package foreign-scores, but is not enabled here: name it on "
            f"the command line, or call transformer.registry.allow('{name}')"
        )
        assert ended.said.count(refusal) == 1
    for command in (("compare", "a", "b"), ("report", "a", "checkpoints=0"), ("verify", "run_dir=a", "steps=4")):
        typed(*command, cwd=runs)
    assert not used.exists()


def test_scores_are_shown_where_their_package_is_missing(runs: Path) -> None:
    ended = typed("evaluate", "run_dir=a", cwd=runs)
    assert "left out: no score is called 'wordlap': install the package that has it" in ended.said
    value = results_of(runs / "a")["test"]["others"]["wordlap"]["value"]
    assert f" {value:.4f} |" in typed("compare", "a", "b", cwd=runs).printed


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize(
    ("name", "said", "status"),
    [
        ("illlap", "left out: the score illlap fails (ZeroDivisionError: division by zero)", 0),
        ("falselap", "its value 0.5 is not its segments' mean, 0.1", 0),
        ("badlap", "the score badlap: the name '<b>bold</b>' is none for a score", 2),
        ("nolap", "the score nolap cannot be imported (AttributeError: ", 2),
        ("textlap", "the score textlap is of the type function, not transformer.plugins.ScoreMetric", 2),
        ("misspelt", "scores=misspelt is not one of paper_bleu, badlap, ", 2),
    ],
)
def test_evaluate_says_in_a_line_what_is_wrong_with_a_score(runs: Path, name: str, said: str, status: int) -> None:
    files = ("hypotheses=a/hypotheses/test.hyp", "references=a/hypotheses/test.ref", "data.tgt_lang=de")
    ended = typed_in_a_child("evaluate", *files, f"scores=[{name}]", cwd=runs)
    assert (ended.status, ended.printed.startswith("BLEU ")) == (status, status == 0)
    assert said in ended.said
    assert "Traceback" not in ended.said


@pytest.mark.usefixtures("found")
def test_compare_tests_the_score_that_has_those_of_sentences(runs: Path) -> None:
    """The other is there, too, and the table says that it is not tested; so are those that are not measured here."""
    found = json.loads(typed("compare", "a", "b", BOTH, "format=json", cwd=runs).printed)
    overlap, length = found["test_sets"]["test"]["scores"][4:]
    assert [one["score"] for one in overlap["systems"]] == [
        pytest.approx(results_of(runs / name)["test"]["others"]["wordlap"]["value"]) for name in ("a", "b")
    ]
    assert (overlap["metric"], overlap["signature"]) == ("word overlap", "lang:de|version:1")
    assert 0 < overlap["systems"][1]["p_randomisation"] <= 1
    assert overlap["systems"][1]["half_width"] > 0
    assert [length["systems"][1][key] for key in ("mean", "half_width", "p_bootstrap", "p_randomisation")] == [None] * 4
    assert length["higher_is_better"] is False
    assert [one["score"] for one in length["systems"]] == [
        pytest.approx(length_error(runs / name, "src")) for name in ("a", "b")
    ]

    shown = typed("compare", "a", "b", BOTH, cwd=runs).printed
    assert "A lower TER or length error is better. length error: not tested" in shown
    rows = [row.split("|") for row in shown.split("\n") if row.startswith("| p, ")]
    assert {row[-2].strip() for row in rows} == {"not tested"}
    assert all(re.fullmatch(r" *[01]\.\d{4}\*? *", row[-3]) for row in rows)

    stored = json.loads(typed("compare", "a", "b", "format=json", cwd=runs).printed)
    assert [one["metric"] for one in stored["test_sets"]["test"]["scores"][4:]] == ["word overlap", "length error"]
    assert [one["half_width"] for of in stored["test_sets"]["test"]["scores"][4:] for one in of["systems"]] == [
        None
    ] * 4


def test_compare_leaves_out_what_was_not_measured_alike(runs: Path, tmp_path: Path) -> None:
    results = json.loads((runs / "b" / "results.json").read_text(encoding="utf-8"))
    try:
        changed = json.loads(json.dumps(results))
        changed["test_sets"]["test"]["others"]["wordlap"]["signature"] = "lang:de|version:2"
        del changed["test_sets"]["test"]["others"]["lengthlap"]
        (runs / "b" / "results.json").write_text(json.dumps(changed), encoding="utf-8")
        found = json.loads(typed("compare", "a", "b", "format=json", cwd=runs).printed)
    finally:
        (runs / "b" / "results.json").write_text(json.dumps(results), encoding="utf-8")
    assert len(found["test_sets"]["test"]["scores"]) == 4
    assert "wordlap of test was not measured alike: left out." in found["notes"]
    assert "lengthlap is not among the scores of b on test: left out." in found["notes"]


@pytest.mark.usefixtures("found")
def test_report_has_the_score(runs: Path, tmp_path: Path) -> None:
    values = [results_of(runs / name)["test"]["others"] for name in ("a", "b")]
    quick = ("checkpoints=0", "attention=0", "samples=0")
    for extra, cell in (((), r'"{overlap:.4f}"'), ((BOTH,), r'"{overlap:.4f} ± 0\.\d{{4}}"')):
        page = tmp_path / "page.html"
        typed("report", "a", "b", *extra, *quick, f"output={page}", cwd=runs)
        text = page.read_text(encoding="utf-8").replace("\\u00b1", "±")
        for value in values:
            assert re.search(cell.format(overlap=value["wordlap"]["value"]), text)
            assert f'"{value["lengthlap"]["value"]:.3f}"' in text
        assert '"not tested"' in text
        assert "word overlap lang:de|version:1" in text


def test_push_has_the_score_in_the_card(runs: Path) -> None:
    card = typed("push", "run_dir=a", "repo=ours/en-de", "license=mit", "dry_run=true", "output=sent", cwd=runs)
    text = (runs / "sent" / "README.md").read_text(encoding="utf-8")
    scores = results_of(runs / "a")["test"]
    assert card.status == 0
    shown = [f"{scores[name]:.2f}" for name in ("bleu", "chrf", "chrf_plus_plus", "ter")]
    shown += [f"{scores['others']['wordlap']['value']:.4f}", f"{scores['others']['lengthlap']['value']:.3f}"]
    assert "| test set | sentences | BLEU | chrF | chrF++ | TER | word overlap | length error |" in text
    assert f"| test | 12 | {' | '.join(shown)} |" in text
    assert "- word overlap `lang:de|version:1`\n" in text
    assert "name: word overlap\n" in text


@pytest.mark.usefixtures("found")
def test_verify_compares_the_score(runs: Path) -> None:
    scores = results_of(runs / "a")["test"]
    shown = typed("verify", "run_dir=a", "steps=all", "scores=[wordlap]", cwd=runs)
    lines = shown.printed.splitlines()
    for name, value in (("TER", scores["ter"]), ("word overlap", scores["others"]["wordlap"]["value"])):
        assert f"{name} of test: {value!r}, the same" in lines
    assert not [line for line in lines if line.startswith("length error")]
    assert shown.said.count("left out: the score lengthlap comes with the package foreign-scores") == 1
