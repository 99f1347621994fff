"""The training loop: read `train` and `_fit`, and you have read the framework.

A step is one optimiser update; a position is (epoch, step in the epoch). Whatever happens, happens between two steps:
log, validate, commit a checkpoint, stop. Validation and checkpoint due at one step: validate first, commit once.
"""

import copy
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim import Adam

from transformer.average import average_checkpoints, regular_steps
from transformer.checkpoint import (
    Checkpoint,
    commit,
    list_steps,
    load_checkpoint,
    lock_run,
    newest,
    read_json,
    rotate,
    write_json,
)
from transformer.compute import dtype_of, loss_scaler, resolve_device
from transformer.config.jobs import TrainJob
from transformer.config.primitives import from_json, to_json
from transformer.config.settings import Precision, SearchOverride
from transformer.cost import parameters
from transformer.data.corpus import Pair
from transformer.data.loader import load_steps
from transformer.data.plan import PLAN_VERSION
from transformer.data.prepare import Prepared, prepare
from transformer.data.store import Store
from transformer.data.tokenizer import Tokenizer
from transformer.decoding.translator import Translator, load_translator
from transformer.distributed import World, join_world, local_device
from transformer.errors import CheckpointError, InputError
from transformer.evaluation.score import measure
from transformer.evaluation.sets import digest_sets, evaluate_sets, write_sets
from transformer.machine import trim_heap
from transformer.model.transformer import Transformer, load_parameters, parameters_by_name
from transformer.seeding import seed_for
from transformer.tracking import Tracker, log_to, progress_bar
from transformer.training.guard import Interrupted, Signals, check_streak, stopped
from transformer.training.optimizer import (
    build_optimizer,
    learning_rate,
    load_moments,
    moments_by_name,
    move_average,
    paper_peak,
)
from transformer.training.progress import Progress, Window
from transformer.training.resolve import Settled, batching_of
from transformer.training.resume import open_run
from transformer.training.step import Objective, train_step
from transformer.training.validate import DevSet, validate
from transformer.training.warm_start import find_source, initialise

log = logging.getLogger(__name__)

TRIM_SECONDS = 20.0  # between two trims of the heap, which take a tenth of a second


@dataclass(frozen=True)
class Run:
    """What is trained, on what, and how far it is."""

    directory: Path
    model: Transformer
    objective: Objective
    judged: Objective  # with the weights that are used: their moving average where there is one, else the same object
    optimizer: Adam
    scaler: GradScaler
    device: torch.device
    precision: Precision
    settled: Settled
    tokenizer: Tokenizer
    store: Store
    dev: DevSet
    test: Mapping[str, Sequence[Pair]]
    data_digest: str
    progress: Progress


def train(job: TrainJob) -> dict[str, Any] | None:
    """Train until `train.max_steps` or until patience ends, from wherever the run directory stands.

    Then average, score the test sets, and write results.json. Returns what that holds, at once where the run is
    finished; None on other ranks than the first. Raises InputError for bad data, LockedError for a directory in use,
    CheckpointError where it cannot resume, NumericalError, PeerError, and Stopped after a signal.
    """
    directory = Path(job.run_dir)
    with ExitStack() as held:
        with join_world(resolve_device(job.train.device)) as world:
            run = _open(job, world, held)
            if not world.from_first(lambda: _is_finished(job, run)):
                world.from_first(lambda: write_sets(directory, {"dev": run.dev.pairs, **run.test}))
                try:
                    _fit(job, run, world)
                except torch.OutOfMemoryError as error:
                    budget = f"train.max_tokens (now {run.settled.max_tokens})"
                    raise InputError(f"out of GPU memory: lower {budget}; the same command goes on") from error
        if not world.is_first:  # the others are not needed any more
            return None
        if not _is_finished(job, run):
            write_json(directory / "results.json", _finish(job, run))
        return read_json(directory / "results.json")


def _open(job: TrainJob, world: World, held: ExitStack) -> Run:
    """Prepare, lock, and start or resume; rank 0 goes first. What stays open until the end is put into `held`."""
    directory = Path(job.run_dir)
    if not world.is_first:
        logging.getLogger("transformer").setLevel(logging.WARNING)
    begun = world.from_first(lambda: bool(list_steps(directory)))
    source = None if begun else _agreed(lambda: find_source(job), world)
    known = world.from_first(directory.exists)
    prepared = None if known else world.first_then_all(lambda: prepare(job))  # bad input leaves no directory behind
    world.from_first(lambda: held.enter_context(lock_run(directory)))
    if world.is_first:
        held.enter_context(log_to(directory / "train.log"))
    prepared = prepared or world.first_then_all(lambda: prepare(job))
    checkpoint = _agreed(lambda: newest(directory), world)
    settled = world.from_first(lambda: to_json(open_run(job, prepared, checkpoint, source, world_size=world.size)))
    return _start(job, from_json(Settled, settled), prepared=prepared, checkpoint=checkpoint, source=source)


def _agreed(find: Callable[[], Checkpoint | None], world: World) -> Checkpoint | None:
    """The checkpoint that rank 0 finds, and has verified; the other ranks verify it, too."""
    found: list[Checkpoint | None] = []

    def choose() -> str | None:
        found.append(find())
        return None if found[0] is None else str(found[0].path)

    path = world.from_first(choose)
    return found[0] if found else None if path is None else load_checkpoint(Path(path))


def _is_finished(job: TrainJob, run: Run) -> bool:
    """Whether results.json is there, of this step, these test sets and this search."""
    try:
        results = read_json(run.directory / "results.json")
        found = (results["steps"], results["search"], results["test_digest"])
    except (CheckpointError, KeyError, TypeError):
        return False
    return run.progress.ended(job.train) and found == (run.progress.step, to_json(job.search), digest_sets(run.test))


def _start(
    job: TrainJob, settled: Settled, *, prepared: Prepared, checkpoint: Checkpoint | None, source: Checkpoint | None
) -> Run:
    """The run at its first step, with the weights of `source` if there is one, or as the checkpoint left it."""
    torch.set_num_threads(settled.threads)
    torch.use_deterministic_algorithms(job.train.deterministic)
    if job.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
    device, precision = local_device(torch.device(settled.device.name)), settled.precision
    tokenizer = Tokenizer.from_bytes(prepared.tokenizer)
    torch.manual_seed(seed_for(job.train.seed))
    model = Transformer(job.model, tokenizer.vocab_size).to(device, dtype_of(precision))
    if source is not None:
        initialise(model, source)
    optimizer, scaler = build_optimizer(model, job.train), loss_scaler(device, precision)
    objective = Objective(model, job.train.label_smoothing).train()
    judged = objective if job.train.ema_decay is None else copy.deepcopy(objective)
    if checkpoint is not None:
        try:
            load_parameters(model, checkpoint.tensors("model"))
            load_moments(model, optimizer, checkpoint.tensors("optimizer"))
            scaler.load_state_dict(checkpoint.state.get("scaler", {}))
            if judged is not objective:
                load_parameters(judged.model, checkpoint.tensors("ema"))
        except (ValueError, KeyError, RuntimeError) as error:
            raise CheckpointError(f"{checkpoint.path}: does not fit this model: {error}") from None
    log.info("%s parameters; %s", f"{parameters(job.model, tokenizer.vocab_size):,}", to_json(settled))
    dev = DevSet.of(prepared.dev, tokenizer, room=job.model.max_positions - 1)
    if checkpoint is not None and checkpoint.state.get("dev_digest") not in (None, digest_sets({"dev": dev.pairs})):
        log.warning("data.dev has another text than before: its scores cannot be compared with the earlier ones")
    first = dev.references[:1]
    measure(first, first, tgt_lang=job.data.tgt_lang)  # what scoring lacks shows now, not later
    progress = Progress() if checkpoint is None else Progress.from_json(checkpoint.state.get("progress"))
    return Run(
        directory=Path(job.run_dir),
        model=model,
        objective=objective,
        judged=judged,
        optimizer=optimizer,
        scaler=scaler,
        device=device,
        precision=precision,
        settled=settled,
        tokenizer=tokenizer,
        store=prepared.store,
        dev=dev,
        test=prepared.test,
        data_digest=str(prepared.report["digest"]),
        progress=progress,
    )


def _fit(job: TrainJob, run: Run, world: World) -> None:
    """The loop. Raises Stopped after a signal, with the step in progress committed."""
    cfg, progress = job.train, run.progress
    if run.settled.compile:
        run.objective.compile()
    objective = world.wrap(run.objective)
    peak = cfg.learning_rate or paper_peak(job.model.d_model, cfg.warmup_steps)
    with (
        Signals() as signals,
        closing(Tracker(run.directory if world.is_first else None, progress.step)) as tracker,
        progress_bar(cfg.max_steps, progress.step, shown=world.is_first) as bar,
        closing(
            load_steps(
                run.store,
                batching_of(job, run.settled, run.store),
                rank=world.rank,
                world_size=world.size,
                epoch=progress.epoch,
                step=progress.step_in_epoch,
                prefetch=cfg.prefetch,
            )
        ) as steps,
    ):
        if progress.step and _is_validation_due(job, progress):  # a signal cut it short, or the process died in it
            _validate(job, run, world, tracker=tracker, signals=signals)
            world.from_first(lambda: _commit(job, run, tracker))
        window, trimmed = Window(job.model, run.tokenizer.vocab_size, run.device), time.monotonic()
        stopping = world.any(signals.requested)
        while not (stopping or progress.ended(job.train)):
            asked = time.perf_counter()
            step = next(steps)
            waited = time.perf_counter() - asked
            rate = learning_rate(
                progress.step, peak=peak, warmup_steps=cfg.warmup_steps, decay=cfg.decay, max_steps=cfg.max_steps
            )
            result = train_step(
                objective,
                run.optimizer,
                step,
                scaler=run.scaler,
                world_size=world.size,
                rate=rate,
                seed=cfg.seed,
                clip_norm=cfg.clip_norm,
                device=run.device,
                precision=run.precision,
            )
            if cfg.ema_decay is not None and result.applied:
                move_average(run.judged, run.objective, decay=cfg.ema_decay, updates=progress.updates)
            seconds = time.perf_counter() - asked
            progress.count(step, result, seconds=seconds)
            window.add(step, result, seconds=seconds, waited=waited)
            bar.update()
            if not result.applied:
                check_streak(progress.streak, progress.step, loss_scale=result.loss_scale)
            if progress.step % cfg.log_every == 0:
                window.flush(tracker, progress, rate, world)
            if run.device.type == "cpu" and time.monotonic() > trimmed + TRIM_SECONDS:
                trim_heap()
                trimmed = time.monotonic()
            is_kept = _is_validation_due(job, progress) and _validate(job, run, world, tracker=tracker, signals=signals)
            stopping = world.any(signals.requested)
            if is_kept or progress.step % cfg.save_every == 0 or stopping or progress.ended(job.train):
                world.from_first(lambda: _commit(job, run, tracker))
        if stopping or world.any(signals.requested):  # it may have come while the last step was saved
            raise stopped(progress.step)


def _is_validation_due(job: TrainJob, progress: Progress) -> bool:
    done = progress.validations and progress.validations[-1].step == progress.step
    return not done and (progress.step % job.train.validate_every == 0 or progress.step >= job.train.max_steps)


def _validate(job: TrainJob, run: Run, world: World, *, tracker: Tracker, signals: Signals) -> bool:
    """Validate, log and show samples; whether it is among the best, to be kept. A signal leaves it due."""
    greedy = replace(job.search, beam_size=1)  # a fraction of the beam's time, and the same order of checkpoints
    translator = Translator(run.judged.model, run.tokenizer, greedy, run.device, run.precision)
    try:
        validation, hypotheses = validate(
            run.judged,
            translator,
            run.dev,
            world,
            step=run.progress.step,
            max_tokens=run.settled.max_tokens,
            tgt_lang=job.data.tgt_lang,
            check=signals.check,
        )
    except Interrupted:
        return False
    is_best = run.progress.judge(validation, job.train.metric)
    tracker.scalars(validation.step, validation.scalars())
    log.info("step %d: dev %s%s", validation.step, validation.describe(), ", the best so far" if is_best else "")
    triples = zip(run.dev.sources, hypotheses, run.dev.references, strict=True)
    samples = [
        f"{label} {text}"
        for triple in islice(triples, job.train.samples)
        for label, text in zip(("source    ", "translation", "reference  "), triple, strict=True)
    ]
    tracker.text(validation.step, "dev/samples", samples)
    for line in samples:
        log.info("  %s", line)
    return validation.step in run.progress.best(job.train.metric)[: job.train.keep_best]


def _commit(job: TrainJob, run: Run, tracker: Tracker) -> None:
    """Commit the step in progress, and remove the checkpoints that are not to be kept."""
    progress = run.progress
    tracker.flush()  # what was measured up to a checkpoint must not be lost: nobody measures it again
    state = {
        "progress": progress.to_json(),
        "scaler": run.scaler.state_dict(),
        "vocab_size": run.tokenizer.vocab_size,
        "data_digest": run.data_digest,
        "dev_digest": digest_sets({"dev": run.dev.pairs}),
        "plan_version": PLAN_VERSION,
    }
    tensors = {"model": parameters_by_name(run.model), "optimizer": moments_by_name(run.model, run.optimizer)}
    if run.judged is not run.objective:
        tensors["ema"] = parameters_by_name(run.judged.model)
    commit(run.directory, step=progress.step, tensors=tensors, state=state, config=to_json(job))
    log.info("step %d: saved", progress.step)
    best = progress.best(job.train.metric)
    regular = [step for step in list_steps(run.directory) if step % job.train.save_every == 0]
    rotate(run.directory, {*regular[-job.train.keep_last :], *best[: job.train.keep_best], progress.step})
    kept = set(list_steps(run.directory))
    there = next((step for step in best if step in kept), None)
    if there is not None:
        write_json(run.directory / "best.json", {"step": there, "metric": job.train.metric.name})


def _finish(job: TrainJob, run: Run) -> dict[str, object]:
    """Average the last checkpoints, decode each test set once with the result, and report."""
    steps = regular_steps(run.directory, save_every=job.train.save_every, last=job.train.average)
    averaged = average_checkpoints(run.directory, steps).state["averaged"]
    device, search = run.settled.device, SearchOverride(**asdict(job.search))
    translator = load_translator(
        run.directory, checkpoint="averaged", search=search, device=device, precision=run.precision
    )
    return {
        "test_sets": evaluate_sets(run.directory, translator, run.test, tgt_lang=job.data.tgt_lang, scorer=measure),
        "averaged": averaged,
        "steps": run.progress.step,
        "epochs": run.progress.epoch,
        "sentences": run.progress.sentences,
        "skipped_updates": run.progress.skipped,
        "target_tokens": run.progress.target_tokens,
        "training_seconds": round(run.progress.seconds, 1),
        "parameters": parameters(job.model, run.tokenizer.vocab_size),
        "search": to_json(job.search),
        "seed": job.train.seed,
        "data_digest": run.data_digest,
        "test_digest": digest_sets(run.test),
        "validations": run.progress.to_json()["validations"],
    }
