"""The output projection and the smoothed loss in one, a few hundred rows at a time, with the gradient made on the way.

`N` rows, `D` d_model, `V` vocabulary. The logits of a step are by far its largest tensor, and writing a fresh one of 80
MB costs a CPU more than the product itself. Here a block of rows stays in two buffers that are used again, and only the
gradients of the hidden states and of the matrix leave. The surprise: smoothing costs nothing. Its part of the loss is
linear in the logits, so that its gradient is one row times the matrix and one column times the hidden states.
"""

from typing import Any

import torch
from torch import Tensor

from transformer.compute import lowered
from transformer.vocabulary import PAD

ROWS = 512  # of a block on a CPU: large enough for the matrix units, small enough for the cache


def linear_cross_entropy(
    hidden: Tensor, matrix: Tensor, targets: Tensor, *, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """`smoothed_cross_entropy(hidden @ matrix.T, targets)` for hidden `(N, D)`, matrix `(V, D)` and classes `(N,)`.

    Rows of class PAD count nothing. The products are in the type of `hidden`, sums in fp32 (fp64 stays). The
    softmax is kept in that type too: in bf16 the two sums, not the gradient, are a little less exact than the
    reference's.
    """
    hidden = lowered(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        return _LinearCrossEntropy.apply(hidden, matrix, targets, label_smoothing)  # type: ignore[no-untyped-call]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, matrix: Tensor, targets: Tensor, label_smoothing: float
    ) -> tuple[Tensor, Tensor]:
        classes = matrix.shape[0]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        subnormal = torch.finfo(hidden.dtype).tiny * torch.finfo(hidden.dtype).eps
        floor = max(subnormal, torch.finfo(wide).tiny)  # where fp16 rounds a probability to 0, the loss stays finite
        spread = label_smoothing / (classes - 1)  # what each wrong class gets
        weights = matrix.to(hidden.dtype)
        nothing = (targets == PAD).unsqueeze(1)  # (N, 1)
        given = hidden.masked_fill(nothing, 0.0)
        block = ROWS if hidden.device.type == "cpu" else 8 * ROWS
        d_hidden = torch.empty_like(hidden)
        d_matrix = torch.zeros_like(matrix)
        sum_of_all = matrix.to(wide).sum(0)  # (D,): times a row, the sum of its logits
        plain = torch.zeros((), dtype=torch.float64, device=hidden.device)
        linear = torch.zeros((), dtype=torch.float64, device=hidden.device)
        logits = probabilities = hidden.new_empty(0)
        for start in range(0, len(hidden), block):
            place = slice(start, start + block)
            rows, wanted, real = given[place], targets[place].unsqueeze(1), ~nothing[place, 0]
            if len(rows) != len(logits):
                logits, probabilities = hidden.new_empty(2, len(rows), classes)
            torch.mm(rows, weights.t(), out=logits)
            torch.softmax(logits, 1, out=probabilities)
            z_y, p_y = logits.gather(1, wanted).to(wide), probabilities.gather(1, wanted).to(wide)
            plain -= (p_y.clamp(min=floor).log().squeeze(1) * real).sum()
            others = (rows.to(wide) @ sum_of_all - z_y.squeeze(1)) / (classes - 1)
            linear += ((z_y.squeeze(1) - others) * real).sum()
            probabilities.scatter_(1, wanted, (p_y - (1.0 - label_smoothing - spread)).to(hidden.dtype))
            torch.mm(probabilities, weights, out=d_hidden[place])
            d_matrix += (probabilities.t() @ rows).to(matrix.dtype)
        if label_smoothing:
            d_hidden -= spread * sum_of_all
            d_matrix -= spread * given.to(wide).sum(0)
        d_hidden.masked_fill_(nothing, 0.0)
        ctx.save_for_backward(d_hidden, d_matrix)
        smoothed, plain = (plain + label_smoothing * linear).to(wide), plain.to(wide)
        ctx.mark_non_differentiable(plain)
        return smoothed, plain

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_matrix = ctx.saved_tensors
        return d_hidden * gradient.to(d_hidden.dtype), d_matrix * gradient, None, None
