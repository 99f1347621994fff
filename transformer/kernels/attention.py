"""Attention as batched products with a backward of its own, for low precision on a CPU.

torch's fused attention has a backward for bf16 on CPUs that takes six times as long as this at the length of a
sentence (B 240, H 4, T 17, K 64: 35 ms against 6 on two AMX cores); in fp32 torch's is the faster one.
"""

from typing import Any

import torch
from torch import Tensor

from transformer.kernels.dropout import keep_mask


def dense_attention(q: Tensor, k: Tensor, v: Tensor, *, hidden: Tensor | None, scale: float, dropout: float) -> Tensor:
    """`softmax(scale q k^T) v` for q `(B, H, T, K)`, k `(B, H, S, K)`, v `(B, H, S, W)` -> `(B, H, T, W)`.

    `hidden` says which keys may not be seen, as bool that broadcasts against `(B, H, T, S)`. Softmax is in fp32 (fp64
    stays). `dropout` is on the weights.
    """
    return _DenseAttention.apply(q, k, v, hidden, scale, dropout)  # type: ignore[no-untyped-call]


class _DenseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, scale: float, dropout: float
    ) -> Tensor:
        shape = (*q.shape[:3], k.shape[2])
        q, k, v = (x.flatten(0, 1).contiguous() for x in (q, k, v))  # (B H, T, K)
        scores = torch.bmm(q, k.transpose(1, 2)).view(shape)
        scores = (scores if scores.dtype.itemsize > 4 else scores.float()) * scale
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        weights = torch.softmax(scores, -1)  # (B, H, T, S)
        mask = keep_mask(weights.shape, 1.0 - dropout, q.device) if dropout else None
        dropped = weights if mask is None else weights * mask / (1.0 - dropout)
        out = torch.bmm(dropped.flatten(0, 1).to(q.dtype), v)
        ctx.save_for_backward(q, k, v, weights.to(q.dtype), mask)
        ctx.scale, ctx.dropout = scale, dropout
        return out.unflatten(0, shape[:2])  # type: ignore[no-untyped-call]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights, mask = ctx.saved_tensors
        heads = gradient.shape[:2]
        gradient = gradient.flatten(0, 1).contiguous()
        weights = weights.flatten(0, 1)
        d_weights = torch.bmm(gradient, v.transpose(1, 2))
        dropped = weights
        if mask is not None:
            mask = mask.flatten(0, 1)
            dropped = weights * mask / (1.0 - ctx.dropout)
            d_weights = d_weights * mask / (1.0 - ctx.dropout)
        d_v = torch.bmm(dropped.transpose(1, 2), gradient)
        wide, d_wide = (x if x.dtype.itemsize > 4 else x.float() for x in (weights, d_weights))
        d_scores = wide * (d_wide - (wide * d_wide).sum(-1, keepdim=True))
        d_scores = (d_scores * ctx.scale).to(q.dtype)
        d_q, d_k = torch.bmm(d_scores, k), torch.bmm(d_scores.transpose(1, 2), q)
        return *(x.unflatten(0, heads) for x in (d_q, d_k, d_v)), None, None, None  # type: ignore[no-untyped-call]
