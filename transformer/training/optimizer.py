"""The optimizer and its learning rate (section 5.3), its moments by name, and the moving average of the weights.

The rate is a pure function of the step. Moments go to a checkpoint under the names of their parameters, so that a
checkpoint does not depend on the order of the parameters. `step` applies the updates; `state` saves and restores.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from transformer.config.settings import Decay, OptimizerKind, TrainConfig
from transformer.training.muon import Muon

MEANS = "exp_avg"  # torch's names of Adam's two moments, of which Muon has the first
SQUARES = "exp_avg_sq"
MOMENTS = (MEANS, SQUARES)
UPDATES = "updates"  # the number of updates applied, in a checkpoint


def learning_rate(step: int, *, peak: float, warmup_steps: int, decay: Decay, max_steps: int) -> float:
    """The rate of step `step`, counted from 0: linear warm-up to `peak`, then the decay.

    Decay by the inverse square root is the paper's eq. 3 (section 5.3) at `step + 1`, written as a share of its peak:
    see `paper_peak` of the settings. Linear and cosine decay reach 0 at `max_steps`. The cosine is
    `peak * (1 + cos(pi t)) / 2`, where t is the share of the decay that has passed (Loshchilov and Hutter, 2017,
    without restarts).
    """
    update = step + 1
    warmup = update / warmup_steps
    remaining = (max_steps - step) / max(1, max_steps - warmup_steps)  # share of the decay; above 1 in the warm-up
    remaining = min(1.0, max(0.0, remaining))
    match decay:
        case Decay.inverse_sqrt:
            return peak * min(warmup, math.sqrt(warmup_steps / update))
        case Decay.linear:
            return peak * min(warmup, remaining)
        case Decay.cosine:
            return peak * min(warmup, (1.0 + math.cos(math.pi * (1.0 - remaining))) / 2.0)
        case Decay.constant:
            return peak * min(warmup, 1.0)


def rate_of(recipe: TrainConfig, d_model: int, *, step: int) -> float:
    """The rate at which a training takes step `step`, counted from 0."""
    return learning_rate(
        step,
        peak=recipe.peak(d_model),
        warmup_steps=recipe.warmup_steps,
        decay=recipe.decay,
        max_steps=recipe.max_steps,
    )


def build_optimizer(model: nn.Module, recipe: TrainConfig) -> Optimizer:
    """Fused Adam over every parameter, or Muon for the matrices of the layers and Adam for the others.

    The learning rate is set at each step (`set_rate`).

    An update at rate r with `train.weight_decay` w first takes the share r w of each matrix away, embeddings included
    (AdamW; Loshchilov and Hutter, 2019). Biases and vectors, of norms and of additive scores, are not decayed.
    """
    uses_muon = recipe.optimizer is OptimizerKind.muon
    for_muon: list[nn.Parameter] = []
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.dim() <= 1 or name.endswith("score_vector"):  # a vector for each head, stacked
            vectors.append(parameter)
        elif uses_muon and name.startswith(("encoder.", "decoder.")):
            for_muon.append(parameter)
        else:
            matrices.append(parameter)

    for_adam = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    betas = (recipe.adam_beta1, recipe.adam_beta2)
    if uses_muon:
        return Muon(for_muon, for_adam, weight_decay=recipe.weight_decay, betas=betas, eps=recipe.adam_eps)
    return AdamW(for_adam, lr=0.0, betas=betas, eps=recipe.adam_eps, fused=True)


def set_rate(optimizer: Optimizer, rate: float | Tensor) -> None:
    """Set the learning rate of the next update; a tensor, a scalar in fp32 on the device, is read when that is made."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def updates_applied(optimizer: Optimizer) -> Tensor:
    """How many updates have been applied, a scalar on the device; there must have been a step.

    Adam counts them for each of its parameters. Muon needs no number, and counts none.
    """
    updates: Tensor = next(state["step"] for state in optimizer.state.values() if "step" in state)
    return updates


def moments_by_name(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The moments as `exp_avg/NAME` and `exp_avg_sq/NAME`, and the updates applied; empty before the first step.

    A matrix that Muon moves has no `exp_avg_sq`.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        tensors |= {f"{moment}/{name}": state[moment] for moment in MOMENTS if moment in state}
    if tensors:
        tensors[UPDATES] = updates_applied(optimizer)
    return tensors


def load_moments(model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put back what `moments_by_name` returned, which is empty for a run without an update.

    Raises ValueError unless names, shapes and types are exactly those of this model's moments, every number is finite,
    and no square is negative: fused Adam would read and write outside smaller tensors.
    """
    if not tensors:
        return

    expected = {
        f"{moment}/{name}": parameter
        for name, parameter in model.named_parameters()
        for moment in _moments_of(parameter, optimizer)
    }
    _check_moments(expected, tensors)

    updates = tensors[UPDATES]
    for name, parameter in model.named_parameters():
        moments = _moments_of(parameter, optimizer)
        state = {moment: tensors[f"{moment}/{name}"].to(parameter.device, copy=True) for moment in moments}
        if moments == MOMENTS:
            state["step"] = updates.to(parameter.device, copy=True)
        optimizer.state[parameter] = state


def _moments_of(parameter: nn.Parameter, optimizer: Optimizer) -> tuple[str, ...]:
    """The names of a parameter's moments."""
    is_for_muon = isinstance(optimizer, Muon) and any(parameter is matrix for matrix in optimizer.matrices)
    return (MEANS,) if is_for_muon else MOMENTS


def _check_moments(expected: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> None:
    """Check all that `load_moments` raises ValueError for; `expected` has the parameter of each moment, by its name."""
    # Names.
    differing = tensors.keys() ^ {UPDATES, *expected}
    if differing:
        raise ValueError(f"names of the moments differ: {sorted(differing)[:4]!a:.200}")

    # The number of updates.
    updates = tensors[UPDATES]
    if updates.shape != () or updates.dtype != torch.float32 or not 0.0 <= updates.item() < 2**53:
        raise ValueError(f"{UPDATES} is not a number of updates")

    # Moments.
    for name, parameter in expected.items():
        moment = tensors[name]
        if moment.shape != parameter.shape:
            raise ValueError(f"{name} is {tuple(moment.shape)}, not {tuple(parameter.shape)}")
        if moment.dtype != parameter.dtype:
            raise ValueError(f"{name} is of type {moment.dtype}, not {parameter.dtype}")
        if not bool(torch.isfinite(moment).all()):
            raise ValueError(f"{name} holds numbers that are not finite")
        if name.startswith(f"{SQUARES}/") and bool((moment < 0.0).any()):
            raise ValueError(f"{name} holds squares below zero")


def move_average(average: nn.Module, model: nn.Module, *, decay: float, updates: Tensor, is_applied: Tensor) -> None:
    """Move the weights of `average` towards those of `model`: `a <- d a + (1 - d) w`, if the update was applied.

    `d = min(decay, (1 + updates) / (10 + updates))`, with the updates before this one: the warm-up of TensorFlow's
    ExponentialMovingAverage, without which the initial weights would count for long. `updates` and `is_applied` are
    scalars on the device; nothing here waits for it.
    """
    # 1 - d, or 0 if the update was skipped.
    updates = updates.double()
    weight = 1.0 - ((1.0 + updates) / (10.0 + updates)).clamp(max=decay)
    weight = torch.where(is_applied, weight, 0.0)

    # lerp(a, w, 1 - d) is d a + (1 - d) w.
    averages: list[Tensor] = list(average.parameters())
    weight = weight.to(averages[0].dtype)
    with torch.no_grad():
        torch._foreach_lerp_(averages, list(model.parameters()), [weight] * len(averages))
