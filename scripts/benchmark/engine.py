"""`transformer translate search.engine=ctranslate2` beside CTranslate2's own translate_batch, as whole processes.

    python scripts/benchmark/engine.py --run-dir runs/demo --type int8 --output out.json < source.txt

Both read the same lines and write text, with the weights that the run's engine has, in one type, on the same cores. The
run's settings of the search hold for both; all lines of CTranslate2 have the maximum length of the longest one. It
has a worker of one thread for each core, and that batch size, of some, which was the fastest in a turn that is not
counted. `patient` is CTranslate2 with as many finished hypotheses as ours asks for in float32, or with a length
penalty: what that costs, and what our command does beyond it, can be told apart.

They take turns; ratios are formed within a round. On a shared machine, look at the CPU seconds, and where other guests
come and go within a turn, take `--at-once`: ours and `ct2` start at the same moment, and meet the same guests. Then
some lines, the first ones, are translated one at a time by a loaded translator and by CTranslate2 with one worker of
all threads, in turns: of a line that ours leaves to torch, that is another search altogether.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import torch
from contest import fail, machine, positive, ratios, row, rule, spread

import transformer
from transformer.decoding.translator import Translator
from transformer.errors import TransformerError
from transformer.integrations.engine.peer import exponent_near
from transformer.integrations.engine.searcher import EngineDecoder, n_finished
from transformer.machine import resolve_threads

ALONE = 20  # lines that are translated one at a time

THEIRS = """
import json, sys
import ctranslate2, sentencepiece
spec = json.loads(sys.argv[1])
source, target = (sentencepiece.SentencePieceProcessor(model_file=path) for path in spec["tokenizers"])
translator = ctranslate2.Translator(spec["folder"], inter_threads=spec["threads"], intra_threads=1)
lines = open(spec["lines"], encoding="utf-8").read().split("\\n")[:-1]
found = translator.translate_batch(source.encode(lines, out_type=str), **spec["search"])
sys.stdout.write("".join(target.decode(one.hypotheses[0]) + "\\n" for one in found))
"""


@dataclass(frozen=True)
class Turn:
    """A whole process."""

    seconds: float
    cpu_seconds: float
    text: list[str]


def main(arguments: list[str]) -> None:
    args = parse(arguments)
    given = sys.stdin.read().split("\n")[:-1]
    lines = [given[n % len(given)] for n in range(args.lines or len(given))]
    threads = resolve_threads(args.threads)
    torch.set_num_threads(threads)
    try:
        translator = transformer.load(
            args.run_dir,
            device="cpu",
            length_penalty=args.length_penalty,
            engine="ctranslate2",
            engine_type=args.type,
        )
    except TransformerError as error:
        fail(error)

    with TemporaryDirectory() as folder:
        path = Path(folder) / "lines.txt"
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        contenders, batch = contenders_of(args, translator, lines, path=path, threads=threads)
        turns = {name: [] for name in contenders}  # type: dict[str, list[Turn]]
        if args.at_once:
            del contenders["patient"], turns["patient"]
        with ThreadPoolExecutor(len(contenders) if args.at_once else 1) as pool:
            for _ in range(args.rounds):
                for name, turn in zip(contenders, pool.map(partial(take, path=path), contenders.values()), strict=True):
                    turns[name].append(turn)
        alone = alone_of(args, translator, given[:ALONE], threads=threads)

    facts = {
        "command": shlex.join(["python", "scripts/benchmark/engine.py", *arguments]),
        **machine(),
        "threads": threads,
        "engine": translator.engine,
        "beam_size": translator.search.beam_size,
        "length_penalty": translator.search.length_penalty,
        "lines": len(lines),
        "batch": batch,
        "seconds": {name: [turn.seconds for turn in own] for name, own in turns.items()},
        "cpu_seconds": {name: [turn.cpu_seconds for turn in own] for name, own in turns.items()},
        "same_as_ours": {name: same(own[0].text, turns["ours"][0].text) for name, own in turns.items()},
        "alone": alone,
    }
    if args.output is not None:
        args.output.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print("\n".join(page(facts)))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run-dir", required=True, help="a trained run")
    parser.add_argument("--type", default="float32", help="of the weights: float32, int8 (default: %(default)s)")
    parser.add_argument("--length-penalty", type=float, help="default: the run's")
    parser.add_argument("--lines", type=positive, help="so many, the input again and again (default: the input)")
    parser.add_argument("--batches", type=positive, nargs="+", default=[32, 64, 128], help="CTranslate2's, to try")
    parser.add_argument("--rounds", type=positive, default=3, help="turns of each (default: %(default)s)")
    parser.add_argument("--at-once", action="store_true", help="ours and ct2 at the same time, not in turns")
    parser.add_argument("--repeats", type=positive, default=10, help="of a line alone (default: %(default)s)")
    parser.add_argument("--threads", type=positive, help="of each contender (default: one for each core)")
    parser.add_argument("--output", type=Path, help="write every number here, as JSON")
    return parser.parse_args(arguments)


def contenders_of(
    args: argparse.Namespace, translator: Translator, lines: list[str], *, path: Path, threads: int
) -> tuple[dict[str, list[str]], int]:
    """The command of each, and CTranslate2's best batch size."""
    run = Path(args.run_dir)
    target = run / "tokenizer.target.model"
    search = search_of(translator, lines)
    spec = {
        "folder": engine_of(translator),
        "tokenizers": [str(run / "tokenizer.model"), str(target if target.exists() else run / "tokenizer.model")],
        "threads": threads,
        "lines": str(path),
    }

    def theirs(**changes: Any) -> list[str]:
        return [sys.executable, "-c", THEIRS, json.dumps(spec | {"search": search | changes})]

    batch, *others = args.batches
    if others:
        batch = min(args.batches, key=lambda size: take(theirs(max_batch_size=size), path).cpu_seconds)
    beam = translator.search.beam_size
    engine = ["search.engine=ctranslate2", f"search.engine_type={args.type}", "device=cpu", f"threads={threads}"]
    penalty = f"search.length_penalty={translator.search.length_penalty}"
    ours = [sys.executable, "-m", "transformer", "translate", f"run_dir={run}", penalty, *engine]
    few = path.with_name("few.txt")
    few.write_text("".join(f"{line}\n" for line in lines[:100]), encoding="utf-8")
    take(ours, few)  # not counted, either
    return {
        "ours": ours,
        "ct2": theirs(max_batch_size=batch),
        "patient": theirs(max_batch_size=batch, patience=n_finished(beam) / beam),
    }, batch


def engine_of(translator: Translator) -> str:
    """The folder of the engine."""
    assert isinstance(translator.decoder, EngineDecoder)
    return str(translator.decoder.searcher.folder)


def search_of(translator: Translator, lines: list[str]) -> dict[str, Any]:
    """CTranslate2's settings for the search of these lines."""
    sources = translator.tokenizers.source.encode(lines)
    mean = sum(map(len, sources)) / len(sources)
    return {
        "beam_size": translator.search.beam_size,
        "length_penalty": exponent_near(mean, translator.search.length_penalty),
        "min_decoding_length": 0,
        "max_decoding_length": max(map(translator.decoder.max_length, sources)),
        "max_input_length": 0,
    }


def take(command: list[str], path: Path) -> Turn:
    """A whole process, which has the lines on standard input."""
    with path.open(encoding="utf-8") as stdin, TemporaryFile("w+", encoding="utf-8") as output:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdin=stdin, stdout=output)
        _, status, usage = os.wait4(process.pid, 0)  # of this process alone
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"error: {shlex.join(command[:4])} ended with status {process.returncode}")
        output.seek(0)
        return Turn(seconds, usage.ru_utime + usage.ru_stime, output.read().split("\n")[:-1])


def same(texts: list[str], others: list[str]) -> float:
    """The share of lines that are the same."""
    return sum(one == other for one, other in zip(texts, others, strict=True)) / len(texts)


def alone_of(
    args: argparse.Namespace, translator: Translator, lines: list[str], *, threads: int
) -> dict[str, list[float]]:
    """The seconds that each line takes by itself: the median of some turns."""
    import ctranslate2

    peer = ctranslate2.Translator(engine_of(translator), inter_threads=1, intra_threads=threads)
    source, target = translator.tokenizers.source, translator.tokenizers.target
    ids = {target.piece(index): index for index in range(target.vocab_size)}

    def theirs(line: str) -> None:
        pieces = [source.piece(index) for index in source.encode([line])[0]]
        [found] = peer.translate_batch([pieces], **search_of(translator, [line]))
        target.decode([[ids[piece] for piece in found.hypotheses[0]]])

    def ours(line: str) -> None:
        translator.translate([line])

    found: dict[str, list[float]] = {"ours": [], "ct2": []}
    for line in lines:
        seconds: dict[str, list[float]] = {name: [] for name in found}
        for number in range(args.repeats + 2):
            for name, translate in (("ours", ours), ("ct2", theirs)):
                taken = timed(partial(translate, line))
                if number >= 2:
                    seconds[name].append(taken)
        for name, times in seconds.items():
            found[name].append(statistics.median(times))
    return found


def timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def page(facts: dict[str, Any]) -> Iterator[str]:
    """The report, in Markdown."""
    yield f"`{facts['command']}`"
    yield ""
    yield (
        f"{facts['processor']}, {facts['cores']} cores, {facts['threads']} threads, Python {facts['python']}, "
        f"{facts['engine']}; {facts['lines']:,} lines, beam {facts['beam_size']}, length penalty "
        f"{facts['length_penalty']}; CTranslate2 in batches of {facts['batch']}."
    )
    yield ""
    yield row(
        ["whole process", "seconds", "range", "CPU seconds", "range", "speed of ours / this", "by CPU", "same lines"]
    )
    yield rule(1, 7)
    for name, seconds in facts["seconds"].items():
        cpu = facts["cpu_seconds"][name]
        by_wall = spread(ratios(seconds, facts["seconds"]["ours"]), ".2f")[0]
        by_cpu = spread(ratios(cpu, facts["cpu_seconds"]["ours"]), ".2f")[0]
        cells = [name, *spread(seconds, ".1f"), *spread(cpu, ".1f"), by_wall, by_cpu]
        yield row([*cells, f"{facts['same_as_ours'][name]:.1%}"])
    ours, theirs = facts["alone"]["ours"], facts["alone"]["ct2"]
    yield ""
    yield (
        f"Each of {len(ours)} lines alone: {1e3 * statistics.median(ours):.1f} ms, and CTranslate2 "
        f"{1e3 * statistics.median(theirs):.1f} (medians); the ratio's median is "
        f"{statistics.median(ratios(ours, theirs)):.2f}, its range {spread(ratios(ours, theirs), '.2f')[1]}."
    )


if __name__ == "__main__":
    main(sys.argv[1:])
