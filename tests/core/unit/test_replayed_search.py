"""A search whose tensors stay where they are, launched on a CPU in float64, beside the plain loop.

What `test_search` and `test_forced` search for is found in both ways, too: see `support.searches`.
"""

import copy
import itertools
import logging
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.searches import all_same
from support.tiers import tiers
from support.translations import write_run
from transformer.config.settings import ModelConfig, Norm, Positions, Precision, Score, SearchConfig
from transformer.decoding import buffers, proof, replay
from transformer.decoding.batched import BatchedDecoder
from transformer.decoding.loading import load
from transformer.decoding.proof import prove_replay
from transformer.decoding.replay import CannotRecord, Replay
from transformer.decoding.sampling import Sampling
from transformer.decoding.search import Hypothesis, length_penalty
from transformer.model.transformer import Transformer

CPU = torch.device("cpu")
CONFIG = ModelConfig(n_layers=2, d_model=16, d_ff=32, n_heads=2, max_positions=90)
CONFIGS = {
    "base": CONFIG,
    "pre": replace(CONFIG, norm=Norm.pre, positions=Positions.learned),
    "additive": replace(CONFIG, score=Score.additive, biases=True),
}
V = 23
PLACES = (2, 5, 16)


def decoder_of(config: ModelConfig = CONFIG, *, seed: int = 1, **search: Any) -> BatchedDecoder:
    """Of a random model that ends some sentences early, and some never."""
    torch.manual_seed(seed)
    model = Transformer(config, V).double().eval()
    with torch.no_grad():
        model.output.mul_(3.0)
    settings = SearchConfig(**{"max_extra": 20, "batch_tokens": 500, **search})
    return BatchedDecoder.of(model, settings, device=CPU, precision=Precision.fp64)


def replayed(decoder: BatchedDecoder) -> BatchedDecoder:
    return replace(decoder, replay=Replay(CPU, places=PLACES))


def sources(count: int) -> list[list[int]]:
    draw = random.Random(count)
    return [draw.choices(range(4, V), k=draw.randint(1, 19)) for _ in range(count)]


def equal(found: list[list[Hypothesis]], expected: list[list[Hypothesis]]) -> bool:
    return len(found) == len(expected) and all(itertools.starmap(all_same, zip(found, expected, strict=True)))


@pytest.mark.parametrize("beam_size", tiers([4], [1], pytest.mark.ci))
@pytest.mark.parametrize("config", list(CONFIGS.values()), ids=list(CONFIGS))
def test_replay_finds_what_the_plain_loop_finds(config: ModelConfig, beam_size: int) -> None:
    """More positions than the first steps read, sentences that leave for smaller places, and a place used again."""
    plain = decoder_of(config, beam_size=beam_size)
    fixed = replayed(plain)
    for count in (1, 17, 9):
        expected = plain.hypotheses(sources(count), n_best=beam_size)
        assert equal(fixed.hypotheses(sources(count), n_best=beam_size), expected)
    assert fixed.replay is not None
    assert len({len(place.tokens) for place in fixed.replay._places.values()}) > 1
    if config is not CONFIG:  # whose translations are short: others read more than 16 positions, and more than 32
        assert max(best.length for best, *_ in expected) > 32


@pytest.mark.parametrize("alpha", [0.0, 2.0])
def test_replay_of_prefixes(alpha: float) -> None:
    plain = decoder_of(beam_size=3, length_penalty=alpha)
    draw = random.Random(5)
    prefixes = [draw.choices(range(4, V), k=draw.choice([0, 0, 1, 5, 18])) for _ in range(30)]
    expected = plain.hypotheses(sources(30), n_best=3, prefixes=prefixes)
    found = replayed(plain).hypotheses(sources(30), n_best=3, prefixes=prefixes)
    assert equal(found, expected)
    assert all(best.tokens[: len(prefix)] == prefix for [best, *_], prefix in zip(found, prefixes, strict=True))


def test_replay_of_several_penalties_and_of_an_ensemble() -> None:
    one, other = decoder_of(beam_size=3, max_extra=9), decoder_of(seed=2, beam_size=3, max_extra=9)
    penalties = [length_penalty(alpha) for alpha in (0.0, 0.6, 3.0)]
    assert equal(replayed(one).sweep(sources(30), penalties), one.sweep(sources(30), penalties))

    both = one.joined(other)
    joined = replayed(one).joined(replayed(other))
    assert joined.replay is not None
    assert replayed(one).joined(other).replay is None
    assert equal(joined.hypotheses(sources(30), n_best=2), both.hypotheses(sources(30), n_best=2))


def test_replay_draws_samples_as_before() -> None:
    plain = decoder_of()
    how: dict[str, Any] = {"n_samples": 2, "lines": range(1, 11)}
    sampling = Sampling(1.0, None, None, 1)
    assert equal(replayed(plain).sample(sources(10), sampling, **how), plain.sample(sources(10), sampling, **how))


def test_replay_asks_every_eight_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    take, answer = Replay._take, Replay._answer

    def count_step(self: Replay, *how: Any) -> None:
        steps.append(".")
        take(self, *how)

    def count_question(self: Replay, question: Tensor) -> list[bool]:
        steps.append("?")
        return answer(self, question)

    monkeypatch.setattr(Replay, "_take", count_step)
    monkeypatch.setattr(Replay, "_answer", count_question)
    [[best]] = replayed(decoder_of(CONFIGS["additive"], beam_size=1)).hypotheses([[5, 6, 7]], n_best=1)
    assert best.length > 20
    asked = "".join(steps).split("?")
    assert asked[-1] == ""
    assert {len(between) for between in asked[:-2]} <= {8}
    assert len(asked[-2]) <= 8
    assert steps.count(".") < best.length + 8


def test_replay_cuts_batches_that_fill_places() -> None:
    fixed = replayed(decoder_of(beam_size=2, batch_tokens=240))
    lengths = [60, 24, 24, 24, 24, 24, 24, *[5] * 20, 4]
    cut = [len(batch) for batch in fixed.cut(lengths)]
    assert cut == [2, 5, 16, 5]  # at 60, 24, 5 and 5 positions there is room for 2, 5, 24 and 24 sentences


@pytest.mark.parametrize("error", [CannotRecord("operation not permitted"), torch.OutOfMemoryError("full")])
def test_replay_that_fails_leaves_the_search_to_the_plain_loop(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the middle of a batch: it begins anew, and nothing is recorded from then on."""
    plain = decoder_of()
    expected = plain.hypotheses(sources(30), n_best=2)
    take, taken = Replay._take, []

    def fails(self: Replay, *how: Any) -> None:
        taken.append(how)
        if len(taken) == 12:
            raise error
        take(self, *how)

    monkeypatch.setattr(Replay, "_take", fails)
    fixed = replayed(plain)
    with caplog.at_level(logging.WARNING):
        assert equal(fixed.hypotheses(sources(30), n_best=2), expected)
    assert len(taken) == 12
    assert fixed.replay is not None
    assert not fixed.replay.is_recording
    [line] = caplog.messages
    assert line.startswith("search steps are no longer replayed on the GPU (")


def test_batches_keep_their_replay_in_a_copy() -> None:
    assert copy.copy(replayed(decoder_of())).replay is not None
    assert copy.copy(decoder_of()).replay is None


# --- its proof


def test_prove_replay_takes_what_is_sound(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        proven = prove_replay(decoder_of(max_extra=3))
    assert proven.replay is not None
    assert "searches with replayed steps: a piece's log-probability differs by" in caplog.text


def test_prove_replay_leaves_a_mask_that_does_not_follow(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Hypotheses see the past of others: the sums of the search are not those of its translations."""

    def forgets(own: Any, after: Any) -> None:
        own.position.copy_(after.position)

    monkeypatch.setattr(buffers, "keep", forgets)
    decoder = decoder_of(CONFIGS["additive"], beam_size=2)
    assert prove_replay(decoder) is decoder
    assert "searches with replayed steps: not taken: the log-probability of a piece differs by" in caplog.text


def test_prove_replay_leaves_what_ends_too_early(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its sums are right, but its translations are not the best."""
    greedy = decoder_of(beam_size=4)
    monkeypatch.setattr(proof, "search_deviation", lambda decoder: 0.0)
    monkeypatch.setattr(
        Replay, "__call__", lambda self, step, state, beams, rules: [[[Hypothesis([4], -50.0, True)]]] * len(beams.done)
    )
    assert prove_replay(greedy) is greedy
    assert "not taken: the score of a translation differs by" in caplog.text


def test_prove_replay_leaves_what_raises(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("CUDA error: invalid argument\nmore")

    monkeypatch.setattr(replay, "advance", fails)
    decoder = decoder_of()
    assert prove_replay(decoder) is decoder
    assert caplog.messages == [
        "searches with replayed steps: not taken: RuntimeError: CUDA error: invalid argument more"
    ]


def test_load_on_a_cpu_replays_nothing(tmp_path: Path, spm: bytes) -> None:
    run_dir = write_run(tmp_path / "run", spm, seed=1)
    assert load(run_dir, device="cpu", cuda_graphs=True).decoder.replay is None
