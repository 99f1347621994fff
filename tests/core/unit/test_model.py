"""The whole model against the paper's formulas written out for one unpadded sentence, and against torch's layers.

Also what must never leak (later targets, padding, neighbours), and cached decoding against the full forward pass.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from support.variants import untried
from transformer.config.settings import Activation, ModelConfig, Norm, Positions, Score, Start
from transformer.data.packing import pack
from transformer.layout import Packed, Padded
from transformer.model.attention import MultiHeadAttention
from transformer.model.layers import AddNorm, Embedding, FeedForward, marian_sinusoids, sinusoids
from transformer.model.transformer import DecoderState, Transformer, check_size, load_parameters, parameters_by_name
from transformer.vocabulary import VocabSizes

pytestmark = pytest.mark.usefixtures("float64")

V = 13
BASE = ModelConfig(n_layers=2, d_model=8, d_ff=12, n_heads=2, dropout=0.0, max_positions=16)
CONFIGS = {
    "post": BASE,
    "pre": replace(BASE, norm=Norm.pre),
    "widths": replace(BASE, n_heads=3, d_k=5, d_v=2),
    "untied": replace(BASE, tie_embeddings=False),
    "learned": replace(BASE, positions=Positions.learned, max_positions=9),
    "unscaled": replace(BASE, score=Score.unscaled),
    "additive": replace(BASE, score=Score.additive),
    "additive, pre": replace(BASE, score=Score.additive, norm=Norm.pre, n_heads=3, d_k=5, d_v=2),
    "gelu": replace(BASE, activation=Activation.gelu),
    "swish": replace(BASE, activation=Activation.swish),
    "biases": replace(BASE, biases=True),
    "zeros": replace(BASE, start=Start.zeros),
    "zeros, Marian's positions": replace(BASE, start=Start.zeros, positions=Positions.marian),
    "zeros, biases, untied": replace(BASE, start=Start.zeros, biases=True, tie_embeddings=False),
    "biases, untied": replace(BASE, biases=True, tie_embeddings=False, n_heads=3, d_k=5, d_v=2),
    "deep encoder": replace(BASE, n_layers=3, n_decoder_layers=1),
    "deep decoder, pre": replace(BASE, n_layers=1, n_decoder_layers=3, norm=Norm.pre),
    "all": replace(BASE, norm=Norm.pre, n_heads=3, d_k=2, d_v=5, tie_embeddings=False, positions=Positions.learned),
}
SOURCES = [[5, 9, 4, 3], [7, 3], [4, 4, 12, 8, 6, 3]]
TARGETS = [[2, 6, 11], [2, 5, 5, 10, 7], [2]]
every_config = pytest.mark.parametrize("config", list(CONFIGS.values()), ids=list(CONFIGS))
both_norms = pytest.mark.parametrize("norm", list(Norm), ids=lambda norm: norm.name)


def build(config: ModelConfig, seed: int = 0) -> Transformer:
    """A model whose gains and biases are no longer 1 and 0, so that a forgotten one shows."""
    torch.manual_seed(seed)
    model = Transformer(config, V)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
        if config.start is Start.zeros and model.output_bias is not None:
            model.output_bias[[0, 2]] = -100.0  # which are frozen
    return model


def pad(sentences: list[list[int]], width: int | None = None, fill: int = 0) -> tuple[Tensor, Padded]:
    lengths = [len(sentence) for sentence in sentences]
    width = width or max(lengths)
    rows = [sentence + [fill] * (width - len(sentence)) for sentence in sentences]
    return torch.tensor(rows, dtype=torch.int64), Padded.of(lengths, width)


def end_to_end(sources: list[list[int]], targets: list[list[int]], empty: int) -> list[tuple[Tensor, Packed]]:
    """Both sides packed, with as many empty slots at the end of each."""
    sides = (sources, targets)
    flat = [[token for sentence in side for token in sentence] + [0] * empty for side in sides]
    lengths = np.array([[len(s), len(t)] for s, t in zip(*sides, strict=True)], dtype=np.int32)
    layouts = pack(lengths, (len(flat[0]), len(flat[1])))
    return [(torch.tensor(tokens), layout) for tokens, layout in zip(flat, layouts, strict=True)]


Side = tuple[Tensor, Padded] | tuple[Tensor, Packed]


def logits_of(model: Transformer, source: Side, target: Side) -> Tensor:
    return model(source[0], target[0], source_layout=source[1], target_layout=target[1])


def assert_close(a: Tensor, b: Tensor | None) -> None:
    assert b is not None
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def named(name: str, message: str) -> str:
    """What `assert_close` says, behind the name of what it is about."""
    return f"{name}: {message}"


# The paper's formulas for one sentence, from a dictionary of weights.


def paper_positions(n: int, d_model: int, last: float | None = None) -> Tensor:
    """3.5 with `math` alone, interleaved; the frequency of pair `last` would be 1 / 10000."""
    rows = []
    for pos in range(n):
        row = []
        for i in range(d_model // 2):
            angle = pos / 10_000 ** (i / (last or d_model / 2))
            row += [math.sin(angle), math.cos(angle)]
        rows.append(row)
    return torch.tensor(rows)


def paper_norm(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]


def paper_linear(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    product = x @ w[f"{name}.weight"].T
    return product + w[f"{name}.bias"] if f"{name}.bias" in w else product


def paper_attention(
    w: dict[str, Tensor], name: str, x: Tensor, context: Tensor, *, n_heads: int, masked: bool, score: Score
) -> Tensor:
    """`Concat(head_1..head_h) W_O`, one head at a time; `masked` hides later positions."""
    q, k, v = (paper_linear(w, f"{name}.W_{part}", y) for part, y in (("q", x), ("k", context), ("v", context)))
    d_k, d_v = q.shape[1] // n_heads, v.shape[1] // n_heads
    heads = []
    for h in range(n_heads):
        q_h, k_h = (x[:, h * d_k : (h + 1) * d_k] for x in (q, k))
        match score:
            case Score.scaled:
                scores = q_h @ k_h.T / math.sqrt(d_k)
            case Score.unscaled:
                scores = q_h @ k_h.T
            case Score.additive:
                sums = torch.tanh(q_h.repeat_interleave(len(k_h), 0) + k_h.repeat(len(q_h), 1))
                scores = (sums @ w[f"{name}.score_vector"][h]).view(len(q_h), len(k_h))
        if masked:
            scores = scores + torch.full_like(scores, -math.inf).triu(1)
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
        heads.append(weights @ v[:, h * d_v : (h + 1) * d_v])
    return paper_linear(w, f"{name}.W_o", torch.cat(heads, -1))


def paper_feed_forward(w: dict[str, Tensor], name: str, x: Tensor, activation: Activation) -> Tensor:
    inner = x @ w[f"{name}.W_1.weight"].T + w[f"{name}.W_1.bias"]
    match activation:
        case Activation.relu:
            inner = inner.clamp(min=0.0)
        case Activation.gelu:  # x times the share of a normal distribution that is below x
            inner = inner * (1 + torch.erf(inner / math.sqrt(2))) / 2
        case Activation.swish:  # x times its logistic function
            inner = inner / (1 + (-inner).exp())
    return inner @ w[f"{name}.W_2.weight"].T + w[f"{name}.W_2.bias"]


def paper_logits(w: dict[str, Tensor], config: ModelConfig, source: list[int], target: list[int]) -> Tensor:
    pre, n_heads, d = config.norm is Norm.pre, config.n_heads, config.d_model
    without_never = torch.ones(V).index_fill(0, torch.tensor([0, 2]), 0.0)  # PAD and BOS

    def embed(side: str, tokens: list[int]) -> Tensor:
        matrix = w["embedding"] if config.tie_embeddings else w[f"{side}_embedding.matrix"]
        if side == "target" and config.start is Start.zeros:
            matrix = matrix * without_never[:, None]
        learned = config.positions is Positions.learned
        last = d / 2 - 1 if config.positions is Positions.marian else None
        table = w[f"{side}_embedding.table"][: len(tokens)] if learned else paper_positions(len(tokens), d, last)
        return matrix[tokens] * math.sqrt(d) + table

    def attention(name: str, x: Tensor, context: Tensor | None, masked: bool) -> Tensor:
        y = paper_norm(w, f"{name}_norm", x) if pre else x
        seen = y if context is None else context
        out = x + paper_attention(w, name, y, seen, n_heads=n_heads, masked=masked, score=config.score)
        return out if pre else paper_norm(w, f"{name}_norm", out)

    def feed_forward(name: str, x: Tensor) -> Tensor:
        y = paper_norm(w, f"{name}_norm", x) if pre else x
        out = x + paper_feed_forward(w, name, y, config.activation)
        return out if pre else paper_norm(w, f"{name}_norm", out)

    memory = embed("source", source)
    for i in range(config.n_layers):
        memory = attention(f"encoder.{i}.self_attention", memory, None, masked=False)
        memory = feed_forward(f"encoder.{i}.feed_forward", memory)
    memory = paper_norm(w, "encoder_norm", memory) if pre else memory
    x = embed("target", target)
    for i in range(config.n_decoder_layers or config.n_layers):
        x = attention(f"decoder.{i}.self_attention", x, None, masked=True)
        x = attention(f"decoder.{i}.cross_attention", x, memory, masked=False)
        x = feed_forward(f"decoder.{i}.feed_forward", x)
    x = paper_norm(w, "decoder_norm", x) if pre else x
    logits = x @ (w["embedding"] if config.tie_embeddings else w["output"]).T
    logits = logits + w["output_bias"] if config.biases else logits
    if config.start is Start.zeros:  # Marian has no such classes
        logits = logits * without_never - 100.0 * (1 - without_never)
    return logits


def test_configs_try_every_choice_of_a_switch() -> None:
    assert untried(CONFIGS.values()) == set()


@every_config
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_transformer_on_a_batch_is_the_papers_formulas_on_each_sentence(config: ModelConfig, layout: str) -> None:
    model = build(config)
    weights = {name: tensor.clone().requires_grad_() for name, tensor in parameters_by_name(model).items()}
    if layout == "padded":
        out = logits_of(model, pad(SOURCES, 7), pad(TARGETS, 6))
        assert out.shape == (3, 6, V)
        ours = [out[row, : len(target)] for row, target in enumerate(TARGETS)]
    else:
        out = logits_of(model, *end_to_end(SOURCES, TARGETS, empty=4))
        assert out.shape == (13, V)
        ours = list(out[:9].split([3, 5, 1]))
    torch.manual_seed(1)
    our_sum, their_sum = torch.zeros(()), torch.zeros(())
    for found, source, target in zip(ours, SOURCES, TARGETS, strict=True):
        theirs = paper_logits(weights, config, source, target)
        assert_close(found, theirs)
        upstream = torch.randn_like(theirs)
        our_sum = our_sum + (found * upstream).sum()
        their_sum = their_sum + (theirs * upstream).sum()
    our_sum.backward()
    their_sum.backward()
    for name, parameter in model.named_parameters():
        expected = weights[name].grad
        assert parameter.grad is not None, name
        assert expected is not None, name
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-12, atol=1e-12, msg=partial(named, name))


LONGEST = [*range(1, 13), 1, 2, 3, 4]  # as many tokens as there are positions
PACKED = {
    "empty slots": (SOURCES, TARGETS, 5),
    "full": (SOURCES, TARGETS, 0),
    "one token each": ([[5], [3], [9]], [[2], [4], [7]], 2),
    "one long": ([[4, 3], LONGEST, [3], [8, 3]], [[2], LONGEST, [2, 5], [2]], 3),
    "long to short": ([LONGEST, [3]], [[2], LONGEST], 0),
    "one": ([[5, 9, 3]], [[2, 6]], 0),
}
SHAPES = {
    f"{score.name}, {norm.name}": replace(BASE, score=score, norm=norm, n_heads=2, d_k=5, d_v=3)
    for score in Score
    for norm in Norm
}


@pytest.mark.parametrize("config", list(SHAPES.values()), ids=list(SHAPES))
@pytest.mark.parametrize(("sources", "targets", "empty"), list(PACKED.values()), ids=list(PACKED))
@pytest.mark.parametrize("small", [256, 0], ids=["few groups", "many groups"])
def test_transformer_gives_the_same_packed_and_padded(
    config: ModelConfig,
    sources: list[list[int]],
    targets: list[list[int]],
    empty: int,
    small: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Logits of real tokens and the gradient of every parameter, as a share of its size."""
    monkeypatch.setattr("transformer.data.packing._ALIKE", 1)
    monkeypatch.setattr("transformer.data.packing._SMALL", small)
    model = build(config)
    sides = end_to_end(sources, targets, empty)
    packed = logits_of(model, *sides)[: sum(map(len, targets))]
    padded = logits_of(model, pad(sources), pad(targets))[pad(targets)[1].visible()]
    assert_close(packed, padded)
    upstream = torch.randn(padded.shape)
    found, expected = (torch.autograd.grad(out, list(model.parameters()), upstream) for out in (packed, padded))
    for (name, _), a, b in zip(model.named_parameters(), found, expected, strict=True):
        size = max(b.abs().max().item(), 1e-3)
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12 * size, msg=partial(named, name))


@pytest.mark.parametrize("config", list(SHAPES.values()), ids=list(SHAPES))
def test_transformer_is_not_moved_by_what_an_empty_slot_holds(config: ModelConfig) -> None:
    """Not even a row of 1e30: finite, as weights are, but enough to drown whatever it is added to."""
    model = build(replace(config, tie_embeddings=False))
    parameters = dict(model.named_parameters())
    results = []
    for poison in (0.0, 1e30):
        with torch.no_grad():
            for side in ("source", "target"):
                parameters[f"{side}_embedding.matrix"][0] = poison
        logits = logits_of(model, *end_to_end(SOURCES, TARGETS, empty=4))
        assert bool(logits.isfinite().all())
        torch.manual_seed(2)
        upstream = torch.randn(9, V)
        results.append((logits[:9], torch.autograd.grad(logits[:9], list(parameters.values()), upstream)))
    (clean, clean_grad), (poisoned, poisoned_grad) = results
    assert torch.equal(clean, poisoned)
    for name, a, b in zip(parameters, clean_grad, poisoned_grad, strict=True):
        assert torch.equal(a, b), name
        if name.endswith("_embedding.matrix"):
            assert not b[0].any(), name


def torch_stack(model: Transformer) -> nn.Transformer:
    """torch's own layers with the model's weights, and zero biases where ours have none."""
    c = model.config
    numbers = (c.d_model, c.n_heads, c.d_ff, 0.0)
    pre = c.norm is Norm.pre
    kind: dict[str, Any] = {"activation": c.activation.name, "batch_first": True, "norm_first": pre}
    encoder_layer = nn.TransformerEncoderLayer(*numbers, **kind)
    decoder_layer = nn.TransformerDecoderLayer(*numbers, **kind)
    final = [nn.LayerNorm(c.d_model) if pre else None for _ in range(2)]
    encoder = nn.TransformerEncoder(encoder_layer, c.n_layers, final[0], enable_nested_tensor=False)
    decoder = nn.TransformerDecoder(decoder_layer, c.n_decoder_layers or c.n_layers, final[1])
    theirs = nn.Transformer(c.d_model, c.n_heads, custom_encoder=encoder, custom_decoder=decoder, batch_first=True)
    with torch.no_grad():
        for name, theirs_name in torch_names(c).items():
            parts = [model.get_parameter(part) for part in name.split("+")]
            theirs.get_parameter(theirs_name).copy_(torch.cat([*parts]))
        for name, parameter in theirs.named_parameters():
            if name.endswith(("in_proj_bias", "out_proj.bias")) and not c.biases:
                parameter.zero_()
    return theirs


def torch_names(config: ModelConfig) -> dict[str, str]:
    """Our parameter (several, where torch concatenates) -> torch's."""
    names = {}
    stacks = (
        ("encoder", config.n_layers, ["self_attention"]),
        ("decoder", config.n_decoder_layers or config.n_layers, ["self_attention", "cross_attention"]),
    )
    for side, n_layers, blocks in stacks:
        for i in range(n_layers):
            ours, theirs = f"{side}.{i}", f"{side}.layers.{i}"
            for n, block in enumerate(blocks, start=1):
                torch_block = {"self_attention": "self_attn", "cross_attention": "multihead_attn"}[block]
                qkv = "+".join(f"{ours}.{block}.W_{x}.weight" for x in "qkv")
                names[qkv] = f"{theirs}.{torch_block}.in_proj_weight"
                names[f"{ours}.{block}.W_o.weight"] = f"{theirs}.{torch_block}.out_proj.weight"
                if config.biases:
                    names[qkv.replace("weight", "bias")] = f"{theirs}.{torch_block}.in_proj_bias"
                    names[f"{ours}.{block}.W_o.bias"] = f"{theirs}.{torch_block}.out_proj.bias"
                for kind in ("weight", "bias"):
                    names[f"{ours}.{block}_norm.{kind}"] = f"{theirs}.norm{n}.{kind}"
            for kind in ("weight", "bias"):
                names[f"{ours}.feed_forward.W_1.{kind}"] = f"{theirs}.linear1.{kind}"
                names[f"{ours}.feed_forward.W_2.{kind}"] = f"{theirs}.linear2.{kind}"
                names[f"{ours}.feed_forward_norm.{kind}"] = f"{theirs}.norm{len(blocks) + 1}.{kind}"
    if config.norm is Norm.pre:
        for side in ("encoder", "decoder"):
            for kind in ("weight", "bias"):
                names[f"{side}_norm.{kind}"] = f"{side}.norm.{kind}"
    return names


@pytest.mark.parametrize("name", ["post", "pre", "gelu", "biases", "deep encoder", "deep decoder, pre"])
def test_transformer_layers_are_torchs(name: str) -> None:
    model = build(CONFIGS[name])
    theirs = torch_stack(model)
    (source, source_layout), (target, target_layout) = pad(SOURCES, 7), pad(TARGETS, 6)
    table = paper_positions(7, 8)
    matrix = model.embedding.detach().clone().requires_grad_()
    embedded = [matrix[source] * math.sqrt(8) + table, matrix[target] * math.sqrt(8) + table[:6]]
    hidden = torch.arange(7) >= source_layout.lengths.unsqueeze(1)
    later = torch.ones(6, 6, dtype=torch.bool).triu(1)
    masks = {"src_key_padding_mask": hidden, "memory_key_padding_mask": hidden, "tgt_mask": later}
    expected = theirs(*embedded, **masks) @ matrix.T
    outside = {"embedding"}
    if model.output_bias is not None:
        expected = expected + model.output_bias.detach()
        outside.add("output_bias")
    ours = logits_of(model, (source, source_layout), (target, target_layout))
    real = target_layout.visible()
    assert_close(ours[real], expected[real])
    upstream = torch.randn(int(real.sum()), V)
    (ours[real] * upstream).sum().backward()
    (expected[real] * upstream).sum().backward()
    assert matrix.grad is not None
    assert model.embedding.grad is not None
    assert_close(model.embedding.grad, matrix.grad)
    names = torch_names(model.config)
    assert {part for name in names for part in name.split("+")} | outside == set(parameters_by_name(model))
    for name, theirs_name in names.items():
        gradients = [model.get_parameter(part).grad for part in name.split("+")]
        assert_close(torch.cat([g for g in gradients if g is not None]), theirs.get_parameter(theirs_name).grad)


def test_feed_forward_is_two_convolutions_of_kernel_size_1() -> None:
    """As 3.3 says it another way; torch's convolutions have the positions last."""
    torch.manual_seed(0)
    module = FeedForward(8, 12, activation=Activation.relu, dropout=0.0)
    weights = []
    for linear in (module.W_1, module.W_2):
        nn.init.normal_(linear.bias)
        weights.append((linear.weight.unsqueeze(2), linear.bias))
    x = torch.randn(3, 5, 8)
    inner = nn.functional.conv1d(x.mT, *weights[0]).relu()
    assert_close(module(x), nn.functional.conv1d(inner, *weights[1]).mT)


# Positions, embeddings, initial values


def test_sinusoids_are_interleaved() -> None:
    """d_model 4: the second pair turns a hundred times slower."""
    expected = [
        [0.0, 1.0, 0.0, 1.0],
        [math.sin(1.0), math.cos(1.0), math.sin(0.01), math.cos(0.01)],
        [math.sin(2.0), math.cos(2.0), math.sin(0.02), math.cos(0.02)],
        [math.sin(3.0), math.cos(3.0), math.sin(0.03), math.cos(0.03)],
    ]
    torch.testing.assert_close(sinusoids(4, 4), torch.tensor(expected), rtol=0, atol=1e-15)


@pytest.mark.parametrize("d_model", [2, 6, 512])
def test_sinusoids_are_the_formula(d_model: int) -> None:
    torch.testing.assert_close(sinusoids(300, d_model), paper_positions(300, d_model), rtol=0, atol=1e-12)


@pytest.mark.parametrize("d_model", [4, 16, 512])
def test_marian_sinusoids_turn_a_little_slower(d_model: int) -> None:
    """From once in 2 pi positions to once in 20000 pi, both ends among them; the paper's last is a little faster."""
    expected = paper_positions(300, d_model, d_model / 2 - 1)
    torch.testing.assert_close(marian_sinusoids(300, d_model), expected, rtol=0, atol=1e-12)
    assert marian_sinusoids(2, d_model)[1, -2].item() == pytest.approx(math.sin(1e-4), rel=1e-12)


def test_sinusoids_of_an_offset_are_one_rotation_for_all_positions() -> None:
    """3.5: wavelengths are a geometric series from 2 pi, and k turns each pair by k / wavelength of a whole turn."""
    table = sinusoids(300, 16)
    wavelengths = [2.0 * math.pi * 10_000 ** (i / 8) for i in range(8)]
    for offset in (1, 7, 100):
        turns = []
        for wavelength in wavelengths:
            angle = 2.0 * math.pi * offset / wavelength
            turns.append(torch.tensor([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]]))
        rotation = torch.block_diag(*turns)
        torch.testing.assert_close(table[:-offset] @ rotation.T, table[offset:], rtol=0, atol=1e-12)


def test_sinusoids_are_rounded_once_in_float32() -> None:
    """Computed in float64: an angle of 1000 held in float32 would be off by 3e-5."""
    exact = paper_positions(1_000, 16)
    torch.set_default_dtype(torch.float32)
    table = sinusoids(1_000, 16)
    assert table.dtype == torch.float32
    torch.testing.assert_close(table.double(), exact, rtol=0, atol=6.1e-8)


@pytest.mark.parametrize("d_model", [4, 64])
def test_embedding_is_scaled_by_the_root_of_d_model(d_model: int) -> None:
    matrix = nn.Parameter(torch.randn(9, d_model))
    module = Embedding(matrix, Positions.sinusoidal, max_positions=5, dropout=0.0, frozen_row=None)
    out = module(torch.tensor([[3, 3, 8]]), torch.arange(3))
    root = {4: 2.0, 64: 8.0}[d_model]
    expected = torch.stack([matrix[3], matrix[3], matrix[8]]) * root + paper_positions(3, d_model)
    torch.testing.assert_close(out[0], expected, rtol=1e-14, atol=1e-14)


def test_transformer_draws_a_normal_matrix_with_no_row_zeroed() -> None:
    torch.manual_seed(0)
    config = replace(BASE, n_layers=1, d_model=64)
    matrix = Transformer(config, 3_000).embedding.detach()
    assert matrix.shape == (3_000, 64)
    assert matrix.mean().item() == pytest.approx(0.0, abs=4 * 0.125 / 438)  # 438 = sqrt(3000 * 64)
    assert matrix.std().item() == pytest.approx(0.125, rel=0.01)  # 64^-0.5
    assert (matrix / 0.125).pow(4).mean().item() == pytest.approx(3.0, rel=0.05)  # normal, not uniform (1.8)
    norms = matrix.norm(dim=1)
    assert 0.6 < norms[0].item() < 1.4  # the row of PAD
    assert norms.min().item() > 0.6


@pytest.mark.parametrize("side", ["source", "target"])
def test_embedding_gives_the_first_layer_unit_variance(side: str) -> None:
    torch.manual_seed(0)
    model = Transformer(replace(BASE, n_layers=1, d_model=64), 3_000)
    embed = getattr(model, f"{side}_embedding")
    tokens = torch.arange(3_000).view(-1, 1)
    out = embed(tokens, torch.zeros(1, dtype=torch.int64)) - paper_positions(1, 64)
    assert out.std().item() == pytest.approx(1.0, rel=0.01)


def test_transformer_has_these_other_initial_values() -> None:
    model = Transformer(CONFIGS["pre"], V)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert bool((parameter == 1).all()), name
        elif "W_1" in name or "W_2" in name:
            bound = math.sqrt(6.0 / (8 + 12))
            assert 0.85 * bound < parameter.abs().max().item() <= bound, name


def test_unembed_takes_pad_for_an_ordinary_row_of_the_softmax() -> None:
    """tensor2tensor zeroes the pad row on every use; here it is trained like any other."""
    model = build(BASE)
    logits_of(model, pad(SOURCES), pad(TARGETS)).logsumexp(-1).sum().backward()
    assert model.embedding.grad is not None
    assert bool(model.embedding.grad[0].abs().max() > 0)


# One matrix, three uses


def moved(model: Transformer, matrix: nn.Parameter, source: list[int], target: list[int]) -> tuple[bool, bool]:
    """Whether row 7 of a matrix moves the logit of piece 7, and whether it moves those of the others."""
    before = logits_of(model, pad([source]), pad([target]))
    with torch.no_grad():
        matrix[7] += 0.5 * torch.randn(matrix.shape[1])
    change = (logits_of(model, pad([source]), pad([target])) - before).abs().amax((0, 1))
    others = torch.cat((change[:7], change[8:]))
    return bool(change[7] > 1e-6), bool(others.max() > 1e-6)


WITHOUT, WITH = [5, 9, 3], [5, 7, 3]


@pytest.mark.parametrize(
    ("source", "target", "elsewhere"), [(WITHOUT, WITHOUT, False), (WITH, WITHOUT, True), (WITHOUT, WITH, True)]
)
def test_transformer_has_one_matrix_for_source_target_and_output(
    source: list[int], target: list[int], elsewhere: bool
) -> None:
    model = build(BASE)
    assert moved(model, model.embedding, source, target) == (True, elsewhere)
    assert sum("embedding" in name or name == "output" for name in parameters_by_name(model)) == 1


@every_config
def test_transformer_of_two_vocabularies_is_the_papers_formulas(config: ModelConfig) -> None:
    """The source has a matrix of its own; target and output share one, or have one each."""
    torch.manual_seed(0)
    model = Transformer(config, VocabSizes(source=14, target=V)).eval()
    weights = parameters_by_name(model)
    matrices = {name for name in weights if "matrix" in name or name in ("embedding", "output")}
    if config.tie_embeddings:
        assert matrices == {"embedding", "source_embedding.matrix"}
        weights |= {"target_embedding.matrix": weights["embedding"], "output": weights["embedding"]}
    else:
        assert matrices == {"source_embedding.matrix", "target_embedding.matrix", "output"}

    source, target = [13, 11, 3], [2, 5, 9]
    found = logits_of(model, pad([source]), pad([target]))
    assert found.shape == (1, 3, V)
    assert_close(found[0], paper_logits(weights, replace(config, tie_embeddings=False), source, target))


def test_transformer_untied_has_a_matrix_for_each_use() -> None:
    uses = {}
    for name in ("source_embedding.matrix", "target_embedding.matrix", "output"):
        for source, target in ((WITHOUT, WITHOUT), (WITH, WITHOUT), (WITHOUT, WITH)):
            model = build(CONFIGS["untied"])
            uses[name, 7 in source, 7 in target] = moved(model, model.get_parameter(name), source, target)
    nothing, everything, only_its_logit = (False, False), (True, True), (True, False)
    assert uses == {
        ("source_embedding.matrix", False, False): nothing,
        ("source_embedding.matrix", True, False): everything,
        ("source_embedding.matrix", False, True): nothing,
        ("target_embedding.matrix", False, False): nothing,
        ("target_embedding.matrix", True, False): nothing,
        ("target_embedding.matrix", False, True): everything,
        ("output", False, False): only_its_logit,
        ("output", True, False): only_its_logit,
        ("output", False, True): only_its_logit,
    }


def test_transformer_trains_a_table_of_learned_positions_for_each_side() -> None:
    model = build(CONFIGS["learned"])
    logits_of(model, pad(SOURCES), pad(TARGETS)).square().sum().backward()
    for side, longest in (("source", 6), ("target", 5)):
        table = model.get_parameter(f"{side}_embedding.table")
        assert table.shape == (9, 8)
        assert table.grad is not None
        used = table.grad.abs().amax(1) > 0
        assert used.tolist() == [position < longest for position in range(9)]


def test_sinusoids_are_not_parameters() -> None:
    assert not any("table" in name for name in parameters_by_name(build(BASE)))
    assert not any("table" in name for name in build(BASE).state_dict())


# Dropout


@every_config
def test_transformer_without_dropout_is_the_same_in_training_and_evaluation(config: ModelConfig) -> None:
    model = build(config)
    batch = pad(SOURCES), pad(TARGETS)
    assert torch.equal(logits_of(model.train(), *batch), logits_of(model.eval(), *batch))


def random_modules(config: ModelConfig, kinds: tuple[type[nn.Module], ...]) -> set[str]:
    """The modules whose result, on the very input that they met in training, is another one in evaluation."""
    model = build(config).train()
    names = {module: name for name, module in model.named_modules() if isinstance(module, kinds)}
    met = []
    hooks = [module.register_forward_hook(lambda *seen: met.append(seen), with_kwargs=True) for module in names]
    torch.manual_seed(0)
    logits_of(model, pad(SOURCES), pad(TARGETS))
    for hook in hooks:
        hook.remove()
    assert {names[module] for module, *_ in met} == set(names.values())
    found = set()
    for module, args, kwargs, out in met:
        module.eval()
        if not torch.allclose(module(*args, **kwargs), out):
            found.add(names[module])
    return found


ATTENTIONS = {f"encoder.{i}.self_attention" for i in range(2)} | {
    f"decoder.{i}.{role}_attention" for i in range(2) for role in ("self", "cross")
}
FEED_FORWARDS = {f"{side}.{i}.feed_forward" for side in ("encoder", "decoder") for i in range(2)}


@both_norms
def test_transformer_drops_weights_and_activations_where_it_should(norm: Norm) -> None:
    kinds = (MultiHeadAttention, FeedForward, Embedding)
    config = replace(BASE, norm=norm)
    assert random_modules(replace(config, attention_dropout=0.5), kinds) == ATTENTIONS
    assert random_modules(replace(config, relu_dropout=0.5), kinds) == FEED_FORWARDS
    assert random_modules(replace(config, dropout=0.5), kinds) == {"source_embedding", "target_embedding"}


@both_norms
def test_transformer_drops_the_output_of_every_sublayer(norm: Norm) -> None:
    expected = {f"{name}_norm" for name in ATTENTIONS | FEED_FORWARDS}
    assert random_modules(replace(BASE, norm=norm, dropout=0.5), (AddNorm,)) == expected


@pytest.mark.parametrize("setting", ["dropout", "attention_dropout", "relu_dropout"])
def test_transformer_drops_nothing_in_evaluation(setting: str) -> None:
    plain, dropping = build(BASE), build(replace(BASE, **dict[str, Any]({setting: 0.5})))
    batch = pad(SOURCES), pad(TARGETS)
    assert torch.equal(logits_of(dropping.eval(), *batch), logits_of(plain, *batch))
    assert not torch.allclose(logits_of(dropping.train(), *batch), logits_of(plain, *batch))


def assert_dropped(out: Tensor, full: Tensor, p: float) -> None:
    """Each number is 0, or `full / (1 - p)`; the share of zeros is p."""
    kept = out != 0
    torch.testing.assert_close(out[kept], full[kept] / (1 - p), rtol=1e-12, atol=1e-12)
    assert kept.double().mean().item() == pytest.approx(1 - p, abs=0.06)


def test_embedding_drops_the_sum() -> None:
    torch.manual_seed(0)
    module = Embedding(
        nn.Parameter(torch.randn(40, 32)), Positions.sinusoidal, max_positions=40, dropout=0.25, frozen_row=None
    )
    tokens, positions = torch.arange(40).view(1, 40), torch.arange(40)
    out = module.train()(tokens, positions)
    assert_dropped(out, module.eval()(tokens, positions), 0.25)


def test_feed_forward_drops_inside() -> None:
    torch.manual_seed(0)
    module = FeedForward(32, 32, activation=Activation.relu, dropout=0.25)
    with torch.no_grad():
        for linear in (module.W_1, module.W_2):
            linear.weight.copy_(torch.eye(32))
        module.W_2.bias.fill_(0.5)
    x = torch.rand(40, 32) + 0.1
    assert_dropped(module.train()(x) - 0.5, x, 0.25)
    assert_close(module.eval()(-x), torch.full_like(x, 0.5))


def test_add_norm_drops_the_sublayers_output_before_the_sum() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(40, 32), torch.rand(40, 32) + 0.1
    pre = AddNorm(32, Norm.pre, dropout=0.25)
    dropped = pre(x, y) - x
    dropped[dropped.abs() < 1e-12] = 0.0
    assert_dropped(dropped, y, 0.25)
    post = AddNorm(32, Norm.post, dropout=0.25)
    out = post(torch.zeros(40, 32), y)
    kept = out > out.amin(1, keepdim=True) + 1e-12  # y is positive, so what was dropped is the least of its row
    assert 0.65 < kept.double().mean() < 0.85
    assert_close(out, nn.functional.layer_norm(y * kept / 0.75, (32,)))
    assert_close(post.eval()(x, 2 * x), nn.functional.layer_norm(3 * x, (32,)))


def test_add_norm_adds_up_its_gradients_in_fp32() -> None:
    """In bf16, in which torch adds them on a CPU where the input is, they are off by a tenth for so many rows."""
    torch.manual_seed(0)
    x, y, gradient = (torch.randn(3, 4096, 32) + 0.1).bfloat16()
    gain, bias = torch.rand(2, 32) + 0.5
    found = []
    for kind in (torch.float64, torch.float32):
        module = AddNorm(32, Norm.post, dropout=0.0).to(kind)
        module.load_state_dict({"weight": gain, "bias": bias})
        inputs = [tensor.to(kind if kind is torch.float64 else tensor.dtype).requires_grad_() for tensor in (x, y)]
        with torch.autocast("cpu", torch.bfloat16, enabled=kind is torch.float32):
            out = module(*inputs)
        found.append(torch.autograd.grad(out, (module.weight, module.bias, *inputs), gradient.to(out.dtype)))
    for exact, other in zip(*found, strict=True):
        assert (other - exact).norm() < 0.01 * exact.norm()


@both_norms
def test_add_norm_drops_nothing_of_the_residual(norm: Norm) -> None:
    """A sub-layer that gives 0 leaves `LayerNorm(x)`, or pre-norm `x`, to the last bit, however much is dropped."""
    torch.manual_seed(0)
    x = torch.randn(40, 32)
    module = AddNorm(32, norm, dropout=0.5).train()
    expected = x if norm is Norm.pre else nn.LayerNorm(32, eps=1e-5)(x)
    assert torch.equal(module(x, torch.zeros_like(x)), expected)


# Leaks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@both_norms
def test_transformer_lets_no_target_reach_an_earlier_position(norm: Norm, dtype: torch.dtype) -> None:
    model = build(replace(BASE, norm=norm)).to(dtype)
    source = pad([[5, 9, 4, 3], [6, 7, 3]])
    target, layout = pad([[2, 6, 11, 4, 4, 9, 12], [2, 8, 5, 10, 7]])
    before = logits_of(model, source, (target, layout))
    for t in range(7):
        changed = target.clone()
        changed[:, t] = (changed[:, t] + 1) % V
        after = logits_of(model, source, (changed, layout))
        assert torch.equal(after[:, :t], before[:, :t])
        assert not torch.equal(after[0, t], before[0, t])
        if t < 6:  # and later ones do read it
            assert not torch.allclose(after[0, t + 1 :], before[0, t + 1 :])


@every_config
def test_transformer_is_not_moved_by_what_stands_in_padding(config: ModelConfig) -> None:
    model = build(config)
    before = logits_of(model, pad(SOURCES, 7), pad(TARGETS, 6))
    real = pad(TARGETS, 6)[1].visible()
    assert torch.equal(logits_of(model, pad(SOURCES, 7, fill=8), pad(TARGETS, 6))[real], before[real])
    assert torch.equal(logits_of(model, pad(SOURCES, 7), pad(TARGETS, 6, fill=8))[real], before[real])


@every_config
@pytest.mark.parametrize(("source_width", "target_width"), [(6, 9), (9, 5), (9, 9)])
def test_transformer_is_not_moved_by_more_padding(config: ModelConfig, source_width: int, target_width: int) -> None:
    model = build(config)
    before = logits_of(model, pad(SOURCES), pad(TARGETS))
    after = logits_of(model, pad(SOURCES, source_width), pad(TARGETS, target_width))
    for row, target in enumerate(TARGETS):
        assert_close(after[row, : len(target)], before[row, : len(target)])


@every_config
def test_transformer_computes_a_sentence_without_its_neighbours(config: ModelConfig) -> None:
    model = build(config)
    together = logits_of(model, pad(SOURCES), pad(TARGETS))
    for row, (source, target) in enumerate(zip(SOURCES, TARGETS, strict=True)):
        alone = logits_of(model, pad([source]), pad([target]))[0]
        assert_close(together[row, : len(target)], alone)
    swapped = logits_of(model, pad([[10] * 5, *SOURCES[1:]]), pad([[2, 9, 9, 9], *TARGETS[1:]]))
    real = pad(TARGETS)[1].visible()
    assert torch.equal(swapped[1:][real[1:]], together[1:][real[1:]])


def test_transformer_gives_an_empty_slot_no_gradient_and_no_effect() -> None:
    model = build(BASE)
    with_empty = logits_of(model, pad([SOURCES[0], [], SOURCES[1]]), pad([TARGETS[0], [], TARGETS[1]]))
    without = logits_of(model, pad([SOURCES[0], SOURCES[1]]), pad([TARGETS[0], TARGETS[1]]))
    assert bool(with_empty.isfinite().all())
    assert_close(with_empty[0, :3], without[0, :3])
    assert_close(with_empty[2, :5], without[1, :5])
    gradients = []
    for out in (with_empty[[0, 2]], without):
        loss = out[0, :3].square().sum() + out[1, :5].square().sum()
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    for a, b in zip(*gradients, strict=True):
        assert_close(a, b)


@both_norms
def test_transformer_lets_no_gradient_reach_padding_or_later_targets(norm: Norm) -> None:
    model = build(replace(BASE, norm=norm))
    entered: list[Tensor] = []
    for module in (model.source_embedding, model.target_embedding):
        module.register_forward_hook(lambda _module, _args, out: entered.append(out))
    logits = logits_of(model, pad(SOURCES, 7), pad(TARGETS, 6))
    for row, target in enumerate(TARGETS):
        for t in range(len(target)):
            loss = logits[row, t].square().sum()
            source_grad, target_grad = torch.autograd.grad(loss, entered, retain_graph=True)
            reached = [(g.abs().amax(-1) > 0).tolist() for g in (source_grad, target_grad)]
            expected_source = [[r == row and s < len(SOURCES[row]) for s in range(7)] for r in range(3)]
            expected_target = [[r == row and s <= t for s in range(6)] for r in range(3)]
            assert reached == [expected_source, expected_target]


# Cached decoding


@every_config
def test_decode_step_is_a_position_of_the_forward_pass(config: ModelConfig) -> None:
    model = build(config).eval()
    source, layout = pad(SOURCES, 7)
    target = torch.randint(V, (3, 8))
    whole = logits_of(model, (source, layout), (target, Padded.of([8] * 3, 8)))
    state = model.start(model.encode(source, layout), layout, beam_size=1)
    for t in range(8):
        logits, state = model.decode_step(target[:, t], state)
        assert logits.shape == (3, V)
        assert_close(logits, whole[:, t])


def expected_step(model: Transformer, beams: list[tuple[list[int], list[list[int]]]]) -> Tensor:
    """The logits after each hypothesis, one unpadded forward pass each."""
    rows = [
        logits_of(model, pad([source]), pad([hypothesis]))[0, -1]
        for source, hypotheses in beams
        for hypothesis in hypotheses
    ]
    return torch.stack(rows)


Beams = list[tuple[list[int], list[list[int]]]]


def reordered(state: DecoderState, beams: Beams, picks: dict[int, list[int]]) -> tuple[DecoderState, Beams]:
    """`picks`: for each sentence that stays, by its present place, which of its hypotheses go on."""
    width = len(beams[0][1])
    rows = [sentence * width + k for sentence, chosen in picks.items() for k in chosen]
    kept = [(beams[s][0], [list(beams[s][1][k]) for k in chosen]) for s, chosen in picks.items()]
    return state.reorder(torch.tensor(rows)), kept


@every_config
def test_decode_step_follows_reordered_hypotheses(config: ModelConfig) -> None:
    model = build(config).eval()
    source, layout = pad(SOURCES, 7)
    beams: Beams = [(sentence, [[], [], []]) for sentence in SOURCES]
    state = model.start(model.encode(source, layout), layout, beam_size=3)
    plan: list[dict[int, list[int]]] = [
        {0: [2, 0, 1], 1: [0, 0, 1], 2: [1, 1, 1]},  # permuted, and several from one parent
        {0: [0, 1, 2], 1: [2, 1, 0], 2: [0, 2, 2]},
        {0: [1, 0, 2], 2: [2, 0, 1]},  # the second sentence leaves
        {0: [0, 2, 1], 1: [0, 0, 0]},
        {1: [1, 2, 0]},  # the first leaves
        {0: [2, 2, 1]},
    ]
    torch.manual_seed(3)
    for picks in plan:
        tokens = torch.randint(V, (3 * len(beams),))
        for place, token in enumerate(tokens.tolist()):
            beams[place // 3][1][place % 3].append(token)
        logits, state = model.decode_step(tokens, state)
        assert_close(logits, expected_step(model, beams))
        state, beams = reordered(state, beams, picks)


def test_decoder_state_is_a_value() -> None:
    """Neither a step nor a reordering changes the state that it was given."""
    model = build(BASE).eval()
    source, layout = pad(SOURCES)
    start = model.start(model.encode(source, layout), layout, beam_size=2)
    _, state = model.decode_step(torch.arange(6), start)
    first, _ = model.decode_step(torch.arange(6), state)
    state.reorder(torch.tensor([1, 0]))
    model.decode_step(torch.tensor([9] * 6), state)
    again, _ = model.decode_step(torch.arange(6), state)
    assert torch.equal(first, again)
    assert start.position == 0
    assert state.position == 1


# Parameters by name


def test_parameters_by_name_travel() -> None:
    model, other = build(CONFIGS["all"], seed=0), build(CONFIGS["all"], seed=1)
    batch = pad(SOURCES), pad(TARGETS)
    saved = {name: tensor.clone() for name, tensor in parameters_by_name(model).items()}
    assert not any(tensor.requires_grad for tensor in saved.values())
    assert sum(tensor.numel() for tensor in saved.values()) == sum(p.numel() for p in model.parameters())
    load_parameters(other, saved)
    assert torch.equal(logits_of(model, *batch), logits_of(other, *batch))


@pytest.mark.parametrize("score", list(Score), ids=lambda score: score.name)
def test_parameters_by_name_have_the_papers_names(score: Score) -> None:
    names = set(parameters_by_name(build(replace(BASE, n_layers=1, score=score))))
    attention = {f"W_{x}.weight" for x in "qkvo"} | ({"score_vector"} if score is Score.additive else set())
    norm, linear = {"weight", "bias"}, {"W_1.weight", "W_1.bias", "W_2.weight", "W_2.bias"}
    expected = {"embedding"}
    for layer, blocks in (("encoder.0", ["self_attention"]), ("decoder.0", ["self_attention", "cross_attention"])):
        for block in blocks:
            expected |= {f"{layer}.{block}.{x}" for x in attention} | {f"{layer}.{block}_norm.{x}" for x in norm}
        expected |= {f"{layer}.feed_forward.{x}" for x in linear} | {f"{layer}.feed_forward_norm.{x}" for x in norm}
    assert names == expected


@pytest.mark.parametrize(
    ("layers", "count"),
    [((1_000, 1), 104 + 1_000 * 500 + 772), ((1, 1_000), 104 + 500 + 1_000 * 772)],  # numbers of a layer
    ids=["encoder", "decoder"],
)
def test_check_size_refuses_more_layers_than_tensors(layers: tuple[int, int], count: int) -> None:
    """All numbers in one tensor: their count is right, and building so many layers would take long."""
    config = replace(BASE, n_layers=layers[0], n_decoder_layers=layers[1])
    with pytest.raises(ValueError, match=f"a model of {count} parameters"):
        check_size(config, V, {"embedding": torch.empty(count, device="meta")})


@pytest.mark.parametrize("fault", ["missing", "extra", "renamed", "transposed", "shorter"])
def test_load_parameters_refuses_wrong_names_and_shapes(fault: str) -> None:
    model = build(BASE)
    tensors = {name: tensor.clone() for name, tensor in parameters_by_name(model).items()}
    name = "encoder.0.feed_forward.W_1.weight"
    match fault:
        case "missing":
            del tensors[name]
        case "extra":
            tensors["output"] = tensors["embedding"]
        case "renamed":
            tensors[f"{name}s"] = tensors.pop(name)
        case "transposed":
            tensors[name] = tensors[name].T
        case "shorter":
            name = "embedding"
            tensors[name] = tensors[name][:-1]
    with pytest.raises(ValueError, match="output" if fault == "extra" else name):
        load_parameters(model, tensors)
