"""How speed changes with the length of sentences, the vocabulary, the depth of the model and the size of the corpus.

    python scripts/benchmark/growth.py --peers-python peers/bin/python --output out.json

Each table is made by one of the scripts beside this one, started once for each value, everything else as it is by
default, and with few rounds: it shows how a time grows, not what a single figure is worth. Sentences become longer by
joining so many neighbours of the corpus, on both sides; a translation is as long as its source. A peer runs beside ours
where it can, so that one sees who grows how: torch.nn.Transformer in training, CTranslate2 in translation, and
SentencePiece alone in preparing.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from contest import among, machine, positive, row, rule, spread

PIECES = 14  # of a sentence of Multi30k, about

Report = dict[str, Any]


class Table(NamedTuple):
    """One script, and the settings that are compared."""

    script: str
    quantity: str  # what grows
    values: tuple[int, ...]


TABLES = {
    "training-length": Table("train.py", "sentences joined", (1, 2, 4, 8)),
    "training-vocabulary": Table("train.py", "pieces", (10_000, 37_000)),
    "training-depth": Table("train.py", "layers of a stack", (1, 3, 6, 12)),
    "translation-length": Table("translate.py", "sentences joined", (1, 2, 4)),
    "translation-vocabulary": Table("translate.py", "pieces", (10_000, 37_000)),
    "translation-depth": Table("translate.py", "layers of a stack", (1, 3, 6, 12)),
    "preparing-corpus": Table("prepare.py", "pairs", (100_000, 300_000, 1_000_000)),
}


def main(arguments: list[str]) -> None:
    args = parse(arguments)
    found: dict[str, list[tuple[int, Report]]] = {}
    for name in args.tables:
        values = TABLES[name].values if args.values is None else args.values
        for value in values:
            print(f"{name} {value:,} ...", file=sys.stderr)
            found.setdefault(name, []).append((value, run(name, value, args)))
    facts = {
        "command": shlex.join(["python", "scripts/benchmark/growth.py", *arguments]),
        **machine(),
        "size": args.size,
        "precision": args.precision,
    }
    if args.output is not None:
        args.output.write_text(json.dumps(facts | {"tables": found}, indent=1) + "\n", encoding="utf-8")
    print("\n".join(page(facts, found)))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tables", type=among(*TABLES), default=",".join(TABLES), help="default: all")
    parser.add_argument("--values", type=numbers, help="in place of a table's own, such as 1,2,4")
    parser.add_argument("--size", choices=["tiny", "small", "base"], default="small", help="default: %(default)s")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16", help="default: %(default)s")
    parser.add_argument("--rounds", type=positive, default=3, help="turns of each contender (default: %(default)s)")
    parser.add_argument("--steps", type=positive, default=4, help="of a turn of training (default: %(default)s)")
    parser.add_argument("--sentences", type=positive, default=128, help="of a turn of translation")
    parser.add_argument("--peers-python", help="the Python of an environment with ctranslate2")
    parser.add_argument("--src", type=Path, help="as for train.py")
    parser.add_argument("--tgt", type=Path, help="as for train.py")
    parser.add_argument("--output", type=Path, help="write every number here, as JSON")
    return parser.parse_args(arguments)


def numbers(text: str) -> tuple[int, ...]:
    """The type of an argument that lists counts."""
    return tuple(map(positive, text.split(",")))


def run(name: str, value: int, args: argparse.Namespace) -> Report:
    """What a script reports for one value."""
    table = TABLES[name]
    with TemporaryDirectory() as folder:
        output = Path(folder, "out.json")
        chosen = options(table, value, args)
        into = [] if table.script == "prepare.py" else ["--output", str(output)]
        command = [sys.executable, str(Path(__file__).with_name(table.script)), *chosen, *into]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            sys.exit(f"error: {shlex.join(command)} ended with status {done.returncode}")
        report: Report = json.loads(output.read_bytes() if output.exists() else done.stdout)

    # The command without the temporary file, for whoever runs it again.
    return report | {"command": shlex.join(["python", f"scripts/benchmark/{table.script}", *chosen])}


def options(table: Table, value: int, args: argparse.Namespace) -> list[str]:
    """The arguments of a script."""
    if table.script == "prepare.py":
        return ["--pairs", str(value)]

    chosen = ["--sizes", args.size, "--precisions", args.precision, "--rounds", str(args.rounds)]
    match table.quantity:
        case "sentences joined":
            chosen += ["--join", str(value)]
        case "pieces":
            chosen += ["--vocab", str(value)]
        case _:
            chosen += ["--layers", str(value)]

    if table.script == "train.py":
        chosen += ["--peers", "ours,plain", "--shapes", "new", "--steps", str(args.steps)]
    else:
        chosen += ["--peers", "ours,ct2", "--sentences", str(args.sentences)]
        if table.quantity == "sentences joined":
            chosen += ["--length", str(PIECES * value)]
        if args.peers_python is not None:
            chosen += ["--peers-python", args.peers_python]
    for name, path in (("--src", args.src), ("--tgt", args.tgt)):
        if path is not None:
            chosen += [name, str(path)]
    return chosen


def page(facts: dict[str, Any], found: dict[str, list[tuple[int, Report]]]) -> Iterator[str]:
    """The report, in Markdown."""
    yield f"`{facts['command']}`"
    yield ""
    yield (
        f"{facts['processor']}, {facts['cores']} cores, Python {facts['python']}; "
        f"{facts['size']} {facts['precision']} where nothing else is said."
    )
    for name, reports in found.items():
        table = TABLES[name]
        yield ""
        yield f"## {name.replace('-', ': ')}, by `{table.script}`"
        yield ""
        if table.script == "prepare.py":
            yield from corpus_rows(reports)
        else:
            yield from speed_rows(table, reports)


def speed_rows(table: Table, reports: list[tuple[int, Report]]) -> Iterator[str]:
    """Tokens a second, and how they relate to the peer's, and to those of the first value."""
    yield row([table.quantity, "vocabulary", "contender", "ours / this", "tokens/s", "range", "of the first row's"])
    yield rule(3, 4)
    first: dict[str, float] = {}
    for value, report in reports:
        [ours, *_] = report["results"]
        for result in report["results"]:
            speeds = result["target_tokens_per_second"]
            [median, span] = spread(speeds, ",.0f")
            beside = [a / b for a, b in zip(ours["target_tokens_per_second"], speeds, strict=True)]
            middle = statistics.median(speeds)
            share = middle / first.setdefault(result["peer"], middle)
            ratio = "" if result is ours else spread(beside, ".2f")[0]
            yield row([f"{value:,}", f"{report['vocab_size']:,}", result["peer"], ratio, median, span, f"{share:.2f}"])


def corpus_rows(reports: list[tuple[int, Report]]) -> Iterator[str]:
    """Seconds and memory of preparing."""
    yield row(["pairs", "ours / SentencePiece alone", "pairs/s", "seconds", "peak GiB", "planning an epoch, s"])
    yield rule(0, 6)
    for value, report in reports:
        ours = report["ours"]
        cells = [f"{value:,}", f"{report['speed']:.2f}", f"{value / ours['wall_seconds']:,.0f}"]
        cells += [f"{ours['wall_seconds']:.1f}", f"{ours['peak_gib']:.2f}"]
        yield row([*cells, f"{report['plan']['plan_epoch_seconds']:.3f}"])


if __name__ == "__main__":
    main(sys.argv[1:])
