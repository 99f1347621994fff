"""The keys of `transformer compare`."""

from dataclasses import dataclass, field

from transformer.config.jobs import Job, ScoredText, check_score_names
from transformer.config.settings import BleuTokenizer, Format, at_least, option, require

PUBLISHED = "somebody else's translations of the test set NAME, to compare with the runs: a file, line for line"


@dataclass
class CompareJob(Job):
    """`transformer compare`: runs, or files of translations, each with the first one."""

    runs: list[str] = option(
        [],
        "run directories, or runs on the hub (hf:OWNER/NAME), first the baseline; `compare runs/a runs/b` sets this",
    )
    hypotheses: list[str] = option([], "instead of runs: files of translations, one a line, as [A,B]")
    references: list[str] = option([], "their references: a file, or several as [A,B]")
    sources: str | None = option(None, "their sources, for scores that read them, and to count what arrives of them")
    published: dict[str, str] = field(default_factory=dict, metadata={"help": PUBLISHED})
    data: ScoredText = field(default_factory=ScoredText)
    bleu_tokenize: BleuTokenizer | None = option(
        None, "how BLEU splits text into words, by sacreBLEU's names (null: as the first run, else by the language)"
    )
    scores: list[str] = option([], "scores of other installed packages, in addition to this package's")
    lowercase: bool = option(False, "score without regard to case")
    changed: int = option(5, "show this many of the sentences whose translations changed most")
    format: Format = option(Format.text, "text (Markdown) for people, or JSON for programs")

    def __post_init__(self) -> None:
        at_least(self, "", 0, "changed")
        check_score_names(self.scores)
        require(not (self.runs and self.hypotheses), "runs and hypotheses: choose one")
        require(
            not (self.published and self.hypotheses), "published goes with runs: hypotheses names every file itself"
        )
        require(bool(self.hypotheses) == bool(self.references), "hypotheses and references belong together: set both")
        require(self.sources is None or bool(self.hypotheses), "sources belong to hypotheses: set both")
        if self.hypotheses:
            require(self.data.tgt_lang is not None, "data.tgt_lang is not set: name the language of the hypotheses")
