"""scripts/benchmark/speedrun.py: an attempt at the speed record, timed and checked, on a corpus learnt in seconds."""

import hashlib
import itertools
import json
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from support.corpora import run as train
from support.corpora import tiny_job, write_corpus
from support.scripts import load_script
from transformer.errors import InputError

speedrun = load_script("benchmark/speedrun")
BLEU_ON = speedrun.bleu_on

LONGER: dict[str, Any] = {
    "max_steps": 60,
    "save_every": 20,
    "validate_every": 60,
    "log_every": 20,
}  # until BLEU is not 0


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `attempt`, three trainings that kept the rules, and `multi30k`, their corpus."""
    folder = tmp_path_factory.mktemp("speedrun")
    data = write_corpus(folder / "multi30k")
    data.test = {}
    for seed in speedrun.SEEDS:
        train(tiny_job(folder / "attempt" / str(seed), data, seed=seed, **LONGER))
        for language in ("en", "de"):
            for name in ("val", "test_2016_flickr"):
                shutil.copy(folder / "multi30k" / f"dev.{language}", folder / "multi30k" / f"{name}.{language}")
    write_facts(folder / "attempt", seconds={str(seed): 100.0 for seed in speedrun.SEEDS})
    return folder


def write_facts(attempt: Path, **changes: Any) -> None:
    facts = {"command": "transformer train", "commit": "0" * 40, "processor": "any", "cores": 2, "python": "3.11.7"}
    (attempt / "attempt.json").write_text(json.dumps({**facts, **changes}), encoding="utf-8")


def digests(folder: Path, name: str) -> tuple[str, ...]:
    return tuple(hashlib.sha256((folder / f"{name}.{language}").read_bytes()).hexdigest() for language in ("en", "de"))


@pytest.fixture
def attempt(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that attempt, held to the digests of its corpus, and to no BLEU: what it scores is not computed."""
    shutil.copytree(finished, tmp_path / "copy")
    corpus = tmp_path / "copy" / "multi30k"
    monkeypatch.setattr(speedrun, "FILES", {name: digests(corpus, name) for name in ("train", "dev")})
    monkeypatch.setattr(speedrun, "BLEU", 0.0)
    monkeypatch.setattr(speedrun, "bleu_on", lambda *_: 50.0)
    return tmp_path / "copy" / "attempt"


def faults_of(attempt: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What the check finds fault with; it ends with 1 where there is something."""
    try:
        speedrun.main(["check", str(attempt), "--corpora", str(attempt.parent)])
        status: object = 0
    except SystemExit as end:
        status = end.code
    found = re.findall(r"^not valid: (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert status == (1 if found else 0)
    return found


@pytest.mark.ci
def test_attempt_that_keeps_the_rules_is_shown_with_its_scores(
    attempt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speedrun, "bleu_on", BLEU_ON)
    speedrun.main(["check", str(attempt), "--corpora", str(attempt.parent)])
    row = r"^\| (\w+) \| 1 min 40 s \| (\d+\.\d\d) \| (\d+\.\d\d) \|$"
    rows = re.findall(row, capsys.readouterr().out, re.MULTILINE)
    assert [name for name, _, _ in rows] == ["1", "2", "3", "mean"]
    assert [of_test for _, _, of_test in rows] == [of_val for _, of_val, _ in rows], "here the same text"
    scores = [float(score) for _, score, _ in rows]
    assert scores[3] == pytest.approx(sum(scores[:3]) / 3, abs=0.01)
    assert len(set(scores[:3])) > 1, "the seeds make no difference"


@pytest.mark.ci
def test_check_decodes_the_test_set_once_and_of_a_valid_attempt_alone(
    attempt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = []

    def note(name: str, path: Path, corpora: Path) -> float:
        decoded.append((name, path.name))
        return 50.0

    monkeypatch.setattr(speedrun, "bleu_on", note)
    monkeypatch.setattr(speedrun, "BLEU", 60.0)
    assert len(faults_of(attempt, capsys)) == 3
    monkeypatch.setattr(speedrun, "BLEU", 40.0)
    for _ in range(2):
        assert faults_of(attempt, capsys) == []
    assert [seed for name, seed in decoded if name == "test_2016_flickr"] == ["1", "2", "3"]


@pytest.mark.ci
def test_each_seed_needs_the_score(
    attempt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speedrun, "BLEU", 100.01)
    found = faults_of(attempt, capsys)
    assert [re.sub(r"[\d.]+ BLEU", "X BLEU", fault) for fault in found] == [
        f"seed {seed}: X BLEU on val" for seed in (1, 2, 3)
    ]


@pytest.mark.ci
def test_other_text_is_seen(attempt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    files = {**speedrun.FILES, "train": tuple(reversed(speedrun.FILES["train"]))}
    monkeypatch.setattr(speedrun, "FILES", files)
    assert [fault.partition("Multi30k's")[0] for fault in faults_of(attempt, capsys)] == [
        f"seed {seed}: its train is not " for seed in (1, 2, 3)
    ]


@pytest.mark.ci
def test_what_came_from_elsewhere_is_seen(attempt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in speedrun.SEEDS:
        file = attempt / str(seed) / "run.json"
        record = json.loads(file.read_bytes())
        record["config"]["tokenizer"]["model"] = "of_another.model"
        record["config"]["data"]["extra"] = {"more": record["config"]["data"]["train"]}
        file.write_text(json.dumps(record), encoding="utf-8")
    assert faults_of(attempt, capsys) == [
        f"seed {seed}: {fault}"
        for seed in speedrun.SEEDS
        for fault in ("began with weights or pieces of another run", "trained on more than one set")
    ]


@pytest.mark.ci
def test_a_seed_twice_other_settings_and_a_second_start_are_seen(
    attempt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(seed: int, name: str, *path: Any, value: Any) -> None:
        file = attempt / str(seed) / name
        document = json.loads(file.read_bytes())
        place = document
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        file.write_text(json.dumps(document), encoding="utf-8")

    history = json.loads((attempt / "1" / "history.json").read_bytes())
    change(1, "history.json", "starts", value=[*history["starts"], {**history["starts"][0], "step": 5}])
    change(2, "run.json", "config", "train", "seed", value=1)
    change(3, "run.json", "config", "train", "warmup_steps", value=11)
    assert faults_of(attempt, capsys) == [
        "seed 1: started 2 times: time an undisturbed run",
        "seed 2: trained with seed 1",
        "the three differ in more than their seed and folder",
    ]


def test_a_folder_without_an_attempt_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        speedrun.main(["check", str(tmp_path), "--corpora", str(tmp_path)])
    assert end.value.code == InputError.exit_status
    assert "attempt.json: cannot be read" in capsys.readouterr().err


@pytest.mark.ci
@pytest.mark.parametrize("seconds", [0.01, 1e6])
def test_a_time_that_the_log_does_not_fit_is_seen(
    seconds: float, attempt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_facts(attempt, seconds={"1": 100.0, "2": seconds, "3": 100.0}, cores=16)
    found = faults_of(attempt, capsys)
    assert [fault.partition(",")[0] for fault in found] == [f"seed 2: claims {seconds:.0f} s", "16 cores"]


def test_run_times_the_command_with_three_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of which finds the corpus that another has prepared, beside its run. By the clock, each takes 100 s."""
    clock = itertools.count(5.0, 100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    program = "import sys, pathlib; pathlib.Path(sys.argv[2]).write_text(sys.argv[1]); "
    program += "(pathlib.Path(sys.argv[2]).parent / '.store').mkdir()"
    speedrun.main(["run", str(tmp_path / "new"), "--", sys.executable, "-c", program, "seed={seed}", "{run}"])
    assert [(tmp_path / "new" / seed).read_text("utf-8") for seed in "123"] == ["seed=1", "seed=2", "seed=3"]
    facts = json.loads((tmp_path / "new" / "attempt.json").read_bytes())
    assert facts["seconds"] == {"1": 100.0, "2": 100.0, "3": 100.0}

    with pytest.raises(SystemExit) as end:  # nothing is written over
        speedrun.main(["run", str(tmp_path / "new"), "--", "true", "{seed}", "{run}"])
    assert end.value.code == InputError.exit_status


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        (["true", "{run}"], "the command has no {seed}"),
        (["true", "{seed}"], "the command has no {run}"),
        (["false", "{seed}", "{run}"], "ended with status 1"),
    ],
)
def test_run_refuses_a_command(
    command: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        speedrun.main(["run", str(tmp_path / "new"), "--", *command])
    assert end.value.code == InputError.exit_status
    assert complaint in capsys.readouterr().err
