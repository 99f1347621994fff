"""A training that is killed, or whose disk fails, at one chosen moment, and the judgement whether it recovered.

Children are forked from a process that has trained before, so that a trial takes as long as its training and no more.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.corpora import (
    Ended,
    assert_same_end,
    begin_in_a_child,
    ended,
    in_a_child,
    is_verified,
    last_logged,
    metrics_of,
    step_dir,
    steps_of,
    tiny_job,
    wait_for,
    write_corpus,
)
from support.paths import ROOT, TESTS
from transformer.config.jobs import TrainJob
from transformer.config.settings import DataConfig

# ---- whether it recovered -------------------------------------------------------------------------------------------


def saved(run_dir: Path) -> int:
    """The last step that the log says is saved: from then on it must never be lost."""
    log = run_dir / "train.log"
    text = log.read_text(encoding="utf-8") if log.exists() else ""
    return max(map(int, re.findall(r"step (\d+): saved\n", text)), default=0)


def assert_nothing_lost(run_dir: Path) -> None:
    """A checkpoint of the last step that was reported as saved, or of a later one, is there and verifies."""
    verified = [step for step in steps_of(run_dir) if is_verified(step_dir(run_dir, step))]
    assert max(verified, default=0) >= saved(run_dir), "a committed checkpoint is lost"


def leftovers(folder: Path) -> list[Path]:
    """What an interrupted command left unfinished, anywhere below."""
    return [path for path in folder.rglob(".*") if path.name.startswith((".tmp-", ".del-", ".old-", ".bad-"))]


def assert_recovered(run_dir: Path, calm: Path) -> None:
    """The run ended as the one that nothing disturbed: bit for bit, each step logged once, nothing left behind."""
    assert_same_end(run_dir, calm)
    assert steps_of(run_dir) == steps_of(calm)
    rows = metrics_of(run_dir)
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, steps_of(calm)[-1] + 1))
    assert [row["step"] for row in rows if "dev/bleu" in row] == [
        row["step"] for row in metrics_of(calm) if "dev/bleu" in row
    ]
    assert leftovers(run_dir) == []


# ---- kills at random moments ----------------------------------------------------------------------------------------


class Killer:
    """Kills children that train the same job, one after the other, until the run is finished; then begins another run.

    A third of the kills come while the command starts, or ends; a third some moment after the first new step; a third
    while a checkpoint is written.
    """

    def __init__(self, job: TrainJob, calm: Path, folder: Path, draw: random.Random) -> None:
        self.calm, self.folder, self.draw = calm, folder, draw
        self.kills = self.runs = self.in_commit = 0
        self._job = job
        self._next_run()

    def _next_run(self) -> None:
        self.runs += 1
        self.run_dir = self.folder / f"run-{self.runs}"
        self.job = replace(self._job, run_dir=str(self.run_dir))

    def kill(self, times: int) -> None:
        """Begin and kill so many children, and judge what each leaves behind; the last run is finished."""
        before = self.kills
        while self.kills < before + times:
            self._kill_one(self.draw.choice(["start", "step", "commit"]))
        self._finish()

    def _finish(self) -> None:
        found = in_a_child("train", self.job, self.folder)
        assert found.status == 0, found.said
        assert_recovered(self.run_dir, self.calm)
        shutil.rmtree(self.run_dir)
        self._next_run()

    def _kill_one(self, moment: str) -> None:
        known = last_logged(self.run_dir)
        child = begin_in_a_child("train", self.job, self.folder)
        try:
            self._wait(moment, known, child)
        finally:
            os.kill(child, signal.SIGKILL)
        found = ended(child, self.folder)

        if found.status == 0:  # it was quicker
            assert_recovered(self.run_dir, self.calm)
            shutil.rmtree(self.run_dir)
            self._next_run()
            return
        assert found.status == -signal.SIGKILL, found.said
        self.kills += 1
        self.in_commit += any(self.run_dir.glob("checkpoints/.tmp-*"))
        assert_nothing_lost(self.run_dir)

    def _wait(self, moment: str, known: int, child: int) -> None:
        match moment:
            case "start":
                time.sleep(self.draw.uniform(0, 0.3))
            case "step":
                self._wait_for(child, lambda: last_logged(self.run_dir) > known)
                time.sleep(self.draw.uniform(0, 0.06))
            case "commit":
                self._wait_for(child, lambda: any(self.run_dir.glob(f"checkpoints/.tmp-*-{child}-*")))
                time.sleep(self.draw.uniform(0, 0.004))

    @staticmethod
    def _wait_for(child: int, condition: Callable[[], bool]) -> None:
        """Until it is so, or the child has ended."""
        wait_for(lambda: condition() or os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None)


# ---- one chosen file-system call ------------------------------------------------------------------------------------

KILL = 0
NEVER = 10**9  # calls
STRUCK: dict[str, Any] = {
    "max_steps": 6,
    "save_every": 2,
    "validate_every": 3,
    "keep_last": 2,
    "average": 2,
    "ema_decay": 0.9,
}
STRUCK |= {"tokens_per_step": 200, "max_tokens": 120}

SERVER = """
import json, sys
from pathlib import Path
from support.corpora import in_a_child, run
from support.fault_runs import struck_job
run(struck_job(Path("calm")))
print("ready", flush=True)
for line in sys.stdin:
    folder = Path(json.loads(line))
    print(in_a_child("train", struck_job(folder), Path()).status, flush=True)
"""


def struck_job(folder: Path) -> TrainJob:
    """What is trained in `folder`, store and run directory, on the corpus beside it."""
    data: DataConfig = write_corpus(folder.absolute().parent / "corpus")
    data = replace(data, test={"test": data.test["test"]}, store_dir=str(folder.absolute() / "store"))
    return tiny_job(folder.absolute() / "run", data, **STRUCK)


class StruckTrainings:
    """Trains in children of a process that has strike.c preloaded, and strikes at the n-th call of one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._control = folder / "control"
        self._control.write_text("0 0 0 /\n", encoding="utf-8")
        (folder / "calm").mkdir()
        paths = [str(TESTS), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        environment |= {"LD_PRELOAD": str(compile_striker(folder)), "STRIKE": str(self._control)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        assert self._answer() == "ready"
        self.calm = folder / "calm" / "run"

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def train(self, folder: Path) -> tuple[Ended, list[str]]:
        """Train in a folder, undisturbed. How it ended, and which calls it made: the name of each, and its path."""
        end, hit = self.strike(folder, NEVER)
        assert hit is None
        return end, self._noted("calls")

    def strike(
        self, folder: Path, number: int, failure: int = KILL, *, lasts: bool = False
    ) -> tuple[Ended, str | None]:
        """Train in a folder; at the call of this number, be killed or have it fail.

        How it ended, and which call that was; None if it made fewer.
        """
        folder.mkdir(exist_ok=True)
        for kind in ("hit", "calls"):
            self._control.with_name(f"control.{kind}").unlink(missing_ok=True)
        self._control.write_text(f"{number} {failure} {int(lasts)} {folder}/\n", encoding="utf-8")
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(str(folder)) + "\n")
        self._process.stdin.flush()
        status = int(self._answer())
        end = Ended(status, *self._streams())
        hits = self._noted("hit")
        return end, hits[0] if hits else None

    def _streams(self) -> tuple[str, str]:
        """What the child printed, and what it said on standard error."""
        printed, said = ((self.folder / name).read_text(encoding="utf-8") for name in ("stdout", "stderr"))
        return printed, said

    def _noted(self, kind: str) -> list[str]:
        path = self._control.with_name(f"control.{kind}")
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    def close(self) -> None:
        """End the process."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def compile_striker(folder: Path) -> Path:
    """The library, compiled in `folder`; skips the test where there is no compiler, or no such way to preload."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("needs a C compiler, for the library that strikes at a chosen file-system call")
    if sys.platform != "linux":
        pytest.skip("the library that strikes at a chosen file-system call is preloaded as Linux does it")
    library = folder / "strike.so"
    source = Path(__file__).with_name("strike.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library
