"""BLEU as papers print it, for comparison with their tables only: a run's own score is sacreBLEU's.

This is what tensor2tensor's get_ende_bleu.sh does: translations and references are tokenised by Moses, words are split
at hyphens ("rich-text format" becomes "rich ##AT##-##AT## text format"), and n-grams are counted as multi-bleu.perl
counts them. The tokens change the number: split hyphens alone add 0.7 to 1.0 to a German score.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version

from sacrebleu.metrics.bleu import BLEU, BLEUScore

from transformer.config.languages import language_of
from transformer.errors import InputError
from transformer.evaluation.metrics import METRICS
from transformer.evaluation.metrics import PAPER_BLEU as FIELD
from transformer.plugins import Measure, Measured, ScoreSettings
from transformer.registry import install_command

_HYPHEN = re.compile(rb"(\S)-(\S)")  # of bytes, as Perl reads its input: a letter of two of them is two


def _prepare(text: ScoreSettings) -> Measure:
    """What measures it. Raises InputError for a language that Moses cannot cut, or where that is not installed."""
    language = language_of(text.tgt_lang, "data.tgt_lang")
    return partial(_measure, language=language, lowercase=text.lowercase, tokenise=_load_moses(language))


PAPER_BLEU = replace(METRICS[FIELD], prepare=_prepare)


def _measure(
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    _: object,
    *,
    language: str,
    lowercase: bool,
    tokenise: Callable[[str], str],
) -> Measured:
    """The BLEU of the texts as papers tokenise them, and its signature."""
    tokenised = [[split_hyphens(tokenise(text)) for text in texts] for texts in (hypotheses, *references)]
    bleu, signature = multi_bleu(*tokenised, lowercase=lowercase)
    tokens = f"moses-{language}+hyphens-split|sacremoses:{version('sacremoses')}"
    return Measured(bleu.score, signature.replace("tok:none", f"tok:{tokens}"))


def split_hyphens(text: str) -> str:
    """Tokenised text with each hyphen inside a word as a token of its own, in the spelling of Stanford's WMT data."""
    return _HYPHEN.sub(rb"\1 ##AT##-##AT## \2", text.encode()).decode()


def multi_bleu(hypotheses: Sequence[str], *references: Sequence[str], lowercase: bool) -> tuple[BLEUScore, str]:
    """BLEU of text whose tokens are separated by spaces, as multi-bleu.perl counts it, and sacreBLEU's signature.

    Nothing is smoothed: without a matching 4-gram the score is 0. With several references, the one whose length is
    closest counts for the brevity penalty, and of two as close the shorter one.
    """
    metric = BLEU(tokenize="none", smooth_method="none", lowercase=lowercase, force=True)
    bleu = metric.corpus_score(hypotheses, references)
    return bleu, str(metric.get_signature())


def _load_moses(language: str) -> Callable[[str], str]:
    """Moses' tokenizer of a language, text to text. Raises InputError where there is none."""
    if language in ("zh", "ja"):
        raise InputError(f"paper_bleu: Moses has no tokeniser for {language}: leave it out")
    try:
        from sacremoses import MosesTokenizer
    except ImportError as error:
        raise InputError(f"paper_bleu needs Moses' tokenizer: {install_command('moses')}") from error

    return partial(MosesTokenizer(lang=language).tokenize, return_str=True)
