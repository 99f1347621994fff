"""`train.profile`: what one step computes and what memory it takes, written into the run directory.

The trace opens in https://ui.perfetto.dev or chrome://tracing; the snapshot of a GPU's memory in
https://docs.pytorch.org/memory_viz. Both are for people: nothing reads them back.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile

from transformer.files import write_file
from transformer.run_dir import RunDir

log = logging.getLogger(__name__)

EVENTS = 200_000  # allocations of a GPU that a snapshot holds at most


@contextmanager
def profiled(directory: RunDir, *, step: int, device: torch.device) -> Iterator[None]:
    """Write what happens inside. Raises StorageError where it cannot be written."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    if on_gpu:
        torch.cuda.memory._record_memory_history(max_entries=EVENTS)
    try:
        with profile(activities=activities, record_shapes=True, profile_memory=True) as trace:
            yield
            if on_gpu:
                torch.cuda.synchronize(device)

        # To a place of their own first: what is in the run directory is whole.
        with TemporaryDirectory() as folder:
            written = Path(folder) / "trace.json.gz"
            trace.export_chrome_trace(str(written))
            write_file(directory.trace(step), written.read_bytes())
            if on_gpu:
                written = Path(folder) / "memory.pickle"
                torch.cuda.memory._dump_snapshot(str(written))  # type: ignore[no-untyped-call]
                write_file(directory.memory_snapshot(step), written.read_bytes())
    finally:
        if on_gpu:
            torch.cuda.memory._record_memory_history(enabled=None)
    log.info("step %d: %s", step, directory.trace(step))
