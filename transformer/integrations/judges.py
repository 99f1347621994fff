"""External judges: programs in environments of their own that score translations, such as COMET.

    command  --check_judges-->  words  --judge-->  texts in, scores of the segments out  -->  Judgement

The contract is in docs/judges.md. A command comes from the job of `evaluate`, so from whoever typed it; the command
that a run directory keeps is text. There is no shell: a command is cut into words first, and paths are put into them
after that. A judge that fails raises JudgeError, which costs its own scores and no others.
"""

import json
import logging
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile, mkdtemp

from transformer.errors import InputError
from transformer.evaluation.judgements import JudgedText
from transformer.files import open_regular
from transformer.records import Judgement
from transformer.terminal import printable

log = logging.getLogger(__name__)

PATHS = ("src", "hyp", "ref", "jsonl", "out")
VERSION_SECONDS = 60.0
MOST_BYTES = 1 << 26  # that a judge may write beside 32 times its texts
LARGEST_SCORE = 1e100  # of which sums and squares are numbers, too
_SECONDS_TO_END = 10.0  # after which processes that do not end are left
_PROCESS = Path(__file__).with_name("judge_process.py")
_PATH = re.compile(r"\{([a-z]+)\}")
# What other programs take for the end of a line: a judge must find as many lines as there are segments.
_LINE_ENDS = str.maketrans(dict.fromkeys("\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029", " "))


class JudgeError(Exception):
    """A judge has failed: in words, for a warning."""


# ---- the command ----------------------------------------------------------------------------------------------------


def check_judges(commands: Mapping[str, str], *, have_sources: bool) -> None:
    """Raise InputError for a command that could not judge: before anything is translated."""
    for name, command in commands.items():
        key = f"scorer.{name}"
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise InputError(f"{key}={command}: cannot be cut into words as a shell would ({error})") from None
        if not words or shutil.which(words[0]) is None:
            raise InputError(f"{key}: there is no program {words[0] if words else ''!r}: give its path")

        paths = [path for word in words for path in _PATH.findall(word)]
        unknown = [path for path in paths if path not in PATHS]
        if unknown:
            raise InputError(f"{key}: {{{unknown[0]}}} is no path; there are {{{'}, {'.join(PATHS)}}}")
        if "out" not in paths or not {"hyp", "jsonl"} & set(paths):
            raise InputError(f"{key}: the command must name {{hyp}} (or {{jsonl}}) to read and {{out}} to write")
        if not have_sources and {"src", "jsonl"} & set(paths):
            raise InputError(f"{key}: the judge reads sources: name their file with sources=FILE")


def _words_for_version(words: Sequence[str]) -> list[str]:
    """The words that ask for the judge's version: those before the first path, and before an option that takes it."""
    first = next(number for number, word in enumerate(words) if _PATH.search(word))
    if first > 1 and words[first - 1].startswith("-"):
        first -= 1
    return [*words[:first], "--version"]


# ---- judging --------------------------------------------------------------------------------------------------------


def judge_all(commands: Mapping[str, str], text: JudgedText, *, seconds: float, place: str) -> dict[str, Judgement]:
    """What each judge says of the text; one that fails is a warning, which names the `place` of the text."""
    judgements = {}
    for name, command in commands.items():
        log.info("%s: %s judges %d segments", place, name, len(text.hypotheses))
        try:
            judgements[name] = judge(command, text, seconds=seconds)
        except JudgeError as error:
            log.warning("%s: scorer.%s gave no scores: %s", place, name, error)
    return judgements


def judge(command: str, text: JudgedText, *, seconds: float) -> Judgement:
    """Let a judge score the text; it has `seconds` for that. Raises JudgeError.

    The command must be one that `check_judges` takes.
    """
    words = shlex.split(command)
    try:
        with _folder() as folder:
            size = _write_texts(folder, text)
            limit = MOST_BYTES + 32 * size
            paths = {kind: str(folder / kind) for kind in PATHS}
            filled = [_PATH.sub(lambda found: paths[found[1]], word) for word in words]
            _run(filled, folder, seconds=seconds, limit=limit)
            system, segments = read_scores(folder / "out", len(text.hypotheses), limit=limit)
            version = _version(words, folder, limit=limit)
    except OSError as error:
        raise JudgeError(f"{error.filename or 'its folder'}: {error.strerror or error}") from error
    return Judgement(command=command, version=version, system=system, segments=segments, sha256=text.digests())


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder for a judge, removed whatever is in it: `rm` minds no depth, which the standard library does."""
    folder = Path(mkdtemp(prefix="transformer-judge-"))
    try:
        yield folder
    finally:
        removed = subprocess.run(
            ["rm", "-rf", "--", folder], stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        if removed.returncode != 0:
            reason = removed.stderr.decode(errors="replace").partition("\n")[0]
            log.warning("%s: cannot be removed whole: %.300s", folder, printable(reason))


def _write_texts(folder: Path, text: JudgedText) -> int:
    """Write the files that a judge may read: a segment a line, and all of it as JSON lines. Returns their bytes."""
    texts = {"src": text.sources, "hyp": text.hypotheses, "ref": text.references}
    plain = {kind: [line.translate(_LINE_ENDS) for line in lines] for kind, lines in texts.items() if lines is not None}
    names = {"src": "source", "hyp": "hypothesis", "ref": "reference"}
    rows = zip(*plain.values(), strict=True)
    objects = [dict(zip([names[kind] for kind in plain], row, strict=True)) for row in rows]
    plain["jsonl"] = [json.dumps(row, ensure_ascii=False) for row in objects]
    return sum(
        (folder / kind).write_bytes("".join(f"{line}\n" for line in lines).encode()) for kind, lines in plain.items()
    )


def _run(words: Sequence[str], folder: Path, *, seconds: float, limit: int) -> str:
    """Run a program to its end, and return the end of what it said. Raises JudgeError.

    It is ended with all that it has started: when it is done, late, or has written too much.
    """
    with TemporaryFile() as said:  # without a name, which it could remove, or put a pipe in its place
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", _PROCESS, *words],
            stdin=subprocess.PIPE,  # closed when this process dies
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline = time.monotonic() + seconds
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.1)
                if _has_more(folder, limit - os.fstat(said.fileno()).st_size, deadline=deadline):
                    raise JudgeError(f"it wrote more than {limit:,} bytes")
                if process.returncode is not None:
                    break
                if time.monotonic() > deadline:
                    raise JudgeError(f"not done after {seconds:g} seconds (scorer_seconds)")
        finally:
            assert process.stdin is not None
            process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_SECONDS_TO_END)
            process.kill()
            process.wait()

        said.seek(max(0, os.fstat(said.fileno()).st_size - 4096))
        text = said.read().decode(errors="replace").strip()
    if process.returncode != 0:
        last_line = text.rpartition("\n")[2][:300] or "it said nothing"
        ended = f"status {process.returncode}" if process.returncode > 0 else f"signal {-process.returncode}"
        raise JudgeError(f"it ended with {ended}: {printable(last_line)}")
    return text


def _has_more(folder: Path, limit: int, *, deadline: float) -> bool:
    """Whether there are more bytes than `limit` in a folder and below it, however deep, as far as time allows to look.

    A name counts, too: so the walk ends, even if there are new ones all the time.
    """
    total = 0
    folders = [str(folder)]
    while folders and total <= limit and time.monotonic() < deadline:
        with suppress(OSError), os.scandir(folders.pop()) as entries:  # it has just been removed
            for entry in entries:
                with suppress(OSError):
                    total += len(entry.name) + entry.stat(follow_symlinks=False).st_size
                if total > limit:
                    break
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
    return total > limit


def _version(words: Sequence[str], folder: Path, *, limit: int) -> str | None:
    """The first line that the judge says of its version; None where it says none. It is asked when it is installed."""
    try:
        said = _run(_words_for_version(words), folder, seconds=VERSION_SECONDS, limit=limit)
    except JudgeError:
        return None
    return said.partition("\n")[0].strip()[:200] or None


# ---- what a judge writes --------------------------------------------------------------------------------------------


def read_scores(path: Path, count: int, *, limit: int) -> tuple[float, list[float]]:
    """The score of the system, and those of `count` segments: JSON, JSON lines, or a number a line.

    The system's is the mean where the judge writes none. Raises JudgeError.
    """
    try:
        with open_regular(path) as file:
            data = file.read(limit)
    except OSError as error:
        raise JudgeError(f"{{out}}: {error.strerror or error}") from error
    if not data.strip():
        raise JudgeError("it wrote no scores to {out}")
    try:
        system, entries = _parse(data.decode())
    except (ValueError, RecursionError) as error:
        raise JudgeError(f"what it wrote to {{out}} is neither JSON nor one number a line ({error})") from None

    if len(entries) != count:
        raise JudgeError(f"it wrote {len(entries):,} scores for {count:,} segments")
    segments = [_number(entry, f"segment {number}") for number, entry in enumerate(entries, 1)]
    return (math.fsum(segments) / count if system is None else _number(system, "the system")), segments


def _parse(text: str) -> tuple[object, list[object]]:
    """The system's score, or None, and the entries of the segments. Raises ValueError."""
    try:
        value = json.loads(text)
    except ValueError:
        lines = [line.strip() for line in text.strip().split("\n")]
        return None, [json.loads(line) if line.startswith("{") else float(line) for line in lines]

    match value:
        case list():
            return None, value
        case dict():
            lists = [item for item in value.values() if isinstance(item, list)]
            if len(lists) > 1:
                raise ValueError("several lists")
            if lists:
                numbers = [item for item in value.values() if _is_number(item)]
                return (numbers[0] if len(numbers) == 1 else None), lists[0]
    return None, [value]  # of a single segment


def _number(entry: object, place: str) -> float:
    """The score of an entry: a number, or an object with one, or with one called `score`. Raises JudgeError."""
    if isinstance(entry, dict):
        numbers = {name: value for name, value in entry.items() if _is_number(value)}
        if len(numbers) > 1 and "score" not in numbers:
            raise JudgeError(f"{place} has several numbers ({', '.join(map(str, numbers))!s:.200}), none of them score")
        entry = numbers.get("score", next(iter(numbers.values()), None))
    try:
        number = float(entry) if _is_number(entry) else math.nan  # type: ignore[arg-type]
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise JudgeError(f"the score of {place} is not a finite number")
    if abs(number) > LARGEST_SCORE:
        raise JudgeError(f"the score of {place} is beyond {LARGEST_SCORE:g}")
    return number


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
