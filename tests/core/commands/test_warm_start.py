"""A run that begins with another's weights and tokenizer: what it takes along, what it leaves, what it refuses."""

import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support.corpora import (
    as_a_command,
    assert_same_end,
    assert_same_tensors,
    in_a_child,
    metrics_of,
    progress_of,
    read,
    run,
    step_dir,
    tiny_job,
    write_corpus,
)
from support.interventions import before_each_update
from support.ranks import ranks
from support.resumed_runs import damage, snapshot, stop_at, with_value
from support.tiers import tiers
from transformer.checkpoint import load_weights
from transformer.cli.commands import compose
from transformer.config.jobs import PrepareJob, TrainJob
from transformer.config.settings import (
    Activation,
    DataConfig,
    Device,
    Norm,
    OptimizerKind,
    Positions,
    Precision,
    SearchOverride,
    Start,
    paper_peak,
)
from transformer.data.prepare import prepare
from transformer.data.tokenizer import Tokenizer
from transformer.decoding.loading import load_translator
from transformer.distributed import World
from transformer.errors import CheckpointError, InputError
from transformer.training.step import Objective
from transformer.training.validate import DevSet, dev_loss
from transformer.training.warm_start import with_model_of
from transformer.vocabulary import EOS

CPU = torch.device("cpu")
STILL: dict[str, Any] = {"max_steps": 1, "learning_rate": 1e-30, "average": 1}  # the one update changes nothing


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """The corpus of the run that goes on: its own tokenizer would be another."""
    return write_corpus(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="module")
def source(corpus: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, with a moving average in its checkpoints; tests do not write to it."""
    recipe: dict[str, Any] = {"max_steps": 12, "ema_decay": 0.5, "learning_rate": 1e-2}
    return run(tiny_job(tmp_path_factory.mktemp("runs") / "source", corpus, **recipe))


def warm(run_dir: Path, data: DataConfig, init_from: Path | str, model: Any = None, **recipe: Any) -> TrainJob:
    return replace(tiny_job(run_dir, data, model, **recipe), init_from=str(init_from))


def assert_near(found: Path, expected: Path) -> None:
    """The weights are these, but for updates of at most 1e-29."""
    one, two = load_file(found), load_file(expected)
    assert one.keys() == two.keys()
    assert all(torch.allclose(one[name], two[name], rtol=0, atol=1e-29) for name in one)


def test_init_from_has_the_peak_of_its_own_width(other: DataConfig, source: Path, tmp_path: Path) -> None:
    recipe: dict[str, Any] = {"learning_rate": None, "learning_rate_scale": 1.5, "warmup_steps": 2}
    run_dir = run(warm(tmp_path / "b", other, source, {"d_model": 64}, max_steps=2, average=1, **recipe))
    rates = [row["train/rate"] for row in metrics_of(run_dir) if "train/rate" in row]
    assert rates == pytest.approx([1.5 * paper_peak(32, 2) / 2, 1.5 * paper_peak(32, 2)], rel=1e-12)


# ---- what it takes along --------------------------------------------------------------------------------------------


def test_init_from_begins_with_the_loss_of_its_source(other: DataConfig, source: Path, tmp_path: Path) -> None:
    """Weights, tokenizer, and the loss on the new development set; the source is as it was."""
    before = snapshot(source)
    run_dir = run(warm(tmp_path / "b", other, source, **STILL))
    assert snapshot(source) == before
    assert (run_dir / "tokenizer.model").read_bytes() == (source / "tokenizer.model").read_bytes()
    assert_near(step_dir(run_dir, 1) / "model.safetensors", source / "averaged" / "model.safetensors")

    options: Any = {"search": SearchOverride(), "device": Device.cpu, "precision": Precision.fp32}
    old = load_translator(source, checkpoint="averaged", **options)
    lines = [Path(path).read_text(encoding="utf-8").split("\n")[:-1] for path in (other.dev.src, other.dev.tgt)]
    dev = DevSet.of(list(zip(*lines, strict=True)), old.tokenizers, max_pieces=1000)
    objective, alone = Objective(old.model, 0.1), World(0, 1, {})
    expected = dev_loss(objective, dev.store, alone, max_tokens=300, device=CPU, precision=Precision.fp32)
    (row,) = [row for row in metrics_of(run_dir) if "dev/loss" in row]
    assert row["dev/loss"] == pytest.approx(expected[0], rel=1e-12)
    cold = run(tiny_job(tmp_path / "cold", other, **STILL))
    (cold_row,) = [row for row in metrics_of(cold) if "dev/loss" in row]
    assert row["dev/loss"] < cold_row["dev/loss"] - 0.5


def test_init_from_begins_with_a_fresh_optimizer_schedule_and_data_order(
    other: DataConfig, source: Path, tmp_path: Path
) -> None:
    run_dir = run(warm(tmp_path / "b", other, source, max_steps=1, average=1))
    moments = load_file(step_dir(run_dir, 1) / "optimizer.safetensors")
    assert float(moments["updates"]) == 1.0
    for name, mean in moments.items():
        if name.startswith("exp_avg/"):  # after one update they are 0.1 g and 0.02 g^2
            square = moments[name.replace("exp_avg/", "exp_avg_sq/")]
            torch.testing.assert_close(square, 2.0 * mean**2, rtol=1e-4, atol=1e-20)
    state = progress_of(run_dir, 1)["training"]["progress"]
    assert (state["step"], state["epoch"], state["step_in_chapter"]) == (1, 0, 1)
    (row,) = [row for row in metrics_of(run_dir) if "train/rate" in row]
    assert row["train/rate"] == pytest.approx(3e-3 / 10)


def test_init_from_takes_the_other_optimizer(other: DataConfig, source: Path, tmp_path: Path) -> None:
    """The first momentum of Muon is 0.05 g; of Adam's moments nothing is left."""
    recipe: dict[str, Any] = {"max_steps": 1, "average": 1}
    of_adam = run(warm(tmp_path / "adam", other, source, **recipe))
    of_muon = run(warm(tmp_path / "muon", other, source, optimizer=OptimizerKind.muon, **recipe))
    adam, muon = (load_file(step_dir(run_dir, 1) / "optimizer.safetensors") for run_dir in (of_adam, of_muon))
    name = "encoder.0.feed_forward.W_1.weight"
    assert f"exp_avg_sq/{name}" in adam
    assert f"exp_avg_sq/{name}" not in muon
    torch.testing.assert_close(2.0 * muon[f"exp_avg/{name}"], adam[f"exp_avg/{name}"])


def test_init_from_puts_the_new_text_into_the_old_pieces(other: DataConfig, source: Path, tmp_path: Path) -> None:
    """Under `prepare` too, which needs no weights; from a run, and from a checkpoint in it."""
    own = prepare(tiny_job(tmp_path / "own", other)).tokenizers.source.model
    old = (source / "tokenizer.model").read_bytes()
    assert own != old
    for place in (source, step_dir(source, 8), source / "averaged"):
        prepared = prepare(warm(tmp_path / "b", other, place))
        assert prepared.tokenizers.source.model == old
        first = Path(other.train.src).read_text(encoding="utf-8").partition("\n")[0]
        (pieces,) = Tokenizer(old, "old").encode([first])
        (found, count) = prepared.store.gather(torch.zeros(1, dtype=torch.int64).numpy(), 0)
        assert [*found.tolist(), EOS] == [*pieces, EOS]
        assert count.tolist() == [len(pieces)]
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("checkpoints/step-00000008", "checkpoints/step-00000008/ema.safetensors"),
        ("checkpoints/step-00000008/", "checkpoints/step-00000008/ema.safetensors"),
        ("averaged", "averaged/model.safetensors"),
        ("", "averaged/model.safetensors"),
    ],
)
def test_init_from_takes_the_weights_that_translate(
    other: DataConfig, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, expected: str
) -> None:
    """Those that translate: the moving average of a checkpoint; written relative to where the command runs."""
    monkeypatch.chdir(source.parent)
    run_dir = run(warm(tmp_path / "b", other, f"{source.name}/{place}", **STILL))
    assert_near(step_dir(run_dir, 1) / "model.safetensors", source / expected)
    origin = read(run_dir / "run.json")["init_from"]
    folder = (source / expected).parent
    assert origin == {
        "path": str(folder),
        "step": 8 if "step" in place else 12,
        "manifest_sha256": hashlib.sha256((folder / "MANIFEST.json").read_bytes()).hexdigest(),
        "imported": None,
    }


def test_init_from_takes_the_last_weights_of_a_run_that_is_not_averaged_yet(
    corpus: DataConfig, other: DataConfig, tmp_path: Path
) -> None:
    unfinished = stop_at(tiny_job(tmp_path / "a", corpus), 5)
    run_dir = run(warm(tmp_path / "b", other, unfinished, **STILL))
    assert_near(step_dir(run_dir, 1) / "model.safetensors", step_dir(unfinished, 5) / "model.safetensors")


def test_init_from_begins_the_moving_average_with_the_same_weights(
    other: DataConfig, source: Path, tmp_path: Path
) -> None:
    run_dir = run(warm(tmp_path / "b", other, source, ema_decay=0.999, **STILL))
    assert_near(step_dir(run_dir, 1) / "ema.safetensors", source / "averaged" / "model.safetensors")


def test_init_from_is_null_in_the_record_of_a_run_from_nothing(other: DataConfig, tmp_path: Path) -> None:
    run_dir = run(tiny_job(tmp_path / "a", other, max_steps=1, average=1))
    assert read(run_dir / "run.json")["init_from"] is None


def test_init_from_begins_alike_on_every_rank(other: DataConfig, source: Path, tmp_path: Path) -> None:
    job = warm(tmp_path / "b", other, source, max_tokens=100, ema_decay=0.5, **STILL)
    assert ranks(2, lambda: run(job), tmp_path) == [0, 0]
    assert_near(step_dir(tmp_path / "b", 1) / "model.safetensors", source / "averaged" / "model.safetensors")


# ---- whose model it is ----------------------------------------------------------------------------------------------

DIFFERENT: dict[str, dict[str, Any]] = {
    "layers": {"n_layers": 2},
    "decoder's layers": {"n_decoder_layers": 2},
    "width": {"d_model": 64, "d_k": 16, "d_v": 16},
    "inner width": {"d_ff": 32},
    "heads": {"n_heads": 4, "d_k": 16, "d_v": 16},
    "keys": {"d_k": 8},
    "activation": {"activation": Activation.gelu},
    "biases": {"biases": True},
    "norm": {"norm": Norm.pre},
    "positions": {"positions": Positions.learned},
    "as Marian": {"start": Start.zeros, "positions": Positions.marian},
    "embeddings": {"tie_embeddings": False},
    "two": {"n_layers": 2, "d_ff": 32},
}


def assert_refused(job: TrainJob, words: str, error: type[Exception] = InputError) -> None:
    """In one line, by `train`, with nothing written."""
    with pytest.raises(error) as refused:
        run(job)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not Path(job.run_dir).exists()


@pytest.mark.parametrize("model", DIFFERENT.values(), ids=DIFFERENT)
def test_init_from_brings_its_own_model(
    other: DataConfig, source: Path, tmp_path: Path, model: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    own = tiny_job(tmp_path / "a", other).model
    with as_a_command():
        job = with_model_of(load_weights(source / "averaged"), warm(tmp_path / "b", other, source, model))
    assert job.model == own
    assert "the model takes its settings from there: " in caplog.text
    assert all(name in caplog.text for name in model)


def test_init_from_leaves_what_trains_only_to_the_job(other: DataConfig, source: Path, tmp_path: Path) -> None:
    """Dropout, and the room of positions that are computed, beside an inner width that is the source's."""
    free = {"dropout": 0.3, "attention_dropout": 0.1, "relu_dropout": 0.1, "max_positions": 300}
    job = warm(tmp_path / "b", other, source, free | {"d_ff": 32}, **STILL)
    run_dir = run(job)
    assert_near(step_dir(run_dir, 1) / "model.safetensors", source / "averaged" / "model.safetensors")
    model = read(run_dir / "run.json")["config"]["model"]
    assert {name: model[name] for name in free} == free
    assert model["d_ff"] == 64
    run(replace(job, train=replace(job.train, max_steps=2)))  # goes on, under the same settings
    assert read(run_dir / "results.json")["steps"] == 2


def test_init_from_takes_the_number_of_learned_positions(corpus: DataConfig, other: DataConfig, tmp_path: Path) -> None:
    learned = {"positions": Positions.learned}
    run_dir = run(tiny_job(tmp_path / "a", corpus, learned, max_steps=1, average=1))
    job = with_model_of(
        load_weights(run_dir / "averaged"), warm(tmp_path / "b", other, run_dir, {"max_positions": 300})
    )
    assert (job.model.positions, job.model.max_positions) == (Positions.learned, 1024)


@pytest.mark.parametrize("override", ["model.d_ff=32", "+model.norm=pre", "model.biases=false"])
def test_init_from_refuses_settings_of_the_model_beside_it(override: str) -> None:
    key = override.lstrip("+").partition("=")[0]
    with pytest.raises(InputError, match=f"init_from=a brings its own model: leave {key} out; of model.*, only these"):
        compose("train", ["init_from=a", override])
    job = compose("train", ["init_from=a", "model.dropout=0.3", "model.max_positions=300"])
    assert (job.model.dropout, job.model.max_positions) == (0.3, 300)


def copied_checkpoint(source: Path, folder: Path) -> Path:
    return Path(shutil.copytree(step_dir(source, 8), folder / "step-00000008"))


def without_checkpoints(source: Path, folder: Path) -> Path:
    (folder / "a").mkdir()
    shutil.copy(source / "tokenizer.model", folder / "a")
    return folder / "a"


def nothing(source: Path, folder: Path) -> Path:
    return folder / "missing"


def empty(source: Path, folder: Path) -> Path:
    (folder / "a").mkdir()
    return folder / "a"


PLACES = {
    "missing": (nothing, "missing: no such run directory"),
    "no run": (empty, "a: no checkpoint yet"),
    "no checkpoint": (without_checkpoints, "a: no checkpoint yet"),
    "a checkpoint outside its run": (copied_checkpoint, "step-00000008: no run directory with a tokenizer.model"),
}


@pytest.mark.parametrize(("make", "words"), PLACES.values(), ids=PLACES)
def test_init_from_refuses_a_place_without_a_model(
    other: DataConfig, source: Path, tmp_path: Path, make: Callable[[Path, Path], Path], words: str
) -> None:
    assert_refused(warm(tmp_path / "b", other, make(source, tmp_path)), words)


@pytest.mark.parametrize("make", [nothing, empty])
def test_init_from_without_a_tokenizer_is_refused_by_prepare(
    other: DataConfig, source: Path, tmp_path: Path, make: Callable[[Path, Path], Path]
) -> None:
    place = make(source, tmp_path)
    with pytest.raises(InputError, match="no run directory with a tokenizer") as refused:
        prepare(warm(tmp_path / "b", other, place))
    assert f"init_from={place}" in str(refused.value)


def test_init_from_refuses_a_damaged_checkpoint(other: DataConfig, source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "a")
    damage(tmp_path / "a", 8, "ema.safetensors")
    assert_refused(warm(tmp_path / "b", other, step_dir(tmp_path / "a", 8)), "sha256 differs", CheckpointError)


def test_init_from_refuses_weights_of_another_tokenizer(other: DataConfig, source: Path, tmp_path: Path) -> None:
    job = with_value(tiny_job(tmp_path / "small", other, max_steps=1, average=1), "tokenizer.vocab_size", 40)
    small = run(job)
    shutil.copytree(source, tmp_path / "a")
    shutil.copy(small / "tokenizer.model", tmp_path / "a")
    with pytest.raises(CheckpointError, match="does not fit this model: embedding is"):
        run(warm(tmp_path / "b", other, tmp_path / "a"))


def test_init_from_takes_no_other_tokenizer_beside_it(other: DataConfig, source: Path, tmp_path: Path) -> None:
    """Another one is refused; the same one, under any name, is the same one."""
    (tmp_path / "own.model").write_bytes(prepare(tiny_job(tmp_path / "own", other)).tokenizers.source.model)
    shutil.copy(source / "tokenizer.model", tmp_path / "same.model")
    job = warm(tmp_path / "b", other, source, **STILL)
    assert_refused(with_value(job, "tokenizer.model", str(tmp_path / "own.model")), "own.model is not ")
    run(with_value(job, "tokenizer.model", str(tmp_path / "same.model")))


def test_init_from_is_refused_in_one_line_by_the_commands(
    other: DataConfig, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line and status 2; the paths as they are typed."""
    os.symlink(source, tmp_path / "source")
    monkeypatch.chdir(tmp_path)
    missing = warm(Path("b"), other, "missing")
    jobs = {
        "prepare": (PrepareJob(**vars(missing)), "init_from=missing: no run directory"),
        "train": (missing, "missing: no such run directory"),
    }
    for name, (job, words) in jobs.items():
        found = in_a_child(name, job, tmp_path)
        assert (found.status, found.said.count("\n")) == (InputError.exit_status, 1)
        assert f"transformer: error: {words}" in found.said
    run(warm(Path("b"), other, "source", **STILL))
    assert_near(step_dir(tmp_path / "b", 1) / "model.safetensors", source / "averaged" / "model.safetensors")


# ---- resumed --------------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(source: Path, tmp_path: Path) -> Path:
    """The source, which a test may take away."""
    return Path(shutil.copytree(source, tmp_path / "source"))


def take_away(copy: Path, other: DataConfig) -> None:
    shutil.rmtree(copy)


def put_another_in_its_place(copy: Path, other: DataConfig) -> None:
    shutil.rmtree(copy)
    run(tiny_job(copy, other, {"n_layers": 2}, max_steps=1, average=1))


@pytest.mark.parametrize("happens", tiers([put_another_in_its_place], [take_away], pytest.mark.ci))
def test_init_from_is_not_needed_any_more_once_a_run_has_begun(
    other: DataConfig, copy: Path, tmp_path: Path, happens: Callable[[Path, DataConfig], None]
) -> None:
    job = warm(tmp_path / "b", other, copy, ema_decay=0.9)
    calm = run(replace(job, run_dir=str(tmp_path / "calm")))
    stop_at(job, 5)
    happens(copy, other)
    run(job)
    assert_same_end(tmp_path / "b", calm)
    with as_a_command():
        assert prepare(job).tokenizers.source.model == (calm / "tokenizer.model").read_bytes()
    run(job)  # and a finished run prints its results


def test_init_from_is_read_again_before_the_first_checkpoint(other: DataConfig, copy: Path, tmp_path: Path) -> None:
    """Killed in its first step, under a directory that is there already."""

    def die() -> None:
        raise KeyboardInterrupt

    job = warm(tmp_path / "b", other, copy, **STILL)
    with before_each_update(die), pytest.raises(KeyboardInterrupt):
        run(job)
    assert (tmp_path / "b" / "run.json").exists()
    shutil.move(copy, tmp_path / "moved")
    with pytest.raises(InputError, match="source: no such run directory"):
        run(job)
    run(replace(job, init_from=str(tmp_path / "moved")))
    assert_near(
        step_dir(tmp_path / "b", 1) / "model.safetensors", tmp_path / "moved" / "averaged" / "model.safetensors"
    )


def test_init_from_may_not_change_once_a_run_has_begun(
    corpus: DataConfig, other: DataConfig, source: Path, tmp_path: Path
) -> None:
    job = warm(tmp_path / "b", other, source, max_steps=4)
    stop_at(job, 2)
    for place in (str(step_dir(source, 8)), None):
        with pytest.raises(CheckpointError, match=f"init_from: {source} -> {place or 'null'}"):
            run(replace(job, init_from=place))
    run(job)
    cold = tiny_job(tmp_path / "cold", other, max_steps=4)
    stop_at(cold, 2)
    with pytest.raises(CheckpointError, match="init_from: null -> "):
        run(replace(cold, init_from=str(source)))


def test_init_from_is_the_same_run_stopped_and_resumed(other: DataConfig, source: Path, tmp_path: Path) -> None:
    calm = run(warm(tmp_path / "calm", other, source, max_steps=8))
    job = warm(tmp_path / "b", other, source, max_steps=8)
    for step in (1, 3, 6):
        stop_at(job, step)
    run(job)
    assert_same_end(tmp_path / "b", calm)
    assert_same_tensors(tmp_path / "b" / "averaged" / "model.safetensors", calm / "averaged" / "model.safetensors")
