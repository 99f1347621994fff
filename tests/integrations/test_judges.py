"""External judges: what they are given, what they may write, and what becomes of those that fail."""

import json
import logging
import math
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from support.tiers import tiers
from transformer.errors import InputError
from transformer.integrations import judges
from transformer.integrations.judges import JudgeError, check_judges, judge, judge_all, read_scores
from transformer.plugins import JudgedText
from transformer.records import Judgement
from transformer.tools import program

TEXT = JudgedText(["one", "two\u2028parts", ""], ["eins", "zwei\rTeile", "drei"], ["Eins", "Zwei", "Drei"])

WRITES = {
    "numbers": "0.5\n-1e-3\n2\n",
    "numbers without a last newline": "0.5\n-0.001\n2",
    "a list": "[0.5, -0.001, 2]",
    "a list of objects": '[{"mt": "eins", "COMET": 0.5}, {"mt": "2", "COMET": -0.001}, {"COMET": 2}]',
    "an object with a list": '{"/a/hyp": [{"COMET": 0.5, "errors": []}, {"COMET": -0.001}, {"COMET": 2}]}',
    "JSON lines": '{"prediction": 0.5}\n{"prediction": -0.001}\n{"prediction": 2}\n',
    "JSON lines with several numbers": '{"score": 0.5, "n": 1}\n{"n": 1, "score": -0.001}\n{"score": 2, "n": 3}\n',
}


@pytest.mark.parametrize("written", WRITES)
def test_read_scores_takes_what_judges_write(written: str, tmp_path: Path) -> None:
    (tmp_path / "out").write_text(WRITES[written], encoding="utf-8")
    system, segments = read_scores(tmp_path / "out", 3, limit=10**6)
    assert segments == [0.5, -0.001, 2.0]
    assert system == pytest.approx(2.499 / 3)


def test_read_scores_takes_the_score_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "out").write_text('{"segments": [1, 2], "system": 1.75, "model": "x"}', encoding="utf-8")
    assert read_scores(tmp_path / "out", 2, limit=10**6) == (1.75, [1.0, 2.0])
    (tmp_path / "out").write_text('{"score": 0.5}', encoding="utf-8")
    assert read_scores(tmp_path / "out", 1, limit=10**6) == (0.5, [0.5])


REFUSED = {
    "nothing": (b" \n", "wrote no scores"),
    "too few": (b"1\n2\n", "2 scores for 3 segments"),
    "too many": (b"[1, 2, 3, 4]", "4 scores for 3 segments"),
    "nan": (b"1\nnan\n3\n", "segment 2 is not a finite number"),
    "NaN in JSON": (b"[1, NaN, 3]", "segment 2 is not a finite number"),
    "infinity": (b"[1, 2, -Infinity]", "segment 3 is not a finite number"),
    "numbers without a mean": (b"1e308\n1e308\n1e308\n", r"segment 1 is beyond 1e\+100"),
    "a system without a square": (b'{"system": -1e200, "segments": [1, 2, 3]}', r"the system is beyond 1e\+100"),
    "a huge number": (b"[1, 2, 1" + b"0" * 400 + b"]", "segment 3 is not a finite number"),
    "null": (b"[1, null, 3]", "segment 2 is not a finite number"),
    "text": (b'[1, "2", 3]', "segment 2 is not a finite number"),
    "a truth": (b"[1, true, 3]", "segment 2 is not a finite number"),
    "an object without a number": (b'[1, {"a": "b"}, 3]', "segment 2 is not a finite number"),
    "an object with several": (b'[1, {"a": 1, "b": 2}, 3]', r"segment 2 has several numbers \(a, b\)"),
    "a system that is NaN": (b'{"system": NaN, "segments": [1, 2, 3]}', "the system is not a finite number"),
    "words": (b"good\nbad\ngood\n", "neither JSON nor one number a line"),
    "several lists": (b'{"a": [1, 2, 3], "b": [1, 2, 3]}', "several lists"),
    "no UTF-8": (b"\xff\xfe", "neither JSON nor"),
    "deep": (b"[" * 100_000, "neither JSON nor"),
    "a line that is too long for a message": (b"[" + b"1" * 5_000 + b", 2, 3]", r"neither JSON nor .{,230}$"),
}


@pytest.mark.parametrize("written", REFUSED)
def test_read_scores_refuses_in_a_line(written: str, tmp_path: Path) -> None:
    content, message = REFUSED[written]
    (tmp_path / "out").write_bytes(content)
    with pytest.raises(JudgeError, match=message) as refused:
        read_scores(tmp_path / "out", 3, limit=10**6)
    assert len(str(refused.value)) < 400
    assert "\n" not in str(refused.value)


def command_of(folder: Path, program: str, arguments: str) -> str:
    """A judge in Python."""
    path = folder / "my judge.py"
    path.write_text(program, encoding="utf-8")
    return f"{sys.executable} {shlex.quote(str(path))} {arguments}"


COPIES = """
import json, pathlib, sys
if "--version" in sys.argv:
    print("copier 1.5\\nof today", *sys.argv[1:])
    sys.exit()
*texts, out = sys.argv[1:]
lines = [pathlib.Path(text.partition("=")[2] or text).read_bytes().decode().splitlines() for text in texts]
pathlib.Path(out).write_text(json.dumps({"lines": [{"score": len(line), "x": 1} for line in lines[0]]}))
pathlib.Path(sys.argv[0]).with_name("seen.json").write_text(json.dumps([sys.argv[1:], lines]))
"""


def test_judge_gives_the_paths_of_the_texts_to_a_program(tmp_path: Path) -> None:
    command = command_of(tmp_path, COPIES, "--hyp={hyp} {src} {ref} {jsonl} {out}")
    check_judges({"mine": command}, have_sources=True)
    found = judge(command, TEXT, seconds=60)
    arguments, (hypotheses, sources, references, rows) = json.loads((tmp_path / "seen.json").read_text())
    assert (found.segments, found.system, found.command) == ([4.0, 10.0, 4.0], 6.0, command)
    assert found.version == "copier 1.5"
    assert hypotheses == ["eins", "zwei Teile", "drei"], "a line for each segment, whatever ends one elsewhere"
    assert (sources, references) == (["one", "two parts", ""], ["Eins", "Zwei", "Drei"])
    assert json.loads(rows[1]) == {"source": "two parts", "hypothesis": "zwei Teile", "reference": "Zwei"}
    assert found.sha256["hyp"] == sha256(b"eins\nzwei\rTeile\ndrei\n").hexdigest()
    assert not Path(arguments[-1]).parent.exists(), "its folder is gone"


TIMED = """
import json, sys
with open(sys.argv[2], "w") as file:
    json.dump({"seconds": 12.5, "scores": [1.0, 2.0, 6.0], "system": 0.6}, file)
"""


def test_judge_takes_neither_of_two_numbers_for_the_system_s_score(tmp_path: Path) -> None:
    """Which of them it is, nobody says: it is the mean of the segments."""
    found = judge(command_of(tmp_path, TIMED, "{hyp} {out}"), TEXT, seconds=60)
    assert (found.segments, found.system) == ([1.0, 2.0, 6.0], 3.0)


EXITS = "import sys; sys.exit(2 * (sys.argv[1:4] == ['$(touch', 'pwned)', ';']))"


def test_judge_runs_no_shell_and_fills_paths_in_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in a path is no command, not even under a folder of temporary files with a strange name."""
    strange = tmp_path / "a b; touch pwned {out} $(touch pwned)"
    strange.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(strange))
    monkeypatch.chdir(tmp_path)
    command = command_of(tmp_path, COPIES, "{hyp} {out}")
    assert judge(command, TEXT, seconds=60).segments == [4.0, 10.0, 4.0]
    (hypotheses, out), _ = json.loads((tmp_path / "seen.json").read_text())
    assert Path(hypotheses).parents[1] == Path(out).parents[1] == strange
    with pytest.raises(JudgeError, match="ended with status 2"):
        judge(f"{sys.executable} -c {shlex.quote(EXITS)} '$(touch' 'pwned)' ';' {{hyp}} {{out}}", TEXT, seconds=60)
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("comet-score -s {src} -t {hyp} -r {ref} --to_json {out}", "comet-score --version"),
        ("uvx --from unbabel-comet==2.2.7 comet-score --model X -s {src}", None),
        (
            "python -m bleurt.score_files -candidate_file={hyp} -scores_file={out}",
            "python -m bleurt.score_files --version",
        ),
        ("judge {hyp} {out}", "judge --version"),
    ],
)
def test_judge_is_asked_for_its_version_by_the_words_before_its_paths(words: str, asked: str | None) -> None:
    expected = asked or "uvx --from unbabel-comet==2.2.7 comet-score --model X --version"
    assert program._words_for_version(words.split()) == expected.split()


MANY_FOLDERS = """
import itertools, os, sys
for number in itertools.count(): os.mkdir(os.path.join(os.path.dirname(sys.argv[1]), str(number)))
"""
FAILS = {
    "folders without end": (MANY_FOLDERS, "wrote more than 5,00"),
    "a status": ("import sys; print('out of\\n\\x1b[2Jmemory'); sys.exit(3)", r"ended with status 3: \\x1b\[2Jmemory$"),
    "a signal": ("import os; os.kill(os.getpid(), 9)", "ended with signal 9: it said nothing"),
    "no scores": ("pass", r"\{out\}: No such file or directory"),
    "few scores": ("import sys; open(sys.argv[1], 'w').write('1\\n')", "1 scores for 3 segments"),
    "a link": ("import os, sys; os.symlink('/dev/zero', sys.argv[1])", "symbolic links"),
    "a pipe": ("import os, sys; os.mkfifo(sys.argv[1])", r"\{out\}: not a regular file"),
    "a folder": ("import os, sys; os.mkdir(sys.argv[1])", r"\{out\}: not a regular file"),
    "no folder": ("import os, shutil, sys; shutil.rmtree(os.path.dirname(sys.argv[1]))", r"\{out\}: No such file"),
    "no program": ("import os, sys; os.execv('/no such', ['x'])", "FileNotFoundError: .* No such file or directory$"),
    "gigabytes": (
        "import sys\nwith open(sys.argv[1], 'wb') as f:\n    while True: f.write(b'1' * 1000000)",
        "wrote more than 5,00",
    ),
    "gigabytes of talk": ("while True: print('1' * 100000)", "wrote more than 5,00"),
}


@pytest.mark.parametrize("fault", tiers([*FAILS][1:], [*FAILS][:1], pytest.mark.ci))
def test_judge_that_fails_is_one_warning(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program, message = FAILS[fault]
    monkeypatch.setattr(judges, "MOST_BYTES", 5_000_000)
    good = command_of(tmp_path, COPIES, "{hyp} {out}")
    (tmp_path / "bad").mkdir()
    bad = command_of(tmp_path / "bad", program, "{out} {hyp}")
    with caplog.at_level(logging.WARNING):
        found = judge_all({"bad": bad, "good": good}, TEXT, seconds=60, place="news")
    assert list(found) == ["good"], "the other scores stand"
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("news: scorer.bad gave no scores: ")
    assert re.search(message, warning), warning
    assert "\n" not in warning


def is_over(pid: str) -> bool:
    """Whether a process has ended, or is ending."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


# What a judge starts, of which the last process writes its number into a file.
WAITS = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(1000)"
WRITES_ON = """
import itertools, os, sys, time
open(sys.argv[1], "w").write(str(os.getpid()))
for number in itertools.count():
    try:
        os.makedirs(f"{sys.argv[2]}/{number}/a")
    except OSError:
        pass
    time.sleep(0.02)
"""
FORKS = f"import os\nfor _ in range(3): os.setsid() if os.fork() == 0 else os._exit(0)\n{WAITS}"
STARTED: dict[str, tuple[str, dict[str, Any]]] = {
    "a child": (WAITS, {}),
    "a session": (WAITS, {"start_new_session": True}),
    "a session without environment": (WAITS, {"start_new_session": True, "env": {}}),
    "a daemon": (FORKS, {}),
    "a writer": (WRITES_ON, {"start_new_session": True}),
}
STARTS = """
import os, subprocess, sys, time
if "--version" in sys.argv: sys.exit()
name, folder = {name!r}, os.path.dirname(sys.argv[2])
subprocess.Popen([sys.executable, "-c", {program!r}, name, folder], **{options!r})
while not (os.path.exists(name) and open(name).read()): time.sleep(0.02)
open(sys.argv[2], "w").write("1\\n2\\n3\\n")
if {end!r} == "fails": sys.exit(3)
if {end!r} == "hangs": time.sleep(1000)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the folders of judges are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


A_WRITER_HANGS = pytest.param("a writer", "hangs", marks=pytest.mark.ci)


@pytest.mark.parametrize(
    ("kind", "end"),
    [*((kind, "is done") for kind in STARTED), ("a daemon", "fails"), ("a daemon", "hangs"), A_WRITER_HANGS],
)
def test_judge_is_ended_with_what_it_has_started(kind: str, end: str, tmp_path: Path, temporary: Path) -> None:
    """And its folder is gone, whoever writes into it."""
    name = tmp_path / "child"
    program, options = STARTED[kind]
    command = command_of(
        tmp_path, STARTS.format(name=str(name), program=program, options=options, end=end), "{hyp} {out}"
    )
    message = {"fails": "it ended with status 3", "hangs": r"not done after 3 seconds \(scorer_seconds\)"}
    with nullcontext() if end == "is done" else pytest.raises(JudgeError, match=message[end]):
        assert judge(command, TEXT, seconds=3 if end == "hangs" else 60).segments == [1.0, 2.0, 3.0]
    if name.exists():  # else the machine is too busy
        assert is_over(name.read_text())
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("number", tiers([signal.SIGKILL, signal.SIGTERM], [signal.SIGSTOP], pytest.mark.ci))
def test_judge_is_ended_where_it_ends_or_stops_what_watches_it(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "_SECONDS_TO_END", 0.1)  # in which a process that is stopped cannot end anything
    name = tmp_path / "child"
    text = f"import os, signal; name = {str(name)!r}; open(name, 'w').write(str(os.getpid())); "
    text += f"os.kill(os.getppid(), {int(number)}); signal.pause()"
    command = f"{sys.executable} -c {shlex.quote(text)} {{hyp}} {{out}}"
    with pytest.raises(JudgeError, match=f"it ended with signal {int(number)}|not done after 3 seconds"):
        judge(command, TEXT, seconds=3)
    while name.exists() and not is_over(name.read_text()):  # else the machine is too busy
        time.sleep(0.05)


def test_judge_ends_with_the_command_that_asked_it(tmp_path: Path) -> None:
    """Even where that is killed."""
    name = tmp_path / "child"
    command = f"{sys.executable} -c {shlex.quote(WAITS)} {name} {{hyp}} {{out}}"
    asks = (
        "from transformer.integrations.judges import judge\nfrom transformer.plugins import JudgedText\n"
        f"judge({command!r}, JudgedText(['a'], ['b'], ['c']), seconds=1000)"
    )
    process = subprocess.Popen([sys.executable, "-c", asks])
    while not (name.exists() and name.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    while not is_over(name.read_text()):
        time.sleep(0.05)


DEEP = """
import os, sys
if "--version" in sys.argv: sys.exit()
out = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT)
os.chdir(os.path.dirname(sys.argv[2]))
for _ in range(1100): os.mkdir("folder"); os.chdir("folder")
os.write(out, b"1\\n2\\n3\\n")
"""


def test_judge_may_make_folders_of_any_depth(tmp_path: Path, temporary: Path) -> None:
    """Too deep for paths, and for what walks or removes by calling itself."""
    assert judge(command_of(tmp_path, DEEP, "{hyp} {out}"), TEXT, seconds=60).segments == [1.0, 2.0, 3.0]
    assert list(temporary.iterdir()) == []


def test_judge_without_a_version_has_none(tmp_path: Path) -> None:
    command = command_of(
        tmp_path, "import sys; open(sys.argv[2], 'w').write('1 2 3'.replace(' ', '\\n'))", "{hyp} {out}"
    )
    assert judge(command, TEXT, seconds=60).version is None


WRONG = {
    "no program": ("no-such-judge {hyp} {out}", "scorer.x: there is no program 'no-such-judge': give its path"),
    "nothing": ("", "there is no program ''"),
    "an open quote": ("python '{hyp} {out}", "cannot be cut into words"),
    "a misspelt path": (f"{sys.executable} {{hpy}} {{out}}", "{hpy} is no path; there are {src}, {hyp}, {ref}"),
    "no output": (f"{sys.executable} {{hyp}}", "must name {hyp} (or {jsonl}) to read and {out} to write"),
    "no input": (f"{sys.executable} {{ref}} {{out}}", "must name {hyp} (or {jsonl}) to read"),
    "sources": (f"{sys.executable} {{src}} {{hyp}} {{out}}", "reads sources: name their file with sources=FILE"),
    "sources in rows": (f"{sys.executable} {{jsonl}} {{out}}", "reads sources: name their file"),
}


@pytest.mark.parametrize("case", WRONG)
def test_check_judges_refuses_in_a_line(case: str) -> None:
    command, message = WRONG[case]
    with pytest.raises(InputError, match=re.escape(message)):
        check_judges({"x": command}, have_sources=False)


def test_judgement_refuses_what_is_no_number() -> None:
    with pytest.raises(ValueError, match="not a number"):
        Judgement(command="c", version=None, system=1.0, segments=[1.0, math.nan], sha256={})
