"""The ids that mean the same in every vocabulary (padding, unknown text, begin and end of a sentence), and sizes."""

from typing import NamedTuple

PAD, UNK, BOS, EOS = range(4)

NEVER = (PAD, BOS)  # what no model has a reason to predict: under `model.start=zeros` it cannot
NO_PROBABILITY = -100.0  # the logit of what it cannot predict


class VocabSizes(NamedTuple):
    """How many pieces there are where source and target have a vocabulary each."""

    source: int
    target: int


VocabSize = int | VocabSizes  # a number is that of the one vocabulary for both languages


def vocab_size_of(target: int, source: int | None) -> VocabSize:
    """From how documents store it: `source` is None where the target's vocabulary is the source's, too."""
    return target if source is None else VocabSizes(source, target)


def source_size(vocab_size: VocabSize) -> int:
    """How many pieces a source is made of."""
    return vocab_size if isinstance(vocab_size, int) else vocab_size.source


def target_size(vocab_size: VocabSize) -> int:
    """How many pieces a target is made of: the width of the logits."""
    return vocab_size if isinstance(vocab_size, int) else vocab_size.target


def own_source_size(vocab_size: VocabSize) -> int | None:
    """How many pieces the source's own vocabulary has; None where it has none."""
    return None if isinstance(vocab_size, int) else vocab_size.source


def describe_vocab_size(vocab_size: VocabSize) -> str:
    """The size, or both of them, as people read it."""
    if isinstance(vocab_size, int):
        return f"{vocab_size:,} pieces"
    return f"{vocab_size.source:,} source and {vocab_size.target:,} target pieces"
