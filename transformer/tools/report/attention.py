"""The attention explorers of a report: a few dev sentences of each run, translated by its model.

`attention.sentence` inspects a sentence, and `attention.explorer` makes of it what the page's script shows.
"""

import logging
from collections.abc import Sequence

from transformer.config.settings import TORCH, Precision, SearchOverride
from transformer.data.corpus import Pair, is_blank
from transformer.decoding.loading import load_translator
from transformer.decoding.translator import Translator
from transformer.errors import TransformerError
from transformer.evaluation.sets import read_set
from transformer.tools.attention.explorer import explorer
from transformer.tools.attention.sentence import inspect
from transformer.tools.page import Component
from transformer.tools.report.blocks import shorten
from transformer.tools.report.job import ReportJob
from transformer.tools.report.reading import RunReading

log = logging.getLogger(__name__)

LEAST_PIECES = 6  # of a source that makes a readable picture
MOST_PIECES = 30
MOST_WEIGHTS = 2_000_000  # of one sentence: 3 MB of the page at most


def attention_section(runs: Sequence[RunReading], job: ReportJob) -> Component | None:
    """The section with the explorers of all runs; None where there is none. What fails is noted in the run."""
    if job.attention == 0:
        return None

    sentences: list[dict[str, object]] = []
    for run in runs:
        log.info("%s: attention of %d dev sentences (attention=0 leaves this out)", run.name, job.attention)
        sentences += _explorers(run, job, is_alone=len(runs) == 1)
    if not sentences:
        return None
    return Component("report/attention", "Attention", sentences, also=("attention/explorer",))


def _explorers(run: RunReading, job: ReportJob, *, is_alone: bool) -> list[dict[str, object]]:
    """For each sentence what the script in attention.js shows."""
    try:
        translator = load_translator(
            run.directory.path,
            checkpoint="auto",
            search=SearchOverride(engine=TORCH),
            device=job.device,
            precision=Precision.auto,
        )
        dev = read_set(run.directory, run.directory.dev_names()[0])
        explorers = []
        for line in _readable(translator, dev)[: job.attention]:
            label = f"line {line}" if is_alone else f"{shorten(run.name)}, line {line}"
            source, _ = dev[line - 1]
            explorers.append(_explorer(translator, source, label=label))
        return explorers
    except TransformerError as error:
        run.missing.append(f"Attention: {error}")
        return []


def _readable(translator: Translator, dev: Sequence[Pair]) -> list[int]:
    """The lines, counted from 1, of the sentences that are neither too short nor too long to look at."""
    sources = [source for source, _ in dev]
    pieces = translator.tokenizers.source.encode(sources)

    lines = []
    for line, (source, ids) in enumerate(zip(sources, pieces, strict=True), 1):
        if not is_blank(source) and LEAST_PIECES <= len(ids) <= MOST_PIECES:
            lines.append(line)
    return lines


def _explorer(translator: Translator, source: str, *, label: str) -> dict[str, object]:
    """Translate a sentence, and make its explorer."""
    inspected = inspect(translator, (source, None), most_weights=MOST_WEIGHTS)
    heading = f"{shorten(inspected.text)} \u2192 {shorten(inspected.translation)}"
    component = explorer(inspected, heading=heading)
    return {"label": label, "heading": component.heading, "explorer": component.data}
