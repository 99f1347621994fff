"""What a GPU would record of a step, computed on a CPU without recording it: the numbers are those of `Computation`."""

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.corpora import metrics_of, read, run, tiny_job, write_corpus
from support.ranks import ranks
from support.tiers import tiers
from transformer.compute import loss_scaler
from transformer.config.jobs import TrainJob
from transformer.config.settings import ModelConfig, OptimizerKind, Precision, TrainConfig
from transformer.data.batch import Batch, collate
from transformer.data.loader import Step
from transformer.data.store import Store
from transformer.distributed import World, join_world
from transformer.model.transformer import Transformer
from transformer.training.cuda_graphs import GraphedComputation
from transformer.training.optimizer import build_optimizer, moments_by_name
from transformer.training.step import Computation, Objective, train_step

CPU = torch.device("cpu")
MODEL = ModelConfig(n_layers=2, d_model=16, d_ff=24, n_heads=2, dropout=0.2, max_positions=32)
SLOTS = (64, 64)
draw = np.random.default_rng(0)
STORE = Store.from_pieces(*([draw.integers(5, 90, size=n).tolist() for n in (5, 9, 3, 12, 7, 4, 8, 6)] for _ in "st"))
PARTS = [[0, 1, 2], [3, 4], [5, 6, 7]]  # the sentences of micro-batches
NONE: list[int] = []


def batch_of(ids: list[int]) -> Batch:
    return collate(STORE, np.array(ids, dtype=np.int64), SLOTS)


def computation_of(
    kind: OptimizerKind = OptimizerKind.adam, clip_norm: float | None = 1.0, seed: int = 1
) -> Computation:
    torch.manual_seed(seed)
    model = Transformer(MODEL, 100).double()
    recipe = TrainConfig(optimizer=kind, weight_decay=0.1)
    scaler = loss_scaler(CPU, Precision.fp64)
    objective = Objective(model, 0.1).train()
    return Computation(objective, build_optimizer(model, recipe), scaler, clip_norm, CPU, Precision.fp64)


def step_of(index: int, parts: list[list[int]], *, tokens: float | None = None) -> Step:
    """A step of these micro-batches; `tokens` stands in for its target tokens."""
    everything = [sentence for part in parts for sentence in part]
    counted = int(STORE.lengths[np.array(everything)][:, 1].sum()) if tokens is None else tokens
    batches = [(m, batch_of(part)) for m, part in enumerate(parts)]
    return Step(0, 0, index, batches, counted, source_tokens=1, sentences=1, slots=128)  # type: ignore[arg-type]


def trained(
    computation: Computation, steps: list[Step], *, world_size: int = 1
) -> tuple[list[list[float]], dict[str, Tensor]]:
    """What each step measures, and weights and moments after them."""
    found = []
    for index, step in enumerate(steps):
        result = train_step(computation, step, world_size=world_size, rate=1e-3 * (1 + index % 2), seed=1)
        found.append([float(value) for value in vars(result).values()])
    (model,) = (module for module in computation.objective.modules() if isinstance(module, Transformer))
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return found, weights | moments_by_name(model, computation.optimizer)


def assert_same(found: Any, wanted: Any) -> None:
    """Bit for bit, NaN counted as itself."""
    numbers, tensors = found
    np.testing.assert_array_equal(numbers, wanted[0])
    assert tensors.keys() == wanted[1].keys()
    assert [name for name, tensor in tensors.items() if not torch.equal(tensor, wanted[1][name])] == []


@pytest.mark.parametrize("kind", OptimizerKind)
def test_graphed_computation_is_the_launched_one(kind: OptimizerKind) -> None:
    """Steps of one micro-batch, and of several, in turns; one whose loss is not finite is skipped."""
    parts = [PARTS[:1], PARTS[:2], PARTS[2:], PARTS, PARTS[1:2], PARTS[1:], PARTS[:1]]
    steps = [step_of(index, some, tokens=math.nan if index in (2, 5) else None) for index, some in enumerate(parts)]
    launched = trained(computation_of(kind), steps)
    assert [values[-1] for values in launched[0]] == [1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0]  # applied
    assert_same(trained(GraphedComputation(computation_of(kind), reduces=False), steps), launched)


def test_graphed_computation_of_one_micro_batch_is_that_of_two_graphs() -> None:
    """An empty micro-batch beside it adds nothing: but then gradients are added up where they lie."""
    tokens = [int(STORE.lengths[np.array(part)][:, 1].sum()) for part in PARTS]
    alone = [step_of(index, [part], tokens=tokens[index]) for index, part in enumerate(PARTS)]
    beside = [step_of(index, [part, NONE], tokens=tokens[index]) for index, part in enumerate(PARTS)]
    wanted = trained(GraphedComputation(computation_of(), reduces=False), beside)
    assert_same(trained(GraphedComputation(computation_of(), reduces=False), alone), wanted)


@pytest.mark.parametrize("in_place", [False, True])
def test_try_gradient_is_that_of_a_step_and_changes_nothing(in_place: bool) -> None:
    """Whatever the norm at which a step would clip it."""
    graphed = GraphedComputation(computation_of(clip_norm=1e-3), reduces=False)
    before = copy.deepcopy(graphed.objective.state_dict())
    batch = batch_of(PARTS[0])
    losses, gradients = graphed.try_gradient(batch, seed=5, share=0.1, in_place=in_place)

    plain = computation_of()
    torch.manual_seed(5)
    wanted = plain.add_gradient(batch, 0.1)
    assert torch.equal(losses, wanted)
    by_name = dict(plain.objective.named_parameters())
    assert gradients.keys() == by_name.keys()
    assert all(torch.equal(gradient, by_name[name].grad) for name, gradient in gradients.items())  # type: ignore[arg-type]

    assert all(torch.equal(tensor, before[name]) for name, tensor in graphed.objective.state_dict().items())
    steps = [step_of(index, [part]) for index, part in enumerate(PARTS)]
    assert_same(trained(graphed, steps), trained(computation_of(clip_norm=1e-3), steps))


def test_graphed_computation_records_nothing_on_a_cpu() -> None:
    graphed = GraphedComputation(computation_of(), reduces=False)
    assert (graphed.is_recording, graphed.failure) == (False, None)
    graphed.make_room()
    assert replace(computation_of(), clip_norm=None).failure is None


# ---- several ranks --------------------------------------------------------------------------------------------------

SHARED: list[tuple[list[list[int]], bool]] = [  # the micro-batches of a step, and whether the last rank finds NaN
    (PARTS, False),  # two for rank 0, one for rank 1
    (PARTS[:1], False),  # none for the others
    (PARTS[1:], True),
    ([*PARTS, *PARTS], False),
    (PARTS, False),
]


def shared_steps(world: World) -> list[Step]:
    """The part of each step that this rank has."""
    steps = []
    for index, (parts, has_nan) in enumerate(SHARED):
        tokens = math.nan if has_nan and world.rank == world.size - 1 else None
        whole = step_of(index, parts, tokens=tokens)
        own = [(m, batch) for m, batch in whole.micro_batches if m % world.size == world.rank]
        steps.append(replace(whole, micro_batches=own or [(world.rank, batch_of(NONE))]))
    return steps


@pytest.mark.parametrize("size", tiers([2], [3, 4], pytest.mark.ci))
def test_graphed_computation_of_several_ranks_is_that_of_ddp(size: int, tmp_path: Path) -> None:
    """Uneven micro-batches, a rank without any, NaN on one rank. They begin with other weights than rank 0.

    For two ranks to the last bit; more of them add up in another order.
    """

    def train() -> None:
        with join_world(CPU) as world:
            found = []
            for graphed in (False, True):
                computation = computation_of(seed=1 + world.rank)
                if graphed:
                    computation = GraphedComputation(computation, reduces=True)
                else:
                    computation = replace(computation, objective=world.wrap(computation.objective))
                found.append(trained(computation, shared_steps(world), world_size=world.size))

            (launched, wanted), (replayed, weights) = found
            assert [values[-1] for values in replayed] == [1.0, 1.0, 0.0, 1.0, 1.0]  # applied
            limit = 0.0 if size == 2 else 1e-12
            np.testing.assert_allclose(replayed, launched, rtol=limit, atol=0.0)
            assert weights.keys() == wanted.keys()
            for name, tensor in weights.items():
                torch.testing.assert_close(tensor, wanted[name], rtol=limit, atol=limit)

            # And every rank has the same.
            digest = float(sum(tensor.double().abs().sum() for tensor in weights.values()))
            assert len(set(world.gather(digest))) == 1

    statuses = ranks(size, train, tmp_path)
    assert statuses == [0] * size, (tmp_path / "rank-0").read_text(encoding="utf-8")


def test_train_that_replays_on_several_ranks_and_goes_on_with_another_number(tmp_path: Path) -> None:
    """On a CPU, where nothing is recorded: one rank, two, and one again; losses as those of one rank by itself."""
    corpus = write_corpus(tmp_path)
    recipe: dict[str, Any] = {"max_steps": 9, "validate_every": 9, "save_every": 3, "average": 1}
    job = tiny_job(tmp_path / "one", corpus, cuda_graphs=True, precision=Precision.fp64, **recipe)
    shared = replace(job, run_dir=str(tmp_path / "several"))

    def train(job: TrainJob, steps: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("transformer.training.resolve._replays", lambda *given, **how: True)
            run(replace(job, train=replace(job.train, max_steps=steps)))
        assert read(Path(job.run_dir) / "run.json")["resolved"]["cuda_graphs"]

    assert ranks(1, lambda: train(job, 9), tmp_path) == [0]
    for steps, size in ((3, 1), (6, 2), (9, 1)):
        statuses = ranks(size, lambda steps=steps: train(shared, steps), tmp_path)  # type: ignore[misc]
        assert statuses == [0] * size, (tmp_path / "rank-0").read_text(encoding="utf-8")

    one, several = (
        [(line["train/loss"], line["train/gradient_norm"]) for line in metrics_of(Path(folder)) if "train/loss" in line]
        for folder in (job.run_dir, shared.run_dir)
    )
    assert len(one) == 9
    np.testing.assert_allclose(several, one, rtol=1e-9)
