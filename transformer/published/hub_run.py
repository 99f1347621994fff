"""A run on the hub: which of its files are there, and the copy of them on this machine.

    run_path    hf:OWNER/NAME[@REVISION] -> CACHE/OWNER--NAME/COMMIT, fetched once, verified whenever it is named
    seal        writes MANIFEST.json, the sizes and digests of the files, before they are sent

A copy is a run directory like any other, without what training needs to go on: each checkpoint but one, the moments,
the log. What a hub sends is not trusted: names come from a fixed list, and everything is compared with its manifest.
"""

import logging
import re
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import quote

from transformer.checkpoint import find_checkpoint
from transformer.config.jobs import ON_HUB
from transformer.config.primitives import from_json, to_json
from transformer.data.hub import HubModel, Unreachable, copies_of, fetch, find_model, is_on_hub, name_on_hub
from transformer.data.tokenizer import read_models
from transformer.errors import CheckpointError, InputError
from transformer.files import (
    MANIFEST,
    Sealed,
    build_once,
    check_digest,
    digest_file,
    open_regular,
    read_json,
    remove,
    storage_error,
    write_file,
    write_json,
)
from transformer.run_dir import RunDir

CARD = "README.md"

# What a run on the hub has: what it translates with, is scored on and is described by. Its card may be edited there.
RUN_FILE = re.compile(
    r"(run|data|results|MANIFEST)\.json|config\.yaml|metrics\.jsonl|README\.md|tokenizer(\.target)?\.model|"
    r"hypotheses/[\w-]+\.(src|ref|hyp)|averaged/(model\.safetensors|(config|state|MANIFEST)\.json)"
)
_NOT_SEALED = (MANIFEST, CARD)
_COMMIT = re.compile(r"[0-9a-f]{40}")

log = logging.getLogger(__name__)


def is_run(model: HubModel) -> bool:
    """Whether a repository holds a run of this package."""
    return RunDir(Path()).record.name in model.files


def run_path(source: str, key: str) -> Path:
    """The run directory that a setting names: a path as it is; of one on the hub, the copy on this machine.

    It is fetched where it is not here yet, and where it is damaged. Where the hub does not answer, the copy of the
    revision that it had the last time serves. Raises InputError, with the setting `key`, where there is no such run,
    CheckpointError where it is damaged on the hub, and StorageError where there is no room for it.
    """
    if not is_on_hub(source):
        return Path(source)
    name, revision = name_on_hub(source, key)
    copies = copies_of(name)
    is_commit = revision is not None and _COMMIT.fullmatch(revision)
    if is_commit and _is_intact(copies / str(revision)):
        return copies / str(revision)

    last_time = copies / f"{quote(revision or 'main', safe='')}.commit"
    try:
        model = find_model(source, key)
    except Unreachable as error:
        with suppress(OSError, UnicodeDecodeError):
            commit = last_time.read_text(encoding="utf-8")
            if _COMMIT.fullmatch(commit) and _is_intact(copies / commit):
                log.warning("%s; what it had the last time is used, revision %s", error, commit)
                return copies / commit
        raise
    path = copy_run(model, f"{key}={source}")
    if not is_commit:
        write_file(last_time, model.revision.encode())
    return path


def pinned(source: str, key: str) -> str:
    """The same name; of a run on the hub with its commit, so that it stays that run. Raises what `run_path` does."""
    if not is_on_hub(source):
        return source
    return f"{ON_HUB}{name_on_hub(source, key)[0]}@{run_path(source, key).name}"


def copy_run(model: HubModel, what: str) -> Path:
    """The copy of a run on the hub, fetched where it is not here yet. Raises what `run_path` does, about `what`."""
    if not is_run(model):
        raise InputError(
            f"{what}: no run of this package: it has no {RunDir(Path()).record.name}; a model of Marian's becomes one "
            f"by `transformer import from={ON_HUB}{model.name}`"
        )
    if f"{RunDir(Path()).averaged.name}/{MANIFEST}" not in model.files:
        raise InputError(f"{what}: a run without its average: `transformer push` sends a run with what commands need")

    path = copies_of(model.name) / model.revision
    if not _is_intact(path):
        log.info("fetching %s%s at revision %s, once", ON_HUB, model.name, model.revision)
        try:
            build_once(path, partial(_fetch, model), is_usable=_is_intact)
        except OSError as error:
            raise storage_error(path, error=error) from error
    return path


def _fetch(model: HubModel, folder: Path) -> None:
    """Fetch a run into a folder, and verify it. Raises InputError and CheckpointError."""
    fetch(model, [name for name in model.files if RUN_FILE.fullmatch(name)], folder)
    remove(folder / ".cache")  # notes of the hub's client
    try:
        if (folder / MANIFEST).exists():
            check_sealed(folder)
        run = RunDir(folder)
        run.read_record()
        run.check_tokenizers(read_models(folder))
        find_checkpoint(folder, "averaged")
    except (CheckpointError, InputError) as error:
        reason = str(error).replace(f"{folder}/", "")
        raise CheckpointError(f"{ON_HUB}{model.name} at revision {model.revision}: {reason}: push it again") from error
    seal(folder)


# ---- the manifest ---------------------------------------------------------------------------------------------------


def seal(folder: Path) -> None:
    """Write the manifest of a run that is complete. Raises OSError, and StorageError."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    sealed = Sealed({name: digest_file(folder / name) for name in names if name not in _NOT_SEALED})
    write_json(folder / MANIFEST, to_json(sealed))


def check_sealed(folder: Path) -> None:
    """Raise CheckpointError, which names the file, unless each file of the manifest is there as that says."""
    path = folder / MANIFEST
    try:
        sealed = from_json(Sealed, read_json(path)).files
        for name in sealed:
            path = folder / ascii(name)[1:-1]
            if not RUN_FILE.fullmatch(name):
                raise ValueError("not one of the files of a run on the hub")
            with open_regular(path) as file:
                check_digest(file, sealed[name])
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _is_intact(folder: Path) -> bool:
    try:
        check_sealed(folder)
    except CheckpointError:
        return False
    return True
