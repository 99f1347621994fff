"""What may end a run before its time: a signal, or numbers that are not finite."""

import logging
import os
import signal
from types import FrameType, TracebackType

from transformer.errors import NumericalError, Stopped

log = logging.getLogger(__name__)

LONGEST_STREAK = 10  # updates in a row whose gradient is not finite, and no smaller loss scale may help


class Interrupted(Exception):
    """A validation was cut short by a signal; it is due again when the run resumes."""


class Signals:
    """SIGTERM and SIGINT ask the loop to stop at the end of its step; a second one ends the process at once."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> "Signals":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._receive)
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
        if self.requested:
            os._exit(128 + number)
        self.requested = True


def stopped(step: int) -> Stopped:
    """The error that ends a run after `step`, which is committed."""
    done = f"step {step} is saved" if step else "before the first step"
    return Stopped(f"stopped by a signal, {done}; the same command goes on from there")


def check_streak(streak: int, step: int, *, loss_scale: float) -> None:
    """Log an update that was skipped, and give up after too many. Raises NumericalError.

    Under fp16 each one halves the scale of the loss: a run is not given up while that is above 1.
    """
    scaled = f" at a loss scale of {loss_scale:g}" if loss_scale != 1.0 else ""
    log.warning("step %d: the gradient is not finite%s; the update is skipped (%d in a row)", step, scaled, streak)
    if streak >= LONGEST_STREAK and loss_scale <= 1.0:
        raise NumericalError(
            f"{streak} updates in a row had a gradient that is not finite, up to step {step}; the last checkpoint is "
            "sound: in another run_dir, lower train.learning_rate, set train.clip_norm, or use train.precision=fp32"
        )
