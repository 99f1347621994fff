"""A run that begins with the weights of another one, under `init_from`.

The other model is compared with this job's before anything is written. The optimizer, the schedule and the order of the
data begin anew.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformer.checkpoint import Checkpoint, find_checkpoint, is_checkpoint, load_weights
from transformer.config.jobs import TrainJob
from transformer.config.keys import as_typed
from transformer.config.primitives import to_json
from transformer.config.settings import ModelConfig, Positions
from transformer.errors import CheckpointError, InputError
from transformer.model.transformer import Transformer, load_parameters

log = logging.getLogger(__name__)

NOT_ARCHITECTURE = {"dropout", "attention_dropout", "relu_dropout"}  # settings of the model that training alone reads


def find_source(job: TrainJob) -> Checkpoint | None:
    """The checkpoint at `init_from`; where that is a run, the one that it translates with. None without `init_from`.

    Raises InputError if there is none, or its model is another than this job's; CheckpointError if it is damaged.
    """
    if job.init_from is None:
        return None

    path = Path(job.init_from)
    source = load_weights(path) if is_checkpoint(path) else find_checkpoint(path, "auto")

    there = _architecture_of(source.settings("model", ModelConfig))
    here = _architecture_of(job.model)
    differing = [key for key in here if key in there and here[key] != there[key]]
    if differing:
        values = [(key, as_typed(there[key]), as_typed(here[key])) for key in differing]
        differences = ", ".join(f"model.{key} is {theirs} there and {ours} here" for key, theirs, ours in values)
        remedy = " ".join(f"model.{key}={theirs}" for key, theirs, _ in values)
        raise InputError(f"init_from={job.init_from}: another model ({differences}): set {remedy}")
    return source


def _architecture_of(config: ModelConfig) -> dict[str, Any]:
    """The settings that the parameters, and what is computed with them, depend on.

    Widths of heads are filled in. A decoder as deep as the encoder is null, so that a difference in depth is one key.
    """
    decoder_layers = None if config.decoder_layers == config.n_layers else config.decoder_layers
    filled = to_json(replace(config, d_k=config.key_width, d_v=config.value_width, n_decoder_layers=decoder_layers))
    free = NOT_ARCHITECTURE if config.positions is Positions.learned else NOT_ARCHITECTURE | {"max_positions"}
    return {key: value for key, value in filled.items() if key not in free}


def initialise(model: Transformer, source: Checkpoint) -> None:
    """Load the weights of `source` into the model. Raises CheckpointError where they do not fit."""
    try:
        load_parameters(model, source.weights())
    except ValueError as error:
        raise CheckpointError(f"{source.path}: does not fit this model: {error}") from None
    log.info("starting with the weights of %s, step %d", source.path, source.step)
