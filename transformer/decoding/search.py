"""Beam search (section 6.1) over any model: it asks for logits, given last tokens and a state that the model passes on.

Shapes: `B` sentences that are still searched, `K` beam_size, `A` length penalties, `N` n_best, `C` candidates of a
sentence (2 K), `V` vocabulary, `L` the largest of the maximum lengths.

What is known of the sentences is a value: each part of a step makes new beams from the old ones. It stays on the
device, and the host asks one question a step: which sentences are done? Log-probabilities are summed in float64
whatever the model computes in, because a float32 sum over a long sentence loses the digits that tell two hypotheses
apart; at this size it costs nothing.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from transformer.compute import at_least_fp32
from transformer.vocabulary import PAD

_IMPOSSIBLE = -math.inf  # the log-probability and the score of a place in a beam that nothing fills
_LOGITS_AT_ONCE = 2**18  # that a CPU looks at together: as many as its cache has room for
_GROUP_SIZE = 16  # of the groups that the logits of a row are dealt out to, to find the largest

# Sentences that are done stay in the batch, where what they do is ignored, until they are this share of it: moving the
# others together costs as much as a part of a step, and every new size of a batch costs a CPU time, too.
LEAVING_SHARE = 1 / 8


class State(Protocol):
    """What a model remembers of the hypotheses it has read, one row for each."""

    def reorder(self, rows: Tensor) -> Self:
        """The state of these rows. Whole sentences may leave; those that stay keep K adjacent rows."""
        ...


S = TypeVar("S", bound=State)


@dataclass(frozen=True)
class Hypothesis:
    """A translation, as the search found it.

    `tokens` are ids without BOS and EOS. `log_prob` is the sum of their log-probabilities, and of that of EOS where the
    hypothesis is `finished`, which means that it ended in EOS. It is not divided by the length penalty.
    """

    tokens: list[int]
    log_prob: float
    finished: bool

    @property
    def length(self) -> int:
        """|Y|, the number of log-probabilities in the sum: EOS counts."""
        return len(self.tokens) + 1 if self.finished else len(self.tokens)

    def score(self, penalty: Callable[[int], float]) -> float:
        """log_prob / penalty(|Y|), by which the search ranks hypotheses."""
        return self.log_prob / penalty(self.length)


def length_penalty(alpha: float) -> Callable[[int], float]:
    """`((5 + |Y|) / 6)^alpha` (section 6.1; Wu et al., 2016, eq. 14)."""
    return lambda length: ((5.0 + length) / 6.0) ** alpha


def beam_search(
    step: Callable[[Tensor, S], tuple[Tensor, S]],
    state: S,
    *,
    beam_size: int,
    n_best: int,
    max_lengths: Tensor,
    penalty: Callable[[int], float],
    bos: int,
    eos: int,
    prefixes: Tensor | None = None,
) -> list[list[Hypothesis]]:
    """The `n_best` best hypotheses of each sentence, the best first, by log-probability / penalty(|Y|).

    `step` maps the last token of each hypothesis `(B K,)` and a state to the logits of the next token `(B K, V)` and
    the state after it. `max_lengths` `(B,)` holds the largest |Y| of each sentence, at least 1. |Y| counts EOS. PAD and
    BOS are never produced. Raises ValueError unless 1 <= n_best <= beam_size.

    `prefixes` `(B, P)` holds tokens that each hypothesis of a sentence has to begin with, and PAD behind them; fewer
    than its maximum length. Their log-probabilities count, as those of all tokens do.

    At each step the 2 K best continuations of a sentence are considered in order. One that is EOS finishes a hypothesis
    if it ranks among the first K; the first K that are not EOS live on. A sentence is done, and leaves, when

    - its n-th best finished hypothesis scores at least best live log-probability / penalty(maximum): no live one can
      enter the list then, as long as the penalty does not fall with length, or
    - |Y| is at its maximum, where nothing lives on.

    With K = 1 this is greedy search: a sentence is done at its first EOS. With more, the finished hypotheses of a list
    are the best of all that the beam would finish up to the maximum, and a smaller `n_best` gives the beginning of the
    same list.

    If fewer than `n_best` have finished at the maximum, the best of those that would have lived on come after them,
    unfinished, whatever they score. A list is shorter than `n_best` only where no more hypotheses have a probability
    above zero, and it is never empty.

    Of equal scores, the hypothesis that finished at an earlier step goes first; of the same step, the one whose parent
    ranked higher. Among the continuations of one hypothesis, `topk` decides.
    """
    if not 1 <= n_best <= beam_size:
        raise ValueError(f"n_best={n_best} must be from 1 to beam_size={beam_size}")

    found = _search(
        step,
        state,
        beam_size=beam_size,
        n_best=n_best,
        max_lengths=max_lengths,
        penalties=[penalty],
        bos=bos,
        eos=eos,
        prefixes=prefixes,
    )
    return [hypotheses for [hypotheses] in found]


def sweep_penalties(
    step: Callable[[Tensor, S], tuple[Tensor, S]],
    state: S,
    *,
    beam_size: int,
    max_lengths: Tensor,
    penalties: Sequence[Callable[[int], float]],
    bos: int,
    eos: int,
) -> list[list[Hypothesis]]:
    """The best hypothesis of each sentence under each of several length penalties, from one search.

    The arguments are those of `beam_search`. Of each sentence there are as many hypotheses as penalties, in their
    order, each the one that `beam_search` would find with that penalty. One search can serve them all: live hypotheses
    are ranked by log-probability alone, so a penalty decides only which of the finished ones is best, and when a
    sentence is done. Each penalty has a list of finished hypotheses of its own, and a sentence goes on until it is done
    under every penalty. What finishes in the meantime cannot enter the list of one under which it was done before.

    Raises ValueError for no penalty at all.
    """
    if not penalties:
        raise ValueError("there is no penalty to search under")

    found = _search(
        step,
        state,
        beam_size=beam_size,
        n_best=1,
        max_lengths=max_lengths,
        penalties=penalties,
        bos=bos,
        eos=eos,
        prefixes=None,
    )
    return [[best for [best] in lists] for lists in found]


def _search(
    step: Callable[[Tensor, S], tuple[Tensor, S]],
    state: S,
    *,
    beam_size: int,
    n_best: int,
    max_lengths: Tensor,
    penalties: Sequence[Callable[[int], float]],
    bos: int,
    eos: int,
    prefixes: Tensor | None,
) -> list[list[list[Hypothesis]]]:
    """For each sentence and penalty, the `n_best` best hypotheses: the search that `beam_search` describes."""
    n_sentences = len(max_lengths)
    longest = max(max_lengths.tolist(), default=0)
    device = max_lengths.device

    rows_of_penalties = [[penalty(n) for n in range(1, longest + 1)] for penalty in penalties]
    by_length = torch.tensor(rows_of_penalties, dtype=torch.float64, device=device)  # (A, L)
    beams = _start(max_lengths, by_length, beam_size=beam_size, n_best=n_best)
    tokens = torch.full((n_sentences * beam_size,), bos, device=device)  # (B K,)
    banned = torch.tensor([PAD, bos], device=device)
    results: dict[int, list[list[Hypothesis]]] = {}

    for length in range(1, longest + 1):
        # What may come next.
        logits, state = step(tokens, state)  # (B K, V)
        candidates = _candidates(logits, beams.live_log_probs, banned=banned)  # (B, C)
        if prefixes is not None and length <= prefixes.shape[1]:
            candidates = _force(candidates, prefixes[beams.sentences, length - 1], logits, beams.live_log_probs)
        is_end = candidates.tokens == eos  # (B, C)
        survivors = _survivors(candidates, is_end, beam_size=beam_size)  # (B, K)

        # What ends, and what lives on. Both continue the live hypotheses of the step before, so ends come first.
        beams = _finish(beams, candidates, is_end, length=length, penalties=by_length[:, length - 1])
        beams = _extend(beams, survivors, length=length)
        rows = _rows(survivors.parents)  # (B, K)

        # Who is done: the one question to the host.
        was_done = beams.done  # (B,)
        beams = replace(beams, done=was_done | _is_done(beams, length=length))
        finishing = (beams.done & ~was_done).nonzero().squeeze(1)
        if len(finishing):
            results |= _results(beams.select(finishing), length=length)
            if len(results) == n_sentences:
                break

        # Who leaves: those that are done, once they are so many that it pays to move the others together.
        n_done = len(results) - (n_sentences - len(beams.done))
        is_leaving = n_done >= LEAVING_SHARE * len(beams.done)
        if is_leaving:
            staying = (~beams.done).nonzero().squeeze(1)
            beams = beams.select(staying)
            rows = rows[staying]

        # What the model reads next. A greedy search has nothing to reorder while all sentences stay.
        tokens = beams.live_tokens[:, :, length - 1].flatten()  # (B K,)
        if beam_size > 1 or is_leaving:
            state = state.reorder(rows.flatten())

    return [results[sentence] for sentence in range(n_sentences)]


# --- what is known of the sentences


@dataclass(frozen=True)
class _Beams:
    """The live and the finished hypotheses of each sentence, the best first; -inf marks a place that nothing fills.

    Each penalty has its own list of finished ones.
    """

    sentences: Tensor  # (B,) their places in the result
    done: Tensor  # (B,) bool: their results are known
    max_lengths: Tensor  # (B,)
    max_penalties: Tensor  # (B, A) the penalties at the maximum length

    live_log_probs: Tensor  # (B, K)
    live_tokens: Tensor  # (B, K, L) of which the first `length` are set

    finished_scores: Tensor  # (B, A, N) log-probability / penalty
    finished_log_probs: Tensor  # (B, A, N)
    finished_lengths: Tensor  # (B, A, N) without EOS
    finished_tokens: Tensor  # (B, A, N, L)

    def select(self, sentences: Tensor) -> "_Beams":
        """The beams of these sentences, given by their index in the batch."""
        return _Beams(*(getattr(self, field.name)[sentences] for field in fields(self)))


@dataclass(frozen=True)
class _Candidates:
    """Continuations of the live hypotheses of each sentence, the best first."""

    log_probs: Tensor  # (B, C) of the whole hypothesis
    parents: Tensor  # (B, C) which live hypothesis each continues, from 0 to K - 1
    tokens: Tensor  # (B, C)


def _start(max_lengths: Tensor, penalties: Tensor, *, beam_size: int, n_best: int) -> _Beams:
    """Beams that hold the empty hypothesis once: K equal ones would stay equal for ever."""
    n_sentences = len(max_lengths)
    n_penalties, longest = penalties.shape
    finished = (n_sentences, n_penalties, n_best)

    live_log_probs = penalties.new_full((n_sentences, beam_size), _IMPOSSIBLE)
    live_log_probs[:, 0] = 0.0

    return _Beams(
        sentences=torch.arange(n_sentences, device=max_lengths.device),
        done=torch.zeros(n_sentences, dtype=torch.bool, device=max_lengths.device),
        max_lengths=max_lengths,
        max_penalties=penalties[:, max_lengths - 1].T,
        live_log_probs=live_log_probs,
        live_tokens=max_lengths.new_zeros(n_sentences, beam_size, longest, dtype=torch.int64),
        finished_scores=penalties.new_full(finished, _IMPOSSIBLE),
        finished_log_probs=penalties.new_full(finished, _IMPOSSIBLE),
        finished_lengths=max_lengths.new_zeros(finished, dtype=torch.int64),
        finished_tokens=max_lengths.new_zeros((*finished, longest), dtype=torch.int64),
    )


# --- the parts of a step


def _candidates(logits: Tensor, live_log_probs: Tensor, *, banned: Tensor) -> _Candidates:
    """The 2 K best continuations of each sentence: as many as K that live on and K that end, one of each hypothesis.

    The 2 K best of a sentence are among the 2 K best of each of its hypotheses, so only those are ever sorted.
    """
    n_sentences, beam_size = live_log_probs.shape
    width = min(2 * beam_size, logits.shape[1])

    log_probs, tokens = _best(logits, width, banned=banned)  # (B K, width)
    totals = live_log_probs.unsqueeze(2) + log_probs.view(n_sentences, beam_size, width)  # (B, K, width)
    totals, order = totals.flatten(1).sort(dim=1, descending=True, stable=True)  # (B, K width)
    order = order[:, : 2 * beam_size]  # (B, C)

    return _Candidates(
        log_probs=totals[:, : 2 * beam_size],
        parents=order // width,
        tokens=tokens.view(n_sentences, -1).gather(1, order),
    )


def _force(candidates: _Candidates, tokens: Tensor, logits: Tensor, live_log_probs: Tensor) -> _Candidates:
    """The candidates, but the one token of `tokens` `(B,)` alone in each sentence where that is not PAD.

    Such a sentence has read nothing but its prefix, so only the first of its live hypotheses is possible, and it is
    all that goes on.
    """
    first = at_least_fp32(logits[:: live_log_probs.shape[1]])  # (B, V) of the first live hypotheses
    log_probs = first.gather(1, tokens.unsqueeze(1)) - first.logsumexp(1, keepdim=True)  # (B, 1)

    forced = torch.full_like(candidates.log_probs, _IMPOSSIBLE)
    forced[:, :1] = live_log_probs[:, :1] + log_probs
    is_forced = (tokens != PAD).unsqueeze(1)
    return _Candidates(
        log_probs=torch.where(is_forced, forced, candidates.log_probs),
        parents=candidates.parents.masked_fill(is_forced, 0),
        tokens=torch.where(is_forced, tokens.unsqueeze(1), candidates.tokens),
    )


def _best(logits: Tensor, count: int, *, banned: Tensor) -> tuple[Tensor, Tensor]:
    """The `count` largest log-probabilities of each row, and which tokens they belong to, each `(B K, count)`.

    A CPU takes a few rows at a time: its caches have no room for all of them, and the C library would fetch fresh
    memory at each step.
    """
    rows = max(1, _LOGITS_AT_ONCE // logits.shape[1]) if logits.device.type == "cpu" else max(1, len(logits))
    best = [_best_of_rows(part, count, banned=banned) for part in torch.split(logits, rows)]
    return torch.cat([log_probs for log_probs, _ in best]), torch.cat([tokens for _, tokens in best])


def _best_of_rows(logits: Tensor, count: int, *, banned: Tensor) -> tuple[Tensor, Tensor]:
    """`_best` of a few rows."""
    logits = at_least_fp32(logits)  # (R, V)

    # A banned token can take a place among the largest: so many more are asked for.
    values, tokens = _largest(logits, min(count + len(banned), logits.shape[1]))
    maximum = values[:, :1]  # (R, 1)
    log_sum = maximum + (logits - maximum).exp_().sum(1, keepdim=True).log_()  # (R, 1)

    is_banned = (tokens.unsqueeze(2) == banned).any(2)
    values, order = values.masked_fill(is_banned, _IMPOSSIBLE).topk(count)  # (R, count)
    return values - log_sum, tokens.gather(1, order)


def _largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest logits of each row, the largest first, and their tokens: each `(R, count)`.

    To sort a long row takes much longer than to read it. So its tokens are dealt out to groups, and only those groups
    are sorted that have the largest maxima: the m-th largest logit is in one of the first m.
    """
    rows, classes = logits.shape
    n_groups = classes // _GROUP_SIZE
    if count > n_groups // 4:
        return logits.topk(count)

    # Token i goes to group i mod n_groups, and what does not come out even is sorted with the groups chosen.
    dealt = n_groups * _GROUP_SIZE
    groups = logits[:, :dealt].unflatten(1, (_GROUP_SIZE, n_groups))  # type: ignore[no-untyped-call]
    chosen = groups.amax(1).topk(count, sorted=False).indices.unsqueeze(1)  # (R, 1, count)

    starts = torch.arange(0, dealt, n_groups, device=logits.device).unsqueeze(1)  # (_GROUP_SIZE, 1)
    rest = torch.arange(dealt, classes, device=logits.device).expand(rows, -1)
    tokens = torch.cat(((starts + chosen).flatten(1), rest), 1)

    values, order = logits.gather(1, tokens).topk(count)
    return values, tokens.gather(1, order)


def _survivors(candidates: _Candidates, is_end: Tensor, *, beam_size: int) -> _Candidates:
    """The first K candidates that do not end, `(B, K)`. There are as many: at most K of the 2 K end."""
    first = is_end.byte().sort(dim=1, stable=True).indices[:, :beam_size]  # (B, K)
    return _Candidates(
        log_probs=candidates.log_probs.gather(1, first),
        parents=candidates.parents.gather(1, first),
        tokens=candidates.tokens.gather(1, first),
    )


def _finish(beams: _Beams, candidates: _Candidates, is_end: Tensor, *, length: int, penalties: Tensor) -> _Beams:
    """Beams whose finished hypotheses are the N best of those they had and those that end at |Y| = `length`.

    The penalties `(A,)` are those of that length.
    """
    n_sentences, n_penalties, n_best = beams.finished_scores.shape
    beam_size = beams.live_log_probs.shape[1]

    # Only an end among the first K counts. It is offered to the list of each penalty.
    parents = candidates.parents[:, :beam_size]  # (B, K)
    log_probs = candidates.log_probs[:, :beam_size].masked_fill(~is_end[:, :beam_size], _IMPOSSIBLE)  # (B, K)
    offered = log_probs.unsqueeze(1).expand(-1, n_penalties, -1)  # (B, A, K)

    # The sort is stable: of equal scores, those that finished before stay in front.
    scores = torch.cat((beams.finished_scores, offered / penalties.unsqueeze(1)), 2)  # (B, A, N + K)
    scores, order = scores.sort(dim=2, descending=True, stable=True)
    order = order[:, :, :n_best]  # (B, A, N)

    # What the places of that order hold.
    log_probs = torch.cat((beams.finished_log_probs, offered), 2)  # (B, A, N + K)
    lengths = torch.cat((beams.finished_lengths, torch.full_like(offered, length - 1, dtype=torch.int64)), 2)

    # Their tokens: of what was in a list, its own; of what is new, those of its parent.
    tokens = torch.cat((beams.finished_tokens.flatten(1, 2), beams.live_tokens), 1)  # (B, A N + K, L)
    n_finished = n_penalties * n_best
    had = torch.arange(n_finished, device=parents.device).view(n_penalties, n_best)  # (A, N)
    had = had.expand(n_sentences, -1, -1)  # (B, A, N)
    new = (n_finished + parents).unsqueeze(1).expand(-1, n_penalties, -1)  # (B, A, K)
    places = torch.cat((had, new), 2).gather(2, order)  # (B, A, N)

    return replace(
        beams,
        finished_scores=scores[:, :, :n_best],
        finished_log_probs=log_probs.gather(2, order),
        finished_lengths=lengths.gather(2, order),
        finished_tokens=_take(tokens, places.flatten(1)).view(*places.shape, tokens.shape[2]),
    )


def _extend(beams: _Beams, survivors: _Candidates, *, length: int) -> _Beams:
    """Beams whose live hypotheses are the survivors, of |Y| = `length`."""
    tokens = _take(beams.live_tokens, survivors.parents)  # (B, K, L), a copy
    tokens[:, :, length - 1] = survivors.tokens
    return replace(beams, live_log_probs=survivors.log_probs, live_tokens=tokens)


def _is_done(beams: _Beams, *, length: int) -> Tensor:
    """Which sentences are done, `(B,)`: the stop rule of `beam_search`."""
    bounds = beams.live_log_probs[:, :1] / beams.max_penalties  # (B, A) no live hypothesis can come to more
    done = (beams.finished_scores[:, :, -1] >= bounds).all(1)
    done |= beams.max_lengths <= length

    beam_size = beams.live_log_probs.shape[1]
    if beam_size == 1:  # greedy search: what lives on after an EOS was not the best continuation
        done |= beams.finished_log_probs[:, 0, 0] > _IMPOSSIBLE
    return done


def _results(beams: _Beams, *, length: int) -> dict[int, list[list[Hypothesis]]]:
    """For each of these sentences, which are done at |Y| = `length`, the n best hypotheses under each penalty."""
    n_best = beams.finished_scores.shape[2]
    live_log_probs = beams.live_log_probs[:, :n_best].tolist()
    live_tokens = beams.live_tokens[:, :n_best, :length].tolist()
    finished_log_probs = beams.finished_log_probs.tolist()
    finished_lengths = beams.finished_lengths.tolist()
    finished_tokens = beams.finished_tokens.tolist()

    results = {}
    for n, sentence in enumerate(beams.sentences.tolist()):
        live = [
            Hypothesis(tokens, log_prob, False)
            for tokens, log_prob in zip(live_tokens[n], live_log_probs[n], strict=True)
        ]
        possible = [hypothesis for hypothesis in live if hypothesis.log_prob > _IMPOSSIBLE]

        lists = []
        for all_tokens, ends, log_probs in zip(
            finished_tokens[n], finished_lengths[n], finished_log_probs[n], strict=True
        ):
            finished = [
                Hypothesis(tokens[:end], log_prob, True)
                for tokens, end, log_prob in zip(all_tokens, ends, log_probs, strict=True)
                if log_prob > _IMPOSSIBLE
            ]
            lists.append([*finished, *possible][:n_best] or live[:1])
        results[sentence] = lists
    return results


def _take(tokens: Tensor, places: Tensor) -> Tensor:
    """The hypotheses at `places` `(B, M)` of `(B, N, L)`, as `(B, M, L)`."""
    return tokens.gather(1, places.unsqueeze(2).expand(-1, -1, tokens.shape[2]))


def _rows(parents: Tensor) -> Tensor:
    """Places within a sentence's beam as rows of the whole batch, `(B, K)`."""
    n_sentences, beam_size = parents.shape
    first = beam_size * torch.arange(n_sentences, device=parents.device)  # (B,)
    return parents + first.unsqueeze(1)
