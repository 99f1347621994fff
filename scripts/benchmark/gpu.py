"""The stages of gpu.sh: parts, one after the other, each a process with a limit and an exit status of its own.

A stage leaves three files in --out: STAGE.jsonl has every number, one measurement a line, written when it was known;
STAGE.txt is what the processes printed; summary.json says how each part ended. A part that fails or runs out of time
stops no other. Started again with the same --out, or with --before naming a folder that holds these files, a stage does
what has not passed yet, and each part measures what is not in STAGE.jsonl yet.

`minute` is what one call on a lent machine has time for, `minute --second` what a second one has. Their parts come in
the order of their worth: each may take as long as its own limit, none is kept for those behind it, and one that no
longer fits is skipped. After each part, decisions.py says which numbers decide something.
"""

import argparse
import gzip
import importlib.util
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

from decisions import BEST, MINUTE, SECOND, Decision, decided, winners
from measured import Measured, read

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
WHOLE = 530.0  # seconds of a stage, from the start of gpu.sh

# Which tests of test_gpu.py compile or run whole commands; all others are tests of kernels and of the model.
COMMANDS = "compiled or learns or resumes or nothing_set"
TRIED = "nothing_set"  # of these, in a dry run
NEW = "triton or sentence_attention or add_norm"  # those of kernels that are no default
WIDE = "triton_attention and not -64-"  # of these, what is not of the width of base's heads
RANKS = "share_a_gpu or over_nccl"
DECIDING = f"(replayed or ({NEW}) and not ({WIDE}) and not learns) and not ({RANKS})"

OUTCOME = re.compile(r"^\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (\S.*?) *$", re.MULTILINE)


class Place(NamedTuple):
    """Where a part works, and with what."""

    dry: bool
    data: Path
    results: Path  # STAGE.jsonl
    log: Path  # what its processes print is appended here
    work: Path  # a folder of its own, kept for the next start
    limit: float  # seconds
    caches: dict[str, str]  # of what is compiled, as variables of the environment

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
    """One thing to do, and the seconds that it takes.

    These are kept for it, and it has more where the parts before it left some over; with `most`, none are kept, it has
    at most so many, and it is skipped where fewer than `seconds` are left.
    """

    run: Callable[[Place], Found]
    seconds: float
    most: float | None = None


class Stage(NamedTuple):
    """What one call does."""

    parts: dict[str, Part]
    seconds: float = WHOLE
    decisions: tuple[Decision, ...] = ()


def main(arguments: list[str], known: dict[str, Stage] | None = None) -> int:
    known = known or STAGES
    parser = argparse.ArgumentParser(prog="gpu.sh", description="Measure, test and train on a GPU, nine minutes each.")
    parser.add_argument("stage", choices=[name for name in known if not name.endswith(SECOND_CALL)], help="what to do")
    parser.add_argument("parts", nargs="*", metavar="PART", help="of the stage (default: all)")
    parser.add_argument("--second", action="store_true", help="what the stage leaves to a second call")
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
    parser.add_argument("--patience", type=float, default=1.0, help="all limits, so many times (default: %(default)s)")
    args = parser.parse_args(arguments)
    stage = known.get(args.stage + SECOND_CALL if args.second else args.stage)
    if stage is None:
        parser.error(f"{args.stage} has no second call")
    if unknown := set(args.parts) - set(stage.parts):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(stage.parts)}")
    deadline = args.begun + args.patience * stage.seconds

    # What an earlier start has found.
    copies = args.work / args.stage / "found"  # where a second call finds what the first wrote
    if args.before is None and args.second and copies.is_dir():
        args.before = copies
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
    asked = args.parts or list(stage.parts)
    wanted = [name for name in asked if not verdicts.get(name, {}).get("passed")]
    if len(wanted) < len(asked):
        passed = ", ".join(name for name in asked if name not in wanted)
        print(f"passed before: {passed} (to measure again, choose another --out)", flush=True)
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": str(args.work.resolve() / "inductor"),
        "TRITON_CACHE_DIR": str(args.work.resolve() / "triton"),
    }
    for index, name in enumerate(wanted):
        part, left = stage.parts[name], deadline - time.time()
        kept = sum(stage.parts[other].seconds for other in wanted[index + 1 :])
        limit = 600.0 if args.dry_run else limit_of(part, left, kept=kept, patience=args.patience)
        if limit is None:
            said = f"skipped: it takes {part.seconds:.0f} s, and {max(0.0, left):.0f} s are left"
            verdicts[name] = {"passed": False, "said": said}
            write(summary_path, facts | {"stages": stages})
            print(f"{name}: {said}", flush=True)
            continue
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
            caches={} if part.most is None else caches,
        )
        verdicts[name] = {"passed": False, "said": "begun", "limit": round(limit, 1)}
        write(summary_path, facts | {"stages": stages})

        begun = time.time()
        log_begins = place.log.stat().st_size if place.log.exists() else 0
        try:
            found = part.run(place)
        except (OSError, ValueError, KeyError) as error:  # the other parts go on
            found = Found(None, False, f"{type(error).__name__}: {error}")
        seconds = round(time.time() - begun, 1)
        verdicts[name] |= {"passed": found.passed, "exit_status": found.status, "seconds": seconds, "said": found.line}
        write(summary_path, facts | {"stages": stages})
        print(f"{name}: {'passed' if found.passed else 'FAILED'} in {seconds} s: {found.line}", flush=True)
        if not found.passed:
            print("\n".join(text_from(place.log, log_begins).split("\n")[-40:]), flush=True)
        tell(stage.decisions, names["jsonl"], facts)

    tell(stage.decisions, names["jsonl"], facts, what_is_open=not args.parts)
    if stage.decisions:
        copies.mkdir(parents=True, exist_ok=True)
        for path in filter(Path.exists, (*names.values(), summary_path)):
            shutil.copy(path, copies)
    return 0 if all(verdicts.get(name, {}).get("passed") for name in asked) else 1


def tell(decisions: tuple[Decision, ...], results: Path, facts: dict[str, Any], *, what_is_open: bool = False) -> None:
    """Print and write what has been decided since the last time, or also what could not be."""
    found = read(results)
    for key, record in decided(decisions, found, card=facts["gpu"], capability=facts["capability"]):
        if what_is_open or record["verdict"] != "undecided":
            Measured(results, seconds=0.0).add(key, record)
            print(f"  {record['line']}", flush=True)


def limit_of(part: Part, left: float, *, kept: float, patience: float) -> float | None:
    """The seconds that a part may take, of those that are left; None: it does not fit any more."""
    if part.most is None:
        return max(1.0, left - kept)
    return min(patience * part.most, left) if left >= part.seconds else None


def machine() -> dict[str, Any]:
    """The device, the driver and the versions."""
    import torch

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    on_gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "capability": "{}.{}".format(*torch.cuda.get_device_capability()) if on_gpu else None,
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
            env=os.environ | place.caches | (environment or {}),
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
            f"{'/'.join(key.split('/')[2:])} {numbers['target_tokens_per_second']:,.0f} tokens/s"
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
    others = sum(counts.values()) - counts.get("passed", 0)
    not_passed = None if others == 0 and status != 0 else others  # None: it did not come to its end
    numbers = {"exit_status": status, "counts": counts, "not_passed": not_passed, "tests": outcomes}
    Measured(place.results, seconds=0.0).add(f"tests/{name}", numbers)
    passed = status == 0 and set(counts) == {"passed"}
    return Found(status, passed, ", ".join(f"{count} {word}" for word, count in counts.items()) or "no test ended")


def outcomes_of(log: str) -> dict[str, str]:
    """The outcome of each test that ended, by its name, from the lines of `pytest -v -n`."""
    return {test.partition("::")[2]: word.lower() for word, test in OUTCOME.findall(log)}


def deciding_tests(place: Place) -> Found:
    """Those of what a minute decides; a dry run tries another."""
    return tests(place, "minute", TRIED if place.dry else DECIDING)


def rank_tests(place: Place) -> Found:
    """Two ranks that share the GPU and replay, and NCCL with one rank; a dry run tries another test."""
    return tests(place, "ranks", TRIED if place.dry else RANKS)


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
SECOND_CALL = " --second"  # behind a stage's name
SEARCH = "--settings=beam4-131072"  # of a search that decides
BATCHES = f"{SEARCH},beam4-524288"


def steps(size: str, *arguments: str) -> Callable[[Place], Found]:
    """A part that times replayed, compiled steps, and looks at twenty of them by kernel.

    Batches have up to nine shapes, each of which is recorded the second time that it comes: in the warm-up, nearly all.
    """
    settings = "--settings=packed-compiled-graphs"
    dry = " ".join([STEPS, settings, "--profile=1", *(argument for argument in arguments if "--set" in argument)])
    return script("steps", f"--size={size}", settings, "--warmup=60", "--profile=20", *arguments, dry=dry, timed=False)


def best(place: Place) -> Found:
    """The baseline again with all that has won."""
    won = winners(MINUTE, read(place.results))
    if not won:
        return Found(0, True, "nothing has won: the baseline is the best")
    known = set(read(place.results))
    found = steps("base", "--steps=100", *(f"--set={setting}" for setting in won))(place)
    for key, numbers in read(place.results).items():
        if key not in known and "error" not in numbers:
            Measured(place.results, seconds=0.0).add(BEST, numbers | {"name": BEST, "measured_as": key})
    return found


def engine(place: Place) -> Found:
    """CTranslate2's search, where it is installed."""
    if importlib.util.find_spec("ctranslate2") is None:
        return Found(0, True, "ctranslate2 is not installed")
    dry = f"{SEARCH} --size=tiny --sentences=12 --ways=ctranslate2"
    return script("decode", SEARCH, "--ways=ctranslate2", dry=dry)(place)


def peers(place: Place) -> Found:
    """What has won beside what one would else use, in turns."""
    won = [f"--set={setting}" for setting in winners(MINUTE, read(place.results))]
    names = "--variants=packed-compiled-graphs,marian,nn.Transformer-compiled"  # the slowest start last
    dry = "--variants=packed-eager,nn.Transformer --size=tiny --tokens=500 --rounds=1 --steps=2 --warmup=1"
    return script("variants", names, "--tokens=12500", "--warmup=40", "--rounds=4", *won, dry=" ".join([dry, *won]))(
        place
    )


STAGES = {
    "check": Stage(
        {
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
        }
    ),
    "compare": Stage(
        {
            # Peers hold the logits of a whole step, padded: of 25,000 tokens these take more than 80 GB.
            "variants": Part(
                script("variants", "--tokens=12500", dry="--size=tiny --tokens=500 --rounds=1 --steps=2 --warmup=1"),
                210,
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
        }
    ),
    "learn": Stage({"kftt": Part(kftt, 510)}),
    "kernels": Stage(
        {
            "facts": Part(script("micro", "facts", dry="facts --size=tiny"), 20),
            "tests": Part(new_kernel_tests, 115),
            "attention": Part(script("micro", "short_attention", dry="short_attention --size=tiny"), 90),
            "norm": Part(script("micro", "add_norm", dry="add_norm --size=tiny"), 50),
            "loss": Part(script("micro", "triton_loss", dry="triton_loss --size=tiny"), 40),
            "variants": Part(
                script(
                    "variants",
                    "--variants=packed-compiled-graphs,triton,fused",
                    "--rounds=8",
                    dry="--variants=packed-eager --size=tiny --tokens=500 --rounds=1 --steps=2 --warmup=1",
                ),
                205,
            ),
        }
    ),
    "minute": Stage(
        {
            "card": Part(script("micro", "card", dry="card --size=tiny"), 10, 45),
            "attention": Part(script("micro", "short_attention", dry="short_attention --size=tiny"), 70, 90),
            "norm": Part(script("micro", "add_norm", dry="add_norm --size=tiny"), 40, 90),
            "loss": Part(script("micro", "triton_loss", dry="triton_loss --size=tiny"), 15, 40),
            "baseline": Part(steps("base", "--steps=100"), 50, 90),
            "best": Part(best, 45, 90),
            "search": Part(
                script(
                    "decode",
                    BATCHES,
                    "--ways=eager,replayed",
                    dry=f"{BATCHES} --size=tiny --sentences=12 --ways=eager,replayed",
                ),
                40,
                75,
            ),
            "ranks": Part(rank_tests, 45, 110),  # four trainings, one after the other
            "big": Part(steps("big", "--steps=60"), 45, 90),
            "tests": Part(deciding_tests, 60, 140),
        },
        550,
        MINUTE,
    ),
    f"minute{SECOND_CALL}": Stage({"engine": Part(engine, 20, 40), "peers": Part(peers, 100, 140)}, 150, SECOND),
}  # of a minute, whatever decides something, in the order of its worth; those that compile have 90 seconds


def stop(*_: object) -> None:
    """Whoever ends us ends what we started, too."""
    sys.exit(143)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    sys.exit(main(sys.argv[1:]))
