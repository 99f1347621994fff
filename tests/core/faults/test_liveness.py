"""The end of a rank that has lost another one, or its launcher: what it says, its exit status, and how soon it is."""

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.corpora import is_verified, last_logged, run, step_dir, steps_of, tiny_job, wait_for, write_corpus
from support.interventions import before_each_update
from support.paths import ROOT
from support.ranks import Ranks, ranks, start_commands, start_ranks
from support.tiers import tiers
from transformer import distributed, liveness
from transformer.config.jobs import TrainJob
from transformer.config.settings import DataConfig
from transformer.distributed import Wait, join_world
from transformer.errors import InputError, PeerError, Stopped
from transformer.training.step import Objective

LONG = 120.0  # seconds in which nothing of a training is left that has lost a rank: 5 on a machine of one's own


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    folder = tmp_path_factory.mktemp("corpus")
    data = write_corpus(folder)
    run(tiny_job(folder / "first", data, max_steps=1, average=1))  # what torch imports late is there when ranks fork
    return data


def endless(run_dir: Path, corpus: DataConfig) -> TrainJob:
    """A training that only its loss of a rank ends."""
    return tiny_job(run_dir, corpus, max_steps=100_000, save_every=100_000, validate_every=100_000)


def with_timeout(seconds: float) -> None:
    """How long this process waits for a peer that hangs."""
    for wait in (Wait.step, Wait.task):
        distributed.TIMEOUTS[wait] = timedelta(seconds=seconds)


def ended(peers: Ranks, but: int) -> tuple[set[int], str]:
    """The exit statuses of all ranks but one, which end by themselves, and the last line of the first of them."""
    rest = [rank for rank in range(len(peers.processes)) if rank != but]
    for rank in rest:
        peers.processes[rank].join(LONG)
    statuses = {peers.processes[rank].exitcode for rank in rest}
    peers.kill()
    line = peers.said(rest[0]).rstrip("\n").rpartition("\n")[2]
    assert all("Traceback" not in peers.said(rank) for rank in rest)
    return {-1000 if status is None else status for status in statuses}, line


@pytest.mark.parametrize(("size", "victim"), [(2, 1), (2, 0), pytest.param(3, 2, marks=pytest.mark.faults)])
def test_describe_loss_names_the_rank_that_was_killed(
    tmp_path: Path, corpus: DataConfig, size: int, victim: int
) -> None:
    """Rank 0 has the store in which the others look for word: without it, it is rank 0 that has gone."""
    peers = start_commands(size, endless(tmp_path / "a", corpus), tmp_path)
    wait_for(lambda: last_logged(tmp_path / "a") > 0)
    os.kill(peers.pid(victim), signal.SIGKILL)
    statuses, line = ended(peers, victim)
    assert statuses == {PeerError.exit_status}
    assert line.startswith(f"transformer: error: rank {victim} does not answer: ")
    assert line.endswith(f"(rank {1 if victim == 0 else 0}: exit status 7)")


@pytest.mark.ci
@pytest.mark.parametrize("victim", tiers([1], [0]))
def test_describe_loss_names_the_rank_that_was_stopped(tmp_path: Path, corpus: DataConfig, victim: int) -> None:
    peers = start_commands(2, endless(tmp_path / "a", corpus), tmp_path, lambda: with_timeout(8.0))
    wait_for(lambda: last_logged(tmp_path / "a") > 0)
    os.kill(peers.pid(victim), signal.SIGSTOP)
    statuses, line = ended(peers, victim)
    assert statuses == {PeerError.exit_status}
    assert line.startswith(f"transformer: error: rank {victim} does not answer: ")


def test_report_failure_gives_the_others_the_reason(tmp_path: Path, corpus: DataConfig) -> None:
    """A rank that fails by itself keeps its own status; the others end with 7, and with its words."""

    def fail() -> None:
        if os.environ["RANK"] == "1":
            raise InputError("corpus.de, line 3: no text")

    def before() -> None:
        before_each_update(fail)

    peers = start_commands(3, endless(tmp_path / "a", corpus), tmp_path, before)
    assert peers.wait(30) == [7, 2, 7]
    words = "corpus.de, line 3: no text"
    assert f"transformer: error: {words} (rank 1: exit status 2)\n" in peers.said(1)
    for rank in (0, 2):
        assert f"transformer: error: rank 1 failed: {words} (rank {rank}: exit status 7)\n" in peers.said(rank)


@pytest.mark.faults
def test_watch_ends_a_rank_that_something_holds(tmp_path: Path) -> None:
    """Rank 0 does not come to notice that rank 1 has died; its thread learns of it from rank 2, and ends it."""

    def action() -> None:
        with join_world(torch.device("cpu")) as world:
            assert not world.any(False)
            if world.rank == 0:
                time.sleep(2 * LONG)
            if world.rank == 1:
                os._exit(9)
            world.any(False)

    assert ranks(3, action, tmp_path) == [7, 9, 7], "rank 0 sleeps for longer"
    words = (tmp_path / "rank-2").read_text(encoding="utf-8")
    assert words.startswith("PeerError: rank 1 does not answer: "), "rank 0 lives, and only waits"


@pytest.mark.faults
def test_keeping_status_ignores_the_launcher_s_sigterm(tmp_path: Path, corpus: DataConfig) -> None:
    """torchrun sends it to the ranks that are left, while they are about to end."""

    def before() -> None:
        real = liveness.Watch.describe_loss

        def describe(watch: liveness.Watch, symptom: str) -> str:
            os.kill(os.getpid(), signal.SIGTERM)
            return real(watch, symptom)

        pytest.MonkeyPatch().setattr(liveness.Watch, "describe_loss", describe)

    peers = start_commands(2, endless(tmp_path / "a", corpus), tmp_path, before)
    wait_for(lambda: last_logged(tmp_path / "a") > 0)
    os.kill(peers.pid(1), signal.SIGKILL)
    assert peers.wait(30) == [7, -9]


def launch(run_dir: Path, corpus: DataConfig, folder: Path, pids: "multiprocessing.Queue[int]") -> None:
    """What torchrun does: start two ranks, and wait for them."""
    os.environ["TORCHELASTIC_RUN_ID"] = "test"
    peers = start_commands(2, endless(run_dir, corpus), folder)
    for rank in range(2):
        pids.put(peers.pid(rank))
    peers.wait()


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it has not only not been waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def test_ending_with_launcher_saves_and_ends(tmp_path: Path, corpus: DataConfig) -> None:
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[int] = context.Queue()
    launcher = context.Process(target=launch, args=(tmp_path / "a", corpus, tmp_path, queue))
    launcher.start()
    pids = [queue.get(timeout=60) for _ in range(2)]
    wait_for(lambda: last_logged(tmp_path / "a") > 0)

    launcher.kill()
    launcher.join()
    try:
        wait_for(lambda: not any(is_running(pid) for pid in pids), LONG)
    finally:
        for pid in filter(is_running, pids):
            os.kill(pid, signal.SIGKILL)
    (step,) = steps_of(tmp_path / "a")
    assert is_verified(step_dir(tmp_path / "a", step))
    said = [(tmp_path / f"rank-{rank}").read_text(encoding="utf-8") for rank in range(2)]
    for rank in range(2):
        assert f"(rank {rank}: exit status 75)\n" in said[rank]
    assert any("torchrun has died: this rank stops\n" in text for text in said), "it may tell the other one first"


def test_ending_with_launcher_watches_nothing_without_torchrun() -> None:
    """A shell that starts a training in the background may go."""
    before = threading.enumerate()
    with join_world(torch.device("cpu")):
        assert threading.enumerate() == before


@pytest.mark.parametrize(
    "number", tiers([signal.SIGTERM], [signal.SIGINT, signal.SIGHUP, signal.SIGUSR1], pytest.mark.ci)
)
def test_train_stops_every_rank_at_a_signal_to_one(tmp_path: Path, corpus: DataConfig, number: signal.Signals) -> None:
    peers = start_commands(2, endless(tmp_path / "a", corpus), tmp_path)
    wait_for(lambda: last_logged(tmp_path / "a") > 0)
    os.kill(peers.pid(1), number)
    assert peers.wait(30) == [75, 75]
    (step,) = steps_of(tmp_path / "a")
    assert is_verified(step_dir(tmp_path / "a", step))
    assert f"step {step} is saved; the same command goes on from there (rank 1: exit status 75)" in peers.said(1)


@pytest.mark.faults
def test_dev_loss_is_interrupted_on_every_rank(tmp_path: Path, corpus: DataConfig) -> None:
    """The signal comes to rank 1 while it measures the dev loss; the validation is made up for when the run resumes."""
    job = tiny_job(tmp_path / "a", corpus, max_steps=4, save_every=2, validate_every=2, max_tokens=100, average=1)

    def before() -> None:
        real = Objective.evaluate

        def evaluate(objective: Objective, batch: Any) -> Any:
            if os.environ["RANK"] == "1":
                signal.raise_signal(signal.SIGUSR1)
            return real(objective, batch)

        pytest.MonkeyPatch().setattr(Objective, "evaluate", evaluate)  # in this process, which ends with the test

    peers = start_commands(2, job, tmp_path, before)
    assert peers.wait(30) == [75, 75]
    assert steps_of(tmp_path / "a") == [2]
    assert "dev loss" not in peers.said(0)
    run(job)
    assert "step 2: dev loss" in (tmp_path / "a" / "train.log").read_text(encoding="utf-8")


@pytest.mark.faults
def test_join_world_lets_a_rank_that_is_slow_to_stop_keep_its_status(tmp_path: Path) -> None:
    """All ranks know of a stop: nobody is lost, however long one of them takes to close its files."""

    def action() -> None:
        with join_world(torch.device("cpu")) as world:
            assert not world.any(False)
            try:
                raise Stopped("stopped at step 1")
            finally:
                time.sleep(liveness.LEAVE_SECONDS + 2.0 if world.rank == 1 else 0.0)

    assert ranks(2, action, tmp_path) == [Stopped.exit_status, Stopped.exit_status]


TRAININGS = """
import torch
from transformer.distributed import join_world
from transformer.errors import InputError

for number in range(4):
    try:
        with join_world(torch.device("cpu")) as world:
            assert float(world.sum(torch.ones(1))) == 2.0
            if number == 1:
                raise InputError("a row that fails on every rank")
    except InputError:
        pass
print("done", world.rank, flush=True)
"""


@pytest.mark.faults
def test_join_world_again_in_one_process_of_torchrun(tmp_path: Path) -> None:
    """Its store outlives a training, and what a training leaves in it means nothing to the next one."""
    script = tmp_path / "trainings.py"
    script.write_text(TRAININGS, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2


def test_meeting_in_time_says_that_it_waits_for_a_rank_that_died_before(tmp_path: Path) -> None:
    """Rank 1 is gone before rank 0 has heard of it, and no launcher is there to notice."""

    def action() -> None:
        if os.environ["RANK"] == "1":
            os._exit(9)
        liveness.NOTICE_SECONDS, liveness.MEETING_SECONDS = 0.5, 2.0
        logging.getLogger("transformer").addHandler(logging.StreamHandler(sys.stdout))
        with join_world(torch.device("cpu")):
            pass

    assert ranks(2, action, tmp_path) == [PeerError.exit_status, 9]
    waits, gives_up = (tmp_path / "rank-0").read_text(encoding="utf-8").splitlines()
    assert waits == (
        "rank 0 of 2 is still waiting for the others, and gives up after 2 seconds: check whether one died or was "
        "never started"
    )
    assert gives_up.startswith("the ranks have not found each other in 2 seconds: ")


@pytest.mark.faults
def test_meeting_in_time_ends_the_ranks_that_wait_for_one_that_died(tmp_path: Path) -> None:
    """Rank 1 dies between two of the groups that it makes with the others."""

    def action() -> None:
        liveness.MEETING_SECONDS = 3.0
        real = dist.new_group
        made: list[int] = []

        def new_group(*arguments: Any, **options: Any) -> Any:
            made.append(1)
            if os.environ["RANK"] == "1" and len(made) == 3:
                os._exit(9)
            return real(*arguments, **options)

        pytest.MonkeyPatch().setattr(dist, "new_group", new_group)
        with join_world(torch.device("cpu")):
            pass

    peers = start_ranks(3, action, tmp_path)
    assert peers.wait(30) == [PeerError.exit_status, 9, PeerError.exit_status]
