"""Packed rows to padded ones and back, each a gather whose backward is a gather too.

`N` packed slots, `P` padded ones. torch's own backward of a gather adds up row by row, since a row may have been read
twice. Here every token has one place on either side, and padding has no gradient.
"""

from typing import Any

import torch
from torch import Tensor


def spread_out(x: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    """`x` `(N, ...)` -> `(P, ...)`: padded slot i reads packed slot `slots[i]`; token j stands in padded `rows[j]`."""
    return _SpreadOut.apply(x, slots, rows)  # type: ignore[no-untyped-call]


def gather_up(padded: Tensor, slots: Tensor, pads: Tensor, rows: Tensor, *, count: int) -> Tensor:
    """The way back, `(P, ...)` -> `(count, ...)`, with zeros behind the last token; `pads` are the slots of padding."""
    return _GatherUp.apply(padded, slots, pads, rows, count)  # type: ignore[no-untyped-call]


def _tokens(x: Tensor, rows: Tensor, count: int) -> Tensor:
    """The `rows` of `x`, then zeros, `count` in all."""
    out = x.new_empty(count, *x.shape[1:])
    torch.index_select(x, 0, rows, out=out[: len(rows)])
    out[len(rows) :] = 0
    return out


class _SpreadOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.count = len(x)
        return x.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return _tokens(gradient, rows, ctx.count), None, None


class _GatherUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, padded: Tensor, slots: Tensor, pads: Tensor, rows: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(slots, pads)
        return _tokens(padded, rows, count)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        slots, pads = ctx.saved_tensors
        return gradient.index_select(0, slots).index_fill_(0, pads, 0.0), None, None, None, None
