"""What a run writes about itself, typed: run.json, history.json, best.json, results.json, a checkpoint's state.json.

Each document is one dataclass, stored by `to_json` and read back by `from_json`, which refuses a key it does not know,
a missing one and a value of another type. `RunDir` says where each document lies.
"""

import math
import re
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from transformer.config.jobs import TrainJob
from transformer.config.settings import (
    AttentionKernel,
    Device,
    LayoutKind,
    Metric,
    Precision,
    SearchConfig,
    TrainConfig,
    at_least,
    at_most,
    check_names,
    require,
)
from transformer.terminal import printable
from transformer.vocabulary import VocabSize, vocab_size_of

RUN_FORMAT = 2  # of run.json, and so of the directory
CHECKPOINT_FORMAT = 3
MOST_THREADS = 1 << 16  # more than any machine has: a larger number is damage
MOST_RANKS = 1 << 16

# A gradient's norm is a spike if it is above SPIKE times the usual norm, which is a running mean.
SPIKE = 10.0
RECENT = 100  # updates that the running mean looks back on
FIRST_UPDATES = 20  # that cannot be spikes: there is no mean to compare them with yet

# Scores of single dev sets that a training remembers: 8 MB of JSON, and no more than files.JSON_LIMIT is read back.
MOST_SET_SCORES = 40_000


# ---- run.json: what a run was started with --------------------------------------------------------------------------


@dataclass(frozen=True)
class Resolved:
    """The settings that may be automatic, as resolved at the first start; kept when the run resumes elsewhere."""

    device: Device
    precision: Precision
    threads: int
    max_tokens: int
    layout: LayoutKind
    compile: bool
    micro_batch_multiple: int  # a step's micro-batches are a multiple of this: the world size of the first start
    attention_kernel: AttentionKernel | None = None  # None: packed sentences are attended to in groups, or are padded
    loss_rows: int | None = None  # of a block of logits in the loss written in Triton; None: it is not used
    cuda_graphs: bool = False  # whether a step is recorded, and replayed

    @staticmethod
    def upgrade(stored: dict[str, Any]) -> dict[str, Any]:
        """What a run of an earlier version was resolved to: FlexAttention is gone, and no other kernel replaces it."""
        return {**stored, "attention_kernel": None} if stored.get("attention_kernel") == "flex" else stored

    def __post_init__(self) -> None:
        at_least(self, "resolved.", 1, "threads", "max_tokens", "micro_batch_multiple", "loss_rows")
        for name, limit in (("threads", MOST_THREADS), ("micro_batch_multiple", MOST_RANKS)):
            require(getattr(self, name) <= limit, f"resolved.{name}={getattr(self, name)} is above {limit}")


@dataclass(frozen=True)
class Imported:
    """Where a model is from that was not trained here, but imported: see `published`."""

    source: str  # as it was named: a repository of the hub, or a folder
    revision: str | None  # the commit of the hub; None: it was a folder
    licence: str | None  # as the model's card names it
    card: str | None  # the text of its README.md
    sha256: dict[str, str]  # of the files that were read

    def describe(self) -> str:
        """The source, its revision and the licence."""
        revision = f" at revision {self.revision}" if self.revision else ""
        return printable(f"{self.source}{revision}, licence {self.licence or 'unknown'}")


@dataclass(frozen=True)
class Origin:
    """The checkpoint whose weights a run began with."""

    path: str
    step: int
    manifest_sha256: str
    imported: Imported | None = None  # the published model that these weights began from


@dataclass(frozen=True)
class MemoryCheck:
    """The memory that a step with the largest micro-batch needs, found out before the first step."""

    max_tokens: int
    is_estimate: bool  # True on a CPU; on a GPU, a step was tried
    needed: int  # bytes
    available: int  # bytes


@dataclass(frozen=True)
class Proof:
    """What comparing this device with the plain computation has found: see `training.proof`.

    Ways of computing are named as `training.proof.name_of` does, those of searches `searches with ...`. A way that is
    left in `trying` has ended its process.
    """

    device: str
    torch: str
    way: str | None = None  # that was found sound, and is taken; None: none yet
    deviation: float | None = None  # of its gradient from the plain one, relative to that
    trying: str | None = None
    failures: dict[str, str] = field(default_factory=dict)  # ways that are not taken, and why
    search: str | None = None  # the way of searches that was found sound: see `decoding.proof`


@dataclass(frozen=True)
class RunRecord:
    """run.json: written when the run starts, as its device is tried, and when it resumes with other settings.

    `config` and the digests of the development and test sets are those of the last start, all else is of the first.
    """

    format: int
    id: str
    started: str
    versions: dict[str, str]
    data_digest: str
    prepare_version: int
    tokenizer_sha256: str
    init_from: Origin | None
    resolved: Resolved
    config: TrainJob
    memory: MemoryCheck | None = None  # None: not yet checked
    machine: str | None = None  # where it started: processor or GPUs, cores, memory
    commit: str | None = None  # of this package's source, where it is a git checkout
    dev_digest: str | None = None  # of the development set's text
    test_digest: str | None = None  # of the test sets' texts
    proof: Proof | None = None  # None: nothing was compared, as on a CPU
    target_tokenizer_sha256: str | None = None  # None: one tokenizer serves both languages
    imported: Imported | None = None  # None: it was trained here


# ---- history.json: on what a run was trained, and what its numbers came to ------------------------------------------


@dataclass(frozen=True)
class Start:
    """A start of the training, the first or a later one: what the last bits of all that follows depend on."""

    step: int  # steps that were done before
    processor: str  # or GPU
    ranks: int
    resolved: Resolved
    packages: dict[str, str]  # the version of every package that is installed

    def __post_init__(self) -> None:
        at_least(self, "start.", 0, "step")
        at_least(self, "start.", 1, "ranks")


@dataclass(frozen=True)
class Mark:
    """What the training came to at a step."""

    step: int
    loss: float  # smoothed, of this step alone: a mean over its target tokens
    gradient_norm: float
    weights_sha256: str  # after the step: see `training.history.digest_tensors`

    def __post_init__(self) -> None:
        at_least(self, "mark.", 1, "step")


@dataclass(frozen=True)
class History:
    """history.json: what `transformer verify` holds a repeated training to. A start like the one before is left out."""

    starts: list[Start] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    def __post_init__(self) -> None:
        for mark, later in pairwise(self.marks):
            require(mark.step < later.step, f"marks of steps {mark.step}, {later.step} are not in order")

    def before(self, step: int) -> "History":
        """What was written before a step was taken, which is counted from 1."""
        return History(
            starts=[start for start in self.starts if start.step < step - 1],
            marks=[mark for mark in self.marks if mark.step < step],
        )


@dataclass(frozen=True)
class Best:
    """best.json: the best checkpoint so far."""

    step: int
    metric: Metric


# ---- state.json: where training stands ------------------------------------------------------------------------------


@dataclass(frozen=True)
class DevScores:
    """What a dev set came to; losses are means over target tokens."""

    loss: float  # smoothed
    nll: float  # plain
    bleu: float
    chrf: float


@dataclass(frozen=True)
class Validation:
    """One validation; losses are means over target tokens."""

    step: int
    loss: float  # smoothed
    nll: float  # plain
    bleu: float
    chrf: float
    sets: dict[str, DevScores] = field(default_factory=dict)  # of several dev sets, by key; old ones are forgotten

    def __post_init__(self) -> None:
        at_least(self, "validation.", 0, "step")

    @staticmethod
    def upgrade(stored: dict[str, Any]) -> dict[str, Any]:
        """What was written before there could be several dev sets: see `from_json`."""
        return {"sets": {}, **stored}

    @staticmethod
    def of(step: int, sets: dict[str, DevScores]) -> "Validation":
        """The validation by one dev set as it is, that by several by the mean of each number: all count alike."""
        first, *others = sets.values()
        if not others:
            return Validation(step, **vars(first))
        means = {name: fmean(getattr(scores, name) for scores in sets.values()) for name in vars(first)}
        return Validation(step, sets=sets, **means)

    def value(self, metric: Metric) -> float:
        """The value of the metric."""
        return {Metric.bleu: self.bleu, Metric.chrf: self.chrf, Metric.loss: self.loss}[metric]

    def rank_key(self, metric: Metric) -> float:
        """A number to rank validations by: more is better, and what is not finite is worst."""
        value = self.value(metric)
        if not math.isfinite(value):
            return -math.inf
        return value if metric.higher_is_better else -value


@dataclass
class Progress:
    """How far training has come: all that is needed beside weights and moments to go on exactly."""

    step: int = 0  # steps that are done
    epoch: int = 0  # in which the last step was, from 0
    chapter: int = 0  # of that epoch, from 0
    step_in_chapter: int = 0  # of the next step; after the last one of a chapter, that of the next one's first
    sentences: int = 0  # trained on, as are `target_tokens`
    target_tokens: int = 0
    seconds: float = 0.0
    skipped: int = 0  # updates whose gradient was not finite
    streak: int = 0  # consecutive skipped updates, up to the last step
    longest_streak: int = 0
    first_skipped: int | None = None  # the step of the first skipped update, counted from 1
    usual_norm: float = 0.0  # the running mean of the gradient norm, in which a spike counts as SPIKE times the mean
    spikes: int = 0  # applied updates whose gradient had a norm above SPIKE times the usual one
    last_spike: int | None = None  # the step of the last of them
    validations: list[Validation] = field(default_factory=list)

    @staticmethod
    def upgrade(stored: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint holds that was written before an epoch could have chapters: see `from_json`."""
        if "step_in_epoch" not in stored:
            return stored
        kept = {name: value for name, value in stored.items() if name != "step_in_epoch"}
        return {"chapter": 0, "step_in_chapter": stored["step_in_epoch"], **kept}

    def __post_init__(self) -> None:
        at_least(self, "progress.", 0, "step", "epoch", "chapter", "step_in_chapter", "sentences", "target_tokens")
        at_least(self, "progress.", 0, "seconds", "skipped", "streak", "longest_streak", "first_skipped")
        at_least(self, "progress.", 0, "usual_norm", "spikes", "last_spike")
        for name in ("epoch", "chapter", "step_in_chapter", "skipped", "streak", "longest_streak", "spikes"):
            value = getattr(self, name)
            require(value <= self.step, f"progress.{name}={value} is more than the {self.step} steps that are done")

    def advance(self, *, epoch: int, chapter: int, step_in_chapter: int, sentences: int, target_tokens: int) -> None:
        """Count one more step, of this epoch and chapter; `step_in_chapter` is that of the next one."""
        self.step += 1
        self.epoch = epoch
        self.chapter = chapter
        self.step_in_chapter = step_in_chapter
        self.sentences += sentences
        self.target_tokens += target_tokens

    def add_norm(self, norm: float, *, step: int) -> None:
        """Count the update of `step`, counted from 1, by its gradient's norm: skipped, a spike, or neither.

        To be called once for each step, in their order.
        """
        # An update whose gradient is not finite was skipped.
        if not math.isfinite(norm):
            self.skipped += 1
            self.streak += 1
            self.longest_streak = max(self.longest_streak, self.streak)
            self.first_skipped = self.first_skipped or step
            return

        # All others were applied. A spike counts in the mean as no more than makes it one.
        self.streak = 0
        applied = step - self.skipped
        largest = SPIKE * self.usual_norm
        if applied > FIRST_UPDATES and norm > largest:
            self.spikes += 1
            self.last_spike = step
            norm = largest
        self.usual_norm += (norm - self.usual_norm) / min(applied, RECENT)

    def record(self, validation: Validation, metric: Metric) -> bool:
        """Add a validation; returns whether it is better than all before.

        Of several dev sets, older validations keep the mean alone; metrics.jsonl has them all.
        """
        best = max((v.rank_key(metric) for v in self.validations), default=-math.inf)
        is_best = validation.rank_key(metric) > best
        self.validations.append(validation)

        if validation.sets:
            detailed = max(1, MOST_SET_SCORES // len(validation.sets))
            self.validations[:-detailed] = [replace(older, sets={}) for older in self.validations[:-detailed]]
        return is_best

    def best_steps(self, metric: Metric) -> list[int]:
        """The steps of the validations, best first, of equals the earlier one; without those that are not finite."""
        finite = [validation for validation in self.validations if validation.rank_key(metric) > -math.inf]
        ranked = sorted(finite, key=lambda validation: -validation.rank_key(metric))
        return [validation.step for validation in ranked]

    def stalled(self, metric: Metric) -> int:
        """How many validations there were since the best one, of equals the earlier one; all where none is finite."""
        keys = [validation.rank_key(metric) for validation in self.validations]
        best = max(keys, default=-math.inf)
        return len(keys) if best == -math.inf else len(keys) - 1 - keys.index(best)

    def has_ended(self, config: TrainConfig) -> bool:
        """Whether nothing is left to train: the last step is done, or patience has ended."""
        if self.step >= config.max_steps:
            return True
        return config.patience is not None and self.stalled(config.metric) >= config.patience


@dataclass
class WindowTotals:
    """Sums over the steps since the last log line. The first five leave skipped updates out.

    `loss` and `nll` are added up over the ranks, `seconds` and `waited` are those of rank 0. The others are sums over
    whole steps, of all ranks together, and the same on every rank.
    """

    loss: float = 0.0
    nll: float = 0.0
    gradient_norm: float = 0.0
    applied: int = 0  # updates
    applied_tokens: int = 0  # target tokens of them
    target_tokens: int = 0
    source_tokens: int = 0
    slots: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    flops: float = 0.0

    def __post_init__(self) -> None:
        counts = ("applied", "applied_tokens", "target_tokens", "source_tokens", "slots", "seconds", "waited")
        at_least(self, "window.", 0, *counts)


@dataclass(frozen=True)
class LossScale:
    """The state of fp16's gradient scaler."""

    scale: float
    growth_tracker: int

    def __post_init__(self) -> None:
        require(0.0 < self.scale < math.inf, f"loss_scale.scale={self.scale} must be above 0, and finite")
        at_least(self, "loss_scale.", 0, "growth_tracker")


@dataclass(frozen=True)
class TrainingRecord:
    """What a checkpoint holds for the training to go on from it, beside tensors."""

    progress: Progress
    window: WindowTotals
    loss_scale: LossScale | None  # None: the loss is not scaled
    dev_digest: str
    plan_version: int


@dataclass(frozen=True)
class CheckpointState:
    """state.json. `training` is missing from an average, which nothing goes on from."""

    vocab_size: int  # of the target
    data_digest: str
    averaged: list[int] = field(default_factory=list)  # steps whose mean the weights are
    training: TrainingRecord | None = None
    source_vocab_size: int | None = None  # None: it is the target's vocabulary, too

    def __post_init__(self) -> None:
        at_least(self, "", 1, "vocab_size", "source_vocab_size")

    @staticmethod
    def upgrade(stored: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint holds that was written before there could be two vocabularies: see `from_json`."""
        return {"source_vocab_size": None, **stored}

    @property
    def vocab_sizes(self) -> VocabSize:
        """The size of the one vocabulary, or of both."""
        return vocab_size_of(self.vocab_size, self.source_vocab_size)


# ---- results.json ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judgement:
    """What an external judge said of the translations of a test set: see `integrations.judges`."""

    command: str  # as it was typed; where it comes from a file, it is text to show
    version: str | None  # the first line of what it says of its version; None: nothing
    system: float
    segments: list[float]
    sha256: dict[str, str]  # of the texts that it read: src (if there was one), hyp, ref

    def __post_init__(self) -> None:
        require(
            math.isfinite(self.system) and all(map(math.isfinite, self.segments)), "Judgement: a score is not a number"
        )

    def describe(self) -> str:
        """The command, and the version."""
        return printable(f"{self.command}, {'unknown version' if self.version is None else self.version}")


@dataclass(frozen=True)
class NamedScore:
    """A score with all that it takes to show it: the package that measured it may be missing where it is read."""

    name: str
    value: float
    signature: str  # how it was measured
    digits: int  # behind the point, that are shown
    higher_is_better: bool

    def check(self) -> None:
        """Raise ValueError for what cannot be shown in a table, on a page and in a terminal."""
        name = r"\w([\w .+-]{0,38}[\w.+-])?"
        require(re.fullmatch(name, self.name) is not None, f"the name {self.name!r:.80} is none for a score")
        require(math.isfinite(self.value), f"the score {self.name} is not a number")
        can_be_shown = self.signature.isprintable() and "`" not in self.signature and len(self.signature) <= 1000
        require(can_be_shown, f"the signature of {self.name} is not a line of text")
        at_least(self, "score.", 0, "digits")
        at_most(self, "score.", 10, "digits")


@dataclass(frozen=True)
class Scores:
    """Corpus scores of one test set, and how they were computed: see `evaluation.metrics` for their table."""

    bleu: float  # 0 to 100, as all of sacreBLEU's, but for TER, which may be above
    bleu_signature: str  # sacreBLEU's
    chrf: float
    chrf_signature: str
    chrf_plus_plus: float | None = field(default=None, kw_only=True)  # None: written before this was stored
    chrf_plus_plus_signature: str | None = field(default=None, kw_only=True)
    ter: float | None = field(default=None, kw_only=True)  # less is better; None: written before this was stored
    ter_signature: str | None = field(default=None, kw_only=True)
    paper_bleu: float | None = field(default=None, kw_only=True)  # as papers print it; None: not asked for
    paper_bleu_signature: str | None = field(default=None, kw_only=True)
    others: dict[str, NamedScore] = field(default_factory=dict, kw_only=True)  # of plug-ins, by their names
    judges: dict[str, Judgement] = field(default_factory=dict, kw_only=True)  # of `evaluate`: results.json has none

    def __post_init__(self) -> None:
        check_names("others", self.others)
        for score in self.others.values():
            score.check()


@dataclass(frozen=True)
class Results:
    """results.json: the scores of a finished run, with all that they depend on."""

    test_sets: dict[str, Scores]  # of the averaged model, by the name of the set
    averaged: list[int]  # the steps of the checkpoints that it is the mean of
    steps: int
    epochs: int  # before the one in which the last step was
    sentences: int  # pairs that were trained on, each as often as it was
    skipped_updates: int  # that were not finite
    target_tokens: int  # that were trained on, EOS counted
    training_seconds: float
    parameters: int
    search: SearchConfig  # of the test sets
    seed: int
    data_digest: str  # of all that the prepared corpus depends on
    test_digest: str  # of the text of the test sets
    validations: list[Validation]
    dev: Scores | None = None  # where there is no test set: the averaged model, on the dev set
    dev_digest: str | None = None  # of the text of that set, or of those of `devs`
    average: int | None = None  # checkpoints that the average was to be of; None: written before this was stored
    engine: str | None = None  # what searched in place of torch, with its version and type
    devs: dict[str, Scores] = field(default_factory=dict)  # as `dev`, where there are several, by their keys
    mean: dict[str, float] = field(default_factory=dict)  # of each score over the sets, where they are of directions

    def __post_init__(self) -> None:
        check_names("results.test_sets", self.test_sets)
        check_names("results.devs", {name.removeprefix("devs."): scores for name, scores in self.devs.items()})
        at_least(self, "results.", 1, "steps", "sentences", "target_tokens")
        require(bool(self.validations), "results.validations is empty: the last step is always validated")

    @property
    def scores(self) -> dict[str, Scores]:
        """The scores of the sets that the results are of: the test sets, or the dev sets."""
        return self.test_sets or self.devs or ({} if self.dev is None else {"dev": self.dev})

    def best_validation(self, metric: Metric) -> Validation:
        """The best of the validations, the earlier one of equals."""
        return max(self.validations, key=lambda validation: validation.rank_key(metric))
