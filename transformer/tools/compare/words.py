"""Words, for `compare`: how well systems translate frequent and rare ones.

the text that the baseline was trained on -> count_training_words -> how often each word occurs
translations, references and that         -> score_by_rarity      -> a row for each range of frequencies

Words are what BLEU counts, the tokens of its tokenizer. For Chinese and Japanese these are no words between spaces.
"""

import logging
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from pathlib import Path

from transformer.data.corpus import Pair
from transformer.data.report import FileReport, SetReport, read_report
from transformer.data.source import Source
from transformer.errors import CheckpointError
from transformer.files import digest_file
from transformer.run_dir import RunDir
from transformer.tools.significance import Metrics

log = logging.getLogger(__name__)

FREQUENCIES = (0, 1, 2, 5, 10, 100, 1000)  # occurrences, the least of each range of words
MOST_LINES = 1_000_000  # training sentences whose words are counted

Tokenise = Callable[[str], Sequence[str]]
Words = Sequence[str]  # of one sentence


@dataclass(frozen=True)
class WordCounts:
    """How often each word occurs, and in which text that was counted."""

    place: str
    words: Mapping[str, int]


@dataclass(frozen=True)
class RarityRow:
    """For the words that occur `least` to `most` times: the F1, in percent, with which each system translates them."""

    least: int
    most: int | None
    words: int  # of the references
    f1: list[float]


def ranges(least: Sequence[int]) -> Iterator[tuple[int, int | None]]:
    """The least and the most of each range, from the least of each; the last one has no end."""
    for start, following in pairwise(least):
        yield start, following - 1
    yield least[-1], None


def word_splitter(metrics: Metrics) -> Tokenise:
    """A function that splits a text into the words that BLEU counts."""

    def split(text: str) -> Sequence[str]:
        words: str = metrics.bleu.tokenizer(text.lower() if metrics.text.lowercase else text)
        return words.split()

    return split


# ---- F1 -------------------------------------------------------------------------------------------------------------


def score_by_rarity(
    systems: Sequence[Sequence[Words]], references: Sequence[Words], frequencies: Mapping[str, int]
) -> list[RarityRow]:
    """How well each system translates the words of each range of frequencies that there are in the references.

    A word of a sentence is matched as often as both the translation and the reference have it.
    """
    in_references = _count_by_range(chain.from_iterable(references), frequencies)
    in_systems = [_count_by_range(chain.from_iterable(translations), frequencies) for translations in systems]
    matched_by_system = [_count_matches(translations, references, frequencies) for translations in systems]

    rows = []
    for number, (least, most) in enumerate(ranges(FREQUENCIES), 1):
        words = in_references[number]
        if words:
            f1 = [
                100 * 2 * matched[number] / (in_translations[number] + words)
                for in_translations, matched in zip(in_systems, matched_by_system, strict=True)
            ]
            rows.append(RarityRow(least, most, words=words, f1=f1))
    return rows


def _count_by_range(words: Iterable[str], frequencies: Mapping[str, int]) -> Counter[int]:
    """How many of the words are in each range of frequencies, by the number of the range, counted from 1."""
    return Counter(bisect(FREQUENCIES, frequencies.get(word, 0)) for word in words)


def _count_matches(
    translations: Sequence[Words], references: Sequence[Words], frequencies: Mapping[str, int]
) -> Counter[int]:
    """How many words of each range the translations share with the references."""
    matched: Counter[int] = Counter()
    for translation, reference in zip(translations, references, strict=True):
        shared = Counter(translation) & Counter(reference)
        matched += _count_by_range(shared.elements(), frequencies)
    return matched


# ---- how often a word occurs ----------------------------------------------------------------------------------------


def count_training_words(run: RunDir, tokenise: Tokenise) -> WordCounts | None:
    """The words of the target text that a run was trained on; None, with a log line, if it has moved or changed."""
    try:
        report = read_report(run)
    except CheckpointError as error:
        log.warning("%s", error)
        return None

    training_sets = [one for one in report.sets.values() if one.weight is not None]
    files = [file for training_set in training_sets for file in training_set.files.values()]
    if not all(map(_is_unchanged, files)):
        log.info("%s: its training text has moved: word frequencies are counted in the references", run.path)
        return None

    # Count the words of the target side.
    words: Counter[str] = Counter()
    pairs = chain.from_iterable(map(_pairs_of, training_sets))
    for _, target in islice(pairs, MOST_LINES):
        words.update(tokenise(target))

    # Say where they were counted.
    n_pairs = sum(training_set.pairs_read for training_set in training_sets)
    part = f"the first {MOST_LINES:,} sentences of " if n_pairs > MOST_LINES else ""
    return WordCounts(f"{part}the training text of {run.path}", words)


def _is_unchanged(file: FileReport) -> bool:
    """Whether a file is still what it was when the run was prepared."""
    try:
        digest = digest_file(Path(file.path))
    except OSError:
        return False
    return digest.size == file.bytes and digest.sha256 == file.sha256


def _pairs_of(report: SetReport) -> Iterator[Pair]:
    """The sentence pairs of a set, read again."""
    columns = None if report.columns is None else (report.columns[0], report.columns[1])
    files = [Path(file.path) for file in report.files.values()]
    width = 1 if columns else 2  # a table, or text and its translation
    return Source([tuple(files[i : i + width]) for i in range(0, len(files), width)], columns).pairs()
