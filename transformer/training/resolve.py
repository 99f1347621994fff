"""What `auto` and null come to: device, precision, layout, compilation, kernels, threads and batch sizes.

Static rules decide: nothing is timed, and the same machine always gets the same answer. A run keeps what was resolved
at its first start, in run.json (`resolve_settings`). When it is resumed, the rules are asked again for what a command
sets by hand and for what depends on the machine at hand: threads, kernels, compilation (`resolve_again`).
"""

import logging
from dataclasses import replace

import torch

from transformer.compute import (
    free_gpu_memory,
    has_compiler,
    has_much_memory,
    has_triton,
    has_varlen_kernel,
    product_dtype,
    resolve_device,
    resolve_precision,
)
from transformer.config.jobs import TrainJob
from transformer.config.settings import AttentionKernel, Device, LayoutKind, Precision, Score
from transformer.data.plan import Batching, packed_capacities
from transformer.data.store import Lengths, Mixture
from transformer.errors import InputError
from transformer.kernels.packed_attention import WIDEST
from transformer.kernels.triton_loss import rows_that_fit
from transformer.machine import resolve_threads
from transformer.records import Resolved

log = logging.getLogger(__name__)

# Where `data.filter.max_length` is below this, `auto` prefers the Triton kernel, whose tiles have 64 rows. An estimate:
# a tile reads about 64 keys in vain, which is little beside so many, and then torch's larger tiles multiply faster.
_SHORT = 512


def resolve_settings(job: TrainJob, world_size: int) -> Resolved:
    """The settings of a new run."""
    device = resolve_device(job.train.device)
    precision = resolve_precision(job.train.precision, device)
    max_tokens = job.train.max_tokens or max(_default_max_tokens(device), job.data.filter.max_length + 1)

    if job.train.fit_memory and device.type == "cpu":
        log.info("train.fit_memory tries steps on a GPU; on a CPU micro-batches have %d tokens", max_tokens)

    kernel = _attention_kernel(job, device, precision, tries_steps=job.train.fit_memory)
    layout = job.train.layout
    if layout is LayoutKind.auto:
        is_packed = device.type == "cpu" or kernel is not None
        layout = LayoutKind.packed if is_packed else LayoutKind.padded

    loss_rows = _loss_rows(job, device, precision, max_tokens=max_tokens)
    _warn_of_untried(kernel if layout is LayoutKind.packed else None, loss_rows)
    return Resolved(
        device=Device[device.type],
        precision=precision,
        threads=resolve_threads(job.train.threads),
        max_tokens=max_tokens,
        layout=layout,
        compile=_compiles(job, device, layout=layout, kernel=kernel, wanted=job.train.compile),
        micro_batch_multiple=world_size,
        attention_kernel=kernel if layout is LayoutKind.packed else None,
        loss_rows=loss_rows,
    )


def _warn_of_untried(kernel: AttentionKernel | None, loss_rows: int | None) -> None:
    """Warn of a kernel that no GPU has run: one is taken only where the job asks for it, by its name or by `auto`."""
    if kernel in (AttentionKernel.flex, AttentionKernel.triton):
        log.warning(
            "attention by %s: no GPU has run it; compare the loss with train.attention_kernel=varlen", kernel.name
        )
    if loss_rows is not None:
        log.warning("train.fused_loss: no GPU has run it; compare the loss with that of false")


def _default_max_tokens(device: torch.device) -> int:
    """Tokens of a micro-batch, on each side."""
    if device.type != "cuda":
        return 5_120  # a step of 4,096 tokens fits in one piece, padding included
    return 32_768 if has_much_memory(device) else 8_192


def _attention_kernel(
    job: TrainJob, device: torch.device, precision: Precision, *, tries_steps: bool
) -> AttentionKernel | None:
    """The one kernel that attends to packed sentences; None where they are attended to in groups of padded ones.

    `tries_steps`: `train.fit_memory` will try steps before the first one, and these are not compiled.

    `varlen`, the default, is torch's kernel, and None where it cannot attend. `flex` and `triton` raise InputError
    where they cannot on a GPU. `auto` takes the first that can: Triton where all sentences are short, varlen, Triton
    (for dropout on the weights, which no other has, and for fp32), FlexAttention (for wider heads). This order has not
    been measured.
    """
    wanted = job.train.attention_kernel
    if device.type != "cuda":
        return None

    obstacles = _obstacles(job, device, precision, tries_steps=tries_steps)
    match wanted:
        case AttentionKernel.varlen:
            return None if obstacles[wanted] else wanted
        case AttentionKernel.flex | AttentionKernel.triton:
            if obstacles[wanted]:
                raise InputError(f"train.attention_kernel={wanted.name} {obstacles[wanted]}: set it to varlen or auto")
            return wanted

    order = [AttentionKernel.varlen, AttentionKernel.triton, AttentionKernel.flex]
    if job.data.filter.max_length < _SHORT:
        order = [AttentionKernel.triton, AttentionKernel.varlen, AttentionKernel.flex]
    return next((kernel for kernel in order if not obstacles[kernel]), None)


def _obstacles(
    job: TrainJob, device: torch.device, precision: Precision, *, tries_steps: bool
) -> dict[AttentionKernel, str]:
    """Why each kernel cannot attend to this model's packed sentences on this GPU; empty where it can."""
    model = job.model
    widths = (model.key_width, model.value_width)
    if model.score is Score.additive:
        return dict.fromkeys(AttentionKernel, "does not support model.score=additive")

    obstacles = dict.fromkeys(AttentionKernel, "")
    if model.attention_dropout > 0.0:
        obstacles[AttentionKernel.varlen] = obstacles[AttentionKernel.flex] = "does not support model.attention_dropout"
    dtype = product_dtype(precision)
    if not has_varlen_kernel(device, dtype, d_k=model.key_width, d_v=model.value_width):
        obstacles[AttentionKernel.varlen] = "is for half precision and equal widths, on GPUs since Ampere"
    if precision is Precision.fp64:
        obstacles[AttentionKernel.flex] = obstacles[AttentionKernel.triton] = "does not support train.precision=fp64"
    if not has_triton(device):
        obstacles[AttentionKernel.flex] = obstacles[AttentionKernel.triton] = "needs Triton, and a GPU since Ampere"
    if max(widths) > WIDEST:
        obstacles[AttentionKernel.triton] = f"holds heads of at most {WIDEST}, and here they have {max(widths)}"
    if job.train.compile is False or not has_compiler(device):
        obstacles[AttentionKernel.flex] = "must be compiled (train.compile, and a C++ compiler)"
    if tries_steps:
        obstacles[AttentionKernel.flex] = "must be compiled, and train.fit_memory tries steps that are not"
    return obstacles


def _loss_rows(job: TrainJob, device: torch.device, precision: Precision, *, max_tokens: int) -> int | None:
    """Rows of logits that the fused loss holds at a time; None: it is not asked for, or this is no GPU.

    Raises InputError where the GPU cannot run it.
    """
    if not job.train.fused_loss or device.type != "cuda":
        return None
    if not has_triton(device):
        raise InputError("train.fused_loss=true needs Triton, and a GPU since Ampere: set it to false")
    return rows_that_fit(
        free_gpu_memory(device),
        vocab_size=job.tokenizer.vocab_size,
        itemsize=product_dtype(precision).itemsize,
        most=max_tokens,
    )


def _compiles(
    job: TrainJob,
    device: torch.device,
    *,
    layout: LayoutKind,
    kernel: AttentionKernel | None,
    wanted: bool | None,
) -> bool:
    """Whether training is compiled: as wanted, or by rule on a GPU only.

    On a CPU compiling takes minutes, and gives code that is slower than the kernels of this package. Attention in
    groups or in chunks is never compiled: their number changes from batch to batch, and each would be compiled anew.
    """
    if wanted is None:
        wanted = device.type == "cuda"
    if not wanted:
        return False

    in_groups = layout is LayoutKind.packed and kernel is None
    in_chunks = job.model.score is Score.additive
    if in_groups or in_chunks:
        log.info("training is not compiled: attention is computed in parts here, as many as a batch happens to need")
        return False

    if not has_compiler(device):
        log.info("no compiler is installed here: training is not compiled")
        return False
    return True


def batching_of(job: TrainJob, resolved: Resolved, *, lengths: Lengths, mixture: Mixture) -> Batching:
    """How a run's epochs become batches.

    `lengths` `(n, 2)` decide on the slots of a packed batch: those of the first epoch, or of a sample of it.
    """
    capacities = None
    if resolved.layout is LayoutKind.packed:
        capacities = packed_capacities(
            lengths,
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
        kernel=resolved.attention_kernel,
    )


def resolve_again(job: TrainJob, before: Resolved) -> Resolved:
    """The settings of a run that is resumed: as resolved at its first start, but for what this command sets by hand.

    Three follow the machine at hand: threads, where it has fewer cores; kernels; and with them, compilation.
    """
    device = resolve_device(job.train.device if job.train.device is not Device.auto else before.device)
    max_tokens = job.train.max_tokens or before.max_tokens
    if job.train.fit_memory:
        log.info("train.fit_memory was for the first start: micro-batches still have %d tokens", max_tokens)

    threads = job.train.threads
    if threads is None:
        threads = min(before.threads, resolve_threads(None))
        if threads < before.threads:  # on another machine, or with more ranks on it: they would wait for each other
            log.info("threads: %d -> %d, as there are no more cores for this rank", before.threads, threads)

    kernel = _attention_kernel(job, device, before.precision, tries_steps=False)
    wanted = job.train.compile
    is_by_rule = device.type != before.device.name or kernel is AttentionKernel.flex  # flex must be compiled
    if wanted is None and not is_by_rule:
        wanted = before.compile
    loss_rows = _loss_rows(job, device, before.precision, max_tokens=max_tokens)
    if before.loss_rows is not None and loss_rows is not None:
        loss_rows = before.loss_rows  # other blocks would add in another order
    _warn_of_untried(kernel if before.layout is LayoutKind.packed else None, loss_rows)
    return replace(
        before,
        device=Device[device.type],
        threads=threads,
        max_tokens=max_tokens,
        compile=_compiles(job, device, layout=before.layout, kernel=kernel, wanted=wanted),
        attention_kernel=kernel if before.layout is LayoutKind.packed else None,
        loss_rows=loss_rows,
    )
