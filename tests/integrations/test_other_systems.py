"""What macOS lacks of Linux is hidden here: the first commands of the README need none of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.corpora import overrides, tiny_job, write_corpus
from support.paths import ROOT

HIDDEN = """
import builtins, ctypes, io, multiprocessing, os, select, sys
from pathlib import Path

for name in ("sched_getaffinity", "sched_setaffinity", "fork", "forkpty", "posix_fadvise", "posix_fallocate",
             "fdatasync", "memfd_create", "eventfd", "pipe2", "copy_file_range", "splice", "getrandom", "pidfd_open"):
    if hasattr(os, name):
        delattr(os, name)
del select.epoll

open_file = io.open
def without_proc(file, *arguments, **options):
    if str(file).startswith(("/proc", "/sys")):
        raise FileNotFoundError(2, "No such file or directory", file)
    return open_file(file, *arguments, **options)
io.open = builtins.open = without_proc

load_library = ctypes.CDLL
class Library:
    def __init__(self, name, *arguments, **options):
        self.library = load_library(name, *arguments, **options)
    def __getattr__(self, name):
        if name in ("malloc_trim", "omp_pause_resource_all"):
            raise AttributeError(name)
        return getattr(self.library, name)
ctypes.CDLL = Library

def get_context(method=None):
    raise ValueError("cannot find context for " + repr(method))
multiprocessing.get_context = get_context

from transformer.cli.main import main
for command in sys.stdin.read().split("\\n\\n"):
    sys.argv = ["transformer", *command.split("\\n")]
    sys.stdin = open_file("source")
    try:
        main()
    except SystemExit as ended:
        print("status", ended.code, flush=True)
"""


@pytest.mark.ci
def test_commands_need_nothing_that_linux_alone_has(tmp_path: Path) -> None:
    """To train, translate and look into the machine: affinity, /proc, fork and glibc's own functions are missing."""
    job = tiny_job(tmp_path / "a", write_corpus(tmp_path / "corpus"), max_steps=2, save_every=2, validate_every=2)
    job.train.threads = None
    (tmp_path / "source").write_text("one two\n", encoding="utf-8")
    settings = overrides(job)
    given = [["train", *settings], ["translate", f"run_dir={job.run_dir}"], ["doctor", *settings]]
    ended = subprocess.run(
        [sys.executable, "-c", HIDDEN],
        input="\n\n".join("\n".join(command) for command in given),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    statuses = [line for line in ended.stdout.split("\n") if line.startswith("status ")]
    assert statuses[:2] == ["status 0", "status 0"], ended.stderr
    assert statuses[2] in ("status 0", "status 8"), ended.stderr  # it has findings
    assert "this is a bug" not in ended.stderr
    assert " GiB by estimate for a step of train.max_tokens" in ended.stdout
