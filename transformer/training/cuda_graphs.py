"""A step that a GPU has recorded and replays, as CUDA graphs: the host launches two, and not 400 to 2,000 kernels.

Packed batches have one shape, but for the length of their offsets, of which there are few. So the gradient of a
micro-batch is recorded for each of these, and the update once. What differs from step to step is copied to where the
graphs read it: the batch, the reciprocal of the step's tokens, the learning rate. Dropout draws other masks at every
replay, those that it would draw without a graph: torch hands the seed and its own counter over each time.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transformer.data.batch import Batch
from transformer.layout import Layout, Packed
from transformer.training.step import Computation

Tensors = tuple[Tensor, ...]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Recording:
    """A graph, where it reads what differs, and where it leaves its results."""

    graph: torch.cuda.CUDAGraph
    batch: Batch | None
    results: Tensors


class GraphedComputation(Computation):
    """The same numbers as `Computation`, by graphs that are recorded when they are first needed.

    The first gradient of each shape and the first update are computed without one: kernels are compiled, and moments
    made. Gradients stay where they are from step to step. There is one rank, batches are packed for a kernel that
    attends to them as they lie, and nothing scales the loss.

    What is recorded keeps the memory that it computes in. Where that runs out, steps are launched from then on. They
    are where a recording fails, too; but torch's allocator then never gets its memory back, nor that of batches which
    another stream has copied. So there is a `failure`, and the process should end soon.
    """

    is_recording = True
    _failure: str | None = None

    def __init__(self, computation: Computation) -> None:
        super().__init__(**vars(computation))
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # what is recorded needs its own
        self._pool = torch.cuda.graph_pool_handle()  # no two graphs run at once: they share their memory
        self._recordings: dict[Any, _Recording] = {}
        self._has_run: set[Any] = set()
        self._share = torch.zeros((), device=self.device)
        self._rate = torch.zeros((), device=self.device)

        for group in self.optimizer.param_groups:
            group["capturable"] = True  # torch's AdamW asks for it
        self._gradients = []
        for parameter in self.objective.parameters():
            parameter.grad = torch.zeros_like(parameter)
            self._gradients.append(parameter.grad)

    def begin(self) -> None:
        """The last update has forgotten its gradient already."""

    def add_gradient(self, batch: Batch, share: float | Tensor) -> Tensor:
        """As of `Computation`."""
        self._share.fill_(share)
        key = ("gradient", *_shape(batch.source_layout), *_shape(batch.target_layout))
        (losses,) = self._run(key, lambda own: (Computation.add_gradient(self, own, self._share),), batch)
        return losses

    def update(self, rate: float | Tensor) -> tuple[Tensor, Tensor]:
        """As of `Computation`."""
        self._rate.fill_(rate)
        norm, is_finite = self._run(("update",), lambda _: self._update_and_forget(), None)
        return norm, is_finite

    def forget(self) -> None:
        """Set the gradients to zero, where they are."""
        torch._foreach_zero_(self._gradients)

    def _update_and_forget(self) -> Tensors:
        found = Computation.update(self, self._rate)
        self.forget()
        return found

    def make_room(self) -> None:
        """Forget what is recorded, where a GPU has little memory: others need some, and it is soon recorded again."""
        free, total = torch.cuda.mem_get_info(self.device)
        if free < total / 3:
            self._recordings.clear()
            torch.cuda.empty_cache()
            self._pool = torch.cuda.graph_pool_handle()  # whatever still lives of the old one keeps it from being used

    @property
    def failure(self) -> str | None:
        """As of `Computation`: why a step could not be recorded."""
        return self._failure

    # ---- to record, and to replay

    def _run(self, key: tuple[Any, ...], compute: Callable[[Any], Tensors], batch: Batch | None) -> Tensors:
        """What `compute` returns for this batch: replayed if there is a recording, else recorded first."""
        if not self.is_recording:
            return compute(batch)
        recording = self._recordings.get(key)
        if recording is None:
            own = None if batch is None else batch.map(torch.clone)
            if key not in self._has_run:
                self._has_run.add(key)
                return self._beside(lambda: compute(own))
            recording = self._record(lambda: compute(own), own)
            if recording is None:
                return compute(batch)
            self._recordings[key] = recording
        elif batch is not None and recording.batch is not None:
            torch._foreach_copy_(_tensors(recording.batch), _tensors(batch))

        recording.graph.replay()
        return tuple(result.clone() for result in recording.results)

    def _beside(self, compute: Callable[[], Tensors]) -> Tensors:
        """Compute on the stream that records, as what autograd prepares belongs to a stream."""
        here = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            results = compute()
        here.wait_stream(self._stream)
        return results

    def _record(self, compute: Callable[[], Tensors], batch: Batch | None) -> _Recording | None:
        """None: memory runs out, or the GPU does not allow it, so nothing is recorded any more."""
        graph = torch.cuda.CUDAGraph()

        # To come back to from an error: the stream, and random numbers that are not recorded.
        here = torch.cuda.stream(torch.cuda.current_stream(self.device))
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        drawn = generator.clone_state()
        try:
            # Only this thread is recorded: the loader's goes on copying batches.
            with here, torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                results = compute()
            return _Recording(graph, batch, results)
        except torch.OutOfMemoryError:
            log.warning("a GPU this full keeps no recorded step: its host launches every kernel")
        except RuntimeError as error:
            generator.graphsafe_set_state(drawn)
            self._failure = str(error).partition("\n")[0]

        # The error is gone, and with it what had been computed.
        self.is_recording = False
        self._recordings.clear()
        del graph
        torch._C._cuda_clearCublasWorkspaces()  # those of the stream that records, too
        torch.cuda.empty_cache()
        return None


def _shape(layout: Layout) -> tuple[int, int]:
    """All in which one packed layout may differ from another of the same run."""
    assert isinstance(layout, Packed)
    return len(layout.offsets), layout.longest


def _tensors(batch: Batch) -> list[Tensor]:
    """The tensors of a batch, always in the same order."""
    found: list[Tensor] = []

    def take(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    batch.map(take)
    return found
