"""Runs that are stopped or damaged, and what a run has learned and logged."""

import hashlib
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.corpora import (
    metrics_of,
    run,
    step_dir,
    steps_of,
)
from support.interventions import before_each_update
from transformer.config.jobs import TrainJob
from transformer.errors import Stopped


def stop_at(job: TrainJob, step: int, number: int = signal.SIGTERM) -> Path:
    """Run until a signal arrives during this step."""
    run_dir = Path(job.run_dir)
    done = max(steps_of(run_dir), default=0)

    def interrupt() -> None:
        nonlocal done
        done += 1
        if done == step:
            signal.raise_signal(number)

    with before_each_update(interrupt), pytest.raises(Stopped, match=f"step {step} is saved"):
        run(job)
    assert steps_of(run_dir)[-1] == step
    return run_dir


def tensorboard_steps(run_dir: Path) -> dict[str, list[int]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def damage(run_dir: Path, step: int, name: str = "model.safetensors") -> None:
    """Turn one bit."""
    path = step_dir(run_dir, step) / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def learned(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what a clock measured, training before validation where a step has both."""
    rows = [
        {key: value for key, value in row.items() if key != "time" and not key.startswith("speed/")}
        for row in metrics_of(run_dir)
    ]
    return sorted(rows, key=lambda row: (row["step"], "dev/bleu" in row))


def with_value(config: Any, key: str, value: Any) -> Any:
    """The job with one key changed."""
    name, _, rest = key.partition(".")
    if isinstance(config, dict):
        return config | {name: with_value(config[name], rest, value) if rest else value}
    return replace(config, **{name: with_value(getattr(config, name), rest, value) if rest else value})


def snapshot(run_dir: Path) -> dict[str, str]:
    """Every file but the lock and the log, which say that somebody tried."""
    files = [path for path in run_dir.rglob("*") if path.is_file() and path.name not in (".lock", "train.log")]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
