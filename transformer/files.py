"""Files that a crash cannot leave half written, and files that are read without trusting them.

    write:  make .tmp-NAME  ->  fsync it  ->  rename it to NAME  ->  fsync the directory

So a file or directory is there whole or not at all. A digest (SHA-256) tells later whether it still is what was
written. Reading follows no link, waits for no pipe, and parses no JSON larger than a run has a use for. A POSIX file
system is assumed.

Temporary names begin with a dot: `.tmp-` is unfinished, `.del-` is being removed, `.old-` is being replaced and returns
if the new one never came.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TextIO

from transformer.errors import CheckpointError, InputError, StorageError

UNFINISHED = ".tmp-"
DOOMED = ".del-"
REPLACED = ".old-"
MANIFEST = "MANIFEST.json"  # of a directory: the size and digest of every file in it
JSON_LIMIT = 16 * 2**20  # bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Digest:
    """What a manifest says of a file."""

    size: int  # bytes
    sha256: str


# ---- writing --------------------------------------------------------------------------------------------------------


def write_new(path: Path, data: bytes, *, mode: int | None = None) -> Digest:
    """Write a file that must not exist yet through to the disk; `mode` counts whatever the umask. Raises OSError."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644 if mode is None else mode)
    try:
        if mode is not None:
            os.fchmod(file, mode)

        # The system may write less than it is given.
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(file, rest) :]
        os.fsync(file)
    finally:
        os.close(file)
    return Digest(len(data), hashlib.sha256(data).hexdigest())


def write_file(path: Path, data: bytes, *, mode: int | None = None) -> None:
    """Replace a small file atomically and durably. Raises StorageError."""
    temporary = temporary_name(path, UNFINISHED)
    try:
        write_new(temporary, data, mode=mode)
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        raise storage_error(path, len(data), error=error) from error
    finally:
        remove(temporary)


def write_json(path: Path, value: object) -> None:
    """Replace a small JSON file atomically. Raises StorageError; ValueError for NaN and infinities."""
    write_file(path, encode_json(value))


def encode_json(value: object) -> bytes:
    """The JSON text of a value, written the same way everywhere, so that equal values are equal files."""
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()


def sync(path: Path) -> None:
    """Bring a file to the disk, or the names in a directory: a synced file can still be lost with its name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directories(path: Path) -> None:
    """Make `path` and what is missing above it, durably. Raises OSError."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    if missing:
        path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def temporary_name(path: Path, prefix: str) -> Path:
    """A fresh name in the same directory, hence on the same file system."""
    return path.with_name(f"{prefix}{path.name}-{os.getpid()}-{secrets.token_hex(4)}")


def remove(path: Path) -> None:
    """Remove a file or directory if it is there. A failure is only logged: the next start tries again."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)
    except OSError as error:
        log.warning("%s: cannot be removed: %s", path, error.strerror)


def put_back(old: Path, target: Path) -> None:
    """End a replacement: the old file or directory returns, unless a new one has taken its place."""
    if os.path.lexists(target):
        remove(old)
    elif os.path.lexists(old):
        os.rename(old, target)


def clear_leftovers(folder: Path) -> None:
    """Remove what a killed process left unfinished in a directory, and end its replacements. Raises OSError."""
    for name in list_names(folder):
        if name.startswith((UNFINISHED, DOOMED)):
            remove(folder / name)
        elif name.startswith(REPLACED):
            put_back(folder / name, folder / name.removeprefix(REPLACED))
    if folder.is_dir():
        sync(folder)  # a killed process may have renamed without living to sync


def storage_error(path: Path, needed: int | None = None, *, error: OSError) -> StorageError:
    """The error of a failed write, with the bytes that were needed, where that is known, and those that are free."""
    folder = next(folder for folder in path.absolute().parents if folder.is_dir())
    sizes = f"{shutil.disk_usage(folder).free} bytes free"
    if needed is not None:
        sizes = f"{needed} bytes needed, {sizes}"
    return StorageError(f"{path}: cannot be written: {error.strerror or error} ({sizes})")


# ---- directories that are built once --------------------------------------------------------------------------------


def build_once(
    path: Path, fill: Callable[[Path], None], *, is_usable: Callable[[Path], bool], marks: Collection[str]
) -> None:
    """`build` the directory `path`, unless it is usable or another process makes it so in the meantime."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _wait_for_lock(path.with_name(f"{path.name}.lock")):
        if not is_usable(path):
            _clear_dead_builds(path.parent)
            build(path, fill, marks=marks)


def build(path: Path, fill: Callable[[Path], None], *, marks: Collection[str]) -> None:
    """Have `fill` make the directory `path`, which no other process builds at the same time.

    It is filled under a temporary name and renamed, so that whatever has the name is complete. What is there makes way
    if it has a file of `marks`, names which only such a directory has; anything else stays, and FileExistsError is
    raised. OSError passes through.
    """
    _check_replaceable(path, marks)
    temporary = path.with_name(f"{UNFINISHED}{path.name}")
    remove(temporary)  # of a builder that was killed
    temporary.mkdir()
    try:
        fill(temporary)
        _check_replaceable(path, marks)  # filling may have taken hours
        remove(path)  # what is there is damaged, or it would have been usable
        temporary.rename(path)
        sync(path.parent)
    finally:
        remove(temporary)


def is_sound(read: Callable[[Path], object], path: Path) -> bool:
    """Whether something is at `path` that can be read: neither missing nor damaged."""
    try:
        read(path)
    except (InputError, CheckpointError):
        return False
    return True


def _check_replaceable(path: Path, marks: Collection[str]) -> None:
    """Raise FileExistsError where something is at `path` that is not a directory with one of the marks.

    An empty directory or file, a link and a pipe hold nothing that could be lost.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISDIR(status.st_mode):
        names = list_names(path)
        is_replaceable = not names or any(mark in names for mark in marks)
    else:
        is_replaceable = not stat.S_ISREG(status.st_mode) or status.st_size == 0
    if not is_replaceable:
        raise FileExistsError(errno.EEXIST, "what is there was not made by this program: move it away")


def _clear_dead_builds(folder: Path) -> None:
    """Remove what killed builders of other directories left here: nobody holds their locks any more."""
    for name in list_names(folder):
        if not name.startswith(UNFINISHED):
            continue
        lock = folder / f"{name.removeprefix(UNFINISHED)}.lock"
        with suppress(OSError), _open_lock(lock, os.O_RDWR) as file:  # there is none, or its builder is alive
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(folder / name)


@contextmanager
def _wait_for_lock(path: Path) -> Iterator[None]:
    """Hold a lock that the kernel gives back when this process dies."""
    with open_lock(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("%s: waiting for the process that holds this lock", path)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def open_lock(path: Path) -> BinaryIO:
    """A file to be locked, made if missing. Raises StorageError for what is no regular file; OSError passes through."""
    try:
        return _open_lock(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
            raise StorageError(f"{path}: cannot be used as a lock ({error.strerror}): remove it") from error
        raise


def _open_lock(path: Path, flags: int) -> BinaryIO:
    """A regular file that is locked and neither read nor written; others of the group may lock it, too."""
    return os.fdopen(_open_regular(path, flags, None, mode=0o666), "r+b", buffering=0)


# ---- reading --------------------------------------------------------------------------------------------------------


def digest_file(path: Path) -> Digest:
    """Size and SHA-256 of a file, read in one pass. Raises OSError."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return Digest(file.tell(), sha256)


def open_regular(path: Path, folder: int | None = None, *, limit: int | None = None) -> BufferedReader:
    """Open a regular file, following no link and waiting for no pipe.

    With the descriptor of an open directory as `folder`, the path begins there, wherever the directory is now. Raises
    OSError, also for what is not a regular file, or is larger than `limit` bytes.
    """
    file = os.fdopen(_open_regular(path, os.O_RDONLY, folder), "rb")
    if limit is not None and os.fstat(file.fileno()).st_size > limit:
        file.close()
        raise OSError(errno.EFBIG, f"larger than {limit} bytes")
    return file


def append_to(path: Path) -> TextIO:
    """Open a regular file, made if missing, to add lines at its end; no link is followed. Raises OSError."""
    file = _open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, None)
    return os.fdopen(file, "w", encoding="utf-8", newline="\n")


def _open_regular(name: str | Path, flags: int, folder: int | None, *, mode: int = 0o644) -> int:
    """The descriptor of an open regular file. O_NONBLOCK: to open a pipe would wait for its other end."""
    file = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, mode, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "not a regular file")
    return file


def read_json(path: Path) -> Any:
    """The content of a small JSON file. Raises OSError, and ValueError for what is not such a file."""
    with open_regular(path) as file:
        return parse_json(file)


def parse_json(file: BufferedReader) -> Any:
    """The JSON value in an open file. Raises ValueError where it is too large or not JSON."""
    data = file.read(JSON_LIMIT + 1)
    if len(data) > JSON_LIMIT:  # before parsing: a value takes many times the memory of its text
        raise ValueError(f"larger than {JSON_LIMIT} bytes")
    try:
        return json.loads(data.decode(), parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")


def list_names(folder: Path) -> list[str]:
    """The names in a directory, sorted; none if it does not exist.

    Raises StorageError for a directory that cannot be read: it must not pass for an empty one.
    """
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"{folder}: cannot be listed: {error.strerror}") from error
