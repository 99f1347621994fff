"""Linear maps for inference: the weight cast once, and laid out once as the library of a CPU wants it.

`nn.Linear` under autocast hands a weight over row by row in each call, and the library lays it out anew each time: for
the few hundred rows of a step of a search, that is a fifth of the time of a product in half precision, and half of it
where a single sentence is translated. In fp32 there is nothing to gain: MKL's packed weights are no faster for a batch,
and take 1.6 times as long for a single sentence.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transformer.compute import to_autocast_dtype


class InferenceLinear(nn.Module):
    """The same map as a Linear, without gradients, in the type that autocast multiplies in."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = to_autocast_dtype(linear.weight.detach())
        bias = None if linear.bias is None else to_autocast_dtype(linear.bias.detach())
        packed = pack(weight)
        self._is_packed = packed is not None
        self._weight = weight if packed is None else packed
        self._bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """`(..., in)` -> `(..., out)`."""
        x = to_autocast_dtype(x)
        if not self._is_packed:
            return F.linear(x, self._weight, self._bias)

        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return out


def pack(weight: Tensor) -> Tensor | None:
    """A bf16 weight `(out, in)` as oneDNN wants it, or None where that cannot be had.

    torch keeps the two functions private, and they refuse processors that do not multiply bf16 in hardware.
    """
    functions = ("_reorder_linear_weight", "_linear_pointwise")
    has_functions = all(hasattr(torch.ops.mkldnn, name) for name in functions)
    if weight.device.type != "cpu" or weight.dtype is not torch.bfloat16 or not has_functions:
        return None

    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    except RuntimeError:
        return None
    return packed
