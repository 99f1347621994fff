"""The attention explorers of a report: a few sentences of a run, translated by its model."""

import logging
from collections.abc import Sequence

from transformer.config.jobs import ReportJob
from transformer.config.settings import Precision, SearchOverride
from transformer.data.corpus import Pair
from transformer.decoding.loading import load_translator
from transformer.decoding.translator import Translator, is_blank
from transformer.errors import TransformerError
from transformer.evaluation.sets import read_set
from transformer.run_dir import DEV
from transformer.tools.attention_sentence import inspect
from transformer.tools.explorer import explorer
from transformer.tools.page import Component
from transformer.tools.plots import head_colors
from transformer.tools.report.blocks import shorten
from transformer.tools.report.reading import RunReading

log = logging.getLogger(__name__)

PIECES = (6, 30)  # of a source that makes a readable picture
MOST_WEIGHTS = 2_000_000  # of one sentence: 3 MB of the page at most


def attention_section(runs: Sequence[RunReading], job: ReportJob) -> Component | None:
    """The section with the explorers of all runs; None where there is none. What fails is noted in the run."""
    sentences = [one for run in runs for one in _explorers(run, job, is_alone=len(runs) == 1)]
    if not sentences:
        return None
    return Component("report/attention", "Attention", sentences, also=("explorer",))


def _explorers(run: RunReading, job: ReportJob, *, is_alone: bool) -> list[dict[str, object]]:
    """For each sentence what the script in attention.js shows."""
    if job.attention == 0:
        return []
    try:
        log.info("%s: attention of %d dev sentences (attention=0 leaves this out)", run.name, job.attention)
        translator = load_translator(
            run.directory.path,
            checkpoint="auto",
            search=SearchOverride(),
            device=job.device,
            precision=Precision.auto,
        )
        dev = read_set(run.directory, DEV)
        chosen = _readable(translator, dev)[: job.attention]
        found = []
        for line in chosen:
            label = f"line {line}" if is_alone else f"{shorten(run.name)}, line {line}"
            found.append({"label": label, **_explorer(translator, dev[line - 1][0])})
        return found
    except TransformerError as error:
        run.missing.append(f"Attention: {error}")
        return []


def _readable(translator: Translator, dev: Sequence[Pair]) -> list[int]:
    """The lines, counted from 1, of the sentences that are neither too short nor too long to look at."""
    pieces = translator.tokenizer.encode([source for source, _ in dev])
    lengths = [0 if is_blank(source) else len(ids) for (source, _), ids in zip(dev, pieces, strict=True)]
    least, most = PIECES
    return [line for line, length in enumerate(lengths, 1) if least <= length <= most]


def _explorer(translator: Translator, source: str) -> dict[str, object]:
    inspected = inspect(translator, (source, None), most_weights=MOST_WEIGHTS)
    component = explorer(
        inspected.maps,
        heading=f"{shorten(inspected.text)} \u2192 {shorten(inspected.translation)}",
        source=inspected.source,
        reads=inspected.reads,
        predicts=inspected.predicts,
        colors=head_colors(inspected.n_heads),
    )
    return {"heading": component.heading, "explorer": component.data}
