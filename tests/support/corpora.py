"""A corpus that a toy learns in seconds (digits in English and German words), the job that trains on it, and what a run
directory holds, read without the package."""

import hashlib
import json
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from support.paths import ROOT
from transformer.cli import commands, main
from transformer.config.jobs import Job, TrainJob
from transformer.config.settings import (
    DataConfig,
    ExtraConfig,
    FilterConfig,
    ModelConfig,
    PairConfig,
    Precision,
    SearchConfig,
    TokenizerConfig,
    TrainConfig,
)
from transformer.data.prepare import Prepared
from transformer.training.loop import train

ENGLISH = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
GERMAN = ("null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun")
MOST_MEMORY = 8 << 30  # bytes that a child may ask for, so that a test that fails leaves the machine to the others
SIZES = {"train": 200, "dev": 16, "test": 12, "other": 8}


def write_pair(folder: Path, name: str, pairs: list[tuple[str, str]]) -> PairConfig:
    """Two parallel files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{language}" for language in ("en", "de")]
    for path, lines in zip(paths, zip(*pairs, strict=True), strict=True):
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
    return PairConfig(*map(str, paths))


def spell(digits: Iterable[int]) -> tuple[str, str]:
    """Digits in English and in German words."""
    numbers = list(digits)
    return " ".join(ENGLISH[digit] for digit in numbers), " ".join(GERMAN[digit] for digit in numbers)


def write_corpus(folder: Path, seed: int = 0) -> DataConfig:
    """Training, development and two test sets under `folder`, without a sentence in common."""
    draw, seen, sets = random.Random(seed), set[tuple[int, ...]](), {}
    for name, count in SIZES.items():
        pairs: list[tuple[str, str]] = []
        longest = 10 if name == "train" else 6  # a search makes as many steps as its longest source has pieces
        while len(pairs) < count:
            digits = tuple(draw.randrange(10) for _ in range(draw.randrange(4, longest)))
            if digits not in seen:
                seen.add(digits)
                pairs.append(spell(digits))
        sets[name] = write_pair(folder, name, pairs)
    return DataConfig(
        train=sets["train"],
        dev=sets["dev"],
        test={"test": sets["test"], "other": sets["other"]},
        filter=FilterConfig(max_length=40),
        store_dir=str(folder / "store"),
    )


def write_directions(folder: Path) -> DataConfig:
    """English to German and back, each told by a tag: training, development and test sets of both, the same text."""
    forth = write_corpus(folder)
    names = {"en_de": "<2de>", "de_en": "<2en>"}

    def both(pair: PairConfig) -> dict[str, PairConfig]:
        back = replace(pair, src=pair.tgt, tgt=pair.src, src_lang="de", tgt_lang="en")
        return {name: replace(one, tag=names[name]) for name, one in (("en_de", pair), ("de_en", back))}

    train = both(forth.train)
    return replace(
        forth,
        train=train["en_de"],
        extra={"de_en": ExtraConfig(**vars(train["de_en"]))},
        dev=PairConfig(),
        devs=both(forth.dev),
        test=both(forth.test["test"]),
    )


def tiny_job(run_dir: Path, data: DataConfig, model: dict[str, Any] | None = None, **recipe: Any) -> TrainJob:
    """One layer of width 32, dropout 0.1; 12 steps are two epochs and a half."""
    settings: dict[str, Any] = {
        "max_steps": 12,
        "tokens_per_step": 600,
        "max_tokens": 300,
        "learning_rate": 3e-3,
        "warmup_steps": 10,
        "threads": 1,
        "precision": Precision.fp32,
        "log_every": 1,
        "save_every": 4,
        "validate_every": 6,
        "keep_last": 3,
        "average": 3,
    }
    sizes: dict[str, Any] = {"n_layers": 1, "d_model": 32, "d_ff": 64, "n_heads": 2}
    return TrainJob(
        run_dir=str(run_dir),
        model=ModelConfig(**sizes | (model or {})),
        data=data,
        tokenizer=TokenizerConfig(vocab_size=60),
        train=TrainConfig(**settings | recipe),
        search=SearchConfig(max_extra=4),
    )


@contextmanager
def as_a_command() -> Iterator[None]:
    """Log as the command line does, and leave the process as it was."""
    logger = logging.getLogger("transformer")
    level, threads = logger.level, torch.get_num_threads()
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)


def run(job: TrainJob) -> Path:
    """Train in this process; the run directory."""
    with as_a_command():
        train(job)
    return Path(job.run_dir)


def run_command(command: str, job: Job) -> None:
    """Run a command in this process as the command line does, its results printed."""
    with as_a_command():
        commands.run_command(command, job)


def overrides(job: TrainJob) -> list[str]:
    """The job as it is typed on the command line."""

    def flat(config: Any, prefix: str) -> Iterator[str]:
        table = config if isinstance(config, dict) else {f.name: getattr(config, f.name) for f in fields(config)}
        for name, value in table.items():
            if is_dataclass(value) or isinstance(value, dict):
                yield from flat(value, f"{prefix}{name}.")
            else:
                text = value.name if isinstance(value, Enum) else "null" if value is None else str(value)
                yield f"{prefix}{name}={text}"

    return ["experiment=base", *flat(job, "")]


def start(*arguments: str, cwd: Path, driver: str | None = None, **options: Any) -> "subprocess.Popen[str]":
    """`python -m transformer ARGUMENTS`, or the same through a Python `driver` that changes something first."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_WAIT_POLICY": "passive"}
    main = (
        ["-m", "transformer"] if driver is None else ["-c", f"{driver}\nfrom transformer.cli.main import main\nmain()"]
    )
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen([sys.executable, *main, *arguments], cwd=cwd, env=environment, **pipes)


def finish(process: "subprocess.Popen[str]", status: int, timeout: float = 300.0) -> tuple[str, str]:
    """Wait for the end, check the exit status; what it printed and what it logged."""
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == status, err
    assert "Traceback" not in err
    return out, err


SHELL = """
import json, os, sys
import MODULES
from transformer.cli.main import main
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        log, *arguments = json.loads(line)
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # which is for the statuses
        sys.argv = ["transformer", *arguments]
        main()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Shell:
    """Runs one command after the other, each in a process of its own; slow `modules` are imported only once."""

    def __init__(self, folder: Path, modules: str, **environment: str) -> None:
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self._log = folder / "stderr"
        self._process = subprocess.Popen(
            [sys.executable, "-c", SHELL.replace("MODULES", modules)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str) -> tuple[int, str]:
        """The exit status of `transformer ARGUMENTS`, and what it logged."""
        pipes = self._process.stdin, self._process.stdout
        assert pipes[0] is not None
        assert pipes[1] is not None
        pipes[0].write(json.dumps([str(self._log), *arguments]) + "\n")
        pipes[0].flush()
        status = int(pipes[1].readline())
        return status, self._log.read_text(encoding="utf-8")

    def __enter__(self) -> "Shell":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:  # a test that fails leaves no command behind
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate(timeout=60)


@dataclass(frozen=True)
class Ended:
    """How a command ended (below zero: by that signal), what it printed, and what it said on standard error."""

    status: int
    printed: str
    said: str
    megabytes: int = 0  # the most that it had in memory, beyond what it shares with the tests
    seconds: float = 0.0  # of a processor


def in_a_child(command: str, job: Job, folder: Path, text: str = "") -> Ended:
    """The command from its entry point to its exit status, but for Hydra, in a process forked from this one.

    It reads `text`. A child may die of a signal, which the tests survive, and costs a tenth of a second. One that waits
    for something is ended by SIGALRM after a minute.
    """
    return ended(begin_in_a_child(command, job, folder, text), folder)


def ended(child: int, folder: Path) -> Ended:
    """Wait for a child that was begun in this folder."""
    _, status, usage = os.wait4(child, 0)
    printed, said = ((folder / name).read_text(encoding="utf-8") for name in ("stdout", "stderr"))
    seconds = usage.ru_utime + usage.ru_stime
    own = usage.ru_maxrss // 1024 - shared_megabytes()
    return Ended(os.waitstatus_to_exitcode(status), printed, said, own, seconds)


def shared_megabytes() -> int:
    """What this process has in memory, with which a child of it begins: as much as the tests before have left."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize() >> 20


def begin_in_a_child(command: str, job: Job, folder: Path, text: str = "") -> int:
    """Begin what `in_a_child` does; the process id of the child, which the caller waits for."""

    def run_job(name: str, _: list[str]) -> None:
        commands.run_command(name, job)

    def without_hydra() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, MOST_MEMORY))
        pytest.MonkeyPatch().setattr(main, "_enter", run_job)

    return _fork([command], folder, text, before=without_hydra)


def typed_in_a_child(*arguments: str, cwd: Path, text: str = "", before: Callable[[], object] = lambda: None) -> Ended:
    """What `in_a_child` does for `transformer ARGUMENTS` as they are typed in a folder, Hydra included.

    The child does `before` first.
    """

    def begin() -> None:
        os.chdir(cwd)
        before()

    with tempfile.TemporaryDirectory() as folder:
        return ended(_fork(arguments, Path(folder), text, before=begin), Path(folder))


def _fork(arguments: Sequence[str], folder: Path, text: str, *, before: Callable[[], object]) -> int:
    """A child at the entry point of the command line, after `before`; its standard streams are files in the folder."""
    files = [folder / name for name in ("stdin", "stdout", "stderr")]
    files[0].write_text(text, encoding="utf-8")
    for path in files[1:]:
        path.write_text("", encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns of forking with threads; there is one
        child = os.fork()
    if child:
        return child

    try:
        signal.alarm(60)
        os.dup2(os.open(files[0], os.O_RDONLY), 0)
        for descriptor, path in enumerate(files[1:], 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        logging.getLogger().handlers.clear()  # pytest's
        sys.argv = ["transformer", *arguments]
        before()
        main.main()
    except SystemExit as end:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else 0)
    finally:
        os._exit(1)


def wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


# ---- a run directory, read without the package ----------------------------------------------------------------------


def steps_of(run_dir: Path) -> list[int]:
    """The steps whose directory is there."""
    return sorted(int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-*"))


def step_dir(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


def read(path: Path) -> Any:
    return json.loads(path.read_bytes())


def progress_of(run_dir: Path, step: int) -> dict[str, Any]:
    """What state.json says, without the seconds, which differ from run to run."""
    state: dict[str, Any] = read(step_dir(run_dir, step) / "state.json")
    del state["training"]["progress"]["seconds"]
    for key in ("seconds", "waited"):
        del state["training"]["window"][key]
    return state


def results_of(run_dir: Path) -> dict[str, Any]:
    results: dict[str, Any] = read(run_dir / "results.json")
    del results["training_seconds"]
    return results


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


def last_logged(run_dir: Path) -> int:
    """The last step of metrics.jsonl, which somebody may be writing."""
    path = run_dir / "metrics.jsonl"
    lines: list[bytes] = []
    with suppress(FileNotFoundError):  # not begun yet, or a start over has removed it
        lines = path.read_bytes().split(b"\n")[:-1]
    return int(json.loads(lines[-1])["step"]) if lines else 0


def is_verified(folder: Path) -> bool:
    """Whether every file of a checkpoint is what its manifest says."""
    try:
        files = read(folder / "MANIFEST.json")["files"]
        found = {path.name for path in folder.iterdir()} - {"MANIFEST.json"}
        return found == set(files) and all(
            hashlib.sha256((folder / name).read_bytes()).hexdigest() == entry["sha256"] for name, entry in files.items()
        )
    except OSError:
        return False


def reseal(folder: Path) -> None:
    """Make the manifest of a checkpoint right again for what lies in it: whoever forges a file can forge its digest."""
    manifest = read(folder / "MANIFEST.json")
    contents = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "MANIFEST.json"}
    manifest["files"] = {
        name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in contents.items()
    }
    (folder / "MANIFEST.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def forge_tensors(folder: Path, name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change tensors of a checkpoint, and its manifest with them."""
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name)
    reseal(folder)


def assert_same_tensors(left: Path, right: Path) -> None:
    """Two safetensors files hold the same names, types and bits."""
    one, two = load_file(left), load_file(right)
    assert one.keys() == two.keys()
    different = [name for name in one if one[name].dtype != two[name].dtype or not torch.equal(one[name], two[name])]
    assert not different, (left, right, different)


def assert_same_end(left: Path, right: Path) -> None:
    """Weights, moments, moving averages, position, validations, the averaged model and the results: to the last bit."""
    last = steps_of(left)[-1]
    assert steps_of(right)[-1] == last
    names = {path.name for path in step_dir(left, last).glob("*.safetensors")}
    assert names == {path.name for path in step_dir(right, last).glob("*.safetensors")}
    for name in names:
        assert_same_tensors(step_dir(left, last) / name, step_dir(right, last) / name)
    assert_same_tensors(left / "averaged" / "model.safetensors", right / "averaged" / "model.safetensors")
    assert progress_of(left, last) == progress_of(right, last)
    assert results_of(left) == results_of(right)
    assert read(left / "best.json") == read(right / "best.json")
    for path in (left / "hypotheses").iterdir():
        assert path.read_bytes() == (right / "hypotheses" / path.name).read_bytes(), path


def texts(prepared: Prepared) -> list[tuple[str, str]]:
    """The pairs of a prepared corpus, read back from its pieces."""
    tokenizer, ids = prepared.tokenizers.source, range(len(prepared.store))
    sides = [tokenizer.decode([prepared.store.gather(np.array([i]), side)[0].tolist() for i in ids]) for side in (0, 1)]
    return list(zip(*sides, strict=True))
