"""Attention (section 3.2): `attend`, multi-head attention in its three roles, and the keys and values it reads.

`B` sentences, `T` queries, `S` keys, `D` d_model, `H` heads, `K` head width. Heads stay in the last two dimensions,
`(..., H, K)`, so that only `attend` knows how sentences lie in the tensor. Keys and values are made by one method and
read by another: a cached decoding step is the same code as training, with keys that come from earlier.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from transformer.compute import has_varlen_kernel
from transformer.config.settings import Score
from transformer.kernels.attention import dense_attention
from transformer.layout import Layout, Packed, Padded


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    queries: Layout,
    keys: Layout,
    causal: bool,
    dropout: float,
    scale: float,
    score_vector: Tensor | None,
) -> Tensor:
    """`softmax(score(q, k)) v` over the keys that each query may see.

    Padded: q `(B, T, H, d_k)`, k `(B, S, H, d_k)`, v `(B, S, H, d_v)` -> `(B, T, H, d_v)`; packed: `N` slots in the
    place of rows and positions. The score is `scale q . k` (eq. 1 with scale 1 / sqrt(d_k)), or with a `score_vector`
    `(H, d_k)` additive, `score_vector . tanh(q + k)` (Bahdanau et al., 2015). `causal` lets position t see 0..t;
    padding stands at the right, so a real causal query never reaches it and needs no other mask. `dropout` is on the
    weights.
    """
    if isinstance(queries, Packed):
        assert isinstance(keys, Packed)
        if score_vector is None and dropout == 0.0 and _has_kernel(q, v):
            return _attend_varlen(q, k, v, queries=queries, keys=keys, causal=causal, scale=scale)
        parts = zip(*(layout.pad(x) for layout, x in ((queries, q), (keys, k), (keys, v))), strict=True)
        layouts = zip(queries.groups, keys.groups, strict=True)
        how: dict[str, Any] = {"causal": causal, "dropout": dropout, "scale": scale, "score_vector": score_vector}
        return queries.unpad(
            [attend(*qkv, queries=of_q, keys=of_k, **how) for qkv, (of_q, of_k) in zip(parts, layouts, strict=True)]
        )
    assert isinstance(keys, Padded)
    visible = None if causal or keys.full else keys.visible()[:, None, None, :]  # (B, 1, 1, S)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, K)
    if score_vector is not None:
        hidden = _hidden(visible, causal, q.shape[2], q.device)
        weights = F.dropout(_softmax(additive_scores(q, k, score_vector), hidden), dropout)
        out = weights.to(v.dtype) @ v
    elif q.device.type == "cpu" and q.dtype.itemsize == 2 and torch.is_grad_enabled():
        hidden = _hidden(visible, causal, q.shape[2], q.device)
        out = dense_attention(q, k, v, hidden=hidden, scale=scale, dropout=dropout)
    else:
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, dropout_p=dropout, is_causal=causal, scale=scale
        )
    return out.transpose(1, 2)  # (B, T, H, d_v)


def _hidden(visible: Tensor | None, causal: bool, width: int, device: torch.device) -> Tensor | None:
    """The keys that may not be seen, as bool that broadcasts against `(B, H, T, S)`; None: all may."""
    if causal:
        return torch.ones(width, width, dtype=torch.bool, device=device).triu(1)
    return None if visible is None else ~visible


def _softmax(scores: Tensor, hidden: Tensor | None) -> Tensor:
    scores = scores if scores.dtype.itemsize > 4 else scores.float()
    return torch.softmax(scores if hidden is None else scores.masked_fill(hidden, -torch.inf), -1)


_ADDITIVE_ELEMENTS = 2**22  # of the largest tensor that additive scores make on the way


def additive_scores(q: Tensor, k: Tensor, score_vector: Tensor) -> Tensor:
    """`score_vector_h . tanh(q_i + k_j)`: q `(B, H, T, K)`, k `(B, H, S, K)`, vector `(H, K)` -> `(B, H, T, S)`.

    The sum over every pair of positions is K times as large as the scores: it is made for a few queries at a time, and
    made again in the backward instead of being kept.
    """
    chunk = max(1, _ADDITIVE_ELEMENTS // max(1, k.numel()))
    chunks: list[Tensor] = list(q.split(chunk, dim=2))  # type: ignore[no-untyped-call]
    parts = [
        checkpoint(_additive, part, k, score_vector, use_reentrant=False, preserve_rng_state=False) for part in chunks
    ]
    return torch.cat(parts, dim=2)


def _additive(q: Tensor, k: Tensor, score_vector: Tensor) -> Tensor:
    sums = torch.tanh(q.unsqueeze(3) + k.unsqueeze(2))  # (B, H, t, S, K)
    return torch.einsum("bhtsk,hk->bhts", sums, score_vector)


def _has_kernel(q: Tensor, v: Tensor) -> bool:
    return has_varlen_kernel(q.device, q.dtype, d_k=q.shape[-1], d_v=v.shape[-1])


def _attend_varlen(
    q: Tensor, k: Tensor, v: Tensor, *, queries: Packed, keys: Packed, causal: bool, scale: float
) -> Tensor:
    """The kernel leaves empty slots as it found them, in both directions: what they hold is replaced by zeros."""
    from torch.nn.attention.varlen import varlen_attn  # slow to import, and of no use without a GPU

    real_q, real_k = queries.is_real()[:, None, None], keys.is_real()[:, None, None]
    zero = q.new_zeros(())
    out = varlen_attn(
        torch.where(real_q, q, zero),
        torch.where(real_k, k, zero),
        torch.where(real_k, v, zero),
        queries.offsets,
        keys.offsets,
        queries.longest,
        keys.longest,
        scale=scale,
        window_size=(-1, 0) if causal else (-1, -1),
    )
    assert isinstance(out, Tensor)
    return torch.where(real_q, out, zero)


@dataclass(frozen=True)
class KeyValues:
    """What attention reads: keys `(B, S, H, d_k)` and values `(B, S, H, d_v)`."""

    keys: Tensor
    values: Tensor

    def append(self, new: "KeyValues") -> "KeyValues":
        """These, followed by the keys and values of later positions."""
        return KeyValues(torch.cat((self.keys, new.keys), 1), torch.cat((self.values, new.values), 1))

    def select(self, rows: Tensor) -> "KeyValues":
        """The keys and values of these rows alone."""
        return KeyValues(self.keys.index_select(0, rows), self.values.index_select(0, rows))


class MultiHeadAttention(nn.Module):
    """`Concat(head_1..head_h) W_o` with `head_i = attend(x W_q_i, context W_k_i, context W_v_i)` (section 3.2.2).

    The three roles differ in what is passed: encoder self-attention and masked decoder self-attention read keys made
    from `x` itself, encoder-decoder attention reads keys made from the encoder's output. No projection has a bias.
    """

    def __init__(self, d_model: int, n_heads: int, *, d_k: int, d_v: int, score: Score, dropout: float) -> None:
        super().__init__()
        self.n_heads, self.dropout = n_heads, dropout
        self.scale = 1.0 / math.sqrt(d_k) if score is Score.scaled else 1.0
        self.W_q = nn.Linear(d_model, n_heads * d_k, bias=False)
        self.W_k = nn.Linear(d_model, n_heads * d_k, bias=False)
        self.W_v = nn.Linear(d_model, n_heads * d_v, bias=False)
        self.W_o = nn.Linear(n_heads * d_v, d_model, bias=False)
        for projection in (self.W_q, self.W_k, self.W_v, self.W_o):
            nn.init.xavier_uniform_(projection.weight)
        self.score_vector = None
        if score is Score.additive:
            self.score_vector = nn.Parameter(torch.empty(n_heads, d_k))
            nn.init.normal_(self.score_vector, std=d_k**-0.5)

    def keys_values(self, context: Tensor) -> KeyValues:
        """Keys and values of `context` `(..., D)`."""
        return KeyValues(self._heads(self.W_k(context)), self._heads(self.W_v(context)))

    def forward(self, x: Tensor, read: KeyValues, *, queries: Layout, keys: Layout, causal: bool) -> Tensor:
        """Queries from `x` `(..., D)`, read against the keys and values in `read`; the result is `(..., D)`."""
        dropout = self.dropout if self.training else 0.0
        q = self._heads(self.W_q(x))
        heads = attend(
            q,
            read.keys,
            read.values,
            queries=queries,
            keys=keys,
            causal=causal,
            dropout=dropout,
            scale=self.scale,
            score_vector=self.score_vector,
        )
        return self.W_o(heads.flatten(-2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.n_heads, -1)  # (..., H, K)
