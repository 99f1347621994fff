"""Plan + store -> the steps of one rank, without end, prepared ahead by one thread.

The surprise: there is no iterator state. A position is (epoch, step in the epoch), and starting there is looking up a
plan, so what was prefetched and not used needs no care.
"""

import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from queue import Empty, Queue

import numpy as np

from transformer.data.batch import Batch, collate
from transformer.data.plan import Batching, Ids, plan_epoch, split_step
from transformer.data.store import Store


@dataclass(frozen=True)
class Step:
    """One optimiser update; the numbers are those of the whole step, over all ranks."""

    epoch: int
    index: int  # within the epoch, from 0
    micro_batches: list[tuple[int, Batch]]  # this rank's, with their numbers in the step
    target_tokens: int  # real tokens, EOS counted
    source_tokens: int
    sentences: int
    slots: int  # positions of both sides, padding and empty ones counted


def load_steps(
    store: Store, batching: Batching, *, rank: int, world_size: int, epoch: int, step: int, prefetch: int
) -> Generator[Step, None, None]:
    """Steps from position (epoch, step) on, for ever; a position behind an epoch's last step is the next epoch's first.

    `prefetch` steps are prepared ahead by a thread (0: none), which closing the generator ends. Raises what plan_epoch
    and split_step raise.
    """

    def steps() -> Generator[Step, None, None]:
        now, first = epoch, step
        while True:
            plan = plan_epoch(
                store.lengths,
                mixture=store.mixture,
                seed=batching.seed,
                epoch=now,
                tokens_per_step=batching.tokens_per_step,
            )
            for index in range(first, len(plan)):
                parts = split_step(
                    plan[index],
                    store.lengths,
                    max_tokens=batching.max_tokens,
                    multiple=batching.multiple,
                    capacities=batching.capacities,
                )
                yield _step(store, parts, batching.capacities, epoch=now, index=index, rank=rank, world_size=world_size)
            now, first = now + 1, 0

    return _prefetched(steps(), prefetch) if prefetch else steps()


def _step(
    store: Store,
    parts: list[Ids],
    capacities: tuple[int, int] | None,
    *,
    epoch: int,
    index: int,
    rank: int,
    world_size: int,
) -> Step:
    """Micro-batch m goes to rank m mod world size; a rank without a sentence gets one empty batch, never nothing."""
    mine = [m for m in range(rank, len(parts), world_size) if len(parts[m])]
    batches = [(m, collate(store, parts[m], capacities)) for m in mine] or [
        (rank, collate(store, np.zeros(0, np.int64), capacities))
    ]
    lengths = [store.lengths[part] for part in parts if len(part)]
    source_tokens, target_tokens = np.concatenate(lengths).sum(axis=0, dtype=np.int64).tolist()
    return Step(
        epoch=epoch,
        index=index,
        micro_batches=batches,
        target_tokens=target_tokens,
        source_tokens=source_tokens,
        sentences=sum(map(len, parts)),
        slots=sum(sum(capacities) if capacities else len(part) * int(part.max(axis=0).sum()) for part in lengths),
    )


def _prefetched(steps: Iterator[Step], prefetch: int) -> Generator[Step, None, None]:
    """The same steps, up to `prefetch` of them made ahead; an exception in the thread is raised here, at its place."""
    queue: Queue[Step | BaseException] = Queue(maxsize=prefetch)
    stop = threading.Event()

    def fill() -> None:
        try:
            for step in steps:
                queue.put(step)
                if stop.is_set():
                    return
        except BaseException as error:
            queue.put(error)

    thread = threading.Thread(target=fill, name="loader", daemon=True)
    thread.start()
    try:
        while True:
            item = queue.get()
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        try:
            while True:  # room for the one step that the thread may still want to put
                queue.get_nowait()
        except Empty:
            thread.join()
