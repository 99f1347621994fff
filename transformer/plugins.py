"""What may be added to the core: a protocol for each kind of thing, and one table of names.

    find("tracker", "wandb")  ->  OWN["tracker"]["wandb"]  ->  the module is imported, and its object returned

`tools/` and `integrations/` are plug-ins of the package's own. Another installed package adds its by entry points of
the group `transformer.plugins`, which are named as the rows here are: `format.po`, `score.length_ratio`. They are read
for a name that is not the package's own, and used where the command line names them: what a run, a checkpoint or a
model says never has code of another package executed. One that is a dataclass has settings, and its instance is used.
docs/plugins.md shows a package of one file.
"""

import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, is_dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, distributions, requires
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, get_type_hints, overload

from transformer.config.primitives import from_json
from transformer.errors import InputError, in_a_line

if TYPE_CHECKING:
    import torch

    from transformer.checkpoint import Checkpoint
    from transformer.config.jobs import TrainJob, TranslateJob
    from transformer.config.settings import BleuTokenizer, ModelConfig, SearchConfig
    from transformer.data.augmentation import Augmentation
    from transformer.data.corpus import Pair
    from transformer.data.source import CorpusRecord
    from transformer.data.tokenizer import Tokenizer
    from transformer.decoding.output import Translation
    from transformer.decoding.stream import Output, Tally
    from transformer.decoding.translator import Translator
    from transformer.evaluation.judgements import JudgedText
    from transformer.records import Judgement
    from transformer.run_dir import RunDir

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


# ---- what is asked of each kind -------------------------------------------------------------------------------------


class Format(Protocol):
    """format: a kind of table, by the ending of its files."""

    def __call__(self, path: Path, columns: tuple[str, str], left_out: Counter[str]) -> "Iterator[Pair]":
        """The pairs of a file; `left_out` counts what else it has, by kind. Raises InputError.

        `columns` are what `src` and `tgt` name, or else the codes of the languages. The file may be compressed:
        `data.corpus.read_lines` and `data.compression.open_bytes` read it as its name says.
        """
        ...


class Corpora(Protocol):
    """corpora: a catalogue of parallel text; `data.train.dataset=NAME:...` names a corpus of it."""

    def find_sides(self, dataset: str, key: str, *, languages: tuple[str, str]) -> tuple[str, str]:
        """The names of the two sides, that of the run's sources first. Raises InputError."""
        ...

    def read_corpus(
        self, dataset: str, setting: str, *, sides: tuple[str, str], folder: Path, write: Callable[[str, str], None]
    ) -> "CorpusRecord":
        """Fetch a corpus into `folder` for the time being, and `write` its pairs. Raises InputError and OSError."""
        ...


class Screen(Protocol):
    """screen: finds pairs that no training should see; `data.filter.doctor=[NAME]` chooses it.

    One object may have several names.
    """

    VERSION: int  # of the verdicts: a prepared corpus depends on it

    def find_faults(
        self,
        read: "Callable[[], Iterable[Pair]]",
        names: Sequence[str],
        languages: tuple[str, str],
    ) -> Iterator[str | None]:
        """For each pair the first of these names that finds a fault in it; `read` gives the pairs anew each time."""
        ...


class Augment(Protocol):
    """augment: changes a pair as text in the wild differs; `data.test.SET.augment=NAME` chooses it.

    The package's own are for training, too: `train.augment.NAME=RATE`.
    """

    def __call__(self, pair: "Pair", languages: tuple[str, str], draw: Callable[[], float]) -> "Pair":
        """The pair, or another one that follows from it and from the numbers that `draw` gives, in [0, 1)."""
        ...


class SearchBackend(Protocol):
    """search: has a `BatchedDecoder` of its own search with a run's model; `search.engine=NAME` chooses it."""

    def check_engine(self, config: "ModelConfig", search: "SearchConfig", device: "torch.device") -> object:
        """Raise InputError, with the key, where it has no such model, or cannot work on this machine."""
        ...

    def with_engine(self, translator: "Translator", run: "RunDir", checkpoint: "Checkpoint") -> "Translator":
        """The translator with such a decoder. Raises InputError and StorageError."""
        ...


class Sink(Protocol):
    """A tracker that shows one training. No method raises, or waits."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Show these values of `step`."""
        ...

    def table(self, step: int, name: str, *, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Show a table of `step`: text as it is."""
        ...


class TrackerFactory(Protocol):
    """tracker: shows trainings; `train.trackers=[NAME]` chooses it."""

    def __call__(
        self, folder: Path, *, run_id: str, settings: Mapping[str, str | float]
    ) -> "AbstractContextManager[Sink]":
        """Begin to show the run of this id, or go on with it, until the end of the context."""
        ...


class ModelSource(Protocol):
    """models: where models are from that are no run of this machine; `NAME:...` names one, as `hf:OWNER/NAME` does.

    `folder` takes a folder that is no run.
    """

    def run_path(self, source: str, key: str) -> Path:
        """The run directory made of what the setting `key` names, on this machine. Raises InputError."""
        ...

    def pinned(self, source: str, key: str) -> str:
        """The same name, with the revision that it has now."""
        ...

    def located(self, job: "TrainJob") -> "TrainJob":
        """The job with `init_from` as a run directory. Raises InputError and StorageError."""
        ...


class Judges(Protocol):
    """judges: other people's metrics, which read files and write scores; `scorer.NAME=COMMAND` names one."""

    def check_judges(self, commands: Mapping[str, str], *, have_sources: bool) -> None:
        """Raise InputError for commands that cannot be asked."""
        ...

    def judge_all(
        self, commands: Mapping[str, str], text: "JudgedText", *, seconds: float, place: str
    ) -> "dict[str, Judgement]":
        """What each judge says of the text; one that fails is a warning, which names the `place` of the text."""
        ...


@dataclass(frozen=True)
class ScoreSettings:
    """How text is to be scored."""

    tgt_lang: str  # the code of its language
    tokenize: "BleuTokenizer | None" = None  # how BLEU cuts it into words; None: by the language
    lowercase: bool = False  # without regard to case


@dataclass(frozen=True)
class Measured:
    """What a metric says of the translations of a set."""

    value: float
    signature: str  # how it was measured: scores compare only where it is the same
    segments: Sequence[float] | None = None  # of each translation, where the value is their mean; None: it is another


# Hypotheses, one list of references or more, and the sources, of as many texts; None where files come without sources.
Measure: TypeAlias = Callable[[Sequence[str], Sequence[Sequence[str]], Sequence[str] | None], Measured]


@dataclass(frozen=True)
class ScoreMetric:
    """score: a metric of translations, by references and sources; `data.scores=[NAME]`, `scores=[NAME]` choose it.

    The systems that `compare` compares are tested by it where it gives the scores of the segments.
    """

    name: str  # for people, such as BLEU; documents know it by the name of the plug-in
    prepare: Callable[[ScoreSettings], Measure]  # raises InputError where it cannot score such text
    digits: int = 2  # behind the point, that are shown
    higher_is_better: bool = True


class LineChecker(Protocol):
    """Counts the lines that are unlike the sources of a training, so that it can be said at the end."""

    def count(self, texts: Sequence[str]) -> "Tally":
        """What there is of these lines."""
        ...

    def warn(self, tally: "Tally", remedy: str) -> None:
        """Log how many of the lines the model was hardly trained for, if any, and what to do about it."""
        ...


class Splitter(Protocol):
    """Cuts lines into sentences, and puts what comes of these into lines again."""

    def split(self, lines: Iterable[str]) -> list[list[str]]:
        """The sentences of each line, at least one."""
        ...

    def join(self, translations: Iterable[str], counts: Iterable[int]) -> list[str]:
        """A line of as many translations as each of these counts says."""
        ...


class PairFilter(Protocol):
    """Makes pairs to train on of text and its translations."""

    def draft(self, sources: Sequence[str], translations: "Sequence[Translation]", *, first_line: int) -> "Output":
        """A row for each translation that is sound by itself; the first source is line `first_line`."""
        ...

    def finish(self, read: "Callable[[], Iterator[str]]") -> "Iterator[Output]":
        """The lines to write; `read` gives the drafts of all blocks, anew each time."""
        ...

    def report(self, tally: "Tally") -> None:
        """Log what was kept, and why the others were dropped."""
        ...


Reference: TypeAlias = str | Callable[..., Any]  # `module:object`, or the object itself


@dataclass(frozen=True)
class Command:
    """command: `transformer NAME key=value ...`. What is given as `module:object` is imported when it is used."""

    takes: str | type  # the dataclass of its keys
    run: Reference  # the job -> what was found
    help: str  # one line
    examples: tuple[str, ...]
    show: Reference | None = None  # what was found -> text for standard output; None: nothing is shown
    write: Reference | None = None  # instead of `show`: job, what was found -> what a sweep makes best, or None
    check: Reference | None = None  # raises for what was found, once it is shown
    goes_on: bool = False  # whether the same command, given again, goes on where it stopped

    @property
    def job(self) -> Any:
        """The dataclass of its keys."""
        return load(self.takes)


# ---- finding them ---------------------------------------------------------------------------------------------------


@overload
def find(kind: Literal["format"], name: str) -> Format: ...
@overload
def find(kind: Literal["corpora"], name: str) -> Corpora: ...
@overload
def find(kind: Literal["screen"], name: str) -> Screen: ...
@overload
def find(kind: Literal["augment"], name: str) -> Augment: ...
@overload
def find(kind: Literal["search"], name: str) -> SearchBackend: ...
@overload
def find(kind: Literal["tracker"], name: str) -> TrackerFactory: ...
@overload
def find(kind: Literal["models"], name: str) -> ModelSource: ...
@overload
def find(kind: Literal["judges"], name: str) -> Judges: ...
@overload
def find(kind: Literal["score"], name: str) -> ScoreMetric: ...
@overload
def find(kind: Literal["lines"], name: Literal["augmentation"]) -> "Callable[..., Augmentation]": ...
@overload
def find(kind: Literal["lines"], name: Literal["check"]) -> "Callable[[Path, Tokenizer], LineChecker]": ...
@overload
def find(
    kind: Literal["lines"], name: Literal["faults"]
) -> "Callable[[Mapping[str, Sequence[Pair]], Mapping[str, tuple[str, str]]], list[str]]": ...
@overload
def find(kind: Literal["lines"], name: Literal["split"]) -> Callable[[Path], Splitter]: ...
@overload
def find(kind: Literal["lines"], name: Literal["keep"]) -> "Callable[[TranslateJob], PairFilter | None]": ...
@overload
def find(kind: Literal["command"], name: str) -> Command: ...
def find(kind: Kind, name: str) -> Any:
    """The plug-in of a kind. Raises InputError, with what to install or to name, if it is not available."""
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
            f"the command line, or call transformer.plugins.allow({name!r})"
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


def load(target: Reference | type) -> Any:
    """What `module:object`, or a module, names. Raises InputError where the package was installed without it."""
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
