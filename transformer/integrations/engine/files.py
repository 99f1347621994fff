"""The files of an engine: a folder with a manifest of their sizes and digests, verified whenever it is read.

The content goes to CTranslate2 from memory, so it computes with the very bytes that were verified.
"""

from pathlib import Path
from typing import Any

from transformer.config.primitives import from_json
from transformer.errors import CheckpointError
from transformer.files import MANIFEST, list_names
from transformer.sealed_folder import Sealed, open_sealed, seal, sync_files

# As CTranslate2 names them: with one vocabulary for both languages, or one for each.
_ALWAYS = frozenset({"config.json", "model.bin"})
FILES = (
    _ALWAYS | {"shared_vocabulary.json"},
    _ALWAYS | {"source_vocabulary.json", "target_vocabulary.json"},
)
MARKS = (MANIFEST, *_ALWAYS)  # files that tell an engine from other directories


def seal_engine(folder: Path) -> None:
    """Bring the files in a folder to the disk, with their manifest. Raises OSError, and StorageError."""
    seal(folder, sync_files(folder, list_names(folder)), Sealed)


def read_engine(folder: Path) -> dict[str, bytes]:
    """The content of the files, by name. Raises CheckpointError where one is missing, or not what the manifest says."""
    with open_sealed(folder, _parse, CheckpointError) as sealed:
        return {name: sealed.read(name) for name in sealed.manifest.files}


def _parse(data: Any) -> Sealed:
    sealed = from_json(Sealed, data)
    if sealed.files.keys() not in FILES:
        raise ValueError("it names other files than an engine has")
    return sealed
