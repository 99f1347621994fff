"""A teacher that is a program: lines in, a translation of each out, block by block. The contract: docs/teaching.md.

A program that hangs, dies, or writes other lines than it was asked for costs its block and a line of error; what it
wrote before is kept, and the same command goes on.
"""

import os
import shlex
from collections.abc import Generator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path

from transformer.config.jobs import TranslateJob
from transformer.config.settings import Rerank
from transformer.data.corpus import LONGEST_LINE, is_blank, read_lines
from transformer.decoding.bulk import to_file
from transformer.decoding.input_file import Text
from transformer.decoding.output import BLANK, Translation
from transformer.decoding.stream import Output
from transformer.errors import InputError
from transformer.files import open_regular
from transformer.tools.program import (
    LINE_ENDS,
    ProgramError,
    check_program,
    filled,
    run_program,
    temporary_folder,
    version_of,
)
from transformer.tools.risk import least_risk
from transformer.tools.synthetic import Pairs
from transformer.tools.teach.job import TeachJob

PATHS = ("src", "out", "candidates")
MOST_BYTES = 1 << 26  # that a program may write beside 32 times its lines


def check_teacher(job: TeachJob) -> None:
    """Raise InputError for a command that could not teach."""
    paths = check_program(job.teacher, "teacher", PATHS)
    if not {"src", "out"} <= set(paths):
        raise InputError("teacher: the command must name {src} to read and {out} to write")
    if (job.candidates is not None) != ("candidates" in paths):
        raise InputError(
            "teacher: {candidates} in the command and candidates=N belong together: the program is told how many "
            "translations of each line to write"
        )


def translate_by_program(job: TeachJob, source: Path, output: Path, pairs: Pairs | None) -> None:
    """Have the program translate a file: line for line, or as the sound `pairs`, in blocks that are kept."""
    text = Text.of(str(source), "text")
    settings = {
        "version": 1,
        "teacher": job.teacher,
        "candidates": job.candidates,
        "teacher_lines": job.teacher_lines,
        "columns": None if pairs is None else list(pairs.columns),
        "text: sha256": text.sha256,
        "text: lines": text.lines,
    }

    def work(lines: list[str], first_line: int) -> Output:
        translations = _translations(job, lines)
        if pairs is not None:
            return pairs.draft(lines, translations, first_line=first_line)
        return Output("".join(f"{translation.text}\n" for translation in translations), {})

    tally = to_file(
        str(output),
        settings,
        lambda: _blocks(source, job.teacher_lines),
        work,
        texts=[text],
        unit="line",
        finish=None if pairs is None else pairs.finish,
    )
    if tally is not None and pairs is not None:
        pairs.report(tally)


def version_of_program(job: TeachJob) -> str | None:
    """The first line that the program says of its version, if it says one."""
    with temporary_folder("transformer-teacher-") as folder:
        try:
            return version_of(shlex.split(job.teacher), folder, limit=MOST_BYTES)
        except OSError:
            return None


def _blocks(source: Path, size: int) -> Generator[list[str], None, None]:
    with closing(read_lines(source)) as lines:
        while block := list(islice(lines, size)):
            yield block


def _translations(job: TeachJob, lines: Sequence[str]) -> list[Translation]:
    """The program's translations of some lines: of several of a line, the one with the least risk."""
    count = job.candidates or 1
    content = "".join(f"{line.translate(LINE_ENDS)}\n" for line in lines).encode()
    limit = MOST_BYTES + 32 * len(content) * count
    try:
        with temporary_folder("transformer-teacher-") as folder:
            paths = {"src": str(folder / "src"), "out": str(folder / "out"), "candidates": str(count)}
            (folder / "src").write_bytes(content)
            words = filled(shlex.split(job.teacher), paths)
            run_program(words, folder, seconds=job.teacher_seconds, limit=limit, key="teacher_seconds")
            texts = _read(folder / "out", len(lines), count=count, limit=limit)
    except ProgramError as error:
        raise InputError(f"teacher: {error}: fix it, and give the same command again") from error
    except OSError as error:
        raise InputError(f"teacher: {os.fspath(error.filename or 'its folder')}: {error.strerror or error}") from error

    choose = least_risk(TranslateJob(rerank=Rerank.chrf))
    translations = []
    for number, line in enumerate(lines):
        of_line = [
            Translation(text, 0.0, 0.0, finished=True, alignment=None)  # each as probable as the others
            for text in texts[number * count : (number + 1) * count]
        ]
        best = choose(of_line)[0].text
        translations.append(BLANK if is_blank(line) else Translation(best, None, None, finished=True, alignment=None))
    return translations


def _read(path: Path, lines: int, *, count: int, limit: int) -> list[str]:
    """The lines that the program wrote: `count` for each that it read. Raises ProgramError, and OSError."""
    with open_regular(path) as file:
        data = file.read(limit)
    written = data.removesuffix(b"\n").split(b"\n") if data else []
    if len(written) != lines * count:
        each = "" if count == 1 else f", {count} for each line"
        raise ProgramError(f"it wrote {len(written):,} lines to {{out}}, not {lines * count:,}{each}")
    texts = []
    for number, line in enumerate(written, 1):
        if len(line) > LONGEST_LINE:
            raise ProgramError(f"line {number} of what it wrote is longer than {LONGEST_LINE} bytes")
        try:
            texts.append(line.decode().translate(LINE_ENDS))
        except UnicodeDecodeError as error:
            place = f"line {number} of what it wrote"
            raise ProgramError(f"{place} is not UTF-8 at byte {error.start + 1}") from None
    return texts
