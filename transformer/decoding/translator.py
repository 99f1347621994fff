"""Text in, text out: a model, its tokenizer and its search settings, over any number of sentences.

Sentences of like length share a batch, and come back in the order given. The other sentences of a batch change a
translation by rounding alone: the shape of a batch decides the order in which its products are summed. A text without
a visible character never reaches the model, which would make something up for it.
"""

import logging
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from numbers import Integral, Real
from pathlib import Path
from threading import Event
from typing import Literal, TypeVar

import torch
from torch import Tensor

from transformer.checkpoint import Checkpoint, find_checkpoint
from transformer.compute import (
    autocast,
    default_batch_tokens,
    dtype_of,
    memory_errors_named,
    resolve_device,
    resolve_precision,
)
from transformer.config.settings import Device, ModelConfig, Precision, SearchConfig, SearchOverride
from transformer.data.tokenizer import Tokenizer, read_model
from transformer.decoding.parallel import MOST_AT_ONCE, in_parallel
from transformer.decoding.search import Hypothesis, beam_search, length_penalty, sweep_penalties
from transformer.errors import CheckpointError, InputError
from transformer.layout import Padded
from transformer.model.inference import for_inference
from transformer.model.transformer import DecoderState, Transformer, check_size, load_parameters
from transformer.run_dir import RunDir
from transformer.vocabulary import BOS, EOS, PAD

log = logging.getLogger(__name__)

_MOST_HYPOTHESES = 8_192  # of a batch

Choice = TypeVar("Choice", bound=Enum)
Found = TypeVar("Found")
DecoderStep = Callable[[Tensor, DecoderState], tuple[Tensor, DecoderState]]


@dataclass(frozen=True)
class Translator:
    """A model with its tokenizer, its search settings, and where and in which arithmetic it computes.

    `load` makes one of a run directory; `translate` is its main method. The model may still be in training: each call
    makes it ready for inference anew, and leaves it as it was. Two threads must not use one translator at the same
    time: it divides torch's threads among its own.
    """

    model: Transformer
    tokenizer: Tokenizer
    search: SearchConfig
    device: torch.device
    precision: Precision
    _ready: Transformer | None = field(default=None, init=False, repr=False, compare=False)

    def keep_ready(self) -> None:
        """Make the model ready for inference once: its weights will stay as they are."""
        object.__setattr__(self, "_ready", self._make_ready())

    def _make_ready(self) -> Transformer:
        with self._arithmetic():
            return for_inference(self.model)

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
            _search_override(None, alpha, max_extra=None, batch_tokens=None)  # only for its checks
        penalties = [length_penalty(alpha) for alpha in length_penalties]

        def search(step: DecoderStep, state: DecoderState, max_lengths: Tensor) -> list[list[Hypothesis]]:
            return sweep_penalties(
                step,
                state,
                beam_size=self.search.beam_size,
                max_lengths=max_lengths,
                penalties=penalties,
                bos=BOS,
                eos=EOS,
            )

        sources = self._encode(texts, first_line=1, strict=False)
        hypotheses = self._in_batches(list(sources.values()), search, check=check)
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

        def search(step: DecoderStep, state: DecoderState, max_lengths: Tensor) -> list[list[Hypothesis]]:
            return beam_search(
                step,
                state,
                beam_size=self.search.beam_size,
                n_best=n_best,
                max_lengths=max_lengths,
                penalty=rank_by,
                bos=BOS,
                eos=EOS,
            )

        return self._in_batches(sources, search, check=check)

    def _in_batches(
        self,
        sources: Sequence[list[int]],
        search: Callable[[DecoderStep, DecoderState, Tensor], list[Found]],
        *,
        check: Callable[[], None],
    ) -> list[Found]:
        """What `search` finds for each source, a batch of sources of like length at a time.

        It is given the step of the decoder, the state before the first, and the longest translation of each source.

        A CPU searches several batches at once, each with its share of the threads: two threads that share a batch wait
        for each other at each of its small products.
        """
        lengths = [len(ids) + 1 for ids in sources]
        batch_tokens = self.search.batch_tokens or default_batch_tokens(self.device)
        remedy = f"lower search.batch_tokens (now {batch_tokens})"
        batches = list(_batches(lengths, beam_size=self.search.beam_size, batch_tokens=batch_tokens))

        with memory_errors_named("translating", remedy=remedy):
            model = self._ready or self._make_ready()

        def found(batch: list[int], cancelled: Event) -> list[tuple[int, Found]]:
            def step(tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
                if cancelled.is_set():
                    raise CancelledError
                return model.decode_step(tokens, state)

            with self._arithmetic(), memory_errors_named("translating", remedy=remedy):
                state, max_lengths = self._start(model, [sources[n] for n in batch])
                return list(zip(batch, search(step, state, max_lengths), strict=True))

        on_cpu = self.device.type == "cpu"
        at_once = min(len(batches), torch.get_num_threads(), MOST_AT_ONCE) if on_cpu else 1
        results = dict(chain.from_iterable(in_parallel(found, batches, at_once=at_once, check=check)))
        return [results[n] for n in range(len(sources))]

    @contextmanager
    def _arithmetic(self) -> Iterator[None]:
        with torch.no_grad(), autocast(self.device, self.precision):
            yield

    def _start(self, model: Transformer, sources: list[list[int]]) -> tuple[DecoderState, Tensor]:
        """What the search of one batch begins from, and the longest translation of each source `(B,)`.

        No translation may be longer than the model has positions for.
        """
        # The sources, padded.
        lengths = [len(ids) + 1 for ids in sources]  # with EOS
        width = max(lengths)
        rows = [[*ids, EOS, *[PAD] * (width - length)] for ids, length in zip(sources, lengths, strict=True)]
        layout = Padded.of(lengths, width).to(self.device)
        memory = model.encode(torch.tensor(rows, device=self.device), layout)  # (B, S, D)

        max_positions = self.model.config.max_positions
        max_lengths = [min(len(ids) + self.search.max_extra, max_positions) for ids in sources]

        state = model.start(memory, layout, beam_size=self.search.beam_size)
        return state, torch.tensor(max_lengths, device=self.device)

    def _encode(self, texts: Sequence[str], *, first_line: int, strict: bool) -> dict[int, list[int]]:
        """The pieces of each text that is not blank, by its place among the texts."""
        if isinstance(texts, str):
            raise InputError("translate takes a list of texts: for a single one, write translate([text])")

        shown = [n for n, text in enumerate(texts) if not _is_blank(text)]
        encoded = self.tokenizer.encode([texts[n] for n in shown])
        pieces = {n: ids for n, ids in zip(shown, encoded, strict=True) if ids}
        return {n: self._truncate(ids, first_line + n, strict=strict) for n, ids in pieces.items()}

    def _decode(self, hypotheses: list[Hypothesis], places: list[int], *, n_texts: int) -> list[str]:
        """The texts of these hypotheses, each in its place among `n_texts`, the others empty."""
        translations = self.tokenizer.decode([hypothesis.tokens for hypothesis in hypotheses])
        found = dict(zip(places, translations, strict=True))
        return [found.get(n, "") for n in range(n_texts)]

    def _truncate(self, ids: list[int], line: int, *, strict: bool) -> list[int]:
        """The pieces of a source that the model has positions for, beside EOS; `strict` refuses a longer one."""
        max_pieces = self.model.config.max_positions - 1
        if len(ids) <= max_pieces:
            return ids

        problem = f"line {line}: {len(ids)} pieces, but model.max_positions has room for {max_pieces}"
        if strict:
            raise InputError(f"{problem}: split the line, or leave out strict=true to have it truncated")
        log.warning("%s: only the first %d are translated", problem, max_pieces)
        return ids[:max_pieces]


def _is_blank(text: str) -> bool:
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


# --- from a run directory


def load(
    run_dir: str | Path,
    *,
    checkpoint: str = "auto",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = "auto",
    beam_size: int | None = None,
    length_penalty: float | None = None,
    max_extra: int | None = None,
    batch_tokens: int | None = None,
) -> Translator:
    """The translator of a run directory, to be used from Python: `transformer.load("runs/demo").translate(texts)`.

    run_dir: a directory that training made, finished or not.
    checkpoint: "averaged", "best", "last", "step-1200", or "auto": the average where there is one, else the last.
    device: "auto" is the GPU where there is one.
    precision: the arithmetic of the forward pass; "auto" is that in which the run was trained, unless this device
        is too slow at it.
    beam_size: hypotheses kept in the search (section 6.1); 1 is greedy search.
    length_penalty: alpha of ((5 + |Y|) / 6)^alpha; larger prefers longer translations.
    max_extra: a translation has at most this many pieces more than its source.
    batch_tokens: the size of a batch, in padded source pieces times `beam_size`: what decides on the memory. A CPU
        holds as many batches as torch has threads, but at most 8.

    None leaves a search setting as the run was trained with. The number of CPU threads is torch's.

    Raises InputError for a value that cannot be, and where there is no such run or checkpoint; CheckpointError where
    it is damaged.
    """
    return load_translator(
        Path(run_dir),
        checkpoint=checkpoint,
        search=_search_override(beam_size, length_penalty, max_extra=max_extra, batch_tokens=batch_tokens),
        device=_choose(Device, "device", device),
        precision=_choose(Precision, "precision", precision),
    )


def _choose(kind: type[Choice], name: str, value: str) -> Choice:
    """The member of an enum that a user's word names."""
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(str(member.value) for member in kind)
        raise InputError(f"{name}={value!r} is not one of {known}") from None


def _search_override(
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


def load_translator(
    run_dir: Path, *, checkpoint: str, search: SearchOverride, device: Device, precision: Precision
) -> Translator:
    """The translator of a run. Raises InputError where there is nothing to load, CheckpointError if damaged."""
    chosen = find_checkpoint(run_dir, checkpoint)
    return build_translator(run_dir, chosen, search=search, device=device, precision=precision)


def build_translator(
    run_dir: Path, checkpoint: Checkpoint, *, search: SearchOverride, device: Device, precision: Precision
) -> Translator:
    """The translator of a checkpoint, with the run's tokenizer and, where `search` is silent, its search settings.

    Raises CheckpointError where the parts do not belong together or are damaged.
    """
    run = RunDir(run_dir)
    model_file = read_model(run.tokenizer)
    run.check_tokenizer(model_file)
    tokenizer = Tokenizer(model_file, str(run.tokenizer))
    target = resolve_device(device)
    arithmetic = _precision_of(run, target) if precision is Precision.auto else precision
    settings = checkpoint.settings("search", SearchConfig)

    config = checkpoint.settings("model", ModelConfig)
    tensors = checkpoint.weights()
    try:
        if checkpoint.run_state().vocab_size != tokenizer.vocab_size:
            raise ValueError(f"made for another tokenizer than {run.tokenizer}")
        check_size(config, tokenizer.vocab_size, tensors)
        model = Transformer(config, tokenizer.vocab_size)
        load_parameters(model, tensors)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: does not fit: {error}") from error
    with memory_errors_named("loading the model", remedy="end what else uses it, or set device=cpu"):
        model = model.to(target, dtype_of(arithmetic)).eval()
        translator = Translator(model, tokenizer, search.over(settings), target, arithmetic)
        translator.keep_ready()
    return translator


def _precision_of(run: RunDir, device: torch.device) -> Precision:
    """The arithmetic that the run was trained and scored in; by rule where that was on another kind of device.

    bf16 is kept only where the hardware multiplies it: elsewhere it is slow, and the bits differ.
    """
    by_rule = resolve_precision(Precision.auto, device)
    if not run.record.exists():
        return by_rule  # run.json is optional for inference
    trained = run.read_record().resolved
    if trained.device.name != device.type:
        return by_rule
    is_slow = trained.precision is Precision.bf16 and by_rule is not Precision.bf16
    return by_rule if is_slow else trained.precision
