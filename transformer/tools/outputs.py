"""The files and folders that users name for what a tool writes."""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from transformer.errors import StorageError
from transformer.files import make_directories, storage_error, write_file


def make_output(folder: Path) -> None:
    """Make the folder for the output of a command. Raises StorageError."""
    try:
        make_directories(folder)
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    except OSError as error:
        raise StorageError(f"output={folder}: cannot be made: {error.strerror}: choose another directory") from error


def write_output(path: Path, data: bytes) -> None:
    """Write a small file that a user named, as a shell would: through a link, and into a pipe or a device.

    A regular file is replaced atomically, and keeps its mode. Raises StorageError.
    """
    mode = None
    try:
        with suppress(FileNotFoundError):
            mode = path.stat().st_mode
        if mode is not None and not stat.S_ISREG(mode):
            path.write_bytes(data)
            return
    except OSError as error:
        raise storage_error(path, len(data), error=error) from error
    write_file(path.resolve(), data, mode=None if mode is None else stat.S_IMODE(mode))
