"""A description of the steps to come, for the log before the first one: from the plan of the first epoch.

The plan is a pure function of the lengths, so the numbers are exact for that epoch. Two things are samples, because a
training should not wait for its own description: of a large corpus at most PAIRS pairs are planned, and at most STEPS
steps are cut into micro-batches.
"""

import logging
import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from transformer.compute import HALF
from transformer.config.settings import ModelConfig, Precision
from transformer.cost import UTILISATION, peak_flops, step_flops
from transformer.data.plan import Batching, count_slots
from transformer.data.store import Lengths, Mixture
from transformer.errors import InputError

log = logging.getLogger(__name__)

PAIRS = 500_000  # at most so many are planned: a third of a second
STEPS = 50  # at most so many are cut into micro-batches: a tenth of a second


@dataclass(frozen=True)
class Preview:
    """The first epoch, and a step of it on average; the share of padding is that of the first `sampled_steps` steps."""

    pairs: int
    steps: int
    is_exact: bool  # False: planned from a sample of the pairs
    sentences: float  # pairs of a step
    source_tokens: float
    target_tokens: float
    micro_batches: float
    padding_share: float
    sampled_steps: int
    flops: float


def preview_epoch(lengths: Lengths, batching: Batching, *, model: ModelConfig, vocab_size: int) -> Preview:
    """Plan the first epoch over sentence pairs of these lengths `(n, 2)`, and describe its steps."""
    stride = math.ceil(len(lengths) / PAIRS)
    sample = lengths[::stride]
    plan = replace(batching, mixture=_thinned(batching.mixture, stride)).plan(sample, 0)

    # All steps: sentences, tokens, FLOPs.
    sentences = np.array([len(ids) for ids in plan])
    tokens = np.array([sample[ids].sum(axis=0, dtype=np.int64) for ids in plan])  # (steps, 2)
    flops = [
        step_flops(model, vocab_size, source=source, target=target, mean_length=(source + target) / (2 * count))
        for count, (source, target) in zip(sentences.tolist(), tokens.tolist(), strict=True)
    ]

    # The first ones, which are as good as any: micro-batches and their padding.
    parts = [batching.split(ids, sample) for ids in plan[:STEPS]]
    slots = 0
    for step in parts:
        lengths_of_parts = [sample[ids] for ids in step if len(ids)]
        slots += count_slots(lengths_of_parts, batching.capacities)

    return Preview(
        pairs=int(sentences.sum()) * stride,
        steps=len(plan) * stride,
        is_exact=stride == 1,
        sentences=float(sentences.mean()),
        source_tokens=float(tokens[:, 0].mean()),
        target_tokens=float(tokens[:, 1].mean()),
        micro_batches=sum(map(len, parts)) / len(parts),
        padding_share=1.0 - int(tokens[:STEPS].sum()) / slots,
        sampled_steps=len(parts),
        flops=sum(flops) / len(flops),
    )


def _thinned(mixture: Mixture, stride: int) -> Mixture:
    """The mixture of every `stride`-th pair."""
    thinned = []
    start = 0
    for count, weight in mixture:
        end = start + count
        thinned.append((math.ceil(end / stride) - math.ceil(start / stride), weight))
        start = end
    return thinned


def log_preview(
    lengths: Lengths,
    batching: Batching,
    *,
    model: ModelConfig,
    vocab_size: int,
    device: torch.device,
    precision: Precision,
    ranks: int,
) -> None:
    """Log what an epoch and a step are, and what a step should take, where the device's peak is known."""
    try:
        preview = preview_epoch(lengths, batching, model=model, vocab_size=vocab_size)
    except InputError:
        return  # the loader plans the same epoch, and says what is wrong; unless only the sample was too small

    lines = describe_preview(preview)
    if device.type == "cuda" and precision in HALF:
        lines += describe_utilisation(preview.flops, device_name=torch.cuda.get_device_name(device), ranks=ranks)
    for line in lines:
        log.info("%s", line)


def describe_preview(preview: Preview) -> list[str]:
    """Lines of the log on an epoch, a step, and its micro-batches."""
    about = "" if preview.is_exact else "about "
    return [
        f"the first epoch: {about}{preview.pairs:,} sentence pairs in {about}{preview.steps:,} steps",
        f"a step, on average: {preview.sentences:,.0f} sentence pairs, {preview.source_tokens:,.0f} source and "
        f"{preview.target_tokens:,.0f} target tokens, {preview.flops / 1e12:.3g} TFLOP",
        f"micro-batches a step: {preview.micro_batches:.3g}, padding: {100 * preview.padding_share:.1f} % "
        f"(of the first {preview.sampled_steps} steps)",
    ]


def describe_utilisation(flops: float, *, device_name: str, ranks: int) -> list[str]:
    """A line of the log on the time of a step of so many FLOPs; none where the peak of the device is not known."""
    peak = peak_flops(device_name)
    if peak is None:
        return []
    milliseconds = 1000 * flops / (UTILISATION * ranks * peak)
    return [
        f"utilisation expected: {100 * UTILISATION:.0f} % of the {peak / 1e12:.0f} TFLOP/s of {device_name}, less for "
        f"small models and steps; a step would take {milliseconds:.3g} ms"
    ]
