"""Where the repository, its tests and the real corpora lie."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"

CORPORA = Path(os.environ.get("TRANSFORMER_DATA", os.devnull))
HAS_CORPORA = "TRANSFORMER_DATA" in os.environ
needs_corpora = pytest.mark.skipif(not HAS_CORPORA, reason="TRANSFORMER_DATA is not set")
