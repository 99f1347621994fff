"""One step, that is one optimizer update: the loss of a batch, its gradient, and the optimizer.

`Objective` is the model under its loss. `train_step` adds up its gradients over the micro-batches of a step, and
applies them; `Computation` has both halves. The loop calls it; the learning rate comes from `optimizer`.

`N` rows, the target positions of a batch for which there is a loss; `D` d_model, `V` vocabulary.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from transformer.compute import autocast, seed_draws
from transformer.config.settings import Precision
from transformer.data.batch import Batch
from transformer.data.loader import Step
from transformer.distributed import unsynchronised
from transformer.kernels.loss import linear_cross_entropy
from transformer.kernels.triton_loss import triton_linear_cross_entropy
from transformer.loss import smoothed_cross_entropy
from transformer.model.transformer import Transformer
from transformer.seeding import seed_for
from transformer.training.optimizer import set_rate

EVAL_LOGITS = 2**24  # about so many logits are held at a time where the loss is only measured

# What differs from one packed batch to the next, by its name inside Objective._hidden. The compiler is told before it
# starts; otherwise it would take the numbers of the first batch for constants, and compile again for the next ones.
DYNAMIC = r"L\['batch'\]\.(source|target)_layout\.(offsets|longest)"


class Objective(nn.Module):
    """The model under its loss: the module that DDP wraps, which wants one `forward` for each `backward`.

    `loss_rows`: rows of a block of logits in the loss written in Triton; None takes the one in plain torch.
    """

    def __init__(self, model: Transformer, label_smoothing: float, *, loss_rows: int | None = None) -> None:
        super().__init__()
        self.model = model
        self.label_smoothing = label_smoothing
        self.loss_rows = loss_rows
        self._compiled: Callable[[Batch], Tensor] | None = None  # `_hidden`, compiled

    def compile(self, *, backend: str = "inductor") -> None:
        """Compile encoder and decoder for training.

        The loss is a kernel already, and the batches of the dev set have too many shapes to compile for. Among several
        ranks the compiler cuts the stacks where DDP's buckets end, so that gradients leave early.
        """
        sources = torch.compiler.config.dynamic_sources
        if DYNAMIC not in sources:
            torch.compiler.config.dynamic_sources = f"{sources},{DYNAMIC}" if sources else DYNAMIC
        self._compiled = torch.compile(self._hidden, backend=backend)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The smoothed loss, to be differentiated, and the plain one, summed over the batch's real target tokens.

        No logits are computed for padding. They are for the few empty slots of a packed batch, whose loss is 0.
        """
        hidden = self._hidden(batch) if self._compiled is None else self._compiled(batch)  # (N, D)
        matrix, bias = self.model.output_map()
        targets = batch.target_out
        if self.loss_rows is None:
            return linear_cross_entropy(hidden, matrix, targets, bias=bias, label_smoothing=self.label_smoothing)
        return triton_linear_cross_entropy(
            hidden, matrix, targets, bias=bias, label_smoothing=self.label_smoothing, rows=self.loss_rows
        )

    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The smoothed and the plain loss without a gradient, by the plain formula, summed in float64.

        The logits of a whole batch would be its largest tensor, so they are computed for a few rows at a time.
        """
        hidden = self._hidden(batch)  # (N, D)
        sums = torch.zeros(2, dtype=torch.float64, device=hidden.device)  # smoothed, plain

        rows_at_once = max(1, EVAL_LOGITS // self.model.vocab_size)
        parts = zip(torch.split(hidden, rows_at_once), torch.split(batch.target_out, rows_at_once), strict=True)
        for rows, targets in parts:
            logits = self.model.unembed(rows)  # (rows, V)
            sums += torch.stack(smoothed_cross_entropy(logits, targets, label_smoothing=self.label_smoothing))
        return sums[0], sums[1]

    def _hidden(self, batch: Batch) -> Tensor:
        """The decoder's output at the target positions of which the loss is asked for, `(N, D)`."""
        memory = self.model.encode(batch.source, batch.source_layout)
        hidden = self.model.decode(
            batch.target_in, batch.target_layout, memory=memory, memory_layout=batch.source_layout
        )
        hidden = hidden.flatten(0, -2)  # (B T, D), or (N, D) as it was
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


@dataclass
class Computation:
    """What the device does in a step: the gradient of each micro-batch is added up, and applied at the end.

    Nothing here waits for the device, or depends on what it has computed.
    """

    averages: ClassVar[bool] = True  # the gradients of several ranks; else it adds them up

    objective: nn.Module  # an Objective, perhaps wrapped so that the ranks' gradients are averaged
    optimizer: Optimizer
    scaler: GradScaler
    clip_norm: float | None
    device: torch.device
    precision: Precision

    def take(
        self, batches: Sequence[tuple[int, Batch]], *, share: float | Tensor, rate: float | Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One update, by the gradient of all batches. Each batch comes with its dropout seed.

        Returns the sums of their smoothed and plain losses, `(2,)` in float64, and what `update` does. Where there are
        several ranks, they share the gradient once, in the backward pass of the last batch.
        """
        self.optimizer.zero_grad(set_to_none=True)
        sums = torch.zeros(2, device=self.device, dtype=torch.float64)
        for number, (seed, batch) in enumerate(batches, 1):
            seed_draws(seed, self.device)
            is_last = number == len(batches)
            with nullcontext() if is_last else unsynchronised(self.objective):
                sums += self.add_gradient(batch, share)

        norm, is_applied = self.update(rate)
        return sums, norm, is_applied

    def make_room(self) -> None:
        """Free the memory held between steps, when others need it."""

    @property
    def failure(self) -> str | None:
        """Why the process must end after this step, though the numbers are right; None: it need not."""
        return None

    def add_gradient(self, batch: Batch, share: float | Tensor) -> Tensor:
        """Add the gradient of a micro-batch's loss times `share`. Returns its smoothed and its plain loss, `(2,)`."""
        with autocast(self.device, self.precision):
            loss_sum, nll_sum = self.objective(batch)
        factor = share + 0.0 * loss_sum.detach()  # NaN where the loss is not finite
        self.scaler.scale(loss_sum * factor).backward()
        return torch.stack((loss_sum.detach(), nll_sum))

    def update(self, rate: float | Tensor, *, is_wanted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Apply the gradient, if it is finite. Returns its norm, before it is clipped, and whether it was applied.

        `is_wanted`: a flag on the device; nothing is applied where it is False.
        """
        # The norm, with the loss scale removed.
        self.scaler.unscale_(self.optimizer)
        norm = _clip(self.objective.parameters(), self.clip_norm).double()
        is_applied = torch.isfinite(norm)
        if is_wanted is not None:
            is_applied &= is_wanted

        # The update, unless it is skipped.
        set_rate(self.optimizer, rate)
        with autocast(self.device, self.precision):  # Muon multiplies matrices
            _apply(self.optimizer, is_applied)
        self.scaler.update()
        return norm, is_applied


def train_step(computation: Computation, step: Step, *, world_size: int, rate: float, seed: int) -> StepResult:
    """Accumulate the gradient of a step's micro-batches, divided by its global target tokens, and make one update.

    Where the objective is wrapped for several ranks, their gradients are averaged: hence a factor `world_size`.
    Dropout is seeded for each micro-batch, so that a resumed run, or one on other ranks, draws the same masks.

    An update whose gradient is not finite is skipped on the device: weights and moments stay as they were, and the
    scale of the loss falls. An update whose loss is not finite on some rank is skipped, too. Such a loss makes the
    gradient NaN, which the ranks share, and so they agree. Nothing here waits for the device.
    """
    step.await_copy()
    batches = [(seed_for(seed, *step.seeds, m), batch.to(computation.device)) for m, batch in step.micro_batches]
    share = (world_size if computation.averages else 1) / step.target_tokens
    sums, norm, is_applied = computation.take(batches, share=share, rate=rate)
    return StepResult(loss_sum=sums[0], nll_sum=sums[1], grad_norm=norm, applied=is_applied)


def _apply(optimizer: Optimizer, is_applied: Tensor) -> None:
    """One update, or none where the flag on the device is False: the optimizer then leaves everything as it was."""
    optimizer.found_inf = (~is_applied).float()  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


def _clip(parameters: Iterable[nn.Parameter], clip_norm: float | None) -> Tensor:
    """Clip the gradient to `clip_norm`, unless that is None. Returns the norm that it had before."""
    parameters = list(parameters)
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if clip_norm is not None:
        nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
    return norm
