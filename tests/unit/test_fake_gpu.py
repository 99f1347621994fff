"""The training step on a CUDA device that is not there (support/fake_gpu.py): what only compilers say, without a GPU.

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


@pytest.fixture(scope="module")
def base() -> dict[str, Any]:
    """The report on the base model: 6 + 6 layers, 37,000 pieces, 25,000 tokens a side."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}"}
    command = [sys.executable, str(TESTS / "support" / "fake_gpu.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def products(graph: dict[str, Any]) -> int:
    return sum(count for name, count in graph["calls"].items() if name in PRODUCTS)


def test_settings_on_a_gpu_are_the_fast_ones(base: dict[str, Any]) -> None:
    expected = {"device": "cuda", "precision": "bf16", "layout": "packed", "compile": True, "max_tokens": 32_768}
    assert base["resolved"].items() >= expected.items()
    assert base["capacities"] == [25_088, 25_088]


def test_base_step_is_one_graph(base: dict[str, Any]) -> None:
    assert base["breaks"] == {}
    assert base["compiled"] == 1
    assert [graph["backward"] for graph in base["graphs"]] == [False, True]


def test_base_step_calls_no_operator_that_inductor_has_no_code_for(base: dict[str, Any]) -> None:
    forward, backward = base["graphs"]
    assert set(forward["calls"]) - FORWARD == set()
    assert set(backward["calls"]) - BACKWARD == set()


def test_base_step_launches_and_moves_no_more_than_before(base: dict[str, Any]) -> None:
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


def test_base_kernels_are_machine_code_without_spills(base: dict[str, Any]) -> None:
    """Every kernel, in every variant that inductor would choose from on the device, by ptxas for sm_90."""
    kernels = base["kernels"]
    assert len(Counter(kernel["name"] for kernel in kernels)) >= 20
    assert [kernel for kernel in kernels if kernel["stack"] > 0] == []
    assert max(kernel["registers"] for kernel in kernels) < 255
