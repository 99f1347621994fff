"""How long a command takes by its environment, beside endless loops or none: most of all by how OpenMP's threads wait.

    python scripts/benchmark/neighbours.py --loops 2 -- transformer train train.max_steps=60 run_dir={}
    python scripts/benchmark/neighbours.py --loops 0 --rounds 10 -- transformer translate run_dir=runs/demo < source.txt
    python scripts/benchmark/neighbours.py --loops 0 --settings ours --variables LD_PRELOAD=libjemalloc.so.2 -- ...

`{}` is an empty folder of the run's own. Every run is a whole process, and the settings take turns; the loops have the
command's priority, and run all the time. What comes on standard input is read once, and given to each.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from contest import among, machine, positive, ratios, row, rule, spread

SETTINGS = {
    "ours": {},
    "openmp": {"GOMP_SPINCOUNT": "300000"},  # GNU's, where nothing is set
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--loops", type=int, default=2, help="endless loops beside the command (default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=3, help="runs of each setting (default: %(default)s)")
    parser.add_argument(
        "--settings", type=among(*SETTINGS), default=list(SETTINGS), help=f"of {', '.join(SETTINGS)} (default: all)"
    )
    parser.add_argument(
        "--variables", type=variables, nargs="*", default=[], help="more settings, each 'NAME=VALUE NAME=VALUE'"
    )
    parser.add_argument("--output", type=Path, help="a JSON file with every number")
    parser.add_argument("command", nargs="+", help="what is run")
    args = parser.parse_args(arguments)

    settings = {name: SETTINGS[name] for name in args.settings}
    settings |= {" ".join(f"{name}={value}" for name, value in more.items()): more for more in args.variables}
    given = b"" if sys.stdin.isatty() else sys.stdin.buffer.read()
    with loops(args.loops):
        seconds = measure(args.command, settings, given=given, rounds=args.rounds)

    command = shlex.join(["python", "scripts/benchmark/neighbours.py", *arguments])
    facts = {"command": command, **machine(), "loops": args.loops, "seconds": seconds}
    if args.output is not None:
        args.output.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print("\n".join(page(command, seconds)))


def variables(text: str) -> dict[str, str]:
    """Environment variables from `NAME=VALUE NAME=VALUE`. Raises ValueError for anything else."""
    return dict(word.split("=", 1) for word in shlex.split(text))


@contextmanager
def loops(count: int) -> Iterator[None]:
    """So many endless loops, each a process, until the end of the context."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def measure(
    command: list[str], settings: dict[str, dict[str, str]], *, given: bytes, rounds: int
) -> dict[str, list[float]]:
    """The wall seconds of each run, by setting."""
    seconds: dict[str, list[float]] = {name: [] for name in settings}
    inherited = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    for _ in range(rounds):
        for name, variables in settings.items():
            with TemporaryDirectory() as folder:
                filled = [word.replace("{}", f"{folder}/own") for word in command]
                begun = time.perf_counter()
                ended = subprocess.run(filled, input=given, capture_output=True, env={**inherited, **variables})
                seconds[name].append(time.perf_counter() - begun)
            if ended.returncode:
                sys.exit(f"{shlex.join(filled)} ended with status {ended.returncode}:\n{ended.stderr.decode()}")
    return seconds


def page(command: str, seconds: dict[str, list[float]]) -> Iterator[str]:
    """A table of seconds, and their ratio to those of the first setting in the same round."""
    first = next(iter(seconds))
    yield f"    {command}"
    yield ""
    yield row(["environment", "seconds", "range", f"beside {first}", "range"])
    yield rule(1, 4)
    for name, times in seconds.items():
        compared = ratios(times, seconds[first])
        yield row([name, *spread(times, ".1f"), f"{statistics.median(compared):.3f}", spread(compared, ".2f")[1]])


if __name__ == "__main__":
    main(sys.argv[1:])
