"""The path that packed training takes on a GPU, run on a CPU: support/varlen.py in processes of its own.

`pytest -m fake_gpu`: they compile. The proof of the same path is in test_proof.py, and always runs.
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support import varlen
from support.paths import ROOT, TESTS
from support.varlen import forked
from transformer.config.settings import AttentionKernel, Precision

pytestmark = pytest.mark.fake_gpu

ONE_GRAPH = {"graphs": 1, "frames": 1, "breaks": 0}


def test_attend_by_packed_kernels_is_the_path_by_groups(tmp_path: Path) -> None:
    """12 real batches in bf16, NaN in every empty slot: one graph, and the loss and gradient of the other path.

    Half precision rounds the two paths differently. Two batches in fp32 show that nothing but rounding differs.
    """
    counts = {Precision.bf16: 12, Precision.fp32: 2}
    [found] = forked(1, lambda: {of.name: varlen.packed(of, count) for of, count in counts.items()}, tmp_path)

    assert found["bf16"]["compilations"] == [ONE_GRAPH] * 12
    assert max(found["bf16"]["losses"]) < 5e-4
    assert max(found["bf16"]["gradients"]) < 0.05

    assert found["fp32"]["compilations"] == [ONE_GRAPH] * 2
    assert max(found["fp32"]["losses"]) < 1e-6
    assert max(found["fp32"]["gradients"]) < 1e-5


def test_train_step_packed_is_compiled_once_whatever_the_sentences(tmp_path: Path) -> None:
    """Batches of few and of over 256 sentences; the longest has 2 to 200 tokens, on one side or on both."""
    [found] = forked(1, lambda: varlen.uneven(50), tmp_path)

    assert max(found["sentences"]) > 256
    assert min(found["sentences"]) < 20
    assert max(found["longest"]) > 128
    assert {tuple(bound) for bound in found["bounds"]} >= {(128, 128), (128, 256), (256, 256)}
    assert min(found["longest"]) < 8
    assert found["compilations"] == [ONE_GRAPH] * 50


def agreed(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """What both of two ranks found."""
    assert first == second
    assert first["micro_batches"] == 2
    assert first["norm"] > 0.0
    assert first["pieces_of_trial"] == first["pieces"], "what the trial has compiled is what is trained"
    return first


def test_train_step_on_compiled_ranks_has_the_gradient_of_uncompiled_ones(tmp_path: Path) -> None:
    """Two gloo ranks, each with two micro-batches, of which only the last brings the all-reduce."""
    found = agreed(*forked(2, lambda: varlen.ranks(AttentionKernel.varlen), tmp_path))
    assert found["largest_difference"] == 0.0

    # One graph, which the compiler cuts so that a piece's gradients leave while the next piece is differentiated.
    assert found["compilations"]["graphs"] == 1
    assert found["compilations"]["breaks"] == 0
    assert found["pieces"] > 1


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_train_step_on_compiled_ranks_attends_by_triton_kernels_in_pieces() -> None:
    """Against groups of padded sentences, forward and backward by Triton's interpreter."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    common = {"PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}", "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", **world}
    processes = [
        subprocess.Popen(
            [sys.executable, varlen.__file__],
            env={**os.environ, **common, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    ended = [process.communicate(timeout=500) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ended
    found = agreed(*(json.loads(output) for output, _ in ended))
    assert found["largest_difference"] < 1e-7 * found["norm"]
    assert found["compilations"]["breaks"] == 0
    assert found["pieces"] > 1
