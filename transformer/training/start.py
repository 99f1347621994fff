"""From a job to a run: its data prepared, its directory locked, and its training started, or resumed where it stands.

    open_run    prepare -> lock -> newest checkpoint -> start_run or resume_run -> TrainState -> Run

Rank 0 goes first at each stage, and the other ranks take over what it found: the same settings, the same checkpoint.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from transformer.checkpoint import Checkpoint, check_config, load_checkpoint, newest
from transformer.compute import avoid_cudnn_attention, resolve_device
from transformer.config.jobs import TrainJob
from transformer.config.primitives import from_json, to_json
from transformer.config.settings import Device
from transformer.cost import count_parameters
from transformer.data.corpus import Pair
from transformer.data.epochs import EpochStores, epoch_stores
from transformer.data.prepare import Prepared, SharedPrepared, prepare
from transformer.data.store import Mixture
from transformer.data.tokenizer import Tokenizer
from transformer.distributed import Wait, World, local_device
from transformer.errors import CheckpointError, StorageError
from transformer.evaluation.score import check_language
from transformer.records import Progress, Resolved
from transformer.run_dir import RunDir, list_steps, lock_run
from transformer.tracking import log_to
from transformer.training.process import set_up_process
from transformer.training.resume import resume_run, start_run
from transformer.training.state import TrainState
from transformer.training.validate import DevSet
from transformer.training.warm_start import find_source

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """What is trained, on what, and by which ranks: fixed from the first step to the last, but for `state`."""

    job: TrainJob
    world: World
    directory: RunDir
    resolved: Resolved
    device: torch.device
    tokenizer: Tokenizer
    stores: EpochStores
    mixture: Mixture
    dev: DevSet
    test: Mapping[str, Sequence[Pair]]
    data_digest: str
    state: TrainState

    @property
    def progress(self) -> Progress:
        """How far training has come."""
        return self.state.progress


def open_run(job: TrainJob, world: World, held: ExitStack) -> Run:
    """Prepare, lock, and start or resume. What has to be released at the end of the training is put into `held`.

    Raises InputError, LockedError, StorageError and CheckpointError; the error of one rank ends all of them.
    """
    # Before any time is spent.
    check_language(job.data.tgt_lang)
    check_config(to_json(job))

    directory = RunDir(Path(job.run_dir))
    if not world.is_rank0:
        logging.getLogger("transformer").setLevel(logging.WARNING)

    # The checkpoint of `init_from`, which a run needs only until it has one of its own.
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

    # Start, or go on from the newest checkpoint.
    checkpoint = _same_on_all_ranks(lambda: newest(directory.path), world)
    answer = world.from_rank0(
        lambda: to_json(_start_or_resume(job, prepared, checkpoint, source=source, world_size=world.size))
    )
    resolved = from_json(Resolved, answer)
    return _build(job, resolved, prepared, checkpoint=checkpoint, source=source, world=world)


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
    prepared: Prepared | None = None

    def on_rank0() -> object:
        nonlocal prepared
        prepared = prepare(job)
        return to_json(prepared.to_share())

    shared = world.from_rank0(on_rank0, wait=Wait.work)
    return prepared or from_json(SharedPrepared, shared).open()


def _same_on_all_ranks(find: Callable[[], Checkpoint | None], world: World) -> Checkpoint | None:
    """The checkpoint that rank 0 finds, and has verified; the other ranks verify it, too."""
    checkpoint: Checkpoint | None = None

    def on_rank0() -> str | None:
        nonlocal checkpoint
        checkpoint = find()
        return None if checkpoint is None else str(checkpoint.path)

    path = world.from_rank0(on_rank0)
    if not world.is_rank0 and path is not None:
        checkpoint = load_checkpoint(Path(path))
    return checkpoint


def _start_or_resume(
    job: TrainJob, prepared: Prepared, checkpoint: Checkpoint | None, *, source: Checkpoint | None, world_size: int
) -> Resolved:
    """Write the record of a new run, or check that this job may go on from the checkpoint. Returns its settings."""
    if checkpoint is None:
        return start_run(job, prepared, source, world_size=world_size)
    return resume_run(job, prepared, checkpoint)


def _build(
    job: TrainJob,
    resolved: Resolved,
    prepared: Prepared,
    *,
    checkpoint: Checkpoint | None,
    source: Checkpoint | None,
    world: World,
) -> Run:
    """The run at its first step, with the weights of `source` if there is one, or as the checkpoint left it."""
    set_up_process(threads=resolved.threads, deterministic=job.train.deterministic)
    tokenizer = Tokenizer.from_bytes(prepared.tokenizer_model)
    device = local_device(torch.device(resolved.device.name))
    avoid_cudnn_attention(device)

    # The state: new, from other weights, or from a checkpoint.
    state = TrainState.at_start(
        job.model,
        job.train,
        vocab_size=tokenizer.vocab_size,
        device=device,
        precision=resolved.precision,
        source=source,
    )
    record = None if checkpoint is None else state.restore(checkpoint, rank=world.rank)

    settings = ", ".join(f"{name} {value}" for name, value in to_json(resolved).items() if value is not None)
    log.info("%s parameters; %s", f"{count_parameters(job.model, tokenizer.vocab_size).total:,}", settings)
    if device.type == "cuda":
        log.info("attention by cuDNN is off: it would plan anew for every shape of a batch")

    # The dev set, which may change between two starts: validation only measures.
    dev = DevSet.of(prepared.dev, tokenizer, max_pieces=job.model.max_positions - 1)
    if record is not None and record.dev_digest != dev.digest:
        log.warning("the text of data.dev has changed: its scores cannot be compared with the earlier ones")

    return Run(
        job=job,
        world=world,
        directory=RunDir(Path(job.run_dir)),
        resolved=resolved,
        device=device,
        tokenizer=tokenizer,
        stores=epoch_stores(
            prepared.store,
            tokenizer,
            rate=job.train.subword_sampling,
            seed=job.train.seed,
        ),
        mixture=prepared.mixture,
        dev=dev,
        test=prepared.test,
        data_digest=prepared.report.digest,
        state=state,
    )
