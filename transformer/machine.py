"""Cores and memory of this process. Without torch, which takes longer to import than a small corpus to prepare."""

import ctypes
import os


def resolve_threads(threads: int | None) -> int:
    """This rank's share of the cores that this process may use, unless told otherwise."""
    share = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return threads if threads is not None else max(1, share)


def trim_heap() -> None:
    """Give the system back what the C library keeps of freed memory, where that is glibc.

    On a CPU, batches of many shapes leave its heap full of holes that nothing fits into, so that a training's memory
    would grow for hours.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
