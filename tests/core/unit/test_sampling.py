"""Sampling against exact distributions of tiny models, written out here; and that a draw is nobody else's."""

import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from support.searches import Prefixes, Table, step
from support.translations import SEARCH, sentences
from transformer.decoding.sampling import Sampling, sample, sampling_weights
from transformer.decoding.search import Hypothesis
from transformer.decoding.translator import Translator
from transformer.errors import InputError
from transformer.vocabulary import BOS, EOS, PAD

PLAIN = Sampling(temperature=1.0, top_k=None, top_p=None, seed=1)
BANNED = torch.tensor([PAD, BOS])


def draw(
    table: Table, sampling: Sampling, n_samples: int, *, max_lengths: list[int], prefixes: list[list[int]] | None = None
) -> list[list[Hypothesis]]:
    rows: list[tuple[int, tuple[int, ...]]] = [
        (sentence, ()) for sentence in range(len(max_lengths)) for _ in range(n_samples)
    ]
    return sample(
        step,
        Prefixes(table, rows),
        sampling=sampling,
        n_samples=n_samples,
        sentences=list(range(100, 100 + len(max_lengths))),
        max_lengths=torch.tensor(max_lengths),
        prefixes=None if prefixes is None else torch.tensor(prefixes),
        bos=BOS,
        eos=EOS,
    )


def all_translations(table: Table, sentence: int, max_length: int) -> dict[tuple[int, ...], float]:
    """The probability of each translation, of those without PAD and BOS: the definition, piece by piece."""
    allowed = [token for token in range(table.vocab_size) if token not in (PAD, BOS)]
    found: dict[tuple[int, ...], float] = {}
    pieces = [token for token in allowed if token != EOS]
    for length in range(max_length + 1):
        for tokens in itertools.product(pieces, repeat=length):
            whole = tokens if length == max_length else (*tokens, EOS)
            probability = 1.0
            for t, token in enumerate(whole):
                at = [math.exp(table(sentence, whole[:t])[v]) for v in range(table.vocab_size)]
                probability *= at[token] / sum(at[v] for v in allowed)
            found[whole] = probability
    assert math.fsum(found.values()) == pytest.approx(1.0)
    return found


def chi_square(counts: Counter[Any], expected: dict[Any, float], total: int) -> tuple[float, int]:
    """The statistic, with outcomes expected fewer than five times as one, and the degrees of freedom."""
    rare = {key for key, p in expected.items() if p * total < 5}
    cells = [(counts[key], p * total) for key, p in expected.items() if key not in rare]
    if rare:
        cells.append((sum(counts[key] for key in rare), total * math.fsum(expected[key] for key in rare)))
    return sum((seen - mean) ** 2 / mean for seen, mean in cells), len(cells) - 1


def whole(hypothesis: Hypothesis) -> tuple[int, ...]:
    return (*hypothesis.tokens, EOS) if hypothesis.finished else tuple(hypothesis.tokens)


def test_sample_draws_translations_as_often_as_they_are_probable() -> None:
    """40 outcomes, 4,000 samples, one seed: chi-square below its mean plus four standard deviations."""
    table = Table(1, vocab_size=7)
    [found] = draw(table, PLAIN, 4_000, max_lengths=[3])
    expected = all_translations(table, 0, 3)
    counts = Counter(whole(one) for one in found)
    assert set(counts) <= set(expected)
    statistic, freedom = chi_square(counts, expected, 4_000)
    assert freedom > 15
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)
    uniform, _ = chi_square(counts, dict.fromkeys(expected, 1 / len(expected)), 4_000)
    assert uniform > 50 * statistic, "the test can tell one distribution from another"


def test_sample_log_prob_is_the_models_own() -> None:
    table = Table(2, vocab_size=7)
    for sampling in (PLAIN, Sampling(temperature=0.5, top_k=3, top_p=0.9, seed=2)):
        for one in draw(table, sampling, 20, max_lengths=[4])[0]:
            tokens = whole(one)
            expected = math.fsum(table(0, tokens[:t])[token] for t, token in enumerate(tokens))
            assert one.log_prob == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "expected"),
    [
        (1.0, None, None, [0.4, 0.3, 0.2, 0.1]),
        (0.5, None, None, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),  # squares
        (1e-300, None, None, [1, 0, 0, 0]),
        (1e300, None, None, [0.25, 0.25, 0.25, 0.25]),
        (1.0, 2, None, [4 / 7, 3 / 7, 0, 0]),
        (1.0, 1, None, [1, 0, 0, 0]),
        (1.0, 100, 1.0, [0.4, 0.3, 0.2, 0.1]),
        (1.0, None, 0.39, [1, 0, 0, 0]),
        (1.0, None, 0.69, [4 / 7, 3 / 7, 0, 0]),
        (1.0, None, 0.71, [4 / 9, 3 / 9, 2 / 9, 0]),
        (1.0, 2, 0.55, [1, 0, 0, 0]),  # of the two left, the first has 4/7
        (1.0, 2, 0.6, [4 / 7, 3 / 7, 0, 0]),
        (0.5, None, 0.55, [16 / 25, 9 / 25, 0, 0]),
    ],
)
def test_sampling_weights_are_those_of_the_definition(
    temperature: float, top_k: int | None, top_p: float | None, expected: list[float]
) -> None:
    """Four tokens of 0.4, 0.3, 0.2 and 0.1, in another order; PAD and BOS, which would be the likeliest, have none."""
    values = [50.0, math.log(0.2), 60.0, math.log(0.1), math.log(0.4), math.log(0.3)]
    logits = torch.tensor([values], dtype=torch.float64)
    found = sampling_weights(logits, Sampling(temperature, top_k, top_p, 1), banned=BANNED)[0]
    assert [found[0], found[2]] == [0.0, 0.0]
    shares = (found / found.sum())[[4, 5, 1, 3]].tolist()
    assert shares == pytest.approx(expected, abs=1e-12)


def test_sample_depends_on_seed_sentence_sample_and_step_alone() -> None:
    """Not on how many samples there are, nor on the other sentences, which stop at other times."""
    table = Table(3, vocab_size=30, eos_bias=-1.0)
    many = draw(table, PLAIN, 6, max_lengths=[9, 2, 12])
    assert [of_one[:2] for of_one in many] == draw(table, PLAIN, 2, max_lengths=[9, 2, 12])
    assert many[0] == draw(table, PLAIN, 6, max_lengths=[9])[0]
    assert many != draw(table, replace(PLAIN, seed=2), 6, max_lengths=[9, 2, 12])
    assert len({tuple(one.tokens) for one in many[2]}) == 6
    assert max(len(one.tokens) for one in many[1]) == 2


def test_sample_begins_with_the_prefix() -> None:
    table = Table(4, vocab_size=12)
    found = draw(table, PLAIN, 30, max_lengths=[6, 6, 6], prefixes=[[5, 7], [4, PAD], [PAD, PAD]])
    free = draw(table, PLAIN, 30, max_lengths=[6, 6, 6])
    assert all(one.tokens[:2] == [5, 7] for one in found[0])
    assert all(one.tokens[:1] == [4] for one in found[1])
    assert found[2] == free[2]
    for one in found[0]:
        tokens = whole(one)
        assert one.log_prob == pytest.approx(math.fsum(table(0, tokens[:t])[v] for t, v in enumerate(tokens)))


# --- over a Transformer


def test_translator_sample_is_the_same_whatever_the_batch(translator: Translator) -> None:
    texts = [*sentences(20), "", *sentences(5)]
    how: dict[str, Any] = {"temperature": 0.8, "top_k": 10, "top_p": 0.95, "seed": 5}
    small = translator.with_search(replace(SEARCH, batch_tokens=1))
    together = translator.sample(texts, 3, **how)
    assert [[one.text for one in of_one] for of_one in small.sample(texts, 3, **how)] == [
        [one.text for one in of_one] for of_one in together
    ]
    rest = translator.sample(texts[7:], 3, first_line=8, **how)
    assert [[one.text for one in of_one] for of_one in rest] == [
        [one.text for one in of_one] for of_one in together[7:]
    ]
    assert [one.text for one in together[20]] == [""]
    assert len({one.text for of_one in together for one in of_one}) > 60

    other = translator.sample(texts, 3, **how | {"seed": 6})
    assert sum(a == b for a, b in zip(other, together, strict=True)) <= 2


def test_translator_sample_of_one_piece_is_greedy_search(translator: Translator) -> None:
    greedy = translator.with_search(replace(SEARCH, beam_size=1))
    texts = sentences(12)
    assert [one.text for [one] in translator.sample(texts, 1, top_k=1)] == greedy.translate(texts)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": 0.0}, r"^temperature=0\.0 must be above 0, and finite"),
        ({"temperature": math.nan}, "^temperature=nan must be above 0"),
        ({"temperature": "1"}, "^temperature='1' must be a number"),
        ({"top_k": 0}, "^top_k=0 must be at least 1"),
        ({"top_p": 0.0}, r"^top_p=0\.0 must be in \(0, 1\]"),
        ({"seed": -1}, "^seed=-1 must be at least 0"),
        ({"n_samples": 0}, "^n_samples=0 must be from 1 to 1024"),
        ({"n_samples": 2.5}, r"^n_samples=2\.5 must be a whole number"),
    ],
)
def test_translator_sample_refuses(translator: Translator, given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        translator.sample(["a dog"], **{"n_samples": 1} | given)
