"""How long a training step takes, packed or padded, compiled or eager, on sentences as long as those of WMT.

    python scripts/benchmark/steps.py --output steps.jsonl

The step is the one that `transformer train` takes: its plan, its loader thread, its micro-batches, its settings; only
the corpus is made up. Sentences have 27 tokens on average (log-normal, at most 256; the two sides of a pair are of like
length), as English and German WMT pairs in 37,000 shared pieces have, and ids are as unequally frequent as words are.

Each setting starts anew, warms up, and is then timed without a break: the time of a step runs from the end of the one
before it to its own end on the device, waiting for data included. What comes before, compiling above all, is reported
apart, and takes nothing from the time that --seconds gives to the timed steps. Speed is real target tokens a second
over all timed steps: EOS counted, padding never. Utilisation is the model's FLOPs (transformer/cost.py) over the
device's peak. A graph compiled while the clock runs is counted, and on a GPU it is a failure: there, shapes are meant
to have resolved. Where the time given runs out, fewer steps are taken, and the page says so.

With --profile N, N of the timed steps, evenly spread over them, are taken again under the profiler, for a table by
kernel name: neighbours may be much alike, and what attention takes depends on the number of sentences, which is kept
for every step. --set KEY=VALUE changes a key of `train` in all settings, and is part of the measurement's name.
padded-compiled is measured only when asked for: padded batches come in so many shapes that four or five graphs are
compiled before any step is timed.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kernel_times import kernel_table
from measured import Measured, Numbers
from torch import Tensor
from torch._dynamo.utils import counters

from transformer.compute import avoid_cudnn_attention, dtype_of, loss_scaler, resolve_device
from transformer.config.jobs import TrainJob
from transformer.config.primitives import from_json, to_json
from transformer.config.settings import Device, LayoutKind, ModelConfig, Precision, TrainConfig
from transformer.cost import count_parameters, peak_flops, step_flops
from transformer.data.loader import Position, Step, load_steps
from transformer.data.store import Store
from transformer.model.transformer import Transformer
from transformer.training.cuda_graphs import GraphedComputation
from transformer.training.optimizer import build_optimizer, rate_of
from transformer.training.resolve import batching_of, resolve_settings
from transformer.training.step import Computation, Objective, train_step

MEAN, LONGEST = 27, 256  # tokens of a sentence, EOS counted
SPREAD, UNLIKENESS = 0.45, 0.2  # of the log of a length: between sentences, and between the sides of a pair
SIZES = {
    "tiny": (ModelConfig(n_layers=1, d_model=32, d_ff=64, n_heads=2), 1_000),  # to try this script
    "base": (ModelConfig(), 37_000),
    "big": (ModelConfig(d_model=1024, d_ff=4096, n_heads=16, dropout=0.3), 37_000),
}  # and the pieces of the vocabulary


SETTINGS = {
    "packed-compiled-graphs": (LayoutKind.packed, True, True),
    "packed-graphs": (LayoutKind.packed, False, True),
    "packed-compiled": (LayoutKind.packed, True, False),
    "packed-eager": (LayoutKind.packed, False, False),
    "padded-eager": (LayoutKind.padded, False, False),
    "padded-compiled": (LayoutKind.padded, True, False),
}  # the most valuable first: a layout, whether it is compiled, and whether a GPU replays it


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    on_gpu = args.device == "cuda"
    model, vocab_size = SIZES[args.size]
    facts: dict[str, Any] = {
        "size": args.size,
        "parameters": count_parameters(model, vocab_size).total,
        "vocab_size": vocab_size,
        "tokens_per_step": args.tokens,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "results": [],
    }
    store = make_corpus(args.tokens * (args.warmup + args.steps + 20), vocab_size)
    measured = Measured(args.output, seconds=math.inf)

    for name in args.settings:
        layout, compiled, graphs = SETTINGS[name]
        train = TrainConfig(
            tokens_per_step=args.tokens,
            layout=layout,
            compile=compiled,
            cuda_graphs=graphs,
            device=Device[args.device],
            precision=Precision[args.precision],
        )
        job = replace(TrainJob(), model=model, train=changed(train, args.set))
        setting = {"layout": layout.name, "compiled": compiled, "graphs": graphs, "set": args.set}
        key = "/".join(["steps", args.size, str(args.tokens), name, *args.set])
        measured.take(
            key,
            partial(
                measure,
                job,
                store,
                vocab_size,
                warmup=args.warmup,
                steps=args.steps,
                seconds=args.seconds,
                profiled=args.profile,
                keep=partial(measured.add, key),
            ),
        )
        facts["results"].append(setting | (measured.get(key) or {}))
        print(f"{key}: done", file=sys.stderr, flush=True)

    print("\n".join(page(facts)))
    return measured.status()


def parse(arguments: list[str]) -> argparse.Namespace:
    def settings(text: str) -> list[str]:
        if unknown := set(text.split(",")) - set(SETTINGS):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: choose from {', '.join(SETTINGS)}")
        return text.split(",")

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="base", help="default: %(default)s")
    parser.add_argument(
        "--settings",
        type=settings,
        default="packed-compiled-graphs,packed-graphs,packed-compiled,packed-eager,padded-eager",
        help=f"of {', '.join(SETTINGS)}; default: %(default)s",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="default: %(default)s")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="bf16", help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=25_000, help="real tokens of a step, on each side")
    parser.add_argument("--steps", type=int, default=300, help="timed steps of each setting (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=30, help="steps before the clock starts (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="for the timed steps of each setting (default: %(default)s)"
    )
    parser.add_argument("--profile", type=int, default=0, help="steps under the profiler (default: none)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of train, as kernels=triton; may be repeated"
    )
    parser.add_argument("--output", type=Path, help="write every number here, as lines of JSON")
    args = parser.parse_args(arguments)
    try:
        changed(TrainConfig(), args.set)
    except ValueError as error:
        parser.error(f"--set: {error}")
    return args


def changed(train: TrainConfig, settings: list[str]) -> TrainConfig:
    """With these keys set, each written as KEY=VALUE. Raises ValueError for a key or a value that there is not."""
    values = to_json(train)
    for setting in settings:
        key, _, text = setting.partition("=")
        try:
            values[key] = json.loads(text)
        except ValueError:  # a name
            values[key] = text
    return from_json(TrainConfig, values)


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


class Training:
    """A model in training, stepped as `transformer train` steps it."""

    def __init__(self, job: TrainJob, store: Store, vocab_size: int) -> None:
        self.resolved = resolve_settings(job, 1)
        self.device = torch.device(self.resolved.device.name)
        avoid_cudnn_attention(self.device)
        self.batching = batching_of(job, self.resolved, lengths=store.lengths, mixture=((len(store), 1.0),))
        self.parameters = count_parameters(job.model, vocab_size).total
        self.taken = 0
        self._train = job.train
        self._d_model = job.model.d_model

        torch.set_num_threads(self.resolved.threads)
        torch.manual_seed(job.train.seed)
        model = Transformer(job.model, vocab_size).to(self.device, dtype_of(self.resolved.precision))
        objective = Objective(model, job.train.label_smoothing, loss_rows=self.resolved.loss_rows).train()
        if self.resolved.compile:
            objective.compile()
        optimizer, scaler = build_optimizer(model, job.train), loss_scaler(self.device, self.resolved.precision)
        self._computation = Computation(
            objective, optimizer, scaler, job.train.clip_norm, self.device, self.resolved.precision
        )
        if self.resolved.cuda_graphs:
            self._computation = GraphedComputation(self._computation, reduces=False)
        self._load = partial(
            load_steps,
            lambda epoch: store,
            self.batching,
            rank=0,
            world_size=1,
            prefetch=job.train.prefetch,
            device=self.device,
        )
        self._steps = self._load(position=Position(0, 0, 0))

    def take(self) -> tuple[Step, Tensor, float]:
        """One step: its sentences, its mean loss, on the device, and the seconds that it waited for data."""
        asked = time.perf_counter()
        step = next(self._steps)
        waited = time.perf_counter() - asked
        return step, self.compute(step), waited

    def again(self, first: int, last: int, count: int) -> list[Step]:
        """So many of the steps from `first` up to `last`, evenly spread, with new batches."""
        numbers = {first + index * (last - first) // count for index in range(count)}
        with closing(self._load(position=Position(0, 0, 0))) as steps:
            return [step for number, step in enumerate(islice(steps, last)) if number in numbers]

    def compute(self, step: Step) -> Tensor:
        """One update; its mean loss, on the device."""
        train = self._train
        rate = rate_of(train, self._d_model, step=self.taken)
        result = train_step(self._computation, step, world_size=1, rate=rate, seed=train.seed)
        self.taken += 1
        return result.loss_sum / step.target_tokens

    def close(self) -> None:
        """End the loader's thread."""
        self._steps.close()


def measure(
    job: TrainJob,
    store: Store,
    vocab_size: int,
    *,
    warmup: int,
    steps: int,
    seconds: float,
    profiled: int,
    keep: Callable[[Numbers], None],
) -> Numbers:
    """One setting: `warmup` steps, then `steps` with the clock running, or as many as `seconds` of it allow."""
    torch._dynamo.reset()
    device = resolve_device(job.train.device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    begun = time.monotonic()
    with closing(Training(job, store, vocab_size)) as training:
        # What is not timed: the first step compiles, and the second may compile again.
        losses = [training.take()[1]]
        wait_for(device)
        first = time.monotonic() - begun
        losses += [training.take()[1] for _ in range(warmup - 1)]
        wait_for(device)
        ready = time.monotonic() - begun
        graphs = counters["stats"]["unique_graphs"]

        # What is.
        marks = Marks(device)
        marks.add()
        waits: list[float] = []
        done: list[Step] = []
        while len(done) < steps and (not done or time.monotonic() - begun - ready < seconds):
            step, loss, waited = training.take()
            marks.add()
            losses.append(loss)
            waits.append(waited)
            done.append(step)
        times = marks.seconds()
        while_timed = counters["stats"]["unique_graphs"] - graphs
        peak_memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None

        numbers = {
            "resolved": to_json(training.resolved),
            "parameters": training.parameters,
            "capacities": training.batching.capacities,
            "steps": len(done),
            "steps_wanted": steps,
            "seconds_of_first_step": round(first, 2),
            "seconds_before_the_clock": round(ready, 2),
            "graphs": counters["stats"]["unique_graphs"],
            "graphs_while_timed": while_timed,
            "first_loss": float(losses[0]),
            "last_loss": float(losses[-1]),
            "peak_memory_gib": peak_memory,
            **speeds(job.model, vocab_size, done, times=times, waits=waits, device=device),
            "milliseconds": [round(1e3 * value, 3) for value in times],
            "sentences": [step.sentences for step in done],
        }
        if profiled:
            keep(numbers)  # the profiler may hang
            numbers["profile"] = profile(training, training.again(warmup, warmup + len(done), profiled))

    if device.type == "cuda" and job.train.compile and (while_timed or not training.resolved.compile):
        numbers["error"] = f"{while_timed} graphs compiled while the clock ran, or none ever"
    return numbers


def profile(training: Training, steps: list[Step]) -> Numbers:
    """A table of the kernels of these steps; an error of the profiler costs the table, not the timed steps."""

    def run() -> None:
        for step in steps:
            training.compute(step)

    return kernel_table(run, training.device, len(steps)) | {"sentences": [step.sentences for step in steps]}


def wait_for(device: torch.device) -> None:
    """A GPU works on while the host goes ahead; a clock must wait for it."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def sdpa_flags() -> dict[str, bool]:
    """Which kernels scaled_dot_product_attention may choose from on a GPU."""
    kernels = ("flash", "mem_efficient", "cudnn", "math")
    return {kernel: getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")() for kernel in kernels}


@contextmanager
def cudnn_attention(wanted: bool | None) -> Iterator[None]:
    """cuDNN's attention on or off for a while; None: as the package has it."""
    before = sdpa_flags()["cudnn"]
    torch.backends.cuda.enable_cudnn_sdp(before if wanted is None else wanted)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


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
        "milliseconds_mean": 1e3 * total / len(done),
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
        "| waits for data | 100k steps | graphs while timed | first step |"
    )
    yield "| --- " * 12 + "|"
    for r in facts["results"]:
        name = f"| {r['layout']} | {way(r)} "
        if "steps" not in r:
            yield name + "| failed |" + " |" * 9
            continue
        used = "" if r["utilisation"] is None else f"{r['utilisation']:.1%}"
        memory = "" if r["peak_memory_gib"] is None else f"{r['peak_memory_gib']:.1f}"
        yield (
            f"{name}| {r['target_tokens_per_second']:,.0f} | {r['milliseconds_median']:.1f} "
            f"| {r['milliseconds_p95']:.1f} | {used} | {memory} | {r['padding_share']:.1%} "
            f"| {r['data_wait_share']:.1%} | {r['minutes_of_100k_steps']:.0f} min | {r['graphs_while_timed']} "
            f"| {r['seconds_of_first_step']:.1f} s |"
        )
    for r in facts["results"]:
        name = f"{r['layout']} {way(r)}"
        if r.get("steps", 0) < r.get("steps_wanted", 0):
            yield f"\n{name}: the time ran out after {r['steps']} of {r['steps_wanted']} steps."
        if "error" in r:
            yield f"\n{name}: FAILED: {r['error']}"
        if "rows" in r.get("profile", {}):
            yield ""
            yield from kernel_page(r["profile"], name)


def way(result: dict[str, Any]) -> str:
    """How the steps were computed, in words."""
    words = ["compiled" if result["compiled"] else "eager", *(["replayed"] if result["graphs"] else []), *result["set"]]
    return ", ".join(words)


def kernel_page(profile: Numbers, name: str) -> Iterator[str]:
    """The table by kernel, in Markdown."""
    yield (
        f"{name}, {profile['runs']} steps under the profiler: {profile['calls']:.0f} kernels of {profile['names']} "
        f"names and {profile['busy_ms']:.2f} ms a step, the device idle for {profile['idle_ms']:.2f} ms."
    )
    yield ""
    yield "| kernel | ms a step | calls a step | share |"
    yield "| --- | --- | --- | --- |"
    for row in profile["rows"]:
        yield f"| `{row['kernel'][:100]}` | {row['ms']:.3f} | {row['calls']:.1f} | {row['share']:.1%} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
