"""Computes the scores of a report: of the test sets, with significance, and of kept checkpoints on the dev set.

    translations that a run keeps  -> score_runs        -> Scored: a group of runs        -> score_tables, samples
    checkpoints that a run keeps   -> score_checkpoints -> CheckpointScore, one for each  -> score_tables

Test sets are scored on the translations that a run keeps. No validation keeps its translations, so the intervals of
checkpoints come from translating the dev set again, greedily, as validation does.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformer.config.settings import TORCH, Precision, SearchOverride
from transformer.decoding.loading import load_translator
from transformer.errors import InputError, TransformerError
from transformer.evaluation.metrics import choose
from transformer.evaluation.sets import read_set
from transformer.plugins import ScoreMetric, ScoreSettings
from transformer.run_dir import STEP_PREFIX, list_steps
from transformer.tools.compare.command import compare_all
from transformer.tools.compare.lengths import LengthRow, score_by_length
from transformer.tools.compare.texts import Texts, read_runs
from transformer.tools.compare.words import word_splitter
from transformer.tools.report.job import ReportJob
from transformer.tools.report.reading import RunReading
from transformer.tools.report.samples import SampleSet, choose_samples, spread
from transformer.tools.significance import Interval, MetricComparison, Metrics, bootstrap_bleu

log = logging.getLogger(__name__)

MOST_SETS = 20  # test sets that are scored: what results.json may name has no limit
AVERAGED = "averaged"


@dataclass(frozen=True)
class SetScores:
    """One test set, with the scores of each run in their order, and samples."""

    name: str
    sentences: int
    scores: list[MetricComparison]
    by_length: list[LengthRow]
    samples: SampleSet | None


@dataclass(frozen=True)
class Scored:
    """A group of runs, scored on the same text under the same signatures; one run where several cannot be compared."""

    names: list[str]
    sets: list[SetScores]
    notes: list[str]


@dataclass(frozen=True)
class CheckpointScore:
    """A checkpoint, `step-800` or `averaged`, and its BLEU on a dev set under greedy search."""

    dev: str  # the name of the set
    checkpoint: str
    step: int | None  # None: averaged
    bleu: Interval


def score_runs(
    runs: Sequence[RunReading], *, scores: Sequence[str], samples: int, published: Mapping[str, str]
) -> tuple[list[Scored], list[str]]:
    """Score the runs that have results together; where that would not be fair, score each by itself.

    By the metrics of `evaluate`, and those of the names `scores`. Where `published` names files with somebody else's
    translations of test sets, another group has these beside the runs; InputError where they do not fit.

    The second list has the reasons why runs are not compared, or are left out because they cannot be scored.
    """
    with_results = [run.name for run in runs if run.results is not None and run.results.test_sets]
    if not with_results:
        return [], ["There are no scores of a test set: no run has results of one."]

    # All runs together.
    chosen = choose(scores)
    others = [_score(with_results, chosen, samples=0, published=published)] if published else []
    try:
        return [_score(with_results, chosen, samples=samples), *others], []
    except TransformerError as error:
        if len(with_results) == 1:
            return [], [str(error)]
        reasons = [f"The runs are not compared: {error}"]

    # Each run by itself.
    scored = []
    for name in with_results:
        try:
            scored.append(_score([name], chosen, samples=samples))
        except TransformerError as error:
            reasons.append(str(error))
    return scored, list(dict.fromkeys(reasons))


def _score(
    names: list[str],
    chosen: Mapping[str, ScoreMetric],
    *,
    samples: int,
    published: Mapping[str, str] | None = None,
) -> Scored:
    """Score these runs on their test sets, or beside the published translations of some.

    Raises InputError where the runs cannot be compared, CheckpointError where one is damaged.
    """
    material = read_runs(names, tgt_lang=None, tokenize=None, published=published)
    sets = []
    notes = list(material.notes)
    for name, texts in list(material.sets.items())[:MOST_SETS]:
        log.info("%s: scoring the translations of %s", name, ", ".join(names))
        metrics = Metrics.of(ScoreSettings(texts.tgt_lang, texts.tokenize), chosen)
        sets.append(_score_set(name, texts, metrics, samples=samples))
    if len(material.sets) > MOST_SETS:
        notes.append(f"{len(material.sets) - MOST_SETS:,} more test sets are left out.")
    return Scored(material.systems, sets, notes)


def _score_set(name: str, texts: Texts, metrics: Metrics, *, samples: int) -> SetScores:
    """Score the translations of one test set, and choose samples of them."""
    (references,) = texts.references
    if not references:
        raise InputError(f"{name}: the test set has no sentences")

    split = word_splitter(metrics)
    by_length = score_by_length(texts, metrics, [len(split(reference)) for reference in references])
    scores = compare_all(texts, metrics)
    sample_set = None
    if samples:
        sample_set = choose_samples(name, texts, metrics, count=samples)
    return SetScores(
        name=name,
        sentences=len(references),
        scores=scores,
        by_length=by_length,
        samples=sample_set,
    )


def score_checkpoints(run: RunReading, job: ReportJob) -> list[CheckpointScore]:
    """BLEU on the dev sets of `job.checkpoints` kept checkpoints and of the average; what fails is noted in the run."""
    if job.checkpoints == 0:
        return []

    # Which checkpoints, and on what.
    try:
        steps = spread(list_steps(run.directory.path), job.checkpoints)
        dev_sets = {name: read_set(run.directory, name) for name in run.directory.dev_names()}
    except TransformerError as error:
        run.missing.append(f"Intervals of checkpoints: {error}")
        return []

    chosen: list[tuple[str, int | None]] = [(f"{STEP_PREFIX}{step}", step) for step in steps]
    if run.directory.averaged.exists():
        chosen.append((AVERAGED, None))

    scores = []
    for name, step in chosen:
        log.info("%s: translating the dev set with %s (checkpoints=0 leaves this out)", run.name, name)
        try:
            found = _dev_bleu(run, job, checkpoint=name, dev_sets=dev_sets)
        except TransformerError as error:
            run.missing.append(f"Interval of {name}: {error}")
        else:
            scores += [CheckpointScore(dev, name, step, bleu) for dev, bleu in found.items()]
    return scores


def _dev_bleu(
    run: RunReading, job: ReportJob, *, checkpoint: str, dev_sets: Mapping[str, Sequence[tuple[str, str]]]
) -> dict[str, Interval]:
    """Translate the dev sets with a checkpoint, greedily, and score that. Raises TransformerError."""
    translator = load_translator(
        run.directory.path,
        checkpoint=checkpoint,
        search=SearchOverride(beam_size=1, engine=TORCH),
        device=job.device,
        precision=Precision.auto,
    )
    if run.record is None:
        raise InputError(f"{run.directory.record.name} does not tell the language")

    data = run.record.config.data
    found = {}
    for name, pairs in dev_sets.items():
        translations = translator.translate([source for source, _ in pairs])
        references = [reference for _, reference in pairs]
        found[name] = bootstrap_bleu(
            translations, references, tgt_lang=data.tgt_lang_of(name), tokenize=data.bleu_tokenize
        )
    return found
