"""What is shown of a validation: the first dev sentences as text, and the attention of one pair as pictures."""

import logging
from collections.abc import Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from transformer.config.settings import Precision
from transformer.model.inspection import Role, attention_maps
from transformer.model.transformer import Transformer
from transformer.tracking import HIDDEN_BY_BAR, Tracker
from transformer.training.validate import DevSet

log = logging.getLogger(__name__)

LONGEST_DRAWN = 40  # pieces of a sentence whose attention is drawn: more would not be readable
_CELL = 6  # the height and width of one weight in a picture, in pixels
_GAP = 4  # pixels between two heads
_GAP_GREY = 160


def show_samples(dev: DevSet, hypotheses: Sequence[str], tracker: Tracker, *, step: int, count: int) -> None:
    """Log the first `count` dev sentences with their translations and references."""
    lines = []
    triples = zip(dev.sources, hypotheses, dev.references, strict=True)
    for source, hypothesis, reference in islice(triples, count):
        lines.append(f"source      {source}")
        lines.append(f"translation {hypothesis}")
        lines.append(f"reference   {reference}")

    tracker.text(step, "dev/samples", lines)
    for line in lines:
        log.info("  %s", line, extra=HIDDEN_BY_BAR)


def show_attention(
    model: Transformer, dev: DevSet, tracker: Tracker, *, step: int, device: torch.device, precision: Precision
) -> None:
    """Draw the attention of `model` for one dev sentence pair, the decoder reading the reference.

    It is the first pair that is short enough for a readable picture; if none is, the beginning of the first one.
    """
    lengths = dev.store.lengths.max(axis=1)  # the longer side, EOS counted
    first = np.array([(lengths <= LONGEST_DRAWN).argmax()])
    source = dev.store.gather(first, 0).pieces[:LONGEST_DRAWN].tolist()
    target = dev.store.gather(first, 1).pieces[:LONGEST_DRAWN].tolist()

    maps = attention_maps(model, source, target, device=device, precision=precision)
    for role in Role:
        tracker.image(step, f"attention/{role.value}", draw(maps.of(role)))


def draw(weights: Tensor) -> Tensor:
    """Weights `(L, H, queries, keys)` as a picture in grey, `(1, height, width)` uint8: layers below one another.

    The heads of a layer are side by side, queries from top to bottom, keys from left to right. Weight 1 is black.
    """
    n_layers, n_heads, n_queries, n_keys = weights.shape
    height = n_queries * _CELL + _GAP  # of one head, with the gap below it
    width = n_keys * _CELL + _GAP

    # A square of pixels for each weight.
    pixels = (255 * (1 - weights)).round().to(torch.uint8)
    pixels = pixels.repeat_interleave(_CELL, dim=2).repeat_interleave(_CELL, dim=3)

    picture = torch.full((n_layers, n_heads, height, width), _GAP_GREY, dtype=torch.uint8)
    picture[:, :, : height - _GAP, : width - _GAP] = pixels
    return picture.transpose(1, 2).reshape(1, n_layers * height, n_heads * width)
