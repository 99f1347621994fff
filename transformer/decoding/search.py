"""Beam search (section 6.1), independent of the model: it asks for logits, given the last tokens and a state.

Shapes: `B` sentences that are still searched, `K` beam_size, `A` length penalties, `N` n_best, `C` candidates of a
sentence (2 K), `V` vocabulary, `L` the largest of the maximum lengths. `|Y|` is a length that counts EOS.

Read `beam_search` for the rules, then `launch` for the loop, and `advance` for a step. Its parts are pure functions:
`Beams`, all that is known of the sentences, goes in and comes out. It stays on the device, and the host asks one
question a step: which sentences are done? (`replay` has another loop around the same step, which asks less often.)
Log-probabilities are summed in float64 whatever the model computes in, because a float32 sum over a long
sentence loses the digits that tell two hypotheses apart; at this size it costs nothing.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from transformer.compute import at_least_fp32
from transformer.vocabulary import PAD

_IMPOSSIBLE = -math.inf  # the log-probability and the score of an entry of a beam that holds no hypothesis
_LOGITS_AT_ONCE = 2**18  # a CPU handles this many together: they fit its cache
_GROUP_SIZE = 16  # logits in each of the groups that `_largest` divides a row into

# Sentences that are done stay in the batch, and their further steps are ignored, until they are this share of it.
# Closing the gaps costs as much as a part of a step, and a CPU also loses time with every new size of a batch.
LEAVING_SHARE = 1 / 8


class State(Protocol):
    """What a model keeps of the hypotheses that it has read, such as keys and values: one row for each."""

    def reorder(self, rows: Tensor) -> Self:
        """The state of these rows. Whole sentences may be dropped; the others keep K adjacent rows."""
        ...


S = TypeVar("S", bound=State)


@dataclass(frozen=True)
class Hypothesis:
    """A translation of one sentence.

    `tokens` are ids without BOS and EOS. A `finished` hypothesis ended in EOS; another one was cut at its maximum
    length. `log_prob` is the sum of the log-probabilities of the tokens, and of EOS if it is finished. It is not
    divided by the length penalty.
    """

    tokens: list[int]
    log_prob: float
    finished: bool

    @property
    def length(self) -> int:
        """|Y|, the number of log-probabilities in the sum."""
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
    loop: "Loop | None" = None,
) -> list[list[Hypothesis]]:
    """The `n_best` best hypotheses of each sentence, the best first, by log-probability / penalty(|Y|).

    `step` maps the last token of each hypothesis `(B K,)` and a state to the logits of the next token `(B K, V)` and
    the state after it. `max_lengths` `(B,)` holds the largest |Y| of each sentence, at least 1. PAD and BOS are never
    produced. Raises ValueError unless 1 <= n_best <= beam_size.

    `prefixes` `(B, P)` holds the tokens with which each hypothesis of a sentence must begin, followed by PAD. They are
    fewer than the maximum length. Their log-probabilities count like those of all tokens.

    `loop` takes the steps; None is `launch`.

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

    results = _search(
        step,
        state,
        beam_size=beam_size,
        n_best=n_best,
        max_lengths=max_lengths,
        penalties=[penalty],
        bos=bos,
        eos=eos,
        prefixes=prefixes,
        loop=loop,
    )
    return [hypotheses for [hypotheses] in results]  # of each sentence, those under the only penalty


def sweep_penalties(
    step: Callable[[Tensor, S], tuple[Tensor, S]],
    state: S,
    *,
    beam_size: int,
    max_lengths: Tensor,
    penalties: Sequence[Callable[[int], float]],
    bos: int,
    eos: int,
    loop: "Loop | None" = None,
) -> list[list[Hypothesis]]:
    """The best hypothesis of each sentence under each of several length penalties, from one search.

    The arguments are those of `beam_search`. For each sentence there are as many hypotheses as penalties, in their
    order: each is the one that `beam_search` would find with that penalty.

    One search can serve all penalties: live hypotheses are ranked by log-probability alone, so a penalty decides only
    which of the finished ones is best, and when a sentence is done. Each penalty has its own list of finished
    hypotheses, and a sentence goes on until it is done under every penalty. A hypothesis that finishes after the
    sentence was done under one penalty cannot enter the list of that penalty.

    Raises ValueError for no penalty at all.
    """
    if not penalties:
        raise ValueError("penalties is empty: give at least one")

    results = _search(
        step,
        state,
        beam_size=beam_size,
        n_best=1,
        max_lengths=max_lengths,
        penalties=penalties,
        bos=bos,
        eos=eos,
        prefixes=None,
        loop=loop,
    )
    return [[best for [best] in lists] for lists in results]


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
    loop: "Loop | None",
) -> list[list[list[Hypothesis]]]:
    """For each sentence and penalty, the `n_best` best hypotheses, by the rules of `beam_search`."""
    longest = max(max_lengths.tolist(), default=0)
    device = max_lengths.device

    # The penalty of every |Y| from 1 on.
    penalty_rows = [[penalty(length) for length in range(1, longest + 1)] for penalty in penalties]
    rules = Rules(
        penalties=torch.tensor(penalty_rows, dtype=torch.float64, device=device),  # (A, L)
        banned=torch.tensor([PAD, bos], device=device),
        bos=bos,
        eos=eos,
    )
    if prefixes is None:
        prefixes = max_lengths.new_zeros(len(max_lengths), 0)
    beams = _start(max_lengths, prefixes, rules, beam_size=beam_size, n_best=n_best)
    return (loop or launch)(step, state, beams, rules)


@dataclass(frozen=True)
class Rules:
    """What is the same for all sentences and steps of a search."""

    penalties: Tensor  # (A, L) of every |Y| from 1 on
    banned: Tensor  # the tokens that are never produced
    bos: int
    eos: int


class Loop(Protocol):
    """Takes the steps of a search until all sentences are done, and returns the lists of each."""

    def __call__(
        self, step: Callable[[Tensor, Any], tuple[Tensor, Any]], state: Any, beams: "Beams", rules: Rules
    ) -> list[list[list[Hypothesis]]]:
        """From the beams before the first step."""
        ...


def launch(
    step: Callable[[Tensor, S], tuple[Tensor, S]], state: S, beams: "Beams", rules: Rules
) -> list[list[list[Hypothesis]]]:
    """The plain loop: the host launches each step, and sentences leave the batch when they are done.

    In a step, `step` makes of tokens (B K,) and state logits (B K, V), and `advance` of these the next beams.
    """
    n_sentences, beam_size = beams.live_log_probs.shape
    longest = rules.penalties.shape[1]
    tokens = torch.full((n_sentences * beam_size,), rules.bos, device=beams.done.device)  # (B K,) of live hypotheses
    results: dict[int, list[list[Hypothesis]]] = {}  # of each sentence that is done

    for length in range(1, longest + 1):
        if length > beams.prefixes.shape[1]:
            beams = replace(beams, prefixes=beams.prefixes[:, :0])  # there is nothing to force any more
        logits, state = step(tokens, state)  # (B K, V)
        was_done = beams.done  # (B,)
        beams, survivors = advance(beams, logits, rules)
        rows = rows_of(survivors.parents)  # (B, K) the rows of the state that the survivors continue

        # Which sentences are done now: `len` is the one question that the host asks the device in a step.
        newly_done = (beams.done & ~was_done).nonzero().squeeze(1)
        if len(newly_done):
            of_done = beams.select(newly_done)
            results |= zip(of_done.sentences.tolist(), results_of(of_done), strict=True)
            if len(results) == n_sentences:
                break

        # Those that are done leave the batch, once they are so many that it pays to close the gaps.
        n_left_before = n_sentences - len(beams.done)
        n_done_in_batch = len(results) - n_left_before
        is_leaving = n_done_in_batch >= LEAVING_SHARE * len(beams.done)
        tokens = survivors.tokens
        if is_leaving:
            staying = (~beams.done).nonzero().squeeze(1)
            beams = beams.select(staying)
            rows = rows[staying]
            tokens = tokens[staying]

        # What the model reads next. In greedy search the rows keep their order, unless a sentence leaves.
        tokens = tokens.flatten()  # (B K,)
        if beam_size > 1 or is_leaving:
            state = state.reorder(rows.flatten())

    return [results[sentence] for sentence in range(n_sentences)]


# ---- what is known of the sentences ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Beams:
    """The live and the finished hypotheses of each sentence, the best first. An entry of -inf holds none.

    Each penalty has its own list of finished ones.
    """

    sentences: Tensor  # (B,) the number of each sentence in the whole batch that the search began with
    done: Tensor  # (B,) bool: its results are known
    lengths: Tensor  # (B,) |Y| of the live hypotheses: as many as there have been steps
    max_lengths: Tensor  # (B,) the largest |Y|
    max_penalties: Tensor  # (B, A) the penalties at the largest |Y|
    prefixes: Tensor  # (B, P) what each hypothesis has to begin with, and PAD behind it

    live_log_probs: Tensor  # (B, K)
    live_tokens: Tensor  # (B, K, L) as many as `lengths` says; the others are not set

    finished_scores: Tensor  # (B, A, N) log-probability / penalty
    finished_log_probs: Tensor  # (B, A, N)
    finished_lengths: Tensor  # (B, A, N) tokens without EOS
    finished_tokens: Tensor  # (B, A, N, L)

    def select(self, sentences: Tensor) -> "Beams":
        """The beams of these sentences, given by their indices among the B."""
        return Beams(*(getattr(self, field.name)[sentences] for field in fields(self)))


@dataclass(frozen=True)
class Candidates:
    """Continuations of the live hypotheses of each sentence, the best first."""

    log_probs: Tensor  # (B, C) of the whole hypothesis, with the new token
    parents: Tensor  # (B, C) the live hypothesis that it continues, from 0 to K - 1
    tokens: Tensor  # (B, C) the new token


def _start(max_lengths: Tensor, prefixes: Tensor, rules: Rules, *, beam_size: int, n_best: int) -> Beams:
    """Beams without a finished hypothesis."""
    penalties = rules.penalties
    n_sentences = len(max_lengths)
    n_penalties, longest = penalties.shape
    finished = (n_sentences, n_penalties, n_best)

    # The empty hypothesis is there once: K equal ones would have equal continuations for ever.
    live_log_probs = penalties.new_full((n_sentences, beam_size), _IMPOSSIBLE)
    live_log_probs[:, 0] = 0.0

    return Beams(
        sentences=torch.arange(n_sentences, device=max_lengths.device),
        done=torch.zeros(n_sentences, dtype=torch.bool, device=max_lengths.device),
        lengths=torch.zeros_like(max_lengths),
        max_lengths=max_lengths,
        max_penalties=penalties[:, max_lengths - 1].T,
        prefixes=prefixes,
        live_log_probs=live_log_probs,
        live_tokens=max_lengths.new_zeros(n_sentences, beam_size, longest, dtype=torch.int64),
        finished_scores=penalties.new_full(finished, _IMPOSSIBLE),
        finished_log_probs=penalties.new_full(finished, _IMPOSSIBLE),
        finished_lengths=max_lengths.new_zeros(finished, dtype=torch.int64),
        finished_tokens=max_lengths.new_zeros((*finished, longest), dtype=torch.int64),
    )


# ---- a step, and its parts ------------------------------------------------------------------------------------------


def advance(beams: Beams, logits: Tensor, rules: Rules) -> tuple[Beams, Candidates]:
    """The beams after one more token of each live hypothesis, and the K survivors that these end in.

        logits (B K, V), live hypotheses  -> _candidates  the 2 K best continuations of each sentence, (B, C)
        those that are EOS                -> _finish      finished hypotheses (B, A, N)
        K of the others                   -> _extend      live hypotheses (B, K)

    It computes on tensors alone, whose shapes stay: the host learns nothing of what they hold.
    """
    candidates = _candidates(logits, beams.live_log_probs, banned=rules.banned)  # (B, C)
    if beams.prefixes.shape[1] > 0:
        forced = _at(beams.prefixes, beams.lengths)  # (B,)
        candidates = _force(candidates, forced, logits, beams.live_log_probs)

    # Some finish, K others live on. Both read the live hypotheses of the step before, so `_finish` comes first.
    is_end = candidates.tokens == rules.eos  # (B, C)
    survivors = _survivors(candidates, is_end, beam_size=beams.live_log_probs.shape[1])  # (B, K)
    beams = _finish(beams, candidates, is_end, penalties=rules.penalties)
    beams = _extend(beams, survivors)
    return replace(beams, done=beams.done | _is_done(beams)), survivors


def _candidates(logits: Tensor, live_log_probs: Tensor, *, banned: Tensor) -> Candidates:
    """The 2 K best continuations of each sentence.

    So many are enough: each of the K hypotheses has one continuation that is EOS, so K others are among them.
    """
    n_sentences, beam_size = live_log_probs.shape
    width = min(2 * beam_size, logits.shape[1])

    # The 2 K best of a sentence are among the 2 K best of each of its hypotheses, so only those are ever sorted.
    log_probs, tokens = _best(logits, width, banned=banned)  # (B K, width)
    totals = live_log_probs.unsqueeze(2) + log_probs.view(n_sentences, beam_size, width)  # (B, K, width)
    totals, order = totals.flatten(1).sort(dim=1, descending=True, stable=True)  # (B, K width)
    order = order[:, : 2 * beam_size]  # (B, C)

    return Candidates(
        log_probs=totals[:, : 2 * beam_size],
        parents=order // width,  # each hypothesis has `width` adjacent columns
        tokens=tokens.view(n_sentences, -1).gather(1, order),
    )


def _force(candidates: Candidates, tokens: Tensor, logits: Tensor, live_log_probs: Tensor) -> Candidates:
    """The candidates, with a single one for each sentence whose next token is given by a prefix.

    `tokens` `(B,)` holds that token, and PAD for a sentence that is free. A sentence that is not free has read nothing
    but its prefix, so only the first of its live hypotheses is possible: the one to be continued.
    """
    beam_size = live_log_probs.shape[1]
    first_logits = at_least_fp32(logits[::beam_size])  # (B, V) of the first live hypothesis
    log_probs = first_logits.gather(1, tokens.unsqueeze(1)) - first_logits.logsumexp(1, keepdim=True)  # (B, 1)

    forced_log_probs = torch.full_like(candidates.log_probs, _IMPOSSIBLE)  # (B, C)
    forced_log_probs[:, :1] = live_log_probs[:, :1] + log_probs

    is_forced = (tokens != PAD).unsqueeze(1)  # (B, 1)
    return Candidates(
        log_probs=torch.where(is_forced, forced_log_probs, candidates.log_probs),
        parents=candidates.parents.masked_fill(is_forced, 0),
        tokens=torch.where(is_forced, tokens.unsqueeze(1), candidates.tokens),
    )


def _best(logits: Tensor, count: int, *, banned: Tensor) -> tuple[Tensor, Tensor]:
    """The `count` largest log-probabilities of each row, and their tokens, each `(B K, count)`.

    A CPU takes a few rows at a time: its caches have no room for all of them, and the C library would fetch fresh
    memory at each step.
    """
    rows_at_once = max(1, len(logits))
    if logits.device.type == "cpu":
        rows_at_once = max(1, _LOGITS_AT_ONCE // logits.shape[1])

    log_probs = []
    tokens = []
    for rows in torch.split(logits, rows_at_once):
        best_log_probs, best_tokens = _best_of_rows(rows, count, banned=banned)
        log_probs.append(best_log_probs)
        tokens.append(best_tokens)
    return torch.cat(log_probs), torch.cat(tokens)


def _best_of_rows(logits: Tensor, count: int, *, banned: Tensor) -> tuple[Tensor, Tensor]:
    """`_best` of `R` rows. What is banned has its part of the softmax, but is not among the best."""
    log_probs = torch.log_softmax(at_least_fp32(logits), 1)  # (R, V): on a GPU a single kernel

    # Banned tokens may be among the largest, so as many more are asked for.
    values, tokens = _largest(log_probs, min(count + len(banned), log_probs.shape[1]))  # (R, count + banned)
    is_banned = (tokens.unsqueeze(2) == banned).any(2)  # (R, count + banned)
    values, order = values.masked_fill(is_banned, _IMPOSSIBLE).topk(count)  # (R, count)
    return values, tokens.gather(1, order)


def _largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest logits of each row, the largest first, and their tokens: each `(R, count)`.

    To sort a long row takes much longer than to read it. So the tokens are divided into groups, and only the `count`
    groups with the largest maxima are sorted: the m-th largest logit is in one of the m groups with the largest maxima.
    """
    n_rows, n_tokens = logits.shape
    n_groups = n_tokens // _GROUP_SIZE
    if count > n_groups // 4:
        return logits.topk(count)

    # Token i goes to group i mod n_groups. Those left over after `n_grouped` are sorted with the chosen groups.
    n_grouped = n_groups * _GROUP_SIZE
    groups = logits[:, :n_grouped].unflatten(1, (_GROUP_SIZE, n_groups))  # type: ignore[no-untyped-call]
    chosen = groups.amax(1).topk(count, sorted=False).indices.unsqueeze(1)  # (R, 1, count)

    # The tokens of the chosen groups: one for each start and group.
    starts = torch.arange(0, n_grouped, n_groups, device=logits.device).unsqueeze(1)  # (_GROUP_SIZE, 1)
    left_over = torch.arange(n_grouped, n_tokens, device=logits.device).expand(n_rows, -1)
    tokens = torch.cat(((starts + chosen).flatten(1), left_over), 1)  # (R, _GROUP_SIZE count + left over)

    values, order = logits.gather(1, tokens).topk(count)
    return values, tokens.gather(1, order)


def _survivors(candidates: Candidates, is_end: Tensor, *, beam_size: int) -> Candidates:
    """The first K candidates that are not EOS, `(B, K)`. There are as many: at most K of the 2 K are EOS."""
    # A stable sort by "is EOS" puts the others first, in the order in which they are.
    first = is_end.byte().sort(dim=1, stable=True).indices[:, :beam_size]  # (B, K)
    return Candidates(
        log_probs=candidates.log_probs.gather(1, first),
        parents=candidates.parents.gather(1, first),
        tokens=candidates.tokens.gather(1, first),
    )


def _finish(beams: Beams, candidates: Candidates, is_end: Tensor, *, penalties: Tensor) -> Beams:
    """Beams whose finished hypotheses are the N best of those they had and those that finish now; penalties `(A, L)`.

    The new ones have as many tokens as the live ones, and EOS: `|Y|` is larger by one.
    """
    n_sentences, n_penalties, n_best = beams.finished_scores.shape
    beam_size = beams.live_log_probs.shape[1]

    # Only an EOS among the first K candidates finishes a hypothesis. It is offered to the list of each penalty.
    parents = candidates.parents[:, :beam_size]  # (B, K)
    log_probs = candidates.log_probs[:, :beam_size].masked_fill(~is_end[:, :beam_size], _IMPOSSIBLE)  # (B, K)
    new_log_probs = log_probs.unsqueeze(1).expand(-1, n_penalties, -1)  # (B, A, K)
    new_lengths = beams.lengths.view(-1, 1, 1).expand_as(new_log_probs)  # (B, A, K)
    new_scores = new_log_probs / penalties.index_select(1, beams.lengths).T.unsqueeze(2)  # (B, A, K)

    # The N best of old and new. The sort is stable: of equal scores, an older one stays in front.
    scores = torch.cat((beams.finished_scores, new_scores), 2)  # (B, A, N + K)
    scores, order = scores.sort(dim=2, descending=True, stable=True)
    order = order[:, :, :n_best]  # (B, A, N)
    log_probs = torch.cat((beams.finished_log_probs, new_log_probs), 2)  # (B, A, N + K)
    lengths = torch.cat((beams.finished_lengths, new_lengths), 2)  # (B, A, N + K)

    # Their tokens. All rows that there are: those of the finished hypotheses, then those of the live ones.
    tokens = torch.cat((beams.finished_tokens.flatten(1, 2), beams.live_tokens), 1)  # (B, A N + K, L)

    # The row of each of the N + K: an old hypothesis has its own, a new one has that of its parent.
    n_finished = n_penalties * n_best
    old_rows = torch.arange(n_finished, device=parents.device).view(n_penalties, n_best)  # (A, N)
    old_rows = old_rows.expand(n_sentences, -1, -1)  # (B, A, N)
    new_rows = (n_finished + parents).unsqueeze(1).expand(-1, n_penalties, -1)  # (B, A, K)
    rows = torch.cat((old_rows, new_rows), 2).gather(2, order)  # (B, A, N)

    return replace(
        beams,
        finished_scores=scores[:, :, :n_best],
        finished_log_probs=log_probs.gather(2, order),
        finished_lengths=lengths.gather(2, order),
        finished_tokens=_take(tokens, rows.flatten(1)).view(*rows.shape, tokens.shape[2]),
    )


def _extend(beams: Beams, survivors: Candidates) -> Beams:
    """Beams whose live hypotheses are the survivors, longer by a token."""
    tokens = _take(beams.live_tokens, survivors.parents)  # (B, K, L), a copy that may be written into
    places = beams.lengths.view(-1, 1, 1).expand(*survivors.tokens.shape, 1)  # (B, K, 1)
    tokens.scatter_(2, places, survivors.tokens.unsqueeze(2))
    return replace(beams, lengths=beams.lengths + 1, live_log_probs=survivors.log_probs, live_tokens=tokens)


def _is_done(beams: Beams) -> Tensor:
    """Which sentences are done, `(B,)`: the stop rule of `beam_search`."""
    # No live hypothesis can reach the n-th best finished one, under any penalty; or the maximum length is reached.
    bounds = beams.live_log_probs[:, :1] / beams.max_penalties  # (B, A) no live hypothesis can score more
    done = (beams.finished_scores[:, :, -1] >= bounds).all(1)  # (B,)
    done |= beams.max_lengths <= beams.lengths

    # Greedy search ends at its first EOS: the hypothesis that lives on beside it is not the best continuation.
    beam_size = beams.live_log_probs.shape[1]
    if beam_size == 1:
        done |= beams.finished_log_probs[:, 0, 0] > _IMPOSSIBLE
    return done


def results_of(beams: Beams) -> list[list[list[Hypothesis]]]:
    """For each of these sentences, which are done, the n best hypotheses under each penalty."""
    n_best = beams.finished_scores.shape[2]
    lengths = beams.lengths.tolist()
    live_log_probs = beams.live_log_probs[:, :n_best].tolist()
    live_tokens = beams.live_tokens[:, :n_best].tolist()
    finished_log_probs = beams.finished_log_probs.tolist()
    finished_lengths = beams.finished_lengths.tolist()
    finished_tokens = beams.finished_tokens.tolist()

    results = []
    for n, length in enumerate(lengths):
        # Live hypotheses fill a list that has too few finished ones.
        live = []
        for tokens, log_prob in zip(live_tokens[n], live_log_probs[n], strict=True):
            live.append(Hypothesis(tokens[:length], log_prob, finished=False))
        possible = [hypothesis for hypothesis in live if hypothesis.log_prob > _IMPOSSIBLE]

        # One list for each penalty. It is never empty, even where nothing has a probability above zero.
        lists = []
        for rows, ends, log_probs in zip(finished_tokens[n], finished_lengths[n], finished_log_probs[n], strict=True):
            finished = [
                Hypothesis(tokens[:end], log_prob, finished=True)
                for tokens, end, log_prob in zip(rows, ends, log_probs, strict=True)
                if log_prob > _IMPOSSIBLE
            ]
            best = [*finished, *possible][:n_best]
            lists.append(best or live[:1])

        results.append(lists)
    return results


def _take(tokens: Tensor, rows: Tensor) -> Tensor:
    """The tokens of some hypotheses of each sentence: `(B, H, L)` and their indices `(B, M)` -> `(B, M, L)`."""
    return tokens.gather(1, rows.unsqueeze(2).expand(-1, -1, tokens.shape[2]))


def _at(table: Tensor, columns: Tensor) -> Tensor:
    """One number of each row: `(B, P)` and its column in each, `(B,)` -> `(B,)`."""
    return table.gather(1, columns.unsqueeze(1)).squeeze(1)


def rows_of(parents: Tensor) -> Tensor:
    """Indices among the hypotheses of a sentence, as rows of the whole batch: `(B, K)` -> `(B, K)`."""
    n_sentences, beam_size = parents.shape
    first_rows = beam_size * torch.arange(n_sentences, device=parents.device)  # (B,)
    return parents + first_rows.unsqueeze(1)
