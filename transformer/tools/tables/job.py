"""The keys of `transformer table`."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformer.config.jobs import ON_HUB, TrainJob
from transformer.config.settings import at_least, at_most, option, require
from transformer.errors import InputError

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
    "start",
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
            not (self.output or "").startswith(ON_HUB),
            f"output={self.output}: the table and its runs are written there: name a folder of this machine",
        )
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
            self.table not in (*PAPER_TABLES, SCORES) or self.init_from is None,
            f"table={self.table} trains models of its own from their first step on: leave init_from out",
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

    def check_overrides(self, overrides: Sequence[str]) -> None:
        """Refuse what is given of `model` beside `init_from`, or a table of the paper, whose rows have its models.

        Most of it would be lost. A recipe may set such keys.
        """
        super().check_overrides(overrides)
        if self.table not in PAPER_TABLES:
            return
        allowed = tuple(f"model.{name}=" for name in BESIDE_THE_ROWS)
        for override in overrides:
            if override.startswith(("model.", "recipe=")) and not override.startswith(allowed):
                raise InputError(
                    f"{override}: table={self.table} has the paper's models, which this would change; choose width=N, "
                    f"or rows in a file (of the model only {', '.join(BESIDE_THE_ROWS)} can be set for every row)"
                )
