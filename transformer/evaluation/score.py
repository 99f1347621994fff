"""BLEU, chrF and chrF++ as the sacreBLEU command line prints them, each with its signature.

sacreBLEU scores anything without complaint: it cuts unequal lists to the shorter, takes a string for a list of letters,
and counts tokenised text as it stands. `score` refuses all of that. `measure` refuses bad lists only: it is for a model
that is still learning to write, whose text may look like anything.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.tokenizers.tokenizer_spm import SPM_MODELS
from sacrebleu.utils import SACREBLEU_DIR

from transformer import plugins
from transformer.config.languages import language_of
from transformer.config.settings import BleuTokenizer, DataConfig
from transformer.errors import InputError
from transformer.records import PaperScores, Scores

Scorer = Callable[..., Scores]  # takes hypotheses, and one list of references or more

_MECAB = ("ja", "ko")
_RENAMED = {"spm": "flores101"}  # sacreBLEU's newer name of the same model, which its signature shows, too
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
    tgt_lang: str,
    tokenize: BleuTokenizer | None = None,
    lowercase: bool = False,
) -> Scores:
    """Score plain text against one reference for each sentence, or several.

    BLEU's words are those of `tokenize`; of None, those of the language.

    Raises InputError for what cannot be compared fairly: whatever `measure` and `check_plain_text` refuse.
    """
    _check_lists(hypotheses, references)
    check_plain_text(hypotheses, *references)
    return measure(hypotheses, *references, tgt_lang=tgt_lang, tokenize=tokenize, lowercase=lowercase)


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
    tgt_lang: str,
    tokenize: BleuTokenizer | None = None,
    lowercase: bool = False,
) -> Scores:
    """The scores that `score` gives, whatever the text looks like.

    Raises InputError unless there are as many hypotheses as references of each kind, at least one, in lists of texts;
    and where `check_language` does.
    """
    _check_lists(hypotheses, references)
    bleu = bleu_metric(tgt_lang, tokenize=tokenize, lowercase=lowercase)
    chrf = CHRF(lowercase=lowercase)
    chrf_plus_plus = CHRF(word_order=2, lowercase=lowercase)
    return Scores(
        bleu=bleu.corpus_score(hypotheses, references).score,
        bleu_signature=str(bleu.get_signature()),  # complete only after the score
        chrf=chrf.corpus_score(hypotheses, references).score,
        chrf_signature=str(chrf.get_signature()),
        chrf_plus_plus=chrf_plus_plus.corpus_score(hypotheses, references).score,
        chrf_plus_plus_signature=str(chrf_plus_plus.get_signature()),
    )


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


def check_language(tgt_lang: str, *, tokenize: BleuTokenizer | None = None, key: str = "data.tgt_lang") -> None:
    """Raise InputError unless this is a language code, and what its scores need is there; `key` is what was set."""
    bleu_metric(tgt_lang, tokenize=tokenize, lowercase=False, key=key)


def choose_scorer(*, tgt_lang: str, tokenize: BleuTokenizer | None, lowercase: bool, paper_bleu: bool) -> Scorer:
    """`score` for a language, with the papers' BLEU beside it if `paper_bleu` asks for that.

    Raises InputError at once for a language that cannot be scored, or whose tokenizer is not installed.
    """
    check_language(tgt_lang, tokenize=tokenize)
    scorer = partial(score, tgt_lang=tgt_lang, tokenize=tokenize, lowercase=lowercase)
    if not paper_bleu:
        return scorer
    return plugins.find("score", "paper_bleu")(scorer, tgt_lang=tgt_lang, lowercase=lowercase)


def check_scores(data: DataConfig) -> None:
    """Raise InputError unless the test sets and the dev set of a training can be scored, each in its language."""
    for key, tgt_lang in data.tgt_langs().items():
        if not key.startswith(("train.", "extra.")):
            check_language(tgt_lang, tokenize=data.bleu_tokenize, key=f"data.{key}")


def format_scores(scores: Scores) -> str:
    """The scores, for people. Print `format_signatures` near them: a score means nothing without."""
    line = f"BLEU {scores.bleu:.2f}, chrF {scores.chrf:.2f}"
    if scores.chrf_plus_plus is not None:
        line += f", chrF++ {scores.chrf_plus_plus:.2f}"
    if isinstance(scores, PaperScores):
        line += f", BLEU as papers count {scores.paper_bleu:.2f}"
    for name, judgement in scores.judges.items():
        line += f", {name} {judgement.system:.4f}"
    return line


def format_signatures(scores: Scores) -> list[str]:
    """How each of the scores was made, a line each."""
    lines = [f"BLEU: {scores.bleu_signature}", f"chrF: {scores.chrf_signature}"]
    if scores.chrf_plus_plus_signature is not None:
        lines.append(f"chrF++: {scores.chrf_plus_plus_signature}")
    if isinstance(scores, PaperScores):
        lines.append(f"BLEU as papers count: {scores.paper_bleu_signature}")
    lines += [f"{name}: {judgement.describe()}" for name, judgement in scores.judges.items()]
    return lines


def bleu_metric(tgt_lang: str, *, tokenize: BleuTokenizer | None, lowercase: bool, key: str = "data.tgt_lang") -> BLEU:
    """The metric with a tokenizer of sacreBLEU; of None, the language's: zh, ja and ko have their own, all others 13a.

    `key` is what errors call the language by. Raises InputError as `check_language` does.
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
    reason = " ".join(str(error).split())[:200]
    model = SPM_MODELS.get(tokenizer)
    if model is None:
        extra = tokenizer.partition("-")[0]
        is_installed = isinstance(error, AssertionError)  # with another dictionary
        what = f"another dictionary ({reason})" if is_installed else "a tokenizer that is not installed"
        return f"BLEU with {tokenizer} needs {what}: pip install 'transformer-mt[{extra}]'"

    path = Path(SACREBLEU_DIR, "models", Path(model["url"]).name)
    return (
        f"BLEU with {tokenizer} needs the SentencePiece model {path}, which cannot be read or fetched ({reason}): "
        f"put {model['url']} there, or run this once where there is a network and copy the file "
        "(the environment variable SACREBLEU names another folder for it)"
    )


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
