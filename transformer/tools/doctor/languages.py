"""Checks of whether each side is in its language: it may be swapped, untranslated, or in another language or script.

There are three signs, each of which sees what the others do not:

    trigrams        `profiles` tells the two languages apart, whichever they are: swapped pairs, untranslated pairs, and
                    a set whose side is far from the same side of `dev`, on the way to the other language
    function words  tell a few common languages by name: a third language in some lines, or a corpus swapped as a whole
    script          is known for most languages that are not written in Latin letters

Behind each limit stands the most that was seen on sound corpora: Multi30k en-de and en-fr, Tatoeba, newstest2013, KFTT.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from transformer.config.languages import language_of
from transformer.config.settings import DataConfig
from transformer.tools.detectors.languages import (
    EVIDENCE,
    FUNCTION_WORDS,
    can_tell_foreign,
    expected_script,
    foreign_language,
    is_accepted,
    languages_of_word,
    letters_by_script,
    words_of,
)
from transformer.tools.detectors.lexicon import Floats
from transformer.tools.detectors.profiles import Evidence, Trigrams, distance, sort_sides
from transformer.tools.doctor.findings import Check, Level, measured, passed, percent
from transformer.tools.doctor.survey import SIDES, Survey

MOST_SWAPPED = 0.005  # of the pairs; seen: 0
MOST_UNTRANSLATED = 0.01  # seen: 0.004 (two of 500 pairs of newstest2013), elsewhere 0.001
# Of the way from one language to the other. Seen: 0.04 within a corpus, 0.41 from captions to Tatoeba's questions, and
# 1.06 from German to French.
MOST_DISTANCE = 0.6
FEWEST_LINES = 200  # whose trigrams make a profile

MOST_FOREIGN = 0.01  # of the lines; seen: 0.0002
LEAST_SHARE = 0.08  # in running text of any of these languages, more of the words are its function words
MOST_OTHER_SCRIPT = 0.05  # of the lines; seen: 0.003 (KFTT)


@dataclass(frozen=True)
class _Setting:
    """The language of a side, and the key that says so."""

    code: str
    key: str

    @classmethod
    def of(cls, code: str, key: str) -> "_Setting":
        """The language of a code. Raises InputError for what is not one."""
        return cls(language_of(code, key), key)


def check_languages(surveys: Sequence[Survey], data: DataConfig) -> list[Check]:
    """Check every set; `dev` is one of them. Sets of another target language are compared among themselves alone.

    Raises InputError for what is not the code of a language.
    """
    targets = data.tgt_langs()
    source = _Setting.of(data.src_lang, "data.src_lang")
    by_target: dict[str, list[Survey]] = {}
    checks = []
    settings = {}
    for survey in surveys:
        own = f"{survey.name}.tgt_lang"
        key = own if own in targets else "tgt_lang"
        settings[survey.name] = (source, _Setting.of(targets[key], f"data.{key}"))
        by_target.setdefault(settings[survey.name][1].code, []).append(survey)
    for of_target in by_target.values():
        checks += _check_trigrams(of_target)

    # Function words and scripts.
    for survey in surveys:
        for side, setting in enumerate(settings[survey.name]):
            checks.append(_check_language(survey, side, setting))
            checks.append(_check_script(survey, side, setting))
    return checks


# ---- by trigrams ----------------------------------------------------------------------------------------------------


def _check_trigrams(surveys: Sequence[Survey]) -> list[Check]:
    """Check sets of the same two languages: the pairs of all are sorted together, one set after the other."""
    sources = [text for survey in surveys for text in survey.sources]
    targets = [text for survey in surveys for text in survey.targets]
    evidence = sort_sides(Trigrams.of(sources), Trigrams.of(targets))

    checks = []
    first = 0
    for survey in surveys:
        own = slice(first, first + len(survey.lines))
        first += len(survey.lines)
        checks += _check_sides(survey, Evidence(evidence.source[own], evidence.target[own]))
    return checks + _check_profiles(surveys)


def _check_sides(survey: Survey, evidence: Evidence) -> list[Check]:
    """Pairs whose sides are swapped, and pairs with both sides in one language."""
    # What the trigrams of both sides say together.
    is_swapped = (evidence.source < -EVIDENCE) & (evidence.target > EVIDENCE)
    in_source_language = (evidence.source > EVIDENCE) & (evidence.target > EVIDENCE)
    in_target_language = (evidence.source < -EVIDENCE) & (evidence.target < -EVIDENCE)
    is_untranslated = in_source_language | in_target_language

    swapped = [survey.lines[index] for index in np.flatnonzero(is_swapped)]
    untranslated = [survey.lines[index] for index in np.flatnonzero(is_untranslated)]
    share_swapped = len(swapped) / max(1, len(survey.lines))
    share_untranslated = len(untranslated) / max(1, len(survey.lines))

    remedy = "exchange the two sides of these lines"
    if share_swapped >= 0.9:
        remedy = f"exchange data.{survey.name}.src and data.{survey.name}.tgt, or those of the other sets"
    return [
        measured(
            "swapped sides",
            survey.name,
            found=f"{percent(share_swapped)} of the pairs have their languages the other way round than most",
            value=share_swapped,
            limit=MOST_SWAPPED,
            level=Level.error,
            remedy=remedy,
            places=survey.places(swapped),
        ),
        measured(
            "untranslated pairs",
            survey.name,
            found=f"{percent(share_untranslated)} of the pairs have both sides in one language "
            f"({int(in_source_language.sum()):,} in that of the source)",
            value=share_untranslated,
            limit=MOST_UNTRANSLATED,
            level=Level.error,
            remedy="drop these lines; data.filter.drop_identical=true drops exact copies",
            places=survey.places(untranslated),
        ),
    ]


def _check_profiles(surveys: Sequence[Survey]) -> list[Check]:
    """How far each side of each set is from that side of dev, if it is among them, on the way to dev's other side.

    Two parts of one text are some distance apart, too: the shorter the text and the more different characters it has,
    the further. So the distance between the halves of dev is subtracted.
    """
    dev = next((survey for survey in surveys if survey.name == "dev"), None)
    if dev is None:
        return []
    profiles = [_profile(dev.side(side)) for side in (0, 1)]
    between_sides = distance(profiles[0], profiles[1])
    between_halves = [_distance_of_halves(dev.side(side)) for side in (0, 1)]
    if between_sides <= max(between_halves):
        return []

    checks = []
    for survey in surveys:
        if survey is dev or min(len(survey.lines), len(dev.lines)) < FEWEST_LINES:
            continue
        for side in (0, 1):
            by_chance = between_halves[side]
            from_dev = distance(_profile(survey.side(side)), profiles[side])
            share = max(0.0, from_dev - by_chance) / (between_sides - by_chance)
            checks.append(
                measured(
                    "language",
                    f"{survey.name} {SIDES[side]}",
                    found=f"its trigrams are {share:.2f} of the way from dev's {SIDES[side]} "
                    f"to dev's {SIDES[1 - side]}",
                    value=share,
                    limit=MOST_DISTANCE,
                    level=Level.error,
                    remedy=f"data.{survey.name} and data.dev differ in language on the {SIDES[side]} side, or in "
                    "encoding: look at both files",
                    places=[*survey.places(survey.lines, side), *dev.places(dev.lines, side)],
                )
            )
    return checks


def _profile(texts: list[str]) -> Floats:
    """How often each trigram occurs in some lines."""
    grams = Trigrams.of(texts)
    return grams.histogram(np.ones(grams.count))


def _distance_of_halves(texts: list[str]) -> float:
    """Between the even lines and the odd ones."""
    return distance(_profile(texts[::2]), _profile(texts[1::2]))


# ---- by function words ----------------------------------------------------------------------------------------------


def _check_language(survey: Survey, side: int, setting: _Setting) -> Check:
    """Function words of the side as a whole, and lines that have some of another language and none of their own."""
    code = setting.code
    where = f"{survey.name} {SIDES[side]}"
    if not can_tell_foreign(code):
        return passed("function words", where, found=f"the commonest words of {code} are not known here")

    # Count function words by language, in all lines and line by line.
    languages_of = languages_of_word()
    total = Counter[str]()
    total_words = 0
    foreign_lines = []
    foreign_languages = Counter[str]()
    for line, text in zip(survey.lines, survey.side(side), strict=True):
        words = words_of(text)
        total_words += len(words)
        total.update(language for word in words for language in languages_of.get(word, ()))

        language = foreign_language(words, code)
        if language is not None:
            foreign_lines.append(line)
            foreign_languages[language] += 1

    # Single lines of another language.
    share = len(foreign_lines) / max(1, len(survey.lines))
    found = f"{percent(share)} of the lines have function words of another language only"

    # The whole text in another language.
    best = total.most_common(1)[0][0] if total else code
    is_clear = total[best] > max(LEAST_SHARE * total_words, 3 * total[code])
    is_other = best != code and code in FUNCTION_WORDS and is_clear
    if is_other:
        found += f"; the text as a whole looks like {best}, not {code}"

    if foreign_languages:
        named = [f"{count:,} look like {language}" for language, count in foreign_languages.most_common(2)]
        found += f" ({', '.join(named)})"
    return measured(
        "function words",
        where,
        found=found,
        value=max(share, float(is_other)),
        limit=MOST_FOREIGN,
        level=Level.error,
        remedy=f"{setting.key}={code} must be the language of {survey.path(side)}: name the right file, "
        "or drop these lines",
        places=survey.places(foreign_lines, side),
    )


# ---- by script ------------------------------------------------------------------------------------------------------


def _check_script(survey: Survey, side: int, setting: _Setting) -> Check:
    """Lines whose letters are mostly of another script than the language's, or where that is not known, the side's."""
    # Letters by script, in each line and in all.
    letters_of_lines = [letters_by_script(text) for text in survey.side(side)]
    total = Counter[str]()
    for letters in letters_of_lines:
        total.update(letters)

    # The script that the side should have.
    expected = expected_script(setting.code, total)

    # The lines that have another.
    lines = []
    other_scripts = Counter[str]()
    for line, letters in zip(survey.lines, letters_of_lines, strict=True):
        if not letters:
            continue
        script = letters.most_common(1)[0][0]
        if not is_accepted(script, expected):
            lines.append(line)
            other_scripts[script] += 1

    share = len(lines) / max(1, len(survey.lines))
    found = f"{percent(share)} of the lines are in another script than {expected.capitalize()}"
    if other_scripts:
        found += f", mostly {other_scripts.most_common(1)[0][0].capitalize()}"
    return measured(
        "script",
        f"{survey.name} {SIDES[side]}",
        found=found,
        value=share,
        limit=MOST_OTHER_SCRIPT,
        level=Level.error,
        remedy=f"{setting.key}={setting.code} is written in another script: name the right file, or drop these lines",
        places=survey.places(lines, side),
    )
