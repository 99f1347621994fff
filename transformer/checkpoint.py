"""Checkpoints: commit, rotate, find, load and verify.

    checkpoints/step-00001200/  {model,optimizer,ema}.safetensors  config.json  state.json  MANIFEST.json

A checkpoint is a directory with a manifest of sizes and digests, written under a temporary name, brought to the disk,
then renamed: it is there whole or not at all. Nothing points to the latest one: the newest directory that verifies is
the latest, so no crash can leave a stale pointer. What is read is not trusted: names come from a fixed list, links are
not followed, nothing is executed, resolved or used as a path.

Readers take no lock; committing and rotating require it. A damaged checkpoint is kept as `.bad-step-N`.
"""

import errno
import json
import logging
import os
import re
import shlex
import shutil
from collections.abc import Callable, Collection, Mapping, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
from torch import Tensor

from transformer.config.primitives import from_json
from transformer.errors import CheckpointError, InputError, StorageError
from transformer.files import (
    DOOMED,
    MANIFEST,
    REPLACED,
    UNFINISHED,
    Digest,
    encode_json,
    list_names,
    make_directories,
    parse_json,
    put_back,
    remove,
    storage_error,
    sync,
    temporary_name,
    write_new,
)
from transformer.records import CHECKPOINT_FORMAT, CheckpointState
from transformer.run_dir import (
    CONFIG,
    EMA,
    MODEL,
    OPTIMIZER,
    STATE,
    STEP_PREFIX,
    RunDir,
    holds_lock,
    list_steps,
    other_writer,
    step_name,
    step_of,
    tensor_file,
)
from transformer.sealed_folder import Listing, SealedFolder, open_sealed, seal

T = TypeVar("T")

DAMAGED = ".bad-"  # begins the name of a damaged checkpoint
SHOWN_RUNS = 5  # at most, in an error that lists existing runs
ATTEMPTS = 3  # to write a checkpoint: a network disk may fail once

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # types that weights may have
_DOCUMENTS = (CONFIG, STATE)
_REQUIRED = frozenset({*_DOCUMENTS, tensor_file(MODEL)})  # files of a checkpoint
_ALLOWED = _REQUIRED | {tensor_file(OPTIMIZER), tensor_file(EMA)}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Manifest(Listing):
    """MANIFEST.json of a checkpoint."""

    format: int
    step: int
    files: dict[str, Digest]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: its place, its manifest and its two documents, which are verified. Tensors are read on demand."""

    path: Path
    manifest: Manifest
    config: dict[str, Any]
    state: dict[str, Any]
    read: dict[str, Tensor] | None = field(default=None, repr=False, compare=False)  # its weights, where they were read

    @property
    def step(self) -> int:
        """The step after which it was committed; for an average, the step of the run that it stands for."""
        return self.manifest.step

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors called MODEL, OPTIMIZER or EMA by sorted name, on the CPU; verified as they are read.

        Raises CheckpointError, also if the checkpoint does not hold them.
        """
        path = self.path / tensor_file(name)
        with _opened(self.path, known=self.manifest) as folder:
            data = folder.read(tensor_file(name))
        try:
            tensors = safetensors.torch.load(data)
        except Exception as error:  # a hostile header fails in as many ways as safetensors and torch have
            raise CheckpointError(f"{path}: not a safetensors file: {error}") from error
        return dict(sorted(tensors.items()))

    def holds(self, name: str) -> bool:
        """Whether it has the tensors called MODEL, OPTIMIZER or EMA."""
        return tensor_file(name) in self.manifest.files

    def weights(self) -> dict[str, Tensor]:
        """The weights to translate with and to average: the moving average where there is one, else the trained ones.

        Raises CheckpointError as `tensors` does, and where they are not finite floating-point numbers.
        """
        tensors = self.tensors(self.weights_name) if self.read is None else self.read
        try:
            check_weights(tensors)
        except ValueError as error:
            place = self.path / tensor_file(self.weights_name)
            raise CheckpointError(f"{place}: {error}: use another checkpoint") from None
        return tensors

    @property
    def weights_name(self) -> str:
        """EMA where it holds a moving average, else MODEL."""
        return EMA if self.holds(EMA) else MODEL

    def settings(self, section: str, kind: type[T]) -> T:
        """A section of its configuration, such as "model". Raises CheckpointError where that is missing or bad."""
        try:
            return from_json(kind, self.config[section])
        except (KeyError, ValueError) as error:
            raise CheckpointError(
                f"{self.path / CONFIG}: not the settings of a run: {error}{other_writer(self.path)}"
            ) from None

    def run_state(self) -> CheckpointState:
        """state.json as typed data. Raises CheckpointError where it is something else."""
        try:
            state = from_json(CheckpointState, self.state, complete=True)
            if state.training is not None and state.training.progress.step != self.step:
                raise ValueError(f"it belongs to step {state.training.progress.step}")
            return state
        except ValueError as error:
            raise CheckpointError(
                f"{self.path / STATE}: not the state of a run: {error}{other_writer(self.path)}"
            ) from None


def check_weights(tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless these are finite floating-point numbers."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _FLOATS:
            raise ValueError(f"{name!a:.80} is of type {tensor.dtype}, and weights are floating-point numbers")

    not_finite = first_not_finite(tensors)
    if not_finite is not None:
        raise ValueError(f"{not_finite!a:.80} holds numbers that are not finite")


def first_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor that holds NaN or infinity; None if all are finite."""
    if not tensors:
        return None
    checks = [torch.isfinite(tensor).all() for tensor in tensors.values()]
    are_finite = torch.stack(checks).tolist()  # together, so that the host waits for a GPU only once
    return next((name for name, is_finite in zip(tensors, are_finite, strict=True) if not is_finite), None)


# ---- writing --------------------------------------------------------------------------------------------------------


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

    `tensors` holds MODEL and, as wanted, OPTIMIZER and EMA; no two tensors of one may share memory. An equal
    checkpoint already there stays, another verified one is replaced, a damaged one kept as `.bad-step-N`. With
    `averaged`, the place is the directory of that name, and `step` that of the run which the average stands for.

    Raises StorageError where it cannot be written, and leaves everything as it was.
    """
    run = RunDir(run_dir)
    target = run.averaged if averaged else run.checkpoint(step)
    documents = {CONFIG: encode_json(dict(config)), STATE: encode_json(dict(state))}
    _check_names({*documents, *map(tensor_file, tensors)})
    needed = sum(len(document) for document in documents.values())
    needed += sum(tensor.nbytes for group in tensors.values() for tensor in group.values())

    # Write it under a temporary name, then give it its own.
    for attempt in range(1, ATTEMPTS + 1):
        temporary = temporary_name(target, UNFINISHED)  # after a failed write the old file cannot be trusted
        try:
            make_directories(target.parent)
            _check_space(target.parent, needed)
            manifest = _fill(temporary, step, tensors=tensors, documents=documents)
            _publish(temporary, target)
            break
        except OSError as error:
            if attempt == ATTEMPTS:
                raise storage_error(target, needed, error=error) from error
            log.warning("%s: attempt %d to write it failed: %s", target, attempt, error.strerror)
        finally:
            remove(temporary)
    return Checkpoint(target, manifest, config=json.loads(documents[CONFIG]), state=json.loads(documents[STATE]))


def check_space(run_dir: Path, needed: int) -> None:
    """Raise StorageError unless a checkpoint of so many bytes, and a tenth more, can be written."""
    place = RunDir(run_dir).checkpoints
    try:
        make_directories(place)
        _check_space(place, needed)
    except OSError as error:
        raise storage_error(place, needed, error=error) from error


def _check_space(folder: Path, needed: int) -> None:
    if shutil.disk_usage(folder).free < 1.1 * needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _fill(
    folder: Path, step: int, *, tensors: Mapping[str, Mapping[str, Tensor]], documents: Mapping[str, bytes]
) -> Manifest:
    """Write all files of a checkpoint into a new directory, and the manifest last."""
    os.mkdir(folder)
    digests = {name: write_new(folder / name, data) for name, data in documents.items()}
    for name, group in tensors.items():  # one at a time: the bytes are a second copy in memory
        file_name = tensor_file(name)
        digests[file_name] = write_new(folder / file_name, _to_bytes(group))

    return seal(folder, digests, partial(Manifest, CHECKPOINT_FORMAT, step))


def _to_bytes(group: Mapping[str, Tensor]) -> bytes:
    """The content of a safetensors file."""
    return safetensors.torch.save({key: group[key].detach().cpu().contiguous() for key in sorted(group)})


def _publish(temporary: Path, target: Path) -> None:
    """Give a complete directory its name. An equal one already there stays; any other is replaced."""
    old = target.with_name(f"{REPLACED}{target.name}")
    if not (os.path.lexists(target) and _is_equal(temporary, target)):
        try:
            if os.path.lexists(target):
                remove(old)
                os.rename(target, old)
            os.rename(temporary, target)
        finally:
            if not os.path.lexists(target):
                put_back(old, target)
    sync(target.parent)  # an equal one may be there because the last attempt failed at just this sync
    remove(old)


def _is_equal(temporary: Path, target: Path) -> bool:
    """Whether `target` is verified and holds the same; a damaged one is moved out of the way."""
    try:
        load_checkpoint(target)
    except CheckpointError as error:
        log.warning("%s; moved out of the way", error)
        _set_aside(target)
        return False
    return (temporary / MANIFEST).read_bytes() == (target / MANIFEST).read_bytes()


def rotate(run_dir: Path, keep: Collection[int]) -> None:
    """Remove the checkpoints whose step is not in `keep`, never the newest. What fails is logged, never fatal."""
    run = RunDir(run_dir)
    try:
        old = [run.checkpoint(step) for step in list_steps(run_dir)[:-1] if step not in keep]
        doomed = {path: temporary_name(path, DOOMED) for path in old}
        for path, doomed_path in doomed.items():
            os.rename(path, doomed_path)
        if doomed:  # or a power cut could give a half-removed one its name back
            sync(run.checkpoints)
        for doomed_path in doomed.values():
            remove(doomed_path)
    except (OSError, StorageError) as error:
        log.warning("%s: old checkpoints cannot be removed: %s", run_dir, error)


def _set_aside(path: Path) -> None:
    """Keep a damaged checkpoint under a name that nothing reads."""
    bad = path.with_name(f"{DAMAGED}{path.name}")
    try:
        os.rename(path, temporary_name(path, DAMAGED) if os.path.lexists(bad) else bad)
    except OSError as error:
        log.warning("%s: cannot be renamed: %s", path, error.strerror)


# ---- finding --------------------------------------------------------------------------------------------------------


def is_checkpoint(path: Path) -> bool:
    """Whether a directory looks like a checkpoint; nothing is verified."""
    return os.path.exists(path / MANIFEST)  # unlike Path's, never fails on a long name


def newest(run_dir: Path, load: Callable[[Path], Checkpoint] | None = None) -> Checkpoint | None:
    """The newest checkpoint that loads, by default with all of its files verified; None if there is none at all.

    Damaged ones that are newer are reported, and moved to `.bad-step-N` if this process holds the lock. Raises
    CheckpointError, with nothing touched, if there are some and none verifies.
    """
    run = RunDir(run_dir)
    damaged: dict[Path, CheckpointError] = {}
    for step in reversed(list_steps(run_dir)):
        path = run.checkpoint(step)
        try:
            checkpoint = (load or load_checkpoint)(path)
        except CheckpointError as error:
            if os.path.lexists(path):  # else a trainer rotated it away while it was being read
                damaged[path] = error
            continue

        # This one is sound. Only now is it safe to touch those that are not.
        for damaged_path, reason in damaged.items():
            log.warning("%s; falling back to %s", reason, path.name)
            if holds_lock(run):
                _set_aside(damaged_path)
        return checkpoint

    # None is sound. Count those set aside earlier, too: a run that has any must not silently start afresh.
    failures = [str(error) for error in damaged.values()]
    failures = failures or [name for name in list_names(run.checkpoints) if DAMAGED in name]
    if failures:
        remedy = f"restore one, or move {run.checkpoints} away to start afresh"
        raise CheckpointError(f"no checkpoint can be verified: {'; '.join(failures)}; {remedy}")
    return None


def newest_finite(run_dir: Path) -> Checkpoint | None:
    """The newest checkpoint that verifies and in which every number is finite; None if there is none."""
    for step in reversed(list_steps(run_dir)):
        try:
            checkpoint = open_checkpoint(RunDir(run_dir).checkpoint(step))
            tensors = [checkpoint.tensors(name) for name in (MODEL, EMA, OPTIMIZER) if checkpoint.holds(name)]
        except CheckpointError:
            continue
        if all(first_not_finite(group) is None for group in tensors):
            return checkpoint
    return None


def find_checkpoint(run_dir: Path, name: str) -> Checkpoint:
    """The checkpoint called `averaged`, `best`, `last`, `step-N` or `auto`: averaged, or last where that is newer.

    It is to be used for its weights: these are read and verified, and nothing else but its documents.

    Raises InputError where there is none of that name, CheckpointError where it is damaged.
    """
    if not os.path.isdir(run_dir):  # unlike Path's, never fails on a long name
        raise InputError(f"{run_dir}: no such run directory; {_others(run_dir)}")
    if is_checkpoint(run_dir):
        _refuse_checkpoint(run_dir)
    averaged = _find_averaged(run_dir, name)
    if averaged is not None:
        return averaged

    if name in ("last", "auto"):
        last = newest(run_dir, load_weights)
        if last is None:
            raise InputError(f"{run_dir}: no checkpoint yet; {_made_by(run_dir)}")
        return last

    step = _best_step(run_dir) if name == "best" else _step_number(name)
    path = RunDir(run_dir).checkpoint(step)
    if not path.is_dir():
        known = ", ".join(f"{STEP_PREFIX}{step}" for step in list_steps(run_dir)) or "none"
        raise InputError(f"checkpoint={name}: {path} is not there; there are: {known}")
    return load_weights(path)


def _made_by(run_dir: Path) -> str:
    return f"`transformer train {_typed(run_dir)}` makes one"


def _others(run_dir: Path) -> str:
    """For a missing run: the runs beside it, newest first; if there are none, how to make one."""
    beside = [path for path in run_dir.parent.glob("*") if os.path.exists(RunDir(path).record)]
    beside.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    if not beside:
        return _made_by(run_dir)
    more = f" and {len(beside) - SHOWN_RUNS} more" if len(beside) > SHOWN_RUNS else ""
    return f"there are {', '.join(_typed(path) for path in beside[:SHOWN_RUNS])}{more}"


def _refuse_checkpoint(path: Path) -> None:
    """Raise InputError, with what to type, if a checkpoint is named instead of its run."""
    step = step_of(path.name)
    run, name = (path.parent, path.name) if step is None else (path.parent.parent, f"{STEP_PREFIX}{step}")
    if os.path.exists(RunDir(run).record):
        raise InputError(f"{path}: a checkpoint, not a run directory: {_typed(run)} checkpoint={name}")


def _typed(run_dir: Path) -> str:
    """The setting of a run directory as a shell takes it, whatever is in its name."""
    return shlex.quote(f"run_dir={run_dir}")


def _find_averaged(run_dir: Path, name: str) -> Checkpoint | None:
    """The average, if it is asked for; under `auto`, only if no checkpoint is newer."""
    path = RunDir(run_dir).averaged
    if name == "averaged":
        if not path.is_dir():
            raise InputError(f"{path}: not there yet; `transformer average {_typed(run_dir)}` makes it")
        return load_weights(path)

    if name != "auto" or not path.is_dir():
        return None
    try:
        is_current = open_checkpoint(path).step >= max(list_steps(run_dir), default=0)
        return load_weights(path) if is_current else None
    except CheckpointError as error:
        log.warning("%s; using the last checkpoint instead", error)
        return None


def _best_step(run_dir: Path) -> int:
    run = RunDir(run_dir)
    if not run.best.exists():
        raise InputError(f"{run_dir}: no validation has chosen a best checkpoint yet; use checkpoint=last")
    try:
        step = run.read_best().step
    except CheckpointError as error:
        raise CheckpointError(f"{error}; use checkpoint=last") from None
    if step < 0:
        raise CheckpointError(f"{run.best}: {step} is not a step; use checkpoint=last")
    return step


def _step_number(name: str) -> int:
    match = re.fullmatch(rf"{STEP_PREFIX}([0-9]{{1,18}})", name)
    if match is None:
        raise InputError(f"checkpoint={name} is not one of averaged, best, last, {STEP_PREFIX}N, auto")
    return int(match[1])


# ---- verifying ------------------------------------------------------------------------------------------------------


def load_checkpoint(path: Path) -> Checkpoint:
    """Verify the checkpoint at `path`: names, kinds, sizes, digests. Raises CheckpointError naming the bad file."""
    return _load(path, verifies_tensors=True)


def open_checkpoint(path: Path) -> Checkpoint:
    """As `load_checkpoint`, but tensors are verified only when they are read."""
    return _load(path, verifies_tensors=False)


def load_weights(path: Path) -> Checkpoint:
    """As `load_checkpoint`, with the weights read."""
    checkpoint = open_checkpoint(path)
    return replace(checkpoint, read=checkpoint.tensors(checkpoint.weights_name))


def _load(path: Path, *, verifies_tensors: bool) -> Checkpoint:
    documents: dict[str, Any] = {}
    with _opened(path) as folder:
        for name in sorted(folder.names()):
            with folder.file(name, is_verified=verifies_tensors or name in _DOCUMENTS) as file:
                if name in _DOCUMENTS:
                    documents[name] = parse_json(file)
                    if not isinstance(documents[name], dict):
                        raise ValueError("not a JSON object")
    return Checkpoint(path, folder.manifest, config=documents[CONFIG], state=documents[STATE])


def _opened(path: Path, known: Manifest | None = None) -> AbstractContextManager[SealedFolder[Manifest]]:
    """The directory of a checkpoint. Raises CheckpointError."""

    def parse(data: Any) -> Manifest:
        match data:
            case {"format": int(number)} if number < CHECKPOINT_FORMAT:
                raise ValueError(f"format {number} is of an unreleased version of this package: start a new run")
            case {"format": int(number)} if number > CHECKPOINT_FORMAT:
                raise ValueError(f"format {number} is of a later version of this package: update it")

        manifest = from_json(Manifest, data, complete=True)
        _check_names(manifest.files.keys())
        if step_of(path.name) is not None and path.name != step_name(manifest.step):
            raise ValueError(f"belongs to step {manifest.step}")
        return manifest

    return open_sealed(path, parse, CheckpointError, known=known)


def _check_names(names: Set[str]) -> None:
    """Raise ValueError for a file that no checkpoint has, or without one that every checkpoint has."""
    unknown = names - _ALLOWED
    if unknown:
        raise ValueError(f"{min(unknown)!a:.80} is not one of the files of a checkpoint: {sorted(_ALLOWED)}")
    missing = _REQUIRED - names
    if missing:
        raise ValueError(f"{min(missing)!a:.80} is missing from the files of a checkpoint: {sorted(names)!a:.200}")
