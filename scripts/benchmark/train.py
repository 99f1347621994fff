"""Training speed beside what one would else use: real target tokens a second on the same batches of real sentences.

    python scripts/benchmark/train.py --src train.en --tgt train.de --peers-python peers/bin/python --output out.json

Contenders: `ours` is the step of this package as `transformer train` takes it, with what `auto` settles on this
machine; `plain` is a torch.nn.Transformer loop as a good engineer would write it; `plain_compiled` the same under
torch.compile, which needs a C++ compiler; `marian` is Hugging Face's MarianMTModel in the same loop, which lives in an
environment of its own, and is left out without --peers-python:

    python -m venv peers && peers/bin/pip install torch==2.13.0 && peers/bin/pip install transformers

(our torch, installed first and alone, so that no other package brings another build).

How it measures: each contender is a process of its own with the same number of threads. They take turns, A B C A B C,
and wait in between, so that whatever else happens on the machine hits all alike; ratios are formed within a round. All
train on the same sentences in the same steps. With --shapes new, every turn takes batches not seen before: new shapes
are part of the cost, for everybody, as in a real training; with --shapes warm, every turn takes the same batches again.
A step of the peers is one padded batch, made before the clock starts; `ours` loads its own while the clock runs.

Everybody begins with the same weights, so that the losses show whether all train the same thing: one recipe, but
dropout masks of their own (and torch smooths over all V classes, we over the V - 1 wrong ones, which is 1e-4 at 10,000
pieces). --vocab 37000 is the paper's vocabulary.
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
import torch
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
from initial import save_weights
from peers import DROPOUT, EOS, PAD, PEAK_RATE, SMOOTHING, WARMUP_STEPS, Ids, Shape, Spec

from transformer.compute import has_compiler, resolve_device
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
from transformer.data.plan import plan_chapter
from transformer.data.prepare import prepare
from transformer.data.store import Store
from transformer.errors import InputError, TransformerError
from transformer.machine import resolve_threads
from transformer.model.transformer import Transformer

LOSS_AT = 20  # updates after which the losses are compared


MUST_AGREE = 0.02  # of the loss then


PEERS = "ours,plain,plain_compiled,marian"
IN_PEERS_PYTHON = ("marian",)


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
    "plain_compiled": (
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
    shapes: str  # new, warm
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
    def warm_up_seconds(self) -> float:
        """Of the first turn, which is not counted: whatever is compiled is compiled then."""
        return float(self.turns[0]["seconds"])

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Every step taken, in order."""
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
        "corpus": ["/".join(path.parts[-2:]) for path in corpus_files(args)],
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
    parser.add_argument("--shapes", choices=["new", "warm", "both"], default="both", help="default: %(default)s")
    parser.add_argument("--peers", type=among(*EXTRA), default=PEERS, help="default: %(default)s")
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
        args.peers = [peer for peer in args.peers if peer not in IN_PEERS_PYTHON]
    if "plain_compiled" in args.peers and not has_compiler(resolve_device(Device[args.device])):
        print("plain_compiled is left out: torch.compile finds no C++ compiler here", file=sys.stderr)
        args.peers.remove("plain_compiled")
    if not args.peers:
        parser.error(f"{' and '.join(IN_PEERS_PYTHON)} need --peers-python")
    return args


def measure(args: argparse.Namespace, job: TrainJob) -> tuple[int, list[Result]]:
    """The size of the vocabulary, and every contender in every setting, one setting after the other."""
    settings = list(product(args.sizes, args.precisions, ["new", "warm"] if args.shapes == "both" else [args.shapes]))
    turns = {size: {shapes: cut_turns(args, size, shapes) for _, _, shapes in settings} for size in args.sizes}
    batches = Path(job.run_dir).with_name("batches.npz")
    last = max(stop for kinds in turns.values() for kind in kinds.values() for _, stop in kind)
    vocab_size, longest = write_batches(job, last, batches)

    results: list[Result] = []
    for size, precision, shapes in settings:
        print(f"{size} {precision}, {shapes} shapes ...", file=sys.stderr)
        shape = SIZES[size].shape
        model = ModelConfig(**asdict(shape), dropout=DROPOUT)
        spec = Spec(
            peer="",
            shape=shape,
            vocab_size=vocab_size,
            longest=longest,
            precision=precision,
            device=job.train.device.name,
            threads=job.train.threads or 1,
            batches=str(batches),
            job=to_json(replace(job, model=model, train=replace(job.train, precision=Precision[precision]))),
            weights=str(batches.with_name(f"{size}.npz")),
        )
        torch.manual_seed(1)
        save_weights(Transformer(model, vocab_size), Path(spec.weights))
        programs = [
            Program(peer, args.peers_python if peer in IN_PEERS_PYTHON else sys.executable, "peers.py")
            for peer in args.peers
        ]
        with started(programs) as workers:
            found = race(workers, spec, turns[size][shapes])
        results += [Result(size, precision, shapes, **result) for result in found]
        agree(results[-len(workers) :], shape)
    return vocab_size, results


def cut_turns(args: argparse.Namespace, size: str, shapes: str) -> list[tuple[int, int]]:
    """The steps of each turn, the warm-up first, from one number to before another: the same ones, or always new."""
    steps = args.steps or SIZES[size].steps
    if shapes == "warm":
        return [(0, steps)] * (1 + args.rounds)
    starts = range(args.warmup, args.warmup + args.rounds * steps, steps)
    return [(0, args.warmup), *((start, start + steps) for start in starts)]


def corpus_files(args: argparse.Namespace) -> list[Path]:
    """Source and target."""
    return [corpus_file(args.src, "train.en"), corpus_file(args.tgt, "train.de")]


def configure(args: argparse.Namespace, folder: Path) -> TrainJob:
    """What `ours` trains with; whatever is not set here stays as `transformer train` has it."""
    pair = PairConfig(*map(str, corpus_files(args)))
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
        plan_chapter,
        store.lengths,
        mixture=prepared.mixture,
        seed=job.train.seed,
        chapter=0,
        tokens_per_step=job.train.tokens_per_step,
    )
    epochs = (plan(epoch=epoch) for epoch in count())
    save_batches(store, islice(chain.from_iterable(epochs), steps), path)
    return prepared.tokenizers.source.vocab_size, max(store.longest)


def save_batches(store: Store, steps: Iterable[Ids], path: Path) -> None:
    """The sentences of each step as padded ids, in the form that peers.py reads."""

    def padded(ids: Ids, side: int) -> Ids:
        pieces, counts = store.gather(ids, side)
        matrix = np.full((len(ids), int(counts.max()) + 1), PAD)
        places = np.arange(matrix.shape[1])
        matrix[places < counts[:, None]] = pieces
        matrix[places == counts[:, None]] = EOS
        return matrix

    arrays: dict[str, Any] = {}
    for index, ids in enumerate(steps):
        arrays |= {f"source/{index}": padded(ids, 0), f"target/{index}": padded(ids, 1)}
    np.savez(path, **arrays)


def race(workers: list[Worker], spec: Spec, turns: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Build one after the other, then take turns of these steps each."""
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
        "the ratio is formed within each round, then its median and range. New shapes: every turn takes batches not "
        "seen before; warm: the same ones again. The first turn is the warm-up, and not counted. "
        f"Loss: smoothed by {SMOOTHING}, mean of a target token, from the same initial weights. Adam, rate {PEAK_RATE} "
        f"after {WARMUP_STEPS} steps of linear warm-up; dropout {DROPOUT} on embeddings and sub-layers."
    )
    yield ""
    columns = ["size", "precision", "shapes", "contender", "ours / this", "range", "tokens/s", "range", "warm-up, s"]
    columns += ["loss at first", f"after {updates} steps", "parameters"]
    yield row(columns)
    yield rule(4, 8)
    warnings = []
    for result in results:
        setting = (result.size, result.precision, result.shapes)
        rivals = [other for other in results if (other.size, other.precision, other.shapes) == setting]
        beside = [
            ratio
            for other in rivals
            if other.peer == "ours" and other is not result
            for ratio in ratios(other.speeds, result.speeds)
        ]
        cells = [*setting, result.peer, *spread(beside, ".2f"), *spread(result.speeds, ",.0f")]
        cells.append(f"{result.warm_up_seconds:.1f}")
        cells += [f"{result.steps[index]['loss']:.3f}" for index in (0, updates)]
        yield row([*cells, f"{result.parameters:,}"])

        off = result.steps[updates]["loss"] / rivals[0].steps[updates]["loss"] - 1
        if abs(off) > MUST_AGREE:
            warnings.append(
                f"**{', '.join(setting)}: after {updates} steps the loss of `{result.peer}` is {off:+.1%} off that of "
                f"`{rivals[0].peer}`: they do not learn alike, and their speeds cannot be compared.**"
            )
    yield ""
    yield from warnings
    for peer, (_, extra) in EXTRA.items():
        if extra and any(result.peer == peer for result in results):
            yield f"- `{peer}` has more parameters: {extra}."
    for result in results:
        if result.peer == "ours":
            settings = ", ".join(f"{name} {value}" for name, value in result.settings.items())
            yield f"- `ours`, {result.size} {result.precision}, {result.shapes} shapes: {settings}."


if __name__ == "__main__":
    main(sys.argv[1:])
