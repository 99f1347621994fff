"""Run directories that somebody forged or spoiled, with digests that are right: every command refuses them in one line.

What crashed the process once is tried in a process of its own, through the public command.
"""

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support.corpora import (
    forge_tensors,
    read,
    reseal,
    run,
    step_dir,
    steps_of,
    tiny_job,
)
from support.hostile_runs import LAST, assert_refused, edit, enter, places, put_at
from transformer.average import average_checkpoints
from transformer.config.jobs import TrainJob
from transformer.config.primitives import from_json, to_json
from transformer.config.settings import DataConfig, Norm, OptimizerKind, Positions, SearchConfig
from transformer.errors import CheckpointError
from transformer.records import (
    Best,
    CheckpointState,
    History,
    Judgement,
    Progress,
    Results,
    RunRecord,
    Validation,
    WindowTotals,
)

Tensors = dict[str, torch.Tensor]


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


@pytest.mark.parametrize("case", [case for case in MOMENTS if case not in CRASHED])
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


# ---- Muon's ---------------------------------------------------------------------------------------------------------

VECTOR = f"exp_avg_sq/{WEIGHT.removesuffix('weight')}bias"  # which Adam moves under either optimizer
OF_MUON: dict[str, Callable[[Tensors], object]] = {
    "shape 0": put(MEAN, lambda _: torch.zeros(0)),
    "scalar": put(MEAN, lambda _: torch.tensor(1.0)),
    "turned": put(MEAN, lambda tensor: tensor.T.contiguous()),
    "flat": put(MEAN, torch.Tensor.flatten),
    "half": put(MEAN, torch.Tensor.half),
    "NaN mean": put(MEAN, with_one(math.nan)),
    "missing mean": lambda tensors: tensors.pop(MEAN),
    "squares of a matrix": lambda tensors: tensors.update({SQUARE: torch.zeros_like(tensors[MEAN])}),
    "no squares of a vector": lambda tensors: tensors.pop(VECTOR),
    "no updates": lambda tensors: tensors.pop("updates"),
}


@pytest.fixture(scope="module")
def finished_with_muon(finished: TrainJob, tmp_path_factory: pytest.TempPathFactory) -> TrainJob:
    """The short run, of the other optimizer."""
    recipe = replace(finished.train, optimizer=OptimizerKind.muon)
    job = replace(finished, run_dir=str(tmp_path_factory.mktemp("finished") / "muon"), train=recipe)
    run(job)
    return job


@pytest.fixture
def muon_job(finished_with_muon: TrainJob, tmp_path: Path) -> TrainJob:
    """A copy of that run, with one more step to do."""
    shutil.copytree(finished_with_muon.run_dir, tmp_path / "muon")
    recipe = replace(finished_with_muon.train, max_steps=LAST + 1)
    return replace(finished_with_muon, run_dir=str(tmp_path / "muon"), train=recipe)


@pytest.mark.parametrize("case", OF_MUON)
def test_load_moments_refuses_what_is_not_muons(muon_job: TrainJob, case: str) -> None:
    forge_tensors(step_dir(Path(muon_job.run_dir), LAST), "optimizer.safetensors", OF_MUON[case])
    assert_refused(enter("train", muon_job), 4, "step-00000004: does not fit this model")


def test_load_moments_takes_muons_that_were_resealed_unchanged(muon_job: TrainJob) -> None:
    forge_tensors(step_dir(Path(muon_job.run_dir), LAST), "optimizer.safetensors", lambda tensors: None)
    assert steps_of(run(muon_job)) == [3, 4, 5]


def test_load_moments_refuses_those_of_the_other_optimizer_in_one_line(job: TrainJob, muon_job: TrainJob) -> None:
    folders = [step_dir(Path(each.run_dir), LAST) for each in (job, muon_job)]
    of_adam, of_muon = (load_file(folder / "optimizer.safetensors") for folder in folders)

    def put_all(tensors: Tensors, others: Tensors) -> None:
        tensors.clear()
        tensors.update(others)

    forge_tensors(folders[0], "optimizer.safetensors", lambda tensors: put_all(tensors, of_muon))
    forge_tensors(folders[1], "optimizer.safetensors", lambda tensors: put_all(tensors, of_adam))
    for each in (job, muon_job):
        assert_refused(enter("train", each), 4, "names of the moments differ: ['exp_avg_sq/decoder.0.")


# ---- weights that are not finite ------------------------------------------------------------------------------------

WILD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rate": ({}, {"learning_rate": 1e300}),
    "rate, pre-norm": ({"norm": Norm.pre}, {"learning_rate": 1e38}),
    "late": ({}, {"learning_rate": 1e38, "warmup_steps": 1_000_000}),
    "epsilon": ({"positions": Positions.learned}, {"adam_eps": 1e-320}),  # 0 in float32: 0 / 0 where nothing is read
    "moving average": ({}, {"learning_rate": 1e300, "ema_decay": 0.9}),
    "Muon": ({}, {"learning_rate": 1e300, "optimizer": OptimizerKind.muon}),
    "weight decay": ({}, {"weight_decay": 1e18, "optimizer": OptimizerKind.muon}),
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
def test_commands_refuse_weights_that_are_not_finite(job: TrainJob, tmp_path: Path, command: str) -> None:
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
    return [line.split()[0] for line in scores.splitlines() if not line.startswith(" ")]


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


def delete_sources(folder: Path) -> None:
    for path in folder.glob("*.src"):
        path.unlink()


SETS: dict[str, Callable[[Path], object]] = {
    "reference": lambda folder: another_word(folder / "test.ref"),
    "source": lambda folder: another_word(folder / "test.src"),
    "deleted": lambda folder: os.unlink(folder / "test.src"),
    "all deleted": delete_sources,
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
def test_commands_refuse_a_run_of_an_unreleased_version_by_name(job: TrainJob, command: str) -> None:
    """run.json had no "format" then, and checkpoints had 1."""
    run_dir = Path(job.run_dir)
    edit(run_dir / "run.json", lambda record: record.pop("format"))
    for folder in (*(run_dir / "checkpoints").iterdir(), run_dir / "averaged"):
        edit(folder / "MANIFEST.json", lambda manifest: manifest.update(format=1))
    assert_refused(enter(command, job, "one\n"), 4, "unreleased version of this package")
    assert steps_of(run_dir) == [2, 3, 4], "nothing is moved"


# ---- documents ------------------------------------------------------------------------------------------------------

DEEP: Any = []
for _ in range(100_000):
    DEEP = [DEEP]
HUGE = 10**400
INFINITE = float("1e999")  # what json.loads makes of it


def document(kind: type) -> dict[str, Any]:
    """One that is right, as it lies in a file."""
    progress = to_json(Progress(step=4, sentences=90, validations=[Validation(4, 2.0, 3.0, 4.0, 5.0)]))
    training = {
        "progress": progress,
        "window": to_json(WindowTotals()),
        "loss_scale": {"scale": 65536.0, "growth_tracker": 3},
        "dev_digest": "d" * 64,
        "plan_version": 1,
    }
    search = to_json(SearchConfig())
    judged = {"command": "c", "version": "1", "system": 0.5, "segments": [0.5, 1.0], "sha256": {"hyp": "f" * 64}}
    scores = {
        **{"bleu": 1.0, "bleu_signature": "s", "chrf": 2.0, "chrf_signature": "s"},
        **{"chrf_plus_plus": 1.5, "chrf_plus_plus_signature": "s", "judges": {}},
        **{"ter": 60.0, "ter_signature": "s", "paper_bleu": 1.0, "paper_bleu_signature": "s"},
        "others": {
            "kiwi": {"name": "Kiwi", "value": 0.5, "signature": "s", "digits": 4, "higher_is_better": True},
        },
    }
    imported = {"source": "hf:a/b", "revision": "c", "licence": "mit", "card": "text", "sha256": {"config.json": "f"}}
    resolved = {"device": "cpu", "precision": "fp32", "threads": 1, "max_tokens": 300, "layout": "packed"}
    documents: dict[type, dict[str, Any]] = {
        CheckpointState: {
            **{"vocab_size": 60, "data_digest": "d" * 64, "averaged": [2, 4], "training": training},
            "source_vocab_size": 70,
        },
        Best: {"step": 4, "metric": "bleu"},
        Judgement: judged,
        Results: {
            **{"test_sets": {"test": scores}, "averaged": [2, 4], "steps": 4, "epochs": 0, "sentences": 90},
            **{"skipped_updates": 0, "target_tokens": 900, "training_seconds": 1.5, "parameters": 22912},
            **{"search": search, "seed": 1, "data_digest": "d" * 64, "test_digest": "e" * 64},
            **{"validations": progress["validations"], "dev": scores, "dev_digest": "d" * 64, "average": 2},
            **{"engine": "CTranslate2", "devs": {"devs.a": scores}, "mean": {"bleu": 1.0}},
        },
        RunRecord: {
            **{"format": 2, "id": "x", "started": "2026", "versions": {"torch": "2.13"}, "data_digest": "d" * 64},
            **{"prepare_version": 2, "tokenizer_sha256": "f" * 64},
            "init_from": {"path": "a", "step": 4, "manifest_sha256": "f" * 64, "imported": imported},
            "imported": imported,
            "resolved": {
                **{**resolved, "compile": False, "micro_batch_multiple": 1},
                **{"attention_kernel": "varlen", "loss_rows": 4_096, "cuda_graphs": True},
            },
            "config": to_json(TrainJob()),
            "memory": {"max_tokens": 300, "is_estimate": True, "needed": 4_000, "available": 90_000},
            **{"machine": "a processor, 2 cores, 24 GiB", "commit": "c" * 40},
            **{"dev_digest": "d" * 64, "test_digest": "e" * 64},
            "proof": {
                **{"device": "a GPU", "torch": "2.13", "way": "padded", "deviation": 0.25, "trying": "packed"},
                **{"failures": {"packed": "NaN"}, "search": "fused attention"},
            },
            "target_tokenizer_sha256": "a" * 64,
        },
        History: {
            "starts": [
                {
                    **{"step": 0, "processor": "a processor", "ranks": 2, "packages": {"torch": "2.13"}},
                    "resolved": {
                        **{**resolved, "compile": False, "micro_batch_multiple": 1},
                        **{"attention_kernel": None, "loss_rows": None, "cuda_graphs": False},
                    },
                }
            ],
            "marks": [{"step": 10, "loss": 7.5, "gradient_norm": 1.5, "weights_sha256": "f" * 64}],
        },
    }
    found: dict[str, Any] = json.loads(json.dumps(documents[kind]))  # no two places share a table
    return found


KINDS = [CheckpointState, Best, History, Judgement, Results, RunRecord]
WRONG: list[Any] = [DEEP, HUGE, -HUGE, INFINITE, -INFINITE, math.nan, "x" * 100_000, {"a": DEEP}, b"x", object()]


@pytest.mark.parametrize("kind", KINDS)
def test_from_json_takes_what_is_right(kind: type) -> None:
    assert to_json(from_json(kind, document(kind), complete=True)) == document(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_from_json_refuses_hostile_values_by_a_value_error(kind: type) -> None:
    """In every place of every document; a text may stand where a text does."""
    for path in places(document(kind)):
        for wrong in WRONG:
            if isinstance(wrong, str) and isinstance(value_at(document(kind), path), str | None):
                continue
            with pytest.raises(ValueError, match=re.escape(place_of(kind, path))) as refused:
                from_json(kind, put_at(document(kind), path, wrong), complete=True)
            assert len(str(refused.value)) < 1000


def place_of(kind: type, path: tuple[Any, ...]) -> str:
    """A path as an error names it: Results.validations[0].loss."""
    return kind.__name__ + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)


def value_at(data: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        data = data[key]
    return data


@pytest.mark.parametrize("kind", KINDS)
def test_from_json_refuses_other_keys_and_types(kind: type) -> None:
    """Unknown and missing keys anywhere; true for a number, a number for a text, a list for a table."""
    for path in places({"": document(kind)}):
        right = value_at({"": document(kind)}, path)
        changed: list[Any] = []
        if isinstance(right, dict) and path[-1] not in (
            "test_sets",
            "devs",
            "mean",
            "sets",
            "plugins",
            "versions",
            "test",
            "extra",
            "failures",
            "judges",
            "others",
            "sha256",
            "packages",
        ):
            changed = [{**right, "colour": "red"}]
            needed = [
                key for key in right if key not in ("source_vocab_size", "plugins", "sets")
            ]  # older ones have not
            changed += [{key: right[key] for key in right if key != missing} for missing in needed]
        wrong_of: dict[type, list[Any]] = {
            int: [True, 4.0, "4", [4], {}],
            float: [True, "4", [4.0], {}],
            str: [True, 4, [4] if path[-1] in ("src", "tgt") else ["x"], {}],
            bool: [1, "x", [], {}],
            list: [4, "x", {}, [[]], [None]],
            dict: [4, "x", [], [{}]],
        }
        changed += wrong_of.get(type(right), [])
        for wrong in changed:
            data = put_at({"": document(kind)}, path, wrong)[""]
            with pytest.raises(ValueError, match=kind.__name__):
                from_json(kind, data, complete=True)


def test_from_json_refuses_deep_and_long_documents() -> None:
    for kind in KINDS:
        for data in (DEEP, None, 4, "x", HUGE, [document(kind)], {}, {"x" * 1_000_000: 1}):
            with pytest.raises(ValueError, match=kind.__name__) as refused:
                from_json(kind, data, complete=True)
            assert len(str(refused.value)) < 1000


def at(*path: Any, to: Any) -> Callable[[Any], object]:
    """Put a value in place."""
    return lambda data: put_at(data, path, to)


def without(*path: Any) -> Callable[[Any], object]:
    return lambda data: value_at(data, path[:-1]).pop(path[-1])


TRAINING = ("training", "progress")
NESTED: Any = json.loads("[" * 900 + "]" * 900)
STATES: dict[str, Callable[[Any], object]] = {
    "step -1": at(*TRAINING, "step", to=-1),
    "another step": at(*TRAINING, "step", to=2),
    "a late step": at(*TRAINING, "step", to=10**9),
    "epoch -5": at(*TRAINING, "epoch", to=-5),
    "epoch 2^62": at(*TRAINING, "epoch", to=2**62),
    "step in chapter -1": at(*TRAINING, "step_in_chapter", to=-1),
    "step in chapter 10^9": at(*TRAINING, "step_in_chapter", to=10**9),
    "chapter -1": at(*TRAINING, "chapter", to=-1),
    "chapter 10^9": at(*TRAINING, "chapter", to=10**9),
    "seconds 1e999": at(*TRAINING, "seconds", to=INFINITE),
    "seconds 1e308": at(*TRAINING, "seconds", to=1e308),
    "seconds -1e308": at(*TRAINING, "seconds", to=-1e308),
    "seconds null": at(*TRAINING, "seconds", to=None),
    "more skipped than done": at(*TRAINING, "skipped", to=10**6),
    "streak -3": at(*TRAINING, "streak", to=-3),
    "streak 2^63": at(*TRAINING, "longest_streak", to=2**63),
    "no validations": at(*TRAINING, "validations", to=None),
    "validation without a step": without(*TRAINING, "validations", 0, "step"),
    "validation of step -4": at(*TRAINING, "validations", 0, "step", to=-4),
    "window of no seconds": at("training", "window", "seconds", to=-1e9),
    "window of no tokens": at("training", "window", "target_tokens", to=-(10**9)),
    "window 1e999": at("training", "window", "loss", to=INFINITE),
    "scale list": at("training", "loss_scale", to=[1]),
    "scale text": at("training", "loss_scale", to={"scale": "abc", "growth_tracker": 1}),
    "scale 1e999": at("training", "loss_scale", to={"scale": INFINITE, "growth_tracker": 1}),
    "scale below zero": at("training", "loss_scale", to={"scale": -1.0, "growth_tracker": 1}),
    "tracker text": at("training", "loss_scale", to={"scale": 1.0, "growth_tracker": "x"}),
    "plan version text": at("training", "plan_version", to="x"),
    "plan version 7": at("training", "plan_version", to=7),
    "training list": at("training", to=[1]),
    "training null": at("training", to=None),
    "no training": without("training"),
    "no vocab_size": without("vocab_size"),
    "vocab_size 0": at("vocab_size", to=0),
    "vocab_size 10^18": at("vocab_size", to=10**18),
    "vocab_size true": at("vocab_size", to=True),
    "source_vocab_size 0": at("source_vocab_size", to=0),
    "source_vocab_size of its own": at("source_vocab_size", to=60),
    "no data_digest": without("data_digest"),
    "data_digest 5": at("data_digest", to=5),
    "data_digest null": at("data_digest", to=None),
    "averaged 5": at("averaged", to=5),
    "averaged text": at("averaged", to="4"),
    "nested": at("averaged", to=NESTED),
    "escape": at("\x1b]0;title\x07", to=1),
    "not even a table": lambda data: data.clear(),
}
RECORDS: dict[str, Callable[[Any], object]] = {
    "no data_digest": without("data_digest"),
    "data_digest 5": at("data_digest", to=5),
    "data_digest null": at("data_digest", to=None),
    "tokenizer 5": at("tokenizer_sha256", to=5),
    "no tokenizer": without("tokenizer_sha256"),
    "max_tokens 0": at("resolved", "max_tokens", to=0),
    "max_tokens -1": at("resolved", "max_tokens", to=-1),
    "multiple 0": at("resolved", "micro_batch_multiple", to=0),
    "multiple 10^9": at("resolved", "micro_batch_multiple", to=10**9),
    "multiple 2^63": at("resolved", "micro_batch_multiple", to=2**63),
    "threads 0": at("resolved", "threads", to=0),
    "threads 10^9": at("resolved", "threads", to=10**9),
    "threads true": at("resolved", "threads", to=True),
    "precision": at("resolved", "precision", to="fp8"),
    "resolved list": at("resolved", to=[1]),
    "config text": at("config", to="x"),
    "config model 5": at("config", "model", to=5),
    "versions list": at("versions", to=[1]),
    "init_from text": at("init_from", to="x"),
    "nested": at("versions", to=NESTED),
    "format 99": at("format", to=99),
    "format true": at("format", to=True),
    "format 1e999": at("format", to=INFINITE),
    "format nested": at("format", to=NESTED),
    "escape": at("\x1b]0;title\x07", to=1),
}
RESULTS: dict[str, Callable[[Any], object]] = {
    "no test_sets": without("test_sets"),
    "test_sets list": at("test_sets", to=[1]),
    "test_sets text": at("test_sets", to="x"),
    "test_sets null": at("test_sets", to=None),
    "scores 1e999": at("test_sets", "test", "bleu", to=INFINITE),
    "averaged 3": at("averaged", to=3),
    "digest 3": at("data_digest", to=3),
    "test digest 3": at("test_digest", to=3),
    "seconds 1e999": at("training_seconds", to=INFINITE),
    "nested": at("validations", to=NESTED),
}


def edit_state(folder: Path, change: Callable[[Any], object]) -> None:
    edit(folder / "state.json", change)
    reseal(folder)


@pytest.mark.parametrize("case", STATES)
def test_train_refuses_a_hostile_state(job: TrainJob, case: str) -> None:
    edit_state(step_dir(Path(job.run_dir), LAST), STATES[case])
    assert_refused(enter("train", job), 4, job.run_dir)
    assert not (Path(job.run_dir) / "checkpoints" / ".bad-step-00000004").exists(), "its digests are right"


@pytest.mark.parametrize("case", RECORDS)
def test_train_refuses_a_hostile_run_record(job: TrainJob, case: str) -> None:
    edit(Path(job.run_dir) / "run.json", RECORDS[case])
    assert_refused(enter("train", job), 4, "run.json")


@pytest.mark.parametrize("case", RESULTS)
def test_evaluate_refuses_hostile_results(job: TrainJob, case: str) -> None:
    edit(Path(job.run_dir) / "results.json", RESULTS[case])
    assert_refused(enter("evaluate", job), 4, "results.json")


@pytest.mark.parametrize("case", RESULTS)
def test_train_scores_again_where_results_are_hostile(finished: TrainJob, job: TrainJob, case: str) -> None:
    """They can be made again, and are."""
    path = Path(job.run_dir) / "results.json"
    edit(path, RESULTS[case])
    job.train.max_steps = LAST
    assert enter("train", job).status == 0
    assert read(path) == read(Path(finished.run_dir) / "results.json")


BEST: dict[str, Callable[[Any], object]] = {
    "step -1": at("step", to=-1),
    "step true": at("step", to=True),
    "step text": at("step", to="x"),
    "step 1e999": at("step", to=INFINITE),
    "step 2^63": at("step", to=2**63),
    "step list": at("step", to=NESTED),
    "metric": at("metric", to="ter"),
    "no step": without("step"),
    "colour": at("colour", to="red"),
}


@pytest.mark.parametrize("case", BEST)
def test_translate_refuses_a_hostile_best(job: TrainJob, case: str) -> None:
    edit(Path(job.run_dir) / "best.json", BEST[case])
    assert_refused(enter("translate", job, "one\n", "best"), 4, "best.json")


ALL = {"state.json": STATES, "run.json": RECORDS, "results.json": RESULTS, "best.json": BEST}


@pytest.mark.faults
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("place", "case"), [(p, c) for p, cs in ALL.items() for c in cs])
def test_commands_refuse_a_hostile_document_or_do_without(job: TrainJob, command: str, place: str, case: str) -> None:
    """A hostile document in any place: status 0, 2 or 4, and one line of error with the last two."""
    run_dir = Path(job.run_dir)
    if place == "state.json":
        for folder in (run_dir / "averaged", *(step_dir(run_dir, step) for step in (2, 3, 4))):
            with contextlib.suppress(KeyError, TypeError):  # an average has no training
                edit_state(folder, ALL[place][case])
    else:
        edit(run_dir / place, ALL[place][case])
    found = enter(command, job, "one two\n")
    assert found.status in (0, 2, 4), found
    assert "Traceback" not in found.said
    assert len([line for line in found.said.splitlines() if "error:" in line]) == (0 if found.status == 0 else 1)
