"""Residual connection, dropout and LayerNorm in one on a GPU: our Triton kernel, and its plain form.

`LayerNorm(x + Dropout(y))` is around every sub-layer (section 3.1), so a step of base has 30 of them: they read and
write as much memory as its attentions. A compiler makes several kernels for the backward pass, and draws a random
number for each element in both directions.

State: the kernel computes what it should in Triton's interpreter. No GPU has run it, and so only `train.kernels=fused`
takes it.
"""

from torch import Tensor
from torch.nn import functional as F

from transformer.compute import at_least_fp32
from transformer.kernels.dropout import draw_seed

WIDEST = 8_192  # numbers of a row that the kernel holds


def can_add_norm(d_model: int) -> bool:
    """Whether the kernel takes rows of so many numbers."""
    return d_model % 8 == 0 and d_model <= WIDEST


def plain_add_norm(x: Tensor, y: Tensor, gain: Tensor, bias: Tensor, *, kept: Tensor | None, eps: float) -> Tensor:
    """`LayerNorm(x + Dropout(y))` of `(N, D)`: 0 in `kept` for what is dropped, else 1 over the share that is kept."""
    total = x + (y if kept is None else y * kept)
    return F.layer_norm(at_least_fp32(total), gain.shape, gain, bias, eps).to(y.dtype)


def triton_add_norm(x: Tensor, y: Tensor, gain: Tensor, bias: Tensor, *, dropout: float, eps: float) -> Tensor:
    """The same of `(..., D)` by the kernel, with dropout of its own: it follows from one random number, drawn here.

    The sum is kept in the wider type of the two, the result is in that of y; all else is in fp32 (fp64 stays fp64).
    """
    from transformer.kernels.gpu.norm import add_norm  # needs Triton

    rows = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (x, y))
    out, *_ = add_norm(*rows, gain, bias, draw_seed(dropout, x.device), dropout, eps)
    return out.view(y.shape)
