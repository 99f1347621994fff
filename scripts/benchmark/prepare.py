"""What preparing a corpus costs, beside SentencePiece alone doing the same, and what planning an epoch of it costs.

    python scripts/benchmark/prepare.py --pairs 1000000 > prepare.json

It makes a corpus as long and as varied as WMT's English and German (`synthetic.py`). Then, one after the other, each in
a process of its own:

- `ours`: `transformer prepare` of the base model on two threads;
- `yardstick`: a plain program that trains the same SentencePiece model on as many lines, encodes every line on two
  threads, and reads and writes files in the plainest way. It checks nothing and filters nothing;
- `plan`: plan_chapter on what `ours` prepared, and the first step of load_steps at three places of an epoch: to resume
  must cost the same anywhere.

The JSON object on standard output holds wall and CPU seconds and the peak memory of each process; the line on standard
error says whether `ours` keeps what it promises: at least 0.90 of the yardstick's speed, in less than 2 GiB.
"""

import argparse
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from itertools import chain, islice
from pathlib import Path
from subprocess import PIPE, Popen
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import sentencepiece
from synthetic import BLOCK, SIDES, Generator

THREADS = 2
SAMPLE = 1_000_000  # lines that the pieces are trained on


def main(arguments: list[str]) -> None:
    args = parse(arguments)
    if args.stage is not None:
        json.dump(STAGES[args.stage](args), sys.stdout)
        return
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) if args.keep is None else args.keep.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            sys.exit(f"error: {folder}: not empty: --keep makes a folder")
        facts = measure(args, folder)
    command = shlex.join(["python", "scripts/benchmark/prepare.py", *arguments])
    print(json.dumps({"command": command} | facts, indent=1))
    print(
        f"ours has {facts['speed']:.2f} of the yardstick's speed (at least 0.90 is wanted), "
        f"{facts['cpu_speed']:.2f} by CPU time, and {facts['ours']['peak_gib']:.2f} GiB at its peak (less than 2)",
        file=sys.stderr,
    )


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=1_000_000, help="sentence pairs (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=37_000, help="pieces (default: %(default)s)")
    parser.add_argument("--keep", type=Path, help="leave all files in this folder, which must be new or empty")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Every stage in a process of its own, one after the other."""
    sizes = ["--pairs", str(args.pairs), "--vocab-size", str(args.vocab_size), "--keep", str(folder)]

    def stage(name: str) -> dict[str, Any]:
        output, used = run([sys.executable, __file__, *sizes, "--stage", name])
        return used | json.loads(output)

    overrides = {
        "experiment": "base",
        "run_dir": folder / "run",
        "data.store_dir": folder / "store",
        **{f"data.{name}.src": folder / f"{name}.en" for name in ("train", "dev")},
        **{f"data.{name}.tgt": folder / f"{name}.de" for name in ("train", "dev")},
        "tokenizer.vocab_size": args.vocab_size,
        "tokenizer.sample_lines": SAMPLE,
        "train.threads": THREADS,
    }
    corpus = stage("make")
    _, ours = run([sys.executable, "-m", "transformer", "prepare", *(f"{k}={v}" for k, v in overrides.items())])
    yardstick, plan = stage("yardstick"), stage("plan")
    return {
        "pairs": args.pairs,
        "vocab_size": args.vocab_size,
        "threads": THREADS,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "sentencepiece": sentencepiece.__version__,
        "corpus": corpus,
        "ours": ours,
        "yardstick": yardstick,
        "plan": plan,
        "speed": yardstick["wall_seconds"] / ours["wall_seconds"],
        "cpu_speed": yardstick["cpu_seconds"] / ours["cpu_seconds"],
    }


def run(command: list[str]) -> tuple[str, dict[str, float]]:
    """A command's output and what it used. Linux counts at least our own memory as its peak: so we stay small."""
    began = time.perf_counter()
    with Popen(command, stdout=PIPE, text=True) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"error: {shlex.join(command)} ended with status {process.returncode}")
    return output, {
        "wall_seconds": time.perf_counter() - began,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_gib": usage.ru_maxrss / 2**20,
    }


# ---- the corpus -----------------------------------------------------------------------------------------------------


def make(args: argparse.Namespace) -> dict[str, Any]:
    """Write train and dev; the same for the same number of pairs."""
    generator = Generator()
    counted, written = np.zeros(2, dtype=np.int64), 0
    for name, pairs in (("dev", min(3_000, args.pairs)), ("train", args.pairs)):
        files = [(args.keep / f"{name}.{side}").open("w", encoding="utf-8", newline="\n") for side in SIDES]
        for sides, counts in generator.blocks(pairs):
            for file, sentences in zip(files, sides, strict=True):
                file.writelines(f"{sentence}\n" for sentence in sentences)
            counted, written = counted + counts.sum(axis=1), written + counts.shape[1]
        for file in files:
            file.close()
    return {"vocabularies": generator.vocabularies, "mean_words": (counted / written).tolist()}


# ---- the yardstick --------------------------------------------------------------------------------------------------


def yardstick(args: argparse.Namespace) -> dict[str, Any]:
    """Train, encode, read and write, with nothing around it."""
    files, clock = [args.keep / f"train.{side}" for side in SIDES], time.perf_counter
    began, total = clock(), 2 * args.pairs
    limit, model = min(SAMPLE, total), BytesIO()
    every = chain.from_iterable(map(read, files))
    sentencepiece.SentencePieceTrainer.train(  # as transformer/data/tokenizer.py does
        sentence_iterator=(line for number, line in enumerate(every) if number * limit % total < limit),
        model_writer=model,
        model_type="bpe",
        vocab_size=args.vocab_size,
        hard_vocab_limit=False,
        character_coverage=1.0,
        byte_fallback=False,
        normalization_rule_name="identity",
        pad_id=0,
        unk_id=1,
        bos_id=2,
        eos_id=3,
        num_threads=16,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    trained, encoding, tokens = clock(), 0.0, 0
    for path in files:
        lines = read(path)
        with Path(f"{path}.ids").open("wb") as ids, Path(f"{path}.lengths").open("wb") as sizes:
            while block := list(islice(lines, BLOCK)):
                before = clock()
                pieces = processor.encode(block, num_threads=THREADS)
                encoding += clock() - before
                flat = np.fromiter(chain.from_iterable(pieces), np.uint16)
                flat.tofile(ids)
                np.fromiter(map(len, pieces), np.int64, len(pieces)).tofile(sizes)
                tokens += len(flat)
            for file in (ids, sizes):
                os.fsync(file.fileno())
    return {
        "training_seconds": trained - began,
        "encoding_seconds": encoding,
        "io_seconds": clock() - trained - encoding,
        "pieces": processor.get_piece_size(),
        "tokens": tokens,
    }


def read(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            yield line[:-1]


# ---- the plan -------------------------------------------------------------------------------------------------------


def plan(args: argparse.Namespace) -> dict[str, Any]:
    """What a training does with the prepared corpus before its first step: the shortest of three times for each."""
    from transformer.config.settings import TrainConfig
    from transformer.data.loader import Position, load_steps
    from transformer.data.plan import Batching, plan_chapter
    from transformer.data.store import Store

    (path,) = (manifest.parent for manifest in (args.keep / "store").glob("*/MANIFEST.json"))
    recipe = TrainConfig()
    seed, tokens = recipe.seed, recipe.tokens_per_step
    opening, store = shortest(lambda: Store.open(path))
    mixture = ((len(store), 1.0),)
    planning, steps = shortest(
        lambda: plan_chapter(store.lengths, mixture=mixture, seed=seed, epoch=0, chapter=0, tokens_per_step=tokens)
    )
    places = {"start": 0, "middle": len(steps) // 2, "end": len(steps) - 1}

    batching = Batching(
        mixture=mixture,
        seed=seed,
        tokens_per_step=tokens,
        max_tokens=tokens,
        micro_batch_multiple=1,
        capacities=None,
    )

    def first_step(place: int) -> object:
        stream = load_steps(
            lambda epoch: store,
            batching,
            rank=0,
            world_size=1,
            position=Position(0, 0, place),
            prefetch=0,
        )
        return next(stream).index

    firsts = {name: shortest(partial(first_step, place)) for name, place in places.items()}
    assert {name: index for name, (_, index) in firsts.items()} == places
    return {
        "pairs": len(store),
        "mean_tokens": store.lengths[:].mean(axis=0).tolist(),
        "steps": len(steps),
        "open_seconds": opening,
        "plan_epoch_seconds": planning,
        "first_step_seconds": {name: seconds for name, (seconds, _) in firsts.items()},
    }


def shortest(work: Callable[[], Any]) -> tuple[float, Any]:
    """The seconds that it takes on a machine that does nothing else, and what it returns."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        result = work()
        times.append(time.perf_counter() - began)
    return min(times), result


STAGES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"make": make, "yardstick": yardstick, "plan": plan}

if __name__ == "__main__":
    main(sys.argv[1:])
