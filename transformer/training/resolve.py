"""What `auto` and null come to: device, precision, layout, compilation, kernels, threads and batch sizes.

Static rules decide: nothing is timed, and the same machine always gets the same answer. A run keeps what was resolved
at its first start, in run.json (`resolve_settings`). When it is resumed, the rules are asked again for what a command
sets by hand and for what depends on the machine at hand: threads, kernels, compilation (`resolve_again`).
"""

import logging
import math
from dataclasses import replace

import torch

from transformer.compute import (
    free_gpu_memory,
    gpu_obstacle,
    has_compiler,
    has_much_memory,
    has_triton,
    has_wide_tiles,
    is_ampere_or_later,
    product_dtype,
    resolve_device,
    resolve_precision,
)
from transformer.config.jobs import TrainJob
from transformer.config.settings import (
    AttentionKernel,
    Device,
    Kernels,
    LayoutKind,
    ModelConfig,
    Precision,
    Score,
)
from transformer.data.plan import Batching, packed_capacities
from transformer.data.store import Lengths, Mixture
from transformer.errors import InputError
from transformer.kernels.packed_attention import WIDEST, WIDEST_IN_SMALL_TILES
from transformer.kernels.triton_loss import rows_that_fit
from transformer.machine import resolve_threads
from transformer.records import Resolved
from transformer.vocabulary import target_size

log = logging.getLogger(__name__)

# Steps from which on compiling pays, without CUDA graphs and with them: scripts/benchmark/results/gpu-h200.md. It takes
# 25 to 30 seconds. Where the host launches every kernel, it saves as much in 2,000 to 2,700 steps; where a GPU replays
# them, in 2,500 steps of base, and in 17,000 of the model of Multi30k.
PAYS = {False: 5_000, True: 15_000}


def resolve_settings(job: TrainJob, world_size: int) -> Resolved:
    """The settings of a new run."""
    device = resolve_device(job.train.device)
    precision = resolve_precision(job.train.precision, device)
    _describe_device(job, device, precision)
    max_tokens = job.train.max_tokens or max(_default_max_tokens(device), job.data.filter.max_length + 1)
    if job.train.decay.ends_at_the_last_step and job.train.max_steps <= job.train.warmup_steps:
        warmup, steps = job.train.warmup_steps, job.train.max_steps
        log.warning("train.warmup_steps=%d, but train.max_steps=%d: the rate never falls", warmup, steps)

    if job.train.fit_memory and device.type == "cpu":
        log.info("train.fit_memory tries steps on a GPU; on a CPU micro-batches have %d tokens", max_tokens)

    kernel = _attention_kernel(job, device, precision)
    layout = job.train.layout
    if layout is LayoutKind.auto:
        is_packed = device.type == "cpu" or kernel is not None
        layout = LayoutKind.packed if is_packed else LayoutKind.padded
        if not is_packed:
            log.info(
                "batches are padded: torch's kernel for packed ones %s", varlen_obstacle(job.model, device, precision)
            )

    loss_rows = _loss_rows(job, device, precision, max_tokens=max_tokens)
    replays = _replays(job, precision, layout=layout, kernel=kernel)
    if world_size > 1 and not job.train.cuda_graphs:
        replays = False  # nobody has measured it on several GPUs: only where it is asked for
    return Resolved(
        device=Device[device.type],
        precision=precision,
        threads=resolve_threads(job.train.threads),
        max_tokens=max_tokens,
        layout=layout,
        compile=_compiles(job, device, layout=layout, kernel=kernel, replays=replays, wanted=job.train.compile),
        cuda_graphs=replays,
        micro_batch_multiple=world_size,
        attention_kernel=kernel if layout is LayoutKind.packed else None,
        loss_rows=loss_rows,
    )


def warn_of_idle_ranks(resolved: Resolved, *, tokens_per_step: int, ranks: int) -> None:
    """Warn if a run resumes with more ranks than it began with, and a step has too few micro-batches for them."""
    fewest = math.ceil(tokens_per_step / resolved.max_tokens)
    count = math.ceil(fewest / resolved.micro_batch_multiple) * resolved.micro_batch_multiple
    if count < ranks:
        log.warning(
            "a step has %d micro-batches for %d ranks, as the run began with fewer ranks: train.max_tokens=%d "
            "gives each a share",
            count,
            ranks,
            math.ceil(tokens_per_step / ranks),
        )


def _describe_device(job: TrainJob, device: torch.device, precision: Precision) -> None:
    """Say in the log why a GPU is not used, or not as it could be."""
    if job.train.device is Device.auto and device.type == "cpu":
        obstacle = gpu_obstacle()
        if obstacle is not None:
            log.warning("training on the CPU: %s", obstacle)
    if device.type == "cuda" and torch.version.hip is not None:
        log.warning("this package is untested on AMD GPUs: batches are padded, and nothing is compiled")
    if device.type == "cuda" and job.train.precision is Precision.auto and precision is Precision.fp32:
        log.info("this GPU cannot multiply in bf16: train.precision=fp16 is several times as fast as fp32")


def _default_max_tokens(device: torch.device) -> int:
    """Tokens of a micro-batch, on each side."""
    if device.type != "cuda":
        return 5_120  # a step of 4,096 tokens fits in one piece, padding included
    return 32_768 if has_much_memory(device) else 8_192


def _attention_kernel(job: TrainJob, device: torch.device, precision: Precision) -> AttentionKernel | None:
    """The one kernel that attends to packed sentences; None where they are attended to in groups of padded ones.

    Raises InputError where `train.kernels` cannot be had on a GPU.
    """
    if device.type != "cuda":
        return None

    model = job.model
    if job.train.kernels is Kernels.triton:
        obstacle = _triton_obstacle(model, device, precision)
        if obstacle is not None:
            raise InputError(f"train.kernels=triton {obstacle}: set it to torch")
        return AttentionKernel.triton

    if job.train.kernels is Kernels.fused:
        if not has_triton(device):
            raise InputError("train.kernels=fused needs Triton, and a GPU since Ampere: set it to torch")
        obstacle = _sentences_obstacle(model, device, precision)
        if obstacle is None:
            return AttentionKernel.sentences
        log.info("train.kernels=fused %s: torch's kernels compute all but the loss", obstacle)

    return AttentionKernel.varlen if varlen_obstacle(model, device, precision) is None else None


def varlen_obstacle(model: ModelConfig, device: torch.device, precision: Precision) -> str | None:
    """Why torch's kernel for packed sentences cannot compute this model on this GPU; None where it can."""
    if model.score is Score.additive:
        return "has no additive scores"
    if model.attention_dropout != 0.0:
        return "has no dropout on weights (model.attention_dropout)"
    if product_dtype(precision) not in (torch.bfloat16, torch.float16):
        return f"does not compute in {precision.value}"
    if model.key_width != model.value_width or model.key_width % 8 or model.key_width > 256:
        widths = f"{model.key_width} and {model.value_width}"
        return f"needs d_k and d_v to be one multiple of 8 up to 256, not {widths}"
    if not is_ampere_or_later(device):
        return "needs an NVIDIA GPU since Ampere"
    return None


def _triton_obstacle(model: ModelConfig, device: torch.device, precision: Precision) -> str | None:
    """Why the Triton kernels cannot compute this model on this GPU; None where they can."""
    widest = max(model.key_width, model.value_width)
    if model.score is Score.additive:
        return "does not support model.score=additive"
    if precision is Precision.fp64:
        return "does not support train.precision=fp64"
    if not has_triton(device):
        return "needs Triton, and a GPU since Ampere"
    if widest > WIDEST:
        return f"holds heads of at most {WIDEST}, and here they have {widest}"
    return None


def _sentences_obstacle(model: ModelConfig, device: torch.device, precision: Precision) -> str | None:
    """Why the kernel for whole sentences cannot compute this model on this GPU; None where it can."""
    width = max(model.key_width, model.value_width)
    widest = WIDEST if has_wide_tiles(device) else WIDEST_IN_SMALL_TILES
    if model.score is Score.additive:
        return "has no additive scores"
    if product_dtype(precision) not in (torch.bfloat16, torch.float16):
        return f"does not attend in {precision.value}"
    if width > widest:
        return f"holds heads of at most {widest} on this GPU, and here they have {width}"
    return None


def _loss_rows(job: TrainJob, device: torch.device, precision: Precision, *, max_tokens: int) -> int | None:
    """Rows of logits that the loss in Triton holds at a time; None: it is not asked for, or this is no GPU."""
    if job.train.kernels is Kernels.torch or device.type != "cuda" or precision is Precision.fp64:
        return None
    return rows_that_fit(
        free_gpu_memory(device),
        vocab_size=target_size(job.tokenizer.vocab_sizes),
        itemsize=product_dtype(precision).itemsize,
        most=max_tokens,
    )


def _compiles(
    job: TrainJob,
    device: torch.device,
    *,
    layout: LayoutKind,
    kernel: AttentionKernel | None,
    replays: bool,
    wanted: bool | None,
) -> bool:
    """Whether training is compiled: as wanted, or by rule on a GPU where it pays.

    On a CPU compiling takes minutes, and gives code that is slower than the kernels of this package. On a GPU it takes
    up to a minute for each shape of a batch: padded batches have many, and a short training ends before it has paid.
    Attention in groups or in chunks is never compiled: their number changes from batch to batch, and each would be
    compiled anew.
    """
    if wanted is None:
        wanted = device.type == "cuda" and layout is LayoutKind.packed and job.train.max_steps >= PAYS[replays]
    if not wanted:
        return False

    in_groups = layout is LayoutKind.packed and kernel is None
    in_chunks = job.model.score is Score.additive
    if in_groups or in_chunks:
        log.info(
            "training is not compiled: attention is computed in parts here, and their number varies with the batch"
        )
        return False

    if not has_compiler(device):
        log.info("no compiler is installed here: training is not compiled")
        return False
    return True


def _replays(job: TrainJob, precision: Precision, *, layout: LayoutKind, kernel: AttentionKernel | None) -> bool:
    """Whether a GPU replays a recorded step: wherever it can, unless `train.cuda_graphs` says no.

    Only packed batches for one kernel have the same shape again and again. In fp16 the scale of the loss is the host's
    matter.
    """
    can = layout is LayoutKind.packed and kernel is not None and precision in (Precision.bf16, Precision.fp32)
    if job.train.cuda_graphs and not can:
        log.info("steps are not recorded: CUDA graphs need packed batches, a GPU kernel for them, and bf16 or fp32")
    return can and job.train.cuda_graphs is not False


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
        # Code that is compiled or recorded is for one shape, and a GPU's allocator keeps what each shape has taken.
        is_one_shape=resolved.device is not Device.cpu,
    )


def resolve_again(job: TrainJob, before: Resolved) -> Resolved:
    """The settings of a run that is resumed: as resolved at its first start, but for what this command sets by hand.

    Three follow the machine at hand: threads, where it has fewer cores; kernels; and with them, compilation.
    """
    device = resolve_device(job.train.device if job.train.device is not Device.auto else before.device)
    max_tokens = job.train.max_tokens or before.max_tokens
    if job.train.fit_memory:
        log.info("train.fit_memory works at the first start only: micro-batches still have %d tokens", max_tokens)

    threads = resolve_threads(job.train.threads)
    if job.train.threads is None:
        threads = min(before.threads, threads)
        if threads < before.threads:  # on another machine, or with more ranks on it: they would wait for each other
            log.info("threads: %d -> %d, as this rank has no more cores", before.threads, threads)

    kernel = _attention_kernel(job, device, before.precision)
    wanted = job.train.compile
    if wanted is None and device.type == before.device.name:
        wanted = before.compile
    replays = _replays(job, before.precision, layout=before.layout, kernel=kernel)
    loss_rows = _loss_rows(job, device, before.precision, max_tokens=max_tokens)
    if before.loss_rows is not None and loss_rows is not None:
        loss_rows = before.loss_rows  # other blocks would add in another order
    return replace(
        before,
        device=Device[device.type],
        threads=threads,
        max_tokens=max_tokens,
        compile=_compiles(job, device, layout=before.layout, kernel=kernel, replays=replays, wanted=wanted),
        cuda_graphs=replays,
        attention_kernel=kernel if before.layout is LayoutKind.packed else None,
        loss_rows=loss_rows,
    )
