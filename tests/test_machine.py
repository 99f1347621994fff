"""What this process uses of the machine."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from transformer.machine import resolve_threads, trim_heap


@pytest.mark.parametrize(
    ("given", "ranks", "threads"), [(None, None, 8), (None, "1", 8), (None, "3", 2), (None, "9", 1), (3, "8", 3)]
)
def test_threads_are_a_share_of_the_cores_this_process_may_use(
    given: int | None, ranks: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(10, 18)))
    if ranks is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert resolve_threads(given) == threads


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
    code = "import sys, transformer.data.prepare; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
