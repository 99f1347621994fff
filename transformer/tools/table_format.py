"""A measured table as Markdown, as CSV and as a plot, with what the paper concludes beside what these runs say."""

import csv
import io
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from statistics import fmean, stdev

from transformer.config.primitives import to_json
from transformer.config.settings import Metric
from transformer.files import write_file, write_json
from transformer.tools.complexity import LayerTime, format_complexity, format_times
from transformer.tools.paper import CONCLUSIONS, Conclusion
from transformer.tools.plots import Point, plot_points, plot_times
from transformer.tools.significance import Interval
from transformer.tools.tables import LayerTable, Measured, Table, TableRow

log = logging.getLogger(__name__)

CSV_COLUMNS = (
    *("row", "changes", "seed", "set", "bleu", "bleu_half_width", "bleu_signature", "perplexity"),
    *("word_perplexity", "parameters", "steps", "flops", "seconds", "run_dir"),
)


def write_table(output: Path, table: Table) -> None:
    """Write table.json, .md, .csv and, with matplotlib, .svg into a directory that is there. Raises StorageError."""
    write_json(output / "table.json", to_json(table))
    write_file(output / "table.md", format_markdown(table).encode())
    write_file(output / "table.csv", format_csv(table).encode())

    plot = _plot(table)
    if plot is not None:
        write_file(output / "table.svg", plot)


def _plot(table: Table) -> bytes | None:
    """BLEU on the first test set, of the rows that have it; None where no run was scored, or without matplotlib."""
    names = _set_names(table)
    if not names:
        return None

    points = []
    for row in table.rows:
        measured = [run.scores[names[0]] for run in row.runs if names[0] in run.scores]
        if measured:
            points.append(Point(row.name, None if row.published is None else row.published.bleu, measured))
    return plot_points(points, title=table.title)


def write_layer_table(output: Path, table: LayerTable) -> None:
    """`write_table` for Table 1; its CSV has what was timed."""
    write_json(output / "table.json", to_json(table))
    write_file(output / "table.md", format_layers(table).encode())

    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(LayerTime)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in table.timed)
    write_file(output / "table.csv", text.getvalue().encode())

    lines: dict[str, list[tuple[int, float]]] = {}
    for row in table.timed:
        lines.setdefault(row.layer, []).append((row.n, row.forward_backward))
    plot = plot_times(lines, title=f"One layer of width {table.d} over {table.timed[0].tokens:,} tokens")
    if plot is not None:
        write_file(output / "table.svg", plot)


def format_layers(table: LayerTable) -> str:
    """Table 1 for people: what is counted, then what is timed."""
    notes = "".join(f"- {note}\n" for note in table.notes)
    counted = format_complexity(table.counted, n=table.n, d=table.d, k=table.k, r=table.r)
    return f"# Table 1 of the paper\n\n{notes}\n{counted}\n{format_times(table.timed)}"


def format_markdown(table: Table) -> str:
    """The table for people: its title, what it depends on, its rows, and the paper's conclusions."""
    notes = "".join(f"- {note}\n" for note in [*table.notes, _about_intervals(table)])
    return f"# {table.title}\n\n{notes}\n{_format_rows(table)}{_format_signatures(table)}{_format_conclusions(table)}"


def format_csv(table: Table) -> str:
    """A line for each run and each test set, or one for a run without a test set; for programs."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in table.rows:
        for run in row.runs:
            of_row = (row.name, row.changes, run.seed)
            of_run = (run.perplexity, run.word_perplexity, run.parameters, run.steps, run.flops, run.seconds)
            of_sets: list[tuple[str | float, ...]]
            of_sets = [(name, score.bleu, score.half_width, score.signature) for name, score in run.scores.items()]
            for of_set in of_sets or [("", "", "", "")]:
                writer.writerow([*of_row, *of_set, *of_run, run.run_dir])
    return text.getvalue()


# ---- rows -----------------------------------------------------------------------------------------------------------


def _format_rows(table: Table) -> str:
    """The rows as a Markdown table; a column of the paper's stands before the measured one where it has figures."""
    columns: list[tuple[str, Callable[[TableRow], str]]] = [
        ("row", lambda row: row.name),
        ("what it changes", lambda row: f"`{row.changes}`" if row.changes else ""),
        *([] if table.best_first is None else [_dev_column(table.best_first)]),
        ("PPL, paper", lambda row: _published(row, "perplexity", ".2f")),
        ("PPL per piece", lambda row: _mean(row, lambda run: run.perplexity, ".2f")),
        ("PPL per word", lambda row: _mean(row, lambda run: run.word_perplexity, ".2f")),
        ("BLEU, paper", lambda row: _published(row, "bleu", ".1f")),
        *((f"BLEU, {name}", _bleu_column(name)) for name in _set_names(table)),
        ("10^6 parameters, paper", lambda row: _published(row, "millions", ".0f")),
        ("10^6 parameters", lambda row: _mean(row, lambda run: run.parameters / 1e6, ".2f")),
        ("FLOPs, paper", lambda row: _published(row, "flops", ".1e")),
        ("FLOPs", lambda row: _mean(row, lambda run: run.flops, ".2e")),
        ("minutes", lambda row: _mean(row, lambda run: run.seconds / 60, ".1f")),
    ]

    cells = [[cell(row) for _, cell in columns] for row in table.rows]
    shown = [
        index for index, (title, _) in enumerate(columns) if "paper" not in title or any(line[index] for line in cells)
    ]
    lines = [
        "| " + " | ".join(columns[index][0] for index in shown) + " |",
        "| " + " | ".join("---" if index < 2 else "---:" for index in shown) + " |",
        *("| " + " | ".join(line[index] for index in shown) + " |" for line in cells),
    ]
    failed = [f"- {row.name} failed: {error}" for row in table.rows for error in row.errors]
    return "\n".join([*lines, *([""] if failed else []), *failed]) + "\n"


def _published(row: TableRow, figure: str, form: str) -> str:
    value = None if row.published is None else getattr(row.published, figure)
    return "" if value is None else format(value, form)


def _dev_column(metric: Metric) -> tuple[str, Callable[[TableRow], str]]:
    title = "BLEU, dev" if metric is Metric.bleu else "loss, dev"
    return title, lambda row: _mean(row, lambda run: run.best_dev, ".2f" if metric is Metric.bleu else ".4f")


def _mean(row: TableRow, figure: Callable[[Measured], float], form: str) -> str:
    return format(fmean(map(figure, row.runs)), form) if row.runs else ""


def _bleu_column(name: str) -> Callable[[TableRow], str]:
    return lambda row: _format_bleu([run.scores[name] for run in row.runs if name in run.scores])


def _format_bleu(scores: Sequence[Interval]) -> str:
    """The mean with its sampling interval, and with the standard deviation over seeds where there are several."""
    if not scores:
        return ""
    interval = f"{fmean(score.bleu for score in scores):.2f} ± {fmean(score.half_width for score in scores):.2f}"
    if len(scores) == 1:
        return interval
    return f"{interval}, sd {stdev(score.bleu for score in scores):.2f} of {len(scores)} seeds"


def _about_intervals(table: Table) -> str:
    sampling = "± is half of the 95 % bootstrap interval of BLEU, from 1,000 resamples of the test sentences"
    if max((len(row.runs) for row in table.rows), default=0) > 1:
        return f"{sampling}; sd is the standard deviation over seeds."
    return f"{sampling}: test sampling only, for there is one seed, and another might differ by more."


def _set_names(table: Table) -> list[str]:
    names = [name for row in table.rows for run in row.runs for name in run.scores]
    return list(dict.fromkeys(names))


def _format_signatures(table: Table) -> str:
    """The signatures of the scores, each once."""
    scores = [score for row in table.rows for run in row.runs for score in run.scores.values()]
    signatures = list(dict.fromkeys(score.signature for score in scores))
    return "".join(f"\nBLEU signature: `{signature}`\n" for signature in signatures)


# ---- conclusions ----------------------------------------------------------------------------------------------------


def _format_conclusions(table: Table) -> str:
    """The paper's conclusions, each with the difference that the paper saw and the one that these runs show."""
    rows = {row.name: row for row in table.rows if row.published is not None and row.runs}
    lines = [
        _format_conclusion(conclusion, rows[conclusion.row], rows[conclusion.other])
        for conclusion in CONCLUSIONS
        if conclusion.row in rows and conclusion.other in rows
    ]
    if not lines:
        return ""

    header = "| the paper says | rows | BLEU, paper | BLEU, here | PPL, paper | PPL, here | do these runs say so? |"
    return (
        "\n## What the paper concludes\n\n"
        "Each line compares two rows: the first less the second. A difference in BLEU counts where it is larger than "
        "what sampling the test sentences explains (the two intervals added as independent errors), and, with several "
        "seeds, than twice the standard error of the difference of means.\n\n"
        f"{header}\n| --- | --- | ---: | ---: | ---: | ---: | --- |\n" + "".join(f"{line}\n" for line in lines)
    )


def _format_conclusion(conclusion: Conclusion, row: TableRow, other: TableRow) -> str:
    bleu = mean_bleu(row) - mean_bleu(other)
    error = error_of_difference(row, other)
    perplexity = fmean(run.perplexity for run in row.runs) - fmean(run.perplexity for run in other.runs)

    published, published_other = row.published, other.published
    assert published is not None
    assert published_other is not None
    paper_bleu = f"{published.bleu - published_other.bleu:+.1f}"
    paper_perplexity = ""
    if published.perplexity is not None and published_other.perplexity is not None:
        paper_perplexity = f"{published.perplexity - published_other.perplexity:+.2f}"

    return (
        f"| {conclusion.statement} | {row.name}, {other.name} | {paper_bleu} | {bleu:+.2f} ± {error:.2f} "
        f"| {paper_perplexity} | {perplexity:+.2f} | {_verdict(bleu, error, alike=conclusion.alike)} |"
    )


def mean_bleu(row: TableRow) -> float:
    """On the first test set, over seeds."""
    return fmean(_first_score(run).bleu for run in row.runs)


def _first_score(run: Measured) -> Interval:
    return next(iter(run.scores.values()))


def error_of_difference(row: TableRow, other: TableRow) -> float:
    """What a difference in BLEU must exceed: the sampling of the sentences, or of the seeds, whichever is larger."""
    sampling = math.hypot(*(fmean(_first_score(run).half_width for run in each.runs) for each in (row, other)))
    if min(len(row.runs), len(other.runs)) < 2:
        return sampling
    variances = [stdev(_first_score(run).bleu for run in each.runs) ** 2 / len(each.runs) for each in (row, other)]
    return max(sampling, 2 * math.sqrt(sum(variances)))


def _verdict(difference: float, error: float, *, alike: bool) -> str:
    is_small = abs(difference) <= error
    if alike:
        return "yes: no difference that counts" if is_small else "no: they differ"
    if is_small:
        return "undecided: the difference is too small"
    return "yes" if difference > 0 else "no: the other way round"
