"""What this process uses of the machine."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from transformer.machine import resolve_threads, trim_heap


def test_threads_are_the_cores_this_process_may_use() -> None:
    assert resolve_threads(None) == len(os.sched_getaffinity(0))
    assert resolve_threads(3) == 3


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep their heap as they like")
def test_what_was_freed_between_others_goes_back() -> None:
    blocks = [bytes(50_000) for _ in range(4_000)]  # 200 MB, too small to be mapped each
    kept = blocks[::100]
    del blocks
    before = resident()
    trim_heap()
    assert before - resident() > 100_000_000
    assert len(kept) == 40


def test_preparing_imports_no_torch() -> None:
    code = "import sys, transformer.prepare; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
