"""Measurements in a file of JSON lines: each is appended the moment it is known, and is never made twice.

A process that is killed in the middle loses the measurement it was making and nothing else. Started again with the same
file, it goes on with the one behind the last.
"""

import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Numbers = dict[str, Any]
NEAR = 0.02  # of a norm: rounding in half precision makes no larger difference


class Measured:
    """The measurements in a file, by name; one that failed has `error` instead of numbers, and is tried again."""

    def __init__(self, path: Path | None, *, seconds: float) -> None:
        """`path` need not exist yet; None: nothing is kept. After so many seconds, no measurement is begun any more."""
        self._path = path
        self._end = time.monotonic() + seconds
        self._known = {} if path is None else read(path)
        if path is not None and path.exists() and not path.read_bytes().endswith(b"\n"):
            append(path, "\n")  # a kill cut off the last line: the next one must not stand behind it
        self.failed: list[str] = []  # of those that this process tried
        self.left_out: list[str] = []  # for want of time

    def __contains__(self, name: str) -> bool:
        return "error" not in self._known.get(name, {"error": "not measured"})

    @property
    def seconds_left(self) -> float:
        """Until no measurement is begun any more."""
        return self._end - time.monotonic()

    def add(self, name: str, numbers: Numbers) -> None:
        """Write what was measured, as one line: whoever stops us now keeps it."""
        record = {"name": name, **numbers}
        self._known[name] = record
        if self._path is not None:
            append(self._path, json.dumps(record) + "\n")

    def get(self, name: str) -> Numbers | None:
        """What is known of it, a failure too."""
        return self._known.get(name)

    def take(self, name: str, measure: Callable[[], Numbers], *, again: bool = False) -> None:
        """Measure and write, unless it is known or the time is over. A failure is written, and stops nobody."""
        if name in self and not again:
            return
        if self.seconds_left <= 0:
            self.left_out.append(name)
            return

        begun = time.monotonic()
        try:
            numbers = measure()
        except Exception as error:  # the other measurements are made all the same
            traceback.print_exc()
            numbers = {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}
        if "error" in numbers:
            self.failed.append(name)
        self.add(name, numbers | {"took_seconds": round(time.monotonic() - begun, 3)})

    def status(self) -> int:
        """The exit status of a script that measured: 1 where something is missing, which is then said."""
        for word, names in (("failed", self.failed), ("no time was left for", self.left_out)):
            if names:
                print(f"{word}: {', '.join(names)}", file=sys.stderr)
        return 1 if self.failed or self.left_out else 0


def judged(times: Numbers, errors: list[float]) -> Numbers:
    """These times, as a failure where what was timed is so far from float64: then they decide nothing."""
    is_near = all(error < NEAR for error in errors)  # a NaN is not
    found = times | {"errors": errors, "largest_error": max(errors)}
    return found if is_near else found | {"error": f"differs from float64 by {errors}"}


def append(path: Path, text: str) -> None:
    """Add this to the end of a file, at once."""
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def read(path: Path) -> dict[str, Numbers]:
    """What a file holds, by name; of two measurements of one name, the later. A torn last line is left out."""
    found: dict[str, Numbers] = {}
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.split("\n")[:-1]:
        try:
            record = json.loads(line)
        except ValueError:  # cut off by a kill
            continue
        if isinstance(record, dict) and isinstance(record.get("name"), str):  # what else is there is nobody's number
            found[record["name"]] = record
    return found
