"""How sentences lie in a tensor.

`B` sentences, `T` positions. The model works on `(..., d_model)` and looks at the layout in two places only: the
embedding (which position is this?) and `attend` (which keys are visible?). So another layout needs no other model.

The special ids are fixed here, since every part agrees on them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

PAD, UNK, BOS, EOS = range(4)


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


Layout = Padded
