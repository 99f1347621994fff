"""Numbers that are not finite, put into a training: none is applied, none is saved, all ranks agree, and it is said.

What spoils a step comes through torch's global hooks, so that the training itself is the package's, from the command's
function to the files.
"""

import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from support.corpora import is_verified, progress_of, read, run, step_dir, steps_of, tiny_job, write_corpus
from support.ranks import ranks
from transformer.config.jobs import TrainJob
from transformer.config.settings import DataConfig, Precision, SearchConfig
from transformer.errors import NumericalError
from transformer.training.step import Objective

Note = Callable[[str, object], None]

STEPS, SAVE = 30, 4
IN_A_ROW = 10
WEIGHT = "encoder.0.feed_forward.W_1.weight"
KINDS = ("loss", "gradient", "weight", "overflow")


@dataclass(frozen=True)
class Fault:
    """What is put into the training, and before which of its steps, counted from 1."""

    kind: str
    value: float
    steps: tuple[int, ...]

    @property
    def is_lasting(self) -> bool:
        """Whether the run cannot go on: a weight stays spoilt, and ten in a row are too many."""
        return self.kind == "weight" or len(self.steps) >= IN_A_ROW


@contextmanager
def injected(fault: Fault) -> Iterator[list[int]]:
    """Spoil what is trained in this process, of several ranks on the last one; the steps at which that changed a thing.

    A step that is spoilt must leave weights and moments as they were, on every rank.
    """
    step, before, changed = 1, dict[str, Tensor](), list[int]()
    is_here = os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1)

    def spoil(module: nn.Module, _args: object, out: Any) -> Any:
        if not (isinstance(module, Objective) and module.training and is_here and step in fault.steps):
            return None
        loss, plain = out
        match fault.kind:
            case "loss":  # its value alone: the gradient is as it was
                return loss + fault.value, plain + fault.value
            case "overflow":  # beyond the range of fp16, on the way back
                return loss * fault.value, plain
            case "gradient":
                handle: Any = module.model.get_parameter(WEIGHT).register_hook(
                    lambda gradient: spoil_one(gradient, handle)
                )
        return None

    def spoil_one(gradient: Tensor, handle: Any) -> Tensor:
        """One number of the gradient of one weight, once."""
        handle.remove()
        gradient = gradient.clone()
        gradient.view(-1)[7] = fault.value
        return gradient

    def look(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        if fault.kind == "weight" and is_here and step in fault.steps:
            with torch.no_grad():
                optimizer.param_groups[0]["params"][1].view(-1)[7] = fault.value
        before.clear()
        before.update(contents(optimizer))

    def compare(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        nonlocal step
        after = contents(optimizer)
        is_same = all(torch.equal(tensor, after[name]) for name, tensor in before.items())
        if step in fault.steps and fault.kind != "weight" and not is_same:
            changed.append(step)
        step += 1

    handles = [
        register_module_forward_hook(spoil),
        register_optimizer_step_pre_hook(look),
        register_optimizer_step_post_hook(compare),
    ]
    try:
        yield changed
    finally:
        for handle in handles:
            handle.remove()


def contents(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies of the weights, and of Adam's moments once there are some."""
    found = {}
    for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
        found[f"{number}"] = parameter.detach().clone()
        found |= {f"{number}.{name}": tensor.clone() for name, tensor in optimizer.state[parameter].items()}
    return found


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def job_for(fault: Fault, run_dir: Path, corpus: DataConfig) -> TrainJob:
    recipe: dict[str, Any] = {
        "max_steps": STEPS,
        "save_every": SAVE,
        "validate_every": STEPS,
        "keep_last": STEPS,
        "ema_decay": 0.9,
    }
    precision = Precision.fp16 if fault.kind == "overflow" else Precision.fp32
    job = tiny_job(run_dir, corpus, **recipe, precision=precision, average=1)
    return replace(job, search=SearchConfig(beam_size=1, max_extra=1))  # translations are not the point


def train_with(fault: Fault, job: TrainJob) -> str:
    """Train; the error that ended it, or nothing."""
    with injected(fault) as changed:
        try:
            run(job)
            return ""
        except NumericalError as error:
            return str(error)
        finally:
            assert changed == []


def assert_sound(run_dir: Path) -> None:
    """Every checkpoint verifies, and every number in it is finite; JSON writes one that is not as null."""
    for step in steps_of(run_dir):
        folder = step_dir(run_dir, step)
        assert is_verified(folder)
        for path in folder.glob("*.safetensors"):
            assert all(torch.isfinite(tensor).all() for tensor in load_file(path).values()), path
        assert None not in read(folder / "state.json")["training"]["window"].values()


def assert_survived(fault: Fault, run_dir: Path, said: str) -> None:
    """The run came to its end without these updates."""
    assert said == ""
    assert_sound(run_dir)
    progress = progress_of(run_dir, STEPS)["training"]["progress"]
    assert (progress["skipped"], progress["first_skipped"]) == (len(fault.steps), fault.steps[0])
    assert read(run_dir / "results.json")["skipped_updates"] == len(fault.steps)
    assert float(load_file(step_dir(run_dir, STEPS) / "optimizer.safetensors")["updates"]) == STEPS - len(fault.steps)


def assert_stopped(fault: Fault, run_dir: Path, said: str) -> None:
    """The run ended in words that name the newest of its checkpoints, all of which are finite."""
    assert_sound(run_dir)
    newest = steps_of(run_dir)[-1] if steps_of(run_dir) else 0
    assert ("no checkpoint" if newest == 0 else f"finite weights are in {step_dir(run_dir, newest)};") in said
    assert f"transformer replay run_dir={run_dir}" in said
    assert "\n" not in said
    if fault.kind == "weight":  # the weights are lost, so that the last regular checkpoint is all there is
        assert newest == (fault.steps[0] - 1) // SAVE * SAVE
        return

    # The position is saved, for no update has touched the weights since the step before the first fault.
    streak = re.match(r"(\d+) consecutive updates.* up to step (\d+):", said)
    assert streak is not None
    count, last = int(streak[1]), int(streak[2])
    assert newest == last == fault.steps[0] - 1 + count
    progress = progress_of(run_dir, newest)["training"]["progress"]
    assert (progress["skipped"], progress["streak"]) == (count, count)
    assert count == (17 if fault.kind == "overflow" else IN_A_ROW)  # from 65,536 to below 1


PLACES = ("first", "middle", "twice", "all")


def fault_of(kind: str, number: int, place: str) -> Fault:
    """The `number`-th of three values of a kind, at a place of a name."""
    values = (1e12, 1e20, 1e30) if kind == "overflow" else (math.nan, math.inf, -math.inf)
    middle = {"loss": 5, "gradient": 7, "weight": 6, "overflow": 9}[kind] + 2 * number
    steps = {"first": (1,), "middle": (middle,), "twice": (middle, middle + 3), "all": tuple(range(middle, 2 * STEPS))}
    return Fault(kind, values[number], steps[place])


def inject(fault: Fault, folder: Path, corpus: DataConfig) -> None:
    """Train with a fault, alone, and judge what is left."""
    job = job_for(fault, folder / "run", corpus)
    said = train_with(fault, job)
    (assert_stopped if fault.is_lasting else assert_survived)(fault, folder / "run", said)


def inject_on_two(fault: Fault, folder: Path, corpus: DataConfig) -> None:
    """The same on two ranks, of which one meets the fault: both must end alike."""
    job = job_for(fault, folder / "run", corpus)

    def action() -> None:
        said = train_with(fault, job)
        if said:
            raise NumericalError(said)

    statuses = ranks(2, action, folder)
    outputs = [(folder / f"rank-{rank}").read_text(encoding="utf-8") for rank in (0, 1)]
    assert statuses == ([6, 6] if fault.is_lasting else [0, 0]), outputs
    said = outputs[0].removeprefix("NumericalError: ").rstrip("\n")
    (assert_stopped if fault.is_lasting else assert_survived)(fault, folder / "run", said)


@pytest.mark.parametrize(
    ("kind", "number", "place"),
    [("loss", 0, "twice"), ("weight", 2, "middle")],
)
def test_train_neither_applies_nor_saves_what_is_not_finite(
    kind: str, number: int, place: str, tmp_path: Path, corpus: DataConfig
) -> None:
    inject(fault_of(kind, number, place), tmp_path, corpus)


@pytest.mark.parametrize(("kind", "number", "place"), [("loss", 1, "all")])
def test_train_on_two_ranks_agrees_on_what_is_not_finite(
    kind: str, number: int, place: str, tmp_path: Path, corpus: DataConfig
) -> None:
    inject_on_two(fault_of(kind, number, place), tmp_path, corpus)


@pytest.mark.faults
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_train_neither_applies_nor_saves_any_of_forty_eight_faults(
    kind: str, number: int, place: str, tmp_path: Path, corpus: DataConfig, record_property: Note
) -> None:
    record_property("numbers that are not finite", 1)
    inject(fault_of(kind, number, place), tmp_path, corpus)


@pytest.mark.faults
@pytest.mark.parametrize("place", ["middle", "twice", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_train_on_two_ranks_agrees_on_twelve_faults(
    kind: str, place: str, tmp_path: Path, corpus: DataConfig, record_property: Note
) -> None:
    record_property("numbers that are not finite", 1)
    inject_on_two(fault_of(kind, 0, place), tmp_path, corpus)


def test_train_goes_on_from_the_position_that_it_saved(tmp_path: Path, corpus: DataConfig) -> None:
    """Once what spoilt it is gone, as a bad machine is; the steps that were skipped stay skipped."""
    fault = fault_of("gradient", 0, "all")
    job = job_for(fault, tmp_path / "run", corpus)
    assert train_with(fault, job)
    stopped_at = steps_of(tmp_path / "run")[-1]
    assert stopped_at == fault.steps[0] - 1 + IN_A_ROW
    before = step_dir(tmp_path / "run", (fault.steps[0] - 1) // SAVE * SAVE)
    assert before.exists()
    run(job)
    assert_sound(tmp_path / "run")
    progress = progress_of(tmp_path / "run", STEPS)["training"]["progress"]
    assert (progress["skipped"], progress["streak"], progress["longest_streak"]) == (IN_A_ROW, 0, IN_A_ROW)
