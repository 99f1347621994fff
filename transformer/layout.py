"""How sentences lie in a tensor.

`B` sentences, `T` positions, `N` packed slots, `P` padded slots. The model works on `(..., d_model)` and looks at the
layout in two places only: the embedding (which position is this?) and `attend` (which keys are visible?). So there are
two layouts and one model: `Padded`, one sentence a row, and `Packed`, sentences end to end, which has one shape
whatever the sentences.

A packed batch also holds a plan for cutting it into small padded ones of similar lengths. Source and target share that
plan, because attention between them needs the same sentences in the same group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from transformer.kernels.gather import pack_padded, pad_packed


@dataclass(frozen=True)
class Padded:
    """One sentence a row, padded at the right to `width`; a row of length 0 is an empty slot."""

    lengths: Tensor  # (B,) int64: real tokens in each row
    width: int
    full: bool  # every row is `width` long, known on the host: no mask is needed

    @classmethod
    def of(cls, lengths: list[int], width: int) -> "Padded":
        """The layout of rows of these lengths, padded to `width`."""
        return cls(torch.tensor(lengths, dtype=torch.int64), width, all(length == width for length in lengths))

    @classmethod
    def full_rows(cls, rows: int, width: int, device: torch.device) -> "Padded":
        """The layout of `rows` sentences that are all `width` long."""
        return cls(torch.full((rows,), width, dtype=torch.int64, device=device), width, full=True)

    def positions(self) -> Tensor:
        """The position of every slot, counted from 0, as `(T,)`: the same for each row."""
        return torch.arange(self.width, device=self.lengths.device)

    def visible(self) -> Tensor:
        """Which slots may be attended to, as `(B, T)` bool.

        An empty row sees its first position: a row with no visible key would have NaN gradients even where hidden.
        """
        return self.positions() < self.lengths.clamp(min=1).unsqueeze(1)  # (B, T)

    def select(self, rows: Tensor) -> "Padded":
        """The layout of these rows alone."""
        return Padded(self.lengths[rows], self.width, self.full)

    def to(self, device: torch.device) -> "Padded":
        """The same layout on `device`."""
        return Padded(self.lengths.to(device, non_blocking=True), self.width, self.full)


@dataclass(frozen=True)
class Packed:
    """Sentences end to end in `N` slots. The slots left at the end are empty: no query sees them, and they see nothing.

    The index tensors carry tokens to padded rows and back. `P` counts the padded slots of all groups, one group after
    the other, each row by row.
    """

    offsets: Tensor  # (B + 1,) int32, or longer: sentence i fills slots offsets[i] to offsets[i + 1]
    position_ids: Tensor  # (N,) int64: the position of each slot in its sentence; 0 in an empty one
    longest: int  # no sentence is longer; it may be a bound for the whole corpus, so that it never changes
    groups: tuple[Padded, ...]  # sentences of similar lengths, as the padded rows they are multiplied in; some empty
    gather_index: Tensor  # (P,) int64: the packed slot that each padded slot reads; padding reads slot 0
    pad_index: Tensor  # (P - tokens,) int64: the padded slots that are padding
    scatter_index: Tensor  # (tokens,) int64: the padded slot of each token, in packed order

    def positions(self) -> Tensor:
        """The position of every slot in its sentence, counted from 0, as `(N,)`."""
        return self.position_ids

    def pad(self, x: Tensor) -> tuple[Tensor, ...]:
        """`(N, ...)` -> for each group its rows, `(b, t, ...)`. What padding holds is arbitrary: never read it."""
        padded = pad_packed(x, self.gather_index, scatter_index=self.scatter_index)  # (P, ...)

        sizes = [len(group.lengths) * group.width for group in self.groups]
        parts = zip(torch.split(padded, sizes), self.groups, strict=True)
        return tuple(part.view(-1, group.width, *x.shape[1:]) for part, group in parts)

    def unpad(self, parts: Sequence[Tensor]) -> Tensor:
        """What `pad` gave -> `(N, ...)`, zero in empty slots. No gradient reaches padding."""
        padded = torch.cat([part.flatten(0, 1) for part in parts])  # (P, ...)
        return pack_padded(
            padded,
            self.gather_index,
            pad_index=self.pad_index,
            scatter_index=self.scatter_index,
            count=len(self.position_ids),
        )

    def is_real(self) -> Tensor:
        """Which slots hold a token, as `(N,)` bool."""
        slots = torch.arange(len(self.position_ids), device=self.position_ids.device)
        return slots < self.offsets[-1]

    def to(self, device: torch.device) -> "Packed":
        """The same layout on `device`."""
        return Packed(
            offsets=self.offsets.to(device, non_blocking=True),
            position_ids=self.position_ids.to(device, non_blocking=True),
            longest=self.longest,
            groups=tuple(group.to(device) for group in self.groups),
            gather_index=self.gather_index.to(device, non_blocking=True),
            pad_index=self.pad_index.to(device, non_blocking=True),
            scatter_index=self.scatter_index.to(device, non_blocking=True),
        )


Layout = Padded | Packed
Numbers = npt.NDArray[Any]

# Every new shape costs a CPU time and memory for good, so groups and offsets come in few sizes.
_ROWS = 16  # the rows of a group are a multiple of this
_WIDTH = 4  # and its width of this
_OFFSETS = 256  # the length of `offsets` is a multiple of this, and enough for sentences of 8 tokens

# How much padding a group may have before its sides are rounded up: whichever of the two allows more.
_WASTE = 1.1  # its slots may be this many times its tokens
_SMALL = 256  # or exceed them by this number


def pack(lengths: Numbers, capacities: tuple[int, int], longest: tuple[int, int]) -> tuple[Packed, Packed]:
    """The layouts of both sides of sentence pairs: `lengths` is `(B, 2)`, `capacities` are the slots of each side.

    `longest` bounds the lengths. Raises ValueError where the sentences do not fit.
    """
    totals = lengths.sum(axis=0)
    if (totals > capacities).any():
        raise ValueError(f"{totals.tolist()} tokens do not fit {list(capacities)} slots")

    groups = _group(lengths)
    source, target = (
        _pack_side(lengths[:, side], capacities[side], longest=longest[side], groups=groups) for side in (0, 1)
    )
    return source, target


def _group(lengths: Numbers) -> list[Numbers]:
    """Sentences of similar lengths together, as indices: as few groups as the allowed padding permits.

    Sentences come longest first. A group ends where the next sentence would add too much padding.
    """
    order = np.lexsort((lengths[:, 1], lengths.max(axis=1, initial=0)))[::-1]
    groups: list[Numbers] = []
    start = 0  # of the group in progress, in `order`
    tokens = 0
    width = (0, 0)  # of its source and its target rows

    for end, (source, target) in enumerate(lengths[order].tolist()):
        wider = (max(width[0], source), max(width[1], target))
        tokens += source + target
        slots = (end + 1 - start) * sum(wider)

        if end > start and slots > max(_WASTE * tokens, tokens + _SMALL):
            groups.append(order[start:end])
            start = end
            tokens = source + target
            wider = (source, target)

        width = wider

    return [*groups, order[start:]] if len(order) else []


def _pack_side(lengths: Numbers, capacity: int, *, longest: int, groups: list[Numbers]) -> Packed:
    """The layout of one side: `lengths` is `(B,)`, in the order of the packed sentences."""
    count = len(lengths)
    offsets = np.zeros(_round_up(max(count + 1, capacity // 8), _OFFSETS), dtype=np.int32)
    offsets[1 : count + 1] = lengths.cumsum()
    offsets[count + 1 :] = offsets[count]  # unused offsets repeat the last one
    total = int(offsets[-1])

    position_ids = np.zeros(capacity, dtype=np.int64)
    position_ids[:total] = np.arange(total) - np.repeat(offsets[:count], lengths)

    layouts: list[Padded] = []
    slot_parts = [np.zeros(0, dtype=np.int64)]
    real_parts = [np.zeros(0, dtype=bool)]
    for group in groups:
        layout, slots, is_real = _rows_of(lengths[group], offsets[group])
        layouts.append(layout)
        slot_parts.append(slots.ravel())
        real_parts.append(is_real.ravel())

    gather_index = np.concatenate(slot_parts)  # (P,)
    is_token = np.concatenate(real_parts)  # (P,)
    scatter_index = np.zeros(total, dtype=np.int64)
    scatter_index[gather_index[is_token]] = np.flatnonzero(is_token)

    return Packed(
        offsets=torch.from_numpy(offsets),
        position_ids=torch.from_numpy(position_ids),
        longest=longest,
        groups=tuple(layouts),
        gather_index=torch.from_numpy(gather_index),
        pad_index=torch.from_numpy(np.flatnonzero(~is_token)),
        scatter_index=torch.from_numpy(scatter_index),
    )


def _rows_of(lengths: Numbers, starts: Numbers) -> tuple[Padded, Numbers, Numbers]:
    """The padded rows of sentences of these lengths that start at these packed slots, with empty rows at the end.

    Also the packed slot behind each padded one, and whether there is a token in it, both `(b, t)`.
    """
    count = len(lengths)
    n_rows = _round_up(count, _ROWS)
    width = _round_up(int(lengths.max()), _WIDTH)

    row_lengths = np.zeros(n_rows, dtype=np.int64)
    row_lengths[:count] = lengths
    row_starts = np.zeros(n_rows, dtype=np.int64)
    row_starts[:count] = starts

    columns = np.arange(width)
    is_real = columns < row_lengths[:, None]  # (b, t)
    slots = np.where(is_real, row_starts[:, None] + columns, 0)  # (b, t)

    return Padded.of(row_lengths.tolist(), width), slots, is_real


def _round_up(number: int, multiple: int) -> int:
    return -(-max(1, number) // multiple) * multiple
