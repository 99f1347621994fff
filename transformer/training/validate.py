"""Validation: the loss on the dev set, and sacreBLEU of its translations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from transformer.compute import autocast
from transformer.config import Precision
from transformer.data.batch import collate
from transformer.data.corpus import Pair
from transformer.data.plan import split_step
from transformer.data.store import Store
from transformer.distributed import World
from transformer.evaluate.score import measure
from transformer.step import Objective
from transformer.tokenizer import Tokenizer
from transformer.training.guard import Interrupted
from transformer.training.progress import Validation
from transformer.translate.translator import Translator


@dataclass(frozen=True)
class DevSet:
    """The sentences that training is judged by: ids for the loss, texts for BLEU."""

    store: Store
    sources: list[str]
    references: list[str]

    @classmethod
    def of(cls, pairs: Sequence[Pair], tokenizer: Tokenizer) -> "DevSet":
        """The dev set of these sentence pairs."""
        sources, references = [source for source, _ in pairs], [reference for _, reference in pairs]
        return cls(Store.from_pieces(tokenizer.encode(sources), tokenizer.encode(references)), sources, references)

    @property
    def pairs(self) -> list[Pair]:
        """The sentence pairs, as text."""
        return list(zip(self.sources, self.references, strict=True))


def dev_loss(
    objective: Objective, dev: Store, world: World, *, max_tokens: int, device: torch.device, precision: Precision
) -> tuple[float, float]:
    """The smoothed and the plain loss, as means over the dev set's target tokens, without dropout."""
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    objective.eval()
    with torch.inference_mode(), autocast(device, precision):
        for ids in split_step(np.arange(len(dev)), dev.lengths, max_tokens=max_tokens, multiple=1)[
            world.rank :: world.size
        ]:
            sums += torch.stack(objective(collate(dev, ids).to(device)))
    objective.train()
    smoothed, plain = (world.sum(sums) / int(dev.lengths[:, 1].sum())).tolist()
    return smoothed, plain


def validate(
    objective: Objective,
    translator: Translator,
    dev: DevSet,
    world: World,
    *,
    step: int,
    max_tokens: int,
    tgt_lang: str,
    should_stop: Callable[[], bool],
) -> tuple[Validation, list[str]]:
    """The validation of `step`, and the translations; each rank does its share, and all get the same.

    Raises Interrupted, on all of them, as soon as `should_stop` says so on one.
    """
    device, precision = translator.device, translator.precision
    loss, nll = dev_loss(objective, dev.store, world, max_tokens=max_tokens, device=device, precision=precision)
    shares = world.gather(translator.translate(dev.sources[world.rank :: world.size], should_stop=should_stop))
    if None in shares:
        raise Interrupted
    hypotheses = [shares[n % world.size][n // world.size] for n in range(len(dev.sources))]
    scores = measure(hypotheses, dev.references, tgt_lang=tgt_lang)
    return Validation(step, loss, nll, scores.bleu, scores.chrf), hypotheses
