"""The training loop: read `train` and `train_loop`, and you have read the framework.

    train       open_run -> train_loop -> finish             of `start`, this module, and `finish`
    train_loop  train_step, over and over                    of `step`
                between two steps: log, validate, commit, stop

A step is one optimizer update; a position is (epoch, chapter, step in the chapter). The device runs ahead of the host,
which reads what the device has measured only where something is due. Every rank runs the same control flow, and rank 0
alone writes.
"""

import logging
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import replace

from torch import Tensor

from transformer.checkpoint import check_space, commit, rotate
from transformer.compute import memory_errors_named
from transformer.config.jobs import TrainJob, checked
from transformer.config.primitives import to_json
from transformer.config.settings import TrainConfig
from transformer.cost import step_flops
from transformer.data.loader import Position, Step, load_steps
from transformer.data.plan import plan_version, sample_epoch
from transformer.decoding.batches import Batches
from transformer.distributed import Vote, collective_errors_named, join_world
from transformer.errors import InputError, NumericalError, Stopped
from transformer.evaluation.sets import write_sets
from transformer.files import MANIFEST
from transformer.machine import HeapTrimmer
from transformer.plugins import Sink
from transformer.records import Best, CheckpointState, Progress, Results
from transformer.run_dir import DEV, RunDir, list_steps
from transformer.tracking import HIDDEN_BY_BAR, ProgressBar, Tracker, progress_bar
from transformer.training.finish import finish, is_finished
from transformer.training.guard import Interrupted, NumbersGuard, Signals, advice, stopped
from transformer.training.history import MARKED, add_mark, begin_history
from transformer.training.optimizer import move_average, rate_of, updates_applied
from transformer.training.process import process_settings_restored
from transformer.training.profile import profiled
from transformer.training.proof import LAUNCHES
from transformer.training.samples import open_trackers, show_samples, show_scores
from transformer.training.start import Run, find_device, open_run
from transformer.training.step import Objective, StepResult, train_step
from transformer.training.validate import validate
from transformer.training.window import Clock, bar_text, describe, report_window, validation_scalars
from transformer.vocabulary import own_source_size

log = logging.getLogger(__name__)

READ_EVERY = 20  # steps after which the host reads what the device has counted, at the latest


def train(job: TrainJob) -> Results:
    """Train until `train.max_steps` or until patience ends, from wherever the run directory stands.

    Then average the last checkpoints, score the test sets, and write and return the results; a finished run returns
    those that it has. Every rank returns the same. Raises InputError for bad data and for a field that cannot be,
    LockedError for a directory in use, CheckpointError where it cannot resume, StorageError, NumericalError, PeerError,
    and Stopped after a signal.
    """
    job = checked(TrainJob, job)  # before anything is written
    if type(job) is not TrainJob:  # its further keys would be in run.json, where no training has them
        raise InputError(f"a {type(job).__name__} is for another command: transformer.compose('train', ...)")
    with (
        process_settings_restored(),
        join_world(find_device(job)) as world,
        memory_errors_named("starting or finishing", remedy="end what else uses it, or choose a smaller model"),
        open_run(job, world) as run,
    ):
        world.from_rank0(lambda: write_sets(run.directory, {DEV: run.dev.pairs, **run.test}))
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
    state = run.state
    progress = state.progress
    world = run.world
    _check_disk(run)
    world.from_rank0(lambda: begin_history(run))

    if world.is_rank0:
        _log_beginning(run)

    with (
        Signals() as signals,
        Tracker(run.directory if world.is_rank0 else None, progress.step, sinks=sinks) as tracker,
        progress_bar(config.max_steps, progress.step, unit="step", shown=world.is_rank0) as bar,
        closing(_steps(run)) as steps,
        closing(run.stores),  # closed before the steps are, whose thread may wait for an epoch
    ):
        tracker.settings(run.job)

        _make_up_validation(run, tracker=tracker, signals=signals, bar=bar)

        guard = NumbersGuard(progress)
        vote = Vote(world)
        clock = Clock()
        heap = HeapTrimmer()
        has_bar = world.any(not bar.disable)
        first_step = progress.step + 1
        stopping = world.any(signals.requested)
        while not (stopping or progress.has_ended(config) or progress.step == until):
            # One update.
            with collective_errors_named(), memory_errors_named("training", remedy=_smaller_batches(run)):
                started = time.perf_counter()
                step = next(steps)
                waited = time.perf_counter() - started
                with _profiled_if_asked_for(run):
                    rate = rate_of(config, run.job.model.d_model, step=progress.step)
                    result = train_step(run.computation, step, world_size=world.size, rate=rate, seed=config.seed)
            _record_step(run, step, result, waited=waited)
            bar.update()

            # What is due after it.
            is_log_due = progress.step % config.log_every == 0
            is_validation_due = _is_validation_due(config, progress)
            is_commit_due = progress.step % config.save_every == 0
            is_read_due = progress.step % READ_EVERY == 0

            # Read the device, and log. Validations and commits below are left out of the steps' time.
            if is_log_due or is_validation_due or is_commit_due or is_read_due:
                _read_device(run, guard, clock=clock, tracker=tracker)
            if is_log_due:
                _log(run, tracker, bar)
            elif has_bar and (is_read_due or progress.step == first_step):
                _show(run, bar, clock=clock)

            # Give freed memory back, which a CPU's heap would keep.
            if run.device.type == "cpu":
                heap.trim_if_due()

            # Validate.
            is_among_best = False
            if is_validation_due:
                is_among_best = _validate(run, tracker=tracker, signals=signals)
                clock.lap()

            # Stop? Where the ranks meet anyway, they agree at once; elsewhere, on what was asked one step before.
            wants_stop = signals.requested or run.computation.failure is not None
            meets = is_validation_due or is_commit_due
            stopping = world.any(wants_stop) if meets else vote.ask(wants_stop)

            # Commit, once for all reasons; first mark the step: after a crash, no commit is without its mark.
            has_ended = progress.has_ended(config)
            commits = is_commit_due or is_among_best or stopping or has_ended
            if commits or progress.step in marked:
                _read_device(run, guard, clock=clock, tracker=tracker)
                add_mark(run, step, result)
                if has_ended and not is_log_due:
                    _log(run, tracker, bar)  # the last window may be a short one
                if commits:
                    _commit(run, tracker)
                clock.lap()

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


# ---- before the first step ------------------------------------------------------------------------------------------


def _check_disk(run: Run) -> None:
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


def _log_beginning(run: Run) -> None:
    """Say in the log where training goes on, or how long its first epoch is."""
    step = run.progress.step
    if step:
        saved = (run.directory.checkpoint(step) / MANIFEST).stat().st_mtime
        log.info("going on from step %d, saved at %s", step, time.strftime("%H:%M on %Y-%m-%d", time.localtime(saved)))
        return

    if run.job.train.subword_sampling is not None:
        log.info("before subword sampling, which makes more tokens, and so more steps of fewer pairs:")
    with suppress(
        InputError
    ):  # the loader plans the same epoch, and says what is wrong, unless the sample was too small
        log.info("%s", sample_epoch(run.stores.plain_lengths, run.batching).describe())


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


def _profiled_if_asked_for(run: Run) -> AbstractContextManager[None]:
    """The context of the next step: rank 0 traces the one that `train.profile` names."""
    step = run.progress.step + 1
    if step != run.job.train.profile or not run.world.is_rank0:
        return nullcontext()
    return profiled(run.directory, step=step, device=run.device)


# ---- after a step: record, read, log --------------------------------------------------------------------------------


def _record_step(run: Run, step: Step, result: StepResult, *, waited: float) -> None:
    """Bring the moving average, the progress and the log window up to a step. Nothing here waits for the device."""
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
    flops = step_flops(
        run.job.model,
        run.tokenizers.vocab_sizes,
        source=step.source_tokens,
        target=step.target_tokens,
        mean_length=(step.source_tokens + step.target_tokens) / (2 * step.sentences),
    )
    state.window.add(step, result, waited=waited, flops=flops)


def _read_device(run: Run, guard: NumbersGuard, *, clock: Clock, tracker: Tracker) -> None:
    """Bring what the device has measured to the host, and check that training is sound.

    Raises NumericalError, on every rank, after too many skipped updates. The position is committed first: skipped
    updates leave the weights as they were.
    """
    run.state.read_device()
    run.state.add_seconds(clock.lap())
    try:
        guard.check(run.progress, loss_scale=run.state.loss_scale)
    except NumericalError as error:
        _commit(run, tracker)
        raise _with_advice(error, run) from None


def _with_advice(error: NumericalError, run: Run) -> NumericalError:
    """The same error, with what to do next; every rank must call it."""
    return NumericalError(f"{error}: {run.world.from_rank0(lambda: advice(run.directory.path))}")


def _log(run: Run, tracker: Tracker, bar: ProgressBar) -> None:
    """Log the window that ends here, show it on the bar, and begin the next one."""
    totals = run.state.window.totals(run.world)
    rate = rate_of(run.job.train, run.job.model.d_model, step=run.progress.step - 1)
    report_window(totals, tracker, run.progress, rate=rate, device=run.device, ranks=run.world.size)
    run.state.window.clear()
    bar.set_postfix_str(bar_text(totals, run.progress))


def _show(run: Run, bar: ProgressBar, *, clock: Clock) -> None:
    """Show on the bar what the window has so far. Waits for the device, as where it is read, or once: the first step.

    Every rank must call it.
    """
    totals = run.state.window.totals(run.world)
    seconds = clock.lap()
    run.state.add_seconds(seconds)
    bar.set_postfix_str(bar_text(replace(totals, seconds=totals.seconds + seconds), run.progress))


# ---- validation -----------------------------------------------------------------------------------------------------


def _is_validation_due(config: TrainConfig, progress: Progress) -> bool:
    """At every `validate_every` steps and at the last one, unless this step has been validated already."""
    is_done = bool(progress.validations) and progress.validations[-1].step == progress.step
    return not is_done and (progress.step % config.validate_every == 0 or progress.step >= config.max_steps)


def _make_up_validation(run: Run, *, tracker: Tracker, signals: Signals, bar: ProgressBar) -> None:
    """Validate where a signal cut a validation short, or the process died in it."""
    progress = run.progress
    if not (progress.step and _is_validation_due(run.job.train, progress)):
        return

    _validate(run, tracker=tracker, signals=signals)
    if progress.has_ended(run.job.train) and not run.state.window.is_empty:
        _log(run, tracker, bar)  # patience has ended, and no step will come to log the window
    _commit(run, tracker)


def _validate(run: Run, *, tracker: Tracker, signals: Signals) -> bool:
    """Validate, log, and show samples. Returns whether this step is among the best, whose checkpoints are kept.

    A validation that a signal cuts short is not recorded, and so is due again.
    """
    job = run.job
    model = run.state.eval_model
    run.computation.make_room()
    greedy = replace(job.search, beam_size=1)  # a fraction of the beam's time, and it ranks checkpoints much alike
    batches = Batches.of(model, greedy, device=run.device, precision=run.resolved.precision)
    try:
        with memory_errors_named("measuring the dev loss", remedy=_smaller_batches(run)):
            batches = run.prover.prove_search(batches)
            validation, hypotheses = validate(
                Objective(model, job.train.label_smoothing),
                batches,
                run.dev,
                run.world,
                tokenizer=run.tokenizers.target,
                step=run.progress.step,
                max_tokens=run.resolved.max_tokens,
                tgt_lang=job.data.tgt_lang_of(DEV),
                tokenize=job.data.bleu_tokenize,
                check=signals.check,
            )
    except Interrupted:
        return False

    # Record it and log it.
    step = validation.step
    is_best = run.progress.record(validation, job.train.metric)
    tracker.scalars(step, validation_scalars(validation))
    log.info("step %d: dev %s%s", step, describe(validation), ", the best so far" if is_best else "")

    # Show what the model does.
    show_samples(run.dev, hypotheses, tracker, step=step, count=job.train.samples)
    return step in run.progress.best_steps(job.train.metric)[: job.train.keep_best]


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def _commit(run: Run, tracker: Tracker) -> None:
    """Commit the step in progress; rank 0 writes, and removes the checkpoints that are not to be kept.

    Raises NumericalError, on every rank, where a number is not finite.
    """
    window = run.state.window.totals(run.world)
    tensors = _finite_tensors(run)

    def write() -> None:
        tracker.flush()  # before the checkpoint is there: after a crash, nobody measures again what led up to it
        state = CheckpointState(
            vocab_size=run.tokenizers.target.vocab_size,
            data_digest=run.data_digest,
            source_vocab_size=own_source_size(run.tokenizers.vocab_sizes),
            training=run.state.to_record(
                window,
                dev_digest=run.dev.digest,
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
        raise _with_advice(error, run)
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
