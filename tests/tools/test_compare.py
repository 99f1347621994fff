"""`transformer compare`: its figures against those of the sacreBLEU command line, and what it refuses to compare."""

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from support.corpora import run, run_command, tiny_job, typed_in_a_child, write_corpus
from support.paths import ROOT
from transformer.cli.commands import compose
from transformer.errors import CheckpointError, InputError
from transformer.plugins import ScoreSettings
from transformer.records import Results
from transformer.run_dir import RunDir
from transformer.tools import significance
from transformer.tools.significance import Metrics, SystemScore, compare_systems

DEMO = ROOT / "data" / "demo"
FIGURES = re.compile(r"(\d+\.\d\d) \((\d+\.\d\d) ± (\d+\.\d\d)\)")


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def write(path: Path, lines: list[str]) -> str:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def worsened(lines: list[str], *, share: float, seed: int) -> list[str]:
    """The lines with some of their words left out, or said twice."""
    draw = random.Random(seed)
    factors = {word: draw.choice((0, 2)) for word in " ".join(lines).split(" ")}

    def change(word: str) -> str:
        return " ".join([word] * factors[word]) if draw.random() < share else word

    return [" ".join(filter(None, map(change, line.split(" ")))) for line in lines]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reference of 60 sentences, and translations of it: `b` is better than `a`, and `c` about as good."""
    monkeypatch.chdir(tmp_path)
    reference = lines_of(DEMO / "test.de")[:60]
    write(tmp_path / "ref", reference)
    for name, share, seed in (("a", 0.2, 1), ("b", 0.12, 2), ("c", 0.2, 3)):
        write(tmp_path / name, worsened(reference, share=share, seed=seed))
    return tmp_path


@pytest.fixture
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(significance, "RESAMPLES", 30)
    monkeypatch.setattr(significance, "TRIALS", 40)


def compared(capsys: pytest.CaptureFixture[str], *overrides: str) -> dict[str, Any]:
    run_command("compare", compose("compare", [*overrides, "format=json"]))
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def sacrebleu(*arguments: str, **environment: str) -> tuple[str, str]:
    """What sacreBLEU's own command line prints, in two decimals and without colours; the second text is of chrF++."""
    command = [sys.executable, "-m", "sacrebleu", "ref", "-w", "2", "-f", "text", *arguments]
    variables = {**os.environ, "NO_COLOR": "1", "OMP_NUM_THREADS": "1", **environment}
    metrics = (["-m", "bleu", "chrf", "ter"], ["-m", "chrf", "--chrf-word-order", "2"])
    plain, plus_plus = (
        subprocess.run([*command, *flags], check=True, capture_output=True, text=True, env=variables).stdout
        for flags in metrics
    )
    return plain, plus_plus


def in_order(find: Callable[[str], list[Any]], printed: tuple[str, str]) -> list[Any]:
    """What is found, row by row: of BLEU, chrF, chrF++ and TER."""
    plain, plus_plus = map(find, printed)
    assert len(plain) == 3 * len(plus_plus)
    rows = [(*plain[3 * row : 3 * row + 2], one, plain[3 * row + 2]) for row, one in enumerate(plus_plus)]
    return list(chain.from_iterable(rows))


def signatures_of(text: str) -> list[str]:
    return re.findall(r"(nrefs:\S+)", text)


def p_values(text: str) -> list[str]:
    return re.findall(r"\(p = (\d\.\d{4})\)", text)


# ---- the figures of sacreBLEU ---------------------------------------------------------------------------------------


def test_compare_prints_the_figures_of_the_sacrebleu_command_line(files: Path) -> None:
    arguments = ("hypotheses=[a,b]", "references=ref", "data.tgt_lang=de", "changed=0")
    ended = typed_in_a_child("compare", *arguments, cwd=files)
    assert (ended.status, ended.said) == (0, "ref: 2 systems on 60 sentences\n")
    out = ended.printed
    bootstrap = sacrebleu("-i", "a", "b", "--paired-bs")
    randomisation = sacrebleu("-i", "a", "b", "--paired-ar")

    assert FIGURES.findall(out) == in_order(FIGURES.findall, bootstrap)
    assert len(FIGURES.findall(out)) == 8
    by_randomisation, by_bootstrap = (
        re.findall(r"\d\.\d{4}\*?", line) for line in out.split("\n") if line.startswith("| p, ")
    )
    assert by_bootstrap == in_order(p_values, bootstrap), "without a star"
    assert by_randomisation == [p + "*" * (float(p) <= 0.05) for p in in_order(p_values, randomisation)]
    assert len({*by_bootstrap, *by_randomisation}) > 2, "not all of them are the smallest there is"
    signatures = re.findall(r"`(nrefs:.*)`", out)
    assert signatures == in_order(signatures_of, bootstrap)
    assert [of.replace("bs:1000", "ar:10000") for of in signatures] == in_order(signatures_of, randomisation)


def test_compare_shows_what_arrives_of_the_source(
    tmp_path: Path, few_samples: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tag in front of a source, which tells the model what to do, is not asked for."""
    monkeypatch.chdir(tmp_path)
    corpus = write_corpus(tmp_path / "text")
    pair = replace(corpus.test["test"], tag="<2de>")
    for path, line in ((pair.src, "Call 110 or <b>Anna</b>: it is Anna"), (pair.tgt, "Ruf 110 oder <b>Anna</b> an")):
        write(Path(path), [line, *lines_of(Path(path))[1:]])
    corpus = replace(corpus, test={"test": pair}, train=replace(corpus.train, tag="<2de>"))
    for name, seed in (("a", 1), ("b", 2)):
        run(tiny_job(tmp_path / name, corpus, max_steps=1, seed=seed))
    hypotheses = tmp_path / "b" / "hypotheses" / "test.hyp"
    write(hypotheses, ["110 <b>Ann\u200b", *lines_of(hypotheses)[1:]])

    found = compared(capsys, "runs=[a,b]")["test_sets"]["test"]["kept"]
    assert [(row["kind"], row["pieces"], row["kept"][1]) for row in found] == [
        ("numbers", 1, 1),
        ("names in Latin script", 1, 0),
        ("tags", 2, 1),
    ]
    run_command("compare", compose("compare", ["runs=[a,b]"]))
    shown = capsys.readouterr().out
    assert "### What arrives of the source, in a, b\n" in shown
    assert re.search(r"^\| tags +\| +2 \| +0\.00, 50\.00 \|$", shown, re.MULTILINE)
    assert "- names in Latin script that did not arrive:\n" in shown
    assert "      b, line 1, Anna: 110 <b>Ann\\u200b\n" in shown


def test_compare_counts_what_a_source_begins_with(
    sentences: list[str], files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A first word between marks, as a tag of a model is, is text, unless all sources have the same."""
    write(files / "source", ["$100. is a number", "<b>Bold</b> is a tag", '"1984" is a book'])
    (found,) = compared(capsys, *sentences, "sources=source")["test_sets"].values()
    assert [(row["kind"], row["pieces"]) for row in found["kept"]] == [("numbers", 2), ("tags", 2)]


def test_compare_cuts_words_as_it_is_told(files: Path, few_samples: None, capsys: pytest.CaptureFixture[str]) -> None:
    (of_set,) = compared(capsys, "hypotheses=[a,b]", "references=ref", "data.tgt_lang=de", "bleu_tokenize=char")[
        "test_sets"
    ].values()
    assert "|tok:char|" in of_set["scores"][0]["signature"]


@pytest.mark.parametrize(
    ("bootstrap", "randomisation", "is_significant"),
    [(0.0010, 0.0501, False), (0.2, 0.05, True), (None, None, False)],
)
def test_system_score_is_significant_by_randomisation_alone(
    bootstrap: float | None, randomisation: float | None, is_significant: bool
) -> None:
    score = SystemScore(30.0, 30.0, 1.0, p_bootstrap=bootstrap, p_randomisation=randomisation)
    assert score.is_significant is is_significant


@pytest.mark.usefixtures("few_samples")
def test_compare_tests_each_system_against_the_first(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = compared(capsys, "hypotheses=[a,b,c]", "references=ref", "data.tgt_lang=de")
    bootstrap = sacrebleu("-i", "a", "b", "c", "--paired-bs", "--paired-bs-n", "30")
    assert found["systems"] == ["a", "b", "c"]
    metrics = found["test_sets"]["ref"]["scores"]
    assert [of["metric"] for of in metrics] == ["BLEU", "chrF2", "chrF2++", "TER"]

    printed = [
        tuple(f"{of['systems'][number][name]:.2f}" for name in ("score", "mean", "half_width"))
        for number in range(3)
        for of in metrics
    ]
    assert printed == in_order(FIGURES.findall, bootstrap)
    tested = [f"{of['systems'][number]['p_bootstrap']:.4f}" for number in (1, 2) for of in metrics]
    assert tested == in_order(p_values, bootstrap)
    assert [of["systems"][0]["p_randomisation"] for of in metrics] == [None] * 4
    assert list(found["test_sets"]["ref"]["changed"]) == ["b", "c"]


@pytest.mark.usefixtures("few_samples")
def test_compare_takes_the_seed_of_sacrebleu(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("hypotheses=[a,b]", "references=ref", "data.tgt_lang=de")
    usual = compared(capsys, *arguments)
    assert usual["seed"] == "12345"
    assert (usual["resamples"], usual["trials"]) == (30, 40)

    monkeypatch.setenv("SACREBLEU_SEED", "7")
    found = compared(capsys, *arguments)
    metrics = found["test_sets"]["ref"]["scores"]
    bootstrap = sacrebleu("-i", "a", "b", "--paired-bs", "--paired-bs-n", "30", SACREBLEU_SEED="7")
    assert [f"{of['systems'][1]['p_bootstrap']:.4f}" for of in metrics] == in_order(p_values, bootstrap)
    assert found["seed"] == "7"
    assert "|seed:7|" in metrics[0]["signature"]
    assert found != usual

    monkeypatch.setenv("SACREBLEU_SEED", "0")  # sacreBLEU's tests would take none
    with pytest.raises(InputError, match=r"^SACREBLEU_SEED=0: this is not a seed"):
        compared(capsys, "hypotheses=[a,b]", "references=ref", "data.tgt_lang=de")
    monkeypatch.setenv("SACREBLEU_SEED", "seven")
    with pytest.raises(InputError, match=r"^SACREBLEU_SEED=seven: this is not a seed"):
        compared(capsys, *arguments)


CHINESE = ["我喜欢读书。", "她正在厨房里做饭。", "他们昨天去了北京。", "天气很好，我们出去吧。"]
JAPANESE = [
    "私は本を読むのが好きです。",
    "彼女は台所で料理をしています。",
    "彼らは昨日京都に行きました。",
    "天気がいいです。",
]


@pytest.mark.usefixtures("few_samples")
@pytest.mark.parametrize(
    ("language", "tokenizer", "texts"),
    [
        pytest.param("zho", "zh", CHINESE, id="zh"),
        pytest.param("ja", "ja-mecab", JAPANESE, id="ja", marks=pytest.mark.needs("MeCab", "ipadic")),
    ],
)
def test_compare_cuts_text_without_spaces_as_evaluate_does(
    files: Path, capsys: pytest.CaptureFixture[str], language: str, tokenizer: str, texts: list[str]
) -> None:
    write(files / "ref", texts)
    write(files / "a", [text[:-2] for text in texts])
    write(files / "b", [text[1:] for text in texts])
    found = compared(capsys, "hypotheses=[a,b]", "references=ref", f"data.tgt_lang={language}")
    options = ["--tokenize", tokenizer, "--ter-normalized", "--ter-asian-support"]
    bootstrap = sacrebleu("-i", "a", "b", "--paired-bs", "--paired-bs-n", "30", *options)

    metrics = found["test_sets"]["ref"]["scores"]
    assert [of["signature"] for of in metrics] == in_order(signatures_of, bootstrap)
    assert [f"{of['systems'][1]['p_bootstrap']:.4f}" for of in metrics] == in_order(p_values, bootstrap)
    assert sum(row["sentences"] for row in found["test_sets"]["ref"]["by_length"]) == 4
    assert sum(row["words"] for row in found["test_sets"]["ref"]["by_rarity"]) > 4 * 3


@pytest.mark.usefixtures("few_samples")
def test_compare_tests_nothing_where_the_translations_are_the_same(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """sacreBLEU finds such systems different, with the smallest p-value that there is."""
    shutil.copy("a", "again")
    arguments = ["hypotheses=[a,again]", "references=ref", "data.tgt_lang=de"]
    found = compared(capsys, *arguments)["test_sets"]["ref"]
    for metric in found["scores"]:
        baseline, again = metric["systems"]
        assert again == baseline
        assert again["p_bootstrap"] is None
    assert found["changed"] == {"again": []}
    run_command("compare", compose("compare", arguments))
    assert capsys.readouterr().out.count("same text") == 8


@pytest.mark.parametrize(("changed", "p"), [(1, 1.0), pytest.param(2, 0.5, marks=pytest.mark.ci), (5, 0.0625)])
def test_compare_finds_no_significance_in_a_few_sentences(changed: int, p: float) -> None:
    """Of all ways to exchange them, two give a difference as large as theirs: sacreBLEU leaves both out."""
    words = ["old", "new", "red", "blue", "long", "wide", "deep", "cold", "dark", "soft", "tall", "flat"]
    references = [f"the {word} house is very old , and {word} is its garden" for word in words]
    before = [reference.replace("garden", "wood") for reference in references]
    after = [*references[:changed], *before[changed:]]
    metrics = Metrics.of(ScoreSettings("en"))
    for metric in compare_systems({"a": before, "b": after}, [references], sources=None, metrics=metrics):
        found = metric.systems[1].p_randomisation
        assert found is not None
        assert p <= found <= p + 1e-3


@pytest.mark.usefixtures("few_samples")
def test_compare_without_regard_to_case(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(files / "lower", [line.lower() for line in lines_of(files / "a")])
    arguments = ["hypotheses=[a,lower]", "references=ref", "data.tgt_lang=de"]
    minded, bleu = (compared(capsys, *arguments, f"lowercase={value}")["test_sets"]["ref"] for value in (False, True))
    assert bleu["scores"][0]["systems"][0]["score"] == bleu["scores"][0]["systems"][1]["score"]
    assert "case:lc" in bleu["scores"][0]["signature"]
    assert minded["scores"][0]["systems"][0]["score"] > minded["scores"][0]["systems"][1]["score"] + 10
    assert {row["f1"][0] - row["f1"][1] for row in bleu["by_rarity"]} == {0.0}


# ---- lengths, words, sentences --------------------------------------------------------------------------------------


@pytest.fixture
def sentences(files: Path, few_samples: None) -> list[str]:
    write(files / "ref", ["der Hund schläft", "der Hund sieht die Katze", "die Katze sieht den alten Hund im Garten"])
    write(files / "a", ["der Hund schläft", "der Hund sieht die Maus", "die Katze sieht den alten Hund im Garten"])
    write(files / "b", ["der Hund schläft", "der Hund sieht die Katze", "die Katze geht"])
    return ["hypotheses=[a,b]", "references=ref", "data.tgt_lang=de"]


def test_compare_scores_short_and_long_sentences_apart(
    sentences: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    short, long = compared(capsys, *sentences)["test_sets"]["ref"]["by_length"]
    assert (short["least"], short["most"], short["sentences"]) == (0, 5, 2)
    assert (long["least"], long["most"], long["sentences"]) == (6, 10, 1)
    assert short["bleu"][0] < short["bleu"][1] == pytest.approx(100.0)
    assert long["bleu"][1] < long["bleu"][0] == pytest.approx(100.0)
    assert short["chrf"][0] < short["chrf"][1] == 100.0
    assert long["bleu_half_width"] == pytest.approx([0.0, 0.0]), "there is one sentence to resample"
    assert min(short["bleu_half_width"]) > 0


def test_compare_counts_which_words_are_found(sentences: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Once: schläft, den, alten, im, Garten. Twice: der, sieht, die, Katze. Three times: Hund. Never: Maus, geht."""
    found = compared(capsys, *sentences)["test_sets"]["ref"]
    assert found["counted_in"] == "the references"
    once, several = found["by_rarity"]
    assert (once["least"], once["most"], once["words"]) == (1, 1, 5)
    assert (several["least"], several["most"], several["words"]) == (2, 4, 11)
    assert once["f1"] == pytest.approx([100.0, 100 * 2 * 1 / (1 + 5)])  # b has only schläft
    assert several["f1"] == pytest.approx([100 * 2 * 10 / (10 + 11), 100 * 2 * 9 / (9 + 11)])


def test_compare_counts_a_word_as_often_as_a_sentence_has_it(
    files: Path, few_samples: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The references have seven words that occur several times: der four times, Hund three times."""
    write(files / "ref", ["der Hund der Katze der Maus der", "ein Hund Hund"])
    write(files / "a", ["der Hund der", "Hund Hund"])
    write(files / "b", ["der der der der der", "der"])
    found = compared(capsys, "hypotheses=[a,b]", "references=ref", "data.tgt_lang=de")
    once, several = found["test_sets"]["ref"]["by_rarity"]
    assert (once["words"], several["words"]) == (3, 7)
    assert once["f1"] == [0.0, 0.0]
    assert several["f1"] == pytest.approx([100 * 2 * 5 / (5 + 7), 100 * 2 * 4 / (6 + 7)])


def test_compare_shows_the_sentences_that_changed_most(
    sentences: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    changes = compared(capsys, *sentences)["test_sets"]["ref"]["changed"]["b"]
    assert [change["line"] for change in changes] == [3, 2]
    assert changes[0]["translation"] == "die Katze geht"
    assert changes[0]["baseline"] == "die Katze sieht den alten Hund im Garten" == changes[0]["references"][0]
    assert changes[0]["chrf"] < changes[0]["baseline_chrf"] == 100.0
    assert changes[1]["baseline_chrf"] < changes[1]["chrf"] == 100.0
    assert changes[0]["source"] is None
    assert len(compared(capsys, *sentences, "changed=1")["test_sets"]["ref"]["changed"]["b"]) == 1

    run_command("compare", compose("compare", sentences))
    assert "      reference        die Katze sieht den alten Hund im Garten\n" in capsys.readouterr().out


@pytest.mark.usefixtures("few_samples")
def test_compare_shows_in_one_line_whatever_a_system_is_called(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "b").rename(files / "b\n# evil")
    run_command("compare", compose("compare", ["hypotheses=['a','b\n# evil']", "references=ref", "data.tgt_lang=de"]))
    shown = capsys.readouterr().out
    assert [line for line in shown.split("\n") if line.startswith("# ")] == [r"# b\n# evil against a"]
    assert r"| b\n# evil " in shown


def test_compare_takes_several_references(
    files: Path, sentences: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write(files / "other", ["der Hund ruht", "ein Hund sieht die Katze", "die Katze geht"])
    found = compared(capsys, sentences[0], "references=[ref,other]", "data.tgt_lang=de")["test_sets"]["ref, other"]
    assert found["scores"][0]["signature"].startswith("nrefs:2|")
    assert found["scores"][0]["systems"][1]["score"] == pytest.approx(100.0)
    assert found["changed"]["b"][-1]["references"][1] == "die Katze geht"


# ---- runs -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    return run(tiny_job(folder / "a", write_corpus(folder / "corpus"), max_steps=2, save_every=2, average=1))


@pytest.fixture
def runs(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_samples: None) -> Path:
    """Two finished runs, `a` and `b`, whose translations are the worsened references."""
    monkeypatch.chdir(tmp_path)
    for name, share in (("a", 0.1), ("b", 0.3)):
        shutil.copytree(trained, tmp_path / name)
        for test_set in ("test", "other"):
            path = tmp_path / name / "hypotheses" / test_set
            write(path.with_suffix(".hyp"), worsened(lines_of(path.with_suffix(".ref")), share=share, seed=5))
    return tmp_path


def change_results(run_dir: Path, change: Callable[[Results], Results]) -> None:
    run = RunDir(run_dir)
    run.write_results(change(run.read_results()))


def test_compare_reads_what_two_runs_keep(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = compared(capsys, "runs=[a,b]")
    assert found["systems"] == ["a", "b"]
    assert list(found["test_sets"]) == ["test", "other"]
    files = [f"hypotheses=[{','.join(f'{name}/hypotheses/test.hyp' for name in 'ab')}]"]
    alone = compared(capsys, *files, "references=a/hypotheses/test.ref", "data.tgt_lang=de")
    (of_files,) = alone["test_sets"].values()
    assert found["test_sets"]["test"]["scores"] == of_files["scores"]
    assert found["test_sets"]["test"]["by_length"] == of_files["by_length"]

    change = found["test_sets"]["test"]["changed"]["b"][0]
    line = change["line"] - 1
    for key, path in (("source", "a/hypotheses/test.src"), ("translation", "b/hypotheses/test.hyp")):
        assert change[key] == lines_of(runs / path)[line]


def test_compare_takes_paths_and_decodes_nothing(runs: Path) -> None:
    for name in ("a", "b"):
        shutil.rmtree(runs / name / "checkpoints")
        shutil.rmtree(runs / name / "averaged")
    out = typed_in_a_child("compare", "a", "b", "changed=1", cwd=runs).printed
    assert out.startswith("# b against a\n")
    assert "\n## test: 12 sentences\n" in out
    assert "\n## other: 8 sentences\n" in out
    assert out.count("- line ") == 2
    assert "\n\n\n" not in out  # one blank line between paragraphs


def test_compare_counts_words_where_the_run_was_trained(
    runs: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All digits are frequent in the training text; where that has changed, the references are what is left."""
    rows = compared(capsys, "runs=[a,b]")["test_sets"]["test"]
    assert rows["counted_in"] == "the training text of a"
    assert [row["least"] for row in rows["by_rarity"]] == [100]

    text = trained.parent / "corpus" / "train.de"
    before = text.read_bytes()
    try:
        for change in (lambda: text.write_bytes(before + b"eins\n"), text.unlink, (runs / "a/data.json").unlink):
            change()
            rows = compared(capsys, "runs=[a,b]")["test_sets"]["test"]
            assert rows["counted_in"] == "the references"
            assert [row["least"] for row in rows["by_rarity"]] != [100]
            text.write_bytes(before)
    finally:
        text.write_bytes(before)


def test_compare_leaves_out_a_test_set_that_one_run_lacks(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_corpus(runs / "corpus")
    del data.test["other"]
    run(tiny_job(runs / "c", data, max_steps=2, save_every=2, average=1))
    capsys.readouterr()
    found = compared(capsys, "runs=[a,c]")
    assert list(found["test_sets"]) == ["test"]
    assert found["notes"] == ["Not every run was scored on other: left out."]


def test_compare_reads_somebody_elses_translations_of_a_test_set(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `b` keeps, given as a file, is compared as `b` is; the other test set has no such file."""
    published = write(runs / "theirs.de", lines_of(runs / "b/hypotheses/test.hyp"))
    found = compared(capsys, "runs=[a]", f"published.test={published}")
    assert found["systems"] == ["a", "published"]
    assert list(found["test_sets"]) == ["test"]
    of_runs = compared(capsys, "runs=[a,b]")["test_sets"]["test"]
    for key in ("scores", "by_length", "by_rarity", "kept"):
        assert found["test_sets"]["test"][key] == of_runs[key]
    digest = hashlib.sha256(Path(published).read_bytes()).hexdigest()
    assert found["notes"] == [f"published, test: theirs.de, 12 lines, SHA-256 {digest}."]


# ---- what it refuses ------------------------------------------------------------------------------------------------


def remove_results(folder: Path) -> None:
    (folder / "b/results.json").unlink()


def remove_translations(folder: Path) -> None:
    (folder / "b/hypotheses/test.hyp").unlink()


def damage_results(folder: Path) -> None:
    (folder / "b/results.json").write_text("{}", encoding="utf-8")


def damage_references(folder: Path) -> None:
    write(folder / "b/hypotheses/test.ref", ["eins"] * 12)


def rename_sets(folder: Path) -> None:
    change_results(
        folder / "b", lambda results: replace(results, test_sets={"news": next(iter(results.test_sets.values()))})
    )


def score_otherwise(folder: Path) -> None:
    change_results(
        folder / "b",
        lambda results: replace(
            results,
            test_sets={name: replace(of, bleu_signature="tok:zh") for name, of in results.test_sets.items()},
        ),
    )


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (
            remove_results,
            InputError,
            "^b: no results.json, so there is nothing to compare yet: finish it with the command that trains",
        ),
        (remove_translations, InputError, r"^b/hypotheses/test.hyp: cannot be read \(No such file"),
        (damage_results, CheckpointError, r"^b/results.json: Results has no key"),
        (damage_references, CheckpointError, "^b/hypotheses: not the text that results.json was scored on"),
        (rename_sets, InputError, "^the runs have no test set in common: a has test, other; b has news"),
        (
            score_otherwise,
            InputError,
            "^a and b were not scored alike on test: nrefs:1.* and tok:zh; to score both now",
        ),
    ],
    ids=["no results", "no text", "damaged", "other text", "no set in common", "other signatures"],
)
def test_compare_refuses_runs_that_cannot_be_compared(
    runs: Path,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], None],
    error: type[Exception],
    message: str,
) -> None:
    spoil(runs)
    with pytest.raises(error, match=message) as refused:
        compared(capsys, "runs=[a,b]")
    assert "\n" not in str(refused.value)


def test_compare_refuses_test_sets_of_another_text(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tiny_job(runs / "c", write_corpus(runs / "corpus", seed=1), max_steps=2, save_every=2, average=1))
    with pytest.raises(InputError, match=r"^test is not the same test set in a and c: they differ in line 1$"):
        compared(capsys, "runs=[a,c]")
