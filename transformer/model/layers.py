"""The parts of the model around attention: embedding, feed-forward, residual connections, and the two kinds of layer.

`attention` is below this module, and `transformer` stacks its layers. Both kinds of layer are sub-layers, one after the
other, each between the two halves of an `AddNorm`. Constructors take numbers, never a config.

`B` sentences, `S` source positions, `T` target positions, `D` d_model, `V` vocabulary; `K` hypotheses of a sentence in
a search. Packed batches have `(N, D)` where `(B, T, D)` is written, with the tokens of all sentences end to end.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transformer.compute import at_least_fp32, is_exporting, to_autocast_dtype
from transformer.config.settings import Activation, Norm, Positions
from transformer.kernels.add_norm import can_add_norm, triton_add_norm
from transformer.kernels.dropout import Dropout, add_dropout
from transformer.layout import Layout, Mask, Padded
from transformer.model.attention import KeyValueCache, KeyValues, MultiHeadAttention


def sinusoids(n_positions: int, d_model: int) -> Tensor:
    """`PE(pos, 2i) = sin(pos / 10000^(2i / d_model))`, `PE(pos, 2i + 1) = cos(same)` (3.5), as `(positions, D)`.

    Interleaved, as the paper writes it; other toolkits put all sines first. The table is in torch's default type,
    fp32 in a training of any precision: under fp64 it is off by 3e-8, the same on every rank and device.
    """
    return _waves(n_positions, d_model, last=d_model // 2)


def marian_sinusoids(n_positions: int, d_model: int) -> Tensor:
    """The same with the frequencies of Marian, and of tensor2tensor: `10000^(-i / (d_model / 2 - 1))`.

    So the last of them is 1 / 10000, and all but the first are a little lower than the paper's.
    """
    return _waves(n_positions, d_model, last=max(1, d_model // 2 - 1))


def fixed_positions(positions: Positions, n_positions: int, d_model: int) -> Tensor:
    """The table `(positions, D)` of positions that are not learned."""
    match positions:
        case Positions.sinusoidal:
            return sinusoids(n_positions, d_model)
        case Positions.marian:
            return marian_sinusoids(n_positions, d_model)
        case Positions.learned:
            raise ValueError("learned positions are weights")


def _waves(n_positions: int, d_model: int, *, last: int) -> Tensor:
    """Sines and cosines in turn, of frequencies `10000^(-i / last)`, as `(positions, D)`."""
    # In float64: a product of a large position and a frequency needs more digits than float32 has.
    position = torch.arange(n_positions, dtype=torch.float64).unsqueeze(1)  # (positions, 1)
    frequency = 10_000.0 ** (-torch.arange(d_model // 2, dtype=torch.float64) / last)  # (D / 2,)
    angle = position * frequency  # (positions, D / 2)

    # The last dimension of the stack is (sin, cos), so flattening it interleaves them.
    table = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)  # (positions, D)
    return table.to(torch.get_default_dtype())


class Embedding(nn.Module):
    """Rows of `matrix` times sqrt(d_model) (section 3.4), plus positions (3.5), with dropout on the sum (5.4).

    The matrix belongs to the caller, since one may serve source, target and output.
    """

    table: Tensor  # (max_positions, D)

    def __init__(
        self,
        matrix: nn.Parameter,
        positions: Positions,
        *,
        max_positions: int,
        dropout: float,
        frozen_row: int | None,
    ) -> None:
        super().__init__()
        d_model = matrix.shape[1]
        self.matrix = matrix
        self.frozen_row = frozen_row  # of the matrix: reading it gives it no gradient
        self.scale = math.sqrt(d_model)
        self.dropout = Dropout(dropout)

        if positions is Positions.learned:
            self.table = nn.Parameter(torch.empty(max_positions, d_model))
            nn.init.normal_(self.table, std=d_model**-0.5)
        else:
            self.register_buffer("table", fixed_positions(positions, max_positions, d_model), persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor | int) -> Tensor:
        """Ids `(B, T)` and their positions, a tensor that broadcasts against them or one number -> `(B, T, D)`."""
        rows = F.embedding(tokens, self.matrix, self.frozen_row)  # (B, T, D)
        x = torch.add(self.table[positions], rows, alpha=self.scale)  # position + scale * row, in one pass
        return self.dropout(x)


def frozen(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """The tensor itself, of which these rows are given no gradient."""
    if not (torch.is_grad_enabled() and tensor.requires_grad) or is_exporting():
        return tensor
    return _Frozen.apply(tensor, rows)  # type: ignore[no-untyped-call]


class _Frozen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rows: Sequence[int]) -> Tensor:
        ctx.rows = rows
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()  # autograd's own must stay as it is
        for row in ctx.rows:
            gradient[row].zero_()  # an index of several would be sent to the device, which a captured graph forbids
        return gradient, None


class FeedForward(nn.Module):
    """`max(0, x W_1 + b_1) W_2 + b_2` at each position (eq. 2), or with GELU or Swish in place of the maximum."""

    def __init__(self, d_model: int, d_ff: int, *, activation: Activation, dropout: float) -> None:
        super().__init__()
        self.activation = activation
        self.W_1 = nn.Linear(d_model, d_ff)
        self.W_2 = nn.Linear(d_ff, d_model)
        self.dropout = Dropout(dropout)

        for linear in (self.W_1, self.W_2):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """`(..., D)` -> `(..., D)`."""
        inner = self.W_1(x)  # (..., d_ff)
        inner = _activate(inner, self.activation)
        return self.W_2(self.dropout(inner))


def _activate(x: Tensor, activation: Activation) -> Tensor:
    """The activation of each number; ReLU in place."""
    match activation:
        case Activation.relu:
            return F.relu(x, inplace=True)
        case Activation.gelu:
            return F.gelu(x)
        case Activation.swish:
            return F.silu(x)


class AddNorm(nn.LayerNorm):
    """The residual connection and the norm around a sub-layer (section 3.1), half before it and half after it:

        y = sublayer(norm.before(x))
        x = norm(x, y)

    With post-norm, as in the paper, this is `LayerNorm(x + Dropout(sublayer(x)))`. With pre-norm it is
    `x + Dropout(sublayer(LayerNorm(x)))`.
    """

    def __init__(self, d_model: int, norm: Norm, *, dropout: float) -> None:
        super().__init__(d_model, eps=1e-5)
        self.pre = norm is Norm.pre
        self.dropout = dropout

    def before(self, x: Tensor) -> Tensor:
        """The sub-layer's input, `(..., D)`."""
        return to_autocast_dtype(super().forward(x)) if self.pre else x

    def forward(self, x: Tensor, y: Tensor, *, fused: bool = False) -> Tensor:  # type: ignore[override]
        """The input `x` and the output `y` of the sub-layer, `(..., D)` each -> `(..., D)`.

        `fused`: with post-norm, by one kernel of a GPU.
        """
        if fused and not self.pre and can_add_norm(self.normalized_shape[0]):
            dropout = self.dropout if self.training else 0.0
            return triton_add_norm(x, y, self.weight, self.bias, dropout=dropout, eps=self.eps)

        total = add_dropout(x, y, self.dropout, training=self.training)
        if self.pre:
            return total
        if total.requires_grad:  # in half precision a CPU would add up the gains' gradients over all rows in it
            total = at_least_fp32(total)
        return to_autocast_dtype(super().forward(total))


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
        # Self-attention.
        y = self.self_attention_norm.before(x)
        kv = self.self_attention.joined(y, layout=layout, with_queries=True)
        y = self.self_attention(y, kv, queries=layout, keys=layout, causal=False)
        x = self.self_attention_norm(x, y, fused=layout.is_fused)

        # Feed-forward.
        y = self.feed_forward(self.feed_forward_norm.before(x))
        return self.feed_forward_norm(x, y, fused=layout.is_fused)


class DecoderLayer(nn.Module):
    """Masked self-attention, encoder-decoder attention and feed-forward (section 3.1).

    `forward` takes all target positions at once, as in training; `step` takes the next one, as in a search.
    """

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
        x = self._masked_self_attention(x, layout)

        # Encoder-decoder attention: queries from the target, keys and values from the source.
        y = self.cross_attention_norm.before(x)
        y = self.cross_attention(y, memory_kv, queries=layout, keys=memory_layout, causal=False)
        x = self.cross_attention_norm(x, y, fused=layout.is_fused)

        # Feed-forward.
        y = self.feed_forward(self.feed_forward_norm.before(x))
        return self.feed_forward_norm(x, y, fused=layout.is_fused)

    def cross_attention_weights(
        self, x: Tensor, layout: Padded, *, memory_kv: KeyValues, memory_layout: Padded
    ) -> Tensor:
        """How much each position of `x` `(B, T, D)` reads of each source position, `(B, H, T, S)`."""
        x = self._masked_self_attention(x, layout)
        y = self.cross_attention_norm.before(x)
        return self.cross_attention.weights(y, memory_kv, queries=layout, keys=memory_layout, causal=False)

    def _masked_self_attention(self, x: Tensor, layout: Layout) -> Tensor:
        """The first sub-layer, with residual connection and norm, `(B, T, D)` -> `(B, T, D)`."""
        y = self.self_attention_norm.before(x)
        kv = self.self_attention.joined(y, layout=layout, with_queries=True)
        y = self.self_attention(y, kv, queries=layout, keys=layout, causal=True)
        return self.self_attention_norm(x, y, fused=layout.is_fused)

    def step(
        self,
        x: Tensor,
        cache: KeyValueCache,
        *,
        slots: slice | Tensor,
        end: int,
        queries: Padded,
        past: Mask,
        memory_kv: KeyValueCache,
        memory: Padded | Mask,
    ) -> Tensor:
        """The next position of the `K` hypotheses of each sentence, `(B, K, D)` -> `(B, K, D)`; `queries` lay them out.

        `cache` holds keys and values of the positions before. Those of this position are written to its `slots`, K for
        each sentence, and of all up to `end`, `past` says which each hypothesis sees. `memory_kv` holds the keys and
        values of the encoder's output, once for each sentence, whatever the number of its hypotheses.
        """
        # Self-attention: the keys and values of earlier positions come from the cache.
        y = self.self_attention_norm.before(x)
        q, kv = self.self_attention.project(y)
        cache.write(kv, slots)
        y = self.self_attention.read(q, cache.read(end), queries=queries, keys=past, causal=False)
        x = self.self_attention_norm(x, y)

        # Encoder-decoder attention.
        y = self.cross_attention_norm.before(x)
        y = self.cross_attention(y, memory_kv.read(memory_kv.size), queries=queries, keys=memory, causal=False)
        x = self.cross_attention_norm(x, y)

        # Feed-forward.
        y = self.feed_forward(self.feed_forward_norm.before(x))
        return self.feed_forward_norm(x, y)
