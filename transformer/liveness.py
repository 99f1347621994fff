"""Which ranks are alive, and the end of a rank that has lost another one, or its launcher.

Beside every rank a thread asks twice a second whether some rank has lost a peer. Then it answers for its rank, even
while that is blocked in a collective, and ends the process if the rank cannot. A rank that was killed or stopped does
not answer, and so is named. Word travels through the store in which the ranks found each other: torchrun's, or that of
rank 0.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from transformer.errors import PeerError

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5  # between two looks at the store, and at the launcher
ANSWER_SECONDS = 1.0  # in which the thread of every living rank has answered
STORE_SECONDS = 0.3  # for which a rank then stays: others may still need the store of its process
LEAVE_SECONDS = 3.0  # after which a rank ends that knows of a lost peer, whatever holds it
MEETING_SECONDS = 600.0  # in which the ranks have found each other
SAVE_SECONDS = 30.0  # for a rank without a launcher to save and end: as much as torchrun grants

LOST = "transformer/lost"  # a key of the store: some rank has failed, or lost a peer
LOST_STATUS = PeerError.exit_status


class Store(Protocol):
    """What is used of torch's key-value store. Every method raises RuntimeError once the store has gone."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""

    def get(self, key: str) -> bytes:
        """Read a value."""

    def check(self, keys: list[str]) -> bool:
        """Whether all these keys have one."""


class Watch:
    """The thread beside a rank of several, from `with` to the end of its block."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._others = [other for other in range(size) if other != rank]
        self._alive: set[int] = set()  # ranks whose thread has answered
        self._reasons: dict[int, str] = {}  # of ranks that failed by themselves
        self._status = LOST_STATUS  # with which this rank ends if something holds it
        self._loss = "another rank is lost"
        self._is_ending = threading.Event()  # this rank has failed, or lost a peer
        self._has_asked = threading.Event()  # the two tables are complete, or the store has gone
        self._has_left = threading.Event()

    def __enter__(self) -> "Watch":
        threading.Thread(target=self._watch, name="liveness", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_left.set()
        self._is_ending.set()

    def report_failure(self, error: BaseException) -> None:
        """Write why this rank fails, and wait until the others have read it: the store may end with this process."""
        self._status = getattr(error, "exit_status", 1)
        self._loss = f"{type(error).__name__}: {error}"
        reason = "stopped by a signal" if isinstance(error, KeyboardInterrupt) else str(error).partition("\n")[0]
        with suppress(RuntimeError):
            self._store.set(_reason(self._rank), reason or type(error).__name__)
            self._ask()

    def describe_loss(self, symptom: str) -> str:
        """Which rank failed and why, or which does not answer; `symptom` is what the failed message said."""
        self._ask()
        self._loss = self._describe(symptom)
        return self._loss

    def _describe(self, symptom: str) -> str:
        for failed, reason in self._reasons.items():
            return f"rank {failed} failed: {reason}"

        lost = [other for other in self._others if other not in self._alive]
        if self._rank not in self._alive:  # the store does not answer, nor the process that has it
            lost = [] if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else [0]
        return f"{_ranks(lost)}: {symptom}"

    def _ask(self) -> None:
        """Let the thread ask who is alive; where it hangs with the process that has the store, nobody has answered."""
        self._is_ending.set()
        self._has_asked.wait(ANSWER_SECONDS + 2 * STORE_SECONDS)

    def _watch(self) -> None:
        try:
            self._wait_for_loss()
            self._exchange_status()
        except RuntimeError:  # the store has gone
            return
        finally:
            self._has_asked.set()

        if not self._has_left.wait(LEAVE_SECONDS):
            log.error("%s; this rank does not end by itself (exit status %d)", self._loss, self._status)
            os._exit(self._status)

    def _wait_for_loss(self) -> None:
        while not self._is_ending.wait(LOOK_SECONDS):
            if self._store.check([LOST]):
                return

    def _exchange_status(self) -> None:
        """Answer for this rank, and note who else does, and who has left a reason."""
        if self._has_left.is_set():
            return
        self._store.set(LOST, "")
        self._store.set(_answer(self._rank), "")

        deadline = time.monotonic() + ANSWER_SECONDS
        while len(self._alive) <= len(self._others) and time.monotonic() < deadline:
            for other in self._others:
                if other not in self._alive and self._store.check([_answer(other)]):
                    self._alive.add(other)
                if other not in self._reasons and self._store.check([_reason(other)]):
                    self._reasons[other] = self._store.get(_reason(other)).decode(errors="replace")
            self._alive.add(self._rank)
            time.sleep(STORE_SECONDS / 10)
        time.sleep(STORE_SECONDS)  # the others may still ask the store of this process


def _answer(rank: int) -> str:
    return f"transformer/alive/{rank}"


def _reason(rank: int) -> str:
    return f"transformer/failed/{rank}"


def _ranks(lost: list[int]) -> str:
    match lost:
        case []:
            return "another rank does not answer"
        case [one]:
            return f"rank {one} does not answer"
        case _:
            return f"ranks {', '.join(map(str, lost))} do not answer"


@contextmanager
def meeting_in_time() -> Iterator[None]:
    """End this rank where the ranks do not find each other in MEETING_SECONDS.

    One that dies meanwhile is missed by nobody yet, and torch would wait for it as long as for a message: a day.
    """

    def give_up() -> None:
        log.error(
            "the ranks have not found each other in %g seconds: check MASTER_ADDR, MASTER_PORT and the network "
            "(exit status %d)",
            MEETING_SECONDS,
            LOST_STATUS,
        )
        os._exit(LOST_STATUS)

    timer = threading.Timer(MEETING_SECONDS, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def ending_with_launcher() -> Iterator[None]:
    """Stop this rank where torchrun is killed outright, which tells nobody: by SIGTERM first, then by force.

    Its ranks would train on, and write, beside those that somebody starts in their place.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield
        return

    launcher = os.getppid()
    has_ended = threading.Event()

    def watch() -> None:
        while os.getppid() == launcher:
            if has_ended.wait(LOOK_SECONDS):
                return
        log.warning("torchrun has died: this rank stops")
        os.kill(os.getpid(), signal.SIGTERM)
        if not has_ended.wait(SAVE_SECONDS):
            os._exit(LOST_STATUS)

    threading.Thread(target=watch, name="launcher", daemon=True).start()
    try:
        yield
    finally:
        has_ended.set()


@contextmanager
def keeping_status() -> Iterator[None]:
    """Ignore SIGTERM while a rank finds out why it ends, or tells it: torchrun sends it once any rank has ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
