"""What several test files share: one thread, and float64 where a test wants twelve digits."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tests are small: more threads only wait for each other, and sums keep one order."""
    torch.set_num_threads(1)


@pytest.fixture
def float64() -> Iterator[None]:
    """Tensors and modules made in this test are float64, sinusoids included."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
