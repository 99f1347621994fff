"""`transformer compare`: the translations of two systems or more, each beside those of the first, the baseline.

the text that finished runs keep, or files, by `texts`; nothing is decoded
  -> scores     those of `evaluate` with their intervals and two tests of significance, by `significance`
  -> lengths    BLEU and chrF of short and of long sentences, by `lengths`
  -> rarity     how well frequent and rare words are translated, by `words`
  -> kept       how much of what must stay as it is arrives: numbers, URLs, names, tags
  -> changes    the sentences whose chrF differs most
  -> a Comparison, which `format` makes readable
"""

import logging
from collections import Counter
from dataclasses import dataclass
from itertools import chain

from transformer.evaluation.metrics import choose
from transformer.plugins import ScoreSettings
from transformer.tools import significance
from transformer.tools.compare.job import CompareJob
from transformer.tools.compare.kept import KeptRow, count_kept
from transformer.tools.compare.lengths import LengthRow, score_by_length
from transformer.tools.compare.texts import PUBLISHED, Texts, check_systems, read_files, read_runs, without_tag
from transformer.tools.compare.words import (
    RarityRow,
    Tokenise,
    WordCounts,
    count_training_words,
    score_by_rarity,
    word_splitter,
)
from transformer.tools.significance import (
    MetricComparison,
    Metrics,
    compare_segments,
    compare_systems,
    resampling_seed,
    untested,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Change:
    """A sentence that two systems translate differently; chrF is that of the sentence by itself."""

    line: int  # counted from 1
    source: str | None  # None where files are compared without their sources
    references: list[str]
    baseline: str
    baseline_chrf: float
    translation: str
    chrf: float


@dataclass(frozen=True)
class SetComparison:
    """One test set: all systems side by side, and what changed in each from the baseline on."""

    sentences: int
    scores: list[MetricComparison]
    by_length: list[LengthRow]
    counted_in: str  # the text in which the frequencies of words were counted
    by_rarity: list[RarityRow]
    kept: list[KeptRow]  # what arrives of the source; none where that is not known
    changed: dict[str, list[Change]]  # by system


@dataclass(frozen=True)
class Comparison:
    """What `compare` returns."""

    systems: list[str]  # the first is the baseline
    test_sets: dict[str, SetComparison]
    resamples: int
    trials: int
    seed: str  # of both tests; digits, or none
    notes: list[str]


def compare(job: CompareJob) -> Comparison:
    """Compare the translations of the job's runs, or files.

    Raises InputError where there are not two systems with a test set in common, or they cannot be compared fairly;
    CheckpointError where a run directory is damaged.
    """
    seed = resampling_seed()  # before any time is spent
    chosen = choose(job.scores)

    # What is compared, and by what.
    if job.hypotheses:
        material = read_files(job)
    else:
        systems = [*job.runs, PUBLISHED] if job.published else job.runs
        check_systems(systems, "transformer compare runs/a runs/b, or runs/a published.NAME=FILE")
        material = read_runs(job.runs, tgt_lang=job.data.tgt_lang, tokenize=job.bleu_tokenize, published=job.published)
    metrics_of = {
        (tgt_lang, tokenize): Metrics.of(ScoreSettings(tgt_lang, tokenize, job.lowercase), chosen)
        for tgt_lang, tokenize in dict.fromkeys((texts.tgt_lang, texts.tokenize) for texts in material.sets.values())
    }
    counts_of: dict[str, WordCounts | None] = {}  # by tokenizer: the training text is read once for each

    # One test set after the other.
    test_sets = {}
    for name, texts in material.sets.items():
        log.info("%s: %d systems on %d sentences", name, len(texts.translations), len(texts.references[0]))
        metrics = metrics_of[texts.tgt_lang, texts.tokenize]
        tokenise = word_splitter(metrics)
        tokenizer = str(metrics.bleu.tokenizer_signature)
        if tokenizer not in counts_of and material.baseline is not None:
            counts_of[tokenizer] = count_training_words(material.baseline, tokenise)
        test_sets[name] = _compare_set(
            texts, metrics, tokenise=tokenise, word_counts=counts_of.get(tokenizer), most_changes=job.changed
        )

    return Comparison(
        systems=material.systems,
        test_sets=test_sets,
        resamples=significance.RESAMPLES,
        trials=significance.TRIALS,
        seed=seed,
        notes=material.notes,
    )


def compare_all(texts: Texts, metrics: Metrics) -> list[MetricComparison]:
    """The comparisons by all metrics, by what else the runs were scored by, and by what judges have said of them."""
    return [
        *compare_systems(texts.translations, texts.references, sources=texts.sources, metrics=metrics),
        *(untested(scores) for field, scores in texts.stored.items() if field not in metrics.chosen),
        *(compare_segments(of.judge, of.segments, signature=of.command) for of in texts.judged),
    ]


# ---- the comparison of a test set -----------------------------------------------------------------------------------


def _compare_set(
    texts: Texts,
    metrics: Metrics,
    *,
    tokenise: Tokenise,
    word_counts: WordCounts | None,
    most_changes: int,
) -> SetComparison:
    """Everything that is compared on one test set; without `word_counts`, the words of the references are counted."""
    # All texts as words. Where there are several references, the first one counts.
    references = [tokenise(text) for text in texts.references[0]]
    translations = [[tokenise(text) for text in lines] for lines in texts.translations.values()]
    if word_counts is None:
        word_counts = WordCounts("the references", Counter(chain.from_iterable(references)))

    baseline, *others = texts.translations
    return SetComparison(
        sentences=len(references),
        scores=compare_all(texts, metrics),
        by_length=score_by_length(texts, metrics, [len(words) for words in references]),
        counted_in=word_counts.place,
        by_rarity=score_by_rarity(translations, references, word_counts.words),
        kept=[]
        if texts.sources is None
        else count_kept(without_tag(texts.sources), texts.references[0], list(texts.translations.values())),
        changed={name: _changes(texts, metrics, baseline=baseline, system=name)[:most_changes] for name in others},
    )


def _changes(texts: Texts, metrics: Metrics, *, baseline: str, system: str) -> list[Change]:
    """The sentences that the two translate differently, first the ones whose chrF differs most."""
    changes = []
    pairs = zip(texts.translations[baseline], texts.translations[system], strict=True)
    for place, (ours, theirs) in enumerate(pairs):
        if ours == theirs:
            continue

        references = [lines[place] for lines in texts.references]
        changes.append(
            Change(
                line=place + 1,
                source=None if texts.sources is None else texts.sources[place],
                references=references,
                baseline=ours,
                baseline_chrf=metrics.chrf.sentence_score(ours, references).score,
                translation=theirs,
                chrf=metrics.chrf.sentence_score(theirs, references).score,
            )
        )
    return sorted(changes, key=lambda change: abs(change.chrf - change.baseline_chrf), reverse=True)
