"""Exports to ONNX: the encoder and one step of the decoder as graphs, for onnxruntime and whatever else reads them.

    source -> encoder.onnx -> keys and values of the source, for every layer of the decoder
    last token, keys and values so far, those of the source -> decoder.onnx -> logits, keys and values with this token

The graphs are traced from the model itself, so every kind of model can be exported exactly. Search is not in them: the
check uses ours.

`N` layers of the decoder, `B` sentences, `R` hypotheses, `S` source positions, `T` targets read so far, `H` heads, `K`
head width.
"""

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from sentencepiece import SentencePieceProcessor
from torch import Tensor, nn

from transformer.decoding.search import beam_search, length_penalty
from transformer.integrations.engine.peer import Forced, forced_by, pad
from transformer.integrations.export.formats import (
    ExportFormat,
    Original,
    readme_tokenizers,
    target_name,
    write_tokenizers,
)
from transformer.layout import Padded
from transformer.model.attention import KeyValueCache, KeyValues
from transformer.model.layers import DecoderLayer
from transformer.model.transformer import DecoderState, Transformer
from transformer.run_dir import TOKENIZER
from transformer.vocabulary import BOS, EOS, PAD, UNK

Array = npt.NDArray[Any]

ENCODER = "encoder.onnx"
DECODER = "decoder.onnx"
_OPSET = 18

README = """# A translation model in ONNX

Exported from {origin}. `parity.json` says how exactly it computes what that model computes.

`{encoder}` reads a source and gives the keys and values that the decoder reads of it. `{decoder}` reads one token and
gives the logits of the next, with the keys and values of all tokens so far.

| `{encoder}` | | type | shape |
| --- | --- | --- | --- |
| in | `source` | int64 | B, S: pieces with EOS, {eos}, then anything up to the longest |
| | `source_lengths` | int64 | B: pieces with EOS |
| out | `memory_keys`, `memory_values` | float32 | {n_layers}, B, {n_heads}, S, {d_k} or {d_v} |

| `{decoder}` | | type | shape |
| --- | --- | --- | --- |
| in | `tokens` | int64 | R: the last token of each hypothesis, {bos} at first |
| | `past_keys`, `past_values` | float32 | {n_layers}, R, {n_heads}, T, {d_k} or {d_v}: of T tokens before, 0 at first |
| | `memory_keys`, `memory_values` | float32 | {n_layers}, R, {n_heads}, S, {d_k} or {d_v}: of its source |
| | `source_lengths` | int64 | R |
| out | `logits` | float32 | R, {vocab_size} |
| | `keys`, `values` | float32 | {n_layers}, R, {n_heads}, T + 1, {d_k} or {d_v} |

```python
import numpy as np, onnxruntime, sentencepiece  # pip install onnxruntime sentencepiece

folder = {output!r}
{tokenizers}
encoder = onnxruntime.InferenceSession(f"{{folder}}/{encoder}")
decoder = onnxruntime.InferenceSession(f"{{folder}}/{decoder}")

source = np.array([pieces.encode("A sentence.") + [{eos}]])  # with its EOS
lengths = np.array([source.shape[1]])  # what lies behind them is padding
memory_keys, memory_values = encoder.run(None, {{"source": source, "source_lengths": lengths}})

keys = np.zeros(({n_layers}, 1, {n_heads}, 0, {d_k}), np.float32)
values = np.zeros(({n_layers}, 1, {n_heads}, 0, {d_v}), np.float32)
tokens = [{bos}]
while tokens[-1] != {eos} and len(tokens) < source.shape[1] + 50:
    logits, keys, values = decoder.run(None, {{
        "tokens": np.array(tokens[-1:]), "past_keys": keys, "past_values": values,
        "memory_keys": memory_keys, "memory_values": memory_values, "source_lengths": lengths,
    }})
    logits[:, [{pad}, {bos}]] = -np.inf  # never written
    tokens.append(int(logits[0].argmax()))
print({target}.decode([token for token in tokens if token not in ({bos}, {eos})]))
```

A search takes the rows of `past_keys` and `past_values` that it goes on with, along their second axis. There are
{positions} positions.
"""


# ---- the graphs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cache(KeyValueCache):
    """Keys and values in a graph, where nothing is written in place: a cache that grows by what is written."""

    grown: list[KeyValueCache] = field(default_factory=list)  # what it is once it was written to

    @property
    def size(self) -> int:
        """There is always room for one more."""
        return self.keys.shape[2] + 1

    def write(self, new: KeyValues, slots: slice | Tensor) -> None:
        """Put `new` behind what there is."""
        keys = torch.cat((self.keys, new.keys.transpose(1, 2)), 2)
        values = torch.cat((self.values, new.values.transpose(1, 2)), 2)
        self.grown.append(KeyValueCache(keys, values))

    def read(self, end: int) -> KeyValues:
        """All of it: `end` is where it ends."""
        held = self.grown[-1] if self.grown else self
        return KeyValues(held.keys.transpose(1, 2), held.values.transpose(1, 2))


class _Encoder(nn.Module):
    """From a source to the keys and values that every layer of the decoder reads of it."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: Tensor, source_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Ids `(B, S)` and their lengths `(B,)` -> keys and values `(N, B, H, S, K)`."""
        layout = Padded(source_lengths, source.shape[1], full=False)
        memory = self.model.encode(source, layout)  # (B, S, D)
        layers = cast(list[DecoderLayer], self.model.decoder)
        return _stack([layer.cross_attention.keys_values(memory) for layer in layers])


class _Decoder(nn.Module):
    """From one target token, with the keys and values of those before it, to the logits of the next."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        tokens: Tensor,
        past_keys: Tensor,
        past_values: Tensor,
        memory_keys: Tensor,
        memory_values: Tensor,
        source_lengths: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Ids `(R,)` -> logits `(R, V)`, and keys and values `(N, R, H, T + 1, K)`."""
        _, rows, _, n_before, _ = past_keys.shape
        past = _caches(past_keys, past_values)
        state = DecoderState(
            past=past,
            past_mask=torch.zeros(rows, 1, n_before + 1),  # each row is a sentence of one hypothesis
            memory_kv=_caches(memory_keys, memory_values),
            memory=Padded(source_lengths, memory_keys.shape[3], full=False),
            position=n_before,
        )
        logits, _ = self.model.decode_step(tokens, state)
        return logits, *_stack([cache.read(n_before + 1) for cache in past])


def _caches(keys: Tensor, values: Tensor) -> list[KeyValueCache]:
    """`(N, B, H, S, K)` each, layer by layer."""
    return [_Cache(*layer) for layer in zip(keys, values, strict=True)]


def _stack(layers: list[KeyValues]) -> tuple[Tensor, Tensor]:
    """Keys and values of all layers, with the positions of a head together: `(N, B, H, S, K)` each."""
    keys = torch.stack([kv.keys.transpose(1, 2) for kv in layers])
    values = torch.stack([kv.values.transpose(1, 2) for kv in layers])
    return keys, values


# ---- writing --------------------------------------------------------------------------------------------------------


def write(original: Original, folder: Path) -> None:
    """Write both graphs and the tokenizers."""
    model = original.translator.model
    config = model.config

    # The sizes that are free in the graphs, and where key and value tensors have them.
    sentences = torch.export.Dim("B")
    source_length = torch.export.Dim("S")
    hypotheses = torch.export.Dim("R")
    past_length = torch.export.Dim("T")
    past = {1: hypotheses, 3: past_length}
    memory = {1: hypotheses, 3: source_length}

    # Examples, for the other sizes. Free ones must be above 1: 0 and 1 would be taken for constants.
    ids = torch.full((2, 5), UNK)
    lengths = torch.tensor([5, 4])
    past_keys = torch.zeros(config.decoder_layers, 2, config.n_heads, 3, config.key_width)
    past_values = torch.zeros(config.decoder_layers, 2, config.n_heads, 3, config.value_width)
    memory_keys = torch.zeros(config.decoder_layers, 2, config.n_heads, 5, config.key_width)
    memory_values = torch.zeros(config.decoder_layers, 2, config.n_heads, 5, config.value_width)

    _export(
        _Encoder(model),
        (ids, lengths),
        folder / ENCODER,
        inputs={"source": {0: sentences, 1: source_length}, "source_lengths": {0: sentences}},
        outputs=["memory_keys", "memory_values"],
    )
    _export(
        _Decoder(model),
        (ids[:, 0], past_keys, past_values, memory_keys, memory_values, lengths),
        folder / DECODER,
        inputs={
            "tokens": {0: hypotheses},
            "past_keys": past,
            "past_values": past,
            "memory_keys": memory,
            "memory_values": memory,
            "source_lengths": {0: hypotheses},
        },
        outputs=["logits", "keys", "values"],
    )
    write_tokenizers(original, folder)


def _export(
    module: nn.Module, examples: tuple[Tensor, ...], path: Path, *, inputs: dict[str, Any], outputs: list[str]
) -> None:
    """Write a module as a graph; `inputs` has the free sizes of each input, by dimension."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of packages that no model of ours needs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns of its own calls of torch
        program = torch.onnx.export(
            module.eval(),
            examples,
            input_names=list(inputs),
            output_names=outputs,
            dynamic_shapes=tuple(inputs.values()),
            opset_version=_OPSET,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    program.save(path)


def readme(original: Original) -> str:
    """The README of the export: what goes in and out of the graphs, and how to load them."""
    config = original.translator.model.config
    return README.format(
        origin=original.origin,
        output=str(original.output),
        encoder=ENCODER,
        decoder=DECODER,
        tokenizers=readme_tokenizers(original),
        target=target_name(original),
        vocab_size=original.translator.model.vocab_size,
        n_layers=config.decoder_layers,
        n_heads=config.n_heads,
        d_k=config.key_width,
        d_v=config.value_width,
        positions=config.max_positions,
        pad=PAD,
        bos=BOS,
        eos=EOS,
    )


# ---- running --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _State:
    """The state of a search with the graphs; the second axis of its arrays is that of the hypotheses."""

    past: tuple[Array, Array]  # keys and values (N, R, H, T, K)
    memory: tuple[Array, Array]  # (N, R, H, S, K)
    lengths: Array  # (R,)

    def reorder(self, rows: Tensor) -> "_State":
        """The state of these hypotheses."""
        index = rows.numpy()
        keys, values = self.past
        memory_keys, memory_values = self.memory
        return _State(
            (keys[:, index], values[:, index]),
            (memory_keys[:, index], memory_values[:, index]),
            self.lengths[index],
        )


class OnnxPeer:
    """Exported graphs, run by onnxruntime, with our search."""

    arithmetic = "float32"

    def __init__(self, original: Original, folder: Path, threads: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        providers = ["CPUExecutionProvider"]
        self._encoder = onnxruntime.InferenceSession(folder / ENCODER, options, providers=providers)
        self._decoder = onnxruntime.InferenceSession(folder / DECODER, options, providers=providers)
        self._config = original.translator.model.config
        self.alpha = original.translator.search.length_penalty
        self._tokenizer = folder / TOKENIZER
        self.versions = {"onnxruntime": onnxruntime.__version__}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """As the SentencePiece model by itself cuts them."""
        pieces: list[list[int]] = SentencePieceProcessor(model_file=str(self._tokenizer)).encode(list(texts))
        return pieces

    def penalty(self, length: int) -> float:
        """The search is ours, and so is its penalty."""
        return length_penalty(self.alpha)(length)

    def forced(self, sources: Sequence[list[int]], targets: Sequence[list[int]]) -> list[Forced]:
        """Log-probabilities, one step after the other."""
        state = self._start(sources, beam_size=1)
        rows, _ = pad([[BOS, *ids] for ids in targets])  # (B, T)

        steps = []
        for tokens in rows.T:
            logits, state = self._step(tokens, state)
            steps.append(logits)
        all_logits = torch.stack(steps, 1).double()  # (B, T, V)
        return [replace(forced, logits=None) for forced in forced_by(all_logits, targets)]

    def translate(self, sources: Sequence[list[int]], *, beam_size: int, max_length: int) -> list[list[int]]:
        """By our own `beam_search`."""
        n_best = beam_search(
            self._step,
            self._start(sources, beam_size=beam_size),
            beam_size=beam_size,
            n_best=1,
            max_lengths=torch.full((len(sources),), max_length),
            penalty=self.penalty,
            bos=BOS,
            eos=EOS,
        )
        return [best.tokens for [best] in n_best]

    def _start(self, sources: Sequence[list[int]], *, beam_size: int) -> _State:
        """The state before the first target token, with a row for each hypothesis of each source."""
        rows, mask = pad([[*ids, EOS] for ids in sources])
        lengths = mask.sum(1).numpy()
        keys, values = self._encoder.run(None, {"source": rows.numpy(), "source_lengths": lengths})

        hypotheses = len(sources) * beam_size
        return _State(
            past=(
                self._no_past(hypotheses, self._config.key_width),
                self._no_past(hypotheses, self._config.value_width),
            ),
            memory=(keys.repeat(beam_size, 1), values.repeat(beam_size, 1)),
            lengths=lengths.repeat(beam_size),
        )

    def _no_past(self, hypotheses: int, width: int) -> Array:
        """The keys or values of no token, `(N, R, H, 0, width)`."""
        return np.zeros((self._config.decoder_layers, hypotheses, self._config.n_heads, 0, width), np.float32)

    def _step(self, tokens: Tensor, state: _State) -> tuple[Tensor, _State]:
        """The last token of each hypothesis `(R,)` -> logits of the next `(R, V)`, and the state after it."""
        inputs = {
            "tokens": tokens.numpy(),
            "past_keys": state.past[0],
            "past_values": state.past[1],
            "memory_keys": state.memory[0],
            "memory_values": state.memory[1],
            "source_lengths": state.lengths,
        }
        logits, keys, values = self._decoder.run(None, inputs)
        return torch.from_numpy(logits), replace(state, past=(keys, values))


FORMAT = ExportFormat(
    packages=("onnx", "onnxscript", "onnxruntime"),
    search=None,
    write=write,
    load=OnnxPeer,
    readme=readme,
)
