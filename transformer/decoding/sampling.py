"""Sampling from any model, by the interface of the beam search: logits for last tokens and a state that is passed on.

Shapes: `B` sentences that are still sampled, `K` samples of each, `V` vocabulary, `L` the largest of the maximum
lengths. What is drawn is a function of the seed, the number of the sentence, the number of the sample and the step:
neither the other sentences of a batch nor the number of samples change it, but for rounding. In half precision that is
not rare: where many pieces are possible, their shares shift, and the borders between them with these.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer.compute import at_least_fp32
from transformer.decoding.search import LEAVING_SHARE, Hypothesis, S
from transformer.seeding import seed_for
from transformer.vocabulary import PAD

_LOGITS_AT_ONCE = 2**22


@dataclass(frozen=True)
class Sampling:
    """From which pieces the next one is drawn, and with which seed.

    Logits are divided by `temperature`, above 0. Of the pieces only the `top_k` most probable can be drawn, and of
    these only the fewest that together have at least the share `top_p` of their probability; None is no limit.
    """

    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int


def sample(
    step: Callable[[Tensor, S], tuple[Tensor, S]],
    state: S,
    *,
    sampling: Sampling,
    n_samples: int,
    sentences: Sequence[int],
    max_lengths: Tensor,
    prefixes: Tensor | None,
    bos: int,
    eos: int,
) -> list[list[Hypothesis]]:
    """`n_samples` translations of each sentence, in the order in which they are drawn; some may be equal.

    `sentences` are numbers to draw by, one for each sentence, such as its line. The other arguments are those of
    `beam_search`. A sample ends with EOS, or unfinished at its maximum length. Its log-probability is the model's own,
    without temperature and limits, so that samples can be compared with other translations.
    """
    n_sentences = len(max_lengths)
    longest = max(max_lengths.tolist(), default=0)
    device = max_lengths.device

    tokens = torch.full((n_sentences, n_samples), bos, device=device)  # (B, K)
    written = torch.zeros(n_sentences, n_samples, longest, dtype=torch.int64, device=device)
    log_probs = torch.zeros(n_sentences, n_samples, dtype=torch.float64, device=device)
    lengths = torch.zeros(n_sentences, n_samples, dtype=torch.int64, device=device)  # of those that have ended
    present = torch.arange(n_sentences, device=device)  # the sentences that rows of the state belong to
    banned = torch.tensor([PAD, bos], device=device)

    for length in range(1, longest + 1):
        # The next token of each sample.
        logits, state = step(tokens.flatten(), state)  # (B K, V)
        chances = _chances(sampling.seed, [sentences[n] for n in present.tolist()], n_samples, step=length)
        forced = torch.full_like(present, PAD)
        if prefixes is not None and length <= prefixes.shape[1]:
            forced = prefixes[present, length - 1]
        next_tokens, next_log_probs = _next(
            logits,
            sampling,
            chances=chances.to(device),
            forced=forced.repeat_interleave(n_samples),
            banned=banned,
        )
        drawn = next_tokens.view(-1, n_samples)  # (B, K)
        chosen = next_log_probs.view(-1, n_samples)  # (B, K)

        # It counts where the sample has not ended yet.
        was_alive = lengths[present] == 0
        log_probs[present] += torch.where(was_alive, chosen, 0.0)
        written[present, :, length - 1] = drawn
        is_last = (drawn == eos) | (max_lengths[present] == length).unsqueeze(1)
        lengths[present] = torch.where(was_alive & is_last, length, lengths[present])

        # Sentences leave as they do in the beam search.
        is_done = (lengths[present] > 0).all(1)
        n_done = int(is_done.sum())
        if n_done == len(present):
            break
        tokens = drawn
        if n_done >= LEAVING_SHARE * len(present):
            staying = (~is_done).nonzero().squeeze(1)  # of the rows of sentences
            samples = torch.arange(n_samples, device=device)
            state = state.reorder((staying.unsqueeze(1) * n_samples + samples).flatten())
            present = present[staying]
            tokens = drawn[staying]

    return [
        [_hypothesis(ids[:end], log_prob, eos=eos) for ids, end, log_prob in zip(*of_sentence, strict=True)]
        for of_sentence in zip(written.tolist(), lengths.tolist(), log_probs.tolist(), strict=True)
    ]


def _next(
    logits: Tensor, sampling: Sampling, *, chances: Tensor, forced: Tensor, banned: Tensor
) -> tuple[Tensor, Tensor]:
    """The next token of each row, and its log-probability in float64, `(R,)` each.

    It is the one in `forced` `(R,)`, or one that is drawn where that is PAD. A few rows are taken at a time, so that
    memory does not grow with the vocabulary.
    """
    rows = max(1, _LOGITS_AT_ONCE // logits.shape[1])
    drawn = [
        _draw(sampling_weights(part, sampling, banned=banned), of_part)
        for part, of_part in zip(torch.split(logits, rows), torch.split(chances, rows), strict=True)
    ]
    tokens = torch.where(forced == PAD, torch.cat(drawn), forced)

    log_sums = [at_least_fp32(part).logsumexp(1) for part in torch.split(logits, rows)]
    chosen = at_least_fp32(logits.gather(1, tokens.unsqueeze(1)).squeeze(1)) - torch.cat(log_sums)
    return tokens, chosen.double()


def sampling_weights(logits: Tensor, sampling: Sampling, *, banned: Tensor) -> Tensor:
    """How likely each token is to be drawn, `(R, V)` logits -> `(R, V)` float64; rows need not sum to 1.

    As elsewhere in the field, the temperature comes first, then top k, then top p of what is left (Fan et al., 2018;
    Holtzman et al., 2020). Tokens as probable as the last one that is let in are let in, too.
    """
    allowed = logits.double().index_fill(1, banned, -torch.inf)
    scaled = (allowed - allowed.amax(1, keepdim=True)) / sampling.temperature  # the largest stays 0 however cold it is
    if sampling.top_k is not None and sampling.top_k < logits.shape[1]:
        least = scaled.topk(sampling.top_k).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)

    weights = torch.softmax(scaled, 1)
    if sampling.top_p is not None:
        ordered = weights.sort(1, descending=True).values
        before = ordered.cumsum(1) - ordered  # the share of all that are more probable
        least = ordered.masked_fill(before >= sampling.top_p, torch.inf).amin(1, keepdim=True)
        weights = weights.masked_fill(weights < least, 0.0)
    return weights


def _chances(seed: int, sentences: Sequence[int], n_samples: int, *, step: int) -> Tensor:
    """A number between 0 and 1 for each sample of each sentence, `(B K,)`."""
    numbers = [seed_for(seed, sentence, n, step) for sentence in sentences for n in range(n_samples)]
    return (torch.tensor(numbers, dtype=torch.float64) + 0.5) / 2**32


def _draw(weights: Tensor, chances: Tensor) -> Tensor:
    """The token at which the running sum of the weights passes that share of all, `(R,)`.

    The sum runs in the order of the ids: in that of the weights, two that are nearly equal would change places, and
    the draw with them, when a batch of another shape rounds otherwise.
    """
    sums = weights.cumsum(1)
    found = torch.searchsorted(sums, (chances.unsqueeze(1) * sums[:, -1:]).contiguous(), right=True)
    return found.clamp(max=weights.shape[1] - 1).squeeze(1)


def _hypothesis(ids: list[int], log_prob: float, *, eos: int) -> Hypothesis:
    is_finished = ids[-1] == eos
    return Hypothesis(ids[:-1] if is_finished else ids, log_prob, is_finished)
