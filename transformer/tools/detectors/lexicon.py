"""Which words translate which: IBM model 1 (Brown et al., 1993, section 4.1), learned from a sample in a second.

    sentences -> Bags, words as numbers -> Links of the words of sentence pairs -> Lexicon.learn -> Lexicon.gains

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

TABLE_BITS = 22
TABLE = 1 << TABLE_BITS  # cells
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


def all_words_of(text: str) -> list[str]:
    """The words of a sentence in lower case, each as often as it comes."""
    return _WORD.findall(text.lower())


def stems_of(text: str) -> list[str]:
    """The different words of a sentence, cut to their stems, in the order in which they come."""
    return list(dict.fromkeys(word[:STEM] for word in all_words_of(text)))


@dataclass(frozen=True)
class Bags:
    """Sentences as sets of words: the words of all sentences end to end, and where each sentence begins."""

    words: Ids  # numbers of words
    starts: Ids  # of each sentence, in `words`
    counts: Ids  # words of each sentence

    @classmethod
    def of(cls, texts: Iterable[str], numbers: dict[str, int], *, has_null: bool, is_known: bool = False) -> "Bags":
        """Number the words; new ones are added to `numbers`, or with `is_known` all have the number after its last.

        `has_null` puts the empty word 0 into every sentence.
        """
        number_of = numbers.get if is_known else numbers.setdefault
        sentences = []
        for text in texts:
            words = stems_of(text)[:MOST_WORDS]
            numbered = [number_of(word, len(numbers)) for word in words]
            sentences.append([0, *numbered] if has_null else numbered)

        counts = np.fromiter(map(len, sentences), np.int64, len(sentences))
        all_words = np.fromiter((word for sentence in sentences for word in sentence), np.int64, int(counts.sum()))
        return cls(words=all_words, starts=counts.cumsum() - counts, counts=counts)


@dataclass(frozen=True)
class _Links:
    """Every link of a target token with a word of its source sentence; a token is a word of one target sentence."""

    # For each link:
    cells: Ids  # where the table has the probability of its two words
    sources: Ids  # its source word
    tokens: Ids  # its target token, counted over all pairs
    # For each target token:
    token_words: Ids  # its word
    token_pairs: Ids  # its sentence pair
    token_links: Ids  # the number of its links

    @classmethod
    def of(cls, source: Bags, target: Bags, *, left: Ids, right: Ids) -> "_Links":
        """The links of the sentence pairs `(left[k], right[k])`."""
        # The target tokens of all pairs, one pair after the other.
        counts = target.counts[right]
        token_pairs = np.repeat(np.arange(len(left)), counts)
        token_places = np.repeat(target.starts[right], counts) + _within(counts)
        token_words = target.words[token_places]

        # Each token is linked with every word of its source sentence.
        token_links = source.counts[left][token_pairs]
        tokens = np.repeat(np.arange(len(token_words)), token_links)
        source_places = np.repeat(source.starts[left][token_pairs], token_links) + _within(token_links)
        sources = source.words[source_places]
        return cls(
            cells=_cells(sources, token_words[tokens]),
            sources=sources,
            tokens=tokens,
            token_words=token_words,
            token_pairs=token_pairs,
            token_links=token_links,
        )


def _within(counts: Ids) -> Ids:
    """The places inside stretches of these lengths: [2, 3] -> [0, 1, 0, 1, 2]."""
    ends = counts.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) - np.repeat(ends - counts, counts)


def _cells(sources: Ids, targets: Ids) -> Ids:
    """A hash of each source word with its target word."""
    mixed = sources.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + targets.astype(np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return (mixed >> np.uint64(64 - TABLE_BITS)).astype(np.int64)


@dataclass(frozen=True)
class Lexicon:
    """The translation probabilities and word frequencies of some sentence pairs."""

    probabilities: Floats  # (TABLE,): t(target word | source word), by cell
    frequencies: Floats  # (vocabulary,): the share of each word in the target tokens; 0 where it did not occur

    @classmethod
    def learn(cls, source: Bags, target: Bags, *, left: Ids, right: Ids, vocabulary: int) -> "Lexicon":
        """Learn from the pairs `(left[k], right[k])`; words are numbered below `vocabulary`."""
        links = _Links.of(source, target, left=left, right=right)

        table = np.ones(TABLE)
        for _ in range(ROUNDS):
            # Expectation: how much of its target token each link explains.
            weights = table[links.cells]
            weights /= sums_of(links.tokens, weights, size=0)[links.tokens]

            # Maximisation: each source word's links, by target word, over all its links.
            counts = sums_of(links.cells, weights, size=TABLE)
            totals = sums_of(links.sources, weights, size=vocabulary)
            table = np.zeros(TABLE)
            table[links.cells] = np.minimum(1.0, counts[links.cells] / totals[links.sources])
        table[table < LEAST] = 0.0

        occurrences = np.bincount(links.token_words, minlength=vocabulary)
        return cls(probabilities=table, frequencies=occurrences / max(1, occurrences.sum()))

    def gains(self, source: Bags, target: Bags, *, left: Ids, right: Ids) -> Floats:
        """How much better the source sentence predicts the words of the target sentence than their frequency does.

        For each pair `(left[k], right[k])` the mean over its known target words of the log of the ratio, in nats; NaN
        where no word is known.
        """
        sums, known = self._log_ratios(source, target, left=left, right=right)
        return np.where(known > 0, sums / np.maximum(1, known), np.nan)

    def evidence(self, source: Bags, target: Bags, *, left: Ids, right: Ids) -> Floats:
        """The sum of what `gains` has the mean of: the log of the odds that the target translates the source."""
        return self._log_ratios(source, target, left=left, right=right)[0]

    def _log_ratios(self, source: Bags, target: Bags, *, left: Ids, right: Ids) -> tuple[Floats, Floats]:
        """For each pair the sum over its known target words, and how many these are."""
        links = _Links.of(source, target, left=left, right=right)
        tokens = len(links.token_words)

        # The probability of each target token, given its source sentence.
        explained = sums_of(links.tokens, self.probabilities[links.cells], size=tokens)
        explained /= np.maximum(1, links.token_links)

        # Its frequency: 0 for words that are newer than the lexicon.
        vocabulary = int(target.words.max(initial=0)) + 1
        newer_words = np.zeros(max(0, vocabulary - len(self.frequencies)))
        frequency = np.append(self.frequencies, newer_words)[links.token_words]

        # The first over the second, for known words.
        is_known = frequency > 0.0
        ratio = np.ones(tokens)
        ratio[is_known] = SMOOTHING + (1.0 - SMOOTHING) * explained[is_known] / frequency[is_known]

        # The logarithms, pair by pair.
        sums = sums_of(links.token_pairs, np.log(ratio), size=len(left))
        known = sums_of(links.token_pairs, is_known.astype(np.float64), size=len(left))
        return sums, known
