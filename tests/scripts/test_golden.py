"""Golden runs: what may differ from the record, and what may not."""

from pathlib import Path

import pytest

from support import golden


def test_golden_run_may_differ_in_the_last_digits_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden, "FOLDER", tmp_path)
    monkeypatch.delenv(golden.RECORD, raising=False)
    with pytest.raises(AssertionError, match="TRANSFORMER_TEST_RECORD=1 records it"):
        golden.assert_golden("a", "")
    with monkeypatch.context() as recording:
        recording.setenv(golden.RECORD, "1")
        golden.assert_golden("a", "runs/x: 12 steps, loss 1,234.5, 3.0e-7\n", {"runs/x": "FOLDER"})
    golden.assert_golden("a", "FOLDER: 12 steps, loss 1,234.6, 3.001e-7\n")
    for other in ("12 steps, loss 1,250.5, 3.0e-7", "13 steps, loss 1,234.5, 3.0e-7", "12 steps, loss 1,234.5, 3"):
        with pytest.raises(AssertionError):
            golden.assert_golden("a", f"FOLDER: {other}\n")
