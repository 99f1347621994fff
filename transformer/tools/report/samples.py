"""The section of a report with sample translations, from the best to the worst, and how they differ from references.

    scores -> choose_samples -> mark_differences -> SampleSet -> samples_section, which samples.js draws

Texts are compared word by word; those of languages that are written without spaces, character by character.
"""

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import groupby

from transformer.config.languages import UNSPACED, language_of
from transformer.terminal import JOINERS
from transformer.tools.compare.texts import Texts
from transformer.tools.page import Component
from transformer.tools.report.blocks import shorten
from transformer.tools.significance import Metrics

MOST_CHARACTERS = 600  # of a text that is shown


@dataclass(frozen=True)
class Part:
    """A stretch of a text that differs from certain of the other texts."""

    text: str
    differs_by: list[int]  # numbers of translations: see `mark_differences`


@dataclass(frozen=True)
class SampleSet:
    """Sentences of one test set, best first."""

    name: str
    note: str  # how they were chosen
    samples: list[dict[str, object]]  # as samples.js reads them


def split_text(text: str, *, by_character: bool) -> list[str]:
    """The text as units that are compared whole: words, punctuation marks and spaces, or characters.

    A character keeps what is combined with it. Joined, the units are the text again.
    """
    units: list[str] = []
    is_in_word = False
    for character in text:
        category = unicodedata.category(character)
        is_combining = category.startswith("M") or character in JOINERS
        is_of_word = not (character.isspace() or category[0] in "PS")

        continues_word = is_of_word and is_in_word and not by_character
        if units and (is_combining or continues_word):
            units[-1] += character
        else:
            units.append(character)
            is_in_word = is_of_word
    return units


def mark_differences(
    reference: str, translations: Sequence[str], *, by_character: bool
) -> tuple[list[Part], list[list[Part]]]:
    """The parts of the reference and of each translation.

    A part of the reference differs by the translations that miss it; a part of translation n that the reference does
    not have differs by [n].
    """
    units = split_text(reference, by_character=by_character)
    missed_by: list[list[int]] = [[] for _ in units]

    translations_in_parts = []
    for number, translation in enumerate(translations):
        own_units = split_text(translation, by_character=by_character)
        in_reference, in_translation = _common(units, own_units)

        for place in range(len(units)):
            if place not in in_reference:
                missed_by[place].append(number)
        added_by = [[] if place in in_translation else [number] for place in range(len(own_units))]
        translations_in_parts.append(_parts(own_units, added_by))
    return _parts(units, missed_by), translations_in_parts


def _common(left: Sequence[str], right: Sequence[str]) -> tuple[set[int], set[int]]:
    """The places of the units that two texts have in common, in the same order. Spaces count as common."""
    left_words = [place for place, unit in enumerate(left) if not unit.isspace()]
    right_words = [place for place, unit in enumerate(right) if not unit.isspace()]
    common_left = set(range(len(left))) - set(left_words)
    common_right = set(range(len(right))) - set(right_words)

    matcher = SequenceMatcher(
        None, [left[place] for place in left_words], [right[place] for place in right_words], autojunk=False
    )
    for block in matcher.get_matching_blocks():
        common_left.update(left_words[block.a : block.a + block.size])
        common_right.update(right_words[block.b : block.b + block.size])
    return common_left, common_right


def _parts(units: Sequence[str], differs_by: Sequence[list[int]]) -> list[Part]:
    """Join neighbouring units that differ alike; a space between two that differ alike belongs to them."""
    differences = list(differs_by)
    for place in range(1, len(units) - 1):
        if units[place].isspace() and differences[place - 1] == differences[place + 1]:
            differences[place] = differences[place - 1]

    parts = []
    for difference, group in groupby(zip(units, differences, strict=True), key=lambda pair: pair[1]):
        text = "".join(unit for unit, _ in group)
        parts.append(Part(text, difference))
    return parts


def choose_samples(name: str, texts: Texts, metrics: Metrics, *, count: int) -> SampleSet:
    """`count` sentences of a test set, evenly spread from the best to the worst by the first run's sentence chrF.

    At most one translation that equals its reference is among them.
    """
    (references,) = texts.references
    run, translations = next(iter(texts.translations.items()))

    # Rank the sentences: those that equal their reference first, the others by their scores.
    scores = []
    is_exact = []
    for translation, reference in zip(translations, references, strict=True):
        scores.append(metrics.chrf.sentence_score(translation, [reference]).score)
        is_exact.append(translation == reference)
    ranked = sorted(range(len(scores)), key=lambda place: (not is_exact[place], -scores[place]))
    chosen = spread(ranked[max(0, sum(is_exact) - 1) :], count)

    by_character = language_of(metrics.text.tgt_lang, "data.tgt_lang") in UNSPACED
    units = "characters" if by_character else "words"
    return SampleSet(
        name=shorten(name),
        note=(
            f"Of {len(ranked):,} translations of {shorten(run)}, {sum(is_exact):,} equal their reference. Shown are "
            f"{len(chosen)}, evenly spread over the ranks by sentence chrF, with one of those at most. Marked are the "
            f"{units} that only one of the two has."
        ),
        samples=[_sample(texts, metrics, place, by_character=by_character) for place in chosen],
    )


def spread(ranked: Sequence[int], count: int) -> list[int]:
    """`count` of the items at even distances, the first and the last among them."""
    if len(ranked) <= count:
        return list(ranked)
    if count == 1:
        return [ranked[0]]

    last = len(ranked) - 1
    return [ranked[round(number * last / (count - 1))] for number in range(count)]


def _sample(texts: Texts, metrics: Metrics, place: int, *, by_character: bool) -> dict[str, object]:
    """A sentence as samples.js reads it: the source, and the reference and each translation in parts."""
    source = "" if texts.sources is None else texts.sources[place]
    reference = texts.references[0][place]
    translations = [lines[place] for lines in texts.translations.values()]

    # Parts of what is shown; scores of the whole.
    reference_parts, translations_in_parts = mark_differences(
        shorten(reference, MOST_CHARACTERS),
        [shorten(translation, MOST_CHARACTERS) for translation in translations],
        by_character=by_character,
    )
    shown = []
    for translation, parts in zip(translations, translations_in_parts, strict=True):
        score = metrics.chrf.sentence_score(translation, [reference]).score
        shown.append({"score": score, "parts": [[part.text, bool(part.differs_by)] for part in parts]})

    return {
        "line": place + 1,
        "source": shorten(source, MOST_CHARACTERS),
        "reference": [[part.text, part.differs_by] for part in reference_parts],
        "translations": shown,
    }


def samples_section(heading: str, runs: Sequence[str], sets: Sequence[SampleSet]) -> Component:
    """A section with the samples of some runs on each test set."""
    data: Mapping[str, object] = {
        "runs": [shorten(run) for run in runs],
        "sets": [{"name": chosen.name, "note": chosen.note, "samples": chosen.samples} for chosen in sets],
    }
    return Component("report/samples", heading, data)
