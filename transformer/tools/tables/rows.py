"""The rows of a table before they are trained: each has a name, what it changes, and the job of its training.

    table=2, 3        the experiments of the package, at any width, with the paper's figures
    table=scores      each attention score at each d_k
    table=rows.yaml   rows of the user's own

Corpus, budget and search are the command's in every row. `make` trains and measures them.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from transformer.config.compose import compose_job, read_rows
from transformer.config.jobs import TrainJob
from transformer.config.keys import leaves
from transformer.config.primitives import to_json
from transformer.config.settings import ModelConfig, Score
from transformer.errors import InputError
from transformer.tools.tables.grid import Changes, describe_changes, differences, with_changes
from transformer.tools.tables.job import BESIDE_THE_ROWS, PAPER_TABLES, SCORES, TableJob
from transformer.tools.tables.paper import TABLE_2, TABLE_3, Published

DEVELOPMENT = "development"  # the dev set where it is scored as a test set: beam search, once, at the end
PAPER_WIDTH = 512
BUDGET = ("max_steps", "save_every", "validate_every", "keep_last", "average")  # the user's, not an experiment's

Value = TypeVar("Value")  # what a table knows of a row before its job is made


@dataclass(frozen=True)
class Row:
    """One row before it is trained."""

    name: str
    changes: str  # as one types them; none in the row that the others are compared with
    published: Published | None
    job: TrainJob  # run directory and seed are still those of the command


def is_folder(job: TableJob) -> bool:
    """Whether the table is of the runs in a folder."""
    return job.table not in (*PAPER_TABLES, SCORES) and Path(job.table).is_dir()


def output_of(job: TableJob) -> Path:
    """The folder that the table goes to.

    The table of a folder of runs goes into that folder. Any other goes beside the run directory of the job.
    """
    if is_folder(job):
        return Path(job.output or job.table)
    name = f"table{job.table}" if job.table in PAPER_TABLES else Path(job.table).stem
    return Path(job.output or f"{Path(job.run_dir)}-{name}")


def rows_of(job: TableJob) -> list[Row]:
    """The rows that the job asks for, in the table's order. Raises InputError for an unknown or a bad row."""
    given = _train_job(job)
    match job.table:
        case "2":
            return _published_rows(given, _chosen(TABLE_2, job.rows), width=job.width or PAPER_WIDTH)
        case "3":
            return _published_rows(_scored_on_dev(given), _chosen(TABLE_3, job.rows), width=job.width or PAPER_WIDTH)
        case _ if job.table == SCORES:
            return _score_rows(given, job.rows)
        case _:
            return _rows_of_file(given, job.table, job.rows)


def _train_job(job: TableJob) -> TrainJob:
    """The keys of the job that every training has."""
    return TrainJob(**{field.name: getattr(job, field.name) for field in fields(TrainJob)})


def _chosen(rows: Mapping[str, Value], wanted: str | None) -> dict[str, Value]:
    """The rows of the wanted names, or whose names begin like them, in the table's order; None: all.

    Raises InputError for a name that no row has.
    """
    if wanted is None:
        return dict(rows)

    chosen: set[str] = set()
    for name in wanted.split(","):
        matching = _matching(name, rows)
        if not matching:
            raise InputError(f"rows={wanted}: no row begins with {name!r}; there are {', '.join(rows)}")
        chosen |= set(matching)
    return {name: row for name, row in rows.items() if name in chosen}


def _matching(wanted: str, names: Collection[str]) -> list[str]:
    """The row of this name; if there is none, the rows whose names begin like it."""
    if wanted in names:
        return [wanted]
    return [name for name in names if wanted and name.startswith(wanted)]


# ---- the paper's tables ---------------------------------------------------------------------------------------------


def _published_rows(given: TrainJob, published: Mapping[str, Published], *, width: int) -> list[Row]:
    """Rows of a table of the paper: model and recipe are those of the row's experiment, all else as it was given."""
    base = _experiment("base")
    base_model = _at_width(base.model, width)
    in_every_row = beside_the_rows(given.model)

    rows = []
    for name, figures in published.items():
        experiment = _experiment(name)
        model = _at_width(experiment.model, width)
        recipe = differences(to_json(base.train), to_json(experiment.train))
        recipe = {key: value for key, value in recipe.items() if key not in BUDGET}

        # What the row shows are its differences from base; what is trained is all of its model.
        changes = describe_changes({"model": differences(to_json(base_model), to_json(model)), "train": recipe})
        settings = {"model": {**to_json(model), **in_every_row}, "train": recipe}
        rows.append(Row(name, changes, figures, with_changes(given, settings, place=f"row {name}")))
    return rows


def beside_the_rows(model: ModelConfig) -> dict[str, Any]:
    """What the user has set of the keys that no row of the paper's tables is about."""
    given = to_json(model)
    paper = to_json(ModelConfig())
    return {name: given[name] for name in BESIDE_THE_ROWS if given[name] != paper[name]}


def _experiment(name: str) -> TrainJob:
    return compose_job("train", TrainJob, [f"experiment=table3/{name}"])


def _scored_on_dev(given: TrainJob) -> TrainJob:
    """The job with the development set in place of the test sets, and the last checkpoint in place of the average."""
    data = replace(given.data, test={DEVELOPMENT: given.data.dev})
    train = replace(given.train, average=1, keep_last=2)
    return replace(given, data=data, train=train)


def _at_width(model: ModelConfig, width: int) -> ModelConfig:
    """The paper's model with every width in proportion; heads and layers stay."""
    return replace(
        model,
        d_model=_scaled(model.d_model, width),
        d_ff=_scaled(model.d_ff, width),
        d_k=None if model.d_k is None else _scaled(model.d_k, width),
        d_v=None if model.d_v is None else _scaled(model.d_v, width),
    )


def _scaled(size: int, width: int) -> int:
    return size * width // PAPER_WIDTH


# ---- scores ---------------------------------------------------------------------------------------------------------


def _score_rows(given: TrainJob, wanted: str | None) -> list[Row]:
    """Each score at each d_k that is a power of two, with as many heads as fill the model's width."""
    d_model = given.model.d_model
    sizes = {f"dk{d_k}_{score.value}": (d_k, score) for d_k in _powers_of_two(d_model) for score in Score}

    rows = []
    for name, (d_k, score) in _chosen(sizes, wanted).items():
        changes = {"n_heads": d_model // d_k, "score": score.value}
        own_widths = {"d_k": None, "d_v": None}  # d_model / n_heads
        job = with_changes(given, {"model": {**changes, **own_widths}}, place=f"row {name}")
        rows.append(Row(name, describe_changes({"model": changes}), published=None, job=job))
    return rows


def _powers_of_two(d_model: int) -> list[int]:
    """8, 16, 32, ... as far as they divide d_model."""
    powers = [8 * 2**n for n in range(d_model.bit_length())]
    return [power for power in powers if d_model % power == 0]


# ---- rows of a file -------------------------------------------------------------------------------------------------


def _rows_of_file(given: TrainJob, path: str, wanted: str | None) -> list[Row]:
    changes_of = _chosen(read_rows(Path(path)), wanted)
    return [_row_of_file(given, name, changes=changes, path=path) for name, changes in changes_of.items()]


def _row_of_file(given: TrainJob, name: str, *, changes: Changes, path: str) -> Row:
    """A row of the user's own. Raises InputError for settings that cannot be."""
    for key in leaves(changes):
        if key in ("run_dir", "train.seed"):  # the row would show it, and it would have no effect
            raise InputError(f"{path}: row {name}: {key}: the table decides on it, by output, train.seed and seeds")
    job = with_changes(given, changes, place=f"{path}: row {name}")
    return Row(name, describe_changes(changes), published=None, job=job)
