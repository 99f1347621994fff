"""What `translate` and `score` share: input in blocks of lines, what is written of each, and how many are done.

Lines end at the byte 0x0A and nowhere else. A block is what can be read without waiting: one line from a terminal,
thousands from a file, and from a pipe what it has so far. Only one block is kept at a time, so memory does not depend
on the length of the input. `stream` writes blocks as they come; `bulk` keeps each of them, and goes on after a kill.
"""

import logging
import time
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, TypeVar

from transformer.data.corpus import LONGEST_LINE
from transformer.machine import HeapTrimmer
from transformer.tracking import progress_bar, rate_and_rest

log = logging.getLogger(__name__)

FIRST_BLOCK = 1 << 14  # bytes: some hundred lines, so that the first translations come soon
BLOCK = 1 << 18  # bytes of a later block: some thousand lines, among which many are of like length
LOG_SECONDS = 60.0  # between two lines of the log that say how far a file is

Item = TypeVar("Item")
Tally = Mapping[str, float]  # what is counted of some lines, by name


@dataclass(frozen=True)
class Output:
    """What comes of a block: lines of output, and what is counted, which is judged once it is summed over all."""

    text: str
    tally: Tally


Work = Callable[[list[Item], int], Output]  # is given a block, and the number of its first line


def summed(tallies: Iterable[Tally]) -> dict[str, float]:
    """The sum of what was counted, name by name."""
    total: dict[str, float] = {}
    for tally in tallies:
        for name, amount in tally.items():
            total[name] = total.get(name, 0) + amount
    return total


def stream(blocks: Iterable[list[Item]], work: Work[Item], stdout: BinaryIO, *, unit: str, is_dialogue: bool) -> Tally:
    """Write what comes of each block, and flush it, until there are no more; the sum of what was counted."""
    total: Tally = {}
    line = 1
    with throughput(unit, is_shown=not is_dialogue) as advance:
        for block in blocks:
            output = work(block, line)
            stdout.write(output.text.encode("utf-8"))
            stdout.flush()
            total = summed((total, output.tally))
            line += len(block)
            advance(len(block))
    return total


def read_blocks(read: Callable[[int], bytes]) -> Iterator[list[bytes]]:
    """The lines of the input, without their newlines; never an empty block.

    `read` is given a number of bytes, and returns them or fewer, none at the end: a file's `read1` returns what is
    there, and `read` waits for all of them. Of a line longer than LONGEST_LINE, one byte more than that is kept. A byte
    order mark is no part of the first.
    """
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


@contextmanager
def throughput(
    unit: str, *, is_shown: bool, total: int | None = None, done: int = 0
) -> Iterator[Callable[[int], None]]:
    """Show how many lines, or other units, are done: the context's value is called with the number of new ones.

    They are shown in a progress bar on a terminal, unless lines are typed or read there; elsewhere in one line of the
    log, at the end, and now and then where the `total` is known, of which some may be `done` before. Each call may also
    give free memory back to the system: of the 1.2 GiB that the demo's model took after 9,000 lines in bf16, a fifth
    was holes in the heap.
    """
    started = logged = time.perf_counter()
    heap = HeapTrimmer()
    count = 0

    with progress_bar(total, done, unit=unit, shown=is_shown) as bar:
        is_live = not bar.disable  # it is disabled when it is closed, too

        def advance(new: int) -> None:
            nonlocal count, logged
            count += new
            now = time.perf_counter()
            if total is not None:
                rate, rest = rate_and_rest(count, total - done - count, seconds=now - started)
                bar.set_postfix_str(f"{rate} {unit}s/s", refresh=False)
                if is_shown and not is_live and now - logged > LOG_SECONDS:
                    logged = now
                    log.info("%d of %d %ss, %s a second, %s left", done + count, total, unit, rate, rest)
            bar.update(new)
            heap.trim_if_due()

        yield advance

    if is_shown and not is_live:
        seconds = time.perf_counter() - started
        log.info("%d %s%s in %.1f s, %.1f a second", count, unit, "" if count == 1 else "s", seconds, count / seconds)
