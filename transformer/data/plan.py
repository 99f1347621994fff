"""The data order, as pure functions: an epoch is cut into steps, a step into micro-batches.

`lengths` is `(n, 2)`: the real tokens of every sentence pair, end mark counted, source then target. A step is an array
of sentence ids. Which sentences a step holds depends on the seed, the epoch and `tokens_per_step`, never on
`max_tokens` or the world size, so a run can go on elsewhere. The surprise: permutations come from sorting raw PCG64
output, because NumPy promises that stream for ever, and `Generator.permutation` from one release to the next only.
"""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from transformer.errors import InputError
from transformer.seeding import seed_for

PLAN_VERSION = 1
POOL_STEPS = 100  # sorted by length inside pools of about this many steps: "approximate sequence length" (section 5.1)
SLOTS = 128  # packed capacities are multiples of this
SLACK = 1.1  # steps whose shorter side is longer than the corpus' average by this factor fit a packed batch

Ids = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.int32]


def plan_epoch(lengths: Lengths, *, seed: int, epoch: int, tokens_per_step: int) -> list[Ids]:
    """The steps of an epoch, in order: every sentence exactly once, at most `tokens_per_step` real tokens on each side.

    Raises InputError where there is no sentence, or one that no step can hold.
    """
    if len(lengths) == 0:
        raise InputError("there is no sentence pair to train on")
    longest = int(lengths.max())
    if longest > tokens_per_step:
        raise InputError(f"a sentence of {longest} tokens does not fit train.tokens_per_step={tokens_per_step}")
    random = np.random.PCG64(seed_for(seed, epoch))
    order = _sort_in_pools(_permutation(random, len(lengths)), lengths, tokens_per_step)
    steps = _cut(order, lengths[order], tokens_per_step)
    return [steps[index] for index in _permutation(random, len(steps))]


def _permutation(random: np.random.PCG64, count: int) -> Ids:
    return np.argsort(random.random_raw(count), kind="stable")


def _sort_in_pools(order: Ids, lengths: Lengths, tokens_per_step: int) -> Ids:
    """Sort each pool by length, pools in turn upwards and downwards.

    So lengths run on across the border of two pools, and the step that spans it is as even as the others. A pair is as
    long as its longer side, each side measured against that side's total: where one language takes more pieces than the
    other (Japanese and English: 3 to 4), the shorter side would else be padded by a fifth.
    """
    sums = lengths.sum(axis=0, dtype=np.int64)
    pool_size = max(1, POOL_STEPS * tokens_per_step * len(order) // int(sums.max()))
    pools = [order[start : start + pool_size] for start in range(0, len(order), pool_size)]
    for index, pool in enumerate(pools):
        source, target = lengths[pool, 0].astype(np.int64), lengths[pool, 1].astype(np.int64)
        upwards = np.lexsort((target, source, np.maximum(source * sums[1], target * sums[0])))
        pools[index] = pool[upwards if index % 2 == 0 else upwards[::-1]]
    return np.concatenate(pools)


def _cut(order: Ids, lengths: Lengths, tokens_per_step: int) -> list[Ids]:
    """Cut where either side would pass the budget; `lengths` are those of `order`, in its order."""
    totals = lengths.cumsum(axis=0, dtype=np.int64)
    source, target = np.ascontiguousarray(totals[:, 0]), np.ascontiguousarray(totals[:, 1])
    steps, start, used = [], 0, (0, 0)
    while start < len(order):
        end = min(
            int(np.searchsorted(source, used[0] + tokens_per_step, side="right")),
            int(np.searchsorted(target, used[1] + tokens_per_step, side="right")),
        )
        steps.append(order[start:end])
        start, used = end, (int(source[end - 1]), int(target[end - 1]))
    return steps


def packed_capacities(lengths: Lengths, *, tokens_per_step: int, max_tokens: int, multiple: int) -> tuple[int, int]:
    """The slots of a packed micro-batch, source and target: the same for the whole training.

    As many as hold a step cut into the fewest micro-batches that `max_tokens` allows, a multiple of `multiple`. The
    side with fewer tokens in the corpus gets fewer slots; a step that is no average one may then be cut once more.
    """
    totals, longest = lengths.sum(axis=0, dtype=np.int64), lengths.max(axis=0)
    step = min(tokens_per_step, int(totals.max()))
    count = -(-step // (max_tokens * multiple)) * multiple
    shares = np.minimum(1.0, SLACK * totals / totals.max())
    slots = shares * step / count + (longest if count > 1 else 0)  # an even cut falls inside a sentence
    slots = np.maximum(np.minimum(slots, max_tokens), longest)
    source, target = (np.ceil(slots / SLOTS).astype(int) * SLOTS).tolist()
    return source, target


def split_step(
    ids: Ids, lengths: Lengths, *, max_tokens: int, multiple: int, capacities: tuple[int, int] | None = None
) -> list[Ids]:
    """The fewest micro-batches that fit, up to a multiple of `multiple`; longest sentences first, as even as can be.

    Padded, a micro-batch fits where rows x longest is at most `max_tokens` on both sides; packed, where each side's
    tokens fit its capacity, and the fewest are those that cut the sentences in this order. `lengths` are the whole
    corpus'. Where there are too few sentences the last micro-batches are empty. Raises InputError for a sentence that
    fits nowhere.
    """
    source, target = lengths[ids, 0], lengths[ids, 1]
    longer = np.maximum(source, target)  # rows x longest fits on both sides just when rows x this does
    order = np.lexsort((target, source, longer))[::-1]
    sizes: list[int] = longer[order].tolist()
    for side, limit in zip((source, target), capacities or (max_tokens, max_tokens), strict=True):
        if (longest := side.max(initial=0)) > limit:
            raise InputError(f"a sentence of {longest} tokens does not fit train.max_tokens={max_tokens}")
    if capacities is None:
        starts_within, least, most = partial(_starts, sizes), max(sizes, default=0), max_tokens
    else:  # the smaller side's tokens weigh more, so that both have the same budget
        most = max(capacities)
        weighted = lengths[ids[order]] * [most / capacity for capacity in capacities]
        starts_within, least = partial(_packed_starts, weighted.cumsum(axis=0)), math.ceil(weighted.max(initial=0))
    count = -(-max(1, len(starts_within(most))) // multiple) * multiple
    starts = _even_starts(starts_within, least, most, count=count, rows=len(sizes))
    parts = [ids[order[start:end]] for start, end in zip(starts, [*starts[1:], len(sizes)], strict=True)]
    return parts + [ids[:0]] * (count - len(parts))


def _starts(sizes: list[int], budget: int) -> list[int]:
    """Where each micro-batch starts, filling one after the other. Sizes descend, so the first row is the longest."""
    starts, start = [], 0
    while start < len(sizes):
        starts.append(start)
        start += budget // sizes[start]
    return starts


def _packed_starts(totals: npt.NDArray[np.float64], budget: int) -> list[int]:
    """The same for packed sentences, from the running totals of both sides."""
    starts, start, used = [], 0, np.zeros(2)
    while start < len(totals):
        starts.append(start)
        room = used + budget + 1e-6  # weighted tokens are no whole numbers
        start = min(int(np.searchsorted(totals[:, side], room[side], side="right")) for side in (0, 1))
        used = totals[start - 1]
    return starts


def _even_starts(
    starts_within: Callable[[int], list[int]], least: int, most: int, *, count: int, rows: int
) -> list[int]:
    """`count` micro-batches, or one a sentence where there are fewer sentences; the largest as small as can be."""
    low, high = least, most
    while low < high:  # the smallest budget that needs no more than `count`
        middle = (low + high) // 2
        if len(starts_within(middle)) <= count:
            high = middle
        else:
            low = middle + 1
    starts = starts_within(high)
    while len(starts) < min(count, rows):  # equal lengths can leave some over: halve the one with most rows
        ends = [*starts[1:], rows]
        size, start = max((end - start, start) for start, end in zip(starts, ends, strict=True))
        starts = sorted([*starts, start + (size + 1) // 2])
    return starts
