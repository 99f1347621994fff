"""The padded layout: literals for what is visible, where a slot stands, and what a selection keeps."""

import pytest
import torch

from transformer.layout import BOS, EOS, PAD, UNK, Padded


def test_special_ids_are_the_published_ones() -> None:
    assert (PAD, UNK, BOS, EOS) == (0, 1, 2, 3)


def test_visible_is_the_real_prefix_and_an_empty_slot_sees_itself() -> None:
    layout = Padded.of([3, 0, 1, 2], 3)
    assert layout.visible().dtype == torch.bool
    assert layout.visible().tolist() == [
        [True, True, True],
        [True, False, False],
        [True, False, False],
        [True, True, False],
    ]


def test_positions_count_from_zero() -> None:
    assert Padded.of([2, 4], 4).positions().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("lengths", "width", "full"), [([3, 3], 3, True), ([3, 2], 3, False), ([2, 2], 3, False), ([0], 1, False)]
)
def test_full_means_no_padding_at_all(lengths: list[int], width: int, full: bool) -> None:
    layout = Padded.of(lengths, width)
    assert layout.full is full
    assert layout.lengths.tolist() == lengths
    assert layout.lengths.dtype == torch.int64
    assert layout.width == width


def test_solid_is_full_and_sees_everything() -> None:
    layout = Padded.solid(2, 3, torch.device("cpu"))
    assert layout.full
    assert layout.lengths.tolist() == [3, 3]
    assert layout.visible().tolist() == [[True] * 3] * 2


def test_select_takes_rows_in_the_order_given() -> None:
    layout = Padded.of([5, 0, 2, 4], 5).select(torch.tensor([2, 0, 2]))
    assert layout.lengths.tolist() == [2, 5, 2]
    assert layout.width == 5
    assert not layout.full
    assert layout.visible().sum(1).tolist() == [2, 5, 2]


def test_select_of_a_full_layout_stays_full() -> None:
    layout = Padded.of([4, 4, 4], 4).select(torch.tensor([1]))
    assert layout.full
    assert layout.lengths.tolist() == [4]


def test_to_keeps_everything() -> None:
    layout = Padded.of([1, 2], 2).to(torch.device("cpu"))
    assert (layout.lengths.tolist(), layout.width, layout.full) == ([1, 2], 2, False)
