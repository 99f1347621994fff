"""What comparisons share: contenders in processes of their own, which take turns, and the numbers of a page.

Contenders take turns, A B C A B C, and wait in between, so that whatever else happens on the machine hits all alike;
ratios are formed within a round. A contender's process reads requests and writes answers as lines of JSON: see
`answering.py`, which is its side.
"""

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any, NamedTuple, NoReturn

from transformer.errors import InputError, TransformerError

Answer = dict[str, Any]


class Program(NamedTuple):
    """How a contender's process is started: a script of this folder under some Python."""

    peer: str
    python: str
    script: str


class Worker:
    """A contender's process."""

    def __init__(self, program: Program) -> None:
        self.peer = program.peer
        script = str(Path(__file__).with_name(program.script))
        try:
            self.process = Popen([program.python, script], stdin=PIPE, stdout=PIPE, text=True)
        except OSError as error:
            raise InputError(f"{program.python}: cannot be run ({error.strerror}): check --peers-python") from error

    def ask(self, request: object) -> Answer:
        """Send a request and wait for its answer. Raises InputError if the process has ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):  # then it does not answer either
            print(json.dumps(request), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise InputError(f"{self.peer}: its process ended with status {self.process.wait()}, and says why above")
        found: Answer = json.loads(answer)
        return found


@contextmanager
def started(programs: Sequence[Program]) -> Iterator[list[Worker]]:
    """Their workers, stopped at the end whatever happens."""
    with ExitStack() as held:
        workers = []
        for program in programs:
            worker = Worker(program)
            held.callback(stop, worker)
            workers.append(worker)
        yield workers


def stop(worker: Worker) -> None:
    """End a process and wait for it."""
    worker.process.kill()
    worker.process.communicate()  # which closes its pipes, too


# ---- arguments ------------------------------------------------------------------------------------------------------


def among(*known: str) -> Callable[[str], list[str]]:
    """The type of an argument that lists some of these words."""

    def chosen(text: str) -> list[str]:
        if unknown := set(text.split(",")) - set(known):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: choose from {', '.join(known)}")
        return text.split(",")

    return chosen


def positive(text: str) -> int:
    """The type of an argument that counts something."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def corpus_file(given: Path | None, name: str) -> Path:
    """What an argument names, or the file of that name in Multi30k. Raises InputError where it is not there."""
    root = os.environ.get("TRANSFORMER_DATA")
    if given is None and root is None:
        raise InputError("no corpus: give --src and --tgt, or set TRANSFORMER_DATA to where multi30k/train.en|de are")
    path = given or Path(root or "") / "multi30k" / name
    if not path.is_file():
        raise InputError(f"{path}: there is no such file: check --src, --tgt and TRANSFORMER_DATA")
    return path


# ---- the page -------------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """What a measurement was made on."""
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    }


def processor() -> str:
    """The CPU's name."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def row(cells: Sequence[str]) -> str:
    """A line of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def rule(texts: int, numbers: int) -> str:
    """The line under a table's head: columns of text, then columns of numbers."""
    return row(["---"] * texts + ["---:"] * numbers)


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Of each round."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def spread(values: Sequence[float], form: str) -> tuple[str, str]:
    """Median and range."""
    if not values:
        return "", ""
    return format(statistics.median(values), form), f"{min(values):{form}}–{max(values):{form}}"


def fail(error: TransformerError) -> NoReturn:
    """End as the package's own commands do: one line, and the status of the error."""
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_status)
