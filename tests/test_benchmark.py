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
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from corpora import ROOT, tiny_job, wait_for, write_corpus
from tools import load_script

from transformer.config.settings import ModelConfig, PairConfig
from transformer.data.batch import collate
from transformer.data.loader import Step
from transformer.data.prepare import prepare
from transformer.data.source import resolve_source
from transformer.data.store import Store

FOLDER = ROOT / "scripts" / "benchmark"

load_script("benchmark/synthetic")  # which two of the others import
gpu, peers, preparing, step_times = (load_script(f"benchmark/{name}") for name in ("gpu", "peers", "prepare", "steps"))
rehearse, scaling = (load_script(f"benchmark/{name}") for name in ("rehearse", "scaling"))


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


def test_the_yardstick_and_ours_find_the_same_pieces(tmp_path: Path) -> None:
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


# ---- on a GPU -------------------------------------------------------------------------------------------------------


def test_the_steps_stage_of_a_dry_run(tmp_path: Path) -> None:
    """From the shell to the page: four settings are timed, and what was found lies in $OUT."""
    done = subprocess.run(
        ["bash", str(FOLDER / "gpu.sh"), "--dry-run", "steps"],
        env=os.environ | {"OUT": str(tmp_path / "out"), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["steps.json", "steps.txt", "summary.json"]
    found = json.loads((tmp_path / "out" / "steps.json").read_bytes())
    assert (found["passed"], found["dry_run"], found["device"], found["parameters"]) == (True, True, "cpu", 52_992)
    settings = [("packed", True), ("packed", False), ("padded", True), ("padded", False)]
    assert [(result["layout"], result["compiled"]) for result in found["results"]] == settings
    page = (tmp_path / "out" / "steps.txt").read_text(encoding="utf-8")
    for result in found["results"]:
        assert len(result["milliseconds"]) == result["steps"] == 3
        seconds = sum(result["milliseconds"]) / 1e3
        expected = 3 * result["target_tokens_per_step"] / seconds
        assert result["target_tokens_per_second"] == pytest.approx(expected, rel=1e-3)
        assert 800 < result["target_tokens_per_step"] <= 1_000
        assert abs(result["first_loss"] - math.log(1_000)) < 1.0
        name = f"{result['layout']} | {'compiled' if result['compiled'] else 'eager'}"
        assert f"| {name} | {result['target_tokens_per_second']:,.0f} | " in page
    packed, padded = (found["results"][index]["padding_share"] for index in (0, 2))
    assert packed == found["results"][1]["padding_share"]
    assert padded == found["results"][3]["padding_share"]
    stage = json.loads((tmp_path / "out" / "summary.json").read_bytes())["stages"]["steps"]
    assert (stage["passed"], stage["said"].count(" tokens/s")) == (True, 4)


def test_an_unknown_stage_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    done = benchmark("--out", str(tmp_path / "out"), "steps", "rest", script="gpu.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("error: rest: choose from tests, steps, multi30k, kftt\n")
    assert not (tmp_path / "out").exists()


def shell_stage(command: str, limit: float = 60.0) -> Any:
    """A stage that is a line of shell."""

    def run(place: Any) -> Any:
        status = gpu.call(place, ["sh", "-c", command], min(place.limit, limit), WORD="said")
        return gpu.Found([command], status == 0, {"exit_status": status}, f"status {status}")

    return run


def has_ended(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() == b""  # nobody has asked for its status yet
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_stage_that_fails_stops_no_other_but_fails_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(place: Any) -> Any:
        raise OSError(28, "No space left on device")

    runs = {
        "bad": shell_stage("echo $WORD; exit 3"),
        "broken": broken,
        "endless": shell_stage("sleep 60 & echo $! > {}; wait".format(tmp_path / "pid"), 0.3),
        "good": shell_stage("echo one; echo two >&2; touch left_behind"),
    }
    monkeypatch.setattr(gpu, "STAGES", {name: gpu.Stage(run, 0.25) for name, run in runs.items()})
    out = tmp_path / "out"
    assert gpu.main(["--dry-run", "--out", str(out)]) == 1
    stages = json.loads((out / "summary.json").read_bytes())["stages"]
    said = {"bad": "status 3", "broken": "OSError: [Errno 28] No space left on device", "endless": "status None"}
    assert {name: stage["said"] for name, stage in stages.items()} == said | {"good": "status 0"}
    assert [name for name, stage in stages.items() if stage["passed"]] == ["good"]
    assert {path.name for path in out.iterdir()} == {"summary.json"} | {
        f"{name}.{kind}" for name in runs for kind in ("json", "txt")
    }
    assert (out / "bad.txt").read_text(encoding="utf-8") == "$ sh -c 'echo $WORD; exit 3'\n\nsaid\n"
    assert (out / "good.txt").read_text(encoding="utf-8").endswith("\n\none\ntwo\n")
    report = json.loads((out / "endless.json").read_bytes())
    assert (report["passed"], report["exit_status"], report["dry_run"]) == (False, None, True)
    wait_for(lambda: has_ended((tmp_path / "pid").read_text(encoding="ascii").strip()), 10.0)
    printed = capsys.readouterr().out
    assert "\nbad: FAILED in " in printed
    assert "\nsaid\n" in printed  # the end of the log of what failed
    assert gpu.main(["--dry-run", "--out", str(out), "good"]) == 0
    assert list(json.loads((out / "summary.json").read_bytes())["stages"]) == ["good"]


def test_the_stages_share_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 530 s since gpu.sh began: each gets its share of what is left, and what one leaves goes to those behind it."""
    assert sum(stage.share for stage in gpu.STAGES.values()) == pytest.approx(1.0)
    shares = {"one": 0.25, "two": 0.25, "three": 0.5}
    monkeypatch.setattr(
        gpu, "STAGES", {name: gpu.Stage(shell_stage("exit 0"), share) for name, share in shares.items()}
    )
    assert gpu.main(["--out", str(tmp_path), "--begun", str(time.time() - 130)]) == 0
    stages = json.loads((tmp_path / "summary.json").read_bytes())["stages"]
    assert [stage["limit"] for stage in stages.values()] == pytest.approx([100, 400 / 3, 400], abs=3)


def test_a_training_that_fails_is_no_passed_stage(tmp_path: Path) -> None:
    """By the public command, on a corpus that is not there."""
    log = tmp_path / "log"
    found = gpu.multi30k(gpu.Place(False, tmp_path / "data", log, tmp_path, 60.0))
    assert (found.passed, found.numbers, found.line) == (False, {"exit_status": 2}, "no results.json")
    assert [command.split(" ")[2:5] for command in found.commands] == [
        ["transformer", "train", "experiment=multi30k_en_de"]
    ]
    assert "transformer: error: " in log.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("inside", "outcome"),
    [("", "passed"), ("<failure/>", "failed"), ("<error/>", "failed"), ("<skipped/>", "skipped")],
)
def test_the_outcome_of_a_test(inside: str, outcome: str) -> None:
    assert gpu.outcome_of(ElementTree.fromstring(f"<testcase>{inside}<system-out/></testcase>")) == outcome


def test_the_corpus_of_the_step_times_is_as_long_as_wmt() -> None:
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


def test_the_page_of_step_times_tells_of_what_failed() -> None:
    timed = {"target_tokens_per_second": 1_234.5, "milliseconds_median": 9.87, "milliseconds_p95": 10.04}
    timed |= {"utilisation": 0.4321, "peak_memory_gib": 70.04, "padding_share": 0.051, "data_wait_share": 0.002}
    timed |= {"minutes_of_100k_steps": 61.4, "graphs_while_timed": 1, "steps": 7, "steps_wanted": 9}
    results = [
        {"layout": "packed", "compiled": True, **timed, "error": "1 graphs compiled"},
        {"layout": "padded", "compiled": False, "error": "RuntimeError: no"},
    ]
    facts = {"size": "base", "parameters": 63_045_632, "tokens_per_step": 25_000, "device": "H200", "torch": "2.11"}
    lines = "\n".join(step_times.page(facts | {"results": results})).split("\n")
    first, second, _, late, _, compiled, _, failed = lines[-8:]
    assert first == "| packed | compiled | 1,234 | 9.9 | 10.0 | 43.2% | 70.0 | 5.1% | 0.2% | 61 min | 1 |"
    assert second == "| padded | eager | failed |" + " |" * 8
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


# ---- a rehearsal of WMT, and several GPUs ---------------------------------------------------------------------------


def test_the_rehearsals_data_set_is_read_as_the_hubs(tmp_path: Path) -> None:
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
averaged 5 checkpoints: steps 2, 4, 6, 8, 10"""
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


def test_what_a_kill_costs_by_hand() -> None:
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


def test_the_page_of_a_rehearsal_shows_stages_disk_and_kills() -> None:
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


def test_a_rehearsal_refuses_what_it_sets_itself_and_another_ones_folder(tmp_path: Path) -> None:
    arguments = ["--folder", str(tmp_path), "--output", str(tmp_path / "page")]
    done = benchmark(*arguments, "train.max_steps=3", script="rehearse.py")
    assert done.returncode == 2
    assert done.stderr.endswith("error: train.max_steps=3: this script sets it, since it reads the log by it\n")
    (tmp_path / "arguments.json").write_text('{"pairs": 7}')
    done = benchmark(*arguments, script="rehearse.py")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f'error: {tmp_path}: holds a rehearsal of {{"pairs": 7}}: choose another --folder\n'


def test_several_gpus_by_hand() -> None:
    """Base in 36 ms: 33.5 of them work. Of 8 GPUs each sends 1.75 times 75.776 MB at 350 GB/s in 14 hops, 0.40688 ms,
    that nothing hides; the rest, 1.05 ms, is less than nine tenths of 2.79 ms of backward pass."""
    promised = scaling.GPUS[1]
    assert scaling.step_seconds(promised, 8, tokens=3_125) == pytest.approx(1.01 * 7.09438e-3, rel=1e-5)
    assert scaling.step_seconds(promised, 1, tokens=25_000, vote=1.0) == pytest.approx(36e-3)
    assert (FOLDER / "results" / "scaling.md").read_text(encoding="utf-8") == scaling.page()
