"""The sections of a report on where its runs come from, and on the commands that reproduce them."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformer import __version__
from transformer.config.jobs import OF_TRAINING, TrainJob
from transformer.config.keys import as_typed, overrides_of
from transformer.config.primitives import to_json
from transformer.records import Results, RunRecord
from transformer.registry import is_elsewhere
from transformer.tools.page import Component
from transformer.tools.report.blocks import UNKNOWN, Block, Cell, Command, Table, section
from transformer.tools.report.job import ReportJob
from transformer.tools.report.reading import RunReading


def provenance_section(runs: Sequence[RunReading]) -> Component:
    """Where the runs come from: versions, machine, commit, digests, seeds; a column each."""
    facts_of_runs = [_facts(run) for run in runs]
    names = dict.fromkeys(name for facts in facts_of_runs for name in facts)
    rows: list[list[Cell]] = [[name, *(facts.get(name, UNKNOWN) for facts in facts_of_runs)] for name in names]

    head = ["", *(run.name for run in runs)]
    return section("Provenance", [Table("Origin of the runs", head, rows, is_numeric=False)])


def _facts(run: RunReading) -> dict[str, str]:
    """What the documents of a run tell, by the names of the rows."""
    facts: dict[str, str] = {}
    if run.record is not None:
        facts |= _facts_of_record(run.record)
    if run.results is not None:
        facts |= _facts_of_results(run.results)
    return facts


def _facts_of_record(record: RunRecord) -> dict[str, str]:
    facts = {
        "run id": record.id,
        "started": record.started,
        "machine": record.machine or UNKNOWN,
        "commit": record.commit or UNKNOWN,
        "versions": ", ".join(f"{name} {version}" for name, version in record.versions.items()),
        "computed with": _listed(to_json(record.resolved)),
        "seed": str(record.config.train.seed),
        "data digest": record.data_digest,
        "tokenizer SHA-256": record.tokenizer_sha256,
    }
    if record.target_tokenizer_sha256 is not None:
        facts["target tokenizer SHA-256"] = record.target_tokenizer_sha256
    if record.init_from is not None:
        facts["weights from"] = f"{record.init_from.path}, step {record.init_from.step:,}"
        if record.init_from.imported is not None:
            facts["published model"] = record.init_from.imported.describe()
    return facts


def _facts_of_results(results: Results) -> dict[str, str]:
    return {
        "mean of steps": ", ".join(map(str, results.averaged)) or "none",
        "search": _listed(to_json(results.search)),
        "skipped updates": str(results.skipped_updates),
        "test sets SHA-256": results.test_digest,
    }


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {as_typed(value)}" for name, value in settings.items() if value is not None)


# ---- commands -------------------------------------------------------------------------------------------------------


def commands_section(runs: Sequence[RunReading], job: ReportJob) -> Component:
    """The command lines that train, score and compare the same again."""
    blocks: list[Block] = []

    # Each run.
    for run in runs:
        if run.record is not None:
            blocks.append(_training_command(run, run.record))
            about = f"Translate and score the test sets of {run.name} again:"
            blocks.append(Command(about, _line("evaluate", [f"run_dir={run.name}"])))

    # All runs together.
    names = [run.name for run in runs]
    if len(names) > 1:
        blocks.append(Command("Compare the runs:", _line("compare", names)))
    about = f"Make this page again (transformer-mt {__version__}):"
    blocks.append(Command(about, _line("report", [*job.runs, *overrides_of(replace(job, runs=[]))])))
    return section("Commands", blocks)


def _training_command(run: RunReading, record: RunRecord) -> Command:
    where = f", at commit {record.commit}" if record.commit else ""
    again = record.config.run_dir if is_elsewhere(run.name) else Path(run.name)
    job = replace(record.config, run_dir=f"{again}-again")
    return Command(f"Train {run.name} again, in another run directory{where}:", _line("train", train_overrides(job)))


def train_overrides(job: TrainJob) -> list[str]:
    """The arguments of `transformer train` for this job: all that differs from the paper's base.

    A model that `init_from` brings is left to it.
    """
    brought = {f"model.{key}" for key in to_json(job.model) if job.init_from is not None and key not in OF_TRAINING}
    return ["experiment=base", *(text for text in overrides_of(job) if text.partition("=")[0] not in brought)]


def _line(command: str, arguments: Sequence[str]) -> str:
    return " ".join(["transformer", command, *map(shlex.quote, arguments)])
