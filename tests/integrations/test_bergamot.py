"""Bergamot's form: the bytes of a file, the scales of int8, names, and what is refused. No engine is needed here."""

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from support.marian_own import MARIAN, original_of, random_translator
from support.translations import sentences
from transformer.config.settings import ModelConfig, Quantization, SearchOverride
from transformer.data.tokenizer import Tokenizer, Tokenizers
from transformer.errors import InputError
from transformer.integrations.engine.parity import choose_sentences, compare
from transformer.integrations.export import bergamot
from transformer.integrations.export.formats import Original
from transformer.integrations.export.job import ExportJob, Target
from transformer.integrations.export.marian import BOUND, model_settings, weights_of
from transformer.integrations.export.marian_bin import read_bin, write_bin
from transformer.integrations.export.marian_graph import MarianGraph
from transformer.integrations.published.marian_form import SETTINGS

SIZES = MARIAN | {"d_model": 64, "d_ff": 64, "n_heads": 4}


@pytest.fixture(scope="module")
def original(spm: bytes) -> Original:
    """A model of random weights whose sizes the engine takes."""
    return original_with(spm)


def original_with(spm: bytes, **changes: Any) -> Original:
    one = Tokenizer(spm)
    translator = random_translator(ModelConfig(**SIZES | changes), Tokenizers(one, one))
    chosen = choose_sentences(((text, None) for text in sentences(8)), translator=translator, count=8)
    return replace(original_of(translator), sentences=chosen, output=Path("tiny-bergamot"))


def test_write_bin_has_the_bytes_that_marian_reads(tmp_path: Path) -> None:
    """Every field by hand: the header, names, sizes, the gap, and arrays at multiples of 256."""
    arrays: dict[str, Any] = {
        "encoder_l1_self_Wq": np.array([[1, -2, 0.5]], np.float32),
        SETTINGS: np.array([97, 0], np.int8),
    }
    write_bin(tmp_path / "x.bin", arrays, int8=True, scales={"encoder_l1_self_Wq": 2.5})
    data = (tmp_path / "x.bin").read_bytes()
    names = [b"encoder_l1_self_Wq\0", b"special:model.yml\0", b"encoder_l1_self_Wq_QuantMultA\0"]
    heads = [(19, 0x4101, 2, 256), (18, 0x0101, 1, 256), (30, 0x0404, 1, 256)]
    expected = struct.pack("<2Q", 1, 3) + b"".join(struct.pack("<4Q", *head) for head in heads)
    expected += b"".join(names) + struct.pack("<4i", 1, 3, 2, 1)
    gap = 256 - len(expected) - 8
    assert data[:256] == expected + struct.pack("<Q", gap) + bytes(gap)
    # 127 / 2 is the factor: 63.5 and 31.75 are rounded, ties to even.
    assert data[256:512] == struct.pack("<3bf", 64, -127, 32, 63.5) + bytes(256 - 7)
    assert data[512:] == b"a\0" + bytes(254) + struct.pack("<f", 2.5) + bytes(252)


def test_write_bin_transposes_products_and_no_vocabulary(tmp_path: Path) -> None:
    matrix = np.array([[127, 1], [2, 3], [4, 5]], np.float32)
    write_bin(tmp_path / "x.bin", {"decoder_l1_ffn_W1": matrix, "Wemb": matrix}, int8=True, scales={"Wemb": 0.5})
    data = (tmp_path / "x.bin").read_bytes()
    starts = [data.index(bytes(values)) for values in ([127, 2, 4, 1, 3, 5], [127, 1, 2, 3, 4, 5])]
    assert [start % 256 for start in starts] == [0, 0]
    found = read_bin(tmp_path / "x.bin")
    np.testing.assert_array_equal(found.arrays["decoder_l1_ffn_W1"], matrix)
    np.testing.assert_array_equal(found.arrays["Wemb"], matrix)
    assert found.scales == {"Wemb": 0.5}
    assert b"none_QuantMultA\0" in data  # its name where the matrix is transposed
    assert b"Wemb_QuantMultA\0" in data  # and where a list chooses columns


def test_write_bin_keeps_norms_and_biases_in_float32(original: Original, tmp_path: Path) -> None:
    bergamot.write(replace(original, quantization=Quantization.int8), tmp_path)
    found = read_bin(tmp_path / "model.ende.intgemm.alphas.bin")
    weights = {name: weight.numpy() for name, weight in weights_of(original.translator).items()}
    assert found.is_int8
    assert found.arrays.keys() == weights.keys() | {SETTINGS}
    for name, weight in weights.items():
        step = 0.0 if "ln" in name or "_b" in name or name.endswith("_out_b") else float(np.abs(weight).max()) / 127
        if name in ("Wemb", "decoder_ff_logit_out_b"):  # 60 pieces are 64 there, of which four never come
            margin = [(0, 4), (0, 0)] if name == "Wemb" else [(0, 0), (0, 4)]
            weight = np.pad(weight, margin, constant_values=0.0 if name == "Wemb" else -100.0)
        np.testing.assert_allclose(found.arrays[name], weight, rtol=0, atol=step / 2 * 1.0001, err_msg=name)
    products = {name for name in weights if name == "Wemb" or ("_W" in name and "_ln_" not in name)}
    assert found.scales.keys() == products


def test_scales_are_the_mean_of_the_largest_numbers_and_some_deviations(original: Original) -> None:
    """Of the first product of the encoder: embeddings times 8, the root of the width, and positions."""
    weights = {name: weight.numpy() for name, weight in weights_of(original.translator).items()}
    scales = bergamot.measure_scales(original, weights, model_settings(original.translator))
    largest = []
    for sentence in original.sentences:
        ids = [*sentence.pieces, 3]
        rates = 10_000.0 ** (-np.arange(32) / 31)
        angles = np.arange(len(ids))[:, None] * rates
        x = 8.0 * weights["Wemb"][ids].astype(np.float64) + np.concatenate((np.sin(angles), np.cos(angles)), 1)
        largest += [np.abs(x).max()]
    expected = 127 / (np.mean(largest) + 1.1 * np.std(largest))
    for letter in "qkv":
        assert scales[f"encoder_l1_self_W{letter}"] == pytest.approx(expected)
    assert scales["Wemb"] > 0


def test_graph_rounds_what_a_scaled_matrix_is_multiplied_with() -> None:
    settings: dict[str, Any] = {}
    graph = MarianGraph({"W": np.eye(3), "b": np.zeros((1, 3))}, settings, scales={"W": 2.0})
    np.testing.assert_array_equal(graph._affine(np.array([[0.3, -0.76, 100.0]]), "W", "b"), [[0.5, -1.0, 63.5]])


@pytest.mark.parametrize("quantization", [Quantization.float32, Quantization.int8])
def test_export_to_bergamot_is_read_back(quantization: Quantization, original: Original, tmp_path: Path) -> None:
    """In float32 exactly but for the norms; int8 of random weights moves them, by a nat or two."""
    given = replace(original, quantization=quantization)
    bergamot.write(given, tmp_path)
    is_exact = quantization is Quantization.float32
    peer = bergamot.load(given, tmp_path, 1)
    parity = compare(given.translator, peer, list(given.sentences), bound=BOUND if is_exact else None)
    assert parity.problems == []
    assert (parity.log_probs < 1e-3) == is_exact
    assert parity.log_probs < 4.0


def test_export_to_bergamot_has_the_names_of_firefox_and_what_translate_locally_reads(
    original: Original, tmp_path: Path
) -> None:
    given = replace(original, quantization=Quantization.int8)
    bergamot.write(given, tmp_path)
    names = {"model.ende.intgemm.alphas.bin", "vocab.ende.spm", "config.intgemm8bitalpha.yml", "model_info.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
    settings = yaml.safe_load((tmp_path / "config.intgemm8bitalpha.yml").read_text("utf-8"))
    assert settings["models"] == ["model.ende.intgemm.alphas.bin"]
    assert settings["vocabs"] == ["vocab.ende.spm", "vocab.ende.spm"]
    assert (settings["gemm-precision"], settings["beam-size"]) == ("int8shiftAlphaAll", 1)
    info = json.loads((tmp_path / "model_info.json").read_text("utf-8"))
    assert (info["shortName"], info["src"], info["trg"]) == ("en-de-tiny", "English", "German")
    assert info["srcTags"] == {"en": "English"}
    assert "`gemm-precision: int8shiftAlphaAll`" in bergamot.readme(given)


def test_export_to_bergamot_of_two_vocabularies_names_both(spm: bytes, tmp_path: Path) -> None:
    one = original_with(spm)
    sides = Tokenizers(one.translator.tokenizers.source, Tokenizer(spm))
    given = replace(one, translator=random_translator(ModelConfig(**SIZES), sides))
    bergamot.write(given, tmp_path)
    assert {path.name for path in tmp_path.glob("*.spm")} == {"srcvocab.ende.spm", "trgvocab.ende.spm"}
    found = read_bin(tmp_path / "model.ende.bin")
    assert {"encoder_Wemb", "decoder_Wemb"} <= found.arrays.keys()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"d_ff": 24}, "model.d_ff=24: not a multiple of 64"),
        ({"d_model": 48}, "model.d_model=48: not a multiple of 64"),
    ],
)
def test_export_to_bergamot_refuses_sizes_that_are_no_blocks(changes: dict[str, Any], words: str, spm: bytes) -> None:
    with pytest.raises(InputError, match=words):
        bergamot.check(original_with(spm, **changes))


def test_export_to_bergamot_refuses_an_output_of_its_own_in_int8(spm: bytes) -> None:
    """At which the engine ends; in float32 it is fine."""
    original = original_with(spm, tie_embeddings=False)
    bergamot.check(original)
    with pytest.raises(
        InputError, match=r"model\.tie_embeddings=false: in int8, Bergamot's engine aborts at a separate output"
    ):
        bergamot.check(replace(original, quantization=Quantization.int8))


def test_export_to_bergamot_refuses_other_types_and_searches() -> None:
    with pytest.raises(ValueError, match="quantization=float16: Bergamot has float32 and int8"):
        ExportJob(to=Target.bergamot, quantization=Quantization.float16)
    with pytest.raises(ValueError, match=r"search\.beam_size: Bergamot searches in a way of its own"):
        ExportJob(to=Target.bergamot, search=SearchOverride(beam_size=2))
