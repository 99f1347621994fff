"""Beam search whose steps a GPU has recorded and replays, as CUDA graphs: another loop around the step of `search`.

A step of a search is some 200 kernels, and a GPU computes most of them faster than its host launches them. So all
tensors stay where they are, in places for 64, 256, 1,024 or 2,048 sentences: a graph is recorded for each place, and
for each number of positions that its steps read. Sentences that are done stay as they are. The host asks every eight
steps which are, and moves those that are left to a smaller place, or ends the search.

On a CPU the same steps are launched: that is slower than `launch`, and what tests compare with it.

Shapes: `B` sentences of a place, `n` of them in use, `K` beam_size, `L` positions that there is room for.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from transformer.compute import without_garbage_collection
from transformer.decoding.buffers import Arena, put, rounded
from transformer.decoding.search import Beams, Hypothesis, Rules, State, advance, launch, results_of, rows_of

PLACES = (64, 256, 1_024, 2_048)  # for so many sentences
STEPS = 8  # between two questions of the host
_FIRST_READ = 16  # positions that the first steps read; then twice as many, and so on

log = logging.getLogger(__name__)


class Fixable(State, Protocol):
    """A state that can be put into buffers; see `buffers` for that of a decoder."""

    def shape(self) -> Hashable:
        """All in which its buffers may differ from others for as many sentences and positions."""
        ...

    def fixed(self, arena: Arena, *, sentences: int, positions: int) -> Self:
        """Buffers for a state like this one."""
        ...

    def fill(self, state: Self) -> None:
        """Put a state of as many sentences, or fewer, into these buffers."""
        ...

    def reading(self, positions: int) -> Self:
        """The same buffers, of which a step reads so many positions."""
        ...

    def keep(self, after: Self) -> None:
        """Put what a step from these buffers has made where the next one reads it."""
        ...


Step = Callable[[Tensor, Any], tuple[Tensor, Any]]


class CannotRecord(Exception):
    """The GPU does not record a step."""


@dataclass
class _Place:
    """Where the sentences of a search lie, and the steps that were recorded there, by the positions that they read."""

    beams: Beams
    tokens: Tensor  # (B, K) the last of each live hypothesis
    state: Any  # a Fixable
    rules: Rules
    recordings: dict[int, Any] = field(default_factory=dict)  # CUDA graphs
    has_run: set[int] = field(default_factory=set)

    def fill(self, state: Any, beams: Beams, tokens: Tensor, rules: Rules) -> None:
        """Put sentences here; those that there is room for beside them are done."""
        for own, other in _pairs(self.beams, beams):
            own.zero_()
            put(own, other)
        self.beams.done[len(beams.done) :] = True
        put(self.tokens, tokens)
        put(self.rules.penalties, rules.penalties)
        self.state.fill(state)

    def step(self, step: Step, reads: int) -> None:
        """One step, from here to here: on tensors alone, so that it can be recorded."""
        state = self.state.reading(reads)
        logits, after = step(self.tokens.flatten(), state)
        beams, survivors = advance(self.beams, logits, self.rules)
        if self.tokens.shape[1] > 1:
            after = after.reorder(rows_of(survivors.parents).flatten())
        state.keep(after)
        self.tokens.copy_(survivors.tokens)

        # What was done before stays as it was.
        was_done = self.beams.done.clone()
        for own, new in _pairs(self.beams, beams):
            if new is not own:
                torch.where(was_done.view(-1, *[1] * (own.ndim - 1)), own, new, out=own)

    def hand_over(self, results: Beams, *, n_sentences: int) -> None:
        """Put what was found here to the results of all sentences of the batch."""
        sentences = self.beams.sentences[:n_sentences]
        for own, of_all in _pairs(self.beams, results):
            of_own = own[(slice(n_sentences), *map(slice, of_all.shape[1:]))]
            of_all.index_copy_(0, sentences, of_own)

    def leave(self, staying: Sequence[int], reads: int) -> tuple[Any, Beams, Tensor]:
        """State, beams and tokens of these sentences, which go on elsewhere."""
        indices = torch.tensor(staying, device=self.tokens.device)
        parents = torch.arange(self.tokens.shape[1], device=self.tokens.device).expand(len(self.tokens), -1)
        state = self.state.reading(reads).reorder(rows_of(parents)[indices].flatten())
        return state, self.beams.select(indices), self.tokens[indices]


def _pairs(one: Beams, other: Beams) -> list[tuple[Tensor, Tensor]]:
    return [(getattr(one, f.name), getattr(other, f.name)) for f in fields(Beams)]


class Replay:
    """A `Loop` of one model, or of one ensemble, which keeps what it has recorded.

    Where the GPU cannot record a step, or has no memory left for it, steps are launched from then on.
    """

    def __init__(self, device: torch.device, *, places: Sequence[int] = PLACES) -> None:
        self.sizes = places
        self.is_recording = True
        self._device = device
        self._forget()

    def __call__(self, step: Step, state: Any, beams: Beams, rules: Rules) -> list[list[list[Hypothesis]]]:
        """See `Loop`."""
        if self.is_recording and len(beams.done) > 0:
            try:
                return self._search(step, state, beams, rules)
            except torch.OutOfMemoryError:
                failure = "its memory is full"
            except CannotRecord as error:
                failure = str(error)

            # The error is gone, and with it what had been computed.
            log.warning(
                "search steps are no longer replayed on the GPU (%.200s): the host launches them from now on", failure
            )
            self.is_recording = False
            self._forget()
            if self._device.type == "cuda":
                torch._C._cuda_clearCublasWorkspaces()  # those of the stream that records, too
                torch.cuda.empty_cache()
        return launch(step, state, beams, rules)

    @property
    def n_recorded(self) -> int:
        """How many graphs there are."""
        return sum(len(place.recordings) for place in self._places.values())

    def _forget(self) -> None:
        self._places: dict[Hashable, _Place] = {}
        self._arenas: dict[int, Arena] = {}
        self._recorder = _Recorder(self._device) if self._device.type == "cuda" else None

    # ---- the loop

    def _search(self, step: Step, state: Any, beams: Beams, rules: Rules) -> list[list[list[Hypothesis]]]:
        longest = rules.penalties.shape[1]
        results = Beams(*(getattr(beams, f.name).clone() for f in fields(Beams)))
        tokens = torch.full_like(beams.live_log_probs, rules.bos, dtype=torch.int64)  # (B, K)
        taken = 0

        while True:
            n_sentences = len(beams.done)
            place = self._place(state, beams, rules)
            place.fill(state, beams, tokens, rules)
            is_done = [False] * n_sentences
            while taken < longest and self._size(is_done.count(False)) == len(place.tokens):
                reads = self._reads(taken, longest)
                for _ in range(min(STEPS, longest - taken)):
                    self._take(place, step, reads)
                    taken += 1
                is_done = self._answer(place.beams.done)[:n_sentences]

            place.hand_over(results, n_sentences=n_sentences)
            staying = [n for n, done in enumerate(is_done) if not done]
            if taken == longest or not staying:
                return results_of(results)
            state, beams, tokens = place.leave(staying, reads)

    def _size(self, sentences: int) -> int:
        """Of the smallest place that has room for these."""
        largest = self.sizes[-1]
        return next((size for size in self.sizes if size >= sentences), -(-sentences // largest) * largest)

    def _reads(self, taken: int, longest: int) -> int:
        """How many positions the next steps read: as many as there will be, or more."""
        reads = _FIRST_READ
        while reads < taken + STEPS:
            reads *= 2
        return min(reads, rounded(longest))

    def _place(self, state: Any, beams: Beams, rules: Rules) -> _Place:
        """The place for these sentences, made when it is first needed."""
        size = self._size(len(beams.done))
        positions = rounded(rules.penalties.shape[1])
        is_forced = beams.prefixes.shape[1] > 0
        shapes = (beams.finished_scores.shape[1:], beams.live_log_probs.shape[1:])
        key = (size, positions, is_forced, shapes, state.shape(), rules.bos, rules.eos)
        if key not in self._places:
            self._places[key] = _Place(
                beams=_empty_like(beams, sentences=size, positions=positions),
                tokens=torch.zeros_like(beams.live_log_probs[:1], dtype=torch.int64).repeat(size, 1),
                state=state.fixed(self._arenas.setdefault(size, Arena()), sentences=size, positions=positions),
                rules=Rules(
                    rules.penalties.new_ones(len(rules.penalties), positions), rules.banned, rules.bos, rules.eos
                ),
            )
        return self._places[key]

    # ---- a step: recorded when it is taken for the second time

    def _take(self, place: _Place, step: Step, reads: int) -> None:
        if self._recorder is None:
            place.step(step, reads)
            return
        if reads not in place.has_run:
            place.has_run.add(reads)
            self._recorder.launch(lambda: place.step(step, reads))
            return
        if reads not in place.recordings:
            place.recordings[reads] = self._recorder.record(lambda: place.step(step, reads))
        place.recordings[reads].replay()

    def _answer(self, question: Tensor) -> list[bool]:
        """What the device has answered: the one time that the host waits for it."""
        answer: list[bool] = question.tolist() if self._recorder is None else self._recorder.read(question)
        return answer


def _empty_like(beams: Beams, *, sentences: int, positions: int) -> Beams:
    """Beams of so many sentences, with room for so many tokens."""
    found = {}
    for f in fields(Beams):
        of_sentence = list(getattr(beams, f.name).shape[1:])
        holds_tokens = f.name in ("live_tokens", "finished_tokens") or (f.name == "prefixes" and of_sentence[0] > 0)
        if holds_tokens:
            of_sentence[-1] = positions
        found[f.name] = getattr(beams, f.name).new_zeros(sentences, *of_sentence)
    return Beams(**found)


class _Recorder:
    """Records what is computed on a GPU, on a stream of its own, into memory that all recordings share."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()  # no two graphs run at once
        self._answer: Tensor | None = None

    def launch(self, compute: Callable[[], None]) -> None:
        """Compute where it will be recorded: what libraries prepare belongs to a stream."""
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream), _uncached(self._device):
            compute()
        here.wait_stream(self._stream)

    def record(self, compute: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """A graph of it. Raises CannotRecord."""
        graph = torch.cuda.CUDAGraph()
        here = torch.cuda.stream(torch.cuda.current_stream(self._device))  # to come back to from an error
        try:
            with (
                here,
                without_garbage_collection(),
                _uncached(self._device),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                compute()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CannotRecord(str(error).partition("\n")[0]) from error
        return graph

    def read(self, tensor: Tensor) -> list[Any]:
        """What a tensor holds, once all before it is computed."""
        if self._answer is None or len(self._answer) < len(tensor):
            self._answer = torch.empty(len(tensor), dtype=tensor.dtype, pin_memory=True)
        answer = self._answer[: len(tensor)]
        answer.copy_(tensor, non_blocking=True)
        is_there = torch.cuda.Event()  # type: ignore[no-untyped-call]
        is_there.record()
        is_there.synchronize()
        found: list[Any] = answer.tolist()
        return found


def _uncached(device: torch.device) -> Any:
    """Autocast as it is, but without weights that it has cast and keeps: a graph would read them when they are gone."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.get_autocast_dtype(device.type), cache_enabled=False)
