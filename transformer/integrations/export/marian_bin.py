"""Marian's binary form of a model, which Bergamot's engine maps into memory: `model.bin`.

    u64 1, n | n times u64 length of name, type, dimensions, bytes | names | dimensions, i32 | u64 gap, gap | arrays

An array fills up to a multiple of 256 bytes, at which the next begins. One of int8 has the number by which its weights
were multiplied behind it, in float32; a product's matrix is transposed there, that of a vocabulary is not. What such a
matrix is multiplied with has a scale of its own, an array of one number, if the file has them.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from transformer.integrations.published.marian_form import SHARED_MATRIX, TARGET_MATRIX

Array = npt.NDArray[Any]

_VERSION = 1
_BLOCK = 256  # bytes
_FLOAT32, _BYTES, _INT8 = 0x0404, 0x0101, 0x4101  # the types that are written here
_SCALE = "_QuantMultA"
_OUTPUT_SCALES = ("none", SHARED_MATRIX)  # the engine's names for a matrix that is transposed, and then cut to a list
LARGEST = 127.0  # of int8; -128 has no opposite


@dataclass(frozen=True)
class Binary:
    """What a file holds, as numbers that one can calculate with."""

    arrays: dict[str, Array]  # of int8 weights, what they stand for; of bytes, bytes
    scales: dict[str, float]  # by the name of the matrix
    is_int8: bool


def is_product(name: str) -> bool:
    """Whether an array is a matrix that something is multiplied with, or that of a vocabulary: these become int8."""
    return name.endswith("Wemb") or name.rpartition("_")[2][:1] == "W"


def write_bin(path: Path, arrays: Mapping[str, Array], *, int8: bool, scales: Mapping[str, float]) -> None:
    """Write arrays of float32, and bytes of settings; `scales` by the name of the matrix, for int8 alone."""
    items = [_item(name, array, int8=int8) for name, array in arrays.items()]
    for matrix, scale in scales.items():
        names = _OUTPUT_SCALES if matrix == SHARED_MATRIX else [matrix]
        names = ["none", matrix] if matrix == TARGET_MATRIX else names
        items += [(f"{name}{_SCALE}", _FLOAT32, (1,), np.float32(scale).tobytes()) for name in names]

    heads, names_, dimensions, contents = [], [], [], []
    for name, kind, shape, data in items:
        encoded = name.encode() + b"\0"
        content = data + bytes(-len(data) % _BLOCK)
        heads.append(struct.pack("<4Q", len(encoded), kind, len(shape), len(content)))
        names_.append(encoded)
        dimensions.append(struct.pack(f"<{len(shape)}i", *shape))
        contents.append(content)
    start = struct.pack("<2Q", _VERSION, len(items)) + b"".join([*heads, *names_, *dimensions])
    gap = -(len(start) + 8) % _BLOCK
    path.write_bytes(start + struct.pack("<Q", gap) + bytes(gap) + b"".join(contents))


def _item(name: str, array: Array, *, int8: bool) -> tuple[str, int, tuple[int, ...], bytes]:
    if array.dtype == np.int8:
        return name, _BYTES, array.shape, array.tobytes()
    if not (int8 and is_product(name)):
        return name, _FLOAT32, array.shape, np.ascontiguousarray(array, np.float32).tobytes()

    largest = float(np.abs(array).max())
    factor = np.float32(LARGEST / largest if largest else 1.0)
    weights = array if name.endswith("Wemb") else array.T
    rounded = np.clip(np.rint(weights * factor), -LARGEST, LARGEST).astype(np.int8)
    return name, _INT8, array.shape, np.ascontiguousarray(rounded).tobytes() + factor.tobytes()


def read_bin(path: Path) -> Binary:
    """Read a file that `write_bin` has written."""
    data = path.read_bytes()
    version, count = struct.unpack_from("<2Q", data)
    assert version == _VERSION
    heads = [struct.unpack_from("<4Q", data, 16 + 32 * index) for index in range(count)]
    place = 16 + 32 * count
    names = []
    for length, *_ in heads:
        names.append(data[place : place + length - 1].decode())
        place += length
    shapes = []
    for _, _, dimensions, _ in heads:
        shapes.append(struct.unpack_from(f"<{dimensions}i", data, place))
        place += 4 * dimensions
    place += 8 + struct.unpack_from("<Q", data, place)[0]

    arrays: dict[str, Array] = {}
    scales = {}
    for name, shape, (_, kind, _, size) in zip(names, shapes, heads, strict=True):
        array = _array_at(data, place, name, kind=kind, shape=shape)
        place += size
        if name.endswith(_SCALE):
            scales[name.removesuffix(_SCALE)] = float(array[0])
        else:
            arrays[name] = array
    output = SHARED_MATRIX if SHARED_MATRIX in arrays else TARGET_MATRIX
    if "none" in scales:
        scales[output] = scales.pop("none")
    return Binary(arrays, scales, any(kind == _INT8 for _, kind, _, _ in heads))


def _array_at(data: bytes, place: int, name: str, *, kind: int, shape: tuple[int, ...]) -> Array:
    count = int(np.prod(shape))
    if kind == _FLOAT32:
        return np.frombuffer(data, "<f4", count, place).reshape(shape)
    values = np.frombuffer(data, np.int8, count, place)
    if kind == _BYTES:
        return values.reshape(shape)
    (factor,) = struct.unpack_from("<f", data, place + count)
    weights = values.reshape(shape) if name.endswith("Wemb") else values.reshape(shape[::-1]).T
    return weights.astype(np.float64) / factor
