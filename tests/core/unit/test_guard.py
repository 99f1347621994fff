"""What may end a run early: signals, in this process and in one that ends, and gradients that are not finite."""

import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paths import ROOT
from transformer.cli import main
from transformer.errors import NumericalError, Stopped, TransformerError
from transformer.records import Progress
from transformer.training.guard import Interrupted, NumbersGuard, Signals, advice, stopped

ENDS_AT_SECOND = [signal.SIGTERM, signal.SIGINT]
NUMBERS = [*ENDS_AT_SECOND, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS)
def test_signals_take_the_first_as_a_request(number: signal.Signals) -> None:
    with Signals() as signals:
        assert not signals.requested
        signal.raise_signal(number)
        assert signals.requested


def test_signals_put_the_handlers_back() -> None:
    def mine(*_: object) -> None:
        """Somebody else's handler."""

    signal.signal(signal.SIGTERM, mine)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Signals():
        assert signal.getsignal(signal.SIGTERM) is not mine
    assert [signal.getsignal(number) for number in ENDS_AT_SECOND] == [mine, signal.SIG_IGN]
    with pytest.raises(ZeroDivisionError), Signals():
        _ = 1 / 0
    assert [signal.getsignal(number) for number in ENDS_AT_SECOND] == [mine, signal.SIG_IGN]


def test_signals_leave_an_ignored_hangup_ignored() -> None:
    """`nohup transformer train` goes on when its terminal closes."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Signals() as signals:
        signal.raise_signal(signal.SIGHUP)
        assert not signals.requested


def test_signals_leave_a_handler_alone_that_python_did_not_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that was loaded before Python may have one, which `signal.signal` could not put back."""
    earlier = signal.getsignal(signal.SIGUSR1)
    with monkeypatch.context() as patched:
        handlers = {number: signal.getsignal(number) for number in NUMBERS} | {signal.SIGUSR1: None}
        patched.setattr(signal, "getsignal", handlers.__getitem__)
        with Signals():
            patched.undo()
            assert signal.getsignal(signal.SIGUSR1) == earlier
            assert signal.getsignal(signal.SIGTERM) != handlers[signal.SIGTERM]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
@pytest.mark.parametrize("then", NUMBERS)
def test_signals_that_only_ask_hurry_nobody(number: signal.Signals, then: signal.Signals) -> None:
    """A terminal that closes sends two, and a scheduler SIGTERM after its warning: the save must come to its end."""
    with Signals() as signals:
        signal.raise_signal(number)
        signal.raise_signal(number)
        signal.raise_signal(then)
        assert signals.requested


@pytest.mark.parametrize("ignored", [False, True])
def test_main_interrupts_on_every_signal_that_the_loop_serves(ignored: bool) -> None:
    """Before the loop, and after it; but for SIGINT, of which Python itself makes a KeyboardInterrupt."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    main._interrupt_on_signals()
    for number in NUMBERS:
        if number == signal.SIGHUP and ignored:
            signal.raise_signal(number)
            continue
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    signal.raise_signal(signal.SIGHUP)  # a second one, while the process ends


def test_signals_leave_handlers_alone_outside_the_main_thread() -> None:
    """Python installs handlers in the main thread alone: elsewhere a signal does what it did before."""
    before = [signal.getsignal(number) for number in NUMBERS]
    seen: list[object] = []

    def enter() -> None:
        with Signals() as signals:
            signals.check()
            seen.extend([signals.requested, *(signal.getsignal(number) for number in NUMBERS)])

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [False, *before]


def test_signals_end_the_process_at_once_at_the_second() -> None:
    """Each in a child of one process, which has imported what they need."""
    pairs = list(itertools.product(ENDS_AT_SECOND, repeat=2))
    code = (
        "import atexit, os, sys, time\n"
        "from transformer.training.guard import Signals\n"
        f"for _ in range({len(pairs)}):\n"
        "    if child := os.fork():\n"
        "        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)\n"
        "        continue\n"
        "    atexit.register(print, 'cleaned up', flush=True)\n"
        "    with Signals() as signals:\n"
        "        print(os.getpid(), flush=True)\n"
        "        while not signals.requested:\n            time.sleep(0.01)\n"
        "        print('requested', flush=True)\n"
        "        time.sleep(60)\n"
        "    sys.exit()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for first, second in pairs:
        child = int(process.stdout.readline())
        os.kill(child, first)
        assert process.stdout.readline() == "requested\n"
        os.kill(child, second)
        assert process.stdout.readline() == f"{128 + second}\n"
    assert process.communicate(timeout=120)[0] == ""
    assert process.returncode == 0


def skipped(total: int, streak: int, longest: int | None = None) -> Progress:
    """The progress at step 500 after `total` skipped updates, the last `streak` of them up to this step."""
    longest = streak if longest is None else longest
    return Progress(step=500, skipped=total, streak=streak, longest_streak=longest, first_skipped=490)


@pytest.mark.parametrize("streak", [1, 9])
def test_guard_only_reports_up_to_nine_consecutive_skipped_updates(
    streak: int, caplog: pytest.LogCaptureFixture
) -> None:
    guard = NumbersGuard(Progress())
    with caplog.at_level(logging.WARNING, logger="transformer"):
        guard.check(skipped(streak, streak), loss_scale=None)
        guard.check(skipped(streak, 0, streak), loss_scale=None)  # nothing new: nothing is said
    (record,) = caplog.records
    for part in ("step 500", f"{streak} updates skipped", "first at step 490", f"at most {streak} in a row"):
        assert part in record.getMessage()


@pytest.mark.parametrize("streak", [10, 11])
def test_guard_ends_the_run_at_the_tenth(streak: int) -> None:
    with pytest.raises(NumericalError, match=rf"^{streak} consecutive updates.* step 500$") as error:
        NumbersGuard(Progress()).check(skipped(streak, streak), loss_scale=None)
    assert error.value.exit_status == 6
    assert "\n" not in str(error.value)


def test_guard_sees_a_streak_that_ended_before_it_looked() -> None:
    with pytest.raises(NumericalError, match="10 consecutive"):
        NumbersGuard(Progress()).check(skipped(11, 1, 10), loss_scale=None)


def test_guard_does_not_blame_an_old_streak_for_a_new_skipped_update() -> None:
    """A long one that a checkpoint knows of was survived; one more skipped update is only reported."""
    NumbersGuard(skipped(16, 0, 16)).check(skipped(17, 1, 16), loss_scale=None)
    with pytest.raises(NumericalError, match="12 consecutive"):
        NumbersGuard(skipped(16, 0, 16)).check(skipped(28, 12, 16), loss_scale=None)


def test_guard_lets_a_loss_scale_above_one_fall(caplog: pytest.LogCaptureFixture) -> None:
    """From 65,536 that is sixteen halvings down to 1, which still may help; then there is nothing left to try."""
    guard = NumbersGuard(Progress())
    for count in range(16):
        guard.check(skipped(count + 1, count + 1), loss_scale=32768.0 / 2**count)
    assert "the loss scale is now 32768" in caplog.records[0].getMessage()
    with pytest.raises(NumericalError, match="17 consecutive"):
        guard.check(skipped(17, 17), loss_scale=0.5)


def test_guard_reports_spikes_once(caplog: pytest.LogCaptureFixture) -> None:
    guard = NumbersGuard(Progress(step=400, spikes=1, last_spike=390))
    for spikes, last in ((1, 390), (3, 488), (3, 488)):
        guard.check(Progress(step=500, usual_norm=0.25, spikes=spikes, last_spike=last), loss_scale=None)
    (record,) = caplog.records
    for part in ("step 500", "2 updates", "10 times the recent mean, now 0.25", "3 in all, the last at step 488"):
        assert part in record.getMessage()


def test_stopped_says_what_is_saved() -> None:
    error = stopped(1234)
    assert (type(error), error.exit_status) == (Stopped, 75)
    assert "1234" in str(error)
    assert not issubclass(Interrupted, TransformerError), "an interrupted validation must not end up as an exit status"


def test_advice_is_a_command_that_a_shell_takes_as_it_is(tmp_path: Path) -> None:
    run_dir = tmp_path / "my run"
    assert f"; `transformer replay 'run_dir={run_dir}'` names the module" in advice(run_dir)
