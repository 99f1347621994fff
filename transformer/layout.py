"""How sentences lie in a tensor.

`B` sentences, `T` positions, `N` packed slots, `P` padded slots. The model works on `(..., d_model)` and looks at the
layout in two places only: the embedding (which position is this?) and `attend` (which keys are visible?). So there are
two layouts and one model: `Padded`, a sentence a row, and `Packed`, sentences end to end, which has one shape whatever
the sentences. The surprise: a packed batch also holds a plan for cutting it into small padded ones of like lengths, and
source and target share that plan, since attention between them needs the same sentences in the same group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from transformer.kernels.gather import gather_up, spread_out


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
    def solid(cls, rows: int, width: int, device: torch.device) -> "Padded":
        """The layout of `rows` sentences that are all `width` long."""
        return cls(torch.full((rows,), width, dtype=torch.int64, device=device), width, full=True)

    def positions(self) -> Tensor:
        """The position of every slot, counted from 0, as `(T,)`: the same for each row."""
        return torch.arange(self.width, device=self.lengths.device)

    def visible(self) -> Tensor:
        """Which slots may be attended to, as `(B, T)` bool.

        An empty slot sees its first position: a row with no visible key would have NaN gradients even where hidden.
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
    """Sentences end to end in `N` slots; what is left at the end is empty, is seen by nobody and sees nothing."""

    offsets: Tensor  # (B + 1,) int32, or longer: sentence i fills slots offsets[i] to offsets[i + 1]
    places: Tensor  # (N,) int64: the position of each slot in its sentence; 0 in an empty one
    longest: int  # no sentence is longer; it may be a bound for the whole corpus, so that it never changes
    groups: tuple[Padded, ...]  # sentences of like lengths, as the padded rows that they are multiplied in; some empty
    slots: Tensor  # (P,) int64: the packed slot that each padded one reads, group after group; padding reads slot 0
    pads: Tensor  # the padded slots that are padding
    rows: Tensor  # (real tokens,) int64: the padded slot of each packed one that is not empty

    def positions(self) -> Tensor:
        """The position of every slot in its sentence, counted from 0, as `(N,)`."""
        return self.places

    def pad(self, x: Tensor) -> tuple[Tensor, ...]:
        """`(N, ...)` -> for each group its rows, `(b, t, ...)`; padding holds numbers that nobody must read."""
        padded = spread_out(x, self.slots, self.rows)
        sizes = [len(group.lengths) * group.width for group in self.groups]
        parts = zip(torch.split(padded, sizes), self.groups, strict=True)
        return tuple(part.view(-1, group.width, *x.shape[1:]) for part, group in parts)

    def unpad(self, parts: Sequence[Tensor]) -> Tensor:
        """What `pad` gave -> `(N, ...)`, zero in empty slots. No gradient reaches padding."""
        padded = torch.cat([part.flatten(0, 1) for part in parts])
        return gather_up(padded, self.slots, self.pads, self.rows, count=len(self.places))

    def is_real(self) -> Tensor:
        """Which slots hold a token, as `(N,)` bool."""
        return torch.arange(len(self.places), device=self.places.device) < self.offsets[-1]

    def to(self, device: torch.device) -> "Packed":
        """The same layout on `device`."""
        tensors = (self.offsets, self.places, self.slots, self.pads, self.rows)
        offsets, places, slots, pads, rows = (tensor.to(device, non_blocking=True) for tensor in tensors)
        groups = tuple(group.to(device) for group in self.groups)
        return Packed(offsets, places, self.longest, groups, slots, pads, rows)


Layout = Padded | Packed
Numbers = npt.NDArray[Any]

_ROWS, _WIDTH = 16, 4  # a group's sides are multiples of these: each new shape costs a CPU time and memory for good
_WASTE = 1.1  # before that, a group's slots may be this many times its tokens, and at least _SMALL more
_SMALL = 256
_OFFSETS = 256  # offsets come in multiples of this, and enough for sentences of 8 tokens: seldom a new shape


def pack(lengths: Numbers, capacities: tuple[int, int], longest: tuple[int, int]) -> tuple[Packed, Packed]:
    """The layouts of both sides of sentence pairs: `lengths` is `(B, 2)`, `capacities` are the slots of each side.

    `longest` bounds the lengths. Raises ValueError where the sentences do not fit.
    """
    totals = lengths.sum(axis=0)
    if (totals > capacities).any():
        raise ValueError(f"{totals.tolist()} tokens do not fit {list(capacities)} slots")
    groups = _group(lengths)
    first, second = (_pack(lengths[:, side], capacities[side], longest[side], groups) for side in (0, 1))
    return first, second


def _group(lengths: Numbers) -> list[Numbers]:
    """Sentences of like lengths together, as indices: the fewer groups the better, as long as little is wasted."""
    order = np.lexsort((lengths[:, 1], lengths.max(axis=1, initial=0)))[::-1]
    groups: list[Numbers] = []
    start, real, widest = 0, 0, (0, 0)
    for end, (source, target) in enumerate(lengths[order].tolist()):
        wider = max(widest[0], source), max(widest[1], target)
        padded, tokens = (end + 1 - start) * sum(wider), real + source + target
        if end > start and padded > max(_WASTE * tokens, tokens + _SMALL):
            groups.append(order[start:end])
            start, tokens, wider = end, source + target, (source, target)
        real, widest = tokens, wider
    return [*groups, order[start:]] if len(order) else []


def _pack(lengths: Numbers, capacity: int, longest: int, groups: list[Numbers]) -> Packed:
    room = max(len(lengths) + 1, capacity // 8)
    offsets = np.zeros(_round_up(room, _OFFSETS), dtype=np.int32)
    offsets[1 : len(lengths) + 1] = lengths.cumsum()
    offsets[len(lengths) + 1 :] = offsets[len(lengths)]  # sentences that are not there are empty
    total = int(offsets[-1])
    places = np.zeros(capacity, dtype=np.int64)
    places[:total] = np.arange(total) - np.repeat(offsets[: len(lengths)], lengths)
    layouts, slots, real = [], [], []
    for group in groups:
        width = _round_up(int(lengths[group].max()), _WIDTH)
        of_rows = np.zeros(_round_up(len(group), _ROWS), dtype=np.int64)
        of_rows[: len(group)] = lengths[group]
        first = np.zeros_like(of_rows)
        first[: len(group)] = offsets[group]
        inside = np.arange(width) < of_rows[:, None]  # (b, t)
        slots.append(np.where(inside, first[:, None] + np.arange(width), 0).ravel())
        real.append(inside.ravel())
        layouts.append(Padded.of(of_rows.tolist(), width))
    packed_slot = np.concatenate([np.zeros(0, np.int64), *slots]).astype(np.int64)
    is_real = np.concatenate([np.zeros(0, bool), *real])
    rows = np.zeros(total, dtype=np.int64)
    rows[packed_slot[is_real]] = np.flatnonzero(is_real)
    return Packed(
        torch.from_numpy(offsets),
        torch.from_numpy(places),
        longest,
        tuple(layouts),
        torch.from_numpy(packed_slot),
        torch.from_numpy(np.flatnonzero(~is_real)),
        torch.from_numpy(rows),
    )


def _round_up(number: int, multiple: int) -> int:
    return -(-max(1, number) // multiple) * multiple
