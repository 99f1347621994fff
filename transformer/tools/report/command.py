"""`transformer report`: what runs trained on, how they went and what came of it, as one page that needs no network.

    run directories -> reading -> scores, attention                                what takes time
                               -> overview, curves, score_tables, samples,
                                  data_tables, provenance                          a section each, drawn in `blocks`
                               -> page.format_page -> one HTML file

Nothing is written into a run directory. A run that is damaged or not finished still has its page: every module notes
in `RunReading.missing` what it cannot read or do, and the page says it.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from transformer import __version__
from transformer.errors import InputError, StorageError
from transformer.machine import resolve_threads
from transformer.tools.compare.texts import PUBLISHED, check_named_once
from transformer.tools.outputs import make_output, write_output
from transformer.tools.page import Component, format_page
from transformer.tools.report.attention import attention_section
from transformer.tools.report.blocks import shorten
from transformer.tools.report.curves import curves_section
from transformer.tools.report.data_tables import data_section
from transformer.tools.report.job import ReportJob
from transformer.tools.report.overview import missing_section, overview_section, settings_section
from transformer.tools.report.provenance import commands_section, provenance_section
from transformer.tools.report.reading import RunReading, read_run
from transformer.tools.report.samples import samples_section
from transformer.tools.report.score_tables import checkpoints_section, scores_section
from transformer.tools.report.scores import Scored, score_checkpoints, score_runs
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
    # What can be refused before the work.
    if not job.runs:
        raise InputError("name the run directories: transformer report runs/a runs/b")
    check_named_once([*job.runs, *([PUBLISHED] if job.published else [])], kind="run")
    resampling_seed()
    runs = [read_run(name) for name in job.runs]
    output = Path(job.output)
    _check_output(output)

    # The page.
    torch.set_num_threads(resolve_threads(job.threads))
    names = [shorten(run.name, 80) for run in runs]
    components = _components(runs, job)
    page = format_page(f"Report on {', '.join(names)}", components).encode()
    write_output(output, page)
    return Written(str(output), len(page))


def format_written(written: Written) -> str:
    """One line for people."""
    return f"written: {written.path}, {written.bytes / 1e6:.2f} MB\n"


def _components(runs: Sequence[RunReading], job: ReportJob) -> list[Component]:
    """The sections, in their order."""
    # First what may fail: the section on what is missing comes early in the page, and must know all of it.
    scored, reasons = score_runs(runs, scores=job.scores, samples=job.samples, published=job.published)
    scores_of_checkpoints = {run.name: score_checkpoints(run, job) for run in runs}
    attention = attention_section(runs, job)
    data = data_section(runs)

    components = [
        Component("report/contents", f"By transformer-mt {__version__}", None),
        overview_section(runs, scored),
        missing_section(runs),
        settings_section(runs),
        curves_section(runs) if any(run.curves for run in runs) else None,
        scores_section(scored, reasons),
        checkpoints_section(runs, scores_of_checkpoints),
        *_sample_sections(scored),
        attention,
        data,
        provenance_section(runs),
        commands_section(runs, job),
    ]
    return [component for component in components if component is not None]


def _sample_sections(scored: Sequence[Scored]) -> list[Component]:
    """A section for each group of runs that has samples."""
    components = []
    for group in scored:
        heading = "Samples" if len(scored) == 1 else f"Samples of {shorten(', '.join(group.names))}"
        sample_sets = [test_set.samples for test_set in group.sets if test_set.samples is not None]
        if sample_sets:
            components.append(samples_section(heading, group.names, sample_sets))
    return components


def _check_output(output: Path) -> None:
    """Make the folder that the page goes to. Raises StorageError where the page cannot be written."""
    if output.is_dir():
        raise StorageError(f"output={output}: a directory: name the file to write, such as {output / 'report.html'}")
    make_output(output.parent)
