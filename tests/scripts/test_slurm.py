"""scripts/slurm/train.sbatch, run by bash, with programs of ours in the place of Slurm's."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.corpora import (
    is_verified,
    last_logged,
    overrides,
    results_of,
    step_dir,
    steps_of,
    tiny_job,
    wait_for,
    write_corpus,
)
from support.paths import ROOT

SCRIPT = ROOT / "scripts" / "slurm" / "train.sbatch"
TASKS = 2

# Starts the tasks, passes SIGUSR1 on to them as srun does, and returns the highest of their exit statuses.
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys
STEP = {{
    "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "{TASKS}", "SLURM_STEP_TASKS_PER_NODE": "{TASKS}",
    "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NODEID": "0",
}}
words = sys.argv[1:]
while words[0].startswith("--"):
    words.pop(0)
tasks = []
signal.signal(signal.SIGUSR1, lambda *_: [task.send_signal(signal.SIGUSR1) for task in tasks])  # before any is ready
for n in range({TASKS}):
    environment = {{**os.environ, "SLURM_PROCID": str(n), "SLURM_LOCALID": str(n), **STEP}}
    tasks.append(subprocess.Popen(words, env=environment))
statuses = [task.wait() for task in tasks]
sys.exit(max(128 - status if status < 0 else status for status in statuses))
"""

# The ranks, where only their end matters: they wait for the warning, or do not.
PYTHON = """#!/bin/bash
echo "$SLURM_PROCID of $SLURM_STEP_NUM_TASKS: $*" >> "$NOTES/ranks"
if [ "$WAITS" = yes ]; then
  trap 'exit "$ENDS"' USR1
  touch "$NOTES/ready-$SLURM_PROCID"
  for _ in {1..600}; do sleep 0.05; done
fi
exit "$ENDS"
"""

SCONTROL = """#!/bin/bash
echo "$*" >> "$NOTES/scontrol"
"""


def submit(folder: Path, *arguments: str, programs: dict[str, str], **environment: str) -> "subprocess.Popen[str]":
    """What Slurm does with the script, on one machine."""
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, **programs}.items():
        (commands / name).write_text(text, encoding="utf-8")
        (commands / name).chmod(0o755)
    slurm = {"JOB_ID": "4711", "NTASKS": str(TASKS)}
    return subprocess.Popen(
        ["bash", str(SCRIPT), *arguments],
        cwd=folder,
        env={
            **os.environ,
            **{f"SLURM_{name}": value for name, value in slurm.items()},
            "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "NOTES": str(folder),
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def requeued(folder: Path) -> list[str]:
    notes = folder / "scontrol"
    return notes.read_text(encoding="utf-8").splitlines() if notes.exists() else []


@pytest.mark.parametrize(
    ("waits", "ends", "expected"),
    [
        (True, 75, ["requeue 4711"]),  # warned, and saved
        (True, 0, []),  # warned, and done in time
        (True, 5, []),  # warned, but the disk was full: another start would not help
        (False, 75, []),  # cancelled by its owner: the ranks got SIGTERM, this script nothing
        (False, 7, []),
    ],
)
def test_sbatch_goes_back_into_the_queue_after_the_warning_alone(
    tmp_path: Path, waits: bool, ends: int, expected: list[str]
) -> None:
    job = submit(tmp_path, "run_dir=a b", programs={"python": PYTHON}, WAITS="yes" if waits else "no", ENDS=str(ends))
    if waits:
        wait_for(lambda: all((tmp_path / f"ready-{n}").exists() for n in range(TASKS)))
        job.send_signal(signal.SIGUSR1)
    out, _ = job.communicate(timeout=60)
    assert job.returncode == ends, out
    assert requeued(tmp_path) == expected
    started = sorted((tmp_path / "ranks").read_text(encoding="utf-8").splitlines())
    assert started == [f"{n} of 2: -m transformer train run_dir=a b" for n in range(TASKS)]


@pytest.mark.faults
def test_sbatch_trains_is_warned_and_goes_on(tmp_path: Path) -> None:
    data = write_corpus(tmp_path / "corpus")
    job = tiny_job(tmp_path / "a", data, max_steps=4000, save_every=4000, validate_every=4000)
    first = submit(tmp_path, *overrides(job), programs={})
    wait_for(lambda: last_logged(tmp_path / "a") > 0)
    first.send_signal(signal.SIGUSR1)
    out, _ = first.communicate(timeout=120)
    assert first.returncode == 75, out
    assert requeued(tmp_path) == ["requeue 4711"]
    (step,) = steps_of(tmp_path / "a")
    assert is_verified(step_dir(tmp_path / "a", step))

    second = submit(tmp_path, *overrides(job), f"train.max_steps={step + 3}", programs={})
    out, _ = second.communicate(timeout=120)
    assert second.returncode == 0, out
    assert requeued(tmp_path) == ["requeue 4711"]
    assert results_of(tmp_path / "a")["steps"] == step + 3
