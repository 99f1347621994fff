"""The proof of a device, a numerical self-check: compares the way that a training will take with the plain one.

    first_sound           builds one way of `ways_of` after the other, until one is sound
      Prover.prove        compares a stage of it: plain_deviation, compiled_deviation, replayed_deviation
    Prover.prove_search   at the first validation: see `decoding.proof`

Loss, gradients, and what the causal mask hides are compared on sentence pairs of the corpus, of all lengths, with the
weights that the training begins with: see `deviation`, and `numerics` for what is equal. If a way raises, deviates or
is not finite, all ranks go on to the next. Each way is recorded before it is tried, so one that ends the process is not
tried again.
"""

import gc
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from transformer.compute import HALF, autocast, memory_errors_named
from transformer.config.jobs import TrainJob
from transformer.config.settings import LayoutKind, Precision
from transformer.data.batch import Batch, collate
from transformer.data.plan import Batching
from transformer.data.store import Ids, Store
from transformer.decoding.batched import BatchedDecoder
from transformer.decoding.proof import SEARCHES, in_way, prove_search
from transformer.distributed import World
from transformer.errors import InputError, Stopped
from transformer.machine import describe_processor
from transformer.model.transformer import Transformer
from transformer.numerics import DeviatesError, check, failures_in_words, tolerance_of
from transformer.records import Proof, Resolved
from transformer.training.cuda_graphs import GraphedComputation
from transformer.training.deviation import (
    Gradient,
    UnrecordedError,
    compare,
    compare_kernel,
    compare_whole,
    compared_batch,
    gradient_of,
    largest_leak,
    plain_gradient,
)
from transformer.training.step import Objective
from transformer.vocabulary import PAD

log = logging.getLogger(__name__)

COMPARED = 4_096  # tokens of a side that are compared, about
SAMPLED = 100_000  # pairs among which those that are compared are chosen
ANOTHER_MASK = 1.5  # a compiled step's gradient may differ by so many times as much as another dropout mask makes
MASKS = 5  # under which an uncompiled step's loss is computed: it is the mean of few tokens where a step has no more
REMEDY = "set train.device=cpu, or train.proof=false if you know better"
LAUNCHES = "the same command goes on, with every kernel launched by the host"
SPREADS = 6.0  # of these losses' standard deviations, by which a compiled step's may differ


Found = TypeVar("Found")


# ---- the ways, and their names --------------------------------------------------------------------------------------


def name_of(way: Resolved) -> str:
    """What decides on how a step is computed, in words: `packed (varlen), compiled, bf16`."""
    kernels = [] if way.attention_kernel is None else [way.attention_kernel.value]
    kernels += [] if way.loss_rows is None else ["loss in Triton"]
    layout = way.layout.value + (f" ({', '.join(kernels)})" if kernels else "")
    graphs = ", CUDA graphs" if way.cuda_graphs else ""
    return f"{layout}, {'compiled' if way.compile else 'not compiled'}{graphs}, {way.precision.value}"


def ways_of(resolved: Resolved) -> list[Resolved]:
    """The ways to compute, each with less that can go wrong: as resolved, then without graphs, and without a compiler;
    then plainly, and in fp32.
    """
    as_resolved = [
        replace(resolved, compile=compiles, cuda_graphs=replays)
        for compiles in (resolved.compile, False)
        for replays in (resolved.cuda_graphs, False)
    ]
    plain = replace(
        as_resolved[-1],
        layout=LayoutKind.padded,
        attention_kernel=None,
        loss_rows=None,
    )
    full = replace(plain, precision=Precision.fp32) if plain.precision in HALF else plain
    return list(dict.fromkeys([*as_resolved, plain, full]))


def stages_of(way: Resolved) -> list[Resolved]:
    """What of a way is compared, one after the other: without compiler and graphs, then compiled, then replayed."""
    uncompiled = replace(way, compile=False, cuda_graphs=False)
    return list(dict.fromkeys([uncompiled, replace(way, cuda_graphs=False), way]))


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else describe_processor()


def wants_proof(job: TrainJob, device: torch.device) -> bool:
    """Whether a device is to be compared: as `train.proof` says, by rule a GPU."""
    return device.type == "cuda" if job.train.proof is None else job.train.proof


# ---- which of them are sound ----------------------------------------------------------------------------------------


class UnsoundError(Exception):
    """A way is not to be taken; why has been said."""


def first_sound(prover: "Prover", resolved: Resolved, build: Callable[[Resolved], Found]) -> Found:
    """What `build` makes of the first way that it finds sound: it raises UnsoundError for another.

    Raises InputError where there is no such way.
    """
    for way in ways_of(resolved):
        if prover.may_take(way):
            with suppress(UnsoundError):
                return build(way)
            gc.collect()  # the modules of a compiler and of DDP hold each other, and memory

    failures = "; ".join(f"{name}: {why}" for name, why in prover.proof.failures.items())
    raise InputError(f"no training step computes correctly on {prover.proof.device} ({failures}): {REMEDY}")


class Prover:
    """Tries ways on every rank, and keeps what was found: `keep` writes it down, on rank 0.

    `compares`: else a way is taken for sound, unless its steps could not be replayed, and searches are as they are.
    """

    def __init__(
        self,
        device: torch.device,
        world: World,
        *,
        known: Proof | None,
        keep: Callable[[Proof], None],
        compares: bool,
    ) -> None:
        self.device = device
        self.world = world
        self.proof = Proof(_device_name(device), torch.__version__)
        self.compares = compares
        self._keep_on_rank0 = keep
        self._sound: set[str] = set()  # stages, by name: they are not compared again

        # What an earlier start on this device has found. A way that it did not come back from is not tried again.
        if known is not None and (known.device, known.torch) == (self.proof.device, self.proof.torch):
            self.proof = known
            if known.trying is not None:
                log.warning("%s: not taken: an earlier start died while trying it", known.trying)
                self._keep_failure(known.trying, "the process died while trying it")

    def may_take(self, way: Resolved) -> bool:
        """Whether no stage of a way has failed. All stages of the way that an earlier start has taken are sound."""
        names = [name_of(stage) for stage in stages_of(way)]
        if not self.compares:
            return not (way.cuda_graphs and names[-1] in self.proof.failures)
        if self.proof.way == names[-1]:
            self._sound.update(names)
        return self.proof.failures.keys().isdisjoint(names)

    def prove(self, stage: Resolved, deviation: Callable[[], float]) -> None:
        """Raise UnsoundError unless this stage of a way is sound on every rank: `deviation` raises where it is not.

        Raises InputError where memory runs out, and Stopped where the failure has left a process that cannot go on.
        """
        name = name_of(stage)
        if name in self._sound or not self.compares:
            return

        self._keep(replace(self.proof, trying=name))
        found = math.inf
        failure: DeviatesError | None = None
        try:
            remedy = f"lower train.max_tokens ({name})"
            with memory_errors_named("the device is tried", remedy=remedy), failures_in_words():
                found = deviation()
        except DeviatesError as error:
            failure = error
        except BaseException:  # a signal, or what the user has to change, says nothing about the way
            self._keep(replace(self.proof, trying=None))
            raise

        if not self.world.any(failure is not None):
            self._sound.add(name)
            self._keep(replace(self.proof, trying=None, way=name, deviation=found))
            return

        why = str(failure or "it failed on another rank")
        log.warning("%s: not taken: %.300s (TRANSFORMER_DEBUG=1 --verbose shows more)", name, why)
        self._keep_failure(name, why)
        self._check_device(name)
        if self.world.any(isinstance(failure, UnrecordedError)):
            raise Stopped(f"a step could not be recorded ({why}): {LAUNCHES}")
        raise UnsoundError

    def leave(self, way: Resolved, why: str) -> None:
        """Write down that this way, in which the training has come as far as it has, is not to be taken again."""
        self._keep_failure(name_of(way), why)

    def prove_search(self, decoder: BatchedDecoder) -> BatchedDecoder:
        """The search in a way that is sound on every rank: proven once, then remembered."""
        if not self.compares:
            return decoder
        if self.proof.search is None:
            try:
                way = prove_search(
                    decoder,
                    left=self.proof.failures,
                    begin=lambda name: self._keep(replace(self.proof, trying=name)),
                )
            finally:  # but where the process has ended
                self._keep(replace(self.proof, trying=None))
            self._keep(replace(self.proof, search=max(self.world.gather(way), key=SEARCHES.index)))
        assert self.proof.search is not None
        return in_way(decoder, self.proof.search)

    def _keep_failure(self, name: str, why: str) -> None:
        self._keep(replace(self.proof, trying=None, failures={**self.proof.failures, name: why}))

    def _keep(self, found: Proof) -> None:
        self.proof = found
        if self.world.is_rank0:
            self._keep_on_rank0(found)

    def _check_device(self, name: str) -> None:
        """Raise Stopped, on every rank, where the failure has left a GPU that computes nothing any more."""
        is_broken = False
        try:
            float(torch.rand(2, device=self.device).sum())  # its random numbers, too, may have been left in a recording
        except RuntimeError:
            is_broken = True
        if self.world.any(is_broken):
            raise Stopped(
                f"the GPU does not answer after a failure ({name}): give the same command again, and it takes "
                "another way"
            )


# ---- how far a stage is from a plainer one --------------------------------------------------------------------------


def plain_deviation(way: Resolved, job: TrainJob, *, model: Transformer, store: Store, device: torch.device) -> float:
    """How far the gradient of a way without compiler and graphs is from the plain one.

    `model` is on the device and without gradients, and stays so. Raises DeviatesError where that is too far, and
    InputError where the device computes nothing.
    """
    plain_model = _without_dropout(model)

    def deviation(ids: Ids) -> float:
        try:
            plain = plain_gradient(plain_model, store, ids, label_smoothing=job.train.label_smoothing, device=device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # of the device
            text = str(error).partition("\n")[0]
            name = _device_name(device)
            raise InputError(f"not even a plain step computes correctly on {name} ({text}): {REMEDY}") from error

        if way.attention_kernel is not None:
            compare_kernel(way, job.model, store, ids, device=device)
        batch = compared_batch(way, store, ids).to(device)
        objective = Objective(plain_model, job.train.label_smoothing, loss_rows=way.loss_rows).train()
        found = gradient_of(objective, batch, device=device, precision=way.precision)
        tolerance = tolerance_of(way.precision)
        compare(found, plain, tolerance)
        with autocast(device, way.precision):
            leak = largest_leak(plain_model, batch)
        check("what is predicted before a token that changes", leak, tolerance.leak)
        return found.distance(plain)

    distance = _in_memory(deviation, _pairs_of_all_lengths(store, COMPARED))
    log.info("%s agrees with the plain computation: its gradient differs by %.2g", _device_name(device), distance)
    return distance


def compiled_deviation(
    way: Resolved,
    *,
    objective: Objective,
    parallel: nn.Module,
    store: Store,
    batching: Batching,
    device: torch.device,
) -> float:
    """How far the gradient of `parallel`, as it will train, is from that of the same step uncompiled.

    The two draw other dropout masks. So they may differ about as much as uncompiled steps with other masks do. Raises
    DeviatesError where they differ by more.
    """
    ids = _micro_batch(store, batching)
    batch = collate(store, ids, batching.capacities, kernel=batching.kernel).to(device)
    eager = Objective(objective.model, objective.label_smoothing, loss_rows=objective.loss_rows).train()

    def gradient(module: nn.Module, seed: int) -> Gradient:
        torch.manual_seed(seed)
        return gradient_of(module, batch, device=device, precision=way.precision)

    compiled = gradient(parallel, 1)
    wanted = gradient(eager, 1)
    other = gradient(eager, 2)
    losses = [wanted.loss, other.loss, *(gradient(eager, seed).loss for seed in range(3, MASKS + 1))]
    spread = float(torch.tensor(losses).std()) / wanted.loss
    tolerance = tolerance_of(way.precision)
    return compare_whole(
        compiled,
        wanted,
        loss=tolerance.loss + SPREADS * spread,
        gradient=tolerance.gradient + ANOTHER_MASK * other.distance(wanted),
    )


def replayed_deviation(
    way: Resolved, *, graphed: GraphedComputation, store: Store, batching: Batching, device: torch.device
) -> float:
    """How far the gradient that is replayed is from the same one without a graph, and the same dropout.

    It is recorded with the sentences in another order, and another seed: a replay must read both anew. Raises
    DeviatesError where it is too far, and UnrecordedError where the GPU does not record it.
    """
    ids = _micro_batch(store, batching)
    batch, reversed_batch = (
        collate(store, some, batching.capacities, kernel=batching.kernel).to(device) for some in (ids, ids[::-1])
    )
    share = 1.0 / int((batch.target_out != PAD).sum())
    in_place = batching.micro_batch_multiple > 1 or batching.tokens_per_step > batching.max_tokens

    def gradient(batch: Batch, seed: int) -> Gradient:
        losses, by_name = graphed.try_gradient(batch, seed=seed, share=share, in_place=in_place)
        return Gradient(losses.tolist()[0] * share, by_name)

    try:
        with suppress(torch.OutOfMemoryError):
            wanted = gradient(batch, 1)  # the first one is computed without a graph
            gradient(reversed_batch, 2)  # recorded
            found = gradient(batch, 1)
            if graphed.is_recording:
                tolerance = tolerance_of(way.precision)
                return compare_whole(found, wanted, loss=tolerance.loss, gradient=tolerance.gradient)
    finally:
        graphed.forget()
    if graphed.failure is not None:
        raise UnrecordedError(graphed.failure)
    raise DeviatesError("its memory does not hold what is recorded")


# ---- what is compared -----------------------------------------------------------------------------------------------


def _without_dropout(model: Transformer) -> Transformer:
    """A model with the very parameters of this one that computes the same without dropout."""
    config = replace(model.config, dropout=0.0, attention_dropout=0.0, relu_dropout=0.0)
    with torch.device("meta"):  # nothing is drawn
        other = Transformer(config, model.vocab_sizes)
    other.load_state_dict(model.state_dict(keep_vars=True), assign=True)
    for name, buffer in model.named_buffers():
        module, _, own_name = name.rpartition(".")
        setattr(other.get_submodule(module), own_name, buffer)
    return other


def _pairs_of_all_lengths(store: Store, tokens: int) -> Ids:
    """Pairs from the longest to the shortest at even steps: about so many tokens on either side, or one pair."""
    stride = -(-len(store) // SAMPLED)
    sample = store.lengths[::stride]
    longest_first = np.argsort(sample.max(axis=1), kind="stable")[::-1]

    # Every n-th of them: the longest is among them, and they are a little fewer than fit.
    longest = int(sample.max())
    every = int(sample.sum(axis=0, dtype=np.int64).max()) // max(1, tokens - longest) + 1
    return stride * longest_first[::every]


def _micro_batch(store: Store, batching: Batching) -> Ids:
    """The pairs of a micro-batch that is nearly full, of all lengths."""
    tokens = min(batching.capacities or [batching.max_tokens])
    return batching.split(_pairs_of_all_lengths(store, tokens), store.lengths)[0]


def _in_memory(compute: Callable[[Ids], Found], ids: Ids) -> Found:
    """What is computed of these pairs, or of every other one, and so on, until memory suffices. The longest stays."""
    while True:
        with suppress(torch.OutOfMemoryError):
            return compute(ids)
        if len(ids) == 1:
            return compute(ids)
        ids = ids[::2]
