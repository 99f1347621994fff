"""What several test files need to look at code: scripts as modules, how large tensors become, what reaches the disk."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


def load_script(path: str) -> ModuleType:
    """Import a module of scripts/, which is no package, under the last part of its path, as a neighbour would."""
    name = path.rpartition("/")[2]
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{path}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str((SCRIPTS / path).parent)
    sys.path.insert(0, folder)  # where it finds those that it imports
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
    return module


class Largest(TorchDispatchMode):
    """The size of the largest tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            self.elements = max(self.elements, x.numel() if isinstance(x, Tensor) else 0)
        return out


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
