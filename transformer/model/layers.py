"""The parts of a layer: positions, the scaled embedding, feed-forward, residual and norm, and the two kinds of layer.

`B` sentences, `T` target positions, `S` source positions, `D` d_model, `V` vocabulary. Constructors take numbers.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transformer.compute import lowered
from transformer.config.settings import Norm, Positions
from transformer.kernels.dropout import Dropout
from transformer.layout import Layout, Padded
from transformer.model.attention import KeyValues, MultiHeadAttention


def sinusoids(n_positions: int, d_model: int) -> Tensor:
    """`PE(pos, 2i) = sin(pos / 10000^(2i / d_model))`, `PE(pos, 2i + 1) = cos(same)` (3.5), as `(positions, D)`.

    Interleaved, as the paper writes it; other toolkits put all sines first.
    """
    position = torch.arange(n_positions, dtype=torch.float64).unsqueeze(1)
    angle = position * 10_000.0 ** (-torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1).to(torch.get_default_dtype())


class Embedding(nn.Module):
    """Rows of `matrix` times sqrt(d_model) (section 3.4), plus positions (3.5), with dropout on the sum (5.4).

    The matrix belongs to the caller, since one may serve source, target and output.
    """

    table: Tensor

    def __init__(self, matrix: nn.Parameter, positions: Positions, *, max_positions: int, dropout: float) -> None:
        super().__init__()
        d_model = matrix.shape[1]
        self.matrix = matrix
        self.scale = math.sqrt(d_model)
        self.dropout = Dropout(dropout)
        match positions:
            case Positions.sinusoidal:
                self.register_buffer("table", sinusoids(max_positions, d_model), persistent=False)
            case Positions.learned:
                self.table = nn.Parameter(torch.empty(max_positions, d_model))
                nn.init.normal_(self.table, std=d_model**-0.5)

    def forward(self, tokens: Tensor, positions: Tensor | int) -> Tensor:
        """Ids `(B, T)` and positions that broadcast against them, or one for all -> `(B, T, D)`."""
        return self.dropout(F.embedding(tokens, self.matrix) * self.scale + self.table[positions])


class FeedForward(nn.Module):
    """`max(0, x W_1 + b_1) W_2 + b_2` at each position (eq. 2)."""

    def __init__(self, d_model: int, d_ff: int, *, dropout: float) -> None:
        super().__init__()
        self.W_1 = nn.Linear(d_model, d_ff)
        self.W_2 = nn.Linear(d_ff, d_model)
        self.dropout = Dropout(dropout)
        for linear in (self.W_1, self.W_2):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """`(..., D)` -> `(..., D)`."""
        return self.W_2(self.dropout(F.relu(self.W_1(x))))


class AddNorm(nn.LayerNorm):
    """The residual connection around a sub-layer: `LayerNorm(x + Dropout(sublayer(x)))` (section 5.4).

    With `pre` the norm goes to the sub-layer's input instead: `x + Dropout(sublayer(LayerNorm(x)))`.
    """

    def __init__(self, d_model: int, norm: Norm, *, dropout: float) -> None:
        super().__init__(d_model, eps=1e-5)
        self.pre = norm is Norm.pre
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:  # type: ignore[override]
        """`x` and what `sublayer` makes of it, both `(..., D)`."""
        if self.pre:
            return x + self.dropout(sublayer(lowered(super().forward(x))))
        return lowered(super().forward(x + self.dropout(sublayer(x))))


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward (section 3.1)."""

    def __init__(
        self, attention: MultiHeadAttention, feed_forward: FeedForward, *, d_model: int, norm: Norm, dropout: float
    ) -> None:
        super().__init__()
        self.self_attention, self.feed_forward = attention, feed_forward
        self.self_attention_norm = AddNorm(d_model, norm, dropout=dropout)
        self.feed_forward_norm = AddNorm(d_model, norm, dropout=dropout)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """`(B, S, D)` -> `(B, S, D)`; every position sees its whole sentence."""

        def self_attention(x: Tensor) -> Tensor:
            read = self.self_attention.keys_values(x)
            return self.self_attention(x, read, queries=layout, keys=layout, causal=False)

        return self.feed_forward_norm(self.self_attention_norm(x, self_attention), self.feed_forward)


class DecoderLayer(nn.Module):
    """Masked self-attention, encoder-decoder attention and feed-forward (section 3.1)."""

    def __init__(
        self,
        self_attention: MultiHeadAttention,
        cross_attention: MultiHeadAttention,
        feed_forward: FeedForward,
        *,
        d_model: int,
        norm: Norm,
        dropout: float,
    ) -> None:
        super().__init__()
        self.self_attention, self.cross_attention, self.feed_forward = self_attention, cross_attention, feed_forward
        self.self_attention_norm = AddNorm(d_model, norm, dropout=dropout)
        self.cross_attention_norm = AddNorm(d_model, norm, dropout=dropout)
        self.feed_forward_norm = AddNorm(d_model, norm, dropout=dropout)

    def forward(self, x: Tensor, layout: Layout, *, memory: KeyValues, memory_layout: Layout) -> Tensor:
        """`(B, T, D)` -> `(B, T, D)`; position t sees targets 0..t and the whole source."""

        def self_attention(x: Tensor) -> Tensor:
            read = self.self_attention.keys_values(x)
            return self.self_attention(x, read, queries=layout, keys=layout, causal=True)

        def cross_attention(x: Tensor) -> Tensor:
            return self.cross_attention(x, memory, queries=layout, keys=memory_layout, causal=False)

        x = self.cross_attention_norm(self.self_attention_norm(x, self_attention), cross_attention)
        return self.feed_forward_norm(x, self.feed_forward)

    def step(
        self, x: Tensor, past: KeyValues | None, *, memory: KeyValues, memory_layout: Padded
    ) -> tuple[Tensor, KeyValues]:
        """One new position for each of `R` hypotheses: `x` `(R, 1, D)` and the keys of earlier positions, if any.

        The rows of one sentence are adjacent, so that they can share one row of `memory`: in the encoder-decoder
        attention they stand as its queries, `(B, R / B, D)`. Returns the new `x` and the keys that the next step needs.
        """
        present = past

        def self_attention(x: Tensor) -> Tensor:
            nonlocal present
            new = self.self_attention.keys_values(x)
            present = new if past is None else past.append(new)
            rows, width = present.keys.shape[:2]
            seen, query = Padded.solid(rows, width, x.device), Padded.solid(rows, 1, x.device)
            return self.self_attention(x, present, queries=query, keys=seen, causal=False)

        def cross_attention(x: Tensor) -> Tensor:
            grouped = x.reshape(memory.keys.shape[0], -1, x.shape[-1])  # (B, R / B, D)
            query = Padded.solid(grouped.shape[0], grouped.shape[1], x.device)
            out = self.cross_attention(grouped, memory, queries=query, keys=memory_layout, causal=False)
            return out.reshape(x.shape)

        x = self.cross_attention_norm(self.self_attention_norm(x, self_attention), cross_attention)
        assert present is not None
        return self.feed_forward_norm(x, self.feed_forward), present
