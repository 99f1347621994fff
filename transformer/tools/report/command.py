"""`transformer report`: what runs trained on, how they went and what came of it, as one page that needs no network.

Nothing is written into a run directory. A run that is damaged or not finished still has its page, which says what is
missing.
"""

import errno
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from transformer import __version__
from transformer.config.jobs import ReportJob
from transformer.errors import InputError, StorageError
from transformer.files import make_directories, write_file
from transformer.machine import resolve_threads
from transformer.tools.page import Component, format_page
from transformer.tools.report import sections
from transformer.tools.report.attention import attention_section
from transformer.tools.report.blocks import shorten
from transformer.tools.report.curves import curves
from transformer.tools.report.reading import RunReading, read_run
from transformer.tools.report.samples import samples
from transformer.tools.report.scores import score_checkpoints, score_runs
from transformer.tools.significance import resampling_seed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Written:
    """The page that was written."""

    path: str
    bytes: int


def report(job: ReportJob) -> Written:
    """Write the page of the job's runs.

    Raises InputError where one is not a run directory, StorageError where the page cannot be written.
    """
    if not job.runs:
        raise InputError("name the run directories: transformer report runs/a runs/b")
    twice = [name for name in job.runs if job.runs.count(name) > 1]
    if twice:
        raise InputError(f"{twice[0]} is named twice: name each run once")
    resampling_seed()  # what it refuses is better known before the work
    runs = [read_run(name) for name in job.runs]
    output = Path(job.output)
    _make_folder(output)
    torch.set_num_threads(resolve_threads(job.threads))

    title = f"Report on {', '.join(shorten(run.name, 80) for run in runs)}"
    page = format_page(title, list(_components(runs, job))).encode()
    write_file(output, page)
    return Written(str(output), len(page))


def format_written(written: Written) -> str:
    """One line for people."""
    return f"written: {written.path}, {written.bytes / 1e6:.2f} MB\n"


def _components(runs: Sequence[RunReading], job: ReportJob) -> Iterator[Component]:
    """The sections, in their order. What is missing comes early in the page, and is known late."""
    scored, reasons = score_runs(runs, samples=job.samples)
    by_checkpoint = {run.name: score_checkpoints(run, job) for run in runs}
    attention = attention_section(runs, job)
    of_data = sections.data(runs)
    sampled = [
        samples(
            "Samples" if len(scored) == 1 else f"Samples of {shorten(', '.join(group.names))}",
            group.names,
            [of.samples for of in group.sets if of.samples is not None],
        )
        for group in scored
        if any(of.samples is not None for of in group.sets)
    ]

    yield Component("report/contents", f"By transformer-mt {__version__}", None)
    optional = [
        sections.overview(runs, scored),
        sections.missing(runs),
        sections.settings(runs),
        curves(runs) if any(run.curves for run in runs) else None,
        sections.scores(scored, reasons),
        sections.checkpoints(runs, by_checkpoint),
        *sampled,
        attention,
        of_data,
        sections.provenance(runs),
        sections.commands(runs, job),
    ]
    yield from (component for component in optional if component is not None)


def _make_folder(output: Path) -> None:
    """Make the folder of the page. Raises StorageError."""
    try:
        make_directories(output.parent)
        if not output.parent.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    except OSError as error:
        raise StorageError(f"output={output}: cannot be made: {error.strerror}: choose another place") from error
    if output.is_dir():
        raise StorageError(f"output={output}: a directory: name the file to write, such as {output / 'report.html'}")
