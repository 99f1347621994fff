"""One set of weights in the formats of other toolkits, so that all compute the same function.

Weights are arrays under the names of this package's checkpoints, `encoder.0.self_attention.W_q.weight` and so on, for a
post-norm model with one shared matrix. Runs under any Python with numpy.
"""

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Weights = dict[str, Array]

_MARIAN = {
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


_TORCH = {
    "self_attention.W_q": "self_attn.in_proj_",
    "self_attention.W_o": "self_attn.out_proj.",
    "cross_attention.W_q": "multihead_attn.in_proj_",
    "cross_attention.W_o": "multihead_attn.out_proj.",
    "feed_forward.W_1": "linear1.",
    "feed_forward.W_2": "linear2.",
    "self_attention_norm": "norm1.",
    "cross_attention_norm": "norm2.",
    "encoder.feed_forward_norm": "norm2.",
    "decoder.feed_forward_norm": "norm3.",
}


def as_marian(weights: Weights) -> Weights:
    """The same under the names of Hugging Face's MarianMTModel. Biases of its attention, which we have not, are absent.

    Its output matrix is the shared one, so that it is absent, too.
    """
    named = {"model.shared.weight": weights["embedding"]}
    for name, array in weights.items():
        if name == "embedding":
            continue
        stack, layer, part = name.split(".", 2)
        module, _, kind = part.rpartition(".")
        whole = _MARIAN.get(module) or ".".join(_MARIAN[word] for word in module.split("."))
        named[f"model.{stack}.layers.{layer}.{whole}.{kind}"] = array
    return named


def as_torch(weights: Weights) -> Weights:
    """The same under the names of a torch.nn.Transformer `transformer` beside an nn.Embedding `embedding`.

    Biases of its attention, and the norms at the end of its stacks, which we have not, are absent.
    """
    named = {"embedding.weight": weights["embedding"]}
    for name, array in weights.items():
        if name == "embedding" or ".W_k." in name or ".W_v." in name:
            continue
        stack, layer, part = name.split(".", 2)
        module, _, kind = part.rpartition(".")
        if module.endswith(".W_q"):
            projections = [weights[name.replace("W_q", word)] for word in ("W_q", "W_k", "W_v")]
            array = np.concatenate(projections)
        whole = _TORCH.get(module) or _TORCH[f"{stack}.{module}"]
        named[f"transformer.{stack}.layers.{layer}.{whole}{kind}"] = array
    return named


def read_weights(path: str) -> tuple[Weights, Array]:
    """What `.npz` files of the benchmarks hold: the weights, and `positions` `(longest, d_model)`."""
    weights = dict(np.load(path))
    return weights, weights.pop("positions")
