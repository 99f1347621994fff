"""A golden run: all that a command prints or writes, beside what was recorded of it.

Structure, words and whole numbers must be the same; numbers with a point may differ in their last digits, as they do
from one processor to the next. To record anew, and then to read the difference before it is committed:

    TRANSFORMER_TEST_RECORD=1 pytest -n 0 FILE -k NAME
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

RECORD = "TRANSFORMER_TEST_RECORD"
FOLDER = Path(__file__).parents[1] / "golden"
FRACTION = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+(?:e[-+]?\d+)?|e[-+]?\d+)(?![\w.])")


def assert_golden(name: str, text: str, hidden: Mapping[str, str] | None = None, *, rel: float = 1e-3) -> None:
    """The text is that of `tests/golden/NAME.txt`; `hidden` replaces what differs from run to run, such as paths."""
    for own, shown in (hidden or {}).items():
        text = text.replace(own, shown)
    path = FOLDER / f"{name}.txt"
    if RECORD in os.environ:
        path.write_text(text, encoding="utf-8")
    assert path.exists(), f"{path} is not there: {RECORD}=1 records it"
    recorded = path.read_text(encoding="utf-8")
    assert FRACTION.sub("#", text) == FRACTION.sub("#", recorded)
    assert _numbers(text) == pytest.approx(_numbers(recorded), rel=rel)


def _numbers(text: str) -> list[float]:
    return [float(found.replace(",", "")) for found in FRACTION.findall(text)]
