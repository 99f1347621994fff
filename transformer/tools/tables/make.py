"""Makes a table: trains its rows on the same corpus, and measures what was trained.

Rows        a job for each row, from `rows` or from `tools/paper`
grid        a training for each row and each seed, in OUTPUT/ROW/seed-N
measured    perplexity, BLEU with its interval, parameters, FLOPs and time of each run
"""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from transformer.config.jobs import TrainJob
from transformer.data.source import store_beside
from transformer.distributed import is_rank0
from transformer.errors import TransformerError
from transformer.records import Results
from transformer.run_dir import lock_folder
from transformer.tools.outputs import make_output
from transformer.tools.tables.grid import run_grid
from transformer.tools.tables.job import TableJob
from transformer.tools.tables.measured import Measured, Table, TableRow, measure
from transformer.tools.tables.rows import Row, Rows, output_of

log = logging.getLogger(__name__)


def make_table(job: TableJob, asked: Rows) -> tuple[Table, list[Exception]]:
    """Train what is missing, and measure every row; also returns the errors of the runs that failed.

    Raises StorageError where the output cannot be made, LockedError where another process trains its rows.
    """
    output = output_of(job)
    make_output(output)  # before any time is spent

    # Train every row with every seed.
    seeds = range(job.train.seed, job.train.seed + job.seeds)
    store_dir = store_beside(job.run_dir)
    jobs = {}
    for row in asked.rows:
        for seed in seeds:
            jobs[_run_name(row, seed)] = _run_job(row, seed, output=output, store_dir=store_dir)
    with lock_folder(output, key="output") if is_rank0() else nullcontext():
        outcomes = run_grid(jobs)

    # Measure what was trained.
    measured = {name: _measure_outcome(jobs[name], outcome) for name, outcome in outcomes.items()}
    table_rows = [_table_row(row, [measured[_run_name(row, seed)] for seed in seeds]) for row in asked.rows]
    errors = [error for error in measured.values() if isinstance(error, Exception)]
    notes = [*_notes(job, table_rows), *asked.notes]
    return Table(title=asked.title, notes=notes, rows=table_rows), errors


def _run_name(row: Row, seed: int) -> str:
    return f"{row.name}, seed {seed}"


def _run_job(row: Row, seed: int, *, output: Path, store_dir: Path) -> TrainJob:
    """The job of one run; all of them share the prepared corpus."""
    data = replace(row.job.data, store_dir=row.job.data.store_dir or str(store_dir))
    run_dir = output / row.name / f"seed-{seed}"
    return replace(row.job, run_dir=str(run_dir), data=data, train=replace(row.job.train, seed=seed))


# ---- measuring ------------------------------------------------------------------------------------------------------


def _table_row(row: Row, of_seeds: Sequence[Measured | Exception]) -> TableRow:
    """A row as it is shown, from what became of each of its seeds."""
    runs = [measured for measured in of_seeds if isinstance(measured, Measured)]
    errors = [str(error) for error in of_seeds if isinstance(error, Exception)]
    return TableRow(row.name, row.changes, row.published, runs, errors)


def _measure_outcome(job: TrainJob, outcome: Results | Exception) -> Measured | Exception:
    """The figures of a run, or why it has none. A damaged run directory is the failure of its own row alone."""
    if isinstance(outcome, Exception):
        return outcome
    try:
        return measure(job, outcome)
    except TransformerError as error:
        log.error("run %s cannot be measured: %s", job.run_dir, error)
        return error


# ---- what the figures depend on -------------------------------------------------------------------------------------


def _notes(job: TableJob, rows: Sequence[TableRow]) -> list[str]:
    """What the figures depend on, beside the rows' own settings."""
    # The corpus and the budget: steps that were taken, which may be others than the job asks for.
    train = job.train
    corpus = Path(job.data.train.title)
    steps = sorted({run.steps for row in rows for run in row.runs}) or [train.max_steps]
    if len(steps) == 1:
        budget = f"{steps[0]:,} steps of {train.tokens_per_step:,} target tokens for every row"
    else:
        budget = f"{steps[0]:,} to {steps[-1]:,} steps of {train.tokens_per_step:,} target tokens"
    seeds = f"seed {train.seed}" if job.seeds == 1 else f"{job.seeds} seeds, from {train.seed} on"

    # What is measured, and how.
    search = job.search
    beam = f"Beam {search.beam_size}, length penalty {search.length_penalty}. "
    is_scored = any(run.scores for row in rows for run in row.runs)
    return [
        f"Corpus: {Path(*corpus.parts[-2:])}; {budget}; {seeds}.",
        f"{beam if is_scored else ''}Perplexities are of the development set; "
        "a word ends at a space, and the end of a sentence counts as one.",
        "FLOPs are those of the model's matrix products, forward and backward; minutes are of training alone.",
    ]
