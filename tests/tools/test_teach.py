"""`teach`: a teacher, which may be any program, its student, and what a kill or a bad program costs."""

import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.corpora import assert_same_end, in_a_child, read, run, tiny_job, write_corpus
from support.tiers import tiers
from transformer.config.settings import DataConfig, PairConfig
from transformer.data.corpus import read_lines
from transformer.decoding import bulk
from transformer.decoding.output import Translation
from transformer.errors import InputError
from transformer.files import UNFINISHED
from transformer.tools.teach import command, program
from transformer.tools.teach.command import format_taught, teach
from transformer.tools.teach.job import TeachJob
from transformer.training import loop


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    data = write_corpus(tmp_path_factory.mktemp("corpus"))
    return replace(data, test={"test": data.test["test"]})


@pytest.fixture(scope="module")
def teacher(corpus: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tiny_job(tmp_path_factory.mktemp("teacher") / "teacher", corpus))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def job_of(data: DataConfig, **keys: Any) -> TeachJob:
    """The training of a student of another shape than its teacher."""
    plain = tiny_job(Path("student"), data, {"d_ff": 32}, max_steps=8)
    own = {name: getattr(plain, name) for name in ("model", "data", "tokenizer", "train", "search")}
    return TeachJob(run_dir="student", **own, **keys)


def record() -> Any:
    return read(Path("student.teach/record.json"))


# A program that translates digits as a perfect teacher would, but for what `fault` says.
PROGRAM = """
import sys, time
NAMES = dict(zip("zero one two three four five six seven eight nine".split(),
                 "null eins zwei drei vier fünf sechs sieben acht neun".split()))
if "--version" in sys.argv: print("perfect 1.0"); sys.exit()
source, out, fault, *count = sys.argv[1:]
count = int(count[0]) if count else 1
lines = [" ".join(NAMES.get(word, word) for word in line.split()) for line in open(source, encoding="utf-8")]
if fault == "hangs": time.sleep(1000)
if fault == "dies": sys.exit("no memory")
if fault == "loses": lines.pop()
text = "".join(f"{'x' if count > 1 and n == 0 else line}\\n" for line in lines for n in range(count)).encode()
if fault == "latin1": text = text.decode().encode("latin-1")
if fault != "silent": open(out, "wb").write(text)
"""


@pytest.fixture
def command_of(folder: Path) -> Callable[[str], str]:
    path = folder / "a program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return lambda fault: f"{sys.executable} {shlex.quote(str(path))} {{src}} {{out}} {fault}"


# ---- the whole way


def test_a_run_teaches_a_student_of_another_shape(corpus: DataConfig, teacher: Path) -> None:
    taught = teach(job_of(corpus, teacher=str(teacher), keep=0.5))
    header, *pairs = [line.split("\t") for line in read_lines(Path("student.teach/sound.tsv"))]
    assert header == ["en", "de", "mean_log_prob", "line"]
    sources = list(read_lines(Path(str(corpus.train.src))))
    assert list(read_lines(Path("student.teach/source.txt"))) == sources
    assert all(sources[int(line) - 1] == source for source, _, _, line in pairs)
    assert taught.comparison is not None
    assert taught.comparison.systems == ["student.teach/untaught", "student", "published"]
    assert list(record()["stages"]) == ["source", "teacher", "test.test", "student", "untaught", "scores"]
    assert "p, approximate randomisation" in format_taught(taught)
    data = read(Path("student/run.json"))["config"]["data"]
    assert data["extra"]["taught"]["dataset"] == "student.teach/sound.tsv"
    assert not read(Path("student.teach/untaught/run.json"))["config"]["data"]["extra"]


def test_a_program_teaches_on_text_alone(
    corpus: DataConfig, teacher: Path, command_of: Callable[[str], str], folder: Path
) -> None:
    """Its text is all that the student is trained on; a run in the other direction chooses from it."""
    reverse_data = replace(corpus, src_lang="de", tgt_lang="en", test={})
    for pair in ("train", "dev"):
        of_pair = getattr(corpus, pair)
        setattr(reverse_data, pair, replace(of_pair, src=of_pair.tgt, tgt=of_pair.src))
    reverse = run(tiny_job(folder / "reverse", reverse_data, max_steps=4))
    no_train = replace(corpus, train=DataConfig().train)
    keys = {"text": str(corpus.train.src), "reverse": str(reverse), "keep": 0.5, "baseline": False}
    teach(job_of(no_train, teacher=command_of("well"), teacher_lines=70, **keys))

    header, *pairs = [line.split("\t") for line in read_lines(Path("student.teach/taught.tsv"))]
    assert header == ["en", "de", "mean_log_prob", "line", "reverse_mean_log_prob"]
    both = list(zip(read_lines(Path(str(corpus.train.src))), read_lines(Path(str(corpus.train.tgt))), strict=True))
    assert [(source, target) for source, target, *_ in pairs] == [both[int(pair[3]) - 1] for pair in pairs]
    sound = len(list(read_lines(Path("student.teach/sound.tsv")))) - 1
    assert len(pairs) == (sound + 1) // 2
    rows = [line.split("\t") for line in read_lines(Path("student.teach/reverse.tsv"))]
    scores = sorted(float(log_prob) / int(length) for _, log_prob, _, length in rows)
    assert min(float(pair[4]) for pair in pairs) == pytest.approx(scores[sound - len(pairs)], abs=1e-4)
    stages = record()["stages"]
    assert stages["teacher"]["version"] == "perfect 1.0"
    (bleu, *_) = stages["scores"]["test_sets"]["test"]
    assert bleu["systems"][-1]["score"] == pytest.approx(100.0), "the program is perfect"


def test_of_several_translations_the_one_with_the_least_risk_teaches(
    corpus: DataConfig, command_of: Callable[[str], str]
) -> None:
    job = job_of(corpus, teacher=f"{command_of('well')} {{candidates}}", candidates=3)
    found = program._translations(job, ["one two", "", "three"])
    assert [translation.text for translation in found] == ["eins zwei", "", "drei"], "two of three agree"


# ---- kills


def killed_before(call: int, module: object, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """What has this process killed instead of the call of a function, counted from 1."""

    def prepare(patch: pytest.MonkeyPatch) -> None:
        function, calls = getattr(module, name), 0

        def kill(*arguments: Any, **keywords: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **keywords)

        patch.setattr(module, name, kill)

    return prepare


KILLS = {
    "as the source is written": killed_before(1, os, "link"),
    "before the teacher": killed_before(1, command, "translate_by_program"),
    "in the teacher's text": killed_before(3, program, "_translations"),
    "as that is put together": killed_before(1, bulk, "_join"),
    "before the test set": killed_before(2, command, "translate_by_program"),
    "before the student": killed_before(1, command, "train"),
    "in the student": killed_before(6, loop, "train_step"),
    "at its end": killed_before(1, loop, "finish"),
    "between the students": killed_before(2, command, "train"),
    "in the other student": killed_before(13, loop, "train_step"),
    "before the comparison": killed_before(1, command, "compare"),
}


@pytest.fixture(scope="module")
def whole(corpus: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """What comes of a command that nobody stops, and its teacher."""
    folder = tmp_path_factory.mktemp("whole")
    path = folder / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    by = f"{sys.executable} {shlex.quote(str(path))} {{src}} {{out}} well"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        teach(job_of(corpus, teacher=by, teacher_lines=70))
    return folder, by


KILLS_OF_EVERY_RUN = ("in the other student",)


@pytest.mark.parametrize(
    "kill", tiers(KILLS_OF_EVERY_RUN, [kill for kill in KILLS if kill not in KILLS_OF_EVERY_RUN], pytest.mark.ci)
)
def test_a_kill_costs_no_bit(
    kill: str, corpus: DataConfig, whole: tuple[Path, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, by = whole
    job = job_of(corpus, teacher=by, teacher_lines=70)
    with monkeypatch.context() as patch:
        KILLS[kill](patch)
        assert in_a_child("teach", job, folder).status == -signal.SIGKILL
    teach(job)
    for name in ("student", "student.teach/untaught"):
        assert_same_end(expected / name, folder / name)
    assert record() == read(expected / "student.teach/record.json")
    names = {path.name for path in Path("student.teach").iterdir()}
    assert names == {path.name for path in (expected / "student.teach").iterdir()} | {
        name for name in names if name.startswith(UNFINISHED)
    }


# ---- what is refused


FAULTS = {
    "hangs": r"not done after 2 seconds \(teacher_seconds\)",
    "dies": "it ended with status 1: no memory",
    "loses": r"it wrote 69 lines to \{out\}, not 70",
    "latin1": "line [0-9]+ of what it wrote is not UTF-8 at byte [0-9]+",
    "silent": "out: No such file or directory",
}


@pytest.mark.parametrize("fault", tiers(["dies", "loses", "latin1", "silent"], ["hangs"], pytest.mark.ci))
def test_a_program_that_fails_costs_a_line_and_nothing_that_is_done(
    fault: str, corpus: DataConfig, command_of: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that it translated before are kept, and are not asked for again."""
    asked: list[int] = []

    def translations(job: TeachJob, lines: Sequence[str]) -> list[Translation]:
        asked.append(len(lines))
        bad = len(asked) == 2
        as_it_is = replace(job, teacher=job.teacher.replace("well", fault), teacher_seconds=2.0) if bad else job
        return translate(as_it_is, lines)

    translate = program._translations
    monkeypatch.setattr(program, "_translations", translations)
    monkeypatch.setattr(command, "train", lambda _: pytest.fail("nothing is trained"))
    job = job_of(corpus, teacher=command_of("well"), teacher_lines=70)
    with pytest.raises(InputError, match=rf"lines 71 to 140: teacher: .*{FAULTS[fault]}") as failed:
        teach(job)
    assert "\n" not in str(failed.value)
    assert not Path("student").exists()
    with pytest.raises(pytest.fail.Exception, match="nothing is trained"):
        teach(job)
    assert asked == [70, 70, 70, 60, 12], "the first block was kept"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "teacher is not set"),
        ({"teacher": "missing"}, "missing: no such run directory"),
        ({"teacher": "no-such-program {src} {out}"}, "teacher: there is no program 'no-such-program'"),
        ({"teacher": "cat {src}"}, "the command must name {src} to read and {out} to write"),
        ({"teacher": "cat {src} {out} {ref}"}, "teacher: {ref} is no path"),
        ({"teacher": "cat {src} {out}", "candidates": 4}, "belong together"),
        ({"teacher": "cat {src} {out} {candidates}"}, "belong together"),
        ({"teacher": "cat {src} {out}", "text": "no.txt"}, "no.txt: cannot be read"),
    ],
)
def test_teach_refuses_in_a_line(keys: dict[str, Any], message: str, corpus: DataConfig) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as refused:
        teach(job_of(corpus, **keys))
    assert "\n" not in str(refused.value)


def test_teach_is_refused_where_there_are_ranks(corpus: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match=r"^teach runs as one process: start it without torchrun"):
        teach(job_of(corpus, teacher="cat {src} {out}"))
    assert not Path("student.teach").exists()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"teacher": "cat {src} {out}", "keep": 0.5}, "a program reports no probabilities: set reverse=RUN"),
        ({"teacher": "cat {src} {out}", "ensemble": ["a"]}, "ensemble takes runs, and the teacher is a program"),
        ({"keep": 0.0}, "keep=0.0 must be above 0"),
        ({"weight": 0.0}, "weight=0.0 must be in"),
        ({"teacher_seconds": 0.0}, "teacher_seconds=0.0 must be above 0"),
        ({"teacher_lines": 0}, "teacher_lines=0"),
    ],
)
def test_keys_of_teach_that_cannot_be(keys: dict[str, Any], message: str, corpus: DataConfig) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        job_of(corpus, **keys)


def test_teach_needs_a_test_set_and_text_to_train_the_other_student_on(corpus: DataConfig) -> None:
    with pytest.raises(InputError, match=r"set data\.test\.NAME\.src"):
        teach(job_of(replace(corpus, test={}), teacher="x"))
    with pytest.raises(InputError, match="set baseline=false"):
        teach(job_of(replace(corpus, train=PairConfig()), teacher="x", text=str(corpus.train.src)))


def test_teach_goes_on_with_what_it_was_begun_with_alone(
    corpus: DataConfig, whole: tuple[Path, str], folder: Path
) -> None:
    """Other settings, another text and an artefact that was changed are refused; nothing is lost."""
    shutil.copytree(whole[0], folder, dirs_exist_ok=True)
    job = job_of(corpus, teacher=whole[1], teacher_lines=70)
    with pytest.raises(InputError, match=r"it was begun with weight=1\.0, not 2\.0: restore that, or remove"):
        teach(replace(job, weight=2.0))
    source = folder / "other.en"
    source.write_text("one\n" * 200, encoding="utf-8")
    data = replace(corpus, train=replace(corpus.train, src=str(source)))
    with pytest.raises(InputError, match=r"source\.txt: made from another text"):
        teach(replace(job, data=data))
    hypotheses = Path("student.teach/tests/test.hyp")
    hypotheses.write_text(hypotheses.read_text(encoding="utf-8").upper(), encoding="utf-8")
    with pytest.raises(InputError, match=r"test\.hyp: not what teach wrote, by its SHA-256"):
        teach(job)
