"""Checkpoints of a run: whether there is room for them, what they hold, which of them stay.

    check_disk   before the first step
    save         the step in progress -> checkpoints/step-N, and the ones that are not to be kept are removed

Rank 0 writes; every rank calls.
"""

import logging
from collections.abc import Mapping

from torch import Tensor

from transformer.checkpoint import check_space, commit, rotate
from transformer.compute import memory_errors_named
from transformer.config.primitives import to_json
from transformer.config.settings import TrainConfig
from transformer.data.plan import plan_version
from transformer.errors import NumericalError
from transformer.records import Best, CheckpointState, Progress
from transformer.run_dir import RunDir, list_steps
from transformer.tracking import HIDDEN_BY_BAR
from transformer.training.guard import advice
from transformer.training.monitor import Monitor
from transformer.training.start import Run
from transformer.vocabulary import own_source_size

log = logging.getLogger(__name__)


def check_disk(run: Run) -> None:
    """Raise StorageError unless there is room for a checkpoint: now, not after the first hours.

    An earlier process may have died before it had removed old checkpoints: that is made up for first, and frees space.
    """
    config = run.job.train
    progress = run.progress
    world = run.world
    if progress.step:
        world.from_rank0(lambda: _rotate(run.directory, config, progress))
    if not progress.has_ended(config):
        world.from_rank0(lambda: check_space(run.directory.path, run.state.checkpoint_bytes))


def save(run: Run, monitor: Monitor) -> None:
    """Commit the step in progress; rank 0 writes, and removes the checkpoints that are not to be kept.

    Raises NumericalError, on every rank, where a number is not finite.
    """
    window = run.state.window.totals(run.world)
    tensors = _finite_tensors(run)

    def write() -> None:
        monitor.flush()
        state = CheckpointState(
            vocab_size=run.tokenizers.target.vocab_size,
            data_digest=run.data_digest,
            source_vocab_size=own_source_size(run.tokenizers.vocab_sizes),
            training=run.state.to_record(
                window,
                dev_digest=run.dev_digest,
                plan_version=plan_version(run.job, run.batching.mixture),
            ),
        )
        commit(
            run.directory.path,
            step=run.progress.step,
            tensors=tensors,
            state=to_json(state),
            config=to_json(run.job),
        )
        log.info("step %d: saved", run.progress.step, extra=HIDDEN_BY_BAR)
        _rotate(run.directory, run.job.train, run.progress)

    with memory_errors_named("saving", remedy="end what else uses it"):
        run.world.from_rank0(write)


def _finite_tensors(run: Run) -> dict[str, Mapping[str, Tensor]]:
    """What a checkpoint holds. Raises NumericalError, on every rank, where a number is not finite on one of them."""
    tensors = None
    error = NumericalError(f"step {run.progress.step} is not saved: numbers on another rank are not finite")
    try:
        tensors = run.state.tensors()
    except NumericalError as own_error:
        error = own_error

    if run.world.any(tensors is None) or tensors is None:
        raise with_advice(error, run)
    return tensors


def _rotate(directory: RunDir, config: TrainConfig, progress: Progress) -> None:
    """Keep the newest checkpoints of the schedule and the best ones; best.json names the best of those that stay.

    Where the schedule has too few yet, the newest others stay, too: `train.save_every` may have changed at a resume.
    """
    steps = list_steps(directory.path)
    by_worth = sorted(steps, key=lambda step: (step % config.save_every == 0, step))
    best = progress.best_steps(config.metric)
    kept = {*by_worth[-config.keep_last :], *best[: config.keep_best], progress.step}

    # best.json is written before anything is removed: whenever the process dies, the checkpoint that it names is there.
    best_kept = next((step for step in best if step in kept and step in steps), None)
    if best_kept is None:
        directory.best.unlink(missing_ok=True)
    else:
        directory.write_best(Best(best_kept, config.metric))
    rotate(directory.path, kept)


def with_advice(error: NumericalError, run: Run) -> NumericalError:
    """The error with what to do next added; every rank must call it."""
    return NumericalError(f"{error}: {run.world.from_rank0(lambda: advice(run.directory.path))}")
