"""Ids by a list: the file, what encodes by it, and files that are damaged."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import sentencepiece

from support.translations import WORDS, sentences
from transformer.data.piece_list import join_piece_list, split_piece_list
from transformer.data.store import Sentences
from transformer.data.subwords import SubwordSampler
from transformer.data.tokenizer import Tokenizer, Tokenizers
from transformer.errors import InputError
from transformer.vocabulary import BOS, EOS, UNK, VocabSizes


def own_pieces(spm: bytes) -> list[str]:
    processor = sentencepiece.SentencePieceProcessor(model_proto=spm)
    return [processor.id_to_piece(index) for index in range(len(processor))]


@pytest.fixture
def pieces(spm: bytes) -> list[str]:
    """Those of the model but one, in another order, and two that it does not have."""
    special, text = own_pieces(spm)[:4], own_pieces(spm)[4:]
    random.Random(0).shuffle(text)
    return [*special, ">>de<<", *text[1:], "é"]


def test_listed_ids_are_the_places_in_the_list(spm: bytes, pieces: list[str]) -> None:
    tokenizer = Tokenizer(join_piece_list(spm, pieces))
    processor = sentencepiece.SentencePieceProcessor(model_proto=spm)
    assert tokenizer.vocab_size == len(pieces)
    assert tokenizer.pieces() == pieces
    assert tokenizer.sentencepiece_model == spm
    texts = sentences(50)
    for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
        expected = [pieces.index(piece) if piece in pieces else UNK for piece in processor.encode(text, out_type=str)]
        assert ids == expected
        if UNK not in ids:
            assert tokenizer.decode([[BOS, *ids, EOS]]) == [text]
    assert tokenizer.decode([[], [len(pieces) - 1]]) == ["", "é"]
    assert tokenizer.encode([">>de<< the dog"])[0] == [4, *tokenizer.encode(["the dog"])[0]]
    assert tokenizer.encode([">>fr<< the dog"])[0][0] == UNK
    assert tokenizer.has_word(">>de<<")
    assert tokenizer.encode(["half \ud800"])[0][-1] == UNK


def test_listed_file_is_a_sentencepiece_model(spm: bytes, pieces: list[str]) -> None:
    """Which reads it as if there were no list."""
    file = join_piece_list(spm, pieces)
    assert split_piece_list(file) == (spm, pieces)
    assert split_piece_list(spm) == (spm, None)
    processors = [sentencepiece.SentencePieceProcessor(model_proto=content) for content in (spm, file)]
    assert own_pieces(file) == own_pieces(spm)
    assert processors[0].encode(WORDS) == processors[1].encode(WORDS)


def test_listed_vocabulary_is_one_where_the_lists_are_the_same(spm: bytes, pieces: list[str]) -> None:
    one, same = (Tokenizer(join_piece_list(spm, pieces)) for _ in range(2))
    other = Tokenizer(join_piece_list(spm, [*pieces, "more"]))
    assert Tokenizers(one, same).vocab_sizes == len(pieces)
    assert Tokenizers(one, other).vocab_sizes == VocabSizes(len(pieces), len(pieces) + 1)
    assert Tokenizers(Tokenizer(spm), Tokenizer(spm)).vocab_sizes == VocabSizes(60, 60)


def test_listed_pieces_are_sampled_under_their_ids(spm: bytes, pieces: list[str]) -> None:
    """BPE-dropout at 1 spells a text in single characters, at 0 it leaves it as it is."""
    tokenizer = Tokenizer(join_piece_list(spm, pieces))
    encoded = tokenizer.encode(["the old dog runs"])
    for rate in (0.0, 1.0):
        drawn = SubwordSampler(tokenizer.vocabulary(), rate).sample(
            Sentences.of(encoded), np.zeros(1, np.int64), seed=1, epoch=0, side=0
        )
        assert tokenizer.decode([drawn.pieces.tolist()]) == ["the old dog runs"]
        assert (drawn.pieces.tolist() == encoded[0]) == (rate == 0.0)


DAMAGE: dict[str, Callable[[bytes, bytes], bytes]] = {
    "cut": lambda file, spm: file[: len(file) - len(spm) - 2],
    "no length": lambda file, spm: file[:2] + b"\xff" * 8 + spm,
    "no list": lambda file, spm: file[:2] + b"\x02{}" + spm,
    "no texts": lambda file, spm: file[:2] + b"\x0d[1,2,3,4,5,6]" + spm,
    "too short": lambda file, spm: join_piece_list(spm, ["<pad>", "<unk>", "<s>", "</s>"]),
    "twice": lambda file, spm: join_piece_list(spm, ["<pad>", "<unk>", "<s>", "</s>", "a", "a"]),
    "nested": lambda file, spm: join_piece_list(spm, []).replace(b"\x02[]", b"\xa0\x8d\x06" + b"[" * 99_999 + b"]"),
    "no model": lambda file, spm: file[: len(file) - len(spm)] + b"none",
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_listed_file_that_is_damaged_is_refused(kind: str, spm: bytes, pieces: list[str]) -> None:
    with pytest.raises(InputError, match="not a SentencePiece model"):
        Tokenizer(DAMAGE[kind](join_piece_list(spm, pieces), spm), "tokenizer.model")
