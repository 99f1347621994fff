"""Run directories that somebody forged or spoiled, with digests that are right: every command refuses them in one line.

What crashed the process once is tried in a process of its own, through the public command.
"""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from corpora import (
    Ended,
    forge_tensors,
    in_a_child,
    read,
    run,
    step_dir,
    steps_of,
    tiny_job,
    write_corpus,
)
from safetensors.torch import load_file

from transformer.average import average_checkpoints
from transformer.config.jobs import AverageJob, EvaluateJob, Job, TrainJob, TranslateJob
from transformer.config.settings import DataConfig, Norm, Positions
from transformer.errors import CheckpointError

Tensors = dict[str, torch.Tensor]
LAST = 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def finished(corpus: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> TrainJob:
    """A short run with checkpoints at 2, 3 and 4; tests copy it."""
    recipe = {"max_steps": LAST, "save_every": 1, "validate_every": 2, "keep_last": 3, "keep_best": 0}
    job = tiny_job(tmp_path_factory.mktemp("finished") / "a", corpus, **recipe)
    assert steps_of(run(job)) == [2, 3, 4]
    return job


@pytest.fixture
def job(finished: TrainJob, tmp_path: Path) -> TrainJob:
    """A copy of the run, with one more step to do."""
    shutil.copytree(finished.run_dir, tmp_path / "copy")
    recipe = replace(finished.train, max_steps=LAST + 1)
    return replace(finished, run_dir=str(tmp_path / "copy"), train=recipe)


def enter(command: str, job: TrainJob, text: str = "", checkpoint: str = "auto") -> Ended:
    """The command on the run directory of the job, in a child."""
    of_command: dict[str, Job] = {
        "train": job,
        "translate": TranslateJob(run_dir=job.run_dir, checkpoint=checkpoint, threads=1),
        "evaluate": EvaluateJob(run_dir=job.run_dir, checkpoint=checkpoint, threads=1),
        "average": AverageJob(run_dir=job.run_dir),
    }
    return in_a_child(command, of_command[command], Path(job.run_dir).parent, text)


def assert_refused(found: Ended, status: int, words: str) -> None:
    """It printed nothing, and ended with this status and one line of error that has these words in it."""
    assert found.status == status, found
    (line,) = [line for line in found.said.splitlines() if "error" in line]
    assert line.startswith("transformer: error: ")
    assert words in line
    assert "Traceback" not in found.said
    assert found.printed == ""


# ---- Adam's moments -------------------------------------------------------------------------------------------------

WEIGHT = "encoder.0.feed_forward.W_1.weight"


def put(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], object]:
    def apply(tensors: Tensors) -> None:
        tensors[name] = change(tensors[name])

    return apply


def with_one(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """The tensor with one number replaced."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[5] = value
        return tensor

    return change


MEAN, SQUARE = f"exp_avg/{WEIGHT}", f"exp_avg_sq/{WEIGHT}"
MOMENTS: dict[str, Callable[[Tensors], object]] = {
    "shape 0": put(MEAN, lambda _: torch.zeros(0)),
    "shape 1": put(SQUARE, lambda _: torch.zeros(1)),
    "half": put(SQUARE, torch.Tensor.half),
    "scalar": put(MEAN, lambda _: torch.tensor(1.0)),
    "double": put(MEAN, torch.Tensor.double),
    "turned": put(MEAN, lambda tensor: tensor.T.contiguous()),
    "flat": put(SQUARE, torch.Tensor.flatten),
    "missing": lambda tensors: tensors.pop(MEAN),
    "extra": lambda tensors: tensors.update({f"{MEAN}.more": torch.zeros(2)}),
    "none": lambda tensors: tensors.clear(),
    "NaN mean": put(MEAN, with_one(math.nan)),
    "infinite mean": put(MEAN, with_one(-math.inf)),
    "NaN square": put(SQUARE, with_one(math.nan)),
    "infinite square": put(SQUARE, with_one(math.inf)),
    "negative square": put(SQUARE, with_one(-1e-9)),
    "no updates": lambda tensors: tensors.pop("updates"),
    "updates: vector": put("updates", lambda _: torch.tensor([4.0, 4.0])),
    "updates: vector of one": put("updates", lambda _: torch.tensor([4.0])),
    "updates: empty": put("updates", lambda _: torch.zeros(0)),
    "updates: negative": put("updates", lambda _: torch.tensor(-1.0)),
    "updates: NaN": put("updates", lambda _: torch.tensor(math.nan)),
    "updates: infinite": put("updates", lambda _: torch.tensor(math.inf)),
    "updates: integer": put("updates", lambda _: torch.tensor(4)),
    "updates: bool": put("updates", lambda _: torch.tensor(True)),
}
CRASHED = ("shape 0", "shape 1", "half", "scalar", "updates: vector", "updates: empty")  # by a signal, or a traceback


@pytest.mark.parametrize("case", MOMENTS)
def test_load_moments_refuses_what_is_not_of_this_model(job: TrainJob, case: str) -> None:
    forge_tensors(step_dir(Path(job.run_dir), LAST), "optimizer.safetensors", MOMENTS[case])
    with pytest.raises(CheckpointError, match=r"step-00000004: does not fit this model: \w") as refused:
        run(job)
    assert refused.value.exit_status == 4
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("case", CRASHED)
def test_load_moments_refuses_in_a_process_of_its_own(job: TrainJob, case: str) -> None:
    forge_tensors(step_dir(Path(job.run_dir), LAST), "optimizer.safetensors", MOMENTS[case])
    assert_refused(enter("train", job), 4, "step-00000004: does not fit this model")


def test_load_moments_takes_what_was_resealed_unchanged(job: TrainJob) -> None:
    """The forgeries are refused for what they hold, and not for how they were made."""
    forge_tensors(step_dir(Path(job.run_dir), LAST), "optimizer.safetensors", lambda tensors: None)
    assert steps_of(run(job)) == [3, 4, 5]


# ---- weights that are not finite ------------------------------------------------------------------------------------

WILD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rate": ({}, {"learning_rate": 1e300}),
    "rate, pre-norm": ({"norm": Norm.pre}, {"learning_rate": 1e38}),
    "late": ({}, {"learning_rate": 1e38, "warmup_steps": 1_000_000}),
    "epsilon": ({"positions": Positions.learned}, {"adam_eps": 1e-320}),  # 0 in float32: 0 / 0 where nothing is read
    "moving average": ({}, {"learning_rate": 1e300, "ema_decay": 0.9}),
}


@pytest.mark.parametrize(("model", "recipe"), WILD.values(), ids=WILD)
def test_train_never_commits_weights_that_are_not_finite(
    corpus: DataConfig, tmp_path: Path, model: dict[str, Any], recipe: dict[str, Any]
) -> None:
    settings = {"max_steps": 40, "save_every": 1, "validate_every": 40, "keep_last": 40, **recipe}
    found = enter("train", tiny_job(tmp_path / "a", corpus, model, **settings))
    for path in (tmp_path / "a" / "checkpoints").glob("step-*/*.safetensors"):
        assert all(torch.isfinite(tensor).all() for tensor in load_file(path).values()), path
    assert_refused(found, 6, "not finite")


def spoil(tensors: Tensors) -> None:
    tensors[WEIGHT][3, 3] = math.nan


def test_train_refuses_to_resume_from_weights_that_are_not_finite(job: TrainJob) -> None:
    forge_tensors(step_dir(Path(job.run_dir), LAST), "model.safetensors", spoil)
    with pytest.raises(CheckpointError, match=rf"step-00000004: .*{WEIGHT}.* not finite"):
        run(job)


@pytest.mark.parametrize("command", ["translate", "evaluate", "init_from"])
def test_a_command_refuses_weights_that_are_not_finite(job: TrainJob, tmp_path: Path, command: str) -> None:
    forge_tensors(step_dir(Path(job.run_dir), LAST), "model.safetensors", spoil)
    if command == "init_from":
        other = replace(job, run_dir=str(tmp_path / "other"), init_from=str(step_dir(Path(job.run_dir), LAST)))
        found = enter("train", other)
    else:
        found = enter(command, job, "one two three\n", "step-4")
    assert_refused(found, 4, "not finite")


def test_average_leaves_out_weights_that_are_not_finite(job: TrainJob, caplog: pytest.LogCaptureFixture) -> None:
    run_dir = Path(job.run_dir)
    forge_tensors(step_dir(run_dir, 3), "model.safetensors", spoil)
    average_checkpoints(run_dir, [2, 3, 4])
    sound = [load_file(step_dir(run_dir, step) / "model.safetensors") for step in (2, 4)]
    averaged = load_file(run_dir / "averaged" / "model.safetensors")
    for name, tensor in averaged.items():
        assert torch.equal(tensor, ((sound[0][name].double() + sound[1][name].double()) / 2).float()), name
    assert "step-00000003" in caplog.text
    for step in (2, 4):
        forge_tensors(step_dir(run_dir, step), "model.safetensors", spoil)
    with pytest.raises(CheckpointError, match=r"none of the checkpoints \[2, 3, 4\]"):
        average_checkpoints(run_dir, [2, 3, 4])


# ---- the tokenizer and the test sets --------------------------------------------------------------------------------


def test_translate_and_evaluate_take_an_undamaged_copy(job: TrainJob) -> None:
    translated, evaluated = enter("translate", job, "one two\nthree\n"), enter("evaluate", job)
    assert (translated.status, evaluated.status) == (0, 0)
    assert translated.printed.count("\n") == 2
    assert names_in(evaluated.printed) == ["other", "test"]


def names_in(scores: str) -> list[str]:
    """The test sets of what `evaluate` printed."""
    return [line.partition(":")[0] for line in scores.splitlines()]


@pytest.mark.parametrize("command", ["translate", "evaluate"])
@pytest.mark.parametrize("place", [0.02, 0.3, 0.9])
def test_tokenizer_with_one_flipped_bit_is_refused(job: TrainJob, command: str, place: float) -> None:
    path = Path(job.run_dir) / "tokenizer.model"
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1
    path.write_bytes(content)
    assert_refused(enter(command, job, "one two\n"), 4, "tokenizer.model")


def another_word(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(" ", " x", 1), encoding="utf-8")


SETS: dict[str, Callable[[Path], object]] = {
    "reference": lambda folder: another_word(folder / "test.ref"),
    "source": lambda folder: another_word(folder / "test.src"),
    "deleted": lambda folder: (folder / "test.src").unlink(),
    "all deleted": lambda folder: [path.unlink() for path in folder.glob("*.src")],
    "swapped": lambda folder: [
        (folder / "test.src").rename(folder / "x"),
        (folder / "test.ref").rename(folder / "test.src"),
        (folder / "x").rename(folder / "test.ref"),
    ],
}


@pytest.mark.parametrize("case", SETS)
def test_evaluate_refuses_test_sets_that_changed(job: TrainJob, case: str) -> None:
    folder = Path(job.run_dir) / "hypotheses"
    SETS[case](folder)
    assert_refused(enter("evaluate", job), 4, f"{folder}: ")


def test_evaluate_takes_the_test_sets_of_the_last_training(job: TrainJob) -> None:
    """results.json is of the sets `test` and `other`; the run is then scored on another text, and only on that."""
    job.train.max_steps = LAST
    job.data = replace(job.data, test={"test": job.data.dev})
    run(job)
    found = enter("evaluate", job)
    assert found.status == 0
    assert names_in(found.printed) == ["test"]


# ---- runs of before the first release -------------------------------------------------------------------------------

COMMANDS = ("train", "translate", "evaluate", "average")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_of_an_unreleased_version_is_refused_by_name(job: TrainJob, command: str) -> None:
    """run.json had no "format" then, and checkpoints had 1."""
    run_dir = Path(job.run_dir)
    edit(run_dir / "run.json", lambda record: record.pop("format"))
    for folder in (*(run_dir / "checkpoints").iterdir(), run_dir / "averaged"):
        edit(folder / "MANIFEST.json", lambda manifest: manifest.update(format=1))
    assert_refused(enter(command, job, "one\n"), 4, "unreleased version of this package")
    assert steps_of(run_dir) == [2, 3, 4], "nothing is moved"


def edit(path: Path, change: Callable[[Any], object]) -> None:
    document = read(path)
    change(document)
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
