"""Chapters: together the epoch, each pair once, whatever their size; and always the same."""

from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest

from transformer.data.chapters import chapter_pairs, count_chapters
from transformer.data.counter_rng import permuted
from transformer.data.store import Mixture

MIXTURES: dict[str, Mixture] = {
    "one corpus": [(50, 1.0)],
    "two": [(13, 1.0), (31, 1)],
    "copies": [(20, 3.0), (7, 1.0), (9, 2.0)],
    "fractions": [(20, 0.4), (11, 2.5), (0, 7.0), (6, 1.0), (30, 0.75)],
    "a pair": [(1, 1.0)],
}


@pytest.fixture
def chapters_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the size of a chapter."""
    return lambda size: monkeypatch.setattr("transformer.data.chapters.CHAPTER", size)


def epoch_of(mixture: Mixture, **where: Any) -> list[list[int]]:
    """The pairs of each chapter."""
    numbers = range(count_chapters(mixture))
    return [chapter_pairs(mixture, **where, chapter=number).tolist() for number in numbers]


def test_permuted_is_a_permutation_of_any_size_that_the_keys_choose() -> None:
    for count in range(1, 200):
        everything = np.arange(count)
        found = [permuted(everything, count, keys).tolist() for keys in ([1, 2, 3, 4], [1, 2, 3, 5], [7])]
        assert all(sorted(numbers) == everything.tolist() for numbers in found)
        one_by_one = [permuted(np.array([number]), count, [1, 2, 3, 4]).tolist() for number in range(0, count, 17)]
        assert list(chain.from_iterable(one_by_one)) == found[0][::17]
        if count > 20:
            assert found[0] != found[1] != everything.tolist()


@pytest.mark.parametrize("mixture", MIXTURES.values(), ids=MIXTURES)
def test_chapter_pairs_are_those_of_the_epoch_once_at_any_size(
    mixture: Mixture, chapters_of: Callable[[int], None]
) -> None:
    """At every size of a chapter: the pairs that an epoch of one chapter has, copies and fractions among them."""
    for epoch in (0, 1):
        where = {"seed": 3, "epoch": epoch}
        chapters_of(1_000)
        (whole,) = epoch_of(mixture, **where)
        places = sum(count * int(np.ceil(weight)) for count, weight in mixture)
        for size in range(1, places + 2):
            chapters_of(size)
            chapters = epoch_of(mixture, **where)
            assert len(chapters) == (1 if places <= 2 * size else -(-places // size))
            assert Counter(chain.from_iterable(chapters)) == Counter(whole)
            assert max(map(len, chapters)) <= (size if len(chapters) > 1 else 2 * size)
            if all(weight == int(weight) for _, weight in mixture):
                assert max(map(len, chapters)) - min(map(len, chapters)) <= 1
            assert chapters == epoch_of(mixture, **where)


def test_chapter_pairs_of_one_chapter_are_in_the_order_of_the_corpora() -> None:
    """As they were before there were chapters; the fraction was written down then."""
    assert epoch_of([(4, 2.0), (3, 1.0)], seed=1, epoch=5) == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6]]
    assert epoch_of([(12, 1.25)], seed=1, epoch=5) == [[*range(12), 2, 8, 10]]


def test_chapter_pairs_are_what_they_were_on_the_day_they_were_written(chapters_of: Callable[[int], None]) -> None:
    """A change here breaks every resume of a run with chapters: `plan_version` must then rise."""
    chapters_of(6)
    assert epoch_of([(10, 1.0), (5, 1.5)], seed=1, epoch=0) == [
        [2, 5, 9, 10, 11],
        [0, 8, 13, 14, 13],
        [3, 6, 11, 12],
        [1, 4, 7, 12],
    ]


def test_chapter_pairs_are_others_in_each_epoch(chapters_of: Callable[[int], None]) -> None:
    chapters_of(100)
    mixture = [(400, 1.0)]
    found = [epoch_of(mixture, seed=seed, epoch=epoch) for seed in (1, 2) for epoch in range(3)]
    for chapter in range(4):
        assert len({str(chapters[chapter]) for chapters in found}) == 6


def test_chapter_pairs_are_a_fair_sample_of_the_corpus(chapters_of: Callable[[int], None]) -> None:
    """Of each tenth of it, of even and odd pairs, and of any two neighbours."""
    chapters_of(10_000)
    for epoch in range(3):
        for chapter in epoch_of([(100_000, 1.0)], seed=1, epoch=epoch):
            pairs = np.array(chapter)
            tenths = np.bincount(pairs // 10_000, minlength=10)  # 1,000 expected, with a deviation of 28
            assert np.abs(tenths - 1_000).max() < 5 * 28
            assert abs(int((pairs % 2).sum()) - 5_000) < 5 * 47
            together = int((np.diff(pairs) == 1).sum())  # 1,000 expected, with a deviation of about 29
            assert abs(together - 1_000) < 5 * 29


def test_chapter_pairs_are_drawn_from_a_corpus_that_no_memory_holds(chapters_of: Callable[[int], None]) -> None:
    chapters_of(1_000)
    mixture = [(10**12, 1.0)]
    assert count_chapters(mixture) == 10**9
    pairs = [chapter_pairs(mixture, seed=1, epoch=0, chapter=chapter) for chapter in (0, 5, 10**9 - 1)]
    assert [len(ids) for ids in pairs] == [1_000] * 3
    assert all((np.diff(ids) > 0).all() and ids[0] >= 0 and ids[-1] < 10**12 for ids in pairs)
    assert len(np.unique(np.concatenate(pairs))) == 3_000
