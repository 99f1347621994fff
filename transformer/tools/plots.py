"""Plots, with matplotlib where it is installed (`pip install 'transformer-mt[plots]'`); as SVG, which is text."""

import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from transformer.tools.significance import Interval

log = logging.getLogger(__name__)

INCHES_A_ROW = 0.28


@dataclass(frozen=True)
class Point:
    """One row of a table: its published score, if any, and the measured ones, one for each seed."""

    name: str
    published: float | None
    measured: list[Interval]  # at least one


def plot_points(points: Sequence[Point], *, title: str) -> bytes | None:
    """BLEU of every row, measured beside published, as a difference from that of the first. None without matplotlib."""
    figure = _new_figure(height=1.4 + INCHES_A_ROW * len(points))
    if figure is None:
        return None
    axes = figure.add_subplot()
    first = points[0]
    origin = fmean(score.bleu for score in first.measured)

    for height, point in enumerate(points):
        axes.errorbar(
            [score.bleu - origin for score in point.measured],
            [height] * len(point.measured),
            xerr=[score.half_width for score in point.measured],
            fmt="o",
            color="tab:blue",
            label="measured, with 95 % of test sampling" if height == 0 else None,
        )
        if point.published is not None and first.published is not None:
            axes.plot(
                point.published - first.published,
                height,
                marker="D",
                linestyle="none",
                fillstyle="none",
                color="tab:orange",
                label="the paper" if height == 0 else None,
            )

    axes.axvline(0.0, color="grey", linewidth=0.8)
    axes.set_yticks(range(len(points)), [point.name for point in points])
    axes.invert_yaxis()
    axes.set_xlabel(f"BLEU less that of {first.name}")
    axes.set_title(title, fontsize="medium")
    axes.legend(loc="best", fontsize="small")

    return _as_svg(figure)


def plot_times(times: Mapping[str, Sequence[tuple[int, float]]], *, title: str) -> bytes | None:
    """Milliseconds against length, a line for each layer, both axes logarithmic. None without matplotlib."""
    figure = _new_figure(height=4.0)
    if figure is None:
        return None
    axes = figure.add_subplot()
    for name, line in times.items():
        axes.plot([length for length, _ in line], [milliseconds for _, milliseconds in line], marker="o", label=name)

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("positions n")
    axes.set_ylabel("milliseconds, forward and backward")
    axes.set_title(title, fontsize="medium")
    axes.legend(loc="best", fontsize="small")
    return _as_svg(figure)


@dataclass(frozen=True)
class Panel:
    """One of several plots over the same x: a line of points for each name."""

    title: str
    lines: Mapping[str, Sequence[tuple[int, float]]]
    is_logarithmic: bool  # the y axis


def plot_panels(panels: Sequence[Panel], *, x_label: str) -> bytes | None:
    """Panels below one another, x in powers of two. None without matplotlib."""
    figure = _new_figure(height=3.0 * len(panels))
    if figure is None:
        return None

    for axes, panel in zip(figure.subplots(len(panels), sharex=True, squeeze=False).flat, panels, strict=True):
        for name, line in panel.lines.items():
            if line:
                axes.plot([x for x, _ in line], [y for _, y in line], marker="o", label=name)

        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        if panel.is_logarithmic:
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter("{x:g}")

        axes.set_title(panel.title, fontsize="medium")
        if any(panel.lines.values()):
            axes.legend(loc="best", fontsize="small")
    axes.set_xlabel(x_label)
    return _as_svg(figure)


def _new_figure(*, height: float) -> Any:  # a Figure, or None without matplotlib
    try:
        from matplotlib.figure import Figure  # slow, and optional; no pyplot, so that no window and no state is opened
    except ImportError:
        log.info("no plot: pip install 'transformer-mt[plots]'")
        return None
    return Figure(figsize=(7.0, height), layout="constrained")


def _as_svg(figure: Any) -> bytes:
    """The figure as text, without a date or random names: the same table, the same file."""
    from matplotlib import rc_context

    content = io.BytesIO()
    with rc_context({"svg.hashsalt": "table"}):
        figure.savefig(content, format="svg", metadata={"Date": None})
    return content.getvalue()
