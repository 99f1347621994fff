"""One table of plug-ins by kind and name, and what finds one: here and in the other packages that are installed.

    find("tracker", "wandb")  ->  OWN["tracker"]["wandb"]  ->  the module is imported, and its object returned

`tools/` and `integrations/` are plug-ins of the package's own. Another installed package adds its by entry points of
the group `transformer.plugins`, which are named as the rows here are: `format.po`, `score.length_ratio`. They are read
for a name that is not the package's own, and used where the command line names them: what a run, a checkpoint or a
model says never has code of another package executed. One that is a dataclass has settings, and its instance is used.
`plugins` says what is asked of each kind.
"""

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, distributions, requires
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_type_hints

from transformer.config.primitives import from_json
from transformer.errors import InputError, in_a_line

GROUP = "transformer.plugins"  # of entry points

Kind: TypeAlias = Literal[
    "format", "corpora", "screen", "augment", "search", "tracker", "models", "judges", "score", "lines", "command"
]

_TABLES = "transformer.data.table"
_INTEGRATIONS = "transformer.integrations"
_TOOLS = "transformer.tools"

# By kind and name: a module, or `module:object`. The commands of `tools/` and `integrations/` are in `cli.commands`.
OWN: Mapping[str, Mapping[str, str]] = {
    "format": {
        "tsv": f"{_TABLES}:read_tsv",
        "csv": f"{_TABLES}:read_csv",
        "jsonl": f"{_TABLES}:read_json_lines",
        "parquet": f"{_TABLES}:read_parquet",
        "json": f"{_INTEGRATIONS}.json_array:read_json",
        "tmx": f"{_INTEGRATIONS}.tmx:read_tmx",
    },
    "corpora": {
        "mtdata": f"{_INTEGRATIONS}.mtdata",
        **{name: f"{_INTEGRATIONS}.testsets" for name in ("bouquet", "flores", "ntrex", "wmt24pp")},
    },
    "screen": {  # in the order in which a pair is looked at
        name: f"{_TOOLS}.detectors.cleaning"
        for name in ("copies", "encoding", "markup", "languages", "lengths", "alignment")
    },
    "augment": {name: f"{_TOOLS}.augment:{name}" for name in ("unmarked", "typos", "title", "upper", "noise", "mixed")},
    "search": {"torch": "transformer.decoding.backend", "ctranslate2": f"{_INTEGRATIONS}.engine.make"},
    "tracker": {
        "bounds": f"{_TOOLS}.bounds:open_bounds",
        **{name: f"{_INTEGRATIONS}.trackers.sink:open_{name}" for name in ("trackio", "wandb")},
    },
    "models": {name: f"{_INTEGRATIONS}.published.run" for name in ("hf", "folder")},
    "judges": {"command": f"{_INTEGRATIONS}.judges"},
    "score": {"paper_bleu": f"{_TOOLS}.paper_bleu:PAPER_BLEU"},
    "lines": {
        "augmentation": f"{_TOOLS}.augmentation:Augmentation",
        "check": f"{_TOOLS}.sentences:LineCheck",
        "faults": f"{_TOOLS}.first_look:warnings_of",
        "split": f"{_TOOLS}.sentences:Sentences.of",
        "keep": f"{_TOOLS}.synthetic:Pairs.of",
    },
    "command": {},
}


# ---- finding them ---------------------------------------------------------------------------------------------------


def find(kind: Kind, name: str) -> Any:
    """The plug-in of a kind, which is as its protocol in `plugins` says.

    Raises InputError, with what to install or to name, if it is not available.
    """
    if name in OWN[kind]:
        return load(OWN[kind][name])

    entries = _installed().get(f"{kind}.{name}")
    if entries is None:
        raise InputError(f"no {kind} is called {name!r:.80}: install the package that has it")
    if len(entries) > 1:
        several = " and ".join(map(_package_of, entries))
        raise InputError(f"the {kind} {name} comes with the packages {several}: uninstall all but one")
    [entry] = entries
    if not is_allowed(kind, name):
        raise InputError(
            f"the {kind} {name} comes with the package {_package_of(entry)}, but is not enabled here: name it on "
            f"the command line, or call transformer.registry.allow({name!r})"
        )
    try:
        found = entry.load()
    except Exception as error:  # of another package, whatever it be
        raise InputError(
            f"the {kind} {name} cannot be imported ({type(error).__name__}: {in_a_line(error)}): "
            f"pip install --upgrade {_package_of(entry)}"
        ) from error
    _imported[_root(entry.module)] = _package_of(entry)
    return _with_settings(name, found)


def _with_settings(name: str, found: Any) -> Any:
    """The plug-in as it is set. Raises InputError for a setting that it does not have, or not so."""
    given = _settings.get(name, {})
    if not (isinstance(found, type) and is_dataclass(found)):
        if given:
            raise InputError(f"plugins.{name}.{min(given)}: the plug-in {name} has no settings: leave it out")
        return found
    try:
        kinds = get_type_hints(found)
        return from_json(found, {key: _typed(kinds.get(key), text) for key, text in given.items()})
    except Exception as error:  # of another package, whatever it be
        raise InputError(f"plugins.{name}: {in_a_line(error) or type(error).__name__}") from error


def _typed(kind: Any, text: str) -> Any:
    """A setting as it was meant: text stays what it is, and everything else is written as in JSON."""
    if kind is str or (kind == str | None and text != "null"):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def is_known(kind: Kind, name: str) -> bool:
    """Whether there is a plug-in of this name; it is not imported."""
    return name in OWN[kind] or f"{kind}.{name}" in _installed()


def known_names(kind: Kind) -> list[str]:
    """What plug-ins of a kind there are, the package's own first; none is imported."""
    of_others = (entry.partition(".") for entry in _installed())
    return [*OWN[kind], *(name for of_kind, _, name in sorted(of_others) if of_kind == kind)]


def is_allowed(kind: Kind, name: str) -> bool:
    """Whether a plug-in may be used: it is the package's own, or was named."""
    return name in OWN[kind] or name in _allowed


def check_known(kind: Kind, key: str, name: str) -> None:
    """Raise ValueError, with the setting `key`, unless a plug-in has this name."""
    if is_known(kind, name):
        return
    known = ", ".join(known_names(kind))
    raise ValueError(f"{key}={name!s:.80} is not one of {known}: choose one, or install the package that has it")


def has_settings(name: str) -> bool:
    """Whether a plug-in of this name may have settings: another package has it; it is not imported."""
    return any(entry.partition(".")[2] == name for entry in _installed())


def has(kind: Kind, name: str) -> bool:
    """Whether a plug-in of the package's own is installed: without `tools/` and `integrations/`, the core has none."""
    module = OWN[kind][name].partition(":")[0]
    return Path(__file__).parent.joinpath(*module.split(".")[1:2]).is_dir()


def is_elsewhere(name: str) -> bool:
    """Whether the name of a run begins with a source of models, as `hf:OWNER/NAME` does."""
    source, colon, _ = name.partition(":")
    return bool(colon) and source != "folder" and is_known("models", source)


def load(target: Any) -> Any:
    """What `module:object`, or a module, names; what is no text is returned as it is.

    Raises InputError where the package was installed without it.
    """
    if not isinstance(target, str):
        return target
    name, _, path = target.partition(":")
    try:
        found: Any = import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        raise InputError(f"{name} is not part of this installation: install the whole package") from error
    for attribute in filter(None, path.split(".")):
        found = getattr(found, attribute)
    return found


def install_command(extra: str) -> str:
    """What installs an optional part: its packages by name, as this one may have come from a clone or from an address.

    Where the package was not installed at all, what does so in a clone.
    """
    try:
        requirements = requires("transformer-mt") or []
    except PackageNotFoundError:
        requirements = []
    named = [text.partition(";") for text in requirements]
    of_extra = [package.strip() for package, _, when in named if re.search(rf"extra == ['\"]{extra}['\"]", when)]
    return f"pip install {shlex.join(of_extra or ['-e', f'.[{extra}]'])}"


# ---- those of other packages ----------------------------------------------------------------------------------------

_allowed: set[str] = set()
_imported: dict[str, str] = {}  # packages that have a plug-in which was used, by the first part of its module's name
_settings: dict[str, Mapping[str, str]] = {}  # of each, as they are typed


def allow(*names: str, settings: Mapping[str, Mapping[str, str]] | None = None) -> None:
    """Let plug-ins of other packages be used that have these names, each with its settings here, or its defaults."""
    given = settings or {}
    _allowed.update(names, given)
    _settings.update({name: given.get(name, {}) for name in (*names, *given)})


def versions(names: Iterable[str]) -> dict[str, str]:
    """The versions of the other packages that have a plug-in of one of these names."""
    wanted = set(names)
    named = [entries for name, entries in _installed().items() if name.partition(".")[2] in wanted] if wanted else []
    return {entry.dist.name: entry.dist.version for entries in named for entry in entries if entry.dist is not None}


def package_at_fault(error: BaseException) -> str | None:
    """The other package whose plug-in raised an error, or called what raised it; None: this package's own code did."""
    package = None
    trace = error.__traceback__
    while trace is not None:
        root = _root(trace.tb_frame.f_globals.get("__name__", ""))
        if root == _root(__name__) or root in _imported:
            package = _imported.get(root)  # of the last of these
        trace = trace.tb_next
    return package


@cache
def _installed() -> dict[str, list[EntryPoint]]:
    """The plug-ins of other packages, by kind and name, one of each package that has it; none of the current directory.

    Of a package that lies in several places, Python imports the first.
    """
    here = Path.cwd()
    found: dict[str, dict[str, EntryPoint]] = {}
    for distribution in distributions():
        if _lies_in(distribution, here):
            continue
        for entry in distribution.entry_points:
            if entry.group == GROUP:
                package = re.sub(r"[-_.]+", "-", _package_of(entry)).lower()  # pip takes such names for the same
                found.setdefault(entry.name, {}).setdefault(package, entry)
    return {name: list(entries.values()) for name, entries in found.items()}


def _lies_in(distribution: Distribution, folder: Path) -> bool:
    return Path(str(distribution.locate_file(""))).resolve() == folder.resolve()


def _root(module: str) -> str:
    return module.partition(".")[0]


def _package_of(entry: EntryPoint) -> str:
    return "?" if entry.dist is None else entry.dist.name
