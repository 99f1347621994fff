"""The training step on a CUDA device that is not there (support/fake_gpu.py): what only compilers say, without a GPU.

What a whole command does, and on which cards, is in scripts/test_null_gpu.py, which needs torch's own CUDA build; here
is what the compiler says of kernels: bytes, registers, machine code.

These tests compile for a minute or two and need Triton: `pip install -e '.[dev,gpu-tests]'`, then `pytest -n 0 -m
fake_gpu`, as `.ci/run` does. The default `pytest` leaves them out.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch

from support.paths import ROOT, TESTS

pytestmark = [
    pytest.mark.fake_gpu,
    pytest.mark.timeout(1_800),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="Triton is not installed: pip install -e '.[dev,gpu-tests]'"
    ),
    pytest.mark.skipif(torch.version.cuda is not None, reason="this build of torch has a CUDA device of its own"),
]

# Operators for which inductor writes no kernel: products, attention over packed sentences, and the seeds of dropout.
PRODUCTS = {"mm", "addmm"}
FORWARD = PRODUCTS | {"torch_attn._varlen_attn.default", "randint.low_out"}
BACKWARD = PRODUCTS | {"torch_attn._varlen_attn_backward.default"}
ROOM = 1.03


def report(script: str, *arguments: str) -> Any:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}"}
    command = [sys.executable, str(TESTS / "support" / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def base() -> dict[str, Any]:
    """The report on the base model: 6 + 6 layers, 37,000 pieces, 25,000 tokens a side."""
    return report("fake_gpu.py")


def products(graph: dict[str, Any]) -> int:
    return sum(count for name, count in graph["calls"].items() if name in PRODUCTS)


def test_batching_of_base_has_slots_for_25_000_tokens(base: dict[str, Any]) -> None:
    assert base["capacities"] == [25_088, 25_088]


def test_train_step_of_base_is_one_graph(base: dict[str, Any]) -> None:
    assert base["breaks"] == {}
    assert base["compiled"] == 1
    assert [graph["backward"] for graph in base["graphs"]] == [False, True]


def test_train_step_of_base_calls_no_operator_that_inductor_has_no_code_for(base: dict[str, Any]) -> None:
    forward, backward = base["graphs"]
    assert set(forward["calls"]) - FORWARD == set()
    assert set(backward["calls"]) - BACKWARD == set()


def test_train_step_of_base_launches_and_moves_no_more_than_before(base: dict[str, Any]) -> None:
    """At most the figures of the first run, with room for another torch. Bytes are those that inductor counts."""
    forward, backward = base["graphs"]
    assert forward["launches"] <= 238 * ROOM
    assert backward["launches"] <= 285 * ROOM
    assert products(forward) <= 96 * ROOM
    assert products(backward) <= 192 * ROOM
    assert forward["gigabytes"] <= 19.08 * ROOM
    assert backward["gigabytes"] <= 35.84 * ROOM
    assert forward["calls"]["torch_attn._varlen_attn.default"] == 18
    assert backward["calls"]["torch_attn._varlen_attn_backward.default"] == 18


def test_train_step_of_base_is_machine_code_without_spills(base: dict[str, Any]) -> None:
    """Every kernel, in every variant that inductor would choose from on the device, by ptxas for sm_90."""
    kernels = base["kernels"]
    assert len(Counter(kernel["name"] for kernel in kernels)) >= 20
    assert [kernel for kernel in kernels if kernel["stack"] > 0] == []
    assert max(kernel["registers"] for kernel in kernels) < 255


# ---- this package's own kernels --------------------------------------------------------------------------------------

TRITON_OPERATOR = "transformer.packed_attention"


def test_train_step_with_triton_attention_is_one_graph_around_it() -> None:
    """Three attentions of 1 + 1 layers, each one call forward and one backward; the fused loss is outside the graph.

    At most the figures of the first run: bytes are those that inductor counts, those of the products among them.
    """
    found = report("fake_gpu.py", "--layers=1", "--kernels=triton")
    assert found["resolved"]["attention_kernel"] == "triton"
    assert found["resolved"]["loss_rows"] == 32_768  # capacities are at most train.max_tokens
    assert found["breaks"] == {}
    assert found["compiled"] == 1

    forward, backward = found["graphs"]
    assert set(forward["calls"]) - PRODUCTS == {f"{TRITON_OPERATOR}.default", "randint.low_out"}
    assert set(backward["calls"]) - PRODUCTS == {f"{TRITON_OPERATOR}_backward.default"}
    assert forward["calls"][f"{TRITON_OPERATOR}.default"] == 3
    assert backward["calls"][f"{TRITON_OPERATOR}_backward.default"] == 3
    assert forward["launches"] <= 30 * ROOM
    assert backward["launches"] <= 36 * ROOM
    assert forward["gigabytes"] <= 2.86 * ROOM
    assert backward["gigabytes"] <= 5.50 * ROOM


def test_train_step_with_fused_kernels_is_one_graph_around_them() -> None:
    """As above, with whole sentences: whatever their lengths, the batch has these shapes."""
    found = report("fake_gpu.py", "--layers=1", "--kernels=fused")
    assert found["resolved"]["attention_kernel"] == "sentences"
    assert found["breaks"] == {}
    assert found["compiled"] == 1

    forward, backward = found["graphs"]
    operators = {"transformer.sentence_attention": 3, "transformer.add_norm": 5}
    assert {name: count for name, count in forward["calls"].items() if name.startswith("transformer")} == {
        f"{name}.default": count for name, count in operators.items()
    }
    assert {name: count for name, count in backward["calls"].items() if name.startswith("transformer")} == {
        f"{name}_backward.default": count for name, count in operators.items()
    }
    assert forward["launches"] <= 30 * ROOM
    assert backward["launches"] <= 36 * ROOM


def test_sentence_attention_is_machine_code() -> None:
    """For Ampere, Hopper and Blackwell: small tiles of heads of 64 have all that they need in registers.

    So have large ones since Hopper, but for a few numbers of a thread under dropout or in wide heads. On Ampere, where
    the matrix units read registers alone, large tiles spill.
    """
    kernels = report("triton_kernels.py", "sentence_machine_code")
    assert len(kernels) == 2 * (3 + 5 + 5)
    for kernel in kernels:
        assert kernel["matrix_units"], kernel
        is_small = kernel["tile"] == 64
        if kernel["arch"] == 80:
            assert kernel["shared"] <= 99 * 1024  # of the smallest since Ampere
            assert kernel["stack"] <= (0 if is_small else 512), kernel
        else:
            assert kernel["shared"] <= 227 * 1024
            assert kernel["stack"] <= (0 if is_small else 8 if kernel["width"] == 64 else 128), kernel
        if kernel["arch"] == 90 and is_small and kernel["width"] == 64:
            # Four blocks at once forward; backward three, and two under dropout.
            is_forward = kernel["name"] == "_forward_kernel"
            assert kernel["registers"] <= (128 if is_forward else 240 if kernel["dropout"] else 168), kernel


def test_add_norm_is_machine_code_without_spills() -> None:
    """For Ampere, Hopper and Blackwell, base and big: few enough registers for five blocks at once, forward ten."""
    kernels = report("triton_kernels.py", "norm_machine_code")
    assert len(kernels) == 3 * 3 * 2
    for kernel in kernels:
        assert kernel["stack"] == 0, kernel
        assert kernel["registers"] <= (56 if kernel["name"] == "_forward_kernel" else 96), kernel
        assert kernel["shared"] <= 4096, kernel


def test_kernels_in_triton_are_machine_code() -> None:
    """Of this package, for Ampere and Hopper, with and without dropout, for heads of 64 and 128.

    On Hopper registers suffice for all, but for two numbers of a thread where heads have 128; on Ampere not for the
    backward kernels under dropout.
    """
    kernels = report("triton_kernels.py", "machine_code")
    assert len(kernels) == 2 * (3 * 3 + 1)
    for kernel in kernels:
        is_attention = kernel["width"] > 0
        assert kernel["matrix_units"] == is_attention
        assert kernel["alone"] <= (0 if is_attention else 1), kernel  # the logit of the target
        assert kernel["shared"] <= (99 if kernel["arch"] == 80 else 227) * 1024  # 99: of the smallest since Ampere
        if kernel["arch"] == 90:
            assert kernel["stack"] <= (8 if kernel["width"] == 128 else 0), kernel
        elif not kernel["dropout"]:
            assert kernel["stack"] == 0, kernel
