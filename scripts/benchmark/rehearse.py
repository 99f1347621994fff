"""A rehearsal of WMT 2014: what each stage of `experiment=wmt14_en_de_base` takes, and what a killed stage costs.

    python scripts/benchmark/rehearse.py --pairs 4500000 --folder /var/tmp/rehearsal --output wmt-rehearsal

It makes a data set of so many invented pairs (`synthetic.py`) in the layout of `wmt/wmt14` on the hub. Then it starts
the public command, `transformer train experiment=wmt14_en_de_base data.root=... run_dir=...`, five times. Four times it
kills the command with SIGKILL: in the middle of the copy of the data set, of the tokenizer's training, of the encoding,
and of the training between two checkpoints. The fifth start goes on to the averaged model and its BLEU. Each start but
the first also shows how long it takes to be back at the place where the one before was killed.

A stage begins with a line of the command's log, or where a file tells; it ends where the next one begins. While it
lasts, the resident memory of the command and its children is read from /proc ten times a second, with the files that
are mapped into it.

What differs from the experiment: a few steps with a checkpoint after every second one instead of 1,500, the loss of
every step in the log, and shorter dev and test sets (`--sentences`). Further overrides may follow, such as
`train.tokens_per_step=1000`.

The script may be interrupted: the same command goes on with the first start that has not come to its end (whose way
back is then too short). Numbers go to OUTPUT.json, and the page that is made of them to OUTPUT.md.
"""

import argparse
import json
import os
import platform
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from itertools import compress, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
from pyarrow import parquet
from synthetic import SIDES, Generator

ROOT = Path(__file__).resolve().parents[2]
FULL = 4_500_000  # pairs; the hub's train split has 4,508,785
SHARDS = 3  # files of the train split
ROWS = 1_000  # of a row group, as the hub's library writes them by default
LONGEST = 100  # words of a dev or test sentence: news has no outliers
STEPS, SAVE_EVERY = 10, 2  # five checkpoints, as many as the experiment averages
SET_HERE = ("data.root", "data.store_dir", "run_dir", "train.log_every", "train.max_steps", "train.save_every")
POLL = 0.1  # seconds
MIB = 2**20


def main(arguments: list[str]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what it started ends with it
    args = parse(arguments)
    folder = args.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    check_same(folder / "arguments.json", {"pairs": args.pairs, "sentences": args.sentences, "more": args.overrides})

    made = once(folder / "corpus.json", lambda: make(folder / "wmt14", args.pairs, sentences=args.sentences))
    command = training(folder, args.overrides)
    legs: list[dict[str, Any]] = []
    for name, target in targets(made, args.pairs):
        previous = Place(*legs[-1]["place"]) if legs else None
        record = folder / f"leg-{name}.json"
        legs.append(once(record, partial(start, name, command, folder, target=target, previous=previous)))

    facts = gather(args, folder, made=made, legs=legs, command=["transformer", *command[3:]])
    shown = shlex.join(["python", "scripts/benchmark/rehearse.py", *arguments])
    facts = {"command": shown} | facts
    Path(f"{args.output}.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    Path(f"{args.output}.md").write_text(page(facts), encoding="utf-8")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=FULL, help="of the train split (default: %(default)s)")
    parser.add_argument("--sentences", type=int, default=500, help="of the dev and the test set (default: %(default)s)")
    parser.add_argument("--folder", type=Path, required=True, help="where all of it goes; the same one to go on")
    parser.add_argument("--output", required=True, help="OUTPUT.json and OUTPUT.md are written")
    parser.add_argument("overrides", nargs="*", help="more overrides of the experiment, such as model.n_layers=1")
    args = parser.parse_args(arguments)
    fixed = [override for override in args.overrides if override.partition("=")[0] in SET_HERE]
    if fixed:
        parser.error(f"{fixed[0]}: this script sets it, since it reads the log by it")
    return args


def check_same(path: Path, wanted: dict[str, Any]) -> None:
    """Leave a note of what the folder is for; end where it is for something else."""
    before = once(path, lambda: wanted)
    if before != wanted:
        sys.exit(f"error: {path.parent}: holds a rehearsal of {json.dumps(before)}: choose another --folder")


def once(path: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the file says, after `make` has been called and its result written there, if it has not been yet."""
    if not path.exists():
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(make(), indent=1) + "\n", encoding="utf-8")
        unfinished.rename(path)
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


# ---- the data set ---------------------------------------------------------------------------------------------------


def make(folder: Path, pairs: int, *, sentences: int) -> dict[str, Any]:
    """Write the three splits of `de-en` as the hub has them: Parquet, one column `translation` of both languages."""
    began = time.perf_counter()
    generator = Generator()
    (folder / "de-en").mkdir(parents=True, exist_ok=True)

    text_bytes = 0
    per_shard = -(-pairs // SHARDS)
    for shard in range(SHARDS):
        path = folder / "de-en" / f"train-{shard:05}-of-{SHARDS:05}.parquet"
        blocks = generator.blocks(min(per_shard, pairs - shard * per_shard))
        text_bytes += write_shard(path, (sides for sides, _ in blocks))
    for split in ("validation", "test"):
        path = folder / "de-en" / f"{split}-00000-of-00001.parquet"
        text_bytes += write_shard(path, [ordinary(generator, sentences)])

    configs = "".join(f"  - split: {split}\n    path: de-en/{split}-*\n" for split in ("train", "validation", "test"))
    (folder / "README.md").write_text(
        "---\ndataset_info:\n- config_name: de-en\n  features:\n  - name: translation\n    dtype:\n"
        "      translation:\n        languages: [de, en]\n"
        f"configs:\n- config_name: de-en\n  data_files:\n{configs}---\n",
        encoding="utf-8",
    )
    return {"seconds": time.perf_counter() - began, "text_bytes": text_bytes, "bytes": size_of(folder)}


def ordinary(generator: Generator, sentences: int) -> list[list[str]]:
    """So many pairs without an empty side or an outlier in length: a dev or test set."""
    kept: list[list[str]] = [[], []]
    while len(kept[0]) < sentences:
        for sides, counts in generator.blocks(2 * sentences):
            fit = (counts.min(axis=0) > 0) & (counts.max(axis=0) <= LONGEST)
            for own, side in zip(kept, sides, strict=True):
                own.extend(compress(side, fit.tolist()))
    return [own[:sentences] for own in kept]


def write_shard(path: Path, blocks: Iterable[list[list[str]]]) -> int:
    """Write a file of the data set; the bytes that its sentences take as lines of text."""
    schema = pyarrow.schema([("translation", pyarrow.struct([("de", pyarrow.string()), ("en", pyarrow.string())]))])
    written = 0
    with parquet.ParquetWriter(path, schema) as writer:
        for sides in blocks:
            columns = dict(zip(SIDES, map(pyarrow.array, sides), strict=True))
            rows = pyarrow.StructArray.from_arrays([columns["de"], columns["en"]], ["de", "en"])
            writer.write_table(pyarrow.table({"translation": rows}, schema=schema), row_group_size=ROWS)
            written += sum(len(sentence.encode()) + 1 for side in sides for sentence in side)
    return written


# ---- the command, and where it is -----------------------------------------------------------------------------------


def training(folder: Path, overrides: list[str]) -> list[str]:
    """The public command, with few steps; the later of two overrides of one key counts."""
    settings = {
        "data.root": str(folder / "wmt14"),
        "run_dir": str(folder / "runs" / "wmt14_en_de_base"),
        "train.max_steps": str(STEPS),
        "train.save_every": str(SAVE_EVERY),
        "train.log_every": "1",
    } | dict(override.split("=", 1) for override in overrides)
    typed = [f"{key}={value}" for key, value in settings.items()]
    return [sys.executable, "-m", "transformer", "train", "experiment=wmt14_en_de_base", *typed]


STAGES = {  # in order; the number says which of them are one after the other, and which take turns
    "begin": (0, "start: imports and settings"),
    "copy": (1, "copying the data set"),
    "read": (2, "reading and screening the text"),
    "tokenizer": (3, "training the tokenizer"),
    "encode": (4, "encoding into the store"),
    "build": (5, "model, and a look at the first epoch"),
    "first": (6, "the first step, with the plan of the epoch"),
    "step": (6, "a step"),
    "validate": (6, "validation, greedy"),
    "save": (6, "a checkpoint"),
    "average": (7, "averaging the last checkpoints"),
    "test": (8, "translating and scoring the test set, beam 4"),
}
TRAINING = 6
LINES = (  # of the log, and the stage that begins with each
    (r"copying ", "copy"),
    (r"training the tokenizer ", "tokenizer"),
    (r"encoding ", "encode"),
    (r"data ready: ", "build"),
    (r"the first epoch: ", "first"),
    (r"step \d+: dev ", "save"),
    (r"averaged ", "test"),
)


def stage_after(line: str, stage: str) -> str:
    """The stage that the command is in after this line of its log."""
    for pattern, begun in LINES:
        if re.match(pattern, line):
            return begun
    if logged := re.match(r"step (\d+): loss ", line):
        step = int(logged[1])
        return "validate" if step == STEPS else "step" if step % SAVE_EVERY else "save"
    if saved := re.match(r"step (\d+): saved", line):
        return "average" if int(saved[1]) == STEPS else "step"
    return stage


class Place(NamedTuple):
    """How far the command has come: the number of the stage, and bytes, seconds or steps of it. Places are ordered."""

    number: int
    amount: float


def targets(made: dict[str, Any], pairs: int) -> list[tuple[str, Place | None]]:
    """The starts of the command, and the place where each is killed."""
    return [
        ("copy", Place(1, made["text_bytes"] / 2)),
        ("tokenizer", Place(3, 5.0 * min(1.0, pairs / 1e6))),  # it says nothing of how far it is: after some seconds
        ("encode", Place(4, 60.0 * pairs)),  # about half: a pair has 33 + 33 pieces of two bytes each
        ("train", Place(TRAINING, 2 * SAVE_EVERY + 1)),  # a step after a checkpoint, while the next one is computed
        ("end", None),
    ]


# ---- watching -------------------------------------------------------------------------------------------------------


@dataclass
class Span:
    """A stage, once: seconds since the command's start, and the most memory and disk that was seen."""

    stage: str
    began: float
    ended: float = 0.0
    peak_rss: int = 0
    peak_disk: int = 0  # of all that the command has written
    is_complete: bool = False


@dataclass
class Leg:
    """One start of the command, up to its end."""

    name: str
    status: int
    seconds: float
    place: Place  # where it was at the end
    back: float | None  # seconds until it was where the one before was killed
    spans: list[Span]


def start(
    name: str, command: list[str], folder: Path, *, target: Place | None, previous: Place | None
) -> dict[str, Any]:
    """A start of the command that ends as it should: killed, or with status 0."""
    leg = watch(name, command, folder, target=target, previous=previous)
    if leg.status != (0 if target is None else -signal.SIGKILL):
        log = folder / f"leg-{name}.log"
        tail = "".join(f"\n  {line}" for line in log.read_text(encoding="utf-8").splitlines()[-5:])
        sys.exit(f"error: {name}: the command ended with status {leg.status}: see {log}{tail}")
    return asdict(leg)


def watch(name: str, command: list[str], folder: Path, *, target: Place | None, previous: Place | None) -> Leg:
    """Run a command until its end, or until it has come to `target`: then kill it. Its log is in `leg-NAME.log`."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HOME": str(folder / "hf")}
    began = time.perf_counter()
    spans = [Span("begin", 0.0)]
    back = None
    step = 0

    log = folder / f"leg-{name}.log"
    with log.open("wb") as err, log.open(encoding="utf-8", errors="replace") as lines:
        out = log.with_suffix(".out").open("wb")
        with out, subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=err) as process:
            try:
                while True:
                    status = process.poll()
                    now = time.perf_counter() - began

                    # Where it is.
                    for line in whole_lines(lines):
                        enter(spans, stage_after(line, spans[-1].stage), now, line=line)
                        step = int(found[1]) if (found := re.match(r"step (\d+): loss", line)) else step
                    if spans[-1].stage == "copy" and copies(folder) == 3:
                        enter(spans, "read", now)
                    place = place_of(spans[-1], now, folder=folder, step=step)
                    if back is None and previous is not None and place >= previous:
                        back = now

                    # What it uses.
                    last = spans[-1]
                    last.peak_rss = max(last.peak_rss, resident(process.pid))
                    last.peak_disk = max(last.peak_disk, size_of(folder / "runs") + size_of(folder / "hf"))
                    last.ended = now

                    if status is not None:
                        last.is_complete = status == 0
                        return Leg(name, status, now, place, back, spans)
                    if target is not None and place >= target:
                        process.kill()
                        return Leg(name, process.wait(), now, place, back, spans)
                    time.sleep(POLL)
            finally:
                process.kill()


def whole_lines(file: Any) -> Iterator[str]:
    """The lines that have been written to an open file since the last look; a half one waits."""
    while True:
        start = file.tell()
        line = file.readline()
        if not line.endswith("\n"):
            file.seek(start)
            return
        yield line.rstrip("\n")


def enter(spans: list[Span], stage: str, now: float, *, line: str = "") -> None:
    """Begin a stage where the log says so: another one, or the next step."""
    is_next_step = stage == "step" and re.match(r"step \d+: loss", line)
    if stage != spans[-1].stage or is_next_step:
        spans[-1].ended = now
        spans[-1].is_complete = True
        spans.append(Span(stage, now))


def place_of(span: Span, now: float, *, folder: Path, step: int) -> Place:
    """How far the command has come, by what can be seen of each stage from outside."""
    number = STAGES[span.stage][0]
    store = folder / "runs" / ".store"
    match span.stage:
        case "copy":
            return Place(number, size_of(store / "copies"))
        case "encode":
            return Place(number, sum(size_of(path) for path in store.glob(".tmp-*/*.ids")))
    return Place(number, step if number == TRAINING else now - span.began)


def copies(folder: Path) -> int:
    """How many splits have been copied to their end."""
    found = (folder / "runs" / ".store" / "copies").glob("*/about.json")
    return sum(not path.parent.name.startswith(".") for path in found)


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; they may vanish in the meantime."""
    total = 0
    for each in [path] if path.is_file() else list(path.rglob("*")):
        try:
            total += each.stat().st_size if each.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def resident(pid: int) -> int:
    """Bytes of memory that a process and its descendants have, files mapped into it included."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = re.search(r"^VmRSS:\s*(\d+) kB$", status, re.MULTILINE)
    own = int(found[1]) * 1024 if found else 0
    return own + sum(resident(int(child)) for child in children)


# ---- what came of it ------------------------------------------------------------------------------------------------


def gather(
    args: argparse.Namespace, folder: Path, *, made: dict[str, Any], legs: list[dict[str, Any]], command: list[str]
) -> dict[str, Any]:
    """All numbers of the page."""
    run = folder / "runs" / "wmt14_en_de_base"
    results = json.loads((run / "results.json").read_bytes())
    data = json.loads((run / "data.json").read_bytes())
    resolved = json.loads((run / "run.json").read_bytes())["resolved"]
    checkpoints = [size_of(path) for path in (run / "checkpoints").glob("step-*")]
    return {
        "pairs": args.pairs,
        "sentences": args.sentences,
        "training_command": shlex.join(command).replace(str(folder), "FOLDER"),
        "date": time.strftime("%d %B %Y"),
        "python": platform.python_version(),
        "torch": version("torch"),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "resolved": resolved,
        "corpus": made,
        "stages": stages(legs),
        "kills": kills(legs),
        "disk": {
            "the data set": made["bytes"],
            "its copy, three splits as text": size_of(folder / "runs" / ".store" / "copies"),
            "the store": sum(map(size_of, (folder / "runs" / ".store").glob("[0-9a-f]*[0-9a-f]"))),
            "a checkpoint": max(checkpoints),
            f"{len(checkpoints)} checkpoints": sum(checkpoints),
            "the averaged model": size_of(run / "averaged"),
            "the rest of the run": size_of(run) - sum(checkpoints) - size_of(run / "averaged"),
            "the cache of the hub's library": size_of(folder / "hf"),
            "the most at any time, without the data set": max(s["peak_disk"] for leg in legs for s in leg["spans"]),
        },
        "tokens": data["tokens"],
        "pairs_kept": data["pairs_kept"],
        "vocab_size": data["vocab_size"],
        "averaged": results["averaged"],
        "bleu": {name: scores["bleu"] for name, scores in results["test_sets"].items()},
        "target_tokens": results["target_tokens"],
        "legs": legs,
    }


def processor() -> str:
    """The processor's name."""
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else platform.processor()


def stages(legs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each stage that came to its end: how often, the median of its seconds, the most memory."""
    found: dict[str, dict[str, Any]] = {}
    for stage in STAGES:
        spans = [span for leg in legs for span in leg["spans"] if span["stage"] == stage and span["is_complete"]]
        if stage == "begin":
            spans = spans[:1]  # later ones also verify what is there
        if spans:
            found[stage] = {
                "times": len(spans),
                "seconds": statistics.median(span["ended"] - span["began"] for span in spans),
                "peak_rss": max(span["peak_rss"] for span in spans),
            }
    return found


def kills(legs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each kill: when it was, how long the next start took to be there again, and with what."""
    found = []
    for leg, after in pairwise(legs):
        back = after["back"]
        again: dict[str, float] = {}
        for span in after["spans"]:
            if span["began"] < back:
                seconds = min(span["ended"], back) - span["began"]
                again[span["stage"]] = again.get(span["stage"], 0.0) + seconds
        found.append(
            {
                "in": leg["name"],
                "stage": leg["spans"][-1]["stage"],
                "after": leg["seconds"],
                "in_stage": leg["spans"][-1]["ended"] - leg["spans"][-1]["began"],
                "back": back,
                "again": again,
            }
        )
    return found


def page(facts: dict[str, Any]) -> str:
    """The Markdown page."""
    resolved = facts["resolved"]
    return f"""\
# A rehearsal of WMT: {facts["pairs"]:,} pairs, from raw to an averaged BLEU

    {facts["command"]}

on {facts["cores"]} cores ({facts["processor"]}), Python {facts["python"]}, torch {facts["torch"]}, {facts["date"]}.
The command that it starts, and kills four times:

    {facts["training_command"]}

The pairs are invented, and as long as WMT's: {facts["pairs_kept"]:,} of them are kept, with
{facts["tokens"]["src"]:,} source and {facts["tokens"]["tgt"]:,} target tokens of {facts["vocab_size"]:,} pieces.
Dev and test set are cut to {facts["sentences"]} sentences each; WMT has 3,000 and 3,003.
So few steps teach nothing: the score, {scores_of(facts)}, only shows that the way to it is there, and a model that
has learnt to end its sentences translates in a half or a third of the time. What is scored is the mean of
steps {", ".join(map(str, facts["averaged"]))}. Found by rule: {resolved["device"]}, {resolved["precision"]}, \
{resolved["layout"]}, {resolved["threads"]} threads.

| stage | times | took | peak memory |
| --- | --- | --- | --- |
{rows(stage_row(stage, found) for stage, found in facts["stages"].items())}

Memory is what is resident, mapped files included. Of what came several times, the time is the median; what was
killed does not count. Making the data set took {duration(facts["corpus"]["seconds"])} before all that.

| on disk | |
| --- | --- |
{rows(f"| {name} | {size / MIB:,.0f} MiB |" for name, size in facts["disk"].items())}

What SIGKILL costs: the same command was started again, and came back to the place where it had been killed.

| killed in | after so much of it | back there after | of which |
| --- | --- | --- | --- |
{rows(map(kill_row, facts["kills"]))}

A start that finds data there verifies it, and screens the text again where there is no store yet: that is in its
`start`. With the experiment's own checkpoints, up to 1,500 steps are lost and done again.
"""


def rows(made: Iterable[str]) -> str:
    return "\n".join(made)


def stage_row(stage: str, found: dict[str, Any]) -> str:
    took, peak = duration(found["seconds"]), found["peak_rss"] / 2**30
    return f"| {STAGES[stage][1]} | {found['times']} | {took} | {peak:.2f} GiB |"


def kill_row(kill: dict[str, Any]) -> str:
    parts = (f"{STAGES[stage][1].partition(':')[0]} {duration(seconds)}" for stage, seconds in kill["again"].items())
    times = f"{duration(kill['in_stage'])} | {duration(kill['back'])}"
    return f"| {STAGES[kill['stage']][1]} | {times} | {', '.join(parts)} |"


def scores_of(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {bleu:.2f}" for name, bleu in facts["bleu"].items())


def duration(seconds: float) -> str:
    """As people say it."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


if __name__ == "__main__":
    main(sys.argv[1:])
