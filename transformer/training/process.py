"""What a training changes in its process: threads, determinism, the compiler's cache; all is put back at the end.

It also covers the log level, cuDNN's attention, what the compiler treats as dynamic, and torch's CPU random numbers.
"""

import hashlib
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from transformer.compute import uses_cudnn_attention
from transformer.machine import describe_processor

log = logging.getLogger(__name__)

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # the environment variable that makes cuBLAS deterministic
COMPILER_CACHE = "TORCHINDUCTOR_CACHE_DIR"  # where torch.compile keeps its code


def set_up_process(*, threads: int, deterministic: bool, compiles: bool) -> None:
    """Let torch compute with so many threads, deterministically if that is asked for, and keep what it compiles."""
    if compiles:
        _set_up_compiler_cache()
    torch.set_num_threads(threads)
    _set_deterministic(deterministic, warn_only=False)
    if deterministic:
        os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")


def _set_up_compiler_cache() -> None:
    """Let torch.compile keep its code in the user's own cache, unless the environment says where.

    Torch's default is below /tmp: a job that is requeued to another node compiles again, and another user may have made
    that folder. Code is run from here, so it is a folder that nobody else can write, not one beside data that are
    shared. Code for one kind of processor may end on another: each has a folder, in a home that many nodes share.
    """
    if COMPILER_CACHE in os.environ:
        return
    processor = describe_processor().partition(",")[0]  # however many of its cores a job has
    machine = f"{torch.__version__} {sys.version} {processor}"
    name = f"compiled-{hashlib.sha256(machine.encode()).hexdigest()[:12]}"
    try:
        own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "transformer").absolute()
        for folder in (own, own / name):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            about = folder.stat()
            if about.st_uid != os.getuid() or about.st_mode & 0o022 or not os.access(folder, os.W_OK):
                raise PermissionError(f"{folder} is not this user's alone to write")
    except (OSError, RuntimeError) as error:  # perhaps there is no home
        log.info("compiled code is kept where torch keeps it, not in the user's cache: %s", error)
        return
    os.environ[COMPILER_CACHE] = str(own / name)


@contextmanager
def process_settings_restored() -> Iterator[None]:
    """Leave the process as it was: `train` may be one call of many in a notebook."""
    logger = logging.getLogger("transformer")
    log_level = logger.level
    threads = torch.get_num_threads()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    variables = {name: os.environ.get(name) for name in (CUBLAS_WORKSPACE, COMPILER_CACHE)}
    uses_cudnn = uses_cudnn_attention()
    dynamic_sources = torch.compiler.config.dynamic_sources
    random_state = torch.get_rng_state()

    try:
        yield
    finally:
        torch.set_rng_state(random_state)
        torch.compiler.config.dynamic_sources = dynamic_sources
        torch.backends.cuda.enable_cudnn_sdp(uses_cudnn)
        logger.setLevel(log_level)
        torch.set_num_threads(threads)
        _set_deterministic(is_deterministic, warn_only=only_warns)
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)


def _set_deterministic(enabled: bool, *, warn_only: bool) -> None:
    """torch.use_deterministic_algorithms, called only where it changes something.

    It imports a large part of torch. Once a signal has cut that import short, every further call fails, and its error
    would hide the signal.
    """
    is_enabled = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if (is_enabled, only_warns) != (enabled, warn_only):
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
