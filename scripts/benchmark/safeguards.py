"""What a training that nothing goes wrong in pays for its safeguards: in each step, and for each checkpoint.

    python scripts/benchmark/safeguards.py --output out.json

Two trainings take the same steps in turns. One is written as by hand: gradients, the rate, Adam. The other is
`transformer train`'s: the norm of every gradient, skipped updates, spikes, the counts that a checkpoint holds, and the
look at them every 20 steps. Both seed dropout alike, and so end with the same weights, which is checked. Seconds are
those of the processor, on one thread: other work on the machine then counts for little. A ratio is formed of each pair
of neighbouring turns.

Turns differ by more than the safeguards take, so these are measured alone, too: the norm, the test and the counts, over
and over on the gradient of the last step. What they do to a step beyond their own time, such as what is no longer in
a cache after them, shows in the ratio only.

A checkpoint costs wall-clock time, the disk's among it: the search for numbers that are not finite, digests, fsync and
rename. It is spread over the steps between two checkpoints.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from checkpoint import save, seconds_of
from contest import among, machine, positive, ratios, row, rule, spread
from steps import MEAN, make_corpus

from transformer.compute import autocast
from transformer.config.settings import ModelConfig, Precision, TrainConfig
from transformer.data.loader import Position, Step, load_steps
from transformer.data.plan import Batching
from transformer.data.store import Store
from transformer.model.transformer import parameters_by_name
from transformer.seeding import seed_for
from transformer.training.guard import NumbersGuard
from transformer.training.monitor import READ_EVERY
from transformer.training.optimizer import set_rate
from transformer.training.state import TrainState
from transformer.training.step import Computation, Objective, StepResult, train_step

SIZES = {
    "tiny": (ModelConfig(n_layers=1, d_model=32, d_ff=64, n_heads=2), 1_000),  # to try this script
    "small": (ModelConfig(n_layers=3, d_model=256, d_ff=1024, n_heads=4), 10_000),
    "base": (ModelConfig(), 37_000),
}  # and the pieces of the vocabulary
RATE = 1e-4
SEED = 1
LABEL_SMOOTHING = 0.1
CPU = torch.device("cpu")


def main(arguments: list[str]) -> None:
    args = parse(arguments)
    torch.set_num_threads(1)
    results = []
    for size in args.sizes:
        print(f"{size} ...", file=sys.stderr)
        config, vocab_size = SIZES[size]
        results.append({"size": size} | measure(config, vocab_size, args))
    facts = {
        "command": shlex.join(["python", "scripts/benchmark/safeguards.py", *arguments]),
        **machine(),
        "torch": torch.__version__,
        "tokens_per_step": args.tokens,
        "steps_between_checkpoints": args.save_every,
        "results": results,
    }
    if args.output is not None:
        args.output.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print("\n".join(page(facts)))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=among(*SIZES), default="small,base", help="default: %(default)s")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="default: %(default)s")
    parser.add_argument("--tokens", type=positive, default=2_048, help="real tokens of a step, on each side")
    parser.add_argument("--rounds", type=positive, default=6, help="turns of each, of 20 steps (default: %(default)s)")
    parser.add_argument("--save-every", type=positive, default=1_500, help="steps between two checkpoints")
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: that of temporary files)")
    parser.add_argument("--output", type=Path, help="write every number here, as JSON")
    return parser.parse_args(arguments)


# ---- measuring ------------------------------------------------------------------------------------------------------


class ByHand:
    """What one writes: gradients of the mean loss, the rate, Adam."""

    def __init__(self, config: ModelConfig, vocab_size: int, precision: Precision) -> None:
        self.precision = precision
        self.state = TrainState.at_start(
            config, TrainConfig(), vocab_size=vocab_size, device=CPU, precision=precision, source=None
        )
        self.objective = Objective(self.state.model, LABEL_SMOOTHING).train()

    def take(self, step: Step) -> None:
        """One update."""
        [(m, batch)] = step.micro_batches
        optimizer = self.state.optimizer
        optimizer.zero_grad(set_to_none=True)
        torch.manual_seed(seed_for(SEED, *step.seeds, m))

        with autocast(CPU, self.precision):
            loss, _ = self.objective(batch)
        (loss * (1 / step.target_tokens)).backward()
        set_rate(optimizer, RATE)
        optimizer.step()

    def end_turn(self) -> None:
        """Nothing is looked at."""


class AsTrained(ByHand):
    """The same by `train_step`, with what the loop does beside it but for the log."""

    def __init__(self, config: ModelConfig, vocab_size: int, precision: Precision) -> None:
        super().__init__(config, vocab_size, precision)
        self.guard = NumbersGuard(self.state.progress)
        self.computation = Computation(
            self.objective, self.state.optimizer, self.state.scaler, None, device=CPU, precision=precision
        )

    def take(self, step: Step) -> None:
        """One update, checked and counted."""
        result = train_step(self.computation, step, world_size=1, rate=RATE, seed=SEED)
        self.count(step, result)

    def safeguards(self, step: Step) -> None:
        """What `train_step` and the loop do beside ByHand, without the step itself, on the gradient that is there."""
        gradients = [weight.grad for weight in self.objective.parameters() if weight.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients).double()
        is_finite = torch.isfinite(norm)
        self.state.optimizer.found_inf = (~is_finite).float()  # type: ignore[attr-defined]
        del self.state.optimizer.found_inf  # type: ignore[attr-defined]

        loss = torch.zeros(2, dtype=torch.float64)
        loss += torch.stack((norm, norm))
        self.count(step, StepResult(loss_sum=loss[0], nll_sum=loss[1], grad_norm=norm, applied=is_finite))

    def count(self, step: Step, result: StepResult) -> None:
        """What a checkpoint and the log hold of a step."""
        self.state.progress.advance(
            epoch=step.epoch,
            chapter=step.chapter,
            step_in_chapter=step.index + 1,
            sentences=step.sentences,
            target_tokens=step.target_tokens,
        )
        self.state.norms.add(result.grad_norm)
        self.state.window.add(step, result, waited=0.0, flops=0.0)

    def end_turn(self) -> None:
        """What the loop does every 20 steps."""
        self.state.read_device()
        self.guard.check(self.state.progress, loss_scale=self.state.loss_scale)


def measure(config: ModelConfig, vocab_size: int, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds a step of each in every round, and of a checkpoint."""
    taken = steps_of(make_corpus(2 * MEAN * args.tokens, vocab_size), args.tokens)
    by_hand = ByHand(config, vocab_size, Precision[args.precision])
    as_trained = AsTrained(config, vocab_size, Precision[args.precision])

    turns: dict[str, list[float]] = {"by hand": [], "as trained": []}
    for number in range(1 + args.rounds):
        steps = [next(taken) for _ in range(READ_EVERY)]
        pair = [("by hand", by_hand), ("as trained", as_trained)]
        for name, training in pair if number % 2 else reversed(pair):
            began = time.process_time()
            for step in steps:
                training.take(step)
            training.end_turn()
            turns[name].append((time.process_time() - began) / READ_EVERY)

    weights = parameters_by_name(as_trained.state.model)
    for name, weight in parameters_by_name(by_hand.state.model).items():
        if not torch.equal(weight, weights[name]):
            raise AssertionError(f"{name}: the two trainings differ")
    return {
        "precision": args.precision,
        "seconds_a_step": {name: seconds[1:] for name, seconds in turns.items()},  # the first turn warms up
        "seconds_of_safeguards": safeguards_alone(as_trained, steps[-1], args.rounds),
        "seconds_a_checkpoint": checkpoints(as_trained.state, config, vocab_size, args),
    }


def safeguards_alone(training: AsTrained, step: Step, rounds: int) -> list[float]:
    """Seconds of the processor that the safeguards of one step take, the mean of READ_EVERY of them, in each round."""
    seconds = []
    for _ in range(1 + rounds):
        began = time.process_time()
        for _ in range(READ_EVERY):
            training.safeguards(step)
        training.end_turn()
        seconds.append((time.process_time() - began) / READ_EVERY)
    return seconds[1:]


def steps_of(store: Store, tokens: int) -> Iterator[Step]:
    """Steps of one micro-batch, made when they are asked for."""
    batching = Batching(
        mixture=((len(store), 1.0),),
        seed=SEED,
        tokens_per_step=tokens,
        max_tokens=2 * tokens,
        micro_batch_multiple=1,
        capacities=None,
    )
    return load_steps(lambda epoch: store, batching, rank=0, world_size=1, position=Position(0, 0, 0), prefetch=0)


def checkpoints(state: TrainState, config: ModelConfig, vocab_size: int, args: argparse.Namespace) -> list[float]:
    """Seconds for which a training stands still while it saves, by the wall; the first is not counted."""
    with TemporaryDirectory(dir=args.folder) as folder:
        work = [
            partial(save, state, config, vocab_size, folder=Path(folder), step=number + 1)
            for number in range(1 + args.rounds)
        ]
        return [seconds_of(one) for one in work][1:]


def page(facts: dict[str, Any]) -> Iterator[str]:
    """The report, in Markdown."""
    every = facts["steps_between_checkpoints"]
    yield f"`{facts['command']}`"
    yield ""
    yield f"{facts['processor']}, one thread, Python {facts['python']}, torch {facts['torch']}."
    yield ""
    yield (
        f"Steps of {facts['tokens_per_step']:,} tokens; seconds of the processor. `as trained` over `by hand`: median "
        f"and range of neighbouring turns. Safeguards: their own time in a step, measured alone. A checkpoint, by the "
        f"wall, is spread over {every:,} steps."
    )
    yield ""
    heads = ["size", "precision", "as trained / by hand", "range", "s a step", "safeguards, ms a step", "range"]
    yield row([*heads, "their share", "s a checkpoint", "range", "its share"])
    yield rule(2, 9)
    for result in facts["results"]:
        seconds = result["seconds_a_step"]
        step = statistics.median(seconds["as trained"])
        pause = statistics.median(result["seconds_a_checkpoint"])
        cells = [result["size"], result["precision"]]
        cells += [*spread(ratios(seconds["as trained"], seconds["by hand"]), ".3f"), f"{step:.3f}"]
        milliseconds = [1000 * alone for alone in result["seconds_of_safeguards"]]
        cells += [*spread(milliseconds, ".1f"), f"{statistics.median(milliseconds) / (1000 * step):.2%}"]
        cells += [*spread(result["seconds_a_checkpoint"], ".2f"), f"{pause / (every * step):.2%}"]
        yield row(cells)


if __name__ == "__main__":
    main(sys.argv[1:])
