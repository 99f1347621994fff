"""A measured table as Markdown, as CSV, as JSON and as a plot.

write_table          all of them, as OUTPUT/table.*
format_markdown      what it depends on, and the rows
format_csv           a line for each run and test set
"""

import csv
import io
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from transformer.config.primitives import to_json
from transformer.files import write_file, write_json
from transformer.run_dir import is_dev
from transformer.tools.markdown import code, markdown_table, plain
from transformer.tools.plots import Point, plot_points
from transformer.tools.significance import RESAMPLES, Interval
from transformer.tools.tables.measured import Measured, Published, Table, TableRow

log = logging.getLogger(__name__)

ROW_COLUMNS = ("row", "changes", "seed")
SET_COLUMNS = ("set", "bleu", "bleu_half_width", "bleu_signature")
RUN_COLUMNS = ("perplexity", "word_perplexity", "parameters", "steps", "flops", "seconds", "run_dir")

TEXT_COLUMNS = 2  # of the Markdown table: the first columns, which are not figures


def write_table(output: Path, table: Table, text: str) -> None:
    """Write table.json, .md, .csv and, with matplotlib, .svg into a directory that is there. Raises StorageError.

    `text` is what `format_markdown` gives, and whatever is to be said below it.
    """
    write_json(output / "table.json", to_json(table))
    write_file(output / "table.md", text.encode())
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
        measured = _scores_on(row, names[0])
        if measured:
            published = None if row.published is None else row.published.bleu
            points.append(Point(row.name, published, measured))
    return plot_points(points, title=table.title)


def format_markdown(table: Table) -> str:
    """The table for people: its title, what it depends on, and its rows."""
    notes = "".join(f"- {note}\n" for note in [*table.notes, *_about_spread(table)])
    return f"# {table.title}\n\n{notes}\n{_format_rows(table)}{_format_signatures(table)}"


def format_csv(table: Table) -> str:
    """A line for each run and each test set, or one for a run without a test set; for programs."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*ROW_COLUMNS, *SET_COLUMNS, *RUN_COLUMNS])
    for row in table.rows:
        for run in row.runs:
            of_row = (row.name, row.changes, run.seed)
            of_run = (
                run.perplexity,
                run.word_perplexity,
                run.parameters,
                run.steps,
                run.flops,
                run.seconds,
                run.run_dir,
            )
            for name, score in run.scores.items():
                of_set = (name, score.bleu, score.half_width, score.signature)
                writer.writerow([*of_row, *of_set, *of_run])
            if not run.scores:
                writer.writerow([*of_row, *("" for _ in SET_COLUMNS), *of_run])
    return text.getvalue()


# ---- rows -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Column:
    """A column of the Markdown table: its title, and its cell in each row."""

    title: str
    cell: Callable[[TableRow], str]
    is_published: bool = False  # the paper's figures: shown only where there are some


def _columns(table: Table) -> list[_Column]:
    """All columns; one of the paper's stands before the measured one."""
    runs = [run for row in table.rows for run in row.runs]
    columns = [
        _Column("row", lambda row: row.name),
        _Column("what it changes", lambda row: f"`{row.changes}`" if row.changes else ""),
    ]

    if table.best_first is not None:
        metric = table.best_first
        title, form = (f"greedy {metric.title}", ".2f") if metric.higher_is_better else (metric.title, ".4f")
        columns.append(_Column(f"{title}, dev", lambda row: _mean_and_spread(row, lambda run: run.best_dev, form)))

    columns += [
        _published_column("PPL", lambda paper: paper.perplexity, ".2f"),
        _Column("PPL per piece", lambda row: _mean_and_spread(row, lambda run: run.perplexity)),
        _Column("PPL per word", lambda row: _mean_and_spread(row, lambda run: run.word_perplexity)),
        _published_column("BLEU", lambda paper: paper.bleu, ".1f"),
        *(_bleu_column(name) for name in _set_names(table)),
        *([_mean_bleu_column()] if any(run.mean_bleu is not None for run in runs) else []),
        *(_judge_column(name) for name in dict.fromkeys(name for run in runs for name in run.judges)),
        _published_column("10^6 parameters", lambda paper: paper.millions, ".0f"),
        _Column("10^6 parameters", lambda row: _mean(row, lambda run: run.parameters / 1e6, ".2f")),
        _published_column("FLOPs", lambda paper: paper.flops, ".1e"),
        _Column("FLOPs", lambda row: _mean(row, lambda run: run.flops, ".2e")),
        _Column("minutes", lambda row: _mean(row, lambda run: run.seconds / 60, ".1f")),
    ]
    return columns


def _published_column(title: str, figure: Callable[[Published], float | None], form: str) -> _Column:
    """A figure of the paper's; empty where it prints none."""

    def cell(row: TableRow) -> str:
        published = None if row.published is None else figure(row.published)
        return "" if published is None else format(published, form)

    return _Column(f"{title}, paper", cell, is_published=True)


def _bleu_column(test_set: str) -> _Column:
    return _Column(f"BLEU, {test_set}", lambda row: _format_bleu(_scores_on(row, test_set)))


def _mean_bleu_column() -> _Column:
    """The mean over the test sets, of each row whose runs all have one."""

    def cell(row: TableRow) -> str:
        means = [run.mean_bleu for run in row.runs if run.mean_bleu is not None]
        return f"{fmean(means):.2f}{_spread(means, '.2f')}" if means and len(means) == len(row.runs) else ""

    return _Column("BLEU, mean of the sets", cell)


def _judge_column(name: str) -> _Column:
    """The mean over the runs that an external judge has judged, of each row where it has judged all."""

    def cell(row: TableRow) -> str:
        is_whole = all(name in run.judges for run in row.runs)
        return _mean_and_spread(row, lambda run: run.judges[name], ".4f") if is_whole else ""

    return _Column(name, cell)


def _format_rows(table: Table) -> str:
    """The rows as a Markdown table, and a list of what has failed."""
    # A column of the paper's figures is shown where one of the rows has any.
    shown = []
    for column in _columns(table):
        if not column.is_published or any(column.cell(row) for row in table.rows):
            shown.append(column)

    cells = [[column.cell(row) for column in shown] for row in table.rows]
    lines = markdown_table([column.title for column in shown], cells, left=range(TEXT_COLUMNS))

    failed = [f"- {plain(row.name)} failed: {plain(error)}" for row in table.rows for error in row.errors]
    if failed:
        lines += ["", *failed]
    return "\n".join(lines) + "\n"


def _mean(row: TableRow, figure: Callable[[Measured], float], form: str) -> str:
    """The mean of a figure over the seeds of a row; empty where no run has finished."""
    return format(fmean(map(figure, row.runs)), form) if row.runs else ""


def _mean_and_spread(row: TableRow, figure: Callable[[Measured], float], form: str = ".2f") -> str:
    """The mean of a figure, and its standard deviation over the seeds where there are several."""
    return f"{_mean(row, figure, form)}{_spread(list(map(figure, row.runs)), form)}"


def _spread(figures: Sequence[float], form: str) -> str:
    """The standard deviation as it stands behind a mean; empty for less than two figures, and where one is not finite.

    A training that has diverged has a perplexity of infinity: the mean says so.
    """
    if len(figures) < 2 or not all(map(math.isfinite, figures)):
        return ""
    return f", sd {stdev(figures):{form}}"


def _scores_on(row: TableRow, test_set: str) -> list[Interval]:
    """The scores of a row's runs on a test set, of the runs that have it."""
    return [run.scores[test_set] for run in row.runs if test_set in run.scores]


def _format_bleu(scores: Sequence[Interval]) -> str:
    """The mean with its sampling interval, and with the standard deviation over seeds where there are several."""
    if not scores:
        return ""

    mean = fmean(score.bleu for score in scores)
    half_width = fmean(score.half_width for score in scores)
    spread = _spread([score.bleu for score in scores], ".2f")
    return f"{mean:.2f} ± {half_width:.2f}{spread}{f' of {len(scores)} seeds' if spread else ''}"


def _about_spread(table: Table) -> list[str]:
    """What the figures behind the means are, as far as the table has any."""
    notes = []
    names = _set_names(table)
    has_seeds = any(len(row.runs) > 1 for row in table.rows)
    if names:
        kind = "dev" if all(map(is_dev, names)) else "test"
        note = f"± is half of the 95 % bootstrap interval of BLEU, from {RESAMPLES:,} resamples of the {kind} sentences"
        one_seed = f": {kind} sampling only, for there is one seed, and another might differ by more."
        notes.append(f"{note}{'.' if has_seeds else one_seed}")
    if has_seeds:
        notes.append("sd is the standard deviation over seeds.")
    return notes


def _set_names(table: Table) -> list[str]:
    """The sets that any of the runs was scored on."""
    names = [name for row in table.rows for run in row.runs for name in run.scores]
    return list(dict.fromkeys(names))


def _format_signatures(table: Table) -> str:
    """The signatures of the scores, each once."""
    runs = [run for row in table.rows for run in row.runs]
    signatures = dict.fromkeys(score.signature for run in runs for score in run.scores.values())
    return "".join(f"\nBLEU signature: {code(signature)}\n" for signature in signatures)
