"""What a run reports while it trains, and where.

    scalars by step    Tracker       -> TensorBoard, metrics.jsonl, and the sinks of `train.trackers`
    log lines          log_to        -> train.log, beside whatever the process does with them
    a bar              progress_bar  -> the terminal

A resumed run drops what TensorBoard and metrics.jsonl hold of later steps, so that no step appears twice; sinks cannot,
and are not sent those steps again. train.log is a diary and keeps everything.
"""

import json
import logging
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO, TypeAlias

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from transformer.config.jobs import TrainJob
from transformer.config.keys import as_typed, leaves
from transformer.config.primitives import to_json
from transformer.errors import StorageError
from transformer.files import append_to, open_regular, storage_error, write_file
from transformer.run_dir import RunDir
from transformer.terminal import TIMED, PrintableFormatter, printable

Setting: TypeAlias = str | float

LARGEST_METRICS = 1 << 28  # bytes: a million lines

# Scalars for metrics.jsonl alone. The share of padding hardly changes: a picture would stretch the noise of its third
# digit over the whole axis.
METRICS_ALONE = {"speed/padding_share"}


class Sink(Protocol):
    """A tracker that shows one training. No method raises, or waits."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Show these values of `step`."""
        ...

    def table(self, step: int, name: str, *, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Show a table of `step`: text as it is."""
        ...


class Tracker:
    """Writes scalars by step to metrics.jsonl and, but for METRICS_ALONE, TensorBoard and sinks; tables there only.

    Every method raises StorageError where they cannot be written: on a full disk, or in a directory taken away. A
    context manager: if the block ends with an error, that is raised, and not what closing may raise after it.
    """

    def __init__(self, run: RunDir | None, step: int, *, sinks: Sequence[Sink] = ()) -> None:
        """Go on after `step`: what was written for later steps is dropped. Without a run, nothing is written."""
        self._writes = run is not None
        if run is None:
            return
        from torch.utils.tensorboard import SummaryWriter  # slow

        self._run = run
        with _errors_named(run.path):  # TensorBoard names a run by the directory of its files
            self._writer = SummaryWriter(str(run.path), purge_step=step + 1)
        with _errors_named(run.metrics):
            self._last_sent = _drop_after(run.metrics, step)
            self._metrics = append_to(run.metrics)
        self._sinks = sinks

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        try:
            self.close()
        except StorageError:
            if kind is None:
                raise

    def settings(self, job: TrainJob) -> None:
        """Show the run's settings in TensorBoard's hyper-parameter tab, beside the scalars of the same run.

        No columns are declared, so TensorBoard chooses them: the settings of all runs, those that differ first, and all
        scalars by name, the dev set's first.
        """
        if not self._writes:
            return
        from torch.utils.tensorboard.summary import hparams  # slow

        summaries_of: Any = hparams  # neither it nor the writer of files below is typed
        writer: Any = self._writer
        _, start, _ = summaries_of(hyper_parameters(job), {})
        with _errors_named(self._run.path):
            writer.file_writer.add_summary(start)

    def scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        """Write these values of `step`; None is left out, and so is what is not finite: JSON has no word for it."""
        if not self._writes:
            return
        finite = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}

        shown = {name: value for name, value in finite.items() if name not in METRICS_ALONE}
        with _errors_named(self._run.path):
            for name, value in shown.items():
                self._writer.add_scalar(name, value, step)
        for sink in self._sinks_of(step):
            sink.scalars(step, shown)

        line = json.dumps({"step": step, "time": round(time.time(), 3), **finite})
        with _errors_named(self._run.metrics):
            self._metrics.write(f"{line}\n")
            self._metrics.flush()

    def table(self, step: int, name: str, *, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Show texts of `step`, in TensorBoard a line for each, as they are, with control characters escaped."""
        if not self._writes:
            return
        width = max(map(len, columns))
        rows = [[printable(cell) for cell in row] for row in rows]
        lines = [f"    {column:<{width}} {cell}" for row in rows for column, cell in zip(columns, row, strict=True)]
        with _errors_named(self._run.path):
            self._writer.add_text(name, "\n".join(lines), step)  # Markdown's literal block
        for sink in self._sinks_of(step):
            sink.table(step, name, columns=columns, rows=rows)

    def _sinks_of(self, step: int) -> Sequence[Sink]:
        """The sinks, unless the process before this one, which was killed, has sent them this step."""
        return self._sinks if step >= self._last_sent else ()

    def flush(self) -> None:
        """Write out what is buffered."""
        if self._writes:
            with _errors_named(self._run.path):
                self._writer.flush()

    def close(self) -> None:
        """Write out what is buffered, and end."""
        if not self._writes:
            return
        with _errors_named(self._run.metrics):
            self._metrics.close()
        with _errors_named(self._run.path):
            self._writer.close()


def hyper_parameters(job: TrainJob) -> dict[str, Setting]:
    """The settings by their keys, as trackers show them; without the run's directory, which they name otherwise."""
    return {key: _as_hyper_parameter(value) for key, value in leaves(to_json(job)).items() if key != "run_dir"}


def _as_hyper_parameter(value: object) -> Setting:
    """A number as such, which the tab sorts by; anything else as it is typed."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    return as_typed(value)


@contextmanager
def _errors_named(path: Path) -> Iterator[None]:
    """Raise StorageError, naming the file, for whatever keeps it from being written."""
    try:
        yield
    except OSError as error:
        raise storage_error(path, error=error) from error


def _drop_after(path: Path, step: int) -> float:
    """Remove the lines of later steps, and a last line that a crash cut short. Raises StorageError.

    Returns the last step that there was, dropped or not.
    """
    if not os.path.lexists(path):
        return 0
    if path.lstat().st_size > LARGEST_METRICS:
        raise StorageError(f"{path}: larger than {LARGEST_METRICS} bytes: move it away, and the run begins a new one")
    with open_regular(path) as file:
        steps = [(_step_of(line), line) for line in file.read().split(b"\n")]
    write_file(path, b"".join(line + b"\n" for of_step, line in steps if of_step <= step))
    return max((of_step for of_step, _ in steps if math.isfinite(of_step)), default=0)


def _step_of(line: bytes) -> float:
    """The step of a line of metrics.jsonl; infinity for what is no such line."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return float("inf")


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Append the package's log lines to a file, with the time of day, whatever the process shows of them itself."""
    logger = logging.getLogger("transformer")
    with _errors_named(path):
        to_file = _LogFile(path)
    to_file.setFormatter(PrintableFormatter(TIMED))

    # The file gets every line from INFO on; the handlers of the process get what they would have got without it.
    to_process = _Parents(logger, logger.getEffectiveLevel())
    earlier_level = logger.level
    earlier_propagate = logger.propagate
    logger.setLevel(min(logging.INFO, logger.getEffectiveLevel()))
    logger.propagate = False
    logger.addHandler(to_file)
    logger.addHandler(to_process)
    try:
        yield
    finally:
        logger.removeHandler(to_file)
        logger.removeHandler(to_process)
        logger.setLevel(earlier_level)
        logger.propagate = earlier_propagate
        to_file.close()


class _LogFile(logging.StreamHandler[TextIO]):
    """Adds lines to a file. Lines that do not fit on the disk are lost: what must not be lost is saved elsewhere."""

    def __init__(self, path: Path) -> None:
        super().__init__(append_to(path))

    def handleError(self, record: logging.LogRecord) -> None:
        """Say nothing, where logging would print a traceback."""

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):
            self.stream.close()
        super().close()


class _Parents(logging.Handler):
    """Passes records on to the handlers of the loggers above, from the level on that was in force there before."""

    def __init__(self, logger: logging.Logger, level: int) -> None:
        super().__init__(level)
        self._parent = logger.parent

    def emit(self, record: logging.LogRecord) -> None:
        """Hand the record to the loggers above."""
        if self._parent is not None and self._parent.hasHandlers():
            self._parent.callHandlers(record)


ProgressBar: TypeAlias = "tqdm[Any]"

# What it shows, the most wanted first: a terminal too narrow for all of it cuts the end off.
BAR_FORMAT = "{n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}] {percentage:3.0f}%|{bar}|"

# The `extra` of a log line that would only repeat or interrupt what a progress bar shows: where the terminal has a bar,
# the line goes to train.log alone.
HIDDEN_BY_BAR = {"is_hidden_by_bar": True}


@contextmanager
def progress_bar(total: int | None, step: int, *, unit: str, shown: bool) -> Iterator[ProgressBar]:
    """A bar over the steps, or other units, on a terminal only; log lines pass above it. The total may be unknown.

    It needs a terminal that shows the log from INFO on: with less shown it would disturb, and with more it would hide
    some of it.
    """
    levels = {handler.level for handler in logging.getLogger().handlers} or {logging.INFO}
    hidden = not (shown and sys.stderr.isatty() and levels & {logging.NOTSET, logging.INFO})
    has_size = not hidden and _has_size()
    with (
        tqdm(
            total=total,
            initial=step,
            unit=unit,
            disable=hidden,
            bar_format=None if total is None else BAR_FORMAT,
            dynamic_ncols=has_size,
            ncols=None if has_size else 79,
            nrows=None if has_size else 23,
        ) as bar,
        nullcontext() if hidden else _lines_above_bar(),
    ):
        yield bar


def rate_and_rest(count: int, rest: int, *, seconds: float) -> tuple[str, str]:
    """How many are done a second, and the time that the rest needs at this pace, as a bar writes them."""
    rate = count / max(seconds, 1e-9)
    return f"{rate:.1f}", tqdm.format_interval(rest / rate) if rate else "?"


def _has_size() -> bool:
    """Whether the terminal has a size: those of some containers have none, and there tqdm would show no bar."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except OSError:
        return False


@contextmanager
def _lines_above_bar() -> Iterator[None]:
    """Let log lines pass above a bar on the terminal, but for those marked HIDDEN_BY_BAR."""
    root = logging.getLogger()
    before = list(root.handlers)
    with logging_redirect_tqdm():
        for handler in root.handlers:
            if handler not in before:  # it stands for one that writes to the terminal, for as long as this lasts
                handler.addFilter(lambda record: not getattr(record, "is_hidden_by_bar", False))
        yield
