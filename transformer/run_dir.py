"""The run directory: the name of every file in it, its small documents as typed data, and its lock.

Copy the directory and it translates, resumes and scores. Nothing else in the package spells one of these names.
"""

import fcntl
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

from transformer import __version__
from transformer.config.keys import PACKAGE
from transformer.config.primitives import from_json, to_json
from transformer.errors import CheckpointError, InputError, LockedError, StorageError
from transformer.files import clear_leftovers, list_names, make_directories, open_regular, read_json, write_json
from transformer.machine import source_commit
from transformer.records import RUN_FORMAT, Best, History, Judgement, Results, RunRecord

T = TypeVar("T")

# Inside a checkpoint, and inside `averaged`, which is one: two documents, and three names of tensors.
CONFIG = "config.json"
STATE = "state.json"
MODEL = "model"
OPTIMIZER = "optimizer"
EMA = "ema"

TOKENIZER = "tokenizer.model"  # of both languages, or of the source
TARGET_TOKENIZER = "tokenizer.target.model"  # where the target has its own
STEP_PREFIX = "step-"

# The three files of a test set. A development set is kept beside them under its key below `data`: see `is_dev`.
SOURCE = "src"
REFERENCE = "ref"
HYPOTHESIS = "hyp"
DEV = "dev"
DEVS = "devs"

_STEP = re.compile(rf"{STEP_PREFIX}([0-9]{{8,}})")


def is_dev(name: str) -> bool:
    """Whether the name of a set that a run keeps is that of a development set: `dev`, or one of `devs`."""
    return name == DEV or name.startswith(f"{DEVS}.")


def tensor_file(name: str) -> str:
    """The file of a checkpoint that holds the tensors called MODEL, OPTIMIZER or EMA."""
    return f"{name}.safetensors"


def step_name(step: int) -> str:
    """The name of the checkpoint of a step."""
    return f"{STEP_PREFIX}{step:08d}"


def list_steps(run_dir: Path) -> list[int]:
    """The steps that have a checkpoint, ascending, not verified. Raises StorageError if they cannot be listed."""
    steps = []
    for name in list_names(RunDir(run_dir).checkpoints):
        step = step_of(name)
        if step is not None and name == step_name(step):
            steps.append(step)
    return sorted(steps)


def step_of(name: str) -> int | None:
    """The step that a checkpoint's name says; None for another name."""
    match = _STEP.fullmatch(name)
    return None if match is None else int(match[1])


@dataclass(frozen=True)
class RunDir:
    """A run directory, by its path; nothing needs to be there yet."""

    path: Path

    # ---- names

    @property
    def lock(self) -> Path:
        """Held by the process that writes."""
        return self.path / ".lock"

    @property
    def record(self) -> Path:
        """What the run was started with: a RunRecord."""
        return self.path / "run.json"

    @property
    def history(self) -> Path:
        """What it was trained on, and what its numbers came to: a History."""
        return self.path / "history.json"

    @property
    def config(self) -> Path:
        """The configuration, for people; it is never read back."""
        return self.path / "config.yaml"

    @property
    def data(self) -> Path:
        """The report on the training data, for people and programs."""
        return self.path / "data.json"

    def trace(self, step: int) -> Path:
        """What a step computed: see `training.profile`."""
        return self.path / f"trace-{step:08d}.json.gz"

    def memory_snapshot(self, step: int) -> Path:
        """What memory of a GPU it took."""
        return self.path / f"memory-{step:08d}.pickle"

    @property
    def tokenizer(self) -> Path:
        """The SentencePiece model of both languages, or of the source."""
        return self.path / TOKENIZER

    @property
    def target_tokenizer(self) -> Path:
        """The SentencePiece model of the target, where it has its own."""
        return self.path / TARGET_TOKENIZER

    @property
    def checkpoints(self) -> Path:
        """The directory of checkpoints."""
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """The checkpoint of a step."""
        return self.checkpoints / step_name(step)

    @property
    def averaged(self) -> Path:
        """The mean of the last checkpoints, or of the best: itself a checkpoint."""
        return self.path / "averaged"

    @property
    def best(self) -> Path:
        """Which checkpoint validated best."""
        return self.path / "best.json"

    @property
    def engines(self) -> Path:
        """The directory of copies of weights that CTranslate2 searches with: see `integrations.engine`."""
        return self.path / "engines"

    @property
    def results(self) -> Path:
        """The scores of a finished run."""
        return self.path / "results.json"

    @property
    def log(self) -> Path:
        """The log lines of every command that trained here."""
        return self.path / "train.log"

    @property
    def metrics(self) -> Path:
        """One JSON line for each log line and validation."""
        return self.path / "metrics.jsonl"

    @property
    def hypotheses(self) -> Path:
        """The directory of the test sets' texts and translations."""
        return self.path / "hypotheses"

    def text(self, name: str, kind: str) -> Path:
        """The SOURCE, REFERENCE or HYPOTHESIS of a test set."""
        return self.hypotheses / f"{name}.{kind}"

    def set_names(self) -> list[str]:
        """The names of the sets whose text is kept here, those of the development sets among them."""
        suffix = f".{SOURCE}"
        return [name.removesuffix(suffix) for name in list_names(self.hypotheses) if name.endswith(suffix)]

    def dev_names(self) -> list[str]:
        """The names of the development sets that are kept here; where none is, that of the one that is missed."""
        return [name for name in self.set_names() if is_dev(name)] or [DEV]

    @property
    def judges(self) -> Path:
        """The directory of what external judges said of the translations."""
        return self.path / "judges"

    def judgement(self, test_set: str, judge: str) -> Path:
        """What a judge said of the translations of a test set."""
        return self.judges / f"{test_set}.{judge}.json"

    def judge_names(self, test_set: str) -> list[str]:
        """The judges that have said something of a test set."""
        names = [
            re.fullmatch(rf"{re.escape(test_set)}\.([A-Za-z0-9_-]+)\.json", name) for name in list_names(self.judges)
        ]
        return [name[1] for name in names if name is not None]

    def check_folders(self) -> None:
        """Raise StorageError where a folder that is written to is a link: nothing outside the run may be changed."""
        for folder in (self.checkpoints, self.averaged, self.hypotheses, self.engines, self.judges):
            if folder.is_symlink():
                raise StorageError(f"{folder}: a link, which is not followed; link the whole run directory instead")

    # ---- documents

    def write_record(self, record: RunRecord) -> None:
        """Write run.json. Raises StorageError."""
        write_json(self.record, to_json(record))

    def read_record(self) -> RunRecord:
        """run.json. Raises CheckpointError where it is missing, damaged, or of another version of the format.

        A setting that is newer than the record takes its default; everything else must be there.
        """
        return _read(self.record, RunRecord, version=RUN_FORMAT, complete=False)

    def write_history(self, history: History) -> None:
        """Write history.json. Raises StorageError."""
        write_json(self.history, to_json(history))

    def read_history(self) -> History:
        """history.json; nothing where it is missing, as in a run of an earlier version.

        Raises CheckpointError where it is damaged. What is newer than the file takes its default, as in a record.
        """
        return _read(self.history, History, complete=False) if os.path.lexists(self.history) else History()

    def write_best(self, best: Best) -> None:
        """Write best.json. Raises StorageError."""
        write_json(self.best, to_json(best))

    def read_best(self) -> Best:
        """best.json. Raises CheckpointError where it is missing or damaged."""
        return _read(self.best, Best)

    def write_results(self, results: Results) -> None:
        """Write results.json. Raises StorageError."""
        write_json(self.results, to_json(results))

    def read_results(self) -> Results:
        """results.json. Raises CheckpointError where it is missing or damaged.

        What is newer than the file takes its default, as in a record.
        """
        return _read(self.results, Results, complete=False)

    def write_judgement(self, test_set: str, judge: str, judgement: Judgement) -> None:
        """Write what a judge said. Raises StorageError."""
        path = self.judgement(test_set, judge)
        try:
            make_directories(path.parent)
        except OSError as error:
            raise StorageError(f"{path}: cannot be written: {error.strerror or error}") from error
        write_json(path, to_json(judgement))

    def read_judgement(self, test_set: str, judge: str) -> Judgement:
        """What a judge said. Raises CheckpointError where it is missing or damaged."""
        return _read(self.judgement(test_set, judge), Judgement)

    def check_tokenizers(self, models: Mapping[str, bytes]) -> None:
        """Raise CheckpointError if these files are not the ones that the run was started with, where run.json tells.

        `models` has the content of TOKENIZER and, where there is one, of TARGET_TOKENIZER.
        """
        if not self.record.exists():
            return
        record = self.read_record()
        found = tokenizer_digests(models)
        expected = (record.tokenizer_sha256, record.target_tokenizer_sha256)
        for path, here, there in zip((self.tokenizer, self.target_tokenizer), found, expected, strict=True):
            if here != there:
                raise CheckpointError(
                    f"{path}: not the tokenizer of this run (its sha256 is not the one in {self.record.name}): "
                    "copy it again from where the run came from"
                )


def tokenizer_digests(models: Mapping[str, bytes]) -> tuple[str, str | None]:
    """The SHA-256 of TOKENIZER, and of TARGET_TOKENIZER where there is one."""
    target = models.get(TARGET_TOKENIZER)
    return sha256(models[TOKENIZER]).hexdigest(), None if target is None else sha256(target).hexdigest()


def check_no_run(path: Path, *, key: str) -> None:
    """Raise InputError for a file in a run directory: what came with a run is never run as a command."""
    for folder in path.resolve().parents:
        if RunDir(folder).record.exists():
            raise InputError(
                f"{key}={path}: this file came with the run directory {folder}: read it, then copy it elsewhere"
            )


def _read(path: Path, kind: type[T], *, version: int | None = None, complete: bool = True) -> T:
    """A JSON document as typed data. Raises CheckpointError, naming the file and what is wrong with it."""
    try:
        data = read_json(path)
        if version is not None and isinstance(data, dict) and data.get("format") != version:
            written_by = "an unreleased version of this package"
            if "format" in data:
                written_by = f"another version of this package (format {data['format']!r}, not {version})"
            raise ValueError(f"written by {written_by}: start a new run in another run_dir")
        try:
            return from_json(kind, data, complete=complete)
        except ValueError as error:
            raise ValueError(f"{error}{other_writer(path)}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None


def other_writer(path: Path) -> str:
    """For an error about a file of a run: the version, and commit, of this package that began it, if it was another."""
    for folder in path.parents[:2]:
        with suppress(OSError, ValueError, TypeError, KeyError):  # it may be damaged, too
            record = read_json(RunDir(folder).record)
            theirs = _version(record["versions"]["transformer-mt"], record.get("commit"))
            ours = _version(__version__, source_commit(PACKAGE.parent))
            return "" if theirs == ours else f" (the run was begun by {theirs}; this is {ours})"
    return ""


def _version(version: object, commit: object) -> str:
    return f"version {version!s:.80}" + ("" if commit is None else f", commit {commit!s:.80}")


# ---- the lock -------------------------------------------------------------------------------------------------------


@contextmanager
def lock_run(run_dir: Path) -> Iterator[None]:
    """Hold `run_dir` (made if missing) against other writers, and clear what a killed one left in it.

    Raises what `lock_folder` does, and StorageError where it cannot be cleared.
    """
    run = RunDir(run_dir)
    run.check_folders()
    with lock_folder(run_dir, key="run_dir"):
        try:
            for folder in (run.path, run.checkpoints, run.hypotheses, run.judges):
                clear_leftovers(folder)
        except OSError as error:
            raise StorageError(f"{run_dir}: cannot be cleared: {error.strerror}") from error
        yield


@contextmanager
def lock_folder(folder: Path, *, key: str) -> Iterator[None]:
    """Hold the folder (made if missing) that the setting `key` names against other processes.

    The kernel frees the lock when the process dies, however it dies. Raises LockedError at once, naming the holder, if
    another process has it; StorageError if the folder cannot be made or written.
    """
    # Open the lock file.
    try:
        make_directories(folder)
        file = os.open(RunDir(folder).lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        place = error.filename or folder
        raise StorageError(f"{place}: cannot be written: {error.strerror}: choose another {key}") from error

    # Lock it. The lock ends when the file is closed. It is never unlocked: a forked child would free its parent's lock.
    with os.fdopen(file, "r+b", buffering=0) as lock:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.truncate(0)
            lock.write(f"{_this_process()}, since {time.strftime('%Y-%m-%d %H:%M:%S %z')}\n".encode())
        except BlockingIOError:
            holder = lock.read(1000).decode(errors="replace").strip()
            raise LockedError(f"{folder}: in use by {holder}; stop it, or choose another {key}") from None
        except OSError as error:
            raise StorageError(f"{folder}: cannot be locked: {error.strerror}") from error

        try:
            yield
        finally:  # after an error, too: this process may live on, and must not be taken for the holder
            with suppress(OSError):  # of a disk that fails: it would hide the error that says so
                lock.truncate(0)


def holds_lock(run: RunDir) -> bool:
    """Whether this process holds the lock: a mere reader must not move what a trainer may be replacing."""
    try:
        with open_regular(run.lock) as lock:
            return lock.read(1000).startswith(f"{_this_process()},".encode())
    except OSError:
        return False


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
