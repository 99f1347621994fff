"""Files of translations and references, scored without a run."""

from pathlib import Path

from transformer.config.jobs import EvaluateJob
from transformer.data.corpus import read_lines
from transformer.errors import InputError
from transformer.evaluation.paper_bleu import choose_scorer
from transformer.records import Scores


def score_files(job: EvaluateJob) -> Scores:
    """Score `job.hypotheses` against `job.references`, line by line; plain text or `.gz`, and `-` is standard input.

    Raises InputError where a file cannot be read, has another number of lines, or cannot be scored fairly.
    """
    scorer = choose_scorer(tgt_lang=str(job.data.tgt_lang), lowercase=job.lowercase, paper_bleu=job.paper_bleu)

    path = _path(str(job.hypotheses))
    hypotheses = list(read_lines(path))
    references = []
    for name in job.references:
        lines = list(read_lines(_path(name)))
        if len(lines) != len(hypotheses):
            raise InputError(
                f"{path} has {len(hypotheses)} lines, {_path(name)} has {len(lines)}: "
                "each line must translate the same line of the other file"
            )
        references.append(lines)

    try:
        return scorer(hypotheses, *references)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _path(name: str) -> Path:
    return Path("/dev/stdin" if name == "-" else name)
