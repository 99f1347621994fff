"""How long commands take to start, beside `python -c "import torch"`, which nobody who computes can avoid.

    python scripts/benchmark/startup.py --run-dir runs/demo --output out.json

Each command is a process of its own, and they take turns; wall time counts, from the start of the process to its end.
`translate` is given one line. Without --run-dir it has a model with random weights, of the demo's size, which is told
to end where its source does; its translation says nothing, but takes as long.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from contest import fail, machine, positive, ratios, row, rule, spread

from transformer.cli.commands import compose
from transformer.config.jobs import TrainJob
from transformer.data.prepare import prepare
from transformer.data.tokenizer import Tokenizer
from transformer.errors import TransformerError
from transformer.model.transformer import Transformer

LINE = "She is reading a book.\n"
YARDSTICK = "import torch"

Commands = dict[str, list[str]]


def main(arguments: list[str]) -> None:
    args = parse(arguments)
    try:
        with TemporaryDirectory() as folder:
            known = commands(args.run_dir or random_run(Path(folder)), is_trained=args.run_dir is not None)
            seconds = measure({name: known[name] for name in args.commands}, rounds=args.rounds)
    except TransformerError as error:
        fail(error)
    facts = {
        "command": shlex.join(["python", "scripts/benchmark/startup.py", *arguments]),
        **machine(),
        "torch": torch.__version__,
        "seconds": seconds,
    }
    if args.output is not None:
        args.output.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print("\n".join(page(facts)))


def commands(run_dir: Path, *, is_trained: bool) -> Commands:
    """What is started, by name."""
    package = [sys.executable, "-m", "transformer"]
    ends = [] if is_trained else ["search.max_extra=1"]
    return {
        "python": [sys.executable, "-c", "pass"],
        YARDSTICK: [sys.executable, "-c", "import torch"],
        "transformer --help": [*package, "--help"],
        "transformer train --help": [*package, "train", "--help"],
        "transformer train --cfg job": [*package, "train", "--cfg", "job"],
        "transformer translate, one line": [*package, "translate", f"run_dir={run_dir}", *ends],
    }


NAMES = list(commands(Path(), is_trained=True))


def parse(arguments: list[str]) -> argparse.Namespace:
    def some(text: str) -> list[str]:
        found = [name for name in NAMES if text in name]
        if not found:
            raise argparse.ArgumentTypeError(f"{text}: not a part of any of {', '.join(NAMES)}")
        return found

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run-dir", type=Path, help="a trained run (default: one with random weights)")
    parser.add_argument("--commands", type=some, default=NAMES, help="those whose name has this part (default: all)")
    parser.add_argument("--rounds", type=positive, default=9, help="starts of each (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="write every number here, as JSON")
    return parser.parse_args(arguments)


def random_run(folder: Path) -> Path:
    """A run of the demo's model, untrained."""
    from translate import write_run  # a neighbour

    job = compose("train", ["experiment=demo", f"run_dir={folder / 'prepared'}"])
    assert isinstance(job, TrainJob)
    tokenizer_model = prepare(job).tokenizers.source.model
    model = Transformer(job.model, Tokenizer.from_bytes(tokenizer_model).vocab_size)
    write_run(model, tokenizer_model, run_dir=folder / "run", beam_size=4)
    return folder / "run"


def measure(known: Commands, *, rounds: int) -> dict[str, list[float]]:
    """The seconds of each round; a first one, which reads the files from the disk, is not counted."""
    found: dict[str, list[float]] = {name: [] for name in known}
    for number in range(1 + rounds):
        for name, command in known.items():
            began = time.perf_counter()
            done = subprocess.run(command, input=LINE, capture_output=True, text=True, check=False)
            seconds = time.perf_counter() - began
            if done.returncode:
                sys.exit(f"error: {name}: status {done.returncode}: {done.stderr}")
            if number:
                found[name].append(seconds)
    return found


def page(facts: dict[str, Any]) -> Iterator[str]:
    """The report, in Markdown."""
    yield f"`{facts['command']}`"
    yield ""
    yield f"{facts['processor']}, {facts['cores']} cores, Python {facts['python']}, torch {facts['torch']}."
    yield ""
    yield "Wall seconds of a process, the median of the rounds and their range; the ratio is formed within each round."
    yield ""
    yield row(["command", "this / import torch", "range", "seconds", "range"])
    yield rule(1, 4)
    yardstick = facts["seconds"].get(YARDSTICK)
    for name, seconds in facts["seconds"].items():
        beside = [] if yardstick is None or name == YARDSTICK else ratios(seconds, yardstick)
        yield row([f"`{name}`", *spread(beside, ".2f"), *spread(seconds, ".2f")])


if __name__ == "__main__":
    main(sys.argv[1:])
