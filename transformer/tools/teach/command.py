"""`transformer teach`: a teacher translates, the student is trained on that, and all are compared.

    data.train, or text -> source.txt              what is translated
    the teacher         -> sound.tsv               pairs that are sound, each with the number of its line
    the reverse model   -> taught.tsv              of these, the share that is the most probable
    the teacher         -> tests/NAME.hyp          the test sets
    train               -> run_dir, untaught       the student, and the same without a teacher
    compare             -> record.json             the scores, and what everything was made of

All but the student is in RUN_DIR.teach. Each stage calls the command's own function, which goes on where it was
stopped: so the same command goes on, too. What was made of other settings or another text is refused.
"""

import io
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from transformer.checkpoint import find_checkpoint
from transformer.config.jobs import ScoreJob, TrainJob, TranslateJob, checked
from transformer.config.primitives import to_json
from transformer.config.settings import (
    DataConfig,
    ExtraConfig,
    LineFormat,
    ModelConfig,
    PairConfig,
    Rerank,
    SearchOverride,
)
from transformer.data.corpus import with_tag
from transformer.data.source import resolve_source
from transformer.data.tokenizer import Tokenizers
from transformer.data.training_text import check_texts, store_dir_of
from transformer.decoding.provenance import differences, read_settings
from transformer.decoding.score_stream import run as score
from transformer.decoding.translate_stream import run as translate
from transformer.distributed import is_rank0
from transformer.errors import InputError
from transformer.files import (
    UNFINISHED,
    digest_file,
    make_directories,
    remove,
    storage_error,
    temporary_name,
    write_json,
)
from transformer.run_dir import tensor_file
from transformer.run_names import run_path
from transformer.tools.compare.command import Comparison, compare
from transformer.tools.compare.format import format_comparison
from transformer.tools.compare.job import CompareJob
from transformer.tools.risk import least_risk
from transformer.tools.synthetic import Pairs, reached_by
from transformer.tools.teach.job import TAUGHT, TeachJob
from transformer.tools.teach.program import check_teacher, translate_by_program, version_of_program
from transformer.training.loop import train

log = logging.getLogger(__name__)

BLOCK = 1_000  # pairs that are cut into pieces together

# Keys that decide what is taught; those of the student's training are its own to check.
SETTINGS = ("teacher", "ensemble", "text", "candidates", "keep", "reverse", "weight", "baseline")


@dataclass(frozen=True)
class Taught:
    """What `teach` returns; `comparison` is None on all ranks but the first."""

    run_dir: str
    record: dict[str, Any]
    comparison: Comparison | None


def teach(job: TeachJob) -> Taught:
    """Teach, or go on with that: see the head of this module.

    Raises what `translate`, `score`, `train` and `compare` raise, and InputError for a teacher that fails, or settings
    or text that are not those that it was begun with.
    """
    job = checked(TeachJob, job)
    check_job(job)
    work = _Work(job)
    work.begin()
    work.translate()
    work.choose()
    work.check_taught()
    work.translate_tests()
    for name, student in work.students().items():
        log.info("teach: training %s", student.run_dir)
        train(student)
        work.add(name, _run_as_json(student))
    return work.compared()


def check_job(job: TeachJob) -> None:
    """Raise InputError for what cannot be taught: before anything is done."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise InputError("teach runs as one process: start it without torchrun")
    if not job.teacher:
        raise InputError("teacher is not set: name a run directory, or a program: teacher='COMMAND {src} {out}'")
    if job.is_program:
        check_teacher(job)
    if not job.data.test:
        raise InputError("teach compares on test sets: set data.test.NAME.src and data.test.NAME.tgt")
    if job.text is None or _has_text(job.data.train):
        check_texts(job.data)
    elif job.baseline:
        raise InputError("without data.train, there can be no student without a teacher: set baseline=false")


def _has_text(pair: PairConfig) -> bool:
    return bool(pair.dataset or pair.src)


class _Work:
    """What is made, in the folder beside the student."""

    def __init__(self, job: TeachJob) -> None:
        self.job = job
        self.store = store_dir_of(job)
        self.folder = Path(f"{os.path.normpath(job.run_dir)}.teach")
        self.record: dict[str, Any] = {"settings": {key: getattr(job, key) for key in SETTINGS}, "stages": {}}
        self.source = self.folder / "source.txt" if job.text is None else Path(job.text)
        self.taught = self.folder / ("sound.tsv" if job.reverse is None else "taught.tsv")

    # ---- the record

    def begin(self) -> None:
        """Make the folder, compare the settings with those that it was begun with, and write what is translated."""
        path = self.folder / "record.json"
        try:
            make_directories(self.folder / "tests")
        except OSError as error:
            raise storage_error(self.folder, error=error) from error
        if path.exists():
            begun = read_settings(path, self.anew)
            if found := differences(begun.get("settings", {}), self.record["settings"]):
                raise InputError(f"{self.folder}: it was begun with {found}: restore that, or {self.anew}")
            self.record["stages"] = begun.get("stages", {})
        self._write()
        if self.job.text is None:
            _once(self.source, (source for source, _ in self._pairs("train")), self.anew)
        self.add("source", _file_as_json(self.source))

    @property
    def anew(self) -> str:
        """The remedy for what was made otherwise."""
        return f"remove {self.folder} and {self.job.run_dir} to begin anew"

    def add(self, stage: str, facts: dict[str, Any]) -> None:
        """Write that a stage is done, and what it made. Raises InputError where that was another file before."""
        before = self.record["stages"].get(stage, facts)
        if before.get("sha256") != facts.get("sha256"):
            raise InputError(f"{facts['file']}: not what teach wrote, by its SHA-256: {self.anew}")
        self.record["stages"][stage] = facts
        self._write()

    def _write(self) -> None:
        if is_rank0():
            write_json(self.folder / "record.json", self.record)

    # ---- the stages

    def translate(self) -> None:
        """Have the teacher translate, and drop what is not sound."""
        job = self.job
        output = self.folder / "sound.tsv"
        keep = job.keep if job.reverse is None else 1.0
        log.info("teach: %s translates %s", job.teacher, self.source)
        self._translate(self.source, output, tag=job.data.train.tag, keep=keep)
        self.add("teacher", {**_file_as_json(output), "made_by": _made_by(output), **self._about_program()})

    def choose(self) -> None:
        """Have the reverse model score the sound pairs, if there is one, and keep the most probable of them."""
        job = self.job
        if job.reverse is None:
            return
        sound, scores = self.folder / "sound.tsv", self.folder / "reverse.tsv"
        sides = self.folder / "sound.src", self.folder / "sound.tgt"
        run_dir = str(run_path(job.reverse, "reverse"))
        tag = _tag_between(run_dir, tuple(reversed(job.data.languages_of("train"))))
        for column, side in enumerate(sides):
            _once(side, (pair[column] for pair in _with_room(sound, Path(run_dir), tag=tag)), self.anew)
        log.info("teach: %s scores the pairs backwards", job.reverse)
        reverse = ScoreJob(
            run_dir=run_dir,
            src=str(sides[1]),
            tgt=str(sides[0]),
            tag=tag,
            output=str(scores),
            format=LineFormat.tsv,
            device=job.train.device,
            threads=job.train.threads,
        )
        score(reverse, io.BytesIO(), io.BytesIO())

        means = Counter(mean for row in _lines(scores) if (mean := _mean(row)) is not None)
        if left_out := self.record["stages"]["teacher"]["lines"] - 1 - means.total():
            log.warning("teach: %d sound pairs are left out, for which %s has no room", left_out, job.reverse)
        least = reached_by(job.keep, means)
        _once(self.taught, _most_probable(sound, scores, least), self.anew)
        self.add("reverse", {**_file_as_json(scores), "made_by": _made_by(scores), "least": least})
        self.add(TAUGHT, _file_as_json(self.taught))
        log.info("teach: kept %s of %s pairs", f"{self.record['stages'][TAUGHT]['lines'] - 1:,}", f"{means.total():,}")

    def check_taught(self) -> None:
        """Raise InputError where nothing is left to teach."""
        stages = self.record["stages"]
        if stages.get(TAUGHT, stages["teacher"])["lines"] < 2:  # the first has the columns' names
            raise InputError(f"{self.taught}: no pair is left of what {self.job.teacher} translated: look at that")

    def translate_tests(self) -> None:
        """Have the teacher translate the test sets."""
        for name, pair in self.job.data.test.items():
            source, output = self.folder / "tests" / f"{name}.src", self.hypotheses(name)
            _once(source, (source for source, _ in self._pairs(f"test.{name}")), self.anew)
            self._translate(source, output, tag=pair.tag, keep=None)
            self.add(f"test.{name}", _file_as_json(output))

    def hypotheses(self, name: str) -> Path:
        """The teacher's translations of a test set."""
        return self.folder / "tests" / f"{name}.hyp"

    def students(self) -> dict[str, TrainJob]:
        """The trainings: with the teacher, and without."""
        alone = self.job.student()
        alone.data = replace(alone.data, store_dir=str(self.store))
        with self.taught.open(encoding="utf-8") as file:
            source, target, *_ = file.readline().rstrip("\n").split("\t")
        text = alone.data.train
        about: dict[str, Any] = {"tag": text.tag, "src_lang": text.src_lang, "tgt_lang": text.tgt_lang}
        taught = ExtraConfig(src=source, tgt=target, dataset=str(self.taught), **about)
        if _has_text(alone.data.train):
            taught.weight = self.job.weight
            data = replace(alone.data, extra={**alone.data.extra, TAUGHT: taught})
        else:
            own = PairConfig(src=source, tgt=target, dataset=str(self.taught), **about)
            data = replace(alone.data, train=own)
        students = {"student": replace(alone, data=data)}
        if self.job.baseline:
            students["untaught"] = replace(alone, run_dir=str(self.folder / "untaught"))
        return students

    def compared(self) -> Taught:
        """Compare the student with the one that had no teacher, if there is one, and with the teacher."""
        if not is_rank0():
            return Taught(self.job.run_dir, self.record, None)
        runs = [student.run_dir for student in self.students().values()]
        names = {name: str(self.hypotheses(name)) for name in self.job.data.test}
        comparison = compare(CompareJob(runs=list(reversed(runs)), published=names))
        scores = {name: [to_json(score) for score in found.scores] for name, found in comparison.test_sets.items()}
        self.add("scores", {"systems": comparison.systems, "test_sets": scores})
        return Taught(self.job.run_dir, self.record, comparison)

    # ---- the teacher

    def _translate(self, source: Path, output: Path, *, tag: str | None, keep: float | None) -> None:
        """Have the teacher translate a file: to pairs where it is to `keep` some, else line for line."""
        job = self.job
        if job.is_program:
            columns = job.data.languages_of("train")
            if columns[0] == columns[1]:
                columns = "source", "target"
            pairs = None if keep is None else Pairs(1.0, LineFormat.tsv, columns)
            translate_by_program(job, source, output, pairs)
            return
        wanted = TranslateJob(
            run_dir=str(run_path(job.teacher, "teacher")),
            ensemble=[str(run_path(name, "ensemble")) for name in job.ensemble],
            input=str(source),
            output=str(output),
            tag=tag,
            keep=keep,
            rerank=None if job.candidates is None else Rerank.chrf,
            candidates=job.candidates,
            search=SearchOverride(beam_size=job.candidates),
            device=job.train.device,
            threads=job.train.threads,
        )
        choose = None if job.candidates is None else least_risk(wanted)
        translate(wanted, io.BytesIO(), io.BytesIO(), choose=choose)

    def _about_program(self) -> dict[str, Any]:
        """The version of a teacher that is a program: asked once, when it has translated, so it is installed."""
        if not self.job.is_program or not is_rank0():
            return {}
        before = self.record["stages"].get("teacher", {})
        return {"version": before["version"] if "version" in before else version_of_program(self.job)}

    def _pairs(self, name: str) -> Iterator[tuple[str, str]]:
        """The pairs of a set, by its key below `data`."""
        data = self.job.data
        languages = data.languages_of(name)
        return resolve_source(data.sets()[name], f"data.{name}", languages=languages, store_dir=self.store).pairs()


# ---- files ----------------------------------------------------------------------------------------------------------


def _once(path: Path, lines: Iterable[str], remedy: str) -> None:
    """Write lines to a file, unless it is there: then it must have them. Another process may write the same.

    Raises InputError where it has others, and StorageError.
    """
    temporary = temporary_name(path, UNFINISHED)
    try:
        with temporary.open("x", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{line}\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        wanted = digest_file(temporary)
        try:
            os.link(temporary, path)  # which, unlike a replacement, leaves alone what another process reads
        except FileExistsError:
            pass
        except OSError:  # the file system has no links
            if not path.exists():
                os.replace(temporary, path)
        if digest_file(path) != wanted:
            raise InputError(f"{path}: made from another text: {remedy}")
    except OSError as error:
        raise storage_error(path, error=error) from error
    finally:
        remove(temporary)


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            yield line.removesuffix("\n")


def _with_room(sound: Path, run_dir: Path, *, tag: str | None) -> Iterator[tuple[str, str]]:
    """The sound pairs, each blank that the reverse model has no room for: it then has no score."""
    tokenizers = Tokenizers.load(run_dir)
    most = find_checkpoint(run_dir, "auto").settings("model", ModelConfig).max_positions - 1  # beside EOS
    rows = (row.split("\t") for row in islice(_lines(sound), 1, None))
    while block := [(source, target) for source, target, *_ in islice(rows, BLOCK)]:
        read = tokenizers.source.encode([with_tag(target, tag) for _, target in block])
        written = tokenizers.target.encode([source for source, _ in block])
        for pair, *ids in zip(block, read, written, strict=True):
            yield pair if max(map(len, ids)) <= most else ("", "")


def _mean(row: str) -> float | None:
    """The log-probability a piece of a row that `score` wrote, rounded as it is shown; None where there is none."""
    _, log_prob, _, length = row.split("\t")
    return round(float(log_prob) / int(length), 4) if log_prob else None


def _most_probable(sound: Path, scores: Path, least: float) -> Iterator[str]:
    """The rows of the pairs that the reverse model gives at least so much, with that, below the names of columns."""
    rows = _lines(sound)
    yield f"{next(rows)}\treverse_mean_log_prob"
    for row, scored in zip(rows, _lines(scores), strict=True):
        mean = _mean(scored)
        if mean is not None and mean >= least:
            yield f"{row}\t{mean:.4f}"


def _file_as_json(path: Path) -> dict[str, Any]:
    """What the record says of a file."""
    try:
        with path.open("rb") as file:
            lines = sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
        digest = digest_file(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    return {"file": str(path), "lines": lines, "bytes": digest.size, "sha256": digest.sha256}


def _made_by(output: Path) -> Any:
    """By which settings an output was made, and what was counted: as the bulk translation keeps it."""
    return json.loads(output.with_name(f".{output.name}.json").read_text(encoding="utf-8"))


def _tag_between(run_dir: str, languages: tuple[str, ...]) -> str | None:
    """What a run of several directions reads in front of a source in this one; None where it needs no tag."""
    data = find_checkpoint(Path(run_dir), "auto").settings("data", DataConfig)
    tags = [pair.tag for name, pair in data.training_sets().items() if data.languages_of(name) == languages]
    return next((tag for tag in tags if tag in data.required_tags()), None)


def _run_as_json(student: TrainJob) -> dict[str, Any]:
    """What the record says of a trained run: by which weights its scores are."""
    checkpoint = find_checkpoint(Path(student.run_dir), "auto")
    name = tensor_file(checkpoint.weights_name)
    return {"run_dir": student.run_dir, "weights": checkpoint.manifest.files[name].sha256}


def format_taught(taught: Taught) -> str:
    """Where everything is, and the comparison."""
    assert taught.comparison is not None
    stages = taught.record["stages"]
    chosen = stages.get(TAUGHT, stages["teacher"])
    return (
        f"{taught.run_dir}: taught by {taught.record['settings']['teacher']}: {chosen['lines'] - 1:,} pairs of "
        f"{stages['source']['lines']:,} lines, in {chosen['file']}; `published` below is the teacher\n\n"
        f"{format_comparison(taught.comparison)}"
    )
