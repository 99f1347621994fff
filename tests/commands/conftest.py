"""Where a command is started."""

from pathlib import Path

import pytest


@pytest.fixture
def in_empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The test runs in an empty folder: what a command does must not depend on what lies around it."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
