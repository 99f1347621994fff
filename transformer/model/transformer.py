"""The encoder-decoder Transformer (section 3).

    source ids -> embedding -> encoder layers -> memory
    target ids -> embedding -> decoder layers, which read memory -> hidden states -> logits

Training computes all target positions at once (`encode`, `decode`), a search one after the other (`encode`, `start`,
`decode_step`). What a search has read is a `DecoderState`, passed in and returned, never kept on the module. Parameters
carry the paper's names, and `parameters_by_name` is what a checkpoint holds: a shared matrix once. Dropout acts in
`Embedding` and `AddNorm` (`model.dropout`), on attention's weights (`model.attention_dropout`) and in `FeedForward`.

`B` sentences, `S` source and `T` target positions, `K` hypotheses of a sentence, `R` hypotheses in all (B K), `D`
d_model, `V` pieces of the target's vocabulary, which may be the source's, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transformer.compute import to_autocast_dtype
from transformer.config.settings import ModelConfig, Norm, Start
from transformer.cost import count_parameters
from transformer.kernels.linear import apply_linear
from transformer.layout import Layout, Mask, Padded
from transformer.model.attention import KeyValueCache, MultiHeadAttention
from transformer.model.layers import DecoderLayer, Embedding, EncoderLayer, FeedForward, frozen
from transformer.vocabulary import BOS, NEVER, NO_PROBABILITY, VocabSize, VocabSizes, source_size, target_size

_FIRST_POSITIONS = 16  # a cache has room for so many at first, and doubles whenever it is full


@dataclass(frozen=True)
class DecoderState:
    """What a search has read so far: K hypotheses of each of B sentences, those of a sentence adjacent.

    Each position adds K keys and values to the cache of each layer, one for each hypothesis that was live there. A
    hypothesis sees one of the K: that of the hypothesis which it continues. So a search that drops some hypotheses and
    continues others twice never moves a key: only `past_mask` changes, which all layers read.

    A step writes into the caches and the mask of the state that it is given. So only the newest state is valid: two
    searches cannot continue from the same state, unless it is the first.

    When a GPU replays the steps of a search, all tensors stay in place. Then the position is a tensor, and the caches
    have room for every position that the search reaches.
    """

    past: list[KeyValueCache]  # of each layer: keys and values of the targets so far, with room for more: n
    past_mask: Tensor  # (B, K, n) to be added to scores: 0 for a key in the past of a hypothesis, -inf for all others
    memory_kv: list[KeyValueCache]  # of each layer: keys and values of the encoder's output
    memory: Padded | Mask  # which of them are seen
    position: int | Tensor  # of the next target, counted from 0; a tensor is (1,)

    @property
    def beam_size(self) -> int:
        """K."""
        return self.past_mask.shape[1]

    def with_room(self) -> "DecoderState":
        """The state with room for one more position; if it was full, the room is doubled."""
        n_slots = self.past_mask.shape[2]
        if isinstance(self.position, Tensor) or self.position * self.beam_size < n_slots:
            return self

        size = 2 * n_slots or _FIRST_POSITIONS * self.beam_size
        past_mask = F.pad(self.past_mask, (0, size - n_slots), value=-torch.inf)
        return replace(self, past=[cache.grow(size) for cache in self.past], past_mask=past_mask)

    def slots(self) -> tuple[slice | Tensor, int]:
        """Where the K keys of the next position are written, and how many keys from the first on are read then."""
        beam_size = self.beam_size
        if isinstance(self.position, Tensor):
            slots = beam_size * self.position + torch.arange(beam_size, device=self.position.device)  # (K,)
            return slots, self.past_mask.shape[2]

        start = beam_size * self.position
        return slice(start, start + beam_size), start + beam_size

    def reorder(self, rows: Tensor) -> "DecoderState":
        """The state of the hypotheses `rows` `(R,)`, given by their indices among those of this state.

        Whole sentences may be dropped; each of the others keeps K adjacent rows.
        """
        past_mask = self.past_mask.flatten(0, 1)[rows]  # (R, n)
        past_mask = past_mask.unflatten(0, (-1, self.beam_size))  # type: ignore[no-untyped-call]  # (B, K, n)
        state = replace(self, past_mask=past_mask)
        if len(past_mask) == len(self.past_mask):
            return state  # no sentence has left, and keys and values stay where they are

        sentences = rows[:: self.beam_size] // self.beam_size  # (B,)
        return replace(
            state,
            past=[layer.select(sentences) for layer in self.past],
            memory_kv=[layer.select(sentences) for layer in self.memory_kv],
            memory=self.memory.select(sentences),
        )


class Transformer(nn.Module):
    """The model of the paper: logits of each target position from the source and the targets before it."""

    output: Tensor  # (V, D)
    output_bias: Tensor | None  # (V,)

    def __init__(self, config: ModelConfig, vocab_size: VocabSize) -> None:
        super().__init__()
        self.config = config
        self.vocab_sizes = vocab_size
        self.source_vocab_size = source_size(vocab_size)
        self.vocab_size = target_size(vocab_size)

        # The embeddings of source and target, and the pre-softmax map (section 3.4): one matrix, or two where the
        # source has a vocabulary of its own, or three.
        if config.tie_embeddings:
            self.embedding = self._matrix(self.vocab_size)  # registered first: this is its name in a checkpoint
            has_own_source = isinstance(vocab_size, VocabSizes)
            source_matrix = self._matrix(self.source_vocab_size) if has_own_source else self.embedding
            self.source_embedding = self._embedding(source_matrix)
            self.target_embedding = self._embedding(self.embedding, is_target=True)
            self.output = self.embedding
        else:
            source_matrix = self._matrix(self.source_vocab_size)
            target_matrix = self._matrix(self.vocab_size)
            output_matrix = self._matrix(self.vocab_size)
            self.source_embedding = self._embedding(source_matrix)
            self.target_embedding = self._embedding(target_matrix, is_target=True)
            self.output = output_matrix
        starts_from_zeros = config.start is Start.zeros
        bias = torch.zeros(self.vocab_size)
        if config.biases:
            self.output_bias = nn.Parameter(bias)
        else:  # a start of zeros has one that is fixed
            self.register_buffer("output_bias", bias if starts_from_zeros else None, persistent=False)
        if starts_from_zeros:
            self._freeze_start()

        self.encoder = nn.ModuleList(self._encoder_layer() for _ in range(config.n_layers))
        self.decoder = nn.ModuleList(self._decoder_layer() for _ in range(config.decoder_layers))

        # A pre-norm layer ends without a norm, so each stack of them needs one at its end.
        final_norm = nn.LayerNorm if config.norm is Norm.pre else nn.Identity
        self.encoder_norm = final_norm(config.d_model)
        self.decoder_norm = final_norm(config.d_model)

    # ---- all target positions at once, as in training

    def forward(self, source: Tensor, target: Tensor, *, source_layout: Layout, target_layout: Layout) -> Tensor:
        """Source ids `(B, S)` and decoder inputs `(B, T)` (BOS first) -> logits `(B, T, V)`; packed, `(N,)` each."""
        memory = self.encode(source, source_layout)
        hidden = self.decode(target, target_layout, memory=memory, memory_layout=source_layout)
        return self.unembed(hidden)

    def encode(self, source: Tensor, layout: Layout) -> Tensor:
        """Source ids `(B, S)` -> the encoder's output, called memory, `(B, S, D)`."""
        x = self.source_embedding(source, layout.positions())  # (B, S, D)
        for layer in self.encoder:
            x = layer(x, layout)

        return to_autocast_dtype(self.encoder_norm(x))  # cast once here, because every decoder layer reads it

    def decode(self, target: Tensor, layout: Layout, *, memory: Tensor, memory_layout: Layout) -> Tensor:
        """Decoder inputs `(B, T)` and memory `(B, S, D)` -> hidden states `(B, T, D)`."""
        x = self.target_embedding(target, layout.positions())  # (B, T, D)
        for layer in self._decoder_layers():
            # Not for all layers at once: they would stay, and their gradients be put together in a pass of its own.
            memory_kv = layer.cross_attention.joined(memory, layout=memory_layout, with_queries=False)
            x = layer(x, layout, memory_kv=memory_kv, memory_layout=memory_layout)

        return self.decoder_norm(x)

    def cross_attention_weights(
        self, target: Tensor, layout: Padded, *, memory: Tensor, memory_layout: Padded, layer: int
    ) -> Tensor:
        """The weights of encoder-decoder attention in one decoder layer, counted from 0, `(B, H, T, S)`.

        Decoder inputs `(B, T)` and memory `(B, S, D)` are as for `decode`.
        """
        layers = self._decoder_layers()
        x = self.target_embedding(target, layout.positions())  # (B, T, D)
        for lower in layers[:layer]:
            memory_kv = lower.cross_attention.keys_values(memory)
            x = lower(x, layout, memory_kv=memory_kv, memory_layout=memory_layout)

        memory_kv = layers[layer].cross_attention.keys_values(memory)
        return layers[layer].cross_attention_weights(x, layout, memory_kv=memory_kv, memory_layout=memory_layout)

    def unembed(self, hidden: Tensor) -> Tensor:
        """Hidden states `(..., D)` -> logits `(..., V)`: the paper's pre-softmax map has no bias (section 3.4)."""
        return apply_linear(hidden, *self.output_map())

    def output_map(self) -> tuple[Tensor, Tensor | None]:
        """The matrix `(V, D)` and the bias `(V,)` of the pre-softmax map; their frozen rows are given no gradient."""
        if self.config.start is Start.learned:
            return self.output, self.output_bias

        assert self.output_bias is not None
        return frozen(self.output, NEVER), frozen(self.output_bias, NEVER)

    # ---- one target position after the other, as in a search

    def start(self, memory: Tensor, layout: Padded, *, beam_size: int) -> DecoderState:
        """The state before the first target, with `beam_size` hypotheses for each row of memory `(B, S, D)`."""
        memory_kv = [layer.cross_attention.keys_values(memory) for layer in self._decoder_layers()]
        dtype = mask_dtype(memory_kv[0].keys)
        return DecoderState(
            past=[KeyValueCache.empty(kv, 0) for kv in memory_kv],
            past_mask=memory.new_empty(len(memory), beam_size, 0, dtype=dtype),
            memory_kv=[KeyValueCache.of(kv) for kv in memory_kv],
            memory=layout if layout.full else Mask.of(layout.visible().unsqueeze(1), dtype),
            position=0,
        )

    def decode_step(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """The last token of each hypothesis `(R,)` -> logits of the next `(R, V)`, and the state after it."""
        beam_size = state.beam_size
        x = self.target_embedding(tokens.view(-1, beam_size), state.position)  # (B, K, D)

        # This position adds K keys, of which a hypothesis sees only its own.
        state = state.with_room()
        slots, end = state.slots()
        state.past_mask[:, :, slots] = _sees_itself(beam_size, like=state.past_mask)
        past = Mask(state.past_mask[:, :, :end].unsqueeze(1))  # (B, 1, K, end)

        queries = Padded.full_rows(x.shape[0], beam_size, x.device)
        for layer, cache, memory_kv in zip(self._decoder_layers(), state.past, state.memory_kv, strict=True):
            x = layer.step(
                x,
                cache,
                slots=slots,
                end=end,
                queries=queries,
                past=past,
                memory_kv=memory_kv,
                memory=state.memory,
            )  # (B, K, D)

        logits = self.unembed(self.decoder_norm(x).flatten(0, 1))  # (R, V)
        return logits, replace(state, position=state.position + 1)

    # ---- the decoder's layers

    def _decoder_layers(self) -> list[DecoderLayer]:
        return cast(list[DecoderLayer], list(self.decoder))

    # ---- construction: numbers from the config, which no module below this one sees

    def _matrix(self, rows: int) -> nn.Parameter:
        """A matrix with a row for each piece of a vocabulary, such as `(V, D)`."""
        matrix = nn.Parameter(torch.empty(rows, self.config.d_model))
        nn.init.normal_(matrix, std=self.config.d_model**-0.5)  # times sqrt(d_model): embeddings of unit variance
        return matrix

    def _embedding(self, matrix: nn.Parameter, *, is_target: bool = False) -> Embedding:
        starts_from_zeros = is_target and self.config.start is Start.zeros
        return Embedding(
            matrix,
            self.config.positions,
            max_positions=self.config.max_positions,
            dropout=self.config.dropout,
            frozen_row=BOS if starts_from_zeros else None,
        )

    def _freeze_start(self) -> None:
        """Marian's start: zeros in place of an embedding of BOS. Marian has no such piece, nor PAD: none is predicted.

        Their rows are zeros in the embedding and in the output, and so their logit is their bias. As they are given no
        gradient, they stay so.
        """
        rows = list(NEVER)
        assert self.output_bias is not None
        with torch.no_grad():
            self.target_embedding.matrix[rows] = 0.0
            self.output[rows] = 0.0
            self.output_bias[rows] = NO_PROBABILITY

    def _attention(self) -> MultiHeadAttention:
        return MultiHeadAttention(
            self.config.d_model,
            self.config.n_heads,
            d_k=self.config.key_width,
            d_v=self.config.value_width,
            score=self.config.score,
            biases=self.config.biases,
            dropout=self.config.attention_dropout,
        )

    def _feed_forward(self) -> FeedForward:
        return FeedForward(
            self.config.d_model,
            self.config.d_ff,
            activation=self.config.activation,
            dropout=self.config.relu_dropout,
        )

    def _encoder_layer(self) -> EncoderLayer:
        return EncoderLayer(
            self._attention(),
            self._feed_forward(),
            d_model=self.config.d_model,
            norm=self.config.norm,
            dropout=self.config.dropout,
        )

    def _decoder_layer(self) -> DecoderLayer:
        return DecoderLayer(
            self._attention(),
            self._attention(),
            self._feed_forward(),
            d_model=self.config.d_model,
            norm=self.config.norm,
            dropout=self.config.dropout,
        )


def mask_dtype(keys: Tensor) -> torch.dtype:
    """The type in which a mask is added to the scores of these keys: a CPU adds in fp32 whatever it multiplies in."""
    return torch.promote_types(keys.dtype, torch.float32) if keys.device.type == "cpu" else keys.dtype


def _sees_itself(beam_size: int, *, like: Tensor) -> Tensor:
    """The mask of K hypotheses over the keys that they have just written, `(K, K)`."""
    barred = like.new_full((beam_size, beam_size), -torch.inf)
    return barred.triu(1) + barred.tril(-1)  # 0 on the diagonal; ONNX has no operator that fills it in place


def parameters_by_name(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter once, detached, under the name that a checkpoint gives it."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def check_size(config: ModelConfig, vocab_size: VocabSize, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless `tensors` hold as many numbers as a model of this config has parameters.

    To be called before the model is built: a forged config could ask for more memory or time than there is.
    """
    expected = count_parameters(config, vocab_size).total
    held = sum(tensor.numel() for tensor in tensors.values())
    if held != expected or max(config.n_layers, config.decoder_layers) > len(tensors):
        raise ValueError(f"its settings describe a model of {expected} parameters, but it holds {held}")


def load_parameters(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy `tensors` into the model's parameters. Raises ValueError unless names and shapes are exactly the model's."""
    parameters = parameters_by_name(model)

    # All checks come first, so that a model is never half loaded.
    if parameters.keys() != tensors.keys():
        raise ValueError(f"parameter names differ: {sorted(parameters.keys() ^ tensors.keys())[:4]}")
    for name, parameter in parameters.items():
        if parameter.shape != tensors[name].shape:
            raise ValueError(f"{name} is {tuple(tensors[name].shape)}, not {tuple(parameter.shape)}")

    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])
