"""Memory before the first step: a trial that leaves no trace, and the largest batch that fits.

A GPU that runs out of memory is a training whose forward pass raises torch.OutOfMemoryError above a number of slots.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel

from support.corpora import assert_same_tensors, read, run, step_dir, steps_of, tiny_job, write_corpus
from support.ranks import ranks
from transformer.config.jobs import TrainJob
from transformer.config.settings import (
    AttentionKernel,
    DataConfig,
    LayoutKind,
    ModelConfig,
    Precision,
    SearchConfig,
)
from transformer.data.plan import Batching
from transformer.errors import InputError
from transformer.layout import Packed
from transformer.model.transformer import Transformer, parameters_by_name
from transformer.records import Resolved
from transformer.training import memory
from transformer.training.memory import Trial, batch_of_most, largest_batch, largest_that_fits, try_step
from transformer.training.step import Objective

CPU = torch.device("cpu")
LAYOUTS = [LayoutKind.padded, LayoutKind.packed]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def job_of(run_dir: Path, corpus: DataConfig, **recipe: Any) -> TrainJob:
    settings = {"max_steps": 2, "validate_every": 2, "save_every": 2, "average": 1, "keep_last": 2, **recipe}
    return replace(tiny_job(run_dir, corpus, **settings), search=SearchConfig(beam_size=1, max_extra=1))


@contextmanager
def memory_of(slots: int) -> Iterator[list[int]]:
    """Room for so many target slots of a micro-batch; what each trained one had."""
    seen: list[int] = []

    def allocate(module: nn.Module, arguments: Any, _out: object) -> None:
        if isinstance(module, Objective) and module.training:
            seen.append(arguments[0].target_in.numel())
            if seen[-1] > slots:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    handle = register_module_forward_hook(allocate)
    try:
        yield seen
    finally:
        handle.remove()


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """This CPU is tried as a GPU of a gibibyte is."""
    monkeypatch.setattr("transformer.training.start.can_try", lambda device: True)
    monkeypatch.setattr("transformer.training.memory.free_gpu_memory", lambda device: 2**29)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2**29)


# ---- a trial --------------------------------------------------------------------------------------------------------


def batching(max_tokens: int, capacities: tuple[int, int] | None) -> Batching:
    return Batching(
        mixture=[(1, 1.0)],
        seed=1,
        tokens_per_step=10_000,
        max_tokens=max_tokens,
        micro_batch_multiple=1,
        capacities=capacities,
    )


@pytest.mark.parametrize(
    ("max_tokens", "capacities", "source", "target", "tokens"),
    [
        (100, None, (10, 10), (10, 10), (100, 100)),
        (96, None, (8, 12), (8, 12), (96, 96)),
        (97, None, (8, 12), (8, 12), (96, 96)),  # a prime number: one slot is left
        (12, None, (1, 12), (1, 12), (12, 12)),
        (100, (128, 100), (128,), (100,), (80, 96)),  # packed, the shape is always the same
        (100, (10, 12), (10,), (12,), (10, 12)),
    ],
)
def test_largest_batch_is_full(
    max_tokens: int,
    capacities: tuple[int, int] | None,
    source: tuple[int, ...],
    target: tuple[int, ...],
    tokens: tuple[int, int],
) -> None:
    """The longest sentences have 10 and 12 tokens."""
    batch = largest_batch(batching(max_tokens, capacities), (10, 12), is_quadratic=False)
    assert (tuple(batch.source.shape), tuple(batch.target_in.shape)) == (source, target)
    assert (int((batch.source != 0).sum()), int((batch.target_out != 0).sum())) == tokens


def test_largest_batch_is_of_the_longest_sentences_where_weights_of_attention_are_kept() -> None:
    """Ten slots stay empty, and still 9 x 12 x 12 weights are more than the 13 x 9 x 9 of the fullest batch."""
    batch = largest_batch(batching(118, None), (10, 12), is_quadratic=True)
    assert batch.source.shape == (9, 12)


@pytest.mark.parametrize(
    ("tokens_per_step", "multiple", "shape"),
    [
        (60, 1, (7, 12)),  # 60 tokens are hardly ever more than 75 slots, and a sentence longer
        (60, 2, (4, 12)),  # a rank's half of them
        (10_000, 1, (83, 12)),  # they fill train.max_tokens
    ],
)
def test_largest_batch_is_no_larger_than_a_step(tokens_per_step: int, multiple: int, shape: tuple[int, int]) -> None:
    of_a_step = replace(batching(1_000, None), tokens_per_step=tokens_per_step, micro_batch_multiple=multiple)
    assert largest_batch(of_a_step, (10, 12), is_quadratic=True).source.shape == shape


def test_batch_of_most_has_as_many_sentences_as_a_micro_batch_of_the_step() -> None:
    """40 pairs of 2 and 3 tokens, of which 21 fit into 64 slots: so 20 go into each of two micro-batches."""
    step = np.array([[2, 3]] * 40, dtype=np.int32)
    batch = batch_of_most(replace(batching(64, (64, 64)), kernel=AttentionKernel.varlen), step)
    assert isinstance(batch.target_layout, Packed)
    assert torch.equal(batch.target_layout.offsets.unique(), torch.arange(0, 63, 3, dtype=torch.int32))


@pytest.mark.parametrize("slots", [0, 10**6])
def test_try_step_leaves_weights_gradients_and_modes_as_they_were(slots: int) -> None:
    torch.manual_seed(0)
    config = ModelConfig(n_layers=1, d_model=16, d_ff=32, n_heads=2, dropout=0.1)
    objective = Objective(Transformer(config, 40), 0.1).train()
    before = {name: tensor.clone() for name, tensor in parameters_by_name(objective.model).items()}
    batch = largest_batch(batching(100, None), (10, 12), is_quadratic=False)
    with memory_of(slots) as seen:
        needed = try_step(objective, [batch], device=CPU, precision=Precision.fp32)
    assert (needed, seen) == ((math.inf, [100]) if slots == 0 else (0.0, [100, 100]))
    assert all(torch.equal(tensor, before[name]) for name, tensor in parameters_by_name(objective.model).items())
    assert all(parameter.grad is None for parameter in objective.parameters())
    assert objective.training


@pytest.mark.parametrize("border", [0, 99, 100, 101, 227, 228, 229, 5_000, 9_999, 10_000, 10**9])
def test_largest_that_fits_is_less_than_128_below_the_border(border: int) -> None:
    asked = []

    def fits(number: int) -> bool:
        asked.append(number)
        return number <= border

    found = largest_that_fits(fits, smallest=100, largest=10_000)
    if border < 100:
        assert found is None
    else:
        assert found is not None
        assert min(border, 10_000) - 128 < found <= min(border, 10_000)
    assert len(asked) <= 10
    assert all(100 <= number <= 10_000 for number in asked)


# ---- a training -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("tried")
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_train_tries_its_largest_micro_batch_before_the_first_step(
    layout: LayoutKind, tmp_path: Path, corpus: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is that of a machine without a trial, to the last bit; a run that goes on is not tried again."""
    job = job_of(tmp_path / "tried", corpus, layout=layout)
    with memory_of(10**6) as seen:
        run_dir = run(job)
    assert seen[0] == seen[1] == max(seen)
    check = read(run_dir / "run.json")["memory"]
    assert check == {"max_tokens": 300, "is_estimate": False, "needed": 0, "available": 2**30}
    longer = replace(job, train=replace(job.train, max_steps=3))
    with memory_of(10**6) as again:
        run(longer)
    assert len(again) <= 3, "a step has at most three micro-batches"

    monkeypatch.undo()
    plain = run(job_of(tmp_path / "plain", corpus, layout=layout))
    for name in ("model", "optimizer"):
        assert_same_tensors(step_dir(run_dir, 2) / f"{name}.safetensors", step_dir(plain, 2) / f"{name}.safetensors")


@pytest.mark.usefixtures("tried")
def test_train_refuses_a_micro_batch_that_does_not_fit(tmp_path: Path, corpus: DataConfig) -> None:
    """Before a step is done; with less, the same command begins."""
    words = (
        r"^out of GPU memory in the trial before the first step: lower train.max_tokens \(now 300\), or let train.fit"
    )
    with memory_of(200), pytest.raises(InputError, match=words):
        run(job_of(tmp_path / "a", corpus, layout=LayoutKind.padded))
    assert steps_of(tmp_path / "a") == []
    with memory_of(200):
        run(job_of(tmp_path / "a", corpus, layout=LayoutKind.padded, max_tokens=200))


@pytest.mark.usefixtures("tried")
@pytest.mark.parametrize(("layout", "border"), [(LayoutKind.padded, 211), (LayoutKind.packed, 256)])
def test_train_fills_its_steps_with_the_largest_micro_batches_that_fit(
    layout: LayoutKind, border: int, tmp_path: Path, corpus: DataConfig
) -> None:
    job = job_of(tmp_path / "a", corpus, layout=layout, max_tokens=None, fit_memory=True)
    with memory_of(border) as seen:
        run_dir = run(job)
    record = read(run_dir / "run.json")
    found = record["resolved"]["max_tokens"]
    assert border - 128 < found <= border
    assert record["memory"]["max_tokens"] == found
    assert record["config"]["train"]["max_tokens"] is None
    assert max(slots for slots in seen[-4:]) <= border
    trained = replace(job, train=replace(job.train, max_steps=3))
    with memory_of(border) as again:
        run(trained)
    assert max(again) <= border, "a run that goes on keeps what was found"
    assert len(again) >= 2, "a step of 600 tokens takes several of them"


@pytest.mark.usefixtures("tried")
def test_train_compiles_for_no_size_that_it_tries(
    tmp_path: Path, corpus: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes minutes, and after two of them torch compiles for any size, which is slower."""
    compiled: list[nn.Module] = []
    monkeypatch.setattr(Objective, "compile", lambda objective: compiled.append(objective))
    monkeypatch.setattr("transformer.training.resolve.has_compiler", lambda device: True)
    before: list[int] = []
    fit = Trial.fit

    def note(trial: Trial, resolved: Resolved, objective: Objective) -> Resolved:
        found = fit(trial, resolved, objective)
        before.append(len(compiled))
        return found

    monkeypatch.setattr(Trial, "fit", note)
    run(job_of(tmp_path / "a", corpus, layout=LayoutKind.padded, max_tokens=None, fit_memory=True, compile=True))
    assert (before, len(compiled)) == ([0], 1)


@pytest.mark.usefixtures("tried")
def test_train_says_when_not_even_a_sentence_fits(tmp_path: Path, corpus: DataConfig) -> None:
    job = job_of(tmp_path / "a", corpus, max_tokens=None, fit_memory=True)
    with memory_of(5), pytest.raises(InputError, match=r"41 tokens, one sentence of data.filter.max_length: lower"):
        run(job)


@pytest.mark.usefixtures("tried")
def test_train_takes_what_fits_on_all_ranks(tmp_path: Path, corpus: DataConfig) -> None:
    """Rank 1 has less memory than rank 0."""

    def action() -> None:
        with memory_of(10**6 if os.environ["RANK"] == "0" else 180):
            run(job_of(tmp_path / "a", corpus, layout=LayoutKind.padded, max_tokens=None, fit_memory=True))

    assert ranks(2, action, tmp_path) == [0, 0], (tmp_path / "rank-1").read_text(encoding="utf-8")
    assert 180 - 128 < read(tmp_path / "a" / "run.json")["resolved"]["max_tokens"] <= 180


@pytest.mark.usefixtures("tried")
def test_train_tries_on_several_ranks_what_it_trains(tmp_path: Path, corpus: DataConfig) -> None:
    """The model under DDP: its buckets take memory, and the compiler must know of them when it compiles."""

    def action() -> None:
        tried_steps = []
        real = memory.try_step

        def recorded(objective: torch.nn.Module, *arguments: Any, **options: Any) -> float:
            tried_steps.append(type(objective))
            return real(objective, *arguments, **options)

        with pytest.MonkeyPatch.context() as patch, memory_of(10**6):
            patch.setattr(memory, "try_step", recorded)
            run(job_of(tmp_path / "a", corpus))
        assert tried_steps == [DistributedDataParallel]

    assert ranks(2, action, tmp_path) == [0, 0], (tmp_path / "rank-1").read_text(encoding="utf-8")


# ---- a CPU ----------------------------------------------------------------------------------------------------------


def test_train_tries_nothing_on_a_cpu(tmp_path: Path, corpus: DataConfig) -> None:
    with memory_of(10**6) as seen:
        run_dir = run(job_of(tmp_path / "a", corpus))
    assert read(run_dir / "run.json")["memory"] is None
    assert len(seen) <= 4, "two steps of two micro-batches"


def test_train_says_that_fit_memory_is_for_a_gpu(
    tmp_path: Path, corpus: DataConfig, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = run(job_of(tmp_path / "a", corpus, max_tokens=None, fit_memory=True))
    assert read(run_dir / "run.json")["resolved"]["max_tokens"] == 5_120
    assert "train.fit_memory tries steps on a GPU; on a CPU micro-batches have 5120 tokens" in caplog.messages
