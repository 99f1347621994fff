"""Checks of the settings of a search, or of sampling, that a Python user gives one by one."""

from collections.abc import Iterable, Sequence
from numbers import Real

from transformer.arguments import check_flag, shown, whole
from transformer.config.primitives import validated_copy
from transformer.config.settings import EngineType, SampleConfig, SearchConfig, SearchOverride
from transformer.decoding.sampling import Sampling
from transformer.errors import InputError


def check_search(search: SearchConfig) -> None:
    """Raise InputError unless these are search settings: their fields can be changed after they were made."""
    if not isinstance(search, SearchConfig):
        raise InputError(f"search={shown(search)} must be a SearchConfig, such as translator.search")
    try:
        validated_copy(SearchConfig, search, "search")
    except ValueError as error:
        raise InputError(str(error)) from None


def check_ids(name: str, ids: Iterable[Sequence[int]], *, vocab_size: int) -> list[list[int]]:
    """Lists of ids of pieces, as lists. Raises InputError for what is not a list of lists of ids below `vocab_size`."""
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise InputError(f"{name}={shown(ids)} must be a list of lists of ids")
    found = []
    for index, of_text in enumerate(ids):
        if isinstance(of_text, str) or not isinstance(of_text, Iterable):
            raise InputError(f"{name}[{index}]={shown(of_text)} must be a list of ids")
        numbers = [whole(f"an id of {name}[{index}]", number, least=0) for number in of_text]
        if max(numbers, default=0) >= vocab_size:
            raise InputError(f"{name}[{index}] has the id {max(numbers)}, and there are {vocab_size} pieces")
        found.append(numbers)
    return found


def lines_of(lines: Iterable[int], *, n_texts: int) -> list[int]:
    """The line of each text. Raises InputError unless these are as many whole numbers as texts."""
    if isinstance(lines, str) or not isinstance(lines, Iterable):
        raise InputError(f"lines={shown(lines)} must be a list of whole numbers")
    found = [whole("a line of lines", line, least=0) for line in lines]
    if len(found) != n_texts:
        raise InputError(f"{len(found)} lines for {n_texts} texts: give one for each")
    return found


def length_penalties_of(alphas: Iterable[float]) -> list[float]:
    """The alphas. Raises InputError for none at all, and for one that cannot be."""
    if isinstance(alphas, str) or not isinstance(alphas, Iterable):
        raise InputError(f"length_penalties={shown(alphas)} must be a list of numbers")
    found = list(alphas)
    if not found:
        raise InputError("translate_sweep needs at least one length penalty")

    for alpha in found:
        _check_number("length_penalty", alpha)
        search_override(None, alpha, max_extra=None, batch_tokens=None)  # only for its checks
    return found


def search_override(
    beam_size: int | None,
    length_penalty: float | None,
    *,
    max_extra: int | None,
    batch_tokens: int | None,
    engine: str | None = None,
    engine_type: EngineType | None = None,
    cuda_graphs: bool | None = None,
) -> SearchOverride:
    """What replaces the run's search settings; None keeps the run's own. Raises InputError for one that cannot be."""
    for name, value in {"beam_size": beam_size, "max_extra": max_extra, "batch_tokens": batch_tokens}.items():
        if value is not None:
            whole(name, value)
    if length_penalty is not None:
        _check_number("length_penalty", length_penalty)
    if cuda_graphs is not None:
        check_flag("cuda_graphs", cuda_graphs)

    try:
        return SearchOverride(beam_size, length_penalty, max_extra, batch_tokens, engine, engine_type, cuda_graphs)
    except ValueError as error:
        raise InputError(str(error).removeprefix("search.")) from None


def sampling_of(temperature: float, *, top_k: int | None, top_p: float | None, seed: int) -> Sampling:
    """The settings of sampling; None is no limit. Raises InputError for one that cannot be."""
    if temperature is None:
        raise InputError("temperature=None must be a number: 1 for the model's own probabilities")
    whole("seed", seed)
    if top_k is not None:
        whole("top_k", top_k)
    _check_number("temperature", temperature)
    if top_p is not None:
        _check_number("top_p", top_p)

    try:
        SampleConfig(temperature, top_k, top_p, seed)
    except ValueError as error:
        raise InputError(str(error).removeprefix("sample.")) from None
    return Sampling(temperature, top_k, top_p, seed)


def _check_number(name: str, value: object) -> None:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise InputError(f"{name}={shown(value)} must be a number")
    try:
        float(value)
    except OverflowError:
        raise InputError(f"{name}={shown(value)} is too large") from None
