"""Minimum Bayes risk: of several translations of a line, the one that has the most in common with the others.

The most probable translation may be one that hardly any other agrees with. Here each is scored against all of them, as
if they were its references, and the best is that whose mean score is the largest. Among the best of a search, each
reference weighs its probability (Kumar and Byrne 2004, "Minimum Bayes-Risk Decoding for Statistical Machine
Translation"); samples are drawn by it already, so each weighs the same (Eikema and Aziz 2020, "Is MAP Decoding All You
Need?").

A line with n translations needs n^2 scores of sentences. They are sacreBLEU's, computed of all pairs at once.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from sacrebleu.metrics.helpers import extract_all_char_ngrams, extract_word_ngrams

from transformer.checkpoint import find_checkpoint
from transformer.config.jobs import TranslateJob
from transformer.config.settings import DataConfig, Rerank
from transformer.decoding.output import Translation
from transformer.evaluation.metrics import bleu_metric

Floats = npt.NDArray[np.float64]

_CHARACTERS = 6  # the longest n-grams of chrF
_WORDS = 4  # and of BLEU
_BETA = 2  # of chrF: how many times as much recall counts


def least_risk(job: TranslateJob) -> Callable[[Sequence[Translation]], list[Translation]]:
    """What puts the translations of one line in the order of `job.rerank`: each text once, the best first.

    BLEU's words are those of the scores of the run, or of its direction under `job.tag`. Raises InputError where
    sacreBLEU lacks what that needs.
    """
    scores = sentence_chrf
    if job.rerank is Rerank.bleu:
        data = find_checkpoint(Path(job.run_dir), job.checkpoint).settings("data", DataConfig)
        _, tgt_lang = data.languages_under(job.tag)
        tokenizer = bleu_metric(tgt_lang, tokenize=data.bleu_tokenize, lowercase=False).tokenizer

        def scores(texts: Sequence[str]) -> Floats:
            return sentence_bleu([tokenizer(text.rstrip()) for text in texts])

    def choose(translations: Sequence[Translation]) -> list[Translation]:
        log_probs = np.array([translation.log_prob for translation in translations], dtype=np.float64)
        if np.isnan(log_probs).any():  # of a blank line
            return list(translations)

        weights = np.ones(len(translations))
        if not job.sample.is_wanted and np.isfinite(log_probs.max()):
            weights = np.exp(log_probs - log_probs.max())
        by_text: dict[str, float] = {}
        for translation, weight in zip(translations, weights, strict=True):
            by_text[translation.text] = by_text.get(translation.text, 0.0) + float(weight)

        shares = np.array(list(by_text.values())) / sum(by_text.values())
        expected = dict(zip(by_text, scores(list(by_text)) @ shares, strict=True))
        first = {translation.text: translation for translation in reversed(translations)}
        ranked = sorted(by_text, key=lambda text: -expected[text])  # of equals, the one that was found first
        return [replace(first[text], expected_score=float(expected[text])) for text in ranked]

    return choose


def sentence_chrf(texts: Sequence[str]) -> Floats:
    """chrF, from 0 to 100, of each text (row) against each text (column) as its reference, as sacreBLEU's of one pair.

    Precision and recall are means over those lengths of n-grams that both texts have.
    """
    grams = [extract_all_char_ngrams(text, _CHARACTERS) for text in texts]
    precision, recall, lengths = np.zeros((3, len(texts), len(texts)))
    for n in range(_CHARACTERS):
        matches, totals = _matches([of_text[n] for of_text in grams])
        are_there = np.outer(totals > 0, totals > 0)
        known = np.maximum(totals, 1)
        precision += matches / known[:, None]
        recall += matches / known[None, :]
        lengths += are_there

    # The means; where there is nothing in common, both sums are 0, and so is the score.
    precision, recall = precision / np.maximum(lengths, 1), recall / np.maximum(lengths, 1)
    weight = _BETA**2
    nothing = precision + recall == 0
    return 100 * (1 + weight) * precision * recall / np.where(nothing, 1, weight * precision + recall)


def sentence_bleu(tokenized: Sequence[str]) -> Floats:
    """BLEU, from 0 to 100, of each text (row) against each (column), as sacreBLEU's `sentence_bleu` of one pair.

    Each text has its words between spaces. Lengths of n-grams that the hypothesis has none of are left out, and the
    k-th of the others without a match counts as 2^-k matches (Chen and Cherry 2014).
    """
    words = [text.split() for text in tokenized]
    sizes = np.array([len(of_text) for of_text in words], dtype=np.float64)
    logs, halves = np.zeros((2, len(words), len(words)))
    orders = np.zeros(len(words))
    is_any = np.zeros((len(words), len(words)), dtype=bool)
    for n in range(1, _WORDS + 1):
        matches, totals = _matches([extract_word_ngrams(of_text, n) for of_text in words])
        is_there = totals > 0
        halves += matches == 0
        counted = np.where(matches > 0, matches, 0.5**halves)
        logs += np.where(is_there[:, None], np.log(counted / np.maximum(totals, 1)[:, None]), 0.0)
        orders += is_there
        is_any |= matches > 0

    brevity = np.minimum(0.0, 1 - sizes[None, :] / np.maximum(sizes, 1)[:, None])
    return np.where(is_any, 100 * np.exp(logs / np.maximum(orders, 1)[:, None] + brevity), 0.0)


def _matches(grams: Sequence["Counter[str]"]) -> tuple[Floats, Floats]:
    """How many n-grams each two texts share, as often as both have them; and how many each has.

    min(a, b) is the number of levels t = 1, 2, ... that both a and b reach: so each level is a product of matrices.
    """
    # What one text alone has, most of the long n-grams, it shares with itself only.
    n_texts = Counter(gram for of_text in grams for gram in of_text)
    column = {gram: n for n, gram in enumerate(gram for gram, count in n_texts.items() if count > 1)}
    counts = np.zeros((len(grams), len(column)), dtype=np.float32)
    for row, of_text in zip(counts, grams, strict=True):
        for gram in of_text.keys() & column.keys():
            row[column[gram]] = of_text[gram]

    matches = np.zeros((len(grams), len(grams)))
    level = 1
    while (reached := counts >= level).any():
        reached = reached[:, reached.any(axis=0)].astype(np.float32)
        matches += reached @ reached.T
        level += 1
    totals = np.array([of_text.total() for of_text in grams], dtype=np.float64)
    np.fill_diagonal(matches, totals)
    return matches, totals
