"""`translate keep=...`: which pairs are kept to train on, what becomes of the others, and who reads what is written."""

import json
import logging
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from transformer.config.settings import LineFormat, PairConfig
from transformer.data.source import resolve_source
from transformer.decoding.output import Translation
from transformer.decoding.stream import summed
from transformer.tools.detectors.text import is_loop
from transformer.tools.synthetic import Pairs

SOURCE = "ein Satz von einiger, aber nicht von großer Länge"
TARGET = "a sentence of some length, but of no great length"

# Each is dropped for the reason that it is named after; a mean of 0 is the most probable one.
UNSOUND = {
    "empty": ("", "", True),
    "empty, and no source of it": (SOURCE, "\u200b ", True),
    "unfinished": (SOURCE, TARGET, False),
    "copies": (SOURCE, f"{SOURCE} ", True),
    "loops": (SOURCE, "a sentence of a sentence of a sentence of some length", True),
    "lengths": (SOURCE, "a set", True),
    "lengths, too": ("ein Satz", TARGET, True),
}


def translated(text: str, mean: float | None, *, finished: bool = True) -> Translation:
    """A translation of four pieces."""
    if mean is None:
        return Translation(text, None, None, finished=finished, alignment=None)
    return Translation(text, 4 * mean, 0.0, finished=finished, alignment=None, length=4)


def chosen(pairs: Pairs, blocks: list[list[tuple[str, Translation]]]) -> tuple[str, dict[str, float]]:
    """What is written of these blocks, and what is counted."""
    drafts, line = [], 1
    for block in blocks:
        drafts.append(pairs.draft([source for source, _ in block], [found for _, found in block], first_line=line))
        line += len(block)

    def read() -> Iterator[str]:
        return (draft.text for draft in drafts)

    outputs = list(pairs.finish(read))
    counted = summed([output.tally for output in [*drafts, *outputs]])
    return "".join(output.text for output in outputs), {name: count for name, count in counted.items() if count}


TSV = Pairs(0.5, LineFormat.tsv, ("de", "en"))


# --- what is kept


@pytest.mark.parametrize("name", UNSOUND)
def test_pairs_drop_what_is_unsound_however_probable_it_is(name: str) -> None:
    source, target, finished = UNSOUND[name]
    others = [(SOURCE, translated(TARGET, -1.0 - n)) for n in range(4)]
    unsound = (source, translated(target, 0.0 if source else None, finished=finished))
    text, counted = chosen(TSV, [others[:2], [unsound, *others[2:]]])
    assert counted == {name.partition(",")[0]: 1, "kept": 2, "improbable": 2}
    assert text == f"de\ten\tmean_log_prob\tline\n{SOURCE}\t{TARGET}\t-1.0000\t1\n{SOURCE}\t{TARGET}\t-2.0000\t2\n"


def test_pairs_do_not_ask_for_long_and_different_names_and_numbers() -> None:
    sound = [("Berlin", "Berlin"), ("10", "ten"), ("Bernd", "B")]
    text, counted = chosen(Pairs(1.0, LineFormat.tsv, ("de", "en")), [[(a, translated(b, -1.0)) for a, b in sound]])
    assert counted == {"kept": 3}
    assert [row.split("\t")[:2] for row in text.split("\n")[1:-1]] == [list(pair) for pair in sound]


@pytest.mark.parametrize(
    ("keep", "kept"),
    [(1.0, 100), (0.9, 90), (0.55, 55), (0.551, 56), (0.01, 1), (0.001, 1), (0.005, 1)],
)
@pytest.mark.parametrize("size", [1, 7, 100])
def test_pairs_keep_the_most_probable_share_of_all_blocks(keep: float, kept: int, size: int) -> None:
    means = [-(37 * n % 100) / 16 for n in range(100)]  # of each once
    rows = [(f"{SOURCE} {n}", translated(TARGET, mean)) for n, mean in enumerate(means)]
    pairs = Pairs(keep, LineFormat.jsonl, ("de", "en"))
    text, counted = chosen(pairs, [rows[n : n + size] for n in range(0, 100, size)])
    assert counted == {"kept": kept} | ({} if kept == 100 else {"improbable": 100 - kept})

    best = sorted(means, reverse=True)[:kept]
    expected = [
        {"de": f"{SOURCE} {n}", "en": TARGET, "mean_log_prob": m, "line": n + 1}
        for n, m in enumerate(means)
        if m in best
    ]
    assert [json.loads(row) for row in text.split("\n")[:-1]] == expected


def test_pairs_of_equal_probability_are_kept_together() -> None:
    rows = [(SOURCE, translated(TARGET, mean)) for mean in (-2.00001, -1.0, -2.0, -2.00002, -3.0)]
    assert chosen(TSV, [rows])[1] == {"kept": 4, "improbable": 1}


def test_pairs_know_the_usual_lengths_of_two_languages() -> None:
    """A translation of a fifth of the letters is usual in one text, and an outlier in another."""
    short, long = "x" * 20, "y" * 100
    _, counted = chosen(
        Pairs(1.0, LineFormat.tsv, ("de", "zh")),
        [[(long, translated(short, -1.0))] * 3, [(long, translated("z" * 100, -1.0))]],
    )
    assert counted == {"kept": 3, "lengths": 1}


def test_pairs_keep_a_share_of_those_of_usual_length() -> None:
    """Of five, the three most probable; three of another length, more probable than all of them, take no place."""
    rows = [(SOURCE, translated(TARGET, -1.0 - n)) for n in range(5)] + [(SOURCE, translated("a set", 0.0))] * 3
    assert chosen(TSV, [rows])[1] == {"kept": 3, "improbable": 2, "lengths": 3}


def test_pairs_of_nothing_are_none() -> None:
    assert chosen(TSV, []) == ("de\ten\tmean_log_prob\tline\n", {})
    assert chosen(Pairs(0.5, LineFormat.jsonl, ("de", "en")), [[]]) == ("", {})


def test_pairs_hold_for_what_the_model_thinks_impossible() -> None:
    rows = [(SOURCE, translated(TARGET, mean)) for mean in (-math.inf, -1.0)]
    assert chosen(TSV, [rows])[1] == {"kept": 1, "improbable": 1}
    text, _ = chosen(Pairs(1.0, LineFormat.jsonl, ("de", "en")), [rows])
    assert [json.loads(row)["mean_log_prob"] for row in text.split("\n")[:-1]] == [None, -1.0]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("ein Mann", "a man, a man and a woman", True),
        ("ein Mann", "a man and a man", False),
        ("ein Mann", "man man man", True),
        ("ein Mann", "a man man", False),
        ("ein Mann", "near the old red house near the old red house", True),
        ("nein, nein, nein", "no, no, no", False),
        ("guter Mann, guter Mann", "good man, good man", False),
        ("ein Mann", "一个男人一个男人一个男人", True),
        ("ein Mann", "一个男人一个男人", False),
        ("ein Mann ...", "おとこ・・・", False),
        ("eine Landschaft", "a lularularularularularscape", True),
        ("eine Million", "1000000", False),
        ("", "", False),
    ],
)
def test_is_loop(source: str, target: str, expected: bool) -> None:
    assert is_loop(source, target) is expected


# --- what is written


@pytest.mark.parametrize("suffix", [".tsv", ".jsonl"])
def test_a_training_in_either_direction_reads_what_is_written(suffix: str, tmp_path: Path) -> None:
    nasty = 'a "tab\t", \x85 a\r line, \u2028 and\\ "'
    kind = LineFormat.tsv if suffix == ".tsv" else LineFormat.jsonl
    rows = [(f"{nasty}\r", translated(TARGET, -1.0)), (SOURCE, translated(nasty, -2.0))]
    text, _ = chosen(Pairs(1.0, kind, ("de", "en")), [rows])
    path = tmp_path / f"news{suffix}"
    path.write_text(text, encoding="utf-8", newline="\n")

    shown = nasty if kind is LineFormat.jsonl else 'a "tab ",   a  line,   and\\ "'
    expected = [(shown, TARGET), (SOURCE, shown)]
    pair = PairConfig(dataset=str(path))
    for languages, pairs in {("de", "en"): expected, ("en", "de"): [(b, a) for a, b in expected]}.items():
        source = resolve_source(pair, "data.extra.bt", languages=languages, store_dir=tmp_path)
        assert list(source.pairs()) == pairs


def test_pairs_report_what_was_dropped(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    TSV.report({"kept": 9_000.0, "loops": 10, "improbable": 1_000, "lines": 5})
    TSV.report(Counter())
    assert caplog.messages == [
        "kept 9,000 of 10,010 lines as pairs to train on; dropped: loops 10, improbable 1,000",
        "kept 0 of 0 lines as pairs to train on; dropped: none",
    ]


# --- which jobs
