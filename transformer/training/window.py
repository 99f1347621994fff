"""What training measures between two log lines, and how it is logged.

The device measures each step, and the host reads it only now and then, because reading waits for the device. Until
then, `LogWindow` sums what is logged as means, and `GradientNorms` keeps what is counted step by step.
"""

import logging
import math
import time
from dataclasses import replace

import torch
from torch import Tensor

from transformer.cost import peak_flops
from transformer.data.loader import Step
from transformer.distributed import World
from transformer.loss import perplexity
from transformer.records import DevScores, Progress, Validation, WindowTotals
from transformer.run_dir import DEV
from transformer.tracking import HIDDEN_BY_BAR, Tracker
from transformer.training.step import StepResult

log = logging.getLogger(__name__)


class Clock:
    """A stopwatch."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """The seconds since the last call, or since the clock was made."""
        now = time.perf_counter()
        seconds = now - self._last
        self._last = now
        return seconds


class LogWindow:
    """Sums over the steps since the last log line; a checkpoint holds them, so that a resume does not cut a window."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.clear()

    def clear(self) -> None:
        """Begin again."""
        # On the device, of the applied updates: loss, nll, gradient norm, their number, and their target tokens.
        self._sums = torch.zeros(5, dtype=torch.float64, device=self._device)
        self._host = WindowTotals()  # everything else

    def add(self, step: Step, result: StepResult, *, waited: float, flops: float) -> None:
        """One more step, which `waited` so many seconds for data; its loss and norm count unless it was skipped."""
        applied = result.applied.double()
        tokens = applied * step.target_tokens
        measured = torch.stack((result.loss_sum, result.nll_sum, result.grad_norm, applied, tokens))  # (5,)
        self._sums = self._sums + torch.where(result.applied, measured, 0.0)

        self._host.target_tokens += step.target_tokens
        self._host.source_tokens += step.source_tokens
        self._host.slots += step.slots
        self._host.waited += waited
        self._host.flops += flops

    @property
    def is_empty(self) -> bool:
        """Whether there has been no step since the last log line."""
        return self._host.target_tokens == 0

    def add_seconds(self, seconds: float) -> None:
        """Time that the steps took, measured where the host had waited for the device."""
        self._host.seconds += seconds

    def totals(self, world: World) -> WindowTotals:
        """The sums over the ranks; every rank must call it. Waits for the device."""
        loss, nll, norm, applied, tokens = self._sums.tolist()
        loss, nll = world.sum(torch.tensor([loss, nll], dtype=torch.float64)).tolist()
        return replace(
            self._host,
            loss=loss,
            nll=nll,
            gradient_norm=norm,
            applied=int(applied),
            applied_tokens=int(tokens),
        )

    def restore(self, totals: WindowTotals, *, rank: int) -> None:
        """Go on from the sums of a checkpoint; what was summed over the ranks is rank 0's from now on."""
        loss, nll = (totals.loss, totals.nll) if rank == 0 else (0.0, 0.0)
        sums = [loss, nll, totals.gradient_norm, float(totals.applied), float(totals.applied_tokens)]
        self._sums = torch.tensor(sums, dtype=torch.float64, device=self._device)
        self._host = replace(totals)


class GradientNorms:
    """The gradient norms of the updates since the host last read them, on the device."""

    def __init__(self) -> None:
        self._norms: list[Tensor] = []

    def add(self, norm: Tensor) -> None:
        """One more update: the norm of its gradient, a scalar."""
        self._norms.append(norm)

    def read_into(self, progress: Progress) -> None:
        """Count these updates, of which the last one is step `progress.step`. Waits for the device."""
        if not self._norms:
            return

        norms = torch.stack(self._norms).tolist()
        self._norms.clear()
        first_step = progress.step - len(norms) + 1
        for step, norm in enumerate(norms, first_step):
            progress.add_norm(norm, step=step)


def report_window(
    totals: WindowTotals, tracker: Tracker, progress: Progress, *, rate: float, device: torch.device, ranks: int
) -> None:
    """Log the means over a window that ends at this step; files count epochs from 0, what people read from 1.

    All figures are those of all ranks together; the utilisation is of as many GPUs of the kind of `device`.
    """
    # Means over the updates that were applied; NaN if all were skipped.
    tokens = totals.applied_tokens or math.nan
    loss = totals.loss / tokens
    nll = totals.nll / tokens
    norm = totals.gradient_norm / (totals.applied or math.nan)

    # Rates over all steps.
    target_tokens_per_second = totals.target_tokens / totals.seconds
    flops_per_second = totals.flops / totals.seconds
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None

    values = {
        "train/loss": loss,
        "train/perplexity": perplexity(nll),
        "train/smoothed_perplexity": perplexity(loss),
        "train/rate": rate,
        "train/gradient_norm": norm,
        "train/gradient_spikes": float(progress.spikes),
        "train/skipped_updates": float(progress.skipped),
        "train/epoch": float(progress.epoch),
        "speed/target_tokens_per_second": target_tokens_per_second,
        "speed/padding_share": 1.0 - (totals.source_tokens + totals.target_tokens) / totals.slots,
        "speed/data_wait_share": totals.waited / totals.seconds,
        "speed/model_tflops": flops_per_second / 1e12,
        "speed/utilisation": None if peak is None else flops_per_second / (ranks * peak),
    }
    tracker.scalars(progress.step, values)
    log.info(
        "step %d: loss %.3f, perplexity %.2f, rate %.2e, gradient %.2f, %.0f target tokens/s, epoch %d, %s",
        progress.step,
        loss,
        perplexity(nll),
        rate,
        norm,
        target_tokens_per_second,
        progress.epoch + 1,
        _clock_time(progress.seconds),
        extra=HIDDEN_BY_BAR,
    )


def bar_text(totals: WindowTotals, progress: Progress) -> str:
    """What a progress bar shows: loss and speed over a window that ends at this step, and the last validation's BLEU.

    The loss is NaN where all updates of the window were skipped.
    """
    loss = totals.loss / (totals.applied_tokens or math.nan)
    text = f"loss {loss:.3f}, {totals.target_tokens / totals.seconds:,.0f} tokens/s"
    if progress.validations:
        text += f", BLEU {progress.validations[-1].bleu:.2f}"
    return text


def _clock_time(seconds: float) -> str:
    """Hours, minutes and seconds; after a day the hours go on, as in 25:01:01."""
    minutes, seconds_left = divmod(int(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours:02d}:{minutes_left:02d}:{seconds_left:02d}"


def validation_scalars(validation: Validation) -> dict[str, float]:
    """A validation as TensorBoard and metrics.jsonl hold it; by several dev sets, those of each behind their mean."""
    scalars: dict[str, float] = {}
    of_sets: dict[str, Validation | DevScores] = {DEV: validation, **validation.sets}
    for name, scores in of_sets.items():
        scalars |= {
            f"{name}/loss": scores.loss,
            f"{name}/perplexity": perplexity(scores.nll),
            f"{name}/smoothed_perplexity": perplexity(scores.loss),
            f"{name}/bleu": scores.bleu,
            f"{name}/chrf": scores.chrf,
        }
    return scalars


def describe(scores: Validation | DevScores) -> str:
    """A validation, or what a dev set came to in one, as the log shows it."""
    losses = f"loss {scores.loss:.3f}, perplexity {perplexity(scores.nll):.2f}"
    return f"{losses}, greedy BLEU {scores.bleu:.2f}, chrF {scores.chrf:.2f}"
