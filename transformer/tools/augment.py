"""How text in the wild differs from a corpus: capitals, titles, no final mark, typos, and lines that are no text.

The names and rates are those of OpusTrainer, by which the students of Firefox's translations are trained
(configs/recipe/robust.yaml). Upper and title case, and final marks, go over to the translation; a typo does not: what
is misspelt is to be translated as if it were not. A line of noise is its own translation.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import TypeVar

from transformer.config.languages import language_of
from transformer.data.corpus import Pair
from transformer.errors import InputError

Item = TypeVar("Item")

Draw = Callable[[], float]  # the next random number, in [0, 1)
Languages = tuple[str, str]

_FINAL_MARKS = re.compile(r"\s*[.!?…。！？｡．।؟։]+\s*$")
_FIRST_LETTER = re.compile(r"(?<!\S)([^\w\s]*)(\w)")
_WORD = re.compile(r"[^\W\d_]{4,}")  # that may be misspelt

TYPOS = 0.1  # of the words that may be misspelt; one at least

# Rows of letters, from the top of a keyboard to its bottom, and the languages that have them.
_QWERTY = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
_LAYOUTS = {
    **dict.fromkeys(("de", "cs", "hr", "hu", "sk", "sl"), ("qwertzuiopü", "asdfghjklöä", "yxcvbnm")),
    "fr": ("azertyuiop", "qsdfghjklm", "wxcvbn"),
    "ru": ("йцукенгшщзхъ", "фывапролджэ", "ячсмитьбю"),
    "uk": ("йцукенгшщзхї", "фівапролджє", "ячсмитьбю"),
    "el": (" ςερτυθιοπ", "ασδφγηξκλ", "ζχψωβνμ"),
}
_DOTTED = ("tr", "az")  # whose i has a dot as a capital, too

_NOISE = (
    *(range(0x21, 0x7F), range(0x61, 0x7B), range(0x30, 0x3A)),  # what most models can write
    *(range(0xA1, 0x180), range(0x391, 0x3CA), range(0x410, 0x450), range(0x4E00, 0x4F00), range(0x1F600, 0x1F640)),
)


def upper(pair: Pair, languages: Languages, draw: Draw) -> Pair:
    """Both sides in capitals."""
    source, target = (_upper(text, language) for text, language in zip(pair, languages, strict=True))
    return source, target


def title(pair: Pair, languages: Languages, draw: Draw) -> Pair:
    """A capital at the beginning of each word of both sides."""
    source, target = (_title(text, language) for text, language in zip(pair, languages, strict=True))
    return source, target


def unmarked(pair: Pair, languages: Languages, draw: Draw) -> Pair:
    """Both sides without the marks at their ends, where both have some."""
    source, target = (_FINAL_MARKS.sub("", text) for text in pair)
    return (source, target) if source != pair[0] and target != pair[1] else pair


def typos(pair: Pair, languages: Languages, draw: Draw) -> Pair:
    """A source with misspelt words, as fingers misspell them on the keyboard of its language."""
    words = list(_WORD.finditer(pair[0]))
    if not words:
        return pair
    misspelt = [word for word in words if draw() < TYPOS] or [_choice(words, draw)]
    text = pair[0]
    for word in reversed(misspelt):
        text = text[: word.start()] + _misspelt(word[0], languages[0], draw) + text[word.end() :]
    return text, pair[1]


def noise(pair: Pair, languages: Languages, draw: Draw) -> Pair:
    """Words of characters at random, and themselves as their translation."""
    characters = _choice(_NOISE, draw)
    lengths = [2 + int(4 * draw()) for _ in range(1 + int(6 * draw()))]
    line = " ".join("".join(chr(_choice(characters, draw)) for _ in range(length)) for length in lengths)
    return line, line


def mixed(pair: Pair, languages: Languages, draw: Draw) -> Pair:
    """One of upper, title, unmarked and typos."""
    return _choice((upper, title, unmarked, typos), draw)(pair, languages, draw)


@cache
def _code(language: str) -> str:
    """The code by which the tables know a language; one that is no code stays as it is."""
    with suppress(InputError):
        return language_of(language, "data.src_lang")
    return language


def _upper(text: str, language: str) -> str:
    return (text.replace("i", "İ") if _code(language) in _DOTTED else text).upper()


def _title(text: str, language: str) -> str:
    return _FIRST_LETTER.sub(lambda found: found[1] + _upper(found[2], language), text)


def _misspelt(word: str, language: str, draw: Draw) -> str:
    """The word with two letters exchanged, one left out, one doubled, or one of a key beside it; not the first."""
    at = 1 + int(draw() * (len(word) - 2))
    letter, following = word[at], word[at + 1]
    beside = _neighbours(letter.lower(), _LAYOUTS.get(_code(language), _QWERTY))
    forms = [following + letter, following, letter + letter + following]
    if beside:
        key = _choice(beside, draw)
        forms.append((key.upper() if letter.isupper() else key) + following)
    return word[:at] + _choice(forms, draw) + word[at + 2 :]


def _neighbours(letter: str, layout: Sequence[str]) -> str:
    """The letters of the keys around a key, none for what is no key; a row is half a key to the right of the last."""
    for number, row in enumerate(layout):
        at = row.find(letter)
        if at >= 0:
            above = layout[number - 1][at : at + 2] if number else ""
            below = layout[number + 1][max(at - 1, 0) : at + 1] if number + 1 < len(layout) else ""
            return (above + row[max(at - 1, 0) : at] + row[at + 1 : at + 2] + below).strip()
    return ""


def _choice(items: Sequence[Item], draw: Draw) -> Item:
    return items[int(draw() * len(items))]
