"""Measures what section 3.2 of the paper says of costs: time and memory of each score, and many heads against one.

    a layer with each score -> layer_times.time_in_turns, peak_bytes                 -> ScoreCost
    8 heads, and one        -> layer_times.time_in_turns, torch's count of products  -> HeadsCost

One layer is multi-head self-attention as the model has it, with its projections, forward and backward. Memory is
counted, not sampled: the largest sum of the tensors that exist at one time beside the layer's weights and input. What
a kernel takes for itself while it runs is not in it.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode

from transformer.config.settings import Score
from transformer.tools.paper.layer_times import SelfAttention, forward_and_backward, time_in_turns
from transformer.tools.paper.published import WIDTH

LENGTHS = (16, 64, 256)
TOKENS = 2048  # of a measurement, in sentences of one length
REPEATS = 3

HEADS_LENGTH = 64  # of the sentences over which the heads of section 3.2.2 are timed: 8 of width 64, or one of 512


@dataclass(frozen=True)
class ScoreCost:
    """Forward and backward of one layer with this score, over `TOKENS` tokens in sentences of `n`."""

    score: Score
    d_k: int
    n: int
    milliseconds: float
    mebibytes: float  # at the peak


@dataclass(frozen=True)
class HeadsCost:
    """One layer over `TOKENS` tokens: the multiply-adds of its forward products, and its time forward and backward."""

    n_heads: int
    d_k: int
    multiply_adds: int
    milliseconds: float


def cost_of_scores(widths: Sequence[int], *, d_model: int, device: torch.device) -> list[ScoreCost]:
    """Every score at each of these d_k and at each length; the scores of one d_k and length take turns."""
    costs = []
    for n in LENGTHS:
        x = torch.randn(TOKENS // n, n, d_model, device=device, requires_grad=True)
        for d_k in widths:
            costs += _cost_of_scores_at(d_k, x)
    return costs


def _cost_of_scores_at(d_k: int, x: Tensor) -> list[ScoreCost]:
    """Every score at one d_k over `x` `(B, n, D)`, in turns."""
    _, n, d_model = x.shape
    layers: dict[str, nn.Module] = {}
    for score in Score:
        layers[score.value] = SelfAttention(d_model, d_model // d_k, score=score, block=None).to(x.device)

    costs = []
    for time in time_in_turns(layers, x, repeats=REPEATS):
        peak = peak_bytes(partial(forward_and_backward, layers[time.layer], x))
        costs.append(
            ScoreCost(
                score=Score(time.layer),
                d_k=d_k,
                n=n,
                milliseconds=time.forward_backward,
                mebibytes=peak / 2**20,
            )
        )
    return costs


def cost_of_heads(device: torch.device) -> list[HeadsCost]:
    """8 heads of width 64 and one of 512, counted and timed."""
    x = torch.randn(TOKENS // HEADS_LENGTH, HEADS_LENGTH, WIDTH, device=device, requires_grad=True)
    layers: dict[str, nn.Module] = {}
    for n_heads in (8, 1):
        layers[str(n_heads)] = SelfAttention(WIDTH, n_heads, score=Score.scaled, block=None).to(device)

    costs = []
    for time in time_in_turns(layers, x, repeats=REPEATS):
        n_heads = int(time.layer)
        costs.append(
            HeadsCost(
                n_heads=n_heads,
                d_k=WIDTH // n_heads,
                multiply_adds=_multiply_adds(layers[time.layer], x),
                milliseconds=time.forward_backward,
            )
        )
    return costs


def _multiply_adds(layer: nn.Module, x: Tensor) -> int:
    """The multiply-adds of a forward pass, by plain products, which torch's counter knows on every device."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        layer(x)
    return counter.get_total_flops() // 2


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes that the tensors which `work` makes take at one time; kernels' own memory is not counted."""
    with _TensorBytes() as tensors:
        work()
    return tensors.peak


class _TensorBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storage of every tensor that an operator returns, until nothing holds it any more."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0  # bytes
        self._now = 0  # bytes
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # An argument was there before, or has been counted.
        for tensor in tree_iter((args, kwargs)):
            if isinstance(tensor, Tensor):
                self._known.add(tensor.untyped_storage())

        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that is new, until nothing holds it."""
        if storage in self._known:
            return
        self._known.add(storage)

        size = storage.nbytes()
        self._now += size
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self._now -= size
