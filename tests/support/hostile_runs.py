"""Commands on run directories that somebody forged or spoiled."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support.corpora import Ended, in_a_child, read
from transformer.config.jobs import AverageJob, EvaluateJob, Job, PrepareJob, TrainJob, TranslateJob

LAST = 4


def enter(command: str, job: TrainJob, text: str = "", checkpoint: str = "auto") -> Ended:
    """The command on the run directory of the job, in a child."""
    of_command: dict[str, Job] = {
        "train": job,
        "prepare": PrepareJob(**vars(job)),
        "translate": TranslateJob(run_dir=job.run_dir, checkpoint=checkpoint, threads=1),
        "evaluate": EvaluateJob(run_dir=job.run_dir, checkpoint=checkpoint, threads=1),
        "average": AverageJob(run_dir=job.run_dir),
    }
    return in_a_child(command, of_command[command], Path(job.run_dir).parent, text)


def assert_refused(found: Ended, status: int, words: str) -> None:
    """It printed nothing, and ended with this status and one line of error that has these words in it."""
    assert found.status == status, found
    (line,) = [line for line in found.said.splitlines() if "error" in line]
    assert line.startswith("transformer: error: ")
    assert words in line
    assert "Traceback" not in found.said
    assert found.printed == ""


def edit(path: Path, change: Callable[[Any], object]) -> None:
    document = read(path)
    change(document)
    text = json.dumps(document, indent=2).replace(
        "Infinity", "1e999"
    )  # which JSON allows, and Python reads as infinity
    path.write_text(f"{text}\n", encoding="utf-8")


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a document, which may be nested as deeply as JSON is read."""
    left: list[tuple[tuple[Any, ...], Any]] = [((), value)]
    while left:
        path, owner = left.pop()
        items = owner.items() if isinstance(owner, dict) else enumerate(owner) if isinstance(owner, list) else ()
        inside = [((*path, key), item) for key, item in items]
        yield from (place for place, _ in inside)
        left += inside


def put_at(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return data


RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
