"""What preparing reports: which files were read, how many pairs were dropped and why, how many tokens are left.

report.json  BuildReport  beside a store: what every run that uses the store shares
data.json    DataReport   in a run directory: the same, with the run's own files and its development and test sets
"""

from dataclasses import dataclass, field

from transformer.config.primitives import from_json
from transformer.config.settings import FilterConfig
from transformer.data.round_trip import RoundTrip
from transformer.data.source import DatasetOrigin
from transformer.errors import CheckpointError
from transformer.files import read_json
from transformer.run_dir import RunDir
from transformer.vocabulary import VocabSize, vocab_size_of


@dataclass(frozen=True)
class PairCounts:
    """How many pairs a training set has, and how many of them are in the store."""

    pairs_read: int
    pairs_kept: int


@dataclass(frozen=True)
class TokenCounts:
    """Tokens in the store, EOS counted."""

    src: int
    tgt: int


@dataclass(frozen=True)
class LineCounts:
    """What the training sources in the store are as lines, by which others can be seen to be unlike them."""

    several_sentences: int  # sources that seem to have more than one
    usual_pieces: int  # not exceeded by 9,999 of 10,000 sources


@dataclass(frozen=True)
class DroppedPair:
    """A pair that `data.filter.doctor` has dropped."""

    set: int  # which of the training sets it is in, in the order of the store, counted from 0
    line: int  # of all lines of the set, counted from 1
    source: str  # its beginning
    target: str


@dataclass(frozen=True)
class BuildReport:
    """What building a store read, dropped and kept."""

    pairs_read: int
    pairs_kept: int
    sources: list[PairCounts]  # of the training sets, in the order of the store
    dropped: dict[str, int]  # pairs by reason
    filters: FilterConfig
    tokens: TokenCounts
    vocab_size: int  # of the target
    targets: RoundTrip  # of a sample of the training targets
    lines: LineCounts | None = None  # None: prepared when they were not counted
    samples: dict[str, list[DroppedPair]] = field(default_factory=dict)  # the first few, by detector of the doctor


@dataclass(frozen=True)
class FileReport:
    """A file that was read."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class SetReport:
    """A set of sentence pairs: `train`, `dev`, `test.NAME` or `extra.NAME`."""

    files: dict[str, FileReport]  # by the key that names each; of several, `src[0]`, `tgt[0]`, `src[1]`, ...
    columns: list[str] | None  # of a table
    origin: DatasetOrigin | None  # of a copy: of a data set of the hub, or of a corpus of mtdata's
    weight: float | None  # how many copies of each pair an epoch has; None: not trained on
    pairs_read: int
    pairs_kept: int | None  # None: not trained on, and so never filtered
    references: RoundTrip | None  # None: of a training set
    left_out: dict[str, int] = field(default_factory=dict)  # what its files have beside the pairs, by kind


@dataclass(frozen=True)
class DataReport:
    """What a run trains on and is scored on."""

    digest: str  # of all that the store depends on
    src_lang: str
    tgt_lang: str
    sets: dict[str, SetReport]
    pairs_read: int
    pairs_kept: int
    dropped: dict[str, int]  # pairs by reason
    filters: FilterConfig
    tokens: TokenCounts
    vocab_size: int  # of the target
    targets: RoundTrip  # of a sample of the training targets
    lines: LineCounts | None = None  # None: prepared when they were not counted
    source_vocab_size: int | None = None  # None: it is the target's vocabulary, too
    samples: dict[str, list[DroppedPair]] = field(default_factory=dict)  # the first few, by detector of the doctor

    @property
    def vocab_sizes(self) -> VocabSize:
        """The size of the one vocabulary, or of both."""
        return vocab_size_of(self.vocab_size, self.source_vocab_size)


def read_report(run: RunDir) -> DataReport:
    """What a run trained on: its data.json. Raises CheckpointError where it is missing or damaged."""
    try:
        return from_json(DataReport, read_json(run.data))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{run.data}: {reason}: copy it again from where the run came from") from error
