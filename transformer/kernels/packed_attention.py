"""Attention over packed sentences on a GPU: our Triton kernels, and their plain form.

`N` query slots, `M` key slots, `H` heads, `K` the width of queries and keys, `W` that of values. What a query may see
is one range of key slots: its sentence's in an encoder, the same up to itself under a causal mask, the source
sentence's between encoder and decoder. So two integers a row say everything: no form here knows of sentences.

State: the kernels of `triton_attention` compute what they should on an H200, as in Triton's interpreter on a CPU; those
of `sentence_attention` in the interpreter. How fast either are has not been measured, and so only
`train.kernels=triton` takes the former, and only `train.kernels=fused` the latter.
"""

import torch
from torch import Tensor

from transformer.compute import at_least_fp32
from transformer.kernels.dropout import draw_seed
from transformer.kernels.ranges import Ranges

WIDEST = 128  # numbers of a head that the Triton kernels hold
WIDEST_IN_SMALL_TILES = 64  # that of whole sentences, on GPUs whose memory of a block is small


def plain_attention(q: Tensor, k: Tensor, v: Tensor, *, keys: Ranges, scale: float, kept: Tensor | None) -> Tensor:
    """Equation 1 over all pairs of slots: q `(N, H, K)`, k `(M, H, K)`, v `(M, H, W)` -> `(N, H, W)`.

    The reference of the form below: its weights `(H, N, M)` would never fit a step. Those that a query does not see
    are 0. `kept` multiplies them: 0 for what dropout drops, else 1 over the share that it keeps.
    """
    slots = torch.arange(len(k), device=k.device)
    is_seen = (slots >= keys.first[:, None]) & (slots < keys.end[:, None])  # (N, M)

    scores = scale * at_least_fp32(torch.einsum("nhk,mhk->hnm", q, k))
    weights = torch.softmax(scores.masked_fill(~is_seen, -1e30), dim=-1) * is_seen
    if kept is not None:
        weights = weights * kept
    return torch.einsum("hnm,mhw->nhw", weights.to(v.dtype), v)


def triton_attention(
    q: Tensor, k: Tensor, v: Tensor, *, keys: Ranges, queries: Ranges, dropout: float, scale: float
) -> Tensor:
    """The same by kernels of ours: `keys` for each query and `queries` for each key, `dropout` on the weights.

    The kernels read q, k and v as they lie; the numbers of a head must be adjacent. They hold 64 x 64 weights of a head
    at a time, and make them again in the backward pass: which weights are dropped follows from one random number, drawn
    here, and from the places of query, key and head. An empty slot gets 0 and no gradient, whatever it holds.
    """
    from transformer.kernels.gpu.attention import packed_attention  # needs Triton

    seed = draw_seed(dropout, q.device)
    out, _ = packed_attention(q, k, v, seed, keys.first, keys.end, queries.first, queries.end, dropout, scale)
    return out


def sentence_attention(
    operands: list[Tensor],
    *,
    tiles: Tensor,
    owners: tuple[Tensor, Tensor],
    offsets: tuple[Tensor, Tensor],
    longest: int,
    causal: bool,
    dropout: float,
    scale: float,
) -> Tensor:
    """The same by kernels that take a few sentences whole: `tiles`, `owners` and `offsets` as layouts have them.

    The operands are q, k and v; or q and both others, `(M, 2, H, K)`; or all of them, `(N, 3, H, K)`. Sentences that
    fit no tile, if `longest` says that there are some, are left to `triton_attention`'s kernels. The same weights are
    dropped.
    """
    from transformer.kernels.gpu.sentences import sentence_attention  # needs Triton

    seed = draw_seed(dropout, tiles.device)
    return sentence_attention(operands, seed, tiles, *owners, *offsets, longest, causal, dropout, scale)
