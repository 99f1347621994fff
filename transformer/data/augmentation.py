"""Pairs changed as text in the wild is, in upper case or with typos: where the core meets the plug-ins that do it.

In training, an `Augmentation` changes some pairs of each epoch (see `epochs`). A development or test set can be changed
as a whole (`change_all`), which shows what a model bears.
"""

from collections.abc import Iterable, Iterator
from random import Random
from typing import Protocol

from transformer import registry
from transformer.data.corpus import Pair
from transformer.data.store import Ids, Sentences
from transformer.plugins import Augment
from transformer.seeding import seed_for

Sides = tuple[Sentences, Sentences]  # of the same pairs


class Augmentation(Protocol):
    """Changes some of the pairs of each epoch, by (seed, epoch, pair) alone, as subword sampling does."""

    def change(self, plain: Sides, ids: Ids, *, epoch: int) -> Sides:
        """The pairs `ids` `(b,)` of an epoch's store, given as the corpus has them."""
        ...


def change_all(pairs: Iterable[Pair], name: str, *, languages: tuple[str, str], first: int) -> Iterator[Pair]:
    """Every pair of a set as the plug-in `name` changes it, by its number alone, of which the first is given."""
    augment: Augment = registry.find("augment", name)
    for number, pair in enumerate(pairs, first):
        yield augment(pair, languages, Random(seed_for(number)).random)
