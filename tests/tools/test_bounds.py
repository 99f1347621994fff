"""Bounds on the curves of a training: a line of the log and a finding of the doctor where one is left, nothing else."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from support.corpora import run, tiny_job, write_corpus
from support.paths import ROOT
from transformer import compose
from transformer.config.jobs import TrainJob
from transformer.config.settings import DataConfig
from transformer.run_dir import RunDir
from transformer.tools import bounds
from transformer.tools.bounds import KNOWN, LOSS, PERPLEXITY, Bounds, Watch, choose
from transformer.tools.doctor.command import doctor
from transformer.tools.doctor.curves import CHECK, check_curves
from transformer.tools.doctor.findings import Level
from transformer.tools.doctor.job import DoctorJob
from transformer.tracking import hyper_parameters

A_CURVE = Bounds("a curve", {"train.warmup_steps": 10}, {LOSS: ((100, 8.0, 10.0), (10_000, 4.0, 6.0))})


# ---- between which values, and of which trainings -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "value", "side"),
    [
        (100, 8.0, None),
        (100, 7.99, "below"),
        (1_000, 6.01, None),  # half of the way, of the logarithm
        (1_000, 5.99, "below"),
        (1_000, 8.01, "above"),
        (10_000, 6.01, "above"),
        (99, 1.0, None),
        (10_001, 1.0, None),
    ],
)
def test_bounds_are_lines_over_the_logarithm_of_the_step(step: int, value: float, side: str | None) -> None:
    found = A_CURVE.left(LOSS, step, value)
    assert (found is None) == (side is None)
    assert found is None or f"{value:.3f} is {side} the bounds of a curve" in found[1]
    assert A_CURVE.left("dev/loss", step, value) is None, "a curve without bounds"


def of_wmt(*overrides: str) -> TrainJob:
    job: TrainJob = compose("train", ["experiment=wmt14_en_de_base", *overrides])
    return job


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("data.root=a/copy", "run_dir=runs/b", "train.seed=2", "train.max_steps=300000", "train.max_tokens=8000"),
        ("train.learning_rate_scale=10", "model.dropout=0.0"),  # which are faults to be found
    ],
)
def test_bounds_of_wmt_are_for_its_settings_on_any_machine(overrides: tuple[str, ...]) -> None:
    job = of_wmt(*overrides)
    assert job.train.trackers == ["bounds"]
    found, why = choose(hyper_parameters(job))
    assert (found, why) == (KNOWN[0], "")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.warmup_steps=8000", "train.warmup_steps=8000 in place of 4000"),
        ("tokenizer.vocab_size=32000", "tokenizer.vocab_size=32000 in place of 37000"),
        ("train.tokens_per_step=4096", "train.tokens_per_step=4096 in place of 25000"),
        ("train.label_smoothing=0.0", "train.label_smoothing=0.0 in place of 0.1"),
        ("train.log_every=20", "train.log_every=20 in place of 100"),
        ("train.decay=linear", "train.decay=linear in place of inverse_sqrt"),
        ("init_from=runs/a", "init_from=runs/a in place of null"),
    ],
)
def test_bounds_of_wmt_are_not_for_other_settings(override: str, said: str) -> None:
    assert choose(hyper_parameters(of_wmt(override))) == (
        None,
        f"the bounds of wmt14_en_de_base are not for {said}",
    )


@pytest.mark.ci
@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "experiment").rglob("*.yaml")), ids=lambda path: path.stem)
def test_experiments_are_watched_where_they_have_bounds(path: Path) -> None:
    name = path.relative_to(ROOT / "configs" / "experiment").with_suffix("").as_posix()
    job: TrainJob = compose("train", [f"experiment={name}"])
    assert (job.train.trackers == ["bounds"]) == (name == "wmt14_en_de_base")


# What others have printed of base on WMT English-German, as docs/wmt.md converts it.
PUBLISHED = [
    (LOSS, 100, 9.454),
    (LOSS, 200, 8.644),
    (LOSS, 400, 7.903),
    (LOSS, 800, 7.005),
    (LOSS, 55_300, 3.433),
    (PERPLEXITY, 100_000, 4.92),
]


@pytest.mark.parametrize(("name", "step", "value"), PUBLISHED)
def test_bounds_of_wmt_hold_what_was_published(name: str, step: int, value: float) -> None:
    assert KNOWN[0].left(name, step, value) is None


# ---- in a training --------------------------------------------------------------------------------------------------


def test_watch_says_it_once_for_each_stretch(caplog: pytest.LogCaptureFixture) -> None:
    three = replace(A_CURVE, rows={LOSS: ((100, 8.0, 10.0), (1_000, 6.0, 8.0), (10_000, 4.0, 6.0))})
    watch = Watch(three)
    for step in range(100, 10_100, 100):
        watch.scalars(step, {LOSS: 11.0 if step > 300 else 9.0, "train/rate": 1e9})
    first, second, third = (record.message for record in caplog.records)
    assert first.startswith(
        "step 400: train/loss 11.000 is above the bounds of a curve, 6.80 to 8.80 here: docs/wmt.md"
    )
    assert second.startswith("step 1000: train/loss 11.000 is above the bounds of a curve, 6.00 to 8.00 here")
    assert third.startswith("step 10000: ")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def lines_of(run_dir: Path) -> list[str]:
    log = (run_dir / "train.log").read_text(encoding="utf-8")
    return [line for line in log.split("\n") if "bounds" in line]


def test_training_that_leaves_its_bounds_goes_on_and_the_doctor_finds_it(
    tmp_path: Path, corpus: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text has 60 pieces: its loss is never above 7, and not below 1 in 12 steps."""
    settings = {"train.warmup_steps": 10}
    low = Bounds("low", settings, {LOSS: ((1, 0.0, 0.5), (6, 0.0, 0.5), (12, 0.0, 9.0))})
    monkeypatch.setattr(bounds, "KNOWN", (low,))
    job = tiny_job(tmp_path / "a", corpus, trackers=["bounds"])
    run(job)
    first, second = lines_of(tmp_path / "a")
    assert "step 1: train/loss" in first
    assert "step 6: train/loss" in second
    assert RunDir(tmp_path / "a").read_results().steps == 12

    findings = check_curves(tmp_path / "a")
    assert [(check.name, check.level, check.where) for check in findings] == [
        (CHECK, Level.warning, str(tmp_path / "a"))
    ] * 2
    assert findings[0].found.startswith("step 1: train/loss")
    assert findings[1].found.startswith("step 6: train/loss")
    diagnosis = doctor(DoctorJob(run_dir=job.run_dir, data=corpus, text_only=True))
    assert [check for check in diagnosis.findings if check.name == CHECK] == findings

    monkeypatch.setattr(bounds, "KNOWN", (replace(low, rows={LOSS: ((1, 0.5, 9.0), (12, 0.5, 9.0))}),))
    [check] = check_curves(tmp_path / "a")
    assert (check.level, check.found) == (Level.ok, "within the bounds of low up to step 12")


def test_training_with_other_settings_is_told_so_and_one_without_bounds_nothing(
    tmp_path: Path, corpus: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "KNOWN", (Bounds("low", {"train.warmup_steps": 99}, {LOSS: ((1, 0.0, 0.5),)}),))
    job = tiny_job(tmp_path / "a", corpus, max_steps=2, trackers=["bounds"])
    run(job)
    why = "the bounds of low are not for train.warmup_steps=10 in place of 99"
    [line] = lines_of(tmp_path / "a")
    assert line.endswith(f"train.trackers=bounds compares nothing: {why}")
    [check] = check_curves(tmp_path / "a")
    assert (check.level, check.found) == (Level.ok, f"not compared: {why}")

    run(replace(job, run_dir=str(tmp_path / "b"), train=replace(job.train, trackers=None)))
    assert lines_of(tmp_path / "b") == []
    assert check_curves(tmp_path / "b") == []
    assert check_curves(tmp_path / "none") == []


def test_check_curves_of_a_damaged_run_is_no_finding(tmp_path: Path) -> None:
    for path in (RunDir(tmp_path).record, RunDir(tmp_path).metrics):
        path.write_text("{", encoding="utf-8")
    [check] = check_curves(tmp_path)
    assert check.level is Level.ok
    assert check.found.startswith(f"not compared: {tmp_path}/run.json: ")


def test_training_goes_on_without_the_tools(
    tmp_path: Path, corpus: DataConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("transformer.registry.has", lambda kind, name: kind != "tracker")
    with caplog.at_level(logging.WARNING):
        run(tiny_job(tmp_path / "a", corpus, max_steps=1, trackers=["bounds"]))
    assert RunDir(tmp_path / "a").read_results().steps == 1
    assert "train.trackers: bounds is not part of this installation, and left out" in caplog.text
