"""The rows of the paper's tables before they are trained.

    table=2, 3      the experiments of the package, at any width, with the paper's figures
    table=scores    each attention score at each d_k

Table 3 is scored as the paper scores it: the last checkpoint, without averaging, on the development set. The others are
scored as `train` does it: the averaged model, on the test sets, or on the development set where there is none.
"""

from dataclasses import replace
from typing import Any

from transformer.config.compose import compose_job
from transformer.config.jobs import TrainJob
from transformer.config.primitives import to_json
from transformer.config.settings import ModelConfig, Score
from transformer.tools.paper.published import TABLE_2, TABLE_3, WIDTH
from transformer.tools.tables.grid import describe_changes, differences, with_changes
from transformer.tools.tables.job import BESIDE_THE_ROWS, TableJob
from transformer.tools.tables.rows import OVERRIDDEN, Row, Rows, about_average, chosen_rows, train_job

DEVELOPMENT = "development"  # the dev set where it is scored as a test set: beam search, once, at the end
BUDGET = ("max_steps", "save_every", "validate_every", "keep_last", "average")  # the user's, not an experiment's


def published_rows(job: TableJob) -> Rows:
    """Rows of Table 2 or 3: model and recipe are those of the row's experiment, all else as it was given.

    Raises InputError for a row that the table does not have, and for settings that do not fit.
    """
    given = train_job(job)
    if job.table == "3":
        published = chosen_rows(TABLE_3, job.rows)
        given = _scored_on_dev(given)
        scored = "BLEU: sacreBLEU of the last checkpoint, without averaging, on the development set."
    else:
        published = chosen_rows(TABLE_2, job.rows)
        scored = about_average(given)

    width = job.width or WIDTH
    base = _experiment("base")
    base_model = _at_width(base.model, width)
    in_every_row = _beside_the_rows(given.model)

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

    notes = [
        scored,
        "The paper's figures are of WMT 2014 English-German, in tokenised BLEU: compare differences between rows. "
        "Its big model had three times the steps of the others; here every row has the same number.",
    ]
    if in_every_row:
        notes.append(f"Unlike the paper's, every row has {describe_changes({'model': in_every_row})}.")
    return Rows(_title(job.table, width), rows, notes)


def _title(table: str, width: int) -> str:
    if width == WIDTH:
        return f"Table {table} of the paper"
    return f"Table {table} of the paper, at width {width}: d_model, d_ff, d_k and d_v times {width}/{WIDTH}"


def _beside_the_rows(model: ModelConfig) -> dict[str, Any]:
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
    return size * width // WIDTH


# ---- scores ---------------------------------------------------------------------------------------------------------


def score_rows(job: TableJob) -> Rows:
    """Each score at each d_k that is a power of two, with as many heads as fill the model's width.

    Raises InputError for a row that is not there.
    """
    given = train_job(job)
    d_model = given.model.d_model
    sizes = {f"dk{d_k}_{score.value}": (d_k, score) for d_k in _powers_of_two(d_model) for score in Score}

    rows = []
    for name, (d_k, score) in chosen_rows(sizes, job.rows).items():
        changes = {"n_heads": d_model // d_k, "score": score.value}
        own_widths = {"d_k": None, "d_v": None}  # d_model / n_heads
        row_job = with_changes(given, {"model": {**changes, **own_widths}}, place=f"row {name}")
        rows.append(Row(name, describe_changes({"model": changes}), published=None, job=row_job))

    title = f"Scores of attention, in a model of width {d_model}"
    return Rows(title, rows, [about_average(given), OVERRIDDEN])


def _powers_of_two(d_model: int) -> list[int]:
    """8, 16, 32, ... as far as they divide d_model."""
    powers = [8 * 2**n for n in range(d_model.bit_length())]
    return [power for power in powers if d_model % power == 0]
