"""The notes, tables and commands of a report, as sections of its page; the script in blocks.js draws them.

    overview, score_tables, data_tables, provenance -> blocks -> section -> a Component of the page

Whatever comes from a file is shortened and has its controls escaped, and a table has a limited number of rows, so that
no run directory can make a page of any size.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from transformer.terminal import printable
from transformer.tools.page import Component

UNKNOWN = "unknown"  # the text of a cell whose value no file of the run tells
MOST_CHARACTERS = 400  # of a cell
MOST_NOTE = 1_500  # characters
MOST_COMMAND = 20_000  # characters
MOST_ROWS = 200  # of a table


@dataclass(frozen=True)
class Marked:
    """The text of a cell that stands out."""

    text: str


@dataclass(frozen=True)
class Scale:
    """The axis on which the intervals of a table are drawn."""

    least: float
    most: float

    @classmethod
    def of(cls, intervals: Iterable[tuple[float, float]]) -> "Scale":
        """The scale on which all of these have room: scores, each with the half-width of its interval."""
        lower_ends = []
        upper_ends = []
        for score, half_width in intervals:
            lower_ends.append(score - half_width)
            upper_ends.append(score + half_width)
        return cls(min(lower_ends, default=0.0), max(upper_ends, default=1.0))


@dataclass(frozen=True)
class Score:
    """A cell with a score, its 95 % interval, and the scale that the interval is drawn on."""

    score: float
    half_width: float
    scale: Scale


Cell = str | Marked | Score


@dataclass(frozen=True)
class Note:
    """A paragraph."""

    text: str
    is_warning: bool


@dataclass(frozen=True)
class Table:
    """A table whose first column names the rows; `is_numeric` aligns the other columns to the right."""

    caption: str
    head: list[str]
    rows: list[list[Cell]]
    is_numeric: bool


@dataclass(frozen=True)
class Command:
    """A command line, and what it does."""

    about: str
    text: str


Block = Note | Table | Command


def section(heading: str, blocks: Sequence[Block]) -> Component:
    """A section of a report."""
    return Component("report/blocks", heading, [_to_data(block) for block in blocks])


def shorten(text: str, limit: int = MOST_CHARACTERS) -> str:
    """The text with its control characters escaped, and no longer than `limit`."""
    shown = printable(text[: limit + 1])
    if len(shown) <= limit:
        return shown
    return f"{shown[: limit - 1]}…"


def _to_data(block: Block) -> dict[str, object]:
    """A block as the script reads it."""
    match block:
        case Note():
            return {"kind": "note", "text": shorten(block.text, MOST_NOTE), "is_warning": block.is_warning}
        case Command():
            return {"kind": "command", "about": shorten(block.about), "text": shorten(block.text, MOST_COMMAND)}
        case Table():
            return _table_data(block)


def _table_data(table: Table) -> dict[str, object]:
    rows = [[_cell_data(cell) for cell in row] for row in table.rows[:MOST_ROWS]]
    if len(table.rows) > MOST_ROWS:
        rows.append([_cell_data(f"and {len(table.rows) - MOST_ROWS:,} more")])
    return {
        "kind": "table",
        "caption": shorten(table.caption),
        "head": [shorten(name) for name in table.head],
        "rows": rows,
        "is_numeric": table.is_numeric,
    }


def _cell_data(cell: Cell) -> dict[str, object]:
    match cell:
        case str():
            return {"text": shorten(cell), "is_marked": False}
        case Marked():
            return {"text": shorten(cell.text), "is_marked": True}
        case Score():
            return {
                "value": cell.score,
                "half_width": cell.half_width,
                "least": cell.scale.least,
                "most": cell.scale.most,
            }
