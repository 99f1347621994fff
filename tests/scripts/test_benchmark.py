"""The benchmarks: that each answers, and that the smallest run of those that are compared compares like with like."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.corpora import write_corpus
from support.paths import ROOT
from support.scripts import load_script
from transformer.cli.commands import COMMANDS
from transformer.config.keys import keys_of
from transformer.config.settings import ModelConfig
from transformer.layout import Padded
from transformer.model.transformer import Transformer

FOLDER = ROOT / "scripts" / "benchmark"
PROGRAMS = ("decode", "engine", "gpu", "micro", "steps", "train", "variants")

initial, peers = (load_script(f"benchmark/{name}") for name in ("initial", "peers"))


def run(*command: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive", **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.parametrize("name", PROGRAMS)
def test_benchmark_answers_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        load_script(f"benchmark/{name}").main(["--help"])
    assert end.value.code == 0
    assert "usage: " in capsys.readouterr().out


@pytest.mark.slow
def test_train_times_two_rounds_of_each_peer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = write_corpus(tmp_path).train
    corpus = ["--src", pair.src, "--tgt", pair.tgt, "--vocab", "60", "--tokens", "300"]
    settings = ["--sizes", "tiny", "--precisions", "fp32", "--peers", "ours,plain", "--threads", "1", "--shapes", "new"]
    counts = ["--rounds", "2", "--steps", "2", "--warmup", "1", "--output", str(tmp_path / "out.json")]
    load_script("benchmark/train").main([*corpus, *settings, *counts])
    printed = capsys.readouterr().out

    ours, plain = json.loads((tmp_path / "out.json").read_bytes())["results"]
    assert [(result["peer"], result["parameters"]) for result in (ours, plain)] == [("ours", 22_912), ("plain", 23_424)]
    steps = [[step for turn in result["turns"] for step in turn["steps"]] for result in (ours, plain)]
    tokens = [[(step["source_tokens"], step["target_tokens"]) for step in own] for own in steps]
    assert tokens[0] == tokens[1]
    assert [abs(own[0]["loss"] - math.log(60)) < 1.0 for own in steps] == [True, True]
    for result in (ours, plain):
        expected = [sum(s["target_tokens"] for s in turn["steps"]) / turn["seconds"] for turn in result["turns"][1:]]
        assert result["target_tokens_per_second"] == pytest.approx(expected)
        assert f"| tiny | fp32 | new | {result['peer']} |" in printed


@pytest.mark.slow
def test_gpu_sh_measures_a_part_and_does_not_measure_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dry run, from the shell to the page; what was found lies in $OUT, and a second start finds it there."""
    out = tmp_path / "out"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    dry = ["--dry-run", "--work", str(tmp_path / "work")]
    run("bash", str(FOLDER / "gpu.sh"), "check", "packed_eager", *dry, OUT=str(out), PATH=path)
    assert sorted(path.name for path in out.iterdir()) == ["check.jsonl", "check.txt", "summary.json"]
    part = json.loads((out / "summary.json").read_bytes())["stages"]["check"]["packed_eager"]
    assert (part["passed"], part["exit_status"]) == (True, 0)

    again = ["check", "packed_eager", "--dry-run", "--out", str(tmp_path / "new"), "--before", str(out)]
    assert load_script("benchmark/gpu").main(again) == 0
    assert "passed before: packed_eager" in capsys.readouterr().out
    assert (tmp_path / "new" / "check.jsonl").read_bytes() == (out / "check.jsonl").read_bytes()


def test_gather_takes_the_corpus_of_a_stage_and_refuses_more_than_may_travel(tmp_path: Path) -> None:
    """With a pip that writes one wheel; 64 MiB hold the files that git tracks, too."""
    pip = tmp_path / "bin" / "pip"
    pip.parent.mkdir()
    pip.write_text('#!/bin/sh\n: >"$5/one.whl"\n', encoding="utf-8")
    pip.chmod(0o755)
    corpora, folder = tmp_path / "corpora", tmp_path / "gpu"
    for name in ("train", "val", "test_2016_flickr"):
        for language in ("en", "de"):
            path = corpora / "multi30k" / f"{name}.{language}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("a\n", encoding="utf-8")
    names = {"PATH": f"{pip.parent}:{os.environ['PATH']}", "TRANSFORMER_DATA": str(corpora), "GPU_FOLDER": str(folder)}

    run("bash", str(FOLDER / "gather.sh"), **names)
    assert len(list(folder.rglob("*.en"))) == len(list(folder.rglob("*.de"))) == 3
    assert (folder / "wheels" / "one.whl").exists()

    with (corpora / "multi30k" / "train.en").open("wb") as file:
        file.truncate(60 << 20)
    done = subprocess.run(
        ["bash", str(FOLDER / "gather.sh"), "check"],
        env=os.environ | names,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "error: together more than 65536 KiB: leave something out\n")


def test_plain_computes_what_ours_does_from_the_same_weights(tmp_path: Path) -> None:
    """Random numbers but for the last norms, behind each of which the peer has another norm, of ones."""
    ours = Transformer(ModelConfig(n_layers=2, d_model=16, d_ff=24, n_heads=2, max_positions=12), 20).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if "1.feed_forward_norm" not in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.3)
    initial.save_weights(ours, tmp_path / "weights.npz")

    shape = peers.Shape(n_layers=2, d_model=16, d_ff=24, n_heads=2)
    numbers = {"vocab_size": 20, "longest": 12, "precision": "fp32", "device": "cpu", "threads": 1}
    files = {"batches": "", "job": {}, "weights": str(tmp_path / "weights.npz")}
    plain = peers.PlainTransformer(peers.Spec(peer="plain", shape=shape, **numbers, **files)).train()
    for layer in plain.modules():  # in the other mode, torch takes another path
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0

    source, target = torch.randint(4, 20, (2, 2, 6))
    source[1, 4:] = 0
    layouts = {"source_layout": Padded.of([6, 4], 6), "target_layout": Padded.of([6, 6], 6)}
    with torch.no_grad():
        torch.testing.assert_close(
            plain(source, target, source.eq(0)), ours(source, target, **layouts), rtol=1e-4, atol=1e-4
        )


def test_results_name_no_folder_of_a_machine() -> None:
    for path in (path for path in (FOLDER / "results").iterdir() if path.is_file()):  # pictures are in a folder
        text = path.read_text(encoding="utf-8")
        assert [folder for folder in (" /tmp/", "/home/", "/root/", "/work/") if folder in text] == [], path.name


def test_scripts_set_only_keys_that_there_are() -> None:
    """What a program types on the command line of the package is text, which no type checker sees."""
    known = {key for command in COMMANDS.values() for key in keys_of(command.job)}
    named = [
        (path.name, key)
        for path in (ROOT / "scripts").rglob("*")
        if path.suffix in (".py", ".sh", ".sbatch")
        for key in re.findall(r"(?<![\w.])((?:data|model|search|tokenizer|train)\.[a-z_]+)=", path.read_text("utf-8"))
    ]
    assert len(named) > 30, "the test no longer sees them"
    assert [(name, key) for name, key in named if not any(f"{other}.".startswith(f"{key}.") for other in known)] == []
