"""The encoder-decoder Transformer (section 3).

    source ids -> embedding -> encoder layers -> memory
    target ids -> embedding -> decoder layers, which read memory -> hidden states -> logits

Training computes all target positions at once (`encode`, `decode`), a search one after the other (`encode`, `start`,
`decode_step`). What a search has read is a `DecoderState`, passed in and returned, never kept on the module. Parameters
carry the paper's names, and `parameters_by_name` is what a checkpoint holds: a shared matrix once.

`B` sentences, `S` source and `T` target positions, `K` hypotheses of a sentence, `R` hypotheses in all (B K), `D`
d_model, `V` pieces of the target's vocabulary, which may be the source's, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from transformer.compute import to_autocast_dtype
from transformer.config.settings import ModelConfig, Norm
from transformer.cost import count_parameters
from transformer.kernels.linear import apply_linear
from transformer.layout import Histories, Layout, Padded
from transformer.model.attention import KeyValueCache, MultiHeadAttention
from transformer.model.layers import DecoderLayer, Embedding, EncoderLayer, FeedForward
from transformer.vocabulary import VocabSize, VocabSizes, source_size, target_size

_FIRST_POSITIONS = 16  # a cache has room for so many at first, and doubles whenever it is full


@dataclass(frozen=True)
class DecoderState:
    """What a search has read so far: K hypotheses of each of B sentences, those of a sentence adjacent.

    Each position adds K keys and values to the cache of each layer, one for each hypothesis that was live there. They
    are never moved: `is_past` says which of them a hypothesis descends from.

    A step writes into the caches of the state that it is given. Only the newest state is valid, therefore: two searches
    cannot go on from the same one.
    """

    past: list[KeyValueCache]  # of each layer: keys and values of the targets so far
    is_past: Tensor  # (B, K, n) bool: which of the n keys written so far belong to the past of each hypothesis
    memory_kv: list[KeyValueCache]  # of each layer: keys and values of the encoder's output
    memory_layout: Padded

    @property
    def beam_size(self) -> int:
        """K."""
        return self.is_past.shape[1]

    @property
    def position(self) -> int:
        """The position of the next target, counted from 0."""
        return self.is_past.shape[2] // self.beam_size

    def reorder(self, rows: Tensor) -> "DecoderState":
        """The state of the hypotheses `rows` `(R,)`, given by their indices among those of this state.

        Whole sentences may leave; each that stays keeps K adjacent rows.
        """
        is_past = self.is_past.flatten(0, 1)[rows]  # (R, n)
        is_past = is_past.unflatten(0, (-1, self.beam_size))  # type: ignore[no-untyped-call]  # (B, K, n)
        state = replace(self, is_past=is_past)
        if len(is_past) == len(self.is_past):
            return state  # no sentence has left, and keys and values stay where they are

        sentences = rows[:: self.beam_size] // self.beam_size  # (B,)
        return replace(
            state,
            past=[layer.select(sentences) for layer in self.past],
            memory_kv=[layer.select(sentences) for layer in self.memory_kv],
            memory_layout=self.memory_layout.select(sentences),
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
            self.target_embedding = self._embedding(self.embedding)
            self.output = self.embedding
        else:
            source_matrix = self._matrix(self.source_vocab_size)
            target_matrix = self._matrix(self.vocab_size)
            output_matrix = self._matrix(self.vocab_size)
            self.source_embedding = self._embedding(source_matrix)
            self.target_embedding = self._embedding(target_matrix)
            self.output = output_matrix
        self.output_bias = nn.Parameter(torch.zeros(self.vocab_size)) if config.biases else None

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
            memory_kv = layer.cross_attention.keys_values(memory)  # not for all layers at once: they would stay
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
        return apply_linear(hidden, self.output, self.output_bias)

    # ---- one target position after the other, as in a search

    def start(self, memory: Tensor, layout: Padded, *, beam_size: int) -> DecoderState:
        """The state before the first target, with `beam_size` hypotheses for each row of memory `(B, S, D)`."""
        memory_kv = [layer.cross_attention.keys_values(memory) for layer in self._decoder_layers()]
        return DecoderState(
            past=[KeyValueCache.empty(kv, 0) for kv in memory_kv],
            is_past=torch.zeros(len(memory), beam_size, 0, dtype=torch.bool, device=memory.device),
            memory_kv=[KeyValueCache.of(kv) for kv in memory_kv],
            memory_layout=layout,
        )

    def decode_step(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """The last token of each hypothesis `(R,)` -> logits of the next `(R, V)`, and the state after it."""
        beam_size = state.beam_size
        n_written = state.is_past.shape[2]  # keys in the cache, K for each position so far
        x = self.target_embedding(tokens.view(-1, beam_size), state.position)  # (B, K, D)

        # This position adds K keys, of which a hypothesis sees only its own.
        sees_own = torch.eye(beam_size, dtype=torch.bool, device=x.device).expand(x.shape[0], -1, -1)  # (B, K, K)
        is_past = torch.cat((state.is_past, sees_own), 2)  # (B, K, n + K)

        # Room for them.
        past = state.past
        if n_written == past[0].size:
            past = [cache.grow(2 * n_written or _FIRST_POSITIONS * beam_size) for cache in past]

        queries = Padded.full_rows(x.shape[0], beam_size, x.device)
        for layer, cache, memory_kv in zip(self._decoder_layers(), past, state.memory_kv, strict=True):
            x = layer.step(
                x,
                cache,
                start=n_written,
                queries=queries,
                histories=Histories(is_past),
                memory_kv=memory_kv,
                memory_layout=state.memory_layout,
            )  # (B, K, D)

        logits = self.unembed(self.decoder_norm(x).flatten(0, 1))  # (R, V)
        return logits, replace(state, past=past, is_past=is_past)

    # ---- the decoder's layers

    def _decoder_layers(self) -> list[DecoderLayer]:
        return cast(list[DecoderLayer], list(self.decoder))

    # ---- construction: numbers from the config, which no module below this one sees

    def _matrix(self, rows: int) -> nn.Parameter:
        """A matrix with a row for each piece of a vocabulary, such as `(V, D)`."""
        matrix = nn.Parameter(torch.empty(rows, self.config.d_model))
        nn.init.normal_(matrix, std=self.config.d_model**-0.5)  # times sqrt(d_model): embeddings of unit variance
        return matrix

    def _embedding(self, matrix: nn.Parameter) -> Embedding:
        return Embedding(
            matrix,
            self.config.positions,
            max_positions=self.config.max_positions,
            dropout=self.config.dropout,
        )

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
