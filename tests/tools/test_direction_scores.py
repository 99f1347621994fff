"""What `table`, `report`, `push` and `doctor` make of a model of several directions: each of them, and their mean."""

import json
from pathlib import Path
from typing import Any

import pytest

from support.corpora import read, run, run_command, tiny_job, write_directions
from transformer.config.settings import DataConfig, Device
from transformer.integrations.push.command import push
from transformer.integrations.push.job import PushJob
from transformer.tools.doctor.command import doctor
from transformer.tools.doctor.findings import Level
from transformer.tools.doctor.job import DoctorJob
from transformer.tools.doctor.languages import SWAPPED
from transformer.tools.page import Component
from transformer.tools.report.job import ReportJob
from transformer.tools.report.overview import overview_section
from transformer.tools.report.reading import read_run
from transformer.tools.report.score_tables import checkpoints_section
from transformer.tools.report.scores import score_checkpoints
from transformer.tools.tables.job import TableJob


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return write_directions(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def runs(corpus: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run."""
    folder = tmp_path_factory.mktemp("runs")
    run(tiny_job(folder / "both", corpus, max_steps=4, save_every=4, validate_every=2, average=1))
    return folder


def tables_of(component: Component | None) -> dict[str, Any]:
    """The tables of a section, by their captions."""
    assert component is not None
    blocks: Any = component.data
    return {block["caption"]: block for block in blocks if block["kind"] == "table"}


def cells(rows: list[list[object]]) -> dict[str, list[str]]:
    """The texts of a table's rows, by the first of each."""
    found = {}
    for row in rows:
        name, *others = (str(cell["text"]) if isinstance(cell, dict) and "text" in cell else str(cell) for cell in row)
        found[name] = others
    return found


def test_table_has_a_column_for_the_mean(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_command("table", TableJob(table=str(runs)))
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    head, row = ([cell.strip("| ") for cell in line] for line in (lines[0], lines[-1]))
    assert [name for name in head if name.startswith("BLEU")] == [
        "BLEU, en_de",
        "BLEU, de_en",
        "BLEU, mean of the sets",
    ]
    assert row[head.index("BLEU, mean of the sets")] == f"{read(runs / 'both' / 'results.json')['mean']['bleu']:.2f}"
    [measured] = json.loads((runs / "table.json").read_text(encoding="utf-8"))["rows"][0]["runs"]
    assert measured["mean_bleu"] == read(runs / "both" / "results.json")["mean"]["bleu"]
    assert list(measured["scores"]) == ["en_de", "de_en"]


def test_report_has_the_directions_and_the_checkpoints_by_dev_set(runs: Path) -> None:
    """`now` is measured on each dev set; of the mean there is no interval."""
    reading = read_run(str(runs / "both"))
    overview = cells(tables_of(overview_section([reading], []))["Runs"]["rows"])
    assert overview["languages"] == ["en → de, de → en"]
    assert overview["BLEU, mean of the sets"] == [f"{read(runs / 'both' / 'results.json')['mean']['bleu']:.2f}"]

    scores = score_checkpoints(reading, ReportJob(checkpoints=1, device=Device.cpu))
    assert reading.missing == []
    name = str(runs / "both")
    tables = tables_of(checkpoints_section([reading], {name: scores}))
    assert list(tables) == [f"{name}, dev set", f"{name}, devs.en_de", f"{name}, devs.de_en"]
    validation = read(runs / "both" / "results.json")["validations"][0]
    for caption, scored in zip(tables, (validation, *validation["sets"].values()), strict=True):
        table = tables[caption]
        assert ("BLEU now" in table["head"]) == (scored is not validation)
        assert cells(table["rows"])["step 2"][2:4] == [f"{scored['bleu']:.2f}", f"{scored['chrf']:.2f}"]


def test_card_has_the_directions_and_the_mean(runs: Path) -> None:
    pushed = push(PushJob(run_dir=str(runs / "both"), repo="someone/both", license="mit", dry_run=True))
    assert {f"hypotheses/devs.{name}.src" for name in ("en_de", "de_en")} <= pushed.files.keys()
    card = pushed.card
    assert "translates from `en` to `de`, from `de` to `en`: a Transformer" in card
    mean = read(runs / "both" / "results.json")["mean"]
    assert f"| mean |  | {mean['bleu']:.2f} | {mean['chrf']:.2f} |" in card


def test_doctor_examines_a_set_in_its_own_languages(corpus: DataConfig, tmp_path: Path) -> None:
    """Of sets that go there and back, none looks exchanged; with one source language for all, those back do."""
    job = DoctorJob(run_dir=str(tmp_path / "a"), data=corpus, text_only=True)
    assert not [check for check in doctor(job).checks if check.name == SWAPPED and check.level is not Level.ok]
