"""Whether texts come back from the tokenizer unchanged, and which key helps where they do not.

The round trip is text -> pieces -> text. No translation can match a reference that does not survive it: even a perfect
one loses points. So every development and test set is checked, and a sample of the training targets.
"""

import logging
from collections.abc import Mapping, Sequence
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

    checked: int  # texts
    changed: int  # of the checked texts
    unknown: int  # of the changed texts: those with a character that has no piece
    example: Change | None  # None: nothing is changed

    @classmethod
    def of(cls, texts: list[str], tokenizer: Tokenizer) -> "RoundTrip":
        """Encode and decode the texts."""
        changed = tokenizer.changed(texts)
        ids_of_changed = tokenizer.encode([text for text, _ in changed])
        return cls(
            checked=len(texts),
            changed=len(changed),
            unknown=sum(UNK in ids for ids in ids_of_changed),
            example=_around_the_difference(*changed[0]) if changed else None,
        )

    @classmethod
    def sum(cls, counts: Sequence["RoundTrip"]) -> "RoundTrip":
        """What the texts of all of these would have come to, one after the other."""
        return cls(
            checked=sum(some.checked for some in counts),
            changed=sum(some.changed for some in counts),
            unknown=sum(some.unknown for some in counts),
            example=next((some.example for some in counts if some.example is not None), None),
        )


def _around_the_difference(text: str, decoded: str) -> Change:
    """Twenty characters of either text, ten of them before the first that differs. No record may hold a NUL."""
    text = " ".join(text.replace("\0", "\ufffd").split())
    decoded = " ".join(decoded.replace("\0", "\ufffd").split())

    same = 0  # characters at the beginning
    while text[same : same + 1] == decoded[same : same + 1]:
        same += 1
    start = max(0, same - 10)
    return Change(text[start : start + 20], decoded[start : start + 20])


def warn_of_changes(
    round_trips: Mapping[str, RoundTrip | None], config: TokenizerConfig, *, key: str, is_given: bool
) -> None:
    """Log how many texts of each set do not come back, with an example and what to do about it.

    `config` is of the target's tokenizer, and `key` the group of these settings. `is_given` says that it was not
    trained here, so that none of them can help.
    """
    changed = {name: trip for name, trip in round_trips.items() if trip is not None and trip.changed}
    if not changed:
        return

    counts = ", ".join(f"{trip.changed:,} of {trip.checked:,} in {name}" for name, trip in changed.items())
    example = next(iter(changed.values())).example
    shown = f", such as {example.text!r} -> {example.decoded!r}" if example else ""
    if is_given:
        remedy = f"the given tokenizer is the cause: train one, or name another by {key}.model"
    else:
        remedy = _remedy(list(changed.values()), config, key)
    log.warning(
        "the tokenizer cannot restore some target texts, so no translation can equal them: %s%s; %s",
        counts,
        shown,
        remedy,
    )


def _remedy(trips: list[RoundTrip], config: TokenizerConfig, key: str) -> str:
    """The settings that bring the texts back."""
    settings = []
    if any(trip.unknown for trip in trips):
        covers_all = config.character_coverage == 1.0
        alternative = "" if covers_all else f" or {key}.character_coverage=1.0"
        settings.append(f"{key}.byte_fallback=true{alternative}")
    if config.normalization is not Normalization.identity and any(trip.unknown < trip.changed for trip in trips):
        settings.append(f"{key}.normalization=identity")

    if not settings:
        return "no setting changes that: U+2581 is SentencePiece's own sign for a space"
    return f"set {' and '.join(settings)}"
