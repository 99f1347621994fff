"""Forced decoding, of translations that are given: the log-probability of each piece, and its source piece.

All positions are computed at once, as in training; a search takes one after the other.

Shapes: `B` pairs, `S` source and `T` target positions, EOS counted, `H` heads, `D` d_model, `V` vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from transformer.compute import at_least_fp32
from transformer.data.batch import pad_rows
from transformer.decoding.ensemble import mean_of_probabilities
from transformer.model.transformer import Transformer
from transformer.vocabulary import BOS, EOS

IdPair = tuple[list[int], list[int]]  # ids of source and target, without BOS and EOS

_LOGITS_AT_ONCE = 2**22  # about so many are held at a time, so that memory does not grow with the vocabulary


def piece_log_probs(models: Sequence[Transformer], pairs: Sequence[IdPair], device: torch.device) -> list[list[float]]:
    """For each pair the natural log-probability of each target piece, given those before it, and of EOS at the end.

    Several models are an ensemble.
    """
    source, source_layout = pad_rows([[*ids, EOS] for ids, _ in pairs], device)  # (B, S)
    target_in, layout = pad_rows([[BOS, *ids] for _, ids in pairs], device)  # (B, T) what the decoder reads
    target_out, _ = pad_rows([[*ids, EOS] for _, ids in pairs], device)  # (B, T) what it should predict there

    # Only at real positions: `N` of all pairs together.
    is_real = layout.visible()  # (B, T)
    by_model = []
    for model in models:
        memory = model.encode(source, source_layout)  # (B, S, D)
        hidden = model.decode(target_in, layout, memory=memory, memory_layout=source_layout)  # (B, T, D)
        by_model.append(_log_probs_of(model, hidden[is_real], target_out[is_real]))  # (N,)

    # They are in the order of the pairs, T of each.
    log_probs = mean_of_probabilities(by_model).double().tolist()
    ends = torch.cumsum(layout.lengths, 0).tolist()
    return [log_probs[end - len(ids) - 1 : end] for end, (_, ids) in zip(ends, pairs, strict=True)]


def _log_probs_of(model: Transformer, hidden: Tensor, tokens: Tensor) -> Tensor:
    """The log-probability of one token for each hidden state: `(N, D)` and `(N,)` -> `(N,)`."""
    rows_at_once = max(1, _LOGITS_AT_ONCE // model.vocab_size)
    parts = []
    for rows, expected in zip(torch.split(hidden, rows_at_once), torch.split(tokens, rows_at_once), strict=True):
        logits = at_least_fp32(model.unembed(rows))  # (n, V)
        parts.append(logits.gather(1, expected.unsqueeze(1)).squeeze(1) - torch.logsumexp(logits, 1))
    return torch.cat(parts)


def align(models: Sequence[Transformer], pairs: Sequence[IdPair], device: torch.device) -> list[list[int]]:
    """For each pair, which source piece each target piece is aligned to: its index, counted from 0.

    It is the source piece to which encoder-decoder attention gives most weight where the target piece is predicted, on
    average over the heads of the last layer, and over the models. EOS takes no part.

    The last layer was the best of those measured, on words that have only one translation: it finds 86 % of them in the
    demo's two layers, and 90 % in three layers trained on Multi30k, where the layer before it finds 51 % and 73 %. (Of
    six layers, the last but one may be better: Garg et al., 2019.)
    """
    source, source_layout = pad_rows([[*ids, EOS] for ids, _ in pairs], device)  # (B, S)
    target_in, layout = pad_rows([[BOS, *ids[:-1]] for _, ids in pairs], device)  # (B, T) what comes before each piece

    # The weights of the last layer, added up over the models.
    total = torch.zeros((), device=device)
    for model in models:
        memory = model.encode(source, source_layout)  # (B, S, D)
        last = model.config.decoder_layers - 1
        weights = model.cross_attention_weights(
            target_in, layout, memory=memory, memory_layout=source_layout, layer=last
        )  # (B, H, T, S)
        total = total + weights.mean(1)  # (B, T, S)

    # The largest one among the pieces of the source, without EOS and padding.
    is_piece = torch.arange(source.shape[1], device=device) < (source_layout.lengths - 1).unsqueeze(1)  # (B, S)
    best = total.masked_fill(~is_piece.unsqueeze(1), -torch.inf).argmax(2).tolist()  # (B, T)
    return [row[: len(ids)] for row, (_, ids) in zip(best, pairs, strict=True)]
