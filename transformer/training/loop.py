"""The training loop: read `train` and `train_loop`, and you have read the framework.

A step is one optimiser update; a position is (epoch, step in the epoch). Whatever happens, happens between two steps:
log, validate, commit a checkpoint, stop. Validation and checkpoint due at one step: validate first, commit once.
"""

import logging
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from transformer.average import average_checkpoints, scheduled_steps
from transformer.checkpoint import Checkpoint, check_space, commit, load_checkpoint, newest, rotate
from transformer.compute import memory_errors_named, resolve_device, uses_cudnn_attention
from transformer.config.jobs import TrainJob
from transformer.config.primitives import from_json, to_json
from transformer.config.settings import AttentionKernel, SearchOverride, TrainConfig
from transformer.cost import parameters, step_flops
from transformer.data.corpus import Pair
from transformer.data.loader import Position, Step, load_steps
from transformer.data.plan import Batching
from transformer.data.prepare import Prepared, SharedPrepared, prepare
from transformer.data.store import Mixture, Store
from transformer.data.tokenizer import Tokenizer
from transformer.decoding.loading import build_translator
from transformer.decoding.translator import Translator
from transformer.distributed import Vote, Wait, World, collective_errors_named, join_world, local_device
from transformer.errors import CheckpointError, NumericalError
from transformer.evaluation.score import check_language, measure
from transformer.evaluation.sets import digest_sets, evaluate_sets, write_sets
from transformer.machine import trim_heap
from transformer.model.inspection import Role, attention_maps, draw
from transformer.records import Best, CheckpointState, Progress, Resolved, Results
from transformer.run_dir import DEV, RunDir, list_steps, lock_run
from transformer.tracking import Tracker, log_to, progress_bar
from transformer.training.guard import Interrupted, NumbersGuard, Signals, advice, stopped
from transformer.training.optimizer import move_average, rate_of, updates_applied
from transformer.training.preview import log_preview
from transformer.training.progress import Clock, describe, log_window, validation_scalars
from transformer.training.resolve import batching_of
from transformer.training.resume import resume_run, start_run
from transformer.training.state import TrainState
from transformer.training.step import Objective, StepResult, train_step
from transformer.training.trial import check_memory
from transformer.training.validate import DevSet, validate
from transformer.training.warm_start import find_source

log = logging.getLogger(__name__)

TRIM_SECONDS = 20.0  # between two trims of the heap, which take a tenth of a second
LONGEST_DRAWN = 40  # pieces of a dev sentence whose attention is drawn
READ_EVERY = 20  # steps after which the host reads what the device has counted
CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # the environment variable that makes cuBLAS deterministic


@dataclass(frozen=True)
class Run:
    """What is trained, on what: fixed from the first step to the last, but for `state`."""

    job: TrainJob
    directory: RunDir
    resolved: Resolved
    device: torch.device
    tokenizer: Tokenizer
    store: Store
    mixture: Mixture
    dev: DevSet
    test: Mapping[str, Sequence[Pair]]
    data_digest: str
    state: TrainState

    @property
    def progress(self) -> Progress:
        """How far training has come."""
        return self.state.progress


def train(job: TrainJob) -> Results:
    """Train until `train.max_steps` or until patience ends, from wherever the run directory stands.

    Then average the last checkpoints, score the test sets, and write and return the results; a finished run returns
    those that it has. Every rank returns the same. Raises InputError for bad data, LockedError for a directory in use,
    CheckpointError where it cannot resume, NumericalError, PeerError, and Stopped after a signal.
    """
    with (
        _process_settings_restored(),
        join_world(resolve_device(job.train.device)) as world,
        memory_errors_named("starting or finishing", remedy="end what else uses it, or choose a smaller model"),
        ExitStack() as held,
    ):
        run = _open(job, world, held)
        if not world.from_rank0(lambda: _is_finished(run)):
            world.from_rank0(lambda: write_sets(run.directory, {DEV: run.dev.pairs, **run.test}))
            train_loop(run, world)
        else:
            log.info("%s: finished at step %d already; nothing is left to train", job.run_dir, run.progress.step)
        return from_json(Results, world.from_rank0(lambda: to_json(_results(run)), wait=Wait.work))


@contextmanager
def _process_settings_restored() -> Iterator[None]:
    """Leave threads, determinism and log levels as they were: `train` may be one call of many in a notebook."""
    workspace = os.environ.get(CUBLAS_WORKSPACE)
    logger = logging.getLogger("transformer")
    level = logger.level
    threads = torch.get_num_threads()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    uses_cudnn = uses_cudnn_attention()
    dynamic_sources = torch.compiler.config.dynamic_sources
    try:
        yield
    finally:
        torch.compiler.config.dynamic_sources = dynamic_sources
        torch.backends.cuda.enable_cudnn_sdp(uses_cudnn)
        logger.setLevel(level)
        torch.set_num_threads(threads)
        _set_deterministic(is_deterministic, warn_only=only_warns)
        if workspace is None:
            os.environ.pop(CUBLAS_WORKSPACE, None)


def _set_deterministic(enabled: bool, *, warn_only: bool) -> None:
    """torch.use_deterministic_algorithms, where that changes anything.

    It imports a large part of torch. Once a signal has cut that short, any further call fails, and would hide the
    signal.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if before != (enabled, warn_only):
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


# ---- opening a run: prepare, lock, start or resume ------------------------------------------------------------------


def _open(job: TrainJob, world: World, held: ExitStack) -> Run:
    """Prepare, lock, and start or resume; rank 0 goes first. What stays open until the end is put into `held`."""
    check_language(job.data.tgt_lang)  # before any time is spent
    directory = RunDir(Path(job.run_dir))
    if not world.is_rank0:
        logging.getLogger("transformer").setLevel(logging.WARNING)

    has_begun = world.from_rank0(lambda: bool(list_steps(directory.path)))
    source = None if has_begun else _same_on_all_ranks(lambda: find_source(job), world)

    # A new run is prepared before its directory is made, so that bad input leaves nothing behind. An old one is
    # prepared under its lock.
    is_there = world.from_rank0(directory.path.exists)
    prepared = None if is_there else _prepare(job, world)
    world.from_rank0(lambda: held.enter_context(lock_run(directory.path)))
    if world.is_rank0:
        held.enter_context(log_to(directory.log))
    prepared = prepared or _prepare(job, world)

    checkpoint = _same_on_all_ranks(lambda: newest(directory.path), world)

    def resolve() -> object:
        if checkpoint is None:
            return to_json(start_run(job, prepared, source, world_size=world.size))
        return to_json(resume_run(job, prepared, checkpoint))

    resolved = from_json(Resolved, world.from_rank0(resolve))
    return _build(job, resolved, prepared, checkpoint=checkpoint, source=source, rank=world.rank)


def _prepare(job: TrainJob, world: World) -> Prepared:
    """What rank 0 has prepared; the other ranks neither read the text nor verify the store again."""
    prepared: list[Prepared] = []

    def on_rank0() -> object:
        prepared.append(prepare(job))
        return to_json(prepared[0].to_share())

    shared = world.from_rank0(on_rank0, wait=Wait.work)
    return prepared[0] if prepared else from_json(SharedPrepared, shared).open()


def _same_on_all_ranks(find: Callable[[], Checkpoint | None], world: World) -> Checkpoint | None:
    """The checkpoint that rank 0 finds, and has verified; the other ranks verify it, too."""
    found: list[Checkpoint | None] = []

    def choose() -> str | None:
        found.append(find())
        return None if found[0] is None else str(found[0].path)

    path = world.from_rank0(choose)
    if found:
        return found[0]
    return None if path is None else load_checkpoint(Path(path))


def _build(
    job: TrainJob,
    resolved: Resolved,
    prepared: Prepared,
    *,
    checkpoint: Checkpoint | None,
    source: Checkpoint | None,
    rank: int,
) -> Run:
    """The run at its first step, with the weights of `source` if there is one, or as the checkpoint left it."""
    torch.set_num_threads(resolved.threads)
    _set_deterministic(job.train.deterministic, warn_only=False)
    if job.train.deterministic:
        os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")  # without it cuBLAS is not deterministic

    # The state: new, from other weights, or from a checkpoint.
    tokenizer = Tokenizer.from_bytes(prepared.tokenizer_model)
    device = local_device(torch.device(resolved.device.name))
    state = TrainState.at_start(
        job.model,
        job.train,
        vocab_size=tokenizer.vocab_size,
        device=device,
        precision=resolved.precision,
        source=source,
    )
    record = None if checkpoint is None else state.restore(checkpoint, rank=rank)
    how = ", ".join(f"{name} {value}" for name, value in to_json(resolved).items() if value is not None)
    log.info("%s parameters; %s", f"{parameters(job.model, tokenizer.vocab_size):,}", how)
    if device.type == "cuda":
        log.info("attention by cuDNN is off: it would plan anew for every shape of a batch")

    dev = DevSet.of(prepared.dev, tokenizer, max_pieces=job.model.max_positions - 1)
    if record is not None and record.dev_digest != dev.digest:
        log.warning("data.dev has another text than before: its scores cannot be compared with the earlier ones")

    return Run(
        job=job,
        directory=RunDir(Path(job.run_dir)),
        resolved=resolved,
        device=device,
        tokenizer=tokenizer,
        store=prepared.store,
        mixture=prepared.mixture,
        dev=dev,
        test=prepared.test,
        data_digest=prepared.report.digest,
        state=state,
    )


# ---- the loop -------------------------------------------------------------------------------------------------------


def train_loop(run: Run, world: World) -> None:
    """Step after step until the end.

    Raises Stopped after a signal, with the step in progress committed; several ranks agree on it one step later.
    """
    config, state, progress = run.job.train, run.state, run.progress
    if progress.step:  # a rotation in which the process died is made up for, and may free the space
        world.from_rank0(lambda: _rotate(run.directory, config, progress))
    if not progress.has_ended(config):  # a full disk is better known before the first hours than after them
        world.from_rank0(lambda: check_space(run.directory.path, state.checkpoint_bytes))
    objective = Objective(state.model, config.label_smoothing, loss_rows=run.resolved.loss_rows).train()
    if run.resolved.compile:
        objective.compile(cut_at_buckets=run.resolved.attention_kernel is not AttentionKernel.flex)
    if progress.step == 0:
        run = _with_checked_memory(run, objective, world)
    if world.is_rank0:
        _log_preview(run, world)
    parallel = world.wrap(objective)
    guard = NumbersGuard(progress)
    trimmed = time.monotonic()
    clock = Clock()

    with ExitStack() as held:
        signals = held.enter_context(Signals())
        tracker = held.enter_context(Tracker(run.directory if world.is_rank0 else None, progress.step))
        bar = held.enter_context(progress_bar(config.max_steps, progress.step, unit="step", shown=world.is_rank0))
        steps = held.enter_context(closing(_steps(run, world)))

        # A validation that a signal cut short, or in which the process died, is made up for.
        if progress.step and _is_validation_due(config, progress):
            _validate(run, world, tracker=tracker, signals=signals)
            _commit(run, world, tracker)

        clock.lap()
        vote = Vote(world)
        stopping = world.any(signals.requested)
        while not (stopping or progress.has_ended(config)):
            # One update.
            with collective_errors_named(), memory_errors_named("training", remedy=_smaller_batches(run)):
                started = time.perf_counter()
                step = next(steps)
                waited = time.perf_counter() - started
                result = train_step(
                    parallel,
                    state.optimizer,
                    step,
                    scaler=state.scaler,
                    world_size=world.size,
                    rate=rate_of(config, run.job.model.d_model, step=progress.step),
                    seed=config.seed,
                    clip_norm=config.clip_norm,
                    device=run.device,
                    precision=run.resolved.precision,
                )
            _count(run, step, result, waited=waited)
            bar.update()

            # What the device has counted, and the log. What follows is no part of a step's time.
            is_log_due = progress.step % config.log_every == 0
            is_validation_due = _is_validation_due(config, progress)
            is_commit_due = progress.step % config.save_every == 0
            if is_log_due or is_validation_due or is_commit_due or progress.step % READ_EVERY == 0:
                _read_device(run, world, guard, clock=clock, tracker=tracker)
            if is_log_due:
                _log(run, world, tracker)
            if run.device.type == "cpu" and time.monotonic() > trimmed + TRIM_SECONDS:
                trim_heap()
                trimmed = time.monotonic()

            # Validate, then save once. Where the ranks meet anyway, they also agree at once on whether to stop.
            is_among_best = False
            if is_validation_due:
                is_among_best = _validate(run, world, tracker=tracker, signals=signals)
                clock.lap()
            if is_validation_due or is_commit_due:
                stopping = world.any(signals.requested)
            else:
                stopping = vote.ask(signals.requested)
            has_ended = progress.has_ended(config)
            if is_among_best or is_commit_due or stopping or has_ended:
                _read_device(run, world, guard, clock=clock, tracker=tracker)
                if has_ended and not is_log_due:
                    _log(run, world, tracker)  # the last window may be a short one
                _commit(run, world, tracker)
                clock.lap()

        if stopping or world.any(signals.requested):  # it may have come while the last step was saved
            raise stopped(progress.step)


def _with_checked_memory(run: Run, objective: Objective, world: World) -> Run:
    """The run with a `max_tokens` that fits; run.json says what was found."""
    resolved, check = check_memory(
        run.job,
        run.resolved,
        objective,
        store=run.store,
        mixture=run.mixture,
        device=run.device,
        world=world,
    )

    def write() -> None:
        record = run.directory.read_record()
        run.directory.write_record(replace(record, resolved=resolved, memory=check))

    world.from_rank0(write)
    return replace(run, resolved=resolved)


def _smaller_batches(run: Run) -> str:
    """What to do where the GPU's memory runs out in a step, or while the dev loss is measured."""
    return f"lower train.max_tokens (now {run.resolved.max_tokens}); the same command goes on"


def _steps(run: Run, world: World) -> Generator[Step, None, None]:
    """The steps of this rank, from the position that training has come to."""
    return load_steps(
        lambda epoch: run.store,
        _batching(run),
        rank=world.rank,
        world_size=world.size,
        position=Position(run.progress.epoch, run.progress.step_in_epoch),
        prefetch=run.job.train.prefetch,
        device=run.device,
    )


def _batching(run: Run) -> Batching:
    return batching_of(run.job, run.resolved, store=run.store, mixture=run.mixture)


def _log_preview(run: Run, world: World) -> None:
    log_preview(
        run.store.lengths,
        _batching(run),
        model=run.job.model,
        vocab_size=run.tokenizer.vocab_size,
        device=run.device,
        precision=run.resolved.precision,
        ranks=world.size,
    )


def _count(run: Run, step: Step, result: StepResult, *, waited: float) -> None:
    """Bring average, progress and log window up to a step that is done. Nothing here waits for the device."""
    state, progress = run.state, run.progress
    decay = run.job.train.ema_decay
    if state.ema is not None and decay is not None:
        updates = updates_applied(state.optimizer) - result.applied.float()  # those before this one
        move_average(state.ema, state.model, decay=decay, updates=updates, is_applied=result.applied)

    progress.advance(
        epoch=step.epoch,
        step_in_epoch=step.index + 1,
        sentences=step.sentences,
        target_tokens=step.target_tokens,
    )
    state.norms.add(result.grad_norm)
    flops = step_flops(
        run.job.model,
        run.tokenizer.vocab_size,
        source=step.source_tokens,
        target=step.target_tokens,
        mean_length=(step.source_tokens + step.target_tokens) / (2 * step.sentences),
    )
    state.window.add(step, result, waited=waited, flops=flops)


def _read_device(run: Run, world: World, guard: NumbersGuard, *, clock: Clock, tracker: Tracker) -> None:
    """Bring what the device has measured to the host, and have it judged.

    After too many skipped updates the position is saved, for they left the weights as they were, and NumericalError is
    raised, on every rank.
    """
    run.state.read_device()
    run.state.add_seconds(clock.lap())
    try:
        guard.check(run.progress, loss_scale=run.state.loss_scale)
    except NumericalError as error:
        _commit(run, world, tracker)
        raise _with_advice(error, run, world) from None


def _with_advice(error: NumericalError, run: Run, world: World) -> NumericalError:
    """The same error, with the newest checkpoint whose numbers are finite; every rank must ask."""
    return NumericalError(f"{error}: {world.from_rank0(lambda: advice(run.directory.path))}")


def _log(run: Run, world: World, tracker: Tracker) -> None:
    """Log the window that ends here, and begin the next one."""
    totals = run.state.window.totals(world)
    rate = rate_of(run.job.train, run.job.model.d_model, step=run.progress.step - 1)
    log_window(totals, tracker, run.progress, rate=rate, device=run.device)
    run.state.window.clear()


def _is_validation_due(config: TrainConfig, progress: Progress) -> bool:
    done = progress.validations and progress.validations[-1].step == progress.step
    return not done and (progress.step % config.validate_every == 0 or progress.step >= config.max_steps)


def _validate(run: Run, world: World, *, tracker: Tracker, signals: Signals) -> bool:
    """Validate, log and show samples; whether it is among the best, to be kept. A signal leaves it due."""
    job, model = run.job, run.state.eval_model
    greedy = replace(job.search, beam_size=1)  # a fraction of the beam's time, and the same order of checkpoints
    translator = Translator(model, run.tokenizer, greedy, run.device, run.resolved.precision)
    try:
        with memory_errors_named("measuring the dev loss", remedy=_smaller_batches(run)):
            validation, hypotheses = validate(
                Objective(model, job.train.label_smoothing),
                translator,
                run.dev,
                world,
                step=run.progress.step,
                max_tokens=run.resolved.max_tokens,
                tgt_lang=job.data.tgt_lang,
                check=signals.check,
            )
    except Interrupted:
        return False

    is_best = run.progress.record(validation, job.train.metric)
    tracker.scalars(validation.step, validation_scalars(validation))
    log.info("step %d: dev %s%s", validation.step, describe(validation), ", the best so far" if is_best else "")
    _show_samples(run, hypotheses, tracker)
    if job.train.attention_images and world.is_rank0:
        _show_attention(run, tracker)
    return validation.step in run.progress.best_steps(job.train.metric)[: job.train.keep_best]


def _show_samples(run: Run, hypotheses: Sequence[str], tracker: Tracker) -> None:
    triples = zip(run.dev.sources, hypotheses, run.dev.references, strict=True)
    samples = [
        f"{label} {text}"
        for triple in islice(triples, run.job.train.samples)
        for label, text in zip(("source    ", "translation", "reference  "), triple, strict=True)
    ]
    tracker.text(run.progress.step, "dev/samples", samples)
    for line in samples:
        log.info("  %s", line)


def _show_attention(run: Run, tracker: Tracker) -> None:
    """Draw how the first dev pair that makes a readable picture is attended to, the decoder reading the reference."""
    lengths = run.dev.store.lengths.max(axis=1)  # the longer side, EOS counted
    index = int((lengths <= LONGEST_DRAWN).argmax())  # the first one, where none is short enough
    source, target = (run.dev.store.gather(np.array([index]), side).pieces[:LONGEST_DRAWN].tolist() for side in (0, 1))

    precision = run.resolved.precision
    maps = attention_maps(run.state.eval_model, source, target, device=run.device, precision=precision)
    for role in Role:
        tracker.image(run.progress.step, f"attention/{role.value}", draw(maps.of(role)))


def _commit(run: Run, world: World, tracker: Tracker) -> None:
    """Commit the step in progress; rank 0 writes, and removes the checkpoints that are not to be kept.

    Raises NumericalError, on every rank, where a number is not finite.
    """
    window = run.state.window.totals(world)
    tensors = _finite_tensors(run, world)

    def write() -> None:
        tracker.flush()  # what was measured up to a checkpoint must not be lost: nobody measures it again
        state = CheckpointState(
            vocab_size=run.tokenizer.vocab_size,
            data_digest=run.data_digest,
            training=run.state.to_record(window, dev_digest=run.dev.digest),
        )
        commit(
            run.directory.path,
            step=run.progress.step,
            tensors=tensors,
            state=to_json(state),
            config=to_json(run.job),
        )
        log.info("step %d: saved", run.progress.step)
        _rotate(run.directory, run.job.train, run.progress)

    with memory_errors_named("saving", remedy="end what else uses it"):
        world.from_rank0(write)


def _finite_tensors(run: Run, world: World) -> dict[str, Mapping[str, Tensor]]:
    """What a checkpoint holds. Raises NumericalError, on every rank, where a number is not finite on one of them."""
    error = NumericalError(f"step {run.progress.step} is not saved: numbers on another rank are not finite")
    tensors = None
    try:
        tensors = run.state.tensors()
    except NumericalError as found:
        error = found
    if world.any(tensors is None) or tensors is None:
        raise _with_advice(error, run, world)
    return tensors


def _rotate(directory: RunDir, config: TrainConfig, progress: Progress) -> None:
    """Keep the newest checkpoints of the schedule and the best ones; best.json names the best of those that stay."""
    best = progress.best_steps(config.metric)
    steps = list_steps(directory.path)
    scheduled = [step for step in steps if step % config.save_every == 0]
    keep = {*scheduled[-config.keep_last :], *best[: config.keep_best], progress.step}

    # best.json first: whenever the process dies, the checkpoint that it names is there.
    best_kept = next((step for step in best if step in keep and step in steps), None)
    if best_kept is None:
        directory.best.unlink(missing_ok=True)
    else:
        directory.write_best(Best(best_kept, config.metric))
    rotate(directory.path, keep)


# ---- the end --------------------------------------------------------------------------------------------------------


def _is_finished(run: Run) -> bool:
    """Whether results.json is there, of this step, these test sets and this search."""
    try:
        results = run.directory.read_results()
    except CheckpointError:
        return False
    return (
        run.progress.has_ended(run.job.train)
        and results.steps == run.progress.step
        and results.search == run.job.search
        and results.test_digest == digest_sets(run.test)
    )


def _results(run: Run) -> Results:
    """The results of a finished run; where they are not there yet, they are made and written."""
    if not _is_finished(run):
        run.directory.write_results(_evaluate(run))
    return run.directory.read_results()


def _evaluate(run: Run) -> Results:
    """Average the last checkpoints, and decode each test set once with the result."""
    job, progress, path = run.job, run.progress, run.directory.path
    steps = scheduled_steps(path, save_every=job.train.save_every, last=job.train.average)
    checkpoint = average_checkpoints(path, steps)
    translator = build_translator(
        path,
        checkpoint,
        search=SearchOverride(**asdict(job.search)),
        device=run.resolved.device,
        precision=run.resolved.precision,
    )
    return Results(
        test_sets=evaluate_sets(
            run.directory, translator, run.test, scorer=partial(measure, tgt_lang=job.data.tgt_lang)
        ),
        averaged=checkpoint.run_state().averaged,
        steps=progress.step,
        epochs=progress.epoch,
        sentences=progress.sentences,
        skipped_updates=progress.skipped,
        target_tokens=progress.target_tokens,
        training_seconds=round(progress.seconds, 1),
        parameters=parameters(job.model, run.tokenizer.vocab_size),
        search=job.search,
        seed=job.train.seed,
        data_digest=run.data_digest,
        test_digest=digest_sets(run.test),
        validations=progress.validations,
    )
