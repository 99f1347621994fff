"""What a training changes in its process: where the compiler keeps its code, which is run from there."""

import logging
import os
from pathlib import Path

import pytest
import torch

from transformer.training.process import COMPILER_CACHE, process_settings_restored, set_up_process


def cache_after_set_up(*, compiles: bool = True) -> str | None:
    """The folder that a training leaves to the compiler; afterwards, the environment is as it was."""
    before = os.environ.get(COMPILER_CACHE)
    with process_settings_restored():
        set_up_process(threads=torch.get_num_threads(), deterministic=False, compiles=compiles)
        folder = os.environ.get(COMPILER_CACHE)
    assert os.environ.get(COMPILER_CACHE) == before
    return folder


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the user's caches, which is not there yet."""
    monkeypatch.delenv(COMPILER_CACHE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches"


def test_compiled_code_is_kept_where_only_its_user_can_write(caches: Path) -> None:
    old_umask = os.umask(0o002)
    try:
        folder = Path(cache_after_set_up() or "")
    finally:
        os.umask(old_umask)
    assert folder.parent == caches / "transformer"
    assert [path.stat().st_mode & 0o777 for path in (folder.parent, folder)] == [0o700, 0o700]
    assert cache_after_set_up() == str(folder), "a requeued job finds it again"


def test_compiled_code_is_kept_in_the_home_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMPILER_CACHE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Path(cache_after_set_up() or "").parent == tmp_path / ".cache/transformer"


def test_compiled_code_is_kept_where_the_environment_says(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMPILER_CACHE, "/elsewhere")
    assert cache_after_set_up() == "/elsewhere"
    assert not caches.exists()


def test_training_that_is_not_compiled_makes_no_folder(caches: Path) -> None:
    assert cache_after_set_up(compiles=False) is None
    assert not caches.exists()


@pytest.mark.parametrize("is_file", [False, True], ids=["others can write it", "no folder"])
def test_compiled_code_is_not_kept_where_others_can_write(
    is_file: bool, caches: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if is_file:
        caches.write_text("", encoding="utf-8")
    else:
        (caches / "transformer").mkdir(parents=True)
        (caches / "transformer").chmod(0o777)
    with caplog.at_level(logging.INFO):
        assert cache_after_set_up() is None
    assert "compiled code is kept where torch keeps it" in caplog.text
