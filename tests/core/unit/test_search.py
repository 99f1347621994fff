"""Beam search against searches written independently: exhaustive, greedy, and a plain beam for one sentence."""

import itertools
import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from support.searches import Prefixes, Table, all_same, beam_search, exhaustive, same, step, sweep_penalties, wu
from transformer.config.settings import ModelConfig
from transformer.decoding.search import Hypothesis, length_penalty
from transformer.layout import Padded
from transformer.model.transformer import Transformer
from transformer.vocabulary import BOS, EOS, PAD

ALPHAS = (0.0, 0.6, 1.0)


def search_n_best(
    table: Table, max_lengths: list[int], beam_size: int, *, n_best: int, alpha: float
) -> tuple[list[list[Hypothesis]], list[int]]:
    """The lists of the search under test, and how many rows it asked for at each step."""
    state = Prefixes(table, [(sentence, ()) for sentence in range(len(max_lengths)) for _ in range(beam_size)])
    found = beam_search(
        step,
        state,
        beam_size=beam_size,
        n_best=n_best,
        max_lengths=torch.tensor(max_lengths, dtype=torch.int64),
        penalty=length_penalty(alpha),
        bos=BOS,
        eos=EOS,
    )
    return found, state.seen


def search(table: Table, max_lengths: list[int], beam_size: int, *, alpha: float) -> tuple[list[Hypothesis], list[int]]:
    found, seen = search_n_best(table, max_lengths, beam_size, n_best=1, alpha=alpha)
    return [best for [best] in found], seen


def plain_beam(
    table: Table,
    sentence: int,
    *,
    beam_size: int,
    n_best: int,
    max_length: int,
    alpha: float,
    stops_early: bool = True,
) -> tuple[list[Hypothesis], int]:
    """The documented search for one sentence, on lists, and the number of its steps."""
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    finished: list[tuple[float, float, tuple[int, ...]]] = []
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
                finished.append((wu(score, length, alpha), score, prefix))
        live = [(score, (*prefix, token)) for score, prefix, token in candidates if token != EOS][:beam_size]
        finished.sort(reverse=True)
        bound = wu(live[0][0], max_length, alpha)
        if stops_early and len(finished) >= n_best and (beam_size == 1 or finished[n_best - 1][0] >= bound):
            break
    found = [Hypothesis(list(tokens), log_prob, True) for _, log_prob, tokens in finished]
    found += [Hypothesis(list(tokens), log_prob, False) for log_prob, tokens in live]
    return found[:n_best], length


@pytest.mark.parametrize("at_once", [1, 20, 45])  # of nine pieces: one row, two or five of the twelve at a time
def test_beam_search_finds_the_same_with_logits_looked_at_in_parts(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, lengths = Table(5, 9, eos_bias=-3.0), [7, 12, 9]
    whole, rows = search(table, lengths, 4, alpha=0.6)
    monkeypatch.setattr("transformer.decoding.search._LOGITS_AT_ONCE", at_once)
    assert search(table, lengths, 4, alpha=0.6) == (whole, rows)
    assert rows[0] == 12
    assert min(len(hypothesis.tokens) for hypothesis in whole) > 3


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("seed", range(6))
def test_beam_search_finds_the_best_of_all_where_nothing_is_pruned(seed: int, alpha: float) -> None:
    table = Table(seed, vocab_size=6)  # 3 pieces: at most 81 prefixes at |Y| = 5, fewer than the beam
    max_lengths = [5, 1, 4, 3]
    found, _ = search(table, max_lengths, 300, alpha=alpha)
    for sentence, max_length in enumerate(max_lengths):
        assert same(found[sentence], exhaustive(table, sentence, max_length=max_length, alpha=alpha)[0])


def rows_asked(steps: list[int], beam_size: int) -> list[int]:
    """The rows of each step of a batch, if each sentence needs so many: those that are done leave by eighths."""
    rows = []
    present = steps
    for done in range(1, max(steps) + 1):
        rows.append(beam_size * len(present))
        going_on = [needed for needed in present if needed > done]
        if 8 * (len(present) - len(going_on)) >= len(present):
            present = going_on
    return rows


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("beam_size", [1, 2, 4, 7])
def test_beam_search_equals_a_plain_search_of_each_sentence(beam_size: int, alpha: float) -> None:
    table = Table(beam_size, vocab_size=12, eos_bias=-2.0)
    max_lengths = [1, 2, 25, *random.Random(9).choices(range(1, 13), k=40)]
    found, seen = search(table, max_lengths, beam_size, alpha=alpha)
    expected = [
        plain_beam(table, sentence, beam_size=beam_size, n_best=1, max_length=max_length, alpha=alpha)
        for sentence, max_length in enumerate(max_lengths)
    ]
    assert all(same(one, other) for one, ([other], _) in zip(found, expected, strict=True))
    assert seen == rows_asked([steps for _, steps in expected], beam_size)
    assert {hypothesis.finished for hypothesis in found} == {True, False}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [12, 1024, 2_005, 10_007])  # from 1,024 on, only some tokens are sorted
def test_beam_search_ranks_a_long_row_as_sorting_all_of_it_does(vocab_size: int, dtype: torch.dtype) -> None:
    """One step over rows of made-up logits, in which BOS and PAD would be the best by far."""
    torch.manual_seed(vocab_size)
    logits = (3.0 * torch.randn(40, vocab_size)).to(dtype)
    logits[:, [PAD, BOS]] = 30.0
    logits[7, 5] = logits[7, vocab_size - 1] = 29.0  # the last token, and one that shares a group with others
    found = beam_search(
        lambda tokens, state: (logits[state.rows], state),
        Rows(torch.arange(40)),
        beam_size=4,
        n_best=4,
        max_lengths=torch.ones(40, dtype=torch.int64),
        penalty=length_penalty(0.0),
        bos=BOS,
        eos=EOS,
    )

    for row, hypotheses in enumerate(found):
        wide = logits[row].double()
        log_probs = (wide - wide.logsumexp(0)).tolist()
        order = sorted((token for token in range(vocab_size) if token not in (PAD, BOS)), key=lambda t: -log_probs[t])
        ends = order.index(EOS) < 4
        assert [h.log_prob for h in hypotheses if h.finished] == (
            [pytest.approx(log_probs[EOS], abs=1e-5)] if ends else []
        )
        live = [token for token in order if token != EOS][: 4 - ends]
        expected = [log_probs[token] for token in live]
        assert [h.log_prob for h in hypotheses if not h.finished] == pytest.approx(expected, abs=1e-5)
        assert all(log_probs[h.tokens[0]] == pytest.approx(h.log_prob, abs=1e-5) for h in hypotheses if not h.finished)


@dataclass
class Rows:
    """A search state that only knows which rows it is asked about, four hypotheses a sentence."""

    rows: Tensor

    def __post_init__(self) -> None:
        self.rows = self.rows.repeat_interleave(4)

    def reorder(self, rows: Tensor) -> "Rows":
        raise AssertionError("one step needs no second")


def test_beam_search_drops_finished_sentences_together() -> None:
    """Of 32 sentences that end one after the other, an eighth leaves at a time."""
    table = Table(3, 9, eos_bias=-50.0)
    maxima = [length for length in range(1, 33)]
    rows: list[int] = []
    state = Prefixes(table, [(sentence, ()) for sentence in range(32)], rows)
    beam_search(
        step,
        state,
        beam_size=1,
        n_best=1,
        max_lengths=torch.tensor(maxima),
        penalty=length_penalty(0.6),
        bos=BOS,
        eos=EOS,
    )
    # 32 rows until 4 are done, 28 until 4 more (an eighth of 28 is 3.5), 24 until 3 more, and so on.
    assert rows[:12] == [32] * 4 + [28] * 4 + [24] * 3 + [21]
    assert rows[-9:] == [9, 9, 7, 6, 5, 4, 3, 2, 1]


def test_beam_search_with_a_beam_of_one_is_greedy() -> None:
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


def test_beam_search_keeps_to_lengths_and_allowed_ids() -> None:
    table = Table(4, vocab_size=8, eos_bias=-30.0)  # it never wants to end
    max_lengths = [1, 2, 3, 10, 4]
    found, _ = search(table, max_lengths, 3, alpha=0.6)
    assert [len(hypothesis.tokens) for hypothesis in found] == max_lengths
    assert not any(hypothesis.finished for hypothesis in found)
    assert not {PAD, BOS, EOS} & {token for hypothesis in found for token in hypothesis.tokens}


def test_beam_search_counts_an_end_at_the_maximum() -> None:
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


def test_beam_search_drops_finished_sentences() -> None:
    table = Table(5, vocab_size=8, eos_bias=-30.0)
    _, seen = search(table, [2, 5, 3, 5], 3, alpha=0.6)
    assert seen == [12, 12, 9, 6, 6]


def test_beam_search_stops_as_soon_as_no_live_hypothesis_can_win() -> None:
    class EndsAtOnce(Table):
        def __call__(self, sentence: int, prefix: tuple[int, ...]) -> list[float]:
            return [-0.1 if v == EOS else -3.0 for v in range(6)]

    found, seen = search(EndsAtOnce(0, 6), [50], 4, alpha=0.6)
    assert found[0].tokens == []
    assert len(seen) == 1  # -0.1 beats anything that begins with -3: -3 / ((5 + 50) / 6)^0.6 = -0.79


def test_beam_search_settles_ties_the_same_way_every_time() -> None:
    class Flat(Table):
        def __call__(self, sentence: int, prefix: tuple[int, ...]) -> list[float]:
            return [-2.0] * 6

    results = [search(Flat(0, 6), [4] * n, 3, alpha=0.6)[0] for n in (1, 2, 5)]
    assert len({(tuple(h.tokens), h.log_prob) for found in results for h in found}) == 1


def test_beam_search_leaves_the_logits_of_the_step_alone() -> None:
    logits = torch.zeros(2, 6)
    state = Prefixes(Table(0, 6), [(0, ())] * 2)
    lengths = torch.tensor([3])
    beam_search(
        lambda tokens, s: (logits, s),
        state,
        beam_size=2,
        n_best=1,
        max_lengths=lengths,
        penalty=length_penalty(0.6),
        bos=BOS,
        eos=EOS,
    )
    assert torch.equal(logits, torch.zeros(2, 6))


def test_length_penalty_is_that_of_wu_et_al() -> None:
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
def test_beam_search_with_a_cache_equals_decoding_anew(beam_size: int) -> None:
    torch.manual_seed(1)
    config = ModelConfig(n_layers=2, d_model=16, d_ff=32, n_heads=2, max_positions=40)
    model = Transformer(config, 20).double().eval()
    lengths = [7, 3, 5, 1, 7]
    layout = Padded.of(lengths, 7)
    source = torch.randint(4, 20, (5, 7))
    options: dict[str, Any] = {
        "beam_size": beam_size,
        "n_best": beam_size,
        "penalty": length_penalty(0.6),
        "bos": BOS,
        "eos": EOS,
    }
    maxima = torch.tensor([9, 14, 12, 20, 6])
    with torch.inference_mode():
        memory = model.encode(source, layout)
        start = model.start(memory, layout, beam_size=beam_size)
        cached = beam_search(model.decode_step, start, max_lengths=maxima, **options)
        rows = torch.arange(5).repeat_interleave(beam_size)
        anew = Uncached(model, memory[rows], layout.select(rows), torch.empty(5 * beam_size, 0, dtype=torch.int64))
        expected = beam_search(uncached_step, anew, max_lengths=maxima, **options)
    assert all(itertools.starmap(all_same, zip(cached, expected, strict=True)))
    assert len({tuple(best.tokens) for best, *_ in cached}) > 1


# --- what a beam must not lose


class Known(Table):
    """Probabilities written out for some prefixes. After any other, EOS is all but impossible and all pieces alike."""

    def __init__(self, probabilities: dict[tuple[int, ...], dict[int, float]], *, vocab_size: int = 8) -> None:
        super().__init__(0, vocab_size)
        self.probabilities = probabilities

    def __call__(self, sentence: int, prefix: tuple[int, ...]) -> list[float]:
        n_pieces = self.vocab_size - 3  # all but PAD, BOS and EOS
        alike = {v: 1.0 / n_pieces for v in range(self.vocab_size) if v not in (PAD, BOS, EOS)} | {EOS: 1e-30}
        row = self.probabilities.get(prefix, alike)
        return [math.log(row[v]) if v in row else -math.inf for v in range(self.vocab_size)]


# Both hypotheses of a beam of two end in their best continuation, and the sentence goes on well after the fourth best.
# Only 4 = 2 K candidates show it: of 3 there is one that lives on, and its continuations are poor.
BOTH_END = Known(
    {
        (): {4: 0.51, 5: 0.49},
        (4,): {EOS: 0.5, 6: 0.4, 7: 0.1},
        (5,): {EOS: 0.5, 6: 0.35, 7: 0.15},
        **{(5, *[6] * n): {6: 1.0} for n in range(1, 6)},
        (5, *[6] * 6): {EOS: 1.0},
    }
)


def test_beam_search_considers_twice_as_many_candidates_as_it_keeps() -> None:
    [found], seen = search_n_best(BOTH_END, [8], 2, n_best=2, alpha=1.0)
    assert [(hypothesis.tokens, hypothesis.finished) for hypothesis in found] == [([5] + [6] * 6, True), ([4], True)]
    assert found[0].log_prob == pytest.approx(math.log(0.49 * 0.35))  # 0.49 * 0.35 * 1^6
    assert found[1].log_prob == pytest.approx(math.log(0.51 * 0.5))
    assert len(seen) == 8


def test_beam_search_considers_more_continuations_of_one_hypothesis_than_it_keeps() -> None:
    """The first step has one hypothesis only: EOS is its best continuation, and the two after it must both live on."""
    table = Known({(): {EOS: 0.4, 4: 0.35, 5: 0.25}, (5,): {6: 1.0}, (5, 6): {6: 1.0}, (5, 6, 6): {EOS: 1.0}})
    [found], _ = search(table, [4], 2, alpha=2.0)
    assert (found.tokens, found.finished) == ([5, 6, 6], True)
    assert found.log_prob == pytest.approx(math.log(0.25))


class Steps:
    """A state that knows only how many steps there were."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def reorder(self, rows: Tensor) -> "Steps":
        return self


@pytest.mark.parametrize("ends", [False, True])
def test_beam_search_sums_in_float64_what_a_model_computes_in_float32(ends: bool) -> None:
    """Many steps of one and the same float32 log-probability, whose small multiples are exact in float64."""
    row = torch.tensor([-math.inf] * 4 + [0.0, 0.0, 0.0])  # ids 4, 5 and 6, alike
    [log_third] = set(torch.log_softmax(row, -1)[4:].tolist())  # -1.0986123 in float32
    end = torch.full((7,), -math.inf).index_fill_(0, torch.tensor(EOS), 0.0)

    def step(tokens: Tensor, state: Steps) -> tuple[Tensor, Steps]:
        logits = end if ends and state.count == 299 else row
        return logits.expand(len(tokens), 7), Steps(state.count + 1)

    [[first, second]] = beam_search(
        step,
        Steps(),
        beam_size=2,
        n_best=2,
        max_lengths=torch.tensor([300]),
        penalty=length_penalty(0.6),
        bos=BOS,
        eos=EOS,
    )
    count = 299 if ends else 300
    assert [len(first.tokens), first.finished] == [len(second.tokens), second.finished] == [count, ends]
    assert first.log_prob == second.log_prob == count * log_third


def test_beam_search_is_not_ended_by_two_early_ends() -> None:
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

    [[found]] = beam_search(
        step,
        Depth(),
        beam_size=2,
        n_best=1,
        max_lengths=torch.tensor([9]),
        penalty=length_penalty(1.0),
        bos=BOS,
        eos=EOS,
    )
    assert found.tokens == [4, 5, 5, 5, 5, 5, 5]
    assert found.log_prob == pytest.approx(math.log(0.7 * 0.6 * 0.999**5))
    assert found.score(length_penalty(1.0)) == pytest.approx(math.log(0.7 * 0.6 * 0.999**5) / (13 / 6))


# --- the n best


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("seed", range(6))
def test_beam_search_n_best_of_all_translations_where_nothing_is_pruned(seed: int, alpha: float) -> None:
    table = Table(seed, vocab_size=6)  # 3 pieces: at most 81 prefixes at |Y| = 5, fewer than the beam
    max_lengths = [5, 3, 4]
    found, _ = search_n_best(table, max_lengths, 300, n_best=13, alpha=alpha)
    for sentence, max_length in enumerate(max_lengths):
        expected = exhaustive(table, sentence, max_length=max_length, alpha=alpha)[:13]
        assert all_same(found[sentence], expected)
        assert len(found[sentence]) == 13  # 1 + 3 + 9 translations of |Y| <= 3


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize(("beam_size", "n_best"), [(2, 2), (4, 2), (4, 4), (7, 3), (7, 7)])
def test_beam_search_n_best_equals_a_plain_search_of_each_sentence(beam_size: int, n_best: int, alpha: float) -> None:
    table = Table(beam_size + n_best, vocab_size=12, eos_bias=2.0)
    max_lengths = [1, 2, 25, *random.Random(9).choices(range(1, 13), k=40)]
    found, seen = search_n_best(table, max_lengths, beam_size, n_best=n_best, alpha=alpha)
    how: dict[str, Any] = {"beam_size": beam_size, "n_best": n_best, "alpha": alpha}
    needed = []
    for sentence, max_length in enumerate(max_lengths):
        expected, steps = plain_beam(table, sentence, max_length=max_length, **how)
        unhurried, _ = plain_beam(table, sentence, max_length=max_length, stops_early=False, **how)
        assert all_same(found[sentence], expected)
        assert all_same(found[sentence], unhurried)  # to go on to the maximum changes nothing
        needed.append(steps)
    assert seen == rows_asked(needed, beam_size)
    assert sum(needed) < sum(max_lengths)
    assert {hypothesis.finished for hypotheses in found for hypothesis in hypotheses} == {True, False}


@pytest.mark.parametrize("alpha", ALPHAS)
def test_beam_search_n_best_begins_with_what_a_smaller_n_best_returns(alpha: float) -> None:
    table = Table(11, vocab_size=12, eos_bias=-1.0)
    max_lengths = random.Random(2).choices(range(1, 15), k=40)
    four, rows_of_four = search_n_best(table, max_lengths, 4, n_best=4, alpha=alpha)
    for n_best in (1, 2, 3):
        fewer, rows = search_n_best(table, max_lengths, 4, n_best=n_best, alpha=alpha)
        assert fewer == [hypotheses[:n_best] for hypotheses in four]
        assert sum(rows) < sum(rows_of_four)


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [
        (0.0, [[], [4, 4], [4], [4, 4, 4]]),  # -1.050, -1.144, -1.635, -1.991
        (0.6, [[4, 4], [], [4], [4, 4, 4]]),  # -0.963, -1.050, -1.490, -1.561
        (1.0, [[4, 4], [], [4, 4, 4], [4]]),  # -0.858, -1.050, -1.328, -1.401
        (2.0, [[4, 4], [4, 4, 4], [], [4]]),  # -0.644, -0.885, -1.050, -1.201
    ],
)
def test_beam_search_n_best_is_ordered_by_log_prob_over_penalty(alpha: float, expected: list[list[int]]) -> None:
    """Four translations, of |Y| = 1 to 4 and of probabilities 0.35, 0.195, 0.3185 and 0.1365."""
    table = Known(
        {
            (): {EOS: 0.35, 4: 0.65},
            (4,): {EOS: 0.3, 4: 0.7},
            (4, 4): {EOS: 0.7, 4: 0.3},
            (4, 4, 4): {EOS: 1.0},
        }
    )
    [found], _ = search_n_best(table, [4], 4, n_best=4, alpha=alpha)
    assert [hypothesis.tokens for hypothesis in found] == expected
    probabilities = {0: 0.35, 1: 0.195, 2: 0.3185, 3: 0.1365}
    for hypothesis in found:
        assert hypothesis.finished
        assert hypothesis.log_prob == pytest.approx(math.log(probabilities[len(hypothesis.tokens)]), rel=1e-12)


def test_beam_search_n_best_fills_up_with_unfinished_hypotheses_after_the_finished_ones() -> None:
    table = Known({(): {EOS: 0.1, 4: 0.3, 5: 0.6}})
    [three], _ = search_n_best(table, [1], 3, n_best=3, alpha=0.6)
    [all_there_are], _ = search_n_best(table, [1], 5, n_best=5, alpha=0.6)
    [best], _ = search_n_best(table, [1], 3, n_best=1, alpha=0.6)
    assert [(hypothesis.tokens, hypothesis.finished) for hypothesis in three] == [
        ([], True),
        ([5], False),
        ([4], False),
    ]
    assert [hypothesis.log_prob for hypothesis in three] == pytest.approx([math.log(p) for p in (0.1, 0.6, 0.3)])
    assert all_there_are == three  # nothing else has a probability above zero
    assert best == three[:1]


def test_beam_search_n_best_of_what_is_impossible_is_one_unfinished_hypothesis() -> None:
    [found], _ = search_n_best(Known({(): {PAD: 1.0}}), [1], 2, n_best=2, alpha=0.6)
    assert [(hypothesis.log_prob, hypothesis.finished) for hypothesis in found] == [(-math.inf, False)]


def test_beam_search_n_best_puts_what_finished_earlier_first_where_scores_are_equal() -> None:
    """Four alike at the first step; what does not end then ends at the second, with certainty."""
    table = Known({(): dict.fromkeys((EOS, 4, 5, 6), 0.25), **{(piece,): {EOS: 1.0} for piece in (4, 5, 6)}})
    [cut], _ = search_n_best(table, [1], 4, n_best=4, alpha=0.0)
    [whole], _ = search_n_best(table, [2], 4, n_best=4, alpha=0.0)
    assert len({hypothesis.log_prob for hypothesis in whole}) == 1
    assert [hypothesis.finished for hypothesis in cut] == [True, False, False, False]
    assert [hypothesis.finished for hypothesis in whole] == [True] * 4
    assert whole[0].tokens == []
    assert [hypothesis.tokens for hypothesis in whole] == [hypothesis.tokens for hypothesis in cut]  # as their parents


def test_beam_search_n_best_keeps_a_sentence_until_nothing_can_enter_its_list() -> None:
    """After one step: 0.9 has ended, 0.1 lives. The best is certain by then; the second best is still to come."""
    table = Known({(): {EOS: 0.9, 4: 0.1}, (4,): {EOS: 0.5, 5: 0.5}, (4, 5): {EOS: 1.0}})
    for n_best, expected, n_steps in [(1, [[]], 1), (2, [[], [4, 5]], 3)]:
        [found], seen = search_n_best(table, [3], 2, n_best=n_best, alpha=0.6)
        assert [hypothesis.tokens for hypothesis in found] == expected
        assert len(seen) == n_steps


@pytest.mark.parametrize("n_best", [-1, 0, 3])
def test_beam_search_n_best_must_fit_the_beam(n_best: int) -> None:
    with pytest.raises(ValueError, match=rf"n_best={n_best} must be from 1 to beam_size=2"):
        search_n_best(Table(0, 6), [3], 2, n_best=n_best, alpha=0.6)


def test_beam_search_of_no_sentence_returns_nothing() -> None:
    assert search_n_best(Table(0, 6), [], 2, n_best=1, alpha=0.6) == ([], [])


def test_hypothesis_score_counts_the_end_of_a_finished_one() -> None:
    penalty = length_penalty(1.0)
    assert Hypothesis([4, 5], -2.0, True).score(penalty) == pytest.approx(-1.5)  # |Y| = 3: 8 / 6
    assert Hypothesis([4, 5], -2.0, False).score(penalty) == pytest.approx(-12 / 7)  # |Y| = 2: 7 / 6
    assert [Hypothesis([4, 5], -2.0, finished).length for finished in (True, False)] == [3, 2]


# --- several penalties at once

SWEPT = (0.0, 0.6, 1.0, 2.5, 20.0)


def search_sweep(
    table: Table, max_lengths: list[int], beam_size: int, *, alphas: tuple[float, ...]
) -> tuple[list[list[Hypothesis]], list[int]]:
    """For each sentence the best of each alpha, and how many rows the search asked for at each step."""
    state = Prefixes(table, [(sentence, ()) for sentence in range(len(max_lengths)) for _ in range(beam_size)])
    found = sweep_penalties(
        step,
        state,
        beam_size=beam_size,
        max_lengths=torch.tensor(max_lengths, dtype=torch.int64),
        penalties=[length_penalty(alpha) for alpha in alphas],
        bos=BOS,
        eos=EOS,
    )
    return found, state.seen


@pytest.mark.parametrize("seed", range(4))
def test_sweep_penalties_finds_the_best_of_all_where_nothing_is_pruned(seed: int) -> None:
    table = Table(seed, vocab_size=6)  # 3 pieces: at most 81 prefixes at |Y| = 5, fewer than the beam
    max_lengths = [5, 1, 4, 3]
    found, _ = search_sweep(table, max_lengths, 300, alphas=SWEPT)
    for sentence, max_length in enumerate(max_lengths):
        expected = [exhaustive(table, sentence, max_length=max_length, alpha=alpha)[0] for alpha in SWEPT]
        assert all_same(found[sentence], expected)
    assert any(len({tuple(best.tokens) for best in of_one}) > 1 for of_one in found), "the penalties disagree"


@pytest.mark.parametrize("eos_bias", [-3.0, 0.0, 2.0])
@pytest.mark.parametrize("beam_size", [1, 2, 4, 7])
def test_sweep_penalties_equals_a_search_of_each_alone(beam_size: int, eos_bias: float) -> None:
    """To the bit; and each sentence is searched until the last penalty is decided, no longer."""
    table = Table(beam_size, vocab_size=12, eos_bias=eos_bias)
    max_lengths = [1, 2, 25, *random.Random(9).choices(range(1, 13), k=40)]
    found, seen = search_sweep(table, max_lengths, beam_size, alphas=SWEPT)
    for n, alpha in enumerate(SWEPT):
        assert [of_one[n] for of_one in found] == search(table, max_lengths, beam_size, alpha=alpha)[0]

    needed = []
    for sentence, max_length in enumerate(max_lengths):
        how: dict[str, Any] = {"beam_size": beam_size, "n_best": 1, "max_length": max_length}
        plain = [plain_beam(table, sentence, alpha=alpha, **how) for alpha in SWEPT]
        assert all_same(found[sentence], [best for [best], _ in plain])
        needed.append(max(steps for _, steps in plain))
    assert seen == rows_asked(needed, beam_size)


def test_sweep_penalties_of_a_beam_of_one_ends_at_the_first_end() -> None:
    """Whatever alpha: a large one would have gone on in a wider beam, which knows no first end."""
    table = Known({(): {EOS: 0.6, 4: 0.4}, (4,): {5: 1.0}, (4, 5): {5: 1.0}, (4, 5, 5): {EOS: 1.0}})
    [greedy], seen = search_sweep(table, [6], 1, alphas=SWEPT)
    assert [hypothesis.tokens for hypothesis in greedy] == [[]] * len(SWEPT)
    assert seen == [1]
    [wider], _ = search_sweep(table, [6], 2, alphas=SWEPT)
    assert [hypothesis.tokens for hypothesis in wider] == [[], [], [], [4, 5, 5], [4, 5, 5]]


def test_sweep_penalties_keeps_what_was_decided_before_a_tie() -> None:
    """At alpha 0 the empty translation scores as the one of two pieces, which ends later: the earlier one stays."""
    table = Known({(): {EOS: 0.5, 4: 0.5}, (4,): {4: 1.0}, (4, 4): {EOS: 1.0}})
    [found], seen = search_sweep(table, [4], 2, alphas=(0.0, 1.0))
    assert [hypothesis.tokens for hypothesis in found] == [[], [4, 4]]
    assert len(seen) == 3


@pytest.mark.parametrize("beam_size", [1, 4])
def test_sweep_penalties_over_a_transformer_equals_a_search_of_each_alone(beam_size: int) -> None:
    torch.manual_seed(0)
    config = ModelConfig(n_layers=2, d_model=16, d_ff=32, n_heads=2, max_positions=40)
    model = Transformer(config, 12).double().eval()
    with torch.no_grad():
        model.output.mul_(4.0)  # sharper than a new model: some sentences end
    lengths = [7, 3, 5, 1, 7, 6, 2, 4]
    layout = Padded.of(lengths, 7)
    options: dict[str, Any] = {"beam_size": beam_size, "max_lengths": torch.tensor([9, 14, 12, 20, 6, 16, 8, 11])}
    with torch.inference_mode():
        memory = model.encode(torch.randint(4, 12, (8, 7)), layout)
        start = model.start(memory, layout, beam_size=beam_size)
        penalties = [length_penalty(alpha) for alpha in SWEPT]
        swept = sweep_penalties(model.decode_step, start, penalties=penalties, bos=BOS, eos=EOS, **options)
        for n, penalty in enumerate(penalties):
            alone = beam_search(model.decode_step, start, n_best=1, penalty=penalty, bos=BOS, eos=EOS, **options)
            assert all_same([of_one[n] for of_one in swept], [best for [best] in alone])
    assert {hypothesis.finished for of_one in swept for hypothesis in of_one} == {True, False}
    different = sum(len({tuple(best.tokens) for best in of_one}) for of_one in swept)
    assert different == {1: 8, 4: 16}[beam_size], "of 8 sentences: in a beam of four the penalties disagree"


def test_sweep_penalties_of_no_sentence_returns_nothing() -> None:
    assert search_sweep(Table(0, 6), [], 2, alphas=SWEPT) == ([], [])


def test_sweep_penalties_needs_a_penalty() -> None:
    with pytest.raises(ValueError, match="penalties is empty"):
        search_sweep(Table(0, 6), [3], 2, alphas=())
