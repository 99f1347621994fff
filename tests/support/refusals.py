"""Commands as they are typed, in a folder with a corpus and a finished run, and the one line that refuses each.

CORPUS   text/{train,dev,test,other}.{src,tgt}      one, two: files of so many lines      latin1, empty, blank
RUNS     a, trained on it      bare, a directory with nothing in it
"""

import io
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.command_line import Result, enter
from support.corpora import overrides, run, tiny_job, write_corpus

FILES = {
    **{"one": b"eins\n", "two": b"eins\nzwei\n", "latin1": b"a dog\nau \xe9t\xe9\n"},
    **{"empty": b"", "blank": b"\n \n", "words.tsv": b"one two\n", "bytes.tsv": b"a\tb\n\xff\tb\n"},
    **{"pieces": "▁Der ▁Hund\n▁Zwei ▁Frauen\n".encode()},
}


TINY: list[str] = []  # the settings of the run, which `make_world` fills in


class Unread(io.BytesIO):
    """A standard input that no command reads before it refuses its arguments."""

    def read1(self, size: int | None = -1, /) -> bytes:
        raise AssertionError("read")


def make_world(folder: Path) -> Path:
    """Fill a folder; see above."""
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (folder / "bare").mkdir()
    data = write_corpus(folder / "text")
    job = tiny_job(folder / "a", data, max_steps=2, save_every=2, validate_every=2, average=1)
    run(job)
    TINY[:] = overrides(replace(job, run_dir="b"))
    return folder


def typed(line: str, world: Path) -> Result:
    """Run a line, its command included; a training without `experiment=` has a corpus and is tiny."""
    line, _, file = line.partition(" < ")
    command, *arguments = shlex.split(line)
    if command in ("train", "prepare") and "experiment=" not in line:
        arguments = [*TINY, *arguments]
    stdin = io.TextIOWrapper(io.BytesIO(Path(file).read_bytes()) if file else Unread())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", stdin)
        return enter(command, *arguments, then=None)


def assert_refused_as_typed(line: str, words: str, *, status: int, world: Path) -> None:
    """One line with these words, in this order where `...` stands between; nothing is written but locks."""
    before = set(world.rglob("*"))
    result = typed(line, world)
    torch.use_deterministic_algorithms(False)
    assert result.err.startswith("transformer: error: "), result.err
    assert (result.status, result.out, result.err.count("\n")) == (status, "", 1), result.err
    rest = result.err
    for part in words.split("..."):
        _, found, rest = rest.partition(part)
        assert found, f"{part!r} is not in {result.err}"
    left = {path for path in world.rglob("*") if path.suffix != ".lock" and path.name != ".store"}
    assert left <= before, left - before
