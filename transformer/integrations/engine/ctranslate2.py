"""Our models in CTranslate2, a library for fast translation on CPUs and GPUs, in float32 or in fewer bits.

    write              the weights that `weights.fold` gives -> a TransformerSpec -> CTranslate2's files
    CTranslate2Peer    the files -> CTranslate2's own search, for the check

Checked against the specification classes of CTranslate2 4.8. Its search ends a sentence after as many finished
hypotheses as the beam is wide; under a large `patience` it goes on to the end, and finds what our search finds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from sentencepiece import SentencePieceProcessor
from torch import Tensor

from transformer.config.settings import Activation, ModelConfig, Norm, Positions, Quantization
from transformer.data.tokenizer import Tokenizers
from transformer.integrations.engine.peer import Forced
from transformer.integrations.engine.weights import Weights, ctranslate2_heads, fold
from transformer.model.layers import fixed_positions
from transformer.model.transformer import Transformer
from transformer.vocabulary import BOS, EOS, UNK

Array = npt.NDArray[np.float32]

MOST_INPUT = 1024  # tokens that CTranslate2 reads of a source unless it is told otherwise


# ---- writing --------------------------------------------------------------------------------------------------------


class Vocabularies(NamedTuple):
    """The pieces of either side, by id; they may be the same."""

    source: list[str]
    target: list[str]

    @classmethod
    def of(cls, tokenizers: Tokenizers) -> "Vocabularies":
        """Those of a run's tokenizers."""
        source, target = (tokenizer.pieces() for tokenizer in tokenizers.sides)
        return cls(source, target)


def write(model: Transformer, vocabularies: Vocabularies, folder: Path, *, quantization: Quantization) -> None:
    """Write a model and its vocabularies. Raises OSError."""
    spec = _specification(model)

    # The vocabularies, and their special tokens.
    pieces = vocabularies.target
    spec.register_source_vocabulary(vocabularies.source)
    spec.register_target_vocabulary(pieces)
    spec.config.bos_token = pieces[BOS]
    spec.config.decoder_start_token = pieces[BOS]
    spec.config.eos_token = pieces[EOS]
    spec.config.unk_token = pieces[UNK]
    spec.config.add_source_bos = False
    spec.config.add_source_eos = True
    spec.config.layer_norm_epsilon = _epsilon(model)

    # Quantise and save.
    spec.validate()
    is_exact = quantization is Quantization.float32
    spec.optimize(quantization=None if is_exact else quantization.value)
    spec.save(str(folder))


def n_positions(config: ModelConfig) -> int:
    """The rows of the table of positions: of sinusoids, enough for the longest source that CTranslate2 reads."""
    if config.positions is Positions.learned:
        return config.max_positions
    return max(config.max_positions, MOST_INPUT + 1)


def _specification(model: Transformer) -> Any:
    """The model as a `TransformerSpec`, complete but for its vocabularies and its config."""
    from ctranslate2.specs import transformer_spec

    config = model.config
    heads = ctranslate2_heads(config)
    pre_norm = config.norm is Norm.pre
    activation = _activation(config.activation)
    is_default_width = heads.width == config.d_model // config.n_heads
    head_dim = None if is_default_width else heads.width

    spec = transformer_spec.TransformerSpec(
        transformer_spec.TransformerEncoderSpec(
            config.n_layers,
            config.n_heads,
            pre_norm=pre_norm,
            activation=activation,
            head_dim=head_dim,
        ),
        transformer_spec.TransformerDecoderSpec(
            config.decoder_layers,
            config.n_heads,
            pre_norm=pre_norm,
            activation=activation,
            head_dim=head_dim,
        ),
    )
    _Filler(fold(model, heads), config).fill(spec)
    return spec


def _activation(activation: Activation) -> Any:
    """CTranslate2's member for it."""
    from ctranslate2.specs import common_spec

    match activation:
        case Activation.relu:
            return common_spec.Activation.RELU
        case Activation.gelu:
            return common_spec.Activation.GELU  # the exact one
        case Activation.swish:
            return common_spec.Activation.SWISH


@dataclass(frozen=True)
class _Filler:
    """Puts weights into their places in a specification. Every array is a copy: CTranslate2 quantises in place."""

    weights: Weights
    config: ModelConfig

    def fill(self, spec: Any) -> None:
        """Fill in everything that has a weight."""
        spec.encoder.embeddings[0].weight = self._matrix("source_embedding.matrix")
        self._stack(spec.encoder, "encoder", positions="source_embedding.table", has_cross_attention=False)

        spec.decoder.embeddings.weight = self._matrix("target_embedding.matrix")
        self._stack(spec.decoder, "decoder", positions="target_embedding.table", has_cross_attention=True)
        spec.decoder.projection.weight = self._matrix("output")
        if "output_bias" in self.weights:
            spec.decoder.projection.bias = self._array("output_bias")

    def _stack(self, stack: Any, name: str, *, positions: str, has_cross_attention: bool) -> None:
        """The layers of the encoder or the decoder, with the positions before them and the norm behind them."""
        stack.scale_embeddings = True
        stack.position_encodings.encodings = self._positions(positions)
        for index, layer in enumerate(stack.layer):
            self._layer(layer, f"{name}.{index}", has_cross_attention=has_cross_attention)
        if self.config.norm is Norm.pre:
            self._norm(stack.layer_norm, f"{name}_norm")

    def _layer(self, layer: Any, name: str, *, has_cross_attention: bool) -> None:
        self._attention(layer.self_attention, f"{name}.self_attention", groups=("qkv", "o"))
        if has_cross_attention:
            self._attention(layer.attention, f"{name}.cross_attention", groups=("q", "kv", "o"))

        self._linear(layer.ffn.linear_0, f"{name}.feed_forward.W_1")
        self._linear(layer.ffn.linear_1, f"{name}.feed_forward.W_2")
        self._norm(layer.ffn.layer_norm, f"{name}.feed_forward_norm")

    def _attention(self, attention: Any, name: str, *, groups: tuple[str, ...]) -> None:
        """The projections of attention, each group of ours in one matrix, and its norm."""
        for linear, group in zip(attention.linear, groups, strict=True):
            linear.weight = np.concatenate([self._array(f"{name}.W_{letter}.weight") for letter in group])
            if self.config.biases:
                linear.bias = np.concatenate([self._array(f"{name}.W_{letter}.bias") for letter in group])
        self._norm(attention.layer_norm, f"{name}_norm")

    def _linear(self, linear: Any, name: str) -> None:
        linear.weight = self._array(f"{name}.weight")
        linear.bias = self._array(f"{name}.bias")

    def _norm(self, norm: Any, name: str) -> None:
        norm.gamma = self._array(f"{name}.weight")
        norm.beta = self._array(f"{name}.bias")

    def _positions(self, name: str) -> Array:
        if self.config.positions is Positions.learned:
            return self._array(name)
        table = fixed_positions(self.config.positions, n_positions(self.config), self.config.d_model)
        return _copy(table.float())

    def _matrix(self, name: str) -> Array:
        """One of the three matrices with a row for each piece, which may be a shared one."""
        return self._array(name if name in self.weights else "embedding")

    def _array(self, name: str) -> Array:
        return _copy(self.weights[name])


def _copy(tensor: Tensor) -> Array:
    return tensor.numpy().copy()


def _epsilon(model: Transformer) -> float:
    """The epsilon of the model's norms, which is one for all."""
    (epsilon,) = {module.eps for module in model.modules() if isinstance(module, torch.nn.LayerNorm)}
    return epsilon


# ---- searching ------------------------------------------------------------------------------------------------------


def version() -> str:
    """Of the library that is installed."""
    import ctranslate2

    return str(ctranslate2.__version__)


def supported_types(device: torch.device) -> set[str]:
    """The names of the types that CTranslate2 computes in on a device. Raises RuntimeError where it cannot tell."""
    import ctranslate2

    return set(ctranslate2.get_supported_compute_types(device.type, device.index or 0))


def open_translator(files: Mapping[str, bytes], *, device: torch.device, workers: int, threads: int) -> Any:
    """A `ctranslate2.Translator` of these files, with so many workers of so many threads each.

    Raises RuntimeError and ValueError where CTranslate2 cannot use the files or the device.
    """
    import ctranslate2

    index = device.index or 0
    if device.type == "cuda" and device.index is None:
        index = torch.cuda.current_device()  # that of this rank
    return ctranslate2.Translator(
        "engine",  # a name that it needs, and never opens
        device.type,
        device_index=index,
        inter_threads=workers,
        intra_threads=threads,
        max_queued_batches=-1,
        files=dict(files),
    )


# ---- running --------------------------------------------------------------------------------------------------------


class CTranslate2Peer:
    """A model of ours, run by CTranslate2; `alpha` is the exponent of a length in its penalty."""

    def __init__(
        self, folder: Path, vocabularies: Vocabularies, tokenizer: Path, *, alpha: float, threads: int
    ) -> None:
        import ctranslate2

        self._translator = ctranslate2.Translator(str(folder), device="cpu", inter_threads=1, intra_threads=threads)
        self.alpha = alpha
        self.arithmetic = str(self._translator.compute_type)
        self.versions = {"ctranslate2": ctranslate2.__version__}

        # CTranslate2 takes and gives pieces as text.
        self._processor = SentencePieceProcessor(model_file=str(tokenizer))
        self._vocabularies = vocabularies
        self._source_ids = {piece: index for index, piece in enumerate(vocabularies.source)}
        self._ids = {piece: index for index, piece in enumerate(vocabularies.target)}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """As the SentencePiece model by itself cuts them: CTranslate2 looks up the texts of the pieces."""
        cut: list[list[str]] = self._processor.encode(list(texts), out_type=str)
        return [[self._source_ids.get(piece, UNK) for piece in pieces] for pieces in cut]

    def penalty(self, length: int) -> float:
        """A power of the length."""
        return float(length**self.alpha)

    def forced(self, sources: Sequence[list[int]], targets: Sequence[list[int]]) -> list[Forced]:
        """The log-probabilities of the pieces of each target and of its EOS."""
        results = self._translator.score_batch(
            _texts(sources, self._vocabularies.source), _texts(targets, self._vocabularies.target)
        )
        return [Forced(torch.tensor(result.log_probs, dtype=torch.float64), None) for result in results]

    def translate(self, sources: Sequence[list[int]], *, beam_size: int, max_length: int) -> list[list[int]]:
        """The best translation of each source."""
        results = self._translator.translate_batch(
            _texts(sources, self._vocabularies.source),
            beam_size=beam_size,
            length_penalty=self.alpha,
            patience=max_length,
            max_decoding_length=max_length,
            min_decoding_length=0,
            max_input_length=0,
        )
        best = [result.hypotheses[0] for result in results]
        return [[self._ids[piece] for piece in pieces] for pieces in best]


def _texts(sentences: Sequence[list[int]], pieces: list[str]) -> list[list[str]]:
    return [[pieces[index] for index in ids] for ids in sentences]
