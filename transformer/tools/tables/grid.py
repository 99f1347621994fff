"""Many trainings, one after another: the rows of a table, each with several seeds.

    with_changes    a job and what a row changes -> the job of the row
    run_grid        a job for each run -> the results of each, or the error that ended it

A run that is finished is not trained again, one that was interrupted goes on, and one that fails is reported while the
others go on: the same call, again, does what is left. A run that another process holds is one that fails.
"""

import logging
from collections.abc import Mapping
from typing import Any

from transformer import registry
from transformer.config.jobs import TrainJob
from transformer.config.keys import as_typed, leaves, names_of_plugins
from transformer.config.primitives import from_json, to_json
from transformer.errors import InputError, PeerError, Rank0Error, Stopped, TransformerError
from transformer.records import Results
from transformer.training.loop import train

log = logging.getLogger(__name__)

Changes = Mapping[str, Any]  # settings as an experiment file nests them: {"model": {"n_heads": 1}}


def run_grid(jobs: Mapping[str, TrainJob]) -> dict[str, Results | Exception]:
    """Train each job in its own run directory, in the order given.

    Returns, under the same names, the results of each run or the error that ended it. Raises Stopped after a signal,
    and PeerError where another process of the same training is gone.
    """
    outcomes = {}
    for number, (name, job) in enumerate(jobs.items(), 1):
        log.info("run %d of %d: %s, in %s", number, len(jobs), name, job.run_dir)
        outcomes[name] = _run(name, job)
    return outcomes


def _run(name: str, job: TrainJob) -> Results | Exception:
    """One run. An error of any kind ends it and not the grid: the other runs do not depend on it."""
    registry.allow(*names_of_plugins(job), settings=job.plugins)
    try:
        return train(job)
    except TransformerError as error:
        if isinstance(error, Stopped | PeerError) and not isinstance(error, Rank0Error):
            raise
        log.error("run %s failed: %s", name, error)
        return error
    except Exception as error:
        log.exception("run %s failed, which is a bug", name)
        return error


def with_changes(job: TrainJob, changes: Changes, *, place: str) -> TrainJob:
    """The job with some settings changed, checked as it is when it is composed.

    `place` names the changes in an error. Raises InputError for an unknown key or a bad value.
    """
    try:
        changed = from_json(TrainJob, _merge(to_json(job), changes))
        changed.check_plugins()
        return changed
    except ValueError as error:
        raise InputError(f"{place}: {str(error).removeprefix('TrainJob.')}") from error


def _merge(settings: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    """Nested settings, with those of `changes` put in their places."""
    merged = dict(settings)
    for key, value in changes.items():
        before = merged.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            merged[key] = _merge(before, value)  # a group of settings
        else:
            merged[key] = value
    return merged


def differences(base: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The changes that turn `base` into `other`; both are nested settings with the same keys."""
    changes = {}
    for key, value in other.items():
        before = base[key]
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            in_group = differences(before, value)
            if in_group:
                changes[key] = in_group
        elif value != before:
            changes[key] = value
    return changes


def describe_changes(changes: Changes) -> str:
    """The changes as one types them: `model.n_heads=1 train.label_smoothing=0.0`."""
    return " ".join(f"{key}={as_typed(value)}" for key, value in leaves(changes).items())
