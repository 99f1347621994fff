"""The keys of `transformer export`."""

from dataclasses import dataclass, field
from enum import Enum

from transformer.config.jobs import ON_HUB, Job
from transformer.config.settings import Format, Quantization, SearchOverride, at_least, option, require


class Target(Enum):
    """What an exported model is for."""

    ctranslate2 = "ctranslate2"
    argos = "argos"
    marian = "marian"
    bergamot = "bergamot"
    browser = "browser"
    huggingface = "huggingface"
    onnx = "onnx"


IN_BERGAMOT = (Target.bergamot, Target.browser)  # what Bergamot's engine runs


@dataclass
class ExportJob(Job):
    """`transformer export`."""

    run_dir: str = option("runs/demo", "a directory that `train` made, or a run on the hub: hf:OWNER/NAME[@REVISION]")
    checkpoint: str = option("auto", "averaged, best, last, step-N, or auto (averaged; last where that is newer)")
    to: Target = option(Target.ctranslate2, "what the exported model is for")
    output: str | None = option(None, "the directory to make (null: RUN_DIR-TO)")
    quantization: Quantization = option(Quantization.float32, "the type of the weights; float32 alone is exact")
    engine: str | None = option(
        None, "to=browser: the folder of the npm package @browsermt/bergamot-translator, whose files go along"
    )
    sentences: int = option(200, "check the exported model on this many sentences")
    src: str | None = option(None, "a text file with these sentences (null: the run's dev set, else a test set)")
    tgt: str | None = option(None, "their references, line by line")
    threads: int | None = option(None, "CPU threads (null: one for each core that it may use)")
    format: Format = option(Format.text, "text for people, or JSON for programs")
    search: SearchOverride = field(default_factory=SearchOverride)

    def __post_init__(self) -> None:
        at_least(self, "", 1, "sentences", "threads")
        for name in ("engine", "engine_type"):
            require(getattr(self.search, name) is None, f"search.{name} is for a search by this package: leave it out")
        require(self.output != "", "output must name a directory")
        is_named = self.output is not None or not self.run_dir.startswith(ON_HUB)
        require(is_named, f"run_dir={self.run_dir} is on the hub: set output to the directory to make")
        require(self.engine is None or self.to is Target.browser, "engine is for to=browser: leave it out")
        require(self.tgt is None or self.src is not None, "tgt has the references of src: set both")
        require(
            self.quantization is Quantization.float32 or self.to in (Target.ctranslate2, Target.argos, *IN_BERGAMOT),
            f"quantization={self.quantization.name} is for to=ctranslate2, to=argos, to=bergamot and to=browser: "
            "leave it out",
        )
        require(
            self.to not in IN_BERGAMOT or self.quantization in (Quantization.float32, Quantization.int8),
            f"quantization={self.quantization.name}: Bergamot has float32 and int8",
        )
        for name in ("beam_size", "length_penalty", "max_extra"):
            is_free = self.to not in (Target.argos, *IN_BERGAMOT) or getattr(self.search, name) is None
            engine = "Argos" if self.to is Target.argos else "Bergamot"
            require(
                is_free, f"search.{name}: {engine} searches in a way of its own: leave it out under to={self.to.name}"
            )
