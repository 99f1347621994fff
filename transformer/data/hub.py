"""The Hugging Face hub: what is fetched from it, at one revision, and how its errors read.

What is called `hf:OWNER/NAME`, or `hf:OWNER/NAME@REVISION`, is a repository of models there. Its files are data: none
is executed, and only those that were asked for are fetched.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformer.errors import InputError

PREFIX = "hf:"

_NAME = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class HubModel:
    """A repository of the hub, at a commit, and the names of its files."""

    name: str
    revision: str
    files: list[str]


def is_on_hub(source: str) -> bool:
    """Whether a source names a repository of the hub."""
    return source.startswith(PREFIX)


def find_model(source: str, key: str) -> HubModel:
    """The repository that `source` names. Raises InputError, with `key`, where there is none or no network."""
    match = _NAME.fullmatch(source.removeprefix(PREFIX))
    if match is None:
        raise InputError(f"{key}={source}: name a model of the hub as {PREFIX}OWNER/NAME[@REVISION]")

    from huggingface_hub import HfApi

    name = match["name"]
    with _errors_named(f"{key}={source}", remedy="run this where it can, or name a folder with the model's files"):
        found = HfApi().model_info(name, revision=match["revision"], timeout=10)
    return HubModel(name, str(found.sha), [sibling.rfilename for sibling in found.siblings or []])


def fetch(model: HubModel, names: Sequence[str], folder: Path) -> None:
    """Fetch files of a repository into a folder. Raises InputError where that fails."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    for name in names:
        try:
            hf_hub_download(model.name, name, revision=model.revision, local_dir=folder)
        except Exception as error:  # of whichever HTTP library the hub's client uses
            raise InputError(f"{PREFIX}{model.name}: {name} cannot be fetched ({first_cause(error)})") from error


def dataset_revision(name: str) -> str:
    """The commit of a data set that the hub has now; without a network, the answer comes at once."""
    from huggingface_hub import HfApi

    remedy = (
        "run `transformer prepare` where it can, or name text files, tables, or a directory with the data set's files"
    )
    with _errors_named(name, remedy=remedy):
        return str(HfApi().dataset_info(name, timeout=10).sha)


@contextmanager
def _errors_named(what: str, *, remedy: str) -> Iterator[None]:
    """Raise an InputError about `what` for the hub's answer that there is no such thing, and for none."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except HfHubHTTPError as error:
        raise InputError(f"{what}: not found on the hub ({first_cause(error)}): check the name, or log in") from error
    except Exception as error:  # of whichever HTTP library the hub's client uses
        raise InputError(f"{what}: the hub cannot be reached ({first_cause(error)}): {remedy}") from error


def first_cause(error: BaseException) -> str:
    """The message of the error that caused all the others, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{' '.join(str(error).split()) or type(error).__name__:.200}"
