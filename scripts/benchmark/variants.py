"""Variants of the training step, and what one would else use, in turns in one process, on the same sentences.

    python scripts/benchmark/variants.py --output variants.jsonl

A variant is a change of the settings, or of what torch is told around each step. In every round each of them takes so
many steps, A B C A B C, so that whatever changes on the machine hits all alike: ratios are formed within a round. The
peers are the loops of peers.py with padded batches, made before the clock starts: torch.nn.Transformer, compiled with
dynamic shapes, and Hugging Face's MarianMTModel where it is installed. A variant that fails is left out from then on,
and so is one whose start, compiling above all, would take four fifths of the time that is left.
"""

import argparse
import importlib.util
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from measured import Measured, Numbers
from peers import DROPOUT, SMOOTHING, Contender, Marian, PlainTransformer, Shape, Spec, Taken, padded_loop
from steps import SETTINGS, SIZES, Training, changed, cudnn_attention, make_corpus, wait_for
from torch import nn
from train import save_batches

from transformer.compute import resolve_device
from transformer.config.jobs import TrainJob
from transformer.config.settings import Device, Kernels, Precision, TrainConfig
from transformer.data.plan import plan_chapter
from transformer.data.store import Store


class Task(NamedTuple):
    """What all of them train, on which sentences."""

    job: TrainJob
    store: Store
    spec: Spec  # the same for the peers


class Variant(NamedTuple):
    """One way to take a step."""

    build: Callable[[Task], Contender]
    around: Callable[[], AbstractContextManager[object]] = nullcontext  # each turn


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    measured = Measured(args.output, seconds=args.seconds)
    names = available(measured, args.size, args.variants)
    with TemporaryDirectory() as folder:
        task = make_task(args, args.warmup + args.rounds * args.steps, Path(folder) / "batches.npz")
        contenders: dict[str, Contender] = {}
        for name in names:
            keys = [f"variants/{args.size}/{name}/{number}" for number in range(1, args.rounds + 1)]
            if any(key not in measured for key in keys):
                seconds = max(0.1, 0.8 * measured.seconds_left)
                warm_up = partial(start, contenders, name, task, range(args.warmup), seconds=seconds)
                measured.take(f"variants/{args.size}/{name}/start", warm_up, again=True)
            print(f"{name}: started", file=sys.stderr, flush=True)

        for number in range(1, args.rounds + 1):
            first = args.warmup + (number - 1) * args.steps
            for name, contender in list(contenders.items()):
                key = f"variants/{args.size}/{name}/{number}"
                indices = range(first, first + args.steps)
                measured.take(key, partial(turn, contender, VARIANTS[name], indices, task=task))
                if "error" in (measured.get(key) or {}):
                    del contenders[name]
            print(f"round {number} of {args.rounds}: done", file=sys.stderr, flush=True)

    first = speeds(measured, args.size, names[0], args.rounds)
    for name in names[1:]:
        own = speeds(measured, args.size, name, args.rounds)
        if ratios := [first[n] / own[n] for n in own if n in first]:
            numbers = {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
            measured.add(f"variants/{args.size}/{name}/ratio", numbers)
    print("\n".join(page(measured, args.size, names, args.rounds)))
    return measured.status()


def parse(arguments: list[str]) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        if unknown := set(text.split(",")) - set(VARIANTS):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: choose from {', '.join(VARIANTS)}")
        return text.split(",")

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--variants", type=names, default=",".join(DEFAULT), help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--size", choices=SIZES, default="base", help="default: %(default)s")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=25_000, help="real tokens of a step, on each side")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each variant (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=12, help="of a turn (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=10, help="steps before the first turn (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=600.0, help="for everything (default: %(default)s)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of train, for ours; may be repeated"
    )
    parser.add_argument("--output", type=Path, required=True, help="write every number here, as lines of JSON")
    args = parser.parse_args(arguments)
    try:
        changed(TrainConfig(), args.set)
    except ValueError as error:
        parser.error(f"--set: {error}")
    return args


def available(measured: Measured, size: str, names: list[str]) -> list[str]:
    """These variants, less what is not installed here, which is then said."""
    if "marian" not in names or importlib.util.find_spec("transformers") is not None:
        return names
    measured.add(f"variants/{size}/marian/start", {"left_out": "transformers is not installed"})
    print("marian is left out: transformers is not installed", file=sys.stderr)
    return [name for name in names if name != "marian"]


def make_task(args: argparse.Namespace, steps: int, batches: Path) -> Task:
    """A corpus of so many steps, and the same steps as the peers read them."""
    config, vocab_size = SIZES[args.size]
    device = resolve_device(Device[args.device])
    store = make_corpus(args.tokens * (steps + 20), vocab_size)
    train = TrainConfig(
        tokens_per_step=args.tokens,
        device=Device[args.device],
        precision=Precision.bf16,
        label_smoothing=SMOOTHING,
    )
    job = replace(TrainJob(), model=replace(config, dropout=DROPOUT), train=changed(train, args.set))

    plan = plan_chapter(
        store.lengths, mixture=((len(store), 1.0),), seed=train.seed, epoch=0, chapter=0, tokens_per_step=args.tokens
    )
    save_batches(store, plan[:steps], batches)
    spec = Spec(
        peer="",
        shape=Shape(config.n_layers, config.d_model, config.d_ff, config.n_heads),
        vocab_size=vocab_size,
        longest=max(store.longest),
        precision="bf16",
        device=device.type,
        threads=torch.get_num_threads(),
        batches=str(batches),
        job={},
    )
    return Task(job, store, spec)


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises TimeoutError when this has taken so long, at the next line of Python."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"it took longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def start(contenders: dict[str, Contender], name: str, task: Task, indices: range, *, seconds: float) -> Numbers:
    """Build a variant and warm it up: what it compiles, it compiles now."""
    begun = time.monotonic()
    with at_most(seconds):
        contender = VARIANTS[name].build(task)
        built = time.monotonic() - begun
        found = turn(contender, VARIANTS[name], indices, task=task)
    contenders[name] = contender
    return found | {"build_seconds": built, "parameters": contender.parameters}


def turn(contender: Contender, variant: Variant, indices: range, *, task: Task) -> Numbers:
    """The steps of one turn, and how long they took."""
    device = torch.device(task.spec.device)
    with variant.around():
        go = contender.ready(indices)
        wait_for(device)
        begun = time.perf_counter()
        taken = go()
        wait_for(device)
        seconds = time.perf_counter() - begun
    tokens = sum(step.target_tokens for step in taken)
    return {
        "seconds": seconds,
        "steps": len(taken),
        "target_tokens": tokens,
        "milliseconds_a_step": 1e3 * seconds / len(taken),
        "target_tokens_per_second": tokens / seconds,
        "losses": [round(step.loss, 4) for step in taken],
    }


def ours(setting: str, task: Task, *, kernels: Kernels | None = None) -> Contender:
    """The package's step in one of the settings of steps.py."""
    layout, compiled, graphs = SETTINGS[setting]
    train = replace(task.job.train, layout=layout, compile=compiled, cuda_graphs=graphs)
    if kernels is not None:
        train = replace(train, kernels=kernels)
    job = replace(task.job, train=train)
    training = Training(job, task.store, task.spec.vocab_size)

    def take(indices: range) -> list[Taken]:
        taken = [training.take() for _ in indices]  # losses are read after the last step: reading is waiting
        return [Taken(float(loss), step.source_tokens, step.target_tokens) for step, loss, _ in taken]

    return Contender(training.parameters, {}, {}, lambda indices: lambda: take(indices))


def peer(make: Callable[[Spec], nn.Module], compiled: bool, task: Task) -> Contender:
    """A loop of peers.py."""
    model = make(task.spec)
    if compiled:
        model.compile(dynamic=True)
    return padded_loop(task.spec, model, {})


# cuDNN would build a plan for each new shape of padded attention: it is off for everybody.
no_cudnn = partial(cudnn_attention, False)
UNTRIED = {
    "triton": Variant(partial(ours, "packed-compiled-graphs", kernels=Kernels.triton)),
    "fused": Variant(partial(ours, "packed-compiled-graphs", kernels=Kernels.fused)),
}  # kernels that are no default before they have been measured
VARIANTS = {
    "packed-compiled-graphs": Variant(partial(ours, "packed-compiled-graphs")),
    "packed-graphs": Variant(partial(ours, "packed-graphs")),
    "packed-compiled": Variant(partial(ours, "packed-compiled")),
    "nn.Transformer-compiled": Variant(partial(peer, PlainTransformer, True), no_cudnn),
    "packed-eager": Variant(partial(ours, "packed-eager")),
    "padded-eager": Variant(partial(ours, "padded-eager"), no_cudnn),
    "marian": Variant(partial(peer, Marian, False), no_cudnn),
    "nn.Transformer": Variant(partial(peer, PlainTransformer, False), no_cudnn),
    "padded-eager-cudnn": Variant(partial(ours, "padded-eager"), partial(cudnn_attention, True)),
    **UNTRIED,
}  # the first is what the others are compared with
LEFT_OUT = {"padded-eager-cudnn", *UNTRIED}  # the first takes a second a step, or more
DEFAULT = [name for name in VARIANTS if name not in LEFT_OUT]


def speeds(measured: Measured, size: str, name: str, rounds: int) -> dict[int, float]:
    """Target tokens a second of a variant, by the number of the round, where it came to its end."""
    found = {n: measured.get(f"variants/{size}/{name}/{n}") or {} for n in range(1, rounds + 1)}
    return {n: numbers["target_tokens_per_second"] for n, numbers in found.items() if "seconds" in numbers}


def page(measured: Measured, size: str, names: list[str], rounds: int) -> list[str]:
    """Speeds and ratios, in Markdown."""
    lines = ["| variant | target tokens/s: median | range | the first, times as fast | last loss |", "| --- " * 5 + "|"]
    first = speeds(measured, size, names[0], rounds)
    for name in names:
        own = speeds(measured, size, name, rounds)
        if not own:
            lines.append(f"| {name} | failed | | | |")
            continue
        ratios = [first[n] / own[n] for n in own if n in first]
        ratio = f"{statistics.median(ratios):.2f}" if ratios else ""
        speed = statistics.median(own.values())
        last = (measured.get(f"variants/{size}/{name}/{max(own)}") or {})["losses"][-1]
        lines.append(
            f"| {name} | {speed:,.0f} | {min(own.values()):,.0f} to {max(own.values()):,.0f} | {ratio} | {last:.3f} |"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
