"""The keys of `transformer import`."""

from dataclasses import dataclass, field

from transformer.config.jobs import Job, check_here
from transformer.config.settings import Format, option


@dataclass
class Languages:
    """The languages of the model."""

    src_lang: str | None = option(None, "source language, an ISO 639 code (null: as the model's tokenizer says)")
    tgt_lang: str | None = option(None, "target language, an ISO 639 code (null: as the model's tokenizer says)")


@dataclass
class ImportJob(Job):
    """`transformer import`."""

    from_: str = option(
        "",
        "a folder that save_pretrained of a MarianMTModel wrote, a model on the hub, as hf:OWNER/NAME[@REVISION], or "
        "Marian's own model.npz",
    )
    vocabularies: list[str] | None = option(
        None,
        "the SentencePiece model of a model.npz, or those of source and target, or a vocab.yml beside source.spm and "
        "target.spm (null: as the settings beside it say)",
    )
    run_dir: str = option("runs/imported", "the run directory to make")
    data: Languages = field(default_factory=Languages)
    format: Format = option(Format.text, "text for people, or JSON for programs")

    def __post_init__(self) -> None:
        check_here(self.run_dir, "name a directory to make; what is on the hub is named by from")
