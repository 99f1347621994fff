"""A file of text that is read more than once: its lines, and what it was at first, so that a change is noticed."""

import hashlib
import stat
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from transformer.data.compression import DAMAGE, damaged
from transformer.data.corpus import open_text
from transformer.decoding.stream import read_blocks
from transformer.errors import InputError

CHUNK = 1 << 20  # bytes


@dataclass(frozen=True)
class Text:
    """A file of text as it was when it was read through: what it holds as UTF-8, however it is compressed."""

    path: Path
    sha256: str
    lines: int
    stamp: tuple[int, int]  # size and time of change of the file

    @classmethod
    def of(cls, name: str, key: str) -> "Text":
        """Read it through. Raises InputError for what cannot be read, or not twice: the setting `key` names it."""
        path = Path(name)
        digest = hashlib.sha256()
        newlines = 0
        last = b"\n"
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise InputError(
                    f"{key}={name}: not a regular file: no other can be read again after the command is killed"
                )
            stamp = _stamp(path)
            with open_text(path) as file:
                while chunk := file.read(CHUNK):
                    digest.update(chunk)
                    newlines += chunk.count(b"\n")
                    last = chunk[-1:]
        except DAMAGE as error:
            raise damaged(path, newlines + 1, error) from error
        return cls(path, digest.hexdigest(), newlines + (last != b"\n"), stamp)

    def check(self) -> None:
        """Raise InputError if the file has changed since."""
        if not self.path.exists() or _stamp(self.path) != self.stamp:
            raise self._changed()

    def check_all(self) -> None:
        """Raise InputError if what it holds has changed since, whatever its size and time say."""
        if Text.of(str(self.path), str(self.path)).sha256 != self.sha256:
            raise self._changed()

    def _changed(self) -> InputError:
        return InputError(f"{self.path}: it changed while being read: none of the new text is kept")


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def read_file(path: Path) -> Generator[list[bytes], None, None]:
    """The lines of a file, as UTF-8 and not compressed, in the blocks that standard input gives of it.

    Raises InputError.
    """
    line = 1
    try:
        with open_text(path) as file:
            for block in read_blocks(file.read):
                yield block
                line += len(block)
    except DAMAGE as error:
        raise damaged(path, line, error) from error
