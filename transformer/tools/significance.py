"""How far a score may be off because the test set is one sample of many."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from transformer.evaluation.score import bleu_metric

RESAMPLES = 1000  # sacreBLEU's own number


@dataclass(frozen=True)
class Interval:
    """A BLEU score and the half-width of its 95 % interval under resampling of the test sentences."""

    bleu: float
    half_width: float
    signature: str


def bootstrap_bleu(hypotheses: Sequence[str], references: Sequence[str], *, tgt_lang: str) -> Interval:
    """BLEU with a bootstrap interval (Koehn, 2004) by sacreBLEU, always from the same resamples.

    The interval is about the choice of the sentences alone: another seed of the training may differ by more.
    """
    bleu = bleu_metric(tgt_lang, lowercase=False)
    score = bleu.corpus_score(hypotheses, [references], n_bootstrap=RESAMPLES)
    signature = str(bleu.get_signature())

    # The object keeps its interval in private fields; what it prints is sacreBLEU's public format.
    printed = json.loads(score.format(width=6, signature=signature, is_json=True))
    return Interval(score.score, printed.get("confidence_var", 0.0), signature)  # none where all resamples score 0
