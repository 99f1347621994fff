"""Attention as batched products with a backward of its own, for half precision on a CPU.

torch's fused attention has a backward for bf16 on CPUs that takes six times as long as this one at the length of a
sentence (B 240, H 4, T 17, K 64: 35 ms against 6 on two AMX cores). In fp32 torch's is the faster one.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from transformer.compute import at_least_fp32
from transformer.kernels.dropout import keep_mask

_REGISTER = 16  # numbers in fp32 that the widest vector register holds


def dense_attention(q: Tensor, k: Tensor, v: Tensor, *, masked: Tensor | None, scale: float, dropout: float) -> Tensor:
    """`softmax(scale q k^T) v` for q `(B, H, T, K)`, k `(B, H, S, K)`, v `(B, H, S, W)` -> `(B, H, T, W)`.

    `masked` says which keys may not be seen, as bool that broadcasts against `(B, H, T, S)`. The softmax is in fp32
    (fp64 stays fp64). `dropout` is on the weights.
    """
    return _DenseAttention.apply(q, k, v, masked, scale, dropout)  # type: ignore[no-untyped-call]


class _DenseAttention(torch.autograd.Function):
    """The equations, with `P` the weights, `M` the dropout's mask divided by the share it keeps, and `*` elementwise.

    P = softmax(scale Q K^T), O = (P * M) V
    dV = (P * M)^T dO, dP = dO V^T * M, dS = P * (dP - rowsum(P * dP)), dQ = scale dS K, dK = scale dS^T Q
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, masked: Tensor | None, scale: float, dropout: float
    ) -> Tensor:
        heads = q.shape[:2]  # B, H
        shape = (*q.shape[:3], k.shape[2])  # B, H, T, S
        q = q.flatten(0, 1).contiguous()  # (B H, T, K)
        k = k.flatten(0, 1).contiguous()  # (B H, S, K)
        v = v.flatten(0, 1).contiguous()  # (B H, S, W)

        # The weights. A sum hides keys several times as fast as `masked_fill_` does.
        scores = torch.bmm(q, k.transpose(1, 2)).view(shape)
        scores = at_least_fp32(scores).mul_(scale)
        if masked is not None:
            scores += torch.zeros(masked.shape, dtype=scores.dtype).masked_fill_(masked, -torch.inf)
        weights = _softmax(scores)

        # Dropout on the weights.
        mask = None
        dropped = weights
        if dropout:
            mask = keep_mask(weights, 1.0 - dropout)
            dropped = weights * mask / (1.0 - dropout)

        # The weighted mean of the values.
        out = torch.bmm(dropped.flatten(0, 1).to(q.dtype), v)  # (B H, T, W)

        ctx.save_for_backward(q, k, v, weights.to(q.dtype), None if mask is None else mask.to(q.dtype))
        ctx.scale = scale
        ctx.dropout = dropout
        return out.unflatten(0, heads)  # type: ignore[no-untyped-call]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights, mask = ctx.saved_tensors
        heads = gradient.shape[:2]  # B, H
        d_out = gradient.flatten(0, 1).contiguous()  # (B H, T, W)
        weights = weights.flatten(0, 1)  # (B H, T, S)

        # The values and, through the dropout, the weights.
        d_weights = torch.bmm(d_out, v.transpose(1, 2))
        dropped = weights
        if mask is not None:
            mask = mask.flatten(0, 1)
            dropped = weights * mask / (1.0 - ctx.dropout)
            d_weights = d_weights * mask / (1.0 - ctx.dropout)
        d_v = torch.bmm(dropped.transpose(1, 2), d_out)

        # The softmax, whose sums over keys need fp32.
        d_scores = _softmax_backward(at_least_fp32(d_weights), at_least_fp32(weights))
        d_scores = d_scores.mul_(ctx.scale).to(q.dtype)

        # Queries and keys.
        d_q = torch.bmm(d_scores, k)
        d_k = torch.bmm(d_scores.transpose(1, 2), q)

        by_head = (x.unflatten(0, heads) for x in (d_q, d_k, d_v))  # type: ignore[no-untyped-call]
        return *by_head, None, None, None


def _softmax(scores: Tensor) -> Tensor:
    """The softmax over the last dimension."""
    return torch.softmax(_widened(scores, -torch.inf), -1)[..., : scores.shape[-1]]


def _softmax_backward(d_weights: Tensor, weights: Tensor) -> Tensor:
    """The gradient of the scores whose softmax over the last dimension is `weights`, by torch's kernel if it has it."""
    if hasattr(torch, "_softmax_backward_data"):
        d_scores = torch._softmax_backward_data(_widened(d_weights, 0.0), _widened(weights, 0.0), -1, weights.dtype)
        return d_scores[..., : weights.shape[-1]]

    return weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True))


def _widened(x: Tensor, value: float) -> Tensor:
    """`x` with at least as many numbers in its last dimension as a vector register holds, filled up with `value`.

    torch's softmax takes fewer one by one: 21 ns for each in the forward pass, against 1.4 in rows of 16 (AVX-512).
    """
    missing = _REGISTER - x.shape[-1]
    return F.pad(x, (0, missing), value=value) if missing > 0 else x
