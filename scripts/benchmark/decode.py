"""How fast a model decodes: made-up sentences of WMT's lengths, by the package's own search, in batches of any size.

    python scripts/benchmark/decode.py --output decode.jsonl

Weights are random, so no hypothesis ends by itself: `max_extra=1` ends it where its source does, which gives
translations as long as WMT's. Greedy search is what a validation costs. Each setting has a limit of its own, and one
that reaches it reports the batches that it had done.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from measured import Measured, Numbers
from steps import SIZES, make_corpus, sdpa_flags, wait_for

from transformer.compute import avoid_cudnn_attention, dtype_of, resolve_device
from transformer.config.settings import Device, Precision, SearchConfig
from transformer.decoding.batches import Batches
from transformer.model.transformer import Transformer


class Setting(NamedTuple):
    """One search over the sentences."""

    beam_size: int
    batch_tokens: int


SETTINGS = {
    "beam4-131072": Setting(4, 131_072),
    "greedy-131072": Setting(1, 131_072),
    "beam4-32768": Setting(4, 32_768),
    "beam4-8192": Setting(4, 8_192),
}  # those of few batches first


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    measured = Measured(args.output, seconds=args.seconds)
    device = resolve_device(Device[args.device])
    avoid_cudnn_attention(device)
    config, vocab_size = SIZES[args.size]
    torch.manual_seed(1)
    model = Transformer(config, vocab_size).to(device, dtype_of(Precision.bf16)).eval()
    sources = make_sources(args.sentences, vocab_size)
    for name, setting in SETTINGS.items():
        key = f"decode/{args.size}/{name}"
        measured.take(key, partial(measure, model, sources, setting, device=device, seconds=args.each))
        print(f"{key}: {measured.get(key)}", flush=True)
    return measured.status()


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="base", help="default: %(default)s")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="default: %(default)s")
    parser.add_argument("--sentences", type=int, default=3_000, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=600.0, help="for everything (default: %(default)s)")
    parser.add_argument("--each", type=float, default=15.0, help="seconds for a setting (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="write every number here, as lines of JSON")
    return parser.parse_args(arguments)


def make_sources(sentences: int, vocab_size: int) -> list[list[int]]:
    """The pieces of so many sentences, without EOS."""
    store = make_corpus(40 * sentences, vocab_size)
    pieces, counts = store.gather(np.arange(sentences), 0)
    return [part.tolist() for part in np.split(pieces, counts.cumsum()[:-1])]


class TimeIsOver(Exception):
    """A setting has reached its limit."""


class Clock:
    """Called before each batch: counts them, and ends the search when the time is over."""

    def __init__(self, seconds: float) -> None:
        self.batches = 0
        self._end = time.monotonic() + seconds

    def __call__(self) -> None:
        if time.monotonic() > self._end:
            raise TimeIsOver
        self.batches += 1


def measure(
    model: Transformer, sources: list[list[int]], setting: Setting, *, device: torch.device, seconds: float
) -> Numbers:
    """All sentences by one setting, after a few that warm up."""
    search = SearchConfig(beam_size=setting.beam_size, max_extra=1, batch_tokens=setting.batch_tokens)
    batches = Batches.of(model, search, device=device, precision=Precision.bf16)
    batches.hypotheses(sources[:8], n_best=1, check=Clock(seconds))
    wait_for(device)
    clock = Clock(seconds)
    begun = time.monotonic()
    try:
        found = batches.hypotheses(sources, n_best=1, check=clock)
    except TimeIsOver:
        return {"seconds": time.monotonic() - begun, "finished": False, "batches": clock.batches}
    took = time.monotonic() - begun

    tokens = sum(len(best.tokens) + 1 for [best] in found)  # EOS counts
    return {
        "seconds": took,
        "finished": True,
        "batches": clock.batches,
        "sentences": len(sources),
        "target_tokens": tokens,
        "target_tokens_per_second": tokens / took,
        "cudnn_attention": sdpa_flags()["cudnn"],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
