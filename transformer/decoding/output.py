"""Translations and scores with what is known of them, and the lines that `translate` and `score` write of them.

There are three formats. `text` is the translation itself, a line for each line of input. `tsv` has a row for each
translation and no quoting, so characters that would break a row become spaces. `jsonl` has an object for each line of
input, and keeps every character. Log-probabilities are natural logarithms, written with six decimals.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from transformer.config.settings import LineFormat

# Characters that some reader takes for the end of a cell or of a row: controls, and the two separators of Unicode.
_BREAKS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


@dataclass(frozen=True)
class Alignment:
    """Which source piece each piece of a translation is aligned to.

    `source_of[i]` is the index, counted from 0, of the source piece that belongs to `pieces[i]`. A piece is written as
    the tokenizer has it, with U+2581 for a space. EOS is not among them.
    """

    source_pieces: list[str]
    pieces: list[str]
    source_of: list[int]


@dataclass(frozen=True)
class Translation:
    """One translation of a text.

    A `finished` translation came to its end by itself; another one was cut at the maximum length. `log_prob` is the sum
    of the log-probabilities of its pieces, and of EOS if it is finished. `score` is `log_prob` over the length penalty,
    by which the search ranks, and `length` the number of log-probabilities in that sum. All three are None for a blank
    text, which is not searched. `alignment` is None unless it was asked for, and `expected_score`, from 0 to 100,
    unless the translations were compared with one another.
    """

    text: str
    log_prob: float | None
    score: float | None
    finished: bool
    alignment: Alignment | None
    expected_score: float | None = None
    length: int | None = None


BLANK = Translation("", None, None, finished=True, alignment=None)


@dataclass(frozen=True)
class Scored:
    """How probable a given translation is.

    `log_prob` is the sum of `piece_log_probs`, one for each of `pieces`, of which the last is EOS; `score` is that over
    the length penalty. Both are None, and the lists empty, where the source or the translation is blank.
    """

    log_prob: float | None
    score: float | None
    pieces: list[str]
    piece_log_probs: list[float]


UNSCORED = Scored(None, None, [], [])


def format_translations(by_line: Sequence[Sequence[Translation]], kind: LineFormat, *, first_line: int) -> str:
    """The translations of some lines of input, as lines of output; the first of them is line `first_line`."""
    numbered = enumerate(by_line, first_line)
    match kind:
        case LineFormat.text:
            lines = [best.text for [best] in by_line]
        case LineFormat.tsv:
            lines = [
                tsv_row(number, rank, _number(translation.log_prob), _number(translation.score), translation.text)
                for number, translations in numbered
                for rank, translation in enumerate(translations, 1)
            ]
        case LineFormat.jsonl:
            lines = [
                json_row({"line": number, "translations": [_translation_as_json(one) for one in translations]})
                for number, translations in numbered
            ]
    return "".join(f"{line}\n" for line in lines)


def format_log_probs(by_line: Sequence[Scored], kind: LineFormat, *, first_line: int, by_piece: bool) -> str:
    """The scores of some pairs, a line each; the first of them is line `first_line`. Only jsonl can go `by_piece`."""
    numbered = enumerate(by_line, first_line)
    match kind:
        case LineFormat.text:
            lines = [_number(scored.log_prob) for scored in by_line]
        case LineFormat.tsv:
            lines = [
                tsv_row(number, _number(scored.log_prob), _number(scored.score), len(scored.pieces))
                for number, scored in numbered
            ]
        case LineFormat.jsonl:
            lines = [
                json_row({"line": number, **_score_as_json(scored, by_piece=by_piece)}) for number, scored in numbered
            ]
    return "".join(f"{line}\n" for line in lines)


def _translation_as_json(translation: Translation) -> dict[str, object]:
    value: dict[str, object] = {
        "text": translation.text,
        "log_prob": rounded(translation.log_prob),
        "score": rounded(translation.score),
        "finished": translation.finished,
    }
    if translation.expected_score is not None:
        value["expected_score"] = round(translation.expected_score, 6)
    if translation.alignment is not None:
        value |= asdict(translation.alignment)
    return value


def _score_as_json(scored: Scored, *, by_piece: bool) -> dict[str, object]:
    value: dict[str, object] = {
        "log_prob": rounded(scored.log_prob),
        "score": rounded(scored.score),
        "length": len(scored.pieces),
    }
    if by_piece:
        value["pieces"] = scored.pieces
        value["piece_log_probs"] = [rounded(log_prob) for log_prob in scored.piece_log_probs]
    return value


def tsv_row(*cells: object) -> str:
    """One line of tsv."""
    return "\t".join(_BREAKS.sub(" ", str(cell)) for cell in cells)


def json_row(value: Mapping[str, object]) -> str:
    """One line of JSON. Only characters that some reader takes for the end of a line are escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _BREAKS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"


def rounded(value: float | None) -> float | None:
    """A number as JSON can hold it: infinity, of a translation that the model thinks impossible, becomes null."""
    return None if value is None or not math.isfinite(value) else round(value, 6)
