"""A judge or a teacher as a process: `program_process.py COMMAND ...` runs a command, and ends all that it has started.

Linux gives a process whose parent has ended to the next subreaper above it, and this process is one. So what the
command has started, and what that has started, become children of this process, whatever sessions they have made. They
are ended when the command has ended, or when the standard input is at its end: whoever started this is gone then, or
has waited long enough. Elsewhere than on Linux only the command and its process group are ended.

This runs by itself, without the package: it is there in milliseconds.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of linux/prctl.h


def main() -> None:
    """Run the command of the arguments, and end as it has ended."""
    with suppress(AttributeError):  # elsewhere than on Linux
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        process = subprocess.Popen(
            sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with_parent
        )
    except OSError as error:
        sys.exit(f"{sys.argv[1]}: {error.strerror}")

    threading.Thread(target=_end_with_input, args=[process], daemon=True).start()
    status = process.wait()
    _end_others(process.pid)
    if status < 0:
        with suppress(OSError):  # of SIGKILL, which needs no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


def _end_with_parent() -> None:
    """Have the command end with this process, which it may have stopped or killed itself."""
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _end_with_input(process: "subprocess.Popen[bytes]") -> None:
    os.read(0, 1)
    process.kill()


def _end_others(group: int) -> None:
    """End what is left of the command's process group, then children of this process until there are no more."""
    with suppress(ProcessLookupError, PermissionError):  # nothing is left
        os.killpg(group, signal.SIGKILL)
    with suppress(ChildProcessError):  # nothing is left
        while True:
            for child in _children():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(child, signal.SIGKILL)
            os.waitpid(-1, 0)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _children() -> Iterator[int]:
    """The processes whose parent this one is."""
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # it may have ended
            # Behind the name of the program, which may have anything in it: state and parent.
            if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                yield int(name)


if __name__ == "__main__":
    main()
