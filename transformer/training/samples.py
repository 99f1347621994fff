"""What is shown beside curves: the first dev sentences with their translations, and at the end the scores."""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice

from transformer.integrations.trackers.sink import Sink, open_sinks
from transformer.records import Results
from transformer.tracking import HIDDEN_BY_BAR, Tracker, hyper_parameters
from transformer.training.start import Run
from transformer.training.validate import DevSet

log = logging.getLogger(__name__)

LOGGED = 100  # characters of a line of the log; trackers have all of it, and of every sample
COLUMNS = ("source", "translation", "reference")


def show_samples(dev: DevSet, hypotheses: Sequence[str], tracker: Tracker, *, step: int, count: int) -> None:
    """Write the first `count` dev sentences with translations and references to the trackers, and log the first."""
    samples = list(islice(zip(dev.sources, hypotheses, dev.references, strict=True), count))
    tracker.table(step, "dev/samples", columns=COLUMNS, rows=samples)
    for first in samples[:1]:
        for column, text in zip(COLUMNS, first, strict=True):
            line = f"{column:<11} {text}"
            log.info("  %s", line if len(line) <= LOGGED else f"{line[:LOGGED]}...", extra=HIDDEN_BY_BAR)


def open_trackers(run: Run) -> AbstractContextManager[list[Sink]]:
    """The sinks of `train.trackers` until the end of the context; none but on rank 0."""
    kinds = run.job.train.trackers
    if not kinds or not run.world.is_rank0:
        return nullcontext([])
    record = run.directory.read_record()
    return open_sinks(kinds, run.directory.path, run_id=record.id, settings=hyper_parameters(run.job))


def show_scores(results: Results, sinks: Sequence[Sink]) -> None:
    """Show the scores of the averaged model, of its test sets or of the dev set."""
    values: dict[str, float] = {}
    for name, scores in results.scores.items():
        values |= {f"scores/{name}/bleu": scores.bleu, f"scores/{name}/chrf": scores.chrf}
    for sink in sinks:
        sink.scalars(results.steps, values)
