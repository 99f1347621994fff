"""Whether line n of one side translates line n of the other, by lexicons that a sample has taught.

    a sample -> Bags of words -> two Lexicons, each of half of its blocks -> Gains of other blocks

A lexicon remembers the pairs that it has learned from, so it is asked about others only. A source sentence is read with
its own target, with those of its neighbours, and with a far one in the same block. Its gain is how much better than
word frequencies it predicts a target; the far target shows the gain of a pair that is no translation. The mean gain of
a block is compared with the standard error of that mean, so that no corpus needs thresholds of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from transformer.data.store import Ids
from transformer.tools.detectors.lexicon import Bags, Floats, Lexicon, stems_of
from transformer.tools.detectors.sample import BLOCK, BlockSample

SHIFTS = (-2, -1, 1, 2)  # lines by which targets may come too late
FAR = 17  # lines to a sentence that shares no more with this one than the subject of the text
FEWEST_TO_LEARN = 400  # pairs, for a lexicon
MOST_LINKS = 8_000_000  # of a word with a word of the other side, in all pairs: seconds, and some hundred megabytes
CERTAIN = 5.0  # standard errors by which one mean must exceed another
LEARNED = 8.0  # standard errors by which true pairs must exceed far ones, for the lexicon to be of use
CONTRARY = 6.0  # nats of a pair's words against its being a translation, to be certain that it is none
UNRELATED = 0.25  # of the usual gain: a block with less has sentences that do not translate each other
RATIO = 4.0  # a pair is an outlier where the ratio of its lengths is so many times the usual one
SHORT = 40  # characters: shorter pairs may have any lengths


@dataclass(frozen=True)
class Sides:
    """The sentences of some pairs as bags of words; words are numbered below `vocabulary`."""

    source: Bags
    target: Bags
    vocabulary: int

    @classmethod
    def of(cls, sources: Sequence[str], targets: Sequence[str], numbers: dict[str, int]) -> "Sides":
        """Number the words of both sides; new ones are added to `numbers`."""
        source = Bags.of(sources, numbers, has_null=True)
        target = Bags.of(targets, numbers, has_null=False)
        return cls(source, target, len(numbers))


@dataclass(frozen=True)
class Gains:
    """The gains of some sources, `(blocks, BLOCK)` each; NaN where a block has no such pair."""

    own: Floats  # with the source's own target
    far: Floats  # with a far target
    shifted: dict[int, Floats]  # with the target so many lines below its own


def thinning(sources: Sequence[str], targets: Sequence[str]) -> int:
    """Learn from one sampled block in this many, so that counting the words' links takes seconds."""
    # Estimate the links from every 20th pair.
    links = 0
    for index in range(0, len(sources), 20):
        links += 20 * len(stems_of(sources[index])) * len(stems_of(targets[index]))
    return max(1, -(-links // MOST_LINKS))  # rounded up


# ---- learning -------------------------------------------------------------------------------------------------------


def learn_with_shift(sides: Sides) -> tuple[tuple[Lexicon, Lexicon], Gains, float] | None:
    """Lexicons of both halves, the gains of the sample, and the usual gain; None where no words go together."""
    # A corpus may be shifted from its first line on: then its words go together at that distance only.
    for shift in (0, *sorted(SHIFTS, key=abs)):
        lexicons = _learn(sides, shift=shift)
        gains = gains_of(sides, lexicons, halves=halves_of(sides))
        translations = gains.own if shift == 0 else gains.shifted[shift]
        over_far = translations - gains.far
        if certainty(over_far) >= LEARNED:
            return lexicons, gains, usual_of(over_far)
    return None


def halves_of(sides: Sides) -> Ids:
    """Which lexicon is learned from each block of a sample: `(blocks,)`."""
    return np.arange(-(-len(sides.source.counts) // BLOCK)) % 2


def is_shifted_whole(gains: Gains) -> bool:
    """Whether the set as a whole is shifted by one of these distances."""
    return any(certainty(gains.shifted[shift] - gains.far) >= LEARNED for shift in SHIFTS)


def _learn(sides: Sides, *, shift: int) -> tuple[Lexicon, Lexicon]:
    """A lexicon from the even blocks, and one from the odd ones, if targets are so many lines below their sources."""
    left = _within_blocks(len(sides.source.counts), shift)
    is_even = left // BLOCK % 2 == 0
    return _lexicon_of(sides, left[is_even], shift), _lexicon_of(sides, left[~is_even], shift)


def _lexicon_of(sides: Sides, left: Ids, shift: int) -> Lexicon:
    return Lexicon.learn(sides.source, sides.target, left=left, right=left + shift, vocabulary=sides.vocabulary)


def _within_blocks(count: int, shift: int) -> Ids:
    """The pairs whose neighbour at this distance lies in the same block."""
    left = np.arange(count)
    right = left + shift
    return left[(right >= 0) & (right < count) & (right // BLOCK == left // BLOCK)]


# ---- gains ----------------------------------------------------------------------------------------------------------


def gains_of(sides: Sides, lexicons: tuple[Lexicon, Lexicon], *, halves: Ids) -> Gains:
    """The gains of every pair, by the lexicon that was not learned from its block: `halves` says which one was."""
    count = len(sides.source.counts)
    pairs = np.arange(count)

    # The far target of a pair lies in the same block, FAR lines below, and after its end from its beginning on.
    first_of_block = pairs // BLOCK * BLOCK
    sizes = np.minimum(BLOCK, count - first_of_block)  # of the block that a pair is in
    distances = np.where(sizes > 2 * FAR, FAR, sizes // 2)  # the last block may be too short for FAR
    far = first_of_block + (pairs % BLOCK + distances) % sizes
    has_far = np.flatnonzero(sizes > 1)

    shifted = {}
    for shift in SHIFTS:
        left = _within_blocks(count, shift)
        shifted[shift] = _gains_by_block(sides, lexicons, halves, left=left, right=left + shift)
    return Gains(
        own=_gains_by_block(sides, lexicons, halves, left=pairs, right=pairs),
        far=_gains_by_block(sides, lexicons, halves, left=has_far, right=far[has_far]),
        shifted=shifted,
    )


def _gains_by_block(sides: Sides, lexicons: tuple[Lexicon, Lexicon], halves: Ids, *, left: Ids, right: Ids) -> Floats:
    """The gains of the sources `left` with the targets `right`: `(blocks, BLOCK)`, NaN for all other sources."""
    blocks = -(-len(sides.source.counts) // BLOCK)  # rounded up
    gains = np.full(blocks * BLOCK, np.nan)
    for parity, lexicon in enumerate(lexicons):
        chosen = halves[left // BLOCK] != parity
        gains[left[chosen]] = lexicon.gains(sides.source, sides.target, left=left[chosen], right=right[chosen])
    return gains.reshape(blocks, BLOCK)


def certainty(differences: Floats) -> float:
    """The mean of the differences, in standard errors; NaN counts as missing."""
    values = differences[~np.isnan(differences)]
    if len(values) < 2 or values.std() == 0.0:
        return 0.0
    standard_error = values.std(ddof=1) / np.sqrt(len(values))
    return float(values.mean() / standard_error)


# ---- what the gains of a block say ----------------------------------------------------------------------------------


def usual_of(over_far: Floats) -> float:
    """The median over the blocks of their mean gains; 0 where none is known."""
    means = np.array([mean(row) for row in over_far])
    known = means[~np.isnan(means)]
    return float(np.median(known)) if len(known) else 0.0


def mean(values: Floats) -> float:
    """The mean of the known values; NaN where none is."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def shift_of(gains: Gains, block: int) -> int:
    """By how many lines the targets of a block come too late; 0 where they are in place, or nothing is certain."""
    over_own = {shift: certainty(gains.shifted[shift][block] - gains.own[block]) for shift in SHIFTS}
    best = max(SHIFTS, key=lambda shift: over_own[shift])
    over_far = certainty(gains.shifted[best][block] - gains.far[block])
    return best if over_own[best] > CERTAIN and over_far > CERTAIN else 0


def is_unrelated(over_far: Floats, usual_gain: float) -> bool:
    """Whether the pairs of a block certainly gain less over far ones than translations usually do."""
    return mean(over_far) < UNRELATED * usual_gain and certainty(usual_gain - over_far) > CERTAIN


# ---- any pairs of the text -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Aligner:
    """What a sample of a text has taught, to be asked about all of its pairs."""

    lexicons: tuple[Lexicon, Lexicon]
    numbers: dict[str, int]  # of the words that the sample has
    usual: float  # gain over far pairs
    stride: int  # of the blocks that were learned from

    @classmethod
    def learn(cls, sample: BlockSample) -> "Aligner | None":
        """None if the sample is too small, or no words of its two sides belong together."""
        _, sources, targets = sample.columns()
        if len(sources) < FEWEST_TO_LEARN:
            return None

        every = thinning(sources, targets)
        kept = [index for index in range(len(sources)) if index // BLOCK % every == 0]
        numbers = {"": 0}
        sides = Sides.of([sources[index] for index in kept], [targets[index] for index in kept], numbers)
        learned = learn_with_shift(sides)
        if learned is None:
            return None
        lexicons, _, usual = learned
        return cls(lexicons, numbers, usual, sample.stride * every)

    def find(self, sources: Sequence[str], targets: Sequence[str], *, first_block: int) -> npt.NDArray[np.bool_]:
        """Which of these pairs are no translations: `(b,)`. They are whole blocks of the text, from this one on."""
        sides = Sides(
            Bags.of(sources, self.numbers, has_null=True, is_known=True),
            Bags.of(targets, self.numbers, has_null=False, is_known=True),
            len(self.numbers) + 1,
        )
        count = len(sources)
        pairs = np.arange(count)
        blocks = -(-count // BLOCK)  # rounded up
        halves = (first_block + np.arange(blocks)) // self.stride % 2

        # Pairs whose own words speak against them.
        found = np.zeros(count, np.bool_)
        for parity, lexicon in enumerate(self.lexicons):
            chosen = pairs[halves[pairs // BLOCK] != parity]
            evidence = lexicon.evidence(sides.source, sides.target, left=chosen, right=chosen)
            found[chosen] = evidence < -CONTRARY

        # Blocks that are shifted, or hold no translations.
        gains = gains_of(sides, self.lexicons, halves=halves)
        for block in range(blocks):
            if shift_of(gains, block) or is_unrelated(gains.own[block] - gains.far[block], self.usual):
                found[block * BLOCK : (block + 1) * BLOCK] = True
        return found


# ---- lengths --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lengths:
    """The lengths of pairs, in characters, `(b,)` each."""

    log_ratios: Floats  # of the target to the source
    longer: Floats

    @classmethod
    def of(cls, sources: Sequence[str], targets: Sequence[str]) -> "Lengths":
        """Measure pairs."""
        source = np.array([len(text) for text in sources], dtype=np.float64)
        target = np.array([len(text) for text in targets], dtype=np.float64)
        log_ratios = np.log(np.maximum(1.0, target)) - np.log(np.maximum(1.0, source))
        return cls(log_ratios, np.maximum(source, target))

    @property
    def usual(self) -> float:
        """The median pair's ratio, as a logarithm."""
        return float(np.median(self.log_ratios)) if len(self.log_ratios) else 0.0

    def are_outliers(self, usual: float) -> npt.NDArray[np.bool_]:
        """Which pairs have lengths that are much further apart than the usual pair's: `(b,)`."""
        is_far = np.abs(self.log_ratios - usual) > np.log(RATIO)
        return is_far & (self.longer >= SHORT)
