"""Checks of whether line n of one side translates line n of the other.

    Survey -> Bags of words -> two Lexicons, each of half of the blocks -> Gains of the other half -> checks by block

A lexicon remembers the pairs that it has learned from, so it is asked about the other half only. A source sentence is
read with its own target, with those of its neighbours, and with a far one in the same block. Its gain is how much
better than word frequencies it predicts a target; the far target shows the gain of a pair that is no translation. The
mean gain of a block is compared with the standard error of that mean, so that no corpus needs thresholds of its own.

Behind each limit stands the most that was seen on sound corpora: Multi30k en-de and en-fr, Tatoeba, newstest2013, KFTT.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from transformer.tools.detectors.alignment import (
    CERTAIN,
    FEWEST_TO_LEARN,
    RATIO,
    Gains,
    Lengths,
    Sides,
    certainty,
    gains_of,
    halves_of,
    is_shifted_whole,
    is_unrelated,
    learn_with_shift,
    shift_of,
    thinning,
    usual_of,
)
from transformer.tools.detectors.lexicon import Lexicon
from transformer.tools.detectors.sample import BLOCK
from transformer.tools.doctor.findings import Check, Level, failed, measured, passed, percent
from transformer.tools.doctor.survey import Survey

FEWEST_TO_CHECK = 100  # pairs, with a lexicon of another set
MOST_UNRELATED = 0.01  # of the blocks; seen: 0
MOST_POOR = 0.25  # of the pairs may gain no more than with a far sentence; seen: 0.16 (KFTT), 0.06 (newstest2013)
MOST_OUTLIERS = 0.02  # of the pairs; seen: 0.004 (KFTT)
RANGES = 3  # shifted ranges of lines that are described


def check_alignment(surveys: Sequence[Survey], *, looks: Mapping[str, tuple[str, str]]) -> list[Check]:
    """Length ratios, shifted lines and unrelated lines of each set; the training sets come first.

    The lexicons of two languages are learned from the first set from which they can be; `looks` has those of each.
    """
    checks = [_check_length_ratios(survey) for survey in surveys]
    numbers = {"": 0}  # of each word, over all sets; 0 is the empty word
    lexicons_of: dict[tuple[str, str], tuple[Lexicon, Lexicon]] = {}

    for survey in map(_thinned, surveys):
        sides = Sides.of(survey.sources, survey.targets, numbers)
        languages = looks[survey.name]
        if languages in lexicons_of:
            checks += _check_with(survey, sides, lexicons_of[languages])
            continue
        own_checks, lexicons = _check_and_learn(survey, sides)
        checks += own_checks
        if lexicons is not None:
            lexicons_of[languages] = lexicons
    return checks


def _thinned(survey: Survey) -> Survey:
    """The set with so few of its sampled blocks that the links of their words can be counted in seconds."""
    every = thinning(survey.sources, survey.targets)
    if every == 1:
        return survey

    kept = [index for index in range(len(survey.lines)) if index // BLOCK % every == 0]
    return replace(
        survey,
        lines=[survey.lines[index] for index in kept],
        sources=[survey.sources[index] for index in kept],
        targets=[survey.targets[index] for index in kept],
    )


# ---- learning -------------------------------------------------------------------------------------------------------


def _check_and_learn(survey: Survey, sides: Sides) -> tuple[list[Check], tuple[Lexicon, Lexicon] | None]:
    """Learn lexicons from a set and check it with them; None where too little can be learned."""
    if len(survey.lines) < FEWEST_TO_LEARN:
        return [_too_few(survey)], None

    learned = learn_with_shift(sides)
    if learned is not None:
        lexicons, gains, usual = learned
        return _check_blocks(survey, gains, usual=usual), lexicons

    return [_nothing_goes_together(survey)], None


def _check_with(survey: Survey, sides: Sides, lexicons: tuple[Lexicon, Lexicon]) -> list[Check]:
    """Check a set with the lexicons of another one."""
    if len(survey.lines) < FEWEST_TO_CHECK:
        return [_too_few(survey)]

    gains = gains_of(sides, lexicons, halves=halves_of(sides))
    if not is_shifted_whole(gains) and certainty(gains.own - gains.far) < CERTAIN:
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


# ---- what the gains of the blocks say -------------------------------------------------------------------------------


def _check_blocks(survey: Survey, gains: Gains, *, usual: float | None) -> list[Check]:
    """Shifted blocks, unrelated blocks, and pairs that fit poorly.

    `usual` is what the pairs of a block gain over far ones; None: the median of the blocks of this set.
    """
    blocks = len(gains.own)
    shifts = [shift_of(gains, block) for block in range(blocks)]

    over_far = gains.own - gains.far
    usual_gain = usual_of(over_far) if usual is None else usual
    unrelated = [block for block in range(blocks) if not shifts[block] and is_unrelated(over_far[block], usual_gain)]

    # Pairs of other blocks, for the lines of these are in a finding already.
    told = [bool(shifts[block]) or block in unrelated for block in range(blocks)]
    is_poor = ((over_far <= 0.0) & ~np.array(told, bool)[:, None]).reshape(-1)[: len(survey.lines)]
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


def _first_shifted(survey: Survey, gains: Gains, block: int, *, shift: int) -> int:
    """The line from which the shift of a block holds: in this block or in the one before it."""
    # The place from which on the shifted targets gain most over their own.
    before = max(0, block - 1)
    better = np.nan_to_num((gains.shifted[shift] - gains.own)[before : block + 1].reshape(-1))
    from_here_on = better[::-1].cumsum()[::-1]
    place = before * BLOCK + int(from_here_on.argmax())
    return survey.lines[min(place, len(survey.lines) - 1)]


def _check_shifts(survey: Survey, gains: Gains, shifts: Sequence[int]) -> Check:
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
    lengths = Lengths.of(survey.sources, survey.targets)
    log_ratios = lengths.log_ratios
    usual = lengths.usual
    is_outlier = lengths.are_outliers(usual)
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
