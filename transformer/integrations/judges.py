"""External judges: programs in environments of their own that score translations, such as COMET.

    command  --check_judges-->  words  --judge-->  texts in, scores of the segments out  -->  Judgement

The contract is in docs/judges.md. A command comes from the job of `evaluate`, so from whoever typed it; the command
that a run directory keeps is text. There is no shell: a command is cut into words first, and paths are put into them
after that. A judge that fails raises JudgeError, which costs its own scores and no others.
"""

import json
import logging
import math
import shlex
from collections.abc import Mapping
from pathlib import Path

from transformer.errors import InputError
from transformer.files import open_regular
from transformer.plugins import JudgedText
from transformer.records import Judgement
from transformer.tools.program import (
    LINE_ENDS,
    ProgramError,
    check_program,
    filled,
    run_program,
    temporary_folder,
    version_of,
)

log = logging.getLogger(__name__)

PATHS = ("src", "hyp", "ref", "jsonl", "out")
MOST_BYTES = 1 << 26  # that a judge may write beside 32 times its texts
LARGEST_SCORE = 1e100  # of which sums and squares are numbers, too
JudgeError = ProgramError  # a judge has failed: in words, for a warning


# ---- the command ----------------------------------------------------------------------------------------------------


def check_judges(commands: Mapping[str, str], *, have_sources: bool) -> None:
    """Raise InputError for a command that could not judge: before anything is translated."""
    for name, command in commands.items():
        key = f"scorer.{name}"
        paths = check_program(command, key, PATHS)
        if "out" not in paths or not {"hyp", "jsonl"} & set(paths):
            raise InputError(f"{key}: the command must name {{hyp}} (or {{jsonl}}) to read and {{out}} to write")
        if not have_sources and {"src", "jsonl"} & set(paths):
            raise InputError(f"{key}: the judge reads sources: name their file with sources=FILE")


# ---- judging --------------------------------------------------------------------------------------------------------


def judge_all(commands: Mapping[str, str], text: JudgedText, *, seconds: float, place: str) -> dict[str, Judgement]:
    """What each judge says of the text; one that fails is a warning, which names the `place` of the text."""
    judgements = {}
    for name, command in commands.items():
        log.info("%s: %s judges %d segments", place, name, len(text.hypotheses))
        try:
            judgements[name] = judge(command, text, seconds=seconds)
        except JudgeError as error:
            log.warning("%s: scorer.%s gave no scores: %s", place, name, error)
    return judgements


def judge(command: str, text: JudgedText, *, seconds: float) -> Judgement:
    """Let a judge score the text; it has `seconds` for that. Raises JudgeError.

    The command must be one that `check_judges` takes.
    """
    words = shlex.split(command)
    try:
        with temporary_folder("transformer-judge-") as folder:
            size = _write_texts(folder, text)
            limit = MOST_BYTES + 32 * size
            paths = {kind: str(folder / kind) for kind in PATHS}
            run_program(filled(words, paths), folder, seconds=seconds, limit=limit, key="scorer_seconds")
            system, segments = read_scores(folder / "out", len(text.hypotheses), limit=limit)
            version = version_of(words, folder, limit=limit)
    except OSError as error:
        raise JudgeError(f"{error.filename or 'its folder'}: {error.strerror or error}") from error
    return Judgement(command=command, version=version, system=system, segments=segments, sha256=text.digests())


def _write_texts(folder: Path, text: JudgedText) -> int:
    """Write the files that a judge may read: a segment a line, and all of it as JSON lines. Returns their bytes."""
    texts = {"src": text.sources, "hyp": text.hypotheses, "ref": text.references}
    plain = {kind: [line.translate(LINE_ENDS) for line in lines] for kind, lines in texts.items() if lines is not None}
    names = {"src": "source", "hyp": "hypothesis", "ref": "reference"}
    rows = zip(*plain.values(), strict=True)
    objects = [dict(zip([names[kind] for kind in plain], row, strict=True)) for row in rows]
    plain["jsonl"] = [json.dumps(row, ensure_ascii=False) for row in objects]
    return sum(
        (folder / kind).write_bytes("".join(f"{line}\n" for line in lines).encode()) for kind, lines in plain.items()
    )


# ---- what a judge writes --------------------------------------------------------------------------------------------


def read_scores(path: Path, count: int, *, limit: int) -> tuple[float, list[float]]:
    """The score of the system, and those of `count` segments: JSON, JSON lines, or a number a line.

    The system's is the mean where the judge writes none. Raises JudgeError.
    """
    try:
        with open_regular(path) as file:
            data = file.read(limit)
    except OSError as error:
        raise JudgeError(f"{{out}}: {error.strerror or error}") from error
    if not data.strip():
        raise JudgeError("it wrote no scores to {out}")
    try:
        system, entries = _parse(data.decode())
    except (ValueError, RecursionError) as error:
        raise JudgeError(f"what it wrote to {{out}} is neither JSON nor one number a line ({error!s:.200})") from None

    if len(entries) != count:
        raise JudgeError(f"it wrote {len(entries):,} scores for {count:,} segments")
    segments = [_number(entry, f"segment {number}") for number, entry in enumerate(entries, 1)]
    return (math.fsum(segments) / count if system is None else _number(system, "the system")), segments


def _parse(text: str) -> tuple[object, list[object]]:
    """The system's score, or None, and the entries of the segments. Raises ValueError."""
    try:
        value = json.loads(text)
    except ValueError:
        lines = [line.strip() for line in text.strip().split("\n")]
        return None, [json.loads(line) if line.startswith("{") else float(line) for line in lines]

    match value:
        case list():
            return None, value
        case dict():
            lists = [item for item in value.values() if isinstance(item, list)]
            if len(lists) > 1:
                raise ValueError("several lists")
            if lists:
                numbers = [item for item in value.values() if _is_number(item)]
                return (numbers[0] if len(numbers) == 1 else None), lists[0]
    return None, [value]  # of a single segment


def _number(entry: object, place: str) -> float:
    """The score of an entry: a number, or an object with one, or with one called `score`. Raises JudgeError."""
    if isinstance(entry, dict):
        numbers = {name: value for name, value in entry.items() if _is_number(value)}
        if len(numbers) > 1 and "score" not in numbers:
            raise JudgeError(f"{place} has several numbers ({', '.join(map(str, numbers))!s:.200}), none of them score")
        entry = numbers.get("score", next(iter(numbers.values()), None))
    try:
        number = float(entry) if _is_number(entry) else math.nan  # type: ignore[arg-type]
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise JudgeError(f"the score of {place} is not a finite number")
    if abs(number) > LARGEST_SCORE:
        raise JudgeError(f"the score of {place} is beyond {LARGEST_SCORE:g}")
    return number


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
