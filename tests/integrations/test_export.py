"""Exports of models with random weights, in every variant, against the libraries that they are for."""

import copy
import json
import math
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sentencepiece import SentencePieceProcessor
from torch.nn import functional as F

from support.corpora import as_a_command, reseal, run, run_command, tiny_job, write_corpus
from support.translations import translator_with
from support.variants import untried
from transformer.config.primitives import to_json
from transformer.config.settings import (
    Activation,
    DataConfig,
    Format,
    ModelConfig,
    Norm,
    PairConfig,
    Positions,
    Precision,
    Quantization,
    Score,
    SearchConfig,
    SearchOverride,
    Start,
    TargetTokenizerConfig,
    TokenizerConfig,
)
from transformer.data.corpus import read_pairs
from transformer.data.tokenizer import Tokenizer, Tokenizers, train_tokenizer
from transformer.decoding.translator import Translator
from transformer.errors import InputError, StorageError
from transformer.integrations.engine.ctranslate2 import n_positions
from transformer.integrations.engine.parity import (
    Difference,
    Parity,
    SearchParity,
    choose_sentences,
    compare,
)
from transformer.integrations.engine.peer import Forced, Peer, exponent_near, forced_by
from transformer.integrations.engine.weights import Heads, ctranslate2_heads, fold
from transformer.integrations.export import argos, ctranslate2
from transformer.integrations.export.command import (
    FORMATS,
    Exported,
    ParityError,
    _renamed_when_done,
    export,
    format_exported,
    format_parity,
)
from transformer.integrations.export.expressible import check_expressible, check_pieces, check_tags, marian_heads
from transformer.integrations.export.formats import Original
from transformer.integrations.export.job import IN_BERGAMOT, ExportJob, Target
from transformer.layout import Padded
from transformer.model.attention import MultiHeadAttention
from transformer.model.layers import DecoderLayer
from transformer.model.transformer import Transformer
from transformer.registry import install_command
from transformer.vocabulary import BOS, EOS, PAD

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
    "GELU": {"activation": Activation.gelu},
    "swish": {"activation": Activation.swish},
    "biases": {"biases": True},
    "zeros": {"start": Start.zeros},
    "zeros, biases, untied": {"start": Start.zeros, "biases": True, "tie_embeddings": False},
    "biases, three heads": {"biases": True, "n_heads": 3, "d_k": 5, "d_v": 8, "tie_embeddings": False},
    "Marian's": {"start": Start.zeros, "positions": Positions.marian, "activation": Activation.swish},
    "deep encoder": {"n_layers": 3, "n_decoder_layers": 1},
    "everything": {
        **{"norm": Norm.pre, "positions": Positions.learned, "score": Score.additive, "tie_embeddings": False},
        **{"n_heads": 3, "d_k": 5, "d_v": 8, "n_layers": 2, "n_decoder_layers": 1, "activation": Activation.gelu},
    },
    "all that CTranslate2 has": {
        **{"norm": Norm.pre, "positions": Positions.learned, "score": Score.unscaled, "tie_embeddings": False},
        **{"n_heads": 3, "d_k": 5, "d_v": 24},
    },
}
ROUNDED = ("three heads", "biases, three heads")  # sqrt(8 / 5) is no power of two, so that W_q is rounded

# The key that a format refuses; every other cell of the table is exact.
REFUSED = {
    ("additive", Target.ctranslate2): "model.score=additive",
    ("additive", Target.huggingface): "model.score=additive",
    ("pre-norm", Target.huggingface): "model.norm=pre",
    ("learned positions", Target.huggingface): "model.positions=learned",
    ("wide keys", Target.huggingface): "model.d_k=24",
    ("wide values", Target.huggingface): "model.d_v=24",
    ("everything", Target.ctranslate2): "model.score=additive",
    ("everything", Target.huggingface): "model.score=additive",
    ("all that CTranslate2 has", Target.huggingface): "model.positions=learned",
    ("Marian's", Target.huggingface): "model.positions=marian",
    ("additive", Target.marian): "model.score=additive",
    ("pre-norm", Target.marian): "model.norm=pre",
    ("learned positions", Target.marian): "model.positions=learned",
    ("wide keys", Target.marian): "model.d_k=24",
    ("wide values", Target.marian): "model.d_v=24",
    ("GELU", Target.marian): "model.activation=gelu",
    ("everything", Target.marian): "model.score=additive",
    ("all that CTranslate2 has", Target.marian): "model.positions=learned",
}
# What goes to Argos is what goes to CTranslate2, in a package.
OTHERWISE = (Target.argos, *IN_BERGAMOT)  # as CTranslate2, and as Marian: see their own tests
CELLS = [(variant, target) for variant in VARIANTS for target in FORMATS if target not in OTHERWISE]


def need(target: Target) -> None:
    """Skip a test where a library is not installed."""
    for package in FORMATS[target].packages:
        pytest.importorskip(package)


def model_config(variant: str, target: Target | None = None) -> ModelConfig:
    """Marian's own form takes Marian's start and sinusoids alone: there, every variant has them."""
    sizes: dict[str, Any] = {"n_layers": 2, "d_model": 32, "d_ff": 48, "n_heads": 2, "max_positions": 64}
    of_marian = {"start": Start.zeros, "positions": Positions.marian} if target is Target.marian else {}
    return ModelConfig(**sizes | of_marian | VARIANTS[variant])


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """Twelve pairs of two to nine words."""
    data = write_corpus(tmp_path_factory.mktemp("corpus"))
    pairs = list(read_pairs(Path(data.dev.src), Path(data.dev.tgt)))[:12]
    return [("one two", "eins zwei"), *pairs[1:]]


@pytest.fixture(scope="module")
def tokenizer_model(text: list[tuple[str, str]]) -> bytes:
    return train_tokenizer([line for pair in text for line in pair], TokenizerConfig(vocab_size=60))


@pytest.fixture(scope="module")
def two_tokenizers(text: list[tuple[str, str]]) -> Tokenizers:
    """Of the two sides of the text, with other sizes."""
    source, target = zip(*text, strict=True)
    models = [train_tokenizer(lines, TokenizerConfig(vocab_size=size)) for lines, size in ((source, 50), (target, 45))]
    tokenizers = Tokenizers(*map(Tokenizer, models))
    assert tokenizers.source.vocab_size != tokenizers.target.vocab_size
    return tokenizers


def random_translator(config: ModelConfig, tokenizer: bytes | Tokenizers, seed: int = 1) -> Translator:
    """Every weight is random, gains and biases of norms among them, which training would begin with at 1 and 0."""
    if isinstance(tokenizer, bytes):
        one = Tokenizer(tokenizer)
        tokenizer = Tokenizers(one, one)
    torch.manual_seed(seed)
    model = Transformer(config, tokenizer.vocab_sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        model.output[PAD] = 0.0  # never produced by ours: let them be improbable to others, too
        model.output[BOS] *= 0.1
        if config.start is Start.zeros:  # which training leaves alone
            model.target_embedding.matrix[[PAD, BOS]] = 0.0
            model.output[[PAD, BOS]] = 0.0
            assert model.output_bias is not None
            model.output_bias[[PAD, BOS]] = -100.0

        # A hidden state is spread around the bias of the last norm: translations shall end.
        norms = [weight for name, weight in model.named_parameters() if name.endswith("norm.bias")]
        model.output[EOS] += 4 * F.normalize(norms[-1], dim=0)
    search = SearchConfig(beam_size=4, length_penalty=0.6, max_extra=6)
    return translator_with(model.eval(), tokenizer, search=search, precision=Precision.fp32)


def original_of(translator: Translator, quantization: Quantization = Quantization.float32) -> Original:
    return Original(
        translator,
        src_lang="en",
        tgt_lang="de",
        quantization=quantization,
        exponent=0.4,
        origin="runs/tiny (averaged)",
        output=Path("runs/tiny-exported"),
    )


def parity_of(original: Original, target: Target, folder: Path, text: list[tuple[str, str]]) -> Parity:
    export_format = FORMATS[target]
    export_format.write(original, folder)
    peer = export_format.load(original, folder, 1)
    bound = (
        export_format.bound(original.translator.model.config) if original.quantization is Quantization.float32 else None
    )
    sentences = choose_sentences(text, translator=original.translator, count=len(text))
    return compare(original.translator, peer, sentences, bound=bound, tgt_lang="de")


# ---- what each format can express -----------------------------------------------------------------------------------


def test_variants_try_every_choice_of_a_switch() -> None:
    assert untried(map(model_config, VARIANTS)) == set()


def marks_of(target: Target) -> list[pytest.MarkDecorator]:
    """torch's exporter to ONNX needs seconds to load, and seconds for each model."""
    return [pytest.mark.ci] if target is Target.onnx else []


def bound_of(target: Target, variant: str) -> float:
    """What is not exact: rounded weights, what is computed in float32, and Marian's norms."""
    if target is Target.marian:
        return 1e-3
    return 1e-9 if target is Target.huggingface and variant not in ROUNDED else 1e-4


def exact_cells() -> list[Any]:
    return [
        pytest.param(variant, target, marks=marks_of(target))
        for variant, target in CELLS
        if (variant, target) not in REFUSED
    ]


@pytest.mark.parametrize(("variant", "target"), exact_cells(), ids=lambda value: getattr(value, "value", value))
@pytest.mark.ci
def test_export_of_a_variant_computes_the_same(
    variant: str, target: Target, text: list[tuple[str, str]], tokenizer_model: bytes, tmp_path: Path
) -> None:
    need(target)
    config = model_config(variant, target)
    check_expressible(config, target)
    original = original_of(random_translator(config, tokenizer_model))
    parity = parity_of(original, target, tmp_path, text)
    assert parity.problems == []
    assert parity.bound == bound_of(target, variant)
    assert parity.cut_alike == parity.sentences == len(text)

    greedy, beam = parity.searches
    assert greedy.identical == len(text)
    assert beam.identical + beam.degenerate == len(text)
    assert beam.degenerate <= 2


@pytest.mark.parametrize(
    ("variant", "target"),
    [pytest.param(*cell, marks=marks_of(cell[1])) for cell in CELLS if cell[0] in ("plain", "untied")],
    ids=lambda value: getattr(value, "value", value),
)
def test_export_of_two_vocabularies_computes_the_same(
    variant: str, target: Target, text: list[tuple[str, str]], two_tokenizers: Tokenizers, tmp_path: Path
) -> None:
    need(target)
    original = original_of(random_translator(model_config(variant, target), two_tokenizers))
    parity = parity_of(original, target, tmp_path, text)
    assert parity.problems == []
    assert parity.bound == bound_of(target, variant)
    assert parity.cut_alike == parity.sentences == len(text)
    greedy, beam = parity.searches
    assert greedy.identical == len(text)
    assert beam.identical + beam.degenerate == len(text)

    if target is Target.huggingface:  # what it decodes with, and how it cuts a target
        import transformers

        of_both = transformers.MarianTokenizer.from_pretrained(tmp_path)
        for _, reference in text:
            [ids] = two_tokenizers.target.encode([reference])
            assert of_both(text_target=[reference])["input_ids"] == [[*ids, EOS]]
            assert of_both.decode(ids) == reference


def test_export_compares_translations_that_end_where_positions_do(
    text: list[tuple[str, str]], tokenizer_model: bytes, tmp_path: Path
) -> None:
    """The model has no position to read their last piece at, and needs none: nothing comes after it."""
    need(Target.ctranslate2)
    translator = random_translator(replace(model_config("plain"), max_positions=40), tokenizer_model)
    with torch.no_grad():
        translator.model.output[EOS] *= -1.0
    translator = translator_with(
        translator.model,
        translator.tokenizers,
        search=replace(translator.search, max_extra=50),
        precision=Precision.fp32,
    )
    parity = parity_of(original_of(translator, Quantization.int8), Target.ctranslate2, tmp_path, text)
    assert any(search.identical < len(text) for search in parity.searches)
    assert parity.problems == []


def test_export_to_huggingface_of_a_greedy_search_has_no_length_penalty(
    text: list[tuple[str, str]], tokenizer_model: bytes, tmp_path: Path
) -> None:
    """Which transformers would refuse beside `num_beams=1`."""
    need(Target.huggingface)
    translator = random_translator(model_config("plain"), tokenizer_model)
    greedy = translator.with_search(replace(translator.search, beam_size=1))
    parity = parity_of(original_of(greedy), Target.huggingface, tmp_path, text)
    assert parity.problems == []
    settings = json.loads((tmp_path / "generation_config.json").read_text("utf-8"))
    assert settings["num_beams"] == 1
    assert settings.get("length_penalty", 1.0) == 1.0


@pytest.mark.parametrize(("cell", "key"), REFUSED.items(), ids=lambda value: str(value))
def test_export_refuses_what_a_format_cannot_express(cell: tuple[str, Target], key: str) -> None:
    variant, target = cell
    with pytest.raises(InputError, match=f"^{key}: .*to=onnx can express it$"):
        check_expressible(model_config(variant, target), target)


def test_export_to_marian_refuses_a_start_and_positions_that_are_not_marians() -> None:
    for variant, key in (("plain", "model.start=learned"), ("zeros", "model.positions=sinusoidal")):
        with pytest.raises(InputError, match=f"^{key}: Marian's .*: train with .*; to=huggingface, .* can express it$"):
            check_expressible(model_config(variant), Target.marian)


@pytest.mark.parametrize(
    "variant",
    ["plain", "unscaled", "narrow heads", "wide keys", "wide values", "three heads", "biases, three heads"],
)
def test_fold_makes_attention_that_is_scaled_by_its_own_width_compute_the_same(variant: str, float64: None) -> None:
    """Needs no other library: our own attention with as many and as wide heads as the format has."""
    config = model_config(variant)
    formats = [ctranslate2_heads(config)]
    if "wide" not in variant:
        formats.append(marian_heads(config))
    model = Transformer(config, 20).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)  # biases, too
    x, layout = torch.randn(2, 5, 32), Padded.of([5, 3], 5)

    for heads in formats:
        weights = fold(model, heads)
        layer = model.decoder[1]
        assert isinstance(layer, DecoderLayer)
        original = layer.cross_attention
        folded = MultiHeadAttention(
            32, heads.count, d_k=heads.width, d_v=heads.width, score=Score.scaled, biases=config.biases, dropout=0.0
        ).eval()
        for name, parameter in folded.named_parameters():
            parameter.data = weights[f"decoder.1.cross_attention.{name}"].double()

        wanted, found = (
            attention(x, attention.keys_values(x), queries=layout, keys=layout, causal=False)
            for attention in (original, folded)
        )
        torch.testing.assert_close(found[0], wanted[0], rtol=0.0, atol=1e-6)  # the weights are float32
        torch.testing.assert_close(found[1, :3], wanted[1, :3], rtol=0.0, atol=1e-6)


def test_marian_heads_are_the_fewest_that_share_the_width() -> None:
    assert marian_heads(model_config("plain")) == Heads(2, 16)
    assert marian_heads(model_config("three heads")) == Heads(4, 8)
    assert ctranslate2_heads(model_config("three heads")) == Heads(3, 8)
    assert ctranslate2_heads(model_config("wide keys")) == Heads(2, 24)


# ---- fewer bits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantization", [Quantization.int8, Quantization.float16, Quantization.bfloat16])
def test_export_in_fewer_bits_states_what_it_loses_and_leaves_the_model_alone(
    quantization: Quantization, text: list[tuple[str, str]], tokenizer_model: bytes, tmp_path: Path
) -> None:
    need(Target.ctranslate2)
    translator = random_translator(model_config("plain"), tokenizer_model)
    before = {name: weight.clone() for name, weight in translator.model.state_dict().items()}
    parity = parity_of(original_of(translator, quantization), Target.ctranslate2, tmp_path, text)

    after = translator.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert 1e-4 < parity.log_probs < 2.0
    assert parity.bound is None
    assert parity.problems == []
    assert {search.bleu is None for search in parity.searches} == {False}
    assert "(" not in format_parity(parity).split("\n")[1], "no bound is named that is not kept"


def test_ctranslate2_has_positions_for_all_that_it_reads() -> None:
    """It reads 1,024 tokens by default, and a row too few is an error there; what was learned cannot be prolonged."""
    config = model_config("plain")
    assert n_positions(config) == 1025
    assert n_positions(replace(config, max_positions=2000)) == 2000
    assert n_positions(model_config("learned positions")) == 64


# ---- the check ------------------------------------------------------------------------------------------------------


class Twin:
    """A peer that is our own model and search, but for what a test changes."""

    def __init__(self, translator: Translator) -> None:
        self.alpha = 0.6
        self.arithmetic = "float32"
        self.versions = {"twin": "1"}
        self.translator = translator

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self.translator.tokenizers.source.encode(list(texts))

    def penalty(self, length: int) -> float:
        return length**self.alpha

    def forced(self, sources: Sequence[list[int]], targets: Sequence[list[int]]) -> list[Forced]:
        found = []
        for source, target in zip(sources, targets, strict=True):
            memory = self.translator.model(
                torch.tensor([[*source, EOS]]),
                torch.tensor([[BOS, *target]]),
                source_layout=Padded.of([len(source) + 1], len(source) + 1),
                target_layout=Padded.of([len(target) + 1], len(target) + 1),
            )
            found += forced_by(memory.detach().double(), [target])
        return found

    def translate(self, sources: Sequence[list[int]], *, beam_size: int, max_length: int) -> list[list[int]]:
        search = SearchConfig(beam_size=beam_size, max_extra=max_length - len(sources[0]))
        translator = self.translator.with_search(search)
        found = translator.hypotheses(sources, n_best=1, penalty=self.penalty)
        return [best.tokens for [best] in found]


@pytest.fixture
def translator(tokenizer_model: bytes) -> Translator:
    return random_translator(model_config("plain"), tokenizer_model)


def compared(translator: Translator, peer: Peer, text: Sequence[tuple[str, str | None]]) -> Parity:
    sentences = choose_sentences(text, translator=translator, count=100)
    return compare(translator, peer, sentences, bound=1e-4, tgt_lang="de")


def test_compare_finds_nothing_where_both_are_the_same(translator: Translator, text: list[tuple[str, str]]) -> None:
    parity = compared(translator, Twin(translator), text)
    assert parity.problems == []
    assert [search.identical for search in parity.searches] == [12, 12]
    assert [search.their_bleu == search.bleu is not None for search in parity.searches] == [True, True]
    assert parity.tokens == sum(
        len(ids) + 1 for ids in translator.tokenizers.source.encode([target for _, target in text])
    )


def test_compare_without_references_forces_our_translations(
    translator: Translator, text: list[tuple[str, str]]
) -> None:
    parity = compared(translator, Twin(translator), [(source, None) for source, _ in text])
    assert parity.problems == []
    assert parity.log_probs > 0.0
    assert [search.bleu for search in parity.searches] == [None, None]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("encoder.0.self_attention.W_q.weight", (3, 4)),
        ("decoder.1.cross_attention.W_v.weight", (20, 31)),
        ("decoder.0.feed_forward_norm.bias", (7,)),
        ("embedding", (9, 0)),
    ],
)
def test_compare_sees_one_weight_that_differs(
    name: str, place: tuple[int, ...], translator: Translator, text: list[tuple[str, str]]
) -> None:
    model = copy.deepcopy(translator.model)
    with torch.no_grad():
        dict(model.named_parameters())[name][place] += 0.5
    other = translator_with(model, translator.tokenizers.source, search=translator.search, precision=Precision.fp32)
    parity = compared(translator, Twin(other), text)
    assert re.match("a log-probability differs by", parity.problems[0])


def test_compare_sees_numbers_that_are_not_finite(translator: Translator, text: list[tuple[str, str]]) -> None:
    class Broken(Twin):
        def forced(self, sources: Sequence[list[int]], targets: Sequence[list[int]]) -> list[Forced]:
            first, *others = super().forced(sources, targets)
            return [replace(first, log_probs=first.log_probs * math.nan), *others]

    parity = compared(translator, Broken(translator), text)
    assert parity.problems == ["a log-probability differs by nan (0.0001 allowed)"]
    assert replace(parity, bound=None).problems == ["a log-probability differs by nan"], "in whatever type"


def test_compare_sees_a_search_that_goes_wrong(translator: Translator, text: list[tuple[str, str]]) -> None:
    """As one does that begins with another mark: the log-probabilities are right, and the translations are not."""

    class Astray(Twin):
        def translate(self, sources: Sequence[list[int]], *, beam_size: int, max_length: int) -> list[list[int]]:
            found = super().translate(sources, beam_size=beam_size, max_length=max_length)
            return [[7, *tokens[: max_length - 2]] for tokens in found]

    parity = compared(translator, Astray(translator), text)
    greedy, beam = parity.problems
    assert greedy == "12 of 12 translations differ (greedy)"
    assert re.fullmatch(r"\d+ of 12 translations differ \(beam 4, length penalty 0\.6\)", beam)
    first = parity.searches[0].differences[0]
    assert (first.line, first.source) == (1, "one two")
    assert first.gap > 1e-4, "the greedy choice is the more probable one"
    printed = format_parity(parity).split("\n")
    assert printed[3] == (
        "greedy: 0 of 12 translations are identical, 0 within 1e-04 in score, 0 degenerate, 12 others; "
        "BLEU 0.00 (ours 0.00)"
    )
    assert "  and 2 more" in printed


def test_compare_forgives_candidates_that_are_as_good_as_equal(
    tokenizer_model: bytes, text: list[tuple[str, str]]
) -> None:
    """Of two pieces with the same weights, whichever a search takes, nobody is wrong."""
    translator = random_translator(model_config("untied"), tokenizer_model)
    sources = translator.tokenizers.source.encode([source for source, _ in text])
    greedily = translator.with_search(replace(translator.search, beam_size=1))
    hypotheses = greedily.hypotheses(sources, n_best=1)
    [piece, *_] = next(best.tokens for [best] in hypotheses if best.tokens)
    other = 8 if piece == 7 else 7
    with torch.no_grad():
        for matrix in (translator.model.output, translator.model.target_embedding.matrix):
            matrix[other] = matrix[piece]
    translator = translator_with(
        translator.model, translator.tokenizers.source, search=translator.search, precision=Precision.fp32
    )

    class Undecided(Twin):
        def translate(self, sources: Sequence[list[int]], *, beam_size: int, max_length: int) -> list[list[int]]:
            found = super().translate(sources, beam_size=beam_size, max_length=max_length)
            return [[{piece: other, other: piece}.get(token, token) for token in tokens] for tokens in found]

    parity = compared(translator, Undecided(translator), text)
    assert parity.problems == []
    greedy, beam = parity.searches
    assert greedy.ties > 0
    assert greedy.ties + greedy.identical == 12
    assert beam.others == 0
    assert all(abs(one.gap) < 1e-9 for one in greedy.differences)


@pytest.mark.parametrize(
    ("length", "alpha", "exponent"), [(15.0, 0.6, 0.45), (20.0, 1.4, 1.12), (15.0, 0.0, 0.0), (1e9, 0.6, 0.6)]
)
def test_exponent_near_grows_there_as_the_penalty_of_the_run_does(length: float, alpha: float, exponent: float) -> None:
    """In proportion: the growth of the logarithms over a small step."""
    assert exponent_near(length, alpha) == exponent
    step = 1e-4 * length
    ours = alpha * math.log((5 + length + step) / (5 + length))
    assert exponent * math.log((length + step) / length) == pytest.approx(ours, rel=1e-3)


def test_choose_sentences_leaves_out_what_cannot_be_compared(translator: Translator) -> None:
    long = " ".join(["one two three four"] * 20)  # more than the 64 positions
    pairs = [
        ("", "eins"),
        ("one", "eins"),
        (long, "zwei"),
        ("two", long),
        ("   ", "drei"),
        ("three", "drei"),
        ("four", "vier"),
    ]
    chosen = choose_sentences(pairs, translator=translator, count=2)
    assert [(sentence.line, sentence.text, sentence.reference) for sentence in chosen] == [
        (2, "one", "eins"),
        (6, "three", "drei"),
    ]


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps, whose model says little."""
    data = write_corpus(tmp_path_factory.mktemp("corpus"))
    return run(tiny_job(tmp_path_factory.mktemp("runs") / "tiny", data))


def exported(run_dir: Path, output: Path, **changes: Any) -> Exported:
    with as_a_command():
        return export(ExportJob(run_dir=str(run_dir), output=str(output), threads=1, **changes))


def example_in(folder: Path) -> str:
    """The code of its README."""
    [code] = re.findall(r"^```python\n(.*?)^```$", (folder / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return str(code)


@pytest.fixture(scope="module")
def run_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a vocabulary for each language."""
    data = write_corpus(tmp_path_factory.mktemp("corpus"))
    job = tiny_job(tmp_path_factory.mktemp("runs") / "two", data)
    return run(replace(job, tokenizer=replace(job.tokenizer, target=TargetTokenizerConfig(vocab_size=45))))


FILES = {
    Target.ctranslate2: {"config.json", "model.bin", "shared_vocabulary.json", "tokenizer.model"},
    Target.huggingface: {
        *("config.json", "generation_config.json", "model.safetensors", "source.spm", "target.spm", "vocab.json"),
        "tokenizer_config.json",
    },
    Target.onnx: {"encoder.onnx", "decoder.onnx", "tokenizer.model"},
}


def test_export_to_marian_writes_what_it_says_and_says_what_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run with a vocabulary for each language, by the command; for one version its first line names the other."""
    data = write_corpus(tmp_path / "corpus")
    job = tiny_job(tmp_path / "run", data, {"start": Start.zeros, "positions": Positions.marian})
    run_dir = run(replace(job, tokenizer=replace(job.tokenizer, target=TargetTokenizerConfig(vocab_size=45))))
    capsys.readouterr()
    output = tmp_path / "model"
    run_command("export", ExportJob(run_dir=str(run_dir), output=str(output), to=Target.marian, threads=1))
    lines = capsys.readouterr().out.split("\n")
    assert lines[0] == (
        "to=marian writes Marian's own files; those of Hugging Face's MarianMTModel are to=huggingface now"
    )
    assert lines[1].startswith(f"{output}: marian in float32, ")
    assert lines[3].startswith("16 sentences, 16 of them cut into the same pieces; numpy ")
    assert {path.name for path in output.iterdir()} == {
        *("model.npz", "source.spm", "target.spm", "decoder.yml"),
        *("README.md", "parity.json"),
    }
    assert json.loads((output / "parity.json").read_text("utf-8"))["to"] == "marian"
    assert f"-v {output}/source.spm {output}/target.spm" in (output / "README.md").read_text("utf-8")


EACH_TARGET = [pytest.param(target, marks=marks_of(target)) for target in FILES]


@pytest.mark.parametrize("target", EACH_TARGET, ids=lambda target: target.value)
def test_export_writes_a_directory_that_loads_as_its_readme_says(
    target: Target, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need(target)
    output = tmp_path / 'it"s new' / "model"
    found = exported(run_dir, output, to=target)
    assert {path.name for path in output.iterdir()} == {*FILES[target], "README.md", "parity.json"}
    assert [path.name for path in output.parent.iterdir()] == ["model"]

    # What was checked: the development set, which has 16 sentences.
    assert json.loads((output / "parity.json").read_text("utf-8")) == to_json(found)
    assert found.parity.sentences == 16
    assert found.checkpoint == "averaged"
    assert found.megabytes == pytest.approx(
        sum((output / name).stat().st_size for name in (*FILES[target], "README.md")) / 1e6
    )
    lines = format_exported(found).split("\n")
    assert lines[0].startswith(f"{output}: {target.value} in float32, ")
    assert lines[1] == "checked on sentences of dev:"
    assert lines[2].startswith("16 sentences, 16 of them cut into the same pieces; ")

    # What a user would do.
    capsys.readouterr()
    exec(example_in(output), {})
    assert capsys.readouterr().out.startswith("['" if target is not Target.onnx else "")


FILES_OF_TWO = {
    Target.ctranslate2: {"source_vocabulary.json", "target_vocabulary.json", "tokenizer.target.model"},
    Target.huggingface: {"target_vocab.json"},
    Target.onnx: {"tokenizer.target.model"},
}


@pytest.mark.parametrize("target", EACH_TARGET, ids=lambda target: target.value)
def test_export_of_a_run_with_two_vocabularies_loads_as_its_readme_says(
    target: Target, run_of_two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need(target)
    found = exported(run_of_two, tmp_path / "model", to=target)
    expected = {*FILES[target], *FILES_OF_TWO[target], "README.md", "parity.json"} - {"shared_vocabulary.json"}
    assert {path.name for path in (tmp_path / "model").iterdir()} == expected
    assert found.parity.problems == []
    assert found.parity.cut_alike == found.parity.sentences == 16

    capsys.readouterr()
    exec(example_in(tmp_path / "model"), {})
    assert capsys.readouterr().out.startswith("['" if target is not Target.onnx else "")


def test_export_checks_with_the_sentences_of_a_file(run_dir: Path, tmp_path: Path) -> None:
    need(Target.ctranslate2)
    source, reference = tmp_path / "source.txt", tmp_path / "reference.txt"
    source.write_text("one two\n\nthree\nfour\n", encoding="utf-8")
    reference.write_text("eins zwei\n\ndrei\nvier\n", encoding="utf-8")
    alone = exported(run_dir, tmp_path / "a", src=str(source), sentences=2, checkpoint="step-8")
    assert alone.parity.sentences == 2
    assert alone.parity.searches[0].bleu is None
    assert alone.checkpoint == "step-00000008"
    both = exported(run_dir, tmp_path / "b", src=str(source), tgt=str(reference), search=SearchOverride(beam_size=2))
    assert both.parity.sentences == 3
    assert [search.beam_size for search in both.parity.searches] == [1, 2]
    assert both.parity.searches[0].bleu is not None


def test_export_prints_text_or_json(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    need(Target.ctranslate2)
    job = ExportJob(run_dir=str(run_dir), output=str(tmp_path / "a"), threads=1, sentences=4)
    run_command("export", job)
    assert re.search(r"^greedy: \d of 4 translations are identical", capsys.readouterr().out, re.MULTILINE)
    run_command("export", replace(job, output=str(tmp_path / "b"), format=Format.json))
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "b" / "parity.json").read_text("utf-8"))
    assert printed["parity"]["sentences"] == 4


def test_export_that_does_not_compute_the_same_is_not_written(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_another(original: Original, folder: Path) -> None:
        model = copy.deepcopy(original.translator.model)
        with torch.no_grad():
            model.output *= 1.01
        other = translator_with(model, original.translator.tokenizers.source, search=original.translator.search)
        ctranslate2.write(replace(original, translator=other), folder)

    need(Target.ctranslate2)
    monkeypatch.setitem(FORMATS, Target.ctranslate2, replace(ctranslate2.FORMAT, write=write_another))
    with pytest.raises(ParityError, match=r"not written: .*: a log-probability differs by .* \(with ctranslate2 "):
        exported(run_dir, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []

    lossy = exported(run_dir, tmp_path / "model", quantization=Quantization.float16)
    assert lossy.parity.log_probs > 1e-4, "what fewer bits lose is only stated"


# ---- Argos Translate


@pytest.mark.parametrize("quantization", [Quantization.float32, Quantization.int8])
def test_export_to_argos_is_a_package_of_what_goes_to_ctranslate2(
    quantization: Quantization, run_dir: Path, tmp_path: Path
) -> None:
    """Argos unpacks it among others, and reads of it: metadata, one SentencePiece model, `model`, and what it shows."""
    need(Target.argos)
    found = exported(run_dir, tmp_path / "model", to=Target.argos, quantization=quantization)
    name = "translate-en_de"
    assert {path.name for path in (tmp_path / "model").iterdir()} == {f"{name}.argosmodel", "README.md", "parity.json"}
    assert [(search.beam_size, search.length_penalty) for search in found.parity.searches] == [(1, 0.2), (4, 0.2)]
    assert found.parity.problems == []
    assert found.parity.cut_alike == found.parity.sentences == 16

    with zipfile.ZipFile(tmp_path / "model" / f"{name}.argosmodel") as archive:
        files = {path: archive.read(path) for path in archive.namelist() if not path.endswith("/")}
    model = {"config.json", "model.bin", "shared_vocabulary.json"}
    packaged = {"README.md", "metadata.json", "sentencepiece.model", *(f"model/{file}" for file in model)}
    assert files.keys() == {f"{name}/{file}" for file in packaged}
    assert json.loads(files[f"{name}/metadata.json"]) == {
        **{"from_code": "en", "from_name": "English", "to_code": "de", "to_name": "German"},
        **{"package_version": "1.0", "argos_version": "1.11", "links": []},
    }
    assert files[f"{name}/sentencepiece.model"] == (run_dir / "tokenizer.model").read_bytes()

    exported(run_dir, tmp_path / "other", to=Target.ctranslate2, quantization=quantization)
    for file in model:
        assert files[f"{name}/model/{file}"] == (tmp_path / "other" / file).read_bytes()


@pytest.mark.parametrize(
    ("languages", "codes", "names"),
    [
        (("eng", "pt_BR"), ("en", "pb"), ("English", "Portuguese (Brazil)")),
        (("zh-Hant", "zh-Hans"), ("zt", "zh"), ("Chinese (traditional)", "Chinese")),
        (("pt", "nds"), ("pt", "nds"), ("Portuguese", "nds")),
    ],
)
def test_export_to_argos_calls_languages_as_argos_does(
    languages: tuple[str, str], codes: tuple[str, str], names: tuple[str, str], tokenizer_model: bytes
) -> None:
    original = original_of(random_translator(model_config("plain"), tokenizer_model))
    original = replace(original, src_lang=languages[0], tgt_lang=languages[1])
    assert argos.codes_of(original) == codes
    assert f"# {names[0]} to {names[1]} for Argos Translate" in argos.readme(original)


def test_export_to_argos_refuses_what_argos_has_not(
    two_tokenizers: Tokenizers,
) -> None:
    learned = replace(model_config("learned positions"), max_positions=1024)
    tagged = DataConfig(train=PairConfig(src="a", tgt="b", tag="<2de>"))
    for check, message in (
        (lambda: check_expressible(learned, Target.argos), "model.max_positions=1024: "),
        (lambda: check_expressible(model_config("additive"), Target.argos), "model.score=additive: "),
        (lambda: check_tags(tagged, Target.argos), "data.train.tag=<2de>: "),
        (lambda: check_pieces(two_tokenizers, Target.argos), "tokenizer.target: "),
    ):
        with pytest.raises(InputError, match=f"^{message}"):
            check()
    check_expressible(replace(learned, max_positions=1025), Target.argos)
    check_tags(tagged, Target.ctranslate2)


ARGOS = """
import json, sys
from argostranslate import package, translate

class Whole:
    def split_sentences(self, text):
        return [text]

package.install_from_path(sys.argv[1])
(installed,) = package.get_installed_packages()
one = translate.PackageTranslation(None, None, installed)
one.sentencizer = Whole()  # its models are on the network
print(json.dumps([one.translate(line.rstrip("\\n")) for line in sys.stdin]))
"""


@pytest.mark.ci
@pytest.mark.timeout(2000)
def test_export_to_argos_translates_there_as_ctranslate2_does(run_dir: Path, tmp_path: Path) -> None:
    """With an Argos that is installed: in this environment, or in that of the Python that TRANSFORMER_ARGOS names."""
    import ctranslate2 as library

    python = os.environ.get("TRANSFORMER_ARGOS", sys.executable)
    if subprocess.run([python, "-c", "import argostranslate"], capture_output=True).returncode:
        pytest.skip("Argos Translate is not installed")
    lines = (run_dir / "hypotheses" / "dev.src").read_text("utf-8").splitlines()[:6]
    exported(run_dir, tmp_path / "model", to=Target.argos)
    exported(run_dir, tmp_path / "other")
    settings = {"ARGOS_COMPUTE_TYPE": "float32", "ARGOS_INTRA_THREADS": "1"}  # it would choose int8, where that is fast
    ended = subprocess.run(
        [python, "-c", ARGOS, str(tmp_path / "model" / "translate-en_de.argosmodel")],
        input="".join(f"{line}\n" for line in lines),
        env={**os.environ, **settings, "HOME": str(tmp_path), "ARGOS_PACKAGES_DIR": str(tmp_path / "packages")},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert ended.returncode == 0, ended.stderr

    pieces = SentencePieceProcessor(model_file=str(tmp_path / "other" / "tokenizer.model"))
    found = library.Translator(str(tmp_path / "other")).translate_batch(
        pieces.encode(lines, out_type=str), beam_size=4, length_penalty=0.2, replace_unknowns=True
    )
    assert json.loads(ended.stdout) == [pieces.decode(one.hypotheses[0]).strip() for one in found]


# ---- refusals, which need none of the libraries


def refusal(run_dir: Path, output: Path, **changes: Any) -> str:
    with pytest.raises(InputError) as refused:
        exported(run_dir, output, **changes)
    return str(refused.value)


def test_export_refuses_an_output_that_is_there(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("full", "full/file", "link"):
        assert refusal(run_dir, tmp_path / name) == (
            f"{tmp_path / name}: exists already and is not empty: choose another output, or remove it"
        )


def test_export_clears_what_killed_exports_to_the_same_output_left(tmp_path: Path) -> None:
    """And no other's: not that of one which is alive, nor what only has a similar name."""
    kept = [".tmp-a[b]-1-00000000", ".tmp-model-12", ".tmp-model.old-1-00000000", ".tmp-model-3-00000000"]
    for name in (".tmp-model-1-0123abcd", *kept):
        (tmp_path / name / "sub").mkdir(parents=True)
    (tmp_path / kept[-1]).rename(tmp_path / "elsewhere")
    (tmp_path / kept[-1]).symlink_to("elsewhere")

    with _renamed_when_done(tmp_path / "model") as alive:
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, "elsewhere", alive.name])
        with suppress(StorageError), _renamed_when_done(tmp_path / "model"):
            assert alive.is_dir()
            raise StorageError("full")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, "elsewhere", "model"])


@pytest.mark.parametrize("target", Target)
def test_export_names_the_extra_of_a_package_that_is_missing(
    target: Target, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformer.integrations.export.command.find_spec", lambda name: None)
    if not FORMATS[target].packages:
        assert target in (Target.marian, *IN_BERGAMOT)
        return
    assert refusal(run_dir, tmp_path / "model", to=target) == (
        f"to={target.value} needs {', '.join(FORMATS[target].packages)}: {install_command('export')}"
    )
    assert list(tmp_path.iterdir()) == []


def test_export_refuses_a_run_that_is_not_there_and_settings_that_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformer.integrations.export.command.find_spec", lambda name: name)
    assert refusal(tmp_path / "nowhere", tmp_path / "model").startswith(
        f"{tmp_path / 'nowhere'}: no such run directory"
    )
    for changes, message in (
        (
            {"quantization": Quantization.int8, "to": Target.onnx},
            "quantization=int8 is for to=ctranslate2, to=argos, to=bergamot and to=browser: leave it out",
        ),
        (
            {"to": Target.argos, "search": SearchOverride(length_penalty=1.0)},
            "search.length_penalty: Argos searches in a way of its own: leave it out under to=argos",
        ),
        ({"tgt": "reference.txt"}, "tgt has the references of src: set both"),
        ({"sentences": 0}, "sentences=0 must be at least 1"),
        ({"output": ""}, "output must name a directory"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            ExportJob(**changes)


def test_export_refuses_a_run_that_a_format_cannot_express(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any weight is read."""
    monkeypatch.setattr("transformer.integrations.export.command.find_spec", lambda name: name)
    copied = Path(shutil.copytree(run_dir, tmp_path / "run"))
    config = copied / "averaged" / "config.json"
    settings = json.loads(config.read_text("utf-8"))
    settings["model"]["norm"] = "pre"
    config.write_text(json.dumps(settings), encoding="utf-8")
    reseal(copied / "averaged")
    assert refusal(copied, tmp_path / "model", to=Target.huggingface).startswith("model.norm=pre: ")


def test_export_without_sentences_asks_for_some(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer.integrations.export.command.find_spec", lambda name: name)
    copied = Path(shutil.copytree(run_dir, tmp_path / "run"))
    shutil.rmtree(copied / "hypotheses")
    assert refusal(copied, tmp_path / "model").endswith("name a file with src=FILE")
    (tmp_path / "empty.txt").write_text("\n \n", encoding="utf-8")
    assert refusal(copied, tmp_path / "model", src=str(tmp_path / "empty.txt")).endswith("name a file with src=FILE")


@pytest.mark.parametrize(("gap", "said"), [(0.25, "ours better by 2.5e-01"), (-0.5, "theirs better by 5.0e-01")])
def test_format_parity_says_whose_translation_is_better(gap: float, said: str) -> None:
    difference = Difference(line=3, source="A cat.", ours="Katze.", theirs="Kater.", gap=gap, degenerate=False)
    search = SearchParity(
        beam_size=1,
        length_penalty=1.0,
        identical=4,
        ties=0,
        degenerate=0,
        others=1,
        bleu=None,
        their_bleu=None,
        differences=[difference],
    )
    parity = Parity(
        sentences=5,
        cut_alike=5,
        tokens=20,
        arithmetic="float32",
        versions={"peer": "1.0"},
        mean_log_probs=0.0,
        log_probs=1e-6,
        logits=None,
        bound=1e-4,
        searches=[search],
    )
    assert f"  line 3, {said}: Kater. | Katze." in format_parity(parity).splitlines()
