"""Reads metrics.jsonl, a run's measurements, line by line."""

import json
import math
import re
from pathlib import Path

from transformer.files import open_regular
from transformer.tracking import LARGEST_METRICS

LONGEST_LINE = 1 << 16  # bytes of a line: a hundred times what training writes
SPEED = "speed/target_tokens_per_second"  # the name under which training writes its speed

_NAME = re.compile(r"[\w.-]{1,80}(/[\w.-]{1,80}){1,3}")  # of a quantity: speed/padding_share, scores/TEST_SET/bleu

Curve = list[tuple[int, float]]  # steps, ascending, each with its value


def read_curves(path: Path) -> tuple[dict[str, Curve], int]:
    """Every quantity over the steps, by its name in metrics.jsonl, and how many lines are damaged.

    Damaged lines are skipped: a crash may leave one. Raises OSError where the file cannot be read.
    """
    points: dict[str, dict[int, float]] = {}
    damaged = 0
    with open_regular(path, limit=LARGEST_METRICS) as file:
        for line in iter(lambda: file.readline(LONGEST_LINE), b""):
            try:
                step, values = _parse(line)
            except ValueError:
                damaged += 1
                continue
            for name, value in values.items():
                points.setdefault(name, {})[step] = value
    return {name: sorted(values_by_step.items()) for name, values_by_step in points.items()}, damaged


def only_numbers(path: Path) -> tuple[bytes, int]:
    """What is understood of metrics.jsonl, written again: steps, times and numbers by name; and how many lines are not.

    Raises OSError where the file cannot be read.
    """
    lines = []
    damaged = 0
    with open_regular(path, limit=LARGEST_METRICS) as file:
        for line in iter(lambda: file.readline(LONGEST_LINE), b""):
            try:
                step, values = _parse(line)
            except ValueError:
                damaged += 1
                continue
            time = json.loads(line).get("time")
            numbers = {name: value for name, value in values.items() if _NAME.fullmatch(name)}
            known = {"step": step} | ({"time": time} if _is_number(time) else {}) | numbers
            lines.append(json.dumps(known) + "\n")
    return "".join(lines).encode(), damaged


def _parse(line: bytes) -> tuple[int, dict[str, float]]:
    """The step of a line, and its finite numbers by name. Raises ValueError for a line of another kind."""
    try:
        data = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(data, dict):
        raise ValueError("not a line of metrics")
    step = data.get("step")
    if type(step) is not int or not 0 <= step < 2**53:
        raise ValueError("no step")

    numbers = {}
    for name, value in data.items():
        if name not in ("step", "time") and _is_number(value):
            numbers[str(name)] = float(value)
    return step, numbers


def _is_number(value: object) -> bool:
    """Whether a value is finite, and so small a whole number that a float holds it exactly."""
    if type(value) is int:
        return abs(value) < 2**53
    return isinstance(value, float) and math.isfinite(value)
