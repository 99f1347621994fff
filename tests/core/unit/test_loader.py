"""The stream of steps: the same from any position, for any prefetch, and shared out among ranks without loss."""

import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from itertools import islice, pairwise, takewhile
from typing import Any

import numpy as np
import pytest

from transformer.config.settings import AttentionKernel
from transformer.data.loader import Position, Step, load_steps
from transformer.data.plan import Batching
from transformer.data.store import Mixture, Store
from transformer.errors import InputError
from transformer.layout import Packed


def numbered(count: int) -> Store:
    """Sentence i is its own number, 4 + i, several times over."""
    state = np.random.default_rng(1)
    sizes = state.integers(1, 9, size=(count, 2))
    return Store.from_pieces(
        [[4 + i] * int(sizes[i, 0]) for i in range(count)], [[4 + i] * int(sizes[i, 1]) for i in range(count)]
    )


STORE = numbered(60)


def load(
    epoch: int = 0,
    chapter: int = 0,
    step: int = 0,
    prefetch: int = 0,
    rank: int = 0,
    world_size: int = 1,
    multiple: int = 1,
    max_tokens: int = 25,
    store: Store | Callable[[int], Store] = STORE,
    mixture: Mixture | None = None,
    tokens_per_step: int = 50,
    capacities: tuple[int, int] | None = None,
    kernel: AttentionKernel | None = None,
    is_one_shape: bool = True,
) -> Generator[Step, None, None]:
    """Steps of one store, or of one an epoch."""
    store_of = store if callable(store) else lambda epoch: store
    return load_steps(
        store_of,
        Batching(
            mixture=[(len(store_of(0)), 1.0)] if mixture is None else mixture,
            seed=1,
            tokens_per_step=tokens_per_step,
            max_tokens=max_tokens,
            micro_batch_multiple=multiple,
            capacities=capacities,
            kernel=kernel,
            is_one_shape=is_one_shape,
        ),
        rank=rank,
        world_size=world_size,
        position=Position(epoch, chapter, step),
        prefetch=prefetch,
    )


def seen(step: Step) -> list[int]:
    """The sentences of this rank's micro-batches, read from the tensors: no source is empty."""
    batches = [batch.source.flatten().tolist() for _, batch in step.micro_batches]
    firsts = [
        [now for before, now in zip([3, *tokens], tokens, strict=False) if before in (0, 3)] for tokens in batches
    ]
    return [token - 4 for tokens in firsts for token in tokens if token > 0]


def text(step: Step) -> tuple[object, ...]:
    batches = [(m, batch.source.tolist(), batch.target_out.tolist()) for m, batch in step.micro_batches]
    return (
        step.epoch,
        step.chapter,
        step.index,
        batches,
        step.target_tokens,
        step.source_tokens,
        step.sentences,
        step.slots,
    )


def test_load_steps_gives_every_sentence_once_an_epoch_in_another_order() -> None:
    epochs: dict[int, list[int]] = {0: [], 1: []}
    for step in load():
        if step.epoch == 2:
            break
        epochs[step.epoch] += seen(step)
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(60))
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("size", [60, 25], ids=["one chapter", "three chapters"])
def test_load_steps_goes_on_from_any_position_as_if_never_stopped(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer.data.chapters.CHAPTER", size)
    taken = list(islice(load(), 30))
    stream = [text(step) for step in taken]
    for position, step in enumerate(taken[:20]):
        again = load(epoch=step.epoch, chapter=step.chapter, step=step.index)
        assert [text(step) for step in islice(again, 5)] == stream[position : position + 5]

    ends = 0
    for step, following in pairwise(taken):
        if following.index == 0:  # the end of a chapter is the start of the next, which may be in the next epoch
            again = load(epoch=step.epoch, chapter=step.chapter, step=step.index + 1)
            assert text(next(again)) == text(following)
            ends += 1
    assert ends >= (3 if size == 60 else 6)
    assert {step.chapter for step in taken} == ({0} if size == 60 else {0, 1, 2})


def test_load_steps_gives_every_sentence_once_in_an_epoch_of_chapters(monkeypatch: pytest.MonkeyPatch) -> None:
    epochs: dict[int, list[int]] = {0: [], 1: []}
    for size in (1, 7, 25):
        monkeypatch.setattr("transformer.data.chapters.CHAPTER", size)
        for step in takewhile(lambda step: step.epoch < 2, load()):
            epochs[step.epoch] += seen(step)
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted([*range(60)] * 3)
    assert epochs[0] != epochs[1]


def test_step_has_seeds_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without chapters, those that it always had."""
    assert [step.seeds for step in islice(load(), 3)] == [(0, 0), (0, 1), (0, 2)]
    monkeypatch.setattr("transformer.data.chapters.CHAPTER", 3)
    steps = list(takewhile(lambda step: step.epoch < 2, load()))
    assert len({step.seeds for step in steps}) == len(steps) > 30


def test_load_steps_loads_and_resumes_a_mixture_of_corpora() -> None:
    mixture = ((20, 2.0), (40, 0.5))
    stream = list(islice(load(mixture=mixture), 40))
    counts = [Counter(i for step in stream if step.epoch == epoch for i in seen(step)) for epoch in (0, 1)]
    for count in counts:
        assert [count[i] for i in range(20)] == [2] * 20
        assert {count[i] for i in range(20, 60)} == {0, 1}
    assert counts[0] != counts[1]
    for position in range(20):
        resumed = load(mixture=mixture, epoch=stream[position].epoch, step=stream[position].index)
        assert [text(step) for step in islice(resumed, 5)] == [text(step) for step in stream[position : position + 5]]


@pytest.mark.parametrize("prefetch", [1, 4])
def test_load_steps_gives_the_same_with_any_prefetch(prefetch: int) -> None:
    stream = load(prefetch=prefetch)
    assert [text(step) for step in islice(stream, 40)] == [text(step) for step in islice(load(), 40)]
    stream.close()


either_layout = pytest.mark.parametrize("capacities", [None, (24, 20)], ids=["padded", "packed"])


@pytest.mark.parametrize(("world_size", "multiple"), [(1, 1), (2, 2), (3, 3), (4, 2), (2, 4), (3, 1), (7, 1)])
@either_layout
def test_load_steps_shares_out_each_step_among_ranks(
    world_size: int, multiple: int, capacities: tuple[int, int] | None
) -> None:
    how: dict[str, Any] = {"multiple": multiple, "capacities": capacities}
    whole = list(islice(load(**how), 20))
    ranks = [list(islice(load(rank=r, world_size=world_size, **how), 20)) for r in range(world_size)]
    for index, step in enumerate(whole):
        shares = [rank[index] for rank in ranks]
        numbers = Counter(m for share in shares for m, batch in share.micro_batches if batch.target_out.any())
        assert numbers == Counter(m for m, _ in step.micro_batches)
        assert sorted(i for share in shares for i in seen(share)) == sorted(seen(step))
        for rank, share in enumerate(shares):
            assert share.micro_batches  # never nothing: the rank joins in the sum
            assert all(m % world_size == rank for m, _ in share.micro_batches)
            assert (share.target_tokens, share.source_tokens) == (step.target_tokens, step.source_tokens)
            assert (share.sentences, share.slots) == (step.sentences, step.slots)


def test_step_has_the_numbers_of_its_tensors() -> None:
    for step in islice(load(multiple=2), 20):
        batches = [batch for _, batch in step.micro_batches]
        assert step.target_tokens == sum(len(batch.target_out) for batch in batches)
        assert step.source_tokens == sum(int((batch.source > 0).sum()) for batch in batches)
        assert step.sentences == sum(len(batch.source) for batch in batches)
        assert step.slots == sum(batch.source.numel() + batch.target_in.numel() for batch in batches)


def test_step_has_the_numbers_of_its_packed_tensors() -> None:
    for step in islice(load(multiple=2, capacities=(24, 20)), 20):
        batches = [batch for _, batch in step.micro_batches]
        assert {(batch.source.shape, batch.target_in.shape) for batch in batches} == {((24,), (20,))}  # for ever
        assert step.target_tokens == sum(int((batch.target_out > 0).sum()) for batch in batches)
        assert step.source_tokens == sum(int((batch.source > 0).sum()) for batch in batches)
        assert step.sentences == sum(int((batch.source == 3).sum()) for batch in batches)
        assert step.slots == 44 * len(batches)


def test_step_of_no_fixed_shape_has_the_slots_that_its_sentences_take() -> None:
    """The same micro-batches, without the slots that stay empty; a rank without a sentence has the fewest."""
    how: dict[str, Any] = {"store": numbered(600), "tokens_per_step": 700, "max_tokens": 640, "capacities": (640, 512)}
    shapes = set()
    for step, fixed in islice(zip(load(is_one_shape=False, **how), load(**how), strict=True), 40):
        assert seen(step) == seen(fixed)
        batches = [batch for _, batch in step.micro_batches]
        for batch in batches:
            for slots in (batch.source, batch.target_in):
                assert len(slots) == -(-int((slots > 0).sum()) // 128) * 128
            shapes.add((len(batch.source), len(batch.target_in)))
        assert step.slots == sum(batch.source.numel() + batch.target_in.numel() for batch in batches) < fixed.slots
    assert len(shapes) > 2

    (_, empty), *others = next(load(is_one_shape=False, rank=6, world_size=7, **how)).micro_batches
    assert (len(empty.source), len(empty.target_in), others) == (128, 128, [])


def test_step_has_the_same_sentences_however_it_is_split() -> None:
    streams = [
        [sorted(seen(step)) for step in islice(load(max_tokens=max_tokens, multiple=multiple, capacities=packed), 20)]
        for max_tokens, multiple, packed in [
            (10, 1, None),
            (25, 1, None),
            (1000, 1, None),
            (25, 3, None),
            (25, 1, (12, 9)),
            (25, 2, (50, 25)),
        ]
    ]
    assert all(stream == streams[0] for stream in streams)


# ---- a store of its own for every epoch -----------------------------------------------------------------------------


def exhaust(stream: Iterator[Step], *, epoch: int) -> None:
    """Take steps until an error comes; all of them must be of this epoch."""
    for step in stream:
        assert step.epoch == epoch


def longer(count: int, by: int) -> Store:
    """The sentences of `numbered`, with so many pieces more on each side."""
    plain = numbered(count).lengths[:] - 1
    return Store.from_pieces(*([[4 + i] * int(plain[i, side] + by) for i in range(count)] for side in (0, 1)))


def test_load_steps_asks_for_one_store_an_epoch() -> None:
    asked: list[int] = []

    def store_of(epoch: int) -> Store:
        asked.append(epoch)
        return STORE

    stream = load(store=store_of, mixture=[(60, 1.0)], epoch=3, step=2)
    assert asked == []
    epochs = [step.epoch for step in islice(stream, 30)]
    assert epochs[0] == 3
    assert asked == list(range(3, epochs[-1] + 1))


@pytest.mark.parametrize("multiple", [1, 3])
@either_layout
def test_load_steps_cuts_longer_sentences_into_more_micro_batches(
    multiple: int, capacities: tuple[int, int] | None
) -> None:
    """The second epoch's steps need more of them than any of the first epoch's, and packed ones keep their shape."""
    stores = {0: STORE, 1: longer(60, 4)}
    stream = load(store=lambda epoch: stores[min(epoch, 1)], multiple=multiple, capacities=capacities)
    epochs: dict[int, list[int]] = {0: [], 1: []}
    needed: dict[int, list[int]] = {0: [], 1: []}
    for step in stream:
        if step.epoch == 2:
            break
        epochs[step.epoch] += seen(step)
        needed[step.epoch].append(len(step.micro_batches))
        assert max(step.source_tokens, step.target_tokens) <= 50
        batches = [batch for _, batch in step.micro_batches]
        if capacities is None:
            assert all(max(b.source.numel(), b.target_in.numel()) <= 25 for b in batches)
        else:
            assert {(b.source.shape, b.target_in.shape) for b in batches} == {((24,), (20,))}
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(60))
    assert sum(needed[1]) > sum(needed[0])
    if multiple == 1:
        assert max(needed[1]) > max(needed[0])


def test_load_steps_resumes_in_the_store_of_its_epoch() -> None:
    def store_of(epoch: int) -> Store:
        return longer(60, epoch)

    options: dict[str, Any] = {"store": store_of, "mixture": [(60, 1.0)], "capacities": (24, 20)}
    stream = [text(step) for step in islice(load(**options), 40)]
    assert int(str(stream[-1][0])) >= 2
    for position in (3, 17, 30):
        epoch, index = int(str(stream[position][0])), int(str(stream[position][2]))
        again = islice(load(**options, epoch=epoch, step=index), 5)
        assert [text(step) for step in again] == stream[position : position + 5]


@pytest.mark.parametrize("kernel", [None, AttentionKernel.varlen, AttentionKernel.triton])
def test_load_steps_groups_packed_batches_without_a_kernel(kernel: AttentionKernel | None) -> None:
    steps = islice(load(capacities=(24, 20), kernel=kernel), 3)
    layouts = [batch.source_layout for step in steps for _, batch in step.micro_batches]
    assert {layout.groups is None for layout in layouts if isinstance(layout, Packed)} == {kernel is not None}
    assert {layout.kernel for layout in layouts if isinstance(layout, Packed)} == {kernel}


def test_load_steps_raises_what_a_store_raises() -> None:
    def store_of(epoch: int) -> Store:
        if epoch:
            raise InputError("corpus.de: gone")
        return STORE

    stream = load(store=store_of, mixture=[(60, 1.0)], prefetch=2)
    with pytest.raises(InputError, match=r"corpus\.de: gone"):
        exhaust(stream, epoch=0)
    assert not loaders()


# ---- the thread that prepares ---------------------------------------------------------------------------------------


def loaders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "loader"]


def test_load_steps_ends_its_thread_when_closed() -> None:
    for taken in range(6):
        stream = load(prefetch=2)
        list(islice(stream, taken))
        stream.close()
        assert not loaders()


def test_load_steps_ends_its_thread_when_dropped() -> None:
    stream = load(prefetch=2)
    next(stream)
    assert len(loaders()) == 1
    del stream
    assert not loaders()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_load_steps_raises_errors_of_its_thread(prefetch: int) -> None:
    with pytest.raises(InputError, match=r"train\.tokens_per_step=5"):
        next(load(tokens_per_step=5, prefetch=prefetch))
    with pytest.raises(InputError, match="no sentence pair"):
        next(load(store=Store.from_pieces([], []), prefetch=prefetch))
    assert not loaders()


def test_load_steps_raises_an_error_behind_the_good_steps_before_it() -> None:
    store = numbered(30)
    stream = load(store=store, prefetch=4)
    good = len([step for step in islice(load(store=store), 40) if step.epoch == 0])
    assert len(list(islice(stream, good))) == good
    stream.close()
    side = [[4 + i] * (59 if i == 7 else 5) for i in range(30)]  # one is longer than any micro-batch may be
    broken = Store.from_pieces(side, side)
    with pytest.raises(InputError, match="a sentence of 60 tokens does not fit a micro-batch of 25"):
        list(islice(load(store=broken, prefetch=4, tokens_per_step=100), 40))
    assert not loaders()
