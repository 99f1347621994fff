"""The run directory: what is written comes back bit for bit; what is damaged or hostile is named and never loaded.

Expected digests, manifests and payloads are made here, not by the module. Crashes, kills, full disks and power cuts are
in test_checkpoint_faults.py, which uses the helpers of this page.
"""

import errno
import json
import logging
import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from transformer.checkpoint import Checkpoint, commit, load_checkpoint, newest, rotate, step_path
from transformer.errors import CheckpointError, InputError, LockedError, StorageError, TransformerError
from transformer.files import read_json, write_json
from transformer.run_dir import RunDir, holds_lock, list_steps, lock_run

CONFIG = {"model": {"d_model": 8, "norm": "post"}, "data": {"test": {"b": {"src": "x"}, "a": {"src": "y"}}}}
FILES = ("MANIFEST.json", "config.json", "ema.safetensors", "model.safetensors", "optimizer.safetensors", "state.json")


# --- helpers


def content(step: int, version: int = 0) -> dict[str, Any]:
    """What a checkpoint of `step` holds: a pure function, so that a loaded one can be judged."""
    generator = torch.Generator().manual_seed(1000 * step + version)
    model = {"w": torch.randn(20, 30, generator=generator), "b": torch.randn(7, generator=generator).bfloat16()}
    optimizer = {f"{name}.{moment}": tensor.float() + 1 for name, tensor in model.items() for moment in ("m", "v")}
    tensors = {"model": model, "optimizer": optimizer, "ema": {name: 2 * tensor for name, tensor in model.items()}}
    return {"tensors": tensors, "state": {"step": step, "version": version, "best": None}, "config": CONFIG}


def write(run: Path, step: int, version: int = 0) -> Checkpoint:
    return commit(run, step=step, **content(step, version))


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    """Equal names, types, shapes and bits (NaN and -0.0 included)."""
    return found.keys() == wanted.keys() and all(
        found[k].dtype == w.dtype and found[k].shape == w.shape and raw(found[k]) == raw(w) for k, w in wanted.items()
    )


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def assert_whole(found: Checkpoint) -> None:
    wanted = content(found.step, found.state["version"])
    assert found.state == wanted["state"]
    assert found.config == CONFIG
    assert all(same(found.tensors(name), group) for name, group in wanted["tensors"].items())


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Every name below a directory and its bytes, the lock apart."""
    paths = (path for path in folder.rglob("*") if path.name != ".lock")
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in paths}


def leftovers(run: Path) -> list[str]:
    return sorted(
        name for name in snapshot(run) if any(part[:5] in (".tmp-", ".del-", ".old-") for part in name.split("/"))
    )


def restart(run: Path) -> Checkpoint | None:
    """What the next start finds; it must leave nothing half-done behind."""
    with lock_run(run):
        assert leftovers(run) == []
        found = newest(run)
    if found is not None:
        assert_whole(found)
    return found


def in_child(work: Callable[[], object]) -> int:
    """Fork a child to do it and return its process id. It exits with the status of a TransformerError, or 99."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns of forking with threads; the child uses none
        child = os.fork()
    if child:
        return child
    status = 99
    try:
        work()
        status = 0
    except TransformerError as error:
        status = error.exit_status
    finally:
        os._exit(status)


def status_of(work: Callable[[], object]) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(in_child(work), 0)[1])


REAL_FSYNC = os.fsync


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for the disk: a dead process loses nothing it wrote, and the power-loss model judges the syncs."""
    monkeypatch.setattr(os, "fsync", lambda file: os.fstat(file))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with steps 10 and 20."""
    for step in (10, 20):
        write(tmp_path / "run", step)
    return tmp_path / "run"


# --- round trip


def test_every_kind_of_tensor_returns_bit_for_bit(tmp_path: Path) -> None:
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
    assert found.path == step_path(tmp_path, 1) == tmp_path / "checkpoints" / "step-00000001"
    assert sorted(os.listdir(found.path)) == ["MANIFEST.json", "config.json", "model.safetensors", "state.json"]


def test_the_manifest_says_what_sha256sum_says(run: Path) -> None:
    folder = step_path(run, 20)
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    assert (manifest["format"], manifest["step"], list(manifest["files"])) == (3, 20, sorted(FILES)[1:])
    for name, entry in manifest["files"].items():
        data = (folder / name).read_bytes()
        assert entry == {"size": len(data), "sha256": sha256(data).hexdigest()}
    assert sorted(os.listdir(folder)) == sorted(FILES)


def test_equal_content_gives_equal_bytes_whatever_the_order_of_names(tmp_path: Path) -> None:
    shuffled = content(10)
    shuffled["tensors"] = {k: dict(reversed(v.items())) for k, v in reversed(shuffled["tensors"].items())}
    write(tmp_path / "a", 10)
    commit(tmp_path / "b", step=10, **shuffled)
    assert snapshot(tmp_path / "a") == snapshot(tmp_path / "b")


def test_the_order_of_the_configuration_is_kept(run: Path) -> None:
    assert list(load_checkpoint(step_path(run, 20)).config["data"]["test"]) == ["b", "a"]


def test_files_have_the_mode_that_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = write(tmp_path, 1).path
    finally:
        os.umask(before)
    assert {(path / name).stat().st_mode & 0o777 for name in FILES} == {0o640}
    assert path.stat().st_mode & 0o777 == 0o750


def test_an_equal_checkpoint_is_left_alone_and_another_replaced(run: Path) -> None:
    before = (step_path(run, 20) / "state.json").stat().st_ino
    write(run, 20)
    assert (step_path(run, 20) / "state.json").stat().st_ino == before
    write(run, 20, version=1)
    found = restart(run)
    assert found is not None
    assert found.state["version"] == 1
    assert sorted(os.listdir(run / "checkpoints")) == ["step-00000010", "step-00000020"]


def test_a_damaged_checkpoint_in_the_way_is_kept_aside(run: Path) -> None:
    for expected in (1, 2):
        (step_path(run, 20) / "state.json").write_text("{}\n")
        assert_whole(write(run, 20))
        assert sum(name.startswith(".bad-step-00000020") for name in os.listdir(run / "checkpoints")) == expected
    assert list_steps(run) == [10, 20]


def test_averaged_is_replaced(run: Path) -> None:
    for version in (0, 1):
        written = commit(run, averaged=True, step=20, **content(20, version))
        assert written == load_checkpoint(run / "averaged")
        assert_whole(written)
    assert written.state["version"] == 1
    assert sorted(os.listdir(run)) == ["averaged", "checkpoints"]


def test_what_would_not_load_is_not_written(run: Path) -> None:
    before = snapshot(run)
    for config in ({"_target_": "os.system"}, {"a": [{"b": "${oc.env:HOME}"}]}):
        with pytest.raises(InputError, match=r"_target_|oc\.env"):
            commit(run, step=30, **content(30) | {"config": config})
    with pytest.raises(ValueError, match="not JSON compliant"):
        commit(run, step=30, **content(30) | {"state": {"best": float("nan")}})
    for tensors in ({"ema": {}}, {"model": {}, "other": {}}):
        with pytest.raises(ValueError, match="files of a checkpoint"):
            commit(run, step=30, **content(30) | {"tensors": tensors})
    shared = torch.ones(4)
    with pytest.raises(RuntimeError, match="share memory"):
        commit(run, step=30, **content(30) | {"tensors": {"model": {"a": shared, "b": shared}}})
    assert snapshot(run) == before


def test_tensors_that_are_not_there(run: Path) -> None:
    found = commit(run, step=30, **content(30) | {"tensors": {"model": {}}})
    for name in ("ema", "../step-00000020/model", "state.json"):
        with pytest.raises(CheckpointError, match="does not hold it"):
            found.tensors(name)
    assert found.tensors("model") == {}


# --- listing, rotation, small files


def test_only_canonical_names_are_steps(run: Path) -> None:
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


def test_rotation_keeps_what_it_is_told_and_always_the_newest(run: Path) -> None:
    for step in (30, 40):
        write(run, step)
    rotate(run, {10, 30})
    assert list_steps(run) == [10, 30, 40]
    rotate(run, [])
    assert sorted(os.listdir(run / "checkpoints")) == ["step-00000040"]


def test_a_failing_rotation_is_logged_and_finished_at_the_next_start(
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


def test_json_files_are_replaced_atomically(tmp_path: Path) -> None:
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


BAD_JSON: dict[str, bytes] = {
    "empty": b"",
    "cut": b'{"a": 1',
    "nan": b'{"a": NaN}',
    "infinity": b"[-Infinity]",
    "latin-1": b'"\xe4"',
    "utf-16": '{"a": 1}'.encode("utf-16"),
    "deep": b"[" * 100_000,
    "deep and closed": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "huge": b"{}" + b" " * (17 * 2**20),
    "long number": b"1" * 10_000,
}


@pytest.mark.parametrize("kind", BAD_JSON)
def test_bad_json_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "best.json"
    path.write_bytes(BAD_JSON[kind])
    with pytest.raises(ValueError, match=r"\w"):
        read_json(path)
    with pytest.raises(CheckpointError, match=r"best\.json: "):
        RunDir(tmp_path).read_best()


def test_json_is_read_from_regular_files_only(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("1")
    (tmp_path / "link").symlink_to("real")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("link", "pipe", "folder", "absent"):
        with pytest.raises((OSError, ValueError)):
            read_json(tmp_path / name)


# --- the lock


def test_a_second_process_is_refused_at_once_and_told_who_holds_the_lock(tmp_path: Path) -> None:
    def hold() -> None:
        with lock_run(tmp_path / "deep" / "run"):
            os.write(ready[1], b".")
            time.sleep(60)

    ready = os.pipe()
    child = in_child(hold)
    try:
        assert os.read(ready[0], 1) == b"."
        began = time.monotonic()
        with (
            pytest.raises(LockedError, match=f"process {child} on {os.uname().nodename}, since 20"),
            lock_run(tmp_path / "deep" / "run"),
        ):
            pass
        assert time.monotonic() - began < 2
        assert LockedError.exit_status == 3
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with lock_run(tmp_path / "deep" / "run"):  # the kernel freed it
        assert str(os.getpid()) in (tmp_path / "deep" / "run" / ".lock").read_text()
    with lock_run(tmp_path / "deep" / "run"):
        pass
    assert os.listdir(tmp_path / "deep" / "run") == [".lock"]


def test_one_process_cannot_lock_twice_and_an_exception_frees_the_lock(tmp_path: Path) -> None:
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


def test_leftovers_are_cleared_under_the_lock_and_links_not_followed(run: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("precious")
    wanted = snapshot(run)
    for folder in (run, run / "checkpoints"):
        shutil.copytree(step_path(run, 10), folder / ".tmp-step-00000030-1-ab")
        shutil.copytree(step_path(run, 10), folder / ".del-step-00000005-1-ab")
        (folder / ".tmp-best.json-1-ab").write_text("x")
        (folder / ".tmp-link").symlink_to(tmp_path / "outside")
        (folder / ".old-").mkdir()
    shutil.copytree(step_path(run, 10), run / "checkpoints" / ".old-step-00000010")
    with lock_run(run):
        assert snapshot(run) == wanted
    assert (tmp_path / "outside" / "file").read_text() == "precious"


def test_places_that_cannot_be_locked(tmp_path: Path) -> None:
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


def flip(rng: random.Random, path: Path, _other: Path) -> set[str]:
    name = rng.choice(FILES)
    data = bytearray((path / name).read_bytes())
    bit = rng.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    (path / name).write_bytes(data)
    return {name, "MANIFEST.json"} if name != "MANIFEST.json" else {*FILES}


def cut(rng: random.Random, path: Path, _other: Path) -> set[str]:
    name = rng.choice(FILES)
    os.truncate(path / name, rng.randrange((path / name).stat().st_size))
    return {name}


def lengthen(rng: random.Random, path: Path, _other: Path) -> set[str]:
    name = rng.choice(FILES)
    (path / name).write_bytes((path / name).read_bytes() + rng.choice([b"\0", b"\n", b" " * 100]))
    return {name}


def zero_page(rng: random.Random, path: Path, _other: Path) -> set[str]:
    name = rng.choice(FILES)
    data = (path / name).read_bytes()
    at = 4096 * rng.randrange(1 + len(data) // 4096) if len(data) % 4096 else 0
    (path / name).write_bytes(data[:at] + bytes(len(data[at : at + 4096])) + data[at + 4096 :])
    return {name}


def lose(rng: random.Random, path: Path, _other: Path) -> set[str]:
    name = rng.choice(FILES)
    (path / name).unlink()
    return {name}


def add(rng: random.Random, path: Path, other: Path) -> set[str]:
    name = rng.choice(["model.safetensors.1", "extra.json", "state.json~", "step-00000010", "a\nb"])
    shutil.copy(other / "model.safetensors", path / name)
    return {ascii(name)[1:-1]}


def swap(rng: random.Random, path: Path, _other: Path) -> set[str]:
    first, second = rng.sample(FILES, 2)
    os.rename(path / first, path / "x")
    os.rename(path / second, path / first)
    os.rename(path / "x", path / second)
    return {first, second}


def take_from_another_step(rng: random.Random, path: Path, other: Path) -> set[str]:
    name = rng.choice([name for name in FILES if name != "config.json"])
    shutil.copy(other / name, path / name)
    return {name}


def be_another_step(_rng: random.Random, path: Path, other: Path) -> set[str]:
    shutil.rmtree(path)
    shutil.copytree(other, path)
    return {"MANIFEST.json"}


def edit_manifest(rng: random.Random, path: Path, _other: Path) -> set[str]:
    manifest = json.loads((path / "MANIFEST.json").read_text())
    name = rng.choice(FILES[1:])
    entry = manifest["files"][name]
    match rng.randrange(7):
        case 0:
            manifest["step"] += 1
        case 1:
            manifest["format"] = rng.choice([0, 2, 4, None, "3"])
        case 2:
            entry["size"] = rng.choice([entry["size"] + 1, str(entry["size"]), None, -1])
        case 3:
            entry["sha256"] = rng.choice([entry["sha256"].upper(), "", None, "0" * 64, entry["sha256"] + "0"])
        case 4:
            del manifest["files"][name]
        case 5:
            manifest["files"]["rng.pt"] = entry
        case 6:
            manifest["parent"] = 10
    (path / "MANIFEST.json").write_text(json.dumps(manifest, indent=2) + "\n")
    return {name, "MANIFEST.json"}


DAMAGES = [flip, cut, lengthen, zero_page, lose, add, swap, take_from_another_step, be_another_step, edit_manifest]


def assert_detected(template: Path, run: Path, damage: Callable[..., set[str]], rng: random.Random) -> None:
    """Damage the newest of two: it must be named, and the older one used."""
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(template, run)
    names = damage(rng, step_path(run, 20), step_path(run, 10))
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(step_path(run, 20))
    assert any(f"step-00000020/{name}: " in str(caught.value) for name in names), f"{names}: {caught.value}"
    assert "\n" not in str(caught.value)
    found = newest(run)
    assert found is not None
    assert found.step == 10
    assert_whole(found)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_detected_and_named(damage: Callable[..., set[str]], run: Path, tmp_path: Path) -> None:
    for seed in range(12):
        assert_detected(run, tmp_path / "damaged", damage, random.Random(seed))


def test_a_damaged_checkpoint_is_reported_once_and_kept(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    (step_path(run, 20) / "model.safetensors").write_bytes(b"x")
    before = snapshot(run)
    assert newest(run) == load_checkpoint(step_path(run, 10))
    assert snapshot(run) == before  # a reader without the lock moves nothing
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warned) == 1
    assert "step-00000020/model.safetensors: damaged: 1 bytes, and MANIFEST.json says" in warned[0]
    with lock_run(run):
        assert newest(run) == load_checkpoint(step_path(run, 10))
        assert sorted(os.listdir(run / "checkpoints")) == [".bad-step-00000020", "step-00000010"]
    assert list_steps(run) == [10]
    assert (run / "checkpoints" / ".bad-step-00000020" / "model.safetensors").read_bytes() == b"x"


def test_with_all_damaged_nothing_is_touched(run: Path) -> None:
    (step_path(run, 20) / "MANIFEST.json").unlink()
    os.truncate(step_path(run, 10) / "ema.safetensors", 5)
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
        os.rename(step_path(run, step), run / "checkpoints" / f".bad-step-{step:08d}")
    with pytest.raises(CheckpointError, match=r"\.bad-step-00000010"):
        newest(run)


def test_what_rots_between_verifying_and_reading_is_noticed(run: Path) -> None:
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


def test_resealing_is_accepted(run: Path) -> None:
    (step_path(run, 20) / "state.json").write_text('{"mine": 1}')
    reseal(step_path(run, 20))
    assert load_checkpoint(step_path(run, 20)).state == {"mine": 1}


@pytest.mark.parametrize(
    "text",
    [
        '{"_target_": "os.system", "command": "true"}',
        '{"a": {"b": [1, {"_partial_": true}]}}',
        '{"a": "${oc.env:HOME}"}',
        '{"a": [["x${y}"]]}',
        '{"${a}": 1}',
        '{"a": "\\u0024{oc.env:HOME}"}',
        "[]",
        "1",
        "{" + '"a": [' + "[" * 900 + '"${x}"' + "]" * 900 + "]}",
    ],
)
def test_a_configuration_that_could_be_resolved_is_refused(run: Path, text: str) -> None:
    (step_path(run, 20) / "config.json").write_text(text)
    reseal(step_path(run, 20))
    with pytest.raises(CheckpointError, match=r"config\.json: "):
        load_checkpoint(step_path(run, 20))


@pytest.mark.parametrize("name", ["config.json", "state.json", "MANIFEST.json"])
@pytest.mark.parametrize("kind", BAD_JSON)
def test_bad_json_in_a_checkpoint_is_refused_in_no_time(run: Path, name: str, kind: str) -> None:
    path = step_path(run, 20)
    if name == "MANIFEST.json":
        (path / name).write_bytes(BAD_JSON[kind])
    else:
        (path / name).write_bytes(BAD_JSON[kind])
        reseal(path)
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=rf"/{name}: ") as caught:
        load_checkpoint(path)
    assert time.monotonic() - began < 1
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
def test_a_manifest_with_strange_names_is_refused(run: Path, name: str) -> None:
    path = step_path(run, 20)
    manifest = json.loads((path / "MANIFEST.json").read_text())
    manifest["files"][name] = {"size": 1, "sha256": sha256(b"x").hexdigest()}
    (path / "MANIFEST.json").write_text(json.dumps(manifest, indent=2) + "\n")
    with pytest.raises(CheckpointError, match=r"MANIFEST\.json: ") as caught:
        load_checkpoint(path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def test_a_manifest_that_names_a_file_twice_is_refused(run: Path) -> None:
    path = step_path(run, 20) / "MANIFEST.json"
    path.write_text(path.read_text().replace('"step": 20,', '"step": 10,\n  "step": 20,'))
    with pytest.raises(CheckpointError, match="not as it was written"):
        load_checkpoint(path.parent)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "device"])
def test_only_regular_files_are_read(run: Path, tmp_path: Path, name: str, kind: str) -> None:
    path = step_path(run, 20) / name
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
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=rf"/{name}: (not a regular file|Too many levels of symbolic links)"):
        load_checkpoint(path.parent)
    assert time.monotonic() - began < 1


def test_a_checkpoint_that_is_itself_a_link_is_refused(run: Path) -> None:
    step_path(run, 30).symlink_to("step-00000020")
    with pytest.raises(CheckpointError, match="step-00000030: "):
        load_checkpoint(step_path(run, 30))


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
def test_what_is_no_safetensors_file_is_refused_and_not_run(
    run: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = step_path(run, 20)
    (path / "model.safetensors").write_bytes(PAYLOADS[kind])
    reseal(path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a safetensors file"):
        load_checkpoint(path).tensors("model")
    assert os.listdir(tmp_path) == ["run"]
