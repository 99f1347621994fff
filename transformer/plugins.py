"""What may be added to the core: what is asked of each kind of plug-in, by a protocol or a dataclass.

`registry` has the table of their names, and finds them. docs/plugins.md shows a package of one file.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from transformer.registry import load

if TYPE_CHECKING:
    import torch

    from transformer.checkpoint import Checkpoint
    from transformer.config.jobs import TrainJob
    from transformer.config.settings import BleuTokenizer, ModelConfig, SearchConfig
    from transformer.data.corpus import Pair
    from transformer.decoding.output import Translation
    from transformer.decoding.stream import Output, Tally
    from transformer.decoding.translator import Translator
    from transformer.records import Judgement
    from transformer.run_dir import RunDir
    from transformer.tracking import Sink


class Format(Protocol):
    """format: a kind of table, by the ending of its files."""

    def __call__(self, path: Path, columns: tuple[str, str], left_out: Counter[str]) -> "Iterator[Pair]":
        """The pairs of a file; `left_out` counts what else it has, by kind. Raises InputError.

        `columns` are what `src` and `tgt` name, or else the codes of the languages. The file may be compressed:
        `data.corpus.read_lines` and `data.compression.open_bytes` read it as its name says.
        """
        ...


@dataclass(frozen=True)
class Download:
    """A file as it was downloaded. mtdata has no digests to compare this one with."""

    url: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class CorpusRecord:
    """What a catalogue says of a corpus, and what came of it."""

    mtdata: str  # the version of mtdata; empty: another catalogue's
    citations: dict[str, str]  # BibTeX entries by key
    licence: str | None  # a name or a URL; None: mtdata does not say
    downloads: list[Download]
    left_out: int  # pairs with an empty side, or that the catalogue calls bad
    revision: str | None = None  # the commit of the hub
    columns: list[str] | None = None  # of the hub, where they are called otherwise than the sides

    @staticmethod
    def upgrade(table: dict[Any, Any]) -> dict[Any, Any]:
        """Before there were test sets by name, a corpus was mtdata's."""
        return {"revision": None, "columns": None, **table}


class Corpora(Protocol):
    """corpora: a catalogue of parallel text; `data.train.dataset=NAME:...` names a corpus of it."""

    def find_sides(self, dataset: str, key: str, *, languages: tuple[str, str]) -> tuple[str, str]:
        """The names of the two sides, that of the run's sources first. Raises InputError."""
        ...

    def read_corpus(
        self, dataset: str, setting: str, *, sides: tuple[str, str], folder: Path, write: Callable[[str, str], None]
    ) -> CorpusRecord:
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


@dataclass(frozen=True)
class JudgedText:
    """What is judged, segment by segment; without sources where files of translations are scored by themselves."""

    sources: Sequence[str] | None
    hypotheses: Sequence[str]
    references: Sequence[str]

    @classmethod
    def of(cls, pairs: Sequence[tuple[str, str]], hypotheses: Sequence[str]) -> "JudgedText":
        """Translations of sentences that have references."""
        return cls([source for source, _ in pairs], hypotheses, [reference for _, reference in pairs])

    def digests(self) -> dict[str, str]:
        """The SHA-256 of each text."""
        texts = {"src": self.sources, "hyp": self.hypotheses, "ref": self.references}
        return {
            name: sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()
            for name, lines in texts.items()
            if lines is not None
        }


class Judges(Protocol):
    """judges: other people's metrics, which read files and write scores; `scorer.NAME=COMMAND` names one."""

    def check_judges(self, commands: Mapping[str, str], *, have_sources: bool) -> None:
        """Raise InputError for commands that cannot be asked."""
        ...

    def judge_all(
        self, commands: Mapping[str, str], text: JudgedText, *, seconds: float, place: str
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
