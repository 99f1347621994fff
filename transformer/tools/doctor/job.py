"""The keys of `transformer doctor`."""

from dataclasses import dataclass

from transformer.config.jobs import TrainJob
from transformer.config.settings import Format, option


@dataclass
class DoctorJob(TrainJob):
    """`transformer doctor`: the training that these settings describe, examined before it is begun."""

    text_only: bool = option(False, "examine the text files only: prepare nothing, and try no model")
    format: Format = option(Format.text, "text for people, or JSON for programs")
