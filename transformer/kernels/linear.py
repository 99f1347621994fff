"""Linear maps for inference: the weight cast once, and laid out once as the library of a CPU wants it.

`nn.Linear` under autocast hands a weight over row by row in each call, and the library lays it out anew each time: for
the few hundred rows of a step of a search, that is a fifth of the time of a product in half precision, and half of it
where a single sentence is translated.
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
        self._packs = weight.device.type == "cpu" and weight.dtype is torch.bfloat16 and can_pack()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packs else weight
        self._bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """`(..., in)` -> `(..., out)`."""
        x = to_autocast_dtype(x)
        if not self._packs:
            return F.linear(x, self._weight, self._bias)

        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return out


def can_pack() -> bool:
    """Whether torch offers oneDNN's laid-out weights, which it keeps private."""
    names = ("_reorder_linear_weight", "_linear_pointwise")
    return all(hasattr(torch.ops.mkldnn, name) for name in names)
