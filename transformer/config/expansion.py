"""A limit on how much a file of settings expands: through aliases, a few lines of YAML can stand for gigabytes.

    x0: &x0 [a, a]
    x1: &x1 [*x0, *x0]          and so on: the number of values doubles with every line

They are counted before they are written out.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, cast

from omegaconf import OmegaConf
from yaml import SafeLoader, YAMLError, compose

from transformer.errors import InputError

LARGEST_FILE = 1 << 18  # characters
MOST_VALUES = 10_000  # of a file, its aliases written out


@contextmanager
def bounded_files() -> Iterator[None]:
    """Let OmegaConf, with which Hydra reads its files, load none that is too large. It raises InputError for those."""
    load = cast(Callable[[Any], Any], OmegaConf.load)

    def load_checked(file: str | Path | TextIO) -> Any:
        if isinstance(file, str | Path):
            with Path(file).open(encoding="utf-8") as opened:
                _check_file(opened)
        else:
            _check_file(file)
            file.seek(0)
        return load(file)

    setattr(OmegaConf, "load", staticmethod(load_checked))  # noqa: B010 (an assignment would be of another type)
    try:
        yield
    finally:
        setattr(OmegaConf, "load", staticmethod(load))  # noqa: B010


def _check_file(file: TextIO) -> None:
    """Raise InputError for a file that is too large, or whose aliases make it so."""
    text = file.read(LARGEST_FILE + 1)
    if len(text) > LARGEST_FILE:
        raise InputError(f"{file.name}: longer than {LARGEST_FILE:,} characters: split the file")
    if "*" not in text:
        return

    try:
        root = compose(text, Loader=SafeLoader)
    except (YAMLError, RecursionError):
        return  # loading it says where
    if root is not None and _count_values(root, {}) > MOST_VALUES:
        raise InputError(f"{file.name}: more than {MOST_VALUES:,} values, its aliases written out: use fewer of them")


def _count_values(node: Any, known: dict[int, float]) -> float:
    """How many values a node of YAML stands for; infinite where it contains itself."""
    if id(node) not in known:
        known[id(node)] = math.inf
        items = [] if isinstance(node.value, str) else node.value
        parts = itertools.chain.from_iterable(item if isinstance(item, tuple) else (item,) for item in items)
        known[id(node)] = 1 + sum(_count_values(part, known) for part in parts)
    return known[id(node)]
