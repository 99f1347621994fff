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
from transformer.config.settings import Device, Precision, SampleConfig, SearchOverride
from transformer.decoding import stream
from transformer.decoding.translate_stream import run as translate

Note = Callable[[str, object], None]

LINES = 150
BLOCK = 200  # bytes: some thirty blocks of a few lines


class Killer:
    """Begins and kills commands, until one has finished; then begins another output.

    Of pairs to train on, where it is to `keep` a share of them.
    """

    def __init__(self, folder: Path, spm: bytes, draw: random.Random, keep: float | None) -> None:
        self.folder, self.draw, self._keep = folder, draw, keep
        self.kills = self.outputs = self.in_work = 0
        self._run_dir = write_run(folder / "run", spm, seed=1)
        (folder / "in").write_text("".join(f"{line}\n" for line in sentences(LINES)), encoding="utf-8")
        self.output = folder / "out.tsv"
        self._work = folder / ".out.tsv.work"
        translate(self._job(), io.BytesIO(), io.BytesIO())
        self.expected = self.output.read_bytes()
        self.output.unlink()

    def _job(self) -> TranslateJob:
        return TranslateJob(
            run_dir=str(self._run_dir),
            device=Device.cpu,
            precision=Precision.fp64,
            threads=1,
            search=SearchOverride(
                beam_size=1 if self._keep is None else None, batch_tokens=self.draw.choice([50, 500, 5000])
            ),
            sample=SampleConfig(temperature=None if self._keep is None else 2.0),  # more of them end by themselves
            input=str(self.folder / "in"),
            output=str(self.output),
            keep=self._keep,
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
        self.in_work += self._work.exists()
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
        joined = self._work / "joined"

        def is_reached() -> bool:
            is_so = joined.exists() if moment == "joining" else len(self._kept()) >= len(kept) + more
            return is_so or not all(process.is_alive() for process in found.processes)

        wait_for(is_reached)
        time.sleep(self.draw.uniform(0, 0.004))

    def _kept(self) -> set[str]:
        return {path.name for path in self._work.glob("[0-9]*-*")} if self._work.exists() else set()

    def _judge_finished(self) -> None:
        """The output is complete. One that was killed after that may have left its directory to the next command."""
        assert self.output.read_bytes() == self.expected
        found = self._start(1)
        assert found.wait() == [0], found.said(0)
        assert sorted(name for name in os.listdir(self.folder) if name.startswith(("out", ".out"))) == [
            ".out.tsv.json",
            "out.tsv",
        ]
        assert leftovers(self.folder) == []
        self.output.unlink()
        self.outputs += 1


def kill(times: int, folder: Path, spm: bytes, *, seed: int, keep: float | None = None) -> Killer:
    killer = Killer(folder, spm, random.Random(seed), keep)
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
@pytest.mark.parametrize("seed", range(1, 7))
def test_translate_loses_no_block_by_many_kills(seed: int, folder: Path, spm: bytes, record_property: Note) -> None:
    killer = kill(50, folder, spm, seed=seed, keep=0.5 if seed > 4 else None)
    record_property("kills", killer.kills)
    record_property("translations that ended byte-identical", killer.outputs)
