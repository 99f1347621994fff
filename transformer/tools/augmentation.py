"""Some pairs of each epoch, changed as text in the wild is, so that a model learns to bear it.

    pieces of the corpus -> text of the pairs that are drawn -> the changes of `augment` -> pieces

Which pairs an epoch changes, and how, follows from (seed, epoch, pair), as the pieces do under subword sampling: a run
that resumes, or runs on other ranks, trains on the same ones. The pieces give the text back. A pair stays as it is
where they do not, or where what it becomes has an empty side or an unknown piece.
"""

from collections.abc import Mapping, Sequence
from random import Random

import numpy as np
import numpy.typing as npt

from transformer import registry
from transformer.data.augmentation import Sides
from transformer.data.corpus import Pair, is_blank, with_tag
from transformer.data.counter_rng import Keys, mix, state, uniform
from transformer.data.store import SIDES, Ids, Sentences
from transformer.data.tokenizer import Tokenizers
from transformer.plugins import Augment
from transformer.seeding import seed_for
from transformer.vocabulary import UNK


class Augmentation:
    """Changes some of the pairs of each epoch: those that each rate draws, one change after the other."""

    def __init__(
        self,
        rates: Mapping[str, float],
        tokenizers: Tokenizers,
        *,
        languages: Mapping[str | None, tuple[str, str]],
        seed: int,
    ) -> None:
        """`languages` are those of the pairs by the tag in front of their sources; None: without one."""
        self._changes: list[tuple[Augment, float, str]] = [
            (registry.find("augment", name), rate, name) for name, rate in rates.items()
        ]
        self._tokenizers = tokenizers
        self._languages = languages
        self._seed = seed

    def change(self, plain: Sides, ids: Ids, *, epoch: int) -> Sides:
        """The pairs `ids` `(b,)` of an epoch's store, given as the corpus has them."""
        keys = [self._keys(name, ids, epoch=epoch) for _, _, name in self._changes]  # (b,) each
        drawn = [uniform(key, 0) < rate for key, (_, rate, _) in zip(keys, self._changes, strict=True)]
        has_text = np.logical_and.reduce([~_have(UNK, sentences) for sentences in plain])
        rows = np.flatnonzero(np.logical_or.reduce(drawn) & has_text)
        if not len(rows):
            return plain

        texts = zip(*(self._decode(side, plain[side], rows) for side in range(len(SIDES))), strict=True)
        changed: list[tuple[int, Pair]] = []
        for row, pair in zip(rows.tolist(), texts, strict=True):
            new = pair
            for (augment, _, _), key, is_drawn in zip(self._changes, keys, drawn, strict=True):
                if is_drawn[row]:
                    new = self._augmented(augment, new, Random(int(key[row])))
            if new != pair and not any(map(is_blank, new)):
                changed.append((row, new))
        return self._replace(plain, changed)

    def _keys(self, name: str, ids: Ids, *, epoch: int) -> Keys:
        """A random number for each pair, which is this change's own."""
        stream = np.array([seed_for(self._seed, epoch, *name.encode())], np.uint64)
        return mix(state(mix(state(stream, 0)), ids))

    def _augmented(self, augment: Augment, pair: Pair, draw: Random) -> Pair:
        """The changed pair; the tag of a source stays as it is."""
        tag = next((tag for tag in self._languages if pair[0].startswith(f"{tag} ")), None)
        source = pair[0] if tag is None else pair[0].removeprefix(f"{tag} ")
        source, target = augment((source, pair[1]), self._languages[tag], draw.random)
        return with_tag(source, tag), target

    def _decode(self, side: int, sentences: Sentences, rows: Ids) -> list[str]:
        ends = sentences.counts.cumsum()
        pieces = [sentences.pieces[ends[row] - sentences.counts[row] : ends[row]].tolist() for row in rows]
        return self._tokenizers.sides[side].decode(pieces)

    def _replace(self, plain: Sides, changed: Sequence[tuple[int, Pair]]) -> Sides:
        """The sentences, with other pieces in the rows that have changed."""
        encoded = [self._tokenizers.sides[side].encode([pair[side] for _, pair in changed]) for side in (0, 1)]
        new = {
            row: (source, target)
            for (row, _), source, target in zip(changed, *encoded, strict=True)
            if source and target and UNK not in source and UNK not in target
        }
        source, target = (
            Sentences.of([new[row][side] if row in new else pieces for row, pieces in enumerate(_lists(plain[side]))])
            for side in (0, 1)
        )
        return source, target


def _lists(sentences: Sentences) -> list[list[int]]:
    return [pieces.tolist() for pieces in np.split(sentences.pieces, sentences.counts.cumsum()[:-1])]


def _have(piece: int, sentences: Sentences) -> npt.NDArray[np.bool_]:
    """Which of the sentences have this piece, `(b,)`."""
    sentence = np.repeat(np.arange(len(sentences.counts)), sentences.counts)
    return np.bincount(sentence[sentences.pieces == piece], minlength=len(sentences.counts)) > 0
