"""Linear maps for inference: the weight cast once, and laid out once as the library of a CPU wants it.

`nn.Linear` hands a weight over row by row in each call, and the library lays it out anew each time: for the few hundred
rows of a step of a search, that is a fifth of the time of a product in half precision and a tenth in fp32, and half of
it where a single sentence is translated.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transformer.compute import to_autocast_dtype


class InferenceLinear(nn.Module):
    """The map of weight `(out, in)` and bias `(out,)` without gradients, in the type that autocast multiplies in."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._weight = to_autocast_dtype(weight.detach())
        self._bias = None if bias is None else to_autocast_dtype(bias.detach())
        self._packed = pack(self._weight, self._bias)

    def forward(self, x: Tensor) -> Tensor:
        """`(..., in)` -> `(..., out)`."""
        x = to_autocast_dtype(x)
        return F.linear(x, self._weight, self._bias) if self._packed is None else self._packed(x)


def pack(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
    """The map of a weight on a CPU, laid out for oneDNN (bf16) or MKL (fp32), or None where that cannot be had.

    torch keeps these functions private, has MKL on x86 alone, and oneDNN refuses processors that do not multiply bf16
    in hardware.
    """
    if weight.device.type != "cpu":
        return None

    try:
        match weight.dtype:
            case torch.bfloat16:
                return _pack_for_onednn(weight, bias)
            case torch.float32:
                return _pack_for_mkl(weight, bias)
    except (AttributeError, RuntimeError):
        pass
    return None


def _pack_for_onednn(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    multiply = torch.ops.mkldnn._linear_pointwise
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)

    def linear(x: Tensor) -> Tensor:
        out: Tensor = multiply(x, packed, bias, "none", [], "")
        return out

    return linear


def _pack_for_mkl(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    multiply = torch.ops.mkl._mkl_linear
    packed: Tensor = torch.ops.mkl._mkl_reorder_linear_weight(weight, 1)  # the layout is the same for any rows of x

    def linear(x: Tensor) -> Tensor:
        rows = x.shape[:-1].numel()  # torch lays the weight out anew unless it is told these
        out: Tensor = multiply(x, packed, weight, bias, rows)
        return out

    return linear
