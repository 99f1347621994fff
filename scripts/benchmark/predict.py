"""What a machine takes for a FLOP, a byte and a parameter of a training step, and how well that predicts other models.

    python scripts/benchmark/predict.py --tokens 25000 --output rates.json
    python scripts/benchmark/hours.py rates.json experiment=base

Trains some models for a few steps each, on the same real sentences, as `transformer train` would with what `auto`
settles on here. From most of them it fits the three rates of `speed` (least squares of the relative
errors, none below 0); for the others it compares what the rates predict with what was measured. The rates hold for
steps of the tokens that were measured.

The models take turns, A B C A B C, and a machine whose speed drifts is the same for all of a round: each round is
scaled to the same mean before the medians are taken.
"""

import argparse
import itertools
import json
import math
import shlex
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from contest import Program, among, fail, machine, positive, row, rule, started
from peers import DROPOUT, Shape, Spec
from speed import Rates, Work, step_work
from train import configure

from transformer.config.jobs import TrainJob
from transformer.config.primitives import from_json, to_json
from transformer.config.settings import ModelConfig, Precision
from transformer.data.prepare import prepare
from transformer.data.store import Store
from transformer.errors import TransformerError
from transformer.records import Resolved

WARMUP = 2  # steps of each model, untimed


class Model(NamedTuple):
    """A model, its number of pieces, and whether the rates are fitted to it."""

    shape: Shape
    pieces: int
    is_fitted: bool = True


MODELS = {
    "2 x 128": Model(Shape(n_layers=2, d_model=128, d_ff=512, n_heads=2), 10_000),
    "6 x 128": Model(Shape(n_layers=6, d_model=128, d_ff=512, n_heads=4), 5_000),
    "2 x 256": Model(Shape(n_layers=2, d_model=256, d_ff=2048, n_heads=4), 5_000),
    "6 x 256": Model(Shape(n_layers=6, d_model=256, d_ff=1024, n_heads=8), 5_000),
    "2 x 512": Model(Shape(n_layers=2, d_model=512, d_ff=2048, n_heads=8), 10_000),
    "4 x 512": Model(Shape(n_layers=4, d_model=512, d_ff=1024, n_heads=8), 5_000),
    "small": Model(Shape(n_layers=3, d_model=256, d_ff=1024, n_heads=4), 10_000, is_fitted=False),
    "base": Model(Shape(n_layers=6, d_model=512, d_ff=2048, n_heads=8), 10_000, is_fitted=False),
    "5 x 384": Model(Shape(n_layers=5, d_model=384, d_ff=1536, n_heads=6), 5_000, is_fitted=False),
    "tiny": Model(Shape(n_layers=1, d_model=32, d_ff=64, n_heads=2), 300),  # to try this script
    "tinier": Model(Shape(n_layers=1, d_model=16, d_ff=32, n_heads=2), 300, is_fitted=False),
}
DEFAULT = [name for name in MODELS if name not in ("tiny", "tinier")]


@dataclass(frozen=True)
class Sample:
    """What a model's step does, and how long it takes."""

    model: str
    precision: Precision
    is_fitted: bool
    resolved: Resolved
    work: Work  # of a step, the mean of those measured
    turns: list[float]  # seconds a step in each round, as measured
    seconds: float  # the median of the rounds, each scaled to the same mean of all models


class Prepared(NamedTuple):
    """A corpus in some number of pieces."""

    job: TrainJob
    vocab_size: int
    store: Store


def main(arguments: list[str]) -> None:
    args = parse(arguments)
    samples: list[Sample] = []
    try:
        with TemporaryDirectory() as folder:
            corpora = prepare_corpora(args, Path(folder))
            for precision in map(Precision.__getitem__, args.precisions):
                samples += measure(args, corpora, precision)
    except TransformerError as error:
        fail(error)

    fitted = [
        fit([sample for sample in samples if sample.precision.name == name], tokens_per_step=args.tokens)
        for name in args.precisions
    ]
    facts = {
        "command": shlex.join(["python", "scripts/benchmark/predict.py", *arguments]),
        **machine(),
        "tokens_per_step": args.tokens,
        "rates": [to_json(rates) for rates in fitted],
    }
    if args.output is not None:
        found = [to_json(sample) for sample in samples]
        args.output.write_text(json.dumps(facts | {"samples": found}, indent=1) + "\n", encoding="utf-8")
    print("\n".join(page(facts, samples, fitted)))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--src", type=Path, help="source sentences (default: $TRANSFORMER_DATA/multi30k/train.en)")
    parser.add_argument("--tgt", type=Path, help="target sentences (default: $TRANSFORMER_DATA/multi30k/train.de)")
    parser.add_argument("--models", type=among(*MODELS), default=",".join(DEFAULT), help="default: %(default)s")
    parser.add_argument("--precisions", type=among("fp32", "bf16"), default="fp32,bf16", help="default: %(default)s")
    parser.add_argument("--tokens", type=positive, default=4_096, help="real tokens of a step, on each side")
    parser.add_argument("--rounds", type=positive, default=3, help="turns of each model (default: %(default)s)")
    parser.add_argument("--steps", type=positive, default=4, help="of a turn (default: %(default)s)")
    parser.add_argument("--threads", type=positive, help="default: one for each core")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="write the rates and every number here, as JSON")
    args = parser.parse_args(arguments)
    if not any(MODELS[name].is_fitted for name in args.models):
        parser.error("--models: none of these is one that the rates are fitted to")
    return args


# ---- measuring ------------------------------------------------------------------------------------------------------


def prepare_corpora(args: argparse.Namespace, folder: Path) -> dict[int, Prepared]:
    """The corpus in every number of pieces that a model wants."""
    args.vocab, args.join = 0, 1
    corpora = {}
    for pieces in sorted({MODELS[name].pieces for name in args.models}):
        args.vocab = pieces
        job = replace(configure(args, folder), run_dir=str(folder / str(pieces)))
        prepared = prepare(job)
        vocab_size = prepared.tokenizers.source.vocab_size
        corpora[pieces] = Prepared(job, vocab_size, prepared.store)
    return corpora


def measure(args: argparse.Namespace, corpora: dict[int, Prepared], precision: Precision) -> list[Sample]:
    """Every model in turns, each on the steps that come next."""
    starts = range(WARMUP, WARMUP + args.rounds * args.steps, args.steps)
    turns = [(0, WARMUP), *((start, start + args.steps) for start in starts)]
    print(f"{precision.name} ...", file=sys.stderr)
    with started([Program("ours", sys.executable, "peers.py") for _ in args.models]) as workers:
        built = [
            worker.ask(asdict(spec_of(MODELS[name], corpora, precision)))
            for name, worker in zip(args.models, workers, strict=True)
        ]
        rounds = [[worker.ask(turn) for worker in workers] for turn in turns]

    # Of each model, the rounds after its warm-up.
    answers = list(zip(*rounds[1:], strict=True))
    seconds = [[answer["seconds"] / len(answer["steps"]) for answer in of_model] for of_model in answers]
    medians = scaled_medians(seconds)
    return [
        Sample(
            model=name,
            precision=precision,
            is_fitted=MODELS[name].is_fitted,
            resolved=(resolved := from_json(Resolved, facts["settings"])),
            work=mean_work(MODELS[name], corpora, resolved, [step for answer in of_model for step in answer["steps"]]),
            turns=turns_of_model,
            seconds=median,
        )
        for name, facts, of_model, turns_of_model, median in zip(
            args.models, built, answers, seconds, medians, strict=True
        )
    ]


def spec_of(model: Model, corpora: dict[int, Prepared], precision: Precision) -> Spec:
    """What a worker builds."""
    job, vocab_size, store = corpora[model.pieces]
    train = replace(job.train, precision=precision)
    return Spec(
        peer="ours",
        shape=model.shape,
        vocab_size=vocab_size,
        longest=max(store.longest),
        precision=precision.name,
        device=train.device.name,
        threads=train.threads or 1,
        batches="",
        job=to_json(replace(job, model=config_of(model), train=train)),
    )


def config_of(model: Model) -> ModelConfig:
    return ModelConfig(**asdict(model.shape), dropout=DROPOUT)


def scaled_medians(seconds: Sequence[Sequence[float]]) -> list[float]:
    """Of each model's rounds, after every round was scaled to the median round's geometric mean over the models."""
    means = [math.exp(statistics.fmean(map(math.log, of_round))) for of_round in zip(*seconds, strict=True)]
    usual = statistics.median(means)
    return [
        statistics.median(usual * value / mean for value, mean in zip(of_model, means, strict=True))
        for of_model in seconds
    ]


def mean_work(model: Model, corpora: dict[int, Prepared], resolved: Resolved, steps: list[dict[str, Any]]) -> Work:
    """The work of a step whose tokens are the mean of these."""
    _, vocab_size, store = corpora[model.pieces]
    return step_work(
        config_of(model),
        vocab_size,
        resolved=resolved,
        source=round(statistics.fmean(step["source_tokens"] for step in steps)),
        target=round(statistics.fmean(step["target_tokens"] for step in steps)),
        mean_length=float(store.lengths[:].mean()),  # which counts EOS
    )


# ---- fitting --------------------------------------------------------------------------------------------------------


def fit(samples: Sequence[Sample], *, tokens_per_step: int) -> Rates:
    """The rates, none below 0, with the least squares of the relative errors over the samples that are fitted."""
    fitted = [sample for sample in samples if sample.is_fitted]
    rows = np.array([[sample.work.flops, sample.work.bytes, sample.work.parameters] for sample in fitted])
    relative = (
        rows / np.array([sample.seconds for sample in fitted])[:, None]
    )  # times the rates: 1 where they are right

    # With three numbers, whichever of them are 0 is found by trying.
    best, least = np.zeros(3), math.inf
    for size in (1, 2, 3):
        for used in itertools.combinations(range(3), size):
            columns = relative[:, used]
            scale = np.abs(columns).max(axis=0)  # a FLOP and a parameter are far apart
            found = np.linalg.lstsq(columns / scale, np.ones(len(fitted)), rcond=None)[0] / scale
            error = float(((columns @ found - 1.0) ** 2).sum())
            if (found >= 0.0).all() and error < least:
                least = error
                best = np.zeros(3)
                best[list(used)] = found

    first = fitted[0]
    return Rates(first.resolved.device, first.precision, tokens_per_step, *map(float, best))


# ---- the page -------------------------------------------------------------------------------------------------------


def page(facts: dict[str, Any], samples: Sequence[Sample], fitted: Sequence[Rates]) -> Iterator[str]:
    """The report, in Markdown."""
    yield f"`{facts['command']}`"
    yield ""
    yield (
        f"{facts['processor']}, {facts['cores']} cores, Python {facts['python']}; up to {facts['tokens_per_step']:,} "
        "real tokens a step on each side. Seconds of a step: the median of the rounds, each scaled to the same mean."
    )
    for rates in fitted:
        yield ""
        yield (
            f"{rates.device.name}, {rates.precision.name}: {per_second(rates.seconds_per_flop)}FLOP/s, "
            f"{per_second(rates.seconds_per_byte)}B/s, {per_second(rates.seconds_per_parameter)}parameters/s."
        )
        yield ""
        yield row(["model", "fitted", "GFLOP", "MB", "million parameters", "predicted, s", "measured, s", "error"])
        yield rule(2, 6)
        for sample in samples:
            if sample.precision is not rates.precision:
                continue
            work = sample.work
            predicted = rates.seconds(work)
            cells = [sample.model, "yes" if sample.is_fitted else "no"]
            cells += [f"{work.flops / 1e9:,.0f}", f"{work.bytes / 1e6:,.0f}", f"{work.parameters / 1e6:.1f}"]
            cells += [f"{predicted:.3f}", f"{sample.seconds:.3f}", f"{predicted / sample.seconds - 1:+.0%}"]
            yield row(cells)


def per_second(seconds: float) -> str:
    """So many a second, in billions; or that they take no time that could be seen."""
    return f"{1e-9 / seconds:,.3g} G" if seconds else "any number of "


if __name__ == "__main__":
    main(sys.argv[1:])
