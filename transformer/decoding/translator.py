"""Text in, text out: a model, its tokenizer and its search settings, over any number of sentences.

Sentences of like length share a batch, and come back in the order given. The other sentences of a batch change a
translation by rounding alone: the shape of a batch decides the order in which its products are summed. Of 400 sentences
translated in batches of three sizes that changed none in fp32 and one in bf16. A text without a visible character never
reaches the model, which would make something up for it.
"""

import logging
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from transformer.checkpoint import Checkpoint, list_steps, load_checkpoint, newest, read_json, step_path
from transformer.compute import autocast, dtype_of, resolve_device, resolve_precision
from transformer.config.settings import Device, ModelConfig, Precision, SearchConfig, SearchOverride
from transformer.data.tokenizer import Tokenizer
from transformer.decoding.search import Hypothesis, beam_search, length_penalty
from transformer.errors import CheckpointError, InputError
from transformer.layout import Padded
from transformer.model.transformer import Transformer, load_parameters
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
    found = find_checkpoint(run_dir, checkpoint)
    return build_translator(run_dir, found, search=search, device=device, precision=precision)


def find_checkpoint(run_dir: Path, name: str) -> Checkpoint:
    """The checkpoint called `averaged`, `best`, `last`, `step-N` or `auto`: averaged where there is one, else last."""
    if not run_dir.is_dir():
        raise InputError(f"{run_dir}: no such run directory; `transformer train run_dir={run_dir}` makes one")
    if (averaged := _averaged(run_dir, name)) is not None:
        return averaged
    if name in ("last", "auto"):
        last = newest(run_dir)
        if last is None:
            raise InputError(f"{run_dir}: no checkpoint yet; `transformer train run_dir={run_dir}` goes on until one")
        return last
    path = step_path(run_dir, _best_step(run_dir) if name == "best" else _step_number(name))
    if not path.is_dir():
        known = ", ".join(f"step-{step}" for step in list_steps(run_dir)) or "none"
        raise InputError(f"checkpoint={name}: {path} is not there; there are: {known}")
    return load_checkpoint(path)


def _averaged(run_dir: Path, name: str) -> Checkpoint | None:
    """The average, where it is asked for; under `auto` only while no later checkpoint has made it out of date."""
    path = run_dir / "averaged"
    if name == "averaged" and not path.is_dir():
        raise InputError(f"{path}: not there yet; `transformer average run_dir={run_dir}` makes it")
    if name not in ("averaged", "auto") or not path.is_dir():
        return None
    try:
        averaged = load_checkpoint(path)
    except CheckpointError as error:
        if name == "averaged":
            raise
        log.warning("%s; the last checkpoint is taken", error)
        return None
    is_current = averaged.step >= max(list_steps(run_dir), default=0)
    return averaged if name == "averaged" or is_current else None


def _best_step(run_dir: Path) -> int:
    if not (run_dir / "best.json").exists():
        raise InputError(f"{run_dir}: no validation has chosen a best checkpoint yet; use checkpoint=last")
    match read_json(run_dir / "best.json"):
        case {"step": int(step)} if step >= 0:
            return step
    raise CheckpointError(f"{run_dir / 'best.json'}: names no step; use checkpoint=last")


def _step_number(name: str) -> int:
    found = re.fullmatch(r"step-([0-9]{1,18})", name)
    if found is None:
        raise InputError(f"checkpoint={name} is not one of averaged, best, last, step-N, auto")
    return int(found[1])


def _precision_of(run_dir: Path, device: torch.device) -> Precision:
    """The arithmetic that the run was trained and scored in; by rule where that was on another kind of device.

    bf16 is kept only where the hardware multiplies it: elsewhere it is slow, and no more the same bits.
    """
    by_rule = resolve_precision(Precision.auto, device)
    try:
        settled = read_json(run_dir / "run.json")["settled"]
        trained = Precision[settled["precision"]]
        is_same_kind = settled["device"] == device.type
    except (CheckpointError, KeyError, TypeError):
        return by_rule  # a model can be used without its papers
    return trained if is_same_kind and (trained is not Precision.bf16 or by_rule is Precision.bf16) else by_rule


def build_translator(
    run_dir: Path, checkpoint: Checkpoint, *, search: SearchOverride, device: Device, precision: Precision
) -> Translator:
    """The translator of a checkpoint, with the run's tokenizer and, where `search` is silent, its search settings."""
    tokenizer = Tokenizer.load(run_dir / "tokenizer.model")
    where = resolve_device(device)
    arithmetic = _precision_of(run_dir, where) if precision is Precision.auto else precision
    settings = checkpoint.settings("search", SearchConfig)
    shape, tensors = checkpoint.settings("model", ModelConfig), checkpoint.weights()
    try:
        if checkpoint.state["vocab_size"] != tokenizer.vocab_size:
            raise ValueError(f"made for another tokenizer than {run_dir / 'tokenizer.model'}")
        model = Transformer(shape, tokenizer.vocab_size)
        load_parameters(model, tensors)
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{checkpoint.path}: does not fit: {error}") from error
    model = model.to(where, dtype_of(arithmetic)).eval()
    return Translator(model, tokenizer, search.over(settings), where, arithmetic)
