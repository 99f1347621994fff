"""The speed record of docs/speedrun.md: time an attempt with three seeds, and check one by what it has left.

    python scripts/benchmark/speedrun.py run runs/attempt -- transformer train experiment=multi30k_en_de \\
      data.root=CORPORA '~data.test.test_2016_flickr' train.seed={seed} run_dir={run}
    python scripts/benchmark/speedrun.py check runs/attempt --corpora CORPORA

`run` fills in the seed and its run directory, and times each command as a whole process, one after the other. `check`
reads the run directories and decodes `val` again; of an attempt that keeps the rules, also the test set, once:
attempt.json keeps those scores. It ends with 0 where the attempt keeps the rules, and with 1 where it does not.
It cannot see whether the clock was honest, beyond that the log fits into the time: a record is run again.
"""

import argparse
import json
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from contest import fail, machine, row, rule

from transformer.config.compose import compose_job
from transformer.config.jobs import EvaluateJob
from transformer.config.primitives import to_json
from transformer.config.settings import Device
from transformer.data.report import DataReport, read_report
from transformer.errors import InputError, TransformerError
from transformer.evaluation.sets import evaluate
from transformer.machine import source_commit
from transformer.records import RunRecord
from transformer.run_dir import RunDir

SEEDS = (1, 2, 3)
BLEU = 41.0  # of each seed, on `val`
TEST = "test_2016_flickr"  # decoded once, after the clock, and no part of the rules
SIGNATURE = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp"
CPU_CORES = 2
SLACK = 120.0  # seconds that a command may take before its first line and after its last
FILES = {
    "train": (
        "460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6",
        "2c2b73fd2b548fbcde3a875e0a78d6ee94d498bfdee6bd3eae3945779e9ddf72",
    ),
    "dev": (
        "1f2a23d992769b5b3d209b0a10dd0b77c08cceb1f20dfb97ed0aafa49d107227",
        "660e09eb7e1da2f856ea13ee5ad3cf6d36b3d5b0b733c857e94c5747a3dfc660",
    ),
}  # sha256 of both sides of Multi30k
ATTEMPT = "attempt.json"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    run_parser = commands.add_parser("run", help="time a command with three seeds")
    run_parser.add_argument("attempt", type=Path, help="a new folder, for a run directory of each seed and the times")
    run_parser.add_argument("command", nargs="+", help="what is timed, with {seed} and {run}")
    run_parser.set_defaults(act=lambda args: run(args.attempt, args.command))
    check_parser = commands.add_parser("check", help="whether an attempt keeps the rules")
    check_parser.add_argument("attempt", type=Path, help="a folder that `run` has filled")
    check_parser.add_argument("--corpora", type=Path, required=True, help="the folder with multi30k/val.en and val.de")
    check_parser.set_defaults(act=lambda args: check(args.attempt, args.corpora))
    args = parser.parse_args(arguments)
    try:
        args.act(args)
    except TransformerError as error:
        fail(error)


# ---- an attempt -----------------------------------------------------------------------------------------------------


def run(attempt: Path, command: list[str]) -> None:
    """Run the command with each seed, and write down how long each took. Raises InputError."""
    for name in ("{seed}", "{run}"):
        if not any(name in word for word in command):
            raise InputError(f"the command has no {name}, which is what differs between the three")
    try:
        attempt.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"{attempt}: {error.strerror}: an attempt begins with a new folder") from error

    seconds = []
    for seed in SEEDS:
        words = [word.replace("{seed}", str(seed)).replace("{run}", str(attempt / str(seed))) for word in command]
        print(shlex.join(words), flush=True)
        begun = time.perf_counter()
        status = subprocess.run(words, check=False).returncode
        seconds.append(time.perf_counter() - begun)
        shutil.rmtree(attempt / ".store", ignore_errors=True)  # the next seed prepares its text, too
        if status:
            raise InputError(f"{shlex.join(words)}: ended with status {status}")

    commit = source_commit(Path(__file__).parents[2])
    facts = {
        "command": shlex.join(command),
        "commit": commit,
        **machine(),
        "seconds": dict(zip(SEEDS, seconds, strict=True)),
    }
    (attempt / ATTEMPT).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(f"{minutes(statistics.mean(seconds))} a seed: now check it")


def minutes(seconds: float) -> str:
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"


# ---- its check ------------------------------------------------------------------------------------------------------


def check(attempt: Path, corpora: Path) -> None:
    """Print what an attempt comes to; SystemExit with 1 where it breaks a rule. Raises TransformerError."""
    path = attempt / ATTEMPT
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error}): it is what `run` writes") from error
    found = [Seed.read(attempt / str(seed), seed=seed, seconds=facts["seconds"][str(seed)]) for seed in SEEDS]
    faults = [f"seed {one.seed}: {fault}" for one in found for fault in one.faults()]
    if len({one.settings for one in found}) > 1:
        faults.append("the three differ in more than their seed and folder")
    if facts["cores"] != CPU_CORES and found[0].record.resolved.device is Device.cpu:
        faults.append(f"{facts['cores']} cores, not {CPU_CORES}")

    scores = [bleu_on("val", one.path, corpora) for one in found]
    faults += [
        f"seed {one.seed}: {bleu:.2f} BLEU on val" for one, bleu in zip(found, scores, strict=True) if bleu < BLEU
    ]
    if not faults and "test" not in facts:
        facts["test"] = [bleu_on(TEST, one.path, corpora) for one in found]
        path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print("\n".join(page(facts, found, scores)))
    for fault in faults:
        print(f"not valid: {fault}")
    if faults:
        sys.exit(1)


@dataclass(frozen=True)
class Seed:
    """One of the three trainings."""

    path: Path
    seed: int
    seconds: float
    record: RunRecord
    report: DataReport
    starts: int
    logged: float  # seconds from the first line of the log to the last

    @classmethod
    def read(cls, path: Path, *, seed: int, seconds: float) -> "Seed":
        run = RunDir(path)
        starts = len(run.read_history().starts)
        return cls(path, seed, seconds, run.read_record(), read_report(run), starts, seconds_of_log(run.log))

    @property
    def settings(self) -> str:
        """All but the seed and the folder."""
        config = self.record.config
        return json.dumps(to_json(replace(config, run_dir="-", train=replace(config.train, seed=1))), sort_keys=True)

    def faults(self) -> Iterator[str]:
        """The rules that it breaks."""
        config = self.record.config
        if config.train.seed != self.seed:
            yield f"trained with seed {config.train.seed}"
        if self.record.init_from is not None or config.tokenizer.model is not None:
            yield "began with weights or pieces of another run"
        if config.data.extra:
            yield "trained on more than one set"
        for name, digests in FILES.items():
            files = self.report.sets[name].files
            if tuple(file.sha256 for file in files.values()) != digests:
                yield f"its {name} is not Multi30k's: {', '.join(file.path for file in files.values())}"
        if self.starts != 1:
            yield f"started {self.starts} times: time an undisturbed run"
        if not self.logged <= self.seconds <= self.logged + SLACK:
            yield f"claims {self.seconds:.0f} s, and its log spans {self.logged:.0f} s"


def seconds_of_log(path: Path) -> float:
    """From its first line to its last."""
    stamps = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            stamps.append(datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f"))  # all of one clock
        except ValueError:
            continue  # a line of a sample that goes on
    return (stamps[-1] - stamps[0]).total_seconds()


def bleu_on(name: str, path: Path, corpora: Path) -> float:
    """BLEU of its averaged weights on a set of Multi30k, with a beam of 4, as `transformer evaluate` has it."""
    sides = [
        f"test.set.{side}={corpora / 'multi30k' / f'{name}.{code}'}" for side, code in (("src", "en"), ("tgt", "de"))
    ]
    found = evaluate(
        compose_job("evaluate", EvaluateJob, [f"run_dir={path}", "checkpoint=averaged", "search.beam_size=4", *sides])
    )
    scores = found.test_sets["set"]
    if not scores.bleu_signature.startswith(SIGNATURE):
        raise InputError(f"{path}: scored by {scores.bleu_signature}, not {SIGNATURE}")
    return scores.bleu


def page(facts: dict[str, Any], found: list[Seed], scores: list[float]) -> Iterator[str]:
    """The command, the machine, and a table of the three."""
    yield f"    {facts['command']}"
    yield ""
    proof = found[0].record.proof
    gpu = f"{proof.device}; " if proof is not None and found[0].record.resolved.device is Device.cuda else ""
    yield f"{gpu}{facts['processor']}, {facts['cores']} cores; commit {facts['commit']}"
    yield ""
    yield row(["seed", "time", "BLEU on `val`", f"on `{TEST}`"])
    yield rule(1, 3)
    of_test: list[float] | None = facts.get("test")
    for number, (one, bleu) in enumerate(zip(found, scores, strict=True)):
        shown = "not decoded" if of_test is None else f"{of_test[number]:.2f}"
        yield row([str(one.seed), minutes(one.seconds), f"{bleu:.2f}", shown])
    shown = "not decoded" if of_test is None else f"{statistics.mean(of_test):.2f}"
    took = minutes(statistics.mean(one.seconds for one in found))
    yield row(["mean", took, f"{statistics.mean(scores):.2f}", shown])


if __name__ == "__main__":
    main(sys.argv[1:])
