"""What the paper concludes from its tables (section 6.2), beside what the runs of a table show.

A difference in BLEU counts if it exceeds `error_of_difference`.
"""

import math
from dataclasses import dataclass
from statistics import fmean, stdev

from transformer.tools.markdown import markdown_table
from transformer.tools.significance import Interval
from transformer.tools.tables.measured import Measured, Table, TableRow


@dataclass(frozen=True)
class Conclusion:
    """What the paper says of two rows: one scores higher than the other, or they score alike."""

    statement: str
    row: str
    other: str
    alike: bool


CONCLUSIONS = (
    Conclusion("one head is worse than eight", "base", "A_h1", alike=False),
    Conclusion("too many heads are worse than eight", "base", "A_h32", alike=False),
    Conclusion("a smaller d_k hurts: a quarter of it", "base", "B_dk16", alike=False),
    Conclusion("a smaller d_k hurts: half of it", "base", "B_dk32", alike=False),
    Conclusion("bigger models are better: more layers", "base", "C_n2", alike=False),
    Conclusion("bigger models are better: wider", "C_d1024", "C_d256", alike=False),
    Conclusion("bigger models are better: a wider feed-forward network", "C_ff4096", "C_ff1024", alike=False),
    Conclusion("dropout is very helpful against over-fitting", "base", "D_p0", alike=False),
    Conclusion("label smoothing improves BLEU, though it hurts perplexity", "base", "D_ls0", alike=False),
    Conclusion("learned positions are nearly identical to sinusoids", "base", "E_learned", alike=True),
)


def format_conclusions(table: Table) -> str:
    """The paper's conclusions, each with the difference that the paper saw and the one that these runs show.

    Empty where the table has no two rows that the paper compares.
    """
    rows = {row.name: row for row in table.rows if row.published is not None and row.runs}
    cells = [
        _conclusion_cells(conclusion, rows[conclusion.row], rows[conclusion.other])
        for conclusion in CONCLUSIONS
        if conclusion.row in rows and conclusion.other in rows
    ]
    if not cells:
        return ""

    paper_and_here = ("BLEU, paper", "BLEU, here", "PPL, paper", "PPL, here")
    titles = ("the paper says", "rows", *paper_and_here, "do these runs say so?")
    lines = markdown_table(titles, cells, left={0, 1, 6})
    body = "".join(f"{line}\n" for line in lines)
    return (
        "\n## What the paper concludes\n\n"
        "Each line compares two rows: the first less the second. A difference in BLEU counts where it is larger than "
        "what sampling the test sentences explains (the two intervals added as independent errors), and, with several "
        "seeds, than twice the standard error of the difference of means.\n\n"
        f"{body}"
    )


def _conclusion_cells(conclusion: Conclusion, row: TableRow, other: TableRow) -> list[str]:
    """A row of the conclusions; both rows are of the paper."""
    # The differences that these runs show.
    bleu = mean_bleu(row) - mean_bleu(other)
    error = error_of_difference(row, other)
    perplexity = _mean_perplexity(row) - _mean_perplexity(other)

    # Those of the paper.
    assert row.published is not None
    assert other.published is not None
    paper_bleu = f"{row.published.bleu - other.published.bleu:+.1f}"
    paper_perplexity = ""
    if row.published.perplexity is not None and other.published.perplexity is not None:
        paper_perplexity = f"{row.published.perplexity - other.published.perplexity:+.2f}"

    return [
        conclusion.statement,
        f"{row.name}, {other.name}",
        paper_bleu,
        f"{bleu:+.2f} ± {error:.2f}",
        paper_perplexity,
        f"{perplexity:+.2f}",
        _verdict(bleu, error, alike=conclusion.alike),
    ]


def mean_bleu(row: TableRow) -> float:
    """BLEU on the first test set, as the mean over seeds."""
    return fmean(_first_score(run).bleu for run in row.runs)


def _mean_perplexity(row: TableRow) -> float:
    return fmean(run.perplexity for run in row.runs)


def _first_score(run: Measured) -> Interval:
    return next(iter(run.scores.values()))


def error_of_difference(row: TableRow, other: TableRow) -> float:
    """What a difference in BLEU must exceed: the sampling of the sentences, or of the seeds, whichever is larger."""
    sampling = math.hypot(_mean_half_width(row), _mean_half_width(other))
    if min(len(row.runs), len(other.runs)) < 2:
        return sampling

    variance = _variance_of_mean(row) + _variance_of_mean(other)
    return max(sampling, 2 * math.sqrt(variance))


def _mean_half_width(row: TableRow) -> float:
    return fmean(_first_score(run).half_width for run in row.runs)


def _variance_of_mean(row: TableRow) -> float:
    """The variance of the mean BLEU over seeds, of which there are two or more."""
    return stdev(_first_score(run).bleu for run in row.runs) ** 2 / len(row.runs)


def _verdict(difference: float, error: float, *, alike: bool) -> str:
    """Whether a difference in BLEU says what the paper says: that the rows are alike, or that the first is better."""
    is_small = abs(difference) <= error
    if alike:
        return "yes: no difference that counts" if is_small else "no: they differ"
    if is_small:
        return "undecided: the difference is too small"
    return "yes" if difference > 0 else "no: the other way round"
