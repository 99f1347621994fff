"""Attention (section 3.2): `attend`, multi-head attention in its three roles, and the keys and values it reads.

`B` sentences, `T` queries, `S` keys, `D` d_model, `H` heads, `K` head width. Heads stay in the last two dimensions,
`(..., H, K)`, so that only `attend` knows how sentences lie in the tensor. Keys and values are made by one method and
read by another: a cached decoding step is the same code as training, with keys that come from earlier.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transformer.layout import Layout


def attend(q: Tensor, k: Tensor, v: Tensor, *, queries: Layout, keys: Layout, causal: bool, dropout: float) -> Tensor:
    """Scaled dot-product attention (eq. 1): `softmax(q k^T / sqrt(d_k)) v` over the keys that each query may see.

    q `(B, T, H, d_k)`, k `(B, S, H, d_k)`, v `(B, S, H, d_v)` -> `(B, T, H, d_v)`. `causal` lets position t see 0..t;
    padding stands at the right, so a real causal query never reaches it and needs no other mask. `dropout` is on the
    weights.
    """
    mask = None if causal or keys.full else keys.visible()[:, None, None, :]  # (B, 1, 1, S)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, K)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)
    return out.transpose(1, 2)  # (B, T, H, d_v)


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

    def __init__(self, d_model: int, n_heads: int, *, d_k: int, d_v: int, dropout: float) -> None:
        super().__init__()
        self.n_heads, self.dropout = n_heads, dropout
        self.W_q = nn.Linear(d_model, n_heads * d_k, bias=False)
        self.W_k = nn.Linear(d_model, n_heads * d_k, bias=False)
        self.W_v = nn.Linear(d_model, n_heads * d_v, bias=False)
        self.W_o = nn.Linear(n_heads * d_v, d_model, bias=False)
        for projection in (self.W_q, self.W_k, self.W_v, self.W_o):
            nn.init.xavier_uniform_(projection.weight)

    def keys_values(self, context: Tensor) -> KeyValues:
        """Keys and values of `context` `(..., D)`."""
        return KeyValues(self._heads(self.W_k(context)), self._heads(self.W_v(context)))

    def forward(self, x: Tensor, read: KeyValues, *, queries: Layout, keys: Layout, causal: bool) -> Tensor:
        """Queries from `x` `(..., D)`, read against the keys and values in `read`; the result is `(..., D)`."""
        dropout = self.dropout if self.training else 0.0
        q = self._heads(self.W_q(x))
        heads = attend(q, read.keys, read.values, queries=queries, keys=keys, causal=causal, dropout=dropout)
        return self.W_o(heads.flatten(-2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.n_heads, -1)  # (..., H, K)
