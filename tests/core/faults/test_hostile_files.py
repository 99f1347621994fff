"""Links, pipes and devices in a run directory; text that takes a terminal over; lines and numbers without bound; full
disks. No command follows, waits, grows or ends in a traceback."""

import errno
import fcntl
import io
import logging
import lzma
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import safetensors
import torch
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from support.compressed import compressed
from support.corpora import forge_tensors, overrides, reseal, start, step_dir, tiny_job, write_pair
from support.hostile_runs import LAST, RAW, assert_refused, edit, enter
from support.observers import PeakMemory
from support.paths import ROOT
from support.tiers import tiers
from transformer.cli.commands import compose
from transformer.config.compose import read_yaml
from transformer.config.jobs import TrainJob, TranslateJob
from transformer.config.settings import DataConfig, PairConfig
from transformer.data.corpus import read_lines
from transformer.data.prepare import prepare
from transformer.data.source import resolve_source
from transformer.data.store import SIDES, Sentences, Store, StoreWriter
from transformer.decoding.translate_stream import run as translate
from transformer.errors import InputError, StorageError
from transformer.files import build_once
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
def test_run_dir_follows_no_link(job: TrainJob, name: str) -> None:
    command, status = READ[name]
    run_dir = Path(job.run_dir)
    outside = put_outside(run_dir, name)
    before = outside.read_bytes()
    assert_refused(enter(command, job, "one\n"), status, name)
    assert outside.read_bytes() == before


@pytest.mark.parametrize(("command", "name"), [("train", n) for n in ("checkpoints", "hypotheses")])
def test_run_dir_writes_into_no_linked_folder(job: TrainJob, command: str, name: str) -> None:
    outside = put_outside(Path(job.run_dir), name)
    (outside / ".tmp-of-somebody").touch()
    before = sorted(outside.rglob("*"))
    assert_refused(enter(command, job), 5, f"{name}: a link")
    assert sorted(outside.rglob("*")) == before


def test_evaluate_follows_no_linked_folder(job: TrainJob) -> None:
    outside = put_outside(Path(job.run_dir), "hypotheses")
    (outside / "test.hyp").write_text("mine\n", encoding="utf-8")
    assert_refused(enter("evaluate", job), 5, "hypotheses: a link")
    assert (outside / "test.hyp").read_text(encoding="utf-8") == "mine\n"


OTHERS = (
    "best.json",
    "data.json",
    "config.yaml",
    "hypotheses/test.hyp",
    "averaged/state.json",
    "averaged/model.safetensors",
    "averaged",
    "hypotheses",
    "checkpoints",
    "run.json",
    "results.json",
    ".lock",
)
PIPES = ["tokenizer.model", "hypotheses/test.src", "hypotheses/test.ref", "train.log", "metrics.jsonl"]


@pytest.mark.parametrize("name", [*tiers(PIPES[:2], PIPES[2:], pytest.mark.ci), *tiers((), OTHERS)])
def test_commands_wait_for_no_pipe(job: TrainJob, name: str) -> None:
    """Each refuses, or does without."""
    path = Path(job.run_dir) / name
    path.rename(path.parent.parent / "aside")
    os.mkfifo(path)
    for command in ("translate", "evaluate", "average", "train"):
        found = enter(command, job, "one\n")
        assert found.status in (0, 2, 4, 5), found
        assert "Traceback" not in found.said


def test_newest_asks_no_pipe_who_holds_the_lock(job: TrainJob) -> None:
    """A damaged checkpoint is moved aside by whoever holds the lock, which a reader has to find out."""
    run_dir = Path(job.run_dir)
    (step_dir(run_dir, LAST) / "state.json").write_text("{}\n", encoding="utf-8")
    (run_dir / ".lock").unlink()
    os.mkfifo(run_dir / ".lock")
    assert enter("translate", job, "one\n", "last").status == 0


@pytest.mark.parametrize("name", ["tokenizer.model", "hypotheses/test.src", "metrics.jsonl"])
def test_commands_read_no_device(job: TrainJob, name: str) -> None:
    path = Path(job.run_dir) / name
    path.unlink()
    path.symlink_to("/dev/zero")
    command, status = READ[name]
    found = enter(command, job, "one\n")
    assert_refused(found, status, name)
    assert found.megabytes < 1500


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


def test_train_shows_samples_without_letting_them_act(corpus: DataConfig, tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    texts = [f"one {ATTACKS[name]} two" for name in sorted(ATTACKS, key="clipboard".__ne__)]  # the log has the first
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
    events = EventAccumulator(str(run_dir))
    events.Reload()
    texts = [
        event.tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"] for event in events.Tensors(tag)
    ]
    assert "\\x1b]52;c" in texts[0]
    return texts


@pytest.mark.parametrize("attack", tiers(["C1", "overwrite"], ["title", "clipboard"], pytest.mark.ci))
def test_commands_print_nothing_raw_that_a_document_says(job: TrainJob, attack: str) -> None:
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


def test_results_name_test_sets_as_the_settings_do(job: TrainJob) -> None:
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
        pytest.raises(StorageError, match=r": cannot be written: No space left on device \(\d+ bytes"),
        tracker,
    ):
        tracker.scalars(1, {"loss": 1.0})


DISK = """
mount -t tmpfs -o size={size}k none {folder} && cd {folder} && exec {python} -m transformer train {overrides}
"""


@pytest.mark.faults
@pytest.mark.parametrize("size", [64, 300, 700, 1100])
def test_train_says_what_did_not_fit_on_a_full_disk(corpus: DataConfig, tmp_path: Path, size: int) -> None:
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
    "decoder layers": {"n_decoder_layers": 10**15},
    "width": {"d_model": 10**6},
    "more width": {"d_model": 2**40},
    "beyond int64": {"d_model": 2**60, "d_ff": 2**60},
    "feed-forward": {"d_ff": 10**9},
    "heads": {"n_heads": 2**40, "d_k": 1, "d_v": 1},
    "keys": {"d_k": 2**50, "d_v": 1},
    "positions": {"max_positions": 10**12},
    "learned positions": {"positions": "learned", "max_positions": 10**9},
    "one more layer": {"n_layers": 2},
    "one more decoder layer": {"n_decoder_layers": 2},
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
    job: TrainJob,
    section: str,
    change: dict[str, Any],
) -> None:
    folder = Path(job.run_dir) / "averaged"
    edit(folder / "config.json", lambda config: config[section].update(change))
    reseal(folder)
    found = enter("translate", job, "one two\n", "averaged")
    assert_refused(found, 4, "averaged")
    assert found.megabytes < 1000


@pytest.mark.parametrize("extra", tiers([10**9], [2**62]))
def test_translate_stops_at_the_positions_of_the_model(job: TrainJob, extra: int) -> None:
    folder = Path(job.run_dir) / "averaged"
    edit(folder / "config.json", lambda config: config["search"].update(max_extra=extra, batch_tokens=2**62))
    reseal(folder)
    assert enter("translate", job, "one two\n", "averaged").status == 0


DTYPES = [name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)]


@pytest.mark.faults
@pytest.mark.parametrize("file", ["model", "optimizer"])
@pytest.mark.parametrize("name", DTYPES)
def test_commands_refuse_or_use_a_tensor_of_any_type(job: TrainJob, file: str, name: str) -> None:
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
def test_translate_refuses_weights_of_another_type(job: TrainJob, dtype: torch.dtype) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["embedding"] = tensors["embedding"].to(dtype)

    try:
        forge_tensors(step_dir(Path(job.run_dir), LAST), "model.safetensors", change)
    except KeyError:
        pytest.skip("this version of safetensors does not write this type")
    assert_refused(enter("translate", job, "one\n", "last"), 4, "'embedding' is of type")


# ---- lines without end ----------------------------------------------------------------------------------------------

MB = 1 << 20
MOST = 1 << 18  # bytes that are read of a line
ENDLESS = {"words": "dog ", "one word": "x", "CJK": "世", "a ligature of 18 letters": "\ufdfa", "spaces": " "}
SOURCE = "import sys\nfor _ in range({count}):\n    sys.stdout.buffer.write(({text!r} * (1 << 16)).encode())\nprint()\n"


def translate_with(job: TrainJob, line: str, *, megabytes: int) -> tuple[int, list[str], str, int]:
    """`transformer translate` of two lines around a long one: status, lines, stderr, and the most memory in MB."""
    count = megabytes * MB // (len(line.encode()) << 16)
    script = f"print('one', flush=True)\n{SOURCE.format(count=count, text=line)}print('two')"
    with (
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as writer,
        start("translate", f"run_dir={job.run_dir}", "threads=1", cwd=ROOT, stdin=writer.stdout) as process,
    ):
        assert process.stdout is not None
        assert process.stderr is not None
        memory = PeakMemory(process.pid)
        printed, said = process.stdout.read(), process.stderr.read()
        process.wait()
    memory.join()
    assert memory.kilobytes > 0
    return process.returncode, printed.split("\n")[:-1], said, memory.kilobytes // 1024


@pytest.mark.faults
@pytest.mark.parametrize(
    ("line", "megabytes"),
    [
        *(pytest.param(text, 200, id=f"200 MB, {name}") for name, text in ENDLESS.items()),
        pytest.param("dog ", 1024, id="1 GB"),
    ],
)
def test_translate_keeps_a_bounded_part_of_a_line(job: TrainJob, line: str, megabytes: int) -> None:
    status, lines, said, used = translate_with(job, line, megabytes=megabytes)
    assert status == 0, said
    assert len(lines) == 3
    assert "line 2: longer than 262144 bytes" in said
    assert "Traceback" not in said
    assert used < 1000


BEGINNING = "ab" + "ü" * (MOST // 2 - 1)  # just as long as may be


def translated(run_dir: str, text: str, *, strict: bool = False) -> bytes:
    output = io.BytesIO()
    translate(TranslateJob(run_dir=run_dir, threads=1, strict=strict), io.BytesIO(text.encode()), output)
    return output.getvalue()


@pytest.mark.faults
def test_translate_takes_a_long_line_as_its_beginning(finished: TrainJob) -> None:
    """Cut between two characters: the rest of one would be no UTF-8."""
    expected = translated(finished.run_dir, BEGINNING)
    assert translated(finished.run_dir, f"{BEGINNING}ü" * 3) == expected
    assert expected.count(b"\n") == 1


def test_translate_refuses_a_long_line_under_strict(finished: TrainJob) -> None:
    with pytest.raises(InputError, match="line 2: longer than 262144 bytes: split the line"):
        translated(finished.run_dir, f"one\n{BEGINNING}x", strict=True)


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("length", [MOST - 1, MOST, MOST + 1, MOST + 2, 2 * MOST - 1, 3 * MOST, 5 * MOST + 3])
def test_read_lines_keeps_a_bounded_part_of_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, length: int, suffix: str
) -> None:
    """Wherever it stands; the lines around it are whole, and none is shifted."""
    long = "é" * (length // 2) + "x" * (length % 2)
    for lines in (["a", long, "b"], [long, "b"], ["a", long], ["a" * (MOST - 3), long, "b", long, "ccc"]):
        path = tmp_path / f"text{suffix}"
        content = "\n".join(lines).encode()
        path.write_bytes(compressed(content, suffix))
        expected = [line.encode()[:MOST].decode("utf-8", "ignore") for line in lines]
        caplog.clear()
        assert list(read_lines(path)) == expected
        assert (f"{path}:{lines.index(long) + 1}: longer than {MOST} bytes" in caplog.text) is (length > MOST)


@pytest.mark.parametrize("suffix", tiers([".gz", ".xz", ".zst"], [".bz2"]))  # which needs seconds to compress it
@pytest.mark.parametrize("size", tiers([64], [1024]))
def test_prepare_survives_a_bomb_of_one_line(corpus: DataConfig, tmp_path: Path, size: int, suffix: str) -> None:
    """A pair whose source is so many megabytes long is dropped as too long; a few kilobytes of it are on the disk."""
    bomb = tmp_path / f"train.en{suffix}"
    with lzma.open(bomb, "wb", preset=0) if suffix == ".xz" else pyarrow.output_stream(bomb) as file:
        file.write(Path(str(corpus.train.src)).read_bytes())
        for _ in range(size):
            file.write(b"one " * (MB // 4))
    target = Path(str(corpus.train.tgt)).read_bytes() + b"eins\n"
    (tmp_path / "train.de").write_bytes(target)
    train = PairConfig(str(bomb), str(tmp_path / "train.de"))
    data = replace(corpus, train=train, store_dir=str(tmp_path / "store"))
    found = enter("prepare", tiny_job(tmp_path / "a", data))
    assert found.status == 0, found
    assert "too_long 1" in found.said
    assert found.megabytes < 700


# ---- prepared corpora -----------------------------------------------------------------------------------------------

TWO_SENTENCES = ([[4, 5, 6], [7]], [[8], [9, 4]])


def write_store(path: Path) -> Store:
    path.mkdir()
    with closing(StoreWriter(path, vocab_size=100)) as writer:
        writer.add(*(Sentences.of(side * 5000) for side in TWO_SENTENCES))
        writer.finish({})
    return Store.open(path)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("kind", ["ids", "offsets"])
def test_store_notices_that_a_file_was_cut_under_it(tmp_path: Path, kind: str, side: int) -> None:
    """To read on would end the process by SIGBUS."""
    store = write_store(tmp_path / "store")
    everything = np.arange(10_000)
    assert store.gather(everything, side).counts.sum() == [20_000, 15_000][side]
    os.truncate(tmp_path / "store" / f"{SIDES[side]}.{kind}", 4096)
    with pytest.raises(StorageError, match=rf"store/{SIDES[side]}\.{kind}: truncated while in use: start again"):
        store.gather(everything, side)
    with pytest.raises(StorageError, match="truncated while in use"):
        _ = store.lengths[everything]


def test_store_outlives_its_directory(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store")
    shutil.rmtree(tmp_path / "store")
    assert store.gather(np.array([9_999]), 1).pieces.tolist() == [9, 4]


def test_build_once_removes_what_dead_builders_of_other_places_left(tmp_path: Path) -> None:
    """A builder that still lives holds its lock, and keeps its directory."""
    for name in ("dead", "alive"):
        (tmp_path / f".tmp-{name}").mkdir()
        (tmp_path / f".tmp-{name}" / "file").touch()
    (tmp_path / "dead.lock").touch()
    with (tmp_path / "alive.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        build_once(tmp_path / "new", lambda folder: None, is_usable=lambda path: False, marks=[])
    assert sorted(path.name for path in tmp_path.glob("*") if path.is_dir()) == [".tmp-alive", "new"]


# What may lie where a directory of a store is to be built: at its name, its lock or its temporary name.
PLACES = {"name": "new", "lock": "new.lock", "temporary": ".tmp-new", "another's lock": "other.lock"}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["pipe", "link", "link to a file", "link to a folder"])
def test_build_once_follows_no_link_and_waits_for_no_pipe(tmp_path: Path, place: str, kind: str) -> None:
    folder, outside = tmp_path / "store", tmp_path / "outside"
    for made in (folder, outside, folder / ".tmp-other"):
        made.mkdir()
    (outside / "file").touch()
    if kind == "pipe":
        os.mkfifo(folder / PLACES[place])
    else:
        target = {"link": "none", "link to a file": "file", "link to a folder": ""}[kind]
        (folder / PLACES[place]).symlink_to(outside / target)

    with pytest.raises(StorageError, match=r"new\.lock: .* remove it$") if place == "lock" else nullcontext():
        build_once(folder / "new", lambda made: (made / "x").touch(), is_usable=lambda path: False, marks=[])
        assert [path.name for path in (folder / "new").iterdir()] == ["x"]
        assert not (folder / "new").is_symlink()
    assert [path.name for path in outside.iterdir()] == ["file"]


@pytest.mark.parametrize("name", ["MANIFEST.json", "source.ids", "target.offsets", "tokenizer.model"])
@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_prepare_builds_again_where_a_file_of_the_store_is_a_pipe_or_a_link(
    corpus: DataConfig, tmp_path: Path, name: str, kind: str
) -> None:
    job = tiny_job(tmp_path / "runs" / "a", replace(corpus, store_dir=str(tmp_path / "store")))
    store = prepare(job).path
    replace_by(kind, store / name, tmp_path / "elsewhere")
    if name == "source.ids":  # as the other ranks do, which do not read every byte
        with pytest.raises(InputError, match=r"not a regular file|symbolic links"):
            Store.open(store, is_verified=True)
    prepare(job)
    assert all(path.is_file() and not path.is_symlink() for path in store.iterdir())


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_resolve_source_copies_again_where_a_file_of_the_copy_is_a_pipe_or_a_link(tmp_path: Path, kind: str) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text('{"en": "one", "de": "eins"}\n', encoding="utf-8")
    pair = PairConfig(dataset=str(tmp_path / "set"), split="train")
    for _ in range(2):
        found = resolve_source(pair, "data.train", languages=("en", "de"), store_dir=tmp_path / "store")
        assert list(found.pairs()) == [("one", "eins")]
        assert not found.files["tgt"].is_symlink()
        replace_by(kind, found.files["tgt"], tmp_path / "elsewhere")


def replace_by(kind: str, path: Path, elsewhere: Path) -> None:
    """Put a pipe where a file is, or a link to the same content."""
    path.rename(elsewhere)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(elsewhere)


# ---- experiment files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["${oc.env:SECRET}", "${oc.env:NONE,x}", "${oc.${data.src_lang}:SECRET}"])
@pytest.mark.parametrize("place", ["experiment", "override"])
def test_compose_reads_no_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, place: str) -> None:
    """What a job holds is written into run.json and every checkpoint, which people pass on."""
    monkeypatch.setenv("SECRET", "hf_token")
    (tmp_path / "experiment").mkdir()
    text = f"# @package _global_\ndata:\n  root: {word}\n  src_lang: env\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text, encoding="utf-8")
    given = (
        ["experiment=mine"]
        if place == "experiment"
        else ["experiment=base", f"data.root='{word}'", "data.src_lang=env"]
    )
    with pytest.raises(InputError, match=r"the environment is not read") as refused:
        compose("train", given, config_dir=tmp_path)
    assert "hf_token" not in str(refused.value)
    assert OmegaConf.create({"a": "${oc.env:SECRET}"}).a == "hf_token", "other programs' configurations may"


@pytest.mark.parametrize("word", ["${hydra:runtime.cwd}", "${hydra:job.num}"])
def test_compose_reads_nothing_of_hydras(tmp_path: Path, word: str) -> None:
    (tmp_path / "experiment").mkdir()
    text = f"# @package _global_\ndata:\n  root: {word}\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text, encoding="utf-8")
    for given in (["experiment=mine"], ["experiment=base", f"data.root='{word}'"]):
        with pytest.raises(InputError, match=r"a run stores its settings, so Hydra's are not read"):
            compose("train", given, config_dir=tmp_path)


def doubling(line: str, *, count: int = 40) -> str:
    """YAML of `count` lines, each of which stands for twice the one above it."""
    return "".join(line.format(number, number + 1) for number in range(count))


BOMBS = {
    "aliases": (doubling("x{1}: &x{1} [*x{0}, *x{0}]\n").replace("[*x0, *x0]", "[]"), "10,000 values"),
    "merged aliases": (
        doubling("x{1}: &x{1} {{<<: [*x0, *x{0}, *x{0}]}}\n").replace("[*x0, *x0, *x0]", "&x0 {}"),
        "10,000 values",
    ),
    "a list of itself": ("run_dir: &x [*x]\n", "10,000 values"),
    "ten for each": (
        "x0: &x0 []\n" + "".join(f"x{n}: &x{n} [{', '.join(10 * [f'*x{n - 1}'])}]\n" for n in range(1, 9)),
        "10,000 values",
    ),
    "a long file": ("#" * (1 << 18) + "\nrun_dir: x\n", "262,144 characters"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_compose_expands_no_bomb(tmp_path: Path, bomb: str) -> None:
    """A few lines that stand for gigabytes: refused before they are expanded. Nothing of it stays in OmegaConf."""
    text, words = BOMBS[bomb]
    (tmp_path / "experiment").mkdir()
    path = tmp_path / "experiment" / "mine.yaml"
    path.write_text(f"# @package _global_\n{text}", encoding="utf-8")
    load = OmegaConf.load
    with pytest.raises(InputError, match=re.escape(words)) as refused:
        compose("train", ["experiment=mine"], config_dir=tmp_path)
    assert str(refused.value).startswith(str(path))
    assert "\n" not in str(refused.value)
    assert OmegaConf.load is load

    with pytest.raises(InputError, match=re.escape(words)):
        read_yaml(path, "scorers", remedy="")


def test_compose_takes_aliases_and_interpolations_in_moderation(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    text = (
        "# @package _global_\n"
        "data:\n"
        "  root: x\n"
        "  train: &pair {src: '${data.root}/${.tgt}', tgt: de}  # *\n"
        "  dev: *pair\n"
        "  test:\n" + "".join(f"    t{n}: {{<<: *pair, tgt: '${{data.train.src}}.{n}'}}\n" for n in range(20))
    )
    (tmp_path / "experiment" / "mine.yaml").write_text(text, encoding="utf-8")
    job = compose("train", ["experiment=mine"], config_dir=tmp_path)
    assert isinstance(job, TrainJob)
    assert (job.data.dev.src, job.data.test["t7"].src) == ("x/de", "x/x/de.7")
