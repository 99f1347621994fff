"""The time that a device spends in each kernel, from a trace of torch's profiler."""

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # the categories of a trace that are work of the GPU
ON_HOST = ("cpu_op",)  # without a GPU; operations that call others count twice, so this only tries the script
ROWS, NAME = 40, 200  # of the table, and characters of a kernel's name


def kernel_times(run: Callable[[], object], device: torch.device, runs: int) -> dict[str, Any]:
    """What the device does while `run`, which makes `runs` like runs, is called: times are means of one of them."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        run()
        if on_gpu:
            torch.cuda.synchronize()

    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return table(events, ON_DEVICE if on_gpu else ON_HOST, runs)


def kernel_table(run: Callable[[], object], device: torch.device, runs: int) -> dict[str, Any]:
    """The same, but an error of the profiler costs the table, and not what was timed: `error` says what it was."""
    try:
        return kernel_times(run, device, runs)
    except Exception as error:  # whatever the profiler dislikes about this machine
        return {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}


def table(events: list[dict[str, Any]], categories: tuple[str, ...], runs: int) -> dict[str, Any]:
    """The events of a trace by name, the longest first: `ms` and `calls` of one run, `share` of all their time."""
    spans = [event for event in events if event.get("cat") in categories and "dur" in event]
    if not spans:
        raise ValueError("the profiler saw no kernel")

    times: dict[str, float] = {}
    calls: dict[str, int] = {}
    for span in spans:
        times[span["name"]] = times.get(span["name"], 0.0) + span["dur"]
        calls[span["name"]] = calls.get(span["name"], 0) + 1
    total = sum(times.values())

    # The device is idle where no kernel runs, between the first and the last.
    busy, end = 0.0, 0.0
    for span in sorted(spans, key=lambda span: span["ts"]):
        busy += max(0.0, span["ts"] + span["dur"] - max(end, span["ts"]))
        end = max(end, span["ts"] + span["dur"])
    whole = end - min(span["ts"] for span in spans)

    longest = sorted(times, key=lambda name: -times[name])[:ROWS]
    return {
        "runs": runs,
        "busy_ms": busy / 1e3 / runs,
        "idle_ms": (whole - busy) / 1e3 / runs,
        "calls": len(spans) / runs,
        "names": len(times),
        "rows": [
            {
                "kernel": name[:NAME],
                "ms": times[name] / 1e3 / runs,
                "calls": calls[name] / runs,
                "share": times[name] / total,
            }
            for name in longest
        ],
    }
