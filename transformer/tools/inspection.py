"""Attention weights for one sentence pair: of every head of every layer, in all three roles (section 3.2.3).

The fast forms of attention never hold these weights. Here they are computed again by `attention_weights`, from what
each attention module is given while the model runs. `L` layers of the encoder or of the decoder, `H` heads, `S` source
and `T` target positions.
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
    weights: dict[Role, list[Tensor]] = {role: [] for role in Role}  # of each layer, (H, queries, keys)
    was_training = model.training
    model.eval()

    try:
        with ExitStack() as hooks, torch.no_grad(), autocast(device, precision):
            for role, attention in _attentions(model):
                hook = attention.register_forward_hook(partial(_keep_weights, weights[role]), with_kwargs=True)
                hooks.callback(hook.remove)

            source_ids = torch.tensor([[*source, EOS]], device=device)  # (1, S)
            source_layout = Padded.full_rows(1, source_ids.shape[1], device)
            memory = model.encode(source_ids, source_layout)  # (1, S, D)

            target_ids = torch.tensor([[BOS, *target]], device=device)  # (1, T)
            target_layout = Padded.full_rows(1, target_ids.shape[1], device)
            model.decode(target_ids, target_layout, memory=memory, memory_layout=source_layout)
    finally:
        model.train(was_training)

    return AttentionMaps(
        encoder_self=torch.stack(weights[Role.encoder_self]).cpu(),
        decoder_self=torch.stack(weights[Role.decoder_self]).cpu(),
        cross=torch.stack(weights[Role.cross]).cpu(),
    )


def _attentions(model: Transformer) -> list[tuple[Role, nn.Module]]:
    """Every attention module with its role, the first layer first."""
    encoder = [(Role.encoder_self, cast(nn.Module, layer.self_attention)) for layer in model.encoder]
    decoder = [(Role.decoder_self, cast(nn.Module, layer.self_attention)) for layer in model.decoder]
    cross = [(Role.cross, cast(nn.Module, layer.cross_attention)) for layer in model.decoder]
    return [*encoder, *decoder, *cross]


def _keep_weights(
    kept: list[Tensor], attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
) -> None:
    """A forward hook: compute the weights of the only sentence again, `(H, queries, keys)`, and add them to `kept`."""
    assert isinstance(attention, MultiHeadAttention)
    x, kv = args
    kept.append(attention.weights(x, kv, **kwargs)[0])
