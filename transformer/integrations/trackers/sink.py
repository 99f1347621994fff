"""What a training sends to trackers beside TensorBoard, such as trackio: it never waits for one, except at its end.

    scalars, samples, scores -> Sink -> a pipe -> `service`, in a process of its own for each tracker -> its package

So a tracker that fails, hangs or is slow costs a line in the log and what it would have shown. Whatever it does to its
process, such as starting threads or handling signals, does not affect the training's process.
"""

import json
import logging
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, TypeAlias

from transformer.errors import PeerError
from transformer.registry import install_command
from transformer.terminal import printable

log = logging.getLogger(__name__)

MOST_WAITING = 1 << 20  # bytes that wait for a tracker, beside what a pipe holds; what comes then is left out
AT_END = 30.0  # seconds that a tracker has at the end of a training for what it has not sent yet
AFTER_ERROR = 10.0  # and at the end of one that was stopped, which may be killed soon
AFTER_LOSS = 0.5  # and where another rank is gone: this one is to say so, and the others wait for it

Setting: TypeAlias = str | float


class Sink:
    """One tracker, in another process. No method raises, or waits, but for `close`."""

    def __init__(self, name: str, folder: Path, *, run_id: str, settings: Mapping[str, Setting]) -> None:
        """Begin the run of this id, or go on with it."""
        self._tracker = name
        self._waiting = bytearray()
        self._has_left_out = False
        self._process: subprocess.Popen[bytes] | None = None
        if not _is_installed(self._tracker):
            self._warn(f"not installed, and left out: {install_command(self._tracker)}")
            return

        program = [sys.executable, "-P", str(Path(__file__).with_name("service.py")), self._tracker, str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                program,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,  # a Ctrl-C is for the training
            )
        except OSError as error:
            self._warn(f"cannot be started: {error}")
            return
        for stream in (self._process.stdin, self._process.stdout):
            os.set_blocking(_pipe(stream).fileno(), False)

        folder = folder.absolute()
        run_id = _as_name(run_id)  # as run.json has it, and packages name files by it
        title = f"{_as_name(folder.name)}-{run_id[:8]}"
        project = _as_name(folder.parent.name)
        self._send({"project": project, "name": title, "id": run_id, "settings": settings, "folder": str(folder)})
        log.info("%s shows this training as %s, in the project %s", self._tracker, title, project)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Show these values of `step`."""
        self._send({"step": step, "values": values, "tables": {}})

    def table(self, step: int, name: str, *, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Show a table of `step`: text as it is."""
        self._send({"step": step, "values": {}, "tables": {name: {"columns": columns, "rows": rows}}})

    def close(self, seconds: float) -> None:
        """Wait so many seconds at most until the tracker has everything, then end its process."""
        process = self._process
        if process is None:
            return
        deadline = time.monotonic() + seconds
        try:
            self._write_rest(deadline)
            if self._process is None:  # it has failed meanwhile
                return
            _pipe(process.stdin).close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            if process.returncode is None or self._waiting:
                self._warn(f"not done after {seconds:g} seconds, and ended: it may lack the last values")
            elif process.returncode:
                self._warn(self._report(process))
        finally:
            self._end()

    def _send(self, message: Mapping[str, Any]) -> None:
        """Let a message wait for the tracker, and pass on what it takes."""
        if self._process is None:
            return
        line = f"{json.dumps(message)}\n".encode()
        if len(self._waiting) + len(line) <= MOST_WAITING:
            self._waiting += line
        elif not self._has_left_out:
            self._has_left_out = True
            self._warn("does not keep up: the training does not wait for it, and it will lack some values")
        self._write()

    def _write(self) -> None:
        """Write what the pipe takes now, and see whether the tracker still runs."""
        process = self._process
        if process is None:
            return
        into = _pipe(process.stdin).fileno()
        with suppress(BlockingIOError, BrokenPipeError):  # full; or closed, which the process says by its end
            while self._waiting:
                written = os.write(into, self._waiting[: select.PIPE_BUF])
                del self._waiting[:written]
        if process.poll() is not None:
            self._warn(f"{self._report(process)}: the training goes on without it")
            self._end()

    def _write_rest(self, deadline: float) -> None:
        """Write what waits, until the deadline."""
        self._write()
        while self._process is not None and self._waiting and time.monotonic() < deadline:
            time.sleep(0.05)
            self._write()

    def _report(self, process: subprocess.Popen[bytes]) -> str:
        """What a process that has ended said of it."""
        said = b""
        with suppress(OSError):
            said = os.read(_pipe(process.stdout).fileno(), 4096)
        return printable(said.decode(errors="replace")) or f"it ended with status {process.returncode}"

    def _warn(self, what: str) -> None:
        log.warning("train.trackers: %s: %s", self._tracker, what)

    def _end(self) -> None:
        """End the process with all that it has started, if it still runs; nothing is sent from now on."""
        process = self._process
        self._process = None
        if process is None:
            return
        with suppress(ProcessLookupError, PermissionError):  # nothing of it is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        _pipe(process.stdin).close()
        _pipe(process.stdout).close()


@contextmanager
def open_sink(name: str, folder: Path, *, run_id: str, settings: Mapping[str, Setting]) -> Iterator[Sink]:
    """The sink of a tracker, closed at the end of the context: after an error it has less time."""
    sink = Sink(name, folder, run_id=run_id, settings=settings)
    seconds = AFTER_ERROR
    try:
        yield sink
        seconds = AT_END
    except PeerError:
        seconds = AFTER_LOSS
        raise
    finally:
        sink.close(seconds)


open_trackio = partial(open_sink, "trackio")
open_wandb = partial(open_sink, "wandb")


def _is_installed(package: str) -> bool:
    """Whether there is a package, not only a folder of this name, such as W&B makes where it is started."""
    found = find_spec(package)
    return found is not None and found.origin is not None


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    """A stream that a process was started with."""
    assert stream is not None
    return stream


def _as_name(text: str) -> str:
    """A name that trackers take, and that leads to no other folder."""
    return re.sub(r"[^\w.-]+", "-", text).lstrip(".")[:60] or "runs"
