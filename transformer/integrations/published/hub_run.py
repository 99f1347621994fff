"""A run on the hub: which of its files are there, and the copy of them on this machine.

    copy_run    a run at a commit -> CACHE/OWNER--NAME/COMMIT, fetched once, verified whenever it is named
    seal_run    writes MANIFEST.json, the sizes and digests of the files, before they are sent

A copy is a run directory like any other, without what only training needs: all checkpoints but one, the moments, the
log. What a hub sends is not trusted: names come from a fixed list, and everything is compared with its manifest.
"""

import logging
import re
from functools import partial
from pathlib import Path
from typing import Any

from transformer.checkpoint import find_checkpoint
from transformer.config.jobs import ON_HUB
from transformer.config.primitives import from_json
from transformer.data.tokenizer import read_models
from transformer.errors import CheckpointError, InputError
from transformer.files import MANIFEST, build_once, is_sound, remove, storage_error
from transformer.integrations.hub import HubModel, copies_of, fetch
from transformer.run_dir import RunDir
from transformer.sealed_folder import Sealed, open_sealed, seal, sync_files

CARD = "README.md"

# What a run on the hub has: what it translates with, is scored on and is described by. Its card may be edited there.
RUN_FILE = re.compile(
    r"(run|data|results|MANIFEST)\.json|config\.yaml|metrics\.jsonl|README\.md|tokenizer(\.target)?\.model|"
    r"hypotheses/(devs\.)?[\w-]+\.(src|ref|hyp)|averaged/(model\.safetensors|(config|state|MANIFEST)\.json)"
)

log = logging.getLogger(__name__)


def is_run(model: HubModel) -> bool:
    """Whether a repository holds a run of this package."""
    return RunDir(Path()).record.name in model.files


def copy_run(model: HubModel, what: str) -> Path:
    """The copy of a run on the hub, fetched where it is not here yet, and where it is damaged.

    Raises InputError, about `what`, where it cannot be fetched, CheckpointError where it is damaged on the hub, and
    StorageError where there is no room for it.
    """
    if f"{RunDir(Path()).averaged.name}/{MANIFEST}" not in model.files:
        raise InputError(
            f"{what}: the run has no averaged model: `transformer push` sends one with all that commands need"
        )

    path = copies_of(model.name) / model.revision
    if not is_intact(path):
        log.info("fetching %s%s at revision %s, once", ON_HUB, model.name, model.revision)
        try:
            build_once(path, partial(_fetch, model), is_usable=is_intact, marks=[RunDir(path).record.name])
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
    seal_run(folder)


# ---- the manifest ---------------------------------------------------------------------------------------------------


def seal_run(folder: Path) -> None:
    """Write the manifest of a run that is complete. Raises OSError."""
    remove(folder / MANIFEST)  # what was fetched is verified
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    seal(folder, sync_files(folder, (name for name in names if name != CARD)), Sealed)


def check_sealed(folder: Path) -> None:
    """Raise CheckpointError, which names the file, unless each file of the manifest is there as that says."""
    with open_sealed(folder, _parse, CheckpointError) as sealed:
        sealed.verify()


def _parse(data: Any) -> Sealed:
    sealed = from_json(Sealed, data)
    for name in sealed.files:
        if not RUN_FILE.fullmatch(name):
            raise ValueError(f"{name!a:.80} is not one of the files of a run on the hub")
    return sealed


def is_intact(folder: Path) -> bool:
    """Whether `check_sealed` finds nothing."""
    return is_sound(check_sealed, folder)
