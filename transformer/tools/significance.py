"""How far a score may be off because the test set is one sample of many, and whether two systems really differ.

    bootstrap_bleu      one system: BLEU and its 95 % interval
    compare_systems     several systems: the scores of `evaluate`, and for each system two tests against the first one
    compare_segments    the same two tests on the segment scores of a judge or of a plug-in

Only randomisation decides whether a difference is significant. sacreBLEU's bootstrap, like the Moses script that it
follows, subtracts a mean of absolute differences, so its p is about half of a two-sided one. On outputs of two WMT21
systems, exchanged at random sentence by sentence, it was 0.05 or less in 11 % of 600 trials; randomisation's p in 5 %.

Every figure of BLEU, chrF, chrF++ and TER is sacreBLEU's. The seed is 12345, or what the variable SACREBLEU_SEED says.
"""

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import ne
from typing import Any

import numpy as np
import numpy.typing as npt
from sacrebleu.significance import PairedTest

from transformer.config.settings import BleuTokenizer
from transformer.errors import InputError
from transformer.evaluation.metrics import ALWAYS, SacreBleu, bleu_metric, check_metrics, measure_one, name_score
from transformer.plugins import ScoreMetric, ScoreSettings
from transformer.records import NamedScore

log = logging.getLogger(__name__)

Floats = npt.NDArray[np.float64]

# sacreBLEU's own numbers.
RESAMPLES = 1000  # of the sentences, for intervals and for the paired bootstrap
TRIALS = 10_000  # of approximate randomisation

SIGNIFICANT = 0.05  # the largest p of randomisation that is marked, as sacreBLEU marks it
NOT_TESTED = "not tested"  # shown where a metric gives no scores of sentences
ABOUT_BOOTSTRAP = "The p of sacreBLEU's bootstrap is about half of that: it marks nothing."


# ---- one system -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interval:
    """A BLEU score and the half-width of its 95 % interval under resampling of the test sentences."""

    bleu: float
    half_width: float
    signature: str


def bootstrap_bleu(
    hypotheses: Sequence[str], references: Sequence[str], *, tgt_lang: str, tokenize: BleuTokenizer | None = None
) -> Interval:
    """BLEU with a bootstrap interval (Koehn, 2004) by sacreBLEU, always from the same resamples.

    The interval is about the choice of the sentences alone: another seed of the training may differ by more.
    """
    return _bootstrap(bleu_metric(tgt_lang, tokenize=tokenize, lowercase=False), hypotheses, [references])


def _bootstrap(bleu: Any, hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Interval:
    """BLEU by a metric that nothing else is scored with."""
    score = bleu.corpus_score(hypotheses, references, n_bootstrap=RESAMPLES)
    signature = str(bleu.get_signature())

    # The object keeps its interval in private fields; what it prints is sacreBLEU's public format.
    printed = json.loads(score.format(width=6, signature=signature, is_json=True))
    return Interval(score.score, printed.get("confidence_var", 0.0), signature)  # none where all resamples score 0


# ---- several systems ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SystemScore:
    """The score of a system by one metric, and two tests against the first system.

    The p of randomisation is the probability of a difference from the first system that is at least as large, were the
    two systems alike; that of the bootstrap is about half of it. They are None for the first system, and for one that
    has translated everything as the first one did; for a metric without scores of sentences, nothing but the score is
    known.
    """

    score: float  # 0 to 100; of a judge or a plug-in, in its own measure
    mean: float | None  # of the scores of its resamples; None: it has none
    half_width: float | None  # of the 95 % interval of its resamples
    p_bootstrap: float | None
    p_randomisation: float | None

    @property
    def is_significant(self) -> bool:
        """Whether randomisation finds a difference from the first system."""
        return self.p_randomisation is not None and self.p_randomisation <= SIGNIFICANT

    @property
    def has_interval(self) -> bool:
        """Whether there are scores of sentences, so that it can be tested."""
        return self.half_width is not None


@dataclass(frozen=True)
class MetricComparison:
    """The scores of all systems, in their order, by one metric; the signature names the seed and the resamples too."""

    metric: str  # sacreBLEU's name of its own
    signature: str
    systems: list[SystemScore]
    digits: int = 2  # behind the point, that are shown
    higher_is_better: bool = True


@dataclass(frozen=True)
class Metrics:
    """What systems are compared by: the metrics of `evaluate`, for a language."""

    text: ScoreSettings
    chosen: Mapping[str, ScoreMetric]  # by field
    bleu: Any  # sacreBLEU's BLEU; its `tokenizer` is set at run time
    chrf: Any
    own: Mapping[str, Any]  # those of sacreBLEU, by field; BLEU and chrF among them

    @classmethod
    def of(cls, text: ScoreSettings, chosen: Mapping[str, ScoreMetric] = ALWAYS) -> "Metrics":
        """The metrics for such text. Raises InputError where one of them cannot score it."""
        check_metrics(chosen, text)
        measures = {field: metric.prepare(text) for field, metric in chosen.items()}
        own = {field: measure.metric for field, measure in measures.items() if isinstance(measure, SacreBleu)}
        return cls(text, chosen, bleu=own["bleu"], chrf=own["chrf"], own=own)

    def bleu_interval(self, hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Interval:
        """BLEU with a bootstrap interval; by a metric of its own, whose signature then names the resamples."""
        text = self.text
        metric = bleu_metric(text.tgt_lang, tokenize=text.tokenize, lowercase=text.lowercase)
        return _bootstrap(metric, hypotheses, references)


def resampling_seed() -> str:
    """The seed of sacreBLEU's tests: digits, or `none`. Raises InputError for what sacreBLEU could not read."""
    seed = os.environ.get("SACREBLEU_SEED", "12345").lower()
    if re.fullmatch("0*[1-9][0-9]*|none", seed) is None:  # of 0 its tests make no seed
        raise InputError(f"SACREBLEU_SEED={seed}: this is not a seed: set the variable to a number from 1, or unset it")
    return seed


def compare_systems(
    systems: Mapping[str, Sequence[str]],
    references: Sequence[Sequence[str]],
    *,
    sources: Sequence[str] | None,
    metrics: Metrics,
) -> list[MetricComparison]:
    """Score the translations of all systems, and test each against those of the first one.

    The systems are by name; the references are one or several lists of as many texts, and so are the sources.
    """
    comparisons = _compare_by_sacrebleu(systems, references, metrics=metrics)
    for field in [name for name in metrics.chosen if name not in metrics.own]:
        try:
            comparisons.append(_compare_by_other(field, systems, references, sources=sources, metrics=metrics))
        except InputError as error:
            log.warning("left out: %s", error)
    return comparisons


def _compare_by_sacrebleu(
    systems: Mapping[str, Sequence[str]], references: Sequence[Sequence[str]], *, metrics: Metrics
) -> list[MetricComparison]:
    # Both tests score all systems by all metrics; the resamples are those of the bootstrap.
    named = list(systems.items())
    bootstrap = PairedTest(named, metrics.own, references, test_type="bs", n_samples=RESAMPLES)
    randomisation = PairedTest(named, metrics.own, references, test_type="ar", n_samples=TRIALS)
    signatures, resampled = bootstrap()
    _, randomised = randomisation()

    # Systems with the same translations are not tested.
    _, baseline = named[0]
    changed = [sum(map(ne, translations, baseline)) for translations in systems.values()]

    comparisons = []
    for field, (name, signature) in zip(metrics.own, signatures.items(), strict=True):
        results = zip(resampled[name], randomised[name], changed, strict=True)
        scores = [_system_score(bootstrapped, permuted, changed=count) for bootstrapped, permuted, count in results]
        metric = metrics.chosen[field]
        comparisons.append(
            MetricComparison(
                name, str(signature), scores, digits=metric.digits, higher_is_better=metric.higher_is_better
            )
        )
    return comparisons


def _compare_by_other(
    field: str,
    systems: Mapping[str, Sequence[str]],
    references: Sequence[Sequence[str]],
    *,
    sources: Sequence[str] | None,
    metrics: Metrics,
) -> MetricComparison:
    """By a metric that is not sacreBLEU's: tested on the scores of the segments, or not at all where it has none."""
    metric = metrics.chosen[field]
    measured = [measure_one(field, metric, metrics.text, lines, references, sources) for lines in systems.values()]
    segments = [one.segments for one in measured if one.segments is not None]
    if len(segments) < len(measured):
        return untested([name_score(metric, one) for one in measured])
    tested = compare_segments(metric.name, segments, signature=measured[0].signature)
    return replace(tested, digits=metric.digits, higher_is_better=metric.higher_is_better)


def untested(scores: Sequence[NamedScore]) -> MetricComparison:
    """The scores of all systems by one metric, of which no more is known."""
    first = scores[0]
    systems = [SystemScore(one.value, None, None, p_bootstrap=None, p_randomisation=None) for one in scores]
    return MetricComparison(
        first.name, first.signature, systems, digits=first.digits, higher_is_better=first.higher_is_better
    )


def about_metrics(metrics: Sequence[MetricComparison]) -> str:
    """Which of them are better where they are lower, and which are not tested, in words."""
    lower = dict.fromkeys(one.metric for one in metrics if not one.higher_is_better)
    bare = dict.fromkeys(one.metric for one in metrics if not one.systems[0].has_interval)
    text = f"A lower {' or '.join(lower)} is better."
    if bare:
        text += f" {', '.join(bare)}: {NOT_TESTED}, for want of scores of sentences, which scores=[NAME] may give."
    return text


def compare_segments(judge: str, systems: Sequence[Sequence[float]], *, signature: str) -> MetricComparison:
    """Compare the mean segment scores of all systems, and test each against the first, as `compare_systems` does.

    The tests are those of sacreBLEU, on means: the bootstrap draws segments, and randomisation exchanges the two
    scores of a segment, at random.
    """
    seed = resampling_seed()
    draw = np.random.default_rng(None if seed == "none" else int(seed))
    scores = np.array(systems, dtype=np.float64)  # (systems, segments)
    n_segments = scores.shape[1]
    resampled = np.array([scores[:, draw.integers(n_segments, size=n_segments)].mean(1) for _ in range(RESAMPLES)])

    baseline = scores[0]
    compared = []
    for of_system, means in zip(scores, resampled.T, strict=True):
        differences = of_system - baseline
        is_tested = bool(differences.any())
        low, high = np.quantile(means, (0.025, 0.975))
        by_chance = np.abs(means - resampled[:, 0])
        compared.append(
            SystemScore(
                score=float(of_system.mean()),
                mean=float(means.mean()),
                half_width=float(high - low) / 2,
                p_bootstrap=_p(by_chance - by_chance.mean(), differences) if is_tested else None,
                p_randomisation=_p(_exchanged(differences, draw), differences) if is_tested else None,
            )
        )
    return MetricComparison(metric=judge, signature=signature, systems=compared, digits=4)


def _exchanged(differences: Floats, draw: np.random.Generator) -> Floats:
    """The size of the mean difference where the scores of segments are exchanged at random; one for each trial."""
    means = [(draw.integers(2, size=len(differences)) * 2 - 1) @ differences for _ in range(TRIALS)]
    return np.abs(means) / len(differences)


def _p(by_chance: Floats, differences: Floats) -> float:
    """The share of differences by chance that are as large as the mean difference; that itself counts as one."""
    observed = abs(differences.mean())
    at_least = by_chance >= observed * (1 - 1e-12)  # a sum in another order may be less by rounding
    return float(at_least.sum() + 1) / (len(by_chance) + 1)


def _system_score(resampled: Any, randomised: Any, *, changed: int) -> SystemScore:
    """The results of both tests for a system. sacreBLEU returns some of them as NumPy's floats, which JSON rejects.

    Of the 2^n ways to exchange the n sentences that are `changed`, two give the difference itself: none and all. Where
    so few differ that this counts, sacreBLEU's p is too small, since it does not count equal differences.
    """
    is_tested = changed > 0
    return SystemScore(
        score=float(resampled.score),
        mean=float(resampled.mean),
        half_width=float(resampled.ci),
        p_bootstrap=float(resampled.p_value) if is_tested else None,
        p_randomisation=max(float(randomised.p_value), 2.0 ** (1 - changed)) if is_tested else None,
    )
