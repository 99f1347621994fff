"""Whether a step fits into memory, settled before the first one: tried on a GPU, estimated on a CPU.

A trial is a forward and a backward pass of the largest micro-batch that there can be, of invented sentences, beside the
gradients of another one and room for Adam's moments. It changes neither weights nor moments, and no sentence of the
corpus is used.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from transformer.compute import autocast
from transformer.config.jobs import TrainJob
from transformer.config.settings import Precision
from transformer.data.batch import Batch, collate
from transformer.data.plan import SLOTS, Batching
from transformer.data.store import Mixture, Store
from transformer.distributed import World
from transformer.errors import InputError
from transformer.machine import free_memory
from transformer.records import MemoryCheck, Resolved
from transformer.training.memory import estimate_memory
from transformer.training.optimizer import MOMENTS
from transformer.training.resolve import batching_of
from transformer.training.step import Objective
from transformer.vocabulary import UNK

log = logging.getLogger(__name__)

USABLE = 0.95  # of the memory is for `train.fit_memory` to fill: an allocator cannot use the last of it
PADDING = 1.25  # slots of a whole step that is padded are hardly ever more than this many times its tokens


def can_try(device: torch.device) -> bool:
    """Whether a step that does not fit fails and leaves no harm: a CPU's memory is given out before it is there."""
    return device.type == "cuda"


def check_memory(
    job: TrainJob,
    resolved: Resolved,
    objective: Objective,
    *,
    store: Store,
    mixture: Mixture,
    device: torch.device,
    world: World,
) -> tuple[Resolved, MemoryCheck]:
    """What a step needs; under `train.fit_memory` with the largest `max_tokens` that fits on every rank.

    Raises InputError, on every rank, where the trial runs out of memory; an estimate above what is free is a warning.
    """
    is_estimate = not can_try(device)
    available = free_memory() if is_estimate else torch.cuda.get_device_properties(device).total_memory

    def needed(max_tokens: int, trained: Objective) -> float:
        chosen = replace(resolved, max_tokens=max_tokens)
        batching = batching_of(job, chosen, store=store, mixture=mixture)
        if is_estimate:
            return _estimate(job, chosen, batching, vocab_size=trained.model.vocab_size, longest=max(store.longest))
        batch = largest_batch(batching, store.longest)
        return try_step(trained, batch, device=device, precision=resolved.precision)

    if job.train.fit_memory:
        # It is not compiled: compiling each size would take minutes.
        eager = Objective(objective.model, job.train.label_smoothing, loss_rows=resolved.loss_rows).train()

        def fits(max_tokens: int) -> bool:
            return not world.any(needed(max_tokens, eager) > USABLE * available)

        resolved = replace(resolved, max_tokens=_largest(job, store, fits, ranks=world.size))
        log.info("train.fit_memory: micro-batches of %d tokens fit", resolved.max_tokens)

    found = needed(resolved.max_tokens, objective)
    if world.any(math.isinf(found)):
        remedy = f"lower train.max_tokens (now {resolved.max_tokens}), or let train.fit_memory=true find it"
        if job.train.fit_memory:  # the compiled step takes more than the eager one by which it was found
            remedy = f"set train.max_tokens below {resolved.max_tokens} in place of train.fit_memory"
        raise InputError(f"out of GPU memory in the trial before the first step: {remedy}")
    is_too_much = found > available
    log.log(
        logging.WARNING if is_too_much else logging.INFO,
        "memory of a step: %.2f GiB %s; there are %.2f GiB%s",
        found / 2**30,
        "by estimate" if is_estimate else "in a trial",
        available / 2**30,
        ": lower train.max_tokens" if is_too_much else "",
    )
    return resolved, MemoryCheck(resolved.max_tokens, is_estimate, needed=int(found), available=available)


def _estimate(job: TrainJob, resolved: Resolved, batching: Batching, *, vocab_size: int, longest: int) -> int:
    slots = max(batching.capacities or (batching.max_tokens,))
    memory = estimate_memory(
        job.model,
        vocab_size,
        resolved=resolved,
        slots=slots,
        mean_length=float(longest),
        has_average=job.train.ema_decay is not None,
    )
    return memory.total


# ---- a trial --------------------------------------------------------------------------------------------------------


def largest_batch(batching: Batching, longest: tuple[int, int]) -> Batch:
    """A micro-batch as large as any: of invented sentences, as many and as long as it can hold.

    `longest` are the lengths of the corpus' longest sentences, EOS counted. Padded, both sides are filled as far as
    sentences that are no longer can fill them, and more than half as long.
    """
    if batching.capacities is None:
        width = min(range(max(longest), max(longest) // 2, -1), key=lambda width: batching.max_tokens % width)
        widths = (width, width)
        count = batching.max_tokens // width
    else:
        widths = longest
        count = min(limit // width for limit, width in zip(batching.capacities, longest, strict=True))

    source, target = ([[UNK] * (width - 1)] * count for width in widths)
    store = Store.from_pieces(source, target)
    ids = np.arange(count)
    return collate(store, ids, batching.capacities, grouped=batching.grouped, kernel=batching.kernel)


def try_step(objective: Objective, batch: Batch, *, device: torch.device, precision: Precision) -> float:
    """The most bytes that were in use during a trial, which is 0 on a CPU; infinity where memory ran out.

    There must be no gradients, and no moments yet.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        _accumulate_twice(objective, batch.to(device), device=device, precision=precision)
    except torch.OutOfMemoryError:
        return math.inf
    finally:
        objective.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
    return float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else 0.0


def _accumulate_twice(objective: Objective, batch: Batch, *, device: torch.device, precision: Precision) -> None:
    parameters = list(objective.parameters())
    moments = [torch.empty_like(parameter) for parameter in parameters for _ in MOMENTS]
    for _ in range(2):  # the second micro-batch finds the gradients of the first
        with autocast(device, precision):
            loss, _ = objective(batch)
        loss.backward()
    nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    del moments


# ---- the search -----------------------------------------------------------------------------------------------------


def _largest(job: TrainJob, store: Store, fits: Callable[[int], bool], *, ranks: int) -> int:
    """The largest `max_tokens` that fits. Raises InputError where not even one sentence does."""
    smallest = max(*store.longest, job.data.filter.max_length + 1)
    share = PADDING * job.train.tokens_per_step / ranks  # a whole step: what is larger would never be full
    found = largest_that_fits(fits, smallest=smallest, largest=max(smallest, math.ceil(share) + smallest))
    if found is None:
        raise InputError(
            f"out of memory with micro-batches of {smallest} tokens, one sentence of data.filter.max_length: lower "
            "that, or choose a smaller model"
        )
    return found


def largest_that_fits(fits: Callable[[int], bool], *, smallest: int, largest: int) -> int | None:
    """The largest number that fits, less than SLOTS below the border; None if `smallest` does not.

    What is smaller than a number that fits must fit.
    """
    if fits(largest):
        return largest
    if not fits(smallest):
        return None
    fitting, failing = smallest, largest
    while failing - fitting >= SLOTS:
        middle = (fitting + failing) // 2
        if fits(middle):
            fitting = middle
        else:
            failing = middle
    return fitting
