"""Stopped, killed or damaged, a run goes on as if nothing had happened; under other settings it does not go on."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support.corpora import (
    assert_same_end,
    finish,
    is_verified,
    last_logged,
    metrics_of,
    overrides,
    progress_of,
    read,
    results_of,
    run,
    start,
    step_dir,
    steps_of,
    tiny_job,
    wait_for,
    write_corpus,
)
from support.interventions import after_each_update, before_each_pass, before_each_update, spoilt_gradients
from support.resumed_runs import damage, learned, snapshot, stop_at, tensorboard_steps
from support.tiers import tiers
from transformer.config.jobs import TrainJob
from transformer.config.settings import DataConfig, Precision
from transformer.errors import CheckpointError, InputError, LockedError, NumericalError, Stopped, StorageError
from transformer.run_dir import RunDir
from transformer.training import loop
from transformer.training.step import Objective
from transformer.training.validate import DevSet, validate

LAST = 14  # of the reference run: epochs end at 6 and 12, validations at 6, 12 and 14, checkpoints at 4, 8, 12 and 14


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def straight(corpus: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing interrupts."""
    run_dir = run(tiny_job(tmp_path_factory.mktemp("straight") / "a", corpus, max_steps=LAST))
    epochs = [row["train/epoch"] for row in metrics_of(run_dir) if "train/epoch" in row]
    assert epochs == [0.0] * 6 + [1.0] * 6 + [2.0] * 2
    return run_dir


@pytest.fixture
def job(corpus: DataConfig, tmp_path: Path) -> TrainJob:
    return tiny_job(tmp_path / "a", corpus, max_steps=LAST)


@pytest.fixture
def copy(finished: TrainJob, tmp_path: Path) -> TrainJob:
    shutil.copytree(finished.run_dir, tmp_path / "copy")
    return replace(finished, run_dir=str(tmp_path / "copy"))


def assert_logged_once(run_dir: Path, last: int = LAST) -> None:
    """metrics.jsonl has every step once, and every validation."""
    rows = metrics_of(run_dir)
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, last + 1))
    assert [row["step"] for row in rows if "dev/bleu" in row] == [row["step"] for row in validations(run_dir)]


def validations(run_dir: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = results_of(run_dir)["validations"]
    return rows


def test_train_passes_on_a_signal_that_cuts_an_import_of_torch_short(
    job: TrainJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.use_deterministic_algorithms imports half of torch; once interrupted there, it fails at any other call."""
    failures: list[BaseException] = [AttributeError("module 'sympy' has no attribute 'core'"), KeyboardInterrupt()]

    def interrupted(enabled: bool, *, warn_only: bool = False) -> None:
        raise failures.pop()

    monkeypatch.setattr(torch, "use_deterministic_algorithms", interrupted)
    job.train.deterministic = True
    with pytest.raises(KeyboardInterrupt):
        loop.train(job)


# ---- stopped and resumed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", tiers([5, 6], [step for step in range(1, LAST) if step not in (5, 6)]))
def test_train_ends_the_same_resumed_at_every_step(job: TrainJob, straight: Path, step: int) -> None:
    run_dir = stop_at(job, step, signal.SIGINT if step % 2 else signal.SIGTERM)
    run(job)
    assert_same_end(run_dir, straight)
    assert_logged_once(run_dir)


@pytest.mark.faults
def test_train_ends_the_same_after_a_chain_of_random_resumes(job: TrainJob, straight: Path) -> None:
    stops = sorted(random.Random(0).sample(range(1, LAST), 8))
    for step in stops:
        stop_at(job, step)
    run(job)
    assert_same_end(Path(job.run_dir), straight)
    assert_logged_once(Path(job.run_dir))


@pytest.mark.faults
def test_train_stopped_leaves_the_state_of_the_straight_run(corpus: DataConfig, tmp_path: Path) -> None:
    """Weights, moments and position at an interrupted step are those of a run that saves there anyway."""
    every = run(tiny_job(tmp_path / "every", corpus, max_steps=8, save_every=1, keep_last=9))
    for step in (3, 5, 7):
        stopped = stop_at(tiny_job(tmp_path / f"at-{step}", corpus, max_steps=8), step)
        for name in ("model", "optimizer"):
            one, two = (load_file(step_dir(run_dir, step) / f"{name}.safetensors") for run_dir in (stopped, every))
            assert one.keys() == two.keys()
            assert all(torch.equal(one[key], two[key]) for key in one)
        assert progress_of(stopped, step) == progress_of(every, step)


def test_train_stops_at_a_signal_in_the_last_step(job: TrainJob, straight: Path) -> None:
    """It stops here too: the validation that is due and the test sets can take longer than a scheduler waits."""
    stop_at(job, LAST)
    assert not (Path(job.run_dir) / "results.json").exists()
    run(job)
    assert_same_end(Path(job.run_dir), straight)
    assert_logged_once(Path(job.run_dir))


def stop_in(owner: type, method: str, job: TrainJob, step: int) -> None:
    """A signal comes behind this step, when the training first calls that method of the class."""
    done = max(steps_of(Path(job.run_dir)), default=0)
    signals = [signal.SIGTERM]
    real = getattr(owner, method)

    def count() -> None:
        nonlocal done
        done += 1

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if done == step and signals:
            signal.raise_signal(signals.pop())
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch, after_each_update(count):
        patch.setattr(owner, method, interrupted)
        with pytest.raises(Stopped, match=f"step {step} is saved"):
            run(job)


def stop_in_validation(job: TrainJob, step: int) -> None:
    """A signal comes while the dev loss of this step is measured."""
    stop_in(Objective, "evaluate", job, step)


def test_train_stops_at_a_signal_while_the_last_step_is_saved(job: TrainJob, straight: Path) -> None:
    stop_in(RunDir, "write_best", job, LAST)  # behind its checkpoint, before older ones are removed
    run(job)
    assert_same_end(Path(job.run_dir), straight)


@pytest.mark.parametrize("step", tiers([6], [12, LAST]))
def test_train_stops_at_a_signal_during_validation(job: TrainJob, straight: Path, step: int) -> None:
    stop_in_validation(job, step)
    assert steps_of(Path(job.run_dir))[-1] == step
    assert step not in [
        row["step"] for row in progress_of(Path(job.run_dir), step)["training"]["progress"]["validations"]
    ]
    stop_in_validation(job, step)  # again
    run(job)
    assert_same_end(Path(job.run_dir), straight)
    assert_logged_once(Path(job.run_dir))


@pytest.mark.parametrize("step", tiers([LAST], [6]))
def test_train_does_not_repeat_a_validation_done_after_resuming(
    job: TrainJob, straight: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """A signal cuts it short; the resumed run does it, and dies in the next step (or before it writes its results)."""
    stop_in_validation(job, step)
    with monkeypatch.context() as patch, before_each_update(die):
        patch.setattr(RunDir, "write_results", die)
        with pytest.raises(Death):
            run(job)
    run(job)
    assert_logged_once(Path(job.run_dir))
    assert_same_end(Path(job.run_dir), straight)


class Death(Exception):
    """Nothing is saved."""


def die(*_: Any, **__: Any) -> Any:
    raise Death


@pytest.mark.faults
@pytest.mark.parametrize("patience", [2, 3])
def test_train_counts_patience_through_interruptions(
    corpus: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience: int
) -> None:
    """Stopped in the step after each validation, a run makes the same decisions."""
    bleu = {2: 5.0, 4: 3.0, 6: 6.0, 8: 1.0, 10: 6.0, 12: 2.0, 14: 9.0}
    real = validate

    def scripted(*arguments: Any, **options: Any) -> Any:
        found, hypotheses = real(*arguments, **options)
        return replace(found, bleu=bleu[found.step]), hypotheses

    monkeypatch.setattr(loop, "validate", scripted)
    recipe: dict[str, Any] = {"validate_every": 2, "save_every": 4, "patience": patience, "max_steps": LAST}
    calm = run(tiny_job(tmp_path / "calm", corpus, **recipe))
    job = tiny_job(tmp_path / "chain", corpus, **recipe)
    end = {2: 10, 3: 12}[patience]
    for step in range(3, end, 2):
        stop_at(job, step)
    run(job)
    assert results_of(calm)["steps"] == end
    assert_same_end(tmp_path / "chain", calm)


@pytest.mark.faults
def test_log_window_is_logged_although_a_signal_cut_the_last_validation_short(
    corpus: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Patience ends the run at step 10, in the middle of a window; the resumed run only makes up for the validation."""
    bleu = {2: 5.0, 4: 3.0, 6: 6.0, 8: 1.0, 10: 6.0}
    real = validate
    signals: list[int] = []

    def scripted(*arguments: Any, **options: Any) -> Any:
        if options["step"] == 10 and signals:
            signal.raise_signal(signals.pop())
        found, hypotheses = real(*arguments, **options)
        return replace(found, bleu=bleu[found.step]), hypotheses

    monkeypatch.setattr(loop, "validate", scripted)
    recipe: dict[str, Any] = {"validate_every": 2, "save_every": 4, "log_every": 4, "patience": 2, "max_steps": LAST}
    calm = run(tiny_job(tmp_path / "calm", corpus, **recipe))
    assert [row["step"] for row in learned(calm) if "train/loss" in row] == [4, 8, 10]

    signals.append(signal.SIGTERM)
    job = tiny_job(tmp_path / "cut", corpus, **recipe)
    with pytest.raises(Stopped, match="step 10 is saved"):
        run(job)
    assert_same_end(run(job), calm)
    assert learned(tmp_path / "cut") == learned(calm)


def test_train_ends_at_numbers_that_are_not_finite_with_sound_checkpoints(corpus: DataConfig, tmp_path: Path) -> None:
    """The streak goes on over a resume; what is saved is finite."""
    job = tiny_job(tmp_path / "a", corpus, max_steps=40, validate_every=40)
    stop_at(job, 5)
    before = load_file(step_dir(tmp_path / "a", 5) / "model.safetensors")

    with spoilt_gradients(range(1, 41)), pytest.raises(NumericalError, match=r"10 consecutive updates.* up to step 15"):
        run(job)
    assert NumericalError.exit_status == 6
    assert steps_of(tmp_path / "a")[-1] == 15, "the position is saved"
    after = load_file(step_dir(tmp_path / "a", 15) / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before), "a bad update was applied"
    assert progress_of(tmp_path / "a", 15)["training"]["progress"]["streak"] == 10
    with spoilt_gradients(range(1, 41)), pytest.raises(NumericalError, match=r"\d\d consecutive updates.* up to step"):
        run(job)


@pytest.mark.parametrize(
    ("place", "phase"),
    [("forward", "training"), ("evaluate", "measuring the dev loss"), ("of", "starting or finishing")],
)
def test_train_names_what_was_done_when_gpu_memory_ran_out(
    tmp_path: Path, corpus: DataConfig, monkeypatch: pytest.MonkeyPatch, place: str, phase: str
) -> None:
    def too_much(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(DevSet if place == "of" else Objective, place, too_much)
    with pytest.raises(InputError) as caught:
        run(tiny_job(tmp_path / "a", corpus))
    message = str(caught.value)
    assert message.startswith(f"out of GPU memory while {phase}")
    assert ("lower train.max_tokens (now 300); the same command goes on" in message) == (place != "of")


def test_train_names_what_may_stand_beside_fit_memory_when_memory_ran_out(
    tmp_path: Path, corpus: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both keys together are refused, so the remedy puts one in place of the other; and then it works."""

    def too_much(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    job = tiny_job(tmp_path / "a", corpus, max_tokens=None, fit_memory=True)
    with monkeypatch.context() as patch:
        patch.setattr(Objective, "forward", too_much)
        with pytest.raises(InputError, match=r"set train\.max_tokens below (\d+) in place of train\.fit_memory"):
            run(job)
    run(tiny_job(tmp_path / "a", corpus, max_tokens=100))


@pytest.mark.faults
@pytest.mark.parametrize("step", [2, 7, 9])
def test_loss_scale_goes_on_over_a_resume(
    corpus: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Begun far too high and doubled after every third good update, it changes all the time."""
    begin = torch.amp.GradScaler.__init__

    def begin_too_high(scaler: torch.amp.GradScaler, device: str, *, enabled: bool) -> None:
        begin(scaler, device, init_scale=2.0**30, growth_interval=3, enabled=enabled)

    monkeypatch.setattr(torch.amp.GradScaler, "__init__", begin_too_high)
    recipe: dict[str, Any] = {"precision": Precision.fp16, "max_steps": 20}
    calm = run(tiny_job(tmp_path / "calm", corpus, **recipe))
    stop_at(tiny_job(tmp_path / "stopped", corpus, **recipe), step)
    run(tiny_job(tmp_path / "stopped", corpus, **recipe))
    assert_same_end(tmp_path / "stopped", calm)
    state = read(step_dir(calm, 20) / "state.json")["training"]
    assert 5 < state["progress"]["skipped"] < 15
    assert state["loss_scale"]["scale"] < 2.0**30
    assert state["loss_scale"].keys() == {"scale", "growth_tracker"}


@pytest.mark.faults
def test_train_in_float16_learns_as_in_float32(corpus: DataConfig, tmp_path: Path, straight: Path) -> None:
    half = run(tiny_job(tmp_path / "a", corpus, max_steps=LAST, precision=Precision.fp16))
    rows = [[row["train/loss"] for row in metrics_of(run_dir) if "train/loss" in row] for run_dir in (half, straight)]
    assert rows[0] == pytest.approx(rows[1], rel=2e-3)
    assert rows[0] != rows[1], "it was rounded"


@pytest.mark.faults
def test_train_ends_at_gradients_that_no_scale_makes_finite(corpus: DataConfig, tmp_path: Path) -> None:
    """From 65,536 a scale is 1 at the seventeenth update."""
    job = tiny_job(tmp_path / "a", corpus, precision=Precision.fp16, max_steps=40, validate_every=40)
    with spoilt_gradients(range(1, 41)), pytest.raises(NumericalError, match="17 consecutive updates"):
        run(job)


# ---- the window between two log lines -------------------------------------------------------------------------------

WINDOW: dict[str, Any] = {"max_steps": 10, "log_every": 4, "save_every": 6, "validate_every": 5}


@pytest.fixture(scope="module")
def unscored(corpus: DataConfig) -> DataConfig:
    """The corpus without its test sets."""
    return replace(corpus, test={})


@pytest.fixture(scope="module")
def windows(unscored: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that logs after steps 4, 8 and 10, and that nothing interrupts."""
    return run(tiny_job(tmp_path_factory.mktemp("windows") / "a", unscored, **WINDOW))


def test_log_window_logs_a_short_last_window(unscored: DataConfig, tmp_path: Path, windows: Path) -> None:
    """Against the same run, logged at every step."""
    every = metrics_of(run(tiny_job(tmp_path / "every", unscored, **{**WINDOW, "log_every": 1})))
    norms = {row["step"]: row["train/gradient_norm"] for row in every if "train/loss" in row}
    found = {row["step"]: row["train/gradient_norm"] for row in metrics_of(windows) if "train/loss" in row}
    parts = {4: range(1, 5), 8: range(5, 9), 10: range(9, 11)}
    assert found == pytest.approx({end: sum(norms[n] for n in part) / len(part) for end, part in parts.items()})


@pytest.mark.parametrize("step", tiers([6], [3, 10]))
def test_log_window_goes_on_after_a_signal(unscored: DataConfig, tmp_path: Path, windows: Path, step: int) -> None:
    job = tiny_job(tmp_path / "a", unscored, **WINDOW)
    stop_at(job, step)
    assert learned(run(job)) == learned(windows)


@pytest.mark.parametrize("last", tiers([7], [9]))
def test_log_window_goes_on_after_a_death(unscored: DataConfig, tmp_path: Path, windows: Path, last: int) -> None:
    """After step `last` the process is gone; the checkpoint is that of step 6, and what was logged later is dropped."""
    job = tiny_job(tmp_path / "a", unscored, **WINDOW)
    taken = 0

    def die_behind_last() -> None:
        nonlocal taken
        if taken == last:
            raise Death
        taken += 1

    with before_each_update(die_behind_last), pytest.raises(Death):
        run(job)
    assert steps_of(tmp_path / "a")[-1] == 6
    assert learned(run(job)) == learned(windows)


# ---- updates that are skipped on the device -------------------------------------------------------------------------

RARE: dict[str, Any] = {"max_steps": 40, "log_every": 1000, "save_every": 1000, "validate_every": 1000}


@dataclass
class Seen:
    """What a watched run did: the last step, and the weights after each."""

    step: int = 0
    weights: dict[int, list[torch.Tensor]] = field(default_factory=dict)


@pytest.fixture
def watch() -> Iterator[Callable[[range], Seen]]:
    """Make the gradients of these steps NaN, and watch, over resumes too."""
    with ExitStack() as held:

        def begin(bad: range) -> Seen:
            seen = Seen()
            trained: list[Objective] = []

            def note() -> None:
                seen.step += 1
                seen.weights[seen.step] = [parameter.detach().clone() for parameter in trained[-1].parameters()]

            held.enter_context(spoilt_gradients(bad))
            held.enter_context(before_each_pass(trained.append))
            held.enter_context(after_each_update(note))
            return seen

        yield begin


def counts(run_dir: Path, step: int) -> tuple[int, int, int, int | None]:
    """What state.json says of skipped updates: in all, up to this step, most in a row, the first."""
    progress = read(step_dir(run_dir, step) / "state.json")["training"]["progress"]
    return tuple(progress[key] for key in ("skipped", "streak", "longest_streak", "first_skipped"))


def test_train_ends_at_skipped_updates_though_it_logs_rarely(
    unscored: DataConfig, tmp_path: Path, watch: Callable[[range], Seen]
) -> None:
    """The tenth in a row is step 14; the host looks after step 20."""
    seen = watch(range(5, 15))
    with pytest.raises(NumericalError, match=r"10 consecutive updates.* up to step 20"):
        run(tiny_job(tmp_path / "a", unscored, **RARE))
    assert seen.step == 20
    assert steps_of(tmp_path / "a") == [20], "the position is saved"


@pytest.mark.parametrize("stops", tiers([(4, 9)], [(), (11, 14, 22)]), ids=str)
def test_train_counts_skipped_updates_over_resumes(
    unscored: DataConfig, tmp_path: Path, watch: Callable[[range], Seen], stops: tuple[int, ...]
) -> None:
    """Nine in a row are survived, and leave the weights alone."""
    seen = watch(range(5, 14))
    job = tiny_job(tmp_path / "a", unscored, **{**RARE, "max_steps": 24})
    expected = {4: (0, 0, 0, None), 9: (5, 5, 5, 5), 11: (7, 7, 7, 5), 14: (9, 0, 9, 5), 22: (9, 0, 9, 5)}
    for step in stops:
        stop_at(job, step)
        assert counts(tmp_path / "a", step) == expected[step]
    run(job)
    assert seen.step == 24
    assert counts(tmp_path / "a", 24) == (9, 0, 9, 5)
    assert results_of(tmp_path / "a")["skipped_updates"] == 9
    is_same = [all(map(torch.equal, seen.weights[n], seen.weights[n - 1])) for n in range(2, 25)]
    assert is_same == [n in range(5, 14) for n in range(2, 25)]


def test_train_counts_skipped_updates_in_a_row_over_a_resume(
    unscored: DataConfig, tmp_path: Path, watch: Callable[[range], Seen]
) -> None:
    seen = watch(range(5, 15))
    job = tiny_job(tmp_path / "a", unscored, **RARE)
    stop_at(job, 8)
    with pytest.raises(NumericalError, match=r"10 consecutive updates.* up to step 20"):
        run(job)
    assert seen.step == 20
    assert steps_of(tmp_path / "a") == [8, 20], "the position is saved"


# ---- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiers(["model.safetensors"], ["optimizer.safetensors", "state.json", "MANIFEST.json"]))
def test_resume_passes_over_a_damaged_checkpoint(job: TrainJob, straight: Path, name: str) -> None:
    run_dir = stop_at(job, 10)
    damage(run_dir, 10, name)
    run(job)
    assert_same_end(run_dir, straight)
    assert_logged_once(run_dir)
    assert "falling back to step-00000008" in (run_dir / "train.log").read_text(encoding="utf-8")
    assert (run_dir / "checkpoints" / ".bad-step-00000010" / name).exists()


def test_resume_touches_nothing_where_all_checkpoints_are_damaged(job: TrainJob) -> None:
    run_dir = stop_at(job, 10)
    for step in steps_of(run_dir):
        damage(run_dir, step)
    before = snapshot(run_dir)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="no checkpoint can be verified") as refused:
            run(job)
        assert refused.value.exit_status == 4
        assert "\n" not in str(refused.value)
        assert all(f"step-{step:08d}" in str(refused.value) for step in steps_of(run_dir))
        assert snapshot(run_dir) == before
    shutil.move(run_dir / "checkpoints", run_dir / "set aside")
    run(job)  # the remedy that the message names
    assert results_of(run_dir)["steps"] == LAST


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"{}", b'{"config": {}}'])
def test_resume_refuses_a_damaged_run_json(copy: TrainJob, content: bytes | None) -> None:
    path = Path(copy.run_dir) / "run.json"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"run\.json"):
        run(copy)


def test_resume_mends_a_metrics_file_that_a_crash_cut_short(job: TrainJob, straight: Path) -> None:
    run_dir = stop_at(job, 7)
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 8, "train/loss": 1.0}\n{"step": 9, "tra')
    run(job)
    assert_same_end(run_dir, straight)
    assert_logged_once(run_dir)


@pytest.mark.parametrize("name", ["run.json", "MANIFEST.json"])
def test_resume_refuses_a_run_of_an_unreleased_version_by_name(copy: TrainJob, name: str) -> None:
    """The versions before the first format had no number in run.json, and 1 in a checkpoint."""
    run_dir = Path(copy.run_dir)
    paths = [run_dir / name] if name == "run.json" else list((run_dir / "checkpoints").glob(f"*/{name}"))
    assert paths
    for path in paths:
        document = read(path)
        del document["format"]
        if name == "MANIFEST.json":
            document = {"format": 1, **document}
        path.write_text(json.dumps(document), encoding="utf-8")
    copy.train.max_steps += 1
    with pytest.raises(CheckpointError, match=rf"{name}: .*unreleased version of this package.*start a new run"):
        run(copy)


@pytest.mark.parametrize(("key", "value"), [("precision", "bf17"), ("layout", "pakced"), ("device", 3)])
def test_resume_refuses_a_damaged_run_record(copy: TrainJob, key: str, value: object) -> None:
    path = Path(copy.run_dir) / "run.json"
    papers = read(path)
    papers["resolved"][key] = value
    path.write_text(json.dumps(papers), encoding="utf-8")
    copy.train.max_steps += 1
    with pytest.raises(CheckpointError, match=r"run\.json: RunRecord\."):
        run(copy)


# ---- processes ------------------------------------------------------------------------------------------------------


STUCK = """
import time
from torch.optim.optimizer import register_optimizer_step_pre_hook
register_optimizer_step_pre_hook(lambda *_: time.sleep(300))
"""


@pytest.mark.faults
def test_train_admits_one_process_to_a_directory_and_ends_at_a_second_signal(
    corpus: DataConfig, tmp_path: Path
) -> None:
    """The second trainer ends at once, naming the first; the first, in a long step, ends at its second signal."""
    job = tiny_job(tmp_path / "a", corpus)
    first = start("train", *overrides(job), cwd=tmp_path, driver=STUCK)
    log = tmp_path / "a" / "train.log"
    try:
        wait_for(lambda: log.exists() and "parameters" in log.read_text(encoding="utf-8"))
        time.sleep(1)  # until it is in its step
        with pytest.raises(LockedError, match=f"process {first.pid} on "):
            run(job)
        _, err = finish(start("train", *overrides(job), cwd=tmp_path), LockedError.exit_status)
        assert f"process {first.pid} on " in err
        assert err.count("\n") == 1
        first.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert first.poll() is None, "the first signal lets the step end"
        first.send_signal(signal.SIGTERM)
        assert first.wait(2) == 128 + signal.SIGTERM
    finally:
        first.kill()
        first.communicate()


FULL = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (80_000, 80_000))"


@pytest.mark.faults
def test_train_on_a_full_disk_keeps_its_checkpoints_and_goes_on(job: TrainJob, straight: Path, tmp_path: Path) -> None:
    """A file may have no more than 80,000 bytes; the weights have 91,648."""
    run_dir = stop_at(job, 5)
    before = {step: snapshot(step_dir(run_dir, step)) for step in steps_of(run_dir)}
    _, err = finish(start("train", *overrides(job), cwd=tmp_path, driver=FULL), StorageError.exit_status)
    assert re.search(r"step-0000000\d: cannot be written: .* bytes needed, \d+ bytes free", err)
    assert {step: snapshot(step_dir(run_dir, step)) for step in steps_of(run_dir)} == before
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == {f"step-{step:08d}" for step in before}
    run(job)
    assert_same_end(run_dir, straight)
    assert_logged_once(run_dir)


LONG: dict[str, Any] = {"max_steps": 30, "save_every": 5, "validate_every": 15, "threads": 2}


@pytest.mark.faults
def test_train_in_a_process_stops_at_a_signal_and_goes_on(corpus: DataConfig, tmp_path: Path) -> None:
    """From outside, two threads, prefetch 4, and the same command again: nothing is lost and nothing differs."""
    data = replace(corpus, test={"test": corpus.test["test"]})
    stopped, calm = tmp_path / "stopped", tmp_path / "calm"
    commands = {run_dir: ["train", *overrides(tiny_job(run_dir, data, **LONG))] for run_dir in (stopped, calm)}
    started = {run_dir: start(*command, cwd=tmp_path) for run_dir, command in commands.items()}
    wait_for(lambda: last_logged(stopped) >= 7)
    started[stopped].send_signal(signal.SIGTERM)
    _, err = finish(started[stopped], Stopped.exit_status)
    last = last_logged(stopped)
    assert 7 <= last < 30
    assert steps_of(stopped)[-1] == last, "saved at just the step that was interrupted"
    assert f"step {last} is saved" in err
    finish(start(*commands[stopped], cwd=tmp_path), 0)
    finish(started[calm], 0)
    assert read(calm / "run.json")["resolved"]["threads"] == 2
    assert_same_end(stopped, calm)
    assert_logged_once(stopped, 30)
    shown = tensorboard_steps(stopped)
    assert shown["train/loss"] == list(range(1, 31))
    assert shown["dev/bleu"] == [15, 30]
    assert shown == tensorboard_steps(calm)


KILLED: dict[str, Any] = {"max_steps": 80, "save_every": 4, "validate_every": 20}


@pytest.mark.faults
def test_train_loses_nothing_by_five_kills(corpus: DataConfig, tmp_path: Path) -> None:
    """SIGKILL at any moment, then the same command again."""
    draw = random.Random(5)
    job, run_dir = tiny_job(tmp_path / "a", corpus, **KILLED), tmp_path / "a"
    moments = [0, *sorted(draw.sample(range(1, 76), 4))]  # the first in start-up, then during these steps
    saved = seen = 0
    for moment in moments:
        process = start("train", *overrides(job), cwd=tmp_path, stderr=subprocess.DEVNULL)
        if moment:
            goal = max(moment, seen + 1)
            wait_for(lambda goal=goal: last_logged(run_dir) >= goal)  # type: ignore[misc]
        time.sleep(draw.uniform(0, 0.02) if moment else draw.uniform(0.1, 2))
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        log = (run_dir / "train.log").read_text(encoding="utf-8") if run_dir.exists() else ""
        seen = last_logged(run_dir)
        saved = max([saved, *map(int, re.findall(r"step (\d+): saved", log))])
        verified = [step for step in steps_of(run_dir) if is_verified(step_dir(run_dir, step))]
        assert max(verified, default=0) >= saved, "a committed checkpoint is lost"
    assert saved > 0
    finish(start("train", *overrides(job), cwd=tmp_path), 0)
    calm = run(tiny_job(tmp_path / "calm", corpus, **KILLED))
    assert_same_end(run_dir, calm)
    assert_logged_once(run_dir, 80)
    shown = tensorboard_steps(run_dir)
    assert shown["train/loss"] == list(range(1, 81)), "logged before the checkpoint, but not shown"
    assert shown["dev/bleu"] == [20, 40, 60, 80]
    assert not [path for path in run_dir.rglob(".*") if path.name != ".lock"], "leftovers"
