"""Each class of errors has an exit status: a command that fails prints the error's one line and exits with its status.

The message names the file (and line, where there is one), what is wrong, and the remedy. Exit status 1 is for
exceptions of other classes, which are bugs.
"""

from transformer.terminal import printable


def in_a_line(error: BaseException) -> str:
    """The message of an error that is none of these, such as another package's: in one line, and not too long."""
    return " ".join(str(error).split())[:200]


class TransformerError(Exception):
    """The root of every error that a user can cause or mend; never raised itself."""

    exit_status: int

    def __str__(self) -> str:
        """The message in one line: the name of a file in it may be anything."""
        return printable(super().__str__())


class InputError(TransformerError):
    """Bad input or configuration."""

    exit_status = 2


class LockedError(TransformerError):
    """Another process is writing to the run directory."""

    exit_status = 3


class CheckpointError(TransformerError):
    """A checkpoint or another file of a run is missing, damaged or does not fit, or the run cannot be resumed so."""

    exit_status = 4


class StorageError(TransformerError):
    """Out of space, memory, threads or file handles; or a place that cannot be written."""

    exit_status = 5


class NumericalError(TransformerError):
    """Numbers of a training are not finite: too many updates in a row, or what a checkpoint would hold."""

    exit_status = 6


class PeerError(TransformerError):
    """Another rank failed, or does not answer."""

    exit_status = 7


class Rank0Error(PeerError):
    """Rank 0 failed in a task of its own, of which it told the others: the next training may have all of them again."""


class FindingsError(TransformerError):
    """`doctor` found something to mend before a training, or `verify` that a training did not come to the same."""

    exit_status = 8


class TooEarly(TransformerError):
    """What another command makes is not there yet: the same command goes on when it is."""

    exit_status = 75


class Stopped(TransformerError):
    """Stopped, by a signal or where a GPU failed in a way that is not taken again: the same command goes on."""

    exit_status = 75
