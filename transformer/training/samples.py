"""What is shown of a validation: the first dev sentences with their translations."""

import logging
from collections.abc import Sequence
from itertools import islice

from transformer.tracking import HIDDEN_BY_BAR, Tracker
from transformer.training.validate import DevSet

log = logging.getLogger(__name__)


def show_samples(dev: DevSet, hypotheses: Sequence[str], tracker: Tracker, *, step: int, count: int) -> None:
    """Log the first `count` dev sentences with their translations and references."""
    lines = []
    triples = zip(dev.sources, hypotheses, dev.references, strict=True)
    for source, hypothesis, reference in islice(triples, count):
        lines.append(f"source      {source}")
        lines.append(f"translation {hypothesis}")
        lines.append(f"reference   {reference}")

    tracker.text(step, "dev/samples", lines)
    for line in lines:
        log.info("  %s", line, extra=HIDDEN_BY_BAR)
