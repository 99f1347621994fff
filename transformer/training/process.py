"""What a training changes in its process: threads and determinism are set here, and everything is put back at the end.

The rest: the log level, cuDNN's attention, what the compiler takes for dynamic, and torch's random numbers on the CPU.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from transformer.compute import uses_cudnn_attention

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # the environment variable that makes cuBLAS deterministic


def set_up_process(*, threads: int, deterministic: bool) -> None:
    """Let torch compute with so many threads, and deterministically if that is asked for."""
    torch.set_num_threads(threads)
    _set_deterministic(deterministic, warn_only=False)
    if deterministic:
        os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")


@contextmanager
def process_settings_restored() -> Iterator[None]:
    """Leave the process as it was: `train` may be one call of many in a notebook."""
    logger = logging.getLogger("transformer")
    log_level = logger.level
    threads = torch.get_num_threads()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    workspace = os.environ.get(CUBLAS_WORKSPACE)
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
        if workspace is None:
            os.environ.pop(CUBLAS_WORKSPACE, None)


def _set_deterministic(enabled: bool, *, warn_only: bool) -> None:
    """torch.use_deterministic_algorithms, called only where it changes something.

    It imports a large part of torch. Once a signal has cut that import short, every further call fails, and its error
    would hide the signal.
    """
    is_enabled = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if (is_enabled, only_warns) != (enabled, warn_only):
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
