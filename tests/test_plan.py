"""The data order: each sentence once, no budget passed, steps that depend on nothing but data, seed and epoch."""

import itertools
import math
import os
import random
import time
from pathlib import Path

import numpy as np
import pytest

from transformer.data.corpus import read_pairs
from transformer.data.plan import plan_epoch, split_step
from transformer.errors import InputError

LISTS = list[list[int]]


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


def test_every_sentence_once_within_the_budget_for_random_corpora() -> None:
    state = np.random.default_rng(7)
    for trial in range(300):
        lengths = random_lengths(state)
        budget = int(state.integers(lengths.max(), lengths.max() * 20 + 2))
        steps = plan_epoch(lengths, seed=trial, epoch=0, tokens_per_step=budget)
        assert sorted(itertools.chain.from_iterable(as_lists(steps))) == list(range(len(lengths)))
        for step in steps:
            assert len(step) > 0
            assert sum(int(lengths[i, 0]) for i in step) <= budget
            assert sum(int(lengths[i, 1]) for i in step) <= budget


def test_a_tiny_plan_is_what_it_was_on_the_day_it_was_written() -> None:
    """A change here breaks every resume in mid-epoch: PLAN_VERSION must then rise."""
    lengths = np.array([[3, 4], [5, 2], [9, 9], [1, 1], [4, 4], [2, 7], [6, 6], [8, 3]], dtype=np.int32)
    plans = [as_lists(plan_epoch(lengths, seed=1, epoch=epoch, tokens_per_step=12)) for epoch in (0, 1)]
    # one pool, sorted to 3 0 4 | 1 6 | 5 7 | 2 and cut there (worked out by hand); the order of steps is the seed's
    assert plans == [[[2], [1, 6], [3, 0, 4], [5, 7]], [[3, 0, 4], [1, 6], [2], [5, 7]]]


def test_another_epoch_or_seed_is_another_order_and_the_same_is_the_same() -> None:
    lengths = np.random.default_rng(0).integers(1, 40, size=(500, 2)).astype(np.int32)
    plans = {
        (seed, epoch): as_lists(plan_epoch(lengths, seed=seed, epoch=epoch, tokens_per_step=300))
        for seed in (1, 2)
        for epoch in (0, 1)
    }
    assert len({str(plan) for plan in plans.values()}) == 4
    assert as_lists(plan_epoch(lengths, seed=2, epoch=1, tokens_per_step=300)) == plans[2, 1]


def test_steps_are_full_and_shuffled() -> None:
    lengths = np.random.default_rng(0).integers(1, 40, size=(20_000, 2)).astype(np.int32)
    steps = plan_epoch(lengths, seed=3, epoch=0, tokens_per_step=500)
    fill = [int(lengths[step].sum(axis=0).max()) for step in steps]
    assert sum(size >= 460 for size in fill) >= len(fill) - 1  # all but the last one that was cut
    spread = [int(np.ptp(lengths[step].max(axis=1))) for step in steps]
    assert max(spread) < 20  # also where a step spans two pools: of 1 to 40
    means = np.array([lengths[step].max(axis=1).mean() for step in steps])
    assert abs(np.corrcoef(np.arange(len(means)), means)[0, 1]) < 0.1
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.1


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(InputError, match=r"13 tokens does not fit train\.tokens_per_step=12"):
        plan_epoch(np.array([[1, 1], [2, 13]], dtype=np.int32), seed=1, epoch=0, tokens_per_step=12)
    with pytest.raises(InputError, match="no sentence pair"):
        plan_epoch(np.zeros((0, 2), dtype=np.int32), seed=1, epoch=0, tokens_per_step=12)
    with pytest.raises(InputError, match=r"13 tokens does not fit train\.max_tokens=12"):
        split_step(np.array([0]), np.array([[13, 1]], dtype=np.int32), max_tokens=12, multiple=1)


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


def test_micro_batches_are_the_fewest_that_any_grouping_allows() -> None:
    state = random.Random(5)
    for _ in range(60):
        lengths = np.array([[state.randint(1, 9), state.randint(1, 9)] for _ in range(state.randint(1, 7))], np.int32)
        max_tokens = state.randint(int(lengths.max()), 30)
        parts = split_step(np.arange(len(lengths)), lengths, max_tokens=max_tokens, multiple=1)
        assert len(parts) == fewest(lengths, list(range(len(lengths))), max_tokens)


def test_micro_batches_hold_the_step_fit_and_come_in_multiples() -> None:
    state = np.random.default_rng(11)
    for _ in range(500):
        lengths = random_lengths(state)
        ids = state.permutation(len(lengths))[: int(state.integers(1, len(lengths) + 1))]
        max_tokens, multiple = int(state.integers(lengths.max(), 600)), int(state.integers(1, 9))
        parts = as_lists(split_step(ids, lengths, max_tokens=max_tokens, multiple=multiple))
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
def test_micro_batches_of_a_step_by_hand(max_tokens: int, multiple: int, expected: LISTS) -> None:
    lengths = np.array([[1, 2], [3, 3], [4, 1], [2, 5], [6, 6]], dtype=np.int32)
    assert as_lists(split_step(np.arange(5), lengths, max_tokens=max_tokens, multiple=multiple)) == expected


# Packed micro-batches


def fewest_in_order(lengths: list[list[int]], capacities: tuple[int, int]) -> int:
    """The fewest runs that cut this list, each within both capacities: by trying every last cut."""
    best = [0]
    for end in range(1, len(lengths) + 1):
        starts = [
            start
            for start in range(end)
            if all(sum(pair[side] for pair in lengths[start:end]) <= capacities[side] for side in (0, 1))
        ]
        best.append(1 + min(best[start] for start in starts))
    return best[-1]


def test_packed_micro_batches_are_the_fewest_runs_of_the_step_sorted_by_length() -> None:
    """Capacities differ, and either may be the one that decides; a sentence may need the larger of them whole."""
    state = np.random.default_rng(13)
    for _ in range(100):
        lengths = state.integers(1, 12, size=(int(state.integers(1, 25)), 2)).astype(np.int32)
        capacities = tuple(int(lengths[:, side].max() + state.integers(0, 30)) for side in (0, 1))
        ids = state.permutation(len(lengths))
        parts = as_lists(split_step(ids, lengths, max_tokens=max(capacities), multiple=1, capacities=capacities))
        order = [i for part in parts for i in part]
        longest = [int(lengths[i].max()) for i in order]
        assert longest == sorted(longest, reverse=True)
        assert len(parts) == fewest_in_order(lengths[order].tolist(), capacities)


def test_packed_micro_batches_hold_the_step_fit_are_even_and_come_in_multiples() -> None:
    state = np.random.default_rng(17)
    for _ in range(100):
        lengths = random_lengths(state)
        ids = state.permutation(len(lengths))[: int(state.integers(1, len(lengths) + 1))]
        capacities = tuple(int(lengths[:, side].max() * state.uniform(1, 8)) for side in (0, 1))
        multiple = int(state.integers(1, 9))
        split = {"max_tokens": max(capacities), "multiple": multiple, "capacities": capacities}
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
        ((15, 17), 1, [[4, 3], [2, 1, 0]]),  # 6 + 2, 4 + 3 + 1
        ((16, 16), 1, [[4, 3], [2, 1, 0]]),
        ((10, 11), 1, [[4, 3], [2, 1, 0]]),
        ((16, 17), 4, [[4], [3, 2], [1], [0]]),
        ((16, 17), 7, [[4], [3], [2], [1], [0], [], []]),
    ],
)
def test_packed_micro_batches_of_a_step_by_hand(capacities: tuple[int, int], multiple: int, expected: LISTS) -> None:
    lengths = np.array([[1, 2], [3, 3], [4, 1], [2, 5], [6, 6]], dtype=np.int32)
    parts = split_step(np.arange(5), lengths, max_tokens=17, multiple=multiple, capacities=capacities)
    assert as_lists(parts) == expected


def test_a_sentence_is_measured_by_the_capacity_of_its_own_side() -> None:
    lengths = np.array([[9, 4], [3, 5]], dtype=np.int32)
    split = {"max_tokens": 9, "multiple": 1}
    assert as_lists(split_step(np.arange(2), lengths, **split, capacities=(9, 5))) == [[0], [1]]
    with pytest.raises(InputError, match=r"9 tokens does not fit train\.max_tokens=9"):
        split_step(np.arange(2), lengths, **split, capacities=(8, 9))
    with pytest.raises(InputError, match=r"5 tokens does not fit train\.max_tokens=9"):
        split_step(np.arange(2), lengths, **split, capacities=(9, 4))


def padding_share(lengths: np.ndarray, tokens_per_step: int, max_tokens: int) -> float:
    """Slots without a token, of all slots of both sides."""
    slots = 0
    for step in plan_epoch(lengths, seed=1, epoch=0, tokens_per_step=tokens_per_step):
        for part in split_step(step, lengths, max_tokens=max_tokens, multiple=1):
            slots += len(part) * int(lengths[part].max(axis=0).sum())
    return 1 - int(lengths.sum()) / slots


def words(root: str, source: str, target: str) -> np.ndarray:
    """Lengths in characters over 4: near enough to pieces, and nobody's tokenizer."""
    pairs = read_pairs(Path(root) / source, Path(root) / target)
    return np.array([[len(text) // 4 + 2 for text in pair] for pair in pairs], dtype=np.int32)


@pytest.mark.skipif("TRANSFORMER_DATA" not in os.environ, reason="TRANSFORMER_DATA is not set")
def test_padding_on_multi30k_is_below_five_percent() -> None:
    lengths = words(os.environ["TRANSFORMER_DATA"], "multi30k/train.en", "multi30k/train.de")
    assert padding_share(lengths, 4096, 4096) < 0.05  # sorted by nothing it would be above 0.4


@pytest.mark.slow
def test_an_epoch_of_the_papers_corpus_is_planned_in_seconds() -> None:
    state = np.random.default_rng(0)
    source = np.exp(state.normal(3.1, 0.6, 4_500_000))
    both = np.stack([source, source * np.exp(state.normal(0, 0.2, len(source)))], axis=1)
    lengths = both.clip(1, 256).astype(np.int32) + 1
    began = time.process_time()
    plan_epoch(lengths, seed=1, epoch=0, tokens_per_step=25_000)
    assert time.process_time() - began < 10
