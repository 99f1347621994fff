"""Which pairs of an epoch are in which of its chapters: one chapter is planned at a time, so corpora have no limit.

    chapter_pairs:  places of the chapter, by a keyed permutation -> in ascending order -> ids -> those that are drawn

An epoch has a place for each copy of a pair, and one more where its weight has a fraction. Up to 2 CHAPTER of them
are one chapter, in the order that epochs had before there were chapters. More are cut into chapters of at most CHAPTER,
all of one size, but for one place, and others in each epoch. Only the places of one chapter are ever computed.

Shapes: `m` pairs in the chapter.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from transformer.data.counter_rng import permuted
from transformer.data.store import Ids, Mixture
from transformer.seeding import seed_for

CHAPTER = 1 << 23  # places at most where there are several: planning takes 25 bytes for each, and some seconds for all

_ROUNDS = 4  # of the Feistel network: as many as make it a strong permutation (Luby and Rackoff, 1988)
_BLOCK = 1 << 16  # pairs that are looked at together
_FRACTIONS = 0x77656967  # names the random numbers that decide about the fractions of weights
_CHAPTERS = 0x63686170  # names those that decide about the chapters


class _Copy(NamedTuple):
    """Pairs that an epoch has once, each with the same probability: a corpus, one of its copies, or their fraction."""

    first: int  # id
    size: int
    probability: float


def count_chapters(mixture: Mixture) -> int:
    """How many chapters an epoch has."""
    places = _count_places(mixture)
    return 1 if places <= 2 * CHAPTER else math.ceil(places / CHAPTER)


def chapter_pairs(mixture: Mixture, *, seed: int, epoch: int, chapter: int) -> Ids:
    """The ids of a chapter's pairs, `(m,)`, those of each copy in ascending order.

    In an epoch, each pair is there as often as the whole part of its weight says, and once more with its fraction as
    the probability.
    """
    places = _chapter_places(mixture, seed=seed, epoch=epoch, chapter=chapter)
    copies = _copies(mixture)
    ends = np.cumsum([copy.size for copy in copies]).tolist()
    cuts = np.searchsorted(places, ends).tolist()

    # From places to ids, in place; and which of them are there.
    is_there = np.ones(len(places), bool)
    begin = 0
    for copy, last, cut in zip(copies, ends, cuts, strict=True):
        ids = places[begin:cut]  # a view: what is written into it is written into `places`
        ids += copy.first - (last - copy.size)
        if copy.probability < 1.0:
            is_there[begin:cut] = _are_drawn(ids, copy, seed=seed, epoch=epoch)
        begin = cut
    return places if is_there.all() else places[is_there]


def blocks(count: int) -> Iterator[slice]:
    """Cut so many pairs into slices: what is computed of a block at a time takes hardly any memory."""
    for start in range(0, count, _BLOCK):
        yield slice(start, min(start + _BLOCK, count))


# ---- places ---------------------------------------------------------------------------------------------------------


def _copies(mixture: Mixture) -> list[_Copy]:
    """The copies that an epoch has of its corpora, end to end."""
    copies = []
    first = 0
    for count, weight in mixture:
        fraction, whole = math.modf(weight)
        copies += [_Copy(first, count, 1.0)] * int(whole)
        if fraction:
            copies.append(_Copy(first, count, fraction))
        first += count
    return copies


def _count_places(mixture: Mixture) -> int:
    return sum(copy.size for copy in _copies(mixture))


def _chapter_places(mixture: Mixture, *, seed: int, epoch: int, chapter: int) -> Ids:
    """The places of a chapter, in ascending order."""
    count = _count_places(mixture)
    chapters = count_chapters(mixture)
    if chapters == 1:
        return np.arange(count)

    first = chapter * count // chapters
    end = (chapter + 1) * count // chapters
    keys = [seed_for(seed, epoch, _CHAPTERS, number) for number in range(_ROUNDS)]
    places = np.empty(end - first, np.min_scalar_type(count))  # numbers of 32 bits are sorted nearly twice as fast
    for block in blocks(len(places)):
        places[block] = permuted(np.arange(first + block.start, first + block.stop), count, keys)
    places.sort()
    return places.astype(np.int64)


def _are_drawn(ids: Ids, copy: _Copy, *, seed: int, epoch: int) -> npt.NDArray[np.bool_]:
    """Which of these pairs of a copy, ascending, an epoch has.

    The number that decides about pair i is the i-th of its stream, whatever lies before it in the mixture, and whatever
    chapter it is in.
    """
    random = np.random.PCG64(seed_for(seed, epoch, _FRACTIONS)).advance(copy.first)
    limit = np.uint64(copy.probability * 2**64)
    are_drawn = np.empty(len(ids), bool)
    for block in blocks(copy.size):
        numbers = random.random_raw(block.stop - block.start)
        first = copy.first + block.start
        begin, end = np.searchsorted(ids, [first, first + len(numbers)])
        are_drawn[begin:end] = numbers[ids[begin:end] - first] < limit
    return are_drawn
