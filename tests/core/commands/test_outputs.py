"""What `translate` writes beside the text of the best translation: n best, scores and alignments, in three formats."""

import io
import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest

from support.translations import objects_of, output_of, write_run
from transformer.config.jobs import TranslateJob
from transformer.config.settings import (
    Device,
    LineFormat,
    Precision,
)
from transformer.decoding.output import Alignment, Scored, Translation, format_log_probs, format_translations
from transformer.decoding.translate_stream import run as translate
from transformer.decoding.translator import Translator


@pytest.fixture(scope="module")
def run_dir(spm: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "a", spm, seed=1)


def rows_of(text: str) -> list[list[str]]:
    return [row.split("\t") for row in text.split("\n")[:-1]]


# --- the lines of each format, from values written by hand

NASTY = "a\tb\x00\x0b\x85\u2028c\x1fd\x7fe"
HAND_WRITTEN = [
    [Translation("ein Hund", -1.25, -1.0, True, None), Translation(NASTY, -2.0000004, -1.6, False, None)],
    [Translation("", None, None, True, None)],
    [Translation("ü \u2029", -math.inf, -math.inf, False, Alignment(["▁x", "y"], ["▁ü"], [1]))],
]


def test_format_translations_tsv_has_five_columns_whatever_the_text() -> None:
    text = format_translations(HAND_WRITTEN, LineFormat.tsv, first_line=7)
    assert text == (
        "7\t1\t-1.250000\t-1.000000\tein Hund\n"
        "7\t2\t-2.000000\t-1.600000\ta b    c d e\n"
        "8\t1\t\t\t\n"
        "9\t1\t-inf\t-inf\tü  \n"
    )
    assert len(text.splitlines()) == 4, "nor for a reader who knows other ends of lines"


def test_format_translations_jsonl_keeps_every_character() -> None:
    text = format_translations(HAND_WRITTEN, LineFormat.jsonl, first_line=7)
    assert len(text.splitlines()) == 3
    assert objects_of(text) == [
        {
            "line": 7,
            "translations": [
                {"text": "ein Hund", "log_prob": -1.25, "score": -1.0, "finished": True},
                {"text": NASTY, "log_prob": -2.0, "score": -1.6, "finished": False},
            ],
        },
        {"line": 8, "translations": [{"text": "", "log_prob": None, "score": None, "finished": True}]},
        {
            "line": 9,
            "translations": [
                {
                    "text": "ü \u2029",
                    "log_prob": None,
                    "score": None,
                    "finished": False,
                    "source_pieces": ["▁x", "y"],
                    "pieces": ["▁ü"],
                    "source_of": [1],
                }
            ],
        },
    ]
    assert "ü" in text, "readable, not escaped"


def test_format_translations_text_is_the_best_alone() -> None:
    assert format_translations([of_line[:1] for of_line in HAND_WRITTEN], LineFormat.text, first_line=1) == (
        "ein Hund\n\nü \u2029\n"
    )


def test_format_scores_writes_a_line_for_each_pair() -> None:
    scored = [Scored(-3.5, -3.0, ["▁a", "</s>"], [-1.5, -2.0]), Scored(None, None, [], [])]
    how: dict[str, Any] = {"first_line": 4, "by_piece": False}
    assert format_log_probs(scored, LineFormat.text, **how) == "-3.500000\n\n"
    assert format_log_probs(scored, LineFormat.tsv, **how) == "4\t-3.500000\t-3.000000\t2\n5\t\t\t0\n"
    assert objects_of(format_log_probs(scored, LineFormat.jsonl, **how)) == [
        {"line": 4, "log_prob": -3.5, "score": -3.0, "length": 2},
        {"line": 5, "log_prob": None, "score": None, "length": 0},
    ]
    [by_piece, _] = objects_of(format_log_probs(scored, LineFormat.jsonl, first_line=4, by_piece=True))
    assert (by_piece["pieces"], by_piece["piece_log_probs"]) == (["▁a", "</s>"], [-1.5, -2.0])


# --- the command

GIVEN = b"two old dog near the tree\n\nthe cat sees a bird .\n \t\nsmall house\n"


def test_translate_writes_the_same_translations_in_every_format(run_dir: Path, translator: Translator) -> None:
    texts = GIVEN.decode("utf-8").split("\n")[:-1]
    expected = translator.hypotheses(translator.tokenizers.source.encode([texts[n] for n in (0, 2, 4)]), n_best=3)
    spelt = [translator.tokenizers.source.decode([one.tokens for one in of_one]) for of_one in expected]

    plain = output_of(run_dir, GIVEN).split("\n")
    assert plain == [spelt[0][0], "", spelt[1][0], "", spelt[2][0], ""]

    rows = rows_of(output_of(run_dir, GIVEN, format=LineFormat.tsv, n_best=3))
    assert [row[:2] for row in rows] == [
        *(["1", "1"], ["1", "2"], ["1", "3"], ["2", "1"]),
        *(["3", "1"], ["3", "2"], ["3", "3"], ["4", "1"]),
        *(["5", "1"], ["5", "2"], ["5", "3"]),
    ]
    assert rows[3][2:] == rows[7][2:] == ["", "", ""]
    assert [row[4] for row in rows if row[2]] == [text for of_one in spelt for text in of_one]

    found = objects_of(output_of(run_dir, GIVEN, format=LineFormat.jsonl, n_best=3))
    assert [one["line"] for one in found] == [1, 2, 3, 4, 5]
    for one, hypotheses, of_one in zip([found[0], found[2], found[4]], expected, spelt, strict=True):
        assert [t["text"] for t in one["translations"]] == of_one
        for written, hypothesis in zip(one["translations"], hypotheses, strict=True):
            # float32 weights on disk, float64 here and there: the same numbers up to six decimals
            length = len(hypothesis.tokens) + hypothesis.finished
            assert written["finished"] == hypothesis.finished
            assert written["log_prob"] == pytest.approx(hypothesis.log_prob, abs=1e-4)
            assert written["score"] == pytest.approx(hypothesis.log_prob / ((5 + length) / 6) ** 0.6, abs=1e-4)


# --- while it goes on


def test_translate_answers_before_it_has_read_much(run_dir: Path) -> None:
    """Of a file that could be read at once."""
    read_before_each_write: list[int] = []

    stdin = io.BytesIO(b"a dog\n" * 20_000)

    class Output(io.BytesIO):
        def write(self, data: Any, /) -> int:
            read_before_each_write.append(stdin.tell())
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        translate(TranslateJob(run_dir=str(run_dir), device=Device.cpu, threads=1), stdin, Output())
    assert read_before_each_write == [16_384]


def test_translate_gives_free_memory_back_now_and_then(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[int] = []
    monkeypatch.setattr("transformer.machine.trim_heap", lambda: trims.append(1))
    output_of(run_dir, b"\n" * 60_000)
    assert trims == []
    monkeypatch.setattr("transformer.machine.TRIM_SECONDS", -1.0)
    output_of(run_dir, b"\n" * 60_000)
    assert len(trims) == 3, "after blocks of 16, 32 and 12 kB"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_translate_says_how_fast_it_was(
    run_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line at the end; on a terminal in a live one. Somebody who types is told when to begin."""
    with caplog.at_level(logging.INFO):
        output_of(run_dir, GIVEN)
    assert re.fullmatch(r"5 lines in \d+\.\d s, \d+\.\d a second", caplog.messages[-1])

    caplog.clear()
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with caplog.at_level(logging.INFO):
        output_of(run_dir, GIVEN)
    assert "5line [" in terminal.getvalue()
    assert caplog.messages == []

    class Typed(io.BytesIO):
        def isatty(self) -> bool:
            return True

    silent = Terminal()
    monkeypatch.setattr("sys.stderr", silent)
    with caplog.at_level(logging.INFO):
        job = TranslateJob(run_dir=str(run_dir), device=Device.cpu, precision=Precision.fp64, threads=1)
        translate(job, Typed(GIVEN), io.BytesIO())
    assert (silent.getvalue(), caplog.messages) == ("", ["ready: type a sentence; Ctrl-D ends"])
