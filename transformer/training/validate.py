"""Validation: the loss on the dev set, and sacreBLEU of its translations."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from transformer.compute import autocast
from transformer.config import Precision
from transformer.data.batch import collate
from transformer.data.plan import split_step
from transformer.data.store import Store
from transformer.evaluate.score import measure
from transformer.step import Objective
from transformer.training.guard import Interrupted
from transformer.training.progress import Validation
from transformer.translate.translator import Translator


@dataclass(frozen=True)
class DevSet:
    """The sentences that training is judged by: ids for the loss, texts for BLEU."""

    store: Store
    sources: list[str]
    references: list[str]


def dev_loss(
    objective: Objective, dev: Store, *, max_tokens: int, device: torch.device, precision: Precision
) -> tuple[float, float]:
    """The smoothed and the plain loss, as means over the dev set's target tokens, without dropout."""
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    objective.eval()
    with torch.inference_mode(), autocast(device, precision):
        for ids in split_step(np.arange(len(dev)), dev.lengths, max_tokens=max_tokens, multiple=1):
            sums += torch.stack(objective(collate(dev, ids).to(device)))
    objective.train()
    smoothed, plain = (sums / int(dev.lengths[:, 1].sum())).tolist()
    return smoothed, plain


def validate(
    objective: Objective,
    translator: Translator,
    dev: DevSet,
    *,
    step: int,
    max_tokens: int,
    tgt_lang: str,
    should_stop: Callable[[], bool],
) -> tuple[Validation, list[str]]:
    """The validation of `step`, and the translations. Raises Interrupted as soon as `should_stop` says so."""
    device, precision = translator.device, translator.precision
    loss, nll = dev_loss(objective, dev.store, max_tokens=max_tokens, device=device, precision=precision)
    hypotheses = translator.translate(dev.sources, should_stop=should_stop)
    if hypotheses is None:
        raise Interrupted
    scores = measure(hypotheses, dev.references, tgt_lang=tgt_lang)
    return Validation(step, loss, nll, scores.bleu, scores.chrf), hypotheses
