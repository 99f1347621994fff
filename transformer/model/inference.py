"""A model made ready to compute many times without gradients."""

import copy
from typing import TypeVar

from torch import nn

from transformer.compute import to_autocast_dtype
from transformer.kernels.linear import InferenceLinear
from transformer.model.transformer import Transformer

Shared = TypeVar("Shared", bound=nn.Module)


def for_inference(model: Transformer) -> Transformer:
    """A model that computes what `model` does in evaluation, with every linear map made ready once.

    It is to be made and used under the same autocast, and is good for as long as the weights of `model` stay as they
    are: what is not cast is shared with them. It can be neither trained nor copied.
    """
    ready = _share(model)
    for module in list(ready.modules()):
        module.training = False
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, InferenceLinear(child))

    # The pre-softmax map is a plain matrix. A CPU reads it faster in half precision where its columns lie together.
    output = to_autocast_dtype(model.output.detach())  # (V, D)
    if output.device.type == "cpu" and output.dtype.itemsize == 2:
        output = output.t().contiguous().t()
    del ready.output
    ready.output = output
    return ready


def _share(module: Shared) -> Shared:
    """Modules of the same structure that hold the same parameters and buffers."""
    shared = copy.copy(module)
    shared._parameters = dict(module._parameters)
    shared._buffers = dict(module._buffers)
    shared._modules = {name: None if child is None else _share(child) for name, child in module._modules.items()}
    return shared
