"""Text in, text out: a model, its tokenizer and its search settings, over any number of sentences.

Sentences of like length share a batch, and come back in the order given. The other sentences of a batch change a
translation by rounding alone: the shape of a batch decides the order in which its products are summed. Of 400 sentences
translated in batches of three sizes that changed none in fp32 and one in bf16. A text without a visible character never
reaches the model, which would make something up for it.
"""

import logging
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from transformer.checkpoint import Checkpoint, find_checkpoint
from transformer.compute import autocast, dtype_of, resolve_device, resolve_precision
from transformer.config.settings import Device, ModelConfig, Precision, SearchConfig, SearchOverride
from transformer.data.tokenizer import Tokenizer, read_model
from transformer.decoding.search import Hypothesis, beam_search, length_penalty
from transformer.errors import CheckpointError, InputError
from transformer.layout import Padded
from transformer.model.transformer import Transformer, load_parameters
from transformer.run_dir import RunDir
from transformer.vocabulary import BOS, EOS, PAD

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Translator:
    """A model that may still be in training: nothing is copied, and its training mode is put back after use."""

    model: Transformer
    tokenizer: Tokenizer
    search: SearchConfig
    device: torch.device
    precision: Precision

    def translate(
        self,
        texts: Sequence[str],
        *,
        check: Callable[[], None] = lambda: None,
        first_line: int = 1,
        strict: bool = False,
    ) -> list[str]:
        """The translation of each text, one line each. `check` is called before each batch, and may raise.

        A blank text becomes "". One too long for the model is cut and logged with its line, counted from `first_line`;
        `strict` raises InputError instead.
        """
        shown = [n for n, text in enumerate(texts) if not _is_blank(text)]
        encoded = self.tokenizer.encode([texts[n] for n in shown])
        pieces = {n: ids for n, ids in zip(shown, encoded, strict=True) if ids}
        sources = [self._fit(ids, first_line + n, strict=strict) for n, ids in pieces.items()]
        hypotheses = self.hypotheses(sources, n_best=1, check=check)
        translations = self.tokenizer.decode([best.tokens for [best] in hypotheses])
        found = dict(zip(pieces, translations, strict=True))
        return [found.get(n, "") for n in range(len(texts))]

    def hypotheses(
        self, sources: Sequence[list[int]], *, n_best: int, check: Callable[[], None]
    ) -> list[list[Hypothesis]]:
        """The `n_best` best hypotheses of each source, the best first; see `beam_search` for what a list holds.

        Sources and hypotheses are ids of pieces, without BOS and EOS. `check` is called before each batch, and may
        raise. Raises ValueError unless 1 <= n_best <= search.beam_size.
        """
        hypotheses: dict[int, list[Hypothesis]] = {}

        # no_grad: under inference_mode, autocast would cast every weight again at each step
        with _evaluating(self.model), torch.no_grad(), autocast(self.device, self.precision):
            for batch in _batches([len(ids) + 1 for ids in sources], self.search):
                check()
                batch_sources = [sources[n] for n in batch]
                hypotheses |= zip(batch, self._search(batch_sources, n_best=n_best), strict=True)

        return [hypotheses[n] for n in range(len(sources))]

    def _search(self, sources: list[list[int]], *, n_best: int) -> list[list[Hypothesis]]:
        """Search for one batch. No translation may be longer than the model has positions for."""
        search = self.search

        # The sources, padded.
        lengths = [len(ids) + 1 for ids in sources]  # with EOS
        width = max(lengths)
        rows = [[*ids, EOS, *[PAD] * (width - length)] for ids, length in zip(sources, lengths, strict=True)]
        layout = Padded.of(lengths, width).to(self.device)
        memory = self.model.encode(torch.tensor(rows, device=self.device), layout)  # (B, S, D)

        max_positions = self.model.config.max_positions
        max_lengths = [min(len(ids) + search.max_extra, max_positions) for ids in sources]

        return beam_search(
            self.model.decode_step,
            self.model.start(memory, layout, beam_size=search.beam_size),
            beam_size=search.beam_size,
            n_best=n_best,
            max_lengths=torch.tensor(max_lengths, device=self.device),
            penalty=length_penalty(search.length_penalty),
            bos=BOS,
            eos=EOS,
        )

    def _fit(self, ids: list[int], line: int, *, strict: bool) -> list[int]:
        """The source as far as the model has positions for it and EOS."""
        room = self.model.config.max_positions - 1
        if len(ids) <= room:
            return ids
        found = f"line {line}: {len(ids)} pieces, but model.max_positions has room for {room}"
        if strict:
            raise InputError(f"{found}: split the line, or leave out strict=true to have it cut")
        log.warning("%s: only those are translated", found)
        return ids[:room]


def _is_blank(text: str) -> bool:
    """Whether nothing in the text is visible: spaces of all kinds, controls, zero-width and direction marks."""
    return all(unicodedata.category(character) in ("Zs", "Zl", "Zp", "Cc", "Cf") for character in text)


def _batches(lengths: list[int], search: SearchConfig) -> Iterator[list[int]]:
    """Indices by falling length, in batches of rows x beam x width <= batch_tokens, or of one row.

    The longest sentences go first, so that too little memory shows at once.
    """
    batch: list[int] = []
    for n in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        if batch and (len(batch) + 1) * search.beam_size * lengths[batch[0]] > search.batch_tokens:
            yield batch
            batch = []
        batch.append(n)
    if batch:
        yield batch


@contextmanager
def _evaluating(model: Transformer) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


# --- from a run directory


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
        model = Transformer(config, tokenizer.vocab_size)
        load_parameters(model, tensors)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: does not fit: {error}") from error
    model = model.to(target, dtype_of(arithmetic)).eval()
    return Translator(model, tokenizer, search.over(settings), target, arithmetic)


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
