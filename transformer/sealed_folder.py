"""A directory that says what is in it: MANIFEST.json has the size and the SHA-256 of every file.

    seal          files that are on the disk  ->  their manifest, last
    open_sealed   the manifest, checked by who knows what may be in it  ->  files, each as it is verified

Such are checkpoints, prepared corpora and the plan of their parts, engines, and copies of runs on the hub. A directory
is held open while it is read, so what is read of it belongs together even if another one takes its place. No link is
followed, and no pipe waited for. How a directory gets its name when it is complete is in `files`.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Generic, TypeVar

from transformer.config.primitives import to_json
from transformer.errors import StorageError, TransformerError
from transformer.files import MANIFEST, Digest, digest_file, encode_json, open_regular, parse_json, sync, write_new
from transformer.machine import lack_of


class Listing:
    """What every manifest has, which is a dataclass."""

    files: dict[str, Digest]


M = TypeVar("M", bound=Listing)


@dataclass(frozen=True)
class Sealed(Listing):
    """The manifest of a directory of which there is no more to say."""

    files: dict[str, Digest]


def sync_files(folder: Path, names: Iterable[str]) -> dict[str, Digest]:
    """Bring files in a directory to the disk. Raises OSError."""
    digests = {}
    for name in names:
        sync(folder / name)
        digests[name] = digest_file(folder / name)
    return digests


def seal(folder: Path, files: Mapping[str, Digest], manifest: Callable[[dict[str, Digest]], M]) -> M:
    """Write the manifest that is made of the files, all of which are on the disk. Raises OSError."""
    sealed = manifest(dict(sorted(files.items())))
    write_new(folder / MANIFEST, encode_json(to_json(sealed)))
    sync(folder)
    return sealed


@contextmanager
def open_sealed(
    path: Path, parse: Callable[[Any], M], error: type[TransformerError], *, known: M | None = None
) -> Iterator["SealedFolder[M]"]:
    """The directory at `path`, which is no link, with the manifest that `parse` makes of JSON, unless that is `known`.

    `parse` raises ValueError for what cannot be; no name that it lets through leads out of the directory. Whatever is
    wrong becomes an `error` that names the file; what the machine lacks, a StorageError.
    """
    with _errors_named(path, error):
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        manifest = known
        if manifest is None:
            with _errors_named(path / MANIFEST, error), open_regular(Path(MANIFEST), folder) as file:
                manifest = parse(parse_json(file))
                file.seek(0)
                if file.read() != encode_json(to_json(manifest)):  # catches, among others, a name given twice
                    raise ValueError("not as it was written")
        yield SealedFolder(path, manifest, folder, error)
    finally:
        os.close(folder)


@dataclass(frozen=True)
class SealedFolder(Generic[M]):
    """A directory that is open, with its manifest."""

    path: Path
    manifest: M
    folder: int  # its descriptor
    error: type[TransformerError]  # what is wrong with a file becomes one

    def names(self) -> set[str]:
        """What the manifest names, and what is there, the manifest apart."""
        return {*self.manifest.files, *os.listdir(self.folder)} - {MANIFEST}

    @contextmanager
    def file(self, name: str, *, is_verified: bool = True) -> Iterator[BufferedReader]:
        """A file, open at its start, of which at least the size is verified. Errors of the block name it, too."""
        with _errors_named(self.path / ascii(name)[1:-1], self.error):
            if name not in self.manifest.files:
                raise ValueError("not in the manifest")
            expected = self.manifest.files[name]
            with open_regular(Path(name), self.folder) as file:
                size = os.fstat(file.fileno()).st_size
                if size != expected.size:
                    raise ValueError(f"damaged: {size} bytes, and {MANIFEST} says {expected.size}")
                if is_verified:
                    _compare(hashlib.file_digest(file, "sha256").hexdigest(), expected)
                    file.seek(0)
                yield file

    def read(self, name: str) -> bytes:
        """The content of a file: the very bytes that were verified."""
        with self.file(name, is_verified=False) as file:
            data = file.read()
            _compare(hashlib.sha256(data).hexdigest(), self.manifest.files[name])
            return data

    def verify(self) -> None:
        """Verify every file of the manifest."""
        for name in self.manifest.files:
            with self.file(name):
                pass


def _compare(sha256: str, expected: Digest) -> None:
    if sha256 != expected.sha256:
        raise ValueError(f"damaged: its sha256 differs from the one in {MANIFEST}")


@contextmanager
def _errors_named(path: Path, error: type[TransformerError]) -> Iterator[None]:
    try:
        yield
    except OSError as failure:
        lack = lack_of(failure)  # which says nothing about the file: it must not be taken for damaged
        if lack is not None:
            raise StorageError(f"{path}: {lack}") from failure
        raise error(f"{path}: {failure.strerror}") from failure
    except ValueError as failure:
        raise error(f"{path}: {failure}") from failure
