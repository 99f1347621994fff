"""What must arrive in a translation as it is: numbers, URLs, names in Latin script and tags, for `compare`.

sources and the translations of each system -> count_kept -> a row for each kind

A piece of the source arrives where the translation has it, too, as often as the source has it. Numbers are compared by
their digits, so that 1,000.5 may become 1.000,5. Names are words with a Latin capital that do not begin a sentence, and
count where the reference has them as they are: London may be Londres, and then no translation has to keep it.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MOST_EXAMPLES = 3  # of each system and kind

_LATIN = "[0-9A-Za-z_\u00c0-\u024f]"
_URL = re.compile(r"(?:https?://|www\.)[^\s<>\"]*[\w/]|(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,64}\.[\w.-]{0,64}\w")
_TAG = re.compile(r"</?[A-Za-z][^<>]*>|\{\{?\w+\}?\}|%[sd]\b")
_NUMBER = re.compile(r"\d+(?:[.,:' \u00a0\u202f]\d+)*")
_NAME = re.compile(rf"(?<!{_LATIN})[A-Z\u00c0-\u00de](?:{_LATIN}|['-](?={_LATIN}))+", re.ASCII)
_WORD = re.compile(rf"{_LATIN}(?:{_LATIN}|['-](?={_LATIN}))*", re.ASCII)
_STARTS = ".!?:;…\"„“«»”'([–—-"  # behind these begins a sentence

Pieces = Counter[str]
PiecesOf = Callable[[str], Pieces]


@dataclass(frozen=True)
class Lost:
    """Pieces of a source that did not arrive."""

    line: int  # counted from 1
    pieces: list[str]
    translation: str


@dataclass(frozen=True)
class KeptRow:
    """How many pieces of a kind the sources have, how many of them arrive in each system, and some that did not."""

    kind: str
    pieces: int
    kept: list[int]
    lost: list[list[Lost]]  # by system, the first of them


def count_kept(sources: Sequence[str], references: Sequence[str], systems: Sequence[Sequence[str]]) -> list[KeptRow]:
    """A row for each kind of which the sources have any; the systems' translations are line for line.

    Names are counted where the references have them.
    """
    rows = []
    for kind, pieces_of in KINDS.items():
        wanted = [pieces_of(source) for source in sources]
        arrived = pieces_of
        if kind == NAMES:
            wanted = [pieces & _names_anywhere(reference) for pieces, reference in zip(wanted, references, strict=True)]
            arrived = _names_anywhere
        total = sum(pieces.total() for pieces in wanted)
        if total:
            compared = [_compare(wanted, lines, arrived) for lines in systems]
            rows.append(KeptRow(kind, total, [kept for kept, _ in compared], [lost for _, lost in compared]))
    return rows


def _compare(wanted: Sequence[Pieces], lines: Sequence[str], arrived: PiecesOf) -> tuple[int, list[Lost]]:
    """How many pieces arrive in the lines, and the first lines that lack some."""
    kept = 0
    lost: list[Lost] = []
    for number, (pieces, line) in enumerate(zip(wanted, lines, strict=True), 1):
        if not pieces:
            continue
        found = pieces & arrived(line)
        kept += found.total()
        if found != pieces and len(lost) < MOST_EXAMPLES:
            lost.append(Lost(number, sorted((pieces - found).elements()), line))
    return kept, lost


# ---- the kinds ------------------------------------------------------------------------------------------------------


def _urls(text: str) -> Pieces:
    """URLs and addresses of e-mail."""
    return Counter(_URL.findall(text))


def _tags(text: str) -> Pieces:
    """Tags of markup and placeholders, without one in front that tells a model what to do."""
    return Counter(_TAG.findall(text))


def _numbers(text: str) -> Pieces:
    """The digits of each number; those of URLs and tags are not counted."""
    text = _TAG.sub(" ", _URL.sub(" ", text))
    return Counter(re.sub(r"\D", "", found) for found in _NUMBER.findall(text))


def _names(text: str) -> Pieces:
    """Words with a Latin capital inside a sentence."""
    text = _TAG.sub(" ", _URL.sub(" ", text))
    names: Pieces = Counter()
    for match in _NAME.finditer(text):
        before = text[max(0, match.start() - 20) : match.start()].rstrip()  # not all of it: a line may be long
        if before and before[-1] not in _STARTS:
            names[match[0]] += 1
    return names


def _names_anywhere(text: str) -> Pieces:
    """The words in Latin script, wherever they stand: a translation may begin with a name."""
    return Counter(_WORD.findall(text))


NAMES = "names in Latin script"
KINDS: dict[str, PiecesOf] = {"numbers": _numbers, "URLs": _urls, NAMES: _names, "tags": _tags}
