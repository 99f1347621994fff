"""A damaged run directory, whichever file it is and whatever befell it: refused in one line, or no other result.

Damage to a checkpoint is in test_checkpoint.py; here it befalls the tokenizer, the test sets, the average, run.json and
all else that lies in a finished run, and a command is run on it: to translate, to evaluate, or to train some more.
"""

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import equal

from support.corpora import Ended, in_a_child, results_of, run, step_dir, tiny_job, write_corpus
from transformer.config.jobs import EvaluateJob, Job, TrainJob, TranslateJob

Note = Callable[[str, object], None]

LAST, MORE = 4, 6
RECIPE: dict[str, Any] = {
    "max_steps": LAST,
    "save_every": 1,
    "validate_every": 2,
    "keep_last": 3,
    "tokens_per_step": 200,
}
TEXT = "one two three\nfour\n\nnine eight seven six\n"
COMMANDS = ("translate", "evaluate", "train")


# ---- damages --------------------------------------------------------------------------------------------------------


def flip(draw: random.Random, path: Path, _other: Path) -> None:
    data = bytearray(path.read_bytes())
    bit = draw.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def cut(draw: random.Random, path: Path, _other: Path) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


def zero(draw: random.Random, path: Path, _other: Path) -> None:
    data = path.read_bytes()
    start = draw.randrange(len(data))
    path.write_bytes(data[:start] + bytes(len(data[start : start + 512])) + data[start + 512 :])


def lengthen(draw: random.Random, path: Path, _other: Path) -> None:
    path.write_bytes(path.read_bytes() + draw.choice([b"\0", b"\n", b"x", b"one two\n"]))


def lose(_draw: random.Random, path: Path, _other: Path) -> None:
    path.unlink()


def swap(_draw: random.Random, path: Path, other: Path) -> None:
    aside = path.with_name("aside")
    os.rename(path, aside)
    os.rename(other, path)
    os.rename(aside, other)


def take_another(_draw: random.Random, path: Path, other: Path) -> None:
    shutil.copy(other, path)


DAMAGES = (flip, cut, zero, lengthen, lose, swap, take_another)


def files_of(run_dir: Path) -> list[Path]:
    """Every file, but those of TensorBoard, the lock, and the two older checkpoints."""
    older = [str(step_dir(run_dir, step)) for step in (LAST - 2, LAST - 1)]
    files = [path for path in sorted(run_dir.rglob("*")) if path.is_file() and path.name != ".lock"]
    return [path for path in files if str(path.parent) not in older and not path.name.startswith("events.")]


# ---- what comes of them ---------------------------------------------------------------------------------------------


@dataclass
class Finished:
    """A finished run, to be damaged in one place again and again, and what each command makes of it undamaged."""

    job: TrainJob
    template: Path
    folder: Path
    expected: dict[str, Ended]
    trained: Path  # some steps further

    def restore(self) -> Path:
        """The run, undamaged, where commands find it."""
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        shutil.copytree(self.template, self.folder / "run")
        return self.folder / "run"

    def enter(self, command: str) -> Ended:
        """The command, on the run as it stands."""
        run_dir = str(self.folder / "run")
        jobs: dict[str, Job] = {
            "train": replace(self.job, run_dir=run_dir, train=replace(self.job.train, max_steps=MORE)),
            "translate": TranslateJob(run_dir=run_dir, threads=1),
            "evaluate": EvaluateJob(run_dir=run_dir, threads=1),
        }
        return in_a_child(command, jobs[command], self.folder, TEXT)


@pytest.fixture(scope="module")
def finished() -> Iterator[Finished]:
    """In memory where there is such a place."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        folder = Path(name)
        job = tiny_job(folder / "template", write_corpus(folder / "corpus"), **RECIPE)
        found = Finished(job, run(job), folder, {}, folder / "trained")
        for command in COMMANDS:
            found.restore()
            found.expected[command] = found.enter(command)
            assert found.expected[command].status == 0
        shutil.copytree(folder / "run", found.trained)
        yield found


def same_end(run_dir: Path, trained: Path) -> bool:
    """Whether the training that went on came to the same weights and scores."""
    one, two = (load_file(step_dir(place, MORE) / "model.safetensors") for place in (run_dir, trained))
    return all(equal(one[key], two[key]) for key in two) and results_of(run_dir) == results_of(trained)


FELL_BACK = (
    "; falling back to step-",
    "; using the last checkpoint instead",
    "is missing, so the precision of training is unknown",
)


def judge(finished: Finished, command: str, path: Path, damage: str, found: Ended) -> bool:
    """Whether the damage was refused. Raises where it was neither refused nor without effect nor spoken of."""
    expected = finished.expected[command]
    where = (command, damage, str(path.relative_to(finished.folder)), found)
    assert "Traceback" not in found.said, where
    if found.status != 0:
        assert found.status in (2, 4), where
        errors = [line for line in found.said.splitlines() if line.startswith("transformer: error: ")]
        assert len(errors) == 1, where
        assert found.printed == "", where
        return True

    is_same = found.printed == expected.printed
    if command == "train":
        is_same = is_same and same_end(finished.folder / "run", finished.trained)
    assert is_same or any(words in found.said for words in FELL_BACK), ("silent", where)
    return False


def damage_one(finished: Finished, draw: random.Random, path: Path | None = None) -> bool:
    """Damage one file and run one command; whether it refused."""
    run_dir = finished.restore()
    files = [path for path in files_of(run_dir) if path.stat().st_size]
    chosen = draw.choice(files) if path is None else run_dir / path
    other = draw.choice([other for other in files if other.read_bytes() != chosen.read_bytes()])
    damage = draw.choice(DAMAGES)
    damage(draw, chosen, other)
    command = draw.choice(COMMANDS)
    return judge(finished, command, chosen, damage.__name__, finished.enter(command))


IMPORTANT = ("tokenizer.model", "hypotheses/test.src", "hypotheses/test.ref", "hypotheses/other.src", "run.json")


def test_run_dir_notices_damage_to_what_gives_text_its_meaning(finished: Finished) -> None:
    refused = [damage_one(finished, random.Random(seed), Path(place)) for seed in (0, 1) for place in IMPORTANT]
    assert sum(refused) >= 4


@pytest.mark.faults
@pytest.mark.parametrize("part", range(2))
def test_run_dir_with_any_damage_is_refused_or_changes_nothing(
    finished: Finished, part: int, record_property: Note
) -> None:
    for seed in range(100 + 100 * part, 200 + 100 * part):
        damage_one(finished, random.Random(seed))
    record_property("damages", 100)


@pytest.mark.faults
@pytest.mark.parametrize("place", IMPORTANT)
def test_run_dir_notices_many_damages_to_what_gives_text_its_meaning(
    finished: Finished, place: str, record_property: Note
) -> None:
    for seed in range(2, 22):
        damage_one(finished, random.Random(seed), Path(place))
    record_property("damages", 20)
