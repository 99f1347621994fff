"""What each attention head does, from many sentences; and how well cross-attention aligns words (AER).

A head is described by means over all positions that look, of all sentences: the entropy of its weights, how far it
looks, and the share of its weight on the positions before, at and behind its own, and on the end mark. Between source
and target, whose lengths differ, the own position is the one at the same share of the sentence.
"""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from transformer.data.corpus import read_lines
from transformer.errors import InputError
from transformer.model.inspection import AttentionMaps, Role

SPACE = "\u2581"  # begins a piece that begins a word

Link = tuple[int, int]  # the place of a source word and of a target word, counted from 0


@dataclass(frozen=True)
class Head:
    """What one head does."""

    role: str
    layer: int  # counted from 1, as heads are
    head: int
    entropy: float  # bits
    distance: float  # positions
    previous: float  # share of the weight on the position before the own
    same: float  # on the own
    next: float  # on the one behind
    mark: float  # on EOS; in the decoder, which never reads it, on BOS


MEASURES = ("entropy", "distance", "previous", "same", "next", "mark")


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
class HeadReport:
    """What all heads of a model do."""

    run_dir: str
    sentences: int
    is_forced: bool  # the model reads references, not its own translations
    heads: list[Head]
    alignments: list[LayerAlignment] | None


# ---- what a head does -----------------------------------------------------------------------------------------------


class HeadMeter:
    """Adds up the measures of every head, sentence by sentence."""

    def __init__(self) -> None:
        self._sums: dict[Role, Tensor] = {}  # (L, H, measures)
        self._positions = dict.fromkeys(Role, 0)

    def add(self, maps: AttentionMaps) -> None:
        """Count the weights of a sentence."""
        for role in Role:
            weights = maps.of(role).double()
            measures = torch.stack(measure_heads(weights, mark=0 if role is Role.decoder_self else -1), dim=-1)
            total = measures.sum(2)  # over the queries
            self._sums[role] = self._sums[role] + total if role in self._sums else total
            self._positions[role] += weights.shape[2]

    def heads(self) -> list[Head]:
        """The means so far, role by role and layer by layer."""
        found = []
        for role, sums in self._sums.items():
            for layer, of_layer in enumerate((sums / self._positions[role]).tolist(), 1):
                found += [Head(role.value, layer, head, *measures) for head, measures in enumerate(of_layer, 1)]
        return found


def measure_heads(weights: Tensor, *, mark: int) -> tuple[Tensor, ...]:
    """The MEASURES of every position that looks, each `(L, H, queries)`: weights are `(L, H, queries, keys)`.

    `mark` is the place of the end mark among the keys.
    """
    queries, keys = weights.shape[2:]
    own = (torch.arange(queries) * (keys - 1) / max(1, queries - 1)).round().long()  # (queries,)
    places = torch.arange(keys)

    entropy = -torch.special.xlogy(weights, weights).sum(-1) / torch.log(torch.tensor(2.0))
    distance = (weights * (places - own[:, None]).abs()).sum(-1)
    shares = [(weights * (places == own[:, None] + step)).sum(-1) for step in (-1, 0, 1)]
    return entropy, distance, *shares, weights[..., mark]


# ---- alignments -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gold:
    """The true alignment of a sentence pair: links that must be there, and links that may."""

    sure: frozenset[Link]
    possible: frozenset[Link]  # the sure ones among them


def read_alignments(path: Path, count: int) -> list[Gold]:
    """The first `count` lines of a file in the Pharaoh format: `0-0 1-2`, with `1p3` for a link that is only possible.

    A link names a source and a target word, parted by spaces and counted from 0. Raises InputError for another format.
    """
    found = []
    for number, line in enumerate(read_lines(path), 1):
        if number > count:
            break
        found.append(_parse_alignment(line, f"{path}:{number}"))
    if len(found) < count:
        raise InputError(f"{path}: {len(found)} lines for {count} sentences: it needs one for each")
    return found


def _parse_alignment(line: str, place: str) -> Gold:
    sure, possible = set[Link](), set[Link]()
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
    for piece in pieces:
        begins = piece.startswith(SPACE) or not words
        words.append(words[-1] + 1 if begins and words else words[-1] if words else 0)
    return words


def align_words(weights: Tensor, *, source: Sequence[int], target: Sequence[int]) -> set[Link]:
    """For each target word the source word that it looks at most.

    Weights `(target pieces, source pieces)`, without marks; `source` and `target` name the word of each piece. The
    pieces of a source word are added up, those of a target word averaged.
    """
    by_source = torch.zeros(len(target), max(source) + 1, dtype=weights.dtype)
    by_source.index_add_(1, torch.tensor(source), weights)
    by_word = torch.zeros(max(target) + 1, max(source) + 1, dtype=weights.dtype)
    by_word.index_add_(0, torch.tensor(target), by_source)  # the mean has its maximum where the sum has it
    return {(link, word) for word, link in enumerate(by_word.argmax(1).tolist())}


@dataclass
class _Counts:
    """What the alignment error rate is made of."""

    found: int = 0
    sure: int = 0
    found_sure: int = 0
    found_possible: int = 0

    def add(self, links: set[Link], gold: Gold) -> None:
        self.found += len(links)
        self.sure += len(gold.sure)
        self.found_sure += len(links & gold.sure)
        self.found_possible += len(links & gold.possible)

    @property
    def error_rate(self) -> float:
        """`1 - (|A & S| + |A & P|) / (|A| + |S|)` (Och and Ney, 2003)."""
        return 1 - (self.found_sure + self.found_possible) / max(1, self.found + self.sure)


class AlignmentMeter:
    """Compares the cross-attention of every head and layer with true alignments, sentence by sentence."""

    def __init__(self, n_layers: int, n_heads: int) -> None:
        self._counts = [
            [(_Counts(), _Counts()) for _ in range(n_heads + 1)] for _ in range(n_layers)
        ]  # predicted and read, of each head, and last of their mean

    def add(self, maps: AttentionMaps, gold: Gold, *, source: Sequence[int], target: Sequence[int]) -> None:
        """Count a sentence; `source` and `target` name the word of each piece."""
        cross = maps.cross.double()[..., : len(source)]  # without EOS
        cross = torch.cat((cross, cross.mean(1, keepdim=True)), dim=1)
        predicted, read = cross[:, :, : len(target)], cross[:, :, 1:]
        for layer, of_layer in enumerate(self._counts):
            for head, counts in enumerate(of_layer):
                for count, weights in zip(counts, (predicted, read), strict=True):
                    count.add(align_words(weights[layer, head], source=source, target=target), gold)

    def layers(self) -> list[LayerAlignment]:
        """The error rates so far."""
        found = []
        for layer, of_layer in enumerate(self._counts, 1):
            rates = [(predicted.error_rate, read.error_rate) for predicted, read in of_layer]
            best = min(range(len(rates) - 1), key=lambda head: min(rates[head]))
            found.append(LayerAlignment(layer, *rates[-1], best + 1, min(rates[best])))
        return found


# ---- for people and programs ----------------------------------------------------------------------------------------


def format_heads_markdown(report: HeadReport) -> str:
    """The report as Markdown tables."""
    read = "references" if report.is_forced else "the model's own translations"
    lines = [
        f"# What the heads of {report.run_dir} do",
        "",
        f"Means over {report.sentences} sentences, the decoder reading {read}. Entropy in bits, distance in pieces; "
        "the others are shares of the weight: on the position before, the own, the one behind, and the end mark (BOS "
        "in decoder self-attention). In cross-attention the own position is that at the same share of the source.",
        "",
        *_table(("attention", "layer", "head", *MEASURES), [_cells(head) for head in report.heads]),
    ]
    if report.alignments is not None:
        rows = [
            (
                str(row.layer),
                f"{row.aer_predicted:.3f}",
                f"{row.aer_read:.3f}",
                str(row.best_head),
                f"{row.best_head_aer:.3f}",
            )
            for row in report.alignments
        ]
        lines += [
            "",
            "Alignment error rate (Och and Ney, 2003) of cross-attention, 0 at best: each target word aligned to the "
            "source word that the mean of the heads looks at most while the word is predicted, or once it is read.",
            "",
            *_table(("layer", "AER, predicted", "AER, read", "best head", "its AER"), rows),
        ]
    return "\n".join(lines) + "\n"


def _cells(head: Head) -> list[str]:
    measures = [f"{getattr(head, name):.2f}" for name in MEASURES]
    return [head.role, str(head.layer), str(head.head), *measures]


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(titles) + " |",
        "| " + " | ".join("---:" if n else "---" for n in range(len(titles))) + " |",
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def format_heads_csv(report: HeadReport) -> str:
    """A line for each head, for programs."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Head)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(head) for head in report.heads)
    return text.getvalue()
