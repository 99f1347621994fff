"""What several GPUs should make of a step: arithmetic, measured for one GPU alone.

    python scripts/benchmark/scaling.py > scripts/benchmark/results/scaling.md

The model is the usual one of messages, latency plus bytes over bandwidth (alpha-beta): `step_seconds` is all of it, and
every constant is above it, with where it is from.
"""

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from transformer.config.settings import ModelConfig
from transformer.cost import count_parameters

# ---- constants ------------------------------------------------------------------------------------------------------

TOKENS = 25_000  # of a step, on each side (the paper's section 5.1)
VOCAB = 37_000
GRADIENT_BYTES = 4  # fp32: DistributedDataParallel reduces gradients in the type of the weights
BUCKET = 25 * 2**20  # bytes: DistributedDataParallel's default bucket_cap_mb

BANDWIDTH = 350e9  # assumed: bytes a second of NCCL's all-reduce on 8 H200; NVLink's data sheet has 450e9 each way
HOP = 2e-6  # assumed: seconds of a message between two neighbours of a ring
HIDDEN = 0.9  # assumed: the share of the backward pass that a reduction may overlap with
BACKWARD = 2 / 3  # of the work: two of three matrix products
FIXED = 2e-3  # estimated: seconds of a step that do not shrink with it, of some 500 small kernels
HOST = 5.5e-3  # estimated of a fast host: seconds in which it launches a compiled step, so that none is faster
UNEVEN = 0.01  # assumed: what 8 ranks lose by waiting for the slowest; packed batches have equal slots


@dataclass(frozen=True)
class OneGpu:
    """A step of 25,000 tokens on one H200."""

    name: str
    model: ModelConfig
    seconds: float
    adam: float  # of it: all weights are updated on every GPU
    steps: int  # of the paper's training


BASE = ModelConfig()
BIG = ModelConfig(d_model=1024, d_ff=4096, n_heads=16)
GPUS = (  # but for the first, results/gpu-h200.md, estimated by counting operations and bytes
    OneGpu("base, measured", BASE, 51e-3, 0.5e-3, 100_000),
    OneGpu("base, as estimated", BASE, 36e-3, 0.5e-3, 100_000),
    OneGpu("base, as estimated at best", BASE, 25.5e-3, 0.5e-3, 100_000),
    OneGpu("big, attention by FlashAttention 2", BIG, 89e-3, 1.6e-3, 300_000),
    OneGpu("big, as estimated at best", BIG, 68.5e-3, 1.6e-3, 300_000),
)

# ---- the arithmetic -------------------------------------------------------------------------------------------------


def reduce_seconds(size: float, ranks: int, *, buckets: int) -> float:
    """An all-reduce of `size` bytes in buckets: in a ring, each rank sends and receives 2 (n - 1) / n of them."""
    hops = 2 * (ranks - 1)
    return hops / ranks * size / BANDWIDTH + buckets * hops * HOP


def gradient_bytes(model: ModelConfig) -> tuple[int, int]:
    """Bytes of all gradients, and of those of the tied embedding."""
    counted = count_parameters(model, VOCAB)
    return GRADIENT_BYTES * counted.total, GRADIENT_BYTES * counted.embeddings


def message_seconds(model: ModelConfig, ranks: int) -> tuple[float, float]:
    """The all-reduce of the tied embedding, which is one bucket however large, and that of all the rest."""
    total, embedding = gradient_bytes(model)
    rest = total - embedding
    return (
        reduce_seconds(embedding, ranks, buckets=1),
        reduce_seconds(rest, ranks, buckets=math.ceil(rest / BUCKET)),
    )


def waiting_seconds(model: ModelConfig, ranks: int, *, hidden: float) -> float:
    """What a step waits for gradients, where so many seconds of the backward pass hide their reduction.

    The embedding's gradient is complete only when the backward pass has come to the very first layer, so its reduction
    overlaps with nothing. The others begin while the backward pass goes on.
    """
    embedding, rest = message_seconds(model, ranks)
    return embedding + max(0.0, rest - hidden)


def step_seconds(gpu: OneGpu, ranks: int, *, tokens: float, hidden: float = HIDDEN) -> float:
    """A step of `tokens` tokens on each of so many GPUs, of whose backward pass a share hides the reduction."""
    work = (gpu.seconds - FIXED - gpu.adam) * tokens / TOKENS
    waiting = waiting_seconds(gpu.model, ranks, hidden=hidden * BACKWARD * work)
    computed = max(FIXED + work + gpu.adam + waiting, HOST)
    return computed * (1 + UNEVEN * math.log2(ranks) / 3)


def efficiency(gpu: OneGpu, *, seconds: float, tokens: float) -> float:
    """Tokens a second of a GPU with `tokens` of each step, beside one GPU alone with 25,000; in percent."""
    return 100 * gpu.seconds / seconds * tokens / TOKENS


# ---- the page -------------------------------------------------------------------------------------------------------

RANKS = (2, 4, 8)


def page() -> str:
    """The note, as Markdown."""
    estimated, share = GPUS[1], TOKENS / 8
    plain, serial = (
        efficiency(estimated, seconds=seconds, tokens=share)
        for seconds in (
            step_seconds(estimated, 8, tokens=share),
            step_seconds(estimated, 8, tokens=share, hidden=0.0),
        )
    )
    return f"""\
# Several GPUs: what the arithmetic says

**Nobody has measured any of this on several GPUs.** It is what `scripts/benchmark/scaling.py` computes for one machine
with 2, 4 or 8 H200 joined by NVLink, from a step on one of them: that of base is [measured](gpu-h200.md), the others
are estimates, of which those called at best have this package's kernels. Its constants, each with its source, are at
the head of that file.

## What travels

Every rank has all the weights. At each step the ranks add up their gradients, in fp32, by a ring all-reduce: each GPU
sends and receives 2 (n - 1) / n of the bytes, at {BANDWIDTH / 1e9:.0f} GB/s (NVLink has 450 each way), in
buckets of {BUCKET / 2**20:.0f} MiB, with {1e6 * HOP:.0f} us for each hop of each bucket.

| | gradients | of this the tied embedding | all-reduce with 2, 4, 8 GPUs | of this the embedding |
| --- | --- | --- | --- | --- |
{volume_row("base", BASE)}
{volume_row("big", BIG)}

The all-reduce of a bucket begins as soon as its gradients are there, while the backward pass goes on, which takes many
times longer: it costs nothing, down to steps of a few milliseconds. Where the compiled backward pass is one graph,
nothing overlaps (see the end).

The tied embedding is the exception. Its gradient has two parts. The output layer's is the first thing that the backward
pass makes, the input embedding's the last, and only their sum travels. So every step waits for the last column:
{share_of_embedding(estimated, TOKENS)} of a step of 25,000 tokens on each of 8 GPUs (base, as estimated),
{share_of_embedding(estimated, share)} of one of 3,125. To send the output layer's part early would hide nothing,
since the second part is a matrix of the same size. To send only those rows of the second part whose pieces occur in the
batch would; it is worth a try where steps are as short as that.

## Each GPU has 25,000 tokens: larger steps

Tokens a second of each GPU, beside one GPU alone:

| model; its step on one GPU | 2 GPUs | 4 | 8 | target tokens/s of 8 |
| --- | --- | --- | --- | --- |
{lines(map(larger_row, GPUS))}

This is the best use of many GPUs, but a step of 8 x 25,000 tokens is not the paper's: it needs a recipe for large steps
(`recipe=scaling_nmt`).

## All share the paper's 25,000 tokens: the same training, sooner

`train.tokens_per_step` is what all ranks have together, so that `torchrun` alone leaves the mathematics as it is. A
step, its efficiency, and the hours of the paper's training (100,000 steps of base, 300,000 of big):

| model; its step on one GPU | 2 GPUs | 4 | 8 | hours with 1, 2, 4, 8 |
| --- | --- | --- | --- | --- |
{lines(map(shared_row, GPUS))}

Three things do not shrink with a rank's share: {1e3 * FIXED:.0f} ms of small kernels, Adam, which every rank does for
all weights, and the embedding. At {1e3 * HOST:.1f} ms is a floor, the time in which Python launches a step. **It is
that of a fast host**: on the virtual machine where base was measured, half the tokens still took 43 ms, so there more
GPUs need larger steps. A CUDA graph would lift the floor. A backward pass that is one graph, so that nothing overlaps,
would leave
{serial:.0f} % instead of {plain:.0f} on 8 GPUs (base, as estimated). Two things cost nothing any more: the ranks' vote
on whether to stop travels while the next step is computed, and sentences are dealt to the micro-batches so evenly that
no step needs more of them than there are ranks.

The hours are those of the steps. Preparing the data, validating and saving come on top: by estimate a tenth to a fifth
of an hour's run on one GPU, and nearly the same minutes on eight, which share only the validation.
"""


def lines(rows: Iterable[str]) -> str:
    return "\n".join(rows)


def volume_row(name: str, model: ModelConfig) -> str:
    total, embedding = gradient_bytes(model)
    times = [message_seconds(model, ranks) for ranks in RANKS]
    whole = ", ".join(f"{1e3 * sum(parts):.2f}" for parts in times)
    last = ", ".join(f"{1e3 * parts[0]:.2f}" for parts in times)
    share = f"{embedding / 1e6:.0f} MB ({100 * embedding / total:.0f} %)"
    return f"| {name} | {total / 1e6:.0f} MB | {share} | {whole} ms | {last} ms |"


def share_of_embedding(gpu: OneGpu, tokens: float) -> str:
    embedding, _ = message_seconds(gpu.model, 8)
    return f"{100 * embedding / step_seconds(gpu, 8, tokens=tokens):.1f} %"


def larger_row(gpu: OneGpu) -> str:
    times = [step_seconds(gpu, ranks, tokens=TOKENS) for ranks in RANKS]
    shares = [f"{efficiency(gpu, seconds=seconds, tokens=TOKENS):.1f} %" for seconds in times]
    speed = 8 * TOKENS / times[-1]
    return f"| {gpu.name}; {1e3 * gpu.seconds:g} ms | {' | '.join(shares)} | {speed / 1e6:.1f} million |"


def shared_row(gpu: OneGpu) -> str:
    cells = []
    hours = [gpu.seconds * gpu.steps / 3600]
    for ranks in RANKS:
        seconds = step_seconds(gpu, ranks, tokens=TOKENS / ranks)
        cells.append(f"{1e3 * seconds:.1f} ms, {efficiency(gpu, seconds=seconds, tokens=TOKENS / ranks):.0f} %")
        hours.append(seconds * gpu.steps / 3600)
    shown = ", ".join(f"{each:.2g}" for each in hours)
    return f"| {gpu.name}; {1e3 * gpu.seconds:g} ms | {' | '.join(cells)} | {shown} |"


if __name__ == "__main__":
    sys.stdout.write(page())
