"""BLEU and chrF as the sacreBLEU command line prints them, each with its signature.

sacreBLEU scores anything without complaint: it cuts unequal lists to the shorter, takes a string for a list of letters,
and counts tokenised text as it stands. All of that is refused here.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from transformer.errors import InputError
from transformer.records import Scores

_SUBWORDS = re.compile(r"▁|\w@@(?:\s|$)")
_TOKENISED = re.compile(r"\w [.,](?:\s|$)")  # not " ?" or " !", which is how French writes


def score(hypotheses: Sequence[str], references: Sequence[str], *, tgt_lang: str) -> Scores:
    """Score plain text against one reference each. Raises InputError for what cannot be compared fairly.

    That is what `measure` refuses, and hypotheses in subwords, or tokenised where the references are not.
    """
    _check_lists(hypotheses, references)
    if _share(_SUBWORDS, hypotheses) > _share(_SUBWORDS, references) + 0.1:
        raise InputError("the hypotheses are in subwords (▁ or @@): join them into plain text before scoring")
    if _share(_TOKENISED, hypotheses) > 0.5 and _share(_TOKENISED, references) < 0.1:
        raise InputError("the hypotheses are tokenised ('word .') but the references are not: detokenise them first")
    return measure(hypotheses, references, tgt_lang=tgt_lang)


def measure(hypotheses: Sequence[str], references: Sequence[str], *, tgt_lang: str) -> Scores:
    """`score` without a look at the text, which may be anything while a model is learning to write.

    Raises InputError unless there are as many hypotheses as references, at least one, in two lists of texts.
    """
    _check_lists(hypotheses, references)
    bleu = _bleu(tgt_lang)
    chrf = CHRF()
    bleu_score, chrf_score = (metric.corpus_score(hypotheses, [references]).score for metric in (bleu, chrf))
    return Scores(
        bleu=bleu_score,
        bleu_signature=str(bleu.get_signature()),
        chrf=chrf_score,
        chrf_signature=str(chrf.get_signature()),
    )


@dataclass(frozen=True)
class Bleu:
    """A corpus' BLEU, 0 to 100, its signature, and the tokens of the hypotheses over those of the references."""

    score: float
    signature: str
    length_ratio: float


def measure_bleu(hypotheses: Sequence[str], references: Sequence[str], *, tgt_lang: str) -> Bleu:
    """The BLEU of `measure` with its length ratio, and without chrF, which takes longer. Raises as `measure` does."""
    _check_lists(hypotheses, references)
    bleu = _bleu(tgt_lang)
    found = bleu.corpus_score(hypotheses, [references])
    return Bleu(found.score, str(bleu.get_signature()), found.ratio)


def _bleu(tgt_lang: str) -> BLEU:
    """sacreBLEU's BLEU, with its tokenizer for the language."""
    language = re.split("[-_]", tgt_lang)[0].lower()  # zh-CN is cut into characters as zh is
    try:
        return BLEU(trg_lang=language, force=True)  # force: no warning of its own about tokenised text
    except RuntimeError as error:  # Japanese and Korean need a tokenizer that is not installed
        raise InputError(f"BLEU for {language} needs more: pip install 'sacrebleu[{language}]'") from error


def _check_lists(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    for name, texts in (("hypotheses", hypotheses), ("references", references)):
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise InputError(f"the {name} must be a list of texts, one for each sentence")
    if len(hypotheses) != len(references):
        raise InputError(f"{len(hypotheses)} hypotheses cannot be scored against {len(references)} references")
    if not hypotheses:
        raise InputError("there are no sentences to score")


def _share(pattern: re.Pattern[str], lines: Sequence[str]) -> float:
    """How many of the lines, from 0 to 1, hold the pattern."""
    return sum(pattern.search(line) is not None for line in lines) / len(lines)
