"""Whether the training text can fill a vocabulary: how often its pieces occur, and of how many pieces most would.

    prepared corpus -> counts of the pieces -> rare_shares, of this size and all smaller ones -> check

Gowda and May (2020, "Finding the Optimal Vocabulary Size for Neural Machine Translation") advise the largest vocabulary
of which 95 % of the pieces occur at least 100 times in the training text. That is a rule of thumb: our own experiment
on 29,000 captions has 10,000 pieces, of which 9 % do, and does better with them than with fewer. So what is found here
is only what is far from the rule: hardly any piece occurs so often, or nearly all do far more often.

Single characters are left out: a vocabulary has them whatever its size.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from transformer.config.jobs import TrainJob
from transformer.config.settings import TokenizerConfig
from transformer.data.piece_list import Piece
from transformer.data.prepare import Prepared
from transformer.data.store import Ids, Store
from transformer.data.tokenizer import Tokenizer
from transformer.tools.doctor.findings import Check, Level, measured, passed, percent
from transformer.tools.doctor.survey import SIDES

ENOUGH = 100  # times that a piece should occur
MOST_RARE_BY_RULE = 0.05  # of the pieces may occur less often by the rule
COUNTED = 1_000_000  # pairs of sentences at most, every n-th of the corpus
BLOCK = 100_000  # of these are in memory at a time

# Far from it. 0.91 is Multi30k with the 10,000 pieces of its experiment, 0.970 are its first 10,000 captions with the
# 10,000 of recipe=low_resource, and 0.98 is Multi30k with the paper's 37,000.
MOST_RARE = 0.975  # of the pieces may occur less than ENOUGH times
MOST_USUAL = 5_000  # times that 95 % of the pieces may occur; seen: 2,900 (Tatoeba with 500 pieces)


def check_sizes(prepared: Prepared, job: TrainJob) -> list[Check]:
    """Whether the size of each vocabulary is far from what the training text can fill."""
    if job.init_from is not None:
        return [passed("vocabulary size", "vocabulary", found="a tokenizer that is given")]

    # Pieces of one vocabulary are learnt from both sides.
    tokenizers = prepared.tokenizers
    counts = [
        piece_counts(prepared.store, side, vocab_size=tokenizer.vocab_size)
        for side, tokenizer in enumerate(tokenizers.sides)
    ]
    wheres = [f"{side} vocabulary" for side in SIDES]
    models = job.tokenizer.models()
    if len(models) == 1:
        counts = [counts[0] + counts[1]]
        wheres = ["vocabulary"]

    return [
        _check_size(tokenizer, of_pieces, model, key=key, where=where)
        for tokenizer, of_pieces, (key, model), where in zip(
            tokenizers.sides[: len(models)], counts, models.items(), wheres, strict=True
        )
    ]


def piece_counts(store: Store, side: int, *, vocab_size: int) -> Ids:
    """How often each piece occurs on one side of the training text, `(V,)`; in a large one, by a sample."""
    stride = -(-len(store) // COUNTED) or 1
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, len(store), stride * BLOCK):
        ids = np.arange(start, min(start + stride * BLOCK, len(store)), stride)
        counts += np.bincount(store.gather(ids, side).pieces, minlength=vocab_size)
    return stride * counts


def _check_size(tokenizer: Tokenizer, counts: Ids, model: TokenizerConfig, *, key: str, where: str) -> Check:
    """Whether the text can fill a vocabulary; `key` is the group of its settings."""
    if model.model is not None:
        return passed("vocabulary size", where, found="a tokenizer that is given")
    vocabulary = tokenizer.vocabulary()
    ranked = _by_rank(vocabulary)
    number = len(ranked)
    if not number:
        return passed("vocabulary size", where, found="all pieces are single characters")

    # A vocabulary as the rule has it, or a smaller one.
    rarest = int(MOST_RARE_BY_RULE * number)
    usual = int(np.partition(counts[ranked], rarest)[rarest])
    if usual >= ENOUGH:
        return measured(
            "vocabulary size",
            where,
            found=f"95 % of {number:,} pieces of several characters occur {usual:,} times or more in the training text",
            value=usual,
            limit=MOST_USUAL,
            level=Level.warning,
            remedy=f"raise {key}.vocab_size, several times: {ENOUGH} times are enough to learn a piece (Gowda and May, "
            "2020), and larger pieces make shorter sentences",
            places=[],
        )

    # A larger one.
    shares = rare_shares(vocabulary, counts)
    by_rule, half = (
        _about(len(vocabulary) - number + int(np.flatnonzero(shares <= share)[-1]))
        for share in (MOST_RARE_BY_RULE, 0.5)
    )
    return measured(
        "vocabulary size",
        where,
        found=f"{percent(1.0 - shares[-1])} of {number:,} pieces of several characters occur {ENOUGH} times in the "
        f"training text, as 95 % of a vocabulary of {by_rule:,} would",
        value=float(shares[-1]),
        limit=MOST_RARE,
        level=Level.warning,
        remedy=f"lower {key}.vocab_size: a rare piece is learnt from few examples; of {half:,} pieces half would occur "
        f"{ENOUGH} times, of {by_rule:,} 95 % (the rule of Gowda and May, 2020)",
        places=[],
    )


def _about(size: int) -> int:
    """The size, rounded to two digits."""
    return round(size, 2 - len(str(size)))


# ---- smaller vocabularies -------------------------------------------------------------------------------------------


def rare_shares(vocabulary: Sequence[Piece], counts: Ids) -> npt.NDArray[np.float64]:
    """The share of the pieces that occur less than ENOUGH times, of the first 0, 1, ... pieces of several characters.

    `counts` `(V,)` says how often each piece occurs. For smaller vocabularies no other tokenizer is trained: without
    the merge that BPE has learnt last, a text is cut as with it, but for the piece of this merge, which stays the two
    that it was made of. So the pieces are taken away one by one, and hand their counts on. With a unigram model, whose
    improbable pieces go first, this is less exact.
    """
    ranked = _by_rank(vocabulary)
    rank_of = {piece.text: -1 for piece in vocabulary if piece.is_text}  # -1: a single character
    rank_of |= {vocabulary[piece].text: rank for rank, piece in enumerate(ranked)}

    times = counts[ranked].tolist()
    rare = sum(count < ENOUGH for count in times)
    shares = np.zeros(len(ranked) + 1)
    for rank in range(len(ranked) - 1, -1, -1):
        shares[rank + 1] = rare / (rank + 1)
        rare -= times[rank] < ENOUGH
        for part in _parts(vocabulary[ranked[rank]].text, rank_of):
            rare -= times[part] < ENOUGH <= times[part] + times[rank]
            times[part] += times[rank]
    return shares


def _by_rank(vocabulary: Sequence[Piece]) -> list[int]:
    """The pieces of several characters, as BPE has learnt them, or from the most probable one on."""
    several = [index for index, piece in enumerate(vocabulary) if piece.is_text and len(piece.text) > 1]
    return sorted(several, key=lambda index: -vocabulary[index].score)


def _parts(text: str, rank_of: Mapping[str, int]) -> list[int]:
    """The ranks of the two pieces that a piece was made of: of those that spell it, the later is as early as can be.

    Single characters are left out.
    """
    own = rank_of[text]
    cuts = [(rank_of.get(text[:place], own), rank_of.get(text[place:], own)) for place in range(1, len(text))]
    earliest = min(cuts, key=max)
    return [rank for rank in earliest if rank >= 0] if max(earliest) < own else []
