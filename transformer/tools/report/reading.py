"""Reads the documents of a run directory for its report, which goes on without what is missing or damaged.

    run.json, data.json, results.json, metrics.jsonl -> read_run -> RunReading -> every section of the report

What cannot be read is noted in `RunReading.missing`.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from transformer.data.report import DataReport, read_report
from transformer.errors import InputError, TransformerError
from transformer.records import Results, RunRecord, Validation
from transformer.run_dir import RunDir
from transformer.run_names import run_path
from transformer.tools.metrics import Curve, read_curves

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class RunReading:
    """What the documents of a run say; None stands for one that cannot be read."""

    name: str  # as the user gave it
    directory: RunDir
    record: RunRecord | None
    data: DataReport | None
    results: Results | None
    curves: dict[str, Curve]  # by their names in metrics.jsonl
    missing: list[str]  # a sentence on each thing that is not there, damaged, or failed; sections add to it

    @property
    def is_finished(self) -> bool:
        """Whether its results are those of its last step: training may have gone on since they were written."""
        return self.results is not None and self.results.steps == self.last_step

    @property
    def validations(self) -> list[Validation]:
        """The validations in the results of a finished run, else those in its metrics."""
        if self.results is not None and self.is_finished:
            return self.results.validations
        return _validations_in(self.curves)

    @property
    def last_step(self) -> int:
        """The last step that its documents tell of."""
        in_results = 0 if self.results is None else self.results.steps
        return max(in_results, *(curve[-1][0] for curve in self.curves.values()), 0)


def read_run(name: str) -> RunReading:
    """Read a run directory. Raises InputError where there is none."""
    run = RunDir(run_path(name, "runs"))
    if not run.path.is_dir():
        raise InputError(f"{name}: no such run directory")
    documents = (run.record, run.results, run.metrics)
    if not any(path.exists() for path in documents):
        names = ", ".join(path.name for path in documents)
        raise InputError(f"{name}: not a run directory: it has none of {names}; name one that `train` made")

    # What cannot be read is noted.
    missing: list[str] = []
    record = _attempt(run.read_record, missing)
    data = _attempt(lambda: read_report(run), missing)
    results = None
    if run.results.exists():
        results = _attempt(run.read_results, missing)
    else:
        missing.append(
            f"{run.results}: not there: the run is not finished. The command that trains it goes on, averages its "
            "checkpoints and scores its test sets"
        )
    curves = _read_curves(run, missing)

    reading = RunReading(name, run, record, data, results, curves=curves, missing=missing)
    if results is not None and not reading.is_finished:
        missing.append(
            f"{run.results}: of step {results.steps:,}, and training has gone on to step {reading.last_step:,}: the "
            "command that trains it scores its test sets again at the end"
        )
    return reading


def _attempt(read: Callable[[], T], missing: list[str]) -> T | None:
    """What `read` returns; None, and a note, where it cannot."""
    try:
        return read()
    except TransformerError as error:
        missing.append(str(error))
        return None


def _read_curves(run: RunDir, missing: list[str]) -> dict[str, Curve]:
    """Every quantity of metrics.jsonl over the steps; damaged lines are counted in a note."""
    try:
        curves, damaged = read_curves(run.metrics)
    except OSError as error:
        missing.append(f"{run.metrics}: {error.strerror}: there are no curves")
        return {}
    if damaged:
        missing.append(f"{run.metrics}: {damaged:,} of its lines are damaged, and left out")
    return curves


def _validations_in(curves: dict[str, Curve]) -> list[Validation]:
    """The validations that metrics.jsonl tells of, where it has all four numbers of one."""
    losses = dict(curves.get("dev/loss", []))
    perplexities = dict(curves.get("dev/perplexity", []))
    bleus = dict(curves.get("dev/bleu", []))
    chrfs = dict(curves.get("dev/chrf", []))

    validations = []
    for step, loss in losses.items():
        is_whole = step in perplexities and step in bleus and step in chrfs
        if is_whole and perplexities[step] > 0:
            nll = math.log(perplexities[step])
            validations.append(Validation(step, loss, nll, bleus[step], chrfs[step]))
    return validations
