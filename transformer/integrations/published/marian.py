"""A folder of Hugging Face's MarianMTModel, such as one of OPUS-MT, read as a model of ours.

    config.json, generation_config.json   -> ModelConfig, SearchConfig
    vocab.json, source.spm, target.spm    -> Tokenizers; which row of theirs each id of ours has
    model.safetensors                     -> weights under our names, rows by our ids, channels in our order

Nothing is executed, and no code of `transformers` is used. Settings that our model does not support are refused.

Marian's decoder starts from a row of zeros, which `transformers` keeps as that of padding, and never generates. Here it
is the frozen row of BOS (`model.start=zeros`), and PAD has another; neither has a probability. So probabilities are
those of Marian, and of `transformers` once padding is taken out. Where `transformers` has trained the row of padding,
it is that of a BOS which is learned here, too, and again without a probability at first.
"""

import logging
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from sentencepiece import SentencePieceProcessor
from torch import Tensor

from transformer.checkpoint import check_weights
from transformer.config.settings import MOST_BEAM, MOST_PENALTY, Activation, ModelConfig, SearchConfig, Start
from transformer.data.piece_list import join_piece_list
from transformer.data.tokenizer import Tokenizer, Tokenizers, read_model
from transformer.errors import InputError
from transformer.files import open_regular, read_json
from transformer.integrations.published.names import MarianName, channels_of, name_in_marian, original_channels
from transformer.model.layers import sinusoids
from transformer.model.transformer import Transformer
from transformer.vocabulary import BOS, EOS, NEVER, NO_PROBABILITY, PAD, UNK

CONFIG = "config.json"
GENERATION = "generation_config.json"
FINAL_BIAS = "final_logits_bias"
TOKENIZER_CONFIG = "tokenizer_config.json"
VOCABULARY = "vocab.json"
TARGET_VOCABULARY = "target_vocab.json"
SOURCE_SPM = "source.spm"
TARGET_SPM = "target.spm"
WEIGHTS = "model.safetensors"
PICKLE = "pytorch_model.bin"
FILES = (
    *(CONFIG, GENERATION, TOKENIZER_CONFIG, VOCABULARY, TARGET_VOCABULARY, SOURCE_SPM, TARGET_SPM),
    *(WEIGHTS, PICKLE),
)

log = logging.getLogger(__name__)

USUAL_LENGTH = 25.0  # tokens of a translation, at which their length penalty and ours grow alike

# Settings of `generate` that change translations and that no search here has; each with what changes nothing.
UNDONE: dict[str, object] = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "diversity_penalty": 0.0,
    "do_sample": False,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "forced_bos_token_id": None,
    "forced_decoder_ids": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "repetition_penalty": 1.0,
    "sequence_bias": None,
    "suppress_tokens": None,
}

ACTIVATIONS = {
    "relu": Activation.relu,
    "gelu": Activation.gelu,
    "swish": Activation.swish,
    "silu": Activation.swish,
}


@dataclass(frozen=True)
class Published:
    """A published model in our terms."""

    model: ModelConfig
    search: SearchConfig
    tokenizers: Tokenizers
    weights: dict[str, Tensor]  # under the names of a checkpoint
    src_lang: str | None  # as the tokenizer's settings have them
    tgt_lang: str | None


def is_marian(folder: Path) -> bool:
    """Whether a folder says of itself that a Marian model is in it."""
    try:
        settings = read_json(_followed(folder / CONFIG))
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and settings.get("model_type") == "marian"


def read_marian(folder: Path) -> Published:
    """The model in a folder that `save_pretrained` wrote.

    Raises InputError, naming the file and what is wrong with it: where one is missing or damaged, where they do not
    belong together, and for a model that cannot be expressed here.
    """
    settings = _Settings.read(folder / CONFIG)
    _check_kind(settings)
    path = folder / TOKENIZER_CONFIG
    of_tokenizer = _Settings.read(path) if os.path.lexists(path) else _Settings(path, {})
    vocabularies = _read_vocabularies(folder, settings, is_separate=of_tokenizer.flag("separate_vocabs", default=False))
    tokenizers = _tokenizers(folder, vocabularies)
    stored = _Stored.read(folder)

    embeddings = _Embeddings.of(settings, stored, has_one_vocabulary=tokenizers.has_one_vocabulary)
    start = _start(vocabularies.target, embeddings, stored)
    is_frozen = start is Start.zeros
    has_classes_to_mask = vocabularies.target.starts_from_padding and not is_frozen
    has_biases = has_classes_to_mask or stored.has_biases(but_for=vocabularies.target.never if is_frozen else [])
    model = _model_config(settings, biases=has_biases, is_tied=embeddings.is_tied, start=start)
    weights = _Converter(folder, model, vocabularies, embeddings, stored).weights(tokenizers)
    return Published(
        model=model,
        search=_search_config(folder, settings),
        tokenizers=tokenizers,
        weights=weights,
        src_lang=of_tokenizer.text_or_none("source_lang"),
        tgt_lang=of_tokenizer.text_or_none("target_lang"),
    )


# ---- settings -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Settings:
    """A JSON object of settings, and the file that it is from."""

    path: Path
    values: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> "_Settings":
        return cls(path, _read_object(path))

    def number(self, key: str, *, default: int) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, list) and len(value) == 1:  # of ids, of which there may be several
            (value,) = value
        if type(value) is not int or not 0 <= value < 2**31:
            raise self.refused(key, "not a whole number below 2^31")
        return value

    def real(self, key: str, *, default: float) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        if type(value) not in (int, float) or not abs(value) < 2**1023:  # an integer may be beyond any float
            raise self.refused(key, "not a finite number")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.refused(key, "neither true nor false")
        return value

    def text_or_none(self, key: str) -> str | None:
        value = self.values.get(key)
        return value if isinstance(value, str) and value else None

    def refused(self, key: str, why: str) -> InputError:
        return InputError(f"{self.path}: {key}={self.values.get(key)!r:.80}: {why}")


def _followed(path: Path) -> Path:
    """The file that a link leads to, as in the cache of the hub's client; one that leads nowhere leads to itself."""
    return Path(os.path.realpath(path))


def _read_object(path: Path) -> dict[str, Any]:
    try:
        values = read_json(_followed(path))
    except FileNotFoundError as error:
        raise InputError(f"{path}: missing: MarianMTModel.save_pretrained writes it") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise InputError(f"{path}: not a JSON object")
    return values


def _check_kind(settings: _Settings) -> None:
    """Raise InputError for another architecture than MarianMTModel's, and for what it does that ours does not."""
    kind = settings.text_or_none("model_type")
    if kind != "marian":
        raise settings.refused("model_type", "not marian: only published models of MarianMTModel can be imported")
    architectures = settings.values.get("architectures") or ["MarianMTModel"]
    if architectures != ["MarianMTModel"]:
        raise settings.refused("architectures", "not MarianMTModel, which has encoder and decoder")
    if not settings.flag("scale_embedding", default=False):
        raise settings.refused(
            "scale_embedding", "embeddings here are always multiplied by the root of d_model, as in OPUS-MT"
        )
    for key in ("normalize_before", "normalize_embedding", "add_final_layer_norm"):
        if settings.values.get(key):
            raise settings.refused(key, "today's MarianMTModel has no such norm")
    for one, other in (
        ("encoder_attention_heads", "decoder_attention_heads"),
        ("encoder_ffn_dim", "decoder_ffn_dim"),
    ):
        if settings.values.get(one) != settings.values.get(other):
            raise settings.refused(
                one, f"differs from {other}={settings.values.get(other)}: here they must be the same"
            )


def _model_config(settings: _Settings, *, biases: bool, is_tied: bool, start: Start) -> ModelConfig:
    name = settings.text_or_none("activation_function") or "gelu"
    if name not in ACTIVATIONS:
        raise settings.refused("activation_function", f"not one of {', '.join(ACTIVATIONS)}")
    encoder_layers = settings.number("encoder_layers", default=12)
    decoder_layers = settings.number("decoder_layers", default=12)
    try:
        return ModelConfig(
            n_layers=encoder_layers,
            n_decoder_layers=None if decoder_layers == encoder_layers else decoder_layers,
            d_model=settings.number("d_model", default=1024),
            d_ff=settings.number("encoder_ffn_dim", default=4096),
            n_heads=settings.number("encoder_attention_heads", default=16),
            activation=ACTIVATIONS[name],
            biases=biases,
            dropout=settings.real("dropout", default=0.1),
            attention_dropout=settings.real("attention_dropout", default=0.0),
            relu_dropout=settings.real("activation_dropout", default=0.0),
            max_positions=settings.number("max_position_embeddings", default=1024),
            start=start,
            tie_embeddings=is_tied,
        )
    except ValueError as error:
        raise InputError(f"{settings.path}: {error}") from error


def _search_config(folder: Path, settings: _Settings) -> SearchConfig:
    """Their beam, and the alpha that grows at usual lengths as their power of the length does."""
    path = folder / GENERATION
    of_search = _Settings.read(path) if os.path.lexists(path) else settings
    beam_size = max(1, min(MOST_BEAM, of_search.number("num_beams", default=1)))
    _name_undone(of_search, banned=(settings.values.get("pad_token_id"), settings.values.get("decoder_start_token_id")))
    exponent = of_search.real("length_penalty", default=1.0)
    alpha = round(exponent * (5.0 + USUAL_LENGTH) / USUAL_LENGTH, 2)
    return SearchConfig(beam_size=beam_size, length_penalty=max(0.0, min(MOST_PENALTY, alpha)))


def _name_undone(of_search: _Settings, *, banned: Collection[object]) -> None:
    """Log the settings of `generate` that change translations and are not done here; `banned` pieces never come."""
    found = {key: of_search.values.get(key) for key in UNDONE}
    words = found["bad_words_ids"]
    if isinstance(words, list):
        found["bad_words_ids"] = [word for word in words if word not in [[index] for index in banned]]
    if named := [key for key, value in sorted(found.items()) if value and value != UNDONE[key]]:
        log.warning(
            "%s: these settings are not supported here, so translations may differ: %s",
            of_search.path,
            ", ".join(named),
        )


# ---- vocabularies ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Vocabulary:
    """Pieces in the order of our ids, and the row of theirs that each has."""

    pieces: list[str]
    rows: list[int | None]

    def gather(self, matrix: Tensor) -> Tensor:
        """Theirs `(their V, ...)` in the order of our ids, `(V, ...)`, with zeros where they have none."""
        index = torch.tensor([0 if row is None else row for row in self.rows])
        gathered = matrix[index]
        gathered[torch.tensor([row is None for row in self.rows])] = 0.0
        return gathered

    @property
    def never(self) -> list[int]:
        """Their rows of padding and of the start, which may be one."""
        return [row for row in (self.rows[index] for index in NEVER) if row is not None]

    @property
    def starts_from_padding(self) -> bool:
        """Whether there is no class for padding, nor for the start."""
        return self.rows[PAD] is None


@dataclass(frozen=True)
class _Vocabularies:
    """That of the source and that of the target, which may be the same."""

    source: Vocabulary
    target: Vocabulary


def _read_vocabularies(folder: Path, settings: _Settings, *, is_separate: bool) -> _Vocabularies:
    start = settings.number("decoder_start_token_id", default=58_100)
    eos = settings.number("eos_token_id", default=0)
    size = settings.number("vocab_size", default=58_101)
    target_size = settings.number("decoder_vocab_size", default=size)
    if not is_separate:
        path = folder / VOCABULARY
        if target_size != size:
            raise settings.refused(
                "decoder_vocab_size", f"not vocab_size={size}, and there is one {VOCABULARY} for both"
            )
        one = _order(_read_ids(path, size), path, start=start, eos=eos)
        return _Vocabularies(one, one)

    path = folder / TARGET_VOCABULARY
    target = _order(_read_ids(path, target_size), path, start=start, eos=eos)
    path = folder / VOCABULARY
    return _Vocabularies(_order(_read_ids(path, size), path, start=None, eos=None), target)


def _read_ids(path: Path, size: int) -> dict[str, int]:
    """A list of ids by piece: each of 0 to size - 1 once. Raises InputError."""
    ids = _read_object(path)
    if not all(type(index) is int for index in ids.values()) or sorted(ids.values()) != list(range(len(ids))):
        raise InputError(f"{path}: its ids are not the numbers from 0 on, each once")
    if len(ids) != size:
        raise InputError(f"{path}: it has {len(ids)} pieces, but {CONFIG} asks for {size}")
    for piece in ("</s>", "<unk>"):
        if piece not in ids:
            raise InputError(f"{path}: it has no {piece}")
    if any("\ud800" <= character <= "\udfff" for piece in ids for character in piece):
        raise InputError(f"{path}: a piece of it is not UTF-8")
    return ids


def _order(ids: Mapping[str, int], path: Path, *, start: int | None, eos: int | None) -> Vocabulary:
    """The pieces in the order of our ids: padding, unknown, the decoder's start, the end, and the others in theirs.

    `start` and `eos` are those of a target; a source has no start.
    """
    padding = ids.get("<pad>")
    begin = start if start is not None else ids.get("<s>")
    if begin == padding:
        padding = None
    special = [padding, ids["<unk>"], begin, ids["</s>"]]
    if eos is not None and ids["</s>"] != eos:
        raise InputError(f"{path}: </s> is {ids['</s>']}, but eos_token_id of {CONFIG} is {eos}")
    known = [row for row in special if row is not None]
    if len(set(known)) < len(known) or any(row >= len(ids) for row in known):
        raise InputError(f"{path}: decoder_start_token_id={start} of {CONFIG} is not a piece of its own here")

    return ordered(ids, special=special)


def ordered(ids: Mapping[str, int], *, special: Sequence[int | None]) -> Vocabulary:
    """The pieces in the order of our ids: first those of padding, unknown text, start and end, if there are such."""
    # The names of the first four: theirs, but where the start is called padding, or there is none.
    known = [row for row in special if row is not None]
    begin = special[BOS]
    by_row = {row: piece for piece, row in ids.items()}
    others = [row for row in range(len(ids)) if row not in known]
    taken = {by_row[row] for row in others} | {"<unk>", "</s>"}
    names = {PAD: "<pad>", UNK: "<unk>", BOS: "<s>", EOS: "</s>"}
    if begin is not None and by_row[begin] != "<pad>":
        names[BOS] = by_row[begin]
    for index in (PAD, BOS):
        while names[index] in taken:
            names[index] = f"<{names[index]}>"
        taken.add(names[index])
    return Vocabulary(
        [names[PAD], names[UNK], names[BOS], names[EOS], *map(by_row.__getitem__, others)], [*special, *others]
    )


def _tokenizers(folder: Path, vocabularies: _Vocabularies) -> Tokenizers:
    """The two SentencePiece models under the ids of the vocabularies; one, where they are the same."""
    source, target = (
        tokenizer_of(folder / name, read_model(_followed(folder / name)), vocabulary)
        for name, vocabulary in ((SOURCE_SPM, vocabularies.source), (TARGET_SPM, vocabularies.target))
    )
    return Tokenizers(source, source if source.model == target.model else target)


def tokenizer_of(path: Path, model: bytes, vocabulary: Vocabulary) -> Tokenizer:
    """A SentencePiece model under the ids of a vocabulary, which may be its own."""
    is_own = _own_pieces(model) == vocabulary.pieces
    return Tokenizer(model if is_own else join_piece_list(model, vocabulary.pieces), str(path))


def _own_pieces(model: bytes) -> list[str]:
    """The pieces of a SentencePiece model in the order of its own ids; none unless its first four are ours."""
    try:
        processor = SentencePieceProcessor(model_proto=model)
        ids = (processor.pad_id(), processor.unk_id(), processor.bos_id(), processor.eos_id())
        return [processor.id_to_piece(index) for index in range(len(processor))] if ids == (PAD, UNK, BOS, EOS) else []
    except (RuntimeError, ValueError, IndexError):
        return []  # whoever opens it says what is wrong


# ---- weights --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stored:
    """The tensors of a folder by their names, and the file that they are from."""

    path: Path
    tensors: Mapping[str, Tensor]

    @classmethod
    def read(cls, folder: Path) -> "_Stored":
        """Those of model.safetensors, else of a pickle that torch's weights-only loader reads. Raises InputError."""
        path = folder / WEIGHTS
        if os.path.lexists(path):
            try:
                with open_regular(_followed(path)) as file:
                    tensors = safetensors.torch.load(file.read())
            except OSError as error:
                raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
            except Exception as error:  # a hostile header fails in as many ways as safetensors and torch have
                raise InputError(f"{path}: not a safetensors file: {error}") from error
        else:
            path = folder / PICKLE
            if not os.path.lexists(path):
                raise InputError(
                    f"{folder}: neither {WEIGHTS} nor {PICKLE}: save the model whole, by transformers' save_pretrained"
                )
            tensors = _read_pickle(path)
        try:
            check_weights(
                {name: tensor for name, tensor in tensors.items() if not name.endswith("embed_positions.weight")}
            )
        except ValueError as error:
            raise InputError(f"{path}: {error}") from None
        return cls(path, tensors)

    def matrix(self, *names: str) -> Tensor:
        """The first of these that is there. Raises InputError where none is."""
        for name in names:
            if name in self.tensors:
                return self.tensors[name]
        raise InputError(f"{self.path}: {names[0]} is missing")

    def has_biases(self, *, but_for: Sequence[int]) -> bool:
        """Whether a projection of attention, or the output, but for these classes, has a bias that is not zero."""
        biases = [tensor for name, tensor in self.tensors.items() if name.endswith("_proj.bias")]
        if FINAL_BIAS in self.tensors:
            of_output = self.tensors[FINAL_BIAS].flatten()
            places = [row for row in but_for if row < len(of_output)]
            biases.append(of_output.index_fill(0, torch.tensor(places, dtype=torch.long), 0.0))
        return any(bool(bias.any()) for bias in biases)


def _read_pickle(path: Path) -> dict[str, Tensor]:
    try:
        with open_regular(_followed(path)) as file:
            tensors = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    except Exception as error:  # a pickle fails in as many ways as there are
        reason = " ".join(str(error).split())
        raise InputError(
            f"{path}: a pickle that torch's weights-only loader does not read ({reason:.120}): save the model as "
            "safetensors, where you trust it: MarianMTModel.from_pretrained(...).save_pretrained(...)"
        ) from error
    is_named = isinstance(tensors, dict) and all(isinstance(name, str) for name in tensors)
    if not is_named or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise InputError(f"{path}: not a dictionary of tensors by their names: save the model by save_pretrained")
    for name, tensor in tensors.items():
        if not _is_plain(tensor):
            raise InputError(
                f"{path}: {name!a:.80} is not a plain tensor that is whole in the file: save the model by "
                "save_pretrained"
            )
    return dict(tensors)


def _is_plain(tensor: Tensor) -> bool:
    """Whether all numbers of a tensor are there, one after the other: a sparse one, say, may stand for any size."""
    is_usual = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if not is_usual or tensor.is_nested or tensor.is_quantized or tensor.device.type != "cpu":
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


@dataclass(frozen=True)
class _Embeddings:
    """The three matrices with a row for each piece, in their rows and channels."""

    source: Tensor
    target: Tensor
    output: Tensor
    is_tied: bool  # the output is the target's; with one vocabulary, all three are one

    @classmethod
    def of(cls, settings: _Settings, stored: _Stored, *, has_one_vocabulary: bool) -> "_Embeddings":
        is_shared = settings.flag("share_encoder_decoder_embeddings", default=True)
        is_tied = settings.flag("tie_word_embeddings", default=True)
        shared = "model.shared.weight"
        of_source = "model.encoder.embed_tokens.weight"
        of_target = "model.decoder.embed_tokens.weight"
        of_output = "lm_head.weight"
        if is_tied and is_shared:
            if not has_one_vocabulary:
                raise settings.refused("share_encoder_decoder_embeddings", "but each language has its own vocabulary")
            one = stored.matrix(shared, of_target, of_source, of_output)
            return cls(one, one, one, is_tied=True)

        source = stored.matrix(of_source, shared)
        target = stored.matrix(of_target, *([of_output] if is_tied else []), shared)
        if not is_tied:
            return cls(source, target, stored.matrix(of_output), is_tied=False)
        return cls(source, target, target, is_tied=not has_one_vocabulary)


def _start(vocabulary: Vocabulary, embeddings: _Embeddings, stored: _Stored) -> Start:
    """Zeros, where the decoder's start is a row of zeros, and neither it nor padding is a class that has a chance."""
    rows = vocabulary.never
    if not rows or max(rows) >= len(embeddings.target) or bool(embeddings.target[rows].any()):
        return Start.learned
    if vocabulary.starts_from_padding:
        return Start.zeros

    bias = stored.tensors.get(FINAL_BIAS, torch.zeros(0)).flatten()
    is_ours = len(bias) == len(vocabulary.rows) and bool((bias[rows] == NO_PROBABILITY).all())
    return Start.zeros if is_ours and len(rows) == len(NEVER) else Start.learned


_MATRICES = re.compile(r"model\.(shared|(encoder|decoder)\.embed_tokens)\.weight|lm_head\.weight")
_POSITIONS = re.compile(r"model\.(encoder|decoder)\.embed_positions\.weight")


@dataclass(frozen=True)
class _Converter:
    """From their tensors to our weights."""

    folder: Path
    config: ModelConfig
    vocabularies: _Vocabularies
    embeddings: _Embeddings
    stored: _Stored

    def weights(self, tokenizers: Tokenizers) -> dict[str, Tensor]:
        """Every weight of our model. Raises InputError where one is missing, too many, or of another shape."""
        tensors = self.stored.tensors
        if self.config.n_layers + self.config.decoder_layers > len(tensors):
            raise InputError(f"{self.stored.path}: it has fewer layers than {CONFIG} asks for")
        with torch.device("meta"):
            model = Transformer(self.config, tokenizers.vocab_sizes)

        used = set[str]()
        weights = {}
        for name, parameter in model.named_parameters():
            weight, theirs = self._weight(name)
            if weight.shape != parameter.shape:
                raise InputError(
                    f"{self.stored.path}: {theirs} makes a {name} of {tuple(weight.shape)}, and {CONFIG} and the "
                    f"vocabulary ask for {tuple(parameter.shape)}"
                )
            used.add(theirs)
            weights[name] = weight.to(torch.promote_types(weight.dtype, torch.float32)).contiguous()
        self._check_rest(used)
        return weights

    def _weight(self, name: str) -> tuple[Tensor, str]:
        """A weight of ours, and the name of theirs that it is made of."""
        if name == "output_bias":
            theirs = FINAL_BIAS
            zeros = torch.zeros(1, len(self.embeddings.output))
            bias = self.stored.tensors.get(theirs, zeros).flatten()
            self._check_rows(bias, len(self.embeddings.output), theirs)
            gathered = self.vocabularies.target.gather(bias)
            if self.vocabularies.target.starts_from_padding:
                gathered[list(NEVER)] = NO_PROBABILITY
            return gathered, theirs

        matrices = {
            "embedding": (self.embeddings.target, self.vocabularies.target),
            "source_embedding.matrix": (self.embeddings.source, self.vocabularies.source),
            "target_embedding.matrix": (self.embeddings.target, self.vocabularies.target),
            "output": (self.embeddings.output, self.vocabularies.target),
        }
        if name in matrices:
            matrix, vocabulary = matrices[name]
            n_rows = sum(row is not None for row in vocabulary.rows)
            if matrix.ndim != 2 or matrix.shape != (n_rows, self.config.d_model):
                raise InputError(
                    f"{self.stored.path}: the matrix of a vocabulary is {tuple(matrix.shape)}, and {CONFIG} asks for "
                    f"{(n_rows, self.config.d_model)}"
                )
            gathered = vocabulary.gather(matrix)[:, original_channels(self.config.d_model)]
            if self.config.start is Start.zeros and name != "source_embedding.matrix":
                gathered[list(NEVER)] = 0.0  # an output of its own may have others, which are never used
            return gathered, name

        place = name_in_marian(name)
        return self._in_our_channels(place), place.name

    def _in_our_channels(self, place: MarianName) -> Tensor:
        tensor = self.stored.matrix(place.name)
        width = tensor.shape[-1 if place.is_reader and tensor.ndim == 2 else 0] if tensor.ndim else 0
        if not (place.is_reader and tensor.ndim == 1) and width != self.config.d_model:
            raise InputError(
                f"{self.stored.path}: {place.name} is {tuple(tensor.shape)}, with d_model={self.config.d_model}"
            )
        return place.permuted(tensor, original_channels(self.config.d_model))

    def _check_rows(self, tensor: Tensor, expected: int, name: str) -> None:
        if len(tensor) != expected:
            raise InputError(f"{self.stored.path}: {name} has {len(tensor)} numbers, and the vocabulary {expected}")

    def _check_rest(self, used: set[str]) -> None:
        """Raise InputError for a tensor that has no place in our model, and for positions that are no sinusoids."""
        for name, tensor in self.stored.tensors.items():
            if _POSITIONS.fullmatch(name):
                table = sinusoids(self.config.max_positions, self.config.d_model)[:, channels_of(self.config.d_model)]
                if tensor.shape != table.shape or not torch.allclose(tensor.float(), table.float(), atol=1e-3):
                    raise InputError(f"{self.stored.path}: {name} is not the table of sinusoids")
            elif name in used or _MATRICES.fullmatch(name) or name == FINAL_BIAS:
                continue
            elif not (name.endswith("_proj.bias") and not self.config.biases):  # which are zeros then
                raise InputError(f"{self.stored.path}: {name!a:.80} has no place in the model that {CONFIG} describes")
