"""Derived seeds: 32 bits, pinned, distinct, and sensitive to order.

The literals come from coreutils (`printf 1,2 | b2sum -l 64`), the two little-endian halves folded by hand.
"""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from transformer.seeding import seed_for


@pytest.mark.parametrize(
    ("parts", "seed"),
    [
        ((1,), 1970620009),
        ((1, 2), 818504082),
        ((2, 1), 3025619454),
        ((7, 3, 11, 2), 3639886307),
        ((12, 3), 2590809396),
        ((1, 23), 254230777),
    ],
)
def test_seed_for_gives_pinned_values(parts: tuple[int, ...], seed: int) -> None:
    assert seed_for(*parts) == seed


def test_seed_for_depends_on_order_grouping_and_number_of_parts() -> None:
    assert len({seed_for(1, 2), seed_for(2, 1), seed_for(12), seed_for(1, 2, 0), seed_for(0, 1, 2), seed_for(3)}) == 6
    assert seed_for(1, 23) != seed_for(12, 3)


def test_seed_for_is_distinct_and_32_bit_over_a_grid() -> None:
    grid = list(itertools.product(range(4), range(5), range(40), range(4)))
    seeds = [seed_for(*parts) for parts in grid]
    assert len(set(seeds)) == len(grid)
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert max(seeds) > 2**31  # the high bits are used too


def test_seed_for_uses_every_bit_evenly() -> None:
    seeds = np.array([seed_for(1, 0, step, 0) for step in range(4_000)], dtype=np.uint64)
    share = [float(((seeds >> np.uint64(bit)) & np.uint64(1)).mean()) for bit in range(32)]
    assert all(0.46 < s < 0.54 for s in share)  # five standard deviations


def test_seed_for_neighbours_gives_unrelated_numbers() -> None:
    draws = []
    for micro_batch in range(4):
        torch.manual_seed(seed_for(1, 0, 0, micro_batch))
        draws.append(torch.rand(2_000) - 0.5)
    correlation = torch.corrcoef(torch.stack(draws)) - torch.eye(4)
    assert correlation.abs().max() < 0.12


def test_seed_for_takes_numpy_integers() -> None:
    numbers: list[Any] = [np.int64(7), np.int32(3), 11, np.uint8(2)]
    assert seed_for(*numbers) == seed_for(7, 3, 11, 2)


def test_seed_for_takes_large_and_negative_parts() -> None:
    assert len({seed_for(2**70), seed_for(2**70 + 1), seed_for(-1), seed_for(1)}) == 4
