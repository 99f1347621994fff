"""Ranks that are killed or stopped at random moments, in numbers; `-s` shows the totals.

Every survivor ends by itself, with status 7 or with its work done. Every committed checkpoint
stays. Every run that is started again until it is finished ends as one that nobody disturbed: with its bits on two
ranks, and to rounding on more. There gloo adds up a gradient in the order in which it lies in DDP's buckets, which are
laid out anew after the first step of a process.
"""

import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support.corpora import (
    assert_same_end,
    is_verified,
    last_logged,
    run,
    step_dir,
    steps_of,
    tiny_job,
    wait_for,
    write_corpus,
)
from support.ranks import Ranks, ranks, start_commands
from transformer import distributed, liveness
from transformer.config.jobs import TrainJob
from transformer.config.settings import Precision
from transformer.distributed import Wait
from transformer.errors import PeerError

Note = Callable[[str, object], None]

STEPS = 40
TIMEOUT = 3.0  # of a stopped rank's peers


@dataclass
class Totals:
    """What became of the ranks that were left."""

    statuses: Counter[int] = field(default_factory=Counter)
    named: int = 0  # losses whose survivors all name the rank
    seconds: list[float] = field(default_factory=list)  # until they had ended, one for each loss
    runs: int = 0  # finished as one that nobody disturbed

    def __str__(self) -> str:
        ends = ", ".join(f"{count} x {status}" for status, count in sorted(self.statuses.items()))
        median = sorted(self.seconds)[len(self.seconds) // 2]
        return (
            f"{len(self.seconds)} losses, {self.named} named; survivors' statuses: {ends}; gone after {median:.1f} s "
            f"(median), {max(self.seconds):.1f} s (worst); {self.runs} runs the same"
        )

    def add(self, peers: Ranks, victim: int) -> None:
        """Wait for the others, and note how they ended."""
        began = time.monotonic()
        rest = [rank for rank in range(len(peers.processes)) if rank != victim]
        for rank in rest:
            peers.processes[rank].join(60)
        self.seconds.append(time.monotonic() - began)
        statuses = {rank: peers.processes[rank].exitcode for rank in rest}
        peers.kill()
        self.statuses.update(-1000 if status is None else status for status in statuses.values())
        lost = [rank for rank, status in statuses.items() if status != 0]
        self.named += all(f"rank {victim} does not answer: " in peers.said(rank) for rank in lost)
        assert all("Traceback" not in peers.said(rank) for rank in rest)


def job_of(folder: Path, name: str, steps: int = STEPS, precision: Precision = Precision.fp32) -> TrainJob:
    recipe: dict[str, Any] = {
        "max_steps": steps,
        "max_tokens": 100,
        "save_every": 4,
        "validate_every": 20,
        "precision": precision,
    }
    return tiny_job(folder / name, write_corpus(folder / "corpus"), **recipe)


def saved(run_dir: Path) -> int:
    """The last step that the log says is saved."""
    log = run_dir / "train.log"
    text = log.read_text(encoding="utf-8") if log.exists() else ""
    return max(map(int, re.findall(r"step (\d+): saved\n", text)), default=0)


@pytest.mark.faults
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("size", "kills"), [(2, 60), (4, 15)])
def test_train_ends_every_rank_when_one_is_killed(
    tmp_path: Path, size: int, kills: int, capsys: pytest.CaptureFixture[str], record_property: Note
) -> None:
    """At a random time from the start of the ranks to the scores of the test sets."""
    run(job_of(tmp_path, "first", steps=1))  # what torch imports late is there when ranks fork
    precision = Precision.fp32 if size == 2 else Precision.fp64
    job = job_of(tmp_path, "killed", precision=precision)
    calm, run_dir = tmp_path / "calm", tmp_path / "killed"
    began = time.monotonic()
    assert ranks(size, lambda: run(job_of(tmp_path, "calm", precision=precision)), tmp_path) == [0] * size
    length = min(time.monotonic() - began, 10.0)  # on a busy machine, too, most kills meet a run early or midway

    def meet_soon() -> None:
        liveness.MEETING_SECONDS = TIMEOUT

    draw = random.Random(size)
    totals = Totals()
    while len(totals.seconds) < kills:
        peers = start_commands(size, job, tmp_path, meet_soon)
        victim = draw.randrange(size)
        peers.processes[victim].join(draw.uniform(0.0, length))
        known = saved(run_dir)
        if peers.processes[victim].exitcode is None:
            os.kill(peers.pid(victim), signal.SIGKILL)
            totals.add(peers, victim)
            verified = [step for step in steps_of(run_dir) if is_verified(step_dir(run_dir, step))]
            assert max(verified, default=0) >= known, "a committed checkpoint is lost"
        else:
            assert peers.wait() == [0] * size
            totals.runs += finished(run_dir, calm, is_exact=size == 2)
    assert start_commands(size, job, tmp_path).wait() == [0] * size
    totals.runs += finished(run_dir, calm, is_exact=size == 2)

    with capsys.disabled():
        print(f"\n{size} ranks, killed: {totals}; {time.monotonic() - began:.0f} s in all")
    record_property("ranks killed", len(totals.seconds))
    for status, count in totals.statuses.items():
        record_property(f"survivors of killed ranks that ended with {status}", count)
    assert set(totals.statuses) <= {0, PeerError.exit_status}


def finished(run_dir: Path, calm: Path, *, is_exact: bool) -> bool:
    """Whether the run ended as the calm one, and nothing is left behind; it is removed, for a new one."""
    if is_exact:
        assert_same_end(run_dir, calm)
    else:
        ends = [load_file(step_dir(run, STEPS) / "model.safetensors") for run in (run_dir, calm)]
        torch.testing.assert_close(*ends, rtol=0.0, atol=1e-9)
    assert not [path for path in run_dir.rglob(".*") if path.name != ".lock"], "leftovers"
    shutil.rmtree(run_dir)
    return True


@pytest.mark.faults
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("size", "stops"), [(2, 10), (4, 4)])
def test_train_ends_every_rank_when_one_is_stopped(
    tmp_path: Path, size: int, stops: int, capsys: pytest.CaptureFixture[str], record_property: Note
) -> None:
    """At a random time of the steps: what a machine that hangs looks like."""
    run(job_of(tmp_path, "first", steps=1))
    draw = random.Random(size)
    totals = Totals()

    def be_impatient() -> None:
        for wait in (Wait.step, Wait.task):
            distributed.TIMEOUTS[wait] = timedelta(seconds=TIMEOUT)

    for number in range(stops):
        peers = start_commands(size, job_of(tmp_path, f"stopped-{number}", steps=100_000), tmp_path, be_impatient)
        wait_for(lambda number=number: last_logged(tmp_path / f"stopped-{number}") > 0)  # type: ignore[misc]
        time.sleep(draw.uniform(0.0, 0.5))
        victim = draw.randrange(size)
        os.kill(peers.pid(victim), signal.SIGSTOP)
        totals.add(peers, victim)

    with capsys.disabled():
        print(f"\n{size} ranks, stopped, with a timeout of {TIMEOUT:g} s: {totals}")
    record_property("ranks stopped", len(totals.seconds))
    assert set(totals.statuses) == {PeerError.exit_status}
