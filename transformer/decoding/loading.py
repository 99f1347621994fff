"""From a run directory, or several, to a translator: by name from Python, by typed settings for the commands."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Literal, TypeVar

import torch

from transformer import registry
from transformer.arguments import path_of, shown
from transformer.checkpoint import Checkpoint, find_checkpoint
from transformer.compute import (
    avoid_cudnn_attention,
    dtype_of,
    gpu_obstacle,
    memory_errors_named,
    resolve_device,
    resolve_precision,
)
from transformer.config.jobs import ScoreJob, TranslateJob
from transformer.config.settings import (
    TAG,
    TORCH,
    DataConfig,
    Device,
    EngineType,
    ModelConfig,
    Precision,
    SearchConfig,
    SearchOverride,
)
from transformer.data.piece_list import SPACE
from transformer.data.tokenizer import Tokenizer, Tokenizers, read_models
from transformer.decoding.arguments import search_override
from transformer.decoding.batched import BatchedDecoder
from transformer.decoding.proof import sound_on_gpu
from transformer.decoding.translator import Translator
from transformer.errors import CheckpointError, InputError
from transformer.model.transformer import Transformer, check_size, load_parameters
from transformer.plugins import SearchBackend
from transformer.run_dir import RunDir, tensor_file
from transformer.run_names import run_path

log = logging.getLogger(__name__)

Choice = TypeVar("Choice", bound=Enum)


def load(
    run_dir: str | Path,
    *,
    checkpoint: str = "auto",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = "auto",
    beam_size: int | None = None,
    length_penalty: float | None = None,
    max_extra: int | None = None,
    batch_tokens: int | None = None,
    engine: str | None = None,
    engine_type: Literal["auto", "float32", "int8", "float16", "bfloat16"] | None = None,
    cuda_graphs: bool | None = None,
    ensemble: Iterable[str | Path] = (),
) -> Translator:
    """The translator of a run directory, to be used from Python: `transformer.load("runs/demo").translate(texts)`.

    run_dir: a directory that training made, finished or not; or a run on the hub, "hf:OWNER/NAME" or
        "hf:OWNER/NAME@REVISION", which is fetched once.
    checkpoint: "averaged", "best", "last", "step-1200", or "auto": the average, or the last where that is newer.
    device: "auto" is the GPU where there is one.
    precision: the arithmetic of the forward pass; "auto" is that in which the run was trained; on another kind of
        device, or where this one is slow at it, it is chosen by rule.
    beam_size: how many hypotheses the search keeps (section 6.1); 1 is greedy search.
    length_penalty: alpha of ((5 + |Y|) / 6)^alpha; larger prefers longer translations.
    max_extra: a translation has at most this many pieces more than its source.
    batch_tokens: the size of a batch, in padded source pieces times `beam_size`, which decides how much memory is
        needed. A CPU holds as many batches as torch has threads, but at most 8.
    engine: what searches: "torch", or "ctranslate2", which writes a copy of the weights into the run once.
    engine_type: the type of that copy; "auto" is int8 where the processor multiplies it, else float32.
    cuda_graphs: let a GPU replay the recorded steps of a beam search, where the host would launch every kernel.
    ensemble: other runs with the same tokenizer: at each step the probabilities of all models are averaged.

    None leaves a search setting as the run was trained with. The number of CPU threads is torch's. On a GPU, the
    process uses no attention of cuDNN's from now on, which would plan anew for every shape of a batch.

    Raises InputError for a value that cannot be, where there is no such run or checkpoint, and for an ensemble whose
    tokenizers differ; CheckpointError where a run is damaged.
    """
    if isinstance(ensemble, str | Path):
        raise InputError(f"ensemble takes a list of runs: for a single one, write ensemble=[{str(ensemble)!r}]")
    if not isinstance(ensemble, Iterable):
        raise InputError(f"ensemble={shown(ensemble)} must be a list of runs: for none, leave it out")
    if not isinstance(checkpoint, str):
        raise InputError(f"checkpoint={shown(checkpoint)} must be a name, such as 'best' or 'step-1200'")
    return load_translator(
        run_path(str(path_of("run_dir", run_dir)), "run_dir"),
        checkpoint=checkpoint,
        search=search_override(
            beam_size,
            length_penalty,
            max_extra=max_extra,
            batch_tokens=batch_tokens,
            engine=_engine(engine),
            engine_type=None if engine_type is None else _choose(EngineType, "engine_type", engine_type),
            cuda_graphs=cuda_graphs,
        ),
        device=_choose(Device, "device", device),
        precision=_choose(Precision, "precision", precision),
        ensemble=[run_path(str(path_of("a run of ensemble", other)), "ensemble") for other in ensemble],
    )


def _engine(name: object) -> str | None:
    """What a user named: a plug-in that is named here may be another package's. Raises InputError."""
    if name is None:
        return None
    try:
        registry.check_known("search", "engine", str(name))
    except ValueError as error:
        raise InputError(str(error)) from None
    registry.allow(str(name))
    return str(name)


def _choose(kind: type[Choice], name: str, value: str) -> Choice:
    """The member of an enum that a user named. Raises InputError if there is none of that name."""
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(str(member.value) for member in kind)
        raise InputError(f"{name}={shown(value)} is not one of {known}") from None


def load_translator(
    run_dir: Path,
    *,
    checkpoint: str,
    search: SearchOverride,
    device: Device,
    precision: Precision,
    ensemble: Sequence[Path] = (),
) -> Translator:
    """The translator of a run, or of an ensemble of runs: search settings and arithmetic are those of the first.

    `checkpoint` names the one to be loaded from each run. Raises InputError where there is nothing to load, or the
    tokenizers differ; CheckpointError if a run is damaged.
    """
    first_checkpoint = find_checkpoint(run_dir, checkpoint)
    if ensemble and _settings(first_checkpoint, search).engine != TORCH:
        raise InputError("ensemble needs torch: set search.engine=torch")
    translator = build_translator(run_dir, first_checkpoint, search=search, device=device, precision=precision)

    models = read_models(run_dir)
    for other_dir in ensemble:
        other_checkpoint = find_checkpoint(other_dir, checkpoint)
        if read_models(other_dir) != models:
            raise InputError(
                f"ensemble={other_dir}: its tokenizer is not that of {run_dir}: the pieces of one model mean nothing "
                "to the other; train the runs on the same data, or with init_from"
            )
        other = build_translator(
            other_dir, other_checkpoint, search=search, device=device, precision=translator.precision
        )
        translator = replace(
            translator,
            decoder=translator.decoder.joined(other.decoder),
            weights=[*translator.weights, *other.weights],
        )
    return translator


def load_for(job: TranslateJob | ScoreJob) -> Translator:
    """The translator of a job's settings. Raises what `load_translator` does, and InputError for an unknown tag."""
    is_searched = isinstance(job, TranslateJob)
    translator = load_translator(
        Path(job.run_dir),
        checkpoint=job.checkpoint,
        search=job.search if is_searched else replace(job.search, engine=TORCH),
        device=job.device,
        precision=job.precision,
        ensemble=[Path(other) for other in job.ensemble],
    )
    translator.check_tag(job.tag, key="tag")
    return translator


def build_translator(
    run_dir: Path, checkpoint: Checkpoint, *, search: SearchOverride, device: Device, precision: Precision
) -> Translator:
    """The translator of a checkpoint, with the run's tokenizer and, where `search` is silent, its search settings.

    Raises CheckpointError where the parts do not belong together or are damaged.
    """
    run = RunDir(run_dir)
    models = read_models(run.path)
    run.check_tokenizers(models)
    tokenizers = Tokenizers.of(models, run.path)

    torch_device = resolve_device(device)
    if device is Device.auto and torch_device.type == "cpu" and (obstacle := gpu_obstacle()) is not None:
        log.warning("computing on the CPU: %s", obstacle)
    avoid_cudnn_attention(torch_device)
    if precision is Precision.auto:
        precision = _precision_of(run, torch_device)
    settings = _settings(checkpoint, search)
    model = _read_model(checkpoint, run, tokenizers)

    with memory_errors_named("loading the model", remedy="end what else uses it, or set device=cpu"):
        model = model.to(torch_device, dtype_of(precision)).eval()
        decoder = sound_on_gpu(BatchedDecoder.of(model, settings, device=torch_device, precision=precision), run)
        weights = checkpoint.manifest.files[tensor_file(checkpoint.weights_name)].sha256
        translator = Translator(
            tokenizers,
            decoder,
            tags=_learnt_tags(checkpoint, tokenizers.source),
            is_tagged=bool(checkpoint.settings("data", DataConfig).required_tags()),
            weights=[weights],
        )
        backend: SearchBackend = registry.find("search", settings.engine)
        return backend.with_engine(translator, run, checkpoint)


def _read_model(checkpoint: Checkpoint, run: RunDir, tokenizers: Tokenizers) -> Transformer:
    """The model of a checkpoint, on the CPU. Raises CheckpointError where it does not fit the run's tokenizer."""
    config = checkpoint.settings("model", ModelConfig)
    tensors = checkpoint.weights()
    vocab_size = tokenizers.vocab_sizes
    try:
        if checkpoint.run_state().vocab_sizes != vocab_size:
            names = " and ".join(str(run.path / name) for name in tokenizers.models)
            raise ValueError(f"made for another tokenizer than {names}")
        check_size(config, vocab_size, tensors)
        model = Transformer(config, vocab_size)
        if any(tensor.dtype is torch.float64 for tensor in tensors.values()):  # which a narrower model would round
            model = model.double()
        load_parameters(model, tensors)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: does not fit: {error}") from error
    return model


def _learnt_tags(checkpoint: Checkpoint, tokenizer: Tokenizer) -> list[str]:
    """The tags of the training sets; where the weights began elsewhere, what looks like a tag of the tokenizer, too."""
    data = checkpoint.settings("data", DataConfig)
    tags = data.learnt_tags()
    is_from_elsewhere = checkpoint.config.get("init_from") is not None or not data.train.title  # or a published model
    if is_from_elsewhere:
        words = (piece.removeprefix(SPACE) for piece in tokenizer.pieces())
        tags += [word for word in words if TAG.fullmatch(word) and tokenizer.has_word(word)]
    return list(dict.fromkeys(tags))


def _settings(checkpoint: Checkpoint, search: SearchOverride) -> SearchConfig:
    """The run's search settings, with those of a command. Raises InputError where they do not go together."""
    try:
        return search.over(checkpoint.settings("search", SearchConfig))
    except ValueError as error:
        raise InputError(str(error)) from None


def _precision_of(run: RunDir, device: torch.device) -> Precision:
    """The precision that the run was trained and scored in; by rule, if that was on another kind of device.

    A run trained in bf16 keeps it only where the hardware multiplies bf16: elsewhere it is slow, and the bits differ.
    """
    by_rule = resolve_precision(Precision.auto, device)
    if not run.record.exists():  # it is optional for inference
        log.warning(
            "%s is missing, so the precision of training is unknown: using %s",
            run.record,
            by_rule.value,
        )
        return by_rule

    trained = run.read_record().resolved
    if trained.device.name != device.type:
        return by_rule
    is_slow = trained.precision is Precision.bf16 and by_rule is not Precision.bf16
    return by_rule if is_slow else trained.precision
