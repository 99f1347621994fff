"""Ids in, ids out: models with their search settings, over any number of sentences.

    sources -> batches of like length -> beam search, sampling, or forced decoding -> hypotheses

Results come back in the order of the sources. The other sentences of a batch change a result by rounding alone: the
shape of a batch decides the order in which its products are summed.

`B` sentences of a batch, `S` source positions, `P` tokens of a prefix.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from threading import Event
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from transformer.compute import autocast, default_batch_tokens, memory_errors_named
from transformer.config.settings import Precision, SearchConfig
from transformer.data.batch import pad_rows
from transformer.decoding.ensemble import EnsembleState, decode_step
from transformer.decoding.forced import IdPair, align, piece_log_probs
from transformer.decoding.parallel import MOST_AT_ONCE, in_parallel
from transformer.decoding.replay import Replay
from transformer.decoding.sampling import Sampling, sample
from transformer.decoding.search import Hypothesis, beam_search, length_penalty, sweep_penalties
from transformer.model.inference import for_inference
from transformer.model.transformer import Transformer
from transformer.vocabulary import BOS, EOS

_MOST_HYPOTHESES = 8_192  # in a batch

Result = TypeVar("Result")
Models = tuple[Transformer, ...]


@dataclass(frozen=True)
class _Batch:
    """Sources that are searched together, and what a search of them begins from: see `beam_search`."""

    lines: list[int]  # of each source: what its samples are drawn by; empty where the caller names none
    step: Callable[[Tensor, EnsembleState], tuple[Tensor, EnsembleState]]
    state: EnsembleState
    max_lengths: Tensor  # (B,)
    prefixes: Tensor | None  # (B, P)


@dataclass(frozen=True)
class BatchedDecoder:
    """A model made ready for inference, its search settings, and where and in which arithmetic it computes.

    Several models are an ensemble: at each step their probabilities are averaged. `of` makes one; the weights must stay
    as they are while it is used. Two threads must not use it at the same time: it divides torch's threads among its
    own. Sources, targets and hypotheses are ids of pieces, without BOS and EOS.
    """

    models: Models
    ready: Models = field(repr=False)  # the same, in the form that computes
    search: SearchConfig
    device: torch.device
    precision: Precision
    is_plain: bool = False  # attention by products and a softmax, where torch would choose a fused kernel
    replay: Replay | None = field(default=None, repr=False)  # takes the steps of a beam search, in place of the host

    @classmethod
    def of(
        cls, model: Transformer, search: SearchConfig, *, device: torch.device, precision: Precision
    ) -> "BatchedDecoder":
        """A decoder of one model, which is left unchanged: its training may continue afterwards."""
        with _arithmetic(device, precision):
            ready = for_inference(model)
        return cls((model,), (ready,), search, device, precision)

    def __reduce__(self) -> tuple[object, ...]:
        """What pickle and copy keep: the ready form of a model may be in a layout of oneDNN's, and is made anew."""
        replays = self.replay is not None
        return _of_all, (self.models, self.search, self.device, self.precision, self.is_plain, replays)

    def joined(self, other: "BatchedDecoder") -> "BatchedDecoder":
        """The ensemble of the models of both; search settings and arithmetic stay."""
        replay = None if self.replay is None or other.replay is None else Replay(self.device)
        return replace(
            self,
            models=self.models + other.models,
            ready=self.ready + other.ready,
            is_plain=self.is_plain or other.is_plain,
            replay=replay,
        )

    def replayed(self) -> "BatchedDecoder":
        """The same, but a GPU replays the steps of beam searches. Samples are drawn as before."""
        return replace(self, replay=Replay(self.device))

    def with_search(self, search: SearchConfig) -> "BatchedDecoder":
        """The same under other search settings."""
        return replace(self, search=search)

    @property
    def engine(self) -> str | None:
        """What searches in place of torch, with its version and type."""
        return None

    def max_length(self, source: list[int]) -> int:
        """The largest |Y| of a translation: none may be longer than a model has positions for."""
        return min(len(source) + self.search.max_extra, self.max_positions)

    @property
    def max_positions(self) -> int:
        """How many positions every model has."""
        return min(model.config.max_positions for model in self.models)

    # ---- what is searched for

    def hypotheses(
        self,
        sources: Sequence[list[int]],
        *,
        n_best: int,
        prefixes: Sequence[list[int]] | None = None,
        penalty: Callable[[int], float] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> list[list[Hypothesis]]:
        """The `n_best` best hypotheses of each source, the best first: see `beam_search` for what a list holds.

        Each begins with the prefix of its source. `penalty` is another function of |Y| than that of
        `search.length_penalty`; it must not fall. `check` is called before each batch, and may raise.

        Raises ValueError unless 1 <= n_best <= search.beam_size, and InputError where memory runs out.
        """
        penalty = penalty or length_penalty(self.search.length_penalty)

        def find(batch: _Batch) -> list[list[Hypothesis]]:
            return beam_search(
                batch.step,
                batch.state,
                beam_size=self.search.beam_size,
                n_best=n_best,
                max_lengths=batch.max_lengths,
                penalty=penalty,
                bos=BOS,
                eos=EOS,
                prefixes=batch.prefixes,
                loop=self.replay,
            )

        return self._search(sources, find, width=self.search.beam_size, prefixes=prefixes, check=check)

    def sweep(
        self, sources: Sequence[list[int]], penalties: Sequence[Callable[[int], float]]
    ) -> list[list[Hypothesis]]:
        """The best hypothesis of each source under each of these penalties, from one search."""

        def find(batch: _Batch) -> list[list[Hypothesis]]:
            return sweep_penalties(
                batch.step,
                batch.state,
                beam_size=self.search.beam_size,
                max_lengths=batch.max_lengths,
                penalties=penalties,
                bos=BOS,
                eos=EOS,
                loop=self.replay,
            )

        return self._search(sources, find, width=self.search.beam_size)

    def sample(
        self,
        sources: Sequence[list[int]],
        sampling: Sampling,
        *,
        n_samples: int,
        lines: Sequence[int],
        prefixes: Sequence[list[int]] | None = None,
    ) -> list[list[Hypothesis]]:
        """`n_samples` hypotheses of each source, drawn by its line, in the order in which they were drawn."""

        def find(batch: _Batch) -> list[list[Hypothesis]]:
            return sample(
                batch.step,
                batch.state,
                sampling=sampling,
                n_samples=n_samples,
                sentences=batch.lines,
                max_lengths=batch.max_lengths,
                prefixes=batch.prefixes,
                bos=BOS,
                eos=EOS,
            )

        return self._search(sources, find, width=n_samples, lines=lines, prefixes=prefixes)

    # ---- what is forced

    def log_probs(self, pairs: Sequence[IdPair]) -> list[list[float]]:
        """The log-probability of each target piece of each pair, and of EOS: see `piece_log_probs`."""
        return self._force(pairs, piece_log_probs)

    def align(self, pairs: Sequence[IdPair]) -> list[list[int]]:
        """The source piece that each target piece of each pair belongs to: see `forced.align`."""
        return self._force(pairs, align)

    def _force(
        self,
        pairs: Sequence[IdPair],
        decode: Callable[[Sequence[Transformer], Sequence[IdPair], torch.device], list[Result]],
    ) -> list[Result]:
        """What forced decoding gives for each pair."""
        lengths = [max(len(source), len(target)) + 1 for source, target in pairs]  # EOS counted

        def force_batch(batch: list[int], _: Event) -> list[Result]:
            return decode(self.ready, [pairs[n] for n in batch], self.device)

        return self._in_batches(lengths, force_batch, width=1)

    # ---- in batches

    def cut(self, lengths: list[int]) -> list[list[int]]:
        """The indices of sources of these lengths, EOS counted, that a search without prefixes has in a batch.

        The longest comes first. Sources that make up some of the batches are cut into the same ones by themselves, if
        they are in the same order: where a batch ends depends on its own longest source alone.
        """
        return list(self._cut(lengths, width=self.search.beam_size))

    def _cut(self, lengths: list[int], *, width: int) -> Iterator[list[int]]:
        sizes = () if self.replay is None else self.replay.sizes
        return _cut(lengths, width=width, batch_tokens=self._batch_tokens, sizes=sizes)

    @property
    def _batch_tokens(self) -> int:
        return self.search.batch_tokens or self._default_tokens

    @property
    def _default_tokens(self) -> int:
        return default_batch_tokens(self.device)

    @property
    def _remedy(self) -> str:
        return f"lower search.batch_tokens (now {self._batch_tokens})"

    def _search(
        self,
        sources: Sequence[list[int]],
        find: Callable[[_Batch], list[Result]],
        *,
        width: int,
        check: Callable[[], None] = lambda: None,
        lines: Sequence[int] | None = None,
        prefixes: Sequence[list[int]] | None = None,
    ) -> list[Result]:
        """What `find` gives for each source, with `width` hypotheses of each at a time."""

        def search_batch(batch: list[int], cancelled: Event) -> list[Result]:
            def step(tokens: Tensor, state: EnsembleState) -> tuple[Tensor, EnsembleState]:
                if cancelled.is_set():
                    raise CancelledError
                return decode_step(self.ready, tokens, state)

            batch_sources = [sources[n] for n in batch]
            batch_prefixes = [] if prefixes is None else [prefixes[n] for n in batch]
            max_lengths = [self.max_length(source) for source in batch_sources]
            return find(
                _Batch(
                    lines=[] if lines is None else [lines[n] for n in batch],
                    step=step,
                    state=self._start(batch_sources, width=width),
                    max_lengths=torch.tensor(max_lengths, device=self.device),
                    prefixes=pad_rows(batch_prefixes, self.device)[0] if any(batch_prefixes) else None,
                )
            )

        lengths = [len(source) + 1 for source in sources]  # EOS counted
        return self._in_batches(lengths, search_batch, width=width, check=check)

    def _start(self, sources: list[list[int]], *, width: int) -> EnsembleState:
        """The state from which the search of one batch begins, `width` rows for each source."""
        source, layout = pad_rows([[*ids, EOS] for ids in sources], self.device)  # (B, S)
        states = [model.start(model.encode(source, layout), layout, beam_size=width) for model in self.ready]
        return EnsembleState(states)

    def _in_batches(
        self,
        lengths: list[int],
        work: Callable[[list[int], Event], list[Result]],
        *,
        width: int,
        check: Callable[[], None] = lambda: None,
    ) -> list[Result]:
        """What `work` returns for each item, called with a batch of items of like length at a time.

        Each item has `width` rows in its batch. `work` is given the indices of the items of a batch, and an event that
        is set when it shall give up.

        A CPU works on several batches at once, each with its share of the threads: two threads that share a batch wait
        for each other at each of its small products.
        """
        batches = list(self._cut(lengths, width=width))

        def work_on(batch: list[int], cancelled: Event) -> list[tuple[int, Result]]:
            plainly = sdpa_kernel(SDPBackend.MATH) if self.is_plain else nullcontext()
            with _arithmetic(self.device, self.precision), plainly:
                return list(zip(batch, work(batch, cancelled), strict=True))

        at_once = 1
        if self.device.type == "cpu":
            at_once = min(len(batches), torch.get_num_threads(), MOST_AT_ONCE)
        with memory_errors_named("translating", remedy=self._remedy):
            results = dict(chain.from_iterable(in_parallel(work_on, batches, at_once=at_once, check=check)))
        return [results[n] for n in range(len(lengths))]


def _of_all(
    models: Models,
    search: SearchConfig,
    device: torch.device,
    precision: Precision,
    is_plain: bool,
    replays: bool,
) -> BatchedDecoder:
    """A decoder of these models: the first alone, or an ensemble."""
    first, *others = [BatchedDecoder.of(model, search, device=device, precision=precision) for model in models]
    for other in others:
        first = first.joined(other)
    return replace(first, is_plain=is_plain, replay=Replay(device) if replays else None)


@contextmanager
def _arithmetic(device: torch.device, precision: Precision) -> Iterator[None]:
    with torch.no_grad(), autocast(device, precision):
        yield


def _cut(lengths: list[int], *, width: int, batch_tokens: int, sizes: Sequence[int]) -> Iterator[list[int]]:
    """The indices of items of these lengths, the longest first, in batches that fit into memory.

    A batch of `n` items has `n` x `width` rows, each as long as its longest item: at most `batch_tokens` positions, or
    a single item. The longest go first, so that too little memory shows at once. For that, the short ones at the end
    must not be so many that the logits of their rows take more memory than the long ones did: hence the limit of rows.

    Where there are `sizes`, a batch has one of them, but for the last one and those of very long items.
    """
    in_order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    start = 0
    while start < len(in_order):
        most_rows = min(batch_tokens // max(1, lengths[in_order[start]]), _MOST_HYPOTHESES)
        most = max(1, most_rows // width)
        most = max((size for size in sizes if size <= most), default=most)
        yield in_order[start : start + most]
        start += most
