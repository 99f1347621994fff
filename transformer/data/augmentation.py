"""Pairs changed as text in the wild is, in upper case or with typos: where the core meets the plug-ins that do it.

In training, an `Augmentation` changes some pairs of each epoch (see `epochs`). A development or test set can be changed
as a whole (`Change`), which shows what a model bears.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Protocol

from transformer import plugins
from transformer.data.corpus import Pair
from transformer.data.store import Ids, Sentences
from transformer.seeding import seed_for

Sides = tuple[Sentences, Sentences]  # of the same pairs


class Augmentation(Protocol):
    """Changes some of the pairs of each epoch, by (seed, epoch, pair) alone, as subword sampling does."""

    def change(self, plain: Sides, ids: Ids, *, epoch: int) -> Sides:
        """The pairs `ids` `(b,)` of an epoch's store, given as the corpus has them."""
        ...


@dataclass(frozen=True)
class Change:
    """What is done to every pair of a set."""

    name: str  # of a plug-in
    languages: tuple[str, str]

    def pairs(self, pairs: Iterable[Pair], *, first: int) -> Iterator[Pair]:
        """The pairs, changed by their numbers alone, of which the first is given."""
        augment = plugins.find("augment", self.name)
        for number, pair in enumerate(pairs, first):
            yield augment(pair, self.languages, Random(seed_for(number)).random)
