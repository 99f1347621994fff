"""One class for each command: every key that it takes, with its default. Checks that span sections stand here."""

from dataclasses import dataclass, field

from transformer.config.settings import (
    DataConfig,
    Device,
    Format,
    ModelConfig,
    OnResume,
    PairConfig,
    Precision,
    SearchConfig,
    SearchOverride,
    SweepConfig,
    TokenizerConfig,
    TrainConfig,
    at_least,
    check_names,
    option,
    require,
)


@dataclass
class TrainJob:
    """`transformer train` and `transformer prepare`."""

    run_dir: str = option(
        "runs/base", "everything about the run goes here; the same again resumes", on_resume=OnResume.allow
    )
    init_from: str | None = option(None, "begin with the weights and the tokenizer of this run, or of one checkpoint")
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    search: SearchConfig = field(default_factory=SearchConfig)

    def __post_init__(self) -> None:
        require(bool(self.run_dir), "run_dir must name a directory")
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
    """What `translate` and `evaluate` share."""

    run_dir: str = option("runs/demo", "a directory that `train` made")
    checkpoint: str = option("auto", "averaged, best, last, step-N, or auto (averaged, else last)")
    device: Device = option(Device.auto, "where to compute")
    precision: Precision = option(Precision.auto, "arithmetic of the forward pass (auto: as the run was trained)")
    threads: int | None = option(None, "CPU threads (null: one for each core)")
    search: SearchOverride = field(default_factory=SearchOverride)

    def __post_init__(self) -> None:
        at_least(self, "", 1, "threads")


@dataclass
class TranslateJob(DecodeJob):
    """`transformer translate`."""

    strict: bool = option(False, "refuse a source too long for the model instead of truncating it")


@dataclass
class EvaluateJob(DecodeJob):
    """`transformer evaluate`."""

    test: dict[str, PairConfig] = field(default_factory=dict, metadata={"help": "instead of the run's test sets: "})
    store_dir: str | None = option(None, "where copies of hub data sets are kept (null: beside the run)")
    sweep: SweepConfig = field(default_factory=SweepConfig)
    format: Format = option(Format.text, "for people, or for programs")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("test", self.test)
        require(
            not (self.sweep.is_wanted and self.test),
            "a sweep compares settings on the run's dev set: leave test.NAME for the evaluation that follows",
        )
        for name in ("beam_size", "length_penalty"):
            both = getattr(self.sweep, name) is not None and getattr(self.search, name) is not None
            require(not both, f"search.{name} and sweep.{name} cannot both be set: choose one")


@dataclass
class AverageJob:
    """`transformer average`."""

    run_dir: str = option("runs/demo", "a directory that `train` made")
    last: int | None = option(None, "how many of the newest checkpoints to average (null: the run's train.average)")
    best: int | None = option(None, "instead, how many of the best validated ones that are kept (train.keep_best)")

    def __post_init__(self) -> None:
        at_least(self, "", 1, "last", "best")
        require(self.last is None or self.best is None, f"last={self.last} and best={self.best}: choose one")


@dataclass
class SummaryJob(TrainJob):
    """`transformer summary`."""

    format: Format = option(Format.text, "for people, or for programs")


# The class of job that each command takes.

Job = TrainJob | TranslateJob | EvaluateJob | AverageJob | SummaryJob

JOBS: dict[str, type[Job]] = {
    "prepare": TrainJob,
    "train": TrainJob,
    "translate": TranslateJob,
    "evaluate": EvaluateJob,
    "average": AverageJob,
    "summary": SummaryJob,
}
