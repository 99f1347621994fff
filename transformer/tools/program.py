"""Programs of others, in environments of their own, that read files and write files: judges and teachers.

    check_program -> words -> filled with paths -> run_program

A command comes from whoever typed it. There is no shell: a command is cut into words first, and paths are put into them
after that. A program is ended with all that it has started, by `program_process`.
"""

import logging
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
from transformer.terminal import printable

log = logging.getLogger(__name__)

VERSION_SECONDS = 60.0
# What other programs take for the end of a line: a program must find as many lines as there are texts.
LINE_ENDS = str.maketrans(dict.fromkeys("\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029", " "))
_SECONDS_TO_END = 10.0  # after which processes that do not end are left
_PROCESS = Path(__file__).with_name("program_process.py")
_PATH = re.compile(r"\{([a-z]+)\}")


class ProgramError(Exception):
    """A program has failed: in words, for a line."""


def check_program(command: str, key: str, known: Sequence[str]) -> list[str]:
    """What the command of a setting has in braces. Raises InputError where it cannot run, or one is not `known`."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InputError(f"{key}={command}: cannot be cut into words as a shell would ({error})") from None
    if not words or shutil.which(words[0]) is None:
        raise InputError(f"{key}: there is no program {words[0] if words else ''!r}: give its path")

    paths = [path for word in words for path in _PATH.findall(word)]
    unknown = [path for path in paths if path not in known]
    if unknown:
        raise InputError(f"{key}: {{{unknown[0]}}} is no path; there are {{{'}, {'.join(known)}}}")
    return paths


def filled(words: Sequence[str], paths: Mapping[str, str]) -> list[str]:
    """The words with paths in place of their names."""
    return [_PATH.sub(lambda found: paths[found[1]], word) for word in words]


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A folder for a program, removed whatever is in it: `rm` minds no depth, which the standard library does."""
    folder = Path(mkdtemp(prefix=prefix))
    try:
        yield folder
    finally:
        removed = subprocess.run(
            ["rm", "-rf", "--", folder], stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        if removed.returncode != 0:
            reason = removed.stderr.decode(errors="replace").partition("\n")[0]
            log.warning("%s: cannot be removed whole: %.300s", folder, printable(reason))


def run_program(words: Sequence[str], folder: Path, *, seconds: float, limit: int, key: str) -> str:
    """Run a program to its end, and return the end of what it said; the setting `key` is its seconds.

    Raises ProgramError, and OSError.

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
                    raise ProgramError(f"it wrote more than {limit:,} bytes")
                if process.returncode is not None:
                    break
                if time.monotonic() > deadline:
                    raise ProgramError(f"not done after {seconds:g} seconds ({key})")
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
        raise ProgramError(f"it ended with {ended}: {printable(last_line)}")
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


def version_of(words: Sequence[str], folder: Path, *, limit: int) -> str | None:
    """The first line that a program says of its version; None where it says none. It is asked when it is installed."""
    try:
        said = run_program(_words_for_version(words), folder, seconds=VERSION_SECONDS, limit=limit, key="")
    except ProgramError:
        return None
    return said.partition("\n")[0].strip()[:200] or None


def _words_for_version(words: Sequence[str]) -> list[str]:
    """The words that ask for a program's version: those before the first path, and before an option that takes it."""
    first = next(number for number, word in enumerate(words) if _PATH.search(word))
    if first > 1 and words[first - 1].startswith("-"):
        first -= 1
    return [*words[:first], "--version"]
