"""The package's Triton kernels without a GPU: their values on a CPU, and their machine code for two GPUs.

    TRITON_INTERPRET=1 python tests/support/triton_kernels.py attention      or another part
    python tests/support/triton_kernels.py machine_code

Triton's interpreter runs a kernel program by program in NumPy. It decides at import whether to, for the whole process:
so this is for processes of their own, which print what they found as JSON. Errors are norms of differences over norms.
"""

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo.utils
import triton
from torch import Tensor

from support.paths import ROOT
from transformer.config.settings import AttentionKernel, ModelConfig, Norm
from transformer.data.batch import Batch, collate
from transformer.data.packing import pack
from transformer.data.store import Store
from transformer.kernels.add_norm import plain_add_norm
from transformer.kernels.gpu import attention as attention_kernels
from transformer.kernels.gpu import loss as loss_kernels
from transformer.kernels.gpu import norm as norm_kernels
from transformer.kernels.gpu import sentences as sentence_kernels
from transformer.kernels.packed_attention import plain_attention
from transformer.kernels.ranges import LARGE, SMALL
from transformer.kernels.triton_loss import triton_linear_cross_entropy
from transformer.layout import Packed, Padded
from transformer.loss import smoothed_cross_entropy
from transformer.model.attention import AttentionSpec, attend, attend_sentences, attention_weights
from transformer.model.transformer import Transformer
from transformer.training.step import Objective

SLOTS = 256
FEW = [(20, 70), (1, 3), (60, 21)]  # lengths of pairs
FEW_SLOTS = 96
SCALE = 0.3
DROPOUT = 0.25


def main() -> None:
    parser = argparse.ArgumentParser(description="The Triton kernels without a GPU.")
    parser.add_argument("part", choices=[*INTERPRETED, *COMPILED])
    args = parser.parse_args()

    torch.set_num_threads(1)
    found: Any
    if args.part in INTERPRETED:
        let_numpy_count()
        found = INTERPRETED[args.part]()
    else:
        with tempfile.TemporaryDirectory() as folder:
            found = [asdict(kernel) for kernel in COMPILED[args.part](Path(folder))]
    json.dump(found, sys.stdout)


def let_numpy_count() -> None:
    """The interpreter of triton 3.6 counts loops by `int(array)`, which NumPy 2.4 refuses for arrays of one number."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_count(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_count


def difference(found: Tensor, wanted: Tensor) -> float:
    """The norm of the difference over the norm of what is wanted; NaN where either holds one."""
    return float((found.detach().double() - wanted.detach().double()).norm() / wanted.detach().double().norm())


# ---- attention ------------------------------------------------------------------------------------------------------


def sentence_lengths() -> np.ndarray[Any, np.dtype[np.int32]]:
    """Pairs of lengths, `(B, 2)`: of real sentences, and of one token, of a whole tile, of more than two."""
    sides = []
    for language in ("en", "de"):
        with (ROOT / f"data/demo/train.{language}").open(encoding="utf-8") as lines:
            sides.append([len(line.split()) + 1 for line in islice(lines, 4)])
    pairs = [*zip(*sides, strict=True), (1, 1), (64, 2), (1, 65), (130, 90), (3, 1)]
    return np.array(pairs, dtype=np.int32)


def draw(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@dataclass(frozen=True)
class Case:
    """What attends to what."""

    role: str  # encoder, causal or cross
    dtype: torch.dtype
    heads: int
    width: int
    value_width: int


def attention() -> dict[str, Any]:
    """How far each kernel is from the formula, and what dropout does."""
    cases = {
        "encoder": Case("encoder", torch.float64, 1, 16, 16),
        "causal": Case("causal", torch.float64, 1, 16, 16),
        "cross": Case("cross", torch.float64, 2, 16, 16),
        "widths that are padded": Case("causal", torch.float64, 1, 24, 40),
        "float32": Case("cross", torch.float32, 1, 64, 64),
        "float16": Case("causal", torch.float16, 1, 64, 64),
    }
    return {
        "parity": {name: parity(case) for name, case in cases.items()},
        "strided": strided(),
        "empty": empty_slots(),
        "dropout": dropout(),
    }


def layouts(role: str, lengths: Any, slots: int, kernel: AttentionKernel = AttentionKernel.triton) -> tuple[Any, Any]:
    """Queries and keys."""
    source, target = pack(np.array(lengths), (slots, slots), kernel=kernel)
    return {"encoder": (source, source), "causal": (target, target), "cross": (target, source)}[role]


def by_sentence(q: Tensor, k: Tensor, v: Tensor, *, queries: Packed, keys: Packed, causal: bool) -> Tensor:
    """`attention_weights` of each sentence alone, times its values; zero in empty slots."""
    out = torch.zeros(len(q), q.shape[1], v.shape[2], dtype=q.dtype)
    bounds = zip(pairwise(queries.offsets.tolist()), pairwise(keys.offsets.tolist()), strict=True)
    for (start, end), (first, last) in bounds:
        if end == start:
            continue
        weights = attention_weights(
            q[None, start:end],
            k[None, first:last],
            queries=Padded.full_rows(1, end - start, q.device),
            keys=Padded.full_rows(1, last - first, q.device),
            causal=causal,
            scale=SCALE,
            score_vector=None,
        )  # (1, H, T, S)
        out[start:end] = torch.einsum("bhts,shw->thw", weights, v[first:last])
    return out


def look_of(queries: Packed, keys: Packed, *, causal: bool, dropout: float = 0.0) -> AttentionSpec:
    """How the kernel looks at packed sentences."""
    return AttentionSpec(queries, keys, causal=causal, scale=SCALE, score_vector=None, dropout=dropout)


def parity(case: Case, kernel: AttentionKernel = AttentionKernel.triton, lengths: Any = None) -> list[float]:
    """The errors of the output and of the gradients of q, k and v."""
    queries, keys = layouts(case.role, sentence_lengths() if lengths is None else lengths, SLOTS, kernel)
    causal = case.role == "causal"
    q = draw(SLOTS, case.heads, case.width, seed=1, dtype=case.dtype).requires_grad_()
    k = draw(SLOTS, case.heads, case.width, seed=2, dtype=case.dtype).requires_grad_()
    v = draw(SLOTS, case.heads, case.value_width, seed=3, dtype=case.dtype).requires_grad_()
    upstream = draw(SLOTS, case.heads, case.value_width, seed=4, dtype=case.dtype)
    found = attend(q, k, v, look_of(queries, keys, causal=causal))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wanted = by_sentence(*exact, queries=queries, keys=keys, causal=causal)

    gradients = torch.autograd.grad(found, (q, k, v), upstream)
    expected = torch.autograd.grad(wanted, exact, upstream.double())
    pairs = zip((found, *gradients), (wanted, *expected), strict=True)
    return [difference(one, other) for one, other in pairs]


def strided(kernel: AttentionKernel = AttentionKernel.triton) -> bool:
    """Whether q, k and v that lie beside each other in one tensor give what they give apart, to the last bit."""
    queries, keys = layouts("encoder", FEW, FEW_SLOTS, kernel)
    together = draw(FEW_SLOTS, 3, 2, 16, seed=1, dtype=torch.float32).requires_grad_()
    apart = [x.detach().contiguous().requires_grad_() for x in together.unbind(1)]
    results = []
    for inputs in (together.unbind(1), apart):
        out = attend(
            inputs[0],
            inputs[1],
            inputs[2],
            AttentionSpec(queries=queries, keys=keys, causal=False, dropout=0.0, scale=SCALE, score_vector=None),
        )
        results.append(out)
    upstream = draw(FEW_SLOTS, 2, 16, seed=4, dtype=torch.float32)
    (gradient,) = torch.autograd.grad(results[0], together, upstream)
    gradients = torch.autograd.grad(results[1], apart, upstream)
    return torch.equal(results[0], results[1]) and torch.equal(gradient, torch.stack(gradients, 1))


def empty_slots(kernel: AttentionKernel = AttentionKernel.triton, lengths: Any = FEW, slots: int = FEW_SLOTS) -> bool:
    """Whether NaN in every empty slot, on the way there and back, changes nothing elsewhere and gives zeros there."""
    queries, keys = layouts("cross", lengths, slots, kernel)
    results = []
    for filler in (0.0, math.nan):
        q, k, v, upstream = (draw(slots, 2, 16, seed=seed, dtype=torch.float32) for seed in range(4))
        for x, layout in ((q, queries), (k, keys), (v, keys), (upstream, queries)):
            x[~layout.is_real()] = filler
        inputs = [x.requires_grad_() for x in (q, k, v)]
        out = attend(
            inputs[0],
            inputs[1],
            inputs[2],
            AttentionSpec(queries=queries, keys=keys, causal=False, dropout=0.0, scale=SCALE, score_vector=None),
        )
        results.append([out, *torch.autograd.grad(out, inputs, upstream)])

    clean, filled = results
    same = all(torch.equal(one, other) for one, other in zip(clean, filled, strict=True))
    sides = zip(filled, (queries, queries, keys, keys), strict=True)
    return same and not any(bool(x[~layout.is_real()].any()) for x, layout in sides)


# ---- dropout --------------------------------------------------------------------------------------------------------


def philox(seed: int, *counter: Any) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Philox4x32 with 7 rounds, written from the paper (Salmon et al., 2011, section 3.3): `(..., 4)`."""
    mask = np.uint64(0xFFFFFFFF)
    words = [np.asarray(word, dtype=np.uint64) for word in np.broadcast_arrays(*counter)]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(7):
        left = words[0] * np.uint64(0xD2511F53)
        right = words[2] * np.uint64(0xCD9E8D57)
        words = [
            (right >> np.uint64(32)) ^ words[1] ^ np.uint64(key[0]),
            right & mask,
            (left >> np.uint64(32)) ^ words[3] ^ np.uint64(key[1]),
            left & mask,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.stack(words, axis=-1).astype(np.uint32)


def kept_by_philox(seed: int, *, heads: int, queries: int, keys: int) -> Tensor:
    """Which weights are kept, `(H, N, M)`: those whose 16 bits are at least a quarter of what 16 bits can be."""
    head, query, group = np.ogrid[:heads, :queries, : keys // 8]
    words = philox(seed, query, group, head, 0)  # (H, N, M / 8, 4)
    halves = np.stack((words & 0xFFFF, words >> 16), axis=-1)  # (H, N, M / 8, 4, 2)
    return torch.from_numpy(halves.reshape(heads, queries, keys) >= DROPOUT * 2**16)


def dropout() -> dict[str, Any]:
    """The kernels' masks, forward and backward, against masks made by NumPy and a formula that torch differentiates."""
    queries, keys = layouts("cross", FEW, FEW_SLOTS)
    key_ranges, query_ranges = queries.ranges_in(keys), keys.ranges_in(queries)
    seed = 0x1234_5678_9ABC_DEF
    kept = kept_by_philox(seed, heads=2, queries=FEW_SLOTS, keys=FEW_SLOTS)

    inputs = [draw(FEW_SLOTS, 2, 16, seed=number, dtype=torch.float64).requires_grad_() for number in range(3)]
    upstream = draw(FEW_SLOTS, 2, 16, seed=4, dtype=torch.float64)
    wanted = plain_attention(*inputs, keys=key_ranges, scale=SCALE, kept=kept.double() / (1 - DROPOUT))
    expected = torch.autograd.grad(wanted, inputs, upstream)

    def run(number: int) -> list[Tensor]:
        out, _ = attention_kernels.packed_attention(
            *inputs,
            torch.tensor([number]),
            key_ranges.first,
            key_ranges.end,
            query_ranges.first,
            query_ranges.end,
            DROPOUT,
            SCALE,
        )
        return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]

    found = run(seed)
    again = run(seed)

    # The public form draws its seed from torch's generator.
    drawn = []
    for start in (7, 7, 8):
        torch.manual_seed(start)
        out = attend(
            inputs[0],
            inputs[1],
            inputs[2],
            AttentionSpec(queries=queries, keys=keys, causal=False, dropout=DROPOUT, scale=SCALE, score_vector=None),
        )
        drawn.append(out.detach())

    many = kept_by_philox(seed, heads=4, queries=200, keys=200)
    neighbours = torch.stack((many[..., :-1].flatten(), many[..., 1:].flatten())).double()
    return {
        "errors": [difference(one, two) for one, two in zip(found, (wanted, *expected), strict=True)],
        "again": all(torch.equal(one, two) for one, two in zip(found, again, strict=True)),
        "share_kept": many.double().mean().item(),
        "weights": many.numel(),
        "neighbours": float(torch.corrcoef(neighbours)[0, 1]),
        "follows_the_generator": [torch.equal(drawn[0], drawn[1]), torch.equal(drawn[0], drawn[2])],
    }


# ---- attention by whole sentences -----------------------------------------------------------------------------------

SHORT = [(20, 30), (13, 3), (60, 21), (7, 64), (1, 1), (5, 2)]  # small tiles do
LONG = [(20, 30), (13, 3), (60, 21), (30, 70), (5, 2), (101, 33), (131, 7), (9, 9)]  # large ones do not, either


def sentences() -> dict[str, Any]:
    """How far the kernels are from the formula, and whether they drop what the formula drops."""
    cases = {
        "encoder": Case("encoder", torch.float64, 1, 16, 16),
        "causal": Case("causal", torch.float64, 1, 16, 16),
        "cross": Case("cross", torch.float64, 2, 16, 16),
        "widths that are padded": Case("causal", torch.float64, 1, 24, 40),
        "float32": Case("cross", torch.float32, 1, 64, 64),
        "float16": Case("causal", torch.float16, 1, 64, 64),
        "wide": Case("encoder", torch.float16, 1, 128, 128),
    }
    kernel = AttentionKernel.sentences
    by_lengths = {"of the corpus": None, "short": SHORT}
    return {
        "parity": {
            f"{name}, {which}": parity(case, kernel, lengths)
            for name, case in cases.items()
            for which, lengths in by_lengths.items()
        },
        "strided": strided(kernel),
        "joined": [joined(lengths) for lengths in (SHORT, LONG)],
        "empty": [empty_slots(kernel, lengths, 640) for lengths in (SHORT, FEW, LONG)],
        "dropout": {
            f"{role}, {name}": sentence_dropout(role, lengths)
            for role in ("encoder", "causal", "cross")
            for name, lengths in (("short", SHORT), ("long", LONG))
        },
    }


def joined(lengths: Any) -> bool:
    """Whether q, k and v in one tensor, or k and v in one, have the results and the gradients of three tensors."""
    queries, keys = layouts("encoder", lengths, 384, AttentionKernel.sentences)
    together = draw(384, 3, 2, 16, seed=1, dtype=torch.float32)
    upstream = draw(384, 2, 16, seed=4, dtype=torch.float32)
    results = []
    ways: list[list[Any]] = [[0, 1, 2], [0, slice(1, 3)], [slice(0, 3)]]
    for cuts in ways:
        operands = [together[:, cut].clone().requires_grad_() for cut in cuts]
        out = attend_sentences(operands, look_of(queries, keys, causal=False))
        gradients = torch.autograd.grad(out, operands, upstream)
        results.append([out.detach(), torch.cat([gradient.view(384, -1, 2, 16) for gradient in gradients], 1)])
    return all(torch.equal(one, two) for other in results[1:] for one, two in zip(results[0], other, strict=True))


def sentence_dropout(role: str, lengths: Any) -> list[float]:
    """The errors of output and gradients against the formula with a mask made by NumPy; tiles begin anywhere."""
    slots = 384
    queries, keys = layouts(role, lengths, slots, AttentionKernel.sentences)
    causal = role == "causal"
    ranges = queries.ranges_in(keys).up_to_itself() if causal else queries.ranges_in(keys)
    seed = 0x1234_5678_9ABC_DEF
    kept = kept_by_philox(seed, heads=2, queries=slots, keys=slots)

    inputs = [draw(slots, 2, 16, seed=number, dtype=torch.float64).requires_grad_() for number in range(3)]
    upstream = draw(slots, 2, 16, seed=4, dtype=torch.float64)
    wanted = plain_attention(*inputs, keys=ranges, scale=SCALE, kept=kept.double() / (1 - DROPOUT))
    expected = torch.autograd.grad(wanted, inputs, upstream)

    found = sentence_kernels.sentence_attention(
        list(inputs),
        torch.tensor([seed]),
        queries.tiles.cross if role == "cross" else queries.tiles.own,
        queries.tiles.owner,
        keys.tiles.owner,
        queries.offsets,
        keys.offsets,
        queries.longest,
        causal,
        DROPOUT,
        SCALE,
    )
    gradients = torch.autograd.grad(found, inputs, upstream)
    return [difference(one, two) for one, two in zip((found, *gradients), (wanted, *expected), strict=True)]


# ---- residual connection, dropout and norm --------------------------------------------------------------------------


def norm() -> dict[str, list[float]]:
    """The errors of the result and of the gradients of x, y, gain and bias."""
    double, half = torch.float64, torch.float16
    return {
        "float64": add_norm(21, 64, double, double, rate=0.0),
        "dropout": add_norm(21, 64, double, double, rate=DROPOUT),
        "rows that are padded": add_norm(5, 24, double, double, rate=DROPOUT),
        "more rows than blocks have at once": add_norm(37, 512, double, double, rate=DROPOUT),
        "float32": add_norm(21, 64, torch.float32, torch.float32, rate=DROPOUT),
        "float16": add_norm(21, 64, half, half, rate=DROPOUT),
        "two types": add_norm(21, 64, torch.float32, half, rate=DROPOUT),
        "no row": add_norm(0, 64, double, double, rate=DROPOUT),
    }


def add_norm(n: int, d_model: int, x_type: torch.dtype, y_type: torch.dtype, *, rate: float) -> list[float]:
    """Against the plain form in float64, with a mask made by NumPy."""
    seed = 0x1234_5678_9ABC_DEF
    words = philox(seed, np.arange(n * d_model // 8), 0, 0, 0)  # (places / 8, 4)
    halves = np.stack((words & 0xFFFF, words >> 16), axis=-1)
    kept = torch.from_numpy(halves.reshape(n, d_model) >= rate * 2**16).double() / (1 - rate)

    wide = torch.promote_types(y_type, torch.float32)
    gain, bias = draw(2, d_model, seed=3, dtype=wide)
    types = [x_type, y_type, wide, wide]
    values = [draw(n, d_model, seed=1, dtype=x_type), draw(n, d_model, seed=2, dtype=y_type), 1 + gain / 4, bias]
    upstream = draw(n, d_model, seed=4, dtype=y_type)

    ours = [value.clone().requires_grad_() for value in values]
    found, *_ = norm_kernels.add_norm(ours[0], ours[1], ours[2], ours[3], torch.tensor([seed]), rate, 1e-5)
    gradients = torch.autograd.grad(found, ours, upstream)
    assert [gradient.dtype for gradient in (found, *gradients)] == [y_type, *types]

    exact = [value.double().requires_grad_() for value in values]
    wanted = plain_add_norm(exact[0], exact[1], exact[2], exact[3], kept=kept, eps=1e-5)
    expected = torch.autograd.grad(wanted, exact, upstream.double())
    pairs = zip((found, *gradients), (wanted, *expected), strict=True)
    return [difference(one, two) if n else float(one.detach().norm()) for one, two in pairs]


# ---- all of them, in a model ----------------------------------------------------------------------------------------


def model() -> dict[str, Any]:
    """The loss and the gradient of a small model on packed sentences, plain and with every kernel of `fused`."""
    pairs = [(9, 5), (1, 30), (40, 33), (70, 20), (3, 3)]
    found = {}
    variants: dict[str, dict[str, Any]] = {
        "post": {},
        "pre": {"norm": Norm.pre},
        "biases": {"biases": True},
        "two widths": {"d_k": 16, "d_v": 24},
    }
    for name, variant in variants.items():
        torch.manual_seed(1)
        config = ModelConfig(n_layers=1, d_model=32, d_ff=48, n_heads=2, dropout=0.0, **variant)
        transformer = Transformer(config, 90).double()
        results = []
        for kernel, rows in ((None, None), (AttentionKernel.sentences, 128)):
            batch = batch_of(pairs, kernel)
            loss, _ = Objective(transformer, 0.1, loss_rows=rows).train()(batch)
            results.append([loss, *torch.autograd.grad(loss, list(transformer.parameters()))])
        plain, fused = results
        least = 1e-3 * max(float(gradient.norm()) for gradient in plain[1:])  # a bias of keys has no gradient
        found[name] = [
            float((one - two).detach().norm()) / max(float(two.detach().norm()), least)
            for one, two in zip(fused, plain, strict=True)
        ]
    return found


def batch_of(pairs: list[tuple[int, int]], kernel: AttentionKernel | None) -> Batch:
    """Sentences of these lengths, packed."""
    draw_pieces = np.random.default_rng(0)
    sides = [[draw_pieces.integers(5, 90, pair[side]).tolist() for pair in pairs] for side in range(2)]
    return collate(Store.from_pieces(*sides), np.arange(len(pairs)), (256, 256), kernel=kernel)


def recompiled() -> dict[str, Any]:
    """The graphs that a compiler is handed for batches with small tiles, with large ones, and with longer sentences."""
    config = ModelConfig(n_layers=1, d_model=32, d_ff=48, n_heads=2, dropout=0.0)
    objective = Objective(Transformer(config, 90).double(), 0.1, loss_rows=128).train()
    compiled = Objective(objective.model, 0.1, loss_rows=128).train()
    compiled.compile(backend="aot_eager")

    longest, errors = [], []
    for pairs in ([(9, 5), (1, 30)], [(70, 20), (9, 5), (3, 3)], [(140, 20), (9, 5)]):
        batch = batch_of(pairs, AttentionKernel.sentences)
        assert isinstance(batch.source_layout, Packed)
        longest.append(batch.source_layout.longest)
        found, wanted = compiled(batch)[0], objective(batch)[0]
        found.backward()
        errors.append(difference(found, wanted))
    return {"longest": longest, "errors": errors, "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"]}


# ---- the loss -------------------------------------------------------------------------------------------------------


def loss() -> dict[str, Any]:
    """How far the loss in Triton, and its two gradients, are from the reference of the loss."""
    return {
        "float64": triton_loss(7, 300, torch.float64, smoothing=0.1, rows=3),
        "no smoothing": triton_loss(7, 300, torch.float64, smoothing=0.0, rows=128),
        "one block": triton_loss(5, 5_000, torch.float64, smoothing=0.1, rows=128),
        "37,000 pieces": triton_loss(6, 37_000, torch.float32, smoothing=0.1, rows=4),
        "bfloat16": triton_loss(6, 37_000, torch.bfloat16, smoothing=0.1, rows=128),
        "far apart": triton_loss(5, 500, torch.float32, smoothing=0.1, rows=128, spread=100.0),
        "bias": triton_loss(7, 300, torch.float64, smoothing=0.1, rows=3, has_bias=True),
        "bias in bfloat16": triton_loss(6, 37_000, torch.bfloat16, smoothing=0.1, rows=128, has_bias=True),
        "no rows": triton_loss(0, 300, torch.float64, smoothing=0.1, rows=128),
        "empty rows alone": triton_loss(3, 300, torch.float64, smoothing=0.1, rows=128, first_real=3),
    }


def triton_loss(
    n: int,
    vocab_size: int,
    dtype: torch.dtype,
    *,
    smoothing: float,
    rows: int,
    spread: float = 1.0,
    first_real: int = 1,
    has_bias: bool = False,
) -> dict[str, Any]:
    """Values and errors; the rows before `first_real` are empty slots, and so is the last of more than five."""
    d_model = 16
    hidden = (spread * draw(n, d_model, seed=1, dtype=torch.float64)).to(dtype)
    matrix = draw(vocab_size, d_model, seed=2, dtype=torch.promote_types(dtype, torch.float32)) / 4
    targets = torch.randint(4, vocab_size, (n,), generator=torch.Generator().manual_seed(3))
    targets[:first_real] = 0
    targets[5:] = 0

    bias = draw(1, vocab_size, seed=4, dtype=matrix.dtype)[0] / 4

    inputs = [hidden, matrix, bias] if has_bias else [hidden, matrix]
    ours = [tensor.clone().requires_grad_() for tensor in inputs]
    found = triton_linear_cross_entropy(
        ours[0],
        ours[1],
        targets,
        bias=ours[2] if has_bias else None,
        label_smoothing=smoothing,
        rows=rows,
    )
    gradients = torch.autograd.grad(0.37 * found[0], ours)

    exact = [tensor.double().requires_grad_() for tensor in inputs]
    logits = exact[0] @ exact[1].T + (exact[2] if has_bias else 0.0)
    wanted = smoothed_cross_entropy(logits, targets, label_smoothing=smoothing)
    expected = torch.autograd.grad(0.37 * wanted[0], exact)
    return {
        "found": [value.item() for value in found],
        "wanted": [value.item() for value in wanted],
        "dtypes": [str(gradient.dtype) for gradient in gradients],
        "largest": [
            float((one - other).abs().max()) if n else 0.0 for one, other in zip(gradients, expected, strict=True)
        ],
        "scale": [float(other.abs().max()) if n else 0.0 for other in expected],
    }


# ---- machine code ---------------------------------------------------------------------------------------------------


@dataclass
class Kernel:
    """A kernel as machine code."""

    name: str
    arch: int  # 80 for sm_80
    width: int  # of heads, or of rows that are normalised; 0: it has none
    tile: int  # slots of a tile; 0: it has none
    dropout: bool
    registers: int  # of a thread
    stack: int  # bytes of a thread: more than 0 where registers did not suffice
    shared: int  # bytes of a block of threads
    matrix_units: bool  # whether it multiplies by them
    alone: int  # reads and writes of memory that are of one number in half precision, and not of several at once


POINTERS = {
    **dict.fromkeys(("q", "k", "v", "out", "d_out", "d_q", "d_k", "d_v", "logits"), "*bf16"),
    **dict.fromkeys(("x", "y", "total", "d_x", "d_y"), "*bf16"),
    **dict.fromkeys(("gain", "bias", "mean", "rstd", "d_gain", "d_bias"), "*fp32"),
    **dict.fromkeys(("lse", "delta", "plain", "linear"), "*fp32"),
    **dict.fromkeys(("key_first", "key_end", "query_first", "query_end"), "*i32"),
    **dict.fromkeys(("tiles", "query_owner", "key_owner"), "*i32"),
    **dict.fromkeys(("seed", "targets"), "*i64"),
}


def machine_code(folder: Path) -> Iterator[Kernel]:
    """Each kernel, compiled as its first launch would for the base model's sizes, in bf16."""
    for arch in (80, 90):
        for width, rate in ((64, 0.0), (64, 0.1), (128, 0.1)):
            like = torch.empty(1, 1, width, dtype=torch.bfloat16)
            values = attention_kernels.constants(like, like, dropout=rate, scale=0.125)
            for kernel, warps in (
                (attention_kernels._forward_kernel, attention_kernels.warps(like, like)),
                (attention_kernels._queries_backward_kernel, attention_kernels.warps(like, like)),
                (attention_kernels._keys_backward_kernel, attention_kernels.KEYS_WARPS),
            ):
                yield _compile(
                    kernel,
                    values,
                    arch=arch,
                    width=width,
                    rate=rate,
                    warps=warps,
                    stages=attention_kernels.STAGES,
                    folder=folder,
                )
        values = (37_000, 0.9, 0, loss_kernels.COLUMNS, triton.language.float32)
        yield _compile(
            loss_kernels._loss_kernel,
            values,
            arch=arch,
            width=0,
            rate=0.0,
            warps=loss_kernels.WARPS,
            stages=3,  # Triton's default, which says nothing here: it loads ahead only for matrix units
            folder=folder,
        )


SENTENCES = [(64, SMALL, 0.0), (64, SMALL, 0.1), (64, LARGE, 0.1), (128, SMALL, 0.1), (128, LARGE, 0.1)]


def sentence_machine_code(folder: Path) -> Iterator[Kernel]:
    """The same of attention by whole sentences, for three generations: wide heads are not for Ampere."""
    for arch in (80, 90, 100):
        for width, tile, rate in SENTENCES[: 3 if arch == 80 else None]:
            like = torch.empty(1, 1, width, dtype=torch.bfloat16)
            for kernel in (sentence_kernels._forward_kernel, sentence_kernels._backward_kernel):
                yield _compile(
                    kernel,
                    sentence_kernels.constants(like, like, causal=True, dropout=rate, scale=0.125, tile=tile),
                    arch=arch,
                    width=width,
                    tile=tile,
                    rate=rate,
                    warps=sentence_kernels.warps(tile),
                    stages=sentence_kernels.STAGES,
                    folder=folder,
                )


def norm_machine_code(folder: Path) -> Iterator[Kernel]:
    """The same of residual connection, dropout and norm, for base and big."""
    for arch in (80, 90, 100):
        for d_model, rate in ((512, 0.0), (512, 0.1), (1024, 0.3)):
            values = norm_kernels.constants(torch.empty(1, d_model, dtype=torch.bfloat16), dropout=rate)
            for kernel, constants in (
                (norm_kernels._forward_kernel, (1e-5, *values)),
                (norm_kernels._backward_kernel, values),
            ):
                yield _compile(
                    kernel,
                    constants,
                    arch=arch,
                    width=d_model,
                    rate=rate,
                    warps=norm_kernels.warps(d_model),
                    stages=norm_kernels.STAGES,
                    folder=folder,
                )


def _compile(
    kernel: Any,
    constants: tuple[Any, ...],
    *,
    arch: int,
    width: int,
    tile: int = 0,
    rate: float,
    warps: int,
    stages: int,
    folder: Path,
) -> Kernel:
    """`constants` are the last arguments of the kernel; sizes and strides are multiples of 16 at this size."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    fixed = dict(zip(names[-len(constants) :], constants, strict=True))
    signature = {name: POINTERS.get(name, "i32") for name in names}
    signature |= dict.fromkeys(fixed, "constexpr")
    aligned = [i for i, name in enumerate(names) if signature[name] not in ("constexpr", "fp32")]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs=fixed,
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)

    path = folder / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    numbers = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert numbers is not None, usage
    return Kernel(
        name=kernel.__name__,
        arch=arch,
        width=width,
        tile=tile,
        dropout=rate > 0.0,
        registers=int(numbers[1]),
        stack=int(numbers[2]),
        shared=compiled.metadata.shared,
        matrix_units=any(name in compiled.asm["ptx"] for name in ("mma.sync", "wgmma", "tcgen05.mma")),
        alone=len(re.findall(r"\b(?:ld|st)\.global\.b16\b", compiled.asm["ptx"])),
    )


INTERPRETED: dict[str, Callable[[], Any]] = {
    "attention": attention,
    "sentences": sentences,
    "norm": norm,
    "model": model,
    "recompiled": recompiled,
    "loss": loss,
}
COMPILED = {
    "machine_code": machine_code,
    "sentence_machine_code": sentence_machine_code,
    "norm_machine_code": norm_machine_code,
}

if __name__ == "__main__":
    main()
