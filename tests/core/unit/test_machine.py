"""What this process uses of the machine."""

import errno
import os
import platform
import re
import shlex
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from support.corpora import write_corpus
from support.observers import PeakMemory
from support.paths import ROOT
from transformer import machine
from transformer.compute import resolve_precision
from transformer.config.settings import Precision
from transformer.errors import InputError, StorageError
from transformer.machine import (
    KERNEL_CACHES,
    NO_MEMORY,
    busy,
    describe_processor,
    lack_of,
    let_threads_sleep,
    limit_kernel_caches,
    resolve_threads,
    source_commit,
)
from transformer.registry import install_command


@pytest.mark.parametrize(
    ("load", "processors", "said"),
    [
        (14.26, 2, "this machine is busy: its load is 14.3, and it has 2 cores: steps take longer"),
        (3.1, 2, "this machine is busy: its load is 3.1, and it has 2 cores: steps take longer"),
        (3.0, 2, None),
        (60.0, 64, None),
        (0.0, None, None),
    ],
)
def test_busy_names_the_load_and_the_cores(
    load: float, processors: int | None, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 99.0, 99.0))
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    assert busy() == said


def test_busy_says_nothing_where_the_load_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("Load averages are unobtainable")

    monkeypatch.setattr(os, "getloadavg", fail)
    assert busy() is None


def test_install_command_names_the_packages_of_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of pyproject.toml; no index has this package itself."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for extra in ("corpora", "export", "ja", "ko", "moses", "plots", "slurm", "split", "trackio", "wandb"):
        program, verb, *packages = shlex.split(install_command(extra))
        assert (program, verb) == ("pip", "install")
        assert list(map(Requirement, packages)) == list(map(Requirement, extras[extra]))
    monkeypatch.setattr("transformer.registry.requires", lambda name: None)
    assert install_command("ja") == "pip install -e '.[ja]'"


def test_no_message_recommends_a_package_that_no_index_has() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "transformer").rglob("*.py")}
    assert [path for path, text in sources.items() if re.search(r"pip install [^\n]*transformer-mt", text)] == []


@pytest.mark.parametrize(
    ("given", "ranks", "threads"), [(None, None, 8), (None, "1", 8), (None, "3", 2), (None, "9", 1), (3, "8", 3)]
)
def test_resolve_threads_takes_a_share_of_the_cores_this_process_may_use(
    given: int | None, ranks: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(10, 18)))
    monkeypatch.setattr(machine, "CONTROL_GROUP", "nowhere")
    monkeypatch.delenv("OMP_NUM_THREADS")
    if ranks is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert resolve_threads(given) == threads
    assert resolve_threads(32) == 32
    with pytest.raises(InputError, match=r"^33 threads are more than 4 times the 8 cores .*: set 32 at most"):
        resolve_threads(33)


def test_lack_of_ends_where_errors_arose_from_each_other() -> None:
    """As TensorBoard's do: closing it raises what its thread has met once more."""
    met = OSError(errno.EIO, "Input/output error")
    reported = StorageError("the run: cannot be written")
    reported.__cause__, met.__context__ = met, reported
    assert lack_of(reported) is None
    assert lack_of(met) is None

    earliest = MemoryError()
    met.__context__, earliest.__context__ = earliest, reported
    assert lack_of(reported) == NO_MEMORY


@pytest.mark.parametrize(
    ("bound", "tasks", "ranks", "threads"),
    [
        (6, "16", "16", 6),  # srun has started the ranks, and bound each to its own cores
        (48, "16", "16", 6),  # or to none
        (4, "16", "16", 4),  # a container has less
        (48, "2", "16", 6),  # torchrun has, in one task of srun on each of two nodes
        (48, "1", "8", 6),
    ],
)
def test_resolve_threads_divides_no_cores_that_srun_has_divided(
    bound: int, tasks: str, ranks: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(bound)))
    monkeypatch.setattr(machine, "CONTROL_GROUP", "nowhere")
    monkeypatch.delenv("OMP_NUM_THREADS")
    cores_of_task = "6" if tasks == ranks else "48"
    slurm = {"SLURM_STEP_NUM_TASKS": tasks, "SLURM_CPUS_PER_TASK": cores_of_task}
    for name, value in {**slurm, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    assert resolve_threads(None) == threads


def test_resolve_threads_finds_out_that_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP would end the process by itself, with status 1 and a line of its own. What was started has ended."""
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def start_few(thread: threading.Thread) -> None:
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_few)
    with pytest.raises(StorageError, match=r"^no thread can be started: .* compute with fewer \(threads=1; train\.th"):
        resolve_threads(1)
    assert [thread.is_alive() for thread in started] == [False] * 3


@pytest.mark.parametrize(
    ("variable", "torchrun", "threads"),
    [
        ("3", False, 3),
        ("1", False, 1),
        ("6,2", False, 6),
        ("100", False, 8),
        ("1", True, 4),  # torchrun's own, which it sets for each of several ranks
        ("2", True, 2),
        ("", False, 8),
        ("0", False, 8),
        ("many", False, 8),
    ],
)
def test_resolve_threads_takes_no_more_than_openmp_is_told_to(
    variable: str, torchrun: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(machine, "CONTROL_GROUP", "nowhere")
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2" if torchrun else "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert resolve_threads(None) == threads
    assert resolve_threads(5) == 5


@pytest.mark.parametrize(
    ("quota", "ranks", "threads"),
    [
        ("200000 100000", "1", 2),
        ("250000 100000", "1", 2),
        ("50000 100000", "1", 1),
        ("6400000 100000", "1", 8),
        ("400000 100000", "2", 2),
        ("max 100000", "1", 8),
        ("", "1", 8),
    ],
)
def test_resolve_threads_takes_no_more_than_a_container_may_use(
    quota: str, ranks: str, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(machine, "CONTROL_GROUP", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    (tmp_path / "cpu.max").write_text(f"{quota}\n", encoding="ascii")
    assert resolve_threads(None) == threads


def test_describe_processor_says_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CONTROL_GROUP", "nowhere")
    assert re.fullmatch(rf".+, {len(os.sched_getaffinity(0))} cores, [1-9][0-9]* GiB", describe_processor())


def test_source_commit_is_that_of_git(tmp_path: Path) -> None:
    """With a mark where a file has changed since; None outside of a checkout, and before the first commit."""

    def git(*arguments: str) -> str:
        name = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        command = ["git", "-C", str(tmp_path), *name, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    look = source_commit.__wrapped__  # which a process asks once
    assert look(tmp_path) is None
    git("init", "-q")
    assert look(tmp_path) is None
    (tmp_path / "a").write_text("1", encoding="utf-8")
    git("add", "a")
    git("commit", "-q", "-m", "first")
    git("tag", "-a", "v1", "-m", "a tag, which is not shown")
    head = git("rev-parse", "HEAD")
    assert look(tmp_path) == head
    (tmp_path / "a").write_text("22", encoding="utf-8")
    assert look(tmp_path) == f"{head}-dirty"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep their heap as they like")
def test_trim_heap_gives_back_what_was_freed_between_others() -> None:
    """In a process whose heap nobody else has used."""
    freed = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    assert int(freed.stdout) > 100


# Prints how many of 200 megabytes the system gets back, whose blocks are too small to be mapped each.
FREED = """
import os
from pathlib import Path
from transformer.machine import trim_heap

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

blocks = [bytes(50_000) for _ in range(4_000)]
kept = blocks[::100]
del blocks
before = resident()
trim_heap()
print((before - resident()) // 1_000_000)
"""

# Prints how many megabytes 600 products of different shapes leave behind.
SHAPES = """
import os, torch
from pathlib import Path

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

matrix = torch.ones(64, 64, dtype=torch.bfloat16)
torch.ones(700, 64, dtype=torch.bfloat16) @ matrix
before = resident()
for rows in range(2, 602):
    torch.ones(rows, 64, dtype=torch.bfloat16) @ matrix
print((resident() - before) // 1_000_000)
"""
MULTIPLIES_BF16 = resolve_precision(Precision.auto, torch.device("cpu")) is Precision.bf16


@pytest.mark.slow
@pytest.mark.skipif(not MULTIPLIES_BF16, reason="the caches fill where bf16 is multiplied in hardware")
def test_limit_kernel_caches_bounds_what_new_shapes_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KERNEL_CACHES:
        monkeypatch.delenv(name, raising=False)
    unlimited = int(subprocess.check_output([sys.executable, "-c", SHAPES]))
    monkeypatch.setattr(os, "environ", os.environ.copy())
    limit_kernel_caches()
    limited = int(subprocess.check_output([sys.executable, "-c", SHAPES], env=os.environ))
    assert limited < 200 < unlimited  # measured: 92 and 414


def test_limit_kernel_caches_leaves_what_the_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "9")
    limit_kernel_caches()
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "7"
    assert os.environ["LRU_CACHE_CAPACITY"] == "9"


@pytest.mark.slow
def test_train_of_a_small_model_stays_small(tmp_path: Path) -> None:
    """With validation, averaging and scoring: it was 1.1 GB once, and is 0.6 to 0.67 GiB on two threads."""
    keys = ["model.d_model=32", "model.d_ff=128", "train.max_steps=60", f"run_dir={tmp_path / 'run'}"]
    command = [sys.executable, "-m", "transformer", "train", *keys]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    memory = PeakMemory(process.pid)
    assert process.wait() == 0
    memory.join()
    assert 0 < memory.kilobytes < 740_000


def test_prepare_imports_no_torch(tmp_path: Path) -> None:
    """The command, which would take a second longer."""
    code = (
        "import sys; from transformer.cli.commands import compose, run_command\n"
        "run_command('prepare', compose('prepare', sys.argv[1:])); assert 'torch' not in sys.modules"
    )
    data = write_corpus(tmp_path)
    keys = [f"run_dir={tmp_path / 'run'}", "experiment=base", "tokenizer.vocab_size=60"]
    for name, pair in (("train", data.train), ("dev", data.dev)):
        keys += [f"data.{name}.src={pair.src}", f"data.{name}.tgt={pair.tgt}"]
    subprocess.run([sys.executable, "-c", code, *keys], check=True)


@pytest.mark.parametrize(
    ("given", "spin_count"), [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)]
)
def test_let_threads_sleep_leaves_what_the_user_has_set(
    given: dict[str, str], spin_count: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in machine.WAITING:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    let_threads_sleep()
    assert os.environ.get("GOMP_SPINCOUNT") == spin_count


@pytest.mark.ci
def test_a_command_lets_its_threads_sleep() -> None:
    """As OpenMP itself says when it is loaded, with torch: later would be too late."""
    shows = {name: value for name, value in os.environ.items() if name not in machine.WAITING}
    command = [sys.executable, "-m", "transformer", "average", "run_dir=nowhere"]
    ended = subprocess.run(command, capture_output=True, text=True, env={**shows, "OMP_DISPLAY_ENV": "VERBOSE"})
    if "GOMP_SPINCOUNT" not in ended.stderr:
        pytest.skip("torch is built with another OpenMP here")
    assert "GOMP_SPINCOUNT = '10000'" in ended.stderr
