"""Checks of the text itself: copies, duplicates, overlap, encoding, markup, and sets that are written differently.

These are the first checks of `command`: they look at what `survey` has read, and need no tokenizer and no model. Most
measure the share of lines with one kind of fault, against one limit.

Behind each limit stands the most that was seen on sound corpora: Multi30k en-de and en-fr, Tatoeba, newstest2013, KFTT.
"""

from collections.abc import Mapping, Sequence
from operator import attrgetter

from transformer.config.settings import DataConfig, FilterConfig
from transformer.tools.detectors.text import (
    FEWEST_CHARACTERS,
    has_lost_characters,
    has_markup,
    is_copy,
    is_double_encoded,
)
from transformer.tools.doctor.findings import Check, Level, failed, measured, passed, percent
from transformer.tools.doctor.survey import SIDES, Survey
from transformer.tools.first_look import is_header

MOST_COPIES = 0.01  # seen: 0.0001; Ott et al. (2018, "Analyzing uncertainty") find that a few percent harm beam search
MOST_REPEATS = 0.1  # seen: 0.028 (KFTT)
MOST_OVERLAP = 0.005  # of the pairs of an evaluation set; seen: 0.001
MOST_SIDE_OVERLAP = 0.03  # of its sentences on one side; seen: 0.013 (titles in KFTT)
MOST_MOJIBAKE = 0.01  # of the lines that are not plain ASCII; seen: 0
MOST_LOST = 0.001  # of the lines have a character that was lost in a conversion; seen: 0
MOST_MARKUP = 0.005  # of the lines; seen: 0.0006
MOST_STYLE = 0.3  # difference between two shares of lines; seen: 0.017


def check_text(surveys: Sequence[Survey], data: DataConfig, *, looks: Mapping[str, tuple[str, str]]) -> list[Check]:
    """Check every set by itself, the training sets against the evaluation sets, and every set against `train`.

    `train` is the first of the surveys; a side in another language, by `looks`, is not written as its own is.
    """
    train, filters = surveys[0], data.filter
    evaluation = [survey for survey in surveys if not survey.is_training]

    checks = []
    for survey in surveys:
        checks.append(_check_header(survey, data.languages_of(survey.name)))
        checks.append(_check_copies(survey, filters))
        if survey.is_training:
            checks.append(_check_repeats(survey, filters))
            for other in evaluation:
                checks += _check_overlap(survey, other)
        for side in (0, 1):
            checks += _check_lines(survey, side)
            if survey is not train and looks[survey.name][side] == looks[train.name][side]:
                checks += _check_style(survey, train, side)
    return checks


# ---- headers --------------------------------------------------------------------------------------------------------


def _check_header(survey: Survey, languages: tuple[str, str]) -> Check:
    """Whether the first pair names what stands below it."""
    line, source, target = next(iter(survey.pairs()))
    if line > 1 or not is_header((source, target), languages):
        return passed("header", survey.name, found="the first pair is text")
    return failed(
        "header",
        survey.name,
        found=f"the first pair is a header ({source} / {target}), and no text",
        level=Level.error,
        remedy=f"remove that line; of a table, data.{survey.name}.src and data.{survey.name}.tgt may name the columns",
        places=survey.places([line]),
    )


# ---- copies ---------------------------------------------------------------------------------------------------------


def _check_copies(survey: Survey, filters: FilterConfig) -> Check:
    """Pairs whose target equals the source; short ones, such as names and numbers, may."""
    copies = [line for line, source, target in survey.pairs() if is_copy(source, target)]
    share = len(copies) / max(1, len(survey.lines))

    remedy = f"name the file of translations by data.{survey.name}.tgt, or a table by data.{survey.name}.dataset"
    if survey.is_training and share < 0.5:
        remedy = "data.filter.drop_identical=true drops them"
    is_filtered = survey.is_training and filters.drop_identical
    found = f"{percent(share)} of the targets equal their sources"
    if is_filtered:
        found += ", which data.filter drops"

    return measured(
        "copied sources",
        survey.name,
        found=found,
        value=share,
        limit=1.0 if is_filtered else MOST_COPIES,
        level=Level.error,
        remedy=remedy,
        places=survey.places(copies),
    )


def _check_repeats(survey: Survey, filters: FilterConfig) -> Check:
    """Pairs that are copies of an earlier pair."""
    repeats = survey.repeats

    is_filtered = filters.drop_duplicates
    found = f"{percent(repeats.share)} of the pairs are copies of an earlier pair"
    if repeats.stride > 1:
        found += f" (among {repeats.pairs:,} pairs, sampled by their text)"
    if is_filtered:
        found += ", which data.filter drops"

    return measured(
        "duplicates",
        survey.name,
        found=found,
        value=repeats.share,
        limit=1.0 if is_filtered else MOST_REPEATS,
        level=Level.warning,
        remedy="data.filter.drop_duplicates=true drops them, if they are not wanted",
        places=survey.places(repeats.lines),
    )


def _check_overlap(train: Survey, other: Survey) -> list[Check]:
    """Sentences of an evaluation set that are trained on: whole pairs, and others on the side that has more of them."""
    overlap = train.overlaps[other.name]
    of_pairs = _overlap_check(
        train, other, "overlap", what="pairs", shared=overlap.pairs, texts=other.sources, limit=MOST_OVERLAP
    )

    of_sides = [
        _overlap_check(
            train,
            other,
            "overlap of a side",
            what=f"other {what}",
            shared={line: known for line, known in shared.items() if line not in overlap.pairs},
            texts=texts,
            limit=MOST_SIDE_OVERLAP,
        )
        for what, shared, texts in (
            ("sources", overlap.sources, other.sources),
            ("targets", overlap.targets, other.targets),
        )
    ]
    return [of_pairs, max(of_sides, key=attrgetter("value"))]


def _overlap_check(
    train: Survey,
    other: Survey,
    name: str,
    *,
    what: str,
    shared: dict[int, int],
    texts: list[str],
    limit: float,
) -> Check:
    """`shared` has the lines of the evaluation set `other`, each with its line in `train`.

    Of the evaluation set's `texts` short ones do not count: they recur by chance.
    """
    lines = [
        line for line, text in zip(other.lines, texts, strict=True) if line in shared and len(text) >= FEWEST_CHARACTERS
    ]
    training_lines = sorted(shared[line] for line in lines)
    share = len(lines) / max(1, len(other.lines))

    return measured(
        name,
        f"{train.name} with {other.name}",
        found=f"{percent(share)} of the {what} of {other.name} are in it, {len(lines):,} in all",
        value=share,
        limit=limit,
        level=Level.error,
        remedy=f"drop these lines from {train.name}: its scores on {other.name} would say nothing",
        places=[*train.places(training_lines), *other.places(lines)],
    )


# ---- lines ----------------------------------------------------------------------------------------------------------


def _check_lines(survey: Survey, side: int) -> list[Check]:
    """Lines of one side that were spoilt when the corpus was made."""
    # The lines with each fault.
    twice_encoded = []
    lost = []
    marked = []
    beyond_ascii = 0
    for line, text in zip(survey.lines, survey.side(side), strict=True):
        if is_double_encoded(text):
            twice_encoded.append(line)
        if has_lost_characters(text):
            lost.append(line)
        if has_markup(text):
            marked.append(line)
        if not text.isascii():
            beyond_ascii += 1

    where = f"{survey.name} {SIDES[side]}"
    path = survey.path(side)
    count = max(1, len(survey.lines))
    return [
        measured(
            "encoding",
            where,
            found=f"{len(twice_encoded):,} of {beyond_ascii:,} lines beyond ASCII are UTF-8 encoded twice",
            value=len(twice_encoded) / max(1, beyond_ascii),
            limit=MOST_MOJIBAKE,
            level=Level.error,
            remedy=f"decode it once: iconv -f utf-8 -t windows-1252 {path} > MENDED (or latin1)",
            places=survey.places(twice_encoded, side),
        ),
        measured(
            "lost characters",
            where,
            found=f"{percent(len(lost) / count)} of the lines have U+FFFD, in the place of a lost character",
            value=len(lost) / count,
            limit=MOST_LOST,
            level=Level.warning,
            remedy="convert the original file again, or drop these lines",
            places=survey.places(lost, side),
        ),
        measured(
            "markup",
            where,
            found=f"{percent(len(marked) / count)} of the lines have tags, entities or subword marks",
            value=len(marked) / count,
            limit=MOST_MARKUP,
            level=Level.warning,
            remedy="strip the tags and unescape the entities, in all sets alike; give raw text",
            places=survey.places(marked, side),
        ),
    ]


# ---- style ----------------------------------------------------------------------------------------------------------


def _has_capital(text: str) -> bool:
    return text != text.lower()


def _has_spaced_stop(text: str) -> bool:
    return text.rstrip().endswith((" .", " ?", " !"))


# Each habit: the name of its check, what such a line has, its test, and the remedy where two sets differ.
STYLES = (
    ("case", "capitals", _has_capital, "train and evaluate on text of the same case; sacreBLEU counts case"),
    ("tokenisation", "a space before the last stop", _has_spaced_stop, "give raw text, which is not tokenised"),
)


def _check_style(survey: Survey, train: Survey, side: int) -> list[Check]:
    """Whether an evaluation set, or more training text, is written as `train` is."""
    checks = []
    for name, what, has_habit, remedy in STYLES:
        share = sum(map(has_habit, survey.side(side))) / max(1, len(survey.lines))
        share_of_train = sum(map(has_habit, train.side(side))) / max(1, len(train.lines))
        checks.append(
            measured(
                name,
                f"{survey.name} {SIDES[side]}",
                found=f"{percent(share)} of the lines have {what}, of train {percent(share_of_train)}",
                value=abs(share - share_of_train),
                limit=MOST_STYLE,
                level=Level.error,
                remedy=remedy,
                places=[*survey.places(survey.lines, side), *train.places(train.lines, side)],
            )
        )
    return checks
