"""`transformer table table=DIR`: the runs of a folder, such as those of a sweep, as a table; nothing is trained.

Runs that differ only in their seed share a row. The rows are sorted by what the runs were validated by, the best first:
that is how to choose among them, and not by the test sets.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from transformer.config.jobs import TableJob, TrainJob
from transformer.config.keys import as_typed, leaves
from transformer.config.primitives import to_json
from transformer.config.settings import Metric
from transformer.errors import InputError, TransformerError
from transformer.run_dir import RunDir
from transformer.tools.tables import Measured, Table, TableRow, make_output, measure, output_of

NOT_COMPARED = ("run_dir", "data.store_dir", "train.seed")


@dataclass(frozen=True)
class _Finished:
    """A run with its settings, and what it measured."""

    job: TrainJob
    measured: Measured


def make_run_table(job: TableJob) -> Table:
    """Measure the finished runs of the folder `job.table`, and of the folders in it.

    Raises InputError where there is none, and StorageError where the output cannot be made. Unfinished and damaged runs
    are left out, and named in a note.
    """
    folder = Path(job.table)
    if job.rows is not None or job.seeds != 1:
        raise InputError(f"table={folder}: all runs that are there are measured: leave rows and seeds out")

    make_output(output_of(job))
    runs: list[_Finished] = []
    left_out: list[str] = []
    for path in _find_runs(folder):
        try:
            runs.append(_read(RunDir(path)))
        except TransformerError as error:
            left_out.append(f"Left out: {error}.")
    if not runs:
        found = left_out[0] if left_out else "there is no run directory in it, nor in a folder of it."
        raise InputError(f"table={folder}: no finished run: {found} `transformer train --multirun` makes some")

    metric = runs[0].job.train.metric
    return Table(
        title=str(folder),
        notes=[*_notes(runs, metric), *left_out],
        rows=_rows(runs, metric),
        best_first=metric,
    )


def _find_runs(folder: Path) -> list[Path]:
    """The run directories in a folder, and in the folders of it, where a table has its seeds."""
    name = RunDir(folder).record.name
    return sorted(path.parent for pattern in (f"*/{name}", f"*/*/{name}") for path in folder.glob(pattern))


def _read(run: RunDir) -> _Finished:
    """Raises InputError for a run that is not finished, CheckpointError for one that is damaged."""
    if not run.results.exists():
        raise InputError(f"{run.path}: not finished")
    job = replace(run.read_record().config, run_dir=str(run.path))
    return _Finished(job, measure(job, run.read_results()))


def _rows(runs: Sequence[_Finished], metric: Metric) -> list[TableRow]:
    """A row for all runs with the same settings but for the seed; the best first."""
    settings = [_settings(run.job) for run in runs]
    varied = [key for key in dict.fromkeys(key for of in settings for key in of) if _varies(key, settings)]

    rows: dict[str, list[Measured]] = {}
    for run, of in zip(runs, settings, strict=True):
        changes = " ".join(f"{key}={as_typed(of.get(key))}" for key in varied)
        rows.setdefault(changes, []).append(run.measured)

    sign = -1.0 if metric is Metric.bleu else 1.0
    ranked = sorted(rows.items(), key=lambda row: sign * fmean(_finite(run.best_dev, sign) for run in row[1]))
    return [
        TableRow(str(number), changes, published=None, runs=sorted(of_row, key=lambda run: run.seed), errors=[])
        for number, (changes, of_row) in enumerate(ranked, 1)
    ]


def _finite(figure: float, sign: float) -> float:
    """The figure, or the worst there is: a run that has diverged comes last."""
    return figure if math.isfinite(figure) else sign * math.inf


def _settings(job: TrainJob) -> dict[str, Any]:
    return {key: value for key, value in leaves(to_json(job)).items() if key not in NOT_COMPARED}


def _varies(key: str, settings: Sequence[Mapping[str, Any]]) -> bool:
    return len({json.dumps(of.get(key)) for of in settings}) > 1


def _notes(runs: Sequence[_Finished], metric: Metric) -> list[str]:
    """What the figures depend on."""
    steps = sorted({run.measured.steps for run in runs})
    corpora = sorted({run.job.data.train.dataset or run.job.data.train.src for run in runs})
    return [
        f"{len(runs)} runs on {', '.join(corpora)}; "
        + (f"{steps[0]:,} steps." if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,} steps."),
        f"Sorted by the dev {metric.name} of each run's best checkpoint, the best row first.",
        "Perplexities are of the development set at the last step; a word ends at a space, and the end of a sentence "
        "counts as one. BLEU is that of the averaged model on the test sets.",
        "FLOPs are those of the model's matrix products, forward and backward; minutes are of training alone.",
    ]
