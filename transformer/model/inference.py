"""A model made ready to compute many times without gradients: what `decoding` searches with."""

import copy
from typing import TypeVar

from torch import nn

from transformer.compute import to_autocast_dtype
from transformer.kernels.linear import InferenceLinear, prepare_weight
from transformer.model.transformer import Transformer

Shared = TypeVar("Shared", bound=nn.Module)


def for_inference(model: Transformer) -> Transformer:
    """A model that computes what `model` does in evaluation, with every weight cast and laid out once.

    Make and use it under the same autocast, and only as long as the weights of `model` stay as they are: those that
    are used as they are, are shared. It can be neither trained nor copied.
    """
    ready = _share(model)
    for module in list(ready.modules()):
        module.training = False
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, InferenceLinear(child))

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
