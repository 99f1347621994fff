"""A short run that the hostile files and runs are made of. Files with a training of their own define their own."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.corpora import run, steps_of, tiny_job, write_corpus
from support.hostile_runs import LAST
from transformer.config.jobs import TrainJob
from transformer.config.settings import DataConfig


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def finished(corpus: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> TrainJob:
    """A short run with checkpoints at 2, 3 and 4; tests copy it."""
    recipe: dict[str, Any] = {"max_steps": LAST, "save_every": 1, "validate_every": 2, "keep_last": 3, "keep_best": 0}
    job = tiny_job(tmp_path_factory.mktemp("finished") / "a", corpus, **recipe)
    assert steps_of(run(job)) == [2, 3, 4]
    return job


@pytest.fixture
def job(finished: TrainJob, tmp_path: Path) -> TrainJob:
    """A copy of the run, with one more step to do."""
    shutil.copytree(finished.run_dir, tmp_path / "copy")
    recipe = replace(finished.train, max_steps=LAST + 1)
    return replace(finished, run_dir=str(tmp_path / "copy"), train=recipe)
