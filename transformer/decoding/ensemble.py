"""Several models as one: at each step, the mean of their probabilities.

It is the arithmetic mean, the field's usual ensemble (fairseq's, and Sockeye's `linear`): a token that one model thinks
impossible can still be chosen by the others, which the geometric mean, that of log-probabilities, would forbid.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer.compute import at_least_fp32
from transformer.model.transformer import DecoderState, Transformer


@dataclass(frozen=True)
class EnsembleState:
    """The state of each model; they read the same hypotheses."""

    states: list[DecoderState]

    def reorder(self, rows: Tensor) -> "EnsembleState":
        """The states of these hypotheses, as `DecoderState.reorder` has them."""
        return EnsembleState([state.reorder(rows) for state in self.states])


def decode_step(models: Sequence[Transformer], tokens: Tensor, state: EnsembleState) -> tuple[Tensor, EnsembleState]:
    """The last token of each hypothesis `(R,)` -> logits of the next `(R, V)`, and the state after it."""
    steps = [model.decode_step(tokens, of_one) for model, of_one in zip(models, state.states, strict=True)]
    after = EnsembleState([of_one for _, of_one in steps])
    if len(steps) == 1:
        return steps[0][0], after

    log_probs = [torch.log_softmax(at_least_fp32(logits), 1) for logits, _ in steps]
    return mean_of_probabilities(log_probs), after


def mean_of_probabilities(log_probs: Sequence[Tensor]) -> Tensor:
    """The logarithm of the mean of what these are logarithms of, element by element."""
    return torch.logsumexp(torch.stack(list(log_probs)), 0) - math.log(len(log_probs))
