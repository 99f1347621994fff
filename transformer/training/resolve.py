"""What the settings that are `auto` or null come to: device, precision, layout, compilation, threads and batch sizes.

Static rules decide: nothing is timed, and the same machine always gets the same answer. A run keeps what was resolved
at its first start, in run.json (`resolve_settings`), and asks again only for what a command sets by hand when the run
is resumed (`resolve_again`).
"""

import logging
from dataclasses import replace

import torch

from transformer.compute import (
    HALF,
    has_compiler,
    has_much_memory,
    has_varlen_kernel,
    resolve_device,
    resolve_precision,
)
from transformer.config.jobs import TrainJob
from transformer.config.settings import Device, LayoutKind, Precision, Score
from transformer.data.plan import Batching, packed_capacities
from transformer.data.store import Mixture, Store
from transformer.machine import resolve_threads
from transformer.records import Resolved

log = logging.getLogger(__name__)


def resolve_settings(job: TrainJob, world_size: int) -> Resolved:
    """The settings of a new run."""
    device = resolve_device(job.train.device)
    precision = resolve_precision(job.train.precision, device)
    max_tokens = job.train.max_tokens or max(_default_max_tokens(device), job.data.filter.max_length + 1)

    layout = job.train.layout
    if layout is LayoutKind.auto:
        is_packed = device.type == "cpu" or _has_packed_kernel(job, device, precision)
        layout = LayoutKind.packed if is_packed else LayoutKind.padded

    return Resolved(
        device=Device[device.type],
        precision=precision,
        threads=resolve_threads(job.train.threads),
        max_tokens=max_tokens,
        layout=layout,
        compile=_compiles(job, device, precision, layout=layout, wanted=job.train.compile),
        micro_batch_multiple=world_size,
    )


def _default_max_tokens(device: torch.device) -> int:
    """Tokens of a micro-batch, on each side."""
    if device.type != "cuda":
        return 5_120  # a step of 4,096 tokens fits in one piece, padding included
    return 32_768 if has_much_memory(device) else 8_192


def _has_packed_kernel(job: TrainJob, device: torch.device, precision: Precision) -> bool:
    """Whether attention over packed sentences is one kernel; elsewhere it is done by groups of padded ones."""
    model = job.model
    if model.score is Score.additive or model.attention_dropout > 0.0 or precision not in HALF:
        return False
    return has_varlen_kernel(device, HALF[precision], d_k=model.key_width, d_v=model.value_width)


def _compiles(
    job: TrainJob, device: torch.device, precision: Precision, *, layout: LayoutKind, wanted: bool | None
) -> bool:
    """Whether training is compiled: as wanted, or by rule on a GPU only.

    On a CPU compiling takes minutes, and gives code that is slower than the kernels of this package. Attention in
    groups or in chunks is never compiled: their number changes from batch to batch, and each would be compiled anew.
    """
    if wanted is None:
        wanted = device.type == "cuda"
    if not wanted:
        return False

    in_groups = layout is LayoutKind.packed and not _has_packed_kernel(job, device, precision)
    in_chunks = job.model.score is Score.additive
    if in_groups or in_chunks:
        log.info("training is not compiled: attention is computed in parts here, as many as a batch happens to need")
        return False

    if not has_compiler(device):
        log.info("no compiler is installed here: training is not compiled")
        return False
    return True


def batching_of(job: TrainJob, resolved: Resolved, *, store: Store, mixture: Mixture) -> Batching:
    """How a run's epochs become batches.

    `store` is that of the first epoch. Its lengths decide on the slots of a packed batch.
    """
    capacities = None
    if resolved.layout is LayoutKind.packed:
        capacities = packed_capacities(
            store.lengths,
            tokens_per_step=job.train.tokens_per_step,
            max_tokens=resolved.max_tokens,
            micro_batch_multiple=resolved.micro_batch_multiple,
        )

    return Batching(
        mixture=mixture,
        seed=job.train.seed,
        tokens_per_step=job.train.tokens_per_step,
        max_tokens=resolved.max_tokens,
        micro_batch_multiple=resolved.micro_batch_multiple,
        capacities=capacities,
        grouped=not _has_packed_kernel(job, torch.device(resolved.device.name), resolved.precision),
    )


def resolve_again(job: TrainJob, before: Resolved) -> Resolved:
    """The settings of a run that is resumed: as resolved at its first start, but for what this command sets by hand."""
    device = resolve_device(job.train.device if job.train.device is not Device.auto else before.device)
    max_tokens = job.train.max_tokens or before.max_tokens

    threads = job.train.threads
    if threads is None:
        threads = min(before.threads, resolve_threads(None))
        if threads < before.threads:  # on another machine, or with more ranks on it: they would wait for each other
            log.info("threads: %d -> %d, as there are no more cores for this rank", before.threads, threads)

    wanted = before.compile if job.train.compile is None else job.train.compile
    return replace(
        before,
        device=Device[device.type],
        threads=threads,
        max_tokens=max_tokens,
        compile=_compiles(job, device, before.precision, layout=before.layout, wanted=wanted),
    )
