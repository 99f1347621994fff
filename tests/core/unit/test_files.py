"""What is written where a user says, what is built once, and what is left alone."""

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from transformer.errors import StorageError
from transformer.files import build_once, write_output


def test_write_output_follows_a_link_and_keeps_the_mode(tmp_path: Path) -> None:
    page, link = tmp_path / "pages" / "page", tmp_path / "link"
    page.parent.mkdir()
    link.symlink_to(page)
    write_output(link, b"new")  # a link to nothing yet
    assert page.read_bytes() == b"new"
    page.chmod(0o666)  # more than the usual umask lets
    write_output(link, b"newer")
    assert (page.read_bytes(), stat.S_IMODE(page.stat().st_mode), link.is_symlink()) == (b"newer", 0o666, True)
    page.chmod(0o600)
    write_output(page, b"newest")
    assert (page.read_bytes(), stat.S_IMODE(page.stat().st_mode)) == (b"newest", 0o600)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["link", "page", "pages"]


def test_write_output_writes_into_a_pipe_and_a_device(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    write_output(tmp_path / "pipe", b"page")
    reader.join(timeout=120)
    assert (read, (tmp_path / "pipe").is_fifo()) == ([b"page"], True)

    for name in ("null", "full"):  # through links: before it was mended, this test would have replaced the devices
        (tmp_path / name).symlink_to(f"/dev/{name}")
    write_output(tmp_path / "null", b"page")
    with pytest.raises(StorageError, match=r"full: cannot be written: No space left on device \("):
        write_output(tmp_path / "full", b"page")
    assert [(tmp_path / name).is_char_device() for name in ("null", "full")] == [True, True]


def test_write_output_says_what_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path, tmp_path / "loop", tmp_path / "none" / "page"):
        with pytest.raises(StorageError, match="cannot be written"):
            write_output(path, b"page")


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
