"""The table of metrics: what every score is called, where it is kept, how it is shown and how it is measured.

    METRICS      those of the package, by their fields in `records.Scores`
    choose       those of every evaluation, and what a plug-in adds that was asked for by name
    named        the scores of a set, each with all that it takes to show it

Whatever shows, compares or keeps scores reads this table. To add a metric of the package's own is a row here, and its
two fields in `Scores`; one of another package comes by `plugins`, and is kept in `Scores.others`.
"""

import logging
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from sacrebleu.metrics.base import Metric
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER
from sacrebleu.tokenizers.tokenizer_spm import SPM_MODELS
from sacrebleu.utils import SACREBLEU_DIR

from transformer import registry
from transformer.config.languages import language_of
from transformer.config.settings import BleuTokenizer, require
from transformer.errors import InputError, in_a_line
from transformer.plugins import Measure, Measured, ScoreMetric, ScoreSettings
from transformer.records import NamedScore, Scores
from transformer.registry import install_command

log = logging.getLogger(__name__)

PAPER_BLEU = "paper_bleu"

_MECAB = ("ja", "ko")
_MOST_EDITS = 10**8  # that sacreBLEU's TER keeps for a line, 8 bytes each: its words times those of the reference
_RENAMED = {"spm": "flores101"}  # sacreBLEU's newer name of the same model, which its signature shows, too


# ---- sacreBLEU's ----------------------------------------------------------------------------------------------------


class SacreBleu:
    """A measure by a metric of sacreBLEU, whose own tests of significance can have that metric."""

    def __init__(self, metric: Metric) -> None:
        self.metric: Any = metric  # a BLEU's `tokenizer` is set at run time

    def __call__(self, hypotheses: Sequence[str], references: Sequence[Sequence[str]], _: object) -> Measured:
        """The score of the corpus, and sacreBLEU's signature."""
        score = self.metric.corpus_score(hypotheses, references).score
        return Measured(score, str(self.metric.get_signature()))  # complete only after the score


def _bleu(text: ScoreSettings) -> SacreBleu:
    return SacreBleu(bleu_metric(text.tgt_lang, tokenize=text.tokenize, lowercase=text.lowercase))


def _chrf(text: ScoreSettings, *, word_order: int) -> SacreBleu:
    return SacreBleu(CHRF(word_order=word_order, lowercase=text.lowercase))


def _ter(text: ScoreSettings) -> SacreBleu:
    """TER with sacreBLEU's default settings, so that it ignores case.

    Chinese and Japanese have no spaces between words: their characters are counted (`--ter-normalized
    --ter-asian-support`).
    """
    return SacreBleu(_Ter(by_character=language_of(text.tgt_lang, "data.tgt_lang") in ("zh", "ja")))


class _TooLong(InputError):
    """A line that one metric cannot score; the others can."""


class _Ter(TER):
    """TER that counts the edits of a translation once, since that takes longer than all the rest.

    Both tests of significance need them, and systems often agree on a sentence. The method that is overridden is
    private to sacreBLEU: should its name change one day, the results stay the same and take longer.
    """

    def __init__(self, *, by_character: bool) -> None:
        super().__init__(normalized=by_character, asian_support=by_character)
        self._counted: dict[tuple[str, str], list[float]] = {}  # by translation and references

    def _compute_segment_statistics(self, hypothesis: str, ref_kwargs: dict[str, Any]) -> list[float]:
        words, of_reference = len(hypothesis.split()), max(map(len, ref_kwargs["ref_words"]))
        if words * of_reference > _MOST_EDITS:
            raise _TooLong(
                f"TER: a line of {words:,} words, with a reference of {of_reference:,}: keep one sentence a line"
            )
        key = (hypothesis, str(ref_kwargs))
        if key not in self._counted:
            self._counted[key] = super()._compute_segment_statistics(hypothesis, ref_kwargs)
        return self._counted[key]


def bleu_metric(
    tgt_lang: str, *, tokenize: BleuTokenizer | None = None, lowercase: bool = False, key: str = "data.tgt_lang"
) -> BLEU:
    """The metric with a tokenizer of sacreBLEU; of None, the language's: zh, ja and ko have their own, all others 13a.

    `key` is what errors call the language by. Raises InputError unless this is a language code, and what its tokenizer
    needs is there.
    """
    language = language_of(tgt_lang, key)
    tokenizer = f"{language}-mecab" if language in _MECAB else "zh" if language == "zh" else "13a"
    if tokenize is not None:
        tokenizer = _RENAMED.get(tokenize.name, tokenize.name)
    try:
        return BLEU(tokenize=tokenizer, lowercase=lowercase, force=True)  # force: without sacreBLEU's own warnings
    except (Exception, SystemExit) as error:  # of a package, a file or the network
        raise InputError(_missing(tokenizer, error)) from error


def _missing(tokenizer: str, error: BaseException) -> str:
    """What a tokenizer of sacreBLEU lacks, in words: its package, or the model that it fetches the first time."""
    reason = in_a_line(error)
    model = SPM_MODELS.get(tokenizer)
    if model is None:
        extra = tokenizer.partition("-")[0]
        is_installed = isinstance(error, AssertionError)  # with another dictionary
        what = f"another dictionary ({reason})" if is_installed else "a tokenizer that is not installed"
        return f"BLEU with {tokenizer} needs {what}: {install_command(extra)}"

    path = Path(SACREBLEU_DIR, "models", Path(model["url"]).name)
    return (
        f"BLEU with {tokenizer} needs the SentencePiece model {path}, which cannot be read or fetched ({reason}): "
        f"put {model['url']} there, or run this once where there is a network and copy the file "
        "(the environment variable SACREBLEU names another folder for it)"
    )


# ---- the table ------------------------------------------------------------------------------------------------------


def _paper_bleu(text: ScoreSettings) -> Measure:
    metric: ScoreMetric = registry.find("score", PAPER_BLEU)
    return metric.prepare(text)


METRICS: Mapping[str, ScoreMetric] = {
    "bleu": ScoreMetric("BLEU", _bleu),
    "chrf": ScoreMetric("chrF", partial(_chrf, word_order=0)),
    "chrf_plus_plus": ScoreMetric("chrF++", partial(_chrf, word_order=2)),
    "ter": ScoreMetric("TER", _ter, higher_is_better=False),
    PAPER_BLEU: ScoreMetric("BLEU as papers count", _paper_bleu),
}

ALWAYS: Mapping[str, ScoreMetric] = {field: metric for field, metric in METRICS.items() if field != PAPER_BLEU}


def choose(names: Iterable[str], *, level: int = logging.WARNING) -> dict[str, ScoreMetric]:
    """The metrics of every evaluation, and those of these names.

    One that cannot be had is left out, with a line in the log, where only a run names it: nothing of another package is
    executed then. Where the command line does, InputError is raised.
    """
    chosen = dict(ALWAYS)
    for name in names:
        if name in chosen:
            continue
        try:
            chosen[name] = METRICS[name] if name in METRICS else _of_plugin(name)
        except InputError as error:
            if registry.is_allowed("score", name):
                raise
            log.log(level, "left out: %s", error)
    return chosen


def _of_plugin(name: str) -> ScoreMetric:
    """A metric of another package. Raises InputError for what cannot be one."""
    metric: Any = registry.find("score", name)
    if is_dataclass(metric) and callable(metric):  # its settings are fields, which a ScoreMetric has no room for
        try:
            metric = metric()
        except Exception as error:
            raise _failure(name, error) from error
    if not isinstance(metric, ScoreMetric):
        raise InputError(
            f"the score {name} is of the type {type(metric).__name__}, not transformer.plugins.ScoreMetric"
        )
    try:
        name_score(metric, Measured(0.0, "")).check()
    except ValueError as error:
        raise InputError(f"the score {name}: {error}") from None
    return metric


def check_metrics(metrics: Mapping[str, ScoreMetric], text: ScoreSettings) -> None:
    """Raise InputError where such text cannot be scored by one of these: before any time is spent."""
    for field, metric in metrics.items():
        try:
            metric.prepare(text)
        except InputError:
            raise
        except Exception as error:
            raise _failure(field, error) from error


def measure_all(
    metrics: Mapping[str, ScoreMetric],
    text: ScoreSettings,
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    sources: Sequence[str] | None,
) -> Scores:
    """The scores by all of these metrics. One of another package that fails is left out, and TER of too long a line."""
    own: dict[str, Any] = {}
    others: dict[str, NamedScore] = {}
    for field, metric in metrics.items():
        try:
            measured = measure_one(field, metric, text, hypotheses, references, sources)
        except InputError as error:
            if field in METRICS and not isinstance(error, _TooLong):
                raise
            log.warning("left out: %s", error)
            continue
        if field in METRICS:
            own |= {field: measured.value, signature_of(field): measured.signature}
        else:
            others[field] = name_score(metric, measured)
    return Scores(**own, others=others)


def measure_one(
    field: str,
    metric: ScoreMetric,
    text: ScoreSettings,
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    sources: Sequence[str] | None,
) -> Measured:
    """What a metric says. Raises InputError where that of another package fails, or what it says cannot be a score."""
    try:
        found = metric.prepare(text)(hypotheses, references, sources)
        segments = None if found.segments is None else [float(score) for score in found.segments]
        measured = Measured(float(found.value), found.signature, segments)
        name_score(metric, measured).check()
        if segments is not None:
            require(len(segments) == len(hypotheses), f"{len(segments)} scores of {len(hypotheses)} segments")
            mean = sum(segments) / len(segments)
            is_mean = abs(mean - measured.value) <= 1e-6 * max(1.0, abs(mean))
            require(is_mean, f"its value {measured.value:g} is not its segments' mean, {mean:g}")
    except InputError:
        raise
    except Exception as error:
        raise _failure(field, error) from error
    return measured


def _failure(field: str, error: Exception) -> Exception:
    """What goes wrong in another package, in a line; in this one, as it is."""
    if field in METRICS:
        return error
    return InputError(f"the score {field} fails ({type(error).__name__}: {in_a_line(error)})")


# ---- scores that were measured --------------------------------------------------------------------------------------


def signature_of(field: str) -> str:
    """The field of the signature of a metric."""
    return f"{field}_signature"


def named(scores: Scores) -> dict[str, NamedScore]:
    """The scores of a set, by their fields, in the order of the table: what it lacks is left out, and so are judges."""
    found = {}
    for field, metric in METRICS.items():
        value, signature = getattr(scores, field), getattr(scores, signature_of(field))
        if value is not None:
            found[field] = name_score(metric, Measured(value, signature or ""))
    return {**found, **scores.others}


def mean_of(sets: Mapping[str, Scores], directions: Mapping[str, Hashable]) -> dict[str, float]:
    """The mean of each score that all of these sets have, by field; nothing where all are of one direction.

    There it would say nothing: sets of one direction differ in kind, such as news and changed news.
    """
    if len(set(directions.values())) < 2:
        return {}
    first, *others = (named(scores) for scores in sets.values())
    shared = [field for field in first if all(field in other for other in others)]
    return {field: fmean(scores[field].value for scores in (first, *others)) for field in shared}


def named_mean(mean: Mapping[str, float], sets: Mapping[str, Scores]) -> dict[str, NamedScore]:
    """What `mean_of` has of these sets, as `named` has the scores of one: the signatures are those of some set."""
    of_sets = {field: score for scores in sets.values() for field, score in named(scores).items()}
    return {field: replace(of_sets[field], value=value) for field, value in mean.items() if field in of_sets}


def name_score(metric: ScoreMetric, measured: Measured) -> NamedScore:
    """What a metric says, with its name and how it is shown."""
    return NamedScore(metric.name, measured.value, measured.signature, metric.digits, metric.higher_is_better)
