"""Token ids on disk, written once, memory-mapped.

A store is a directory: for each side one flat file of piece ids (uint16, or int32 above 65,536 pieces) and one of int64
offsets, little-endian, and MANIFEST.json with the sizes and SHA-256 of all files. Ids carry no special marks; lengths
count the end mark, as everything that budgets tokens does. Reading goes through plain array views of the memory maps,
because `np.memmap` makes each small slice slow.
"""

import fcntl
import hashlib
import json
import logging
import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from transformer.errors import InputError

STORE_VERSION = 1
SIDES = ("source", "target")
FILES = [f"{side}.{kind}" for side in SIDES for kind in ("ids", "offsets")]
MANIFEST = "MANIFEST.json"
BLOCK = 1 << 20  # pairs
_NARROW, _WIDE = "<u2", "<i4"

log = logging.getLogger(__name__)

Array = npt.NDArray[np.integer[Any]]
Ids = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.int32]  # (n, 2): tokens of each pair, EOS counted, source then target
Mixture = Sequence[tuple[int, float]]  # pairs and weight of each of the corpora that lie one after the other in a store


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


class Store:
    """Sentence pairs as piece ids; pair `i` keeps its number for ever."""

    def __init__(self, pieces: tuple[Array, Array], offsets: tuple[Ids, Ids]) -> None:
        self._pieces = pieces
        self._offsets = offsets
        self.lengths = _lengths(offsets)
        self.longest: tuple[int, int] = tuple(self.lengths.max(axis=0, initial=0).tolist())  # of each side

    def __len__(self) -> int:
        return len(self.lengths)

    def gather(self, ids: Ids, side: int) -> Sentences:
        """These sentences, their pieces as int64; side 0 is the source."""
        starts = self._offsets[side][ids]
        counts = self._offsets[side][ids + 1] - starts
        ends = counts.cumsum()
        total = int(ends[-1]) if len(ids) else 0
        index = np.arange(total) + np.repeat(starts - ends + counts, counts)
        return Sentences(self._pieces[side][index].astype(np.int64), counts)

    @classmethod
    def from_pieces(cls, source: list[list[int]], target: list[list[int]]) -> "Store":
        """A store in memory, for sets that are small, such as the development set."""
        left = Sentences.of(source)
        right = Sentences.of(target)
        offsets = (np.concatenate([[0], left.counts.cumsum()]), np.concatenate([[0], right.counts.cumsum()]))
        return cls((left.pieces, right.pieces), offsets)

    @classmethod
    def open(cls, path: Path) -> "Store":
        """Map a store that `StoreWriter` made. Raises InputError where a file is missing, foreign or damaged."""
        manifest = verify(path)
        pieces = [_map(path / f"{side}.ids", str(manifest["dtype"])) for side in SIDES]
        offsets = [cast(Ids, _map(path / f"{side}.offsets", "<i8")) for side in SIDES]
        return cls((pieces[0], pieces[1]), (offsets[0], offsets[1]))


def _lengths(offsets: tuple[Ids, Ids]) -> Lengths:
    """The distances of the offsets, plus one for EOS; block by block, as there may be tens of millions."""
    lengths = np.empty((len(offsets[0]) - 1, 2), np.int32)
    for side, ends in enumerate(offsets):
        for start in range(0, len(lengths), BLOCK):
            lengths[start : start + BLOCK, side] = np.diff(ends[start : start + BLOCK + 1]) + 1
    return lengths


def verify(path: Path) -> dict[str, object]:
    """The manifest of a store whose files all have the sizes and digests that it names; else InputError."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        if manifest["format"] != STORE_VERSION:
            raise InputError(f"{path}: format {manifest['format']} of a prepared corpus, not {STORE_VERSION}")
        if manifest["dtype"] not in (_NARROW, _WIDE) or not set(FILES) <= set(manifest["files"]):
            raise InputError(f"{path / MANIFEST}: damaged")
        for name, entry in manifest["files"].items():
            if digest_file(path / name) != (entry["size"], entry["sha256"]):
                raise InputError(f"{path / name}: damaged: its digest is not the one in {MANIFEST}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: not a complete prepared corpus ({type(error).__name__}: {error})") from error
    return cast(dict[str, object], manifest)


def digest_file(path: Path) -> tuple[int, str]:
    """Size in bytes and SHA-256 of a file, read in one pass."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def _map(path: Path, dtype: str) -> Array:
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype=dtype)
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=dtype)


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
            size, digest = digest_file(self._path / name)
            files[name] = {"size": size, "sha256": digest}

        manifest = {"format": STORE_VERSION, "dtype": self._dtype, "files": files}
        (self._path / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        sync(self._path / MANIFEST)
        sync(self._path)

    def close(self) -> None:
        """Close the files; safe to call again."""
        for ids, offsets in self._files:
            ids.close()
            offsets.close()


def build_once(path: Path, fill: Callable[[Path], None], *, usable: Callable[[Path], bool]) -> None:
    """Have `fill` make the directory `path`, unless it is usable or another process makes it so in the meantime.

    It is filled under a temporary name and renamed, so that whatever has the name is complete. OSError passes through.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{path.name}")
    with _locked(path.with_name(f"{path.name}.lock")):
        if usable(path):
            return
        shutil.rmtree(temporary, ignore_errors=True)  # of a builder that was killed
        temporary.mkdir()
        try:
            fill(temporary)
            shutil.rmtree(path, ignore_errors=True)  # damaged, or it would have been usable
            temporary.rename(path)
            sync(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that the kernel gives back when this process dies."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another process that prepares the same corpus")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def sync(path: Path) -> None:
    """Wait until a file or directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
