"""The stages of gpu.sh: parts, one after the other, each a process with a limit and an exit status of its own.

A stage leaves three files in --out: STAGE.jsonl has every number, one measurement a line, written when it was known;
STAGE.txt is what the processes printed; summary.json says how each part ended. A part that fails or runs out of time
stops no other. Started again with the same --out, or with --before naming a folder that holds these files, a stage does
what has not passed yet, and each part measures what is not in STAGE.jsonl yet.
"""

import argparse
import gzip
import json
import os
import platform
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from measured import Measured, read

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
WHOLE = 530  # seconds of a stage, from the start of gpu.sh

# Which tests of test_gpu.py compile or run whole commands; all others are tests of kernels and of the model.
COMMANDS = "compiled or learns or resumes or nothing_set"
TRIED = "nothing_set"  # of these, in a dry run
NEW = "triton"  # those of kernels that are no default

OUTCOME = re.compile(r"^\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (\S.*?) *$", re.MULTILINE)


class Place(NamedTuple):
    """Where a part works, and with what."""

    dry: bool
    data: Path
    results: Path  # STAGE.jsonl
    log: Path  # what its processes print is appended here
    work: Path  # a folder of its own, kept for the next start
    limit: float  # seconds

    @property
    def device(self) -> str:
        """As the package and the tests name it."""
        return "cpu" if self.dry else "cuda"


class Found(NamedTuple):
    """What a part did."""

    status: int | None  # of its process; None: it ran out of time
    passed: bool
    line: str  # in a few words


class Part(NamedTuple):
    """One thing to do, and the seconds that are kept for it: more where the parts before it left some over."""

    run: Callable[[Place], Found]
    seconds: float


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="gpu.sh", description="Measure, test and train on a GPU, nine minutes each.")
    parser.add_argument("stage", choices=STAGES, help="what to do")
    parser.add_argument("parts", nargs="*", metavar="PART", help="of the stage (default: all)")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, at a tiny size")
    parser.add_argument(
        "--data", type=Path, default=Path(".gpu/data"), help="holds multi30k/ and kftt/ (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="where results go (default: %(default)s)")
    parser.add_argument("--before", type=Path, help="the --out of an earlier start that did not get to the end")
    parser.add_argument(
        "--work", type=Path, default=Path(".gpu-work"), help="where runs are kept (default: %(default)s)"
    )
    parser.add_argument("--begun", type=float, default=time.time(), help="when the clock started (default: now)")
    args = parser.parse_args(arguments)
    stage = STAGES[args.stage]
    if unknown := set(args.parts) - set(stage):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(stage)}")

    # What an earlier start has found.
    for folder in filter(None, (args.before, args.out)):
        path = folder / "summary.json"
        if path.exists() and json.loads(path.read_text(encoding="utf-8"))["dry_run"] is not args.dry_run:
            kind = "no dry run, and this is one" if args.dry_run else "a dry run, and this is none"
            parser.error(f"{path}: the results of {kind}: remove them, or choose another --out (or $OUT)")
    args.out.mkdir(parents=True, exist_ok=True)
    names = {kind: args.out / f"{args.stage}.{kind}" for kind in ("jsonl", "txt")}
    summary_path = args.out / "summary.json"
    for path in (*names.values(), summary_path):
        earlier = args.before / path.name if args.before is not None else path
        if earlier.exists() and not path.exists():
            shutil.copy(earlier, path)
    stages: dict[str, Any] = {}
    if summary_path.exists():
        stages = json.loads(summary_path.read_text(encoding="utf-8"))["stages"]
    verdicts = stages.setdefault(args.stage, {})

    facts = machine() | {"started_as": shlex.join(["scripts/benchmark/gpu.py", *arguments]), "dry_run": args.dry_run}
    print(f"{facts['gpu'] or 'no GPU'}, torch {facts['torch']}, Python {facts['python']}", flush=True)

    # The parts.
    asked = args.parts or list(stage)
    wanted = [name for name in asked if not verdicts.get(name, {}).get("passed")]
    if len(wanted) < len(asked):
        passed = ", ".join(name for name in asked if name not in wanted)
        print(f"passed before: {passed} (to measure again, choose another --out)", flush=True)
    for index, name in enumerate(wanted):
        kept = sum(stage[other].seconds for other in wanted[index + 1 :])
        limit = 600.0 if args.dry_run else max(1.0, args.begun + WHOLE - time.time() - kept)
        work = (args.work / args.stage / name).resolve()
        if name not in verdicts:  # what may lie there belongs to other results
            shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True, exist_ok=True)
        place = Place(
            dry=args.dry_run,
            data=args.data.resolve(),
            results=names["jsonl"].resolve(),
            log=names["txt"].resolve(),
            work=work,
            limit=limit,
        )
        verdicts[name] = {"passed": False, "said": "begun", "limit": round(limit, 1)}
        write(summary_path, facts | {"stages": stages})

        begun = time.time()
        log_begins = place.log.stat().st_size if place.log.exists() else 0
        try:
            found = stage[name].run(place)
        except (OSError, ValueError, KeyError) as error:  # the other parts go on
            found = Found(None, False, f"{type(error).__name__}: {error}")
        seconds = round(time.time() - begun, 1)
        verdicts[name] |= {"passed": found.passed, "exit_status": found.status, "seconds": seconds, "said": found.line}
        write(summary_path, facts | {"stages": stages})
        print(f"{name}: {'passed' if found.passed else 'FAILED'} in {seconds} s: {found.line}", flush=True)
        if not found.passed:
            print("\n".join(text_from(place.log, log_begins).split("\n")[-40:]), flush=True)
    return 0 if all(verdicts.get(name, {}).get("passed") for name in asked) else 1


def machine() -> dict[str, Any]:
    """The device, the driver and the versions."""
    import torch

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    on_gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "driver": first_line(query) if on_gpu else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "commit": first_line(["git", "-C", str(ROOT), "rev-parse", "HEAD"]),
    }


def first_line(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.split("\n")[0].strip()


def write(path: Path, content: dict[str, Any]) -> None:
    """Whole or not at all."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def text_from(path: Path, start: int) -> str:
    """What a log holds from this byte on."""
    if not path.exists():
        return ""
    return path.read_bytes()[start:].decode("utf-8", errors="replace")


def call(
    place: Place,
    command: list[str],
    limit: float,
    *,
    grace: float = 5.0,
    watch: Callable[[], None] = lambda: None,
    environment: dict[str, str] | None = None,
) -> int | None:
    """Run it with a share of the time; its exit status, or None where SIGTERM had to end it, `grace` before SIGKILL.

    It is a session of its own, so that nothing it started lives on. `watch` is called every two seconds.
    """
    end = time.monotonic() + limit
    with place.log.open("a", encoding="utf-8") as log:
        log.write(f"$ {shlex.join(command)}\n\n")
        log.flush()
        process = subprocess.Popen(
            command,
            cwd=place.work,
            env=os.environ | (environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(max(0.01, min(2.0, end - time.monotonic())))
                watch()
                if time.monotonic() >= end:
                    process.terminate()
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(grace)
                    return None
        finally:
            with suppress(ProcessLookupError):  # nothing of it is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            watch()


# ---- parts that measure: a script of this folder, which writes its own lines of JSON


def script(name: str, *arguments: str, dry: str, timed: bool = True) -> Callable[[Place], Found]:
    """A part that runs NAME.py; `dry` are its arguments in a dry run, and --seconds is what it may take."""

    def run(place: Place) -> Found:
        known = set(read(place.results))
        command = [sys.executable, str(HERE / f"{name}.py"), f"--output={place.results}", f"--device={place.device}"]
        command += [f"--seconds={0.85 * place.limit:.0f}"] if timed else []
        command += dry.split() if place.dry else arguments
        eager = {"TORCHDYNAMO_DISABLE": "1"} if place.dry else {}  # compiling takes minutes
        status = call(place, command, place.limit, environment=eager)
        found = {key: numbers for key, numbers in read(place.results).items() if key not in known}
        failed = [key for key, numbers in found.items() if "error" in numbers]
        line = f"{len(found) - len(failed)} measurements" + (f", failed: {', '.join(failed)}" if failed else "")
        speeds = [
            f"{key.rpartition('/')[2]} {numbers['target_tokens_per_second']:,.0f} tokens/s"
            for key, numbers in found.items()
            if not key.startswith("variants/") and "target_tokens_per_second" in numbers
        ]
        return Found(status, status == 0, "; ".join([line, *speeds]))

    return run


# ---- the tests


def kernel_tests(place: Place) -> Found:
    """The tests marked gpu that neither compile nor start a command."""
    return tests(place, "kernels", f"not ({COMMANDS}) and not ({NEW})")


def new_kernel_tests(place: Place) -> Found:
    """Those of the kernels that are no default, commands among them; a dry run has none to run."""
    if place.dry:
        return Found(0, True, "they need a GPU")
    return tests(place, "new_kernels", NEW)


def command_tests(place: Place) -> Found:
    """The others; a dry run tries one of them."""
    return tests(place, "commands", f"({COMMANDS}) and {TRIED}" if place.dry else f"({COMMANDS}) and not ({NEW})")


def tests(place: Place, name: str, chosen: str) -> Found:
    """What pytest says of each test as it ends: there to be read even where it was killed."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-k", chosen, "-n", "2" if place.dry else "6"]
    command += ["-v", "--show-capture=no", "--tb=short", "--durations=20", f"--timeout={0.8 * place.limit:.0f}"]
    command += ["-p", "xdist", "-p", "pytest_timeout", "-p", "no:cacheprovider"]  # and none that is there by chance
    command += ["-W", "default"]  # what other releases warn of at import is not ours
    command += ["-c", str(ROOT / "pyproject.toml"), str(ROOT / "tests/core/unit/test_gpu.py")]
    names = {"TRANSFORMER_TEST_DEVICE": place.device, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "250"}
    start = place.log.stat().st_size if place.log.exists() else 0
    status = call(place, command, place.limit, environment=names)

    outcomes = outcomes_of(text_from(place.log, start))
    counts: dict[str, int] = {}
    for outcome in outcomes.values():
        counts[outcome] = counts.get(outcome, 0) + 1
    numbers = {"exit_status": status, "counts": counts, "tests": outcomes}
    Measured(place.results, seconds=0.0).add(f"tests/{name}", numbers)
    passed = status == 0 and set(counts) == {"passed"}
    return Found(status, passed, ", ".join(f"{count} {word}" for word, count in counts.items()) or "no test ended")


def outcomes_of(log: str) -> dict[str, str]:
    """The outcome of each test that ended, by its name, from the lines of `pytest -v -n`."""
    return {test.partition("::")[2]: word.lower() for word, test in OUTCOME.findall(log)}


# ---- the trainings


WAYS = {"eager": "train.compile=false", "compiled": "train.compile=true"}
APART = 0.1  # of a loss: dropout draws other numbers in compiled code


def demo(place: Place) -> Found:
    """The public command with its own corpus, eager and compiled: to the end, and the losses are about the same."""
    settings = ["train.max_steps=200", "train.validate_every=100", "train.save_every=100", "train.log_every=50"]
    if place.dry:
        settings = ["train.max_steps=4", "train.validate_every=4", "train.save_every=2", "train.log_every=2"]

    losses = {}
    begun = time.monotonic()
    for way, setting in WAYS.items():
        command = [sys.executable, "-m", "transformer", "train", f"run_dir={way}", setting, *settings]
        command += ["train.average=2", "search.max_extra=10", f"train.device={place.device}"]
        eager = {"TORCHDYNAMO_DISABLE": "1"} if place.dry else {}
        status = call(place, command, place.limit - (time.monotonic() - begun), environment=eager)
        if status != 0:
            return Found(status, False, f"{way}: it did not come to its end")
        records = [json.loads(line) for line in (place.work / way / "metrics.jsonl").read_text("utf-8").splitlines()]
        losses[way] = [record["train/loss"] for record in records if "train/loss" in record]

    numbers = {"losses": losses, "seconds": round(time.monotonic() - begun, 1)}
    Measured(place.results, seconds=0.0).add("demo", numbers)
    pairs = list(zip(*losses.values(), strict=True))
    apart = max(abs(compiled / eager - 1.0) for eager, compiled in pairs)
    line = f"loss {losses['eager'][-1]:.3f} eager, {losses['compiled'][-1]:.3f} compiled"
    return Found(0, apart < APART, line)


class Corpus(NamedTuple):
    """What an experiment trains on, below the folder of corpora."""

    experiment: str
    folder: str
    train: str  # names of files, less the language
    dev: str
    test: str
    languages: tuple[str, str]
    suffix: str
    name: str  # of the test set in the results
    enough: float  # BLEU that shows that it learnt


MULTI30K = Corpus(
    "multi30k_en_de", "multi30k", "train", "val", "test_2016_flickr", ("en", "de"), "", "test_2016_flickr", 30
)
KFTT = Corpus("kftt_ja_en_small", "kftt", "train", "dev", "tune", ("ja", "en"), ".gz", "tune", 15)


def multi30k(place: Place) -> Found:
    """English to German, captions: as many epochs as the experiment has, in a quarter of its steps.

    A GPU computes so small a step in less time than its host takes to launch it, so larger ones cost nothing.
    """
    steps = ["train.tokens_per_step=16384", "train.max_steps=1800", "train.warmup_steps=250"]
    return training(
        place, MULTI30K, *steps, "train.learning_rate=5.9e-3", "train.save_every=50", "train.validate_every=900"
    )


def kftt(place: Place) -> Found:
    """Japanese to English, 440,000 pairs, base size, in steps that keep a GPU busy."""
    size = ["model.n_layers=6", "model.d_model=512", "model.d_ff=2048", "model.n_heads=8", "model.dropout=0.2"]
    steps = ["train.max_steps=7000", "train.tokens_per_step=25000", "train.validate_every=1000"]
    return training(place, KFTT, *size, *steps, f"train.compile={str(not place.dry).lower()}")


def training(place: Place, corpus: Corpus, *settings: str) -> Found:
    """An experiment by the public command, which fails where it does not come to its end in time."""
    data, begun = place.data, time.monotonic()
    if place.dry:
        data = place.work / "data"
        write_tiny_corpus(data, corpus)
    command = [sys.executable, "-m", "transformer", "train", f"experiment={corpus.experiment}", f"data.root={data}"]
    command += ["run_dir=run", f"train.device={place.device}", "train.precision=bf16", *settings]
    if place.dry:
        command += ["model.n_layers=1", "model.d_model=32", "model.d_ff=64", "model.n_heads=4"]
        command += ["tokenizer.vocab_size=400", "train.max_steps=20", "train.save_every=5", "train.validate_every=10"]
        command += ["train.tokens_per_step=2048", "train.max_tokens=2048"]
        command += ["tokenizer.target.vocab_size=400"] if corpus is KFTT else []

    run = place.work / "run"
    results = Measured(place.results, seconds=0.0)

    def watch() -> None:
        """Keep what the run has written of itself: its folder stays behind."""
        for key, numbers in records_of(run, corpus.folder):
            if key not in results:
                results.add(key, numbers)

    status = call(place, command, place.limit, grace=20.0, watch=watch)
    if not (run / "results.json").exists():
        return Found(status, False, "no results.json")

    scored = json.loads((run / "results.json").read_text(encoding="utf-8"))
    resolved = json.loads((run / "run.json").read_text(encoding="utf-8"))["resolved"]
    seconds = round(time.monotonic() - begun, 1)
    numbers = {"command_seconds": seconds, "resolved": resolved, "results": scored}
    results.add(f"{corpus.folder}/results", numbers)
    bleu = scored["test_sets"][corpus.name]["bleu"]
    line = f"BLEU {bleu:.2f} after {scored['steps']} steps and {scored['training_seconds']} s of training"
    return Found(status, status == 0 and (place.dry or bleu >= corpus.enough), line)


def records_of(run: Path, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of a run's metrics that are worth keeping, each under a name: its validations, and every 500th step."""
    path = run / "metrics.jsonl"
    for line in path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []:
        with suppress(ValueError):  # being written
            record = json.loads(line)
            if "dev/bleu" in record:
                yield f"{name}/dev/{record['step']}", record
            elif record.get("step", 1) % 500 == 0:
                yield f"{name}/train/{record['step']}", record


def write_tiny_corpus(root: Path, corpus: Corpus) -> None:
    """Files of the same names, of numbers in two languages."""
    words = (
        ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"],
        ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"],
    )
    draw, folder = random.Random(0), root / corpus.folder
    folder.mkdir(parents=True)
    for name, count in ((corpus.train, 500), (corpus.dev, 20), (corpus.test, 20)):
        numbers = [draw.choices(range(10), k=draw.randint(2, 9)) for _ in range(count)]
        for language, spelled in zip(corpus.languages, words, strict=True):
            text = "".join(" ".join(spelled[digit] for digit in line) + "\n" for line in numbers).encode()
            path = folder / f"{name}.{language}{corpus.suffix}"
            path.write_bytes(gzip.compress(text) if corpus.suffix else text)


# ---- the stages


STEPS = "--size=tiny --tokens=500 --steps=2 --warmup=2"

STAGES: dict[str, dict[str, Part]] = {
    "check": {
        "facts": Part(script("micro", "facts", dry="facts --size=tiny"), 20),
        "demo": Part(demo, 60),
        "kernel_tests": Part(kernel_tests, 85),
        "packed_compiled": Part(
            script(
                "steps",
                "--settings=packed-compiled-graphs",
                "--steps=300",
                "--profile=5",
                dry=f"{STEPS} --settings=packed-compiled-graphs --profile=1",
                timed=False,
            ),
            110,
        ),
        "micro": Part(script("micro", dry="--size=tiny"), 70),
        "packed_eager": Part(
            script(
                "steps",
                "--settings=packed-graphs,packed-eager",
                "--steps=60",
                "--warmup=10",
                dry=f"{STEPS} --settings=packed-graphs,packed-eager",
                timed=False,
            ),
            30,
        ),
        "decoding": Part(script("decode", dry="--size=tiny --sentences=12"), 55),
        "command_tests": Part(command_tests, 95),
    },
    "compare": {
        # Peers hold the logits of a whole step, padded: of 25,000 tokens these take more than 80 GB.
        "variants": Part(
            script("variants", "--tokens=12500", dry="--size=tiny --tokens=500 --rounds=1 --steps=2 --warmup=1"), 210
        ),
        "big": Part(
            script(
                "steps",
                "--size=big",
                "--settings=packed-compiled-graphs",
                "--steps=60",
                "--warmup=10",
                dry=f"{STEPS} --settings=padded-eager",
                timed=False,
            ),
            90,
        ),
        "multi30k": Part(multi30k, 200),
    },
    "learn": {"kftt": Part(kftt, 510)},
    "kernels": {
        "facts": Part(script("micro", "facts", dry="facts --size=tiny"), 20),
        "tests": Part(new_kernel_tests, 115),
        "attention": Part(script("micro", "short_attention", dry="short_attention --size=tiny"), 120),
        "loss": Part(script("micro", "triton_loss", dry="triton_loss --size=tiny"), 50),
        "variants": Part(
            script(
                "variants",
                "--variants=packed-compiled-graphs,triton",
                "--rounds=8",
                dry="--variants=packed-eager --size=tiny --tokens=500 --rounds=1 --steps=2 --warmup=1",
            ),
            205,
        ),
    },
}


def stop(*_: object) -> None:
    """Whoever ends us ends what we started, too."""
    sys.exit(143)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    sys.exit(main(sys.argv[1:]))
