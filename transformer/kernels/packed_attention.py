"""Attention over packed sentences on a GPU: our Triton kernels, and their plain form.

`N` query slots, `M` key slots, `H` heads, `K` the width of queries and keys, `W` that of values. What a query may see
is one range of key slots: its sentence's in an encoder, the same up to itself under a causal mask, the source
sentence's between encoder and decoder. So a pair of integers a row says everything: no form here knows of sentences.

State: the kernels compute what they should, on an H200 as in Triton's interpreter on a CPU. How fast they are has not
been measured, and so only `train.kernels=triton` takes them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from transformer.compute import at_least_fp32

WIDEST = 128  # numbers of a head that the Triton kernels hold


@dataclass(frozen=True)
class Ranges:
    """Which slots of the other side each slot of this one belongs to: from `first` to before `end`; none if equal."""

    first: Tensor  # (N,) int32
    end: Tensor  # (N,) int32

    @classmethod
    def between(cls, own_offsets: Tensor, other_offsets: Tensor, *, slots: int) -> "Ranges":
        """For each of `slots` slots, those of the same sentence on the other side; for an empty slot none.

        Sentence i fills slots offsets[i] to offsets[i + 1], on either side.
        """
        slot = torch.arange(slots, device=own_offsets.device, dtype=own_offsets.dtype)
        sentence = torch.searchsorted(own_offsets[1:], slot, right=True)  # of an empty slot: one past the last

        ends = torch.cat((other_offsets[1:], other_offsets[-1:]))
        return cls(other_offsets[sentence], ends[sentence])

    def up_to_itself(self) -> "Ranges":
        """Of queries under a causal mask: the keys up to their own slot."""
        return Ranges(self.first, torch.minimum(self.end, self._slots() + 1))

    def from_itself(self) -> "Ranges":
        """Of keys under a causal mask: the queries from their own slot on."""
        return Ranges(torch.maximum(self.first, self._slots()), self.end)

    def _slots(self) -> Tensor:
        return torch.arange(len(self.first), device=self.first.device, dtype=self.first.dtype)


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

    if dropout:
        seed = torch.randint(2**62, (1,), device=q.device)
    else:
        seed = torch.zeros(1, dtype=torch.int64, device=q.device)
    out, _ = packed_attention(q, k, v, seed, keys.first, keys.end, queries.first, queries.end, dropout, scale)
    return out
