"""What packed sentences see of each other: for each slot of one side a range of slots of the other."""

from dataclasses import dataclass

import torch
from torch import Tensor

SMALL, LARGE = 64, 128  # slots on either side of a tile that holds sentences whole


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
        return cls.of_sentences(own_offsets, other_offsets[:-1], other_offsets[1:], slots=slots)

    @classmethod
    def of_sentences(cls, own_offsets: Tensor, first: Tensor, end: Tensor, *, slots: int) -> "Ranges":
        """The same, where each sentence sees the slots from `first` `(B,)` to before `end` `(B,)`."""
        slot = torch.arange(slots, device=own_offsets.device, dtype=own_offsets.dtype)
        sentence = torch.searchsorted(own_offsets[1:], slot, right=True)  # of an empty slot: one past the last

        last = end[-1:]  # what the empty slots see begins and ends there
        return cls(torch.cat((first, last))[sentence], torch.cat((end, last))[sentence])

    def up_to_itself(self) -> "Ranges":
        """Of queries under a causal mask: the keys up to their own slot."""
        return Ranges(self.first, torch.minimum(self.end, self._slots() + 1))

    def from_itself(self) -> "Ranges":
        """Of keys under a causal mask: the queries from their own slot on."""
        return Ranges(torch.maximum(self.first, self._slots()), self.end)

    def _slots(self) -> Tensor:
        return torch.arange(len(self.first), device=self.first.device, dtype=self.first.dtype)
