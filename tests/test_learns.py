"""It learns: the demo, as a new user runs it, reaches the scores that the README promises."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_demo_learns_its_grammar(tmp_path: Path) -> None:
    """85 BLEU on sentences like the training ones, and 60 to 97 on combinations that training never showed."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    subprocess.run([sys.executable, "-m", "transformer", "train"], cwd=tmp_path, env=environment, check=True)
    results = json.loads((tmp_path / "runs/demo/results.json").read_text(encoding="utf-8"))
    scores = {name: found["bleu"] for name, found in results["test_sets"].items()}
    assert scores["test"] >= 85
    assert 60 <= scores["test_compositional"] <= 97
