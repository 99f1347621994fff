"""Exports to Marian: its own files, which `marian-decoder`, `marian-scorer` and what is made of Marian read.

    model.npz      the weights, with the settings of the model in them: see `marian_graph`
    *.spm          the SentencePiece models, one or two
    decoder.yml    the settings of a search: `marian-decoder -c decoder.yml`

    write          the weights that `weights.fold` gives -> Marian's names, channels permuted, products transposed
    MarianPeer     the files -> the formulas of `marian_graph` in float64, with our search, for the check

No engine is needed, here or for the check; where Marian is installed, `marian_engine` asks it besides. Exports of all
shapes have been compared with Marian 1.12.42: tests/integrations/test_marian_engine.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sentencepiece import SentencePieceProcessor
from torch import Tensor

from transformer.data.tokenizer import Tokenizer
from transformer.decoding.search import beam_search
from transformer.decoding.translator import Translator
from transformer.integrations.engine.peer import Forced, forced_by, pad
from transformer.integrations.engine.weights import fold
from transformer.integrations.export.expressible import marian_heads
from transformer.integrations.export.formats import ExportFormat, Original
from transformer.integrations.export.marian_graph import MarianGraph, Memory, Past
from transformer.integrations.published.marian_form import (
    IDLE,
    MATRICES,
    OUTPUT_BIAS,
    SETTINGS,
    SHARED_MATRIX,
    SOURCE_MATRIX,
    TARGET_MATRIX,
    UNUSED,
    VERSION,
    order_of,
    place_in_marian,
    settings_as_array,
    settings_as_yaml,
)
from transformer.integrations.published.names import channels_of
from transformer.vocabulary import BOS, EOS, NO_PROBABILITY

Array = npt.NDArray[Any]

MODEL = "model.npz"
DECODER = "decoder.yml"
SHARED_SPM = "vocab.spm"
SPMS = ("source.spm", "target.spm")
BOUND = 1e-3  # what another number under the root of each norm may change in a log-probability
LENGTH_FACTOR = 5  # a translation has at most so many times the pieces of its source

README = """# A translation model for Marian

Exported from {origin}. `parity.json` says how closely Marian's formulas, computed in numpy, agree with that model, and
how closely Marian itself does, if it was installed.

```sh
marian-decoder -c {output}/{decoder} < in.txt > out.txt                 # --cpu-threads 4, or --devices 0
marian-scorer -m {output}/{model} -v {vocabs} -t in.txt out.txt
```

With `pip install pymarian==1.12.42` under Python 3.11, the first command is
`python -c "import _pymarian; _pymarian.main(['decode', '-c', '{output}/{decoder}'])"`.

- Marian divides a log-probability by length**normalize, the run by ((5 + length) / 6)**{alpha:g}. `{decoder}` sets
  normalize to {exponent:g}, which does much the same at usual lengths; a development set may show a better value.
- Marian ends a search when as many translations are finished as the beam is wide. It cuts a translation at {factor}
  times the pieces of its source (`max-length-factor`), the run at {extra} pieces more than its source has.
- Its norms add 1e-6 to a variance, the run's add 1e-5.
- Text of more than {positions} pieces is cut (`max-length-crop`).
"""


# ---- writing --------------------------------------------------------------------------------------------------------


def write(original: Original, folder: Path) -> None:
    """Write the model, its SentencePiece models and the settings of a search."""
    translator = original.translator
    arrays = {name: weight.numpy() for name, weight in weights_of(translator).items()}
    arrays[SETTINGS] = settings_as_array(model_settings(translator))
    np.savez(folder / MODEL, **arrays)  # type: ignore[arg-type]  # a keyword of numpy's own is no name of ours

    for name, tokenizer in zip(spm_names(original), translator.tokenizers.sides, strict=True):
        (folder / name).write_bytes(tokenizer.sentencepiece_model)
    (folder / DECODER).write_text(settings_as_yaml(_search_settings(original)), encoding="utf-8")


def spm_names(original: Original) -> tuple[str, str]:
    """The files of the source's and the target's SentencePiece model, which may be one."""
    return (SHARED_SPM, SHARED_SPM) if original.translator.tokenizers.is_shared else SPMS


def weights_of(translator: Translator) -> dict[str, Tensor]:
    """The weights under Marian's names, as Marian has them.

    Products are `x W + b`, the residual stream is in Marian's order, and so are the pieces: that of SentencePiece.
    """
    model = translator.model
    config = model.config
    channels = channels_of(config.d_model)
    source, target = (torch.tensor(order_in_marian(tokenizer)) for tokenizer in translator.tokenizers.sides)
    found = {}
    for name, weight in fold(model, marian_heads(config)).items():
        if name == "output_bias":
            found[OUTPUT_BIAS] = weight[target].unsqueeze(0)
            continue
        if name == "embedding":
            found[SHARED_MATRIX if isinstance(model.vocab_sizes, int) else TARGET_MATRIX] = weight[target][:, channels]
            continue
        if name in MATRICES:
            order = source if MATRICES[name] == SOURCE_MATRIX else target
            found[MATRICES[name]] = weight[order][:, channels]
            continue

        place = place_in_marian(name, config.norm)
        permuted = place.permuted(weight, channels)
        found[place.name] = permuted.T if permuted.ndim == 2 else permuted.unsqueeze(0)

        # Marian's projections have biases, whether ours have them or not.
        if ".W_" in name and "attention" in name and not config.biases:
            bias = place_in_marian(name.removesuffix("weight") + "bias", config.norm)
            found[bias.name] = weight.new_zeros(1, permuted.shape[0])
    return {name: weight.contiguous() for name, weight in found.items()}


def order_in_marian(tokenizer: Tokenizer) -> list[int]:
    """Which of our ids each of Marian's is; `check_pieces` has refused a tokenizer that Marian cannot have."""
    order = order_of(tokenizer)
    assert order is not None
    return order


def model_settings(translator: Translator) -> dict[str, object]:
    """What Marian has to know of the model. It refuses a file that lacks one which it reads."""
    model = translator.model
    config = model.config
    has_one_vocabulary = isinstance(model.vocab_sizes, int)
    return {
        "type": "transformer",
        "version": VERSION,
        "dim-vocabs": [len(order_in_marian(tokenizer)) for tokenizer in translator.tokenizers.sides],
        "dim-emb": config.d_model,
        "enc-depth": config.n_layers,
        "dec-depth": config.decoder_layers,
        "transformer-heads": marian_heads(config).count,
        "transformer-dim-ffn": config.d_ff,
        "transformer-ffn-activation": config.activation.name,
        "transformer-preprocess": "",
        "transformer-postprocess": "dan",
        "transformer-postprocess-emb": "d",
        "transformer-postprocess-top": "",
        "tied-embeddings": config.tie_embeddings and not has_one_vocabulary,
        "tied-embeddings-all": config.tie_embeddings and has_one_vocabulary,
        "tied-embeddings-src": False,
        **UNUSED,
        **IDLE,
    }


def _search_settings(original: Original) -> dict[str, object]:
    """What `marian-decoder` reads: the search of the run, as far as Marian has it."""
    search = original.translator.search
    return {
        "relative-paths": True,
        "models": [MODEL],
        "vocabs": list(spm_names(original)),
        "beam-size": search.beam_size,
        "normalize": original.exponent,
        "word-penalty": 0,
        "allow-unk": True,  # as in the run
        "max-length": original.translator.model.config.max_positions - 1,
        "max-length-crop": True,
        "max-length-factor": LENGTH_FACTOR,
        "mini-batch": 32,
        "maxi-batch": 100,
        "maxi-batch-sort": "src",
    }


def readme(original: Original) -> str:
    """The README of the export: how to run the model."""
    search = original.translator.search
    return README.format(
        origin=original.origin,
        output=str(original.output),
        model=MODEL,
        decoder=DECODER,
        vocabs=" ".join(f"{original.output}/{name}" for name in spm_names(original)),
        exponent=original.exponent,
        alpha=search.length_penalty,
        factor=LENGTH_FACTOR,
        extra=search.max_extra,
        positions=original.translator.model.config.max_positions - 1,
    )


# ---- running --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _State:
    """The state of a search: a row for each hypothesis."""

    past: Past
    memory: Memory

    def reorder(self, rows: Tensor) -> "_State":
        """The state of these hypotheses."""
        index = rows.numpy()
        return _State(self.past.select(index), self.memory.select(index))


@dataclass(frozen=True)
class Ids:
    """Our ids and Marian's, of one language."""

    ours: Array  # of each of Marian's
    theirs: Array  # of each of ours; what Marian has not is never asked for

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Ids":
        """Those of a tokenizer that Marian can have."""
        ours = np.array(order_in_marian(tokenizer))
        theirs = np.full(tokenizer.vocab_size, -1)
        theirs[ours] = np.arange(len(ours))
        return cls(ours, theirs)

    def cut(self, texts: Sequence[str], spm: Path) -> list[list[int]]:
        """Our ids of texts as the SentencePiece model by itself cuts them."""
        pieces: list[list[int]] = SentencePieceProcessor(model_file=str(spm)).encode(list(texts))
        return [self.ours[ids].tolist() if ids else [] for ids in pieces]

    def previous(self, tokens: Tensor) -> Array:
        """Decoder inputs as Marian has them: where ours begin with BOS, there is nothing before."""
        return np.where(tokens.numpy() == BOS, -1, self.theirs[tokens.numpy()])

    def logits(self, theirs: Array) -> Tensor:
        """Marian's logits `(..., V)` in the order of our ids."""
        ours = np.full((*theirs.shape[:-1], len(self.theirs)), NO_PROBABILITY)
        ours[..., self.ours] = theirs[..., : len(self.ours)]  # behind these, what fills a block
        return torch.from_numpy(ours)


class MarianPeer:
    """An exported model, read back from its files, with our search."""

    arithmetic = "float64"

    def __init__(self, graph: MarianGraph, original: Original, spm: Path) -> None:
        self._graph = graph
        self._spm = spm
        self._source, self._target = (Ids.of(tokenizer) for tokenizer in original.translator.tokenizers.sides)
        self.alpha = original.exponent
        self.versions = {"numpy": np.__version__}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """As the SentencePiece model by itself cuts them."""
        return self._source.cut(texts, self._spm)

    def penalty(self, length: int) -> float:
        """A power of the length."""
        return float(length**self.alpha)

    def forced(self, sources: Sequence[list[int]], targets: Sequence[list[int]]) -> list[Forced]:
        """Logits and log-probabilities."""
        rows, _ = pad([[BOS, *ids] for ids in targets])
        logits, _ = self._graph.decode(self._target.previous(rows), Past(), self._encode(sources))
        return forced_by(self._target.logits(logits), targets)  # (B, T, V)

    def translate(self, sources: Sequence[list[int]], *, beam_size: int, max_length: int) -> list[list[int]]:
        """By our own `beam_search`."""
        memory = self._encode(sources).select(np.arange(len(sources)).repeat(beam_size))
        n_best = beam_search(
            self._step,
            _State(Past(), memory),
            beam_size=beam_size,
            n_best=1,
            max_lengths=torch.full((len(sources),), max_length),
            penalty=self.penalty,
            bos=BOS,
            eos=EOS,
        )
        return [best.tokens for [best] in n_best]

    def _encode(self, sources: Sequence[list[int]]) -> Memory:
        rows, mask = pad([[*ids, EOS] for ids in sources])
        return self._graph.encode(self._source.theirs[rows.numpy()], mask.sum(1).numpy())

    def _step(self, tokens: Tensor, state: _State) -> tuple[Tensor, _State]:
        """The last token of each hypothesis `(R,)` -> logits of the next `(R, V)`, and the state after it."""
        logits, past = self._graph.decode(self._target.previous(tokens.unsqueeze(1)), state.past, state.memory)
        return self._target.logits(logits[:, 0]), _State(past, state.memory)


def load(original: Original, folder: Path, threads: int) -> MarianPeer:
    """The peer of an export."""
    return MarianPeer(MarianGraph.read(folder / MODEL), original, folder / spm_names(original)[0])


FORMAT = ExportFormat(packages=(), search=None, bound=lambda _: BOUND, write=write, load=load, readme=readme)
