"""The first steps of a training, trained again: the same numbers, or the first that is not."""

import hashlib
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.corpora import read, run, step_dir, steps_of, tiny_job, typed_in_a_child, write_corpus
from support.interventions import before_each_update
from support.paths import ROOT, TESTS
from support.ranks import ranks
from support.resumed_runs import snapshot, stop_at
from transformer.config.settings import DataConfig
from transformer.decoding.loading import load
from transformer.errors import CheckpointError, FindingsError, InputError
from transformer.files import encode_json
from transformer.tools.verify.command import Verification, format_verification, require_agreement, verify
from transformer.tools.verify.job import VerifyJob

EXACT = "the same again, to the last bit"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def finished(corpus: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 steps, committed at 4, 8 and 12, and at 6, which was the best when it was validated; tests copy them."""
    return run(tiny_job(tmp_path_factory.mktemp("run") / "a", corpus))


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "copy"))


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `verify` trains; it is empty again at the end of each test."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.fixture(autouse=True)
def nothing_left(temporary: Path) -> Any:
    yield
    assert list(temporary.iterdir()) == []


def edit(path: Path, change: Callable[[Any], object]) -> None:
    data = read(path)
    change(data)
    path.write_text(json.dumps(data), encoding="utf-8")


def verified(run_dir: Path, steps: str = "50") -> Verification:
    """What `verify` finds; it leaves the run as it was."""
    before = snapshot(run_dir)
    found = verify(VerifyJob(run_dir=str(run_dir), steps=steps))
    assert snapshot(run_dir) == before
    return found


def difference(found: Verification) -> str:
    """The line in which the command ends."""
    with pytest.raises(FindingsError) as ended:
        require_agreement(found)
    return str(ended.value)


# ---- what a training writes down ------------------------------------------------------------------------------------


def test_history_has_starts_and_marks(finished: Path) -> None:
    history = read(finished / "history.json")
    (start,) = history["starts"]
    assert (start["step"], start["ranks"]) == (0, 1)
    assert start["resolved"] == read(finished / "run.json")["resolved"]
    assert start["packages"]["torch"] == torch.__version__
    assert {"sacrebleu", "sentencepiece", "numpy"} < start["packages"].keys()

    assert [mark["step"] for mark in history["marks"]] == [4, 6, 8, 10, 12]
    logged = {
        row["step"]: (row["train/loss"], row["train/gradient_norm"])
        for row in map(json.loads, (finished / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        if "train/loss" in row
    }
    for mark in history["marks"]:
        assert (mark["loss"], mark["gradient_norm"]) == logged[mark["step"]]

    marks = {mark["step"]: mark["weights_sha256"] for mark in history["marks"]}
    for step in steps_of(finished):
        digest = hashlib.sha256()
        for name, weight in sorted(load_file(step_dir(finished, step) / "model.safetensors").items()):
            digest.update(f"{name} torch.float32 {tuple(weight.shape)}\n".encode() + weight.numpy().tobytes())
        assert marks[step] == digest.hexdigest()


def test_history_is_the_same_after_a_kill(finished: Path, copy: Path, corpus: DataConfig) -> None:
    """It died after the mark of step 12, before the commit: the steps from 8 on are trained, and marked, again."""
    expected = read(finished / "history.json")
    shutil.rmtree(step_dir(copy, 12))
    shutil.rmtree(copy / "averaged")
    (copy / "results.json").unlink()
    edit(copy / "history.json", lambda history: history["marks"].append({**history["marks"][-1], "step": 16}))
    run(tiny_job(copy, corpus))
    assert read(copy / "history.json") == expected


def test_history_has_torch_with_its_build(corpus: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyPI's wheel of 2.13.0+cu130 is 2.13.0 in its metadata: run.json, which asks torch, would differ."""
    monkeypatch.setattr("transformer.training.history.installed_packages", lambda: {"torch": "2.0.0", "numpy": "2.0.0"})
    run_dir = run(tiny_job(tmp_path / "a", corpus, max_steps=4, validate_every=4, average=1))
    (start,) = read(run_dir / "history.json")["starts"]
    assert start["packages"] == {"torch": torch.__version__, "numpy": "2.0.0"}
    assert read(run_dir / "run.json")["versions"]["torch"] == torch.__version__


def test_history_has_a_start_for_each_change(copy: Path, corpus: DataConfig) -> None:
    run(tiny_job(copy, corpus, max_steps=14))
    assert [start["step"] for start in read(copy / "history.json")["starts"]] == [0]
    run(tiny_job(copy, corpus, max_steps=16, max_tokens=256))
    starts = read(copy / "history.json")["starts"]
    assert [(start["step"], start["resolved"]["max_tokens"]) for start in starts] == [(0, 300), (14, 256)]
    found = verified(copy)
    assert (found.step, found.other_conditions) == (16, ["max_tokens: 256 then, 300 now"])


def test_history_that_is_damaged_is_begun_anew(
    copy: Path, corpus: DataConfig, caplog: pytest.LogCaptureFixture
) -> None:
    (copy / "history.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"history\.json"):
        verified(copy)
    run(tiny_job(copy, corpus, max_steps=13))
    assert "history.json: " in caplog.text
    history = read(copy / "history.json")
    assert ([s["step"] for s in history["starts"]], [m["step"] for m in history["marks"]]) == ([12], [13])
    (unknown,) = verified(copy).other_conditions
    assert unknown.startswith("processor: unknown then, "), "the first start is known from run.json"


# ---- the same again -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "last"), [("1", 4), ("5", 6), ("10", 10), ("50", 12), ("all", 12)])
def test_verify_goes_to_the_next_mark(finished: Path, steps: str, last: int) -> None:
    found = verified(finished, steps)
    assert (found.step, found.is_exact, found.difference, found.other_conditions) == (last, True, None, [])
    names = {item.name for item in found.compared}
    assert {f"the loss of step {last}", f"the gradient norm of step {last}", f"the weights after step {last}"} <= names
    assert ("BLEU of test" in names) == (steps == "all")
    assert format_verification(found).endswith(f"steps 1 to {last}: {EXACT}\n")


def test_verify_takes_a_run_that_was_stopped_and_resumed_for_any_other(corpus: DataConfig, tmp_path: Path) -> None:
    job = tiny_job(tmp_path / "a", corpus)
    stop_at(job, 5)
    run(job)
    assert 5 in [mark["step"] for mark in read(tmp_path / "a" / "history.json")["marks"]]
    assert verified(tmp_path / "a", "all").is_exact


@pytest.mark.ci
def test_verify_of_a_run_of_two_ranks(corpus: DataConfig, tmp_path: Path) -> None:
    """On two ranks to the last bit; alone it is said that this was another number of ranks."""
    run_dir = tmp_path / "a"
    assert ranks(2, lambda: run(tiny_job(run_dir, corpus)), tmp_path) == [0, 0]

    def on_each() -> None:
        assert verify(VerifyJob(run_dir=str(run_dir))).is_exact

    assert ranks(2, on_each, tmp_path) == [0, 0], (tmp_path / "rank-0").read_text(encoding="utf-8")

    alone = verified(run_dir)
    assert (alone.other_conditions, alone.difference) == (["ranks: 2 then, 1 now"], None)


def test_verify_allows_for_rounding_under_other_conditions_only(copy: Path) -> None:
    def rounded(history: Any) -> None:
        history["marks"][0]["loss"] *= 1 + 1e-6
        history["marks"][3]["weights_sha256"] = "0"  # of step 10, which has no checkpoint

    edit(copy / "history.json", rounded)
    assert "first the loss of step 4: " in difference(verified(copy))

    edit(copy / "history.json", lambda history: history["starts"][0].update(processor="another"))
    found = verified(copy)
    require_agreement(found)
    (condition,) = found.other_conditions
    assert condition.startswith("processor: another then, ")
    assert found.compared[0].deviation == pytest.approx(1e-6, rel=1e-3)
    assert "as far as can be said under other conditions" in format_verification(found)


def test_verify_names_other_threads_as_a_condition(copy: Path) -> None:
    """On which the order of sums depends: then nothing can be said of the last bits."""
    edit(copy / "history.json", lambda history: history["starts"][0]["resolved"].update(threads=2))
    edit(copy / "history.json", lambda history: history["marks"][0].update(loss=history["marks"][0]["loss"] + 1e-6))
    found = verified(copy, "4")
    assert (found.other_conditions, found.difference) == (["threads: 2 then, 1 now"], None)


@pytest.mark.ci
def test_verify_of_a_run_of_an_earlier_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = Path(shutil.copytree(TESTS / "data" / "run_of_1bd6cd8", tmp_path / "old_run"))
    for name, lines in (("train", 3_000), ("dev", 40), ("test", 40)):
        for language in ("en", "de"):
            text = (ROOT / "data" / "demo" / f"{name}.{language}").read_text(encoding="utf-8").split("\n")[:lines]
            (tmp_path / f"{name}.{language}").write_text("\n".join([*text, ""]), encoding="utf-8", newline="\n")
    monkeypatch.chdir(tmp_path)
    found = verified(Path("old_run"))
    assert (found.step, found.difference) == (100, None)
    assert any(condition.startswith("processor: unknown then") for condition in found.other_conditions)
    assert [item.name.partition(" of ")[0] for item in found.compared] == ["the loss", "the gradient norm", "the text"]
    assert [left.partition(": ")[0] for left in found.not_compared] == [
        "the weights in checkpoints/step-00000600",
        "the moving average in checkpoints/step-00000600",
        "the weights in averaged",
    ]
    assert float(found.compared[0].now) == pytest.approx(5.646732590287893, rel=1e-4)

    (run_dir / "metrics.jsonl").unlink()
    with pytest.raises(InputError, match="there is nothing to compare"):
        verified(run_dir)


# ---- not the same ---------------------------------------------------------------------------------------------------


def test_verify_finds_another_seed(copy: Path) -> None:
    edit(copy / "run.json", lambda record: record["config"]["train"].update(seed=2))
    assert difference(verified(copy)).startswith(f"{copy}: not the same again, first the loss of step 4: 4.")

    edit(copy / "history.json", lambda history: history["starts"][0].update(processor="another"))
    assert "first the loss of step 4: " in difference(verified(copy)), "no rounding is as large"


def test_verify_finds_other_weights_and_scores(copy: Path) -> None:
    edit(copy / "results.json", lambda results: results["test_sets"]["test"].update(chrf=1e-9))
    assert "first chrF of test: 1e-09 then" in difference(verified(copy, "all"))
    edit(copy / "history.json", lambda history: history["marks"][1].update(weights_sha256="0"))
    assert "first the weights after step 6: 0 then" in difference(verified(copy, "all"))


def test_verify_names_the_file_in_which_a_byte_has_changed(tmp_path: Path) -> None:
    data = write_corpus(tmp_path / "corpus")
    run_dir = run(tiny_job(tmp_path / "a", data, max_steps=4, average=1))
    path = Path(data.train.tgt)
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    message = rf"a: was trained on different data: data\.train\.tgt \({path}\) has changed$"
    with pytest.raises(FindingsError, match=message):
        verified(run_dir)


def test_verify_finds_that_the_weights_of_init_from_have_changed(
    finished: Path, corpus: DataConfig, tmp_path: Path
) -> None:
    source = step_dir(finished, 4)
    run_dir = run(replace(tiny_job(tmp_path / "a", corpus, max_steps=4, average=1), init_from=str(source)))
    assert verified(run_dir).is_exact
    other = step_dir(finished, 8)
    edit(run_dir / "run.json", lambda record: record["config"].update(init_from=str(other)))
    with pytest.raises(FindingsError, match=f"init_from={other} has had its weights changed since then"):
        verified(run_dir)


def change_a_weight(folder: Path, kind: str = "model") -> None:
    """As somebody does who has other weights pass for those of the training: with a manifest that fits them."""
    path = folder / f"{kind}.safetensors"
    weights = load_file(path)
    weights[min(weights)].view(-1)[0] += 0.5
    save_file(weights, path)
    found = {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    manifest = read(folder / "MANIFEST.json")
    manifest["files"][path.name] = found
    (folder / "MANIFEST.json").write_bytes(encode_json(manifest))


@pytest.mark.parametrize("steps", ["4", "all"])
@pytest.mark.parametrize("name", ["checkpoints/step-00000008", "averaged"])
def test_verify_finds_other_weights_than_those_of_the_training(name: str, steps: str, copy: Path) -> None:
    change_a_weight(copy / name)
    load(copy, checkpoint="averaged" if name == "averaged" else "step-8")
    assert f"not the same again, first the weights in {name}: " in difference(verified(copy, steps))


@pytest.mark.ci
def test_verify_finds_another_moving_average(corpus: DataConfig, tmp_path: Path) -> None:
    run_dir = run(tiny_job(tmp_path / "a", corpus, ema_decay=0.9, average=1))
    last = "checkpoints/step-00000012"
    assert verified(run_dir, "all").is_exact
    found = verified(run_dir, "4")
    assert found.is_exact
    assert f"the moving average in {last}: it is repeated by steps=all alone" in found.not_compared
    change_a_weight(run_dir / last, "ema")
    assert f"first the moving average in {last}: " in difference(verified(run_dir, "all"))


def test_verify_names_weights_that_it_cannot_compare(copy: Path) -> None:
    edit(copy / "history.json", lambda history: history["marks"].pop(0))
    shutil.rmtree(step_dir(copy, 8))
    found = verified(copy)
    assert found.is_exact
    assert found.not_compared == [
        "the weights in checkpoints/step-00000004: history.json has no mark of step 4",
        "the weights in averaged: not all of the steps 4, 8, 12 are there; it is repeated by steps=all alone",
    ]
    assert f"not compared: {found.not_compared[0]}\n" in format_verification(found)
    change_a_weight(copy / "averaged")
    assert "first the weights in averaged: " in difference(verified(copy, "all"))


def test_verify_names_weights_that_are_damaged(copy: Path) -> None:
    """Which `translate` would not load."""
    for place in ("checkpoints/step-00000008", "averaged"):
        with (copy / place / "model.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x7f")
    found = verified(copy, "4")
    assert found.is_exact
    assert [left.partition(": ")[0] for left in found.not_compared] == [
        "the weights in checkpoints/step-00000008",
        "the weights in averaged",
    ]
    assert "its sha256 differs" in found.not_compared[0]


def test_verify_finds_another_dev_set(tmp_path: Path) -> None:
    data = write_corpus(tmp_path / "corpus")
    run_dir = run(tiny_job(tmp_path / "a", data, max_steps=4, average=1))
    path = Path(str(data.dev.tgt))
    path.write_bytes(path.read_bytes().replace(b"eins", b"zwei", 1))
    for steps in ("4", "all"):
        assert "first the text of data.dev: " in difference(verified(run_dir, steps))


@pytest.mark.parametrize("field", ["loss", "nll", "bleu", "chrf"])
def test_verify_finds_another_validation(field: str, copy: Path) -> None:
    edit(copy / "results.json", lambda results: results["validations"][1].update({field: 1e-9}))
    assert re.search(
        rf"first the dev {field} of step \d+: 1e-09 then", difference(verified(copy, "all")), re.IGNORECASE
    )


def test_verify_of_a_run_that_was_given_again_with_fewer_steps(copy: Path, corpus: DataConfig) -> None:
    run(tiny_job(copy, corpus, max_steps=5))
    assert read(copy / "run.json")["config"]["train"]["max_steps"] == 5
    for steps in ("4", "50", "all"):
        assert verified(copy, steps).is_exact


def test_verify_names_marks_that_no_training_comes_to(copy: Path) -> None:
    edit(copy / "history.json", lambda history: history["marks"].append({**history["marks"][-1], "step": 10**9}))
    found = verified(copy)
    assert (found.step, found.is_exact) == (12, True)
    assert found.not_compared == ["the mark of step 1000000000: the run has 12 steps"]


def test_verify_takes_no_marks_out_of_order(copy: Path) -> None:
    """Of which it would have compared the earliest alone."""
    edit(copy / "history.json", lambda history: history["marks"].reverse())
    with pytest.raises(CheckpointError, match=r"history\.json.*: marks of steps 12, 10 are not in order"):
        verified(copy)


# ---- the command ----------------------------------------------------------------------------------------------------


def test_verify_ends_with_status_8_where_something_differs(copy: Path) -> None:
    typed = ("verify", "run_dir=copy", "steps=4")
    same = typed_in_a_child(*typed, cwd=copy.parent)
    assert (same.status, same.printed.splitlines()[-1]) == (0, f"copy, steps 1 to 4: {EXACT}"), same.said
    edit(copy / "history.json", lambda history: history["marks"][0].update(gradient_norm=7.5))
    other = typed_in_a_child(*typed, "format=json", cwd=copy.parent)
    assert other.status == 8
    assert "transformer: error: copy: not the same again, first the gradient norm of step 4: 7.5 then" in other.said
    assert [item["agrees"] for item in json.loads(other.printed)["compared"]][:3] == [True, False, True]


def test_verify_of_the_scores_of_a_run_that_is_not_finished(copy: Path) -> None:
    (copy / "results.json").unlink()
    with pytest.raises(InputError, match=r"results\.json.*: steps=all is for a finished run; give a number of steps"):
        verified(copy, "all")


def test_verify_that_is_stopped_leaves_nothing(copy: Path) -> None:
    with before_each_update(lambda: os.kill(os.getpid(), signal.SIGTERM)), pytest.raises(KeyboardInterrupt):
        verified(copy)
