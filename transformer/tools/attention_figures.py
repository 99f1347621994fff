"""Attention weights as figures, with matplotlib: words in two columns with weighted lines between them, as in the
paper's Figures 3 to 5, and heat maps. One panel a head.

The words of an SVG are text, so whoever shows it brings the fonts. A PNG needs them here: where no installed font has a
character, its piece is named by its number, `#3`.
"""

import logging
import math
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from transformer.tools.heads import MEASURES, SPACE, Head
from transformer.tools.plots import add_lines, as_png, as_svg, fonts_for, new_figure, text_errors_silenced

log = logging.getLogger(__name__)

Weights = npt.NDArray[np.float64]

LINE = 0.18  # inches between two words
LONGEST_PANEL = 12.0  # inches: words stand closer where there are more
BETWEEN = 1.3  # inches between the two columns of words
GAP = 0.3  # inches between two panels
TITLE = 0.3  # inches above each panel
FAINTEST = 0.01  # weights below are not drawn as lines
MOST_LINES = 10  # from a word, of one head
ASPECT = 1.6  # width over height that a figure comes close to
LARGEST_FONT = 9.0  # points
LONGEST_WORD = 24  # characters
PIXELS = 8_000  # of the longer side of a PNG, at most


@dataclass(frozen=True)
class Panel:
    """One part of a figure: weights `(queries, keys)` of one head or several, each with its colour."""

    title: str
    heads: Sequence[tuple[str, Weights]]


@dataclass(frozen=True)
class Words:
    """What stands beside the weights."""

    queries: Sequence[str]
    keys: Sequence[str]


@dataclass(frozen=True)
class Picture:
    """A figure in two formats."""

    png: bytes
    svg: bytes


def draw_lines(panels: Sequence[Panel], words: Words, *, title: str) -> Picture | None:
    """Two columns of words for each panel, and a line for each weight. None without matplotlib."""
    return _in_both_formats(words, lambda shown, fonts: _lines(panels, shown, title=title, fonts=fonts))


def draw_maps(panels: Sequence[Panel], words: Words, *, title: str) -> Picture | None:
    """A heat map for each panel, of its first head; a shade is the root of the weight. None without matplotlib."""
    return _in_both_formats(words, lambda shown, fonts: _maps(panels, shown, title=title, fonts=fonts))


def _in_both_formats(words: Words, draw: Callable[[Words, list[str]], Any]) -> Picture | None:
    shown = Words([_as_label(word) for word in words.queries], [_as_label(word) for word in words.keys])
    fonts, missing = fonts_for("".join([*shown.queries, *shown.keys]))

    with text_errors_silenced():
        figure = draw(shown, fonts)
        if figure is None:
            return None
        svg = as_svg(figure, text_as_text=True)
    if missing:
        log.warning(
            "no font for %d characters: the PNG numbers their pieces; the SVG and the page show them", len(missing)
        )
        numbered = Words(_numbered(shown.queries, missing), _numbered(shown.keys, missing))
        figure = draw(numbered, fonts)
    return Picture(_as_png(figure), svg)


def _as_png(figure: Any) -> bytes:
    """150 pixels an inch, or fewer where there would be too many."""
    return as_png(figure, dpi=min(150.0, PIXELS / max(figure.get_size_inches())))


def _as_label(piece: str) -> str:
    """A piece as a word of a figure: without the mark of a space, controls or excessive length."""
    word = piece.removeprefix(SPACE) or piece
    word = "".join(character if character.isprintable() else "\u00b7" for character in word)
    return word if len(word) <= LONGEST_WORD else word[: LONGEST_WORD - 1] + "\u2026"


def _numbered(words: Sequence[str], missing: set[str]) -> list[str]:
    return [f"#{n}" if missing & {*word} else word for n, word in enumerate(words, 1)]


# ---- lines ----------------------------------------------------------------------------------------------------------


def _lines(panels: Sequence[Panel], words: Words, *, title: str, fonts: list[str]) -> Any:
    count = max(len(words.queries), len(words.keys))
    line = min(LINE, LONGEST_PANEL / count)
    size = min(LARGEST_FONT, 60 * line)
    left, right = (_inches(side, size) for side in (words.queries, words.keys))

    grid = _Grid.of(len(panels), width=left + BETWEEN + right, height=count * line)
    figure = new_figure(width=grid.width, height=grid.height)
    if figure is None:
        return None
    _write_title(figure, title, grid)

    for n, panel in enumerate(panels):
        axes = grid.add_panel(figure, n, inset=(left, right))
        axes.set(xlim=(0, 1), ylim=(count - 0.5, -0.5))
        axes.set_axis_off()
        color = panel.heads[0][0] if len(panel.heads) == 1 else "black"
        axes.set_title(panel.title, fontsize=LARGEST_FONT, color=color, parse_math=False)
        for n, (color, weights) in enumerate(panel.heads):
            shift = 0.4 * ((n + 0.5) / len(panel.heads) - 0.5)  # heads end beside one another
            _add_weights(axes, weights, color, shift=shift)
        _write_words(axes, words.queries, x=-0.02, side="right", size=size, fonts=fonts)
        _write_words(axes, words.keys, x=1.02, side="left", size=size, fonts=fonts)
    return figure


def _add_weights(axes: Any, weights: Weights, color: str, *, shift: float) -> None:
    """A line for each of the strongest weights of every query."""
    strongest = -np.sort(-weights, axis=1)[:, :MOST_LINES][:, -1:]  # the weakest that is drawn
    queries, keys = np.nonzero((weights >= FAINTEST) & (weights >= strongest))
    values = weights[queries, keys]
    starts = np.stack([np.zeros(len(values)), queries + shift], 1)
    ends = np.stack([np.ones(len(values)), keys + shift], 1)
    add_lines(axes, np.stack([starts, ends], 1), color=color, opacities=values, widths=0.3 + 2.2 * values)


def _write_words(axes: Any, words: Sequence[str], *, x: float, side: str, size: float, fonts: list[str]) -> None:
    for n, word in enumerate(words):
        axes.text(x, n, word, ha=side, va="center", fontsize=size, fontfamily=fonts, parse_math=False)


# ---- heat maps ------------------------------------------------------------------------------------------------------


def _maps(panels: Sequence[Panel], words: Words, *, title: str, fonts: list[str]) -> Any:
    cell = min(LINE, LONGEST_PANEL / max(len(words.queries), len(words.keys)))
    size = min(LARGEST_FONT, 60 * cell)
    left, below = _inches(words.queries, size), _inches(words.keys, size)

    grid = _Grid.of(len(panels), width=left + cell * len(words.keys), height=cell * len(words.queries) + below)
    figure = new_figure(width=grid.width, height=grid.height)
    if figure is None:
        return None
    _write_title(figure, f"{title} (shade: root of the weight)", grid)

    for n, panel in enumerate(panels):
        axes = grid.add_panel(figure, n, inset=(left, 0.0), below=below)
        color, weights = panel.heads[0]
        axes.imshow(np.sqrt(weights), cmap="Greys", vmin=0, vmax=1, interpolation="nearest", aspect="auto")
        axes.set_title(panel.title, fontsize=LARGEST_FONT, color=color, parse_math=False)
        axes.set(xticks=[], yticks=[])
        _write_words(axes, words.queries, x=-0.7, side="right", size=size, fonts=fonts)
        _write_below(axes, words.keys, y=len(words.queries) - 0.3, size=size, fonts=fonts)
    return figure


def _write_below(axes: Any, words: Sequence[str], *, y: float, size: float, fonts: list[str]) -> None:
    for n, word in enumerate(words):
        axes.text(n, y, word, rotation=90, ha="center", va="top", fontsize=size, fontfamily=fonts, parse_math=False)


# ---- all heads ------------------------------------------------------------------------------------------------------

SHARES = ("previous", "same", "next", "mark")  # of the measures, those between 0 and 1


def draw_heads(heads: Sequence[Head], *, title: str) -> Picture | None:
    """Every measure of every head: a column for each role, layers below one another. None without matplotlib."""
    roles = list(dict.fromkeys(head.role for head in heads))
    n_layers = max(head.layer for head in heads)
    n_heads = max(head.head for head in heads)

    cell = 0.42
    width, height = cell * n_heads + 0.5, 0.7 * cell * n_layers + 0.3
    grid = _Grid(len(roles), len(MEASURES), width, height)
    figure = new_figure(width=grid.width, height=grid.height)
    if figure is None:
        return None
    _write_title(figure, f"{title}: layers from top to bottom, heads from left to right", grid)

    for n, (measure, role) in enumerate((measure, role) for measure in MEASURES for role in roles):
        values = np.zeros((n_layers, n_heads))
        for head in heads:
            if head.role == role:
                values[head.layer - 1, head.head - 1] = getattr(head, measure)
        largest = 1.0 if measure in SHARES else max(getattr(head, measure) for head in heads)
        axes = grid.add_panel(figure, n, inset=(0.25, 0.0), below=0.2)
        axes.imshow(values, cmap="Blues", vmin=0, vmax=largest, aspect="auto")
        axes.set_title(f"{measure}, {role}", fontsize=LARGEST_FONT)
        axes.set_xticks(range(n_heads), range(1, n_heads + 1), fontsize=7)
        axes.set_yticks(range(n_layers), range(1, n_layers + 1), fontsize=7)
        axes.tick_params(length=0)
        for (layer, number), value in np.ndenumerate(values):
            color = "white" if value > 0.6 * largest else "black"
            axes.text(number, layer, f"{value:.2f}", ha="center", va="center", fontsize=6.5, color=color)
    return Picture(_as_png(figure), as_svg(figure, text_as_text=True))


# ---- where things stand ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Grid:
    """Panels in rows, all of one size, in inches."""

    columns: int
    rows: int
    panel_width: float
    panel_height: float

    @classmethod
    def of(cls, count: int, *, width: float, height: float) -> "_Grid":
        """The grid of so many panels of this size that is closest to a page's shape, with few places left empty."""

        def distance(grid: "_Grid") -> float:
            empty = grid.columns * grid.rows - count
            return abs(math.log(grid.width / grid.height / ASPECT)) + empty / count

        grids = [cls(columns, math.ceil(count / columns), width, height) for columns in range(1, count + 1)]
        return min(grids, key=distance)

    @property
    def width(self) -> float:
        return self.columns * (self.panel_width + GAP) + GAP

    @property
    def height(self) -> float:
        return self.rows * (self.panel_height + TITLE + GAP) + TITLE

    def add_panel(self, figure: Any, n: int, *, inset: tuple[float, float], below: float = 0.0) -> Any:
        """Axes for panel `n`; the words beside and below them take `inset` and `below` of its size."""
        row, column = divmod(n, self.columns)
        x = GAP + column * (self.panel_width + GAP) + inset[0]
        top = TITLE + row * (self.panel_height + TITLE + GAP) + TITLE
        width = self.panel_width - sum(inset)
        height = self.panel_height - below
        bottom = self.height - top - height
        return figure.add_axes((x / self.width, bottom / self.height, width / self.width, height / self.height))


def _write_title(figure: Any, title: str, grid: _Grid) -> None:
    figure.text(GAP / grid.width, 1 - 0.06 / grid.height, title, va="top", fontsize=LARGEST_FONT + 1, parse_math=False)


def _inches(words: Sequence[str], size: float) -> float:
    """How wide the longest word is, at most, in a font of this size in points."""
    widths = [sum(1.05 if unicodedata.east_asian_width(c) in "WF" else 0.62 for c in word) for word in words]
    return max(widths, default=0.0) * size / 72 + 0.08
