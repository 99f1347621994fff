"""A step that a GPU has recorded and replays, as CUDA graphs: the host launches one, and not 400 to 2,000 kernels.

    GraphedComputation   what is recorded of a step: all of it, or the gradient of a micro-batch, and the update
    Recorder             records what has been computed once in a shape, and replays it

Packed batches have one shape, but for the length of their offsets, of which there are few. So there is a graph for each
of these. What differs from step to step is copied to where the graphs read it: the batch, the reciprocal of the step's
tokens, the learning rate. Dropout draws new masks at every replay, the same as without a graph: torch passes the seed
and its own counter each time.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from transformer.compute import free_gpu_memory, seed_draws, without_garbage_collection
from transformer.data.batch import Batch
from transformer.distributed import collective_errors_named
from transformer.layout import Packed
from transformer.training.step import Computation

ALIGNED = 64  # numbers of the flat gradient: kernels read several at once, from a multiple of these on
ROOM = 1.5  # what is launched may take so many times the memory that it takes when it is recorded: there are holes
Tensors = tuple[Tensor, ...]
log = logging.getLogger(__name__)


class GraphedComputation(Computation):
    """The same numbers as `Computation`, by graphs that are recorded when they are first needed.

    A step of one micro-batch is one graph. It begins without a gradient, so that none is set to zero or added to. Of
    several micro-batches, each replays a graph that adds its gradient to one flat tensor, in which every parameter has
    its place, and another graph makes the update. Where there are several ranks (`reduces`), each of them does so, and
    between these graphs one message adds up the flat tensors of all: the objective is not wrapped. All begin with the
    weights of rank 0.

    Batches are packed for a kernel that attends to them as they lie, and nothing scales the loss. Without a GPU the
    same is computed, and nothing recorded.
    """

    averages = False

    def __init__(self, computation: Computation, *, reduces: bool) -> None:
        super().__init__(**vars(computation))
        self._reduces = reduces
        self._parameters: list[Tensor] = list(self.objective.parameters())
        self._flat: Tensor | None = None  # the gradient of all parameters, where it is added up: made when it is needed
        self._gradients: list[Tensor] = []  # of each of them, as a part of it
        self._share = torch.zeros((), device=self.device)
        self._rate = torch.zeros((), device=self.device)
        self._recorder = Recorder(self.device) if self.device.type == "cuda" else None
        if self._recorder is not None:
            for group in self.optimizer.param_groups:
                group["capturable"] = True  # torch's AdamW asks for it
        if reduces:
            self._share_weights()

    def take(
        self, batches: Sequence[tuple[int, Batch]], *, share: float | Tensor, rate: float | Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As of `Computation`."""
        if self.is_recording:  # where graphs read them
            share = self._share.fill_(share)
            rate = self._rate.fill_(rate)

        if len(batches) == 1 and not self._reduces:
            [(seed, batch)] = batches
            seed_draws(seed, self.device)
            losses, norm, is_applied = self._run("step", batch, lambda own: self._take_one(own, share, rate))
            return losses.double(), norm, is_applied

        flat = self._put_gradients_in_place()
        sums = torch.zeros(2, device=self.device, dtype=torch.float64)
        for seed, batch in batches:
            seed_draws(seed, self.device)
            [losses] = self._run("gradient", batch, lambda own: (self.add_gradient(own, share),))
            sums += losses
        if self._reduces:
            dist.all_reduce(flat)
        norm, is_applied = self._run("update", None, lambda _: self.update(rate))
        return sums, norm, is_applied

    def try_gradient(
        self, batch: Batch, *, seed: int, share: float | Tensor, in_place: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The two losses of a batch, and its gradient by name, as a step computes them, but for an update of nothing.

        `in_place`: as in a step of several micro-batches; of several ranks it always is. The first call is launched,
        the second one is recorded, and it and the later ones are replayed, until `forget`.
        """
        if self.is_recording:
            share = self._share.fill_(share)
        seed_draws(seed, self.device)
        losses, *gradients = self._run("trial", batch, lambda own: self._try_one(own, share, in_place=in_place))
        names = [name for name, _ in self.objective.named_parameters()]
        return losses, dict(zip(names, gradients, strict=True))

    def forget(self) -> None:
        """Free what is recorded: it is recorded again where it is needed."""
        if self._recorder is not None:
            self._recorder.clear()

    def make_room(self) -> None:
        """Free what is recorded, where a GPU has little memory: others need some."""
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            if free < total / 3:
                self.forget()

    @property
    def is_recording(self) -> bool:
        """Whether steps are recorded: on a GPU, unless that has failed, or memory has run out."""
        return self._recorder is not None and self._recorder.is_recording

    @property
    def failure(self) -> str | None:
        """As of `Computation`: why a step could not be recorded."""
        return None if self._recorder is None else self._recorder.failure

    # ---- what is recorded

    def _run(self, name: str, batch: Batch | None, compute: Callable[[Any], Tensors]) -> Tensors:
        """What `compute` returns for the batch: recorded under this name, if it is recorded."""
        return compute(batch) if self._recorder is None else self._recorder.run(name, batch, compute)

    def _take_one(self, batch: Batch, share: float | Tensor, rate: float | Tensor) -> Tensors:
        """A step of this batch alone."""
        self._forget_gradients()
        losses = self.add_gradient(batch, share)
        norm, is_applied = self.update(rate)
        self._forget_gradients()
        return losses, norm, is_applied

    def _try_one(self, batch: Batch, share: float | Tensor, *, in_place: bool) -> Tensors:
        """The losses of a batch, and the gradient of each parameter. The update changes nothing."""
        if in_place or self._reduces:
            self._put_gradients_in_place()
        else:
            self._forget_gradients()
        losses = self.add_gradient(batch, share)
        gradients = [parameter.grad.clone() for parameter in self._parameters if parameter.grad is not None]
        self.update(self._rate, is_wanted=torch.zeros((), dtype=torch.bool, device=self.device))
        self._forget_gradients()
        return losses, *gradients

    def _put_gradients_in_place(self) -> Tensor:
        """Give each parameter a gradient of zeros, that graphs add to: they are parts of the tensor returned."""
        if self._flat is None:
            rooms = [-(-parameter.numel() // ALIGNED) * ALIGNED for parameter in self._parameters]
            self._flat = torch.zeros(sum(rooms), dtype=self._parameters[0].dtype, device=self.device)
            parts = zip(self._parameters, torch.split(self._flat, rooms), strict=True)
            self._gradients = [part[: parameter.numel()].view_as(parameter) for parameter, part in parts]

        self._flat.zero_()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._flat

    @torch.no_grad()
    def _share_weights(self) -> None:
        """Take the weights of rank 0, as DDP does."""
        flat = self._put_gradients_in_place()
        torch._foreach_copy_(self._gradients, self._parameters)
        with collective_errors_named():
            dist.broadcast(flat, src=0)
        torch._foreach_copy_(self._parameters, self._gradients)
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


# ---- to record, and to replay ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Recording:
    """A graph, where it reads what differs, and where it leaves its results."""

    graph: torch.cuda.CUDAGraph
    batch: Batch | None
    results: Tensors


class Recorder:
    """Replays on a GPU what it has recorded, under a name, for each shape of a batch.

    What comes for the first time is computed without a graph: kernels are compiled, and moments made.

    What is recorded keeps the memory that it computes in. Where there is not as much again for a new shape, it is freed
    first, and recorded anew when it is needed. Where memory runs out all the same, everything is launched from then on.
    It is where a recording fails, too; but torch's allocator then never gets its memory back, nor that of batches which
    another stream has copied. So there is a `failure`, and the process should end soon.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_recording = True
        self.failure: str | None = None
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # what is recorded needs its own
        self._pool = torch.cuda.graph_pool_handle()  # no two graphs run at once: they share their memory
        self._recordings: dict[Any, _Recording] = {}
        self._taken = 0  # bytes, by all of them
        self._has_run: set[Any] = set()

    def run(self, name: str, batch: Batch | None, compute: Callable[[Any], Tensors]) -> Tensors:
        """What `compute` returns for this batch: replayed if there is a recording, else recorded first."""
        if not self.is_recording:
            return compute(batch)
        key = (name, *([] if batch is None else _shapes(batch)))
        recording = self._recordings.get(key)
        if recording is None:
            own = None if batch is None else batch.map(torch.clone)
            if key not in self._has_run:
                self._has_run.add(key)
                self._make_room()
                return self._beside(lambda: compute(own))
            recording = self._record(lambda: compute(own), own)
            if recording is None:
                return compute(batch)
            self._recordings[key] = recording
        elif batch is not None and recording.batch is not None:
            _copy(batch, into=recording.batch)

        recording.graph.replay()
        return tuple(result.clone() for result in recording.results)

    def clear(self) -> None:
        """Free everything that is recorded."""
        self._recordings.clear()
        self._taken = 0
        torch.cuda.empty_cache()
        self._pool = torch.cuda.graph_pool_handle()  # whatever still lives of the old one keeps it from being used

    def _make_room(self) -> None:
        """Free what is recorded where what is to be launched may not fit beside it."""
        if self._recordings:
            torch.cuda.empty_cache()
            if free_gpu_memory(self._device) < ROOM * self._taken:
                self.clear()

    def _beside(self, compute: Callable[[], Tensors]) -> Tensors:
        """Compute on the stream that records, as what autograd prepares belongs to a stream."""
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            results = compute()
        here.wait_stream(self._stream)
        return results

    def _record(self, compute: Callable[[], Tensors], batch: Batch | None) -> _Recording | None:
        """None if memory runs out or the GPU refuses: then nothing is recorded any more."""
        graph = torch.cuda.CUDAGraph()

        # To come back to from an error: the stream, and random numbers that are not recorded.
        here = torch.cuda.stream(torch.cuda.current_stream(self._device))
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        drawn = generator.clone_state()
        try:
            # Only this thread is recorded: the loader's goes on copying batches.
            with (
                here,
                without_garbage_collection(),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                before = torch.cuda.memory_reserved(self._device)
                results = compute()
            self._taken += torch.cuda.memory_reserved(self._device) - before
            return _Recording(graph, batch, results)
        except torch.OutOfMemoryError:
            log.warning("too little GPU memory is left to record a step: the host launches every kernel")
        except RuntimeError as error:
            generator.graphsafe_set_state(drawn)
            self.failure = str(error).partition("\n")[0]

        # The error is gone, and with it what had been computed.
        self.is_recording = False
        self._recordings.clear()
        del graph
        torch._C._cuda_clearCublasWorkspaces()  # those of the stream that records, too
        torch.cuda.empty_cache()
        return None


def _shapes(batch: Batch) -> list[Any]:
    """All in which what is launched for one packed batch may differ from what is for another."""
    assert isinstance(batch.source_layout, Packed)
    assert isinstance(batch.target_layout, Packed)
    return [batch.source_layout.longest, batch.target_layout.longest, *(tensor.shape for tensor in _tensors(batch))]


def _copy(batch: Batch, *, into: Batch) -> None:
    """Copy all tensors of a batch, by one kernel for each type of numbers."""
    pairs = list(zip(_tensors(into), _tensors(batch), strict=True))
    for dtype in dict.fromkeys(to.dtype for to, _ in pairs):
        of_type = [pair for pair in pairs if pair[0].dtype is dtype]
        torch._foreach_copy_([to for to, _ in of_type], [tensor for _, tensor in of_type])


def _tensors(batch: Batch) -> list[Tensor]:
    """The tensors of a batch, always in the same order."""
    found: list[Tensor] = []

    def take(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    batch.map(take)
    return found
