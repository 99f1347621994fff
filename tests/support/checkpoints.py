"""Checkpoints whose contents are known, what befalls them, and whether they are whole."""

import json
import os
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.corpora import step_dir
from transformer.checkpoint import Checkpoint, commit, load_checkpoint, newest
from transformer.errors import CheckpointError, TransformerError
from transformer.run_dir import lock_run

CONFIG = {"model": {"d_model": 8, "norm": "post"}, "data": {"test": {"b": {"src": "x"}, "a": {"src": "y"}}}}
FILES = ("MANIFEST.json", "config.json", "ema.safetensors", "model.safetensors", "optimizer.safetensors", "state.json")


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
    names = damage(rng, step_dir(run, 20), step_dir(run, 10))
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(step_dir(run, 20))
    assert any(f"step-00000020/{name}: " in str(caught.value) for name in names), f"{names}: {caught.value}"
    assert "\n" not in str(caught.value)
    found = newest(run)
    assert found is not None
    assert found.step == 10
    assert_whole(found)
