"""The two tiers of the fault matrix: the core, in every run of the tests, and the long one, behind `-m faults`."""

from collections.abc import Iterable

import pytest
from _pytest.mark.structures import ParameterSet


def tiers(core: Iterable[object], long: Iterable[object]) -> list[ParameterSet]:
    """The cases of a test for `pytest.mark.parametrize`; those of the long tier carry its mark."""
    return [pytest.param(case) for case in core] + [pytest.param(case, marks=pytest.mark.faults) for case in long]
