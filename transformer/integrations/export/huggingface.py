"""Exports to Hugging Face's MarianMTModel: the same model in `transformers`, to share, to fine-tune, and to generate.

    write        the weights that `weights.fold` gives -> renamed, channels permuted -> transformers' files
    MarianPeer   the files -> transformers' own search, for the check

Checked against transformers 5.23. MarianMTModel computes its table of positions when it is loaded, with all sines
before all cosines, where ours alternate: `published.names` permutes the channels, and has the names.
"""

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from transformer.config.settings import ModelConfig
from transformer.data.tokenizer import Tokenizer
from transformer.files import encode_json
from transformer.integrations.engine.peer import Forced, forced_by, pad, without_end
from transformer.integrations.engine.weights import fold, is_rounded
from transformer.integrations.export.expressible import marian_heads
from transformer.integrations.export.formats import ExportFormat, Original
from transformer.integrations.published.names import channels_of, name_in_marian
from transformer.model.transformer import Transformer
from transformer.numerics import FLOAT32_BOUND, FLOAT64_BOUND
from transformer.vocabulary import BOS, EOS, PAD, VocabSizes

_MATRICES = {
    "embedding": "model.shared.weight",
    "source_embedding.matrix": "model.encoder.embed_tokens.weight",
    "target_embedding.matrix": "model.decoder.embed_tokens.weight",
    "output": "lm_head.weight",
}

_LONGEST = 512  # tokens that generate() makes at most unless it is told otherwise, where there are as many positions

README = """# A translation model for Hugging Face's transformers

Exported from {origin}. `parity.json` says how exactly it computes what that model computes.

```python
from transformers import MarianMTModel, MarianTokenizer  # pip install torch transformers sentencepiece sacremoses

folder = {output!r}
tokenizer = MarianTokenizer.from_pretrained(folder)
model = MarianMTModel.from_pretrained(folder)

batch = tokenizer(["A sentence.", "And another one."], return_tensors="pt", padding=True)
print(tokenizer.batch_decode(model.generate(**batch), skip_special_tokens=True))
```

- transformers 5 has no `pipeline("translation")`: use `generate`, as above.
- With a beam, `generate` divides a log-probability by length**{exponent:g}, and the run by
  ((5 + length) / 6)**{alpha:g}. At usual lengths they do much the same; a development set may have a better exponent.
  It is in `generation_config.json`, unless the run's search is greedy.
  `early_stopping="never"` ends a search as the run does.
- MarianTokenizer takes a literal `</s>`, `<unk>` or `<pad>` in a text for the token of that name.
"""


# ---- writing --------------------------------------------------------------------------------------------------------


def write(original: Original, folder: Path) -> None:
    """Write the model, its tokenizer and its settings for generation."""
    from transformers import GenerationConfig, MarianConfig, MarianMTModel
    from transformers.utils import logging

    logging.disable_progress_bar()  # for files that take a second
    translator = original.translator
    config = translator.model.config
    heads = marian_heads(config)
    has_one_vocabulary = translator.tokenizers.has_one_vocabulary

    # An equal model of theirs, with random weights.
    model = MarianMTModel(
        MarianConfig(
            vocab_size=translator.model.source_vocab_size,
            decoder_vocab_size=translator.model.vocab_size,
            max_position_embeddings=config.max_positions,
            encoder_layers=config.n_layers,
            decoder_layers=config.decoder_layers,
            encoder_attention_heads=heads.count,
            decoder_attention_heads=heads.count,
            encoder_ffn_dim=config.d_ff,
            decoder_ffn_dim=config.d_ff,
            d_model=config.d_model,
            dropout=config.dropout,
            attention_dropout=config.attention_dropout,
            activation_dropout=config.relu_dropout,
            activation_function=config.activation.name,
            scale_embedding=True,
            share_encoder_decoder_embeddings=config.tie_embeddings and has_one_vocabulary,
            tie_word_embeddings=config.tie_embeddings,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
            decoder_start_token_id=BOS,
            forced_eos_token_id=None,
        )
    )
    model.generation_config = GenerationConfig(
        num_beams=translator.search.beam_size,
        length_penalty=original.exponent if translator.search.beam_size > 1 else 1.0,  # greedy search takes no other
        max_length=min(_LONGEST, config.max_positions),
        bad_words_ids=[[PAD], [BOS]],
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        decoder_start_token_id=BOS,
    )

    # Our weights. What is missing is computed by MarianMTModel, or tied.
    missing, unexpected = model.load_state_dict(_state(translator.model), strict=False)
    computed = ("embed_positions.weight", "embed_tokens.weight", "lm_head.weight", "final_logits_bias")
    assert not unexpected, unexpected
    assert all(name.endswith(computed) for name in missing), missing

    model.save_pretrained(folder)
    _write_tokenizer(original, folder)


def _write_tokenizer(original: Original, folder: Path) -> None:
    """The SentencePiece models, which may be the same, and the pieces in the order of their ids."""
    from transformers import MarianTokenizer

    source = folder / "source.spm"
    target = folder / "target.spm"
    tokenizers = original.translator.tokenizers
    source.write_bytes(tokenizers.source.sentencepiece_model)
    target.write_bytes(tokenizers.target.sentencepiece_model)

    vocabulary = folder / "vocab.json"
    vocabulary.write_bytes(encode_json(_ids(tokenizers.source)))
    target_vocabulary = None
    if not tokenizers.has_one_vocabulary:
        target_vocabulary = folder / "target_vocab.json"
        target_vocabulary.write_bytes(encode_json(_ids(tokenizers.target)))

    exported = MarianTokenizer(
        source_spm=str(source),
        target_spm=str(target),
        vocab=str(vocabulary),
        target_vocab_file=None if target_vocabulary is None else str(target_vocabulary),
        separate_vocabs=target_vocabulary is not None,
        source_lang=original.src_lang,
        target_lang=original.tgt_lang,
        model_max_length=original.translator.model.config.max_positions,
    )
    exported.save_pretrained(folder)


def _ids(tokenizer: Tokenizer) -> dict[str, int]:
    return {piece: index for index, piece in enumerate(tokenizer.pieces())}


def _state(model: Transformer) -> dict[str, Tensor]:
    """The weights under Marian's names, with the residual stream in Marian's order."""
    channels = channels_of(model.config.d_model)
    matrices = dict(_MATRICES)
    if isinstance(model.vocab_sizes, VocabSizes):
        matrices["embedding"] = matrices["target_embedding.matrix"]  # which the output shares

    state = {}
    for name, weight in fold(model, marian_heads(model.config)).items():
        if name == "output_bias":
            state["final_logits_bias"] = weight.unsqueeze(0)
            continue
        if name in matrices:
            state[matrices[name]] = weight[:, channels]
            continue

        place = name_in_marian(name)
        state[place.name] = place.permuted(weight, channels)

        # Marian's projections have biases, whether ours have them or not.
        if place.name.endswith("_proj.weight") and not model.config.biases:
            state[place.name.removesuffix("weight") + "bias"] = weight.new_zeros(len(weight))
    return state


def readme(original: Original) -> str:
    """The README of the export: how to load the model."""
    return README.format(
        origin=original.origin,
        output=str(original.output),
        exponent=original.exponent,
        alpha=original.translator.search.length_penalty,
    )


def bound(config: ModelConfig) -> float:
    """The bound of float64, or of float32 where folding has rounded W_q."""
    return FLOAT32_BOUND if is_rounded(config, marian_heads(config)) else FLOAT64_BOUND


# ---- running --------------------------------------------------------------------------------------------------------


class HuggingFacePeer:
    """An exported model, run by transformers: its search in float32, the predictions for given targets in float64."""

    arithmetic = "float32, log-probabilities and logits in float64"

    def __init__(self, original: Original, folder: Path, threads: int) -> None:
        import transformers

        self._model = transformers.MarianMTModel.from_pretrained(folder).eval()
        self._exact = copy.deepcopy(self._model).double()
        self._tokenizer = transformers.MarianTokenizer.from_pretrained(folder)
        self.alpha = original.exponent
        self.versions = {"transformers": transformers.__version__}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """As MarianTokenizer cuts them."""
        pieces: list[list[int]] = self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return pieces

    def penalty(self, length: int) -> float:
        """A power of the length."""
        return float(length**self.alpha)

    def forced(self, sources: Sequence[list[int]], targets: Sequence[list[int]]) -> list[Forced]:
        """Logits and log-probabilities in float64."""
        rows, mask = pad([[*ids, EOS] for ids in sources])
        target_rows, _ = pad([[BOS, *ids] for ids in targets])
        with torch.no_grad():
            output = self._exact(input_ids=rows, attention_mask=mask, decoder_input_ids=target_rows)
        return forced_by(output.logits, targets)  # (B, T, V)

    def translate(self, sources: Sequence[list[int]], *, beam_size: int, max_length: int) -> list[list[int]]:
        """By `generate`, whose `early_stopping="never"` is our rule for the end of a search."""
        rows, mask = pad([[*ids, EOS] for ids in sources])
        generated = self._model.generate(
            input_ids=rows,
            attention_mask=mask,
            num_beams=beam_size,
            length_penalty=self.alpha if beam_size > 1 else 1.0,  # greedy search warns of any other
            early_stopping="never" if beam_size > 1 else False,
            max_length=1 + max_length,  # with the token that it starts from
        )
        return [without_end(row[1:]) for row in generated.tolist()]


FORMAT = ExportFormat(
    packages=("transformers", "sacremoses"), search=None, bound=bound, write=write, load=HuggingFacePeer, readme=readme
)
