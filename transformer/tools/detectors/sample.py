"""A sample of neighbouring pairs, in bounded memory: what the detectors learn the usual from.

Every n-th block is kept, and n doubles whenever there are too many, so that the sample is the same each time and the
number of pairs need not be known before.
"""

from transformer.data.corpus import Pair

BLOCK = 50  # neighbouring pairs
MOST_PAIRS = 30_000  # sampled


class BlockSample:
    """Every `stride`-th block of neighbouring pairs, at most MOST_PAIRS pairs."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, list[Pair]]] = []  # the line of the first pair, and the pairs
        self.stride = 1
        self._blocks_read = 0

    def add(self, line: int, block: list[Pair]) -> None:
        """Keep the next block, if it is its turn."""
        if self._blocks_read % self.stride == 0:
            self.kept.append((line, block))
        self._blocks_read += 1

        # Where there are too many, keep every other one.
        if len(self.kept) * BLOCK > MOST_PAIRS:
            self.kept = self.kept[::2]
            self.stride *= 2

    def columns(self) -> tuple[list[int], list[str], list[str]]:
        """Lines, sources and targets of the sampled pairs, the blocks end to end."""
        lines: list[int] = []
        sources: list[str] = []
        targets: list[str] = []
        for first_line, block in self.kept:
            lines += range(first_line, first_line + len(block))
            sources += [left for left, _ in block]
            targets += [right for _, right in block]
        return lines, sources, targets
