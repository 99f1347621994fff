"""`transformer table table=DIR`: the runs of a folder, such as the runs of a sweep, as a table; nothing is trained.

    a folder -> its finished runs -> measured -> grouped by settings -> rows, the best first

Runs that differ only in their seed share a row. The rows are sorted by what the runs were validated by, the best first:
choose among them by that, and not by the test sets. Runs of which some were validated by BLEU and some by loss are all
sorted by BLEU: a loss depends on label smoothing, and none can be compared with a BLEU.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from transformer.config.jobs import TrainJob
from transformer.config.keys import as_typed, leaves
from transformer.config.primitives import to_json
from transformer.config.settings import Metric
from transformer.errors import InputError, TransformerError
from transformer.records import Results
from transformer.run_dir import RunDir
from transformer.tools.outputs import make_output
from transformer.tools.tables.job import TableJob
from transformer.tools.tables.measured import Measured, Table, TableRow, measure
from transformer.tools.tables.rows import output_of

NOT_COMPARED = ("run_dir", "data.store_dir", "train.seed")


@dataclass(frozen=True)
class _Finished:
    """A run with its settings and its results, and what it measured."""

    job: TrainJob
    results: Results
    measured: Measured


def make_run_table(job: TableJob) -> Table:
    """Measure the finished runs of the folder `job.table`, and of the folders in it.

    Raises InputError where there is none, and StorageError where the output cannot be made. Unfinished and damaged runs
    are left out, and named in a note.
    """
    folder = Path(job.table)
    if job.rows is not None or job.seeds != 1:
        raise InputError(f"table={folder}: the table of a folder has all of its runs: leave rows and seeds out")

    make_output(output_of(job))

    # Measure every run that is finished.
    runs: list[_Finished] = []
    left_out: list[str] = []
    for path in _find_runs(folder):
        try:
            runs.append(_read(RunDir(path)))
        except TransformerError as error:
            left_out.append(f"Left out: {error}.")
    if not runs:
        why = left_out[0] if left_out else "there is no run directory in it, nor in a folder of it."
        raise InputError(f"table={folder}: there is no finished run: {why} `transformer train --multirun` makes some")

    metric = _common_metric(runs)
    runs = [_with_best_dev(run, metric) for run in runs]
    return Table(
        title=str(folder),
        notes=[*_notes(runs, metric), *left_out],
        rows=_rows(runs, metric),
        best_first=metric,
    )


def _find_runs(folder: Path) -> list[Path]:
    """The run directories in a folder, and in the folders of it, where a table has its seeds."""
    name = RunDir(folder).record.name
    records = [*folder.glob(f"*/{name}"), *folder.glob(f"*/*/{name}")]
    return sorted(record.parent for record in records)


def _read(run: RunDir) -> _Finished:
    """The run, measured. Raises InputError where it is not finished, CheckpointError where it is damaged."""
    if not run.results.exists():
        raise InputError(f"{run.path}: the run is not finished")
    job = replace(run.read_record().config, run_dir=str(run.path))
    results = run.read_results()
    return _Finished(job, results, measure(job, results))


def _common_metric(runs: Sequence[_Finished]) -> Metric:
    """What all of these runs were validated by; BLEU where they differ."""
    metrics = {run.job.train.metric for run in runs}
    return metrics.pop() if len(metrics) == 1 else Metric.bleu


def _with_best_dev(run: _Finished, metric: Metric) -> _Finished:
    """The run with its best validation by this metric, which may not be the one that it was trained with."""
    best = run.results.best_validation(metric)
    return replace(run, measured=replace(run.measured, best_dev=best.value(metric)))


def _rows(runs: Sequence[_Finished], metric: Metric) -> list[TableRow]:
    """A row for all runs with the same settings but for the seed; the best first."""
    # The keys in which the runs differ.
    settings = [_settings(run.job) for run in runs]
    keys = dict.fromkeys(key for of_run in settings for key in of_run)
    varied = [key for key in keys if _varies(key, settings)]

    # The runs that share their settings.
    groups: dict[str, list[Measured]] = {}
    for run, of_run in zip(runs, settings, strict=True):
        changes = " ".join(f"{key}={as_typed(of_run.get(key))}" for key in varied)
        groups.setdefault(changes, []).append(run.measured)

    # The best group first.
    ranked = sorted(groups.items(), key=lambda group: _mean_rank(group[1], metric))
    return [
        TableRow(str(number), changes, published=None, runs=sorted(group, key=lambda run: run.seed), errors=[])
        for number, (changes, group) in enumerate(ranked, 1)
    ]


def _mean_rank(runs: Sequence[Measured], metric: Metric) -> float:
    """The mean of the runs' best validations, less for better runs; infinite where one of them has diverged."""
    sign = -1.0 if metric.higher_is_better else 1.0
    return fmean(sign * run.best_dev if math.isfinite(run.best_dev) else math.inf for run in runs)


def _settings(job: TrainJob) -> dict[str, Any]:
    """The settings by which runs are compared, under their full keys."""
    return {key: value for key, value in leaves(to_json(job)).items() if key not in NOT_COMPARED}


def _varies(key: str, settings: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the runs differ in a key."""
    return len({json.dumps(of_run.get(key)) for of_run in settings}) > 1


def _notes(runs: Sequence[_Finished], metric: Metric) -> list[str]:
    """What the figures depend on."""
    corpora = sorted({run.job.data.train.title for run in runs})
    steps = sorted({run.measured.steps for run in runs})
    budget = f"{steps[0]:,} steps" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,} steps"
    scored = " BLEU with an interval is that of the averaged model." if any(run.measured.scores for run in runs) else ""
    return [
        f"{len(runs)} runs on {', '.join(corpora)}; {budget}.",
        f"Sorted by the dev {metric.title} of each run's best checkpoint, the best row first.",
        "Perplexities are of the development set at the last step; a word ends at a space, and the end of a sentence "
        f"counts as one.{scored}",
        "FLOPs are those of the model's matrix products, forward and backward; minutes are of training alone.",
    ]
