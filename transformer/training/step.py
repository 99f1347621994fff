"""One optimiser update: what is differentiated, and how."""

import math
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Adam

from transformer.compute import autocast
from transformer.config.settings import Precision
from transformer.data.batch import Batch
from transformer.data.loader import Step
from transformer.distributed import unsynchronised
from transformer.kernels.loss import linear_cross_entropy
from transformer.loss import smoothed_cross_entropy
from transformer.model.transformer import Transformer
from transformer.seeding import seed_for
from transformer.training.optimizer import set_rate


class Objective(nn.Module):
    """The model under its loss: what data parallelism wraps, so that one `forward` makes one gradient."""

    def __init__(self, model: Transformer, label_smoothing: float) -> None:
        super().__init__()
        self.model, self.label_smoothing = model, label_smoothing
        self._train_hidden = self._hidden

    def compile(self, *, backend: str = "inductor") -> None:
        """Compile the stacks for training; the loss is a kernel already, and dev batches come in too many shapes."""
        self._train_hidden = torch.compile(self._hidden, backend=backend)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The smoothed and the plain loss, summed over the batch's real target tokens.

        Padding is never multiplied by the vocabulary; the few empty slots of a packed batch are, and count nothing.
        """
        if torch.is_grad_enabled():
            real = self._train_hidden(batch)
            return linear_cross_entropy(real, self.model.output, batch.target_out, label_smoothing=self.label_smoothing)
        real = self._hidden(batch)
        return smoothed_cross_entropy(self.model.unembed(real), batch.target_out, label_smoothing=self.label_smoothing)

    def _hidden(self, batch: Batch) -> Tensor:
        """Decoder states of the rows that the loss is asked for, `(N, D)`."""
        memory = self.model.encode(batch.source, batch.source_layout)
        hidden = self.model.decode(
            batch.target_in, batch.target_layout, memory=memory, memory_layout=batch.source_layout
        )
        return hidden.flatten(0, -2).index_select(0, batch.target_rows)


@dataclass(frozen=True)
class StepResult:
    """What an update measured; sums over target tokens."""

    loss_sum: float
    nll_sum: float
    grad_norm: float
    applied: bool  # False: a number was not finite, and the weights are as before
    loss_scale: float  # of this update; 1 but under fp16


def train_step(
    objective: nn.Module,
    optimizer: Adam,
    step: Step,
    *,
    scaler: GradScaler,
    world_size: int,
    rate: float,
    seed: int,
    clip_norm: float | None,
    device: torch.device,
    precision: Precision,
) -> StepResult:
    """Accumulate the gradient of a step's micro-batches, divided by its global target tokens, and apply Adam once.

    `objective` is an Objective, perhaps wrapped so that the ranks' gradients are averaged: hence the factor
    `world_size`. Dropout is seeded for each micro-batch, so that a resumed run, or one on other ranks, draws the same
    masks. A gradient that is not finite is never applied, and lowers the scale of `scaler`; the ranks agree, since they
    share it. The sums are this rank's.
    """
    optimizer.zero_grad(set_to_none=True)
    sums = torch.zeros(2, device=device, dtype=torch.float64)
    last, _ = step.micro_batches[-1]
    for m, batch in step.micro_batches:
        torch.manual_seed(seed_for(seed, step.epoch, step.index, m))
        with nullcontext() if m == last else unsynchronised(objective):
            with autocast(device, precision):
                loss_sum, nll_sum = objective(batch.to(device))
            scaler.scale(loss_sum * (world_size / step.target_tokens)).backward()
        sums += torch.stack((loss_sum.detach(), nll_sum))
    scaler.unscale_(optimizer)  # before the norm is measured
    norm = _clip(objective.parameters(), clip_norm)
    loss, nll, grad_norm = torch.stack((*sums, norm.double())).tolist()  # one wait of the host, while Adam is to come
    applied = math.isfinite(grad_norm)
    if applied:
        set_rate(optimizer, rate)
        optimizer.step()
    loss_scale = scaler.get_scale()
    scaler.update()
    return StepResult(loss, nll, grad_norm, applied, loss_scale)


def _clip(parameters: Iterable[nn.Parameter], clip_norm: float | None) -> Tensor:
    """The gradient's norm before clipping."""
    parameters = list(parameters)
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if clip_norm is not None:
        nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
    return norm
