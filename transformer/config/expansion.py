"""What a configuration may grow to: a few lines of YAML can stand for gigabytes, by aliases or by interpolations.

    x0: &x0 [a, a]                      x0: "aa"
    x1: &x1 [*x0, *x0]      or          x1: "${x0}${x0}"         and so on: the number of values doubles with every line

Both are measured before they are expanded, each line once.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, cast

from omegaconf import OmegaConf
from yaml import SafeLoader, YAMLError, compose

from transformer.errors import InputError

LARGEST_FILE = 1 << 18  # characters
MOST_VALUES = 10_000  # of a file, its aliases written out
LONGEST_TEXT = 1 << 18  # characters that all interpolations of a job come to

NAME = r"[^\s${}:,'\"]+"  # what may be the name of a key between ${ and }


# ---- aliases --------------------------------------------------------------------------------------------------------


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


# ---- interpolations -------------------------------------------------------------------------------------------------


def check_interpolations(settings: Mapping[str, Any]) -> None:
    """Raise InputError where interpolations in these settings, nested and unresolved, come to too long a text."""
    texts = dict(_texts(settings, ""))
    lengths: dict[str, float] = {}
    for key in [key for key, text in texts.items() if "${" in text]:
        try:
            length = _count_characters(key, texts, lengths)
        except RecursionError:
            length = math.inf
        if length > LONGEST_TEXT:
            raise InputError(f"{key}: its ${{...}} come to more than {LONGEST_TEXT:,} characters: use fewer of them")


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Every value below a key, as text."""
    if isinstance(value, Mapping | list):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, item in items:
            yield from _texts(item, f"{key}.{name}" if key else f"{name}")
    else:
        yield key, str(value)


def _count_characters(key: str, texts: Mapping[str, str], known: dict[str, float]) -> float:
    """How long the text of a key becomes, with what it names. A circle, which OmegaConf reports, counts once."""
    if key not in known:
        known[key] = len(texts[key])
        named = [other for name in _names(texts[key]) for other in _keys_at(_absolute(name, key), texts)]
        known[key] += sum(_count_characters(other, texts, known) for other in named)
    return known[key]


def _names(text: str) -> Iterator[str]:
    """What may be the name of a key in the interpolations of a text, which may be nested: `a[b]` is `a.b`."""
    depth = 0
    for part in re.findall(rf"\$\{{|\}}|{NAME}", text.replace("[", ".").replace("]", "")):
        if part == "${":
            depth += 1
        elif part == "}":
            depth = max(0, depth - 1)
        elif depth:
            yield part


def _absolute(name: str, key: str) -> str:
    """The whole name of a key: each dot in front of it leads one level up from the key that names it."""
    dots = len(name) - len(name.lstrip("."))
    above = key.split(".")[:-dots] if dots else []
    return ".".join([*above, name.lstrip(".")])


def _keys_at(name: str, texts: Mapping[str, str]) -> list[str]:
    """The key of this name, or those of the section."""
    return [name] if name in texts else [key for key in texts if key.startswith(f"{name}.")]
