"""What of our models each format can express, and the weights of a model with the rest folded into them.

CTranslate2 and Marian divide scores by sqrt(w), with one width w for the queries, keys and values of a head. So heads
are padded with zeros to w, and W_q is multiplied by what turns 1/sqrt(w) into our scale: nothing changes but for the
rounding of W_q. ONNX holds our own operations, and needs none of this.

`H` heads, `D` d_model, `w` width of a head.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from transformer.config.settings import ModelConfig, Norm, Positions, Score, Target
from transformer.errors import InputError
from transformer.model.transformer import Transformer, parameters_by_name

Weights = dict[str, Tensor]  # under the names of a checkpoint, in float32


@dataclass(frozen=True)
class Heads:
    """The heads of every attention in a format: how many, and how wide."""

    count: int
    width: int


def check_expressible(config: ModelConfig, target: Target) -> None:
    """Raise InputError, with the key that is in the way, where a format has no place for what a model computes."""
    if target is Target.onnx:
        return

    name = {Target.ctranslate2: "CTranslate2", Target.marian: "Hugging Face's Marian"}[target]
    if config.score is Score.additive:
        raise InputError(f"model.score=additive: {name} has dot products only; to=onnx can express it")

    if target is Target.marian:
        other = "to=ctranslate2 and to=onnx can express it"
        if config.norm is Norm.pre:
            raise InputError(f"model.norm=pre: {name} has its norms after the residual sum only; {other}")
        if config.positions is Positions.learned:
            raise InputError(f"model.positions=learned: {name} computes sinusoids and stores no positions; {other}")
        marian_heads(config)


def ctranslate2_heads(config: ModelConfig) -> Heads:
    """Heads as wide as the wider of queries and values: the width is a setting there."""
    return Heads(config.n_heads, max(config.key_width, config.value_width))


def marian_heads(config: ModelConfig) -> Heads:
    """The fewest heads that share d_model, as Marian's do; heads that we do not have are zeros.

    Raises InputError where they are too narrow for ours.
    """
    count = next(count for count in range(config.n_heads, config.d_model + 1) if config.d_model % count == 0)
    width = config.d_model // count

    for key, wanted in (("d_k", config.key_width), ("d_v", config.value_width)):
        if wanted > width:
            raise InputError(
                f"model.{key}={wanted}: the heads of Hugging Face's Marian share model.d_model={config.d_model}, "
                f"{width} for each of {count}; to=ctranslate2 and to=onnx can express it"
            )
    return Heads(count, width)


def fold(model: Transformer, heads: Heads) -> Weights:
    """Copies of the model's weights, for a format that has these heads and the scale 1/sqrt(w)."""
    config = model.config
    factor = _queries_factor(config, heads)

    def queries(weight: Tensor) -> Tensor:
        return _pad_rows(weight.double() * factor, config.n_heads, heads)

    def rows(weight: Tensor) -> Tensor:
        return _pad_rows(weight, config.n_heads, heads)

    def columns(weight: Tensor) -> Tensor:
        return _pad_rows(weight.T, config.n_heads, heads).T

    folds: dict[str, Callable[[Tensor], Tensor]] = {"W_q": queries, "W_k": rows, "W_v": rows, "W_o": columns}

    folded = {}
    for name, weight in parameters_by_name(model).items():
        module = name.removesuffix(".weight").rpartition(".")[2]
        change = folds.get(module, torch.clone)
        folded[name] = change(weight.cpu()).float().contiguous()
    return folded


def is_rounded(config: ModelConfig, heads: Heads) -> bool:
    """Whether `fold` has to round W_q: to multiply by a power of two is exact."""
    mantissa, _ = math.frexp(_queries_factor(config, heads))
    return mantissa != 0.5


def _queries_factor(config: ModelConfig, heads: Heads) -> float:
    """Our scale over 1/sqrt(w)."""
    return math.sqrt(heads.width / config.key_width if config.score is Score.scaled else heads.width)


def _pad_rows(weight: Tensor, n_heads: int, heads: Heads) -> Tensor:
    """The rows of `n_heads` heads `(H K, D)`, with zeros up to the heads of a format: `(count w, D)`."""
    by_head = weight.unflatten(0, (n_heads, -1))  # type: ignore[no-untyped-call]  # (H, K, D)
    missing_heads = heads.count - n_heads
    missing_width = heads.width - by_head.shape[1]
    return F.pad(by_head, (0, 0, 0, missing_width, 0, missing_heads)).flatten(0, 1)
