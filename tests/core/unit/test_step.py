"""One update: its gradient, its randomness, what is never applied, and Adam against the published algorithm."""

import copy
import gc
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional as F
from torch.optim import Adam, Optimizer

from transformer.compute import autocast, product_dtype
from transformer.config.settings import (
    AttentionKernel,
    ModelConfig,
    Norm,
    OptimizerKind,
    Precision,
    Score,
    Start,
    TrainConfig,
)
from transformer.data.batch import Batch, collate
from transformer.data.loader import Step
from transformer.data.plan import split_step
from transformer.data.store import Store
from transformer.layout import Packed, Padded
from transformer.model.attention import AttentionSpec
from transformer.model.transformer import Transformer
from transformer.training.muon import orthogonal
from transformer.training.optimizer import build_optimizer, load_moments, moments_by_name, set_rate
from transformer.training.step import Computation, Objective, train_step

pytestmark = pytest.mark.usefixtures("float64")

V, EPS = 13, 0.1
CPU = torch.device("cpu")
PLAIN = ModelConfig(n_layers=1, d_model=8, d_ff=12, n_heads=2, dropout=0.0, max_positions=16)
DROPPING = replace(PLAIN, dropout=0.3)
Pair = tuple[list[int], list[int]]
PAIRS: list[Pair] = [  # pieces, without BOS and EOS
    ([5, 9, 4], [6, 11]),
    ([7], [5, 5, 10, 7]),
    ([4, 4, 12, 8, 6], []),
    ([], [9]),
    ([10, 11], [12, 4, 8]),
]
TARGET_TOKENS = 15  # 10 pieces and 5 times EOS


def pad(sentences: list[list[int]]) -> tuple[Tensor, Padded]:
    lengths = [len(sentence) for sentence in sentences]
    rows = [sentence + [0] * (max(lengths) - len(sentence)) for sentence in sentences]
    return torch.tensor(rows), Padded.of(lengths, max(lengths))


def batch_of(pairs: list[Pair]) -> Batch:
    """BOS 2, EOS 3; written here and not with `collate`, which has tests of its own."""
    if not pairs:
        nothing, empty = torch.zeros(0, dtype=torch.int64), Padded.of([0], 1)
        return Batch(
            torch.zeros(1, 1, dtype=torch.int64), empty, torch.zeros(1, 1, dtype=torch.int64), empty, nothing, nothing
        )
    source, source_layout = pad([[*source, 3] for source, _ in pairs])
    target_in, target_layout = pad([[2, *target] for _, target in pairs])
    width = target_in.shape[1]
    rows = [row * width + t for row, (_, target) in enumerate(pairs) for t in range(len(target) + 1)]
    out = [token for _, target in pairs for token in [*target, 3]]
    return Batch(source, source_layout, target_in, target_layout, torch.tensor(rows), torch.tensor(out))


def step_of(
    parts: list[list[Pair]], *, epoch: int = 0, chapter: int = 0, index: int = 0, target_tokens: int | None = None
) -> Step:
    everything = [pair for part in parts for pair in part]
    return Step(
        epoch=epoch,
        chapter=chapter,
        index=index,
        micro_batches=list(enumerate(map(batch_of, parts))),
        target_tokens=target_tokens or sum(len(target) + 1 for _, target in everything),
        source_tokens=sum(len(source) + 1 for source, _ in everything),
        sentences=len(everything),
        slots=0,
    )


def build(config: ModelConfig = PLAIN, **recipe: Any) -> tuple[Objective, Optimizer]:
    torch.manual_seed(0)
    objective = Objective(Transformer(config, V), EPS)
    return objective, build_optimizer(objective.model, TrainConfig(**recipe))


@dataclass(frozen=True)
class Measured:
    """A StepResult on the host, and the loss scale of the update."""

    loss_sum: float
    nll_sum: float
    grad_norm: float
    applied: bool
    loss_scale: float


def run(
    objective: Objective,
    optimizer: Optimizer,
    step: Step,
    *,
    rate: float = 1e-3,
    seed: int = 1,
    clip_norm: float | None = None,
    precision: Precision = Precision.fp64,
    scaler: GradScaler | None = None,
) -> Measured:
    scaler = scaler or GradScaler("cpu", enabled=False)
    loss_scale = scaler.get_scale()
    computation = Computation(objective, optimizer, scaler, clip_norm, device=CPU, precision=precision)
    result = train_step(computation, step, world_size=1, rate=rate, seed=seed)
    assert {x.dtype for x in (result.loss_sum, result.nll_sum, result.grad_norm)} == {torch.float64}
    numbers = (float(result.loss_sum), float(result.nll_sum), float(result.grad_norm))
    return Measured(*numbers, applied=bool(result.applied), loss_scale=loss_scale)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Bit for bit, NaN counted as itself."""
    assert a.keys() == b.keys()
    return all(torch.equal(a[name].nan_to_num(nan=123.0), b[name].nan_to_num(nan=123.0)) for name in a)


def written_out(model: Transformer) -> tuple[Tensor, float]:
    """The smoothed loss and the plain one, a sentence at a time, with torch's cross-entropy."""
    loss, nll = torch.zeros(()), 0.0
    for source, target in PAIRS:
        (s, s_layout), (t, t_layout) = pad([[*source, 3]]), pad([[2, *target]])
        logits = model(s, t, source_layout=s_layout, target_layout=t_layout)[0]
        classes = torch.tensor([*target, 3])
        loss = loss + F.cross_entropy(logits, classes, reduction="sum", label_smoothing=EPS * V / (V - 1))
        nll += F.cross_entropy(logits, classes, reduction="sum").item()
    return loss, nll


# The gradient of a step


SPLITS = {
    "one": [PAIRS],
    "two": [PAIRS[:2], PAIRS[2:]],
    "reversed": [PAIRS[3:], PAIRS[:3]],
    "each": [[pair] for pair in PAIRS],
    "with an empty one": [PAIRS[:1], [], PAIRS[1:]],
}


@pytest.mark.parametrize("parts", list(SPLITS.values()), ids=list(SPLITS))
@pytest.mark.parametrize("norm", list(Norm), ids=lambda norm: norm.name)
def test_train_step_of_any_split_gives_the_mean_gradient_over_target_tokens(
    parts: list[list[Pair]], norm: Norm
) -> None:
    objective, optimizer = build(replace(PLAIN, norm=norm))
    loss, nll = written_out(objective.model)
    (loss / TARGET_TOKENS).backward()
    expected = gradients(objective)
    result = run(objective, optimizer, step_of(parts), rate=0.0)
    for name, gradient in gradients(objective).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-12)
    assert result.applied
    assert result.loss_sum == pytest.approx(loss.item(), rel=1e-12)
    assert result.nll_sum == pytest.approx(nll, rel=1e-12)
    norm_written_out = math.sqrt(sum(float(g.square().sum()) for g in expected.values()))
    assert result.grad_norm == pytest.approx(norm_written_out, rel=1e-12)


STORE = Store.from_pieces([source for source, _ in PAIRS], [target for _, target in PAIRS])
NOBODY = np.zeros(0, dtype=np.int64)
PACKED = {  # the capacities, and how many micro-batches fill them
    "exactly one": ((16, 15), 1),
    "one with empty slots": ((19, 22), 1),
    "several": ((10, 8), 3),
    "as small as the longest": ((6, 5), 4),
}
LAYOUTS: dict[str, tuple[int, int] | None] = {"padded": None, "packed": (16, 15)}
either_layout = pytest.mark.parametrize("capacities", list(LAYOUTS.values()), ids=list(LAYOUTS))


@pytest.mark.parametrize(("capacities", "count"), list(PACKED.values()), ids=list(PACKED))
@pytest.mark.parametrize("norm", list(Norm), ids=lambda norm: norm.name)
@pytest.mark.parametrize("score", list(Score), ids=lambda score: score.name)
@pytest.mark.parametrize("small", [256, 0], ids=["one group", "many groups"])
def test_train_step_of_packed_micro_batches_gives_the_mean_gradient_over_target_tokens(
    capacities: tuple[int, int], count: int, norm: Norm, score: Score, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformer.data.packing._ALIKE", 1)
    monkeypatch.setattr("transformer.data.packing._SMALL", small)
    objective, optimizer = build(replace(PLAIN, norm=norm, score=score, d_k=3, d_v=5))
    loss, nll = written_out(objective.model)
    (loss / TARGET_TOKENS).backward()
    expected = gradients(objective)
    split: dict[str, Any] = {"max_tokens": 99, "micro_batch_multiple": 1, "capacities": capacities}
    parts = split_step(np.arange(len(PAIRS)), STORE.lengths, **split)
    assert len(parts) == count
    batches = [collate(STORE, part, capacities) for part in [*parts, NOBODY]]
    result = run(objective, optimizer, replace(step_of([PAIRS]), micro_batches=list(enumerate(batches))), rate=0.0)
    found = gradients(objective)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        size = max(expected[name].abs().max().item(), 1e-3)
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-12 * size)
    assert result.loss_sum == pytest.approx(loss.item(), rel=1e-12)
    assert result.nll_sum == pytest.approx(nll, rel=1e-12)


@either_layout
def test_objective_evaluate_gives_the_sums_of_training(capacities: tuple[int, int] | None) -> None:
    """Without a gradient the loss goes another way."""
    objective, _ = build()
    batch = collate(STORE, np.arange(len(PAIRS)), capacities)
    training = objective(batch)
    with torch.no_grad():
        evaluation = objective.evaluate(batch)
    torch.testing.assert_close(evaluation, tuple(loss.detach() for loss in training), rtol=1e-13, atol=0)


def test_train_step_divides_by_the_tokens_of_the_whole_step_and_not_of_this_rank() -> None:
    objective, optimizer = build()
    whole = run(objective, optimizer, step_of([PAIRS]), rate=0.0)
    expected = {name: gradient / 4 for name, gradient in gradients(objective).items()}
    quarter = run(objective, optimizer, step_of([PAIRS], target_tokens=4 * TARGET_TOKENS), rate=0.0)
    for name, gradient in gradients(objective).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-15)
    assert quarter.loss_sum == pytest.approx(whole.loss_sum, rel=1e-13)  # sums stay sums


def test_train_step_does_not_add_to_the_gradient_before_it() -> None:
    objective, optimizer = build()
    run(objective, optimizer, step_of([PAIRS]), rate=0.0)
    first = gradients(objective)
    run(objective, optimizer, step_of([PAIRS]), rate=0.0)
    assert same(gradients(objective), first)


@either_layout
@pytest.mark.parametrize("score", list(Score), ids=lambda score: score.name)
@pytest.mark.parametrize("config", [PLAIN, DROPPING], ids=["plain", "dropping"])
def test_train_step_of_a_rank_without_a_sentence_has_a_zero_gradient_everywhere(
    capacities: tuple[int, int] | None, score: Score, config: ModelConfig
) -> None:
    objective, optimizer = build(replace(config, score=score, attention_dropout=config.dropout))
    step = step_of([[]], target_tokens=TARGET_TOKENS)
    step = replace(step, micro_batches=[(0, collate(STORE, NOBODY, capacities))])
    result = run(objective, optimizer, step, rate=1.0)
    found = gradients(objective)
    assert found.keys() == dict(objective.named_parameters()).keys()  # a missing one would stop an all-reduce
    assert not any(gradient.any() for gradient in found.values())
    assert (result.loss_sum, result.nll_sum, result.grad_norm, result.applied) == (0.0, 0.0, 0.0, True)


def test_objective_is_a_sum_over_real_target_tokens() -> None:
    objective, _ = build()
    expected_loss, expected_nll = written_out(objective.model)
    loss, nll = objective(batch_of(PAIRS))
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-12)
    assert nll.item() == pytest.approx(expected_nll, rel=1e-12)


# Randomness


def updated(*, seed: int = 1, epoch: int = 0, index: int = 0, noise: int = 0) -> dict[str, Tensor]:
    objective, optimizer = build(DROPPING)
    torch.manual_seed(noise)
    torch.rand(noise)  # whatever was drawn before
    run(objective, optimizer, step_of([PAIRS[:2], PAIRS[2:]], epoch=epoch, index=index), seed=seed)
    return weights(objective)


def test_train_step_draws_the_same_masks_at_the_same_place() -> None:
    assert same(updated(noise=0), updated(noise=5))


@pytest.mark.parametrize("place", [{"seed": 2}, {"epoch": 1}, {"index": 1}], ids=["seed", "epoch", "step"])
def test_train_step_draws_other_masks_at_another_place(place: dict[str, int]) -> None:
    assert not same(updated(), updated(**place))


def masks(*, numbers: list[int]) -> list[Tensor]:
    """What the embedding's dropout let through in each micro-batch; all hold the same sentences."""
    objective, optimizer = build(DROPPING)
    seen: list[Tensor] = []
    objective.model.source_embedding.register_forward_hook(lambda _module, _args, out: seen.append(out != 0))
    step = step_of([PAIRS] * len(numbers))
    run(objective, optimizer, replace(step, micro_batches=[(m, batch_of(PAIRS)) for m in numbers]))
    return seen


def test_train_step_draws_masks_of_its_own_for_each_micro_batch_by_its_number() -> None:
    first, second, third = masks(numbers=[0, 1, 2])
    assert not torch.equal(first, second)
    assert not torch.equal(first, third)
    assert not torch.equal(second, third)
    (alone,) = masks(numbers=[1])  # on the rank that has this one only
    assert torch.equal(alone, second)


# Clipping, and what is never applied


def test_train_step_clips_the_gradient_and_keeps_its_direction() -> None:
    objective, optimizer = build()
    free = run(objective, optimizer, step_of([PAIRS]), rate=0.0)
    before = gradients(objective)
    limit = free.grad_norm / 3
    clipped = run(objective, optimizer, step_of([PAIRS]), rate=0.0, clip_norm=limit)
    assert clipped.grad_norm == pytest.approx(free.grad_norm, rel=1e-12)  # as it was before
    for name, gradient in gradients(objective).items():
        torch.testing.assert_close(gradient, before[name] / 3, rtol=1e-5, atol=1e-12)


def test_train_step_does_not_clip_a_short_gradient() -> None:
    objective, optimizer = build()
    free = run(objective, optimizer, step_of([PAIRS]), rate=0.0)
    before = gradients(objective)
    run(objective, optimizer, step_of([PAIRS]), rate=0.0, clip_norm=free.grad_norm * 1.01)
    assert same(gradients(objective), before)


RECIPES: list[dict[str, Any]] = [{}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "optimizer": OptimizerKind.muon}]


@pytest.mark.parametrize("recipe", RECIPES, ids=["Adam", "AdamW", "Muon"])
@pytest.mark.parametrize("changes", [{}, {"biases": True}, {"tie_embeddings": False}], ids=["tied", "biases", "untied"])
def test_train_step_never_moves_a_start_of_zeros(changes: dict[str, Any], recipe: dict[str, Any]) -> None:
    """Nor the bias that leaves BOS and PAD no probability, whose smoothed targets would have them probable."""
    objective, optimizer = build(replace(PLAIN, start=Start.zeros, **changes), **recipe)
    model = objective.model
    before = weights(objective)
    for index in range(3):
        assert run(objective, optimizer, step_of([PAIRS[:2], PAIRS[2:]], index=index), rate=0.01).applied
    assert not model.output[[0, 2]].any()
    assert not model.target_embedding.matrix[[0, 2]].any()
    assert model.output_bias is not None
    assert model.output_bias[[0, 2]].tolist() == [-100.0, -100.0]
    for name, weight in weights(objective).items():
        if "embedding" in name or name == "output":
            assert (weight != before[name]).any(1).sum() >= 9, name  # the others have moved
    shown = torch.randn(4, 8)
    assert torch.log_softmax(model.unembed(shown), 1)[:, [0, 2]].max() < -80.0


@pytest.mark.parametrize("recipe", RECIPES, ids=["Adam", "AdamW", "Muon"])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name", ["embedding", "encoder.0.self_attention.W_v.weight", "decoder.0.feed_forward.W_2.bias"]
)
def test_train_step_never_applies_a_number_that_is_not_finite(
    name: str, poison: float, clip_norm: float | None, recipe: dict[str, Any]
) -> None:
    objective, optimizer = build(**recipe)
    run(objective, optimizer, step_of([PAIRS]))
    with torch.no_grad():
        objective.model.get_parameter(name).view(-1)[3] = poison
    kept = weights(objective), {k: t.clone() for k, t in moments_by_name(objective.model, optimizer).items()}
    result = run(objective, optimizer, step_of([PAIRS]), clip_norm=clip_norm)
    assert not result.applied
    assert same(weights(objective), kept[0])
    assert same(moments_by_name(objective.model, optimizer), kept[1])


def poisoned(objective: Objective, *, part: str) -> Callable[[], None]:
    """A NaN that one micro-batch of three meets: in its loss and gradient, or only on the way back."""
    calls = iter(range(3))

    def forward(_module: nn.Module, _args: object, out: Tensor) -> Tensor:
        if next(calls) != 1:
            return out
        if part == "loss":
            return out * math.nan
        out.register_hook(lambda gradient: gradient * (math.nan if part == "gradient" else math.inf))
        return out

    return objective.model.encoder_norm.register_forward_hook(forward).remove


@pytest.mark.parametrize("kind", OptimizerKind)
@pytest.mark.parametrize("part", ["loss", "gradient", "infinite gradient"])
def test_train_step_with_one_bad_micro_batch_costs_that_step_and_nothing_else(part: str, kind: OptimizerKind) -> None:
    recipe: dict[str, Any] = {"optimizer": kind, "weight_decay": 0.3}
    (first, first_optimizer), (second, second_optimizer) = build(DROPPING, **recipe), build(DROPPING, **recipe)
    good = [step_of([PAIRS], index=i) for i in range(3)]
    for objective, optimizer in ((first, first_optimizer), (second, second_optimizer)):
        assert run(objective, optimizer, good[0]).applied
    remove = poisoned(second, part=part)
    bad = run(second, second_optimizer, step_of([PAIRS[:2], PAIRS[2:3], PAIRS[3:]], index=7))
    remove()
    assert not bad.applied
    assert not math.isfinite(bad.grad_norm)
    for step in good[1:]:
        assert run(first, first_optimizer, step) == run(second, second_optimizer, step)
    assert same(weights(first), weights(second))
    assert same(moments_by_name(first.model, first_optimizer), moments_by_name(second.model, second_optimizer))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_train_step_skips_a_loss_that_is_not_finite_even_where_the_gradient_is(value: float) -> None:
    """Each rank has a loss of its own, and all share the gradient: so it is the gradient that must tell of it."""
    objective, optimizer = build()
    run(objective, optimizer, step_of([PAIRS]))
    kept = weights(objective)
    remove = objective.register_forward_hook(lambda _module, _args, sums: (sums[0] + value, sums[1])).remove
    bad = run(objective, optimizer, step_of([PAIRS]))
    remove()
    assert not bad.applied
    assert same(weights(objective), kept)


@pytest.mark.parametrize("precision", [Precision.bf16, Precision.fp16])
@pytest.mark.parametrize("score", list(Score), ids=lambda score: score.name)
@either_layout
def test_train_step_in_half_precision_keeps_weights_and_gradients_in_float32(
    precision: Precision, score: Score, capacities: tuple[int, int] | None
) -> None:
    torch.set_default_dtype(torch.float32)
    exact, optimizer = build(replace(PLAIN, score=score))
    reference = run(exact, optimizer, step_of([PAIRS]), precision=Precision.fp32)
    rounded, optimizer = build(replace(PLAIN, score=score))
    before = weights(rounded)
    scaler = GradScaler("cpu", enabled=precision is Precision.fp16)
    batch = collate(STORE, np.arange(len(PAIRS)), capacities)
    step = replace(step_of([PAIRS]), micro_batches=[(0, batch)])
    result = run(rounded, optimizer, step, precision=precision, scaler=scaler)
    assert result.applied
    assert result.grad_norm == pytest.approx(reference.grad_norm, rel=0.05)
    assert result.loss_sum == pytest.approx(reference.loss_sum, rel=0.02)
    assert result.loss_sum != reference.loss_sum  # it was rounded
    assert all(p.dtype == torch.float32 for p in rounded.parameters())
    assert all(g.dtype == torch.float32 for g in gradients(rounded).values())
    assert not same(weights(rounded), before)


@pytest.mark.parametrize("precision", [Precision.bf16, Precision.fp16], ids=lambda precision: precision.name)
def test_train_step_in_half_precision_has_muon_multiply_in_it(
    precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_default_dtype(torch.float32)
    products: list[Tensor] = []

    def watched(matrices: Tensor) -> Tensor:
        product = orthogonal(matrices)
        products.append(product.clone())
        return product

    monkeypatch.setattr("transformer.training.muon.orthogonal", watched)
    objective, optimizer = build(optimizer=OptimizerKind.muon)
    scaler = GradScaler("cpu", enabled=precision is Precision.fp16)
    assert run(objective, optimizer, step_of([PAIRS]), precision=precision, scaler=scaler).applied
    assert products
    assert all(torch.equal(product, product.to(product_dtype(precision)).float()) for product in products)


@pytest.mark.parametrize("precision", [Precision.bf16, Precision.fp16])
@pytest.mark.parametrize("norm", list(Norm), ids=lambda norm: norm.name)
@either_layout
def test_autocast_gives_the_residual_stream_half_precision(
    precision: Precision, norm: Norm, capacities: tuple[int, int] | None
) -> None:
    """Where a norm ends each sub-layer; before a norm it is a sum of many, and stays wide."""
    torch.set_default_dtype(torch.float32)
    objective, _ = build(replace(DROPPING, norm=norm))
    model, seen = objective.model, []
    for module in (*model.encoder, *model.decoder):
        module.register_forward_hook(lambda _module, _args, out: seen.append(out.dtype))
    with autocast(CPU, precision):
        objective(collate(STORE, np.arange(len(PAIRS)), capacities))
    half = {Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}[precision]
    assert seen == [half if norm is Norm.post else torch.float32] * 2


# The loss scale of fp16


@pytest.mark.parametrize("kind", OptimizerKind)
@pytest.mark.parametrize("clip_norm", [None, 0.5, 1e6])
def test_train_step_with_a_scaled_loss_makes_the_same_updates(clip_norm: float | None, kind: OptimizerKind) -> None:
    """The gradient is unscaled before it is measured, clipped and averaged: by powers of two, so not a bit differs."""
    (plain, first), (scaled, second) = build(DROPPING, optimizer=kind), build(DROPPING, optimizer=kind)
    scaler = GradScaler("cpu", init_scale=2.0**16, growth_interval=1)
    for i in range(3):
        step = step_of([PAIRS[:2], PAIRS[2:]], index=i)
        one = run(plain, first, step, clip_norm=clip_norm)
        two = run(scaled, second, step, clip_norm=clip_norm, scaler=scaler)
        assert (one.loss_scale, two.loss_scale) == (1.0, 2.0 ** (16 + i))
        assert replace(two, loss_scale=1.0) == one
        assert same(gradients(plain), gradients(scaled))
    assert same(weights(plain), weights(scaled))
    assert same(moments_by_name(plain.model, first), moments_by_name(scaled.model, second))
    assert one.grad_norm > 0.5, "nothing was clipped"


@pytest.mark.parametrize("kind", OptimizerKind)
def test_train_step_halves_the_scale_until_it_does_not_overflow(kind: OptimizerKind) -> None:
    """A scale of 2**40 leaves the range of fp16, which ends at 65,504; nothing is applied before it fits."""
    torch.set_default_dtype(torch.float32)
    objective, optimizer = build(optimizer=kind, weight_decay=0.3)
    before, scaler = weights(objective), GradScaler("cpu", init_scale=2.0**40, growth_interval=2)
    results: list[Measured] = []
    while len(results) < 40 and not (results and results[-1].applied):
        assert same(weights(objective), before)
        assert not any(bool(moment.any()) for moment in moments_by_name(objective.model, optimizer).values())
        results.append(run(objective, optimizer, step_of([PAIRS]), precision=Precision.fp16, scaler=scaler))
    assert [result.loss_scale for result in results] == [2.0 ** (40 - n) for n in range(len(results))]
    assert 10 < len(results) < 35
    assert not any(math.isfinite(result.grad_norm) for result in results[:-1])
    assert not same(weights(objective), before)
    fits = results[-1].loss_scale
    again = [run(objective, optimizer, step_of([PAIRS]), precision=Precision.fp16, scaler=scaler) for _ in range(2)]
    assert [result.loss_scale for result in again] == [fits, 2 * fits], "two good updates in a row double it"
    assert [result.applied for result in again] == [True, False]
    assert float(moments_by_name(objective.model, optimizer)["updates"]) == 2.0, "of all that were tried"


# Adam


def kingma_and_ba(
    gradients: list[Tensor], start: Tensor, rates: list[float], *, beta1: float, beta2: float, eps: float
) -> Tensor:
    """Algorithm 1 of "Adam: A Method for Stochastic Optimization"."""
    theta, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        theta = theta - rate * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps)
    return theta


def test_build_optimizer_is_the_papers_adam_as_published() -> None:
    torch.manual_seed(0)
    module = nn.Linear(4, 3)
    start, rates = module.weight.detach().clone(), [1e-4 * (t + 1) for t in range(12)]
    optimizer = build_optimizer(module, TrainConfig())
    drawn = [torch.randn(3, 4) * 10.0 ** (-t % 6) for t in range(12)]  # some as small as epsilon matters
    for gradient, rate in zip(drawn, rates, strict=True):
        module.weight.grad = gradient.clone()
        set_rate(optimizer, rate)
        optimizer.step()
    expected = kingma_and_ba(drawn, start, rates, beta1=0.9, beta2=0.98, eps=1e-9)
    torch.testing.assert_close(module.weight.detach(), expected, rtol=1e-12, atol=1e-14)


def test_build_optimizer_takes_its_settings_from_the_config() -> None:
    module = nn.Linear(4, 3, bias=False)
    start, gradient = module.weight.detach().clone(), torch.full((3, 4), 0.5)
    optimizer = build_optimizer(module, TrainConfig(adam_beta1=0.8, adam_beta2=0.9, adam_eps=0.3))
    for gradient_now in (gradient, -gradient, gradient):
        module.weight.grad = gradient_now.clone()
        set_rate(optimizer, 0.01)
        optimizer.step()
    expected = kingma_and_ba([gradient, -gradient, gradient], start, [0.01] * 3, beta1=0.8, beta2=0.9, eps=0.3)
    torch.testing.assert_close(module.weight.detach(), expected, rtol=1e-12, atol=1e-14)


def test_build_optimizer_takes_its_share_of_each_matrix_away_first() -> None:
    """Loshchilov and Hutter (2019), algorithm 2 with its schedule in the rate: not a part of the gradient."""
    objective, optimizer = build(weight_decay=0.25)
    before, plain, rate = weights(objective), build()[0].model, 0.1
    run(objective, optimizer, step_of([PAIRS]), rate=rate)
    after = dict(objective.model.named_parameters())
    for name, parameter in plain.named_parameters():
        step = kingma_and_ba(
            [gradients(objective)[f"model.{name}"]], parameter.detach(), [rate], beta1=0.9, beta2=0.98, eps=1e-9
        )
        is_matrix = not name.endswith("bias") and "_norm." not in name
        taken = 0.25 * rate * before[f"model.{name}"] if is_matrix else 0.0
        torch.testing.assert_close(after[name].detach(), step - taken, rtol=1e-12, atol=1e-14)


def test_build_optimizer_follows_torchs_plain_adam() -> None:
    objective, optimizer = build()
    theirs = copy.deepcopy(objective.model)
    plain = Adam(theirs.parameters(), lr=0.0, betas=(0.9, 0.98), eps=1e-9, foreach=False, fused=False)
    for i, rate in enumerate((1e-3, 2e-3, 3e-3, 1e-3, 5e-4)):
        run(objective, optimizer, step_of([PAIRS], index=i), rate=rate)
        for parameter, source in zip(theirs.parameters(), objective.model.parameters(), strict=True):
            assert source.grad is not None
            parameter.grad = source.grad.clone()
        plain.param_groups[0]["lr"] = rate
        plain.step()
        for a, b in zip(objective.model.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_set_rate_gives_the_rate_that_is_applied() -> None:
    """After one update from zero moments every weight with a gradient has moved by the rate."""
    objective, optimizer = build()
    before = weights(objective)
    run(objective, optimizer, step_of([PAIRS]), rate=0.125)
    for name, parameter in objective.named_parameters():
        clear = gradients(objective)[name].abs() > 1e-6
        moved = (parameter.detach() - before[name]).abs()[clear]
        torch.testing.assert_close(moved, torch.full_like(moved, 0.125), rtol=2e-3, atol=0)


def test_moments_by_name_are_empty_before_the_first_update() -> None:
    objective, optimizer = build()
    assert moments_by_name(objective.model, optimizer) == {}
    load_moments(objective.model, optimizer, {})
    assert run(objective, optimizer, step_of([PAIRS])).applied


def test_moments_by_name_are_the_running_means() -> None:
    objective, optimizer = build()
    run(objective, optimizer, step_of([PAIRS]))
    moments = moments_by_name(objective.model, optimizer)
    names = [name for name, _ in objective.model.named_parameters()]
    assert moments.keys() == {f"{kind}/{n}" for kind in ("exp_avg", "exp_avg_sq") for n in names} | {"updates"}
    assert float(moments["updates"]) == 1.0
    for name, parameter in objective.model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(moments[f"exp_avg/{name}"], 0.1 * parameter.grad, rtol=1e-12, atol=1e-18)
        torch.testing.assert_close(moments[f"exp_avg_sq/{name}"], 0.02 * parameter.grad**2, rtol=1e-12, atol=1e-18)


@pytest.mark.parametrize("kind", OptimizerKind)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_load_moments_restores_bit_for_bit(dtype: torch.dtype, kind: OptimizerKind) -> None:
    torch.set_default_dtype(dtype)
    precision = Precision.fp64 if dtype == torch.float64 else Precision.fp32
    objective, optimizer = build(DROPPING, optimizer=kind)
    for i in range(3):
        run(objective, optimizer, step_of([PAIRS], index=i), precision=precision)
    resumed, other = build(DROPPING, optimizer=kind)
    resumed.load_state_dict(objective.state_dict())
    saved = {name: tensor.clone() for name, tensor in moments_by_name(objective.model, optimizer).items()}
    load_moments(resumed.model, other, saved)
    for i in range(3, 6):
        step = step_of([PAIRS], index=i)
        ours = run(objective, optimizer, step, precision=precision)
        assert ours == run(resumed, other, step, precision=precision)
    assert same(weights(objective), weights(resumed))
    assert same(moments_by_name(objective.model, optimizer), moments_by_name(resumed.model, other))


def test_load_moments_copies() -> None:
    objective, optimizer = build()
    run(objective, optimizer, step_of([PAIRS]))
    saved = {name: tensor.clone() for name, tensor in moments_by_name(objective.model, optimizer).items()}
    kept = {name: tensor.clone() for name, tensor in saved.items()}
    resumed, other = build()
    load_moments(resumed.model, other, saved)
    run(resumed, other, step_of([PAIRS]))
    assert same(saved, kept)


# ---- torch.compile --------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # inductor's own imports
@pytest.mark.parametrize(
    "backend", [pytest.param("aot_eager", marks=pytest.mark.fake_gpu), pytest.param("inductor", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("start", Start, ids=lambda start: start.name)
def test_objective_compiled_is_eager_and_new_shapes_compile_nothing(backend: str, start: Start) -> None:
    """Four batches of all kinds warm up; ten more, of shapes never seen, must find everything compiled."""
    torch._dynamo.reset()
    random, eager = Random(5), Objective(Transformer(replace(PLAIN, start=start), V).double(), EPS)
    compiled = copy.deepcopy(eager)
    compiled.compile(backend=backend)

    def sentences(rows: int, longest: int) -> list[Pair]:
        length = random.randint(2, longest)
        pieces = [[random.randint(4, V - 1) for _ in range(random.randint(1, length))] for _ in range(2 * rows)]
        pieces[:2] = [[4] * length, [5] * (length + 1)]  # some padding on either side
        return list(zip(pieces[::2], pieces[1::2], strict=True))

    def compare(pairs: list[Pair]) -> None:
        losses = []
        for objective in (eager, compiled):
            objective.zero_grad()
            loss, _ = objective(batch_of(pairs))
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0)
        for one, other in zip(eager.parameters(), compiled.parameters(), strict=True):
            torch.testing.assert_close(other.grad, one.grad, rtol=1e-10, atol=1e-12)

    for rows in (2, 3, 5, 7):
        compare(sentences(rows, rows + 3))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in range(4, 14):
            compare(sentences(rows, 12))
    with torch.no_grad():  # what dev batches take is not compiled
        assert compiled.evaluate(batch_of(PAIRS))[0].isfinite()


def test_objective_and_its_model_go_when_they_are_not_used_any_more() -> None:
    """Without the garbage collector, which may come long after the next model has asked for its memory."""
    objective = build()[0]
    model = weakref.ref(objective.model)
    gc.disable()
    try:
        objective(batch_of(PAIRS))[0].backward()
        del objective
        assert model() is None
    finally:
        gc.enable()


def test_objective_evaluates_without_the_logits_of_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows times the vocabulary at a time give the sums of all rows at once."""
    objective, _ = build()
    batch = collate(STORE, np.arange(len(PAIRS)))
    with torch.no_grad():
        at_once = objective.evaluate(batch)
        monkeypatch.setattr("transformer.training.step.EVAL_LOGITS", 2 * V)
        unembed = objective.model.unembed
        rows: list[int] = []

        def counted(x: Tensor) -> Tensor:
            rows.append(len(x))
            return unembed(x)

        monkeypatch.setattr(objective.model, "unembed", counted)
        in_parts = objective.evaluate(batch)
    torch.testing.assert_close(in_parts, at_once, rtol=1e-13, atol=0)
    assert sum(rows) == len(batch.target_out)
    assert set(rows) <= {1, 2}


@pytest.mark.fake_gpu
def test_objective_compiles_packed_batches_as_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where attention over packed sentences is one kernel; a plain formula stands in for it here."""

    def one_kernel(q: Tensor, k: Tensor, v: Tensor, queries: Packed, keys: Packed, spec: AttentionSpec) -> Tensor:
        def sentence(layout: Packed) -> Tensor:
            return torch.searchsorted(
                layout.offsets, torch.arange(len(layout.position_ids), dtype=torch.int32), right=True
            )

        seen = (sentence(queries)[:, None] == sentence(keys)) & keys.is_real()
        if spec.causal:
            seen = seen & (queries.position_ids[:, None] >= keys.position_ids)
        scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
        weights = scores.masked_fill(~seen, -1e30).softmax(-1) * queries.is_real()[:, None]
        return torch.einsum("hqk,khd->qhd", weights, v)

    torch._dynamo.reset()
    random, eager = np.random.default_rng(7), Objective(Transformer(PLAIN, V).double(), EPS)
    compiled = copy.deepcopy(eager)
    compiled.compile(backend="aot_eager")
    store = Store.from_pieces(*[[random.integers(4, V, size=n).tolist() for n in sides] for sides in LENGTHS])
    picks = [random.permutation(len(store))[: 4 + 3 * number] for number in range(8)]

    def losses(objective: Objective, kernel: AttentionKernel | None) -> list[float]:
        found = [objective(collate(store, ids, (256, 256), kernel=kernel))[0] for ids in picks]
        sum(found).backward()
        return [loss.item() for loss in found]

    expected = losses(eager, None)
    monkeypatch.setattr("transformer.model.attention._attend_varlen", one_kernel)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert losses(compiled, AttentionKernel.varlen) == pytest.approx(expected, rel=1e-12)
    for one, other in zip(eager.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-10, atol=1e-11)


LENGTHS = [[1, 5, 3, 9, 2, 7, 4, 8, 6, 1] * 3, [2, 4, 3, 8, 1, 7, 5, 9, 6, 2] * 3]
