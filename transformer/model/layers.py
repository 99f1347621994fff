"""The parts of a layer: positions, the scaled embedding, feed-forward, residual and norm, and the two kinds of layer.

`B` sentences, `T` target positions, `S` source positions, `D` d_model, `V` vocabulary. Constructors take numbers.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transformer.compute import to_autocast_dtype
from transformer.config.settings import Norm, Positions
from transformer.kernels.dropout import Dropout, add_dropout
from transformer.layout import Histories, Layout, Padded
from transformer.model.attention import KeyValueCache, KeyValues, MultiHeadAttention


def sinusoids(n_positions: int, d_model: int) -> Tensor:
    """`PE(pos, 2i) = sin(pos / 10000^(2i / d_model))`, `PE(pos, 2i + 1) = cos(same)` (3.5), as `(positions, D)`.

    Interleaved, as the paper writes it; other toolkits put all sines first.
    """
    position = torch.arange(n_positions, dtype=torch.float64).unsqueeze(1)  # (positions, 1)
    frequency = 10_000.0 ** (-torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)  # (D / 2,)
    angle = position * frequency  # (positions, D / 2)

    table = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)  # (positions, D)
    return table.to(torch.get_default_dtype())


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
        rows = F.embedding(tokens, self.matrix)  # (B, T, D)
        return self.dropout(torch.add(self.table[positions], rows, alpha=self.scale))


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
        inner = F.relu(self.W_1(x), inplace=True)  # (..., d_ff)
        return self.W_2(self.dropout(inner))


class AddNorm(nn.LayerNorm):
    """The residual connection around a sub-layer: `LayerNorm(x + Dropout(sublayer(x)))` (section 5.4).

    With `pre` the norm goes to the sub-layer's input instead: `x + Dropout(sublayer(LayerNorm(x)))`.
    """

    def __init__(self, d_model: int, norm: Norm, *, dropout: float) -> None:
        super().__init__(d_model, eps=1e-5)
        self.pre = norm is Norm.pre
        self.dropout = dropout

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:  # type: ignore[override]
        """`x` and what `sublayer` makes of it, both `(..., D)`."""
        y = sublayer(self.before(x))
        total = add_dropout(x, y, self.dropout, training=self.training)
        return total if self.pre else to_autocast_dtype(super().forward(total))

    def before(self, x: Tensor) -> Tensor:
        """What the sub-layer reads of `x`, `(..., D)`."""
        return to_autocast_dtype(super().forward(x)) if self.pre else x


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward (section 3.1)."""

    def __init__(
        self, attention: MultiHeadAttention, feed_forward: FeedForward, *, d_model: int, norm: Norm, dropout: float
    ) -> None:
        super().__init__()
        self.self_attention = attention
        self.feed_forward = feed_forward
        self.self_attention_norm = AddNorm(d_model, norm, dropout=dropout)
        self.feed_forward_norm = AddNorm(d_model, norm, dropout=dropout)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """`(B, S, D)` -> `(B, S, D)`; every position sees its whole sentence."""

        def self_attention(x: Tensor) -> Tensor:
            kv = self.self_attention.keys_values(x)
            return self.self_attention(x, kv, queries=layout, keys=layout, causal=False)

        x = self.self_attention_norm(x, self_attention)
        return self.feed_forward_norm(x, self.feed_forward)


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
        self.self_attention = self_attention
        self.cross_attention = cross_attention
        self.feed_forward = feed_forward
        self.self_attention_norm = AddNorm(d_model, norm, dropout=dropout)
        self.cross_attention_norm = AddNorm(d_model, norm, dropout=dropout)
        self.feed_forward_norm = AddNorm(d_model, norm, dropout=dropout)

    def forward(self, x: Tensor, layout: Layout, *, memory_kv: KeyValues, memory_layout: Layout) -> Tensor:
        """`(B, T, D)` -> `(B, T, D)`; position t sees targets 0..t and the whole source.

        `memory_kv` are this layer's keys and values of the encoder's output.
        """

        def cross_attention(x: Tensor) -> Tensor:
            return self.cross_attention(x, memory_kv, queries=layout, keys=memory_layout, causal=False)

        x = self._read_targets(x, layout)
        x = self.cross_attention_norm(x, cross_attention)
        return self.feed_forward_norm(x, self.feed_forward)

    def cross_attention_weights(
        self, x: Tensor, layout: Padded, *, memory_kv: KeyValues, memory_layout: Padded
    ) -> Tensor:
        """How much each position of `x` `(B, T, D)` reads of each source position, `(B, H, T, S)`."""
        x = self.cross_attention_norm.before(self._read_targets(x, layout))
        return self.cross_attention.weights(x, memory_kv, queries=layout, keys=memory_layout, causal=False)

    def _read_targets(self, x: Tensor, layout: Layout) -> Tensor:
        """Masked self-attention with its residual and norm, `(B, T, D)`."""

        def self_attention(x: Tensor) -> Tensor:
            kv = self.self_attention.keys_values(x)
            return self.self_attention(x, kv, queries=layout, keys=layout, causal=True)

        return self.self_attention_norm(x, self_attention)

    def step(
        self,
        x: Tensor,
        cache: KeyValueCache,
        *,
        start: int,
        histories: Histories,
        memory: KeyValueCache,
        memory_layout: Padded,
    ) -> Tensor:
        """The next position of the `K` hypotheses of each sentence, `(B, K, D)` -> `(B, K, D)`.

        Their keys and values go to the places from `start` on in `cache`, which then holds all that `histories` speak
        of. `memory` holds the keys and values of the encoder's output, once for each sentence.
        """
        sentences, beam_size, _ = x.shape
        queries = Padded.full_rows(sentences, beam_size, x.device)

        def self_attention(x: Tensor) -> Tensor:
            cache.write(self.self_attention.keys_values(x), start)
            kv = cache.read(start + beam_size)
            return self.self_attention(x, kv, queries=queries, keys=histories, causal=False)

        def cross_attention(x: Tensor) -> Tensor:
            kv = memory.read(memory.size)
            return self.cross_attention(x, kv, queries=queries, keys=memory_layout, causal=False)

        x = self.self_attention_norm(x, self_attention)
        x = self.cross_attention_norm(x, cross_attention)
        return self.feed_forward_norm(x, self.feed_forward)
