"""When two computations of the same thing count as equal: the measure, the tolerance, and the message beyond it.

    distance, relative, largest -> check(what, difference, limit) -> "the loss differs by 0.02 (0.005 allowed)"

A difference of NaN is beyond any limit. The callers decide what is compared: a training (`training.deviation`), a
search (`decoding.proof`), a model in another library, or a repeated training.
"""

import logging
import math
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from transformer.compute import HALF
from transformer.config.settings import Precision
from transformer.errors import TransformerError

log = logging.getLogger(__name__)

FINITE = sys.float_info.max  # the limit of what must be a number, and may be any

FLOAT32_BOUND, FLOAT64_BOUND = 1e-4, 1e-9  # by which another library's log-probability may differ, in these types


class Tolerance(NamedTuple):
    """How far a way to compute may be from the plain one, relative to that; a log-probability: absolutely.

    Largest deviations seen in bf16 (packed, on a CPU; the models of the demo and of Multi30k): loss 7e-5, a matrix's
    gradient 0.026 and its norm 0.0064, that of a vector 0.01, attention 0.004; in fp16 a third of it. With the demo's
    weights after 1,000 steps 0.09, 0.017 and 0.08.
    """

    loss: float
    norm: float  # of the gradient of one matrix
    gradient: float  # of one matrix
    attention: float  # the output of a kernel, and its gradients
    log_prob: float  # of a piece, the mean over a translation
    vector: float = 0.3  # the gradient of one
    leak: float = 1e-3  # a log-probability before a token that changes: rounding, if anything


TOLERANCES = {  # is it half precision?
    True: Tolerance(loss=0.005, norm=0.03, gradient=0.15, attention=0.02, log_prob=0.1),
    False: Tolerance(loss=1e-4, norm=0.002, gradient=0.01, attention=1e-4, log_prob=0.001),
}


def tolerance_of(precision: Precision) -> Tolerance:
    """By its arithmetic."""
    return TOLERANCES[precision in HALF]


class DeviatesError(Exception):
    """Something else is computed than should be; the message says what, and by how much."""


def excess(what: str, difference: float, limit: float) -> list[str]:
    """What is to be said of a difference: nothing where it is within its limit."""
    allowed = f" ({limit:.2g} allowed)" if limit < FINITE else ""
    return [] if difference <= limit else [f"{what} differs by {difference:.2g}{allowed}"]


def check(what: str, difference: float, limit: float) -> None:
    """Raise DeviatesError for a difference that is beyond its limit."""
    for words in excess(what, difference, limit):
        raise DeviatesError(words)


@contextmanager
def failures_in_words() -> Iterator[None]:
    """Raise DeviatesError for whatever a compiler, a driver or a kernel raises, but where memory runs out."""
    try:
        yield
    except (DeviatesError, TransformerError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        log.debug("what is compared has failed", exc_info=True)
        text = " ".join(str(error).split("\n")[:2]).strip()  # a compiler names its own error in the second line
        raise DeviatesError(f"{type(error).__name__}: {text}") from error


def relative(found: float, wanted: float) -> float:
    """By how much a number differs, relative to the one that it should be."""
    return abs(found - wanted) / max(abs(wanted), 1e-30)


def differences(found: Tensor, wanted: Tensor) -> Tensor:
    """Those of the single numbers, without a sign."""
    assert found.shape == wanted.shape, (found.shape, wanted.shape)  # broadcasting would hide a row too few
    return (found.to(wanted.dtype) - wanted).abs()


def distance(found: Collection[Tensor], wanted: Collection[Tensor]) -> float:
    """The norm of the difference of all these tensors, relative to the norm of those that they should be."""
    return norm(map(differences, found, wanted)) / max(norm(wanted), 1e-30)


def norm(tensors: Iterable[Tensor]) -> float:
    """Of all of them."""
    return math.hypot(*(float(tensor.norm()) for tensor in tensors))


def largest(differences: Iterable[float]) -> float:
    """The largest: NaN where one is NaN, which Python's maximum passes over."""
    return float(np.max(list(differences)))
