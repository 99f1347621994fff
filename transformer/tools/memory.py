"""What a training step keeps in memory, estimated from numbers alone.

Slots are positions of one side of a micro-batch, padding counted. Weights, gradients and Adam's moments are exact. Muon
is counted as Adam: its update takes about the memory that the second moments would (0.1 GiB more in a small model).
Activations are what autograd saves in a forward pass, added up part by part; small things (indices, masks of keys, the
statistics of norms) are left out. The total is what a step of several micro-batches holds between forward and backward
pass: the gradients of earlier micro-batches, all activations of this one, and what is being computed there.

The tests hold the activations to 10 % of what autograd saves, and the total to 10 % of the peak that torch's allocator
has on a null GPU (scripts/benchmark/results/null-gpu-memory.md). Neither the runtime's own memory (half a gigabyte on a
GPU) nor the holes in the allocator's heap are included: for base on a CPU, the process held 1.4 times as much in bf16,
and 1.9 times in fp32.
"""

import os
from contextlib import suppress
from dataclasses import dataclass

from transformer import machine
from transformer.compute import HALF, dtype_of, product_dtype
from transformer.config.settings import Activation, Device, LayoutKind, ModelConfig, Norm, Score
from transformer.cost import count_parameters
from transformer.kernels.loss import rows_per_block
from transformer.records import Resolved
from transformer.vocabulary import VocabSize, target_size

CUBLAS = (
    2 * 32 * 2**20
)  # its workspaces on an H100, of the forward and of the backward pass; older cards have 2 of 8 MiB
GROUP_PADDING = 1.1  # slots for each token, where attention is computed in groups of padded sentences


@dataclass(frozen=True)
class Memory:
    """Bytes, and what they are for."""

    total: int
    weights: int
    gradients: int
    adam: int  # the optimizer's moments, two of each parameter as Adam has them
    ema: int  # the moving average of the weights, where there is one
    activations: int  # estimated: what the forward pass of a micro-batch leaves for the backward pass
    transient: int  # estimated, and not kept: the loss and its logits, or the first steps of the backward pass
    slots: int  # of a micro-batch, on each side


@dataclass(frozen=True)
class _Widths:
    """Bytes of one number."""

    parameter: int
    activation: int  # what is multiplied, and what a product gives
    residual: int  # what is added up along the layers, as the norms read it


def estimate_memory(
    config: ModelConfig,
    vocab_size: VocabSize,
    *,
    resolved: Resolved,
    slots: int,
    mean_length: float,
    has_ema: bool,
) -> Memory:
    """The memory of a training step with micro-batches of `slots` on each side, in sentences of `mean_length`."""
    widths = _widths(config, resolved)
    weights = count_parameters(config, vocab_size).total * widths.parameter

    activations = _activations(config, vocab_size, resolved, widths=widths, slots=slots, mean_length=mean_length)
    loss = _loss(config, target_size(vocab_size), resolved, widths=widths, slots=slots)
    transient = max(loss, 2 * slots * config.d_ff * widths.activation)  # the gradients before and behind an activation
    transient += CUBLAS if resolved.device is Device.cuda else 0
    copies = 5 if has_ema else 4  # weights, gradients and two moments; with the moving average of the weights
    return Memory(
        total=copies * weights + activations + transient,
        weights=weights,
        gradients=weights,
        adam=2 * weights,
        ema=weights if has_ema else 0,
        activations=activations,
        transient=transient,
        slots=slots,
    )


def _widths(config: ModelConfig, resolved: Resolved) -> _Widths:
    parameter = dtype_of(resolved.precision).itemsize
    activation = product_dtype(resolved.precision).itemsize
    # Under autocast a post-norm layer ends in half precision; along pre-norm layers the sum is never rounded. The norm
    # is handed a copy in fp32, which it keeps, unless a compiler makes that copy again.
    residual = activation if config.norm is Norm.post and resolved.compile else parameter
    return _Widths(parameter, activation, residual)


def _activations(
    config: ModelConfig, vocab_size: VocabSize, resolved: Resolved, *, widths: _Widths, slots: int, mean_length: float
) -> int:
    """What the forward pass of a micro-batch leaves for the backward pass, up to the loss."""
    d_model = config.d_model

    # Masks of dropout: a byte for each number on a GPU; on a CPU a mask is of the type of the numbers.
    on_cpu = resolved.device is Device.cpu
    mask = (widths.activation if on_cpu else 1) if config.dropout else 0
    embedding_mask = (widths.parameter if on_cpu else 1) if config.dropout else 0

    # A sub-layer: its input, the mask of its output, and what the norm reads.
    sublayer = slots * d_model * (widths.activation + mask + widths.residual)
    attention = sublayer + _attention(config, resolved, widths=widths, slots=slots, mean_length=mean_length)
    feed_forward = sublayer + _feed_forward(config, resolved.device, widths=widths, slots=slots)
    layers = config.n_layers * (attention + feed_forward)
    layers += config.decoder_layers * (2 * attention + feed_forward)

    # Around the layers: the mask of both embeddings, the encoder's output, the decoder's output and its gradient.
    around = slots * d_model * (2 * embedding_mask + 3 * widths.activation)

    # Under autocast: the weights of the layers, rounded, until the backward pass has used them.
    rounded = 0
    if resolved.precision in HALF:
        parts = count_parameters(config, vocab_size)
        rounded = (parts.encoder.total + parts.decoder.total) * widths.activation

    return layers + around + rounded


def _attention(config: ModelConfig, resolved: Resolved, *, widths: _Widths, slots: int, mean_length: float) -> int:
    """Queries, keys, values and their weighted mean; and, unless a kernel recomputes them, the weights of each pair."""
    heads = config.n_heads
    is_packed = resolved.layout is LayoutKind.packed
    in_groups = is_packed and resolved.attention_kernel is None  # of padded sentences
    padding = GROUP_PADDING if in_groups else 1.0

    pair = _pair_bytes(config, resolved, widths)
    weights = padding * slots * heads * mean_length * pair
    read = padding * slots * heads * (2 * config.key_width + config.value_width) * widths.activation

    # A kernel that recomputes the weights keeps its result; of a packed batch, W_o keeps a repacked copy, too.
    copies = 2 if is_packed and pair == 0 else 1
    mean = copies * slots * heads * config.value_width * widths.activation
    return round(weights + read + mean)


def _pair_bytes(config: ModelConfig, resolved: Resolved, widths: _Widths) -> int:
    """Bytes that are kept for each query and key: weights and masks; 0 where the backward pass makes them again."""
    mask = 0
    if config.attention_dropout:
        mask = widths.activation if resolved.device is Device.cpu else 1
    is_half = resolved.precision in HALF
    is_flash = config.key_width == config.value_width and config.attention_dropout == 0.0

    if config.score is Score.additive:
        dropped = widths.parameter if mask else 0
        return widths.parameter + dropped + mask + (widths.activation if is_half else 0)
    if resolved.device is Device.cuda:
        return 0
    if is_half:
        return widths.activation + mask
    if is_flash:
        return 0
    return widths.activation * (2 if mask else 1) + mask


def _feed_forward(config: ModelConfig, device: Device, *, widths: _Widths, slots: int) -> int:
    """What W_2 reads; before it, what GELU or Swish read or what ReLU gave to dropout; and the mask of dropout.

    ReLU works in place, and needs nothing but its result.
    """
    inner = slots * config.d_ff
    mask = (widths.activation if device is Device.cpu else 1) if config.relu_dropout else 0
    copies = 2 if config.relu_dropout or config.activation is not Activation.relu else 1
    return inner * (copies * widths.activation + mask)


def _loss(config: ModelConfig, vocab_size: int, resolved: Resolved, *, widths: _Widths, slots: int) -> int:
    """Two blocks of rows times the vocabulary, what the hidden states are copied to, and the output matrix: its
    gradient, and what a block adds to it.

    A last block that is smaller gets buffers of its own. The loss in Triton has one block, of as many rows as resolved.
    """
    if resolved.loss_rows is None:
        block = min(rows_per_block(resolved.device.name), slots)
        rows = 2 * (block + slots % block)
    else:
        rows = resolved.loss_rows
    is_half = widths.activation < widths.parameter
    copies = 2 * widths.parameter + (2 * widths.activation if is_half else 0)  # rounded: the matrix, and the product
    hidden = slots * config.d_model * (widths.activation + (widths.parameter if is_half else 0))
    return rows * vocab_size * widths.activation + hidden + vocab_size * config.d_model * copies


# ---- what there is ---------------------------------------------------------------------------------------------------


def free_memory() -> int:
    """This rank's share of the free bytes of the machine, or of the container if that has fewer.

    Where the system does not say how many are free, as macOS does not, they are all that there are.
    """
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":") for line in file)
        free = 1024 * int(fields["MemAvailable"].split()[0])
    except OSError:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    # In a container, what is used counts copies of files, which give way when memory is asked for.
    limit = _number_in(f"{machine.CONTROL_GROUP}/memory.max")
    used = _number_in(f"{machine.CONTROL_GROUP}/memory.current")
    if limit is not None and used is not None:
        free_in_container = limit - used + _cached_files(f"{machine.CONTROL_GROUP}/memory.stat")
        free = max(0, min(free, free_in_container))
    return free // machine.local_world_size()


def _cached_files(path: str) -> int:
    """The bytes of the copies of files; 0 where the kernel does not say."""
    with suppress(OSError, ValueError), open(path, encoding="ascii") as file:
        for line in file:
            name, value = line.split()
            if name == "inactive_file":
                return int(value)
    return 0


def _number_in(path: str) -> int | None:
    """The number in a file of the kernel; None where there is no such file, or no number (`max`: no limit)."""
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None
