"""The engine of a checkpoint: CTranslate2's copy of the weights, written once, checked, and kept in the run.

    RUN/engines/DIGEST-TYPE/  {config.json, model.bin, shared_vocabulary.json}  MANIFEST.json

DIGEST is of all that the files are made from. A folder with the name is complete, and was checked (in int8, on such a
processor); a damaged one is made again. Where the run cannot be written, the engine lives in a temporary folder as long
as the translator does.
"""

import copy
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from transformer.checkpoint import Checkpoint
from transformer.compute import multiplies_int8
from transformer.config.primitives import to_json
from transformer.config.settings import EngineType, ModelConfig, Precision, Quantization, Score, SearchConfig
from transformer.data.tokenizer import read_models
from transformer.decoding.batched import BatchedDecoder
from transformer.decoding.translator import Translator
from transformer.errors import CheckpointError, InputError, TransformerError
from transformer.files import build_once, is_sound, open_regular, storage_error
from transformer.integrations.engine.ctranslate2 import CTranslate2Peer, Vocabularies, supported_types, version, write
from transformer.integrations.engine.files import MARKS, read_engine, seal_engine
from transformer.integrations.engine.parity import choose_sentences, compare
from transformer.integrations.engine.searcher import EngineDecoder, Searcher, temporary_folder
from transformer.numerics import FLOAT32_BOUND, excess, tolerance_of
from transformer.registry import install_command
from transformer.run_dir import SOURCE, RunDir, tensor_file, tokenizer_digests
from transformer.vocabulary import UNK

FORMAT = 1  # of what is written: a change makes every engine anew
SENTENCES = 64  # that an engine is checked on
LONGEST = 24  # pieces of a made-up one
MOST_LOSS = tolerance_of(Precision.bf16).log_prob  # of a piece, in few bits
_FIRST_LINES = 1 << 18  # bytes of the dev set that sentences are taken from
_OTHERWISE = "set search.engine=torch"
_IN_FLOAT32 = "set search.engine_type=float32"

log = logging.getLogger(__name__)


def check_engine(config: ModelConfig, search: SearchConfig, device: torch.device) -> Quantization:
    """The type of the engine that the settings ask for. Raises InputError, with the key, where there is none."""
    if config.score is Score.additive:
        raise InputError(f"search.engine=ctranslate2 has no additive attention (model.score=additive): {_OTHERWISE}")
    if find_spec("ctranslate2") is None:
        raise InputError(f"search.engine=ctranslate2: {install_command('export')}, or {_OTHERWISE}")
    try:
        supported = supported_types(device)
    except (RuntimeError, ValueError) as error:
        raise InputError(f"search.engine=ctranslate2: {error}: {_OTHERWISE}") from error

    if search.engine_type is EngineType.auto:
        is_fast = "int8" in supported and (device.type != "cpu" or multiplies_int8())
        return Quantization.int8 if is_fast else Quantization.float32
    if search.engine_type.value not in supported:
        known = ", ".join(kind.value for kind in Quantization if kind.value in supported)
        raise InputError(
            f"search.engine_type={search.engine_type.value}: CTranslate2 computes in {known} on this {device.type}"
        )
    return Quantization(search.engine_type.value)


def with_engine(translator: Translator, run: RunDir, checkpoint: Checkpoint) -> Translator:
    """The translator with the engine that its settings ask for, made where it is not there yet.

    Where `auto` finds that int8 loses too much, it is float32.

    Raises InputError where the engine cannot be made or does not compute what the model does; StorageError where there
    is no room for it.
    """
    quantization = check_engine(translator.model.config, translator.search, translator.device)
    try:
        searcher = _searcher_of(translator, run, checkpoint, quantization=quantization)
    except InputError as error:
        if translator.search.engine_type is not EngineType.auto or quantization is Quantization.float32:
            raise
        log.warning("%s; float32 is used", str(error).removesuffix(f": {_IN_FLOAT32}"))
        quantization = Quantization.float32
        searcher = _searcher_of(translator, run, checkpoint, quantization=quantization)
    search = replace(translator.search, engine_type=EngineType(quantization.value))
    decoder = translator.decoder.with_search(search)
    return replace(translator, decoder=EngineDecoder(**vars(decoder), searcher=searcher))


def _searcher_of(
    translator: Translator, run: RunDir, checkpoint: Checkpoint, *, quantization: Quantization
) -> Searcher:
    """The engine in the run, or in a temporary folder where the run cannot be written."""
    vocabularies = Vocabularies.of(translator.tokenizers)

    def fill(folder: Path) -> None:
        write(translator.model, vocabularies, folder, quantization=quantization)
        _check(translator, run, folder, quantization)
        seal_engine(folder)

    run.check_folders()
    digest = _digest(run, checkpoint, saturates=quantization is Quantization.int8 and not multiplies_int8())
    folder = run.engines / f"{digest}-{quantization.value}"
    is_temporary = False
    with suppress(CheckpointError):  # missing, or damaged
        files = read_engine(folder)
        return Searcher(folder, vocabularies, quantization=quantization, device=translator.device, files=files)
    log.info("%s: converting the model for CTranslate2, once", folder)
    try:
        build_once(folder, fill, is_usable=partial(is_sound, read_engine), marks=MARKS)
    except OSError as error:
        log.warning(
            "%s: cannot be written (%s): converting in a temporary folder, for this command only",
            folder,
            error.strerror,
        )
        try:
            folder = temporary_folder()
            is_temporary = True
            fill(folder)
        except OSError as failure:
            raise storage_error(folder, error=failure) from failure
        except TransformerError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return Searcher(
        folder, vocabularies, quantization=quantization, device=translator.device, is_temporary=is_temporary
    )


def _digest(run: RunDir, checkpoint: Checkpoint, *, saturates: bool) -> str:
    """Of what the files are made from: weights, model, tokenizers, and the versions of their writers.

    `saturates`: this processor computes something else with them than others do, which is checked by itself.
    """
    weights = checkpoint.manifest.files[tensor_file(checkpoint.weights_name)]
    model = to_json(checkpoint.settings("model", ModelConfig))
    parts = [FORMAT, version(), weights.sha256, model, *tokenizer_digests(read_models(run.path))]
    if saturates:
        parts.append("saturates")
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


# ---- the check ------------------------------------------------------------------------------------------------------


def _check(translator: Translator, run: RunDir, folder: Path, quantization: Quantization) -> None:
    """Raise InputError unless the engine computes what the model does, by forced and by greedy decoding, on a CPU."""
    model = copy.deepcopy(translator.model).cpu().float()
    search = SearchConfig(beam_size=1, max_extra=translator.search.max_extra)
    decoder = BatchedDecoder.of(model, search, device=torch.device("cpu"), precision=Precision.fp32)
    plain = Translator(translator.tokenizers, decoder)
    sentences = choose_sentences(((text, None) for text in _texts(run, plain)), translator=plain, count=SENTENCES)

    vocabularies = Vocabularies.of(translator.tokenizers)
    peer = CTranslate2Peer(folder, vocabularies, run.tokenizer, alpha=0.0, threads=torch.get_num_threads())
    is_exact = quantization is Quantization.float32
    parity = compare(plain, peer, sentences, bound=FLOAT32_BOUND if is_exact else None)
    if problems := parity.problems + excess("the mean log-probability", parity.mean_log_probs, MOST_LOSS):
        raise InputError(
            f"search.engine=ctranslate2: in {quantization.value} it does not compute what the model does "
            f"({'; '.join(problems)}): {_OTHERWISE if is_exact else _IN_FLOAT32}"
        )


def _texts(run: RunDir, translator: Translator) -> Iterator[str]:
    """The first lines of the dev sets, then made-up ones."""
    for name in run.dev_names():
        with suppress(OSError), open_regular(run.text(name, SOURCE)) as file:
            yield from file.read(_FIRST_LINES).decode(errors="replace").split("\n")[:-1]
    draw = np.random.default_rng(0)
    longest = max(1, min(LONGEST, translator.decoder.max_positions // 2))
    while True:
        ids = draw.integers(UNK + 1, translator.model.source_vocab_size, size=draw.integers(1, longest, endpoint=True))
        yield from translator.tokenizers.source.decode([ids.tolist()])
