"""What is said of the steps of a training before the first one, beside the steps that it then takes."""

import re
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.corpora import run, tiny_job, write_corpus
from transformer.data import plan
from transformer.data.loader import Position, Step, load_steps
from transformer.data.plan import Batching, packed_capacities
from transformer.data.store import Lengths, Mixture, Store
from transformer.tools import preview
from transformer.tools.preview import Preview, preview_epoch


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
    steps = load_steps(lambda epoch: store, batching, rank=0, world_size=1, position=Position(0, 0, 0), prefetch=0)
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
    tokens = sum(step.source_tokens + step.target_tokens for step in steps)

    approx: Any = pytest.approx  # stands where the class declares a number
    assert preview_epoch(store.lengths, batching) == Preview(
        first_epoch=f"the first epoch: {sum(step.sentences for step in steps)} sentence pairs in {len(steps)} steps",
        steps=len(steps),
        micro_batches=approx(mean([len(step.micro_batches) for step in steps])),
        padding_share=approx(1 - tokens / sum(step.slots for step in steps)),
        sampled_steps=len(steps),
    )


def test_preview_epoch_of_a_large_corpus_is_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(30_001)
    batching = batching_of(store.lengths, [(20_003, 1.0), (9_998, 2.0)], packed=True)
    exact = preview_epoch(store.lengths, batching)
    monkeypatch.setattr(plan, "_SAMPLED", 5_000)
    sample = preview_epoch(store.lengths, batching)

    assert exact.first_epoch.startswith("the first epoch: 39,999 sentence pairs in ")
    assert exact.sampled_steps == 50
    found = re.fullmatch(
        r"the first epoch: about ([0-9,]+) sentence pairs in about ([0-9,]+) steps", sample.first_epoch
    )
    assert found is not None
    assert int(found[1].replace(",", "")) == pytest.approx(39_999, rel=0.03)
    for name in ("steps", "micro_batches"):
        assert getattr(sample, name) == pytest.approx(getattr(exact, name), rel=0.03), name
    assert sample.padding_share == pytest.approx(exact.padding_share, abs=0.02)


def test_preview_words_its_padding() -> None:
    preview = Preview("", steps=95, micro_batches=1.0, padding_share=0.0341, sampled_steps=50)
    assert preview.padding == "micro-batches a step: 1, padding: 3.4 % (of the first 50 steps)"


def test_train_says_how_long_the_first_epoch_is(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    run(tiny_job(tmp_path / "a", corpus, max_steps=2))
    log = (tmp_path / "a" / "train.log").read_text(encoding="utf-8")
    assert "the first epoch: 200 sentence pairs in 6 steps\n" in log
