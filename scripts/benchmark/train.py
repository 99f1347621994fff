"""Training speed beside what one would else use: real target tokens a second on the same batches of real sentences.

    python scripts/benchmark/train.py --src train.en --tgt train.de --peers-python peers/bin/python --output out.json

Contenders: `ours` is the step of this package as `transformer train` takes it, with what `auto` settles on this
machine; `plain` is a torch.nn.Transformer loop as a good engineer would write it; `marian` is Hugging Face's
MarianMTModel in the same loop. It lives in an environment of its own, and is left out without --peers-python:

    python -m venv peers && peers/bin/pip install torch==2.13.0 && peers/bin/pip install transformers

(our torch, installed first and alone, so that transformers brings no other build).

How it measures: each contender is a process of its own with the same number of threads. They take turns, A B C A B C,
and wait in between, so that whatever else happens on the machine hits all alike; ratios are formed within a round. All
train on the same sentences in the same steps, and every turn takes batches not seen before: new shapes are part of the
cost, for everybody. A step of `plain` and `marian` is one padded batch, made before the clock starts; `ours` loads its
own while the clock runs. The losses show that everybody trains the same thing: one recipe, but random numbers of
their own (and torch smooths over all V classes, we over the V - 1 wrong ones, which is 1e-4 at 10,000 pieces).
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, count, islice, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from contest import (
    Program,
    Worker,
    among,
    corpus_file,
    fail,
    machine,
    positive,
    ratios,
    row,
    rule,
    spread,
    started,
)
from peers import DROPOUT, EOS, PAD, PEAK_RATE, SMOOTHING, WARMUP_STEPS, Ids, Shape, Spec

from transformer.compute import resolve_device
from transformer.config.jobs import TrainJob
from transformer.config.primitives import to_json
from transformer.config.settings import (
    DataConfig,
    Device,
    ModelConfig,
    PairConfig,
    Precision,
    TokenizerConfig,
    TrainConfig,
)
from transformer.data.plan import plan_epoch
from transformer.data.prepare import prepare
from transformer.data.store import Store
from transformer.data.tokenizer import Tokenizer
from transformer.errors import InputError, TransformerError
from transformer.machine import resolve_threads

LOSS_AT = 20  # updates after which the losses are compared


class Size(NamedTuple):
    """A model, and how many steps make a turn of some seconds."""

    shape: Shape
    steps: int


SIZES = {
    "tiny": Size(Shape(n_layers=1, d_model=32, d_ff=64, n_heads=2), 10),  # to try this script
    "small": Size(Shape(n_layers=3, d_model=256, d_ff=1024, n_heads=4), 10),
    "base": Size(Shape(n_layers=6, d_model=512, d_ff=2048, n_heads=8), 4),
}
EXTRA: dict[str, tuple[Callable[[Shape], int], str]] = {
    "ours": (lambda shape: 0, ""),
    "plain": (
        lambda shape: (12 * shape.n_layers + 4) * shape.d_model,
        "biases in the attention's projections, and a norm at the end of either stack",
    ),
    "marian": (lambda shape: 12 * shape.n_layers * shape.d_model, "biases in the attention's projections"),
}  # parameters that a contender has beyond ours, and which


@dataclass(frozen=True)
class Result:
    """What a contender did in one setting."""

    size: str
    precision: str
    peer: str
    parameters: int
    settings: dict[str, Any]  # what `auto` came to, for ours
    versions: dict[str, str]
    turns: list[dict[str, Any]]  # as peers.py reports them; the first is the warm-up

    @property
    def speeds(self) -> list[float]:
        """Real target tokens a second in each turn after the warm-up: EOS counted, padding never."""
        return [sum(step["target_tokens"] for step in turn["steps"]) / turn["seconds"] for turn in self.turns[1:]]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Every step taken."""
        return [step for turn in self.turns for step in turn["steps"]]


def main(arguments: list[str]) -> None:
    args = parse(arguments)
    try:
        with TemporaryDirectory() as folder:
            job = configure(args, Path(folder))
            vocab_size, results = measure(args, job)
    except TransformerError as error:
        fail(error)
    facts = {
        "command": shlex.join(["python", "scripts/benchmark/train.py", *arguments]),
        **machine(),
        "threads": job.train.threads,
        "device": job.train.device.name,
        "corpus": ["/".join(Path(path).parts[-2:]) for path in (job.data.train.src, job.data.train.tgt)],
        "tokens_per_step": args.tokens,
        "vocab_size": vocab_size,
    }
    if args.output is not None:
        found = [asdict(result) | {"target_tokens_per_second": result.speeds} for result in results]
        args.output.write_text(json.dumps(facts | {"results": found}, indent=1) + "\n", encoding="utf-8")
    print("\n".join(page(facts, results)))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--src", type=Path, help="source sentences (default: $TRANSFORMER_DATA/multi30k/train.en)")
    parser.add_argument("--tgt", type=Path, help="target sentences (default: $TRANSFORMER_DATA/multi30k/train.de)")
    parser.add_argument("--sizes", type=among(*SIZES), default="small,base", help="of tiny, small, base; %(default)s")
    parser.add_argument("--precisions", type=among("fp32", "bf16"), default="fp32,bf16", help="default: %(default)s")
    parser.add_argument("--peers", type=among(*EXTRA), default="ours,plain,marian", help="default: %(default)s")
    parser.add_argument("--peers-python", help="the Python of an environment with torch and transformers")
    parser.add_argument("--vocab", type=positive, default=10_000, help="pieces (default: %(default)s)")
    parser.add_argument("--tokens", type=positive, default=4_096, help="real tokens of a step, on each side")
    parser.add_argument("--rounds", type=positive, default=7, help="turns of each contender (default: %(default)s)")
    parser.add_argument("--steps", type=positive, help="steps of a turn (default: 10, of base 4)")
    parser.add_argument("--warmup", type=positive, default=3, help="steps before the first turn (default: %(default)s)")
    parser.add_argument("--threads", type=positive, help="of each contender (default: one for each core)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="write every number here, as JSON")
    args = parser.parse_args(arguments)
    if args.peers_python is None:
        args.peers = [peer for peer in args.peers if peer != "marian"]
    if not args.peers:
        parser.error("marian needs --peers-python")
    return args


def measure(args: argparse.Namespace, job: TrainJob) -> tuple[int, list[Result]]:
    """The size of the vocabulary, and every contender in every setting, one setting after the other."""
    turns = {size: [args.warmup] + args.rounds * [args.steps or SIZES[size].steps] for size in args.sizes}
    batches = Path(job.run_dir).with_name("batches.npz")
    vocab_size, longest = write_batches(job, max(map(sum, turns.values())), batches)
    results: list[Result] = []
    for size, precision in product(args.sizes, args.precisions):
        print(f"{size} {precision} ...", file=sys.stderr)
        shape = SIZES[size].shape
        model, train = ModelConfig(**asdict(shape), dropout=DROPOUT), replace(job.train, precision=Precision[precision])
        spec = Spec(
            peer="ours",
            shape=shape,
            vocab_size=vocab_size,
            longest=longest,
            precision=precision,
            device=job.train.device.name,
            threads=job.train.threads or 1,
            batches=str(batches),
            job=to_json(replace(job, model=model, train=train)),
        )
        pythons = {"ours": sys.executable, "plain": sys.executable, "marian": args.peers_python}
        with started([Program(peer, pythons[peer], "peers.py") for peer in args.peers]) as workers:
            found = race(workers, spec, turns[size])
        results += [Result(size, precision, **result) for result in found]
        agree(results[-len(workers) :], shape)
    return vocab_size, results


def configure(args: argparse.Namespace, folder: Path) -> TrainJob:
    """What `ours` trains with; whatever is not set here stays as `transformer train` has it."""
    paths = [corpus_file(args.src, "train.en"), corpus_file(args.tgt, "train.de")]
    pair = PairConfig(*map(str, paths))
    try:
        return TrainJob(
            run_dir=str(folder / "run"),
            data=DataConfig(train=pair, dev=pair),  # nothing is validated
            tokenizer=TokenizerConfig(vocab_size=args.vocab),
            train=TrainConfig(
                tokens_per_step=args.tokens,
                label_smoothing=SMOOTHING,
                threads=resolve_threads(args.threads),
                device=Device[resolve_device(Device[args.device]).type],
            ),
        )
    except ValueError as error:
        raise InputError(str(error)) from error


def write_batches(job: TrainJob, steps: int, path: Path) -> tuple[int, int]:
    """What the other contenders read: the sentences of the first `steps` steps that `ours` will take, as padded ids.

    Returns the size of the vocabulary and the longest sentence.
    """
    prepared = prepare(job)
    store = prepared.store
    plan = partial(
        plan_epoch,
        store.lengths,
        mixture=prepared.mixture,
        seed=job.train.seed,
        tokens_per_step=job.train.tokens_per_step,
    )
    epochs = (plan(epoch=epoch) for epoch in count())
    save_batches(store, islice(chain.from_iterable(epochs), steps), path)
    return Tokenizer.from_bytes(prepared.tokenizer_model).vocab_size, int(store.lengths.max())


def save_batches(store: Store, steps: Iterable[Ids], path: Path) -> None:
    """The sentences of each step as padded ids, in the form that peers.py reads."""

    def padded(ids: Ids, side: int) -> Ids:
        pieces, counts = store.gather(ids, side)
        matrix = np.full((len(ids), int(counts.max()) + 1), PAD)
        places = np.arange(matrix.shape[1])
        matrix[places < counts[:, None]] = pieces
        matrix[places == counts[:, None]] = EOS
        return matrix

    arrays: dict[str, Ids] = {}
    for index, ids in enumerate(steps):
        arrays |= {f"source/{index}": padded(ids, 0), f"target/{index}": padded(ids, 1)}
    np.savez(path, allow_pickle=False, **arrays)


def race(workers: list[Worker], spec: Spec, turns: list[int]) -> list[dict[str, Any]]:
    """Build one after the other, then take turns of so many steps each."""
    built = [worker.ask(asdict(replace(spec, peer=worker.peer))) for worker in workers]
    rounds = [[worker.ask(steps) for worker in workers] for steps in turns]
    return [
        {"peer": worker.peer, **facts, "turns": list(answers)}
        for worker, facts, answers in zip(workers, built, zip(*rounds, strict=True), strict=True)
    ]


def agree(results: list[Result], shape: Shape) -> None:
    """Refuse a comparison of different models or different sentences: either is a defect of this script."""
    sizes = {result.parameters - EXTRA[result.peer][0](shape) for result in results}
    tokens = {tuple((step["source_tokens"], step["target_tokens"]) for step in result.steps) for result in results}
    if len(sizes) > 1 or len(tokens) > 1:
        raise AssertionError(f"not the same model and sentences: {sizes}, {len(tokens)} orders of batches")


def page(facts: dict[str, Any], results: list[Result]) -> Iterator[str]:
    """The report, in Markdown."""
    versions = sorted({f"{name} {text}" for result in results for name, text in result.versions.items()})
    updates = min(LOSS_AT, min(len(result.steps) for result in results) - 1)
    yield f"`{facts['command']}`"
    yield ""
    yield (
        f"{facts['processor']}, {facts['cores']} cores, {facts['threads']} threads, device {facts['device']}, "
        f"Python {facts['python']}, {', '.join(versions)}; "
        f"{' and '.join(facts['corpus'])}, {facts['vocab_size']:,} pieces, "
        f"up to {facts['tokens_per_step']:,} real tokens a step on each side."
    )
    yield ""
    yield (
        "Speed is real target tokens a second (EOS counted, padding never), the median of the turns and their range; "
        "the ratio is formed within each round, then its median and range. Every turn takes batches not seen before. "
        f"Loss: smoothed by {SMOOTHING}, mean of a target token. Adam, rate {PEAK_RATE} after {WARMUP_STEPS} steps of "
        f"linear warm-up; dropout {DROPOUT} on embeddings and sub-layers."
    )
    yield ""
    columns = ["size", "precision", "contender", "tokens/s", "range", "ours / this", "range"]
    columns += ["loss at first", f"after {updates} steps", "parameters"]
    yield row(columns)
    yield rule(3, 7)
    for result in results:
        setting = (result.size, result.precision)
        ours = [r.speeds for r in results if r.peer == "ours" and r is not result and (r.size, r.precision) == setting]
        beside = [ratio for speeds in ours for ratio in ratios(speeds, result.speeds)]
        losses = [f"{result.steps[index]['loss']:.3f}" for index in (0, updates)]
        cells = [*setting, result.peer, *spread(result.speeds, ",.0f"), *spread(beside, ".2f")]
        yield row([*cells, *losses, f"{result.parameters:,}"])
    yield ""
    for peer, (_, extra) in EXTRA.items():
        if extra and any(result.peer == peer for result in results):
            yield f"- `{peer}` has more parameters: {extra}."
    for result in results:
        if result.peer == "ours":
            settings = ", ".join(f"{name} {value}" for name, value in result.settings.items())
            yield f"- `ours`, {result.size} {result.precision}: {settings}."


if __name__ == "__main__":
    main(sys.argv[1:])
