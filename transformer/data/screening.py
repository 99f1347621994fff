"""The first reading of the training text: a verdict on the text of every pair.

    empty, identical, duplicate     `screen_pairs`, on all sets in one go
    what a detector finds           those that `data.filter.doctor` asks for, on each set by itself

A verdict takes a byte a pair. A pair that is kept here may still be dropped for its number of pieces: see `building`.
"""

import logging
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain, islice

from transformer.data.corpus import DUPLICATE, EMPTY, IDENTICAL, KEPT, screen_pairs
from transformer.data.report import DroppedPair
from transformer.data.training_text import TrainingText, screens_of
from transformer.errors import InputError

MOST_NAMED = 4  # files that an error names
SAMPLES = 5  # pairs that are shown of what each detector has dropped
SHOWN = 200  # characters of each of their sides

REASONS = {EMPTY: "empty", IDENTICAL: "identical", DUPLICATE: "duplicate"}  # of the verdicts that `screen_pairs` gives
FIRST_DETECTOR = DUPLICATE + 1  # the verdict of the first name that is asked

# For bytes.translate: the verdict on a pair becomes 1 if it is kept, else 0.
KEPT_MASK = bytes(code == KEPT for code in range(256))

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TextCounts:
    """How many pairs of the training text are kept by their text, and why the others are dropped."""

    read: list[int]  # of each set
    kept: list[int]  # of each set
    dropped: dict[str, int]  # by reason
    samples: dict[str, list[DroppedPair]]  # the first few, by detector


@dataclass(frozen=True)
class Screened:
    """The outcome of the first reading."""

    verdicts: list[bytes]  # of each set, as `screen_pairs` gives them, with those of the detectors
    shards: list[list[int]]  # of each set: the pairs of each of its shards
    detectors: list[str] = field(default_factory=list)  # in the order in which they were asked
    samples: dict[str, list[DroppedPair]] = field(default_factory=dict)  # by detector

    @property
    def kept_by_text(self) -> bytes:
        """A byte for each pair of all the sets: 1 for a pair that is kept, else 0."""
        return b"".join(self.verdicts).translate(KEPT_MASK)

    def count(self) -> TextCounts:
        """What the report says of them."""
        return TextCounts(
            read=[len(verdicts) for verdicts in self.verdicts],
            kept=[verdicts.count(KEPT) for verdicts in self.verdicts],
            dropped={
                reason: sum(verdicts.count(code) for verdicts in self.verdicts)
                for code, reason in (REASONS | dict(enumerate(self.detectors, FIRST_DETECTOR))).items()
            },
            samples=self.samples,
        )


def screen(corpus: TrainingText) -> Screened:
    """Read all of the text and judge every pair. Raises InputError where it cannot be read, and where none is kept."""
    shards = [text_set.source.parts() for text_set in corpus.sets]
    found = iter(screen_pairs([shard.pairs() for shard in chain.from_iterable(shards)], corpus.filters))
    verdicts = [list(islice(found, len(of_set))) for of_set in shards]
    screened = _clean(
        corpus,
        Screened([b"".join(of_set) for of_set in verdicts], [[len(shard) for shard in of_set] for of_set in verdicts]),
    )
    counts = screened.count()
    refuse_empty(sum(counts.kept), corpus, counts.dropped)
    return screened


def _clean(corpus: TrainingText, screened: Screened) -> Screened:
    """The verdicts, with those of the detectors on the pairs that were kept, and samples of what these drop."""
    screens = screens_of(corpus.filters.doctor or [])
    if not screens:
        return screened

    detectors = [name for _, names in screens for name in names]
    log.info("looking for faults: %s", ", ".join(detectors))
    verdicts = []
    samples: dict[str, list[DroppedPair]] = {}
    for number, text_set in enumerate(corpus.sets):
        codes = bytearray(screened.verdicts[number])
        for one, names in screens:
            faults = one.find_faults(text_set.source.pairs, names, text_set.codes)
            for index, (fault, pair) in enumerate(zip(faults, text_set.source.pairs(), strict=True)):
                if fault is None or codes[index] != KEPT:
                    continue
                codes[index] = FIRST_DETECTOR + detectors.index(fault)
                shown = samples.setdefault(fault, [])
                if len(shown) < SAMPLES:
                    texts = (text[:SHOWN].replace("\0", "\ufffd") for text in pair)  # no record may hold a NUL
                    shown.append(DroppedPair(number, index + 1, *texts))
        verdicts.append(bytes(codes))
    return Screened(verdicts, screened.shards, detectors, samples)


def refuse_empty(kept: int, corpus: TrainingText, dropped: dict[str, int]) -> None:
    """Raise InputError where no pair is kept."""
    if kept > 0:
        return
    paths = [file.path for text_set in corpus.sets for file in text_set.files.values()]
    files = ", ".join(paths[:MOST_NAMED]) + (f" and {len(paths) - MOST_NAMED} more" if len(paths) > MOST_NAMED else "")
    counts = Counter(dropped)
    reasons = ", ".join(f"{reason} {count}" for reason, count in dropped.items() if count) or "the files are empty"
    have_no_text = counts.total() == counts["empty"] + counts["no_pieces"]  # no setting of data.filter drops those
    remedy = "data.train" if have_no_text else "data.filter"
    raise InputError(f"{files}: no sentence pair is left to train on ({reasons}): check {remedy}")
