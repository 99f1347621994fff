"""Text in, text out: a model, its tokenizer and its search settings, over any number of sentences.

Sentences of like length share a batch, and come back in the order given. The other sentences of a batch change a
translation by rounding alone: the shape of a batch decides the order in which its products are summed. A text without
a visible character never reaches the model, which would make something up for it.
"""

import logging
import math
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from numbers import Integral, Real
from threading import Event
from typing import TypeVar

import torch
from torch import Tensor

from transformer.compute import (
    autocast,
    default_batch_tokens,
    memory_errors_named,
)
from transformer.config.settings import (
    MOST_BEAM,
    Precision,
    SampleConfig,
    SearchConfig,
    SearchOverride,
)
from transformer.data.tokenizer import Tokenizer
from transformer.decoding.ensemble import EnsembleState, decode_step
from transformer.decoding.forced import Pair, align, pad, piece_log_probs
from transformer.decoding.output import BLANK, UNSCORED, Alignment, Scored, Translation
from transformer.decoding.parallel import MOST_AT_ONCE, in_parallel
from transformer.decoding.sampling import Sampling, sample
from transformer.decoding.search import Hypothesis, beam_search, length_penalty, sweep_penalties
from transformer.errors import InputError
from transformer.model.inference import for_inference
from transformer.model.transformer import Transformer
from transformer.vocabulary import BOS, EOS

log = logging.getLogger(__name__)

_MOST_HYPOTHESES = 8_192  # of a batch

Found = TypeVar("Found")
Models = tuple[Transformer, ...]


@dataclass(frozen=True)
class _Prefix:
    """What a translation has to begin with: the text, and its pieces, none for a blank one."""

    text: str
    ids: list[int]


@dataclass(frozen=True)
class _Batch:
    """Sources that are searched together, and what a search of them begins from."""

    lines: list[int]  # the number of each source
    step: Callable[[Tensor, EnsembleState], tuple[Tensor, EnsembleState]]
    state: EnsembleState
    max_lengths: Tensor  # (B,) the longest translation of each source
    prefixes: Tensor | None  # (B, P) what each translation begins with, and PAD behind it


@dataclass(frozen=True)
class Translator:
    """A model with its tokenizer, its search settings, and where and in which arithmetic it computes.

    With `others` it is an ensemble: at each step the probabilities of all models are averaged.

    `load` makes one of a run directory; `translate` is its main method. The model may still be in training: each call
    makes it ready for inference anew, and leaves it as it was. Two threads must not use one translator at the same
    time: it divides torch's threads among its own.
    """

    model: Transformer
    tokenizer: Tokenizer
    search: SearchConfig
    device: torch.device
    precision: Precision
    others: Models = ()
    _ready: Models = field(default=(), init=False, repr=False, compare=False)

    def keep_ready(self) -> None:
        """Make the model ready for inference once: its weights will stay as they are."""
        object.__setattr__(self, "_ready", self._make_ready())

    def _make_ready(self) -> Models:
        with self._arithmetic():
            return tuple(for_inference(model) for model in (self.model, *self.others))

    def translate(
        self,
        texts: Sequence[str],
        *,
        check: Callable[[], None] = lambda: None,
        first_line: int = 1,
        strict: bool = False,
    ) -> list[str]:
        """The translation of each text, in the order given: as many as there are texts, one line each.

        A text is one sentence as people write it: the tokenizer is part of the translator. All texts may be given at
        once, because they are sorted by length and cut into batches of `search.batch_tokens`. A blank text becomes "".

        A text of more pieces than `model.max_positions` has room for is cut, and logged with its line, counted from
        `first_line`; `strict` raises InputError instead. `check` is called before each batch, and may raise.

        Raises InputError for a single text that is not in a list.
        """
        sources = self._encode(texts, first_line=first_line, strict=strict)
        hypotheses = self.hypotheses(list(sources.values()), n_best=1, check=check)
        return self._decode([best for [best] in hypotheses], list(sources), n_texts=len(texts))

    def translate_n_best(
        self,
        texts: Sequence[str],
        n_best: int,
        *,
        prefixes: Sequence[str] | None = None,
        align: bool = False,
        check: Callable[[], None] = lambda: None,
        first_line: int = 1,
        strict: bool = False,
    ) -> list[list[Translation]]:
        """The `n_best` best translations of each text, the best first, with their scores.

        Each translation begins with the prefix of its text, where `prefixes` has one that is not blank. The tokenizer
        cuts a prefix by itself, and the search goes on from these pieces: a prefix should end with a whole word, for
        half a word is cut otherwise than the whole word would be; whether its last word goes on, the model decides.

        `align` adds which source piece each piece belongs to. The other arguments are those of `translate`. There are
        fewer than `n_best` only where no more are possible; and a blank text has one, which is blank.

        Raises InputError as `translate` does, unless n_best is from 1 to search.beam_size, and for prefixes that are
        not as many as texts, or longer than a translation may be.
        """
        beam_size = self.search.beam_size
        if not 1 <= n_best <= beam_size:
            raise InputError(f"n_best={n_best} must be from 1 to search.beam_size={beam_size}: raise that, or lower it")

        return self._translate_by(
            self._beam_search(n_best, length_penalty(self.search.length_penalty)),
            texts,
            prefixes,
            width=beam_size,
            align=align,
            check=check,
            first_line=first_line,
            strict=strict,
        )

    def sample(
        self,
        texts: Sequence[str],
        n_samples: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 1,
        prefixes: Sequence[str] | None = None,
        align: bool = False,
        check: Callable[[], None] = lambda: None,
        first_line: int = 1,
        strict: bool = False,
    ) -> list[list[Translation]]:
        """`n_samples` translations of each text, drawn piece by piece, in the order in which they were drawn.

        Each piece is drawn from the probabilities of the model, sharpened by a `temperature` below 1 and flattened by
        one above; then among the `top_k` most probable; then among the fewest of these that together have at least the
        share `top_p`. The draw depends on `seed`, the line (counted from `first_line`), the sample and the step alone:
        the same line gives the same samples, whatever it shares a batch with, but for rounding.

        `log_prob` and `score` are the model's own, without temperature and limits. The other arguments, and what is
        raised, are as for `translate_n_best`.
        """
        sampling = _sampling(temperature, top_k=top_k, top_p=top_p, seed=seed)
        if not 1 <= n_samples <= MOST_BEAM:
            raise InputError(f"n_samples={n_samples} must be from 1 to {MOST_BEAM}")

        def search(batch: _Batch) -> list[list[Hypothesis]]:
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

        return self._translate_by(
            search,
            texts,
            prefixes,
            width=n_samples,
            align=align,
            check=check,
            first_line=first_line,
            strict=strict,
        )

    def _translate_by(
        self,
        search: Callable[[_Batch], list[list[Hypothesis]]],
        texts: Sequence[str],
        prefixes: Sequence[str] | None,
        *,
        width: int,
        align: bool,
        check: Callable[[], None],
        first_line: int,
        strict: bool,
    ) -> list[list[Translation]]:
        """The translations that `search` finds with `width` hypotheses of each sentence at a time."""
        sources = self._encode(texts, first_line=first_line, strict=strict)
        begun = self._encode_prefixes(prefixes, sources, n_texts=len(texts), first_line=first_line)
        hypotheses = self._search(
            list(sources.values()),
            search,
            width=width,
            lines=[first_line + n for n in sources],
            prefixes=[prefix.ids for prefix in begun],
            check=check,
        )
        alignments = self._align(list(sources.values()), hypotheses, check=check) if align else None

        translations = self._translations(hypotheses, begun, alignments)
        found = dict(zip(sources, translations, strict=True))
        return [found.get(n, [BLANK]) for n in range(len(texts))]

    def translate_sweep(
        self, texts: Sequence[str], length_penalties: Sequence[float], *, check: Callable[[], None] = lambda: None
    ) -> dict[float, list[str]]:
        """For each of these alphas, what `translate` would give with it as `search.length_penalty`: from one search.

        It takes little longer than to translate once. What an alpha gives can differ from its own `translate` by
        rounding alone: a sentence leaves its batch when it is done under every alpha, and so in other company.

        Raises InputError for a single text that is not in a list, for no alpha, and for one that cannot be.
        """
        if not length_penalties:
            raise InputError("translate_sweep needs at least one length penalty")
        for alpha in length_penalties:
            search_override(None, alpha, max_extra=None, batch_tokens=None)  # only for its checks
        penalties = [length_penalty(alpha) for alpha in length_penalties]

        def search(batch: _Batch) -> list[list[Hypothesis]]:
            return sweep_penalties(
                batch.step,
                batch.state,
                beam_size=self.search.beam_size,
                max_lengths=batch.max_lengths,
                penalties=penalties,
                bos=BOS,
                eos=EOS,
            )

        sources = self._encode(texts, first_line=1, strict=False)
        hypotheses = self._search(list(sources.values()), search, width=self.search.beam_size, check=check)
        return {
            alpha: self._decode([of_one[n] for of_one in hypotheses], list(sources), n_texts=len(texts))
            for n, alpha in enumerate(length_penalties)
        }

    def hypotheses(
        self,
        sources: Sequence[list[int]],
        *,
        n_best: int,
        check: Callable[[], None],
        penalty: Callable[[int], float] | None = None,
    ) -> list[list[Hypothesis]]:
        """The `n_best` best hypotheses of each source, with their log-probabilities, in the order of the sources.

        Sources and hypotheses are ids of pieces, without BOS and EOS: `tokenizer.encode` and `decode` turn texts into
        ids and back. The best hypothesis comes first; see `beam_search` for what a list holds. `check` is called before
        each batch, and may raise. `penalty` is another function of |Y| than that of `search.length_penalty`, such as
        another toolkit's; it must not fall.

        Raises ValueError unless 1 <= n_best <= search.beam_size, and InputError where a GPU has too little memory.
        """
        rank_by = length_penalty(self.search.length_penalty) if penalty is None else penalty
        return self._search(sources, self._beam_search(n_best, rank_by), width=self.search.beam_size, check=check)

    def score(
        self,
        sources: Sequence[str],
        targets: Sequence[str],
        *,
        check: Callable[[], None] = lambda: None,
        first_line: int = 1,
        origins: tuple[str, str] = ("sources", "targets"),
    ) -> list[Scored]:
        """How probable each target is as a translation of its source: natural log-probabilities, by piece and in all.

        A pair of which a side is blank has no score. EOS counts, so `log_prob` is that of the whole translation.
        `origins` and `first_line` are what errors name.

        Raises InputError unless there are as many targets as sources, in lists, and where a text is longer than the
        model has positions for: cut, it would be another sentence.
        """
        pairs = self._encode_pairs(sources, targets, first_line=first_line, origins=origins)
        ids_of = list(pairs.values())

        def work(models: Models, batch: list[int], _: Event) -> list[list[float]]:
            return piece_log_probs(models, [ids_of[n] for n in batch], self.device)

        log_probs = self._in_batches(_lengths(ids_of), work, width=1, check=check)

        penalty = length_penalty(self.search.length_penalty)
        found = {}
        for (n, (_, target)), values in zip(pairs.items(), log_probs, strict=True):
            total = math.fsum(values)
            found[n] = Scored(total, total / penalty(len(values)), self._pieces([*target, EOS]), values)
        return [found.get(n, UNSCORED) for n in range(len(sources))]

    # --- ids in batches

    def _beam_search(self, n_best: int, penalty: Callable[[int], float]) -> Callable[[_Batch], list[list[Hypothesis]]]:
        """The beam search of a batch, under this translator's settings and this length penalty."""

        def search(batch: _Batch) -> list[list[Hypothesis]]:
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
            )

        return search

    def _search(
        self,
        sources: Sequence[list[int]],
        search: Callable[[_Batch], list[Found]],
        *,
        width: int,
        check: Callable[[], None],
        lines: Sequence[int] | None = None,
        prefixes: Sequence[list[int]] | None = None,
    ) -> list[Found]:
        """What `search` finds for each source, with `width` hypotheses of each at a time."""

        def work(models: Models, batch: list[int], cancelled: Event) -> list[Found]:
            def step(tokens: Tensor, state: EnsembleState) -> tuple[Tensor, EnsembleState]:
                if cancelled.is_set():
                    raise CancelledError
                return decode_step(models, tokens, state)

            begun = [] if prefixes is None else [prefixes[n] for n in batch]
            return search(
                _Batch(
                    lines=[] if lines is None else [lines[n] for n in batch],
                    step=step,
                    state=self._start(models, [sources[n] for n in batch], width=width),
                    max_lengths=torch.tensor([self._max_length(sources[n]) for n in batch], device=self.device),
                    prefixes=pad(begun, self.device)[0] if any(begun) else None,
                )
            )

        return self._in_batches([len(ids) + 1 for ids in sources], work, width=width, check=check)

    def _in_batches(
        self,
        lengths: list[int],
        work: Callable[[Models, list[int], Event], list[Found]],
        *,
        width: int,
        check: Callable[[], None],
    ) -> list[Found]:
        """What `work` finds for each item, a batch of items of like length at a time, each with `width` rows.

        `work` is given the models, the items of a batch, and an event that is set when it shall give up.

        A CPU works on several batches at once, each with its share of the threads: two threads that share a batch wait
        for each other at each of its small products.
        """
        batch_tokens = self.search.batch_tokens or default_batch_tokens(self.device)
        remedy = f"lower search.batch_tokens (now {batch_tokens})"
        batches = list(_batches(lengths, beam_size=width, batch_tokens=batch_tokens))

        with memory_errors_named("translating", remedy=remedy):
            models = self._ready or self._make_ready()

        def found(batch: list[int], cancelled: Event) -> list[tuple[int, Found]]:
            with self._arithmetic(), memory_errors_named("translating", remedy=remedy):
                return list(zip(batch, work(models, batch, cancelled), strict=True))

        on_cpu = self.device.type == "cpu"
        at_once = min(len(batches), torch.get_num_threads(), MOST_AT_ONCE) if on_cpu else 1
        results = dict(chain.from_iterable(in_parallel(found, batches, at_once=at_once, check=check)))
        return [results[n] for n in range(len(lengths))]

    @contextmanager
    def _arithmetic(self) -> Iterator[None]:
        with torch.no_grad(), autocast(self.device, self.precision):
            yield

    def _start(self, models: Models, sources: list[list[int]], *, width: int) -> EnsembleState:
        """What the search of one batch begins from."""
        source, layout = pad([[*ids, EOS] for ids in sources], self.device)  # (B, S)
        return EnsembleState([model.start(model.encode(source, layout), layout, beam_size=width) for model in models])

    def _max_length(self, source: list[int]) -> int:
        """The largest |Y| of a translation: none may be longer than a model has positions for."""
        return min(len(source) + self.search.max_extra, self._max_positions)

    @property
    def _max_positions(self) -> int:
        return min(model.config.max_positions for model in (self.model, *self.others))

    def _align(
        self, sources: Sequence[list[int]], hypotheses: Sequence[Sequence[Hypothesis]], *, check: Callable[[], None]
    ) -> list[list[Alignment]]:
        """The alignment of each hypothesis with its source."""
        pairs = [(ids, one.tokens) for ids, of_one in zip(sources, hypotheses, strict=True) for one in of_one]

        def work(models: Models, batch: list[int], _: Event) -> list[list[int]]:
            return align(models, [pairs[n] for n in batch], self.device)

        aligned = iter(zip(pairs, self._in_batches(_lengths(pairs), work, width=1, check=check), strict=True))
        return [
            [
                Alignment(self._pieces(source), self._pieces(target), source_of)
                for (source, target), source_of in islice(aligned, len(of_one))
            ]
            for of_one in hypotheses
        ]

    # --- text to ids and back

    def _encode(self, texts: Sequence[str], *, first_line: int, strict: bool) -> dict[int, list[int]]:
        """The pieces of each text that is not blank, by its place among the texts."""
        _check_list(texts, "translate", "translate([text])")
        shown = [n for n, text in enumerate(texts) if not is_blank(text)]
        encoded = self.tokenizer.encode([texts[n] for n in shown])
        pieces = {n: ids for n, ids in zip(shown, encoded, strict=True) if ids}
        return {n: self._truncate(ids, first_line + n, strict=strict) for n, ids in pieces.items()}

    def _encode_pairs(
        self, sources: Sequence[str], targets: Sequence[str], *, first_line: int, origins: tuple[str, str]
    ) -> dict[int, Pair]:
        """The pieces of each pair that has no blank side, by its place among the pairs."""
        for texts in (sources, targets):
            _check_list(texts, "score", "score([source], [target])")
        if len(sources) != len(targets):
            raise InputError(f"{len(sources)} sources, but {len(targets)} targets: each target belongs to one source")

        shown = [n for n in range(len(sources)) if not (is_blank(sources[n]) or is_blank(targets[n]))]
        source_ids = self.tokenizer.encode([sources[n] for n in shown])
        target_ids = self.tokenizer.encode([targets[n] for n in shown])

        found = {}
        for n, source, target in zip(shown, source_ids, target_ids, strict=True):
            self._check_length(source, f"{origins[0]}:{first_line + n}: the source")
            self._check_length(target, f"{origins[1]}:{first_line + n}: the target")
            if source and target:
                found[n] = (source, target)
        return found

    def _decode(self, hypotheses: list[Hypothesis], places: list[int], *, n_texts: int) -> list[str]:
        """The texts of these hypotheses, each in its place among `n_texts`, the others empty."""
        translations = self.tokenizer.decode([hypothesis.tokens for hypothesis in hypotheses])
        found = dict(zip(places, translations, strict=True))
        return [found.get(n, "") for n in range(n_texts)]

    def _encode_prefixes(
        self, prefixes: Sequence[str] | None, sources: dict[int, list[int]], *, n_texts: int, first_line: int
    ) -> list[_Prefix]:
        """The prefix of the translation of each source."""
        if prefixes is None:
            return [_Prefix("", []) for _ in sources]
        _check_list(prefixes, "prefixes", "prefixes=[text]")
        if len(prefixes) != n_texts:
            raise InputError(f"{len(prefixes)} prefixes for {n_texts} texts: give one for each, a blank one for none")

        texts = ["" if is_blank(prefixes[n]) else " ".join(prefixes[n].split()) for n in sources]
        found = [_Prefix(text, ids) for text, ids in zip(texts, self.tokenizer.encode(texts), strict=True)]
        for (n, source), prefix in zip(sources.items(), found, strict=True):
            most = self._max_length(source) - 1  # EOS, too, takes a place
            if len(prefix.ids) > most:
                raise InputError(
                    f"line {first_line + n}: its prefix has {len(prefix.ids)} pieces, but a translation of this source "
                    f"has room for {most}: shorten the prefix, or raise search.max_extra"
                )
        return found

    def _translations(
        self,
        hypotheses: list[list[Hypothesis]],
        prefixes: list[_Prefix],
        alignments: list[list[Alignment]] | None,
    ) -> list[list[Translation]]:
        """The hypotheses of some sources, as text with scores.

        A prefix stands in the text as it was given, even where its pieces do not spell it: an unknown character has
        none of its own.
        """
        penalty = length_penalty(self.search.length_penalty)
        texts = iter(self.tokenizer.decode([one.tokens for of_one in hypotheses for one in of_one]))
        spelt = self.tokenizer.decode([prefix.ids for prefix in prefixes])

        found = []
        for n, of_one in enumerate(hypotheses):
            aligned = [None] * len(of_one) if alignments is None else alignments[n]
            found.append(
                [
                    Translation(
                        text=prefixes[n].text + next(texts).removeprefix(spelt[n]),
                        log_prob=one.log_prob,
                        score=one.score(penalty),
                        finished=one.finished,
                        alignment=alignment,
                    )
                    for one, alignment in zip(of_one, aligned, strict=True)
                ]
            )
        return found

    def _pieces(self, ids: list[int]) -> list[str]:
        return [self.tokenizer.piece(index) for index in ids]

    def _truncate(self, ids: list[int], line: int, *, strict: bool) -> list[int]:
        """The pieces of a source that the model has positions for, beside EOS; `strict` refuses a longer one."""
        max_pieces = self._max_positions - 1
        if len(ids) <= max_pieces:
            return ids

        problem = f"line {line}: {len(ids)} pieces, but model.max_positions has room for {max_pieces}"
        if strict:
            raise InputError(f"{problem}: split the line, or leave out strict=true to have it truncated")
        log.warning("%s: only the first %d are translated", problem, max_pieces)
        return ids[:max_pieces]

    def _check_length(self, ids: list[int], what: str) -> None:
        """Raise InputError for a text that the model has no positions for, beside EOS."""
        most = self._max_positions - 1
        if len(ids) > most:
            raise InputError(
                f"{what} has {len(ids)} pieces, but model.max_positions has room for {most}: shorten it, or leave the "
                "pair out"
            )


def _check_list(texts: Sequence[str], name: str, example: str) -> None:
    """A text is a sequence of texts, too: each letter would be taken for one."""
    if isinstance(texts, str):
        raise InputError(f"{name} takes a list of texts: for a single one, write {example}")


def _lengths(pairs: Sequence[Pair]) -> list[int]:
    """How many positions each pair takes, EOS counted."""
    return [max(len(source), len(target)) + 1 for source, target in pairs]


def _sampling(temperature: float, *, top_k: int | None, top_p: float | None, seed: int) -> Sampling:
    """The settings that a user gave, checked: Python lets a text through where a number is asked for."""
    for name, value in {"top_k": top_k, "seed": seed}.items():
        if not isinstance(value, Integral | None):
            raise InputError(f"{name}={value!r} must be a whole number")
    for name, number in {"temperature": temperature, "top_p": top_p}.items():
        if not isinstance(number, Real | None):
            raise InputError(f"{name}={number!r} must be a number")

    try:
        SampleConfig(temperature, top_k, top_p, seed)
    except ValueError as error:
        raise InputError(str(error).removeprefix("sample.")) from None
    return Sampling(temperature, top_k, top_p, seed)


def search_override(
    beam_size: int | None, length_penalty: float | None, *, max_extra: int | None, batch_tokens: int | None
) -> SearchOverride:
    """The settings that a user gave, checked: Python lets a text or a fraction through where a number is asked for."""
    whole = {"beam_size": beam_size, "max_extra": max_extra, "batch_tokens": batch_tokens}
    for name, value in whole.items():
        if not isinstance(value, Integral | None):
            raise InputError(f"{name}={value!r} must be a whole number, or None for the run's own")
    if not isinstance(length_penalty, Real | None):
        raise InputError(f"length_penalty={length_penalty!r} must be a number, or None for the run's own")

    try:
        return SearchOverride(beam_size, length_penalty, max_extra, batch_tokens)
    except ValueError as error:
        raise InputError(str(error).removeprefix("search.")) from None


def is_blank(text: str) -> bool:
    """Whether nothing in the text is visible: spaces of all kinds, controls, zero-width and direction marks."""
    return all(unicodedata.category(character) in ("Zs", "Zl", "Zp", "Cc", "Cf") for character in text)


def _batches(lengths: list[int], *, beam_size: int, batch_tokens: int) -> Iterator[list[int]]:
    """Indices by falling length, in batches of rows x beam x width <= batch_tokens, or of one row.

    The longest sentences go first, so that too little memory shows at once: for that, the short ones at the end must
    not be so many that the logits of their hypotheses are the larger part.
    """
    batch: list[int] = []
    for n in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        hypotheses = (len(batch) + 1) * beam_size
        if batch and (hypotheses * lengths[batch[0]] > batch_tokens or hypotheses > _MOST_HYPOTHESES):
            yield batch
            batch = []
        batch.append(n)
    if batch:
        yield batch
