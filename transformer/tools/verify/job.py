"""The keys of `transformer verify`."""

from dataclasses import dataclass

from transformer.config.jobs import Job, check_here, check_score_names
from transformer.config.settings import Format, option, require

ALL = "all"


@dataclass
class VerifyJob(Job):
    """`transformer verify`."""

    run_dir: str = option("runs/demo", "a directory that `train` made")
    steps: str = option(
        "50", "repeat this many steps, and on to the next mark of history.json; all: the whole run, with its scores"
    )
    scores: list[str] = option([], "scores of other packages that the run has, to be measured again, too")
    format: Format = option(Format.text, "text for people, or JSON for programs")

    def __post_init__(self) -> None:
        check_score_names(self.scores)
        check_here(self.run_dir, "the training is repeated on its text, which is not on the hub")
        is_count = self.steps.isascii() and self.steps.isdecimal() and 0 < int(self.steps[:20]) < 10**18
        require(self.steps == ALL or is_count, f"steps={self.steps} is neither a number of steps nor `{ALL}`")
