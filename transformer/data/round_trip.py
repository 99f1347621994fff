"""Whether target texts come back from the tokenizer, and which key brings them back where they do not.

A reference that does not come back cannot be matched by any translation: even a perfect one loses points.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from transformer.config.settings import Normalization, TokenizerConfig
from transformer.data.tokenizer import Tokenizer
from transformer.vocabulary import UNK

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Change:
    """A text that the tokenizer does not give back, around the first difference."""

    text: str
    decoded: str


@dataclass(frozen=True)
class RoundTrip:
    """How many texts do not come back from the tokenizer as a scorer sees them."""

    checked: int
    changed: int
    unknown: int  # of those that are changed: with a character that has no piece
    example: Change | None  # None: nothing is changed

    @classmethod
    def of(cls, texts: list[str], tokenizer: Tokenizer) -> "RoundTrip":
        """Encode and decode the texts."""
        changed = tokenizer.changed(texts)
        pieces = tokenizer.encode([text for text, _ in changed])
        return cls(
            checked=len(texts),
            changed=len(changed),
            unknown=sum(UNK in ids for ids in pieces),
            example=_around_the_difference(*changed[0]) if changed else None,
        )


def _around_the_difference(text: str, decoded: str) -> Change:
    """Twenty characters from both, ten of them before the first that differs."""
    text = " ".join(text.split())
    decoded = " ".join(decoded.split())
    same = 0
    while text[same : same + 1] == decoded[same : same + 1]:
        same += 1
    start = max(0, same - 10)
    return Change(text[start : start + 20], decoded[start : start + 20])


def warn_of_changes(trips: Mapping[str, RoundTrip | None], config: TokenizerConfig, *, is_given: bool) -> None:
    """Log how many texts of each set do not come back, with an example and what to do about it.

    `is_given` tells of a tokenizer that was not trained here: then no key decides.
    """
    changed = {name: trip for name, trip in trips.items() if trip is not None and trip.changed}
    if not changed:
        return

    counts = ", ".join(f"{trip.changed:,} of {trip.checked:,} in {name}" for name, trip in changed.items())
    example = next(iter(changed.values())).example
    shown = f", such as {example.text!r} -> {example.decoded!r}" if example else ""
    remedy = (
        "the tokenizer is a given one, which decides that: train one, or give another by tokenizer.model"
        if is_given
        else _remedy(list(changed.values()), config)
    )
    log.warning(
        "no translation can equal some of the target texts, since the tokenizer does not give them back: %s%s; %s",
        counts,
        shown,
        remedy,
    )


def _remedy(trips: list[RoundTrip], config: TokenizerConfig) -> str:
    """The keys that bring the text back."""
    keys = []
    if any(trip.unknown for trip in trips):
        is_complete = config.character_coverage == 1.0
        keys.append("tokenizer.byte_fallback=true" + ("" if is_complete else " or tokenizer.character_coverage=1.0"))
    if config.normalization is not Normalization.identity and any(trip.unknown < trip.changed for trip in trips):
        keys.append("tokenizer.normalization=identity")
    return (
        f"set {' and '.join(keys)}" if keys else "no key changes that: U+2581 is SentencePiece's own sign for a space"
    )
