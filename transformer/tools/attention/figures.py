"""Attention weights as figures, with matplotlib.

    draw_lines    words in two columns and weighted lines between them, as in the paper's Figures 3 to 5
    draw_maps     heat maps
    draw_heads    the measures of every head of a model, from `heads`

The first two have a panel for each head. Each figure is made as SVG and as PNG. The words of an SVG are text, so
whoever shows it brings the fonts. A PNG needs them here: where no installed font has a character of a piece, the piece
is shown as its number, `#3`.
"""

import logging
import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from transformer.tools.attention.heads import MEASURES, Head
from transformer.tools.paper.alignment_error import SPACE
from transformer.tools.plots import add_lines, as_png, as_svg, fonts_for, new_figure, text_errors_silenced

log = logging.getLogger(__name__)

Weights = npt.NDArray[np.float64]

# Lengths in inches.
LINE = 0.18  # between two words
LONGEST_PANEL = 12.0  # words stand closer where there are more
BETWEEN = 1.3  # between the two columns of words
GAP = 0.3  # between two panels
TITLE = 0.3  # above each panel
HEAD_CELL = 0.42  # the width of a head where all heads are shown

# Sizes of text.
LARGEST_FONT = 9.0  # points
POINTS_AN_INCH = 60  # a font's size in points for lines an inch apart, which leaves room between them
LONGEST_WORD = 24  # characters

FAINTEST = 0.01  # weights below are not drawn as lines
MOST_LINES = 10  # from a word, of one head
ASPECT = 1.6  # width over height that a figure comes close to
PIXELS = 8_000  # of the longer side of a PNG, at most
DOTS_AN_INCH = 150.0  # of a PNG, unless that makes too many pixels


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
    return _in_both_formats(_lines, panels, words, title=title)


def draw_maps(panels: Sequence[Panel], words: Words, *, title: str) -> Picture | None:
    """A heat map for each panel, of its first head; a shade is the root of the weight. None without matplotlib."""
    return _in_both_formats(_maps, panels, words, title=title)


class _Draw(Protocol):
    """A function that draws panels with these words beside them: a matplotlib figure, or None without matplotlib."""

    def __call__(self, panels: Sequence[Panel], words: Words, *, title: str, fonts: list[str]) -> Any: ...


def _in_both_formats(draw: _Draw, panels: Sequence[Panel], words: Words, *, title: str) -> Picture | None:
    """The figure that `draw` draws; None without matplotlib."""
    labels = Words([_as_label(word) for word in words.queries], [_as_label(word) for word in words.keys])
    fonts, missing = fonts_for("".join([*labels.queries, *labels.keys]))

    # The SVG has every word as text.
    with text_errors_silenced():
        figure = draw(panels, labels, title=title, fonts=fonts)
        if figure is None:
            return None
        svg = as_svg(figure, text_as_text=True)

    # The PNG shows what the fonts of this machine can show.
    if missing:
        log.warning(
            "no font for %d characters: the PNG numbers their pieces; the SVG and the page show them", len(missing)
        )
        numbered = Words(_numbered(labels.queries, missing), _numbered(labels.keys, missing))
        figure = draw(panels, numbered, title=title, fonts=fonts)
    return Picture(_as_png(figure), svg)


def _as_png(figure: Any) -> bytes:
    """The figure as PNG, with fewer dots an inch where there would be too many pixels."""
    longer_side = max(figure.get_size_inches())
    return as_png(figure, dpi=min(DOTS_AN_INCH, PIXELS / longer_side))


def _as_label(piece: str) -> str:
    """A piece as a word of a figure: without the mark of a space, controls or excessive length."""
    word = piece.removeprefix(SPACE) or piece
    word = "".join(character if character.isprintable() else "\u00b7" for character in word)
    return word if len(word) <= LONGEST_WORD else word[: LONGEST_WORD - 1] + "\u2026"


def _numbered(words: Sequence[str], missing: set[str]) -> list[str]:
    """The words, with the number of a word in its place where one of its characters has no font."""
    return [f"#{number}" if missing & {*word} else word for number, word in enumerate(words, 1)]


# ---- lines ----------------------------------------------------------------------------------------------------------


def _lines(panels: Sequence[Panel], words: Words, *, title: str, fonts: list[str]) -> Any:
    """A figure of two columns of words for each panel; None without matplotlib."""
    # How large everything is.
    count = max(len(words.queries), len(words.keys))
    line = min(LINE, LONGEST_PANEL / count)
    font_size = min(LARGEST_FONT, POINTS_AN_INCH * line)
    left = _inches(words.queries, font_size)
    right = _inches(words.keys, font_size)

    grid = _Grid.of(len(panels), width=left + BETWEEN + right, height=count * line)
    figure = new_figure(width=grid.width, height=grid.height)
    if figure is None:
        return None
    _write_title(figure, title, grid)

    # The panels: x goes from queries (0) to keys (1), y from the first word down.
    for number, panel in enumerate(panels):
        axes = grid.add_panel(figure, number, inset=(left, right))
        axes.set(xlim=(0, 1), ylim=(count - 0.5, -0.5))
        axes.set_axis_off()
        title_color = panel.heads[0][0] if len(panel.heads) == 1 else "black"
        axes.set_title(panel.title, fontsize=LARGEST_FONT, color=title_color, parse_math=False)

        for place, (color, weights) in enumerate(panel.heads):
            shift = 0.4 * ((place + 0.5) / len(panel.heads) - 0.5)  # heads end beside one another
            _add_weights(axes, weights, color, shift=shift)
        _write_words(axes, words.queries, x=-0.02, side="right", font_size=font_size, fonts=fonts)
        _write_words(axes, words.keys, x=1.02, side="left", font_size=font_size, fonts=fonts)
    return figure


def _add_weights(axes: Any, weights: Weights, color: str, *, shift: float) -> None:
    """A line for each of the strongest weights `(queries, keys)` of every query."""
    # Which weights are drawn: `weakest` is the least of each query's MOST_LINES strongest.
    strongest = -np.sort(-weights, axis=1)[:, :MOST_LINES]
    weakest = strongest[:, -1:]  # (queries, 1)
    queries, keys = np.nonzero((weights >= FAINTEST) & (weights >= weakest))
    drawn = weights[queries, keys]  # (n,)

    # A line from (0, query) to (1, key).
    starts = np.stack([np.zeros(len(drawn)), queries + shift], 1)  # (n, 2)
    ends = np.stack([np.ones(len(drawn)), keys + shift], 1)  # (n, 2)
    segments = np.stack([starts, ends], 1)  # (n, 2, 2)
    add_lines(axes, segments, color=color, opacities=drawn, widths=0.3 + 2.2 * drawn)


def _write_words(axes: Any, words: Sequence[str], *, x: float, side: str, font_size: float, fonts: list[str]) -> None:
    """Words below one another, whose `side`, left or right, is at x."""
    for y, word in enumerate(words):
        axes.text(x, y, word, ha=side, va="center", fontsize=font_size, fontfamily=fonts, parse_math=False)


# ---- heat maps ------------------------------------------------------------------------------------------------------


def _maps(panels: Sequence[Panel], words: Words, *, title: str, fonts: list[str]) -> Any:
    """A figure of a heat map for each panel; None without matplotlib."""
    # How large everything is.
    cell = min(LINE, LONGEST_PANEL / max(len(words.queries), len(words.keys)))
    font_size = min(LARGEST_FONT, POINTS_AN_INCH * cell)
    left = _inches(words.queries, font_size)
    below = _inches(words.keys, font_size)

    grid = _Grid.of(len(panels), width=left + cell * len(words.keys), height=cell * len(words.queries) + below)
    figure = new_figure(width=grid.width, height=grid.height)
    if figure is None:
        return None
    _write_title(figure, f"{title} (shade: root of the weight)", grid)

    for number, panel in enumerate(panels):
        axes = grid.add_panel(figure, number, inset=(left, 0.0), below=below)
        color, weights = panel.heads[0]
        axes.imshow(np.sqrt(weights), cmap="Greys", vmin=0, vmax=1, interpolation="nearest", aspect="auto")
        axes.set_title(panel.title, fontsize=LARGEST_FONT, color=color, parse_math=False)
        axes.set(xticks=[], yticks=[])
        _write_words(axes, words.queries, x=-0.7, side="right", font_size=font_size, fonts=fonts)
        _write_below(axes, words.keys, y=len(words.queries) - 0.3, font_size=font_size, fonts=fonts)
    return figure


def _write_below(axes: Any, words: Sequence[str], *, y: float, font_size: float, fonts: list[str]) -> None:
    """Words beside one another, each written upwards, whose end is at y."""
    for x, word in enumerate(words):
        axes.text(
            x, y, word, rotation=90, ha="center", va="top", fontsize=font_size, fontfamily=fonts, parse_math=False
        )


# ---- all heads ------------------------------------------------------------------------------------------------------

SHARES = ("previous", "same", "next", "mark")  # the measures that are between 0 and 1


def draw_heads(heads: Sequence[Head], *, title: str) -> Picture | None:
    """Every measure of every head: a column for each role, layers below one another. None without matplotlib."""
    roles = list(dict.fromkeys(head.role for head in heads))
    n_layers = max(head.layer for head in heads)
    n_heads = max(head.head for head in heads)

    grid = _Grid(
        columns=len(roles),
        rows=len(MEASURES),
        panel_width=HEAD_CELL * n_heads + 0.5,
        panel_height=0.7 * HEAD_CELL * n_layers + 0.3,
    )
    figure = new_figure(width=grid.width, height=grid.height)
    if figure is None:
        return None
    _write_title(figure, f"{title}: layers from top to bottom, heads from left to right", grid)

    for row, measure in enumerate(MEASURES):
        largest = 1.0 if measure in SHARES else max(head.measure(measure) for head in heads)
        for column, role in enumerate(roles):
            values = np.full((n_layers, n_heads), np.nan)  # encoder and decoder may differ in depth
            for head in heads:
                if head.role == role:
                    values[head.layer - 1, head.head - 1] = head.measure(measure)

            axes = grid.add_panel(figure, row * grid.columns + column, inset=(0.25, 0.0), below=0.2)
            axes.set_title(f"{measure}, {role}", fontsize=LARGEST_FONT)
            _draw_values(axes, values, largest=largest)
    return Picture(_as_png(figure), as_svg(figure, text_as_text=True))


def _draw_values(axes: Any, values: Weights, *, largest: float) -> None:
    """One measure `(layers, heads)` as numbers on shades; NaN where there is no such layer."""
    n_layers, n_heads = values.shape
    axes.imshow(values, cmap="Blues", vmin=0, vmax=largest, aspect="auto")
    axes.set_xticks(range(n_heads), range(1, n_heads + 1), fontsize=7)
    axes.set_yticks(range(n_layers), range(1, n_layers + 1), fontsize=7)
    axes.tick_params(length=0)
    for (layer, head), value in np.ndenumerate(values):
        if np.isnan(value):
            continue
        color = "white" if value > 0.6 * largest else "black"
        axes.text(head, layer, f"{value:.2f}", ha="center", va="center", fontsize=6.5, color=color)


# ---- where panels stand ----------------------------------------------------------------------------------------------


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
        grids = [cls(columns, math.ceil(count / columns), width, height) for columns in range(1, count + 1)]
        return min(grids, key=lambda grid: grid.unfitness(count))

    def unfitness(self, count: int) -> float:
        """How far the figure is from a page's shape, plus the share of places that `count` panels leave empty."""
        empty = self.columns * self.rows - count
        return abs(math.log(self.width / self.height / ASPECT)) + empty / count

    @property
    def width(self) -> float:
        """The width of the figure."""
        return self.columns * (self.panel_width + GAP) + GAP

    @property
    def height(self) -> float:
        """The height of the figure."""
        return self.rows * (self.panel_height + TITLE + GAP) + TITLE

    def add_panel(self, figure: Any, number: int, *, inset: tuple[float, float], below: float = 0.0) -> Any:
        """Axes for a panel, counted from 0 by rows.

        The words to their left and right take `inset` of the panel's size, and the words below them take `below`.
        """
        row, column = divmod(number, self.columns)
        left, right = inset
        x = GAP + column * (self.panel_width + GAP) + left
        top = TITLE + row * (self.panel_height + TITLE + GAP) + TITLE
        width = self.panel_width - (left + right)
        height = self.panel_height - below

        # Matplotlib counts from below, in shares of the figure.
        bottom = self.height - top - height
        return figure.add_axes((x / self.width, bottom / self.height, width / self.width, height / self.height))


def _write_title(figure: Any, title: str, grid: _Grid) -> None:
    figure.text(GAP / grid.width, 1 - 0.06 / grid.height, title, va="top", fontsize=LARGEST_FONT + 1, parse_math=False)


def _inches(words: Sequence[str], font_size: float) -> float:
    """How wide the longest word is, at most, in a font of this size in points."""
    longest = max(map(_width_in_ems, words), default=0.0)
    return longest * font_size / 72 + 0.08


def _width_in_ems(word: str) -> float:
    """The width of a word in multiples of the font's size; East Asian characters are as wide as they are high."""
    return sum(1.05 if unicodedata.east_asian_width(character) in "WF" else 0.62 for character in word)
