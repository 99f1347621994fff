"""`train.trackers`: the packages themselves, offline, with one run after a resume; one that hangs, without effect."""

import importlib.util
import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.corpora import assert_same_tensors, metrics_of, run, step_dir, tiny_job, write_corpus
from support.resumed_runs import learned, stop_at
from transformer.config.jobs import TrainJob
from transformer.config.settings import DataConfig
from transformer.integrations.trackers import sink

RUN_KEYS = {"train.seed": 1, "train.max_steps": 4, "init_from": "null"}  # some settings, as they are shown


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take long to start a tracker, and these trainings take a second."""
    for name in ("AT_END", "AFTER_ERROR"):
        monkeypatch.setattr(sink, name, 300.0)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install -e '.[{package}]'")


def job_with(tracker: str, run_dir: Path, corpus: DataConfig) -> TrainJob:
    return tiny_job(
        run_dir, corpus, max_steps=4, save_every=2, validate_every=2, average=2, samples=2, trackers=[tracker]
    )


def trained_in_two_starts(tracker: str, run_dir: Path, corpus: DataConfig) -> dict[str, Any]:
    """The run's record."""
    job = job_with(tracker, run_dir, corpus)
    stop_at(job, 3)
    run(job)
    assert "train.trackers" not in (run_dir / "train.log").read_text(encoding="utf-8"), "a warning"
    record: dict[str, Any] = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
    return record


METRICS = ("bleu", "chrf", "chrf_plus_plus", "ter")


def expected(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """The curves that metrics.jsonl has, and the scores at the end."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in metrics_of(run_dir):
        for name in row.keys() - {"step", "time", "speed/padding_share"}:
            curves.setdefault(name, []).append((row["step"], row[name]))
    results = json.loads((run_dir / "results.json").read_text(encoding="utf-8"))
    for name, scores in results["test_sets"].items():
        curves |= {f"scores/{name}/{metric}": [(4, scores[metric])] for metric in METRICS}
    return curves


TRACKIO = """
import json, sys, trackio
from trackio.sqlite_storage import SQLiteStorage
runs = trackio.Api().runs("runs")
shown = [[run.name, run.config, SQLiteStorage.get_logs("runs", run.name, run_id=run.id)] for run in runs]
json.dump(shown, sys.stdout)
"""


@pytest.mark.ci
@pytest.mark.usefixtures("patience")
def test_train_shows_everything_in_one_run_of_trackio(
    corpus: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run_dir = tmp_path / "runs" / "a"
    record = trained_in_two_starts("trackio", run_dir, corpus)

    said = subprocess.run([sys.executable, "-c", TRACKIO], capture_output=True, text=True, check=True).stdout
    ((name, config, rows),) = json.loads(said)
    assert name == f"a-{record['id'][:8]}"
    assert {key: config[key] for key in RUN_KEYS} == RUN_KEYS
    curves: dict[str, list[tuple[int, float]]] = {}
    tables = {}
    for row in rows:
        for key in row.keys() - {"step", "timestamp"}:
            if key == "dev/samples":
                tables[row["step"]] = row[key]["_value"]
            else:
                curves.setdefault(key, []).append((row["step"], row[key]))
    assert curves == expected(run_dir)
    assert tables.keys() == {2, 4}
    sources = (run_dir / "hypotheses" / "dev.src").read_text(encoding="utf-8").split("\n")[:2]
    assert [list(row) for row in tables[4]] == [["source", "translation", "reference"]] * 2
    assert [row["source"] for row in tables[4]] == sources


@pytest.mark.ci
@pytest.mark.usefixtures("patience")
def test_train_shows_everything_under_one_id_of_wandb(
    corpus: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline, each start has a folder of its own, which `wandb sync` puts together by the id."""
    needs("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for variable in ("WANDB_PROJECT", "WANDB_DIR"):
        monkeypatch.delenv(variable, raising=False)
    run_dir = tmp_path / "runs" / "a"
    record = trained_in_two_starts("wandb", run_dir, corpus)

    files = sorted(run_dir.glob(f"wandb/offline-run-*-{record['id']}/run-{record['id']}.wandb"))
    assert len(files) == 2
    curves: dict[str, list[tuple[int, float]]] = {}
    tables = {}
    for file in files:
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = [json.loads(line) for line in said.split("\n") if line]
        (begun,) = [line["run"] for line in found if line["type"] == "run"]
        assert (begun["project"], begun["display_name"]) == ("runs", f"a-{record['id'][:8]}")
        assert {key: begun["config"]["update"][key] for key in RUN_KEYS} == RUN_KEYS
        for line in found:
            items = line["history"]["item"] if line["type"] == "history" else {}
            for key in items.keys() - {"_step", "_runtime", "_timestamp"}:
                if key == "dev/samples.path":
                    tables[items["_step"]] = json.loads((file.parent / "files" / items[key]).read_text("utf-8"))
                elif not key.startswith("dev/samples"):
                    curves.setdefault(key, []).append((items["_step"], items[key]))
    assert curves == expected(run_dir)
    assert tables.keys() == {2, 4}
    sources = (run_dir / "hypotheses" / "dev.src").read_text(encoding="utf-8").split("\n")[:2]
    assert tables[4]["columns"] == ["source", "translation", "reference"]
    assert [row[0] for row in tables[4]["data"]] == sources


def test_train_is_the_same_with_a_tracker_that_hangs(
    corpus: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "trackio.py").write_text("import time\ntime.sleep(3600)\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    monkeypatch.setattr(sink, "AT_END", 0.1)
    hanging = job_with("trackio", tmp_path / "hanging", corpus)
    run(hanging)
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    lacks = "not done after 0.1 seconds, and ended: it may lack the last values"
    assert [line for line in said if "trackers" in line] == [f"train.trackers: trackio: {lacks}"]

    without = replace(hanging, run_dir=str(tmp_path / "without"), train=replace(hanging.train, trackers=None))
    run(without)
    assert learned(Path(hanging.run_dir)) == learned(Path(without.run_dir))
    model = "model.safetensors"
    assert_same_tensors(step_dir(Path(hanging.run_dir), 4) / model, step_dir(Path(without.run_dir), 4) / model)
