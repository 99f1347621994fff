"""Exports of models with random weights, in every variant, against the libraries that they are for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from corpora import write_corpus

from transformer.config.settings import (
    ModelConfig,
    Norm,
    Positions,
    Precision,
    Quantization,
    Score,
    SearchConfig,
    Target,
    TokenizerConfig,
)
from transformer.data.corpus import read_pairs
from transformer.data.tokenizer import Tokenizer, train_tokenizer
from transformer.decoding.translator import Translator
from transformer.errors import InputError
from transformer.model.transformer import Transformer
from transformer.tools.export.command import FORMATS
from transformer.tools.export.parity import Parity, Sentences, choose_sentences, compare
from transformer.tools.export.peer import Original
from transformer.tools.export.weights import check_expressible
from transformer.vocabulary import BOS, PAD

# What a model can be, each beside a plain one of d_model 32 with 2 heads of width 16.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "pre-norm": {"norm": Norm.pre},
    "learned positions": {"positions": Positions.learned},
    "unscaled": {"score": Score.unscaled},
    "additive": {"score": Score.additive},
    "narrow heads": {"d_k": 4, "d_v": 8},
    "wide keys": {"d_k": 24},
    "wide values": {"d_v": 24},
    "unscaled narrow heads": {"score": Score.unscaled, "d_k": 4, "d_v": 8},
    "three heads": {"n_heads": 3, "d_k": 5, "d_v": 8},
    "untied": {"tie_embeddings": False},
    "untied, learned, pre-norm": {"tie_embeddings": False, "positions": Positions.learned, "norm": Norm.pre},
}

# The key that a format refuses; every other cell of the table is exact.
REFUSED = {
    ("additive", Target.ctranslate2): "model.score=additive",
    ("additive", Target.marian): "model.score=additive",
    ("pre-norm", Target.marian): "model.norm=pre",
    ("learned positions", Target.marian): "model.positions=learned",
    ("wide keys", Target.marian): "model.d_k=24",
    ("wide values", Target.marian): "model.d_v=24",
    ("untied, learned, pre-norm", Target.marian): "model.norm=pre",
}
CELLS = [(variant, target) for variant in VARIANTS for target in FORMATS]
EXACT = [cell for cell in CELLS if cell not in REFUSED]


def model_config(variant: str) -> ModelConfig:
    sizes: dict[str, Any] = {"n_layers": 2, "d_model": 32, "d_ff": 48, "n_heads": 2, "max_positions": 64}
    return ModelConfig(**sizes | VARIANTS[variant])


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """Twelve pairs of two to nine words."""
    data = write_corpus(tmp_path_factory.mktemp("corpus"))
    pairs = list(read_pairs(Path(data.dev.src), Path(data.dev.tgt)))[:12]
    return [("one two", "eins zwei"), *pairs[1:]]


@pytest.fixture(scope="module")
def tokenizer_model(text: list[tuple[str, str]]) -> bytes:
    return train_tokenizer([line for pair in text for line in pair], TokenizerConfig(vocab_size=60))


def random_translator(config: ModelConfig, tokenizer_model: bytes, seed: int = 1) -> Translator:
    """Every weight is random, gains and biases of norms among them, which training would begin with at 1 and 0."""
    tokenizer = Tokenizer.from_bytes(tokenizer_model)
    torch.manual_seed(seed)
    model = Transformer(config, tokenizer.vocab_size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
        model.output[PAD] = 0.0  # never produced by ours: let them be improbable to others, too
        model.output[BOS] *= 0.1
    search = SearchConfig(beam_size=4, length_penalty=0.6, max_extra=6)
    return Translator(model.eval(), tokenizer, search, torch.device("cpu"), Precision.fp32)


def original_of(
    translator: Translator, tokenizer_model: bytes, quantization: Quantization = Quantization.float32
) -> Original:
    return Original(
        translator,
        src_lang="en",
        tgt_lang="de",
        tokenizer_model=tokenizer_model,
        quantization=quantization,
        origin="runs/tiny (averaged)",
        output=Path("runs/tiny-exported"),
    )


def sentences_of(text: list[tuple[str, str]], translator: Translator) -> Sentences:
    return choose_sentences(text, "dev", translator=translator, count=len(text))


def parity_of(original: Original, target: Target, folder: Path, text: list[tuple[str, str]]) -> Parity:
    export_format = FORMATS[target]
    export_format.write(original, folder)
    peer = export_format.load(original, folder, 1)
    bound = (
        export_format.bound(original.translator.model.config) if original.quantization is Quantization.float32 else None
    )
    return compare(original, peer, sentences_of(text, original.translator), bound=bound)


@pytest.mark.parametrize(("variant", "target"), EXACT, ids=lambda value: getattr(value, "value", value))
def test_export_of_a_variant_is_exact(
    variant: str, target: Target, text: list[tuple[str, str]], tokenizer_model: bytes, tmp_path: Path
) -> None:
    for package in FORMATS[target].packages:
        pytest.importorskip(package)
    config = model_config(variant)
    check_expressible(config, target)
    parity = parity_of(original_of(random_translator(config, tokenizer_model), tokenizer_model), target, tmp_path, text)
    assert parity.problems == []
    assert parity.log_probs < parity.bound
    assert parity.greedy.identical == len(text)
    assert parity.beam.identical + parity.beam.endless == len(text)
    assert parity.beam.identical >= len(text) - 3


@pytest.mark.parametrize(("cell", "key"), REFUSED.items(), ids=lambda value: str(value))
def test_export_refuses_what_a_format_cannot_express(cell: tuple[str, Target], key: str) -> None:
    variant, target = cell
    with pytest.raises(InputError, match=f"^{key}: .*to=onnx can express it$"):
        check_expressible(model_config(variant), target)
