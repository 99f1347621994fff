"""Plan + store -> the steps of one rank, without end, prepared ahead by one thread.

    _make_steps       plan a chapter, split each step, collate this rank's micro-batches
      -> _copy_steps  on a GPU: copy the batches there, beside the steps before
      -> _prefetch    hand the steps over from a thread that is some steps ahead

There is no iterator state: a position is (epoch, chapter, step in the chapter), and to start there is to plan that
chapter. So steps that were prepared ahead and never used need no care. The store is asked for epoch by epoch, because
the same pairs may be other piece ids in each of them (subword sampling).
"""

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, Queue

import numpy as np
import torch

from transformer.data.batch import Batch, collate
from transformer.data.plan import Batching
from transformer.data.store import Ids, Store


@dataclass(frozen=True)
class Position:
    """Where in the data a training stands: the next step that it takes. All are counted from 0."""

    epoch: int
    chapter: int  # of the epoch; most corpora have one
    step: int  # of the chapter


@dataclass(frozen=True)
class Step:
    """One optimizer update; the numbers are those of the whole step, over all ranks."""

    epoch: int
    chapter: int  # of the epoch, from 0
    index: int  # within the chapter, from 0
    micro_batches: list[tuple[int, Batch]]  # this rank's, each with its number in the step
    target_tokens: int  # real tokens, EOS counted
    source_tokens: int
    sentences: int
    slots: int  # positions of both sides, padding counted, of the micro-batches that hold a sentence
    copied: torch.cuda.Event | None = None  # on a GPU: recorded after the copies of the batches

    @property
    def seeds(self) -> tuple[int, ...]:
        """What tells the random numbers of this step from those of others.

        In an epoch's first chapter, these are what they were before there were chapters.
        """
        return (self.epoch, self.chapter, self.index) if self.chapter else (self.epoch, self.index)

    def await_copy(self) -> None:
        """Let the GPU's current stream begin when the batches are there. The host does not wait."""
        if self.copied is None:
            return
        _, first_batch = self.micro_batches[0]
        stream = torch.cuda.current_stream(first_batch.source.device)
        stream.wait_event(self.copied)

        # The memory belongs to the stream that copied the batches; it must not be used again before this one is done.
        def keep_until_read(tensor: torch.Tensor) -> torch.Tensor:
            tensor.record_stream(stream)
            return tensor

        for _, batch in self.micro_batches:
            batch.map(keep_until_read)


def load_steps(
    store_of: Callable[[int], Store],
    batching: Batching,
    *,
    rank: int,
    world_size: int,
    position: Position,
    prefetch: int,
    device: torch.device | None = None,
) -> Generator[Step, None, None]:
    """Steps from `position` on, for ever; a position after the last step of a chapter is the first of the next.

    `store_of(epoch)` is asked once for each epoch, in the thread that prepares. Every store must hold the pairs of
    `batching.mixture`; their lengths may differ. A step of longer sentences is cut into more micro-batches, still a
    multiple of `batching.micro_batch_multiple`, and packed shapes stay as they are.

    `prefetch` steps are prepared ahead by a thread (0: none), which closing the generator ends. Where `device` is a
    GPU their batches are copied there, too: call `Step.await_copy` before use.

    Raises what `store_of`, plan_chapter and split_step raise.
    """
    steps = _make_steps(store_of, batching, rank=rank, world_size=world_size, position=position)
    if device is not None and device.type == "cuda":
        steps = _copy_steps(steps, device)
    return _prefetch(steps, prefetch) if prefetch else steps


# ---- from a plan to steps -------------------------------------------------------------------------------------------


def _make_steps(
    store_of: Callable[[int], Store], batching: Batching, *, rank: int, world_size: int, position: Position
) -> Generator[Step, None, None]:
    epoch, chapter, first_step = position.epoch, position.chapter, position.step
    while True:
        store = store_of(epoch)
        while chapter < batching.n_chapters:
            yield from _chapter_steps(
                store,
                batching,
                rank=rank,
                world_size=world_size,
                position=Position(epoch, chapter, first_step),
            )
            chapter += 1
            first_step = 0
        epoch += 1
        chapter = 0


def _chapter_steps(
    store: Store, batching: Batching, *, rank: int, world_size: int, position: Position
) -> Generator[Step, None, None]:
    """The steps of a chapter from `position` on. Its plan is forgotten before that of the next chapter is made."""
    plan = batching.plan(store.lengths, epoch=position.epoch, chapter=position.chapter)
    for index in range(position.step, len(plan)):
        micro_batches = batching.split(plan[index], store.lengths)
        place = replace(position, step=index)
        yield _make_step(store, micro_batches, batching, place=place, rank=rank, world_size=world_size)


def _make_step(
    store: Store, micro_batches: list[Ids], batching: Batching, *, place: Position, rank: int, world_size: int
) -> Step:
    """One rank's share of a step, whose `micro_batches` hold these sentences.

    Micro-batch m goes to rank m mod world size. A rank without a sentence gets one empty batch, never nothing.
    """

    def batch_of(ids: Ids) -> Batch:
        return collate(store, ids, batching.slots_of(store.lengths[ids]), kernel=batching.kernel)

    numbers = [m for m in range(rank, len(micro_batches), world_size) if len(micro_batches[m])]
    share = [(m, batch_of(micro_batches[m])) for m in numbers]
    if not share:
        no_ids = np.zeros(0, np.int64)
        share = [(rank, batch_of(no_ids))]

    # The counts are those of the whole step.
    lengths = [store.lengths[ids] for ids in micro_batches if len(ids)]
    source_tokens, target_tokens = np.concatenate(lengths).sum(axis=0, dtype=np.int64).tolist()

    return Step(
        epoch=place.epoch,
        chapter=place.chapter,
        index=place.step,
        micro_batches=share,
        target_tokens=target_tokens,
        source_tokens=source_tokens,
        sentences=sum(map(len, micro_batches)),
        slots=batching.count_slots(lengths),
    )


# ---- ahead of time --------------------------------------------------------------------------------------------------


def _copy_steps(steps: Iterator[Step], device: torch.device) -> Generator[Step, None, None]:
    """The same steps, their batches on a GPU.

    The copies have a stream of their own, so that they run beside the steps before; from pinned memory, so that no host
    thread waits for them.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory().to(device, non_blocking=True)

    for step in steps:
        with torch.cuda.device(device), torch.cuda.stream(stream):  # a new thread's own device is the first GPU
            micro_batches = [(m, batch.map(copy)) for m, batch in step.micro_batches]
            copied = stream.record_event()
        yield replace(step, micro_batches=micro_batches, copied=copied)


def _prefetch(steps: Iterator[Step], prefetch: int) -> Generator[Step, None, None]:
    """The same steps, up to `prefetch` of them made ahead; an exception in the thread is raised here, at its place."""
    queue: Queue[Step | BaseException] = Queue(maxsize=prefetch)
    stop = threading.Event()
    thread = threading.Thread(target=_fill_queue, args=(steps, queue, stop), name="loader", daemon=True)
    thread.start()

    try:
        while True:
            item = queue.get()
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        with suppress(Empty):
            while True:  # make room for the one step that the thread may still want to put
                queue.get_nowait()
        thread.join()


def _fill_queue(steps: Iterator[Step], queue: Queue[Step | BaseException], stop: threading.Event) -> None:
    """What the thread does: put the steps, then the exception that ends them, if one does."""
    try:
        for step in steps:
            queue.put(step)
            if stop.is_set():
                return
    except BaseException as error:
        queue.put(error)
