"""Sentence ids -> the tensors of one micro-batch.

For the pair "a b -> x y z", beside a longer one:

    padded                          packed, with the next pair "c -> u"
    source     a b EOS PAD          a b EOS c EOS PAD ...
    target_in  BOS x y z            BOS x y z BOS u PAD ...
    target_out x y z EOS            x y z EOS u EOS PAD ...

Shapes: `B` sentences, `S` and `T` the longest source and target, `N` positions that the loss is asked for. In a padded
batch these are the real ones, so that the loss never touches padding. A packed batch always has the shape of its
capacities: there the loss sees every slot, and slots of class PAD count nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from transformer.config.settings import AttentionKernel
from transformer.data.packing import pack
from transformer.data.store import Ids, Sentences, Store
from transformer.layout import Layout, Padded
from transformer.vocabulary import BOS, EOS, PAD


@dataclass(frozen=True)
class Batch:
    """One micro-batch."""

    source: Tensor  # (B, S) int64: pieces + EOS, then PAD; packed, (slots,)
    source_layout: Layout
    target_in: Tensor  # (B, T) int64: BOS + pieces, then PAD; packed, (slots,)
    target_layout: Layout
    target_rows: Tensor | None  # (N,) int64: the real positions, as `row * T + position`; packed, None: all slots
    target_out: Tensor  # (N,) int64: the class at each of these, pieces + EOS; packed, PAD in an empty slot

    def map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """The same batch, with each tensor changed: moved to a device, or pinned."""
        return Batch(
            source=change(self.source),
            source_layout=self.source_layout.map(change),
            target_in=change(self.target_in),
            target_layout=self.target_layout.map(change),
            target_rows=None if self.target_rows is None else change(self.target_rows),
            target_out=change(self.target_out),
        )

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))


def collate(
    store: Store,
    ids: Ids,
    capacities: tuple[int, int] | None = None,
    *,
    kernel: AttentionKernel | None = None,
) -> Batch:
    """The batch of the sentences `ids`, in this order: padded, or packed into `capacities` slots of source and target.

    `kernel` is for packed batches: see `pack`. Without ids, the batch has one empty row (packed, a sentence of one
    PAD), for a rank that has nothing to do. Raises ValueError where the sentences do not fit.
    """
    if capacities is not None:
        return _pack_batch(store, ids, capacities, kernel=kernel)
    if len(ids) == 0:
        return _empty_batch()
    return _pad_batch(store, ids)


# ---- padded ---------------------------------------------------------------------------------------------------------


def _pad_batch(store: Store, ids: Ids) -> Batch:
    source, _, source_layout = _pad_side(store.gather(ids, 0))
    target, target_in, target_layout = _pad_side(store.gather(ids, 1))
    rows = np.flatnonzero(target)  # (N,): PAD is 0, and no piece or EOS is
    return Batch(
        source=torch.from_numpy(source),
        source_layout=source_layout,
        target_in=torch.from_numpy(target_in),
        target_layout=target_layout,
        target_rows=torch.from_numpy(rows),
        target_out=torch.from_numpy(target.ravel()[rows]),
    )


def _empty_batch() -> Batch:
    """A padded batch of one empty row, without any target."""
    pad = torch.full((1, 1), PAD)
    layout = Padded.of([0], 1)
    no_targets = torch.zeros(0, dtype=torch.int64)
    return Batch(
        source=pad,
        source_layout=layout,
        target_in=pad,
        target_layout=layout,
        target_rows=no_targets,
        target_out=no_targets,
    )


def _pad_side(sentences: Sentences) -> tuple[Ids, Ids, Padded]:
    """One sentence a row, as pieces + EOS and as BOS + pieces, both `(B, T)`, and the layout that they share."""
    pieces, counts = sentences
    width = int(counts.max()) + 1
    is_piece = np.arange(width - 1) < counts[:, None]  # (B, T - 1)

    # A masked assignment fills the array row by row, which is the order of the pieces.
    with_eos = np.full((len(counts), width), PAD, dtype=np.int64)
    with_eos[:, :-1][is_piece] = pieces
    with_eos[np.arange(len(counts)), counts] = EOS

    with_bos = np.full((len(counts), width), PAD, dtype=np.int64)
    with_bos[:, 0] = BOS
    with_bos[:, 1:][is_piece] = pieces

    return with_eos, with_bos, Padded.of((counts + 1).tolist(), width)


def pad_rows(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Padded]:
    """Rows of ids, as they are, in one tensor `(B, T)`, padded at the right, and its layout; on `device`."""
    lengths = [len(row) for row in rows]
    width = max(lengths)
    padded = [[*row, *[PAD] * (width - len(row))] for row in rows]
    return torch.tensor(padded, device=device), Padded.of(lengths, width).to(device)


# ---- packed ---------------------------------------------------------------------------------------------------------


def _pack_batch(store: Store, ids: Ids, capacities: tuple[int, int], *, kernel: AttentionKernel | None) -> Batch:
    """The sentences end to end, each with its EOS; the slots after the last one hold PAD."""
    lengths = store.lengths[ids] if len(ids) else np.ones((1, 2), dtype=np.int32)  # (B, 2)
    source_layout, target_layout = pack(lengths, capacities, kernel=kernel)

    source = np.full(capacities[0], PAD, dtype=np.int64)
    target_in = np.full(capacities[1], PAD, dtype=np.int64)
    target = np.full(capacities[1], PAD, dtype=np.int64)

    if len(ids):
        _fill_end_to_end(source, store.gather(ids, 0))
        _fill_end_to_end(target, store.gather(ids, 1))

        # The decoder reads the target shifted by one slot, and BOS, not the EOS before it, where a sentence begins.
        ends = np.cumsum(lengths[:, 1])  # (B,): the slot after each sentence
        target_in[1 : ends[-1]] = target[: ends[-1] - 1]
        starts = np.concatenate(([0], ends[:-1]))
        target_in[starts] = BOS

    return Batch(
        source=torch.from_numpy(source),
        source_layout=source_layout,
        target_in=torch.from_numpy(target_in),
        target_layout=target_layout,
        target_rows=None,
        target_out=torch.from_numpy(target),
    )


def _fill_end_to_end(slots: Ids, sentences: Sentences) -> None:
    """Fill the first slots with these sentences, each with its EOS."""
    eos_slots = np.cumsum(sentences.counts + 1) - 1  # (B,)
    is_piece = np.ones(eos_slots[-1] + 1, dtype=bool)
    is_piece[eos_slots] = False

    slots[: len(is_piece)][is_piece] = sentences.pieces
    slots[eos_slots] = EOS
