"""The weights of a model of ours under the names that Hugging Face's MarianMTModel has, and in its order of channels.

MarianMTModel computes its table of positions with all sines before all cosines, where ours alternate. So the channels
of the residual stream are permuted, in every weight that reads or writes it. Imports and exports share this.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# Our names for the parts of a layer, and theirs.
_PARTS = {
    "self_attention": "self_attn",
    "cross_attention": "encoder_attn",
    "W_q": "q_proj",
    "W_k": "k_proj",
    "W_v": "v_proj",
    "W_o": "out_proj",
    "feed_forward.W_1": "fc1",
    "feed_forward.W_2": "fc2",
    "self_attention_norm": "self_attn_layer_norm",
    "cross_attention_norm": "encoder_attn_layer_norm",
    "feed_forward_norm": "final_layer_norm",
}
_READERS = ("W_q", "W_k", "W_v", "W_1")  # of the residual stream; all other parts write it, or are as wide


class MarianName(NamedTuple):
    """Where a weight of a layer is in a MarianMTModel."""

    name: str
    is_reader: bool  # of the residual stream: it has the stream in its columns, and a bias without it

    def permuted(self, weight: Tensor, channels: Tensor) -> Tensor:
        """The weight with these channels of the residual stream: see `channels_of` and `original_channels`."""
        if not self.is_reader:
            return weight[channels]
        return weight[:, channels] if weight.ndim == 2 else weight


def name_in_marian(name: str) -> MarianName:
    """The place of a parameter of a layer, such as `decoder.0.cross_attention.W_q.weight`."""
    stack, layer, part = name.split(".", 2)
    module, _, kind = part.rpartition(".")
    if module in _PARTS:  # a norm, or a part of the feed-forward network
        their_module = _PARTS[module]
    else:  # a projection of attention
        attention, projection = module.split(".")
        their_module = f"{_PARTS[attention]}.{_PARTS[projection]}"
    return MarianName(f"model.{stack}.layers.{layer}.{their_module}.{kind}", module.endswith(_READERS))


def channels_of(d_model: int) -> Tensor:
    """Which of our channels each of theirs is, `(D,)`."""
    return torch.cat((torch.arange(0, d_model, 2), torch.arange(1, d_model, 2)))


def original_channels(d_model: int) -> Tensor:
    """Which of their channels each of ours is, `(D,)`."""
    return channels_of(d_model).argsort()
