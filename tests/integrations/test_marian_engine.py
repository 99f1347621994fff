"""What `to=marian` writes, in Marian itself: needs pymarian, and so the marker `marian`.

Marian is in this environment, or in that of the Python that TRANSFORMER_MARIAN names.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.scripts import load_script

pytestmark = [pytest.mark.marian, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def engine() -> str:
    python = os.environ.get("TRANSFORMER_MARIAN", sys.executable)
    if subprocess.run([python, "-c", "import pymarian"], capture_output=True).returncode:
        pytest.skip("pymarian is not installed")
    return python


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script("benchmark/marian_engine")


@pytest.mark.parametrize("shape", load_script("benchmark/marian_engine").SHAPES)
def test_marian_translates_and_scores_as_the_run_does(shape: str, engine: str, script: Any, tmp_path: Path) -> None:
    """Models that say something, on the 500 sentences of the demo's dev set."""
    script.train(shape, tmp_path / "run", 800)
    found = script.compare(tmp_path / "run", engine, tmp_path / "marian")
    assert found.version == "1.12.42"
    assert found.sentences == 500
    assert found.bleu > 10.0
    assert found.largest < 1e-3
    assert found.mean < 5e-5
    assert found.greedy >= 495  # ties, and what the number under the root of a norm decides
    assert found.beam >= 480  # Marian's search ends earlier
    assert abs(found.bleu - found.their_bleu) < 0.5


def test_marian_decoder_takes_the_settings_beside_the_model(engine: str, script: Any, tmp_path: Path) -> None:
    """From another folder, with empty lines, long lines and pieces that are unknown: a line for a line."""
    script.train("plain", tmp_path / "run", 30)
    script._transformer("export", f"run_dir={tmp_path / 'run'}", "to=marian", f"output={tmp_path / 'out'}", "threads=1")
    (tmp_path / "in.txt").write_text("the old lamp\n\n日本語\n" + "lamp " * 3000 + "\n", encoding="utf-8")
    words = ["decode", "-c", f"{tmp_path}/out/decoder.yml", "-i", f"{tmp_path}/in.txt", "--cpu-threads", "1"]
    assert len(script._marian(engine, *words, "--quiet")) == 4
