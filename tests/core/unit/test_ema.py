"""The moving average of the weights: against its recurrence in float64, and in every place where weights are used."""

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from support.corpora import (
    as_a_command,
    assert_same_tensors,
    is_verified,
    read,
    results_of,
    run,
    step_dir,
    steps_of,
    tiny_job,
    write_corpus,
)
from support.interventions import after_each_update, before_each_pass, spoilt_gradients
from support.ranks import ranks
from transformer.average import average
from transformer.checkpoint import load_checkpoint
from transformer.config.jobs import AverageJob
from transformer.config.settings import DataConfig, Device, ModelConfig, Precision, SearchOverride, TrainConfig
from transformer.decoding.batched import BatchedDecoder
from transformer.decoding.loading import load_translator
from transformer.decoding.search import Hypothesis
from transformer.decoding.translator import Translator
from transformer.distributed import World
from transformer.evaluation.score import measure
from transformer.model.transformer import Transformer, parameters_by_name
from transformer.plugins import ScoreSettings
from transformer.training.optimizer import move_average
from transformer.training.state import TrainState
from transformer.training.step import Objective
from transformer.training.validate import DevSet, dev_loss

RECIPE: dict[str, Any] = {"max_steps": 12, "save_every": 2, "keep_last": 6, "validate_every": 6, "ema_decay": 0.3}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def finished(corpus: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tiny_job(tmp_path_factory.mktemp("runs") / "ema", corpus, **RECIPE))


def copies(tensors: Any) -> dict[str, Any]:
    return {name: tensor.detach().double().numpy().copy() for name, tensor in tensors.items()}


def weights(run_dir: Path, step: int, name: str = "model") -> dict[str, Tensor]:
    return load_file(step_dir(run_dir, step) / f"{name}.safetensors")


# ---- the recurrence -------------------------------------------------------------------------------------------------


def move(average: nn.Module, model: nn.Module, *, decay: float, updates: int, is_applied: bool = True) -> None:
    """`move_average`, its scalars on the device as in the loop."""
    flag = torch.tensor(is_applied)
    move_average(average, model, decay=decay, updates=torch.tensor(updates), is_applied=flag)


def test_move_average_leaves_everything_after_a_skipped_update() -> None:
    average, model = nn.Linear(3, 2), nn.Linear(3, 2)
    before = copies(parameters_by_name(average))
    move(average, model, decay=0.9, updates=0, is_applied=False)
    assert all(np.array_equal(before[name], w) for name, w in copies(parameters_by_name(average)).items())


def test_move_average_keeps_a_constant_and_has_these_first_decays() -> None:
    """d = 1/10, 2/11, 3/12, then the limit: a weight that jumps from 0 to 1 leaves the product of the d behind."""
    average, model = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    nn.init.zeros_(average.weight)
    nn.init.ones_(model.weight)
    left = []
    for updates in range(5):
        move(average, model, decay=0.2, updates=updates)
        left.append(1.0 - average.weight.item())
    assert left == pytest.approx([0.1, 0.1 * 2 / 11, *(0.1 * 2 / 11 * 0.2**n for n in (1, 2, 3))], abs=1e-7)
    nn.init.ones_(average.weight)
    move(average, model, decay=0.9999, updates=10**6)
    assert average.weight.item() == 1.0
    assert model.weight.item() == 1.0


def test_move_average_launches_one_kernel_more_for_each_weight_and_no_two() -> None:
    """On a GPU each is a launch by the host, in every step: what is the same for all weights is computed once."""

    def operators(n_layers: int) -> int:
        average, model = (nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(n_layers))) for _ in range(2))
        flag, updates = torch.tensor(True), torch.tensor(3.0)
        with torch.profiler.profile() as profile:
            move_average(average, model, decay=0.9, updates=updates, is_applied=flag)
        return sum(event.name in ("aten::_to_copy", "aten::lerp_") for event in profile.events())

    assert operators(5) - operators(2) == 3


@pytest.mark.parametrize(("dtype", "accuracy"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_move_average_is_the_recurrence(dtype: torch.dtype, accuracy: float) -> None:
    """200 updates over a module with a shared matrix, until the decay is at its limit."""
    torch.manual_seed(0)
    config = ModelConfig(n_layers=1, d_model=8, d_ff=12, n_heads=2, max_positions=16)
    model, moved = (Transformer(config, 13).to(dtype) for _ in range(2))
    moved.load_state_dict(model.state_dict())
    expected = copies(parameters_by_name(model))
    for t in range(200):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        kept = copies(parameters_by_name(model))
        move(moved, model, decay=0.95, updates=t)
        d = min(0.95, (1 + t) / (10 + t))
        expected = {name: d * a + (1 - d) * kept[name] for name, a in expected.items()}
        assert all(np.array_equal(kept[name], w) for name, w in copies(parameters_by_name(model)).items())
    found = parameters_by_name(moved)
    assert {tensor.dtype for tensor in found.values()} == {dtype}
    for name, tensor in copies(found).items():
        np.testing.assert_allclose(tensor, expected[name], rtol=accuracy, atol=accuracy)


def test_train_moves_the_average_after_each_update(corpus: DataConfig, tmp_path: Path) -> None:
    """From the weights that each step left, in float64; a skipped update is no update, and does not count."""
    trained: list[Objective] = []
    first: dict[str, Any] = {}
    steps: list[dict[str, Any]] = []  # the weights after each

    def note_first(objective: Objective) -> None:
        trained.append(objective)
        first.update({} if first else copies(parameters_by_name(objective.model)))

    def note() -> None:
        steps.append(copies(parameters_by_name(trained[-1].model)))

    with before_each_pass(note_first), after_each_update(note), spoilt_gradients((1, 5)):
        run_dir = run(tiny_job(tmp_path / "a", corpus, precision=Precision.fp64, **RECIPE))
    was_applied = [
        any((after[name] != before[name]).any() for name in after)
        for before, after in zip([first, *steps[:-1]], steps, strict=True)
    ]
    assert was_applied == [n not in (0, 4) for n in range(12)]
    expected, updates = first, 0
    for applied, now in zip(was_applied, steps, strict=True):
        if applied:
            d = min(0.3, (1 + updates) / (10 + updates))
            expected = {name: d * expected[name] + (1 - d) * now[name] for name in now}
            updates += 1
    found = copies(weights(run_dir, 12, "ema"))
    assert found.keys() == expected.keys()
    assert all(np.allclose(found[name], expected[name], rtol=1e-12, atol=1e-14) for name in found)


def test_train_has_the_same_weights_with_a_moving_average(corpus: DataConfig, finished: Path, tmp_path: Path) -> None:
    """Weights and moments are, to the last bit, those of a run without an average, validations in between and all."""
    plain = run(tiny_job(tmp_path / "plain", corpus, **RECIPE | {"ema_decay": None}))
    for step in steps_of(finished):
        for name in ("model.safetensors", "optimizer.safetensors"):
            assert_same_tensors(step_dir(finished, step) / name, step_dir(plain, step) / name)
    assert not (step_dir(plain, 12) / "ema.safetensors").exists()
    losses = [[row["loss"] for row in results_of(run_dir)["validations"]] for run_dir in (finished, plain)]
    assert losses[0] != losses[1]


# ---- where the average is used --------------------------------------------------------------------------------------


def translator_of(run_dir: Path, checkpoint: str) -> Translator:
    options = {"search": SearchOverride(beam_size=1), "device": Device.cpu, "precision": Precision.fp32}
    return load_translator(run_dir, checkpoint=checkpoint, **options)  # type: ignore[arg-type]


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_checkpoint_has_a_file_of_the_moving_average(finished: Path) -> None:
    for step in steps_of(finished):
        folder = step_dir(finished, step)
        assert is_verified(folder)
        assert set(read(folder / "MANIFEST.json")["files"]) == {
            *("model.safetensors", "optimizer.safetensors", "ema.safetensors", "state.json", "config.json")
        }
        assert weights(finished, step, "ema").keys() == weights(finished, step).keys()
        assert not same(weights(finished, step, "ema"), weights(finished, step))
        assert same(load_checkpoint(folder).weights(), weights(finished, step, "ema"))


@pytest.mark.parametrize("checkpoint", ["last", "best", "step-8"])
def test_load_translator_takes_the_moving_average(finished: Path, checkpoint: str) -> None:
    best: int = read(finished / "best.json")["step"]
    step = {"last": 12, "best": best, "step-8": 8}[checkpoint]
    loaded = parameters_by_name(translator_of(finished, checkpoint).model)
    assert same(loaded, weights(finished, step, "ema"))


def test_average_is_the_mean_of_the_moving_averages(finished: Path) -> None:
    assert results_of(finished)["averaged"] == [8, 10, 12]
    found = copies(load_file(finished / "averaged" / "model.safetensors"))
    means = [copies(weights(finished, step, "ema")) for step in (8, 10, 12)]
    for name, tensor in found.items():
        np.testing.assert_allclose(tensor, sum(mean[name] for mean in means) / 3, rtol=1e-6, atol=1e-7)
    assert {path.name for path in (finished / "averaged").glob("*.safetensors")} == {"model.safetensors"}
    before = (finished / "averaged" / "model.safetensors").read_bytes()
    with as_a_command():
        average(AverageJob(str(finished)))
    assert (finished / "averaged" / "model.safetensors").read_bytes() == before
    assert same(
        parameters_by_name(translator_of(finished, "auto").model), load_checkpoint(finished / "averaged").weights()
    )


def test_validate_measures_the_moving_average(
    corpus: DataConfig, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and BLEU of every validation are those of the model in ema.safetensors, loaded afresh."""
    sides = [Path(path).read_text(encoding="utf-8").split("\n")[:-1] for path in (corpus.dev.src, corpus.dev.tgt)]
    tokenizers = translator_of(finished, "last").tokenizers
    dev = DevSet.of(list(zip(*sides, strict=True)), tokenizers, max_pieces=1000)
    used: list[Transformer] = []
    real = BatchedDecoder.hypotheses
    dev_ids = tokenizers.source.encode(dev.sources)

    def noted(decoder: BatchedDecoder, sources: list[list[int]], **options: Any) -> list[list[Hypothesis]]:
        if sources == dev_ids:
            used.extend(decoder.models)
        return real(decoder, sources, **options)

    monkeypatch.setattr(BatchedDecoder, "hypotheses", noted)
    again = run(tiny_job(tmp_path / "a", corpus, **RECIPE))
    assert len(used) == 2
    assert same(parameters_by_name(used[-1]), weights(again, 12, "ema"))
    world = World(0, 1, {})
    for row in results_of(finished)["validations"]:
        fresh = translator_of(finished, f"step-{row['step']}")
        objective = Objective(fresh.model, 0.1)
        options: dict[str, Any] = {"max_tokens": 300, "device": torch.device("cpu"), "precision": Precision.fp32}
        assert dev_loss(objective, dev.store, world, **options) == (row["loss"], row["nll"])
        scores = measure(fresh.translate(dev.sources), dev.references, text=ScoreSettings("de"))
        assert (scores.bleu, scores.chrf) == (row["bleu"], row["chrf"])


@pytest.mark.ci
def test_move_average_is_the_same_on_every_rank(corpus: DataConfig, tmp_path: Path) -> None:
    """Started on two ranks, resumed on two; each prints what its average came to."""

    def action(steps: int) -> Callable[[], None]:
        def train() -> None:
            found: list[Any] = []
            real = TrainState.tensors

            def noted(state: TrainState) -> Any:
                """What every rank calls before a commit, though rank 0 alone writes."""
                found[:] = [state.ema]
                return real(state)

            pytest.MonkeyPatch().setattr(TrainState, "tensors", noted)  # in this process, which ends with the test
            run(tiny_job(tmp_path / "a", corpus, **RECIPE | {"max_tokens": 100, "max_steps": steps}))
            content = b"".join(tensor.numpy().tobytes() for tensor in parameters_by_name(found[0]).values())
            sys.stdout.write(f"\n{hashlib.sha256(content).hexdigest()}")

        return train

    for steps in (4, 8):
        assert ranks(2, action(steps), tmp_path) == [0, 0]
        printed = [(tmp_path / name).read_text(encoding="utf-8").rpartition("\n")[2] for name in ("rank-0", "rank-1")]
        assert len(printed[0]) == 64
        assert printed[0] == printed[1]


@pytest.mark.plugins
def test_summarise_counts_the_memory_of_the_moving_average() -> None:
    from transformer.tools.summary.command import summarise
    from transformer.tools.summary.job import SummaryJob

    plain, averaging = (summarise(SummaryJob(train=TrainConfig(ema_decay=decay))).memory for decay in (None, 0.999))
    assert plain.ema == 0
    assert averaging.ema == averaging.weights == plain.weights == 63_045_632 * 4
    assert averaging.total == plain.total + plain.weights
