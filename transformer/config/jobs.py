"""One class for each command of the core, with every key and its default; a tool keeps its class beside its code.

The groups of keys are those of `settings`. Checks that compare keys of several groups are here.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar, TypeVar

from transformer.config.primitives import validated_copy
from transformer.config.settings import (
    MOST_BEAM,
    SAMPLES_TO_RERANK,
    TORCH,
    Algorithm,
    BleuTokenizer,
    DataConfig,
    Device,
    Format,
    LineFormat,
    ModelConfig,
    OnResume,
    PairConfig,
    Precision,
    Rerank,
    SampleConfig,
    Score,
    SearchConfig,
    SearchOverride,
    SweepConfig,
    TokenizerConfig,
    TrainConfig,
    at_least,
    at_most,
    check_names,
    check_pair,
    check_tag,
    option,
    require,
)
from transformer.errors import InputError
from transformer.registry import check_known, has_settings

J = TypeVar("J", bound="Job")

MOST_PARTS = 256  # of a corpus: a prepared one keeps two files of each open
ON_HUB = "hf:"  # begins the name of what is on the Hugging Face hub
OF_PLUGINS = "the setting KEY of the plug-in NAME of another package"

# Settings of the model that its weights do not depend on: of `max_positions`, where positions are computed.
OF_TRAINING = frozenset({"dropout", "attention_dropout", "relu_dropout", "max_positions"})


def check_settings(settings: Mapping[str, Mapping[str, str]]) -> None:
    """Raise ValueError for settings of a plug-in that no installed package has."""
    for name, keys in settings.items():
        key = next(iter(keys), "KEY")
        require(
            has_settings(name),
            f"plugins.{name}.{key}: no installed package has a plug-in {name!r:.80}: install it, or leave the key out",
        )


class Job:
    """What a command is to do: a dataclass with a field for every key."""

    # Keys whose runs on the hub are shown or recorded: they keep their address, with the commit.
    PINNED: ClassVar[tuple[str, ...]] = ("runs",)

    def check_overrides(self, overrides: Sequence[str]) -> None:
        """Raise InputError for an override (`key=value`) that this job would silently lose."""

    def check_plugins(self) -> None:
        """Raise ValueError for the name of a plug-in that is not installed.

        Asked of what somebody wants done, and not of what a run says: that can be read where its plug-ins are missing.
        """


def checked(kind: type[J], job: object) -> J:
    """A job as it is now: a Python user may have changed its fields since it was checked. Raises InputError."""
    if not isinstance(job, kind):
        raise InputError(f"expected a {kind.__name__}, not a {type(job).__name__}: make one with transformer.compose")
    try:
        again = validated_copy(type(job), job, "job")
        again.check_plugins()
        return again
    except ValueError as error:
        raise InputError(str(error)) from error


def check_here(run_dir: str, why: str) -> None:
    """Raise ValueError for a run directory that is none, or on the hub where it must be here: `why` says so."""
    require(bool(run_dir), "run_dir must name a directory")
    require(not run_dir.startswith(ON_HUB), f"run_dir={run_dir}: {why}")


def check_score_names(names: Sequence[str]) -> None:
    """Raise ValueError for a name in `scores` that is none of a score of a plug-in."""
    for name in names:
        check_known("score", "scores", name)


@dataclass
class TrainJob(Job):
    """`transformer train`; `transformer prepare` takes the same keys, and one more."""

    run_dir: str = option(
        "runs/base",
        "directory that holds all of the run; the same command resumes it",
        on_resume=OnResume.allow,
    )
    init_from: str | None = option(
        None,
        "begin with the model and the tokenizer of this run directory, of one checkpoint in it, or of a published "
        "model: a folder of Hugging Face's Marian, or hf:OWNER/NAME[@REVISION] (model.* is then that model's, except "
        "dropout and max_positions)",
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    plugins: dict[str, dict[str, str]] = field(default_factory=dict, metadata={"help": OF_PLUGINS})

    @staticmethod
    def upgrade(stored: dict[str, Any]) -> dict[str, Any]:
        """What a run was started with before plug-ins had settings: see `from_json`."""
        return {"plugins": {}, **stored}

    def check_overrides(self, overrides: Sequence[str]) -> None:
        """Refuse what would be lost: the model's keys beside `init_from`, a scale beside an experiment's rate."""
        given = {override.lstrip("+").partition("=")[0]: override for override in overrides}
        scale = given.get("train.learning_rate_scale")
        rate = self.train.learning_rate
        if scale is not None and rate is not None and "train.learning_rate" not in given:
            raise InputError(
                f"{scale}: no effect while train.learning_rate={rate} sets the peak: add train.learning_rate=null"
            )
        for key, override in given.items():
            group, _, name = key.partition(".")
            if self.init_from is not None and group == "model" and name not in OF_TRAINING:
                raise InputError(
                    f"{override}: init_from={self.init_from} brings its own model: leave model.{name} out; of "
                    f"model.*, only these may be set: {', '.join(sorted(OF_TRAINING))}"
                )

    def __post_init__(self) -> None:
        check_here(
            self.run_dir,
            f"a training writes into its run directory: name one of this machine; init_from={self.run_dir} begins "
            "with the model of that one",
        )
        rate = self.train.subword_sampling
        models = self.tokenizer.models().values()
        is_bpe = any(model.model is None and model.algorithm is Algorithm.bpe for model in models)
        require(
            rate is None or rate <= 1.0 or not is_bpe,
            f"train.subword_sampling={rate}: for BPE it is a probability: give 1 at most",
        )
        is_char = self.tokenizer.model is None and self.tokenizer.algorithm is Algorithm.char
        require(
            rate is None or not is_char,
            f"train.subword_sampling={rate} cuts pieces, and tokenizer.algorithm=char has none to cut: leave one out",
        )

        require(
            self.search.engine == TORCH or self.model.score is not Score.additive,
            f"search.engine={self.search.engine} has no additive attention (model.score=additive): "
            "set search.engine=torch",
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

    def check_plugins(self) -> None:
        """See `Job.check_plugins`."""
        check_settings(self.plugins)
        check_known("search", "search.engine", self.search.engine)
        for name in self.train.trackers or ():
            check_known("tracker", "train.trackers", name)
        for name in self.data.filter.doctor or ():
            check_known("screen", "data.filter.doctor", name)


@dataclass
class PrepareJob(TrainJob):
    """`transformer prepare`."""

    part: str | None = option(
        None,
        "encode one part of the corpus, 0/N to N-1/N, each with a command of its own, on any machine that shares the "
        "disk; 0/N goes first and trains the tokenizer; a part that comes too early ends with status 75; without "
        "part, all are joined",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.share()

    def share(self) -> tuple[int, int] | None:
        """The number of the part, counted from 0, and how many there are; None: all of the corpus."""
        if self.part is None:
            return None
        match = re.fullmatch(r"(\d{1,4})/(\d{1,4})", str(self.part))
        number, parts = (int(match[1]), int(match[2])) if match else (0, 0)
        require(
            number < parts <= MOST_PARTS,
            f"part={self.part}: write K/N, such as 3/64: part K of N, counted from 0, of {MOST_PARTS} at most",
        )
        return number, parts


@dataclass
class DecodeJob(Job):
    """What `translate`, `score`, `evaluate` and `attention` share."""

    run_dir: str = option("runs/demo", "a directory that `train` made, or a run on the hub: hf:OWNER/NAME[@REVISION]")
    checkpoint: str = option("auto", "averaged, best, last, step-N, or auto (averaged; last where that is newer)")
    device: Device = option(Device.auto, "where to compute")
    precision: Precision = option(
        Precision.auto, "arithmetic of the forward pass (auto: as the run was trained, on a device of the same kind)"
    )
    threads: int | None = option(None, "CPU threads (null: one for each core that it may use, OMP_NUM_THREADS at most)")
    search: SearchOverride = field(default_factory=SearchOverride)
    plugins: dict[str, dict[str, str]] = field(default_factory=dict, metadata={"help": OF_PLUGINS})

    def check_plugins(self) -> None:
        """See `Job.check_plugins`."""
        check_settings(self.plugins)

    def __post_init__(self) -> None:
        at_least(self, "", 1, "threads")


@dataclass
class TranslateJob(DecodeJob):
    """`transformer translate`."""

    input: str | None = option(
        None, "a file to translate, plain or compressed, instead of standard input; with output, several ranks share it"
    )
    output: str | None = option(
        None,
        "the file to write, compressed by its name (.gz, .zst, ...); it is complete or absent, and the same command "
        "resumes where it stopped (null: standard output)",
    )
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
    split: bool = option(
        False,
        "translate each line sentence by sentence, and put the translations into one line (needs the extra split)",
    )
    sample: SampleConfig = field(default_factory=SampleConfig)
    n_best: int = option(1, "translations of each line, the best first (at most search.beam_size), or samples")
    rerank: Rerank | None = option(
        None,
        "print first the translation that has the most in common with the others of its line, by chrF or by BLEU "
        "(minimum Bayes risk; it compares the best of the search, or samples; jsonl adds expected_score)",
    )
    candidates: int | None = option(
        None,
        f"how many translations of each line rerank compares (null: search.beam_size, or {SAMPLES_TO_RERANK} samples)",
    )
    keep: float | None = option(
        None,
        "write pairs to train on into output, a .tsv or .jsonl with a column for each language: of the translations "
        "that are complete, of usual length and neither copies nor loops, this share, with the best log-probability "
        "per piece (null: translations, line for line)",
    )
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
        require(
            self.output is None or self.input is not None,
            f"output={self.output} needs input=FILE: standard input cannot be read again after a kill",
        )
        self._check_keep()
        at_least(self, "", 1, "n_best")
        at_least(self, "", 2, "candidates")
        at_most(self, "", MOST_BEAM, "n_best", "candidates")
        require(self.candidates is None or self.rerank is not None, "candidates is for rerank=chrf or rerank=bleu")
        is_enough = self.candidates is None or self.n_best <= self.candidates
        require(is_enough, f"n_best={self.n_best} must be at most candidates={self.candidates}")
        require(
            self.n_best == 1 or self.format is not LineFormat.text,
            f"n_best={self.n_best} needs format=tsv or format=jsonl: text is one line for each line of input",
        )
        require(not self.align or self.format is LineFormat.jsonl, "align=true needs format=jsonl")
        require(
            not self.split or self.format is LineFormat.text,
            f"split=true needs format=text: format={self.format.name} has the score of a whole line",
        )
        require(
            not self.split or (self.prefix is None and self.rerank is None and not self.sample.is_wanted),
            "split=true translates by search, sentence by sentence: leave prefix, rerank and sample out",
        )
        require(
            not self.sample.is_wanted or self.search.beam_size is None,
            f"search.beam_size={self.search.beam_size} is for a search, which sample.* replaces: leave one out",
        )
        if self.search.engine not in (None, TORCH):
            for key, is_set in (
                ("sample.*", self.sample.is_wanted),
                ("ensemble", self.ensemble),
                ("align", self.align),
            ):
                require(not is_set, f"{key} needs torch: leave it out, or set search.engine=torch")

    def _check_keep(self) -> None:
        if self.keep is None:
            return
        require(0.0 < self.keep <= 1.0, f"keep={self.keep} must be above 0, and at most 1: the share of lines to keep")
        both = self.input is not None and self.output is not None
        require(both, f"keep={self.keep} chooses only after everything is translated: set input=FILE output=FILE")
        for key, is_set in (
            ("format", self.format is not LineFormat.text),
            ("n_best", self.n_best > 1),
            ("align", self.align),
            ("split", self.split),
        ):
            require(not is_set, f"keep={self.keep} writes pairs of a line and its translation: leave {key} out")


@dataclass
class ScoreJob(DecodeJob):
    """`transformer score`."""

    src: str | None = option(
        None,
        "a file of sources, plain or compressed, one a line (null: standard input, with the targets)",
    )
    tgt: str | None = option(None, "their translations, line for line (null: standard input, `source TAB target`)")
    output: str | None = option(
        None,
        "the file to write, compressed by its name (.gz, .zst, ...); it is complete or absent, and the same command "
        "resumes where it stopped (null: standard output)",
    )
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
        require(
            self.output is None or self.src is not None,
            f"output={self.output} needs src=FILE and tgt=FILE: standard input cannot be read again after a kill",
        )
        require(not self.pieces or self.format is LineFormat.jsonl, "pieces=true needs format=jsonl")
        for name in ("beam_size", "max_extra", "engine", "engine_type", "cuda_graphs"):
            value = getattr(self.search, name)
            shown = value.name if isinstance(value, Enum) else value
            require(
                value is None, f"search.{name}={shown} is for a search, and given translations need none: leave it out"
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
    sources: str | None = option(None, "their sources, for scores and scorers that read them")
    data: ScoredText = field(default_factory=ScoredText)
    bleu_tokenize: BleuTokenizer | None = option(
        None, "how BLEU splits text into words, by sacreBLEU's names (null: as the run, else by the language)"
    )
    lowercase: bool = option(False, "score without regard to case")
    scores: list[str] = option([], "scores of other installed packages, in addition to this package's and the run's")
    paper_bleu: bool = option(
        False, "also print BLEU as papers count it: Moses' tokens, words split at hyphens, not smoothed"
    )
    format: Format = option(Format.text, "text for people, or JSON for programs")
    test: dict[str, PairConfig] = field(default_factory=dict)
    store_dir: str | None = option(None, "where copies of data sets are kept (null: beside the run)")
    scorer: dict[str, str] = field(
        default_factory=dict,
        metadata={"help": "the command of an external judge, with {src}, {hyp}, {ref} and {out}: see docs/judges.md"},
    )
    scorers: str | None = option(None, "a YAML file with a line `NAME: COMMAND` for each of several judges")
    scorer_seconds: float = option(3600.0, "seconds after which a judge is stopped; its scores are then missing")
    sweep: SweepConfig = field(default_factory=SweepConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("test", self.test)
        check_names("scorer", self.scorer)
        check_score_names(self.scores)
        require(0.0 < self.scorer_seconds < math.inf, f"scorer_seconds={self.scorer_seconds} must be above 0")
        require(self.sources is None or self.hypotheses is not None, "sources belong to hypotheses: set both")
        for name, pair in self.test.items():
            check_pair(f"test.{name}", pair)

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
        has_judge = bool(self.scorer) or self.scorers is not None
        require(not (self.sweep.is_wanted and has_judge), "a sweep compares settings by BLEU: leave scorer out")
        require(not (self.sweep.is_wanted and self.scores), "a sweep compares settings by BLEU: leave scores out")
        for name in ("beam_size", "length_penalty"):
            both = getattr(self.sweep, name) is not None and getattr(self.search, name) is not None
            require(not both, f"search.{name} and sweep.{name} cannot both be set: choose one")

    def score_names(self) -> list[str]:
        """The scores that are asked for beside those of every evaluation."""
        return [*self.scores, *(["paper_bleu"] if self.paper_bleu else [])]


@dataclass
class AverageJob(Job):
    """`transformer average`."""

    run_dir: str = option("runs/demo", "a directory that `train` made")
    last: int | None = option(
        None,
        "average this many checkpoints, the last that were due by train.save_every (null: the run's train.average)",
    )
    best: int | None = option(
        None, "instead, average this many of the kept checkpoints with the best validations (train.keep_best)"
    )
    format: Format = option(Format.text, "text for people, or JSON for programs")

    def __post_init__(self) -> None:
        check_here(self.run_dir, "an average is of the checkpoints of a training, which are not on the hub")
        at_least(self, "", 1, "last", "best")
        require(self.last is None or self.best is None, f"last={self.last} and best={self.best}: choose one")
