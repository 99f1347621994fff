"""Validation: the loss on each dev set, and sacreBLEU of its translations.

A dev set is divided among the ranks, for the loss by batches, for the translations by sentences, so that each has as
much to do. All ranks get the same validation.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from transformer.compute import autocast
from transformer.config.settings import BleuTokenizer, Precision
from transformer.data.batch import collate
from transformer.data.corpus import Pair, is_blank
from transformer.data.plan import split_step
from transformer.data.store import Store
from transformer.data.tokenizer import Tokenizer, Tokenizers
from transformer.decoding.batched import BatchedDecoder
from transformer.decoding.ranks import deal
from transformer.distributed import World
from transformer.evaluation.score import measure_bleu, measure_chrf
from transformer.records import DevScores, Validation
from transformer.run_dir import DEV
from transformer.training.guard import Interrupted
from transformer.training.step import Objective

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DevSet:
    """The sentences that training is validated on: ids for the loss and to translate, texts for BLEU."""

    store: Store  # ids, as many of a sentence as the model has positions for
    sources: list[str]
    references: list[str]

    @classmethod
    def of(cls, pairs: Sequence[Pair], tokenizers: Tokenizers, *, name: str = DEV, max_pieces: int) -> "DevSet":
        """The dev set of these sentence pairs; the model sees the first `max_pieces` pieces of a side."""
        sources = [source for source, _ in pairs]
        references = [reference for _, reference in pairs]
        source_pieces = tokenizers.source.encode(sources)
        target_pieces = tokenizers.target.encode(references)

        for line, (source, target) in enumerate(zip(source_pieces, target_pieces, strict=True), 1):
            longest = max(len(source), len(target))
            if longest > max_pieces:
                log.warning("%s line %d: %d pieces; the model sees the first %d", name, line, longest, max_pieces)

        truncated_sources = [ids[:max_pieces] for ids in source_pieces]
        truncated_targets = [ids[:max_pieces] for ids in target_pieces]
        store = Store.from_pieces(truncated_sources, truncated_targets)
        return cls(store, sources, references)

    def source_ids(self, n: int) -> list[int]:
        """The pieces of source `n`."""
        return self.store.gather(np.array([n]), 0).pieces.tolist()

    @property
    def pairs(self) -> list[Pair]:
        """The sentence pairs, as text."""
        return list(zip(self.sources, self.references, strict=True))


def validate(
    objective: Objective,
    decoder: BatchedDecoder,
    dev_sets: Mapping[str, DevSet],
    world: World,
    *,
    tokenizer: Tokenizer,
    step: int,
    max_tokens: int,
    tgt_langs: Mapping[str, str],
    tokenize: BleuTokenizer | None,
    check: Callable[[], None],
) -> tuple[Validation, dict[str, list[str]]]:
    """The validation of `step`, and the translations of each set; each rank does its share, and all get the same.

    Raises Interrupted on every rank if `check`, called before each batch, raised it on one.
    """
    scores: dict[str, DevScores] = {}
    hypotheses: dict[str, list[str]] = {}
    for name, dev in dev_sets.items():
        loss, nll = dev_loss(
            objective,
            dev.store,
            world,
            max_tokens=max_tokens,
            device=decoder.device,
            precision=decoder.precision,
            check=check,
        )
        found = translate_dev(decoder, dev, world, tokenizer=tokenizer, check=check)
        bleu = measure_bleu(found, dev.references, tgt_lang=tgt_langs[name], tokenize=tokenize)
        scores[name] = DevScores(loss, nll, bleu.score, measure_chrf(found, dev.references))
        hypotheses[name] = found
    return Validation.of(step, scores), hypotheses


def translate_dev(
    decoder: BatchedDecoder,
    dev: DevSet,
    world: World,
    *,
    tokenizer: Tokenizer,
    check: Callable[[], None] = lambda: None,
) -> list[str]:
    """The translation of each sentence; a blank one becomes "", and is not shown to the model.

    Raises Interrupted on every rank if `check`, called before each batch, raised it on one.
    """
    # Each rank translates a share, with about as many pieces as the others.
    sources = {n: ids for n, text in enumerate(dev.sources) if not is_blank(text) and (ids := dev.source_ids(n))}
    ranks = deal([len(ids) for ids in sources.values()], world.size)
    own = [n for n, rank in zip(sources, ranks, strict=True) if rank == world.rank]
    try:
        found = decoder.hypotheses([sources[n] for n in own], n_best=1, check=check)
        texts = tokenizer.decode([best.tokens for [best] in found])
        share = list(zip(own, texts, strict=True))
    except Interrupted:
        share = None

    shares = world.gather(share)
    if None in shares:
        raise Interrupted
    translations = dict(chain.from_iterable(shares))
    return [translations.get(n, "") for n in range(len(dev.sources))]


def dev_loss(
    objective: Objective,
    dev: Store,
    world: World,
    *,
    max_tokens: int,
    device: torch.device,
    precision: Precision,
    check: Callable[[], None] = lambda: None,
) -> tuple[float, float]:
    """The smoothed and the plain loss, as means over the dev set's target tokens, without dropout.

    Raises Interrupted on every rank if `check`, called before each batch, raised it on one.
    """
    budget = max(max_tokens, max(dev.longest))  # dev sentences are never dropped, however long
    batches = split_step(np.arange(len(dev)), dev.lengths, max_tokens=budget, micro_batch_multiple=world.size)

    # The sums over this rank's batches.
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # smoothed, plain
    is_interrupted = False
    objective.eval()
    try:
        with torch.inference_mode(), autocast(device, precision):
            for ids in batches[world.rank :: world.size]:
                check()
                if len(ids):  # there may be more ranks than sentences
                    sums += torch.stack(objective.evaluate(collate(dev, ids).to(device)))
    except Interrupted:
        is_interrupted = True
    objective.train()

    # The means over all ranks, unless one of them was interrupted.
    if world.sum(torch.tensor([float(is_interrupted)])) > 0:
        raise Interrupted
    smoothed, plain = (world.sum(sums) / int(dev.lengths.totals[1])).tolist()
    return smoothed, plain
