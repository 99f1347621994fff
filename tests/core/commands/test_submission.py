"""`train --multirun hydra/launcher=submitit_slurm` and `submitit_local`: runs of a sweep as jobs of a cluster."""

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.command_line import assert_refused, enter, write_experiment
from support.corpora import (
    finish,
    last_logged,
    overrides,
    read,
    results_of,
    start,
    tiny_job,
    wait_for,
    write_corpus,
)
from transformer.cli import commands
from transformer.config.jobs import TrainJob
from transformer.training.loop import train

submitit = pytest.importorskip("submitit")
pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
submission = pytest.importorskip("transformer.cli.submission")

LOCAL = "hydra/launcher=submitit_local"


def typed(job: TrainJob) -> list[str]:
    """The job without its seed, which the sweeps choose."""
    return [override for override in overrides(job) if not override.startswith("train.seed=")]


# ---- what is submitted, and what becomes of it ----------------------------------------------------------------------


@dataclass
class FakeJob:
    """A job of submitit that has ended."""

    job_id: str
    status: int | None
    folder: Path
    num_tasks: int = 1
    state: str = "NODE_FAIL"

    def __post_init__(self) -> None:
        self.paths = submitit.core.utils.JobPaths(self.folder, self.job_id)

    def task(self, rank: int) -> "FakeJob":
        return self

    def done(self) -> bool:
        return True

    def result(self) -> int:
        if self.status is None:
            raise submitit.core.utils.UncompletedJobError("no result")
        return self.status

    def stderr(self) -> str:
        return "step 1\ntransformer: error: too many skipped updates\n"


class FakeCluster:
    """Runs each command that it is given in this process; or ends it in another way, by its seed."""

    def __init__(self, folder: Path, ends: dict[int, int | None]) -> None:
        self.folder = folder
        self.ends = ends
        self.submitted: list[list[str]] = []

    def submit_array(self, jobs: Sequence[Any]) -> list[FakeJob]:
        return [self.end_of(number, list(job.arguments)) for number, job in enumerate(jobs)]

    def end_of(self, number: int, arguments: list[str]) -> FakeJob:
        self.submitted.append(arguments)
        command, *given = arguments
        config_dir = given[1] if given[0] == "--config-dir" else None
        job = commands.compose(command, given if config_dir is None else given[2:], config_dir=config_dir)
        assert isinstance(job, TrainJob)
        status = self.ends.get(job.train.seed, 0)
        if status == 0:
            train(job)
        return FakeJob(f"7_{number}", status, self.folder)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCluster:
    """A cluster in which the runs with the seeds 2, 3 and 4 fail."""
    monkeypatch.chdir(tmp_path)
    made = FakeCluster(tmp_path / "folder", {2: 6, 3: -signal.SIGKILL, 4: None})
    monkeypatch.setattr(submission, "_executor", lambda cluster, settings: made)
    return made


@pytest.mark.ci
def test_submission_reads_results_from_the_runs_and_submits_what_is_not_finished(
    cluster: FakeCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = write_corpus(tmp_path / 'a "corpus" = {x}')  # a name that is taken apart, and put together again
    job = tiny_job(tmp_path / "runs", corpus, max_steps=2, save_every=2, validate_every=2, average=1)
    with caplog.at_level("INFO"):
        first = enter("train", "-m", *typed(job), "train.seed=1,2,3,4", LOCAL)
    folder = tmp_path / "runs"
    assert [arguments[-1] for arguments in cluster.submitted] == [
        f"run_dir={folder}/train.seed-{seed}" for seed in (1, 2, 3, 4)
    ]
    assert first.out.count(f"model: {folder}/train.seed-1") == 1
    assert first.status == 6
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    goes_on = "to go on, give the same command again"
    for seed, message in {
        2: "too many skipped updates",
        3: f"the job's process was killed by signal 9: {goes_on}",
        4: "the job ended without a message (NODE_FAIL); it may have been killed, or have run out of memory: "
        + goes_on,
    }.items():
        where = f"the log of job 7_{seed - 1} is {tmp_path}/folder/7_{seed - 1}_0_log.err"
        assert errors.pop(0) == f"run {seed} of the sweep failed (train.seed={seed}): {message}; {where}"
    assert errors == []
    assert "transformer: error: 3 of 4 runs failed, the first with train.seed=2: too many" in first.err

    # The same command again.
    cluster.ends = {}
    cluster.submitted = []
    with caplog.at_level("INFO"):
        second = enter("train", "-m", *typed(job), "train.seed=1,2", LOCAL)
    assert [arguments[-1].rpartition("-")[2] for arguments in cluster.submitted] == ["2"]
    assert second.status == 0, second.err
    assert second.out.count("model: ") == 2
    assert f"{folder}/train.seed-1: finished at step 2 already; it needs no job" in caplog.messages
    assert caplog.messages[-1].startswith("the best of 2 runs by greedy dev BLEU:")

    # With more to do, a run that was finished is submitted.
    cluster.submitted = []
    more = [override.replace("train.max_steps=2", "train.max_steps=4") for override in typed(job)]
    assert enter("train", "-m", *more, "train.seed=choice(1)", LOCAL).status == 0
    assert len(cluster.submitted) == 1


@pytest.mark.ci
def test_submission_reads_experiments_of_a_folder(cluster: FakeCluster, tmp_path: Path) -> None:
    folder = write_experiment(tmp_path, "train: {max_steps: 1, validate_every: 1, average: 1}")
    job = tiny_job(tmp_path / "runs", write_corpus(tmp_path / "corpus"))
    given = [override for override in typed(job) if not override.startswith(("experiment=", "train.max_steps="))]
    relative = os.path.relpath(folder)
    result = enter("train", "-m", "--config-dir", relative, "experiment=mine", *given, "train.seed=1,5", LOCAL)
    assert result.status == 0, result.err
    assert [arguments[1:3] for arguments in cluster.submitted] == [["--config-dir", folder]] * 2


@pytest.mark.filterwarnings("ignore")  # Optuna's SQLAlchemy is newer than itself
def test_submission_tells_optuna_what_came_out(cluster: FakeCluster, tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    job = tiny_job(tmp_path / "runs", write_corpus(tmp_path / "corpus"), max_steps=1, validate_every=1, average=1)
    given = [override for override in overrides(job) if not override.startswith("train.learning_rate=")]
    optuna = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=1", "train.learning_rate=interval(0.001,0.1)"]
    result = enter("train", "-m", *given, *optuna, LOCAL)
    assert (result.status, len(cluster.submitted)) == (0, 1), result.err  # 1 where a trial has no number


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["evaluate", "-m", LOCAL, "search.beam_size=1,2"], ["only the runs of `transformer train --multirun`"]),
        (["train", LOCAL], [LOCAL, "only the runs of `transformer train --multirun`"]),
        (["train", "-m", "hydra/launcher=submitit_slrm"], ["submitit_slrm", "submitit_slurm"]),
        (["train", "-m", LOCAL, "hydra.launcher.timeout=3"], ["timeout"]),
    ],
)
def test_submission_refuses(arguments: list[str], words: list[str], in_empty_folder: None) -> None:
    assert_refused(enter(*arguments), *words)


@pytest.mark.parametrize(
    ("variables", "programs", "words"),
    [({"WORLD_SIZE": "2"}, [], ["leave torchrun out"]), ({}, [], ["submitit_slurm: ", "srun"])],
)
def test_submission_says_where_it_cannot_submit(
    variables: dict[str, str], programs: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = enter("train", "-m", "hydra/launcher=submitit_slurm", "train.seed=1,2")
    assert result.status == 2
    assert result.err.count("\n") == 1
    assert all(word in result.err for word in words), result.err


# ---- jobs that are processes ----------------------------------------------------------------------------------------


def holder(run_dir: Path) -> int:
    """The process that trains a run."""
    return int((run_dir / ".lock").read_text(encoding="utf-8").split()[1])


def parent(process: int) -> int:
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    return int(status.partition("PPid:")[2].split()[0])


@pytest.mark.ci
@pytest.mark.timeout(2400)
def test_submission_goes_on_after_a_kill_and_after_submitit_s_signal(tmp_path: Path) -> None:
    """The job of the second run is killed; the same command again skips the first, and its job is given back once."""
    steps: dict[str, Any] = {"max_steps": 300, "save_every": 100, "validate_every": 100, "average": 1}
    given = typed(tiny_job(tmp_path / "runs", write_corpus(tmp_path / "corpus"), **steps))
    arguments = ("train", "-m", *given, "train.seed=1,2", LOCAL)
    finished, broken = tmp_path / "runs" / "train.seed-1", tmp_path / "runs" / "train.seed-2"

    sweep = start(*arguments, cwd=tmp_path)
    wait_for(lambda: last_logged(broken) > 0, 500.0)
    os.kill(holder(broken), signal.SIGKILL)
    out, err = finish(sweep, 7, 900.0)
    assert out.count("model: ") == 1
    assert results_of(finished)["steps"] == 300
    assert "run 2 of the sweep failed (train.seed=2): the job's process was killed by signal 9" in err
    assert not (broken / "results.json").exists()

    sweep = start(*arguments, cwd=tmp_path)
    begun = last_logged(broken)
    wait_for(lambda: last_logged(broken) not in (0, begun), 500.0)
    os.kill(parent(holder(broken)), signal.SIGUSR2)
    out, err = finish(sweep, 0, 900.0)
    assert out.count("model: ") == 2
    assert "train.seed-1: finished at step 300 already; it needs no job" in err
    assert results_of(broken)["steps"] == 300
    log = "".join(path.read_text(encoding="utf-8") for path in (tmp_path / "runs" / ".submitit").glob("*/*_log.*"))
    assert log.count("stopped by a signal, step ") == 1
    assert "Requeued job" in log


# Programs in the place of Slurm's. A job is a bash that runs the submitted file, again where `scontrol` says so.
SBATCH = f"""#!{sys.executable}
import os, re, subprocess, sys
count = int(re.search(r"--array=0-([0-9]+)", open(sys.argv[1]).read())[1]) + 1
for task in range(count):
    name = f"4711_{{task}}"
    again = f'while rm "$NOTES/again-{{name}}" 2>/dev/null; do'
    script = f'touch "$NOTES/again-{{name}}"; {{again}} bash {{sys.argv[1]}}; done; touch "$NOTES/ended-{{name}}"'
    slurm = {{"SLURM_JOB_ID": str(4711 + task), "SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": str(task)}}
    environment = {{**os.environ, **slurm, "SLURM_NTASKS": "2", "SLURM_JOB_NUM_NODES": "1"}}
    environment["SLURM_JOB_NODELIST"] = "127.0.0.1"
    streams = {{"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}}  # whose ends submitit waits for
    subprocess.Popen(["bash", "-c", script], env=environment, start_new_session=True, **streams)
print("Submitted batch job 4711")
"""
SRUN = f"""#!{sys.executable}
import os, subprocess, sys
words = sys.argv[1:]
files = {{}}
while words[0].startswith("--"):
    flag = words.pop(0)
    if flag in ("--output", "--error"):
        files[flag] = words.pop(0)
job = os.environ["SLURM_ARRAY_JOB_ID"], os.environ["SLURM_ARRAY_TASK_ID"]
tasks = []
for rank in range(2):
    names = [name.replace("%A", job[0]).replace("%a", job[1]).replace("%t", str(rank)) for name in files.values()]
    for name in names:
        os.makedirs(os.path.dirname(name), exist_ok=True)
    out, error = (open(name, "a") for name in names)
    step = {{"STEP_ID": "0", "STEP_NUM_TASKS": "2", "STEP_TASKS_PER_NODE": "2", "STEP_NODELIST": "127.0.0.1"}}
    step |= {{"NODEID": "0", "PROCID": str(rank), "LOCALID": str(rank)}}
    environment = {{**os.environ, **{{f"SLURM_{{name}}": value for name, value in step.items()}}}}
    tasks.append(subprocess.Popen(words, env=environment, stdout=out, stderr=error))
sys.exit(max(task.wait() for task in tasks))
"""
SACCT = """#!/bin/bash
echo "JobID|State|NodeList"
for task in 0 1; do
  if [ -e "$NOTES/ended-4711_$task" ]; then state=NODE_FAIL; else state=RUNNING; fi
  echo "4711_$task|$state|127.0.0.1"
done
"""
SCONTROL = """#!/bin/bash
touch "$NOTES/$1-$2" "$NOTES/again-$2"
"""


@pytest.mark.faults
@pytest.mark.timeout(2400)
def test_submission_to_slurm_trains_on_two_ranks_and_reports_a_node_that_fails(tmp_path: Path) -> None:
    """All processes of one job get submitit's signal, as they do from Slurm; all of the other are killed."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {"sbatch": SBATCH, "srun": SRUN, "sacct": SACCT, "scontrol": SCONTROL}.items():
        (commands / name).write_text(text, encoding="utf-8")
        (commands / name).chmod(0o755)
    path = f"{commands}{os.pathsep}{os.environ['PATH']}"
    steps: dict[str, Any] = {"max_steps": 300, "save_every": 100, "validate_every": 100, "average": 1}
    given = typed(tiny_job(tmp_path / "runs", write_corpus(tmp_path / "corpus"), **steps))
    slurm = ["hydra/launcher=submitit_slurm", "hydra.launcher.tasks_per_node=2"]
    first, second = tmp_path / "runs" / "train.seed-1", tmp_path / "runs" / "train.seed-2"

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"PATH": path, "NOTES": str(tmp_path), "OMP_NUM_THREADS": "1"}.items():
            patch.setenv(name, value)
        sweep = start("train", "-m", *given, "train.seed=1,2", *slurm, cwd=tmp_path)
    for run_dir, number in ((first, signal.SIGUSR2), (second, signal.SIGKILL)):
        wait_for(lambda run_dir=run_dir: last_logged(run_dir) > 0, 500.0)  # type: ignore[misc]
        for process in in_step_of(holder(run_dir)):
            os.kill(process, number)
    out, err = finish(sweep, 7, 900.0)
    assert out.count("model: ") == 1
    assert (tmp_path / "requeue-4711_0").exists()
    assert results_of(first)["steps"] == 300
    assert "run 2 of the sweep failed (train.seed=2): the job ended without a message (NODE_FAIL)" in err
    assert {begun["ranks"] for begun in read(first / "history.json")["starts"]} == {2}


def in_step_of(process: int) -> list[int]:
    """The processes of a job: what srun has started, and what they have started."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*"):
        try:
            children.setdefault(parent(int(status.name)), []).append(int(status.name))
        except OSError:
            continue
    tasks = children[parent(parent(process))]
    return [*tasks, *(child for task in tasks for child in children.get(task, []))]
