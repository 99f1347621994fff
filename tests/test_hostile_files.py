"""Links, pipes and devices in a run directory; text that takes a terminal over; lines and numbers without bound; full
disks. No command follows, waits, grows or ends in a traceback."""

import errno
import logging
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from corpora import ROOT, forge_tensors, overrides, reseal, step_dir, tiny_job, write_pair
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_hostile_runs import (
    LAST,
    assert_refused,
    corpus,  # noqa: F401 (a fixture)
    edit,
    enter,
    finished,  # noqa: F401 (a fixture)
    job,  # noqa: F401 (a fixture)
)

from transformer.config.jobs import TrainJob
from transformer.config.settings import DataConfig
from transformer.errors import StorageError
from transformer.run_dir import RunDir
from transformer.terminal import PrintableFormatter, printable
from transformer.tracking import Tracker, log_to

# ---- links, pipes and devices ---------------------------------------------------------------------------------------

READ = {  # the command that reads each file, the status with which it refuses what is no file of the run
    "tokenizer.model": ("translate", 2),
    "run.json": ("translate", 4),
    "results.json": ("evaluate", 4),
    "hypotheses/test.src": ("evaluate", 2),
    "hypotheses/test.ref": ("evaluate", 2),
    "train.log": ("train", 5),
    "metrics.jsonl": ("train", 5),
    ".lock": ("train", 5),
}


def put_outside(run_dir: Path, name: str) -> Path:
    """Move a file or folder of the run out of it, and link to it from where it was."""
    outside = run_dir.parent / "outside"
    (run_dir / name).rename(outside)
    (run_dir / name).symlink_to(outside)
    return outside


@pytest.mark.parametrize("name", READ)
def test_a_link_in_a_run_directory_is_not_followed(job: TrainJob, name: str) -> None:  # noqa: F811
    command, status = READ[name]
    run_dir = Path(job.run_dir)
    outside = put_outside(run_dir, name)
    before = outside.read_bytes()
    assert_refused(enter(command, job, "one\n"), status, name)
    assert outside.read_bytes() == before


@pytest.mark.parametrize(("command", "name"), [("train", n) for n in ("checkpoints", "tensorboard", "hypotheses")])
def test_a_linked_folder_is_not_written(job: TrainJob, command: str, name: str) -> None:  # noqa: F811
    outside = put_outside(Path(job.run_dir), name)
    (outside / ".tmp-of-somebody").touch()
    before = sorted(outside.rglob("*"))
    assert_refused(enter(command, job), 5, f"{name}: a link")
    assert sorted(outside.rglob("*")) == before


def test_evaluate_writes_into_no_linked_folder(job: TrainJob) -> None:  # noqa: F811
    outside = put_outside(Path(job.run_dir), "hypotheses")
    (outside / "test.hyp").write_text("mine\n", encoding="utf-8")
    assert_refused(enter("evaluate", job), 5, "hypotheses: a link")
    assert (outside / "test.hyp").read_text(encoding="utf-8") == "mine\n"


OTHERS = ("best.json", "data.json", "config.yaml", "hypotheses/test.hyp", "averaged/state.json")
OTHERS += ("averaged/model.safetensors", "averaged", "hypotheses", "checkpoints", "run.json", "results.json", ".lock")
PIPES = ["tokenizer.model", "hypotheses/test.src", "hypotheses/test.ref", "train.log", "metrics.jsonl"]


@pytest.mark.parametrize("name", [*PIPES, *(pytest.param(name, marks=pytest.mark.faults) for name in OTHERS)])
def test_no_command_waits_for_a_pipe(job: TrainJob, name: str) -> None:  # noqa: F811
    """Each refuses, or does without."""
    path = Path(job.run_dir) / name
    path.rename(path.parent.parent / "aside")
    os.mkfifo(path)
    for command in ("translate", "evaluate", "average", "train"):
        found = enter(command, job, "one\n")
        assert found.status in (0, 2, 4, 5), found
        assert "Traceback" not in found.said


def test_newest_asks_no_pipe_who_holds_the_lock(job: TrainJob) -> None:  # noqa: F811
    """A damaged checkpoint is moved aside by whoever holds the lock, which a reader has to find out."""
    run_dir = Path(job.run_dir)
    (step_dir(run_dir, LAST) / "state.json").write_text("{}\n", encoding="utf-8")
    (run_dir / ".lock").unlink()
    os.mkfifo(run_dir / ".lock")
    assert enter("translate", job, "one\n", "last").status == 0


@pytest.mark.parametrize("name", ["tokenizer.model", "hypotheses/test.src", "metrics.jsonl"])
def test_a_device_is_not_read(job: TrainJob, name: str) -> None:  # noqa: F811
    path = Path(job.run_dir) / name
    path.unlink()
    path.symlink_to("/dev/zero")
    command, status = READ[name]
    found = enter(command, job, "one\n")
    assert_refused(found, status, name)
    assert found.megabytes < 2000


# ---- text that takes a terminal over --------------------------------------------------------------------------------

ATTACKS = {
    "title": "\x1b]0;owned\x07",
    "clipboard": "\x1b]52;c;cm0gLXJmIC8=\x07",
    "clear": "\x1b[2J\x1b[H",
    "C1": "\x9b31m",
    "overwrite": "\rstep 9: dev bleu 100",
    "right to left": "\u202etxt.exe",
    "line": "\u2028step 9",
    "paragraph": "\u2029",
    "vertical": "\x0b\x0c\x85",
    "delete": "\x7f\x08\x00",
}
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


@pytest.mark.parametrize("attack", ATTACKS)
def test_printable_shows_what_would_act(attack: str) -> None:
    shown = printable(f"a {ATTACKS[attack]} b")
    assert RAW.search(shown) is None
    assert shown.startswith("a ")
    assert shown.endswith(" b")


def test_printable_leaves_text_alone() -> None:
    for text in ("Grüße, 世界!", "全角\u3000空白", "می\u200cخواهم", "👨\u200d👩\u200d👧", "a\u00a0b", "\\x1b is text"):
        assert printable(text) == text
    assert printable("one\ntwo\tthree") == "one\\ntwo\\tthree"
    assert printable("one\ntwo\r", keep="\n") == "one\ntwo\\r"


def test_printable_formatter_keeps_the_lines_of_a_message_and_forges_none() -> None:
    formatter = PrintableFormatter("%(message)s")
    record = logging.LogRecord("a", logging.INFO, "", 0, "%s of\n%d: %.1f", ("x\nerror: y\x1b", 3, 0.25), None)
    assert formatter.format(record) == "x\\nerror: y\\x1b of\n3: 0.2"
    assert record.args == ("x\nerror: y\x1b", 3, 0.25), "other handlers see what was logged"


def test_train_shows_samples_without_letting_them_act(corpus: DataConfig, tmp_path: Path) -> None:  # noqa: F811
    folder = tmp_path / "corpus"
    texts = [f"one {attack} two" for attack in ATTACKS.values()]
    dev = write_pair(folder, "dev", [(text, text) for text in texts])
    recipe: dict[str, Any] = {"max_steps": 2, "save_every": 2, "validate_every": 2, "samples": len(texts)}
    hostile = tiny_job(tmp_path / "a", replace(corpus, dev=dev), **recipe)
    found = enter("train", hostile)
    assert found.status == 0
    said = (tmp_path / "a" / "train.log").read_text(encoding="utf-8")
    assert "\\x1b]52;c" in said
    for text in (said, found.said, *shown_by_tensorboard(tmp_path / "a")):
        assert RAW.search(text) is None, text


def shown_by_tensorboard(run_dir: Path) -> list[str]:
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    texts = [
        event.tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"] for event in events.Tensors(tag)
    ]
    assert "\\x1b]52;c" in texts[0]
    return texts


@pytest.mark.parametrize("attack", ["title", "clipboard", "C1", "overwrite"])
def test_no_command_prints_what_a_document_says_raw(job: TrainJob, attack: str) -> None:  # noqa: F811
    run_dir = Path(job.run_dir)
    text = f"x{ATTACKS[attack]}\nforged: BLEU 100"

    def in_results(results: Any) -> None:
        results["data_digest"] = text
        results["test_sets"]["test"]["bleu_signature"] = text

    edit(run_dir / "results.json", in_results)
    for folder in (run_dir / "averaged", step_dir(run_dir, LAST)):
        edit(folder / "state.json", lambda state: state.update(data_digest=text))
        reseal(folder)
    job.train.max_steps = LAST
    for command in ("evaluate", "train", "average", "translate"):
        found = enter(command, job, "one\n")
        assert RAW.search(found.printed + found.said) is None
        assert "forged" not in [line[:6] for line in found.printed.split("\n")]


def renamed_set(name: str) -> Callable[[Any], object]:
    return lambda results: results["test_sets"].update({name: results["test_sets"]["test"]})


def test_results_name_test_sets_as_the_settings_do(job: TrainJob) -> None:  # noqa: F811
    """They are file names, and head a line each."""
    for name in ("../../x", "a\nb", "\x1b]0;x\x07", "", "dev"):
        path = Path(job.run_dir) / "results.json"
        edit(path, renamed_set(name))
        assert_refused(enter("evaluate", job), 4, "results.json")


# ---- full disks -----------------------------------------------------------------------------------------------------


class FullDisk:
    """A stream whose disk is full."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def write(self, text: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    close = flush


def test_log_to_goes_on_without_a_traceback_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("transformer.tracking.append_to", FullDisk)
    with log_to(tmp_path / "train.log"):
        logging.getLogger("transformer").warning("step %d", 3)
    assert "Traceback" not in capsys.readouterr().err


def test_tracker_does_not_hide_the_error_that_ended_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both fail on a full disk; the first one has the path of the checkpoint and the sizes."""
    tracker = Tracker(RunDir(tmp_path), 0)
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.close", FullDisk.flush)
    with pytest.raises(StorageError, match="step-00000004"), tracker:
        raise StorageError("step-00000004: cannot be written")
    tracker = Tracker(RunDir(tmp_path), 0)
    with (
        pytest.raises(StorageError, match=r"tensorboard: cannot be written: No space left on device \(\d+ bytes"),
        tracker,
    ):
        tracker.scalars(1, {"loss": 1.0})


DISK = """
mount -t tmpfs -o size={size}k none {folder} && cd {folder} && exec {python} -m transformer train {overrides}
"""


@pytest.mark.parametrize("size", [700, *(pytest.param(size, marks=pytest.mark.faults) for size in (64, 300, 1100))])
def test_train_says_what_did_not_fit_on_a_full_disk(corpus: DataConfig, tmp_path: Path, size: int) -> None:  # noqa: F811
    """A disk of so many kilobytes."""
    if subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("no mounts of one's own on this machine")
    folder = tmp_path / "disk"
    folder.mkdir()
    prepared = tiny_job(folder / "a", corpus, max_steps=20, save_every=1, keep_last=20)
    script = DISK.format(size=size, folder=folder, python=sys.executable, overrides=shlex.join(overrides(prepared)))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 5, found.stderr
    assert "Traceback" not in found.stderr
    (line,) = [line for line in found.stderr.split("\n") if "error:" in line]
    assert re.search(rf"{folder}/a/\S+: cannot be written: No space left on device \(.*\d+ bytes free\)", line), line


# ---- numbers that a forged checkpoint asks for ----------------------------------------------------------------------

HUGE: dict[str, dict[str, Any]] = {
    "layers": {"n_layers": 10**6},
    "more layers": {"n_layers": 10**15},
    "width": {"d_model": 10**6},
    "more width": {"d_model": 2**40},
    "beyond int64": {"d_model": 2**60, "d_ff": 2**60},
    "feed-forward": {"d_ff": 10**9},
    "heads": {"n_heads": 2**40, "d_k": 1, "d_v": 1},
    "keys": {"d_k": 2**50, "d_v": 1},
    "positions": {"max_positions": 10**12},
    "learned positions": {"positions": "learned", "max_positions": 10**9},
    "one more layer": {"n_layers": 2},
    "untied": {"tie_embeddings": False},
    "no heads": {"n_heads": 0},
    "text": {"d_model": "32"},
}
SEARCH: dict[str, dict[str, Any]] = {
    "beam": {"beam_size": 10**9},
    "more beam": {"beam_size": 2**62},
    "no beam": {"beam_size": 0},
    "extra": {"max_extra": -1},
    "penalty": {"length_penalty": 1e18},
    "infinite penalty": {"length_penalty": float("1e999")},
    "penalty 1000": {"length_penalty": 1000.0},
    "batch": {"batch_tokens": 0},
}
SETTINGS = [("model", change) for change in HUGE.values()] + [("search", change) for change in SEARCH.values()]


@pytest.mark.parametrize(
    ("section", "change"), SETTINGS, ids=[*(f"model {name}" for name in HUGE), *(f"search {name}" for name in SEARCH)]
)
def test_translate_refuses_forged_settings_before_it_builds_a_model(
    job: TrainJob,  # noqa: F811
    section: str,
    change: dict[str, Any],
) -> None:
    folder = Path(job.run_dir) / "averaged"
    edit(folder / "config.json", lambda config: config[section].update(change))
    reseal(folder)
    before = time.monotonic()
    found = enter("translate", job, "one two\n", "averaged")
    assert_refused(found, 4, "averaged")
    assert time.monotonic() - before < 10
    assert found.megabytes < 1500


@pytest.mark.parametrize("extra", [10**9, 2**62])
def test_translate_stops_at_the_positions_of_the_model(job: TrainJob, extra: int) -> None:  # noqa: F811
    folder = Path(job.run_dir) / "averaged"
    edit(folder / "config.json", lambda config: config["search"].update(max_extra=extra, batch_tokens=2**62))
    reseal(folder)
    assert enter("translate", job, "one two\n", "averaged").status == 0


DTYPES = [name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)]


@pytest.mark.faults
@pytest.mark.parametrize("file", ["model", "optimizer"])
@pytest.mark.parametrize("name", DTYPES)
def test_a_tensor_of_any_type_is_refused_or_used(job: TrainJob, file: str, name: str) -> None:  # noqa: F811
    """Its bytes are zeros; the manifest is right."""
    folder = step_dir(Path(job.run_dir), LAST)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for key, tensor in tensors.items():
            if tensor.dim() == 2:
                tensors[key] = torch.zeros_like(tensor, dtype=getattr(torch, name))
                break

    try:
        forge_tensors(folder, f"{file}.safetensors", change)
    except (KeyError, RuntimeError, UserWarning, safetensors.SafetensorError):
        pytest.skip("safetensors does not write this type")
    for command in ("translate", "average", "train"):
        found = enter(command, job, "one\n", "last")
        assert found.status in (0, 4), found
        assert "Traceback" not in found.said


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_translate_refuses_weights_of_another_type(job: TrainJob, dtype: torch.dtype) -> None:  # noqa: F811
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["embedding"] = tensors["embedding"].to(dtype)

    forge_tensors(step_dir(Path(job.run_dir), LAST), "model.safetensors", change)
    assert_refused(enter("translate", job, "one\n", "last"), 4, "'embedding' is of type")
