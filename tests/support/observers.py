"""What code does while it runs: how large its tensors become, how much memory it takes, and what reaches the disk."""

import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """The size of the largest tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            self.elements = max(self.elements, x.numel() if isinstance(x, Tensor) else 0)
        return out


class PeakMemory(threading.Thread):
    """The most memory that a process has had: its own. `ru_maxrss` begins with that of the process it was made by."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._status = Path(f"/proc/{pid}/status")
        self.kilobytes = 0
        self.start()

    def run(self) -> None:
        """Look every ten milliseconds, until the process has ended."""
        while found := re.search(r"^VmHWM:\s*(\d+) kB$", self._read(), re.MULTILINE):
            self.kilobytes = int(found[1])
            time.sleep(0.01)

    def _read(self) -> str:
        try:
            return self._status.read_text()
        except OSError:
            return ""


def watch_disk(patch: pytest.MonkeyPatch) -> list[tuple[str, Path, int]]:
    """What is brought to the disk, with its size then, and what is renamed, in order; the list grows as it happens."""
    events: list[tuple[str, Path, int]] = []
    fsync, rename = os.fsync, Path.rename

    def sync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        events.append(("sync", path, 0 if path.is_dir() else path.stat().st_size))
        fsync(descriptor)

    def move(path: Path, target: Path) -> Path:
        events.append(("rename", path, 0))
        return rename(path, target)

    patch.setattr(os, "fsync", sync)
    patch.setattr(Path, "rename", move)
    return events
