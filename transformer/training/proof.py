"""The proof of a device: the way that a training will take, compared with the plain one before the first step.

    prove                 the first sound one of `ways_of`, compared without dropout and without the compiler
    prove_compiled        the compiled step as it will train, compared with the same step uncompiled
    prove_graphed         the gradient that the GPU replays, compared with the one that the host launches
    Prover.prove_search   at the first validation: see `decoding.proof`

Loss, gradients, and what the causal mask hides are compared on sentence pairs of the corpus, of all lengths, with the
weights that the training begins with: see `deviation`. A way that raises, deviates or is not finite is left for the
next, on all ranks alike. What is being tried is written down before it is tried: a way that ends the process is not
taken again.
"""

import logging
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from transformer.compute import HALF, autocast
from transformer.config.jobs import TrainJob
from transformer.config.settings import LayoutKind, Precision
from transformer.data.batch import Batch, collate
from transformer.data.plan import Batching
from transformer.data.store import Ids, Store
from transformer.decoding.batches import Batches
from transformer.decoding.proof import SEARCHES, in_way, prove_search
from transformer.distributed import World
from transformer.errors import InputError, Stopped, TransformerError
from transformer.machine import describe_processor
from transformer.model.transformer import Transformer
from transformer.records import Proof, Resolved
from transformer.training.cuda_graphs import GraphedComputation
from transformer.training.deviation import (
    MOST_LEAK,
    TOLERANCES,
    DeviatesError,
    Gradient,
    compare,
    compare_kernel,
    compare_losses,
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
    """The plainest ways to compute, each with less that can go wrong: as resolved, plainly, and in fp32."""
    as_resolved = replace(resolved, compile=False, cuda_graphs=False)
    plain = replace(as_resolved, layout=LayoutKind.padded, attention_kernel=None, loss_rows=None)
    full = replace(plain, precision=Precision.fp32) if plain.precision in HALF else plain
    return list(dict.fromkeys([as_resolved, plain, full]))


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else describe_processor()


def wants_proof(job: TrainJob, device: torch.device) -> bool:
    """Whether a device is to be compared: as `train.proof` says, by rule a GPU."""
    return device.type == "cuda" if job.train.proof is None else job.train.proof


# ---- which of them are sound ----------------------------------------------------------------------------------------


class Prover:
    """Tries ways on every rank, and keeps what was found: `keep` writes it down, on rank 0."""

    def __init__(
        self, device: torch.device, world: World, *, known: Proof | None, keep: Callable[[Proof], None]
    ) -> None:
        self.device = device
        self.world = world
        self.proof = Proof(_device_name(device), torch.__version__)
        self._keep_on_rank0 = keep

        # What an earlier start on this device has found. A way that it did not come back from is not tried again.
        if known is not None and (known.device, known.torch) == (self.proof.device, self.proof.torch):
            self.proof = known
            if known.trying is not None:
                log.warning("%s: not taken: an earlier start ended while it was tried", known.trying)
                failures = {**known.failures, known.trying: "the process ended while it was tried"}
                self._keep(replace(self.proof, trying=None, failures=failures))

    def knows(self, way: Resolved) -> bool:
        """Whether this way has been found sound here, and is to be taken."""
        return self.proof.way == name_of(way)

    def prove_search(self, batches: Batches) -> Batches:
        """The same search in a way that is sound on every rank: proven once, and known from then on."""
        if self.proof.search is None:
            try:
                _, way = prove_search(
                    batches,
                    left=self.proof.failures,
                    begin=lambda name: self._keep(replace(self.proof, trying=name)),
                )
            finally:  # but where the process has ended
                self._keep(replace(self.proof, trying=None))
            self._keep(replace(self.proof, search=max(self.world.gather(way), key=SEARCHES.index)))
        assert self.proof.search is not None
        return in_way(batches, self.proof.search)

    def holds(self, way: Resolved, deviation: Callable[[], float]) -> bool:
        """Whether a way is sound on every rank: `deviation` compares it, and raises where it is not.

        Raises InputError where memory runs out, and Stopped where the device does not answer any more.
        """
        name = name_of(way)
        if name in self.proof.failures:
            return False

        self._keep(replace(self.proof, trying=name))
        found = math.inf
        failure = None
        try:
            found = deviation()
        except torch.OutOfMemoryError as error:
            self._keep(replace(self.proof, trying=None))
            raise InputError(f"out of GPU memory while the device is tried: lower train.max_tokens ({name})") from error
        except TransformerError:
            self._keep(replace(self.proof, trying=None))
            raise
        except Exception as error:  # whatever a compiler, a driver or a kernel raises
            log.debug("%s", name, exc_info=True)
            text = " ".join(str(error).split("\n")[:2]).strip()  # a compiler names its own error in the second line
            failure = text if isinstance(error, DeviatesError) else f"{type(error).__name__}: {text}"
        except BaseException:  # a signal says nothing about the way
            self._keep(replace(self.proof, trying=None))
            raise

        if not self.world.any(failure is not None):
            self._keep(replace(self.proof, trying=None, way=name, deviation=found))
            return True

        failure = failure or "it failed on another rank"
        log.warning("%s: not taken: %.300s (TRANSFORMER_DEBUG=1 --verbose shows more)", name, failure)
        self._keep(replace(self.proof, trying=None, failures={**self.proof.failures, name: failure}))
        self._check_device(name)
        return False

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
            raise Stopped(f"the GPU does not answer after a failure ({name}): the same command takes another way")


def prove(prover: Prover, job: TrainJob, resolved: Resolved, *, model: Transformer, store: Store) -> Resolved:
    """The settings with the first way that is sound, uncompiled and without graphs; as resolved, if that is the first.

    `model` is on the device and without gradients, and stays so. Raises InputError where no way is sound.
    """
    plain_model = _without_dropout(model)
    remedy = "set train.device=cpu, or train.proof=false if you know better"

    def plain_of(ids: Ids) -> Gradient:
        return plain_gradient(plain_model, store, ids, label_smoothing=job.train.label_smoothing, device=prover.device)

    all_ids = _pairs_of_all_lengths(store, COMPARED)
    try:
        ids, plain = _in_memory(lambda ids: (ids, plain_of(ids)), all_ids)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # of the device
        text = str(error).partition("\n")[0]
        raise InputError(f"{prover.proof.device} does not compute even a plain step ({text}): {remedy}") from error

    def deviation(way: Resolved, compared: Ids) -> float:
        wanted = plain if len(compared) == len(ids) else plain_of(compared)
        if way.attention_kernel is not None:
            compare_kernel(way, job.model, store, compared, device=prover.device)
        batch = compared_batch(way, store, compared).to(prover.device)
        objective = Objective(plain_model, job.train.label_smoothing, loss_rows=way.loss_rows).train()
        found = gradient_of(objective, batch, device=prover.device, precision=way.precision)
        compare(found, wanted, TOLERANCES[way.precision in HALF])
        with autocast(prover.device, way.precision):
            leak = largest_leak(plain_model, batch)
        if not leak <= MOST_LEAK:
            raise DeviatesError(f"what is predicted depends on later tokens (by {leak:.2g})")
        return found.distance(wanted)

    for way in ways_of(resolved):
        if prover.holds(way, lambda way=way: _in_memory(partial(deviation, way), ids)):  # type: ignore[misc]
            is_first = way == replace(resolved, compile=False, cuda_graphs=False)
            log.info(
                "%s computes as the plain way does: its gradient differs by %.2g",
                prover.proof.device,
                prover.proof.deviation,
            )
            return resolved if is_first else way
    failures = "; ".join(f"{name}: {why}" for name, why in prover.proof.failures.items())
    raise InputError(f"{prover.proof.device} computes no step as it should ({failures}): {remedy}")


def prove_compiled(
    prover: Prover, resolved: Resolved, *, objective: Objective, parallel: nn.Module, store: Store, batching: Batching
) -> bool:
    """Whether the compiled step is sound: `parallel` as it will train, against the same step uncompiled.

    The two draw other dropout masks. So they may differ about as much as uncompiled steps with other masks do.
    """
    ids = _micro_batch(store, batching)
    batch = collate(store, ids, batching.capacities, kernel=batching.kernel).to(prover.device)
    eager = Objective(objective.model, objective.label_smoothing, loss_rows=objective.loss_rows).train()

    def gradient(module: nn.Module, seed: int) -> Gradient:
        torch.manual_seed(seed)
        return gradient_of(module, batch, device=prover.device, precision=resolved.precision)

    def deviation() -> float:
        compiled = gradient(parallel, 1)
        wanted = gradient(eager, 1)
        other = gradient(eager, 2)
        tolerance = TOLERANCES[resolved.precision in HALF]

        losses = [wanted.loss, other.loss, *(gradient(eager, seed).loss for seed in range(3, MASKS + 1))]
        spread = float(torch.tensor(losses).std()) / wanted.loss
        compare_losses(compiled, wanted, tolerance.loss + SPREADS * spread)
        distance = compiled.distance(wanted)
        limit = tolerance.gradient + ANOTHER_MASK * other.distance(wanted)
        if not distance <= limit:
            raise DeviatesError(f"its gradient differs by {distance:.2g} from the uncompiled one (limit {limit:.2g})")
        return distance

    return prover.holds(replace(resolved, cuda_graphs=False), deviation)


def prove_graphed(
    prover: Prover, resolved: Resolved, *, graphed: GraphedComputation, store: Store, batching: Batching
) -> bool:
    """Whether the gradient that is replayed is sound: against the same one without a graph, and the same dropout.

    It is recorded with the sentences in another order, and another seed: a replay must read both anew.
    """
    ids = _micro_batch(store, batching)
    batch, reversed_batch = (
        collate(store, some, batching.capacities, kernel=batching.kernel).to(prover.device) for some in (ids, ids[::-1])
    )
    share = 1.0 / int((batch.target_out != PAD).sum())

    def gradient(batch: Batch, seed: int) -> Gradient:
        torch.manual_seed(seed)
        loss, _ = graphed.add_gradient(batch, share).tolist()
        found = {
            name: parameter.grad.clone()
            for name, parameter in graphed.objective.named_parameters()
            if parameter.grad is not None
        }
        graphed.forget()
        return Gradient(loss * share, found)

    def deviation() -> float:
        with suppress(torch.OutOfMemoryError):
            wanted = gradient(batch, 1)  # the first one is computed without a graph
            try:
                gradient(reversed_batch, 2)  # recorded
            except InputError as error:  # a way that is not sound, where others are left
                raise DeviatesError(str(error)) from error
            found = gradient(batch, 1)
            if graphed.is_recording:
                return compared(found, wanted)
        raise DeviatesError("its memory does not hold what is recorded")

    def compared(found: Gradient, wanted: Gradient) -> float:
        tolerance = TOLERANCES[resolved.precision in HALF]
        compare_losses(found, wanted, tolerance.loss)
        distance = found.distance(wanted)
        if not distance <= tolerance.gradient:
            raise DeviatesError(f"its gradient differs by {distance:.2g} from the one without a graph")
        return distance

    return prover.holds(resolved, deviation)


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
