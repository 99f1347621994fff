"""BLEU and chrF as the sacreBLEU command line prints them, each with its signature.

sacreBLEU scores anything without complaint: it cuts unequal lists to the shorter, takes a string for a list of letters,
and counts tokenised text as it stands. `score` refuses all of that. `measure` refuses bad lists only: it is for a model
that is still learning to write, whose text may look like anything.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from transformer.config.languages import language_of
from transformer.errors import InputError
from transformer.records import PaperScores, Scores

Scorer = Callable[..., Scores]  # takes hypotheses, and one list of references or more

_SUBWORDS = re.compile(r"▁|\w@@(?:\s|$)")
_TOKENISED = re.compile(r"\w [.,](?:\s|$)")  # not " ?" or " !", which is how French writes


@dataclass(frozen=True)
class Bleu:
    """BLEU by itself, with the length of the hypotheses over that of the references, both counted as BLEU does."""

    score: float
    signature: str
    length_ratio: float


def score(hypotheses: Sequence[str], *references: Sequence[str], tgt_lang: str, lowercase: bool = False) -> Scores:
    """Score plain text against one reference for each sentence, or several.

    Raises InputError for what cannot be compared fairly: whatever `measure` and `check_plain_text` refuse.
    """
    _check_lists(hypotheses, references)
    check_plain_text(hypotheses, *references)
    return measure(hypotheses, *references, tgt_lang=tgt_lang, lowercase=lowercase)


def check_plain_text(hypotheses: Sequence[str], *references: Sequence[str]) -> None:
    """Raise InputError for hypotheses in subwords, or tokenised where the references are not. No list may be empty."""
    reference_lines = [line for lines in references for line in lines]
    if _share(_SUBWORDS, hypotheses) > _share(_SUBWORDS, reference_lines) + 0.1:
        raise InputError("the hypotheses are in subwords (▁ or @@): join them into plain text before scoring")
    if _share(_TOKENISED, hypotheses) > 0.5 and _share(_TOKENISED, reference_lines) < 0.1:
        raise InputError("the hypotheses are tokenised ('word .') but the references are not: detokenise them first")


def measure(hypotheses: Sequence[str], *references: Sequence[str], tgt_lang: str, lowercase: bool = False) -> Scores:
    """The scores that `score` gives, whatever the text looks like.

    Raises InputError unless there are as many hypotheses as references of each kind, at least one, in lists of texts;
    and where `check_language` does.
    """
    _check_lists(hypotheses, references)
    bleu = bleu_metric(tgt_lang, lowercase=lowercase)
    chrf = CHRF(lowercase=lowercase)
    return Scores(
        bleu=bleu.corpus_score(hypotheses, references).score,
        bleu_signature=str(bleu.get_signature()),  # complete only after the score
        chrf=chrf.corpus_score(hypotheses, references).score,
        chrf_signature=str(chrf.get_signature()),
    )


def measure_bleu(
    hypotheses: Sequence[str], references: Sequence[str], *, tgt_lang: str, lowercase: bool = False
) -> Bleu:
    """The BLEU of `measure` with its length ratio, and without chrF, which takes longer. Raises as `measure` does."""
    _check_lists(hypotheses, [references])
    metric = bleu_metric(tgt_lang, lowercase=lowercase)
    bleu = metric.corpus_score(hypotheses, [references])
    return Bleu(bleu.score, str(metric.get_signature()), bleu.ratio)


def check_language(tgt_lang: str) -> None:
    """Raise InputError unless this is a language code, and what sacreBLEU needs for that language is installed."""
    bleu_metric(tgt_lang, lowercase=False)


def format_scores(scores: Scores) -> str:
    """The scores, for people. Print `format_signatures` near them: a score means nothing without."""
    line = f"BLEU {scores.bleu:.2f}, chrF {scores.chrf:.2f}"
    if isinstance(scores, PaperScores):
        line += f", BLEU as papers count {scores.paper_bleu:.2f}"
    return line


def format_signatures(scores: Scores) -> list[str]:
    """How each of the scores was made, a line each."""
    lines = [f"BLEU: {scores.bleu_signature}", f"chrF: {scores.chrf_signature}"]
    if isinstance(scores, PaperScores):
        lines.append(f"BLEU as papers count: {scores.paper_bleu_signature}")
    return lines


def bleu_metric(tgt_lang: str, *, lowercase: bool) -> BLEU:
    """The metric with sacreBLEU's tokenizer for the language: zh, ja and ko have their own, all others 13a."""
    language = language_of(tgt_lang, "data.tgt_lang")
    try:
        return BLEU(trg_lang=language, lowercase=lowercase, force=True)  # force: without sacreBLEU's own warnings
    except RuntimeError as error:  # Japanese and Korean need a tokenizer that is not installed
        raise InputError(
            f"BLEU for {language} needs a tokenizer that is not installed: pip install 'transformer-mt[{language}]'"
        ) from error


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
