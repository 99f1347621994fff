"""A step run again: it is the step that was, and the first number that is not finite is found where it was put."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.corpora import (
    forge_tensors,
    metrics_of,
    read,
    reseal,
    run,
    run_command,
    step_dir,
    steps_of,
    tiny_job,
    write_corpus,
)
from transformer.config.jobs import TrainJob
from transformer.config.settings import DataConfig, LayoutKind, Norm, OptimizerKind, Precision, SearchConfig
from transformer.data.prepare import prepare
from transformer.data.store import Store
from transformer.data.tokenizer import Tokenizer
from transformer.errors import InputError, NumericalError
from transformer.tools.replay.command import Phase, format_replay, replay
from transformer.tools.replay.job import ReplayJob

Tensors = dict[str, torch.Tensor]
LAST = 8
WEIGHT = "encoder.0.feed_forward.W_1.weight"
LAYOUTS = [LayoutKind.padded, LayoutKind.packed]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def short_job(run_dir: Path, corpus: DataConfig, model: dict[str, Any] | None = None, **recipe: Any) -> TrainJob:
    """Eight steps of two or three micro-batches; an epoch has five."""
    settings = {"max_steps": LAST, "validate_every": LAST, "keep_last": 9, "average": 1, "max_tokens": 300, **recipe}
    job = tiny_job(run_dir, corpus, model, **settings)
    return replace(job, search=SearchConfig(beam_size=1, max_extra=1))


@pytest.fixture(scope="module")
def finished(corpus: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[LayoutKind, TrainJob]:
    """A run in each layout, with checkpoints at 4 and 8; tests copy them."""
    jobs = {layout: short_job(tmp_path_factory.mktemp("run") / "a", corpus, layout=layout) for layout in LAYOUTS}
    assert [steps_of(run(job)) for job in jobs.values()] == [[4, 8]] * 2
    return jobs


@pytest.fixture
def copied(finished: dict[LayoutKind, TrainJob], tmp_path: Path) -> Callable[[LayoutKind], Path]:
    """A copy of the run in a layout."""

    def copy(layout: LayoutKind) -> Path:
        return Path(shutil.copytree(finished[layout].run_dir, tmp_path / "copy"))

    return copy


def content(folder: Path) -> dict[str, str]:
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize(("step", "origin"), [(2, None), (4, None), (5, "step-00000004"), (7, "step-00000004")])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_replay_runs_the_step_that_was(
    layout: LayoutKind, step: int, origin: str | None, copied: Callable[[LayoutKind], Path]
) -> None:
    """With dropout, across the end of an epoch: to the last bit, and nothing is written."""
    run_dir = copied(layout)
    before = content(run_dir)
    found = replay(ReplayJob(run_dir=str(run_dir), step=step))
    (logged,) = [row for row in metrics_of(run_dir) if row["step"] == step and "train/loss" in row]
    assert (found.loss, found.gradient_norm) == (logged["train/loss"], logged["train/gradient_norm"])
    assert (found.step, found.checkpoint, found.finding, found.loss_scale) == (step, origin, None, None)
    assert f"step {step} " in format_replay(found)
    assert "every number in it is finite" in format_replay(found)
    assert content(run_dir) == before


def test_replay_of_a_run_with_more_threads_than_this_machine_may_have_takes_one_for_each_core(
    copied: Callable[[LayoutKind], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    run_dir = copied(LayoutKind.packed)
    record = read(run_dir / "run.json")
    record["config"]["train"]["threads"] = record["resolved"]["threads"] = 60_000
    (run_dir / "run.json").write_text(json.dumps(record), encoding="utf-8")
    found = replay(ReplayJob(run_dir=str(run_dir), step=2))
    (logged,) = [row for row in metrics_of(run_dir) if row["step"] == 2 and "train/loss" in row]
    assert found.loss == logged["train/loss"]


def test_replay_of_muon_runs_the_step_that_was(tmp_path: Path, corpus: DataConfig) -> None:
    """Its gradient follows from the updates before it: step 7 from checkpoint 4."""
    recipe: dict[str, Any] = {"optimizer": OptimizerKind.muon, "weight_decay": 0.3, "clip_norm": 0.5}
    run_dir = run(short_job(tmp_path / "a", corpus, **recipe))
    found = replay(ReplayJob(run_dir=str(run_dir), step=7))
    (logged,) = [row for row in metrics_of(run_dir) if row["step"] == 7 and "train/loss" in row]
    assert (found.loss, found.gradient_norm) == (logged["train/loss"], logged["train/gradient_norm"])
    assert (found.checkpoint, found.finding) == ("step-00000004", None)


def spoil(run_dir: Path, step: int, change: Callable[[Tensors], object]) -> None:
    forge_tensors(step_dir(run_dir, step), "model.safetensors", change)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize(
    "name", ["encoder.0.self_attention.W_v", "encoder.0.feed_forward.W_2", "decoder.0.cross_attention.W_k"]
)
def test_replay_names_the_module_whose_output_overflows(
    name: str, layout: LayoutKind, copied: Callable[[LayoutKind], Path]
) -> None:
    run_dir = copied(layout)
    spoil(run_dir, 8, lambda tensors: tensors[f"{name}.weight"].fill_(3e38))
    found = replay(ReplayJob(run_dir=str(run_dir)))
    assert found.finding is not None
    assert (found.step, found.checkpoint) == (9, "step-00000008")
    assert (found.finding.phase, found.finding.module, found.finding.micro_batch) == (Phase.forward, name, 0)
    assert f"in the output of {name}" in format_replay(found)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_replay_names_the_sentences_with_the_piece_that_overflows(
    layout: LayoutKind, finished: dict[LayoutKind, TrainJob], copied: Callable[[LayoutKind], Path]
) -> None:
    run_dir = copied(layout)
    prepared = prepare(finished[layout])
    tokenizer = prepared.tokenizers.source
    sources = texts_of(prepared.store, tokenizer)
    (piece,) = {ids[0] for ids in tokenizer.encode(["seven"])}
    spoil(run_dir, 4, lambda tensors: tensors["embedding"][piece].fill_(3e38))

    # Checkpoint 8 is newer, but behind the step.
    found = replay(ReplayJob(run_dir=str(run_dir), step=5)).finding
    assert found is not None
    assert (found.phase, found.module, found.micro_batch) == (Phase.forward, "source_embedding.dropout", 0)
    assert 0 < len(found.ids) < 60
    assert all(has_piece(prepared.store, number, piece) for number in found.ids)
    for sentence in found.sentences:
        assert sentence.source == sources[sentence.id]
        assert len(sentence.target.split()) == len(sentence.source.split())
    assert [sentence.id for sentence in found.sentences] == found.ids[:3]


def has_piece(store: Store, number: int, piece: int) -> bool:
    return piece in store.gather(torch.tensor([number]).numpy(), 0).pieces


def texts_of(store: Store, tokenizer: Tokenizer) -> list[str]:
    ids = [store.gather(torch.tensor([number]).numpy(), 0).pieces.tolist() for number in range(len(store))]
    return tokenizer.decode(ids)


def test_replay_goes_back_with_the_loss_scale_of_the_run(tmp_path: Path, corpus: DataConfig) -> None:
    """A scale of 2^60 leaves the range of fp16 on the way back; what comes first there is what the loss reads."""
    run_dir = run(short_job(tmp_path / "a", corpus, precision=Precision.fp16))
    folder = step_dir(run_dir, 8)
    state = read(folder / "state.json")
    assert state["training"]["loss_scale"]["scale"] == 65536.0
    state["training"]["loss_scale"]["scale"] = 2.0**60
    (folder / "state.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    reseal(folder)
    found = replay(ReplayJob(run_dir=str(run_dir)))
    assert found.finding is not None
    assert (found.finding.phase, found.finding.module) == (Phase.backward, "decoder.0.feed_forward_norm")
    assert (found.step, found.loss_scale) == (9, 2.0**60)
    assert len(found.finding.ids) > len(found.finding.sentences) == 3


def test_replay_of_a_run_that_stopped_runs_its_last_step(tmp_path: Path, corpus: DataConfig) -> None:
    """A weight above the range of fp16: seventeen updates are skipped, and their weights saved with the position."""
    job = short_job(tmp_path / "a", corpus, precision=Precision.fp16)
    run_dir = run(job)
    spoil(run_dir, 8, lambda tensors: tensors[WEIGHT].fill_(1e5))
    with pytest.raises(NumericalError, match=r"17 consecutive updates.*step-00000025"):
        run(replace(job, train=replace(job.train, max_steps=30, validate_every=30)))
    found = replay(ReplayJob(run_dir=str(run_dir)))
    assert found.finding is not None
    assert (found.step, found.checkpoint, found.loss_scale) == (25, "step-00000025", 1.0)
    assert (found.finding.phase, found.finding.module) == (Phase.forward, WEIGHT.removesuffix(".weight"))
    assert replay(ReplayJob(run_dir=str(run_dir), step=25)).finding == found.finding


def test_replay_names_the_weight_that_an_update_made_infinite(tmp_path: Path, corpus: DataConfig) -> None:
    """No checkpoint was ever saved: the run begins again."""
    job = short_job(tmp_path / "a", corpus, {"norm": Norm.pre}, learning_rate=3e38, warmup_steps=1)
    with pytest.raises(NumericalError, match="no checkpoint holds finite weights"):
        run(job)
    found = replay(ReplayJob(run_dir=job.run_dir))
    assert found.finding is not None
    assert (found.step, found.checkpoint) == (1, None)
    assert (found.finding.phase, found.finding.module) == (Phase.update, "embedding")
    assert found.finding.ids == []


def test_replay_prints_what_it_found(copied: Callable[[LayoutKind], Path], capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = copied(LayoutKind.packed)
    spoil(run_dir, 8, lambda tensors: tensors[WEIGHT].fill_(3e38))
    run_command("replay", ReplayJob(run_dir=str(run_dir)))
    assert "the first number that is not finite: in the output of encoder.0.feed_forward.W_1" in capsys.readouterr().out


def test_replay_of_a_run_that_has_ended_says_so(
    copied: Callable[[LayoutKind], Path], caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = copied(LayoutKind.padded)
    found = replay(ReplayJob(run_dir=str(run_dir)))
    assert (found.step, found.finding) == (12, None)  # as far as the next checkpoint would be
    assert caplog.messages.count("the training ended at step 8: these steps were never taken") == 1
    caplog.clear()
    replay(ReplayJob(run_dir=str(run_dir), step=8))
    assert not [message for message in caplog.messages if "never taken" in message]


def test_replay_of_what_is_not_there_is_refused(
    tmp_path: Path, corpus: DataConfig, copied: Callable[[LayoutKind], Path]
) -> None:
    with pytest.raises(InputError, match="no such run directory"):
        replay(ReplayJob(run_dir=str(tmp_path / "nowhere")))
    run_dir = copied(LayoutKind.padded)
    with pytest.raises(InputError, match=r"^step=80: .* is a training of 8 steps$"):
        replay(ReplayJob(run_dir=str(run_dir), step=80))
    record = read(run_dir / "run.json")
    record["data_digest"] = "0" * 64
    (run_dir / "run.json").write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(InputError, match="have changed since this run began"):
        replay(ReplayJob(run_dir=str(run_dir)))
    with pytest.raises(ValueError, match="step=0 must be"):
        ReplayJob(step=0)
