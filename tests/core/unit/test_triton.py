"""The Triton kernels on a CPU, interpreted by triton_kernels.py; test_fake_gpu.py has their machine code.

pip install -e '.[dev,gpu-tests]'
pytest -m fake_gpu
"""

import importlib.util
import json
import math
import os
import subprocess
import sys
from typing import Any

import pytest

from support.paths import ROOT, TESTS

pytestmark = [
    pytest.mark.fake_gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="Triton is not installed: pip install -e '.[dev,gpu-tests]'"
    ),
]


def interpreted(part: str) -> dict[str, Any]:
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}",
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "1",
    }
    command = [sys.executable, str(TESTS / "support" / "triton_kernels.py"), part]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def attention() -> dict[str, Any]:
    return interpreted("attention")


@pytest.fixture(scope="module")
def loss() -> dict[str, Any]:
    return interpreted("loss")


@pytest.mark.parametrize(
    ("case", "most"),
    [
        ("encoder", 1e-12),
        ("causal", 1e-12),
        ("cross", 1e-12),
        ("widths that are padded", 1e-12),
        ("float32", 1e-6),
        ("float16", 2e-3),
    ],
)
def test_attention_kernels_are_equation_1_on_each_sentence(attention: dict[str, Any], case: str, most: float) -> None:
    """The output and the gradients of q, k and v, against `attention_weights` in float64 on the same numbers.

    Real sentences, some of one token, of a tile, and of more than two; empty slots behind them.
    """
    assert len(attention["parity"][case]) == 4
    assert max(attention["parity"][case]) < most


def test_attention_kernels_read_queries_keys_and_values_as_they_lie(attention: dict[str, Any]) -> None:
    assert attention["strided"]


def test_attention_kernels_leak_nothing_from_empty_slots(attention: dict[str, Any]) -> None:
    assert attention["empty"]


def test_attention_dropout_is_philox_forward_and_backward(attention: dict[str, Any]) -> None:
    """The same mask in the output and in all gradients, and the one that NumPy makes from the seed."""
    assert max(attention["dropout"]["errors"]) < 1e-12


def test_attention_dropout_follows_from_its_seed(attention: dict[str, Any]) -> None:
    """Twice the same gives the same to the last bit; seeds come from torch's generator."""
    assert attention["dropout"]["again"]
    assert attention["dropout"]["follows_the_generator"] == [True, False]


def test_attention_dropout_drops_the_share_asked_for(attention: dict[str, Any]) -> None:
    """A quarter, within five standard errors, and neighbours are not related."""
    found = attention["dropout"]
    assert found["weights"] == 160_000
    assert abs(found["neighbours"]) < 5 / math.sqrt(found["weights"])
    assert found["share_kept"] == pytest.approx(0.75, abs=5 * math.sqrt(0.25 * 0.75 / found["weights"]))


# ---- attention by whole sentences -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sentences() -> dict[str, Any]:
    return interpreted("sentences")


@pytest.mark.parametrize("lengths", ["of the corpus", "short"])
@pytest.mark.parametrize(
    ("case", "most"),
    [
        ("encoder", 1e-12),
        ("causal", 1e-12),
        ("cross", 1e-12),
        ("widths that are padded", 1e-12),
        ("float32", 1e-6),
        ("float16", 2e-3),
        ("wide", 2e-3),
    ],
)
def test_sentence_attention_is_equation_1_on_each_sentence(
    sentences: dict[str, Any], case: str, most: float, lengths: str
) -> None:
    """As above; the lengths of the corpus need small tiles, large ones, and the kernels for longer sentences."""
    found = sentences["parity"][f"{case}, {lengths}"]
    assert len(found) == 4
    assert max(found) < most


def test_sentence_attention_reads_queries_keys_and_values_as_they_lie(sentences: dict[str, Any]) -> None:
    assert sentences["strided"]


def test_sentence_attention_takes_operands_side_by_side(sentences: dict[str, Any]) -> None:
    """To the last bit, where tiles suffice and where they do not."""
    assert sentences["joined"] == [True, True]


def test_sentence_attention_leaks_nothing_from_empty_slots(sentences: dict[str, Any]) -> None:
    """With small tiles, with large ones, and with sentences that fit none."""
    assert sentences["empty"] == [True, True, True]


@pytest.mark.parametrize("lengths", ["short", "long"])
@pytest.mark.parametrize("role", ["encoder", "causal", "cross"])
def test_sentence_attention_drops_what_the_plain_form_drops(sentences: dict[str, Any], role: str, lengths: str) -> None:
    """Forward and backward, by the mask that NumPy makes from the seed, wherever a tile begins, and in whatever one."""
    assert max(sentences["dropout"][f"{role}, {lengths}"]) < 1e-12


# ---- residual connection, dropout and norm; and all of them in a model ----------------------------------------------


@pytest.fixture(scope="module")
def norm() -> dict[str, Any]:
    return interpreted("norm")


@pytest.mark.parametrize(
    ("case", "most"),
    [
        ("float64", 1e-12),
        ("dropout", 1e-12),
        ("rows that are padded", 1e-12),
        ("more rows than blocks have at once", 1e-12),
        ("float32", 1e-6),
        ("float16", 2e-3),
        ("two types", 2e-3),
        ("no row", 0.0),
    ],
)
def test_add_norm_is_the_plain_form(norm: dict[str, Any], case: str, most: float) -> None:
    """The result and the gradients of both inputs, gain and bias; what is dropped is what NumPy's Philox drops."""
    assert len(norm[case]) == 5
    assert max(norm[case]) <= most


@pytest.fixture(scope="module")
def model() -> dict[str, Any]:
    return interpreted("model")


@pytest.mark.parametrize(("variant", "parameters"), [("post", 31), ("pre", 35), ("biases", 44), ("two widths", 31)])
def test_objective_with_fused_kernels_is_the_plain_one(model: dict[str, Any], variant: str, parameters: int) -> None:
    """Loss and the gradient of every parameter, where sentences need tiles of both sizes."""
    assert len(model[variant]) == 1 + parameters
    assert max(model[variant]) < 1e-12


def test_objective_with_fused_kernels_is_compiled_once() -> None:
    """Whatever tiles a batch needs: the compiler would take half a minute for each."""
    found = interpreted("recompiled")
    assert found["longest"] == [64, 128, 256]
    assert max(found["errors"]) < 1e-12
    assert found["graphs"] == 1


# ---- the loss -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "most"),
    [
        ("float64", 1e-12),
        ("no smoothing", 1e-12),
        ("one block", 1e-12),
        ("37,000 pieces", 1e-5),
        ("far apart", 1e-5),
        ("bias", 1e-12),
        ("no rows", 0.0),
        ("empty rows alone", 0.0),
    ],
)
def test_triton_loss_is_the_reference(loss: dict[str, Any], case: str, most: float) -> None:
    """Both sums, and the gradients of hidden states and matrix, in one block of rows and in several."""
    found = loss[case]
    assert found["found"] == pytest.approx(found["wanted"], rel=most, abs=0.0)
    for largest, scale in zip(found["largest"], found["scale"], strict=True):
        assert largest <= most * max(1.0, scale)


@pytest.mark.parametrize(("case", "n_weights"), [("bfloat16", 1), ("bias in bfloat16", 2)])
def test_triton_loss_in_bf16_is_off_by_its_rounding(loss: dict[str, Any], case: str, n_weights: int) -> None:
    """Logits are rounded to 8 bits; sums and the gradients of matrix and bias are fp32."""
    found = loss[case]
    assert found["found"] == pytest.approx(found["wanted"], rel=2e-2)
    assert found["dtypes"] == ["torch.bfloat16", *["torch.float32"] * n_weights]
    for largest, scale in zip(found["largest"], found["scale"], strict=True):
        assert largest < 2e-2 * scale
