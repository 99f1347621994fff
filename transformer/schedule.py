"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

import math

from transformer.config import Decay


def learning_rate(step: int, *, peak: float, warmup_steps: int, decay: Decay, max_steps: int) -> float:
    """The rate of step `step`, counted from 0: linear warm-up to `peak`, then the decay.

    Inverse square root is the paper's eq. 3 (section 5.3) at `step + 1`, written through its peak: see `paper_peak`.
    Linear falls to 0 at `max_steps`.
    """
    update = step + 1
    match decay:
        case Decay.inverse_sqrt:
            return peak * min(update / warmup_steps, math.sqrt(warmup_steps / update))
        case Decay.linear:
            falling = (max_steps - step) / max(1, max_steps - warmup_steps)
            return peak * max(0.0, min(update / warmup_steps, falling))


def paper_peak(d_model: int, warmup_steps: int) -> float:
    """The rate where eq. 3's two branches meet: `d_model^-0.5 * warmup_steps^-0.5`."""
    return 1.0 / math.sqrt(d_model * warmup_steps)
