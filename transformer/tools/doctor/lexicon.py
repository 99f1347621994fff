"""Which words translate which: IBM model 1 (Brown et al., 1993, section 4.1), learned from a sample in a second.

A sentence is the set of its words, cut to their first letters, so that the forms of a word are one; where a script
writes no spaces, a character is a word. The probabilities t(target word | source word) lie in a table that is
addressed by a hash of the two words: memory does not grow with the vocabulary, and two pairs of words that meet in a
cell are rare once the improbable ones have been cleared.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from transformer.data.store import Ids

TABLE = 1 << 22  # cells
ROUNDS = 4  # of expectation maximisation
LEAST = 0.01  # a smaller probability is cleared
SMOOTHING = 0.1  # share of the word's own frequency in what a sentence predicts
STEM = 5  # letters of a word
MOST_WORDS = 40  # of a sentence

# Scripts without spaces between words: Thai, Lao, Tibetan, Burmese, Khmer, kana and Chinese characters.
UNSPACED = "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{UNSPACED}]|[^\W_{UNSPACED}]+")

Floats = npt.NDArray[np.float64]


def sums_of(index: Ids, weights: Floats, *, size: int) -> Floats:
    """The sum of the weights of each index, for at least `size` of them."""
    return np.asarray(np.bincount(index, weights, minlength=size), dtype=np.float64)


def words_of(text: str) -> list[str]:
    """The different words of a sentence, cut to their stems, in the order in which they come."""
    return list(dict.fromkeys(word[:STEM] for word in _WORD.findall(text.lower())))


@dataclass(frozen=True)
class Bags:
    """Sentences as sets of words: the words of all sentences end to end, and where each sentence begins."""

    words: Ids
    starts: Ids
    counts: Ids

    @classmethod
    def of(cls, texts: Iterable[str], numbers: dict[str, int], *, has_null: bool) -> "Bags":
        """Number the words, in `numbers`, which grows; `has_null` puts the empty word 0 into every sentence."""
        null = [0] if has_null else []
        sentences = [
            null + [numbers.setdefault(word, len(numbers)) for word in words_of(text)[:MOST_WORDS]] for text in texts
        ]
        counts = np.fromiter(map(len, sentences), np.int64, len(sentences))
        words = np.fromiter((word for sentence in sentences for word in sentence), np.int64, int(counts.sum()))
        return cls(words=words, starts=counts.cumsum() - counts, counts=counts)


@dataclass(frozen=True)
class _Links:
    """Every link of a word of a target sentence with a word of its source sentence."""

    cells: Ids  # where the probability of the two words is
    sources: Ids  # the source word
    tokens: Ids  # the number of the target word among those of all pairs
    token_words: Ids  # of each target word its number in the vocabulary
    token_pairs: Ids  # of each target word its pair
    token_links: Ids  # of each target word its links

    @classmethod
    def of(cls, source: Bags, target: Bags, *, left: Ids, right: Ids) -> "_Links":
        """The links of the sentence pairs `(left[k], right[k])`."""
        counts = target.counts[right]
        token_pairs = np.repeat(np.arange(len(left)), counts)
        token_words = target.words[np.repeat(target.starts[right], counts) + _within(counts)]

        token_links = source.counts[left][token_pairs]
        tokens = np.repeat(np.arange(len(token_words)), token_links)
        sources = source.words[np.repeat(source.starts[left][token_pairs], token_links) + _within(token_links)]
        return cls(
            cells=_cells(sources, token_words[tokens]),
            sources=sources,
            tokens=tokens,
            token_words=token_words,
            token_pairs=token_pairs,
            token_links=token_links,
        )


def _within(counts: Ids) -> Ids:
    """0, 1, ... for each of so many stretches: [2, 3] -> [0, 1, 0, 1, 2]."""
    ends = counts.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) - np.repeat(ends - counts, counts)


def _cells(sources: Ids, targets: Ids) -> Ids:
    mixed = sources.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + targets.astype(np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return (mixed >> np.uint64(64 - 22)).astype(np.int64)


@dataclass(frozen=True)
class Lexicon:
    """What was learned from some sentence pairs."""

    probabilities: Floats  # (TABLE,): t(target word | source word), by cell
    frequencies: Floats  # of each target word among all; 0 where it was not met

    @classmethod
    def learn(cls, source: Bags, target: Bags, *, left: Ids, right: Ids, vocabulary: int) -> "Lexicon":
        """Learn from the pairs `(left[k], right[k])`; words are numbered below `vocabulary`."""
        links = _Links.of(source, target, left=left, right=right)
        table = np.ones(TABLE)
        for _ in range(ROUNDS):
            weights = table[links.cells]
            weights /= sums_of(links.tokens, weights, size=0)[links.tokens]  # how much of the target word each explains
            counts = sums_of(links.cells, weights, size=TABLE)
            totals = sums_of(links.sources, weights, size=vocabulary)
            table = np.zeros(TABLE)
            table[links.cells] = np.minimum(1.0, counts[links.cells] / totals[links.sources])
        table[table < LEAST] = 0.0

        met = np.bincount(links.token_words, minlength=vocabulary)
        return cls(probabilities=table, frequencies=met / max(1, met.sum()))

    def gains(self, source: Bags, target: Bags, *, left: Ids, right: Ids) -> Floats:
        """How much better the source sentence predicts the words of the target sentence than their frequency does.

        For each pair `(left[k], right[k])` the mean over its known target words of the log of the ratio, in nats; NaN
        where no word is known.
        """
        links = _Links.of(source, target, left=left, right=right)
        tokens = len(links.token_words)
        explained = sums_of(links.tokens, self.probabilities[links.cells], size=tokens)
        explained /= np.maximum(1, links.token_links)

        usual = np.append(
            self.frequencies, np.zeros(max(0, int(target.words.max(initial=0)) + 1 - len(self.frequencies)))
        )
        usual = usual[links.token_words]
        is_known = usual > 0.0
        ratio = np.ones(tokens)
        ratio[is_known] = SMOOTHING + (1.0 - SMOOTHING) * explained[is_known] / usual[is_known]

        sums = sums_of(links.token_pairs, np.log(ratio), size=len(left))
        known = np.bincount(links.token_pairs, is_known, minlength=len(left))
        return np.where(known > 0, sums / np.maximum(1, known), np.nan)
