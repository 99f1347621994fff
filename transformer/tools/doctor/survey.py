"""What the checks of the text look at: one reading of each set of pairs, in bounded memory.

Everything that is counted exactly (pairs, sentences of the evaluation sets, the longest lines) is counted while the
text goes by. What takes more time is asked of a sample: blocks of neighbouring pairs, because a shift shows only
between neighbours. The sample is every n-th block, and n doubles whenever there are too many blocks, so that it is the
same each time and the number of pairs need not be known before. Copies of a pair would be missed by such a sample:
pairs are sampled by a digest of their text for that, which takes all copies of a pair or none.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from transformer.data.corpus import Pair
from transformer.data.source import Source

BLOCK = 50  # neighbouring pairs
MOST_PAIRS = 30_000  # sampled
MOST_TEXTS = 250_000  # different pairs among which copies are looked for
LONGEST = 3  # longest pairs that are kept
MOST_PLACES = 20  # line numbers that are kept of a finding


@dataclass
class Repeats:
    """Copies of a pair, among the pairs whose digest is a multiple of `stride`."""

    stride: int = 1
    pairs: int = 0  # looked at
    lines: list[int] = field(default_factory=list)  # of the first copies
    counts: dict[int, int] = field(default_factory=dict)  # of each different pair, by its digest

    def add(self, line: int, source: str, target: str) -> None:
        """One more pair. Equal pairs are told by 8 bytes of BLAKE2, as the filter `drop_duplicates` does."""
        text = f"{source.strip()}\n{target.strip()}".encode(errors="surrogatepass")
        digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        if digest % self.stride:
            return

        count = self.counts.get(digest, 0)
        self.counts[digest] = count + 1
        self.pairs += 1
        if count and len(self.lines) < MOST_PLACES:
            self.lines.append(line)
        if len(self.counts) > MOST_TEXTS:
            self.stride *= 2
            self.counts = {digest: count for digest, count in self.counts.items() if digest % self.stride == 0}
            self.pairs = sum(self.counts.values())

    @property
    def share(self) -> float:
        """Of the pairs, those that came before."""
        return 1.0 - len(self.counts) / self.pairs if self.pairs else 0.0


@dataclass
class Overlap:
    """Which sentences of an evaluation set a training set has, too: their lines in either."""

    sources: dict[int, int] = field(default_factory=dict)  # line of the evaluation set -> first line of training
    targets: dict[int, int] = field(default_factory=dict)
    pairs: dict[int, int] = field(default_factory=dict)


class KnownTexts:
    """The sentences of the evaluation sets, to be met again in training text; case and outer spaces do not count."""

    def __init__(self, sets: Mapping[str, "Survey"]) -> None:
        self._sources: dict[str, list[tuple[str, int]]] = {}  # text -> set and line of each place that has it
        self._targets: dict[str, list[tuple[str, int]]] = {}
        self.names = list(sets)
        for name, survey in sets.items():
            for line, source, target in survey.pairs():
                self._sources.setdefault(_key(source), []).append((name, line))
                self._targets.setdefault(_key(target), []).append((name, line))
        self._sources.pop("", None)
        self._targets.pop("", None)

    def meet(self, line: int, source: str, target: str, overlaps: Mapping[str, Overlap]) -> None:
        """Note where the sentences of a training pair are evaluation sentences."""
        same_source = self._sources.get(_key(source), ())
        same_target = self._targets.get(_key(target), ())
        for name, where in same_source:
            overlaps[name].sources.setdefault(where, line)
        for name, where in same_target:
            overlaps[name].targets.setdefault(where, line)
        for name, where in set(same_source) & set(same_target):
            overlaps[name].pairs.setdefault(where, line)


def _key(text: str) -> str:
    return text.strip().casefold()


@dataclass(frozen=True)
class Survey:
    """What was read of a set."""

    name: str  # train, extra.NAME, dev or test.NAME
    paths: tuple[str, str]  # of the source text and the target text; of a table, the same
    pairs_read: int
    lines: list[int]  # of each sampled pair its line, counted from 1
    sources: list[str]
    targets: list[str]
    repeats: Repeats
    overlaps: dict[str, Overlap]  # with each evaluation set; of a training set
    longest: list[tuple[int, str, str]]  # line, source and target of the longest pairs, by characters

    @property
    def is_training(self) -> bool:
        """Whether it is trained on."""
        return self.name == "train" or self.name.startswith("extra.")

    def pairs(self) -> Iterable[tuple[int, str, str]]:
        """Line, source and target of each sampled pair."""
        return zip(self.lines, self.sources, self.targets, strict=True)

    def side(self, side: int) -> list[str]:
        """The sampled texts of one side; 0 is the source."""
        return self.targets if side else self.sources


class _Blocks:
    """Every `stride`-th block of neighbours, at most MOST_PAIRS pairs."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, list[Pair]]] = []  # the line of the first pair, and the pairs
        self._stride = 1
        self._seen = 0

    def add(self, line: int, block: list[Pair]) -> None:
        if self._seen % self._stride == 0:
            self.kept.append((line, block))
        self._seen += 1
        if len(self.kept) * BLOCK > MOST_PAIRS:
            self.kept = self.kept[::2]
            self._stride *= 2


def survey(name: str, source: Source, known: KnownTexts | None) -> Survey:
    """Read a set once; `known` are the evaluation sentences that a training set is not to have.

    Evaluation sets are sampled whole, up to MOST_PAIRS pairs. Raises InputError where the text cannot be read.
    """
    blocks = _Blocks()
    repeats = Repeats()
    overlaps = {name: Overlap() for name in known.names} if known else {}
    longest: list[tuple[int, str, str]] = []
    shortest_kept = 0  # characters that a pair needs to be among the longest
    line = 0

    pairs = iter(source.pairs())
    while block := list(islice(pairs, BLOCK)):
        blocks.add(line + 1, block)
        for left, right in block:
            line += 1
            repeats.add(line, left, right)
            if known:
                known.meet(line, left, right, overlaps)
            if max(len(left), len(right)) > shortest_kept:
                longest = sorted([*longest, (line, left, right)], key=_length, reverse=True)[:LONGEST]
                shortest_kept = _length(longest[-1]) if len(longest) == LONGEST else 0

    paths = [str(path) for path in source.files.values()]
    sampled = [(first + index, pair) for first, block in blocks.kept for index, pair in enumerate(block)]
    return Survey(
        name=name,
        paths=(paths[0], paths[-1]),
        pairs_read=line,
        lines=[number for number, _ in sampled],
        sources=[pair[0] for _, pair in sampled],
        targets=[pair[1] for _, pair in sampled],
        repeats=repeats,
        overlaps=overlaps,
        longest=longest,
    )


def _length(item: tuple[int, str, str]) -> int:
    _, source, target = item
    return max(len(source), len(target))
