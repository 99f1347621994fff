"""What may end a run before its time: a signal, or numbers that are not finite."""

import logging
import os
import shlex
import signal
import threading
from pathlib import Path
from types import FrameType, TracebackType

from transformer.checkpoint import newest_finite
from transformer.errors import NumericalError, Stopped
from transformer.records import SPIKE, Progress

log = logging.getLogger(__name__)

ENDS_AT_SECOND = (signal.SIGTERM, signal.SIGINT)  # a second one of these ends the process at once
NEVER_ENDS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # a terminal that closes, and schedulers, may send two
LONGEST_STREAK = 10  # consecutive updates whose gradient is not finite: the run ends, unless a smaller scale may help
REMEDY = "in another run_dir, lower train.learning_rate, set train.clip_norm, or use train.precision=fp32"


class Interrupted(Exception):
    """A validation was cut short by a signal; it is due again when the run resumes."""


class Signals:
    """SIGTERM, SIGINT and the signals of NEVER_ENDS ask for a stop at the end of the step (several ranks: the next).

    A context manager, with handlers of its own inside the block. A second SIGTERM or SIGINT ends the process at once. A
    SIGHUP that is ignored, as under `nohup`, stays ignored, and a handler that Python did not install stays, because
    Python could not put it back. Outside the main thread, where Python allows no handlers, nothing is changed.
    """

    def __init__(self) -> None:
        self.requested = False
        self._ends_at_once = False
        self._previous: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is not threading.main_thread():
            return self

        for number in (*ENDS_AT_SECOND, *NEVER_ENDS):
            previous = signal.getsignal(number)
            is_ignored_hangup = number == signal.SIGHUP and previous == signal.SIG_IGN
            if previous is not None and not is_ignored_hangup:
                self._previous[number] = previous
                signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise Interrupted if a signal has come."""
        if self.requested:
            raise Interrupted

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number in ENDS_AT_SECOND:
            if self._ends_at_once:
                os._exit(128 + number)
            self._ends_at_once = True
        self.requested = True


def stopped(step: int) -> Stopped:
    """The error that ends a run after `step`, which is committed."""
    done = f"step {step} is saved" if step else "before the first step"
    return Stopped(f"stopped by a signal, {done}; the same command goes on from there")


class NumbersGuard:
    """Reports skipped updates and spikes of the gradient's norm, and ends the run after too many skipped in a row."""

    def __init__(self, progress: Progress) -> None:
        self._skipped = progress.skipped
        self._longest = progress.longest_streak
        self._spikes = progress.spikes

    def check(self, progress: Progress, *, loss_scale: float | None) -> None:
        """Log what is new since the last call. Raises NumericalError after LONGEST_STREAK skipped updates in a row.

        Under fp16 each of them halves the scale of the loss: a run goes on until a scale of 1 has failed, too.
        `loss_scale` is that of the next update; None: the loss is not scaled.
        """
        self._report_spikes(progress)
        new = progress.skipped - self._skipped
        if new == 0:
            return

        # A streak that is the longest so far may have ended since the last call; another one counts if it still lasts.
        is_new_longest = progress.longest_streak > self._longest
        streak = progress.longest_streak if is_new_longest else progress.streak
        self._skipped = progress.skipped
        self._longest = progress.longest_streak

        scaled = "" if loss_scale is None else f"; the loss scale is now {loss_scale:g}"
        log.warning(
            "up to step %d: %d updates skipped since the last report, because the gradient was not finite "
            "(%d in all, the first at step %d, at most %d in a row)%s",
            progress.step,
            new,
            progress.skipped,
            progress.first_skipped,
            progress.longest_streak,
            scaled,
        )

        if streak >= LONGEST_STREAK and (loss_scale is None or loss_scale < 1.0):
            raise NumericalError(
                f"{streak} consecutive updates had a gradient that is not finite, up to step {progress.step}"
            )

    def _report_spikes(self, progress: Progress) -> None:
        new = progress.spikes - self._spikes
        self._spikes = progress.spikes
        if new:
            log.warning(
                "up to step %d: %d updates since the last report had a gradient whose norm was more than %g times the "
                "recent mean, now %.3g (%d in all, the last at step %d)",
                progress.step,
                new,
                SPIKE,
                progress.usual_norm,
                progress.spikes,
                progress.last_spike,
            )


def advice(run_dir: Path) -> str:
    """What to do after a NumericalError in this run: where finite weights are, how to find the cause, what may help."""
    checkpoint = newest_finite(run_dir)
    place = "no checkpoint holds finite weights" if checkpoint is None else f"finite weights are in {checkpoint.path}"
    return (
        f"{place}; `transformer replay {shlex.quote(f'run_dir={run_dir}')}` names the module where it begins; {REMEDY}"
    )
