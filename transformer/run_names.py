"""What names a run or a model: a path of this machine, or something that a source of models knows (`hf:OWNER/NAME`).

run_path            what `run_dir` names   -> the run directory to read
resolve_init_from   what `init_from` names -> the run directory or checkpoint to begin from
"""

import os
from pathlib import Path

from transformer import registry
from transformer.checkpoint import is_checkpoint
from transformer.config.jobs import TrainJob
from transformer.plugins import ModelSource
from transformer.run_dir import RunDir, list_steps


def run_path(source: str, key: str) -> Path:
    """The run directory that a setting names: a path as it is; of one elsewhere, the copy on this machine.

    Raises InputError, with the setting `key`, where there is no such run, and what its source of models raises.
    """
    models = _source_of(source)
    return Path(source) if models is None else models.run_path(source, key)


def pinned(source: str, key: str) -> str:
    """The same name; for a run elsewhere with its revision, so that it stays that run. Raises what `run_path` does."""
    models = _source_of(source)
    return source if models is None else models.pinned(source, key)


def resolve_init_from(job: TrainJob) -> TrainJob:
    """The job with `init_from` as a run directory or checkpoint: what was published is imported first, once.

    Once the run has a checkpoint of its own, nothing is looked for. Raises InputError and StorageError.
    """
    source = job.init_from
    if source is None or list_steps(Path(job.run_dir)):
        return job
    models = _source_of(source)
    if models is None and registry.has("models", "folder") and _is_foreign(Path(source)):
        models = registry.find("models", "folder")
    return job if models is None else models.located(job)


def _source_of(source: str) -> ModelSource | None:
    if not registry.is_elsewhere(source):
        return None
    found: ModelSource = registry.find("models", source.partition(":")[0])
    return found


def _is_foreign(path: Path) -> bool:
    """Whether there is a file, or a folder in which no run or checkpoint of ours is."""
    # Unlike those of Path, these are false for whatever cannot be a name.
    is_ours = os.path.isdir(path) and (is_checkpoint(path) or RunDir(path).record.exists())
    return os.path.exists(path) and not is_ours
