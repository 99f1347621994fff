"""What can be set: the keys of a job, the experiments and recipes, and the grammar of `key=value`.

The keys are read from the dataclasses of `jobs` and `settings`. Each `key=value` is checked here before Hydra sees it:
`++key=value` would pass Hydra's schema unseen, and Hydra's grammar refuses most punctuation in a text value.
"""

import difflib
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from keyword import iskeyword
from pathlib import Path, PurePath
from typing import Any, get_args, get_origin, get_type_hints

from transformer.config.foreign import normal, row_of
from transformer.config.jobs import Job, TrainJob
from transformer.config.primitives import to_json
from transformer.config.settings import OnResume
from transformer.errors import InputError

PACKAGE = Path(__file__).resolve().parents[1]

GROUPS = ("recipe", "experiment")  # folders of files that set keys; an experiment overrides a recipe
RUN_KEYS = ("table", "run", "run_dir", "runs")  # the first of these that a command has takes a run directory

# How the key of a set begins that users name: `test.news.`
NAMED_SET = r"(?P<group>(data\.)?(test|extra|devs))\.(?P<name>[A-Za-z0-9_-]+)\."

NAMED_TEXT = r"(?P<texts>scorer|published)\.(?P<name>[A-Za-z0-9_-]+)"  # a text under a name that users choose
# Keys whose values name plug-ins: by themselves, by what stands before a colon, or by the ending of a file.
NAMES = ("augment", "doctor", "engine", "scores", "trackers")
SOURCES = ("dataset", "init_from", "run_dir", "ensemble", "run", "runs", "teacher", "reverse")
TABLES = ("dataset", "src", "tgt")
PLUGIN_KEY = r"plugins\.(?P<name>[A-Za-z0-9_-]+)\.(?P<key>[A-Za-z_][A-Za-z0-9_]*)"


@dataclass(frozen=True)
class Key:
    """One key."""

    kind: Any  # its type
    default: str  # as it is typed on the command line
    help: str
    on_resume: OnResume


def keys_of(job: type) -> dict[str, Key]:
    """Every key of a job, dotted; those of sets that users name as `data.test.NAME.src`."""
    return _keys_under(job, "")


def groups_of(job: type) -> tuple[str, ...]:
    """The groups of files that may set keys of a job: those of a training, and none for a finished run."""
    return GROUPS if issubclass(job, TrainJob) else ()


def generic_key(key: str) -> str:
    """The key as `keys_of` lists it: `data.test.news.src` -> `data.test.NAME.src`, `scorer.comet` -> `scorer.NAME`."""
    key = re.sub(rf"^{NAMED_TEXT}$", r"\g<texts>.NAME", key)
    key = re.sub(rf"^{PLUGIN_KEY}$", "plugins.NAME.KEY", key)
    return re.sub(rf"^{NAMED_SET}", r"\g<group>.NAME.", key)


def _keys_under(config: type, prefix: str) -> dict[str, Key]:
    keys: dict[str, Key] = {}
    kinds = get_type_hints(config)

    for field in fields(config):
        kind = kinds[field.name]
        meaning = field.metadata.get("help", "")
        dotted = prefix + field.name.removesuffix("_")  # of a field whose key is a word of Python's, such as `from`

        if is_dataclass(kind) and isinstance(kind, type):  # a group
            keys |= _keys_under(kind, f"{dotted}.")
        elif kind == dict[str, str]:  # texts that users name
            keys[f"{dotted}.NAME"] = Key(str, "", meaning, OnResume.refuse)
        elif kind == dict[str, dict[str, str]]:
            keys[f"{dotted}.NAME.KEY"] = Key(str, "", meaning, OnResume.refuse)
        elif get_origin(kind) is dict:  # groups that users name
            _, group = get_args(kind)
            keys_of_group = _keys_under(group, f"{dotted}.NAME.")
            keys |= {name: replace(key, help=meaning + key.help) for name, key in keys_of_group.items()}
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
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _meaning(kind: Any, meaning: str) -> str:
    """The meaning of a key, with its choices if it has some."""
    choices = choices_of(kind)
    return f"{meaning} [{', '.join(choices)}]" if choices else meaning


def choices_of(kind: Any) -> list[str]:
    """The names that a key of this type is a choice between; none if it is of another kind."""
    choices = [one for one in (kind, *get_args(kind)) if isinstance(one, type) and issubclass(one, Enum)]
    return list(choices[0].__members__) if choices else []


def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted keys: `{"model": {"n_heads": 1}}` -> `{"model.n_heads": 1}`."""
    settings: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            settings |= leaves(value, f"{prefix}{name}.")
        else:
            settings[f"{prefix}{name}"] = value
    return settings


def overrides_of(job: Job) -> list[str]:
    """The settings of a job that are not at their defaults, as one types them, without a shell's quotes."""
    defaults = leaves(to_json(type(job)()))
    return [f"{key}={as_typed(value)}" for key, value in leaves(to_json(job)).items() if value != defaults.get(key)]


def names_of_plugins(job: Job) -> Iterator[str]:
    """Every name that a plug-in may have which the job asks for."""
    for key, value in leaves(to_json(job)).items():
        setting = re.fullmatch(PLUGIN_KEY, key)
        if setting is not None:
            yield setting["name"]
            continue
        name = key.rpartition(".")[2]
        for text in filter(None, value if isinstance(value, list) else [value]):
            if name in NAMES:
                yield text
            if name in SOURCES and ":" in text:
                yield text.partition(":")[0]
            if name in TABLES:
                yield from (ending[1:] for ending in PurePath(text).suffixes)


# ---- the grammar of key=value ---------------------------------------------------------------------------------------


def check_override(override: str, keys: Mapping[str, Key], *, groups: Sequence[str], is_multirun: bool) -> str:
    """The override as Hydra is to read it: its key is known, and a text value is quoted.

    `keys` and `groups` are those of the job. A key that takes a list may be given one without brackets: `a,b`. Under
    --multirun that is a choice between values instead, for every key, which is left for Hydra to take apart. Raises
    InputError.
    """
    _check_text(override)
    if override.startswith("~"):
        return _check_removal(override, keys)

    # What is left to Hydra, and the files that set keys.
    typed_key, equals, value = override.partition("=")
    key = typed_key.lstrip("+")
    if not equals:
        hint = _meant(override, keys, groups)
        raise InputError(f"{override or repr('')}: settings are written key=value{hint}; --help lists the keys")
    if key.startswith("hydra"):
        return override  # Hydra's own settings
    if key in groups:
        if value in ("", "null"):
            default = "base" if key == "experiment" else "paper"
            raise InputError(f"{override}: name the {key}; {key}={default} is the paper's")
        _check_single(override, value, is_multirun=is_multirun)
        return f"{key}={value}"

    # A key of the job.
    _check_key(key, override, keys=keys, groups=groups)
    kind = keys[generic_key(key)].kind
    is_choice = is_multirun and re.search("[,(]", value) is not None
    is_null = value == "null" and re.fullmatch(PLUGIN_KEY, key) is None  # a plug-in reads its settings itself
    if is_null and type(None) not in get_args(kind):
        raise InputError(f"{override}: {key} cannot be null")
    key = f"{key}_" if iskeyword(key) else key  # as its field is called
    if is_null or is_choice:
        return f"{key}={value}"
    if _is_list(kind):
        return f"{key}={_list(value, is_text=kind == list[str])}"
    if _is_names(kind) and value.startswith("[") and value.endswith("]"):
        return f"{key}={_list(value, is_text=True)}"
    if kind in (str, str | None) or _is_names(kind):
        return f"{key}={quote(value)}"
    _check_single(override, value, is_multirun=is_multirun)
    return f"{key}={value}"


def list_override(key: str, values: Sequence[str]) -> str:
    """The override that sets a key to a list of texts, whatever is in them. Raises InputError."""
    for value in values:
        _check_text(value)
    return f"{key}=[{','.join(map(quote, values))}]"


def _check_text(argument: str) -> None:
    """Raise InputError for what is not UTF-8, and for a NUL, which only Python can give."""
    if "\0" in argument:
        raise InputError(f"{argument!r}: a NUL is in it")
    if any("\ud800" <= character <= "\udfff" for character in argument):  # how Python marks bytes it cannot decode
        raise InputError(f"{argument!r}: not UTF-8")


def _check_removal(override: str, keys: Mapping[str, Key]) -> str:
    """`~data.test.NAME`: the training does without this set of its experiment. Raises InputError for anything else."""
    named = re.fullmatch(NAMED_SET, f"{override[1:]}.")
    if named is None or not named["group"].startswith("data.") or f"{named['group']}.NAME.src" not in keys:
        raise InputError(f"{override}: a key cannot be removed; give it the value you want instead")
    return override


def _meant(word: str, keys: Mapping[str, Key], groups: Sequence[str]) -> str:
    """A clause with the setting that was probably meant by a word without `=`, or nothing."""
    if "experiment" in groups and word in names_in("experiment", None):
        return f", such as experiment={word}"
    if "/" in word or os.path.isdir(word):
        return f", such as {shlex.quote(f'{_key_of_run(keys)}={word}')}"
    return ""


def _key_of_run(keys: Mapping[str, Key]) -> str:
    """The key by which a command takes a run directory."""
    return next(key for key in RUN_KEYS if key in keys)


def _check_single(override: str, value: str, *, is_multirun: bool) -> None:
    """Raise InputError for several values where one is taken."""
    if not is_multirun and re.match(r"[^\[{]*,", value):
        raise InputError(f"{override}: give one value, or --multirun to run each")


def _is_list(kind: Any) -> bool:
    """Whether a key takes a list: `list[str]`, or `list[int] | None`."""
    return any(get_origin(choice) is list for choice in (kind, *get_args(kind)))


def _is_names(kind: Any) -> bool:
    """Whether a key takes a text, or a list of texts in brackets: `Names` of the settings."""
    return Any in (kind, *get_args(kind))


def _list(value: str, *, is_text: bool) -> str:
    """A list for Hydra to read, given with brackets or without; texts are quoted.

    A text with a comma in it is one that is in quotes already: `["a,b",c]`.
    """
    inner = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    found = re.findall(r"""\s*(?:'[^']*'|"[^"]*")\s*(?=,|$)|[^,]+""", inner)
    items = [item.strip() for item in found if item.strip()]
    return f"[{','.join(quote(item) if is_text else item for item in items)}]"


def _check_key(key: str, override: str, *, keys: Mapping[str, Key], groups: Sequence[str]) -> None:
    """Raise InputError for a key that the job does not have."""
    generic = generic_key(key)
    if generic not in keys:
        if key in GROUPS:
            run = _key_of_run(keys)
            raise InputError(f"{override}: {key}s are for training; this command takes a finished run, {run}=DIR")
        if any(other.startswith(f"{generic}.NAME.") for other in keys):
            removal = f"; '~{key}.NAME' removes a set" if key.startswith("data.") else ""
            raise InputError(f"{override}: {key} is a group of sets; set their keys, as {key}.NAME.KEY=VALUE{removal}")
        if any(other.startswith(f"{generic}.") for other in keys):
            raise InputError(f"{override}: {key} is a group of keys; set them one by one, as {key}.KEY=VALUE")
        raise InputError(
            f"unknown key {key!r} in {override!r}{key_meant(generic, [*keys, *groups])}; --help all lists every key"
        )

    named = re.match(NAMED_SET, key) or re.match(NAMED_TEXT, key) or re.match(PLUGIN_KEY, key)
    if named and not re.fullmatch(r"[A-Za-z_].*|0|[1-9][0-9]*", named["name"]):  # Hydra's grammar has no other keys
        raise InputError(f"{override}: the name {named['name']!r} must begin with a letter")


def quote(value: str) -> str:
    """A text value in quotes, as Hydra's grammar wants it; what is in quotes already stays as it is."""
    if re.fullmatch(r"'[^']*'|\"[^\"]*\"", value):
        return value
    value = os.path.expanduser(value)  # a shell does not expand ~ after an equals sign

    # Escape quotation marks. Backslashes count only before one, and there they are doubled.
    value = re.sub(r'(\\*)"', lambda match: match.group(1) * 2 + '\\"', value)
    value = re.sub(r"(\\+)$", lambda match: match.group(1) * 2, value)
    return f'"{value}"'


# ---- what was meant -------------------------------------------------------------------------------------------------

SETS = {"valid": "dev", "valid_set": "dev", "validation": "dev", "val": "dev"}  # a group's name elsewhere, and here
OPPOSITES = (("min", "max"), ("src", "tgt"), ("encoder", "decoder"), ("first", "last"), ("best", "last"))
CHOICES = {  # what is typed of a choice that there is not, and the clause that answers it, by a choice of its key
    "cuda": {
        "gpu": "; did you mean 'cuda'?",
        "mps": "; a Mac's GPU is not supported: its CPU is",
    }
}
ALIKE = 0.85  # the least similarity of a key and its misspelling, both without "_"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A clause that names the known word that is most like a misspelt one, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def choice_meant(typed: str, choices: Sequence[str]) -> str:
    """A clause with the choice that was meant by one that there is not, or why there is none; or nothing."""
    known = {name: clause for choice in choices for name, clause in CHOICES.get(choice, {}).items()}
    return known.get(typed.lower()) or did_you_mean(typed, choices)


def key_meant(typed: str, known: Iterable[str]) -> str:
    """A clause with the key that was meant by an unknown one, or nothing: a wrong hint is worse than none.

    The last segments are compared, since the beginning makes all keys of a group alike. A key may be without its
    group, in another group, as another toolkit calls it (see `foreign`), or misspelt.
    """
    known = list(known)
    of_set = _misspelt_in_set(typed, known)
    segments = [SETS.get(segment, segment) for segment in normal(typed).split(".")]
    keys = [key for key in known if _may_be(key, segments)]

    names = [".".join(segments[start:]) for start in range(len(segments))]  # the whole first, the last segment last
    foreign = [row_of(name, set(keys)) for name in names]
    found = of_set or next(filter(None, foreign[:-1]), None) or _same_name(keys, segments) or foreign[-1]
    key, sentence = found or _misspelt(keys, segments) or ("", "")
    if sentence:
        return f"; here {sentence.replace('`', '')}"
    return f"; did you mean {key!r}?" if key else ""


def _misspelt_in_set(typed: str, keys: Sequence[str]) -> tuple[str, str] | None:
    """A key of a set that users name, which has so few that one of them is meant: `data.test.NAME.source`."""
    group, _, name = typed.rpartition(".")
    names = [_last_segment(key) for key in keys if group.endswith(".NAME") and key.rpartition(".")[0] == group]
    close = difflib.get_close_matches(name, names, n=1)
    return (f"{group}.{close[0]}", "") if close else None


def _may_be(key: str, segments: Sequence[str]) -> bool:
    """Whether a key of a set that users name can be meant: not by a key of a group that has no such sets."""
    return ".NAME." not in key or len(segments) == 1 or not set(segments[:-1]).isdisjoint(key.split("."))


def _same_name(keys: Sequence[str], segments: Sequence[str]) -> tuple[str, str] | None:
    """The key with the last segment that was typed, unless that is the name of a group."""
    groups = {key.partition(".")[0] for key in keys if "." in key}
    same = [key for key in keys if _last_segment(key) == segments[-1] and segments[-1] not in groups]
    return (_nearest(same, segments), "") if same else None


def _misspelt(keys: Sequence[str], segments: Sequence[str]) -> tuple[str, str] | None:
    """The key whose last segment is nearly the typed one, or begins with it; None if there is no single one."""
    name = segments[-1]
    likeness = {last: _likeness(name, last) for last in map(_last_segment, keys)}
    best = max(likeness.values(), default=0.0)
    close = [last for last, alike in likeness.items() if alike == best >= ALIKE]
    begun = [last for last in likeness if last.startswith(name)]
    if len(close) != 1 and len(begun) == 1 and 2 * len(name) >= len(begun[0]):
        close = begun
    return (
        (_nearest([key for key in keys if _last_segment(key) == close[0]], segments), "") if len(close) == 1 else None
    )


def _last_segment(key: str) -> str:
    return key.rpartition(".")[2]


def _nearest(keys: Sequence[str], segments: Sequence[str]) -> str:
    """Of these keys, the first of those that have most groups in common with what was typed."""
    return max(keys, key=lambda key: len(set(key.lower().split(".")) & set(segments)))


def _likeness(typed: str, known: str) -> float:
    """From 0 to 1; 0 also for opposites, such as min_steps and max_steps, and for keys with a word more or less."""
    words = typed.split("_"), known.split("_")
    for pair in OPPOSITES:
        if any(one in words[0] and other in words[1] for one, other in (pair, pair[::-1])):
            return 0.0
    alike = difflib.SequenceMatcher(None, "".join(words[0]), "".join(words[1])).ratio()
    return alike if len(words[0]) == len(words[1]) or alike > 0.92 else 0.0


# ---- experiments and recipes ----------------------------------------------------------------------------------------


def own_text(src_lang: str, tgt_lang: str) -> str:
    """The settings that name text of one's own, for examples."""
    sets = [f"data.{name}.{side}" for name in ("train", "dev") for side in ("src", "tgt")]
    files = [f"{name}.{language}" for name in ("train", "dev") for language in (src_lang, tgt_lang)]
    return shlex.join(f"{key}={file}" for key, file in zip(sets, files, strict=True))


def shipped(folder: str) -> Path:
    """A folder that comes with the package: inside it in a wheel, beside it in a checkout."""
    return next(path for path in (PACKAGE / "shipped" / folder, PACKAGE.parent / folder) if path.is_dir())


def names_in(group: str, config_dir: str | None) -> list[str]:
    """The names of the experiments, or recipes, of the package, and of those in a folder of the user's own.

    Names that cannot be typed without quotes are left out: completion would put `$(...)` into the line as it is.
    """
    folders = [shipped("configs"), *([] if config_dir is None else [Path(config_dir)])]
    paths = [path.relative_to(folder / group) for folder in folders for path in folder.glob(f"{group}/**/*.yaml")]
    names = {str(path.with_suffix("")) for path in paths}
    return sorted(name for name in names if re.fullmatch(r"[\w./-]+", name))
