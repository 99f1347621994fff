"""Markdown of what a run says: names, versions and settings stay text, whoever wrote them.

plain    text in a paragraph, a list or a cell: no line, heading, link, image or HTML begins in it
code     the same as a span of code, character by character
fenced   lines as a block of code, which nothing in them ends
"""

import re
from collections.abc import Collection, Iterable, Sequence

from transformer.terminal import printable

_ACTS = re.compile(r"[\\`*_\[\]<>&|~$#!]|(?<=:)/(?=/)|(?<=www)\.|@")  # punctuation that a backslash makes text
_TICKS = re.compile(r"`+")


def plain(text: str) -> str:
    """The text on one line, with a backslash before what acts in Markdown."""
    return _ACTS.sub(r"\\\g<0>", _on_one_line(text))


def code(text: str) -> str:
    """The text on one line as a span of code, outside a table: there a bar would end the cell."""
    text = _on_one_line(text)
    ticks = "`" * (1 + _longest_ticks(text))
    space = " " if "`" in text or not text else ""  # which is not shown
    return f"{ticks}{space}{text}{space}{ticks}"


def fenced(language: str, lines: Iterable[str]) -> list[str]:
    """The lines of a block of code, fenced by more backticks than are within it."""
    text = printable("\n".join(lines), keep="\n\t")
    fence = "`" * max(3, 1 + _longest_ticks(text))
    return [f"{fence}{language}", *text.split("\n"), fence]


def _longest_ticks(text: str) -> int:
    return max(map(len, _TICKS.findall(text)), default=0)


def _on_one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[int]) -> list[str]:
    """The lines of a table; the columns with the numbers `left`, from 0, are to the left, all others to the right."""
    rule = ["---" if number in left else "---:" for number in range(len(titles))]
    return ["| " + " | ".join(cells) + " |" for cells in (titles, rule, *rows)]
