"""Crafted run directories and hostile lines in numbers, under the mark `faults`.

Every directory is made from a sound one by a rule and a seed; commands run in children that watch time and memory. No
payload is executed, nothing outside is touched, no signal ends a command, and none says more than one line of error.
"""

import json
import os
import pickle
import random
import re
import shutil
import struct
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.corpora import forge_tensors, read, reseal, start, step_dir
from support.hostile_runs import LAST, RAW, enter, places, put_at
from support.observers import PeakMemory
from support.paths import ROOT
from transformer.config.jobs import TrainJob

Note = Callable[[str, object], None]

DIRECTORIES = 400
LINES = 20_000
MEGABYTES = 2_000
COMMANDS = ("translate", "evaluate", "average", "train")

Draw = random.Random


# ---- what is crafted ------------------------------------------------------------------------------------------------

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 5, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), 10**18, 10**400, 0.5, -0.0, 1e308),
    *(float("inf"), float("-inf"), "", "x", "../../etc/passwd", "/dev/zero", "${oc.env:HOME}", "\x1b]0;x\x07", "a\nb"),
    *("\x00", "\ud800", "x" * 100_000, [], {}, [1], [[]], {"_target_": "os.system"}, {"a": 1}, [None], ["x"] * 1000),
    json.loads("[" * 900 + "]" * 900),
]


def craft_document(run_dir: Path, draw: Draw, marker: Path) -> str:
    """One or a few values of a document replaced, dropped or added."""
    folders = [run_dir / "averaged", step_dir(run_dir, LAST)]
    paths = [run_dir / name for name in ("run.json", "results.json", "best.json")]
    paths += [folder / name for folder in folders for name in ("config.json", "state.json") for _ in range(3)]
    path = draw.choice(paths)
    data = read(path)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        place = draw.choice(list(places(data)))
        match draw.randrange(5):
            case 0 if isinstance(place[-1], str):
                owner = data
                for key in place[:-1]:
                    owner = owner[key]
                del owner[place[-1]]
            case 1:
                data[draw.choice(("x", "_target_", "\x1b[2J", "format", "__proto__"))] = draw.choice(VALUES)
            case _:
                put_at(data, place, draw.choice(VALUES))
        if not data:
            break
    text = json.dumps(data, indent=2).replace("-Infinity", "-1e999").replace("Infinity", "1e999")
    path.write_text(f"{text}\n", encoding="utf-8")
    if path.parent in folders:
        reseal(path.parent)
    return f"{path.name}: document"


SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (2,), (32,), (64,), (32, 32), (1, 32), (32, 0), (7, 3, 2), (1 << 20,)]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool]
DTYPES += [torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8]
NUMBERS = (float("nan"), float("inf"), -float("inf"), -1.0, 1e38, 1e-40, 0.0)


def craft_tensors(run_dir: Path, draw: Draw, marker: Path) -> str:
    """Shapes, types, values and names of tensors."""
    folder = draw.choice([run_dir / "averaged", *([step_dir(run_dir, LAST)] * 3)])
    name = draw.choice([path.name for path in sorted(folder.glob("*.safetensors"))])

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for key in draw.sample(sorted(tensors), draw.choice((1, 1, 3))):
            match draw.randrange(6):
                case 0:
                    del tensors[key]
                case 1:
                    tensors[draw.choice(("../../x", "\x1b]0;x\x07", "", "__class__", f"{key}.more"))] = torch.zeros(2)
                case 2:
                    tensors[key] = torch.zeros(draw.choice(SHAPES), dtype=draw.choice(DTYPES))
                case 3:
                    tensors[key] = tensors[key].to(draw.choice(DTYPES))
                case 4:
                    tensors[key] = torch.full_like(tensors[key], draw.choice(NUMBERS))
                case _:
                    tensors[key] = tensors[key].flatten()[: draw.randrange(5)].clone()

    forge_tensors(folder, name, change)
    return f"{name}: tensors"


def craft_header(run_dir: Path, draw: Draw, marker: Path) -> str:
    """Headers of safetensors as no program writes them."""
    folder = draw.choice([run_dir / "averaged", step_dir(run_dir, LAST)])
    path = draw.choice(sorted(folder.glob("*.safetensors")))
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    entry = header[draw.choice([key for key in header if key != "__metadata__"])]
    match draw.randrange(8):
        case 0:
            entry["data_offsets"] = draw.choice(([0, 2**63], [2**64, 0], [-1, 4], [8, 4], [0, 0], "x", []))
        case 1:
            entry["shape"] = draw.choice(([2**62, 4], [-1], [0] * 1000, [2**32, 2**32], "x", [1.5], [None]))
        case 2:
            entry["dtype"] = draw.choice(("F4", "C64", "F128", "", None, 5, "O", "\x1b"))
        case 3:
            header["__metadata__"] = draw.choice((5, {"a": 5}, {"x" * 1000: "y"}, [], None))
        case 4:
            header = draw.choice(([], 5, {}, None, {"a": None}, json.loads("[" * 900 + "]" * 900)))
        case _:
            pass
    raw = json.dumps(header).encode()
    length = draw.choice((len(raw), len(raw), len(raw), 2**63, 2**64 - 1, 0, len(raw) + 1, 100_000_001))
    path.write_bytes(struct.pack("<Q", length) + raw + content[8 + size : draw.choice((None, -1, -100))])
    reseal(folder)
    return f"{path.name}: header"


class Payload:
    """What a pickle executes."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (self.command,)


FILES = (
    "tokenizer.model",
    "run.json",
    "results.json",
    "best.json",
    "train.log",
    "metrics.jsonl",
    ".lock",
    "data.json",
    "config.yaml",
    "hypotheses/test.src",
    "hypotheses/test.ref",
    "hypotheses/test.hyp",
    "hypotheses/dev.src",
)
INSIDE = ("model.safetensors", "optimizer.safetensors", "state.json", "config.json", "MANIFEST.json")


def craft_file(run_dir: Path, draw: Draw, marker: Path) -> str:
    """Another kind of thing where a file was, or other bytes in it."""
    folder = draw.choice([run_dir / "averaged", step_dir(run_dir, LAST)])
    path = draw.choice([*(run_dir / name for name in FILES), *(folder / name for name in INSIDE)])
    content = path.read_bytes() if path.exists() else b""
    path.unlink(missing_ok=True)
    touch = f"touch {marker}"
    kind = draw.randrange(13)
    match kind:
        case 0:
            path.symlink_to(run_dir.parent / "outside" / "precious")
        case 1:
            path.symlink_to("/dev/zero")
        case 2:
            os.mkfifo(path)
        case 3:
            path.mkdir()
        case 4:
            path.write_bytes(b"")
        case 5:
            path.write_bytes(pickle.dumps(Payload(touch)))
        case 6:
            with path.open("wb") as file:
                torch.save({"model": Payload(touch)}, file)  # a zip with a pickle
        case 7:
            path.write_bytes(draw.randbytes(5000))
        case 8:
            path.touch()
            os.truncate(path, 100 << 30)  # a hole of 100 GB
        case 9:
            path.write_bytes(content[: draw.randrange(len(content) + 1)])
        case 10 if content:
            changed = bytearray(content)
            for _ in range(draw.choice((1, 1, 20))):
                changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
            path.write_bytes(changed)
        case 11:
            path.write_bytes(b"[" * 200_000)
        case _:
            path.symlink_to(path.name)  # a circle
    if path.parent == folder and path.name != "MANIFEST.json" and kind in (4, 5, 6, 7, 9, 10) and draw.random() < 0.5:
        reseal(folder)
    return f"{path.name}: file {kind}"


def craft_names(run_dir: Path, draw: Draw, marker: Path) -> str:
    """Directories and files with names of all kinds, links in place of folders."""
    names = ("step-00000099", "step-99999999999999999999", "step-\x1b[2J", "$(touch x)", "a\nb", "-rf", "x" * 250)
    kind = draw.randrange(5)
    match kind:
        case 0:
            (run_dir / "checkpoints" / draw.choice(names)).mkdir()
        case 1:
            (run_dir / "hypotheses" / f"{draw.choice(names)}.src").write_bytes(b"x\n")
        case 2:
            folder = draw.choice([run_dir / "averaged", step_dir(run_dir, LAST)])
            (folder / draw.choice(names)).write_bytes(b"x")
            if draw.random() < 0.5:
                reseal(folder)
        case 3:
            folder = run_dir / draw.choice(("checkpoints", "averaged", "hypotheses"))
            shutil.move(folder, run_dir.parent / "outside" / "folder")
            folder.symlink_to(run_dir.parent / "outside" / "folder")
        case _:
            manifest = step_dir(run_dir, LAST) / "MANIFEST.json"
            data = read(manifest)
            for name in ("../../../outside/precious", "/etc/passwd", "model.safetensors\x00", draw.choice(names)):
                data["files"][name] = {"size": 1, "sha256": "0" * 64}
            manifest.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return f"names {kind}"


CRAFTS: list[Callable[[Path, Draw, Path], str]] = [
    *(craft_document, craft_document, craft_tensors, craft_header, craft_file, craft_file, craft_names)
]


# ---- run directories ------------------------------------------------------------------------------------------------


@pytest.mark.faults
@pytest.mark.timeout(3600)
def test_commands_survive_four_hundred_crafted_run_directories(
    finished: TrainJob,
    tmp_path: Path,
    record_property: Note,
) -> None:
    """None is executed; no signal, no traceback, none over 2 GB. One that takes a minute is ended by a signal."""
    first = int(os.environ.get("FIRST_SEED", "0"))
    statuses, failures, slowest, largest = Counter[int](), [], 0.0, 0
    for seed in range(first, first + DIRECTORIES):
        draw = random.Random(seed)
        place = tmp_path / str(seed)
        shutil.copytree(finished.run_dir, place / "copy")
        (place / "outside").mkdir()
        (place / "outside" / "precious").write_text("mine\n", encoding="utf-8")
        marker = place / "outside" / "executed"
        what = draw.choice(CRAFTS)(place / "copy", draw, marker)
        before = listing(place / "outside")
        for command in draw.sample(COMMANDS, 2):
            job = crafted_job(finished, place / "copy")
            found = enter(command, job, "one two\nthree\n", draw.choice(("auto", "last", "averaged", "best", "step-4")))
            statuses[found.status] += 1
            slowest, largest = max(slowest, found.seconds), max(largest, found.megabytes)
            wrong = [
                *(["signal or bug"] if found.status not in (0, 2, 4, 5, 6) else []),
                *(["traceback"] if "Traceback" in found.said else []),
                *(["errors"] if count_errors(found.said) != (found.status != 0) else []),
                *(["raw"] if RAW.search(found.printed + found.said) else []),
                *(["large"] if found.megabytes > MEGABYTES else []),
                *(["outside"] if listing(place / "outside") != before else []),
            ]
            if wrong:
                failures.append((seed, what, command, wrong, found.status, found.said[-400:]))
        shutil.rmtree(place)
    sys.stderr.write(f"\n{DIRECTORIES} directories, statuses {dict(statuses)}, {slowest:.1f} s, {largest} MB at most\n")
    record_property("crafted run directories", DIRECTORIES)
    assert not failures, "\n".join(map(str, failures))


def crafted_job(finished: TrainJob, run_dir: Path) -> TrainJob:
    """One more step to do."""
    job = pickle.loads(pickle.dumps(finished))
    job.run_dir = str(run_dir)
    job.train.max_steps = LAST + 1
    return job


def count_errors(said: str) -> int:
    return len([line for line in said.split("\n") if line.startswith("transformer: error: ")])


def listing(folder: Path) -> list[tuple[str, bytes]]:
    """Every file below, with its content."""
    return [(str(path), path.read_bytes()) for path in sorted(folder.rglob("*")) if path.is_file()]


# ---- lines ----------------------------------------------------------------------------------------------------------


def few(draw: Draw, most: int) -> int:
    """A number from 1 to `most`, mostly a small one."""
    return int(most ** draw.random())


KINDS: list[Callable[[Draw], str]] = [
    lambda draw: "",
    lambda draw: draw.choice((" ", "\t", "\u3000", "\u200b", "\ufeff", "\u00a0", "\u2060")) * few(draw, 50),
    lambda draw: draw.choice(("\r", "a\rb", "one two\r", "\r\r")),
    lambda draw: draw.choice(("a\u2028b", "a\u2029b", "a\x85b", "a\x0bb\x0cc", "\x1c\x1d\x1e")),
    lambda draw: "one\x00two" if draw.random() < 0.5 else "\x00" * few(draw, 100),
    lambda draw: draw.choice(("<s>", "</s>", "<unk>", "<pad>", "▁", "⁇", "<0x0A>", "<0x0D><0x0A>", "@@")) * 3,
    lambda draw: f"\x1b]0;{draw.randrange(99)}\x07 one \x1b[2J\x9b31m two",
    lambda draw: draw.choice(("\u202e", "\u2066", "\u200f")) + "one two",
    lambda draw: "👩\u200d👩\u200d👧" * few(draw, 30),
    lambda draw: "e" + "\u0301" * few(draw, 3000),
    lambda draw: "\ufdfa" * few(draw, 300),
    lambda draw: "x" * few(draw, 5000),
    lambda draw: "one " * few(draw, 2000),
    lambda draw: "世界" * few(draw, 300),
    lambda draw: "".join(chr(draw.randrange(0x20, 0x2FFF)) for _ in range(draw.randrange(1, 60))),
    lambda draw: "".join(chr(draw.randrange(0x10000, 0x10FFFF)) for _ in range(draw.randrange(1, 20))),
    lambda draw: "${oc.env:HOME} $(touch x) `touch x` ; touch x",
    lambda draw: '{"a": [1, 2]}\t<script>alert(1)</script>\\n\\x1b',
    *([lambda draw: " ".join(draw.choices(("one", "two", "three", "nine", "zero"), k=draw.randrange(1, 12)))] * 4),
]


def hostile_line(draw: Draw) -> bytes:
    if draw.random() < 0.15:
        return draw.randbytes(draw.randrange(1, 120)).replace(b"\n", b"\xff")
    line = draw.choice(KINDS)(draw).encode("utf-8", "surrogatepass")
    return line[: draw.randrange(len(line))] if draw.random() < 0.05 and line else line  # mostly inside a character


@pytest.mark.faults
@pytest.mark.timeout(3600)
def test_translate_survives_twenty_thousand_hostile_lines(
    finished: TrainJob,
    tmp_path: Path,
    record_property: Note,
) -> None:
    """Lines out equal lines in, in order; blank in, blank out; nothing that acts on a terminal is said."""
    draw = random.Random(20_000)
    lines = [hostile_line(draw) for _ in range(LINES)]
    lines[::100] = [b""] * (LINES // 100)  # each must stay in its place
    paths = [tmp_path / name for name in ("in", "out", "err")]
    paths[0].write_bytes(b"".join(line + b"\n" for line in lines))
    overrides = (f"run_dir={finished.run_dir}", "threads=1", "search.beam_size=2", "search.max_extra=5")
    with paths[0].open("rb") as given, paths[1].open("wb") as out, paths[2].open("wb") as err:
        process = start("translate", *overrides, cwd=ROOT, stdin=given, stdout=out, stderr=err, text=False)
        memory = PeakMemory(process.pid)
        process.wait()
    memory.join()
    found = paths[1].read_bytes().split(b"\n")
    said = paths[2].read_text(encoding="utf-8")
    sys.stderr.write(f"\n{LINES} lines in {memory.kilobytes >> 10} MB\n")
    record_property("hostile lines", LINES)
    assert process.returncode == 0, said[-1000:]
    assert len(found) == LINES + 1
    assert found[-1] == b""
    for line, text in zip(lines, found, strict=False):
        text.decode("utf-8")
        assert b"\r" not in text
        assert text == b"" or line.decode("utf-8", "replace").strip() != ""
    assert all(found[number] == b"" for number in range(0, LINES, 100))
    assert sum(text != b"" for text in found) > LINES // 2
    assert RAW.search(said) is None
    assert "Traceback" not in said
    bad = [number for number, line in enumerate(lines, 1) if line.decode("utf-8", "ignore").encode() != line]
    assert [int(n) for n in re.findall(r"^line (\d+): not UTF-8", said, re.MULTILINE)] == bad
    assert 0 < memory.kilobytes >> 10 < 1000
