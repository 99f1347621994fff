"""Work that several processes share, now or later, and that goes on where it was killed.

    FOLDER/claims    byte n is locked by the process that works on piece n, and byte 0 by the one that works alone
    FOLDER/PIECE     what came of a piece: complete, with a seal that says of which work it is, or not there

So a corpus is prepared in parts, and a file is translated in blocks. Every process knows the same pieces, and claims
each before it makes it; the kernel frees the claims of the dead. One process, alone, begins the work, and one puts the
pieces together and removes them: the claims first, by which others see that the rest goes.
"""

import fcntl
import hashlib
import json
import logging
import os
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from transformer.errors import InputError, StorageError
from transformer.files import list_names, make_directories, open_lock, remove

CLAIMS = "claims"
ALONE = 0  # the byte of the claims for what one process does alone; those of pieces begin at 1
QUIET_SECONDS = 2.0  # for which a process waits for another one without a word
LOOK_SECONDS = 0.05  # between two looks whether another process still works

log = logging.getLogger(__name__)


def seal_of(work: object, data: bytes = b"") -> str:
    """The seal of a piece, which shows that it is whole and of which work: a digest of `work` as JSON, and `data`."""
    digest = hashlib.sha256(json.dumps(work, sort_keys=True).encode())
    digest.update(data)
    return digest.hexdigest()


@contextmanager
def opened(folder: Path, begin: Callable[[], None]) -> Iterator["SharedWork"]:
    """The work in a folder, which is made if it is missing; `begin` is called alone.

    Raises InputError where something else has the name of the folder, and StorageError. OSError passes through.
    """
    while True:
        with suppress(FileExistsError):
            make_directories(folder)
        if os.path.lexists(folder) and not stat.S_ISDIR(folder.lstat().st_mode):
            raise InputError(f"{folder}: not a folder, but finished work is to be kept there: remove it")
        try:
            claims = open_lock(folder / CLAIMS)
        except FileNotFoundError:  # another process has finished meanwhile
            continue
        with claims:
            work = SharedWork(folder, claims.fileno())
            with work.alone():
                if is_there := work.is_there():
                    begin()
            if is_there:
                yield work
                return


def clear(folder: Path, is_own: Callable[[Path], bool]) -> None:
    """Remove from the folder of a work what `is_own`, and the folder, unless something else is in it."""
    with suppress(OSError, StorageError):
        (folder / CLAIMS).unlink(missing_ok=True)
        for path in filter(is_own, map(folder.joinpath, list_names(folder))):
            remove(path)
        folder.rmdir()


class SharedWork:
    """A work that is under way, by the locks on the bytes of its claims: the kernel frees them when this process dies.

    They are those of POSIX: a lock of the process, and closing the file anywhere in it would free all of them.
    """

    def __init__(self, folder: Path, claims: int) -> None:
        self._folder = folder
        self._claims = claims
        self._named: set[int] = set()  # processes that this one has waited for, and said so

    def do(
        self, piece: int, what: str, *, is_done: Callable[[], object], make: Callable[[], None], waits: bool = True
    ) -> bool:
        """Have `make` do a piece, counted from 1, unless it is done; `what` names it where this process waits for it.

        False where another process is at work on it, and this one does not wait.
        """
        with self._claimed(piece, what, waits=waits) as is_claimed:
            # Meanwhile it may have been made, or even all, which have then been put together and removed.
            if is_claimed and not is_done() and self.is_there():
                make()
        return is_claimed

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Do what one process does alone."""
        with self._claimed(ALONE, str(self._folder), waits=True):
            yield

    def is_there(self) -> bool:
        """Whether the folder still has these claims: it may have been removed, and made anew."""
        try:
            return os.path.samestat(os.fstat(self._claims), (self._folder / CLAIMS).stat())
        except FileNotFoundError:
            return False

    @contextmanager
    def _claimed(self, byte: int, what: str, *, waits: bool) -> Iterator[bool]:
        """Claim a byte as soon as nobody else has it; after a while, say who has `what`, once for each process.

        False, and at once, where this process does not wait for another one.
        """
        began = time.monotonic()
        while not (is_claimed := self._take(byte)) and waits:
            if time.monotonic() - began > QUIET_SECONDS and (holder := self._holder(byte)) not in self._named:
                self._named.add(holder)
                log.info("%s: waiting for process %d, here or on another machine: end it if it hangs", what, holder)
            time.sleep(LOOK_SECONDS)
        try:
            yield is_claimed
        finally:
            if is_claimed:
                fcntl.lockf(self._claims, fcntl.LOCK_UN, 1, byte)

    def _take(self, byte: int) -> bool:
        """Lock a byte; False if another process has it."""
        try:
            fcntl.lockf(self._claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):  # POSIX allows either
            return False
        except OSError as error:
            place = self._folder / CLAIMS
            raise StorageError(f"{place}: cannot be locked: {error.strerror}: choose another place") from error
        return True

    def _holder(self, byte: int) -> int:
        """The process that has a byte; 0 where nobody has, or the system does not say."""
        if sys.platform != "linux":
            return 0
        layout = "hhqqi4x"  # of struct flock: type, whence, start, length, process
        asked = struct.pack(layout, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        return int(struct.unpack(layout, fcntl.fcntl(self._claims, fcntl.F_GETLK, asked))[-1])
