"""The run directory: what is written comes back bit for bit; what is damaged or hostile is named and never loaded.

Expected digests, manifests and payloads are made here, not by the module. Crashes, kills, full disks and power cuts are
in tests/core/faults/test_checkpoint_faults.py.
"""

import errno
import json
import logging
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from support.checkpoints import (
    BAD_JSON,
    DAMAGES,
    FILES,
    assert_detected,
    assert_whole,
    content,
    in_child,
    leftovers,
    restart,
    same,
    snapshot,
    status_of,
    write,
)
from support.corpora import step_dir
from transformer.checkpoint import commit, find_checkpoint, load_checkpoint, newest, rotate
from transformer.config.settings import DataConfig, ModelConfig
from transformer.errors import CheckpointError, InputError, LockedError, StorageError
from transformer.files import read_json, write_json
from transformer.run_dir import RunDir, holds_lock, list_steps, lock_run
from transformer.sealed_folder import SealedFolder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with steps 10 and 20."""
    for step in (10, 20):
        write(tmp_path / "run", step)
    return tmp_path / "run"


# --- round trip


def test_commit_returns_every_kind_of_tensor_bit_for_bit(tmp_path: Path) -> None:
    odd = torch.tensor([0.0, -0.0, float("nan"), float("inf"), 1e-45, 3.14])
    model: dict[str, torch.Tensor] = {f"x.{d}": odd.to(d) for d in (torch.bfloat16, torch.float16, torch.float32)}
    model |= {
        "x.double": odd.double() / 3,
        "long": torch.tensor([-(2**63), 2**63 - 1]),
        "bool": torch.tensor([True, False]),
    }
    model |= {"none": torch.zeros(0, 5), "scalar": torch.tensor(7), "u8": torch.arange(256).to(torch.uint8)}
    model |= {"transposed": torch.arange(6.0).reshape(2, 3).T, "grad": torch.ones(2, requires_grad=True)}
    written = commit(tmp_path, step=1, tensors={"model": model}, state={"pi": 3.141592653589793}, config={})
    found = newest(tmp_path)
    assert found == written
    assert same(found.tensors("model"), {k: v.detach() for k, v in model.items()})
    assert list(found.tensors("model")) == sorted(model)
    assert found.state == {"pi": 3.141592653589793}
    assert found.path == step_dir(tmp_path, 1) == tmp_path / "checkpoints" / "step-00000001"
    assert sorted(os.listdir(found.path)) == ["MANIFEST.json", "config.json", "model.safetensors", "state.json"]


def test_manifest_says_what_sha256sum_says(run: Path) -> None:
    folder = step_dir(run, 20)
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    assert (manifest["format"], manifest["step"], list(manifest["files"])) == (3, 20, sorted(FILES)[1:])
    for name, entry in manifest["files"].items():
        data = (folder / name).read_bytes()
        assert entry == {"size": len(data), "sha256": sha256(data).hexdigest()}
    assert sorted(os.listdir(folder)) == sorted(FILES)


def test_commit_writes_equal_bytes_whatever_the_order_of_names(tmp_path: Path) -> None:
    shuffled = content(10)
    shuffled["tensors"] = {k: dict(reversed(v.items())) for k, v in reversed(shuffled["tensors"].items())}
    write(tmp_path / "a", 10)
    commit(tmp_path / "b", step=10, **shuffled)
    assert snapshot(tmp_path / "a") == snapshot(tmp_path / "b")


def test_commit_keeps_the_order_of_the_configuration(run: Path) -> None:
    assert list(load_checkpoint(step_dir(run, 20)).config["data"]["test"]) == ["b", "a"]


def test_commit_leaves_files_the_mode_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = write(tmp_path, 1).path
    finally:
        os.umask(before)
    assert {(path / name).stat().st_mode & 0o777 for name in FILES} == {0o640}
    assert path.stat().st_mode & 0o777 == 0o750


def test_commit_leaves_an_equal_checkpoint_alone_and_replaces_another(run: Path) -> None:
    before = (step_dir(run, 20) / "state.json").stat().st_ino
    write(run, 20)
    assert (step_dir(run, 20) / "state.json").stat().st_ino == before
    write(run, 20, version=1)
    found = restart(run)
    assert found is not None
    assert found.state["version"] == 1
    assert sorted(os.listdir(run / "checkpoints")) == ["step-00000010", "step-00000020"]


def test_commit_keeps_a_damaged_checkpoint_in_the_way_aside(run: Path) -> None:
    for expected in (1, 2):
        (step_dir(run, 20) / "state.json").write_text("{}\n")
        assert_whole(write(run, 20))
        assert sum(name.startswith(".bad-step-00000020") for name in os.listdir(run / "checkpoints")) == expected
    assert list_steps(run) == [10, 20]


def test_commit_replaces_the_averaged_one(run: Path) -> None:
    for version in (0, 1):
        written = commit(run, averaged=True, step=20, **content(20, version))
        assert written == load_checkpoint(run / "averaged")
        assert_whole(written)
    assert written.state["version"] == 1
    assert sorted(os.listdir(run)) == ["averaged", "checkpoints"]


def test_checkpoint_that_is_replaced_gives_no_tensors_of_another(run: Path) -> None:
    """Whose documents were read: it would be a model of one and settings of the other."""
    commit(run, averaged=True, step=20, **content(20))
    found = load_checkpoint(run / "averaged")
    commit(run, averaged=True, step=20, **content(20, version=1))
    with pytest.raises(CheckpointError, match=r"averaged/model\.safetensors: damaged"):
        found.tensors("model")


def test_commit_does_not_write_what_would_not_load(run: Path) -> None:
    before = snapshot(run)
    with pytest.raises(ValueError, match="not JSON compliant"):
        commit(run, step=30, **content(30) | {"state": {"best": float("nan")}})
    wrong: list[dict[str, dict[str, torch.Tensor]]] = [{"ema": {}}, {"model": {}, "other": {}}]
    for tensors in wrong:
        with pytest.raises(ValueError, match="files of a checkpoint"):
            commit(run, step=30, **content(30) | {"tensors": tensors})
    shared = torch.ones(4)
    with pytest.raises(RuntimeError, match="share memory"):
        commit(run, step=30, **content(30) | {"tensors": {"model": {"a": shared, "b": shared}}})
    assert snapshot(run) == before


def test_checkpoint_names_tensors_that_are_not_there(run: Path) -> None:
    found = commit(run, step=30, **content(30) | {"tensors": {"model": {}}})
    for name in ("ema", "../step-00000020/model", "state.json"):
        with pytest.raises(CheckpointError, match="not in the manifest"):
            found.tensors(name)
    assert found.tensors("model") == {}


# --- listing, rotation, small files


def test_list_steps_takes_canonical_names_only(run: Path) -> None:
    for name in (
        "step-30",
        "step-000000030",
        "step-0000003x",
        ".bad-step-00000040",
        "step-00000050-old",
        "step-٠٠٠٠٠٠٦٠",
    ):
        (run / "checkpoints" / name).mkdir()
    write(run, 123456789)
    assert list_steps(run) == [10, 20, 123456789]
    assert list_steps(run / "absent") == []
    assert newest(run / "absent") is None


def test_rotate_keeps_what_it_is_told_and_always_the_newest(run: Path) -> None:
    for step in (30, 40):
        write(run, step)
    rotate(run, {10, 30})
    assert list_steps(run) == [10, 30, 40]
    rotate(run, [])
    assert sorted(os.listdir(run / "checkpoints")) == ["step-00000040"]


def test_rotate_that_fails_is_logged_and_finished_at_the_next_start(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", raiser(errno.EIO))
        rotate(run, {20})
    assert "cannot be removed: Input/output error" in caplog.text
    assert list_steps(run) == [20]
    assert len(leftovers(run)) > 0
    restart(run)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", raiser(errno.EACCES))
        write_free = list_steps(run)
        rotate(run, set())
    assert list_steps(run) == write_free


def raiser(number: int) -> Callable[..., Any]:
    def fail(*_args: object, **_kwargs: object) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def test_write_json_replaces_files_atomically(tmp_path: Path) -> None:
    path = tmp_path / "best.json"
    for value in ({"step": 1, "metric": 0.1, "a": None}, ["ä", "\ud800", 10**400]):
        write_json(path, value)
        assert read_json(path) == value
    assert os.listdir(tmp_path) == ["best.json"]
    write_json(path, {"b": 1, "a": [2]})
    assert path.read_text() == '{\n  "b": 1,\n  "a": [\n    2\n  ]\n}\n'
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, float("inf"))
    with pytest.raises(StorageError, match=r"best\.json/x: cannot be written: Not a directory \(\d+ bytes needed"):
        write_json(path / "x", 1)
    assert read_json(path) == {"b": 1, "a": [2]}


BAD_JSON_ERRORS = {
    "empty": "Expecting value",
    "cut": "Expecting ',' delimiter",
    "nan": "^NaN is not a number",
    "infinity": "^-Infinity is not a number",
    "latin-1": "'utf-8' codec can't decode",
    "utf-16": "'utf-8' codec can't decode",
    "deep": "^nested too deeply",
    "deep and closed": "^nested too deeply",
    "huge": "^larger than 16777216 bytes",
    "long number": "Exceeds the limit",
}


@pytest.mark.parametrize("kind", BAD_JSON)
def test_read_json_refuses_bad_json_by_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "best.json"
    path.write_bytes(BAD_JSON[kind])
    with pytest.raises(ValueError, match=BAD_JSON_ERRORS[kind]):
        read_json(path)
    with pytest.raises(CheckpointError, match=r"best\.json: "):
        RunDir(tmp_path).read_best()


def test_read_json_reads_regular_files_only(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("1")
    (tmp_path / "link").symlink_to("real")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("link", "pipe", "folder", "absent"):
        with pytest.raises((OSError, ValueError)):
            read_json(tmp_path / name)


# --- the lock


def test_lock_run_refuses_a_second_process_at_once_and_says_who_holds_the_lock(tmp_path: Path) -> None:
    def hold() -> None:
        with lock_run(tmp_path / "deep" / "run"):
            os.write(ready[1], b".")
            time.sleep(60)

    ready = os.pipe()
    child = in_child(hold)
    try:
        assert os.read(ready[0], 1) == b"."
        with (
            pytest.raises(LockedError, match=f"process {child} on {os.uname().nodename}, since 20"),
            lock_run(tmp_path / "deep" / "run"),
        ):
            pass
        assert LockedError.exit_status == 3
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with lock_run(tmp_path / "deep" / "run"):  # the kernel freed it
        assert str(os.getpid()) in (tmp_path / "deep" / "run" / ".lock").read_text()
    with lock_run(tmp_path / "deep" / "run"):
        pass
    assert os.listdir(tmp_path / "deep" / "run") == [".lock"]


def test_lock_run_holds_once_in_a_process_and_ends_with_an_exception(tmp_path: Path) -> None:
    def fail() -> None:
        with lock_run(tmp_path):
            assert status_of(lambda: lock_run(tmp_path).__enter__()) == 3
            with pytest.raises(LockedError, match=f"process {os.getpid()} "), lock_run(tmp_path):
                pass
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not holds_lock(RunDir(tmp_path)), "a notebook lives on after an error, and only reads from then on"
    with lock_run(tmp_path):
        assert holds_lock(RunDir(tmp_path))


def test_lock_run_clears_leftovers_and_follows_no_link(run: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("precious")
    wanted = snapshot(run)
    for folder in (run, run / "checkpoints"):
        shutil.copytree(step_dir(run, 10), folder / ".tmp-step-00000030-1-ab")
        shutil.copytree(step_dir(run, 10), folder / ".del-step-00000005-1-ab")
        (folder / ".tmp-best.json-1-ab").write_text("x")
        (folder / ".tmp-link").symlink_to(tmp_path / "outside")
        (folder / ".old-").mkdir()
    shutil.copytree(step_dir(run, 10), run / "checkpoints" / ".old-step-00000010")
    with lock_run(run):
        assert snapshot(run) == wanted
    assert (tmp_path / "outside" / "file").read_text() == "precious"


def test_lock_run_names_places_that_cannot_be_locked(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "file")
    (tmp_path / "other" / ".lock").mkdir(parents=True)
    (tmp_path / "third").mkdir()
    (tmp_path / "third" / "checkpoints").write_text("")
    for name in ("file", "file/run", "run", "other", "third"):
        with pytest.raises(StorageError, match=f"{tmp_path / name}"), lock_run(tmp_path / name):
            pass
    assert (tmp_path / "file").read_text() == "precious"
    with pytest.raises(StorageError, match="cannot be listed"):  # must not pass for "no checkpoints: start afresh"
        newest(tmp_path / "third")


# --- damage


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_load_checkpoint_detects_and_names_damage(damage: Callable[..., set[str]], run: Path, tmp_path: Path) -> None:
    for seed in range(12):
        assert_detected(run, tmp_path / "damaged", damage, random.Random(seed))


def flip_last_byte(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_find_checkpoint_verifies_what_is_used_and_falls_back_where_that_is_damaged(run: Path) -> None:
    """Moments are for resuming: who translates does not read them."""
    flip_last_byte(step_dir(run, 20) / "optimizer.safetensors")
    assert find_checkpoint(run, "last").step == 20
    found = newest(run)
    assert found is not None
    assert found.step == 10
    flip_last_byte(step_dir(run, 20) / "model.safetensors")
    flip_last_byte(step_dir(run, 20) / "ema.safetensors")
    assert find_checkpoint(run, "last").step == 10


def test_find_checkpoint_names_the_newest_of_many_runs(tmp_path: Path) -> None:
    for number in range(7):
        (tmp_path / f"r{number}").mkdir()
        RunDir(tmp_path / f"r{number}").record.write_text("{}")
        os.utime(tmp_path / f"r{number}", (number, number))
    shown = ", ".join(f"run_dir={tmp_path}/r{number}" for number in (6, 5, 4, 3, 2))
    with pytest.raises(InputError, match=rf"no such run directory; there are {re.escape(shown)} and 2 more$"):
        find_checkpoint(tmp_path / "demo", "auto")


def test_find_checkpoint_reads_the_weights_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = SealedFolder.read

    def counted(folder: SealedFolder[Any], name: str) -> bytes:
        read.append(folder.manifest.files[name].sha256)
        return real(folder, name)

    monkeypatch.setattr(SealedFolder, "read", counted)
    monkeypatch.setattr("transformer.checkpoint.check_weights", lambda tensors: None)
    find_checkpoint(run, "last").weights()
    weights = (step_dir(run, 20) / "ema.safetensors").read_bytes()
    assert read == [sha256(weights).hexdigest()]


def test_newest_reports_a_damaged_checkpoint_once_and_keeps_it(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    (step_dir(run, 20) / "model.safetensors").write_bytes(b"x")
    before = snapshot(run)
    assert newest(run) == load_checkpoint(step_dir(run, 10))
    assert snapshot(run) == before  # a reader without the lock moves nothing
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warned) == 1
    assert "step-00000020/model.safetensors: damaged: 1 bytes, and MANIFEST.json says" in warned[0]
    with lock_run(run):
        assert newest(run) == load_checkpoint(step_dir(run, 10))
        assert sorted(os.listdir(run / "checkpoints")) == [".bad-step-00000020", "step-00000010"]
    assert list_steps(run) == [10]
    assert (run / "checkpoints" / ".bad-step-00000020" / "model.safetensors").read_bytes() == b"x"


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM], ids=errno.errorcode.get)
def test_newest_takes_no_checkpoint_for_damaged_that_it_cannot_open(
    run: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be moved aside, and the run would go on from the one before."""

    def fail(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    before = snapshot(run)
    with lock_run(run):
        monkeypatch.setattr("transformer.sealed_folder.open_regular", fail)
        with pytest.raises(StorageError, match=r"step-00000020.*: (no file can be opened|no memory is left)"):
            newest(run)
    assert snapshot(run) == before


def test_newest_touches_nothing_where_all_are_damaged(run: Path) -> None:
    (step_dir(run, 20) / "MANIFEST.json").unlink()
    os.truncate(step_dir(run, 10) / "ema.safetensors", 5)
    (run / "checkpoints" / "step-00000030").write_text("not a directory")
    before = snapshot(run)
    with lock_run(run), pytest.raises(CheckpointError) as caught:
        newest(run)
    for part in (
        "step-00000030: Not a directory",
        "step-00000020/MANIFEST.json: No such",
        "step-00000010/ema.safetensors: damaged: 5 bytes",
    ):
        assert part in str(caught.value)
    assert CheckpointError.exit_status == 4
    assert snapshot(run) == before
    for step in (10, 20, 30):  # set aside is not gone: no silent start from step 0
        os.rename(step_dir(run, step), run / "checkpoints" / f".bad-step-{step:08d}")
    with pytest.raises(CheckpointError, match=r"\.bad-step-00000010"):
        newest(run)


def test_checkpoint_notices_what_rots_between_verifying_and_reading(run: Path) -> None:
    found = newest(run)
    assert found is not None
    flip_file = found.path / "model.safetensors"
    data = bytearray(flip_file.read_bytes())
    data[-1] ^= 1
    flip_file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*sha256 differs"):
        found.tensors("model")
    assert found.tensors("ema")


# --- hostile files: the attacker can compute digests too


def reseal(path: Path, **changes: Any) -> None:
    """Make the manifest right again for what lies in the directory."""
    files = {}
    for name in sorted(set(os.listdir(path)) - {"MANIFEST.json"}):
        data = (path / name).read_bytes()
        files[name] = {"size": len(data), "sha256": sha256(data).hexdigest()}
    manifest = {"format": 3, "step": 20, "files": files} | changes
    (path / "MANIFEST.json").write_text(json.dumps(manifest, indent=2) + "\n")


def test_load_checkpoint_accepts_what_was_resealed(run: Path) -> None:
    (step_dir(run, 20) / "state.json").write_text('{"mine": 1}')
    reseal(step_dir(run, 20))
    assert load_checkpoint(step_dir(run, 20)).state == {"mine": 1}


@pytest.mark.parametrize("text", ["[]", "1", '"text"'])
def test_load_checkpoint_refuses_a_document_that_is_no_object(run: Path, text: str) -> None:
    (step_dir(run, 20) / "config.json").write_text(text)
    reseal(step_dir(run, 20))
    with pytest.raises(CheckpointError, match=r"config\.json: not a JSON object"):
        load_checkpoint(step_dir(run, 20))


def test_checkpoint_settings_are_text_and_nothing_in_them_is_resolved_or_called(run: Path) -> None:
    config = {"data": {"tgt_lang": "${oc.env:HOME}"}, "model": {"_target_": "os.system"}}
    (step_dir(run, 20) / "config.json").write_text(json.dumps(config))
    reseal(step_dir(run, 20))
    found = load_checkpoint(step_dir(run, 20))
    assert found.settings("data", DataConfig).tgt_lang == "${oc.env:HOME}"
    with pytest.raises(CheckpointError, match=r"config\.json: .*_target_"):
        found.settings("model", ModelConfig)


@pytest.mark.parametrize("name", ["config.json", "state.json", "MANIFEST.json"])
@pytest.mark.parametrize("kind", BAD_JSON)
def test_load_checkpoint_refuses_bad_json(run: Path, name: str, kind: str) -> None:
    path = step_dir(run, 20)
    if name == "MANIFEST.json":
        (path / name).write_bytes(BAD_JSON[kind])
    else:
        (path / name).write_bytes(BAD_JSON[kind])
        reseal(path)
    with pytest.raises(CheckpointError, match=rf"/{name}: ") as caught:
        load_checkpoint(path)
    assert len(str(caught.value)) < 1000


NAMES = [
    "../../x",
    "/etc/passwd",
    "a\0b",
    "model.safetensors/../../x",
    "pytorch_model.bin",
    "",
    ".",
    "..",
    "STATE.JSON",
]
NAMES += ["model.safetensors ", "x" * 100_000, "\ud800", "model.safetensors\n", "C:\\x", ".metadata", "MANIFEST.json"]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:24])
def test_load_checkpoint_refuses_a_manifest_with_strange_names(run: Path, name: str) -> None:
    path = step_dir(run, 20)
    manifest = json.loads((path / "MANIFEST.json").read_text())
    manifest["files"][name] = {"size": 1, "sha256": sha256(b"x").hexdigest()}
    (path / "MANIFEST.json").write_text(json.dumps(manifest, indent=2) + "\n")
    with pytest.raises(CheckpointError, match=r"MANIFEST\.json: ") as caught:
        load_checkpoint(path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def test_load_checkpoint_refuses_a_manifest_that_names_a_file_twice(run: Path) -> None:
    path = step_dir(run, 20) / "MANIFEST.json"
    path.write_text(path.read_text().replace('"step": 20,', '"step": 10,\n  "step": 20,'))
    with pytest.raises(CheckpointError, match="not as it was written"):
        load_checkpoint(path.parent)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "device"])
def test_load_checkpoint_reads_regular_files_only(run: Path, tmp_path: Path, name: str, kind: str) -> None:
    path = step_dir(run, 20) / name
    os.rename(path, tmp_path / "moved")
    match kind:
        case "link":
            path.symlink_to(tmp_path / "moved")
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "device":
            path.symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=rf"/{name}: (not a regular file|Too many levels of symbolic links)"):
        load_checkpoint(path.parent)


def test_load_checkpoint_refuses_a_link_to_a_checkpoint(run: Path) -> None:
    step_dir(run, 30).symlink_to("step-00000020")
    with pytest.raises(CheckpointError, match="step-00000030: "):
        load_checkpoint(step_dir(run, 30))


def header(text: str, data: bytes = b"", length: int | None = None) -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text.encode() + data


F32 = '"dtype":"F32","shape":[2]'
PAYLOADS = {
    "pickle": b"cos\nsystem\n(S'touch marker'\ntR.",
    "pickle 2": b"\x80\x02cposix\nsystem\nX\x05\x00\x00\x00false\x85R.",
    "zip": b"PK\x03\x04" + bytes(100),
    "empty": b"",
    "short": b"\x01\x02",
    "no header": header(""),
    "header too long": header("{}", length=2**62),
    "header negative": b"\xff" * 8 + b"{}",
    "header cut": header('{"a":{'),
    "header no object": header("[]"),
    "header deep": header("[" * 100_000),
    "no such type": header('{"a":{"dtype":"PICKLE","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
    "odd type": header('{"a":{"dtype":"F8_E8M0","shape":[8],"data_offsets":[0,8]}}', bytes(7)),
    "beyond the end": header("{" + f'"a":{{{F32},"data_offsets":[0,8]}}' + "}", bytes(4)),
    "gap": header("{" + f'"a":{{{F32},"data_offsets":[8,16]}}' + "}", bytes(16)),
    "overlap": header("{" + f'"a":{{{F32},"data_offsets":[0,8]}},"b":{{{F32},"data_offsets":[4,12]}}' + "}", bytes(12)),
    "backwards": header("{" + f'"a":{{{F32},"data_offsets":[8,0]}}' + "}", bytes(8)),
    "wrong size": header('{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}', bytes(8)),
    "overflow": header('{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}}'),
    "rest": header("{" + f'"a":{{{F32},"data_offsets":[0,8]}}' + "}", bytes(9)),
}


@pytest.mark.parametrize("kind", PAYLOADS)
def test_load_checkpoint_refuses_what_is_no_safetensors_file_and_does_not_run_it(
    run: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = step_dir(run, 20)
    (path / "model.safetensors").write_bytes(PAYLOADS[kind])
    reseal(path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a safetensors file"):
        load_checkpoint(path).tensors("model")
    assert os.listdir(tmp_path) == ["run"]
