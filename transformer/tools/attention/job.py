"""The keys of `transformer attention`."""

from dataclasses import dataclass
from enum import Enum

from transformer.config.jobs import DecodeJob
from transformer.config.settings import at_least, option, require


class WeightsFormat(Enum):
    """How attention weights are written to a file."""

    json = "json"
    npz = "npz"  # NumPy's


@dataclass
class AttentionJob(DecodeJob):
    """`transformer attention`: the weights of one sentence, or what each head does over many."""

    text: str | None = option(None, "the sentence to look at")
    target: str | None = option(None, "its translation (null: the model's own)")
    file: str | None = option(None, "instead of text: a file with a sentence a line")
    references: str | None = option(None, "with file: its translations, which the model then reads instead of its own")
    set: str | None = option(None, "instead of text: a set that the run keeps (null: dev, without text and file)")
    forced: bool = option(False, "with a set: read its references instead of translating")
    line: int = option(1, "which sentence of the file or the set, counted from 1")
    sentences: int | None = option(
        None, "instead of one sentence: what each head does over this many sentences, the first ones"
    )
    alignments: str | None = option(
        None, "with sentences: their word alignments, such as 0-0 1-2 on a line; measures the error rate of each layer"
    )
    output: str = option("attention", "directory for the files")
    format: WeightsFormat = option(WeightsFormat.json, "format of the file with the weights")
    layers: list[int] | None = option(None, "figures of these layers only, such as 5,6, counted from 1 (null: all)")
    heads: list[int] | None = option(None, "figures of these heads only, counted from 1 (null: all)")
    word: str | None = option(None, "figures only of what this word attends to (null: of all words)")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, "", 1, "line", "sentences")

        # Where the sentences come from, and the translations that the model reads.
        given = [name for name in ("text", "file", "set") if getattr(self, name) is not None]
        require(len(given) <= 1, f"{' and '.join(given)} are set: choose one")
        require(self.target is None or self.text is not None, "target is the translation of text: set text, too")
        require(self.references is None or self.file is not None, "references belong to file: set file, too")
        has_set = self.text is None and self.file is None
        require(has_set or not self.forced, "forced=true reads the references of a set: leave text and file out")
        require(self.sentences is None or self.text is None, "sentences are taken from file or set: leave text out")

        # What is drawn, and what is measured.
        for name in ("layers", "heads"):
            numbers = getattr(self, name)
            require(numbers is None or min(numbers, default=0) >= 1, f"{name}={numbers}: {name} are counted from 1")
        if self.alignments is not None:
            require(self.sentences is not None, "alignments are for many sentences: set sentences, too")
            has_references = self.references is not None or self.forced
            require(has_references, "alignments are of references: set forced=true, or references=FILE")
