"""What is built once, and what is left alone."""

from collections.abc import Callable
from pathlib import Path

import pytest

from transformer.files import build_once

# ---- directories that are built once --------------------------------------------------------------------------------


MARK = "MANIFEST.json"


def fill(folder: Path) -> None:
    (folder / MARK).write_text("made", encoding="utf-8")


def build(path: Path, fill: Callable[[Path], None]) -> None:
    build_once(path, fill, is_usable=lambda _: False, marks=[MARK])


@pytest.mark.parametrize("is_file", [False, True])
def test_build_once_removes_nothing_that_it_has_not_made(is_file: bool, tmp_path: Path) -> None:
    path = tmp_path / "thesis"
    work = path if is_file else path / "chapter1.tex"
    work.parent.mkdir(exist_ok=True)
    work.write_text("years of work", encoding="utf-8")
    for _ in range(2):  # the first attempt leaves a lock
        with pytest.raises(FileExistsError, match="not made by this program: move it away"):
            build(path, lambda _: pytest.fail("filled in vain"))
        assert work.read_text(encoding="utf-8") == "years of work"


def test_build_once_leaves_what_was_put_there_while_it_filled(tmp_path: Path) -> None:
    def interrupted(folder: Path) -> None:
        fill(folder)
        (tmp_path / "store").mkdir()
        (tmp_path / "store" / "notes").write_text("mine", encoding="utf-8")

    with pytest.raises(FileExistsError):
        build(tmp_path / "store", interrupted)
    assert (tmp_path / "store" / "notes").read_text(encoding="utf-8") == "mine"
    assert not (tmp_path / ".tmp-store").exists()


def test_build_once_replaces_what_it_has_made_and_what_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.mkdir()
    for _ in range(2):
        build(path, fill)
        assert [file.read_text(encoding="utf-8") for file in path.iterdir()] == ["made"]
        (path / MARK).write_text("damaged", encoding="utf-8")
    (path / MARK).unlink()
    path.rmdir()
    path.touch()
    build(path, fill)
    assert path.is_dir()
