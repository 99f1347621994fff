"""Subword sampling: the same text as other pieces in every epoch, which makes a model of little data more robust.

    pieces of the corpus -> their characters -> segments of words -> pieces drawn at random

A BPE tokenizer leaves out merges at random (BPE-dropout: Provilkov et al., 2020, algorithm 1). A unigram tokenizer
draws a segmentation by its probability (Kudo, 2018, section 3.3). SentencePiece can do both, but draws different pieces
in every process. Here the pieces follow from (seed, epoch, side, sentence), so a run that resumes, or runs on other
ranks, trains on the same pieces. The text is not needed: the pieces of a sentence spell it.

A segment is a run of characters whose ends no piece crosses: a word, or a part of one. What the papers do with words is
done with segments, which matters to BPE only, and where languages have no spaces. All segments are worked on at once,
in flat arrays. `V` pieces in the vocabulary, `b` sentences, `c` characters of them, end to end, `s` segments.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from typing import Self

import numpy as np
import numpy.typing as npt

from transformer.data.counter_rng import Keys, Scores, mix, state, uniform
from transformer.data.piece_list import Piece
from transformer.data.store import Ids, Sentences
from transformer.errors import InputError
from transformer.seeding import seed_for

_NONE = -1  # no piece
_NEVER = np.iinfo(np.int64).max  # the rank of two symbols that do not merge
_STREAM = 0x70696563  # names the random numbers of this module

Flags = npt.NDArray[np.bool_]


class SubwordSampler:
    """Draws pieces for sentences that are given as pieces.

    For a BPE tokenizer, `rate` is the probability with which a merge is left out: at 0 nothing changes, at 1 only
    characters remain. For a unigram tokenizer it is the power to which the probability of a segmentation is raised: at
    0 all are equally likely, and the larger it is, the rarer are others than the tokenizer's own.

    Raises InputError for a rate above 1 where the tokenizer is BPE, and for a piece without a finite score.
    """

    def __init__(self, vocabulary: Sequence[Piece], rate: float) -> None:
        for index, piece in enumerate(vocabulary):
            if not math.isfinite(piece.score):
                problem = f"the tokenizer's piece {index} has the score {piece.score}"
                raise InputError(f"train.subword_sampling: {problem}: use another model, or leave the key out")

        is_bpe = all(piece.score.is_integer() for piece in vocabulary)  # ranks of merges; unigram's are logarithms
        if is_bpe and rate > 1.0:
            raise InputError(f"train.subword_sampling={rate}: for BPE it is a probability: give 1 at most")

        # A symbol that a user defined is never cut. It has the score 0.0, while the first merge has -0.0.
        vocabulary = [
            piece._replace(is_text=piece.is_text and math.copysign(1.0, piece.score) < 0.0) for piece in vocabulary
        ]
        spelling = _Spelling.of(vocabulary)
        self._segmentation: _Merges | _Lattice
        if is_bpe:
            merges = _Merges.of(vocabulary, rate)
            self._segmentation = merges
            self._spelling = spelling.without(merges.unreachable(spelling))
        else:
            self._segmentation = _Lattice.of(vocabulary, spelling, rate)
            self._spelling = spelling

    def sample(self, sentences: Sentences, ids: Ids, *, seed: int, epoch: int, side: int) -> Sentences:
        """Other pieces for the sentences of one side, whose numbers in the store are `ids` `(b,)`."""
        if len(sentences.pieces) == 0:
            return sentences
        characters, lengths = self._spelling.spell(sentences)  # (c,), (b,)
        sentence = np.repeat(np.arange(len(ids)), lengths)  # (c,)

        # A segment ends where no piece goes on.
        goes_on = self._spelling.is_joined(characters[:-1], characters[1:]) & (sentence[:-1] == sentence[1:])
        starts = np.concatenate([[0], 1 + np.flatnonzero(~goes_on)])  # (s,)

        # Each character has random numbers of its own, whatever else is sampled beside it.
        stream = np.array([seed_for(seed, epoch, side, _STREAM)], np.uint64)  # (1,)
        sentence_keys = mix(state(mix(state(stream, 0)), ids))  # (b,)
        keys = mix(state(sentence_keys[sentence], _positions(lengths)))  # (c,)

        pieces = self._segmentation.segment(characters, starts, keys)  # (c,)
        is_piece = pieces != _NONE
        counts = np.bincount(sentence[is_piece], minlength=len(ids))
        return Sentences(pieces[is_piece], counts)


def _positions(lengths: Ids) -> Ids:
    """`(2, 3)` -> `(0, 1, 0, 1, 2)`."""
    ends = lengths.cumsum()
    return np.arange(int(lengths.sum())) - np.repeat(ends - lengths, lengths)


# ---- characters of pieces -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Table:
    """A number for some pairs of numbers, of which many are looked up at a time."""

    keys: Ids  # (n + 1,) ascending: first * base + second; the last one is larger than all
    values: Ids  # (n + 1,)
    base: int  # the second number of a pair is smaller

    @classmethod
    def of(cls, pairs: dict[tuple[int, int], int], base: int) -> Self:
        keys = np.array([first * base + second for first, second in pairs], np.int64)
        values = np.fromiter(pairs.values(), np.int64, len(pairs))
        order = keys.argsort()
        return cls(np.append(keys[order], _NEVER), np.append(values[order], _NONE), base)

    def look_up(self, first: Ids, second: Ids) -> Ids:
        """The number of each pair; _NONE for one that is not in the table."""
        keys = first * self.base + second
        places = self.keys.searchsorted(keys)
        return np.where(self.keys[places] == keys, self.values[places], _NONE)


@dataclass(frozen=True)
class _Spelling:
    """The characters of each piece, as the ids of the pieces that are these characters.

    A piece that cannot be spelt, such as unknown text or a byte, is its own only character.
    """

    characters: Ids  # of all pieces, end to end
    offsets: Ids  # (V + 1,) those of piece i are characters[offsets[i] : offsets[i + 1]]
    neighbours: _Table  # two characters that are adjacent in a piece

    @classmethod
    def of(cls, vocabulary: Sequence[Piece]) -> Self:
        id_of = {piece.text: index for index, piece in enumerate(vocabulary) if piece.is_text and len(piece.text) == 1}

        spellings = []
        for index, piece in enumerate(vocabulary):
            spelling = [id_of.get(character, _NONE) for character in piece.text]
            can_be_spelt = piece.is_text and _NONE not in spelling
            spellings.append(spelling if can_be_spelt else [index])
        return cls._from(spellings)

    @classmethod
    def _from(cls, spellings: list[list[int]]) -> Self:
        neighbours = {pair: 1 for spelling in spellings for pair in pairwise(spelling)}
        characters, lengths = Sentences.of(spellings)
        offsets = np.concatenate([[0], lengths.cumsum()])
        return cls(characters.astype(np.int64), offsets, _Table.of(neighbours, len(spellings)))

    def without(self, pieces: Ids) -> Self:
        """The same, but these pieces are their own only character."""
        spellings = self.spellings()
        for piece in pieces.tolist():
            spellings[piece] = [piece]
        return self._from(spellings)

    def spellings(self) -> list[list[int]]:
        """The characters of each piece."""
        return [self.characters[start:end].tolist() for start, end in pairwise(self.offsets)]

    def spell(self, sentences: Sentences) -> tuple[Ids, Ids]:
        """The characters of sentences, end to end, `(c,)`; and how many each sentence has, `(b,)`."""
        starts = self.offsets[sentences.pieces]
        counts = self.offsets[sentences.pieces + 1] - starts  # of each piece
        characters = self.characters[np.repeat(starts, counts) + _positions(counts)]

        characters_before = np.concatenate([[0], counts.cumsum()])  # of each piece
        pieces_before = np.concatenate([[0], sentences.counts.cumsum()])  # of each sentence
        return characters, np.diff(characters_before[pieces_before])

    def is_joined(self, first: Ids, second: Ids) -> Flags:
        """Whether a piece can go across the border of these two characters."""
        return self.neighbours.look_up(first, second) != _NONE


# ---- BPE ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Merges:
    """Byte-pair encoding with dropout: of the merges that are possible, and are not left out, the first learnt is made.

    Each step decides anew which are left out, and a segment is done where all are.
    """

    merged: _Table  # two symbols -> the piece that they make
    ranks: Ids  # (V + 1,) when a piece was learnt; the last, which _NONE points to, is _NEVER
    rate: float

    @classmethod
    def of(cls, vocabulary: Sequence[Piece], rate: float) -> Self:
        """Two pieces can merge if what they spell together is a piece."""
        id_of = {piece.text: index for index, piece in enumerate(vocabulary) if piece.is_text}
        merged = {}
        for text, index in id_of.items():
            for cut in range(1, len(text)):
                left = id_of.get(text[:cut])
                right = id_of.get(text[cut:])
                if left is not None and right is not None:
                    merged[left, right] = index

        ranks = [-int(piece.score) for piece in vocabulary]
        return cls(_Table.of(merged, len(vocabulary)), np.array([*ranks, _NEVER]), rate)

    def unreachable(self, spelling: _Spelling) -> Ids:
        """The pieces that their own characters do not become, as in a vocabulary without some of the steps between."""
        starts = spelling.offsets[:-1]
        keys = np.zeros(len(spelling.characters), np.uint64)
        pieces = replace(self, rate=0.0).segment(spelling.characters, starts, keys)
        return np.flatnonzero(pieces[starts] != np.arange(len(starts)))

    def segment(self, characters: Ids, starts: Ids, keys: Keys) -> Ids:
        """The pieces of the segments that begin at `starts` `(s,)`, drawn by the `keys` of their characters.

        Each piece stands at its first character, and _NONE at the others: `(c,)`. A step makes one merge in each
        segment that is left; `n` symbols are left in all.
        """
        pieces = np.full(len(characters), _NONE)
        symbols = characters.copy()  # (n,)
        places = np.arange(len(characters))  # (n,) of the symbol's first character
        sizes = np.diff(np.append(starts, len(characters)))  # (s,) symbols of each segment
        made = self._made(symbols, sizes, places)  # (n,) by the symbol and the next one

        for step in count():
            # The first learnt of the merges that are not left out, in each segment.
            ranks = np.where(uniform(keys, step) < self.rate, _NEVER, self.ranks[made])  # (n,)
            firsts = sizes.cumsum() - sizes  # (s,)
            best = np.minimum.reduceat(ranks, firsts)  # (s,)

            # Segments without one are done.
            is_left = best != _NEVER  # (s,)
            in_left = np.repeat(is_left, sizes)  # (n,)
            pieces[places[~in_left]] = symbols[~in_left]
            if not is_left.any():
                return pieces
            symbols, places, made, ranks = (x[in_left] for x in (symbols, places, made, ranks))
            keys = keys[in_left]
            sizes = sizes[is_left]

            # Of equal merges in a segment, the leftmost is made: its first symbol becomes the piece, its second goes.
            segment = np.repeat(np.arange(len(sizes)), sizes)  # (n,)
            at_best = np.flatnonzero(ranks == best[is_left][segment])
            leftmost = at_best[np.diff(segment[at_best], prepend=-1) > 0]  # (s,)
            symbols[leftmost] = made[leftmost]
            stays = np.ones(len(symbols), bool)
            stays[leftmost + 1] = False
            symbols, places, made = (x[stays] for x in (symbols, places, made))
            keys = keys[stays]
            sizes = sizes - 1

            # What the new pieces make with their neighbours.
            merged_at = leftmost - np.arange(len(leftmost))  # one symbol has gone from each segment before
            changed = np.concatenate([merged_at, np.maximum(merged_at - 1, 0)])
            made[changed] = self._made(symbols, sizes, changed)

        raise AssertionError  # every step takes a symbol away

    def _made(self, symbols: Ids, sizes: Ids, at: Ids) -> Ids:
        """The piece that each of the symbols `at` these indices makes with the next one of its segment, or _NONE."""
        is_last = np.zeros(len(symbols), bool)
        is_last[sizes.cumsum() - 1] = True
        made = self.merged.look_up(symbols[at], symbols[np.minimum(at + 1, len(symbols) - 1)])
        return np.where(is_last[at], _NONE, made)


# ---- unigram --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Lattice:
    """A unigram language model: a segmentation is as likely as the product of its pieces' probabilities.

    The pieces are the paths of a tree of characters, whose root is node 0. `L` is the length of the longest piece.
    """

    children: _Table  # node and character -> node
    piece_at: Ids  # (nodes,) the piece that ends at a node, or _NONE
    log_probs: Scores  # (V + 1,) times the rate; the last, which _NONE points to, is -inf
    longest: int

    @classmethod
    def of(cls, vocabulary: Sequence[Piece], spelling: _Spelling, rate: float) -> Self:
        children: dict[tuple[int, int], int] = {}
        piece_at = [_NONE]
        for index, characters in enumerate(spelling.spellings()):
            node = 0
            for character in characters:
                node = children.setdefault((node, character), len(piece_at))
                if node == len(piece_at):
                    piece_at.append(_NONE)
            piece_at[node] = index

        log_probs = np.array([rate * piece.score for piece in vocabulary] + [-np.inf])
        longest = int(np.diff(spelling.offsets).max())
        return cls(_Table.of(children, len(vocabulary)), np.array(piece_at), log_probs, longest)

    def segment(self, characters: Ids, starts: Ids, keys: Keys) -> Ids:
        """See `_Merges.segment`. Probabilities are summed from the end to the front, then pieces are drawn in order."""
        ends = np.append(starts[1:], len(characters))  # (s,)
        left = np.repeat(ends, ends - starts) - np.arange(len(characters))  # (c,) characters to the segment's end
        edges = self._edges(characters, left)  # (L, c)
        log_probs = self.log_probs[edges]  # (L, c)
        lengths = np.arange(1, self.longest + 1)[:, None]  # (L, 1)

        # The log of the summed probability of all segmentations from a character to the end of its segment.
        totals = np.zeros(len(characters) + self.longest)
        by_distance = left.argsort(kind="stable")
        for at in np.split(by_distance, np.cumsum(np.bincount(left)[1:])[:-1]):
            behind = np.where(lengths < left[at], totals[at + lengths], 0.0)  # (L, n)
            totals[at] = np.logaddexp.reduce(log_probs[:, at] + behind, axis=0)

        # One piece of each segment after the other.
        pieces = np.full(len(characters), _NONE)
        at = starts
        while len(at):
            behind = np.where(lengths < left[at], totals[at + lengths], 0.0)
            shares = np.exp(log_probs[:, at] + behind - totals[at]).cumsum(axis=0)  # (L, n) the last is 1, but rounded
            drawn = (shares <= uniform(keys[at], 0) * shares[-1]).sum(axis=0)  # (n,) length - 1
            pieces[at] = edges[drawn, at]
            is_left = drawn + 1 < left[at]
            at = (at + drawn + 1)[is_left]
        return pieces

    def _edges(self, characters: Ids, left: Ids) -> Ids:
        """The piece of each length, from 1 on, that begins at each character, or _NONE: `(L, c)`."""
        edges = np.full((self.longest, len(characters)), _NONE)
        at = np.arange(len(characters))
        nodes = np.zeros(len(characters), np.int64)
        for length in range(1, self.longest + 1):
            in_segment = length <= left[at]
            at = at[in_segment]
            nodes = self.children.look_up(nodes[in_segment], characters[at + length - 1])
            at = at[nodes != _NONE]
            nodes = nodes[nodes != _NONE]
            edges[length - 1, at] = self.piece_at[nodes]
        return edges
