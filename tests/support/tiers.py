"""Two tiers of a test's cases: those of every run of the tests, and those behind `-m faults`, or `-m ci`."""

from collections.abc import Iterable

import pytest
from _pytest.mark.structures import ParameterSet


def tiers(
    core: Iterable[object], long: Iterable[object], mark: pytest.MarkDecorator = pytest.mark.faults
) -> list[ParameterSet]:
    """The cases of a test for `pytest.mark.parametrize`; those of the long tier carry the mark."""
    return [pytest.param(case) for case in core] + [pytest.param(case, marks=mark) for case in long]
