"""What each format can express of our models, and the weights of a model with the rest folded into them.

    check_expressible   refuses a model before anything is written
    fold                the weights of a model -> those of an equal model in the terms of CTranslate2 or Marian

CTranslate2 and Marian divide scores by sqrt(w), with one width w for the queries, keys and values of a head. So heads
are padded with zeros to w, and W_q is multiplied by what turns 1/sqrt(w) into our scale: nothing changes but for the
rounding of W_q. ONNX holds our own operations, and needs none of this.

`H` heads, `D` d_model, `w` width of a head.
"""

import math
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from transformer.config.settings import ModelConfig, Norm, Positions, Score
from transformer.errors import InputError
from transformer.model.transformer import Transformer, parameters_by_name
from transformer.tools.export.job import Target

Weights = dict[str, Tensor]  # under the names of a checkpoint, in float32


@dataclass(frozen=True)
class Heads:
    """The heads of every attention in a format: how many, and how wide."""

    count: int
    width: int


def check_expressible(config: ModelConfig, target: Target) -> None:
    """Raise InputError, which names the setting, where a format cannot express what the model computes."""
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
    """Heads as wide as the wider of queries and values: CTranslate2 has a setting for the width."""
    return Heads(config.n_heads, max(config.key_width, config.value_width))


def marian_heads(config: ModelConfig) -> Heads:
    """The fewest heads that divide d_model among them, as Marian's do; the heads beyond ours are zeros.

    Raises InputError where such heads are too narrow for ours.
    """
    counts = range(config.n_heads, config.d_model + 1)
    count = next(count for count in counts if config.d_model % count == 0)
    width = config.d_model // count

    for key, needed in (("d_k", config.key_width), ("d_v", config.value_width)):
        if needed > width:
            raise InputError(
                f"model.{key}={needed}: the heads of Hugging Face's Marian share model.d_model={config.d_model}, "
                f"{width} for each of {count}; to=ctranslate2 and to=onnx can express it"
            )
    return Heads(count, width)


def fold(model: Transformer, heads: Heads) -> Weights:
    """Copies of the model's weights, for a format that has these heads and the scale 1/sqrt(w)."""
    folded = {}
    for name, weight in parameters_by_name(model).items():
        module = name.removesuffix(".weight").rpartition(".")[2]
        folded[name] = _fold_weight(weight.cpu(), module, model.config, heads=heads).float().contiguous()
    return folded


def _fold_weight(weight: Tensor, module: str, config: ModelConfig, *, heads: Heads) -> Tensor:
    """A copy of the weight of a module: of a projection of attention, with the heads of the format."""
    match module:
        case "W_q":
            return _pad_rows(weight.double() * _queries_factor(config, heads), config.n_heads, heads)
        case "W_k" | "W_v":
            return _pad_rows(weight, config.n_heads, heads)
        case "W_o":  # which reads heads: they are its columns
            return _pad_rows(weight.T, config.n_heads, heads).T
        case _:
            return weight.clone()


def is_rounded(config: ModelConfig, heads: Heads) -> bool:
    """Whether `fold` has to round W_q: only a factor that is a power of two is exact."""
    mantissa, _ = math.frexp(_queries_factor(config, heads))
    return mantissa != 0.5


def _queries_factor(config: ModelConfig, heads: Heads) -> float:
    """Our scale, 1/sqrt(d_k) or 1, over the format's 1/sqrt(w)."""
    if config.score is Score.scaled:
        return math.sqrt(heads.width / config.key_width)
    return math.sqrt(heads.width)


def _pad_rows(weight: Tensor, n_heads: int, heads: Heads) -> Tensor:
    """The rows of `n_heads` heads `(H K, D)`, with zeros up to the heads of a format: `(count w, D)`."""
    by_head = weight.unflatten(0, (n_heads, -1))  # type: ignore[no-untyped-call]  # (H, K, D)
    missing_heads = heads.count - n_heads
    missing_width = heads.width - by_head.shape[1]
    return F.pad(by_head, (0, 0, 0, missing_width, 0, missing_heads)).flatten(0, 1)
