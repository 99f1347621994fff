"""A run that begins with the model of another one, or with a published one, under `init_from`.

The model is the other run's, except for its dropout. The optimizer, the schedule and the order of the data begin anew.
"""

import logging
from dataclasses import fields, replace
from pathlib import Path

from transformer.checkpoint import Checkpoint, find_checkpoint, is_checkpoint, load_weights
from transformer.config.jobs import OF_TRAINING, TrainJob
from transformer.config.keys import as_typed
from transformer.config.settings import ModelConfig, Positions
from transformer.errors import CheckpointError, InputError
from transformer.model.transformer import Transformer, load_parameters
from transformer.run_names import resolve_init_from

log = logging.getLogger(__name__)


def find_source(job: TrainJob) -> Checkpoint | None:
    """The checkpoint at `init_from`; of a run, the one that it translates with. None without `init_from`.

    What was published is imported first, unless it is already. Raises InputError if there is none, CheckpointError if
    it is damaged, and StorageError.
    """
    if job.init_from is None:
        return None

    path = Path(resolve_init_from(job).init_from or "")
    return load_weights(path) if is_checkpoint(path) else find_checkpoint(path, "auto")


def with_model_of(source: Checkpoint, job: TrainJob) -> TrainJob:
    """The job with the model of a checkpoint, but for what training alone reads. Raises InputError.

    Learned positions are weights, so that their number is the source's, too.
    """
    theirs = source.settings("model", ModelConfig)
    free = OF_TRAINING if theirs.positions is not Positions.learned else OF_TRAINING - {"max_positions"}
    values = {field.name: getattr(theirs, field.name) for field in fields(ModelConfig) if field.name not in free}
    changed = {name: value for name, value in values.items() if value != getattr(job.model, name)}
    if not changed:
        return job

    shown = ", ".join(f"{name} {as_typed(value)}" for name, value in changed.items())
    log.info("init_from=%s: the model takes its settings from there: %s", job.init_from, shown)
    try:
        return replace(job, model=replace(job.model, **values))
    except ValueError as error:
        raise InputError(f"init_from={job.init_from}: {error}") from error


def initialise(model: Transformer, source: Checkpoint) -> None:
    """Load the weights of `source` into the model. Raises CheckpointError where they do not fit."""
    try:
        load_parameters(model, source.weights())
    except ValueError as error:
        raise CheckpointError(f"{source.path}: does not fit this model: {error}") from None
    log.info("starting with the weights of %s, step %d", source.path, source.step)
