"""Sentence pairs as piece ids on disk: written once, memory-mapped, read by any number of runs.

A store is a directory. For each side it has two flat little-endian files: `SIDE.ids`, the pieces of all sentences end
to end (uint16, or int32 above 65,536 pieces), and `SIDE.offsets` (int64), where sentence i is ids[offsets[i] :
offsets[i + 1]]. MANIFEST.json has the sizes and SHA-256 of all files. A store that was joined from several has their
files of ids, `SIDE.0.ids`, `SIDE.1.ids` and so on, which are read as if they were one.

The ids hold pieces only, without BOS and EOS. `lengths` count EOS, as everything that budgets tokens does. Reading goes
through plain array views of the memory maps, because `np.memmap` makes each small slice slow.

Shapes: `n` pairs in the store, `b` sentences of a selection.
"""

import mmap
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, count, takewhile
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from transformer.config.primitives import from_json
from transformer.errors import InputError, StorageError
from transformer.files import MANIFEST, Digest, open_regular, sync
from transformer.sealed_folder import Listing, SealedFolder, open_sealed, seal, sync_files

STORE_VERSION = 1
JOINED_VERSION = 2  # of a store that was joined: earlier versions of this package cannot read it
SIDES = ("source", "target")
STORE_MARKS = (MANIFEST, "source.offsets", "target.offsets")  # files that tell a store from other directories
BLOCK = 1 << 20  # pairs
_NARROW, _WIDE = "<u2", "<i4"

Array = npt.NDArray[np.integer[Any]]
Ids = npt.NDArray[np.int64]
LengthArray = npt.NDArray[np.int32]  # (b, 2): tokens of each pair, EOS counted, source then target
Mixture = Sequence[tuple[int, float]]  # number of pairs and weight of each corpus, in the order of the store


@dataclass(frozen=True)
class Manifest(Listing):
    """MANIFEST.json of a store."""

    format: int
    dtype: str  # of the piece ids
    files: dict[str, Digest]


class Sentences(NamedTuple):
    """Some sentences of one side, end to end."""

    pieces: Array  # (sum of counts,)
    counts: Ids  # (b,): pieces of each sentence

    @classmethod
    def of(cls, sentences: list[list[int]]) -> "Sentences":
        """Lay lists of pieces end to end."""
        counts = np.fromiter(map(len, sentences), np.int64, len(sentences))
        pieces = np.fromiter(chain.from_iterable(sentences), np.int32, int(counts.sum()))
        return cls(pieces, counts)

    def select(self, keep: npt.NDArray[np.bool_]) -> "Sentences":
        """The sentences that `keep` `(b,)` marks."""
        keep_pieces = np.repeat(keep, self.counts)
        return Sentences(self.pieces[keep_pieces], self.counts[keep])


class _MappedFile(NamedTuple):
    """A file of a store, mapped into memory."""

    path: Path
    content: mmap.mmap | bytes

    @classmethod
    def of(cls, path: Path) -> "_MappedFile":
        try:
            with open_regular(path) as file:
                if os.fstat(file.fileno()).st_size == 0:  # an empty file cannot be mapped
                    return cls(path, b"")
                return cls(path, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except OSError as error:
            raise InputError(f"{path.parent}: not a complete prepared corpus ({error})") from error


def _refuse_cut(files: Sequence[_MappedFile]) -> None:
    """Raise StorageError if a file has become shorter: reading what is missing would end the process by SIGBUS."""
    for file in files:
        if isinstance(file.content, mmap.mmap) and file.content.size() < len(file.content):
            raise StorageError(f"{file.path}: truncated while in use: start again to rebuild it")


class StoredLengths:
    """The tokens of every pair of a store, read from its offsets when they are asked for: nothing is copied.

    `lengths[ids]` and `lengths[start:stop:step]` are arrays `(b, 2)`.
    """

    def __init__(self, offsets: tuple[Ids, Ids], files: Sequence[_MappedFile]) -> None:
        self._offsets = offsets
        self._files = files

    def __len__(self) -> int:
        return len(self._offsets[0]) - 1

    def __getitem__(self, which: Ids | slice) -> LengthArray:
        _refuse_cut(self._files)
        pieces = [(offsets[1:][which] - offsets[:-1][which]).astype(np.int32) for offsets in self._offsets]
        lengths = np.column_stack(pieces)
        lengths += 1
        return lengths

    @cached_property
    def totals(self) -> Ids:
        """The tokens of all pairs, `(2,)`."""
        _refuse_cut(self._files)
        return np.array([offsets[-1] for offsets in self._offsets]) + len(self)

    @cached_property
    def longest(self) -> tuple[int, int]:
        """The tokens of the longest sentence of each side, found block by block: there may be a billion pairs."""
        longest = [0, 0]
        for start in range(0, len(self), BLOCK):
            _refuse_cut(self._files)
            for side, offsets in enumerate(self._offsets):
                pieces = np.diff(offsets[start : start + BLOCK + 1])
                longest[side] = max(longest[side], 1 + int(pieces.max()))
        source, target = longest
        return source, target


# The lengths of many pairs, `(n, 2)`: functions index them by ids, whichever they are.
Lengths = StoredLengths | LengthArray


def totals_of(lengths: Lengths) -> Ids:
    """The tokens of all pairs, `(2,)`."""
    return lengths.totals if isinstance(lengths, StoredLengths) else lengths.sum(axis=0, dtype=np.int64)


def longest_of(lengths: Lengths) -> tuple[int, int]:
    """The tokens of the longest sentence of each side."""
    if isinstance(lengths, StoredLengths):
        return lengths.longest
    source, target = lengths.max(axis=0, initial=0).tolist()
    return source, target


class JoinedPieces:
    """The pieces of several stores, end to end, each where it is."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._arrays = arrays
        self._starts = np.cumsum([0, *map(len, arrays)])[:-1]  # of each array, among all pieces
        self.dtype = arrays[0].dtype

    def gather(self, starts: Ids, counts: Ids) -> Array:
        """The pieces `(sum of counts,)` of the sentences `(b,)` that start there and have so many."""
        which = np.searchsorted(self._starts, starts, side="right") - 1  # (b,): the array that holds each sentence
        starts = starts - self._starts[which]
        places = zip(which.tolist(), starts.tolist(), (starts + counts).tolist(), strict=True)
        found = [self._arrays[number][start:end] for number, start, end in places]
        return np.concatenate(found) if found else np.zeros(0, self.dtype)


class Store:
    """Sentence pairs as piece ids; pair `i` keeps its number for ever. Side 0 is the source, side 1 the target."""

    def __init__(
        self,
        pieces: tuple[Array | JoinedPieces, Array | JoinedPieces],
        offsets: tuple[Ids, Ids],
        *,
        files: Sequence[_MappedFile] = (),
    ) -> None:
        self._pieces = pieces  # of each side, all sentences end to end
        self._offsets = offsets  # of each side, (n + 1,)
        self._files = files  # where pieces and offsets are mapped
        self.lengths = StoredLengths(offsets, files)  # (n, 2)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def longest(self) -> tuple[int, int]:
        """The tokens of the longest sentence of each side."""
        return self.lengths.longest

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the piece ids."""
        return self._pieces[0].dtype

    def gather(self, ids: Ids, side: int) -> Sentences:
        """One side of the pairs `ids` `(b,)`, in this order, its pieces as int64."""
        _refuse_cut(self._files)
        starts = self._offsets[side][ids]  # (b,)
        counts = self._offsets[side][ids + 1] - starts  # (b,)
        pieces = self._pieces[side]
        if isinstance(pieces, JoinedPieces):
            return Sentences(pieces.gather(starts, counts).astype(np.int64), counts)

        # Each sentence is shifted from where it begins among the gathered ones to where it begins in the store.
        ends = counts.cumsum()
        total = int(ends[-1]) if len(ids) else 0
        shifts = starts - (ends - counts)  # (b,)
        index = np.arange(total) + np.repeat(shifts, counts)  # (total,)
        return Sentences(pieces[index].astype(np.int64), counts)

    @classmethod
    def from_pieces(cls, source: list[list[int]], target: list[list[int]]) -> "Store":
        """A store in memory, for sets that are small, such as the development set."""
        sources = Sentences.of(source)
        targets = Sentences.of(target)
        source_offsets = np.concatenate([[0], sources.counts.cumsum()])
        target_offsets = np.concatenate([[0], targets.counts.cumsum()])
        return cls((sources.pieces, targets.pieces), (source_offsets, target_offsets))

    @classmethod
    def open(cls, path: Path, *, is_verified: bool = False) -> "Store":
        """Map a store that `StoreWriter` or `join_stores` made.

        `is_verified` says that another process has just read every byte of it.

        Raises InputError where a file is missing, foreign or damaged.
        """
        with _opened(path) as folder:
            manifest = folder.manifest
            if not is_verified:
                folder.verify()

        files: list[_MappedFile] = []

        def mapped(name: str, dtype: str) -> Any:
            files.append(_MappedFile.of(path / name))
            return np.frombuffer(files[-1].content, dtype)

        source, target = ([mapped(name, manifest.dtype) for name in _id_files(manifest.files, side)] for side in SIDES)
        source_offsets, target_offsets = (mapped(f"{side}.offsets", "<i8") for side in SIDES)
        is_joined = manifest.format == JOINED_VERSION
        pieces = (JoinedPieces(source), JoinedPieces(target)) if is_joined else (source[0], target[0])
        return cls(pieces, (source_offsets, target_offsets), files=files)


def _opened(path: Path) -> AbstractContextManager[SealedFolder[Manifest]]:
    """The directory of a store. Raises InputError where it is not complete, or of another version."""
    return open_sealed(path.resolve(), _parse_manifest, InputError)


def _parse_manifest(data: Any) -> Manifest:
    """The manifest of a store. Raises ValueError where it cannot be one."""
    if isinstance(data, dict) and data.get("format") not in (STORE_VERSION, JOINED_VERSION):
        raise ValueError(f"a prepared corpus of format {data.get('format')}, not {STORE_VERSION} or {JOINED_VERSION}")
    manifest = from_json(Manifest, data, complete=True)
    for name in manifest.files:
        if name != Path(name).name:
            raise ValueError(f"it names {name!a:.80}, which is no file beside it")
    source, target = (_id_files(manifest.files, side) for side in SIDES)
    is_joined = "source.ids" not in source
    has_all = len(source) == len(target) > 0 and all(f"{side}.offsets" in manifest.files for side in SIDES)
    is_of_format = manifest.format == (JOINED_VERSION if is_joined else STORE_VERSION)
    if manifest.dtype not in (_NARROW, _WIDE) or not (has_all and is_of_format):
        raise ValueError("damaged")
    return manifest


def _id_files(names: Mapping[str, Digest], side: str) -> list[str]:
    """The files of ids of one side, in order: `SIDE.ids`, or `SIDE.0.ids`, `SIDE.1.ids` and so on."""
    if f"{side}.ids" in names:
        return [f"{side}.ids"]
    return list(takewhile(names.__contains__, (f"{side}.{number}.ids" for number in count())))


class StoreWriter:
    """Writes a store block by block, so that memory stays bounded; `path` is a directory of its own, empty.

    OSError passes through: the caller knows what the place is for.
    """

    def __init__(self, path: Path, vocab_size: int) -> None:
        self._path = path
        self._dtype = _NARROW if vocab_size <= 65_536 else _WIDE
        self._pairs = 0
        self._totals = [0, 0]  # pieces of each side

        self._files: list[tuple[IO[bytes], IO[bytes]]] = []  # of each side, ids and offsets
        for side in SIDES:
            ids = (path / f"{side}.ids").open("xb")
            offsets = (path / f"{side}.offsets").open("xb")
            offsets.write(bytes(8))  # the first sentence starts at 0
            self._files.append((ids, offsets))

    def __len__(self) -> int:
        return self._pairs

    def tokens(self, side: int) -> int:
        """Real tokens written so far, end marks counted."""
        return self._totals[side] + self._pairs

    def add(self, source: Sentences, target: Sentences) -> None:
        """Append these pairs."""
        for side, (pieces, counts) in enumerate((source, target)):
            ids, offsets = self._files[side]
            ids.write(pieces.astype(self._dtype).tobytes())

            ends = counts.cumsum() + self._totals[side]
            offsets.write(ends.astype("<i8").tobytes())
            self._totals[side] += len(pieces)
        self._pairs += len(source.counts)

    def finish(self, extras: dict[str, bytes]) -> None:
        """Write the files `extras` by name, bring everything to the disk, and write the manifest last."""
        self.close()
        for name, content in extras.items():
            (self._path / name).write_bytes(content)
        names = (*(f"{side}.{kind}" for side in SIDES for kind in ("ids", "offsets")), *extras)
        seal(self._path, sync_files(self._path, names), partial(Manifest, STORE_VERSION, self._dtype))

    def close(self) -> None:
        """Close the files; safe to call again."""
        for ids, offsets in self._files:
            ids.close()
            offsets.close()


def join_stores(path: Path, parts: Sequence[Path], extras: Mapping[str, bytes]) -> None:
    """Make the empty directory `path` one store of all pairs of the stores `parts`, in their order.

    Their ids are not copied: the files get another name, on file systems that have hard links. Offsets are written
    anew. OSError passes through, as from StoreWriter; InputError where a part is no store.
    """
    manifests = []
    for part in parts:
        with _opened(part) as folder:
            manifests.append(folder.manifest)
    files = {}
    for side in SIDES:
        for number, (part, manifest) in enumerate(zip(parts, manifests, strict=True)):
            name = f"{side}.{number}.ids"
            _link(part / f"{side}.ids", path / name)
            files[name] = manifest.files[f"{side}.ids"]
        with (path / f"{side}.offsets").open("xb") as joined:
            _join_offsets([part / f"{side}.offsets" for part in parts], joined)
    for name, content in extras.items():
        (path / name).write_bytes(content)
    files |= sync_files(path, (*(f"{side}.offsets" for side in SIDES), *extras))
    seal(path, files, partial(Manifest, JOINED_VERSION, manifests[0].dtype))


def _join_offsets(parts: Sequence[Path], joined: IO[bytes]) -> None:
    """Write the offsets of several stores as one store has them."""
    joined.write(bytes(8))
    total = 0  # pieces of the stores that came before
    for part in parts:
        offsets = np.frombuffer(_MappedFile.of(part).content, "<i8")
        for start in range(1, len(offsets), BLOCK):
            joined.write((offsets[start : start + BLOCK] + total).tobytes())
        total += int(offsets[-1])


def _link(file: Path, name: Path) -> None:
    """Give a file another name, or copy it where the file system has no links."""
    try:
        os.link(file, name)
    except OSError:
        shutil.copyfile(file, name)
        sync(name)
