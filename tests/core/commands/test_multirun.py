"""`transformer train --multirun`: grids, what becomes of runs that fail or are finished, several ranks, and Optuna."""

import functools
import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig

from support.command_line import composed, enter
from support.corpora import finish, overrides, start, tiny_job, write_corpus
from support.paths import ROOT
from transformer.cli import commands
from transformer.config.settings import Metric
from transformer.errors import InputError, NumericalError, Stopped
from transformer.records import Results, Validation
from transformer.terminal import PrintableFormatter

pytestmark = pytest.mark.usefixtures("in_empty_folder")


def failing(errors: dict[int, BaseException]) -> Callable[[], None]:
    """A command that raises these errors in the runs of these numbers, counted from 1."""
    number = 0

    def run() -> None:
        nonlocal number
        number += 1
        if number in errors:
            raise errors[number]

    return run


# ---- runs that fail -------------------------------------------------------------------------------------------------


def test_multirun_goes_on_after_a_run_that_fails_and_ends_with_its_status() -> None:
    then = failing({2: NumericalError("too many skipped updates"), 4: InputError("no such file")})
    result = enter("train", "-m", "experiment=small", "train.seed=1,2", "model.norm=pre,post", then=then)
    assert [(job.train.seed, job.model.norm.name) for job in result.jobs] == [
        (seed, norm) for seed in (1, 2) for norm in ("pre", "post")
    ]
    assert result.status == 6
    assert result.err == (
        "transformer: error: 2 of 4 runs failed, the first with model.norm=post, train.seed=1: "
        "too many skipped updates\n"
    )


def test_multirun_says_at_once_which_run_fails(caplog: pytest.LogCaptureFixture) -> None:
    result = enter("train", "-m", "experiment=small", "train.seed=1,2", then=failing({1: InputError("no such file")}))
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [
        "run 1 of the sweep failed (train.seed=1): no such file"
    ]
    assert (result.status, len(result.jobs)) == (2, 2)
    assert result.err == "transformer: error: 1 of 2 runs failed with train.seed=1: no such file\n"


def test_multirun_goes_on_after_a_run_whose_settings_cannot_be() -> None:
    result = enter("train", "-m", "experiment=small", "model.dropout=7,0.1")
    assert [job.model.dropout for job in result.jobs] == [0.1]
    assert result.status == 2
    assert "1 of 2 runs failed with model.dropout=7: model.dropout=7.0 must be in [0, 1)" in result.err


@pytest.mark.parametrize("error", [Stopped("step 3 is saved"), KeyboardInterrupt()], ids=["stopped", "interrupted"])
def test_multirun_ends_where_it_is_stopped(error: BaseException) -> None:
    result = enter("train", "-m", "experiment=small", "train.seed=1,2,3", then=failing({2: error}))
    assert (result.status, len(result.jobs)) == (75, 2)


# ---- what a sweep says of its runs ----------------------------------------------------------------------------------


def returning(*figures: float | None) -> Callable[[], float | None]:
    """A command whose runs return these figures, one after the other."""
    left = list(figures)
    return lambda: left.pop(0)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The log lines of the sweep itself."""
    return [record.getMessage() for record in caplog.records if record.name == "transformer.cli.application"]


@pytest.mark.parametrize(
    ("metric", "best"),
    [
        ("bleu", "the best of 3 runs by greedy dev BLEU:\n  30.25  C\n  20.00  A\n  10.50  B"),
        ("chrf", "the best of 3 runs by greedy dev chrF:\n  30.25  C\n  20.00  A\n  10.50  B"),
        ("loss", "the best of 3 runs by dev loss:\n  10.5000  B\n  20.0000  A\n  30.2500  C"),
    ],
)
def test_multirun_says_which_run_begins_and_in_the_end_which_were_best(
    metric: str, best: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = ["experiment=small", f"train.metric={metric}", "train.seed=range(1,5)", "run_dir=my runs"]
    with caplog.at_level(logging.INFO):
        enter("train", "-m", *given, then=returning(20.0, 10.5, None, 30.25))
    for letter, seed in {"A": 1, "B": 2, "C": 4}.items():
        best = best.replace(f"  {letter}", f"  train.seed={seed}")
    assert said(caplog) == [
        *(f"run {number} of 4: train.seed={number}" for number in range(1, 5)),
        f"{best}\nto compare all of them: transformer table 'table=my runs'",
    ]


@pytest.mark.plugins
def test_multirun_ends_with_a_command_that_composes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        enter("train", "-m", "experiment=small", "train.seed=1,2", "run_dir=my runs", then=returning(20.0, 10.5))
    assert composed(said(caplog)[-1].rpartition(": ")[2]).table == "my runs"


@pytest.mark.parametrize(
    ("given", "first", "last"),
    [
        (["train.metric=bleu,loss"], "run 1 of 2: train.metric=bleu", "run 2 of 2: "),
        (["experiment=glob(*_fr*)", "run_dir=a"], "run 1: experiment=", "the best of "),
        (["run_dir=a/x,b/x"], "run 1 of 2: run_dir=a/x", "the best of 2 runs by greedy dev BLEU:\n  1.00  run_dir=a/x"),
    ],
    ids=["two metrics", "a number that Hydra knows", "two folders"],
)
def test_multirun_says_no_more_than_it_knows(
    given: list[str], first: str, last: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        enter("train", "-m", *given, "data.root=x", then=lambda: 1.0)
    assert said(caplog)[0].startswith(first)
    assert said(caplog)[-1].startswith(last)
    assert ("transformer table" in said(caplog)[-1]) == (last == "the best of ")


# ---- runs that are finished, and several ranks ----------------------------------------------------------------------


@pytest.mark.slow
def test_multirun_trains_on_two_ranks_and_skips_what_is_finished(tmp_path: Path) -> None:
    """The second command has one seed more, and one process."""
    job = tiny_job(tmp_path / "a", write_corpus(tmp_path / "corpus"), max_steps=2, save_every=2, average=1)
    given = [override for override in overrides(job) if not override.startswith("train.seed=")]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*launcher, "-m", "transformer", "train", "-m", *given, "train.seed=1,2"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["train.seed-1", "train.seed-2"]
    assert len(re.findall(r"^test +BLEU ", ended.stdout, re.MULTILINE)) == 2

    out, err = finish(start("train", "-m", *given, "train.seed=1,2,3", cwd=tmp_path), 0)
    skipped = [line for line in err.split("\n") if "finished at step 2 already; nothing is left to train" in line]
    assert skipped == [
        f"{tmp_path}/a/train.seed-{seed}: finished at step 2 already; nothing is left to train" for seed in (1, 2)
    ]
    assert len(re.findall(r"^test +BLEU ", out, re.MULTILINE)) == 3
    assert (tmp_path / "a" / "train.seed-3" / "results.json").exists()


@pytest.mark.slow
def test_multirun_goes_on_after_a_run_that_fails_on_rank_0_alone(tmp_path: Path) -> None:
    """Which alone reads the text; the other one hears of it, and is there for the next run."""
    job = tiny_job(tmp_path / "a", write_corpus(tmp_path / "corpus"), max_steps=2, save_every=2, average=1)
    given = [override for override in overrides(job) if not override.startswith(("data.train.src=", "train.seed="))]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*launcher, "-m", "transformer", "train", "-m", *given, f"data.train.src=no.src,{job.data.train.src}"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode != 0
    assert "1 of 2 runs failed with data.train.src=no.src: no.src: " in ended.stderr
    assert len(re.findall(r"^test +BLEU ", ended.stdout, re.MULTILINE)) == 1
    assert len([*(tmp_path / "a").glob("*/results.json")]) == 1


# ---- what a sweep makes best ----------------------------------------------------------------------------------------

VALIDATIONS = [
    Validation(10, loss=3.0, nll=2.0, bleu=20.0, chrf=40.0),
    Validation(20, loss=2.5, nll=1.9, bleu=30.0, chrf=45.0),
    Validation(30, loss=2.7, nll=1.8, bleu=25.0, chrf=46.0),
    Validation(40, loss=float("nan"), nll=1.8, bleu=float("nan"), chrf=float("nan")),
]


@pytest.mark.parametrize(
    ("validations", "bleu", "chrf", "loss"),
    [(VALIDATIONS, 30.0, 46.0, 2.5), (VALIDATIONS[2:], 25.0, 46.0, 2.7), (VALIDATIONS[3:], None, None, None)],
    ids=["several", "one", "none"],
)
def test_train_returns_the_best_of_the_metric(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    validations: list[Validation],
    bleu: float | None,
    chrf: float | None,
    loss: float | None,
) -> None:
    job = tiny_job(tmp_path / "a", write_corpus(tmp_path / "corpus"))
    results = Results({}, [], 40, 1, 1, 0, 1, 1.0, 1, job.search, 1, "", "", validations)
    monkeypatch.setattr("transformer.training.loop.train", lambda job: results)
    for metric, best in ((Metric.bleu, bleu), (Metric.chrf, chrf), (Metric.loss, loss)):
        assert commands.run_command("train", replace(job, train=replace(job.train, metric=metric))) == best


def test_train_tells_what_next_in_commands_that_a_shell_takes_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    job = tiny_job(tmp_path / "a", write_corpus(tmp_path / "corpus"))
    job.run_dir = "my runs/$(touch x)"
    results = Results({}, [], 40, 1, 1, 0, 1, 1.0, 1, job.search, 1, "", "", VALIDATIONS)
    monkeypatch.setattr("transformer.training.loop.train", lambda job: results)
    with caplog.at_level(logging.INFO):
        commands.run_command("train", job)
    shown = PrintableFormatter("%(message)s").format(caplog.records[-1])  # as the terminal shows it
    _, translate, tensorboard, report = shown.split("\n")
    assert shlex.split(translate)[:3] == ["transformer", "translate", "run_dir=my runs/$(touch x)"]
    assert shlex.split(tensorboard) == ["tensorboard", "--logdir", "my runs"]
    assert shlex.split(report) == ["transformer", "report", "my runs/$(touch x)"]


# ---- Optuna ---------------------------------------------------------------------------------------------------------


old_optuna = pytest.mark.filterwarnings("ignore")  # whose SQLAlchemy is newer than itself


@functools.cache
def try_with_optuna(figure: Callable[[float], float], *given: str, trials: int = 6) -> list[float]:
    """The rates that Optuna tries, one after the other, for a command whose runs return a figure of the rate."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    sampler = ["hydra/sweeper=optuna", f"hydra.sweeper.n_trials={trials}", "hydra.sweeper.n_jobs=1"]
    sampler += ["hydra.sweeper.sampler.n_startup_trials=2", "train.learning_rate=interval(0.001,1.0)"]

    def run() -> float:
        (rate,) = (
            o.partition("=")[2] for o in HydraConfig.get().overrides.task if o.startswith("train.learning_rate=")
        )
        return figure(float(rate))

    result = enter("train", "-m", "experiment=small", *sampler, *given, then=run)
    assert result.status == 0, result.err
    assert len({job.run_dir for job in result.jobs}) == trials
    return [job.train.learning_rate for job in result.jobs]


def near(rate: float) -> float:
    return 100.0 - abs(rate - 0.25)


def far(rate: float) -> float:
    return -near(rate)


@old_optuna
@pytest.mark.ci
def test_optuna_makes_bleu_large_and_the_loss_small() -> None:
    """The rates after the first two depend on what came out, and on which way is better; the rest is the seed's."""
    by_bleu = try_with_optuna(near)
    assert try_with_optuna(far, "train.metric=loss") == by_bleu
    others = try_with_optuna(near, "hydra.sweeper.direction=minimize")
    assert others[:2] == by_bleu[:2]
    assert others[2:] != by_bleu[2:]


@pytest.mark.ci
@old_optuna
def test_optuna_says_what_came_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        rates = try_with_optuna.__wrapped__(near, trials=3)  # not one that is known already, and says nothing
    assert [line.partition("=")[0] for line in said(caplog)[:3]] == [
        f"run {number} of 3: train.learning_rate" for number in range(1, 4)
    ]
    best = min(rates, key=lambda rate: abs(rate - 0.25))
    assert said(caplog)[-1].split("\n")[1] == f"  {near(best):.2f}  train.learning_rate={best}"


@pytest.mark.ci
@old_optuna
def test_optuna_counts_the_trials_of_a_grid(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    sampler = ["hydra/sweeper=optuna", "hydra/sweeper/sampler=grid", "hydra.sweeper.n_jobs=1"]
    with caplog.at_level(logging.INFO):
        result = enter("train", "-m", "experiment=small", *sampler, "model.norm=choice(pre,post)", then=lambda: 1.0)
    assert len(result.jobs) == 2
    assert said(caplog)[0].startswith("run 1 of 2: model.norm=")


@old_optuna
def test_optuna_takes_a_seed() -> None:
    assert try_with_optuna(near, "hydra.sweeper.sampler.seed=2", trials=2) != try_with_optuna(near, trials=2)


@old_optuna
def test_optuna_goes_on_after_a_trial_that_fails() -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    sampler = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "train.seed=range(1,100)"]
    result = enter("train", "-m", "experiment=small", *sampler, then=failing({1: InputError("no such file")}))
    assert (result.status, len(result.jobs)) == (2, 4)
    assert result.err.split("\n")[-2].startswith("transformer: error: 1 of 4 runs failed with train.seed=")


def test_optuna_that_is_not_installed_is_named() -> None:
    """Hydra says which sweepers there are."""
    result = enter("train", "-m", "hydra/sweeper=optunna", "train.seed=1,2")
    assert (result.status, result.jobs) == (2, [])
    assert "optunna" in result.err
