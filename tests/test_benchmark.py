"""The benchmarks: what they measure at a tiny size, that they compare like with like, and how they refuse."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corpora import ROOT, write_corpus
from tools import load_script

FOLDER = ROOT / "scripts" / "benchmark"

peers = load_script("benchmark/peers")


def benchmark(*arguments: str, script: str = "train.py") -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name != "TRANSFORMER_DATA"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, str(FOLDER / script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    train = write_corpus(tmp_path_factory.mktemp("corpus")).train
    return ["--src", train.src, "--tgt", train.tgt, "--vocab", "60", "--tokens", "300"]


def test_two_rounds(corpus: list[str], tmp_path: Path) -> None:
    settings = ["--sizes", "tiny", "--precisions", "fp32", "--peers", "ours,plain", "--threads", "1"]
    counts = ["--rounds", "2", "--steps", "2", "--warmup", "1", "--output", str(tmp_path / "out.json")]
    done = benchmark(*corpus, *settings, *counts)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out.json").read_bytes())
    assert (report["vocab_size"], report["threads"], report["tokens_per_step"]) == (60, 1, 300)
    assert [Path(name).name for name in report["corpus"]] == ["train.en", "train.de"]
    ours, plain = report["results"]
    assert [(result["peer"], result["parameters"]) for result in (ours, plain)] == [("ours", 22_912), ("plain", 23_424)]
    assert (ours["settings"]["precision"], ours["settings"]["device"]) == ("fp32", "cpu")
    for result in (ours, plain):
        assert [len(turn["steps"]) for turn in result["turns"]] == [1, 2, 2]
        expected = [sum(s["target_tokens"] for s in turn["steps"]) / turn["seconds"] for turn in result["turns"][1:]]
        assert result["target_tokens_per_second"] == pytest.approx(expected)
        row = next(line for line in done.stdout.splitlines() if line.startswith(f"| tiny | fp32 | {result['peer']} |"))
        assert row.split(" | ")[3] == f"{sum(expected) / 2:,.0f}"
    steps = [[step for turn in result["turns"] for step in turn["steps"]] for result in (ours, plain)]
    tokens = [[(step["source_tokens"], step["target_tokens"]) for step in own] for own in steps]
    assert tokens[0] == tokens[1]
    assert all(150 < max(pair) <= 300 for pair in tokens[0])
    for own in steps:
        assert abs(own[0]["loss"] - math.log(60)) < 1.0
    low, high = sorted(a / b for a, b in zip(*(r["target_tokens_per_second"] for r in (ours, plain)), strict=True))
    assert f" | {(low + high) / 2:.2f} | {low:.2f}–{high:.2f} | " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no corpus: give --src and --tgt, or set TRANSFORMER_DATA"),
        (["--src", "absent.en", "--tgt", "absent.de"], "absent.en: there is no such file: check --src"),
    ],
)
def test_missing_corpus(arguments: list[str], message: str) -> None:
    done = benchmark(*arguments)
    assert done.returncode == 2
    assert re.fullmatch(rf"error: {re.escape(message)}.*\n", done.stderr)
    assert done.stdout == ""


def test_missing_interpreter(corpus: list[str]) -> None:
    done = benchmark(*corpus, "--sizes", "tiny", "--peers", "marian", "--marian-python", "absent/python")
    assert done.returncode == 2
    assert done.stderr.endswith(
        "error: absent/python: cannot be run (No such file or directory): check --marian-python\n"
    )


def test_preparing_beside_sentencepiece(tmp_path: Path) -> None:
    sizes = ["--pairs", "300", "--vocab-size", "400"]
    done = benchmark(*sizes, "--keep", str(tmp_path / "kept"), script="prepare.py")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["command"].startswith("python scripts/benchmark/prepare.py --pairs 300 --vocab-size 400 --keep ")
    assert (report["pairs"], report["threads"]) == (300, 2)
    lines = {
        side: (tmp_path / "kept" / f"train.{side}").read_text(encoding="utf-8").split("\n") for side in ("en", "de")
    }
    assert [(len(texts), texts.count("")) for texts in lines.values()] == [(301, 1), (301, 2)]  # one pair has no German
    counts = [np.array([len(text.split()) for text in texts[:-1]]) for texts in lines.values()]
    assert [side.mean() for side in counts] == pytest.approx([24, 23], rel=0.15)
    assert counts[0][1] > 5 * counts[1][1]  # the outlier
    ours, yardstick, plan = report["ours"], report["yardstick"], report["plan"]
    for used in (ours, yardstick, plan, report["corpus"]):
        assert used["wall_seconds"] > 0
        assert used["cpu_seconds"] > 0
        assert 0.01 < used["peak_gib"] < 4
    assert (
        yardstick["peak_gib"] < ours["peak_gib"]
    )  # it has no torch: so nobody counts the memory of whoever started it
    assert yardstick["pieces"] == 400
    ids = [np.fromfile(tmp_path / "kept" / f"train.{side}.ids", np.uint16) for side in ("en", "de")]
    lengths = [np.fromfile(tmp_path / "kept" / f"train.{side}.lengths", np.int64) for side in ("en", "de")]
    assert [len(side) for side in lengths] == [300, 300]
    assert [len(side) for side in ids] == [side.sum() for side in lengths]
    assert yardstick["tokens"] == sum(map(len, ids))
    parts = [yardstick[f"{part}_seconds"] for part in ("training", "encoding", "io")]
    assert all(part > 0 for part in parts)
    assert sum(parts) < yardstick["wall_seconds"]
    assert 290 < plan["pairs"] < 300
    assert plan["steps"] >= 1
    assert set(plan["first_step_seconds"]) == {"start", "middle", "end"}
    speed = yardstick["wall_seconds"] / ours["wall_seconds"]
    assert report["speed"] == pytest.approx(speed)
    assert done.stderr.splitlines()[-1].startswith(f"ours has {speed:.2f} of the yardstick's speed")

    again = benchmark(*sizes, "--keep", str(tmp_path / "kept"), script="prepare.py")
    assert (again.returncode, again.stdout) == (1, "")
    assert again.stderr == f"error: {tmp_path / 'kept'}: not empty: --keep makes a folder\n"


def test_step_of_the_peers() -> None:
    """Padding is nowhere in the loss or the counts, and the rate warms up."""
    batch = peers.Batch.of(torch.tensor([[5, 6, 3], [7, 3, 0]]).numpy(), torch.tensor([[8, 3, 0], [9, 5, 3]]).numpy())
    assert batch.padding.tolist() == [[False, False, False], [False, False, True]]
    assert batch.target_in.tolist() == [[2, 8, 3], [2, 9, 5]]
    assert (batch.source_tokens, batch.target_tokens) == (5, 5)
    assert [peers.rate(step) for step in (0, 9, 19, 500)] == pytest.approx([1.5e-5, 1.5e-4, 3e-4, 3e-4])


def test_plain_sees_no_padding_and_no_future() -> None:
    torch.manual_seed(1)
    shape: dict[str, Any] = {"peer": "plain", "shape": peers.Shape(n_layers=1, d_model=16, d_ff=32, n_heads=2)}
    work = {
        "vocab_size": 20,
        "longest": 6,
        "precision": "fp32",
        "device": "cpu",
        "threads": 1,
        "batches": "",
        "job": {},
    }
    model = peers.PlainTransformer(peers.Spec(**shape, **work)).train()
    for layer in model.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0
    source, target = torch.randint(4, 20, (2, 2, 6))
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    with torch.no_grad():
        before = model(source, target, padding)
        source[1, 4:], target[:, 3:] = 7, 8
        after = model(source, target, padding)
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.equal(before[:, 3:], after[:, 3:])
