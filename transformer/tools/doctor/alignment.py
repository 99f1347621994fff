"""Whether line n of one side translates line n of the other.

A lexical model learns which words go together from half of the blocks of a sample, and reads the other half; then the
halves change places, because a model remembers the pairs that it has seen. A source sentence is read with its own
target, with those of its neighbours, and with one from far away in the same block: what translates it gains over the
frequencies of the words, and what is far away shows how little a pair gains that belongs together by nothing but its
place. A block is judged by the mean of its pairs, against the scatter of that mean, so that no corpus needs thresholds
of its own.

Behind each limit stands the most that was seen on sound corpora: Multi30k en-de and en-fr, Tatoeba, newstest2013, KFTT.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from transformer.data.store import Ids
from transformer.tools.doctor.findings import Check, Level, Place, failed, judged, passed, percent, place
from transformer.tools.doctor.lexicon import Bags, Floats, Lexicon, words_of
from transformer.tools.doctor.survey import BLOCK, Survey

SHIFTS = (-2, -1, 1, 2)
FAR = 17  # lines to a sentence that has nothing to do with this one, but for the subject of the text
FEWEST = 400  # pairs from which a lexicon can be learned
FEWEST_KNOWN = 100  # pairs that can be judged by a lexicon
MOST_LINKS = 8_000_000  # of a word with a word of the other side, in all pairs: seconds, and some hundred megabytes
CERTAIN = 5.0  # standard errors by which one mean must exceed another
LEARNED = 8.0  # standard errors by which true pairs must exceed far ones, for the lexicon to be of use
UNRELATED = 0.25  # of the usual gain: a block that has less does not belong together
MOST_UNRELATED = 0.01  # of the blocks; seen: 0
MOST_POOR = 0.25  # of the pairs may gain no more than with a far sentence; seen: 0.16 (KFTT), 0.06 (newstest2013)
RATIO = 4.0  # a pair whose lengths are so many times further apart than is usual is an outlier
SHORT = 40  # characters: shorter pairs may have any lengths
MOST_OUTLIERS = 0.02  # of the pairs; seen: 0.004 (KFTT)


@dataclass(frozen=True)
class _Sides:
    """The sampled sentences of all sets as bags of words, one set after the other."""

    source: Bags
    target: Bags
    vocabulary: int


@dataclass(frozen=True)
class _Gains:
    """What the sources of some neighbouring pairs gain, `(blocks, BLOCK)`; NaN beyond the end of a block."""

    own: Floats
    far: Floats
    shifted: dict[int, Floats]


def check_alignment(surveys: Sequence[Survey]) -> list[Check]:
    """Length ratios, shifted lines and unrelated lines of each set; the lexicon is learned from the training sets."""
    checks = [_check_lengths(survey) for survey in surveys]
    numbers = {"": 0}
    lexicons: tuple[Lexicon, Lexicon] | None = None

    for survey in map(_thinned, surveys):  # training sets come first
        sides = _sides_of(survey, numbers)
        if survey.name == "train" or lexicons is None:
            found, learned = _check_and_learn(survey, sides)
            checks += found
            lexicons = lexicons or learned
        elif len(survey.lines) < FEWEST_KNOWN:
            checks.append(passed("alignment", survey.name, found=f"too few pairs to tell ({len(survey.lines):,})"))
        else:
            gains = _gains_of(survey, sides, lexicons)
            if not _is_shifted_whole(gains) and _certainty(gains.own - gains.far) < CERTAIN:
                checks.append(_nothing_goes_together(survey))
            else:
                checks += _judge_blocks(survey, gains, usual=None)
    return checks


def _thinned(survey: Survey) -> Survey:
    """The set with so few of its sampled blocks that the links of their words can be counted in seconds."""
    looked_at = range(0, len(survey.lines), 20)
    links = 20 * sum(len(words_of(survey.sources[i])) * len(words_of(survey.targets[i])) for i in looked_at)
    every = -(-links // MOST_LINKS)
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
    source = Bags.of(survey.sources, numbers, has_null=True)
    target = Bags.of(survey.targets, numbers, has_null=False)
    return _Sides(source, target, len(numbers))


# ---- learning -------------------------------------------------------------------------------------------------------


def _check_and_learn(survey: Survey, sides: _Sides) -> tuple[list[Check], tuple[Lexicon, Lexicon] | None]:
    """Learn from a set and judge it; no lexicon, where too little can be learned."""
    if len(survey.lines) < FEWEST:
        return [passed("alignment", survey.name, found=f"too few pairs to tell ({len(survey.lines):,})")], None

    # A corpus may be shifted from its first line on: then its words go together at that distance only.
    for shift in (0, *sorted(SHIFTS, key=abs)):
        lexicons = _learn(survey, sides, shift=shift)
        gains = _gains_of(survey, sides, lexicons)
        true = gains.own if shift == 0 else gains.shifted[shift]
        if _certainty(true - gains.far) >= LEARNED:
            break
    else:
        return [_nothing_goes_together(survey)], None
    return _judge_blocks(survey, gains, usual=_usual(true - gains.far)), lexicons


def _nothing_goes_together(survey: Survey) -> Check:
    return failed(
        "alignment",
        survey.name,
        found=f"no word of one side goes with a word of the other, in {len(survey.lines):,} pairs",
        level=Level.error,
        remedy="line n of one file must translate line n of the other: look at a few, and make the files anew",
        places=_places(survey, survey.lines),
    )


def _is_shifted_whole(gains: _Gains) -> bool:
    return any(_certainty(gains.shifted[shift] - gains.far) >= LEARNED for shift in SHIFTS)


def _learn(survey: Survey, sides: _Sides, *, shift: int) -> tuple[Lexicon, Lexicon]:
    """A lexicon from the even blocks, and one from the odd ones."""
    left = _within_blocks(len(survey.lines), shift)
    halves = []
    for parity in (0, 1):
        chosen = left[left // BLOCK % 2 == parity]
        halves.append(
            Lexicon.learn(sides.source, sides.target, left=chosen, right=chosen + shift, vocabulary=sides.vocabulary)
        )
    return halves[0], halves[1]


def _within_blocks(count: int, shift: int) -> Ids:
    """The pairs whose neighbour at this distance lies in the same block."""
    left = np.arange(count)
    right = left + shift
    return left[(right >= 0) & (right < count) & (right // BLOCK == left // BLOCK)]


# ---- reading --------------------------------------------------------------------------------------------------------


def _gains_of(survey: Survey, sides: _Sides, lexicons: tuple[Lexicon, Lexicon]) -> _Gains:
    """Every block read with the lexicon that it was not learned from."""
    count = len(survey.lines)
    blocks = -(-count // BLOCK)
    every = np.arange(count)
    sizes = np.minimum(BLOCK, count - every // BLOCK * BLOCK)  # of the block that a pair is in
    distances = np.where(sizes > 2 * FAR, FAR, sizes // 2)  # the last block may be too short for FAR
    far = every // BLOCK * BLOCK + (every % BLOCK + distances) % sizes
    has_far = np.flatnonzero(sizes > 1)

    def gains(left: Ids, right: Ids) -> Floats:
        found = np.full(blocks * BLOCK, np.nan)
        for parity in (0, 1):
            chosen = left // BLOCK % 2 != parity
            found[left[chosen]] = lexicons[parity].gains(
                sides.source, sides.target, left=left[chosen], right=right[chosen]
            )
        return found.reshape(blocks, BLOCK)

    shifted = {}
    for shift in SHIFTS:
        left = _within_blocks(count, shift)
        shifted[shift] = gains(left, left + shift)
    return _Gains(own=gains(every, every), far=gains(has_far, far[has_far]), shifted=shifted)


def _certainty(differences: Floats) -> float:
    """Their mean in standard errors; NaN counts as missing."""
    values = differences[~np.isnan(differences)]
    if len(values) < 2 or values.std() == 0.0:
        return 0.0
    return float(values.mean() / (values.std(ddof=1) / np.sqrt(len(values))))


# ---- judging --------------------------------------------------------------------------------------------------------


def _judge_blocks(survey: Survey, gains: _Gains, *, usual: float | None) -> list[Check]:
    """Shifted blocks, unrelated blocks, and pairs that fit poorly.

    `usual` is what a block gains over far pairs; None: the median of the blocks of this set.
    """
    blocks = len(gains.own)
    shifts = [_shift_of(gains, block) for block in range(blocks)]

    over_far = gains.own - gains.far
    means = np.array([_mean(row) for row in over_far])
    level = _usual(over_far) if usual is None else usual
    unrelated = [
        block
        for block in range(blocks)
        if not shifts[block] and means[block] < UNRELATED * level and _certainty(level - over_far[block]) > CERTAIN
    ]
    is_poor = (over_far <= 0.0).reshape(-1)[: len(survey.lines)]
    return [
        _shift_check(survey, gains, shifts),
        judged(
            "unrelated lines",
            survey.name,
            found=f"{len(unrelated):,} of {blocks:,} blocks of {BLOCK} pairs fit no better than far lines",
            value=len(unrelated) / max(1, blocks),
            limit=MOST_UNRELATED,
            level=Level.error,
            remedy="line n of one file must translate line n of the other: look at these, and align the files again",
            places=_places(survey, [survey.lines[block * BLOCK] for block in unrelated]),
        ),
        judged(
            "poor pairs",
            survey.name,
            found=f"{percent(float(is_poor.mean()))} of the pairs fit no better than far ones",
            value=float(is_poor.mean()),
            limit=MOST_POOR,
            level=Level.warning,
            remedy="many pairs are no translations: look at these, and filter the corpus, by a score of alignment",
            places=_places(survey, [survey.lines[index] for index in np.flatnonzero(is_poor)]),
        ),
    ]


def _usual(over_far: Floats) -> float:
    """The median of the blocks' means."""
    means = np.array([_mean(row) for row in over_far])
    known = means[~np.isnan(means)]
    return float(np.median(known)) if len(known) else 0.0


def _mean(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _shift_of(gains: _Gains, block: int) -> int:
    """By how many lines the targets of a block come too late; 0 where they are in their places, or none can tell."""
    best = max(SHIFTS, key=lambda shift: _certainty(gains.shifted[shift][block] - gains.own[block]))
    own = _certainty(gains.shifted[best][block] - gains.own[block])
    far = _certainty(gains.shifted[best][block] - gains.far[block])
    return best if own > CERTAIN and far > CERTAIN else 0


def _first_shifted(survey: Survey, gains: _Gains, block: int, *, shift: int) -> int:
    """The line from which a shift holds that was found in a block, in it or in the block before it."""
    before = max(0, block - 1)
    better = np.nan_to_num((gains.shifted[shift] - gains.own)[before : block + 1].reshape(-1))
    from_here_on = better[::-1].cumsum()[::-1]
    return survey.lines[min(before * BLOCK + int(from_here_on.argmax()), len(survey.lines) - 1)]


def _shift_check(survey: Survey, gains: _Gains, shifts: Sequence[int]) -> Check:
    """What was found of shifts: ranges of lines, each with how many lines it is shifted by."""
    shifted = sum(shift != 0 for shift in shifts)
    ranges = []
    first = 0
    for block in range(1, len(shifts) + 1):
        if block < len(shifts) and shifts[block] == shifts[first]:
            continue
        if shifts[first]:
            last = min(block * BLOCK, len(survey.lines)) - 1
            start = _first_shifted(survey, gains, first, shift=shifts[first])
            ranges.append((start, survey.lines[last], shifts[first]))
        first = block

    described = "; ".join(
        f"lines {start:,} to {end:,} go with the target {abs(shift)} {'below' if shift > 0 else 'above'}"
        for start, end, shift in ranges[:3]
    )
    more = f"; and {len(ranges) - 3} more such ranges" if len(ranges) > 3 else ""
    found = f"{shifted:,} of {len(shifts):,} blocks of {BLOCK} pairs are shifted"
    return judged(
        "shifted lines",
        survey.name,
        found=f"{found}: {described}{more}" if ranges else found,
        value=shifted / max(1, len(shifts)),
        limit=0.0,
        level=Level.error,
        remedy="a line is missing or too many on one side, about where these lines begin: mend it there",
        places=_places(survey, [start for start, _, _ in ranges]),
    )


def _places(survey: Survey, lines: Sequence[int]) -> list[Place]:
    return [place(path, lines) for path in dict.fromkeys(survey.paths)]


# ---- lengths --------------------------------------------------------------------------------------------------------


def _check_lengths(survey: Survey) -> Check:
    """Pairs whose lengths, in characters, are much further apart than the median pair's."""
    lengths = np.array([[len(text) for text in survey.side(side)] for side in (0, 1)], dtype=np.float64)
    ratios = np.log(np.maximum(1.0, lengths[1])) - np.log(np.maximum(1.0, lengths[0]))
    usual = float(np.median(ratios)) if len(ratios) else 0.0
    is_outlier = (np.abs(ratios - usual) > np.log(RATIO)) & (lengths.max(axis=0) >= SHORT)
    share = float(is_outlier.mean()) if len(ratios) else 0.0
    return judged(
        "length ratios",
        survey.name,
        found=f"{percent(share)} of the pairs are {RATIO:g} times further apart than the usual {np.exp(usual):.2f}",
        value=share,
        limit=MOST_OUTLIERS,
        level=Level.warning,
        remedy="look at these: a side may be cut off, or of another sentence; data.filter.max_ratio drops the worst",
        places=_places(survey, [survey.lines[index] for index in np.flatnonzero(is_outlier)]),
    )
