"""The keys of `transformer replay`."""

from dataclasses import dataclass

from transformer.config.jobs import Job, check_here
from transformer.config.settings import Format, at_least, option


@dataclass
class ReplayJob(Job):
    """`transformer replay`."""

    run_dir: str = option("runs/demo", "a directory that `train` made")
    step: int | None = option(
        None, "the step to run again, counted from 1 (null: the first bad one after the newest checkpoint)"
    )
    format: Format = option(Format.text, "text for people, or JSON for programs")

    def __post_init__(self) -> None:
        check_here(self.run_dir, "a step is run again on the text of the training, which is not on the hub")
        at_least(self, "", 1, "step")
