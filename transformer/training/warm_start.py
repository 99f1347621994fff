"""A run that begins with the weights of another: its model, checked against this job's before anything is written."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformer.checkpoint import Checkpoint, load_checkpoint
from transformer.config.jobs import TrainJob
from transformer.config.primitives import to_json
from transformer.config.settings import ModelConfig, Positions
from transformer.decoding.translator import find_checkpoint
from transformer.errors import CheckpointError, InputError
from transformer.model.transformer import Transformer, load_parameters

log = logging.getLogger(__name__)

MAY_DIFFER = {"dropout", "attention_dropout", "relu_dropout"}


def find_source(job: TrainJob) -> Checkpoint | None:
    """The checkpoint of `init_from`: itself, or what a run translates with. None where a run begins from nothing.

    Raises InputError if there is none, or its model is another than this job's; CheckpointError if it is damaged.
    """
    if job.init_from is None:
        return None
    place = Path(job.init_from)
    is_checkpoint = (place / "MANIFEST.json").exists()
    source = load_checkpoint(place) if is_checkpoint else find_checkpoint(place, "auto")
    theirs, ours = _essence(source.settings("model", ModelConfig)), _essence(job.model)
    differences = [key for key in ours if key in theirs and ours[key] != theirs[key]]
    if differences:
        found = ", ".join(f"model.{key} is {theirs[key]} there and {ours[key]} here" for key in differences)
        remedy = " ".join(f"model.{key}={theirs[key]}" for key in differences)
        raise InputError(f"init_from={job.init_from}: another model ({found}): set {remedy}")
    return source


def _essence(config: ModelConfig) -> dict[str, Any]:
    """What fixes the parameters and the function that they make, with the widths of heads filled in."""
    filled = to_json(replace(config, d_k=config.key_width, d_v=config.value_width))
    free = MAY_DIFFER if config.positions is Positions.learned else MAY_DIFFER | {"max_positions"}
    return {key: value for key, value in filled.items() if key not in free}


def initialise(model: Transformer, source: Checkpoint) -> None:
    """Give the model the weights that the source translates with. Raises CheckpointError where they do not fit."""
    try:
        load_parameters(model, source.weights())
    except ValueError as error:
        raise CheckpointError(f"{source.path}: does not fit this model: {error}") from None
    log.info("starting with the weights of %s, step %d", source.path, source.step)
