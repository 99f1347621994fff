"""The commonest faults of text, looked for in the first pairs of each set at every start; `doctor` looks for more.

A fault is said only where it is plain: who trains on sound text should never read of one.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice

from transformer.config.languages import language_of, name_of
from transformer.data.corpus import Pair
from transformer.errors import InputError
from transformer.tools.detectors.languages import (
    FUNCTION_WORDS,
    expected_script,
    is_accepted,
    letters_by_script,
    words_of,
)

MOST_LINES = 500  # of a side, which tell its language
PLAIN = 3.0  # times as many signs of one language as of the other
FEWEST_SIGNS = 100  # words, or letters
LEAST_SHARE = 0.05  # of an evaluation set that may be trained on
FEWEST_PAIRS = 50  # of an evaluation set
SHORT = 40  # characters of both sides: such pairs recur by chance

HEADINGS = {"source", "target", "src", "tgt", "trg", "original", "translation", "reference", "sentence1", "sentence2"}
HEADINGS |= {f"{side} {what}" for side in ("source", "target") for what in ("text", "sentence", "language")}


def warnings_of(sets: Mapping[str, Sequence[Pair]], languages: Mapping[str, tuple[str, str]]) -> list[str]:
    """What is plainly wrong, each in a line: a header, exchanged sides, a set for evaluation that is trained on.

    `sets` has the first pairs of each set by its name, `languages` the codes of its two sides.
    """
    found = []
    for name, pairs in sets.items():
        if pairs and _is_header(pairs[0], languages[name]):
            shown = " / ".join(pairs[0])
            found.append(f"data.{name}: its first pair is a header ({shown}), and no text: remove that line")
        if _are_exchanged(pairs, languages[name]):
            source, target = languages[name]
            found.append(
                f"data.{name}: its sources look like {target}, and its targets like {source}: exchange "
                f"data.{name}.src and data.{name}.tgt, or data.src_lang and data.tgt_lang"
            )
    trained_on = {name for name in sets if name == "train" or name.startswith("extra.")}
    for name in sorted(sets.keys() - trained_on):
        found += [text for training in sorted(trained_on) if (text := _overlap(name, training, sets))]
    return found


def _is_header(pair: Pair, languages: tuple[str, str]) -> bool:
    """Whether both sides name what stands below them."""
    words = [re.sub(r"[\W_]+", " ", side).strip().lower() for side in pair]
    names = {name.lower() for code in languages for name in (code, _code(code), name_of(_code(code)))}
    return words[0] != words[1] and all(word in names or word in HEADINGS for word in words)


def _code(language: str) -> str:
    """The code by which the tables know a language; one that is no code stays as it is."""
    with suppress(InputError):
        return language_of(language, "data.src_lang")
    return language


def _are_exchanged(pairs: Sequence[Pair], languages: tuple[str, str]) -> bool:
    """Whether each side is plainly in the language of the other."""
    sides = [[pair[side] for pair in islice(pairs, MOST_LINES)] for side in (0, 1)]
    codes = [_code(language) for language in languages]
    in_source, in_target = (_signs(texts, codes) for texts in sides)
    return _is_other(in_source, own=0) and _is_other(in_target, own=1)


def _is_other(signs: Sequence[int], *, own: int) -> bool:
    """Whether a side has far more signs of the other language than of its own."""
    return signs[1 - own] > max(FEWEST_SIGNS, PLAIN * signs[own])


def _signs(texts: Sequence[str], languages: Sequence[str]) -> list[int]:
    """How many letters of its script, or where both have one script, of its function words each language has here."""
    scripts = [expected_script(language, {}) for language in languages]
    if not is_accepted(*scripts):
        letters = [letters_by_script(text) for text in texts]
        return [
            sum(count for line in letters for script, count in line.items() if is_accepted(script, expected))
            for expected in scripts
        ]

    words = [word for text in texts for word in words_of(text)]
    of_language = [set(FUNCTION_WORDS.get(language, "").split()) for language in languages]
    if not all(of_language):
        return [0, 0]
    return [sum(word in known for word in words) for known in of_language]


def _overlap(name: str, training: str, sets: Mapping[str, Sequence[Pair]]) -> str:
    """What to say of pairs of a set for evaluation that are among the first of a training set; nothing of a few."""
    pairs = {pair for pair in sets[name] if sum(map(len, pair)) >= SHORT}
    known = pairs & set(sets[training])
    if len(pairs) < FEWEST_PAIRS or len(known) < LEAST_SHARE * len(pairs):
        return ""
    return (
        f"data.{name}: {len(known):,} of {len(pairs):,} pairs are among the first {len(sets[training]):,} of "
        f"data.{training}: scores on what was trained on say nothing, so take them out of one of the two"
    )
