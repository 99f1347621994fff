"""A model of ours as another library runs it: what `parity` asks of it, and what all such libraries share.

`ctranslate2` beside this has one; `integrations/export` has two more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from transformer.vocabulary import EOS, PAD


@dataclass(frozen=True)
class Forced:
    """What a model predicts at each position of a given target, EOS at its end counted."""

    log_probs: Tensor  # (T,) float64, of the target's pieces and EOS
    logits: Tensor | None  # (T, V), where the library gives them


class Peer(Protocol):
    """An exported model, read back from its files.

    Sources and targets are ids of pieces, without BOS and EOS; a source is not empty.
    """

    alpha: float  # of its length penalty
    arithmetic: str  # of its search
    versions: dict[str, str]  # of the libraries that run it

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The pieces of each text, as people who use the exported model would cut it."""
        ...

    def penalty(self, length: int) -> float:
        """What a log-probability of this many tokens is divided by."""
        ...

    def forced(self, sources: Sequence[list[int]], targets: Sequence[list[int]]) -> list[Forced]:
        """What the model predicts at the positions of each target, given its source."""
        ...

    def translate(self, sources: Sequence[list[int]], *, beam_size: int, max_length: int) -> list[list[int]]:
        """The best translation of each source, of at most `max_length` pieces, EOS counted; beam 1 is greedy."""
        ...


def exponent_near(length: float, alpha: float) -> float:
    """The b for which length^b grows at this length as fast as ((5 + length) / 6)^alpha does, in proportion.

    CTranslate2 and Hugging Face divide by length^b: with alpha itself they would prefer longer translations.
    """
    return round(alpha * length / (5.0 + length), 2)


def forced_by(logits: Tensor, targets: Sequence[list[int]]) -> list[Forced]:
    """The predictions in logits `(B, T, V)` for these targets, each with its EOS and padded at the right."""
    forced = []
    for row, ids in zip(logits, targets, strict=True):
        classes = torch.tensor([*ids, EOS]).unsqueeze(1)  # (T, 1)
        without_padding = row[: len(classes)]  # (T, V)
        log_probs = torch.log_softmax(without_padding, 1).gather(1, classes).squeeze(1)  # (T,)
        forced.append(Forced(log_probs, without_padding))
    return forced


def pad(sentences: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """Ids `(B, T)`, padded at the right, and a mask `(B, T)`: 1 for a token, 0 for padding."""
    width = max(map(len, sentences))
    rows = torch.full((len(sentences), width), PAD)
    mask = torch.zeros(len(sentences), width, dtype=torch.long)
    for index, ids in enumerate(sentences):
        rows[index, : len(ids)] = torch.tensor(ids, dtype=torch.long)
        mask[index, : len(ids)] = 1
    return rows, mask


def without_end(tokens: list[int]) -> list[int]:
    """The tokens before EOS; all of them where there is none."""
    return tokens[: tokens.index(EOS)] if EOS in tokens else tokens
