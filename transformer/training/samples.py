"""What is shown of a validation: the first dev sentences with their translations."""

import logging
from collections.abc import Sequence
from itertools import islice

from transformer.tracking import HIDDEN_BY_BAR, Tracker
from transformer.training.validate import DevSet

log = logging.getLogger(__name__)

LOGGED = 100  # characters of a line of the log; TensorBoard has all of it, and of every sample
LINES = 3  # of a sample


def show_samples(dev: DevSet, hypotheses: Sequence[str], tracker: Tracker, *, step: int, count: int) -> None:
    """Write the first `count` dev sentences with translations and references to TensorBoard, and log the first."""
    lines = []
    triples = zip(dev.sources, hypotheses, dev.references, strict=True)
    for source, hypothesis, reference in islice(triples, count):
        lines.append(f"source      {source}")
        lines.append(f"translation {hypothesis}")
        lines.append(f"reference   {reference}")

    tracker.text(step, "dev/samples", lines)
    for line in lines[:LINES]:
        log.info("  %s", line if len(line) <= LOGGED else f"{line[:LOGGED]}...", extra=HIDDEN_BY_BAR)
