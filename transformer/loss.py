"""The training loss: cross-entropy against smoothed targets (section 5.4), summed over real target tokens.

A sum, not a mean: the caller divides by the step's global token count. This is the reference; training goes through
`kernels/loss.py`, which never holds all logits.

Shapes: `N` target positions, `V` vocabulary.
"""

import math

from torch import Tensor

from transformer.compute import at_least_fp32
from transformer.vocabulary import PAD


def perplexity(loss: float) -> float:
    """`exp(loss)`, of a mean over tokens; infinity where that is too large for a float, NaN for NaN."""
    return math.inf if loss >= 700 else math.exp(loss)


def smoothed_cross_entropy(logits: Tensor, targets: Tensor, *, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """Logits `(N, V)` and classes `(N,)` -> the smoothed loss and the plain one, as sums; the second has no gradient.

    The target distribution gives 1 - eps to the class y and eps / (V - 1) to each other one, as tensor2tensor does;
    torch's own smoothing spreads eps over all V. A row of class PAD counts nothing. Written with `logsumexp` (lse), so
    that no second `(N, V)` tensor is kept: `(lse - z_y) + eps (z_y - mean of the other z)`.
    """
    logits = at_least_fp32(logits)
    is_real = (targets != PAD).to(logits.dtype)  # (N,)

    z_y = logits.gather(1, targets.unsqueeze(1)).squeeze(1)  # (N,)
    plain = (logits.logsumexp(1) - z_y) * is_real  # (N,)
    if label_smoothing == 0.0:
        return plain.sum(), plain.detach().sum()

    mean_of_others = (logits.sum(1) - z_y) / (logits.shape[1] - 1)  # (N,)
    smoothed = plain + label_smoothing * (z_y - mean_of_others) * is_real  # (N,)
    return smoothed.sum(), plain.detach().sum()
