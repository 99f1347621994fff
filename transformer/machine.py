"""Cores and memory of this process. Without torch, which takes longer to import than a small corpus to prepare."""

import contextlib
import ctypes
import os
import re
import subprocess
from pathlib import Path

# How many matrix products the libraries below torch keep prepared for their shapes on a CPU. By default each keeps
# 1,024, at 0.3 to 0.4 MB apiece, and a training with its searches has that many shapes.
KERNEL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "LRU_CACHE_CAPACITY": "32"}  # oneDNN's own; ideep's above it

CONTROL_GROUP = "/sys/fs/cgroup"  # a container's own is mounted there


def resolve_threads(threads: int | None) -> int:
    """This rank's share of the cores that this process may use, unless told otherwise."""
    share = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return threads if threads is not None else max(1, share)


def free_memory() -> int:
    """This rank's share of the bytes that the machine, and a container that it is, may still give out."""
    with open("/proc/meminfo", encoding="ascii") as file:
        fields = dict(line.split(":") for line in file)
    free = 1024 * int(fields["MemAvailable"].split()[0])

    limit = _number_in(f"{CONTROL_GROUP}/memory.max")
    used = _number_in(f"{CONTROL_GROUP}/memory.current")  # with the copies of files, which give way
    if limit is not None and used is not None:
        free = max(0, min(free, limit - used + _cached_files(f"{CONTROL_GROUP}/memory.stat")))
    return free // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def describe_processor() -> str:
    """The processor's name, the cores that this process may use, and the machine's memory."""
    with contextlib.suppress(OSError):
        cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        memory = Path("/proc/meminfo").read_text(encoding="ascii")
        name = re.search(r"^model name\s*: (.+)$", cpu, re.MULTILINE)
        kilobytes = re.search(r"^MemTotal:\s*([0-9]+)", memory, re.MULTILINE)
        size = "" if kilobytes is None else f", {int(kilobytes[1]) / 2**20:.0f} GiB"
        return f"{'unknown processor' if name is None else name[1]}, {len(os.sched_getaffinity(0))} cores{size}"
    return "unknown processor"


def source_commit(folder: Path) -> str | None:
    """The commit of the git checkout `folder`, with `-dirty` where files differ from it; None where that is unknown."""
    if not (folder / ".git").exists():
        return None
    command = ["git", "--no-optional-locks", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True, timeout=20, check=True)
        return found.stdout.strip() or None
    return None


def _cached_files(path: str) -> int:
    with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
        for line in file:
            name, value = line.split()
            if name == "inactive_file":
                return int(value)
    return 0


def _number_in(path: str) -> int | None:
    """What a file of the kernel's says; None where it is not there, or says that there is no limit."""
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def limit_kernel_caches() -> None:
    """Bound what prepared matrix products take on a CPU, unless the user has: before torch first multiplies.

    For a process that is our own: the limits stay in its environment.
    """
    for name, capacity in KERNEL_CACHES.items():
        os.environ.setdefault(name, capacity)


def trim_heap() -> None:
    """Give the system back what the C library keeps of freed memory, where that is glibc.

    On a CPU, batches of many shapes leave its heap full of holes that nothing fits into, so that a training's memory
    would grow for hours.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
