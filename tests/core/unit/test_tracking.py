"""TensorBoard, metrics.jsonl, train.log and the bar: read back with TensorBoard's own reader, across resumes."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import pty
import re
import signal
import struct
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.data.provider import ListHyperparametersResult
from tensorboard.plugins import base_plugin
from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups

from support.checkpoints import status_of
from transformer.config.jobs import TrainJob
from transformer.config.settings import ModelConfig, TrainConfig
from transformer.errors import StorageError
from transformer.run_dir import RunDir
from transformer.tracking import HIDDEN_BY_BAR, Tracker, log_to, progress_bar

RUNS = {  # each start resumes after `first - 1` and ends at `last`, ahead of its last checkpoint
    "once": [(1, 6)],
    "goes on": [(1, 6), (7, 9)],
    "falls back": [(1, 6), (5, 8)],
    "again and again": [(1, 6), (5, 7), (3, 4), (4, 9), (1, 2), (3, 5)],
}


def events(run_dir: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(run_dir), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def scalars(run_dir: Path, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events(run_dir).Scalars(name)]


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Every line, as strict JSON: NaN and Infinity are not."""

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is not JSON")

    text = (run_dir / "metrics.jsonl").read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text[:-1].split("\n")]


@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
def test_tracker_writes_no_step_twice_and_misses_none(tmp_path: Path, runs: list[tuple[int, int]]) -> None:
    expected: dict[int, float] = {}
    for start, (first, last) in enumerate(runs):
        expected = {step: value for step, value in expected.items() if step < first}
        tracker = Tracker(RunDir(tmp_path), first - 1)
        for step in range(first, last + 1):
            expected[step] = 100.0 * start + step
            tracker.scalars(step, {"train/loss": expected[step], "speed/utilisation": None})
        tracker.close()
        newest = max(tmp_path.glob("events.*"), key=lambda path: path.stat().st_mtime_ns)
        newest.rename(tmp_path / f"events.out.tfevents.{start:010}")  # as if the starts were seconds apart
    assert scalars(tmp_path, "train/loss") == list(expected.items())
    assert [(line["step"], line["train/loss"]) for line in metrics(tmp_path)] == list(expected.items())
    assert events(tmp_path).Tags()["scalars"] == ["train/loss"]
    assert all(set(line) == {"step", "time", "train/loss"} for line in metrics(tmp_path))
    files = [f"events.out.tfevents.{start:010}" for start in range(len(runs))]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*files, "metrics.jsonl"]


@pytest.mark.parametrize("cut", [b'{"step": 3, "ti', b'{"step": 3}\n\xff\xfe', b"\n\n", b"[]\nnull\n"])
def test_tracker_drops_a_line_that_a_crash_cut_short(tmp_path: Path, cut: bytes) -> None:
    tracker = Tracker(RunDir(tmp_path), 0)
    tracker.scalars(1, {"loss": 1.0})
    tracker.scalars(2, {"loss": 2.0})
    tracker.close()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(cut)
    tracker = Tracker(RunDir(tmp_path), 2)
    tracker.scalars(3, {"loss": 3.0})
    tracker.close()
    assert [(line["step"], line["loss"]) for line in metrics(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_tracker_keeps_what_was_written_through_a_kill(tmp_path: Path) -> None:
    def write_and_be_killed() -> None:
        tracker = Tracker(RunDir(tmp_path), 0)
        for step in (1, 2, 3):
            tracker.scalars(step, {"loss": float(step)})
        time.sleep(0.5)  # TensorBoard writes from a thread
        os.kill(os.getpid(), signal.SIGKILL)

    assert status_of(write_and_be_killed) == -signal.SIGKILL
    Tracker(RunDir(tmp_path), 3).close()
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]
    assert [step for step, _ in scalars(tmp_path, "loss")] == [1, 2, 3]


@pytest.mark.parametrize("method", ["flush", "close", "add_scalar", "add_text"])
def test_tracker_reports_what_it_cannot_write(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user whose disk is full, or who deletes a run that is training, is told so: it is no bug."""

    def fail(*arguments: object) -> None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))  # without the name

    tracker = Tracker(RunDir(tmp_path), 0)
    with monkeypatch.context() as patch:
        patch.setattr(f"torch.utils.tensorboard.SummaryWriter.{method}", fail)
        with pytest.raises(StorageError) as raised:
            use(tracker)
    expected = rf"{tmp_path}: cannot be written: No such file or directory \(\d+ bytes free\)"
    assert re.fullmatch(expected, str(raised.value))
    tracker.close()


def use(tracker: Tracker) -> None:
    tracker.scalars(1, {"loss": 1.0})
    tracker.table(1, "dev/samples", columns=["source"], rows=[["a"]])
    tracker.flush()
    tracker.close()


def test_tracker_writes_strict_json_for_numbers_that_are_not_finite(tmp_path: Path) -> None:
    tracker = Tracker(RunDir(tmp_path), 0)
    tracker.scalars(1, {"norm": float("nan"), "perplexity": float("inf"), "loss": 1.0})
    tracker.close()
    (line,) = metrics(tmp_path)
    assert (line["step"], line["loss"]) == (1, 1.0)


def test_tracker_shows_texts_as_they_are(tmp_path: Path) -> None:
    tracker = Tracker(RunDir(tmp_path), 0)
    rows = [["a | b *c* é", ""], ["# d", "e"]]
    tracker.table(4, "dev/samples", columns=["source", "translation"], rows=rows)
    tracker.close()
    (event,) = events(tmp_path).Tensors("dev/samples/text_summary")
    assert event.step == 4
    assert event.tensor_proto.string_val[0].decode() == (
        "    source      a | b *c* é\n    translation \n    source      # d\n    translation e"
    )


def hyper_parameter_tab(folder: Path) -> tuple[Any, dict[str, Any]]:
    """What TensorBoard's own plugin makes of the runs in a folder: its columns, and a row for each run."""
    runs = EventMultiplexer()
    runs.AddRunsFromDirectory(str(folder))
    runs.Reload()
    logdir = str(folder)
    backend = backend_context.Context(
        base_plugin.TBContext(data_provider=MultiplexerDataProvider(runs, logdir), logdir=logdir)
    )
    request = RequestContext()
    columns = backend.experiment_from_metadata(
        request,
        "",
        True,
        backend.hparams_metadata(request, ""),
        ListHyperparametersResult(hyperparameters=[], session_groups=[]),
    )
    wanted = api_pb2.ListSessionGroupsRequest(slice_size=10, allowed_statuses=[api_pb2.STATUS_UNKNOWN])
    found = list_session_groups.Handler(request, backend, "", wanted).run()
    return columns, {group.sessions[0].name: group for group in found.session_groups}


def test_tracker_puts_settings_of_a_sweep_beside_their_scores(tmp_path: Path) -> None:
    """The settings that differ come first; a run that was resumed stands once, with its newest scores."""
    for name, d_ff, rate in (("a", 64, None), ("b", 128, 1e-3)):
        job = TrainJob(run_dir=name, model=ModelConfig(d_ff=d_ff), train=TrainConfig(learning_rate=rate))
        for step in (1, 2):
            tracker = Tracker(RunDir(tmp_path / name), step - 1)
            tracker.settings(job)
            tracker.scalars(step, {"train/loss": 1.0, "dev/bleu": float(d_ff + step)})
            tracker.close()

    columns, rows = hyper_parameter_tab(tmp_path)
    names = [column.name for column in columns.hparam_infos]
    assert names[:2] == ["model.d_ff", "train.learning_rate"]
    assert [column.name for column in columns.hparam_infos if column.differs] == names[:2]
    assert {"model.norm", "train.seed", "search.beam_size"} <= set(names)
    assert "run_dir" not in names
    assert [column.name.tag for column in columns.metric_infos] == ["dev/bleu", "train/loss"]

    assert list(rows) == ["a", "b"]
    of_b = rows["b"]
    assert of_b.hparams["model.d_ff"].number_value == 128
    assert of_b.hparams["model.norm"].string_value == "post"
    assert {of.name.tag: of.value for of in of_b.metric_values} == {"dev/bleu": 130.0, "train/loss": 1.0}
    assert scalars(tmp_path / "b", "dev/bleu") == [(1, 129.0), (2, 130.0)]


@pytest.mark.parametrize("is_shown", [False, True])
def test_log_to_appends_and_lets_go(tmp_path: Path, caplog: pytest.LogCaptureFixture, is_shown: bool) -> None:
    """The file has every line, whether or not the process shows them; what it shows stays as it was."""
    caplog.set_level(logging.INFO if is_shown else logging.WARNING, logger="transformer")
    logger = logging.getLogger("transformer.somewhere")
    package = logging.getLogger("transformer")
    before = (list(package.handlers), package.level, package.propagate)
    for message in ("first é", "second"):
        with log_to(tmp_path / "train.log"):
            logger.info("%s", message)
        logger.info("outside")
    lines = (tmp_path / "train.log").read_text(encoding="utf-8").split("\n")
    assert [line.split(" INFO ")[-1] for line in lines] == ["first é", "second", ""]
    assert (package.handlers, package.level, package.propagate) == before
    assert caplog.messages == (["first é", "outside", "second", "outside"] if is_shown else [])


def test_progress_bar_is_silent_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(10, 3, unit="step", shown=True) as bar:
        bar.update()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_bar_keeps_lines_that_nobody_needs_beside_it_off_the_terminal(
    is_terminal: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in train.log all the same, and the handlers of the process are as they were."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(handler)
    try:
        with log_to(tmp_path / "train.log"), progress_bar(10, 3, unit="step", shown=True):
            logging.getLogger("transformer").warning("step 4: saved", extra=HIDDEN_BY_BAR)
            logging.getLogger("transformer").warning("step 4: dev loss 1.5")
        logging.getLogger("transformer").warning("step 5: saved", extra=HIDDEN_BY_BAR)
    finally:
        logging.getLogger().removeHandler(handler)

    shown = capsys.readouterr().err
    assert ("step 4: saved" in shown) == (not is_terminal)
    assert "step 4: dev loss 1.5" in shown
    assert "step 5: saved" in shown
    logged = (tmp_path / "train.log").read_text(encoding="utf-8")
    assert re.findall(r"step \d: .*", logged) == ["step 4: saved", "step 4: dev loss 1.5"]
    assert handler.filters == []


def test_progress_bar_starts_where_the_run_resumes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_bar(10, 3, unit="step", shown=True) as bar:
        bar.update()
        logging.getLogger("transformer").warning("above the bar")
    out, err = capsys.readouterr()
    assert out == ""
    assert "3/10" in err
    assert "4/10" in err


@pytest.mark.parametrize(
    ("level", "is_shown"),
    [(logging.NOTSET, True), (logging.INFO, True), (logging.DEBUG, False), (logging.WARNING, False)],
    ids=logging.getLevelName,
)
def test_progress_bar_is_shown_beside_the_usual_log_alone(
    level: int, is_shown: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where a process shows warnings only (--quiet), nor where it shows every line (--verbose)."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(level)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    with progress_bar(10, 3, unit="step", shown=True) as bar:
        bar.update()
    assert ("4/10" in capsys.readouterr().err) == is_shown


def test_progress_bar_that_is_not_shown_needs_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python without a standard error has None in its place."""
    monkeypatch.setattr(sys, "stderr", None)
    with progress_bar(10, 3, unit="step", shown=False) as bar:
        bar.update()


def shown_in_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """The last that a bar of a long training shows in a terminal of this width; 0: of a size that nobody has set."""
    terminal, of_program = pty.openpty()
    fcntl.ioctl(of_program, termios.TIOCSWINSZ, struct.pack("HHHH", 24 if columns else 0, columns, 0, 0))
    with open(of_program, "w", encoding="utf-8") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with progress_bar(100_000, 9_999, unit="step", shown=True) as bar:
            bar.set_postfix_str("loss 2.345, 12,345 tokens/s, BLEU 34.56", refresh=False)
            bar.update()
    shown = b""
    with contextlib.suppress(OSError):  # at its end, since nobody writes to it any longer
        while True:
            shown += os.read(terminal, 4096)
    os.close(terminal)
    return shown.decode().rstrip("\r\n").rpartition("\r")[2]


@pytest.mark.parametrize("columns", [80, 200, 0])
def test_progress_bar_shows_every_figure_in_a_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long training, too; a terminal of an unknown size is taken for one of 80 columns."""
    shown = shown_in_terminal(columns, monkeypatch)
    pattern = r"10000/100000 \[\d\d:\d\d<\S+, loss 2\.345, 12,345 tokens/s, BLEU 34\.56\]  10%\|.*\|"
    assert re.fullmatch(pattern, shown), shown
    assert len(shown) == (columns or 80) - 1


def test_progress_bar_shows_time_and_loss_in_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = shown_in_terminal(40, monkeypatch)
    assert re.fullmatch(r"10000/100000 \[\d\d:\d\d<\S+, loss .*", shown), shown
    assert len(shown) == 39
