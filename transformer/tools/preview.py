"""What the steps of a training will be, for `doctor`: from the plan of the first epoch, whole or of a sample."""

from dataclasses import dataclass

import numpy as np

from transformer.data.plan import Batching, sample_epoch
from transformer.data.store import Lengths

STEPS = 50  # at most so many are cut into micro-batches: a tenth of a second


@dataclass(frozen=True)
class Preview:
    """The first epoch; micro-batches and padding are those of its first `sampled_steps` steps."""

    first_epoch: str  # how many pairs and steps it has, in words
    steps: int
    micro_batches: float  # of a step
    padding_share: float
    sampled_steps: int

    @property
    def padding(self) -> str:
        """Micro-batches and padding, in words."""
        return (
            f"micro-batches a step: {self.micro_batches:.3g}, padding: {100 * self.padding_share:.1f} % "
            f"(of the first {self.sampled_steps} steps)"
        )


def preview_epoch(lengths: Lengths, batching: Batching) -> Preview:
    """Plan the first epoch over sentence pairs of these lengths `(n, 2)`, and describe its steps."""
    sample = sample_epoch(lengths, batching)

    # The first steps, which are as good as any.
    steps = sample.plan[:STEPS]
    parts = [batching.split(ids, sample.lengths) for ids in steps]
    slots = 0
    for step in parts:
        slots += batching.count_slots([sample.lengths[ids] for ids in step if len(ids)])
    tokens = sum(int(sample.lengths[ids].sum(dtype=np.int64)) for ids in steps)

    return Preview(
        first_epoch=sample.describe(),
        steps=len(sample.plan) * sample.stride,
        micro_batches=sum(map(len, parts)) / len(parts),
        padding_share=1.0 - tokens / slots,
        sampled_steps=len(parts),
    )
