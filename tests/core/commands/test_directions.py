"""One model of several directions: a dev set and a test set of each, scores by direction, and their mean.

The corpus is digits in English and in German words, English to German under the tag <2de>, and back under <2en>.
"""

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from sacrebleu.metrics.bleu import BLEU

import transformer
from support.corpora import (
    assert_same_end,
    metrics_of,
    progress_of,
    results_of,
    run,
    steps_of,
    tiny_job,
    write_directions,
)
from support.ranks import ranks
from support.resumed_runs import learned, stop_at
from transformer.config.jobs import EvaluateJob, TrainJob
from transformer.config.settings import DataConfig, Metric, SweepConfig
from transformer.evaluation.sets import evaluate, format_results
from transformer.records import DevScores, Progress, Validation
from transformer.run_dir import RunDir

DEVS = ("devs.en_de", "devs.de_en")
NUMBERS = ("loss", "nll", "bleu", "chrf")


@pytest.fixture(scope="module")
def directions(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return write_directions(tmp_path_factory.mktemp("directions"))


@pytest.fixture(scope="module")
def finished(directions: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> TrainJob:
    job = tiny_job(tmp_path_factory.mktemp("runs") / "both", directions)
    run(job)
    return job


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


# ---- validation -----------------------------------------------------------------------------------------------------


def test_validation_is_the_mean_of_the_dev_sets(finished: TrainJob) -> None:
    """Each of them counts as much, whatever its size; state.json, results.json and metrics.jsonl have all of them."""
    run_dir = Path(finished.run_dir)
    validations = results_of(run_dir)["validations"]
    assert progress_of(run_dir, steps_of(run_dir)[-1])["training"]["progress"]["validations"] == validations
    by_step = {line["step"]: line for line in metrics_of(run_dir) if "dev/bleu" in line}
    assert [validation["step"] for validation in validations] == [6, 12] == list(by_step)
    for validation in validations:
        assert tuple(validation["sets"]) == DEVS
        for number in NUMBERS:
            of_sets = [scores[number] for scores in validation["sets"].values()]
            assert validation[number] == fmean(of_sets)
            assert number == "bleu" or len(set(of_sets)) == 2  # they are two measurements
        for name, scores in {"dev": validation, **validation["sets"]}.items():
            shown = [by_step[validation["step"]][f"{name}/{number}"] for number in ("loss", "bleu", "chrf")]
            assert shown == [scores["loss"], scores["bleu"], scores["chrf"]]


def test_log_has_each_dev_set_below_their_mean(
    directions: DataConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tiny_job(tmp_path / "a", directions, max_steps=2))
    [place] = [n for n, message in enumerate(caplog.messages) if message.startswith("step 2: dev loss ")]
    assert [message.split(" loss ")[0].strip() for message in caplog.messages[place + 1 : place + 3]] == list(DEVS)
    sources = [message.split()[1] for message in caplog.messages[place:] if message.startswith("  source ")]
    assert sources == ["<2de>", "<2en>"]


def test_validation_of_one_dev_set_is_that_set() -> None:
    scores = DevScores(2.0, 1.5, 10.0, 30.0)
    assert Validation.of(3, {"dev": scores}) == Validation(3, 2.0, 1.5, 10.0, 30.0)
    assert Validation.of(3, {"dev": scores}).sets == {}


@pytest.mark.parametrize(("metric", "best"), [(Metric.bleu, 2), (Metric.chrf, 3), (Metric.loss, 3)])
def test_best_step_and_patience_are_by_the_mean(metric: Metric, best: int) -> None:
    """Step 1 has the best of one direction, step 2 the best mean of BLEU, step 3 that of chrF and of the losses."""
    progress = Progress(step=3)
    for step, (first, second) in {
        1: (DevScores(2.0, 2.0, 40.0, 60.0), DevScores(4.0, 4.0, 10.0, 30.0)),
        2: (DevScores(3.0, 3.0, 30.0, 44.0), DevScores(3.5, 3.5, 21.0, 44.0)),
        3: (DevScores(2.5, 2.5, 20.0, 50.0), DevScores(3.0, 3.0, 30.0, 50.0)),
    }.items():
        validation = Validation.of(step, {"devs.a": first, "devs.b": second})
        assert progress.record(validation, metric) == (step in (1, best))
    assert progress.best_steps(metric)[0] == best
    assert progress.stalled(metric) == 3 - best


def test_resume_in_the_middle_gives_the_same_bits(finished: TrainJob, tmp_path: Path) -> None:
    job = replace(finished, run_dir=str(tmp_path / "a"))
    stop_at(job, 7)
    run(job)
    assert_same_end(Path(finished.run_dir), tmp_path / "a")
    assert learned(Path(finished.run_dir)) == learned(tmp_path / "a")


def test_resume_says_that_a_dev_set_has_changed(
    directions: DataConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Dev sets only measure: a run resumes with others, of other directions, too, or with a single one."""
    job = tiny_job(tmp_path / "a", directions, max_steps=6)
    stop_at(job, 3)
    run(replace(job, data=replace(directions, devs={}, dev=directions.devs["en_de"])))
    assert caplog.text.count("the text of data.dev has changed") == 1
    assert sorted(path.name for path in (tmp_path / "a" / "hypotheses").glob("dev*")) == ["dev.ref", "dev.src"]
    run(job)
    assert caplog.text.count("the text of data.devs has changed") == 1


@pytest.mark.ci
def test_two_ranks_validate_each_dev_set(finished: TrainJob, tmp_path: Path) -> None:
    """They share every set: its losses are those that one rank measures, but for dropout's masks."""
    job = replace(finished, run_dir=str(tmp_path / "a"))

    assert ranks(2, lambda: run(job), tmp_path) == [0, 0], (tmp_path / "rank-0").read_text(encoding="utf-8")
    shared, alone = results_of(tmp_path / "a")["validations"], results_of(Path(finished.run_dir))["validations"]
    for one, other in zip(shared, alone, strict=True):
        for name in DEVS:
            found = [one["sets"][name][number] for number in ("loss", "nll")]
            assert found == pytest.approx([other["sets"][name][number] for number in ("loss", "nll")], rel=0.01)


# ---- test sets ------------------------------------------------------------------------------------------------------


def bleu_of(run_dir: Path, name: str) -> float:
    """BLEU of the translations that a run keeps, by sacreBLEU itself."""
    hypotheses, references = (lines(run_dir / "hypotheses" / f"{name}.{kind}") for kind in ("hyp", "ref"))
    return BLEU().corpus_score(hypotheses, [references]).score


def test_results_have_each_direction_and_their_mean(finished: TrainJob) -> None:
    run_dir = Path(finished.run_dir)
    results = results_of(run_dir)
    scores = results["test_sets"]
    assert list(scores) == ["en_de", "de_en"]
    assert results["mean"] == {
        field: fmean(of_set[field] for of_set in scores.values()) for field in ("bleu", "chrf", "chrf_plus_plus", "ter")
    }
    assert results["mean"]["bleu"] == pytest.approx(fmean(bleu_of(run_dir, name) for name in scores))

    shown = format_results(run_dir, RunDir(run_dir).read_results()).splitlines()
    assert [line.split()[0] for line in shown[:3]] == ["en_de", "de_en", "mean"]
    assert shown[2].startswith(f"mean   BLEU {results['mean']['bleu']:.2f}, chrF {results['mean']['chrf']:.2f}, ")


def test_evaluate_has_the_mean_of_directions(finished: TrainJob) -> None:
    """Of the run's own sets and of others; sets of one direction have none, which are of different kinds of text."""
    own = evaluate(EvaluateJob(run_dir=finished.run_dir, threads=1))
    assert own.mean == results_of(Path(finished.run_dir))["mean"]
    test = finished.data.test
    named = evaluate(EvaluateJob(run_dir=finished.run_dir, threads=1, test={"a": test["en_de"], "b": test["de_en"]}))
    assert named.mean == own.mean
    alike = evaluate(EvaluateJob(run_dir=finished.run_dir, threads=1, test={"a": test["en_de"], "b": test["en_de"]}))
    assert alike.mean == {}
    shown = format_results(Path(finished.run_dir), alike).splitlines()
    assert [line.split()[0] for line in shown[:3]] == ["a", "b", "model:"]


def test_run_without_test_sets_is_scored_on_each_dev_set(directions: DataConfig, tmp_path: Path) -> None:
    job = tiny_job(tmp_path / "a", replace(directions, test={}), max_steps=4)
    results = results_of(run(job))
    assert (results["test_sets"], results["dev"], tuple(results["devs"])) == ({}, None, DEVS)
    assert results["mean"]["bleu"] == fmean(scores["bleu"] for scores in results["devs"].values())
    assert results["devs"]["devs.de_en"]["bleu"] == pytest.approx(bleu_of(tmp_path / "a", "devs.de_en"))
    shown = format_results(tmp_path / "a", RunDir(tmp_path / "a").read_results()).splitlines()
    assert [line.split()[0] for line in shown[:3]] == [*DEVS, "mean"]

    before = (tmp_path / "a" / "results.json").stat().st_mtime_ns
    run(job)
    assert (tmp_path / "a" / "results.json").stat().st_mtime_ns == before  # it is finished


def test_a_direction_has_the_languages_of_its_set(directions: DataConfig) -> None:
    assert directions.directions() == [("en", "de"), ("de", "en")]
    assert directions.languages_of("extra.de_en") == directions.languages_of("devs.de_en") == ("de", "en")
    assert directions.direction_of("de_en") == ("de", "en", "<2en>")
    assert directions.tgt_lang_of("devs.de_en") == directions.tgt_lang_of("de_en") == "en"


@pytest.mark.plugins
def test_sweep_compares_the_means_of_the_dev_sets(finished: TrainJob) -> None:
    from transformer.tools.search_settings import sweep

    job = EvaluateJob(run_dir=finished.run_dir, threads=1, sweep=SweepConfig(length_penalty=[0.0, 1.0]))
    found = sweep(job)
    assert found.sentences == 32
    translator = transformer.load(finished.run_dir, length_penalty=1.0)
    of_sets = []
    for name in DEVS:
        folder = Path(finished.run_dir) / "hypotheses"
        hypotheses = translator.translate(lines(folder / f"{name}.src"))
        of_sets.append(BLEU().corpus_score(hypotheses, [lines(folder / f"{name}.ref")]).score)
    assert found.trials[1].bleu == pytest.approx(fmean(of_sets), abs=1e-6)
