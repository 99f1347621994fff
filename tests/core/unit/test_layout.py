"""The layouts: literals for what is visible, where a slot stands and what a selection keeps; packing by plain loops."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from transformer.config.settings import AttentionKernel
from transformer.data.packing import pack
from transformer.layout import Groups, Packed, Padded
from transformer.vocabulary import BOS, EOS, PAD, UNK


def test_vocabulary_has_the_published_special_ids() -> None:
    assert (PAD, UNK, BOS, EOS) == (0, 1, 2, 3)


def test_padded_visible_is_the_real_prefix_and_an_empty_slot_sees_itself() -> None:
    layout = Padded.of([3, 0, 1, 2], 3)
    assert layout.visible().dtype == torch.bool
    assert layout.visible().tolist() == [
        [True, True, True],
        [True, False, False],
        [True, False, False],
        [True, True, False],
    ]


def test_padded_positions_count_from_zero() -> None:
    assert Padded.of([2, 4], 4).positions().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("lengths", "width", "full"), [([3, 3], 3, True), ([3, 2], 3, False), ([2, 2], 3, False), ([0], 1, False)]
)
def test_padded_is_full_without_any_padding(lengths: list[int], width: int, full: bool) -> None:
    layout = Padded.of(lengths, width)
    assert layout.full is full
    assert layout.lengths.tolist() == lengths
    assert layout.lengths.dtype == torch.int64
    assert layout.width == width


def test_padded_full_rows_are_full_and_see_everything() -> None:
    layout = Padded.full_rows(2, 3, torch.device("cpu"))
    assert layout.full
    assert layout.lengths.tolist() == [3, 3]
    assert layout.visible().tolist() == [[True] * 3] * 2


def test_padded_select_takes_rows_in_the_order_given() -> None:
    layout = Padded.of([5, 0, 2, 4], 5).select(torch.tensor([2, 0, 2]))
    assert layout.lengths.tolist() == [2, 5, 2]
    assert layout.width == 5
    assert not layout.full
    assert layout.visible().sum(1).tolist() == [2, 5, 2]


def test_padded_select_of_a_full_layout_stays_full() -> None:
    layout = Padded.of([4, 4, 4], 4).select(torch.tensor([1]))
    assert layout.full
    assert layout.lengths.tolist() == [4]


def test_padded_to_keeps_everything() -> None:
    layout = Padded.of([1, 2], 2).to(torch.device("cpu"))
    assert (layout.lengths.tolist(), layout.width, layout.full) == ([1, 2], 2, False)


# Packed


def groups_of(layout: Packed) -> Groups:
    assert layout.groups is not None
    return layout.groups


def packed(lengths: list[tuple[int, int]], capacities: tuple[int, int]) -> tuple[Packed, Packed]:
    return pack(np.array(lengths, dtype=np.int32), capacities)


@pytest.fixture
def exact_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups as small as their sentences, not rounded up."""
    monkeypatch.setattr("transformer.data.packing._ALIKE", 1)
    monkeypatch.setattr("transformer.data.packing._ROWS", 1)
    monkeypatch.setattr("transformer.data.packing._WIDTH", 1)


def test_packed_groups_are_rounded_up_with_empty_rows() -> None:
    """To 16 rows and a width of 4, so that few shapes ever come."""
    source, target = packed([(2, 5)] * 17, (40, 85))
    for layout, length, width in ((source, 2, 4), (target, 5, 8)):
        (group,) = groups_of(layout).layouts
        assert (group.lengths.tolist(), group.width, group.full) == ([length] * 17 + [0] * 15, width, False)
        (rows,) = groups_of(layout).pad(torch.arange(len(layout.position_ids)))
        assert rows.shape == (32, width)
        expected = [[length * row + t for t in range(length)] for row in reversed(range(17))]
        assert rows[:17, :length].tolist() == expected
        assert rows[17:].eq(0).all()
        there_and_back = groups_of(layout).unpad([rows]).tolist()
        assert there_and_back == [*range(17 * length), *[0] * (len(layout.position_ids) - 17 * length)]


def test_sentences_of_almost_the_same_length_share_a_group() -> None:
    """Of 9 to 16 tokens, though a fifth of their padded slots is padding."""
    pairs = [(length, length) for length in range(9, 17) for _ in range(100)]
    (group,) = groups_of(packed(pairs, (10_000, 10_000))[0]).layouts
    assert sorted(group.lengths.tolist()) == [length for length, _ in pairs]


@pytest.mark.usefixtures("exact_sides")
def test_packed_sentences_by_hand() -> None:
    """One group, longest first: the second, the third, the first."""
    source, target = packed([(2, 1), (3, 3), (2, 2)], (9, 6))
    assert source.offsets.tolist() == [0, 2, 5] + [7] * 253
    assert target.offsets.tolist() == [0, 1, 4] + [6] * 253
    assert (source.offsets.dtype, source.position_ids.dtype) == (torch.int32, torch.int64)
    assert source.positions().tolist() == [0, 1, 0, 1, 2, 0, 1, 0, 0]
    assert target.positions().tolist() == [0, 0, 1, 2, 0, 1]
    assert source.is_real().tolist() == [True] * 7 + [False] * 2
    assert target.is_real().tolist() == [True] * 6
    assert (source.longest, target.longest) == (128, 128)
    (of_source,), (of_target,) = groups_of(source).layouts, groups_of(target).layouts
    assert (of_source.lengths.tolist(), of_source.width, of_source.full) == ([3, 2, 2], 3, False)
    assert (of_target.lengths.tolist(), of_target.width, of_target.full) == ([3, 2, 1], 3, False)
    assert [part.tolist() for part in groups_of(source).pad(torch.arange(9) + 10)] == [
        [[12, 13, 14], [15, 16, 10], [10, 11, 10]]
    ]
    rows = torch.tensor([[1, 2, 3], [4, 5, -1], [6, -1, -1]])
    assert groups_of(target).unpad([rows]).tolist() == [6, 1, 2, 3, 4, 5]
    rows = torch.tensor([[1, 2, 3], [4, 5, -1], [6, 7, -1]])
    assert groups_of(source).unpad([rows]).tolist() == [6, 7, 1, 2, 3, 4, 5, 0, 0]


def test_packed_offsets_are_lengthened_by_multiples() -> None:
    for count, length in ((255, 256), (256, 512), (511, 512), (512, 768)):
        source, _ = packed([(1, 1)] * count, (1000, 1000))
        assert source.offsets.tolist() == [*range(count), *[count] * (length - count)]


def random_pairs(state: np.random.Generator) -> list[tuple[int, int]]:
    spread = [(1, 2), (1, 12), (1, 80), (30, 34)][int(state.integers(4))]
    lengths = state.integers(*spread, size=(int(state.integers(1, 120)), 2))
    lengths[state.random(len(lengths)) < 0.05] = (90, 70)
    return [(int(source), int(target)) for source, target in lengths]


@pytest.mark.usefixtures("exact_sides")
def test_packed_groups_hold_every_sentence_once_in_the_same_row_of_both_sides_and_waste_little() -> None:
    state = np.random.default_rng(3)
    several = 0
    for _ in range(80):
        lengths = random_pairs(state)
        totals = [sum(pair[side] for pair in lengths) for side in (0, 1)]
        layouts = packed(lengths, (totals[0] + int(state.integers(3)), totals[1] + int(state.integers(3))))
        rows: list[list[tuple[int, int]]] = []  # of each side: the sentence and the length of every row
        for side, layout in enumerate(layouts):
            sentence = [i for i, pair in enumerate(lengths) for _ in range(pair[side])]
            starts = list(itertools.accumulate((pair[side] for pair in lengths), initial=0))
            slots = groups_of(layout).pad(torch.arange(len(layout.position_ids)))
            rows.append([])
            for part, group in zip(slots, groups_of(layout).layouts, strict=True):
                assert part.shape == (len(group.lengths), group.width)
                assert group.width == max(group.lengths.tolist())
                assert group.full == (set(group.lengths.tolist()) == {group.width})
                for row, length in zip(part.tolist(), group.lengths.tolist(), strict=True):
                    first = sentence[row[0]]
                    assert row[:length] == list(range(starts[first], starts[first] + length))
                    rows[-1].append((first, length))
            assert layout.positions().tolist() == [t for p in lengths for t in range(p[side])] + [0] * (
                len(layout.position_ids) - totals[side]
            )
        assert [i for i, _ in rows[0]] == [i for i, _ in rows[1]]
        assert sorted(i for i, _ in rows[0]) == list(range(len(lengths)))
        assert all((rows[0][r][1], rows[1][r][1]) == lengths[i] for r, (i, _) in enumerate(rows[0]))
        start, sizes = 0, [len(group.lengths) for group in groups_of(layouts[0]).layouts]
        order = [i for i, _ in rows[0]]
        for number, size in enumerate(sizes):
            widths = [groups_of(layout).layouts[number].width for layout in layouts]
            tokens = sum(sum(lengths[i]) for i in order[start : start + size])
            assert size * sum(widths) <= max(1.1 * tokens, tokens + 256)
            start += size
            if start < len(order):  # the next sentence would have been too much
                tokens += sum(lengths[order[start]])
                widths = [max(width, length) for width, length in zip(widths, lengths[order[start]], strict=True)]
                assert (size + 1) * sum(widths) > max(1.1 * tokens, tokens + 256)
        several += len(sizes) > 1
    assert several > 20


@pytest.mark.parametrize(("capacities", "named"), [((6, 9), r"\[7, 6\] tokens .* \[6, 9\]"), ((9, 5), r"\[9, 5\]")])
def test_packed_refuses_what_does_not_fit(capacities: tuple[int, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        packed([(2, 1), (3, 3), (2, 2)], capacities)


def cut(x: Tensor, layout: Packed) -> list[Tensor]:
    """What `pad` does, by plain indexing, one sentence at a time; padding is zero here."""
    out = []
    for part, group in zip(groups_of(layout).pad(torch.arange(len(x))), groups_of(layout).layouts, strict=True):
        rows = []
        for first, length in zip(part[:, 0].tolist(), group.lengths.tolist(), strict=True):
            rows.append(F.pad(x[first : first + length], (0, 0, 0, group.width - length)))
        out.append(torch.stack(rows))
    return out


PAIRS = [(2, 1), (5, 3), (2, 2), (1, 7), (4, 4)]


@pytest.mark.parametrize("capacities", [(14, 17), (19, 20)], ids=["full", "empty slots"])
@pytest.mark.parametrize("small", [256, 0], ids=["one group", "many groups"])
@pytest.mark.parametrize("side", [0, 1])
def test_packed_groups_pad_and_unpad_have_the_gradients_of_plain_indexing(
    capacities: tuple[int, int], small: int, side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding holds what nobody must read, and no gradient comes from it, whatever it is asked for."""
    monkeypatch.setattr("transformer.data.packing._ALIKE", 1)
    monkeypatch.setattr("transformer.data.packing._SMALL", small)
    layout = packed(PAIRS, capacities)[side]
    assert (len(groups_of(layout).layouts) > 1) == (small == 0)
    draws = torch.Generator().manual_seed(side)
    x = torch.randn(capacities[side], 3, generator=draws, dtype=torch.float64).requires_grad_()
    parts, plain = groups_of(layout).pad(x), cut(x, layout)
    reals = [(torch.arange(g.width) < g.lengths[:, None]).unsqueeze(-1) for g in groups_of(layout).layouts]
    for part, expected, is_real in zip(parts, plain, reals, strict=True):
        torch.testing.assert_close(torch.where(is_real, part, 0.0), expected, rtol=0, atol=0)
    upstream = [torch.randn(part.shape, generator=draws, dtype=torch.float64) for part in parts]
    (got,) = torch.autograd.grad(list(parts), x, upstream)
    (expected,) = torch.autograd.grad(plain, x, upstream)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)

    leaves = [part.detach().requires_grad_() for part in parts]
    assert torch.autograd.gradcheck(lambda *leaves: groups_of(layout).unpad(leaves), leaves)
    poisoned = torch.full_like(x, torch.nan)  # the gradient at an empty slot is not read
    poisoned[: len(groups_of(layout).scatter_index)] = 1.0
    for gradient, is_real in zip(
        torch.autograd.grad(groups_of(layout).unpad(leaves), leaves, poisoned), reals, strict=True
    ):
        torch.testing.assert_close(gradient, is_real.expand_as(gradient).double(), rtol=0, atol=0)
    assert torch.autograd.gradcheck(
        lambda x: groups_of(layout).unpad([part.sin() for part in groups_of(layout).pad(x)]), x
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool])
def test_packed_groups_pad_and_unpad_is_the_same_in_any_type(dtype: torch.dtype) -> None:
    layout, _ = packed(PAIRS, (19, 20))
    x = (torch.arange(19 * 2) % 5).view(19, 2, 1).to(dtype)
    back = groups_of(layout).unpad(groups_of(layout).pad(x))
    assert back.dtype == dtype
    assert torch.equal(back[:14], x[:14])
    assert not back[14:].any()


def test_packed_moves_as_a_whole() -> None:
    layout, _ = packed(PAIRS, (19, 20))
    moved = layout.to(torch.device("meta"))
    groups = groups_of(moved)
    tensors = [moved.offsets, moved.position_ids, groups.gather_index, groups.pad_index, groups.scatter_index]
    assert {tensor.device.type for tensor in [*tensors, *(one.lengths for one in groups.layouts)]} == {"meta"}
    assert (moved.longest, groups.slots) == (128, 19)
    same = groups_of(layout.to(torch.device("cpu")))
    assert torch.equal(same.gather_index, groups_of(layout).gather_index)
    assert torch.equal(same.pad_index, groups_of(layout).pad_index)
    assert torch.equal(same.scatter_index, groups_of(layout).scatter_index)


def test_pack_without_groups_is_what_a_kernel_reads() -> None:
    """The same packed side, and nothing about padded rows; `longest` is rounded up to 128."""
    lengths = np.array([(2, 129), (128, 1)], dtype=np.int32)
    source, target = pack(lengths, (140, 140), kernel=AttentionKernel.varlen)
    in_groups, _ = pack(lengths, (140, 140))
    assert source.groups is None
    assert (source.longest, target.longest) == (128, 256)
    assert torch.equal(source.offsets, in_groups.offsets)
    assert torch.equal(source.position_ids, in_groups.position_ids)
    assert source.to(torch.device("meta")).groups is None


def test_packed_groups_pad_heads_in_the_order_of_batched_products() -> None:
    """`pad_heads` is `pad` with the heads before the positions, `unpad_heads` the way back; gradients too."""
    sides = packed([(3, 9), (18, 4), (1, 1), (7, 12)], (32, 32))
    for side in sides:
        groups = groups_of(side)
        x = torch.randn(32, 3, 5, dtype=torch.float64, requires_grad=True)
        is_real = side.is_real()[:, None, None]

        plain, by_head = groups.pad(x), groups.pad_heads(x)
        for part, other, layout in zip(by_head, plain, groups.layouts, strict=True):
            assert part.is_contiguous()
            reals = torch.arange(layout.width) < layout.lengths[:, None]  # (b, t)
            assert torch.equal(part.transpose(1, 2)[reals], other[reals])

        there_and_back = groups.unpad_heads([2 * part for part in by_head])
        assert torch.equal(there_and_back, 2 * x * is_real)
        upstream = torch.randn_like(x)
        (gradient,) = torch.autograd.grad(there_and_back, x, upstream)
        assert torch.equal(gradient, 2 * upstream * is_real)


# ---- tiles ----------------------------------------------------------------------------------------------------------


def tile_rows(tiles: Tensor | None) -> list[list[tuple[int, ...]]]:
    """The small tiles and the large ones, without the rows that fill up."""
    assert tiles is not None
    return [[tuple(row) for row in size.tolist() if any(row)] for size in tiles]


def test_packed_tiles_by_hand() -> None:
    """A tile ends where the next sentence would not fit on one of its sides; a longer one opens a large tile."""
    lengths = np.array([[30, 20], [30, 50], [65, 10], [40, 40], [129, 5], [2, 3]])
    source, target = pack(lengths, (384, 160), kernel=AttentionKernel.sentences)
    assert source.tiles is not None
    assert target.tiles is not None
    assert source.tiles.cross is None
    assert tile_rows(source.tiles.own) == [
        [(0, 60, 0, 60), (294, 296, 294, 296), (296, 360, 296, 360), (360, 384, 360, 384)],
        [(60, 165, 60, 165)],
    ]
    assert tile_rows(target.tiles.own) == [
        [(0, 20, 0, 20), (20, 80, 20, 80), (80, 128, 80, 128), (128, 160, 128, 160)],
        [],
    ]
    assert tile_rows(target.tiles.cross) == [
        [(0, 20, 0, 30), (20, 70, 30, 60), (125, 128, 294, 296), (128, 160, 296, 360), (160, 160, 360, 384)],
        [(70, 120, 60, 165)],
    ]
    assert source.longest == target.longest == 256  # one sentence fits no tile
    assert source.tiles.owner.tolist() == [*[0] * 30, *[1] * 30, *[2] * 65, *[3] * 40, *[4] * 129, *[5] * 2, *[-1] * 88]


def test_packed_batch_of_no_sentence_has_room_for_some() -> None:
    """A rank without a sentence computes, too: attention by offsets is asked for a longest sentence above 0."""
    source, target = pack(np.zeros((0, 2), np.int64), (64, 64), kernel=AttentionKernel.varlen)
    assert source.longest == target.longest == 128
    assert len(source.offsets) > 1


@pytest.mark.parametrize(("longest", "said"), [(64, 64), (65, 128), (128, 128), (129, 256), (400, 256)])
def test_packed_tiles_say_which_of_them_a_batch_needs(longest: int, said: int) -> None:
    for pair in ([longest, 3], [3, longest]):
        source, target = pack(np.array([[5, 5], pair]), (512, 512), kernel=AttentionKernel.sentences)
        assert source.longest == target.longest == said


def every_other(short: int, long: int) -> list[list[int]]:
    """Pairs whose source and target are long by turns: as bad as it gets."""
    return [[short, long], [long, short]] * 25


@pytest.mark.parametrize(
    "lengths", [every_other(1, 64), every_other(33, 33), every_other(1, 128), [[70, 200]], [[1, 1]]]
)
def test_packed_tiles_hold_each_slot_once_and_sentences_whole(lengths: list[list[int]]) -> None:
    slots = (3_300, 3_328)
    sides = pack(np.array(lengths), slots, kernel=AttentionKernel.sentences)
    others = pack(np.array([[7, 9]]), slots, kernel=AttentionKernel.sentences)
    for packed, other in zip(sides, others, strict=True):  # shapes follow from the numbers of slots
        assert packed.offsets.shape == other.offsets.shape
        assert packed.tiles is not None
        assert other.tiles is not None
        assert packed.tiles.own.shape == other.tiles.own.shape

    for queries, keys in ((0, 0), (1, 1), (1, 0)):
        tiles = sides[queries].tiles
        assert tiles is not None
        small, large = tile_rows(tiles.own if queries == keys else tiles.cross)
        for axis, side in ((0, queries), (2, keys)):
            assert all(0 <= row[axis + 1] - row[axis] <= 64 for row in small)
            assert all(0 <= row[axis + 1] - row[axis] <= 128 for row in large)
            held = sorted(slot for row in small + large for slot in range(row[axis], row[axis + 1]))
            ends = np.cumsum([pair[side] for pair in lengths]).tolist()
            in_a_tile = [
                range(end - pair[side], end)
                for pair, end in zip(lengths, ends, strict=True)
                if max(pair[queries], pair[keys]) <= 128
            ]
            assert held == [*itertools.chain.from_iterable(in_a_tile), *range(ends[-1], slots[side])]
            starts = {row[axis] for row in small + large} | {slots[side]}
            for sentence in in_a_tile:
                assert not any(sentence[0] < start <= sentence[-1] for start in starts)
