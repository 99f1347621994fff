"""How fast batches are made, and how much of them is padding, beside a plain torch DataLoader.

    python scripts/benchmark/loader.py --output out.json

The store is made up (`steps.py`): pairs with 27 tokens a side on average, as WMT's have in 37,000 pieces, and 4.5
million of them as WMT has. All run in one thread, without working ahead, so that the speed is that of one core.

Contenders: `packed` and `padded` are the package's loader, as a training would have it that asks for this layout;
`packed, in groups` is the same as a CPU has it, where attention needs the sentences cut into groups; `DataLoader` is
torch's with a batch sampler that shuffles, sorts by length inside pools of 100 batches, and pads: what one writes by
hand. Each makes batches of so many seconds, in turns; ratios are formed within a round. Planning an epoch comes before
the clock, for everybody, and is reported apart.

Speed is batches a second of 25,000 + 25,000 real tokens: real tokens over 50,000, so that no contender gains by smaller
batches. Padding is the share of all positions, of both sides, that hold no token.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from contest import machine, positive, ratios, row, rule, spread
from peers import EOS, PAD, Ids
from steps import MEAN, make_corpus
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from transformer.config.settings import AttentionKernel
from transformer.data.loader import Position, load_steps
from transformer.data.plan import Batching, packed_capacities
from transformer.data.store import Store

VOCAB = 37_000
PAIRS = 4_500_000  # of WMT 2014, English and German
BLOCK = 100_000  # pairs that are copied at a time
POOL = 100  # batches of the DataLoader that are sorted together


class Made(NamedTuple):
    """One batch or step, made."""

    tokens: int  # real ones, of both sides
    slots: int  # positions of both sides


class Contender(NamedTuple):
    """A way to make batches."""

    name: str
    max_tokens: int  # of a micro-batch, on each side, padding counted
    start: Callable[[], Iterator[Made]]  # plans the epoch


@dataclass
class Result:
    """What a contender did."""

    name: str
    max_tokens: int
    planning_seconds: float
    speeds: list[float] = field(default_factory=list)  # batches a second of each round
    tokens: int = 0
    slots: int = 0

    @property
    def padding(self) -> float:
        """The share of positions without a token."""
        return 1 - self.tokens / self.slots


def main(arguments: list[str]) -> None:
    args = parse(arguments)
    torch.set_num_threads(1)
    store = make_corpus(MEAN * args.pairs, VOCAB)
    results = measure(contenders(store, args), args)
    facts = {
        "command": shlex.join(["python", "scripts/benchmark/loader.py", *arguments]),
        **machine(),
        "torch": torch.__version__,
        "pairs": len(store),
        "tokens_per_step": args.tokens,
    }
    if args.output is not None:
        found = [asdict(result) | {"padding": result.padding} for result in results]
        args.output.write_text(json.dumps(facts | {"results": found}, indent=1) + "\n", encoding="utf-8")
    print("\n".join(page(facts, results)))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=positive, default=PAIRS, help="sentence pairs (default: %(default)s)")
    parser.add_argument("--tokens", type=positive, default=25_000, help="real tokens of a step, on each side")
    parser.add_argument("--micro", type=positive, default=4_000, help="tokens of a small micro-batch, padding counted")
    parser.add_argument("--rounds", type=positive, default=5, help="turns of each contender (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="write every number here, as JSON")
    return parser.parse_args(arguments)


def contenders(store: Store, args: argparse.Namespace) -> list[Contender]:
    """All of them, with one micro-batch a step, and with small ones."""
    found = []
    for max_tokens in (args.tokens + args.tokens // 4, args.micro):  # a step of padded sentences in one piece, and not
        for name, packed, kernel in (
            ("packed", True, AttentionKernel.varlen),
            ("packed, in groups", True, None),
            ("padded", False, None),
        ):
            make = partial(ours, store, args.tokens, max_tokens, packed=packed, kernel=kernel)
            found.append(Contender(name, max_tokens, make))
        found.append(Contender("DataLoader", max_tokens, partial(plain, store, max_tokens)))
    return found


def measure(contenders: list[Contender], args: argparse.Namespace) -> list[Result]:
    """Plan one after the other, then take turns of so many seconds."""
    streams, results = [], []
    for contender in contenders:
        began = time.perf_counter()
        stream = contender.start()
        next(stream)
        results.append(Result(contender.name, contender.max_tokens, time.perf_counter() - began))
        streams.append(stream)

    for _ in range(args.rounds):
        for stream, result in zip(streams, results, strict=True):
            taken: list[Made] = []
            began = time.perf_counter()
            while (seconds := time.perf_counter() - began) < args.seconds:
                taken.append(next(stream))
            tokens = sum(made.tokens for made in taken)
            result.speeds.append(tokens / (2 * args.tokens) / seconds)
            result.tokens += tokens
            result.slots += sum(made.slots for made in taken)
    return results


def ours(store: Store, tokens: int, max_tokens: int, *, packed: bool, kernel: AttentionKernel | None) -> Iterator[Made]:
    """The package's steps."""
    mixture = ((len(store), 1.0),)
    capacities = packed_capacities(store.lengths, tokens_per_step=tokens, max_tokens=max_tokens, micro_batch_multiple=1)
    batching = Batching(
        mixture=mixture,
        seed=1,
        tokens_per_step=tokens,
        max_tokens=max_tokens,
        micro_batch_multiple=1,
        capacities=capacities if packed else None,
        kernel=kernel,
    )
    steps = load_steps(lambda epoch: store, batching, rank=0, world_size=1, position=Position(0, 0, 0), prefetch=0)
    for step in steps:
        yield Made(step.source_tokens + step.target_tokens, step.slots)


# ---- what one writes by hand ----------------------------------------------------------------------------------------


class Pairs(Dataset[tuple[Ids, Ids]]):
    """The sentences of a store, one pair at a time: pieces and EOS, cut out of an array as one would map it."""

    def __init__(self, store: Store) -> None:
        blocks = np.array_split(np.arange(len(store)), 1 + len(store) // BLOCK)
        self._pieces = [
            np.concatenate([store.gather(block, side).pieces.astype(np.uint16) for block in blocks]) for side in (0, 1)
        ]
        self._ends = [(store.lengths[:][:, side] - 1).cumsum(dtype=np.int64).tolist() for side in (0, 1)]

    def __getitem__(self, index: int) -> tuple[Ids, Ids]:
        source, target = (self._one(index, side) for side in (0, 1))
        return source, target

    def _one(self, index: int, side: int) -> Ids:
        ends = self._ends[side]
        start = ends[index - 1] if index else 0
        sentence = np.full(ends[index] - start + 1, EOS)
        sentence[:-1] = self._pieces[side][start : ends[index]]
        return sentence


def sampler(store: Store, max_tokens: int) -> list[list[int]]:
    """An epoch of batches of like length: as many sentences as fit when the longest decides."""
    draw = np.random.default_rng(1)
    longer = store.lengths[:].max(axis=1)
    order = draw.permutation(len(longer))
    pool = POOL * max_tokens // int(longer.mean())

    batches: list[list[int]] = []
    for start in range(0, len(order), pool):
        part = order[start : start + pool]
        part = part[np.argsort(longer[part], kind="stable")]
        batch: list[int] = []
        for index, length in zip(part.tolist(), longer[part].tolist(), strict=True):
            if batch and (len(batch) + 1) * length > max_tokens:  # the last is the longest so far
                batches.append(batch)
                batch = []
            batch.append(index)
        batches.append(batch)
    return [batches[index] for index in draw.permutation(len(batches))]


def collate(pairs: list[tuple[Ids, Ids]]) -> tuple[Tensor, Tensor]:
    """Both sides padded."""
    source, target = (
        torch.nn.utils.rnn.pad_sequence(
            [torch.from_numpy(pair[side]) for pair in pairs], batch_first=True, padding_value=PAD
        )
        for side in (0, 1)
    )
    return source, target


def plain(store: Store, max_tokens: int) -> Iterator[Made]:
    """torch's DataLoader, in this process."""
    batches = sampler(store, max_tokens)
    loader: DataLoader[Any] = DataLoader(Pairs(store), batch_sampler=batches, collate_fn=collate)
    while True:
        for sides in loader:
            yield Made(sum(int(side.count_nonzero()) for side in sides), sum(side.numel() for side in sides))


# ---- the page -------------------------------------------------------------------------------------------------------


def page(facts: dict[str, Any], results: list[Result]) -> Iterator[str]:
    """The report, in Markdown."""
    yield f"`{facts['command']}`"
    yield ""
    yield (
        f"{facts['processor']}, one core, Python {facts['python']}, torch {facts['torch']}; {facts['pairs']:,} pairs, "
        f"a step of up to {facts['tokens_per_step']:,} real tokens on each side."
    )
    yield ""
    yield (
        f"Batches of {facts['tokens_per_step']:,} + {facts['tokens_per_step']:,} real tokens a second, the median of "
        "the turns and their range; the ratio to the DataLoader's is formed within each round."
    )
    yield ""
    columns = ["tokens of a micro-batch", "contender", "this / DataLoader", "range", "batches/s", "range", "padding"]
    yield row([*columns, "planning an epoch, s"])
    yield rule(2, 6)
    for result in results:
        [rival] = [r for r in results if (r.name, r.max_tokens) == ("DataLoader", result.max_tokens)]
        beside = [] if rival is result else ratios(result.speeds, rival.speeds)
        cells = [f"{result.max_tokens:,}", result.name, *spread(beside, ".2f"), *spread(result.speeds, ",.0f")]
        yield row([*cells, f"{result.padding:.1%}", f"{result.planning_seconds:.2f}"])


if __name__ == "__main__":
    main(sys.argv[1:])
