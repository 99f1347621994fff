"""What only a GPU can show: its fast paths against the plain float64 model on a CPU, and that a run there is a run.

TRANSFORMER_TEST_DEVICE=cpu tries the same tests without a GPU: they then take the paths of a CPU.
"""

import copy
import math
import os
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.corpora import (
    assert_same_tensors,
    finish,
    metrics_of,
    overrides,
    progress_of,
    read,
    results_of,
    start,
    step_dir,
    tiny_job,
    write_corpus,
)
from support.paths import ROOT
from transformer.compute import HALF, autocast, has_triton, has_wide_tiles, loss_scaler, seed_draws
from transformer.config.jobs import TrainJob
from transformer.config.settings import (
    AttentionKernel,
    Device,
    Kernels,
    ModelConfig,
    OptimizerKind,
    Precision,
    Score,
    SearchConfig,
    TrainConfig,
)
from transformer.data.batch import Batch, collate
from transformer.data.loader import Position, Step, load_steps
from transformer.data.packing import pack
from transformer.data.plan import Batching
from transformer.data.store import Ids, Store
from transformer.decoding.batched import BatchedDecoder
from transformer.decoding.search import Hypothesis, beam_search, length_penalty
from transformer.kernels.add_norm import plain_add_norm, triton_add_norm
from transformer.kernels.loss import linear_cross_entropy
from transformer.kernels.packed_attention import WIDEST_IN_SMALL_TILES, plain_attention
from transformer.kernels.ranges import Ranges
from transformer.kernels.triton_loss import triton_linear_cross_entropy
from transformer.layout import Packed, Padded
from transformer.loss import smoothed_cross_entropy
from transformer.model.attention import AttentionSpec, attend
from transformer.model.transformer import Transformer
from transformer.records import Progress
from transformer.training.cuda_graphs import GraphedComputation
from transformer.training.optimizer import build_optimizer
from transformer.training.resolve import varlen_obstacle
from transformer.training.step import Computation, Objective, train_step
from transformer.training.window import GradientNorms, LogWindow
from transformer.vocabulary import BOS, EOS

DEVICE = torch.device(os.environ.get("TRANSFORMER_TEST_DEVICE", "cuda"))
CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # compilers and their machines warn of much that is not ours
    pytest.mark.skipif(DEVICE.type == "cuda" and not torch.cuda.is_available(), reason="torch sees no GPU"),
]

V, EPS = 500, 0.1
SMALL = ModelConfig(n_layers=2, d_model=64, d_ff=128, n_heads=2, dropout=0.0, max_positions=64)
CAPACITIES = (384, 512)
Outcome = tuple[float, float, dict[str, Tensor]]


def build(config: ModelConfig, precision: Precision = Precision.fp32, device: torch.device = DEVICE) -> Objective:
    torch.manual_seed(0)
    model = Transformer(config, V)
    return Objective(model, EPS).to(device, torch.float64 if precision is Precision.fp64 else torch.float32).train()


@cache
def corpus() -> Store:
    """200 pairs of 1 to 24 pieces a side."""
    draw = np.random.default_rng(0)
    sides = [[draw.integers(4, V, size=n).tolist() for n in draw.integers(1, 25, size=200)] for _ in range(2)]
    return Store.from_pieces(*sides)


def some(count: int) -> list[Ids]:
    """So many disjoint sets of 18 pairs, which fit the capacities and leave some of them empty."""
    return list(np.arange(18 * count).reshape(count, 18))


def packed_kernel(dtype: torch.dtype, score: Score = Score.scaled) -> AttentionKernel | None:
    """What attends to packed sentences, by the rule of `resolve`; None: they are cut into groups."""
    precision = next((name for name, half in HALF.items() if half is dtype), Precision.fp32)
    model = ModelConfig(d_k=32, d_v=32, score=score)
    return AttentionKernel.varlen if varlen_obstacle(model, DEVICE, precision) is None else None


def outcome(objective: Objective, batch: Batch, precision: Precision, device: torch.device = DEVICE) -> Outcome:
    """Both losses, and the gradient of each parameter, in float64 on the CPU."""
    objective.zero_grad()
    with autocast(device, precision):
        smoothed, plain = objective(batch.to(device))
    smoothed.backward()
    named = objective.model.named_parameters()
    gradients = {name: p.grad.to(CPU, torch.float64) for name, p in named if p.grad is not None}
    return smoothed.item(), plain.item(), gradients


def error(found: Tensor, wanted: Tensor) -> float:
    """The norm of the difference over the norm of what is wanted."""
    return float((found.to(CPU, torch.float64) - wanted).norm() / wanted.norm())


def assert_close(found: Outcome, wanted: Outcome, losses: float, gradients: float) -> None:
    """The losses, and the gradient of each parameter, are off by so much at most, relative to their size."""
    assert found[:2] == pytest.approx(wanted[:2], rel=losses)
    assert found[2].keys() == wanted[2].keys()
    errors = {name: error(found[2][name], gradient) for name, gradient in wanted[2].items()}
    assert max(errors.values()) < gradients, errors


# Through two layers in bf16, ReLUs and saturated weights turn over: gradients are off by 20 % in places, on a CPU too.
# That the kernels themselves are exact to bf16 is what the tests of `attend` and of the loss say.
@pytest.mark.parametrize(("precision", "room"), [(Precision.fp32, (1e-5, 5e-4)), (Precision.bf16, (2e-3, 0.3))])
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("score", list(Score))
def test_transformer_in_either_layout_is_the_float64_model_on_a_cpu(
    score: Score, layout: str, precision: Precision, room: tuple[float, float]
) -> None:
    config, (ids,) = replace(SMALL, score=score), some(1)
    wanted = outcome(build(config, Precision.fp64, CPU), collate(corpus(), ids), Precision.fp64, CPU)
    capacities = CAPACITIES if layout == "packed" else None
    dtype = torch.bfloat16 if precision is Precision.bf16 else torch.float32
    batch = collate(corpus(), ids, capacities, kernel=packed_kernel(dtype, score))
    assert_close(outcome(build(config), batch, precision), wanted, *room)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("score", list(Score))
@pytest.mark.parametrize("role", ["self", "causal", "cross"])
def test_packed_attention_is_eq1_on_each_sentence(
    role: str, score: Score, dtype: torch.dtype, tolerance: float
) -> None:
    """Against the formula on each sentence alone, in float64 on the same rounded numbers: values and gradients.

    In half precision on a GPU, scores that are products come from torch's kernel for packed sentences.
    """
    sizes = np.array([[9, 5], [1, 30], [40, 33], [17, 1], [2, 2]])
    lengths = sizes if role == "cross" else sizes[:, [0, 0]]
    capacities = (128, 96 if role == "cross" else 128)
    layouts = [side.to(DEVICE) for side in pack(lengths, capacities, kernel=packed_kernel(dtype, score))]
    draw = torch.Generator().manual_seed(2)
    slots = [len(layouts[side].position_ids) for side in (0, 1, 1, 0)]
    q, k, v, upstream = (torch.randn(n, 2, 32, generator=draw).to(dtype) for n in slots)
    vector = torch.randn(2, 32, generator=draw).to(dtype) if score is Score.additive else None
    scale = 32**-0.5 if score is Score.scaled else 1.0

    inputs = [x.to(DEVICE).requires_grad_() for x in (q, k, v)]
    found = attend(
        inputs[0],
        inputs[1],
        inputs[2],
        AttentionSpec(
            queries=layouts[0],
            keys=layouts[1],
            causal=role == "causal",
            dropout=0.0,
            scale=scale,
            score_vector=None if vector is None else vector.to(DEVICE),
        ),
    )
    reference = [x.double().requires_grad_() for x in (q, k, v)]
    parts, start_q, start_k = [], 0, 0
    for of_q, of_k in lengths.tolist():
        one_q = reference[0][start_q : start_q + of_q]
        one_k, one_v = (x[start_k : start_k + of_k] for x in reference[1:])
        if vector is None:
            scores = torch.einsum("ihk,jhk->hij", one_q, one_k) * scale
        else:
            scores = torch.einsum("ijhk,hk->hij", torch.tanh(one_q[:, None] + one_k), vector.double())
        if role == "causal":
            scores = scores.masked_fill(torch.ones(of_q, of_k).triu(1).bool(), -torch.inf)
        parts.append(torch.einsum("hij,jhk->ihk", scores.softmax(-1), one_v))
        start_q, start_k = start_q + of_q, start_k + of_k
    wanted, real = torch.cat(parts), slice(0, start_q)
    assert error(found.detach()[real], wanted.detach()) < tolerance
    ours = torch.autograd.grad(found, inputs, upstream.to(DEVICE))
    theirs = torch.autograd.grad(wanted, reference, upstream[real].double())
    for one, other in zip(ours, theirs, strict=True):
        assert error(one, other) < 3 * tolerance


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_transformer_leaks_nothing_of_empty_slots(dtype: torch.dtype, causal: bool) -> None:
    """NaN in every empty slot, on the way there and back, changes nothing elsewhere and gives zeros there."""
    lengths = np.array([[3, 3], [7, 7], [1, 1]])
    layout, _ = (side.to(DEVICE) for side in pack(lengths, (32, 32), kernel=packed_kernel(dtype)))
    values = torch.randn(4, 32, 2, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    how: dict[str, Any] = {
        "queries": layout,
        "keys": layout,
        "causal": causal,
        "dropout": 0.0,
        "scale": 0.2,
        "score_vector": None,
    }

    def run(filler: float) -> list[Tensor]:
        filled = values.clone()
        filled[:, 11:] = filler
        *inputs, upstream = filled.unbind(0)
        inputs = [x.clone().requires_grad_() for x in inputs]
        out = attend(inputs[0], inputs[1], inputs[2], AttentionSpec(**how))
        return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]

    for clean, filled in zip(run(0.0), run(float("nan")), strict=True):
        assert error(filled[:11], clean[:11].to(CPU, torch.float64)) < 1e-2  # a GPU adds in any order
        assert not filled[11:].any()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 1e-2)])
def test_linear_cross_entropy_is_the_reference(dtype: torch.dtype, tolerance: float) -> None:
    """9,000 rows are two blocks and a rest on a GPU, more on a CPU; every tenth row is an empty slot."""
    draw = torch.Generator().manual_seed(3)
    hidden, matrix = torch.randn(9000, 64, generator=draw), torch.randn(V, 64, generator=draw) / 8
    targets = torch.randint(4, V, (9000,), generator=draw)
    targets[::10] = 0

    reference = [x.double().requires_grad_() for x in (hidden, matrix)]
    wanted = smoothed_cross_entropy(reference[0] @ reference[1].T, targets, label_smoothing=EPS)
    ours = [hidden.to(DEVICE, dtype).requires_grad_(), matrix.to(DEVICE).requires_grad_()]
    found = linear_cross_entropy(ours[0], ours[1], targets.to(DEVICE), bias=None, label_smoothing=EPS)
    for one, other in zip(found, wanted, strict=True):
        assert one.item() == pytest.approx(other.item(), rel=tolerance)
    gradients = torch.autograd.grad(found[0], ours), torch.autograd.grad(wanted[0], reference)
    for one, other in zip(*gradients, strict=True):
        assert error(one, other) < tolerance


# ---- kernels that are no default before they have run here ----------------------------------------------------------

needs_graphs = pytest.mark.skipif(DEVICE.type != "cuda", reason="only a GPU replays what it has recorded")
needs_triton = pytest.mark.skipif(
    not torch.cuda.is_available() or not has_triton(DEVICE),
    reason="needs Triton and a GPU since Ampere (test_triton.py interprets the kernels on a CPU)",
)
SHORT = [(9, 5), (1, 30), (40, 33), (64, 65), (1, 1), (150, 100), (27, 27), (17, 1)]  # lengths of sentence pairs


def short_sentences(role: str, kernel: AttentionKernel) -> tuple[Packed, Packed]:
    """Queries and keys, in 384 slots of which the last are empty."""
    source, target = pack(np.array(SHORT), (384, 384), kernel=kernel)
    sides = {"encoder": (source, source), "causal": (target, target), "cross": (target, source)}
    queries, keys = sides[role]
    return queries.to(DEVICE), keys.to(DEVICE)


def attention_and_formula(
    kernel: AttentionKernel, role: str, dtype: torch.dtype, *, width: int, compiled: bool
) -> list[float]:
    """The errors of the output and of the gradients of q, k and v, against equation 1 in float64 on a CPU."""
    queries, keys = short_sentences(role, kernel)
    draw = torch.Generator().manual_seed(2)
    *inputs, upstream = (torch.randn(384, 4, width, generator=draw).to(dtype) for _ in range(4))
    ours = [x.to(DEVICE).requires_grad_() for x in inputs]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(
            q,
            k,
            v,
            AttentionSpec(
                queries=queries, keys=keys, causal=role == "causal", dropout=0.0, scale=width**-0.5, score_vector=None
            ),
        )

    found = (torch.compile(run) if compiled else run)(*ours)
    gradients = torch.autograd.grad(found, ours, upstream.to(DEVICE))

    exact = [x.double().requires_grad_() for x in inputs]
    ranges = queries.ranges_in(keys)
    ranges = ranges.up_to_itself() if role == "causal" else ranges
    on_cpu = Ranges(ranges.first.cpu(), ranges.end.cpu())
    wanted = plain_attention(*exact, keys=on_cpu, scale=width**-0.5, kept=None)
    expected = torch.autograd.grad(wanted, exact, upstream.double())
    return [
        error(one.detach(), other.detach()) for one, other in zip((found, *gradients), (wanted, *expected), strict=True)
    ]


@needs_triton
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("width", [16, 40, 64, 128])
@pytest.mark.parametrize("role", ["encoder", "causal", "cross"])
def test_triton_attention_is_eq1_on_each_sentence(role: str, width: int, dtype: torch.dtype, tolerance: float) -> None:
    errors = attention_and_formula(AttentionKernel.triton, role, dtype, width=width, compiled=False)
    assert max(errors) < 3 * tolerance


@needs_triton
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("width", [16, 40, 64, 128])
@pytest.mark.parametrize("role", ["encoder", "causal", "cross"])
def test_sentence_attention_is_eq1_on_each_sentence(
    role: str, width: int, dtype: torch.dtype, tolerance: float, compiled: bool
) -> None:
    """In tiles of either size, and for a sentence that fits none."""
    if width > WIDEST_IN_SMALL_TILES and not has_wide_tiles(DEVICE):
        pytest.skip("this GPU has small tiles alone")
    errors = attention_and_formula(AttentionKernel.sentences, role, dtype, width=width, compiled=compiled)
    assert max(errors) < 3 * tolerance


@needs_triton
def test_sentence_attention_drops_what_triton_attention_drops() -> None:
    """From the same seed, forward and backward, but for the rounding of bf16."""
    draw = torch.Generator().manual_seed(2)
    *inputs, upstream = (torch.randn(384, 4, 64, generator=draw).to(DEVICE, torch.bfloat16) for _ in range(4))
    found = []
    for kernel in (AttentionKernel.triton, AttentionKernel.sentences):
        queries, keys = short_sentences("cross", kernel)
        ours = [x.clone().requires_grad_() for x in inputs]
        torch.manual_seed(1)
        spec = AttentionSpec(queries=queries, keys=keys, causal=False, dropout=0.25, scale=0.125, score_vector=None)
        out = attend(ours[0], ours[1], ours[2], spec)
        found.append([out.detach(), *torch.autograd.grad(out, ours, upstream)])
    for one, other in zip(*found, strict=True):
        assert error(one, other.to(CPU, torch.float64)) < 3e-2


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_attention_drops_what_numpy_drops_and_is_the_same_each_time(dtype: torch.dtype) -> None:
    """Forward and backward, against a mask made on the CPU from the same seed; twice the same bits."""
    from support.triton_kernels import DROPOUT, kept_by_philox
    from transformer.kernels.gpu.attention import packed_attention

    queries, keys = short_sentences("cross", AttentionKernel.triton)
    of_queries, of_keys = queries.ranges_in(keys), keys.ranges_in(queries)
    draw = torch.Generator().manual_seed(2)
    *inputs, upstream = (torch.randn(384, 4, 64, generator=draw).to(dtype) for _ in range(4))
    ours = [x.to(DEVICE).requires_grad_() for x in inputs]
    seed = torch.tensor([1 << 40 | 17], device=DEVICE)

    def run() -> list[Tensor]:
        ranges = (of_queries.first, of_queries.end, of_keys.first, of_keys.end)
        out, _ = packed_attention(*ours, seed, *ranges, DROPOUT, 0.125)
        return [out.detach(), *torch.autograd.grad(out, ours, upstream.to(DEVICE))]

    exact = [x.double().requires_grad_() for x in inputs]
    kept = kept_by_philox(int(seed), heads=4, queries=384, keys=384)
    on_cpu = Ranges(of_queries.first.cpu(), of_queries.end.cpu())
    wanted = plain_attention(*exact, keys=on_cpu, scale=0.125, kept=kept / (1 - DROPOUT))
    expected = torch.autograd.grad(wanted, exact, upstream.double())
    found, again = run(), run()
    for one, other in zip(found, (wanted, *expected), strict=True):
        assert error(one, other.detach()) < (1e-5 if dtype is torch.float32 else 3e-2)
    for one, other in zip(found, again, strict=True):
        assert torch.equal(one, other)


@needs_triton
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("d_model", [40, 512, 1024, 8192])
def test_add_norm_is_the_plain_form(d_model: int, dtype: torch.dtype, tolerance: float, compiled: bool) -> None:
    """Without dropout: the result, and the gradients of both inputs, gain and bias."""
    draw = torch.Generator().manual_seed(2)
    x, y, upstream = (torch.randn(1_001, d_model, generator=draw).to(dtype) for _ in range(3))
    gain, bias = torch.randn(2, d_model, generator=draw)
    values = [x, y, gain, bias]
    run = partial(triton_add_norm, dropout=0.0, eps=1e-5)
    ours = [value.to(DEVICE).requires_grad_() for value in values]
    found = (torch.compile(run) if compiled else run)(*ours)
    gradients = torch.autograd.grad(found, ours, upstream.to(DEVICE))

    exact = [value.double().requires_grad_() for value in values]
    wanted = plain_add_norm(exact[0], exact[1], exact[2], exact[3], kept=None, eps=1e-5)
    expected = torch.autograd.grad(wanted, exact, upstream.double())
    for one, other in zip((found.detach(), *gradients), (wanted.detach(), *expected), strict=True):
        assert error(one, other) < 3 * tolerance


@needs_triton
def test_add_norm_drops_as_much_as_it_should_and_the_same_on_the_way_back() -> None:
    """An all but constant sum's gradient is 0, so x is noise; y's gradient is 0 exactly where y was dropped."""
    x = torch.randn(2_000, 512, device=DEVICE)
    y = torch.full_like(x, 1e3, requires_grad=True)
    torch.manual_seed(3)
    out = triton_add_norm(x, y, torch.ones(512, device=DEVICE), torch.zeros(512, device=DEVICE), dropout=0.25, eps=1e-5)
    (gradient,) = torch.autograd.grad(out, y, torch.randn_like(out))
    is_kept = out > 0
    assert (is_kept == (gradient != 0)).all()
    assert is_kept.double().mean().item() == pytest.approx(0.75, abs=5 * math.sqrt(0.25 * 0.75 / out.numel()))


@needs_triton
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 1e-2)])
@pytest.mark.parametrize(("n", "vocab_size", "rows"), [(9_000, V, 4_096), (1_100, 37_000, 1_152)])
def test_triton_loss_is_the_reference(n: int, vocab_size: int, rows: int, dtype: torch.dtype, tolerance: float) -> None:
    """In several blocks and in one; every tenth row is an empty slot."""
    draw = torch.Generator().manual_seed(3)
    hidden, matrix = torch.randn(n, 64, generator=draw), torch.randn(vocab_size, 64, generator=draw) / 8
    targets = torch.randint(4, vocab_size, (n,), generator=draw)
    targets[::10] = 0

    reference = [x.double().requires_grad_() for x in (hidden.to(dtype), matrix)]
    wanted = smoothed_cross_entropy(reference[0] @ reference[1].T, targets, label_smoothing=EPS)
    ours = [hidden.to(DEVICE, dtype).requires_grad_(), matrix.to(DEVICE).requires_grad_()]
    found = triton_linear_cross_entropy(ours[0], ours[1], targets.to(DEVICE), bias=None, label_smoothing=EPS, rows=rows)
    for one, other in zip(found, wanted, strict=True):
        assert one.item() == pytest.approx(other.item(), rel=tolerance)
    gradients = torch.autograd.grad(found[0], ours), torch.autograd.grad(wanted[0], reference)
    for one, other in zip(*gradients, strict=True):
        assert error(one, other) < tolerance


@needs_triton
@pytest.mark.parametrize("kernels", [Kernels.triton, Kernels.fused])
def test_train_with_triton_attention_and_a_fused_loss_learns(tmp_path: Path, kernels: Kernels) -> None:
    """The public command with them: compiled, packed, and the loss falls."""
    job = job_on_device(tmp_path, precision=Precision.bf16, max_steps=60, save_every=20, validate_every=60)
    job.train.kernels = kernels
    job.train.compile = True
    job.model.attention_dropout = 0.1
    run_dir = train(job)
    resolved = read(run_dir / "run.json")["resolved"]
    attention = {"triton": "triton", "fused": "sentences"}[kernels.name]
    assert (resolved["attention_kernel"], resolved["layout"], resolved["compile"]) == (attention, "packed", True)
    assert resolved["loss_rows"] >= 128
    losses = [line["train/loss"] for line in metrics_of(run_dir) if "train/loss" in line]
    assert sum(losses[-10:]) / 10 < losses[0] - 1.0


# ---- steps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OptimizerKind)
@pytest.mark.parametrize("graphs", [False, pytest.param(True, marks=needs_graphs)])
def test_train_step_never_waits_for_the_device(graphs: bool, kind: OptimizerKind) -> None:
    """Steps as the loop takes them, with the loader's copies, under torch's check for synchronisation.

    The first two may still allocate and set up; none of the others may make the host wait. (torch does not notice a
    copy from memory that is not pinned, which waits, too.)
    """
    objective = build(replace(SMALL, dropout=0.1), Precision.bf16)
    recipe = TrainConfig(optimizer=kind, weight_decay=0.1, clip_norm=1.0)
    optimizer, scaler = build_optimizer(objective.model, recipe), loss_scaler(DEVICE, Precision.bf16)
    computation = Computation(objective, optimizer, scaler, 1.0, DEVICE, Precision.bf16)
    if graphs:
        computation = GraphedComputation(computation, reduces=False)
    window, norms = LogWindow(DEVICE), GradientNorms()
    batching = Batching(
        mixture=[(len(corpus()), 1.0)],
        seed=1,
        tokens_per_step=300,
        max_tokens=512,
        micro_batch_multiple=2,
        capacities=CAPACITIES,
        kernel=packed_kernel(torch.bfloat16),
    )
    steps = load_steps(
        lambda epoch: corpus(),
        batching,
        rank=0,
        world_size=1,
        position=Position(0, 0, 0),
        prefetch=2,
        device=DEVICE,
    )
    with closing(steps):
        for number in range(12):
            step = next(steps)
            for _, batch in step.micro_batches:
                assert batch.source.device.type == DEVICE.type
            if number == 2 and DEVICE.type == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            try:
                result = train_step(computation, step, world_size=1, rate=1e-3, seed=1)
                window.add(step, result, waited=0.0, flops=0.0)
                norms.add(result.grad_norm)
            finally:
                if DEVICE.type == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
    assert result.loss_sum.isfinite()
    progress = Progress(step=12)
    norms.read_into(progress)
    assert progress.skipped == 0
    assert progress.usual_norm > 0.0


@needs_graphs
@pytest.mark.parametrize("kind", OptimizerKind)
def test_train_step_replayed_computes_what_it_does_launched(kind: OptimizerKind) -> None:
    """Batches of two shapes, one or two of them in a step, dropout, and a gradient that is not finite in two steps.

    Steps of one are one graph, and those of two a graph for each, and one for the update. Their masks are the same, or
    losses would differ by a few per mille.
    """
    short = Store.from_pieces(*([[5 + n % 400] for n in range(400)] for _ in range(2)))
    kernel = packed_kernel(torch.bfloat16)
    few = [collate(corpus(), ids, (1_024, 1_024), kernel=kernel) for ids in some(8)]
    many = collate(short, np.arange(400), (1_024, 1_024), kernel=kernel)
    layouts = many.source_layout, few[0].source_layout
    assert isinstance(layouts[0], Packed)
    assert isinstance(layouts[1], Packed)
    assert len(layouts[0].offsets) > len(layouts[1].offsets)

    def step_of(index: int) -> Step:
        batches = [[few[index % 8]], [few[index % 8], many], [many]][index % 3]
        tokens = math.nan if index in (5, 10) else sum(int((batch.target_out != 0).sum()) for batch in batches)
        here = [(m, batch.to(DEVICE)) for m, batch in enumerate(batches)]
        return Step(0, 0, index, here, tokens, source_tokens=1, sentences=1, slots=2_048)  # type: ignore[arg-type]

    def trained(graphs: bool) -> tuple[list[list[float]], dict[str, Tensor]]:
        objective = build(replace(SMALL, dropout=0.1), Precision.bf16)
        optimizer = build_optimizer(objective.model, TrainConfig(optimizer=kind, weight_decay=0.1))
        scaler = loss_scaler(DEVICE, Precision.bf16)
        computation = Computation(objective, optimizer, scaler, 1.0, DEVICE, Precision.bf16)
        if graphs:
            computation = GraphedComputation(computation, reduces=False)
        found = []
        for index in range(12):
            rate = 1e-3 * (1 + index % 2)
            result = train_step(computation, step_of(index), world_size=1, rate=rate, seed=1)
            found.append([float(value) for value in vars(result).values()])
        return found, {name: weights.detach().double() for name, weights in objective.named_parameters()}

    began = dict(build(SMALL).named_parameters())
    launched, weights = trained(graphs=False)
    replayed, again = trained(graphs=True)
    assert [values[-1] for values in replayed] == [1.0] * 5 + [0.0] + [1.0] * 4 + [0.0, 1.0]  # applied
    for ours, theirs in zip(replayed, launched, strict=True):
        assert ours[:2] == pytest.approx(theirs[:2], rel=3e-4)  # losses
        assert ours[2] == pytest.approx(theirs[2], rel=0.02, nan_ok=True)  # the norm of the gradient
    for name, wanted in weights.items():
        assert (again[name] - wanted).norm() < 0.05 * (wanted - began[name]).norm(), name


@needs_graphs
def test_train_step_replayed_over_nccl_computes_what_it_does_alone() -> None:
    """One rank, which adds up the gradients of all by NCCL all the same, between two graphs."""
    kernel = packed_kernel(torch.bfloat16)
    batches = [collate(corpus(), ids, (1_024, 1_024), kernel=kernel).to(DEVICE) for ids in some(8)]

    def trained(reduces: bool) -> tuple[list[list[float]], dict[str, Tensor]]:
        objective = build(replace(SMALL, dropout=0.1), Precision.bf16)
        optimizer = build_optimizer(objective.model, TrainConfig())
        scaler = loss_scaler(DEVICE, Precision.bf16)
        launched = Computation(objective, optimizer, scaler, 1.0, DEVICE, Precision.bf16)
        graphed = GraphedComputation(launched, reduces=reduces)
        found = []
        for index, batch in enumerate(batches):
            sums, *others = graphed.take([(index, batch)], share=1e-3, rate=1e-3)
            found.append([*sums.tolist(), *(float(value) for value in others)])
        assert graphed.is_recording
        return found, {name: weights.detach().double() for name, weights in objective.named_parameters()}

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        summed, weights = trained(reduces=True)
    finally:
        dist.destroy_process_group()
    alone, wanted = trained(reduces=False)
    for ours, theirs in zip(summed, alone, strict=True):
        assert ours == pytest.approx(theirs, rel=0.02)
    began = dict(build(SMALL).named_parameters())
    for name, weight in wanted.items():
        assert (weights[name] - weight).norm() < 0.05 * (weight - began[name]).norm(), name


def test_train_on_ranks_that_share_a_gpu_replays_and_resumes_on_one(tmp_path: Path) -> None:
    """1 -> 2 -> 1 ranks, against a training of one: the same losses, but for rounding."""
    recipe: dict[str, Any] = {"max_steps": 30, "save_every": 10, "validate_every": 30, "log_every": 1}
    job = job_on_device(tmp_path, precision=Precision.bf16, cuda_graphs=True, compile=False, **recipe)

    def take(job: TrainJob, size: int) -> None:
        # By its own name a machine without a network may not find itself, and ranks would wait for minutes.
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--local-addr=localhost", f"--nproc-per-node={size}")
        command = [sys.executable, *torchrun, "-m", "transformer", "train", *overrides(job)]
        environment = os.environ | {"TRANSFORMER_SHARE_GPUS": "1", "PYTHONPATH": str(ROOT)}
        folder = Path(job.run_dir).parent
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        if DEVICE.type == "cuda":  # it was to be replayed, and no proof of the device came to another way
            found = read(Path(job.run_dir) / "run.json")
            assert (found["resolved"]["cuda_graphs"], found["proof"]["failures"]) == (True, {})

    take(job, 1)
    shared = replace(job, run_dir=str(tmp_path / "shared"))
    for steps, size in ((10, 1), (20, 2), (30, 1)):
        take(replace(shared, train=replace(job.train, max_steps=steps)), size)

    alone, among_two = (
        [line["train/loss"] for line in metrics_of(Path(folder)) if "train/loss" in line]
        for folder in (job.run_dir, shared.run_dir)
    )
    assert among_two == pytest.approx(alone, rel=0.02)


def test_seed_draws_draws_what_manual_seed_does() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3, device=DEVICE), torch.rand(3)
    seed_draws(7, DEVICE)
    assert torch.equal(torch.rand(3, device=DEVICE), expected[0])
    assert torch.equal(torch.rand(3), expected[1])


def test_load_steps_copies_ahead_the_steps_of_the_host() -> None:
    """The device is kept busy before it reads each of them, so that memory that is used again too early would show."""
    batching = Batching(
        mixture=[(len(corpus()), 1.0)],
        seed=1,
        tokens_per_step=300,
        max_tokens=512,
        micro_batch_multiple=1,
        capacities=CAPACITIES,
    )

    def sums(prefetch: int, device: torch.device) -> list[list[int]]:
        found = []
        steps = load_steps(
            lambda epoch: corpus(),
            batching,
            rank=0,
            world_size=1,
            position=Position(0, 0, 0),
            prefetch=prefetch,
            device=device,
        )
        with closing(steps):
            for step in islice(steps, 60):
                step.await_copy()
                if device.type == "cuda":
                    torch.cuda._sleep(20_000_000)  # cycles: about a hundredth of a second
                parts: list[Tensor] = []
                for _, batch in step.micro_batches:
                    batch.map(partial(add_up, parts))
                found.append(torch.stack(parts))
        return [part.tolist() for part in found]

    assert sums(4, DEVICE) == sums(0, CPU)


def test_objective_compiled_is_eager_and_ten_packed_batches_are_one_shape() -> None:
    """The first batch compiles; those after it do not. (On a CPU groups change shape: two do.)"""
    from torch._dynamo.utils import counters  # slow

    plain = build(SMALL)
    compiled = copy.deepcopy(plain)
    compiled.compile()
    seen = []
    for ids in some(10 if DEVICE.type == "cuda" else 2):
        batch = collate(corpus(), ids, CAPACITIES, kernel=packed_kernel(torch.bfloat16))
        found, wanted = (outcome(objective, batch, Precision.bf16) for objective in (compiled, plain))
        assert_close(found, wanted, 1e-3, 0.15)
        seen.append(counters["stats"]["unique_graphs"])
    assert seen[0] > 0
    assert DEVICE.type == "cpu" or seen[0] == seen[-1]


def add_up(parts: list[Tensor], tensor: Tensor) -> Tensor:
    """Note the sum of a tensor of a batch, which stays as it is."""
    parts.append(tensor.long().sum())
    return tensor


def job_on_device(folder: Path, **recipe: Any) -> TrainJob:
    return tiny_job(folder / "run", write_corpus(folder / "corpus"), device=Device[DEVICE.type], **recipe)


def train(job: TrainJob) -> Path:
    """By the public command: a process of its own, in which cuBLAS has not started yet."""
    run_dir = Path(job.run_dir)
    finish(start("train", *overrides(job), cwd=run_dir.parent), 0)
    return run_dir


def test_train_in_fp16_learns_under_a_scaled_loss(tmp_path: Path) -> None:
    job = job_on_device(tmp_path, precision=Precision.fp16, max_steps=60, save_every=20, validate_every=60)
    job.train.compile = False
    run_dir = train(job)
    losses = [line["train/loss"] for line in metrics_of(run_dir) if "train/loss" in line]
    assert sum(losses[-10:]) / 10 < losses[0] - 1.0
    assert results_of(run_dir)["skipped_updates"] < 10


@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16])
def test_train_deterministic_resumes_to_the_last_bit(tmp_path: Path, precision: Precision) -> None:
    job = job_on_device(tmp_path, precision=precision, deterministic=True, save_every=3, validate_every=6)
    job.train.compile = False
    straight = train(job)
    resumed = replace(job, run_dir=str(tmp_path / "resumed"))
    for steps in (6, 12):
        train(replace(resumed, train=replace(job.train, max_steps=steps)))
    ends = [step_dir(Path(run_dir), 12) for run_dir in (straight, resumed.run_dir)]
    for name in ("model", "optimizer"):
        assert_same_tensors(*(end / f"{name}.safetensors" for end in ends))
    assert progress_of(straight, 12) == progress_of(Path(resumed.run_dir), 12)


def test_train_with_nothing_set_runs_on_the_device(tmp_path: Path) -> None:
    """On a GPU `auto` comes to packed and bf16 where that is fast; the loss falls, the tests are scored."""
    run_dir = train(job_on_device(tmp_path, precision=Precision.auto, max_steps=60, save_every=20, validate_every=60))
    resolved = read(run_dir / "run.json")["resolved"]
    assert resolved["device"] == DEVICE.type
    if DEVICE.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
        wanted = ("packed", "bf16") if fast else ("padded", "fp32")
        assert (resolved["layout"], resolved["precision"]) == wanted
        assert not resolved["compile"], "so short a training ends before it would pay"
    losses = [line["train/loss"] for line in metrics_of(run_dir) if "train/loss" in line]
    assert sum(losses[-10:]) / 10 < losses[0] - 1.0
    assert results_of(run_dir)["test_sets"].keys() == {"test", "other"}


def test_beam_search_finds_what_it_finds_on_a_cpu() -> None:
    """In fp32, on 12 sentences of 1 to 12 pieces; sharp distributions, so that no rounding decides."""
    draw = np.random.default_rng(1)
    sources = [draw.integers(4, V, size=n).tolist() for n in range(1, 13)]

    def search(device: torch.device) -> list[list[Hypothesis]]:
        model = build(SMALL, device=device).eval().model
        with torch.no_grad():
            model.output.mul_(2.0)
        rows = torch.tensor([[*ids, EOS] + [0] * (12 - len(ids)) for ids in sources], device=device)
        layout = Padded.of([len(ids) + 1 for ids in sources], 13).to(device)
        with torch.inference_mode():
            return beam_search(
                model.decode_step,
                model.start(model.encode(rows, layout), layout, beam_size=4),
                beam_size=4,
                n_best=2,
                max_lengths=torch.tensor([len(ids) + 10 for ids in sources], device=device),
                penalty=length_penalty(0.6),
                bos=BOS,
                eos=EOS,
            )

    found, wanted = search(DEVICE), search(CPU)
    for one, other in zip(found, wanted, strict=True):
        assert [hypothesis.tokens for hypothesis in one] == [hypothesis.tokens for hypothesis in other]
        log_probs = [hypothesis.log_prob for hypothesis in other]
        assert [hypothesis.log_prob for hypothesis in one] == pytest.approx(log_probs, rel=1e-4)


def test_replayed_search_finds_what_a_launched_one_finds() -> None:
    """In fp32, on 70 sentences, which move to a smaller place; the second time, nothing is recorded any more."""
    draw = np.random.default_rng(2)
    sources = [draw.integers(4, V, size=n % 12 + 1).tolist() for n in range(70)]
    model = build(SMALL, device=DEVICE).eval().model
    with torch.no_grad():
        model.output.mul_(2.0)
    launched = BatchedDecoder.of(model, SearchConfig(max_extra=10), device=DEVICE, precision=Precision.fp32)
    replayed = launched.replayed()
    assert replayed.replay is not None

    wanted = launched.hypotheses(sources, n_best=2)
    recorded = []
    for _ in range(2):
        found = replayed.hypotheses(sources, n_best=2)
        recorded.append(replayed.replay.n_recorded)
        for one, other in zip(found, wanted, strict=True):
            assert [hypothesis.tokens for hypothesis in one] == [hypothesis.tokens for hypothesis in other]
            log_probs = [hypothesis.log_prob for hypothesis in other]
            assert [hypothesis.log_prob for hypothesis in one] == pytest.approx(log_probs, rel=1e-4)
    assert replayed.replay.is_recording
    assert recorded[0] == recorded[1]
    assert (recorded[0] > 0) is (DEVICE.type == "cuda")
