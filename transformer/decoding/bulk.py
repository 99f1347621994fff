"""From a file to a file, in blocks that are kept: a command that was killed goes on, and ranks share the work.

    OUT                        complete, or not there
    .OUT.json                  what made it: weights, settings, the digest of the input; and what was counted
    .OUT.work/settings.json    the same, of what is under way
    .OUT.work/claims           byte n is locked by the process that works on the block that begins with line n
    .OUT.work/N-M              what came of lines N to M, behind the SHA-256 of settings, N-M and what follows

Blocks are cut by the input alone, so that every process, now or later, cuts the same ones. Each goes through the input
and works on what nobody has done or claimed, then waits for what others have claimed, because they may die. The kernel
frees the claims of the dead. The last one puts the parts together. A block that does not fit its digest is made again.
"""

import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import re
import stat
import struct
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Generic

from transformer.compute import resolve_device
from transformer.config.jobs import ScoreJob, TranslateJob
from transformer.config.primitives import to_json
from transformer.data.compression import DAMAGE, compress, damaged, open_bytes
from transformer.data.tokenizer import read_models
from transformer.decoding.stream import Item, Output, Tally, Work, read_blocks, stream, summed, throughput
from transformer.decoding.translator import Translator
from transformer.distributed import choose_local_device, is_rank0, world_size
from transformer.errors import InputError, Stopped, StorageError, TransformerError
from transformer.files import (
    UNFINISHED,
    list_names,
    make_directories,
    open_lock,
    open_regular,
    read_json,
    sync,
    write_file,
    write_json,
)
from transformer.liveness import ending_with_launcher
from transformer.run_dir import tokenizer_digests

FORMAT = 1  # of the files, and of how an input is cut: another one is not gone on with
JOINING = 0  # the byte of the claims for what one process does alone; those of blocks begin at 1, as lines do
CHUNK = 1 << 20  # bytes
JOINED = "joined"  # the output, until it is whole
FINISHED = "finished.json"  # what is to be .OUT.json
QUIET_SECONDS = 2.0  # for which a process waits for another one without a word

# Of paths at which nothing can be made, whatever the disk has room for.
CANNOT_BE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL}

SEAL = 2 * hashlib.sha256().digest_size + 1  # bytes of the line that a block begins with
LOOK_SECONDS = 0.05  # between two looks whether another process still works

_BLOCK = re.compile(r"([0-9]{1,18})-([0-9]{1,18})")  # of lines, by the numbers of the first and the last

# Keys that do not change the text, or that `settings_of` says in other words.
_OTHER_KEYS = {"run_dir", "checkpoint", "ensemble", "device", "precision", "threads", "search"}
_OTHER_KEYS |= {"input", "output", "prefix", "src", "tgt"}

Settings = Mapping[str, Any]

# Makes the output where that is not the blocks end to end: is given what reads the texts of all, anew each time.
Finish = Callable[[Callable[[], Iterator[str]]], Iterator[Output]]

log = logging.getLogger(__name__)


# ---- what is read ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """A file of text as it was when it was read through: what it holds, however it is compressed."""

    path: Path
    sha256: str
    lines: int
    stamp: tuple[int, int]  # size and time of change of the file

    @classmethod
    def of(cls, name: str, key: str) -> "Text":
        """Read it through. Raises InputError for what cannot be read, or not twice: the setting `key` names it."""
        path = Path(name)
        digest = hashlib.sha256()
        newlines = 0
        last = b"\n"
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise InputError(f"{key}={name}: not a regular file: only such a one can be read again after a kill")
            stamp = _stamp(path)
            with open_bytes(path, CHUNK) as file:
                while chunk := file.read(CHUNK):
                    digest.update(chunk)
                    newlines += chunk.count(b"\n")
                    last = chunk[-1:]
        except DAMAGE as error:
            raise damaged(path, newlines + 1, error) from error
        return cls(path, digest.hexdigest(), newlines + (last != b"\n"), stamp)

    def check(self) -> None:
        """Raise InputError if the file has changed since."""
        if not self.path.exists() or _stamp(self.path) != self.stamp:
            raise self._changed()

    def check_all(self) -> None:
        """Raise InputError if what it holds has changed since, whatever its size and time say."""
        if Text.of(str(self.path), str(self.path)).sha256 != self.sha256:
            raise self._changed()

    def _changed(self) -> InputError:
        return InputError(f"{self.path}: it has changed while it was read: nothing of the new text is kept")


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def read_file(path: Path) -> Generator[list[bytes], None, None]:
    """The lines of a file, plain or compressed, in the blocks that standard input gives of it. Raises InputError."""
    line = 1
    try:
        with open_bytes(path, CHUNK) as file:
            for block in read_blocks(file.read):
                yield block
                line += len(block)
    except DAMAGE as error:
        raise damaged(path, line, error) from error


# ---- by which settings ----------------------------------------------------------------------------------------------


def settings_of(job: TranslateJob | ScoreJob, translator: Translator, texts: Mapping[str, Text]) -> Settings:
    """All that the text depends on, as JSON: `texts` are the files that the job's keys name.

    Not the size of a batch, the threads and the device: they change it by rounding alone.
    """
    settings: dict[str, Any] = {
        "version": FORMAT,
        "weights": list(translator.weights),
        "tokenizers": list(tokenizer_digests(read_models(Path(job.run_dir)))),
        "precision": translator.precision.value,
    }
    search = replace(translator.search, batch_tokens=None, cuda_graphs=None)
    settings |= {f"search.{name}": value for name, value in to_json(search).items()}
    for name, value in to_json(job).items():
        if isinstance(value, dict) and name not in _OTHER_KEYS:
            settings |= {f"{name}.{key}": one for key, one in value.items()}
        elif name not in _OTHER_KEYS:
            settings[name] = value
    for key, text in texts.items():
        settings |= {f"{key}: sha256": text.sha256, f"{key}: lines": text.lines}
    return settings


def _differences(then: Settings, now: Settings) -> str:
    """What is set otherwise, with both values; empty if nothing is."""
    keys = [key for key in {**then, **now} if then.get(key) != now.get(key)]
    return ", ".join(f"{key}={_shown(then.get(key))}, not {_shown(now.get(key))}" for key in keys)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# ---- where ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """An output, and what lies beside it."""

    output: Path  # behind links
    suffix: str  # of the name that the user gave
    finish: Finish | None  # None: the output is its blocks end to end
    settings: Settings  # by which it is made

    @property
    def made_by(self) -> Path:
        """Of a finished output."""
        return self.output.with_name(f".{self.output.name}.json")

    @property
    def work(self) -> Path:
        """The directory of what is under way."""
        return self.output.with_name(f".{self.output.name}.work")

    @property
    def begun_by(self) -> Path:
        """The file with the settings by which its blocks are made."""
        return self.work / "settings.json"

    @property
    def claims(self) -> Path:
        """The file that is locked byte by byte."""
        return self.work / "claims"

    def block(self, first: int, last: int) -> Path:
        """What came of these lines."""
        return self.work / f"{first}-{last}"

    def make(self) -> None:
        """Make the directory. Raises InputError where there can be none, or something else has its name."""
        try:
            make_directories(self.work)
        except OSError as error:
            if error.errno in CANNOT_BE:
                raise _cannot_be(str(self.output), error) from error
            if error.errno != errno.EEXIST:
                raise
        if os.path.lexists(self.work) and not stat.S_ISDIR(self.work.lstat().st_mode):
            raise InputError(f"{self.work}: not a folder, where blocks are to be kept: remove it")

    def blocks(self) -> list[tuple[int, int]]:
        """The first and the last line of each block that is kept, by its name."""
        found = filter(None, map(_BLOCK.fullmatch, list_names(self.work)))
        return [(int(name[1]), int(name[2])) for name in found]

    def lines(self) -> int:
        """How many lines are done."""
        return sum(last - first + 1 for first, last in self.blocks())

    def keep(self, first: int, last: int, counted: Tally, part: bytes) -> None:
        """Write what came of these lines."""
        data = json.dumps(counted).encode() + b"\n" + part
        write_file(self.block(first, last), self._seal(first, last, data) + b"\n" + data)

    def read(self, first: int, last: int) -> tuple[Tally, bytes] | None:
        """What was counted of these lines, and what came of them; None where that is not there, or does not fit."""
        try:
            with open_regular(self.block(first, last)) as file:
                seal = file.readline(SEAL).removesuffix(b"\n")
                data = file.read()
        except OSError:
            return None
        if seal != self._seal(first, last, data):
            return None
        counted, _, part = data.partition(b"\n")
        return json.loads(counted), part

    def _seal(self, first: int, last: int, data: bytes) -> bytes:
        """By which a block says that it is whole, of these lines, and made by these settings."""
        digest = hashlib.sha256(json.dumps([self.settings, first, last], sort_keys=True).encode())
        digest.update(data)
        return digest.hexdigest().encode()

    def discard(self, path: Path) -> None:
        """Remove a file of the work, if it is there. Raises InputError where something else has its name."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise InputError(f"{path}: cannot be removed ({error.strerror}): {self.anew}") from error

    @property
    def anew(self) -> str:
        """The remedy for whatever is wrong with the directory."""
        return f"remove {self.work} to begin anew"

    def clear(self) -> None:
        """Remove the directory of a finished output: first the claims, by which others see that it goes.

        A file in it that is of no such work stays, and the directory with it.
        """
        with suppress(OSError, StorageError):
            self.claims.unlink(missing_ok=True)
            for name in list_names(self.work):
                is_own = name in (self.begun_by.name, JOINED, FINISHED)
                if is_own or name.startswith(UNFINISHED) or _BLOCK.fullmatch(name):
                    with suppress(OSError):
                        (self.work / name).unlink(missing_ok=True)
            self.work.rmdir()

    def check_finished(self) -> bool:
        """Whether the output is there, made by these settings.

        Raises InputError where it was made by others, or by something else. An empty file is as good as none.
        """
        try:
            status = self.output.stat()
        except FileNotFoundError:
            return False
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"output={self.output}: not a file: name another")

        made_by = _read_settings(self.made_by, "remove it") if self.made_by.exists() else {}
        made_by.pop("counted", None)
        if made_by.pop("size", None) != status.st_size:
            if status.st_size == 0:
                return False
            raise InputError(f"output={self.output}: it is there, and not as this command made it: name another output")
        if found := _differences(made_by, self.settings):
            raise InputError(f"output={self.output}: it was made with {found}: name another output, or remove this one")
        return True


def _cannot_be(output: str, error: Exception) -> InputError:
    reason = error.strerror if isinstance(error, OSError) else error
    return InputError(f"output={output}: cannot be made: {reason}: name another")


def _read_settings(path: Path, remedy: str) -> dict[str, Any]:
    try:
        settings = read_json(path)
        if not isinstance(settings, dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error}): {remedy}") from error
    return settings


class _Claims:
    """Locks on the bytes of a file, which the kernel frees when this process dies.

    They are those of POSIX: a lock of the process, and closing the file anywhere in it would free all of them.
    """

    def __init__(self, path: Path, file: int) -> None:
        self._path = path
        self._file = file
        self._named: set[int] = set()  # processes that this one has waited for, and said so

    def wait_for(self, byte: int, what: str) -> None:
        """Claim a byte as soon as nobody else has it; after a while, say who has `what`, once for each process."""
        began = time.monotonic()
        while not self.take(byte, waits=False):
            if time.monotonic() - began > QUIET_SECONDS:
                holder = self._holder(byte)
                if holder not in self._named:
                    self._named.add(holder)
                    log.info("%s: waiting for process %d, here or on another machine: end it if it hangs", what, holder)
                self.take(byte, waits=True)
                return
            time.sleep(LOOK_SECONDS)

    def _holder(self, byte: int) -> int:
        """The process that has a byte; 0 where nobody has, or the system does not say."""
        if sys.platform != "linux":
            return 0
        layout = "hhqqi4x"  # of struct flock: type, whence, start, length, process
        asked = struct.pack(layout, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        return int(struct.unpack(layout, fcntl.fcntl(self._file, fcntl.F_GETLK, asked))[-1])

    def take(self, byte: int, *, waits: bool) -> bool:
        """Claim a byte; False if another process has it, unless this one `waits` for it."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB), 1, byte)
        except (BlockingIOError, PermissionError):  # POSIX allows either
            return False
        except OSError as error:
            raise StorageError(f"{self._path}: cannot be locked: {error.strerror}: choose another output") from error
        return True

    def drop(self, byte: int) -> None:
        """Give a byte back."""
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, byte)

    def are_of(self, path: Path) -> bool:
        """Whether the path still has this file: it may have been removed, and made anew."""
        try:
            return os.path.samestat(os.fstat(self._file), path.stat())
        except FileNotFoundError:
            return False

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Do what one process does alone."""
        self.wait_for(JOINING, str(self._path.parent))
        try:
            yield
        finally:
            self.drop(JOINING)


@contextmanager
def _opened(place: _Place) -> Iterator[_Claims | None]:
    """The claims of the work on an output, begun or gone on with; None where it is finished.

    Raises InputError where other settings began, or finished, it, or its directory is not one of such a work;
    StorageError.
    """
    if _is_joined(place):
        yield None
        return

    while True:
        place.make()
        try:
            lock = open_lock(place.claims)
        except FileNotFoundError:  # another process has finished meanwhile
            continue
        with lock as file:
            claims = _Claims(place.claims, file.fileno())
            with claims.alone():
                is_there = claims.are_of(place.claims)
                is_finished = is_there and _begin(place)
            if is_there:
                yield None if is_finished else claims
                return


def _begin(place: _Place) -> bool:
    """Write the settings, or compare them with those that are there; whether there is nothing to do."""
    if _is_joined(place):
        return True
    if os.path.lexists(place.begun_by):
        if found := _differences(_read_settings(place.begun_by, place.anew), place.settings):
            raise InputError(f"output={place.output}: it was begun with {found}: set what was, or {place.anew}")
    elif place.blocks():
        raise InputError(f"{place.begun_by}: not there, so nobody knows what made the blocks beside it: {place.anew}")
    else:
        write_json(place.begun_by, place.settings)
    return False


# ---- the work -------------------------------------------------------------------------------------------------------


def from_files(
    job: TranslateJob | ScoreJob,
    blocks: Callable[[], Generator[list[Item], None, None]],
    work: Work[Item],
    *,
    translator: Translator,
    files: Mapping[str, str],
    stdout: BinaryIO,
    unit: str,
    finish: Finish | None,
) -> Tally | None:
    """Write what comes of files, by the keys that name them, to the output: in blocks that are kept, if it can be.

    The files must have as many lines as one another. Standard output, a pipe or a device is written as blocks come. The
    rest is as for `in_bulk`.
    """
    if job.output is None or not is_file(job.output):
        with nullcontext(stdout) if job.output is None else open(job.output, "wb") as file:
            return stream(blocks(), work, file, unit=unit, is_dialogue=file.isatty())

    texts = {key: Text.of(name, key) for key, name in files.items()}
    first, *others = texts.values()
    for other in others:
        if other.lines != first.lines:  # known now, not after hours
            raise InputError(
                f"{first.path} has {first.lines} lines, {other.path} has {other.lines}: each line must belong to the "
                "same line of the other file"
            )
    settings = settings_of(job, translator, texts)
    return in_bulk(
        blocks,
        work,
        output=Path(job.output),
        settings=settings,
        texts=list(texts.values()),
        unit=unit,
        finish=finish,
    )


def in_bulk(
    blocks: Callable[[], Generator[list[Item], None, None]],
    work: Work[Item],
    *,
    output: Path,
    settings: Settings,
    texts: Sequence[Text],
    unit: str,
    finish: Finish | None,
) -> Tally | None:
    """Write what comes of all blocks to a file, together with other processes that were given the same.

    `blocks` begins from the start each time, and `texts` are what it reads, the first of which has a line for each
    item. The output is what `finish` makes of the texts of all blocks, or these end to end. Returns what was counted,
    summed over all of them; None where another process has put the output together, or did before: that is logged.

    Raises InputError where other settings began or finished the output, or a text has changed; Stopped where a signal
    came; StorageError; and what `work` raises, with the lines that it was at work on.
    """
    place = _Place(output.resolve(), output.suffix, finish, settings)
    with ending_with_launcher(), _opened(place) as claims:
        if claims is None:
            log.info("%s is finished: it is left as it is", output)
            return None
        try:
            with throughput(unit, is_shown=is_rank0(), total=texts[0].lines, done=place.lines()) as advance:
                task = _Task(blocks, work, place, claims, texts, advance)
                task.work_through(waits=False)
                if task.is_shared:
                    task.work_through(waits=True)
            with claims.alone():
                return None if _is_joined(place) else _join(place, task.cut, texts)
        except KeyboardInterrupt:
            kept = f"{place.lines()} of {texts[0].lines} {unit}s are kept"
            raise Stopped(f"stopped; {kept}: to go on, give the same command again") from None


@dataclass
class _Task(Generic[Item]):
    """The share of this process in the work on an output."""

    blocks: Callable[[], Generator[list[Item], None, None]]
    work: Work[Item]
    place: _Place
    claims: _Claims
    texts: Sequence[Text]
    advance: Callable[[int], None]
    is_shared: bool = False  # whether others were at work on some block
    cut: list[tuple[int, int]] = field(default_factory=list)  # the first and the last line of each block

    def work_through(self, *, waits: bool) -> None:
        """Go through all blocks, and make those that are not kept; `waits` for what others work on."""
        done = self.place.lines()
        first = 1
        self.cut.clear()
        with closing(self.blocks()) as blocks:
            for block in blocks:
                last = first + len(block) - 1
                self.cut.append((first, last))
                if self.place.read(first, last) is None:
                    self._claim(block, first, last, waits=waits)
                    before, done = done, max(done, self.place.lines())  # those of others, too
                    self.advance(done - before)
                first = last + 1

    def _claim(self, block: list[Item], first: int, last: int, *, waits: bool) -> None:
        if waits:
            self.claims.wait_for(first, f"lines {first} to {last}")
        elif not self.claims.take(first, waits=False):
            self.is_shared = True
            return
        try:
            # Meanwhile it may have been made, or even all, which have then been put together and removed.
            if self.place.read(first, last) is None and self.claims.are_of(self.place.claims):
                self._make(block, first, last)
        finally:
            self.claims.drop(first)

    def _make(self, block: list[Item], first: int, last: int) -> None:
        path = self.place.block(first, last)
        if os.path.lexists(path):
            log.warning("%s: not as it was written: made again", path)
            self.place.discard(path)
        try:
            output = self.work(block, first)
        except TransformerError as error:
            where = f"{self.texts[0].path}: lines {first} to {last}"
            raise type(error)(f"{where}: {error}") from error
        for text in self.texts:
            text.check()
        part = output.text.encode("utf-8")
        if self.place.finish is None:
            part = compress(part, self.place.suffix)
        self.place.keep(first, last, output.tally, part)


def _is_joined(place: _Place) -> bool:
    """Whether the output is finished; who finished it may have been killed before the parts were removed."""
    is_finished = place.check_finished()
    if is_finished:
        place.clear()
    return is_finished


def _join(place: _Place, cut: Sequence[tuple[int, int]], texts: Sequence[Text]) -> Tally:
    """Put the parts together, under the name of the output; what was counted of them."""
    try:
        for text in texts:
            text.check_all()
    except InputError:
        for first, last in cut:  # some may be of the other text
            place.discard(place.block(first, last))
        raise

    joined = place.work / JOINED
    place.discard(joined)
    tallies = []
    with joined.open("xb") as file:
        for counted, part in _parts(place, cut):
            tallies.append(counted)
            if place.finish is None:
                file.write(part)

        if place.finish is not None:
            for output in place.finish(partial(_texts, place, cut)):
                file.write(compress(output.text.encode("utf-8"), place.suffix))
                tallies.append(output.tally)
        if not file.tell():
            file.write(compress(b"", place.suffix))  # an empty text, which is not an empty file
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()

    with suppress(FileNotFoundError):
        joined.chmod(stat.S_IMODE(place.output.stat().st_mode))  # an empty file may have been made for it
    total = summed(tallies)
    as_json = {name: value if math.isfinite(value) else None for name, value in total.items()}

    # Written in the work's own directory: a kill leaves nothing beside the output.
    finished = place.work / FINISHED
    place.discard(finished)
    write_json(finished, {**place.settings, "size": size, "counted": as_json})
    os.replace(finished, place.made_by)
    os.replace(joined, place.output)
    sync(place.output.parent)
    place.clear()
    return total


def _parts(place: _Place, cut: Sequence[tuple[int, int]]) -> Iterator[tuple[Tally, bytes]]:
    """What was counted of each block, and what came of it, in order. Raises StorageError where one is not whole."""
    for first, last in cut:
        block = place.read(first, last)
        if block is None:
            raise StorageError(f"{place.work}: lines {first} to {last} are gone: give the same command again")
        yield block


def _texts(place: _Place, cut: Sequence[tuple[int, int]]) -> Iterator[str]:
    """What came of each block, in order, where that is to be finished."""
    return (part.decode() for _, part in _parts(place, cut))


# ---- ranks ----------------------------------------------------------------------------------------------------------


def is_file(output: str | None) -> bool:
    """Whether an output is to be a file that can be made in blocks: not standard output, a pipe or a device.

    Raises InputError for a name that nothing can have.
    """
    if output is None:
        return False
    try:
        mode = os.stat(output).st_mode
        return stat.S_ISREG(mode) or stat.S_ISDIR(mode)
    except FileNotFoundError:
        return True
    except (OSError, ValueError) as error:
        raise _cannot_be(output, error) from error


def choose_device(job: TranslateJob | ScoreJob) -> None:
    """Compute on the GPU of this rank. Raises InputError where several ranks would write to one stream."""
    if world_size() > 1:
        if not is_file(job.output):
            raise InputError(
                f"{world_size()} ranks cannot write one stream: name a file to be read, and a file as output"
            )
        choose_local_device(resolve_device(job.device))
