"""The output projection and the smoothed loss in one, in plain torch, for every device.

`N` rows, `D` d_model, `V` vocabulary. The logits of a step are by far its largest tensor, and writing a fresh one of 80
MB costs a CPU more than the product itself. Here they are made a few hundred rows at a time, in two buffers that are
reused, together with their gradient: only the gradients of the hidden states and of the matrix are kept. Smoothing
costs almost nothing: its part of the loss is linear in the logits, so its gradient is one row times the matrix and one
column times the hidden states. `triton_loss.py` is the same in Triton, for GPUs.
"""

from typing import Any

import torch
from torch import Tensor

from transformer.compute import to_autocast_dtype
from transformer.vocabulary import PAD


def rows_per_block(device_type: str) -> int:
    """Rows of logits that are held at a time on a device of this type: "cpu", "cuda".

    On a CPU, 512 are enough for the matrix units, and few enough for the cache. A GPU needs larger products to be busy,
    and each block costs it some twenty launches.
    """
    return 512 if device_type == "cpu" else 8 * 512


def linear_cross_entropy(
    hidden: Tensor, matrix: Tensor, targets: Tensor, *, bias: Tensor | None, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """`smoothed_cross_entropy(hidden @ matrix.T + bias, targets)` for hidden `(N, D)` and classes `(N,)`.

    The matrix is `(V, D)`, the bias `(V,)`, or None for none. Rows of class PAD count nothing. The products are in the
    type of `hidden`, sums in fp32 (fp64 stays fp64). The softmax is kept in the type of `hidden`, too: in half
    precision the two sums, not the gradient, are a little less exact than the reference's. The plain loss of a row is
    cut at 87.3 (fp16: 16.6; fp64: 708.4), where its probability underflows; the gradient is not.
    """
    hidden = to_autocast_dtype(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        return _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden, matrix, bias, targets, label_smoothing
        )


class _LinearCrossEntropy(torch.autograd.Function):
    """With `z` the logits, `p` their softmax, `y` the class, `s = eps / (V - 1)` what each wrong class gets:

    loss = -log p_y + eps (z_y - mean of the other z), and d loss / dz = p - s - (1 - eps - s) [class is y].

    The constant `-s` is the same for all rows and classes: its gradients are added once, after the blocks.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, matrix: Tensor, bias: Tensor | None, targets: Tensor, label_smoothing: float
    ) -> tuple[Tensor, Tensor]:
        classes = matrix.shape[0]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        spread = label_smoothing / (classes - 1)

        # fp16 rounds small probabilities to 0: the floor keeps their logarithm finite.
        smallest = torch.finfo(hidden.dtype).tiny * torch.finfo(hidden.dtype).eps
        floor = max(smallest, torch.finfo(wide).tiny)

        is_pad = (targets == PAD).unsqueeze(1)  # (N, 1)
        hidden_no_pad = hidden.masked_fill(is_pad, 0.0)  # (N, D)
        weights = matrix.to(hidden.dtype)  # (V, D)
        sum_of_all = matrix.to(wide).sum(0)  # (D,): times a row, the sum of its logits
        sum_of_biases = 0.0 if bias is None else bias.to(wide).sum()
        biases = None if bias is None else bias.to(hidden.dtype)  # (V,)

        d_hidden = torch.empty_like(hidden)
        d_matrix = torch.zeros_like(matrix)
        d_bias = None if bias is None else torch.zeros_like(bias, dtype=wide)
        plain = torch.zeros((), dtype=torch.float64, device=hidden.device)
        linear = torch.zeros((), dtype=torch.float64, device=hidden.device)

        logits = hidden.new_empty(0)
        probabilities = hidden.new_empty(0)
        block = rows_per_block(hidden.device.type)

        for start in range(0, len(hidden), block):
            place = slice(start, start + block)
            rows = hidden_no_pad[place]  # (n, D)
            targets_block = targets[place].unsqueeze(1)  # (n, 1)
            is_real = ~is_pad[place, 0]  # (n,)

            # Logits and probabilities, in buffers that only the last block may have to replace.
            if len(rows) != len(logits):
                logits, probabilities = hidden.new_empty(2, len(rows), classes)
            if biases is None:
                torch.mm(rows, weights.t(), out=logits)
            else:
                torch.addmm(biases, rows, weights.t(), out=logits)
            torch.softmax(logits, 1, out=probabilities)

            # The plain loss, and the part that smoothing adds.
            z_y = logits.gather(1, targets_block).to(wide)  # (n, 1)
            p_y = probabilities.gather(1, targets_block).to(wide)  # (n, 1)
            plain -= (p_y.clamp(min=floor).log().squeeze(1) * is_real).sum()
            mean_of_others = (rows.to(wide) @ sum_of_all + sum_of_biases - z_y.squeeze(1)) / (classes - 1)
            linear += ((z_y.squeeze(1) - mean_of_others) * is_real).sum()

            # The gradient of the logits, in place of the probabilities, and what follows from it.
            # (On a CPU `scatter_` in bf16 copies the whole block twice.)
            d_logit_y = p_y.squeeze(1) - (1.0 - label_smoothing - spread)  # (n,)
            first_of_row = torch.arange(0, probabilities.numel(), classes, device=hidden.device)  # (n,)
            class_index = first_of_row + targets[place]
            probabilities.view(-1).index_copy_(0, class_index, d_logit_y.to(hidden.dtype))
            torch.mm(probabilities, weights, out=d_hidden[place])
            d_matrix += (probabilities.t() @ rows).to(matrix.dtype)
            if d_bias is not None:
                d_bias += is_real.to(wide) @ probabilities.to(wide)

        # The constant that smoothing takes from every logit's gradient.
        if label_smoothing:
            d_hidden -= spread * sum_of_all
            d_matrix -= spread * hidden_no_pad.to(wide).sum(0)
            if d_bias is not None:
                d_bias -= spread * (~is_pad).sum().to(wide)
        d_hidden.masked_fill_(is_pad, 0.0)

        ctx.save_for_backward(d_hidden, d_matrix, d_bias)
        smoothed = (plain + label_smoothing * linear).to(wide)
        plain = plain.to(wide)
        ctx.mark_non_differentiable(plain)
        return smoothed, plain

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_matrix, d_bias = ctx.saved_tensors
        of_bias = None if d_bias is None else d_bias * gradient
        return times(d_hidden, gradient), d_matrix * gradient, of_bias, None, None


def times(tensor: Tensor, factor: Tensor) -> Tensor:
    """The tensor times one number of a wider type, each product rounded once, to the type of the tensor.

    In bf16 the number itself, the reciprocal of a step's tokens, would be off by up to 0.4 %: the gradient of the
    hidden states, not that of the matrix.
    """
    return (tensor * factor.view(1, 1)).to(tensor.dtype)
