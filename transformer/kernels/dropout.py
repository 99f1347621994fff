"""Dropout with masks from whole random words.

`bernoulli_` on a CPU draws its numbers one after the other, about 5 ns each: a quarter of a bf16 training step. One
64-bit word holds four decisions of 16 bits, which is many times as fast, at probabilities rounded to 1 / 65,536.

A mask has the type of the tensor that it multiplies, because torch multiplies by a bool four times as slowly.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F


def keep_mask(like: Tensor, probability: float) -> Tensor:
    """Ones with `probability`, else zeros, in the shape and type of `like`, a tensor on the CPU.

    The words are NumPy's, which draws them twice as fast as torch, seeded by torch's default generator.
    """
    count = like.numel()
    n_words = max(1, -(-count // 4))  # rounded up
    seed = int(torch.randint(2**63 - 1, ()))
    words = torch.from_numpy(np.random.SFC64(seed).random_raw(n_words))
    parts = words.view(torch.int16)[:count].view(like.shape)

    # A signed 16-bit number is below `limit` with this probability.
    limit = min(round(probability * 2**16), 2**16 - 1) - 2**15
    return torch.lt(parts, limit, out=torch.empty(like.shape, dtype=like.dtype))


def draw_seed(probability: float, device: torch.device) -> Tensor:
    """What decides on what a kernel of ours drops, `(1,)` int64: from torch's generator, if it drops anything."""
    if probability:
        return torch.randint(2**62, (1,), device=device)
    return torch.zeros(1, dtype=torch.int64, device=device)


class Dropout(nn.Dropout):
    """`nn.Dropout` by way of `dropout`."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape, in and out."""
        return dropout(x, self.p, training=self.training)


def dropout(x: Tensor, probability: float, *, training: bool) -> Tensor:
    """What `F.dropout` does: each number becomes zero with `probability`, else it is divided by `1 - probability`."""
    if not training or probability == 0.0:
        return x
    if not _draws_words(x):
        return F.dropout(x, probability)

    return _AddDropout.apply(x.new_zeros(()), x, probability)  # type: ignore[no-untyped-call]


def add_dropout(residual: Tensor, x: Tensor, probability: float, *, training: bool) -> Tensor:
    """`residual + dropout(x)`, in one pass where both are of one type."""
    fuses = training and probability > 0.0 and residual.dtype is x.dtype and _draws_words(x)
    if not fuses:
        return residual + dropout(x, probability, training=training)

    return _AddDropout.apply(residual, x, probability)  # type: ignore[no-untyped-call]


def _draws_words(x: Tensor) -> bool:
    """Whether masks come from whole words: not on a GPU, which draws fast, nor compiled, where torch's own is fused."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


class _AddDropout(torch.autograd.Function):
    """`residual + scale * mask * x`; the residual is of the shape of `x`, or a scalar without a gradient."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, x: Tensor, probability: float) -> Tensor:
        mask = keep_mask(x, 1.0 - probability)
        ctx.save_for_backward(mask)
        ctx.scale = 1.0 / (1.0 - probability)
        return torch.addcmul(residual, x, mask, value=ctx.scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None]:
        (mask,) = ctx.saved_tensors
        d_residual = gradient if ctx.needs_input_grad[0] else None
        d_x = torch.addcmul(gradient.new_zeros(()), gradient, mask, value=ctx.scale)
        return d_residual, d_x, None
