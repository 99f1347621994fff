"""Lines of several sentences: they are noticed where training had hardly any, and translated sentence by sentence."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.paths import TESTS
from support.translations import output_of, write_run
from transformer.config.jobs import EvaluateJob, TranslateJob
from transformer.config.primitives import from_json, to_json
from transformer.config.settings import Device, PairConfig, Precision
from transformer.data.corpus import LONGEST_LINE, has_several_sentences
from transformer.data.report import DataReport, LineCounts
from transformer.errors import InputError
from transformer.evaluation.sets import evaluate
from transformer.files import read_json, write_json
from transformer.run_dir import RunDir
from transformer.tools.sentences import Sentences

OLD_REPORT = TESTS / "data" / "run_of_1bd6cd8" / "data.json"


def report_of(**changes: Any) -> DataReport:
    """What 1bd6cd8 wrote of 3,000 pairs, and what was counted since."""
    return replace(from_json(DataReport, read_json(OLD_REPORT)), **changes)


@pytest.fixture
def run_dir(spm: bytes, tmp_path: Path) -> Path:
    """A run of single sentences: one of 3,000 sources had two, and hardly one had more than 20 pieces."""
    folder = write_run(tmp_path / "a", spm, seed=1, tag="<2fr>")
    write_json(RunDir(folder).data, to_json(report_of(lines=LineCounts(several_sentences=1, usual_pieces=20))))
    return folder


# ---- several sentences ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        *(
            "She reads. He sleeps.",
            "Oh! he said",
            '"Go!" he said.',
            "He said “go.” Then",
            "Go . Now .",
            "In 1990. Then",
            "The best. Ever",
            "To Dr. Hill. Then",
        ),
        *("Was? Ja", "wait… no", "我喜欢读书。她正在做饭", "はい！いいえ", "هل أنت هنا؟ نعم", "यह है। वह है"),
    ],
)
def test_has_several_sentences(text: str) -> None:
    assert has_several_sentences(text)


@pytest.mark.parametrize(
    "text",
    [
        *("She reads.", "", ".", "no mark", "at 3.5 km", "am 3. Mai und 12. Juni", "z. B. so", "J. Smith", "(Yes.)"),
        *("Mr. Smith", "Mrs. and Ms. Hill", "bei Dr. Weiß", "bei Prof. Weiß", "in St. Petersburg"),
        *("Was?! ", "wait . . .", "我喜欢读书。", "“好吗？”", "a.b c.d"),
    ],
)
def test_has_several_sentences_is_false_of_one(text: str) -> None:
    assert not has_several_sentences(text)


@pytest.mark.parametrize("mark", [". ", "??? ", '." '])
def test_has_several_sentences_takes_a_row_of_marks_for_one(mark: str) -> None:
    """In a moment, as long as a line can be: to try every mark to its end would take a quarter of an hour."""
    assert not has_several_sentences(mark * (LONGEST_LINE // len(mark)))


# ---- the warning ----------------------------------------------------------------------------------------------------

TWO = b"a dog sees a cat . the cat sleeps .\n"
LONG = b"a dog and a cat and a dog and a cat and a dog and a cat and a dog and a cat\n"
ONE = b"a dog sees a cat .\n\n"


@pytest.mark.parametrize(
    ("given", "counts", "said"),
    [
        (ONE + TWO + TWO, (29, 40), "of 4 lines, 2 have several sentences, as 0.97% of the training sources have: the"),
        (ONE + LONG, (29, 20), "of 3 lines, 1 have more than 20 pieces, as hardly a training source has: the model"),
        (
            TWO + LONG,
            (1, 20),
            "of 2 lines, 1 have several sentences, as 0.03% of the training sources have, and 1 have",
        ),
        (TWO, (30, 40), None),  # one in a hundred
        (ONE, (0, 20), None),
        (b"", (0, 20), None),
    ],
)
def test_translate_warns_once_of_lines_unlike_those_of_training(
    given: bytes, counts: tuple[int, int], said: str | None, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    report = report_of(lines=LineCounts(*counts))
    assert report.pairs_kept == 3_000
    write_json(RunDir(run_dir).data, to_json(report))
    output_of(run_dir, given)
    warnings = [
        record.message for record in caplog.records if "of the training" in record.message or "pieces" in record.message
    ]
    assert len(warnings) == (said is not None)
    if said is not None:
        assert warnings[0].startswith(said)
        assert warnings[0].endswith("with split=true")


@pytest.mark.parametrize("report", ["missing", "damaged", "old", "of no pair"])
def test_translate_warns_of_nothing_without_counts(
    report: str, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = RunDir(run_dir).data
    match report:
        case "missing":
            path.unlink()
        case "damaged":
            path.write_text("{", encoding="utf-8")
        case "old":
            shutil.copy(OLD_REPORT, path)
        case _:
            write_json(path, to_json(report_of(lines=LineCounts(5, 40), pairs_kept=0)))
    output_of(run_dir, ONE + TWO)
    assert not [record for record in caplog.records if "sentences" in record.message]


def test_evaluate_warns_once_of_all_its_sets(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    sets = {}
    for name, text in (("first", TWO + ONE), ("second", TWO)):
        path = run_dir / name
        path.write_bytes(text)
        sets[name] = PairConfig(str(path), str(path))
    evaluate(EvaluateJob(run_dir=str(run_dir), device=Device.cpu, precision=Precision.fp32, threads=1, test=sets))
    (warning,) = [record.message for record in caplog.records if "sentences" in record.message]
    assert warning.startswith("of 4 lines, 2 have several sentences, as 0.03% of")


# ---- sentence by sentence -------------------------------------------------------------------------------------------


@pytest.fixture
def needs_sentencex() -> None:
    pytest.importorskip("sentencex")


@pytest.mark.usefixtures("needs_sentencex")
def test_translate_splits_lines_and_joins_them(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    sentences = ["A dog sees the old cat.", "The bird sleeps.", "A green house runs under a tree!"]
    alone = output_of(run_dir, "".join(f"{sentence}\n" for sentence in sentences).encode()).split("\n")
    lines = ["  ".join(sentences), "", sentences[1], f"{sentences[2]} {sentences[0]}"]
    found = output_of(run_dir, "".join(f"{line}\n" for line in lines).encode(), split=True)
    assert found.split("\n") == [" ".join(alone[:3]), "", alone[1], f"{alone[2]} {alone[0]}", ""]
    assert not [record for record in caplog.records if "several" in record.message]


@pytest.mark.usefixtures("needs_sentencex")
def test_translate_puts_the_tag_in_front_of_each_sentence(run_dir: Path) -> None:
    alone = output_of(run_dir, b"A dog runs.\nThe cat sleeps.\n", tag="<2fr>").split("\n")
    found = output_of(run_dir, b"A dog runs. The cat sleeps.\n", tag="<2fr>", split=True)
    assert found == f"{alone[0]} {alone[1]}\n"


@pytest.mark.usefixtures("needs_sentencex")
def test_translate_names_the_line_of_a_sentence_that_is_too_long(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = b"A dog. A cat. A bird.\nA dog. " + b"house " * 70 + b".\n"
    output_of(run_dir, given, split=True)
    (warning,) = [record.message for record in caplog.records if "model.max_positions" in record.message]
    assert warning.startswith("line 2: ")
    with pytest.raises(InputError, match=r"^line 2: \d+ pieces"):
        output_of(run_dir, given, split=True, strict=True)


@pytest.mark.usefixtures("needs_sentencex")
@pytest.mark.parametrize(("language", "between"), [("de", " "), ("zho", ""), ("ja", ""), ("th", " "), ("ko", " ")])
def test_sentences_are_joined_as_the_target_language_writes_them(
    language: str, between: str, spm: bytes, tmp_path: Path
) -> None:
    """Where there are several directions, that of the tag."""
    run_dir = write_run(tmp_path / "a", spm, seed=1, tag="<2x>", languages=("my own language", language))
    sentences = Sentences.of(TranslateJob(str(run_dir), tag="<2x>"))
    assert sentences.split(["One dog. Two cats.", " ", "x"]) == [["One dog.", "Two cats."], [" "], ["x"]]
    assert sentences.join(["A", "B", "", "C", "", "D"], [2, 1, 3]) == [f"A{between}B", "", f"C{between}D"]


@pytest.mark.usefixtures("needs_sentencex")
def test_sentences_follow_the_rules_of_the_source_language(spm: bytes, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "a", spm, seed=1, tag="<2en>", languages=("deu", "en"))
    text = "Das war am 3. Mai 1990. Es regnete."
    assert Sentences.of(TranslateJob(str(run_dir), tag="<2en>")).split([text]) == [
        ["Das war am 3. Mai 1990.", "Es regnete."]
    ]
    assert len(Sentences.of(TranslateJob(str(run_dir))).split([text])[0]) == 3, "by the rules of English"


def test_translate_names_what_splitting_needs(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "sentencex", None)
        with pytest.raises(InputError, match=r"^split=true needs sentencex: pip install 'sentencex>=\S+'$"):
            output_of(run_dir, b"a\n", split=True)
