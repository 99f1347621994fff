"""The smoothed loss in Triton: one pass that turns logits into their gradient where they lie.

`N` rows, `V` vocabulary. `triton_loss.py` says what has been tried.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from transformer.vocabulary import PAD

COLUMNS = 4096  # numbers of a row that are read at a time
WARPS = 8


@triton.jit
def _loss_kernel(
    logits,
    targets,
    plain,
    linear,
    CLASSES: tl.constexpr,
    ON_TARGET: tl.constexpr,
    PAD: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One row: its plain loss, the part that smoothing adds, and `softmax - ON_TARGET [class is the target]`.

    The row is read twice and written once. The second time it comes from the cache: 74 kB of a row of 37,000 in bf16,
    times the rows that are in work at once, is less than half of an H200's 60 MB. Where the number of classes is a
    multiple of 8, a thread reads and writes 8 numbers at once: the compiler has to know the number for that.

    Estimate, 25,088 x 37,000 in bf16: 1.9 GB read and 1.9 GB written, 0.9 G exponentials twice; 1.0 to 1.3 ms on an
    H200 at 3.7 TB/s, beside three products of 2.85 TFLOP, 6.0 ms at 475 TFLOP/s. Counted, not timed.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * CLASSES
    target = tl.load(targets + row)
    columns = tl.arange(0, COLUMNS)

    if target == PAD:
        zeros = tl.zeros([COLUMNS], WIDE).to(logits.dtype.element_ty)
        for start in range(0, CLASSES, COLUMNS):
            tl.store(logits + start + columns, zeros, mask=start + columns < CLASSES)
        tl.store(plain + row, 0.0)
        tl.store(linear + row, 0.0)
    else:
        # The sum of the logits, and the logarithm of the sum of their exponentials.
        z_y = tl.load(logits + target).to(WIDE)
        largest = tl.full([], -float("inf"), WIDE)
        exponentials = tl.zeros([COLUMNS], WIDE)
        sums = tl.zeros([COLUMNS], WIDE)
        for start in range(0, CLASSES, COLUMNS):
            is_class = start + columns < CLASSES
            z = tl.load(logits + start + columns, mask=is_class, other=-float("inf")).to(WIDE)
            larger = tl.maximum(largest, tl.max(z, 0))
            exponentials = exponentials * tl.exp(largest - larger) + tl.exp(z - larger)
            sums += tl.where(is_class, z, 0.0)
            largest = larger
        lse = largest + tl.log(tl.sum(exponentials, 0))

        tl.store(plain + row, lse - z_y)
        tl.store(linear + row, z_y - (tl.sum(sums, 0) - z_y) / (CLASSES - 1))

        # The gradient.
        for start in range(0, CLASSES, COLUMNS):
            is_class = start + columns < CLASSES
            z = tl.load(logits + start + columns, mask=is_class, other=-float("inf")).to(WIDE)
            probability = tl.exp(z - lse)
            gradient = tl.where(start + columns == target, probability - ON_TARGET, probability)
            tl.store(logits + start + columns, gradient.to(logits.dtype.element_ty), mask=is_class)


@torch.library.custom_op("transformer::loss_and_gradient_", mutates_args=("logits",))
def loss_and_gradient_(logits: Tensor, targets: Tensor, on_target: float) -> tuple[Tensor, Tensor]:
    """Logits `(N, V)`, overwritten by `softmax - on_target [class is the target]`, and by 0 in rows of class PAD.

    What comes back, `(N,)` each, in fp32 (fp64 stays fp64): `-log p` of the target, and its logit less the mean of the
    others; both 0 in rows of class PAD.
    """
    assert logits.is_contiguous()
    is_fp64 = logits.dtype is torch.float64
    plain = logits.new_empty(len(logits), dtype=torch.float64 if is_fp64 else torch.float32)
    linear = torch.empty_like(plain)
    _loss_kernel[(len(logits),)](
        logits,
        targets,
        plain,
        linear,
        logits.shape[1],
        on_target,
        PAD,
        COLUMNS,
        tl.float64 if is_fp64 else tl.float32,
        num_warps=WARPS,
    )
    return plain, linear


@loss_and_gradient_.register_fake
def _(logits: Tensor, targets: Tensor, on_target: float) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if logits.dtype is torch.float64 else torch.float32
    return logits.new_empty(len(logits), dtype=wide), logits.new_empty(len(logits), dtype=wide)
