"""`transformer translate`: standard input to standard output, line for line, whatever the bytes.

Lines end at the byte 0x0A and nowhere else. Each gives one line of output, and the last one ends in a newline, too. A
block is what can be read without waiting: one line from a terminal, thousands from a file, and from a pipe what it has
so far. Only one block is kept at a time, so memory does not depend on the length of the input.
"""

import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import torch

from transformer.config.jobs import TranslateJob
from transformer.data.corpus import LONGEST_LINE, cut_line, read_lines, with_tag
from transformer.decoding.loading import load_for
from transformer.decoding.output import Translation, format_translations
from transformer.decoding.translator import Translator
from transformer.errors import InputError
from transformer.machine import HeapTrimmer, resolve_threads
from transformer.tracking import progress_bar

log = logging.getLogger(__name__)

FIRST_BLOCK = 1 << 14  # bytes: some hundred lines, so that the first translations come soon
BLOCK = 1 << 18  # bytes of a later block: some thousand lines, among which many are of like length


def run(job: TranslateJob, stdin: BinaryIO, stdout: BinaryIO) -> None:
    """Translate until the input ends, flushing after each block; BrokenPipeError is left to the caller.

    Raises InputError where there is no model, for settings that cannot be, for a line that is too long or not UTF-8
    under `strict`, and for prefixes that are not as many as lines.
    """
    torch.set_num_threads(resolve_threads(job.threads))
    translator = load_for(job)
    _translate(translator, job, [], None, line=1)  # of nothing: an error in the settings shows before anything is read

    line = 1
    with throughput("line", stdin, stdout) as advance, closing(_prefixes(job.prefix)) as prefixes:
        for block in read_blocks(stdin):
            texts = [with_tag(_decode(text, line + n, strict=job.strict), job.tag) for n, text in enumerate(block)]
            block_prefixes = None if job.prefix is None else list(islice(prefixes, len(texts)))
            if block_prefixes is not None and len(block_prefixes) < len(texts):
                raise InputError(
                    f"{job.prefix} has {line - 1 + len(block_prefixes)} lines, and there are more to translate: give a "
                    "prefix, or a blank line, for each"
                )

            translations = _translate(translator, job, texts, block_prefixes, line=line)
            stdout.write(format_translations(translations, job.format, first_line=line).encode("utf-8"))
            stdout.flush()

            line += len(block)
            advance(len(block))

        if next(prefixes, None) is not None:
            raise InputError(f"{job.prefix}:{line}: there are only {line - 1} lines to translate: leave the rest out")


def _translate(
    translator: Translator, job: TranslateJob, texts: Sequence[str], prefixes: Sequence[str] | None, *, line: int
) -> list[list[Translation]]:
    """The translations of some lines, the first of which is `line`: searched or sampled, by the job's settings."""
    if not job.sample.is_wanted:
        return translator.translate_n_best(
            texts, job.n_best, prefixes=prefixes, align=job.align, first_line=line, strict=job.strict
        )

    temperature = job.sample.temperature
    return translator.sample(
        texts,
        job.n_best,
        temperature=1.0 if temperature is None else temperature,
        top_k=job.sample.top_k,
        top_p=job.sample.top_p,
        seed=job.sample.seed,
        prefixes=prefixes,
        align=job.align,
        first_line=line,
        strict=job.strict,
    )


def _prefixes(path: str | None) -> Generator[str, None, None]:
    """The lines of a file, or nothing where there is no file."""
    if path is not None:
        yield from read_lines(Path(path))


def read_blocks(stdin: BinaryIO) -> Iterator[list[bytes]]:
    """The lines of the input, without their newlines, as they come; never an empty block.

    Of a line longer than LONGEST_LINE, one byte more than that is kept.
    """
    read = getattr(stdin, "read1", stdin.read)  # read1 returns what is there; read would wait for a full block
    size = FIRST_BLOCK
    unfinished = bytearray()  # the beginning of a line whose end has not been read
    while chunk := read(size):
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


def _decode(line: bytes, number: int, *, strict: bool) -> str:
    """A line as text. One that is too long is truncated, bytes that are not UTF-8 are replaced; `strict` raises."""
    if len(line) > LONGEST_LINE:
        problem = f"line {number}: longer than {LONGEST_LINE} bytes"
        if strict:
            raise InputError(f"{problem}: split the line, or leave out strict=true to have it truncated")
        log.warning("%s: only its beginning is read", problem)
        line = cut_line(line)

    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        problem = f"line {number}: not UTF-8 at byte {error.start + 1}"
        if strict:
            raise InputError(
                f"{problem}: mend the line, or leave out strict=true to have U+FFFD in its place"
            ) from None
        log.warning("%s; bytes that cannot be read become U+FFFD", problem)
        return line.decode("utf-8", errors="replace")
