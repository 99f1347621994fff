"""The contenders of train.py: one process each, which builds its model and then takes steps when the parent asks.

Runs under any Python with torch and numpy, since Hugging Face's contender has an environment of its own: nothing of the
package is imported, but in `ours`. Requests and answers are lines of JSON on stdin and stdout: a Spec, answered by what
was built, then the first and the last of some steps, answered by the time that they took.

`B` sentences, `S` source and `T` target positions, `V` vocabulary.
"""

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from answering import Request, answer
from torch import Tensor, nn
from torch.nn import functional as F
from weights import Weights, as_marian, as_torch, read_weights

PAD, BOS, EOS = 0, 2, 3
DROPOUT, SMOOTHING = 0.1, 0.1
PEAK_RATE, WARMUP_STEPS = 3e-4, 20

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Shape:
    """The model; `n_layers` in the encoder, and as many in the decoder."""

    n_layers: int
    d_model: int
    d_ff: int
    n_heads: int


@dataclass(frozen=True)
class Spec:
    """What a worker is to build."""

    peer: str
    shape: Shape
    vocab_size: int
    longest: int  # positions that a sentence may take
    precision: str  # fp32, bf16
    device: str  # cpu, cuda
    threads: int
    batches: str  # .npz: `source/N` and `target/N` of step N, (B, S) and (B, T) int64: pieces + EOS, then PAD
    job: dict[str, Any]  # the same for the package: a TrainJob
    weights: str = ""  # .npz: those that all begin with; "": each draws its own


class Taken(NamedTuple):
    """One step: the smoothed loss before its update, a mean over the target tokens, and its real tokens."""

    loss: float
    source_tokens: int
    target_tokens: int


@dataclass(frozen=True)
class Contender:
    """What a worker has built. `ready` gets steps, untimed: the next ones, or some from the first on again.

    Calling what it returns takes them.
    """

    parameters: int
    settings: dict[str, Any]
    versions: dict[str, str]
    ready: Callable[[range], Callable[[], list[Taken]]]


def rate(step: int) -> float:
    """The learning rate of step `step`, counted from 0: a linear warm-up, then constant."""
    return PEAK_RATE * min(1.0, (step + 1) / WARMUP_STEPS)


def ours(spec: Spec) -> Contender:
    """The package as `transformer train` uses it, its loader's waits included: all that this file knows of it."""
    from transformer.compute import dtype_of, loss_scaler
    from transformer.config.jobs import TrainJob
    from transformer.config.primitives import from_json, to_json
    from transformer.data.loader import Position, Step, load_steps
    from transformer.data.prepare import prepare
    from transformer.machine import limit_kernel_caches
    from transformer.model.transformer import Transformer, load_parameters
    from transformer.training.cuda_graphs import GraphedComputation
    from transformer.training.optimizer import build_optimizer
    from transformer.training.resolve import batching_of, resolve_settings
    from transformer.training.step import Computation, Objective, train_step

    limit_kernel_caches()
    job = from_json(TrainJob, spec.job)
    resolved = resolve_settings(job, 1)
    device, precision = torch.device(resolved.device.name), resolved.precision
    model = Transformer(job.model, spec.vocab_size).to(device, dtype_of(precision))
    if spec.weights:
        tensors = {name: torch.from_numpy(array) for name, array in read_weights(spec.weights)[0].items()}
        load_parameters(model, tensors)
    objective = Objective(model, job.train.label_smoothing).train()
    if resolved.compile:
        objective.compile()
    optimizer, scaler = build_optimizer(model, job.train), loss_scaler(device, precision)
    computation = Computation(objective, optimizer, scaler, job.train.clip_norm, device, precision)
    if resolved.cuda_graphs:
        computation = GraphedComputation(computation, reduces=False)
    prepared = prepare(job)

    def steps_from(start: int) -> Iterator[Step]:
        return load_steps(
            lambda epoch: prepared.store,
            batching_of(job, resolved, lengths=prepared.store.lengths, mixture=prepared.mixture),
            rank=0,
            world_size=1,
            position=Position(0, 0, start),
            prefetch=job.train.prefetch,
            device=device,
        )

    updates = itertools.count()
    steps: Iterator[Step] = iter(())
    following = -1  # the step that comes next out of `steps`

    def take(step: Step) -> Taken:
        result = train_step(computation, step, world_size=1, rate=rate(next(updates)), seed=job.train.seed)
        return Taken(float(result.loss_sum) / step.target_tokens, step.source_tokens, step.target_tokens)

    def ready(indices: range) -> Callable[[], list[Taken]]:
        nonlocal steps, following
        if indices.start != following:
            steps = steps_from(indices.start)
        following = indices.stop
        first = next(steps)  # so the loader works ahead, as it does in the middle of a training
        taken = islice(chain([first], steps), len(indices))
        return lambda: list(map(take, taken))

    return Contender(count(model), to_json(resolved), {}, ready)


def plain(spec: Spec) -> Contender:
    """torch.nn.Transformer in a loop."""
    return padded_loop(spec, PlainTransformer(spec), {})


def plain_compiled(spec: Spec) -> Contender:
    """The same, compiled as a whole for batches of any shape, and anew: nothing of an earlier run is used."""
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    model = PlainTransformer(spec)
    model.compile(dynamic=True)
    return padded_loop(spec, model, {})


def marian(spec: Spec) -> Contender:
    """Hugging Face's MarianMTModel in the same loop."""
    import transformers

    return padded_loop(spec, Marian(spec), {"transformers": transformers.__version__})


class PlainTransformer(nn.Module):
    """torch.nn.Transformer between one shared matrix: embeddings times sqrt(d_model) plus sinusoids, and the output.

    Dropout is where the paper has it, on embeddings and sub-layers: by itself the module also drops attention weights
    and the feed-forward's inside, which costs it time (and the fast kernel of its attention).
    """

    sinusoids: Tensor

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        d_model, layers = spec.shape.d_model, spec.shape.n_layers
        self.embedding = nn.Embedding(spec.vocab_size, d_model)
        nn.init.normal_(self.embedding.weight, std=d_model**-0.5)
        angle = torch.arange(spec.longest).unsqueeze(1) * 10_000.0 ** (-torch.arange(0, d_model, 2) / d_model)
        self.register_buffer("sinusoids", torch.stack((angle.sin(), angle.cos()), -1).flatten(1), persistent=False)
        self.dropout = nn.Dropout(DROPOUT)
        self.transformer = nn.Transformer(
            d_model, spec.shape.n_heads, layers, layers, spec.shape.d_ff, DROPOUT, batch_first=True
        )
        for module in self.transformer.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
            if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                module.dropout.p = 0.0
        if spec.weights:
            copy_weights(self, as_torch(read_weights(spec.weights)[0]))

    def forward(self, source: Tensor, target: Tensor, padding: Tensor | None) -> Tensor:
        """Source `(B, S)`, decoder input `(B, T)`, and where the source is padding, if anywhere -> logits `(B, T, V)`.

        Causal attention needs no padding mask, for padding stands at the right; without one it takes the fast kernel.
        """
        hidden = self.transformer(
            self.embed(source),
            self.embed(target),
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device),
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return F.linear(hidden, self.embedding.weight)

    def embed(self, tokens: Tensor) -> Tensor:
        """`(B, T)` -> `(B, T, d_model)`."""
        scale = math.sqrt(self.embedding.embedding_dim)
        embedded: Tensor = self.dropout(self.embedding(tokens) * scale + self.sinusoids[: tokens.shape[1]])
        return embedded


class Marian(nn.Module):
    """MarianMTModel of the same size."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.model = marian_model(spec.shape, spec.vocab_size, longest=spec.longest, weights=spec.weights)

    def forward(self, source: Tensor, target: Tensor, padding: Tensor | None) -> Tensor:
        """As PlainTransformer's."""
        visible = None if padding is None else ~padding
        output = self.model(input_ids=source, attention_mask=visible, decoder_input_ids=target, use_cache=False)
        logits: Tensor = output.logits
        return logits


def marian_model(shape: Shape, vocab_size: int, *, longest: int, weights: str) -> Any:
    """Hugging Face's model of this size, with the weights of a file, or with random ones as it draws them."""
    from transformers import MarianConfig, MarianMTModel

    config = MarianConfig(
        vocab_size=vocab_size,
        max_position_embeddings=longest,
        d_model=shape.d_model,
        encoder_layers=shape.n_layers,
        decoder_layers=shape.n_layers,
        encoder_attention_heads=shape.n_heads,
        decoder_attention_heads=shape.n_heads,
        encoder_ffn_dim=shape.d_ff,
        decoder_ffn_dim=shape.d_ff,
        activation_function="relu",
        scale_embedding=True,
        tie_word_embeddings=True,
        dropout=DROPOUT,
        attention_dropout=0.0,
        activation_dropout=0.0,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        decoder_start_token_id=BOS,
        forced_eos_token_id=None,
    )
    model = MarianMTModel(config)
    if weights:
        own, positions = read_weights(weights)
        tables = {f"model.{stack}.embed_positions.weight": positions[:longest] for stack in ("encoder", "decoder")}
        copy_weights(model, as_marian(own) | tables)
    return model


def copy_weights(model: nn.Module, arrays: Weights) -> None:
    """Give a model these weights; of what is not named, biases become 0 and gains stay 1."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            if name in arrays:
                parameter.copy_(torch.from_numpy(arrays[name]))
            elif name.endswith("bias"):
                parameter.zero_()
    if unknown := arrays.keys() - parameters.keys():
        raise ValueError(f"the model has no {', '.join(sorted(unknown))}")


def padded_loop(spec: Spec, model: nn.Module, versions: dict[str, str]) -> Contender:
    """The loop that a user writes around a model of padded batches: a step is one batch, made before the clock runs."""
    device = torch.device(spec.device)
    model = model.to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.98), eps=1e-9, fused=True)
    file = np.load(spec.batches)
    updates = itertools.count()

    def take(batch: Batch) -> Tensor:
        padding = None if batch.padding is None else batch.padding.to(device)
        with torch.autocast(device.type, torch.bfloat16) if spec.precision == "bf16" else nullcontext():
            logits = model(batch.source.to(device), batch.target_in.to(device), padding).flatten(0, 1)  # (B * T, V)
            classes = batch.target_out.to(device).flatten()
            loss = F.cross_entropy(logits, classes, ignore_index=PAD, label_smoothing=SMOOTHING)
        update = next(updates)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for group in optimizer.param_groups:
            group["lr"] = rate(update)
        optimizer.step()
        return loss.detach()

    def ready(indices: range) -> Callable[[], list[Taken]]:
        batches = [Batch.of(file[f"source/{index}"], file[f"target/{index}"]) for index in indices]

        def turn() -> list[Taken]:
            losses = list(map(take, batches))  # read only after the last step: reading is waiting for a GPU
            return [
                Taken(float(loss), batch.source_tokens, batch.target_tokens)
                for loss, batch in zip(losses, batches, strict=True)
            ]

        return turn

    return Contender(count(model), {}, versions, ready)


class Batch(NamedTuple):
    """Padded sentences, ready for a model."""

    source: Tensor  # (B, S)
    padding: Tensor | None  # (B, S) bool: where the source is padding; None: nowhere
    target_in: Tensor  # (B, T): the target one place later, behind BOS
    target_out: Tensor  # (B, T)
    source_tokens: int
    target_tokens: int

    @classmethod
    def of(cls, source_ids: Ids, target_ids: Ids) -> "Batch":
        """From pieces + EOS, then PAD."""
        source, target = torch.from_numpy(source_ids), torch.from_numpy(target_ids)
        padding = source.eq(PAD) if source.eq(PAD).any() else None
        target_in = F.pad(target[:, :-1], (1, 0), value=BOS)
        return cls(source, padding, target_in, target, int(source.count_nonzero()), int(target.count_nonzero()))


def count(model: nn.Module) -> int:
    """Trained numbers."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


CONTENDERS: dict[str, Callable[[Spec], Contender]] = {
    "ours": ours,
    "plain": plain,
    "plain_compiled": plain_compiled,
    "marian": marian,
}


def serve(first: dict[str, Any], requests: Iterator[Request]) -> Iterator[dict[str, Any]]:
    """The answers: first what was built, then each turn as its request comes in."""
    spec = Spec(**first | {"shape": Shape(**first["shape"])})
    torch.set_num_threads(spec.threads)
    torch.manual_seed(1)
    contender = CONTENDERS[spec.peer](spec)
    versions = contender.versions | {"torch": torch.__version__}
    yield {"parameters": contender.parameters, "settings": contender.settings, "versions": versions}
    for start, stop in requests:
        turn = contender.ready(range(start, stop))
        wait_for(spec.device)
        began = time.perf_counter()
        taken = turn()
        wait_for(spec.device)
        yield {"seconds": time.perf_counter() - began, "steps": [step._asdict() for step in taken]}


def wait_for(device: str) -> None:
    """A GPU works on while the host goes ahead; a clock must wait for it."""
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    answer(serve)
