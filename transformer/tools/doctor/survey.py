"""What the checks of the text look at: one reading of each set of pairs, in bounded memory.

Everything that is counted exactly (pairs, sentences of the evaluation sets, the longest lines) is counted while the
text goes by. What takes more time is measured on a sample: blocks of neighbouring pairs, because a shift shows only
between neighbours. The sample is every n-th block, and n doubles whenever there are too many blocks, so that it is the
same each time and the number of pairs need not be known before. Such a sample would miss copies of a pair. So for
copies, pairs are sampled by a digest of their text, which takes all copies of a pair or none.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from transformer.config.settings import is_training_set
from transformer.data.corpus import Pair
from transformer.data.source import Source
from transformer.tools.detectors.sample import BLOCK, BlockSample
from transformer.tools.doctor.findings import LISTED, Place

SIDES = ("source", "target")
MOST_TEXTS = 250_000  # different pairs among which copies are looked for
LONGEST = 3  # longest pairs that are kept


@dataclass
class Repeats:
    """Copies of a pair, among the pairs whose digest is a multiple of `stride`."""

    stride: int = 1
    pairs: int = 0  # that were counted
    lines: list[int] = field(default_factory=list)  # of the first copies, as many as are shown
    counts: dict[int, int] = field(default_factory=dict)  # of each different pair, by its digest

    def add(self, line: int, source: str, target: str) -> None:
        """Count one more pair. Pairs are equal where 8 bytes of BLAKE2 are, as in the filter `drop_duplicates`."""
        text = f"{source.strip()}\n{target.strip()}".encode(errors="surrogatepass")
        digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        if digest % self.stride:
            return

        # Count it.
        copies_before = self.counts.get(digest, 0)
        self.counts[digest] = copies_before + 1
        self.pairs += 1
        if copies_before and len(self.lines) < LISTED:
            self.lines.append(line)

        # Where there are too many different pairs, keep every other digest.
        if len(self.counts) > MOST_TEXTS:
            self.stride *= 2
            self.counts = {digest: count for digest, count in self.counts.items() if digest % self.stride == 0}
            self.pairs = sum(self.counts.values())

    @property
    def share(self) -> float:
        """The share of pairs that are copies of an earlier one."""
        if not self.pairs:
            return 0.0
        return 1.0 - len(self.counts) / self.pairs


@dataclass
class Overlap:
    """The sentences of an evaluation set that are also in a training set: their lines in both."""

    sources: dict[int, int] = field(default_factory=dict)  # line of the evaluation set -> first line of training
    targets: dict[int, int] = field(default_factory=dict)
    pairs: dict[int, int] = field(default_factory=dict)


class KnownTexts:
    """The sentences of the evaluation sets, to be looked up in training text; case and outer spaces do not count."""

    def __init__(self, sets: Mapping[str, "Survey"]) -> None:
        self.names = list(sets)
        self._sources: dict[str, list[tuple[str, int]]] = {}  # text -> the set and the line of each of its copies
        self._targets: dict[str, list[tuple[str, int]]] = {}
        for name, survey in sets.items():
            for line, source, target in survey.pairs():
                self._sources.setdefault(_key(source), []).append((name, line))
                self._targets.setdefault(_key(target), []).append((name, line))
        # Blank lines are equal, and say nothing.
        self._sources.pop("", None)
        self._targets.pop("", None)

    def note(self, line: int, source: str, target: str, overlaps: Mapping[str, Overlap]) -> None:
        """Note in `overlaps`, by evaluation set, where the sentences of a training pair are evaluation sentences."""
        same_source = self._sources.get(_key(source), ())
        same_target = self._targets.get(_key(target), ())

        for name, known_line in same_source:
            overlaps[name].sources.setdefault(known_line, line)
        for name, known_line in same_target:
            overlaps[name].targets.setdefault(known_line, line)
        for name, known_line in set(same_source) & set(same_target):
            overlaps[name].pairs.setdefault(known_line, line)


def _key(text: str) -> str:
    """The form in which texts are compared."""
    return text.strip().casefold()


@dataclass(frozen=True)
class Shard:
    """A file of each side, and how many lines of the set come before it."""

    paths: tuple[str, str]  # of the source text and the target text; a table is both
    start: int


@dataclass(frozen=True)
class Survey:
    """What was read of a set: counts of all its pairs, and a sample of them."""

    name: str  # train, extra.NAME, dev or test.NAME
    shards: list[Shard]  # of the files, in order
    pairs_read: int
    lines: list[int]  # of the sampled pairs, counted from 1
    sources: list[str]
    targets: list[str]
    repeats: Repeats
    overlaps: dict[str, Overlap]  # of a training set with each evaluation set
    longest: list[tuple[int, str, str]]  # line, source and target of the longest pairs, by characters

    @property
    def is_training(self) -> bool:
        """Whether it is trained on."""
        return is_training_set(self.name)

    def pairs(self) -> Iterable[tuple[int, str, str]]:
        """Line, source and target of each sampled pair."""
        return zip(self.lines, self.sources, self.targets, strict=True)

    def side(self, side: int) -> list[str]:
        """The sampled texts of one side; 0 is the source."""
        return self.targets if side else self.sources

    def without(self, lines: Collection[int]) -> "Survey":
        """The same without these lines in the sample."""
        left_out = set(lines)
        kept = [pair for pair in self.pairs() if pair[0] not in left_out]
        return replace(
            self,
            lines=[line for line, _, _ in kept],
            sources=[source for _, source, _ in kept],
            targets=[target for _, _, target in kept],
        )

    def exchanged(self) -> "Survey":
        """The same with the source for the target."""
        return replace(
            self,
            shards=[Shard((shard.paths[1], shard.paths[0]), shard.start) for shard in self.shards],
            sources=self.targets,
            targets=self.sources,
            longest=[(line, target, source) for line, source, target in self.longest],
        )

    def path(self, side: int) -> str:
        """The first file of one side."""
        return self.shards[0].paths[side]

    def places(self, lines: Iterable[int], side: int | None = None) -> list[Place]:
        """The first few of these lines in the files of one side, or of both: then a table is named once."""
        starts = [shard.start for shard in self.shards]
        lines_of: dict[int, list[int]] = {}  # by shard, counted from its first
        for line in islice(lines, LISTED):
            number = bisect_left(starts, line) - 1
            lines_of.setdefault(number, []).append(line - starts[number])

        places = []
        for number, in_shard in lines_of.items():
            paths = self.shards[number].paths
            places += [Place(path, in_shard) for path in (dict.fromkeys(paths) if side is None else [paths[side]])]
        return places


def survey(name: str, source: Source, known: KnownTexts | None) -> Survey:
    """Read a set once; `known` are the evaluation sentences that a training set should not contain.

    A set of up to MOST_PAIRS pairs is sampled whole. Raises InputError where the text cannot be read.
    """
    blocks = BlockSample()
    repeats = Repeats()
    overlaps = {evaluation_set: Overlap() for evaluation_set in known.names} if known else {}
    longest: list[tuple[int, str, str]] = []
    shortest_kept = 0  # characters that a pair needs to be among the longest
    line = 0

    shards: list[Shard] = []
    pairs = _read(source, shards)
    while block := list(islice(pairs, BLOCK)):
        blocks.add(line + 1, block)
        for left, right in block:
            line += 1
            repeats.add(line, left, right)
            if known:
                known.note(line, left, right, overlaps)
            if max(len(left), len(right)) > shortest_kept:
                longest = sorted([*longest, (line, left, right)], key=_length, reverse=True)[:LONGEST]
                shortest_kept = _length(longest[-1]) if len(longest) == LONGEST else 0

    lines, sources, targets = blocks.columns()
    return Survey(
        name=name,
        shards=shards,
        pairs_read=line,
        lines=lines,
        sources=sources,
        targets=targets,
        repeats=repeats,
        overlaps=overlaps,
        longest=longest,
    )


def _read(source: Source, shards: list[Shard]) -> Iterator[Pair]:
    """The pairs of a set; where each file begins is added to `shards`."""
    pairs_read = 0
    for part in source.by_shard():
        (paths,) = part.shards
        shards.append(Shard((str(paths[0]), str(paths[-1])), pairs_read))
        for pair in part.pairs():
            pairs_read += 1
            yield pair


def _length(item: tuple[int, str, str]) -> int:
    """The characters of a pair's longer side."""
    _, source, target = item
    return max(len(source), len(target))
