"""Checks of whether line n of one side translates line n of the other.

    Survey -> Bags of words -> two Lexicons, each of half of the blocks -> _Gains of the other half -> checks by block

A lexicon remembers the pairs that it has learned from, so it is asked about the other half only. A source sentence is
read with its own target, with those of its neighbours, and with a far one in the same block. Its gain is how much
better than word frequencies it predicts a target; the far target shows the gain of a pair that is no translation. The
mean gain of a block is compared with the standard error of that mean, so that no corpus needs thresholds of its own.

Behind each limit stands the most that was seen on sound corpora: Multi30k en-de and en-fr, Tatoeba, newstest2013, KFTT.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from transformer.data.store import Ids
from transformer.tools.doctor.findings import Check, Level, failed, measured, passed, percent
from transformer.tools.doctor.lexicon import Bags, Floats, Lexicon, words_of
from transformer.tools.doctor.survey import BLOCK, Survey

SHIFTS = (-2, -1, 1, 2)  # lines by which targets may come too late
FAR = 17  # lines to a sentence that shares no more with this one than the subject of the text
FEWEST_TO_LEARN = 400  # pairs, for a lexicon
FEWEST_TO_CHECK = 100  # pairs, with a lexicon of another set
MOST_LINKS = 8_000_000  # of a word with a word of the other side, in all pairs: seconds, and some hundred megabytes
CERTAIN = 5.0  # standard errors by which one mean must exceed another
LEARNED = 8.0  # standard errors by which true pairs must exceed far ones, for the lexicon to be of use
UNRELATED = 0.25  # of the usual gain: a block with less has sentences that do not translate each other
MOST_UNRELATED = 0.01  # of the blocks; seen: 0
MOST_POOR = 0.25  # of the pairs may gain no more than with a far sentence; seen: 0.16 (KFTT), 0.06 (newstest2013)
RATIO = 4.0  # a pair is an outlier where the ratio of its lengths is so many times the usual one
SHORT = 40  # characters: shorter pairs may have any lengths
MOST_OUTLIERS = 0.02  # of the pairs; seen: 0.004 (KFTT)
RANGES = 3  # shifted ranges of lines that are described


@dataclass(frozen=True)
class _Sides:
    """The sampled sentences of a set as bags of words; words are numbered below `vocabulary`."""

    source: Bags
    target: Bags
    vocabulary: int


@dataclass(frozen=True)
class _Gains:
    """The gains of a set's sources, `(blocks, BLOCK)` each; NaN where a block has no such pair."""

    own: Floats  # with the source's own target
    far: Floats  # with a far target
    shifted: dict[int, Floats]  # with the target so many lines below its own


def check_alignment(surveys: Sequence[Survey]) -> list[Check]:
    """Length ratios, shifted lines and unrelated lines of each set; the training sets come first.

    The lexicons are learned from `train`, or from the first set from which they can be.
    """
    checks = [_check_length_ratios(survey) for survey in surveys]
    numbers = {"": 0}  # of each word, over all sets; 0 is the empty word
    lexicons: tuple[Lexicon, Lexicon] | None = None

    for survey in map(_thinned, surveys):
        sides = _sides_of(survey, numbers)
        if survey.name == "train" or lexicons is None:
            own_checks, own_lexicons = _check_and_learn(survey, sides)
            checks += own_checks
            lexicons = lexicons or own_lexicons
        else:
            checks += _check_with(survey, sides, lexicons)
    return checks


def _thinned(survey: Survey) -> Survey:
    """The set with so few of its sampled blocks that the links of their words can be counted in seconds."""
    # Estimate the links from every 20th pair.
    links = 0
    for index in range(0, len(survey.lines), 20):
        links += 20 * len(words_of(survey.sources[index])) * len(words_of(survey.targets[index]))
    every = -(-links // MOST_LINKS)  # rounded up
    if every <= 1:
        return survey

    kept = [index for index in range(len(survey.lines)) if index // BLOCK % every == 0]
    return replace(
        survey,
        lines=[survey.lines[index] for index in kept],
        sources=[survey.sources[index] for index in kept],
        targets=[survey.targets[index] for index in kept],
    )


def _sides_of(survey: Survey, numbers: dict[str, int]) -> _Sides:
    """Number the words of both sides; new ones are added to `numbers`."""
    source = Bags.of(survey.sources, numbers, has_null=True)
    target = Bags.of(survey.targets, numbers, has_null=False)
    return _Sides(source, target, len(numbers))


# ---- learning -------------------------------------------------------------------------------------------------------


def _check_and_learn(survey: Survey, sides: _Sides) -> tuple[list[Check], tuple[Lexicon, Lexicon] | None]:
    """Learn lexicons from a set and check it with them; None where too little can be learned."""
    if len(survey.lines) < FEWEST_TO_LEARN:
        return [_too_few(survey)], None

    # A corpus may be shifted from its first line on: then its words go together at that distance only.
    for shift in (0, *sorted(SHIFTS, key=abs)):
        lexicons = _learn(survey, sides, shift=shift)
        gains = _gains_of(survey, sides, lexicons)
        translations = gains.own if shift == 0 else gains.shifted[shift]
        over_far = translations - gains.far
        if _certainty(over_far) >= LEARNED:
            return _check_blocks(survey, gains, usual=_usual(over_far)), lexicons

    return [_nothing_goes_together(survey)], None


def _check_with(survey: Survey, sides: _Sides, lexicons: tuple[Lexicon, Lexicon]) -> list[Check]:
    """Check a set with the lexicons of another one."""
    if len(survey.lines) < FEWEST_TO_CHECK:
        return [_too_few(survey)]

    gains = _gains_of(survey, sides, lexicons)
    if not _is_shifted_whole(gains) and _certainty(gains.own - gains.far) < CERTAIN:
        return [_nothing_goes_together(survey)]
    return _check_blocks(survey, gains, usual=None)


def _too_few(survey: Survey) -> Check:
    return passed("alignment", survey.name, found=f"too few pairs to tell ({len(survey.lines):,})")


def _nothing_goes_together(survey: Survey) -> Check:
    return failed(
        "alignment",
        survey.name,
        found=f"no words of the two sides belong together, in {len(survey.lines):,} pairs",
        level=Level.error,
        remedy="line n of one file must translate line n of the other: look at a few, and align the files again",
        places=survey.places(survey.lines),
    )


def _is_shifted_whole(gains: _Gains) -> bool:
    """Whether the set as a whole is shifted by one of these distances."""
    return any(_certainty(gains.shifted[shift] - gains.far) >= LEARNED for shift in SHIFTS)


def _learn(survey: Survey, sides: _Sides, *, shift: int) -> tuple[Lexicon, Lexicon]:
    """A lexicon from the even blocks, and one from the odd ones, if targets are so many lines below their sources."""
    left = _within_blocks(len(survey.lines), shift)
    is_even = left // BLOCK % 2 == 0
    return _lexicon_of(sides, left[is_even], shift), _lexicon_of(sides, left[~is_even], shift)


def _lexicon_of(sides: _Sides, left: Ids, shift: int) -> Lexicon:
    return Lexicon.learn(sides.source, sides.target, left=left, right=left + shift, vocabulary=sides.vocabulary)


def _within_blocks(count: int, shift: int) -> Ids:
    """The pairs whose neighbour at this distance lies in the same block."""
    left = np.arange(count)
    right = left + shift
    return left[(right >= 0) & (right < count) & (right // BLOCK == left // BLOCK)]


# ---- gains ----------------------------------------------------------------------------------------------------------


def _gains_of(survey: Survey, sides: _Sides, lexicons: tuple[Lexicon, Lexicon]) -> _Gains:
    """The gains of every pair, by the lexicon that was not learned from its block."""
    count = len(survey.lines)
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
        shifted[shift] = _gains_by_block(sides, lexicons, left=left, right=left + shift)
    return _Gains(
        own=_gains_by_block(sides, lexicons, left=pairs, right=pairs),
        far=_gains_by_block(sides, lexicons, left=has_far, right=far[has_far]),
        shifted=shifted,
    )


def _gains_by_block(sides: _Sides, lexicons: tuple[Lexicon, Lexicon], *, left: Ids, right: Ids) -> Floats:
    """The gains of the sources `left` with the targets `right`: `(blocks, BLOCK)`, NaN for all other sources."""
    blocks = -(-len(sides.source.counts) // BLOCK)  # rounded up
    gains = np.full(blocks * BLOCK, np.nan)
    for parity, lexicon in enumerate(lexicons):
        chosen = left // BLOCK % 2 != parity
        gains[left[chosen]] = lexicon.gains(sides.source, sides.target, left=left[chosen], right=right[chosen])
    return gains.reshape(blocks, BLOCK)


def _certainty(differences: Floats) -> float:
    """The mean of the differences, in standard errors; NaN counts as missing."""
    values = differences[~np.isnan(differences)]
    if len(values) < 2 or values.std() == 0.0:
        return 0.0
    standard_error = values.std(ddof=1) / np.sqrt(len(values))
    return float(values.mean() / standard_error)


# ---- what the gains of the blocks say -------------------------------------------------------------------------------


def _check_blocks(survey: Survey, gains: _Gains, *, usual: float | None) -> list[Check]:
    """Shifted blocks, unrelated blocks, and pairs that fit poorly.

    `usual` is what the pairs of a block gain over far ones; None: the median of the blocks of this set.
    """
    blocks = len(gains.own)
    shifts = [_shift_of(gains, block) for block in range(blocks)]

    # Unrelated: in their places, and certainly with less than the usual gain.
    over_far = gains.own - gains.far
    usual_gain = _usual(over_far) if usual is None else usual
    unrelated = []
    for block in range(blocks):
        is_low = _mean(over_far[block]) < UNRELATED * usual_gain
        if is_low and not shifts[block] and _certainty(usual_gain - over_far[block]) > CERTAIN:
            unrelated.append(block)

    is_poor = (over_far <= 0.0).reshape(-1)[: len(survey.lines)]
    return [
        _check_shifts(survey, gains, shifts),
        measured(
            "unrelated lines",
            survey.name,
            found=f"{len(unrelated):,} of {blocks:,} blocks of {BLOCK} pairs fit no better than lines far apart",
            value=len(unrelated) / max(1, blocks),
            limit=MOST_UNRELATED,
            level=Level.error,
            remedy="line n of one file must translate line n of the other: look at these, and align the files again",
            places=survey.places(survey.lines[block * BLOCK] for block in unrelated),
        ),
        measured(
            "poor pairs",
            survey.name,
            found=f"{percent(float(is_poor.mean()))} of the pairs fit no better than lines far apart",
            value=float(is_poor.mean()),
            limit=MOST_POOR,
            level=Level.warning,
            remedy="many pairs are no translations: look at these, and filter the corpus by a score of alignment",
            places=survey.places(survey.lines[index] for index in np.flatnonzero(is_poor)),
        ),
    ]


def _usual(over_far: Floats) -> float:
    """The median over the blocks of their mean gains; 0 where none is known."""
    means = np.array([_mean(row) for row in over_far])
    known = means[~np.isnan(means)]
    return float(np.median(known)) if len(known) else 0.0


def _mean(values: Floats) -> float:
    """The mean of the known values; NaN where none is."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _shift_of(gains: _Gains, block: int) -> int:
    """By how many lines the targets of a block come too late; 0 where they are in place, or nothing is certain."""
    over_own = {shift: _certainty(gains.shifted[shift][block] - gains.own[block]) for shift in SHIFTS}
    best = max(SHIFTS, key=lambda shift: over_own[shift])
    over_far = _certainty(gains.shifted[best][block] - gains.far[block])
    return best if over_own[best] > CERTAIN and over_far > CERTAIN else 0


def _first_shifted(survey: Survey, gains: _Gains, block: int, *, shift: int) -> int:
    """The line from which the shift of a block holds: in this block or in the one before it."""
    # The place from which on the shifted targets gain most over their own.
    before = max(0, block - 1)
    better = np.nan_to_num((gains.shifted[shift] - gains.own)[before : block + 1].reshape(-1))
    from_here_on = better[::-1].cumsum()[::-1]
    place = before * BLOCK + int(from_here_on.argmax())
    return survey.lines[min(place, len(survey.lines) - 1)]


def _check_shifts(survey: Survey, gains: _Gains, shifts: Sequence[int]) -> Check:
    """The ranges of lines that are shifted; `shifts` has by how many lines each block is."""
    ranges = []
    block = 0
    for shift, group in groupby(shifts):
        first_block = block
        block += len(list(group))
        if shift:
            start = _first_shifted(survey, gains, first_block, shift=shift)
            end = survey.lines[min(block * BLOCK, len(survey.lines)) - 1]
            ranges.append((start, end, shift))

    shifted = sum(shift != 0 for shift in shifts)
    found = f"{shifted:,} of {len(shifts):,} blocks of {BLOCK} pairs are shifted"
    if ranges:
        described = []
        for start, end, shift in ranges[:RANGES]:
            direction = "below" if shift > 0 else "above"
            described.append(f"lines {start:,} to {end:,} go with the target {abs(shift)} {direction}")
        if len(ranges) > RANGES:
            described.append(f"and {len(ranges) - RANGES} more such ranges")
        found += f": {'; '.join(described)}"

    return measured(
        "shifted lines",
        survey.name,
        found=found,
        value=shifted / max(1, len(shifts)),
        limit=0.0,
        level=Level.error,
        remedy="one side has a line too few or too many, about where these lines begin: mend it there",
        places=survey.places(start for start, _, _ in ranges),
    )


# ---- lengths --------------------------------------------------------------------------------------------------------


def _check_length_ratios(survey: Survey) -> Check:
    """Pairs whose lengths, in characters, are much further apart than the median pair's."""
    source = np.array([len(text) for text in survey.sources], dtype=np.float64)
    target = np.array([len(text) for text in survey.targets], dtype=np.float64)
    log_ratios = np.log(np.maximum(1.0, target)) - np.log(np.maximum(1.0, source))
    usual = float(np.median(log_ratios)) if len(log_ratios) else 0.0

    is_far = np.abs(log_ratios - usual) > np.log(RATIO)
    is_outlier = is_far & (np.maximum(source, target) >= SHORT)
    share = float(is_outlier.mean()) if len(log_ratios) else 0.0
    return measured(
        "length ratios",
        survey.name,
        found=f"{percent(share)} of the pairs have a length ratio more than {RATIO:g} times off the median of "
        f"{np.exp(usual):.2f} (target / source, in characters)",
        value=share,
        limit=MOST_OUTLIERS,
        level=Level.warning,
        remedy="look at these: a side may be cut off, or of another sentence; data.filter.max_ratio drops the worst",
        places=survey.places(survey.lines[index] for index in np.flatnonzero(is_outlier)),
    )
