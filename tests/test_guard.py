"""What may end a run early: signals, in this process and in one that ends, and gradients that are not finite."""

import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from transformer.errors import NumericalError, Stopped, TransformerError
from transformer.training.guard import Interrupted, Signals, check_streak, stopped

ROOT = Path(__file__).resolve().parents[1]
NUMBERS = [signal.SIGTERM, signal.SIGINT]


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS)
def test_the_first_signal_is_a_request(number: signal.Signals) -> None:
    with Signals() as signals:
        assert not signals.requested
        signal.raise_signal(number)
        assert signals.requested


def test_the_handlers_are_put_back() -> None:
    def mine(*_: object) -> None:
        """Somebody else's handler."""

    signal.signal(signal.SIGTERM, mine)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Signals():
        assert signal.getsignal(signal.SIGTERM) is not mine
    assert [signal.getsignal(number) for number in NUMBERS] == [mine, signal.SIG_IGN]
    with pytest.raises(ZeroDivisionError), Signals():
        _ = 1 / 0
    assert [signal.getsignal(number) for number in NUMBERS] == [mine, signal.SIG_IGN]


@pytest.mark.parametrize("first", NUMBERS)
@pytest.mark.parametrize("second", NUMBERS)
def test_the_second_signal_ends_the_process_at_once(first: signal.Signals, second: signal.Signals) -> None:
    code = (
        "import atexit, signal, sys, time\n"
        "from transformer.training.guard import Signals\n"
        "atexit.register(print, 'cleaned up')\n"
        "with Signals() as signals:\n"
        "    print('ready', flush=True)\n"
        "    while not signals.requested:\n        time.sleep(0.01)\n"
        "    print('requested', flush=True)\n"
        "    time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(first)
    assert process.stdout.readline() == "requested\n"
    process.send_signal(second)
    assert process.communicate(timeout=10)[0] == ""
    assert process.returncode == 128 + second


@pytest.mark.parametrize("streak", [1, 9])
def test_up_to_nine_skipped_updates_in_a_row_are_only_logged(streak: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="transformer"):
        check_streak(streak, 500, loss_scale=1.0)
    (record,) = caplog.records
    assert "500" in record.getMessage()
    assert f"{streak} in a row" in record.getMessage()


@pytest.mark.parametrize("streak", [10, 11])
def test_the_tenth_ends_the_run_with_advice(streak: int) -> None:
    with pytest.raises(NumericalError, match=rf"^{streak} updates.* step 500.*train\.learning_rate") as error:
        check_streak(streak, 500, loss_scale=1.0)
    assert error.value.exit_status == 6
    assert "\n" not in str(error.value)


def test_a_loss_scale_above_one_may_still_fall(caplog: pytest.LogCaptureFixture) -> None:
    """From 65,536 that is sixteen halvings, however long the streak was; then there is nothing left to try."""
    for skipped in range(16):
        check_streak(skipped + 1, 500, loss_scale=65536.0 / 2**skipped)
    assert "loss scale of 65536" in caplog.records[0].getMessage()
    with pytest.raises(NumericalError, match="17 updates"):
        check_streak(17, 500, loss_scale=1.0)
    check_streak(9, 500, loss_scale=0.5)
    with pytest.raises(NumericalError, match="10 updates"):
        check_streak(10, 500, loss_scale=0.25)


def test_a_stopped_run_says_what_is_saved() -> None:
    error = stopped(1234)
    assert (type(error), error.exit_status) == (Stopped, 75)
    assert "1234" in str(error)
    assert not issubclass(Interrupted, TransformerError), "an interrupted validation must not end up as an exit status"
