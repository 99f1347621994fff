"""Which of two languages a text is in, by its groups of three characters, without knowing either language.

    texts of a side -> Trigrams, hashed into bins -> sort_sides, over the pairs of all sets -> Evidence, for the doctor

The sides are sorted into two classes, as naive Bayes does: each class is a distribution of trigrams, and a pair counts
as swapped where its sides fit the classes better when exchanged. Counting and sorting take turns, from the pairs as
they are in the files, until no pair changes. Half of a set may be swapped, as long as the pairs of all sets together
are not exactly half and half.
"""

from dataclasses import dataclass

import numpy as np

from transformer.data.store import Ids
from transformer.tools.detectors.lexicon import Floats, sums_of

BIN_BITS = 14
BINS = 1 << BIN_BITS  # that trigrams are hashed into
CHARACTERS = 200  # of a line that are looked at
ROUNDS = 10
PRIOR = 2.0  # counts that each class has of every bin, before any is counted
NEWLINE = ord("\n")


@dataclass(frozen=True)
class Trigrams:
    """The trigrams of some lines."""

    bins: Ids  # of each trigram
    lines: Ids  # the line that each trigram is in
    count: int  # of lines

    @classmethod
    def of(cls, texts: list[str]) -> "Trigrams":
        """The trigrams of each line, in lower case, with a space before its beginning and behind its end."""
        # One text for all lines, as an array of characters.
        joined = "".join(f"\n {' '.join(text[:CHARACTERS].split())} " for text in texts).lower()
        codes = np.frombuffer(joined.encode("utf-32-le", errors="surrogatepass"), np.uint32).astype(np.uint64)
        lines = (codes == NEWLINE).cumsum() - 1

        # A multiplicative hash of each character with the two behind it, of which the highest bits are the bin.
        mixed = codes[:-2] * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed + codes[1:-1]) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed + codes[2:]) * np.uint64(0x94D049BB133111EB)
        bins = (mixed >> np.uint64(64 - BIN_BITS)).astype(np.int64)

        # No trigram reaches from one line into the next.
        is_inside = (codes[:-2] != NEWLINE) & (codes[1:-1] != NEWLINE) & (codes[2:] != NEWLINE)
        return cls(bins=bins[is_inside], lines=lines[:-2][is_inside], count=len(texts))

    def histogram(self, line_weights: Floats) -> Floats:
        """How often each bin occurs, each line counted with its weight: `(BINS,)`."""
        return sums_of(self.bins, line_weights[self.lines], size=BINS)

    def total(self, bin_weights: Floats) -> Floats:
        """For each line the sum of the weights of its trigrams: `(count,)`."""
        return sums_of(self.lines, bin_weights[self.bins], size=self.count)


@dataclass(frozen=True)
class Evidence:
    """For each pair, how much each side speaks for the source's language: the log of the odds, in nats."""

    source: Floats
    target: Floats


def sort_sides(source: Trigrams, target: Trigrams) -> Evidence:
    """Sort the sides of the pairs into two languages; the source's language is the one that most sources are in."""
    odds = learn_odds(source, target)
    return Evidence(source.total(odds), target.total(odds))


def learn_odds(source: Trigrams, target: Trigrams) -> Floats:
    """The log of the odds that a trigram is of the source's language, by bin: `(BINS,)`."""
    in_order = np.ones(source.count)  # 1: the sides of the pair are in order, 0: they are swapped
    log_odds = np.zeros(BINS)
    for _ in range(ROUNDS):
        # The trigrams of the two languages, if the pairs are sorted rightly.
        first = source.histogram(in_order) + target.histogram(1.0 - in_order) + PRIOR
        second = source.histogram(1.0 - in_order) + target.histogram(in_order) + PRIOR
        log_odds = np.log(first / first.sum()) - np.log(second / second.sum())

        # Sort the pairs by these trigrams.
        before = in_order
        in_order = (source.total(log_odds) >= target.total(log_odds)).astype(np.float64)
        if np.array_equal(before, in_order):
            break

    # Most pairs are swapped: then it is the others that are.
    return -log_odds if in_order.mean() < 0.5 else log_odds


def distance(first: Floats, second: Floats) -> float:
    """The Jensen-Shannon divergence of two histograms, in nats: 0 where they are alike, at most log 2."""
    # No probability is 0, whose logarithm is infinite.
    p = (first + 1e-3) / (first + 1e-3).sum()
    q = (second + 1e-3) / (second + 1e-3).sum()

    middle = (p + q) / 2.0
    divergences = p * np.log(p / middle) + q * np.log(q / middle)
    return float(divergences.sum() / 2.0)
