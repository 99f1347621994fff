"""Table 1 of the paper (section 4): layers that map n vectors of width d to n others, counted.

    complexity_rows   plain layers -> torch counts their products -> Complexity -> format_complexity

`tables` shows it as `table=1`, above `layer_times`. Nothing that is counted comes from the paper's formulas: the
multiply-adds are what torch counts in a plain layer, the sequential operations are the longest chain of matrix products
in its graph, and the path length comes from a walk from position to position.

Sizes: `n` positions, `d` width, `k` positions of a kernel, `r` positions of a neighbourhood in restricted attention.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from transformer.tools.markdown import markdown_table

PRODUCTS = ("MmBackward", "BmmBackward", "ConvolutionBackward")  # nodes of a graph that are matrix products


@dataclass(frozen=True)
class Complexity:
    """A row of Table 1: the paper's three formulas, each beside what was counted."""

    layer: str
    complexity: str  # of one layer, as the paper has it
    sequential: str
    path: str
    formula: int  # the paper's complexity with the sizes put in
    multiply_adds: int  # of one layer
    sequential_products: int  # matrix products that must wait for one another
    path_length: int  # steps between the two positions that are farthest apart


# The positions that a position reads in a step of the walk, itself among them: sees(step, position).
Sees = Callable[[int, int], Iterable[int]]


@dataclass(frozen=True)
class _Layer:
    """A layer to be counted, with what the paper says of it."""

    layer: str
    complexity: str
    sequential: str
    path: str
    formula: int
    apply: Callable[[Tensor], Tensor]  # (n, d) -> (n, d)
    sees: Sees
    is_directed: bool  # a position never hears of later ones


def complexity_rows(*, n: int, d: int, k: int, r: int) -> list[Complexity]:
    """Table 1 at these sizes. Convolution is there twice: only a stack of dilated kernels has a path of log_k(n).

    Neighbours beyond the edges are padding, and counted like any other. The projections of multi-head attention are
    not counted, because the paper leaves them out. Raises ValueError for sizes that connect no two positions.
    """
    if min(n, d) < 1 or min(k, r) < 3:
        raise ValueError(f"n={n} and d={d} must be at least 1, k={k} and r={r} at least 3: both neighbours")

    return [_count(layer, n, d) for layer in _layers(n, d, k=k, r=r)]


def _layers(n: int, d: int, *, k: int, r: int) -> list[_Layer]:
    """The rows of Table 1, ready to be counted."""
    # 1, k, k², ... below n, then from 1 again: near the edges one round does not reach every position.
    powers = [k**power for power in range(n.bit_length())]
    dilations = [power for power in powers if power < max(2, n)]

    return [
        _Layer(
            layer="self-attention",
            complexity="O(n² · d)",
            sequential="O(1)",
            path="O(1)",
            formula=n * n * d,
            apply=_attention,
            sees=partial(_sees_all, n=n),
            is_directed=False,
        ),
        _Layer(
            layer="recurrent",
            complexity="O(n · d²)",
            sequential="O(n)",
            path="O(n)",
            formula=n * d * d,
            apply=_recurrent,
            sees=_sees_state,
            is_directed=True,
        ),
        _Layer(
            layer="convolutional",
            complexity="O(k · n · d²)",
            sequential="O(1)",
            path="O(n / k)",
            formula=k * n * d * d,
            apply=partial(_convolution, k=k),
            sees=partial(_sees_window, n=n, width=k, dilations=[1]),
            is_directed=False,
        ),
        _Layer(
            layer="convolutional (dilated)",
            complexity="O(k · n · d²)",
            sequential="O(1)",
            path="O(log_k(n))",
            formula=k * n * d * d,
            apply=partial(_convolution, k=k),  # every layer of the stack costs the same
            sees=partial(_sees_window, n=n, width=k, dilations=dilations),
            is_directed=False,
        ),
        _Layer(
            layer="self-attention (restricted)",
            complexity="O(r · n · d)",
            sequential="O(1)",
            path="O(n / r)",
            formula=r * n * d,
            apply=partial(_restricted, r=r),
            sees=partial(_sees_window, n=n, width=r, dilations=[1]),
            is_directed=False,
        ),
    ]


def _count(layer: _Layer, n: int, d: int) -> Complexity:
    """Run the layer once on a tensor without values, which is enough to count."""
    x = torch.empty(n, d, device="meta", requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        out = layer.apply(x)

    return Complexity(
        layer=layer.layer,
        complexity=layer.complexity,
        sequential=layer.sequential,
        path=layer.path,
        formula=layer.formula,
        multiply_adds=counter.get_total_flops() // 2,
        sequential_products=_longest_chain(out),
        path_length=_path_length(n, layer.sees, is_directed=layer.is_directed),
    )


# The layers, written down plainly: x and the result are (n, d).


def _attention(x: Tensor) -> Tensor:
    weights = torch.softmax(x @ x.t(), dim=-1)  # (n, n)
    return weights @ x


def _restricted(x: Tensor, r: int) -> Tensor:
    """Each position attends to a window of r positions around it."""
    before = (r - 1) // 2
    padded = F.pad(x, (0, 0, before, r - 1 - before))  # (n + r - 1, d)
    windows = padded.unfold(0, r, 1)  # (n, d, r)

    weights = torch.softmax(x.unsqueeze(1) @ windows, dim=-1)  # (n, 1, r)
    return (weights @ windows.transpose(1, 2)).squeeze(1)


def _recurrent(x: Tensor) -> Tensor:
    """The simplest one, `h_t = tanh(x_t W + h_(t-1) U)`."""
    d = x.shape[1]
    of_input = x.new_empty(d, d)
    of_state = x.new_empty(d, d)

    state = x.new_zeros(1, d)
    states = []
    for vector in x.unbind():
        state = torch.tanh(vector.unsqueeze(0) @ of_input + state @ of_state)
        states.append(state)
    return torch.cat(states)


def _convolution(x: Tensor, k: int) -> Tensor:
    """A kernel of k positions, from every channel to every channel."""
    d = x.shape[1]
    kernel = x.new_empty(d, d, k)
    return F.conv1d(x.t().unsqueeze(0), kernel, padding="same").squeeze(0).t()


# What a position reads in a step, and how many steps it takes until every position has heard of every other one.


def _sees_all(step: int, position: int, *, n: int) -> Iterable[int]:
    return range(n)


def _sees_state(step: int, position: int) -> Iterable[int]:
    """The first step leads from an input to the state at its position, every other one from state to state."""
    if step == 0 or position == 0:
        return (position,)
    return (position - 1, position)


def _sees_window(step: int, position: int, *, n: int, width: int, dilations: Sequence[int]) -> Iterable[int]:
    """`width` positions around this one, as far apart as the step's dilation says; the dilations take turns."""
    dilation = dilations[step % len(dilations)]
    first = position - (width - 1) // 2 * dilation
    window = range(first, first + width * dilation, dilation)
    return (other for other in window if 0 <= other < n)


def _path_length(n: int, sees: Sees, *, is_directed: bool) -> int:
    """The steps after which every position has heard of every other one (of every earlier one, where directed)."""
    # A set of positions is a number with a bit for each of them.
    heard = [1 << position for position in range(n)]  # what each position has heard of: at first, of itself
    last_seen = range(n) if is_directed else [n - 1] * n  # by each position, in the end
    wanted = [(1 << (last + 1)) - 1 for last in last_seen]

    steps = 0
    while steps == 0 or heard != wanted:
        before = heard
        heard = []
        for position in range(n):
            bits = 0
            for other in sees(steps, position):
                bits |= before[other]
            heard.append(bits)
        steps += 1
    return steps


def _longest_chain(out: Tensor) -> int:
    """The most matrix products on any way through the graph that made a tensor."""
    assert out.grad_fn is not None
    longest: dict[Node, int] = {}  # the most products on any way that ends with this node

    # Depth first, with a stack of our own: the graph of a recurrent layer may be too deep for Python's.
    waiting = [out.grad_fn]
    while waiting:
        node = waiting[-1]
        inputs = [function for function, _ in node.next_functions if function is not None]
        unknown = [function for function in inputs if function not in longest]
        if unknown:
            waiting += unknown
            continue

        is_product = node.name().startswith(PRODUCTS)
        before = max((longest[function] for function in inputs), default=0)
        longest[node] = before + is_product
        waiting.pop()

    return longest[out.grad_fn]


def format_complexity(rows: Sequence[Complexity], *, n: int, d: int, k: int, r: int) -> str:
    """The rows as a Markdown table."""
    titles = (
        *("layer", "complexity", "multiply-adds", "x the formula"),
        *("sequential", "counted", "maximum path", "counted"),
    )
    cells = [
        (
            *(row.layer, row.complexity, f"{row.multiply_adds:,}", f"{row.multiply_adds / row.formula:.3g}"),
            *(row.sequential, str(row.sequential_products), row.path, str(row.path_length)),
        )
        for row in rows
    ]
    lines = [
        f"Table 1 of the paper, counted at n = {n}, d = {d}, k = {k}, r = {r}.",
        "",
        *markdown_table(titles, cells, left={0, 1, 4, 6}),
    ]
    return "".join(f"{line}\n" for line in lines)
