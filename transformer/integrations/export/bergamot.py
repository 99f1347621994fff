"""Exports to Bergamot, the engine of Firefox's translations and of translateLocally, which runs in pages, too.

    model.ende.intgemm.alphas.bin   the weights in int8, with the scales of what they are multiplied with, measured;
    model.ende.bin                  or in float32, which the engine rounds while it loads them
    vocab.ende.spm                  the SentencePiece model; of two, srcvocab.ende.spm and trgvocab.ende.spm
    config.intgemm8bitalpha.yml, model_info.json   what translateLocally reads of a folder

The names are those of Firefox's models; their lists of likely translations (`lex.50.50.ende.s2t.bin`) are not needed:
the engine computes all pieces then. The check reads the file back and computes as `marian` does, with numbers rounded
as the engine rounds them; tests/integrations/test_bergamot_engine.py compares with the engine itself.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from transformer import __version__
from transformer.config.languages import language_of, name_of
from transformer.config.settings import Quantization, SearchOverride
from transformer.data.tokenizer import Tokenizer
from transformer.errors import InputError
from transformer.integrations.export.formats import ExportFormat, Original
from transformer.integrations.export.marian import (
    BOUND,
    MarianPeer,
    model_settings,
    order_in_marian,
    weights_of,
)
from transformer.integrations.export.marian_bin import LARGEST, is_product, read_bin, write_bin
from transformer.integrations.export.marian_graph import Array, MarianGraph, Past
from transformer.integrations.published.marian_form import (
    OUTPUT_BIAS,
    OUTPUT_MATRIX,
    SETTINGS,
    SHARED_MATRIX,
    read_array,
    settings_as_array,
    settings_as_yaml,
)
from transformer.vocabulary import EOS, NO_PROBABILITY

CONFIG = "config.intgemm8bitalpha.yml"  # its name, whatever the weights are
INFO = "model_info.json"
DEVIATIONS = 1.1  # above the mean of the largest numbers of a sentence: beyond, they are cut
WIDTHS = 64  # the engine multiplies blocks so wide
PIECES = 8  # and so many pieces at once

README = """# A translation model for Bergamot: Firefox, translateLocally, web pages

Exported from {origin}, {source} to {target}, in {quantization}. `parity.json` says how closely the two agree.

- **A page of your own**: `transformer export to=browser` makes one. In the package `@browsermt/bergamot-translator`,
  `TranslatorBacking.loadTranslationModel` gives the engine the bytes of `{model}` and of {vocabularies},
  an empty buffer for the shortlist, and the setting `gemm-precision: {precision}`.
- **translateLocally**: copy this folder into its folder of models, or pack it (`tar czf {pair}.tar.gz *`) and open that
  (Edit, Translator settings, Import model).
- **Firefox**: the files have the names of its models. It takes models only from its own collection.

The engine searches greedily (`beam-size: 1`), and cuts a translation at twice the pieces of its source.
"""


# ---- names ----------------------------------------------------------------------------------------------------------


def codes_of(original: Original) -> tuple[str, str]:
    """The languages, as Firefox's models call them. Raises InputError for what is no code of a language."""
    return language_of(original.src_lang, "data.src_lang"), language_of(original.tgt_lang, "data.tgt_lang")


def _pair(original: Original) -> str:
    return "".join(codes_of(original))


def model_name(original: Original) -> str:
    """The file of the weights."""
    end = "intgemm.alphas.bin" if original.quantization is Quantization.int8 else "bin"
    return f"model.{_pair(original)}.{end}"


def spm_names(original: Original) -> list[str]:
    """The files of the SentencePiece models: one, or the source's and the target's."""
    pair = _pair(original)
    if original.translator.tokenizers.is_shared:
        return [f"vocab.{pair}.spm"]
    return [f"srcvocab.{pair}.spm", f"trgvocab.{pair}.spm"]


def precision_of(quantization: Quantization) -> str:
    """How the engine is told to multiply: by the scales of the file, or by those of each product."""
    return "int8shiftAlphaAll" if quantization is Quantization.int8 else "int8shiftAll"


# ---- writing --------------------------------------------------------------------------------------------------------


def write(original: Original, folder: Path) -> None:
    """Write the model, its SentencePiece models and what translateLocally reads."""
    write_model(original, folder)
    (folder / CONFIG).write_text(settings_as_yaml(_search_settings(original)), encoding="utf-8")
    (folder / INFO).write_text(json.dumps(_info(original), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_model(original: Original, folder: Path) -> None:
    """Write the model and its SentencePiece models: what the engine needs."""
    translator = original.translator
    arrays = _in_blocks({name: weight.numpy() for name, weight in weights_of(translator).items()})
    settings = model_settings(translator)
    sizes = [len(order_in_marian(tokenizer)) for tokenizer in translator.tokenizers.sides]
    settings["dim-vocabs"] = [size + -size % PIECES for size in sizes]
    is_int8 = original.quantization is Quantization.int8
    scales = measure_scales(original, arrays, settings) if is_int8 else {}
    stored = {**arrays, SETTINGS: settings_as_array(settings)}
    write_bin(folder / model_name(original), stored, int8=is_int8, scales=scales)

    names = spm_names(original)
    for name, tokenizer in zip(names, translator.tokenizers.sides[: len(names)], strict=True):
        (folder / name).write_bytes(tokenizer.sentencepiece_model)


def check(original: Original) -> None:
    """Raise InputError for sizes that the engine does not multiply, and for an output of its own in int8."""
    config = original.translator.model.config
    for name, size in {"model.d_model": config.d_model, "model.d_ff": config.d_ff}.items():
        if size % WIDTHS:
            raise InputError(
                f"{name}={size}: not a multiple of {WIDTHS}, the width of the blocks that Bergamot multiplies; "
                "to=marian and to=ctranslate2 can express it"
            )
    if original.quantization is Quantization.int8 and not config.tie_embeddings:
        raise InputError(
            "model.tie_embeddings=false: in int8, Bergamot's engine aborts at a separate output matrix: set "
            "quantization=float32, which it rounds while loading"
        )


def _in_blocks(arrays: dict[str, Array]) -> dict[str, Array]:
    """The arrays with as many pieces more as the engine needs: zeros, which have no probability."""
    padded = dict(arrays)
    for name, array in arrays.items():
        axis = 1 if name == OUTPUT_BIAS else 0
        missing = -array.shape[axis] % PIECES
        if missing and (name in (OUTPUT_BIAS, OUTPUT_MATRIX) or name.endswith(SHARED_MATRIX)):
            margin = [(0, missing if place == axis else 0) for place in range(array.ndim)]
            padded[name] = np.pad(array, margin, constant_values=NO_PROBABILITY if name == OUTPUT_BIAS else 0.0)
    return padded


def measure_scales(original: Original, arrays: dict[str, Array], settings: dict[str, object]) -> dict[str, float]:
    """What the inputs of each product are to be multiplied with, by the name of its matrix, for int8.

    The mean of the largest number of a sentence, and some deviations more, becomes 127, as Mozilla has it: what is
    beyond is cut. The sentences are those of the check, with their translations.
    """
    largest = defaultdict[str, list[float]](list)
    graph = MarianGraph(
        {name: array.astype(np.float64) for name, array in arrays.items()},
        read_array(settings_as_array(settings)),
        observe=lambda name, value: largest[name].append(value),
    )
    translator = original.translator
    source, target = translator.tokenizers.sides
    texts = [sentence.text for sentence in original.sentences]
    translations = translator.translate(texts)
    for pieces, translation in zip(_in_marian(source, texts), _in_marian(target, translations), strict=True):
        memory = graph.encode(np.array([pieces]), np.array([len(pieces)]))
        graph.decode(np.array([[-1, *translation[:-1]]]), Past(), memory)
    return {
        name: LARGEST / max(1e-6, float(np.mean(values)) + DEVIATIONS * float(np.std(values)))
        for name, values in largest.items()
        if is_product(name)
    }


def _in_marian(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The pieces of each text and its end, under Marian's ids."""
    theirs = {ours: index for index, ours in enumerate(order_in_marian(tokenizer))}
    return [[theirs[index] for index in [*ids, EOS]] for ids in tokenizer.encode(list(texts))]


def _search_settings(original: Original) -> dict[str, object]:
    """What translateLocally reads: the settings of Firefox's models."""
    names = spm_names(original)
    return {
        "relative-paths": True,
        "models": [model_name(original)],
        "vocabs": [names[0], names[-1]],
        "beam-size": 1,
        "normalize": 1.0,
        "word-penalty": 0,
        "max-length-break": 128,
        "mini-batch-words": 1024,
        "workspace": 128,
        "max-length-factor": 2.0,
        "skip-cost": True,
        "cpu-threads": 0,
        "quiet": True,
        "quiet-translation": True,
        "gemm-precision": precision_of(original.quantization),
    }


def _info(original: Original) -> dict[str, object]:
    """What translateLocally shows of a model."""
    source, target = codes_of(original)
    kind = "base" if original.translator.model.config.d_model >= 512 else "tiny"
    return {
        "modelName": f"{name_of(source)}-{name_of(target)} {kind}",
        "shortName": f"{source}-{target}-{kind}",
        "src": name_of(source),
        "srcTags": {source: name_of(source)},
        "trg": name_of(target),
        "trgTag": target,
        "type": kind,
        "repository": f"transformer-mt {__version__}",
        "version": 1,
        "API": 1,
    }


def readme(original: Original) -> str:
    """The README of the export: where the model goes."""
    source, target = codes_of(original)
    return README.format(
        origin=original.origin,
        source=name_of(source),
        target=name_of(target),
        quantization=original.quantization.value,
        model=model_name(original),
        vocabularies=" and ".join(f"`{name}`" for name in spm_names(original)),
        precision=precision_of(original.quantization),
        pair=_pair(original),
    )


# ---- running --------------------------------------------------------------------------------------------------------


def load(original: Original, folder: Path, threads: int) -> MarianPeer:
    """The file, read back, by Marian's formulas: what int8 rounds is rounded, and products are exact."""
    binary = read_bin(folder / model_name(original))
    settings = read_array(binary.arrays.pop(SETTINGS))
    arrays = {name: array.astype(np.float64) for name, array in binary.arrays.items()}
    graph = MarianGraph(arrays, settings, scales=binary.scales)
    return MarianPeer(graph, original, folder / spm_names(original)[0])


FORMAT = ExportFormat(
    packages=(),
    search=SearchOverride(beam_size=1, length_penalty=0.0),
    bound=lambda _: BOUND,
    write=write,
    load=load,
    readme=readme,
    check=check,
)
