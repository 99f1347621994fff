"""How far a run has come, and what it measured since it last said so."""

import logging
import math
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from transformer.config.primitives import from_json
from transformer.config.settings import Metric, ModelConfig, TrainConfig
from transformer.cost import peak_flops, step_flops
from transformer.data.loader import Step
from transformer.distributed import World
from transformer.errors import CheckpointError
from transformer.tracking import Tracker
from transformer.training.step import StepResult

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Validation:
    """One validation; losses are means over target tokens."""

    step: int
    loss: float
    nll: float
    bleu: float
    chrf: float

    def to_json(self) -> dict[str, float | None]:
        """JSON has no NaN: null stands for a number that is not finite."""
        return {name: value if math.isfinite(value) else None for name, value in asdict(self).items()}

    def goodness(self, metric: Metric) -> float:
        """The larger the better; a number that is not finite is the worst."""
        value = self.bleu if metric is Metric.bleu else -self.loss
        return value if math.isfinite(value) else -math.inf

    def scalars(self) -> dict[str, float]:
        """What TensorBoard shows."""
        return {
            "dev/loss": self.loss,
            "dev/perplexity": perplexity(self.nll),
            "dev/smoothed_perplexity": perplexity(self.loss),
            "dev/bleu": self.bleu,
            "dev/chrf": self.chrf,
        }

    def describe(self) -> str:
        """What the log says."""
        losses = f"loss {self.loss:.3f}, perplexity {perplexity(self.nll):.2f}"
        return f"{losses}, greedy BLEU {self.bleu:.2f}, chrF {self.chrf:.2f}"


def perplexity(loss: float) -> float:
    """`exp(loss)`, or infinity where that has no number."""
    return math.exp(loss) if loss < 700 else math.inf


@dataclass
class Progress:
    """All that is needed beside weights and moments to go on exactly."""

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    sentences: int = 0
    target_tokens: int = 0
    seconds: float = 0.0
    skipped: int = 0  # updates whose gradient was not finite
    streak: int = 0  # of them, in a row
    stalled: int = 0  # validations since the best
    validations: list[Validation] = field(default_factory=list)

    @property
    def updates(self) -> int:
        """The updates that were applied."""
        return self.step - self.skipped

    def count(self, step: Step, result: StepResult, *, seconds: float) -> None:
        """One more step is done."""
        self.step += 1
        self.epoch, self.step_in_epoch = step.epoch, step.index + 1
        self.sentences += step.sentences
        self.target_tokens += step.target_tokens
        self.seconds += seconds
        self.skipped += not result.applied
        self.streak = 0 if result.applied else self.streak + 1

    def judge(self, validation: Validation, metric: Metric) -> bool:
        """Enter a validation; whether it is better than all before."""
        best = max((v.goodness(metric) for v in self.validations), default=-math.inf)
        is_best = validation.goodness(metric) > best
        self.stalled = 0 if is_best else self.stalled + 1
        self.validations.append(validation)
        return is_best

    def best(self, metric: Metric) -> list[int]:
        """The steps of the validations, best first; the earlier one of equals."""
        finite = [v for v in self.validations if v.goodness(metric) > -math.inf]
        return [v.step for v in sorted(finite, key=lambda v: -v.goodness(metric))]

    def ended(self, config: TrainConfig) -> bool:
        """Whether there is nothing left to train: the last step is done, or patience has ended."""
        return self.step >= config.max_steps or (config.patience is not None and self.stalled >= config.patience)

    def to_json(self) -> dict[str, Any]:
        """For state.json."""
        return asdict(self) | {"validations": [validation.to_json() for validation in self.validations]}

    @classmethod
    def from_json(cls, data: Any) -> "Progress":
        """What `to_json` gave. Raises CheckpointError for anything else."""
        try:
            rows = [{name: math.nan if x is None else x for name, x in row.items()} for row in data["validations"]]
            return from_json(cls, {**data, "validations": rows})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"state.json: the progress in it is not readable: {error}") from None


class Window:
    """Means over the steps since the last log line; the gradient's, over the updates that were applied."""

    def __init__(self, model: ModelConfig, vocab_size: int, device: torch.device) -> None:
        self._model, self._vocab_size = model, vocab_size
        self._peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self._clear()

    def _clear(self) -> None:
        self._loss = self._nll = self._norm = self._seconds = self._waited = self._flops = 0.0
        self._applied = self._target = self._source = self._slots = 0

    def add(self, step: Step, result: StepResult, *, seconds: float, waited: float) -> None:
        """One more step, which took `seconds`, `waited` of them for data."""
        self._applied += result.applied
        self._loss += result.loss_sum
        self._nll += result.nll_sum
        self._norm += result.grad_norm if result.applied else 0.0
        self._target += step.target_tokens
        self._source += step.source_tokens
        self._slots += step.slots
        self._seconds += seconds
        self._waited += waited
        length = (step.source_tokens + step.target_tokens) / (2 * step.sentences)
        self._flops += step_flops(
            self._model, self._vocab_size, source=step.source_tokens, target=step.target_tokens, mean_length=length
        )

    def flush(self, tracker: Tracker, progress: Progress, rate: float, world: World) -> None:
        """Log the means over the steps and the ranks, and begin again."""
        loss, nll = (world.sum(torch.tensor([self._loss, self._nll], dtype=torch.float64)) / self._target).tolist()
        speed, flops = self._target / self._seconds, self._flops / self._seconds
        norm = self._norm / self._applied if self._applied else math.nan
        values = {
            "train/loss": loss,
            "train/perplexity": perplexity(nll),
            "train/smoothed_perplexity": perplexity(loss),
            "train/rate": rate,
            "train/gradient_norm": norm,
            "train/epoch": float(progress.epoch),
            "speed/target_tokens_per_second": speed,
            "speed/padding_share": 1.0 - (self._source + self._target) / self._slots,
            "speed/data_wait_share": self._waited / self._seconds,
            "speed/model_tflops": flops / 1e12,
            "speed/utilisation": None if self._peak is None else flops / self._peak,
        }
        tracker.scalars(progress.step, values)
        log.info(
            "step %d: loss %.3f, perplexity %.2f, rate %.2e, gradient %.2f, %.0f target tokens/s, epoch %d, %s",
            progress.step,
            loss,
            perplexity(nll),
            rate,
            norm,
            speed,
            progress.epoch,
            time.strftime("%H:%M:%S", time.gmtime(progress.seconds)),
        )
        self._clear()
