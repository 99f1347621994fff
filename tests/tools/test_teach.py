"""`teach`: a teacher, which may be any program, its student, and what a kill or a bad program costs."""

import errno
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

import transformer
from support.corpora import (
    assert_same_end,
    in_a_child,
    read,
    run,
    run_command,
    tiny_job,
    write_corpus,
    write_directions,
)
from support.hub import client_of, model_hub
from support.tiers import tiers
from transformer.config.settings import DataConfig, ExtraConfig, PairConfig
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


# Enough for a teacher to write something.
LEARNT: dict[str, Any] = {
    **{"max_steps": 60, "learning_rate": 1e-2, "max_tokens": 600},
    **{"save_every": 60, "validate_every": 60, "average": 1},
}


@pytest.fixture(scope="module")
def teacher(corpus: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tiny_job(tmp_path_factory.mktemp("teacher") / "teacher", corpus, **LEARNT))


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
if fault == "blank": lines = [""] * len(lines)
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
    assert pairs
    assert all(sources[int(line) - 1] == source for source, _, _, line in pairs)
    assert taught.comparison is not None
    assert taught.comparison.systems == ["student.teach/untaught", "student", "published"]
    assert list(record()["stages"]) == ["source", "teacher", "test.test", "student", "untaught", "scores"]
    assert "p, approximate randomisation" in format_taught(taught)
    data = read(Path("student/run.json"))["config"]["data"]
    assert data["extra"]["taught"]["dataset"] == "student.teach/sound.tsv"
    assert not read(Path("student.teach/untaught/run.json"))["config"]["data"]["extra"]


@pytest.mark.ci
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


def test_a_pair_that_the_reverse_model_has_no_room_for_is_left_out(
    corpus: DataConfig,
    command_of: Callable[[str], str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It costs that pair alone, and not all that was translated; a model in either direction would do here."""
    reverse = run(tiny_job(folder / "reverse", replace(corpus, test={}), {"max_positions": 50}, max_steps=1))
    lines = list(read_lines(Path(str(corpus.train.src))))[:30]
    lines.insert(7, " ".join(lines))
    Path("text").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    monkeypatch.setattr(command, "train", lambda _: pytest.fail("nothing is trained"))
    no_train = replace(corpus, train=DataConfig().train)
    with pytest.raises(pytest.fail.Exception, match="nothing is trained"):
        teach(job_of(no_train, teacher=command_of("well"), text="text", reverse=str(reverse), baseline=False))
    _, *rows = [line.split("\t") for line in read_lines(Path("student.teach/taught.tsv"))]
    assert [int(row[3]) for row in rows] == [n for n in range(1, 32) if n != 8]
    assert "teach: 1 sound pairs are left out, for which" in caplog.text


def test_of_several_translations_the_one_with_the_least_risk_teaches(
    corpus: DataConfig, command_of: Callable[[str], str]
) -> None:
    job = job_of(corpus, teacher=f"{command_of('well')} {{candidates}}", candidates=3)
    found = program._translations(job, ["one two", "", "three"])
    assert [translation.text for translation in found] == ["eins zwei", "", "drei"], "two of three agree"


# ---- teachers that are several, of several directions, or elsewhere


def sources_of(name: str) -> list[str]:
    return list(read_lines(Path("student.teach") / name))


def taught_pairs() -> tuple[list[str], list[tuple[str, str]]]:
    """The columns' names, and the pairs that were kept, each with the number of its line."""
    header, *rows = [line.split("\t") for line in read_lines(Path("student.teach/sound.tsv"))]
    return header, [(row[0], row[1]) for row in rows]


@pytest.fixture(scope="module")
def directions(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return write_directions(tmp_path_factory.mktemp("directions"))


@pytest.fixture(scope="module")
def of_directions(directions: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that has learnt enough to write something, which depends on the tag."""
    return run(tiny_job(tmp_path_factory.mktemp("of directions") / "teacher", directions, **LEARNT))


def one_way(directions: DataConfig, name: str, tag: str | None) -> DataConfig:
    """One of the directions alone, as somebody would set it who trains a model of it."""
    test = directions.test[name]
    source, target = directions.languages_of(f"test.{name}")
    pairs = {"en_de": directions.train, "de_en": directions.extra["de_en"], "dev": directions.devs[name], "test": test}
    plain = {key: PairConfig(src=pair.src, tgt=pair.tgt, tag=tag) for key, pair in pairs.items()}
    return replace(
        directions,
        src_lang=source,
        tgt_lang=target,
        train=plain[name],
        extra={},
        devs={},
        dev=plain["dev"],
        test={"test": plain["test"]},
    )


@pytest.mark.ci
@pytest.mark.parametrize(("name", "tag"), [("en_de", "<2de>"), ("de_en", "<2en>")])
def test_a_teacher_of_several_directions_teaches_one(
    name: str, tag: str, directions: DataConfig, of_directions: Path
) -> None:
    """The teacher reads the tag in front of each source; the files of pairs are without it, under their languages."""
    teach(job_of(one_way(directions, name, tag), teacher=str(of_directions), baseline=False))
    whole = transformer.load(of_directions, device="cpu")
    header, pairs = taught_pairs()
    assert header[:2] == name.split("_")
    assert len(pairs) > 20
    assert [target for _, target in pairs] == whole.translate([f"{tag} {source}" for source, _ in pairs])
    assert sources_of("tests/test.hyp") == whole.translate([f"{tag} {line}" for line in sources_of("tests/test.src")])
    taught = read(Path("student/run.json"))["config"]["data"]["extra"]["taught"]
    assert (taught["src"], taught["tgt"], taught["tag"]) == (*name.split("_"), tag)


@pytest.mark.ci
def test_a_teacher_of_several_directions_teaches_a_student_of_several(
    directions: DataConfig, of_directions: Path
) -> None:
    """The text of data.train is taught, in its direction; each test set is translated in its own."""
    taught = teach(job_of(directions, teacher=str(of_directions)))
    whole = transformer.load(of_directions, device="cpu")
    for name, tag in {"en_de": "<2de>", "de_en": "<2en>"}.items():
        expected = whole.translate([f"{tag} {line}" for line in sources_of(f"tests/{name}.src")])
        assert sources_of(f"tests/{name}.hyp") == expected
    assert taught.comparison is not None
    assert set(taught.comparison.test_sets) == {"en_de", "de_en"}
    extra = read(Path("student/run.json"))["config"]["data"]["extra"]
    assert extra["taught"]["tag"] == "<2de>"
    assert extra["de_en"]["tag"] == "<2en>"


@pytest.mark.ci
def test_a_model_of_several_directions_scores_backwards(directions: DataConfig, of_directions: Path) -> None:
    """It is told the direction by its own tag; here, teacher and reverse model are one."""
    data = one_way(directions, "en_de", "<2de>")
    teach(job_of(data, teacher=str(of_directions), reverse=str(of_directions), keep=0.5, baseline=False))
    _, *rows = [line.split("\t") for line in read_lines(Path("student.teach/taught.tsv"))]
    assert len(rows) > 10
    whole = transformer.load(of_directions, device="cpu")
    scored = whole.score([f"<2en> {row[1]}" for row in rows], [row[0] for row in rows])
    for row, one in zip(rows, scored, strict=True):
        assert one.log_prob is not None
        assert float(row[4]) == pytest.approx(one.log_prob / len(one.piece_log_probs or []), abs=2e-4)


@pytest.mark.ci
def test_what_is_taught_has_the_languages_of_its_source(directions: DataConfig, of_directions: Path) -> None:
    """Where data.train is in other languages than data.src_lang and data.tgt_lang say, as one direction of several."""
    swapped = replace(
        directions,
        train=PairConfig(**{key: getattr(directions.extra["de_en"], key) for key in vars(directions.train)}),
        extra={"en_de": ExtraConfig(**vars(directions.train))},
    )
    teach(job_of(swapped, teacher=str(of_directions), baseline=False))
    taught = read(Path("student/run.json"))["config"]["data"]["extra"]["taught"]
    assert (taught["src_lang"], taught["tgt_lang"], taught["tag"]) == ("de", "en", "<2en>")
    assert (taught["src"], taught["tgt"]) == ("de", "en")


@pytest.mark.ci
def test_an_ensemble_teaches(directions: DataConfig, of_directions: Path, folder: Path) -> None:
    """The text and the test set have the translations of the two together, not those of either."""
    other = tiny_job(folder / "other", directions, max_steps=12, learning_rate=1e-2, seed=2)
    run(replace(other, init_from=str(of_directions)))  # whose tokenizer it has
    data = one_way(directions, "en_de", "<2de>")
    teach(job_of(data, teacher=str(of_directions), ensemble=["other"], baseline=False))
    sources = [f"<2de> {line}" for line in sources_of("tests/test.src")]
    hypotheses = sources_of("tests/test.hyp")
    assert hypotheses == transformer.load(of_directions, ensemble=["other"], device="cpu").translate(sources)
    assert hypotheses != transformer.load(of_directions, device="cpu").translate(sources)
    assert hypotheses != transformer.load("other", device="cpu").translate(sources)
    assert len(set(record()["stages"]["teacher"]["made_by"]["weights"])) == 2


@pytest.mark.ci
def test_a_teacher_without_the_tag_that_it_needs_is_refused(directions: DataConfig, of_directions: Path) -> None:
    """In a line that names the key."""
    with pytest.raises(InputError, match=r"it has learnt <2de>, <2en>: .*a set's key tag") as refused:
        teach(job_of(one_way(directions, "en_de", None), teacher=str(of_directions), baseline=False))
    assert "\n" not in str(refused.value)


@pytest.mark.ci
def test_a_run_on_the_hub_teaches(
    directions: DataConfig,
    of_directions: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As the run itself does; it is fetched once, and recorded by its address with the commit."""
    data = one_way(directions, "en_de", "<2de>")
    with model_hub() as hub:
        client_of(hub, monkeypatch, folder / "home", token=None)
        commit = hub.put("theirs/en-de", of_directions)
        name = "hf:theirs/en-de"
        job = job_of(data, teacher=name, ensemble=[name], reverse=name, baseline=False)
        run_command("teach", job)
        assert f"taught by {name}@{commit}: " in capsys.readouterr().out
        by_commit = {"teacher": f"{name}@{commit}", "ensemble": [f"{name}@{commit}"], "reverse": f"{name}@{commit}"}
        assert record()["settings"].items() >= by_commit.items()
        asked = len(hub.asked)
        run_command("teach", job)
        assert not [path for path in hub.asked[asked:] if "/resolve/" in path], "what is there is not fetched again"
    sources = [f"<2de> {line}" for line in sources_of("tests/test.src")]
    assert sources_of("tests/test.hyp") == transformer.load(of_directions, device="cpu").translate(sources)


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


@pytest.mark.ci
@pytest.mark.parametrize("kill", KILLS)
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


def test_lines_are_written_once_where_there_are_no_links(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    for _ in range(2):
        command._once(folder / "text", ["one", "two"], "begin anew")
        assert [path.name for path in folder.iterdir()] == ["text"]
    with pytest.raises(InputError, match="text: made from another text: begin anew"):
        command._once(folder / "text", ["one"], "begin anew")
    assert (folder / "text").read_text(encoding="utf-8") == "one\ntwo\n"


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


def test_a_teacher_of_no_sound_pair_ends_before_a_training(
    corpus: DataConfig, command_of: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "train", lambda _: pytest.fail("nothing is trained"))
    with pytest.raises(InputError, match=r"sound\.tsv: no pair is left of what .* blank translated: look at that$"):
        teach(job_of(corpus, teacher=command_of("blank")))


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
