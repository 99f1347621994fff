"""Attention (section 3.2): equation 1, its fast forms, multi-head attention in three roles, and its keys and values.

`B` sentences, `T` queries, `S` keys, `D` d_model, `H` heads, `K` head width (d_k of queries and keys, d_v of values),
`N` slots of a packed batch. Heads are the last dimension but one, `(..., H, K)`, so that a projection is a view.

Read `attention_weights` first: it is the formula. `attend` computes the same weights times the values in the fastest
way for the layout, the score, the type and the device at hand. `MultiHeadAttention` is what `layers` builds on: one
method makes keys and values, another reads them. So a cached decoding step is the same code as training, with keys
from earlier positions. A layout of `transformer.layout` says which keys a query may see.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from transformer.compute import at_least_fp32, is_exporting
from transformer.config.settings import AttentionKernel, Score
from transformer.errors import InputError
from transformer.kernels.attention import dense_attention
from transformer.kernels.packed_attention import sentence_attention, triton_attention
from transformer.layout import Layout, Mask, Packed, Padded

# ---- the formula ----------------------------------------------------------------------------------------------------


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    queries: Padded,
    keys: Padded | Mask,
    causal: bool,
    scale: float,
    score_vector: Tensor | None,
) -> Tensor:
    """The weights of attention (eq. 1): the softmax, over the keys that a query may see, of their scores.

    q `(B, T, H, K)`, k `(B, S, H, K)` -> `(B, H, T, S)`, in fp32 at least. The score is `scale q . k`, or, with a
    `score_vector` `(H, K)`, the additive `score_vector . tanh(q + k)` (Bahdanau et al., 2015), which has no scale.

    Every row sums to 1, and a masked key weighs exactly 0. An empty row of `keys` shows its first position, so that no
    row is ever NaN. Rows of padding queries are finite, and mean nothing.

    This is the plain form of `attend`, for padded layouts. A packed caller pads both sides (`Groups.pad`) and asks for
    the weights of each group.

    Raises InputError for arguments that do not belong together.
    """
    if not torch.compiler.is_compiling():  # nor exporting, where a check of a size would fix it
        _check_weights(q, k, queries=queries, keys=keys, scale=scale, score_vector=score_vector)
    q = q.transpose(1, 2)  # (B, H, T, K)
    k = k.transpose(1, 2)  # (B, H, S, K)

    if score_vector is None:
        scores = scale * at_least_fp32(q @ k.transpose(2, 3))  # (B, H, T, S)
    else:
        scores = at_least_fp32(additive_scores(q, k, score_vector))

    if isinstance(keys, Mask):
        scores = scores + keys.numbers
    elif (visible := _visible_keys(queries, keys, causal=causal)) is not None:
        scores = scores.masked_fill(~visible, -torch.inf)

    return torch.softmax(scores, dim=-1)


def _check_weights(
    q: Tensor, k: Tensor, *, queries: Padded, keys: Padded | Mask, scale: float, score_vector: Tensor | None
) -> None:
    """Raise InputError for arguments of `attention_weights` that do not belong together."""
    for name, x in (("q", q), ("k", k)):
        if not isinstance(x, Tensor) or x.ndim != 4 or not x.is_floating_point():
            raise InputError(f"{name} must be a tensor of real numbers: (sentences, positions, heads, width)")
    shapes = f"q {tuple(q.shape)} and k {tuple(k.shape)}"
    if q.shape[::2] != k.shape[::2] or q.shape[3] != k.shape[3]:
        raise InputError(f"{shapes} differ in sentences, heads or width")
    if (q.dtype, q.device) != (k.dtype, k.device):
        raise InputError(f"q is {q.dtype} on {q.device}, and k {k.dtype} on {k.device}: make them alike")

    for name, layout, x in (("queries", queries, q), ("keys", keys, k)):
        if isinstance(layout, Mask):
            continue  # a search makes both layouts itself
        if not isinstance(layout, Padded) or not isinstance(layout.lengths, Tensor):
            raise InputError(f"{name} must be a Padded, as transformer.Padded.of makes it")
        if (len(layout.lengths), layout.width) != (x.shape[0], x.shape[1]) or layout.lengths.device != x.device:
            raise InputError(
                f"{name} has {len(layout.lengths)} lengths on {layout.lengths.device} and width {layout.width}: "
                f"{shapes} are on {x.device}"
            )

    if not isinstance(scale, int | float):
        raise InputError(f"scale={scale!r:.80} must be a number, such as {q.shape[3]} ** -0.5")
    if score_vector is not None and (not isinstance(score_vector, Tensor) or score_vector.shape != q.shape[2:]):
        raise InputError(f"score_vector must be a tensor (heads, width): {tuple(q.shape[2:])}")


_ADDITIVE_ELEMENTS = 2**22  # the largest intermediate tensor of additive scores has about as many numbers


def additive_scores(q: Tensor, k: Tensor, score_vector: Tensor) -> Tensor:
    """`score_vector_h . tanh(q_i + k_j)`: q `(B, H, T, K)`, k `(B, H, S, K)`, vector `(H, K)` -> `(B, H, T, S)`.

    The sum over every pair of positions is K times as large as the scores. So it is computed for a few queries at a
    time, and recomputed in the backward pass instead of being kept.
    """
    if is_exporting():
        return _additive(q, k, score_vector)  # in a graph with free lengths, the number of chunks is unknown

    queries_at_once = max(1, _ADDITIVE_ELEMENTS // max(1, k.numel()))
    q_chunks: list[Tensor] = list(q.split(queries_at_once, dim=2))  # type: ignore[no-untyped-call]

    scores = [
        checkpoint(_additive, q_chunk, k, score_vector, use_reentrant=False, preserve_rng_state=False)
        for q_chunk in q_chunks
    ]  # (B, H, t, S) each
    return torch.cat(scores, dim=2)


def _additive(q: Tensor, k: Tensor, score_vector: Tensor) -> Tensor:
    """The additive scores of `t` queries, `(B, H, t, S)`."""
    sums = torch.tanh(q.unsqueeze(3) + k.unsqueeze(2))  # (B, H, t, S, K)
    return torch.einsum("bhtsk,hk->bhts", sums, score_vector)


def _visible_keys(queries: Padded, keys: Padded, *, causal: bool) -> Tensor | None:
    """The keys that a query may see, as bool that broadcasts against `(B, H, T, S)`; None where all are visible."""
    if causal:
        # Padding is to the right of every real query, so the causal mask hides it from them, too.
        device = keys.lengths.device
        return torch.ones(queries.width, keys.width, dtype=torch.bool, device=device).tril()  # (T, S)

    if keys.full:
        return None
    return keys.visible()[:, None, None, :]  # (B, 1, 1, S)


# ---- its fast forms -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionSpec:
    """How queries look at keys: which of them they see, how the two are scored, and the dropout on the weights."""

    queries: Layout
    keys: Layout | Mask
    causal: bool  # position t sees 0..t: queries and keys then have the same layout
    scale: float
    score_vector: Tensor | None  # of the additive score
    dropout: float


def attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """`attention_weights(q, k, ...) @ v`, with dropout on the weights, by the fastest form that there is.

    Padded: q `(B, T, H, d_k)`, k `(B, S, H, d_k)`, v `(B, S, H, d_v)` -> `(B, T, H, d_v)`. Packed: `(N, H, ...)` each,
    and empty slots become zero.
    """
    # Sentences end to end: one kernel for all of them, or one padded batch after the other.
    if isinstance(spec.queries, Packed):
        has_groups = spec.queries.groups is not None
        return _attend_in_groups(q, k, v, spec) if has_groups else _attend_packed_kernel(q, k, v, spec)

    # One sentence a row. No kernel computes the additive score, and none is in an exported graph; all else is speed.
    if spec.score_vector is not None or _has_few_queries(q) or is_exporting():
        return _attend_plain(q, k, v, spec)
    if _prefers_dense(q) and not isinstance(spec.keys, Mask):
        return _attend_dense(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), spec).transpose(1, 2)
    return _attend_sdpa(q, k, v, spec)


_FEW_QUERIES = 8  # at most so many of each sentence: in a search, one for each hypothesis
_MANY_HEADS = 64  # at least so many heads, those of all sentences counted


def _has_few_queries(q: Tensor) -> bool:
    """Whether each of many heads has few queries, in half precision on a CPU: mostly a step of a search.

    torch's fused attention takes up to twice as long for them as plain products.
    """
    # The shape is looked at last: a compiler makes new code for each shape that a decision depends on.
    if torch.is_grad_enabled() or q.device.type != "cpu" or q.dtype.itemsize != 2:
        return False

    n_sentences, n_queries, n_heads, _ = q.shape
    return n_queries <= _FEW_QUERIES and n_sentences * n_heads >= _MANY_HEADS


def _prefers_dense(q: Tensor) -> bool:
    """Whether gradients are wanted in half precision on a CPU: there torch's backward pass is slow."""
    return q.device.type == "cpu" and q.dtype.itemsize == 2 and torch.is_grad_enabled()


def _attend_packed_kernel(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """All packed sentences by the kernel that their layout names, which reads them as they lie.

    No kernel computes the additive score, and only those in Triton have dropout.
    """
    queries = spec.queries
    keys = spec.keys
    assert isinstance(queries, Packed)
    assert isinstance(keys, Packed)
    assert spec.score_vector is None
    if queries.kernel is AttentionKernel.varlen:
        assert spec.dropout == 0.0
        return _attend_varlen(q, k, v, queries, keys, spec)
    if queries.kernel is AttentionKernel.sentences:
        return attend_sentences([q, k, v], spec)

    key_ranges = queries.ranges_in(keys)
    query_ranges = keys.ranges_in(queries)
    if spec.causal:
        key_ranges = key_ranges.up_to_itself()
        query_ranges = query_ranges.from_itself()
    return triton_attention(q, k, v, keys=key_ranges, queries=query_ranges, dropout=spec.dropout, scale=spec.scale)


_BEYOND = 2**30  # positions: no sentence is as long


def _attend_varlen(q: Tensor, k: Tensor, v: Tensor, queries: Packed, keys: Packed, spec: AttentionSpec) -> Tensor:
    """All packed sentences by torch's kernel, which is FlashAttention.

    The kernel neither reads nor writes empty slots, in both passes: whatever they hold is replaced by zeros. From 2.14
    on, torch takes cuDNN in its place where a sentence has more than 128 tokens, unless there is a window: one that no
    sentence fills changes nothing else, and FlashAttention takes it for none.
    """
    from torch.nn.attention.varlen import varlen_attn  # slow to import, and of no use without a GPU

    real_queries = queries.is_real()[:, None, None]  # (N, 1, 1)
    real_keys = keys.is_real()[:, None, None]
    zero = q.new_zeros(())

    out = varlen_attn(
        torch.where(real_queries, q, zero),
        torch.where(real_keys, k, zero),
        torch.where(real_keys, v, zero),
        queries.offsets,
        keys.offsets,
        queries.longest,
        keys.longest,
        scale=spec.scale,
        window_size=(-1, 0) if spec.causal else (_BEYOND, _BEYOND),
    )
    assert isinstance(out, Tensor)
    return torch.where(real_queries, out, zero)


def attend_sentences(operands: list[Tensor], spec: AttentionSpec) -> Tensor:
    """All packed sentences by the kernel that takes them whole; `operands` are q, k and v in one to three tensors."""
    queries = spec.queries
    keys = spec.keys
    assert isinstance(queries, Packed)
    assert isinstance(keys, Packed)
    assert queries.tiles is not None
    assert keys.tiles is not None
    tiles = queries.tiles.own if queries is keys else queries.tiles.cross
    assert tiles is not None
    return sentence_attention(
        operands,
        tiles=tiles,
        owners=(queries.tiles.owner, keys.tiles.owner),
        offsets=(queries.offsets, keys.offsets),
        longest=queries.longest,
        causal=spec.causal,
        dropout=spec.dropout,
        scale=spec.scale,
    )


def _attend_in_groups(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Packed sentences as small padded batches of similar lengths, one after the other."""
    assert isinstance(spec.queries, Packed)
    assert isinstance(spec.keys, Packed)
    queries = spec.queries.groups
    keys = spec.keys.groups
    assert queries is not None
    assert keys is not None

    # Batched products read `(b, H, t, K)`: for them, padding and transposing are one gather.
    is_dense = spec.score_vector is None and _prefers_dense(q)
    if is_dense:
        padded = (queries.pad_heads(q), keys.pad_heads(k), keys.pad_heads(v))
    else:
        padded = (queries.pad(q), keys.pad(k), keys.pad(v))

    outputs = []
    for group_q, group_k, group_v, of_queries, of_keys in zip(*padded, queries.layouts, keys.layouts, strict=True):
        of_group = replace(spec, queries=of_queries, keys=of_keys)
        attend_group = _attend_dense if is_dense else attend
        outputs.append(attend_group(group_q, group_k, group_v, of_group))
    return queries.unpad_heads(outputs) if is_dense else queries.unpad(outputs)


def _padded(spec: AttentionSpec) -> tuple[Padded, Padded | Mask]:
    """The two layouts, when each sentence is a row."""
    assert isinstance(spec.queries, Padded)
    assert not isinstance(spec.keys, Packed)
    return spec.queries, spec.keys


def _attend_plain(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """The formula itself: the weights times the values."""
    queries, keys = _padded(spec)
    weights = attention_weights(
        q,
        k,
        queries=queries,
        keys=keys,
        causal=spec.causal,
        scale=spec.scale,
        score_vector=spec.score_vector,
    )
    weights = F.dropout(weights, spec.dropout).to(v.dtype)  # (B, H, T, S)

    out = weights @ v.transpose(1, 2)  # (B, H, T, d_v)
    return out.transpose(1, 2)  # (B, T, H, d_v)


def _attend_dense(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Batched products with the backward pass of `kernels.attention`: `(B, H, T, K)` in and out."""
    queries, keys = _padded(spec)
    assert isinstance(keys, Padded)
    visible = _visible_keys(queries, keys, causal=spec.causal)
    masked = None if visible is None else ~visible
    return dense_attention(q, k, v, masked=masked, scale=spec.scale, dropout=spec.dropout)


def _attend_sdpa(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """torch's `scaled_dot_product_attention`, which chooses its own kernel, and makes the causal mask itself."""
    queries, keys = _padded(spec)
    mask = None  # of numbers, or bool
    if isinstance(keys, Mask):
        mask = keys.numbers
    elif not spec.causal:
        mask = _visible_keys(queries, keys, causal=False)

    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        dropout_p=spec.dropout,
        is_causal=spec.causal,
        scale=spec.scale,
    )  # (B, H, T, d_v)
    return out.transpose(1, 2)  # (B, T, H, d_v)


# ---- the module, its keys and values, and their cache ---------------------------------------------------------------


@dataclass(frozen=True)
class KeyValues:
    """What attention reads: keys `(B, S, H, d_k)` and values `(B, S, H, d_v)`."""

    keys: Tensor
    values: Tensor
    joined: Tensor | None = None  # (M, 2, H, d_k): both, side by side; or (N, 3, H, d_k), behind the queries


@dataclass(frozen=True)
class KeyValueCache:
    """Room for the keys and values of `S` positions, which are written in place as a search makes them.

    A head's positions lie together in memory, because a step reads them so.
    """

    keys: Tensor  # (B, H, S, d_k)
    values: Tensor  # (B, H, S, d_v)

    @classmethod
    def empty(cls, kv: KeyValues, size: int) -> "KeyValueCache":
        """Room for `size` positions, for as many sentences and heads as `kv` has."""
        n_sentences, _, n_heads, d_k = kv.keys.shape
        d_v = kv.values.shape[3]
        keys = kv.keys.new_empty(n_sentences, n_heads, size, d_k)
        values = kv.values.new_empty(n_sentences, n_heads, size, d_v)
        return cls(keys, values)

    @classmethod
    def of(cls, kv: KeyValues) -> "KeyValueCache":
        """A cache that holds `kv` and is full."""
        cache = cls.empty(kv, kv.keys.shape[1])
        cache.write(kv, slice(None))
        return cache

    @property
    def size(self) -> int:
        """S, the positions that there is room for."""
        return self.keys.shape[2]

    def write(self, new: KeyValues, slots: slice | Tensor) -> None:
        """Put `new` at these positions, where there must be room."""
        self.keys[:, :, slots] = new.keys.transpose(1, 2)
        self.values[:, :, slots] = new.values.transpose(1, 2)

    def read(self, end: int) -> KeyValues:
        """The keys and values of the positions before `end`, as views."""
        keys = self.keys[:, :, :end].transpose(1, 2)  # (B, end, H, d_k)
        values = self.values[:, :, :end].transpose(1, 2)  # (B, end, H, d_v)
        return KeyValues(keys, values)

    def grow(self, size: int) -> "KeyValueCache":
        """A cache of `size` positions that begins like this one."""
        padding = (0, 0, 0, size - self.size)  # of the last two dimensions, only the positions are padded, at their end
        return KeyValueCache(F.pad(self.keys, padding), F.pad(self.values, padding))

    def select(self, sentences: Tensor) -> "KeyValueCache":
        """The cache of these sentences alone."""
        keys = self.keys.index_select(0, sentences)
        values = self.values.index_select(0, sentences)
        return KeyValueCache(keys, values)


class MultiHeadAttention(nn.Module):
    """`Concat(head_1..head_h) W_o` with `head_i = attend(x W_q_i, context W_k_i, context W_v_i)` (section 3.2.2).

    The three roles differ in what is passed: encoder self-attention and masked decoder self-attention read keys made
    from `x` itself, encoder-decoder attention reads keys made from the encoder's output. The paper's projections have
    no bias; with `biases` each of them has one.
    """

    def __init__(
        self, d_model: int, n_heads: int, *, d_k: int, d_v: int, score: Score, biases: bool, dropout: float
    ) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.dropout = dropout
        self.scale = 1.0 / math.sqrt(d_k) if score is Score.scaled else 1.0

        self.W_q = nn.Linear(d_model, n_heads * d_k, bias=biases)
        self.W_k = nn.Linear(d_model, n_heads * d_k, bias=biases)
        self.W_v = nn.Linear(d_model, n_heads * d_v, bias=biases)
        self.W_o = nn.Linear(n_heads * d_v, d_model, bias=biases)
        for projection in (self.W_q, self.W_k, self.W_v, self.W_o):
            nn.init.xavier_uniform_(projection.weight)
            if biases:
                nn.init.zeros_(projection.bias)

        self.W_qkv: nn.Module | None = None  # the first three side by side, where a search multiplies by them at once

        self.score_vector = None
        if score is Score.additive:
            self.score_vector = nn.Parameter(torch.empty(n_heads, d_k))
            nn.init.normal_(self.score_vector, std=d_k**-0.5)

    def keys_values(self, context: Tensor) -> KeyValues:
        """Keys and values of `context` `(..., D)`: of `x` itself, or of the encoder's output."""
        keys = self._heads(self.W_k(context))  # (..., H, d_k)
        values = self._heads(self.W_v(context))  # (..., H, d_v)
        return KeyValues(keys, values)

    def joined(self, context: Tensor, *, layout: Layout, with_queries: bool) -> KeyValues:
        """`keys_values` in one matrix product; with the queries in it, if they are made from `context`, too.

        The matrices are concatenated each time, and stay separate parameters. It pays where the
        kernel that attends writes the gradients side by side, too; elsewhere nothing is joined.
        """
        if not layout.is_fused or self.W_k.weight.shape != self.W_v.weight.shape:
            return self.keys_values(context)

        projections = [self.W_q, self.W_k, self.W_v] if with_queries else [self.W_k, self.W_v]
        weight = torch.cat([projection.weight for projection in projections])  # (3 H d_k, D)
        bias = None if self.W_k.bias is None else torch.cat([projection.bias for projection in projections])
        joined = F.linear(context, weight, bias).view(len(context), len(projections), self.n_heads, -1)
        keys, values = joined[:, -2:].unbind(1)
        return KeyValues(keys, values, joined)

    def project(self, x: Tensor) -> tuple[Tensor, KeyValues]:
        """Queries, keys and values of `x` `(..., D)` itself, as a step of a search needs them."""
        if self.W_qkv is None:
            return self._heads(self.W_q(x)), self.keys_values(x)

        sizes = [projection.out_features for projection in (self.W_q, self.W_k, self.W_v)]
        q, k, v = torch.split(self.W_qkv(x), sizes, dim=-1)
        return self._heads(q), KeyValues(self._heads(k), self._heads(v))

    def forward(self, x: Tensor, kv: KeyValues, *, queries: Layout, keys: Layout | Mask, causal: bool) -> Tensor:
        """Queries from `x` `(..., D)` read the keys and values `kv`; the result is `(..., D)`.

        `queries` is the layout of `x`, `keys` that of `kv`.
        """
        if kv.joined is None:
            return self.read(self._heads(self.W_q(x)), kv, queries=queries, keys=keys, causal=causal)

        has_queries = kv.joined.shape[1] == 3
        operands = [kv.joined] if has_queries else [self._heads(self.W_q(x)), kv.joined]
        heads = attend_sentences(operands, self._spec(queries, keys, causal=causal))  # (N, H, d_v)
        return self.W_o(heads.flatten(-2))

    def read(self, q: Tensor, kv: KeyValues, *, queries: Layout, keys: Layout | Mask, causal: bool) -> Tensor:
        """As `forward`, for queries `(..., H, d_k)` that are already projected."""
        heads = attend(q, kv.keys, kv.values, self._spec(queries, keys, causal=causal))  # (..., H, d_v)
        return self.W_o(heads.flatten(-2))  # (..., D)

    def _spec(self, queries: Layout, keys: Layout | Mask, *, causal: bool) -> AttentionSpec:
        """The `AttentionSpec` of this module."""
        return AttentionSpec(
            queries=queries,
            keys=keys,
            causal=causal,
            scale=self.scale,
            score_vector=self.score_vector,
            dropout=self.dropout if self.training else 0.0,
        )

    def weights(self, x: Tensor, kv: KeyValues, *, queries: Padded, keys: Padded, causal: bool) -> Tensor:
        """How much each query from `x` reads of each key: `attention_weights` of this module, `(B, H, T, S)`."""
        return attention_weights(
            self._heads(self.W_q(x)),  # (B, T, H, d_k)
            kv.keys,
            queries=queries,
            keys=keys,
            causal=causal,
            scale=self.scale,
            score_vector=self.score_vector,
        )

    def _heads(self, x: Tensor) -> Tensor:
        """A projection as its heads, `(..., H K)` -> `(..., H, K)`, without a copy."""
        return x.view(*x.shape[:-1], self.n_heads, -1)
