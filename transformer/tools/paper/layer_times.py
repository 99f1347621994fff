"""The layers of Table 1 of the paper (section 4) in real use, timed.

    time_layers     our attention, torch's LSTM and convolution -> time_in_turns -> LayerTime -> format_times
    time_in_turns   any layers -> a clock, taking turns -> LayerTime

`tables` shows them as `table=1`, below what `complexity` counts; the study of scores times layers of its own.

Shapes: `B` sentences of `n` positions, `D` d_model; `k` positions of a kernel, `r` positions of a block of restricted
attention.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from transformer.config.settings import Score
from transformer.layout import Padded
from transformer.model.attention import MultiHeadAttention
from transformer.tools.markdown import markdown_table

# Sizes of the timing: under a minute on two cores.
LENGTHS = (16, 64, 256, 512, 1024, 2048)
TOKENS = 2048
REPEATS = 3


@dataclass(frozen=True)
class LayerTime:
    """How long one layer takes for so many tokens in sentences of this length: medians, in milliseconds."""

    layer: str
    n: int
    tokens: int
    forward: float
    forward_backward: float
    repeats: int


def time_layers(
    lengths: Sequence[int] = LENGTHS,
    *,
    d_model: int,
    n_heads: int,
    k: int,
    r: int,
    device: torch.device,
    tokens: int = TOKENS,
    repeats: int = REPEATS,
) -> list[LayerTime]:
    """Time our multi-head attention beside torch's LSTM and convolution, each over the same number of tokens.

    A measurement has `tokens // n` sentences of n positions, one at least. Restricted attention is ours in blocks of r
    positions: it costs what a window around each position would, and torch has no kernel for that on a CPU. The layers
    take turns, so that a disturbance hits all alike. The caller sets torch's threads. Raises ValueError for a length
    that cannot be cut into blocks.
    """
    if any(n > r and n % r for n in lengths):
        raise ValueError(f"lengths {list(lengths)} above r={r} must be multiples of it")

    layers = _timed_layers(d_model, n_heads, k=k, r=r, device=device)
    rows = []
    for n in lengths:
        sentences = max(1, tokens // n)
        x = torch.randn(sentences, n, d_model, device=device, requires_grad=True)
        rows += time_in_turns(layers, x, repeats=repeats)
    return rows


def _timed_layers(d_model: int, n_heads: int, *, k: int, r: int, device: torch.device) -> dict[str, nn.Module]:
    """Layers that map (B, n, D) to the same."""
    layers: dict[str, nn.Module] = {
        "self-attention": SelfAttention(d_model, n_heads, score=Score.scaled, block=None),
        "self-attention (restricted)": SelfAttention(d_model, n_heads, score=Score.scaled, block=r),
        "recurrent (LSTM)": _Recurrent(d_model),
        "convolutional": _Convolution(d_model, k),
    }
    return {name: layer.to(device) for name, layer in layers.items()}


class SelfAttention(nn.Module):
    """Multi-head self-attention `(B, n, D)` to the same, over whole sentences or inside blocks of so many positions."""

    def __init__(self, d_model: int, n_heads: int, *, score: Score, block: int | None) -> None:
        super().__init__()
        width = d_model // n_heads
        self.block = block
        self.attention = MultiHeadAttention(
            d_model, n_heads, d_k=width, d_v=width, score=score, biases=False, dropout=0.0
        )

    def forward(self, x: Tensor) -> Tensor:
        # Blocks are sentences of their own, so that attention stays inside each.
        width = x.shape[1] if self.block is None else min(x.shape[1], self.block)
        rows = x.reshape(-1, width, x.shape[2])  # (B n / width, width, D)
        layout = Padded.full_rows(rows.shape[0], width, x.device)

        kv = self.attention.keys_values(rows)
        out: Tensor = self.attention(rows, kv, queries=layout, keys=layout, causal=False)
        return out.view(x.shape)  # (B, n, D)


class _Recurrent(nn.Module):
    """One layer of torch's LSTM, `(B, n, D)` to the same."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(d_model, d_model, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lstm(x)[0]
        return out


class _Convolution(nn.Module):
    """torch's convolution with a kernel of k positions, `(B, n, D)` to the same."""

    def __init__(self, d_model: int, k: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(d_model, d_model, k, padding="same")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.convolution(x.transpose(1, 2)).transpose(1, 2)
        return out


def time_in_turns(layers: dict[str, nn.Module], x: Tensor, *, repeats: int) -> list[LayerTime]:
    """Every layer on `x` `(B, n, D)`, in turns: a disturbance hits all alike."""
    forward: dict[str, list[float]] = {name: [] for name in layers}
    forward_backward: dict[str, list[float]] = {name: [] for name in layers}

    for turn in range(repeats + 1):
        for name, layer in layers.items():
            forward_seconds = _seconds(partial(_forward, layer, x), x.device)
            both_seconds = _seconds(partial(forward_and_backward, layer, x), x.device)
            if turn > 0:  # the first turn pays for memory and kernels of a new shape
                forward[name].append(forward_seconds)
                forward_backward[name].append(both_seconds)

    return [
        LayerTime(
            layer=name,
            n=x.shape[1],
            tokens=x.shape[0] * x.shape[1],
            forward=1000 * statistics.median(forward[name]),
            forward_backward=1000 * statistics.median(forward_backward[name]),
            repeats=repeats,
        )
        for name in layers
    ]


def _forward(layer: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        layer(x)


def forward_and_backward(layer: nn.Module, x: Tensor) -> None:
    """One pass each way, with new gradients."""
    layer.zero_grad(set_to_none=True)
    x.grad = None
    out = layer(x)
    out.backward(x.detach())  # any gradient: its values change nothing


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    """How long a piece of work takes, with what it leaves running on the device."""
    _synchronise(device)
    started = time.perf_counter()
    work()
    _synchronise(device)
    return time.perf_counter() - started


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def format_times(rows: Sequence[LayerTime]) -> str:
    """The rows as a Markdown table: a line for each length, forward + backward and, in brackets, forward alone."""
    layers = list(dict.fromkeys(row.layer for row in rows))
    lengths = list(dict.fromkeys(row.n for row in rows))
    time_of = {(row.layer, row.n): row for row in rows}

    cells = []
    for n in lengths:
        times = [time_of[layer, n] for layer in layers]
        of_layers = [f"{time.forward_backward:.1f} ({time.forward:.1f})" for time in times]
        cells.append([f"{n:,}", f"{times[0].tokens:,}", *of_layers])
    lines = [
        "Milliseconds of one layer, forward and backward (forward alone), over the same number of tokens.",
        "",
        *markdown_table(["n", "tokens", *layers], cells, left=()),
    ]
    return "".join(f"{line}\n" for line in lines)
