"""A SentencePiece model without where it was trained: files that it names, and sentences of its training text.

The trainer writes its own settings into the model, paths of its input among them. Nothing reads them again: pieces,
scores and normalisation are other fields of the protobuf, and stay as they are, byte for byte.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from transformer.data.piece_list import read_varint, varint

# Fields by their numbers in sentencepiece_model.proto; None: left out, a mapping: left out of the message in it.
_FILES_OF_RULES = {6: None}  # normalization_rule_tsv
_OF_THE_TRAINING: Mapping[int, Mapping[int, None] | None] = {
    2: {1: None, 2: None, 54: None},  # trainer_spec: input, model_prefix, seed_sentencepieces_file
    3: _FILES_OF_RULES,  # normalizer_spec
    4: None,  # self_test_data: sentences, in models of earlier versions
    5: _FILES_OF_RULES,  # denormalizer_spec
}

_BYTES = 2  # the wire type of texts and messages
_FIXED = {1: 8, 5: 4}  # bytes of the other types that say no length


class _Field(NamedTuple):
    number: int
    raw: bytes  # key and content
    content: bytes | None  # of a text or a message


def without_origin(model: bytes) -> bytes:
    """The file of a model without its settings that name files; the same bytes where it has none.

    Raises ValueError for what is no protobuf.
    """
    return _without(model, _OF_THE_TRAINING)


def _without(message: bytes, left_out: Mapping[int, Mapping[int, None] | None]) -> bytes:
    kept = []
    for field in _fields(message):
        within = left_out.get(field.number)
        if field.number not in left_out or not field.content:
            kept.append(field.raw)
        elif within is not None:
            content = _without(field.content, within)
            if content == field.content:
                kept.append(field.raw)
            else:
                kept.append(varint(field.number << 3 | _BYTES) + varint(len(content)) + content)
    return b"".join(kept)


def _fields(message: bytes) -> Iterator[_Field]:
    """The fields of a message, one after the other. Raises ValueError."""
    start = 0
    while start < len(message):
        key, end = read_varint(message, start)
        content = None
        if key & 7 == _BYTES:
            size, begin = read_varint(message, end)
            end = begin + size
            content = message[begin:end]
        elif key & 7 in _FIXED:
            end += _FIXED[key & 7]
        elif key & 7 == 0:
            _, end = read_varint(message, end)
        else:
            raise ValueError(f"a field of wire type {key & 7}")
        if end > len(message):
            raise ValueError("a field that is cut")
        yield _Field(key >> 3, message[start:end], content)
        start = end
