"""Packed tokens to padded rows and back, each a gather whose backward is a gather too.

`N` packed slots, `P` padded slots. torch's own backward of a gather is a scatter that adds row by row, because a row
may have been read twice. Here every token is in exactly one slot on either side, and padding has no gradient. So the
backward of each direction is the other direction's gather, which is much faster.
"""

from typing import Any

import torch
from torch import Tensor


def pad_packed(x: Tensor, gather_index: Tensor, *, scatter_index: Tensor) -> Tensor:
    """Packed `x` `(N, ...)` -> padded `(P, ...)`.

    `gather_index` `(P,)` names the packed slot that each padded slot reads, and `scatter_index` `(tokens,)` the padded
    slot that each token is written to. What padding reads is arbitrary, and no gradient flows back from it.
    """
    return _PadPacked.apply(x, gather_index, scatter_index)  # type: ignore[no-untyped-call]


def pack_padded(
    padded: Tensor, gather_index: Tensor, *, pad_index: Tensor, scatter_index: Tensor, count: int
) -> Tensor:
    """The way back: padded `(P, ...)` -> packed `(count, ...)`, with zeros behind the last token.

    The indices are those of `pad_packed`, and `pad_index` names the padded slots that hold no token.
    """
    return _PackPadded.apply(padded, gather_index, pad_index, scatter_index, count)  # type: ignore[no-untyped-call]


class _PadPacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gather_index: Tensor, scatter_index: Tensor) -> Tensor:
        ctx.save_for_backward(scatter_index)
        ctx.count = len(x)
        return x.index_select(0, gather_index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (scatter_index,) = ctx.saved_tensors
        return _tokens_then_zeros(gradient, scatter_index, count=ctx.count), None, None


class _PackPadded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, padded: Tensor, gather_index: Tensor, pad_index: Tensor, scatter_index: Tensor, count: int
    ) -> Tensor:
        ctx.save_for_backward(gather_index, pad_index)
        return _tokens_then_zeros(padded, scatter_index, count=count)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        gather_index, pad_index = ctx.saved_tensors
        d_padded = gradient.index_select(0, gather_index).index_fill_(0, pad_index, 0.0)
        return d_padded, None, None, None, None


def _tokens_then_zeros(padded: Tensor, scatter_index: Tensor, *, count: int) -> Tensor:
    """The padded slots that hold tokens, in packed order, then zeros up to `count` slots."""
    tokens = len(scatter_index)
    out = padded.new_empty(count, *padded.shape[1:])

    torch.index_select(padded, 0, scatter_index, out=out[:tokens])
    out[tokens:] = 0

    return out
