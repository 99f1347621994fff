"""The data order, as pure functions: an epoch is cut into steps, a step into micro-batches.

`lengths` is `(n, 2)`: the real tokens of every sentence pair, end mark counted, source then target. A step is an array
of sentence ids. Which sentences a step holds depends on the seed, the epoch, the corpora's weights and
`tokens_per_step`, never on `max_tokens` or the world size, so a run can go on elsewhere. Planning needs 33 bytes for
each pair of the epoch. The surprise: permutations come from sorting raw PCG64 output, because NumPy promises that
stream for ever, and `Generator.permutation` from one release to the next only.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from transformer.errors import InputError
from transformer.seeding import seed_for

PLAN_VERSION = 1
POOL_STEPS = 100  # sorted by length inside pools of about this many steps: "approximate sequence length" (section 5.1)
SLOTS = 128  # packed capacities are multiples of this
SLACK = 1.1  # steps whose shorter side is longer than the corpus' average by this factor fit a packed batch

_BLOCK = 1 << 16  # pairs whose running totals are in memory at a time
_FRACTIONS = 0x77656967  # a stream of random numbers of their own

Ids = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.int32]
Mixture = Sequence[tuple[int, float]]  # pairs and weight of each of the corpora that lie one after the other


@dataclass(frozen=True)
class Batching:
    """How epochs are cut into steps, and these into micro-batches: the same from a run's first step to its last."""

    seed: int
    tokens_per_step: int
    max_tokens: int
    multiple: int  # a step's micro-batches are a multiple of this
    capacities: tuple[int, int] | None  # slots of a packed micro-batch, source and target; None: padded


def plan_epoch(lengths: Lengths, *, mixture: Mixture, seed: int, epoch: int, tokens_per_step: int) -> list[Ids]:
    """The steps of an epoch, in order, at most `tokens_per_step` real tokens on each side.

    A pair of weight 1 is there exactly once; of 2.5, twice or three times, as chance has it, in each epoch anew. Raises
    InputError where there is no sentence, or one that no step can hold.
    """
    if sum(count for count, _ in mixture) != len(lengths):
        raise ValueError(f"a mixture of {mixture} for {len(lengths)} pairs")
    if len(lengths) == 0:
        raise InputError("there is no sentence pair to train on")
    longest = int(lengths.max())
    if longest > tokens_per_step:
        raise InputError(f"a sentence of {longest} tokens does not fit train.tokens_per_step={tokens_per_step}")
    members = _members(mixture, seed=seed, epoch=epoch)
    if len(members) == 0:
        raise InputError(f"no sentence pair is left in epoch {epoch}: raise the weights of the training corpora")
    totals = lengths.take(members, axis=0).sum(axis=0, dtype=np.int64)
    random = np.random.PCG64(seed_for(seed, epoch))
    order = members[_permutation(random, len(members))]
    del members
    _sort_in_pools(order, lengths, totals, tokens_per_step)
    steps = _cut(order, lengths, tokens_per_step)
    return [steps[index] for index in _permutation(random, len(steps))]


def _members(mixture: Mixture, *, seed: int, epoch: int) -> Ids:
    """The ids of an epoch's pairs: each as often as its weight's whole part says, and by chance of the rest once more.

    The number that decides about pair i is the i-th of its stream, whatever lies before it in the mixture.
    """
    parts, start = [], 0
    for count, weight in mixture:
        ids = np.arange(start, start + count)
        fraction, whole = math.modf(weight)
        parts += [ids] * int(whole)
        if fraction:
            random = np.random.PCG64(seed_for(seed, epoch, _FRACTIONS)).advance(start)
            parts.append(ids[random.random_raw(count) < np.uint64(fraction * 2**64)])
        start += count
    return np.concatenate(parts)


def _permutation(random: np.random.PCG64, count: int) -> Ids:
    """The stable argsort of raw numbers, several times as fast.

    A number's place is written over its lowest bits, so that numbers can be sorted for themselves; the few that the
    remaining bits do not tell apart are then put right.
    """
    raw, bits = random.random_raw(count), np.uint64(count.bit_length())
    keys = (raw >> bits << bits) | np.arange(count, dtype=np.uint64)
    keys.sort()
    rest = keys >> bits
    equal = np.flatnonzero(rest[1:] == rest[:-1])
    keys &= np.uint64(2 ** int(bits) - 1)
    order = keys.view(np.int64)
    equal = np.union1d(equal, equal + 1)
    unsure = order[equal]
    order[equal] = unsure[np.lexsort((unsure, raw[unsure]))]
    return order


def _sort_in_pools(order: Ids, lengths: Lengths, totals: Ids, tokens_per_step: int) -> None:
    """Sort each pool of `order` by length, in place, pools in turn upwards and downwards.

    So lengths run on across the border of two pools, and the step that spans it is as even as the others. A pair is as
    long as its longer side, each side measured against that side's total: where one language takes more pieces than the
    other (Japanese and English: 3 to 4), the shorter side would else be padded by a fifth. Few lengths differ, so they
    are ranked once, and numbers this narrow are sorted without being compared.
    """
    pool_size = max(1, POOL_STEPS * tokens_per_step * len(order) // int(totals.max()))
    narrow = np.min_scalar_type(2 * int(lengths.max()) + 2)
    sizes = [np.arange(lengths[:, side].max() + 1) * totals[1 - side] for side in (0, 1)]
    ranking = np.unique(np.concatenate(sizes))
    ranks = [np.searchsorted(ranking, side).astype(narrow) for side in sizes]
    for index, start in enumerate(range(0, len(order), pool_size)):
        pool = order[start : start + pool_size]
        source, target = lengths.take(pool, axis=0).T.astype(narrow, order="C")
        upwards = np.lexsort((target, source, np.maximum(ranks[0][source], ranks[1][target])))
        pool[:] = pool[upwards if index % 2 == 0 else upwards[::-1]]


def _cut(order: Ids, lengths: Lengths, tokens_per_step: int) -> list[Ids]:
    """Cut where either side would pass the budget."""
    ends, limits, last = [], np.full(2, tokens_per_step), np.zeros(2, np.int64)
    for first in range(0, len(order), _BLOCK):
        block = lengths.take(order[first : first + _BLOCK], axis=0)
        totals = np.vstack([last, block]).cumsum(axis=0)  # row i: all before the block's i-th pair
        sides = np.ascontiguousarray(totals.T)
        while True:
            end = min(
                int(np.searchsorted(side, limit, side="right")) for side, limit in zip(sides, limits, strict=True)
            )
            if end > len(block):  # the step goes on in the next block
                break
            ends.append(first + end - 1)
            limits = totals[end - 1] + tokens_per_step
        last = totals[-1]
    return np.split(order, ends)


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
