"""What is known of a translation beside its text, and the lines that commands write of it.

Three formats. `text` is the translation itself, a line for each line of input. `tsv` has a row for each translation and
no quoting, so what would break a row becomes a space. `jsonl` has an object for each line of input, and keeps every
character. A log-probability is natural, and has six decimals.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from transformer.config.settings import LineFormat

# What some reader takes for the end of a cell or of a row: controls, and the two separators of Unicode.
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

    `log_prob` is the sum of the log-probabilities of its pieces, and of the end where it is `finished`: it came to an
    end by itself, not at the greatest length. `score` is `log_prob` over the length penalty, by which the search ranks.
    Both are None for a blank text, which is not searched. `alignment` is there where it was asked for.
    """

    text: str
    log_prob: float | None
    score: float | None
    finished: bool
    alignment: Alignment | None


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


def format_translations(of_lines: Sequence[Sequence[Translation]], kind: LineFormat, *, first_line: int) -> str:
    """The translations of some lines of input, as lines of output; the first of them is line `first_line`."""
    numbered = list(enumerate(of_lines, first_line))
    match kind:
        case LineFormat.text:
            lines = [best.text for [best] in of_lines]
        case LineFormat.tsv:
            lines = [
                _row(number, rank, _number(one.log_prob), _number(one.score), one.text)
                for number, translations in numbered
                for rank, one in enumerate(translations, 1)
            ]
        case LineFormat.jsonl:
            lines = [
                _json({"line": number, "translations": [_as_json(one) for one in translations]})
                for number, translations in numbered
            ]
    return "".join(f"{line}\n" for line in lines)


def format_scores(of_lines: Sequence[Scored], kind: LineFormat, *, first_line: int, by_piece: bool) -> str:
    """The scores of some pairs, a line each; the first of them is line `first_line`. Only jsonl can go `by_piece`."""
    numbered = list(enumerate(of_lines, first_line))
    match kind:
        case LineFormat.text:
            lines = [_number(one.log_prob) for one in of_lines]
        case LineFormat.tsv:
            lines = [
                _row(number, _number(one.log_prob), _number(one.score), len(one.pieces)) for number, one in numbered
            ]
        case LineFormat.jsonl:
            lines = [_json({"line": number, **_score_as_json(one, by_piece=by_piece)}) for number, one in numbered]
    return "".join(f"{line}\n" for line in lines)


def _as_json(translation: Translation) -> dict[str, object]:
    found: dict[str, object] = {
        "text": translation.text,
        "log_prob": _rounded(translation.log_prob),
        "score": _rounded(translation.score),
        "finished": translation.finished,
    }
    if translation.alignment is not None:
        found |= asdict(translation.alignment)
    return found


def _score_as_json(scored: Scored, *, by_piece: bool) -> dict[str, object]:
    found: dict[str, object] = {
        "log_prob": _rounded(scored.log_prob),
        "score": _rounded(scored.score),
        "length": len(scored.pieces),
    }
    if by_piece:
        found |= {"pieces": scored.pieces, "piece_log_probs": [_rounded(value) for value in scored.piece_log_probs]}
    return found


def _row(*cells: object) -> str:
    return "\t".join(_BREAKS.sub(" ", str(cell)) for cell in cells)


def _json(value: Mapping[str, object]) -> str:
    """One line, in readable characters; what some reader takes for the end of a line is escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _BREAKS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"


def _rounded(value: float | None) -> float | None:
    """JSON has no word for infinity: what no model can have written has no number."""
    return None if value is None or not math.isfinite(value) else round(value, 6)
