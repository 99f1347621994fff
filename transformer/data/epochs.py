"""The store of each epoch: that of the corpus, or one with other pieces in every epoch.

    store of the corpus -> Augmentation, SubwordSampler, block by block -> store of the epoch

The loader asks for the epochs in turn. While it reads one, a thread makes the next: a single thread, because several
would compete for Python's lock with one another and with the training. A store with other pieces takes as much memory
on each rank as the ids of its pairs take on disk, and that of the next epoch as much again.

Where a corpus has a weight above 1, each copy of a pair draws its own pieces. It is then a pair of its own: an epoch's
store has all pairs of the corpus, under their numbers, and behind them the second copies, the third ones, and so on.
"""

import logging
import math
import threading
import time
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import cached_property

import numpy as np
import numpy.typing as npt

from transformer.data.augmentation import Augmentation, Sides
from transformer.data.store import SIDES, Ids, Lengths, Mixture, Sentences, Store, totals_of
from transformer.data.subwords import SubwordSampler
from transformer.data.tokenizer import Tokenizers

BLOCK = 1_000  # pairs that are sampled at a time
SAMPLE = 50_000  # pairs at most that tell, before the first epoch, how long sampled sentences are

Samplers = tuple[SubwordSampler, SubwordSampler]  # of the source and of the target

log = logging.getLogger(__name__)


def epoch_stores(
    corpus: Store,
    tokenizers: Tokenizers,
    *,
    mixture: Mixture,
    rate: float | None,
    seed: int,
    augmentation: Augmentation | None = None,
) -> "EpochStores":
    """The stores of a run's epochs, with `train.subword_sampling` at this rate; None: without."""
    if rate is None:
        return EpochStores(corpus, None, mixture=mixture, seed=seed, augmentation=augmentation)
    source = SubwordSampler(tokenizers.source.vocabulary(), rate)
    target = source if tokenizers.is_shared else SubwordSampler(tokenizers.target.vocabulary(), rate)
    return EpochStores(corpus, (source, target), mixture=mixture, seed=seed, augmentation=augmentation)


class EpochStores:
    """The store of every epoch of a run, for one thread to ask for; where nothing changes always that of the corpus.

    A sentence that would become longer than the longest of the corpus keeps the pieces that it has there; a changed
    pair with such a one stays as it is. So whatever has room for the corpus has room for every epoch.
    """

    def __init__(
        self,
        corpus: Store,
        samplers: Samplers | None,
        *,
        mixture: Mixture,
        seed: int,
        augmentation: Augmentation | None = None,
    ) -> None:
        self.corpus = corpus
        self._augmentation = augmentation
        self._samplers = samplers
        self._seed = seed
        made_by = {"augmentation": augmentation, "subword sampling": samplers}
        self.changes = " and ".join(
            name for name, maker in made_by.items() if maker is not None
        )  # empty: there is none

        # The copies of corpora in the store of an epoch, and where each begins there and in the corpus.
        copies = _copies_apart(mixture) if self.changes else [(0, len(corpus), 1.0)]
        self.mixture = [(count, weight) for _, count, weight in copies] if self.changes else mixture
        counts = [count for _, count, _ in copies]
        self._starts = np.cumsum([0, *counts[:-1]])
        self._corpus_starts = np.array([start for start, _, _ in copies])
        self._count = sum(counts)

        self._maker = ThreadPoolExecutor(1, "epoch")  # which starts no thread before it has work
        self._made: dict[int, Future[Store]] = {}  # that of the epoch in progress, and of the next one
        self._is_closed = threading.Event()
        self._is_logged = False
        self._too_long = 0  # changed pairs that an epoch has had no room for

    def __call__(self, epoch: int) -> Store:
        """The store of this epoch. From now on, that of the next one is made."""
        if not self.changes:
            return self.corpus

        if epoch not in self._made:
            log.info("%s: drawing the pieces of epoch %d", self.changes, epoch + 1)
        needed = {number: self._start(number) for number in (epoch, epoch + 1)}
        for number, store in self._made.items():
            if number not in needed:
                store.cancel()
        self._made = needed
        return needed[epoch].result()

    def make(self, epoch: int) -> Store:
        """The store of this epoch, made by the calling thread whatever others wait for."""
        return self._make(epoch) if self.changes else self.corpus

    def corpus_ids(self, ids: Ids) -> Ids:
        """The pairs of the corpus that these pairs of an epoch's store are, or are copies of."""
        copy = self._starts.searchsorted(ids, side="right") - 1
        return ids - self._starts[copy] + self._corpus_starts[copy]

    @property
    def plain_lengths(self) -> Lengths:
        """Lengths `(m, 2)` of the pairs of an epoch's store, as they would be without sampling."""
        if self._count == len(self.corpus):
            return self.corpus.lengths
        return self.corpus.lengths[self.corpus_ids(np.arange(self._count))]

    @cached_property
    def lengths(self) -> Lengths:
        """Lengths `(n, 2)` as the first epoch has them: of some pairs, and of the longest sentences of the corpus."""
        if not self.changes:
            return self.corpus.lengths

        some = np.arange(0, len(self.corpus), -(-len(self.corpus) // SAMPLE))
        lengths = np.column_stack([sentences.counts + 1 for sentences in self._draw(some, epoch=0)])
        return np.vstack([lengths, [self.corpus.longest]]).astype(np.int32)

    def close(self) -> None:
        """Stop making an epoch that nobody will need."""
        self._is_closed.set()
        self._maker.shutdown(cancel_futures=True)

    def _start(self, epoch: int) -> Future[Store]:
        """Begin to make the store of this epoch, unless that has begun."""
        return self._made.get(epoch) or self._maker.submit(self._make, epoch)

    def _make(self, epoch: int) -> Store:
        began = time.perf_counter()
        self._too_long = 0

        # Buffers that grow in place: blocks that are put together would be there twice.
        pieces = [bytearray() for _ in SIDES]
        offsets = [np.zeros(self._count + 1, np.int64) for _ in SIDES]
        for start in range(0, self._count, BLOCK):
            end = min(start + BLOCK, self._count)
            for side, sentences in enumerate(self._draw(np.arange(start, end), epoch=epoch)):
                pieces[side] += sentences.pieces.tobytes()
                offsets[side][start + 1 : end + 1] = sentences.counts

        source, target = (np.frombuffer(of_side, self.corpus.dtype) for of_side in pieces)
        source_offsets, target_offsets = (counts.cumsum(out=counts) for counts in offsets)
        store = Store((source, target), (source_offsets, target_offsets))
        self._log(store, seconds=time.perf_counter() - began)
        return store

    def _log(self, store: Store, *, seconds: float) -> None:
        """Log once how many tokens an epoch has, and how long they took."""
        if self._is_logged:
            return
        self._is_logged = True
        tokens = store.lengths.totals
        source, target = (tokens / totals_of(self.plain_lengths)).tolist()
        log.info(
            "%s: an epoch has %.2f times the source and %.2f times the target tokens of the corpus; "
            "made in %.1f s, %s tokens/s",
            self.changes,
            source,
            target,
            seconds,
            f"{int(tokens.sum()) / seconds:,.0f}",
        )
        if self._too_long:
            log.info(
                "augmentation: %s changed pairs would be longer than the longest of the corpus, and stay as they are",
                f"{self._too_long:,}",
            )

    def _draw(self, ids: Ids, *, epoch: int) -> Sides:
        """The pairs `ids` `(b,)` as an epoch has them, their pieces as the corpus stores them."""
        if self._is_closed.is_set():
            raise CancelledError

        of_corpus = self.corpus_ids(ids)
        sides = [self.corpus.gather(of_corpus, side) for side in range(len(SIDES))]
        if self._augmentation is not None:
            changed = self._augmentation.change((sides[0], sides[1]), ids, epoch=epoch)
            is_too_long = np.logical_or.reduce([self._are_too_long(one, side) for side, one in enumerate(changed)])
            self._too_long += int(is_too_long.sum())
            sides = [_choose(is_too_long, *versions) for versions in zip(sides, changed, strict=True)]
        if self._samplers is not None:
            for side, sampler in enumerate(self._samplers):
                sampled = sampler.sample(sides[side], ids, seed=self._seed, epoch=epoch, side=side)
                sides[side] = _choose(self._are_too_long(sampled, side), sides[side], sampled)
        source, target = (Sentences(pieces.astype(self.corpus.dtype), counts) for pieces, counts in sides)
        return source, target

    def _are_too_long(self, sentences: Sentences, side: int) -> npt.NDArray[np.bool_]:
        return sentences.counts + 1 > self.corpus.longest[side]  # (b,) with EOS


def _copies_apart(mixture: Mixture) -> list[tuple[int, int, float]]:
    """The copies in a store with a pair for each: first pair in the corpus, number of pairs, and weight.

    First every corpus, then those with a second copy, and so on; a weight of 2.5 becomes 1, 1 and 0.5.
    """
    copies = []
    for copy in range(math.ceil(max(weight for _, weight in mixture))):
        start = 0  # of the corpus
        for count, weight in mixture:
            if weight > copy:
                copies.append((start, count, min(1.0, weight - copy)))
            start += count
    return copies


def _choose(is_first: npt.NDArray[np.bool_], first: Sentences, second: Sentences) -> Sentences:
    """For each sentence the first version where `is_first` `(b,)`, else the second."""
    counts = np.where(is_first, first.counts, second.counts)
    if not is_first.any():
        return second

    chosen_first = first.select(is_first)
    chosen_second = second.select(~is_first)
    sentence = np.concatenate(
        [
            np.repeat(np.flatnonzero(is_first), chosen_first.counts),
            np.repeat(np.flatnonzero(~is_first), chosen_second.counts),
        ]
    )
    pieces = np.concatenate([chosen_first.pieces, chosen_second.pieces])
    return Sentences(pieces[sentence.argsort(kind="stable")], counts)
