"""The files that a key names: one, or many that are read one after the other, as if they were one.

    t/train.en               a file
    t/*.en.gz                a pattern of the shell's kind, ** for folders within folders: its files by name
    t                        a folder: its files that end in the language's code, or else all of them, by name
    [a.en, t/*.en, ...]      a list of these, in its own order

Both sides have the same number of files: the n-th file of one translates the n-th of the other, line for line.
"""

import os
import re
from collections.abc import Sequence
from glob import glob, has_magic
from pathlib import Path

from transformer.data.compression import plain_name
from transformer.errors import InputError

Shard = tuple[Path, ...]  # the text files of both sides, or a table


def find_files(names: str | list[str], key: str, *, language: str | None = None) -> list[Path]:
    """The files that `names`, under `key` of the configuration, stand for.

    A plain name is taken as it is, whether there is such a file or not. Raises InputError for what stands for none.
    """
    files = []
    for name in [names] if isinstance(names, str) else names:
        if os.path.isdir(name):
            found = list_folder(Path(name))
            if not found:
                raise InputError(f"{name}: there is no file in this folder: check {key} and data.root")
            found = [path for path in found if is_of_language(path, language)] or found
        elif has_magic(name) and not os.path.exists(name):
            found = [Path(path) for path in sorted(glob(name, recursive=True)) if not os.path.isdir(path)]
        else:
            found = [Path(name)]
            if "," in name and not found[0].exists():
                raise InputError(f"{key}={name}: there is no such file: a list has brackets, '{key}=[{name}]'")
        if not found:
            raise InputError(f"{key}={name}: there is no such file: check {key} and data.root")
        files += found
    return files


def list_folder(folder: Path) -> list[Path]:
    """The files of a folder by name, but for hidden ones. Raises InputError."""
    try:
        return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    except OSError as error:
        raise InputError(f"{folder}: cannot be read ({error.strerror}): check the path") from error


def is_of_language(path: Path, language: str | None) -> bool:
    """Whether a file is called as text in a language usually is: `train.en`, `train.en.gz`."""
    return language is not None and plain_name(path.name).endswith(f".{language}")


def pair_up(sources: Sequence[Path], targets: Sequence[Path], key: str) -> list[Shard]:
    """Each file of the sources with that of its translations. Raises InputError where a file has none."""
    if len(sources) != len(targets):
        lone = _find_lone(sources, targets)
        raise InputError(
            f"{lone}: it has no counterpart: {key}.src names {len(sources)} files, {key}.tgt {len(targets)}; each file "
            "must translate one of the other side, in the same order"
        )
    if len(sources) > 1 and sources == targets:
        raise InputError(
            f"{key}.src and {key}.tgt name the same files, {sources[0]} and so on: name the files of one side in each"
        )
    of_both = {*map(_numbers, sources)} & {*map(_numbers, targets)}
    if of_both - {()}:  # so the numbers say what belongs together
        for source, target in zip(sources, targets, strict=True):
            numbers, theirs = _numbers(source), _numbers(target)
            if len(numbers) == len(theirs) and numbers != theirs:
                raise InputError(
                    f"{source} and {target} would be paired, as files are paired by position, but the numbers in "
                    f"their names differ: list the files of {key}.src and {key}.tgt in the same order"
                )
    return list(zip(sources, targets, strict=True))


def _find_lone(sources: Sequence[Path], targets: Sequence[Path]) -> Path:
    """A file of the longer side without a counterpart, by the numbers in their names, or else by how many they are."""
    shorter, longer = sorted((sources, targets), key=len)
    numbers = {_numbers(path) for path in shorter}
    return next((path for path in longer if _numbers(path) not in numbers), longer[len(shorter)])


def _numbers(path: Path) -> tuple[int, ...]:
    """What tells a shard from the others: the numbers in its name."""
    return tuple(map(int, re.findall(r"[0-9]+", path.name)))
