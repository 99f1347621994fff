"""What is equal within a tolerance, and the words where it is not."""

import math

import pytest
import torch

from transformer.config.settings import Precision
from transformer.errors import InputError
from transformer.numerics import (
    FINITE,
    DeviatesError,
    check,
    distance,
    excess,
    failures_in_words,
    largest,
    relative,
    tolerance_of,
)


@pytest.mark.parametrize("difference", [math.nan, math.inf, 0.3])
def test_check_refuses_what_is_beyond_the_limit_or_no_number(difference: float) -> None:
    check("the loss", 0.2, 0.2)
    with pytest.raises(DeviatesError, match=rf"^the loss differs by {difference} \(0\.2 allowed\)$"):
        check("the loss", difference, 0.2)


def test_excess_of_what_may_be_any_number() -> None:
    assert excess("a logit", 1e300, FINITE) == []
    assert excess("a logit", math.inf, FINITE) == ["a logit differs by inf"]


def test_differences_are_relative_to_what_should_be() -> None:
    assert relative(3.0, -2.0) == 2.5
    assert relative(0.0, 0.0) == 0.0
    assert math.isnan(relative(math.inf, math.inf))
    twice = [torch.tensor([6.0]), torch.tensor([[8.0]])]
    assert distance(twice, [tensor / 2 for tensor in twice]) == 1.0
    assert distance([torch.zeros(2)], [torch.zeros(2)]) == 0.0
    assert math.isnan(distance([torch.tensor([math.nan])], [torch.ones(1)]))


def test_largest_does_not_pass_over_nan() -> None:
    assert largest([0.1, 0.3, 0.2]) == 0.3
    assert math.isnan(largest([0.1, math.nan, 0.2]))


def test_tolerance_is_wider_in_half_precision() -> None:
    half, full, double = map(tolerance_of, (Precision.bf16, Precision.fp32, Precision.fp64))
    assert full == double
    assert half.gradient > full.gradient


@pytest.mark.parametrize("error", [InputError("of the user"), torch.OutOfMemoryError("full"), DeviatesError("far")])
def test_failures_in_words_passes_on_what_says_nothing_about_a_way(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)), failures_in_words():
        raise error


def test_failures_in_words_names_what_a_driver_raises() -> None:
    with pytest.raises(DeviatesError, match=r"^RuntimeError: CUDA error for it$"), failures_in_words():
        raise RuntimeError("CUDA error\nfor it\nand more")
