"""Which pairs of a training set the detectors find at fault: `data.filter.doctor`.

    one reading -> BlockSample -> Cleaner.learn    what is usual in the set: its trigrams, scripts, lengths and words
    another     -> Cleaner.examine, block by block   a verdict on each pair

What is learned depends on a sample in bounded memory, and a verdict on what is learned and on the pair's own block, so
that each set is judged by itself, the same way each time.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from transformer import registry
from transformer.data.corpus import Pair
from transformer.tools.detectors.alignment import Aligner, Lengths
from transformer.tools.detectors.languages import (
    EVIDENCE,
    can_tell_foreign,
    expected_script,
    foreign_language,
    is_accepted,
    letters_by_script,
    words_of,
)
from transformer.tools.detectors.lexicon import Floats
from transformer.tools.detectors.profiles import Trigrams, learn_odds
from transformer.tools.detectors.sample import BLOCK, BlockSample
from transformer.tools.detectors.text import has_lost_characters, has_markup, is_copy, is_double_encoded

VERSION = 2  # of the verdicts: a prepared corpus that was cleaned depends on it
CHUNK = 40 * BLOCK  # pairs that are judged at a time

Found = npt.NDArray[np.bool_]

log = logging.getLogger(__name__)


def find_faults(
    read: Callable[[], Iterable[Pair]], names: Sequence[str], languages: tuple[str, str]
) -> Iterator[str | None]:
    """For each pair the first detector that finds a fault in it. `read` gives the pairs anew each time.

    `languages` are the codes of the source's and of the target's.
    """
    cleaner = Cleaner.learn(read(), names, languages)
    pairs = iter(read())
    first_block = 0
    while chunk := list(islice(pairs, CHUNK)):
        yield from cleaner.examine(chunk, first_block=first_block)
        first_block += CHUNK // BLOCK


@dataclass(frozen=True)
class Cleaner:
    """The detectors that are asked for, with what they have learned of a set."""

    detectors: list[str]  # in the order in which they are asked
    languages: tuple[str, str]
    scripts: tuple[str, str]  # that the sides should have
    odds: Floats  # that a trigram is of the source's language
    usual_ratio: float  # of lengths, as a logarithm
    aligner: Aligner | None  # None: not asked for, or nothing to learn

    @classmethod
    def learn(cls, pairs: Iterable[Pair], detectors: Sequence[str], languages: tuple[str, str]) -> "Cleaner":
        """Learn from all pairs of a set what is usual in it."""
        sample = BlockSample()
        pairs = iter(pairs)
        line = 1
        while block := list(islice(pairs, BLOCK)):
            sample.add(line, block)
            line += len(block)
        _, sources, targets = sample.columns()

        aligner = Aligner.learn(sample) if "alignment" in detectors else None
        if "alignment" in detectors and aligner is None:
            log.warning(
                "data.filter.doctor: alignment drops nothing: no words of the two sides occur together often enough"
            )
        return cls(
            detectors=[name for name in registry.OWN["screen"] if name in detectors],
            languages=languages,
            scripts=(_script_of(sources, languages[0]), _script_of(targets, languages[1])),
            odds=learn_odds(Trigrams.of(sources), Trigrams.of(targets)),
            usual_ratio=Lengths.of(sources, targets).usual,
            aligner=aligner,
        )

    def examine(self, pairs: Sequence[Pair], *, first_block: int) -> list[str | None]:
        """For each pair the first detector that finds a fault in it; the pairs begin with this block of the set."""
        sources = [source for source, _ in pairs]
        targets = [target for _, target in pairs]
        verdicts: list[str | None] = [None] * len(pairs)
        for detector in self.detectors:
            for index in np.flatnonzero(self._find(detector, sources, targets, first_block)):
                verdicts[index] = verdicts[index] or detector
        return verdicts

    def _find(self, detector: str, sources: list[str], targets: list[str], first_block: int) -> Found:
        """Which pairs one detector finds at fault: `(b,)`."""
        if detector == "copies":
            return np.array([is_copy(*pair) for pair in zip(sources, targets, strict=True)])
        if detector == "encoding":
            return _on_either_side(lambda text: is_double_encoded(text) or has_lost_characters(text), sources, targets)
        if detector == "markup":
            return _on_either_side(has_markup, sources, targets)
        if detector == "lengths":
            return Lengths.of(sources, targets).are_outliers(self.usual_ratio)
        if detector == "languages":
            return self._find_languages(sources, targets)
        if self.aligner is None:
            return np.zeros(len(sources), np.bool_)
        return self.aligner.find(sources, targets, first_block=first_block)

    def _find_languages(self, sources: list[str], targets: list[str]) -> Found:
        """Swapped and untranslated pairs, and sides in a third language or in another script."""
        # A side speaks for its own language, or at least not certainly for the other one.
        of_source = Trigrams.of(sources).total(self.odds)
        of_target = Trigrams.of(targets).total(self.odds)
        found = (np.minimum(np.abs(of_source), np.abs(of_target)) > EVIDENCE) & ((of_source < 0) | (of_target > 0))

        for texts, code, script in zip((sources, targets), self.languages, self.scripts, strict=True):
            if can_tell_foreign(code):
                found |= np.array([foreign_language(words_of(text), code) is not None for text in texts])
            found |= np.array([_is_of_another_script(text, script) for text in texts])
        return found


def _on_either_side(has_fault: Callable[[str], bool], sources: list[str], targets: list[str]) -> Found:
    return np.array([has_fault(source) or has_fault(target) for source, target in zip(sources, targets, strict=True)])


def _script_of(texts: Sequence[str], code: str) -> str:
    """The script of a language, or where that is not known, that of these texts."""
    letters = Counter[str]()
    for text in texts:
        letters.update(letters_by_script(text))
    return expected_script(code, letters)


def _is_of_another_script(text: str, expected: str) -> bool:
    if expected == "LATIN" and text.isascii():  # most texts: their letters need not be counted
        return False
    letters = letters_by_script(text)
    return bool(letters) and not is_accepted(letters.most_common(1)[0][0], expected)
