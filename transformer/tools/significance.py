"""How far a score may be off because the test set is one sample of many, and whether two systems really differ.

    bootstrap_bleu      one system: BLEU and its 95 % interval
    compare_systems     several systems: BLEU, chrF and TER, and for each system two tests against the first one
    compare_segments    the same two tests on the segment scores of a judge

Whether a difference is significant, randomisation says alone: sacreBLEU's bootstrap, like the script of Moses that it
follows, subtracts a mean of absolute differences, so that its p is about half of a two-sided one. On outputs of two
WMT21 systems, exchanged at random sentence by sentence, it was 0.05 or less in 11 % of 600 trials, and that of
randomisation in 5 %.

Every figure of BLEU, chrF and TER is sacreBLEU's. The seed is 12345, or what the variable SACREBLEU_SEED says.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import ne
from typing import Any

import numpy as np
import numpy.typing as npt
from sacrebleu.metrics.base import Metric
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER
from sacrebleu.significance import PairedTest

from transformer.config.languages import language_of
from transformer.config.settings import BleuTokenizer
from transformer.errors import InputError
from transformer.evaluation.score import bleu_metric

Floats = npt.NDArray[np.float64]

# sacreBLEU's own numbers.
RESAMPLES = 1000  # of the sentences, for intervals and for the paired bootstrap
TRIALS = 10_000  # of approximate randomisation

SIGNIFICANT = 0.05  # the largest p of randomisation that is marked, as sacreBLEU marks it
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
    has translated everything as the first one did.
    """

    score: float  # 0 to 100; of a judge, in its own measure
    mean: float  # of the scores of its resamples
    half_width: float  # of the 95 % interval of its resamples
    p_bootstrap: float | None
    p_randomisation: float | None

    @property
    def is_significant(self) -> bool:
        """Whether randomisation finds a difference from the first system."""
        return self.p_randomisation is not None and self.p_randomisation <= SIGNIFICANT


@dataclass(frozen=True)
class MetricComparison:
    """The scores of all systems, in their order, by one metric; the signature names the seed and the resamples too."""

    metric: str
    signature: str
    systems: list[SystemScore]
    digits: int = 2  # behind the point, that are shown


@dataclass(frozen=True)
class Metrics:
    """What systems are compared by: sacreBLEU's metrics.

    BLEU and chrF are those of `evaluate`. TER has sacreBLEU's default settings, and so ignores case. Chinese and
    Japanese have no spaces between words, so that TER counts their characters: `--ter-normalized --ter-asian-support`.
    """

    tgt_lang: str
    tokenize: BleuTokenizer | None
    lowercase: bool
    bleu: Any  # sacreBLEU's BLEU; its `tokenizer` is set at run time
    chrf: CHRF
    ter: TER

    @classmethod
    def of(cls, *, tgt_lang: str, tokenize: BleuTokenizer | None, lowercase: bool) -> "Metrics":
        """The metrics for a language. Raises InputError where sacreBLEU cannot score it."""
        has_no_spaces = language_of(tgt_lang, "data.tgt_lang") in ("zh", "ja")
        return cls(
            tgt_lang=tgt_lang,
            tokenize=tokenize,
            lowercase=lowercase,
            bleu=bleu_metric(tgt_lang, tokenize=tokenize, lowercase=lowercase),
            chrf=CHRF(lowercase=lowercase),
            ter=_Ter(by_character=has_no_spaces),
        )

    def bleu_interval(self, hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Interval:
        """BLEU with a bootstrap interval; by a metric of its own, whose signature then names the resamples."""
        metric = bleu_metric(self.tgt_lang, tokenize=self.tokenize, lowercase=self.lowercase)
        return _bootstrap(metric, hypotheses, references)


class _Ter(TER):
    """TER that counts the edits of a translation once, since that takes longer than all the rest.

    Both tests need them, and systems often agree on a sentence. The method that is overridden is private to sacreBLEU:
    should its name change one day, the results stay the same and take longer.
    """

    def __init__(self, *, by_character: bool) -> None:
        super().__init__(normalized=by_character, asian_support=by_character)
        self._counted: dict[tuple[str, str], list[float]] = {}  # by translation and references

    def _compute_segment_statistics(self, hypothesis: str, ref_kwargs: dict[str, Any]) -> list[float]:
        key = (hypothesis, str(ref_kwargs))
        if key not in self._counted:
            self._counted[key] = super()._compute_segment_statistics(hypothesis, ref_kwargs)
        return self._counted[key]


def resampling_seed() -> str:
    """The seed of sacreBLEU's tests: digits, or `none`. Raises InputError for what sacreBLEU could not read."""
    seed = os.environ.get("SACREBLEU_SEED", "12345").lower()
    if re.fullmatch("0*[1-9][0-9]*|none", seed) is None:  # of 0 its tests make no seed
        raise InputError(f"SACREBLEU_SEED={seed}: this is not a seed: set the variable to a number from 1, or unset it")
    return seed


def compare_systems(
    systems: Mapping[str, Sequence[str]], references: Sequence[Sequence[str]], *, metrics: Metrics
) -> list[MetricComparison]:
    """Score the translations of all systems, and test each against those of the first one.

    The systems are by name; the references are one or several lists of as many texts.
    """
    # Both tests score all systems by all metrics; the resamples are those of the bootstrap.
    by_name: dict[str, Metric] = {"BLEU": metrics.bleu, "CHRF": metrics.chrf, "TER": metrics.ter}
    named = list(systems.items())
    bootstrap = PairedTest(named, by_name, references, test_type="bs", n_samples=RESAMPLES)
    randomisation = PairedTest(named, by_name, references, test_type="ar", n_samples=TRIALS)
    signatures, resampled = bootstrap()
    _, randomised = randomisation()

    # Systems with the same translations are not tested.
    _, baseline = named[0]
    changed = [sum(map(ne, translations, baseline)) for translations in systems.values()]

    comparisons = []
    for name, signature in signatures.items():
        results = zip(resampled[name], randomised[name], changed, strict=True)
        scores = [_system_score(bootstrapped, permuted, changed=count) for bootstrapped, permuted, count in results]
        comparisons.append(MetricComparison(metric=name, signature=str(signature), systems=scores))
    return comparisons


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
