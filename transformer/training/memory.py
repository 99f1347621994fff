"""Whether a step fits into a GPU's memory, tried before the first step; `train.fit_memory` finds the largest that fits.

    Trial.fit      under train.fit_memory      largest_that_fits, by bisection
    Trial.check    what a step needs           try_step
                   what is available           the GPU's memory

A trial is a forward and a backward pass of the largest possible micro-batch, of invented sentences, beside the
gradients of another one and room for the optimizer's moments. Where a kernel takes memory for each sentence, one of as
many sentences as any has is tried, too. A trial changes neither weights nor moments, and no sentence of the corpus is
used.
"""

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import nn

from transformer.compute import autocast, free_gpu_memory
from transformer.config.jobs import TrainJob
from transformer.config.settings import AttentionKernel, LayoutKind, Precision, Score
from transformer.data.batch import Batch, collate
from transformer.data.plan import SLOTS, Batching, sample_epoch
from transformer.data.store import LengthArray, Lengths, Store, longest_of
from transformer.distributed import World, unsynchronised
from transformer.errors import InputError
from transformer.records import MemoryCheck, Resolved
from transformer.training.optimizer import MOMENTS
from transformer.training.step import Objective
from transformer.vocabulary import UNK

log = logging.getLogger(__name__)

USABLE = 0.95  # the share of the memory that `train.fit_memory` fills: an allocator cannot use the rest
PADDING = 1.25  # the slots of a padded step are hardly ever more than this many times its tokens


def can_try(device: torch.device) -> bool:
    """Whether a step may be tried, since one that does not fit raises an error: not on a CPU.

    There the system grants memory that it does not have, and kills the process that uses it.
    """
    return device.type == "cuda"


@dataclass(frozen=True)
class Trial:
    """Whether steps fit into the memory of a GPU, on every rank.

    `lengths` are those of the pairs of an epoch, as they are without subword sampling.
    """

    job: TrainJob
    batching: Callable[[Resolved], Batching]
    lengths: Lengths
    device: torch.device
    world: World
    _fitting: dict[LayoutKind, int] = field(default_factory=dict, init=False)  # what was found to fit

    def fit(self, resolved: Resolved, objective: Objective) -> Resolved:
        """The settings, under `train.fit_memory` with the largest `max_tokens` that fits on every rank.

        `objective` is not compiled: that would take minutes for each size. Raises InputError where not even one
        sentence fits.
        """
        if not self.job.train.fit_memory:
            return resolved
        if resolved.layout in self._fitting:  # it was to be computed in another way, which was not sound
            return replace(resolved, max_tokens=self._fitting[resolved.layout])
        limit = USABLE * self._available

        def fits(max_tokens: int) -> bool:
            return not self.world.any(self._needed(replace(resolved, max_tokens=max_tokens), objective) > limit)

        max_tokens = _largest_max_tokens(self.job, longest_of(self.lengths), fits, ranks=self.world.size)
        self._fitting[resolved.layout] = max_tokens
        log.info("train.fit_memory: micro-batches of %d tokens fit", max_tokens)
        return replace(resolved, max_tokens=max_tokens)

    def check(self, resolved: Resolved, parallel: nn.Module) -> MemoryCheck:
        """What a step needs.

        `parallel` is the objective as it is trained: on several ranks under DDP, whose buckets take memory, and which
        the compiler must know of when it compiles. Raises InputError, on every rank, where memory runs out.
        """
        needed = self._needed(resolved, parallel)
        if self.world.any(math.isinf(needed)):
            remedy = f"lower train.max_tokens (now {resolved.max_tokens}), or let train.fit_memory=true find it"
            if self.job.train.fit_memory:  # the compiled step takes more than the eager one that was tried
                remedy = f"set train.max_tokens below {resolved.max_tokens} in place of train.fit_memory"
            raise InputError(f"out of GPU memory in the trial before the first step: {remedy}")

        available = self._available
        log.info("memory of a step: %.2f GiB in a trial, of %.2f GiB available", needed / 2**30, available / 2**30)
        return MemoryCheck(resolved.max_tokens, is_estimate=False, needed=int(needed), available=available)

    @property
    def _available(self) -> int:
        # Less than the GPU has: contexts take some, those of other processes too.
        return free_gpu_memory(self.device) + torch.cuda.memory_reserved(self.device)

    def _needed(self, resolved: Resolved, tried: nn.Module) -> float:
        """The bytes that a step of the largest micro-batches needs; infinity if the trial runs out of memory."""
        batching = self.batching(resolved)
        is_quadratic = self.job.model.score is Score.additive
        batches = [largest_batch(batching, longest_of(self.lengths), is_quadratic=is_quadratic)]
        if batching.kernel is AttentionKernel.varlen:
            with suppress(InputError):  # the loader says what is wrong, unless a sample of the corpus was too small
                sample = sample_epoch(self.lengths, batching)
                batches.append(batch_of_most(batching, sample.lengths[max(sample.plan, key=len)]))
        return try_step(tried, batches, device=self.device, precision=resolved.precision)


# ---- a trial --------------------------------------------------------------------------------------------------------


def largest_batch(batching: Batching, longest: tuple[int, int], *, is_quadratic: bool) -> Batch:
    """A micro-batch as large as any: of invented sentences, as many and as long as it can hold.

    `longest` are the lengths of the corpus' longest sentences, source and target, EOS counted. `is_quadratic`: the
    weights of attention are kept, so that the longest sentences take the most memory, even if some slots stay empty.
    """
    # Padded: of all widths up to the longest, and above half of it, the one that leaves the fewest slots empty.
    if batching.capacities is None:
        width = max(longest)
        share = math.ceil(PADDING * batching.tokens_per_step / batching.micro_batch_multiple) + width
        slots = min(batching.max_tokens, share)
        if not is_quadratic:
            width = min(range(width, width // 2, -1), key=lambda width: slots % width)
        source_width = width
        target_width = width
        count = slots // width

    # Packed: as many of the longest sentences as fit on both sides.
    else:
        source_width, target_width = longest
        count = min(limit // width for limit, width in zip(batching.capacities, longest, strict=True))

    return _invented(batching, count, (source_width, target_width))


def batch_of_most(batching: Batching, step: LengthArray) -> Batch:
    """A packed micro-batch of as many sentences as one of `step` has, invented and of one length.

    For the backward pass, torch's kernel for packed sentences rounds each of them up by 128 slots, in fp32: for many
    short ones that is more than all that the longest ones take.
    """
    assert batching.capacities is not None
    count = max(map(len, batching.split(np.arange(len(step)), step)))
    source_width, target_width = (capacity // count for capacity in batching.capacities)
    return _invented(batching, count, (source_width, target_width))


def _invented(batching: Batching, count: int, widths: tuple[int, int]) -> Batch:
    """So many sentence pairs of this length, source and target, EOS counted."""
    source, target = ([[UNK] * (width - 1)] * count for width in widths)
    store = Store.from_pieces(source, target)
    return collate(store, np.arange(count), batching.capacities, kernel=batching.kernel)


def try_step(objective: nn.Module, batches: Sequence[Batch], *, device: torch.device, precision: Precision) -> float:
    """The most bytes that were taken of a GPU during a trial; infinity if memory ran out. On a CPU they are unknown: 0.

    Taken, not in use: torch's allocator has holes, which the next step, of other sizes, may not fill either. There must
    be no gradients, and no moments yet.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the proof of the device has left
        torch.cuda.reset_peak_memory_stats(device)
    try:
        _accumulate(objective, batches, device=device, precision=precision)
    except torch.OutOfMemoryError:
        return math.inf
    finally:
        objective.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
    return float(torch.cuda.max_memory_reserved(device)) if device.type == "cuda" else 0.0


def _accumulate(objective: nn.Module, batches: Sequence[Batch], *, device: torch.device, precision: Precision) -> None:
    """What a step does up to its update, with these micro-batches, none of which is the last: no rank waits."""
    parameters = list(objective.parameters())
    moments = [torch.empty_like(parameter) for parameter in parameters for _ in MOMENTS]
    for batch in [batches[0], *batches]:  # each finds the gradients of another one
        on_device = batch.to(device)
        with unsynchronised(objective):
            with autocast(device, precision):
                loss, _ = objective(on_device)
            loss.backward()
    nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    del moments


# ---- train.fit_memory -----------------------------------------------------------------------------------------------


def _largest_max_tokens(job: TrainJob, longest: tuple[int, int], fits: Callable[[int], bool], *, ranks: int) -> int:
    """The largest `max_tokens` that fits. Raises InputError where not even one sentence does."""
    smallest = max(*longest, job.data.filter.max_length + 1)
    whole_step = math.ceil(PADDING * job.train.tokens_per_step / ranks)  # what is larger would never be full
    max_tokens = largest_that_fits(fits, smallest=smallest, largest=max(smallest, whole_step + smallest))
    if max_tokens is None:
        raise InputError(
            f"out of memory with micro-batches of {smallest} tokens, one sentence of data.filter.max_length: lower "
            "that, or choose a smaller model"
        )
    return max_tokens


def largest_that_fits(fits: Callable[[int], bool], *, smallest: int, largest: int) -> int | None:
    """A number that fits, less than SLOTS below the largest that does; None if `smallest` does not fit.

    If a number fits, all smaller ones must.
    """
    if fits(largest):
        return largest
    if not fits(smallest):
        return None

    fitting = smallest
    failing = largest
    while failing - fitting >= SLOTS:
        middle = (fitting + failing) // 2
        if fits(middle):
            fitting = middle
        else:
            failing = middle
    return fitting
