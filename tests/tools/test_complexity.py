"""Table 1: what is counted beside numbers worked out by hand and real stacks of layers."""

from itertools import count

import pytest
import torch
from torch.nn import functional as F

from transformer.tools.paper.complexity import Complexity, complexity_rows, format_complexity


def rows_of(n: int, d: int = 4, k: int = 3, r: int = 3) -> dict[str, Complexity]:
    return {row.layer: row for row in complexity_rows(n=n, d=d, k=k, r=r)}


def test_complexity_rows_has_the_paper_s_formulas() -> None:
    assert [(row.layer, row.complexity, row.sequential, row.path) for row in rows_of(4).values()] == [
        ("self-attention", "O(n² · d)", "O(1)", "O(1)"),
        ("recurrent", "O(n · d²)", "O(n)", "O(n)"),
        ("convolutional", "O(k · n · d²)", "O(1)", "O(n / k)"),
        ("convolutional (dilated)", "O(k · n · d²)", "O(1)", "O(log_k(n))"),
        ("self-attention (restricted)", "O(r · n · d)", "O(1)", "O(n / r)"),
    ]


@pytest.mark.parametrize(("n", "d", "k", "r"), [(8, 4, 3, 5), (5, 6, 3, 4), (16, 2, 5, 3)])
def test_complexity_rows_counts_the_operations_of_a_layer(n: int, d: int, k: int, r: int) -> None:
    """Attention multiplies twice, scores and values; a recurrent step has a matrix for its input and for its state."""
    rows = rows_of(n, d, k, r)
    assert {layer: row.multiply_adds for layer, row in rows.items()} == {
        "self-attention": 2 * n * n * d,
        "recurrent": 2 * n * d * d,
        "convolutional": k * n * d * d,
        "convolutional (dilated)": k * n * d * d,
        "self-attention (restricted)": 2 * r * n * d,
    }
    factors = {layer: row.multiply_adds / row.formula for layer, row in rows.items()}
    assert list(factors.values()) == [2, 2, 1, 1, 2]


@pytest.mark.parametrize("n", [2, 7, 20])
def test_complexity_rows_counts_what_must_wait(n: int) -> None:
    """Scores, then values; one state after the other; one convolution."""
    assert [row.sequential_products for row in rows_of(n).values()] == [2, n, 1, 1, 2]


def steps_of_a_real_stack(n: int, k: int, dilations: list[int]) -> int:
    """How many convolutions with positive kernels it takes until every input moves every output."""
    response = torch.eye(n).unsqueeze(1)  # (inputs, 1, outputs)
    for layers in count(1):
        dilation = dilations[(layers - 1) % len(dilations)]
        response = F.conv1d(response, torch.ones(1, 1, k), padding="same", dilation=dilation).sign()
        if response.bool().all():
            return layers
    raise AssertionError


@pytest.mark.parametrize(("n", "k", "dilations"), [(10, 3, [1, 3, 9]), (27, 3, [1, 3, 9]), (30, 5, [1, 5, 25])])
def test_complexity_rows_walks_as_a_real_stack_of_convolutions_does(n: int, k: int, dilations: list[int]) -> None:
    rows = rows_of(n, k=k, r=k)
    contiguous = steps_of_a_real_stack(n, k, [1])
    assert rows["convolutional"].path_length == contiguous == -(-(n - 1) // (k // 2))
    assert rows["self-attention (restricted)"].path_length == contiguous  # the same neighbours
    assert rows["convolutional (dilated)"].path_length == steps_of_a_real_stack(n, k, dilations)


def test_complexity_rows_has_paths_that_grow_as_the_paper_says() -> None:
    """From 16 to 256 positions: not at all, 16 times, 17 times (15 to 255), by a few steps, 17 times."""
    short, long = ([row.path_length for row in rows_of(n).values()] for n in (16, 256))
    assert short == [1, 16, 15, 5, 15]
    assert long == [1, 256, 255, 11, 255]


def test_path_length_of_one_position_is_one_step() -> None:
    assert [row.path_length for row in rows_of(1).values()] == [1, 1, 1, 1, 1]


@pytest.mark.parametrize(("n", "d", "k", "r"), [(0, 4, 3, 3), (4, 0, 3, 3), (4, 4, 2, 3), (4, 4, 3, 2)])
def test_complexity_rows_refuses_sizes_that_connect_nothing(n: int, d: int, k: int, r: int) -> None:
    with pytest.raises(ValueError, match="at least"):
        complexity_rows(n=n, d=d, k=k, r=r)


def test_format_complexity_is_a_markdown_table() -> None:
    text = format_complexity(list(rows_of(8).values()), n=8, d=4, k=3, r=3)
    assert "n = 8, d = 4, k = 3, r = 3" in text
    assert "| recurrent | O(n · d²) | 256 | 2 | O(n) | 8 | O(n) | 8 |\n" in text
    table = [line for line in text.split("\n") if line.startswith("|")]
    assert len(table) == 7
    assert {line.count("|") for line in table} == {9}
