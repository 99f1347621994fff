"""`transformer translate`: standard input to standard output, or a file to a file, line for line, whatever the bytes.

Each line of the input gives one line of output, and the last one ends in a newline, too.
"""

import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import torch

from transformer import registry
from transformer.config.jobs import TranslateJob
from transformer.config.settings import SAMPLES_TO_RERANK
from transformer.data.corpus import LONGEST_LINE, cut_line, is_blank, read_lines, with_tag
from transformer.decoding.bulk import choose_device, from_files
from transformer.decoding.input_file import read_file
from transformer.decoding.loading import load_for
from transformer.decoding.output import Translation, format_translations
from transformer.decoding.stream import Output, Tally, read_blocks, stream
from transformer.errors import InputError
from transformer.machine import resolve_threads
from transformer.plugins import LineChecker, PairFilter, Splitter

UNIT = "line"
TRANSLATED = "translations"  # of lines that are not blank
EMPTY = "empty translations"  # of these

Choose = Callable[[Sequence[Translation]], list[Translation]]  # takes those of one line, gives the best first
_Line = tuple[bytes, str]  # of the input, and the prefix of its translation

log = logging.getLogger(__name__)


def run(job: TranslateJob, stdin: BinaryIO, stdout: BinaryIO, *, choose: Choose | None = None) -> None:
    """Translate until the input ends, flushing after each block; BrokenPipeError is left to the caller.

    `choose` is what a job with `rerank` compares the translations of a line by. From a file to a file, blocks are kept,
    and the same command goes on where it was killed: see `bulk`. Lines that are unlike those that the run was trained
    on are counted, and the log says so at the end.

    Raises InputError where there is no model, for settings that cannot be, for a line that is too long or not UTF-8
    under `strict`, and for prefixes that are not as many as lines; CheckpointError where a run is damaged; Stopped
    where a signal comes and blocks are kept.
    """
    choose_device(job)
    torch.set_num_threads(resolve_threads(job.threads))
    work = _Work(job, choose)

    tally: Tally | None
    if job.input is None:
        if stdin.isatty():
            log.info("ready: type a sentence; Ctrl-D ends")
        blocks = _with_prefixes(read_blocks(getattr(stdin, "read1", stdin.read)), job.prefix)
        tally = stream(blocks, work, stdout, unit=UNIT, is_dialogue=stdin.isatty() or stdout.isatty())
    else:
        source = Path(job.input)
        files = {"input": job.input} | ({} if job.prefix is None else {"prefix": job.prefix})
        tally = from_files(
            job,
            lambda: _with_prefixes(read_file(source), job.prefix),
            work,
            translator=work.translator,
            files=files,
            stdout=stdout,
            unit=UNIT,
            finish=None if work.pairs is None else work.pairs.finish,
        )
    if tally is not None:
        _warn_of_nothing(tally)
        if work.line_check is not None:
            work.line_check.warn(tally, "translate them sentence by sentence, with split=true")
        if work.pairs is not None:
            work.pairs.report(tally)


class _Work:
    """What is done with a block: lines of the input, each with its prefix."""

    def __init__(self, job: TranslateJob, choose: Choose | None) -> None:
        self._job = job
        self._choose = choose
        self._sentences: Splitter | None = registry.find("lines", "split")(job) if job.split else None
        self.pairs: PairFilter | None = registry.find("lines", "keep")(job) if job.keep is not None else None
        self.translator = load_for(job)
        self.line_check: LineChecker | None = None
        if registry.has("lines", "check"):
            self.line_check = registry.find("lines", "check")(Path(job.run_dir), self.translator.tokenizers.source)
        # Of nothing: an error in the settings shows at once.
        self._translate([], None, line=1)

    def __call__(self, block: list[_Line], line: int) -> Output:
        """The lines of output for some lines, the first of which is `line`."""
        job = self._job
        lines = [_decode(text, line + n, strict=job.strict) for n, (text, _) in enumerate(block)]
        texts = [with_tag(text, job.tag) for text in lines]
        if self._sentences is not None:
            joined = self._translate_sentences(lines, self._sentences, line=line)
            return Output("".join(f"{text}\n" for text in joined), _counted(lines, joined))

        prefixes = None if job.prefix is None else [prefix for _, prefix in block]
        translations = self._translate(texts, prefixes, line=line)
        tally = {} if self.line_check is None else self.line_check.count(texts)
        if self.pairs is not None:
            draft = self.pairs.draft(lines, [best for [best] in translations], first_line=line)
            return Output(draft.text, {**tally, **draft.tally})
        found = _counted(lines, [best.text for best, *_ in translations])
        return Output(format_translations(translations, job.format, first_line=line), {**tally, **found})

    def _translate(self, texts: Sequence[str], prefixes: Sequence[str] | None, *, line: int) -> list[list[Translation]]:
        """The translations of some lines, the first of which is `line`: searched or sampled, by the job's settings."""
        job = self._job
        if self._choose is None:
            return self._find(texts, prefixes, line=line, count=job.n_best)

        beam_size = self.translator.search.beam_size
        default = SAMPLES_TO_RERANK if job.sample.is_wanted else beam_size
        count = max(job.n_best, job.candidates or default)
        if count > beam_size and not job.sample.is_wanted:
            key = "candidates" if job.candidates else "n_best"
            raise InputError(f"{key}={count} must be at most search.beam_size={beam_size}: raise that, or lower it")
        if count == 1:
            raise InputError(
                "rerank compares several translations of a line, and search.beam_size=1 finds one: raise it"
            )
        found = self._find(texts, prefixes, line=line, count=count)
        return [self._choose(translations)[: job.n_best] for translations in found]

    def _find(
        self, texts: Sequence[str], prefixes: Sequence[str] | None, *, line: int, count: int
    ) -> list[list[Translation]]:
        """`count` translations of each of these lines, as far as there are so many."""
        job = self._job
        if not job.sample.is_wanted:
            return self.translator.translate_n_best(
                texts, count, prefixes=prefixes, align=job.align, first_line=line, strict=job.strict
            )

        temperature = job.sample.temperature
        return self.translator.sample(
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

    def _translate_sentences(self, lines: Sequence[str], sentences: Splitter, *, line: int) -> list[str]:
        """The translations of some lines, sentence by sentence; the first of the lines is `line`."""
        by_line = sentences.split(lines)
        translations = self.translator.translate(
            [with_tag(text, self._job.tag) for texts in by_line for text in texts],
            lines=[number for number, texts in enumerate(by_line, line) for _ in texts],
            strict=self._job.strict,
        )
        return list(sentences.join(translations, map(len, by_line)))


def _with_prefixes(blocks: Iterable[list[bytes]], path: str | None) -> Generator[list[_Line], None, None]:
    """The lines, each with that of a file of prefixes, blank ones where there is none. Raises InputError."""
    if path is None:
        yield from ([(text, "") for text in block] for block in blocks)
        return

    line = 1
    with closing(read_lines(Path(path))) as prefixes:
        for block in blocks:
            given = list(islice(prefixes, len(block)))
            if len(given) < len(block):
                raise InputError(
                    f"{path} has {line - 1 + len(given)} lines, but there are more to translate: give a prefix, "
                    "or a blank line, for each"
                )
            yield list(zip(block, given, strict=True))
            line += len(block)

        if next(prefixes, None) is not None:
            raise InputError(f"{path}:{line}: there are only {line - 1} lines to translate: leave the rest out")


def _counted(lines: Sequence[str], translations: Sequence[str]) -> dict[str, float]:
    of_text = [translation for line, translation in zip(lines, translations, strict=True) if not is_blank(line)]
    return {TRANSLATED: len(of_text), EMPTY: sum(map(is_blank, of_text))}


def _warn_of_nothing(tally: Tally) -> None:
    """Say so where no line has a translation: a model that predicts the end at once fails without a word."""
    if 0 < tally.get(TRANSLATED, 0) == tally.get(EMPTY):
        count = int(tally[EMPTY])
        log.warning("%d of %d translations are empty: the model has hardly learnt", count, count)


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
