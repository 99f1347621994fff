"""One command as it is run; as a Hydra application for sweeps (`--multirun`) and what is shown (`--cfg`, `--info`).

    run_application    arguments -> composed, and run; or -> Hydra, where they ask for something of Hydra's
    Application.run    settings -> typed job -> the command; called by Hydra for each run

Hydra reads its arguments from `sys.argv`, and would print lines of its own about errors. So the application keeps the
command's error, and `run_application` raises it for `main` to report. A run of a sweep that fails does not stop the
others; a signal does.
"""

import argparse
import logging
import math
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from transformer.cli import commands
from transformer.cli.overrides import Arguments
from transformer.config.compose import (
    check_config_dir,
    compose_checked,
    composing_error,
    primary_config,
    stored_configs,
    typed_job,
)
from transformer.config.jobs import Job, TrainJob
from transformer.config.keys import shipped
from transformer.config.settings import Metric
from transformer.errors import InputError, PeerError, Rank0Error, Stopped, TransformerError
from transformer.seeding import seed_for

log = logging.getLogger(__name__)

LONGEST_NAME = 150  # characters of a run's directory in a sweep; a hash tells longer names apart
EXACT = r"[A-Za-z0-9._+-]+=[A-Za-z0-9._+-]*"  # a setting that such a name has letter by letter
FRACTION = r"(?<==)[+-]?[0-9]*\.[0-9]+(e[+-]?[0-9]+)?$"  # a value that such a name has four digits of
HELP_CHECK = "_check_help"  # argparse's, from Python 3.14 on
BEST = 3  # runs of a sweep that are named at its end

OPTUNA = "hydra/sweeper=optuna"
OPTUNA_GRID = "hydra/sweeper/sampler=grid"
OPTUNA_SEED = "hydra.sweeper.sampler.seed"
OPTUNA_DIRECTION = "hydra.sweeper.direction"


@dataclass(frozen=True)
class _Finished:
    """A training of a sweep that has come to its end, and the best of its validations."""

    changes: str
    run_dir: Path
    metric: Metric
    best: float  # the value of the metric


@dataclass
class Application:
    """What Hydra calls with the composed settings: once, or once for each run of a sweep.

    It keeps the errors of the command, since Hydra would print them. `submission` has one whose runs are jobs.
    """

    command: str
    overrides: Sequence[str]  # as they were typed
    config_dir: str | None = None
    is_composed: bool = False  # whether the settings of a run made a job
    error: Exception | None = None  # what ended the command
    runs: int = 0
    failures: list[tuple[str, Exception]] = field(default_factory=list)  # of a sweep: what the run changes, its error
    finished: list[_Finished] = field(default_factory=list)

    def run(self, config: DictConfig) -> float | None:
        """Run the command with these settings; what a sweep makes best, if the command has it."""
        is_sweep = HydraConfig.get().mode is RunMode.MULTIRUN
        self.runs += 1
        try:
            job = typed_job(commands.COMMANDS[self.command].job, config)
            if is_sweep:
                _set_run_dir(self.command, job, self.overrides)
                self._say_which()
            self.is_composed = True
            figure = self.perform(job)
            if is_sweep and figure is not None and isinstance(job, TrainJob):
                self.add_finished(self.changes(), job, figure)
            return figure
        except Exception as error:
            ends_all_runs = isinstance(error, Stopped | PeerError) and not isinstance(error, Rank0Error)
            if is_sweep and not ends_all_runs:
                self.add_failure(self.runs, self.changes(), error)
                return None  # Optuna takes this for a trial that failed
            self.error = error
            sys.exit(1)  # Hydra prints a line about an exception, and none about this

    def perform(self, job: Job) -> float | None:
        """Run the command with this job, in this process."""
        return commands.run_command(self.command, job)

    def launching(self) -> AbstractContextManager[None]:
        """Around all that Hydra does: Hydra's own launcher runs one after the other."""
        return nullcontext()

    def settings(self) -> list[str]:
        """Overrides of the node `hydra` that are added to those that were typed."""
        return []

    def changes(self) -> str:
        """What this run of a sweep changes."""
        return ", ".join(_changed_overrides(self.overrides))

    def _say_which(self) -> None:
        """Log which run of a sweep begins."""
        changes = self.changes()
        if changes and commands.is_rank0():
            total = _count_runs(self.overrides)
            of_all = "" if total is None else f" of {total}"
            log.info("run %d%s: %s", self.runs, of_all, changes)

    def say_best(self) -> None:
        """Log the best trainings of a sweep, and the command that compares all of them."""
        metrics = {run.metric for run in self.finished}
        if len(self.finished) < 2 or len(metrics) > 1 or not commands.is_rank0():
            return

        # The best first.
        (metric,) = metrics
        ranked = sorted(self.finished, key=lambda run: run.best, reverse=metric.higher_is_better)
        name, form = (f"greedy dev {metric.title}", ".2f") if metric.higher_is_better else ("dev loss", ".4f")
        shown = ranked[:BEST]
        lines = ["the best of %d runs by %s:", *(f"  {run.best:{form}}  %s" for run in shown)]
        values = [len(ranked), name, *(run.changes for run in shown)]

        # Their table, where one folder has all of them.
        folders = {run.run_dir.parent for run in ranked}
        if len(folders) == 1:
            lines.append("to compare all of them: transformer table %s")
            values.append(shlex.quote(f"table={folders.pop()}"))
        log.info("\n".join(lines), *values)

    def add_finished(self, changes: str, job: TrainJob, best: float) -> None:
        """Keep the best validation of a run of a sweep that has come to its end."""
        self.finished.append(_Finished(changes, Path(job.run_dir), job.train.metric, best))

    def add_failure(self, run: int, changes: str, error: Exception) -> None:
        """Log and keep the error of one run of a sweep."""
        log.error("run %d of the sweep failed (%s): %s", run, changes, error)
        self.failures.append((changes, error))

    def sweep_error(self) -> Exception:
        """The error with which a sweep ends: of the class of the first failure. A bug is reported as it is."""
        changes, first = self.failures[0]
        if self.runs == 1 or not isinstance(first, TransformerError):
            return first
        others = "" if len(self.failures) == 1 else ", the first"
        return type(first)(f"{len(self.failures)} of {self.runs} runs failed{others} with {changes}: {first}")


def run_application(command: str, arguments: Arguments, kind: type[Application] = Application) -> None:
    """Do what the arguments ask for. Raises InputError for what cannot be composed, and the command's own errors."""
    # One run needs nothing of Hydra's but its composing.
    job = commands.COMMANDS[command].job
    asks_hydra = any(key_of(override).startswith("hydra") for override in arguments.overrides)
    if not asks_hydra and set(arguments.flags) <= {"-cd", "--config-dir", arguments.config_dir}:
        composed = compose_checked(command, job, arguments.overrides, config_dir=arguments.config_dir)
        commands.run_command(command, composed)
        return

    if arguments.config_dir is not None:
        check_config_dir(command, arguments.config_dir)

    # Hydra reads its arguments from here; with this setting it passes errors on, and does not print them.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    application = kind(command, arguments.overrides, arguments.config_dir)
    added = [*_optuna_settings(arguments.overrides), *application.settings()]
    sys.argv = [f"transformer {command}", *arguments.overrides, *added, *arguments.flags]
    hydra_main = hydra.main(
        version_base="1.3", config_path=str(shipped("configs")), config_name=primary_config(command)
    )
    try:
        with tempfile.TemporaryDirectory() as scratch:  # where Hydra leaves its notes on a sweep
            sweep = {"sweep": {"dir": scratch, "subdir": "."}}
            stored = stored_configs(command, job, arguments.overrides, hydra_settings=sweep)
            with stored, application.launching(), _any_help_taken():
                hydra_main(application.run)()
    except SystemExit:
        if application.error is not None:
            raise application.error from None
        raise
    except Exception as error:
        if application.failures:  # Optuna raises an error of its own where every trial has failed
            raise application.sweep_error() from error

        # An error of the command, or of writing what --cfg shows, is passed on. Any other is about the settings.
        cannot_print = isinstance(error, OSError) and not isinstance(error, HydraException)
        if application.is_composed or cannot_print:
            raise
        raise composing_error(error, job, overrides=arguments.overrides) from error

    if arguments.is_multirun and not application.runs:
        raise InputError(f"the sweep has no run: no value fits {', '.join(arguments.overrides)}")
    application.say_best()
    if application.failures:
        raise application.sweep_error()


@contextmanager
def _any_help_taken() -> Iterator[None]:
    """Let Hydra 1.3 make its parser on Python 3.14, where argparse refuses a help that is no text when it is added.

    Hydra has an object there, which becomes a text when it is shown.
    """
    setattr(argparse.ArgumentParser, HELP_CHECK, lambda *_: None)
    try:
        yield
    finally:
        delattr(argparse.ArgumentParser, HELP_CHECK)  # that of its base class is back


# ---- sweeps ---------------------------------------------------------------------------------------------------------


def _set_run_dir(command: str, job: Job, given: Sequence[str]) -> None:
    """Give each run of a sweep a directory of its own, named after what the sweep changes.

    A table goes to `output` where that is given, and otherwise beside the run directory.
    """
    if not commands.COMMANDS[command].goes_on:
        return  # it reads the run that is there

    key = "run_dir" if getattr(job, "output", None) is None else "output"
    changed = [override for override in _changed_overrides(given) if not override.startswith(f"{key}=")]
    if changed:
        setattr(job, key, f"{getattr(job, key)}/{_name_of(changed)}")


def _name_of(changed: Sequence[str]) -> str:
    """A name for a run that changes these settings: no other run of the sweep has it."""
    settings = [re.sub(r"""=(["'])(.*)\1$""", r"=\2", override, flags=re.DOTALL) for override in changed]
    told = ",".join(settings)
    short = [re.sub(FRACTION, _four_digits, setting) for setting in settings]
    name = re.sub(r"[^A-Za-z0-9._,+-]", "-", ",".join(short))

    # Only a hash knows what a replaced or missing character was.
    is_exact = short == settings and all(re.fullmatch(EXACT, setting) for setting in settings)
    if is_exact and len(name) <= LONGEST_NAME:
        return name
    return f"{name[:LONGEST_NAME]}-{seed_for(*(name if is_exact else told).encode()):08x}"


def _four_digits(fraction: re.Match[str]) -> str:
    """The number rounded to four significant digits, or as it is written where it has no more."""
    short = f"{float(fraction[0]):.4g}"
    return fraction[0] if float(short) == float(fraction[0]) else short


def _count_runs(given: Sequence[str]) -> int | None:
    """How many runs the sweep has; None where Hydra alone knows, because a value is a pattern of names."""
    trials: int = HydraConfig.get().sweeper.get("n_trials", 0)  # Optuna's
    if OPTUNA in given and OPTUNA_GRID not in given:
        return trials

    sizes: dict[str, int] = {}
    for override in OverridesParser.create().parse_overrides(list(given)):
        if override.is_sweep_override():
            try:
                sizes[override.key_or_group] = sum(1 for _ in override.sweep_string_iterator())
            except HydraException:
                return None
    product = math.prod(sizes.values())
    return min(trials, product) if OPTUNA in given else product


def _changed_overrides(given: Sequence[str]) -> list[str]:
    """The overrides of this run of a sweep, sorted, without the ones that all of its runs have."""
    parsed = OverridesParser.create().parse_overrides(list(given))
    last = {override.key_or_group: override for override in parsed}  # which counts where a key is given twice
    fixed = {key for key, override in last.items() if not override.is_sweep_override()}
    of_run = HydraConfig.get().overrides.task
    return sorted(override for override in of_run if key_of(override) not in fixed)


def key_of(override: str) -> str:
    """The key of an override, without the signs that add it or take it away."""
    return override.lstrip("+~").partition("=")[0]


def _optuna_settings(given: Sequence[str]) -> list[str]:
    """What Optuna must know beside what is given: which way is better, and a seed.

    With a seed, the same command tries the same settings again, and goes on where it stopped; so does every rank.
    """
    if OPTUNA not in given:
        return []

    settings = {OPTUNA_DIRECTION: '"${optuna_direction:${train.metric}}"'}
    if OPTUNA_GRID not in given:  # which has no seed
        settings[OPTUNA_SEED] = "1"

    return unless_given(settings, given)


def unless_given(settings: Mapping[str, str], given: Sequence[str]) -> list[str]:
    """These settings as overrides, without those that were typed."""
    keys = {key_of(override) for override in given}
    return [f"{key}={value}" for key, value in settings.items() if key not in keys]
