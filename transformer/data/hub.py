"""The Hugging Face hub: what is fetched from it, at one revision, what is sent to it, and how its errors read.

What is called `hf:OWNER/NAME`, or `hf:OWNER/NAME@REVISION`, is a repository of models there. Its files are data: none
is executed, and only those that were asked for are fetched. The token is the one of the hub's client (`hf auth login`,
or HF_TOKEN): nothing here reads it but to keep it out of messages.
"""

import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformer.config.jobs import ON_HUB
from transformer.errors import InputError, TransformerError
from transformer.files import storage_error

LIBRARY = "transformer-mt"  # by which the hub knows this package
TRY_ELSEWHERE = "run this where it can be, or name a folder of this machine"

COMMIT = re.compile(r"[0-9a-f]{40}")  # what a revision of a repository comes to

_NAME = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?")
_TOKEN = re.compile(r"hf_\w{4,}")

log = logging.getLogger(__name__)


class Unreachable(InputError):
    """The hub does not answer, or not now, or what answers in its place is no hub."""


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
    with _errors_named(f"{key}={source}", remedy=TRY_ELSEWHERE):
        found = HfApi().model_info(name, revision=revision, timeout=10)
        return HubModel(name, _commit(found.sha), [_text(sibling.rfilename) for sibling in found.siblings or []])


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


def dataset_revision(name: str) -> str:
    """The commit of a data set that the hub has now; without a network, the answer comes at once."""
    from huggingface_hub import HfApi

    remedy = (
        "run `transformer prepare` where it can, or name text files, tables, or a directory with the data set's files"
    )
    with _errors_named(name, remedy=remedy):
        return _commit(HfApi().dataset_info(name, timeout=10).sha)


# ---- what the hub answers: it becomes the name of a directory, and of files ------------------------------------------


def _commit(answer: object) -> str:
    """The commit that the hub names. Raises ValueError for anything else, such as a path."""
    if not (isinstance(answer, str) and COMMIT.fullmatch(answer)):
        raise ValueError(f"as a commit it names {answer!r:.80}")
    return answer


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
        raise InputError(f"{what}: no token of the hub is here: `hf auth login`, or set HF_TOKEN, with one that writes")

    disable_progress_bars()
    with _errors_named(what, remedy="run this where it can be, or look at the files with dry_run=true"):
        api = HfApi(library_name=LIBRARY)
        address = api.create_repo(repo, private=private, exist_ok=True)
        there = api.model_info(repo)
        if private and not there.private:
            raise InputError(f"{what}: is there already, and public: set private=false to push to it, or name another")

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


# ---- errors ---------------------------------------------------------------------------------------------------------


@contextmanager
def _errors_named(what: str, *, remedy: str) -> Iterator[None]:
    """Raise an InputError about `what` for the hub's answer that it will not, and an Unreachable for none."""
    from huggingface_hub import get_token

    token = get_token() or ""
    if not (token.isascii() and token.isprintable()):  # the client would show it in its error
        raise InputError("the token of the hub has characters that none has: `hf auth login` again, or mend HF_TOKEN")
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("ignore")  # of the client, about its HTTP library
            warnings.simplefilter("always", UserWarning)  # of the hub, about a card
            yield
        for warning in warned:
            log.warning("%s: %s", what, " ".join(str(warning.message).split()))
    except TransformerError:
        raise
    except Exception as error:  # of whichever HTTP library the hub's client uses
        refusal = _refusal(what, error)
        if refusal is not None:
            raise refusal from error
        if isinstance(error, (LookupError, TypeError, AttributeError, ValueError)) and not isinstance(error, OSError):
            raise Unreachable(
                f"{what}: the answer is not one of a hub ({type(error).__name__}: {first_cause(error)}): look at "
                "HF_ENDPOINT, and whether a proxy answers in the hub's place"
            ) from error
        raise Unreachable(f"{what}: the hub cannot be reached ({first_cause(error)}): {remedy}") from error


def _refusal(what: str, error: Exception) -> InputError | None:
    """The error for the hub's answer, or its client's, that it will not; None where it gave no such answer."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    if isinstance(error, HFValidationError):
        return InputError(f"{what}: not a name that the hub has ({first_cause(error)})")

    answer: BaseException | None = error
    while answer is not None and not isinstance(answer, HfHubHTTPError):
        answer = answer.__cause__
    if answer is None:
        return None

    status = answer.response.status_code
    reason = first_cause(answer)
    if status == 404 or isinstance(answer, RepositoryNotFoundError):  # of status 401, too, for who may not know of it
        return InputError(f"{what}: not found on the hub ({reason}): check the name, or log in")
    if status == 401:
        return InputError(f"{what}: the hub does not take the token ({reason}): `hf auth login`, or set HF_TOKEN")
    if status == 403:
        return InputError(f"{what}: the hub does not allow it ({reason}): check the name, and what the token may do")
    if status == 429 or status >= 500:
        return Unreachable(f"{what}: the hub answers {status} ({reason}): try again later")
    return InputError(f"{what}: the hub refuses it ({_one_line(error)})")


def first_cause(error: BaseException) -> str:
    """The message of the error that caused all the others, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return _one_line(error)


def _one_line(error: BaseException) -> str:
    """The message of an error, without the token of the hub."""
    from huggingface_hub import get_token

    text = " ".join(str(error).split()) or type(error).__name__
    token = get_token()
    if token:
        text = text.replace(token, "***")
    return f"{_TOKEN.sub('***', text):.200}"
