"""Text as compressed files hold it."""

import bz2
import gzip
import lzma

import pyarrow
import xxhash


def compressed(content: bytes, suffix: str) -> bytes:
    """What a file with this suffix holds; anything but `.gz`, `.bz2`, `.xz` and `.zst` is plain text."""
    match suffix:
        case ".gz":
            return gzip.compress(content, mtime=0)
        case ".bz2":
            return bz2.compress(content)
        case ".xz":
            return lzma.compress(content)
        case ".zst":
            return _zstandard(content)
        case _:
            return content


def _zstandard(content: bytes) -> bytes:
    """A frame with a checksum, as the zstd program writes it and pyarrow does not."""
    frame = bytearray(pyarrow.Codec("zstd").compress(content, asbytes=True))
    frame[4] |= 0b100  # in the header: the lower half of the text's XXH64 follows, its last byte first
    return bytes(frame) + xxhash.xxh64_digest(content)[:3:-1]
