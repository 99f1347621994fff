"""The study of scores as Markdown and as a plot, with what the paper says beside what these runs say, d_k by d_k."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from transformer.config.primitives import to_json
from transformer.config.settings import Score
from transformer.files import write_file, write_json
from transformer.tools.plots import Panel, plot_panels
from transformer.tools.score_costs import ScoreCost
from transformer.tools.scores import AttentionState, Observed, ScoreStudy
from transformer.tools.table_format import error_of_difference, format_csv, format_markdown, mean_bleu
from transformer.tools.tables import TableRow

SMALL = 32  # the largest d_k that counts as small where the paper says "small values of d_k"
EVERY = "every"  # stands where a finding is about all d_k
FLAT = 0.5  # a softmax whose gradient is below this share of another's is called flat beside it


OUTCOMES = {"yes": "held", "no": "did not hold", "undecided": "was left undecided", "partly": "held in part"}


@dataclass(frozen=True)
class Finding:
    """A sentence of the paper at one d_k or at all, what was measured, and whether that agrees."""

    statement: str
    d_k: str
    measured: str
    verdict: str  # begins with one of OUTCOMES


def write_study(output: Path, study: ScoreStudy) -> None:
    """Write table.json, .md, .csv and, with matplotlib, .svg into a directory that is there. Raises StorageError."""
    write_json(output / "table.json", to_json(study))
    write_file(output / "table.md", format_study(study).encode())
    write_file(output / "table.csv", format_csv(study.table).encode())

    plot = _plot(study)
    if plot is not None:
        write_file(output / "table.svg", plot)


def format_study(study: ScoreStudy) -> str:
    """The study for people: rows, attention before and after training, costs, what the paper says, a summary."""
    found = findings(study)
    notes = "".join(f"- {note}\n" for note in study.notes)
    return "\n".join(
        [
            format_markdown(study.table),
            f"## Attention before and after training\n\n{notes}\n{_format_observed(study.observed)}",
            f"## Time and memory of one layer\n\n{_format_costs(study.costs)}",
            f"## What the paper says of scores\n\n{_format_findings(found)}",
            _summarise(study, found),
        ]
    )


# ---- tables ---------------------------------------------------------------------------------------------------------


def _format_observed(observed: Sequence[Observed]) -> str:
    columns: list[tuple[str, Callable[[AttentionState], float], str]] = [
        ("variance", lambda state: state.variance, ".3g"),
        ("entropy", lambda state: state.entropy, ".3f"),
        ("softmax gradient", lambda state: state.softmax_gradient, ".3f"),
        ("gradient of W_q, W_k", lambda state: state.weight_gradient, ".2e"),
    ]
    titles = [f"{title}, {when}" for title, _, _ in columns for when in ("at the start", "trained")]
    lines = [
        "| row | d_k | " + " | ".join(titles) + " |",
        "| --- | ---: |" + " ---: |" * len(titles),
    ]
    for row in dict.fromkeys(one.row for one in observed):
        runs = [one for one in observed if one.row == row]
        cells = [
            format(fmean(value(state) for state in states), form)
            for _, value, form in columns
            for states in ([one.at_start for one in runs], [one.trained for one in runs])
        ]
        lines.append(f"| {row} | {runs[0].d_k} | " + " | ".join(cells) + " |")
    return (
        "Variance is that of q.k before any scale (additive: of the score); entropy and the gradient of the softmax "
        "(the trace of its Jacobian) are shares of what equal weights have; the last is a root mean square.\n\n"
        + "".join(f"{line}\n" for line in lines)
    )


def _format_costs(costs: Sequence[ScoreCost]) -> str:
    lines = [
        "Milliseconds forward and backward, and MiB of tensors at the peak, over the same number of tokens.",
        "",
        "| n | d_k | " + " | ".join(score.value for score in Score) + " |",
        "| ---: | ---: |" + " ---: |" * len(Score),
    ]
    for n, d_k in dict.fromkeys((cost.n, cost.d_k) for cost in costs):
        found = {cost.score: cost for cost in costs if (cost.n, cost.d_k) == (n, d_k)}
        cells = [f"{found[score].milliseconds:.1f} ms, {found[score].mebibytes:.1f} MiB" for score in Score]
        lines.append(f"| {n} | {d_k} | " + " | ".join(cells) + " |")
    return "".join(f"{line}\n" for line in lines)


def _format_findings(found: Sequence[Finding]) -> str:
    lines = [
        "BLEU is that of the first test set, and a difference counts where it is larger than what sampling the test "
        "sentences explains (with several seeds: than twice the standard error, too).",
        "",
        "| the paper says | d_k | measured | do these runs say so? |",
        "| --- | --- | --- | --- |",
        *(f"| {one.statement} | {one.d_k} | {one.measured} | {one.verdict} |" for one in found),
    ]
    return "".join(f"{line}\n" for line in lines)


# ---- what the paper says --------------------------------------------------------------------------------------------


def findings(study: ScoreStudy) -> list[Finding]:
    """Each sentence of the paper that the study can speak to, in the paper's order."""
    found = []
    found += _differences_of_bleu(study)
    found += _about_cost(study)
    found += _about_variance(study)
    found += _about_softmax(study)
    found += _about_heads(study)
    return found


ALIKE = "for small values of d_k additive attention and dot products without scaling perform similarly"
ADDITIVE_WINS = "for larger values of d_k additive attention outperforms dot products without scaling"
SCALE_HELPS = "scaling by 1/sqrt(d_k) counteracts this: scaled dot products outperform unscaled ones for larger d_k"


def _differences_of_bleu(study: ScoreStudy) -> list[Finding]:
    """One finding for each d_k at which both scores were trained."""
    found = []
    for score, statement in ((Score.additive, ADDITIVE_WINS), (Score.scaled, SCALE_HELPS)):
        for d_k, row, other in _pairs(study, score, Score.unscaled):
            is_small = d_k <= SMALL
            difference = mean_bleu(row) - mean_bleu(other)
            error = error_of_difference(row, other)
            if is_small and score is Score.additive:
                statement_here, verdict = ALIKE, "yes" if abs(difference) <= error else "no: they differ"
            elif is_small:
                continue  # the paper says nothing of scaling where d_k is small
            else:
                statement_here, verdict = statement, _better(difference, error)
            measured = f"{score.value} less unscaled: {difference:+.2f} ± {error:.2f} BLEU"
            found.append(Finding(statement_here, str(d_k), measured, verdict))
    return found


def _better(difference: float, error: float) -> str:
    if abs(difference) <= error:
        return "undecided: the difference is too small"
    return "yes" if difference > 0 else "no: the other way round"


def _pairs(study: ScoreStudy, score: Score, other: Score) -> list[tuple[int, TableRow, TableRow]]:
    """The rows of two scores at each d_k that both have, d_k rising."""
    scored = {row.name: row for row in study.table.rows if any(run.scores for run in row.runs)}
    names = {(one.score, one.d_k): one.row for one in study.observed if one.row in scored}
    widths = sorted(d_k for each, d_k in names if each is score and (other, d_k) in names)
    return [(d_k, scored[names[score, d_k]], scored[names[other, d_k]]) for d_k in widths]


def _about_cost(study: ScoreStudy) -> list[Finding]:
    """Additive attention beside scaled dot products, at every d_k and length."""
    costs = {(cost.score, cost.d_k, cost.n): cost for cost in study.costs}
    pairs = [(cost, costs[Score.scaled, cost.d_k, cost.n]) for cost in study.costs if cost.score is Score.additive]
    if not pairs:
        return []

    slower = [additive.milliseconds / dot.milliseconds for additive, dot in pairs]
    larger = [additive.mebibytes / dot.mebibytes for additive, dot in pairs]
    return [
        Finding(
            "dot-product attention is much faster in practice",
            EVERY,
            f"additive takes {min(slower):.1f} to {max(slower):.1f} times as long",
            _all_above(slower),
        ),
        Finding(
            "dot-product attention is more space-efficient",
            EVERY,
            f"additive takes {min(larger):.1f} to {max(larger):.1f} times as much, though it keeps no sums of q and k",
            _all_above(larger),
        ),
    ]


def _all_above(ratios: Sequence[float]) -> str:
    above = sum(ratio > 1.05 for ratio in ratios)
    if above == len(ratios):
        return "yes"
    return f"partly: in {above} of {len(ratios)} cases" if above else "no"


def _about_variance(study: ScoreStudy) -> list[Finding]:
    """Footnote 4, at the start: independent components of variance 1 make products of variance d_k."""
    points = _states(study, Score.unscaled, lambda one: one.at_start.variance)
    if len(points) < 2:
        return []

    ratios = [variance / d_k for d_k, variance in points]
    slope = _slope(points)
    return [
        Finding(
            "q.k has mean 0 and variance d_k",
            f"{points[0][0]} to {points[-1][0]}",
            f"at the start {min(ratios):.2f} to {max(ratios):.2f} times d_k; it grows as d_k to the power {slope:.2f}",
            "yes" if abs(slope - 1) <= 0.1 else "no: it grows otherwise",
        )
    ]


def _slope(points: Sequence[tuple[int, float]]) -> float:
    """The power with which y grows with x, by least squares."""
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    mean_x, mean_y = fmean(xs), fmean(ys)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return covariance / sum((x - mean_x) ** 2 for x in xs)


def _about_softmax(study: ScoreStudy) -> list[Finding]:
    """At the start, the softmax of unscaled products beside that of scaled ones, at each larger d_k."""
    scaled = dict(_states(study, Score.scaled, lambda one: one.at_start.softmax_gradient))
    unscaled = _states(study, Score.unscaled, lambda one: one.at_start.softmax_gradient)
    found = []
    for d_k, gradient in unscaled:
        if d_k <= SMALL or d_k not in scaled:
            continue
        ratio = gradient / scaled[d_k]
        found.append(
            Finding(
                "for large d_k the products push the softmax where its gradients are extremely small",
                str(d_k),
                f"at the start its gradient is {ratio:.2f} of that with a scale",
                "yes" if ratio < FLAT else "no: more than half is left",
            )
        )
    return found


def _states(study: ScoreStudy, score: Score, value: Callable[[Observed], float]) -> list[tuple[int, float]]:
    """A figure of this score's runs against d_k, the mean over seeds."""
    widths = sorted({one.d_k for one in study.observed if one.score is score})
    return [
        (d_k, fmean(value(one) for one in study.observed if (one.score, one.d_k) == (score, d_k))) for d_k in widths
    ]


def _about_heads(study: ScoreStudy) -> list[Finding]:
    heads = {cost.n_heads: cost for cost in study.heads}
    if heads.keys() != {1, 8}:
        return []
    counted = heads[8].multiply_adds / heads[1].multiply_adds
    timed = heads[8].milliseconds / heads[1].milliseconds
    return [
        Finding(
            "the total cost of 8 heads is similar to that of one head with full dimensionality",
            "64 and 512",
            f"{counted:.2f} times its multiply-adds, {timed:.2f} times its time",
            "yes" if counted < 1.1 and timed < 1.5 else "no",
        )
    ]


# ---- the summary ----------------------------------------------------------------------------------------------------


def _summarise(study: ScoreStudy, found: Sequence[Finding]) -> str:
    """What held, at which d_k, as a paragraph."""
    by_statement: dict[str, list[Finding]] = {}
    for one in found:
        by_statement.setdefault(one.statement, []).append(one)

    sentences = []
    for statement, ones in by_statement.items():
        parts = []
        for verdict, outcome in OUTCOMES.items():
            widths = [one.d_k for one in ones if one.verdict.partition(" ")[0].rstrip(":") == verdict]
            if widths:
                parts.append(
                    f"{outcome} at every d_k" if widths == [EVERY] else f"{outcome} at d_k {', '.join(widths)}"
                )
        sentences.append(f'"{statement[0].upper()}{statement[1:]}" {" and ".join(parts)}.')
    n_seeds = max((len(row.runs) for row in study.table.rows), default=0)
    ends = f"All of it is of {n_seeds} seed{'s' if n_seeds > 1 else ''} on this corpus, in this budget."
    return "## In short\n\n" + " ".join([*sentences, ends]) + "\n"


def _plot(study: ScoreStudy) -> bytes | None:
    """Variance, entropy and BLEU against d_k; None without matplotlib."""
    widths = sorted({one.d_k for one in study.observed})
    variance: dict[str, list[tuple[int, float]]] = {"footnote 4: d_k": [(d_k, float(d_k)) for d_k in widths]}
    variance["measured, at the start"] = _states(study, Score.unscaled, lambda one: one.at_start.variance)
    variance["measured, trained"] = _states(study, Score.unscaled, lambda one: one.trained.variance)

    entropy = {
        f"{score.value}, at the start": _states(study, score, lambda one: one.at_start.entropy) for score in Score
    }
    entropy |= {f"{score.value}, trained": _states(study, score, lambda one: one.trained.entropy) for score in Score}

    rows = {row.name: row for row in study.table.rows if any(run.scores for run in row.runs)}
    bleu: dict[str, list[tuple[int, float]]] = {}
    for score in Score:
        names = {one.d_k: one.row for one in study.observed if one.score is score and one.row in rows}
        bleu[score.value] = [(d_k, mean_bleu(rows[name])) for d_k, name in sorted(names.items())]

    return plot_panels(
        [
            Panel("variance of q.k, without a scale", variance, is_logarithmic=True),
            Panel("entropy of the weights, of equal ones'", entropy, is_logarithmic=False),
            Panel("BLEU", bleu, is_logarithmic=False),
        ],
        x_label="d_k",
    )
