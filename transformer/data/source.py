"""Where sentence pairs come from: text files, tables, a test set of sacreBLEU, a corpus of mtdata's or of the hub.

    PairConfig (data.train, data.dev, ...)  --one of READERS-->  Source: files on this machine  --pairs-->  pairs

A hub data set is streamed into two text files beside the prepared corpora, once, at one revision; from then on it is
read from there, without the network, until that copy is deleted. So neither memory nor the hub's own cache grows with
it, and a cluster's nodes need no network once a command has run where there is one. A corpus that mtdata knows is
copied in the same way. So is a directory that is laid out as a hub data set. Neither the hub's nor that is trusted: its
README may name any file of this machine.
"""

import csv
import hashlib
import json
import logging
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from glob import has_magic
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from transformer import registry
from transformer.config.primitives import from_json, to_json
from transformer.config.settings import PairConfig
from transformer.data.augmentation import change_all
from transformer.data.compression import COMPRESSIONS
from transformer.data.corpus import Pair, read_pairs, with_tag
from transformer.data.hub import GATED, dataset_revision, first_cause, is_gated
from transformer.data.shards import Shard, find_files, is_of_language, list_folder, pair_up
from transformer.data.table import BLOCK, TABLES, Columns, default_columns, format_of, pairs_of, read_table
from transformer.data.testset import find_test_set, is_test_set
from transformer.errors import InputError, StorageError, TransformerError
from transformer.files import build_once, encode_json, open_regular, read_json, sync, write_new
from transformer.plugins import Corpora, CorpusRecord

COPY_FILES = ("source.txt", "target.txt")
ABOUT = "about.json"

# What of `datasets` opens no other files than those of a split; its reader of .toml opens what lies beside them.
HUB_FORMATS = ("arrow", "csv", "json", "parquet", "text", "webdataset")

_SPLIT = re.compile(r"(train|valid|validation|dev|test)(?![a-z])", re.IGNORECASE)  # how the files of a split are called

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DatasetOrigin:
    """What a copy is of: a split of a hub data set, or of a directory that is laid out as one, and two of its columns.

    Of a corpus of mtdata's these are its two languages, and there is no split.
    """

    dataset: str
    subset: str | None
    split: str | None
    columns: list[str]
    revision: str | None = None  # the commit of the hub; None: a directory, or mtdata's, or not yet known
    corpus: CorpusRecord | None = None  # None: it is not mtdata's

    def __str__(self) -> str:
        return " ".join(part for part in (self.dataset, self.subset, self.split) if part)

    @property
    def identity(self) -> dict[str, object]:
        """What is asked for, by which a copy of it is found."""
        return {name: getattr(self, name) for name in ("dataset", "subset", "split", "columns")}

    @staticmethod
    def upgrade(table: dict[Any, Any]) -> dict[Any, Any]:
        """Before there were corpora of mtdata's, nothing said that a data set was none."""
        return {"corpus": None, **table}


# Writes the pairs of a copy that is made in a folder, by the function that it is given, and says what they are.
_Fill = Callable[[Path, Callable[[str, str], None]], DatasetOrigin]


@dataclass(frozen=True)
class Source:
    """Files on this machine, read one after the other: pairs of text files, or tables of which two columns are read."""

    shards: Sequence[Shard]
    columns: Columns | None = None  # of tables
    origin: DatasetOrigin | None = None  # of a copy
    tag: str | None = None  # that a model reads in front of each source
    languages: Columns = ("", "")  # of both sides, as they are set
    augment: str | None = None  # what every pair is changed by

    @property
    def files(self) -> dict[str, Path]:
        """Every file by the key that names it, such as `src`; of several shards, `src[0]`, `tgt[0]`, `src[1]`, ..."""
        keys = ("src", "tgt") if self.columns is None else ("dataset",)
        are_several = len(self.shards) > 1
        return {
            f"{key}[{number}]" if are_several else key: path
            for number, shard in enumerate(self.shards)
            for key, path in zip(keys, shard, strict=True)
        }

    @property
    def is_plain_text(self) -> bool:
        """Whether the bytes of the files may be the text: of one file a side, since several may be cut in any way."""
        return (
            self.columns is None
            and len(self.shards) == 1
            and all(path.suffix not in COMPRESSIONS for path in self.files.values())
        )

    def by_shard(self) -> list["Source"]:
        """Each shard as a source of its own."""
        return [replace(self, shards=[shard]) for shard in self.shards]

    def pairs(self, left_out: Counter[str] | None = None, *, skip: int = 0) -> Iterator[Pair]:
        """The pairs as the files have them, in order; `left_out` counts what they have beside them, by kind.

        Of each shard the first `skip` pairs are left out. Raises InputError where a file cannot be read or is no
        parallel text.
        """
        readings = (self._read(shard, left_out, skip) for shard in self.shards)
        pairs = next(readings) if len(self.shards) == 1 else chain.from_iterable(readings)
        if self.augment is None:
            return pairs
        return change_all(pairs, self.augment, languages=self.languages, first=skip)

    def _read(self, shard: Shard, left_out: Counter[str] | None, skip: int) -> Iterator[Pair]:
        if self.columns is None:
            source, target = shard
            return read_pairs(source, target, skip=skip)
        (table,) = shard
        return islice(read_table(table, self.columns, left_out), skip, None)

    def tagged_pairs(self, left_out: Counter[str] | None = None, *, skip: int = 0) -> Iterator[Pair]:
        """The pairs as a model reads them: each source behind the tag, if there is one. See `pairs`."""
        pairs = self.pairs(left_out, skip=skip)
        if self.tag is None:
            return pairs
        return ((with_tag(source, self.tag), target) for source, target in pairs)

    def load(self, key: str, left_out: Counter[str] | None = None) -> list[Pair]:
        """All the pairs of a development or test set, as a model reads them. See `pairs`.

        Raises InputError as `pairs` does, and where there is none.
        """
        if self.augment is not None:
            log.info("%s: every pair is changed: augment=%s", key, self.augment)
        pairs = list(self.tagged_pairs(left_out))
        if not pairs:
            raise InputError(f"{next(iter(self.files.values()))}: there is no sentence in it: check {key}")
        return pairs


def store_beside(run_dir: str) -> Path:
    """Where prepared corpora and copies are kept by default: neighbouring runs share the folder."""
    return Path(os.path.normpath(Path(run_dir, ".."))) / ".store"  # a Path's own parent of "." is "."


# ---- what a configuration names -------------------------------------------------------------------------------------


class Named(NamedTuple):
    """A set as a configuration names it."""

    pair: PairConfig
    key: str  # of the configuration
    languages: Columns  # the columns' names where none are given
    copies: Path  # the folder of copies


class Reader(NamedTuple):
    """A kind of text: which sets are of it, and how their files are found. Finding them raises InputError.

    What is copied is copied unless it is there, which raises StorageError where no copy can be written.
    """

    claims: Callable[[PairConfig], bool]
    find: Callable[[Named], Source]
    unused: Sequence[str] = ()  # keys that do not apply
    is_copied: bool = False  # before it is read


def resolve_source(pair: PairConfig, key: str, *, languages: Columns, store_dir: Path) -> Source:
    """The files that a configuration names under `key`; what is copied is copied to `store_dir` unless it is there.

    `languages` are the columns' names where none are given. Raises InputError, and StorageError where no copy can be
    written.
    """
    reader = _reader_of(pair)
    _refuse_unused(pair, key, *reader.unused)
    found = reader.find(Named(pair, key, languages, store_dir / "copies"))
    return replace(found, tag=pair.tag, languages=languages, augment=pair.augment)


def is_copied(pair: PairConfig) -> bool:
    """Whether it is copied before it is read: a data set of the hub, a directory laid out as one, mtdata's corpora."""
    return _reader_of(pair).is_copied


def _reader_of(pair: PairConfig) -> Reader:
    return next(reader for reader in READERS if reader.claims(pair))


def _refuse_unused(pair: PairConfig, key: str, *names: str) -> None:
    """Raise InputError where a key is set that does not apply to a data set of this kind."""
    for name in names:
        value = getattr(pair, name)
        if value:
            unset = f"{key}.{name}={'null' if name in ('subset', 'split') else ''}"
            raise InputError(
                f"{key}.{name}={value} does not apply to {key}.dataset={pair.dataset}: leave it out, or set {unset}"
            )


# ---- text files, test sets, tables ----------------------------------------------------------------------------------


def _find_text(named: Named) -> Source:
    """Text files, line for line."""
    pair, key = named.pair, named.key
    for side, value in (("src", pair.src), ("tgt", pair.tgt)):
        if not value:
            raise InputError(f"{key}.{side} is not set: name a text file, or a data set by {key}.dataset")
    sources = find_files(pair.src, f"{key}.src", language=named.languages[0])
    targets = find_files(pair.tgt, f"{key}.tgt", language=named.languages[1])
    return Source(pair_up(sources, targets, key))


def _find_test_set(named: Named) -> Source:
    return Source([find_test_set(_name(named.pair), named.key, languages=named.languages)])


def _find_tables(named: Named) -> Source:
    """Tables, or a folder of them."""
    folder = _name(named.pair)
    if os.path.isdir(folder):
        return _find_folder(folder, named)
    return _tables(find_files(named.pair.dataset or [], f"{named.key}.dataset"), named)


def _find_folder(folder: str, named: Named) -> Source:
    """The tables of a folder, or its text files by language."""
    key, languages = named.key, named.languages
    files = list_folder(Path(folder))
    tables = [path for path in files if format_of(path.name)]
    sources, targets = ([path for path in files if is_of_language(path, language)] for language in languages)

    # Sets that are not to be mixed.
    words = [_SPLIT.match(path.name) for path in [*tables, *sources]]
    splits = {word[0].lower() for word in words if word is not None}
    is_text = bool(sources and targets and languages[0] != languages[1])
    if not tables and not is_text:
        endings = " and ".join(f".{language}" for language in languages)
        raise InputError(
            f"{key}.split is not set: name a split of {folder}, such as train: it has no tables, nor text files that "
            f"end in {endings}"
        )
    if len(splits) > 1 or (tables and is_text):
        kinds = sorted(splits) if len(splits) > 1 else ["tables", "text"]
        raise InputError(
            f"{key}.dataset={folder}: a folder with {' and '.join(kinds)}: name one of them by a pattern, such as "
            f"{folder}/train*, or by {key}.split"
        )

    if tables:
        return _tables(tables, named)
    _refuse_unused(named.pair, key, "src", "tgt")
    return Source(pair_up(sources, targets, key))


def _tables(tables: Sequence[Path], named: Named) -> Source:
    """Tables of which the same two columns are read."""
    pair, key = named.pair, named.key
    for path in tables:
        if not format_of(path.name):
            raise InputError(f"{key}.dataset={path}: not {TABLES} file: name text files by {key}.src and {key}.tgt")
    defaults = named.languages if pair.src and pair.tgt else default_columns(tables[0], named.languages)
    return Source([(path,) for path in tables], _columns(named, defaults))


def _columns(named: Named, defaults: Columns) -> Columns:
    """The two columns of a data set that are read, by name or number."""
    pair, key = named.pair, named.key
    for side, name in (("src", pair.src), ("tgt", pair.tgt)):
        if not isinstance(name, str):
            raise InputError(f"{key}.{side}={name}: with {key}.dataset it names one column")
        # An experiment's data set still stands where only text files were given, and would be fetched first.
        if name not in defaults and os.path.isfile(name):
            raise InputError(
                f"{key}.{side}={name}: with {key}.dataset={pair.dataset} it names a column, not a file: "
                f"set {key}.dataset=null to read the file"
            )
    columns = (str(pair.src or defaults[0]), str(pair.tgt or defaults[1]))
    are_both_named = bool(pair.src and pair.tgt)
    if columns[0] == columns[1] and not are_both_named:  # one column named twice is meant: training on copies
        raise InputError(f"{key}: both sides would be column {columns[0]!r}: set {key}.src and {key}.tgt")
    return columns


# ---- copies ---------------------------------------------------------------------------------------------------------


def _copy_of_corpus(named: Named) -> Source:
    """The copy of a corpus that a catalogue knows."""
    dataset, key = _name(named.pair), named.key
    catalogue: Corpora = registry.find("corpora", dataset.partition(":")[0])
    sides = catalogue.find_sides(dataset, key, languages=named.languages)
    wanted = DatasetOrigin(dataset, None, None, list(sides))

    def fill(folder: Path, write: Callable[[str, str], None]) -> DatasetOrigin:
        log.info("copying %s, once", wanted)
        record = catalogue.read_corpus(dataset, f"{key}.dataset={dataset}", sides=sides, folder=folder, write=write)
        if record.left_out:
            log.info("%s: left out %d pairs that have an empty side or are marked as bad", wanted, record.left_out)
        columns = record.columns or wanted.columns
        return replace(wanted, columns=columns, revision=record.revision, corpus=record)

    return _copy_once(named, [wanted.identity], fill)


def _copy_of_hub_dataset(named: Named) -> Source:
    """The copy of a data set of the hub, or of a directory that is laid out as one."""
    pair, key, name = named.pair, named.key, _name(named.pair)
    columns = _columns(named, named.languages)
    is_local = os.path.isdir(name)  # unlike Path.is_dir, false where even that cannot be asked
    if not is_local and (os.path.exists(name) or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name)):
        raise InputError(f"{key}.dataset={name}: no such directory, nor {TABLES} file")
    if pair.split is None:
        raise InputError(f"{key}.split is not set: name a split of {name}, such as train")

    # The name of the copy says what it is of.
    wanted = DatasetOrigin(name, pair.subset, pair.split, list(columns))
    identity = [wanted.identity, _contents(Path(name)) if is_local else None]

    def fill(_: Path, write: Callable[[str, str], None]) -> DatasetOrigin:
        revision = None if is_local else dataset_revision(name)  # first: without a network this fails at once
        log.info("copying %s, once%s", wanted, f" (revision {revision})" if revision else "")
        for source, target in _stream(wanted, revision):
            write(source, target)
        return replace(wanted, revision=revision)

    return _copy_once(named, identity, fill)


def _copy_once(named: Named, identity: Sequence[object], fill: _Fill) -> Source:
    """The copy of what `identity` tells from all else, made by `fill` unless it is there."""
    path = named.copies / hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]

    # A copy that is there can be used even where no lock can be taken.
    origin = _read_origin(path)
    if origin is None:
        try:
            build_once(
                path,
                lambda folder: _copy(folder, fill),
                is_usable=lambda path: _read_origin(path) is not None,
                marks=[ABOUT],
            )
        except OSError as error:
            reason = error.strerror or error
            prefix = "data." if named.key.startswith("data.") else ""  # `evaluate` has the key without it
            raise StorageError(f"{path}: cannot be written ({reason}): free space or set {prefix}store_dir") from error
        origin = _read_origin(path)
    return Source([(path / COPY_FILES[0], path / COPY_FILES[1])], origin=origin)


def _read_origin(path: Path) -> DatasetOrigin | None:
    """What a copy was made from; None where there is no copy, or a damaged one."""
    try:
        about = read_json(path / ABOUT)
        origin = from_json(DatasetOrigin, about["origin"], complete=True)
        return origin if about == {"origin": about["origin"], "bytes": _sizes(path)} else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _sizes(path: Path) -> list[int]:
    sizes = []
    for side in COPY_FILES:
        with open_regular(path / side) as file:
            sizes.append(os.fstat(file.fileno()).st_size)
    return sizes


def _contents(folder: Path) -> list[list[object]]:
    """Name, size and time of each file of a data set on this machine: unlike one of the hub, it may change."""
    try:
        files = {str(path.relative_to(folder)): path.stat() for path in folder.rglob("*") if path.is_file()}
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be read ({error.strerror}): check the data set's files") from error

    names = sorted(name for name in files if not name.startswith("."))  # not git's files, nor the hub client's
    return [[name, files[name].st_size, files[name].st_mtime_ns] for name in names]


def _copy(folder: Path, fill: _Fill) -> None:
    """Write the two sides, a line a pair, and the record of what they are."""
    with (folder / COPY_FILES[0]).open("xb") as source_file, (folder / COPY_FILES[1]).open("xb") as target_file:

        def write(source: str, target: str) -> None:
            _write(source_file, source)
            _write(target_file, target)

        origin = fill(folder, write)

    about = {"origin": to_json(origin), "bytes": _sizes(folder)}  # by which a complete copy is known
    write_new(folder / ABOUT, encode_json(about))
    for name in COPY_FILES:
        sync(folder / name)


def _write(file: BinaryIO, text: str) -> None:
    file.write(text.encode() + b"\n")


def _stream(wanted: DatasetOrigin, revision: str | None) -> Iterator[Pair]:
    """The pairs as they come over the network, some thousands in memory at a time."""
    columns = (wanted.columns[0], wanted.columns[1])
    rows_read = 0
    for block in stream_tables(wanted, revision):
        yield from pairs_of(block, columns, str(wanted), before=rows_read)
        rows_read += len(block)


def stream_tables(wanted: DatasetOrigin, revision: str | None) -> Iterator[Any]:
    """All columns as they come over the network, as tables of pyarrow's of some thousand rows. Raises InputError."""
    import datasets

    datasets.disable_progress_bars()
    rows_read = 0
    try:
        # A directory's path is made absolute, because a relative one such as `text` would be taken for a format.
        name = wanted.dataset if revision else str(Path(wanted.dataset).absolute())
        builder = datasets.load_dataset_builder(name, wanted.subset, revision=revision)
        if builder.name not in HUB_FORMATS:
            raise InputError(f"{wanted}: of format {builder.name}: only {', '.join(HUB_FORMATS)} are read")
        for file in chain.from_iterable((builder.config.data_files or {}).values()):
            _check_own(file, wanted, is_local=revision is None)

        # In CSV, `null` is a word like any other, and no cell is a row's name; in TSV, a quotation mark is text.
        if hasattr(builder.config, "keep_default_na"):
            builder.config.keep_default_na = False
            builder.config.index_col = False
            warnings.filterwarnings("ignore", "Length of header or names")  # pandas, of a row with more cells
            if builder.config.sep == "\t":
                builder.config.quoting = csv.QUOTE_NONE

        rows = builder.as_streaming_dataset(split=wanted.split).with_format("arrow")
        for block in rows.iter(batch_size=BLOCK):
            yield block
            rows_read += len(block)
    except TransformerError:
        raise
    except Exception as error:  # whatever a data set's files or the network bring about
        place = f"{wanted}: after row {rows_read}" if rows_read else str(wanted)
        reason = GATED if is_gated(error) else f"cannot be read ({first_cause(error)})"
        raise InputError(f"{place}: {reason}") from error


def hub_subsets(name: str, revision: str) -> list[str]:
    """The names of a hub data set's subsets. Raises InputError."""
    import datasets

    try:
        return datasets.get_dataset_config_names(name, revision=revision)
    except Exception as error:
        reason = GATED if is_gated(error) else f"cannot be read ({first_cause(error)})"
        raise InputError(f"{name}: {reason}") from error


def _check_own(file: str, wanted: DatasetOrigin, *, is_local: bool) -> None:
    """Raise InputError for a file that is not the data set's own: a README may name any path, and a link lead there."""
    if is_local:
        is_own = os.path.isabs(file) and Path(file).resolve().is_relative_to(Path(wanted.dataset).resolve())
    else:
        is_own = os.path.normpath(file).startswith(f"hf:/datasets/{wanted.dataset}@")
    if not is_own or "::" in file:  # a chain of places, which may begin or end anywhere
        raise InputError(
            f"{wanted}: {file} is not one of the data set's own files: if you trust it, copy the file into a folder"
        )


# ---- the kinds of text ----------------------------------------------------------------------------------------------


def _is_of_catalogue(pair: PairConfig) -> bool:
    """Whether a catalogue of corpora is named, such as mtdata's in `mtdata:Statmt-europarl-10-deu-eng`."""
    catalogue, colon, _ = _name(pair).partition(":")
    return bool(colon) and registry.is_known("corpora", catalogue)


def _is_hub_dataset(pair: PairConfig) -> bool:
    """Whether it is a data set of the hub, or a directory of which a split is named."""
    name = _name(pair)
    if not name or format_of(name):
        return False
    is_elsewhere = not os.path.isdir(name) and not (has_magic(name) and not os.path.exists(name))
    return is_elsewhere or bool(pair.split or pair.subset)


def _name(pair: PairConfig) -> str:
    """The one name of a data set; empty where there are several."""
    return pair.dataset if isinstance(pair.dataset, str) else ""


_OF_HUB = ("subset", "split")
_OF_SET = ("src", "tgt", *_OF_HUB)

# The first that claims a set reads it.
READERS = (
    Reader(lambda pair: not pair.dataset, _find_text),
    Reader(lambda pair: is_test_set(_name(pair)), _find_test_set, _OF_SET),
    Reader(_is_of_catalogue, _copy_of_corpus, _OF_SET, is_copied=True),
    Reader(_is_hub_dataset, _copy_of_hub_dataset, is_copied=True),
    Reader(lambda _: True, _find_tables, _OF_HUB),
)
