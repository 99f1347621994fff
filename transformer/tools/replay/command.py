"""`transformer replay`: run one step of a training again, to find the first number in it that is not finite.

    run directory -> newest checkpoint before the step -> step by step up to it -> the step, watched by hooks -> Replay

The hooks check each module's output, the gradient of that output, and each parameter's gradient, in the order in which
torch computes them. They see infinity as well as NaN, and they name modules; torch's own anomaly detection sees only
NaN, and names operations. The run directory stays as it is.

A training of several ranks, or a compiled one, is replayed in one process and eagerly: its numbers are the same up to
rounding.
"""

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from transformer.checkpoint import Checkpoint, first_not_finite, load_checkpoint, newest_finite
from transformer.config.settings import TrainConfig
from transformer.data.batch import Batch
from transformer.data.loader import Position, Step, load_steps
from transformer.data.prepare import prepare
from transformer.distributed import World
from transformer.errors import CheckpointError, InputError
from transformer.layout import Packed
from transformer.machine import most_threads
from transformer.model.transformer import Transformer, parameters_by_name
from transformer.run_dir import RunDir, list_steps
from transformer.run_names import resolve_init_from
from transformer.tools.replay.job import ReplayJob
from transformer.training.optimizer import rate_of
from transformer.training.process import process_settings_restored
from transformer.training.record import changed_order
from transformer.training.resolve import resolve_again
from transformer.training.start import Run, build_run
from transformer.training.state import TrainState
from transformer.training.step import StepResult, train_step
from transformer.training.warm_start import find_source

log = logging.getLogger(__name__)

SHOWN = 3  # sentences whose text is part of the result
LISTED = 20  # ids of sentences that are printed


class Phase(Enum):
    """The part of a step that a number belongs to."""

    forward = "forward"  # the output of a module
    loss = "loss"
    backward = "backward"  # the gradient of a module's output, or of a parameter
    norm = "norm"  # every gradient is finite, but their norm, or their sum over micro-batches, is not
    update = "update"  # a weight that the update has changed


@dataclass(frozen=True)
class Sentence:
    """A sentence pair of the prepared corpus, as its pieces spell it."""

    id: int  # counted from 0
    source: str
    target: str


@dataclass(frozen=True)
class Finding:
    """The first number of a step that is not finite."""

    phase: Phase
    module: str  # or parameter
    micro_batch: int | None  # None: the number belongs to the whole step
    ids: list[int]  # of the sentences with such a number; where no row can tell, of the whole micro-batch
    sentences: list[Sentence]  # the first few of these


@dataclass(frozen=True)
class Replay:
    """A step that was run again, and what was found in it."""

    run_dir: str
    checkpoint: str | None  # from which the step was reached; None: from the beginning
    step: int  # counted from 1
    epoch: int
    chapter: int  # of the epoch, counted from 0
    step_in_chapter: int  # counted from 0
    loss: float  # mean over target tokens
    gradient_norm: float
    loss_scale: float | None  # None: the loss is not scaled
    finding: Finding | None


def replay(job: ReplayJob) -> Replay:
    """Run `job.step` again; without a step, search for the first one with a number that is not finite.

    The search begins behind the newest checkpoint and ends where the next regular checkpoint would be, which the
    training did not come to. Raises InputError where there is no such run, or where its corpus has changed;
    CheckpointError where a checkpoint is damaged.
    """
    directory = RunDir(Path(job.run_dir))
    if not directory.path.is_dir():
        raise InputError(f"{directory.path}: no such run directory")

    with process_settings_restored():
        # Where to begin, and where to end.
        checkpoint = newest_finite(directory.path) if job.step is None else _checkpoint_before(directory, job.step)
        origin = None if checkpoint is None else checkpoint.path.name
        run = _rebuild(directory, checkpoint)
        first, position = _first_step(run.state, job.step)
        if job.step is not None and job.step > run.job.train.max_steps:
            raise InputError(f"step={job.step}: {directory.path} is a training of {run.job.train.max_steps} steps")
        last = job.step or first + run.job.train.save_every - 1
        log.info("running steps %d to %d at most, from %s", first, last, origin or "the beginning")
        if job.step is None and first > run.job.train.max_steps:
            log.warning("the training ended at step %d: these steps were never taken", run.job.train.max_steps)

        # Step by step, as the training went.
        steps = load_steps(
            run.stores,
            run.batching,
            rank=0,
            world_size=1,
            position=position,
            prefetch=2,
            device=run.device,
        )
        with closing(steps), closing(run.stores):
            for number, step in enumerate(steps, first):
                replayed = _run_step(run, step, number, origin=origin, is_watched=number == job.step)
                has_found = job.step is None and replayed.finding is not None
                if has_found or number == last:
                    break
    return replayed


# ---- the training, as it stood --------------------------------------------------------------------------------------


def _checkpoint_before(run: RunDir, step: int) -> Checkpoint | None:
    """The newest checkpoint from which a step can be reached; None: it can be reached from the beginning only.

    A skipped update left the weights as they were. So where the last update before a checkpoint was skipped, that step
    itself can be run again from this checkpoint.
    """
    for candidate in reversed(list_steps(run.path)):
        if candidate > step:
            continue
        try:
            checkpoint = load_checkpoint(run.checkpoint(candidate))
            training = checkpoint.run_state().training
        except CheckpointError as error:
            log.warning("%s; an earlier checkpoint is used", error)
            continue

        if training is None:
            continue
        was_skipped = training.progress.streak > 0
        if candidate < step or was_skipped:
            return checkpoint
    return None


def _rebuild(directory: RunDir, checkpoint: Checkpoint | None) -> Run:
    """The run as the checkpoint left it, in one process and eager; without a checkpoint, as it began."""
    # Its settings, as they were when the checkpoint was committed.
    record = directory.read_record()
    if checkpoint is None and record.imported is not None:
        raise InputError(
            f"{directory.path}: an imported model, without a record of its training: there is no step to replay"
        )
    job = replace(record.config, run_dir=str(directory.path))
    if checkpoint is not None:
        job = replace(job, train=checkpoint.settings("train", TrainConfig))
    if job.train.threads is not None and job.train.threads > most_threads():  # of a larger machine, or damaged
        job = replace(job, train=replace(job.train, threads=None))
    resolved = replace(resolve_again(job, record.resolved), compile=False, cuda_graphs=False)

    # Its corpus, which must be the same.
    prepared = prepare(resolve_init_from(job))
    if not prepared.is_of(record.data_digest):
        raise InputError(
            f"{directory.path}: the training data or the filters have changed since this run began: restore them to "
            "replay it"
        )
    directory.check_tokenizers(prepared.tokenizers.models)
    for change in [] if checkpoint is None else changed_order(job, prepared.mixture, checkpoint=checkpoint):
        raise InputError(f"{directory.path}: {change}: replay it with the version that it was trained with")

    return build_run(
        job,
        resolved,
        prepared,
        checkpoint=checkpoint,
        source=find_source(job) if checkpoint is None else None,
        world=World(0, 1, {}),
        tries_memory=False,
        proves=False,
    )


def _first_step(state: TrainState, step: int | None) -> tuple[int, Position]:
    """The number of the first step to run, counted from 1, and the position of its sentences.

    That is the step after the checkpoint. But where the last update before the checkpoint was skipped, and its step is
    the one to run (or none is given), it is that step, with the loss scale that it had.
    """
    progress = state.progress
    was_skipped = progress.streak > 0
    if was_skipped and step in (None, progress.step):
        _undo_backoff(state)
        return progress.step, Position(progress.epoch, progress.chapter, progress.step_in_chapter - 1)
    return progress.step + 1, Position(progress.epoch, progress.chapter, progress.step_in_chapter)


def _undo_backoff(state: TrainState) -> None:
    """Set the loss scale back to what it was before a skipped update lowered it."""
    scaler = state.scaler
    if scaler.is_enabled():
        settings = scaler.state_dict()
        settings["scale"] = scaler.get_scale() / scaler.get_backoff_factor()
        scaler.load_state_dict(settings)


# ---- a step ---------------------------------------------------------------------------------------------------------


def _run_step(run: Run, step: Step, number: int, *, origin: str | None, is_watched: bool) -> Replay:
    """Run step `number`, counted from 1; if its update is skipped, run it once more and watch it."""
    state = run.state
    recipe = run.job.train
    rate = rate_of(recipe, run.job.model.d_model, step=number - 1)

    # What a skipped update changes: the loss scale, and nothing else.
    scaler_before = state.scaler.state_dict()
    loss_scale = state.loss_scale

    watch = _Watch()
    with watch.over(run.computation.objective, state.model) if is_watched else nullcontext():
        result = train_step(run.computation, step, world_size=1, rate=rate, seed=recipe.seed)
    if not is_watched and not bool(result.applied):
        state.scaler.load_state_dict(scaler_before)
        return _run_step(run, step, number, origin=origin, is_watched=True)

    first_seen = watch.first_seen or _seen_after(state.model, result)
    return Replay(
        run_dir=run.job.run_dir,
        checkpoint=origin,
        step=number,
        epoch=step.epoch,
        chapter=step.chapter,
        step_in_chapter=step.index,
        loss=float(result.loss_sum) / step.target_tokens,
        gradient_norm=float(result.grad_norm),
        loss_scale=loss_scale,
        finding=None if first_seen is None else _finding(run, step, first_seen),
    )


@dataclass(frozen=True)
class _Seen:
    """Where in a step a number is that is not finite."""

    phase: Phase
    module: str  # or parameter
    micro_batch: int | None  # its place in the step; None: the number belongs to the whole step
    rows: list[int] | None  # the sentences of the micro-batch that have such a number; None: no row can tell


class _Watch:
    """Remembers the first number of a step that is not finite. Each check waits for the device to finish."""

    def __init__(self) -> None:
        self.first_seen: _Seen | None = None
        self._micro_batch = -1  # the place of the one that is computed now
        self._batch: Batch | None = None

    @contextmanager
    def over(self, objective: nn.Module, model: Transformer) -> Iterator[None]:
        """Look at the output of every module, at its gradient, and at the gradient of every parameter."""
        hooks = [
            objective.register_forward_pre_hook(self._begin),
            objective.register_forward_hook(self._look_at_loss),
        ]
        for name, module in model.named_modules():
            hooks.append(module.register_forward_hook(partial(self._look_at_output, name)))
        for name, parameter in model.named_parameters():
            hooks.append(parameter.register_hook(partial(self._look_at_gradient, name)))  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _begin(self, _objective: nn.Module, arguments: tuple[Batch]) -> None:
        self._micro_batch += 1
        (self._batch,) = arguments

    def _look_at_loss(self, _objective: nn.Module, _arguments: object, sums: tuple[Tensor, Tensor]) -> None:
        if self.first_seen is None and not bool(torch.isfinite(sums[0])):
            self.first_seen = _Seen(Phase.loss, "output", self._micro_batch, rows=None)

    def _look_at_output(self, name: str, _module: nn.Module, _arguments: object, output: Tensor) -> None:
        """Look at an output now, and at its gradient when that comes."""
        self._look_at_rows(Phase.forward, name, output)
        if output.requires_grad:
            output.register_hook(partial(self._look_at_rows, Phase.backward, name))  # type: ignore[no-untyped-call]

    def _look_at_rows(self, phase: Phase, name: str, x: Tensor) -> None:
        """`x` is `(B, T, ...)`, or `(N, ...)` packed, where the empty slots at the end may hold anything."""
        if self.first_seen is not None or self._batch is None:
            return
        is_finite = torch.isfinite(x).flatten(1).all(1)  # (B,) or (N,)
        rows = is_finite.logical_not().nonzero().flatten().cpu()

        layout = self._batch.source_layout if _has_source_rows(name) else self._batch.target_layout
        if isinstance(layout, Packed):
            # From slots to sentences: sentence i ends before slot offsets[i + 1].
            ends = layout.offsets[1:].cpu()
            slots = rows[rows < ends[-1]].to(ends.dtype)
            rows = torch.searchsorted(ends, slots, right=True).unique()  # type: ignore[no-untyped-call]
        if len(rows):
            self.first_seen = _Seen(phase, name, self._micro_batch, rows=rows.tolist())

    def _look_at_gradient(self, name: str, gradient: Tensor) -> None:
        if self.first_seen is None and not bool(torch.isfinite(gradient).all()):
            self.first_seen = _Seen(Phase.backward, name, self._micro_batch, rows=None)


def _has_source_rows(module: str) -> bool:
    """Whether the rows of a module's output are source positions: the encoder's, or the keys that a decoder reads."""
    is_encoder = module.startswith(("source_embedding", "encoder"))
    reads_memory = "cross_attention.W_k" in module or "cross_attention.W_v" in module
    return is_encoder or reads_memory


def _seen_after(model: Transformer, result: StepResult) -> _Seen | None:
    """What shows only once all micro-batches are done."""
    # The update was made: it may have spoilt a weight.
    if bool(result.applied):
        parameter = first_not_finite(parameters_by_name(model))
        return None if parameter is None else _Seen(Phase.update, parameter, micro_batch=None, rows=None)

    # The update was skipped, because a sum of gradients or their norm is not finite.
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    largest = max(gradients, key=lambda name: float(gradients[name].abs().max()))
    parameter = first_not_finite(gradients) or largest
    return _Seen(Phase.norm, parameter, micro_batch=None, rows=None)


def _finding(run: Run, step: Step, seen: _Seen) -> Finding:
    """What was seen, with the ids of its sentences and the text of the first ones."""
    if seen.micro_batch is None:
        return Finding(seen.phase, seen.module, None, ids=[], sentences=[])

    # The step holds no ids: plan it again.
    store = run.stores.make(step.epoch)  # not the loader's own: it is ahead
    plan = run.batching.plan(store.lengths, epoch=step.epoch, chapter=step.chapter)
    micro_batches = run.batching.split(plan[step.index], store.lengths)
    micro_batch, _ = step.micro_batches[seen.micro_batch]
    ids = micro_batches[micro_batch]
    if seen.rows is not None:
        ids = ids[seen.rows]
    ids = run.stores.corpus_ids(ids)

    return Finding(
        seen.phase,
        seen.module,
        micro_batch,
        ids=ids.tolist(),
        sentences=[_sentence(run, index) for index in ids[:SHOWN].tolist()],
    )


def _sentence(run: Run, index: int) -> Sentence:
    """The text of a sentence pair of the corpus."""
    ids = np.array([index])
    source_pieces = run.stores.corpus.gather(ids, 0).pieces.tolist()
    target_pieces = run.stores.corpus.gather(ids, 1).pieces.tolist()
    [source] = run.tokenizers.source.decode([source_pieces])
    [target] = run.tokenizers.target.decode([target_pieces])
    return Sentence(index, source, target)


# ---- for people -----------------------------------------------------------------------------------------------------

# Where the number is, by the phase; {} is the module or the parameter.
PLACES = {
    Phase.forward: "in the output of {}",
    Phase.loss: "in the loss",
    Phase.backward: "in the backward pass, in the gradient of {}",
    Phase.norm: "in the norm of the gradient, largest in {}",
    Phase.update: "in {}, once the update had changed it",
}


def format_replay(replayed: Replay) -> str:
    """The step, and what was found in it, as lines of text."""
    origin = replayed.checkpoint or "the beginning"
    scale = "" if replayed.loss_scale is None else f", loss scale {replayed.loss_scale:g}"
    place = f"epoch {replayed.epoch + 1}"
    if replayed.chapter:
        place += f", chapter {replayed.chapter + 1}"
    lines = [
        f"{replayed.run_dir}: step {replayed.step} ({place}, step {replayed.step_in_chapter} in it), "
        f"reached from {origin}",
        f"loss {replayed.loss:.4g}, gradient norm {replayed.gradient_norm:.4g}{scale}",
    ]
    if replayed.finding is None:
        lines.append("every number in it is finite")
    else:
        lines += _finding_lines(replayed.finding)
    return "".join(f"{line}\n" for line in lines)


def _finding_lines(finding: Finding) -> list[str]:
    where = PLACES[finding.phase].format(finding.module)
    lines = [f"the first number that is not finite: {where}"]

    if finding.micro_batch is not None:
        listed = ", ".join(map(str, finding.ids[:LISTED]))
        unlisted = len(finding.ids) - LISTED
        more = f", and {unlisted} more" if unlisted > 0 else ""
        lines.append(f"micro-batch {finding.micro_batch}, sentence pairs {listed}{more}")

    lines += [f"  {sentence.id}: {sentence.source} | {sentence.target}" for sentence in finding.sentences]
    return lines
