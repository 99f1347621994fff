"""The memory that `doctor` finds free."""

from pathlib import Path

import pytest

from transformer import machine
from transformer.tools.memory import free_memory


def test_free_memory_is_a_rank_s_share_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 9,000 bytes 5,000 are used, but 1,000 of them by copies of files; there are two ranks."""
    monkeypatch.setattr(machine, "CONTROL_GROUP", str(tmp_path))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for name, text in (("max", "9000\n"), ("current", "5000\n"), ("stat", "anon 4000\ninactive_file 1000\n")):
        (tmp_path / f"memory.{name}").write_text(text, encoding="ascii")
    assert free_memory() == (9_000 - 5_000 + 1_000) // 2
    (tmp_path / "memory.max").write_text("max\n", encoding="ascii")
    assert free_memory() > 5_000, "no limit but the machine's"


def test_free_memory_is_some_of_the_machine_s() -> None:
    with open("/proc/meminfo", encoding="ascii") as file:
        total = 1024 * int(file.readline().split()[1])
    assert 0 < free_memory() < total
