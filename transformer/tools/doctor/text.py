"""What is wrong with the text itself: copies, duplicates, overlap, encoding, markup, and references of another kind.

Behind each limit stands the most that was seen on sound corpora: Multi30k en-de and en-fr, Tatoeba, newstest2013, KFTT.
"""

import re
from collections.abc import Callable, Sequence

from transformer.config.settings import FilterConfig
from transformer.tools.doctor.findings import Check, Level, Place, judged, percent, place
from transformer.tools.doctor.survey import Survey

SIDES = ("source", "target")

MOST_COPIES = 0.01  # seen: 0.0001; Ott et al. (2018, "Analyzing uncertainty") find that few percent harm beam search
MOST_REPEATS = 0.1  # seen: 0.028 (KFTT)
MOST_OVERLAP = 0.005  # of the pairs of an evaluation set; seen: 0.001
MOST_SIDE_OVERLAP = 0.03  # of its sentences on one side; seen: 0.013 (titles in KFTT)
FEWEST_CHARACTERS = 20  # of a sentence whose recurrence says anything
MOST_MOJIBAKE = 0.01  # of the lines that are not plain ASCII; seen: 0
MOST_LOST = 0.001  # of the lines have a character that was lost in a conversion; seen: 0
MOST_MARKUP = 0.005  # of the lines; seen: 0.0006
MOST_STYLE = 0.3  # difference between two shares of lines; seen: 0.017

# Tags, entities of HTML and of Moses, and the marks of pieces that somebody has cut words into.
_MARKUP = re.compile(
    r"</?[a-zA-Z][^<>]{0,200}>|&(?:[a-zA-Z]{2,8}|#\d{1,6}|#x[0-9a-fA-F]{1,5});|@-@|@@(?: |$)|\u2581|\{\{|\[\["
)
_LOST = "\ufffd"

# Bytes that Windows-1252 shows as something else than Latin-1 does.
_CP1252 = {
    ord(bytes([byte]).decode("cp1252")): byte
    for byte in range(0x80, 0xA0)
    if byte not in (0x81, 0x8D, 0x8F, 0x90, 0x9D)
}
_DOUBLE = re.compile("[\u00c2-\u00f4][\u0080-\u00bf" + re.escape("".join(map(chr, _CP1252))) + "]")


def check_text(surveys: Sequence[Survey], filters: FilterConfig) -> list[Check]:
    """Every set by itself, the training sets against the others, and the others against `train`."""
    train = surveys[0]
    checks = []
    for survey in surveys:
        checks.append(_check_copies(survey, filters))
        if survey.is_training:
            checks.append(_check_repeats(survey, filters))
            for other in surveys:
                checks += [] if other.is_training else _check_overlap(survey, other)
        for side in (0, 1):
            checks += _check_lines(survey, side)
            if survey is not train:
                checks += _check_style(survey, train, side)
    return checks


# ---- copies ---------------------------------------------------------------------------------------------------------


def _check_copies(survey: Survey, filters: FilterConfig) -> Check:
    """Pairs whose target is the source; a name or a number may be."""
    copies = [
        line
        for line, source, target in survey.pairs()
        if source.strip() == target.strip() and len(source) >= FEWEST_CHARACTERS
    ]
    share = len(copies) / max(1, len(survey.lines))
    is_filtered = survey.is_training and filters.drop_identical
    return judged(
        "copied sources",
        survey.name,
        found=f"{percent(share)} of the targets are their sources"
        + (", which data.filter drops" if is_filtered else ""),
        value=share,
        limit=1.0 if is_filtered else MOST_COPIES,
        level=Level.error,
        remedy="data.filter.drop_identical=true drops them" if survey.is_training else "name the file of translations",
        places=_both(survey, copies),
    )


def _check_repeats(survey: Survey, filters: FilterConfig) -> Check:
    repeats = survey.repeats
    among = "" if repeats.stride == 1 else f" (among {repeats.pairs:,} pairs, sampled by their text)"
    is_filtered = filters.drop_duplicates
    return judged(
        "duplicates",
        survey.name,
        found=f"{percent(repeats.share)} of the pairs came before{among}"
        + (", which data.filter drops" if is_filtered else ""),
        value=repeats.share,
        limit=1.0 if is_filtered else MOST_REPEATS,
        level=Level.warning,
        remedy="data.filter.drop_duplicates=true drops them, if they are not meant",
        places=_both(survey, repeats.lines),
    )


def _check_overlap(train: Survey, other: Survey) -> list[Check]:
    """Sentences of an evaluation set that are trained on: whole pairs, and on the side that has more of them."""
    overlap = train.overlaps[other.name]
    texts = {line: (source, target) for line, source, target in other.pairs()}
    size = max(1, len(other.lines))

    def judge(name: str, what: str, met: dict[int, int], *, side: int, limit: float) -> Check:
        lines = sorted(line for line in met if len(texts[line][side]) >= FEWEST_CHARACTERS)
        return judged(
            name,
            f"{train.name} with {other.name}",
            found=f"{percent(len(lines) / size)} of the {what} of {other.name} are in it, {len(lines):,} in all",
            value=len(lines) / size,
            limit=limit,
            level=Level.error,
            remedy=f"drop these lines from {train.name}: its scores on {other.name} would say nothing",
            places=[
                *(place(path, sorted(met[line] for line in lines)) for path in dict.fromkeys(train.paths)),
                *(place(path, lines) for path in dict.fromkeys(other.paths)),
            ],
        )

    side = int(len(overlap.targets) > len(overlap.sources))
    return [
        judge("overlap", "pairs", overlap.pairs, side=0, limit=MOST_OVERLAP),
        judge(
            "overlap of a side",
            "targets" if side else "sources",
            overlap.targets if side else overlap.sources,
            side=side,
            limit=MOST_SIDE_OVERLAP,
        ),
    ]


# ---- lines ----------------------------------------------------------------------------------------------------------


def is_double_encoded(text: str) -> bool:
    """Whether a text is UTF-8 that was taken for Latin-1 or Windows-1252 and encoded once more."""
    if _DOUBLE.search(text) is None:
        return False
    try:
        restored = text.translate(_CP1252).encode("latin-1").decode("utf-8")
    except UnicodeError:
        return False
    return len(restored) < len(text)


def _check_lines(survey: Survey, side: int) -> list[Check]:
    texts = survey.side(side)
    where = f"{survey.name} {SIDES[side]}"
    path = survey.paths[side]

    def matching(test: Callable[[str], bool]) -> list[int]:
        return [line for line, text in zip(survey.lines, texts, strict=True) if test(text)]

    double = matching(is_double_encoded)
    lost = matching(lambda text: _LOST in text)
    marked = matching(lambda text: _MARKUP.search(text) is not None)
    foreign = sum(not text.isascii() for text in texts)
    count = max(1, len(texts))
    return [
        judged(
            "encoding",
            where,
            found=f"{len(double):,} of {foreign:,} lines beyond ASCII are UTF-8 encoded twice",
            value=len(double) / max(1, foreign),
            limit=MOST_MOJIBAKE,
            level=Level.error,
            remedy=f"decode it once: iconv -f utf-8 -t windows-1252 {path} > MENDED (or latin1)",
            places=[place(path, double)],
        ),
        judged(
            "lost characters",
            where,
            found=f"{percent(len(lost) / count)} of the lines have U+FFFD, in the place of a lost character",
            value=len(lost) / count,
            limit=MOST_LOST,
            level=Level.warning,
            remedy="convert the file anew from where it came, or drop these lines",
            places=[place(path, lost)],
        ),
        judged(
            "markup",
            where,
            found=f"{percent(len(marked) / count)} of the lines have tags, entities or marks of pieces",
            value=len(marked) / count,
            limit=MOST_MARKUP,
            level=Level.warning,
            remedy="strip the tags and unescape the entities, in all sets alike; text must be raw",
            places=[place(path, marked)],
        ),
    ]


# ---- style ----------------------------------------------------------------------------------------------------------


def _has_capital(text: str) -> bool:
    return text != text.lower()


def _has_spaced_stop(text: str) -> bool:
    return text.rstrip().endswith((" .", " ?", " !"))


STYLES = (
    ("case", "capitals", _has_capital, "train and evaluate on text of the same case; sacreBLEU counts case"),
    ("tokenisation", "a space before the last stop", _has_spaced_stop, "give raw text: it is not to be tokenised"),
)


def _check_style(survey: Survey, train: Survey, side: int) -> list[Check]:
    """Whether an evaluation set, or more training text, is written as `train` is."""
    checks = []
    for name, what, test, remedy in STYLES:
        shares = [sum(map(test, of.side(side))) / max(1, len(of.lines)) for of in (survey, train)]
        checks.append(
            judged(
                name,
                f"{survey.name} {SIDES[side]}",
                found=f"{percent(shares[0])} of the lines have {what}, of train {percent(shares[1])}",
                value=abs(shares[0] - shares[1]),
                limit=MOST_STYLE,
                level=Level.error,
                remedy=remedy,
                places=[place(of.paths[side], of.lines) for of in (survey, train)],
            )
        )
    return checks


def _both(survey: Survey, lines: Sequence[int]) -> list[Place]:
    return [place(path, lines) for path in dict.fromkeys(survey.paths)]
