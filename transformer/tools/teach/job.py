"""The keys of `transformer teach`: those of the student's training, and what it is taught by."""

import math
from dataclasses import dataclass, fields
from typing import ClassVar

from transformer.config.jobs import TrainJob
from transformer.config.settings import MOST_BEAM, Format, at_least, at_most, option, require

TAUGHT = "taught"  # the training set of what the teacher translates: data.extra.taught


@dataclass
class TeachJob(TrainJob):
    """`transformer teach`."""

    PINNED: ClassVar[tuple[str, ...]] = ("teacher", "ensemble", "reverse")

    teacher: str = option(
        "",
        "a run directory, a run on the hub (hf:OWNER/NAME), or the command of any program that translates, with {src} "
        "and {out}: see docs/teaching.md",
    )
    ensemble: list[str] = option([], "other runs with the teacher's tokenizer: their probabilities are averaged")
    text: str | None = option(
        None, "what the teacher translates, a file with a sentence a line (null: the sources of data.train)"
    )
    candidates: int | None = option(
        None,
        "of this many translations of each line, take the one that has the most in common with the others, by chrF "
        "(null: the teacher's best)",
    )
    keep: float = option(
        1.0,
        "of the sound pairs, keep this share: those most probable to the reverse model or, without one, to the teacher",
    )
    reverse: str | None = option(
        None, "a run in the other direction, which scores each pair backwards (null: the teacher's own probabilities)"
    )
    weight: float = option(1.0, "copies of each taught pair in an epoch; 0.5 takes half of the pairs")
    baseline: bool = option(True, "also train the student without its teacher, for comparison")
    teacher_lines: int = option(1000, "a program gets this many lines at a time; they are lost if it fails")
    teacher_seconds: float = option(
        3600.0, "a program that takes longer for these lines is ended, and the command fails"
    )
    format: Format = option(Format.text, "text for people, or JSON for programs")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, "", 1, "teacher_lines")
        at_least(self, "", 2, "candidates")
        at_most(self, "", MOST_BEAM, "candidates")
        require(0.0 < self.keep <= 1.0, f"keep={self.keep} must be above 0, and at most 1: the share of pairs to keep")
        require(0.0 < self.weight <= 1000.0, f"weight={self.weight} must be in (0, 1000]")
        require(
            0.0 < self.teacher_seconds < math.inf, f"teacher_seconds={self.teacher_seconds} must be above 0, and finite"
        )
        require(
            TAUGHT not in self.data.extra, f"data.extra.{TAUGHT} is what the teacher will write: choose another name"
        )
        require(
            not (self.is_program and self.ensemble), "ensemble takes runs, and the teacher is a program: leave one out"
        )
        require(
            not (self.is_program and self.keep < 1.0 and self.reverse is None),
            f"keep={self.keep}: a program reports no probabilities: set reverse=RUN, or leave keep out",
        )

    @property
    def is_program(self) -> bool:
        """Whether the teacher is a command, not a run."""
        return "{" in self.teacher

    def student(self) -> TrainJob:
        """The training of the student as it is without its teacher."""
        return TrainJob(**{key.name: getattr(self, key.name) for key in fields(TrainJob)})
