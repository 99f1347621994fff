"""SentencePiece: one model for both languages or one for each, with the fixed ids pad 0, unknown 1, begin 2, end 3.

The ids are the model's own, or those of a list that comes with it (see `piece_list`).
Encoding gives pieces only: BOS and EOS are added where batches are made. Decoding drops them. Whitespace of any kind is
encoded as a space, as scorers see it: a tab or a no-break space shall not be an unknown character.
"""

import io
import os
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import cast

import sentencepiece

from transformer.config.settings import TokenizerConfig
from transformer.data.piece_list import SPACE, ListedPieces, Piece, is_text, split_piece_list
from transformer.errors import InputError
from transformer.files import open_regular
from transformer.run_dir import TARGET_TOKENIZER, TOKENIZER
from transformer.seeding import seed_for
from transformer.vocabulary import BOS, EOS, PAD, UNK, VocabSize, VocabSizes

LARGEST_MODEL = 64 << 20  # bytes; one of 37,000 pieces has less than one million

_OTHER_SPACE = re.compile(r"[^\S ]")  # whitespace but for the space itself
_SURROGATE = re.compile("[\ud800-\udfff]")


class Tokenizer:
    """A trained model. Raises InputError where the bytes are not a SentencePiece model, or have other special ids."""

    def __init__(self, tokenizer_model: bytes, origin: str = "tokenizer") -> None:
        if not 0 < len(tokenizer_model) <= LARGEST_MODEL:
            raise InputError(f"{origin}: not a SentencePiece model ({len(tokenizer_model)} bytes)")

        try:
            self.sentencepiece_model, pieces = split_piece_list(
                tokenizer_model
            )  # the content of its file, without a list
            if not self.sentencepiece_model:  # which SentencePiece takes for a model that comes later
                raise ValueError("it is empty")
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=self.sentencepiece_model)
        except (RuntimeError, ValueError) as error:
            raise InputError(f"{origin}: not a SentencePiece model") from error

        processor = self._processor
        ids = (processor.pad_id(), processor.unk_id(), processor.bos_id(), processor.eos_id())
        if pieces is None and ids != (PAD, UNK, BOS, EOS):
            raise InputError(
                f"{origin}: its special ids are pad, unk, bos, eos = {ids}: "
                "train it with --pad_id=0 --unk_id=1 --bos_id=2 --eos_id=3"
            )
        self.model = tokenizer_model  # the content of its file
        try:
            processor.id_to_piece(list(range(processor.get_piece_size())))
            processor.decode([processor.unk_id()])  # has a text of its own
        except UnicodeDecodeError as error:
            raise InputError(f"{origin}: a piece of it is not UTF-8: {error.object!r:.80}") from error
        self._listed = None if pieces is None else ListedPieces(processor, pieces)
        self.vocab_size: int = processor.get_piece_size() if pieces is None else len(pieces)

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Read a model file."""
        return cls(read_model(path), str(path))

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The pieces of each text. The calling thread does all the work, and other threads run meanwhile."""
        texts = [_with_plain_spaces(text) for text in texts]
        try:
            return self._encode(texts)
        except (TypeError, ValueError, RuntimeError):  # SentencePiece refuses half a surrogate pair
            return self._encode([_SURROGATE.sub("\ufffd", text) for text in texts])

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if self._listed is not None:
            return self._listed.encode(texts)
        return cast(list[list[int]], self._processor.encode(texts, num_threads=1))

    def decode(self, ids: list[list[int]]) -> list[str]:
        """The text of each list of ids; always one line, even where byte pieces spell a line end."""
        texts: list[str] = self._processor.decode(ids) if self._listed is None else self._listed.decode(ids)
        return [text.replace("\n", " ").replace("\r", " ") for text in texts]

    def changed(self, texts: list[str]) -> list[tuple[str, str]]:
        """The texts that `decode` does not give back after `encode`, each with what it gives.

        Whitespace of any kind and length only separates words here, as it does to scorers.
        """
        pairs = zip(texts, self.decode(self.encode(texts)), strict=True)
        return [(text, decoded) for text, decoded in pairs if text.split() != decoded.split()]

    def has_word(self, word: str) -> bool:
        """Whether a word is one piece, or one behind the piece of the space in front of it, or a language code."""
        [ids] = self.encode([word])
        pieces = [self.piece(index) for index in ids]
        return pieces in ([SPACE + word], [SPACE, word], [word])

    def vocabulary(self) -> list[Piece]:
        """All pieces, in the order of their ids."""
        if self._listed is not None:
            return self._listed.vocabulary
        processor = self._processor
        return [
            Piece(self.piece(index), processor.get_score(index), is_text(processor, index))
            for index in range(self.vocab_size)
        ]

    def piece(self, index: int) -> str:
        """The piece of an id, with U+2581 for a space."""
        return str(self._processor.id_to_piece(index)) if self._listed is None else self._listed.pieces[index]

    @property
    def is_listed(self) -> bool:
        """Whether the ids are not SentencePiece's own."""
        return self._listed is not None

    def pieces(self) -> list[str]:
        """The pieces in the order of their ids."""
        return [self.piece(index) for index in range(self.vocab_size)]


@dataclass(frozen=True)
class Tokenizers:
    """The tokenizer of either side: the same one where one model serves both languages."""

    source: Tokenizer
    target: Tokenizer

    @classmethod
    def of(cls, models: Mapping[str, bytes], folder: Path) -> "Tokenizers":
        """From the model files of a folder, as `read_models` gives them. Raises InputError as `Tokenizer` does."""
        source, *target = (Tokenizer(content, str(folder / name)) for name, content in models.items())
        return cls(source, target[0] if target else source)

    @classmethod
    def load(cls, folder: Path) -> "Tokenizers":
        """Load the tokenizers of a run directory or a prepared corpus. Raises InputError if they cannot be read."""
        return cls.of(read_models(folder), folder)

    @property
    def models(self) -> dict[str, bytes]:
        """The content of each model file, by its name in a run directory and in a prepared corpus."""
        models = {TOKENIZER: self.source.model}
        return models if self.is_shared else {**models, TARGET_TOKENIZER: self.target.model}

    @property
    def is_shared(self) -> bool:
        """Whether one model serves both languages."""
        return self.source is self.target

    @cached_property
    def has_one_vocabulary(self) -> bool:
        """Whether an id is the same piece on both sides: of one model, or of two with the same list."""
        if self.is_shared:
            return True
        return self.source.is_listed and self.target.is_listed and self.source.pieces() == self.target.pieces()

    @property
    def vocab_sizes(self) -> VocabSize:
        """How many pieces the one vocabulary has, or both of them."""
        if self.has_one_vocabulary:
            return self.target.vocab_size
        return VocabSizes(self.source.vocab_size, self.target.vocab_size)

    @property
    def sides(self) -> tuple[Tokenizer, Tokenizer]:
        """Those of the source and of the target, in the order of a store."""
        return self.source, self.target


def read_models(folder: Path) -> dict[str, bytes]:
    """The model files of a run directory, or of a prepared corpus, by name: the source's, which may serve both sides.

    Raises InputError as `read_model` does.
    """
    names = [TOKENIZER]
    if os.path.lexists(folder / TARGET_TOKENIZER):
        names.append(TARGET_TOKENIZER)
    return {name: read_model(folder / name) for name in names}


def _with_plain_spaces(text: str) -> str:
    return text if text.isprintable() else _OTHER_SPACE.sub(" ", text)  # of whitespace only the space is printable


def read_model(path: Path) -> bytes:
    """The bytes of a model file, which is no link. Raises InputError where it cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read(LARGEST_MODEL + 1)
    except (OSError, ValueError) as error:  # a name that a file gives may have a NUL
        raise InputError(
            f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}): check the path"
        ) from error


def train_tokenizer(
    lines: Iterable[str], config: TokenizerConfig, *, tags: Sequence[str] = (), key: str = "tokenizer"
) -> bytes:
    """Train a model on lines, of both languages or of one, and return its file's content.

    Each tag becomes a piece together with the space before it, which SentencePiece puts in front of a text, too: so a
    tag costs one id, and a text behind it has the pieces that it has by itself. The lines are without tags.

    A small corpus may yield fewer pieces than asked for. The same lines give the same bytes. What `lines` raises is
    raised again as it is, KeyboardInterrupt included. Raises InputError where SentencePiece cannot train; `key` is the
    group of the settings that it names.
    """
    # Read the lines through a generator that remembers their errors; SentencePiece would hide them.
    errors: list[BaseException] = []
    reader = _remember_errors(lines, errors)
    next(reader)

    tokenizer_model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=reader,
            model_writer=tokenizer_model,
            model_type=config.algorithm.value,
            vocab_size=config.vocab_size,
            hard_vocab_limit=False,
            character_coverage=config.character_coverage,
            byte_fallback=config.byte_fallback,
            normalization_rule_name=config.normalization.value,
            pad_id=PAD,
            unk_id=UNK,
            bos_id=BOS,
            eos_id=EOS,
            user_defined_symbols=[SPACE + tag for tag in tags],
            num_threads=16,  # stored in the model: always the same, or the same pieces would have another digest
            minloglevel=2,
        )
    except (RuntimeError, ValueError) as error:
        if errors:
            raise errors[0] from None
        raise InputError(
            f"the tokenizer cannot be trained: {_reason(error)}: "
            f"check {key}.vocab_size, {key}.character_coverage and data.train"
        ) from error

    return tokenizer_model.getvalue()


def _remember_errors(lines: Iterable[str], errors: list[BaseException]) -> Iterator[str]:
    """The lines as `encode` sees them, after an empty string that is to be taken first.

    What reading them raises is added to `errors`: SentencePiece turns any exception of its iterator into a
    RuntimeError, so a signal would look like bad input. The empty string brings the generator into its `try`: a
    signal that comes before SentencePiece asks for the first line is raised where the generator goes on, and must be
    seen, too.
    """
    try:
        yield ""
        for line in lines:
            yield _with_plain_spaces(line)
    except BaseException as error:
        errors.append(error)
        raise


def _reason(error: BaseException) -> str:
    """What SentencePiece says, without its source lines and its advice on options of its own command."""
    message = " ".join(str(error).rpartition("] ")[2].split())
    return message.partition(" Increase vocab_size")[0].rstrip(".") or "no usable text"


def sample_lines(lines: Iterable[str], *, total: int, limit: int) -> Iterator[str]:
    """At most `limit` of `total` lines, each set of them equally likely, in their order; always the same ones.

    SentencePiece's own sampling differs from process to process. This is Algorithm S of Knuth (The Art of Computer
    Programming, 3.4.2): a line is taken with probability (lines still needed) / (lines still to come). So no line is
    kept in memory, and the count comes out exactly.
    """
    draw = random.Random(seed_for(total, limit)).random  # the stream that Python promises for ever
    needed = limit
    for index, line in enumerate(lines):
        if draw() * (total - index) < needed:
            needed -= 1
            yield line
