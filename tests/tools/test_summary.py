"""`transformer summary`: FLOPs in both ways of counting, hours, and memory beside what autograd really saves."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from support.corpora import metrics_of, run, run_command, tiny_job, write_corpus
from support.golden import assert_golden
from support.variants import untried
from transformer.cli.commands import compose
from transformer.compute import autocast, dtype_of
from transformer.config.settings import (
    Activation,
    Device,
    LayoutKind,
    ModelConfig,
    Norm,
    Positions,
    Precision,
    Score,
    Start,
    TargetTokenizerConfig,
    TokenizerConfig,
    TrainConfig,
)
from transformer.data.batch import collate
from transformer.data.store import Store
from transformer.errors import InputError
from transformer.model.transformer import Transformer
from transformer.records import Resolved
from transformer.tools.memory import estimate_memory
from transformer.tools.summary.command import format_summary, summarise
from transformer.tools.summary.job import SummaryJob
from transformer.training.step import Objective
from transformer.vocabulary import VocabSize, VocabSizes, vocab_size_of

BIG = ModelConfig(d_model=1024, d_ff=4096, n_heads=16, dropout=0.3)


# ---- FLOPs and hours ------------------------------------------------------------------------------------------------


def test_summarise_tells_the_two_ways_of_counting_apart() -> None:
    """Table 2 has 3.3e18 and 2.3e19; the arithmetic of the same trainings is 9.5e17 and 9.7e18."""
    base, big = summarise(SummaryJob()).paper
    assert (base.name, big.name) == ("base", "big")
    assert base.by_time == 12 * 3600 * 8 * 9.5e12 == pytest.approx(3.3e18, rel=0.01)
    assert big.by_time == 3.5 * 86_400 * 8 * 9.5e12 == pytest.approx(2.3e19, rel=0.01)
    assert base.by_arithmetic == pytest.approx(9.5e17, rel=0.01)
    assert big.by_arithmetic == pytest.approx(9.7e18, rel=0.01)


def test_summarise_counts_the_papers_own_settings_as_the_paper_s_arithmetic() -> None:
    base = summarise(SummaryJob())
    big = summarise(SummaryJob(model=BIG, train=TrainConfig(max_steps=300_000)))
    assert base.flops.training == base.paper[0].by_arithmetic
    assert big.flops.training == big.paper[1].by_arithmetic
    assert base.flops.step == 25_000 * base.flops.target_token == base.flops.training / 100_000
    assert (base.vocab_size, base.parameters.total, big.parameters.total) == (37_000, 63_045_632, 214_171_648)


def test_summarise_turns_tokens_per_second_into_hours() -> None:
    summary = summarise(SummaryJob(tokens_per_second=1_000.0))
    given, *gpus = summary.paces
    assert given.source == "given"
    assert given.hours == pytest.approx(100_000 * 25_000 / 1_000 / 3_600)
    assert given.flops_per_second == pytest.approx(1_000 * summary.flops.target_token)
    assert [pace.source.split()[1] for pace in gpus] == ["A100", "V100", "T4"], "an H200 waits for its host"
    assert gpus[0].hours == pytest.approx(summary.flops.training / (0.4 * 312e12) / 3_600)


# ---- one vocabulary or two ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokenizer", "others"),
    [
        (TokenizerConfig(vocab_size=61), [VocabSizes(61, 61), VocabSizes(31, 30)]),
        (TokenizerConfig(vocab_size=60, target=TargetTokenizerConfig(vocab_size=41)), [101, 41]),
    ],
    ids=["one", "two"],
)
@pytest.mark.parametrize("name", ["post", "biases", "untied, learned"])
def test_summary_counts_one_vocabulary_against_two_as_models_do(
    tokenizer: TokenizerConfig, others: list[VocabSize], name: str
) -> None:
    config = VARIANTS[name]
    summary = summarise(SummaryJob(model=config, tokenizer=tokenizer))
    for other, sizes in zip(summary.other_vocabularies, others, strict=True):
        assert vocab_size_of(other.vocab_size, other.source_vocab_size) == sizes
        assert other.parameters == sum(weights.numel() for weights in Transformer(config, sizes).parameters())


# ---- a run ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("summary")
    return run(tiny_job(folder / "a", write_corpus(folder / "corpus"), log_every=2))


def test_summary_of_a_run_has_its_settings_its_pieces_and_its_speed(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_command("summary", compose("summary", ["experiment=base", f"run={finished}", "format=json"]))
    summary = json.loads(capsys.readouterr().out)
    speeds = [row["speed/target_tokens_per_second"] for row in metrics_of(finished) if "train/loss" in row]
    results = json.loads((finished / "results.json").read_bytes())

    assert summary["parameters"]["total"] == results["parameters"]
    assert summary["vocab_size"] == json.loads((finished / "data.json").read_bytes())["vocab_size"]
    assert (summary["flops"]["steps"], summary["flops"]["tokens_per_step"]) == (12, 600)
    assert summary["memory"]["slots"] == 384  # 300, up to a multiple of 128
    measured = summary["paces"][0]
    assert measured["source"] == f"measured in {finished} (median of 6 log lines)"
    assert measured["target_tokens_per_second"] == median(speeds)


def test_summary_of_settings_whose_run_dir_is_a_run_says_so(finished: Path, caplog: pytest.LogCaptureFixture) -> None:
    summarise(SummaryJob(run_dir=str(finished)))
    assert caplog.messages == [
        f"{finished} is a run: run={finished} sums it up; this summary is of the settings given here"
    ]

    caplog.clear()
    summarise(SummaryJob(run_dir=str(finished), run=str(finished)))
    summarise(SummaryJob(run_dir=str(finished.parent)))
    assert caplog.messages == []


def test_summary_counts_the_pieces_of_a_tokenizer_that_is_given(finished: Path) -> None:
    given = TokenizerConfig(model=str(finished / "tokenizer.model"))
    pieces = summarise(SummaryJob(run=str(finished))).vocab_size
    for target, sizes in (
        (TargetTokenizerConfig(), (None, pieces)),
        (TargetTokenizerConfig(vocab_size=500), (pieces, 500)),
        (TargetTokenizerConfig(model=given.model), (pieces, pieces)),
    ):
        found = summarise(SummaryJob(tokenizer=replace(given, target=target)))
        assert (found.source_vocab_size, found.vocab_size) == sizes


def test_summary_beside_init_from_is_of_the_model_that_comes_from_there(finished: Path, tmp_path: Path) -> None:
    found = summarise(SummaryJob(run_dir=str(tmp_path / "b"), init_from=str(finished)))
    own = summarise(SummaryJob(run=str(finished)))
    assert (found.parameters, found.vocab_size) == (own.parameters, own.vocab_size)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        ("", "nothing is measured yet"),
        ('{"step": 4, "dev/loss": 2.0}\n', "nothing is measured yet"),
        ('{"step": 4, "speed/target', "nothing is measured yet"),
        ("7\n", "nothing is measured yet"),
    ],
)
def test_summary_of_a_run_without_a_speed(finished: Path, tmp_path: Path, text: str | None, words: str) -> None:
    for name in ("run.json", "tokenizer.model"):
        (tmp_path / name).write_bytes((finished / name).read_bytes())
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=words) as error:
        summarise(SummaryJob(run=str(tmp_path)))
    assert "metrics.jsonl" in str(error.value)


def test_summary_of_a_run_skips_a_damaged_line(finished: Path, tmp_path: Path) -> None:
    for name in ("run.json", "tokenizer.model"):
        (tmp_path / name).write_bytes((finished / name).read_bytes())
    lines = [f'{{"step": {step}, "speed/target_tokens_per_second": {speed}}}' for step, speed in ((2, 10.0), (6, 30.0))]
    (tmp_path / "metrics.jsonl").write_text(f'{lines[0]}\n{{"step": 4, "spe\n{lines[1]}\n', encoding="utf-8")
    pace = summarise(SummaryJob(run=str(tmp_path))).paces[0]
    assert (pace.target_tokens_per_second, pace.source) == (20.0, f"measured in {tmp_path} (median of 2 log lines)")


# ---- memory ---------------------------------------------------------------------------------------------------------

SMALL = ModelConfig(n_layers=3, d_model=64, d_ff=256, n_heads=4)
VARIANTS = {
    "post": SMALL,
    "pre": replace(SMALL, norm=Norm.pre),
    "no dropout": replace(SMALL, dropout=0.0),
    "every dropout": replace(SMALL, attention_dropout=0.1, relu_dropout=0.1),
    "GELU": replace(SMALL, activation=Activation.gelu),
    "GELU, every dropout": replace(SMALL, activation=Activation.gelu, attention_dropout=0.1, relu_dropout=0.1),
    "swish": replace(SMALL, activation=Activation.swish),
    "swish, every dropout": replace(SMALL, activation=Activation.swish, attention_dropout=0.1, relu_dropout=0.1),
    "widths": replace(SMALL, d_k=8, d_v=24),
    "biases": replace(SMALL, biases=True),
    "Marian's": replace(SMALL, start=Start.zeros, positions=Positions.marian),
    "deep encoder": replace(SMALL, n_layers=5, n_decoder_layers=1),
    "additive": replace(SMALL, score=Score.additive),
    "unscaled": replace(SMALL, score=Score.unscaled),
    "untied, learned": replace(SMALL, tie_embeddings=False, positions=Positions.learned),
}
LENGTHS = [(25 + i % 4, 28 - i % 4) for i in range(48)]  # 26.5 on average
VOCABULARY = 60


def test_variants_try_every_choice_of_a_switch() -> None:
    assert untried(VARIANTS.values()) == set()


def saved_bytes(config: ModelConfig, precision: Precision, capacities: tuple[int, int] | None) -> int:
    """What autograd saves in a forward pass, each storage once, parameters and tables not counted."""
    sentences = [[[5] * (pair[side] - 1) for pair in LENGTHS] for side in (0, 1)]
    batch = collate(Store.from_pieces(*sentences), np.arange(len(LENGTHS)), capacities)
    torch.manual_seed(0)
    model = Transformer(config, VOCABULARY).to(dtype_of(precision))
    objective = Objective(model, 0.1).train()
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, Any] = {}  # storages, which must live on: a new one may get the place of an old one

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor), autocast(torch.device("cpu"), precision):
        loss, _ = objective(batch)
    assert loss.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("layout", [LayoutKind.padded, LayoutKind.packed], ids=lambda layout: layout.name)
@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16], ids=lambda precision: precision.name)
@pytest.mark.parametrize("config", list(VARIANTS.values()), ids=list(VARIANTS))
def test_estimate_memory_is_near_what_autograd_saves(
    config: ModelConfig, precision: Precision, layout: LayoutKind
) -> None:
    """Within 10 %; of the loss, autograd saves the gradient of the output matrix."""
    packed = layout is LayoutKind.packed
    slots = 1_280 if packed else 48 * 28
    resolved = Resolved(Device.cpu, precision, 1, slots, layout, compile=False, micro_batch_multiple=1)
    memory = estimate_memory(config, VOCABULARY, resolved=resolved, slots=slots, mean_length=28, has_ema=False)
    saved = saved_bytes(config, precision, (slots, slots) if packed else None)
    assert memory.activations + 4 * VOCABULARY * 64 == pytest.approx(saved, rel=0.1)


@pytest.mark.parametrize("device", [Device.cpu, Device.cuda], ids=lambda device: device.name)
def test_estimate_memory_counts_the_padding_of_groups_on_every_device(device: Device) -> None:
    """A tenth more of what attention reads and weighs, where no kernel takes packed sentences as they lie."""
    activations = []
    for layout in (LayoutKind.packed, LayoutKind.padded):
        resolved = Resolved(device, Precision.fp32, 1, 1_000, layout, compile=False, micro_batch_multiple=1)
        model = ModelConfig(score=Score.additive)
        memory = estimate_memory(model, VOCABULARY, resolved=resolved, slots=1_000, mean_length=20, has_ema=False)
        activations.append(memory.activations)

    # 18 attentions, 1,000 slots, 8 heads: 20 weights, and queries, keys and values of 64, of 4 bytes each
    assert activations[0] - activations[1] == pytest.approx(0.1 * 18 * 1_000 * 8 * (20 + 3 * 64) * 4, abs=18)


def test_estimate_memory_of_the_state_is_exact() -> None:
    memory = summarise(SummaryJob(train=TrainConfig(ema_decay=0.99, precision=Precision.bf16))).memory
    weights = 63_045_632 * 4
    assert (memory.weights, memory.gradients, memory.adam, memory.ema) == (weights, weights, 2 * weights, weights)
    assert memory.total == 5 * weights + memory.activations + memory.transient
    doubled = summarise(SummaryJob(train=TrainConfig(precision=Precision.fp64))).memory
    assert (doubled.weights, doubled.ema) == (2 * weights, 0)


def test_estimate_memory_grows_with_the_length_where_weights_are_kept() -> None:
    on_cpu = summarise(SummaryJob(train=TrainConfig(precision=Precision.bf16, device=Device.cpu)))
    pairs = 18 * 5_120 * 8 * (257 - 27)  # 18 attentions, 5,120 slots, 8 heads
    assert on_cpu.longest_memory.activations - on_cpu.memory.activations == pytest.approx(2 * 1.1 * pairs, abs=18)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here, and decides")
def test_summary_for_a_gpu_that_is_not_here() -> None:
    summary = summarise(SummaryJob(train=TrainConfig(device=Device.cuda)))
    resolved = summary.resolved
    assert (resolved.device, resolved.precision, resolved.layout) == (Device.cuda, Precision.bf16, LayoutKind.packed)
    assert (resolved.max_tokens, summary.memory.slots) == (32_768, 25_088)
    assert summary.memory == summary.longest_memory
    plain = summarise(SummaryJob(train=TrainConfig(device=Device.cuda, precision=Precision.fp32, max_tokens=4_000)))
    assert (plain.resolved.layout, plain.memory.slots) == (LayoutKind.padded, 4_000)


# ---- for people -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["summary-base", "summary-odd", "summary-apart"])
def test_format_summary_says_what_is_counted(name: str) -> None:
    train = TrainConfig(device=Device.cpu, precision=Precision.fp32, threads=1)
    odd = replace(BIG, tie_embeddings=False, positions=Positions.learned)
    jobs = {
        "summary-base": SummaryJob(train=train),
        "summary-odd": SummaryJob(model=odd, train=train, tokens_per_second=280_000.0),
        "summary-apart": SummaryJob(
            train=train, tokenizer=TokenizerConfig(vocab_size=8000, target=TargetTokenizerConfig(vocab_size=6000))
        ),
    }
    assert_golden(name, format_summary(summarise(jobs[name])))
