"""Marian's own files, read as a model of ours: what `marian` trains, and what `export to=marian` writes.

    model.npz           arrays under Marian's names, and among them its settings -> weights, ModelConfig
    *.spm               one SentencePiece model for both sides, or one each      -> Tokenizers
    *.vocab.yml         the ids of all pieces, where these are not those of the SentencePiece model, as in OPUS-MT
    model.npz.decoder.yml, decoder.yml or model.npz.yml, beside it               -> the names of these, SearchConfig

Nothing is executed, and settings that our model does not support are refused by name. The names of weights and settings
are those of `marian_form`, which the export writes. The decoder starts from zeros, and there is no class for padding
(`model.start=zeros`); pieces called `<s>` and `<pad>` are classes like any other, unless the export wrote them.
"""

import io
import logging
import math
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sentencepiece import SentencePieceProcessor
from torch import Tensor

from transformer.checkpoint import check_weights
from transformer.config.settings import (
    MOST_BEAM,
    MOST_PENALTY,
    Activation,
    ModelConfig,
    Norm,
    Positions,
    SearchConfig,
    Start,
)
from transformer.data.tokenizer import Tokenizer, Tokenizers, read_model
from transformer.errors import InputError
from transformer.files import open_regular
from transformer.integrations.published.marian import USUAL_LENGTH, Published, Vocabulary, ordered, tokenizer_of
from transformer.integrations.published.marian_form import (
    AROUND,
    MATRICES,
    OUTPUT_BIAS,
    OUTPUT_MATRIX,
    SETTINGS,
    SHARED_MATRIX,
    SOURCE_MATRIX,
    TARGET_MATRIX,
    UNUSED,
    Array,
    Value,
    is_idle,
    place_in_marian,
    read_array,
    read_ids,
    read_settings,
)
from transformer.integrations.published.names import original_channels
from transformer.model.transformer import Transformer
from transformer.vocabulary import BOS, EOS, NEVER, NO_PROBABILITY, PAD, UNK

LARGEST_YAML = 1 << 20  # bytes
LARGEST_LIST = 1 << 24  # bytes
MOST_ARRAYS = 1 << 14
PRE_NORM_VERSION = "v1.12"  # whose training has been compared with ours

_ACTIVATIONS = {"relu": Activation.relu, "swish": Activation.swish}

log = logging.getLogger(__name__)


# ---- the files ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MarianFiles:
    """The files of a model: there, or named where they should be."""

    model: Path
    vocabularies: tuple[Path, Path]  # of source and target, which may be the same
    config: Path | None  # what names them beside the model, and says how to search
    ids: Path | None = None  # of the pieces of both, where they are not those of the SentencePiece models

    @property
    def paths(self) -> list[Path]:
        """Each once."""
        others = [path for path in (self.ids, self.config) if path is not None]
        return list(dict.fromkeys([self.model, *self.vocabularies, *others]))


def is_npz(source: str) -> bool:
    """Whether a setting names a model file of Marian's."""
    return source.endswith(".npz") and os.path.isfile(source)


def find_files(model: Path, vocabularies: Sequence[str] | None) -> MarianFiles:
    """The files of a model: the vocabularies that are given, or those that the settings beside the model name.

    Raises InputError where neither says.
    """
    names = (f"{model.name}.decoder.yml", "decoder.yml", f"{model.name}.yml")
    config = next((path for path in map(model.with_name, names) if os.path.lexists(path)), None)
    if vocabularies is None:
        if config is None:
            raise InputError(
                f"{model}: none of {', '.join(names)} is beside it: set vocabularies=[source.spm,target.spm]"
            )
        named = _read_yaml(config).get("vocabs")
        if not isinstance(named, list) or not named:
            raise InputError(f"{config}: it names no vocabs: set vocabularies=[source.spm,target.spm]")
        # By the last part of its name: what lies beside the model is its vocabulary, wherever it was trained.
        vocabularies = [str(model.parent / os.path.basename(name)) for name in named]
    ids, vocabularies = _apart(vocabularies)
    if not 1 <= len(vocabularies) <= 2:
        raise InputError(f"{model}: {len(vocabularies)} vocabularies: name one, or one for each language")
    source, target = vocabularies[0], vocabularies[-1]
    for name in (source, target):
        if not name.endswith(".spm"):
            raise InputError(
                f"{name}: not a SentencePiece model (.spm), nor a list of pieces (.yml) with source.spm and "
                "target.spm beside it: the vocabularies that are read here (docs/models.md)"
            )
    return MarianFiles(model, (Path(source), Path(target)), config, ids)


def _apart(vocabularies: Sequence[str]) -> tuple[Path | None, Sequence[str]]:
    """The one list of pieces among the vocabularies, if there is one, and the SentencePiece models of the sides.

    These are `source.spm` and `target.spm` beside the list, as in OPUS-MT's models, unless they are named, too.
    """
    lists = [Path(name) for name in dict.fromkeys(vocabularies) if name.endswith((".yml", ".yaml"))]
    if not lists:
        return None, vocabularies
    if len(lists) > 1:
        raise InputError(f"{lists[1]}: a list of pieces for each language: one for both, as in OPUS-MT, is read here")
    named = [name for name in vocabularies if Path(name) not in lists]
    return lists[0], named or [str(lists[0].with_name(name)) for name in ("source.spm", "target.spm")]


def _read_yaml(path: Path) -> dict[str, Value]:
    try:
        with open_regular(path, limit=LARGEST_YAML) as file:
            return read_settings(file.read().decode())
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise InputError(f"{path}: not a Marian settings file: {error}") from error


def read_npz(files: MarianFiles) -> Published:
    """The model in files of Marian's.

    Raises InputError, naming the file and what is wrong with it: where one is missing or damaged, where they do not
    belong together, and for a model that cannot be expressed here.
    """
    stored = _Stored.read(files.model)
    sides = _read_sides(files, stored)
    tokenizers = Tokenizers(sides[0].tokenizer, sides[1].tokenizer)
    is_tied = stored.is_tied(tokenizers.has_one_vocabulary)
    has_biases = stored.has_biases(but_for=[row for row in map(sides[1].rows.__getitem__, NEVER) if row is not None])
    model = stored.model_config(biases=has_biases, is_tied=is_tied)
    if model.norm is Norm.pre:
        log.warning(
            "%s: a pre-norm model: computed here as in training and in marian-scorer; marian-decoder 1.12 "
            "differs: it leaves out the norm before earlier targets",
            files.model,
        )
    return Published(
        model=model,
        search=SearchConfig() if files.config is None else _search_config(files.config),
        tokenizers=tokenizers,
        weights=_weights(stored, model, tokenizers, sides),
        src_lang=None,
        tgt_lang=None,
    )


def _search_config(path: Path) -> SearchConfig:
    """Marian's beam, and the alpha that grows at usual lengths as its power of the length does."""
    values = _read_yaml(path)

    def number(key: str, default: float) -> float:
        try:
            found = float(str(values.get(key, default)))
        except ValueError:
            found = math.nan
        if not math.isfinite(found):
            raise InputError(f"{path}: {key}={values[key]!a:.60}: not a finite number")
        return found

    if number("word-penalty", 0.0) != 0.0:
        log.warning("%s: word-penalty is not supported here, so translations may differ", path)
    alpha = round(number("normalize", 0.0) * (5.0 + USUAL_LENGTH) / USUAL_LENGTH, 2)
    return SearchConfig(
        beam_size=int(max(1, min(MOST_BEAM, number("beam-size", 12.0)))),  # 12 is Marian's
        length_penalty=max(0.0, min(MOST_PENALTY, alpha)),
    )


# ---- arrays and settings --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stored:
    """The arrays of a model file, and its settings."""

    path: Path
    tensors: Mapping[str, Tensor]
    settings: Mapping[str, Value]

    @classmethod
    def read(cls, path: Path) -> "_Stored":
        """Read a model file. Raises InputError."""
        try:
            arrays = _read_arrays(path)
            if SETTINGS not in arrays:
                raise ValueError(f"it has no {SETTINGS}: not a Marian model")
            settings = arrays.pop(SETTINGS)
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
        except ValueError as error:
            raise InputError(f"{path}: {error}") from error
        try:
            values = read_array(settings)
        except ValueError as error:
            raise InputError(f"{path}: {SETTINGS}: {error}") from error
        try:
            tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
            check_weights(tensors)
        except (TypeError, ValueError) as error:
            raise InputError(f"{path}: {error}") from error
        return cls(path, tensors, values)

    def text(self, key: str, default: str = "") -> str:
        value = self.settings.get(key, default)
        if not isinstance(value, str):
            raise self.refused(key, "not a single value")
        return value

    def number(self, key: str) -> int:
        value = self.text(key)
        if not (value.isascii() and value.isdigit() and len(value) < 10):
            raise self.refused(key, "not a whole number below 10^9")
        return int(value)

    def refused(self, key: str, why: str) -> InputError:
        return InputError(f"{self.path}: {SETTINGS}: {key}={self.settings.get(key)!a:.80}: {why}")

    def vocab_sizes(self) -> tuple[int, int]:
        """Of source and target."""
        values = self.settings.get("dim-vocabs")
        if (
            not isinstance(values, list)
            or len(values) != 2
            or not all(value.isascii() and value.isdigit() and len(value) < 10 for value in values)
        ):
            raise self.refused("dim-vocabs", "not two whole numbers: models here have one source")
        return int(values[0]), int(values[1])

    def is_tied(self, has_one_vocabulary: bool) -> bool:
        """Whether the output's matrix is the target's; with one vocabulary, all three are one then."""
        if SHARED_MATRIX in self.tensors and not has_one_vocabulary:
            raise InputError(f"{self.path}: {SHARED_MATRIX} is for one vocabulary, but each language has its own")
        is_said = "true" in (self.text("tied-embeddings"), self.text("tied-embeddings-all"))
        if not is_said and OUTPUT_MATRIX not in self.tensors:
            raise InputError(f"{self.path}: {OUTPUT_MATRIX} is missing")
        if OUTPUT_MATRIX in self.tensors:
            return False
        return SHARED_MATRIX in self.tensors or not has_one_vocabulary

    def has_biases(self, *, but_for: Sequence[int]) -> bool:
        """Whether a projection of attention, or the output, but for these classes, has a bias that is not zero."""
        biases = [tensor for name, tensor in self.tensors.items() if _is_bias_of_attention(name)]
        if OUTPUT_BIAS in self.tensors:
            of_output = self.tensors[OUTPUT_BIAS].flatten()
            places = torch.tensor([row for row in but_for if row < len(of_output)], dtype=torch.long)
            biases.append(of_output.index_fill(0, places, 0.0))
        return any(bool(bias.any()) for bias in biases)

    def model_config(self, *, biases: bool, is_tied: bool) -> ModelConfig:
        """The model that the settings describe. Raises InputError for one that cannot be expressed here."""
        if self.text("type") != "transformer":
            raise self.refused("type", "not transformer, the only kind of model that is read here")
        activation = self.text("transformer-ffn-activation", "swish")
        if activation not in _ACTIVATIONS:
            why = (
                "Marian only approximates it, by x * sigmoid(1.702 x)" if activation == "gelu" else "not relu or swish"
            )
            raise self.refused("transformer-ffn-activation", why)
        norm = self._norm()
        self._check_unused()
        encoder_layers, decoder_layers = self.number("enc-depth"), self.number("dec-depth")
        if encoder_layers + decoder_layers > len(self.tensors):
            raise InputError(f"{self.path}: it has fewer layers than its settings ask for")
        try:
            return ModelConfig(
                n_layers=encoder_layers,
                n_decoder_layers=None if decoder_layers == encoder_layers else decoder_layers,
                d_model=self.number("dim-emb"),
                d_ff=self.number("transformer-dim-ffn"),
                n_heads=self.number("transformer-heads"),
                activation=_ACTIVATIONS[activation],
                biases=biases,
                norm=norm,
                positions=Positions.marian,
                start=Start.zeros,
                tie_embeddings=is_tied,
            )
        except ValueError as error:
            raise InputError(f"{self.path}: {SETTINGS}: {error}") from error

    def _norm(self) -> Norm:
        keys = ("transformer-preprocess", "transformer-postprocess", "transformer-postprocess-top")
        around = tuple(self.text(key).replace("d", "") for key in keys)
        norms = [norm for norm, ours in AROUND.items() if ours == around]
        if not norms or self.text("transformer-postprocess-emb").replace("d", ""):
            key = next((key for key in keys if self.text(key) not in ("", "dan")), "transformer-postprocess-emb")
            raise self.refused(
                key, "norms stand after each residual sum here (postprocess dan), or before each sub-layer"
            )
        version = self.text("version")
        if norms[0] is Norm.pre and not version.startswith(PRE_NORM_VERSION):
            raise self.refused(
                "version",
                f"a pre-norm model of a version other than {PRE_NORM_VERSION}: what that one computed is not known",
            )
        return norms[0]

    def _check_unused(self) -> None:
        """Raise InputError for a setting that changes the model to one that ours is never, and for an unknown one."""
        of_ours = {
            *("type", "version", "dim-vocabs", "dim-emb", "enc-depth", "dec-depth", "transformer-heads"),
            *("transformer-dim-ffn", "transformer-ffn-activation", "transformer-preprocess", "transformer-postprocess"),
            *("transformer-postprocess-emb", "transformer-postprocess-top"),
            *("tied-embeddings", "tied-embeddings-all", "tied-embeddings-src"),
        }
        same_as_default = {
            "transformer-decoder-ffn-depth": ("0", "2"),
            "transformer-decoder-dim-ffn": ("0", self.text("transformer-dim-ffn")),
        }
        for key, value in self.settings.items():
            if key in of_ours or is_idle(key):
                continue
            if key not in UNUSED:
                raise self.refused(key, "an unknown setting, which may change the model")
            default = UNUSED[key]
            usual = str(default).lower() if isinstance(default, bool) else default
            usual = usual if isinstance(usual, list) else str(usual)
            if value != usual and value not in same_as_default.get(key, ()):
                raise self.refused(key, f"a model here has {usual!r}")


def _is_bias_of_attention(name: str) -> bool:
    return name.endswith(("_bq", "_bk", "_bv", "_bo"))


def _read_arrays(path: Path) -> dict[str, Array]:
    """The arrays of an .npz file. Raises OSError and ValueError.

    Members are read to the size that the archive has of them, uncompressed as Marian and numpy store them, and an array
    is made only of as many bytes as there are: no header makes this reserve more memory than the file is large.
    """
    arrays = {}
    with open_regular(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
                if len(members) > MOST_ARRAYS:
                    raise ValueError(f"it has {len(members)} arrays: not a Marian model")
                if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                    raise ValueError("its arrays are compressed, which Marian's are not: write it with numpy.savez")
                size = os.fstat(file.fileno()).st_size
                if sum(member.file_size for member in members) > size:
                    raise ValueError("its arrays claim to be larger than the file")
                for member in members:
                    name = member.filename.removesuffix(".npy")
                    if name in arrays:
                        raise ValueError(f"{name!a:.80} occurs twice")
                    arrays[name] = _array_of(archive.read(member), name)
        except (zipfile.BadZipFile, EOFError, RuntimeError, UnicodeDecodeError) as error:
            raise ValueError(f"not an .npz file ({error})") from error
    return arrays


def _array_of(data: bytes, name: str) -> Array:
    """The array in the content of an .npy file. Raises ValueError: also for one of Python objects, a pickle."""
    content = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(content)
        if version == (1, 0):
            shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(content)
        elif version == (2, 0):
            shape, is_fortran, dtype = np.lib.format.read_array_header_2_0(content)
        else:
            raise ValueError(f"version {version} of .npy")
    except Exception as error:  # a hostile header fails in as many ways as a Python expression has
        reason = " ".join(str(error).split())
        raise ValueError(f"{name!a:.80} is not a numpy array ({reason:.120})") from error
    if dtype.hasobject or dtype.kind not in "fiu":
        raise ValueError(f"{name!a:.80} is an array of {dtype}, but Marian's are of numbers")
    rest = len(data) - content.tell()
    if any(type(size) is not int or size < 0 for size in shape) or math.prod(shape) * dtype.itemsize != rest:
        raise ValueError(f"{name!a:.80} is {shape} of {dtype}, but has {rest} bytes")
    flat = np.frombuffer(data, dtype, offset=content.tell()).astype(dtype.newbyteorder("="))
    return flat.reshape(shape, order="F" if is_fortran else "C")


# ---- vocabularies ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Side:
    """A tokenizer, and the row of Marian's that each of its ids has."""

    tokenizer: Tokenizer
    vocabulary: Vocabulary

    @property
    def rows(self) -> list[int | None]:
        return self.vocabulary.rows


def _read_sides(files: MarianFiles, stored: _Stored) -> tuple[_Side, _Side]:
    """The source's and the target's; the same, where there is one."""
    sizes = stored.vocab_sizes()
    contents = [read_model(path) for path in files.vocabularies]
    if files.ids is not None:
        vocabulary = _read_list(files.ids, sizes)
        sides = (tokenizer_of(path, one, vocabulary) for path, one in zip(files.vocabularies, contents, strict=True))
        source, target = (_Side(tokenizer, vocabulary) for tokenizer in sides)
        return source, source if contents[0] == contents[1] else target
    matrix = stored.tensors.get(SHARED_MATRIX, stored.tensors.get(TARGET_MATRIX))
    target = _read_side(files.vocabularies[1], contents[1], sizes[1], _have_no_chance(stored, matrix))
    if contents[0] == contents[1]:
        return target, target
    return _read_side(files.vocabularies[0], contents[0], sizes[0], _SPECIAL_OF_OURS), target


def _read_list(path: Path, sizes: tuple[int, int]) -> Vocabulary:
    """The pieces of both sides in the order of our ids. Raises InputError."""
    try:
        with open_regular(path, limit=LARGEST_LIST) as file:
            ids = read_ids(file.read().decode())
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise InputError(f"{path}: not a list of pieces as Marian writes it: {error}") from error
    if "</s>" not in ids or "<unk>" not in ids:
        raise InputError(f"{path}: it has no </s> or no <unk>, which Marian's lists have")
    if sizes != (len(ids), len(ids)):
        raise InputError(
            f"{path}: it has {len(ids)} pieces, and the model {sizes[0]} and {sizes[1]}: name the model's own list"
        )
    return ordered(ids, special=[None, ids["<unk>"], None, ids["</s>"]])


_SPECIAL_OF_OURS = (PAD, BOS)


def _have_no_chance(stored: _Stored, matrix: Tensor | None) -> tuple[int, ...]:
    """The classes PAD and BOS, where an export of ours wrote them: zeros, without a probability."""
    bias = stored.tensors.get(OUTPUT_BIAS, torch.zeros(0)).flatten()
    rows = list(_SPECIAL_OF_OURS)
    if matrix is None or matrix.ndim != 2 or len(bias) != len(matrix) or len(bias) <= EOS:
        return ()
    is_ours = not bool(matrix[rows].any()) and bool((bias[rows] == NO_PROBABILITY).all())
    return _SPECIAL_OF_OURS if is_ours else ()


def _read_side(path: Path, content: bytes, size: int, never: tuple[int, ...]) -> _Side:
    """A SentencePiece model in the order of our ids; `never` are pieces of it that are ours. Raises InputError."""
    try:
        processor = SentencePieceProcessor(model_proto=content)
        pieces = {processor.id_to_piece(index): index for index in range(len(processor))}
        unk, eos = processor.unk_id(), processor.eos_id()
    except (RuntimeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not a SentencePiece model") from error
    if len(processor) != size:
        raise InputError(
            f"{path}: it has {len(processor)} pieces, but the model has {size}: name the model's own vocabularies"
        )
    if eos < 0 or unk < 0 or len(pieces) < size:
        raise InputError(
            f"{path}: it lacks </s> or <unk>, or has a piece twice: Marian's SentencePiece models have each once"
        )

    ids = (processor.pad_id(), unk, processor.bos_id(), eos)
    padding, begin = (PAD, BOS) if never and ids == (PAD, UNK, BOS, EOS) else (None, None)
    vocabulary = ordered(pieces, special=[padding, unk, begin, eos])
    return _Side(tokenizer_of(path, content, vocabulary), vocabulary)


# ---- weights --------------------------------------------------------------------------------------------------------


def _weights(
    stored: _Stored, config: ModelConfig, tokenizers: Tokenizers, sides: tuple[_Side, _Side]
) -> dict[str, Tensor]:
    """Every weight of our model. Raises InputError where one is missing, too many, or of another shape."""
    with torch.device("meta"):
        model = Transformer(config, tokenizers.vocab_sizes)
    used = set[str]()
    weights = {}
    for name, parameter in model.named_parameters():
        weight, theirs = _weight(name, stored, config, sides)
        if weight.shape != parameter.shape:
            raise InputError(
                f"{stored.path}: {theirs} makes a {name} of {tuple(weight.shape)}, but the settings and the vocabulary "
                f"ask for {tuple(parameter.shape)}"
            )
        used.add(theirs)
        weights[name] = weight.to(torch.promote_types(weight.dtype, torch.float32)).contiguous()

    for name in stored.tensors:  # those of zeros apart, where the model has no biases
        is_without = not config.biases and (_is_bias_of_attention(name) or name == OUTPUT_BIAS)
        is_matrix = name in (SHARED_MATRIX, SOURCE_MATRIX, TARGET_MATRIX)
        if name not in used and not is_without and not is_matrix:
            raise InputError(f"{stored.path}: {name!a:.80} has no place in the model that its settings describe")
    return weights


def _weight(name: str, stored: _Stored, config: ModelConfig, sides: tuple[_Side, _Side]) -> tuple[Tensor, str]:
    """A weight of ours, and the name of the array that it is made of."""
    source, target = sides
    channels = original_channels(config.d_model)
    if name == "output_bias":
        bias = _tensor(stored, OUTPUT_BIAS).flatten()
        _check_rows(stored, OUTPUT_BIAS, bias, target)
        gathered = target.vocabulary.gather(bias)
        gathered[list(NEVER)] = NO_PROBABILITY
        return gathered, OUTPUT_BIAS

    if name == "embedding" or name in MATRICES:
        is_source = name == "source_embedding.matrix"
        side = source if is_source else target
        own = MATRICES.get(name, TARGET_MATRIX)
        of_target = () if is_source else (TARGET_MATRIX,)  # to which an output may be tied
        theirs = next((one for one in (own, *of_target, SHARED_MATRIX) if one in stored.tensors), own)
        matrix = _tensor(stored, theirs)
        _check_rows(stored, theirs, matrix, side)
        _check_width(stored, theirs, matrix.shape[1], config.d_model)
        gathered = side.vocabulary.gather(matrix)[:, channels]
        if not is_source:
            gathered[list(NEVER)] = 0.0
        return gathered, theirs

    place = place_in_marian(name, config.norm)
    tensor = _tensor(stored, place.name)
    is_vector = name.endswith(".bias") or "_ln_" in place.name
    if is_vector and len(tensor) != 1:
        raise InputError(f"{stored.path}: {place.name} is {tuple(tensor.shape)}: not one row")
    weight = tensor[0] if is_vector else tensor.T
    if not (place.is_reader and weight.ndim == 1):
        _check_width(stored, place.name, weight.shape[1 if place.is_reader else 0], config.d_model)
    return place.permuted(weight, channels), place.name


def _tensor(stored: _Stored, name: str) -> Tensor:
    if name not in stored.tensors:
        raise InputError(f"{stored.path}: {name} is missing")
    tensor = stored.tensors[name]
    if tensor.ndim != 2 or not len(tensor):
        raise InputError(f"{stored.path}: {name} is {tuple(tensor.shape)}: not a matrix")
    return tensor


def _check_rows(stored: _Stored, name: str, tensor: Tensor, side: _Side) -> None:
    rows = sum(row is not None for row in side.rows)
    if len(tensor) != rows:
        raise InputError(f"{stored.path}: {name} has {len(tensor)} rows, but the vocabulary has {rows} pieces")


def _check_width(stored: _Stored, name: str, width: int, expected: int) -> None:
    if width != expected:
        raise InputError(f"{stored.path}: {name} is {width} wide, but dim-emb is {expected}")
