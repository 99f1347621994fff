"""One command as a Hydra application: runs, sweeps (`--multirun`), and what is only shown (`--cfg`, `--info`).

Hydra reads its arguments from `sys.argv`, and would print lines of its own about errors: the command's error is carried
past it, for `main` to report.
"""

import os
import re
import sys
import tempfile
from dataclasses import dataclass

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from transformer.cli import commands
from transformer.cli.overrides import Arguments
from transformer.config.compose import check_config_dir, composing_error, primary_config, stored_configs, typed_job
from transformer.config.jobs import Job, TrainJob
from transformer.config.keys import shipped
from transformer.seeding import seed_for


@dataclass
class _Outcome:
    """How far the application came, and the error that ended its command."""

    is_composed: bool = False
    error: Exception | None = None


def run_application(command: str, arguments: Arguments) -> None:
    """Do what the arguments ask for. Raises InputError for what cannot be composed, and the command's own errors."""
    if arguments.config_dir is not None:
        check_config_dir(command, arguments.config_dir)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra lets errors through, and does not print them
    sys.argv = [f"transformer {command}", *arguments.overrides, *arguments.flags]
    outcome = _Outcome()

    def task(config: DictConfig) -> None:
        try:
            job = _in_sweep(command, typed_job(command, config))
            outcome.is_composed = True
            commands.run(command, job)
        except Exception as error:
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
        cannot_print = isinstance(error, OSError) and not isinstance(error, HydraException)
        if outcome.is_composed or cannot_print:
            raise
        raise composing_error(error, arguments.overrides) from error


def _in_sweep(command: str, job: Job) -> Job:
    """The job; in a sweep that trains, with a run directory of its own, named after the overrides."""
    if isinstance(job, TrainJob) and command in ("prepare", "train") and HydraConfig.get().mode is RunMode.MULTIRUN:
        job.run_dir += f"/{_overrides_as_name()}"
    return job


def _overrides_as_name() -> str:
    overrides = sorted(o for o in HydraConfig.get().overrides.task if not o.startswith("run_dir="))
    name = re.sub(r"[^A-Za-z0-9._,+-]", "-", ",".join(overrides).replace('"', ""))
    return name if len(name) <= 150 else f"{name[:150]}-{seed_for(*name.encode()):08x}"
