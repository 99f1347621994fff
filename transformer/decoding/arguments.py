"""Checks of the arguments of a Python user, who may give a text where a number or a list of texts is expected.

Commands need none of them: `compose` gives them typed settings.
"""

from collections.abc import Sequence
from numbers import Integral, Real

from transformer.config.settings import SampleConfig, SearchOverride
from transformer.decoding.sampling import Sampling
from transformer.errors import InputError


def check_list(name: str, texts: Sequence[str]) -> None:
    """Raise InputError for a single text, which Python would take for a list of texts: its letters."""
    if isinstance(texts, str):
        raise InputError(f"{name} must be a list of texts: for a single one, give [text]")


def check_whole(name: str, number: object) -> None:
    """Raise InputError for anything but a whole number."""
    if not isinstance(number, Integral):
        raise InputError(f"{name}={number!r} must be a whole number")


def check_length_penalties(alphas: Sequence[float]) -> None:
    """Raise InputError for no alpha at all, and for one that cannot be."""
    if not alphas:
        raise InputError("translate_sweep needs at least one length penalty")

    for alpha in alphas:
        if not isinstance(alpha, Real):
            raise InputError(f"length_penalty={alpha!r} must be a number")
        search_override(None, alpha, max_extra=None, batch_tokens=None)  # only for its checks


def search_override(
    beam_size: int | None, length_penalty: float | None, *, max_extra: int | None, batch_tokens: int | None
) -> SearchOverride:
    """What replaces the run's search settings; None keeps the run's own. Raises InputError for one that cannot be."""
    whole = {"beam_size": beam_size, "max_extra": max_extra, "batch_tokens": batch_tokens}
    for name, value in whole.items():
        if not isinstance(value, Integral | None):
            raise InputError(f"{name}={value!r} must be a whole number, or None for the run's own")
    if not isinstance(length_penalty, Real | None):
        raise InputError(f"length_penalty={length_penalty!r} must be a number, or None for the run's own")

    try:
        return SearchOverride(beam_size, length_penalty, max_extra, batch_tokens)
    except ValueError as error:
        raise InputError(str(error).removeprefix("search.")) from None


def sampling_of(temperature: float, *, top_k: int | None, top_p: float | None, seed: int) -> Sampling:
    """The settings of sampling; None is no limit. Raises InputError for one that cannot be."""
    if temperature is None:
        raise InputError("temperature=None must be a number: 1 for the model's own probabilities")
    check_whole("seed", seed)
    if top_k is not None:
        check_whole("top_k", top_k)
    for name, number in {"temperature": temperature, "top_p": top_p}.items():
        if not isinstance(number, Real | None):
            raise InputError(f"{name}={number!r} must be a number")

    try:
        SampleConfig(temperature, top_k, top_p, seed)
    except ValueError as error:
        raise InputError(str(error).removeprefix("sample.")) from None
    return Sampling(temperature, top_k, top_p, seed)
