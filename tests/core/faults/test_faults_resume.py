"""Stopped again and again, a run makes the same steps, the same decisions and the same logs as one left in peace."""

import math
import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.summary.writer import event_file_writer

from support.corpora import (
    assert_same_end,
    metrics_of,
    progress_of,
    read,
    results_of,
    run,
    step_dir,
    steps_of,
    tiny_job,
    write_corpus,
)
from support.resumed_runs import learned, stop_at, tensorboard_steps
from transformer.config.jobs import TrainJob
from transformer.config.settings import DataConfig, Metric
from transformer.errors import Stopped
from transformer.records import Validation
from transformer.training import loop

Note = Callable[[str, object], None]

STEPS = 60
RECIPE: dict[str, Any] = {"max_steps": STEPS, "save_every": 7, "validate_every": 20, "warmup_steps": 30, "average": 3}
RECIPE |= {"tokens_per_step": 150, "max_tokens": 80, "ema_decay": 0.9, "log_every": 4}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


# ---- the steps ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def straight(corpus: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing interrupts: over two ends of an epoch, two validations, and the end of the warm-up."""
    run_dir = run(tiny_job(tmp_path_factory.mktemp("straight") / "a", corpus, **RECIPE))
    assert results_of(run_dir)["epochs"] == 2
    return run_dir


def assert_same_run(run_dir: Path, straight: Path) -> None:
    """To the last bit, and in all that was logged: losses, rates, norms, epochs."""
    assert_same_end(run_dir, straight)
    assert learned(run_dir) == learned(straight)


@pytest.mark.faults
def test_train_is_the_same_stopped_and_resumed_at_every_step(
    corpus: DataConfig, tmp_path: Path, straight: Path, record_property: Note
) -> None:
    """One run that is stopped in each of its steps; after each, all is as in a run that saves every step."""
    every: dict[str, Any] = {**RECIPE, "save_every": 1, "keep_last": STEPS}
    saving = run(tiny_job(tmp_path / "saving", corpus, **every))
    job = tiny_job(tmp_path / "stopped", corpus, **RECIPE)
    for step in range(1, STEPS + 1):
        stop_at(job, step, signal.SIGINT if step % 2 else signal.SIGTERM)
        for name in ("model", "ema", "optimizer"):
            one, two = (
                load_file(step_dir(run_dir, step) / f"{name}.safetensors") for run_dir in (saving, stopped(job))
            )
            assert one.keys() == two.keys()
            assert all(torch.equal(one[key], two[key]) for key in one), (step, name)
        if step % 20:  # else its validation is still due
            assert progress_of(saving, step) == progress_of(stopped(job), step)
    run(job)
    assert_same_run(stopped(job), straight)
    record_property("stops", STEPS)
    record_property("runs that ended bit-identical", 1)


def stopped(job: TrainJob) -> Path:
    return Path(job.run_dir)


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(20))
def test_train_is_the_same_after_a_chain_of_stops(
    corpus: DataConfig, tmp_path: Path, straight: Path, seed: int, record_property: Note
) -> None:
    job = tiny_job(tmp_path / "a", corpus, **RECIPE)
    for step in sorted(random.Random(seed).sample(range(1, STEPS), 10)):
        stop_at(job, step)
    run(job)
    assert_same_run(tmp_path / "a", straight)
    record_property("stops", 10)
    record_property("runs that ended bit-identical", 1)


# ---- the decisions --------------------------------------------------------------------------------------------------

NAN = math.nan
# Better, equal, worse and not finite, as (BLEU, loss); a run that waits for four without a better one ends at the last.
SHORT = [(1.0, 5.0), (NAN, NAN), (2.0, 5.0), (2.0, 4.0), (1.5, NAN), (NAN, 4.5), (1.9, 4.1), (2.0, 4.0)]
LONG = [(1.0, 9.0), (2.0, 8.0), (2.0, 8.0), (0.5, 8.5), (NAN, NAN), (3.0, 7.0), (NAN, math.inf), (3.0, 7.0)]
LONG += [(2.0, 7.5), (4.0, 6.0), (5.0, 5.0), (5.0, 5.0), (5.0, NAN), (NAN, 5.0), (6.0, 4.0), (1.0, 9.0)]
LONG += [(6.0, 4.0), (5.0, 5.0), (7.0, 3.0), (7.0, 3.0), (NAN, NAN), (6.9, 3.1), (8.0, 2.0), (8.5, 1.5)]
LONG += [(1.0, 3.0), (9.0, 1.0), (NAN, NAN), (9.0, 1.0), (8.0, 1.1), (3.0, 1.2)]
assert (len(SHORT), len(LONG)) == (8, 30)


class Script:
    """Stands in for `validate`: one scripted validation a step, with a signal after each where there is to be one."""

    def __init__(self, values: Sequence[tuple[float, float]], *, signals: bool) -> None:
        self.values, self.signals = values, signals

    def __call__(self, _objective: object, _batches: object, dev: Any, _world: object, *, step: int, **_: Any) -> Any:
        if self.signals:
            signal.raise_signal(signal.SIGTERM)
        bleu, loss = self.values[step - 1]
        return Validation(step, loss=loss, nll=loss, bleu=bleu, chrf=bleu), {"dev": [""] * len(dev["dev"].sources)}


@pytest.fixture
def scripted(corpus: DataConfig, tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Runs one script twice, in peace and stopped after every validation; the two run directories."""

    def train_twice(values: Sequence[tuple[float, float]], metric: Metric, patience: int) -> tuple[Path, Path]:
        recipe: dict[str, Any] = {
            "max_steps": len(values) + 1,
            "validate_every": 1,
            "metric": metric,
            "patience": patience,
        }
        recipe |= {"tokens_per_step": 150, "save_every": 5, "keep_last": 2, "keep_best": 2, "average": 2}
        with pytest.MonkeyPatch.context() as patch:
            # TensorBoard reads its files by name: of one second, the process's tenth (-10) before its ninth (-9).
            patch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(1000))
            patch.setattr(loop, "validate", Script(values, signals=False))
            calm = run(tiny_job(tmp_path / "calm", corpus, **recipe))
            patch.setattr(loop, "validate", Script(values, signals=True))
            job, stops = tiny_job(tmp_path / "stopped", corpus, **recipe), 0
            for _ in values:
                try:
                    run(job)
                except Stopped:
                    stops += 1
            patch.setattr(loop, "validate", Script(values, signals=False))
            run(job)
        assert stops == len(values)
        return calm, tmp_path / "stopped"

    return train_twice


def assert_same_decisions(calm: Path, stopped: Path, values: Sequence[tuple[float, float]]) -> None:
    assert_same_end(stopped, calm)
    assert steps_of(stopped) == steps_of(calm)
    for run_dir in (calm, stopped):
        assert results_of(run_dir)["steps"] == len(values), "patience ended it"
        shown = tensorboard_steps(run_dir)
        assert shown["train/loss"] == list(range(1, len(values) + 1))
        assert shown["dev/bleu"] == [step for step, (bleu, _) in enumerate(values, 1) if math.isfinite(bleu)]
        rows = [row for row in metrics_of(run_dir) if "dev/bleu" in row]
        assert [row["dev/bleu"] for row in rows] == [bleu for bleu, _ in values if math.isfinite(bleu)]
        log = (run_dir / "train.log").read_text(encoding="utf-8")
        assert all(f"step {step}: loss" in log for step in range(1, len(values) + 1))


@pytest.mark.parametrize(("metric", "best"), [(Metric.bleu, 3), pytest.param(Metric.loss, 4, marks=pytest.mark.faults)])
def test_train_decides_the_same_stopped_after_every_validation(
    scripted: Callable[..., tuple[Path, Path]], metric: Metric, best: int
) -> None:
    """A score that is not finite is never the best, and counts as one without a better; nor is an equal one."""
    values = SHORT if metric is Metric.loss else SHORT[:-1]
    calm, stopped = scripted(values, metric, 4)
    assert read(calm / "best.json") == {"step": best, "metric": metric.name}
    assert_same_decisions(calm, stopped, values)


@pytest.mark.faults
@pytest.mark.parametrize("metric", [Metric.bleu, Metric.loss])
def test_train_decides_the_same_over_thirty_validations(
    scripted: Callable[..., tuple[Path, Path]], metric: Metric, record_property: Note
) -> None:
    calm, stopped = scripted(LONG, metric, 4)
    assert read(calm / "best.json") == {"step": 26, "metric": metric.name}
    assert_same_decisions(calm, stopped, LONG)
    record_property("stops", len(LONG))
    record_property("runs that ended bit-identical", 1)
