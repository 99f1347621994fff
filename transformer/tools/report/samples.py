"""Sample translations of a report, from the best to the worst, and where they differ from their references.

Texts are compared word by word; those of languages that are written without spaces, character by character.
"""

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import groupby

from transformer.config.languages import language_of
from transformer.terminal import JOINERS
from transformer.tools.compare import Texts
from transformer.tools.page import Component
from transformer.tools.report.blocks import shorten
from transformer.tools.significance import Metrics

WITHOUT_SPACES = {"zh", "ja", "th", "lo", "km", "my", "bo", "dz"}
MOST_CHARACTERS = 600  # of a text that is shown


@dataclass(frozen=True)
class Part:
    """A stretch of a text, and by which translations of those that are compared it differs."""

    text: str
    differs_by: list[int]


@dataclass(frozen=True)
class SampleSet:
    """Sentences of one test set, best first."""

    name: str
    note: str
    samples: list[dict[str, object]]


def split_text(text: str, *, by_character: bool) -> list[str]:
    """The text as units that are compared whole: words, punctuation marks and spaces, or characters.

    A character keeps what is combined with it. Joined, the units are the text again.
    """
    units: list[str] = []
    is_in_word = False
    for character in text:
        category = unicodedata.category(character)
        is_mark = category.startswith("M") or character in JOINERS
        is_of_word = not (character.isspace() or category[0] in "PS")
        if units and (is_mark or (is_of_word and is_in_word and not by_character)):
            units[-1] += character
        else:
            units.append(character)
            is_in_word = is_of_word
    return units


def mark_differences(
    reference: str, translations: Sequence[str], *, by_character: bool
) -> tuple[list[Part], list[list[Part]]]:
    """The reference, with the translations that miss each part of it, and each translation, with what it adds.

    A part of translation n that the reference lacks has `differs_by` [n].
    """
    units = split_text(reference, by_character=by_character)
    missed: list[list[int]] = [[] for _ in units]
    marked = []
    for number, translation in enumerate(translations):
        own = split_text(translation, by_character=by_character)
        kept_in_reference, kept = _common(units, own)
        for place in range(len(units)):
            if place not in kept_in_reference:
                missed[place].append(number)
        marked.append(_parts(own, [[] if place in kept else [number] for place in range(len(own))]))
    return _parts(units, missed), marked


def _common(left: Sequence[str], right: Sequence[str]) -> tuple[set[int], set[int]]:
    """The places of the units that two texts have in common, in order. Spaces are no difference."""
    of_left = [place for place, unit in enumerate(left) if not unit.isspace()]
    of_right = [place for place, unit in enumerate(right) if not unit.isspace()]
    in_left = set(range(len(left))) - set(of_left)
    in_right = set(range(len(right))) - set(of_right)

    words = SequenceMatcher(None, [left[n] for n in of_left], [right[n] for n in of_right], autojunk=False)
    for block in words.get_matching_blocks():
        in_left.update(of_left[block.a : block.a + block.size])
        in_right.update(of_right[block.b : block.b + block.size])
    return in_left, in_right


def _parts(units: Sequence[str], differs_by: Sequence[list[int]]) -> list[Part]:
    """Neighbours of one kind together; a space between two that differ in the same way belongs to them."""
    kinds = list(differs_by)
    for place in range(1, len(units) - 1):
        if units[place].isspace() and kinds[place - 1] == kinds[place + 1]:
            kinds[place] = kinds[place - 1]
    grouped = groupby(zip(units, kinds, strict=True), key=lambda pair: pair[1])
    return [Part("".join(unit for unit, _ in group), kind) for kind, group in grouped]


def choose_samples(name: str, texts: Texts, metrics: Metrics, *, tgt_lang: str, count: int) -> SampleSet:
    """`count` sentences of a test set, evenly spread from the best to the worst by the first run's sentence chrF.

    Of the translations that equal their reference one is shown.
    """
    (references,) = texts.references
    run, translations = next(iter(texts.translations.items()))
    scores = [
        metrics.chrf.sentence_score(translation, [reference]).score
        for translation, reference in zip(translations, references, strict=True)
    ]
    ranked = sorted(range(len(scores)), key=lambda place: (translations[place] != references[place], -scores[place]))
    exact = sum(translation == reference for translation, reference in zip(translations, references, strict=True))
    chosen = spread(ranked[max(0, exact - 1) :], count)

    by_character = language_of(tgt_lang, "data.tgt_lang") in WITHOUT_SPACES
    return SampleSet(
        name=shorten(name),
        note=(
            f"Of {len(ranked):,} translations of {shorten(run)}, {exact:,} equal their reference. Shown are "
            f"{len(chosen)}, evenly spread over the ranks by sentence chrF, with one of those at most. Marked are the "
            f"{'characters' if by_character else 'words'} that only one of the two has."
        ),
        samples=[_sample(texts, metrics, place, by_character=by_character) for place in chosen],
    )


def spread(ranked: Sequence[int], count: int) -> list[int]:
    """So many of the items, the first and the last among them, at even distances."""
    if len(ranked) <= count:
        return list(ranked)
    if count == 1:
        return [ranked[0]]
    return [ranked[round(number * (len(ranked) - 1) / (count - 1))] for number in range(count)]


def _sample(texts: Texts, metrics: Metrics, place: int, *, by_character: bool) -> dict[str, object]:
    """A sentence for the script in samples.js."""
    reference = texts.references[0][place]
    translations = [lines[place] for lines in texts.translations.values()]
    shown = [shorten(translation, MOST_CHARACTERS) for translation in translations]
    of_reference, of_translations = mark_differences(
        shorten(reference, MOST_CHARACTERS), shown, by_character=by_character
    )
    return {
        "line": place + 1,
        "source": "" if texts.sources is None else shorten(texts.sources[place], MOST_CHARACTERS),
        "reference": [[part.text, part.differs_by] for part in of_reference],
        "translations": [
            {
                "score": metrics.chrf.sentence_score(translation, [reference]).score,
                "parts": [[part.text, bool(part.differs_by)] for part in parts],
            }
            for translation, parts in zip(translations, of_translations, strict=True)
        ],
    }


def samples(heading: str, runs: Sequence[str], sets: Sequence[SampleSet]) -> Component:
    """A section with the samples of some runs on each test set."""
    data: Mapping[str, object] = {
        "runs": [shorten(run) for run in runs],
        "sets": [{"name": of.name, "note": of.note, "samples": of.samples} for of in sets],
    }
    return Component("report/samples", heading, data)
