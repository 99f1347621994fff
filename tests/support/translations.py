"""Models with random weights that translate text, and what the command writes for them."""

import io
import json
import random
from pathlib import Path
from typing import Any

import torch

from transformer.checkpoint import commit
from transformer.config.jobs import TrainJob, TranslateJob
from transformer.config.primitives import to_json
from transformer.config.settings import (
    DataConfig,
    Device,
    ExtraConfig,
    FilterConfig,
    ModelConfig,
    Precision,
    SearchConfig,
)
from transformer.data.tokenizer import Tokenizer, Tokenizers
from transformer.decoding.batched import BatchedDecoder
from transformer.decoding.translate_stream import run as translate
from transformer.decoding.translator import Translator
from transformer.model.transformer import Transformer, parameters_by_name
from transformer.records import CheckpointState

WORDS = "the a dog cat house tree green small sees under over runs sleeps near two old and with water bird ."
CONFIG = ModelConfig(n_layers=1, d_model=16, d_ff=32, n_heads=2, max_positions=60, tie_embeddings=False)
SEARCH = SearchConfig(max_extra=8, batch_tokens=2_000)


def sentences(n: int) -> list[str]:
    draw = random.Random(n)
    return [" ".join(draw.choices(WORDS.split(), k=draw.randint(1, 12))) for _ in range(n)]


def network(
    vocab_size: int, seed: int, dtype: torch.dtype = torch.float32, *, config: ModelConfig = CONFIG
) -> Transformer:
    """Random weights, larger than training would start from: what it writes depends on what it reads."""
    torch.manual_seed(seed)
    model = Transformer(config, vocab_size).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "W_" in name:
                parameter.mul_(2.0)
        model.output.mul_(1.5)
    return model


def translator_with(
    model: Transformer,
    tokenizer: Tokenizer | Tokenizers,
    *,
    search: SearchConfig = SEARCH,
    precision: Precision = Precision.fp64,
) -> Translator:
    """A translator of the model as it is now: a change to its weights would come too late."""
    decoder = BatchedDecoder.of(model, search, device=torch.device("cpu"), precision=precision)
    tokenizers = tokenizer if isinstance(tokenizer, Tokenizers) else Tokenizers(tokenizer, tokenizer)
    return Translator(tokenizers, decoder)


def state_of(vocab_size: int, averaged: list[int] | None = None) -> dict[str, Any]:
    """The state.json of a checkpoint that nothing goes on from."""
    return to_json(CheckpointState(vocab_size, data_digest="unknown", averaged=averaged or []))


def write_run(
    folder: Path,
    spm: bytes,
    *,
    seed: int,
    tag: str | None = None,
    languages: tuple[str | None, str | None] = (None, None),
) -> Path:
    """A run directory with one checkpoint of random weights.

    It may have learnt a tag, of a direction between these languages, and text without one.
    """
    folder.mkdir(parents=True)
    (folder / "tokenizer.model").write_bytes(spm)
    size = Tokenizer(spm).vocab_size
    sets = {} if tag is None else {"tagged": ExtraConfig(tag=tag, src_lang=languages[0], tgt_lang=languages[1])}
    data = DataConfig(filter=FilterConfig(max_length=50), extra=sets)
    config = to_json(TrainJob(model=CONFIG, search=SEARCH, data=data))
    commit(
        folder,
        step=1,
        tensors={"model": parameters_by_name(network(size, seed))},
        state=state_of(size),
        config=config,
    )
    return folder


def output_of(run_dir: Path, given: bytes, **changes: Any) -> str:
    """What the command writes for this input."""
    job = TranslateJob(run_dir=str(run_dir), device=Device.cpu, precision=Precision.fp64, threads=1, **changes)
    stdout = io.BytesIO()
    translate(job, io.BytesIO(given), stdout)
    return stdout.getvalue().decode("utf-8")


def objects_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(row) for row in text.split("\n")[:-1]]
