"""Parameters and FLOPs against the paper's tables, the model itself, and torch's FLOP counter."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from transformer import cost
from transformer.config.settings import ModelConfig, Norm, Positions, Score, Start
from transformer.layout import Padded
from transformer.model.transformer import Transformer
from transformer.vocabulary import VocabSize, VocabSizes

BASE = ModelConfig()
BIG = ModelConfig(d_model=1024, d_ff=4096, n_heads=16)
SMALL = ModelConfig(n_layers=2, d_model=32, d_ff=48, n_heads=4, max_positions=20)
VARIANTS = {
    "post": SMALL,
    "pre": replace(SMALL, norm=Norm.pre),
    "untied": replace(SMALL, tie_embeddings=False),
    "learned": replace(SMALL, positions=Positions.learned),
    "widths": replace(SMALL, n_heads=3, d_k=6, d_v=10),
    "deep": replace(SMALL, n_layers=5),
    "deep encoder": replace(SMALL, n_layers=5, n_decoder_layers=1),
    "deep decoder": replace(SMALL, n_layers=1, n_decoder_layers=4),
    "unscaled": replace(SMALL, score=Score.unscaled),
    "biases": replace(SMALL, biases=True),
    "Marian's": replace(SMALL, start=Start.zeros, positions=Positions.marian),
    "biases, untied": replace(SMALL, biases=True, tie_embeddings=False, d_k=3, d_v=7),
    "all": replace(SMALL, norm=Norm.pre, tie_embeddings=False, positions=Positions.learned, d_k=3, d_v=7),
}
every_variant = pytest.mark.parametrize("config", list(VARIANTS.values()), ids=list(VARIANTS))


def counted(config: ModelConfig, vocab_size: VocabSize) -> int:
    with torch.device("meta"):
        model = Transformer(config, vocab_size)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("config", "expected"), [(BASE, 63_045_632), (BIG, 214_171_648)], ids=["base", "big"])
def test_parameters_at_37000_pieces(config: ModelConfig, expected: int) -> None:
    assert counted(config, 37_000) == expected
    assert cost.count_parameters(config, 37_000).total == expected


def test_parameters_of_two_vocabularies_hold_a_matrix_for_each() -> None:
    """As at 37,000 pieces, which 24,000 and 13,000 are together."""
    sizes = VocabSizes(source=24_000, target=13_000)
    assert cost.count_parameters(BASE, sizes).total == counted(BASE, sizes) == 63_045_632
    untied = replace(BASE, tie_embeddings=False)
    assert cost.count_parameters(untied, sizes).total == counted(untied, sizes) == 63_045_632 + 13_000 * 512


def test_step_flops_of_two_vocabularies_are_those_of_the_target() -> None:
    tokens: dict[str, Any] = {"source": 24, "target": 24, "mean_length": 8}
    assert cost.step_flops(SMALL, VocabSizes(7_000, 101), **tokens) == cost.step_flops(SMALL, 101, **tokens)


def test_parameters_of_a_deep_encoder_and_a_shallow_decoder() -> None:
    """37,000 rows of 512; twelve encoder layers of 3,150,336; one decoder layer of 4,199,936."""
    config = replace(BASE, n_layers=12, n_decoder_layers=1)
    assert cost.count_parameters(config, 37_000).total == counted(config, 37_000) == 60_947_968


def part_of(name: str) -> str:
    """The part that a parameter belongs to, by the name that a checkpoint gives it."""
    top, *below = name.split(".")
    if top in ("encoder_norm", "decoder_norm"):
        return f"{top.removesuffix('_norm')} norms"
    if top in ("encoder", "decoder"):
        module = below[1]
        return f"{top} norms" if module.endswith("_norm") else f"{top} {module}"
    if below == ["table"]:
        return "positions"
    return "output" if top in ("output", "output_bias") else "embeddings"


def counted_by_part(config: ModelConfig, vocab_size: VocabSize) -> Counter[str]:
    with torch.device("meta"):
        model = Transformer(config, vocab_size)
    counts = Counter[str]()
    for name, parameter in model.named_parameters():
        counts[part_of(name)] += parameter.numel()
    return counts


@every_variant
@pytest.mark.parametrize("score", Score, ids=lambda score: score.name)
@pytest.mark.parametrize("vocab_size", [101, VocabSizes(57, 101)], ids=["one vocabulary", "two"])
def test_count_parameters_is_what_the_model_has_in_each_part(
    config: ModelConfig, score: Score, vocab_size: VocabSize
) -> None:
    config = replace(config, score=score)
    ours = cost.count_parameters(config, vocab_size)
    by_part = {"embeddings": ours.embeddings, "positions": ours.positions, "output": ours.output}
    for name, stack in (("encoder", ours.encoder), ("decoder", ours.decoder)):
        by_part |= {
            f"{name} self_attention": stack.self_attention,
            f"{name} cross_attention": stack.cross_attention,
            f"{name} feed_forward": stack.feed_forward,
            f"{name} norms": stack.norms,
        }
        assert stack.total == sum(by_part[part] for part in by_part if part.startswith(f"{name} "))
    assert {part: count for part, count in by_part.items() if count} == counted_by_part(config, vocab_size)
    assert ours.total == counted(config, vocab_size)


def test_parameters_hold_a_vector_of_width_d_k_for_each_head_of_additive_attention() -> None:
    """Six layers of three attentions of eight heads of width 64."""
    assert cost.count_parameters(replace(BASE, score=Score.additive), 37_000).total == 63_045_632 + 18 * 8 * 64


@pytest.mark.parametrize(
    ("config", "millions"),
    [
        (BASE, 65),
        (replace(BASE, n_heads=1, d_k=512, d_v=512), 65),
        (replace(BASE, n_heads=4, d_k=128, d_v=128), 65),
        (replace(BASE, n_heads=16, d_k=32, d_v=32), 65),
        (replace(BASE, n_heads=32, d_k=16, d_v=16), 65),
        (replace(BASE, d_k=16), 58),
        (replace(BASE, d_k=32), 60),
        (replace(BASE, n_layers=2), 36),
        (replace(BASE, n_layers=4), 50),
        (replace(BASE, n_layers=8), 80),
        (replace(BASE, d_model=256, d_k=32, d_v=32), 28),
        (replace(BASE, d_model=1024, d_k=128, d_v=128), 168),
        (replace(BASE, d_ff=1024), 53),
        (replace(BASE, d_ff=4096), 90),
    ],
)
def test_parameters_of_table_3(config: ModelConfig, millions: int) -> None:
    """41,000 embedding rows reproduce every row within 1 %."""
    assert cost.count_parameters(config, 41_000).total / 1e6 == pytest.approx(millions, rel=0.01)


def test_parameters_of_table_3_big() -> None:
    assert cost.count_parameters(BIG, 41_000).total / 1e6 == pytest.approx(213, rel=0.025)


def flops_of_a_step(config: ModelConfig, vocab_size: int, rows: int, width: int) -> int:
    """What torch counts; the MATH backend, since the counter knows no fused attention on a CPU."""
    torch.manual_seed(0)
    model = Transformer(config, vocab_size)
    tokens, layout = torch.randint(4, vocab_size, (rows, width)), Padded.of([width] * rows, width)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, tokens, source_layout=layout, target_layout=layout).sum().backward()
    return counter.get_total_flops()


@every_variant
@pytest.mark.parametrize(("rows", "width"), [(3, 8), (2, 20)])
def test_step_flops_are_those_that_torch_counts(config: ModelConfig, rows: int, width: int) -> None:
    """Exact, once the half of the decoder's self-attention that the mask hides is added: torch multiplies it,
    the formula never counts masked positions. 6 = two FLOPs a multiply-add, times three for forward and backward."""
    tokens = rows * width
    ours = cost.step_flops(config, 101, source=tokens, target=tokens, mean_length=width)
    n_layers = config.n_decoder_layers or config.n_layers
    masked = 6 * n_layers * tokens * config.n_heads * (config.key_width + config.value_width) * width / 2
    assert ours + masked == pytest.approx(flops_of_a_step(config, 101, rows, width), rel=1e-12)


def test_step_flops_of_additive_attention_are_those_that_torch_counts() -> None:
    """A product of `tanh(q + k)` and its vector for each pair; the sums and tanh themselves are elementwise."""
    additive = replace(VARIANTS["all"], score=Score.additive)
    ours = cost.step_flops(additive, 101, source=24, target=24, mean_length=8)
    masked = 6 * 2 * 24 * 4 * (3 + 7) * 8 / 2  # two layers, 24 tokens, 4 heads, d_k 3 and d_v 7, 8 keys
    assert ours + masked == flops_of_a_step(additive, 101, 3, 8)


@pytest.mark.parametrize(("config", "expected"), [(BASE, 9.52e12), (BIG, 32.26e12)], ids=["base", "big"])
def test_step_flops_of_the_papers_models(config: ModelConfig, expected: float) -> None:
    flops = cost.step_flops(config, 37_000, source=25_000, target=25_000, mean_length=33)
    assert flops == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("config", "steps", "total"), [(BASE, 100_000, 9.5e17), (BIG, 300_000, 9.7e18)])
def test_step_flops_of_the_papers_runs(config: ModelConfig, steps: int, total: float) -> None:
    flops = cost.step_flops(config, 37_000, source=25_000, target=25_000, mean_length=33)
    assert steps * flops == pytest.approx(total, rel=0.02)


def test_step_flops_keep_source_and_target_apart() -> None:
    """A target token alone pays for the vocabulary and for reading the source."""
    with_more_source = cost.step_flops(BASE, 37_000, source=2_000, target=1_000, mean_length=20)
    with_more_target = cost.step_flops(BASE, 37_000, source=1_000, target=2_000, mean_length=20)
    neither = cost.step_flops(BASE, 37_000, source=1_000, target=1_000, mean_length=20)
    per_source, per_target = (with_more_source - neither) / 6_000, (with_more_target - neither) / 6_000
    d, inner = 512, 6 * 2 * 512 * 2048
    read = 6 * 2 * d * d  # W_k and W_v of the encoder-decoder attention: made once for each source token
    assert per_source == pytest.approx(6 * 4 * d * d + 6 * 20 * 2 * d + inner + read, rel=1e-12)
    assert per_target == pytest.approx(6 * 6 * d * d + 6 * 30 * 2 * d + inner + 37_000 * d, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA A10", 125),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla V100-PCIE-16GB", 112),
        ("Tesla T4", 65),
    ],
)
def test_peak_flops_of_a_known_device(name: str, tera: int) -> None:
    assert cost.peak_flops(name) == tera * 1e12


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090", "NVIDIA L40", "NVIDIA A10G", "AMD Instinct MI300X", ""])
def test_peak_flops_of_an_unknown_device_is_not_guessed(name: str) -> None:
    assert cost.peak_flops(name) is None


@pytest.mark.parametrize("name", ["NVIDIA RTX A1000 Laptop GPU", "NVIDIA T400 4GB"])
def test_peak_flops_knows_a_device_by_a_word_not_by_letters_inside_one(name: str) -> None:
    assert cost.peak_flops(name) is None
