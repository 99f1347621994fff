"""Text for terminals and logs: what came from a file cannot take them over, nor forge a line of them.

Escape sequences set titles, clear the screen and write to the clipboard; marks of direction turn a line around; a
newline begins what looks like another message.
"""

import copy
import logging
import unicodedata
from collections.abc import Mapping
from numbers import Number

TIMED = "%(asctime)s %(levelname)s %(message)s"  # a log line with the time of day

JOINERS = "\u200c\u200d"  # within words of Persian and Hindi, and within emoji


def printable(text: str, *, keep: str = "") -> str:
    """The text with control characters, line ends, direction marks and the like escaped, as in `\\x1b`.

    The characters in `keep` stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character in keep or _is_shown(character) else ascii(character)[1:-1] for character in text
    )


def _is_shown(character: str) -> bool:
    """Whether a terminal shows the character, or leaves a space for it."""
    return character.isprintable() or character in JOINERS or unicodedata.category(character) == "Zs"


class PrintableFormatter(logging.Formatter):
    """Escapes the arguments of a record as `printable` does; a newline stays only in the message itself."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, or lines, of a record."""
        record = copy.copy(record)
        if isinstance(record.args, tuple):
            record.args = tuple(_printable_argument(value) for value in record.args)
        elif isinstance(record.args, Mapping):
            record.args = {key: _printable_argument(value) for key, value in record.args.items()}
        return printable(super().format(record), keep="\n")


def _printable_argument(value: object) -> object:
    """A number as it is, for `%d`; anything else as text."""
    return value if isinstance(value, Number) else printable(str(value))
