"""What `to=bergamot` writes, in Bergamot's WASM engine: needs node and the engine, and so the marker `marian`.

npm pack @browsermt/bergamot-translator@0.4.9 && tar xzf browsermt-bergamot-translator-0.4.9.tgz
TRANSFORMER_BERGAMOT=package pytest -n 0 -m marian tests/integrations/test_bergamot_engine.py
"""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from support.scripts import load_script

pytestmark = [pytest.mark.marian, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def engine() -> Path:
    folder = os.environ.get("TRANSFORMER_BERGAMOT")
    if folder is None or shutil.which("node") is None:
        pytest.skip("TRANSFORMER_BERGAMOT names no engine, or there is no node")
    return Path(folder)


@pytest.mark.parametrize(
    ("shape", "quantization"),
    [
        *(("plain", "float32"), ("plain", "int8"), ("two vocabularies", "float32"), ("two vocabularies", "int8")),
        *(("Swish", "int8"), ("untied", "float32")),  # untied, int8 is refused
    ],
)
def test_bergamot_translates_as_the_run_does(
    shape: str, quantization: str, engine: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Greedily, the demo's dev set: int8, to which Bergamot rounds float32, too, changes some, and BLEU by little.

    Of a model as unsure as one of 800 steps it changes a third; of a sound one a tenth (results/last-mile.md).
    """
    models: Any = load_script("benchmark/marian_engine")
    script: Any = load_script("benchmark/last_mile")
    run_dir = tmp_path_factory.getbasetemp() / shape  # which Marian's tests translate with, too
    models.train(shape, run_dir, 800)
    sources, references = (
        (run_dir / "hypotheses" / f"dev.{side}").read_text("utf-8").split("\n")[:-1] for side in ("src", "ref")
    )
    ours = script.of_torch(run_dir, sources)
    theirs = script.of_bergamot(run_dir, sources, engine, quantization, tmp_path / "out")
    same = sum(a == b for a, b in zip(ours.translations, theirs.translations, strict=True))
    assert same >= 0.5 * len(sources)
    assert abs(script.bleu(ours.translations, references) - script.bleu(theirs.translations, references)) < 2.0
