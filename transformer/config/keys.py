"""What can be set: the keys of a job, the experiments and recipes, and the grammar of `key=value`.

The keys are read from the dataclasses of `jobs` and `settings`. Each `key=value` is checked here before Hydra sees it:
`++key=value` would pass Hydra's schema unseen, and Hydra's grammar refuses most punctuation in a text value.
"""

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from transformer.config.settings import OnResume
from transformer.errors import InputError

PACKAGE = Path(__file__).resolve().parents[1]

GROUPS = ("recipe", "experiment")  # of files that set keys; the second overrides the first
NAMED = r"(?P<group>(data\.)?(test|extra))\.(?P<name>[A-Za-z0-9_-]+)\."  # sets that have names of their own


@dataclass(frozen=True)
class Key:
    """One key: its type, its default as it is typed on the command line, its meaning, and its policy on resume."""

    kind: Any
    default: str
    help: str
    on_resume: OnResume


def keys_of(job: type) -> dict[str, Key]:
    """Every key of a job, dotted; of sets that have names of their own, as `data.test.NAME.src`."""
    return _keys_under(job, "")


def generic_key(key: str) -> str:
    """The key as `keys_of` lists it: `data.test.news.src` -> `data.test.NAME.src`."""
    return re.sub(rf"^{NAMED}", r"\g<group>.NAME.", key)


def _keys_under(config: type, prefix: str) -> dict[str, Key]:
    keys: dict[str, Key] = {}
    kinds = get_type_hints(config)

    for field in fields(config):
        kind, meaning = kinds[field.name], field.metadata.get("help", "")
        dotted = prefix + field.name

        if is_dataclass(kind) and isinstance(kind, type):
            keys |= _keys_under(kind, f"{dotted}.")
        elif get_origin(kind) is dict:
            of_one = _keys_under(get_args(kind)[1], f"{dotted}.NAME.")
            keys |= {name: replace(key, help=meaning + key.help) for name, key in of_one.items()}
        else:
            default = [] if get_origin(kind) is list else field.default
            keys[dotted] = Key(kind, as_typed(default), _meaning(kind, meaning), field.metadata["on_resume"])
    return keys


def as_typed(value: object) -> str:
    """A value as it is typed on the command line, without quotes."""
    if value is None:
        return "null"
    if isinstance(value, Enum):
        return value.name
    return str(value).lower() if isinstance(value, bool) else str(value)


def _meaning(kind: Any, meaning: str) -> str:
    is_choice = isinstance(kind, type) and issubclass(kind, Enum)
    return f"{meaning} [{', '.join(kind.__members__)}]" if is_choice else meaning


def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted keys: `{"model": {"n_heads": 1}}` -> `{"model.n_heads": 1}`."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= leaves(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


# ---- the grammar of key=value ---------------------------------------------------------------------------------------


def check_override(override: str, keys: Mapping[str, Key], *, is_multirun: bool) -> str:
    """The override as Hydra is to read it: its key is known, and a text value is quoted.

    A key that takes a list may be given one without brackets: `a,b`. Under --multirun that is a choice between values
    instead, for every key, which is left for Hydra to take apart. Raises InputError.
    """
    _check_text(override)
    if override.startswith("~"):
        raise InputError(f"{override}: a key cannot be removed; give it the value you want instead")

    key, equals, value = override.partition("=")
    bare = key.lstrip("+")
    if not equals or bare.startswith("hydra"):
        return override  # Hydra's own settings; and Hydra says what is wrong where there is no `=`
    if bare in GROUPS:
        if value in ("", "null"):
            default = "base" if bare == "experiment" else "paper"
            raise InputError(f"{override}: name one; {bare}={default} is the paper's, and sets nothing else")
        return f"{bare}={value}"

    _check_key(bare, override, keys)
    kind = keys[generic_key(bare)].kind
    is_choice = is_multirun and re.search("[,(]", value) is not None
    if value == "null" or is_choice:
        return f"{bare}={value}"
    if _is_list(kind):
        return f"{bare}={_list(value, is_text=kind == list[str])}"
    return f"{bare}={quote(value) if kind in (str, str | None) else value}"


def list_override(key: str, values: Sequence[str]) -> str:
    """The override that sets a key to a list of texts, whatever is in them. Raises InputError."""
    for value in values:
        _check_text(value)
    return f"{key}=[{','.join(map(quote, values))}]"


def _check_text(argument: str) -> None:
    if any("\ud800" <= character <= "\udfff" for character in argument):  # how Python marks bytes it cannot decode
        raise InputError(f"{argument}: not UTF-8")


def _is_list(kind: Any) -> bool:
    """Whether a key takes a list: `list[str]`, or `list[int] | None`."""
    return any(get_origin(choice) is list for choice in (kind, *get_args(kind)))


def _list(value: str, *, is_text: bool) -> str:
    """A list for Hydra to read, given with brackets or without; texts are quoted.

    A text with a comma in it is one that is in quotes already: `["a,b",c]`.
    """
    inner = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    found = re.findall(r"""\s*(?:'[^']*'|"[^"]*")\s*(?=,|$)|[^,]+""", inner)
    items = [item.strip() for item in found if item.strip()]
    return f"[{','.join(quote(item) if is_text else item for item in items)}]"


def _check_key(key: str, override: str, keys: Mapping[str, Key]) -> None:
    known = generic_key(key)
    if known not in keys:
        if any(other.startswith(f"{known}.") for other in keys):
            raise InputError(f"{override}: {key} is a group of keys; set them one by one, as {key}.KEY=VALUE")
        raise InputError(
            f"unknown key {key!r} in {override!r}{did_you_mean(key, [*keys, *GROUPS])}; --help lists every key"
        )

    named = re.match(NAMED, key)
    if named and not re.fullmatch(r"[A-Za-z_].*|0|[1-9][0-9]*", named["name"]):  # Hydra's grammar has no other keys
        raise InputError(f"{override}: the name {named['name']!r} must begin with a letter")


def quote(value: str) -> str:
    """A text value in quotes, as Hydra's grammar wants it; what is in quotes already stays as it is."""
    if re.fullmatch(r"'[^']*'|\"[^\"]*\"", value):
        return value
    value = os.path.expanduser(value)  # a shell does not expand ~ behind an equals sign
    value = re.sub(r'(\\*)"', lambda match: match.group(1) * 2 + '\\"', value)
    return '"' + re.sub(r"(\\+)$", lambda match: match.group(1) * 2, value) + '"'


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A clause that names the known word next to this one, or nothing where none is near."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


# ---- experiments and recipes ----------------------------------------------------------------------------------------


def shipped(folder: str) -> Path:
    """A folder that comes with the package: inside it in a wheel, beside it in a checkout."""
    return next(path for path in (PACKAGE / "shipped" / folder, PACKAGE.parent / folder) if path.is_dir())


def names_in(group: str, config_dir: str | None) -> list[str]:
    """The names of the experiments, or recipes, of the package, and of those in a folder of the user's own."""
    folders = [shipped("configs"), *([] if config_dir is None else [Path(config_dir)])]
    paths = [path.relative_to(folder / group) for folder in folders for path in folder.glob(f"{group}/**/*.yaml")]
    return sorted({str(path.with_suffix("")) for path in paths})
