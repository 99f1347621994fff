"""What runs in a job of submitit: `transformer train ...`, as a process of its own.

A job unpickles this module, and nothing else of the package: it has no use for torch.
"""

import signal
import subprocess
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

import submitit


@dataclass(frozen=True)
class CommandJob:
    """What submitit calls in a job: a command, as a process of its own, so that whatever ends it has an exit status."""

    arguments: tuple[str, ...]

    def __call__(self) -> int:
        """Run the command on this rank of the job; its exit status, negative for a signal that killed it.

        Before the time of a job is over, or when another takes its place, submitit's signal comes. The command then
        saves the step in progress, and submitit, whose handler is called after that, puts the job back into the queue.
        """
        environment = submitit.JobEnvironment()
        if environment.num_tasks > 1:
            ranks = submitit.helpers.TorchDistributedEnvironment()
            ranks.export(set_cuda_visible_devices=False, overwrite=True)
        command = subprocess.Popen([sys.executable, "-P", "-m", "transformer", *self.arguments])

        # Slurm tells the command, too: a second SIGUSR1 is nothing new to it, a second SIGTERM would be its end.
        warning = getattr(signal, f"SIG{environment.USR_SIG}")
        give_back = signal.getsignal(warning)
        received: list[int] = []

        def pass_on(number: int, frame: FrameType | None) -> None:
            received.append(number)
            command.send_signal(signal.SIGUSR1)

        for number in (signal.SIGTERM, warning):
            signal.signal(number, pass_on)
        status = command.wait()

        if status == 0 or not received:
            return status
        if warning in received and callable(give_back):
            try:
                give_back(warning, None)  # which leaves by SystemExit, on rank 0
            except submitit.core.utils.UncompletedJobError:  # it has been in the queue too often
                return status
        sys.exit(status)  # without a result, for this job may start again; what becomes of it, the cluster knows

    def checkpoint(self) -> Any:
        """What submitit runs once the job has left the queue again: the same command."""
        return submitit.helpers.DelayedSubmission(self)
