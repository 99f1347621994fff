"""`transformer table table=DIR`: the runs of a sweep, measured as they are."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.corpora import run, run_command, tiny_job, write_corpus
from transformer.config.settings import Metric
from transformer.errors import InputError
from transformer.records import Results, Validation
from transformer.run_dir import RunDir
from transformer.tools.tables.job import TableJob

BLEU = {"seed-1": 20.0, "seed-2": 30.0, "wide": 40.0, "again/seed-3": 10.0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs of one kind and a wider one, whose dev scores are made up; and one that is not finished."""
    folder = tmp_path_factory.mktemp("runs")
    data = write_corpus(tmp_path_factory.mktemp("corpus"))
    budget: dict[str, Any] = {"max_steps": 2, "save_every": 2, "average": 1}
    for seed, name in enumerate(("seed-1", "seed-2", "again/seed-3"), 1):
        run(tiny_job(folder / name, data, seed=seed, **budget))
    run(tiny_job(folder / "wide", data, model={"d_ff": 96}, **budget))
    for name, bleu in BLEU.items():
        directory = RunDir(folder / name)
        best = Validation(1, loss=100.0 - bleu, nll=2.0, bleu=bleu, chrf=50.0)
        results = directory.read_results()
        directory.write_results(replace(results, validations=[best, *results.validations]))

    shutil.copytree(folder / "wide", folder / "begun")
    RunDir(folder / "begun").results.unlink()
    return folder


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "runs"))


def test_table_of_a_folder_measures_its_runs_best_first(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs that differ in their seed only share a row; nothing is trained."""
    run_command("table", TableJob(table=str(runs)))
    out = capsys.readouterr().out
    first, second = (line.split(" | ") for line in out.split("\n") if line.startswith(("| 1 |", "| 2 |")))
    assert [cell.strip("| ") for cell in first[:3]] == ["1", "`model.d_ff=96`", "40.00"]
    assert [cell.strip("| ") for cell in second[:3]] == ["2", "`model.d_ff=64`", "20.00, sd 10.00"]
    assert ", sd " in second[3], "perplexity"
    assert "of 3 seeds" in second[5]
    assert "- Sorted by the dev BLEU of each run's best checkpoint, the best row first.\n" in out
    assert f"- Left out: {runs}/begun: the run is not finished.\n" in out
    assert (runs / "table.md").read_text(encoding="utf-8") == out

    table = json.loads((runs / "table.json").read_text(encoding="utf-8"))
    assert [[of["run_dir"] for of in row["runs"]] for row in table["rows"]] == [
        [f"{runs}/wide"],
        [f"{runs}/seed-1", f"{runs}/seed-2", f"{runs}/again/seed-3"],
    ]
    assert not RunDir(runs / "begun").results.exists()


@pytest.mark.parametrize(("metric", "column"), [(Metric.loss, "loss, dev"), (Metric.chrf, "greedy chrF, dev")])
def test_table_of_a_folder_sorts_by_the_metric_of_the_runs(
    runs: Path, capsys: pytest.CaptureFixture[str], metric: Metric, column: str
) -> None:
    for name in BLEU:
        directory = RunDir(runs / name)
        record = directory.read_record()
        train = replace(record.config.train, metric=metric)
        directory.write_record(replace(record, config=replace(record.config, train=train)))
        results: Results = directory.read_results()
        opposed = [replace(one, loss=one.bleu, chrf=100 - one.bleu) for one in results.validations[:1]]
        directory.write_results(replace(results, validations=opposed))
    run_command("table", TableJob(table=str(runs), output=str(runs / "out")))
    out = capsys.readouterr().out
    assert f"| {column} |" in out
    assert "| 1 | `model.d_ff=64` |" in out
    assert f"- Sorted by the dev {metric.title} of" in out
    assert (runs / "out" / "table.md").exists()


def test_table_of_a_folder_has_a_run_that_diverged_last(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in BLEU:
        directory = RunDir(runs / name)
        record = directory.read_record()
        train = replace(record.config.train, metric=Metric.loss)
        directory.write_record(replace(record, config=replace(record.config, train=train)))
    directory = RunDir(runs / "wide")
    results = directory.read_results()
    validations = [replace(validation, loss=math.nan) for validation in results.validations]
    directory.write_results(replace(results, validations=validations))

    run_command("table", TableJob(table=str(runs)))
    rows = [line.split(" | ") for line in capsys.readouterr().out.split("\n") if line.startswith(("| 1 |", "| 2 |"))]
    assert [row[1] for row in rows] == ["`model.d_ff=64`", "`model.d_ff=96`"]
    assert rows[1][2].strip() == "nan"


def test_table_of_a_folder_sorts_runs_of_both_metrics_by_bleu(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A loss of 60 is no BLEU of 60: where the runs differ in their metric, all of them show their best BLEU."""
    directory = RunDir(runs / "wide")
    record = directory.read_record()
    train = replace(record.config.train, metric=Metric.loss)
    directory.write_record(replace(record, config=replace(record.config, train=train)))
    results = directory.read_results()
    worst = replace(results.validations[0], loss=1000.0, bleu=5.0)
    directory.write_results(replace(results, validations=[worst]))

    run_command("table", TableJob(table=str(runs)))
    out = capsys.readouterr().out
    assert "- Sorted by the dev BLEU of" in out
    rows = [[cell.strip("| ") for cell in line.split(" | ")] for line in out.split("\n") if line.startswith("| ")]
    best_dev = {row[1]: row[2] for row in rows if row[0] in ("1", "2")}
    assert best_dev == {
        "`model.d_ff=64 train.metric=bleu`": "20.00, sd 10.00",
        "`model.d_ff=96 train.metric=loss`": "5.00",
    }


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (TableJob(rows="a"), "leave rows and seeds out"),
        (TableJob(seeds=2), "leave rows and seeds out"),
        (TableJob(), "no finished run: Left out: .*/begun: the run is not finished"),
    ],
    ids=["rows", "seeds", "none finished"],
)
def test_table_of_a_folder_refuses_in_one_line(runs: Path, job: TableJob, message: str) -> None:
    for name in BLEU:
        shutil.rmtree(runs / name)
    with pytest.raises(InputError, match=message) as refused:
        run_command("table", replace(job, table=str(runs)))
    assert "\n" not in str(refused.value)
