"""`train` from text to scores: the run directory and its numbers, when a run ends, what it keeps, and what the other
commands make of it."""

import gzip
import io
import json
import logging
import math
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
import torch
from safetensors.torch import load_file

from support.corpora import (
    GERMAN,
    as_a_command,
    assert_same_tensors,
    is_verified,
    metrics_of,
    overrides,
    read,
    results_of,
    run,
    run_command,
    step_dir,
    steps_of,
    tiny_job,
    typed_in_a_child,
    write_corpus,
    write_pair,
)
from support.golden import assert_golden
from support.interventions import before_each_pass, before_each_update
from support.resumed_runs import learned, stop_at
from transformer.average import average_checkpoints, best_kept_steps
from transformer.checkpoint import find_checkpoint
from transformer.config.jobs import AverageJob, EvaluateJob, PrepareJob, TrainJob, TranslateJob
from transformer.config.primitives import to_json
from transformer.config.settings import (
    BleuTokenizer,
    DataConfig,
    ExtraConfig,
    Format,
    Metric,
    PairConfig,
    SearchConfig,
    SearchOverride,
    SweepConfig,
    TrainConfig,
)
from transformer.data.tokenizer import Tokenizer
from transformer.decoding.batched import BatchedDecoder
from transformer.decoding.search import Hypothesis
from transformer.decoding.translate_stream import run as translate
from transformer.errors import CheckpointError, InputError, Stopped
from transformer.evaluation.sets import evaluate, format_results
from transformer.records import Progress, Validation
from transformer.run_dir import RunDir
from transformer.tracking import Tracker
from transformer.training import finish, loop, saving
from transformer.training.loop import train
from transformer.training.step import Objective
from transformer.training.validate import DevSet

SCALARS = {
    "train/loss",
    "train/perplexity",
    "train/smoothed_perplexity",
    "train/rate",
    "train/gradient_norm",
    "speed/target_tokens_per_second",
    "speed/padding_share",
    "speed/data_wait_share",
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def job(corpus: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> TrainJob:
    """Long enough to score above zero."""
    recipe: dict[str, Any] = {
        "tokens_per_step": 1500,
        "max_tokens": 1500,
        "learning_rate": 1e-2,
        "max_steps": 60,
        "keep_last": 4,
    }
    return tiny_job(tmp_path_factory.mktemp("runs") / "a", corpus, save_every=10, validate_every=20, **recipe)


@pytest.fixture(scope="module")
def finished(job: TrainJob) -> Path:
    return run(job)


def lines_of(path: str | Path) -> list[str]:
    return Path(path).read_text(encoding="utf-8").removesuffix("\n").split("\n")


def script(monkeypatch: pytest.MonkeyPatch, numbers: list[float]) -> None:
    """Validation n finds `numbers[n]`, as BLEU and as loss; the last one holds for ever."""
    left = iter(numbers)
    found = [numbers[-1]]

    def scripted(objective: object, batches: object, dev: Any, *_: Any, step: int, **__: Any) -> Any:
        found[0] = next(left, numbers[-1])
        return Validation(step, found[0], found[0], found[0], 0.0), {"dev": [""] * len(dev["dev"].sources)}

    monkeypatch.setattr(loop, "validate", scripted)


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither a step, nor a dev loss, nor a translation; that nothing is written, a test sees from the files."""

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("a finished run trains, validates or decodes again")

    monkeypatch.setattr(Objective, "evaluate", refuse)
    monkeypatch.setattr(BatchedDecoder, "hypotheses", refuse)
    with before_each_pass(refuse):
        yield


# ---- the run directory ----------------------------------------------------------------------------------------------


def test_run_dir_has_the_files_of_the_design(finished: Path) -> None:
    names = sorted(path.relative_to(finished).as_posix() for path in finished.rglob("*"))
    (events,) = (name for name in names if "events.out.tfevents." in name)
    assert_golden("run-directory", "".join(f"{name}\n" for name in names), {events: "EVENTS"})
    for folder in (finished / "averaged", *(step_dir(finished, step) for step in steps_of(finished))):
        assert is_verified(folder)


def test_train_refuses_the_job_of_another_command(job: TrainJob, tmp_path: Path) -> None:
    """Its further keys would be in run.json, which no command would read again."""
    other = PrepareJob(run_dir=str(tmp_path / "a"), data=job.data)
    with pytest.raises(
        InputError, match=r"^train takes a TrainJob, not a PrepareJob: make one with transformer\.compose"
    ):
        train(other)
    assert not (tmp_path / "a").exists()


def test_run_record_says_what_was_resolved_and_read(finished: Path, job: TrainJob) -> None:
    papers = read(finished / "run.json")
    assert re.fullmatch("[0-9a-f]{16}", papers["id"])
    assert papers["versions"]["torch"] == torch.__version__
    resolved = {"device": "cpu", "precision": "fp32", "threads": 1, "max_tokens": 1500, "micro_batch_multiple": 1}
    resolved |= {"attention_kernel": None, "loss_rows": None, "cuda_graphs": False}  # which are for GPUs
    assert papers["resolved"] == resolved | {"layout": "packed", "compile": False}
    assert papers["config"]["model"]["d_model"] == 32
    assert papers["data_digest"] == read(finished / "data.json")["digest"]
    assert read(finished / "data.json")["pairs_kept"] == 200
    assert "d_model: 32\n" in (finished / "config.yaml").read_text(encoding="utf-8")
    for name, pair in {"dev": job.data.dev, **job.data.test}.items():
        for kind, path in (("src", pair.src), ("ref", pair.tgt)):
            assert (finished / "hypotheses" / f"{name}.{kind}").read_bytes() == Path(path).read_bytes()


def test_results_hold_scores_and_the_steps_averaged(finished: Path, job: TrainJob) -> None:
    results = results_of(finished)
    assert (results["steps"], results["averaged"], results["seed"]) == (60, [40, 50, 60], 1)
    search = {"beam_size": 4, "length_penalty": 0.6, "max_extra": 4, "batch_tokens": None}
    assert results["search"] == search | {"engine": "torch", "engine_type": "auto", "cuda_graphs": None}
    assert [row["step"] for row in results["validations"]] == [20, 40, 60]
    model = load_file(step_dir(finished, 60) / "model.safetensors")
    assert results["parameters"] == sum(tensor.numel() for tensor in model.values())
    assert results["test_sets"].keys() == {"test", "other"}
    for name, scores in results["test_sets"].items():
        hypotheses, references = (lines_of(finished / "hypotheses" / f"{name}.{kind}") for kind in ("hyp", "ref"))
        assert len(hypotheses) == len(references)
        bleu, chrf = sacrebleu.BLEU(), sacrebleu.CHRF()
        assert scores["bleu"] == pytest.approx(bleu.corpus_score(hypotheses, [references]).score, abs=1e-9)
        assert scores["chrf"] == pytest.approx(chrf.corpus_score(hypotheses, [references]).score, abs=1e-9)
        assert (scores["bleu_signature"], scores["chrf_signature"]) == (
            str(bleu.get_signature()),
            str(chrf.get_signature()),
        )
    assert results["test_sets"]["test"]["bleu"] > 0.1, "zero equals zero: the tests of scores would show nothing"


def test_train_reads_every_pair_once_an_epoch(corpus: DataConfig, tmp_path: Path) -> None:
    run_dir = run(tiny_job(tmp_path / "a", corpus, save_every=1, keep_last=20, max_steps=14, validate_every=14))
    states = [read(step_dir(run_dir, step) / "state.json")["training"]["progress"] for step in steps_of(run_dir)]
    ends = [before for before, after in pairwise(states) if after["epoch"] > before["epoch"]]
    assert [end["sentences"] for end in ends] == [200, 400]
    tokens = read(run_dir / "data.json")["tokens"]["tgt"]
    assert [end["target_tokens"] for end in ends] == [tokens, 2 * tokens]


def test_train_reads_an_extra_corpus_by_its_weight(corpus: DataConfig, tmp_path: Path) -> None:
    """Twelve pairs of weight 3 are 36 of an epoch; a resumed run keeps to the weight."""
    more = ExtraConfig(corpus.test["test"].src, corpus.test["test"].tgt, weight=3.0)
    recipe: dict[str, Any] = {"tokens_per_step": 1500, "max_tokens": 1500, "max_steps": 5, "save_every": 1}
    job = tiny_job(tmp_path / "a", replace(corpus, extra={"more": more}), keep_last=5, **recipe)
    run_dir = run(job)
    states = [read(step_dir(run_dir, step) / "state.json")["training"]["progress"] for step in steps_of(run_dir)]
    ends = [before for before, after in pairwise(states) if after["epoch"] > before["epoch"]]
    assert [end["sentences"] for end in ends] == [200 + 3 * 12]

    lighter = replace(job.data, extra={"more": replace(more, weight=2.0)})
    with pytest.raises(CheckpointError, match=r"data\.extra\.more\.weight: 3\.0 -> 2\.0"):
        run(replace(job, data=lighter))


def echo(_: BatchedDecoder, sources: list[list[int]], **__: Any) -> list[list[Hypothesis]]:
    """Sources for their translations."""
    return [[Hypothesis(ids, 0.0, finished=True)] for ids in sources]


def test_train_scores_in_the_target_language(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chinese has no spaces: sacreBLEU's default takes a sentence for one word, and finds no word pair in it."""
    corpus = write_corpus(tmp_path / "text")
    chinese = dict(zip(GERMAN, "零一二三四五六七八九", strict=True))
    references: dict[str, str] = {}
    for pair in (corpus.train, corpus.dev, *corpus.test.values()):
        targets = ["".join(map(chinese.__getitem__, line.split())) for line in lines_of(pair.tgt)]
        Path(pair.tgt).write_text("".join(f"{line}\n" for line in targets), encoding="utf-8", newline="\n")
        references |= zip(lines_of(pair.src), targets, strict=True)

    decode = Tokenizer.decode

    def give_references(tokenizer: Tokenizer, sources: list[list[int]]) -> list[str]:
        return [references.get(text, text) for text in decode(tokenizer, sources)]

    monkeypatch.setattr(BatchedDecoder, "hypotheses", echo)
    monkeypatch.setattr(Tokenizer, "decode", give_references)
    results = results_of(run(tiny_job(tmp_path / "a", replace(corpus, tgt_lang="zh"), max_steps=1)))
    assert [row["bleu"] for row in results["validations"]] == [pytest.approx(100.0)]
    for scores in results["test_sets"].values():
        assert scores["bleu"] == pytest.approx(100.0)
        assert "|tok:zh|" in scores["bleu_signature"]


def test_train_scores_each_test_set_in_its_own_language(corpus: DataConfig, tmp_path: Path) -> None:
    """A finished run is scored again where that changes how BLEU cuts a set into words, and only there."""

    def cut(**languages: str) -> dict[str, str]:
        test = {name: replace(pair, tgt_lang=languages.get(name)) for name, pair in corpus.test.items()}
        scores = results_of(run(tiny_job(tmp_path / "a", replace(corpus, test=test), max_steps=1)))["test_sets"]
        return {name: re.findall(r"tok:([^|]*)", of["bleu_signature"])[0] for name, of in scores.items()}

    assert cut(other="zh") == {"test": "13a", "other": "zh"}
    before = (tmp_path / "a" / "results.json").stat().st_mtime_ns
    assert cut(other="zho", test="fr") == {"test": "13a", "other": "zh"}
    assert (tmp_path / "a" / "results.json").stat().st_mtime_ns == before
    assert cut() == {"test": "13a", "other": "13a"}


def test_train_scores_with_the_tokenizer_of_the_run(corpus: DataConfig, tmp_path: Path) -> None:
    """In validation, in the results, and in what is computed from the run later."""
    job = tiny_job(tmp_path / "a", replace(corpus, bleu_tokenize=BleuTokenizer["char"]), max_steps=1)
    results = results_of(run(job))
    hypotheses, references = (lines_of(tmp_path / "a" / "hypotheses" / f"other.{kind}") for kind in ("hyp", "ref"))
    expected = sacrebleu.BLEU(tokenize="char").corpus_score(hypotheses, [references]).score
    assert results["test_sets"]["other"]["bleu"] == pytest.approx(expected, abs=1e-9)
    evaluated = evaluate(EvaluateJob(run_dir=job.run_dir, threads=1))
    assert "|tok:char|" in evaluated.test_sets["other"].bleu_signature
    printed = format_results(tmp_path / "a", evaluated)
    assert printed.count("|tok:char|") == 1, "both sets are scored alike"
    again = evaluate(EvaluateJob(run_dir=job.run_dir, threads=1, bleu_tokenize=BleuTokenizer["intl"]))
    assert "|tok:intl|" in again.test_sets["other"].bleu_signature


def test_train_writes_what_one_step_computes(corpus: DataConfig, tmp_path: Path) -> None:
    """And computes nothing else by it."""
    profiled = run(tiny_job(tmp_path / "a", corpus, profile=2, max_steps=3, average=1))
    trace = json.loads(gzip.decompress((profiled / "trace-00000002.json.gz").read_bytes()))
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"aten::mm", "aten::embedding"} <= names
    assert not list(profiled.glob("trace-00000003*"))
    plain = run(tiny_job(tmp_path / "b", corpus, max_steps=3, average=1))
    assert_same_tensors(*(RunDir(folder).checkpoint(3) / "model.safetensors" for folder in (profiled, plain)))


def test_train_counts_the_seconds_of_its_steps_alone(
    corpus: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that says that a step takes 1000 s, and that translating and writing to disk take far more."""
    passed = 0.0
    write = os.fsync

    def let_pass(seconds: float) -> None:
        nonlocal passed
        passed += seconds

    def translate_slowly(decoder: BatchedDecoder, sources: list[list[int]], **options: Any) -> list[list[Hypothesis]]:
        let_pass(1e6)
        return echo(decoder, sources, **options)

    def write_slowly(file: int) -> None:
        let_pass(1e6)
        write(file)

    monkeypatch.setattr(time, "perf_counter", lambda: passed)
    monkeypatch.setattr(BatchedDecoder, "hypotheses", translate_slowly)
    monkeypatch.setattr(os, "fsync", write_slowly)
    with before_each_update(lambda: let_pass(1000.0)):
        run_dir = run(tiny_job(tmp_path / "a", corpus, max_steps=4, validate_every=2, save_every=3))
    assert read(run_dir / "results.json")["training_seconds"] == 4000


# ---- the logs -------------------------------------------------------------------------------------------------------


def events_of(run_dir: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0})
    events.Reload()
    return events


def tensorboard(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    events = events_of(run_dir)
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_train_writes_three_logs_that_agree(finished: Path) -> None:
    rows = metrics_of(finished)
    training, dev = ([row for row in rows if key in row] for key in ("train/loss", "dev/bleu"))
    assert [row["step"] for row in training] == list(range(1, 61))
    assert [row["step"] for row in dev] == [20, 40, 60]
    assert set(training[0]) >= SCALARS
    shown = tensorboard(finished)
    assert "speed/padding_share" not in shown, "it hardly changes: metrics.jsonl alone has it"
    for tag in sorted({key for row in rows for key in row} - {"step", "time", "speed/padding_share"}):
        expected = [(row["step"], row[tag]) for row in rows if tag in row]
        assert [step for step, _ in shown[tag]] == [step for step, _ in expected]
        assert [value for _, value in shown[tag]] == pytest.approx([value for _, value in expected], rel=1e-6)
    log = (finished / "train.log").read_text(encoding="utf-8")
    for row in training:
        head = f"step {row['step']}: loss {row['train/loss']:.3f}, perplexity {row['train/perplexity']:.2f}, "
        head += f"rate {row['train/rate']:.2e}, gradient {row['train/gradient_norm']:.2f}, "
        assert f"{head}{row['speed/target_tokens_per_second']:.0f} target tokens/s" in log
    for row in dev:
        assert f"step {row['step']}: dev loss {row['dev/loss']:.3f}" in log
    assert [int(step) for step in re.findall(r"INFO step (\d+): saved\n", log)] == [10, 20, 30, 40, 50, 60]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_train_shows_loss_and_speed_on_the_bar_from_the_first_step_on(
    corpus: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And again where the device is read anyway; what is logged is the same as without a bar."""
    recipe: dict[str, Any] = {"max_steps": 22, "log_every": 21, "validate_every": 22, "save_every": 22}
    without = run(tiny_job(tmp_path / "a", corpus, **recipe))
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with_bar = run(tiny_job(tmp_path / "b", corpus, **recipe))

    shown = re.findall(r"(\d+)/22 \[[^]]*, loss (\d+\.\d{3}), [0-9,]+ tokens/s\]", terminal.getvalue())
    losses = dict(shown)
    assert {"1", "20", "21"} <= losses.keys(), terminal.getvalue()
    assert len({losses["1"], losses["20"], losses["21"]}) == 3
    assert learned(with_bar) == learned(without)
    assert losses["21"] == f"{metrics_of(without)[0]['train/loss']:.3f}"
    logs = [re.findall(r"INFO (step \d+: \w+)", (path / "train.log").read_text()) for path in (with_bar, without)]
    assert logs[0] == logs[1]


def test_train_logs_the_beginning_of_one_sample_and_shows_all_in_tensorboard(
    corpus: DataConfig, tmp_path: Path
) -> None:
    dev = write_pair(tmp_path, "dev", [(f"{'one ' * 30}", "eins"), ("two", "zwei"), ("three", "drei")])
    found = run(tiny_job(tmp_path / "a", replace(corpus, dev=dev), max_steps=2, samples=2))
    logged = re.findall(r"INFO   (source|translation|reference) +(.*)", (found / "train.log").read_text())
    assert [kind for kind, _ in logged] == ["source", "translation", "reference"]
    assert logged[0][1] == f"{'one ' * 30}"[:88] + "..."
    assert logged[2][1] == "eins"
    (event,) = events_of(found).Tensors("dev/samples/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert f"source      {'one ' * 29}one" in text
    assert text.count("reference") == 2


def test_metrics_are_what_they_say(finished: Path) -> None:
    rows = metrics_of(finished)
    for row in rows:
        for kind in ("train", "dev"):
            if f"{kind}/loss" in row:
                assert row[f"{kind}/smoothed_perplexity"] == pytest.approx(math.exp(row[f"{kind}/loss"]))
                assert row[f"{kind}/perplexity"] > 1
        if "train/loss" in row:
            assert 0 <= row["speed/padding_share"] < 1
            assert 0 <= row["speed/data_wait_share"] < 1
            assert row["speed/target_tokens_per_second"] > 0
            assert row["train/gradient_norm"] > 0
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    dev = {row["step"]: row for row in rows if "dev/bleu" in row}
    for found in results_of(finished)["validations"]:
        row = dev[found["step"]]
        assert (row["dev/loss"], row["dev/bleu"], row["dev/chrf"]) == (found["loss"], found["bleu"], found["chrf"])
        assert row["dev/perplexity"] == pytest.approx(math.exp(found["nll"]))


def test_metrics_without_smoothing_have_the_perplexity_of_the_loss(corpus: DataConfig, tmp_path: Path) -> None:
    rows = metrics_of(run(tiny_job(tmp_path / "a", corpus, max_steps=3, label_smoothing=0.0)))
    for row in rows:
        for kind in ("train", "dev"):
            if f"{kind}/loss" in row:
                assert row[f"{kind}/perplexity"] == pytest.approx(math.exp(row[f"{kind}/loss"]))


def test_metrics_of_a_log_line_are_means_over_its_steps(corpus: DataConfig, tmp_path: Path) -> None:
    """Token-weighted losses; plain means of norms."""
    one = metrics_of(run(tiny_job(tmp_path / "one", corpus, max_steps=6, save_every=1, keep_last=9)))
    three = metrics_of(run(tiny_job(tmp_path / "three", corpus, max_steps=6, log_every=3)))
    states = [read(step_dir(tmp_path / "one", step) / "state.json")["training"]["progress"] for step in range(1, 7)]
    tokens = [b["target_tokens"] - a for a, b in zip([0, *(s["target_tokens"] for s in states)], states, strict=False)]
    steps = [row for row in one if "train/loss" in row]
    means = [row for row in three if "train/loss" in row]
    assert [row["step"] for row in means] == [3, 6]
    for number, mean in enumerate(means):
        part = range(3 * number, 3 * number + 3)
        loss = sum(steps[n]["train/loss"] * tokens[n] for n in part) / sum(tokens[n] for n in part)
        assert mean["train/loss"] == pytest.approx(loss)
        assert mean["train/gradient_norm"] == pytest.approx(sum(steps[n]["train/gradient_norm"] for n in part) / 3)
        assert mean["train/rate"] == steps[3 * number + 2]["train/rate"]


@pytest.mark.parametrize("scale", [1.0, 1.5])
def test_train_logs_the_rate_of_equation_3(corpus: DataConfig, tmp_path: Path, scale: float) -> None:
    recipe: dict[str, Any] = {"learning_rate": None, "learning_rate_scale": scale, "warmup_steps": 4}
    job = tiny_job(tmp_path / "a", corpus, max_steps=10, **recipe)
    rates = {row["step"]: row["train/rate"] for row in metrics_of(run(job)) if "train/rate" in row}
    assert rates == pytest.approx({n: scale * 32**-0.5 * min(n**-0.5, n * 4**-1.5) for n in range(1, 11)}, rel=1e-12)


def test_train_applies_the_rate(corpus: DataConfig, tmp_path: Path) -> None:
    """Adam's first update moves a weight by just the rate, whatever the gradient."""
    slow, fast = (
        load_file(step_dir(run(tiny_job(tmp_path / name, corpus, max_steps=1, learning_rate=rate, warmup_steps=1)), 1)
        / "model.safetensors")
        for name, rate in (("slow", 1e-3), ("fast", 3e-3))
    )  # fmt: skip
    assert max(float((slow[name] - fast[name]).abs().max()) for name in slow) == pytest.approx(2e-3, rel=1e-3)


# ---- the end of a run -----------------------------------------------------------------------------------------------


def test_train_prints_the_results_of_a_finished_run_again(
    finished: Path, job: TrainJob, no_training: None, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.name not in (".lock", "train.log")}
    run_command("train", job)
    printed = capsys.readouterr().out
    results = results_of(finished)
    assert re.findall(
        r"^(\w+) +BLEU ([0-9.]+), chrF ([0-9.]+), chrF\+\+ [0-9.]+, TER [0-9.]+$", printed, re.MULTILINE
    ) == [(name, f"{scores['bleu']:.2f}", f"{scores['chrf']:.2f}") for name, scores in results["test_sets"].items()]
    assert f"\n  BLEU: {results['test_sets']['test']['bleu_signature']}\n" in printed
    assert "beam 4, alpha 0.6" in printed
    assert "mean of steps 40, 50, 60" in printed
    after = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.name not in (".lock", "train.log")}
    assert after == before


def test_train_says_what_next(
    job: TrainJob,
    finished: Path,
    copied: Path,
    no_training: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A report; only after the demo, a training on text of one's own."""
    caplog.set_level("INFO", logger="transformer")
    run_command("train", job)
    assert f"\n  transformer report {finished}" in caplog.text
    assert "experiment=small" not in caplog.text

    (tmp_path / "demo").symlink_to(Path(job.data.train.src).parent)
    train = PairConfig(*(str(tmp_path / "demo" / Path(side).name) for side in (job.data.train.src, job.data.train.tgt)))
    monkeypatch.setattr("transformer.cli.commands.shipped", lambda name: tmp_path)
    run_command("train", replace(job, run_dir=str(copied), data=replace(job.data, train=train)))
    assert "\n  transformer train experiment=small run_dir=runs/mine " in caplog.text


def test_train_takes_the_results_of_an_older_version_for_finished(
    finished: Path, job: TrainJob, no_training: None
) -> None:
    path = finished / "results.json"
    as_written = path.read_bytes()
    results = read(path)
    del results["dev"], results["average"]
    path.write_text(json.dumps(results))
    before = path.stat().st_mtime_ns
    run_command("train", job)
    assert path.stat().st_mtime_ns == before
    path.write_bytes(as_written)


def test_train_scores_other_test_sets_in_the_place_of_the_first(corpus: DataConfig, tmp_path: Path) -> None:
    """The same names with other text, then other names: neither prints a score of before, nor keeps its text."""
    job = tiny_job(tmp_path / "a", corpus, max_steps=4)
    run_dir = run(job)
    swapped = {"test": corpus.test["other"], "other": corpus.test["test"]}
    before = results_of(run_dir)["test_sets"]
    run(replace(job, data=replace(corpus, test=swapped)))
    after = results_of(run_dir)["test_sets"]
    assert before["test"] != before["other"]
    assert after == {"test": before["other"], "other": before["test"]}
    run(replace(job, data=replace(corpus, test={"news": corpus.test["test"]})))
    assert results_of(run_dir)["test_sets"] == {"news": before["test"]}
    kept = {path.name for path in (run_dir / "hypotheses").iterdir()}
    assert kept == {"dev.src", "dev.ref", "news.src", "news.ref", "news.hyp"}


def test_train_averages_and_scores_again_for_another_number_of_checkpoints(corpus: DataConfig, tmp_path: Path) -> None:
    recipe: dict[str, Any] = {"max_steps": 6, "save_every": 2}
    run_dir = run(tiny_job(tmp_path / "a", corpus, average=2, **recipe))
    assert results_of(run_dir)["averaged"] == [4, 6]
    run(tiny_job(tmp_path / "a", corpus, average=1, **recipe))
    assert results_of(run_dir)["averaged"] == [6]


def test_train_that_dies_while_it_scores_leaves_no_scores_of_the_translations_before(
    corpus: DataConfig, tmp_path: Path
) -> None:
    """Beside the new translations, those of another average would be taken for theirs."""
    recipe: dict[str, Any] = {"max_steps": 6, "save_every": 2}
    run_dir = run(tiny_job(tmp_path / "a", corpus, average=2, **recipe))
    last = tiny_job(tmp_path / "a", corpus, average=1, **recipe)

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finish, "score_sets", die)
        with pytest.raises(KeyboardInterrupt):
            run(last)
    assert not (run_dir / "results.json").exists()
    run(last)
    assert results_of(run_dir)["averaged"] == [6]


def test_train_gives_the_average_the_search_that_it_was_scored_with(corpus: DataConfig, tmp_path: Path) -> None:
    """A search that is chosen after the end is that of `translate` and `evaluate` from then on."""
    job = tiny_job(tmp_path / "a", corpus, max_steps=4, save_every=2, average=2)
    run(job)
    chosen = SearchConfig(beam_size=2, length_penalty=1.4, batch_tokens=None)
    run(replace(job, search=replace(chosen, batch_tokens=100)))
    run_dir = run(replace(job, search=chosen))
    for by_hand in (False, True):
        if by_hand:
            run_command("average", AverageJob(run_dir=str(run_dir), last=2))
        found = evaluate(EvaluateJob(run_dir=str(run_dir), threads=1))
        assert found.search == chosen
        assert to_json(found)["test_sets"] == results_of(run_dir)["test_sets"]


@pytest.mark.plugins
def test_train_records_the_settings_that_it_resumes_with(corpus: DataConfig, tmp_path: Path) -> None:
    """Those of the last start: its commands, tables and reports are of what was trained in the end."""
    from transformer.tools.search_settings import sweep

    job = tiny_job(tmp_path / "a", corpus, max_steps=4, save_every=2, average=2)
    began = RunDir(run(job)).read_record()
    assert began.config == job
    longer = replace(job, train=replace(job.train, max_steps=6), search=replace(job.search, beam_size=2))
    longer = replace(longer, data=replace(longer.data, dev=longer.data.test["test"]))
    record = RunDir(run(longer)).read_record()
    assert record.config == longer
    assert record.dev_digest != began.dev_digest
    assert replace(record, config=job, dev_digest=began.dev_digest) == began, "its test set is the same"
    assert "max_steps: 6\n" in (tmp_path / "a" / "config.yaml").read_text(encoding="utf-8")
    assert read(tmp_path / "a" / "data.json")["sets"]["dev"]["pairs_read"] == len(lines_of(corpus.test["test"].src))

    # The dev set of a run that takes no more steps is kept as well: search settings are compared on it.
    run(replace(longer, data=replace(longer.data, dev=corpus.dev)))
    asked = SweepConfig(length_penalty=[0.0, 1.0])
    assert len(sweep(EvaluateJob(run_dir=str(tmp_path / "a"), threads=1, sweep=asked)).trials) == 2


def test_train_writes_a_tokenizer_that_is_missing_when_it_resumes(corpus: DataConfig, tmp_path: Path) -> None:
    """Without it the training would go to its end, and then fail to score what it has made."""
    job = tiny_job(tmp_path / "a", corpus, max_steps=2, save_every=2, average=1)
    path = run(job) / "tokenizer.model"
    content = path.read_bytes()
    for damage in (Path.unlink, lambda path: path.write_bytes(content[:-9])):
        damage(path)
        job = replace(job, train=replace(job.train, max_steps=job.train.max_steps + 2))
        run(job)
        assert path.read_bytes() == content


def test_train_that_starts_afresh_has_no_curve_of_before(corpus: DataConfig, tmp_path: Path) -> None:
    """Trackers are sent what its metrics do not have yet: all of the run, whose identity is a new one."""
    job = tiny_job(tmp_path / "a", corpus, max_steps=2, log_every=1, save_every=2, average=1)
    run(job)
    for folder in ("checkpoints", "averaged"):
        shutil.rmtree(tmp_path / "a" / folder)
    metrics = tmp_path / "a" / "metrics.jsonl"
    metrics.write_text(metrics.read_text(encoding="utf-8").replace('"step": 2', '"step": 9'), encoding="utf-8")
    run(job)
    assert [row["step"] for row in metrics_of(tmp_path / "a") if "train/loss" in row] == [1, 2]


def test_train_records_a_test_set_whose_text_has_changed(corpus: DataConfig, tmp_path: Path) -> None:
    """Under the same name, so that no setting tells of it."""
    test = write_pair(tmp_path, "test", pairs_of(corpus.dev)[:5])
    job = tiny_job(tmp_path / "a", replace(corpus, test={"test": test}), max_steps=4)
    began = RunDir(run(job)).read_record()
    write_pair(tmp_path, "test", pairs_of(corpus.dev)[:3])
    record = RunDir(run(job)).read_record()
    assert record.test_digest != began.test_digest
    assert record.test_digest == results_of(tmp_path / "a")["test_digest"]
    assert read(tmp_path / "a" / "data.json")["sets"]["test.test"]["pairs_read"] == 3


@pytest.mark.parametrize(("average", "warned"), [(3, True), (2, False)])
def test_train_warns_of_an_average_that_begins_before_the_middle_of_the_run(
    corpus: DataConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture, average: int, warned: bool
) -> None:
    run(tiny_job(tmp_path / "a", corpus, max_steps=6, save_every=2, keep_last=3, average=average))
    said = [text.partition(", early in the run")[0] for text in caplog.messages if "early in the run" in text]
    assert said == (["the average begins at step 2 of 6"] * 2 if warned else [])


def test_train_with_more_steps_goes_on_to_where_one_run_would_have_come(corpus: DataConfig, tmp_path: Path) -> None:
    short = tiny_job(tmp_path / "a", corpus, max_steps=6, save_every=2)
    assert results_of(run(short))["averaged"] == [2, 4, 6]
    run(tiny_job(tmp_path / "a", corpus, max_steps=12, save_every=2))
    straight = run(tiny_job(tmp_path / "b", corpus, max_steps=12, save_every=2))
    assert results_of(tmp_path / "a") == results_of(straight)
    for name in ("model", "optimizer"):
        paths = [step_dir(run_dir, 12) / f"{name}.safetensors" for run_dir in (tmp_path / "a", straight)]
        assert_same_tensors(*paths)


def test_train_says_once_that_the_machine_is_busy(
    corpus: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="transformer")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (14.0, 1.0, 1.0))
    run(tiny_job(tmp_path / "a", corpus, max_steps=4, save_every=2))
    assert [text.partition(": its")[0] for text in caplog.messages].count("this machine is busy") == 1
    assert "this machine is busy: its load is 14.0, and it has 2 cores: steps take longer" in caplog.messages


def test_train_says_where_it_goes_on_or_how_long_the_first_epoch_is(
    corpus: DataConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="transformer")
    run(tiny_job(tmp_path / "a", corpus, max_steps=4, save_every=2))
    assert caplog.text.count("the first epoch: ") == 1
    assert "going on from step" not in caplog.text

    caplog.clear()
    saved = time.mktime((2026, 11, 25, 7, 43, 0, 0, 0, -1))
    os.utime(step_dir(tmp_path / "a", 4) / "MANIFEST.json", (saved, saved))
    run(tiny_job(tmp_path / "a", corpus, max_steps=6, save_every=2))
    assert "going on from step 4, saved at 07:43 on 2026-11-25" in caplog.messages
    assert "the first epoch: " not in caplog.text


def test_train_does_not_print_the_results_of_a_shorter_run(
    corpus: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tiny_job(tmp_path / "a", corpus, max_steps=4))
    longer = tiny_job(tmp_path / "a", corpus, max_steps=8)
    with monkeypatch.context() as patch:
        patch.setattr(RunDir, "write_results", lambda *_: sys.exit("died"))
        with pytest.raises(SystemExit):
            run(longer)
    assert steps_of(tmp_path / "a")[-1] == 8
    run_command("train", longer)
    assert "mean of steps 4, 8" in capsys.readouterr().out
    assert results_of(tmp_path / "a")["steps"] == 8


STOPS = {
    "bleu": (Metric.bleu, [1.0, 3.0, 2.0, 3.0], 2, 8),
    "loss": (Metric.loss, [5.0, 4.0, 4.5, 4.0], 2, 8),
    "a new best begins again": (Metric.bleu, [3.0, 2.0, 4.0, 1.0, 1.0], 2, 10),
    "nan is no best": (Metric.loss, [math.nan, 4.0, math.nan, math.nan], 2, 8),
    "nan is no best from the start": (Metric.bleu, [math.nan, math.nan], 2, 4),
    "patience is long": (Metric.bleu, [3.0, 2.0], 9, 12),
}


@pytest.mark.parametrize(("metric", "numbers", "patience", "last"), STOPS.values(), ids=STOPS)
def test_train_stops_early_when_patience_ends(
    corpus: DataConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    metric: Metric,
    numbers: list[float],
    patience: int,
    last: int,
) -> None:
    script(monkeypatch, numbers)
    run_dir = run(
        tiny_job(
            tmp_path / "a", replace(corpus, test={}), validate_every=2, save_every=3, metric=metric, patience=patience
        )
    )
    results = results_of(run_dir)
    assert results["steps"] == steps_of(run_dir)[-1] == last
    regular = [step for step in range(3, last + 1, 3)]
    assert results["averaged"] == sorted({*regular, last})[-3:]
    assert [row["step"] for row in results["validations"]] == list(range(2, last + 1, 2))


def test_train_goes_on_after_the_end_of_patience_only_with_more_of_it(
    corpus: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, [3.0, 2.0])
    recipe: dict[str, Any] = {"validate_every": 2, "save_every": 3}
    assert results_of(run(tiny_job(tmp_path / "a", corpus, patience=1, **recipe)))["steps"] == 4
    with before_each_pass(lambda _objective: pytest.fail("a step was made")):
        run(tiny_job(tmp_path / "a", corpus, patience=1, **recipe))
    assert results_of(run(tiny_job(tmp_path / "a", corpus, patience=3, **recipe)))["steps"] == 8
    assert results_of(run(tiny_job(tmp_path / "a", corpus, patience=None, **recipe)))["steps"] == 12


# ---- what is kept ---------------------------------------------------------------------------------------------------

KEPT = [
    # keep_last, keep_best, BLEU at 3, 6, 9, 12; the steps that stay; the best of them
    (2, 1, [5.0, 9.0, 3.0, 1.0], [6, 10, 12], 6),
    pytest.param(2, 1, [9.0, 5.0, 3.0, 1.0], [3, 10, 12], 3, marks=pytest.mark.ci),
    pytest.param(2, 1, [1.0, 2.0, 3.0, 4.0], [10, 12], 12, marks=pytest.mark.ci),
    (2, 2, [5.0, 9.0, 3.0, 1.0], [3, 6, 10, 12], 6),
    pytest.param(2, 2, [5.0, 9.0, 7.0, 1.0], [6, 9, 10, 12], 6, marks=pytest.mark.ci),
    pytest.param(3, 1, [1.0, 1.0, 9.0, 1.0], [8, 9, 10, 12], 9, marks=pytest.mark.ci),
    pytest.param(6, 1, [5.0, 9.0, 3.0, 1.0], [2, 4, 6, 8, 10, 12], 6, marks=pytest.mark.ci),
    (2, 1, [5.0, 5.0, 5.0, 5.0], [3, 10, 12], 3),
    (2, 1, [math.nan, 1.0, math.nan, 0.5], [6, 10, 12], 6),
]


@pytest.mark.parametrize(("keep_last", "keep_best", "numbers", "kept", "best"), KEPT)
def test_train_keeps_the_last_and_the_best_checkpoints(
    corpus: DataConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keep_last: int,
    keep_best: int,
    numbers: list[float],
    kept: list[int],
    best: int,
) -> None:
    script(monkeypatch, numbers)
    recipe: dict[str, Any] = {"save_every": 2, "validate_every": 3, "average": keep_last}
    run_dir = run(
        tiny_job(tmp_path / "a", replace(corpus, test={}), keep_last=keep_last, keep_best=keep_best, **recipe)
    )
    assert steps_of(run_dir) == kept
    assert read(run_dir / "best.json") == {"step": best, "metric": "bleu"}
    regular = [2, 4, 6, 8, 10, 12]
    assert results_of(run_dir)["averaged"] == regular[-keep_last:], "a best one in between is no part of the mean"


def test_train_keeps_the_least_loss_as_the_best(
    corpus: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, [5.0, 3.0, 4.0, 6.0])
    recipe: dict[str, Any] = {"save_every": 2, "validate_every": 3, "keep_last": 2, "average": 2, "metric": Metric.loss}
    run_dir = run(tiny_job(tmp_path / "a", corpus, **recipe))
    assert steps_of(run_dir) == [6, 10, 12]
    assert read(run_dir / "best.json") == {"step": 6, "metric": "loss"}


@pytest.mark.parametrize(("last", "kept", "best"), [(9, [6, 8, 9], 6), (10, [8, 10], 10)])
def test_train_names_no_best_checkpoint_that_is_gone(
    corpus: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int, kept: list[int], best: int
) -> None:
    script(monkeypatch, [1.0, 9.0, 3.0, 1.0])
    recipe: dict[str, Any] = {
        "max_steps": last,
        "save_every": 2,
        "validate_every": 3,
        "average": 2,
        "keep_last": 2,
        "keep_best": 0,
    }
    run_dir = run(tiny_job(tmp_path / "a", corpus, **recipe))
    assert steps_of(run_dir) == kept
    assert read(run_dir / "best.json")["step"] == best


def test_train_removes_best_json_when_no_validated_checkpoint_stays(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    recipe = TrainConfig(save_every=2, validate_every=3, keep_last=2, keep_best=0, average=2)
    progress = Progress(step=6)
    progress.record(Validation(step=6, loss=2.0, nll=2.0, bleu=5.0, chrf=5.0), Metric.bleu)
    for step, best in ((6, 6), (8, 6), (10, None)):
        run.checkpoint(step).mkdir(parents=True)
        progress.step = step
        saving._rotate(run, recipe, progress)
        assert (read(run.best)["step"] if run.best.exists() else None) == best


# ---- averaging, translating, scoring --------------------------------------------------------------------------------


def mean_of(run_dir: Path, steps: list[int]) -> dict[str, torch.Tensor]:
    """In float64, written to float32 once."""
    models = [load_file(step_dir(run_dir, step) / "model.safetensors") for step in steps]
    zero = torch.zeros((), dtype=torch.float64)
    return {name: (sum((model[name].double() for model in models), zero) / len(models)).float() for name in models[0]}


def assert_mean(found: Path, expected: dict[str, torch.Tensor]) -> None:
    averaged = load_file(found / "model.safetensors")
    assert averaged.keys() == expected.keys()
    assert not [name for name, tensor in expected.items() if not torch.equal(averaged[name], tensor)]


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "elsewhere" / "copy"))


def test_train_averages_the_last_checkpoints(finished: Path) -> None:
    assert_mean(finished / "averaged", mean_of(finished, [40, 50, 60]))
    last, averaged = weights(finished), load_file(finished / "averaged" / "model.safetensors")
    assert not [name for name in last if torch.equal(last[name], averaged[name])]
    assert read(finished / "averaged" / "state.json")["averaged"] == [40, 50, 60]
    assert is_verified(finished / "averaged")


@pytest.mark.parametrize(("last", "steps"), [(1, [60]), (2, [50, 60]), (99, [30, 40, 50, 60])])
def test_average_takes_the_last_checkpoints_asked_for(
    copied: Path,
    last: int,
    steps: list[int],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    run_command("average", AverageJob(run_dir=str(copied), last=last))
    listed = ", ".join(map(str, steps))
    warnings = ["6 checkpoints should be averaged, but only 4 exist (see train.keep_last)"] if last > 4 else []
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == warnings
    assert capsys.readouterr().out == f"{copied / 'averaged'}: mean of steps {listed}\n"
    run_command("average", AverageJob(run_dir=str(copied), last=last, format=Format.json))
    assert json.loads(capsys.readouterr().out) == {"averaged": steps, "path": str(copied / "averaged")}
    assert_mean(copied / "averaged", mean_of(copied, steps))


@pytest.fixture(scope="module")
def validated(corpus: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Validated at 3, 6, 9 and 12, best at 6, then 12; the best three and the last two of the schedule are kept."""
    recipe: dict[str, Any] = {
        "save_every": 2,
        "validate_every": 3,
        "average": 2,
        "keep_last": 2,
        "keep_best": 3,
        "metric": Metric.loss,
    }
    with pytest.MonkeyPatch.context() as patch:
        script(patch, [5.0, 2.0, 7.0, 4.0])
        run_dir = run(tiny_job(tmp_path_factory.mktemp("validated") / "a", corpus, **recipe))
    assert steps_of(run_dir) == [3, 6, 10, 12]
    return run_dir


@pytest.mark.parametrize(
    ("best", "steps", "gone"), [(1, [6], []), (2, [6, 12], []), (3, [3, 6, 12], []), (4, [3, 6, 12], [9])]
)
def test_average_takes_the_best_checkpoints_asked_for(
    validated: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, best: int, steps: list[int], gone: list[int]
) -> None:
    """It is the model that translates and evaluates, although the run has later checkpoints than some of its parts."""
    copy = Path(shutil.copytree(validated, tmp_path / "copy"))
    run_command("average", AverageJob(run_dir=str(copy), best=best))
    assert_mean(copy / "averaged", mean_of(copy, steps))
    found = find_checkpoint(copy, "auto")
    assert (found.path.name, found.step, found.run_state().averaged) == ("averaged", 12, steps)
    said = [record.getMessage() for record in caplog.records if "are gone" in record.getMessage()]
    assert len(said) == bool(gone)
    assert all(f"steps {gone[0]} are gone; train.keep_best={best} would" in line for line in said)


def test_average_takes_the_next_best_checkpoint_for_one_that_is_gone(
    validated: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = Path(shutil.copytree(validated, tmp_path / "copy"))
    shutil.rmtree(step_dir(copy, 6))
    run_command("average", AverageJob(run_dir=str(copy), best=2))
    assert_mean(copy / "averaged", mean_of(copy, [3, 12]))
    assert "of the 2 best checkpoints, those of steps 6 are gone" in caplog.text


def test_average_says_where_fewer_checkpoints_are_validated_than_it_was_asked_for(
    validated: Path, caplog: pytest.LogCaptureFixture
) -> None:
    progress = Progress(validations=[Validation(step, loss=2.0, nll=2.0, bleu=1.0, chrf=1.0) for step in (3, 6)])
    assert best_kept_steps(validated, progress, metric=Metric.loss, count=4) == [3, 6]
    assert caplog.messages == ["only 2 validated checkpoints exist, not 4: see train.validate_every"]


def test_average_of_the_best_is_refused_where_none_was_validated(corpus: DataConfig, tmp_path: Path) -> None:
    run_dir = run(tiny_job(tmp_path / "a", replace(corpus, test={}), max_steps=4))
    shutil.rmtree(step_dir(run_dir, 4))
    checkpoint = run_dir / "checkpoints" / "step-00000002"
    shutil.copytree(run_dir / "averaged", checkpoint)
    manifest = read(checkpoint / "MANIFEST.json")
    (checkpoint / "MANIFEST.json").write_text(json.dumps(manifest | {"step": 2}, indent=2) + "\n", encoding="utf-8")
    with pytest.raises(InputError, match="none of its checkpoints has been validated"):
        run_command("average", AverageJob(run_dir=str(run_dir), best=2))


def test_train_keeps_checkpoints_of_an_earlier_schedule_until_there_are_new_ones(
    corpus: DataConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe: dict[str, Any] = {"validate_every": 99, "average": 3, "keep_last": 3, "keep_best": 0}
    run_dir = run(tiny_job(tmp_path / "a", corpus, max_steps=12, save_every=4, **recipe))
    assert steps_of(run_dir) == [4, 8, 12]
    caplog.clear()
    run(tiny_job(run_dir, corpus, max_steps=18, save_every=6, **recipe))
    assert steps_of(run_dir) == [8, 12, 18]
    assert "3 checkpoints should be averaged, but only 2 exist" in caplog.text
    run(tiny_job(run_dir, corpus, max_steps=24, save_every=6, **recipe))
    assert steps_of(run_dir) == [12, 18, 24]
    assert read(run_dir / "averaged" / "state.json")["averaged"] == [12, 18, 24]


def test_train_refuses_to_begin_anew_over_an_averaged_model(copied: Path, job: TrainJob, tmp_path: Path) -> None:
    """What is left where checkpoints were removed for room; other runs may begin with it."""
    shutil.rmtree(copied / "checkpoints")
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match="a new start would remove the averaged model: train with init_from="):
        run(replace(job, run_dir=str(copied)))
    assert {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()} == before
    assert translated(copied, b"one two\n").count(b"\n") == 1
    again = replace(job, run_dir=str(tmp_path / "b"), init_from=str(copied), train=replace(job.train, max_steps=10))
    assert read(run(again) / "run.json")["init_from"]["step"] == 60


def translated(run_dir: Path, text: bytes, **options: Any) -> bytes:
    output = io.BytesIO()
    with as_a_command():
        translate(TranslateJob(run_dir=str(run_dir), threads=1, **options), io.BytesIO(text), output)
    return output.getvalue()


def test_translate_gives_the_translations_that_were_scored(finished: Path, job: TrainJob) -> None:
    for name, pair in job.data.test.items():
        expected = (finished / "hypotheses" / f"{name}.hyp").read_bytes()
        assert translated(finished, Path(pair.src).read_bytes()) == expected


def test_evaluate_finds_the_scores_of_the_run_and_changes_nothing_in_it(copied: Path, finished: Path) -> None:
    """Not even with another search: what results.json is about stays beside it."""
    for events in copied.glob("events.*"):
        events.unlink()
    (copied / "hypotheses" / "test.hyp").write_bytes(b"as it was\n")
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    with as_a_command():
        found = evaluate(EvaluateJob(run_dir=str(copied), threads=1))
        evaluate(EvaluateJob(run_dir=str(copied), threads=1, search=SearchOverride(beam_size=1)))
    assert to_json(found)["test_sets"] == results_of(finished)["test_sets"]
    assert (found.averaged, found.steps) == ([40, 50, 60], 60)
    assert {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["test", "renamed"])
def test_evaluate_while_a_finished_run_goes_on_with_other_test_sets(
    name: str, copied: Path, job: TrainJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results of the first end are of other text than the run keeps now: that is no damage."""

    def stopped(*arguments: Any) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Tracker, "settings", stopped)  # the training has begun, and takes signals
    other = replace(job, run_dir=str(copied), data=replace(job.data, test={name: job.data.dev}))
    with pytest.raises(Stopped):
        run(other)
    with as_a_command():
        assert evaluate(EvaluateJob(run_dir=str(copied), threads=1)).test_sets.keys() == {name}


def test_validate_scores_greedy_search(copied: Path, job: TrainJob) -> None:
    greedy = EvaluateJob(run_dir=str(copied), threads=1, checkpoint="last", search=SearchOverride(beam_size=1))
    with as_a_command():
        found = evaluate(replace(greedy, test={"again": job.data.dev})).test_sets["again"]
    last = results_of(copied)["validations"][-1]
    assert (last["step"], last["bleu"], last["chrf"]) == (60, found.bleu, found.chrf)
    assert last["chrf"] > 5


def test_best_json_names_the_checkpoint_with_the_best_score(finished: Path) -> None:
    rows = results_of(finished)["validations"]
    best = max(rows, key=lambda row: row["bleu"])["step"]
    assert read(finished / "best.json") == {"step": best, "metric": "bleu"}
    assert best in steps_of(finished)


# ---- what training depends on ---------------------------------------------------------------------------------------


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(step_dir(run_dir, steps_of(run_dir)[-1]) / "model.safetensors")


def is_same(left: Path, right: Path) -> bool:
    one, two = weights(left), weights(right)
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture(scope="module")
def plain(corpus: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tiny_job(tmp_path_factory.mktemp("plain") / "a", corpus, max_steps=8))


def test_train_gives_the_same_run_for_the_same_seed(corpus: DataConfig, tmp_path: Path) -> None:
    """With one thread; the runs of test_train_in_a_process_stops_at_a_signal_and_goes_on have two."""
    one, two = (run(tiny_job(tmp_path / name, corpus, max_steps=4)) for name in ("a", "b"))
    for name in ("optimizer.safetensors", "model.safetensors"):
        assert_same_tensors(step_dir(one, 4) / name, step_dir(two, 4) / name)
    assert results_of(one) == results_of(two)
    assert read(one / "run.json")["id"] != read(two / "run.json")["id"]


def test_train_gives_another_run_for_another_seed(corpus: DataConfig, tmp_path: Path, plain: Path) -> None:
    other = run(tiny_job(tmp_path / "a", corpus, max_steps=8, seed=2))
    assert weights(other).keys() == weights(plain).keys()
    same = [name for name, tensor in weights(other).items() if torch.equal(tensor, weights(plain)[name])]
    assert not same


def test_train_seed_draws_the_initial_weights(corpus: DataConfig, tmp_path: Path) -> None:
    """After one step at a rate that moves no matrix: the order of the data, which the seed also draws, cannot show."""

    def initial(name: str, **recipe: int) -> dict[str, torch.Tensor]:
        settings: dict[str, Any] = {"max_steps": 1, "learning_rate": 1e-30, "save_every": 1, "average": 1} | recipe
        tensors = weights(run(tiny_job(tmp_path / name, replace(corpus, test={}), **settings)))
        return {name: tensor for name, tensor in tensors.items() if tensor.ndim > 1}

    first, again = initial("first", seed=1), initial("again", seed=1, tokens_per_step=300)
    other = initial("other", seed=2)
    assert len(first) == 17  # the embedding; per layer 4 or 8 attention matrices and 2 of the feed-forward
    assert all(torch.equal(first[name], again[name]) for name in first), "other sentences, the same weights"
    assert not any(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("change", [{"prefetch": 0, "log_every": 3, "save_every": 3, "validate_every": 5}])
def test_train_has_the_same_weights_under_settings_that_must_not_matter(
    corpus: DataConfig, tmp_path: Path, plain: Path, change: dict[str, Any]
) -> None:
    assert is_same(run(tiny_job(tmp_path / "a", corpus, **{"max_steps": 8} | change)), plain)


def test_train_leaves_no_trace_of_development_and_test_sets_in_the_model(
    corpus: DataConfig, tmp_path: Path, plain: Path
) -> None:
    strange = [("Ähnliches Zeug, völlig anders", "quite other stuff")] * 3
    other = replace(
        corpus,
        dev=write_pair(tmp_path, "dev", strange),
        test={"strange": write_pair(tmp_path, "strange", strange)},
        store_dir=str(tmp_path / "store"),
    )
    found = run(tiny_job(tmp_path / "a", other, max_steps=8))
    assert is_same(found, plain)
    assert (found / "tokenizer.model").read_bytes() == (plain / "tokenizer.model").read_bytes()
    assert read(found / "run.json")["data_digest"] == read(plain / "run.json")["data_digest"]
    assert results_of(found)["test_sets"].keys() == {"strange"}


def test_train_without_a_test_set_scores_the_average_on_the_dev_set(
    corpus: DataConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The best validation is named, too."""
    run_command("train", tiny_job(tmp_path / "a", replace(corpus, test={}), max_steps=4))
    results = results_of(tmp_path / "a")
    assert (results["test_sets"], results["averaged"]) == ({}, [4])

    # The score is that of the translations that are kept.
    translations = lines_of(tmp_path / "a" / "hypotheses" / "dev.hyp")
    dev = results["dev"]
    assert dev["bleu"] == sacrebleu.corpus_bleu(translations, [lines_of(corpus.dev.tgt)], force=True).score
    best = results["validations"][0]
    assert capsys.readouterr().out.splitlines() == [
        f"dev  BLEU {dev['bleu']:.2f}, chrF {dev['chrf']:.2f}, chrF++ {dev['chrf_plus_plus']:.2f}, "
        f"TER {dev['ter']:.2f}",
        f"  model: {tmp_path / 'a'}, mean of steps 4, seed 1, data {results['data_digest'][:12]}",
        "  search: beam 4, alpha 0.6, source + 4 at most",
        f"  best validation: step 4, greedy BLEU {best['bleu']:.2f}, chrF {best['chrf']:.2f}",
        "  there is no test set (data.test.NAME.src, data.test.NAME.tgt)",
        f"  BLEU: {dev['bleu_signature']}",
        f"  chrF: {dev['chrf_signature']}",
        f"  chrF++: {dev['chrf_plus_plus_signature']}",
        f"  TER: {dev['ter_signature']}",
    ]

    # Another text of the dev set is scored anew, though nothing is left to train.
    other = write_pair(tmp_path, "dev", pairs_of(corpus.dev)[:3])
    run_command("train", tiny_job(tmp_path / "a", replace(corpus, test={}, dev=other), max_steps=4))
    assert results_of(tmp_path / "a")["dev_digest"] != results["dev_digest"]
    assert len(lines_of(tmp_path / "a" / "hypotheses" / "dev.hyp")) == 3


# ---- the public commands --------------------------------------------------------------------------------------------


@pytest.fixture
def empty_folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "cwd").mkdir()
    yield tmp_path / "cwd"
    assert [path.name for path in (tmp_path / "cwd").iterdir()] in ([], ["runs"]), "left behind"


def test_commands_work_on_a_run_that_was_moved_without_its_text(
    corpus: DataConfig, tmp_path: Path, empty_folder: Path
) -> None:
    """Train; then move the run, delete its text, and translate and evaluate."""
    sets: dict[str, Any] = {
        name: write_pair(tmp_path / "text", name, pairs_of(getattr(corpus, name))) for name in ("train", "dev")
    }
    tests = {name: write_pair(tmp_path / "text", name, pairs_of(pair)) for name, pair in corpus.test.items()}
    data = replace(corpus, **sets, test=tests, store_dir=None)
    job = tiny_job(Path("runs/a"), data, max_steps=8)
    trained = typed_in_a_child("train", *overrides(job), cwd=empty_folder)
    assert trained.status == 0, trained.said
    here = empty_folder / "runs" / "a"
    results = results_of(here)
    assert [line.split()[0] for line in trained.printed.splitlines() if not line.startswith(" ")] == list(
        results["test_sets"]
    )
    assert f"BLEU {results['test_sets']['test']['bleu']:.2f}" in trained.printed
    assert "step 8: saved" in trained.said
    assert {path.name for path in (empty_folder / "runs").iterdir()} == {"a", ".store"}

    there = Path(shutil.move(here, tmp_path / "moved"))
    source = Path(tests["test"].src).read_text(encoding="utf-8")
    shutil.rmtree(tmp_path / "text")
    shutil.rmtree(empty_folder / "runs")
    expected = (there / "hypotheses" / "test.hyp").read_text(encoding="utf-8")
    settings = (f"run_dir={there}", "threads=1")
    assert typed_in_a_child("translate", *settings, cwd=empty_folder, text=source).printed == expected
    printed = typed_in_a_child("evaluate", *settings, cwd=empty_folder).printed
    for name, scores in results["test_sets"].items():
        assert f"{name:<5}  BLEU {scores['bleu']:.2f}, chrF {scores['chrf']:.2f}, " in printed
    assert f"  BLEU: {results['test_sets']['test']['bleu_signature']}\n" in printed


def pairs_of(pair: PairConfig) -> list[tuple[str, str]]:
    return list(zip(lines_of(pair.src), lines_of(pair.tgt), strict=True))


# ---- the process that calls ------------------------------------------------------------------------------------------


def process_settings() -> dict[str, object]:
    """What a caller may have set, and `train` changes while it runs."""
    logger = logging.getLogger("transformer")
    return {
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "only warns": torch.is_deterministic_algorithms_warn_only_enabled(),
        "default type": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "level": logger.level,
        "random numbers": torch.get_rng_state().tolist(),
        "handlers": list(logger.handlers),
        "root handlers": list(logging.getLogger().handlers),
        "workspace of cuBLAS": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "signals": [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)],
    }


@pytest.fixture(params=["defaults", "of the caller"])
def settings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """The process as Python starts it, or as somebody has set it up; put back after the test."""
    logger, handler = logging.getLogger("transformer"), logging.NullHandler()
    threads, level = torch.get_num_threads(), logger.level
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if request.param == "of the caller":
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        torch.set_num_threads(2)
        torch.use_deterministic_algorithms(True, warn_only=True)
        logger.setLevel(logging.ERROR)
        logger.addHandler(handler)
    yield process_settings()
    logger.removeHandler(handler)
    logger.setLevel(level)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("end", ["success", "bad input", "refused", "stopped"])
def test_train_leaves_the_process_as_it_was(
    corpus: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], end: str
) -> None:
    recipe: dict[str, Any] = {"threads": 3, "deterministic": True, "max_steps": 2, "validate_every": 2, "save_every": 2}
    job = tiny_job(tmp_path / "a", replace(corpus, test={}), **recipe)
    match end:
        case "success":
            train(job)
        case "bad input":  # found when threads and determinism are set already
            monkeypatch.setattr(DevSet, "of", refuse)
            with pytest.raises(InputError, match="bad dev set"):
                train(job)
        case "refused":
            train(job)
            job.train.seed = 5
            with pytest.raises(CheckpointError, match=r"train\.seed"):
                train(job)
        case "stopped":
            with before_each_update(lambda: signal.raise_signal(signal.SIGTERM)), pytest.raises(Stopped):
                train(job)
    assert process_settings() == settings


def refuse(*_: Any, **__: Any) -> Any:
    raise InputError("bad dev set")


# ---- what once went wrong -------------------------------------------------------------------------------------------


def test_train_goes_on_with_a_dev_sentence_longer_than_the_model(corpus: DataConfig, tmp_path: Path) -> None:
    """Dev sentences are never dropped: the loss sees what fits, and the run goes on."""
    dev = write_pair(tmp_path / "dev", "dev", [("one two " * 300, "eins zwei " * 300), ("one", "eins")])
    job = tiny_job(tmp_path / "a", replace(corpus, dev=dev), model={"max_positions": 41}, max_steps=6)
    assert results_of(run(job))["validations"][-1]["loss"] > 0


def test_train_leaves_a_damaged_checkpoint_out_of_the_average(corpus: DataConfig, tmp_path: Path) -> None:
    """Step 4 rots while the last steps are trained: the run ends, and says which checkpoints it averaged."""
    run_dir = tmp_path / "a"

    def rot() -> None:
        path = step_dir(run_dir, 4) / "model.safetensors"
        if steps_of(run_dir)[-1:] == [8]:
            path.write_bytes(path.read_bytes()[:-1] + b"!")

    with before_each_update(rot):
        run(tiny_job(run_dir, corpus))
    assert results_of(run_dir)["averaged"] == [8, 12]
    assert_mean(run_dir / "averaged", mean_of(run_dir, [8, 12]))


@pytest.mark.parametrize("damaged", [40, 50, 60])
def test_average_is_the_mean_of_the_sound_checkpoints(copied: Path, damaged: int) -> None:
    """One of three has a bit turned: the weights are those of the other two, each counted half."""
    path = step_dir(copied, damaged) / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    sound = [step for step in (40, 50, 60) if step != damaged]
    average_checkpoints(copied, [40, 50, 60])
    assert_mean(copied / "averaged", mean_of(copied, sound))
    assert read(copied / "averaged" / "state.json")["averaged"] == sound


def test_average_checkpoints_is_of_the_newest_step_that_went_into_it(corpus: DataConfig, tmp_path: Path) -> None:
    run_dir = run(tiny_job(tmp_path / "a", corpus))
    path = step_dir(run_dir, 12) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    averaged = average_checkpoints(run_dir, [4, 8, 12])
    assert (averaged.state["averaged"], averaged.step) == ([4, 8], 8)


def test_find_checkpoint_takes_no_average_that_training_has_passed(corpus: DataConfig, tmp_path: Path) -> None:
    """Trained to step 8, then on to 12 and stopped before its average: `auto` is the last checkpoint."""
    run_dir = run(tiny_job(tmp_path / "a", corpus, max_steps=8))
    assert find_checkpoint(run_dir, "auto").path.name == "averaged"
    stop_at(tiny_job(tmp_path / "a", corpus), 12)
    assert find_checkpoint(run_dir, "auto").path.name == "step-00000012"
    assert find_checkpoint(run_dir, "averaged").step == 8
