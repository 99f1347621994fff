"""Trackers beside TensorBoard: a package that fails, hangs or is missing costs a line; what it gets was sent."""

import json
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import pytest

from support.corpora import wait_for
from support.paths import ROOT
from transformer.config.settings import TrainConfig
from transformer.errors import PeerError
from transformer.integrations.trackers import sink as sinks
from transformer.integrations.trackers.sink import Sink, open_sink
from transformer.registry import install_command
from transformer.run_dir import RunDir
from transformer.tracking import Tracker
from transformer.training.samples import open_trackers
from transformer.training.start import Run

Install: TypeAlias = Callable[[str], None]

# A package that writes down its calls, which are those of W&B and of trackio.
RECORDER = """
import json, os, sys, time
def record(*call):
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps(call) + "\\n")
def init(project, name, config, resume, **more):
    record("init", project, name, config, resume, more)
def Table(columns, data):
    return {"columns": columns, "data": data}
def log(values, step):
    record("log", step, values)
def finish():
    record("finish")
"""
SECRET = "hunter2-hunter2"
HANG = "time.sleep(3600)"

FAILS = {  # what the package does besides, and what the line says that is logged
    "import": ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
    "import ends the process": ("sys.exit(3)", "SystemExit: 3"),
    "init": ("def init(**more): raise OSError('no network\\nat all')", "OSError: no network"),
    "init says what is secret": (
        f"def init(**more): raise OSError('https://a.b/?write_token=abc&key=x {SECRET}')",
        "OSError: https://a.b/?write_token=...&key=... $WANDB_API_KEY",
    ),
    "init says escapes": (r"def init(**more): raise OSError('\x1b[2J')", r"OSError: \x1b[2J"),
    "log": ("def log(values, step): raise ValueError(step)", "ValueError: 1"),
    "log kills": ("def log(values, step): os.kill(os.getpid(), 9)", "it ended with status -9"),
}
LATE = "not done after 0.2 seconds, and ended: it may lack the last values"
FAILS_AT_THE_END = {  # and the seconds that it has
    "finish": ("def finish(): raise ValueError('late')", "ValueError: late", 100.0),
    "import hangs": (HANG, LATE, 0.2),
    "log hangs": (f"def log(values, step): {HANG}", LATE, 0.2),
    "finish hangs": (f"def finish(): {HANG}", LATE, 0.2),
}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Makes a package `wandb`, which does what else is said."""

    def write(code: str) -> None:
        (tmp_path / "packages").mkdir()
        (tmp_path / "packages" / "wandb.py").write_text(f"{RECORDER}\n{code}\n", encoding="utf-8")

    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    for name, value in {"PYTHONPATH": str(tmp_path / "packages"), "CALLS": str(tmp_path / "calls")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    for name in ("WANDB_PROJECT", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    return write


def calls(folder: Path) -> list[Any]:
    path = folder / "calls"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]] if path.exists() else []


def opened(folder: Path) -> Sink:
    return Sink("wandb", folder, run_id="0123456789abcdef", settings={"train.seed": 1})


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_sink_passes_on_everything_in_order_however_slow_the_tracker(tmp_path: Path, install: Install) -> None:
    install("print('loud', flush=True); os.write(1, b'loud'); os.write(2, b'loud')")
    folder = tmp_path / "my runs" / "böse/a b".replace("/", "-")
    sink = opened(folder)
    for step in range(2500):  # more than a pipe holds
        sink.scalars(step, {"train/loss": step / 2, "train/rate": 1e-3})
    sink.table(2500, "dev/samples", columns=["source", "translation"], rows=[["ein\nHaus", "\x1b é"]])
    sink.close(100.0)

    begin, *logged, end = calls(tmp_path)
    more = {"id": "0123456789abcdef", "dir": str(folder)}
    assert begin == ["init", "my-runs", "böse-a-b-01234567", {"train.seed": 1}, "allow", more]
    assert logged[:-1] == [["log", step, {"train/loss": step / 2, "train/rate": 1e-3}] for step in range(2500)]
    samples = {"columns": ["source", "translation"], "data": [["ein\nHaus", "\x1b é"]]}
    assert logged[-1] == ["log", 2500, {"dev/samples": samples}]
    assert end == ["finish"]


def test_sink_gives_a_tracker_no_path_for_the_id_of_a_run(tmp_path: Path, install: Install) -> None:
    """It is what run.json says, and W&B names a folder by it."""
    install("")
    Sink("wandb", tmp_path / "runs" / "a", run_id="../../../home/me", settings={}).close(100.0)
    begin, _ = calls(tmp_path)
    assert (begin[2], begin[5]["id"]) == ("a--..-..-h", "-..-..-home-me")


def test_sink_leaves_project_and_folder_to_wandbs_own_variables(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_DIR", "elsewhere")
    opened(tmp_path / "runs" / "a").close(100.0)
    begin, _ = calls(tmp_path)
    assert (begin[1], begin[5]["dir"]) == ("mine", "elsewhere")


def test_sink_closes_in_a_process_with_many_open_files(tmp_path: Path, install: Install) -> None:
    """More than select() takes, where that many are allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"at most {hard} open files")
    install("time.sleep(0.2)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    with ExitStack() as files:
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            files.enter_context(open(os.devnull, "rb"))
        sink = opened(tmp_path)
        for step in range(2500):  # more than a pipe holds
            sink.scalars(step, {"loss": 1.0})
        sink.close(100.0)
    assert calls(tmp_path)[-1] == ["finish"]


@pytest.mark.parametrize(("code", "said"), FAILS.values(), ids=FAILS)
def test_sink_says_once_why_a_tracker_has_failed(
    tmp_path: Path, install: Install, caplog: pytest.LogCaptureFixture, code: str, said: str
) -> None:
    install(code)
    sink = opened(tmp_path)

    def has_said() -> bool:
        sink.scalars(1, {"loss": 1.0})
        return bool(warnings_in(caplog))

    wait_for(has_said)
    sink.scalars(2, {"loss": 1.0})
    sink.close(100.0)
    assert warnings_in(caplog) == [f"train.trackers: wandb: {said}: the training goes on without it"]


@pytest.mark.parametrize(("code", "said", "seconds"), FAILS_AT_THE_END.values(), ids=FAILS_AT_THE_END)
def test_sink_says_what_a_tracker_lacks_at_the_end_and_leaves_no_process(
    tmp_path: Path, install: Install, caplog: pytest.LogCaptureFixture, code: str, said: str, seconds: float
) -> None:
    install(code)
    sink = opened(tmp_path)
    process = sink._process
    assert process is not None
    sink.scalars(1, {"loss": 1.0})
    sink.close(seconds)
    assert warnings_in(caplog) == [f"train.trackers: wandb: {said}"]
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_sink_leaves_out_what_a_tracker_does_not_take_and_says_so_once(
    tmp_path: Path, install: Install, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(HANG)
    monkeypatch.setattr(sinks, "MOST_WAITING", 10_000)
    sink = opened(tmp_path)
    for step in range(10_000):
        sink.scalars(step, {"loss": 1.0})
    assert len(sink._waiting) <= 10_000
    lacks = "does not keep up: the training does not wait for it, and it will lack some values"
    assert warnings_in(caplog) == [f"train.trackers: wandb: {lacks}"]
    sink.close(0.0)


@pytest.mark.parametrize(("error", "seconds"), [(None, 30.0), (KeyboardInterrupt, 10.0), (PeerError, 0.5)])
def test_open_sink_waits_less_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException] | None, seconds: float
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(Sink, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(Sink, "close", lambda _, seconds: waited.append(seconds))
    with (
        pytest.raises(error) if error else open(os.devnull, "rb"),
        open_sink("wandb", tmp_path, run_id="a", settings={}),
    ):
        if error is not None:
            raise error
    assert waited == [seconds]


def test_sink_is_left_out_where_the_package_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of its name, where W&B has run before, is none."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    sink = opened(tmp_path)
    sink.scalars(1, {"loss": 1.0})
    sink.close(100.0)
    missing = f"not installed, and left out: {install_command('wandb')}"
    assert warnings_in(caplog) == [f"train.trackers: wandb: {missing}"]


def test_sink_is_left_out_where_no_process_can_be_started(
    tmp_path: Path, install: Install, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
    sink = opened(tmp_path)
    sink.scalars(1, {"loss": 1.0})
    sink.close(100.0)
    (said,) = warnings_in(caplog)
    assert said.startswith("train.trackers: wandb: cannot be started: [Errno 2]")


KILLED = """
import os
from pathlib import Path
from transformer.integrations.trackers.sink import Sink
sink = Sink("wandb", Path("a"), run_id="a", settings={})
sink.scalars(1, {"loss": 1.0})
os.kill(os.getpid(), 9)
"""


def test_tracker_finishes_after_a_training_that_was_killed(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'packages'}{os.pathsep}{ROOT}")
    assert subprocess.run([sys.executable, "-c", KILLED], cwd=tmp_path, check=False).returncode == -9
    wait_for(lambda: calls(tmp_path)[1:] == [["log", 1, {"loss": 1.0}], ["finish"]])


# ---- what is sent ---------------------------------------------------------------------------------------------------


class Sent(Sink):
    """Keeps what it is to send."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.names: set[str] = set()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.steps.append(step)
        self.names |= values.keys()


def test_tracker_sends_no_step_twice_after_it_fell_back(tmp_path: Path) -> None:
    """Each start resumes after `first - 1` and ends at `last`; a validation may be made up at the last one."""
    sent = Sent()
    for first, last in ((1, 6), (5, 8), (3, 4), (4, 10)):
        with Tracker(RunDir(tmp_path), first - 1, sinks=[sent]) as tracker:
            for step in range(first, last + 1):
                tracker.scalars(step, {"train/loss": 1.0, "train/norm": float("nan"), "speed/padding_share": 0.1})
    assert sent.steps == [1, 2, 3, 4, 5, 6, 6, 7, 8, *range(4, 11)]
    assert sent.names == {"train/loss"}


def test_trackers_are_opened_by_rank_0_alone() -> None:
    """Nothing else of the run is asked for."""
    job = SimpleNamespace(train=TrainConfig(trackers=["wandb"]))
    run = SimpleNamespace(job=job, world=SimpleNamespace(is_rank0=False))
    with open_trackers(cast(Run, run)) as found:
        assert found == []
