"""What tells the language of a single text: its function words, for a few languages, and its script, for most."""

import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cache

EVIDENCE = 12.0  # nats of a line's trigrams in favour of a language, to be certain of it

MOST_LINES = 500  # of a side, which tell whether it is exchanged
PLAIN = 3.0  # times as many signs of a language on the other side as on its own
FEWEST_SIGNS = 100  # words, or letters

LEAST_WORDS = 3  # different function words of another language, with none of its own, make a line foreign

# The commonest short words of some languages. Those that two of them share only weaken the sign.
FUNCTION_WORDS = {
    "en": "the a an in of and to is that with was for this are on at by from it he his they have",
    "de": "der die und das ist nicht ein eine den dem von mit auf für sich im zu wird er sie",
    "fr": "le la les des est dans une et un pas qui du au sur avec pour il elle ce ne",
    "es": "el la los las que una con por para del se un su es está no al como más y",
    "it": "il che di la per una sono della non è gli nel con un si le dei alla ha i",
    "pt": "o os uma que não com para do da em um no na se por mais foi ao as é",
    "nl": "het een van de niet op dat is zijn met voor en te aan er maar hij ik om door",
    "sv": "och att det som är på för en av inte den till med ett har jag han var ej om",
    "da": "og at det er en til på af ikke der den med som for et har jeg han var om",
    "pl": "się nie na jest do że to w z i jak po ale co tak za od jego był ma",
    "cs": "se na je že to v by jsem a ve si do ale jak který byl jeho pro za tak",
    "fi": "ja on ei että se oli hän mutta kun myös niin olen ovat mitä kuin tämä joka voi jos minä",
    "hu": "a az és nem hogy is egy van volt meg ez de csak már mint vagy ki még ha azt",
    "ro": "și de la în că nu este pe cu un o să se din care mai fost pentru lui sunt",
    "tr": "bir ve bu için de da ne çok ile değil var daha gibi ama o ben kadar sonra her olarak",
}
_WORD = re.compile(r"[^\W\d_]+")

# How the name of a character begins in Unicode, for languages with a script that tells.
SCRIPTS = {
    "CYRILLIC": "ru uk bg be mk kk ky tg mn",
    "GREEK": "el",
    "HEBREW": "he yi",
    "ARABIC": "ar fa ur ps",
    "DEVANAGARI": "hi mr ne sa",
    "BENGALI": "bn",
    "TAMIL": "ta",
    "TELUGU": "te",
    "THAI": "th",
    "GEORGIAN": "ka",
    "ARMENIAN": "hy",
    "HANGUL": "ko",
    "CJK": "zh",
    "KANA": "ja",
    "LATIN": "en de fr es it pt nl sv da no nb pl cs fi hu ro tr sk sl hr et lv lt id ms vi ca gl eu sq is",
}
_SCRIPT_OF_LANGUAGE = {language: script for script, languages in SCRIPTS.items() for language in languages.split()}
_EAST_ASIAN = {"CJK", "KANA", "HANGUL"}  # which Japanese mixes, and Korean may
_SCRIPT_OF_NAME = {
    "HIRAGANA": "KANA",
    "KATAKANA": "KANA",
    "KATAKANA-HIRAGANA": "KANA",
    "IDEOGRAPHIC": "CJK",  # such as the sign of repetition
    "FULLWIDTH": "CJK",  # Latin letters as wide as signs
}
_ANY_SCRIPT = {"FEMININE", "MASCULINE", "MICRO", "MODIFIER"}  # as in 1ª, 2º and 5 µm


@cache
def languages_of_word() -> dict[str, list[str]]:
    """The languages of each function word."""
    table: dict[str, list[str]] = {}
    for language, words in FUNCTION_WORDS.items():
        for word in words.split():
            table.setdefault(word, []).append(language)
    return table


def can_tell_foreign(code: str) -> bool:
    """Whether a text in this language is known from others: else it may share words with one whose words are known."""
    return code in FUNCTION_WORDS or _SCRIPT_OF_LANGUAGE.get(code, "LATIN") != "LATIN"


def words_of(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return _WORD.findall(text.lower())


def foreign_language(words: Collection[str], code: str) -> str | None:
    """The other language whose function words a text has, when it has none of its own; None: there is none."""
    languages_of = languages_of_word()
    counts = Counter(language for word in set(words) for language in languages_of.get(word, ()))
    if not counts or counts[code]:
        return None
    language, different_words = counts.most_common(1)[0]
    return language if different_words >= LEAST_WORDS else None


@cache
def _script_of(character: str) -> str:
    """The first word of a letter's name in Unicode; nothing for what is not a letter, or one that any script has."""
    if not unicodedata.category(character).startswith("L"):
        return ""
    script = unicodedata.name(character, "").removeprefix("HALFWIDTH ").partition(" ")[0]
    return "" if script in _ANY_SCRIPT else _SCRIPT_OF_NAME.get(script, script)


def letters_by_script(text: str) -> Counter[str]:
    """How many letters a text has of each script."""
    return Counter(filter(None, map(_script_of, text)))


def expected_script(code: str, letters: Mapping[str, int]) -> str:
    """The script of a language, or where that is not known, the commonest among these letters."""
    commonest = Counter(letters).most_common(1)[0][0] if letters else "LATIN"
    return _SCRIPT_OF_LANGUAGE.get(code, commonest)


def is_accepted(script: str, expected: str) -> bool:
    """Whether a text of one script may be in a language of the other."""
    return script == expected or {script, expected} <= _EAST_ASIAN


def are_exchanged(sources: Sequence[str], targets: Sequence[str], languages: tuple[str, str]) -> bool:
    """Whether each side is plainly in the language of the other, as far as the signs of the two languages are known."""
    sides = [texts[:MOST_LINES] for texts in (sources, targets)]
    scripts = [expected_script(language, {}) for language in languages]
    are_told_by_script = not is_accepted(*scripts)

    signs: dict[int, list[int]] = {}  # by the side whose language they are of: how many each side has
    for own, language in enumerate(languages):
        if are_told_by_script:
            signs[own] = _letters(sides, scripts[own])
        elif language in FUNCTION_WORDS and languages[0] != languages[1]:
            signs[own] = _known_words(sides, language)
    return bool(signs) and all(
        of_sides[1 - own] > max(FEWEST_SIGNS, PLAIN * of_sides[own]) for own, of_sides in signs.items()
    )


def _known_words(sides: Sequence[Sequence[str]], language: str) -> list[int]:
    """How many function words of a language each side has."""
    known = set(FUNCTION_WORDS[language].split())
    return [sum(word in known for text in texts for word in words_of(text)) for texts in sides]


def _letters(sides: Sequence[Sequence[str]], expected: str) -> list[int]:
    """How many letters each side has of a script, or of one that is accepted for it."""
    return [
        sum(
            count
            for text in texts
            for script, count in letters_by_script(text).items()
            if is_accepted(script, expected)
        )
        for texts in sides
    ]
