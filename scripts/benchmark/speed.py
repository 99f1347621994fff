"""How long a training step takes, predicted from what it does.

    model and batch -> step_work -> Work
    a file          -> read_rates -> Rates of this machine      Rates.seconds(work) is the prediction

The time of a step grows with three numbers that are known before: the FLOPs of its matrix products, the bytes that are
written and read between them, and the parameters that are updated. How much a machine needs for each of them is
measured once, by `predict.py`, and holds for models that were not measured.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from transformer.compute import product_dtype
from transformer.config.primitives import from_json
from transformer.config.settings import Device, ModelConfig, Precision, require
from transformer.cost import count_parameters, step_flops
from transformer.errors import InputError
from transformer.records import Resolved
from transformer.tools.memory import estimate_memory


@dataclass(frozen=True)
class Work:
    """What a training step does."""

    flops: float  # of the matrix products
    bytes: float  # that the forward pass leaves for the backward pass, and the logits
    parameters: float  # that are updated


@dataclass(frozen=True)
class Rates:
    """The seconds that a machine takes for each part of the work.

    In steps of one size, FLOPs grow with the parameters, so that a measurement cannot tell which of the two takes the
    time. The rates therefore hold for steps of that size alone.
    """

    device: Device
    precision: Precision
    tokens_per_step: int  # with which they were measured
    seconds_per_flop: float
    seconds_per_byte: float
    seconds_per_parameter: float

    def __post_init__(self) -> None:
        rates = (self.seconds_per_flop, self.seconds_per_byte, self.seconds_per_parameter)
        require(min(rates) >= 0 and max(rates) > 0, f"rates {rates} must be 0 or more, and not all 0")

    def seconds(self, work: Work) -> float:
        """How long a step with this work takes."""
        return (
            self.seconds_per_flop * work.flops
            + self.seconds_per_byte * work.bytes
            + self.seconds_per_parameter * work.parameters
        )


def step_work(
    config: ModelConfig, vocab_size: int, *, resolved: Resolved, source: int, target: int, mean_length: float
) -> Work:
    """The work of a step over `source` and `target` real tokens in sentences of `mean_length` tokens."""
    memory = estimate_memory(
        config,
        vocab_size,
        resolved=resolved,
        slots=(source + target) // 2,
        mean_length=mean_length,
        has_ema=False,
    )
    logits = (
        target * vocab_size * product_dtype(resolved.precision).itemsize
    )  # of which training holds a block at a time
    return Work(
        flops=step_flops(config, vocab_size, source=source, target=target, mean_length=mean_length),
        bytes=memory.activations + logits,
        parameters=count_parameters(config, vocab_size).total,
    )


def read_rates(path: Path, resolved: Resolved, *, tokens_per_step: int) -> Rates:
    """The rates that a file has for this device, precision and size of a step.

    Raises InputError where it has none, or cannot be read.
    """
    try:
        document = json.loads(path.read_bytes())
        measured = [from_json(Rates, item, complete=True) for item in document["rates"]]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(f"rates={path}: cannot be read ({error}): scripts/benchmark/predict.py writes one") from error

    for rates in measured:
        is_wanted = rates.device is resolved.device and rates.precision is resolved.precision
        if not is_wanted:
            continue
        if rates.tokens_per_step != tokens_per_step:
            raise InputError(
                f"rates={path}: the rates were measured in steps of {rates.tokens_per_step} tokens: measure them with "
                f"scripts/benchmark/predict.py --tokens {tokens_per_step}"
            )
        return rates

    # There are none for this machine.
    wanted = f"{resolved.device.name} in {resolved.precision.name}"
    known = ", ".join(f"{rates.device.name} in {rates.precision.name}" for rates in measured)
    others = f", only for {known}" if known else ""
    raise InputError(f"rates={path}: it has no rates for {wanted}{others}: set train.precision")
