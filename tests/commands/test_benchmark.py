"""The benchmarks: what they measure at a tiny size, that they compare like with like, and how they refuse."""

import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.corpora import tiny_job, wait_for, write_corpus
from support.paths import ROOT
from support.scripts import load_script
from transformer.config.settings import Device, LayoutKind, ModelConfig, PairConfig, Precision
from transformer.data.batch import collate
from transformer.data.loader import Step
from transformer.data.prepare import prepare
from transformer.data.source import resolve_source
from transformer.data.store import Store
from transformer.layout import Padded
from transformer.model.transformer import Transformer
from transformer.records import Resolved
from transformer.tools.speed import Work, read_rates

FOLDER = ROOT / "scripts" / "benchmark"

measured, kernel_times, peers, preparing = (
    load_script(f"benchmark/{name}") for name in ("measured", "kernel_times", "peers", "prepare")
)
step_times, micro, decode, variants, gpu = (
    load_script(f"benchmark/{name}") for name in ("steps", "micro", "decode", "variants", "gpu")
)
contest, initial, train, translate = (
    load_script(f"benchmark/{name}") for name in ("contest", "initial", "train", "translate")
)
checkpoint, growth, loader, startup = (
    load_script(f"benchmark/{name}") for name in ("checkpoint", "growth", "loader", "startup")
)
predict, rehearse, scaling = (load_script(f"benchmark/{name}") for name in ("predict", "rehearse", "scaling"))


def benchmark(*arguments: str, script: str = "train.py") -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name != "TRANSFORMER_DATA"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, str(FOLDER / script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def peers_python(*packages: str) -> str:
    """The Python of an environment with these packages; skips where there is none."""
    python = os.environ.get("TRANSFORMER_PEERS_PYTHON", sys.executable)
    code = f"import {', '.join(packages)}"
    done = subprocess.run([python, "-c", code], cwd=FOLDER.parent, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        pytest.skip(f"TRANSFORMER_PEERS_PYTHON names no Python with the peers: {python}: {reason}")
    return python


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    train = write_corpus(tmp_path_factory.mktemp("corpus")).train
    return ["--src", train.src, "--tgt", train.tgt, "--vocab", "60", "--tokens", "300"]


def test_train_times_two_rounds_of_each_peer(corpus: list[str], tmp_path: Path) -> None:
    settings = ["--sizes", "tiny", "--precisions", "fp32", "--peers", "ours,plain", "--threads", "1", "--shapes", "new"]
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
        row = next(
            line for line in done.stdout.splitlines() if line.startswith(f"| tiny | fp32 | new | {result['peer']} |")
        )
        assert row.split(" | ")[6] == f"{sum(expected) / 2:,.0f}"
    steps = [[step for turn in result["turns"] for step in turn["steps"]] for result in (ours, plain)]
    tokens = [[(step["source_tokens"], step["target_tokens"]) for step in own] for own in steps]
    assert tokens[0] == tokens[1]
    assert all(150 < max(pair) <= 300 for pair in tokens[0])
    for own in steps:
        assert abs(own[0]["loss"] - math.log(60)) < 1.0
    low, high = sorted(a / b for a, b in zip(*(r["target_tokens_per_second"] for r in (ours, plain)), strict=True))
    assert f" | {(low + high) / 2:.2f} | {low:.2f}–{high:.2f} | " in done.stdout


def test_train_on_warm_shapes_takes_the_same_steps_again_and_loses_alike(corpus: list[str], tmp_path: Path) -> None:
    settings = ["--sizes", "tiny", "--precisions", "fp32", "--peers", "ours,plain", "--threads", "1"]
    counts = ["--rounds", "7", "--steps", "3", "--shapes", "warm", "--output", str(tmp_path / "out.json")]
    done = benchmark(*corpus, *settings, *counts)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_bytes())["results"]
    for result in found:
        tokens = [[step["target_tokens"] for step in turn["steps"]] for turn in result["turns"]]
        assert len(tokens) == 8
        assert tokens == [tokens[0]] * 8
    ours, plain = ([step["loss"] for turn in result["turns"] for step in turn["steps"]] for result in found)
    assert plain[0] == pytest.approx(ours[0], rel=0.02)
    assert plain[20] == pytest.approx(ours[20], rel=0.02)
    assert ours[20] < ours[0] - 0.05
    assert "do not learn alike" not in done.stdout


def test_train_without_a_compiler_leaves_the_compiled_peer_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "has_compiler", lambda device: False)
    assert train.parse(["--device", "cpu"]).peers == ["ours", "plain"]
    assert "plain_compiled is left out: torch.compile finds no C++ compiler here\n" in capsys.readouterr().err


def test_train_times_ours_beside_the_peers(corpus: list[str], tmp_path: Path) -> None:
    python = peers_python("transformers")
    settings = ["--sizes", "tiny", "--precisions", "fp32", "--peers", "ours,marian", "--peers-python", python]
    counts = ["--rounds", "2", "--steps", "2", "--threads", "1", "--shapes", "new"]
    done = benchmark(*corpus, *settings, *counts, "--output", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    ours, marian = json.loads((tmp_path / "out.json").read_bytes())["results"]
    assert marian["turns"][0]["steps"][0]["loss"] == pytest.approx(ours["turns"][0]["steps"][0]["loss"], rel=0.02)
    assert "do not learn alike" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no corpus: give --src and --tgt, or set TRANSFORMER_DATA"),
        (["--src", "absent.en", "--tgt", "absent.de"], "absent.en: there is no such file: check --src"),
    ],
)
def test_train_names_a_corpus_that_is_missing(arguments: list[str], message: str) -> None:
    done = benchmark(*arguments)
    assert done.returncode == 2
    assert re.fullmatch(rf"error: {re.escape(message)}.*\n", done.stderr)
    assert done.stdout == ""


def test_train_names_an_interpreter_that_is_missing(corpus: list[str]) -> None:
    done = benchmark(*corpus, "--sizes", "tiny", "--peers", "marian", "--peers-python", "absent/python")
    assert done.returncode == 2
    assert done.stderr.endswith(
        "error: absent/python: cannot be run (No such file or directory): check --peers-python\n"
    )


# ---- translation ----------------------------------------------------------------------------------------------------


def test_translate_in_two_ways_finds_the_same(corpus: list[str], tmp_path: Path) -> None:
    settings = ["--sizes", "tiny", "--precisions", "fp32", "--peers", "ours,ours_in_batches,hf", "--threads", "1"]
    counts = ["--sentences", "6", "--batch", "4", "--length", "5", "--rounds", "2", "--repeats", "3"]
    done = benchmark(*corpus[:6], *settings, *counts, "--output", str(tmp_path / "out.json"), script="translate.py")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out.json").read_bytes())
    assert (report["vocab_size"], report["threads"], report["sentences"], report["length"]) == (60, 1, 6, 5)

    ours, same = report["results"]  # Hugging Face's needs --peers-python
    assert [(found["peer"], found["target_tokens"]) for found in (ours, same)] == [
        ("ours", 30),
        ("ours_in_batches", 30),
    ]
    assert (ours["agreement"], same["agreement"]) == (1.0, 1.0)
    for found in (ours, same):
        speeds = [30 / seconds for seconds in found["seconds"]]
        assert found["target_tokens_per_second"] == pytest.approx(speeds)
        assert len(speeds) == len(found["seconds_alone"]) == 2
    [line] = [line for line in done.stdout.splitlines() if line.startswith("| tiny | fp32 | ours_in_batches | ")]
    low, high = sorted(b / a for a, b in zip(ours["seconds"], same["seconds"], strict=True))
    assert line.split(" | ")[3:5] == [f"{(low + high) / 2:.2f}", f"{low:.2f}–{high:.2f}"]


def test_translate_times_ours_beside_the_peers(corpus: list[str], tmp_path: Path) -> None:
    python = peers_python("ctranslate2", "transformers")
    settings = ["--sizes", "tiny", "--precisions", "fp32", "--threads", "1", "--peers-python", python]
    counts = ["--sentences", "20", "--rounds", "1", "--repeats", "1", "--output", str(tmp_path / "out.json")]
    done = benchmark(*corpus[:6], *settings, *counts, script="translate.py")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_bytes())["results"]
    assert [result["peer"] for result in found] == ["ours", "ours_in_batches", "ct2", "ct2_threads", "hf"]
    assert [(result["target_tokens"], result["agreement"]) for result in found] == [(320, 1.0)] * 5


def test_translate_has_a_random_model_that_never_ends() -> None:
    model = translate.random_model(translate.SIZES["tiny"], 50, longest=20)
    with torch.no_grad():
        x = torch.randn(7, 32)
        hidden = model.decoder[0].feed_forward_norm(x, 3.0 * x)
        logits = model.unembed(hidden)
    assert logits[:, [0, 2, 3]].numpy() == pytest.approx(-20.0, rel=1e-4)
    assert logits[:, [1, *range(4, 50)]].min() > -15.0


def test_check_lengths_refuses_a_translation_that_is_too_short() -> None:
    with pytest.raises(AssertionError, match=r"hf: translations of \[4, 5\] pieces, not 5"):
        translate.check_lengths("hf", [[7] * 5, [7] * 4], 5)


# ---- preparing ------------------------------------------------------------------------------------------------------


def test_prepare_is_timed_beside_sentencepiece(tmp_path: Path) -> None:
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


def test_yardstick_and_ours_find_the_same_pieces(tmp_path: Path) -> None:
    """Without the pair that has no German: the yardstick filters nothing, and would learn from its English."""
    args = preparing.parse(["--pairs", "300", "--vocab-size", "400", "--keep", str(tmp_path)])
    preparing.make(args)
    for side in ("en", "de"):
        path = tmp_path / f"train.{side}"
        lines = path.read_text(encoding="utf-8").split("\n")
        text = "\n".join(lines[:2] + lines[3:]).replace("ra", "ｒa")  # wide: both normalise it
        path.write_text(text, encoding="utf-8")
    args.pairs = 299
    preparing.yardstick(args)
    data = write_corpus(tmp_path / "other")
    data.train = PairConfig(str(tmp_path / "train.en"), str(tmp_path / "train.de"))
    data.filter.max_length = 256
    job = tiny_job(tmp_path / "runs" / "a", data)
    job.tokenizer.vocab_size = 400
    store = prepare(job).store
    counts = np.array([np.fromfile(tmp_path / f"train.{side}.lengths", np.int64) for side in ("en", "de")])
    fit = (counts.max(axis=0) <= 256) & (counts.max(axis=0) <= 9 * counts.min(axis=0))
    assert len(store) == fit.sum() == 296
    for index, side in enumerate(("en", "de")):
        pieces, lengths = store.gather(np.arange(296), index)
        assert lengths.tolist() == counts[index, fit].tolist()
        ids = np.fromfile(tmp_path / f"train.{side}.ids", np.uint16)
        assert pieces.tolist() == ids[np.repeat(fit, counts[index])].tolist()


# ---- loader, start-up, checkpoints, growth --------------------------------------------------------------------------


def test_loader_page_by_hand() -> None:
    """Of 60 + 40 positions 80 + 10 hold tokens; two rounds at 3 and 5 times the speed of the DataLoader."""
    rival = loader.Result("DataLoader", 4_000, 0.5, speeds=[2.0, 2.0], tokens=50, slots=100)
    ours = loader.Result("packed", 4_000, 0.25, speeds=[6.0, 10.0], tokens=90, slots=100)
    facts = {"command": "x", "processor": "y", "python": "3", "torch": "2", "pairs": 5, "tokens_per_step": 7}
    lines = list(loader.page(facts, [ours, rival]))
    assert "| 4,000 | packed | 4.00 | 3.00–5.00 | 8 | 6–10 | 10.0% | 0.25 |" in lines
    assert "| 4,000 | DataLoader |  |  | 2 | 2–2 | 50.0% | 0.50 |" in lines


def test_loader_contenders_make_every_sentence_once() -> None:
    """All of them, in one epoch: as many tokens as the store has, and padding where sentences differ."""
    args = loader.parse(["--tokens", "300", "--micro", "100"])
    lengths = [(n % 7, 1 + n % 5) for n in range(1, 200)]
    store = Store.from_pieces(*([[5] * pair[side] for pair in lengths] for side in (0, 1)))
    total = sum(source + target + 2 for source, target in lengths)
    for contender in loader.contenders(store, args):
        tokens = 0
        for made in contender.start():
            assert made.tokens <= made.slots
            tokens += made.tokens
            if tokens >= total:
                break
        assert tokens == total
    ids, target = loader.Pairs(store)[8]
    assert (ids.tolist(), target.tolist()) == ([5, 5, 3], [5, 5, 5, 5, 5, 3])
    for batch in loader.sampler(store, 100):
        assert len(batch) * max(max(lengths[n]) + 1 for n in batch) <= 100


def test_checkpoint_benchmark_saves_and_loads_the_same_in_both_ways(tmp_path: Path) -> None:
    config, vocab_size = checkpoint.SIZES["tiny"]
    found = checkpoint.measure(config, vocab_size, folder=tmp_path, rounds=2)
    assert found["parameters"] == 52_992
    assert 12 * 52_992 < found["bytes"]["ours"] < 12 * 52_992 + 40_000
    assert 12 * 52_992 < found["bytes"]["torch"] < 12 * 52_992 + 80_000
    assert {name: len(part) for name, part in found["ours"].items()} == {"save": 2, "verify": 2, "load": 2}
    assert {name: len(part) for name, part in found["torch"].items()} == {"save": 2, "load": 2}
    assert list((tmp_path / "checkpoints").iterdir()) == []

    state, other = checkpoint.build(config, vocab_size), checkpoint.build(config, vocab_size)
    checkpoint.torch_save(state, tmp_path / "state.pt")
    with torch.no_grad():
        other.model.embedding.zero_()
    checkpoint.torch_load(other, tmp_path / "state.pt")
    assert torch.equal(other.model.embedding, state.model.embedding)


def test_startup_times_every_command_in_turns(tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    code = "import sys, time; open(sys.argv[1], 'a').write(sys.argv[2] + sys.stdin.readline()); time.sleep(0.1)"
    known = {name: [sys.executable, "-c", code, log, name] for name in ("a", "b")}
    found = startup.measure(known, rounds=2)
    assert Path(log).read_text(encoding="utf-8") == "".join(f"{name}{startup.LINE}" for name in "ababab")
    assert all(len(seconds) == 2 and min(seconds) > 0.1 for seconds in found.values())
    with pytest.raises(SystemExit, match="error: a: status 3: "):
        startup.measure({"a": [sys.executable, "-c", "raise SystemExit(3)"]}, rounds=1)


def test_startup_of_a_random_run(tmp_path: Path) -> None:
    done = benchmark(
        "--commands", "translate", "--rounds", "1", "--output", str(tmp_path / "out.json"), script="startup.py"
    )
    assert done.returncode == 0, done.stderr
    [(name, seconds)] = json.loads((tmp_path / "out.json").read_bytes())["seconds"].items()
    assert (name, len(seconds)) == ("transformer translate, one line", 1)


def test_growth_asks_the_scripts_for_what_they_know(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parsers = {"train.py": train.parse, "translate.py": translate.parse, "prepare.py": preparing.parse}

    def run(name: str, value: int, args: Any) -> dict[str, Any]:
        table = growth.TABLES[name]
        parsers[table.script](growth.options(table, value, args))
        if table.script == "prepare.py":
            used = {"wall_seconds": 2.0, "peak_gib": 0.5}
            return {"ours": used, "speed": 0.9, "plan": {"plan_epoch_seconds": 0.125}}
        ours = {"peer": "ours", "target_tokens_per_second": [300 / value, 100 / value, 200 / value]}
        return {"vocab_size": 50, "results": [ours, {"peer": "plain", "target_tokens_per_second": [50, 50, 50]}]}

    monkeypatch.setattr(growth, "run", run)
    growth.main(["--values", "1,2"])
    lines = capsys.readouterr().out.splitlines()
    assert lines.count("| 2 | 50 | ours |  | 100 | 50–150 | 0.50 |") == 6
    assert lines.count("| 1 | 50 | plain | 4.00 | 50 | 50–50 | 1.00 |") == 6
    assert "| 2 | 0.90 | 1 | 2.0 | 0.50 | 0.125 |" in lines


def test_growth_reports_the_command_without_its_temporary_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        output = Path(command[command.index("--output") + 1])
        output.write_text(json.dumps({"command": " ".join(command), "vocab_size": 50}), encoding="utf-8")
        return subprocess.CompletedProcess(command, 0, stdout="")

    monkeypatch.setattr(growth.subprocess, "run", start)
    report = growth.run("training-depth", 3, growth.parse(["--size", "tiny"]))
    assert report == {
        "command": "python scripts/benchmark/train.py --sizes tiny --precisions bf16 --rounds 3 --layers 3 "
        "--peers ours,plain --shapes new --steps 4",
        "vocab_size": 50,
    }


def test_growth_ends_with_the_command_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        growth.subprocess, "run", lambda command, **options: subprocess.CompletedProcess(command, 3, stdout="")
    )
    with pytest.raises(SystemExit, match=r"error: .*prepare\.py --pairs 100 ended with status 3"):
        growth.run("preparing-corpus", 100, growth.parse([]))


def test_results_name_no_folder_of_a_machine() -> None:
    results = sorted((ROOT / "scripts" / "benchmark" / "results").iterdir())
    assert len(results) > 40
    found = [
        (path.name, folder)
        for path in results
        for folder in (" /tmp/", "/home/", "/root/", "/work/")
        if folder in path.read_text(encoding="utf-8")
    ]
    assert found == []


def sample(model: str, work: tuple[float, float, float], seconds: float, *, is_fitted: bool = True) -> Any:
    resolved = Resolved(Device.cpu, Precision.bf16, 1, 512, LayoutKind.packed, False, 1)
    return predict.Sample(model, Precision.bf16, is_fitted, resolved, Work(*work), [seconds], seconds)


def test_predict_finds_the_rates_that_made_the_seconds() -> None:
    """2 s a teraFLOP, 3 s a gigabyte, 5 s a billion parameters; the sample that is not fitted is far off."""
    works = [(1e12, 1e9, 1e9), (3e12, 2e9, 5e8), (5e11, 4e9, 2e9), (2e12, 3e9, 7e8)]
    samples = [sample("a", work, 2e-12 * work[0] + 3e-9 * work[1] + 5e-9 * work[2]) for work in works]
    rates = predict.fit([*samples, sample("b", (1e12, 1e9, 1e9), 1e6, is_fitted=False)], tokens_per_step=9)
    found = (rates.seconds_per_flop, rates.seconds_per_byte, rates.seconds_per_parameter)
    assert found == pytest.approx((2e-12, 3e-9, 5e-9))


def test_predict_has_no_rate_below_nothing() -> None:
    """Seconds that fall with the bytes: these are left out, and the other two explain what they can."""
    works = [(1e12, 1e9, 1e9), (3e12, 2e9, 5e8), (5e11, 4e9, 2e9), (2e12, 3e9, 7e8)]
    samples = [sample("a", work, 2e-12 * work[0] - 1e-10 * work[1] + 5e-9 * work[2]) for work in works]
    rates = predict.fit(samples, tokens_per_step=9)
    assert rates.seconds_per_byte == 0.0
    assert rates.seconds_per_flop == pytest.approx(2e-12, rel=0.2)
    assert rates.seconds_per_parameter == pytest.approx(5e-9, rel=0.2)


def test_predict_scales_the_rounds_to_one_speed_of_the_machine() -> None:
    """In the second round the machine was half as fast, in the third the first model alone was disturbed."""
    found = predict.scaled_medians([[1.0, 2.0, 1.0 * 4], [4.0, 8.0, 4.0 * 4], [2.0, 4.0, 2.0 * 4]])
    assert found == pytest.approx([2.0, 8.0, 4.0])


def test_predict_measures_a_model_that_it_is_not_fitted_to(corpus: list[str], tmp_path: Path) -> None:
    output = tmp_path / "rates.json"
    arguments = [*corpus[:4], *corpus[6:], "--models", "tiny,tinier", "--rounds", "1", "--steps", "1"]
    done = benchmark(*arguments, "--precisions", "fp32", "--output", str(output), script="predict.py")
    assert done.returncode == 0, done.stderr

    document = json.loads(output.read_bytes())
    tiny, tinier = document["samples"]
    assert [tiny["is_fitted"], tinier["is_fitted"]] == [True, False]
    assert tiny["work"]["parameters"] > tinier["work"]["parameters"] > 0
    assert min(tiny["seconds"], tinier["seconds"]) > 0

    # With one model to fit, the rates are exact for it.
    resolved = Resolved(Device.cpu, Precision.fp32, 1, 512, LayoutKind.padded, False, 1)
    rates = read_rates(output, resolved, tokens_per_step=300)
    assert rates.seconds(Work(**tiny["work"])) == pytest.approx(tiny["seconds"])
    assert re.search(r"^\| tiny \| yes \| .* [+-]0% \|$", done.stdout, re.MULTILINE)


def test_joined_puts_neighbouring_lines_together(tmp_path: Path) -> None:
    path = tmp_path / "a.en"
    path.write_text("one\ntwo\n\nfour\nfive\n", encoding="utf-8")
    (tmp_path / "new").mkdir()
    longer = contest.joined(path, 2, tmp_path / "new")
    assert longer.read_text(encoding="utf-8") == "one two\n four\nfive\n"
    assert contest.joined(path, 1, tmp_path / "new") == path


# ---- on a GPU -------------------------------------------------------------------------------------------------------


def gpu_sh(tmp_path: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """A dry run, from the shell."""
    return subprocess.run(
        ["bash", str(FOLDER / "gpu.sh"), *arguments, "--dry-run", "--work", str(tmp_path / "work")],
        env=os.environ | {"OUT": str(tmp_path / "out"), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_gpu_sh_measures_a_part_and_does_not_measure_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the shell to the page; what was found lies in $OUT, and a second start finds it there."""
    done = gpu_sh(tmp_path, "check", "packed_eager")
    assert done.returncode == 0, done.stdout + done.stderr
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == ["check.jsonl", "check.txt", "summary.json"]
    summary = json.loads((out / "summary.json").read_bytes())
    part = summary["stages"]["check"]["packed_eager"]
    assert (summary["dry_run"], part["passed"], part["exit_status"]) == (True, True, 0)

    [result] = measured.read(out / "check.jsonl").values()
    assert result["name"] == "steps/tiny/500/packed-eager"
    assert (result["parameters"], result["steps"], len(result["milliseconds"])) == (52_992, 2, 2)
    seconds = sum(result["milliseconds"]) / 1e3
    speed = result["target_tokens_per_second"]
    assert speed == pytest.approx(2 * result["target_tokens_per_step"] / seconds, rel=1e-3)
    assert 300 < result["target_tokens_per_step"] <= 500
    assert abs(result["first_loss"] - math.log(1_000)) < 1.0
    assert result["seconds_before_the_clock"] >= result["seconds_of_first_step"] > 0
    assert f"| packed | eager | {speed:,.0f} | " in (out / "check.txt").read_text(encoding="utf-8")
    assert part["said"] == f"1 measurements; packed-eager {speed:,.0f} tokens/s"

    again = ["check", "packed_eager", "--dry-run", "--out", str(tmp_path / "new"), "--before", str(out)]
    assert gpu.main(again) == 0
    printed = capsys.readouterr().out.split("\n")
    assert printed[1:] == ["passed before: packed_eager (to measure again, choose another --out)", ""]
    assert (tmp_path / "new" / "check.jsonl").read_bytes() == (out / "check.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rest"], "argument stage: invalid choice: 'rest'"),
        (["learn", "tea"], "error: tea: choose from kftt"),
    ],
)
def test_gpu_py_refuses_an_unknown_name_before_anything_is_written(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = benchmark("--out", str(tmp_path / "out"), *arguments, script="gpu.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert not (tmp_path / "out").exists()


def shell_part(command: str, limit: float = 60.0) -> Any:
    """A part that is a line of shell."""

    def run(place: Any) -> Any:
        status = gpu.call(place, ["sh", "-c", command], min(place.limit, limit), environment={"WORD": "said"})
        return gpu.Found(status, status == 0, f"status {status}")

    return run


def has_ended(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() == b""  # nobody has asked for its status yet
    except (FileNotFoundError, ProcessLookupError):
        return True


def stage_of(monkeypatch: pytest.MonkeyPatch, runs: dict[str, Any], seconds: float = 10.0) -> None:
    """Put one stage in the place of all."""
    monkeypatch.setattr(gpu, "STAGES", {"some": {name: gpu.Part(run, seconds) for name, run in runs.items()}})


def test_gpu_part_that_fails_stops_no_other_but_fails_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(place: Any) -> Any:
        raise OSError(28, "No space left on device")

    runs = {
        "bad": shell_part("echo $WORD; exit 3"),
        "broken": broken,
        "endless": shell_part("sleep 60 & echo $! > {}; wait".format(tmp_path / "pid"), 0.3),
        "good": shell_part("echo one; echo two >&2; touch left_behind"),
    }
    stage_of(monkeypatch, runs)
    out = tmp_path / "out"
    start_again = ["some", "--dry-run", "--out", str(out), "--work", str(tmp_path / "work")]
    assert gpu.main(start_again) == 1

    parts = json.loads((out / "summary.json").read_bytes())["stages"]["some"]
    said = {"bad": "status 3", "broken": "OSError: [Errno 28] No space left on device", "endless": "status None"}
    assert {name: part["said"] for name, part in parts.items()} == said | {"good": "status 0"}
    assert [name for name, part in parts.items() if part["passed"]] == ["good"]
    assert {name: part["exit_status"] for name, part in parts.items()} == {
        "bad": 3,
        "broken": None,
        "endless": None,
        "good": 0,
    }
    log = (out / "some.txt").read_text(encoding="utf-8")
    assert log.startswith("$ sh -c 'echo $WORD; exit 3'\n\nsaid\n")
    assert log.endswith("\n\none\ntwo\n")
    wait_for(lambda: has_ended((tmp_path / "pid").read_text(encoding="ascii").strip()), 10.0)
    printed = capsys.readouterr().out
    assert "\nbad: FAILED in " in printed
    assert "\nsaid\n" in printed  # the end of the log of what failed

    # Started again, it does what has not passed, and never goes on from a dry run.
    with pytest.raises(SystemExit):
        gpu.main([argument for argument in start_again if argument != "--dry-run"])
    assert "summary.json: the results of a dry run, and this is none: remove them" in capsys.readouterr().err
    (tmp_path / "work" / "some" / "bad" / "kept").touch()
    stage_of(monkeypatch, {name: shell_part(f"echo again {name}") for name in runs})
    assert gpu.main(start_again) == 0
    again = (out / "some.txt").read_text(encoding="utf-8").removeprefix(log)
    assert (tmp_path / "work" / "some" / "bad" / "kept").exists()
    assert [line for line in again.split("\n") if line.startswith("again")] == [
        "again bad",
        "again broken",
        "again endless",
    ]


def test_gpu_parts_get_their_seconds_and_what_was_left_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 530 s since gpu.sh began, each part leaves the seconds of those behind it."""
    for stage in gpu.STAGES.values():
        assert 480 < sum(part.seconds for part in stage.values()) <= 515
    stage_of(monkeypatch, {name: shell_part("exit 0") for name in ("one", "two", "three")}, 120.0)
    begun = str(time.time() - 130)
    assert gpu.main(["some", "--out", str(tmp_path), "--work", str(tmp_path / "work"), "--begun", begun]) == 0
    parts = json.loads((tmp_path / "summary.json").read_bytes())["stages"]["some"]
    assert [part["limit"] for part in parts.values()] == pytest.approx([160, 280, 400], abs=5)


def place_in(folder: Path) -> Any:
    return gpu.Place(False, folder / "data", folder / "some.jsonl", folder / "log", folder, 60.0)


def test_gpu_training_that_fails_is_no_passed_part(tmp_path: Path) -> None:
    """By the public command, on a corpus that is not there."""
    place = place_in(tmp_path)
    assert gpu.multi30k(place) == gpu.Found(2, False, "no results.json")
    log = place.log.read_text(encoding="utf-8")
    assert " -m transformer train experiment=multi30k_en_de " in log.split("\n")[0]
    assert "transformer: error: " in log


def test_gpu_training_keeps_the_lines_that_make_a_curve(tmp_path: Path) -> None:
    lines = [
        {"step": 100, "train/loss": 3.0},
        {"step": 500, "train/loss": 2.0},
        {"step": 700, "dev/bleu": 1.5},
        {"step": 1000, "train/loss": 1.0},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 1500, "tr', encoding="utf-8")
    assert dict(gpu.records_of(tmp_path, "kftt")) == {
        "kftt/train/500": {"step": 500, "train/loss": 2.0},
        "kftt/dev/700": {"step": 700, "dev/bleu": 1.5},
        "kftt/train/1000": {"step": 1000, "train/loss": 1.0},
    }
    assert list(gpu.records_of(tmp_path / "absent", "kftt")) == []


def test_gpu_tests_are_known_from_what_pytest_prints_of_each() -> None:
    """Those that ended before a kill count; the names of parameters may hold anything but a line's end."""
    log = """$ python -m pytest -v

scheduling tests via LoadScheduling

tests/unit/test_gpu.py::test_one[a-1]
[gw0] [  5%] PASSED tests/unit/test_gpu.py::test_one[a-1]
[gw3] [ 10%] FAILED tests/unit/test_gpu.py::test_two[x y]
tests/unit/test_gpu.py::test_three
[gw12] [100%] SKIPPED tests/unit/test_gpu.py::test_three (no GPU)
[gw1] [ 15%] PAS"""
    found = gpu.outcomes_of(log)
    assert found == {"test_one[a-1]": "passed", "test_two[x y]": "failed", "test_three (no GPU)": "skipped"}


def test_measured_goes_on_behind_a_line_that_a_kill_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('{"name": "one", "ms": 1}\n{"name": "two", "error": "no"}\n{"name": "thr', encoding="utf-8")
    some = measured.Measured(path, seconds=60.0)
    made = []

    def make(name: str) -> dict[str, Any]:
        made.append(name)
        if name == "four":
            raise RuntimeError("cold\nand wet")
        return {"ms": 7}

    for name in ("one", "two", "three", "four"):
        some.take(name, lambda name=name: make(name))
    assert made == ["two", "three", "four"]  # what failed is tried again
    assert (some.failed, some.left_out, some.status()) == (["four"], [], 1)
    found = measured.read(path)
    assert {name: found[name].get("ms") for name in found} == {"one": 1, "two": 7, "three": 7, "four": None}
    assert found["four"]["error"] == "RuntimeError: cold"

    late = measured.Measured(path, seconds=0.0)
    for name in ("one", "five"):
        late.take(name, lambda: {"ms": 9})
    assert (late.left_out, late.status()) == (["five"], 1)
    assert "five" not in measured.read(path)


def test_kernel_times_by_hand() -> None:
    """Two runs: a kernel of 300 and one of 100 us twice, a copy that overlaps, and a gap of 50 us."""

    def event(name: str, start: float, length: float, kind: str = "kernel") -> dict[str, Any]:
        return {"cat": kind, "name": name, "ts": start, "dur": length}

    events = [
        event("slow", 1_000, 300),
        event("quick", 1_350, 100),  # after a gap
        event("quick", 1_450, 100),
        event("copy", 1_500, 100, "gpu_memcpy"),  # half of it beside a kernel
        event("launch", 900, 5_000, "cuda_runtime"),
        {"ph": "M", "name": "process_name"},
    ]
    found = kernel_times.table(events, kernel_times.ON_DEVICE, 2)
    assert (found["busy_ms"], found["idle_ms"], found["calls"], found["names"]) == pytest.approx((0.275, 0.025, 2, 3))
    rows = [(row["kernel"], row["ms"], row["calls"], row["share"]) for row in found["rows"]]
    assert rows == [
        ("slow", 0.15, 0.5, 0.5),
        ("quick", 0.1, 1.0, pytest.approx(1 / 3)),
        ("copy", 0.05, 0.5, pytest.approx(1 / 6)),
    ]
    with pytest.raises(ValueError, match="the profiler saw no kernel"):
        kernel_times.table(events[-2:], kernel_times.ON_DEVICE, 2)


def test_micro_counts_what_the_formula_needs(tmp_path: Path) -> None:
    path = tmp_path / "micro.jsonl"
    assert micro.main(["--size", "tiny", "--device", "cpu", "--output", str(path), "copies", "gemm"]) == 0
    found = measured.read(path)
    shapes = ["projection/32x32", "key_value/32x64", "query_key_value/32x96", "cross_of_all_layers/32x128"]
    shapes += ["ffn_in/32x128", "ffn_out/128x32", "logits/32x500"]
    passes = ("forward", "d_input", "d_weight")
    names = {f"gemm/{rows}/{shape}/{pass_}" for rows in (512, 256) for shape in shapes for pass_ in passes}
    assert {name for name in found if name.startswith("gemm/")} == names
    for pass_ in passes:
        one = found[f"gemm/512/logits/32x500/{pass_}"]
        assert one["tflops"] == pytest.approx(2 * 512 * 32 * 500 / (one["ms"] / 1e3) / 1e12)
    sent = found["copies/batch"]
    assert sent["tensors"] > 4
    assert sent["bytes"] > 8 * 3 * 504
    assert found["copies/one_pinned"]["bytes"] == sent["bytes"]


def test_micro_varlen_stand_in_is_attention_within_each_sentence() -> None:
    q, k, v = torch.randn(3, 6, 2, 4, generator=torch.Generator().manual_seed(1)).unbind(0)
    found = micro.one_by_one(q, k, v, [0, 2, 5, 5, 5], True)
    weights = torch.softmax(torch.stack([q[3] @ k[n].T for n in (2, 3)]).diagonal(dim1=1, dim2=2) / 2, 0)  # (2, H)
    assert found.shape == (6, 2, 4)
    assert torch.allclose(found[0], v[0], atol=1e-6)
    assert torch.allclose(found[3], weights[0, :, None] * v[2] + weights[1, :, None] * v[3], atol=1e-6)
    assert not found[5].any()


def test_decode_gives_translations_as_long_as_their_sources(tmp_path: Path) -> None:
    path = tmp_path / "decode.jsonl"
    sizes = ["--size", "tiny", "--sentences", "5", "--device", "cpu", "--output", str(path)]
    assert decode.main(sizes) == 0
    sources = decode.make_sources(5, 1_000)
    found = measured.read(path)
    assert list(found) == [f"decode/tiny/{name}" for name in decode.SETTINGS]
    for numbers in found.values():
        assert numbers["finished"]
        assert numbers["target_tokens"] <= sum(len(source) + 2 for source in sources)
        assert numbers["target_tokens"] > 0.7 * sum(len(source) + 2 for source in sources)
        assert numbers["target_tokens_per_second"] == pytest.approx(numbers["target_tokens"] / numbers["seconds"])


def test_decode_ends_a_setting_whose_time_is_over() -> None:
    clock = decode.Clock(60.0)
    clock()
    assert clock.batches == 1
    with pytest.raises(decode.TimeIsOver):
        decode.Clock(-1.0)()


def test_variants_take_turns_on_the_same_sentences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "variants.jsonl"
    names = ["--variants", "packed-eager,padded-eager,nn.Transformer", "--device", "cpu", "--output", str(path)]
    sizes = ["--size", "tiny", "--tokens", "300", "--rounds", "2", "--steps", "1", "--warmup", "1"]
    threads = torch.get_num_threads()
    try:
        assert variants.main([*names, *sizes]) == 0
    finally:
        torch.set_num_threads(threads)  # as other tests had them
    found = measured.read(path)
    keys = [f"variants/tiny/{name}/{turn}" for name in names[1].split(",") for turn in ("start", "1", "2")]
    assert set(found) == set(keys)
    for turn in ("start", "1", "2"):
        three = [found[f"variants/tiny/{name}/{turn}"] for name in names[1].split(",")]
        assert len({numbers["target_tokens"] for numbers in three}) == 1
        for numbers in three:
            assert abs(numbers["losses"][0] - math.log(1_000)) < 1.0
    assert list(found)[3:] == [key for turn in ("1", "2") for key in keys if key.endswith(f"/{turn}")]
    assert capsys.readouterr().out.count("\n| nn.Transformer | ") == 1


def test_step_times_have_a_corpus_as_long_as_wmt() -> None:
    store = step_times.make_corpus(400_000, 37_000)
    assert store.lengths.sum(axis=0) == pytest.approx([400_000, 400_000], rel=0.02)
    assert store.lengths.mean(axis=0) == pytest.approx([27, 27], rel=0.02)
    assert 2 <= store.lengths.min() < store.lengths.max() <= 256
    pieces, _ = store.gather(np.arange(len(store)), 0)
    assert 4 <= pieces.min() < pieces.max() < 37_000
    counts = np.bincount(pieces, minlength=37_000)
    assert counts[4] / counts[40:44].mean() == pytest.approx(30, rel=0.5)


def test_speeds_by_hand() -> None:
    """Two steps, of 3 and 2 seconds: 11 and 9 source tokens, 7 and 5 target tokens, in 24 and 16 slots."""
    batch = collate(Store.from_pieces([[5]], [[6]]), np.array([0]))
    steps = [
        Step(0, 0, [(0, batch), (1, batch)], target_tokens=7, source_tokens=11, sentences=3, slots=24),
        Step(0, 1, [(0, batch)], target_tokens=5, source_tokens=9, sentences=2, slots=16),
    ]
    found = step_times.speeds(
        ModelConfig(), 100, steps, times=[3.0, 2.0], waits=[0.5, 0.25], device=torch.device("cpu")
    )
    tflops = found.pop("model_tflops")
    assert found == {
        "target_tokens_per_second": 12 / 5,
        "milliseconds_median": 2_500,
        "milliseconds_p95": pytest.approx(2_950),
        "data_wait_share": 0.15,
        "padding_share": pytest.approx(8 / 40),
        "micro_batches_per_step": 1.5,
        "target_tokens_per_step": 6,
        "utilisation": None,
        "minutes_of_100k_steps": pytest.approx(2.5 * 1e5 / 60),
    }
    weights = 63_045_632 - 36_900 * 512  # each multiplies and adds three times for a token, of its side
    assert 6 * 12 * weights < 1.1 * 5e12 * tflops < 1.1 * 6 * 20 * weights


def test_step_times_page_tells_of_what_failed() -> None:
    timed = {"target_tokens_per_second": 1_234.5, "milliseconds_median": 9.87, "milliseconds_p95": 10.04}
    timed |= {"utilisation": 0.4321, "peak_memory_gib": 70.04, "padding_share": 0.051, "data_wait_share": 0.002}
    timed |= {
        "minutes_of_100k_steps": 61.4,
        "seconds_of_first_step": 41.23,
        "graphs_while_timed": 1,
        "steps": 7,
        "steps_wanted": 9,
    }
    results = [
        {"layout": "packed", "compiled": True, **timed, "error": "1 graphs compiled"},
        {"layout": "padded", "compiled": False, "error": "RuntimeError: no"},
    ]
    facts = {"size": "base", "parameters": 63_045_632, "tokens_per_step": 25_000, "device": "H200", "torch": "2.11"}
    lines = "\n".join(step_times.page(facts | {"results": results})).split("\n")
    first, second, _, late, _, compiled, _, failed = lines[-8:]
    assert first == "| packed | compiled | 1,234 | 9.9 | 10.0 | 43.2% | 70.0 | 5.1% | 0.2% | 61 min | 1 | 41.2 s |"
    assert second == "| padded | eager | failed |" + " |" * 9
    assert late == "packed compiled: the time ran out after 7 of 9 steps."
    assert (compiled, failed) == (
        "packed compiled: FAILED: 1 graphs compiled",
        "padded eager: FAILED: RuntimeError: no",
    )


def test_step_of_the_peers() -> None:
    """Padding is nowhere in the loss or the counts, and the rate warms up."""
    batch = peers.Batch.of(torch.tensor([[5, 6, 3], [7, 3, 0]]).numpy(), torch.tensor([[8, 3, 0], [9, 5, 3]]).numpy())
    assert batch.padding.tolist() == [[False, False, False], [False, False, True]]
    assert batch.target_in.tolist() == [[2, 8, 3], [2, 9, 5]]
    assert (batch.source_tokens, batch.target_tokens) == (5, 5)
    assert [peers.rate(step) for step in (0, 9, 19, 500)] == pytest.approx([1.5e-5, 1.5e-4, 3e-4, 3e-4])


def without_dropout(model: torch.nn.Module) -> torch.nn.Module:
    """In training mode, for in the other one torch takes another path."""
    for layer in model.train().modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0
    return model


def write_tiny_weights(path: Path) -> Transformer:
    """A model whose numbers are all random, but for the last norms: the peer has another norm of ones behind each."""
    model = Transformer(ModelConfig(n_layers=2, d_model=16, d_ff=24, n_heads=2, max_positions=12), 20).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
        for stack in ("encoder", "decoder"):
            torch.nn.init.ones_(model.get_parameter(f"{stack}.1.feed_forward_norm.weight"))
            torch.nn.init.zeros_(model.get_parameter(f"{stack}.1.feed_forward_norm.bias"))
    initial.save_weights(model, path)
    return model


def test_plain_computes_what_ours_does_from_the_same_weights(tmp_path: Path) -> None:
    ours = write_tiny_weights(tmp_path / "weights.npz")
    spec = peers.Spec(
        peer="plain",
        shape=peers.Shape(n_layers=2, d_model=16, d_ff=24, n_heads=2),
        vocab_size=20,
        longest=12,
        precision="fp32",
        device="cpu",
        threads=1,
        batches="",
        job={},
        weights=str(tmp_path / "weights.npz"),
    )
    plain = without_dropout(peers.PlainTransformer(spec))
    source, target = torch.randint(4, 20, (2, 2, 6))
    source[1, 4:] = 0
    with torch.no_grad():
        found = plain(source, target, source.eq(0))
        layouts = {"source_layout": Padded.of([6, 4], 6), "target_layout": Padded.of([6, 6], 6)}
        torch.testing.assert_close(found, ours(source, target, **layouts), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "package"), [("Marian", "transformers"), ("Joey", "joeynmt")])
def test_peers_compute_what_ours_does_from_the_same_weights(name: str, package: str, tmp_path: Path) -> None:
    """Under the peers' own Python, where neither our package nor pytest is installed."""
    python = peers_python(package)
    ours = write_tiny_weights(tmp_path / "weights.npz")
    source, target = torch.randint(4, 20, (2, 2, 6))
    source[1, 4:] = 0
    with torch.no_grad():
        layouts = {"source_layout": Padded.of([6, 4], 6), "target_layout": Padded.of([6, 6], 6)}
        expected = ours(source, target, **layouts)
    np.savez(tmp_path / "ids.npz", source=source.numpy(), target=target.numpy())
    code = (
        "import sys, numpy, torch, peers\n"
        "shape = peers.Shape(n_layers=2, d_model=16, d_ff=24, n_heads=2)\n"
        "spec = peers.Spec('', shape, 20, 12, 'fp32', 'cpu', 1, '', {}, sys.argv[1])\n"
        f"model = peers.{name}(spec).eval()\n"
        "source, target = map(torch.from_numpy, numpy.load(sys.argv[2]).values())\n"
        "numpy.save(sys.argv[3], model(source, target, source.eq(0)).detach().numpy())\n"
    )
    paths = [str(tmp_path / name) for name in ("weights.npz", "ids.npz", "logits.npy")]
    subprocess.run([python, "-c", code, *paths], env=os.environ | {"PYTHONPATH": str(FOLDER)}, check=True)
    assert np.load(tmp_path / "logits.npy") == pytest.approx(expected.numpy(), rel=1e-4, abs=1e-4)


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
    model = without_dropout(peers.PlainTransformer(peers.Spec(**shape, **work)))
    source, target = torch.randint(4, 20, (2, 2, 6))
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    with torch.no_grad():
        before = model(source, target, padding)
        source[1, 4:], target[:, 3:] = 7, 8
        after = model(source, target, padding)
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.equal(before[:, 3:], after[:, 3:])


# ---- a rehearsal of WMT, and several GPUs ---------------------------------------------------------------------------


def test_rehearse_makes_a_data_set_that_is_read_as_the_hubs(tmp_path: Path) -> None:
    made = rehearse.make(tmp_path / "wmt14", 310, sentences=20)
    found = {}
    for split in ("train", "validation", "test"):
        pair = PairConfig("", "", str(tmp_path / "wmt14"), "de-en", split)
        source = resolve_source(pair, "data.train", languages=("en", "de"), store_dir=tmp_path / "store")
        found[split] = list(source.pairs())
    assert {split: len(pairs) for split, pairs in found.items()} == {"train": 310, "validation": 20, "test": 20}
    assert found["validation"] != found["test"]
    assert len(next((tmp_path / "wmt14" / "de-en").glob("train-00002-of-00003.parquet")).read_bytes()) > 0
    for pairs in (found["validation"], found["test"]):
        assert all(0 < len(side.split()) <= 100 for pair in pairs for side in pair)
    english, german = (" ".join(sides) for sides in zip(*found["train"], strict=True))
    assert len(set("äöü") & set(german)) == 3
    assert not set("äöü") & set(english)
    text = [len(side.encode()) + 1 for pairs in found.values() for pair in pairs for side in pair]
    assert made["text_bytes"] == sum(text)


def test_stage_after_each_line_of_a_log() -> None:
    log = """copying /wmt14 de-en train, once
training the tokenizer on 39,988 of 39,988 lines
encoding 19,994 pairs
data ready: 19,980 of 20,000 pairs
1,000 parameters; device cpu
the first epoch: 19,980 sentence pairs in 27 steps
micro-batches a step: 5.81, padding: 18.9 %
step 1: loss 11.007, perplexity 60176.60
step 2: loss 11.003, perplexity 60176.60
step 2: saved
step 3: loss 11.001, perplexity 60176.60
step 10: loss 10.979, perplexity 58376.63
step 10: dev loss 10.9, greedy BLEU 0.00
  source     step 3: loss
step 10: saved
averaged the checkpoints of steps: 2, 4, 6, 8, 10"""
    stages = ["begin"]
    for line in log.split("\n"):
        stages.append(rehearse.stage_after(line, stages[-1]))
    assert stages[1:5] == ["copy", "tokenizer", "encode", "build"]
    assert stages[5:8] == ["build", "build", "first"]
    assert stages[8:12] == ["step", "save", "step", "step"]
    assert stages[12:] == ["validate", "save", "save", "average", "test"]


def test_watch_kills_at_a_place_and_sees_when_it_is_reached_again(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo training the tokenizer on 2 of 2 lines >&2; sleep 30"]
    target = rehearse.Place(3, 0.3)
    killed = rehearse.watch("one", command, tmp_path, target=target, previous=None)
    assert (killed.status, killed.back, killed.place.number) == (-9, None, 3)
    assert 0.3 <= killed.seconds < 20
    assert [(span.stage, span.is_complete) for span in killed.spans] == [("begin", True), ("tokenizer", False)]

    command[-1] = "echo encoding 2 pairs >&2; exec sleep 0.5"
    ended = rehearse.watch("two", command, tmp_path, target=None, previous=killed.place)
    assert (ended.status, [span.stage for span in ended.spans]) == (0, ["begin", "encode"])
    assert 0 < ended.back == ended.spans[1].began < ended.seconds
    assert ended.spans[1].is_complete
    assert 1e5 < ended.spans[1].peak_rss < 1e8
    assert (tmp_path / "leg-two.log").read_text(encoding="utf-8") == "encoding 2 pairs\n"


def span(stage: str, began: float, ended: float, peak: int = 1, *, complete: bool = True) -> dict[str, Any]:
    return {"stage": stage, "began": began, "ended": ended, "peak_rss": peak, "is_complete": complete}


def test_costs_of_a_kill_by_hand() -> None:
    """Killed 3 s into the copy; the next start takes 2 s to begin and 4 s to have copied as much."""
    legs = [
        {
            "name": "copy",
            "seconds": 4.0,
            "back": None,
            "spans": [span("begin", 0, 1, 5), span("copy", 1, 4, complete=False)],
        },
        {
            "name": "end",
            "seconds": 20.0,
            "back": 6.0,
            "spans": [span("begin", 0, 2), span("copy", 2, 9, 7), span("step", 9, 12), span("step", 12, 17, 8)],
        },
    ]
    assert rehearse.kills(legs) == [
        {"in": "copy", "stage": "copy", "after": 4.0, "in_stage": 3, "back": 6.0, "again": {"begin": 2, "copy": 4.0}}
    ]
    assert rehearse.stages(legs) == {
        "begin": {"times": 1, "seconds": 1, "peak_rss": 5},
        "copy": {"times": 1, "seconds": 7, "peak_rss": 7},
        "step": {"times": 2, "seconds": 4, "peak_rss": 8},
    }
    row = rehearse.kill_row(rehearse.kills(legs)[0])
    assert row == "| copying the data set | 3.0 s | 6.0 s | start 2.0 s, copying the data set 4.0 s |"
    assert [rehearse.duration(seconds) for seconds in (59.94, 60, 3_599.6)] == ["59.9 s", "1 min 0 s", "60 min 0 s"]


def test_rehearse_page_shows_stages_disk_and_kills() -> None:
    facts = {
        "pairs": 4_500_000,
        "sentences": 500,
        "command": "python rehearse.py",
        "training_command": "transformer train",
    }
    facts |= {"date": "1 May 2026", "python": "3.11", "torch": "2.13", "processor": "Xeon", "cores": 2}
    facts |= {"resolved": {"device": "cpu", "precision": "bf16", "layout": "packed", "threads": 2}}
    facts |= {"pairs_kept": 4_496_317, "tokens": {"src": 1, "tgt": 2}, "vocab_size": 37_000, "corpus": {"seconds": 61}}
    facts |= {"averaged": [2, 4, 6, 8, 10], "bleu": {"newstest2014": 0.1234}, "disk": {"the store": 3 * 2**20}}
    facts |= {"stages": {"encode": {"times": 1, "seconds": 90.4, "peak_rss": 2**30}}}
    facts |= {"kills": [{"stage": "encode", "in_stage": 40, "back": 60, "again": {"begin": 19, "encode": 41.0}}]}
    page = rehearse.page(facts)
    assert "\n| encoding into the store | 1 | 1 min 30 s | 1.00 GiB |\n" in page
    assert "\n| the store | 3 MiB |\n" in page
    assert "\n| encoding into the store | 40.0 s | 1 min 0 s | start 19.0 s, encoding into the store 41.0 s |\n" in page
    assert "newstest2014 0.12, " in page
    assert "steps 2, 4, 6, 8, 10. Found by rule: cpu, bf16, packed, 2 threads." in page


def test_rehearse_refuses_what_it_sets_itself_and_another_ones_folder(tmp_path: Path) -> None:
    arguments = ["--folder", str(tmp_path), "--output", str(tmp_path / "page")]
    done = benchmark(*arguments, "train.max_steps=3", script="rehearse.py")
    assert done.returncode == 2
    assert done.stderr.endswith("error: train.max_steps=3: this script sets it, since it reads the log by it\n")
    (tmp_path / "arguments.json").write_text('{"pairs": 7}')
    done = benchmark(*arguments, script="rehearse.py")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f'error: {tmp_path}: holds a rehearsal of {{"pairs": 7}}: choose another --folder\n'


def test_scaling_step_seconds_of_several_gpus_by_hand() -> None:
    """Base in 36 ms: 33.5 of them work. Of 8 GPUs each sends 1.75 times 75.776 MB at 350 GB/s in 14 hops, 0.40688 ms,
    that nothing hides; the rest, 1.05 ms, is less than nine tenths of 2.79 ms of backward pass."""
    promised = scaling.GPUS[1]
    assert scaling.step_seconds(promised, 8, tokens=3_125) == pytest.approx(1.01 * 7.09438e-3, rel=1e-5)
    assert scaling.step_seconds(promised, 1, tokens=25_000) == pytest.approx(36e-3)
    assert (FOLDER / "results" / "scaling.md").read_text(encoding="utf-8") == scaling.page()
