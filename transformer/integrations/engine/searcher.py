"""Beam search by CTranslate2: batches of ids in, hypotheses with their log-probabilities out.

Its rules differ from those of `beam_search` in three places.

- It ends a sentence at a number of finished hypotheses (without a length penalty: at the first that ranks first, when
  nothing better can follow), and those that are live then stay unknown. It finishes as many as
  the beam is wide, and half as many more where that matters; a source of which a longer one may still win has no result
  here, and `EngineDecoder` has torch search it.
- It ranks by log-probability / length^b: all that it has finished are ranked again by our penalty.
- It has one maximum length for a batch, where ours depends on the source. A source that has too few hypotheses within
  its own maximum is searched again, with others of the same maximum.
"""

import json
import os
import shutil
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from transformer.compute import memory_errors_named
from transformer.config.settings import TORCH, Quantization, SearchConfig
from transformer.decoding.batched import BatchedDecoder
from transformer.decoding.search import Hypothesis, length_penalty
from transformer.errors import InputError
from transformer.integrations.engine.ctranslate2 import Vocabularies, open_translator, version, write
from transformer.integrations.engine.files import read_engine, seal_engine
from transformer.model.transformer import Transformer
from transformer.vocabulary import BOS, EOS, PAD

QUEUED = 2  # batches for each worker: one is computed, one waits

# What a live hypothesis is taken to lose with each further piece, in the exponent b: those that win in the end repeat
# themselves, and lose little. More is faster and less, closer to torch: docs/translating.md says how close.
LOSS_OF_A_PIECE = 0.7


@dataclass(frozen=True)
class EngineDecoder(BatchedDecoder):
    """One model that CTranslate2 searches with: samples, forced decoding and what it leaves are for torch."""

    searcher: "Searcher" = field(kw_only=True, repr=False)

    @property
    def by_torch(self) -> BatchedDecoder:
        """The same, as torch searches with it."""
        return BatchedDecoder(**{name: value for name, value in vars(self).items() if name != "searcher"})

    def __reduce__(self) -> tuple[object, ...]:
        """What pickle and copy keep: the copy of the weights is made anew, too."""
        return _made_again, (self.by_torch, self.searcher.vocabularies, self.searcher.quantization)

    @property
    def engine(self) -> str:
        """CTranslate2 with its version, and the type of the weights."""
        return f"CTranslate2 {self.searcher.version} in {self.searcher.quantization.value}"

    def with_search(self, search: SearchConfig) -> BatchedDecoder:
        """The same under other settings, by torch where they say so."""
        return replace(self if search.engine != TORCH else self.by_torch, search=search)

    def hypotheses(
        self,
        sources: Sequence[list[int]],
        *,
        n_best: int,
        prefixes: Sequence[list[int]] | None = None,
        penalty: Callable[[int], float] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> list[list[Hypothesis]]:
        """See `BatchedDecoder.hypotheses`."""
        penalty = penalty or length_penalty(self.search.length_penalty)
        max_lengths = [self.max_length(source) for source in sources]
        asked = Asked(sources, max_lengths, prefixes, self.search.beam_size, n_best, penalty, check)
        has_prefix = [prefixes is not None and bool(prefixes[n]) for n in range(len(sources))]
        batches = []
        for wanted in (False, True):  # none of a batch has a prefix, or all have
            group = [n for n, has in enumerate(has_prefix) if has is wanted]
            batches += [[group[n] for n in batch] for batch in self.cut([len(sources[n]) + 1 for n in group])]
        with memory_errors_named("translating", remedy=self._remedy):
            found = self.searcher.hypotheses(asked, batches)

        left = [n for n in range(len(sources)) if n not in found]
        rest = super().hypotheses(
            [sources[n] for n in left],
            n_best=n_best,
            prefixes=None if prefixes is None else [prefixes[n] for n in left],
            penalty=penalty,
            check=check,
        )
        found |= zip(left, rest, strict=True)
        return [found[n] for n in range(len(sources))]

    def sweep(
        self, sources: Sequence[list[int]], penalties: Sequence[Callable[[int], float]]
    ) -> list[list[Hypothesis]]:
        """See `BatchedDecoder.sweep`; by a search for each penalty."""
        by_penalty = [self.hypotheses(sources, n_best=1, penalty=penalty) for penalty in penalties]
        return [[best for [best] in of_source] for of_source in zip(*by_penalty, strict=True)]

    @property
    def _default_tokens(self) -> int:
        """On a CPU, a batch whose logits stay in the cache is faster, and more so in int8."""
        of_cpu = 1_024 if self.searcher.quantization is Quantization.int8 else 2_048
        return of_cpu if self.device.type == "cpu" else super()._default_tokens


class Searcher:
    """A model of ours that CTranslate2 searches with, read from a verified folder when it is first needed.

    On a CPU it has as many threads as torch. A temporary folder lives no longer than this. `files` are the
    contents of the folder, where they were just read.
    """

    def __init__(
        self,
        folder: Path,
        vocabularies: Vocabularies,
        *,
        quantization: Quantization,
        device: torch.device,
        is_temporary: bool = False,
        files: dict[str, bytes] | None = None,
    ) -> None:
        self.version = version()
        self.quantization = quantization
        self.vocabularies = vocabularies
        self.folder = folder
        self._device = device
        self._files = files
        self._ids = {piece: index for index, piece in enumerate(vocabularies.target)}
        self._process = os.getpid()
        if is_temporary:
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    @classmethod
    def of(
        cls, model: Transformer, vocabularies: Vocabularies, *, quantization: Quantization, device: torch.device
    ) -> "Searcher":
        """Of a model, in a temporary folder. Raises OSError."""
        folder = temporary_folder()
        write(model, vocabularies, folder, quantization=quantization)
        seal_engine(folder)
        return cls(folder, vocabularies, quantization=quantization, device=device, is_temporary=True)

    def hypotheses(self, asked: "Asked", batches: Sequence[list[int]]) -> dict[int, list[Hypothesis]]:
        """The best hypotheses of each source, as `beam_search` orders them, but for those left to torch.

        `batches` are the indices of the sources that are searched together, every source in one; in a batch, all
        sources have a prefix or none has.

        Raises InputError in a process that was forked since this was made: the threads are not in it.
        """
        if os.getpid() != self._process:
            raise InputError("search.engine=ctranslate2 cannot be used after a fork: load the translator in the child")
        return self._results(self._together if len(batches) == 1 else self._apart, asked, batches)

    def _results(self, translator: Any, asked: "Asked", batches: Sequence[list[int]]) -> dict[int, list[Hypothesis]]:
        """Of each source in the batches."""
        results: dict[int, list[Hypothesis]] = {}
        again: list[list[int]] = []
        for batch, longest, answers in self._answers(translator, asked, batches):
            cut: dict[int, list[int]] = defaultdict(list)  # by maximum length
            for n, answer in zip(batch, answers, strict=True):
                found = self._found(translator, asked, n, answer, longest=longest)
                has_enough = len(found) >= asked.n_best
                if not has_enough and asked.max_lengths[n] < longest:
                    cut[asked.max_lengths[n]].append(n)
                if has_enough and not asked.may_be_beaten(n, found, answer, longest=longest):
                    results[n] = found[: asked.n_best]
            again += cut.values()
        return results | self._results(translator, asked, again) if again else results

    def _answers(
        self, translator: Any, asked: "Asked", batches: Sequence[list[int]]
    ) -> Iterator[tuple[list[int], int, list[Any]]]:
        """Each batch, the maximum length of it, and what CTranslate2 finds of each source; some are computed ahead."""
        queued = QUEUED * self._n_workers if len(batches) > 1 else 1
        waiting: deque[tuple[list[int], int, list[Any]]] = deque()

        def first() -> tuple[list[int], int, list[Any]]:
            batch, longest, started = waiting.popleft()
            return batch, longest, [one.result() for one in started]

        for batch in batches:
            if len(waiting) == queued:
                yield first()
            asked.check()
            longest = max(asked.max_lengths[n] for n in batch)
            finished = self._n_finished(asked)
            started = translator.translate_batch(
                [self._source(asked.sources[n]) for n in batch],
                None if asked.prefixes is None else [self._target(asked.prefixes[n]) for n in batch],
                asynchronous=True,
                beam_size=asked.beam_size,
                patience=finished / asked.beam_size,
                num_hypotheses=asked.n_best if asked.is_flat else finished,
                length_penalty=asked.exponent(longest),
                max_input_length=0,
                min_decoding_length=0,
                max_decoding_length=longest,
                return_scores=True,
                return_end_token=True,
            )
            waiting.append((batch, longest, started))
        while waiting:
            yield first()

    def _n_finished(self, asked: "Asked") -> int:
        """How many finished hypotheses end the search of a sentence.

        Without a length penalty, one that is live then seldom wins: only float32 promises to find it, as other types
        change more by their rounding.
        """
        if asked.is_flat and self.quantization is not Quantization.float32:
            return asked.beam_size
        return n_finished(asked.beam_size)

    def _found(self, translator: Any, asked: "Asked", n: int, answer: Any, *, longest: int) -> list[Hypothesis]:
        """What CTranslate2 has found of a source and our search would give, the best first; the unfinished last.

        It has cut hypotheses at the maximum length of the batch. They are ours where that is the source's own. In
        greedy search, so is their beginning, as any hypothesis is the only one.
        """
        max_length = asked.max_lengths[n]
        exponent = asked.exponent(longest)
        has_all_log_probs = not (asked.prefixes is not None and asked.prefixes[n])
        found = []
        for pieces, score in zip(answer.hypotheses, answer.scores, strict=True):
            ids = [self._ids[piece] for piece in pieces]
            is_shortened = len(ids) > max_length
            if is_shortened:
                if asked.beam_size > 1:
                    continue
                ids = ids[:max_length]
                has_all_log_probs = False
            finished = ids[-1:] == [EOS]
            is_ours = (finished or len(ids) == max_length) and PAD not in ids and BOS not in ids
            if is_ours:
                tokens = ids[:-1] if finished else ids
                found.append(Hypothesis(tokens, score * len(pieces) ** exponent, finished))
        if found and not has_all_log_probs:
            found = self._with_log_probs(translator, asked.sources[n], found)
        found.sort(key=lambda one: (not one.finished, -one.score(asked.penalty)))  # stable
        return found

    def _with_log_probs(self, translator: Any, source: list[int], found: list[Hypothesis]) -> list[Hypothesis]:
        """The same hypotheses with the log-probabilities of all their pieces: CTranslate2 counts none of a prefix."""
        targets = [self._target(hypothesis.tokens) for hypothesis in found]
        scored = translator.score_batch([self._source(source)] * len(found), targets, max_input_length=0)
        return [
            Hypothesis(hypothesis.tokens, sum(one.log_probs[: hypothesis.length]), hypothesis.finished)
            for hypothesis, one in zip(found, scored, strict=True)
        ]

    def _source(self, ids: list[int]) -> list[str]:
        return [self.vocabularies.source[index] for index in ids]

    def _target(self, ids: list[int]) -> list[str]:
        return [self.vocabularies.target[index] for index in ids]

    # ---- CTranslate2's translators

    @cached_property
    def _apart(self) -> Any:
        """For many batches: as many workers as torch has threads, of one thread each, which wait for no other."""
        return self._open(workers=self._n_workers, threads=1)

    @cached_property
    def _together(self) -> Any:
        """For a batch by itself, in which all threads share."""
        return self._apart if self._n_workers == 1 else self._open(workers=1, threads=self._n_workers)

    @cached_property
    def _n_workers(self) -> int:
        return torch.get_num_threads() if self._device.type == "cpu" else 1

    def _open(self, *, workers: int, threads: int) -> Any:
        files = self._files or read_engine(self.folder)
        self._files = None
        self._check_vocabularies(files)
        try:
            return open_translator(files, device=self._device, workers=workers, threads=threads)
        except (RuntimeError, ValueError) as error:  # of CTranslate2, such as a CUDA library that is missing
            raise InputError(f"search.engine=ctranslate2: {error}: set search.engine=torch") from error

    def _check_vocabularies(self, files: Mapping[str, bytes]) -> None:
        """Raise InputError unless the files have the run's pieces: a manifest may be forged with them."""
        for side, pieces in {"source": self.vocabularies.source, "target": self.vocabularies.target}.items():
            found = None
            with suppress(ValueError, RecursionError):
                found = json.loads(files.get(f"{side}_vocabulary.json", files.get("shared_vocabulary.json", b"")))
            if found != pieces:
                raise InputError(
                    f"{self.folder}: its vocabulary is not the run's: remove the folder; it will be made again"
                )


@dataclass(frozen=True)
class Asked:
    """What is searched for: see `BatchedDecoder.hypotheses`."""

    sources: Sequence[list[int]]
    max_lengths: Sequence[int]
    prefixes: Sequence[list[int]] | None
    beam_size: int
    n_best: int
    penalty: Callable[[int], float]
    check: Callable[[], None]

    @cached_property
    def is_flat(self) -> bool:
        """Whether there is no length penalty."""
        return self.penalty(1) == self.penalty(max(self.max_lengths, default=1))

    def exponent(self, longest: int) -> float:
        """The b for which length^b grows at half this length as the penalty does, in proportion: see `exponent_near`.

        It decides only which hypotheses are left out, where there are more than `n_finished`.
        """
        if self.is_flat:
            return 0.0
        middle = max(2, longest // 2)
        return middle * (self.penalty(middle + 1) - self.penalty(middle - 1)) / (2 * self.penalty(middle))

    def may_be_beaten(self, n: int, found: list[Hypothesis], answer: Any, *, longest: int) -> bool:
        """Whether a hypothesis that was live at the end of a search may still win, by what the last finished one has.

        A live hypothesis is taken to have that log-probability, and to lose LOSS_OF_A_PIECE b with each further piece.
        """
        max_length = self.max_lengths[n]
        has_ended = max(map(len, answer.hypotheses)) >= max_length  # nothing was live
        if self.beam_size == 1 or self.is_flat or has_ended:
            return False
        last = max(found, key=lambda one: (one.length, one.log_prob))
        loss = LOSS_OF_A_PIECE * self.exponent(longest)
        best = found[0].score(self.penalty)
        lengths = range(last.length + 1, max_length + 1)
        return any(last.log_prob - loss * (length - last.length) > best * self.penalty(length) for length in lengths)


def _made_again(decoder: BatchedDecoder, vocabularies: Vocabularies, quantization: Quantization) -> EngineDecoder:
    searcher = Searcher.of(decoder.models[0], vocabularies, quantization=quantization, device=decoder.device)
    return EngineDecoder(**vars(decoder), searcher=searcher)


def n_finished(beam_size: int) -> int:
    """How many finished hypotheses end the search of a sentence, where longer ones may win."""
    return beam_size + beam_size // 2


def temporary_folder() -> Path:
    """A new one, for a searcher that removes it. Raises OSError."""
    return Path(mkdtemp(prefix="transformer-engine-"))
