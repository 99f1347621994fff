"""How long a training step takes: {packed, padded} x {compiled, eager}, on sentences as long as those of WMT.

    python scripts/benchmark/steps.py --output steps.json

The step is the one that `transformer train` takes: its plan, its loader thread, its micro-batches, its settings; only
the corpus is made up. Sentences have 27 tokens on average (log-normal, at most 256; the two sides of a pair are of like
length), as English and German WMT pairs in 37,000 shared pieces have, and ids are as unequally frequent as words are.

Each setting starts anew, warms up, and is then timed without a break: the time of a step runs from the end of the one
before it to its own end on the device, waiting for data included. Speed is real target tokens a second over all timed
steps: EOS counted, padding never. Utilisation is the model's FLOPs (transformer/cost.py) over the device's peak. A
graph compiled while the clock runs is counted, and on a GPU it is a failure: there, shapes are meant to have resolved.
Where the time given runs out, fewer steps are taken, and the page says so.
"""

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._dynamo.utils import counters

from transformer.compute import dtype_of, loss_scaler
from transformer.config.jobs import TrainJob
from transformer.config.primitives import to_json
from transformer.config.settings import Device, LayoutKind, ModelConfig, Precision, TrainConfig, paper_peak
from transformer.cost import parameters, peak_flops, step_flops
from transformer.data.loader import Position, Step, load_steps
from transformer.data.store import Store
from transformer.model.transformer import Transformer
from transformer.training.optimizer import build_optimizer, learning_rate
from transformer.training.resolve import batching_of, resolve_settings
from transformer.training.step import Objective, train_step

MEAN, LONGEST = 27, 256  # tokens of a sentence, EOS counted
SPREAD, UNLIKENESS = 0.45, 0.2  # of the log of a length: between sentences, and between the sides of a pair
SIZES = {
    "tiny": (ModelConfig(n_layers=1, d_model=32, d_ff=64, n_heads=2), 1_000),  # to try this script
    "base": (ModelConfig(), 37_000),
    "big": (ModelConfig(d_model=1024, d_ff=4096, n_heads=16, dropout=0.3), 37_000),
}  # and the pieces of the vocabulary


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    on_gpu = args.device == "cuda"
    model, vocab_size = SIZES[args.size]
    facts: dict[str, Any] = {
        "size": args.size,
        "parameters": parameters(model, vocab_size),
        "vocab_size": vocab_size,
        "tokens_per_step": args.tokens,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "results": [],
    }
    store = make_corpus(args.tokens * (args.warmup + args.steps + 20), vocab_size)
    settings = list(product((LayoutKind.packed, LayoutKind.padded), (True, False)))
    end = time.monotonic() + args.seconds
    for index, (layout, compiled) in enumerate(settings):
        train = TrainConfig(
            tokens_per_step=args.tokens,
            layout=layout,
            compile=compiled,
            device=Device[args.device],
            precision=Precision[args.precision],
        )
        job = replace(TrainJob(), model=model, train=train)
        allowed = (end - time.monotonic()) / (len(settings) - index)
        result: dict[str, Any] = {"layout": layout.name, "compiled": compiled}
        try:
            result |= measure(job, store, vocab_size, steps=args.steps, warmup=args.warmup, seconds=allowed)
            if on_gpu and compiled and (result["graphs_while_timed"] or not result["resolved"]["compile"]):
                result["error"] = f"{result['graphs_while_timed']} graphs compiled while the clock ran, or none ever"
        except Exception as error:  # the other settings are measured all the same
            traceback.print_exc()
            result["error"] = f"{type(error).__name__}: {error}".partition("\n")[0]
        facts["results"].append(result)
        if args.output is not None:  # now: whoever stops us keeps what there is
            args.output.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        print(f"{layout.name} {'compiled' if compiled else 'eager'}: done", file=sys.stderr, flush=True)
    print("\n".join(page(facts)))
    return 1 if any("error" in result for result in facts["results"]) else 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="base", help="default: %(default)s")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="default: %(default)s")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="bf16", help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=25_000, help="real tokens of a step, on each side")
    parser.add_argument("--steps", type=int, default=300, help="timed steps of each setting (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=30, help="steps before the clock starts (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=600.0, help="for everything (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="write every number here, as JSON")
    return parser.parse_args(arguments)


def make_corpus(tokens: int, vocab_size: int) -> Store:
    """Pairs with so many tokens on the source side."""
    draw = np.random.default_rng(1)
    pairs = tokens // MEAN + 1
    log_length = np.log(MEAN - 1) - SPREAD**2 / 2 + SPREAD * draw.standard_normal(pairs)
    pieces, offsets = [], []
    for _ in range(2):
        own = log_length + UNLIKENESS * draw.standard_normal(pairs) - UNLIKENESS**2 / 2
        counts = np.clip(np.rint(np.exp(own)), 1, LONGEST - 1).astype(np.int64)
        offsets.append(np.concatenate(([0], counts.cumsum())))
        ranks = (vocab_size - 4) ** draw.random(
            int(counts.sum())
        )  # Zipf: the n-th piece is n times rarer than the first
        pieces.append((3 + np.floor(ranks)).astype(np.uint16))
    return Store((pieces[0], pieces[1]), (offsets[0], offsets[1]))


def measure(job: TrainJob, store: Store, vocab_size: int, *, steps: int, warmup: int, seconds: float) -> dict[str, Any]:
    """One setting: `warmup` steps, then `steps` with the clock running, or as many as `seconds` allow."""
    begun = time.monotonic()
    torch._dynamo.reset()
    resolved = resolve_settings(job, 1)
    device, precision, cfg = torch.device(resolved.device.name), resolved.precision, job.train
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.set_num_threads(resolved.threads)
    torch.manual_seed(cfg.seed)
    model = Transformer(job.model, vocab_size).to(device, dtype_of(precision))
    objective = Objective(model, cfg.label_smoothing).train()
    if resolved.compile:
        objective.compile()
    optimizer, scaler = build_optimizer(model, cfg), loss_scaler(device, precision)
    batching = batching_of(job, resolved, store=store, mixture=((len(store), 1.0),))
    source = load_steps(
        lambda epoch: store,
        batching,
        rank=0,
        world_size=1,
        position=Position(0, 0),
        prefetch=cfg.prefetch,
    )
    peak = paper_peak(job.model.d_model, cfg.warmup_steps)
    marks, waits, losses, done = Marks(device), [], [], list[Step]()
    ready = graphs = 0.0
    with closing(source):
        for number in range(warmup + steps):
            if number == warmup:
                ready, graphs = time.monotonic() - begun, counters["stats"]["unique_graphs"]
                marks.add()
            elif number > warmup and time.monotonic() - begun > seconds:
                break
            asked = time.perf_counter()
            step = next(source)
            waited = time.perf_counter() - asked
            result = train_step(
                objective,
                optimizer,
                step,
                scaler=scaler,
                world_size=1,
                rate=learning_rate(
                    number, peak=peak, warmup_steps=cfg.warmup_steps, decay=cfg.decay, max_steps=cfg.max_steps
                ),
                seed=cfg.seed,
                clip_norm=cfg.clip_norm,
                device=device,
                precision=precision,
            )
            losses.append(result.loss_sum / step.target_tokens)
            if number >= warmup:
                marks.add()
                waits.append(waited)
                done.append(step)
    times = marks.seconds()
    return {
        "resolved": to_json(resolved),
        "capacities": batching.capacities,
        "steps": len(done),
        "steps_wanted": steps,
        "seconds_before_the_clock": round(ready, 1),
        "graphs": counters["stats"]["unique_graphs"],
        "graphs_while_timed": counters["stats"]["unique_graphs"] - graphs,
        "first_loss": float(losses[0]),
        "last_loss": float(losses[-1]),
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
        **speeds(job.model, vocab_size, done, times=times, waits=waits, device=device),
        "milliseconds": [round(1e3 * value, 3) for value in times],
    }


class Marks:
    """Points in the device's time: events on a GPU, so that noticing them costs no wait."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def add(self) -> None:
        """Mark where the device's work queue ends now."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """From each mark to the next."""
        if self._on_gpu:
            torch.cuda.synchronize()
            pairs = zip(self._events, self._events[1:], strict=False)
            return [one.elapsed_time(other) / 1e3 for one, other in pairs]
        return [other - one for one, other in zip(self._times, self._times[1:], strict=False)]


def speeds(
    model: ModelConfig,
    vocab_size: int,
    done: list[Step],
    *,
    times: list[float],
    waits: list[float],
    device: torch.device,
) -> dict[str, Any]:
    """What the timed steps come to."""
    total = sum(times)
    source, target = sum(step.source_tokens for step in done), sum(step.target_tokens for step in done)
    flops = sum(
        step_flops(
            model,
            vocab_size,
            source=step.source_tokens,
            target=step.target_tokens,
            mean_length=(step.source_tokens + step.target_tokens) / (2 * step.sentences),
        )
        for step in done
    )
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return {
        "target_tokens_per_second": target / total,
        "milliseconds_median": 1e3 * statistics.median(times),
        "milliseconds_p95": 1e3 * float(np.percentile(times, 95)),
        "data_wait_share": sum(waits) / total,
        "padding_share": 1 - (source + target) / sum(step.slots for step in done),
        "micro_batches_per_step": sum(len(step.micro_batches) for step in done) / len(done),
        "target_tokens_per_step": target / len(done),
        "model_tflops": flops / total / 1e12,
        "utilisation": None if peak is None else flops / total / peak,
        "minutes_of_100k_steps": total / len(done) * 1e5 / 60,
    }


def page(facts: dict[str, Any]) -> Iterator[str]:
    """The report, in Markdown."""
    yield (
        f"{facts['size']} ({facts['parameters']:,} parameters), up to {facts['tokens_per_step']:,} real tokens a step "
        f"on each side, {facts['device']}, torch {facts['torch']}."
    )
    yield ""
    yield (
        "| layout | | target tokens/s | ms a step: median | p95 | utilisation | peak GiB | empty slots "
        "| waits for data | 100k steps | graphs while timed |"
    )
    yield "| --- " * 11 + "|"
    for r in facts["results"]:
        name = f"| {r['layout']} | {'compiled' if r['compiled'] else 'eager'} "
        if "steps" not in r:
            yield name + "| failed |" + " |" * 8
            continue
        used = "" if r["utilisation"] is None else f"{r['utilisation']:.1%}"
        memory = "" if r["peak_memory_gib"] is None else f"{r['peak_memory_gib']:.1f}"
        yield (
            f"{name}| {r['target_tokens_per_second']:,.0f} | {r['milliseconds_median']:.1f} "
            f"| {r['milliseconds_p95']:.1f} | {used} | {memory} | {r['padding_share']:.1%} "
            f"| {r['data_wait_share']:.1%} | {r['minutes_of_100k_steps']:.0f} min | {r['graphs_while_timed']} |"
        )
    for r in facts["results"]:
        name = f"{r['layout']} {'compiled' if r['compiled'] else 'eager'}"
        if r.get("steps", 0) < r.get("steps_wanted", 0):
            yield f"\n{name}: the time ran out after {r['steps']} of {r['steps_wanted']} steps."
        if "error" in r:
            yield f"\n{name}: FAILED: {r['error']}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
