"""Training in chapters: resumed and replayed in any of them, it is the straight run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.corpora import assert_same_end, metrics_of, progress_of, run, tiny_job, write_corpus
from support.resumed_runs import learned, stop_at
from transformer.config.jobs import TrainJob
from transformer.config.settings import DataConfig, SearchConfig
from transformer.errors import CheckpointError, InputError

LAST = 16  # 200 pairs in three chapters of two or three steps each


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(autouse=True)
def small_chapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer.data.chapters.CHAPTER", 70)


def job_of(run_dir: Path, corpus: DataConfig) -> TrainJob:
    """With dropout, which other seeds would change."""
    recipe: dict[str, Any] = {"max_steps": LAST, "validate_every": LAST, "save_every": 1, "keep_last": LAST}
    job = tiny_job(run_dir, corpus, **recipe, average=1)
    return replace(job, search=SearchConfig(beam_size=1, max_extra=1))


def places_of(run_dir: Path) -> list[tuple[int, int, int]]:
    """Epoch, chapter and step in it after each step."""
    found = [progress_of(run_dir, step)["training"]["progress"] for step in range(1, LAST + 1)]
    return [(progress["epoch"], progress["chapter"], progress["step_in_chapter"]) for progress in found]


@pytest.mark.plugins
def test_train_resumes_in_any_chapter(corpus: DataConfig, tmp_path: Path) -> None:
    """Stopped in the middle of chapters and at the end of one, in both epochs: bit-identical, and replayed the same."""
    from transformer.tools.replay.command import format_replay, replay
    from transformer.tools.replay.job import ReplayJob

    straight = run(job_of(tmp_path / "straight", corpus))
    places = places_of(straight)
    assert {(epoch, chapter) for epoch, chapter, _ in places} >= {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)}
    assert places == sorted(set(places))

    middle, end_of_first = places.index((0, 1, 1)) + 1, places.index((1, 0, 1))
    job = job_of(tmp_path / "stopped", corpus)
    for step in (middle, end_of_first, places.index((1, 1, 1)) + 1):
        stop_at(job, step)
    resumed = run(job)
    assert_same_end(resumed, straight)
    assert learned(resumed) == learned(straight)
    assert places_of(resumed) == places

    replayed = replay(ReplayJob(run_dir=str(straight), step=middle))
    (logged,) = [row for row in metrics_of(straight) if row["step"] == middle and "train/loss" in row]
    assert (replayed.loss, replayed.gradient_norm) == (logged["train/loss"], logged["train/gradient_norm"])
    assert f"step {middle} (epoch 1, chapter 2, step 0 in it)" in format_replay(replayed)


@pytest.mark.plugins
def test_train_does_not_go_on_in_another_order(
    corpus: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of before there were chapters, on a corpus that has some now."""
    from transformer.tools.replay.command import replay
    from transformer.tools.replay.job import ReplayJob

    with monkeypatch.context() as patch:
        patch.setattr("transformer.data.chapters.CHAPTER", 200)
        job = job_of(tmp_path / "a", corpus)
        stop_at(job, 2)
        assert progress_of(tmp_path / "a", 2)["training"]["plan_version"] == 1
    with pytest.raises(CheckpointError, match=r"the order of the data and its pieces: version 1 -> 3"):
        run(job)
    with pytest.raises(InputError, match=r"version 1 -> 3: replay it with the version"):
        replay(ReplayJob(run_dir=job.run_dir, step=2))
