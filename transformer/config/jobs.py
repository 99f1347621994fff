"""One class for each command: every key that it takes, with its default.

The groups of keys are those of `settings`. Checks that compare keys of several groups are here.
"""

import math
from dataclasses import dataclass, field, fields

from transformer.config.settings import (
    MOST_BEAM,
    Algorithm,
    DataConfig,
    Device,
    Format,
    LineFormat,
    ModelConfig,
    OnResume,
    PairConfig,
    Precision,
    Quantization,
    SampleConfig,
    SearchConfig,
    SearchOverride,
    SweepConfig,
    Target,
    TokenizerConfig,
    TrainConfig,
    WeightsFormat,
    at_least,
    at_most,
    check_names,
    check_tag,
    option,
    require,
)


@dataclass
class TrainJob:
    """`transformer train` and `transformer prepare`."""

    run_dir: str = option(
        "runs/base",
        "directory of everything about the run; the same command again resumes it",
        on_resume=OnResume.allow,
    )
    init_from: str | None = option(
        None, "begin with the weights and the tokenizer of this run directory, or of one checkpoint in it"
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    search: SearchConfig = field(default_factory=SearchConfig)

    def __post_init__(self) -> None:
        require(bool(self.run_dir), "run_dir must name a directory")
        rate = self.train.subword_sampling
        is_bpe = self.tokenizer.model is None and self.tokenizer.algorithm is Algorithm.bpe
        require(
            rate is None or rate <= 1.0 or not is_bpe,
            f"train.subword_sampling={rate}: for BPE it is a probability: give 1 at most",
        )

        # The longest sentence must fit the model, a step and a micro-batch.
        longest = self.data.filter.max_length + 1  # with EOS
        positions = self.model.max_positions
        require(
            longest <= positions,
            f"data.filter.max_length={longest - 1} does not fit model.max_positions={positions}: one more is for EOS",
        )
        for key, budget in (("tokens_per_step", self.train.tokens_per_step), ("max_tokens", self.train.max_tokens)):
            require(
                budget is None or budget >= longest,
                f"train.{key}={budget} cannot hold a sentence of data.filter.max_length={longest - 1} pieces",
            )


@dataclass
class DecodeJob:
    """What `translate`, `score`, `evaluate` and `attention` share."""

    run_dir: str = option("runs/demo", "a directory that `train` made")
    checkpoint: str = option("auto", "averaged, best, last, step-N, or auto (averaged; last where that is newer)")
    device: Device = option(Device.auto, "where to compute")
    precision: Precision = option(
        Precision.auto, "arithmetic of the forward pass (auto: as the run was trained, on a device of the same kind)"
    )
    threads: int | None = option(None, "CPU threads (null: one for each core that it may use)")
    search: SearchOverride = field(default_factory=SearchOverride)

    def __post_init__(self) -> None:
        at_least(self, "", 1, "threads")


@dataclass
class TranslateJob(DecodeJob):
    """`transformer translate`."""

    strict: bool = option(
        False,
        "refuse a line that is too long for the model, or not UTF-8, instead of truncating it or replacing bad bytes",
    )
    ensemble: list[str] = option([], "other runs with the same tokenizer: average the probabilities of all models")
    tag: str | None = option(
        None, "a word in front of each line, such as <2de> where a run has several languages (null: none)"
    )
    prefix: str | None = option(
        None, "a file with the beginning of each translation, whole words, line by line (a blank line: any beginning)"
    )
    sample: SampleConfig = field(default_factory=SampleConfig)
    n_best: int = option(1, "translations of each line, the best first (at most search.beam_size), or samples")
    align: bool = option(
        False,
        "jsonl: add the pieces of source and translation, and source_of, the source piece of each, counted from 0",
    )
    format: LineFormat = option(
        LineFormat.text,
        "text: the translation; tsv: a row for each, with line, rank, log_prob, score (log_prob over the length "
        "penalty) and text, in which tabs and controls become spaces; jsonl: an object for each line, "
        '{"line", "translations": [{"text", "log_prob", "score", "finished"}]}; a blank line has one blank translation '
        "without numbers (jsonl: null)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tag("tag", self.tag)
        at_least(self, "", 1, "n_best")
        at_most(self, "", MOST_BEAM, "n_best")
        require(
            self.n_best == 1 or self.format is not LineFormat.text,
            f"n_best={self.n_best} needs format=tsv or format=jsonl: text is one line for each line of input",
        )
        require(not self.align or self.format is LineFormat.jsonl, "align=true needs format=jsonl")
        require(
            not self.sample.is_wanted or self.search.beam_size is None,
            f"search.beam_size={self.search.beam_size} is for a search, which sample.* replaces: leave one out",
        )


@dataclass
class ScoreJob(DecodeJob):
    """`transformer score`."""

    src: str | None = option(
        None, "a file of sources, plain or .gz, one a line (null: standard input, with the targets)"
    )
    tgt: str | None = option(None, "their translations, line for line (null: standard input, `source TAB target`)")
    ensemble: list[str] = option([], "other runs with the same tokenizer: average the probabilities of all models")
    tag: str | None = option(
        None, "a word in front of each source, such as <2de> where a run has several languages (null: none)"
    )
    pieces: bool = option(False, "jsonl: add the pieces of each target, EOS the last, and the log_prob of each")
    format: LineFormat = option(
        LineFormat.text,
        "text: log_prob; tsv: line, log_prob, score (log_prob over the length penalty), length (pieces, with EOS); "
        'jsonl: {"line", "log_prob", "score", "length"}; a pair with a blank side has no number (jsonl: null)',
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tag("tag", self.tag)
        require((self.src is None) == (self.tgt is None), "src and tgt belong together: set both, or neither")
        require(not self.pieces or self.format is LineFormat.jsonl, "pieces=true needs format=jsonl")
        for name in ("beam_size", "max_extra"):
            value = getattr(self.search, name)
            require(
                value is None, f"search.{name}={value} is for a search, and given translations need none: leave it out"
            )


@dataclass
class ScoredText:
    """The text that is scored."""

    tgt_lang: str | None = option(None, "the language of the translations, an ISO 639 code (null: the run's)")


@dataclass
class EvaluateJob(DecodeJob):
    """`transformer evaluate`: scores of a run, or of files of translations."""

    hypotheses: str | None = option(
        None, "instead of a run: a file of translations to score, one a line (-: standard input)"
    )
    references: list[str] = option([], "their references: a file, or several as [A,B]")
    data: ScoredText = field(default_factory=ScoredText)
    lowercase: bool = option(False, "score without regard to case")
    paper_bleu: bool = option(
        False, "also print BLEU as papers count it: Moses' tokens, words split at hyphens, not smoothed"
    )
    format: Format = option(Format.text, "text for people, or JSON for programs")
    test: dict[str, PairConfig] = field(default_factory=dict)
    store_dir: str | None = option(None, "where copies of hub data sets are kept (null: beside the run)")
    sweep: SweepConfig = field(default_factory=SweepConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("test", self.test)
        for name, pair in self.test.items():
            check_tag(f"test.{name}.tag", pair.tag)

        # Files of translations instead of a run.
        require(
            (self.hypotheses is None) == (not self.references), "hypotheses and references belong together: set both"
        )
        if self.hypotheses is not None:
            require(not self.test, "hypotheses are scored against references: leave test out")
            defaults = EvaluateJob()
            of_run = [*(key.name for key in fields(DecodeJob)), "store_dir"]
            ignored = [name for name in of_run if getattr(self, name) != getattr(defaults, name)]
            require(not ignored, f"hypotheses are scored without a run and its model: leave {', '.join(ignored)} out")
            require(self.data.tgt_lang is not None, "data.tgt_lang is not set: name the language of the hypotheses")
            require(
                not self.sweep.is_wanted, "a sweep translates, and hypotheses are translations already: leave sweep out"
            )

        # A sweep over search settings.
        require(
            not (self.sweep.is_wanted and self.test),
            "a sweep compares settings on the run's dev set: leave test.NAME for the evaluation that follows",
        )
        for name in ("beam_size", "length_penalty"):
            both = getattr(self.sweep, name) is not None and getattr(self.search, name) is not None
            require(not both, f"search.{name} and sweep.{name} cannot both be set: choose one")


@dataclass
class AttentionJob(DecodeJob):
    """`transformer attention`: the weights of one sentence, or what each head does over many."""

    text: str | None = option(None, "the sentence to look at")
    target: str | None = option(None, "its translation (null: the model's own)")
    file: str | None = option(None, "instead of text: a file with a sentence a line")
    references: str | None = option(None, "with file: its translations, which the model then reads instead of its own")
    set: str | None = option(None, "instead of text: a set that the run keeps (null: dev, without text and file)")
    forced: bool = option(False, "with a set: read its references instead of translating")
    line: int = option(1, "which sentence of the file or the set, counted from 1")
    sentences: int | None = option(
        None, "instead of one sentence: what each head does over this many sentences, the first ones"
    )
    alignments: str | None = option(
        None, "with sentences: their word alignments, such as 0-0 1-2 on a line; measures the error rate of each layer"
    )
    output: str = option("attention", "directory that the files go to")
    format: WeightsFormat = option(WeightsFormat.json, "of the file with the weights")
    layers: list[int] | None = option(None, "figures of these layers only, such as 5,6, counted from 1 (null: all)")
    heads: list[int] | None = option(None, "figures of these heads only, counted from 1 (null: all)")
    word: str | None = option(None, "figures only of what this word attends to (null: of all words)")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, "", 1, "line", "sentences")

        # Where the sentences come from, and the translations that the model reads.
        given = [name for name in ("text", "file", "set") if getattr(self, name) is not None]
        require(len(given) <= 1, f"{' and '.join(given)} are set: choose one")
        require(self.target is None or self.text is not None, "target is the translation of text: set text, too")
        require(self.references is None or self.file is not None, "references belong to file: set file, too")
        has_set = self.text is None and self.file is None
        require(has_set or not self.forced, "forced=true reads the references of a set: leave text and file out")
        require(self.sentences is None or self.text is None, "sentences are taken from file or set: leave text out")

        # What is drawn, and what is measured.
        for name in ("layers", "heads"):
            numbers = getattr(self, name)
            require(numbers is None or min(numbers, default=0) >= 1, f"{name}={numbers}: {name} are counted from 1")
        if self.alignments is not None:
            require(self.sentences is not None, "alignments are for many sentences: set sentences, too")
            has_references = self.references is not None or self.forced
            require(has_references, "alignments are of references: set forced=true, or references=FILE")


@dataclass
class CompareJob:
    """`transformer compare`: runs, or files of translations, each with the first one."""

    runs: list[str] = option([], "run directories, the first one the baseline; `compare runs/a runs/b` sets this")
    hypotheses: list[str] = option([], "instead of runs: files of translations, one a line, as [A,B]")
    references: list[str] = option([], "their references: a file, or several as [A,B]")
    data: ScoredText = field(default_factory=ScoredText)
    lowercase: bool = option(False, "score without regard to case")
    changed: int = option(5, "show this many of the sentences whose translations changed most")
    format: Format = option(Format.text, "text (Markdown) for people, or JSON for programs")

    def __post_init__(self) -> None:
        at_least(self, "", 0, "changed")
        require(not (self.runs and self.hypotheses), "runs and hypotheses: choose one")
        require(bool(self.hypotheses) == bool(self.references), "hypotheses and references belong together: set both")
        if self.hypotheses:
            require(self.data.tgt_lang is not None, "data.tgt_lang is not set: name the language of the hypotheses")


@dataclass
class ReportJob:
    """`transformer report`: a page on one run, or on several side by side."""

    runs: list[str] = option([], "run directories; `report runs/a runs/b` sets this")
    output: str = option("report.html", "the page to write")
    samples: int = option(20, "number of sentences shown of each test set, from the best to the worst")
    checkpoints: int = option(
        5, "number of the kept checkpoints with which to translate the dev set, for the intervals of their BLEU"
    )
    attention: int = option(2, "number of dev sentences in which to show who attends to whom")
    device: Device = option(Device.auto, "where to translate")
    threads: int | None = option(None, "CPU threads (null: one for each core that it may use)")

    def __post_init__(self) -> None:
        at_least(self, "", 0, "samples", "checkpoints", "attention")
        at_least(self, "", 1, "threads")
        at_most(self, "", 200, "samples")
        at_most(self, "", 50, "checkpoints")
        at_most(self, "", 20, "attention")
        require(len(self.runs) <= 10, f"{len(self.runs)} runs: a page has room for 10")
        require(bool(self.output), "output must name a file")


@dataclass
class AverageJob:
    """`transformer average`."""

    run_dir: str = option("runs/demo", "a directory that `train` made")
    last: int | None = option(
        None,
        "average the last so many checkpoints that were due by train.save_every (null: the run's train.average)",
    )
    best: int | None = option(None, "instead, how many of the best validated ones that are kept (train.keep_best)")
    format: Format = option(Format.text, "text for people, or JSON for programs")

    def __post_init__(self) -> None:
        at_least(self, "", 1, "last", "best")
        require(self.last is None or self.best is None, f"last={self.last} and best={self.best}: choose one")


@dataclass
class SummaryJob(TrainJob):
    """`transformer summary`."""

    run: str | None = option(
        None, "summarise this run directory, with the speed that it had, instead of these settings"
    )
    tokens_per_second: float | None = option(None, "target tokens a second, to estimate the hours from")
    rates: str | None = option(
        None, "file with the time of a FLOP, a byte and a parameter on a machine, from scripts/benchmark/predict.py"
    )
    format: Format = option(Format.text, "text for people, or JSON for programs")

    def __post_init__(self) -> None:
        super().__post_init__()
        speed = self.tokens_per_second
        require(speed is None or 0 < speed < math.inf, f"tokens_per_second={speed} must be above 0, and finite")


@dataclass
class DoctorJob(TrainJob):
    """`transformer doctor`: the training that these settings describe, examined before it is begun."""

    text_only: bool = option(False, "examine the text files only: prepare nothing, and try no model")
    format: Format = option(Format.text, "text for people, or JSON for programs")


@dataclass
class ReplayJob:
    """`transformer replay`."""

    run_dir: str = option("runs/demo", "a directory that `train` made")
    step: int | None = option(
        None, "the step to run again, counted from 1 (null: the first bad one after the newest checkpoint)"
    )
    format: Format = option(Format.text, "text for people, or JSON for programs")

    def __post_init__(self) -> None:
        at_least(self, "", 1, "step")


@dataclass
class ExportJob:
    """`transformer export`."""

    run_dir: str = option("runs/demo", "a directory that `train` made")
    checkpoint: str = option("auto", "averaged, best, last, step-N, or auto (averaged; last where that is newer)")
    to: Target = option(Target.ctranslate2, "what the exported model is for")
    output: str | None = option(None, "the directory to make (null: RUN_DIR-TO)")
    quantization: Quantization = option(Quantization.float32, "the type of the weights; float32 alone is exact")
    sentences: int = option(200, "check the exported model on this many sentences")
    src: str | None = option(None, "a text file with these sentences (null: the run's dev set, else a test set)")
    tgt: str | None = option(None, "their references, line by line")
    threads: int | None = option(None, "CPU threads (null: one for each core that it may use)")
    format: Format = option(Format.text, "text for people, or JSON for programs")
    search: SearchOverride = field(default_factory=SearchOverride)

    def __post_init__(self) -> None:
        at_least(self, "", 1, "sentences", "threads")
        require(self.output != "", "output must name a directory")
        require(self.tgt is None or self.src is not None, "tgt has the references of src: set both")
        require(
            self.quantization is Quantization.float32 or self.to is Target.ctranslate2,
            f"quantization={self.quantization.name} is for to=ctranslate2: leave it out",
        )


PAPER_TABLES = ("1", "2", "3")
SCORES = "scores"  # the study of the attention scores that section 3.2.1 compares in words only

# Keys of `model` that no row of the paper's tables changes: where the user sets one of these, it holds in every row.
BESIDE_THE_ROWS = (
    "norm",
    "score",
    "activation",
    "attention_dropout",
    "relu_dropout",
    "max_positions",
    "tie_embeddings",
)


@dataclass
class TableJob(TrainJob):
    """`transformer table`: the corpus, the budget and the search are those of every row."""

    table: str = option(
        "3",
        "1, 2 or 3: a table of the paper; scores: each attention score at each d_k; a YAML file with rows of your "
        "own; or a folder of runs, such as a sweep's",
    )
    output: str | None = option(
        None, "where the table and its runs go (null: RUN_DIR-tableN, RUN_DIR-NAME, or the folder of runs itself)"
    )
    rows: str | None = option(None, "only rows whose names begin like this, such as base,A,D (null: all)")
    width: int | None = option(
        None, "tables of the paper: d_model of its base model; other widths in proportion (null: 512)"
    )
    seeds: int = option(1, "train each row this many times, with train.seed, train.seed + 1, ...")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, "", 1, "width", "seeds")
        at_most(self, "", 1 << 20, "width")
        last_seed = self.train.seed + self.seeds - 1
        require(last_seed < 2**63, f"train.seed={self.train.seed}: the last of seeds={self.seeds} would be too large")
        require(
            self.table != "1" or (self.rows is None and self.seeds == 1),
            "table=1 trains nothing: leave rows and seeds out",
        )

        # The study of scores.
        require(
            self.table != SCORES or self.model.d_model % 8 == 0,
            f"model.d_model={self.model.d_model} must be a multiple of 8, the smallest d_k of table={SCORES}",
        )
        require(
            self.table != SCORES or self.init_from is None,
            f"table={SCORES} compares trainings from their first step on: leave init_from out",
        )

        # The tables of the paper at another width.
        require(
            self.width is None or self.width % 32 == 0,
            f"width={self.width} must be a multiple of 32: the paper's smallest heads are d_model / 32 wide",
        )
        require(
            self.width is None or self.table != SCORES,
            f"width={self.width} is for the tables of the paper: set model.d_model for table={SCORES}",
        )
        require(
            self.width is None or self.table in PAPER_TABLES,
            f"width={self.width} is for the tables of the paper: write the widths into the rows of {self.table}",
        )


# ---- the class of job that each command takes -----------------------------------------------------------------------

Job = (
    TrainJob
    | TranslateJob
    | ScoreJob
    | EvaluateJob
    | CompareJob
    | ReportJob
    | AverageJob
    | SummaryJob
    | DoctorJob
    | ReplayJob
    | ExportJob
    | TableJob
    | AttentionJob
)

JOBS: dict[str, type[Job]] = {
    "prepare": TrainJob,
    "train": TrainJob,
    "translate": TranslateJob,
    "score": ScoreJob,
    "evaluate": EvaluateJob,
    "compare": CompareJob,
    "report": ReportJob,
    "average": AverageJob,
    "summary": SummaryJob,
    "doctor": DoctorJob,
    "replay": ReplayJob,
    "export": ExportJob,
    "table": TableJob,
    "attention": AttentionJob,
}
