"""The study of scores as files and as text: its tables, and what the paper says.

    ScoreStudy -> write_study  -> table.json, .md, .csv
               -> format_study -> Markdown

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
from transformer.tools.paper.score_study.costs import TOKENS, HeadsCost, ScoreCost
from transformer.tools.paper.score_study.study import SENTENCES, AttentionState, Observed, ScoreStudy
from transformer.tools.tables.format import format_csv, format_markdown


def write_study(output: Path, study: ScoreStudy) -> None:
    """Write table.json, .md and .csv into a directory that is there. Raises StorageError."""
    write_json(output / "table.json", to_json(study))
    write_file(output / "table.md", format_study(study).encode())
    write_file(output / "table.csv", format_csv(study.table).encode())


def format_study(study: ScoreStudy) -> str:
    """The study for people: rows, attention before and after training, costs, and what the paper says of them."""
    return "\n".join(
        [
            format_markdown(study.table),
            f"## Attention before and after training\n\n{_format_observed(study.observed)}",
            f"## Time and memory of one layer\n\n{_format_costs(study.costs, study.heads, machine=study.machine)}",
            f"## What the paper says of scores\n\n{PAPER}",
        ]
    )


PAPER = """\
Section 3.2 names no numbers: each line says which of the tables above to hold it to.

- Dot products are much faster and take less memory than additive scores: the costs.
- For small d_k, additive and unscaled scores do alike; for larger ones, additive scores do better: BLEU.
- For large d_k, unscaled products are suspected to leave the softmax hardly any gradient: its gradient at the start.
- q.k has a variance of d_k where the components of q and k have one of 1 (footnote 4): the variance at the start.
- So scaling by 1/sqrt(d_k) does better for larger d_k: BLEU.
- The total cost of 8 heads is similar to that of one head of full width: the costs.
"""

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


def _format_costs(costs: Sequence[ScoreCost], heads: Sequence[HeadsCost], *, machine: str) -> str:
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
        "",
        "Scaled dot products, by the number of heads:",
        "",
        *markdown_table(
            ["heads", "d_k", "multiply-adds", "milliseconds"],
            [[f"{one.n_heads}", f"{one.d_k}", f"{one.multiply_adds:,}", f"{one.milliseconds:.1f}"] for one in heads],
            left=(),
        ),
    ]
    return "".join(f"{line}\n" for line in lines)
