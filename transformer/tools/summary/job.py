"""The keys of `transformer summary`."""

import math
from dataclasses import dataclass

from transformer.config.jobs import TrainJob
from transformer.config.settings import Format, option, require


@dataclass
class SummaryJob(TrainJob):
    """`transformer summary`."""

    run: str | None = option(
        None,
        "instead of these settings, summarise this run directory or run on the hub, with its measured speed",
    )
    tokens_per_second: float | None = option(None, "target tokens a second, to estimate the hours from")
    format: Format = option(Format.text, "text for people, or JSON for programs")

    def __post_init__(self) -> None:
        super().__post_init__()
        speed = self.tokens_per_second
        require(speed is None or 0 < speed < math.inf, f"tokens_per_second={speed} must be above 0, and finite")
