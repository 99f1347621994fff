"""What the formats have in common: what is exported, how it is written, and how it is run for the check.

    Original -> ExportFormat.write -> files -> ExportFormat.load -> Peer -> `parity.compare`
                                      files -> ExportFormat.ask -> Asked, where the library itself is not that Peer

The modules beside this one that are named as in `job.Target` each have one `ExportFormat`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformer.config.settings import ModelConfig, Quantization, SearchOverride
from transformer.decoding.translator import Translator
from transformer.integrations.engine.parity import Parity, Sentence
from transformer.integrations.engine.peer import Peer
from transformer.numerics import FLOAT32_BOUND
from transformer.run_dir import TARGET_TOKENIZER, TOKENIZER, RunDir


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
    sentences: Sequence[Sentence] = ()  # those of the check, to measure with what int8 has to bear
    run: RunDir | None = None
    checkpoint: str = ""  # its name in the run
    engine: Path | None = None  # the folder of an engine that goes along


@dataclass(frozen=True)
class Asked:
    """What an engine that need not be installed does with an export; or why it was not asked, for people."""

    parity: Parity | None = None
    why_not: str | None = None


@dataclass(frozen=True)
class ExportFormat:
    """How a model is written for a library."""

    packages: tuple[str, ...]  # that must be installed
    search: SearchOverride | None  # the search that the other library makes, whatever it is told; None: as it is told
    write: Callable[[Original, Path], None]  # into a folder that exists
    load: Callable[[Original, Path, int], Peer]  # the model in that folder, to be run on so many threads
    readme: Callable[[Original], str]  # how people load it
    bound: Callable[[ModelConfig], float] = lambda _: FLOAT32_BOUND  # by which rounding may change a log-probability
    check: Callable[[Original], None] = lambda _: None  # raises InputError for what else the format needs
    ask: Callable[[Original, Peer, Path, int], Asked] = lambda *_: Asked()  # of so many threads; raises ProgramError


def write_tokenizers(original: Original, folder: Path) -> None:
    """Write the SentencePiece models, under the names that they have in a run directory."""
    for name, content in original.translator.tokenizers.models.items():
        (folder / name).write_bytes(content)


def readme_tokenizers(original: Original) -> str:
    """The lines of a README's program that load them: `pieces`, and the target's own under `target_name`."""
    names = {TOKENIZER: "pieces", TARGET_TOKENIZER: "target_pieces"}
    return "\n".join(
        f'{names[file]} = sentencepiece.SentencePieceProcessor(model_file=f"{{folder}}/{file}")'
        for file in original.translator.tokenizers.models
    )


def target_name(original: Original) -> str:
    """What a README's program calls the SentencePiece model that decodes."""
    return "pieces" if original.translator.tokenizers.is_shared else "target_pieces"
