"""Sentence pairs from text files: line n of one file translates line n of the other.

Lines are split at the byte 0x0A and nowhere else. Text mode and `str.splitlines` also split at a lone carriage return,
U+2028, U+0085 and others; from there on, every pair would be shifted. Whatever is wrong with a file is an InputError
that names the file and the line. Text is UTF-8, or UTF-16 behind a byte-order mark, as Excel writes it.

`with_tag` puts a tag in front of a source: for text that was translated back (Caswell et al., 2019), or for one of
several target languages (Johnson et al., 2017).

`screen_pairs` decides which pairs have a text that is fit to train on. Only training pairs are screened: whole pairs,
and each that is dropped is counted.
"""

import codecs
import hashlib
import io
import logging
import re
import unicodedata
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from transformer.config.settings import FilterConfig
from transformer.data.compression import DAMAGE, damaged, open_bytes
from transformer.errors import InputError
from transformer.files import Digest

Pair = tuple[str, str]

KEPT, EMPTY, IDENTICAL, DUPLICATE = range(4)  # what becomes of a training pair

LONGEST_LINE = 1 << 18  # bytes: no sentence comes near; memory must not depend on where a file has its newlines

_INNER_END = re.compile(  # see has_several_sentences
    r"""[.!?…؟۔।。！？｡](?<!\b\w[.])(?<!\b\d\d[.])"""
    r"""(?<!\b(?:Mr|Ms|Dr|St)[.])(?<!\bMrs[.])(?<!\bProf[.])(?:(?<=[。！？｡])|["'”’»)\]]*\s)\W{0,20}\w"""
)

# What the bytes of a file have where `digest_pairs` writes others, each with its rarest byte: one is found much faster.
_OTHER_TEXT = (
    (b"\r\n", 0),
    *((b"\n" + bom, 1) for bom in (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)),
)

_utf16 = set[Path]()  # the files that are

_BUFFER = LONGEST_LINE  # so a longer line never lies in one buffer

log = logging.getLogger(__name__)


# ---- reading --------------------------------------------------------------------------------------------------------


def read_lines(path: Path) -> Generator[str, None, None]:
    """The lines of a file, plain or compressed, without their ends and without a BOM at the start.

    Of a line longer than LONGEST_LINE only the beginning is read, and the log says so. Raises InputError where the file
    cannot be opened, does not decompress to its end, or is no text.
    """
    with closing(_read_line_blocks(path)) as blocks:
        for lines in blocks:
            yield from lines


def read_pairs(source: Path, target: Path, *, skip: int = 0) -> Generator[Pair, None, None]:
    """The pairs of two files in step, but for the first `skip`, whose text is not looked at.

    Raises InputError as read_lines does, and for unequal numbers of lines.
    """
    line_counts = [skip, skip]
    with (
        closing(_read_line_blocks(source, skip=skip)) as source_blocks,
        closing(_read_line_blocks(target, skip=skip)) as target_blocks,
    ):
        source_lines = chain.from_iterable(_count_lines(source_blocks, line_counts, side=0))
        target_lines = chain.from_iterable(_count_lines(target_blocks, line_counts, side=1))
        try:
            yield from zip(source_lines, target_lines, strict=True)  # zip runs in C: no Python code per line
        except ValueError:  # one file is longer: both are read to their ends, so that the error can say by how much
            deque(source_lines, maxlen=0)
            deque(target_lines, maxlen=0)
            raise InputError(
                f"{source} has {line_counts[0]} lines, {target} has {line_counts[1]}: "
                "each line must translate the same line of the other file"
            ) from None


def _count_lines(blocks: Iterator[list[str]], line_counts: list[int], *, side: int) -> Iterator[list[str]]:
    """The same blocks; `line_counts[side]` is how many lines they have had so far."""
    for lines in blocks:
        line_counts[side] += len(lines)
        yield lines


def _read_line_blocks(path: Path, *, skip: int = 0) -> Generator[list[str], None, None]:
    """The lines of a file in lists of many, which are decoded and split faster than line by line.

    Those of the first `skip` lines that are in a block without others are only counted.
    """
    lines_read = 0
    try:
        with closing(_read_byte_blocks(path)) as blocks:
            for block in blocks:
                unwanted = skip - lines_read
                newlines = block.count(b"\n") if unwanted > 0 else 0
                if newlines < unwanted:
                    lines_read += newlines + 1
                    continue

                text = _decode(_cut_first_line(block, path, before=lines_read), path, before=lines_read)
                if lines_read == 0:
                    text = text.removeprefix("\ufeff")

                lines = text.split("\n")
                lines_read += len(lines)
                if "\r" in text:
                    lines = [line.removesuffix("\r") for line in lines]
                yield lines[unwanted:] if unwanted > 0 else lines
    except DAMAGE as error:
        raise damaged(path, lines_read + 1, error) from error


def _read_byte_blocks(path: Path) -> Generator[bytes, None, None]:
    """The bytes of a file in blocks of whole lines; the newline at the end of a block is left out."""
    with open_text(path) as file:
        unfinished: list[bytes] = []  # the parts of the line whose end has not been read yet
        unfinished_size = 0
        while chunk := file.read1(_BUFFER):
            finished, newline, rest = chunk.rpartition(b"\n")
            if newline:
                yield b"".join([*unfinished, finished])
                unfinished = []
                unfinished_size = 0

            if unfinished_size <= LONGEST_LINE:  # what goes beyond is not read, so it is not kept
                unfinished.append(rest)
                unfinished_size += len(rest)

        last_line = b"".join(unfinished)
        if last_line:
            yield last_line


def open_text(path: Path) -> io.BufferedReader:
    """What a text file holds, decompressed, as UTF-8. It or its reading raises one of DAMAGE where that fails.

    What is no UTF-16 becomes bytes that are no UTF-8.
    """
    file = open_bytes(path, _BUFFER)
    try:
        start = file.peek(4)[:4]  # of UTF-32, which is no text here, it begins alike
        is_utf16 = start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) and start != codecs.BOM_UTF32_LE
    except BaseException:
        file.close()
        raise
    if not is_utf16:
        return file
    _tell_of_utf16(path)
    return io.BufferedReader(_FromUtf16(file), _BUFFER)


def _tell_of_utf16(path: Path) -> None:
    """Log it once, though text is read several times."""
    if path not in _utf16:
        _utf16.add(path)
        log.info("%s: read as UTF-16, which Excel writes", path)


class _FromUtf16(io.RawIOBase):
    """The text of a UTF-16 file as UTF-8, without its byte-order mark."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-16")("surrogatepass")
        self._text = memoryview(b"")  # that is to be given out

    def readable(self) -> bool:
        """It is for reading only."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill the buffer as far as the next piece reaches; 0 at the end."""
        while not self._text and (chunk := self._file.read1(_BUFFER)):
            self._text = memoryview(self._decoder.decode(chunk).encode("utf-8", "surrogatepass"))
        if not self._text and self._decoder.getstate()[0]:  # half a character is left
            self._text = memoryview(b"\xff")
            self._decoder.reset()
        size = min(len(buffer), len(self._text))
        buffer[:size] = self._text[:size]
        self._text = self._text[size:]
        return size

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


def _cut_first_line(block: bytes, path: Path, *, before: int) -> bytes:
    """The block, with no more of its first line than LONGEST_LINE; `before` lines of the file came earlier.

    Only the first line can be longer: the others lay in one buffer.
    """
    if len(block) <= LONGEST_LINE or block.find(b"\n", 0, LONGEST_LINE + 1) >= 0:
        return block
    line, newline, others = block.partition(b"\n")
    log.warning("%s:%d: longer than %d bytes: only its beginning is read", path, before + 1, LONGEST_LINE)
    return cut_line(line) + newline + others


def cut_line(line: bytes) -> bytes:
    """The first LONGEST_LINE bytes of a longer line of UTF-8, or up to three fewer, so that no character is cut."""
    end = LONGEST_LINE
    while end > LONGEST_LINE - 4 and line[end] & 0xC0 == 0x80:  # this byte continues a character
        end -= 1
    return line[:end]


def _decode(block: bytes, path: Path, *, before: int) -> str:
    """The text of some lines; `before` lines of the file came earlier."""
    try:
        return block.decode("utf-8")
    except UnicodeDecodeError as error:
        number = before + block.count(b"\n", 0, error.start) + 1
        column = error.start - block.rfind(b"\n", 0, error.start)
        if path in _utf16:
            raise InputError(
                f"{path}:{number}: not valid UTF-16, though the file begins as UTF-16: save the file again"
            ) from error
        raise InputError(
            f"{path}:{number}: not UTF-8: byte {column} of the line is 0x{block[error.start]:02x}: mend the line "
            "or convert the file (iconv -f cp1252 -t UTF-8, if an older Windows program wrote it)"
        ) from error


def digest_lines(path: Path) -> tuple[Digest, bool]:
    """Size and SHA-256 of a file, read in one pass, and whether `digest_pairs` has the same for its lines.

    It has another one of UTF-16, and where a line ends in "\r\n", is too long, begins with a BOM, or has no end.
    Raises OSError.
    """
    sha256 = hashlib.sha256()
    size = 0
    unfinished = 0  # bytes of the line whose end has not been read yet
    tail = b"\n"  # the last bytes of what has been read
    are_alike = True
    with path.open("rb") as file:
        while block := file.read(_BUFFER):
            sha256.update(block)
            size += len(block)

            text = tail + block
            tail = text[-3:]
            end = block.find(b"\n")
            longest = unfinished + (len(block) if end < 0 else end)  # no other line of the block can be too long
            unfinished = longest if end < 0 else len(block) - block.rfind(b"\n") - 1
            is_marked = any(mark[byte : byte + 1] in text and mark in text for mark, byte in _OTHER_TEXT)
            are_alike &= longest <= LONGEST_LINE and not is_marked
    return Digest(size, sha256.hexdigest()), are_alike and tail.endswith(b"\n")


def digest_pairs(pairs: Iterable[Pair]) -> list[str]:
    """The SHA-256 of each side as a text file that `read_lines` gives it back from: every line ends in a newline.

    So the same text has the same digest in whatever it is kept. A line that no text file gives back is marked by a byte
    that is not UTF-8.
    """
    sides = (hashlib.sha256(), hashlib.sha256())
    for pair in pairs:
        for side, text in zip(sides, pair, strict=True):
            line = text.encode()
            is_plain = len(line) <= LONGEST_LINE and not text.endswith("\r") and not text.startswith("\ufeff")
            side.update(line + b"\n" if is_plain else b"\xff" + line + b"\n")
    return [side.hexdigest() for side in sides]


# ---- tags -----------------------------------------------------------------------------------------------------------


def with_tag(source: str, tag: str | None) -> str:
    """The source behind its tag and a space. A blank one stays as it is: a tag alone is nothing to translate."""
    return source if tag is None or is_blank(source) else f"{tag} {source}"


def is_blank(text: str) -> bool:
    """Whether nothing in the text is visible: spaces of all kinds, controls, zero-width and direction marks."""
    return all(unicodedata.category(character) in ("Zs", "Zl", "Zp", "Cc", "Cf") for character in text)


def has_several_sentences(text: str) -> bool:
    """Whether a sentence seems to end before the text does: a mark, what closes a quotation, a space, and more words.

    Chinese and Japanese need no space. A full stop after one letter or at most two digits ends none: "z. B.", "3. Mai";
    nor does one after a title of a name ("Dr. Weiß"). After other abbreviations it is taken for an end.
    """
    return _INNER_END.search(text) is not None


# ---- screening ------------------------------------------------------------------------------------------------------


def screen_pairs(corpora: Sequence[Iterable[Pair]], config: FilterConfig) -> list[bytes]:
    """For each corpus a byte a pair: KEPT, or why its text is not fit to train on.

    A duplicate is a pair that came before, in whichever corpus. Finding them takes 40 bytes a pair for a while.
    """
    verdicts: list[bytes] = []  # of each corpus
    hashes = bytearray()  # 8 bytes for each pair that is kept, of all corpora
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
    """The verdicts, with DUPLICATE for each kept pair whose hash came before; `hashes` has 8 bytes a kept pair."""
    # Sort the hashes, so that equal ones are neighbours. The sort is stable: the first of equal pairs stays.
    keys = np.frombuffer(hashes, dtype=np.uint64)
    order = np.argsort(keys, kind="stable")
    equals_previous = keys[order[1:]] == keys[order[:-1]]
    repeated = order[1:][equals_previous]

    # The n-th hash is that of the n-th kept pair.
    codes = np.frombuffer(b"".join(verdicts), dtype=np.uint8).copy()
    kept = np.flatnonzero(codes == KEPT)
    codes[kept[repeated]] = DUPLICATE

    # Cut them into corpora again.
    borders = np.cumsum([len(part) for part in verdicts])[:-1]
    return [part.tobytes() for part in np.split(codes, borders)]
