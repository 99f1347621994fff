"""Linear maps for inference: the weight cast once, and laid out once as the library of a CPU wants it.

`nn.Linear` hands a weight over row by row in each call, and the library lays it out anew each time. For the few hundred
rows of a step of a search that is up to a third of the time of a product, and for the four rows of a single sentence
mostly a third to two thirds. In fp32 torch multiplies by MKL, whose own packed weights are no faster for a batch, and
take 1.6 times as long for a single sentence, so fp32 goes to oneDNN as well. What was laid out is a copy.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transformer.compute import to_autocast_dtype

PACKED = (torch.float32, torch.bfloat16)  # the types that oneDNN multiplies on a CPU


class InferenceLinear(nn.Module):
    """The same map as a Linear, without gradients, in the type that autocast multiplies in."""

    def __init__(self, *linears: nn.Linear) -> None:
        """Of several maps, their results side by side: all or none has a bias."""
        super().__init__()
        self.out_features = sum(linear.out_features for linear in linears)
        self._weight = prepare_weight(_side_by_side([linear.weight for linear in linears]))
        biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
        self._bias = to_autocast_dtype(_side_by_side(biases).detach()) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        """`(..., in)` -> `(..., out)`."""
        return apply_linear(x, self._weight, self._bias)


def apply_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`(..., in)` -> `(..., out)`, with a weight `(out, in)` that may come from `prepare_weight`."""
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)

    out: Tensor = torch.ops.mkldnn._linear_pointwise(to_autocast_dtype(x), weight, bias, "none", [], "")
    return out


def _side_by_side(parts: list[Tensor]) -> Tensor:
    """The rows of all; of a single one no copy."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def prepare_weight(weight: Tensor) -> Tensor:
    """A weight `(out, in)` for many products without gradients: cast for autocast, and packed where that can be had."""
    cast = to_autocast_dtype(weight.detach())
    packed = pack(cast)
    return cast if packed is None else packed


def pack(weight: Tensor) -> Tensor | None:
    """A weight `(out, in)` as oneDNN wants it, or None where that cannot be had.

    torch keeps the two functions private, and for bf16 they refuse processors that do not multiply it in hardware.
    """
    functions = ("_reorder_linear_weight", "_linear_pointwise")
    has_functions = all(hasattr(torch.ops.mkldnn, name) for name in functions)
    if weight.device.type != "cpu" or weight.dtype not in PACKED or not has_functions:
        return None

    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    except RuntimeError:
        return None
    return packed
