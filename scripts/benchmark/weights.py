"""One set of weights in the formats of other toolkits, so that all compute the same function.

Weights are arrays under the names of this package's checkpoints, `encoder.0.self_attention.W_q.weight` and so on, for a
post-norm model with one shared matrix. Runs under any Python with numpy.
"""

import re
from typing import Any

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


_JOEY = {
    "encoder.self_attention": "src_src_att",
    "decoder.self_attention": "trg_trg_att",
    "decoder.cross_attention": "src_trg_att",
    "W_q": "q_layer",
    "W_k": "k_layer",
    "W_v": "v_layer",
    "W_o": "output_layer",
    "feed_forward.W_1": "feed_forward.pwff_layer.0",
    "feed_forward.W_2": "feed_forward.pwff_layer.3",
    "feed_forward_norm": "feed_forward.layer_norm",
    "encoder.self_attention_norm": "layer_norm",
    "decoder.self_attention_norm": "x_layer_norm",
    "decoder.cross_attention_norm": "dec_layer_norm",
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


def as_joey(weights: Weights) -> Weights:
    """The same under the names of JoeyNMT's `encoder` and `decoder` beside its Embeddings `embedding`.

    Biases of its attention, which we have not, are absent, and its output matrix, which is the shared one.
    """
    named = {"embedding.lut.weight": weights["embedding"]}
    for name, array in weights.items():
        if name == "embedding":
            continue
        stack, layer, part = name.split(".", 2)
        module, _, kind = part.rpartition(".")
        whole = _JOEY.get(module) or _JOEY.get(f"{stack}.{module}")
        if whole is None:
            attention, _, projection = module.partition(".")
            whole = f"{_JOEY[f'{stack}.{attention}']}.{_JOEY[projection]}"
        named[f"{stack}.layers.{layer}.{whole}.{kind}"] = array
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


def as_ctranslate2(weights: Weights, positions: Array, *, n_heads: int) -> Any:
    """The same as a `TransformerSpec`, complete but for its vocabularies, with these positions `(longest, d_model)`."""
    from ctranslate2.specs import common_spec, transformer_spec

    n_layers = 1 + max(int(found[1]) for found in map(re.compile(r"encoder\.(\d+)\.").match, weights) if found)
    spec = transformer_spec.TransformerSpec.from_config(
        n_layers, n_heads, pre_norm=False, activation=common_spec.Activation.RELU
    )
    for stack, name in ((spec.encoder, "encoder"), (spec.decoder, "decoder")):
        embeddings = stack.embeddings[0] if name == "encoder" else stack.embeddings
        embeddings.weight = weights["embedding"]
        stack.scale_embeddings = True
        stack.position_encodings.encodings = positions

        for index, layer in enumerate(stack.layer):
            parts = _Layer(weights, f"{name}.{index}")
            parts.attention(layer.self_attention, "self_attention", groups=("qkv", "o"))
            if name == "decoder":
                parts.attention(layer.attention, "cross_attention", groups=("q", "kv", "o"))
            parts.norm(layer.ffn.layer_norm, "feed_forward_norm")
            for linear, word in ((layer.ffn.linear_0, "W_1"), (layer.ffn.linear_1, "W_2")):
                linear.weight = parts[f"feed_forward.{word}.weight"]
                linear.bias = parts[f"feed_forward.{word}.bias"]

    spec.decoder.projection.weight = weights["embedding"]
    return spec


def read_weights(path: str) -> tuple[Weights, Array]:
    """What `.npz` files of the benchmarks hold: the weights, and `positions` `(longest, d_model)`."""
    weights = dict(np.load(path))
    return weights, weights.pop("positions")


class _Layer:
    """The weights of one layer, to be put into a layer of CTranslate2."""

    def __init__(self, weights: Weights, name: str) -> None:
        self._weights = weights
        self._name = name

    def __getitem__(self, part: str) -> Array:
        return self._weights[f"{self._name}.{part}"]

    def norm(self, spec: Any, part: str) -> None:
        """Gain and bias."""
        spec.gamma = self[f"{part}.weight"]
        spec.beta = self[f"{part}.bias"]

    def attention(self, spec: Any, part: str, *, groups: tuple[str, ...]) -> None:
        """Its projections, each a group of ours in one matrix, and the norm after it."""
        for linear, group in zip(spec.linear, groups, strict=True):
            linear.weight = np.concatenate([self[f"{part}.W_{letter}.weight"] for letter in group])
        self.norm(spec.layer_norm, f"{part}_norm")
