"""Models of ours that Marian's own form can express, with random weights, and where those are that Marian trained."""

from pathlib import Path
from typing import Any

import torch

from support.paths import ROOT
from support.translations import SEARCH, translator_with
from transformer.config.settings import Activation, ModelConfig, Positions, Precision, Quantization, Start
from transformer.data.tokenizer import Tokenizers
from transformer.decoding.translator import Translator
from transformer.integrations.export.formats import Original
from transformer.model.transformer import Transformer

MARIAN_DATA = ROOT / "tests" / "data" / "marian"

MARIAN: dict[str, Any] = {
    "d_model": 16,
    "d_ff": 24,
    "n_heads": 2,
    "n_layers": 2,
    "n_decoder_layers": 1,
    "start": Start.zeros,
    "positions": Positions.marian,
    "max_positions": 64,
}
SHAPES = {  # those of Marian's two models, and others
    "shared": ModelConfig(**MARIAN, activation=Activation.swish),
    "separate": ModelConfig(**MARIAN, tie_embeddings=False),
    "biases": ModelConfig(**MARIAN, biases=True),
    "narrow heads": ModelConfig(**MARIAN, d_k=2, d_v=4),
}


def random_translator(config: ModelConfig, tokenizers: Tokenizers) -> Translator:
    """Every weight that is not frozen is random."""
    torch.manual_seed(1)
    model = Transformer(config, tokenizers.vocab_sizes)
    frozen = {name: weight[[0, 2]].clone() for name, weight in model.named_parameters() if len(weight) > 24}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        for name, rows in frozen.items():
            if name != "source_embedding.matrix":
                model.get_parameter(name)[[0, 2]] = rows
    return translator_with(model.eval(), tokenizers, search=SEARCH, precision=Precision.fp32)


def original_of(translator: Translator) -> Original:
    return Original(
        translator,
        src_lang="en",
        tgt_lang="de",
        quantization=Quantization.float32,
        exponent=0.45,
        origin="runs/tiny",
        output=Path("tiny-marian"),
    )
