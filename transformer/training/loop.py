"""The training loop: read `train` and `train_loop`, and you have read the framework.

    train       open_run -> train_loop -> finish             of `start`, this module, and `finish`
    train_loop  train_step, over and over                    of `step`
                between two steps: log, validate, commit, stop

A step is one optimizer update; a position is (epoch, chapter, step in the chapter). The device runs ahead of the host,
which reads what the device has measured only where something is due. Every rank runs the same control flow, and rank 0
alone writes.
"""

import logging
from collections.abc import Collection, Generator, Sequence
from contextlib import closing
from dataclasses import replace

from transformer.compute import memory_errors_named
from transformer.config.jobs import TrainJob, checked
from transformer.config.settings import TrainConfig
from transformer.data.loader import Position, Step, load_steps
from transformer.decoding.batched import BatchedDecoder
from transformer.distributed import Vote, collective_errors_named, join_world
from transformer.errors import InputError, NumericalError, Stopped
from transformer.evaluation.sets import write_sets
from transformer.machine import HeapTrimmer
from transformer.records import Progress, Results
from transformer.tracking import Sink
from transformer.training.finish import finish, is_finished
from transformer.training.guard import Interrupted, NumbersGuard, Signals, stopped
from transformer.training.history import MARKED
from transformer.training.monitor import Monitor
from transformer.training.optimizer import move_average, rate_of, updates_applied
from transformer.training.process import process_settings_restored
from transformer.training.proof import LAUNCHES
from transformer.training.samples import open_trackers, show_scores
from transformer.training.saving import check_disk, save, with_advice
from transformer.training.start import Run, find_device, open_run
from transformer.training.step import Objective, StepResult, train_step
from transformer.training.validate import validate

log = logging.getLogger(__name__)


def train(job: TrainJob) -> Results:
    """Train until `train.max_steps` or until patience ends, from wherever the run directory stands.

    Then average the last checkpoints, score the test sets, and write and return the results; a finished run returns
    those that it has. Every rank returns the same. Raises InputError for bad data and for a field that cannot be,
    LockedError for a directory in use, CheckpointError where it cannot resume, StorageError, NumericalError, PeerError,
    and Stopped after a signal.
    """
    job = checked(TrainJob, job)  # before anything is written
    if type(job) is not TrainJob:  # its further keys would be in run.json, where no training has them
        raise InputError(
            f"train takes a TrainJob, not a {type(job).__name__}: make one with transformer.compose('train', ...)"
        )
    with (
        process_settings_restored(),
        join_world(find_device(job)) as world,
        memory_errors_named("starting or finishing", remedy="end what else uses it, or choose a smaller model"),
        open_run(job, world) as run,
    ):
        world.from_rank0(lambda: write_sets(run.directory, {**run.dev_texts, **run.test}))
        if world.from_rank0(lambda: is_finished(run)):
            log.info("%s: finished at step %d already; nothing is left to train", job.run_dir, run.progress.step)
            return finish(run)

        with open_trackers(run) as sinks:
            train_loop(run, sinks=sinks)
            run.computation.make_room()
            results = finish(run)
            show_scores(results, sinks)
        return results


def train_loop(
    run: Run, marked: Collection[int] = MARKED, *, until: int | None = None, sinks: Sequence[Sink] = ()
) -> None:
    """Take one step after the other, until the last one or until patience ends; or `until` a step, then uncommitted.

    history.json gets a mark at each commit and at the steps that are `marked`. The sinks are shown what TensorBoard is.

    Raises Stopped after a signal, with the step in progress committed; several ranks agree on it one step later.
    """
    config = run.job.train
    progress = run.progress
    world = run.world
    check_disk(run)

    with (
        Signals() as signals,
        Monitor(run, marked=marked, sinks=sinks) as monitor,
        closing(_steps(run)) as steps,
        closing(run.stores),  # closed before the steps are, whose thread may wait for an epoch
    ):
        _make_up_validation(run, monitor, signals)

        guard = NumbersGuard(progress)
        vote = Vote(world)
        heap = HeapTrimmer()
        stopping = world.any(signals.requested)
        monitor.begin()
        while not (stopping or progress.has_ended(config) or progress.step == until):
            # One update.
            with collective_errors_named(), memory_errors_named("training", remedy=_smaller_batches(run)):
                step = monitor.wait_for(steps)
                with monitor.profiled():
                    rate = rate_of(config, run.job.model.d_model, step=progress.step)
                    result = train_step(run.computation, step, world_size=world.size, rate=rate, seed=config.seed)
            _record_step(run, step, result)
            monitor.stepped(step, result)

            # What is due after it. The host reads what the device has measured only where something is.
            is_validation_due = _is_validation_due(config, progress)
            is_commit_due = progress.step % config.save_every == 0
            if is_validation_due or is_commit_due or monitor.is_read_due:
                _read_device(run, guard, monitor)
            monitor.show()

            # Give freed memory back, which a CPU's heap would keep.
            if run.device.type == "cpu":
                heap.trim_if_due()

            # Validate.
            is_among_best = False
            if is_validation_due:
                is_among_best = _validate(run, monitor, signals)
                monitor.leave_out()

            # Stop? Where the ranks meet anyway, they agree at once; elsewhere, on what was asked one step before.
            wants_stop = signals.requested or run.computation.failure is not None
            meets = is_validation_due or is_commit_due
            stopping = world.any(wants_stop) if meets else vote.ask(wants_stop)

            # Commit, once for all reasons; first mark the step: after a crash, no commit is without its mark.
            has_ended = progress.has_ended(config)
            commits = is_commit_due or is_among_best or stopping or has_ended
            if commits or monitor.marks(progress.step):
                _read_device(run, guard, monitor)
                monitor.mark(step, result)
                if has_ended and not monitor.is_log_due:
                    monitor.log()  # the last window may be a short one
                if commits:
                    save(run, monitor)
                monitor.leave_out()

        if stopping or world.any(signals.requested):  # a signal may have come while the last step was committed
            raise _stopped(run)


def _stopped(run: Run) -> Stopped:
    """The error that ends a run after a step that is committed: a signal came, or a step could not be recorded."""
    failures = run.world.gather(run.computation.failure)
    failure = next((text for text in failures if text is not None), None)
    if failure is None:
        return stopped(run.progress.step)
    run.prover.leave(run.resolved, failure)
    return Stopped(f"a step could not be recorded ({failure}), step {run.progress.step} is saved: {LAUNCHES}")


def _steps(run: Run) -> Generator[Step, None, None]:
    """The steps of this rank, from the position that training has come to."""
    return load_steps(
        run.stores,
        run.batching,
        rank=run.world.rank,
        world_size=run.world.size,
        position=Position(run.progress.epoch, run.progress.chapter, run.progress.step_in_chapter),
        prefetch=run.job.train.prefetch,
        device=run.device,
    )


def _smaller_batches(run: Run) -> str:
    """The remedy where memory runs out in a step, or while the dev loss is measured."""
    now = run.resolved.max_tokens
    if run.job.train.fit_memory:
        return f"set train.max_tokens below {now} in place of train.fit_memory; the command goes on"
    return f"lower train.max_tokens (now {now}); the same command goes on"


# ---- after a step ---------------------------------------------------------------------------------------------------


def _record_step(run: Run, step: Step, result: StepResult) -> None:
    """Bring the moving average and the progress up to a step. Nothing here waits for the device."""
    state = run.state

    decay = run.job.train.ema_decay
    if state.ema is not None and decay is not None:
        updates_before = updates_applied(state.optimizer) - result.applied.float()
        move_average(state.ema, state.model, decay=decay, updates=updates_before, is_applied=result.applied)

    state.progress.advance(
        epoch=step.epoch,
        chapter=step.chapter,
        step_in_chapter=step.index + 1,
        sentences=step.sentences,
        target_tokens=step.target_tokens,
    )
    state.norms.add(result.grad_norm)


def _read_device(run: Run, guard: NumbersGuard, monitor: Monitor) -> None:
    """Bring what the device has measured to the host, and check that training is sound.

    Raises NumericalError, on every rank, after too many skipped updates. The position is committed first: skipped
    updates leave the weights as they were.
    """
    monitor.read()
    try:
        guard.check(run.progress, loss_scale=run.state.loss_scale)
    except NumericalError as error:
        save(run, monitor)
        raise with_advice(error, run) from None


# ---- validation -----------------------------------------------------------------------------------------------------


def _is_validation_due(config: TrainConfig, progress: Progress) -> bool:
    """At every `validate_every` steps and at the last one, unless this step has been validated already."""
    is_done = bool(progress.validations) and progress.validations[-1].step == progress.step
    return not is_done and (progress.step % config.validate_every == 0 or progress.step >= config.max_steps)


def _make_up_validation(run: Run, monitor: Monitor, signals: Signals) -> None:
    """Validate where a signal cut a validation short, or the process died in it."""
    progress = run.progress
    if not (progress.step and _is_validation_due(run.job.train, progress)):
        return

    _validate(run, monitor, signals)
    if progress.has_ended(run.job.train) and not run.state.window.is_empty:
        monitor.log()  # patience has ended, and no step will come to log the window
    save(run, monitor)


def _validate(run: Run, monitor: Monitor, signals: Signals) -> bool:
    """Validate, and show what was measured. Returns whether this step is among the best, whose checkpoints are kept.

    A validation that a signal cuts short is not recorded, and so is due again.
    """
    job = run.job
    model = run.state.eval_model
    run.computation.make_room()
    greedy = replace(job.search, beam_size=1)  # a fraction of the beam's time, and it ranks checkpoints much alike
    decoder = BatchedDecoder.of(model, greedy, device=run.device, precision=run.resolved.precision)
    try:
        with memory_errors_named("measuring the dev loss", remedy=_smaller_batches(run)):
            decoder = run.prover.prove_search(decoder)
            validation, hypotheses = validate(
                Objective(model, job.train.label_smoothing),
                decoder,
                run.dev,
                run.world,
                tokenizer=run.tokenizers.target,
                step=run.progress.step,
                max_tokens=run.resolved.max_tokens,
                tgt_langs={name: job.data.tgt_lang_of(name) for name in run.dev},
                tokenize=job.data.bleu_tokenize,
                check=signals.check,
            )
    except Interrupted:
        return False

    is_best = run.progress.record(validation, job.train.metric)
    monitor.validated(validation, hypotheses, is_best=is_best)
    return validation.step in run.progress.best_steps(job.train.metric)[: job.train.keep_best]
