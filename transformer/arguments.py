"""Checks of the arguments of a Python user, who may give anything: what does not fit is an InputError that names it.

Commands need none of them: `compose` gives them typed settings.
"""

import os
import reprlib
from collections.abc import Iterable, Mapping, Set
from numbers import Integral
from pathlib import Path

from transformer.errors import InputError

_SHORT = reprlib.Repr()
_SHORT.maxother = _SHORT.maxstring = 80


def shown(value: object) -> str:
    """The beginning of a value, in one line."""
    return " ".join(_SHORT.repr(value).split())[:80]


def list_of_texts(name: str, texts: Iterable[str], *, item: str = "text") -> list[str]:
    """The texts of any iterable that has an order. Raises InputError for anything else, and names the first other item.

    A single text is refused, which Python would take for a list of texts: its letters. `item` is what a text is called.
    """
    if isinstance(texts, str):
        raise InputError(f"{name} must be a list of {item}s: for a single one, give [{item}]")
    has_order = isinstance(texts, Iterable) and not isinstance(texts, bytes | bytearray | Mapping | Set)
    if not has_order:
        raise InputError(f"{name}={shown(texts)} must be a list of {item}s, or another ordered iterable")

    found = list(texts)
    for index, text in enumerate(found):
        if not isinstance(text, str):
            raise InputError(f"{name}[{index}]={shown(text)} must be a {item} (str){_instead(text)}")
    return found


def _instead(value: object) -> str:
    """A clause with what to give in place of a value that is no text, or nothing."""
    match value:
        case None:
            return ': a blank one is ""'
        case bytes() | bytearray():
            return ": decode it first"
        case os.PathLike():
            return ": read its lines first"
    return ""


def path_of(name: str, value: object) -> Path:
    """The path that a text or another path names. Raises InputError for anything else."""
    found = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(found, str) or not found or "\0" in found:
        raise InputError(f"{name}={shown(value)} must be a path (str or pathlib.Path)")
    return Path(found)


def whole(name: str, number: object, *, least: int | None = None) -> int:
    """A whole number. Raises InputError for anything else, and for one below `least` or beyond 64 bits."""
    if not isinstance(number, Integral) or isinstance(number, bool):
        raise InputError(f"{name}={shown(number)} must be a whole number")
    if least is not None and number < least:
        raise InputError(f"{name}={shown(number)} must be at least {least}")
    if abs(int(number)) >= 2**63:
        raise InputError(f"{name}={shown(number)} is too large")
    return int(number)


def check_flag(name: str, value: object) -> None:
    """Raise InputError for anything but True and False."""
    if not isinstance(value, bool):
        raise InputError(f"{name}={shown(value)} must be True or False")


def check_callable(name: str, value: object) -> None:
    """Raise InputError for what cannot be called."""
    if not callable(value):
        raise InputError(f"{name}={shown(value)} must be a function")
