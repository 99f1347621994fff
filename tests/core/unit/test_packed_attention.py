"""Attention over packed sentences: the ranges that say who sees whom, and the plain form."""

import numpy as np
import pytest
import torch
from torch import Tensor

from transformer.config.settings import AttentionKernel
from transformer.data.packing import pack
from transformer.kernels.packed_attention import plain_attention
from transformer.kernels.ranges import Ranges
from transformer.kernels.triton_loss import rows_that_fit, wide_product
from transformer.layout import Packed, Padded
from transformer.model.attention import attention_weights

PAIRS = [(3, 2), (1, 4), (2, 1)]


def sides(lengths: list[tuple[int, int]], capacities: tuple[int, int]) -> tuple[Packed, Packed]:
    return pack(np.array(lengths, dtype=np.int32), capacities, kernel=AttentionKernel.triton)


def pairs(ranges: Ranges) -> list[tuple[int, int]]:
    return list(zip(ranges.first.tolist(), ranges.end.tolist(), strict=True))


def visible(ranges: Ranges, others: int) -> Tensor:
    slots = torch.arange(others)
    return (slots >= ranges.first[:, None]) & (slots < ranges.end[:, None])


def test_ranges_are_those_of_the_sentence() -> None:
    """Sentences of 3, 1 and 2 source tokens, 2, 4 and 1 target tokens, and empty slots behind them."""
    source, target = sides(PAIRS, (8, 8))
    assert pairs(source.ranges_in(source)) == [(0, 3)] * 3 + [(3, 4)] + [(4, 6)] * 2 + [(6, 6)] * 2
    assert pairs(target.ranges_in(source)) == [(0, 3)] * 2 + [(3, 4)] * 4 + [(4, 6)] + [(6, 6)]
    assert pairs(source.ranges_in(target)) == [(0, 2)] * 3 + [(2, 6)] + [(6, 7)] * 2 + [(7, 7)] * 2
    causal = target.ranges_in(target).up_to_itself()
    assert pairs(causal) == [(0, 1), (0, 2), (2, 3), (2, 4), (2, 5), (2, 6), (6, 7), (7, 7)]


@pytest.mark.parametrize("count", [254, 255, 256, 257])
def test_ranges_know_empty_slots_whatever_the_number_of_sentences(count: int) -> None:
    """The list of offsets may end with the last sentence."""
    layout, _ = sides([(1, 1)] * count, (300, 300))
    assert pairs(layout.ranges_in(layout)) == [(i, i + 1) for i in range(count)] + [(count, count)] * (300 - count)


@pytest.mark.parametrize("role", ["encoder", "causal", "cross"])
def test_ranges_of_keys_are_those_of_queries_turned_round(role: str) -> None:
    source, target = sides([(5, 9), (1, 1), (17, 12), (2, 30)], (32, 64))
    queries, keys = {"encoder": (source, source), "causal": (target, target), "cross": (target, source)}[role]
    of_queries, of_keys = queries.ranges_in(keys), keys.ranges_in(queries)
    if role == "causal":
        of_queries, of_keys = of_queries.up_to_itself(), of_keys.from_itself()
    seen = visible(of_queries, len(keys.position_ids))
    assert torch.equal(seen, visible(of_keys, len(queries.position_ids)).T)
    assert seen.any()


def inputs(n_queries: int, n_keys: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = ((n_queries, 2, 16), (n_keys, 2, 16), (n_keys, 2, 16))
    return [torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("causal", [False, True])
def test_plain_attention_is_equation_1_on_each_sentence(causal: bool) -> None:
    source, target = sides([(3, 3), (1, 1), (9, 9)], (16, 16))
    keys = target.ranges_in(source)
    q, k, v = inputs(16, 16)
    out = plain_attention(q, k, v, keys=keys.up_to_itself() if causal else keys, scale=0.3, kept=None)
    for start, end in ((0, 3), (3, 4), (4, 13)):
        row = Padded.full_rows(1, end - start, q.device)
        weights = attention_weights(
            q[None, start:end],
            k[None, start:end],
            queries=row,
            keys=row,
            causal=causal,
            scale=0.3,
            score_vector=None,
        )
        wanted = torch.einsum("bhts,shw->thw", weights, v[start:end])
        torch.testing.assert_close(out[start:end], wanted, rtol=1e-12, atol=1e-12)
    assert not out[13:].any()


# What the loss in Triton decides on the host


@pytest.mark.parametrize(
    ("free", "most", "rows"),
    [
        (140 * 2**30, 25_088, 25_088),  # an H200: all rows of a base step
        (140 * 2**30, 25_000, 25_088),  # rounded up, as packed batches are
        (20 * 2**30, 32_768, 32_768),
        (8 * 2**30, 32_768, 14_464),  # 1 GiB of 74,000 bytes each
        (0, 32_768, 128),
    ],
)
def test_rows_that_fit_takes_an_eighth_of_what_is_free(free: int, most: int, rows: int) -> None:
    assert rows_that_fit(free, vocab_size=37_000, itemsize=2, most=most) == rows


def test_wide_product_is_wide_where_torch_has_no_such_product() -> None:
    a, b = (torch.randn(5, 5, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (1, 2))
    product = wide_product(a, b, torch.float32)
    assert product.dtype is torch.float32
    torch.testing.assert_close(product, a.float() @ b.float(), rtol=1e-2, atol=1e-2)
