"""Where sentence pairs come from: two text files, a table, or a data set of the Hugging Face hub.

A hub data set is streamed into two text files beside the prepared corpora, once, at one revision; from then on it is
read from there, without the network, until that copy is deleted. So neither memory nor the hub's own cache grows with
it, and a cluster's nodes need no network once a command has run where there is one. A directory that is laid out as a
hub data set is read the same way.
"""

import csv
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from transformer.config.settings import PairConfig
from transformer.data.corpus import Pair, read_pairs
from transformer.data.store import build_once, sync
from transformer.data.table import BLOCK, Columns, is_table, pairs_of, read_table, usual_columns
from transformer.errors import InputError, StorageError, TransformerError

SIDES = ("source.txt", "target.txt")
ABOUT = "about.json"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """Files on this machine: two of text, or one table of which two columns are read."""

    files: dict[str, Path]  # by the key that names each, such as `src`
    columns: Columns | None = None
    origin: dict[str, Any] | None = None  # of a copy: the data set, its subset, split and revision

    def pairs(self) -> Iterator[Pair]:
        """The pairs, in order. Raises InputError where a file cannot be read or is no parallel text."""
        if self.columns is None:
            return read_pairs(self.files["src"], self.files["tgt"])
        return read_table(self.files["dataset"], self.columns)

    def load(self, key: str) -> list[Pair]:
        """All the pairs of a development or test set. Raises InputError as `pairs` does, and where there is none."""
        pairs = list(self.pairs())
        if not pairs:
            raise InputError(f"{next(iter(self.files.values()))}: there is no sentence in it: check {key}")
        return pairs


def store_beside(run_dir: str) -> Path:
    """Where prepared corpora and copies are kept by default: runs that stand side by side share them."""
    return Path(os.path.normpath(Path(run_dir, ".."))) / ".store"  # a Path's own parent of "." is "."


def locate(pair: PairConfig, key: str, *, languages: Columns, store_dir: Path) -> Source:
    """The files that a configuration names under `key`; a hub data set is copied to `store_dir` unless it is there.

    `languages` are the columns' names where none are given. Raises InputError, and StorageError where no copy can be
    written.
    """
    if not pair.dataset:
        for side, value in (("src", pair.src), ("tgt", pair.tgt)):
            if not value:
                raise InputError(f"{key}.{side} is not set: name a text file, or a data set by {key}.dataset")
        return Source({"src": Path(pair.src), "tgt": Path(pair.tgt)})
    if is_copied(pair):
        return _copied(pair, key, _columns(pair, key, languages), store_dir / "copies")
    path = Path(pair.dataset)
    usual = languages if pair.src and pair.tgt else usual_columns(path, languages)
    return Source({"dataset": path}, _columns(pair, key, usual))


def _columns(pair: PairConfig, key: str, usual: Columns) -> Columns:
    columns = (pair.src or usual[0], pair.tgt or usual[1])
    if columns[0] == columns[1] and not (pair.src and pair.tgt):  # who wants to copy text says so
        raise InputError(f"{key}: both sides would be column {columns[0]!r}: set {key}.src and {key}.tgt")
    return columns


def is_copied(pair: PairConfig) -> bool:
    """Whether it is a data set that is copied first."""
    return bool(pair.dataset) and not is_table(str(pair.dataset))


def _copied(pair: PairConfig, key: str, columns: Columns, copies: Path) -> Source:
    name = str(pair.dataset)
    local = os.path.isdir(name)  # unlike Path's, false where even that cannot be asked
    if not local and (os.path.exists(name) or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name)):
        raise InputError(f"{key}.dataset={name}: no such directory, nor a .tsv, .jsonl or .parquet file")
    if pair.split is None:
        raise InputError(f"{key}.split is not set: name a split of {name}, such as train")
    asked = {"dataset": name, "subset": pair.subset, "split": pair.split, "columns": list(columns)}
    identity = [asked, _contents(Path(name)) if local else None]
    path = copies / hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    try:
        if not _origin(path):  # what is there can be used where no lock can be taken
            build_once(path, lambda folder: _copy(folder, asked, local=local), usable=lambda path: bool(_origin(path)))
    except OSError as error:
        reason, prefix = error.strerror or error, "data." if key.startswith("data.") else ""  # evaluate's has none
        raise StorageError(f"{path}: cannot be written ({reason}): free space or set {prefix}store_dir") from error
    return Source({"src": path / SIDES[0], "tgt": path / SIDES[1]}, origin=_origin(path))


def _origin(path: Path) -> dict[str, Any]:
    """What a copy is of; empty where there is none, or a damaged one."""
    try:
        about = json.loads((path / ABOUT).read_bytes())
        return dict(about["origin"]) if about["bytes"] == _sizes(path) else {}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def _sizes(path: Path) -> list[int]:
    return [(path / side).stat().st_size for side in SIDES]


def _contents(folder: Path) -> list[list[object]]:
    """What a data set on this machine consists of: unlike one of the hub, it may change."""
    try:
        files = {str(path.relative_to(folder)): path.stat() for path in folder.rglob("*") if path.is_file()}
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be read ({error.strerror}): check the data set's files") from error
    seen = {name: entry for name, entry in files.items() if not name.startswith(".")}  # not git's, nor the hub client's
    return [[name, seen[name].st_size, seen[name].st_mtime_ns] for name in sorted(seen)]


def _copy(folder: Path, asked: dict[str, Any], *, local: bool) -> None:
    """Write the two sides of a split, a line a row, and what they are."""
    revision = None if local else _revision(asked["dataset"])
    named = " ".join(str(part) for part in (asked["dataset"], asked["subset"], asked["split"]) if part)
    log.info("copying %s, once%s", named, f" (revision {revision})" if revision else "")
    with (folder / SIDES[0]).open("xb") as source, (folder / SIDES[1]).open("xb") as target:
        for pair in _stream(asked, revision, named):
            _write(source, pair[0])
            _write(target, pair[1])
    about = {"origin": {**asked, "revision": revision}, "bytes": _sizes(folder)}
    (folder / ABOUT).write_text(json.dumps(about, indent=1), encoding="utf-8")
    for name in (*SIDES, ABOUT):
        sync(folder / name)


def _write(file: BinaryIO, text: str) -> None:
    file.write(text.encode() + b"\n")


def _revision(name: str) -> str:
    """The commit that the hub has now; asked for first, since without a network the answer comes at once."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return str(HfApi().dataset_info(name, timeout=10).sha)
    except HfHubHTTPError as error:
        raise InputError(f"{name}: the hub does not give it ({_reason(error)}): check the name, or log in") from error
    except Exception as error:  # of whichever HTTP library the hub's client uses
        raise InputError(
            f"{name}: the hub cannot be reached ({_reason(error)}): run `transformer prepare` where it can, or name "
            "text files, .tsv, .jsonl or .parquet files, or a directory with the data set's files"
        ) from error


def _stream(asked: dict[str, Any], revision: str | None, named: str) -> Iterator[Pair]:
    """The pairs as they come over the network, some thousands in memory at a time."""
    import datasets

    datasets.disable_progress_bars()
    read = 0
    try:
        name = asked["dataset"] if revision else str(Path(asked["dataset"]).absolute())  # or `text` would be a format
        builder = datasets.load_dataset_builder(name, asked["subset"], revision=revision)
        if hasattr(builder.config, "keep_default_na"):  # CSV, in which `null` is a word; in TSV so is a quotation mark
            builder.config.keep_default_na = False
            if builder.config.sep == "\t":
                builder.config.quoting = csv.QUOTE_NONE
        rows = builder.as_streaming_dataset(split=asked["split"]).with_format("arrow")
        for block in rows.iter(batch_size=BLOCK):
            yield from pairs_of(block, asked["columns"], named, before=read)
            read += len(block)
    except TransformerError:
        raise
    except Exception as error:  # whatever a data set's files or the network bring about
        place = f"{named}: after row {read}" if read else named
        raise InputError(f"{place}: cannot be read ({_reason(error)})") from error


def _reason(error: BaseException) -> str:
    """What is at the bottom of it, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{' '.join(str(error).split()) or type(error).__name__:.200}"
