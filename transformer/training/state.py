"""Everything that a step changes: weights, their moving average, the moments, the loss scale, and the progress.

`tensors` and `to_record` make a checkpoint of it, `restore` reads one. They are side by side here, so that one reads
what the others write.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from transformer.checkpoint import Checkpoint, check_weights, first_not_finite
from transformer.compute import dtype_of, loss_scaler
from transformer.config.settings import ModelConfig, Precision, TrainConfig
from transformer.errors import CheckpointError, NumericalError
from transformer.model.transformer import Transformer, load_parameters, parameters_by_name
from transformer.records import LossScale, Progress, TrainingRecord, WindowTotals
from transformer.run_dir import EMA, MODEL, OPTIMIZER
from transformer.seeding import seed_for
from transformer.training.optimizer import build_optimizer, load_moments, moments_by_name
from transformer.training.warm_start import initialise
from transformer.training.window import GradientNorms, LogWindow
from transformer.vocabulary import VocabSize, describe_vocab_size


def draw_model(config: ModelConfig, *, seed: int, vocab_size: VocabSize) -> Transformer:
    """The model before the first step of a training with this seed."""
    torch.manual_seed(seed_for(seed))
    return Transformer(config, vocab_size)


@dataclass
class TrainState:
    """What training changes. Everything else about a run stays as it is: see `Run`."""

    model: Transformer
    ema: Transformer | None  # the moving average of the weights
    optimizer: Optimizer
    scaler: GradScaler
    progress: Progress
    window: LogWindow  # what was measured since the last log line
    norms: GradientNorms  # of the updates that are not yet counted in `progress`: see `read_device`

    @classmethod
    def at_start(
        cls,
        config: ModelConfig,
        recipe: TrainConfig,
        *,
        vocab_size: VocabSize,
        device: torch.device,
        precision: Precision,
        source: Checkpoint | None,
    ) -> "TrainState":
        """The state before the first step, the same on every rank.

        The weights are those of `source`, or drawn from the seed.
        """
        model = draw_model(config, seed=recipe.seed, vocab_size=vocab_size).to(device, dtype_of(precision))
        if source is not None:
            initialise(model, source)

        return cls(
            model=model,
            ema=None if recipe.ema_decay is None else copy.deepcopy(model),
            optimizer=build_optimizer(model, recipe),
            scaler=loss_scaler(device, precision),
            progress=Progress(),
            window=LogWindow(device),
            norms=GradientNorms(),
        )

    @property
    def eval_model(self) -> Transformer:
        """The weights that validate and translate: their moving average where there is one."""
        return self.model if self.ema is None else self.ema

    @property
    def loss_scale(self) -> float | None:
        """The scale of the next update's loss; None where it is not scaled. Waits for the device."""
        return float(self.scaler.get_scale()) if self.scaler.is_enabled() else None

    def read_device(self) -> None:
        """Count the updates since the last call in `progress`. The host waits until the device has made them."""
        self.norms.read_into(self.progress)

    def add_seconds(self, seconds: float) -> None:
        """Time that steps took, measured when the host has waited for the device."""
        self.progress.seconds += seconds
        self.window.add_seconds(seconds)

    # ---- to a checkpoint, and back

    @property
    def checkpoint_bytes(self) -> int:
        """What a checkpoint's tensors take on the disk at most: Adam has two moments of everything, Muon fewer."""
        weights = sum(parameter.nbytes for parameter in self.model.parameters())
        return weights * (3 if self.ema is None else 4)

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """The tensors of a checkpoint. Raises NumericalError where a number is not finite: that is never committed."""
        tensors: dict[str, Mapping[str, Tensor]] = {MODEL: parameters_by_name(self.model)}
        if self.ema is not None:
            tensors[EMA] = parameters_by_name(self.ema)
        tensors[OPTIMIZER] = moments_by_name(self.model, self.optimizer)

        for group in tensors.values():
            bad = first_not_finite(group)
            if bad is not None:
                raise NumericalError(f"step {self.progress.step} is not saved: the numbers in {bad} are not finite")
        return tensors

    def to_record(self, window: WindowTotals, *, dev_digest: str, plan_version: int) -> TrainingRecord:
        """What a checkpoint holds beside tensors; `window` are the sums over all ranks."""
        scaler = self.scaler.state_dict()  # empty where the loss is not scaled
        return TrainingRecord(
            progress=self.progress,
            window=window,
            loss_scale=LossScale(scaler["scale"], scaler["_growth_tracker"]) if scaler else None,
            dev_digest=dev_digest,
            plan_version=plan_version,
        )

    def restore(self, checkpoint: Checkpoint, *, rank: int) -> TrainingRecord:
        """Go on where the checkpoint was committed. Raises CheckpointError where it does not fit this model."""
        state = checkpoint.run_state()
        training = state.training

        # The tensors.
        try:
            if training is None:
                raise ValueError("it is an average, which cannot be resumed")
            if state.vocab_sizes != self.model.vocab_sizes:
                raise ValueError(f"it has a vocabulary of {describe_vocab_size(state.vocab_sizes)}")
            _load_finite(self.model, checkpoint, MODEL)
            if self.ema is not None:
                _load_finite(self.ema, checkpoint, EMA)
            moments = checkpoint.tensors(OPTIMIZER)
            if training.progress.step > 0 and not moments:
                raise ValueError("the moments of the optimizer are missing")
            load_moments(self.model, self.optimizer, moments)
        except ValueError as error:
            raise CheckpointError(
                f"{checkpoint.path}: does not fit this model: {error}; move it away to go on from the one before"
            ) from None

        # Everything else.
        scale = training.loss_scale
        if scale is not None and self.scaler.is_enabled():
            current = self.scaler.state_dict()
            self.scaler.load_state_dict({**current, "scale": scale.scale, "_growth_tracker": scale.growth_tracker})
        self.progress = training.progress
        self.window.restore(training.window, rank=rank)
        return training


def _load_finite(model: Transformer, checkpoint: Checkpoint, name: str) -> None:
    """Load the weights in a file of the checkpoint. Raises ValueError if they are not finite or do not fit."""
    tensors = checkpoint.tensors(name)
    check_weights(tensors)
    load_parameters(model, tensors)
