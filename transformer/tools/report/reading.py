"""Reads the documents of a run directory for its report, which goes on without what is missing or damaged.

    run.json, data.json, results.json, metrics.jsonl -> read_run -> RunReading -> every section of the report

What cannot be read is noted in `RunReading.missing`.
"""

import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from transformer.data.report import DataReport, read_report
from transformer.errors import InputError, TransformerError
from transformer.files import open_regular
from transformer.records import Results, RunRecord, Validation
from transformer.run_dir import RunDir
from transformer.tracking import LARGEST_METRICS

log = logging.getLogger(__name__)

T = TypeVar("T")

LONGEST_LINE = 1 << 16  # bytes of a line of metrics.jsonl: a hundred times what training writes

Curve = list[tuple[int, float]]  # steps, ascending, each with its value


@dataclass(frozen=True)
class RunReading:
    """What the documents of a run say; None stands for one that cannot be read."""

    name: str  # as the user gave it
    directory: RunDir
    record: RunRecord | None
    data: DataReport | None
    results: Results | None
    curves: dict[str, Curve]  # by the names that TensorBoard shows
    missing: list[str]  # a sentence on each thing that is not there, damaged, or failed; sections add to it

    @property
    def validations(self) -> list[Validation]:
        """The validations in the results of a finished run, else those in its metrics."""
        if self.results is not None:
            return self.results.validations
        return _validations_in(self.curves)

    @property
    def last_step(self) -> int:
        """The last step that its documents tell of."""
        if self.results is not None:
            return self.results.steps
        return max((curve[-1][0] for curve in self.curves.values()), default=0)


def read_run(name: str) -> RunReading:
    """Read a run directory. Raises InputError where there is none."""
    run = RunDir(Path(name))
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
    return RunReading(name, run, record, data, results, curves=curves, missing=missing)


def _attempt(read: Callable[[], T], missing: list[str]) -> T | None:
    """What `read` returns; None, and a note, where it cannot."""
    try:
        return read()
    except TransformerError as error:
        missing.append(str(error))
        return None


def _read_curves(run: RunDir, missing: list[str]) -> dict[str, Curve]:
    """Every quantity of metrics.jsonl over the steps. Damaged lines are skipped, and counted in a note."""
    points: dict[str, dict[int, float]] = {}
    damaged = 0
    try:
        with open_regular(run.metrics, limit=LARGEST_METRICS) as file:
            for line in iter(lambda: file.readline(LONGEST_LINE), b""):
                try:
                    step, values = _parse(line)
                except ValueError:
                    damaged += 1
                    continue
                for name, value in values.items():
                    points.setdefault(name, {})[step] = value
    except OSError as error:
        missing.append(f"{run.metrics}: {error.strerror}: there are no curves")
    if damaged:
        missing.append(f"{run.metrics}: {damaged:,} of its lines are damaged, and left out")
    return {name: sorted(values_by_step.items()) for name, values_by_step in points.items()}


def _parse(line: bytes) -> tuple[int, dict[str, float]]:
    """The step of a line, and its finite numbers by name. Raises ValueError for a line of another kind."""
    try:
        data = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(data, dict):
        raise ValueError("not a line of metrics")
    step = data.get("step")
    if type(step) is not int or not 0 <= step < 2**53:
        raise ValueError("no step")

    numbers = {}
    for name, value in data.items():
        if name not in ("step", "time") and _is_number(value):
            numbers[str(name)] = float(value)
    return step, numbers


def _is_number(value: object) -> bool:
    """Whether a value is finite, and so small a whole number that a float holds it exactly."""
    if type(value) is int:
        return abs(value) < 2**53
    return isinstance(value, float) and math.isfinite(value)


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
