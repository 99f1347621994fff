"""SentencePiece: one model for both languages, ids fixed as pad 0, unknown 1, begin 2, end 3.

Encoding gives pieces only; begin and end marks are the batch's business. Decoding drops them. The surprise:
SentencePiece's own sampling of training lines differs from process to process, so lines are drawn here.
"""

import io
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

import sentencepiece

from transformer.config.settings import TokenizerConfig
from transformer.errors import InputError
from transformer.seeding import seed_for
from transformer.vocabulary import BOS, EOS, PAD, UNK

LARGEST_MODEL = 64 << 20  # bytes; a real one has less than one million

_SURROGATE = re.compile("[\ud800-\udfff]")


class Tokenizer:
    """A trained model. Raises InputError where it is none, or has other special ids."""

    def __init__(self, model: bytes, origin: str) -> None:
        if not 0 < len(model) <= LARGEST_MODEL:
            raise InputError(f"{origin}: no SentencePiece model has {len(model)} bytes")
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, ValueError) as error:
            raise InputError(f"{origin}: not a SentencePiece model") from error
        processor = self._processor
        ids = (processor.pad_id(), processor.unk_id(), processor.bos_id(), processor.eos_id())
        if ids != (PAD, UNK, BOS, EOS):
            raise InputError(
                f"{origin}: its special ids are pad, unk, bos, eos = {ids}: "
                "train it with --pad_id=0 --unk_id=1 --bos_id=2 --eos_id=3"
            )
        self.vocab_size: int = processor.get_piece_size()

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Read a model file."""
        return cls(read_model(path), str(path))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Tokenizer":
        """A model from a file's content."""
        return cls(data, "tokenizer")

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The pieces of each text, found in this thread alone; others run meanwhile."""
        try:
            return cast(list[list[int]], self._processor.encode(texts, num_threads=1))
        except (TypeError, ValueError, RuntimeError):  # half a surrogate pair is no character, and is refused
            texts = [_SURROGATE.sub("\ufffd", text) for text in texts]
            return cast(list[list[int]], self._processor.encode(texts, num_threads=1))

    def decode(self, ids: list[list[int]]) -> list[str]:
        """The text of each; always one line, whatever bytes a model spells."""
        texts: list[str] = self._processor.decode(ids)
        return [text.replace("\n", " ").replace("\r", " ") for text in texts]

    def piece(self, index: int) -> str:
        """The piece of an id, with U+2581 for a space."""
        return str(self._processor.id_to_piece(index))


def read_model(path: Path) -> bytes:
    """The bytes of a model file. Raises InputError where it cannot be read or is far too large."""
    try:
        with path.open("rb") as file:
            return file.read(LARGEST_MODEL + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}): check the path") from error


def train_tokenizer(lines: Iterable[str], config: TokenizerConfig) -> bytes:
    """Train a model on lines of both languages; a small corpus may yield fewer pieces than asked for.

    The same lines give the same bytes. Raises InputError where SentencePiece cannot.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type=config.algorithm.value,
            vocab_size=config.vocab_size,
            hard_vocab_limit=False,
            character_coverage=config.character_coverage,
            byte_fallback=config.byte_fallback,
            normalization_rule_name="nmt_nfkc",
            pad_id=PAD,
            unk_id=UNK,
            bos_id=BOS,
            eos_id=EOS,
            num_threads=16,  # stored in the model: always the same, or the same pieces would have another digest
            minloglevel=2,
        )
    except (RuntimeError, ValueError) as error:
        message = " ".join(str(error).rpartition("] ")[2].split())
        reason = message.partition(" Increase vocab_size")[0].rstrip(".") or "no usable text"  # less its own options
        raise InputError(
            f"the tokenizer cannot be trained: {reason}: "
            "check tokenizer.vocab_size, tokenizer.character_coverage and data.train"
        ) from error
    return model.getvalue()


def sample_lines(lines: Iterable[str], *, total: int, limit: int) -> Iterator[str]:
    """At most `limit` of `total` lines, each set of them equally likely, in their order; always the same ones.

    Algorithm S of Knuth (The Art of Computer Programming, 3.4.2): a line is taken with a chance of the lines still
    needed over the lines still to come. So nothing is kept, and the count comes out exactly.
    """
    draw, needed = random.Random(seed_for(total, limit)).random, limit  # the stream that Python promises for ever
    for index, line in enumerate(lines):
        if draw() * (total - index) < needed:
            needed -= 1
            yield line
