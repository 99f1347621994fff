"""A sweep whose runs become jobs: `train --multirun hydra/launcher=submitit_slurm`; `submitit_local` on this machine.

    Submission.perform    a run that is finished: its results, read; any other waits to be submitted
    Submission.submit     those of a batch, as an array of jobs; each job that ends gives a result, or a failure
    CommandJob            what a job runs: see `command_job`

A job gets a command line and gives back an exit status; results are read from the run directories. So the sweep may be
started again, whatever happened to its jobs or to this process.
"""

import logging
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import submitit
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
from omegaconf import DictConfig, OmegaConf

from transformer.cli.application import Application, key_of, unless_given
from transformer.cli.command_job import CommandJob
from transformer.cli.overrides import LAUNCHER
from transformer.config.jobs import Job, TrainJob
from transformer.config.keys import as_typed, list_override
from transformer.errors import CheckpointError, InputError, PeerError, TransformerError
from transformer.evaluation.sets import format_results
from transformer.records import Progress, Results
from transformer.run_dir import RunDir, list_steps
from transformer.terminal import printable

log = logging.getLogger(__name__)

POLL_SECONDS = 2.0  # between two looks at the jobs; Slurm itself is asked more rarely
MOST_TIMEOUTS = 1_000  # a run goes on from its last step, however often the time of a job is over
ERROR = "transformer: error: "  # how the last line of a command that fails begins
STATUSES = {kind.exit_status: kind for kind in TransformerError.__subclasses__()}


@dataclass(frozen=True)
class _Waiting:
    """A run of the sweep that is to become a job."""

    run: int  # its number in the sweep, from 1
    changes: str
    job: TrainJob
    arguments: tuple[str, ...]


@dataclass
class Submission(Application):
    """What Hydra calls for each run of a sweep whose runs become jobs."""

    waiting: list[_Waiting] = field(default_factory=list)

    def settings(self) -> list[str]:
        """The folder of submitit beside the runs, and jobs that go on when their time is over."""
        settings = {"hydra.launcher.submitit_folder": '"${run_dir}/.submitit/%j"'}
        if self._launcher == "slurm":
            settings["hydra.launcher.max_num_timeout"] = str(MOST_TIMEOUTS)
        return unless_given(settings, self.overrides)

    @property
    def _launcher(self) -> str:
        """`slurm` or `local`."""
        launcher = next(override for override in self.overrides if key_of(override) == LAUNCHER)
        return launcher.partition("submitit_")[2]

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Let Hydra launch by `_JobLauncher`, since a launcher of its plugins cannot be given this application."""
        plugins = Plugins.instance()

        def launcher(hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> Launcher:
            made = _JobLauncher(self)
            made.setup(hydra_context=hydra_context, task_function=task_function, config=config)
            return made

        setattr(plugins, "instantiate_launcher", launcher)  # noqa: B010 (an assignment would be of another type)
        try:
            yield
        finally:
            delattr(plugins, "instantiate_launcher")  # that of its class is back

    def perform(self, job: Job) -> float | None:
        """Show the results of a run that is finished; let any other wait for `submit`."""
        assert isinstance(job, TrainJob)
        results = _finished_results(job)
        if results is not None:
            log.info("%s: finished at step %d already; it needs no job", job.run_dir, results.steps)
            return _show(job, results)

        self.waiting.append(_Waiting(self.runs, self.changes(), job, self._arguments(job)))
        return None

    def _arguments(self, job: TrainJob) -> tuple[str, ...]:
        """The command that is one run of the sweep."""
        parsed = OverridesParser.create().parse_overrides([str(text) for text in HydraConfig.get().overrides.task])
        typed: list[str] = []
        for override in parsed:
            value = override.value()
            if override.is_delete():
                typed.append(f"~{override.key_or_group}")
            elif isinstance(value, list):
                typed.append(list_override(override.key_or_group, list(map(as_typed, value))))
            elif override.key_or_group != "run_dir":
                typed.append(f"{override.key_or_group}={as_typed(value)}")
        typed += [override for override in self.overrides if key_of(override) == "hydra.searchpath"]
        folder = [] if self.config_dir is None else ["--config-dir", os.path.abspath(self.config_dir)]
        return (self.command, *folder, *typed, f"run_dir={job.run_dir}")

    def submit(self, settings: DictConfig) -> dict[int, float | None]:
        """Make jobs of the runs that wait, and wait for their ends; what a sweep makes best, by the runs' numbers.

        Raises InputError where they cannot be submitted.
        """
        waiting, self.waiting = self.waiting, []
        if not waiting:
            return {}

        launcher = f"{LAUNCHER}=submitit_{self._launcher}"
        try:
            executor = _executor(self._launcher, OmegaConf.to_container(settings, resolve=True))
            jobs = executor.submit_array([CommandJob(run.arguments) for run in waiting])
        except (RuntimeError, OSError) as error:  # no srun, no sbatch, or what sbatch says
            raise InputError(f"{launcher}: {'; '.join(str(error).split(chr(10)))}") from error

        run_of = {job.job_id: run for job, run in zip(jobs, waiting, strict=True)}
        log.info("%d jobs submitted: %s; they go on without this process", len(jobs), ", ".join(run_of))
        return {
            run_of[job.job_id].run: self._end(run_of[job.job_id], job)
            for job in submitit.helpers.as_completed(jobs, poll_frequency=POLL_SECONDS)
        }

    def _end(self, run: _Waiting, job: Any) -> float | None:
        """Show the results of a job that has ended, or log why it has none."""
        try:
            _check_outcome(job)
            results = RunDir(Path(run.job.run_dir)).read_results()
        except TransformerError as error:
            self.add_failure(run.run, run.changes, error)
            return None

        log.info("%s: finished at step %d", run.job.run_dir, results.steps)
        best = _show(run.job, results)
        if best is not None:
            self.add_finished(run.changes, run.job, best)
        return best


class _JobLauncher(BasicLauncher):
    """Hydra's launcher, which composes one run after the other, and then submits those that wait."""

    def __init__(self, submission: Submission) -> None:
        super().__init__()
        self._submission = submission

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run a batch of a sweep; what it makes best is what each run returns."""
        assert self.config is not None
        returns = super().launch(job_overrides, initial_job_idx)
        for run, best in self._submission.submit(self.config.hydra.launcher).items():
            returns[run - 1 - initial_job_idx].return_value = best
        return returns


def _executor(cluster: str, settings: Any) -> Any:
    """submitit's executor under the settings of `hydra.launcher`. Its own names begin with the cluster's."""
    folder = settings.pop("submitit_folder")
    own = {name for name in settings if name not in {general.name for general in fields(BaseQueueConf)}} - {"_target_"}
    timeouts = {f"{cluster}_max_num_timeout": settings.pop(name) for name in own & {"max_num_timeout"}}
    executor = submitit.AutoExecutor(folder, cluster=cluster, **timeouts)
    named = {f"{cluster}_{name}" if name in own else name: value for name, value in settings.items()}
    executor.update_parameters(**{name: value for name, value in named.items() if name != "_target_"})
    return executor


def _finished_results(job: TrainJob) -> Results | None:
    """The results of a run that is finished under these settings; None where there is something to do.

    It is the judgement of the files alone: this machine may have no GPU. What it cannot see, such as a test set that
    has another text now, is for whoever runs the command without a launcher.
    """
    directory = RunDir(Path(job.run_dir))
    try:
        record = directory.read_record()
        results = directory.read_results()
    except CheckpointError:
        return None

    is_same = replace(record.config, run_dir=job.run_dir) == job
    is_newest = list_steps(directory.path)[-1:] == [results.steps]
    progress = Progress(step=results.steps, validations=results.validations)
    return results if is_same and is_newest and progress.has_ended(job.train) else None


def _show(job: TrainJob, results: Results) -> float | None:
    """Print the results of a run; what a sweep makes best, None if it is not finite."""
    sys.stdout.write(printable(format_results(Path(job.run_dir), results), keep="\n"))
    sys.stdout.flush()
    best = results.best_validation(job.train.metric).value(job.train.metric)
    return best if math.isfinite(best) else None


def _check_outcome(job: Any) -> None:
    """Raise the error with which a job has ended, if any; of several ranks, that of one that lost no other."""
    ends = [_end_of_rank(job.task(rank)) for rank in range(job.num_tasks)]
    failed = [error for error in ends if error is not None]
    failed.sort(key=lambda error: isinstance(error, PeerError))
    if failed:
        raise failed[0]


def _end_of_rank(task: Any) -> TransformerError | None:
    """The error of one rank of a job; None where it is done."""
    try:
        status: int | None = task.result()
    except submitit.core.utils.UncompletedJobError:
        status = None
    if status == 0:
        return None

    where = f"the log of job {task.job_id} is {task.paths.stderr}"
    goes_on = f"to go on, give the same command again; {where}"
    if status is None:
        return PeerError(
            f"the job ended without a message ({task.state}); it may have been killed, or have run out of memory: "
            f"{goes_on}"
        )
    if status < 0:
        return PeerError(f"the job's process was killed by signal {-status}: {goes_on}")
    said = [line for line in (task.stderr() or task.stdout() or "").split("\n") if line.startswith(ERROR)]
    message = said[-1].removeprefix(ERROR) if said else f"exit status {status}"
    return STATUSES.get(status, PeerError)(f"{message}; {where}")
