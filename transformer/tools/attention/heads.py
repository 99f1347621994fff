"""What each attention head does, from many sentences.

    weights of a sentence -> HeadMeter     means of six measures of each head
                          -> HeadReport    as Markdown and CSV, with the rates of `paper.alignment_error` where wanted

A head is described by means over all queries of all sentences: the entropy of its weights, how far it looks, and the
share of its weight on the key before the query's own position, on that position, on the one after it, and on EOS. In
cross-attention, where the lengths differ, a query's own position is the one at the same share of the source.
"""

import csv
import io
from dataclasses import asdict, dataclass, fields
from typing import cast

import torch
from torch import Tensor

from transformer.tools.inspection import AttentionMaps, Role
from transformer.tools.markdown import markdown_table
from transformer.tools.paper.alignment_error import LayerAlignment, describe_alignments


@dataclass(frozen=True)
class Head:
    """What one head does."""

    role: str
    layer: int  # counted from 1, as heads are
    head: int
    entropy: float  # bits
    distance: float  # positions
    previous: float  # share of the weight on the position before the query's own
    same: float  # share on its own
    next: float  # share on the one after it
    mark: float  # share on EOS; in the decoder, which never reads EOS, on BOS

    def measure(self, name: str) -> float:
        """The measure of this name, one of MEASURES."""
        return cast(float, getattr(self, name))


MEASURES = ("entropy", "distance", "previous", "same", "next", "mark")


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
            mark = 0 if role is Role.decoder_self else -1  # BOS comes first, EOS last
            measures = torch.stack(measure_heads(weights, mark=mark), dim=-1)  # (L, H, queries, measures)
            total = measures.sum(2)  # (L, H, measures)
            if role in self._sums:
                self._sums[role] = self._sums[role] + total
            else:
                self._sums[role] = total
            self._positions[role] += weights.shape[2]

    def heads(self) -> list[Head]:
        """The means so far, role by role and layer by layer."""
        heads = []
        for role, sums in self._sums.items():
            means = (sums / self._positions[role]).tolist()
            for layer, of_layer in enumerate(means, 1):
                for head, measures in enumerate(of_layer, 1):
                    heads.append(Head(role.value, layer, head, *measures))
        return heads


def measure_heads(weights: Tensor, *, mark: int) -> tuple[Tensor, ...]:
    """The MEASURES of every query, each `(L, H, queries)`, from weights `(L, H, queries, keys)`.

    `mark` is the place of EOS among the keys; in the decoder's attention to itself, that of BOS.
    """
    # The place of each query's own position among the keys.
    n_queries, n_keys = weights.shape[2:]
    own = (torch.arange(n_queries) * (n_keys - 1) / max(1, n_queries - 1)).round().long()  # (queries,)
    own = own[:, None]  # (queries, 1)
    places = torch.arange(n_keys)  # (keys,)

    entropy = -torch.special.xlogy(weights, weights).sum(-1) / torch.log(torch.tensor(2.0))
    distance = (weights * (places - own).abs()).sum(-1)
    previous = (weights * (places == own - 1)).sum(-1)
    same = (weights * (places == own)).sum(-1)
    following = (weights * (places == own + 1)).sum(-1)
    return entropy, distance, previous, same, following, weights[..., mark]


# ---- for people and programs ----------------------------------------------------------------------------------------


def format_heads_markdown(report: HeadReport) -> str:
    """The report as Markdown tables."""
    target = "references" if report.is_forced else "the model's own translations"
    lines = [
        f"# What the heads of {report.run_dir} do",
        "",
        f"Means over {report.sentences} sentences, the decoder reading {target}. Entropy in bits, distance in pieces; "
        "the others are shares of the weight: on the position before the query's own, on its own, on the one after it, "
        "and on EOS (BOS in decoder self-attention). In cross-attention a query's own position is the one at the same "
        "share of the source.",
        "",
        *markdown_table(
            ("attention", "layer", "head", *MEASURES), [_head_cells(head) for head in report.heads], left={0}
        ),
    ]
    if report.alignments is not None:
        lines += ["", *describe_alignments(report.alignments)]
    return "\n".join(lines) + "\n"


def _head_cells(head: Head) -> list[str]:
    measures = [f"{head.measure(name):.2f}" for name in MEASURES]
    return [head.role, str(head.layer), str(head.head), *measures]


def format_heads_csv(report: HeadReport) -> str:
    """A line for each head, for programs."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Head)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(head) for head in report.heads)
    return text.getvalue()
