"""Which of two languages a text is in, told by its groups of three characters, without knowing either language.

The sides of all sets are sorted into two classes, as naive Bayes does: each class is a distribution of trigrams, and a
pair stands as its sides fit the classes. Sorting and counting take turns, from the pairs as they stand, until the pairs
whose sides are swapped have changed places. It works where half of a set is swapped, as long as the pairs of all sets
together are not exactly half and half.
"""

from dataclasses import dataclass

import numpy as np

from transformer.data.store import Ids
from transformer.tools.doctor.lexicon import Floats, sums_of

BINS = 1 << 14  # that trigrams are hashed into
CHARACTERS = 200  # of a line that are looked at
ROUNDS = 10
PRIOR = 2.0  # counts that each class has of every bin, before any is counted
NEWLINE = 10


@dataclass(frozen=True)
class Trigrams:
    """The trigrams of some lines."""

    bins: Ids
    lines: Ids  # of each trigram the line
    count: int  # of lines

    @classmethod
    def of(cls, texts: list[str]) -> "Trigrams":
        """Of each line, its beginning and its end counted as spaces, without regard to case."""
        joined = "".join(f"\n {' '.join(text[:CHARACTERS].split())} " for text in texts).lower()
        codes = np.frombuffer(joined.encode("utf-32-le", errors="surrogatepass"), np.uint32).astype(np.uint64)
        lines = (codes == NEWLINE).cumsum() - 1

        mixed = codes[:-2] * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed + codes[1:-1]) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed + codes[2:]) * np.uint64(0x94D049BB133111EB)
        is_inside = (codes[:-2] != NEWLINE) & (codes[1:-1] != NEWLINE) & (codes[2:] != NEWLINE)
        bins = (mixed >> np.uint64(64 - 14)).astype(np.int64)
        return cls(bins=bins[is_inside], lines=lines[:-2][is_inside], count=len(texts))

    def histogram(self, wanted: Floats) -> Floats:
        """How often each bin occurs, each line counted so often."""
        return sums_of(self.bins, wanted[self.lines], size=BINS)

    def total(self, weights: Floats) -> Floats:
        """For each line the sum of the weights of its trigrams."""
        return sums_of(self.lines, weights[self.bins], size=self.count)


@dataclass(frozen=True)
class Evidence:
    """For each pair, how much each side speaks for the source's language: the log of the odds, in nats."""

    source: Floats
    target: Floats


def sort_sides(source: Trigrams, target: Trigrams) -> Evidence:
    """Sort the sides of the pairs into two languages; what most sources are in is the source's language."""
    stands = np.ones(source.count)  # 1: as it stands, 0: swapped
    evidence = Evidence(np.zeros(source.count), np.zeros(source.count))
    for _ in range(ROUNDS):
        first = source.histogram(stands) + target.histogram(1.0 - stands) + PRIOR
        second = source.histogram(1.0 - stands) + target.histogram(stands) + PRIOR
        weights = np.log(first / first.sum()) - np.log(second / second.sum())

        evidence = Evidence(source.total(weights), target.total(weights))
        before = stands
        stands = (evidence.source >= evidence.target).astype(np.float64)
        if np.array_equal(before, stands):
            break

    if stands.mean() < 0.5:
        return Evidence(-evidence.source, -evidence.target)
    return evidence


def distance(first: Floats, second: Floats) -> float:
    """The Jensen-Shannon divergence of two histograms, in nats: 0 where they are alike, at most log 2."""
    first = (first + 1e-3) / (first + 1e-3).sum()
    second = (second + 1e-3) / (second + 1e-3).sum()
    middle = (first + second) / 2.0
    return float((first * np.log(first / middle) + second * np.log(second / middle)).sum() / 2.0)
