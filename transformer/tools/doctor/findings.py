"""The result of one of the doctor's checks: what was measured, where, and what to do about it.

    a check in text, languages, alignment, pieces or training -> passed / failed / measured -> Check -> command

A check without a figure has passed or failed; one that has measured a figure compares it with a limit.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

LISTED = 5  # line numbers that are given of each file


class Level(Enum):
    """How bad it is: an error spoils the training or its scores, a warning is worth a look before the hours."""

    ok = "ok"
    warning = "warning"
    error = "error"


@dataclass(frozen=True)
class Place:
    """Where a fault is in a file."""

    path: str
    lines: list[int]  # the first few, counted from 1


@dataclass(frozen=True)
class Check:
    """What one check says of one set, one side of a set, or the training as a whole."""

    name: str  # what is checked, such as "duplicates"
    where: str  # the set, or the set and the side, or a part of the training, such as "model"
    level: Level
    found: str  # what was measured, in words
    value: float | None  # the figure that was measured; None: a check without one
    limit: float | None  # the largest value that is ok
    remedy: str | None  # None: nothing is to be done
    places: list[Place]


def passed(name: str, where: str, *, found: str) -> Check:
    """A check without a figure that is ok, or one that could not be made: `found` says why."""
    return Check(name, where, Level.ok, found, value=None, limit=None, remedy=None, places=[])


def failed(name: str, where: str, *, found: str, level: Level, remedy: str, places: Iterable[Place]) -> Check:
    """A finding without a figure."""
    return Check(name, where, level, found, value=None, limit=None, remedy=remedy, places=list(places))


def measured(
    name: str,
    where: str,
    *,
    found: str,
    value: float,
    limit: float,
    level: Level,
    remedy: str,
    places: Iterable[Place],
) -> Check:
    """A check of one figure: a finding of this level where the figure is above the limit, else ok."""
    if value <= limit:
        return Check(name, where, Level.ok, found, value=value, limit=limit, remedy=None, places=[])
    return Check(name, where, level, found, value=value, limit=limit, remedy=remedy, places=list(places))


def percent(share: float) -> str:
    """A share as people read it; a small one is not rounded to nothing."""
    is_small = 0.0 < share < 0.01
    return f"{100 * share:.2g} %" if is_small else f"{100 * share:.1f} %"
