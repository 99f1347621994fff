"""The data order: each sentence once, no budget passed, steps that depend on nothing but data, seed and epoch."""

import itertools
import math
import random
import time
import tracemalloc
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from support.paths import CORPORA, needs_corpora
from support.tiers import tiers
from transformer.data.chapters import chapter_pairs
from transformer.data.corpus import read_pairs
from transformer.data.plan import packed_capacities, plan_chapter, slots_for, split_step
from transformer.data.store import Mixture, StoredLengths
from transformer.errors import InputError
from transformer.seeding import seed_for

LISTS = list[list[int]]


def plan(
    lengths: np.ndarray,
    *,
    seed: int,
    epoch: int,
    tokens_per_step: int,
    mixture: Mixture | None = None,
    chapter: int = 0,
) -> list[np.ndarray]:
    """The plan of one corpus that is there once, unless said otherwise."""
    mixture = [(len(lengths), 1.0)] if mixture is None else mixture
    where: dict[str, Any] = {"seed": seed, "epoch": epoch, "chapter": chapter, "tokens_per_step": tokens_per_step}
    return plan_chapter(lengths, mixture=mixture, **where)


def as_lists(steps: list[np.ndarray]) -> LISTS:
    return [step.tolist() for step in steps]


def random_lengths(random_state: np.random.Generator) -> np.ndarray:
    """Pairs of one of four distributions: uniform, long-tailed, all equal, or few long among short."""
    count = int(random_state.integers(1, 400))
    match int(random_state.integers(4)):
        case 0:
            lengths = random_state.integers(1, 50, size=(count, 2))
        case 1:
            lengths = np.exp(random_state.normal(2.5, 0.8, size=(count, 2))).clip(1, 100)
        case 2:
            lengths = np.full((count, 2), random_state.integers(1, 30))
        case _:
            lengths = np.where(random_state.random((count, 2)) < 0.05, 100, 3)
    return lengths.astype(np.int32)


def test_plan_chapter_takes_every_sentence_of_random_corpora_once_within_the_budget() -> None:
    state = np.random.default_rng(7)
    for trial in range(300):
        lengths = random_lengths(state)
        budget = int(state.integers(lengths.max(), lengths.max() * 20 + 2))
        steps = plan(lengths, seed=trial, epoch=0, tokens_per_step=budget)
        assert sorted(itertools.chain.from_iterable(as_lists(steps))) == list(range(len(lengths)))
        for step in steps:
            assert len(step) > 0
            assert sum(int(lengths[i, 0]) for i in step) <= budget
            assert sum(int(lengths[i, 1]) for i in step) <= budget


def plain_plan(
    lengths: np.ndarray,
    *,
    seed: int,
    epoch: int,
    tokens_per_step: int,
    members: list[int] | None = None,
    chapter: int = 0,
) -> LISTS:
    """The plan in plain Python."""
    members = list(range(len(lengths))) if members is None else members
    random_state = np.random.PCG64(seed_for(seed, epoch, chapter) if chapter else seed_for(seed, epoch))

    def shuffled(items: list[Any]) -> list[Any]:
        numbers = random_state.random_raw(len(items)).tolist()
        return [items[place] for place in sorted(range(len(items)), key=numbers.__getitem__)]

    order, pairs = shuffled(members), [tuple(map(int, pair)) for pair in lengths]
    totals = [sum(pairs[i][side] for i in members) for side in (0, 1)]
    pool_size = max(1, 100 * tokens_per_step * len(order) // max(totals))
    steps: LISTS = [[]]
    used = [0, 0]
    for number, start in enumerate(range(0, len(order), pool_size)):
        pool = sorted(
            order[start : start + pool_size],
            key=lambda i: (max(pairs[i][0] * totals[1], pairs[i][1] * totals[0]), *pairs[i]),
        )
        for i in pool if number % 2 == 0 else reversed(pool):
            used = [used[side] + pairs[i][side] for side in (0, 1)]
            if max(used) > tokens_per_step:
                steps.append([])
                used = list(pairs[i])
            steps[-1].append(i)
    return shuffled(steps)


def test_plan_chapter_is_the_plain_plan_for_random_corpora() -> None:
    """One pool and many, one step and many; equal pairs; sides of unlike length; sentences as long as a step."""
    state = np.random.default_rng(23)
    pools = set()
    for trial in range(400):
        lengths = random_lengths(state)
        lengths[:, 1] *= state.integers(1, 4)
        budget = int(lengths.max() * state.choice([1, 1.01, 1.5, 3, 30]))
        where: dict[str, Any] = {"seed": trial, "epoch": trial % 3, "tokens_per_step": budget}
        assert as_lists(plan(lengths, **where)) == plain_plan(lengths, **where)
        pools.add(math.ceil(int(lengths.sum(axis=0).max()) / (100 * budget)))
    assert {1, 2, 3} <= pools


@pytest.mark.parametrize("longest", tiers([70_000], [40], pytest.mark.ci))
def test_plan_chapter_of_a_large_corpus_is_the_plain_plan(longest: int) -> None:
    """More pairs than are looked at together, and lengths too large for 16 bits."""
    lengths = np.exp(np.random.default_rng(3).normal(2.0, 0.7, size=(150_000, 2))).clip(1, 40).astype(np.int32)
    lengths[::50_000] = longest
    where: dict[str, Any] = {"seed": 4, "epoch": 1, "tokens_per_step": max(900, longest)}
    assert as_lists(plan(lengths, **where)) == plain_plan(lengths, **where)


def test_plan_chapter_keeps_the_order_of_equal_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come once in a million epochs, numbers with the same upper bits in every one: here all the time."""

    class Coarse(np.random.PCG64):
        def random_raw(self, size: Any = None, output: Any = True) -> Any:
            return super().random_raw(size) & np.uint64(0xF000_0000_0000_0003)

    monkeypatch.setattr(np.random, "PCG64", Coarse)
    state = np.random.default_rng(29)
    for trial in range(50):
        lengths = random_lengths(state)
        where: dict[str, Any] = {"seed": trial, "epoch": 0, "tokens_per_step": int(lengths.max() * 2)}
        assert as_lists(plan(lengths, **where)) == plain_plan(lengths, **where)


def test_plan_chapter_of_a_tiny_corpus_is_what_it_was_on_the_day_it_was_written() -> None:
    """A change here breaks every resume in mid-epoch: `plan_version` must then rise."""
    lengths = np.array([[3, 4], [5, 2], [9, 9], [1, 1], [4, 4], [2, 7], [6, 6], [8, 3]], dtype=np.int32)
    plans = [as_lists(plan(lengths, seed=1, epoch=epoch, tokens_per_step=12)) for epoch in (0, 1)]
    # one pool, sorted to 3 0 4 | 1 6 | 5 7 | 2 and cut there (worked out by hand); the order of steps is the seed's
    assert plans == [[[2], [1, 6], [3, 0, 4], [5, 7]], [[3, 0, 4], [1, 6], [2], [5, 7]]]


def test_plan_chapter_depends_on_epoch_and_seed_alone() -> None:
    lengths = np.random.default_rng(0).integers(1, 40, size=(500, 2)).astype(np.int32)
    plans = {
        (seed, epoch): as_lists(plan(lengths, seed=seed, epoch=epoch, tokens_per_step=300))
        for seed in (1, 2)
        for epoch in (0, 1)
    }
    assert len({str(plan) for plan in plans.values()}) == 4
    assert as_lists(plan(lengths, seed=2, epoch=1, tokens_per_step=300)) == plans[2, 1]


def test_plan_chapter_fills_and_shuffles_steps() -> None:
    lengths = np.random.default_rng(0).integers(1, 40, size=(20_000, 2)).astype(np.int32)
    steps = plan(lengths, seed=3, epoch=0, tokens_per_step=500)
    fill = [int(lengths[step].sum(axis=0).max()) for step in steps]
    assert sum(size >= 460 for size in fill) >= len(fill) - 1  # all but the last one that was cut
    spread = [int(np.ptp(lengths[step].max(axis=1))) for step in steps]
    assert max(spread) < 20  # also where a step spans two pools: of 1 to 40
    means = np.array([lengths[step].max(axis=1).mean() for step in steps])
    assert abs(np.corrcoef(np.arange(len(means)), means)[0, 1]) < 0.1
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.1


def test_plan_chapter_and_split_step_refuse_what_does_not_fit() -> None:
    with pytest.raises(InputError, match=r"13 tokens does not fit train\.tokens_per_step=12"):
        plan(np.array([[1, 1], [2, 13]], dtype=np.int32), seed=1, epoch=0, tokens_per_step=12)
    with pytest.raises(InputError, match="no sentence pair"):
        plan(np.zeros((0, 2), dtype=np.int32), seed=1, epoch=0, tokens_per_step=12)
    with pytest.raises(InputError, match=r"13 tokens does not fit a micro-batch of 12"):
        split_step(np.array([0]), np.array([[13, 1]], dtype=np.int32), max_tokens=12, micro_batch_multiple=1)


MIXED = np.random.default_rng(31).integers(1, 30, size=(3_000, 2)).astype(np.int32)


def copies(mixture: Mixture, epoch: int, seed: int = 1) -> np.ndarray:
    """How often each pair of MIXED is in an epoch."""
    steps = plan(MIXED, mixture=mixture, seed=seed, epoch=epoch, tokens_per_step=400)
    assert all(max(MIXED[step].sum(axis=0)) <= 400 for step in steps)
    return np.bincount(np.concatenate(steps), minlength=len(MIXED))


def test_plan_chapter_copies_exactly_by_whole_weights() -> None:
    found = copies([(1_000, 3.0), (500, 1.0), (1_500, 2.0)], epoch=0)
    assert found.tolist() == [3] * 1_000 + [1] * 500 + [2] * 1_500
    assert copies([(1_000, 1.0), (0, 7.0), (2_000, 1.0)], epoch=0).tolist() == [1] * 3_000


def test_plan_chapter_of_a_mixture_of_weights_1_is_that_of_the_corpus() -> None:
    where: dict[str, Any] = {"seed": 5, "epoch": 2, "tokens_per_step": 300}
    plans = [
        as_lists(plan(MIXED, mixture=mixture, **where)) for mixture in ([(3_000, 1)], [(1_200, 1.0), (1_800, 1.0)])
    ]
    assert plans[0] == plans[1] == plain_plan(MIXED, **where)


def test_plan_chapter_of_a_mixture_is_the_plain_plan() -> None:
    where = {"seed": 5, "epoch": 2, "tokens_per_step": 300}
    steps = plan(MIXED, mixture=[(500, 2.0), (500, 3.0), (2_000, 1.0)], **where)
    first, second, third = list(range(500)), list(range(500, 1_000)), list(range(1_000, 3_000))
    assert as_lists(steps) == plain_plan(MIXED, **where, members=first * 2 + second * 3 + third)


def test_plan_chapter_is_the_plain_plan_of_its_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In all chapters together, each pair is in the epoch as often as where that is one chapter."""
    mixture = [(500, 2.0), (500, 1.5), (2_000, 1.0)]
    where: dict[str, Any] = {"seed": 5, "epoch": 2, "tokens_per_step": 300}
    whole = np.concatenate(plan(MIXED, mixture=mixture, **where))
    monkeypatch.setattr("transformer.data.chapters.CHAPTER", 900)  # of 4,000: five chapters
    plans = [as_lists(plan(MIXED, mixture=mixture, **where, chapter=chapter)) for chapter in range(5)]
    for chapter, steps in enumerate(plans):
        members = chapter_pairs(mixture, seed=5, epoch=2, chapter=chapter).tolist()
        assert steps == plain_plan(MIXED, **where, members=members, chapter=chapter)
    chained = itertools.chain.from_iterable(itertools.chain.from_iterable(plans))
    assert sorted(chained) == sorted(whole.tolist())


def test_plan_chapter_of_lengths_that_are_mapped_is_that_of_an_array() -> None:
    offsets = tuple(np.concatenate([[0], (MIXED[:, side] - 1).cumsum()]) for side in (0, 1))
    where: dict[str, Any] = {"seed": 5, "epoch": 2, "chapter": 0, "tokens_per_step": 300}
    mapped = plan_chapter(StoredLengths((offsets[0], offsets[1]), ()), mixture=[(3_000, 1.0)], **where)
    assert as_lists(mapped) == plain_plan(MIXED, **where)


@pytest.mark.parametrize(("weight", "low"), [(0.2, 0), (0.75, 0), (1.5, 1), (3.1, 3)])
def test_plan_chapter_takes_other_pairs_for_a_fraction_in_each_epoch(weight: float, low: int) -> None:
    """The weighted corpus lies between two others, whose pairs are what they were."""
    epochs = [copies([(800, 1.0), (2_000, weight), (200, 2.0)], epoch) for epoch in range(40)]
    for found in epochs:
        assert set(found[:800]) == {1}
        assert set(found[2_800:]) == {2}
        assert set(found[800:2_800]) == {low, low + 1}
    extra = np.array([found[800:2_800] - low for found in epochs])  # 80,000 draws of the fraction
    share = weight - low
    deviation = math.sqrt(share * (1 - share))
    assert abs(extra.mean() - share) < 4 * deviation / math.sqrt(80_000)
    assert np.abs(extra.mean(axis=1) - share).max() < 4.5 * deviation / math.sqrt(2_000)  # each epoch
    assert np.abs(extra.mean(axis=0) - share).max() < 5.5 * deviation / math.sqrt(40)  # each pair
    both = (extra[:-1] & extra[1:]).mean()
    assert abs(both - share**2) < 0.01  # one epoch says nothing of the next


def test_plan_chapter_draws_fractions_by_seed_epoch_and_pair_alone() -> None:
    mixture = [(1_000, 0.3), (2_000, 1.6)]
    where = {"seed": 9, "epoch": 7, "tokens_per_step": 400}
    assert as_lists(plan(MIXED, mixture=mixture, **where)) == as_lists(plan(MIXED, mixture=mixture, **where))
    one, other_seed = copies(mixture, epoch=7, seed=9), copies(mixture, epoch=7, seed=10)
    assert (one != other_seed).any()
    apart = copies([(1_000, 1.0), (700, 0.6), (1_300, 0.6)], epoch=7, seed=9)  # cut elsewhere, whole parts other
    assert (one[1_000:] - 1 == apart[1_000:]).all()
    assert len({tuple(copies(mixture, epoch=epoch)) for epoch in range(5)}) == 5


def test_plan_chapter_refuses_a_mixture_that_is_not_the_corpus_or_leaves_nothing() -> None:
    with pytest.raises(ValueError, match=r"\(2999, 1.0\).* for 3000 pairs"):
        copies([(2_999, 1.0)], epoch=0)
    with pytest.raises(InputError, match="no sentence pair is left in epoch 5: raise the weights"):
        copies([(3_000, 1e-9)], epoch=4)


def padded(lengths: np.ndarray, part: list[int]) -> int:
    """Rows x longest of the wider side."""
    return max(len(part) * max(int(lengths[i, side]) for i in part) for side in (0, 1))


def fewest(lengths: np.ndarray, left: list[int], max_tokens: int) -> int:
    """The fewest groups of any kind that fit, by trying all that the first sentence can be in."""
    if not left:
        return 0
    first, rest = left[0], left[1:]
    best = len(left)
    for size in range(len(rest) + 1):
        for others in itertools.combinations(rest, size):
            if padded(lengths, [first, *others]) <= max_tokens:
                best = min(best, 1 + fewest(lengths, [i for i in rest if i not in others], max_tokens))
    return best


def test_split_step_makes_the_fewest_micro_batches_that_any_grouping_allows() -> None:
    state = random.Random(5)
    for _ in range(60):
        lengths = np.array([[state.randint(1, 9), state.randint(1, 9)] for _ in range(state.randint(1, 7))], np.int32)
        max_tokens = state.randint(int(lengths.max()), 30)
        parts = split_step(np.arange(len(lengths)), lengths, max_tokens=max_tokens, micro_batch_multiple=1)
        assert len(parts) == fewest(lengths, list(range(len(lengths))), max_tokens)


def test_split_step_makes_micro_batches_that_hold_the_step_fit_and_come_in_multiples() -> None:
    state = np.random.default_rng(11)
    for _ in range(500):
        lengths = random_lengths(state)
        ids = state.permutation(len(lengths))[: int(state.integers(1, len(lengths) + 1))]
        max_tokens, multiple = int(state.integers(lengths.max(), 600)), int(state.integers(1, 9))
        parts = as_lists(split_step(ids, lengths, max_tokens=max_tokens, micro_batch_multiple=multiple))
        assert sorted(itertools.chain.from_iterable(parts)) == sorted(ids.tolist())
        assert all(padded(lengths, part) <= max_tokens for part in parts if part)
        assert len(parts) % multiple == 0
        filled = sum(1 for part in parts if part)
        assert filled == min(len(parts), len(ids))  # empty ones only where there are too few sentences
        assert all(parts[:filled])  # and they come last


@pytest.mark.parametrize(
    ("max_tokens", "multiple", "expected"),
    [
        (100, 1, [[4, 3, 2, 1, 0]]),
        (12, 1, [[4, 3], [2, 1, 0]]),  # 2 x 6, then 3 x 4
        (12, 4, [[4], [3], [2], [1, 0]]),
        (12, 3, [[4], [3, 2], [1, 0]]),
        (100, 8, [[4], [3], [2], [1], [0], [], [], []]),
    ],
)
def test_split_step_by_hand(max_tokens: int, multiple: int, expected: LISTS) -> None:
    lengths = np.array([[1, 2], [3, 3], [4, 1], [2, 5], [6, 6]], dtype=np.int32)
    assert as_lists(split_step(np.arange(5), lengths, max_tokens=max_tokens, micro_batch_multiple=multiple)) == expected


# Packed micro-batches


def test_split_step_packs_a_sentence_into_the_emptiest_micro_batch() -> None:
    """Written again with plain lists; capacities differ, and either side may be the one that decides."""
    state = np.random.default_rng(13)
    more = 0
    for _ in range(100):
        lengths = state.integers(1, 12, size=(int(state.integers(1, 25)), 2)).astype(np.int32)
        longest = lengths.max(axis=0)
        capacities = (int(longest[0] + state.integers(0, 30)), int(longest[1] + state.integers(0, 30)))
        ids = state.permutation(len(lengths))
        parts = as_lists(
            split_step(ids, lengths, max_tokens=max(capacities), micro_batch_multiple=1, capacities=capacities)
        )
        found = [[tuple(lengths[i].tolist()) for i in part] for part in parts]

        longest_first = sorted((tuple(lengths[i].tolist()) for i in ids), key=lambda p: (max(p), *p), reverse=True)
        expected: list[list[tuple[int, ...]]] = [[]]
        while True:
            full = [Fraction(0)] * len(expected)
            for pair in longest_first:
                emptiest = full.index(min(full))
                expected[emptiest].append(pair)
                totals = [sum(column) for column in zip(*expected[emptiest], strict=True)]
                full[emptiest] = max(Fraction(total, most) for total, most in zip(totals, capacities, strict=True))
            if max(full) <= 1:
                break
            expected = [[] for _ in range(len(expected) + 1)]
        assert found == expected  # sentences of the same lengths may change places
        more += len(parts) > 2
    assert more > 30


def test_split_step_packs_one_long_sentence_without_another_micro_batch() -> None:
    lengths = np.array([[250, 250]] + [[10, 10]] * 900, dtype=np.int32)
    parts = split_step(np.arange(901), lengths, max_tokens=256, micro_batch_multiple=1, capacities=(256, 256))
    assert len(parts) == 37  # the long one, and 25 of the others in each of 36


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_split_step_packs_as_many_micro_batches_as_ranks(ranks: int) -> None:
    """Sentences of one length differ in the length of their translation: no step may need a second round for that."""
    state = np.random.default_rng(ranks)
    source = np.clip(state.lognormal(3.1, 0.6, size=60_000), 1, 200)
    target = np.clip(source * state.lognormal(0.0, 0.3, size=60_000), 1, 200)
    lengths = np.stack((source, target), axis=1).astype(np.int32)
    capacities = packed_capacities(lengths, tokens_per_step=25_000, max_tokens=32_768, micro_batch_multiple=ranks)
    split: dict[str, Any] = {"max_tokens": 32_768, "micro_batch_multiple": ranks, "capacities": capacities}
    steps = plan(lengths, seed=1, epoch=0, tokens_per_step=25_000)
    assert len(steps) > 50
    assert {len(split_step(step, lengths, **split)) for step in steps} == {ranks}


def test_split_step_packs_steps_whole_where_the_shorter_side_is_longer_in_short_sentences() -> None:
    """As with Japanese and English: steps of sentences of about one length are far from the corpus' average."""
    state = np.random.default_rng(3)
    target = np.clip(state.lognormal(3.3, 0.7, size=60_000), 1, 200)
    source = target * np.interp(np.log(target), (2.0, 4.5), (0.8, 0.65)) * state.lognormal(0.0, 0.2, size=len(target))
    lengths = np.stack((np.clip(source, 1, 200), target), axis=1).astype(np.int32)
    budget = {"tokens_per_step": 4096, "max_tokens": 5120, "micro_batch_multiple": 1}
    capacities = packed_capacities(lengths, **budget)
    assert capacities[0] < capacities[1]
    split: dict[str, Any] = {"max_tokens": 5120, "micro_batch_multiple": 1, "capacities": capacities}
    steps = plan(lengths, seed=1, epoch=0, tokens_per_step=4096)
    assert sum(len(split_step(step, lengths, **split)) > 1 for step in steps) <= len(steps) / 100


def test_split_step_packs_micro_batches_that_hold_the_step_fit_are_even_and_come_in_multiples() -> None:
    state = np.random.default_rng(17)
    for _ in range(100):
        lengths = random_lengths(state)
        ids = state.permutation(len(lengths))[: int(state.integers(1, len(lengths) + 1))]
        capacities = tuple(int(lengths[:, side].max() * state.uniform(1, 8)) for side in (0, 1))
        multiple = int(state.integers(1, 9))
        split: dict[str, Any] = {
            "max_tokens": max(capacities),
            "micro_batch_multiple": multiple,
            "capacities": capacities,
        }
        parts = as_lists(split_step(ids, lengths, **split))
        assert parts == as_lists(split_step(ids, lengths, **split))
        assert sorted(itertools.chain.from_iterable(parts)) == sorted(ids.tolist())
        for part in parts:
            assert all(sum(int(lengths[i, side]) for i in part) <= capacities[side] for side in (0, 1))
        assert len(parts) % multiple == 0
        filled = sum(1 for part in parts if part)
        assert filled == min(len(parts), len(ids))
        assert all(parts[:filled])
        least = max(math.ceil(int(lengths[ids, side].sum()) / capacities[side]) for side in (0, 1))
        assert filled >= min(least, len(ids))


@pytest.mark.parametrize(
    ("capacities", "multiple", "expected"),
    [
        ((16, 17), 1, [[4, 3, 2, 1, 0]]),  # exactly full
        ((15, 17), 1, [[4, 1], [3, 2, 0]]),  # 6 + 3, 2 + 4 + 1
        ((16, 16), 1, [[4, 1], [3, 2, 0]]),
        ((10, 11), 1, [[4, 1], [3, 2, 0]]),
        ((16, 17), 4, [[4], [3], [2], [1, 0]]),
        ((16, 17), 7, [[4], [3], [2], [1], [0], [], []]),
    ],
)
def test_split_step_packs_by_hand(capacities: tuple[int, int], multiple: int, expected: LISTS) -> None:
    lengths = np.array([[1, 2], [3, 3], [4, 1], [2, 5], [6, 6]], dtype=np.int32)
    parts = split_step(np.arange(5), lengths, max_tokens=17, micro_batch_multiple=multiple, capacities=capacities)
    assert as_lists(parts) == expected


def test_split_step_measures_a_sentence_by_the_capacity_of_its_own_side() -> None:
    lengths = np.array([[9, 4], [3, 5]], dtype=np.int32)
    split = {"max_tokens": 9, "micro_batch_multiple": 1}
    assert as_lists(split_step(np.arange(2), lengths, **split, capacities=(9, 5))) == [[0], [1]]
    with pytest.raises(InputError, match=r"9 tokens does not fit a micro-batch of 8"):
        split_step(np.arange(2), lengths, **split, capacities=(8, 9))
    with pytest.raises(InputError, match=r"5 tokens does not fit a micro-batch of 4"):
        split_step(np.arange(2), lengths, **split, capacities=(9, 4))


def padding_share(lengths: np.ndarray, tokens_per_step: int, max_tokens: int) -> float:
    """Slots without a token, of all slots of both sides."""
    slots = 0
    for step in plan(lengths, seed=1, epoch=0, tokens_per_step=tokens_per_step):
        for part in split_step(step, lengths, max_tokens=max_tokens, micro_batch_multiple=1):
            slots += len(part) * int(lengths[part].max(axis=0).sum())
    return 1 - int(lengths.sum()) / slots


@needs_corpora
def test_split_step_pads_multi30k_by_less_than_five_percent() -> None:
    pairs = read_pairs(CORPORA / "multi30k/train.en", CORPORA / "multi30k/train.de")
    lengths = np.array([[len(text) // 4 + 2 for text in pair] for pair in pairs], dtype=np.int32)  # near enough
    assert padding_share(lengths, 4096, 4096) < 0.05  # sorted by nothing it would be above 0.4


@pytest.mark.slow
def test_plan_chapter_takes_seconds_for_the_papers_corpus() -> None:
    state = np.random.default_rng(0)
    source = np.exp(state.normal(3.1, 0.6, 4_500_000))
    both = np.stack([source, source * np.exp(state.normal(0, 0.2, len(source)))], axis=1)
    lengths = both.clip(1, 256).astype(np.int32) + 1
    began = time.process_time()
    plan(lengths, seed=1, epoch=0, tokens_per_step=25_000)
    assert time.process_time() - began < 5


def test_plan_chapter_needs_few_bytes_a_pair() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, size=(1_000_000, 2)).astype(np.int32)
    tracemalloc.start()
    try:
        plan(lengths, seed=1, epoch=0, tokens_per_step=25_000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 30 * len(lengths)  # 24, and pools of some 80,000 pairs


@pytest.mark.parametrize("multiple", [1, 2])
def test_split_step_cuts_once_more_what_does_not_fit_the_capacities_of_another_epoch(multiple: int) -> None:
    """Capacities of an epoch with twice as much target as source, steps of one where it is the other way round."""
    first = np.tile(np.array([[5, 10]], dtype=np.int32), (400, 1))
    later = first[:, ::-1].copy()
    split = {"max_tokens": 600, "micro_batch_multiple": multiple}
    capacities = packed_capacities(first, tokens_per_step=1_000, **split)
    assert capacities == (384, 512)  # 625 / 2 and a sentence, 1,000 / 2 and a sentence, rounded up
    for lengths, expected in ((first, 2), (later, 4 if multiple == 2 else 3)):
        for step in plan(lengths, seed=1, epoch=0, tokens_per_step=1_000):
            parts = split_step(step, lengths, **split, capacities=capacities)
            assert len(parts) == expected
            assert sorted(np.concatenate(parts).tolist()) == sorted(step.tolist())
            assert all((lengths[part].sum(axis=0) <= capacities).all() for part in parts)


@pytest.mark.parametrize(
    ("lengths", "slots"),
    [([], (128, 128)), ([(1, 128)], (128, 128)), ([(64, 100), (64, 29)], (128, 256)), ([(256, 257)], (256, 384))],
)
def test_slots_for_rounds_up_to_whole_blocks_alone(lengths: list[tuple[int, int]], slots: tuple[int, int]) -> None:
    assert slots_for(np.array(lengths, dtype=np.int32).reshape(-1, 2)) == slots
