"""The entry point: dispatch, exit statuses, signals.

    main            sets up signals and the log, and exits with the status of
    _dispatch       which turns every error into one line and an exit status, and calls
    _enter          which answers --help and --version itself, and hands any other command to `application`

A TransformerError brings its own exit status. Any exception that nobody expected is a bug, here or in
the plug-in of another package, and its message says so.
TRANSFORMER_DEBUG=1 shows the traceback of either.
"""

import contextlib
import errno
import io
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
from transformer.cli.overrides import PROGRAM_FLAGS, Arguments, command_help, overview, parse_arguments
from transformer.config.keys import did_you_mean
from transformer.errors import InputError, Stopped, StorageError, TransformerError
from transformer.registry import known_names, package_at_fault
from transformer.terminal import TIMED, PrintableFormatter, printable

LONGEST_MESSAGE = 4_000  # characters of an error line; of a longer one, its beginning and its end are shown
BUG = 1  # the exit status of an exception that nobody expected; Python's own

# The errors of a file system that cannot be written. Any other OSError that arrives here is a bug: errors about paths
# that the user gave become a TransformerError where they arise.
CANNOT_BE_WRITTEN = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.EIO, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ESTALE),
}


def main() -> NoReturn:
    """The console script."""
    _fill_closed_descriptors()
    _interrupt_on_signals()
    _log_to_stderr()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # of a locale without UTF-8
    logging.getLogger("transformer").setLevel(logging.INFO)  # not the root: the hub's client logs every request
    threading.excepthook = _end_thread
    sys.exit(_dispatch(sys.argv[1:]))


def _fill_closed_descriptors() -> None:
    """Open the standard streams that a shell closed (`<&-`).

    Otherwise the first files of the run would get the descriptors 0 to 2, and with them what is printed.
    """
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 (until the process ends)


def _log_to_stderr() -> None:
    logging.raiseExceptions = False  # where standard error cannot be written, neither can a traceback
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter("%(message)s"))
    logging.basicConfig(handlers=[handler])


def _set_volume(arguments: Arguments) -> None:
    """Let standard error show what --quiet or --verbose asks for; a training's train.log stays as it is."""
    for handler in logging.getLogger().handlers:
        if arguments.is_quiet:
            handler.setLevel(logging.WARNING)
        elif arguments.is_verbose:
            logging.getLogger("transformer").setLevel(logging.DEBUG)
            handler.setLevel(logging.DEBUG)
            handler.setFormatter(PrintableFormatter(TIMED))


def _interrupt_on_signals() -> None:
    """Make every signal that asks for the end a KeyboardInterrupt, as SIGINT is; training delays it to a step's end."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, _interrupt)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup has it ignored
        signal.signal(signal.SIGHUP, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGHUP:
        signal.signal(number, signal.SIG_IGN)  # a terminal that closes sends it twice
    raise KeyboardInterrupt


def _end_thread(failure: threading.ExceptHookArgs) -> None:
    """Show the traceback of a thread, unless it could not write.

    TensorBoard writes from a thread of its own. Where that fails, the next step of the training says so in one line.
    """
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
        if isinstance(error, InputError) and _was_interrupted(error):
            return _stop(command, error)
        if isinstance(error, Stopped):
            return _end(error, str(error), error.exit_status)
        return _fail_for_want(error) or _fail(error, str(error), error.exit_status)
    except KeyboardInterrupt as error:
        return _stop(command, error)
    except BrokenPipeError:  # the reader of our output has gone
        _drop_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in CANNOT_BE_WRITTEN:
            return _fail_for_want(error) or _fail_as_bug(error)
        if error.filename is None:  # standard output, as a rule
            _drop_output()
        return _fail(error, f"{error.filename or 'output'}: {error.strerror}", StorageError.exit_status)
    except Exception as error:
        if _was_interrupted(error):
            return _stop(command, error)
        return _fail_for_want(error) or _fail_as_bug(error)
    return 0 if arguments else InputError.exit_status


def _enter(command: str, arguments: list[str]) -> None:
    """Answer what needs no command, or run the command."""
    # Help, versions and completion.
    if command == "help" and arguments:
        _enter(arguments[0], ["--help", *arguments[1:]])
        return
    if command in ("", "-h", "--help", "help"):
        sys.stdout.write(overview())
        return
    if command == "--version":
        sys.stdout.write(_versions())
        return
    if command in ("--completion", "--complete"):
        _complete(command, arguments[0] if arguments else "")
        return

    # The command and its arguments.
    if command not in COMMANDS:
        of_plugins = known_names("command")
        meant = did_you_mean(command, [*COMMANDS, *of_plugins, *PROGRAM_FLAGS])
        beside = f", but for those of plug-ins: {', '.join(of_plugins)}" if of_plugins else ""
        raise InputError(f"unknown command {command!r}{meant}; `transformer --help` lists them{beside}")

    parsed = parse_arguments(command, arguments)
    if parsed.wants_help:
        sys.stdout.write(command_help(command, parsed.config_dir, wants_every_key=parsed.wants_every_key))
        return
    _set_volume(parsed)

    from transformer.cluster import read_slurm
    from transformer.machine import let_threads_sleep, limit_kernel_caches

    read_slurm()
    let_threads_sleep()
    if COMMANDS[command].goes_on:  # a search alone has few shapes, and uses each of them many times
        limit_kernel_caches()

    from transformer.cli.application import run_application  # Hydra takes a third of a second, which help does not

    if parsed.launcher is None:
        run_application(command, parsed)
        return

    from transformer.cli.submission import Submission  # which needs submitit

    run_application(command, parsed, Submission)


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

    if flag == "--completion":
        sys.stdout.write(script(argument))
    else:
        sys.stdout.write("".join(f"{word}\n" for word in complete(argument)))


def _drop_output() -> None:
    """Drop what is still to be written: the interpreter would try once more when it ends, and fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _was_interrupted(error: Exception) -> bool:
    """Whether it stands for an interrupt: a library that is struck in the middle of something may raise its own."""
    from transformer.machine import origins

    return any(isinstance(origin, KeyboardInterrupt) for origin in origins(error, are_hidden=True))


def _stop(command: str, error: BaseException) -> int:
    """Say whether a command that was interrupted can go on; the exit status."""
    if command in COMMANDS and COMMANDS[command].goes_on:
        return _end(error, "stopped; to go on, give the same command again", Stopped.exit_status)
    if command == "translate" and sys.stdin is not None and sys.stdin.isatty():  # a dialogue, which Ctrl-D ends, too
        return 128 + signal.SIGINT
    return _end(error, "stopped", 128 + signal.SIGINT)


def _fail_for_want(error: Exception) -> int:
    """Report that the machine had no more of something; the exit status, or 0 if it was not that.

    A file that cannot be opened because too many are open may have been taken for one that is missing or damaged. An
    error keeps its own words where they have this in them, or name the key with which memory suffices.
    """
    from transformer.machine import NO_MEMORY, lack_of

    lack = lack_of(error)
    if lack is None or (isinstance(error, TransformerError) and (lack == NO_MEMORY or lack in str(error))):
        return 0
    return _fail(error, lack, StorageError.exit_status)


def _fail_as_bug(error: Exception) -> int:
    """Report an exception that nobody expected; the exit status."""
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    remedy = "with the output of TRANSFORMER_DEBUG=1, which shows where it happened"
    package = package_at_fault(error)
    if package is not None:
        return _fail(error, f"a plug-in of the package {package} fails: {message}; report it there, {remedy}", BUG)
    return _fail(error, f"this is a bug: {message}; please report it {remedy}", BUG)


def _fail(error: BaseException, message: str, status: int) -> int:
    """Report an error in one line on standard error, and return the exit status."""
    return _end(error, f"error: {message}", status)


def _end(error: BaseException, message: str, status: int) -> int:
    """Say in one line on standard error why the command ends, and return the exit status.

    One of several ranks also writes its rank and status, since torchrun itself always ends with 1.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        message = f"{message} (rank {os.environ.get('RANK')}: exit status {status})"
    if len(message) > LONGEST_MESSAGE:
        half = LONGEST_MESSAGE // 2
        message = f"{message[:half]} [...] {message[-half:]}"
    with contextlib.suppress(OSError):  # where the disk is full, the status still tells
        if os.environ.get("TRANSFORMER_DEBUG") == "1":
            sys.stderr.write(printable("".join(traceback.format_exception(error)), keep="\n"))
        sys.stderr.write(f"transformer: {printable(message)}\n")
    return status
