"""The first reading of the training text: a verdict on the text of every pair.

    empty, identical, duplicate     `screen_pairs`, on all sets in one go
    what a detector finds           those that `data.filter.doctor` asks for, on each set by itself

A verdict takes a byte a pair. A pair that is kept here may still be dropped for its number of pieces: see `building`.
"""

import logging
from collections import Counter
from dataclasses import dataclass
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
    dropped: dict[str, int]  # by reason, in the order of the checks
    samples: dict[str, list[DroppedPair]]  # the first few, by detector


@dataclass(frozen=True)
class Screened:
    """The outcome of the first reading."""

    kept_by_text: bytes  # a byte for each pair of all the sets: 1 for a pair that is kept, else 0
    shards: list[list[int]]  # of each set: the pairs of each of its shards
    counts: TextCounts


def screen(corpus: TrainingText) -> Screened:
    """Read all of the text and judge every pair. Raises InputError where it cannot be read, and where none is kept."""
    shards = [text_set.source.by_shard() for text_set in corpus.sets]
    found = iter(screen_pairs([shard.pairs() for shard in chain.from_iterable(shards)], corpus.filters))
    of_shards = [list(islice(found, len(of_set))) for of_set in shards]
    verdicts = [bytearray().join(of_set) for of_set in of_shards]
    detectors, samples = _clean(corpus, verdicts)

    reasons = REASONS | dict(enumerate(detectors, FIRST_DETECTOR))
    counts = TextCounts(
        read=[len(of_set) for of_set in verdicts],
        kept=[of_set.count(KEPT) for of_set in verdicts],
        dropped={reason: sum(of_set.count(code) for of_set in verdicts) for code, reason in reasons.items()},
        samples=samples,
    )
    refuse_empty(sum(counts.kept), corpus, counts.dropped)
    kept_by_text = b"".join(of_set.translate(KEPT_MASK) for of_set in verdicts)
    return Screened(kept_by_text, [[len(shard) for shard in of_set] for of_set in of_shards], counts)


def _clean(corpus: TrainingText, verdicts: list[bytearray]) -> tuple[list[str], dict[str, list[DroppedPair]]]:
    """Give the verdicts of the detectors on the pairs that were kept; their names, and samples of what they drop."""
    screens = screens_of(corpus.filters.doctor or [])
    detectors = [name for _, names in screens for name in names]
    if screens:
        log.info("looking for faults: %s", ", ".join(detectors))
    samples: dict[str, list[DroppedPair]] = {}
    for number, (text_set, codes) in enumerate(zip(corpus.sets, verdicts, strict=True)):
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
    return detectors, samples


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
