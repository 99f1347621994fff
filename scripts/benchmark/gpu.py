"""The stages of gpu.sh, one after the other, each with a share of the time and a result of its own.

A stage is a process, or two; what it prints goes to NAME.txt, what it found to NAME.json, with the device, the versions
and the exact command. One that fails or runs out of time does not stop the others.
"""

import argparse
import gzip
import json
import os
import platform
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
WHOLE = 530  # seconds, from the start of gpu.sh


class Place(NamedTuple):
    """Where a stage works, and with what."""

    dry: bool
    data: Path
    log: Path  # what its processes print is appended here
    work: Path  # a folder of its own, removed at the end
    limit: float  # seconds

    @property
    def device(self) -> str:
        """As the package and the tests name it."""
        return "cpu" if self.dry else "cuda"


class Found(NamedTuple):
    """What a stage did."""

    commands: list[str]
    passed: bool
    numbers: dict[str, Any]
    line: str  # the same in a few words


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="gpu.sh", description="Tests, step times and a training on a GPU.")
    parser.add_argument(
        "stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)} (default: these), {', '.join(ALONE)}"
    )
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, at a tiny size")
    parser.add_argument(
        "--data", type=Path, default=Path(".gpu/data"), help="holds multi30k/ and kftt/ (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="where results go (default: %(default)s)")
    parser.add_argument("--begun", type=float, default=time.time(), help="when the clock started (default: now)")
    args = parser.parse_args(arguments)
    names = args.stages or list(STAGES)
    every = STAGES | ALONE
    if unknown := set(names) - set(every):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(every)}")
    args.out.mkdir(parents=True, exist_ok=True)
    facts = machine() | {"started_as": shlex.join(["scripts/benchmark/gpu.py", *arguments]), "dry_run": args.dry_run}
    print(f"{facts['gpu'] or 'no GPU'}, torch {facts['torch']}, Python {facts['python']}", flush=True)
    summary: dict[str, Any] = {}
    for index, name in enumerate(names):
        begun, rest = time.time(), sum(every[other].share for other in names[index:])
        limit = 900.0 if args.dry_run else (args.begun + WHOLE - begun) * every[name].share / rest
        log = args.out / f"{name}.txt"
        log.write_text("", encoding="utf-8")
        with TemporaryDirectory() as work:
            try:
                found = every[name].run(Place(args.dry_run, args.data.resolve(), log.resolve(), Path(work), limit))
            except (OSError, ValueError, KeyError) as error:  # the other stages go on
                found = Found([], False, {}, f"{type(error).__name__}: {error}")
        verdict = {"passed": found.passed, "seconds": round(time.time() - begun, 1), "limit": round(limit, 1)}
        summary[name] = verdict | {"said": found.line}
        report = facts | verdict | {"commands": found.commands} | found.numbers
        write(args.out / f"{name}.json", report)
        write(args.out / "summary.json", facts | {"stages": summary})
        print(f"{name}: {'passed' if found.passed else 'FAILED'} in {verdict['seconds']} s: {found.line}", flush=True)
        if not found.passed:
            print("\n".join(log.read_text(encoding="utf-8", errors="replace").split("\n")[-60:]), flush=True)
    return 0 if all(stage["passed"] for stage in summary.values()) else 1


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
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def call(place: Place, command: list[str], limit: float, **environment: str) -> int | None:
    """Run it with a share of the time; its exit status, or None where SIGTERM had to end it.

    It is a session of its own, so that nothing it started lives on.
    """
    with place.log.open("a", encoding="utf-8") as log:
        log.write(f"$ {shlex.join(command)}\n\n")
        log.flush()
        process = subprocess.Popen(
            command,
            cwd=place.work,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            return None
        finally:
            with suppress(ProcessLookupError):  # nothing of it is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def tests(place: Place) -> Found:
    """The tests marked gpu; a dry run leaves out what compiles for minutes or trains twice."""
    report = place.work / "tests.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-n",
        "0",
        "-q",
        "--show-capture=no",
        f"--junitxml={report}",
    ]
    command += ["-p", "xdist", "-p", "pytest_timeout", "-p", "no:cacheprovider"]  # and none that is there by chance
    command += ["-W", "default"]  # what other releases warn of at import is not ours
    command += ["-c", str(ROOT / "pyproject.toml"), str(ROOT / "tests/test_gpu.py")]
    command += ["-k", "not compiled and not resumes"] if place.dry else []
    names = {"TRANSFORMER_TEST_DEVICE": place.device, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    status = call(place, command, place.limit, **names)
    if not report.exists():
        return Found([shlex.join(command)], False, {"exit_status": status}, "no report")
    cases = ElementTree.parse(report).getroot().iter("testcase")
    found = {str(case.get("name")): (outcome_of(case), float(case.get("time", 0))) for case in cases}
    counts = {word: sum(word == outcome for outcome, _ in found.values()) for word in ("passed", "failed", "skipped")}
    passed = status == 0 and counts["passed"] > 0 and counts["skipped"] == 0
    line = ", ".join(f"{count} {word}" for word, count in counts.items())
    return Found([shlex.join(command)], passed, {"exit_status": status, "counts": counts, "tests": found}, line)


def outcome_of(case: ElementTree.Element) -> str:
    if case.find("skipped") is not None:
        return "skipped"
    return "passed" if case.find("failure") is None and case.find("error") is None else "failed"


def steps(place: Place) -> Found:
    """steps.py, whose page is its text and whose numbers are its JSON."""
    output = place.work / "steps.json"
    command = [sys.executable, str(ROOT / "scripts/benchmark/steps.py"), f"--output={output}"]
    command += [f"--device={place.device}", f"--seconds={0.9 * place.limit:.0f}"]
    command += ["--size=tiny", "--tokens=1000", "--steps=3", "--warmup=2"] if place.dry else []
    eager = {"TORCHDYNAMO_DISABLE": "1"} if place.dry else {}  # compiling takes minutes
    status = call(place, command, place.limit, **eager)
    numbers = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {"results": []}
    lines = [
        f"{r['layout']} {'compiled' if r['compiled'] else 'eager'} {r['target_tokens_per_second']:,.0f} tokens/s"
        for r in numbers["results"]
        if "steps" in r
    ]
    return Found([shlex.join(command)], status == 0, numbers, "; ".join(lines) or "no setting was measured")


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
KFTT = Corpus("kftt_ja_en", "kftt", "train", "dev", "tune", ("ja", "en"), ".gz", "tune", 15)


def multi30k(place: Place) -> Found:
    """English to German, captions."""
    return training(place, MULTI30K, "train.validate_every=2000")


def kftt(place: Place) -> Found:
    """Japanese to English, 440,000 pairs, base size."""
    return training(place, KFTT, "train.max_steps=20000")


def training(place: Place, corpus: Corpus, *settings: str) -> Found:
    """An experiment by the public command; where the time runs out, the same run ended where it stands."""
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
    ending = max(30.0, 0.15 * place.limit)  # averaging and the test set
    commands, limit = [command], place.limit - ending
    status = call(place, command, limit)
    if status is None:
        commands.append([*command, "train.max_steps=1"])  # it has more behind it: it averages, scores and ends
        status = call(place, commands[-1], place.limit - (time.monotonic() - begun))
    said = list(map(shlex.join, commands))
    run = place.work / "run"
    if not (run / "results.json").exists():
        return Found(said, False, {"exit_status": status}, "no results.json")
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    resolved = json.loads((run / "run.json").read_text(encoding="utf-8"))["resolved"]
    metrics = (run / "metrics.jsonl").read_text(encoding="utf-8").split("\n")
    curve = [record for record in map(json.loads, filter(None, metrics)) if "dev/bleu" in record]
    numbers = {"exit_status": status, "ended_early": len(commands) > 1, "resolved": resolved, "results": results}
    bleu = results["test_sets"][corpus.name]["bleu"]
    line = f"BLEU {bleu:.2f} after {results['steps']} steps and {results['training_seconds']} s of training"
    return Found(said, status == 0 and (place.dry or bleu >= corpus.enough), numbers | {"curve": curve}, line)


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


class Stage(NamedTuple):
    """What to run, and its share of the time."""

    run: Callable[[Place], Found]
    share: float


STAGES = {"tests": Stage(tests, 0.3), "steps": Stage(steps, 0.33), "multi30k": Stage(multi30k, 0.37)}
ALONE = {"kftt": Stage(kftt, 1.0)}  # wants all the time, and is done when it is asked for

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
