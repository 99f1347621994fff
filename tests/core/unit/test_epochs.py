"""The stores of the epochs: the corpus where nothing is sampled, other pieces in every epoch where something is."""

import gc
import random
import threading
import time
import tracemalloc
import weakref

import numpy as np
import pytest

from transformer.data import epochs
from transformer.data.epochs import EpochStores
from transformer.data.piece_list import Piece
from transformer.data.store import Ids, Mixture, Sentences, Store
from transformer.data.subwords import SubwordSampler
from transformer.errors import InputError

PAIRS = 2_345  # of which the last block is not full
SPECIAL = [Piece(name, 0.0, False) for name in ("<pad>", "<unk>", "<s>", "</s>")]
TEXTS = ["ab", "▁a", "bc", "ca", "abc", "ba", "▁ab", "cab", "abab", "▁abc", "▁", "a", "b", "c"]
VOCABULARY = [*SPECIAL, *(Piece(text, -float(rank), True) for rank, text in enumerate(TEXTS))]
WORDS = [[7, 9], [13, 12], [10, 6], [13, 11], [5, 16]]  # ▁ab ca, ▁abc abab, ▁ab bc, ▁abc cab, ▁a b


def make_corpus(dtype: str = "<u2") -> Store:
    """Of one to five words a side, and a hundred pairs of one word in the middle of them."""
    draw = random.Random(0)
    sides = []
    for side in range(2):
        sentences = [
            [piece for _ in range(draw.randrange(1, 6 - side)) for piece in draw.choice(WORDS)] for _ in range(PAIRS)
        ]
        sentences[1_000:1_100] = [WORDS[1]] * 100
        pieces, counts = Sentences.of(sentences)
        sides.append((pieces.astype(dtype), np.concatenate([[0], counts.cumsum()])))
    (source, source_offsets), (target, target_offsets) = sides
    return Store((source, target), (source_offsets, target_offsets))


CORPUS = make_corpus()
EVERY = np.arange(PAIRS)


WHOLE = [(PAIRS, 1.0)]


def make_stores(
    corpus: Store = CORPUS, sampler: SubwordSampler | None = None, *, mixture: Mixture = WHOLE, seed: int = 3
) -> EpochStores:
    sampler = sampler or SubwordSampler(VOCABULARY, 0.2)
    return EpochStores(corpus, (sampler, sampler), mixture=mixture, seed=seed)


def sentences_of(store: Store, side: int) -> list[list[int]]:
    pieces, counts = store.gather(np.arange(len(store)), side)
    ends = counts.cumsum()
    return [pieces[end - count : end].tolist() for end, count in zip(ends, counts, strict=True)]


def spell(sentences: list[list[int]]) -> list[str]:
    return ["".join(VOCABULARY[piece].text for piece in pieces) for pieces in sentences]


def test_epoch_stores_without_a_sampler_are_the_corpus() -> None:
    before = threading.active_count()
    stores = EpochStores(CORPUS, None, mixture=[(1_000, 1.0), (1_345, 2.5)], seed=1)
    assert all(stores(epoch) is CORPUS for epoch in (0, 1, 7))
    assert stores.lengths is CORPUS.lengths is stores.plain_lengths
    assert stores.mixture == [(1_000, 1.0), (1_345, 2.5)]
    assert np.array_equal(stores.corpus_ids(EVERY), EVERY)
    assert threading.active_count() == before
    stores.close()


def test_epoch_stores_have_other_pieces_in_every_epoch_that_spell_the_same() -> None:
    stores = make_stores()
    made = [stores(epoch) for epoch in range(3)]
    stores.close()
    for side in range(2):
        plain = sentences_of(CORPUS, side)
        found = [sentences_of(store, side) for store in made]
        assert [spell(sentences) for sentences in found] == [spell(plain)] * 3
        for one, other in ((found[0], plain), (found[0], found[1]), (found[1], found[2]), (found[0], found[2])):
            same = sum(a == b for a, b in zip(one, other, strict=True))
            assert same < 0.6 * PAIRS
    assert all(len(store) == PAIRS for store in made)


def test_epoch_stores_sample_both_sides_apart() -> None:
    """The hundred pairs whose two sides are alike do not become alike."""
    stores = make_stores()
    store = stores(0)
    stores.close()
    source, target = (sentences_of(store, side)[1_000:1_100] for side in range(2))
    assert sum(a == b for a, b in zip(source, target, strict=True)) < 80
    assert len({tuple(pieces) for pieces in source}) > 5


def test_epoch_stores_draw_the_pieces_of_each_copy() -> None:
    """600 pairs once, 1,345 three times in every second epoch, 400 twice; the first of each as without copies."""
    stores = make_stores(mixture=[(600, 0.5), (1_345, 2.5), (400, 2.0)])
    assert stores.mixture == [(600, 0.5), (1_345, 1.0), (400, 1.0), (1_345, 1.0), (400, 1.0), (1_345, 0.5)]
    store = stores.make(0)
    ids = stores.corpus_ids(np.arange(len(store)))
    second = [*range(600, 2_345), *range(600, 1_945)]
    assert ids.tolist() == [*range(PAIRS), *second]
    assert np.array_equal(stores.plain_lengths[:], CORPUS.lengths[ids])
    for side in range(2):
        plain, found = sentences_of(CORPUS, side), sentences_of(store, side)
        assert found[:PAIRS] == sentences_of(make_stores().make(0), side)
        assert spell(found[PAIRS:]) == spell([plain[n] for n in second])
        same = sum(found[n] == copy for n, copy in zip(second, found[PAIRS:], strict=True))
        assert same < 0.6 * len(second)
        again = sum(a == b for a, b in zip(found[PAIRS : PAIRS + 1_345], found[PAIRS + 1_745 :], strict=True))
        assert again < 0.6 * 1_345
    stores.close()


def test_epoch_stores_depend_on_the_seed() -> None:
    one, other = make_stores(seed=1), make_stores(seed=2)
    assert sentences_of(one(0), 0) != sentences_of(other(0), 0)
    one.close()
    other.close()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 1, 0, 2, 2)])
def test_epoch_stores_are_the_same_for_any_order(order: tuple[int, ...]) -> None:
    """And what the sampler gives for all pairs at once, but for those that it would make too long."""
    sampler = SubwordSampler(VOCABULARY, 0.2)
    stores = make_stores()
    for epoch in order:
        store = stores(epoch)
        for side in range(2):
            plain = sentences_of(CORPUS, side)
            pieces, counts = sampler.sample(CORPUS.gather(EVERY, side), EVERY, seed=3, epoch=epoch, side=side)
            ends = counts.cumsum()
            sampled = [pieces[end - count : end].tolist() for end, count in zip(ends, counts, strict=True)]
            room = max(map(len, plain))
            wanted = [b if len(b) <= room else a for a, b in zip(plain, sampled, strict=True)]
            assert sentences_of(store, side) == wanted
    stores.close()


def test_epoch_stores_make_an_epoch_beside_those_that_are_asked_for() -> None:
    """As replay does, while its loader is ahead."""
    stores = make_stores()
    stores(1)
    again = stores.make(0)
    ahead = stores(2)
    for side in range(2):
        assert sentences_of(again, side) == sentences_of(make_stores().make(0), side)
        assert sentences_of(ahead, side) == sentences_of(make_stores().make(2), side)
    stores.close()
    assert make_stores(sampler=None).corpus is EpochStores(CORPUS, None, mixture=WHOLE, seed=1).make(5)


def test_epoch_stores_have_no_sentence_that_is_longer_than_the_longest_of_its_side() -> None:
    stores = make_stores(sampler=SubwordSampler(VOCABULARY, 1.0))  # only letters
    store = stores(0)
    stores.close()
    kept = 0
    for side in range(2):
        plain = sentences_of(CORPUS, side)
        found = sentences_of(store, side)
        room = max(map(len, plain))
        assert max(map(len, found)) <= room
        for before, after in zip(plain, found, strict=True):
            letters = [TEXTS.index(letter) + 4 for piece in before for letter in VOCABULARY[piece].text]
            assert after == (letters if len(letters) <= room else before)
            kept += after == before
    assert 0 < kept < 2 * PAIRS
    assert store.longest == CORPUS.longest or all(a <= b for a, b in zip(store.longest, CORPUS.longest, strict=True))


def test_epoch_stores_tell_lengths_of_a_sample_and_of_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    stores = make_stores()
    first = stores(0)
    assert stores.lengths[:].dtype == CORPUS.lengths[:].dtype
    assert np.array_equal(stores.lengths[:], np.vstack([first.lengths[:], [CORPUS.longest]]))
    stores.close()

    monkeypatch.setattr(epochs, "SAMPLE", 100)  # every 24th pair
    some = make_stores()
    assert np.array_equal(some.lengths[:], np.vstack([first.lengths[::24], [CORPUS.longest]]))
    assert 50 < len(some.lengths) <= 101
    some.close()


@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
def test_epoch_stores_keep_the_type_of_the_ids(dtype: str) -> None:
    stores = make_stores(make_corpus(dtype))
    assert stores(0).dtype == np.dtype(dtype)
    stores.close()


def test_epoch_stores_make_an_epoch_in_hardly_more_memory_than_it_takes() -> None:
    """Its pieces are never there twice, as blocks and put together."""
    lengths = np.full(50_000, 40)
    pieces = np.zeros(lengths.sum(), "<u2")
    offsets = np.concatenate([[0], lengths.cumsum()])
    stores = EpochStores(Store((pieces, pieces), (offsets, offsets)), None, mixture=[(50_000, 1.0)], seed=1)
    stores.changes = "nothing"  # but every epoch is made
    tracemalloc.start()
    try:
        store = stores.make(0)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    stores.close()
    assert len(store) == 50_000
    assert held > 2 * pieces.nbytes
    assert peak < 1.3 * held


def test_epoch_stores_keep_no_epoch_that_is_over() -> None:
    stores = make_stores()
    gone = weakref.ref(stores(0))
    stores(1)
    stores(2)
    gc.collect()
    assert gone() is None
    stores.close()


class _Slow(SubwordSampler):
    """Needs so long for the second epoch that nobody can wait."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY, 0.2)
        self.began = threading.Event()
        self.calls = 0

    def sample(self, sentences: Sentences, ids: Ids, *, seed: int, epoch: int, side: int) -> Sentences:
        if epoch > 0:
            self.began.set()
            self.calls += 1
            time.sleep(0.5)
        return super().sample(sentences, ids, seed=seed, epoch=epoch, side=side)


def test_epoch_stores_stop_making_an_epoch_when_they_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epochs, "BLOCK", 40)  # 59 blocks a side: half a minute
    before = {*threading.enumerate()}
    sampler = _Slow()
    stores = make_stores(sampler=sampler)
    stores(0)
    assert sampler.began.wait(60)
    assert {*threading.enumerate()} > before

    stores.close()
    assert sampler.calls < 20, "of 118"
    assert {*threading.enumerate()} == before
    stores.close()  # once more does no harm


class _Failing(SubwordSampler):
    """Fails in one epoch."""

    def __init__(self, epoch: int) -> None:
        super().__init__(VOCABULARY, 0.2)
        self._epoch = epoch

    def sample(self, sentences: Sentences, ids: Ids, *, seed: int, epoch: int, side: int) -> Sentences:
        if epoch == self._epoch:
            raise InputError("a disk is gone")
        return super().sample(sentences, ids, seed=seed, epoch=epoch, side=side)


@pytest.mark.parametrize("epoch", [0, 1])
def test_epoch_stores_pass_on_an_error_of_the_sampler(epoch: int) -> None:
    stores = make_stores(sampler=_Failing(epoch))
    for earlier in range(epoch):
        stores(earlier)
    with pytest.raises(InputError, match="a disk is gone"):
        stores(epoch)
    stores.close()
