"""A run that goes on with other numbers of ranks is the run of one process: the same sentences, the same weights."""

import json
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from support.corpora import assert_same_tensors, run, spell, step_dir, tiny_job, write_corpus, write_pair
from support.ranks import ranks
from support.tiers import tiers
from transformer.config.jobs import TrainJob
from transformer.config.settings import DataConfig, LayoutKind, OptimizerKind, Precision
from transformer.data import loader
from transformer.data.batch import collate
from transformer.training import start
from transformer.training.record import start_run


@dataclass(frozen=True)
class Schedule:
    """A run's sentence pairs, budgets and optimizer, and which number of ranks takes it to which step."""

    pairs: int
    tokens_per_step: int
    max_tokens: int
    layout: LayoutKind
    legs: tuple[tuple[int, int], ...]  # ranks, and the step they stop after
    optimizer: OptimizerKind

    @property
    def steps(self) -> int:
        """The last step of all."""
        return self.legs[-1][1]


def draw_schedule(seed: int) -> Schedule:
    """Three to five legs of one to four ranks, mostly cut within an epoch; a step of one to a dozen micro-batches."""
    draw = random.Random(seed)
    pairs = draw.choice([draw.randrange(1, 41), draw.randrange(1, 41), 317])
    tokens_per_step = draw.choice([60, 120, 200]) if pairs < 100 else draw.choice([600, 1200])
    steps = 3 * max(1, round(pairs * 13 / tokens_per_step)) + draw.randrange(3)
    cuts = sorted(draw.sample(range(1, max(steps, 4)), k=min(draw.randrange(2, 5), max(steps, 4) - 1)))
    return Schedule(
        pairs=pairs,
        tokens_per_step=tokens_per_step,
        max_tokens=draw.choice([45, 70, max(45, tokens_per_step)]),
        layout=draw.choice([LayoutKind.padded, LayoutKind.packed]),
        legs=tuple((draw.randrange(1, 5), step) for step in [*cuts, max(cuts) + draw.randrange(1, 4)]),
        optimizer=draw.choice(list(OptimizerKind)),
    )


def write_digits(folder: Path, count: int) -> DataConfig:
    """A corpus with so many training pairs, none of which is twice there."""
    data = write_corpus(folder)
    draw = random.Random(count)
    seen = set[tuple[int, ...]]()
    while len(seen) < count:
        seen.add(tuple(draw.randrange(10) for _ in range(draw.randrange(3, 10))))
    sides = [spell(digits) for digits in sorted(seen)]
    data.train = write_pair(folder, f"train{count}", sides)
    data.test = {}
    return data


def note_sentences(path: Path) -> None:
    """Write down, in this process, the sentences of every micro-batch that it trains on."""
    make_step = loader._make_step
    current: list[Any] = []

    def noted_step(*arguments: Any, **options: Any) -> Any:
        current[:] = [options["place"].epoch, options["place"].step]
        return make_step(*arguments, **options)

    def noted_collate(store: Any, ids: Any, *arguments: Any, **options: Any) -> Any:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([*current, ids.tolist()]) + "\n")
        return collate(store, ids, *arguments, **options)

    patch = pytest.MonkeyPatch()  # this process ends with its leg
    patch.setattr(loader, "_make_step", noted_step)
    patch.setattr(loader, "collate", noted_collate)


def job(run_dir: Path, data: DataConfig, schedule: Schedule, *, until: int, tokenizer: Path) -> TrainJob:
    """The run up to that step; no step is prepared that is not taken."""
    found = tiny_job(
        run_dir,
        data,
        precision=Precision.fp64,
        layout=schedule.layout,
        optimizer=schedule.optimizer,
        weight_decay=0.3 if schedule.optimizer is OptimizerKind.muon else 0.0,
        tokens_per_step=schedule.tokens_per_step,
        max_tokens=schedule.max_tokens,
        max_steps=until,
        save_every=1000,
        validate_every=1000,
        average=1,
        prefetch=0,
    )
    found.tokenizer.model = str(tokenizer)
    return found


def check(schedule: Schedule, folder: Path) -> str:
    """Train by the schedule, and in one process with the same micro-batches; what was found, in one line."""
    full = write_corpus(folder / "full")
    tokenizer = run(tiny_job(folder / "first", full, max_steps=1, average=1)) / "tokenizer.model"
    data = write_digits(folder / "corpus", schedule.pairs)

    # By the schedule.
    for number, (size, until) in enumerate(schedule.legs):

        def leg(number: int = number, until: int = until) -> None:
            note_sentences(folder / f"ids-{number}-{os.environ['RANK']}")
            run(job(folder / "elastic", data, schedule, until=until, tokenizer=tokenizer))

        assert ranks(size, leg, folder) == [0] * size, [(folder / f"rank-{n}").read_text() for n in range(size)]

    # In one process, which cuts its steps as the ranks of the first leg did.
    def straight() -> None:
        def as_if(*arguments: Any, world_size: int, **more: Any) -> Any:
            assert world_size == 1
            return start_run(*arguments, world_size=schedule.legs[0][0], **more)

        pytest.MonkeyPatch().setattr(start, "start_run", as_if)
        run(job(folder / "straight", data, schedule, until=schedule.steps, tokenizer=tokenizer))

    assert ranks(1, straight, folder) == [0], (folder / "rank-0").read_text(encoding="utf-8")

    epochs = assert_each_sentence_once(folder, schedule)
    largest = largest_difference(folder / "elastic", folder / "straight", schedule.steps)
    assert largest < 1e-9
    return f"{schedule}: {epochs} epochs, largest difference {largest:.1e}"


def assert_each_sentence_once(folder: Path, schedule: Schedule) -> int:
    """Every epoch but the last has each sentence once; the last has none twice. How many were full."""
    seen: dict[int, Counter[int]] = {}
    for path in folder.glob("ids-*"):
        for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
            epoch, _, ids = json.loads(line)
            seen.setdefault(epoch, Counter()).update(ids)
    last = max(seen)
    assert sorted(seen) == list(range(last + 1))
    for epoch in range(last):
        assert seen[epoch] == Counter(range(schedule.pairs)), f"epoch {epoch}"
    assert set(seen[last].values()) <= {1}
    return last + (len(seen[last]) == schedule.pairs)


def largest_difference(left: Path, right: Path, step: int) -> float:
    """Between weights and moments after that step."""
    tensors = [
        load_file(step_dir(path, step) / "model.safetensors")
        | load_file(step_dir(path, step) / "optimizer.safetensors")
        for path in (left, right)
    ]
    assert tensors[0].keys() == tensors[1].keys()
    return max(float((tensors[0][name] - tensors[1][name]).abs().max()) for name in tensors[0])


@pytest.mark.parametrize("optimizer", tiers([], OptimizerKind, pytest.mark.ci))
def test_train_on_changing_ranks_is_the_run_of_one_process(tmp_path: Path, optimizer: OptimizerKind) -> None:
    schedule = Schedule(
        pairs=23,
        tokens_per_step=60,
        max_tokens=45,
        layout=LayoutKind.padded,
        legs=((2, 3), (3, 5), (1, 8)),
        optimizer=optimizer,
    )
    check(schedule, tmp_path)


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(12))
def test_train_on_twelve_schedules_of_ranks_is_the_run_of_one_process(
    tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str], record_property: Callable[[str, object], None]
) -> None:
    found = check(draw_schedule(seed), tmp_path)
    record_property("elastic schedules", 1)
    with capsys.disabled():
        print(f"\n{found}")


@pytest.mark.faults
def test_train_on_three_ranks_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Though DDP adds up the gradients of its first step in another order than those of all others."""
    data = write_corpus(tmp_path / "corpus")
    data.test = {}

    def train_until(last: int, name: str) -> None:
        settings: dict[str, Any] = {"save_every": 2, "validate_every": 100, "average": 1, "max_tokens": 100}
        job = tiny_job(tmp_path / name, data, max_steps=last, **settings)
        assert ranks(3, lambda: run(job), tmp_path) == [0] * 3, (tmp_path / "rank-0").read_text(encoding="utf-8")

    train_until(4, "straight")
    for last in (2, 4):
        train_until(last, "resumed")
    straight, resumed = (step_dir(tmp_path / name, 4) / "model.safetensors" for name in ("straight", "resumed"))
    assert_same_tensors(straight, resumed)
