"""Marian's own form: our formulas of Marian's graph against scores of Marian itself, and what an export writes.

`tests/data/marian` has two models that Marian 1.12.42 trained for a minute on the demo, and the log-probabilities that
its scorer gives the pieces of three sentences: `shared` has one vocabulary, one matrix and Swish; `separate` two
vocabularies, three matrices and ReLU.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from support.marian_own import MARIAN_DATA, SHAPES, original_of, random_translator
from support.tiers import tiers
from support.translations import sentences
from transformer.data.tokenizer import Tokenizer, Tokenizers
from transformer.integrations.engine.parity import choose_sentences, compare
from transformer.integrations.export import marian, marian_graph
from transformer.integrations.export.marian_graph import MarianGraph, Past, log_softmax
from transformer.integrations.published.marian_form import SETTINGS

END = 3


@pytest.mark.parametrize("name", ["shared", "separate"])
def test_graph_scores_as_marian_does(name: str) -> None:
    """To the five digits that Marian prints; all at once, and one piece after the other."""
    graph = MarianGraph.read(MARIAN_DATA / f"{name}.npz")
    for one in json.loads((MARIAN_DATA / "scores.json").read_text("utf-8"))[name]:
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
    graph = MarianGraph.read(MARIAN_DATA / "separate.npz")
    source = np.array([[5, 9, 3, 0, 0], [7, 8, 20, 11, 3]])
    previous = np.array([[-1, 12, 9], [-1, 30, 5]])
    both, _ = graph.decode(previous, Past(), graph.encode(source, np.array([3, 5])))
    for row, length in enumerate((3, 5)):
        alone, _ = graph.decode(previous[[row]], Past(), graph.encode(source[[row], :length], np.array([length])))
        np.testing.assert_allclose(both[[row]], alone, rtol=0, atol=1e-12)


# ---- what is written ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(spm: bytes) -> Tokenizers:
    one = Tokenizer(spm)
    return Tokenizers(one, one)


@pytest.mark.parametrize("shape", tiers(["biases", "narrow heads"], ["shared", "separate"], pytest.mark.ci))
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
        peer = marian.load(original, tmp_path, 1)
        parity = compare(original.translator, peer, chosen, bound=marian.BOUND)
        assert parity.problems == []
        assert parity.cut_alike == 8
        assert parity.logits is not None
        found.append(max(parity.log_probs, parity.logits))
    assert found[1] < 2e-6 < found[0]


@pytest.mark.parametrize("name", ["shared", "separate"])
def test_export_to_marian_writes_what_marian_writes(name: str, shared: Tokenizers, tmp_path: Path) -> None:
    """The same arrays, of the same types and shapes but for the vocabularies, and the same settings."""
    both = shared if name == "shared" else Tokenizers(shared.source, Tokenizer(shared.source.model))
    marian.write(original_of(random_translator(SHAPES[name], both)), tmp_path)
    with np.load(tmp_path / "model.npz") as written:
        arrays = {key: written[key] for key in written.files}
    with np.load(MARIAN_DATA / f"{name}.npz") as theirs:
        expected = {key: theirs[key] for key in theirs.files}
    assert expected.keys() == arrays.keys()
    for key, array in arrays.items():
        assert array.dtype == expected[key].dtype, key
        if key == SETTINGS:
            continue
        sizes = [-1 if size == shared.source.vocab_size else size for size in array.shape]
        assert sizes == [-1 if size in (74, 78, 80) else size for size in expected[key].shape], key

    ours = yaml.safe_load(arrays[SETTINGS].astype(np.uint8).tobytes().rstrip(b"\0"))
    their_settings = yaml.safe_load(expected[SETTINGS].astype(np.uint8).tobytes().rstrip(b"\0"))
    assert ours.pop("transformer-train-positions") is False
    assert ours.pop("version") == their_settings.pop("version").split()[0]
    assert ours.pop("dim-vocabs") == [shared.source.vocab_size] * 2
    assert their_settings.pop("dim-vocabs") == ([80, 80] if name == "shared" else [74, 78])
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
