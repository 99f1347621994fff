"""Sentence pairs from files: line n of one translates line n of the other.

Lines are split at the byte 0x0A and nowhere else: text mode and `str.splitlines` also split at a lone carriage return,
U+2028, U+0085 and others, and from there on every pair would be shifted. Whatever is wrong with a file is an InputError
naming file and line. Only training pairs are filtered: whole pairs, with counts.
"""

import gzip
import hashlib
import io
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO

from transformer.config import FilterConfig
from transformer.errors import InputError

Pair = tuple[str, str]

_BUFFER = 1 << 20


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file, plain or gzip (named `.gz`), without their ends; a BOM at the start is no text.

    Raises InputError where the file cannot be opened, is a damaged gzip file, or is not UTF-8.
    """
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                text = _decode(line, path, number)
                if number == 1:
                    text = text.removeprefix("\ufeff")
                yield text.removesuffix("\n").removesuffix("\r")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path}:{number + 1}: damaged gzip file ({error}): fetch or compress it again") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}): check the path") from error


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(path, "rb"), _BUFFER)  # buffered once more: lines come faster by half
    return path.open("rb", buffering=_BUFFER)


def _decode(line: bytes, path: Path, number: int) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}:{number}: not UTF-8: byte {error.start + 1} of the line is 0x{line[error.start]:02x}: "
            "mend the line or convert the file"
        ) from error


def read_pairs(source: Path, target: Path) -> Iterator[Pair]:
    """The pairs of two files in step. Raises InputError as read_lines does, and for unequal numbers of lines."""
    left, right = read_lines(source), read_lines(target)
    for before, (source_text, target_text) in enumerate(zip_longest(left, right)):
        if source_text is None or target_text is None:
            longer = before + 1 + sum(1 for _ in left) + sum(1 for _ in right)  # the shorter one has nothing left
            counts = (before, longer) if source_text is None else (longer, before)
            raise InputError(
                f"{source} has {counts[0]} lines, {target} has {counts[1]}: "
                "each line must translate the same line of the other file"
            )
        yield source_text, target_text


def clean_pairs(pairs: Iterable[Pair], config: FilterConfig, dropped: Counter[str]) -> Iterator[Pair]:
    """The pairs that stay, judged by their text; `dropped` counts the others by reason.

    Finding duplicates keeps 8 bytes of hash for each pair, about 100 as Python counts.
    """
    seen: set[bytes] = set()
    for pair in pairs:
        reason = _reason(pair, config, seen)
        if reason is None:
            yield pair
        else:
            dropped[reason] += 1


def _reason(pair: Pair, config: FilterConfig, seen: set[bytes]) -> str | None:
    source, target = (text.strip() for text in pair)
    if not source or not target:
        return "empty"
    if config.drop_identical and source == target:
        return "identical"
    if config.drop_duplicates:
        key = hashlib.blake2b(f"{source}\n{target}".encode(), digest_size=8).digest()
        if key in seen:
            return "duplicate"
        seen.add(key)
    return None
