"""Sentence ids -> the tensors of one micro-batch.

`B` sentences, `S` and `T` the longest source and target, `N` rows that the loss is asked for. Source = pieces + EOS,
decoder input = BOS + pieces, target = pieces + EOS. The surprise: the target is no matrix but the classes of chosen
rows, with the flat place of each, so that the loss never touches padding. A packed batch has the one shape of its
capacity instead: there the loss sees every slot, and those of class PAD count nothing.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from transformer.data.plan import Ids
from transformer.data.store import Sentences, Store
from transformer.layout import Layout, Padded, pack
from transformer.vocabulary import BOS, EOS, PAD


@dataclass(frozen=True)
class Batch:
    """One micro-batch; `target_rows` are flat places in `target_in`, `row * T + position` where it is padded."""

    source: Tensor  # (B, S) int64: pieces + EOS, then PAD; packed, (slots,)
    source_layout: Layout
    target_in: Tensor  # (B, T) int64: BOS + pieces, then PAD; packed, (slots,)
    target_layout: Layout
    target_rows: Tensor  # (N,) int64
    target_out: Tensor  # (N,) int64: the class at each of those places, pieces + EOS; PAD in an empty slot

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`."""
        return Batch(
            source=self.source.to(device, non_blocking=True),
            source_layout=self.source_layout.to(device),
            target_in=self.target_in.to(device, non_blocking=True),
            target_layout=self.target_layout.to(device),
            target_rows=self.target_rows.to(device, non_blocking=True),
            target_out=self.target_out.to(device, non_blocking=True),
        )


def collate(store: Store, ids: Ids, capacities: tuple[int, int] | None = None) -> Batch:
    """The batch of these sentences, in this order, padded, or packed into `capacities` slots of source and target.

    No ids: one empty row (packed, a sentence of one PAD), for a rank that has nothing to do. Raises ValueError where
    the sentences do not fit.
    """
    if capacities is not None:
        return _packed(store, ids, capacities)
    if len(ids) == 0:
        nothing, pad, empty = torch.zeros(0, dtype=torch.int64), torch.full((1, 1), PAD), Padded.of([0], 1)
        return Batch(pad, empty, pad, empty, nothing, nothing)
    source, _, source_layout = _arrange(store.gather(ids, 0))
    target, target_in, target_layout = _arrange(store.gather(ids, 1))
    rows = np.flatnonzero(target)  # PAD is 0 and no piece
    return Batch(
        source=torch.from_numpy(source),
        source_layout=source_layout,
        target_in=torch.from_numpy(target_in),
        target_layout=target_layout,
        target_rows=torch.from_numpy(rows),
        target_out=torch.from_numpy(target.ravel()[rows]),
    )


def _packed(store: Store, ids: Ids, capacities: tuple[int, int]) -> Batch:
    lengths = store.lengths[ids] if len(ids) else np.ones((1, 2), dtype=np.int32)
    source_layout, target_layout = pack(lengths, capacities, store.longest)
    source, target_in, target = (np.full(capacities[side], PAD, dtype=np.int64) for side in (0, 1, 1))
    if len(ids):
        _end_to_end(source, store.gather(ids, 0))
        _end_to_end(target, store.gather(ids, 1))
        ends = np.cumsum(lengths[:, 1])
        target_in[1 : ends[-1]] = target[: ends[-1] - 1]  # what stands behind an EOS there begins a sentence
        target_in[np.concatenate(([0], ends[:-1]))] = BOS
    return Batch(
        source=torch.from_numpy(source),
        source_layout=source_layout,
        target_in=torch.from_numpy(target_in),
        target_layout=target_layout,
        target_rows=torch.arange(capacities[1]),
        target_out=torch.from_numpy(target),
    )


def _end_to_end(slots: Ids, sentences: Sentences) -> None:
    """Fill the first slots with these sentences, each with its EOS."""
    ends = np.cumsum(sentences.counts + 1) - 1
    inner = np.ones(ends[-1] + 1, dtype=bool)
    inner[ends] = False
    slots[: len(inner)][inner] = sentences.pieces
    slots[ends] = EOS


def _arrange(sentences: Sentences) -> tuple[Ids, Ids, Padded]:
    """One sentence a row, as pieces + EOS and as BOS + pieces, both `(B, T)`, and the layout that they share."""
    pieces, counts = sentences
    width = int(counts.max()) + 1
    inner = np.arange(width - 1) < counts[:, None]  # filling by a mask goes row by row, as the pieces lie
    ended, begun = np.full((2, len(counts), width), PAD, dtype=np.int64)
    ended[:, :-1][inner] = pieces
    ended[np.arange(len(counts)), counts] = EOS
    begun[:, 0] = BOS
    begun[:, 1:][inner] = pieces
    return ended, begun, Padded.of((counts + 1).tolist(), width)
