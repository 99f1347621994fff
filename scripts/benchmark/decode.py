"""How fast a model decodes: made-up sentences of WMT's lengths, by the package's own search, in batches of any size.

    python scripts/benchmark/decode.py --output decode.jsonl
    python scripts/benchmark/decode.py --output decode.jsonl --settings=beam4-131072 --ways=eager,replayed,ctranslate2

Weights are random, so no hypothesis ends by itself: `max_extra=1` ends it where its source does, which gives
translations as long as WMT's. Greedy search is what a validation costs. Each measurement has a limit of its own, and
one that reaches it reports the batches that it had done.

Ways: `eager` launches every kernel; `replayed` is `search.cuda_graphs=true`: after a first pass over the sentences,
with its recordings, which is reported apart, it is the median of three, and the kernels of the largest batch are
listed; `ctranslate2` is `search.engine=ctranslate2` in bf16, whose translations are all as long as the longest of their
batch. Speed is tokens of the best hypotheses, EOS counted, end to end. What torch finds is scored again by forced
decoding: a search whose log-probabilities differ from that by more than rounding has failed.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from contest import among
from kernel_times import kernel_table
from measured import Measured, Numbers
from steps import SIZES, make_corpus, sdpa_flags, wait_for

from transformer.compute import avoid_cudnn_attention, dtype_of, resolve_device
from transformer.config.settings import Device, Precision, Quantization, SearchConfig
from transformer.decoding.batched import BatchedDecoder
from transformer.decoding.proof import prove_replay
from transformer.decoding.replay import Replay
from transformer.decoding.search import Hypothesis, length_penalty
from transformer.model.transformer import Transformer
from transformer.numerics import largest, tolerance_of


class Setting(NamedTuple):
    """One search over the sentences."""

    beam_size: int
    batch_tokens: int


WAYS = ("eager", "replayed", "ctranslate2")
TIMED = 3  # passes, where one takes less than a second
SETTINGS = {
    "beam4-131072": Setting(4, 131_072),
    "beam4-524288": Setting(4, 524_288),
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
    profiles: dict[str, Callable[[], Numbers]] = {}  # by the names of measurements
    for way in args.ways:
        for name in args.settings:
            key = f"decode/{args.size}/{name}" + ("" if way == "eager" else f"/{way}")
            by_torch = partial(measure, replays=way == "replayed", later=partial(profiles.__setitem__, key))
            take = measure_engine if way == "ctranslate2" else by_torch
            measured.take(key, partial(take, model, sources, SETTINGS[name], device=device, seconds=args.each))
            print(f"{key}: {measured.get(key)}", flush=True)

    # Last, for what a profiler leaves behind slows its process down.
    for key, profile_of in profiles.items():
        measured.add(key, (measured.get(key) or {}) | {"profile": profile_of()})
    return measured.status()


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="base", help="default: %(default)s")
    parser.add_argument("--settings", type=among(*SETTINGS), default=list(SETTINGS), help="default: all")
    parser.add_argument("--ways", type=among(*WAYS), default=["eager"], help="of eager, replayed, ctranslate2")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="default: %(default)s")
    parser.add_argument("--sentences", type=int, default=3_000, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=600.0, help="for everything (default: %(default)s)")
    parser.add_argument("--each", type=float, default=15.0, help="seconds for each measurement (default: %(default)s)")
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
    model: Transformer,
    sources: list[list[int]],
    setting: Setting,
    *,
    device: torch.device,
    seconds: float,
    replays: bool,
    later: Callable[[Callable[[], Numbers]], None],
) -> Numbers:
    """All sentences by one setting, after a few that warm up; where steps are replayed, after all of them.

    `later` is given what lists the kernels of these.
    """
    search = SearchConfig(beam_size=setting.beam_size, max_extra=1, batch_tokens=setting.batch_tokens)
    batches = BatchedDecoder.of(model, search, device=device, precision=Precision.bf16)
    is_proven = True
    if replays:
        proven = prove_replay(batches)  # as before the first translation; where it says no, it says why
        is_proven = proven.replay is not None
        batches = proven if is_proven else batches.replayed()
    batches.hypotheses(sources[:8], n_best=1, check=Clock(seconds))

    passes: list[Numbers] = []
    for _ in range(1 + TIMED if replays else 1):
        numbers, found = timed(partial(batches.hypotheses, sources, n_best=1), Clock(seconds), device)
        if not numbers["finished"]:
            return numbers
        passes.append(numbers)
    in_order = sorted(passes[1:] or passes, key=lambda one: one["seconds"])
    numbers = in_order[len(in_order) // 2]  # their median
    numbers |= {"first_pass_seconds": passes[0]["seconds"], "pass_seconds": [one["seconds"] for one in passes]}
    numbers |= {"cudnn_attention": sdpa_flags()["cudnn"], "deviation": deviation(batches, sources, found)}
    if not is_proven:
        numbers["error"] = "the proof before the first translation refuses it"
    if not numbers["deviation"] <= tolerance_of(batches.precision).log_prob:
        numbers["error"] = f"a piece's log-probability differs by {numbers['deviation']:.3g} from forced decoding"

    if batches.replay is not None:
        numbers |= recordings(batches.replay, device)
        later(partial(profile, batches, sources, device))
    return numbers


def recordings(replay: Replay, device: torch.device) -> Numbers:
    """How many there are, and what they take beside the memory of torch's allocator."""
    found: Numbers = {"recordings": replay.n_recorded, "replayed": replay.is_recording}  # false: steps were launched
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        found |= {"reserved_gib": torch.cuda.memory_reserved(device) / 2**30, "taken_gib": (total - free) / 2**30}
    return found


def profile(batches: BatchedDecoder, sources: list[list[int]], device: torch.device) -> Numbers:
    """The kernels of the largest batch."""
    fullest = max(batches.cut([len(source) + 1 for source in sources]), key=len)
    again = partial(batches.hypotheses, [sources[n] for n in fullest], n_best=1)
    longest = len(sources[fullest[0]]) + 1
    return kernel_table(again, device, 1) | {"sentences": len(fullest), "longest": longest}


def deviation(batches: BatchedDecoder, sources: list[list[int]], found: list[list[Hypothesis]]) -> float:
    """How far the mean log-probability of a piece is from that of forced decoding, in the worst translation."""
    best = [one for [one] in found]
    forced = batches.log_probs([(source, one.tokens) for source, one in zip(sources, best, strict=True)])
    return largest(
        [abs(one.log_prob - sum(of[: one.length])) / one.length for one, of in zip(best, forced, strict=True)]
    )


def measure_engine(
    model: Transformer, sources: list[list[int]], setting: Setting, *, device: torch.device, seconds: float
) -> Numbers:
    """All sentences by CTranslate2, in batches of like length: every translation as long as the longest of its batch.

    In a batch, it has one maximum length for all.
    """
    from transformer.integrations.engine.ctranslate2 import Vocabularies, version
    from transformer.integrations.engine.searcher import Asked, Searcher

    def names(size: int) -> list[str]:
        return ["<pad>", "<unk>", "<s>", "</s>", *(f"piece{n}" for n in range(4, size))]

    vocabularies = Vocabularies(names(model.source_vocab_size), names(model.vocab_size))
    quantization = Quantization.bfloat16 if device.type == "cuda" else Quantization.float32
    searcher = Searcher.of(model, vocabularies, quantization=quantization, device=device)

    search = SearchConfig(beam_size=setting.beam_size, max_extra=1, batch_tokens=setting.batch_tokens)
    batches = BatchedDecoder.of(model, search, device=device, precision=Precision.bf16)
    cut = batches.cut([len(source) + 1 for source in sources])  # EOS counted
    max_lengths = [0] * len(sources)
    for batch in cut:
        for n in batch:
            max_lengths[n] = batches.max_length(sources[batch[0]])

    def find(check: Callable[[], None]) -> list[list[Hypothesis]]:
        penalty = length_penalty(search.length_penalty)
        asked = Asked(sources, max_lengths, None, setting.beam_size, n_best=1, penalty=penalty, check=check)
        return list(searcher.hypotheses(asked, cut).values())

    find(Clock(seconds))
    return timed(find, Clock(seconds), device)[0] | {"engine": version(), "type": quantization.value}


def timed(
    find: Callable[..., list[list[Hypothesis]]], clock: Clock, device: torch.device
) -> tuple[Numbers, list[list[Hypothesis]]]:
    """How long a search takes, from ids to ids, and what it finds."""
    wait_for(device)
    begun = time.monotonic()
    try:
        found = find(check=clock)
    except TimeIsOver:
        return {"seconds": time.monotonic() - begun, "finished": False, "batches": clock.batches}, []
    took = time.monotonic() - begun

    tokens = sum(len(best.tokens) + 1 for [best] in found)  # EOS counts
    numbers = {
        "seconds": took,
        "finished": True,
        "batches": clock.batches,
        "sentences": len(found),
        "target_tokens": tokens,
        "target_tokens_per_second": tokens / took,
    }
    return numbers, found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
