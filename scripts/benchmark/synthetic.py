"""Made-up sentence pairs as long and as varied as WMT's English and German.

Invented words, built of syllables, stems and endings so that there is something to learn, as unequally frequent as
words are; sentences of 24 and 23 words on average (log-normal), and a few that the filters must drop.
"""

from collections.abc import Iterator
from itertools import product

import numpy as np
import numpy.typing as npt

SIDES = ("en", "de")
BLOCK = 10_000  # pairs at a time

MEANS = (24, 23)  # words of a sentence
SPREAD, UNLIKENESS = 0.6, 0.2  # of the log of a length: between sentences, and between the sides of a pair
STEMS = 60_000
SYLLABLES = (
    (" b c d f g h l m n p r s t w st tr pr ch th", "a e i o u ea ou", " n r s t l m nd ck"),
    (" b d f g h k l m n r s t w z sch st pf br gr", "a e i o u ä ö ü ei au ie", " n r s t l ch ng nd rt"),
)  # of each language: beginnings, vowels, ends; the space at the start is for none
ENDINGS = (("", "s", "ed", "ing", "er", "ly"), ("", "en", "er", "e", "ung", "lich"))
EMPTY_EVERY, LONG_EVERY = 5_000, 2_000  # pairs: one has an empty side, one a side that is ten times too long

Words = npt.NDArray[np.object_]
Counts = npt.NDArray[np.int64]


class Generator:
    """Sets of pairs, one after the other; the same for the same numbers of pairs."""

    def __init__(self) -> None:
        self._draw = np.random.default_rng(1)
        self._words = [invent(self._draw, side) for side in (0, 1)]

    @property
    def vocabularies(self) -> list[int]:
        """How many words each language has."""
        return [len(known) for known in self._words]

    def blocks(self, pairs: int) -> Iterator[tuple[list[list[str]], Counts]]:
        """The next `pairs` pairs, block by block: the sentences of each side, and their words `(2, n)`."""
        for start in range(0, pairs, BLOCK):
            counts = draw_lengths(self._draw, np.arange(start, min(start + BLOCK, pairs)))
            yield [self._sentences(known, own) for known, own in zip(self._words, counts, strict=True)], counts

    def _sentences(self, known: Words, counts: Counts) -> list[str]:
        ranks = len(known) ** self._draw.random(int(counts.sum()))  # Zipf: the n-th is n times rarer than the first
        text = known[ranks.astype(np.int64) - 1].tolist()
        ends = counts.cumsum().tolist()
        lines = (" ".join(text[end - count : end]) for end, count in zip(ends, counts.tolist(), strict=True))
        return [f"{line}." if line else "" for line in lines]


def invent(draw: np.random.Generator, side: int) -> Words:
    """The words of a language, the more frequent ones first: they tend to be short."""
    syllables = ["".join(parts) for parts in product(*(group.split(" ") for group in SYLLABLES[side]))]
    counts = draw.choice(4, STEMS, p=(0.1, 0.4, 0.35, 0.15)) + 1
    picked = (len(syllables) ** draw.random((STEMS, 4))).astype(np.int64) - 1
    stems = ["".join(syllables[i] for i in row[:count]) for row, count in zip(picked.tolist(), counts, strict=True)]
    if side == 1:  # a third are nouns
        stems = [stem.capitalize() if i % 3 == 0 else stem for i, stem in enumerate(stems)]
    forms = list(dict.fromkeys(stem + ending for stem in stems for ending in ENDINGS[side]))
    order = np.argsort([len(form) for form in forms] + 4 * draw.random(len(forms)))
    return np.array(forms, dtype=object)[order]


def draw_lengths(draw: np.random.Generator, numbers: Counts) -> Counts:
    """Words of both sides of these pairs, `(2, n)`."""
    lengths = SPREAD * draw.standard_normal(len(numbers)) + UNLIKENESS * draw.standard_normal((2, len(numbers)))
    means = np.log(MEANS)[:, None] - (SPREAD**2 + UNLIKENESS**2) / 2
    counts = np.rint(np.exp(means + lengths)).clip(1).astype(np.int64)
    counts[0, numbers % LONG_EVERY == 1] *= 10
    counts[1, numbers % EMPTY_EVERY == 2] = 0
    return counts
