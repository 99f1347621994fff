"""What the formats have in common: what is exported, how it is written, and what runs it for the check."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from transformer.config.settings import Quantization
from transformer.decoding.translator import Translator


@dataclass(frozen=True)
class Original:
    """What is exported: a model, its tokenizer and its search settings, in float32 on a CPU."""

    translator: Translator
    src_lang: str
    tgt_lang: str
    quantization: Quantization
    origin: str  # the run and the checkpoint, for people
    output: Path  # where the exported model will be


@dataclass(frozen=True)
class Forced:
    """What a model makes of a target that it is given, with EOS at its end."""

    log_probs: Tensor  # (T,) of the target's pieces and EOS
    logits: Tensor | None  # (T, V), where the library gives them


class Peer(Protocol):
    """An exported model, read back from its files.

    Sources and targets are ids of pieces, without BOS and EOS; a source is not empty.
    """

    arithmetic: str  # of its search
    versions: dict[str, str]  # of the libraries that run it

    def penalty(self, alpha: float) -> Callable[[int], float]:
        """Its length penalty, as a function of |Y|."""
        ...

    def forced(self, sources: Sequence[list[int]], targets: Sequence[list[int]]) -> list[Forced]:
        """What it makes of each target, given its source."""
        ...

    def translate(
        self, sources: Sequence[list[int]], *, beam_size: int, alpha: float, max_length: int
    ) -> list[list[int]]:
        """The best translation of each source, of at most `max_length` pieces, EOS counted; beam 1 is greedy."""
        ...


@dataclass(frozen=True)
class ExportFormat:
    """How a model is written for a library."""

    packages: tuple[str, ...]  # that must be installed
    bound: float  # the largest difference of a log-probability or a logit that is rounding, in float32 weights
    write: Callable[[Original, Path], None]  # into a folder that is there
    load: Callable[[Original, Path, int], Peer]  # what was written there, to be run on so many threads
    readme: Callable[[Original], str]  # how to load it


def power_penalty(alpha: float) -> Callable[[int], float]:
    """`|Y|^alpha`: the length penalty of CTranslate2 and of Hugging Face."""
    return lambda length: float(length) ** alpha
