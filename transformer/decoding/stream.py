"""`transformer translate`: standard input to standard output, line for line, whatever the bytes.

Lines end at the byte 0x0A and nowhere else; each gives one line, and the last one ends in a newline too. A block is
what can be read without waiting: one line from a terminal, thousands from a file, and what a pipe has so far.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import torch

from transformer.config.jobs import TranslateJob
from transformer.data.corpus import LONGEST_LINE, cut_line
from transformer.decoding.translator import load_translator
from transformer.errors import InputError
from transformer.machine import resolve_threads

log = logging.getLogger(__name__)

BLOCK = 1 << 18  # bytes: some thousand lines


def run(job: TranslateJob, stdin: BinaryIO, stdout: BinaryIO) -> None:
    """Translate until the input ends, flushing after each block; BrokenPipeError is left to the caller.

    Raises InputError where there is no model, or for a line that is too long under `strict`.
    """
    torch.set_num_threads(resolve_threads(job.threads))
    translator = load_translator(
        Path(job.run_dir), checkpoint=job.checkpoint, search=job.search, device=job.device, precision=job.precision
    )
    line = 1
    for block in _blocks(stdin):
        texts = [_decode(text, line + n, strict=job.strict) for n, text in enumerate(block)]
        translations = translator.translate(texts, first_line=line, strict=job.strict)
        stdout.write("".join(f"{text}\n" for text in translations).encode("utf-8"))
        stdout.flush()
        line += len(block)


def _blocks(stdin: BinaryIO) -> Iterator[list[bytes]]:
    """The lines of the input, without their newlines, as they come; never an empty block.

    Of a line longer than LONGEST_LINE, one byte more than that is kept.
    """
    read = getattr(stdin, "read1", stdin.read)  # read1 returns what is there; read would wait for a full block
    begun = bytearray()  # of a line whose end has not been read
    while chunk := read(BLOCK):
        *ended, rest = chunk.split(b"\n")
        if ended:
            begun += ended[0]
            yield [bytes(begun[: LONGEST_LINE + 1]), *ended[1:]]
            begun.clear()
        begun += rest[: LONGEST_LINE + 1 - len(begun)]
    if begun:
        yield [bytes(begun)]


def _decode(line: bytes, number: int, *, strict: bool) -> str:
    if len(line) > LONGEST_LINE:
        problem = f"line {number}: longer than {LONGEST_LINE} bytes"
        if strict:
            raise InputError(f"{problem}: split the line, or leave out strict=true to have it truncated")
        log.warning("%s: only its beginning is read", problem)
        line = cut_line(line)

    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        log.warning("line %d: not UTF-8 at byte %d; what cannot be read becomes U+FFFD", number, error.start + 1)
        return line.decode("utf-8", errors="replace")
