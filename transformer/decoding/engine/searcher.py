"""Beam search by CTranslate2: batches of ids in, hypotheses with their log-probabilities out.

Its rules differ from those of `beam_search` in three places. It ends a sentence once as many hypotheses are finished as
the beam is wide (without a length penalty: at the first that ranks first, when nothing better can follow). It ranks by
log-probability / length^b: here all hypotheses of the beam are asked for, and ranked again by our penalty. And it has
one maximum length for a batch, where ours depends on the source: a source without enough hypotheses that end within
its own maximum has no result here, and `Batches` searches it by torch.
"""

import os
import shutil
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from transformer.config.settings import Quantization
from transformer.decoding.engine.ctranslate2 import Vocabularies, open_translator, version, write
from transformer.decoding.engine.files import read_engine, seal
from transformer.decoding.search import Hypothesis
from transformer.errors import InputError
from transformer.model.transformer import Transformer
from transformer.vocabulary import BOS, EOS, PAD

QUEUED = 2  # batches for each worker: one is computed, one waits


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
        self._folder = folder
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
        seal(folder)
        return cls(folder, vocabularies, quantization=quantization, device=device, is_temporary=True)

    def hypotheses(
        self,
        sources: Sequence[list[int]],
        batches: Sequence[list[int]],
        *,
        beam_size: int,
        n_best: int,
        max_lengths: Sequence[int],
        penalty: Callable[[int], float],
        prefixes: Sequence[list[int]] | None,
        check: Callable[[], None],
    ) -> list[list[Hypothesis] | None]:
        """The `n_best` best hypotheses of each source, all finished; None for a source that has not as many.

        `batches` are the indices of the sources that are searched together, every source in one; in a batch, all
        sources have a prefix or none has. `check` is called before each batch, and may raise.

        Raises InputError in a process that was forked since this was made: the threads are not in it.
        """
        if os.getpid() != self._process:
            raise InputError("search.engine=ctranslate2 cannot be used after a fork: load the translator in the child")
        translator = self._together if len(batches) == 1 else self._apart
        queued = QUEUED * self._n_workers if len(batches) > 1 else 1
        is_flat = penalty(1) == penalty(max(max_lengths, default=1))

        results: dict[int, list[Hypothesis] | None] = {}

        def end(batch: list[int], started: list[Any], exponent: float) -> None:
            for n, result in zip(batch, started, strict=True):
                one = result.result()
                candidates = self._candidates(one.hypotheses, one.scores, exponent, max_length=max_lengths[n])
                if prefixes is not None and prefixes[n]:
                    candidates = self._with_log_probs(translator, sources[n], candidates)
                candidates.sort(key=lambda found: -found.score(penalty))  # stable
                results[n] = candidates[:n_best] if len(candidates) >= n_best else None

        waiting: deque[tuple[list[int], list[Any], float]] = deque()
        for batch in batches:
            if len(waiting) == queued:
                end(*waiting.popleft())
            check()
            longest = max(max_lengths[n] for n in batch)
            exponent = 0.0 if is_flat else _exponent(penalty, longest)
            started = translator.translate_batch(
                [self._source(sources[n]) for n in batch],
                None if prefixes is None else [self._target(prefixes[n]) for n in batch],
                asynchronous=True,
                beam_size=beam_size,
                num_hypotheses=n_best if is_flat else beam_size,
                length_penalty=exponent,
                max_input_length=0,
                min_decoding_length=0,
                max_decoding_length=longest,
                return_scores=True,
                return_end_token=True,
            )
            waiting.append((batch, started, exponent))
        while waiting:
            end(*waiting.popleft())
        return [results[n] for n in range(len(sources))]

    def _candidates(
        self, texts: Sequence[list[str]], scores: Sequence[float], exponent: float, *, max_length: int
    ) -> list[Hypothesis]:
        """What CTranslate2 found of a source, but for what our search would not have given as finished."""
        candidates = []
        for pieces, score in zip(texts, scores, strict=True):
            ids = [self._ids[piece] for piece in pieces]
            is_ours = ids[-1:] == [EOS] and len(ids) <= max_length and PAD not in ids and BOS not in ids
            if is_ours:
                candidates.append(Hypothesis(ids[:-1], score * len(ids) ** exponent, finished=True))
        return candidates

    def _with_log_probs(self, translator: Any, source: list[int], found: list[Hypothesis]) -> list[Hypothesis]:
        """The same hypotheses with the log-probabilities of all their pieces: CTranslate2 counts none of a prefix."""
        if not found:
            return []
        targets = [self._target(hypothesis.tokens) for hypothesis in found]
        scored = translator.score_batch([self._source(source)] * len(found), targets)
        return [
            Hypothesis(hypothesis.tokens, sum(one.log_probs), finished=True)
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
        files = self._files or read_engine(self._folder)
        self._files = None
        try:
            return open_translator(files, device=self._device, workers=workers, threads=threads)
        except (RuntimeError, ValueError) as error:  # of CTranslate2, such as a CUDA library that is missing
            raise InputError(f"search.engine=ctranslate2: {error}: set search.engine=torch") from error


def temporary_folder() -> Path:
    """A new one, for a searcher that removes it. Raises OSError."""
    return Path(mkdtemp(prefix="transformer-engine-"))


def _exponent(penalty: Callable[[int], float], length: int) -> float:
    """The b for which length^b grows at half this length as the penalty does, in proportion: see `exponent_near`.

    It decides only which of more hypotheses than the beam is wide are left out.
    """
    middle = max(2, length // 2)
    return middle * (penalty(middle + 1) - penalty(middle - 1)) / (2 * penalty(middle))
