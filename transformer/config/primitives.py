"""Dataclasses to JSON primitives and back, typed and checked on the way in."""

from dataclasses import fields, is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")


def to_json(config: Any) -> dict[str, Any]:
    """A config dataclass as JSON primitives, enums by name."""
    return {f.name: _to_primitive(getattr(config, f.name)) for f in fields(config)}


def _to_primitive(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, dict):
        return {key: _to_primitive(item) for key, item in value.items()}
    return to_json(value) if is_dataclass(value) else value


def from_json(cls: type[T], data: object) -> T:
    """What `to_json` gave, typed and checked. Raises ValueError for an unknown key, a wrong type or a bad value."""
    return cast(T, _from_primitive(cls, data, cls.__name__))


def _from_primitive(kind: Any, value: Any, place: str) -> Any:
    if get_origin(kind) in (Union, UnionType):  # only `X | None` is used
        kind = next(arg for arg in get_args(kind) if arg is not type(None))
        return None if value is None else _from_primitive(kind, value, place)
    if get_origin(kind) is dict and isinstance(value, dict):
        return {str(key): _from_primitive(get_args(kind)[1], item, f"{place}.{key}") for key, item in value.items()}
    if is_dataclass(kind) and isinstance(value, dict):
        kinds = get_type_hints(kind)
        unknown = sorted(map(str, value.keys() - kinds.keys()))
        _require(not unknown, f"{place} has unknown keys: {unknown}")
        return cast(Any, kind)(
            **{key: _from_primitive(kinds[key], item, f"{place}.{key}") for key, item in value.items()}
        )
    if isinstance(kind, type) and issubclass(kind, Enum) and isinstance(value, str) and value in kind.__members__:
        return kind[value]
    if get_origin(kind) is list and isinstance(value, list):
        return [_from_primitive(get_args(kind)[0], item, place) for item in value]
    whole = kind is float and type(value) is int and abs(value) < 2**1023
    _require(type(value) is kind or whole, f"{place}={value!r:.80} is not what is expected: {kind}")
    return float(value) if whole else value


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
