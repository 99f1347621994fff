"""Commands on the null GPU (scripts/null_gpu), and what was counted there."""

import json
import os
import subprocess
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from support.paths import ROOT

PYTHON = os.environ.get("TRANSFORMER_NULL_GPU_PYTHON")
RUN = ROOT / "scripts" / "null_gpu" / "run.sh"
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@dataclass(frozen=True)
class Ended:
    """How a command ended, and its report: {} where no weights were updated."""

    status: int
    out: str
    err: str
    report: dict[str, Any]

    def steps(self) -> list[dict[str, int]]:
        """What each update took since the one before it, without the first: calls of each kind."""
        updates = self.report["updates"]
        return [{kind: after[kind] - before.get(kind, 0) for kind in after} for before, after in pairwise(updates)]


def caches_of(folder: Path) -> Path:
    """Where commands in `folder` and beside it keep what they compile: each test finds that of the others."""
    return folder.parent / "null_gpu_caches"


def on_null_gpu(folder: Path, *command: str, text: str = "", **environment: str) -> Ended:
    """Run a command in `folder`, on the card that variables such as NULL_GPU_CAPABILITY describe."""
    report = folder / "null_gpu_report.json"
    report.unlink(missing_ok=True)
    names = {
        "NULL_GPU_REPORT": str(report),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "XDG_CACHE_HOME": str(caches_of(folder)),
    }
    done = subprocess.run(
        [str(RUN), *command],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name not in CACHES} | names | environment,
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    found = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    return Ended(done.returncode, done.stdout, done.stderr, found)


def train_on_null_gpu(folder: Path, *arguments: str, **environment: str) -> Ended:
    """`transformer train run_dir=run ...`, which must end well."""
    done = on_null_gpu(folder, "transformer", "train", "run_dir=run", *arguments, **environment)
    assert done.status == 0, done.err
    return done
