"""From a job to a run: its data prepared, its directory locked, and its training started, or resumed where it stands.

    open_run     prepare -> lock -> newest checkpoint -> start_run or resume_run -> build_run
    build_run    the first way that is sound here -> Run
      _build     TrainState -> objective, compiled and wrapped -> does a step fit? -> what computes it, replayed or not

Rank 0 goes first at each stage, and the other ranks take over what it found: the same settings, the same checkpoint.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from transformer import registry
from transformer.average import first_of_average, warn_of_early_average
from transformer.checkpoint import Checkpoint, load_checkpoint, newest
from transformer.compute import autocast, avoid_cudnn_attention, resolve_device, untried_torch
from transformer.config.jobs import TrainJob
from transformer.config.primitives import from_json, to_json
from transformer.config.settings import Device, Precision
from transformer.data.augmentation import Augmentation
from transformer.data.batch import Batch, collate
from transformer.data.corpus import Pair
from transformer.data.epochs import EpochStores, epoch_stores
from transformer.data.plan import Batching
from transformer.data.prepare import Prepared, prepare
from transformer.data.tokenizer import Tokenizers
from transformer.distributed import Wait, World, collective_errors_named, local_device
from transformer.errors import CheckpointError, InputError, StorageError
from transformer.evaluation.score import check_scores
from transformer.evaluation.sets import digest_sets
from transformer.machine import busy
from transformer.plugins import SearchBackend
from transformer.records import MemoryCheck, Progress, Proof, Resolved, TrainingRecord
from transformer.run_dir import DEV, RunDir, list_steps, lock_run
from transformer.run_names import resolve_init_from
from transformer.tracking import log_to
from transformer.training.cuda_graphs import GraphedComputation
from transformer.training.memory import Trial, can_try
from transformer.training.process import set_up_process
from transformer.training.proof import (
    Prover,
    compiled_deviation,
    first_sound,
    plain_deviation,
    replayed_deviation,
    stages_of,
    wants_proof,
)
from transformer.training.record import resume_run, start_run
from transformer.training.resolve import batching_of, warn_of_idle_ranks
from transformer.training.state import TrainState
from transformer.training.step import Computation, Objective
from transformer.training.validate import DevSet
from transformer.training.warm_start import find_source, with_model_of

SHOWN = ("device", "precision", "threads")  # of the resolved settings; the others are for --verbose, and in run.json

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """What is trained, on what, how, and by which ranks: fixed from the first step to the last, but for `state`."""

    job: TrainJob
    world: World
    directory: RunDir
    resolved: Resolved
    device: torch.device
    tokenizers: Tokenizers
    stores: EpochStores
    batching: Batching
    dev: Mapping[str, DevSet]  # by their keys below `data`: one, `dev`, or several
    test: Mapping[str, Sequence[Pair]]  # of rank 0; the others have none
    data_digest: str
    state: TrainState
    computation: Computation  # of a step, as it is trained: compiled or not, replayed or not, wrapped for several ranks
    prover: Prover  # of searches, too

    @property
    def progress(self) -> Progress:
        """How far training has come."""
        return self.state.progress

    @property
    def dev_texts(self) -> dict[str, list[Pair]]:
        """The text of the development sets."""
        return {name: dev.pairs for name, dev in self.dev.items()}

    @property
    def dev_digest(self) -> str:
        """The digest of that text."""
        return digest_sets(self.dev_texts)


@contextmanager
def open_run(job: TrainJob, world: World, *, like: RunDir | None = None) -> Iterator[Run]:
    """Prepare, lock, and start or resume; the run's directory is unlocked at the end of the context.

    A new run is started as the run `like` was, if one is given, on the same data: else FindingsError says what differs.
    Raises InputError, LockedError, StorageError and CheckpointError; the error of one rank ends all of them.
    """
    # Before any time is spent.
    world.from_rank0(lambda: check_scores(job.data))  # which may fetch what a tokenizer needs
    backend: SearchBackend = registry.find("search", job.search.engine)
    backend.check_engine(job.model, job.search, resolve_device(job.train.device))

    directory = RunDir(Path(job.run_dir))
    if not world.is_rank0:
        logging.getLogger("transformer").setLevel(logging.WARNING)

    # The checkpoint of `init_from`, which a run needs only until it has one of its own.
    has_begun = world.from_rank0(lambda: bool(list_steps(directory.path)))
    if not has_begun:
        world.from_rank0(lambda: _refuse_to_replace(directory))
    begun_from = replace(job, init_from=world.from_rank0(lambda: resolve_init_from(job).init_from, wait=Wait.work))
    source = None if has_begun else _share_checkpoint(world, lambda: find_source(begun_from))

    # A new run is prepared before its directory is made, so that bad input leaves nothing behind. An old one is
    # prepared under its lock.
    is_there = world.from_rank0(directory.path.exists)
    prepared = None if is_there else _prepare(begun_from, world)
    with _locked(directory, world):
        data = prepared or _prepare(begun_from, world)

        # Start, or go on from the newest checkpoint.
        checkpoint = _share_checkpoint(world, lambda: newest(directory.path))
        model_of = checkpoint or source
        if job.init_from is not None and model_of is not None:
            job = with_model_of(model_of, job)
        start = partial(start_run, job, data, source, world_size=world.size, like=like)
        resolved = world.share(
            start if checkpoint is None else partial(resume_run, job, data, checkpoint),
            pack=to_json,
            unpack=partial(from_json, Resolved),
        )
        yield build_run(
            job,
            resolved,
            data,
            checkpoint=checkpoint,
            source=source,
            world=world,
            tries_memory=checkpoint is None and like is None,
            proves=True,
        )


@contextmanager
def _locked(directory: RunDir, world: World) -> Iterator[None]:
    """Rank 0's lock on the run's directory, and its log in it, until the end of the context."""
    with ExitStack() as held:

        def hold() -> None:
            held.enter_context(lock_run(directory.path))
            held.enter_context(log_to(directory.log))

        world.from_rank0(hold)
        yield


def find_device(job: TrainJob) -> torch.device:
    """Where the run will compute, known before the ranks join: on the device of the job, or of a run that resumes.

    Raises InputError where that is a GPU, and there is none.
    """
    directory = RunDir(Path(job.run_dir))
    device = job.train.device
    with suppress(CheckpointError, StorageError):  # whatever is wrong with the run, `open_run` says so
        if device is Device.auto and list_steps(directory.path):
            device = directory.read_record().resolved.device
    return resolve_device(device)


def _prepare(job: TrainJob, world: World) -> Prepared:
    """What rank 0 has prepared; the other ranks neither read the text nor verify the store again."""
    return world.share(
        lambda: prepare(job),
        pack=Prepared.to_share,
        unpack=Prepared.of_shared,
        wait=Wait.work,
    )


def _share_checkpoint(world: World, find: Callable[[], Checkpoint | None]) -> Checkpoint | None:
    """The checkpoint that rank 0 finds, and has verified; the other ranks verify it, too."""
    return world.share(
        find,
        pack=lambda checkpoint: None if checkpoint is None else str(checkpoint.path),
        unpack=lambda path: None if path is None else load_checkpoint(Path(path)),
    )


def _refuse_to_replace(directory: RunDir) -> None:
    """Raise InputError where a model is all that a run has: imported, or left when its checkpoints were removed."""
    if directory.averaged.exists():
        raise InputError(
            f"{directory.path}: there is no checkpoint to go on from, and a new start would remove the averaged "
            f"model: train with init_from={directory.path} in another run_dir, or remove {directory.averaged}"
        )


def _augmentation(job: TrainJob, prepared: Prepared) -> Augmentation | None:
    rates = job.train.augment.rates
    if not rates:
        return None
    languages = {tag: job.data.languages_under(tag) for tag in (None, *job.data.learnt_tags())}
    make: Callable[..., Augmentation] = registry.find("lines", "augmentation")
    return make(rates, prepared.tokenizers, languages=languages, seed=job.train.seed)


def build_run(
    job: TrainJob,
    resolved: Resolved,
    prepared: Prepared,
    *,
    checkpoint: Checkpoint | None,
    source: Checkpoint | None,
    world: World,
    tries_memory: bool,
    proves: bool,
) -> Run:
    """The run at its first step, with the weights of `source` if there is one, or as the checkpoint left it.

    `proves`: where that is due, the device is compared with the plain way, and what it computes wrong is left for a
    plainer way. `tries_memory`: on a GPU, a step is tried. run.json keeps what was found.

    Raises InputError where no way is sound, or a step does not fit, and Stopped where the GPU breaks down.
    """
    set_up_process(threads=resolved.threads, deterministic=job.train.deterministic, compiles=resolved.compile)
    if world.size > 1:
        warn_of_idle_ranks(resolved, tokens_per_step=job.train.tokens_per_step, ranks=world.size)
        if not job.train.cuda_graphs:  # perhaps a run of one rank, which goes on with several: they meet in DDP
            resolved = replace(resolved, cuda_graphs=False)
    warn_of_early_average(first_of_average(job.train), job.train.max_steps)
    directory = RunDir(Path(job.run_dir))
    device = local_device(torch.device(resolved.device.name))
    avoid_cudnn_attention(device)
    stores = epoch_stores(
        prepared.store,
        prepared.tokenizers,
        mixture=prepared.mixture,
        rate=job.train.subword_sampling,
        seed=job.train.seed,
        augmentation=_augmentation(job, prepared),
    )

    # The state, and how to compute a step of it: in the first way that this device is sound in.
    prover = _prover(job, directory, device=device, world=world, proves=proves)
    batching = partial(batching_of, job, lengths=stores.lengths, mixture=stores.mixture)
    trial = None
    if tries_memory and can_try(device):
        trial = Trial(job, batching, stores.plain_lengths, device=device, world=world)
    build = partial(
        _build,
        job=job,
        world=world,
        device=device,
        prepared=prepared,
        batching_for=batching,
        checkpoint=checkpoint,
        source=source,
        prover=prover,
        trial=trial,
    )
    built = first_sound(prover, resolved, build)
    resolved = built.resolved
    if checkpoint is None and (built.memory or prover.compares):
        world.from_rank0(
            lambda: directory.write_record(
                replace(directory.read_record(), resolved=built.resolved, memory=built.memory)
            )
        )

    parameters = sum(parameter.numel() for parameter in built.state.model.parameters())
    settings = {name: f"{name} {value}" for name, value in to_json(resolved).items() if value is not None}
    log.info("%s parameters; %s", f"{parameters:,}", ", ".join(settings.pop(name) for name in SHOWN))
    log.debug("%s", ", ".join(settings.values()))
    if (obstacle := busy()) is not None:
        log.info("%s", obstacle)
    if (warning := untried_torch(torch.__version__)) is not None:
        log.warning(warning)
    if device.type == "cuda":
        log.info("cuDNN attention is off: it would plan anew for every batch shape")

    # The dev sets, which may change between two starts: validation only measures.
    most = job.model.max_positions - 1
    dev = {
        name: DevSet.of(pairs, prepared.tokenizers, name=name, max_pieces=most) for name, pairs in prepared.dev.items()
    }
    if built.record is not None and built.record.dev_digest != digest_sets(prepared.dev):
        key = "data.dev" if DEV in dev else "data.devs"
        log.warning("the text of %s has changed: its scores cannot be compared with the earlier ones", key)

    return Run(
        job=job,
        world=world,
        directory=directory,
        resolved=resolved,
        device=device,
        tokenizers=prepared.tokenizers,
        stores=stores,
        batching=batching(resolved),
        dev=dev,
        test=prepared.test,
        data_digest=prepared.report.digest,
        state=built.state,
        computation=built.computation,
        prover=prover,
    )


@dataclass(frozen=True)
class _Built:
    """What a run computes with, in one way."""

    resolved: Resolved  # that way, with micro-batches that fit into memory
    state: TrainState
    record: TrainingRecord | None  # of the checkpoint that the state is from
    computation: Computation
    memory: MemoryCheck | None


def _build(
    way: Resolved,
    *,
    job: TrainJob,
    world: World,
    device: torch.device,
    prepared: Prepared,
    batching_for: Callable[[Resolved], Batching],
    checkpoint: Checkpoint | None,
    source: Checkpoint | None,
    prover: Prover,
    trial: Trial | None,
) -> _Built:
    """Build the state, and what computes its steps, in this way. Raises UnsoundError if it is not sound on this device.

    Without a `trial`, no step is tried.
    """
    # The state: new, from other weights, or from a checkpoint.
    state = TrainState.at_start(
        job.model,
        job.train,
        vocab_size=prepared.tokenizers.vocab_sizes,
        device=device,
        precision=way.precision,
        source=source,
    )
    record = None if checkpoint is None else state.restore(checkpoint, rank=world.rank)
    store = prepared.store

    # Without the compiler and graphs.
    uncompiled, *_ = stages_of(way)
    prover.prove(uncompiled, lambda: plain_deviation(uncompiled, job, model=state.model, store=store, device=device))

    # Micro-batches that fit into memory.
    if trial is not None:
        way = trial.fit(way, _objective(uncompiled, job, state))
    batching = batching_for(way)

    # The model under its loss, as it will be trained.
    objective = _objective(way, job, state)  # compiled, if at all, once DDP has settled
    parallel = objective if way.cuda_graphs else world.wrap(objective)
    if parallel is not objective:
        first = collate(store, np.zeros(1, np.int64), batching.slots_of(store.lengths[:1]), kernel=batching.kernel)
        _settle(parallel, first.to(device), device=device, precision=way.precision)
    if way.compile:
        objective.compile()
        prover.prove(
            replace(way, cuda_graphs=False),
            lambda: compiled_deviation(
                way, objective=objective, parallel=parallel, store=store, batching=batching, device=device
            ),
        )
    memory = None if trial is None else trial.check(way, parallel)

    # What a step computes, recorded or not.
    computation = Computation(parallel, state.optimizer, state.scaler, job.train.clip_norm, device, way.precision)
    if way.cuda_graphs:
        computation = graphed = GraphedComputation(computation, reduces=world.size > 1)
        prover.prove(
            way, lambda: replayed_deviation(way, graphed=graphed, store=store, batching=batching, device=device)
        )
    return _Built(way, state, record, computation, memory)


def _settle(parallel: nn.Module, batch: Batch, *, device: torch.device, precision: Precision) -> None:
    """Let DDP have its first backward pass before the first step, of one pair, whose gradient is dropped.

    After that it puts parameters into other buckets, and so adds up the gradients of three ranks or more in another
    order. A run that resumes would begin with the first buckets again, and differ in the last bits.
    """
    with collective_errors_named():
        with autocast(device, precision):
            loss, _ = parallel(batch)
        loss.backward()
    parallel.zero_grad(set_to_none=True)


def _objective(way: Resolved, job: TrainJob, state: TrainState) -> Objective:
    """The model under its loss."""
    return Objective(state.model, job.train.label_smoothing, loss_rows=way.loss_rows).train()


def _prover(job: TrainJob, directory: RunDir, *, device: torch.device, world: World, proves: bool) -> Prover:
    """What compares ways to compute, where that is wanted, and writes to run.json what it finds."""
    if not proves:
        return Prover(device, world, known=None, keep=lambda proof: None, compares=False)
    known = world.share(
        lambda: directory.read_record().proof,
        pack=lambda proof: None if proof is None else to_json(proof),
        unpack=lambda stored: None if stored is None else from_json(Proof, stored),
    )
    return Prover(
        device,
        world,
        known=known,
        keep=lambda proof: directory.write_record(replace(directory.read_record(), proof=proof)),
        compares=wants_proof(job, device),
    )
