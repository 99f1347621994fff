"""What it costs to start and to resume a training on a corpus of any size: seconds and memory up to the first batch.

    python scripts/benchmark/chapters.py --pairs 100000000 --folder scratch

The store is made up, and lies in files as a prepared one does: pairs as long as those of WMT (`steps.py`), whose pieces
repeat. It is made once, in a folder that must have room for about 125 bytes a pair, and stays there. With `--hollow`,
the disk gives back what the pieces took, which then read as zeros, and 16 bytes a pair are enough. Then, each in a
process of its own:

- `start` and `resume`: open the store and take the first step of load_steps, at the start of the first epoch, and in
  the middle of a chapter in its middle. Memory is RssAnon of /proc, read every few milliseconds: what the mapped files
  have in the page cache is not in it;
- `count`: plan every chapter of an epoch, and count how often each pair is there.
"""

import argparse
import json
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from contest import machine, positive, row, rule
from steps import LONGEST, MEAN, SPREAD, UNLIKENESS

from transformer.data.loader import Position, load_steps
from transformer.data.plan import Batching, packed_capacities
from transformer.data.store import SIDES, Ids, Sentences, Store, StoreWriter

VOCAB = 37_000
BLOCK = 1 << 18  # pairs that are made at a time
HOLLOW_EVERY = 32  # blocks
TOKENS = 25_000  # of a step, on each side


def main(arguments: list[str]) -> None:
    args = parse(arguments)
    if args.stage is not None:
        json.dump(STAGES[args.stage](args.folder), sys.stdout)
        return

    if not args.folder.exists():
        make(args.folder, args.pairs, is_hollow=args.hollow)
    facts = {name: in_a_process(name, args.folder) for name in STAGES}
    print("\n".join(page(shlex.join(["python", "scripts/benchmark/chapters.py", *arguments]), facts)))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=positive, default=100_000_000, help="sentence pairs (default: %(default)s)")
    parser.add_argument("--folder", type=Path, required=True, help="where the store is, or will be made")
    parser.add_argument("--hollow", action="store_true", help="keep the lengths of the sentences, not their pieces")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def in_a_process(name: str, folder: Path) -> dict[str, Any]:
    """What a stage finds in a process of its own."""
    command = [sys.executable, __file__, "--folder", str(folder), "--stage", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: {shlex.join(command)} ended with status {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# ---- the store ------------------------------------------------------------------------------------------------------


def make(folder: Path, pairs: int, *, is_hollow: bool) -> None:
    """Write the store."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(1)
    some_pieces = (3 + (VOCAB - 4) ** draw.random(MEAN * BLOCK)).astype(np.uint16)
    with closing(StoreWriter(folder, VOCAB)) as writer:
        for start in range(0, pairs, BLOCK):
            source, target = (
                Sentences(np.resize(some_pieces, int(counts.sum())), counts)
                for counts in counts_of(draw, min(BLOCK, pairs - start))
            )
            writer.add(source, target)
            if is_hollow and start // BLOCK % HOLLOW_EVERY == 0:
                hollow(folder)
        writer.finish({})


def hollow(folder: Path) -> None:
    """Give back the blocks of the pieces; the size of the files stays."""
    for path in (folder / f"{side}.ids" for side in SIDES):
        size = str(path.stat().st_size)
        subprocess.run(["fallocate", "--punch-hole", "--offset", "0", "--length", size, str(path)], check=True)


def counts_of(draw: np.random.Generator, pairs: int) -> list[Ids]:
    """The pieces of so many pairs, source and target."""
    log_length = np.log(MEAN - 1) - SPREAD**2 / 2 + SPREAD * draw.standard_normal(pairs)
    own = (log_length + UNLIKENESS * draw.standard_normal(pairs) - UNLIKENESS**2 / 2 for _ in SIDES)
    return [np.clip(np.rint(np.exp(side)), 1, LONGEST - 1).astype(np.int64) for side in own]


# ---- what is measured -----------------------------------------------------------------------------------------------


def start(folder: Path) -> dict[str, Any]:
    """The first step of an epoch."""
    return first_step(folder, in_the_middle=False)


def resume(folder: Path) -> dict[str, Any]:
    """A step in the middle of a chapter."""
    return first_step(folder, in_the_middle=True)


def first_step(folder: Path, *, in_the_middle: bool) -> dict[str, Any]:
    """Seconds and memory of opening the store, and of everything between that and a batch."""
    before = rss_anon()
    began = Clock.read()
    store = Store.open(folder)
    opened = Clock.read()
    with peak_memory() as peak:
        batching = batching_of(store)
        position = Position(0, 0, 0)
        if in_the_middle:
            tokens = int(store.lengths.totals.max())
            position = Position(0, batching.n_chapters // 2, tokens // TOKENS // batching.n_chapters // 2)
        steps = load_steps(lambda epoch: store, batching, rank=0, world_size=1, position=position, prefetch=0)
        step = next(steps)
        ended = Clock.read()
    assert (step.chapter, step.index) == (position.chapter, position.step)
    return {
        "place": f"chapter {step.chapter + 1} of {batching.n_chapters}, step {step.index + 1:,}",
        "opening": opened.since(began),
        "batch": ended.since(opened),
        "before": before,
        "peak": max(peak),
        "after": rss_anon(),
    }


def batching_of(store: Store) -> Batching:
    """Packed batches, whose capacities follow from the lengths of all pairs."""
    return Batching(
        mixture=((len(store), 1.0),),
        seed=1,
        tokens_per_step=TOKENS,
        max_tokens=TOKENS,
        micro_batch_multiple=1,
        capacities=packed_capacities(store.lengths, tokens_per_step=TOKENS, max_tokens=TOKENS, micro_batch_multiple=1),
    )


def count(folder: Path) -> dict[str, Any]:
    """Whether each pair is in an epoch exactly once."""
    store = Store.open(folder, is_verified=True)
    batching = batching_of(store)
    counts = np.zeros(len(store), np.uint8)
    sizes = []
    began = Clock.read()
    for chapter in range(batching.n_chapters):
        pairs = np.concatenate(batching.plan(store.lengths, epoch=0, chapter=chapter))
        np.add.at(counts, pairs, 1)
        sizes.append(len(pairs))
    return {
        "pairs": len(store),
        "once": int((counts == 1).sum()),
        "chapters": batching.n_chapters,
        "largest": max(sizes),
        "seconds": Clock.read().since(began),
    }


class Clock(NamedTuple):
    """A moment."""

    wall: float
    cpu: float  # of this process

    @classmethod
    def read(cls) -> "Clock":
        return cls(time.perf_counter(), time.process_time())

    def since(self, before: "Clock") -> str:
        """Seconds by the wall, and of the processor: the second number says what a busy machine did to the first."""
        return f"{self.wall - before.wall:.2f} ({self.cpu - before.cpu:.2f})"


def rss_anon() -> int:
    """Bytes of anonymous memory that this process has."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """The anonymous memory of the process while the context lasts, in bytes, every few milliseconds."""
    found = [rss_anon()]
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.005):
            found.append(rss_anon())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()


STAGES = {"start": start, "resume": resume, "count": count}


# ---- the page -------------------------------------------------------------------------------------------------------


def page(command: str, facts: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The report, in Markdown."""
    counted = facts["count"]
    host = machine()
    yield f"`{command}`"
    yield ""
    yield (
        f"{host['processor']}, {host['cores']} cores, Python {host['python']}, NumPy {np.__version__}. "
        f"{counted['pairs']:,} pairs in {counted['chapters']} chapters of {counted['largest']:,} at most."
    )
    yield ""
    yield row(["", "first batch", "opening", "from there to the batch", "RssAnon before, MB", "peak", "after"])
    yield rule(2, 5)
    for name in ("start", "resume"):
        found = facts[name]
        megabytes = [f"{found[key] / 1e6:,.0f}" for key in ("before", "peak", "after")]
        yield row([name, found["place"], found["opening"], found["batch"], *megabytes])
    yield ""
    yield (
        "Seconds are those of the wall, and in brackets those of the processor. All chapters of an epoch, planned one "
        f"after the other and counted, took {counted['seconds']} s: "
        f"{counted['once']:,} of {counted['pairs']:,} pairs are in it exactly once."
    )


if __name__ == "__main__":
    main(sys.argv[1:])
