"""The mean of the last checkpoints' weights (section 6.1), or of their moving averages: the model that translates."""

import logging
from pathlib import Path

from torch import Tensor

from transformer.checkpoint import Checkpoint, commit, list_steps, load_checkpoint, lock_run, newest, step_path
from transformer.config.jobs import AverageJob
from transformer.config.settings import TrainConfig
from transformer.errors import CheckpointError, InputError

log = logging.getLogger(__name__)


def average_checkpoints(run_dir: Path, steps: list[int]) -> Checkpoint:
    """Write `run_dir/averaged`, the mean over these steps, less those that are damaged; its state says which.

    Sums are in float64. Raises CheckpointError if none is sound.
    """
    sums: dict[str, Tensor] = {}
    used: list[int] = []
    for step in steps:
        try:
            checkpoint = load_checkpoint(step_path(run_dir, step))
        except CheckpointError as error:
            log.warning("%s; it is left out of the average", error)
            continue
        tensors = checkpoint.weights()
        sums = {name: sums[name] + tensor if used else tensor.double() for name, tensor in tensors.items()}
        used.append(step)
    if not used:
        raise CheckpointError(f"{run_dir}: none of the checkpoints {steps} can be averaged")
    mean = {name: (total / len(used)).to(tensors[name].dtype) for name, total in sums.items()}
    state = {"averaged": used} | {key: checkpoint.state[key] for key in ("vocab_size", "data_digest")}
    log.info("averaged %d checkpoints: steps %s", len(used), ", ".join(map(str, used)))
    return commit(run_dir, step=used[-1], tensors={"model": mean}, state=state, config=checkpoint.config, averaged=True)


def regular_steps(run_dir: Path, *, save_every: int, last: int) -> list[int]:
    """The newest `last` checkpoints of the schedule, oldest first, and the run's last step.

    One that a signal or a new best score left in between is not among them: the average must not depend on when a run
    was interrupted.
    """
    steps = list_steps(run_dir)
    return [step for step in steps if step % save_every == 0 or step == steps[-1]][-last:]


def average(job: AverageJob) -> Checkpoint:
    """The mean of a run's newest checkpoints, written to the run. Raises InputError where there are none."""
    run_dir = Path(job.run_dir)
    if not run_dir.is_dir():
        raise InputError(f"run_dir={job.run_dir}: no such directory; `transformer train` makes one")
    with lock_run(run_dir):
        checkpoint = newest(run_dir)
        if checkpoint is None:
            raise InputError(f"{run_dir}: there is no checkpoint to average yet")
        recipe = checkpoint.settings("train", TrainConfig)
        steps = regular_steps(run_dir, save_every=recipe.save_every, last=job.last or recipe.average)
        return average_checkpoints(run_dir, steps)
