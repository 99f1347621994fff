"""Crashes, errors, full disks, kills and power cuts: the old one or the new, whole, and never less than promised.

A shim counts the file-system calls and strikes before the k-th, for every k. `PowerLoss` goes further: it records the
calls and builds what a disk may hold after a power cut, given what had been synced by then. Small amounts run always,
the big ones under the mark `faults`.
"""

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from support.checkpoints import (
    DAMAGES,
    FILES,
    REAL_FSYNC,
    assert_detected,
    assert_whole,
    content,
    in_child,
    leftovers,
    restart,
    snapshot,
    status_of,
    write,
)
from support.corpora import step_dir
from support.paths import ROOT, TESTS
from transformer import checkpoint, files
from transformer.checkpoint import commit, load_checkpoint, newest, rotate
from transformer.errors import CheckpointError, StorageError
from transformer.files import read_json, write_json
from transformer.run_dir import list_steps, lock_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with steps 10 and 20."""
    for step in (10, 20):
        write(tmp_path / "run", step)
    return tmp_path / "run"


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """In memory where there is such a place: thousands of directories come and go here."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path_factory.mktemp("faults")
    else:
        with tempfile.TemporaryDirectory(dir=memory) as folder:
            yield Path(folder)


REAL_WRITE = os.write
Note = Callable[[str, object], None]


# --- crashes at every call


class Crash(BaseException):
    """The process is gone: nothing catches this, and every later call raises it again."""


CALLS = ("open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "listdir", "scandir", "statvfs")
WRITING = ("write", "fsync", "rename", "replace", "mkdir")


@contextmanager
def shim(strike: Callable[[int, str], None]) -> Iterator[list[str]]:
    """Call `strike(number, name)` before every file-system call; yields the names so far. (close changes nothing.)"""
    seen: list[str] = []

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            strike(len(seen), name)
            return real(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, wrap(name, getattr(os, name)))
        yield seen


def crash_at(number: int) -> Callable[[int, str], None]:
    def strike(call: int, _name: str) -> None:
        if call >= number:
            raise Crash

    return strike


Outcome = tuple[tuple[int, int] | None, int | None, int | None]  # step and version, that of the average, best.json


class Scenario:
    """Something that writes: what there is before, what is done, and what the next start may find."""

    def __init__(self, before: Callable[[Path], object], act: Callable[[Path], object], allowed: list[Outcome]) -> None:
        self.before, self.act, self.allowed = before, act, allowed

    def template(self, folder: Path) -> Path:
        folder.mkdir()
        self.before(folder)
        return folder

    def judge(self, run: Path, done: bool) -> None:
        """After a crash anywhere: `allowed`, its last entry if the work was done."""
        found = restart(run)
        outcome = None if found is None else (found.step, found.state["version"])
        averaged = load_checkpoint(run / "averaged").state["version"] if (run / "averaged").exists() else None
        best = read_json(run / "best.json") if (run / "best.json").exists() else None
        wanted = self.allowed[-1:] if done else self.allowed
        assert (outcome, averaged, best) in wanted


def nothing(_run: Path) -> None:
    pass


def two_steps(run: Path) -> None:
    write(run, 10)
    write(run, 20)
    commit(run, averaged=True, step=20, **content(20))
    write_json(run / "best.json", 1)


def damaged_top(run: Path) -> None:
    two_steps(run)
    (step_dir(run, 20) / "state.json").write_text("{}\n")


def interrupted(run: Path) -> None:
    two_steps(run)
    os.rename(step_dir(run, 20), run / "checkpoints" / ".old-step-00000020")
    os.rename(run / "averaged", run / ".old-averaged")
    shutil.copytree(step_dir(run, 10), run / "checkpoints" / ".del-step-00000005-1-ab")


def commit_and_rotate(run: Path) -> None:
    write(run, 30)
    rotate(run, {30})


def start(run: Path) -> None:
    with lock_run(run):
        pass


OLD = ((20, 0), 0, 1)
SCENARIOS = {
    "first": Scenario(nothing, lambda run: write(run, 10), [(None, None, None), ((10, 0), None, None)]),
    "next": Scenario(two_steps, commit_and_rotate, [OLD, ((30, 0), 0, 1)]),
    "again": Scenario(two_steps, lambda run: write(run, 20, 1), [OLD, ((20, 1), 0, 1)]),
    "over a damaged one": Scenario(damaged_top, lambda run: write(run, 20), [((10, 0), 0, 1), OLD]),
    "averaged": Scenario(
        two_steps, lambda run: commit(run, averaged=True, step=20, **content(20, 1)), [OLD, ((20, 0), 1, 1)]
    ),
    "json": Scenario(two_steps, lambda run: write_json(run / "best.json", 2), [OLD, ((20, 0), 0, 2)]),
    "start": Scenario(interrupted, start, [OLD]),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_commit_leaves_the_old_or_the_new_after_a_crash_before_any_call(name: str, tmp_path: Path) -> None:
    scenario, number, done = SCENARIOS[name], 0, False
    template = scenario.template(tmp_path / "template")
    while not done:
        number += 1
        run = tmp_path / str(number)
        shutil.copytree(template, run)
        with shim(crash_at(number)), suppress(Crash):
            scenario.act(run)
            done = True
        scenario.judge(run, done)
        shutil.rmtree(run)
    assert number > 4  # the shim saw the calls


def strike_once(number: int, error: int) -> Callable[[int, str], None]:
    def strike(call: int, _name: str) -> None:
        if call == number:
            raise OSError(error, os.strerror(error))

    return strike


def strike_from(number: int, error: int) -> Callable[[int, str], None]:
    """The disk stays broken for writing; removing still works."""

    def strike(call: int, name: str) -> None:
        if call >= number and name in WRITING:
            raise OSError(error, os.strerror(error))

    return strike


def storage_error(act: Callable[[Path], object], run: Path) -> str | None:
    """Do it; the text of its StorageError, if that is how it ends. Anything else is a failure of the test."""
    try:
        act(run)
    except StorageError as failure:
        return str(failure)
    return None


def fail_at_every_call(scenario: Scenario, folder: Path, error: int) -> tuple[int, int]:
    """One passing error at each call in turn: the work succeeds after all, or says so and leaves what there was."""
    template = scenario.template(folder / f"template-{error}")
    number = failed = 0
    struck = True
    while struck:
        number += 1
        run = folder / f"{error}-{number}"
        shutil.copytree(template, run)
        with shim(strike_once(number, error)) as seen:
            failure = storage_error(scenario.act, run)
        assert failure is None or os.strerror(error) in failure
        failed += failure is not None
        struck = len(seen) >= number
        for step in list_steps(run)[:-1]:
            load_checkpoint(step_dir(run, step))
        scenario.judge(run, done=failure is None)
        shutil.rmtree(run)
    return number - 1, failed


@pytest.mark.parametrize("name", ["first", "next", "again", "averaged", "json"])
def test_commit_survives_or_reports_a_passing_error(name: str, tmp_path: Path) -> None:
    calls, failed = fail_at_every_call(SCENARIOS[name], tmp_path, errno.ENOSPC)
    assert calls > 3
    assert failed == 0 or name == "json"  # a checkpoint is tried again


def test_commit_tries_again_without_what_the_first_attempt_left(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [OSError(errno.EIO, os.strerror(errno.EIO))]

    def write_badly(file: int, data: memoryview) -> int:
        if failures:
            raise failures.pop()
        return REAL_WRITE(file, data[:1000])  # a write may be short

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_badly)
        patch.setattr(shutil, "rmtree", lambda *_args: REAL_WRITE(-1, b""))  # cannot be removed either
        assert_whole(write(run, 30))
    assert len(leftovers(run)) > 0
    restart(run)


@pytest.mark.parametrize("name", ["first", "next", "averaged", "json"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_commit_reports_a_lasting_error_and_leaves_no_trace(name: str, error: int, tmp_path: Path) -> None:
    scenario, number, struck = SCENARIOS[name], 0, True
    template = scenario.template(tmp_path / "template")
    old = snapshot(template)
    while struck:
        number += 1
        run = tmp_path / str(number)
        shutil.copytree(template, run)
        with shim(strike_from(number, error)) as seen:
            failure = storage_error(scenario.act, run)
        struck = failure is not None
        if failure is not None:
            assert all(part in failure for part in (f"{run}/", os.strerror(error), "bytes needed", "bytes free"))
            aside = leftovers(run)
            assert all(name.startswith(".old-averaged") for name in aside)  # only if it cannot be renamed back
            if not aside and {"rename", "replace"} & set(seen[number - 1 :]):
                assert {k: v for k, v in snapshot(run).items() if v} == {k: v for k, v in old.items() if v}
            # else only the last sync failed: the new one is in place and whole, but was not promised
        scenario.judge(run, done=False)
        shutil.rmtree(run)
    assert number > 4


def test_commit_puts_back_what_it_moved_aside_if_the_new_one_cannot_be_put_there(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rename(source: Path, target: Path) -> None:
        if Path(source).name.startswith(".tmp-"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        os.replace(source, target)

    before = snapshot(run)
    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(StorageError, match="Input/output error"):
        write(run, 20, version=1)
    assert snapshot(run) == before


# --- a full disk


def test_commit_checks_the_space_before_it_writes_anything(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot(run)
    needed = sum(t.nbytes for group in content(30)["tensors"].values() for t in group.values())
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=int(1.09 * needed)))
    never = lambda _call, name: pytest.fail("written") if name in WRITING else None  # noqa: E731
    with shim(never), pytest.raises(StorageError) as caught:
        write(run, 30)
    text = str(caught.value)
    assert str(step_dir(run, 30)) in text
    assert f"{int(1.09 * needed)} bytes free" in text
    wanted = int(text.split(" bytes needed")[0].split("(")[1])
    assert needed < wanted < needed + 1000
    assert "No space left on device" in text
    assert snapshot(run) == before


def fill_up(run: Path, limit: int) -> None:
    """Commit step 30 where no file can grow beyond `limit` bytes: needs no privilege, fails in mid-write."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    write(run, 30)


def test_commit_leaves_the_old_one_on_a_disk_that_fills_up_at_any_size(run: Path) -> None:
    largest = max((step_dir(run, 20) / name).stat().st_size for name in FILES)
    before = snapshot(run)
    for part in range(20):  # 0 % to 110 %
        limit = int(largest * 1.1 * part / 19)
        status = status_of(partial(fill_up, run, limit))
        assert status == (5 if limit < largest else 0)
        if status == 5:
            assert snapshot(run) == before
        found = newest(run)
        assert found is not None
        assert found.step == (20 if status else 30)
        assert_whole(found)
        shutil.rmtree(step_dir(run, 30), ignore_errors=True)


def test_commit_reports_a_run_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"Not a directory|File exists"):
        write(tmp_path / "file", 10)
    with pytest.raises(StorageError, match="averaged: cannot be written"):
        commit(tmp_path / "file", averaged=True, step=1, **content(1))


# --- kill -9


def commit_for_ever(run: Path, pipe: int) -> None:
    os.fsync = REAL_FSYNC
    with lock_run(run):
        found = newest(run)
        step = 0 if found is None else found.step
        while True:
            step += 1
            write(run, step)
            os.write(pipe, b"%d\n" % step)
            rotate(run, {step - 1, step, 1})


def kill_at_random(run: Path, kills: int, seed: int) -> int:
    """Kill a committing child again and again; no reported step may be lost. Returns how many were reported."""
    rng, top, found = random.Random(seed), 0, None
    for trial in range(kills):
        receive, send = os.pipe()
        child = in_child(partial(commit_for_ever, run, send))
        os.close(send)
        head = os.read(receive, 99) if trial % 2 else b""  # every other child is given the time to begin
        time.sleep(rng.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(receive, "rb") as pipe:
            top = max([top, *map(int, (head + pipe.read()).split(b"\n")[:-1])])
        before, found = 0 if found is None else found.step, restart(run)
        now = 0 if found is None else found.step
        assert top <= now <= max(top, before) + 1  # one may have been killed unreported
        rotate(run, {now - 1, now, 1})  # as the next commit would: two in a row may have been killed before it
        assert len(list_steps(run)) <= 3
    return top


def test_commit_that_was_reported_is_not_lost_by_a_kill(tmp_path_factory: pytest.TempPathFactory) -> None:
    assert kill_at_random(tmp_path_factory.mktemp("disk") / "run", kills=16, seed=1) >= 8


# --- power loss


class PowerLoss:
    """Records what happens to one directory, then says what a disk may hold if the power went at a given moment.

    A file surely has what was written before its last fsync; later bytes may be there, missing, cut or zero. A
    directory surely has the names of its last fsync and, of later changes, any number in their order. Nothing more.
    """

    def __init__(self, root: Path, deaf_to: str) -> None:
        self.root, self.deaf_to, self.now = root, deaf_to, 0
        self.nodes: list[dict[str, Any]] = [self._node("folder")]
        self.open: dict[int, int] = {}
        self.promises: list[tuple[int, int]] = []  # moment, step

    def _node(self, kind: str) -> dict[str, Any]:
        return {"kind": kind, "log": [], "synced": -1, "syncs": [], "live": {}}

    def _find(self, path: Any, dir_fd: int | None) -> tuple[int, str] | None:
        """The number of the directory that holds `path`, and its name in it; None outside the root."""
        if dir_fd is not None:
            return (self.open[dir_fd], str(path)) if dir_fd in self.open else None
        if not isinstance(path, (str, Path)) or self.root not in Path(path).parents:
            return None
        *folders, name = Path(path).relative_to(self.root).parts
        at = 0
        for folder in folders:
            at = self.nodes[at]["live"][folder]
        return at, name

    def _change(self, folder: int, changes: dict[str, int | None]) -> None:
        self.now += 1
        node = self.nodes[folder]
        node["log"].append((self.now, changes))
        node["live"] = {k: v for k, v in {**node["live"], **changes}.items() if v is not None}

    def _create(self, place: tuple[int, str], kind: str) -> None:
        self.nodes.append(self._node(kind))
        self._change(place[0], {place[1]: len(self.nodes) - 1})

    def did(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, result: Any) -> None:
        """Take note of a call that succeeded."""
        place = self._find(args[0], kwargs.get("dir_fd")) if name != "write" and name != "fsync" else None
        match name:
            case "open":
                if Path(args[0]) == self.root:
                    self.open[result] = 0
                elif place is not None:
                    if place[1] not in self.nodes[place[0]]["live"]:
                        self._create(place, "file")
                    self.open[result] = self.nodes[place[0]]["live"][place[1]]
                else:
                    self.open.pop(result, None)
            case "write" if args[0] in self.open:
                self.now += 1
                self.nodes[self.open[args[0]]]["log"].append((self.now, bytes(args[1][:result])))
            case "fsync" if args[0] in self.open:
                node = self.nodes[self.open[args[0]]]
                self.now += 1
                if node["kind"] != self.deaf_to:
                    node["syncs"].append(self.now)
            case "mkdir" if place is not None:
                self._create(place, "folder")
            case "unlink" | "rmdir" if place is not None:
                self._change(place[0], {place[1]: None})
            case "rename" | "replace" if place is not None:
                to = self._find(args[1], None)
                assert to is not None
                assert to[0] == place[0]
                self._change(place[0], {place[1]: None, to[1]: self.nodes[place[0]]["live"][place[1]]})

    def loose(self, moment: int) -> set[str]:
        """The kinds of node that have something unsynced."""
        last = [(n, max((t for t, _ in n["log"] if t <= moment), default=-1)) for n in self.nodes]
        return {n["kind"] for n, t in last if t > max((s for s in n["syncs"] if s <= moment), default=-1)}

    def state(self, moment: int, late: Callable[[int, int], int], spoil: Callable[[bytes], bytes]) -> dict[str, Any]:
        """A tree as it may be found: `late(node, n)` of n unsynced changes arrived, `spoil` befell unsynced bytes."""

        def build(number: int) -> Any:
            node = self.nodes[number]
            sync = max((t for t in node["syncs"] if t <= moment), default=-1)
            safe = [what for t, what in node["log"] if t < sync]
            rest = [what for t, what in node["log"] if sync <= t <= moment]
            if node["kind"] == "file":
                return b"".join(safe) + spoil(b"".join(rest))
            entries: dict[str, int | None] = {}
            for changes in [*safe, *rest[: late(number, len(rest))]]:
                entries |= changes
            return {name: build(child) for name, child in sorted(entries.items()) if child is not None}

        tree: dict[str, Any] = build(0)
        return tree


@contextmanager
def recording(root: Path, deaf_to: str) -> Iterator[PowerLoss]:
    disk = PowerLoss(root, deaf_to)

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            disk.did(name, args, kwargs, result=result)
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("open", "write", "fsync", "mkdir", "unlink", "rmdir", "rename", "replace"):
            patch.setattr(os, name, wrap(name, getattr(os, name)))
        yield disk


def digest(tree: dict[str, Any]) -> bytes:
    parts = [name.encode() + (digest(v) if isinstance(v, dict) else sha256(v).digest()) for name, v in tree.items()]
    return sha256(b"\0".join(parts)).digest()


def lay_out(tree: dict[str, Any], folder: Path) -> None:
    folder.mkdir()
    for name, value in tree.items():
        if isinstance(value, dict):
            lay_out(value, folder / name)
        else:
            (folder / name).write_bytes(value)


SPOILS: list[Callable[[bytes], bytes]] = [
    lambda data: data,
    lambda data: b"",
    lambda data: data[: len(data) // 2],
    lambda data: data[:-1],
    lambda data: bytes(len(data)),
    lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2),
]


LATE: list[Callable[[int, int], int]] = [
    lambda _node, n: n,
    lambda _node, _n: 0,
    lambda node, n: n if node > 1 else 0,  # the first two directories, the run and its checkpoints, are behind
]


def possible_states(disk: PowerLoss, moment: int, rng: random.Random, draws: int) -> Iterator[dict[str, Any]]:
    loose = disk.loose(moment)
    for late in LATE if "folder" in loose else LATE[:1]:
        for spoil in SPOILS if "file" in loose else SPOILS[:1]:
            yield disk.state(moment, late, spoil)
    for _ in range(draws if len(loose) else 0):
        yield disk.state(moment, lambda _node, n: rng.randint(0, n), lambda data: rng.choice(SPOILS)(data))


def live_a_little(run: Path, disk: PowerLoss) -> None:
    for step, version in ((10, 0), (20, 0), (20, 1), (30, 0), (40, 0), (50, 0)):
        write(run, step, version)
        disk.promises.append((disk.now, 10 * step + version))
        rotate(run, {step - 10, step})
        if step >= 30:
            commit(run, averaged=True, step=step, **content(step))
    with pytest.MonkeyPatch.context() as patch:  # as if killed after the last rename: the next start must sync it
        patch.setattr(checkpoint, "sync", lambda path: None if path.name == "checkpoints" else files.sync(path))
        write(run, 60)
    with lock_run(run):
        disk.promises.append((disk.now, 600))


def cut_the_power(folder: Path, deaf_to: str, draws: int) -> int:
    """Check every moment of a few commits and rotations; returns the number of different states. Raises on a loss."""
    run, rng, seen = folder / "run", random.Random(0), set()
    run.mkdir()
    with recording(run, deaf_to) as disk:
        live_a_little(run, disk)
    for moment in range(disk.now + 1):
        promised = max((value for t, value in disk.promises if t <= moment), default=0)
        for tree in possible_states(disk, moment, rng, draws):
            key = (promised, digest(tree))
            if key in seen:
                continue
            seen.add(key)
            lay_out(tree, folder / "after")
            found = restart(folder / "after")
            for step in list_steps(folder / "after"):  # nor does a half-removed one return under its name
                assert_whole(load_checkpoint(step_dir(folder / "after", step)))
            if (folder / "after" / "averaged").exists():
                assert_whole(load_checkpoint(folder / "after" / "averaged"))
            assert (0 if found is None else 10 * found.step + found.state["version"]) >= promised
            shutil.rmtree(folder / "after")
    return len(seen)


def test_commit_that_was_reported_is_not_lost_by_a_power_cut(tmp_path: Path) -> None:
    assert cut_the_power(tmp_path, deaf_to="nothing", draws=0) > 300


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_power_loss_notices_a_missing_sync(tmp_path: Path, kind: str) -> None:
    with pytest.raises((AssertionError, CheckpointError)):
        cut_the_power(tmp_path, deaf_to=kind, draws=0)


# --- the big amounts


@pytest.mark.faults
def test_commit_that_was_reported_is_not_lost_by_many_kills(
    tmp_path_factory: pytest.TempPathFactory, record_property: Note
) -> None:
    assert kill_at_random(tmp_path_factory.mktemp("disk") / "run", kills=400, seed=2) >= 200
    record_property("kills", 400)


@pytest.mark.faults
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_load_checkpoint_detects_a_hundred_damages_of_a_kind(
    damage: Callable[..., set[str]], run: Path, tmp_path: Path, record_property: Note
) -> None:
    for seed in range(100, 200):
        assert_detected(run, tmp_path / "damaged", damage, random.Random(seed))
    record_property("damages", 100)


@pytest.mark.faults
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES], ids=["EIO", "EACCES"])
def test_commit_survives_or_reports_other_passing_errors(
    name: str, error: int, tmp_path: Path, record_property: Note
) -> None:
    calls, _ = fail_at_every_call(SCENARIOS[name], tmp_path, error)
    record_property("disk errors", calls)


def die_at(number: int) -> Callable[[int, str], None]:
    def strike(call: int, _name: str) -> None:
        if call == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return strike


def act_and_die(scenario: Scenario, run: Path, number: int) -> None:
    with shim(die_at(number)):
        scenario.act(run)


@pytest.mark.faults
@pytest.mark.parametrize("name", SCENARIOS)
def test_commit_leaves_the_old_or_the_new_after_a_real_death_before_any_call(
    name: str, tmp_path: Path, record_property: Note
) -> None:
    scenario, number, status = SCENARIOS[name], 0, -9
    template = scenario.template(tmp_path / "template")
    while status == -9:
        number += 1
        run = tmp_path / str(number)
        shutil.copytree(template, run)
        status = status_of(partial(act_and_die, scenario, run, number))
        assert status in (-9, 0)
        scenario.judge(run, done=status == 0)
        shutil.rmtree(run)
    record_property("kills", number - 1)


@pytest.mark.faults
def test_rotate_keeps_the_newest_and_the_best_through_random_lives(tmp_path: Path, record_property: Note) -> None:
    rng, run, best, top = random.Random(3), tmp_path / "run", 0, 0
    for _ in range(500):
        step, keep_last = top + rng.randint(1, 3), rng.randint(2, 4)
        best = rng.choice([best, step])
        kept = {best, *list_steps(run)[1 - keep_last :], step}
        with shim(crash_at(rng.randint(1, 200))), suppress(Crash), lock_run(run):
            write(run, step)
            top = step
            rotate(run, kept)
        found = restart(run)
        assert (0 if found is None else found.step) in (top, step)
        top = 0 if found is None else found.step
        best = best if best <= top else top
        assert best == 0 or load_checkpoint(step_dir(run, best)).step == best
        rotate(run, {best, *list_steps(run)[-keep_last:]})
        assert len(list_steps(run)) <= keep_last + 1
    record_property("lives of saving, rotating and crashing", 500)


@pytest.mark.faults
def test_commit_that_was_reported_is_in_many_more_states_after_a_power_cut(
    tmp_path: Path, record_property: Note
) -> None:
    states = cut_the_power(tmp_path, deaf_to="nothing", draws=40)
    assert states > 500
    record_property("states of a disk after a power cut", states)


ON_A_SMALL_DISK = """
import os, sys
sys.path[:0] = sys.argv[2].split(os.pathsep)
from pathlib import Path
from support.checkpoints import assert_whole, leftovers, write
from transformer.checkpoint import newest
from transformer.errors import StorageError
run, step = Path(sys.argv[1]), 0
try:
    while step < 1000:
        step += 1
        write(run, step)
except StorageError as error:
    assert "No space left on device" in str(error), error
else:
    sys.exit("the disk is not small")
found = newest(run)
assert found is not None and found.step == step - 1 > 1, step
assert_whole(found)
assert leftovers(run) == []
"""


@pytest.mark.faults
@pytest.mark.parametrize("size", ["300k", "1m"])
def test_commit_reports_a_disk_that_is_really_full(tmp_path: Path, size: str, record_property: Note) -> None:
    mount = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size="$1" none "$2" && shift 2 && exec "$@"', "sh", size]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*mount, str(tmp_path), "true"], capture_output=True).returncode
    ):
        pytest.skip("needs a kernel that lets users mount a tmpfs of their own")
    command = [sys.executable, "-c", ON_A_SMALL_DISK, str(tmp_path), os.pathsep.join([str(TESTS), str(ROOT)])]
    subprocess.run([*mount, str(tmp_path), *command], check=True, timeout=120)
    record_property("full disks", 1)
