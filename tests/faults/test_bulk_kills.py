"""Kills at random moments of a translation from a file to a file, by one to three ranks: of one of them, or of all.

No block that was kept is lost, the output is complete or not there, and in the end it has the text that one process
gives that nothing disturbed.
"""

import io
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.corpora import wait_for
from support.fault_runs import leftovers
from support.ranks import STILL_RUNNING, Ranks, start_ranks
from support.translations import sentences, write_run
from transformer.config.jobs import TranslateJob
from transformer.config.settings import Device, Precision, SearchOverride
from transformer.decoding import stream
from transformer.decoding.translate_stream import run as translate

Note = Callable[[str, object], None]

LINES = 150
BLOCK = 200  # bytes: some thirty blocks of a few lines


class Killer:
    """Begins and kills commands, until one has finished; then begins another output."""

    def __init__(self, folder: Path, spm: bytes, draw: random.Random) -> None:
        self.folder, self.draw = folder, draw
        self.kills = self.outputs = self.in_work = 0
        self._run_dir = write_run(folder / "run", spm, seed=1)
        (folder / "in").write_text("".join(f"{line}\n" for line in sentences(LINES)), encoding="utf-8")
        self.output = folder / "out"
        stdout = io.BytesIO()
        translate(self._job(io_files=False), io.BytesIO((folder / "in").read_bytes()), stdout)
        self.expected = stdout.getvalue()

    def _job(self, *, io_files: bool = True) -> TranslateJob:
        return TranslateJob(
            run_dir=str(self._run_dir),
            device=Device.cpu,
            precision=Precision.fp64,
            threads=1,
            search=SearchOverride(beam_size=1, batch_tokens=self.draw.choice([50, 500, 5000])),
            input=str(self.folder / "in") if io_files else None,
            output=str(self.output) if io_files else None,
        )

    def kill(self, times: int) -> None:
        """Begin and kill until so many processes were killed; the last output is finished."""
        before = self.kills
        while self.kills < before + times:
            self._kill_some(self._start(self.draw.randint(1, 3)))
        found = self._start(1)
        assert found.wait() == [0], found.said(0)
        self._judge_finished()

    def _start(self, size: int) -> Ranks:
        job = self._job()
        return start_ranks(size, lambda: translate(job, io.BytesIO(), io.BytesIO()), self.folder)

    def _kill_some(self, found: Ranks) -> None:
        """Kill one rank, or, as torchrun does once one has died, all of them."""
        kept = self._kept()
        self._wait(found, kept)
        victims = self.draw.choice([range(len(found.processes)), [self.draw.randrange(len(found.processes))]])
        for rank in victims:
            found.processes[rank].kill()
            found.processes[rank].join()
        self.in_work += (self.folder / ".out.work").exists()
        statuses = found.wait()
        assert STILL_RUNNING not in statuses, "a rank waits for the dead"
        for rank, status in enumerate(statuses):
            assert status == 0 or (status == -9 and rank in victims), found.said(rank)
        self.kills += statuses.count(-9)

        if 0 in statuses or self.output.exists():
            self._judge_finished()
        else:
            assert kept <= self._kept(), "a block that was kept is lost"

    def _wait(self, found: Ranks, kept: set[str]) -> None:
        """Until it starts, until some new block is kept, or until the parts are put together; and a moment."""
        moment = self.draw.choice(["start", "block", "joining"])
        if moment == "start":
            time.sleep(self.draw.uniform(0, 0.2))
            return

        more = self.draw.randint(1, 9)
        joined = self.folder / ".out.work/joined"

        def is_reached() -> bool:
            is_so = joined.exists() if moment == "joining" else len(self._kept()) >= len(kept) + more
            return is_so or not all(process.is_alive() for process in found.processes)

        wait_for(is_reached)
        time.sleep(self.draw.uniform(0, 0.004))

    def _kept(self) -> set[str]:
        work = self.folder / ".out.work"
        return {path.name for path in work.glob("[0-9]*-*")} if work.exists() else set()

    def _judge_finished(self) -> None:
        """The output is complete. One that was killed after that may have left its directory to the next command."""
        assert self.output.read_bytes() == self.expected
        found = self._start(1)
        assert found.wait() == [0], found.said(0)
        assert sorted(name for name in os.listdir(self.folder) if name.startswith(("out", ".out"))) == [
            ".out.json",
            "out",
        ]
        assert leftovers(self.folder) == []
        self.output.unlink()
        self.outputs += 1


def kill(times: int, folder: Path, spm: bytes, seed: int) -> Killer:
    killer = Killer(folder, spm, random.Random(seed))
    killer.kill(times)
    assert killer.in_work > times // 4, "too few met blocks under way"
    return killer


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory where there is such a place."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "FIRST_BLOCK", BLOCK)
    monkeypatch.setattr(stream, "BLOCK", BLOCK)


@pytest.mark.ci
def test_translate_loses_no_block_by_four_kills(folder: Path, spm: bytes) -> None:
    kill(4, folder, spm, seed=0)


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(1, 5))
def test_translate_loses_no_block_by_many_kills(seed: int, folder: Path, spm: bytes, record_property: Note) -> None:
    killer = kill(50, folder, spm, seed)
    record_property("kills", killer.kills)
    record_property("translations that ended byte-identical", killer.outputs)
