"""Marian's own form: our formulas of Marian's graph against scores of Marian itself, and what an export writes.

`tests/data/marian` has two models that Marian 1.12.42 trained for a minute on the demo, and the log-probabilities that
its scorer gives the pieces of three sentences: `shared` has one vocabulary, one matrix and Swish; `separate` two
vocabularies, three matrices and ReLU.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from support.paths import ROOT
from support.translations import SEARCH, sentences, translator_with
from transformer.config.settings import Activation, ModelConfig, Positions, Precision, Quantization, Start
from transformer.data.tokenizer import Tokenizer, Tokenizers
from transformer.decoding.translator import Translator
from transformer.integrations.engine.parity import choose_sentences, compare
from transformer.integrations.export import marian, marian_graph
from transformer.integrations.export.formats import Original
from transformer.integrations.export.marian_graph import MarianGraph, Past, log_softmax, settings_as_yaml
from transformer.model.transformer import Transformer
from transformer.vocabulary import VocabSizes

DATA = ROOT / "tests" / "data" / "marian"
END = 3

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


@pytest.mark.parametrize("name", ["shared", "separate"])
def test_graph_scores_as_marian_does(name: str) -> None:
    """To the five digits that Marian prints; all at once, and one piece after the other."""
    graph = MarianGraph.read(DATA / f"{name}.npz")
    for one in json.loads((DATA / "scores.json").read_text("utf-8"))[name]:
        source = np.array([[*one["source"], END]])
        previous = np.array([[-1, *one["target"]]])
        memory = graph.encode(source, np.array([source.shape[1]]))
        at_once, _ = graph.decode(previous, Past(), memory)
        pieces = [*one["target"], END]
        found = log_softmax(at_once)[0, np.arange(len(pieces)), pieces]
        np.testing.assert_allclose(found, one["scores"], rtol=0, atol=1e-5)

        past = Past()
        for place in range(len(pieces)):
            logits, past = graph.decode(previous[:, [place]], past, memory)
            np.testing.assert_allclose(logits[:, 0], at_once[:, place], rtol=0, atol=1e-9)


def test_graph_of_a_padded_batch_is_that_of_each_sentence() -> None:
    graph = MarianGraph.read(DATA / "separate.npz")
    source = np.array([[5, 9, 3, 0, 0], [7, 8, 20, 11, 3]])
    previous = np.array([[-1, 12, 9], [-1, 30, 5]])
    both, _ = graph.decode(previous, Past(), graph.encode(source, np.array([3, 5])))
    for row, length in enumerate((3, 5)):
        alone, _ = graph.decode(previous[[row]], Past(), graph.encode(source[[row], :length], np.array([length])))
        np.testing.assert_allclose(both[[row]], alone, rtol=0, atol=1e-12)


# ---- what is written ------------------------------------------------------------------------------------------------


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


@pytest.fixture(scope="module")
def shared(spm: bytes) -> Tokenizers:
    one = Tokenizer.from_bytes(spm)
    return Tokenizers(one, one)


@pytest.mark.parametrize("shape", SHAPES)
def test_export_to_marian_is_exact_but_for_the_norms(
    shape: str, shared: Tokenizers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the run's own number under the root of a norm, all that is left is the rounding of float32."""
    original = original_of(random_translator(SHAPES[shape], shared))
    marian.write(original, tmp_path)
    chosen = choose_sentences(((text, None) for text in sentences(8)), translator=original.translator, count=8)
    found = []
    for epsilon in (marian_graph.EPSILON, 1e-5):
        monkeypatch.setattr(marian_graph, "EPSILON", epsilon)
        peer = marian.MarianPeer(original, tmp_path, 1)
        parity = compare(original.translator, peer, chosen, bound=marian.BOUND)
        assert parity.problems == []
        assert parity.cut_alike == 8
        assert parity.logits is not None
        found.append(max(parity.log_probs, parity.logits))
    assert found[1] < 2e-6 < found[0]


@pytest.mark.parametrize("name", ["shared", "separate"])
def test_export_to_marian_writes_what_marian_writes(name: str, shared: Tokenizers, tmp_path: Path) -> None:
    """The same arrays, of the same types and shapes but for the vocabularies, and the same settings."""
    translator = random_translator(SHAPES[name], shared)
    if name == "separate":  # as of two vocabularies
        model = Transformer(SHAPES[name], VocabSizes(74, 78))
        arrays = {key: weight.numpy() for key, weight in marian._weights(model).items()}
    else:
        marian.write(original_of(translator), tmp_path)
        with np.load(tmp_path / "model.npz") as written:
            arrays = {key: written[key] for key in written.files}
    with np.load(DATA / f"{name}.npz") as theirs:
        expected = {key: theirs[key] for key in theirs.files}
    assert expected.keys() == arrays.keys() | {marian_graph.SETTINGS}
    for key, array in arrays.items():
        assert array.dtype == expected[key].dtype, key
        if key == marian_graph.SETTINGS:
            continue
        sizes = [size if size not in (80, shared.source.vocab_size) else -1 for size in array.shape]
        assert sizes == [size if size != 80 else -1 for size in expected[key].shape], key

    settings = marian._model_settings(Transformer(SHAPES[name], VocabSizes(74, 78) if name == "separate" else 80))
    ours = yaml.safe_load(settings_as_yaml(settings))
    their_settings = yaml.safe_load(expected[marian_graph.SETTINGS].astype(np.uint8).tobytes().rstrip(b"\0"))
    assert ours.pop("transformer-train-positions") is False
    assert ours.pop("version") == their_settings.pop("version").split()[0]
    assert ours == their_settings


def test_export_to_marian_has_what_its_decoder_reads(shared: Tokenizers, tmp_path: Path) -> None:
    original = original_of(random_translator(SHAPES["shared"], shared))
    marian.write(original, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"model.npz", "vocab.spm", "decoder.yml"}
    assert (tmp_path / "vocab.spm").read_bytes() == shared.source.sentencepiece_model
    settings = yaml.safe_load((tmp_path / "decoder.yml").read_text("utf-8"))
    expected = {"beam-size": 4, "normalize": 0.45, "allow-unk": True, "relative-paths": True, "max-length": 63}
    assert settings | expected == settings
    assert settings["models"] == ["model.npz"]
    assert settings["vocabs"] == ["vocab.spm", "vocab.spm"]
    assert "marian-decoder -c tiny-marian/decoder.yml" in marian.readme(original)
