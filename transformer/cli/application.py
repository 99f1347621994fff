"""One command as a Hydra application: runs, sweeps (`--multirun`), and what is only shown (`--cfg`, `--info`).

Hydra reads its arguments from `sys.argv`, and would print lines of its own about errors: the command's error is carried
past it, for `main` to report. A run of a sweep that fails does not stop the others; a signal does.
"""

import logging
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from transformer.cli import commands
from transformer.cli.overrides import Arguments
from transformer.config.compose import check_config_dir, composing_error, primary_config, stored_configs, typed_job
from transformer.config.jobs import Job, TrainJob
from transformer.config.keys import shipped
from transformer.errors import PeerError, Stopped, TransformerError
from transformer.seeding import seed_for

log = logging.getLogger(__name__)

OPTUNA = "hydra/sweeper=optuna"
OPTUNA_SEED = "hydra.sweeper.sampler.seed"
OPTUNA_DIRECTION = "hydra.sweeper.direction"


@dataclass
class _Outcome:
    """How far the application came, and the errors that ended its command, or some of a sweep's runs."""

    is_composed: bool = False
    error: Exception | None = None
    runs: int = 0
    failures: list[tuple[str, Exception]] = field(default_factory=list)  # with what the run changes


def run_application(command: str, arguments: Arguments) -> None:
    """Do what the arguments ask for. Raises InputError for what cannot be composed, and the command's own errors."""
    if arguments.config_dir is not None:
        check_config_dir(command, arguments.config_dir)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra lets errors through, and does not print them
    overrides = [*arguments.overrides, *_optuna_settings(arguments.overrides)]
    sys.argv = [f"transformer {command}", *overrides, *arguments.flags]
    outcome = _Outcome()

    def task(config: DictConfig) -> float | None:
        is_sweep = HydraConfig.get().mode is RunMode.MULTIRUN
        outcome.runs += 1
        try:
            job = typed_job(command, config)
            if is_sweep:
                _set_run_dir(command, job, arguments.overrides)
            outcome.is_composed = True
            return commands.run(command, job)
        except Exception as error:
            if is_sweep and not isinstance(error, Stopped | PeerError):
                what = _changed_overrides(arguments.overrides)
                log.error("run %d of the sweep failed (%s): %s", outcome.runs, ", ".join(what), error)
                outcome.failures.append((", ".join(what), error))
                return None  # Optuna takes this for a trial that failed
            outcome.error = error
            sys.exit(1)  # Hydra prints a line about an exception, and none about this

    application = hydra.main(
        version_base="1.3", config_path=str(shipped("configs")), config_name=primary_config(command)
    )
    try:
        with tempfile.TemporaryDirectory() as scratch:  # where a sweep leaves its notes
            sweep = {"sweep": {"dir": scratch, "subdir": "."}}
            with stored_configs(command, arguments.overrides, sweep):
                application(task)()
    except SystemExit:
        if outcome.error is not None:
            raise outcome.error from None
        raise
    except Exception as error:
        if outcome.failures:  # Optuna raises one where every trial has failed
            raise _sweep_error(outcome) from error
        cannot_print = isinstance(error, OSError) and not isinstance(error, HydraException)
        if outcome.is_composed or cannot_print:
            raise
        raise composing_error(error, arguments.overrides) from error
    if outcome.failures:
        raise _sweep_error(outcome)


# ---- sweeps ---------------------------------------------------------------------------------------------------------


def _sweep_error(outcome: _Outcome) -> Exception:
    """The error with which a sweep ends: of the kind of the first that there was. A bug is reported as it is."""
    what, first = outcome.failures[0]
    if outcome.runs == 1 or not isinstance(first, TransformerError):
        return first
    others = "" if len(outcome.failures) == 1 else ", the first"
    return type(first)(f"{len(outcome.failures)} of {outcome.runs} runs failed{others} with {what}: {first}")


def _set_run_dir(command: str, job: Job, given: Sequence[str]) -> None:
    """Give each run of a sweep a directory of its own, named after what the sweep changes."""
    if isinstance(job, TrainJob) and command in ("prepare", "train"):
        changed = [override for override in _changed_overrides(given) if not override.startswith("run_dir=")]
        name = re.sub(r"[^A-Za-z0-9._,+-]", "-", ",".join(changed).replace('"', ""))
        if len(name) > 150:
            name = f"{name[:150]}-{seed_for(*name.encode()):08x}"
        job.run_dir += f"/{name}" if name else ""


def _changed_overrides(given: Sequence[str]) -> list[str]:
    """The overrides of this run of a sweep, sorted, without those that all of its runs have."""
    parsed = OverridesParser.create().parse_overrides(list(given))
    fixed = {override.key_or_group for override in parsed if not override.is_sweep_override()}
    return sorted(o for o in HydraConfig.get().overrides.task if o.lstrip("+").partition("=")[0] not in fixed)


def _optuna_settings(given: Sequence[str]) -> list[str]:
    """What Optuna must know beside what is given: which way is better, and a seed.

    With a seed, the same command tries the same settings again, and goes on where it stopped; so does every rank.
    """
    if OPTUNA not in given:
        return []
    settings = {OPTUNA_DIRECTION: '"${optuna_direction:${train.metric}}"'}
    if "hydra/sweeper/sampler=grid" not in given:  # which has no seed
        settings[OPTUNA_SEED] = "1"
    return [
        f"{key}={value}"
        for key, value in settings.items()
        if not any(override.lstrip("+").startswith(f"{key}=") for override in given)
    ]
