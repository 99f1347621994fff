"""Kills at random moments of a training, about a tenth of a second apart: nothing that was saved is lost, and the run
ends with the bits of one that nothing disturbed.
"""

import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.corpora import run, tiny_job, write_corpus
from support.fault_runs import Killer
from transformer.config.settings import DataConfig, Norm, Positions, Precision, Start

Note = Callable[[str, object], None]

STEPS = 24
RECIPE = {"max_steps": STEPS, "save_every": 3, "validate_every": 8, "keep_last": 2, "keep_best": 1, "average": 2}
RECIPE |= {"tokens_per_step": 150, "max_tokens": 80, "warmup_steps": 6}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "moving average, all dropouts": (
        {"dropout": 0.2, "attention_dropout": 0.1, "relu_dropout": 0.1},
        {"ema_decay": 0.9},
    ),
    "float16": ({}, {"precision": Precision.fp16}),
    "bfloat16, clipping": ({}, {"precision": Precision.bf16, "clip_norm": 0.5}),
    "pre-norm, learned positions": ({"norm": Norm.pre, "positions": Positions.learned}, {"label_smoothing": 0.0}),
    "untied, zeros, no prefetch": (
        {"tie_embeddings": False, "start": Start.zeros},
        {"prefetch": 0, "deterministic": True},
    ),
}
FIRST = "moving average, all dropouts"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """In memory where there is such a place."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


@pytest.fixture(scope="module")
def corpus(folder: Path) -> DataConfig:
    return write_corpus(folder / "corpus")


def killer(name: str, corpus: DataConfig, folder: Path, seed: int) -> Killer:
    """Of one variant, after its calm run, with which this process learns all that the children need."""
    place = folder / f"{seed}"
    place.mkdir()
    model, recipe = VARIANTS[name]
    calm = run(tiny_job(place / "calm", corpus, model, **RECIPE | recipe))
    return Killer(tiny_job(place / "killed", corpus, model, **RECIPE | recipe), calm, place, random.Random(seed))


@pytest.mark.ci
def test_train_loses_nothing_by_twenty_kills(corpus: DataConfig, folder: Path) -> None:
    """With a moving average, accumulation over two micro-batches, dropout and label smoothing."""
    found = killer(FIRST, corpus, folder, seed=0)
    found.kill(20)
    assert found.in_commit >= 2, "too few met a checkpoint half written"


@pytest.mark.faults
@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("name", VARIANTS)
def test_train_loses_nothing_by_many_kills(
    name: str, part: int, corpus: DataConfig, folder: Path, record_property: Note
) -> None:
    found = killer(name, corpus, folder, seed=1 + part + 2 * list(VARIANTS).index(name))
    found.kill(40)
    assert found.in_commit >= 4
    record_property("kills", found.kills)
    record_property("runs that ended bit-identical", found.runs - 1)
