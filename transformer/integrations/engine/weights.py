"""The weights of a model, with what CTranslate2 and Marian cannot express folded into them.

CTranslate2 and Marian divide scores by sqrt(w), with one width w for the queries, keys and values of a head. So heads
are padded with zeros to w, and W_q is multiplied by what turns 1/sqrt(w) into our scale: nothing changes but for the
rounding of W_q. ONNX holds our own operations, and needs none of this.

`H` heads, `D` d_model, `w` width of a head.
"""

import math
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from transformer.config.settings import ModelConfig, Score
from transformer.model.transformer import Transformer, parameters_by_name

Weights = dict[str, Tensor]  # under the names of a checkpoint, in float32


@dataclass(frozen=True)
class Heads:
    """The heads of every attention in a format: how many, and how wide."""

    count: int
    width: int


def ctranslate2_heads(config: ModelConfig) -> Heads:
    """Heads as wide as the wider of queries and values: CTranslate2 has a setting for the width."""
    return Heads(config.n_heads, max(config.key_width, config.value_width))


def fold(model: Transformer, heads: Heads) -> Weights:
    """Copies of the model's weights, for a format that has these heads and the scale 1/sqrt(w)."""
    folded = {}
    for name, weight in parameters_by_name(model).items():
        module = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        folded[name] = _fold_weight(weight.cpu(), module, model.config, heads=heads).float().contiguous()
    if model.output_bias is not None:  # without biases, that of `model.start=zeros`, which is no parameter
        folded["output_bias"] = model.output_bias.detach().cpu().float().clone()
    return folded


def _fold_weight(weight: Tensor, module: str, config: ModelConfig, *, heads: Heads) -> Tensor:
    """A copy of the weight or bias of a module: of a projection of attention, with the heads of the format."""
    match module:
        case "W_q" | "W_k" | "W_v" if weight.ndim == 1:  # a bias is one more column of its weight
            return _fold_weight(weight.unsqueeze(1), module, config, heads=heads).squeeze(1)
        case "W_q":
            return _pad_rows(weight.double() * _queries_factor(config, heads), config.n_heads, heads)
        case "W_k" | "W_v":
            return _pad_rows(weight, config.n_heads, heads)
        case "W_o" if weight.ndim == 2:  # which reads heads: they are its columns
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
