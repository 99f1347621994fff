"""Models on the Hugging Face hub: found, fetched at one commit, and sent.

`hf:OWNER/NAME`, or `hf:OWNER/NAME@REVISION`, names a model repository there. Its files are data: none is executed, and
only those that were asked for are fetched. `data.hub` words the hub's errors.
"""

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformer.config.jobs import ON_HUB
from transformer.data.hub import TRY_ELSEWHERE, commit_of, errors_named, first_cause
from transformer.errors import InputError
from transformer.files import storage_error

LIBRARY = "transformer-mt"  # by which the hub knows this package

_NAME = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HubModel:
    """A repository of the hub, at a commit, and the names of its files."""

    name: str
    revision: str
    files: list[str]


def is_on_hub(source: str) -> bool:
    """Whether a source names a repository of the hub."""
    return source.startswith(ON_HUB)


def name_on_hub(source: str, key: str) -> tuple[str, str | None]:
    """The repository that a source names, and its revision. Raises InputError, with `key`, for what is no name."""
    match = _NAME.fullmatch(source.removeprefix(ON_HUB))
    if match is None:
        raise InputError(f"{key}={source}: name a model of the hub as {ON_HUB}OWNER/NAME[@REVISION]")
    return match["name"], match["revision"]


def find_model(source: str, key: str) -> HubModel:
    """The repository that `source` names.

    Raises InputError, with `key`, where there is none; Unreachable, which is one, where the hub does not answer.
    """
    from huggingface_hub import HfApi

    name, revision = name_on_hub(source, key)
    with errors_named(f"{key}={source}", remedy=TRY_ELSEWHERE):
        found = HfApi().model_info(name, revision=revision, timeout=10)
        return HubModel(name, commit_of(found.sha), [_text(sibling.rfilename) for sibling in found.siblings or []])


def fetch(model: HubModel, names: Sequence[str], folder: Path) -> None:
    """Fetch files of a repository into a folder. Raises InputError where that fails."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    for name in names:
        try:
            hf_hub_download(model.name, name, revision=model.revision, local_dir=folder)
        except Exception as error:  # of whichever HTTP library the hub's client uses
            raise InputError(f"{ON_HUB}{model.name}: {name} cannot be fetched ({first_cause(error)})") from error


def copies_of(name: str) -> Path:
    """The folder for copies of a repository, in the cache of the hub's client, where it moves with HF_HOME."""
    from huggingface_hub import cached_assets_path
    from huggingface_hub.constants import HF_ASSETS_CACHE

    try:
        return cached_assets_path(LIBRARY, namespace="runs", subfolder=name)
    except OSError as error:
        raise storage_error(Path(HF_ASSETS_CACHE), error=error) from error


def _text(answer: object) -> str:
    """The name that the hub gives a file, which is compared with those that are asked for. Raises ValueError."""
    if not isinstance(answer, str):
        raise ValueError(f"as a file it names {answer!r:.80}")
    return answer


# ---- sending --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CardScore:
    """A score on a test set, for the head of a model card."""

    kind: str  # as the hub calls the metric: bleu, chrf
    title: str
    value: float  # rounded as it is shown
    signature: str | None


@dataclass(frozen=True)
class CardSet:
    """A test set, for the head of a model card; of a data set of the hub, with its place there."""

    name: str
    dataset: str
    subset: str | None
    split: str | None
    revision: str | None
    scores: list[CardScore]


def card_head(
    repo: str,
    *,
    languages: Sequence[str],
    licence: str,
    base_model: str | None,
    datasets: Sequence[str],
    test_sets: Sequence[CardSet],
) -> str:
    """The head of a model card, in YAML: what the hub finds a model by, and the scores that it shows beside it.

    The first of the languages, which are codes of ISO 639, is that of the source.
    """
    from huggingface_hub import EvalResult, ModelCardData

    results = [
        EvalResult(
            task_type="translation",
            task_name=f"Translation {languages[0]}-{', '.join(languages[1:])}",
            dataset_type=test_set.dataset,
            dataset_name=test_set.name,
            dataset_config=test_set.subset,
            dataset_split=test_set.split,
            dataset_revision=test_set.revision,
            metric_type=score.kind,
            metric_name=score.title,
            metric_value=score.value,
            metric_args=None if score.signature is None else {"signature": score.signature},
        )
        for test_set in test_sets
        for score in test_set.scores
    ]
    head = ModelCardData(
        language=list(dict.fromkeys(languages)),
        license=licence,
        library_name=LIBRARY,
        pipeline_tag="translation",
        base_model=base_model,
        datasets=list(datasets) or None,
        model_name=repo.rpartition("/")[2],
        eval_results=results or None,
    )
    return f"---\n{head.to_yaml()}\n---\n"


def push_folder(
    folder: Path, repo: str, *, private: bool, message: str, is_ours: Callable[[str], bool]
) -> tuple[str, str]:
    """Send the files of a folder to a repository of models, made where there is none, in one commit.

    Files there that `is_ours` knows and the folder has not are deleted. Returns the address of the repository, and the
    commit. Raises InputError where there is no token, where the hub refuses, and where the repository is public and
    `private` is asked for; Unreachable where the hub does not answer.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
    from huggingface_hub.utils.tqdm import disable_progress_bars

    what = f"repo={repo}"
    if get_token() is None:
        raise InputError(f"{what}: no hub token found: `hf auth login`, or set HF_TOKEN, with a token that can write")

    disable_progress_bars()
    with errors_named(what, remedy="run this where it can be, or look at the files with dry_run=true"):
        api = HfApi(library_name=LIBRARY)
        address = api.create_repo(repo, private=private, exist_ok=True)
        there = api.model_info(repo)
        if private and not there.private:
            raise InputError(f"{what}: already exists and is public: set private=false to push to it, or name another")

        names = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
        gone = [file.rfilename for file in there.siblings or [] if is_ours(file.rfilename)]
        commit = api.create_commit(
            repo,
            [
                *(CommitOperationAdd(name, path) for name, path in names.items()),
                *(CommitOperationDelete(name) for name in gone if name not in names),
            ],
            commit_message=message,
            parent_commit=there.sha,
        )
    return str(address), commit.oid
