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
from transformer.decoding.translator import load_translator
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
        texts = [_decode(text, line + n) for n, text in enumerate(block)]
        translations = translator.translate(texts, first_line=line, strict=job.strict)
        stdout.write("".join(f"{text}\n" for text in translations).encode("utf-8"))
        stdout.flush()
        line += len(block)


def _blocks(stdin: BinaryIO) -> Iterator[list[bytes]]:
    """The lines of the input, without their newlines, as they come; never an empty block."""
    read = getattr(stdin, "read1", stdin.read)  # read1 returns what is there; read would wait for a full block
    begun: list[bytes] = []  # the parts of a line whose end has not been read
    while chunk := read(BLOCK):
        *ended, rest = chunk.split(b"\n")
        if ended:
            yield [b"".join((*begun, ended[0])), *ended[1:]]
            begun = []
        if rest:
            begun.append(rest)
    if begun:
        yield [b"".join(begun)]


def _decode(line: bytes, number: int) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        log.warning("line %d: not UTF-8 at byte %d; what cannot be read becomes U+FFFD", number, error.start + 1)
        return line.decode("utf-8", errors="replace")
