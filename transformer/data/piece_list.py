"""Ids by a list: a vocabulary with its own order, over the pieces of a SentencePiece model.

Marian's models have two SentencePiece models and one list of pieces, which gives each piece its id. Here the list is
stored in front of each model's bytes, in a protobuf field that SentencePiece does not know and skips. So there is still
one file a side, which any SentencePiece reads, and a copy or a digest covers model and list at once.

A piece that is only in the list may belong to the target, or be a character that this model takes for unknown text. A
piece that is only in the model is unknown.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from transformer.vocabulary import BOS, EOS, PAD, UNK

SPACE = "\u2581"  # as pieces spell it

_FIELD = b"\xc2\x3e"  # of bytes, number 1000: SentencePiece leaves the numbers from 200 on to others
_CODE = (">>", "<<")  # around the code of a target language, which is one piece


class Piece(NamedTuple):
    """An entry of the vocabulary."""

    text: str  # U+2581 for a space
    score: float  # BPE: minus the number of the merge; unigram: the logarithm of its probability
    is_text: bool  # False: it stands for unknown text, for a byte, or for nothing that is written


def join_piece_list(model: bytes, pieces: Sequence[str]) -> bytes:
    """The file of a SentencePiece model, with these pieces as its vocabulary, in the order of their ids."""
    content = json.dumps(list(pieces), ensure_ascii=False, separators=(",", ":")).encode()
    return _FIELD + varint(len(content)) + content + model


def split_piece_list(file: bytes) -> tuple[bytes, list[str] | None]:
    """The SentencePiece model in a file, and the list in front of it, if there is one. Raises ValueError."""
    if not file.startswith(_FIELD):
        return file, None

    size, start = read_varint(file, len(_FIELD))
    try:
        pieces = json.loads(file[start : start + size].decode())
    except RecursionError:
        raise ValueError("its list of pieces is nested") from None
    if not isinstance(pieces, list) or not all(isinstance(piece, str) for piece in pieces):
        raise ValueError("its list of pieces is no list of texts")
    if len(pieces) <= EOS + 1 or len(set(pieces)) < len(pieces):
        raise ValueError("its list of pieces is too short, or has a piece twice")
    return file[start + size :], pieces


def varint(number: int) -> bytes:
    """A number as protobuf writes it: seven bits a byte, the lowest first."""
    parts = []
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def read_varint(file: bytes, start: int) -> tuple[int, int]:
    """The number at `start`, and where it ends. Raises ValueError."""
    number = 0
    for index in range(10):  # 70 bits: protobuf's numbers have 64
        byte = file[start + index] if start + index < len(file) else 0
        number |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return number, start + index + 1
    raise ValueError("a number without an end")


class ListedPieces:
    """The pieces of a SentencePiece processor under the ids of a list, as MarianTokenizer has them."""

    def __init__(self, processor: Any, pieces: list[str]) -> None:
        self.pieces = pieces
        self._processor = processor
        self._ids = {piece: index for index, piece in enumerate(pieces)}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text. A language code at its beginning, such as `>>de<<`, is one piece."""
        split = [_split_code(text) for text in texts]
        cut = self._processor.encode([text for _, text in split], out_type=str, num_threads=1)
        return [
            [self._ids.get(piece, UNK) for piece in (*codes, *pieces)]
            for (codes, _), pieces in zip(split, cut, strict=True)
        ]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """The text of each list of ids."""
        texts = []
        for sentence in ids:
            pieces = [self.pieces[index] for index in sentence if index not in (PAD, BOS, EOS)]
            text = self._processor.decode_pieces(pieces) if pieces else ""
            texts.append(text.replace(SPACE, " ").strip())  # of pieces that this model does not have
        return texts

    @cached_property
    def vocabulary(self) -> list[Piece]:
        """All pieces, in the order of their ids."""
        return [self._entry(piece) for piece in self.pieces]

    def _entry(self, piece: str) -> Piece:
        index = self._processor.piece_to_id(piece)
        is_known = self._processor.id_to_piece(index) == piece
        if not is_known or not is_text(self._processor, index):
            return Piece(piece, 0.0, is_text=False)
        return Piece(piece, self._processor.get_score(index), is_text=True)


def is_text(processor: Any, index: int) -> bool:
    """Whether a piece of a SentencePiece model is written as it is."""
    return not (
        processor.is_unknown(index)
        or processor.is_control(index)
        or processor.is_byte(index)
        or processor.is_unused(index)
    )


def _split_code(text: str) -> tuple[list[str], str]:
    """The language code at the beginning of a text, if it has one, and the rest."""
    begin, end = _CODE
    place = text.find(end) if text.startswith(begin) else -1
    if place < 0:
        return [], text
    place += len(end)
    return [text[:place]], text[place:]
