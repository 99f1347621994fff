"""The state of a decoder in buffers that stay in place, as steps that a GPU replays need it: see `replay`.

`B` sentences, `K` hypotheses of each, `H` heads, `S` source positions, `T` target positions.
"""

import math
from collections.abc import Hashable
from dataclasses import replace

import torch
from torch import Tensor

from transformer.layout import Mask, Padded
from transformer.model.attention import KeyValueCache
from transformer.model.transformer import DecoderState, mask_dtype

_STRIDE = 16  # positions are rounded up to a multiple: each number of them is a shape, which is recorded by itself


def rounded(positions: int) -> int:
    """This many positions, rounded up a little."""
    return -(-positions // _STRIDE) * _STRIDE


class Arena:
    """Memory for buffers of which some are in use at a time: those of one name lie in the same place.

    What it holds is always finite: attention weighs what a mask hides with 0, and 0 times NaN were NaN.
    """

    def __init__(self) -> None:
        self._flat: dict[Hashable, Tensor] = {}

    def take(self, name: Hashable, shape: tuple[int, ...], *, like: Tensor) -> Tensor:
        """A buffer of this shape. One that was taken before stays valid, even where there was too little room."""
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or len(flat) < size:
            flat = self._flat[name] = like.new_zeros(size)
        return flat[:size].view(shape)


def source_positions(state: DecoderState) -> int:
    """S of its buffers."""
    return rounded(state.memory_kv[0].size)


def fixed(state: DecoderState, arena: Arena, name: Hashable, *, sentences: int, positions: int) -> DecoderState:
    """Buffers for a state like this one, of so many sentences and target positions. `fill` puts a state into them."""
    beam_size = state.beam_size
    source = source_positions(state)

    def caches(like: list[KeyValueCache], kind: str, size: int) -> list[KeyValueCache]:
        found = []
        for n, cache in enumerate(like):
            _, n_heads, _, d_k = cache.keys.shape
            keys = (sentences, n_heads, size, d_k)
            values = (sentences, n_heads, size, cache.values.shape[3])
            found.append(
                KeyValueCache(
                    arena.take((name, kind, n, "keys"), keys, like=cache.keys),
                    arena.take((name, kind, n, "values"), values, like=cache.values),
                )
            )
        return found

    mask = state.past_mask
    return DecoderState(
        past=caches(state.past, "past", beam_size * positions),
        past_mask=mask.new_empty(sentences, beam_size, beam_size * positions),
        memory_kv=caches(state.memory_kv, "memory", source),
        memory=Mask(mask.new_empty(sentences, 1, 1, source)),
        position=torch.zeros(1, dtype=torch.int64, device=mask.device),
    )


def fill(buffers: DecoderState, state: DecoderState) -> None:
    """Put a state, which may be a smaller one, into these buffers. What is left over sees one key: no row is NaN."""
    for own, other in zip([*buffers.past, *buffers.memory_kv], [*state.past, *state.memory_kv], strict=True):
        put(own.keys, other.keys)
        put(own.values, other.values)
    buffers.past_mask.fill_(-torch.inf)
    put(buffers.past_mask, state.past_mask)

    assert isinstance(buffers.memory, Mask)
    memory = state.memory
    if isinstance(memory, Padded):
        memory = Mask.of(memory.visible().unsqueeze(1), mask_dtype(state.memory_kv[0].keys))
    buffers.memory.numbers.fill_(-torch.inf)
    buffers.memory.numbers[..., :1] = 0.0
    put(buffers.memory.numbers, memory.numbers)

    assert isinstance(buffers.position, Tensor)
    buffers.position.copy_(torch.as_tensor(state.position))


def put(buffer: Tensor, smaller: Tensor) -> None:
    """Copy a tensor into the corner of a larger one where all indices are 0."""
    buffer[tuple(map(slice, smaller.shape))] = smaller


def reading(buffers: DecoderState, positions: int) -> DecoderState:
    """The same buffers, of which a step reads so many target positions."""
    end = buffers.beam_size * positions
    return replace(
        buffers,
        past=[KeyValueCache(cache.keys[:, :, :end], cache.values[:, :, :end]) for cache in buffers.past],
        past_mask=buffers.past_mask[:, :, :end],
    )


def keep(buffers: DecoderState, after: DecoderState) -> None:
    """Put what a step from these buffers has changed, and has not written there itself, where the next one reads it."""
    assert isinstance(buffers.position, Tensor)
    assert isinstance(after.position, Tensor)
    buffers.position.copy_(after.position)
    if after.past_mask is not buffers.past_mask:
        buffers.past_mask.copy_(after.past_mask)
