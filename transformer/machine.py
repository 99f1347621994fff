"""Cores and memory of this process.

Nothing here imports torch: that takes longer than to prepare a small corpus.
"""

import contextlib
import ctypes
import errno
import os
import platform
import re
import resource
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

from transformer.errors import InputError, StorageError

# How many matrix products the libraries below torch keep prepared for their shapes on a CPU. By default each keeps
# 1,024, at 0.3 to 0.4 MB apiece, and a training with its searches has that many shapes.
KERNEL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "LRU_CACHE_CAPACITY": "32"}  # oneDNN's own; ideep's above it

# How often a thread of GNU's OpenMP looks for work before it sleeps. By default it spins for milliseconds: beside other
# programs, that is the time of the very thread that it waits for. A quiet machine loses at most 2 % by this number, and
# a busy one at most a fifth beside threads that sleep at once, as was measured: docs/tried.md.
SPIN_COUNT = "10000"
WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # the environment variables that decide on it

MOST_THREADS_A_CORE = 4
BUSY = 1.5  # programs that would run, for each core
TRIM_SECONDS = 20.0  # between two trims of the heap, which take a tenth of a second
OTHER_THREADS = 4  # of a command, beside those that compute: they load, show progress and write logs

NO_THREAD = (
    "no thread can be started: end other programs, raise `ulimit -u` and `ulimit -v` (in a container: its limits of "
    "pids and memory), or compute with fewer (threads=1; train.threads=1 under train)"
)
NO_THREAD_WORDS = ("can't start new thread", os.strerror(errno.EAGAIN))  # Python's, and those of C++
NO_MEMORY = "no memory is left: end other programs, or raise `ulimit -v` (in a container: its limit of memory)"
NO_MEMORY_WORDS = (  # of C++, torch, oneDNN, and the loader of libraries
    *("std::bad_alloc", "DefaultCPUAllocator", "could not create a primitive"),
    "failed to map segment from shared object",
)

CONTROL_GROUP = "/sys/fs/cgroup"  # a container's own is mounted there


def resolve_threads(threads: int | None) -> int:
    """The number of threads that is set; None: this rank's share of the cores, and no more than OMP_NUM_THREADS.

    Raises InputError for more than `most_threads`, and StorageError where the system starts no more threads: OpenMP
    would end the process without a word of ours.
    """
    if threads is None:
        share = _share_of_cores()
        threads = min(share, _threads_in_environment() or share)
    if threads > most_threads():
        raise InputError(
            f"{threads} threads are more than {MOST_THREADS_A_CORE} times the {cores()} cores that this process "
            f"may use: set {most_threads()} at most, or null for one per core"
        )
    _try_threads(2 * threads + OTHER_THREADS)  # those of OpenMP, and as many that share its work
    return threads


def _try_threads(count: int) -> None:
    """Start so many threads at once, and end them. Raises StorageError where the system refuses."""
    end = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(count):
            thread = threading.Thread(target=end.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        raise StorageError(lack_of(error) or str(error)) from error
    finally:
        end.set()
        for thread in started:
            thread.join()


def lack_of(error: BaseException) -> str | None:
    """What the machine had none of where this arose, or what it arose from, and what to do; None for other errors.

    Libraries raise these in many ways: torch, in whose C++ a thread cannot be started, as a RuntimeError with no more
    than the system's words.
    """
    for earlier in origins(error):
        match earlier:
            case OSError(errno=errno.EMFILE | errno.ENFILE):
                most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
                where = "" if earlier.filename is None else f"{earlier.filename}: "
                remedy = f"raise `ulimit -n`, which is {most}, or end other programs"
                return f"{where}no file can be opened ({earlier.strerror}): {remedy}"
            case MemoryError() | OSError(errno=errno.ENOMEM):
                return NO_MEMORY
            case RuntimeError() if str(earlier) in NO_THREAD_WORDS:
                return NO_THREAD
            case RuntimeError() | ImportError() | OSError() if any(words in str(earlier) for words in NO_MEMORY_WORDS):
                return NO_MEMORY
    return None


def origins(error: BaseException, *, are_hidden: bool = False) -> Iterator[BaseException]:
    """The error, what it arose from, and so on; each once. `are_hidden`: those, too, that `from None` hides.

    They can form a circle: TensorBoard's writer raises one and the same error again when it is closed, by then while
    the StorageError is handled that this error has become.
    """
    seen: list[BaseException] = []
    origin: BaseException | None = error
    while origin is not None and all(origin is not other for other in seen):
        yield origin
        seen.append(origin)
        context = None if origin.__suppress_context__ and not are_hidden else origin.__context__
        origin = origin.__cause__ or context


def _threads_in_environment() -> int | None:
    """What OMP_NUM_THREADS asks for, a number or a list of which the first counts; None where it asks for nothing.

    torchrun sets it to 1 for several ranks on a machine, unless it is set: its 1 means nothing.
    """
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    is_torchruns = first == "1" and "TORCHELASTIC_RUN_ID" in os.environ and local_world_size() > 1
    return int(first) if first.isdecimal() and int(first) > 0 and not is_torchruns else None


def most_threads() -> int:
    """The most threads that may be set: each needs memory, and of tens of thousands the libraries crash."""
    return MOST_THREADS_A_CORE * cores()


def _share_of_cores() -> int:
    """The cores of this rank: those that srun gave it, where srun started the ranks, or its part of the process'.

    srun may have bound the process to them, which then are not to be divided once more.
    """
    of_task = os.environ.get("SLURM_CPUS_PER_TASK", "")
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1" and tasks == os.environ.get("WORLD_SIZE") and of_task.isdecimal():
        return min(cores(), int(of_task))
    return max(1, cores() // local_world_size())


def cores() -> int:
    """The cores that this process may use: no more than as much time as its container has."""
    has_affinity = hasattr(os, "sched_getaffinity")  # macOS has none
    available = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError), open(f"{CONTROL_GROUP}/cpu.max", encoding="ascii") as file:
        quota, period = map(int, file.read().split())  # ValueError: the quota is `max`
        return min(available, max(1, quota // period))
    return available


def busy() -> str | None:
    """Why a training is slow on this machine, in words; None where its processors are enough for what runs there.

    Of BUSY times as many programs as processors, some are this one's own threads.
    """
    with contextlib.suppress(OSError):  # where the load is unknown
        load, processors = os.getloadavg()[0], os.cpu_count() or 1
        if load > BUSY * processors:
            return f"this machine is busy: its load is {load:.1f}, and it has {processors} cores: steps take longer"
    return None


def local_world_size() -> int:
    """How many ranks torchrun started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def describe_processor() -> str:
    """The processor's name, the cores that this process may use, and the machine's memory."""
    with contextlib.suppress(OSError):
        cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        memory = Path("/proc/meminfo").read_text(encoding="ascii")
        name = re.search(r"^model name\s*: (.+)$", cpu, re.MULTILINE)
        kilobytes = re.search(r"^MemTotal:\s*([0-9]+)", memory, re.MULTILINE)
        size = "" if kilobytes is None else f", {int(kilobytes[1]) / 2**20:.0f} GiB"
        return f"{'unknown processor' if name is None else name[1]}, {cores()} cores{size}"
    return f"{platform.machine()}, {cores()} cores"  # macOS


@cache  # each package has a file to read: a twentieth of a second for all
def installed_packages() -> dict[str, str]:
    """The version of every package that is installed, by its name, and Python's."""
    versions = {"python": platform.python_version()}
    for package in distributions():
        metadata = package.metadata
        if "Name" in metadata and "Version" in metadata:  # an installation may be broken
            versions.setdefault(metadata["Name"].lower(), metadata["Version"])
    return dict(sorted(versions.items()))


@cache  # what a process runs is what it has imported, whatever is changed in the folder meanwhile
def source_commit(folder: Path) -> str | None:
    """The commit of the git checkout `folder`, with `-dirty` where files differ from it; None where that is unknown."""
    if not (folder / ".git").exists():
        return None
    command = ["git", "--no-optional-locks", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True, timeout=20, check=True)
        return found.stdout.strip() or None
    return None


def limit_kernel_caches() -> None:
    """Bound the memory of prepared matrix products on a CPU, unless the user has: before torch first multiplies.

    Only for a process of our own, such as a command: the limits stay in its environment.
    """
    for name, capacity in KERNEL_CACHES.items():
        os.environ.setdefault(name, capacity)


def let_threads_sleep() -> None:
    """Let OpenMP's threads sleep soon after there is no work, unless the user has said how: before torch is loaded.

    Only for a process of our own, such as a command: it stays in its environment.
    """
    if not any(name in os.environ for name in WAITING):
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT


def end_threads_before_forks() -> None:
    """Let OpenMP end the threads of a thread that forks: its child would wait for ever for them, which it has not.

    They start again when there is work. It is for the library that torch has loaded, where that has the function.
    """
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None:
        os.register_at_fork(before=lambda: pause(1))  # omp_pause_soft: what was set is kept


def trim_heap() -> None:
    """Give freed memory that the C library keeps back to the system, where that library is glibc.

    On a CPU, batches of many shapes leave its heap full of holes that nothing fits into, so that the memory of a
    training would grow for hours.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class HeapTrimmer:
    """Trims the heap now and then."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def trim_if_due(self) -> None:
        """Trim the heap, unless that was less than TRIM_SECONDS ago."""
        if time.monotonic() > self._last + TRIM_SECONDS:
            trim_heap()
            self._last = time.monotonic()
