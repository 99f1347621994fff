"""The data order, as pure functions: a chapter of an epoch is cut into steps, a step into micro-batches.

    plan_chapter:  the pairs of a chapter -> shuffled -> sorted by length inside pools -> cut into steps -> shuffled
    split_step:    the pairs of a step -> micro-batches that fit memory, as many for each rank of the first start

A step is an array of sentence ids. Which sentences a step holds depends on the seed, the epoch and chapter, the
corpora's weights and `tokens_per_step`, never on `max_tokens` or the world size, so a run can go on elsewhere. Planning
needs 25 bytes for each pair of the chapter, 0.4 GB at most. Most corpora are one chapter: see `chapters`.

Shapes: `n` pairs in the store, `m` in the chapter, `b` in a step or micro-batch. `lengths` is `(n, 2)`: the real tokens
of every pair, EOS counted, source then target. "Side" 0 is the source, side 1 the target.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from transformer.config.jobs import TrainJob
from transformer.config.settings import AttentionKernel
from transformer.data.chapters import blocks, chapter_pairs, count_chapters
from transformer.data.store import Ids, LengthArray, Lengths, Mixture, longest_of, totals_of
from transformer.errors import InputError
from transformer.seeding import seed_for

POOL_STEPS = 100  # sorted by length inside pools of about this many steps: "approximate sequence length" (section 5.1)
SLOTS = 128  # packed capacities are multiples of this, which tiles of a GPU divide
# A packed batch has this many times the slots that its shorter side takes on average over the corpus. With fewer, many
# steps are computed in two halves: of KFTT's, Japanese to English, one in eight with 1.1 times, one in 900 with 1.25.
SLACK = 1.25

_SAMPLED = 500_000  # pairs planned at most to describe an epoch, in a third of a second


@dataclass(frozen=True)
class Batching:
    """How epochs are cut into steps, and steps into micro-batches.

    Everything here is fixed before the first step, so that on a GPU all packed batches have one shape. `max_tokens`
    (and with it `capacities`), `kernel` and `is_one_shape` may differ when a run is resumed: none of them decides
    which sentences a step holds.
    """

    mixture: Mixture
    seed: int
    tokens_per_step: int  # real tokens of a step on either side, at most
    max_tokens: int  # rows x longest of a padded micro-batch on either side, at most
    micro_batch_multiple: int  # a step's micro-batches are a multiple of this
    capacities: tuple[int, int] | None  # slots of a packed micro-batch, source and target, at most; None: padded
    kernel: AttentionKernel | None = None  # attends to packed sentences as they lie; None: they are cut into groups
    is_one_shape: bool = True  # packed batches have all of these slots, even if no sentence fills them

    @property
    def n_chapters(self) -> int:
        """How many chapters each epoch has."""
        return count_chapters(self.mixture)

    def plan(self, lengths: Lengths, *, epoch: int, chapter: int) -> list[Ids]:
        """`plan_chapter` of pairs of these lengths."""
        return plan_chapter(
            lengths,
            mixture=self.mixture,
            seed=self.seed,
            epoch=epoch,
            chapter=chapter,
            tokens_per_step=self.tokens_per_step,
        )

    def split(self, ids: Ids, lengths: Lengths) -> list[Ids]:
        """`split_step` of the pairs `ids`, a step of that plan; `lengths` are the whole corpus'."""
        return split_step(
            ids,
            lengths,
            max_tokens=self.max_tokens,
            micro_batch_multiple=self.micro_batch_multiple,
            capacities=self.capacities,
        )

    def slots_of(self, lengths: LengthArray) -> tuple[int, int] | None:
        """The slots of a packed micro-batch of sentences of these lengths `(b, 2)`, source and target; None: padded."""
        if self.capacities is None or self.is_one_shape:
            return self.capacities
        return slots_for(lengths)

    def count_slots(self, micro_batches: Sequence[LengthArray]) -> int:
        """Positions of both sides of micro-batches, given as the lengths of each, never none; padding is counted."""
        counted = 0
        for lengths in micro_batches:
            slots = self.slots_of(lengths)
            counted += len(lengths) * int(lengths.max(axis=0).sum()) if slots is None else sum(slots)
        return counted


def plan_version(job: TrainJob, mixture: Mixture) -> int:
    """The version of a run's data order and pieces: a run resumes only under the version that it began with.

    It is the version of the last change that affects the run, so most runs have version 1. Since version 2, each copy
    of a pair draws its own pieces under subword sampling, and its own text under augmentation. Since version 3, an
    epoch of more than 2^24 pairs has several chapters.
    """
    if count_chapters(mixture) > 1:
        return 3
    has_copies = job.data.temperature is not None or any(extra.weight > 1.0 for extra in job.data.extra.values())
    has_own_pieces = job.train.subword_sampling is not None or bool(job.train.augment.rates)
    return 2 if has_copies and has_own_pieces else 1


@dataclass(frozen=True)
class EpochSample:
    """The first epoch as it is planned; for a large corpus, only every `stride`-th pair, which takes no time."""

    lengths: LengthArray  # of the sample
    plan: list[Ids]  # its steps
    stride: int

    def describe(self) -> str:
        """How many sentence pairs and steps the epoch has."""
        about = "" if self.stride == 1 else "about "
        pairs = sum(map(len, self.plan)) * self.stride
        steps = len(self.plan) * self.stride
        return f"the first epoch: {about}{pairs:,} sentence pairs in {about}{steps:,} steps"


def sample_epoch(lengths: Lengths, batching: Batching) -> EpochSample:
    """The first epoch over sentence pairs of these lengths. Raises InputError as `plan_chapter` does."""
    stride = math.ceil(len(lengths) / _SAMPLED)
    sample = lengths[::stride]
    thinned = replace(batching, mixture=_thinned(batching.mixture, stride))
    chapters = [thinned.plan(sample, epoch=0, chapter=chapter) for chapter in range(thinned.n_chapters)]
    return EpochSample(sample, list(chain.from_iterable(chapters)), stride)


def _thinned(mixture: Mixture, stride: int) -> Mixture:
    """The mixture of every `stride`-th pair."""
    thinned = []
    start = 0
    for count, weight in mixture:
        end = start + count
        thinned.append((math.ceil(end / stride) - math.ceil(start / stride), weight))
        start = end
    return thinned


# ---- from a chapter to its steps ------------------------------------------------------------------------------------


def plan_chapter(
    lengths: Lengths, *, mixture: Mixture, seed: int, epoch: int, chapter: int, tokens_per_step: int
) -> list[Ids]:
    """The steps of a chapter, in order, at most `tokens_per_step` real tokens on each side.

    Over all chapters of an epoch, a pair of weight 1 occurs exactly once, a pair of weight 2.5 two or three times,
    drawn anew in each epoch. Raises InputError if there is no sentence, or one that no step can hold.
    """
    if sum(count for count, _ in mixture) != len(lengths):
        raise ValueError(f"a mixture of {mixture} for {len(lengths)} pairs")
    if len(lengths) == 0:
        raise InputError("there is no sentence pair to train on")
    longest = max(longest_of(lengths))
    if longest > tokens_per_step:
        raise InputError(
            f"epoch {epoch + 1}: a sentence of {longest} tokens does not fit train.tokens_per_step={tokens_per_step}: "
            "raise it or lower data.filter.max_length"
        )

    pairs = chapter_pairs(mixture, seed=seed, epoch=epoch, chapter=chapter)  # (m,) ids
    if len(pairs) == 0:
        raise InputError(f"no sentence pair is left in epoch {epoch + 1}: raise the weights of the training corpora")

    # Shuffle the pairs, sort them by length inside pools, cut them into steps, and shuffle the steps. Until they are
    # cut, a pair is named by its place in `pairs`. An epoch's first chapter is shuffled as whole epochs were before
    # there were chapters.
    random = np.random.PCG64(seed_for(seed, epoch, chapter) if chapter else seed_for(seed, epoch))
    order = _permutation(random, len(pairs))  # (m,)
    pair_lengths = _gathered(lengths, pairs)  # (m, 2)
    _sort_in_pools(order, pair_lengths, tokens_per_step=tokens_per_step)
    ends = _cut(order, pair_lengths, tokens_per_step=tokens_per_step)
    for block in blocks(len(order)):
        order[block] = pairs[order[block]]
    steps = np.split(order, ends)
    return [steps[index] for index in _permutation(random, len(steps))]


def _gathered(lengths: Lengths, ids: Ids) -> LengthArray:
    """The lengths of the pairs `ids` `(m,)`."""
    found = np.empty((len(ids), 2), np.int32)
    for block in blocks(len(ids)):
        found[block] = lengths[ids[block]]
    return found


def _permutation(random: np.random.PCG64, count: int) -> Ids:
    """The stable argsort of `count` raw numbers, several times as fast.

    Raw PCG64 output, because NumPy promises that stream for ever, but `Generator.permutation` only from one release to
    the next. A number's index is written over its lowest bits, so that the numbers can be sorted themselves. The few
    numbers that the remaining bits do not tell apart are put right afterwards.
    """
    raw = random.random_raw(count)
    bits = np.uint64(count.bit_length())
    keys = raw >> bits
    keys <<= bits
    for block in blocks(count):
        keys[block] |= np.arange(block.start, block.stop, dtype=np.uint64)
    keys.sort()

    # Neighbours with the same high bits stand in the order of their indices: they may have to be exchanged.
    found = [np.zeros(0, np.int64)]
    for block in blocks(count - 1):
        differing_bits = keys[block] ^ keys[block.start + 1 : block.stop + 1]
        found.append(block.start + np.flatnonzero(differing_bits >> bits == 0))
    same_as_next = np.concatenate(found)
    unsure = np.union1d(same_as_next, same_as_next + 1)

    # Keep the indices only, and sort those of the unsure places by the whole numbers.
    keys &= np.uint64(2 ** int(bits) - 1)
    order = keys.view(np.int64)
    indices = order[unsure]
    order[unsure] = indices[np.lexsort((indices, raw[indices]))]
    return order


def _sort_in_pools(order: Ids, lengths: LengthArray, *, tokens_per_step: int) -> None:
    """Sort each pool of `order` by length, in place, pools in turn upwards and downwards.

    So lengths continue across the border of two pools, and the step that spans it is as even as the others. A pair's
    length is that of its longer side, each side relative to that side's total. Otherwise, where one language takes more
    pieces than the other (Japanese and English: 3 to 4), the shorter side would be padded by a fifth.
    """
    totals = lengths.sum(axis=0, dtype=np.int64)  # (2,)
    pool_size = max(1, POOL_STEPS * tokens_per_step * len(order) // int(totals.max()))

    # There are few different lengths. So each is ranked once, by its share of its side's total, length / totals[side];
    # times both totals, that is a whole number. The ranks fit a type so narrow that sorting needs no comparisons.
    rank_type = np.min_scalar_type(2 * int(lengths.max()) + 2)
    source_sizes = np.arange(lengths[:, 0].max() + 1) * totals[1]  # of every length from 0 on
    target_sizes = np.arange(lengths[:, 1].max() + 1) * totals[0]
    all_sizes = np.unique(np.concatenate([source_sizes, target_sizes]))
    source_rank = np.searchsorted(all_sizes, source_sizes).astype(rank_type)
    target_rank = np.searchsorted(all_sizes, target_sizes).astype(rank_type)

    for index, start in enumerate(range(0, len(order), pool_size)):
        pool = order[start : start + pool_size]  # a view: what is written into it is written into `order`
        source, target = lengths.take(pool, axis=0).T.astype(rank_type, order="C")
        longer_side = np.maximum(source_rank[source], target_rank[target])
        upwards = np.lexsort((target, source, longer_side))
        pool[:] = pool[upwards if index % 2 == 0 else upwards[::-1]]


def _cut(order: Ids, lengths: LengthArray, *, tokens_per_step: int) -> list[int]:
    """Where in `order` each step but the last ends: each is as long as it can be with both sides within the budget."""
    ends: list[int] = []
    limits = np.full(2, tokens_per_step)  # totals of each side that the step in progress must not pass
    before = np.zeros(2, np.int64)  # totals of each side up to the block

    for block in blocks(len(order)):
        block_lengths = lengths.take(order[block], axis=0)
        totals = np.vstack([before, block_lengths]).cumsum(axis=0)  # row i: all before the block's i-th pair
        source_totals, target_totals = np.ascontiguousarray(totals.T)

        while True:
            source_end = int(np.searchsorted(source_totals, limits[0], side="right"))
            target_end = int(np.searchsorted(target_totals, limits[1], side="right"))
            end = min(source_end, target_end)
            if end > len(block_lengths):  # the step goes on in the next block
                break
            ends.append(block.start + end - 1)
            limits = totals[end - 1] + tokens_per_step
        before = totals[-1]

    return ends


# ---- from a step to its micro-batches -------------------------------------------------------------------------------


def packed_capacities(
    lengths: Lengths, *, tokens_per_step: int, max_tokens: int, micro_batch_multiple: int
) -> tuple[int, int]:
    """The slots of a packed micro-batch, source and target, at most: the same for the whole training.

    They hold a step that is cut into the fewest micro-batches that `max_tokens` allows, and the longest sentence of
    `lengths`, rounded up to a multiple of 128. The side with fewer tokens in the corpus gets fewer slots. A step far
    from the average may then need one micro-batch more.
    """
    totals = totals_of(lengths)
    longest = longest_of(lengths)

    # How many micro-batches a step is cut into.
    step_tokens = min(tokens_per_step, int(totals.max()))
    fewest = -(-step_tokens // max_tokens)  # rounded up
    count = _round_up(fewest, micro_batch_multiple)

    # What each side of a micro-batch then holds.
    shares = np.minimum(1.0, SLACK * totals / totals.max())
    slots = shares * step_tokens / count
    if count > 1:
        slots = slots + longest  # an even cut falls inside a sentence
    slots = np.maximum(np.minimum(slots, max_tokens), longest)
    source, target = (np.ceil(slots / SLOTS).astype(int) * SLOTS).tolist()
    return source, target


def slots_for(lengths: LengthArray) -> tuple[int, int]:
    """The slots that these sentences take, source and target, rounded up to a multiple of 128, never 0."""
    source, target = (max(1, total) for total in lengths.sum(axis=0, dtype=np.int64).tolist())
    return _round_up(source, SLOTS), _round_up(target, SLOTS)


def split_step(
    ids: Ids,
    lengths: Lengths,
    *,
    max_tokens: int,
    micro_batch_multiple: int,
    capacities: tuple[int, int] | None = None,
) -> list[Ids]:
    """Cut a step into the fewest micro-batches that fit, in a multiple of `micro_batch_multiple`.

    The micro-batches are as even as can be. Padded, the longest sentences come first, and a micro-batch fits where rows
    x longest is at most `max_tokens` on both sides; packed, each has sentences of all lengths, and fits where each
    side's tokens do. `lengths` are the whole corpus'. Where there are too few sentences the last micro-batches are
    empty. Raises InputError for a sentence that fits nowhere.
    """
    pairs = lengths[ids]  # (b, 2)
    source, target = pairs.T
    limits = (max_tokens, max_tokens) if capacities is None else capacities
    for side, limit in zip((source, target), limits, strict=True):
        longest = int(side.max(initial=0))
        if longest > limit:
            raise InputError(
                f"a sentence of {longest} tokens does not fit a micro-batch of {limit} "
                f"(train.max_tokens={max_tokens}): raise train.max_tokens or lower data.filter.max_length"
            )

    longer = np.maximum(source, target)  # (b,)
    longest_first = np.lexsort((target, source, longer))[::-1]
    if capacities is not None:
        return _split_packed(ids[longest_first], pairs[longest_first], capacities, multiple=micro_batch_multiple)

    # rows x longest fits on both sides if and only if rows x (the longer of the two) fits.
    sizes: list[int] = longer[longest_first].tolist()
    return _split_padded(ids[longest_first], sizes, max_tokens, multiple=micro_batch_multiple)


def _split_packed(ids: Ids, lengths: LengthArray, capacities: tuple[int, int], *, multiple: int) -> list[Ids]:
    """The sentences `ids` of these lengths, longest first, in as few packed micro-batches as `_fill` can do with.

    Cutting the sorted sentences into stretches would be less even: sentences of one length may have long translations
    in one stretch and short ones in the next, and a side that is a little too long costs another micro-batch.
    """
    totals = lengths.sum(axis=0, dtype=np.int64)  # (2,)
    fewest = max(1, *(-(-totals // capacities)).tolist())  # rounded up
    count = _round_up(fewest, multiple)
    if count == 1:
        return [ids]

    pairs = lengths.tolist()
    while True:
        members = _fill(pairs, capacities, count)
        if members is not None:
            return [ids[np.array(places, dtype=np.int64)] for places in members]
        count += multiple


def _fill(pairs: list[list[int]], capacities: tuple[int, int], count: int) -> list[list[int]] | None:
    """Each sentence in turn goes to the emptiest of `count` micro-batches; None where one does not fit there.

    A micro-batch is as full as the fuller of its two sides. `pairs` has the source and target tokens of each sentence;
    what is returned are places in `pairs`.
    """
    members: list[list[int]] = [[] for _ in range(count)]
    heap = [(0.0, number, 0, 0) for number in range(count)]  # fullness, micro-batch, its source and its target tokens
    for place, (source, target) in enumerate(pairs):
        _, number, source_total, target_total = heap[0]  # the emptiest
        source_total += source
        target_total += target

        fullness = max(source_total / capacities[0], target_total / capacities[1])
        if fullness > 1.0:
            return None
        members[number].append(place)
        heapq.heapreplace(heap, (fullness, number, source_total, target_total))
    return members


def _split_padded(ids: Ids, sizes: list[int], max_tokens: int, *, multiple: int) -> list[Ids]:
    """The sentences `ids`, longest first, of these sizes, in as few padded micro-batches as fit; the last may be empty.

    A sentence's size is the length of its longer side.
    """
    fewest = max(1, len(_padded_starts(sizes, max_tokens)))
    count = _round_up(fewest, multiple)
    starts = _even_starts(sizes, max_tokens, count=count)

    ends = [*starts[1:], len(sizes)]
    batches = [ids[start:end] for start, end in zip(starts, ends, strict=True)]
    nothing = ids[:0]
    return batches + [nothing] * (count - len(batches))


def _padded_starts(sizes: list[int], budget: int) -> list[int]:
    """Where each micro-batch starts, filling one after the other. Sizes descend, so the first row is the longest."""
    starts: list[int] = []
    start = 0
    while start < len(sizes):
        starts.append(start)
        start += budget // sizes[start]
    return starts


def _even_starts(sizes: list[int], max_tokens: int, *, count: int) -> list[int]:
    """`count` micro-batches, or one a sentence where there are fewer sentences; the largest as small as can be."""
    # Find the smallest budget that needs no more than `count`, by bisection.
    low = max(sizes, default=0)
    high = max_tokens
    while low < high:
        middle = (low + high) // 2
        if len(_padded_starts(sizes, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    starts = _padded_starts(sizes, high)

    # Equal lengths can leave some micro-batches over: halve the one with most rows.
    while len(starts) < min(count, len(sizes)):
        ends = [*starts[1:], len(sizes)]
        rows, start = max((end - start, start) for start, end in zip(starts, ends, strict=True))
        middle_row = start + (rows + 1) // 2
        starts = sorted([*starts, middle_row])
    return starts


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
