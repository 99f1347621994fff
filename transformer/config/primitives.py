"""Dataclasses to JSON primitives and back, typed and checked on the way in.

`to_json` and `from_json` are inverses. Enums are written by name. JSON has no word for a number that is not finite: it
becomes null, and comes back as NaN. `validated_copy` checks a dataclass in the same way, without JSON between.
"""

import math
import re
import reprlib
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from numbers import Integral, Real
from types import UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxstring = 80


def to_json(instance: Any) -> dict[str, Any]:
    """A dataclass as JSON primitives."""
    return {field.name: to_primitive(getattr(instance, field.name)) for field in fields(instance)}


def to_primitive(value: Any) -> Any:
    """A dataclass, or a list or mapping of such, as JSON primitives."""
    if is_dataclass(value):
        return to_json(value)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: to_primitive(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_primitive(item) for item in value]
    return value


def from_json(kind: type[T], data: object, *, complete: bool = False) -> T:
    """What `to_json` gave, typed and checked; `complete` refuses data that leaves a key to its default.

    Raises ValueError, naming the place, for a key that is unknown or missing, a wrong type or a bad value.
    """
    return cast(T, _from_primitive(kind, data, kind.__name__, complete=complete))


def validated_copy(kind: type[T], instance: object, place: str) -> T:
    """An instance from the values that another one has now, typed and checked: its fields may have been changed.

    `place` is what errors call it. Raises ValueError as `from_json` does, and for numbers that are not finite.
    """
    try:
        values = _values(instance)
    except RecursionError:
        raise ValueError(f"{place} contains itself, or is nested without end") from None
    return cast(T, _from_primitive(kind, values, place, complete=True))


def _values(value: Any) -> Any:
    """A dataclass as what its instances hold, under whatever name: a misspelt field is one that nothing reads."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: _values(item) for name, item in vars(value).items()}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, dict):
        return {key: _values(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_values(item) for item in value]
    if isinstance(value, Real) and not isinstance(value, bool):  # numpy's numbers, too
        return int(value) if isinstance(value, Integral) else float(value)
    return value


def _from_primitive(kind: Any, value: Any, place: str, *, complete: bool) -> Any:
    """`value` as a `kind`, which is the type of a field; `place` is the dotted name of the field, for errors."""
    origin = get_origin(kind)
    if origin in (Union, UnionType):  # only `X | None` is used
        if value is None:
            return None
        inner = next(argument for argument in get_args(kind) if argument is not type(None))
        return _from_primitive(inner, value, place, complete=complete)

    if origin is dict and isinstance(value, dict):
        inner = get_args(kind)[1]
        return {
            str(key): _from_primitive(inner, item, f"{place}.{key!s:.80}", complete=complete)
            for key, item in value.items()
        }

    if origin is list and isinstance(value, list):
        inner = get_args(kind)[0]
        return [
            _from_primitive(inner, item, f"{place}[{index}]", complete=complete) for index, item in enumerate(value)
        ]

    if is_dataclass(kind) and isinstance(value, dict):
        return _from_table(kind, value, place, complete=complete)

    if isinstance(kind, type) and issubclass(kind, Enum) and isinstance(value, str) and value in kind.__members__:
        return kind[value]

    if kind is Any:  # as `Names` of the settings: a text, or a list of texts
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return [
                _from_primitive(str, item, f"{place}[{index}]", complete=complete) for index, item in enumerate(value)
            ]
        kind = str

    if kind is float:
        return _number(value, place)

    is_too_large = kind is int and type(value) is int and not -(2**63) <= value < 2**63  # for a count of anything
    if type(value) is not kind or is_too_large:
        raise _unexpected(value, place, f"of type {getattr(origin or kind, '__name__', kind)}")
    if kind is str and re.search("[\0\ud800-\udfff]", value):  # which no file system and no UTF-8 takes
        raise _unexpected(value, place, "text: it has a NUL, or half of a character")
    return value


def _from_table(kind: Any, table: dict[Any, Any], place: str, *, complete: bool) -> Any:
    """A JSON object as a dataclass, whose static method `upgrade`, if it has one, knows what earlier versions wrote."""
    if hasattr(kind, "upgrade"):
        table = kind.upgrade(table)
    known = {field.name: field for field in fields(kind)}
    unknown = sorted(map(str, table.keys() - known.keys()))
    if unknown:
        raise ValueError(f"{place} has unknown keys: {unknown!s:.200}")

    for name, field in known.items():
        if name not in table and (complete or not _has_default(field)):
            raise ValueError(f"{place} has no key {name!r}")

    kinds = get_type_hints(kind)
    values = {
        key: _from_primitive(kinds[key], item, f"{place}.{key}", complete=complete) for key, item in table.items()
    }
    return kind(**values)


def _has_default(field: "Field[Any]") -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


def _number(value: Any, place: str) -> float:
    """A float: of a whole number, too, and NaN of null."""
    if value is None:
        return math.nan
    is_whole = type(value) is int and abs(value) < 2**1023
    is_finite = type(value) is float and math.isfinite(value)  # JSON's 1e999 is infinite
    if not (is_whole or is_finite):
        raise _unexpected(value, place, "a finite number")
    return float(value)


def _unexpected(value: Any, place: str, expected: str) -> ValueError:
    """The error of a value; only its top is shown, since it may be nested more deeply than `repr` can go."""
    return ValueError(f"{place}={_SHORT.repr(value):.80} is not {expected}")
