"""The study of scores as Markdown and as a plot, with what the paper says beside what these runs say, d_k by d_k."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from statistics import fmean

from transformer.config.primitives import to_json
from transformer.config.settings import Score
from transformer.files import write_file, write_json
from transformer.tools.plots import Panel, plot_panels
from transformer.tools.score_study.costs import TOKENS, ScoreCost
from transformer.tools.score_study.study import SENTENCES, AttentionState, Observed, ScoreStudy
from transformer.tools.table_format import error_of_difference, format_csv, format_markdown, mean_bleu
from transformer.tools.tables import TableRow

# Where the paper names no number.
SMALL = 32  # the largest of the "small values of d_k"
MUCH_FASTER = 2.0  # times
LARGER = 1.05  # times the memory
FLAT = 0.1  # "extremely small": a gradient of the softmax below this share of another's
FLATTER = 0.5  # below this share it is smaller, at least
SIMILAR = 1.25  # times the cost

UNTRAINED = 1.0  # BLEU; two models below it do not translate yet, and comparing them says nothing


class Verdict(Enum):
    """Whether the runs say what the paper says; the value is what the summary calls it."""

    yes = "held"
    partly = "held in part"
    undecided = "was left undecided"
    no = "did not hold"


@dataclass(frozen=True)
class Finding:
    """A statement of the paper, what was measured at one d_k or over several, and whether that agrees."""

    statement: str
    d_k: str
    measured: str
    verdict: Verdict
    reason: str  # may be empty


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
    return "\n".join(
        [
            format_markdown(study.table),
            f"## Attention before and after training\n\n{_format_observed(study.observed)}",
            f"## Time and memory of one layer\n\n{_format_costs(study.costs, study.machine)}",
            f"## What the paper says of scores\n\n{_format_findings(found)}",
            f"## In short\n\n{_summarise(study, found)}",
        ]
    )


# ---- tables ---------------------------------------------------------------------------------------------------------

# Each quantity: its caption, its value, its number format.
QUANTITIES: tuple[tuple[str, Callable[[AttentionState], float], str], ...] = (
    ("Variance of q.k before any scale (additive: of the score)", lambda state: state.variance, ".3g"),
    ("Entropy of the weights, as a share of that of equal weights", lambda state: state.entropy, ".3f"),
    (
        "Gradient of the softmax (the trace of its Jacobian), as a share of that at equal weights",
        lambda state: state.softmax_gradient,
        ".3f",
    ),
    (
        "Gradient of the loss in W_q and W_k (root mean square)",
        lambda state: state.weight_gradient,
        ".1e",
    ),
)


def _format_observed(observed: Sequence[Observed]) -> str:
    """A small table for each quantity: d_k down, scores across."""
    about = (
        f"Observed in fp32, without dropout, on the first {SENTENCES} sentences of the development set, as means over "
        "layers, roles, heads and seeds. Trained are the weights of the last step (their moving average, where the "
        "run keeps one), not the mean of checkpoints that BLEU is of. Without pre-norm the first layers read "
        "embeddings plus sinusoids, which have a variance of 1.5, not 1: the variance of q.k is 2.25 d_k there."
    )
    return "\n".join([f"{about}\n", *(_format_quantity(observed, *quantity) for quantity in QUANTITIES)])


def _format_quantity(
    observed: Sequence[Observed], caption: str, value: Callable[[AttentionState], float], form: str
) -> str:
    lines = [f"{caption}, at the start → trained:", "", *_scores_across(["d_k"])]
    for d_k in sorted({one.d_k for one in observed}):
        cells = []
        for score in Score:
            runs = [one for one in observed if (one.score, one.d_k) == (score, d_k)]
            cells.append(_before_and_after(runs, value, form))
        lines.append(f"| {d_k} | " + " | ".join(cells) + " |")
    return "".join(f"{line}\n" for line in lines)


def _before_and_after(runs: Sequence[Observed], value: Callable[[AttentionState], float], form: str) -> str:
    if not runs:
        return ""
    at_start = fmean(value(one.at_start) for one in runs)
    trained = fmean(value(one.trained) for one in runs)
    return f"{at_start:{form}} → {trained:{form}}"


def _format_costs(costs: Sequence[ScoreCost], machine: str) -> str:
    lines = [
        f"Milliseconds forward and backward, and MiB of tensors at the peak, over {TOKENS:,} tokens in sentences of n "
        f"({machine}; medians of runs that take turns). The weights of dot products are never held, for they have a "
        "fused kernel. No kernel knows the additive score: its sums of q and k are made for a few queries at a time, "
        "and again in the backward pass, which saves memory and takes time.",
        "",
        *_scores_across(["n", "d_k"]),
    ]
    for n, d_k in dict.fromkeys((cost.n, cost.d_k) for cost in costs):
        found = {cost.score: cost for cost in costs if (cost.n, cost.d_k) == (n, d_k)}
        cells = [
            f"{found[score].milliseconds:.1f} ms, {found[score].mebibytes:.1f} MiB" if score in found else ""
            for score in Score
        ]
        lines.append(f"| {n} | {d_k} | " + " | ".join(cells) + " |")
    return "".join(f"{line}\n" for line in lines)


def _scores_across(columns: Sequence[str]) -> list[str]:
    """The head of a table with a column for each score behind these."""
    titles = [*columns, *(score.value for score in Score)]
    return ["| " + " | ".join(titles) + " |", "|" + " ---: |" * len(titles)]


def _format_findings(found: Sequence[Finding]) -> str:
    lines = [
        "BLEU is that of the first test set, and a difference counts where it is larger than what sampling the test "
        "sentences explains (with several seeds: than twice the standard error, too). The paper names no numbers: "
        f"here d_k is small up to {SMALL}, much faster is {MUCH_FASTER:g} times as fast, a gradient is extremely small "
        f"below {FLAT:g} of another, and a cost is similar up to {SIMILAR:g} times another.",
        "",
        "| the paper says | d_k | measured | do these runs say so? |",
        "| --- | --- | --- | --- |",
        *(f"| {one.statement} | {one.d_k} | {one.measured} | {_format_verdict(one)} |" for one in found),
    ]
    return "".join(f"{line}\n" for line in lines)


def _format_verdict(finding: Finding) -> str:
    return f"{finding.verdict.name}: {finding.reason}" if finding.reason else finding.verdict.name


# ---- what the paper says --------------------------------------------------------------------------------------------

# Its statements, shortened, in its order.
FASTER = "dot-product attention is much faster than additive attention in practice"
SMALLER = "dot-product attention is more space-efficient than additive attention in practice"
ALIKE = "for small values of d_k additive attention and dot products without scaling perform similarly"
ADDITIVE_WINS = "for larger values of d_k additive attention outperforms dot products without scaling"
SATURATED = (
    "for large values of d_k the products are suspected to push the softmax to where its gradients are extremely small"
)
FOOTNOTE = "q.k has a variance of d_k where the components of q and k have a variance of 1"
SCALE_HELPS = "for larger values of d_k scaling by 1/sqrt(d_k) makes dot products better"
HEADS = "the total cost of 8 heads is similar to that of one head of full width"


def findings(study: ScoreStudy) -> list[Finding]:
    """Each statement of the paper that the study can speak to, in the paper's order."""
    return [
        *_about_cost(study),
        *_about_additive(study),
        *_about_softmax(study),
        *_about_variance(study),
        *_about_scaling(study),
        *_about_heads(study),
    ]


def _about_cost(study: ScoreStudy) -> list[Finding]:
    """Additive attention beside scaled dot products, at each d_k, over the lengths."""
    costs = {(cost.score, cost.d_k, cost.n): cost for cost in study.costs}
    pairs: dict[int, list[tuple[ScoreCost, ScoreCost]]] = {}
    for (score, d_k, n), cost in costs.items():
        dot = costs.get((Score.scaled, d_k, n))
        if score is Score.additive and dot is not None:
            pairs.setdefault(d_k, []).append((cost, dot))

    faster = []
    smaller = []
    for d_k, of_d_k in pairs.items():
        times = [additive.milliseconds / dot.milliseconds for additive, dot in of_d_k]
        sizes = [additive.mebibytes / dot.mebibytes for additive, dot in of_d_k]
        at = f"at n = {_join([str(cost.n) for cost, _ in of_d_k])}"
        longer = f"additive takes {_join([f'{ratio:.1f}' for ratio in times])} times as long {at}"
        larger = f"additive takes {_join([f'{ratio:.1f}' for ratio in sizes])} times the memory {at}"
        faster.append(Finding(FASTER, str(d_k), longer, *_all_above(times, MUCH_FASTER)))
        smaller.append(Finding(SMALLER, str(d_k), larger, *_all_above(sizes, LARGER)))
    return faster + smaller


def _all_above(ratios: Sequence[float], limit: float) -> tuple[Verdict, str]:
    above = sum(ratio >= limit for ratio in ratios)
    if above == len(ratios):
        return Verdict.yes, ""
    return (Verdict.partly, f"at {above} of {len(ratios)} lengths") if above else (Verdict.no, "")


def _about_additive(study: ScoreStudy) -> list[Finding]:
    found = []
    for d_k, additive, unscaled in _pairs(study, Score.additive, Score.unscaled):
        statement = ALIKE if d_k <= SMALL else ADDITIVE_WINS
        found.append(_compare(statement, d_k, name="additive", row=additive, other=unscaled))
    return found


def _about_scaling(study: ScoreStudy) -> list[Finding]:
    """At larger d_k alone: where d_k is small, the paper says nothing of it."""
    return [
        _compare(SCALE_HELPS, d_k, name="scaled", row=scaled, other=unscaled)
        for d_k, scaled, unscaled in _pairs(study, Score.scaled, Score.unscaled)
        if d_k > SMALL
    ]


def _compare(statement: str, d_k: int, *, name: str, row: TableRow, other: TableRow) -> Finding:
    """The BLEU of a row less that of the unscaled products."""
    difference = mean_bleu(row) - mean_bleu(other)
    error = error_of_difference(row, other)
    measured = f"{name} less unscaled: {difference:+.2f} ± {error:.2f} BLEU"

    if max(mean_bleu(row), mean_bleu(other)) < UNTRAINED:
        verdict, reason = Verdict.undecided, "neither translates yet"
    elif statement == ALIKE:
        is_small = abs(difference) <= error
        verdict = Verdict.yes if is_small else Verdict.no
        reason = "no difference that counts" if is_small else "they differ"
    elif abs(difference) <= error:
        verdict, reason = Verdict.undecided, "the difference is too small"
    elif difference > 0:
        verdict, reason = Verdict.yes, ""
    else:
        verdict, reason = Verdict.no, "the other way round"
    return Finding(statement, str(d_k), measured, verdict, reason)


def _pairs(study: ScoreStudy, score: Score, other: Score) -> list[tuple[int, TableRow, TableRow]]:
    """The rows of two scores at each d_k at which both have BLEU, d_k rising."""
    scored = _scored_rows(study)
    names = {(one.score, one.d_k): one.row for one in study.observed if one.row in scored}
    widths = sorted(d_k for each, d_k in names if each is score and (other, d_k) in names)
    return [(d_k, scored[names[score, d_k]], scored[names[other, d_k]]) for d_k in widths]


def _scored_rows(study: ScoreStudy) -> dict[str, TableRow]:
    return {row.name: row for row in study.table.rows if row.runs and all(run.scores for run in row.runs)}


def _about_softmax(study: ScoreStudy) -> list[Finding]:
    """At the start, the softmax of unscaled products beside that of scaled ones, at each larger d_k.

    A small gradient of the softmax need not make that of the weights small: without a scale, the products' gradient
    in q and k is sqrt(d_k) times as large. Both are shown; the paper speaks of the first.
    """
    softmax = dict(_states(study, Score.scaled, lambda one: one.at_start.softmax_gradient))
    weights = dict(_states(study, Score.scaled, lambda one: one.at_start.weight_gradient))
    unscaled_weights = dict(_states(study, Score.unscaled, lambda one: one.at_start.weight_gradient))
    found = []
    for d_k, gradient in _states(study, Score.unscaled, lambda one: one.at_start.softmax_gradient):
        if d_k <= SMALL or d_k not in softmax:
            continue

        ratio = gradient / softmax[d_k]
        if ratio < FLAT:
            verdict, reason = Verdict.yes, ""
        elif ratio < FLATTER:
            verdict, reason = Verdict.partly, "smaller, not extremely small"
        else:
            verdict, reason = Verdict.no, "more than half is left"

        measured = (
            f"at the start the softmax's gradient is {ratio:.2f} times that with a scale, and the loss's gradient in "
            f"W_q and W_k is {unscaled_weights[d_k] / weights[d_k]:.2g} times that with a scale"
        )
        found.append(Finding(SATURATED, str(d_k), measured, verdict, reason))
    return found


def _about_variance(study: ScoreStudy) -> list[Finding]:
    """Footnote 4, at the start. It is about independent components: in a model it can hold up to a factor."""
    points = _states(study, Score.unscaled, lambda one: one.at_start.variance)
    if len(points) < 2:
        return []

    ratios = [variance / d_k for d_k, variance in points]
    slope = _slope(points)
    is_proportional = abs(slope - 1) <= 0.1
    return [
        Finding(
            FOOTNOTE,
            f"{points[0][0]} to {points[-1][0]}",
            f"at the start {min(ratios):.2f} to {max(ratios):.2f} times d_k; it grows as d_k to the power {slope:.2f}",
            Verdict.yes if is_proportional else Verdict.no,
            "in proportion" if is_proportional else "it grows otherwise",
        )
    ]


def _slope(points: Sequence[tuple[int, float]]) -> float:
    """The power with which y grows with x, by least squares."""
    xs = [math.log(x) for x, _ in points]
    ys = [math.log(y) for _, y in points]
    mean_x = fmean(xs)
    mean_y = fmean(ys)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return covariance / sum((x - mean_x) ** 2 for x in xs)


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
    if counted > SIMILAR:
        verdict, reason = Verdict.no, ""
    elif timed > SIMILAR:
        verdict, reason = Verdict.partly, "counted it is, timed it is not"
    else:
        verdict, reason = Verdict.yes, ""
    return [
        Finding(
            HEADS,
            f"{heads[8].d_k} and {heads[1].d_k}",
            f"{counted:.2f} times its multiply-adds, {timed:.2f} times its time",
            verdict,
            reason,
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
        for verdict in Verdict:
            widths = [one.d_k for one in ones if one.verdict is verdict]
            if widths:
                parts.append(f"{verdict.value} at d_k {_join(widths)}")
        sentences.append(f"{statement[0].upper()}{statement[1:]}: this {', and '.join(parts)}.")

    n_seeds = max((len(row.runs) for row in study.table.rows), default=0)
    seeds = {0: "no run", 1: "one seed"}.get(n_seeds, f"{n_seeds} seeds")
    return " ".join([*sentences, f"These are findings of {seeds}, on this corpus, in this budget."]) + "\n"


def _join(words: Sequence[str]) -> str:
    """`8, 16 and 32`."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


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

    rows = _scored_rows(study)
    bleu: dict[str, list[tuple[int, float]]] = {}
    for score in Score:
        names = {one.d_k: one.row for one in study.observed if one.score is score and one.row in rows}
        bleu[score.value] = [(d_k, mean_bleu(rows[name])) for d_k, name in sorted(names.items())]

    return plot_panels(
        [
            Panel("variance of q.k, without a scale", variance, is_logarithmic=True),
            Panel("entropy of the weights (1: all are equal)", entropy, is_logarithmic=False),
            Panel("BLEU", bleu, is_logarithmic=False),
        ],
        x_label="d_k",
    )
