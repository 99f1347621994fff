"""Token ids on disk, written once, memory-mapped.

A store is a directory: for each side one flat file of piece ids (uint16, or int32 above 65,536 pieces) and one of int64
offsets, little-endian, and MANIFEST.json with the sizes and SHA-256 of all files. Ids carry no special marks; lengths
count the end mark, as everything that budgets tokens does. Reading goes through plain array views of the memory maps,
because `np.memmap` makes each small slice slow.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from transformer.config.primitives import from_json, to_json
from transformer.errors import InputError, StorageError
from transformer.files import MANIFEST, Digest, digest_file, encode_json, read_json, sync, write_new

STORE_VERSION = 1
SIDES = ("source", "target")
FILES = [f"{side}.{kind}" for side in SIDES for kind in ("ids", "offsets")]
BLOCK = 1 << 20  # pairs
_NARROW, _WIDE = "<u2", "<i4"

Array = npt.NDArray[np.integer[Any]]
Ids = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.int32]  # (n, 2): tokens of each pair, EOS counted, source then target
Mixture = Sequence[tuple[int, float]]  # pairs and weight of each of the corpora that lie one after the other in a store


@dataclass(frozen=True)
class Manifest:
    """MANIFEST.json of a store."""

    format: int
    dtype: str  # of the piece ids
    files: dict[str, Digest]


class Sentences(NamedTuple):
    """Some sentences of one side, end to end."""

    pieces: Array
    counts: Ids  # pieces of each sentence

    @classmethod
    def of(cls, sentences: list[list[int]]) -> "Sentences":
        """Lay lists of pieces end to end."""
        counts = np.fromiter(map(len, sentences), np.int64, len(sentences))
        return cls(np.fromiter(chain.from_iterable(sentences), np.int32, int(counts.sum())), counts)

    def select(self, keep: npt.NDArray[np.bool_]) -> "Sentences":
        """Those that are marked."""
        return Sentences(self.pieces[np.repeat(keep, self.counts)], self.counts[keep])


class _File(NamedTuple):
    """A file of a store, and its content in memory."""

    path: Path
    content: mmap.mmap | bytes

    @classmethod
    def of(cls, path: Path) -> "_File":
        if path.stat().st_size == 0:  # it cannot be mapped
            return cls(path, b"")
        with path.open("rb") as file:
            return cls(path, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    @property
    def is_cut(self) -> bool:
        """Whether it has become shorter than it was: to read what is missing would end the process by SIGBUS."""
        return isinstance(self.content, mmap.mmap) and self.content.size() < len(self.content)


class Store:
    """Sentence pairs as piece ids; pair `i` keeps its number for ever."""

    def __init__(
        self, pieces: tuple[Array, Array], offsets: tuple[Ids, Ids], *, files: Sequence[Sequence["_File"]] = ((), ())
    ) -> None:
        self._files = files  # of each side, where they are mapped
        self._pieces = pieces
        self._offsets = offsets
        self.lengths = _lengths(offsets)
        self.longest: tuple[int, int] = tuple(self.lengths.max(axis=0, initial=0).tolist())  # of each side

    def __len__(self) -> int:
        return len(self.lengths)

    def gather(self, ids: Ids, side: int) -> Sentences:
        """These sentences, their pieces as int64; side 0 is the source."""
        self._check(side)
        starts = self._offsets[side][ids]
        counts = self._offsets[side][ids + 1] - starts
        ends = counts.cumsum()
        total = int(ends[-1]) if len(ids) else 0
        index = np.arange(total) + np.repeat(starts - ends + counts, counts)
        return Sentences(self._pieces[side][index].astype(np.int64), counts)

    def _check(self, side: int) -> None:
        for file in self._files[side]:
            if file.is_cut:
                raise StorageError(f"{file.path}: cut short while it was in use: start again, and it is built anew")

    @classmethod
    def from_pieces(cls, source: list[list[int]], target: list[list[int]]) -> "Store":
        """A store in memory, for sets that are small, such as the development set."""
        left = Sentences.of(source)
        right = Sentences.of(target)
        offsets = (np.concatenate([[0], left.counts.cumsum()]), np.concatenate([[0], right.counts.cumsum()]))
        return cls((left.pieces, right.pieces), offsets)

    @classmethod
    def open(cls, path: Path, *, is_verified: bool = False) -> "Store":
        """Map a store that `StoreWriter` made; `is_verified` says that another process has just read every byte of it.

        Raises InputError where a file is missing, foreign or damaged.
        """
        manifest = _read_manifest(path)
        if not is_verified:
            _verify(path, manifest)
        ids = [_File.of(path / f"{side}.ids") for side in SIDES]
        ends = [_File.of(path / f"{side}.offsets") for side in SIDES]
        pieces = [np.frombuffer(file.content, dtype=manifest.dtype) for file in ids]
        offsets = [np.frombuffer(file.content, dtype="<i8") for file in ends]
        return cls((pieces[0], pieces[1]), (offsets[0], offsets[1]), files=list(zip(ids, ends, strict=True)))


def _lengths(offsets: tuple[Ids, Ids]) -> Lengths:
    """The distances of the offsets, plus one for EOS; block by block, as there may be tens of millions."""
    lengths = np.empty((len(offsets[0]) - 1, 2), np.int32)
    for side, ends in enumerate(offsets):
        for start in range(0, len(lengths), BLOCK):
            lengths[start : start + BLOCK, side] = np.diff(ends[start : start + BLOCK + 1]) + 1
    return lengths


def _read_manifest(path: Path) -> Manifest:
    """The manifest of a store. Raises InputError where the store is not complete, or of another version."""
    try:
        data = read_json(path / MANIFEST)
        if isinstance(data, dict) and data.get("format") != STORE_VERSION:
            raise InputError(f"{path}: format {data.get('format')} of a prepared corpus, not {STORE_VERSION}")
        manifest = from_json(Manifest, data, complete=True)
        if (path / MANIFEST).read_bytes() != encode_json(to_json(manifest)):
            raise ValueError(f"{MANIFEST} is not as it was written")
        if manifest.dtype not in (_NARROW, _WIDE) or not set(FILES) <= manifest.files.keys():
            raise InputError(f"{path / MANIFEST}: damaged")
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a complete prepared corpus ({type(error).__name__}: {error})") from error
    return manifest


def _verify(path: Path, manifest: Manifest) -> None:
    """Raise InputError unless all files have the sizes and digests that the manifest names."""
    for name, expected in manifest.files.items():
        try:
            is_sound = digest_file(path / name) == expected
        except OSError as error:
            raise InputError(f"{path}: not a complete prepared corpus ({error})") from error
        if not is_sound:
            raise InputError(f"{path / name}: damaged: its digest is not the one in {MANIFEST}")


class StoreWriter:
    """Writes a store block by block, so that memory stays bounded; `path` is a directory of its own, empty.

    OSError passes through: the caller knows what the place is for.
    """

    def __init__(self, path: Path, vocab_size: int) -> None:
        self._path = path
        self._dtype = _NARROW if vocab_size <= 65_536 else _WIDE
        self._files: list[tuple[IO[bytes], IO[bytes]]] = []
        self._pairs = 0
        self._totals = [0, 0]  # pieces of each side
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
            offsets.write((counts.cumsum() + self._totals[side]).astype("<i8").tobytes())
            self._totals[side] += len(pieces)
        self._pairs += len(source.counts)

    def finish(self, extras: dict[str, bytes]) -> None:
        """Write `extras` by name, bring all to the disk, and the manifest last."""
        self.close()
        for name, content in extras.items():
            (self._path / name).write_bytes(content)

        files = {}
        for name in (*FILES, *extras):
            sync(self._path / name)
            files[name] = digest_file(self._path / name)

        manifest = Manifest(STORE_VERSION, self._dtype, files)
        write_new(self._path / MANIFEST, encode_json(to_json(manifest)))
        sync(self._path)

    def close(self) -> None:
        """Close the files; safe to call again."""
        for ids, offsets in self._files:
            ids.close()
            offsets.close()
