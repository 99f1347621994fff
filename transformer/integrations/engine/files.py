"""The files of an engine: a folder with a manifest of their sizes and digests, verified whenever it is read.

The content goes to CTranslate2 from memory, so it computes with the very bytes that were verified.
"""

from pathlib import Path

from transformer.config.primitives import from_json, to_json
from transformer.errors import CheckpointError
from transformer.files import (
    MANIFEST,
    Sealed,
    digest_file,
    encode_json,
    open_regular,
    parse_json,
    read_verified,
    sync,
    write_new,
)

# As CTranslate2 names them: with one vocabulary for both languages, or one for each.
_ALWAYS = frozenset({"config.json", "model.bin"})
FILES = (
    _ALWAYS | {"shared_vocabulary.json"},
    _ALWAYS | {"source_vocabulary.json", "target_vocabulary.json"},
)
MARKS = (MANIFEST, *_ALWAYS)  # files that tell an engine from other directories


def seal(folder: Path) -> None:
    """Bring the files in a folder to the disk, with their manifest. Raises OSError."""
    digests = {}
    for name in sorted(path.name for path in folder.iterdir()):
        sync(folder / name)
        digests[name] = digest_file(folder / name)
    write_new(folder / MANIFEST, encode_json(to_json(Sealed(digests))))
    sync(folder)


def read_engine(folder: Path) -> dict[str, bytes]:
    """The content of the files, by name. Raises CheckpointError where one is missing, or not what the manifest says."""
    path = folder / MANIFEST
    try:
        with open_regular(path) as file:
            digests = from_json(Sealed, parse_json(file)).files
        if digests.keys() not in FILES:
            raise ValueError("it names other files than an engine has")
        contents = {}
        for name in digests:
            path = folder / name
            with open_regular(path) as file:
                contents[name] = read_verified(file, digests[name])
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return contents


def is_usable(folder: Path) -> bool:
    """Whether `read_engine` would read it."""
    try:
        read_engine(folder)
    except CheckpointError:
        return False
    return True
