"""The rows of a table before they are trained: each has a name, what it changes, and the job of its training.

    table=rows.yaml -> rows_of_file -> Rows -> `make`, which trains and measures them

Corpus, budget and search are the command's in every row. The rows of the paper's tables are made in `tools/paper`.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from transformer.config.compose import read_yaml
from transformer.config.jobs import TrainJob
from transformer.config.keys import as_typed, leaves
from transformer.errors import InputError
from transformer.tools.tables.grid import Changes, describe_changes, with_changes
from transformer.tools.tables.job import PAPER_TABLES, SCORES, TableJob
from transformer.tools.tables.measured import Published

OVERRIDDEN = "What a row changes overrides all of this."
EXAMPLE = "`h1: {model: {n_heads: 1}}`, or `base: {}` for none"

Value = TypeVar("Value")  # what a table knows of a row before its job is made


@dataclass(frozen=True)
class Row:
    """One row before it is trained."""

    name: str
    changes: str  # as one types them; none in the row that the others are compared with
    published: Published | None
    job: TrainJob  # run directory and seed are still those of the command


@dataclass(frozen=True)
class Rows:
    """The rows of a table, with its title and what is to be said of their scores."""

    title: str
    rows: list[Row]
    notes: list[str]


def is_folder(job: TableJob) -> bool:
    """Whether the table is of the runs in a folder."""
    return job.table not in (*PAPER_TABLES, SCORES) and Path(job.table).is_dir()


def output_of(job: TableJob) -> Path:
    """The folder that the table goes to.

    The table of a folder of runs goes into that folder. Any other goes beside the run directory of the job.
    """
    if is_folder(job):
        return Path(job.output or job.table)
    name = f"table{job.table}" if job.table in PAPER_TABLES else Path(job.table).stem
    return Path(job.output or f"{Path(job.run_dir)}-{name}")


def rows_of_file(job: TableJob) -> Rows:
    """The rows of the YAML file that the job names. Raises InputError for an unknown or a bad row."""
    changes_of = chosen_rows(read_rows(Path(job.table)), job.rows)
    given = train_job(job)
    rows = [_row_of_file(given, name, changes=changes, path=job.table) for name, changes in changes_of.items()]
    return Rows(Path(job.table).stem, rows, [about_average(given), OVERRIDDEN])


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of a table that a YAML file holds: by name, the settings that each changes, nested as in an experiment.

    Raises InputError where the file cannot be read, or is no such table.
    """
    rows = read_yaml(path, "table", remedy="name 1, 2, 3, scores or a YAML file with rows")
    if not isinstance(rows, dict) or not rows:
        raise InputError(f"{path}: no rows; a row is a name with the settings that it changes, {EXAMPLE}")
    for name, changes in rows.items():
        if not isinstance(name, str) or re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) is None:
            raise InputError(f"{path}: row {name!r}: a name has letters, digits, '.', '_' and '-' only")
        if name.startswith("table."):
            raise InputError(f"{path}: row {name}: the table itself is written under this name: choose another")
        if not isinstance(changes, dict):
            raise InputError(f"{path}: row {name}: not settings; write them as {EXAMPLE}")
    return rows


def _row_of_file(given: TrainJob, name: str, *, changes: Changes, path: str) -> Row:
    """A row of the user's own. Raises InputError for settings that cannot be."""
    for key in leaves(changes):
        if key in ("run_dir", "train.seed"):  # the row would show it, and it would have no effect
            raise InputError(f"{path}: row {name}: {key}: the table itself sets it, from output, train.seed and seeds")
    job = with_changes(given, changes, place=f"{path}: row {name}")
    try:
        job.check_overrides([f"{key}={as_typed(value)}" for key, value in leaves(changes).items()])
    except InputError as error:
        raise InputError(f"{path}: row {name}: {error}") from error
    return Row(name, describe_changes(changes), published=None, job=job)


# ---- for rows of any kind -------------------------------------------------------------------------------------------


def train_job(job: TableJob) -> TrainJob:
    """The keys of the job that every training has."""
    return TrainJob(**{field.name: getattr(job, field.name) for field in fields(TrainJob)})


def chosen_rows(rows: Mapping[str, Value], wanted: str | None) -> dict[str, Value]:
    """The rows of the wanted names, or whose names begin like them, in the table's order; None: all.

    Raises InputError for a name that no row has.
    """
    if wanted is None:
        return dict(rows)

    chosen: set[str] = set()
    for name in wanted.split(","):
        matching = _matching(name, rows)
        if not matching:
            raise InputError(f"rows={wanted}: no row begins with {name!r}; there are {', '.join(rows)}")
        chosen |= set(matching)
    return {name: row for name, row in rows.items() if name in chosen}


def _matching(wanted: str, names: Collection[str]) -> list[str]:
    """The row of this name; if there is none, the rows whose names begin like it."""
    if wanted in names:
        return [wanted]
    return [name for name in names if wanted and name.startswith(wanted)]


def about_average(job: TrainJob) -> str:
    """How BLEU is measured where rows are scored as `train` scores a run of this job."""
    sets = "the test sets" if job.data.test else "the development set, for there is no test set"
    return f"BLEU: sacreBLEU of the mean of the last checkpoints ({job.train.average} at most), on {sets}."
