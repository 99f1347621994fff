"""Who attends to whom: the weights of every head of every layer in all three roles, for one sentence pair.

The fast forms of attention never hold these weights. Here they are computed again by `attention_weights`, from what
each attention module is given while the model runs. `L` layers, `H` heads, `S` source and `T` target positions.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from transformer.compute import autocast
from transformer.config.settings import Precision
from transformer.layout import Padded
from transformer.model.attention import MultiHeadAttention
from transformer.model.transformer import Transformer
from transformer.vocabulary import BOS, EOS

_CELL = 6  # pixels of a weight in a picture
_GAP = 4  # pixels between two heads


class Role(Enum):
    """Which attention of a layer (section 3.2.3)."""

    encoder_self = "encoder_self"
    decoder_self = "decoder_self"
    cross = "cross"


@dataclass(frozen=True)
class AttentionMaps:
    """The weights of one sentence pair; each row of keys sums to 1.

    Source positions are its pieces and EOS. Target positions are what the decoder reads, BOS and the pieces; at each of
    them it predicts the next piece, at the last one EOS.
    """

    encoder_self: Tensor  # (L, H, S, S)
    decoder_self: Tensor  # (L, H, T, T): position t sees 0..t
    cross: Tensor  # (L, H, T, S)

    def of(self, role: Role) -> Tensor:
        """The weights of a role, `(L, H, queries, keys)`."""
        return cast(Tensor, getattr(self, role.value))


def attention_maps(
    model: Transformer,
    source: Sequence[int],
    target: Sequence[int],
    *,
    device: torch.device,
    precision: Precision,
) -> AttentionMaps:
    """The weights with which `model` reads these pieces, without EOS and BOS, in evaluation; in fp32 at least.

    The model computes where and in which arithmetic it is told to, and is left as it was.
    """
    found: dict[Role, list[Tensor]] = {role: [] for role in Role}
    was_training = model.training
    model.eval()

    try:
        with ExitStack() as held, torch.no_grad(), autocast(device, precision):
            for role, attention in _attentions(model):
                hook = partial(_keep_weights, found[role])
                held.callback(attention.register_forward_hook(hook, with_kwargs=True).remove)

            source_ids = torch.tensor([[*source, EOS]], device=device)
            target_ids = torch.tensor([[BOS, *target]], device=device)
            source_layout, target_layout = (Padded.full_rows(1, x.shape[1], device) for x in (source_ids, target_ids))
            memory = model.encode(source_ids, source_layout)
            model.decode(target_ids, target_layout, memory=memory, memory_layout=source_layout)
    finally:
        model.train(was_training)

    return AttentionMaps(*(torch.stack(found[role]).cpu() for role in Role))


def _attentions(model: Transformer) -> list[tuple[Role, nn.Module]]:
    """Every attention module with its role, the first layer first."""
    encoder = [(Role.encoder_self, cast(nn.Module, layer.self_attention)) for layer in model.encoder]
    decoder = [(Role.decoder_self, cast(nn.Module, layer.self_attention)) for layer in model.decoder]
    cross = [(Role.cross, cast(nn.Module, layer.cross_attention)) for layer in model.decoder]
    return [*encoder, *decoder, *cross]


def _keep_weights(
    found: list[Tensor], attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
) -> None:
    """A forward hook: compute the weights of the first sentence again, and add them to `found`."""
    assert isinstance(attention, MultiHeadAttention)
    x, kv = args
    found.append(attention.weights(x, kv, **kwargs)[0])


def draw(weights: Tensor) -> Tensor:
    """Weights `(L, H, queries, keys)` as a picture in grey, `(1, height, width)` uint8: layers below one another.

    The heads of a layer stand side by side, queries from top to bottom, keys from left to right. Weight 1 is black.
    """
    layers, heads, queries, keys = weights.shape
    height = queries * _CELL + _GAP
    width = keys * _CELL + _GAP
    picture = torch.full((layers, heads, height, width), 160, dtype=torch.uint8)  # the gaps stay so

    cells = (255 * (1 - weights)).round().to(torch.uint8)
    cells = cells.repeat_interleave(_CELL, dim=2).repeat_interleave(_CELL, dim=3)
    picture[:, :, : height - _GAP, : width - _GAP] = cells
    return picture.transpose(1, 2).reshape(1, layers * height, heads * width)
