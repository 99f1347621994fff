"""Scores of files: translations of any system against references, without a run."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transformer.config.jobs import EvaluateJob
from transformer.data.corpus import read_lines
from transformer.errors import InputError
from transformer.evaluation.judgements import check_judges, judged
from transformer.evaluation.metrics import choose
from transformer.evaluation.score import choose_scorer, format_scores, format_signatures
from transformer.plugins import JudgedText, ScoreSettings
from transformer.records import Scores


def score_files(job: EvaluateJob) -> Scores:
    """Score `job.hypotheses` against `job.references`, line by line.

    Plain or compressed text; `-` is standard input.

    Raises InputError where a file cannot be read, has another number of lines, or cannot be scored fairly.
    """
    text = ScoreSettings(str(job.data.tgt_lang), job.bleu_tokenize, job.lowercase)
    scorer = choose_scorer(text, choose(job.score_names()))
    check_judges(job, have_sources=job.sources is not None)

    hypotheses_file = str(job.hypotheses)
    files = [hypotheses_file, *job.references, *([] if job.sources is None else [job.sources])]
    hypotheses, *others = read_parallel(files)
    references = others[: len(job.references)]
    sources = None if job.sources is None else others[-1]
    try:
        scores = scorer(hypotheses, *references, sources=sources)
    except InputError as error:
        raise InputError(f"{_path(hypotheses_file)}: {error}") from None

    # Of several references, a judge reads the first.
    judged_text = JudgedText(sources, hypotheses, references[0])
    return replace(scores, judges=judged(job, judged_text, place=hypotheses_file))


def format_file_scores(job: EvaluateJob, scores: Scores) -> str:
    """The scores, for people; below them what was scored, and how."""
    files = f"files: {job.hypotheses} against {', '.join(job.references)}"
    lines = [format_scores(scores), *(f"  {line}" for line in (files, *format_signatures(scores)))]
    return "".join(f"{line}\n" for line in lines)


def read_parallel(names: Sequence[str]) -> list[list[str]]:
    """The lines of each file: all must have as many as the first. Plain or compressed text; `-` is standard input.

    Raises InputError where a file cannot be read, or has another number of lines.
    """
    texts: list[list[str]] = []  # the lines of each file
    for name in names:
        lines = list(read_lines(_path(name)))
        texts.append(lines)
        if len(lines) != len(texts[0]):
            raise InputError(
                f"{_path(names[0])} has {len(texts[0])} lines, {_path(name)} has {len(lines)}: "
                "each line must translate the same line of the other file"
            )
    return texts


def _path(name: str) -> Path:
    return Path("/dev/stdin" if name == "-" else name)
