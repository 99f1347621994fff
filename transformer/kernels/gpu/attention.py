"""Attention over packed sentences in Triton: one kernel forward, two backward.

`N` query slots, `M` key slots, `H` heads, `K` the width of queries and keys, `W` that of values. The plain form is
`packed_attention.plain_attention`; that module says what has been tried, and how.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64  # rows of a tile (of queries, or of keys in the last kernel), and of what a tile reads at a time
SMALLEST = 16  # the fewest numbers of a row that the matrix units multiply
KEYS_WARPS = 8  # warps of a block in the backward pass of keys, which sums up two gradients at once
STAGES = 2  # loads that are under way at once: a tile reads only two or three times

# The picture. Most sentences are shorter than a tile of 64 query rows, so that a tile holds several, here a, b and the
# beginning of c. They lie end to end: what the rows of a tile see, taken together, is one stretch of keys. A tile reads
# this stretch alone, 64 keys at a time.
#
#                keys of the stretch
#     rows of a | a a a . . . . . . . . |    A row sees the keys from `first` to before `end`: those of its sentence;
#               | a a a . . . . . . . . |    under a causal mask those up to itself; from decoder to encoder those of
#     rows of b | . . . b b b b b . . . |    the sentence on the other side. Its other weights are 0 (the dots). An
#     rows of c | . . . . . . . . c c c |    empty slot sees nothing: its `first` and `end` are the same.

_log2_e = tl.constexpr(math.log2(math.e))
_group = tl.constexpr(8)  # neighbouring keys that share one draw of dropout, 16 bits each


# ---- what the kernels share -----------------------------------------------------------------------------------------


@triton.jit
def _load_rows(pointer, rows, end, stride, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Rows of a matrix as `(rows, PADDED)`; zeros from row `end` and from column WIDTH on."""
    columns = tl.arange(0, PADDED)
    is_there = (rows < end)[:, None] & (columns < WIDTH)[None, :]
    return tl.load(pointer + rows[:, None] * stride + columns[None, :], mask=is_there, other=0.0)


@triton.jit
def _store_rows(pointer, rows, end, stride, values, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """The way back, in the type that is stored there."""
    columns = tl.arange(0, PADDED)
    is_there = (rows < end)[:, None] & (columns < WIDTH)[None, :]
    tl.store(pointer + rows[:, None] * stride + columns[None, :], values.to(pointer.dtype.element_ty), mask=is_there)


@triton.jit
def _load_range(first, end, rows, n_rows):
    """The range that each row sees; a row that does not exist sees nothing, and moves no minimum or maximum."""
    is_there = rows < n_rows
    row_first = tl.load(first + rows, mask=is_there, other=2147483647)
    row_end = tl.load(end + rows, mask=is_there, other=0)
    return row_first, row_end


@triton.jit
def _is_kept(seed, query_rows, first_key, head, DROPPED: tl.constexpr, KEYS: tl.constexpr):
    """Which weights dropout keeps, `(rows, KEYS)`: 16 random bits of each are at least DROPPED.

    Philox4x32 with 7 rounds (Salmon et al., 2011), keyed by the seed, at the counter (query slot, key slot / 8, head,
    0): its four words are the bits of 8 neighbouring keys, the low half of a word first. So a weight has the same bits
    wherever it is computed. `first_key` is a multiple of 8.
    """
    groups = first_key // _group + tl.arange(0, KEYS // _group)
    zeros = tl.zeros_like(query_rows)[:, None] + tl.zeros_like(groups)[None, :]
    word0, word1, word2, word3 = tl.philox(
        tl.load(seed), query_rows[:, None] + zeros, groups[None, :] + zeros, head + zeros, zeros, 7
    )

    words = tl.join(tl.join(word0, word2), tl.join(word1, word3))  # (rows, KEYS / 8, 2, 2): in order, row by row
    halves = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(halves, (query_rows.shape[0], KEYS)) >= DROPPED


# ---- forward --------------------------------------------------------------------------------------------------------


@triton.jit
def _forward_kernel(
    q,
    k,
    v,
    seed,
    key_first,
    key_end,
    out,
    lse,
    n_queries,
    q_stride,
    q_head,
    k_stride,
    k_head,
    v_stride,
    v_head,
    SCALE: tl.constexpr,
    DROPPED: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    K_PADDED: tl.constexpr,
    W_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One tile of query rows of one head: their output, and the logarithm (base 2) of their softmax's denominator.

    The softmax is made while the keys go by (Milakov and Gimelshein, 2018): what was summed up under a smaller maximum
    is scaled down when a larger one comes.

    Estimate, base at 25,088 slots, 128 keys read by a tile: 2 products, 6.6 GFLOP; 4 matrices, 103 MB; 0.03 to 0.05 ms
    on an H200, if it multiplies at 250 TFLOP/s and copies at 3.7 TB/s (its large copies reach 4.3). Counted, not timed.
    """
    head = tl.program_id(0)
    heads = tl.num_programs(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row_first, row_end = _load_range(key_first, key_end, rows, n_queries)
    first = tl.min(row_first) // _group * _group
    end = tl.max(row_end)
    queries = _load_rows(q + head * q_head, rows, n_queries, q_stride, K, K_PADDED)

    largest = tl.full([ROWS], -1e30, WIDE)
    total = tl.zeros([ROWS], WIDE)
    weighted = tl.zeros([ROWS, W_PADDED], WIDE)
    for start in range(first, end, ROWS):
        key_rows = start + tl.arange(0, ROWS)
        is_seen = (key_rows[None, :] >= row_first[:, None]) & (key_rows[None, :] < row_end[:, None])

        # Weights, not yet divided by their sum.
        keys = _load_rows(k + head * k_head, key_rows, end, k_stride, K, K_PADDED)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee", out_dtype=WIDE) * (SCALE * _log2_e)
        scores = tl.where(is_seen, scores, -1e30)
        larger = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.where(is_seen, tl.exp2(scores - larger[:, None]), 0.0)

        # What was summed up so far, under the new maximum.
        shrink = tl.exp2(largest - larger)
        largest = larger
        total = total * shrink + tl.sum(weights, 1)
        if DROPPED > 0:
            weights = tl.where(_is_kept(seed, rows, start, head, DROPPED, ROWS), weights, 0.0)
        values = _load_rows(v + head * v_head, key_rows, end, v_stride, W, W_PADDED)
        weighted = weighted * shrink[:, None]
        weighted += tl.dot(weights.to(values.dtype), values, input_precision="ieee", out_dtype=WIDE)

    # A row that sees nothing has the output 0.
    total = tl.where(total > 0.0, total, 1.0)
    result = weighted / total[:, None] * (65536 / (65536 - DROPPED))
    _store_rows(out + head * W, rows, n_queries, heads * W, result, W, W_PADDED)
    tl.store(lse + head * n_queries + rows, largest + tl.log2(total), mask=rows < n_queries)


# ---- backward -------------------------------------------------------------------------------------------------------
#
# With P the weights, M dropout's mask divided by the share that it keeps, and * elementwise:
#     O = (P * M) V        dP = (dO V^T) * M        dS = P * (dP - delta)        delta = rowsum(P * dP) = rowsum(dO * O)
#     dQ = scale dS K      dK = scale dS^T Q        dV = (P * M)^T dO
# One kernel has a tile of queries and sums over keys, the other a tile of keys and sums over queries: each result has
# one writer, which adds in one order, so that gradients are the same each time.


@triton.jit
def _queries_backward_kernel(
    q,
    k,
    v,
    seed,
    key_first,
    key_end,
    out,
    lse,
    d_out,
    delta,
    d_q,
    n_queries,
    q_stride,
    q_head,
    k_stride,
    k_head,
    v_stride,
    v_head,
    SCALE: tl.constexpr,
    DROPPED: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    K_PADDED: tl.constexpr,
    W_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The gradient of one tile of query rows of one head; and delta, which the other kernel reads.

    Estimate, as above: 3 products, 9.9 GFLOP; 6 matrices, 154 MB; 0.04 to 0.08 ms.
    """
    head = tl.program_id(0)
    heads = tl.num_programs(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row_first, row_end = _load_range(key_first, key_end, rows, n_queries)
    first = tl.min(row_first) // _group * _group
    end = tl.max(row_end)

    queries = _load_rows(q + head * q_head, rows, n_queries, q_stride, K, K_PADDED)
    upstream = _load_rows(d_out + head * W, rows, n_queries, heads * W, W, W_PADDED)
    result = _load_rows(out + head * W, rows, n_queries, heads * W, W, W_PADDED)
    row_delta = tl.sum(upstream.to(WIDE) * result.to(WIDE), 1)
    row_lse = tl.load(lse + head * n_queries + rows, mask=rows < n_queries, other=0.0)
    tl.store(delta + head * n_queries + rows, row_delta, mask=rows < n_queries)

    gradient = tl.zeros([ROWS, K_PADDED], WIDE)
    for start in range(first, end, ROWS):
        key_rows = start + tl.arange(0, ROWS)
        is_seen = (key_rows[None, :] >= row_first[:, None]) & (key_rows[None, :] < row_end[:, None])

        keys = _load_rows(k + head * k_head, key_rows, end, k_stride, K, K_PADDED)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee", out_dtype=WIDE) * (SCALE * _log2_e)
        weights = tl.exp2(scores - row_lse[:, None])

        values = _load_rows(v + head * v_head, key_rows, end, v_stride, W, W_PADDED)
        d_weights = tl.dot(upstream, tl.trans(values), input_precision="ieee", out_dtype=WIDE)
        if DROPPED > 0:
            is_kept = _is_kept(seed, rows, start, head, DROPPED, ROWS)
            d_weights = tl.where(is_kept, d_weights * (65536 / (65536 - DROPPED)), 0.0)

        d_scores = tl.where(is_seen, weights * (d_weights - row_delta[:, None]), 0.0)
        gradient += tl.dot(d_scores.to(keys.dtype), keys, input_precision="ieee", out_dtype=WIDE)

    _store_rows(d_q + head * K, rows, n_queries, heads * K, gradient * SCALE, K, K_PADDED)


@triton.jit
def _keys_backward_kernel(
    q,
    k,
    v,
    seed,
    query_first,
    query_end,
    lse,
    d_out,
    delta,
    d_k,
    d_v,
    n_queries,
    n_keys,
    q_stride,
    q_head,
    k_stride,
    k_head,
    v_stride,
    v_head,
    SCALE: tl.constexpr,
    DROPPED: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    K_PADDED: tl.constexpr,
    W_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The gradients of one tile of keys and values of one head: the same picture, turned by a quarter.

    Each key has a range of queries that see it, and all matrices are transposed: keys by queries.

    Estimate, as above: 4 products, 13.2 GFLOP; 6 matrices, 154 MB; 0.05 to 0.09 ms.
    """
    head = tl.program_id(0)
    heads = tl.num_programs(0)
    first_key = tl.program_id(1) * ROWS
    rows = first_key + tl.arange(0, ROWS)
    row_first, row_end = _load_range(query_first, query_end, rows, n_keys)
    end = tl.max(row_end)

    keys = _load_rows(k + head * k_head, rows, n_keys, k_stride, K, K_PADDED)
    values = _load_rows(v + head * v_head, rows, n_keys, v_stride, W, W_PADDED)
    key_gradient = tl.zeros([ROWS, K_PADDED], WIDE)
    value_gradient = tl.zeros([ROWS, W_PADDED], WIDE)
    for start in range(tl.min(row_first), end, ROWS):
        query_rows = start + tl.arange(0, ROWS)
        is_seen = (query_rows[None, :] >= row_first[:, None]) & (query_rows[None, :] < row_end[:, None])

        queries = _load_rows(q + head * q_head, query_rows, end, q_stride, K, K_PADDED)
        query_lse = tl.load(lse + head * n_queries + query_rows, mask=query_rows < end, other=0.0)
        scores = tl.dot(keys, tl.trans(queries), input_precision="ieee", out_dtype=WIDE) * (SCALE * _log2_e)
        weights = tl.where(is_seen, tl.exp2(scores - query_lse[None, :]), 0.0)

        upstream = _load_rows(d_out + head * W, query_rows, end, heads * W, W, W_PADDED)
        d_weights = tl.dot(values, tl.trans(upstream), input_precision="ieee", out_dtype=WIDE)
        kept_weights = weights
        if DROPPED > 0:
            is_kept = tl.trans(_is_kept(seed, query_rows, first_key, head, DROPPED, ROWS))
            kept_weights = tl.where(is_kept, weights, 0.0)
            d_weights = tl.where(is_kept, d_weights * (65536 / (65536 - DROPPED)), 0.0)

        value_gradient += tl.dot(kept_weights.to(upstream.dtype), upstream, input_precision="ieee", out_dtype=WIDE)
        query_delta = tl.load(delta + head * n_queries + query_rows, mask=query_rows < end, other=0.0)
        d_scores = tl.where(is_seen, weights * (d_weights - query_delta[None, :]), 0.0)
        key_gradient += tl.dot(d_scores.to(queries.dtype), queries, input_precision="ieee", out_dtype=WIDE)

    _store_rows(d_k + head * K, rows, n_keys, heads * K, key_gradient * SCALE, K, K_PADDED)
    value_gradient = value_gradient * (65536 / (65536 - DROPPED))
    _store_rows(d_v + head * W, rows, n_keys, heads * W, value_gradient, W, W_PADDED)


# ---- as operators of torch, which compilers take as they are --------------------------------------------------------


@torch.library.custom_op("transformer::packed_attention", mutates_args=())
def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seed: Tensor,
    key_first: Tensor,
    key_end: Tensor,
    query_first: Tensor,
    query_end: Tensor,
    dropout: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The output `(N, H, W)`, contiguous, and the logarithm (base 2) of each softmax's denominator `(H, N)`.

    q `(N, H, K)`, k `(M, H, K)` and v `(M, H, W)` may have any strides but for adjacent widths. `seed` `(1,)` int64;
    the ranges are int32: of keys `(N,)` for each query, of queries `(M,)` for each key, which the gradient needs.
    """
    n_queries, n_heads, _ = q.shape
    out = q.new_empty(n_queries, n_heads, v.shape[2])
    lse = q.new_empty(n_heads, n_queries, dtype=_wide(q))
    _forward_kernel[_grid(n_heads, n_queries)](
        q,
        k,
        v,
        seed,
        key_first,
        key_end,
        out,
        lse,
        n_queries,
        *_strides(q, k, v),
        *constants(q, v, dropout=dropout, scale=scale),
        num_warps=warps(q, v),
        num_stages=STAGES,
    )
    return out, lse


@packed_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seed: Tensor,
    key_first: Tensor,
    key_end: Tensor,
    query_first: Tensor,
    query_end: Tensor,
    dropout: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    n_queries, n_heads, _ = q.shape
    return q.new_empty(n_queries, n_heads, v.shape[2]), q.new_empty(n_heads, n_queries, dtype=_wide(q))


@torch.library.custom_op("transformer::packed_attention_backward", mutates_args=())
def packed_attention_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    seed: Tensor,
    key_first: Tensor,
    key_end: Tensor,
    query_first: Tensor,
    query_end: Tensor,
    dropout: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, each contiguous, zero in the slots that see nothing and are not seen."""
    n_queries, n_heads, _ = q.shape
    n_keys = len(k)
    d_out = d_out.contiguous()
    delta = torch.empty_like(lse)
    d_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    d_k = torch.empty_like(k, memory_format=torch.contiguous_format)
    d_v = torch.empty_like(v, memory_format=torch.contiguous_format)

    _queries_backward_kernel[_grid(n_heads, n_queries)](
        q,
        k,
        v,
        seed,
        key_first,
        key_end,
        out,
        lse,
        d_out,
        delta,
        d_q,
        n_queries,
        *_strides(q, k, v),
        *constants(q, v, dropout=dropout, scale=scale),
        num_warps=warps(q, v),
        num_stages=STAGES,
    )
    _keys_backward_kernel[_grid(n_heads, n_keys)](
        q,
        k,
        v,
        seed,
        query_first,
        query_end,
        lse,
        d_out,
        delta,
        d_k,
        d_v,
        n_queries,
        n_keys,
        *_strides(q, k, v),
        *constants(q, v, dropout=dropout, scale=scale),
        num_warps=KEYS_WARPS,
        num_stages=STAGES,
    )
    return d_q, d_k, d_v


@packed_attention_backward.register_fake
def _(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    seed: Tensor,
    key_first: Tensor,
    key_end: Tensor,
    query_first: Tensor,
    query_end: Tensor,
    dropout: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, seed, key_first, key_end, query_first, query_end, dropout, scale = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, seed, key_first, key_end, query_first, query_end)
    ctx.dropout = dropout
    ctx.scale = scale
    ctx.mark_non_differentiable(lse)


def _differentiate(ctx: Any, d_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    gradients = packed_attention_backward(d_out, *ctx.saved_tensors, ctx.dropout, ctx.scale)
    return *gradients, *(None,) * 7  # nothing for the seed, the four ranges and the two numbers


packed_attention.register_autograd(_differentiate, setup_context=_save)


def _grid(n_heads: int, n_rows: int) -> tuple[int, int]:
    """The heads of a tile side by side: their rows are neighbours in memory."""
    return n_heads, triton.cdiv(n_rows, ROWS)


def _strides(q: Tensor, k: Tensor, v: Tensor) -> list[int]:
    """From slot to slot and from head to head, of each."""
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1
    return [x.stride(dimension) for x in (q, k, v) for dimension in (0, 1)]


def warps(q: Tensor, v: Tensor) -> int:
    """Warps of a block, forward and in the queries' backward pass: with four, wider heads do not fit the registers."""
    return 4 if max(q.shape[2], v.shape[2]) <= 64 else 8


def _wide(x: Tensor) -> torch.dtype:
    """The type of sums."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def constants(q: Tensor, v: Tensor, *, dropout: float, scale: float) -> tuple[Any, ...]:
    """What a kernel is compiled for, from SCALE to WIDE in the order of its arguments."""
    widths = q.shape[2], v.shape[2]
    padded = (max(SMALLEST, triton.next_power_of_2(width)) for width in widths)
    wide = tl.float64 if q.dtype is torch.float64 else tl.float32
    return scale, round(dropout * 2**16), *widths, *padded, ROWS, wide
