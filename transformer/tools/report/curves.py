"""The section of a report with curves: which quantities share a chart, and how many points of each are drawn.

The points come from metrics.jsonl, which `reading` has read; the script in curves.js draws them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from transformer.tools.metrics import SPEED, Curve
from transformer.tools.page import Component
from transformer.tools.plots import distinct_colors
from transformer.tools.report.blocks import shorten
from transformer.tools.report.reading import RunReading

MOST_POINTS = 400  # of a curve; of a longer one, the extremes of each stretch are drawn


@dataclass(frozen=True)
class Line:
    """A quantity in a chart."""

    tag: str  # as TensorBoard names it
    label: str  # in the chart
    dash: str  # solid, dashed or dotted


@dataclass(frozen=True)
class Chart:
    """Quantities that share their axes; the vertical one may be logarithmic."""

    title: str
    unit: str
    lines: tuple[Line, ...]
    is_logarithmic: bool


CHARTS = (
    Chart(
        "Loss",
        "nats a token, with label smoothing",
        (Line("train/loss", "training", "solid"), Line("dev/loss", "dev", "dashed")),
        is_logarithmic=False,
    ),
    Chart(
        "Perplexity",
        "by token, without label smoothing",
        (Line("train/perplexity", "training", "solid"), Line("dev/perplexity", "dev", "dashed")),
        is_logarithmic=True,
    ),
    Chart(
        "Dev scores",
        "greedy search",
        (Line("dev/bleu", "BLEU", "solid"), Line("dev/chrf", "chrF", "dotted")),
        is_logarithmic=False,
    ),
    Chart("Learning rate", "", (Line("train/rate", "rate", "solid"),), is_logarithmic=False),
    Chart("Gradient norm", "before clipping", (Line("train/gradient_norm", "norm", "solid"),), is_logarithmic=True),
    Chart(
        "Speed",
        "target tokens a second",
        (Line(SPEED, "tokens", "solid"),),
        is_logarithmic=False,
    ),
    Chart(
        "Share of the peak",
        "model FLOP/s over those of the device",
        (Line("speed/utilisation", "utilisation", "solid"),),
        is_logarithmic=False,
    ),
    Chart("Model TFLOP/s", "by count", (Line("speed/model_tflops", "TFLOP/s", "solid"),), is_logarithmic=False),
    Chart(
        "Padding and waiting",
        "share of the slots, share of the time",
        (Line("speed/padding_share", "padding", "solid"), Line("speed/data_wait_share", "waiting for data", "dotted")),
        is_logarithmic=False,
    ),
)


def curves_section(runs: Sequence[RunReading]) -> Component:
    """The section with the curves of all runs; a chart for which no run has data is left out."""
    charts = []
    for chart in CHARTS:
        lines = _lines(chart, runs)
        if lines:
            charts.append(
                {
                    "title": chart.title,
                    "unit": chart.unit,
                    "is_logarithmic": chart.is_logarithmic,
                    "note": _note(chart, runs),
                    "lines": lines,
                }
            )

    data = {"runs": [shorten(run.name) for run in runs], "colors": distinct_colors(len(runs)), "charts": charts}
    return Component("report/curves", "Curves", data)


def _lines(chart: Chart, runs: Sequence[RunReading]) -> list[dict[str, object]]:
    """The lines of a chart, as the script reads them."""
    lines: list[dict[str, object]] = []
    for number, run in enumerate(runs):
        for line in chart.lines:
            curve = run.curves.get(line.tag)
            if curve:
                lines.append({"run": number, "label": line.label, "dash": line.dash, "points": thin(curve)})
    return lines


def _note(chart: Chart, runs: Sequence[RunReading]) -> str:
    """A note where points were left out."""
    longest = max(len(run.curves.get(line.tag, [])) for run in runs for line in chart.lines)
    if longest <= MOST_POINTS:
        return ""
    return f"{longest:,} points: the least and the greatest of each stretch are drawn"


def thin(curve: Curve) -> Curve:
    """At most MOST_POINTS points: both ends, and between them the least and the greatest value of each stretch."""
    if len(curve) <= MOST_POINTS:
        return curve

    first, *inner, last = curve
    stretches = (MOST_POINTS - 2) // 2
    kept = [first]
    for number in range(stretches):
        start = number * len(inner) // stretches
        end = (number + 1) * len(inner) // stretches
        least = min(inner[start:end], key=_value)
        greatest = max(inner[start:end], key=_value)
        kept += sorted({least, greatest})
    return [*kept, last]


def _value(point: tuple[int, float]) -> float:
    return point[1]
