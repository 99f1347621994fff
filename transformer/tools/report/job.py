"""The keys of `transformer report`."""

from dataclasses import dataclass, field

from transformer.config.jobs import Job, check_score_names
from transformer.config.settings import Device, at_least, at_most, option, require
from transformer.tools.compare.job import PUBLISHED


@dataclass
class ReportJob(Job):
    """`transformer report`: a page on one run, or on several side by side."""

    runs: list[str] = option(
        [], "run directories, or runs on the hub (hf:OWNER/NAME); `report runs/a runs/b` sets this"
    )
    published: dict[str, str] = field(default_factory=dict, metadata={"help": PUBLISHED})
    output: str = option("report.html", "the page to write")
    scores: list[str] = option([], "scores of other installed packages, in addition to this package's")
    samples: int = option(20, "number of sentences shown of each test set, from the best to the worst")
    checkpoints: int = option(
        5, "translate the dev set with this many of the kept checkpoints, for the intervals of their BLEU"
    )
    attention: int = option(2, "number of dev sentences whose attention is shown")
    device: Device = option(Device.auto, "where to translate")
    threads: int | None = option(None, "CPU threads (null: one for each core that it may use)")

    def __post_init__(self) -> None:
        check_score_names(self.scores)
        at_least(self, "", 0, "samples", "checkpoints", "attention")
        at_least(self, "", 1, "threads")
        at_most(self, "", 200, "samples")
        at_most(self, "", 50, "checkpoints")
        at_most(self, "", 20, "attention")
        require(len(self.runs) <= 10, f"{len(self.runs)} runs: a page has room for 10")
        require(bool(self.output), "output must name a file")
