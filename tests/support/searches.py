"""Tiny models that are tables of probabilities, and an exhaustive search of them."""

import itertools
import math
import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from transformer.decoding.search import Hypothesis
from transformer.vocabulary import BOS, EOS, PAD


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


def wu(log_prob: float, length: int, alpha: float) -> float:
    """The score of a hypothesis, |Y| = length, as Wu et al. (2016) write it."""
    return log_prob / ((5 + length) / 6) ** alpha


def exhaustive(table: Table, sentence: int, *, max_length: int, alpha: float) -> list[Hypothesis]:
    """All translations that end, the best first: nothing is pruned, nothing stops early."""
    pieces = [v for v in range(table.vocab_size) if v not in (PAD, BOS, EOS)]
    scored = []
    for length in range(1, max_length + 1):
        for tokens in itertools.product(pieces, repeat=length - 1):
            whole = (*tokens, EOS)
            log_prob = math.fsum(table(sentence, whole[:t])[whole[t]] for t in range(length))
            scored.append((wu(log_prob, length, alpha), log_prob, tokens))
    return [Hypothesis(list(tokens), log_prob, True) for _, log_prob, tokens in sorted(scored, reverse=True)]


def same(found: Hypothesis, expected: Hypothesis) -> bool:
    equal = (found.tokens, found.finished) == (expected.tokens, expected.finished)
    return equal and found.log_prob == pytest.approx(expected.log_prob, rel=1e-12, abs=1e-12)


def all_same(found: list[Hypothesis], expected: list[Hypothesis]) -> bool:
    return len(found) == len(expected) and all(itertools.starmap(same, zip(found, expected, strict=True)))
