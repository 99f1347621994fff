"""Training on other pieces in every epoch: resumed, on ranks and in replay they are the pieces of the straight run."""

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from support.corpora import (
    assert_same_end,
    metrics_of,
    run,
    step_dir,
    steps_of,
    tiny_job,
    write_corpus,
)
from support.ranks import ranks
from support.resumed_runs import learned, stop_at
from support.tiers import tiers
from transformer.config.jobs import TrainJob
from transformer.config.settings import (
    Algorithm,
    DataConfig,
    ExtraConfig,
    LayoutKind,
    Precision,
    SearchConfig,
    TokenizerConfig,
)
from transformer.data.plan import plan_version
from transformer.errors import CheckpointError, InputError

LAST = 14  # an epoch has six to nine steps
LAYOUTS = {Algorithm.bpe: LayoutKind.packed, Algorithm.unigram: LayoutKind.padded}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def sampling_job(run_dir: Path, corpus: DataConfig, algorithm: Algorithm = Algorithm.bpe, **recipe: Any) -> TrainJob:
    """With dropout; greedy search, that tests wait for nothing."""
    settings: dict[str, Any] = {
        "max_steps": LAST,
        "validate_every": LAST,
        "save_every": 4,
        "keep_last": 9,
        "average": 1,
    }
    settings |= {"subword_sampling": 0.3, "layout": LAYOUTS[algorithm], **recipe}
    job = tiny_job(run_dir, corpus, **settings)
    tokenizer = TokenizerConfig(vocab_size=60, algorithm=algorithm)
    return replace(job, tokenizer=tokenizer, search=SearchConfig(beam_size=1, max_extra=1))


@pytest.fixture(scope="module")
def finished(corpus: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Algorithm], TrainJob]:
    """The run that nothing interrupts, with either tokenizer, once somebody asks for it."""

    @cache
    def job(algorithm: Algorithm) -> TrainJob:
        job = sampling_job(tmp_path_factory.mktemp("straight") / "a", corpus, algorithm)
        run(job)
        return job

    return job


def steps_by_epoch(run_dir: Path) -> list[list[int]]:
    epochs: dict[float, list[int]] = {}
    for row in metrics_of(run_dir):
        if "train/epoch" in row:
            epochs.setdefault(row["train/epoch"], []).append(row["step"])
    return list(epochs.values())


@pytest.mark.parametrize("algorithm", tiers([Algorithm.unigram], [Algorithm.bpe], pytest.mark.ci), ids=lambda a: a.name)
def test_train_resumes_in_the_second_epoch_on_the_same_pieces(
    algorithm: Algorithm, finished: Callable[[Algorithm], TrainJob], corpus: DataConfig, tmp_path: Path
) -> None:
    """Stopped in the middle of the second epoch, and at the last step of the first one: bit-identical."""
    straight = Path(finished(algorithm).run_dir)
    first, second = steps_by_epoch(straight)[:2]
    assert len(second) > 2
    job = sampling_job(tmp_path / "a", corpus, algorithm)
    stop_at(job, first[-1])
    stop_at(job, second[2])
    run(job)
    assert_same_end(Path(job.run_dir), straight)
    assert learned(Path(job.run_dir)) == learned(straight)


@pytest.mark.plugins
@pytest.mark.parametrize("algorithm", LAYOUTS, ids=lambda algorithm: algorithm.name)
def test_replay_runs_a_step_on_the_pieces_of_its_epoch(
    algorithm: Algorithm, finished: Callable[[Algorithm], TrainJob]
) -> None:
    from transformer.tools.replay.command import replay
    from transformer.tools.replay.job import ReplayJob

    run_dir = Path(finished(algorithm).run_dir)
    first, second = steps_by_epoch(run_dir)[:2]
    for step in (first[1], second[0], second[2]):
        found = replay(ReplayJob(run_dir=str(run_dir), step=step))
        (logged,) = [row for row in metrics_of(run_dir) if row["step"] == step and "train/loss" in row]
        assert (found.loss, found.gradient_norm) == (logged["train/loss"], logged["train/gradient_norm"])


def test_train_learns_something_else_than_without_sampling(
    finished: Callable[[Algorithm], TrainJob], corpus: DataConfig, tmp_path: Path
) -> None:
    """From the same start: in the first step already. More tokens make more steps of an epoch."""
    plain = run(sampling_job(tmp_path / "a", corpus, subword_sampling=None))
    sampled = Path(finished(Algorithm.bpe).run_dir)
    one, other = ([row["train/loss"] for row in metrics_of(path) if "train/loss" in row] for path in (plain, sampled))
    assert all(a != b for a, b in zip(one, other, strict=True))
    assert len(steps_by_epoch(sampled)[0]) > len(steps_by_epoch(plain)[0])
    weights = [load_file(step_dir(path, LAST) / "model.safetensors") for path in (plain, sampled)]
    assert not any(weights[0][name].equal(weights[1][name]) for name in weights[0] if name.endswith("weight"))
    logs = [(path / "train.log").read_text(encoding="utf-8") for path in (plain, sampled)]
    assert [log.count("subword sampling: an epoch has ") for log in logs] == [0, 1]


def test_train_takes_the_tokenizer_that_is_given(
    finished: Callable[[Algorithm], TrainJob], corpus: DataConfig, tmp_path: Path
) -> None:
    """Of the same model file a run makes the same pieces, so it learns the same."""
    straight = finished(Algorithm.unigram)
    job = sampling_job(tmp_path / "a", corpus, Algorithm.unigram, max_steps=4, validate_every=4)
    job.tokenizer = TokenizerConfig(model=str(Path(straight.run_dir) / "tokenizer.model"))
    run(job)
    losses = [
        [row["train/loss"] for row in metrics_of(Path(path)) if "train/loss" in row]
        for path in (job.run_dir, straight.run_dir)
    ]
    assert losses[0] == losses[1][:4]


@pytest.mark.plugins
def test_train_draws_the_pieces_of_each_copy_and_resumes_on_them(corpus: DataConfig, tmp_path: Path) -> None:
    """A run in whose epochs the copies were alike, as once they were, does not go on."""
    from transformer.tools.replay.command import replay
    from transformer.tools.replay.job import ReplayJob

    more = ExtraConfig(corpus.test["test"].src, corpus.test["test"].tgt, weight=3.0)
    copies = replace(corpus, extra={"more": more})
    straight = run(sampling_job(tmp_path / "straight", copies))
    job = sampling_job(tmp_path / "a", copies)
    stop_at(job, steps_by_epoch(straight)[1][0])
    run(job)
    assert_same_end(Path(job.run_dir), straight)

    alike = sampling_job(tmp_path / "b", copies)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformer.training.saving.plan_version", lambda *_: 1)
        stop_at(alike, 4)
    with pytest.raises(CheckpointError, match=r"the order of the data and its pieces: version 1 -> 2"):
        run(alike)
    with pytest.raises(InputError, match=r"version 1 -> 2: replay it with the version"):
        replay(ReplayJob(run_dir=alike.run_dir, step=5))


@pytest.mark.parametrize(
    ("weight", "rate", "version"), [(None, 0.1, 1), (1.0, 0.1, 1), (0.5, 0.1, 1), (1.5, None, 1), (1.5, 0.1, 2)]
)
def test_plan_version_rises_only_where_copies_draw_their_own_pieces(
    weight: float | None, rate: float | None, version: int, corpus: DataConfig, tmp_path: Path
) -> None:
    extra = {} if weight is None else {"more": ExtraConfig("a", "b", weight=weight)}
    job = sampling_job(tmp_path, replace(corpus, extra=extra), subword_sampling=rate)
    assert plan_version(job, [(200, 1.0)]) == version
    at_temperature = replace(job, data=replace(job.data, temperature=5.0))
    assert plan_version(at_temperature, [(200, 1.0)]) == (1 if rate is None else 2)
    assert plan_version(job, [(2**24, 1.0)]) == version
    assert plan_version(job, [(2**24, 1.0), (1, 0.5)]) == 3


@pytest.mark.parametrize(("value", "shown"), [(0.1, "0.1"), (None, "null")])
def test_train_does_not_resume_with_other_sampling(
    value: float | None, shown: str, finished: Callable[[Algorithm], TrainJob]
) -> None:
    job = finished(Algorithm.bpe)
    changed = replace(job, train=replace(job.train, subword_sampling=value))
    with pytest.raises(CheckpointError, match=re.escape(f"train.subword_sampling: 0.3 -> {shown}")) as refused:
        run(changed)
    assert "\n" not in str(refused.value)
    assert steps_of(Path(job.run_dir))[-1] == LAST


def test_train_refuses_a_probability_above_one(
    finished: Callable[[Algorithm], TrainJob], corpus: DataConfig, tmp_path: Path
) -> None:
    """Where the tokenizer is given, when it has been read."""

    job = sampling_job(tmp_path / "a", corpus)
    job.tokenizer = TokenizerConfig(model=str(Path(finished(Algorithm.bpe).run_dir) / "tokenizer.model"))
    job.train.subword_sampling = 1.5
    with pytest.raises(InputError, match=r"train\.subword_sampling=1\.5: for BPE it is a probability"):
        run(job)
    assert steps_of(tmp_path / "a") == []


@pytest.mark.ci
def test_two_ranks_train_on_the_pieces_of_one(corpus: DataConfig, tmp_path: Path) -> None:
    """Begun on two ranks, ended in the second epoch on one, against two all the way: in float64, to 1e-9."""
    recipe: dict[str, Any] = {"precision": Precision.fp64, "max_tokens": 100}
    straight = sampling_job(tmp_path / "two", corpus, **recipe)
    assert ranks(2, lambda: run(straight), tmp_path) == [0, 0]
    begun = sampling_job(tmp_path / "moved", corpus, **recipe | {"max_steps": 2, "validate_every": 2})
    assert ranks(2, lambda: run(begun), tmp_path) == [0, 0]
    run(sampling_job(tmp_path / "moved", corpus, **recipe))
    for name in ("model", "optimizer"):
        folders = (step_dir(tmp_path / run_dir, LAST) for run_dir in ("two", "moved"))
        one, other = (load_file(folder / f"{name}.safetensors") for folder in folders)
        assert one.keys() == other.keys()
        assert max(float((one[key] - other[key]).abs().max()) for key in one) < 1e-9


def test_train_leaves_no_thread_behind(corpus: DataConfig, tmp_path: Path) -> None:
    run(sampling_job(tmp_path / "a", corpus, max_steps=2, validate_every=2))
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith(("epoch", "subwords"))]
