"""`transformer table`: the paper's tables, or one of your own, on any corpus: published figures beside measured ones.

    layers      Table 1: counted and timed, and nothing is trained
    rows        Table 2 and 3: the experiments of the package, at any width; scores: each score at each d_k; a file:
                rows of your own
    grid        a training for each row and each seed, in OUTPUT/ROW/seed-N
    measured    perplexity, BLEU with its interval, parameters, FLOPs and time, read from those run directories
    written     OUTPUT/table.md, table.csv, table.json and table.svg, by `table_format`

Table 3 is scored as the paper scores it: the last checkpoint, without averaging, on the development set. Table 2 and a
table of your own are scored as `train` does it: the averaged model, on the test sets.
"""

import errno
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from transformer.compute import resolve_device
from transformer.config.compose import compose, read_rows
from transformer.config.jobs import BESIDE_THE_ROWS, PAPER_TABLES, SCORES, TableJob, TrainJob
from transformer.config.keys import leaves
from transformer.config.primitives import to_json
from transformer.config.settings import Metric, ModelConfig, Score
from transformer.cost import step_flops
from transformer.data.report import read_report
from transformer.data.source import store_beside
from transformer.data.tokenizer import Tokenizer
from transformer.errors import CheckpointError, InputError, StorageError, TransformerError
from transformer.evaluation.sets import read_set
from transformer.files import make_directories
from transformer.machine import resolve_threads
from transformer.records import Results
from transformer.run_dir import DEV, HYPOTHESIS, RunDir
from transformer.tools.complexity import Complexity, LayerTime, complexity_rows, time_layers
from transformer.tools.grid import Changes, describe_changes, differences, run_grid, with_changes
from transformer.tools.paper import TABLE_2, TABLE_3, Published
from transformer.tools.significance import Interval, bootstrap_bleu
from transformer.training.progress import perplexity

log = logging.getLogger(__name__)

DEVELOPMENT = "development"  # the dev set where it is scored as a test set: beam search, once, at the end
PAPER_WIDTH = 512
PAPER_HEADS = 8
BUDGET = ("max_steps", "save_every", "validate_every", "keep_last", "average")  # the user's, not an experiment's

# Sizes of Table 1 where layers are counted.
SENTENCE = 64  # n: a long sentence
KERNEL = 3  # k
NEIGHBOURHOOD = 16  # r


@dataclass(frozen=True)
class Row:
    """One row before it is trained."""

    name: str
    changes: str  # as one types them; none in the row that the others are compared with
    published: Published | None
    job: TrainJob  # run directory and seed are still those of the command


@dataclass(frozen=True)
class Measured:
    """One training. Perplexities are of the development set, without label smoothing; end marks are counted."""

    seed: int
    run_dir: str
    perplexity: float  # per piece
    word_perplexity: float  # per word between spaces
    scores: dict[str, Interval]  # of each test set
    parameters: int
    steps: int
    flops: float  # of the training's matrix products
    seconds: float  # of training, without validation and the final scores
    best_dev: float = math.nan  # BLEU or loss, by `train.metric`, of its best validation


@dataclass(frozen=True)
class TableRow:
    """One row as it is shown: a run for each seed that has finished, a line for each that has failed."""

    name: str
    changes: str
    published: Published | None
    runs: list[Measured]
    errors: list[str]


@dataclass(frozen=True)
class Table:
    """A table that is measured: `table.json`."""

    title: str
    notes: list[str]
    rows: list[TableRow]
    best_first: Metric | None = None  # what the rows are sorted by; None: they have an order of their own


@dataclass(frozen=True)
class LayerTable:
    """Table 1: layers of `d` over `n` positions, with kernels of `k` and neighbourhoods of `r`, counted and timed."""

    n: int
    d: int
    k: int
    r: int
    counted: list[Complexity]
    timed: list[LayerTime]
    notes: list[str]


def make_layer_table(job: TableJob) -> LayerTable:
    """Table 1 on this machine; nothing is trained. Raises StorageError where the output cannot be made."""
    make_output(output_of(job))  # before any time is spent
    device = resolve_device(job.train.device)
    threads = resolve_threads(job.train.threads)
    torch.set_num_threads(threads)

    width = job.width or PAPER_WIDTH
    n, k, r = SENTENCE, KERNEL, NEIGHBOURHOOD
    return LayerTable(
        n=n,
        d=width,
        k=k,
        r=r,
        counted=complexity_rows(n=n, d=width, k=k, r=r),
        timed=time_layers(d_model=width, n_heads=PAPER_HEADS, k=k, r=r, device=device),
        notes=[f"{device.type}, {threads} threads, torch {torch.__version__}, fp32; medians of interleaved runs."],
    )


def make_table(job: TableJob) -> tuple[Table, list[Exception]]:
    """Train what is missing, and measure every row; also returns the errors of the runs that failed.

    Raises InputError for an unknown table or row, a width that does not fit, or bad settings in a file of rows;
    StorageError where the output cannot be made.
    """
    rows = _rows(job)
    output = output_of(job)
    seeds = range(job.train.seed, job.train.seed + job.seeds)

    make_output(output)  # before any time is spent

    # Train.
    jobs = {
        _run_name(row, seed): _run_job(row, seed, output=output, store_dir=store_beside(job.run_dir))
        for row in rows
        for seed in seeds
    }
    outcomes = run_grid(jobs)

    # Measure.
    found = {name: _measure_outcome(jobs[name], outcome) for name, outcome in outcomes.items()}
    measured = [_table_row(row, [found[_run_name(row, seed)] for seed in seeds]) for row in rows]
    table = Table(title=_title(job), notes=_notes(job, measured), rows=measured)
    return table, [error for error in found.values() if isinstance(error, Exception)]


def make_output(output: Path) -> None:
    """Make the folder that a table goes to. Raises StorageError."""
    try:
        make_directories(output)
        if not output.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    except OSError as error:
        raise StorageError(f"{output}: cannot be made: {error.strerror}; choose another place by output=DIR") from error


def _run_name(row: Row, seed: int) -> str:
    return f"{row.name}, seed {seed}"


def _run_job(row: Row, seed: int, *, output: Path, store_dir: Path) -> TrainJob:
    """The job of one run; all of them share the prepared corpus."""
    data = replace(row.job.data, store_dir=row.job.data.store_dir or str(store_dir))
    run_dir = output / row.name / f"seed-{seed}"
    return replace(row.job, run_dir=str(run_dir), data=data, train=replace(row.job.train, seed=seed))


def is_folder(job: TableJob) -> bool:
    """Whether the table is of the runs in a folder."""
    return job.table not in (*PAPER_TABLES, SCORES) and Path(job.table).is_dir()


def output_of(job: TableJob) -> Path:
    """Where the table goes: beside the run directory that the experiment names, never into it; of a folder, into it."""
    if is_folder(job):
        return Path(job.output or job.table)
    name = f"table{job.table}" if job.table in PAPER_TABLES else Path(job.table).stem
    return Path(job.output or f"{job.run_dir}-{name}")


# ---- rows -----------------------------------------------------------------------------------------------------------


def _rows(job: TableJob) -> list[Row]:
    """The rows that the job asks for, with their jobs."""
    given = TrainJob(**{field.name: getattr(job, field.name) for field in fields(TrainJob)})
    match job.table:
        case "2":
            names = _choose(list(TABLE_2), job.rows)
            return _published_rows(given, {name: TABLE_2[name] for name in names}, width=job.width)
        case "3":
            names = _choose(list(TABLE_3), job.rows)
            on_dev = _scored_on_dev(given)
            return _published_rows(on_dev, {name: TABLE_3[name] for name in names}, width=job.width)
        case "scores":
            return _score_rows(given, job.rows)
        case _:
            changes_of = read_rows(Path(job.table))
            return [
                _row_of_file(given, name, changes_of[name], path=job.table)
                for name in _choose(list(changes_of), job.rows)
            ]


def _choose(known: list[str], wanted: str | None) -> list[str]:
    """The rows of these names, or whose names begin so, in the table's order. Raises InputError where there is none."""
    if wanted is None:
        return known

    chosen: set[str] = set()
    for name in wanted.split(","):
        found = [name] if name in known else [other for other in known if name and other.startswith(name)]
        if not found:
            raise InputError(f"rows={wanted}: no row begins with {name!r}; there are {', '.join(known)}")
        chosen |= set(found)
    return [name for name in known if name in chosen]


def _score_rows(given: TrainJob, wanted: str | None) -> list[Row]:
    """Each score at each d_k that is a power of two, with as many heads as fill the model's width."""
    d_model = given.model.d_model
    widths = {f"dk{d_k}_{score.value}": (d_k, score) for d_k in _powers_of_two(d_model) for score in Score}

    rows = []
    for name in _choose(list(widths), wanted):
        d_k, score = widths[name]
        changes = {"n_heads": d_model // d_k, "score": score.value}
        own_widths = {"d_k": None, "d_v": None}  # d_model / n_heads
        job = with_changes(given, {"model": {**changes, **own_widths}}, place=f"row {name}")
        rows.append(Row(name, describe_changes({"model": changes}), published=None, job=job))
    return rows


def _powers_of_two(d_model: int) -> list[int]:
    """8, 16, 32, ... as far as they divide d_model."""
    return [8 * 2**n for n in range(d_model.bit_length()) if d_model % (8 * 2**n) == 0]


def _row_of_file(given: TrainJob, name: str, changes: Changes, *, path: str) -> Row:
    for key in leaves(changes):
        if key in ("run_dir", "train.seed"):  # it would be shown, and have no effect
            raise InputError(f"{path}: row {name}: {key}: the table decides on it, by output, train.seed and seeds")
    job = with_changes(given, changes, place=f"{path}: row {name}")
    return Row(name, describe_changes(changes), published=None, job=job)


def _published_rows(given: TrainJob, published: Mapping[str, Published], *, width: int | None) -> list[Row]:
    """Rows of a table of the paper: model and recipe are those of the row's experiment, all else as it was given."""
    base = _experiment("base")
    base_model = _at_width(base.model, width or PAPER_WIDTH)
    in_every_row = _beside_the_rows(given.model)

    rows = []
    for name, figures in published.items():
        experiment = _experiment(name)
        model = _at_width(experiment.model, width or PAPER_WIDTH)
        recipe = differences(to_json(base.train), to_json(experiment.train))
        recipe = {key: value for key, value in recipe.items() if key not in BUDGET}

        changes = describe_changes({"model": differences(to_json(base_model), to_json(model)), "train": recipe})
        job = with_changes(given, {"model": {**to_json(model), **in_every_row}, "train": recipe}, place=f"row {name}")
        rows.append(Row(name, changes, figures, job))
    return rows


def _beside_the_rows(model: ModelConfig) -> dict[str, Any]:
    """What the user has set of the things that no row of the paper's tables is about."""
    given = to_json(model)
    paper = to_json(ModelConfig())
    return {name: given[name] for name in BESIDE_THE_ROWS if given[name] != paper[name]}


def _experiment(name: str) -> TrainJob:
    return compose("train", [f"experiment=table3/{name}"])


def _scored_on_dev(given: TrainJob) -> TrainJob:
    """The job with the development set in place of the test sets, and the last checkpoint in place of the average."""
    data = replace(given.data, test={DEVELOPMENT: given.data.dev})
    return replace(given, data=data, train=replace(given.train, average=1, keep_last=2))


def _at_width(model: ModelConfig, width: int) -> ModelConfig:
    """The paper's model with every width in proportion; heads and layers stay."""
    widths = {name: getattr(model, name) for name in ("d_model", "d_ff", "d_k", "d_v")}
    return replace(model, **{name: w * width // PAPER_WIDTH for name, w in widths.items() if w is not None})


# ---- measuring ------------------------------------------------------------------------------------------------------


def _table_row(row: Row, found: Sequence[Measured | Exception]) -> TableRow:
    runs = [measured for measured in found if isinstance(measured, Measured)]
    errors = [str(error) for error in found if isinstance(error, Exception)]
    return TableRow(row.name, row.changes, row.published, runs, errors)


def _measure_outcome(job: TrainJob, outcome: Results | Exception) -> Measured | Exception:
    """The figures of a run, or why it has none. A damaged run directory is the failure of its own row alone."""
    if isinstance(outcome, Exception):
        return outcome
    try:
        return measure(job, outcome)
    except TransformerError as error:
        log.error("run %s cannot be measured: %s", job.run_dir, error)
        return error


def measure(job: TrainJob, results: Results) -> Measured:
    """What a finished run says of itself. All of it is read again from the run directory, or follows from it.

    Raises CheckpointError and InputError where something in the run directory is missing or damaged.
    """
    run = RunDir(Path(job.run_dir))

    # BLEU of each test set, from the translations that the run keeps.
    scores = {}
    for name, scored in results.test_sets.items():
        references = [reference for _, reference in read_set(run, name)]
        hypotheses = [hypothesis for _, hypothesis in read_set(run, name, HYPOTHESIS)]
        scores[name] = bootstrap_bleu(hypotheses, references, tgt_lang=job.data.tgt_lang)

        # `evaluate` with another search writes over them.
        if not math.isclose(scores[name].bleu, scored.bleu, abs_tol=1e-9):
            raise CheckpointError(
                f"{run.text(name, HYPOTHESIS)}: not the translations that {run.results.name} was scored on: remove "
                f"{run.results}; the same command translates them again"
            )

    # Perplexity: the same loss is spread over fewer words than pieces.
    dev = [reference for _, reference in read_set(run, DEV)]
    tokenizer = Tokenizer.load(run.tokenizer)
    pieces = sum(len(ids) + 1 for ids in tokenizer.encode(dev))
    words = sum(len(text.split()) + 1 for text in dev)
    nll = results.validations[-1].nll  # of the last step, which is always validated

    # FLOPs: a run counts the target tokens that it has seen; the corpus has so many source tokens for each.
    report = read_report(run)
    flops = step_flops(
        job.model,
        tokenizer.vocab_size,
        source=round(results.target_tokens * report.tokens.src / report.tokens.tgt),
        target=results.target_tokens,
        mean_length=results.target_tokens / results.sentences,
    )
    return Measured(
        seed=results.seed,
        run_dir=job.run_dir,
        perplexity=perplexity(nll),
        word_perplexity=perplexity(nll * pieces / words),
        scores=scores,
        parameters=results.parameters,
        steps=results.steps,
        flops=flops,
        seconds=results.training_seconds,
        best_dev=results.best_validation(job.train.metric).value(job.train.metric),
    )


# ---- what the figures depend on -------------------------------------------------------------------------------------


def _title(job: TableJob) -> str:
    if job.table == SCORES:
        return f"Scores of attention, in a model of width {job.model.d_model}"
    if job.table not in ("2", "3"):
        return Path(job.table).stem
    width = job.width or PAPER_WIDTH
    scaled = (
        "" if width == PAPER_WIDTH else f", at width {width}: d_model, d_ff, d_k and d_v times {width}/{PAPER_WIDTH}"
    )
    return f"Table {job.table} of the paper{scaled}"


def _notes(job: TableJob, rows: Sequence[TableRow]) -> list[str]:
    """What the figures depend on, beside the rows' own settings."""
    train = job.train
    steps = sorted({run.steps for row in rows for run in row.runs}) or [train.max_steps]  # not asked for, but done
    budget = f"{steps[0]:,} steps" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,} steps"
    search = job.search
    corpus = Path(job.data.train.dataset or job.data.train.src)
    notes = [
        f"Corpus: {Path(*corpus.parts[-2:])}; {budget} of "
        f"{train.tokens_per_step:,} target tokens{' for every row' if len(steps) == 1 else ''}; "
        + (f"seed {train.seed}." if job.seeds == 1 else f"{job.seeds} seeds, from {train.seed} on."),
        f"Beam {search.beam_size}, length penalty {search.length_penalty}. Perplexities are of the development set; "
        "a word ends at a space, and the end of a sentence counts as one.",
        "FLOPs are those of the model's matrix products, forward and backward; minutes are of training alone.",
    ]
    if job.table == "3":
        notes.append("BLEU: sacreBLEU of the last checkpoint, without averaging, on the development set.")
    else:
        notes.append(f"BLEU: sacreBLEU of the mean of the last {train.average} checkpoints, on the test sets.")
    if rows[0].published is not None:
        notes.append(
            "The paper's figures are of WMT 2014 English-German, in tokenised BLEU: compare differences between rows. "
            "Its big model had three times the steps of the others; here every row has the same number."
        )
        in_every_row = _beside_the_rows(job.model)
        if in_every_row:
            notes.append(f"Unlike the paper's, every row has {describe_changes({'model': in_every_row})}.")
    else:
        notes.append("What a row changes overrides all of this.")
    return notes
