"""How well systems translate short and long sentences, for `compare` and `report`.

translations, references and the words of each sentence -> score_by_length -> a row for each range of lengths
"""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from transformer.tools.compare.texts import Texts
from transformer.tools.compare.words import ranges
from transformer.tools.significance import Metrics

LENGTHS = (0, 6, 11, 16, 21, 31, 51)  # words, the least of each range of sentences


@dataclass(frozen=True)
class LengthRow:
    """Scores of the sentences whose reference has `least` to `most` words; one for each system."""

    least: int
    most: int | None
    sentences: int
    bleu: list[float]
    bleu_half_width: list[float]  # of the 95 % interval under resampling of these sentences
    chrf: list[float]


def score_by_length(texts: Texts, metrics: Metrics, lengths: Sequence[int]) -> list[LengthRow]:
    """The scores of each range of lengths that there are sentences of; `lengths` are those of the first reference."""
    rows = []
    for number, (least, most) in enumerate(ranges(LENGTHS), 1):
        places = [place for place, length in enumerate(lengths) if bisect(LENGTHS, length) == number]
        if not places:
            continue

        references = [[lines[place] for place in places] for lines in texts.references]
        systems = [[lines[place] for place in places] for lines in texts.translations.values()]
        intervals = [metrics.bleu_interval(lines, references) for lines in systems]
        rows.append(
            LengthRow(
                least,
                most,
                sentences=len(places),
                bleu=[interval.bleu for interval in intervals],
                bleu_half_width=[interval.half_width for interval in intervals],
                chrf=[metrics.chrf.corpus_score(lines, references).score for lines in systems],
            )
        )
    return rows
