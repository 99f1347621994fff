"""What a training says of its steps before the first one, beside the steps that it then takes."""

import re
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.corpora import run, tiny_job, write_corpus
from transformer.config.settings import ModelConfig, Precision
from transformer.cost import step_flops
from transformer.data.loader import Position, Step, load_steps
from transformer.data.plan import Batching, packed_capacities
from transformer.data.store import Lengths, Mixture, Store
from transformer.training import preview
from transformer.training.preview import Preview, describe_preview, describe_utilisation, log_preview, preview_epoch

MODEL = ModelConfig(n_layers=1, d_model=16, d_ff=32, n_heads=2)


def store_of(pairs: int, seed: int = 0) -> Store:
    draw = np.random.default_rng(seed)
    counts = draw.integers(1, 20, size=(pairs, 2)).tolist()
    return Store.from_pieces([[7] * count for count, _ in counts], [[8] * count for _, count in counts])


def batching_of(lengths: Lengths, mixture: Mixture, *, packed: bool) -> Batching:
    capacities = None
    if packed:
        capacities = packed_capacities(lengths, tokens_per_step=400, max_tokens=256, micro_batch_multiple=1)
    return Batching(mixture, 3, 400, 256, 1, capacities)


def first_epoch(store: Store, batching: Batching) -> list[Step]:
    """What the loader really gives."""
    steps = load_steps(lambda epoch: store, batching, rank=0, world_size=1, position=Position(0, 0), prefetch=0)
    return list(takewhile(lambda step: step.epoch == 0, steps))


def mean(numbers: list[int]) -> float:
    return sum(numbers) / len(numbers)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("mixture", [[(600, 1.0)], [(400, 0.5), (200, 2.25)]], ids=["one corpus", "two"])
def test_preview_epoch_is_what_the_loader_then_gives(
    mixture: Mixture, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preview, "STEPS", 10_000)
    store = store_of(600)
    batching = batching_of(store.lengths, mixture, packed=packed)
    steps = first_epoch(store, batching)
    assert len(steps) > 10
    flops = [
        step_flops(
            MODEL,
            50,
            source=step.source_tokens,
            target=step.target_tokens,
            mean_length=(step.source_tokens + step.target_tokens) / (2 * step.sentences),
        )
        for step in steps
    ]
    tokens = sum(step.source_tokens + step.target_tokens for step in steps)

    approx: Any = pytest.approx  # stands where the class declares a number
    found = preview_epoch(store.lengths, batching, model=MODEL, vocab_size=50)
    assert found == Preview(
        pairs=sum(step.sentences for step in steps),
        steps=len(steps),
        is_exact=True,
        sentences=approx(mean([step.sentences for step in steps])),
        source_tokens=approx(mean([step.source_tokens for step in steps])),
        target_tokens=approx(mean([step.target_tokens for step in steps])),
        micro_batches=approx(mean([len(step.micro_batches) for step in steps])),
        padding_share=approx(1 - tokens / sum(step.slots for step in steps)),
        sampled_steps=len(steps),
        flops=approx(sum(flops) / len(flops)),
    )


def test_preview_epoch_of_a_large_corpus_is_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(30_001)
    batching = batching_of(store.lengths, [(20_003, 1.0), (9_998, 2.0)], packed=True)
    exact = preview_epoch(store.lengths, batching, model=MODEL, vocab_size=50)
    monkeypatch.setattr(preview, "PAIRS", 5_000)
    sample = preview_epoch(store.lengths, batching, model=MODEL, vocab_size=50)

    assert (exact.is_exact, exact.pairs, exact.sampled_steps) == (True, 39_999, 50)
    assert not sample.is_exact
    for name in ("pairs", "steps", "sentences", "source_tokens", "target_tokens", "micro_batches", "flops"):
        assert getattr(sample, name) == pytest.approx(getattr(exact, name), rel=0.03), name
    assert sample.padding_share == pytest.approx(exact.padding_share, abs=0.02)


EXAMPLE = Preview(
    pairs=29_000,
    steps=95,
    is_exact=True,
    sentences=305.26,
    source_tokens=4_012.4,
    target_tokens=3_950.6,
    micro_batches=1.0,
    padding_share=0.0341,
    sampled_steps=50,
    flops=0.6123e12,
)


def test_describe_preview() -> None:
    assert describe_preview(EXAMPLE) == [
        "the first epoch: 29,000 sentence pairs in 95 steps",
        "a step, on average: 305 sentence pairs, 4,012 source and 3,951 target tokens, 0.612 TFLOP",
        "micro-batches a step: 1, padding: 3.4 % (of the first 50 steps)",
    ]


def test_describe_utilisation_where_the_peak_is_known() -> None:
    (line,) = describe_utilisation(EXAMPLE.flops, device_name="NVIDIA A100-SXM4-80GB", ranks=2)
    assert "40 % of the 312 TFLOP/s of NVIDIA A100-SXM4-80GB" in line
    assert line.endswith("a step would take 2.45 ms")  # 0.6123 / (0.4 x 2 x 312) s
    assert describe_utilisation(EXAMPLE.flops, device_name="NVIDIA GeForce RTX 4090", ranks=1) == []


def test_log_preview_leaves_bad_data_to_the_loader(caplog: pytest.LogCaptureFixture) -> None:
    """A corpus whose weight leaves no pair."""
    lengths = store_of(5).lengths
    batching = batching_of(lengths, [(5, 1e-9)], packed=False)
    log_preview(
        lengths,
        batching,
        model=MODEL,
        vocab_size=50,
        device=torch.device("cpu"),
        precision=Precision.bf16,
        ranks=1,
    )
    assert caplog.records == []


def test_train_says_what_its_steps_are_at_each_start(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    run(tiny_job(tmp_path / "a", corpus, max_steps=2))
    run(tiny_job(tmp_path / "a", corpus, max_steps=4))
    log = (tmp_path / "a" / "train.log").read_text(encoding="utf-8")
    said = re.findall(
        r"the first epoch: 200 sentence pairs in 6 steps\n.* a step, on average: 33 sentence pairs, ", log
    )
    assert len(said) == 2
    assert "utilisation expected" not in log  # no peak of a CPU is known
