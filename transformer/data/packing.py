"""The lengths of sentence pairs -> the packed layouts of both sides, by NumPy.

    pack      lay the sentences of each side end to end
      _group  without a kernel for that: cut them into groups of similar lengths, the same for both sides
      _tile   for the kernel `sentences`: cut the slots into tiles that hold sentences whole

Shapes: `B` sentences, `P` padded slots of all groups, `b` rows and `t` width of one group.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from transformer.config.settings import AttentionKernel
from transformer.kernels.ranges import LARGE, SMALL
from transformer.layout import Groups, Packed, Padded, Tiles

Numbers = npt.NDArray[Any]

# Every new shape costs a CPU time and memory for good, so groups come in few sizes.
_ROWS = 16  # the rows of a group are a multiple of this
_WIDTH = 4  # and its width of this
_ALIKE = 8  # lengths that this multiple rounds up to the same number are no reason for another group

# A packed kernel starts a block of threads for each offset and each stretch of `longest`, needed or not: both are close
# to what the batch has, in steps that let memory be used again.
_OFFSETS = 256  # the length of `offsets` is a multiple of this
_LONGEST = 128  # and `longest` of this: the rows that a block of threads takes

# How much padding a group may have before its sides are rounded up: whichever of the two allows more.
_WASTE = 1.1  # its slots may be this many times its tokens
_SMALL = 256  # or exceed them by this number


def pack(
    lengths: Numbers, capacities: tuple[int, int], *, kernel: AttentionKernel | None = None
) -> tuple[Packed, Packed]:
    """The layouts of both sides of sentence pairs: `lengths` is `(B, 2)`, `capacities` are the slots of each side.

    `kernel` is the one that will attend to them as they lie. None: there is none, so they are cut into groups. Raises
    ValueError where the sentences do not fit.
    """
    totals = lengths.sum(axis=0)  # (2,)
    if (totals > capacities).any():
        raise ValueError(f"{totals.tolist()} tokens do not fit {list(capacities)} slots")

    # Sentences have a slot or more on either side: for tiles, as many offsets as will do for any batch.
    entries = min(capacities) + 1 if kernel is AttentionKernel.sentences else len(lengths) + 1
    members = _group(lengths) if kernel is None else None
    source = _pack_side(lengths[:, 0], capacities[0], entries=entries, members=members, kernel=kernel)
    target = _pack_side(lengths[:, 1], capacities[1], entries=entries, members=members, kernel=kernel)
    if kernel is not AttentionKernel.sentences:
        return source, target

    return _tile(lengths, source, target)


def _group(lengths: Numbers) -> list[Numbers]:
    """Sentences of similar lengths together, as indices: as few groups as the allowed padding permits.

    Sentences come longest first. A group ends where the next sentence would add too much padding; that of lengths which
    are alike costs less than the calls of one more group.
    """
    longest_first = np.lexsort((lengths[:, 1], lengths.max(axis=1, initial=0)))[::-1]  # (B,)
    lengths = -(-lengths // _ALIKE) * _ALIKE
    groups: list[Numbers] = []
    start = 0  # of the group in progress, in `longest_first`
    tokens = 0  # of the group in progress, both sides, rounded up
    widths = (0, 0)  # of its source and its target rows

    for end, (source, target) in enumerate(lengths[longest_first].tolist()):
        # What the group would be with this sentence.
        tokens += source + target
        new_widths = (max(widths[0], source), max(widths[1], target))
        slots = (end + 1 - start) * sum(new_widths)

        has_too_much_padding = slots > max(_WASTE * tokens, tokens + _SMALL)
        if end > start and has_too_much_padding:  # the sentence begins the next group
            groups.append(longest_first[start:end])
            start = end
            tokens = source + target
            new_widths = (source, target)

        widths = new_widths

    return [*groups, longest_first[start:]] if len(longest_first) else []


def _pack_side(
    lengths: Numbers, capacity: int, *, entries: int, members: list[Numbers] | None, kernel: AttentionKernel | None
) -> Packed:
    """The layout of one side: `lengths` `(B,)` is in the order of the packed sentences, `members` are the groups'.

    There are at least so many `entries` of offsets.
    """
    count = len(lengths)
    offsets = np.zeros(_whole_multiples(entries, _OFFSETS), dtype=np.int32)
    offsets[1 : count + 1] = lengths.cumsum()
    offsets[count + 1 :] = offsets[count]  # unused offsets repeat the last one
    total = int(offsets[-1])

    # A position is the distance from where its sentence starts.
    position_ids = np.zeros(capacity, dtype=np.int64)
    starts = np.repeat(offsets[:count], lengths)  # (total,)
    position_ids[:total] = np.arange(total) - starts

    return Packed(
        offsets=torch.from_numpy(offsets),
        position_ids=torch.from_numpy(position_ids),
        longest=_whole_multiples(int(lengths.max(initial=1)), _LONGEST),  # of no sentence, too: kernels want some
        groups=None if members is None else _groups_of(lengths, offsets, capacity=capacity, members=members),
        kernel=kernel,
    )


# ---- tiles ----------------------------------------------------------------------------------------------------------


def _tile(lengths: Numbers, source: Packed, target: Packed) -> tuple[Packed, Packed]:
    """Both sides with the tiles of attention's three roles: `lengths` is `(B, 2)`.

    What is compiled or recorded for a batch should do for the next one, too. So all shapes follow from the numbers of
    slots, and `longest`, the same on both sides, has three values: small tiles suffice, or large ones do, or neither.
    """
    of_source, of_target = lengths.T.tolist()
    source_slots, target_slots = len(source.position_ids), len(target.position_ids)
    own_source = _cut(of_source, of_source, source_slots, source_slots)
    own_target = _cut(of_target, of_target, target_slots, target_slots)
    cross = _cut(of_target, of_source, target_slots, source_slots)

    longest = 2 * LARGE
    if lengths.max(initial=0) <= LARGE:
        has_large = any(bool(tiles[1].any()) for tiles in (own_source, own_target, cross))
        longest = LARGE if has_large else SMALL

    source_tiles = Tiles(_owners(lengths[:, 0], source_slots), own_source, None)
    target_tiles = Tiles(_owners(lengths[:, 1], target_slots), own_target, cross)
    return replace(source, longest=longest, tiles=source_tiles), replace(target, longest=longest, tiles=target_tiles)


def _cut(query_lengths: list[int], key_lengths: list[int], query_slots: int, key_slots: int) -> torch.Tensor:
    """The tiles of one role, `(2, n, 4)`, as `Tiles` has them.

    Where two tiles meet, the two have more slots than a small one may have, or one of them would do. So on one side
    there are at most N / 32 of either size, and of large ones alone half as many: only where source and target are long
    by turns small ones may be too many.
    """
    most = (query_slots + key_slots) // SMALL + 2
    tiles = _greedy(query_lengths, key_lengths, query_slots, key_slots, small=SMALL)
    if max(len(tiles[SMALL]), len(tiles[LARGE])) > most:
        tiles = _greedy(query_lengths, key_lengths, query_slots, key_slots, small=LARGE)

    rows = np.zeros((2, most, 4), dtype=np.int32)
    for of_size, found in zip(rows, (tiles[SMALL], tiles[LARGE]), strict=True):
        of_size[: len(found)] = np.array(found, dtype=np.int32).reshape(-1, 4)
    return torch.from_numpy(rows)


def _greedy(
    query_lengths: list[int], key_lengths: list[int], query_slots: int, key_slots: int, *, small: int
) -> dict[int, list[tuple[int, int, int, int]]]:
    """Tiles by size: each takes the next sentences while they fit, and is small, of this size, if its first one is."""
    tiles: dict[int, list[tuple[int, int, int, int]]] = {SMALL: [], LARGE: []}
    size = 0  # of the tile in progress; 0: there is none
    query_first = key_first = 0  # where it begins
    query_at = key_at = 0

    for n_queries, n_keys in zip(query_lengths, key_lengths, strict=True):
        if query_at + n_queries - query_first > size or key_at + n_keys - key_first > size:
            if size:
                tiles[size].append((query_first, query_at, key_first, key_at))
            longer = max(n_queries, n_keys)
            size = small if longer <= small else LARGE if longer <= LARGE else 0
            query_first = query_at
            key_first = key_at

        query_at += n_queries
        key_at += n_keys
        if not size:  # it fits none
            query_first = query_at
            key_first = key_at
    if size:
        tiles[size].append((query_first, query_at, key_first, key_at))

    # The empty slots.
    while query_at < query_slots or key_at < key_slots:
        query_end = min(query_at + small, query_slots)
        key_end = min(key_at + small, key_slots)
        tiles[small].append((query_at, query_end, key_at, key_end))
        query_at = query_end
        key_at = key_end
    return tiles


def _owners(lengths: Numbers, slots: int) -> torch.Tensor:
    """Which sentence each slot belongs to, `(N,)` int32; -1: it is empty."""
    owner = np.full(slots, -1, dtype=np.int32)
    owner[: lengths.sum()] = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    return torch.from_numpy(owner)


# ---- groups ---------------------------------------------------------------------------------------------------------


def _groups_of(lengths: Numbers, offsets: Numbers, *, capacity: int, members: list[Numbers]) -> Groups:
    """The groups of one side; `members` names the sentences of each."""
    layouts: list[Padded] = []
    slot_parts = [np.zeros(0, dtype=np.int64)]
    real_parts = [np.zeros(0, dtype=bool)]
    for group in members:
        layout, slots, is_real = _rows_of(lengths[group], offsets[group])
        layouts.append(layout)
        slot_parts.append(slots.ravel())
        real_parts.append(is_real.ravel())

    # The way back: the padded slot that reads a token's packed slot.
    gather_index = np.concatenate(slot_parts)  # (P,)
    is_token = np.concatenate(real_parts)  # (P,)
    scatter_index = np.zeros(offsets[-1], dtype=np.int64)  # (tokens,)
    scatter_index[gather_index[is_token]] = np.flatnonzero(is_token)

    return Groups(
        layouts=tuple(layouts),
        gather_index=torch.from_numpy(gather_index),
        pad_index=torch.from_numpy(np.flatnonzero(~is_token)),
        scatter_index=torch.from_numpy(scatter_index),
        slots=capacity,
    )


def _rows_of(lengths: Numbers, starts: Numbers) -> tuple[Padded, Numbers, Numbers]:
    """The padded rows of sentences of these lengths that start at these packed slots, with empty rows at the end.

    Also the packed slot that each padded slot reads, and whether it is that of a token, both `(b, t)`.
    """
    count = len(lengths)
    n_rows = _whole_multiples(count, _ROWS)
    width = _whole_multiples(int(lengths.max()), _WIDTH)

    row_lengths = np.zeros(n_rows, dtype=np.int64)  # (b,)
    row_lengths[:count] = lengths
    row_starts = np.zeros(n_rows, dtype=np.int64)  # (b,)
    row_starts[:count] = starts

    columns = np.arange(width)  # (t,)
    is_real = columns < row_lengths[:, None]  # (b, t)
    slots = np.where(is_real, row_starts[:, None] + columns, 0)  # (b, t)

    return Padded.of(row_lengths.tolist(), width), slots, is_real


def _whole_multiples(number: int, multiple: int) -> int:
    """The number rounded up to a multiple, and at least to the first."""
    return -(-max(1, number) // multiple) * multiple
