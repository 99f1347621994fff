"""What is shown beside curves: the first dev sentences with their translations, and at the end the scores."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import islice
from types import TracebackType

from transformer import registry
from transformer.errors import in_a_line
from transformer.evaluation.metrics import named
from transformer.plugins import TrackerFactory
from transformer.records import Results
from transformer.tracking import HIDDEN_BY_BAR, Sink, Tracker, hyper_parameters
from transformer.training.start import Run
from transformer.training.validate import DevSet

log = logging.getLogger(__name__)

LOGGED = 100  # characters of a line of the log; trackers have all of it, and of every sample
COLUMNS = ("source", "translation", "reference")


def show_samples(dev: DevSet, hypotheses: Sequence[str], tracker: Tracker, *, name: str, step: int, count: int) -> None:
    """Write the first `count` sentences of a dev set, translated, and references to the trackers; log the first."""
    samples = list(islice(zip(dev.sources, hypotheses, dev.references, strict=True), count))
    tracker.table(step, f"{name}/samples", columns=COLUMNS, rows=samples)
    for first in samples[:1]:
        for column, text in zip(COLUMNS, first, strict=True):
            line = f"{column:<11} {text}"
            log.info("  %s", line if len(line) <= LOGGED else f"{line[:LOGGED]}...", extra=HIDDEN_BY_BAR)


@contextmanager
def open_trackers(run: Run) -> Iterator[list[Sink]]:
    """The sinks of `train.trackers` until the end of the context; none but on rank 0."""
    names = dict.fromkeys(run.job.train.trackers or ()) if run.world.is_rank0 else {}
    with ExitStack() as opened:
        sinks: list[Sink] = []
        for name in names:
            if name in registry.OWN["tracker"] and not registry.has("tracker", name):
                log.warning("train.trackers: %s is not part of this installation, and left out", name)
                continue
            open_tracker: TrackerFactory = registry.find("tracker", name)
            record = run.directory.read_record()
            try:
                context = open_tracker(run.directory.path, run_id=record.id, settings=hyper_parameters(run.job))
                sinks.append(_Guarded(name, context.__enter__()))
            except Exception as error:  # whatever another package does: a tracker ends no training
                log.warning("%s shows nothing of this training: %s", name, _failure(error))
                continue
            opened.push(partial(_leave, name, context))
        yield sinks


def _leave(
    name: str,
    context: AbstractContextManager[Sink],
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
) -> bool:
    """End what a tracker shows; its own failure is a line of the log, and an error of the training goes on its way."""
    try:
        context.__exit__(kind, error, traceback)
    except Exception as failure:
        if failure is not error:
            log.warning("%s may lack the last values: %s", name, _failure(failure))
    return False


class _Guarded:
    """A sink whose failure costs a line of the log, and what it would have shown from then on."""

    def __init__(self, name: str, sink: Sink) -> None:
        self._name = name
        self._sink: Sink | None = sink

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Show these values of `step`."""
        self._pass(lambda sink: sink.scalars(step, values))

    def table(self, step: int, name: str, *, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Show a table of `step`: text as it is."""
        self._pass(lambda sink: sink.table(step, name, columns=columns, rows=rows))

    def _pass(self, show: Callable[[Sink], None]) -> None:
        if self._sink is None:
            return
        try:
            show(self._sink)
        except Exception as error:  # whatever another package does
            log.warning("%s shows no more of this training: %s", self._name, _failure(error))
            self._sink = None


def _failure(error: Exception) -> str:
    return f"{type(error).__name__}: {in_a_line(error)}"


def show_scores(results: Results, sinks: Sequence[Sink]) -> None:
    """Show the scores of the averaged model, of its test sets or of the dev set."""
    values: dict[str, float] = {}
    for name, scores in results.scores.items():
        values |= {f"scores/{name}/{field}": score.value for field, score in named(scores).items()}
    for sink in sinks:
        sink.scalars(results.steps, values)
