"""Random numbers and permutations that follow from keys: each number is computed on its own, in any order.

NumPy's generators give streams. These give the number that belongs to a sentence, or to a place in an epoch, wherever
it is asked for and in whatever order.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from transformer.data.store import Ids

Keys = npt.NDArray[np.uint64]
Scores = npt.NDArray[np.float64]


def mix(keys: Keys) -> Keys:
    """A random number for each key: the output of SplitMix64 (Steele et al., 2014) in that state."""
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))


def state(keys: Keys, number: Ids | int) -> Keys:
    """The state of SplitMix64 that begins at `keys`, after `number` + 1 steps."""
    steps = np.asarray(number, np.uint64) + np.uint64(1)
    return keys + steps * np.array([0x9E3779B97F4A7C15], np.uint64)  # arrays wrap around silently, scalars do not


def uniform(keys: Keys, number: int) -> Scores:
    """The random number of each key that has this `number`, in [0, 1)."""
    return (mix(state(keys, number)) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permuted(numbers: Ids, count: int, keys: Sequence[int]) -> Ids:
    """Where the permutation of 0 ... `count` - 1 that the keys choose takes each of these numbers.

    A Feistel network permutes the numbers below the next power of two. What it takes out of the range it permutes
    again, until it is back in it: cycle walking (Black and Rogaway, 2002).
    """
    bits = (count - 1).bit_length()
    found = _feistel(numbers.astype(np.uint64), bits, keys)
    while True:
        outside = np.flatnonzero(found >= np.uint64(count))
        if len(outside) == 0:
            return found.astype(np.int64)
        found[outside] = _feistel(found[outside], bits, keys)


def _feistel(numbers: Keys, bits: int, keys: Sequence[int]) -> Keys:
    """A permutation of the numbers of so many bits: their two halves change in turn, each by what the other one is."""
    low_bits = bits // 2
    low_mask = np.uint64(2**low_bits - 1)
    high_mask = np.uint64(2 ** (bits - low_bits) - 1)
    high = numbers >> np.uint64(low_bits)
    low = numbers & low_mask
    for number, key in enumerate(keys):
        if number % 2 == 0:
            high ^= mix(low + np.uint64(key)) & high_mask
        else:
            low ^= mix(high + np.uint64(key)) & low_mask
    return (high << np.uint64(low_bits)) | low
