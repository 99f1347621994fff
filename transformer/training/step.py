"""One optimiser update: what is differentiated, and how."""

from collections.abc import Callable, Iterable
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
from transformer.kernels.fused_loss import fused_linear_cross_entropy
from transformer.kernels.loss import linear_cross_entropy
from transformer.loss import smoothed_cross_entropy
from transformer.model.transformer import Transformer
from transformer.records import Progress
from transformer.seeding import seed_for
from transformer.training.optimizer import set_rate

EVAL_LOGITS = 2**24  # that are held at a time when the loss is only measured

# What differs from one packed batch to the next, by its name inside Objective._hidden. The compiler is told before it
# starts; else it would take the first batch's numbers for constants, and compile again when others come.
DYNAMIC = r"L\['batch'\]\.(source|target)_layout\.(offsets|longest)"


class Objective(nn.Module):
    """The model under its loss: what data parallelism wraps, so that one `forward` makes one gradient.

    `loss_rows` are multiplied by the vocabulary at a time in the fused loss of a GPU; None: the other one is taken.
    """

    def __init__(self, model: Transformer, label_smoothing: float, *, loss_rows: int | None = None) -> None:
        super().__init__()
        self.model, self.label_smoothing, self.loss_rows = model, label_smoothing, loss_rows
        self._compiled: Callable[[Batch], Tensor] | None = None  # `_hidden`, compiled

    def compile(self, *, backend: str = "inductor", cut_at_buckets: bool = True) -> None:
        """Compile the stacks for training; the loss is a kernel already, and dev batches come in too many shapes.

        Among several ranks the compiler cuts the stacks where DDP's buckets end, so that gradients leave early. It
        refuses FlexAttention there: `cut_at_buckets=False` leaves the stacks whole.
        """
        sources = torch.compiler.config.dynamic_sources
        if DYNAMIC not in sources:
            torch.compiler.config.dynamic_sources = f"{sources},{DYNAMIC}" if sources else DYNAMIC
        compiled: Callable[[Batch], Tensor] = torch.compile(self._hidden, backend=backend)
        if not cut_at_buckets:
            compiled = torch._dynamo.config.patch(optimize_ddp=False)(compiled)
        self._compiled = compiled

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The smoothed loss, to be differentiated, and the plain one, summed over the batch's real target tokens.

        Padding is never multiplied by the vocabulary; the few empty slots of a packed batch are, and count nothing.
        """
        hidden = self._hidden(batch) if self._compiled is None else self._compiled(batch)
        matrix, targets = self.model.output, batch.target_out
        if self.loss_rows is None:
            return linear_cross_entropy(hidden, matrix, targets, label_smoothing=self.label_smoothing)
        return fused_linear_cross_entropy(
            hidden, matrix, targets, label_smoothing=self.label_smoothing, rows=self.loss_rows
        )

    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The same two sums without a gradient, in float64, by the reference of the loss.

        A few rows are multiplied by the vocabulary at a time: the logits of a whole batch would be its largest tensor.
        """
        hidden = self._hidden(batch)  # (N, D)
        rows = max(1, EVAL_LOGITS // self.model.vocab_size)
        sums = torch.zeros(2, dtype=torch.float64, device=hidden.device)
        for part, targets in zip(torch.split(hidden, rows), torch.split(batch.target_out, rows), strict=True):
            logits = self.model.unembed(part)  # (rows, V)
            sums += torch.stack(smoothed_cross_entropy(logits, targets, label_smoothing=self.label_smoothing))
        return sums[0], sums[1]

    def _hidden(self, batch: Batch) -> Tensor:
        """Decoder states of the rows that the loss is asked for, `(N, D)`."""
        memory = self.model.encode(batch.source, batch.source_layout)
        hidden = self.model.decode(
            batch.target_in, batch.target_layout, memory=memory, memory_layout=batch.source_layout
        )
        hidden = hidden.flatten(0, -2)
        return hidden if batch.target_rows is None else hidden.index_select(0, batch.target_rows)


@dataclass(frozen=True)
class StepResult:
    """What an update measured, as scalars on the device: reading one on the host waits for the device.

    The sums are over this rank's target tokens; norm and flag are the same on every rank.
    """

    loss_sum: Tensor  # float64
    nll_sum: Tensor  # float64
    grad_norm: Tensor  # float64
    applied: Tensor  # bool; False: the gradient was not finite, and the update was skipped


class GradientNorms:
    """The norms of the updates since the host last looked, on the device, so that it need not wait at every step."""

    def __init__(self) -> None:
        self._norms: list[Tensor] = []

    def add(self, norm: Tensor) -> None:
        """One more update: the norm of its gradient, a scalar."""
        self._norms.append(norm)

    def read_into(self, progress: Progress) -> None:
        """Count the updates up to the last one that `progress` knows of, which waits for the device."""
        if not self._norms:
            return
        norms = torch.stack(self._norms).tolist()
        self._norms.clear()
        for step, norm in enumerate(norms, progress.step - len(norms) + 1):
            progress.add_norm(norm, step=step)


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
    masks. An update whose gradient is not finite is skipped on the device: weights and moments stay as they were, and
    the scale of `scaler` falls. So is one whose loss is not finite on any rank: it spoils the gradient, which the ranks
    share, and so they agree. Nothing here waits for the device.
    """
    step.await_copy()
    optimizer.zero_grad(set_to_none=True)
    sums = torch.zeros(2, device=device, dtype=torch.float64)
    last, _ = step.micro_batches[-1]
    for m, batch in step.micro_batches:
        torch.manual_seed(seed_for(seed, step.epoch, step.index, m))
        with nullcontext() if m == last else unsynchronised(objective):
            with autocast(device, precision):
                loss_sum, nll_sum = objective(batch.to(device))
            factor = world_size / step.target_tokens + 0.0 * loss_sum.detach()  # NaN where the loss is not finite
            scaler.scale(loss_sum * factor).backward()
        sums += torch.stack((loss_sum.detach(), nll_sum))

    scaler.unscale_(optimizer)  # before the norm is measured
    norm = _clip(objective.parameters(), clip_norm).double()
    is_finite = torch.isfinite(norm)
    set_rate(optimizer, rate)
    _apply(optimizer, is_finite)
    scaler.update()
    return StepResult(loss_sum=sums[0], nll_sum=sums[1], grad_norm=norm, applied=is_finite)


def _apply(optimizer: Adam, is_finite: Tensor) -> None:
    """One update, or none where the flag on the device is False: fused Adam then leaves everything as it was."""
    optimizer.found_inf = (~is_finite).float()  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


def _clip(parameters: Iterable[nn.Parameter], clip_norm: float | None) -> Tensor:
    """The gradient's norm before clipping."""
    parameters = list(parameters)
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if clip_norm is not None:
        nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
    return norm
