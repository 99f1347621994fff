"""Marian's model file, and what Marian computes with it, in numpy and float64: no engine is needed to read it.

    model.npz    arrays under Marian's names, and among them `special:model.yml`, the settings of the model, as text

This knows Marian's transformer alone, and nothing of the model that a file was made of: the check of an export reads
with it what was written. It has been compared with Marian 1.12.42 on a model that Marian trained.

`B` sentences, `S` source and `T` target positions, `D` width, `H` heads, `K` width of a head, `V` pieces.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from transformer.integrations.published.marian_form import (
    OUTPUT_BIAS,
    OUTPUT_MATRIX,
    SETTINGS,
    SHARED_MATRIX,
    TARGET_MATRIX,
    Value,
    read_array,
)

Array = npt.NDArray[Any]

EPSILON = 1e-6  # of Marian's norms
_HIDDEN = -1e8  # added to the score of a key that is not seen, as Marian does


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": lambda x: np.maximum(x, 0.0),
    "swish": lambda x: x / (1.0 + np.exp(-x)),
    "gelu": lambda x: x / (1.0 + np.exp(-1.702 * x)),
}


@dataclass(frozen=True)
class Memory:
    """What the decoder reads of sources: keys and values `(B, H, S, K)` of each layer, and which positions are seen."""

    keys: list[Array]
    values: list[Array]
    mask: Array  # (B, 1, 1, S), to be added to scores

    def select(self, rows: Array) -> "Memory":
        """That of these sentences, which may be there more than once."""
        return Memory([keys[rows] for keys in self.keys], [values[rows] for values in self.values], self.mask[rows])


@dataclass(frozen=True)
class Past:
    """Keys and values `(B, H, t, K)` of the targets before, of each layer."""

    keys: list[Array] = field(default_factory=list)
    values: list[Array] = field(default_factory=list)

    @property
    def length(self) -> int:
        """How many targets there were."""
        return int(self.keys[0].shape[2]) if self.keys else 0

    def select(self, rows: Array) -> "Past":
        """That of these hypotheses."""
        return Past([keys[rows] for keys in self.keys], [values[rows] for values in self.values])


@dataclass(frozen=True)
class MarianGraph:
    """A transformer of Marian's, in float64.

    `scales` are those of int8, by the names of matrices: what a matrix is multiplied with is rounded by them, as
    Bergamot does. `observe` is told its largest number.
    """

    arrays: dict[str, Array]
    settings: dict[str, Value]
    scales: Mapping[str, float] = field(default_factory=dict)
    observe: Callable[[str, float], object] | None = None

    @classmethod
    def read(cls, path: Path) -> "MarianGraph":
        """From its file."""
        with np.load(path) as stored:  # which reads no pickle
            arrays = {name: stored[name] for name in stored.files}
        settings = read_array(arrays.pop(SETTINGS))
        return cls({name: array.astype(np.float64) for name, array in arrays.items()}, settings)

    # ---- the two stacks

    def encode(self, source: Array, lengths: Array) -> Memory:
        """Sources `(B, S)`, each with its end, of these lengths `(B,)`."""
        mask = np.where(np.arange(source.shape[1]) < lengths[:, None], 0.0, _HIDDEN)[:, None, None, :]  # (B, 1, 1, S)
        x = self._embed(self._matrix("encoder")[source], start=0)  # (B, S, D)
        for layer in range(1, self._depth("enc") + 1):
            name = f"encoder_l{layer}"
            x = self._around(f"{name}_self_Wo", x, partial(self._attend_to_itself, f"{name}_self", mask=mask))
            x = self._around(f"{name}_ffn_ffn", x, partial(self._feed_forward, f"{name}_ffn"))

        layers = range(1, self._depth("dec") + 1)
        keys, values = zip(*(self._keys_values(f"decoder_l{layer}_context", x) for layer in layers), strict=True)
        return Memory(list(keys), list(values), mask)

    def decode(self, previous: Array, past: Past, memory: Memory) -> tuple[Array, Past]:
        """The pieces before each target `(B, T)`, -1 where there is none -> logits `(B, T, V)`, and the past then."""
        embedded = self._matrix("decoder")[previous] * (previous >= 0)[..., None]  # a sentence begins with zeros
        x = self._embed(embedded, start=past.length)  # (B, T, D)
        n_new = previous.shape[1]
        mask = np.triu(np.full((n_new, past.length + n_new), _HIDDEN), past.length + 1)  # (T, t + T)

        grown = Past()
        for index in range(self._depth("dec")):
            name = f"decoder_l{index + 1}"

            def attend_to_past(y: Array, name: str = f"{name}_self", index: int = index) -> Array:
                keys, values = self._keys_values(name, y)
                if past.keys:
                    keys = np.concatenate([past.keys[index], keys], 2)
                    values = np.concatenate([past.values[index], values], 2)
                grown.keys.append(keys)
                grown.values.append(values)
                return self._read(name, y, keys, values, mask)

            def attend_to_source(y: Array, name: str = f"{name}_context", index: int = index) -> Array:
                return self._read(name, y, memory.keys[index], memory.values[index], memory.mask)

            x = self._around(f"{name}_self_Wo", x, attend_to_past)
            x = self._around(f"{name}_context_Wo", x, attend_to_source)
            x = self._around(f"{name}_ffn_ffn", x, partial(self._feed_forward, f"{name}_ffn"))

        # The output's matrix (V, D) is the embedding unless there is one.
        output = next(name for name in (OUTPUT_MATRIX, SHARED_MATRIX, TARGET_MATRIX) if name in self.arrays)
        return self._product(x, output, self.arrays[output].T) + self.arrays[OUTPUT_BIAS], grown

    # ---- parts

    def _depth(self, stack: str) -> int:
        return int(str(self.settings[f"{stack}-depth"]))

    def _matrix(self, stack: str) -> Array:
        return self.arrays["Wemb"] if "Wemb" in self.arrays else self.arrays[f"{stack}_Wemb"]

    def _embed(self, rows: Array, *, start: int) -> Array:
        """Rows of a matrix `(B, T, D)` times the root of D, and positions: all sines before all cosines."""
        width = rows.shape[-1]
        return math.sqrt(width) * rows + positions(start + rows.shape[1], width)[start:]

    def _around(self, name: str, x: Array, sublayer: Callable[[Array], Array]) -> Array:
        """A sub-layer, the sum with its input, and a norm: Marian's `transformer-postprocess: dan`."""
        return self._norm(x + sublayer(x), f"{name}_ln")

    def _norm(self, x: Array, name: str) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON)
        return scaled * self.arrays[f"{name}_scale"] + self.arrays[f"{name}_bias"]

    def _affine(self, x: Array, weight: str, bias: str) -> Array:
        return self._product(x, weight, self.arrays[weight]) + self.arrays[bias]

    def _product(self, x: Array, name: str, matrix: Array) -> Array:
        if self.observe is not None:
            self.observe(name, float(np.abs(x).max()))
        if name in self.scales:
            x = np.clip(np.rint(x * self.scales[name]), -127, 127) / self.scales[name]
        return x @ matrix

    def _feed_forward(self, name: str, x: Array) -> Array:
        activation = _ACTIVATIONS[str(self.settings["transformer-ffn-activation"])]
        return self._affine(activation(self._affine(x, f"{name}_W1", f"{name}_b1")), f"{name}_W2", f"{name}_b2")

    def _heads(self, x: Array) -> Array:
        """`(B, T, D)` -> `(B, H, T, K)`."""
        return x.reshape(*x.shape[:2], int(str(self.settings["transformer-heads"])), -1).swapaxes(1, 2)

    def _keys_values(self, name: str, x: Array) -> tuple[Array, Array]:
        """`(B, S, D)` -> `(B, H, S, K)` each."""
        keys, values = (self._heads(self._affine(x, f"{name}_W{letter}", f"{name}_b{letter}")) for letter in "kv")
        return keys, values

    def _attend_to_itself(self, name: str, x: Array, *, mask: Array) -> Array:
        keys, values = self._keys_values(name, x)
        return self._read(name, x, keys, values, mask)

    def _read(self, name: str, x: Array, keys: Array, values: Array, mask: Array) -> Array:
        queries = self._heads(self._affine(x, f"{name}_Wq", f"{name}_bq"))
        weights = np.exp(log_softmax(queries @ keys.swapaxes(2, 3) / math.sqrt(keys.shape[-1]) + mask))
        read = (weights @ values).swapaxes(1, 2)  # (B, T, H, K)
        return self._affine(read.reshape(*read.shape[:2], -1), f"{name}_Wo", f"{name}_bo")


def positions(count: int, width: int) -> Array:
    """Marian's table of positions, `(count, D)`: its frequencies go from 1 to exactly 1 / 10000."""
    n_frequencies = width // 2
    frequencies = 10_000.0 ** (-np.arange(n_frequencies) / max(1, n_frequencies - 1))
    angles = np.arange(count)[:, None] * frequencies
    return np.concatenate((np.sin(angles), np.cos(angles)), 1)


def log_softmax(logits: Array) -> Array:
    """Over the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
