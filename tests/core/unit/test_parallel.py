"""Work on several threads."""

import threading
from collections.abc import Iterator
from threading import Event

import pytest
import torch

from transformer.decoding.parallel import in_parallel


def never() -> None:
    pass


@pytest.fixture(autouse=True)
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_in_parallel_gives_results_in_order_and_each_thread_its_share() -> None:
    barrier = threading.Barrier(2)

    def work(item: int, cancelled: Event) -> tuple[int, int]:
        barrier.wait(timeout=120)  # passes only if two are under way
        return item, torch.get_num_threads()

    assert list(in_parallel(work, list(range(6)), at_once=2, check=never)) == [(n, 2) for n in range(6)]
    assert torch.get_num_threads() == 4


def test_in_parallel_one_at_a_time_stays_on_the_callers_thread() -> None:
    def work(item: int, cancelled: Event) -> bool:
        return threading.current_thread() is threading.main_thread() and torch.get_num_threads() == 4

    assert list(in_parallel(work, [1, 2, 3], at_once=1, check=never)) == [True, True, True]


def test_in_parallel_tells_those_under_way_when_it_ends() -> None:
    given_up: list[int] = []
    begun = Event()

    def work(item: int, cancelled: Event) -> int:
        if item == 0:
            begun.wait(timeout=120)
            raise ValueError("the first fails")
        begun.set()
        assert cancelled.wait(timeout=120)
        given_up.append(item)
        return item

    with pytest.raises(ValueError, match="the first fails"):
        list(in_parallel(work, [0, 1, 2, 3], at_once=2, check=never))
    assert given_up == [1]
    assert torch.get_num_threads() == 4


def test_in_parallel_leaves_later_threads_what_the_caller_has() -> None:
    def work(item: int, cancelled: Event) -> int:
        return item

    list(in_parallel(work, [1, 2, 3], at_once=3, check=never))
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert seen == [4]
