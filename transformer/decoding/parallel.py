"""Several items of work at once, each on a thread of its own, with its share of the threads that torch computes with.

It is for batches on a CPU: two torch threads that share a small batch wait for each other; two batches do not.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import TypeVar

import torch

MOST_AT_ONCE = 8  # items, because each takes memory of its own

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_parallel(
    work: Callable[[Item, Event], Result], items: Sequence[Item], *, at_once: int, check: Callable[[], None]
) -> Iterator[Result]:
    """`work` of each item, in order, `at_once` of them at a time, or one after the other on the caller's thread.

    `check` is called before an item is begun, and may raise. `work` is given an event, set when `check` raises, an item
    fails or the caller is interrupted: items under way shall then give up, and are waited for.
    """
    cancelled = Event()

    # One after the other.
    if at_once <= 1:
        for item in items:
            check()
            yield work(item, cancelled)
        return

    # Several at a time. The number of torch threads that one thread sets for itself is also what later threads begin
    # with, so it is put back each time.
    n_threads = torch.get_num_threads()
    share = max(1, n_threads // at_once)
    running: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(at_once, initializer=torch.set_num_threads, initargs=(share,)) as pool:
        try:
            for item in items:
                if len(running) == at_once:
                    yield running.popleft().result()
                    torch.set_num_threads(n_threads)
                check()
                running.append(pool.submit(work, item, cancelled))

            while running:
                yield running.popleft().result()
        finally:
            cancelled.set()
            torch.set_num_threads(n_threads)
