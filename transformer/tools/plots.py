"""Plots, with matplotlib where it is installed (the extra `plots`), as SVG or PNG.

    plot_points, plot_times     whole figures, for `tables`
    new_figure, add_lines, as_svg, as_png    what `attention.figures` draws with

It is the only module that imports matplotlib. Without it a function that draws returns None.
"""

import colorsys
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from transformer.registry import install_command
from transformer.tools.significance import Interval

log = logging.getLogger(__name__)

Numbers = npt.NDArray[np.float64]

INCHES_A_ROW = 0.28

# Ten colours that are told apart on light and on dark paper (Tableau's).
TEN_COLORS = (
    "#1f77b4",  # blue
    "#ff7f0e",  # orange
    "#2ca02c",  # green
    "#d62728",  # red
    "#9467bd",  # purple
    "#8c564b",  # brown
    "#e377c2",  # pink
    "#7f7f7f",  # grey
    "#bcbd22",  # olive
    "#17becf",  # cyan
)


def distinct_colors(count: int) -> list[str]:
    """`count` colours that are told apart, each as `#1f77b4`; more than ten are hues around the circle."""
    if count <= len(TEN_COLORS):
        return list(TEN_COLORS[:count])
    return [_hue(number / count, lightness=0.4 if number % 2 else 0.55) for number in range(count)]


def _hue(angle: float, *, lightness: float) -> str:
    """A colour of the circle, `angle` from 0 to 1, as `#1f77b4`."""
    red, green, blue = colorsys.hls_to_rgb(angle, lightness, 0.65)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


# ---- whole figures --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """One row of a table: its published score, if any, and the measured ones, one for each seed."""

    name: str
    published: float | None
    measured: list[Interval]  # at least one


def plot_points(points: Sequence[Point], *, title: str) -> bytes | None:
    """BLEU of every row, measured beside published, as a difference from that of the first. None without matplotlib."""
    figure = _page_figure(height=1.4 + INCHES_A_ROW * len(points))
    if figure is None:
        return None
    axes = figure.add_subplot()
    first = points[0]
    origin = fmean(score.bleu for score in first.measured)

    for height, point in enumerate(points):  # from top to bottom
        is_first = height == 0  # only its labels are in the legend
        axes.errorbar(
            [score.bleu - origin for score in point.measured],
            [height] * len(point.measured),
            xerr=[score.half_width for score in point.measured],
            fmt="o",
            color="tab:blue",
            label="measured, with 95 % of test sampling" if is_first else None,
        )
        if point.published is not None and first.published is not None:
            axes.plot(
                point.published - first.published,
                height,
                marker="D",
                linestyle="none",
                fillstyle="none",
                color="tab:orange",
                label="the paper" if is_first else None,
            )

    axes.axvline(0.0, color="grey", linewidth=0.8)
    axes.set_yticks(range(len(points)), [point.name for point in points])
    axes.invert_yaxis()
    axes.set_xlabel(f"BLEU less that of {first.name}")
    axes.set_title(title, fontsize="medium")
    axes.legend(loc="best", fontsize="small")

    return as_svg(figure, text_as_text=False)


def plot_times(times: Mapping[str, Sequence[tuple[int, float]]], *, title: str) -> bytes | None:
    """Milliseconds against length, a line for each layer, both axes logarithmic. None without matplotlib."""
    figure = _page_figure(height=4.0)
    if figure is None:
        return None
    axes = figure.add_subplot()
    for name, line in times.items():
        lengths = [length for length, _ in line]
        milliseconds = [time for _, time in line]
        axes.plot(lengths, milliseconds, marker="o", label=name)

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("positions n")
    axes.set_ylabel("milliseconds, forward and backward")
    axes.set_title(title, fontsize="medium")
    axes.legend(loc="best", fontsize="small")
    return as_svg(figure, text_as_text=False)


# ---- figures and their formats --------------------------------------------------------------------------------------


def new_figure(*, width: float, height: float) -> Any:  # a Figure, or None without matplotlib
    """An empty figure of this size in inches; None, with a log line, without matplotlib."""
    try:
        from matplotlib.figure import Figure  # slow, and optional; no pyplot, so that no window and no state is opened
    except ImportError:
        log.info("no plot: %s", install_command("plots"))
        return None
    return Figure(figsize=(width, height))


def _page_figure(*, height: float) -> Any:
    """A figure of the width of a page, whose parts leave room for one another."""
    figure = new_figure(width=7.0, height=height)
    if figure is not None:
        figure.set_layout_engine("constrained")
    return figure


def as_svg(figure: Any, *, text_as_text: bool) -> bytes:
    """The figure as SVG, without a date or random names, so that the same figure gives the same file.

    Words are outlines; with `text_as_text` they are text, for which the reader's machine must have the fonts.
    """
    from matplotlib import rc_context

    content = io.BytesIO()
    font_type = "none" if text_as_text else "path"
    with rc_context({"svg.hashsalt": "table", "svg.fonttype": font_type}):
        figure.savefig(content, format="svg", metadata={"Date": None})
    return content.getvalue()


def as_png(figure: Any, *, dpi: float) -> bytes:
    """The figure as PNG, with `dpi` pixels to an inch."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=dpi, metadata={"Software": None})
    return content.getvalue()


def add_lines(axes: Any, segments: Numbers, *, color: str, opacities: Numbers, widths: Numbers) -> None:
    """Straight lines `(n, 2, 2)` from one point to another, each with its opacity `(n,)` and width `(n,)` in points."""
    from matplotlib.collections import LineCollection
    from matplotlib.colors import to_rgb

    rgb = to_rgb(color)
    colors = [(*rgb, min(1.0, 0.08 + opacity)) for opacity in opacities.tolist()]  # the faintest can still be seen
    lines = LineCollection(list(segments), colors=colors, linewidths=widths)
    axes.add_collection(lines, autolim=False)


# ---- fonts ----------------------------------------------------------------------------------------------------------


def fonts_for(text: str) -> tuple[list[str], set[str]]:
    """Font families that have the characters of `text`, matplotlib's own first; and the characters that none has.

    Without matplotlib, no family, and no character is missing.
    """
    try:
        from matplotlib import font_manager
    except ImportError:
        return [], set()

    families = ["DejaVu Sans"]  # matplotlib's own
    missing = _without_glyph({*text}, font_manager.findfont("DejaVu Sans"))
    if not missing:
        return families, missing

    # Add every installed font that has some of the missing characters.
    for path in sorted(font_manager.findSystemFonts()):
        still_missing = _without_glyph(missing, path)
        if len(still_missing) < len(missing):
            font_manager.fontManager.addfont(path)  # matplotlib's own list may be older than the font
            families.append(font_manager.get_font(path).family_name)
            missing = still_missing
    return families, missing


def _without_glyph(characters: set[str], font: str) -> set[str]:
    """The characters that a font file has no glyph for."""
    from matplotlib.font_manager import get_font

    try:
        face = get_font(font)
    except (OSError, RuntimeError):  # a font that cannot be read has no glyph
        return characters
    return {character for character in characters if face.get_char_index(ord(character)) == 0}


@contextmanager
def text_errors_silenced() -> Iterator[None]:
    """Let matplotlib not warn of characters without a glyph: what is drawn as text gets its fonts later."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield
