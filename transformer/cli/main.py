"""The entry point: dispatch, exit statuses, signals. Every error ends in one line and in the status of its class.

TRANSFORMER_DEBUG=1 shows the traceback of any of them. An exception that nobody expected is a bug, and is called one.
"""

import contextlib
import errno
import logging
import os
import platform
import signal
import sys
import threading
import traceback
from importlib.metadata import version
from types import FrameType
from typing import NoReturn

from transformer import __version__
from transformer.cli.commands import COMMANDS
from transformer.cli.overrides import command_help, overview, parse_arguments
from transformer.config.keys import did_you_mean
from transformer.errors import InputError, Stopped, StorageError, TransformerError
from transformer.terminal import PrintableFormatter, printable

BUG = 1  # the exit status of an exception that nobody expected; Python's own

# What a file system answers where it cannot be written. Any other OSError that arrives here is a bug: errors about the
# user's own paths become a TransformerError where they arise.
CANNOT_BE_WRITTEN = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.EIO, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ESTALE),
}


def main() -> NoReturn:
    """The console script."""
    _fill_closed_descriptors()
    _interrupt_on_signals()
    _log_to_stderr()
    logging.getLogger("transformer").setLevel(logging.INFO)  # not the root: the hub's client tells of every request
    threading.excepthook = _end_thread
    sys.exit(_dispatch(sys.argv[1:]))


def _fill_closed_descriptors() -> None:
    """Open what a shell closed (`<&-`), or the first files of the run would take the numbers 0 to 2, and their text."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 (until the process ends)


def _log_to_stderr() -> None:
    logging.raiseExceptions = False  # where standard error cannot be written, a traceback cannot, either
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter("%(message)s"))
    logging.basicConfig(handlers=[handler])


def _interrupt_on_signals() -> None:
    """Every signal that asks for the end is a KeyboardInterrupt, as SIGINT is; the steps of a training delay it."""
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGUSR1, _interrupt)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGHUP:
        signal.signal(number, signal.SIG_IGN)  # a terminal that closes sends it twice
    raise KeyboardInterrupt


def _end_thread(failure: threading.ExceptHookArgs) -> None:
    """TensorBoard writes from a thread of its own: where it cannot, the run is told at the next step, in one line."""
    if not issubclass(failure.exc_type, OSError):
        threading.__excepthook__(failure)


def _dispatch(arguments: list[str]) -> int:
    """Run a command; its exit status."""
    command = arguments[0] if arguments else ""
    try:
        if sys.stdout is None:
            raise StorageError("standard output is closed: redirect it to a file, or to /dev/null")
        _enter(command, arguments[1:])
        sys.stdout.flush()
    except TransformerError as error:
        return _fail(error, str(error), error.exit_status)
    except KeyboardInterrupt as error:
        status = Stopped.exit_status if command in ("prepare", "train", "table") else 128 + signal.SIGINT
        return _fail(error, "stopped; the same command starts again", status)
    except BrokenPipeError:  # the reader of our output has gone
        _drop_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in CANNOT_BE_WRITTEN:
            return _fail_as_bug(error)
        if error.filename is None:  # standard output, as a rule
            _drop_output()
        return _fail(error, f"{error.filename or 'output'}: {error.strerror}", StorageError.exit_status)
    except Exception as error:
        return _fail_as_bug(error)
    return 0 if arguments else InputError.exit_status


def _enter(command: str, arguments: list[str]) -> None:
    if command in ("", "-h", "--help", "help"):
        sys.stdout.write(overview())
        return
    if command == "--version":
        sys.stdout.write(_versions())
        return
    if command in ("--completion", "--complete"):
        _complete(command, *arguments[:1] or [""])
        return
    if command not in COMMANDS:
        raise InputError(
            f"unknown command {command!r}{did_you_mean(command, COMMANDS)}; `transformer --help` lists them"
        )
    if command == "translate" and sys.stdin is None:
        raise InputError("standard input is closed: there is nothing to translate")

    parsed = parse_arguments(command, arguments)
    if parsed.wants_help:
        sys.stdout.write(command_help(command, parsed.config_dir))
        return

    from transformer.cli.application import run_application  # Hydra takes a third of a second, which help does not
    from transformer.machine import limit_kernel_caches

    if command in ("train", "table"):  # a search alone has few shapes, and uses each of them again at once
        limit_kernel_caches()
    run_application(command, parsed)


def _versions() -> str:
    """This package, the formats that it writes, and what it computes with."""
    from transformer.records import CHECKPOINT_FORMAT, RUN_FORMAT

    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "sentencepiece", "sacrebleu"))
    return (
        f"transformer {__version__}\n"
        f"run directories of format {RUN_FORMAT}, checkpoints of format {CHECKPOINT_FORMAT}\n"
        f"Python {platform.python_version()}, {packages}\n"
    )


def _complete(flag: str, argument: str) -> None:
    """Write the script that a shell evaluates, or the words that it asks for while somebody types."""
    from transformer.cli.completion import complete, script

    text = script(argument) if flag == "--completion" else "".join(f"{word}\n" for word in complete(argument))
    sys.stdout.write(text)


def _drop_output() -> None:
    """Let what is still to be written vanish: the interpreter would try once more when it ends, and fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail_as_bug(error: Exception) -> int:
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    how = "please report it with the output of TRANSFORMER_DEBUG=1, which shows where it happened"
    return _fail(error, f"this is a bug: {message}; {how}", BUG)


def _fail(error: BaseException, message: str, status: int) -> int:
    """Report an error in one line; the status. A rank gives both away: torchrun's own status is always 1."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        message = f"{message} (rank {os.environ.get('RANK')}: exit status {status})"
    with contextlib.suppress(OSError):  # a full disk: the status still says it
        if os.environ.get("TRANSFORMER_DEBUG") == "1":
            sys.stderr.write(printable("".join(traceback.format_exception(error)), keep="\n"))
        sys.stderr.write(f"transformer: error: {printable(message)}\n")
    return status
