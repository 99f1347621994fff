"""Attention over packed sentences by whole sentences in Triton: one kernel forward, one backward.

`N` query slots, `M` key slots, `H` heads, `K` the width of queries and keys, `W` that of values. A tile is a stretch of
at most 64 or 128 slots on either side that holds sentences whole (`layout.Tiles`). So a program has all that its
queries see: it makes the softmax at once, saves nothing for the way back, and there writes each gradient once, in one
kernel that reads q, k, v and the output's gradient once. Sentences longer than a tile are `attention`'s.

The plain form is `packed_attention.plain_attention`; that module says what has been tried, and how.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from transformer.kernels.gpu import attention as general
from transformer.kernels.ranges import LARGE, SMALL, Ranges

STAGES = 2  # there is no loop

_log2_e = tl.constexpr(math.log2(math.e))
_group = tl.constexpr(8)  # neighbouring keys that share one draw of dropout, 16 bits each


# ---- what the kernels share -----------------------------------------------------------------------------------------


@triton.jit
def _key_rows(first, DROPPED: tl.constexpr, TILE: tl.constexpr):
    """The key slot of each column of a tile that begins at `first`.

    Draws of dropout are for 8 keys that begin at a multiple of 8, so under dropout columns do, too: a tile that begins
    between two of them has its last few keys in the first columns.
    """
    columns = tl.arange(0, TILE)
    if DROPPED > 0:
        ahead = first % _group
        return first - ahead + columns + tl.where(columns < ahead, TILE, 0)
    else:
        return first + columns


@triton.jit
def _draw(seed, query_rows, groups, head):
    """16 random bits for each of 8 neighbouring keys, `(rows, groups, 8)`: see `attention._is_kept`."""
    zeros = tl.zeros_like(query_rows)[:, None] + tl.zeros_like(groups)[None, :]
    word0, word1, word2, word3 = tl.philox(
        tl.load(seed), query_rows[:, None] + zeros, groups[None, :] + zeros, head + zeros, zeros, 7
    )
    words = tl.join(tl.join(word0, word2), tl.join(word1, word3))
    halves = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(halves, (query_rows.shape[0], groups.shape[0], 8))


@triton.jit
def _is_kept(seed, query_rows, first_key, head, DROPPED: tl.constexpr, TILE: tl.constexpr):
    """Which weights dropout keeps, `(rows, TILE)`, in the order of `_key_rows`: the same as everywhere else."""
    group = first_key // _group
    bits = _draw(seed, query_rows, group + tl.arange(0, TILE // _group), head)
    last = _draw(seed, query_rows, group + TILE // _group + tl.arange(0, 1), head)  # of the keys in the first columns

    is_last = (tl.arange(0, TILE // _group) == 0)[:, None] & (tl.arange(0, 8) < first_key % _group)[None, :]
    bits = tl.where(is_last[None, :, :], last, bits)
    return tl.reshape(bits, (query_rows.shape[0], TILE)) >= DROPPED


@triton.jit
def _load_rows(pointer, rows, is_real, stride, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Rows of a matrix as `(rows, PADDED)`; zeros for what is not real, which may hold anything, and from WIDTH on."""
    columns = tl.arange(0, PADDED)
    is_there = is_real[:, None] & (columns < WIDTH)[None, :]
    return tl.load(pointer + rows[:, None] * stride + columns[None, :], mask=is_there, other=0.0)


@triton.jit
def _store_rows(pointer, rows, is_there, stride, values, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """The way back, in the type that is stored there."""
    columns = tl.arange(0, PADDED)
    mask = is_there[:, None] & (columns < WIDTH)[None, :]
    tl.store(pointer + rows[:, None] * stride + columns[None, :], values.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _weights(
    queries,
    keys,
    query_rows,
    key_rows,
    query_owner,
    key_owner,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The softmax of a tile, `(rows, TILE)`: a query sees the keys of its sentence; an empty slot sees nothing."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee", out_dtype=WIDE) * (SCALE * _log2_e)
    is_seen = (query_owner[:, None] == key_owner[None, :]) & (query_owner >= 0)[:, None]
    if CAUSAL:
        is_seen = is_seen & (key_rows[None, :] <= query_rows[:, None])

    scores = tl.where(is_seen, scores, -1e30)
    weights = tl.where(is_seen, tl.exp2(scores - tl.max(scores, 1)[:, None]), 0.0)
    total = tl.sum(weights, 1)
    return weights * (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]


# ---- forward --------------------------------------------------------------------------------------------------------


@triton.jit
def _forward_kernel(
    q,
    k,
    v,
    seed,
    tiles,
    query_owner,
    key_owner,
    out,
    q_stride,
    q_head,
    k_stride,
    k_head,
    v_stride,
    v_head,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    DROPPED: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    K_PADDED: tl.constexpr,
    W_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The output of one tile of one head; zeros in its empty slots.

    Estimate, base at 25,088 slots: 4 matrices, 103 MB; 0.035 ms on an H200. Counted, not timed.
    """
    head = tl.program_id(0)
    heads = tl.num_programs(0)
    tile = tiles + 4 * tl.program_id(1)
    query_first = tl.load(tile)
    query_end = tl.load(tile + 1)
    key_first = tl.load(tile + 2)
    key_end = tl.load(tile + 3)

    if query_first < query_end:
        query_rows = query_first + tl.arange(0, TILE)
        key_rows = _key_rows(key_first, DROPPED, TILE)
        has_query = query_rows < query_end
        has_key = (key_rows >= key_first) & (key_rows < key_end)
        of_query = tl.load(query_owner + query_rows, mask=has_query, other=-1)
        of_key = tl.load(key_owner + key_rows, mask=has_key, other=-1)

        queries = _load_rows(q + head * q_head, query_rows, of_query >= 0, q_stride, K, K_PADDED)
        keys = _load_rows(k + head * k_head, key_rows, of_key >= 0, k_stride, K, K_PADDED)
        values = _load_rows(v + head * v_head, key_rows, of_key >= 0, v_stride, W, W_PADDED)
        weights = _weights(queries, keys, query_rows, key_rows, of_query, of_key, SCALE, CAUSAL, WIDE)
        if DROPPED > 0:
            weights = tl.where(_is_kept(seed, query_rows, key_first, head, DROPPED, TILE), weights, 0.0)

        result = tl.dot(weights.to(values.dtype), values, input_precision="ieee", out_dtype=WIDE)
        result = result * (65536 / (65536 - DROPPED))
        _store_rows(out + head * W, query_rows, has_query, heads * W, result, W, W_PADDED)


# ---- backward -------------------------------------------------------------------------------------------------------
#
# The equations are those of `attention`.


@triton.jit
def _backward_kernel(
    q,
    k,
    v,
    seed,
    tiles,
    query_owner,
    key_owner,
    d_out,
    d_q,
    d_k,
    d_v,
    q_stride,
    q_head,
    k_stride,
    k_head,
    v_stride,
    v_head,
    d_q_stride,
    d_k_stride,
    d_v_stride,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    DROPPED: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    K_PADDED: tl.constexpr,
    W_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The gradients of one tile of one head; zeros in its empty slots.

    Estimate, as above: 7 matrices, 180 MB; 0.06 ms.
    """
    head = tl.program_id(0)
    heads = tl.num_programs(0)
    tile = tiles + 4 * tl.program_id(1)
    query_first = tl.load(tile)
    query_end = tl.load(tile + 1)
    key_first = tl.load(tile + 2)
    key_end = tl.load(tile + 3)

    if (query_first < query_end) | (key_first < key_end):
        query_rows = query_first + tl.arange(0, TILE)
        key_rows = _key_rows(key_first, DROPPED, TILE)
        has_query = query_rows < query_end
        has_key = (key_rows >= key_first) & (key_rows < key_end)
        of_query = tl.load(query_owner + query_rows, mask=has_query, other=-1)
        of_key = tl.load(key_owner + key_rows, mask=has_key, other=-1)

        # The weights again.
        queries = _load_rows(q + head * q_head, query_rows, of_query >= 0, q_stride, K, K_PADDED)
        keys = _load_rows(k + head * k_head, key_rows, of_key >= 0, k_stride, K, K_PADDED)
        values = _load_rows(v + head * v_head, key_rows, of_key >= 0, v_stride, W, W_PADDED)
        upstream = _load_rows(d_out + head * W, query_rows, of_query >= 0, heads * W, W, W_PADDED)
        weights = _weights(queries, keys, query_rows, key_rows, of_query, of_key, SCALE, CAUSAL, WIDE)

        # Through the values and dropout.
        d_weights = tl.dot(upstream, tl.trans(values), input_precision="ieee", out_dtype=WIDE)
        kept_weights = weights
        if DROPPED > 0:
            is_kept = _is_kept(seed, query_rows, key_first, head, DROPPED, TILE)
            kept_weights = tl.where(is_kept, weights, 0.0)
            d_weights = tl.where(is_kept, d_weights * (65536 / (65536 - DROPPED)), 0.0)
        gradient = tl.dot(tl.trans(kept_weights.to(upstream.dtype)), upstream, input_precision="ieee", out_dtype=WIDE)
        gradient = gradient * (65536 / (65536 - DROPPED))
        _store_rows(d_v + head * W, key_rows, has_key, d_v_stride, gradient, W, W_PADDED)

        # Through the softmax.
        delta = tl.sum(weights * d_weights, 1)
        d_scores = (weights * (d_weights - delta[:, None])).to(queries.dtype)
        gradient = tl.dot(d_scores, keys, input_precision="ieee", out_dtype=WIDE) * SCALE
        _store_rows(d_q + head * K, query_rows, has_query, d_q_stride, gradient, K, K_PADDED)
        gradient = tl.dot(tl.trans(d_scores), queries, input_precision="ieee", out_dtype=WIDE) * SCALE
        _store_rows(d_k + head * K, key_rows, has_key, d_k_stride, gradient, K, K_PADDED)


# ---- as operators of torch, which compilers take as they are --------------------------------------------------------


@torch.library.custom_op("transformer::sentence_attention", mutates_args=())
def sentence_attention(
    operands: list[Tensor],
    seed: Tensor,
    tiles: Tensor,
    query_owner: Tensor,
    key_owner: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    longest: int,
    causal: bool,
    dropout: float,
    scale: float,
) -> Tensor:
    """The output `(N, H, W)`, contiguous.

    The operands are q `(N, H, K)`, k `(M, H, K)` and v `(M, H, W)`; or q and both others, `(M, 2, H, K)`; or all three,
    `(N, 3, H, K)`: their gradients then lie side by side, too, for the product that made them. They may have any
    strides but for adjacent widths. `seed` is `(1,)` int64; all else that says what is seen is of the two sides'
    layouts, `layout.Packed` and its `Tiles`.
    """
    q, k, v = _three(operands)
    out = _empty((len(q), q.shape[1], v.shape[2]), like=q, longest=longest)
    for part, tile in _launches(tiles, longest):
        _forward_kernel[q.shape[1], len(part)](
            q,
            k,
            v,
            seed,
            part,
            query_owner,
            key_owner,
            out,
            *general._strides(q, k, v),
            *constants(q, v, causal=causal, dropout=dropout, scale=scale, tile=tile),
            num_warps=warps(tile),
            num_stages=STAGES,
        )

    if longest > LARGE:
        ranges = _ranges_of_the_long(query_offsets, key_offsets, len(q), len(k), causal=causal)
        rest, _ = general.packed_attention(q, k, v, seed, *ranges, dropout, scale)
        out += rest
    return out


@sentence_attention.register_fake
def _(
    operands: list[Tensor],
    seed: Tensor,
    tiles: Tensor,
    query_owner: Tensor,
    key_owner: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    longest: int,
    causal: bool,
    dropout: float,
    scale: float,
) -> Tensor:
    q, _, v = _three(operands)
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


@torch.library.custom_op("transformer::sentence_attention_backward", mutates_args=())
def sentence_attention_backward(
    d_out: Tensor,
    operands: list[Tensor],
    seed: Tensor,
    tiles: Tensor,
    query_owner: Tensor,
    key_owner: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    longest: int,
    causal: bool,
    dropout: float,
    scale: float,
) -> list[Tensor]:
    """The gradients of the operands, each contiguous, zero in empty slots."""
    q, k, v = _three(operands)
    d_out = d_out.contiguous()
    gradients = [_empty(operand.shape, like=operand, longest=longest) for operand in operands]
    d_q, d_k, d_v = _three(gradients)
    for part, tile in _launches(tiles, longest):
        _backward_kernel[q.shape[1], len(part)](
            q,
            k,
            v,
            seed,
            part,
            query_owner,
            key_owner,
            d_out,
            d_q,
            d_k,
            d_v,
            *general._strides(q, k, v),
            *(gradient.stride(0) for gradient in (d_q, d_k, d_v)),
            *constants(q, v, causal=causal, dropout=dropout, scale=scale, tile=tile),
            num_warps=warps(tile),
            num_stages=STAGES,
        )

    if longest > LARGE:  # rare, so that nothing is kept for it on the way there
        ranges = _ranges_of_the_long(query_offsets, key_offsets, len(q), len(k), causal=causal)
        out, lse = general.packed_attention(q, k, v, seed, *ranges, dropout, scale)
        rest = general.packed_attention_backward(d_out, q, k, v, out, lse, seed, *ranges, dropout, scale)
        for gradient, of_rest in zip((d_q, d_k, d_v), rest, strict=True):
            gradient += of_rest
    return gradients


@sentence_attention_backward.register_fake
def _(
    d_out: Tensor,
    operands: list[Tensor],
    seed: Tensor,
    tiles: Tensor,
    query_owner: Tensor,
    key_owner: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    longest: int,
    causal: bool,
    dropout: float,
    scale: float,
) -> list[Tensor]:
    return [operand.new_empty(operand.shape) for operand in operands]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    operands, *tensors = inputs[:7]
    ctx.save_for_backward(*operands, *tensors)
    ctx.count = len(operands)
    ctx.rest = inputs[7:]


def _differentiate(ctx: Any, d_out: Tensor) -> tuple[list[Tensor] | None, ...]:
    operands = list(ctx.saved_tensors[: ctx.count])
    gradients = sentence_attention_backward(d_out, operands, *ctx.saved_tensors[ctx.count :], *ctx.rest)
    return gradients, *(None,) * 10  # nothing for the seed, what says who sees whom, and the numbers


sentence_attention.register_autograd(_differentiate, setup_context=_save)


def _three(operands: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, or their gradients, of one, two or three tensors."""
    q, k, v = [part for x in operands for part in (x.unbind(1) if x.dim() == 4 else [x])]
    return q, k, v


def _empty(shape: tuple[int, ...], *, like: Tensor, longest: int) -> Tensor:
    """What the tiles fill: in whole, unless there are sentences that fit none."""
    return like.new_zeros(shape) if longest > LARGE else like.new_empty(shape)


def _launches(tiles: Tensor, longest: int) -> list[tuple[Tensor, int]]:
    """The tiles of one size, and that size: tiles `(2, n, 4)` hold the small ones and the large ones."""
    small, large = tiles.unbind(0)
    return [(small, SMALL), (large, LARGE)] if longest > SMALL else [(small, SMALL)]


def _ranges_of_the_long(
    query_offsets: Tensor, key_offsets: Tensor, n_queries: int, n_keys: int, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The ranges of keys and of queries of sentences that fit no tile; slots of the others see nothing."""
    is_long = torch.maximum(query_offsets.diff(), key_offsets.diff()) > LARGE  # (B,)

    def of_long(own: Tensor, other: Tensor, slots: int) -> Ranges:
        ends = torch.where(is_long, other[1:], other[:-1])  # an empty range, near those of neighbours
        return Ranges.of_sentences(own, other[:-1], ends, slots=slots)

    keys = of_long(query_offsets, key_offsets, n_queries)
    queries = of_long(key_offsets, query_offsets, n_keys)
    if causal:
        keys, queries = keys.up_to_itself(), queries.from_itself()
    return keys.first, keys.end, queries.first, queries.end


def warps(tile: int) -> int:
    """Warps of a block."""
    return 4 if tile == SMALL else 8


def constants(q: Tensor, v: Tensor, *, causal: bool, dropout: float, scale: float, tile: int) -> tuple[Any, ...]:
    """What a kernel is compiled for, from SCALE to WIDE in the order of its arguments."""
    scale, dropped, *widths, _, wide = general.constants(q, v, dropout=dropout, scale=scale)
    return scale, causal, dropped, *widths, tile, wide
