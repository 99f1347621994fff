"""Under torchrun itself: its death, its restarts, and two of them that make one training of two nodes."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from support.corpora import (
    assert_same_end,
    is_verified,
    last_logged,
    overrides,
    step_dir,
    steps_of,
    tiny_job,
    wait_for,
    write_corpus,
)
from support.paths import ROOT
from transformer.config.jobs import TrainJob

pytestmark = pytest.mark.faults
STANDALONE = ["--standalone", "--nproc-per-node", "2"]


def torchrun(options: list[str], job: TrainJob) -> "subprocess.Popen[str]":
    """`torchrun OPTIONS -m transformer train ...`, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, "-m", "transformer", "train", *overrides(job)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ranks_of(launcher: "subprocess.Popen[str]") -> dict[int, int]:
    """The process of each rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text(encoding="utf-8").rpartition(") ")[2].split()[:2]
            variables = dict(
                entry.split("=", 1) for entry in (folder / "environ").read_text("utf-8").split("\0") if "=" in entry
            )
        except OSError:
            continue
        if int(parent) == launcher.pid and state != "Z" and "RANK" in variables:
            found[int(variables["RANK"])] = int(folder.name)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def endless(tmp_path: Path) -> TrainJob:
    data = write_corpus(tmp_path / "corpus")
    return tiny_job(tmp_path / "a", data, max_steps=100_000, save_every=100_000, validate_every=100_000)


def test_torchrun_that_is_killed_ends_its_ranks(tmp_path: Path) -> None:
    launcher = torchrun(STANDALONE, endless(tmp_path))
    wait_for(lambda: last_logged(tmp_path / "a") > 0)
    pids = ranks_of(launcher).values()
    assert len(pids) == 2

    launcher.kill()
    began = time.monotonic()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 20)
    print(f"\nboth ranks gone {time.monotonic() - began:.1f} s after their launcher")
    out, _ = launcher.communicate(timeout=120)
    (step,) = steps_of(tmp_path / "a")
    assert is_verified(step_dir(tmp_path / "a", step))
    assert out.count("torchrun has died: this rank stops\n") in (1, 2)  # the one that sees it first stops the other
    for rank in range(2):
        assert f"step {step} is saved; the same command goes on from there (rank {rank}: exit status 75)\n" in out


@pytest.mark.parametrize("victim", [0, 1])
def test_torchrun_restarts_a_training_whose_rank_was_killed(tmp_path: Path, victim: int) -> None:
    """It ends with the bits of a run that nobody disturbed."""
    data = write_corpus(tmp_path / "corpus")
    recipe: dict[str, Any] = {"max_steps": 400, "save_every": 20, "validate_every": 400}
    calm = torchrun(STANDALONE, tiny_job(tmp_path / "calm", data, **recipe))
    out, _ = calm.communicate(timeout=300)
    assert calm.returncode == 0, out

    launcher = torchrun(["--max-restarts", "2", *STANDALONE], tiny_job(tmp_path / "a", data, **recipe))
    wait_for(lambda: last_logged(tmp_path / "a") > 50)
    os.kill(ranks_of(launcher)[victim], signal.SIGKILL)
    out, _ = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, out
    assert f"rank {victim} does not answer: " in out
    assert f"(rank {1 - victim}: exit status 7)\n" in out
    assert_same_end(tmp_path / "calm", tmp_path / "a")


@pytest.mark.parametrize("ends", ["both finish", "one dies"])
def test_torchrun_of_two_nodes_is_one_training(tmp_path: Path, ends: str) -> None:
    """Two torchruns that meet at one address, as on two machines with a shared file system."""
    data = write_corpus(tmp_path / "corpus")
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "two"]
    options = ["--nnodes", "2", "--nproc-per-node", "1", *meeting]
    recipe: dict[str, Any] = {"max_steps": 30, "save_every": 10, "validate_every": 30}
    if ends == "one dies":
        recipe = dict.fromkeys(recipe, 100_000)
    job = tiny_job(tmp_path / "a", data, **recipe)
    nodes = [torchrun(options, job) for _ in range(2)]

    if ends == "both finish":
        outputs = [node.communicate(timeout=300)[0] for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0], outputs
        one = torchrun(STANDALONE, tiny_job(tmp_path / "one", data, **recipe))
        out, _ = one.communicate(timeout=300)
        assert one.returncode == 0, out
        assert_same_end(tmp_path / "one", tmp_path / "a")
        return

    wait_for(lambda: last_logged(tmp_path / "a") > 0)
    found = {rank: (node, pid) for node in nodes for rank, pid in ranks_of(node).items()}
    lost, pid = found[1]
    lost.kill()
    os.kill(pid, signal.SIGKILL)
    survivor, left = found[0]
    began = time.monotonic()
    wait_for(lambda: not Path(f"/proc/{left}").exists(), 60)
    print(f"\nthe rank of the other node ended {time.monotonic() - began:.1f} s later")
    survivor.send_signal(signal.SIGTERM)  # it would wait for another node to come
    out, _ = survivor.communicate(timeout=120)
    lost.communicate(timeout=120)
    assert "rank 1 does not answer: " in out
    assert "(rank 0: exit status 7)\n" in out
