"""Twenty kills of the public command on the demo's settings: nothing committed is lost, the end is bit-identical."""

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.corpora import (
    assert_same_end,
    finish,
    is_verified,
    last_logged,
    metrics_of,
    start,
    step_dir,
    steps_of,
    wait_for,
)
from support.fault_runs import saved
from support.paths import ROOT

STEPS = 80
KILLS = {"start": 2, "step": 10, "save": 6, "load": 1, "decode": 1}


def copy_demo(folder: Path) -> Path:
    """All of the demo's training pairs; of the others enough to be translated, and few enough to come to an end."""
    shutil.copytree(ROOT / "data" / "demo", folder / "demo")
    for path in (folder / "demo").iterdir():
        if not path.name.startswith("train."):
            path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:40]))
    return folder


def count(run_dir: Path, words: str) -> int:
    """How often the log says so."""
    log = run_dir / "train.log"
    return log.read_text(encoding="utf-8").count(words) if log.exists() else 0


def being_written(run_dir: Path, pid: int) -> bool:
    """Whether this process has begun a checkpoint that it has not committed."""
    return any(run_dir.glob(f"checkpoints/.tmp-*-{pid}-*"))


@pytest.mark.faults
@pytest.mark.timeout(3600)
def test_train_of_the_demo_loses_nothing_by_twenty_kills(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Two in start-up, ten uniform over the steps, six while a checkpoint is written, two after the last step."""
    command = ["train", f"data.root={copy_demo(tmp_path)}", f"train.max_steps={STEPS}", "train.log_every=1"]
    command += ["train.save_every=5", "train.validate_every=40", "train.threads=2"]
    calm, run_dir = tmp_path / "runs" / "calm", tmp_path / "runs" / "killed"
    finish(start(*command, f"run_dir={calm}", cwd=tmp_path), 0, 1800)
    draw = random.Random(50)
    plan = [(draw.randrange(1, STEPS - 10), kind) for kind in ("step", "save") for _ in range(KILLS[kind])]
    plan = [(0, "start")] * KILLS["start"] + sorted(plan) + [(STEPS, "load"), (STEPS, "decode")]
    seen = known = in_save = 0
    for moment, kind in plan:
        before = [count(run_dir, words) for words in ("parameters; ", "averaged ")]
        process = start(
            *command, f"run_dir={run_dir}", cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        goal = min(max(moment, seen + 1), STEPS)
        match kind:
            case "start":
                time.sleep(draw.uniform(0.1, 5))
            case "step":
                wait_for(lambda goal=goal: last_logged(run_dir) >= goal, 300)  # type: ignore[misc]
                time.sleep(draw.uniform(0, 0.3))
            case "save":
                pid = process.pid
                wait_for(lambda goal=goal: last_logged(run_dir) >= goal, 300)  # type: ignore[misc]
                wait_for(lambda pid=pid: being_written(run_dir, pid), 300)  # type: ignore[misc]
                time.sleep(draw.uniform(0, 0.02))
            case "load":
                wait_for(lambda before=before: count(run_dir, "parameters; ") > before[0], 300)  # type: ignore[misc]
                time.sleep(draw.uniform(0, 0.05))
            case "decode":
                wait_for(lambda before=before: count(run_dir, "averaged ") > before[1], 300)  # type: ignore[misc]
                time.sleep(draw.uniform(0, 0.1))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert process.returncode == -signal.SIGKILL, f"{kind} {moment}: it had ended"
        in_save += being_written(run_dir, process.pid)
        known, seen = max(known, saved(run_dir)), last_logged(run_dir)
        verified = [step for step in steps_of(run_dir) if is_verified(step_dir(run_dir, step))]
        assert max(verified, default=0) >= known, f"{kind} {moment}: a committed checkpoint is lost"
    assert known == STEPS
    assert in_save >= 4, "too few kills met a checkpoint half written"
    finish(start(*command, f"run_dir={run_dir}", cwd=tmp_path), 0, 1200)
    assert_same_end(run_dir, calm)
    assert steps_of(run_dir) == steps_of(calm)
    assert [row["step"] for row in metrics_of(run_dir) if "train/loss" in row] == list(range(1, STEPS + 1))
    assert not [path for path in run_dir.rglob(".*") if path.name != ".lock"], "leftovers"
    record_property("kills of the public command", len(plan))
    record_property("runs that ended bit-identical", 1)
