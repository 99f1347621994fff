"""Checks of the model and of the machine: whether the model can learn, only from what it may see, and at what cost.

    check_leak      change target tokens; what is predicted before them must stay as it is
    check_device    on a GPU: how a step computes, compared with the plain way
    check_overfit   learn a few pairs by heart, with the step that training uses
    check_cost      memory and disk against what this machine has; hours, from one micro-batch and one update

The model is the job's own, with its layers, widths and layout. In the first two checks dropout is off, so that the
numbers are the same each time.
"""

import shutil
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from transformer.compute import autocast, dtype_of, loss_scaler, resolve_device
from transformer.config.jobs import TrainJob
from transformer.config.settings import Precision
from transformer.data.batch import Batch, collate
from transformer.data.loader import Position, Step, load_steps
from transformer.data.plan import Batching, slots_for
from transformer.data.prepare import Prepared
from transformer.data.store import Store
from transformer.distributed import World
from transformer.errors import InputError
from transformer.model.transformer import Transformer
from transformer.numerics import tolerance_of
from transformer.records import MemoryCheck, Resolved
from transformer.tools.doctor.findings import Check, Level, failed, measured, passed
from transformer.tools.memory import estimate_memory, free_memory
from transformer.tools.preview import Preview, preview_epoch
from transformer.training.deviation import largest_leak
from transformer.training.memory import Trial, can_try
from transformer.training.optimizer import build_optimizer, rate_of, updates_applied
from transformer.training.proof import Prover, first_sound, plain_deviation, wants_proof
from transformer.training.resolve import batching_of
from transformer.training.state import TrainState, draw_model
from transformer.training.step import Computation, Objective, train_step
from transformer.vocabulary import EOS, PAD, VocabSize

PAIRS = 4  # that the model is to learn by heart, or fewer where the corpus has fewer
SEARCHED = 1_000_000  # pairs of the corpus at most, from the first on, among which they are chosen
LONGEST = 24  # tokens of each
MOST_UPDATES = 200
WARMUP = 20  # updates
RATE = 0.005  # times d_model^-0.5: low enough for six post-norm layers without dropout
LEARNED = 1 / 3  # of the loss at the start; to know only how often each piece occurs in the pairs leaves half of it


# ---- what the model sees --------------------------------------------------------------------------------------------


def check_leak(job: TrainJob, store: Store, *, vocab_size: VocabSize, batching: Batching, resolved: Resolved) -> Check:
    """Whether what a position predicts depends on tokens that come after it."""
    device = resolve_device(resolved.device)
    model = _model_without_dropout(job, resolved, vocab_size=vocab_size).eval()
    batch = _pairs_to_learn(store, batching).to(device)
    with autocast(device, resolved.precision):
        leak = largest_leak(model, batch)

    return measured(
        "causal mask",
        "model",
        found=f"changing later target tokens changes earlier log-probabilities by at most {leak:.1g}",
        value=leak,
        limit=tolerance_of(resolved.precision).leak,
        level=Level.error,
        remedy="the decoder sees the tokens that it is to predict: undo what was changed in the attention's mask",
        places=[],
    )


def check_device(job: TrainJob, store: Store, *, vocab_size: VocabSize, resolved: Resolved) -> list[Check]:
    """What the proof of the device finds, where a training would make it: see `training.proof`."""
    device = resolve_device(resolved.device)
    if not wants_proof(job, device):
        return []

    prover = Prover(device, World(0, 1, {}), known=None, keep=lambda found: None, compares=True)
    model = draw_model(job.model, seed=job.train.seed, vocab_size=vocab_size).to(device, dtype_of(resolved.precision))

    def prove(way: Resolved) -> None:
        prover.prove(way, lambda: plain_deviation(way, job, model=model, store=store, device=device))

    try:
        first_sound(prover, replace(resolved, compile=False, cuda_graphs=False), prove)
    except InputError as error:
        remedy = "train on another device: set train.device=cpu"
        return [failed("proof", "machine", found=str(error), level=Level.error, remedy=remedy, places=[])]

    proof = prover.proof
    found = (
        f"{proof.device}: {proof.way} agrees with the plain computation (its gradient differs by {proof.deviation:.2g})"
    )
    if not proof.failures:
        return [passed("proof", "machine", found=found)]
    left = "; ".join(f"{way}: {why}" for way, why in proof.failures.items())
    remedy = "a training takes the way that is sound; another torch or driver may be sound in the faster one, too"
    return [failed("proof", "machine", found=f"{found}; {left}", level=Level.warning, remedy=remedy, places=[])]


def _pairs_to_learn(store: Store, batching: Batching) -> Batch:
    """A few pairs of a middling length, in the layout of the training."""
    longer = store.lengths[:SEARCHED].max(axis=1)
    usual = min(LONGEST, int(np.median(longer)))
    by_length = np.argsort(np.abs(longer - usual), kind="stable")

    # Neighbours in the corpus may be alike, so take every 50th where there are enough.
    has_enough = len(by_length) >= 50 * PAIRS
    chosen = by_length[: 50 * PAIRS : 50] if has_enough else by_length[:PAIRS]

    capacities = None if batching.capacities is None else slots_for(store.lengths[chosen])
    return collate(store, np.sort(chosen), capacities, kernel=batching.kernel)


def _model_without_dropout(job: TrainJob, resolved: Resolved, *, vocab_size: VocabSize) -> Transformer:
    """The job's model at its first step, on its device."""
    config = replace(job.model, dropout=0.0, attention_dropout=0.0, relu_dropout=0.0)
    model = draw_model(config, seed=job.train.seed, vocab_size=vocab_size)
    return model.to(resolve_device(resolved.device), dtype_of(resolved.precision))


# ---- what the model learns ------------------------------------------------------------------------------------------


def check_overfit(
    job: TrainJob, store: Store, *, vocab_size: VocabSize, batching: Batching, resolved: Resolved
) -> Check:
    """Whether the model learns a few pairs by heart: everything between the loss and the weights must work for that."""
    device = resolve_device(resolved.device)
    model = _model_without_dropout(job, resolved, vocab_size=vocab_size)
    objective = Objective(model, label_smoothing=0.0, loss_rows=resolved.loss_rows).train()
    precision = resolved.precision
    optimizer, scaler = build_optimizer(model, job.train), loss_scaler(device, precision)
    computation = Computation(objective, optimizer, scaler, clip_norm=1.0, device=device, precision=precision)
    batch = _pairs_to_learn(store, batching)
    pairs = int((batch.target_out == EOS).sum())  # each target ends in one
    tokens = int((batch.target_out != PAD).sum())
    source_tokens = int((batch.source != PAD).sum())

    losses: list[float] = []
    for update in range(MOST_UPDATES):
        warmth = min(1.0, (update + 1) / WARMUP)
        result = train_step(
            computation,
            _step(batch, index=update, pairs=pairs, tokens=tokens, source_tokens=source_tokens),
            world_size=1,
            rate=RATE * job.model.d_model**-0.5 * warmth,
            seed=job.train.seed,
        )
        losses.append(float(result.nll_sum) / tokens)
        if losses[-1] < LEARNED * losses[0]:
            break

    share = losses[-1] / losses[0]
    return measured(
        "one batch",
        "model",
        found=f"{pairs} pairs, {tokens} tokens: loss {losses[0]:.2f} -> {losses[-1]:.2f} in {len(losses)} updates",
        value=share,
        limit=LEARNED,
        level=Level.error,
        remedy="a model that cannot learn a few pairs by heart learns no corpus: undo what was changed in the model, "
        "or try train.precision=fp32 and model.norm=pre",
        places=[],
    )


def _step(batch: Batch, *, index: int, pairs: int, tokens: int, source_tokens: int) -> Step:
    """A step that is one micro-batch."""
    return Step(
        epoch=0,
        chapter=0,
        index=index,
        micro_batches=[(0, batch)],
        target_tokens=tokens,
        source_tokens=source_tokens,
        sentences=pairs,
        slots=batch.source.numel() + batch.target_in.numel(),
    )


# ---- what the training costs ----------------------------------------------------------------------------------------


def check_cost(job: TrainJob, prepared: Prepared, *, resolved: Resolved, vocab_size: VocabSize) -> list[Check]:
    """Memory, tried on a GPU and estimated on a CPU; disk for the checkpoints; hours, from a timed micro-batch."""
    # A model with its optimizer, as at the first step.
    device = resolve_device(resolved.device)
    state = TrainState.at_start(
        job.model, job.train, vocab_size=vocab_size, device=device, precision=resolved.precision, source=None
    )
    objective = Objective(state.model, job.train.label_smoothing, loss_rows=resolved.loss_rows).train()

    # Memory; under train.fit_memory, max_tokens becomes the largest that fits.
    longest = prepared.store.longest
    batching_with = partial(batching_of, job, lengths=prepared.store.lengths, mixture=prepared.mixture)
    if can_try(device):
        try:
            trial = Trial(job, batching_with, prepared.store.lengths, device=device, world=World(0, 1, {}))
            resolved = trial.fit(resolved, objective)
            memory = trial.check(resolved, objective)
        except InputError as error:
            remedy = "lower train.max_tokens, set train.fit_memory=true, or choose a smaller model"
            return [failed("memory", "machine", found=str(error), level=Level.error, remedy=remedy, places=[])]
    else:
        memory = _estimate(job, resolved, batching_with(resolved), vocab_size=vocab_size, longest=longest)

    # Disk, and hours with these micro-batches.
    batching = batching_with(resolved)
    preview = preview_epoch(prepared.store.lengths, batching)
    disk = _check_disk(job, state.checkpoint_bytes)
    hours = _check_time(job, prepared.store, state, objective, batching=batching, preview=preview, resolved=resolved)
    return [_check_memory(memory), disk, hours]


def _estimate(
    job: TrainJob, resolved: Resolved, batching: Batching, *, vocab_size: VocabSize, longest: tuple[int, int]
) -> MemoryCheck:
    """The memory of a step of the largest micro-batches, of nothing but the longest sentences, and what is free."""
    memory = estimate_memory(
        job.model,
        vocab_size,
        resolved=resolved,
        slots=max(batching.capacities or (batching.max_tokens,)),
        mean_length=float(max(longest)),
        has_ema=job.train.ema_decay is not None,
    )
    return MemoryCheck(resolved.max_tokens, is_estimate=True, needed=memory.total, available=free_memory())


def _check_memory(memory: MemoryCheck) -> Check:
    how = "by estimate" if memory.is_estimate else "in a trial"
    return measured(
        "memory",
        "machine",
        found=f"{memory.needed / 2**30:.2f} GiB {how} for a step of train.max_tokens={memory.max_tokens}; "
        f"there are {memory.available / 2**30:.2f} GiB",
        value=memory.needed / max(1, memory.available),
        limit=1.0,
        level=Level.error,
        remedy="lower train.max_tokens, or let train.fit_memory=true find it",
        places=[],
    )


def _check_disk(job: TrainJob, checkpoint_bytes: int) -> Check:
    """Room for the checkpoints that are kept at a time: the newest, the best, the one in progress, and the average."""
    kept = job.train.keep_last + job.train.keep_best + 1
    needed = (kept + 1) * checkpoint_bytes

    # The run directory may not be there yet: its nearest parent is on the same disk.
    place = Path(job.run_dir).absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free

    return measured(
        "disk",
        "machine",
        found=f"{needed / 2**30:.2f} GiB for {kept} checkpoints and the average; "
        f"{free / 2**30:.1f} GiB are free at {place}",
        value=needed / max(1, free),
        limit=1.0,
        level=Level.error,
        remedy="free space, set run_dir to another disk, or lower train.keep_last and train.average",
        places=[],
    )


def _check_time(
    job: TrainJob,
    store: Store,
    state: TrainState,
    objective: Objective,
    *,
    batching: Batching,
    preview: Preview,
    resolved: Resolved,
) -> Check:
    """The hours of the training, from the first micro-batch of its first step, and one update."""
    device = resolve_device(resolved.device)
    steps = load_steps(
        lambda epoch: store, batching, rank=0, world_size=1, position=Position(0, 0, 0), prefetch=0, device=device
    )
    step = next(steps)
    steps.close()
    step = replace(step, micro_batches=step.micro_batches[:1])
    computation = Computation(objective, state.optimizer, state.scaler, job.train.clip_norm, device, resolved.precision)
    rate = rate_of(job.train, job.model.d_model, step=0)

    # Twice, and the second time counts: the first one includes starting up.
    for _ in range(2):
        began = time.perf_counter()
        result = train_step(computation, step, world_size=1, rate=rate, seed=job.train.seed)
        is_finite = bool(result.applied)  # waits for the device
        seconds = time.perf_counter() - began

    if not is_finite:
        return failed(
            "time",
            "machine",
            found="the gradient of the first micro-batch is not finite",
            level=Level.error,
            remedy="set train.precision=fp32",
            places=[],
        )

    # A step has several micro-batches, and one update.
    update_seconds = _time_update(state, device=device, precision=resolved.precision)
    micro_batch_seconds = max(0.0, seconds - update_seconds)
    step_seconds = micro_batch_seconds * preview.micro_batches + update_seconds
    hours = step_seconds * job.train.max_steps / 3600
    how = "one micro-batch and one update" + (", not compiled" if resolved.compile else "")
    return passed(
        "time",
        "machine",
        found=f"{step_seconds:.2f} s a step by {how}, so {hours:,.1f} hours for "
        f"train.max_steps={job.train.max_steps}, without validations",
    )


def _time_update(state: TrainState, *, device: torch.device, precision: Precision) -> float:
    """The seconds of another update with the gradient that the last step has left."""
    began = time.perf_counter()
    with autocast(device, precision):
        state.optimizer.step()
    updates_applied(state.optimizer).item()  # waits for the device
    return time.perf_counter() - began
