"""The output projection and the smoothed loss in one, in Triton, for GPUs: three products, and one pass between them.

`N` rows, `D` d_model, `V` vocabulary. The reference is `loss.smoothed_cross_entropy`; the gradient is made in the
forward pass, as in `kernels/loss.py`, but there is no second block for the probabilities, and all rows are one block
where the memory of the device allows it.

State: the pass computes what it should, on an H200 as in Triton's interpreter on a CPU. How fast it is has not been
measured, and so only `train.kernels=triton` takes it.
"""

from typing import Any

import torch
from torch import Tensor

from transformer.compute import to_autocast_dtype
from transformer.kernels.loss import times
from transformer.vocabulary import PAD

_SHARE = 8  # the block of logits takes one part in so many of the memory that is free


def rows_that_fit(free: int, *, vocab_size: int, itemsize: int, most: int) -> int:
    """Rows of logits that are held at a time, where `free` bytes are: a multiple of 128, at most `most` rounded up.

    The number is part of what a run resolves at its start: other blocks would add in another order.
    """
    fitting = free // _SHARE // (vocab_size * itemsize)
    return max(128, min(fitting // 128 * 128, -(-most // 128) * 128))


def triton_linear_cross_entropy(
    hidden: Tensor, matrix: Tensor, targets: Tensor, *, bias: Tensor | None, label_smoothing: float, rows: int
) -> tuple[Tensor, Tensor]:
    """`smoothed_cross_entropy(hidden @ matrix.T + bias, targets)` for hidden `(N, D)` and classes `(N,)`.

    The matrix is `(V, D)`, the bias `(V,)`, or None for none. `rows` are multiplied by the vocabulary at a time. Rows
    of class PAD count nothing. The products are in the type of `hidden`, and so is the gradient of the logits; the
    softmax and all sums are in fp32 (fp64 stays fp64).
    """
    hidden = to_autocast_dtype(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        return _TritonLinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden, matrix, bias, targets, label_smoothing, rows
        )


class _TritonLinearCrossEntropy(torch.autograd.Function):
    """With `z` the logits, `p` their softmax, `y` the class, `s = eps / (V - 1)` what each wrong class gets:

    loss = -log p_y + eps (z_y - mean of the other z), and d loss / dz = p - s - (1 - eps - s) [class is y].

    The constant `-s` is the same for all rows and classes: its gradients are added once, after the blocks, for in fp16
    it would be rounded to a few bits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        matrix: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        label_smoothing: float,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        from transformer.kernels.gpu.loss import loss_and_gradient_  # needs Triton

        classes = matrix.shape[0]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        spread = label_smoothing / (classes - 1)

        is_pad = (targets == PAD).unsqueeze(1)  # (N, 1)
        hidden_no_pad = hidden.masked_fill(is_pad, 0.0)  # (N, D)
        weights = matrix.to(hidden.dtype)  # (V, D)
        biases = None if bias is None else bias.to(hidden.dtype)  # (V,)

        d_hidden = torch.empty_like(hidden)
        d_matrix = None
        d_bias = None if bias is None else torch.zeros_like(bias, dtype=wide)
        plain = torch.zeros((), dtype=torch.float64, device=hidden.device)
        linear = torch.zeros((), dtype=torch.float64, device=hidden.device)

        for start in range(0, len(hidden), rows):
            place = slice(start, start + rows)
            block = hidden_no_pad[place]  # (n, D)

            logits = block @ weights.t() if biases is None else torch.addmm(biases, block, weights.t())  # (n, V)
            row_plain, row_linear = loss_and_gradient_(logits, targets[place], 1.0 - label_smoothing - spread)
            d_logits = logits  # which they have become
            plain += row_plain.sum(dtype=torch.float64)
            linear += row_linear.sum(dtype=torch.float64)

            torch.mm(d_logits, weights, out=d_hidden[place])
            d_block = wide_product(d_logits.t(), block, wide)
            d_matrix = d_block if d_matrix is None else d_matrix.add_(d_block)
            if d_bias is not None:
                d_bias += d_logits.sum(0, dtype=wide)

        if d_matrix is None:  # there is no row
            d_matrix = torch.zeros_like(matrix, dtype=wide)

        # The constant that smoothing takes from every logit's gradient.
        if label_smoothing:
            d_hidden -= spread * matrix.to(wide).sum(0)
            d_matrix -= spread * hidden_no_pad.to(wide).sum(0)
            if d_bias is not None:
                d_bias -= spread * (~is_pad).sum().to(wide)
        d_hidden.masked_fill_(is_pad, 0.0)

        ctx.save_for_backward(d_hidden, d_matrix.to(matrix.dtype), d_bias)
        smoothed = (plain + label_smoothing * linear).to(wide)
        plain = plain.to(wide)
        ctx.mark_non_differentiable(plain)
        return smoothed, plain

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_matrix, d_bias = ctx.saved_tensors
        of_bias = None if d_bias is None else d_bias * gradient
        return times(d_hidden, gradient), d_matrix * gradient, of_bias, None, None, None


def wide_product(a: Tensor, b: Tensor, wide: torch.dtype) -> Tensor:
    """`a @ b` in the type `wide`, never rounded to that of `a` and `b` on the way where torch can multiply so.

    torch 2.8 and later can, on CUDA. (Its `addmm` with `out_dtype`, which would also add, writes wrong shapes: pytorch
    issue 154086.)
    """
    if a.device.type == "cuda" and a.dtype.itemsize == 2 and hasattr(torch.ops.aten.mm, "dtype"):
        return torch.mm(a, b, out_dtype=wide)
    return (a @ b).to(wide)
