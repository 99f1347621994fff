"""Tiny models that are tables of probabilities, and an exhaustive search of them."""

import itertools
import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from transformer.decoding import search
from transformer.decoding.buffers import Arena
from transformer.decoding.ensemble import EnsembleState, decode_step
from transformer.decoding.replay import Replay
from transformer.decoding.search import Hypothesis
from transformer.model.transformer import DecoderState
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

    # As buffers, which are lists.

    def shape(self) -> None:
        return None

    def fixed(self, arena: Arena, *, sentences: int, positions: int) -> "Prefixes":
        beam_size = len(self.rows) // len({sentence for sentence, _ in self.rows})
        return Prefixes(self.table, self.rows[:1] * (sentences * beam_size), self.seen)

    def fill(self, state: "Prefixes") -> None:
        self.rows[: len(state.rows)] = state.rows

    def reading(self, positions: int) -> "Prefixes":
        return self

    def keep(self, after: "Prefixes") -> None:
        self.rows[:] = after.rows


def step(tokens: Tensor, state: Prefixes) -> tuple[Tensor, Prefixes]:
    state.seen.append(len(tokens))
    rows = [(sentence, (*prefix, token)) for (sentence, prefix), token in zip(state.rows, tokens.tolist(), strict=True)]
    logits = torch.tensor([state.table(sentence, prefix[1:]) for sentence, prefix in rows], dtype=torch.float64)
    return logits, Prefixes(state.table, rows, state.seen)


PLACES = (2, 5, 16, 50)  # for sentences of a search whose tensors stay where they are


def beam_search(taken: Any, state: Any, **how: Any) -> list[list[Hypothesis]]:
    """`beam_search`, which has to find the same where its tensors stay where they are."""
    fixed = _in_buffers(taken, state)
    found = search.beam_search(taken, state, **how)
    if fixed is not None:
        again = search.beam_search(*fixed, **how, loop=Replay(torch.device("cpu"), places=PLACES))
        assert all(itertools.starmap(all_same, zip(again, found, strict=True)))
    return found


def sweep_penalties(taken: Any, state: Any, **how: Any) -> list[list[Hypothesis]]:
    """`sweep_penalties`, likewise."""
    fixed = _in_buffers(taken, state)
    found = search.sweep_penalties(taken, state, **how)
    if fixed is not None:
        again = search.sweep_penalties(*fixed, **how, loop=Replay(torch.device("cpu"), places=PLACES))
        assert all(itertools.starmap(all_same, zip(again, found, strict=True)))
    return found


def _in_buffers(taken: Any, state: Any) -> tuple[Any, Any] | None:
    """A step and a state that can be put into buffers, for the same search; None where there are none."""
    match state:
        case Prefixes() if taken is step:
            return step, Prefixes(state.table, list(state.rows))
        case DecoderState():
            return lambda tokens, states: decode_step([taken.__self__], tokens, states), EnsembleState([state])
        case EnsembleState(states=[DecoderState(), *_]):
            return taken, state
        case EnsembleState():
            tables: list[Any] = state.states
            copies: list[Any] = [Prefixes(part.table, list(part.rows)) for part in tables]
            return taken, TableStates(copies)
        case _:
            return None


class TableStates(EnsembleState):
    """Of an ensemble of tables."""

    def reorder(self, rows: Tensor) -> "TableStates":
        return TableStates([state.reorder(rows) for state in self.states])

    def shape(self) -> None:
        return None

    def fixed(self, arena: Arena, *, sentences: int, positions: int) -> "TableStates":
        states: list[Any] = [state.fixed(arena, sentences=sentences, positions=positions) for state in self._tables()]
        return TableStates(states)

    def fill(self, state: EnsembleState) -> None:
        for own, other in zip(self._tables(), state.states, strict=True):
            own.fill(other)

    def reading(self, positions: int) -> "TableStates":
        return self

    def keep(self, after: EnsembleState) -> None:
        for own, other in zip(self._tables(), after.states, strict=True):
            own.keep(other)

    def _tables(self) -> list[Any]:
        return list(self.states)


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
