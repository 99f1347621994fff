"""`transformer replay`: one step of a training again, watched, to find where numbers begin that are not finite.

The step is reached as the training reached it, in memory: from the newest checkpoint before it, step by step. Then
hooks look at what each module gives, at the gradient of that, and at the gradient of each parameter, in the order in
which they come. They see infinity as well as NaN, of which torch's own anomaly detection sees only the second, and they
name modules, where it names operations. The run directory stays as it is.

A training of several ranks, or a compiled one, is replayed by one process and eagerly: the same to rounding.
"""

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from transformer.checkpoint import Checkpoint, first_not_finite, load_checkpoint, newest_finite
from transformer.config.jobs import ReplayJob, TrainJob
from transformer.config.settings import AttentionKernel, TrainConfig
from transformer.data.batch import Batch
from transformer.data.epochs import EpochStores, epoch_stores
from transformer.data.loader import Position, Step, load_steps
from transformer.data.plan import Batching, plan_epoch, split_step
from transformer.data.prepare import prepare
from transformer.data.store import Ids
from transformer.data.tokenizer import Tokenizer
from transformer.errors import CheckpointError, InputError
from transformer.layout import Packed
from transformer.model.transformer import Transformer, parameters_by_name
from transformer.records import Resolved
from transformer.run_dir import RunDir, list_steps
from transformer.training.optimizer import rate_of
from transformer.training.resolve import batching_of, resolve_again
from transformer.training.state import TrainState
from transformer.training.step import Objective, StepResult, train_step
from transformer.training.warm_start import find_source

log = logging.getLogger(__name__)

SHOWN = 3  # sentences whose text is part of the result
LISTED = 20  # ids that are printed


class Phase(Enum):
    """Where in a step a number is."""

    forward = "forward"  # in what a module gives
    loss = "loss"
    backward = "backward"  # in the gradient of what a module gives, or of a parameter
    norm = "norm"  # every gradient is finite, and their norm, or their sum over micro-batches, is not
    update = "update"  # in a weight that Adam has changed


@dataclass(frozen=True)
class Sentence:
    """A sentence pair, by its number among the prepared ones, counted from 0, and as its pieces spell it."""

    id: int
    source: str
    target: str


@dataclass(frozen=True)
class Finding:
    """The first number of a step that is not finite."""

    phase: Phase
    module: str  # or parameter
    micro_batch: int | None  # None: of the whole step
    ids: list[int]  # of the sentences whose rows show it; where no row can tell, of the whole micro-batch
    sentences: list[Sentence]  # the first few of them


@dataclass(frozen=True)
class Replay:
    """A step that was run again."""

    run_dir: str
    checkpoint: str | None  # from which it was reached; None: from the beginning
    step: int  # counted from 1
    epoch: int
    step_in_epoch: int  # counted from 0
    loss: float  # mean over target tokens
    gradient_norm: float
    loss_scale: float | None  # None: the loss is not scaled
    finding: Finding | None


def replay(job: ReplayJob) -> Replay:
    """Run `job.step` again, or the first step behind the newest checkpoint that has a number that is not finite.

    That one is looked for up to the next regular checkpoint, which the training did not come to. Raises InputError
    where there is no such run, or its corpus is another; CheckpointError where it is damaged.
    """
    run = RunDir(Path(job.run_dir))
    if not run.path.is_dir():
        raise InputError(f"{run.path}: no such run directory")
    checkpoint = newest_finite(run.path) if job.step is None else _checkpoint_before(run, job.step)
    training = _open(run, checkpoint)
    first, position = _start(training, job.step)
    last = job.step or first + training.job.train.save_every - 1
    origin = "the beginning" if checkpoint is None else checkpoint.path.name
    log.info("from %s: step %d and on, to step %d at most", origin, first, last)

    steps = load_steps(
        training.stores,
        training.batching,
        rank=0,
        world_size=1,
        position=position,
        prefetch=2,
        device=training.device,
    )
    with closing(training.stores), closing(steps):
        for number, step in enumerate(steps, first):
            found = _run(training, step, number, is_watched=number == job.step)
            if number == last or (job.step is None and found.finding is not None):
                break
    return replace(found, run_dir=str(run.path), checkpoint=None if checkpoint is None else checkpoint.path.name)


# ---- the training, as it stood --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Training:
    """What a step needs."""

    job: TrainJob
    resolved: Resolved
    device: torch.device
    stores: EpochStores
    batching: Batching
    tokenizer: Tokenizer
    state: TrainState


def _checkpoint_before(run: RunDir, step: int) -> Checkpoint | None:
    """The newest checkpoint from which a step can be reached; None: only the beginning is before it.

    A skipped update left the weights as they were: where the last one before a checkpoint was skipped, that step can be
    run again from this very checkpoint.
    """
    for candidate in reversed(list_steps(run.path)):
        if candidate > step:
            continue
        try:
            checkpoint = load_checkpoint(run.checkpoint(candidate))
            training = checkpoint.run_state().training
        except CheckpointError as error:
            log.warning("%s; an earlier one is taken", error)
            continue
        if training is not None and (candidate < step or training.progress.streak):
            return checkpoint
    return None


def _open(run: RunDir, checkpoint: Checkpoint | None) -> _Training:
    """The training as the checkpoint left it, or as it began."""
    record = run.read_record()
    job = replace(record.config, run_dir=str(run.path))
    if checkpoint is not None:
        job = replace(job, train=checkpoint.settings("train", TrainConfig))  # as it was when this was committed
    resolved = resolve_again(job, record.resolved)
    if resolved.attention_kernel is AttentionKernel.flex:  # it must be compiled, and a replay is not: groups instead
        resolved = replace(resolved, attention_kernel=None)
    device = torch.device(resolved.device.name)
    torch.set_num_threads(resolved.threads)

    prepared = prepare(job)
    if prepared.report.digest != record.data_digest:
        raise InputError(f"{run.path}: its training data, or its filters, are no longer what they were")
    run.check_tokenizer(prepared.tokenizer_model)
    tokenizer = Tokenizer.from_bytes(prepared.tokenizer_model)

    stores = epoch_stores(
        prepared.store,
        tokenizer,
        rate=job.train.subword_sampling,
        seed=job.train.seed,
        threads=resolved.threads,
    )
    state = TrainState.at_start(
        job.model,
        job.train,
        vocab_size=tokenizer.vocab_size,
        device=device,
        precision=resolved.precision,
        source=find_source(job) if checkpoint is None else None,
    )
    if checkpoint is not None:
        state.restore(checkpoint, rank=0)
    return _Training(
        job=job,
        resolved=resolved,
        device=device,
        stores=stores,
        batching=batching_of(job, resolved, lengths=stores.lengths, mixture=prepared.mixture),
        tokenizer=tokenizer,
        state=state,
    )


def _start(training: _Training, step: int | None) -> tuple[int, Position]:
    """The number of the first step to run, counted from 1, and where its sentences are."""
    progress, scaler = training.state.progress, training.state.scaler
    if not progress.streak or step not in (None, progress.step):
        return progress.step + 1, Position(progress.epoch, progress.step_in_epoch)

    if scaler.is_enabled():  # the skipped update halved it
        scale = scaler.get_scale() / scaler.get_backoff_factor()
        scaler.load_state_dict({**scaler.state_dict(), "scale": scale})
    return progress.step, Position(progress.epoch, progress.step_in_epoch - 1)


# ---- a step ---------------------------------------------------------------------------------------------------------


def _run(training: _Training, step: Step, number: int, *, is_watched: bool) -> Replay:
    """Run step `number`, counted from 1; if its update is skipped, once more and watched."""
    state, recipe = training.state, training.job.train
    objective = Objective(state.model, recipe.label_smoothing, loss_rows=training.resolved.loss_rows).train()
    scaler = state.scaler.state_dict()
    loss_scale = state.loss_scale
    watch = _Watch()
    with watch.over(objective) if is_watched else nullcontext():
        result = train_step(
            objective,
            state.optimizer,
            step,
            scaler=state.scaler,
            world_size=1,
            rate=rate_of(recipe, training.job.model.d_model, step=number - 1),
            seed=recipe.seed,
            clip_norm=recipe.clip_norm,
            device=training.device,
            precision=training.resolved.precision,
        )
    if not (is_watched or bool(result.applied)):
        state.scaler.load_state_dict(scaler)  # weights and moments are as they were
        return _run(training, step, number, is_watched=True)

    seen = watch.seen or _seen_after(state.model, result)
    return Replay(
        run_dir="",
        checkpoint=None,
        step=number,
        epoch=step.epoch,
        step_in_epoch=step.index,
        loss=float(result.loss_sum) / step.target_tokens,
        gradient_norm=float(result.grad_norm),
        loss_scale=loss_scale,
        finding=None if seen is None else _finding(training, step, seen),
    )


@dataclass(frozen=True)
class _Seen:
    """A number that is not finite: in which phase, where, and in which sentences of which micro-batch."""

    phase: Phase
    module: str
    micro_batch: int | None = None  # its place in the step
    places: list[int] | None = None  # of the sentences in it; None: all


class _Watch:
    """Remembers the first number of a step that is not finite. Every look waits for the device."""

    def __init__(self) -> None:
        self.seen: _Seen | None = None
        self._micro_batch = -1
        self._batch: Batch | None = None

    @contextmanager
    def over(self, objective: Objective) -> Iterator[None]:
        """Look at what every module gives, at its gradient, and at the gradient of every parameter."""
        hooks = [objective.register_forward_pre_hook(self._begin), objective.register_forward_hook(self._look_at_loss)]
        for name, module in objective.model.named_modules():
            hooks.append(module.register_forward_hook(partial(self._look_at_output, name)))
        for name, parameter in objective.model.named_parameters():
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
        if self.seen is None and not bool(torch.isfinite(sums[0])):
            self.seen = _Seen(Phase.loss, "output", self._micro_batch)

    def _look_at_output(self, name: str, _module: nn.Module, _arguments: object, output: Tensor) -> None:
        self._look_at_rows(Phase.forward, name, output)
        if output.requires_grad:
            output.register_hook(partial(self._look_at_rows, Phase.backward, name))  # type: ignore[no-untyped-call]

    def _look_at_rows(self, phase: Phase, name: str, x: Tensor) -> None:
        """`x` is `(B, T, ...)`, or `(N, ...)` packed, where the empty slots at the end hold anything."""
        if self.seen is not None or self._batch is None:
            return
        is_bad = ~torch.isfinite(x).flatten(1).all(1)  # (B,) or (N,)
        rows = is_bad.nonzero().flatten().cpu()

        reads_source = name.startswith(("source_embedding", "encoder"))
        reads_memory = "cross_attention.W_k" in name or "cross_attention.W_v" in name
        layout = self._batch.source_layout if reads_source or reads_memory else self._batch.target_layout
        if isinstance(layout, Packed):
            ends = layout.offsets[1:].cpu()
            rows = torch.searchsorted(ends, rows[rows < ends[-1]].to(ends.dtype), right=True).unique()  # type: ignore[no-untyped-call]
        if len(rows):
            self.seen = _Seen(phase, name, self._micro_batch, rows.tolist())

    def _look_at_gradient(self, name: str, gradient: Tensor) -> None:
        if self.seen is None and not bool(torch.isfinite(gradient).all()):
            self.seen = _Seen(Phase.backward, name, self._micro_batch)


def _seen_after(model: Transformer, result: StepResult) -> _Seen | None:
    """What shows only once all micro-batches are done."""
    if bool(result.applied):
        bad = first_not_finite(parameters_by_name(model))
        return None if bad is None else _Seen(Phase.update, bad)

    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    largest = max(gradients, key=lambda name: float(gradients[name].abs().max()))
    return _Seen(Phase.norm, first_not_finite(gradients) or largest)


def _finding(training: _Training, step: Step, seen: _Seen) -> Finding:
    """The same with the sentences by their numbers, and the text of the first ones."""
    if seen.micro_batch is None:
        return Finding(seen.phase, seen.module, None, ids=[], sentences=[])

    batching, store = training.batching, training.stores(step.epoch)
    plan = plan_epoch(
        store.lengths,
        mixture=batching.mixture,
        seed=batching.seed,
        epoch=step.epoch,
        tokens_per_step=batching.tokens_per_step,
    )
    parts = split_step(
        plan[step.index],
        store.lengths,
        max_tokens=batching.max_tokens,
        micro_batch_multiple=batching.micro_batch_multiple,
        capacities=batching.capacities,
    )
    micro_batch, _ = step.micro_batches[seen.micro_batch]
    ids = parts[micro_batch] if seen.places is None else parts[micro_batch][seen.places]
    return Finding(
        seen.phase,
        seen.module,
        micro_batch,
        ids=ids.tolist(),
        sentences=[_sentence(training, ids[n : n + 1]) for n in range(min(SHOWN, len(ids)))],
    )


def _sentence(training: _Training, ids: Ids) -> Sentence:
    source, target = (training.stores.corpus.gather(ids, side).pieces.tolist() for side in (0, 1))
    texts = training.tokenizer.decode([source, target])
    return Sentence(int(ids[0]), *texts)


# ---- for people -----------------------------------------------------------------------------------------------------

WORDS = {
    Phase.forward: "in what {} gives",
    Phase.loss: "in the loss",
    Phase.backward: "on the way back, in the gradient of {}",
    Phase.norm: "in the norm of the gradient, largest in {}",
    Phase.update: "in {}, once Adam had changed it",
}


def format_replay(replayed: Replay) -> str:
    """The step, and what was found in it."""
    scale = "" if replayed.loss_scale is None else f", loss scale {replayed.loss_scale:g}"
    lines = [
        f"{replayed.run_dir}: step {replayed.step} (epoch {replayed.epoch}, step {replayed.step_in_epoch} in it), "
        f"reached from {replayed.checkpoint or 'the beginning'}",
        f"loss {replayed.loss:.4g}, gradient {replayed.gradient_norm:.4g}{scale}",
    ]
    finding = replayed.finding
    if finding is None:
        return "\n".join([*lines, "every number in it is finite", ""])

    lines.append(f"the first number that is not finite: {WORDS[finding.phase].format(finding.module)}")
    if finding.micro_batch is not None:
        more = f", and {len(finding.ids) - LISTED} more" if len(finding.ids) > LISTED else ""
        listed = ", ".join(map(str, finding.ids[:LISTED]))
        lines.append(f"micro-batch {finding.micro_batch}, sentence pairs {listed}{more}")
    lines += [f"  {sentence.id}: {sentence.source} | {sentence.target}" for sentence in finding.sentences]
    return "\n".join([*lines, ""])
