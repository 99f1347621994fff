"""Compressed files, known by their suffix: what they hold, streamed, and checked to their end; and how to write one.

A compressed file may be several end to end, as parallel compressors write it. One that is cut, damaged, or followed by
something else is never taken for a shorter one, as the standard library takes `.bz2` and `.xz`.
"""

import bz2
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformer.errors import InputError

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")

# What reading raises of a damaged file; an OSError with an error number is the system's, and says nothing of the file.
DAMAGE = (EOFError, OSError, zlib.error, lzma.LZMAError)

_MOST_MEMORY = 1 << 28  # bytes that an .xz file may ask for; `xz -9` takes 65 MiB, and a file can name any number


def plain_name(name: str) -> str:
    """A file's name without the suffix of its compression."""
    stem, suffix = os.path.splitext(name)
    return stem if suffix in COMPRESSIONS else name


def damaged(path: Path, line: int, error: Exception) -> InputError:
    """The error to raise for one of DAMAGE, which came up at this line."""
    if isinstance(error, OSError) and error.errno is not None:
        return InputError(f"{path}: cannot be read ({error.strerror}): check the path")
    return InputError(f"{path}:{line}: damaged {path.suffix} file ({error}): fetch or compress it again")


def open_bytes(path: Path, buffer_size: int) -> io.BufferedReader:
    """What a file holds, decompressed as its suffix says. It or its reading raises one of DAMAGE where that fails."""
    if path.suffix in COMPRESSIONS and path.is_file() and path.stat().st_size == 0:
        raise EOFError("it is empty")  # which some decompressors take for an empty text
    match path.suffix:
        case ".gz":
            return io.BufferedReader(gzip.GzipFile(path, "rb"), buffer_size)
        case ".bz2":
            return io.BufferedReader(_StreamsFile(path, bz2.BZ2Decompressor, padding=b""), buffer_size)
        case ".xz":
            return io.BufferedReader(_StreamsFile(path, _xz_decompressor, padding=b"\0"), buffer_size)
        case ".zst":
            import pyarrow

            # A file of Python's, so that what the system says of it comes as for every other file.
            return io.BufferedReader(pyarrow.CompressedInputStream(path.open("rb"), "zstd"), buffer_size)
        case _:
            return path.open("rb")


def compress(data: bytes, suffix: str) -> bytes:
    """A compressed file of this suffix that holds `data`; the data as they are where it is no suffix of these.

    Such files end to end are one that holds the data end to end. The same data give the same file.
    """
    match suffix:
        case ".gz":
            return gzip.compress(data, mtime=0)
        case ".bz2":
            return bz2.compress(data)
        case ".xz":
            return lzma.compress(data)
        case ".zst":
            import pyarrow

            return bytes(pyarrow.compress(data, codec="zstd", asbytes=True))
        case _:
            return data


def _xz_decompressor() -> lzma.LZMADecompressor:
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MOST_MEMORY)


class _StreamsFile(io.RawIOBase):
    """What the streams of an .xz or .bz2 file hold, end to end; between them may be bytes of `padding`.

    The readers of the standard library end where a later stream is damaged, and set no limit of memory.
    """

    def __init__(
        self, path: Path, new: Callable[[], lzma.LZMADecompressor | bz2.BZ2Decompressor], *, padding: bytes
    ) -> None:
        self._file = path.open("rb")
        self._new = new
        self._padding = padding
        self._decompressor = new()

    def readable(self) -> bool:
        """It is for reading only."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill the buffer as far as the next piece reaches; 0 at the end."""
        while True:
            while self._decompressor.eof:
                if not self._begin_next_stream():
                    return 0

            chunk = b""
            if self._decompressor.needs_input:
                chunk = self._file.read(io.DEFAULT_BUFFER_SIZE)
                if not chunk:
                    raise EOFError("it ends before its end mark")
            text = self._decompressor.decompress(chunk, len(buffer))
            if text:
                buffer[: len(text)] = text
                return len(text)

    def _begin_next_stream(self) -> bool:
        """Go on with the stream that follows, if there is one; zeros may stand between."""
        rest = self._decompressor.unused_data
        while not (rest := rest.lstrip(self._padding)):
            rest = self._file.read(io.DEFAULT_BUFFER_SIZE)
            if not rest:
                return False
        self._decompressor = self._new()
        self._decompressor.decompress(rest, 0)
        return True

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()
