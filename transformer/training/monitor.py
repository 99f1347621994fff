"""What people see of a training while it runs: the log, the bar, TensorBoard and trackers, history.json, a trace.

    stepped -> validated -> committed     in this order, as far as they are due after a step

Nothing here changes what is trained. `stepped` does not wait for the device, which `read` and what is shown do.
"""

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace
from types import TracebackType

from transformer.cost import step_flops
from transformer.data.loader import Step
from transformer.data.plan import sample_epoch
from transformer.errors import InputError
from transformer.files import MANIFEST
from transformer.records import Validation
from transformer.tracking import Sink, Tracker, progress_bar
from transformer.training.history import add_mark, begin_history
from transformer.training.optimizer import rate_of
from transformer.training.profile import profiled
from transformer.training.samples import show_samples
from transformer.training.start import Run
from transformer.training.step import StepResult
from transformer.training.window import Clock, bar_text, describe, report_window, validation_scalars

log = logging.getLogger(__name__)

READ_EVERY = 20  # steps after which the host reads what the device has counted, at the latest


class Monitor:
    """Shows one training. A context manager, from before its first step to behind its last one.

    Every rank must call every method: some sum over the ranks. Rank 0 alone writes.
    """

    def __init__(self, run: Run, *, marked: Collection[int], sinks: Sequence[Sink]) -> None:
        """`marked` steps are in history.json beside those of commits; `sinks` are shown what TensorBoard is."""
        self._run = run
        self._marked = marked
        self._sinks = sinks
        self._clock = Clock()
        self._waited = 0.0
        self._open = ExitStack()

    def __enter__(self) -> "Monitor":
        run = self._run
        run.world.from_rank0(lambda: begin_history(run))
        if run.world.is_rank0:
            _log_beginning(run)

        step = run.progress.step
        directory = run.directory if run.world.is_rank0 else None
        self._tracker = self._open.enter_context(Tracker(directory, step, sinks=self._sinks))
        bar = progress_bar(run.job.train.max_steps, step, unit="step", shown=run.world.is_rank0)
        self._bar = self._open.enter_context(bar)
        self._tracker.settings(run.job)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, traceback)

    def begin(self) -> None:
        """From here on the time is that of steps."""
        self._clock = Clock()
        self._has_bar = self._run.world.any(not self._bar.disable)
        self._first_step = self._run.progress.step + 1

    # ---- a step

    def wait_for(self, steps: Iterator[Step]) -> Step:
        """The next step; the window keeps how long training has waited for it."""
        started = time.perf_counter()
        step = next(steps)
        self._waited = time.perf_counter() - started
        return step

    def profiled(self) -> AbstractContextManager[None]:
        """The context of the next step: rank 0 traces the one that `train.profile` names."""
        run = self._run
        step = run.progress.step + 1
        if step != run.job.train.profile or not run.world.is_rank0:
            return nullcontext()
        return profiled(run.directory, step=step, device=run.device)

    def stepped(self, step: Step, result: StepResult) -> None:
        """One more step in the window that is logged, and on the bar."""
        run = self._run
        flops = step_flops(
            run.job.model,
            run.tokenizers.vocab_sizes,
            source=step.source_tokens,
            target=step.target_tokens,
            mean_length=(step.source_tokens + step.target_tokens) / (2 * step.sentences),
        )
        run.state.window.add(step, result, waited=self._waited, flops=flops)
        self._bar.update()

    @property
    def is_log_due(self) -> bool:
        """Whether a line of the log is due at this step."""
        return self._run.progress.step % self._run.job.train.log_every == 0

    @property
    def is_read_due(self) -> bool:
        """Whether the device is to be read at this step, whatever else is due."""
        return self.is_log_due or self._run.progress.step % READ_EVERY == 0

    def read(self) -> None:
        """Bring what the device has measured to the host: the steps so far have taken the time until now."""
        self._run.state.read_device()
        self._run.state.add_seconds(self._clock.lap())

    def show(self) -> None:
        """Log the window if that is due; else let the bar show it, now and then."""
        step = self._run.progress.step
        if self.is_log_due:
            self.log()
        elif self._has_bar and (self.is_read_due or step == self._first_step):
            self._show_on_bar()

    def log(self) -> None:
        """Log the window that ends here, show it on the bar, and begin the next one."""
        run = self._run
        totals = run.state.window.totals(run.world)
        rate = rate_of(run.job.train, run.job.model.d_model, step=run.progress.step - 1)
        report_window(totals, self._tracker, run.progress, rate=rate, device=run.device, ranks=run.world.size)
        run.state.window.clear()
        self._bar.set_postfix_str(bar_text(totals, run.progress))

    def _show_on_bar(self) -> None:
        """Waits for the device, as where it is read, or once: at the first step."""
        run = self._run
        totals = run.state.window.totals(run.world)
        seconds = self._clock.lap()
        run.state.add_seconds(seconds)
        self._bar.set_postfix_str(bar_text(replace(totals, seconds=totals.seconds + seconds), run.progress))

    # ---- a validation, and a commit

    def validated(self, validation: Validation, hypotheses: Mapping[str, Sequence[str]], *, is_best: bool) -> None:
        """Log a validation, by each of several dev sets, too, and show samples of the translations."""
        run = self._run
        self._tracker.scalars(validation.step, validation_scalars(validation))
        log.info("step %d: dev %s%s", validation.step, describe(validation), ", the best so far" if is_best else "")
        for name, scores in validation.sets.items():
            log.info("  %s %s", name, describe(scores))
        for name, dev in run.dev.items():
            show_samples(
                dev, hypotheses[name], self._tracker, name=name, step=validation.step, count=run.job.train.samples
            )

    def marks(self, step: int) -> bool:
        """Whether history.json gets a mark at this step, though it is not committed."""
        return step in self._marked

    def mark(self, step: Step, result: StepResult) -> None:
        """Mark the step that was just taken in history.json. Waits for the device."""
        add_mark(self._run, step, result)

    def flush(self) -> None:
        """Write out what is buffered: after a crash, nobody measures again what led up to a checkpoint."""
        self._tracker.flush()

    def leave_out(self) -> None:
        """The time since the last call was no step's."""
        self._clock.lap()


def _log_beginning(run: Run) -> None:
    """Say in the log where training goes on, or how long its first epoch is."""
    step = run.progress.step
    if step:
        saved = (run.directory.checkpoint(step) / MANIFEST).stat().st_mtime
        log.info("going on from step %d, saved at %s", step, time.strftime("%H:%M on %Y-%m-%d", time.localtime(saved)))
        return

    if run.stores.changes:
        log.info(
            "before %s, which adds tokens, so that steps hold fewer pairs and an epoch has more of them:",
            run.stores.changes,
        )
    # The loader plans the same epoch, and says what is wrong, unless the sample was too small.
    with suppress(InputError):
        log.info("%s", sample_epoch(run.stores.plain_lengths, run.batching).describe())
