"""A model made ready for inference computes what the model computes."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import transformer.kernels.linear as linear_module
from transformer.compute import autocast
from transformer.config.settings import ModelConfig, Norm, Precision, Score, Start
from transformer.kernels.linear import InferenceLinear, prepare_weight
from transformer.layout import Padded
from transformer.model import inference
from transformer.model.attention import MultiHeadAttention
from transformer.model.inference import InferenceNorm, for_inference
from transformer.model.layers import AddNorm
from transformer.model.transformer import Transformer

CPU = torch.device("cpu")
CONFIG = ModelConfig(n_layers=2, d_model=32, d_ff=64, n_heads=4, max_positions=20)
CONFIGS = {
    "base": CONFIG,
    "pre": replace(CONFIG, norm=Norm.pre),
    "additive": replace(CONFIG, score=Score.additive),
    "untied": replace(CONFIG, tie_embeddings=False),
    "zeros": replace(CONFIG, start=Start.zeros),
}


DTYPES = {Precision.fp32: torch.float32, Precision.bf16: torch.bfloat16}


def can_pack(precision: Precision) -> bool:
    """Whether oneDNN is there, and multiplies in this type on this processor."""
    if not torch.backends.mkldnn.is_available():
        return False
    return precision is Precision.fp32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def logits_of(model: Transformer) -> Tensor:
    """Of eight steps of two hypotheses each, which change places half-way."""
    torch.manual_seed(2)
    layout = Padded.of([7, 4, 6], 7)
    memory = model.encode(torch.randint(4, 50, (3, 7)), layout)
    state = model.start(memory, layout, beam_size=2)

    found = []
    for step in range(8):
        logits, state = model.decode_step(torch.randint(4, 50, (6,)), state)
        found.append(logits)
        if step == 3:
            state = state.reorder(torch.tensor([1, 1, 3, 2, 4, 4]))
    return torch.stack(found)


@pytest.mark.parametrize("precision", [Precision.fp64, Precision.fp32, Precision.bf16], ids=lambda p: p.name)
@pytest.mark.parametrize("config", list(CONFIGS.values()), ids=list(CONFIGS))
def test_for_inference_computes_what_the_model_does(config: ModelConfig, precision: Precision) -> None:
    torch.manual_seed(1)
    model = Transformer(config, 50).eval()
    if precision is Precision.fp64:
        model = model.double()

    with torch.no_grad(), autocast(CPU, precision):
        expected = logits_of(model)
        found = logits_of(for_inference(model))

    tolerance = {Precision.fp64: 1e-12, Precision.fp32: 1e-5, Precision.bf16: 0.05}[precision]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert found.dtype is expected.dtype


@pytest.mark.parametrize("config", list(CONFIGS.values()), ids=list(CONFIGS))
def test_for_inference_computes_what_the_model_does_with_the_norms_of_a_gpu(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, "_casts_norms", lambda device: True)
    torch.manual_seed(1)
    model = Transformer(config, 50).eval()
    with torch.no_grad(), autocast(CPU, Precision.bf16):
        ready = for_inference(model)
        assert any(isinstance(module, InferenceNorm) for module in ready.modules()) is (config.norm is Norm.post)
        torch.testing.assert_close(logits_of(ready), logits_of(model), atol=0.05, rtol=0.05)


def test_for_inference_leaves_the_model_as_it_was() -> None:
    model = Transformer(CONFIG, 50).train()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with torch.no_grad(), autocast(CPU, Precision.bf16):
        ready = for_inference(model)

    assert model.training
    assert not ready.training
    assert isinstance(model.output, nn.Parameter)
    assert [type(module) for module in model.modules() if isinstance(module, InferenceLinear)] == []
    assert before.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


def test_for_inference_copies_no_weight_that_it_neither_casts_nor_packs() -> None:
    model = Transformer(CONFIG, 50).double()
    ready = for_inference(model)
    assert ready.source_embedding.matrix is model.embedding
    assert ready.source_embedding.table is model.source_embedding.table
    assert ready.output.data_ptr() == model.output.data_ptr()


@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16], ids=lambda p: p.name)
@pytest.mark.parametrize("packs", [True, False])
def test_inference_linear_with_and_without_packed_weights(
    packs: bool, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = DTYPES[precision]
    if packs and not can_pack(precision):
        pytest.skip("this processor does not multiply bf16, or torch has no oneDNN")
    if not packs:
        monkeypatch.setattr(linear_module, "pack", lambda weight: None)
    torch.manual_seed(0)
    makers: list[Callable[[], nn.Linear]] = [lambda: nn.Linear(24, 40), lambda: nn.Linear(24, 40, bias=False)]

    for make in makers:
        linear = make()
        x = torch.randn(3, 5, 24)
        with torch.no_grad(), autocast(CPU, precision):
            assert prepare_weight(linear.weight).is_mkldnn is packs
            found = InferenceLinear(linear)(x)
        weight = linear.weight.to(dtype).double()
        expected = x.to(dtype).double() @ weight.t() + (0.0 if linear.bias is None else linear.bias.to(dtype).double())
        assert found.dtype is dtype
        atol, rtol = {Precision.fp32: (1e-6, 1e-6), Precision.bf16: (0.02, 0.01)}[precision]
        torch.testing.assert_close(found.double(), expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16], ids=lambda p: p.name)
def test_for_inference_packs_the_output_matrix_as_well(precision: Precision) -> None:
    with torch.no_grad(), autocast(CPU, precision):
        ready = for_inference(Transformer(CONFIG, 50))
    assert ready.output.is_mkldnn is can_pack(precision)


@pytest.mark.ci
def test_inference_linear_where_a_processor_does_not_multiply_bf16() -> None:
    """oneDNN, told to use nothing beyond AVX2, refuses to pack: the plain product takes its place."""
    code = """
import torch
from torch import nn
from transformer.kernels.linear import InferenceLinear, pack
assert pack(torch.zeros(2, 2, dtype=torch.bfloat16)) is None
linear = nn.Linear(24, 40)
with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
    x = torch.randn(3, 24)
    assert torch.equal(InferenceLinear(linear)(x), linear(x))
"""
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_for_inference_keeps_the_hooks_of_a_model() -> None:
    """They may belong to something that cannot be copied, such as a lock."""
    model = Transformer(CONFIG, 50)
    seen: list[int] = []
    lock = threading.Lock()

    def count(*_: object) -> None:
        with lock:
            seen.append(1)

    model.encoder[0].register_forward_hook(count)
    with torch.no_grad():
        logits_of(for_inference(model))
    assert seen == [1]


def test_inference_norm_is_the_norm_after_a_sub_layer() -> None:
    """In half precision throughout: as near to the plain norm as its result is to what it is rounded from."""
    torch.manual_seed(3)
    norm = AddNorm(32, Norm.post, dropout=0.1).eval()
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
        norm.bias.normal_()
    x = torch.randn(3, 5, 32)  # the first layer's input, an embedding, is in fp32
    y = torch.randn(3, 5, 32).bfloat16()
    with torch.no_grad(), autocast(CPU, Precision.bf16):
        ready = InferenceNorm(norm)
        found = ready(ready.before(x), y)
        again = ready(found, y)
    expected = norm(x.double().float(), y.float())
    assert found.dtype is again.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), expected, atol=0.03, rtol=0.01)


def test_for_inference_with_the_norms_of_a_gpu_computes_what_the_model_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole layers: they are called as those of the model are."""
    torch.manual_seed(1)
    model = Transformer(CONFIG, 50).eval()
    with torch.no_grad(), autocast(CPU, Precision.bf16):
        expected = logits_of(model)
        monkeypatch.setattr("transformer.model.inference._casts_norms", lambda device: True)
        ready = for_inference(model)
        found = logits_of(ready)
    assert any(isinstance(module, InferenceNorm) for module in ready.modules())
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0.05)


def test_for_inference_projects_a_step_by_one_product() -> None:
    """Queries, keys and values side by side, biases too, where d_k and d_v differ."""
    torch.manual_seed(4)
    attention = MultiHeadAttention(32, 4, d_k=8, d_v=6, score=Score.scaled, biases=True, dropout=0.0)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_()
        x = torch.randn(3, 5, 32)
        q, kv = attention.project(x)
        attention.W_qkv = InferenceLinear(attention.W_q, attention.W_k, attention.W_v)
        fused_q, fused_kv = attention.project(x)
    assert [t.shape for t in (fused_q, fused_kv.keys, fused_kv.values)] == [(3, 5, 4, 8), (3, 5, 4, 8), (3, 5, 4, 6)]
    torch.testing.assert_close((fused_q, fused_kv.keys, fused_kv.values), (q, kv.keys, kv.values), atol=1e-5, rtol=1e-5)
