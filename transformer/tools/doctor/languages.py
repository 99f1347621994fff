"""Checks of whether each side is in its language: it may be swapped, untranslated, or in another language or script.

    surveys -> sides put in order -> the languages that each set looks to be in -> the checks, here and elsewhere
    trigrams        `profiles` tells the two languages apart, whichever they are: swapped pairs, untranslated pairs, and
                    a set whose side is far from the same side of `dev`, on the way to the other language
    function words  tell a few common languages by name: a third language in some lines, or a corpus swapped as a whole
    script          is known for most languages that are not written in Latin letters

A fault is found once, where it is: later checks read the sides in order, and leave out its lines and sets. Behind each
limit stands the most that was seen on sound corpora: Multi30k en-de and en-fr, Tatoeba, newstest2013, KFTT.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from transformer.config.languages import language_of
from transformer.config.settings import DataConfig
from transformer.run_dir import is_dev
from transformer.tools.detectors.languages import (
    EVIDENCE,
    FUNCTION_WORDS,
    are_exchanged,
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
from transformer.tools.doctor.findings import Check, Level, failed, measured, passed, percent
from transformer.tools.doctor.survey import SIDES, Survey

SWAPPED = "swapped sides"
MOST_SWAPPED = 0.005  # of the pairs; seen: 0
WHOLE = 0.9  # of the pairs are swapped: then it is the set that is
TOLD = 0.5  # of the pairs are without a fault that has been found: with fewer, it is that which makes a side look so
TOLD_BY = 500  # lines of a side, which tell how it looks
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


@dataclass(frozen=True)
class Languages:
    """What the checks of the languages have found, and the sets as other checks should read them."""

    checks: list[Check]
    surveys: list[Survey]  # their sides in order
    looks: dict[str, tuple[str, str]]  # the languages of both sides of each set, as they look
    are_mixed_up: bool  # whether a side as a whole is in another language than it should be


def check_languages(surveys: Sequence[Survey], data: DataConfig) -> Languages:
    """Check every set; a dev set is one of them. Sets that look to be in other languages are compared among themselves.

    Raises InputError for what is not the code of a language.
    """
    # Put sides in order, and see which languages the sets look to be in.
    settings = _settings(surveys, data)
    exchanged = {
        survey.name
        for survey in surveys
        if are_exchanged(survey.sources, survey.targets, _codes(settings[survey.name]))
    }
    in_order = {survey.name: survey.exchanged() if survey.name in exchanged else survey for survey in surveys}
    looks = {name: _looks(survey, settings[name]) for name, survey in in_order.items()}
    checks = []
    if exchanged == set(in_order):
        checks = [_check_exchanged("every set", surveys, _codes(settings[surveys[0].name]))]

    # Trigrams, of sets that look alike.
    by_languages: dict[tuple[str, str], list[Survey]] = {}
    for survey in in_order.values():
        by_languages.setdefault(looks[survey.name], []).append(survey)
    sound: dict[str, Survey] = {}  # the pairs in which no fault has been found
    for alike in by_languages.values():
        for found in _check_trigrams(alike):
            name = found.in_order.name
            in_order[name], sound[name] = found.in_order, found.sound
            is_one_of_some = name in exchanged and exchanged != set(looks)
            told = [_check_exchanged(name, [found.in_order], _codes(settings[name]))] if is_one_of_some else []
            checks += [*told, *found.checks[len(told) :]]  # the first is of swapped sides
        checks += _check_profiles([sound[survey.name] for survey in alike])

    # Scripts and function words.
    are_mixed_up = bool(exchanged)
    for side in (0, 1):
        others: dict[str, str] = {}  # the language, by set, where a side looks to be in another than it should be
        for name, survey in sound.items():
            is_told = len(survey.lines) < TOLD * len(in_order[name].lines)  # why it looks so
            setting, look = settings[name][side], looks[name][side]
            if is_told or look == setting.code:
                checks += _check_lines(survey, side, setting)
            else:
                others[name] = look
        checks += _check_wholes({name: sound[name] for name in others}, side, settings, others)
        are_mixed_up |= bool(others)
    return Languages(checks, [in_order[survey.name] for survey in surveys], looks, are_mixed_up)


def _settings(surveys: Sequence[Survey], data: DataConfig) -> dict[str, tuple[_Setting, _Setting]]:
    """The language of each side of each set. Raises InputError for what is not the code of one."""
    sources, targets = data.src_langs(), data.tgt_langs()
    return {
        survey.name: (_setting(survey.name, "src_lang", sources), _setting(survey.name, "tgt_lang", targets))
        for survey in surveys
    }


def _setting(name: str, key: str, languages: Mapping[str, str]) -> _Setting:
    """The language of a side of a set: its own, else that of the run."""
    own = f"{name}.{key}"
    found = own if own in languages else key
    return _Setting.of(languages[found], f"data.{found}")


def _codes(settings: tuple[_Setting, _Setting]) -> tuple[str, str]:
    source, target = settings
    return source.code, target.code


def _check_exchanged(where: str, surveys: Sequence[Survey], codes: tuple[str, str]) -> Check:
    """The finding that sets have their sides exchanged: one of them, or every one."""
    source, target = codes
    remedy = f"exchange data.{where}.src and data.{where}.tgt"
    if where == "every set":
        remedy = "exchange data.src_lang and data.tgt_lang, or src and tgt of every set"
    return failed(
        SWAPPED,
        where,
        found=f"the sources look like {target}, and the targets like {source}",
        level=Level.error,
        remedy=remedy,
        places=[place for survey in surveys for place in survey.places(survey.lines)],
    )


def _looks(survey: Survey, settings: tuple[_Setting, _Setting]) -> tuple[str, str]:
    """The languages that the two sides look to be in: their own, unless another one is plain."""
    source, target = (
        _look(texts[:: max(1, len(texts) // TOLD_BY)], setting.code)
        for texts, setting in zip((survey.sources, survey.targets), settings, strict=True)
    )
    return source, target


def _look(texts: Sequence[str], code: str) -> str:
    """The language of a text: its own, unless its letters or its function words are plainly another's.

    Of another script only its name is known.
    """
    letters = Counter[str]()
    for text in texts:
        letters.update(letters_by_script(text))
    script = expected_script("", letters)
    if not is_accepted(script, expected_script(code, letters)):
        return script.capitalize()

    # Function words.
    languages_of = languages_of_word()
    words = [word for text in texts for word in words_of(text)]
    total = Counter(language for word in words for language in languages_of.get(word, ()))
    best = total.most_common(1)[0][0] if total else code
    is_clear = total[best] > max(LEAST_SHARE * len(words), 3 * total[code])
    return best if code in FUNCTION_WORDS and is_clear else code


def _check_wholes(
    surveys: Mapping[str, Survey],
    side: int,
    settings: Mapping[str, tuple[_Setting, _Setting]],
    looks: Mapping[str, str],
) -> list[Check]:
    """The findings that sides as a whole are in another language; one finding where every set's is in the same."""
    ways = {(settings[name][side], look) for name, look in looks.items()}
    if len(surveys) == len(settings) and len(ways) == 1:
        (setting, look) = ways.pop()
        return [_check_whole(f"every {SIDES[side]}", list(surveys.values()), side, setting, look)]
    return [
        _check_whole(f"{name} {SIDES[side]}", [survey], side, settings[name][side], looks[name])
        for name, survey in surveys.items()
    ]


def _check_whole(where: str, surveys: Sequence[Survey], side: int, setting: _Setting, look: str) -> Check:
    is_known = look in FUNCTION_WORDS
    return failed(
        "function words" if is_known else "script",
        where,
        found=f"the text as a whole looks like {look}, not {setting.code}",
        level=Level.error,
        remedy=f"name the right file, or set {setting.key}" + (f"={look}" if is_known else ""),
        places=[place for survey in surveys for place in survey.places(survey.lines, side)],
    )


# ---- by trigrams ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sides:
    """What the trigrams of a set say."""

    checks: list[Check]
    in_order: Survey
    sound: Survey  # without copies, and without the pairs in which a fault has been found


def _check_trigrams(surveys: Sequence[Survey]) -> list[_Sides]:
    """Check sets of the same two languages: the pairs of all are sorted together, one set after the other."""
    told = [survey.without(_copies_of(survey)) for survey in surveys]
    sources = [text for survey in told for text in survey.sources]
    targets = [text for survey in told for text in survey.targets]
    if not sources:
        return [
            _check_sides(survey, survey.without(survey.lines), Evidence(np.zeros(0), np.zeros(0))) for survey in surveys
        ]
    evidence = sort_sides(Trigrams.of(sources), Trigrams.of(targets))

    checked = []
    first = 0
    for survey, of_survey in zip(surveys, told, strict=True):
        own = slice(first, first + len(of_survey.lines))
        first += len(of_survey.lines)
        checked.append(_check_sides(survey, of_survey, Evidence(evidence.source[own], evidence.target[own])))
    return checked


def _copies_of(survey: Survey) -> list[int]:
    """The lines whose target equals the source: a check of the text has them."""
    return [line for line, source, target in survey.pairs() if source.strip() == target.strip()]


def _check_sides(survey: Survey, told: Survey, evidence: Evidence) -> _Sides:
    """Pairs whose sides are swapped, and pairs with both sides in one language, of a set without its copies."""
    # What the trigrams of both sides say together.
    is_swapped = (evidence.source < -EVIDENCE) & (evidence.target > EVIDENCE)
    in_source_language = (evidence.source > EVIDENCE) & (evidence.target > EVIDENCE)
    in_target_language = (evidence.source < -EVIDENCE) & (evidence.target < -EVIDENCE)
    is_untranslated = in_source_language | in_target_language

    swapped = [told.lines[index] for index in np.flatnonzero(is_swapped)]
    untranslated = [told.lines[index] for index in np.flatnonzero(is_untranslated)]
    share_swapped = len(swapped) / max(1, len(told.lines))
    share_untranslated = len(untranslated) / max(1, len(told.lines))

    remedy = "exchange the two sides of these lines"
    if share_swapped >= WHOLE:
        remedy = f"exchange data.{survey.name}.src and data.{survey.name}.tgt, or those of the other sets"
    checks = [
        measured(
            SWAPPED,
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
    if share_swapped >= WHOLE:
        return _Sides(checks, survey.exchanged(), told.without(untranslated).exchanged())
    return _Sides(checks, survey, told.without([*swapped, *untranslated]))


def _check_profiles(surveys: Sequence[Survey]) -> list[Check]:
    """How far each side of each set is from that side of dev, if it is among them, on the way to dev's other side.

    Two parts of one text are some distance apart, too: the shorter the text and the more different characters it has,
    the further. So the distance between the halves of dev is subtracted.
    """
    large = [survey for survey in surveys if len(survey.lines) >= FEWEST_LINES]
    dev = next((survey for survey in large if is_dev(survey.name)), None)
    if dev is None:
        return []
    profiles = [_profile(dev.side(side)) for side in (0, 1)]
    between_sides = distance(profiles[0], profiles[1])
    between_halves = [_distance_of_halves(dev.side(side)) for side in (0, 1)]
    if between_sides <= max(between_halves):
        return []

    checks = []
    for side in (0, 1):
        by_chance = between_halves[side]
        far = []
        for survey in large:
            if survey is dev:
                continue
            from_dev = distance(_profile(survey.side(side)), profiles[side])
            share = max(0.0, from_dev - by_chance) / (between_sides - by_chance)
            far.append(_check_distance(survey, dev, side, share))
        are_all = len(far) > 1 and all(check.level is Level.error for check in far)
        checks += [_from_all(far, dev, side)] if are_all else far
    return checks


def _check_distance(survey: Survey, dev: Survey, side: int, share: float) -> Check:
    """Whether a side is far from that of dev: its `share` of the way to dev's other side."""
    return measured(
        "language",
        f"{survey.name} {SIDES[side]}",
        found=f"its trigrams are {share:.2f} of the way from {dev.name}'s {SIDES[side]} to its {SIDES[1 - side]}",
        value=share,
        limit=MOST_DISTANCE,
        level=Level.error,
        remedy=f"data.{survey.name} and data.{dev.name} differ in language on the {SIDES[side]} side, or in encoding: "
        "look at both files",
        places=[*survey.places(survey.lines, side), *dev.places(dev.lines, side)],
    )


def _from_all(far: Sequence[Check], dev: Survey, side: int) -> Check:
    """The finding that every other set is far from dev: then it is dev that differs."""
    shares = [check.value or 0.0 for check in far]
    return measured(
        "language",
        f"{dev.name} {SIDES[side]}",
        found=f"the trigrams of every other set are {min(shares):.2f} of the way or more from its {SIDES[side]} to its "
        f"{SIDES[1 - side]}",
        value=min(shares),
        limit=MOST_DISTANCE,
        level=Level.error,
        remedy=f"data.{dev.name} differs in language on the {SIDES[side]} side, or in encoding: look at its file",
        places=dev.places(dev.lines, side),
    )


def _profile(texts: list[str]) -> Floats:
    """How often each trigram occurs in some lines."""
    grams = Trigrams.of(texts)
    return grams.histogram(np.ones(grams.count))


def _distance_of_halves(texts: list[str]) -> float:
    """Between the even lines and the odd ones."""
    return distance(_profile(texts[::2]), _profile(texts[1::2]))


# ---- by scripts and function words ----------------------------------------------------------------------------------


def _check_lines(survey: Survey, side: int, setting: _Setting) -> list[Check]:
    """Lines of a side in another script, and others in another language."""
    by_script, lines = _check_script(survey, side, setting)
    return [by_script, _check_language(survey.without(lines), side, setting)]


def _check_language(survey: Survey, side: int, setting: _Setting) -> Check:
    """Lines that have function words of another language and none of their own."""
    code = setting.code
    where = f"{survey.name} {SIDES[side]}"
    if not can_tell_foreign(code):
        return passed("function words", where, found=f"the commonest words of {code} are not known here")

    foreign_lines = []
    foreign_languages = Counter[str]()
    for line, text in zip(survey.lines, survey.side(side), strict=True):
        language = foreign_language(words_of(text), code)
        if language is not None:
            foreign_lines.append(line)
            foreign_languages[language] += 1

    share = len(foreign_lines) / max(1, len(survey.lines))
    found = f"{percent(share)} of the lines have function words of another language only"
    if foreign_languages:
        named = [f"{count:,} look like {language}" for language, count in foreign_languages.most_common(2)]
        found += f" ({', '.join(named)})"
    return measured(
        "function words",
        where,
        found=found,
        value=share,
        limit=MOST_FOREIGN,
        level=Level.error,
        remedy=f"{setting.key}={code} must be the language of {survey.path(side)}: name the right file, "
        "or drop these lines",
        places=survey.places(foreign_lines, side),
    )


def _check_script(survey: Survey, side: int, setting: _Setting) -> tuple[Check, list[int]]:
    """Lines whose letters are mostly of another script than the language's, or where that is not known, the side's.

    Also returns these lines.
    """
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
    check = measured(
        "script",
        f"{survey.name} {SIDES[side]}",
        found=found,
        value=share,
        limit=MOST_OTHER_SCRIPT,
        level=Level.error,
        remedy=f"{setting.key}={setting.code} is written in another script: name the right file, or drop these lines",
        places=survey.places(lines, side),
    )
    return check, lines
