"""The ids that mean the same in every vocabulary: padding, unknown text, beginning and end of a sentence."""

PAD, UNK, BOS, EOS = range(4)
