"""The mean of the weights of several checkpoints (section 6.1): of the last, or of the best.

Where checkpoints hold a moving average of the weights, the mean is of these averages. It is written as a checkpoint of
its own, `averaged`.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from transformer.checkpoint import Checkpoint, commit, newest, open_checkpoint
from transformer.config.jobs import AverageJob, TrainJob
from transformer.config.primitives import to_json
from transformer.config.settings import Metric, TrainConfig
from transformer.errors import CheckpointError, InputError
from transformer.records import Progress
from transformer.run_dir import MODEL, RunDir, list_steps, lock_run

log = logging.getLogger(__name__)


def average_checkpoints(
    run_dir: Path, steps: list[int], *, run_step: int | None = None, job: TrainJob | None = None
) -> Checkpoint:
    """Write the mean over these steps as `averaged`; its state says which of them went into it.

    Those that are damaged or not finite are left out. `run_step` is the step of the run that the mean stands for: it is
    used until the run has gone further (None: the newest step that went into it). `job` has the settings that the mean
    keeps, the search among them (None: those of the newest checkpoint). Raises CheckpointError if none is sound.
    """
    mean, used = mean_weights(run_dir, steps)

    # Write it, with vocabulary and data as the newest has them. The settings are those of `job` where they are given: a
    # search may have been chosen after that checkpoint was written.
    last = used[-1]
    last_state = last.run_state()
    used_steps = [checkpoint.step for checkpoint in used]
    state = replace(last_state, averaged=used_steps, training=None)
    log.info("averaged the checkpoints of steps: %s", ", ".join(map(str, used_steps)))
    return commit(
        run_dir,
        step=last.step if run_step is None else run_step,
        tensors={MODEL: mean},
        state=to_json(state),
        config=last.config if job is None else to_json(job),
        averaged=True,
    )


def mean_weights(run_dir: Path, steps: Sequence[int]) -> tuple[dict[str, Tensor], list[Checkpoint]]:
    """The mean of the weights over these steps, and the checkpoints that went into it.

    Those that are damaged or not finite are left out. Raises CheckpointError if none is sound.
    """
    # Add up, in float64.
    sums: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    used: list[Checkpoint] = []
    for step in steps:
        try:
            checkpoint = open_checkpoint(RunDir(run_dir).checkpoint(step))
            tensors = checkpoint.weights()
            shapes = {name: tensor.shape for name, tensor in tensors.items()}
            if used and shapes != {name: total.shape for name, total in sums.items()}:
                raise CheckpointError(f"{checkpoint.path}: its tensors differ from those of {used[0].path.name}")
        except CheckpointError as error:
            log.warning("%s; it is left out of the average", error)
            continue

        for name, tensor in tensors.items():
            sums[name] = sums[name] + tensor if used else tensor.double()
            dtypes[name] = tensor.dtype
        used.append(checkpoint)
    if not used:
        raise CheckpointError(f"{run_dir}: none of the checkpoints {steps} can be averaged")

    # Divide.
    return {name: (total / len(used)).to(dtypes[name]) for name, total in sums.items()}, used


def scheduled_steps(run_dir: Path, *, save_every: int, last: int) -> list[int]:
    """The newest `last` checkpoints that were due by `save_every`, or are of the run's last step; oldest first.

    A checkpoint that a signal or a new best score left in between is not among them: the average must not depend on
    when a run was interrupted. Where some of them are gone, the log says so.
    """
    steps = list_steps(run_dir)
    scheduled = [step for step in steps if step % save_every == 0 or step == steps[-1]][-last:]
    due = min(last, math.ceil(steps[-1] / save_every)) if steps else 0
    if len(scheduled) < due:
        log.warning("%d checkpoints should be averaged, but only %d exist (see train.keep_last)", due, len(scheduled))
    return scheduled


def first_of_average(recipe: TrainConfig) -> int:
    """The step at which the average will begin of a training that comes to its last step, and keeps all it is to."""
    due = math.ceil(recipe.max_steps / recipe.save_every)
    return max(1, due - recipe.average + 1) * recipe.save_every


def warn_of_early_average(first: int, last: int) -> None:
    """Say in the log where an average begins early: the weights move too far for their mean to be a good model."""
    if first < last / 2:
        log.warning(
            "the average begins at step %d of %d, early in the run, and may translate worse than the last checkpoint "
            "(checkpoint=last): save more often (train.save_every), or average fewer (train.average)",
            first,
            last,
        )


def best_kept_steps(run_dir: Path, progress: Progress, *, metric: Metric, count: int) -> list[int]:
    """The `count` best validated checkpoints of those that are there, oldest first. Raises InputError for none.

    Training keeps `train.keep_best` of them. Where one is gone, the next best takes its place, and the log says so.
    """
    ranked = progress.best_steps(metric)
    saved = set(list_steps(run_dir))
    kept = [step for step in ranked if step in saved]
    if not kept:
        raise InputError(f"{run_dir}: none of its checkpoints has been validated; use last={count}")

    gone = sorted(step for step in ranked[:count] if step not in saved)
    if gone:
        log.warning(
            "of the %d best checkpoints, those of steps %s are gone; train.keep_best=%d would have kept them",
            count,
            ", ".join(map(str, gone)),
            count,
        )
    elif len(kept) < count:
        log.warning("only %d validated checkpoints exist, not %d: see train.validate_every", len(kept), count)
    return sorted(kept[:count])


def average(job: AverageJob) -> Checkpoint:
    """Average the newest checkpoints of a run, or the best. Raises InputError where there are none."""
    run_dir = Path(job.run_dir)
    if not run_dir.is_dir():
        raise InputError(f"run_dir={job.run_dir}: no such directory; `transformer train` makes one")
    with lock_run(run_dir):
        checkpoint = newest(run_dir, open_checkpoint)
        if checkpoint is None:
            raise InputError(f"{run_dir}: there is no checkpoint to average yet")
        recipe = checkpoint.settings("train", TrainConfig)
        run = RunDir(run_dir)
        run_job = run.read_record().config if run.record.exists() else None

        # The best, if that is asked for; else the last.
        if job.best is not None:
            training = checkpoint.run_state().training
            progress = Progress() if training is None else training.progress
            steps = best_kept_steps(run_dir, progress, metric=recipe.metric, count=job.best)
            return average_checkpoints(run_dir, steps, run_step=checkpoint.step, job=run_job)

        steps = scheduled_steps(run_dir, save_every=recipe.save_every, last=job.last or recipe.average)
        return average_checkpoints(run_dir, steps, job=run_job)
