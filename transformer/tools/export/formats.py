"""What the formats have in common: what is exported, how it is written, and how it is run for the check.

    Original -> ExportFormat.write -> files -> ExportFormat.load -> Peer -> `parity.compare`

The modules `ctranslate2`, `marian` and `onnx` each have one `ExportFormat`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformer.config.settings import ModelConfig, Quantization
from transformer.decoding.engine.peer import Peer
from transformer.decoding.translator import Translator


@dataclass(frozen=True)
class Original:
    """What is exported: a model, its tokenizers and its search settings, in float32 on a CPU."""

    translator: Translator
    src_lang: str
    tgt_lang: str
    quantization: Quantization
    exponent: float  # of a length, in place of the run's length penalty: see `exponent_near`
    origin: str  # the run and the checkpoint, for people
    output: Path  # where the exported model will be


@dataclass(frozen=True)
class ExportFormat:
    """How a model is written for a library."""

    packages: tuple[str, ...]  # that must be installed
    bound: Callable[[ModelConfig], float]  # the largest difference of a log-probability that is rounding
    write: Callable[[Original, Path], None]  # into a folder that exists
    load: Callable[[Original, Path, int], Peer]  # the model in that folder, to be run on so many threads
    readme: Callable[[Original], str]  # how people load it
