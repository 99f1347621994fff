"""Marian's own form of a model, as `export to=marian` writes it and `import from=model.npz` reads it: one table each.

    place_in_marian   where a weight of ours is, by its name
    UNUSED, IDLE      settings of a transformer that ours are never, and those that no transformer reads
    settings_as_array, read_settings   `special:model.yml`, the settings of a model, in the form of its array

Products are `x W + b` there: a matrix is ours, transposed, and a vector is a row. The residual stream is in Marian's
order: see `names.channels_of`.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from sentencepiece import SentencePieceProcessor

from transformer.config.settings import Norm
from transformer.data.tokenizer import Tokenizer
from transformer.integrations.published.names import MarianName
from transformer.vocabulary import EOS, NEVER

Array = npt.NDArray[Any]

SETTINGS = "special:model.yml"
VERSION = "v1.12.42"  # of Marian, whose settings these are
LARGEST_SETTINGS = 1 << 16  # bytes; those of Marian 1.12 have 2,000


# ---- names ----------------------------------------------------------------------------------------------------------

SHARED_MATRIX = "Wemb"  # of both languages, where they have one vocabulary
SOURCE_MATRIX = "encoder_Wemb"
TARGET_MATRIX = "decoder_Wemb"
OUTPUT_MATRIX = "decoder_ff_logit_out_Wt"
OUTPUT_BIAS = "decoder_ff_logit_out_b"
MATRICES = {"source_embedding.matrix": SOURCE_MATRIX, "target_embedding.matrix": TARGET_MATRIX, "output": OUTPUT_MATRIX}

_ATTENTIONS = {"self_attention": "self", "cross_attention": "context"}


def place_in_marian(name: str, norm: Norm) -> MarianName:
    """Where Marian has a weight, such as `decoder.0.cross_attention.W_q.weight`; a matrix of a vocabulary apart."""
    first, *parts, kind = name.split(".")
    scale_or_bias = "scale" if kind == "weight" else "bias"
    weight_or_bias = "W" if kind == "weight" else "b"
    if not parts:  # the norm at the end of a stack
        return MarianName(f"{first.removesuffix('_norm')}_top_ln_{scale_or_bias}", is_reader=False)

    layer, *parts = parts
    prefix = f"{first}_l{int(layer) + 1}"
    end = f"{scale_or_bias}_pre" if norm is Norm.pre else scale_or_bias
    match parts:
        case ["feed_forward_norm"]:
            return MarianName(f"{prefix}_ffn_ffn_ln_{end}", is_reader=False)
        case [part]:
            return MarianName(f"{prefix}_{_ATTENTIONS[part.removesuffix('_norm')]}_Wo_ln_{end}", is_reader=False)
        case ["feed_forward", linear]:
            return MarianName(f"{prefix}_ffn_{weight_or_bias}{linear[-1]}", is_reader=linear == "W_1")
        case [attention, projection]:
            letter = projection[-1]
            return MarianName(f"{prefix}_{_ATTENTIONS[attention]}_{weight_or_bias}{letter}", is_reader=letter != "o")
    raise ValueError(f"{name} has no place in Marian")


# ---- settings -------------------------------------------------------------------------------------------------------

# What surrounds a sub-layer: preprocess, postprocess, postprocess-top. Dropout, "d", is of a training alone.
AROUND = {Norm.post: ("", "an", ""), Norm.pre: ("n", "a", "n")}

# Settings that change a transformer, with the values of ours, each as Marian 1.12.42 writes it by default.
UNUSED: dict[str, object] = {
    "factors-dim-emb": 0,
    "input-types": [],
    "lemma-dependency": "",
    "lemma-dim-emb": 0,
    "output-omit-bias": False,
    "right-left": False,
    "transformer-attention-mask": "default",
    "transformer-decoder-autoreg": "self-attention",
    "transformer-decoder-dim-ffn": 0,
    "transformer-decoder-ffn-depth": 0,
    "transformer-disable-position-embeddings": False,
    "transformer-ffn-depth": 2,
    "transformer-no-affine": False,
    "transformer-no-bias": False,
    "transformer-no-projection": False,
    "transformer-pool": False,
    "transformer-tied-layers": [],
    "transformer-train-position-embeddings": False,
    "transformer-train-positions": False,  # its name in Marian 1.9, and in what was made of it
    "ulr": False,
}

# Settings of other models, or of what a training records: a file has them, and no transformer of these reads them.
IDLE: dict[str, object] = {
    "bert-train-type-embeddings": True,
    "bert-type-vocab-size": 2,
    "dec-cell": "gru",
    "dec-cell-base-depth": 2,
    "dec-cell-high-depth": 1,
    "dim-rnn": 1024,
    "enc-cell": "gru",
    "enc-cell-depth": 1,
    "enc-type": "bidirectional",
    "factors-combine": "sum",
    "layer-normalization": False,
    "separator-symbol": "[eos]",
    "skip": False,
    "transformer-aan-activation": "swish",
    "transformer-aan-depth": 2,
    "transformer-aan-nogate": False,
    "transformer-alibi-shift": False,
    "transformer-alibi-trainable": False,
    "transformer-dim-aan": 2048,
    "transformer-guided-alignment-layer": "last",
    "transformer-rnn-projection": False,
    "ulr-dim-emb": 0,
    "ulr-trainable-transformation": False,
}
_IDLE_ELSEWHERE = re.compile(r"char-.*|special-vocab|original-type|transformer-depth-scaling|ulr-.*")  # of 1.5 to 1.11


def is_idle(key: str) -> bool:
    """Whether a setting changes no transformer whose others are those of `UNUSED`."""
    return key in IDLE or _IDLE_ELSEWHERE.fullmatch(key) is not None


def settings_as_array(settings: Mapping[str, object]) -> Array:
    """The settings as the array of bytes that Marian reads, with a zero at its end."""
    return np.frombuffer(settings_as_yaml(settings).encode() + b"\0", dtype=np.int8)


def settings_as_yaml(settings: Mapping[str, object]) -> str:
    """YAML, each value on a line of its own: texts in quotes, lists below their key."""
    return "".join(f"{key}: {_as_yaml(value)}\n" for key, value in settings.items())


def _as_yaml(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return "'" + value.replace("'", "''") + "'"
        case list() | tuple():
            return "".join(f"\n  - {_as_yaml(item)}" for item in value) or "[]"
        case _:
            return str(value)


Value = str | list[str]

_KEY = re.compile(r"([A-Za-z][\w-]*):(?:[ \t]+(.*))?")
_ITEM = re.compile(r"[ \t]*-[ \t]+(.*)")


def read_settings(text: str) -> dict[str, Value]:
    """Settings that Marian, or `settings_as_yaml`, has written: each a text, or a list of texts below its key.

    This is the little of YAML that such files have, so there is nothing in it that could refer to itself or be a type.
    Raises ValueError for anything else.
    """
    found: dict[str, Value] = {}
    key = None
    for number, line in enumerate(text.split("\n"), 1):
        line = line.rstrip()
        if not line or line.lstrip().startswith("#"):
            continue
        if match := _KEY.fullmatch(line):
            key = match[1]
            if key in found:
                raise ValueError(f"line {number}: {key} occurs twice")
            found[key] = [] if not match[2] or match[2] == "[]" else _plain(match[2], number)
            continue
        values = found[key] if key is not None else None
        if not isinstance(values, list):
            raise ValueError(f"line {number} is neither a setting nor an item of a list: {line!a:.60}")
        if match := _ITEM.fullmatch(line):
            values.append(_plain(match[1], number))
        elif line.strip() != "[]":
            raise ValueError(f"line {number} is neither a setting nor an item of a list: {line!a:.60}")
    return found


def _plain(value: str, number: int) -> str:
    """A text without its quotes. Raises ValueError for what YAML would make anything else of."""
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1].replace("''", "'") if value[0] == "'" else value[1:-1]
    if value[:1] in ("&", "*", "!", "{", "[", "|", ">"):
        raise ValueError(f"line {number}: {value!a:.60} is not a plain value")
    return value


def read_array(array: Array) -> dict[str, Value]:
    """The settings in the array of `SETTINGS`. Raises ValueError."""
    data = array.astype(np.uint8).tobytes() if array.dtype.itemsize == 1 else b""
    if not 0 < len(data) <= LARGEST_SETTINGS:
        raise ValueError(
            f"it should be the text of Marian's settings, but is {array.size} numbers of type {array.dtype}"
        )
    try:
        return read_settings(data.rstrip(b"\0").decode())
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None


_ENTRY = re.compile(r"""(?:"((?:[^"\\]|\\.)*)"|'((?:[^']|'')*)'|([^"'&*!|>%@`{}\[\],#?].*)):[ ]+([0-9]{1,9})""")
_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)")
_ESCAPED = {'"': '"', "\\": "\\", "t": "\t", "n": "\n", "r": "\r"}


def read_ids(text: str) -> dict[str, int]:
    """The pieces of a `vocab.yml` and their ids, which are 0 to the last: a line each, as Marian writes them.

    As `read_settings`, this is the little of YAML that such files have. Raises ValueError for anything else.
    """
    ids: dict[str, int] = {}
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        match = _ENTRY.fullmatch(line)
        if match is None or not _is_plain(match[3] or ""):
            raise ValueError(f"line {number} is no piece with its id: {line!a:.60}")
        double, single, plain, index = match.groups()
        if double is not None:
            piece = _unescaped(double, number)
        else:
            piece = plain if single is None else single.replace("''", "'")
        if piece in ids:
            raise ValueError(f"line {number}: {piece!a:.60} is there twice")
        ids[piece] = int(index)
    if sorted(ids.values()) != list(range(len(ids))):
        raise ValueError("its ids are not 0 to the last, each once")
    return ids


def _is_plain(text: str) -> bool:
    """Whether YAML would make no more of it than this text."""
    return text == text.strip() and not text.startswith("- ") and " #" not in text and ": " not in text


def _unescaped(text: str, number: int) -> str:
    """What stands between double quotes. Raises ValueError."""

    def character(found: re.Match[str]) -> str:
        escape = found[1]
        code = int(escape[1:], 16) if len(escape) > 1 else ord(_ESCAPED.get(escape, "\ud800"))
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise ValueError(f"line {number}: \\{escape} is no character")
        return chr(code)

    return _ESCAPE.sub(character, text)


# ---- ids ------------------------------------------------------------------------------------------------------------


def order_of(tokenizer: Tokenizer) -> list[int] | None:
    """Which of our ids each id of the SentencePiece model is, as Marian counts them: its own.

    None where these are not all: of ours, only those that no model predicts may be missing there.
    """
    if not tokenizer.is_listed:
        return list(range(tokenizer.vocab_size))
    processor = SentencePieceProcessor(model_proto=tokenizer.sentencepiece_model)
    ids = {piece: index for index, piece in enumerate(tokenizer.pieces())}
    order = [ids.get(processor.id_to_piece(index)) for index in range(len(processor))]
    known = [index for index in order if index is not None]
    missing = set(range(tokenizer.vocab_size)) - set(known)
    is_whole = len(set(known)) == len(order) and missing <= set(NEVER)
    ends_alike = processor.unk_id() >= 0 and processor.eos_id() >= 0 and order[processor.eos_id()] == EOS
    return known if is_whole and ends_alike else None
