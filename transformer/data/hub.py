"""Data sets of the Hugging Face hub: their commits, and the hub's errors in our words.

The token is the one of the hub's client (`hf auth login`, or HF_TOKEN): nothing here reads it but to keep it out of
messages.
"""

import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformer.errors import InputError, TransformerError

TRY_ELSEWHERE = "run this where the hub can be reached, or name a local folder"

GATED = (
    "it is gated: log in to the hub in a browser, accept the conditions on its page, then `hf auth login` here with a "
    "token of that account, or set HF_TOKEN"
)

COMMIT = re.compile(r"[0-9a-f]{40}")  # what a revision of a repository comes to

_NAMING = ("ETag", "X-Linked-Etag", "X-Repo-Commit")  # headers by which the hub's client names files

_TOKEN = re.compile(r"hf_\w{4,}")

log = logging.getLogger(__name__)


class Unreachable(InputError):
    """The hub does not answer, or not now, or what answers in its place is no hub."""


def dataset_revision(name: str) -> str:
    """The commit of a data set that the hub has now; without a network, the answer comes at once."""
    from huggingface_hub import HfApi

    remedy = (
        "run `transformer prepare` where it can, or name text files, tables, or a directory with the data set's files"
    )
    with errors_named(name, remedy=remedy):
        return commit_of(HfApi().dataset_info(name, timeout=10).sha)


# ---- what the hub answers: it becomes the name of a directory, and of files ------------------------------------------


def commit_of(answer: object) -> str:
    """The commit that the hub names. Raises ValueError for anything else, such as a path."""
    if not (isinstance(answer, str) and COMMIT.fullmatch(answer)):
        raise ValueError(f"as a commit it names {answer!r:.80}")
    return answer


def _guard_client() -> None:
    """Have the hub's client refuse answers whose headers are paths: it names files of its cache by them.

    Its sessions are made by a factory, and made anew after some errors, so the factory is what is guarded, once.
    """
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _http  # which alone knows the factory of whoever set another one

    factory = getattr(_http, "_GLOBAL_CLIENT_FACTORY", _http.default_client_factory)
    if not isinstance(factory, _Guarded):
        set_client_factory(_Guarded(factory))


@dataclass(frozen=True)
class _Guarded:
    """Makes sessions that `_check_headers` of each answer."""

    make: Callable[[], Any]

    def __call__(self) -> Any:
        client = self.make()
        hooks = client.event_hooks
        client.event_hooks = {**hooks, "response": [*hooks["response"], _check_headers]}
        return client


def _check_headers(response: Any) -> None:
    """Raise ValueError where a file would be named by a path. The client takes names from answers to HEAD alone."""
    for header in _NAMING if response.request.method == "HEAD" else ():
        name = response.headers.get(header, "").removeprefix("W/").strip('"')
        if "/" in name or name in (".", ".."):
            raise ValueError(f"as {header} it names {name!r:.120}")


# ---- errors ---------------------------------------------------------------------------------------------------------


@contextmanager
def errors_named(what: str, *, remedy: str) -> Iterator[None]:
    """Raise an InputError about `what` for the hub's answer that it will not, and an Unreachable for none.

    From now on the client is guarded: whatever is fetched was asked for in here first.
    """
    from huggingface_hub import get_token

    token = get_token() or ""
    if not (token.isascii() and token.isprintable()):  # the client would show it in its error
        raise InputError("the hub token has characters that no token can have: `hf auth login` again, or mend HF_TOKEN")
    _guard_client()
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
    if is_gated(error):
        return InputError(f"{what}: {GATED}")
    if status == 404 or isinstance(answer, RepositoryNotFoundError):  # of status 401, too, for who may not know of it
        return InputError(f"{what}: not found on the hub ({reason}): check the name, or log in")
    if status == 401:
        return InputError(f"{what}: the hub rejects the token ({reason}): `hf auth login`, or set HF_TOKEN")
    if status == 403:
        return InputError(f"{what}: the hub does not allow it ({reason}): check the name and the token's permissions")
    if status == 429 or status >= 500:
        return Unreachable(f"{what}: the hub answers {status} ({reason}): try again later")
    return InputError(f"{what}: the hub refuses it ({_one_line(error)})")


def is_gated(error: BaseException | None) -> bool:
    """Whether the hub wants terms to be accepted first."""
    from huggingface_hub.errors import GatedRepoError

    while error is not None and not isinstance(error, GatedRepoError) and "is a gated dataset" not in str(error):
        error = error.__cause__
    return error is not None


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
