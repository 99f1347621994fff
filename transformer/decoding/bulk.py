"""From a file to a file, in blocks that are kept: a command that was killed goes on, and ranks share the work.

    OUT                        complete, or not there
    .OUT.json                  what made it: weights, settings, the digest of the input; and what was counted
    .OUT.work/settings.json    the same, of what is under way
    .OUT.work/claims           who works on which block: see `shared_work`
    .OUT.work/N-M              what came of lines N to M, behind the seal of settings, N-M and what follows

The input alone decides where blocks are cut, so every process, now or later, cuts the same ones. Each process goes
through the input and does the blocks that nobody has done or claimed. Then it waits for those that others have claimed,
because these may die. The last process joins the blocks. A block that does not match its seal is made again.
"""

import errno
import json
import logging
import math
import os
import re
import stat
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from transformer.compute import resolve_device
from transformer.config.jobs import ScoreJob, TranslateJob
from transformer.data.compression import compress
from transformer.decoding.input_file import Text
from transformer.decoding.provenance import Settings, differences, read_settings, settings_of
from transformer.decoding.stream import Item, Output, Tally, Work, stream, summed, throughput
from transformer.decoding.translator import Translator
from transformer.distributed import choose_local_device, is_rank0, world_size
from transformer.errors import InputError, Stopped, StorageError, TransformerError
from transformer.files import (
    UNFINISHED,
    list_names,
    make_directories,
    open_regular,
    storage_error,
    sync,
    write_file,
    write_json,
)
from transformer.liveness import ending_with_launcher
from transformer.shared_work import SharedWork, clear, opened, seal_of

BEGUN = "settings.json"  # the settings that made the blocks beside it
JOINED = "joined"  # the output, until it is whole
FINISHED = "finished.json"  # what is to be .OUT.json

# Errors of paths at which nothing can be made, however much room the disk has.
CANNOT_BE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL}

_SEAL = len(seal_of(None)) + 1  # bytes of the line that a block begins with
_BLOCK = re.compile(r"([0-9]{1,18})-([0-9]{1,18})")  # of lines, by the numbers of the first and the last

Blocks = Callable[[], Generator[list[Item], None, None]]  # begins from the start each time

# Makes the output if it is not simply the blocks end to end. It gets a function that reads all texts from the start.
Finish = Callable[[Callable[[], Iterator[str]]], Iterator[Output]]

log = logging.getLogger(__name__)


# ---- an output ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """An output, and what lies beside it."""

    output: Path  # behind links
    suffix: str  # of the name that the user gave
    finish: Finish | None  # None: the output is its blocks end to end
    settings: Settings  # by which it is made

    @property
    def made_by(self) -> Path:
        """The file that says what made a finished output."""
        return self.output.with_name(f".{self.output.name}.json")

    @property
    def work(self) -> Path:
        """The directory of unfinished work."""
        return self.output.with_name(f".{self.output.name}.work")

    @property
    def anew(self) -> str:
        """The remedy for whatever is wrong with the directory."""
        return f"remove {self.work} to begin anew"

    def block(self, first: int, last: int) -> Path:
        """The file of these lines' block."""
        return self.work / f"{first}-{last}"

    def lines(self) -> int:
        """How many lines are done, by the names of the blocks that are kept."""
        found = filter(None, map(_BLOCK.fullmatch, list_names(self.work)))
        return sum(int(name[2]) - int(name[1]) + 1 for name in found)

    def keep(self, first: int, last: int, counted: Tally, part: bytes) -> None:
        """Write what came of these lines."""
        data = json.dumps(counted).encode() + b"\n" + part
        write_file(self.block(first, last), self._seal(first, last, data) + b"\n" + data)

    def read(self, first: int, last: int) -> tuple[Tally, bytes] | None:
        """What was counted of these lines, and what came of them; None where that is not there, or does not fit."""
        try:
            with open_regular(self.block(first, last)) as file:
                seal = file.readline(_SEAL).removesuffix(b"\n")
                data = file.read()
        except OSError:
            return None
        if seal != self._seal(first, last, data):
            return None
        counted, _, part = data.partition(b"\n")
        return json.loads(counted), part

    def _seal(self, first: int, last: int, data: bytes) -> bytes:
        return seal_of([self.settings, first, last], data).encode()

    def discard(self, path: Path) -> None:
        """Remove a file of the work, if it is there. Raises InputError where something else has its name."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise InputError(f"{path}: cannot be removed ({error.strerror}): {self.anew}") from error

    def clear(self) -> None:
        """Remove the work directory of a finished output. If it holds a foreign file, both stay."""

        def is_own(path: Path) -> bool:
            is_named = path.name in (BEGUN, JOINED, FINISHED) or path.name.startswith(UNFINISHED)
            is_file = path.is_symlink() or not path.is_dir()
            return is_file and (is_named or _BLOCK.fullmatch(path.name) is not None)

        clear(self.work, is_own)

    def begin(self) -> None:
        """Write the settings, unless the output is finished meanwhile, or compare them with those that are there.

        Raises InputError if other settings began it, or unknown ones.
        """
        begun_by = self.work / BEGUN
        if self.is_finished():
            return
        if os.path.lexists(begun_by):
            if found := differences(read_settings(begun_by, self.anew), self.settings):
                raise InputError(
                    f"output={self.output}: it was begun with {found}: restore those settings, or {self.anew}"
                )
        elif self.lines():
            raise InputError(
                f"{begun_by}: missing, so it is unknown which settings made the blocks beside it: {self.anew}"
            )
        else:
            write_json(begun_by, self.settings)

    def is_finished(self) -> bool:
        """Whether these settings have made the output; a kill may have come before the work was cleared.

        Raises InputError if other settings or something else made it. An empty file counts as none.
        """
        try:
            status = self.output.stat()
        except FileNotFoundError:
            return False
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"output={self.output}: not a file: name another")

        made_by = read_settings(self.made_by, "remove it") if self.made_by.exists() else {}
        made_by.pop("counted", None)
        if made_by.pop("size", None) != status.st_size:
            if status.st_size == 0:
                return False
            raise InputError(f"output={self.output}: it exists, but not as this command made it: name another output")
        if found := differences(made_by, self.settings):
            raise InputError(f"output={self.output}: it was made with {found}: name another output, or remove this one")
        self.clear()
        return True


# ---- the work -------------------------------------------------------------------------------------------------------


def from_files(
    job: TranslateJob | ScoreJob,
    blocks: Blocks[Item],
    work: Work[Item],
    *,
    translator: Translator,
    files: Mapping[str, str],
    stdout: BinaryIO,
    unit: str,
    finish: Finish | None,
) -> Tally | None:
    """Process files, named by their keys, into the output: in blocks that are kept, if possible.

    The files must have as many lines as one another. Standard output, a pipe or a device is written as blocks come. The
    rest is as for `to_file`.
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
    return to_file(job.output, settings, blocks, work, texts=list(texts.values()), unit=unit, finish=finish)


def to_file(
    output: str,
    settings: Settings,
    blocks: Blocks[Item],
    work: Work[Item],
    *,
    texts: Sequence[Text],
    unit: str,
    finish: Finish | None,
) -> Tally | None:
    """Write what comes of all blocks to a file, together with other processes that were given the same.

    `settings` are all that the file depends on. `texts` are what `blocks` reads, the first of which has a line for each
    item. The output is what `finish` makes of the texts of all blocks, or these end to end. Returns what was counted,
    summed over all of them; None where another process has put the output together, or did before: that is logged.

    Raises InputError where other settings began or finished the output, or a text has changed; Stopped where a signal
    came; StorageError; and what `work` raises, with the lines that it was at work on.
    """
    place = _Place(Path(output).resolve(), Path(output).suffix, finish, settings)
    if place.is_finished():
        log.info("%s is finished: it is left as it is", place.output)
        return None
    try:
        make_directories(place.work)
    except OSError as error:
        if error.errno in CANNOT_BE:  # any other error will show in the work itself
            raise _cannot_be(str(place.output), error) from error

    try:
        with ending_with_launcher(), opened(place.work, place.begin) as shared:
            make = partial(_make, place, work, texts)
            with throughput(unit, is_shown=is_rank0(), total=texts[0].lines, done=place.lines()) as advance:
                cut = _work_through(place, shared, blocks, make, advance, waits=False)
                if cut is None:
                    cut = _work_through(place, shared, blocks, make, advance, waits=True) or []
            with shared.alone():
                return None if place.is_finished() else _join(place, cut, texts)
    except KeyboardInterrupt:
        kept = f"{place.lines()} of {texts[0].lines} {unit}s are kept"
        raise Stopped(f"stopped; {kept}: to go on, give the same command again") from None


def _work_through(
    place: _Place,
    shared: SharedWork,
    blocks: Blocks[Item],
    make: Callable[[list[Item], int, int], None],
    advance: Callable[[int], None],
    *,
    waits: bool,
) -> list[tuple[int, int]] | None:
    """Go through all blocks, and make those that are not kept: the first and the last line of each.

    None if others are working on some, unless this process `waits` for them.
    """
    cut: list[tuple[int, int]] = []
    has_others = False
    done = place.lines()
    with closing(blocks()) as found:
        for block in found:
            first = cut[-1][1] + 1 if cut else 1
            last = first + len(block) - 1
            cut.append((first, last))
            if place.read(first, last) is None:
                has_others |= not shared.do(
                    first,
                    f"lines {first} to {last}",
                    is_done=partial(place.read, first, last),
                    make=partial(make, block, first, last),
                    waits=waits,
                )
                before, done = done, max(done, place.lines())  # those of others, too
                advance(done - before)
    return None if has_others else cut


def _make(place: _Place, work: Work[Item], texts: Sequence[Text], block: list[Item], first: int, last: int) -> None:
    """Make a block, and keep it, unless a text has changed."""
    path = place.block(first, last)
    if os.path.lexists(path):
        log.warning("%s: not as it was written: made again", path)
        place.discard(path)
    try:
        output = work(block, first)
    except TransformerError as error:
        raise type(error)(f"{texts[0].path}: lines {first} to {last}: {error}") from error
    for text in texts:
        text.check()
    part = output.text.encode("utf-8")
    place.keep(first, last, output.tally, part if place.finish is not None else compress(part, place.suffix))


def _join(place: _Place, cut: Sequence[tuple[int, int]], texts: Sequence[Text]) -> Tally:
    """Put the parts together, under the name of the output; what was counted of them.

    Raises InputError where a text has changed, and StorageError.
    """
    try:
        for text in texts:
            text.check_all()
    except InputError:
        for first, last in cut:  # some blocks may come from the changed text
            place.discard(place.block(first, last))
        raise
    try:
        return _put_together(place, cut)
    except OSError as error:
        raise storage_error(place.output, error=error) from error


def _put_together(place: _Place, cut: Sequence[tuple[int, int]]) -> Tally:
    """Do so. Raises OSError, which need not have the name of a file."""
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


def _cannot_be(output: str, error: Exception) -> InputError:
    reason = error.strerror if isinstance(error, OSError) else error
    return InputError(f"output={output}: cannot be made: {reason}: name another")


def choose_device(job: TranslateJob | ScoreJob) -> None:
    """Compute on the GPU of this rank. Raises InputError where several ranks would write to one stream."""
    if world_size() > 1:
        if not is_file(job.output):
            raise InputError(f"{world_size()} ranks cannot share one stream: name an input file and an output file")
        choose_local_device(resolve_device(job.device))
