"""Sampling from any model, by the interface of the beam search: logits for last tokens and a state that is passed on.

What is drawn is a function of the seed, the number of the sentence, the number of the sample and the step: neither the
other sentences of a batch nor the number of samples change it, but for rounding. In half precision rounding does change
samples now and then: where many pieces are possible, it shifts the borders between their shares.

Shapes: `B` sentences that are still sampled, `K` samples of each, `R` rows (B K, or a part of them), `V` vocabulary,
`L` the largest of the maximum lengths.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer.compute import at_least_fp32
from transformer.decoding.search import LEAVING_SHARE, Hypothesis, S
from transformer.seeding import seed_for
from transformer.vocabulary import PAD

_LOGITS_AT_ONCE = 2**22  # about so many are looked at together, so that memory does not grow with the vocabulary


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

    # Of every sample of all sentences. A length of 0 is that of a sample that has not ended.
    tokens = torch.zeros(n_sentences, n_samples, longest, dtype=torch.int64, device=device)
    log_probs = torch.zeros(n_sentences, n_samples, dtype=torch.float64, device=device)
    lengths = torch.zeros(n_sentences, n_samples, dtype=torch.int64, device=device)

    last_tokens = torch.full((n_sentences, n_samples), bos, device=device)  # (B, K)
    present = torch.arange(n_sentences, device=device)  # (B,) the numbers of the sentences that are still in the batch
    banned = torch.tensor([PAD, bos], device=device)

    for length in range(1, longest + 1):
        # The next token of each sample: drawn, or given by a prefix.
        logits, state = step(last_tokens.flatten(), state)  # (B K, V)
        draws = _uniform_numbers(sampling.seed, [sentences[n] for n in present.tolist()], n_samples, step=length)
        forced = torch.full_like(present, PAD)  # (B,)
        if prefixes is not None and length <= prefixes.shape[1]:
            forced = prefixes[present, length - 1]
        next_tokens, next_log_probs = _next(
            logits,
            sampling,
            draws=draws.to(device),
            forced=forced.repeat_interleave(n_samples),
            banned=banned,
        )
        next_tokens = next_tokens.view(-1, n_samples)  # (B, K)
        next_log_probs = next_log_probs.view(-1, n_samples)  # (B, K)

        # It counts where the sample has not ended yet.
        was_alive = lengths[present] == 0
        log_probs[present] += torch.where(was_alive, next_log_probs, 0.0)
        tokens[present, :, length - 1] = next_tokens
        is_last = (next_tokens == eos) | (max_lengths[present] == length).unsqueeze(1)
        lengths[present] = torch.where(was_alive & is_last, length, lengths[present])

        # Sentences whose samples have all ended leave the batch, as in the beam search.
        is_done = (lengths[present] > 0).all(1)  # (B,)
        n_done = int(is_done.sum())
        if n_done == len(present):
            break
        last_tokens = next_tokens
        if n_done >= LEAVING_SHARE * len(present):
            staying = (~is_done).nonzero().squeeze(1)
            first_rows = staying.unsqueeze(1) * n_samples
            rows = first_rows + torch.arange(n_samples, device=device)  # (B, K)
            state = state.reorder(rows.flatten())
            present = present[staying]
            last_tokens = next_tokens[staying]

    results = []
    for rows_of, ends, sums in zip(tokens.tolist(), lengths.tolist(), log_probs.tolist(), strict=True):
        samples = [
            _hypothesis(ids[:end], log_prob, eos=eos) for ids, end, log_prob in zip(rows_of, ends, sums, strict=True)
        ]
        results.append(samples)
    return results


def _next(
    logits: Tensor, sampling: Sampling, *, draws: Tensor, forced: Tensor, banned: Tensor
) -> tuple[Tensor, Tensor]:
    """The next token of each row, and its log-probability in float64, `(R,)` each.

    It is the token in `forced` `(R,)`, or where that is PAD, the one that the number in `draws` `(R,)` falls on.
    """
    rows_at_once = max(1, _LOGITS_AT_ONCE // logits.shape[1])
    drawn = []
    log_sums = []
    for rows, draws_of_rows in zip(torch.split(logits, rows_at_once), torch.split(draws, rows_at_once), strict=True):
        drawn.append(_draw(sampling_weights(rows, sampling, banned=banned), draws_of_rows))
        log_sums.append(at_least_fp32(rows).logsumexp(1))

    tokens = torch.where(forced == PAD, torch.cat(drawn), forced)
    log_probs = at_least_fp32(logits.gather(1, tokens.unsqueeze(1)).squeeze(1)) - torch.cat(log_sums)
    return tokens, log_probs.double()


def sampling_weights(logits: Tensor, sampling: Sampling, *, banned: Tensor) -> Tensor:
    """How likely each token is to be drawn, `(R, V)` logits -> `(R, V)` float64; rows need not sum to 1.

    As elsewhere in the field, the temperature comes first, then top k, then top p of what is left (Fan et al., 2018;
    Holtzman et al., 2020). Tokens as probable as the last one that is allowed are allowed, too.
    """
    # Temperature. The largest logit becomes 0 first, and stays so at every temperature.
    allowed = logits.double().index_fill(1, banned, -torch.inf)
    scaled = (allowed - allowed.amax(1, keepdim=True)) / sampling.temperature

    # Top k.
    if sampling.top_k is not None and sampling.top_k < logits.shape[1]:
        least = scaled.topk(sampling.top_k).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)

    # Top p.
    weights = torch.softmax(scaled, 1)
    if sampling.top_p is not None:
        ordered = weights.sort(1, descending=True).values
        before = ordered.cumsum(1) - ordered  # the share of the more probable ones together
        least = ordered.masked_fill(before >= sampling.top_p, torch.inf).amin(1, keepdim=True)
        weights = weights.masked_fill(weights < least, 0.0)

    return weights


def _uniform_numbers(seed: int, sentences: Sequence[int], n_samples: int, *, step: int) -> Tensor:
    """A number between 0 and 1 for each sample of each sentence, `(B K,)`."""
    numbers = [seed_for(seed, sentence, n, step) for sentence in sentences for n in range(n_samples)]
    return (torch.tensor(numbers, dtype=torch.float64) + 0.5) / 2**32


def _draw(weights: Tensor, draws: Tensor) -> Tensor:
    """The token at which the running sum of the weights `(R, V)` passes the share `draws` `(R,)` of all, `(R,)`.

    The sum runs in the order of the ids. In the order of the weights, two nearly equal ones would change places where
    a batch of another shape rounds otherwise, and with them the token that is drawn.
    """
    sums = weights.cumsum(1)
    thresholds = (draws.unsqueeze(1) * sums[:, -1:]).contiguous()  # (R, 1)
    tokens = torch.searchsorted(sums, thresholds, right=True)  # (R, 1)
    return tokens.clamp(max=weights.shape[1] - 1).squeeze(1)


def _hypothesis(ids: list[int], log_prob: float, *, eos: int) -> Hypothesis:
    """A sample as a hypothesis, whose tokens do not include EOS."""
    is_finished = ids[-1] == eos
    return Hypothesis(ids[:-1] if is_finished else ids, log_prob, is_finished)
