"""BLEU, chrF, chrF++ and TER as the sacreBLEU command line prints them, each with its signature; and what a job adds.

sacreBLEU scores anything without complaint: it cuts unequal lists to the shorter, takes a string for a list of letters,
and counts tokenised text as it stands. `score` refuses all of that. `measure` refuses bad lists only: it is for a model
that is still learning to write, whose text may look like anything.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from sacrebleu.metrics.chrf import CHRF

from transformer.config.settings import BleuTokenizer, DataConfig
from transformer.errors import InputError
from transformer.evaluation.metrics import ALWAYS, bleu_metric, check_metrics, choose, measure_all, named, named_mean
from transformer.plugins import ScoreMetric, ScoreSettings
from transformer.records import Scores

Scorer = Callable[..., Scores]  # takes hypotheses, one list of references or more, and `sources`

_SUBWORDS = re.compile(r"▁|\w@@(?:\s|$)")
_TOKENISED = re.compile(r"\w [.,](?:\s|$)")  # not " ?" or " !", which is how French writes


@dataclass(frozen=True)
class Bleu:
    """BLEU by itself, with the length of the hypotheses over that of the references, both counted as BLEU does."""

    score: float
    signature: str
    length_ratio: float


def score(
    hypotheses: Sequence[str],
    *references: Sequence[str],
    sources: Sequence[str] | None = None,
    text: ScoreSettings,
    metrics: Mapping[str, ScoreMetric] = ALWAYS,
) -> Scores:
    """Score plain text against one reference for each sentence, or several; `text` says what text it is.

    Raises InputError for what cannot be compared fairly: whatever `measure` and `check_plain_text` refuse.
    """
    _check_lists(hypotheses, references)
    check_plain_text(hypotheses, *references)
    return measure(hypotheses, *references, sources=sources, text=text, metrics=metrics)


def check_plain_text(hypotheses: Sequence[str], *references: Sequence[str]) -> None:
    """Raise InputError for hypotheses in subwords, or tokenised where the references are not. No list may be empty."""
    reference_lines = [line for lines in references for line in lines]
    if _share(_SUBWORDS, hypotheses) > _share(_SUBWORDS, reference_lines) + 0.1:
        raise InputError("the hypotheses are in subwords (▁ or @@): join them into plain text before scoring")
    if _share(_TOKENISED, hypotheses) > 0.5 and _share(_TOKENISED, reference_lines) < 0.1:
        raise InputError("the hypotheses are tokenised ('word .') but the references are not: detokenise them first")


def measure(
    hypotheses: Sequence[str],
    *references: Sequence[str],
    sources: Sequence[str] | None = None,
    text: ScoreSettings,
    metrics: Mapping[str, ScoreMetric] = ALWAYS,
) -> Scores:
    """The scores that `score` gives, whatever the text looks like.

    Raises InputError unless there are as many hypotheses as references of each kind, at least one, in lists of texts;
    and where `bleu_metric` does.
    """
    _check_lists(hypotheses, references)
    return measure_all(metrics, text, hypotheses, references, sources)


def measure_bleu(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    tgt_lang: str,
    tokenize: BleuTokenizer | None = None,
    lowercase: bool = False,
) -> Bleu:
    """The BLEU of `measure` with its length ratio, and without chrF, which takes longer. Raises as `measure` does."""
    _check_lists(hypotheses, [references])
    metric = bleu_metric(tgt_lang, tokenize=tokenize, lowercase=lowercase)
    bleu = metric.corpus_score(hypotheses, [references])
    return Bleu(bleu.score, str(metric.get_signature()), bleu.ratio)


def measure_chrf(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """The chrF of `measure` by itself. Raises InputError for bad lists."""
    _check_lists(hypotheses, [references])
    return CHRF().corpus_score(hypotheses, [references]).score


def choose_scorer(text: ScoreSettings, metrics: Mapping[str, ScoreMetric] = ALWAYS) -> Scorer:
    """`score` for such text, by these metrics. Raises InputError at once for text that one of them cannot score."""
    check_metrics(metrics, text)
    return partial(score, text=text, metrics=metrics)


def check_scores(data: DataConfig) -> None:
    """Raise InputError unless the test sets and the dev set of a training can be scored, each in its language."""
    metrics = choose(data.scores)
    for key, tgt_lang in data.tgt_langs().items():
        if not key.startswith(("train.", "extra.")):
            bleu_metric(tgt_lang, tokenize=data.bleu_tokenize, key=f"data.{key}")
            check_metrics(metrics, ScoreSettings(tgt_lang, data.bleu_tokenize))


def format_scores(scores: Scores) -> str:
    """The scores, for people. Print `format_signatures` near them: a score means nothing without."""
    shown = [f"{one.name} {one.value:.{one.digits}f}" for one in named(scores).values()]
    return ", ".join([*shown, *(f"{name} {judgement.system:.4f}" for name, judgement in scores.judges.items())])


def format_mean(mean: Mapping[str, float], sets: Mapping[str, Scores]) -> str:
    """The mean of the scores of these sets as `format_scores` shows each of them."""
    return ", ".join(f"{one.name} {one.value:.{one.digits}f}" for one in named_mean(mean, sets).values())


def format_signatures(scores: Scores) -> list[str]:
    """How each of the scores was made, a line each."""
    shown = [f"{one.name}: {one.signature}" for one in named(scores).values()]
    return shown + [f"{name}: {judgement.describe()}" for name, judgement in scores.judges.items()]


def _check_lists(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    """Raise InputError unless these are lists of texts, all of one length, and not empty."""
    _check_texts(hypotheses, "hypotheses")
    for texts in references:
        _check_texts(texts, "references")
        if len(hypotheses) != len(texts):
            raise InputError(f"{len(hypotheses)} hypotheses cannot be scored against {len(texts)} references")
    if not hypotheses:
        raise InputError("there are no sentences to score")


def _check_texts(texts: Sequence[str], name: str) -> None:
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise InputError(f"the {name} must be a list of texts, one for each sentence")


def _share(pattern: re.Pattern[str], lines: Sequence[str]) -> float:
    """The share of lines, from 0 to 1, in which the pattern occurs."""
    return sum(pattern.search(line) is not None for line in lines) / len(lines)
