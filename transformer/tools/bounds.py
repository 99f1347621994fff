"""Between which bounds the curves of a sound training lie, for settings that are known well enough to say so.

    train.trackers=[bounds]  ->  open_bounds  ->  Watch: a line of the log where a curve leaves its bounds
    doctor run_dir=RUN       ->  doctor.curves: a finding for the same, from metrics.jsonl

The table is below; docs/wmt.md has the source of every row. Bounds hold for the settings that they name and no others:
a training with other ones is told so in a line, and left alone. The learning rate and the text are not among these
settings, because they are what the bounds are to find fault with.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from transformer.tracking import Setting

log = logging.getLogger(__name__)

NAME = "bounds"  # of the tracker
LOSS = "train/loss"  # smoothed, in nats a target token, as the log has it: the mean since the last line
PERPLEXITY = "dev/perplexity"  # not smoothed

Row = tuple[int, float, float]  # a step, and the least and the most there


@dataclass(frozen=True)
class Bounds:
    """Bounds by the name of a curve, and the settings that they are valid for."""

    of: str
    settings: Mapping[str, Setting]
    rows: Mapping[str, Sequence[Row]]

    def differences(self, settings: Mapping[str, Setting]) -> list[str]:
        """The settings that are others here, as `key=value in place of value`."""
        return [
            f"{key}={settings.get(key)} in place of {value}"
            for key, value in self.settings.items()
            if settings.get(key) != value
        ]

    def left(self, name: str, step: int, value: float) -> "tuple[int, str] | None":
        """Where a curve is outside of its bounds: the stretch from a row to the next, and how; None: it is within.

        Between rows the bounds are straight lines over the logarithm of the step. There are none outside of the rows.
        """
        rows = self.rows.get(name, ())
        if not rows or not rows[0][0] <= step <= rows[-1][0]:
            return None
        steps, least, most = np.array(rows).T
        low, high = (float(np.interp(math.log(step), np.log(steps), ends)) for ends in (least, most))
        if low <= value <= high:
            return None
        side = "below" if value < low else "above"
        found = f"{name} {value:.3f} is {side} the bounds of {self.of}, {low:.2f} to {high:.2f} here"
        return int(np.searchsorted(steps, step, side="right")), found


# The paper's base model, and its schedule up to the last row.
_PAPER: Mapping[str, Setting] = {
    "init_from": "null",
    "model.n_layers": 6,
    "model.d_model": 512,
    "model.d_ff": 2048,
    "model.n_heads": 8,
    "model.norm": "post",
    "tokenizer.vocab_size": 37_000,
    "train.optimizer": "adam",
    "train.warmup_steps": 4_000,
    "train.decay": "inverse_sqrt",
    "train.label_smoothing": 0.1,
}

KNOWN = (
    Bounds(
        "wmt14_en_de_base",
        {
            **_PAPER,
            "data.src_lang": "en",
            "data.tgt_lang": "de",
            "train.tokens_per_step": 25_000,
            "train.log_every": 100,
        },
        {
            LOSS: (
                (100, 9.4, 10.7),
                (200, 8.2, 9.7),
                (400, 7.0, 8.7),
                (800, 6.0, 7.7),
                (1_000, 5.6, 7.5),
                (2_000, 4.4, 6.7),
                (4_000, 3.7, 5.3),
                (10_000, 3.2, 4.2),
                (50_000, 2.85, 3.6),
                (100_000, 2.7, 3.4),
            ),
            PERPLEXITY: ((10_000, 4.8, 10.0), (100_000, 4.2, 6.0)),
        },
    ),
    Bounds(  # its first steps with an eightieth of the batch, on KFTT: what a processor can try
        "wmt14_en_de_base on KFTT",
        {**_PAPER, "data.src_lang": "ja", "data.tgt_lang": "en", "train.tokens_per_step": 320, "train.log_every": 20},
        {LOSS: ((20, 10.5, 11.3), (40, 10.1, 11.1), (100, 8.7, 10.4), (200, 7.8, 9.5))},
    ),
)


def choose(settings: Mapping[str, Setting]) -> tuple[Bounds | None, str]:
    """The bounds for these settings; or None, and how the settings differ from those of the nearest bounds."""
    nearest = min(KNOWN, key=lambda bounds: len(bounds.differences(settings)))
    differences = nearest.differences(settings)
    if not differences:
        return nearest, ""
    return None, f"the bounds of {nearest.of} are not for {', '.join(differences)}"


# ---- while it trains ------------------------------------------------------------------------------------------------


class Watch:
    """A sink that says in the log where a curve is outside of its bounds, once from a row to the next."""

    def __init__(self, bounds: Bounds | None) -> None:
        self._bounds = bounds
        self._said: set[tuple[str, int]] = set()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Compare these values of `step`."""
        if self._bounds is None:
            return
        for name, value in values.items():
            found = self._bounds.left(name, step, value)
            if found is not None and (name, found[0]) not in self._said:
                self._said.add((name, found[0]))
                log.warning("step %d: %s: docs/wmt.md says what to look at", step, found[1])

    def table(self, step: int, name: str, *, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """No text is compared."""


@contextmanager
def open_bounds(folder: Path, *, run_id: str, settings: Mapping[str, Setting]) -> Iterator[Watch]:
    """Watch a training of these settings; where none are known, say so."""
    bounds, why = choose(settings)
    if bounds is None:
        log.warning("train.trackers=%s compares nothing: %s", NAME, why)
    yield Watch(bounds)
