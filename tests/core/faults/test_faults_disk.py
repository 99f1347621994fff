"""A kill, or an error of the disk, at any file-system call of a training: the same command then ends as if nothing had
happened.

The calls are counted by a small library in C (strike.c) that is preloaded into the process; the first run of a training
makes some four hundred that change something, from the prepared store to results.json.
"""

import errno
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.corpora import run, steps_of, tiny_job, write_corpus
from support.fault_runs import StruckTrainings, assert_nothing_lost, assert_recovered, leftovers
from support.interventions import before_each_pass
from transformer.errors import StorageError

ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EACCES": errno.EACCES}
PARTS = 8  # of the long tier, for several workers

Note = Callable[[str, object], None]


@pytest.fixture(scope="module")
def trainings() -> Iterator[StruckTrainings]:
    """In memory where there is such a place."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        found = StruckTrainings(Path(folder))
        yield found
        found.close()


@pytest.fixture(scope="module")
def calls(trainings: StruckTrainings) -> list[str]:
    """The calls of a whole training, in order: the name of each, and its path."""
    folder = trainings.folder / "counted"
    end, calls = trainings.train(folder)
    assert end.status == 0, end.said
    assert_recovered(folder / "run", trainings.calm)
    shutil.rmtree(folder)
    return calls


def number_of(calls: list[str], pattern: str) -> int:
    """The last call that looks like this, counted from 1."""
    return max(number for number, call in enumerate(calls, 1) if re.search(pattern, call))


def recover(trainings: StruckTrainings, folder: Path) -> None:
    """Run the same command again, undisturbed."""
    end, _ = trainings.train(folder)
    assert end.status == 0, end.said
    assert_recovered(folder / "run", trainings.calm)
    assert leftovers(folder) == []
    shutil.rmtree(folder)


def kill_at(trainings: StruckTrainings, number: int) -> int:
    """A kill before this call, a second one before the same call of the resumed run, and its end. How many it were."""
    folder = trainings.folder / f"kill-{number}"
    end, hit = trainings.strike(folder, number)
    assert end.status == -signal.SIGKILL, (hit, end.said)
    assert_nothing_lost(folder / "run")
    end, again = trainings.strike(folder, number)
    assert end.status == (0 if again is None else -signal.SIGKILL), (hit, again, end.said)
    assert_nothing_lost(folder / "run")
    recover(trainings, folder)
    return 1 if again is None else 2


def fail_at(trainings: StruckTrainings, number: int, failure: int, *, lasts: bool) -> int:
    """The status of a training that met this error; it says so in one line, or got over it."""
    folder = trainings.folder / f"fail-{number}-{failure}-{int(lasts)}"
    end, hit = trainings.strike(folder, number, failure, lasts=lasts)
    assert end.status in (0, 5), (hit, end.said)
    assert "Traceback" not in end.said, (hit, end.said)
    errors = [line for line in end.said.splitlines() if line.startswith("transformer: error: ")]
    if end.status == 5:
        assert len(errors) == 1, (hit, end.said)
        assert errors[0].startswith(f"transformer: error: {folder}/"), "it names the place"
    assert_nothing_lost(folder / "run")
    recover(trainings, folder)
    return end.status


@pytest.mark.ci
def test_strike_comes_before_the_call(trainings: StruckTrainings, calls: list[str]) -> None:
    assert len(calls) > 300
    assert {call.partition(" ")[0] for call in calls} >= {"open", "write", "fsync", "mkdir", "rename", "unlink"}
    folder = trainings.folder / "seen"
    end, hit = trainings.strike(folder, 1)
    assert end.status == -signal.SIGKILL
    assert hit == f"mkdir {folder}/store"
    assert not (folder / "store").exists()
    shutil.rmtree(folder)


PLACES = {
    "the store": r"^write .*/store/\.tmp-.*\.offsets$",
    "a checkpoint": r"^write .*/checkpoints/\.tmp-.*/optimizer\.safetensors$",
    "best.json": r"^rename .*/best\.json$",
    "rotation": r"^rename .*/checkpoints/\.del-",
    "translations": r"^fsync .*/hypotheses/\.tmp-test\.hyp",
    "results.json": r"^write .*/\.tmp-results\.json",
}


@pytest.mark.ci
@pytest.mark.parametrize("place", PLACES)
def test_train_recovers_from_a_kill_before_a_call(trainings: StruckTrainings, calls: list[str], place: str) -> None:
    kill_at(trainings, number_of(calls, PLACES[place]))


@pytest.mark.ci
@pytest.mark.parametrize("name", ERRORS)
def test_train_recovers_from_an_error_of_a_call(trainings: StruckTrainings, calls: list[str], name: str) -> None:
    """From the second checkpoint on, the disk fails for good."""
    number = number_of(calls, r"^mkdir .*/checkpoints/\.tmp-step-00000003")
    assert fail_at(trainings, number, ERRORS[name], lasts=True) == 5


@pytest.mark.ci
def test_train_ends_without_a_traceback_where_the_thread_of_tensorboard_fails(
    trainings: StruckTrainings, calls: list[str]
) -> None:
    """It writes from a thread of its own, which ends; the run says so at its next step, or had no more to write."""
    fail_at(trainings, number_of(calls, r"^write .*/events\.out\.tfevents"), errno.EIO, lasts=True)


def test_train_refuses_before_the_first_step_where_no_checkpoint_would_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """22,912 parameters, as weights, their moving average and two moments, of four bytes each."""
    recipe: dict[str, Any] = {"max_steps": 4, "save_every": 4, "validate_every": 4, "ema_decay": 0.9}
    job = tiny_job(tmp_path / "a", write_corpus(tmp_path / "corpus"), **recipe)
    real = shutil.disk_usage
    needed = 4 * 4 * 22_912
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=int(1.1 * needed) - 1))
    with before_each_pass(lambda _objective: pytest.fail("a step was made")):
        words = rf"No space left on device \({needed} bytes needed, {int(1.1 * needed) - 1} bytes free\)"
        with pytest.raises(StorageError, match=words) as refused:
            run(job)
        assert str(tmp_path / "a" / "checkpoints") in str(refused.value)
    monkeypatch.setattr(shutil, "disk_usage", real)
    run(job)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=0))
    run(job)  # what is finished needs no space


def test_train_removes_old_checkpoints_before_it_asks_for_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that dies between a commit and its rotation leaves one too many, on a disk that has no room for it."""
    recipe: dict[str, Any] = {"save_every": 2, "validate_every": 4, "average": 1}
    data = write_corpus(tmp_path / "corpus")
    run(tiny_job(tmp_path / "a", data, max_steps=8, keep_last=9, **recipe))
    assert steps_of(tmp_path / "a") == [2, 4, 6, 8]

    real = shutil.disk_usage
    full = real(tmp_path)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full if 2 in steps_of(tmp_path / "a") else real(path))
    run(tiny_job(tmp_path / "a", data, max_steps=10, keep_last=2, **recipe))
    assert steps_of(tmp_path / "a")[-1] == 10


# ---- the big amounts ------------------------------------------------------------------------------------------------


@pytest.mark.faults
@pytest.mark.parametrize("part", range(PARTS))
def test_train_recovers_from_a_kill_before_any_call(
    trainings: StruckTrainings, calls: list[str], part: int, record_property: Note
) -> None:
    """Every fourth call in turn, and once more in the run that resumes."""
    numbers = range(1 + 4 * part, len(calls) - 5, 4 * PARTS)
    record_property("kills", sum(kill_at(trainings, number) for number in numbers))
    record_property("runs that ended bit-identical", len(numbers))


@pytest.mark.faults
@pytest.mark.parametrize("lasts", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("name", ERRORS)
def test_train_recovers_from_an_error_of_any_call(
    trainings: StruckTrainings, calls: list[str], name: str, lasts: bool, record_property: Note
) -> None:
    """Some twenty-five calls over the whole run, other ones for each error."""
    first = 1 + 2 * list(ERRORS).index(name) + 5 * lasts
    numbers = range(first, len(calls) - 5, 16)
    for number in numbers:
        fail_at(trainings, number, ERRORS[name], lasts=lasts)
    record_property("disk errors", len(numbers))
    record_property("runs that ended bit-identical", len(numbers))
