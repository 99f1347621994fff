"""Adam and its learning rate (section 5.3), its moments by name, and the moving average of the weights."""

import math

import torch
from torch import Tensor, nn
from torch.optim import Adam

from transformer.config.settings import Decay, TrainConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


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


def build_optimizer(model: nn.Module, config: TrainConfig) -> Adam:
    """One fused Adam over every parameter; the rate is set at each step."""
    betas = (config.adam_beta1, config.adam_beta2)
    return Adam(model.parameters(), lr=0.0, betas=betas, eps=config.adam_eps, fused=True)


def set_rate(optimizer: Adam, rate: float) -> None:
    """The learning rate of the next update."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def moments_by_name(model: nn.Module, optimizer: Adam) -> dict[str, Tensor]:
    """Adam's moments as `exp_avg/NAME` and `exp_avg_sq/NAME`, and the updates applied; empty before the first."""
    named = [(name, optimizer.state[parameter]) for name, parameter in model.named_parameters()]
    found = {f"{moment}/{name}": state[moment] for name, state in named if state for moment in MOMENTS}
    return found | {"updates": named[0][1]["step"]} if found else {}


def load_moments(model: nn.Module, optimizer: Adam, tensors: dict[str, Tensor]) -> None:
    """Put back what `moments_by_name` gave."""
    if not tensors:
        return
    for name, parameter in model.named_parameters():
        state: dict[str, Tensor] = {"step": tensors["updates"].to(parameter.device, torch.float32, copy=True)}
        for moment in MOMENTS:
            state[moment] = tensors[f"{moment}/{name}"].to(parameter.device, parameter.dtype, copy=True)
        optimizer.state[parameter] = state


def move_average(average: nn.Module, model: nn.Module, *, decay: float, updates: int) -> None:
    """Move the weights of `average` towards those of `model`: `a <- d a + (1 - d) w`.

    `d = min(decay, (1 + updates) / (10 + updates))`, with the updates before this one: the warm-up of TensorFlow's
    ExponentialMovingAverage, without which the initial weights would count for long.
    """
    weight = 1.0 - min(decay, (1 + updates) / (10 + updates))
    with torch.no_grad():
        torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), weight)
