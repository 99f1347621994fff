"""The run directory on disk: its lock, its checkpoints, its small JSON files.

A checkpoint is a directory of safetensors and JSON with a MANIFEST of sizes and digests, written under a temporary
name, synced, then renamed: it is there whole or not at all. The surprise: nothing points to the latest one. The newest
directory that verifies is the latest, and no crash can make that a lie. What is read is not trusted: names come from a
fixed list, links are not followed, nothing is executed, resolved or used as a path.

Names with a dot: `.tmp-` unfinished, `.del-` being removed, `.old-` being replaced (it returns if the new one never
came), `.bad-` damaged, kept. A POSIX file system is assumed. Readers need no lock; who commits or rotates does.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import safetensors.torch
from torch import Tensor

from transformer.config.primitives import from_json
from transformer.errors import CheckpointError, InputError, LockedError, StorageError

T = TypeVar("T")

_FORMAT = 1
_MANIFEST = "MANIFEST.json"
_DOCUMENTS = ("config.json", "state.json")
_REQUIRED = frozenset({*_DOCUMENTS, "model.safetensors"})
_ALLOWED = _REQUIRED | {"optimizer.safetensors", "ema.safetensors"}
_STEP = re.compile(r"step-([0-9]{8,})")
_JSON_LIMIT = 16 * 2**20  # bytes
_ATTEMPTS = 3
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: its place, its step and its two documents. Tensors are read on demand."""

    path: Path
    step: int
    config: dict[str, Any]
    state: dict[str, Any]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of "model", "optimizer" or "ema" by sorted name, on the CPU; verified again as they are read.

        Raises CheckpointError, also if the checkpoint does not hold them.
        """
        path = self.path / f"{name}.safetensors"
        with _open_folder(self.path) as folder, _naming(path):
            entry = _read_manifest(self.path, folder)["files"].get(f"{name}.safetensors")
            if entry is None:
                raise ValueError("this checkpoint does not hold it")
            with _open_file(path, folder) as file:
                _verify(file, entry)
                data = file.read()
        try:
            tensors = safetensors.torch.load(data)
        except Exception as error:  # a hostile header fails in as many ways as safetensors and torch have
            raise CheckpointError(f"{path}: not a safetensors file: {error}") from error
        return dict(sorted(tensors.items()))

    def weights(self) -> dict[str, Tensor]:
        """What translates and is averaged: the moving average of the weights where there is one, else the weights."""
        with _open_folder(self.path) as folder:
            files = _read_manifest(self.path, folder)["files"]
        return self.tensors("ema" if "ema.safetensors" in files else "model")

    def settings(self, section: str, kind: type[T]) -> T:
        """A part of what it was trained with, such as "model". Raises CheckpointError where that is missing or bad."""
        try:
            return from_json(kind, self.config[section])
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"{self.path / 'config.json'}: not the settings of a run: {error}") from None


@contextmanager
def lock_run(run_dir: Path) -> Iterator[None]:
    """Hold `run_dir` (made if missing) against other writers, and clear what a killed one left in it.

    The kernel frees the lock when the process dies, however it dies. Raises LockedError at once, naming the holder, if
    another process has it; StorageError if the directory cannot be made or written.
    """
    try:
        _make_directories(run_dir)
        file = os.open(run_dir / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise StorageError(f"{run_dir}: cannot be written: {error.strerror}") from error
    with os.fdopen(file, "r+b", buffering=0) as lock:  # closed, never unlocked: that would free a forking parent's lock
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.truncate(0)
            lock.write(f"{_myself()}, since {time.strftime('%Y-%m-%d %H:%M:%S %z')}\n".encode())
            _clear(run_dir)
            _clear(run_dir / "checkpoints")
        except BlockingIOError:
            holder = lock.read(1000).decode(errors="replace").strip()
            raise LockedError(f"{run_dir}: in use by {holder}; stop it, or choose another run_dir") from None
        except OSError as error:
            raise StorageError(f"{run_dir}: cannot be locked: {error.strerror}") from error
        yield
        lock.truncate(0)


def _myself() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _is_ours(run_dir: Path) -> bool:
    """Whether this process holds the lock: a mere reader must not move what a trainer may be replacing."""
    try:
        return (run_dir / ".lock").read_text(encoding="utf-8", errors="replace").startswith(f"{_myself()},")
    except OSError:
        return False


def _clear(folder: Path) -> None:
    for name in _listing(folder):
        if name.startswith((".tmp-", ".del-")):
            _discard(folder / name)
        elif name.startswith(".old-"):
            _put_back(folder / name, folder / name.removeprefix(".old-"))
    if folder.is_dir():
        _sync_folder(folder)  # a killed process may have renamed without living to sync


def _put_back(old: Path, target: Path) -> None:
    """End a replacement: the old one returns unless something is in its place."""
    if os.path.lexists(target):
        _discard(old)
    elif os.path.lexists(old):
        os.rename(old, target)


def commit(
    run_dir: Path,
    *,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    config: Mapping[str, Any],
    averaged: bool = False,
) -> Checkpoint:
    """Write `checkpoints/step-N`; once this returns, neither a kill nor a power cut takes it away.

    `tensors` holds "model" and, as wanted, "optimizer" and "ema"; no two tensors of one may share memory. An equal
    checkpoint already there stays, another verified one is replaced, a damaged one kept as `.bad-step-N`. With
    `averaged`, the place is the directory of that name, and `step` the newest that went into it. Raises StorageError,
    everything as it was before; InputError if `config` holds what `load_checkpoint` would refuse.
    """
    target = run_dir / "averaged" if averaged else step_path(run_dir, step)
    try:
        _check_config(dict(config))
    except ValueError as error:
        raise InputError(f"the configuration cannot be stored: {error}") from error
    documents = {"config.json": _encode(dict(config)), "state.json": _encode(dict(state))}
    needed = sum(map(len, documents.values())) + sum(t.nbytes for group in tensors.values() for t in group.values())
    for attempt in range(1, _ATTEMPTS + 1):
        temporary = _beside(target, ".tmp-")  # after a failed write the old file cannot be trusted
        try:
            _make_directories(target.parent)
            if shutil.disk_usage(target.parent).free < 1.1 * needed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            _fill(temporary, step, tensors=tensors, documents=documents)
            _publish(temporary, target)
            break
        except OSError as error:
            if attempt == _ATTEMPTS:
                raise _storage_error(target, needed, error=error) from error
            _log.warning("%s: attempt %d to write it failed: %s", target, attempt, error.strerror)
        finally:
            _discard(temporary)
    return Checkpoint(target, step, *(json.loads(documents[name]) for name in _DOCUMENTS))


def _fill(
    folder: Path, step: int, *, tensors: Mapping[str, Mapping[str, Tensor]], documents: Mapping[str, bytes]
) -> None:
    os.mkdir(folder)
    files = {name: _write(folder / name, data) for name, data in documents.items()}
    for name, group in tensors.items():  # one at a time: the bytes are a second copy in memory
        data = safetensors.torch.save({key: group[key].detach().cpu().contiguous() for key in sorted(group)})
        files[f"{name}.safetensors"] = _write(folder / f"{name}.safetensors", data)
    manifest = {"format": _FORMAT, "step": step, "files": dict(sorted(files.items()))}
    _check_manifest(manifest)
    _write(folder / _MANIFEST, _encode(manifest))
    _sync_folder(folder)


def _publish(temporary: Path, target: Path) -> None:
    """Give a complete directory its name. An equal one already there stays, any other makes way."""
    old = target.with_name(f".old-{target.name}")
    if not (os.path.lexists(target) and _is_equal(temporary, target)):
        try:
            if os.path.lexists(target):
                _discard(old)
                os.rename(target, old)
            os.rename(temporary, target)
        finally:
            if not os.path.lexists(target):
                _put_back(old, target)
    _sync_folder(target.parent)  # an equal one may be there because the last attempt failed at just this sync
    _discard(old)


def _is_equal(temporary: Path, target: Path) -> bool:
    """Whether `target` is verified and holds the same; a damaged one is moved out of the way."""
    try:
        load_checkpoint(target)
    except CheckpointError as error:
        _log.warning("%s; moved out of the way", error)
        _keep_bad(target)
        return False
    return (temporary / _MANIFEST).read_bytes() == (target / _MANIFEST).read_bytes()


def _write(path: Path, data: bytes) -> dict[str, Any]:
    """Write a new file through to the disk; returns its manifest entry. Raises OSError."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(file, rest) :]
        os.fsync(file)
    finally:
        os.close(file)
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _sync_folder(path: Path) -> None:
    """Make the names in a directory durable: a synced file can still be lost with its name."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _make_directories(path: Path) -> None:
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    if missing:
        path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        _sync_folder(folder.parent)


def _storage_error(path: Path, needed: int, *, error: OSError) -> StorageError:
    folder = next(folder for folder in path.absolute().parents if folder.is_dir())
    free = shutil.disk_usage(folder).free
    return StorageError(f"{path}: cannot be written: {error.strerror} ({needed} bytes needed, {free} bytes free)")


def _beside(path: Path, prefix: str) -> Path:
    """A fresh name in the same directory, hence on the same file system."""
    return path.with_name(f"{prefix}{path.name}-{os.getpid()}-{secrets.token_hex(4)}")


def _discard(path: Path) -> None:
    """Remove `path` if it is there; what cannot be removed is tried again at the next start, never fatal."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)
    except OSError as error:
        _log.warning("%s: cannot be removed: %s", path, error.strerror)


def rotate(run_dir: Path, keep: Collection[int]) -> None:
    """Remove the checkpoints whose step is not in `keep`, never the newest. What fails is logged, never fatal."""
    try:
        victims = [step_path(run_dir, step) for step in list_steps(run_dir)[:-1] if step not in keep]
        doomed = {path: _beside(path, ".del-") for path in victims}
        for path, name in doomed.items():
            os.rename(path, name)
        if doomed:  # or a power cut could give a half-removed one its name back
            _sync_folder(run_dir / "checkpoints")
        for name in doomed.values():
            _discard(name)
    except (OSError, StorageError) as error:
        _log.warning("%s: old checkpoints cannot be removed: %s", run_dir, error)


def newest(run_dir: Path) -> Checkpoint | None:
    """The newest checkpoint that verifies; None if there is none at all.

    Damaged ones that are newer are reported, and moved to `.bad-step-N` if this process holds the lock. Raises
    CheckpointError, with nothing touched, if there are some and none verifies.
    """
    damaged: dict[Path, CheckpointError] = {}
    for path in (step_path(run_dir, step) for step in reversed(list_steps(run_dir))):
        try:
            found = load_checkpoint(path)
        except CheckpointError as error:
            if os.path.lexists(path):  # else a trainer rotated it away while it was being read
                damaged[path] = error
            continue
        for bad, reason in damaged.items():
            _log.warning("%s; falling back to %s", reason, path.name)
            if _is_ours(run_dir):
                _keep_bad(bad)
        return found
    tried = [str(error) for error in damaged.values()] or [n for n in _listing(run_dir / "checkpoints") if ".bad-" in n]
    if tried:
        remedy = f"restore one, or move {run_dir / 'checkpoints'} away to start afresh"
        raise CheckpointError(f"no checkpoint can be verified: {'; '.join(tried)}; {remedy}")
    return None


def list_steps(run_dir: Path) -> list[int]:
    """The committed steps, ascending, not verified. Raises StorageError if they cannot be listed."""
    found = (_STEP.fullmatch(name) for name in _listing(run_dir / "checkpoints"))
    return sorted(int(match[1]) for match in found if match and match[0] == step_path(run_dir, int(match[1])).name)


def step_path(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run_dir / "checkpoints" / f"step-{step:08d}"


def _keep_bad(path: Path) -> None:
    bad = path.with_name(f".bad-{path.name}")
    try:
        os.rename(path, _beside(path, ".bad-") if os.path.lexists(bad) else bad)
    except OSError as error:
        _log.warning("%s: cannot be renamed: %s", path, error.strerror)


def _listing(folder: Path) -> list[str]:
    """Names in a directory; none if it does not exist. One that cannot be read must not pass for empty."""
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"{folder}: cannot be listed: {error.strerror}") from error


def load_checkpoint(path: Path) -> Checkpoint:
    """Verify the checkpoint at `path`: names, kinds, sizes, digests. Raises CheckpointError naming the bad file."""
    documents: dict[str, Any] = {}
    with _open_folder(path) as folder:
        manifest = _read_manifest(path, folder)
        files = manifest["files"]
        for name in sorted({*files, *os.listdir(folder)} - {_MANIFEST}):
            with _naming(path / ascii(name)[1:-1]):
                if name not in files:
                    raise ValueError("not in the manifest")
                with _open_file(path / name, folder) as file:
                    _verify(file, files[name])
                    if name in _DOCUMENTS:
                        documents[name] = _parse(file)
                        if not isinstance(documents[name], dict):
                            raise ValueError("not a JSON object")
        with _naming(path / "config.json"):
            _check_config(documents["config.json"])
    return Checkpoint(path, manifest["step"], *(documents[name] for name in _DOCUMENTS))


def _read_manifest(path: Path, folder: int) -> dict[str, Any]:
    with _naming(path / _MANIFEST), _open_file(path / _MANIFEST, folder) as file:
        manifest: dict[str, Any] = _parse(file)
        _check_manifest(manifest)
        if _STEP.fullmatch(path.name) and path.name != f"step-{manifest['step']:08d}":
            raise ValueError(f"belongs to step {manifest['step']}")
        file.seek(0)
        if file.read() != _encode(manifest):  # catches, among others, a name given twice
            raise ValueError("not as it was written")
    return manifest


def _check_manifest(manifest: Any) -> None:
    match manifest:
        case {"format": int(number)} if number != _FORMAT:
            raise ValueError(f"format {number} is not known to this version")
        case {"format": int(), "step": int(), "files": dict(files)} if len(manifest) == 3:
            if wrong := (files.keys() - _ALLOWED) or (_REQUIRED - files.keys()):
                raise ValueError(f"the files of a checkpoint are not {sorted(files)!a:.200}: {min(wrong)!a:.80}")
            if not all(isinstance(entry, dict) and entry.keys() == {"size", "sha256"} for entry in files.values()):
                raise ValueError("sizes and digests are missing")
        case _:
            raise ValueError("not a manifest")


def _verify(file: BufferedReader, entry: Mapping[str, Any]) -> None:
    """Read a file against its manifest entry, leaving it at its start. Raises ValueError."""
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    if file.tell() != entry["size"]:
        raise ValueError(f"{file.tell()} bytes, not the {entry['size']!a:.30} of the manifest")
    if digest != entry["sha256"]:
        raise ValueError("its content is not that of the manifest (sha256 differs)")
    file.seek(0)


def _check_config(config: Any) -> None:
    """Raise ValueError for what a configuration framework could resolve or call, should it ever be handed this."""
    todo: list[Any] = [config]
    while todo:  # not recursion: nesting may be as deep as a hostile file likes
        match todo.pop():
            case dict() as table:
                if under := [key for key in table if str(key).startswith("_")]:
                    raise ValueError(f"key {under[0]!a:.80} begins with an underscore")
                todo += [*table.keys(), *table.values()]
            case list() | tuple() as items:
                todo += items
            case str(text) if "${" in text:
                raise ValueError(f"value {text!a:.80} contains '${{'")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Whatever is wrong with a file becomes a CheckpointError that names it."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}") from error


@contextmanager
def _open_folder(path: Path) -> Iterator[int]:
    """A directory held open: files opened in it belong together even if it is replaced meanwhile."""
    with _naming(path):
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield folder
    finally:
        os.close(folder)


def _open_file(path: Path, folder: int | None) -> BufferedReader:
    """Open a regular file (by its name in the open directory, if one is given), following no link, awaiting no pipe."""
    name = path if folder is None else path.name
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise ValueError("not a regular file")
    return os.fdopen(file, "rb")


def write_json(path: Path, value: object) -> None:
    """Replace a small JSON file atomically. Raises StorageError; ValueError for NaN and infinities (null is "none")."""
    write_file(path, _encode(value))


def write_file(path: Path, data: bytes) -> None:
    """Replace a small file atomically, and durably. Raises StorageError."""
    temporary = _beside(path, ".tmp-")
    try:
        _write(temporary, data)
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise _storage_error(path, len(data), error=error) from error
    finally:
        _discard(temporary)


def read_json(path: Path) -> Any:
    """The content of a small JSON file. Raises CheckpointError naming it if it is missing, a link, too large, bad."""
    with _naming(path), _open_file(path, None) as file:
        return _parse(file)


def _encode(value: object) -> bytes:
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()


def _parse(file: BufferedReader) -> Any:
    data = file.read(_JSON_LIMIT + 1)
    if len(data) > _JSON_LIMIT:  # before parsing: a value takes many times the memory of its text
        raise ValueError(f"larger than {_JSON_LIMIT} bytes")
    return json.loads(data.decode(), parse_constant=_refuse)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")
