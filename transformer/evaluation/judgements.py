"""What external judges have said of translations that a run keeps: beside the text that they judged, in `judges/`.

The judges themselves are a plug-in, which asks the programs of a command line: see `integrations.judges`.
"""

import logging
from collections.abc import Mapping

from transformer import registry
from transformer.config.jobs import EvaluateJob
from transformer.errors import CheckpointError, StorageError
from transformer.plugins import JudgedText, Judges
from transformer.records import Judgement
from transformer.run_dir import RunDir

log = logging.getLogger(__name__)


def check_judges(job: EvaluateJob, *, have_sources: bool) -> None:
    """Raise InputError for a judge of the job that could not judge: before anything is translated."""
    if job.scorer:
        _judges().check_judges(job.scorer, have_sources=have_sources)


def judged(job: EvaluateJob, text: JudgedText, *, place: str) -> dict[str, Judgement]:
    """What each judge of the job says of the text; one that fails is a warning, which names the `place` of the text."""
    if not job.scorer:
        return {}
    return _judges().judge_all(job.scorer, text, seconds=job.scorer_seconds, place=place)


def _judges() -> Judges:
    found: Judges = registry.find("judges", "command")
    return found


def keep_judgements(run: RunDir, test_set: str, judgements: Mapping[str, Judgement]) -> None:
    """Keep what judges said of the translations of a test set; where that cannot be written, a warning says so."""
    for name, judgement in judgements.items():
        try:
            run.check_folders()
            run.write_judgement(test_set, name, judgement)
        except StorageError as error:
            log.warning("%s: not kept: %s", name, error)


def read_judgements(run: RunDir, test_set: str, text: JudgedText) -> dict[str, Judgement]:
    """What judges have said of this very text, by their names; what was said of another, or is damaged, does not count.

    Their commands are text from a run directory: they are shown, and nothing else.
    """
    judgements = {}
    digests = text.digests()
    for name in run.judge_names(test_set):
        try:
            judgement = run.read_judgement(test_set, name)
        except CheckpointError as error:
            log.warning("%s", error)
            continue
        if judgement.sha256 == digests and len(judgement.segments) == len(text.hypotheses):
            judgements[name] = judgement
    return judgements
