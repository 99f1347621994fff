"""The study of scores as files and as text: tables, a plot, and what the paper says beside what these runs say.

    ScoreStudy -> write_study  -> table.json, .md, .csv, .svg
               -> format_study -> Markdown, of its tables and of `findings`

All figures are in `table.json`; the other files say what is in it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from transformer.config.primitives import to_json
from transformer.config.settings import Score
from transformer.files import write_file, write_json
from transformer.tools.markdown import markdown_table
from transformer.tools.paper.conclusions import mean_bleu
from transformer.tools.paper.score_study.costs import TOKENS, ScoreCost
from transformer.tools.paper.score_study.findings import (
    FLAT,
    MUCH_FASTER,
    SIMILAR,
    SMALL,
    Finding,
    Verdict,
    findings,
    join_words,
    means_by_width,
    scored_rows,
)
from transformer.tools.paper.score_study.study import SENTENCES, AttentionState, Observed, ScoreStudy
from transformer.tools.plots import Panel, plot_panels
from transformer.tools.tables.format import format_csv, format_markdown


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
    about_paper = findings(study)
    return "\n".join(
        [
            format_markdown(study.table),
            f"## Attention before and after training\n\n{_format_observed(study.observed)}",
            f"## Time and memory of one layer\n\n{_format_costs(study.costs, study.machine)}",
            f"## What the paper says of scores\n\n{_format_findings(about_paper)}",
            f"## In short\n\n{_summarise(study, about_paper)}",
        ]
    )


# ---- tables ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quantity:
    """A figure of attention that has a table of its own."""

    caption: str
    value: Callable[[AttentionState], float]
    number_format: str


QUANTITIES = (
    Quantity("Variance of q.k before any scale (additive: of the score)", lambda state: state.variance, ".3g"),
    Quantity("Entropy of the weights, as a share of that of equal weights", lambda state: state.entropy, ".3f"),
    Quantity(
        "Gradient of the softmax (the trace of its Jacobian), as a share of that at equal weights",
        lambda state: state.softmax_gradient,
        ".3f",
    ),
    Quantity("Gradient of the loss in W_q and W_k (root mean square)", lambda state: state.weight_gradient, ".1e"),
)


def _format_observed(observed: Sequence[Observed]) -> str:
    """A small table for each quantity: d_k down, scores across."""
    about = (
        f"Observed in fp32, without dropout, on the first {SENTENCES} sentences of the development set, as means over "
        "layers, roles, heads and seeds. Trained are the weights of the last step (their moving average, where the "
        "run keeps one), not the mean of checkpoints that BLEU is of. Without pre-norm the first layers read "
        "embeddings plus sinusoids, which have a variance of 1.5, not 1: the variance of q.k is 2.25 d_k there."
    )
    tables = [_format_quantity(observed, quantity) for quantity in QUANTITIES]
    return "\n".join([f"{about}\n", *tables])


def _format_quantity(observed: Sequence[Observed], quantity: Quantity) -> str:
    rows = []
    for d_k in sorted({run.d_k for run in observed}):
        cells = []
        for score in Score:
            runs = [run for run in observed if run.score is score and run.d_k == d_k]
            cells.append(_before_and_after(runs, quantity))
        rows.append([str(d_k), *cells])

    table = markdown_table(["d_k", *(score.value for score in Score)], rows, left=())
    lines = [f"{quantity.caption}, at the start → trained:", "", *table]
    return "".join(f"{line}\n" for line in lines)


def _before_and_after(runs: Sequence[Observed], quantity: Quantity) -> str:
    """The mean over these runs before the first step and after the last one; empty without a run."""
    if not runs:
        return ""
    at_start = fmean(quantity.value(run.at_start) for run in runs)
    trained = fmean(quantity.value(run.trained) for run in runs)
    return f"{at_start:{quantity.number_format}} → {trained:{quantity.number_format}}"


def _format_costs(costs: Sequence[ScoreCost], machine: str) -> str:
    cells: dict[tuple[int, int], dict[Score, str]] = {}
    for cost in costs:
        row = cells.setdefault((cost.n, cost.d_k), {})
        row[cost.score] = f"{cost.milliseconds:.1f} ms, {cost.mebibytes:.1f} MiB"
    rows = [[str(n), str(d_k), *(row.get(score, "") for score in Score)] for (n, d_k), row in cells.items()]

    lines = [
        f"Milliseconds forward and backward, and MiB of tensors at the peak, over {TOKENS:,} tokens in sentences of n "
        f"({machine}; medians of runs that take turns). The weights of dot products are never held, for they have a "
        "fused kernel. No kernel knows the additive score: its sums of q and k are made for a few queries at a time, "
        "and again in the backward pass, which saves memory and takes time.",
        "",
        *markdown_table(["n", "d_k", *(score.value for score in Score)], rows, left=()),
    ]
    return "".join(f"{line}\n" for line in lines)


def _format_findings(about_paper: Sequence[Finding]) -> str:
    titles = ("the paper says", "d_k", "measured", "do these runs say so?")
    rows = [(found.statement, found.d_k, found.measured, _format_verdict(found)) for found in about_paper]
    lines = [
        "BLEU is that of the first test set, and a difference counts where it is larger than what sampling the test "
        "sentences explains (with several seeds: than twice the standard error, too). The paper names no numbers: "
        f"here d_k is small up to {SMALL}, much faster is {MUCH_FASTER:g} times as fast, a gradient is extremely small "
        f"below {FLAT:g} of another, and a cost is similar up to {SIMILAR:g} times another.",
        "",
        *markdown_table(titles, rows, left=range(len(titles))),
    ]
    return "".join(f"{line}\n" for line in lines)


def _format_verdict(finding: Finding) -> str:
    return f"{finding.verdict.name}: {finding.reason}" if finding.reason else finding.verdict.name


# ---- the summary ----------------------------------------------------------------------------------------------------


def _summarise(study: ScoreStudy, about_paper: Sequence[Finding]) -> str:
    """Which statements held, and at which d_k, as a paragraph."""
    by_statement: dict[str, list[Finding]] = {}
    for finding in about_paper:
        by_statement.setdefault(finding.statement, []).append(finding)

    # A sentence for each statement.
    sentences = []
    for statement, of_statement in by_statement.items():
        parts = []
        for verdict in Verdict:
            widths = [finding.d_k for finding in of_statement if finding.verdict is verdict]
            if widths:
                parts.append(f"{verdict.value} at d_k {join_words(widths)}")
        sentences.append(f"{statement[0].upper()}{statement[1:]}: this {', and '.join(parts)}.")

    # How much that is worth.
    n_seeds = max((len(row.runs) for row in study.table.rows), default=0)
    seeds = {0: "no run", 1: "one seed"}.get(n_seeds, f"{n_seeds} seeds")
    return " ".join([*sentences, f"These are findings of {seeds}, on this corpus, in this budget."]) + "\n"


def _plot(study: ScoreStudy) -> bytes | None:
    """Variance, entropy and BLEU against d_k; None without matplotlib."""
    # Variance: of the unscaled products, beside what the paper expects.
    widths = sorted({run.d_k for run in study.observed})
    variance: dict[str, list[tuple[int, float]]] = {
        "footnote 4: d_k": [(d_k, float(d_k)) for d_k in widths],
        "measured, at the start": means_by_width(study, Score.unscaled, lambda run: run.at_start.variance),
        "measured, trained": means_by_width(study, Score.unscaled, lambda run: run.trained.variance),
    }

    # Entropy: of every score, before training and after it.
    entropy: dict[str, list[tuple[int, float]]] = {}
    for score in Score:
        entropy[f"{score.value}, at the start"] = means_by_width(study, score, lambda run: run.at_start.entropy)
    for score in Score:
        entropy[f"{score.value}, trained"] = means_by_width(study, score, lambda run: run.trained.entropy)

    # BLEU: of the rows that have it.
    rows = scored_rows(study)
    bleu: dict[str, list[tuple[int, float]]] = {}
    for score in Score:
        names = {run.d_k: run.row for run in study.observed if run.score is score and run.row in rows}
        bleu[score.value] = [(d_k, mean_bleu(rows[name])) for d_k, name in sorted(names.items())]

    return plot_panels(
        [
            Panel("variance of q.k, without a scale", variance, is_logarithmic=True),
            Panel("entropy of the weights (1: all are equal)", entropy, is_logarithmic=False),
            Panel("BLEU", bleu, is_logarithmic=False),
        ],
        x_label="d_k",
    )
