"""Model and machine: whether the model can learn from what it is to see and from nothing else, and what that costs.

The model is the job's own, with its layers, widths and layout, and is updated by the step that training uses. Dropout
is off, so that the numbers are the same each time.
"""

import shutil
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from transformer.compute import autocast, dtype_of, loss_scaler, resolve_device
from transformer.config.jobs import TrainJob
from transformer.data.batch import Batch, collate
from transformer.data.loader import Position, Step, load_steps
from transformer.data.plan import SLOTS, Batching
from transformer.data.prepare import Prepared
from transformer.data.store import Store
from transformer.distributed import World
from transformer.errors import InputError
from transformer.layout import Packed
from transformer.model.transformer import Transformer
from transformer.records import Resolved
from transformer.tools.doctor.findings import Check, Level, failed, judged, passed
from transformer.training.optimizer import build_optimizer, rate_of
from transformer.training.preview import Preview
from transformer.training.state import TrainState, draw_model
from transformer.training.step import Objective, train_step
from transformer.training.trial import check_memory

PAIRS = 4  # that the model is to learn by heart
LONGEST = 24  # tokens of each
UPDATES = 200  # at most
WARMUP = 20  # updates
RATE = 0.005  # times d_model^-0.5: low enough for six post-norm layers without dropout
LEARNED = 1 / 3  # of the loss at the start; to know no more than how often each piece occurs in the pairs leaves half
LEAK = 1e-3  # by which a log-probability may change with a token to come: rounding, if anything


# ---- what the model sees --------------------------------------------------------------------------------------------


def check_leak(job: TrainJob, store: Store, *, vocab_size: int, batching: Batching, resolved: Resolved) -> Check:
    """Whether what a position predicts depends on tokens that come after it."""
    device = resolve_device(resolved.device)
    model = draw_model(_without_dropout(job).model, seed=job.train.seed, vocab_size=vocab_size)
    model = model.to(device, dtype_of(resolved.precision)).eval()
    with autocast(device, resolved.precision):
        leak = largest_leak(model, _few(store, batching).to(device))
    return judged(
        "causal mask",
        "model",
        found=f"a token to come changes what is predicted before it by {leak:.1g} at most, of log-probability",
        value=leak,
        limit=LEAK,
        level=Level.error,
        remedy="the decoder sees the answer, and will learn nothing: undo what was changed in the attention's mask",
        places=[],
    )


def largest_leak(model: Transformer, batch: Batch) -> float:
    """The largest change of a log-probability when the target tokens after the middle of each sentence are changed.

    `model` and `batch` are on one device; only what is predicted before the changed tokens is compared.
    """
    later = _later_half(batch)
    changed = batch.target_in.clone()
    changed[later] = (changed[later] + 1) % model.vocab_size
    with torch.no_grad():
        memory = model.encode(batch.source, batch.source_layout)
        before, after = (
            model.unembed(model.decode(tokens, batch.target_layout, memory=memory, memory_layout=batch.source_layout))
            for tokens in (batch.target_in, changed)
        )
    difference = (before.float().log_softmax(-1) - after.float().log_softmax(-1)).abs().amax(-1)
    return float(difference[~later & _is_token(batch)].max())


def _later_half(batch: Batch) -> Tensor:
    """The slots in the second half of each target sentence: bool, in the layout's shape."""
    layout = batch.target_layout
    if isinstance(layout, Packed):
        later = torch.zeros_like(batch.target_in, dtype=torch.bool)
        offsets = layout.offsets.tolist()
        for start, end in pairwise(offsets):
            later[(start + end + 1) // 2 : end] = True
        return later & _is_token(batch)
    half = (layout.lengths + 1) // 2
    return (layout.positions() >= half.unsqueeze(1)) & layout.visible()


def _is_token(batch: Batch) -> Tensor:
    """The slots that hold a target token."""
    layout = batch.target_layout
    if isinstance(layout, Packed):
        return batch.target_out != 0
    return layout.visible()


def _few(store: Store, batching: Batching) -> Batch:
    """A few pairs of a middling length, different ones, in the layout of the training."""
    longer = store.lengths.max(axis=1)
    usual = min(LONGEST, int(np.median(longer)))
    ids = np.argsort(np.abs(longer - usual), kind="stable")
    chosen = ids[: 50 * PAIRS : 50] if len(ids) >= 50 * PAIRS else ids[:PAIRS]
    capacities = None
    if batching.capacities is not None:
        source, target = (np.ceil(store.lengths[chosen].sum(axis=0) / SLOTS).astype(int) * SLOTS).tolist()
        capacities = (source, target)
    return collate(store, np.sort(chosen), capacities, grouped=batching.grouped, kernel=batching.kernel)


def _without_dropout(job: TrainJob) -> TrainJob:
    model = replace(job.model, dropout=0.0, attention_dropout=0.0, relu_dropout=0.0)
    return replace(job, model=model)


# ---- what it learns -------------------------------------------------------------------------------------------------


def check_overfit(job: TrainJob, store: Store, *, vocab_size: int, batching: Batching, resolved: Resolved) -> Check:
    """Whether the model learns a few pairs by heart, for which all between the loss and the weights must work."""
    device = resolve_device(resolved.device)
    precision = resolved.precision
    model = draw_model(_without_dropout(job).model, seed=job.train.seed, vocab_size=vocab_size)
    model = model.to(device, dtype_of(precision))
    objective = Objective(model, label_smoothing=0.0, loss_rows=resolved.loss_rows).train()
    optimizer = build_optimizer(model, job.train)
    scaler = loss_scaler(device, precision)
    batch = _few(store, batching)
    tokens = int((batch.target_out != 0).sum())

    losses: list[float] = []
    while len(losses) < UPDATES and not (losses and losses[-1] < LEARNED * losses[0]):
        result = train_step(
            objective,
            optimizer,
            _step(batch, index=len(losses), tokens=tokens),
            scaler=scaler,
            world_size=1,
            rate=RATE * job.model.d_model**-0.5 * min(1.0, (len(losses) + 1) / WARMUP),
            seed=job.train.seed,
            clip_norm=1.0,
            device=device,
            precision=precision,
        )
        losses.append(float(result.nll_sum) / tokens)

    share = losses[-1] / losses[0]
    found = f"{PAIRS} pairs, {tokens} tokens: loss {losses[0]:.2f} -> {losses[-1]:.2f} in {len(losses)} updates"
    return judged(
        "one batch",
        "model",
        found=found,
        value=share if np.isfinite(share) else float(10**9),
        limit=LEARNED,
        level=Level.error,
        remedy="a model that cannot learn four pairs by heart learns no corpus: undo what was changed in the model, or "
        "try train.precision=fp32 and model.norm=pre",
        places=[],
    )


def _step(batch: Batch, *, index: int, tokens: int) -> Step:
    return Step(
        epoch=0,
        index=index,
        micro_batches=[(0, batch)],
        target_tokens=tokens,
        source_tokens=tokens,
        sentences=PAIRS,
        slots=batch.source.numel() + batch.target_in.numel(),
    )


# ---- what it costs --------------------------------------------------------------------------------------------------


def check_cost(
    job: TrainJob, prepared: Prepared, *, resolved: Resolved, vocab_size: int, batching: Batching, preview: Preview
) -> list[Check]:
    """Memory as training checks it, disk for the checkpoints, and the hours by one micro-batch that is timed."""
    device = resolve_device(resolved.device)
    state = TrainState.at_start(
        job.model, job.train, vocab_size=vocab_size, device=device, precision=resolved.precision, source=None
    )
    objective = Objective(state.model, job.train.label_smoothing, loss_rows=resolved.loss_rows).train()
    try:
        resolved, memory = check_memory(
            job,
            resolved,
            objective,
            lengths=prepared.store.lengths,
            longest=prepared.store.longest,
            mixture=prepared.mixture,
            device=device,
            world=World(0, 1, {}),
        )
    except InputError as error:
        return [
            failed("memory", "machine", found=str(error), level=Level.error, remedy="choose a smaller model", places=[])
        ]

    how = "by estimate" if memory.is_estimate else "in a trial"
    checks = [
        judged(
            "memory",
            "machine",
            found=f"{memory.needed / 2**30:.2f} GiB {how} for a step of train.max_tokens={memory.max_tokens:,}; "
            f"there are {memory.available / 2**30:.2f} GiB",
            value=memory.needed / max(1, memory.available),
            limit=1.0,
            level=Level.error,
            remedy="lower train.max_tokens, or let train.fit_memory=true find it",
            places=[],
        ),
        _check_disk(job, state.checkpoint_bytes),
    ]
    return [
        *checks,
        _check_time(job, prepared.store, state, objective, batching=batching, preview=preview, resolved=resolved),
    ]


def _check_disk(job: TrainJob, checkpoint_bytes: int) -> Check:
    """The checkpoints that are kept at a time: the newest, the best, the one in progress, and the average's weights."""
    kept = job.train.keep_last + job.train.keep_best + 1
    needed = (kept + 1) * checkpoint_bytes
    place = Path(job.run_dir).absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    return judged(
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
    """The first micro-batch of the first step, twice: the first time is that of starting up."""
    device = resolve_device(resolved.device)
    steps = load_steps(
        lambda epoch: store, batching, rank=0, world_size=1, position=Position(0, 0), prefetch=0, device=device
    )
    step = next(steps)
    steps.close()
    step = replace(step, micro_batches=step.micro_batches[:1])

    for _ in range(2):
        began = time.perf_counter()
        result = train_step(
            objective,
            state.optimizer,
            step,
            scaler=state.scaler,
            world_size=1,
            rate=rate_of(job.train, job.model.d_model, step=0),
            seed=job.train.seed,
            clip_norm=job.train.clip_norm,
            device=device,
            precision=resolved.precision,
        )
        is_finite = bool(result.applied)  # waits for the device
        seconds = time.perf_counter() - began

    a_step = seconds * preview.micro_batches
    hours = a_step * job.train.max_steps / 3600
    how = "one micro-batch, not compiled" if resolved.compile else "one micro-batch"
    found = (
        f"{a_step:.2f} s a step by {how}, so {hours:,.1f} hours for train.max_steps={job.train.max_steps:,}, "
        "without validations"
    )
    if is_finite:
        return passed("time", "machine", found=found)
    return failed(
        "time",
        "machine",
        found="the gradient of the first micro-batch is not finite",
        level=Level.error,
        remedy="set train.precision=fp32",
        places=[],
    )
