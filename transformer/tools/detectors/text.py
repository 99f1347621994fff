"""Faults of a single text or pair, which its characters show: copies, encodings, and what is no text."""

import re

from transformer.tools.detectors.lexicon import UNSPACED, all_words_of

FEWEST_CHARACTERS = 20  # of a sentence whose recurrence says anything

# Words, each with a space behind it: some of them three times in a row, or several of them twice. Where a character is
# taken for a word, two in a row are too common to say anything.
_LOOP = re.compile(rf"(?<!\S)(?:((?:\S+ ){{1,10}}?)\1\1|((?:[^\s{UNSPACED}]+ ){{2,10}}?)\2)")
_STUTTER = re.compile(r"([^\W\d_]{1,8}?)\1{4}")  # letters, five times in a row

# Tags, entities of HTML and of Moses, and the marks of pieces that somebody has cut words into.
_MARKUP = re.compile(
    r"</?[a-zA-Z][^<>]{0,200}>|&(?:[a-zA-Z]{2,8}|#\d{1,6}|#x[0-9a-fA-F]{1,5});|@-@|@@(?: |$)|\u2581|\{\{|\[\["
)
_LOST = "\ufffd"

# Bytes that Windows-1252 shows as something else than Latin-1 does.
_CP1252 = {
    ord(bytes([byte]).decode("cp1252")): byte
    for byte in range(0x80, 0xA0)
    if byte not in (0x81, 0x8D, 0x8F, 0x90, 0x9D)
}
_DOUBLE = re.compile("[\u00c2-\u00f4][\u0080-\u00bf" + re.escape("".join(map(chr, _CP1252))) + "]")


def is_copy(source: str, target: str) -> bool:
    """Whether the target equals the source; short ones, such as names and numbers, may."""
    return source.strip() == target.strip() and len(source) >= FEWEST_CHARACTERS


def is_loop(source: str, target: str) -> bool:
    """Whether the target says the same words three times in a row, or several ones twice, as its source does not do.

    The same letters five times in a row are a loop, too. Marks are no words, such as the dots of a Japanese ellipsis.
    """
    return _repeats_itself(target) and not _repeats_itself(source)


def _repeats_itself(text: str) -> bool:
    words = "".join(f"{word} " for word in all_words_of(text) if word.isalnum())
    return _LOOP.search(words) is not None or _STUTTER.search(words) is not None


def has_markup(text: str) -> bool:
    """Whether a text has tags, entities or the marks of subwords."""
    return _MARKUP.search(text) is not None


def has_lost_characters(text: str) -> bool:
    """Whether a text has U+FFFD, in the place of a character that a conversion has lost."""
    return _LOST in text


def is_double_encoded(text: str) -> bool:
    """Whether a text is UTF-8 that was taken for Latin-1 or Windows-1252 and encoded once more."""
    if _DOUBLE.search(text) is None:
        return False
    try:
        restored = text.translate(_CP1252).encode("latin-1").decode("utf-8")
    except UnicodeError:
        return False
    return len(restored) < len(text)
