"""Beam search against searches written independently: exhaustive, greedy, and a plain beam for one sentence."""

import itertools
import math
import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from transformer.config.settings import ModelConfig
from transformer.decoding.search import Hypothesis, beam_search, length_penalty
from transformer.layout import Padded
from transformer.model.transformer import Transformer
from transformer.vocabulary import BOS, EOS, PAD

ALPHAS = (0.0, 0.6, 1.0)


class Table:
    """Log-probabilities that depend on the sentence and the whole prefix, drawn once for each."""

    def __init__(self, seed: int, vocab_size: int, *, eos_bias: float = 0.0) -> None:
        self.seed, self.vocab_size, self.eos_bias = seed, vocab_size, eos_bias
        self.known: dict[tuple[int, ...], list[float]] = {}

    def __call__(self, sentence: int, prefix: tuple[int, ...]) -> list[float]:
        key = (sentence, *prefix)
        if key not in self.known:
            draw = random.Random(repr((self.seed, key)))
            logits = [draw.gauss(0.0, 2.0) + (self.eos_bias if v == EOS else 0.0) for v in range(self.vocab_size)]
            total = math.log(math.fsum(map(math.exp, logits)))
            self.known[key] = [logit - total for logit in logits]
        return self.known[key]


@dataclass
class Prefixes:
    """A search state that is the prefixes themselves, and counts the rows that are asked for."""

    table: Table
    rows: list[tuple[int, tuple[int, ...]]]
    seen: list[int] = field(default_factory=list)

    def reorder(self, rows: Tensor) -> "Prefixes":
        return Prefixes(self.table, [self.rows[row] for row in rows.tolist()], self.seen)


def step(tokens: Tensor, state: Prefixes) -> tuple[Tensor, Prefixes]:
    state.seen.append(len(tokens))
    rows = [(sentence, (*prefix, token)) for (sentence, prefix), token in zip(state.rows, tokens.tolist(), strict=True)]
    logits = torch.tensor([state.table(sentence, prefix[1:]) for sentence, prefix in rows], dtype=torch.float64)
    return logits, Prefixes(state.table, rows, state.seen)


def search(table: Table, max_lengths: list[int], beam_size: int, *, alpha: float) -> tuple[list[Hypothesis], list[int]]:
    state = Prefixes(table, [(sentence, ()) for sentence in range(len(max_lengths)) for _ in range(beam_size)])
    lengths, penalty = torch.tensor(max_lengths), length_penalty(alpha)
    found = beam_search(step, state, beam_size=beam_size, max_lengths=lengths, penalty=penalty, bos=BOS, eos=EOS)
    return found, state.seen


def exhaustive(table: Table, sentence: int, *, max_length: int, alpha: float) -> tuple[float, tuple[int, ...]]:
    """The best of all translations that end: nothing is pruned, nothing stops early."""
    pieces = [v for v in range(table.vocab_size) if v not in (PAD, BOS, EOS)]
    best = (-math.inf, ())
    for length in range(1, max_length + 1):
        for tokens in itertools.product(pieces, repeat=length - 1):
            whole = (*tokens, EOS)
            log_prob = math.fsum(table(sentence, whole[:t])[whole[t]] for t in range(length))
            best = max(best, (log_prob / ((5 + length) / 6) ** alpha, tokens))
    return best


def plain_beam(table: Table, sentence: int, *, beam_size: int, max_length: int, alpha: float) -> tuple[Hypothesis, int]:
    """The documented search for one sentence, on lists, and the number of its steps."""
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    finished: list[tuple[float, tuple[int, ...]]] = []
    for length in range(1, max_length + 1):
        candidates = [
            (score + log_prob, prefix, token)
            for score, prefix in live
            for token, log_prob in enumerate(table(sentence, prefix))
            if token not in (PAD, BOS)
        ]
        candidates = sorted(candidates, reverse=True)[: 2 * beam_size]
        for score, prefix, token in candidates[:beam_size]:
            if token == EOS:
                finished.append((score / ((5 + length) / 6) ** alpha, prefix))
        live = [(score, (*prefix, token)) for score, prefix, token in candidates if token != EOS][:beam_size]
        bound = live[0][0] / ((5 + max_length) / 6) ** alpha
        if finished and (beam_size == 1 or max(finished)[0] >= bound):
            break
    if finished:
        return Hypothesis(list(max(finished)[1]), max(finished)[0], True), length
    return Hypothesis(list(live[0][1]), live[0][0] / ((5 + max_length) / 6) ** alpha, False), length


def same(found: Hypothesis, expected: Hypothesis) -> bool:
    equal = (found.tokens, found.finished) == (expected.tokens, expected.finished)
    return equal and found.score == pytest.approx(expected.score, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("at_once", [1, 20, 45])  # of nine pieces: one row, two or five of the twelve at a time
def test_logits_looked_at_in_parts_give_the_same(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    table, lengths = Table(5, 9, eos_bias=-3.0), [7, 12, 9]
    whole, rows = search(table, lengths, 4, alpha=0.6)
    monkeypatch.setattr("transformer.decoding.search._AT_ONCE", at_once)
    assert search(table, lengths, 4, alpha=0.6) == (whole, rows)
    assert rows[0] == 12
    assert min(len(hypothesis.tokens) for hypothesis in whole) > 3


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("seed", range(6))
def test_nothing_pruned_finds_the_best_of_all(seed: int, alpha: float) -> None:
    table = Table(seed, vocab_size=6)  # 3 pieces: at most 81 prefixes at |Y| = 5, fewer than the beam
    max_lengths = [5, 1, 4, 3]
    found, _ = search(table, max_lengths, 300, alpha=alpha)
    for sentence, max_length in enumerate(max_lengths):
        score, tokens = exhaustive(table, sentence, max_length=max_length, alpha=alpha)
        assert same(found[sentence], Hypothesis(list(tokens), score, True))


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("beam_size", [1, 2, 4, 7])
def test_equals_a_plain_search_of_each_sentence(beam_size: int, alpha: float) -> None:
    table = Table(beam_size, vocab_size=12, eos_bias=-2.0)
    max_lengths = [1, 2, 25, *random.Random(9).choices(range(1, 13), k=40)]
    found, seen = search(table, max_lengths, beam_size, alpha=alpha)
    expected = [
        plain_beam(table, sentence, beam_size=beam_size, max_length=max_length, alpha=alpha)
        for sentence, max_length in enumerate(max_lengths)
    ]
    assert all(same(one, other) for one, (other, _) in zip(found, expected, strict=True))
    assert sum(seen) == beam_size * sum(steps for _, steps in expected)  # each sentence left as soon as it was done
    assert {hypothesis.finished for hypothesis in found} == {True, False}


def test_beam_1_is_greedy() -> None:
    table = Table(3, vocab_size=9)
    found, _ = search(table, [15] * 30, 1, alpha=0.6)
    for sentence, hypothesis in enumerate(found):
        prefix: list[int] = []
        while len(prefix) < 15:
            scores = table(sentence, tuple(prefix))
            prefix.append(max((v for v in range(9) if v not in (PAD, BOS)), key=scores.__getitem__))
            if prefix[-1] == EOS:
                break
        finished = prefix[-1] == EOS
        assert (hypothesis.tokens, hypothesis.finished) == (prefix[:-1] if finished else prefix, finished)


def test_lengths_and_forbidden_ids() -> None:
    table = Table(4, vocab_size=8, eos_bias=-30.0)  # it never wants to end
    max_lengths = [1, 2, 3, 10, 4]
    found, _ = search(table, max_lengths, 3, alpha=0.6)
    assert [len(hypothesis.tokens) for hypothesis in found] == max_lengths
    assert not any(hypothesis.finished for hypothesis in found)
    assert not {PAD, BOS, EOS} & {token for hypothesis in found for token in hypothesis.tokens}


def test_an_end_at_the_maximum_counts() -> None:
    class EndsAfterTwo(Table):
        def __call__(self, sentence: int, prefix: tuple[int, ...]) -> list[float]:
            wanted = EOS if len(prefix) == 2 else 5
            return [0.0 if v == wanted else -40.0 if v == EOS else -20.0 for v in range(6)]

    found, _ = search(EndsAfterTwo(0, 6), [3, 2, 4], 2, alpha=0.6)
    assert [(hypothesis.tokens, hypothesis.finished) for hypothesis in found] == [
        ([5, 5], True),
        ([5, 5], False),
        ([5, 5], True),
    ]


def test_finished_sentences_leave() -> None:
    table = Table(5, vocab_size=8, eos_bias=-30.0)
    _, seen = search(table, [2, 5, 3, 5], 3, alpha=0.6)
    assert seen == [12, 12, 9, 6, 6]


def test_stops_as_soon_as_no_live_hypothesis_can_win() -> None:
    class EndsAtOnce(Table):
        def __call__(self, sentence: int, prefix: tuple[int, ...]) -> list[float]:
            return [-0.1 if v == EOS else -3.0 for v in range(6)]

    found, seen = search(EndsAtOnce(0, 6), [50], 4, alpha=0.6)
    assert found[0].tokens == []
    assert len(seen) == 1  # -0.1 beats anything that begins with -3: -3 / ((5 + 50) / 6)^0.6 = -0.79


def test_ties_are_settled_the_same_way_every_time() -> None:
    class Flat(Table):
        def __call__(self, sentence: int, prefix: tuple[int, ...]) -> list[float]:
            return [-2.0] * 6

    results = [search(Flat(0, 6), [4] * n, 3, alpha=0.6)[0] for n in (1, 2, 5)]
    assert len({(tuple(h.tokens), h.score) for found in results for h in found}) == 1


def test_the_step_s_logits_are_left_alone() -> None:
    logits = torch.zeros(2, 6)
    state = Prefixes(Table(0, 6), [(0, ())] * 2)
    lengths = torch.tensor([3])
    beam_search(
        lambda tokens, s: (logits, s),
        state,
        beam_size=2,
        max_lengths=lengths,
        penalty=length_penalty(0.6),
        bos=BOS,
        eos=EOS,
    )
    assert torch.equal(logits, torch.zeros(2, 6))


def test_length_penalty_of_wu_et_al() -> None:
    assert length_penalty(0.6)(1) == 1.0
    assert length_penalty(0.6)(25) == pytest.approx(2.626527804403767)  # 5 ** 0.6
    assert length_penalty(0.0)(40) == 1.0


@dataclass
class Uncached:
    """Decoding without a cache: every step runs the whole decoder over the whole prefix of every row."""

    model: Transformer
    memory: Tensor  # (R, S, D)
    layout: Padded
    prefix: Tensor  # (R, t)

    def reorder(self, rows: Tensor) -> "Uncached":
        return Uncached(self.model, self.memory[rows], self.layout.select(rows), self.prefix[rows])


def uncached_step(tokens: Tensor, state: Uncached) -> tuple[Tensor, Uncached]:
    prefix = torch.cat((state.prefix, tokens.unsqueeze(1)), 1)
    layout = Padded.full_rows(prefix.shape[0], prefix.shape[1], prefix.device)
    hidden = state.model.decode(prefix, layout, memory=state.memory, memory_layout=state.layout)
    return state.model.unembed(hidden[:, -1]), Uncached(state.model, state.memory, state.layout, prefix)


@pytest.mark.parametrize("beam_size", [1, 4])
def test_cached_decoding_equals_decoding_anew(beam_size: int) -> None:
    torch.manual_seed(1)
    config = ModelConfig(n_layers=2, d_model=16, d_ff=32, n_heads=2, max_positions=40)
    model = Transformer(config, 20).double().eval()
    lengths = [7, 3, 5, 1, 7]
    layout = Padded.of(lengths, 7)
    source = torch.randint(4, 20, (5, 7))
    options = {"beam_size": beam_size, "penalty": length_penalty(0.6), "bos": BOS, "eos": EOS}
    maxima = torch.tensor([9, 14, 12, 20, 6])
    with torch.inference_mode():
        memory = model.encode(source, layout)
        start = model.start(memory, layout, beam_size=beam_size)
        cached = beam_search(model.decode_step, start, max_lengths=maxima, **options)
        rows = torch.arange(5).repeat_interleave(beam_size)
        anew = Uncached(model, memory[rows], layout.select(rows), torch.empty(5 * beam_size, 0, dtype=torch.int64))
        expected = beam_search(uncached_step, anew, max_lengths=maxima, **options)
    assert all(itertools.starmap(same, zip(cached, expected, strict=True)))
    assert len({tuple(hypothesis.tokens) for hypothesis in cached}) > 1


def test_two_early_ends_do_not_end_a_beam() -> None:
    """EOS at once and after one piece fill a beam of two with bad translations; a good long one is still alive."""
    probabilities = {
        0: {EOS: 0.3, 4: 0.7},
        1: {EOS: 0.4, 5: 0.6},
        **{length: {5: 0.999, EOS: 0.001} for length in range(2, 7)},
    }
    probabilities[7] = {EOS: 1.0}

    @dataclass
    class Depth:
        length: int = 0

        def reorder(self, rows: torch.Tensor) -> "Depth":
            return self

    def step(tokens: torch.Tensor, state: Depth) -> tuple[torch.Tensor, Depth]:
        logits = torch.full((len(tokens), 6), -math.inf, dtype=torch.float64)
        for token, probability in probabilities[state.length].items():
            logits[:, token] = math.log(probability)
        return logits, Depth(state.length + 1)

    [found] = beam_search(
        step, Depth(), beam_size=2, max_lengths=torch.tensor([9]), penalty=length_penalty(1.0), bos=BOS, eos=EOS
    )
    assert found.tokens == [4, 5, 5, 5, 5, 5, 5]
    assert found.score == pytest.approx(math.log(0.7 * 0.6 * 0.999**5) / (13 / 6))
