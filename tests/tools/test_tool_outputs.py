"""What is written where a user says."""

import os
import stat
import threading
from pathlib import Path

import pytest

from transformer.errors import StorageError
from transformer.tools.outputs import write_output


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
