"""A CPU stand-in for torch's attention over packed sentences, and the package's GPU path run with it.

`install` gives a CPU the kernel behind `varlen_attn`, written from equation 1: packed batches without groups then take
the path that they take on a GPU, and real numbers flow. Like torch's own kernel, the stand-in leaves empty slots as it
found them, in both directions: here they are NaN, so that whatever reads one shows it. Our kernels need no stand-in:
Triton has an interpreter (TRITON_INTERPRET=1).

The kernel cannot be taken back: this is for a process of its own, such as one forked from the tests. Run as a script,
this file is a rank whose kernels Triton interprets, and prints what it found as JSON.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._dynamo import lookup_backend, register_backend
from torch._dynamo.utils import counters
from torch.nn.attention import varlen
from torch.nn.parallel import DistributedDataParallel

from support.paths import CORPORA, HAS_CORPORA, ROOT
from support.ranks import start_ranks
from transformer.compute import autocast
from transformer.config.jobs import TrainJob
from transformer.config.settings import AttentionKernel, Device, LayoutKind, ModelConfig, Precision, TokenizerConfig
from transformer.data.batch import Batch
from transformer.data.loader import Position, Step, load_steps
from transformer.data.plan import Batching, packed_capacities
from transformer.data.store import Store
from transformer.data.tokenizer import Tokenizer, train_tokenizer
from transformer.distributed import World, join_world, unsynchronised
from transformer.layout import Packed
from transformer.model.transformer import Transformer
from transformer.records import Resolved
from transformer.training import proof as training_proof
from transformer.training.memory import try_step
from transformer.training.proof import Prover, first_sound, plain_deviation
from transformer.training.step import Objective

CPU = torch.device("cpu")
SMALL = ModelConfig(n_layers=2, d_model=64, d_ff=128, n_heads=2, dropout=0.0)
VOCAB_SIZE = 2_000


# ---- the kernel -----------------------------------------------------------------------------------------------------


def install() -> None:
    """Register the stand-in; what the process has compiled before is forgotten."""
    torch._dynamo.reset()
    counters.clear()
    varlen._varlen_attn.register_kernel("cpu")(_forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(_backward)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """q `(N, H, K)`, k and v `(M, H, K)` -> the output, and two tensors that only the real kernel has a use for."""
    _check_bounds(q_offsets, k_offsets, max_q, max_k)
    weights = _weights(q, k, q_offsets, k_offsets, is_causal=is_causal, scale=scale)
    out = torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype)
    out[q_offsets[-1] :] = torch.nan
    lse = torch.zeros(q.shape[1], q.shape[0])
    return out.contiguous(), lse, torch.zeros(2, dtype=torch.uint64)


def _backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v: those of a softmax between two products."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    weights = _weights(q, k, q_offsets, k_offsets, is_causal=is_causal, scale=scale)  # (H, N, M)

    d_out = d_out.to(torch.float32, copy=True)
    d_out[q_offsets[-1] :] = 0.0  # an empty slot has no weights, and its gradient is never read
    d_weights = torch.einsum("qhd,khd->hqk", d_out, v.float())
    d_scores = scale * weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True))

    d_q = torch.einsum("hqk,khd->qhd", d_scores, k.float()).to(q.dtype).contiguous()
    d_k = torch.einsum("hqk,qhd->khd", d_scores, q.float()).to(q.dtype).contiguous()
    d_v = torch.einsum("hqk,qhd->khd", weights, d_out).to(q.dtype).contiguous()
    d_q[q_offsets[-1] :] = torch.nan
    d_k[k_offsets[-1] :] = torch.nan
    d_v[k_offsets[-1] :] = torch.nan
    return d_q, d_k, d_v


def _check_bounds(q_offsets: Tensor, k_offsets: Tensor, max_q: int, max_k: int) -> None:
    """The real kernel leaves out what lies beyond its bounds, without a word."""
    assert q_offsets.dtype is k_offsets.dtype is torch.int32
    assert len(q_offsets) == len(k_offsets)
    assert int(q_offsets.diff().max()) <= max_q
    assert int(k_offsets.diff().max()) <= max_k


def _weights(
    q: Tensor, k: Tensor, q_offsets: Tensor, k_offsets: Tensor, *, is_causal: bool, scale: float | None
) -> Tensor:
    """The weights of equation 1 within each sentence, `(H, N, M)`; zero in the row of an empty slot."""
    q_sentence = _sentences(q_offsets, len(q))  # (N,)
    k_sentence = _sentences(k_offsets, len(k))  # (M,)
    visible = q_sentence[:, None] == k_sentence[None, :]  # (N, M)
    if is_causal:
        visible &= torch.arange(len(q))[:, None] >= torch.arange(len(k))[None, :]
    visible &= (torch.arange(len(q)) < q_offsets[-1])[:, None]

    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * torch.einsum("qhd,khd->hqk", q.float(), k.float())
    scores = scores.masked_fill(~visible, -1e30)
    return torch.softmax(scores, dim=-1) * visible


def _sentences(offsets: Tensor, count: int) -> Tensor:
    """The sentence of each slot; empty slots are of one more."""
    slots = torch.arange(count, dtype=offsets.dtype)
    return torch.searchsorted(offsets[1:], slots, right=True)


# ---- sentences ------------------------------------------------------------------------------------------------------


def real_sentences() -> Store:
    """Pairs of Multi30k, or of the demo corpus where there is no Multi30k."""
    folder = CORPORA / "multi30k" if HAS_CORPORA else ROOT / "data/demo"
    files = [folder / f"train.{language}" for language in ("en", "de")]
    texts = [file.read_text(encoding="utf-8").split("\n")[:3_000] for file in files]
    model = train_tokenizer(chain(*texts), TokenizerConfig(vocab_size=VOCAB_SIZE))
    tokenizer = Tokenizer(model)
    return Store.from_pieces(*(tokenizer.encode(text) for text in texts))


def uneven_sentences() -> Store:
    """Pairs of 2 to 4 tokens, the same number on both sides, and a fifth of others, of up to 200 tokens."""
    draw = np.random.default_rng(0)
    short = np.repeat(draw.integers(1, 4, size=(8_000, 1)), 2, axis=1)
    long = np.clip(draw.lognormal(3.5, 0.8, size=(2_000, 2)), 8, 199).astype(np.int64)
    pieces = np.concatenate((short, long))
    return Store.from_pieces(*([draw.integers(4, VOCAB_SIZE, size=n).tolist() for n in side] for side in pieces.T))


def steps_of(
    store: Store,
    *,
    tokens_per_step: int,
    max_tokens: int,
    rank: int,
    world_size: int,
    kernel: AttentionKernel | None,
) -> Iterator[Step]:
    """Packed steps of one rank, as training would load them: for the kernel, or without one in groups."""
    capacities = packed_capacities(
        store.lengths, tokens_per_step=tokens_per_step, max_tokens=max_tokens, micro_batch_multiple=world_size
    )
    batching = Batching(
        mixture=((len(store), 1.0),),
        seed=1,
        tokens_per_step=tokens_per_step,
        max_tokens=max_tokens,
        micro_batch_multiple=world_size,
        capacities=capacities,
        kernel=kernel,
    )
    position = Position(0, 0, 0)
    return load_steps(lambda epoch: store, batching, rank=rank, world_size=world_size, position=position, prefetch=0)


def first_batches(store: Store, count: int, tokens: int, *, kernel: AttentionKernel | None) -> Iterator[Batch]:
    """The only micro-batches of the first steps."""
    steps = steps_of(store, tokens_per_step=tokens, max_tokens=tokens, rank=0, world_size=1, kernel=kernel)
    for step in islice(steps, count):
        ((_, batch),) = step.micro_batches
        yield batch


# ---- what is found --------------------------------------------------------------------------------------------------


def build(config: ModelConfig) -> Objective:
    torch.manual_seed(0)
    return Objective(Transformer(config, VOCAB_SIZE), 0.1).train()


def outcome(objective: nn.Module, batch: Batch, precision: Precision) -> tuple[Tensor, Tensor]:
    """The loss of a batch, and its gradient as one vector."""
    objective.zero_grad()
    with autocast(CPU, precision):
        loss, _ = objective(batch)
    loss.backward()
    return loss.detach(), flat_gradient(objective)


def flat_gradient(objective: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in objective.parameters() if p.grad is not None])


def difference(found: Tensor, wanted: Tensor) -> float:
    """The norm of the difference over the norm of what is wanted; NaN where either holds one."""
    return float((found - wanted).norm() / wanted.norm())


def compilations() -> dict[str, int]:
    """What dynamo has done so far in this process."""
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "frames": counters["frames"]["total"],
        "breaks": sum(counters["graph_break"].values()),
    }


def packed(precision: Precision, count: int) -> dict[str, Any]:
    """Real batches, compiled and by the kernel: how far loss and gradient are from those of groups, uncompiled."""
    torch._dynamo.reset()
    counters.clear()
    objective = build(SMALL)
    plain = build(SMALL)
    objective.compile(backend="aot_eager")

    losses = []
    gradients = []
    seen = []
    store = real_sentences()
    kernels = (AttentionKernel.varlen, None)
    pairs = zip(*(first_batches(store, count, 512, kernel=kernel) for kernel in kernels), strict=True)
    for batch, same_in_groups in pairs:
        loss, gradient = outcome(objective, batch, precision)
        seen.append(compilations())
        wanted_loss, wanted_gradient = outcome(plain, same_in_groups, precision)
        losses.append(difference(loss, wanted_loss))
        gradients.append(difference(gradient, wanted_gradient))
    return {"losses": losses, "gradients": gradients, "compilations": seen}


def uneven(count: int) -> dict[str, Any]:
    """Batches of few long sentences and of many short ones: their sizes, and what was compiled after each."""
    objective = build(replace(SMALL, n_layers=1, d_model=32, d_ff=32))
    objective.compile(backend="aot_eager")

    seen = []
    sentences = []
    longest = []
    bounds = []
    for batch in first_batches(uneven_sentences(), count, 640, kernel=AttentionKernel.varlen):
        outcome(objective, batch, Precision.fp32)
        seen.append(compilations())
        assert isinstance(batch.source_layout, Packed)
        assert isinstance(batch.target_layout, Packed)
        bounds.append((batch.source_layout.longest, batch.target_layout.longest))
        lengths = batch.source_layout.offsets.diff()
        sentences.append(int((lengths > 0).sum()))
        longest.append(int(lengths.max()))
    return {"sentences": sentences, "longest": longest, "bounds": bounds, "compilations": seen}


def ranks(kernel: AttentionKernel) -> dict[str, Any]:
    """One of two ranks, and a step of two micro-batches, the first without an all-reduce: compiled, and not.

    What is compiled has been tried before, as the memory of a GPU is.
    Not compiled, attention is by the same kernel where that is the stand-in, else by groups of padded sentences.
    """
    store = real_sentences()
    is_stand_in = kernel is AttentionKernel.varlen
    pieces = 0
    pieces_of_trial = 0

    @register_backend
    def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nonlocal pieces
        pieces += 1
        return lookup_backend("aot_eager")(graph, inputs)

    with join_world(CPU) as world:
        gradients = []
        for compiled in (True, False):
            steps = steps_of(
                store,
                tokens_per_step=800,
                max_tokens=256,
                rank=world.rank,
                world_size=world.size,
                kernel=kernel if compiled or is_stand_in else None,
            )
            step = next(steps)
            objective = build(replace(SMALL, n_layers=4 if is_stand_in else 2))
            if compiled:
                objective.compile(backend="counting")
            parallel = world.wrap(objective)
            assert isinstance(parallel, DistributedDataParallel)
            assert not parallel.will_sync_module_buffers(), "the tables of positions are the same everywhere"
            parallel.bucket_bytes_cap = 2**20  # the compiler cuts where buckets end: a base model has about ten

            *others, (_, last) = step.micro_batches
            if compiled:
                try_step(parallel, [last], device=CPU, precision=Precision.fp32)
                pieces_of_trial = pieces
            for _, batch in others:
                with unsynchronised(parallel):
                    loss, _ = parallel(batch)
                    loss.backward()
            loss, _ = parallel(last)
            loss.backward()
            gradients.append(flat_gradient(parallel))

    compiled_gradient, plain_gradient = gradients
    return {
        "micro_batches": len(step.micro_batches),
        "pieces": pieces,
        "pieces_of_trial": pieces_of_trial,
        "largest_difference": float((compiled_gradient - plain_gradient).abs().max()),
        "norm": float(plain_gradient.norm()),
        "compilations": compilations(),
    }


def proof() -> dict[str, str]:
    """The way that the proof of a device takes, with a sound kernel and with each fault of one, in bf16."""
    store = real_sentences()
    training_proof.COMPARED = 1_000  # the stand-in has weights of all slots
    resolved = Resolved(
        device=Device.cpu,
        precision=Precision.bf16,
        threads=1,
        max_tokens=4_096,
        layout=LayoutKind.packed,
        compile=False,
        micro_batch_multiple=1,
        attention_kernel=AttentionKernel.varlen,
    )
    sound = _weights

    def way(weights: Callable[..., Tensor]) -> str:
        globals()["_weights"] = weights
        prover = Prover(CPU, World(0, 1, {}), known=None, keep=lambda found: None, compares=True)
        model = build(SMALL).model

        def prove(one: Resolved) -> None:
            prover.prove(one, lambda: plain_deviation(one, TrainJob(model=SMALL), model=model, store=store, device=CPU))

        first_sound(prover, resolved, prove)
        return prover.proof.way or ""

    def raises(*given: Any, **how: Any) -> Tensor:
        raise RuntimeError("an illegal memory access was encountered")

    def dropped(q: Tensor, k: Tensor, q_offsets: Tensor, k_offsets: Tensor, **how: Any) -> Tensor:
        """The last key of each sentence, as by a block that is cut too short."""
        weights = sound(q, k, q_offsets, k_offsets, **how).clone()
        weights[:, :, k_offsets[1:].long() - 1] = 0.0
        return weights / weights.sum(-1, keepdim=True).clamp_min(1e-9)

    return {
        "sound": way(sound),
        "raises": way(raises),
        "NaN": way(lambda *given, **how: sound(*given, **how) * torch.nan),
        "not causal": way(lambda *given, is_causal, scale: sound(*given, is_causal=False, scale=scale)),
        "scale": way(lambda *given, is_causal, scale: sound(*given, is_causal=is_causal, scale=1.05 * scale)),
        "keys dropped": way(dropped),
    }


def forked(size: int, find: Callable[[], dict[str, Any]], folder: Path) -> list[Any]:
    """What each of so many processes found, which have the stand-in."""

    def tell() -> None:
        install()
        json.dump(find(), sys.stdout)

    started = start_ranks(size, tell, folder)
    assert started.wait(500.0) == [0] * size, [started.said(rank) for rank in range(size)]
    return [json.loads(started.said(rank)) for rank in range(size)]


def main() -> None:
    """A rank whose attention is by Triton's interpreter; its process must begin with TRITON_INTERPRET=1."""
    from support.triton_kernels import let_numpy_count

    torch.set_num_threads(1)
    install()
    let_numpy_count()
    json.dump(ranks(AttentionKernel.triton), sys.stdout)


if __name__ == "__main__":
    main()
