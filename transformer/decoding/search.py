"""Beam search (section 6.1), over anything that maps last tokens and a state to logits: it knows no Transformer.

`B` sentences still searched, `K` beam_size, `C` candidates of a sentence (2 K), `V` vocabulary, `L` the longest
hypothesis allowed. All bookkeeping stays on the device; each step asks the host one question: has a sentence finished?
The surprise: log-probabilities are summed in float64 whatever the model's arithmetic, which costs nothing at this size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from transformer.vocabulary import PAD


class State(Protocol):
    """What a model remembers of the hypotheses it has read."""

    def reorder(self, rows: Tensor) -> Self:
        """The state of these rows; whole sentences may leave, those that stay keep K adjacent rows."""
        ...


S = TypeVar("S", bound=State)
_NONE = -math.inf  # the log-probability of an empty place in a beam
_AT_ONCE = 2**20  # logits that a CPU looks at


@dataclass(frozen=True)
class Hypothesis:
    """A translation: ids without BOS and EOS, its log-probability / penalty(|Y|), and whether it reached EOS."""

    tokens: list[int]
    score: float
    finished: bool


def length_penalty(alpha: float) -> Callable[[int], float]:
    """`((5 + |Y|) / 6)^alpha` (section 6.1; Wu et al., 2016, eq. 14)."""
    return lambda length: ((5.0 + length) / 6.0) ** alpha


@dataclass
class _Beams:
    """What is known of each sentence. The best finished hypothesis has length -1 while there is none."""

    number: Tensor  # (B,) the sentence's place in the result
    max_length: Tensor  # (B,)
    max_penalty: Tensor  # (B,) the penalty at that length
    scores: Tensor  # (B, K) log-probabilities of the live hypotheses, the best first
    tokens: Tensor  # (B, K, L) what they consist of so far
    best_score: Tensor  # (B,) normalised
    best_length: Tensor  # (B,) without EOS
    best_tokens: Tensor  # (B, L)

    def select(self, sentences: Tensor) -> "_Beams":
        return _Beams(*(getattr(self, field.name)[sentences] for field in fields(self)))


def _start(max_lengths: Tensor, penalty: Callable[[int], float], *, beam_size: int) -> _Beams:
    """Beams that hold the empty hypothesis once: K equal ones would stay equal for ever."""
    lengths = max_lengths.tolist()
    n, longest, device = len(lengths), max(lengths), max_lengths.device
    scores = torch.full((n, beam_size), _NONE, dtype=torch.float64, device=device)
    scores[:, 0] = 0.0
    return _Beams(
        number=torch.arange(n, device=device),
        max_length=max_lengths,
        max_penalty=torch.tensor([penalty(length) for length in lengths], dtype=torch.float64, device=device),
        scores=scores,
        tokens=torch.zeros(n, beam_size, longest, dtype=torch.int64, device=device),
        best_score=torch.full((n,), _NONE, dtype=torch.float64, device=device),
        best_length=torch.full_like(max_lengths, -1),
        best_tokens=torch.zeros(n, longest, dtype=torch.int64, device=device),
    )


def beam_search(
    step: Callable[[Tensor, S], tuple[Tensor, S]],
    state: S,
    *,
    beam_size: int,
    max_lengths: Tensor,
    penalty: Callable[[int], float],
    bos: int,
    eos: int,
) -> list[Hypothesis]:
    """The best hypothesis of each sentence, by log-probability / penalty(|Y|), where |Y| counts EOS.

    `step` maps the last token of each hypothesis `(B K,)` and a state to the logits of the next `(B K, V)` and the
    state after it; `max_lengths` `(B,)` holds the largest |Y| of each sentence, at least 1. PAD and BOS are never
    produced.

    At each step the 2 K best continuations of a sentence are considered in order. One that is EOS finishes a hypothesis
    if it ranks among the first K; the first K that are not EOS live on. A sentence is done, and leaves, when

    - the best finished hypothesis scores at least best live log-probability / penalty(maximum): no live one can
      overtake it then, as long as the penalty does not fall with length, or
    - |Y| is at its maximum, where nothing lives on. If none has finished by then, the best that would have lived on is
      returned, unfinished.

    With K = 1 this is greedy search. Of equal scores, the one whose hypothesis ranked higher goes first; within a
    hypothesis, `topk` decides.
    """
    beams = _start(max_lengths, penalty, beam_size=beam_size)
    found: dict[int, Hypothesis] = {}
    n, longest = beams.tokens.shape[0], beams.tokens.shape[2]
    tokens = torch.full((n * beam_size,), bos, device=max_lengths.device)
    banned = torch.tensor([PAD, bos], device=max_lengths.device)
    for length in range(1, longest + 1):
        logits, state = step(tokens, state)  # (B K, V)
        scores, parents, tokens = _candidates(logits, beams.scores, banned=banned)  # each (B, C)
        ends = tokens == eos
        _finish(beams, torch.where(ends, scores, _NONE), parents, length=length, penalty=penalty(length))
        parents, tokens = _live_on(beams, (scores, parents, tokens), ends, length=length)  # each (B, K)
        done = beams.best_score >= beams.scores[:, 0] / beams.max_penalty
        if beam_size == 1:
            done |= beams.best_length >= 0  # greedy search: what lives on was not the best continuation
        done |= beams.max_length <= length
        leaving = done.nonzero().squeeze(1)
        if len(leaving):
            found |= _results(beams.select(leaving), length=length, penalty=penalty(length))
            staying = (~done).nonzero().squeeze(1)
            beams, tokens, rows = beams.select(staying), tokens[staying], _rows(parents)[staying]
        else:
            rows = _rows(parents)
        if len(found) == n:
            break
        tokens = tokens.flatten()
        if beam_size > 1 or len(leaving):
            state = state.reorder(rows.flatten())
    return [found[number] for number in range(n)]


def _candidates(logits: Tensor, live: Tensor, *, banned: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The best 2 K continuations of each sentence, in order: log-probabilities, parents (0..K-1) and tokens, `(B, C)`.

    The 2 K best of a sentence are among the 2 K best of each of its hypotheses, so only those are ever sorted.
    """
    n, beam_size = live.shape
    width = min(2 * beam_size, logits.shape[1])
    best, tokens = _best(logits, width, banned=banned)  # (B K, C)
    total = (live.unsqueeze(2) + best.view(n, beam_size, width)).flatten(1)  # (B, K C)
    total, order = total.sort(dim=1, descending=True, stable=True)
    order = order[:, : 2 * beam_size]
    return total[:, : 2 * beam_size], order // width, tokens.view(n, -1).gather(1, order)


def _best(logits: Tensor, count: int, *, banned: Tensor) -> tuple[Tensor, Tensor]:
    """The `count` largest log-probabilities of each row, and which they are; a CPU takes a few rows at a time.

    For all of them at once there is no room in its caches, and the C library would fetch fresh memory at each step.
    """
    dtype = torch.float64 if logits.dtype is torch.float64 else torch.float32
    rows = max(1, _AT_ONCE // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    best = [x.log_softmax(-1, dtype=dtype).index_fill_(1, banned, _NONE).topk(count) for x in torch.split(logits, rows)]
    return torch.cat([part.values for part in best]), torch.cat([part.indices for part in best])


def _finish(beams: _Beams, ending: Tensor, parents: Tensor, *, length: int, penalty: float) -> None:
    """Note the hypotheses that end here; `ending` `(B, C)` is their log-probability, -inf where one goes on."""
    ending = ending[:, : beams.scores.shape[1]]
    best, place = ending.max(1)
    score = best / penalty
    better = score > beams.best_score
    ended = _take(beams.tokens, parents.gather(1, place.unsqueeze(1))).squeeze(1)  # (B, L)
    beams.best_score = torch.where(better, score, beams.best_score)
    beams.best_length = torch.where(better, length - 1, beams.best_length)
    beams.best_tokens = torch.where(better.unsqueeze(1), ended, beams.best_tokens)


def _live_on(
    beams: _Beams, candidates: tuple[Tensor, Tensor, Tensor], ends: Tensor, *, length: int
) -> tuple[Tensor, Tensor]:
    """Put the first K candidates that do not end into the beams; returns their parents and tokens, `(B, K)`."""
    first = ends.byte().sort(dim=1, stable=True).indices[:, : beams.scores.shape[1]]
    scores, parents, tokens = (candidate.gather(1, first) for candidate in candidates)
    beams.scores, beams.tokens = scores, _take(beams.tokens, parents)
    beams.tokens[:, :, length - 1] = tokens
    return parents, tokens


def _take(tokens: Tensor, parents: Tensor) -> Tensor:
    """Of `(B, K, L)`, the hypotheses `parents` `(B, N)`, as `(B, N, L)`."""
    return tokens.gather(1, parents.unsqueeze(2).expand(-1, -1, tokens.shape[2]))


def _rows(parents: Tensor) -> Tensor:
    """Places within a sentence's beam as rows of the whole batch."""
    n, beam_size = parents.shape
    return parents + beam_size * torch.arange(n, device=parents.device).unsqueeze(1)


def _results(beams: _Beams, *, length: int, penalty: float) -> dict[int, Hypothesis]:
    """The best hypothesis of each of these sentences, which are done."""
    finished = zip(beams.best_length.tolist(), beams.best_score.tolist(), beams.best_tokens.tolist(), strict=True)
    live = zip((beams.scores[:, 0] / penalty).tolist(), beams.tokens[:, 0, :length].tolist(), strict=True)
    return {
        number: Hypothesis(tokens[:end], score, True) if end >= 0 else Hypothesis(cut, cut_score, False)
        for number, (end, score, tokens), (cut_score, cut) in zip(beams.number.tolist(), finished, live, strict=True)
    }
