"""A model prepared for many computations without gradients, for `decoding` to search with."""

import copy
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transformer.compute import to_autocast_dtype
from transformer.kernels.linear import InferenceLinear, prepare_weight
from transformer.model.layers import AddNorm, DecoderLayer
from transformer.model.transformer import Transformer

Shared = TypeVar("Shared", bound=nn.Module)


class InferenceNorm(nn.Module):
    """The same as an AddNorm of post-norm, in the type that autocast multiplies in: its kernel adds up in fp32 anyway.

    Autocast would cast what goes in and what comes out, by kernels of their own.
    """

    def __init__(self, norm: AddNorm) -> None:
        super().__init__()
        self._shape = norm.normalized_shape
        self._eps = norm.eps
        self._weight = to_autocast_dtype(norm.weight.detach())
        self._bias = to_autocast_dtype(norm.bias.detach())

    def before(self, x: Tensor) -> Tensor:
        """As `AddNorm.before`: a post-norm changes nothing here."""
        return x

    def forward(self, x: Tensor, y: Tensor, *, fused: bool = False) -> Tensor:
        """`(..., D)` each -> `(..., D)`; `fused`, as of AddNorm, changes nothing here."""
        total = (x + y).to(self._weight.dtype)
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(total, self._shape, self._weight, self._bias, self._eps)


def _casts_norms(device: torch.device) -> bool:
    """Whether autocast casts what a norm reads and writes: it does on a GPU."""
    return device.type == "cuda" and torch.is_autocast_enabled(device.type)


def for_inference(model: Transformer) -> Transformer:
    """A model that computes what `model` does in evaluation, with every weight cast and laid out once.

    Make and use it under the same autocast, and only as long as the weights of `model` stay as they are: those that
    are used as they are, are shared. It can be neither trained nor copied.
    """
    ready = _share(model)
    for layer in cast(list[DecoderLayer], list(ready.decoder)):
        attention = layer.self_attention
        attention.W_qkv = InferenceLinear(attention.W_q, attention.W_k, attention.W_v)
    for module in list(ready.modules()):
        module.training = False
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, InferenceLinear(child))
            elif isinstance(child, AddNorm) and not child.pre and _casts_norms(child.weight.device):
                setattr(module, name, InferenceNorm(child))

    # The pre-softmax map is no module but a matrix.
    output = prepare_weight(model.output)  # (V, D)
    del ready.output
    ready.output = output
    if model.output_bias is not None:
        bias = to_autocast_dtype(model.output_bias.detach())  # (V,)
        del ready.output_bias
        ready.output_bias = bias
    return ready


def _share(module: Shared) -> Shared:
    """A copy of a module and of those in it, with the same parameters and buffers."""
    shared = copy.copy(module)
    shared._parameters = dict(module._parameters)
    shared._buffers = dict(module._buffers)
    shared._modules = {name: None if child is None else _share(child) for name, child in module._modules.items()}
    return shared
