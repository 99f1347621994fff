"""The sections of a report on what was trained: the runs side by side, what is missing of them, and their settings."""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from transformer.config.jobs import TrainJob
from transformer.config.keys import as_typed, leaves
from transformer.config.primitives import to_json
from transformer.cost import count_parameters
from transformer.records import RunRecord
from transformer.tools.metrics import SPEED
from transformer.tools.page import Component
from transformer.tools.report.blocks import UNKNOWN, Block, Cell, Marked, Note, Table, section
from transformer.tools.report.reading import RunReading
from transformer.tools.report.scores import Scored

NOT_A_SETTING = ("run_dir",)  # differs between any two runs
ABSENT = ""  # the text of a cell whose key a run does not have
CORPUS = "data."
FILTER = "data.filter."


def overview_section(runs: Sequence[RunReading], scored: Sequence[Scored]) -> Component:
    """The runs at a glance, a column each."""
    rows: list[list[Cell]] = [
        ["state", *(_state(run) for run in runs)],
        ["model", *(_of_record(run, _model) for run in runs)],
        ["parameters", *(_parameters(run) for run in runs)],
        ["languages", *(_of_record(run, _languages) for run in runs)],
        ["training pairs", *(UNKNOWN if run.data is None else f"{run.data.pairs_kept:,}" for run in runs)],
        ["target tokens seen", *(_target_tokens(run) for run in runs)],
        ["training time", *(_time(run) for run in runs)],
        ["target tokens a second", *(_speed(run) for run in runs)],
        ["best dev BLEU, greedy", *(_best_dev(run) for run in runs)],
    ]
    test_sets = dict.fromkeys(test_set.name for group in scored for test_set in group.sets)
    for name in test_sets:
        rows.append([f"BLEU, {name}", *(_test_bleu(run, name, scored) for run in runs)])
    means = [run.results.mean.get("bleu") if run.results is not None else None for run in runs]
    if any(mean is not None for mean in means):
        rows.append(["BLEU, mean of the sets", *("" if mean is None else f"{mean:.2f}" for mean in means)])

    head = ["", *(run.name for run in runs)]
    return section("At a glance", [Table("Runs", head, rows, is_numeric=False)])


def _state(run: RunReading) -> Cell:
    if run.is_finished:
        return f"finished at step {run.last_step:,}"
    max_steps = "" if run.record is None else f" of {run.record.config.train.max_steps:,}"
    return Marked(f"not finished: at step {run.last_step:,}{max_steps}")


def _of_record(run: RunReading, describe: Callable[[RunRecord], str]) -> str:
    """What `describe` says of the run's record, where that can be read."""
    return UNKNOWN if run.record is None else describe(run.record)


def _model(record: RunRecord) -> str:
    model = record.config.model
    return f"{model.n_layers} + {model.decoder_layers} layers, d_model {model.d_model}, {model.n_heads} heads"


def _languages(record: RunRecord) -> str:
    return ", ".join(f"{source} → {target}" for source, target in record.config.data.directions())


def _parameters(run: RunReading) -> str:
    if run.results is not None:
        return f"{run.results.parameters:,}"
    if run.record is None or run.data is None:
        return UNKNOWN
    return f"{count_parameters(run.record.config.model, run.data.vocab_sizes).total:,}"


def _target_tokens(run: RunReading) -> str:
    if run.results is None:
        return UNKNOWN
    return f"{run.results.target_tokens:,}, up to epoch {run.results.epochs + 1}"


def _time(run: RunReading) -> str:
    if run.results is None or not math.isfinite(run.results.training_seconds):
        return UNKNOWN
    return format_duration(round(run.results.training_seconds))


def format_duration(seconds: int) -> str:
    """A time as people write it, in its two largest units: 11 s, 3 min 05 s, 2 h 05 min."""
    minutes, seconds = divmod(seconds, 60)
    if minutes == 0:
        return f"{seconds} s"
    hours, minutes = divmod(minutes, 60)
    return f"{minutes} min {seconds:02} s" if hours == 0 else f"{hours} h {minutes:02} min"


def _speed(run: RunReading) -> str:
    """Target tokens a second over the whole training; of a run without results, the mean over its log lines."""
    if run.results is not None and run.results.training_seconds > 0:
        return f"{run.results.target_tokens / run.results.training_seconds:,.0f}"
    curve = run.curves.get(SPEED)
    return f"{fmean(value for _, value in curve):,.0f}" if curve else UNKNOWN


def _best_dev(run: RunReading) -> str:
    if not run.validations:
        return UNKNOWN
    best = max(run.validations, key=lambda validation: validation.bleu)
    return f"{best.bleu:.2f} at step {best.step:,}"


def _test_bleu(run: RunReading, name: str, scored: Sequence[Scored]) -> Cell:
    """The run's BLEU on the test set of this name."""
    for group in scored:
        if run.name not in group.names:
            continue
        number = group.names.index(run.name)
        for test_set in group.sets:
            if test_set.name == name:
                bleu = test_set.scores[0].systems[number]
                return f"{bleu.score:.2f} ± {bleu.half_width:.2f}"
    return "not scored"


def missing_section(runs: Sequence[RunReading]) -> Component | None:
    """What could not be read; None where everything could be."""
    notes: list[Block] = [
        Note(text.replace(str(run.directory.path), run.name), is_warning=True)  # of a run on the hub, its copy's path
        for run in runs
        for text in dict.fromkeys(run.missing)
    ]
    return section("What is missing", notes) if notes else None


# ---- settings -------------------------------------------------------------------------------------------------------


def settings_section(runs: Sequence[RunReading]) -> Component:
    """What was trained, as a difference from the paper's base model and recipe."""
    paper = leaves(to_json(TrainJob()))
    of_runs = [None if run.record is None else leaves(to_json(run.record.config)) for run in runs]

    # The keys that some run has set otherwise than the paper; those of the corpus go into a table of their own.
    known = [of_run for of_run in of_runs if of_run is not None]
    all_keys = dict.fromkeys(key for of_run in (paper, *known) for key in of_run)
    changed = [
        key
        for key in all_keys
        if key not in NOT_A_SETTING and any(of_run.get(key) != paper.get(key) for of_run in known)
    ]
    of_corpus = [key for key in changed if _is_of_corpus(key)]
    of_recipe = [key for key in changed if not _is_of_corpus(key)]

    names = [run.name for run in runs]
    recipe_rows: list[list[Cell]] = [[key, _value(key, paper), *_values(key, of_runs)] for key in of_recipe]
    of_files = [of_run and {key: value for key, value in of_run.items() if value is not None} for of_run in of_runs]
    corpus_rows: list[list[Cell]] = [[key, *_values(key, of_files)] for key in of_corpus]
    about = "Settings that are not listed are those of the paper's base model and recipe."
    blocks: list[Block] = [
        Note(about, is_warning=False),
        Table("Different from the paper's base", ["key", "paper", *names], recipe_rows, is_numeric=False),
        Table("The corpus", ["key", *names], corpus_rows, is_numeric=False),
    ]
    return section("What was trained", blocks)


def _is_of_corpus(key: str) -> bool:
    return key.startswith(CORPUS) and not key.startswith(FILTER)


def _values(key: str, of_runs: Sequence[Mapping[str, Any] | None]) -> list[Cell]:
    """The value of a key in each run; marked where it differs from the first that is known."""
    values = [UNKNOWN if of_run is None else _value(key, of_run) for of_run in of_runs]
    not_marked = (UNKNOWN, ABSENT)
    first = next((value for value in values if value not in not_marked), UNKNOWN)
    return [value if value in (*not_marked, first) else Marked(value) for value in values]


def _value(key: str, settings: Mapping[str, Any]) -> str:
    """The value of a key as it is typed; ABSENT where there is no such key, as that of a test set of another run."""
    if key not in settings:
        return ABSENT
    return "not set" if settings[key] is None else as_typed(settings[key])
