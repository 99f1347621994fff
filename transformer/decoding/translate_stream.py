"""`transformer translate`: standard input to standard output, line for line, whatever the bytes.

Each line of the input gives one line of output, and the last one ends in a newline, too.
"""

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import torch

from transformer.config.jobs import TranslateJob
from transformer.config.settings import SAMPLES_TO_RERANK
from transformer.data.corpus import LONGEST_LINE, cut_line, read_lines, with_tag
from transformer.decoding.loading import load_for
from transformer.decoding.output import Translation, format_translations
from transformer.decoding.sentences import LineCheck, Sentences
from transformer.decoding.stream import read_blocks, throughput, warn_of_missing_tag
from transformer.decoding.translator import Translator
from transformer.errors import InputError
from transformer.machine import resolve_threads

log = logging.getLogger(__name__)


Choose = Callable[[Sequence[Translation]], list[Translation]]  # takes those of one line, gives the best first


def run(job: TranslateJob, stdin: BinaryIO, stdout: BinaryIO, *, choose: Choose | None = None) -> None:
    """Translate until the input ends, flushing after each block; BrokenPipeError is left to the caller.

    `choose` is what a job with `rerank` compares the translations of a line by.
    Lines that are unlike those that the run was trained on are counted, and the log says so at the end.

    Raises InputError where there is no model, for settings that cannot be, for a line that is too long or not UTF-8
    under `strict`, and for prefixes that are not as many as lines; CheckpointError where a run is damaged.
    """
    torch.set_num_threads(resolve_threads(job.threads))
    translator = load_for(job)
    sentences = Sentences.of(Path(job.run_dir)) if job.split else None
    line_check = LineCheck(Path(job.run_dir), translator.tokenizers.source)
    _translate(
        translator, job, [], None, line=1, choose=choose
    )  # of nothing: an error in the settings shows before anything is read
    if stdin.isatty():
        log.info("ready: type a sentence; Ctrl-D ends")

    is_warned = job.tag is not None
    line = 1
    with throughput("line", stdin, stdout) as advance, closing(_prefixes(job.prefix)) as prefixes:
        for block in read_blocks(stdin):
            lines = [_decode(text, line + n, strict=job.strict) for n, text in enumerate(block)]
            texts = [with_tag(text, job.tag) for text in lines]
            is_warned = is_warned or warn_of_missing_tag(texts, translator.tags, first_line=line, key="tag")
            block_prefixes = None if job.prefix is None else list(islice(prefixes, len(texts)))
            if block_prefixes is not None and len(block_prefixes) < len(texts):
                raise InputError(
                    f"{job.prefix} has {line - 1 + len(block_prefixes)} lines, and there are more to translate: give a "
                    "prefix, or a blank line, for each"
                )

            if sentences is not None:
                output = _translate_sentences(translator, job, lines, sentences, line=line)
            else:
                line_check.add(texts)
                translations = _translate(translator, job, texts, block_prefixes, line=line, choose=choose)
                output = format_translations(translations, job.format, first_line=line)
            stdout.write(output.encode("utf-8"))
            stdout.flush()

            line += len(block)
            advance(len(block))

        if next(prefixes, None) is not None:
            raise InputError(f"{job.prefix}:{line}: there are only {line - 1} lines to translate: leave the rest out")
    line_check.warn("translate them sentence by sentence, with split=true")


def _translate(
    translator: Translator,
    job: TranslateJob,
    texts: Sequence[str],
    prefixes: Sequence[str] | None,
    *,
    line: int,
    choose: Choose | None,
) -> list[list[Translation]]:
    """The translations of some lines, the first of which is `line`: searched or sampled, by the job's settings."""
    if choose is None:
        return _find(translator, job, texts, prefixes, line=line, count=job.n_best)

    beam_size = translator.search.beam_size
    default = SAMPLES_TO_RERANK if job.sample.is_wanted else beam_size
    count = max(job.n_best, job.candidates or default)
    if count > beam_size and not job.sample.is_wanted:
        key = "candidates" if job.candidates else "n_best"
        raise InputError(f"{key}={count} must be at most search.beam_size={beam_size}: raise that, or lower it")
    found = _find(translator, job, texts, prefixes, line=line, count=count)
    return [choose(translations)[: job.n_best] for translations in found]


def _find(
    translator: Translator,
    job: TranslateJob,
    texts: Sequence[str],
    prefixes: Sequence[str] | None,
    *,
    line: int,
    count: int,
) -> list[list[Translation]]:
    """`count` translations of each of these lines, as far as there are so many."""
    if not job.sample.is_wanted:
        return translator.translate_n_best(
            texts, count, prefixes=prefixes, align=job.align, first_line=line, strict=job.strict
        )

    temperature = job.sample.temperature
    return translator.sample(
        texts,
        count,
        temperature=1.0 if temperature is None else temperature,
        top_k=job.sample.top_k,
        top_p=job.sample.top_p,
        seed=job.sample.seed,
        prefixes=prefixes,
        align=job.align,
        first_line=line,
        strict=job.strict,
    )


def _translate_sentences(
    translator: Translator, job: TranslateJob, lines: Sequence[str], sentences: Sentences, *, line: int
) -> str:
    """The translations of some lines, sentence by sentence, as lines of text; the first of them is `line`."""
    by_line = sentences.split(lines)
    translations = translator.translate(
        [with_tag(text, job.tag) for texts in by_line for text in texts],
        lines=[number for number, texts in enumerate(by_line, line) for _ in texts],
        strict=job.strict,
    )
    joined = sentences.join(translations, map(len, by_line))
    return "".join(f"{text}\n" for text in joined)


def _prefixes(path: str | None) -> Generator[str, None, None]:
    """The lines of a file, or nothing where there is no file."""
    if path is not None:
        yield from read_lines(Path(path))


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
