"""What `translate` and `score` share: standard input in blocks of lines, and how many of them are done.

Lines end at the byte 0x0A and nowhere else. A block is what can be read without waiting: one line from a terminal,
thousands from a file, and from a pipe what it has so far. Only one block is kept at a time, so memory does not depend
on the length of the input.
"""

import logging
import shlex
import time
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO

from transformer.data.corpus import LONGEST_LINE, is_blank
from transformer.machine import HeapTrimmer
from transformer.tracking import progress_bar

log = logging.getLogger(__name__)

FIRST_BLOCK = 1 << 14  # bytes: some hundred lines, so that the first translations come soon
BLOCK = 1 << 18  # bytes of a later block: some thousand lines, among which many are of like length


def read_blocks(stdin: BinaryIO) -> Iterator[list[bytes]]:
    """The lines of the input, without their newlines, as they come; never an empty block.

    Of a line longer than LONGEST_LINE, one byte more than that is kept. A byte order mark is no part of the first.
    """
    read = getattr(stdin, "read1", stdin.read)  # read1 returns what is there; read would wait for a full block
    size = FIRST_BLOCK
    unfinished = bytearray()  # the beginning of a line whose end has not been read
    is_start = True
    while chunk := read(size):
        if is_start:
            while len(chunk) < len(BOM_UTF8) and BOM_UTF8.startswith(chunk) and (more := read(size)):
                chunk += more  # a pipe may hand out the mark in pieces
            chunk = chunk.removeprefix(BOM_UTF8)
            is_start = False
        *ends, beginning = chunk.split(b"\n")
        if ends:
            unfinished += ends[0]
            yield [bytes(unfinished[: LONGEST_LINE + 1]), *ends[1:]]
            unfinished.clear()
        unfinished += beginning[: LONGEST_LINE + 1 - len(unfinished)]
        size = min(2 * size, BLOCK)

    if unfinished:
        yield [bytes(unfinished)]


def warn_of_missing_tag(sources: Sequence[str], tags: Sequence[str], *, first_line: int, key: str) -> bool:
    """Log the first source that begins with none of these tags, with the values of `key` to choose from.

    Returns whether there was one. Without tags there is nothing to miss.
    """
    for line, source in enumerate(sources, first_line):
        if tags and not is_blank(source) and not source.lstrip().startswith(tuple(tags)):
            choices = " or ".join(shlex.quote(f"{key}={tag}") for tag in tags)
            log.warning("line %d has no tag, and the run was trained on tagged text alone: choose %s", line, choices)
            return True
    return False


@contextmanager
def throughput(unit: str, stdin: BinaryIO, stdout: BinaryIO) -> Iterator[Callable[[int], None]]:
    """Show how many lines, or other units, are done: the context's value is called with the number of new ones.

    They are shown in a progress bar on a terminal, unless lines are typed or read there; elsewhere in one line of the
    log, at the end. Each call may also give free memory back to the system: of the 1.2 GiB that the demo's model took
    after 9,000 lines in bf16, a fifth was holes in the heap.
    """
    started = time.perf_counter()
    heap = HeapTrimmer()
    count = 0
    is_dialogue = stdin.isatty() or stdout.isatty()

    with progress_bar(None, 0, unit=unit, shown=not is_dialogue) as bar:
        is_live = not bar.disable  # it is disabled when it is closed, too

        def advance(done: int) -> None:
            nonlocal count
            count += done
            bar.update(done)
            heap.trim_if_due()

        yield advance

    if not (is_live or is_dialogue):
        seconds = time.perf_counter() - started
        log.info("%d %s%s in %.1f s, %.1f a second", count, unit, "" if count == 1 else "s", seconds, count / seconds)
