"""How well cross-attention aligns words: the alignment error rate (AER) of each layer, where true alignments are known.

weights of a sentence, its true alignment -> AlignmentMeter -> LayerAlignment
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from transformer.data.corpus import read_lines
from transformer.errors import InputError
from transformer.tools.inspection import AttentionMaps
from transformer.tools.markdown import markdown_table

SPACE = "\u2581"  # begins a piece that begins a word

Link = tuple[int, int]  # the place of a source word and of a target word, counted from 0


@dataclass(frozen=True)
class LayerAlignment:
    """How well the cross-attention of a layer aligns words, by the mean of its heads, and by its best head.

    A target word is aligned to the source word that it looks at most: either while it is predicted, or at the next
    position, where it has just been read.
    """

    layer: int
    aer_predicted: float
    aer_read: float
    best_head: int  # of the lower of its two rates
    best_head_aer: float


@dataclass(frozen=True)
class Gold:
    """The true alignment of a sentence pair: links that must be there, and links that may."""

    sure: frozenset[Link]
    possible: frozenset[Link]  # the sure ones among them


def read_alignments(path: Path, count: int) -> list[Gold]:
    """The first `count` lines of a file in the Pharaoh format: `0-0 1-2`, with `1p3` for a link that is only possible.

    A link names a source and a target word, parted by spaces and counted from 0. Raises InputError for another format.
    """
    alignments = []
    for number, line in enumerate(islice(read_lines(path), count), 1):
        alignments.append(_parse_alignment(line, f"{path}:{number}"))
    if len(alignments) < count:
        raise InputError(f"{path}: it has {len(alignments)} lines for {count} sentences, and each sentence needs one")
    return alignments


def _parse_alignment(line: str, place: str) -> Gold:
    sure = set[Link]()
    possible = set[Link]()
    for item in line.split():
        match = re.fullmatch(r"(\d{1,6})([-p])(\d{1,6})", item)
        if match is None:
            raise InputError(f"{place}: {item!r:.40} is not a link; write 0-1, or 0p1 for one that is only possible")
        link = (int(match[1]), int(match[3]))
        possible.add(link)
        if match[2] == "-":
            sure.add(link)
    return Gold(frozenset(sure), frozenset(possible))


def word_of_each(pieces: Sequence[str]) -> list[int]:
    """The word that each piece belongs to, counted from 0; a word begins with the mark of a space."""
    words: list[int] = []
    word = 0
    for piece in pieces:
        if piece.startswith(SPACE) and words:
            word += 1
        words.append(word)
    return words


def align_words(weights: Tensor, *, source: Sequence[int], target: Sequence[int]) -> set[Link]:
    """For each target word the source word that it looks at most.

    Weights `(target pieces, source pieces)`, without marks; `source` and `target` name the word of each piece. The
    pieces of a source word are added up, those of a target word averaged.
    """
    n_source_words = max(source) + 1
    n_target_words = max(target) + 1

    # Add up the pieces of each source word, then those of each target word: a mean is largest where the sum is.
    by_source = torch.zeros(len(target), n_source_words, dtype=weights.dtype)
    by_source.index_add_(1, torch.tensor(source), weights)
    by_word = torch.zeros(n_target_words, n_source_words, dtype=weights.dtype)
    by_word.index_add_(0, torch.tensor(target), by_source)

    return {(source_word, target_word) for target_word, source_word in enumerate(by_word.argmax(1).tolist())}


@dataclass
class _Counts:
    """What the alignment error rate is made of: links of the model (A), sure ones (S) and possible ones (P)."""

    aligned: int = 0
    sure: int = 0
    aligned_sure: int = 0
    aligned_possible: int = 0

    def add(self, links: set[Link], gold: Gold) -> None:
        """Count the model's links of a sentence."""
        self.aligned += len(links)
        self.sure += len(gold.sure)
        self.aligned_sure += len(links & gold.sure)
        self.aligned_possible += len(links & gold.possible)

    @property
    def error_rate(self) -> float:
        """`1 - (|A & S| + |A & P|) / (|A| + |S|)` (Och and Ney, 2003)."""
        return 1 - (self.aligned_sure + self.aligned_possible) / max(1, self.aligned + self.sure)


@dataclass
class _HeadCounts:
    """The counts of a head: of words aligned while they are predicted, and of words aligned once they are read."""

    predicted: _Counts = field(default_factory=_Counts)
    read: _Counts = field(default_factory=_Counts)

    @property
    def lower_rate(self) -> float:
        """The lower of the two error rates."""
        return min(self.predicted.error_rate, self.read.error_rate)


class AlignmentMeter:
    """Compares the cross-attention of every head and layer with true alignments, sentence by sentence."""

    def __init__(self, n_layers: int, n_heads: int) -> None:
        # For each layer the counts of each head, and last of the mean of the heads.
        self._counts = [[_HeadCounts() for _ in range(n_heads + 1)] for _ in range(n_layers)]

    def add(self, maps: AttentionMaps, gold: Gold, *, source: Sequence[int], target: Sequence[int]) -> None:
        """Count a sentence; `source` and `target` name the word of each piece."""
        cross = maps.cross.double()[..., : len(source)]  # (L, H, T, S - 1): without EOS
        cross = torch.cat((cross, cross.mean(1, keepdim=True)), dim=1)  # (L, H + 1, T, S - 1)
        predicted = cross[:, :, : len(target)]  # at each position, the piece that is predicted there
        read = cross[:, :, 1:]  # without BOS: the piece that is read there
        for layer, of_layer in enumerate(self._counts):
            for head, counts in enumerate(of_layer):
                counts.predicted.add(align_words(predicted[layer, head], source=source, target=target), gold)
                counts.read.add(align_words(read[layer, head], source=source, target=target), gold)

    def layers(self) -> list[LayerAlignment]:
        """The error rates so far."""
        alignments = []
        for layer, (*heads, mean) in enumerate(self._counts, 1):
            best = min(range(len(heads)), key=lambda head: heads[head].lower_rate)
            alignments.append(
                LayerAlignment(
                    layer,
                    aer_predicted=mean.predicted.error_rate,
                    aer_read=mean.read.error_rate,
                    best_head=best + 1,
                    best_head_aer=heads[best].lower_rate,
                )
            )
        return alignments


def describe_alignments(alignments: Sequence[LayerAlignment]) -> list[str]:
    """The rates of every layer, as lines of Markdown."""
    return [
        "Alignment error rate (Och and Ney, 2003) of cross-attention, 0 at best: each target word aligned to the "
        "source word that the mean of the heads looks at most while the word is predicted, or once it is read.",
        "",
        *markdown_table(
            ("layer", "AER, predicted", "AER, read", "best head", "its AER"),
            [_alignment_cells(layer) for layer in alignments],
            left={0},
        ),
    ]


def _alignment_cells(layer: LayerAlignment) -> list[str]:
    return [
        str(layer.layer),
        f"{layer.aer_predicted:.3f}",
        f"{layer.aer_read:.3f}",
        str(layer.best_head),
        f"{layer.best_head_aer:.3f}",
    ]
