"""Which ranks are alive; and how a rank ends that has lost another one, or its launcher.

Beside every rank runs a thread, the watch. Twice a second it looks into the key-value store in which the ranks found
each other (torchrun's, or that of rank 0):

    has some rank lost a peer?   no: look again
      -> answer for this rank, even while it is blocked in a collective; note who else answers, and who left a reason
      -> end the process, if the rank does not end by itself

A rank that was killed or stopped does not answer, and so can be named.
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
ANSWER_SECONDS = 1.0  # within which the thread of every living rank has answered
STORE_SECONDS = 0.3  # that a rank then stays, because others may still need the store of its process
LEAVE_SECONDS = 3.0  # after which a rank that knows of a lost peer is ended, whatever blocks it
NOTICE_SECONDS = 20.0  # after which a rank that has not found the others says that it waits
MEETING_SECONDS = 600.0  # within which the ranks have found each other
LAUNCHERS = {"TORCHELASTIC_RUN_ID": "torchrun", "SUBMITIT_EXECUTOR": "submitit"}  # by the variables that they set
SAVE_SECONDS = 30.0  # for a rank without a launcher to save and end: as much as torchrun grants

LOST = "transformer/lost"  # a key of the store: some rank has failed, or lost a peer
LOST_STATUS = PeerError.exit_status


class Store(Protocol):
    """The part of torch's key-value store that is used. Every method raises RuntimeError once the store has gone."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""

    def get(self, key: str) -> bytes:
        """Read a value."""

    def check(self, keys: list[str]) -> bool:
        """Whether all these keys have one."""


class Watch:
    """The thread beside a rank, for as long as a `with` block lasts."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._others = [other for other in range(size) if other != rank]

        # What the thread finds out.
        self._alive: set[int] = set()  # ranks whose thread has answered
        self._reasons: dict[int, str] = {}  # of ranks that failed by themselves

        # What the thread logs, and the exit status that it sets, if it has to end the process.
        self._loss = "another rank is lost"
        self._status = LOST_STATUS

        self._is_ending = threading.Event()  # this rank has failed, or lost a peer
        self._has_asked = threading.Event()  # `_alive` and `_reasons` are complete, or the store has gone
        self._has_left = threading.Event()  # this rank has left the `with` block

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
            self._store.set(_failed_key(self._rank), reason or type(error).__name__)
            self._ask()

    def describe_loss(self, symptom: str) -> str:
        """Which rank failed and why, or which does not answer; `symptom` is what the failed message said."""
        self._ask()
        self._loss = self._describe(symptom)
        return self._loss

    def _describe(self, symptom: str) -> str:
        if self._reasons:
            failed, reason = next(iter(self._reasons.items()))
            return f"rank {failed} failed: {reason}"

        lost = [other for other in self._others if other not in self._alive]
        if self._rank not in self._alive:  # the store does not answer, nor the process that has it
            is_of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            lost = [] if is_of_torchrun else [0]
        return f"{_say_lost(lost)}: {symptom}"

    def _ask(self) -> None:
        """Let the thread ask who is alive, and wait for it: not for ever, since it may hang with the store."""
        self._is_ending.set()
        self._has_asked.wait(ANSWER_SECONDS + 2 * STORE_SECONDS)

    def _watch(self) -> None:
        """What the thread does."""
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
        self._store.set(_alive_key(self._rank), "")

        # Ask until all have answered, or time is up.
        deadline = time.monotonic() + ANSWER_SECONDS
        while len(self._alive) <= len(self._others) and time.monotonic() < deadline:
            for other in self._others:
                if other not in self._alive and self._store.check([_alive_key(other)]):
                    self._alive.add(other)
                if other not in self._reasons and self._store.check([_failed_key(other)]):
                    self._reasons[other] = self._store.get(_failed_key(other)).decode(errors="replace")
            self._alive.add(self._rank)  # the store has answered to this rank
            time.sleep(STORE_SECONDS / 10)
        time.sleep(STORE_SECONDS)  # the others may still ask the store of this process


def _alive_key(rank: int) -> str:
    return f"transformer/alive/{rank}"


def _failed_key(rank: int) -> str:
    return f"transformer/failed/{rank}"


def _say_lost(lost: list[int]) -> str:
    match lost:
        case []:
            return "another rank does not answer"
        case [one]:
            return f"rank {one} does not answer"
        case _:
            return f"ranks {', '.join(map(str, lost))} do not answer"


@contextmanager
def meeting_in_time() -> Iterator[None]:
    """End this rank where the ranks do not find each other within MEETING_SECONDS, and say before that it waits.

    Nobody misses a rank that dies before they have met, and torch would wait for it as long as for a message.
    """

    def say() -> None:
        log.warning(
            "rank %s of %s is still waiting for the others, and gives up after %g seconds: check whether one "
            "died or was never started",
            os.environ.get("RANK", "?"),
            os.environ.get("WORLD_SIZE", "?"),
            MEETING_SECONDS,
        )

    def give_up() -> None:
        log.error(
            "the ranks have not found each other in %g seconds: check MASTER_ADDR, MASTER_PORT and the network "
            "(exit status %d)",
            MEETING_SECONDS,
            LOST_STATUS,
        )
        os._exit(LOST_STATUS)

    timers = [threading.Timer(NOTICE_SECONDS, say), threading.Timer(MEETING_SECONDS, give_up)]
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()


@contextmanager
def ending_with_launcher() -> Iterator[None]:
    """Stop this rank where what has started it is killed outright, which tells nobody: by SIGTERM first, then by force.

    Its ranks would train on, and write, beside those that somebody starts in their place.
    """
    name = next((name for variable, name in LAUNCHERS.items() if variable in os.environ), None)
    if name is None:
        yield
        return

    launcher = os.getppid()
    has_ended = threading.Event()

    def watch() -> None:
        while os.getppid() == launcher:
            if has_ended.wait(LOOK_SECONDS):
                return
        log.warning("%s has died: this rank stops", name)
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
    """Ignore SIGTERM while a rank finds out, or tells, why it ends: torchrun sends one once any rank has ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
