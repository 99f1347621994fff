"""Sentence ids -> the tensors of one micro-batch.

`B` sentences, `S` and `T` the longest source and target, `N` real target tokens. Source = pieces + EOS, decoder input =
BOS + pieces, target = pieces + EOS. The surprise: the target is no matrix but the `N` real tokens, with the flat place
of each, so that the loss never touches padding.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from transformer.data.store import Ids, Store
from transformer.layout import BOS, EOS, PAD, Padded


@dataclass(frozen=True)
class Batch:
    """One micro-batch; `target_rows` are places `row * T + position` in the `(B, T)` of `target_in`."""

    source: Tensor  # (B, S) int64: pieces + EOS, then PAD
    source_layout: Padded
    target_in: Tensor  # (B, T) int64: BOS + pieces, then PAD
    target_layout: Padded
    target_rows: Tensor  # (N,) int64
    target_out: Tensor  # (N,) int64: the class at each of those places, pieces + EOS

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


def collate(store: Store, ids: Ids) -> Batch:
    """The batch of these sentences, in this order. No ids: one empty row, for a rank that has nothing to do."""
    if len(ids) == 0:
        nothing, pad, empty = torch.zeros(0, dtype=torch.int64), torch.full((1, 1), PAD), Padded.of([0], 1)
        return Batch(pad, empty, pad, empty, nothing, nothing)
    source, _, source_layout = _arrange(*store.gather(ids, 0))
    target, target_in, target_layout = _arrange(*store.gather(ids, 1))
    rows = np.flatnonzero(target)  # PAD is 0 and no piece
    return Batch(
        source=torch.from_numpy(source),
        source_layout=source_layout,
        target_in=torch.from_numpy(target_in),
        target_layout=target_layout,
        target_rows=torch.from_numpy(rows),
        target_out=torch.from_numpy(target.ravel()[rows]),
    )


def _arrange(pieces: Ids, counts: Ids) -> tuple[Ids, Ids, Padded]:
    """One sentence a row, as pieces + EOS and as BOS + pieces, both `(B, T)`, and the layout that they share."""
    width = int(counts.max()) + 1
    inner = np.arange(width - 1) < counts[:, None]  # filling by a mask goes row by row, as the pieces lie
    ended, begun = np.full((2, len(counts), width), PAD, dtype=np.int64)
    ended[:, :-1][inner] = pieces
    ended[np.arange(len(counts)), counts] = EOS
    begun[:, 0] = BOS
    begun[:, 1:][inner] = pieces
    return ended, begun, Padded.of((counts + 1).tolist(), width)
