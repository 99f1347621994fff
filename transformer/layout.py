"""How sentences lie in a tensor: padded, one sentence a row, or packed, end to end.

    sentences "a b", "c d e", "f"      Padded (B=3, T=3)      Packed (N=8)
                                       a b .                  a b c d e f . .
                                       c d e                  0 1 0 1 2 0 0 0   positions
                                       f . .

The model works on `(..., d_model)` and looks at the layout in two places only: the embedding (which position is this?)
and `attend` (which keys are visible? not padding). So there are two layouts and one model.

Shapes: `B` sentences, `T` positions, `N` packed slots, `P` padded slots of all groups, `b` rows and `t` width of one
group, `H` heads, `K` head width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from transformer.config.settings import AttentionKernel
from transformer.errors import InputError
from transformer.kernels.gather import pack_padded, pad_packed
from transformer.kernels.ranges import Ranges

# ---- padded ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Padded:
    """One sentence a row, padded at the right to `width`; a row of length 0 is an empty slot."""

    lengths: Tensor  # (B,) int64: real tokens in each row
    width: int  # T
    full: bool  # every row is `width` long, known on the host: no mask is needed

    is_fused = False  # see Packed

    @classmethod
    def of(cls, lengths: list[int], width: int) -> "Padded":
        """The layout of rows of these lengths, padded to `width`. Raises InputError for a length that is not in it."""
        is_list = isinstance(lengths, list) and isinstance(width, int)
        if not is_list or not all(isinstance(length, int) and 0 <= length <= width for length in lengths):
            raise InputError(f"lengths={lengths!r:.80} must be a list of whole numbers from 0 to width={width!r:.20}")
        is_full = all(length == width for length in lengths)
        return cls(torch.tensor(lengths, dtype=torch.int64), width, full=is_full)

    @classmethod
    def full_rows(cls, rows: int, width: int, device: torch.device) -> "Padded":
        """The layout of `rows` sentences that are all `width` long."""
        lengths = torch.full((rows,), width, dtype=torch.int64, device=device)
        return cls(lengths, width, full=True)

    def positions(self) -> Tensor:
        """The position of every slot, counted from 0, as `(T,)`: the same for each row."""
        return torch.arange(self.width, device=self.lengths.device)

    def visible(self) -> Tensor:
        """Which slots may be attended to, as `(B, T)` bool.

        An empty row sees its first position: a row with no visible key would have NaN gradients even where hidden.
        """
        visible_lengths = self.lengths.clamp(min=1)
        return self.positions() < visible_lengths.unsqueeze(1)  # (T,) < (B, 1) -> (B, T)

    def select(self, rows: Tensor) -> "Padded":
        """The layout of these rows alone."""
        return Padded(self.lengths[rows], self.width, self.full)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Padded":
        """The same layout, with each tensor changed: moved to a device, or pinned."""
        return Padded(change(self.lengths), self.width, self.full)

    def to(self, device: torch.device) -> "Padded":
        """The same layout on `device`."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))


# ---- packed, and the groups that it is cut into ---------------------------------------------------------------------


@dataclass(frozen=True)
class Groups:
    """The small padded batches that packed sentences are cut into, and the indices that carry tokens there and back.

    Attention uses them where no kernel attends to packed sentences as they lie. The sentences of a group have similar
    lengths. Source and target are cut alike, because attention between them needs the same sentences in the same
    group. Padded slots are numbered group by group, each row by row. An example:

        packed slots      0 1 2 3 4 5 6 7
                          a b c d e f . .

        groups            c d e   and   f       padded slots      0 1 2   and   6
                          a b .                                   3 4 5

        gather_index      2 3 4 0 1 0 5    the packed slot that each padded slot reads
        pad_index         5                the padded slots that hold no token
        scatter_index     3 4 0 1 2 6      the padded slot of each token
    """

    layouts: tuple[Padded, ...]  # of each group; some rows are empty
    gather_index: Tensor  # (P,) int64: the packed slot that each padded slot reads; padding reads slot 0
    pad_index: Tensor  # (P - tokens,) int64: the padded slots that are padding
    scatter_index: Tensor  # (tokens,) int64: the padded slot of each token, in packed order
    slots: int  # N
    by_head: "dict[int, HeadIndices]" = field(default_factory=dict, repr=False, compare=False)  # made when first needed

    def pad(self, x: Tensor) -> tuple[Tensor, ...]:
        """`(N, ...)` -> for each group its rows, `(b, t, ...)`. What padding holds is arbitrary: never read it."""
        padded = pad_packed(x, self.gather_index, scatter_index=self.scatter_index)  # (P, ...)

        sizes = [len(layout.lengths) * layout.width for layout in self.layouts]  # b * t of each group
        groups = zip(torch.split(padded, sizes), self.layouts, strict=True)
        return tuple(rows.view(-1, layout.width, *x.shape[1:]) for rows, layout in groups)  # (b, t, ...)

    def unpad(self, groups: Sequence[Tensor]) -> Tensor:
        """What `pad` gave -> `(N, ...)`, zero in empty slots. No gradient reaches padding."""
        padded = torch.cat([rows.flatten(0, 1) for rows in groups])  # (P, ...)
        return pack_padded(
            padded,
            self.gather_index,
            pad_index=self.pad_index,
            scatter_index=self.scatter_index,
            count=self.slots,
        )

    def pad_heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """`(N, H, K)` -> for each group `(b, H, t, K)`, contiguous: `pad` and the transposition in one gather."""
        n_heads = x.shape[1]
        indices = self._head_indices(n_heads)
        head_rows = x.flatten(0, 1)  # (N H, K)
        padded = pad_packed(head_rows, indices.gather, scatter_index=indices.scatter)  # (P H, K)

        sizes = [len(layout.lengths) * n_heads * layout.width for layout in self.layouts]  # b * H * t of each group
        groups = zip(torch.split(padded, sizes), self.layouts, strict=True)
        return tuple(rows.view(-1, n_heads, layout.width, x.shape[2]) for rows, layout in groups)  # (b, H, t, K)

    def unpad_heads(self, groups: Sequence[Tensor]) -> Tensor:
        """For each group `(b, H, t, K)` -> `(N, H, K)`, zero in empty slots. No gradient reaches padding."""
        n_heads = groups[0].shape[1]
        indices = self._head_indices(n_heads)
        padded = torch.cat([rows.flatten(0, 2) for rows in groups])  # (P H, K)
        packed = pack_padded(
            padded,
            indices.gather,
            pad_index=indices.pad,
            scatter_index=indices.scatter,
            count=self.slots * n_heads,
        )  # (N H, K)
        return packed.view(self.slots, n_heads, -1)

    def _head_indices(self, n_heads: int) -> "HeadIndices":
        """The indices, made once for all attentions of a batch."""
        if n_heads not in self.by_head:
            self.by_head[n_heads] = self._make_head_indices(n_heads)
        return self.by_head[n_heads]

    def _make_head_indices(self, n_heads: int) -> "HeadIndices":
        """The indices are made on the CPU: only there does attention in groups use batched products.

        A row is one head of one slot. Packed rows are in the order (slot, head), so head h of slot s is row s H + h.
        The padded rows of a group are in the order (sentence, head, position).
        """
        heads = torch.arange(n_heads)[:, None]  # (H, 1)
        gather_parts: list[Tensor] = []
        row_parts: list[Tensor] = []
        start = 0  # of the group, in padded slots

        for layout in self.layouts:
            n_rows = len(layout.lengths)
            size = n_rows * layout.width

            # The packed row that each padded row reads.
            slots = self.gather_index[start : start + size].view(n_rows, 1, layout.width)  # (b, 1, t)
            packed_rows = slots * n_heads + heads  # (b, H, t)
            gather_parts.append(packed_rows.flatten())

            # Where the heads of each padded slot are.
            padded_rows = torch.arange(start * n_heads, (start + size) * n_heads)
            padded_rows = padded_rows.view(n_rows, n_heads, layout.width)  # (b, H, t)
            row_parts.append(padded_rows.transpose(1, 2).reshape(size, n_heads))  # (b t, H)
            start += size

        rows_of_slot = torch.cat(row_parts)  # (P, H)
        return HeadIndices(
            gather=torch.cat(gather_parts),
            pad=rows_of_slot[self.pad_index].flatten(),
            scatter=rows_of_slot[self.scatter_index].flatten(),
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> "Groups":
        """The same groups, with each tensor changed."""
        return Groups(
            layouts=tuple(layout.map(change) for layout in self.layouts),
            gather_index=change(self.gather_index),
            pad_index=change(self.pad_index),
            scatter_index=change(self.scatter_index),
            slots=self.slots,
        )


@dataclass(frozen=True)
class HeadIndices:
    """The indices of `Groups` for rows that are one head of one slot: packed `(N, H)`, padded `(b, H, t)` a group."""

    gather: Tensor  # (P H,) int64
    pad: Tensor  # ((P - tokens) H,) int64
    scatter: Tensor  # (tokens H,) int64


@dataclass(frozen=True)
class Tiles:
    """Stretches of slots that hold sentences whole: what one program of the `sentences` kernel attends to.

    A row is (first query slot, end, first key slot, end). On either side it spans at most 64 slots if it is small, 128
    if it is large. Every slot, even an empty one, is in one tile, unless its sentence is longer. Rows of zeros fill the
    table: its number of rows follows from the numbers of slots alone.
    """

    owner: Tensor  # (N,) int32: which sentence a slot of this side belongs to; -1: it is empty
    own: Tensor  # (2, n, 4) int32: small ones and large ones, where queries and keys are both of this side
    cross: Tensor | None  # the same, where keys are of the other side; None: it does not look there

    def map(self, change: Callable[[Tensor], Tensor]) -> "Tiles":
        """The same tiles, with each tensor changed."""
        return Tiles(change(self.owner), change(self.own), None if self.cross is None else change(self.cross))


@dataclass(frozen=True)
class Packed:
    """Sentences end to end in `N` slots. The slots left at the end are empty: no query sees them, and they see nothing.

    On a GPU all packed batches of a training have one shape. `offsets` and `longest` are all that a kernel needs to
    attend to the sentences as they lie. Where there is no such kernel, there are groups.
    """

    offsets: Tensor  # (B + 1,) int32, or longer: sentence i fills slots offsets[i] to offsets[i + 1]
    position_ids: Tensor  # (N,) int64: the position of each slot in its sentence; 0 in an empty one
    longest: int  # no sentence is longer
    groups: Groups | None  # None: attention is by `kernel`
    kernel: AttentionKernel | None  # None: attention is in groups
    tiles: Tiles | None = None  # for the kernel `sentences`

    def positions(self) -> Tensor:
        """The position of every slot in its sentence, counted from 0, as `(N,)`."""
        return self.position_ids

    def is_real(self) -> Tensor:
        """Which slots hold a token, as `(N,)` bool."""
        slots = torch.arange(len(self.position_ids), device=self.position_ids.device)
        return slots < self.offsets[-1]

    @property
    def is_fused(self) -> bool:
        """Whether this package's newer kernels also compute what surrounds attention."""
        return self.kernel is AttentionKernel.sentences

    def map(self, change: Callable[[Tensor], Tensor]) -> "Packed":
        """The same layout, with each tensor changed: moved to a device, or pinned."""
        return Packed(
            offsets=change(self.offsets),
            position_ids=change(self.position_ids),
            longest=self.longest,
            groups=None if self.groups is None else self.groups.map(change),
            kernel=self.kernel,
            tiles=None if self.tiles is None else self.tiles.map(change),
        )

    def ranges_in(self, other: "Packed") -> Ranges:
        """For each slot, the slots of its sentence on the other side of a pair, or on this one."""
        return Ranges.between(self.offsets, other.offsets, slots=len(self.position_ids))

    def to(self, device: torch.device) -> "Packed":
        """The same layout on `device`."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))


# ---- in a search ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mask:
    """Which keys each query of a search sees, as numbers that are added to scores: made once, and read by every layer.

    From a bool mask, attention would compute these numbers again in each layer.
    """

    numbers: Tensor  # (B, 1, T, S), or 1 for T: 0 where a query sees a key, -inf where not

    @classmethod
    def of(cls, visible: Tensor, dtype: torch.dtype) -> "Mask":
        """From a bool mask `(B, T, S)`, or 1 for T. Rows begin at multiples of 8, as a GPU's kernels ask for."""
        *rows, n_keys = visible.shape
        aligned = torch.zeros(*rows, -(-n_keys // 8) * 8, dtype=dtype, device=visible.device)
        return cls(aligned[..., :n_keys].masked_fill_(~visible, -torch.inf).unsqueeze(1))

    def select(self, rows: Tensor) -> "Mask":
        """The mask of these sentences alone."""
        return Mask(self.numbers[rows])


Layout = Padded | Packed
