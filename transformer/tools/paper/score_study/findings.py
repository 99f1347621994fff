"""What the paper says of scores, statement by statement, beside what a study has measured: does it agree?

    ScoreStudy -> findings: a function for each statement of section 3.2 -> Finding, with a Verdict -> `format`

The paper names no numbers for its words; the constants below say which numbers they are taken for.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean

from transformer.config.settings import Score
from transformer.tools.paper.conclusions import error_of_difference, mean_bleu
from transformer.tools.paper.score_study.costs import ScoreCost
from transformer.tools.paper.score_study.study import Observed, ScoreStudy
from transformer.tools.tables.measured import TableRow

# Numbers for words of the paper.
SMALL = 32  # the largest of the "small values of d_k"
MUCH_FASTER = 2.0  # "much faster": a ratio of two times
LARGER = 1.05  # "more space-efficient": a ratio of two memories
FLAT = 0.1  # "extremely small": a gradient of the softmax below this share of another
FLATTER = 0.5  # below this share a gradient is smaller, if not extremely small
SIMILAR = 1.25  # "similar": a ratio of two costs

UNTRAINED = 1.0  # BLEU; two models below it do not translate yet, and comparing them says nothing


class Verdict(Enum):
    """Whether the runs say what the paper says; the value is the wording of the summary."""

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
    # The two costs at each d_k and length.
    dot_costs = {(cost.d_k, cost.n): cost for cost in study.costs if cost.score is Score.scaled}
    costs_by_width: dict[int, list[tuple[ScoreCost, ScoreCost]]] = {}
    for cost in study.costs:
        dot_cost = dot_costs.get((cost.d_k, cost.n))
        if cost.score is Score.additive and dot_cost is not None:
            costs_by_width.setdefault(cost.d_k, []).append((cost, dot_cost))

    faster = []
    smaller = []
    for d_k, costs in costs_by_width.items():
        times = [additive.milliseconds / dot.milliseconds for additive, dot in costs]
        sizes = [additive.mebibytes / dot.mebibytes for additive, dot in costs]
        lengths = join_words([str(additive.n) for additive, _ in costs])

        verdict, reason = _all_above(times, MUCH_FASTER)
        measured = f"additive takes {_format_ratios(times)} times as long at n = {lengths}"
        faster.append(Finding(FASTER, str(d_k), measured, verdict, reason))

        verdict, reason = _all_above(sizes, LARGER)
        measured = f"additive takes {_format_ratios(sizes)} times the memory at n = {lengths}"
        smaller.append(Finding(SMALLER, str(d_k), measured, verdict, reason))
    return faster + smaller


def _format_ratios(ratios: Sequence[float]) -> str:
    return join_words([f"{ratio:.1f}" for ratio in ratios])


def _all_above(ratios: Sequence[float], limit: float) -> tuple[Verdict, str]:
    """Whether all ratios reach the limit, and at how many lengths they do if not all of them do."""
    above = sum(ratio >= limit for ratio in ratios)
    if above == len(ratios):
        return Verdict.yes, ""
    if above == 0:
        return Verdict.no, ""
    return Verdict.partly, f"at {above} of {len(ratios)} lengths"


def _about_additive(study: ScoreStudy) -> list[Finding]:
    """BLEU of additive attention beside that of unscaled products."""
    about = []
    for d_k, additive, unscaled in _pairs(study, Score.additive, Score.unscaled):
        statement = ALIKE if d_k <= SMALL else ADDITIVE_WINS
        about.append(_compare(statement, d_k, name="additive", row=additive, other=unscaled))
    return about


def _about_scaling(study: ScoreStudy) -> list[Finding]:
    """BLEU of scaled products beside that of unscaled ones, at larger d_k: the paper says nothing of small ones."""
    return [
        _compare(SCALE_HELPS, d_k, name="scaled", row=scaled, other=unscaled)
        for d_k, scaled, unscaled in _pairs(study, Score.scaled, Score.unscaled)
        if d_k > SMALL
    ]


def _compare(statement: str, d_k: int, *, name: str, row: TableRow, other: TableRow) -> Finding:
    """The BLEU of a row less that of the unscaled products, `other`."""
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
    scored = scored_rows(study)
    rows = {(seen.score, seen.d_k): scored[seen.row] for seen in study.observed if seen.row in scored}
    widths = sorted(d_k for row_score, d_k in rows if row_score is score and (other, d_k) in rows)
    return [(d_k, rows[score, d_k], rows[other, d_k]) for d_k in widths]


def scored_rows(study: ScoreStudy) -> dict[str, TableRow]:
    """The rows of the table whose runs all have scores, by name."""
    return {row.name: row for row in study.table.rows if row.runs and all(run.scores for run in row.runs)}


def _about_softmax(study: ScoreStudy) -> list[Finding]:
    """At the start, the softmax of unscaled products beside that of scaled ones, at each larger d_k.

    A small gradient of the softmax need not make that of the weights small: without a scale, the products' gradient
    in q and k is sqrt(d_k) times as large. Both are shown; the paper speaks of the first.
    """
    scaled_softmax = dict(means_by_width(study, Score.scaled, _softmax_gradient))
    unscaled_softmax = dict(means_by_width(study, Score.unscaled, _softmax_gradient))
    scaled_weights = dict(means_by_width(study, Score.scaled, _weight_gradient))
    unscaled_weights = dict(means_by_width(study, Score.unscaled, _weight_gradient))

    about = []
    for d_k in unscaled_softmax:
        if d_k <= SMALL or d_k not in scaled_softmax:
            continue

        ratio = unscaled_softmax[d_k] / scaled_softmax[d_k]
        weight_ratio = unscaled_weights[d_k] / scaled_weights[d_k]
        if ratio < FLAT:
            verdict, reason = Verdict.yes, ""
        elif ratio < FLATTER:
            verdict, reason = Verdict.partly, "smaller, not extremely small"
        else:
            verdict, reason = Verdict.no, "more than half is left"

        measured = (
            f"at the start the softmax's gradient is {ratio:.2f} times that with a scale, and the loss's gradient in "
            f"W_q and W_k is {weight_ratio:.2g} times that with a scale"
        )
        about.append(Finding(SATURATED, str(d_k), measured, verdict, reason))
    return about


def _softmax_gradient(observed: Observed) -> float:
    return observed.at_start.softmax_gradient


def _weight_gradient(observed: Observed) -> float:
    return observed.at_start.weight_gradient


def _variance(observed: Observed) -> float:
    return observed.at_start.variance


def _about_variance(study: ScoreStudy) -> list[Finding]:
    """Footnote 4, at the start. It is about independent components: in a model it can hold up to a factor."""
    points = means_by_width(study, Score.unscaled, _variance)
    if len(points) < 2:
        return []

    smallest_d_k, _ = points[0]
    largest_d_k, _ = points[-1]
    ratios = [variance / d_k for d_k, variance in points]
    slope = _slope(points)
    is_proportional = abs(slope - 1) <= 0.1
    return [
        Finding(
            FOOTNOTE,
            f"{smallest_d_k} to {largest_d_k}",
            f"at the start {min(ratios):.2f} to {max(ratios):.2f} times d_k; it grows as d_k to the power {slope:.2f}",
            Verdict.yes if is_proportional else Verdict.no,
            "in proportion" if is_proportional else "it grows otherwise",
        )
    ]


def _slope(points: Sequence[tuple[int, float]]) -> float:
    """The power of x with which y grows, by least squares over the logarithms."""
    xs = [math.log(x) for x, _ in points]
    ys = [math.log(y) for _, y in points]
    mean_x = fmean(xs)
    mean_y = fmean(ys)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    variance = sum((x - mean_x) ** 2 for x in xs)
    return covariance / variance


def means_by_width(study: ScoreStudy, score: Score, value: Callable[[Observed], float]) -> list[tuple[int, float]]:
    """A figure of the runs with this score at each d_k, as the mean over seeds, d_k rising."""
    values: dict[int, list[float]] = {}
    for observed in study.observed:
        if observed.score is score:
            values.setdefault(observed.d_k, []).append(value(observed))
    return [(d_k, fmean(values[d_k])) for d_k in sorted(values)]


def _about_heads(study: ScoreStudy) -> list[Finding]:
    """The cost of 8 heads beside that of one."""
    heads = {cost.n_heads: cost for cost in study.heads}
    if heads.keys() != {1, 8}:
        return []

    one_head = heads[1]
    eight_heads = heads[8]
    counted = eight_heads.multiply_adds / one_head.multiply_adds
    timed = eight_heads.milliseconds / one_head.milliseconds
    if counted > SIMILAR:
        verdict, reason = Verdict.no, ""
    elif timed > SIMILAR:
        verdict, reason = Verdict.partly, "counted it is, timed it is not"
    else:
        verdict, reason = Verdict.yes, ""
    return [
        Finding(
            HEADS,
            f"{eight_heads.d_k} and {one_head.d_k}",
            f"{counted:.2f} times its multiply-adds, {timed:.2f} times its time",
            verdict,
            reason,
        )
    ]


def join_words(words: Sequence[str]) -> str:
    """The words as a list in a sentence: `8, 16 and 32`."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"
