"""Ranks forked from the test's own process: a tenth of a second each, where a launcher's take seconds."""

import contextlib
import logging
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest
import torch

from transformer.cli import commands, main
from transformer.config.jobs import TrainJob
from transformer.errors import TransformerError

Action = Callable[[], object]
STILL_RUNNING = -1000


@dataclass(frozen=True)
class Ranks:
    """Processes of one training that have been started; what rank n prints goes to the file `rank-n`."""

    processes: Sequence[ForkProcess]
    folder: Path

    def pid(self, rank: int) -> int:
        """The process of a rank."""
        pid = self.processes[rank].pid
        assert pid is not None
        return pid

    def wait(self, seconds: float = 120.0) -> list[int]:
        """Their exit statuses once all have ended, or after so long: below zero by a signal, or STILL_RUNNING."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [STILL_RUNNING if process.exitcode is None else process.exitcode for process in self.processes]

    def kill(self) -> None:
        """End what still runs, stopped or not."""
        for process in self.processes:
            process.kill()
            process.join()

    def said(self, rank: int) -> str:
        """What a rank printed, on either stream."""
        return (self.folder / f"rank-{rank}").read_text(encoding="utf-8")


def start_ranks(size: int, action: Action, folder: Path) -> Ranks:
    """Start `action` on so many ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    fork = multiprocessing.get_context("fork")
    processes = [
        fork.Process(target=_rank, args=(action, common | {"RANK": str(n), "LOCAL_RANK": str(n)}, folder / f"rank-{n}"))
        for n in range(size)
    ]
    for process in processes:
        process.start()
    return Ranks(processes, folder)


def ranks(size: int, action: Action, folder: Path) -> list[int]:
    """Run `action` on so many ranks; their exit statuses."""
    return start_ranks(size, action, folder).wait()


def _rank(action: Action, environment: dict[str, str], output: Path) -> None:
    os.environ |= environment
    torch.set_num_threads(1)
    status = 0
    with output.open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        try:
            action()
        except TransformerError as error:
            file.write(f"{type(error).__name__}: {error}\n")
            status = error.exit_status
        except BaseException:
            file.write(traceback.format_exc())
            status = 1
    os._exit(status)


def start_commands(size: int, job: TrainJob, folder: Path, before: Action = lambda: None) -> Ranks:
    """Start `transformer train` on so many ranks, but for Hydra: with its signals, its error line, its exit status.

    `before` is called first in each of them, to change what this process is to do.
    """

    def run(name: str, _: list[str]) -> None:
        commands.run_command(name, job)

    def enter() -> None:
        os.dup2(sys.stdout.fileno(), 2)
        sys.stderr = sys.stdout
        logging.getLogger().handlers.clear()  # those of the test
        sys.argv = ["transformer", "train"]
        before()
        pytest.MonkeyPatch().setattr(main, "_enter", run)
        try:
            main.main()
        except SystemExit as ended:
            sys.stdout.flush()
            os._exit(ended.code if isinstance(ended.code, int) else 0)

    return start_ranks(size, enter, folder)
