"""Several models as one: at each step, the mean of their probabilities.

It is the arithmetic mean, the field's usual ensemble (that of fairseq, and `linear` of Sockeye). A token that one model
thinks impossible can still be chosen by the others; the geometric mean, that of log-probabilities, would forbid it.

`R` hypotheses, `V` vocabulary.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer.compute import at_least_fp32
from transformer.decoding import buffers
from transformer.model.transformer import DecoderState, Transformer


@dataclass(frozen=True)
class EnsembleState:
    """The decoder state of each model; all have read the same hypotheses."""

    states: list[DecoderState]

    def reorder(self, rows: Tensor) -> "EnsembleState":
        """The state of the hypotheses `rows` `(R,)`: see `DecoderState.reorder`."""
        return EnsembleState([state.reorder(rows) for state in self.states])

    # ---- in buffers: see `replay`

    def shape(self) -> Hashable:
        """All in which its buffers may differ from others for as many sentences and positions."""
        return tuple(buffers.source_positions(state) for state in self.states)

    def fixed(self, arena: buffers.Arena, *, sentences: int, positions: int) -> "EnsembleState":
        """Buffers for a state like this one."""
        return EnsembleState(
            [
                buffers.fixed(state, arena, n, sentences=sentences, positions=positions)
                for n, state in enumerate(self.states)
            ]
        )

    def fill(self, state: "EnsembleState") -> None:
        """Put a state of as many sentences, or fewer, into these buffers."""
        for own, other in zip(self.states, state.states, strict=True):
            buffers.fill(own, other)

    def reading(self, positions: int) -> "EnsembleState":
        """The same buffers, of which a step reads so many positions."""
        return EnsembleState([buffers.reading(state, positions) for state in self.states])

    def keep(self, after: "EnsembleState") -> None:
        """Put what a step from these buffers has made where the next one reads it."""
        for own, other in zip(self.states, after.states, strict=True):
            buffers.keep(own, other)


def decode_step(models: Sequence[Transformer], tokens: Tensor, state: EnsembleState) -> tuple[Tensor, EnsembleState]:
    """The last token of each hypothesis `(R,)` -> logits of the next `(R, V)`, and the state after it."""
    all_logits = []
    states = []
    for model, model_state in zip(models, state.states, strict=True):
        logits, next_state = model.decode_step(tokens, model_state)
        all_logits.append(logits)
        states.append(next_state)
    after = EnsembleState(states)

    if len(models) == 1:
        return all_logits[0], after
    log_probs = [torch.log_softmax(at_least_fp32(logits), 1) for logits in all_logits]
    return mean_of_probabilities(log_probs), after


def mean_of_probabilities(log_probs: Sequence[Tensor]) -> Tensor:
    """The logarithm of the mean probability, element by element; the log-probabilities of each model are given."""
    return torch.logsumexp(torch.stack(list(log_probs)), 0) - math.log(len(log_probs))
