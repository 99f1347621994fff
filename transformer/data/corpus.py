"""Sentence pairs from text files: line n of one translates line n of the other; and which of them are fit to train on.

Lines are split at the byte 0x0A and nowhere else: text mode and `str.splitlines` also split at a lone carriage return,
U+2028, U+0085 and others, and from there on every pair would be shifted. Whatever is wrong with a file is an InputError
naming file and line. Only training pairs are filtered: whole pairs, with counts.
"""

import gzip
import hashlib
import io
import logging
import zlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path

import numpy as np

from transformer.config.settings import FilterConfig
from transformer.errors import InputError

Pair = tuple[str, str]

KEPT, EMPTY, IDENTICAL, DUPLICATE = range(4)  # what becomes of a training pair

LONGEST_LINE = 1 << 18  # bytes: no sentence comes near; memory must not depend on where a file has its newlines

_BUFFER = LONGEST_LINE  # so a longer line never lies in one buffer

log = logging.getLogger(__name__)


def read_lines(path: Path) -> Generator[str, None, None]:
    """The lines of a UTF-8 file, plain or gzip (named `.gz`), without their ends and without a BOM at the start.

    Of a line longer than LONGEST_LINE only the beginning is read, and the log says so. Raises InputError where the file
    cannot be opened, is a damaged gzip file, or is not UTF-8.
    """
    with closing(_read_blocks(path)) as blocks:
        for lines in blocks:
            yield from lines


def read_pairs(source: Path, target: Path) -> Generator[Pair, None, None]:
    """The pairs of two files in step. Raises InputError as read_lines does, and for unequal numbers of lines."""
    counts = [0, 0]

    def counted(blocks: Iterator[list[str]], side: int) -> Iterator[list[str]]:
        for lines in blocks:
            counts[side] += len(lines)
            yield lines

    with closing(_read_blocks(source)) as left, closing(_read_blocks(target)) as right:
        sides = counted(left, 0), counted(right, 1)
        try:
            yield from zip(*map(chain.from_iterable, sides), strict=True)  # zip runs in C: no Python code per line
        except ValueError:  # one of them is longer
            for side in sides:
                deque(side, maxlen=0)
            raise InputError(
                f"{source} has {counts[0]} lines, {target} has {counts[1]}: "
                "each line must translate the same line of the other file"
            ) from None


def _read_blocks(path: Path) -> Generator[list[str], None, None]:
    """The lines as they come, many at a time."""
    number = 0  # of lines that have been read
    try:
        with closing(_blocks(path)) as blocks:
            for block in blocks:
                text = _decode(_cut_first_line(block, path, number), path, number)
                lines = (text.removeprefix("\ufeff") if number == 0 else text).split("\n")
                number += len(lines)
                yield [line.removesuffix("\r") for line in lines] if "\r" in text else lines
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path}:{number + 1}: damaged gzip file ({error}): fetch or compress it again") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}): check the path") from error


def _blocks(path: Path) -> Generator[bytes, None, None]:
    """The bytes of the file, cut at newlines, which are left out: many lines at a time are decoded and split faster."""
    with _open(path) as file:
        parts: list[bytes] = []  # of a line that is not complete, as far as it is of interest
        size = 0
        while chunk := file.read1(_BUFFER):
            lines, newline, rest = chunk.rpartition(b"\n")
            if newline:
                yield b"".join([*parts, lines])
                parts = []
                size = 0
            if size <= LONGEST_LINE:
                parts.append(rest)
                size += len(rest)
        if last := b"".join(parts):
            yield last


def _cut_first_line(block: bytes, path: Path, before: int) -> bytes:
    """The block, with no more of its first line than LONGEST_LINE; the others lay in one buffer, and are shorter."""
    if len(block) <= LONGEST_LINE or block.find(b"\n", 0, LONGEST_LINE + 1) >= 0:
        return block
    line, newline, others = block.partition(b"\n")
    log.warning("%s:%d: longer than %d bytes: only its beginning is read", path, before + 1, LONGEST_LINE)
    return cut_line(line) + newline + others


def cut_line(line: bytes) -> bytes:
    """The first LONGEST_LINE bytes of a longer line of UTF-8, less those of a character that has more."""
    end = LONGEST_LINE
    while end > LONGEST_LINE - 4 and line[end] & 0xC0 == 0x80:  # inside a character
        end -= 1
    return line[:end]


def _open(path: Path) -> io.BufferedReader:
    if path.suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(path, "rb"), _BUFFER)
    return path.open("rb")


def _decode(block: bytes, path: Path, before: int) -> str:
    """The text of some lines; `before` lines of the file came earlier."""
    try:
        return block.decode("utf-8")
    except UnicodeDecodeError as error:
        number = before + block.count(b"\n", 0, error.start) + 1
        column = error.start - block.rfind(b"\n", 0, error.start)
        raise InputError(
            f"{path}:{number}: not UTF-8: byte {column} of the line is 0x{block[error.start]:02x}: "
            "mend the line or convert the file"
        ) from error


def screen_pairs(corpora: Sequence[Iterable[Pair]], config: FilterConfig) -> list[bytes]:
    """For each corpus a byte a pair: KEPT, or why its text is not fit to train on.

    A duplicate is a pair that came before, in whichever corpus. Finding them takes 40 bytes a pair for a while.
    """
    verdicts: list[bytes] = []
    hashes = bytearray()
    drop_identical = config.drop_identical  # looked up once, not for every pair
    drop_duplicates = config.drop_duplicates

    for pairs in corpora:
        codes = bytearray()
        for source, target in pairs:
            if not source or not target or source.isspace() or target.isspace():
                codes.append(EMPTY)
            elif drop_identical and source.strip() == target.strip():
                codes.append(IDENTICAL)
            else:
                codes.append(KEPT)
                if drop_duplicates:
                    text = f"{source.strip()}\n{target.strip()}".encode()
                    hashes += hashlib.blake2b(text, digest_size=8).digest()
        verdicts.append(bytes(codes))

    return _mark_duplicates(verdicts, hashes) if hashes else verdicts


def _mark_duplicates(verdicts: list[bytes], hashes: bytearray) -> list[bytes]:
    """`hashes` has 8 bytes for each pair that is kept so far."""
    keys = np.frombuffer(hashes, dtype=np.uint64)
    order = np.argsort(keys, kind="stable")  # stable: the first of equal pairs is the one that stays
    repeated = order[1:][keys[order[1:]] == keys[order[:-1]]]

    codes = np.frombuffer(b"".join(verdicts), dtype=np.uint8).copy()
    codes[np.flatnonzero(codes == KEPT)[repeated]] = DUPLICATE

    borders = np.cumsum([len(part) for part in verdicts])[:-1]
    return [part.tobytes() for part in np.split(codes, borders)]
