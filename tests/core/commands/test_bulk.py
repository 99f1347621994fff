"""From a file to a file in blocks: what is written, what is kept, who works on what; kills are in faults/."""

import fcntl
import io
import json
import logging
import math
import multiprocessing
import os
import re
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.ranks import ranks
from support.translations import sentences, write_run
from transformer import shared_work
from transformer.config.jobs import ScoreJob, TranslateJob
from transformer.config.settings import Device, LineFormat, Precision, SampleConfig, SearchOverride
from transformer.data.compression import compress
from transformer.data.corpus import read_lines
from transformer.decoding import bulk, score_stream, stream, translate_stream
from transformer.decoding.translate_stream import run as translate
from transformer.errors import InputError, Stopped, StorageError
from transformer.files import write_file

GREEDY = SearchOverride(beam_size=1, max_extra=3)
SAMPLES: dict[str, Any] = {"search": SearchOverride(max_extra=20), "sample": SampleConfig(temperature=2.0)}  # that end
SHORT = [" ".join(sentence.split()[:3]) for sentence in sentences(37)]  # which a search is soon done with
LINES = [*SHORT, "", "a dog", "\ufeff two"]  # the last one without an end
TEXT = "\n".join(LINES).encode()


@pytest.fixture(scope="module")
def run_dir(spm: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "tiny", spm, seed=1, tag="<2de>")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """About five lines each: some eight blocks; and the working directory is the test's own."""
    monkeypatch.setattr(stream, "FIRST_BLOCK", 30)
    monkeypatch.setattr(stream, "BLOCK", 60)
    monkeypatch.setattr(score_stream, "BLOCK", 6)
    monkeypatch.chdir(tmp_path)
    Path("in").write_bytes(TEXT)
    torch.set_num_threads(1)


def job(run_dir: Path, **changes: Any) -> TranslateJob:
    settings: dict[str, Any] = {
        "run_dir": str(run_dir),
        "device": Device.cpu,
        "precision": Precision.fp32,
        "threads": 1,
    }
    settings["search"] = GREEDY
    return TranslateJob(**settings | changes)


def file_job(run_dir: Path, **changes: Any) -> TranslateJob:
    return job(run_dir, **{"input": "in", "output": "out"} | changes)


STREAMED: dict[str, bytes] = {}  # what each job has written, for many tests ask for the same


def streamed(job: TranslateJob) -> bytes:
    if str(job) not in STREAMED:
        stdout = io.BytesIO()
        translate(job, io.BytesIO(TEXT), stdout)
        STREAMED[str(job)] = stdout.getvalue()
    return STREAMED[str(job)]


def in_bulk(job: TranslateJob) -> None:
    """What is written does not come to standard output."""
    stdout = io.BytesIO()
    translate(job, io.BytesIO(b"not read"), stdout)
    assert stdout.getvalue() == b""


def names() -> set[str]:
    return {name for name in os.listdir() if name != "in"}


def stop_after(count: int, command: Callable[[], None]) -> str:
    """Run a command to which a signal comes when so many blocks are kept; what it says."""
    left = iter(range(count))

    def write_or_stop(path: Path, data: bytes) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        write_file(path, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bulk, "write_file", write_or_stop)
        with pytest.raises(Stopped) as stopped:
            command()
    return str(stopped.value)


# --- what is written


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst", ".bz2", ".xz"])
def test_translate_writes_a_file_as_it_would_write_standard_output(suffix: str, run_dir: Path) -> None:
    given, output = f"text{suffix}", f"out{suffix}"
    Path(given).write_bytes(compress(TEXT[:200], suffix) + compress(TEXT[200:], suffix))
    in_bulk(file_job(run_dir, input=given, output=output))

    if suffix:
        assert Path(output).read_bytes()[:4] != b"the "
    assert [*read_lines(Path(output))] == streamed(job(run_dir)).decode().split("\n")[:-1]
    assert names() == {given, output, f".{output}.json"}


def test_translate_reads_utf16_as_a_training_does(run_dir: Path) -> None:
    expected = streamed(job(run_dir))
    Path("utf16").write_bytes(f"\ufeff{TEXT.decode()}".encode("utf-16-le"))
    in_bulk(file_job(run_dir, input="utf16"))
    assert Path("out").read_bytes() == expected


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".bz2", ".xz"])
def test_translate_compresses_an_empty_text_to_what_it_reads(suffix: str, run_dir: Path) -> None:
    Path("in").write_bytes(b"")
    in_bulk(file_job(run_dir, output=f"out{suffix}"))
    assert [*read_lines(Path(f"out{suffix}"))] == []


@pytest.mark.parametrize(
    "changes",
    [
        {"format": LineFormat.tsv, "n_best": 2, "search": SearchOverride(beam_size=2)},
        {"format": LineFormat.jsonl, "align": True},
        {"prefix": "in", "tag": "<2de>"},
    ],
)
def test_translate_writes_every_format_to_a_file(changes: dict[str, Any], run_dir: Path) -> None:
    in_bulk(file_job(run_dir, **changes))
    assert Path("out").read_bytes() == streamed(job(run_dir, **changes))


@pytest.mark.parametrize("text", [b"", b"\n", b"\xef\xbb\xbf", b"a dog\n"])
def test_translate_writes_a_file_of_hardly_anything(text: bytes, run_dir: Path) -> None:
    Path("in").write_bytes(text)
    stdout = io.BytesIO()
    translate(job(run_dir), io.BytesIO(text), stdout)
    for _ in range(2):
        in_bulk(file_job(run_dir))
        assert Path("out").read_bytes() == stdout.getvalue()


def test_translate_follows_a_link_and_keeps_the_mode_of_an_empty_file(run_dir: Path) -> None:
    Path("far").mkdir()
    Path("far/real").touch()
    Path("far/real").chmod(0o600)
    Path("out").symlink_to("far/real")
    in_bulk(file_job(run_dir))
    assert Path("out").is_symlink()
    assert Path("far/real").stat().st_mode & 0o777 == 0o600
    assert Path("far/real").read_bytes() == streamed(job(run_dir))


def test_translate_writes_into_a_pipe_and_reads_a_file_alone(run_dir: Path) -> None:
    os.mkfifo("pipe")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(Path("pipe").read_bytes()))
    reader.start()
    in_bulk(file_job(run_dir, output="pipe"))
    reader.join()
    assert read == [streamed(job(run_dir))]

    stdout = io.BytesIO()
    translate(job(run_dir, input="in"), io.BytesIO(b"not read"), stdout)
    assert [stdout.getvalue()] == read


# --- what is kept


@pytest.mark.parametrize("kept", [0, 1, 5])
def test_translate_goes_on_where_it_was_stopped(
    kept: int, run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said = stop_after(kept, lambda: in_bulk(file_job(run_dir)))
    assert said.endswith("of 40 lines are kept: to go on, give the same command again")
    assert names() == {".out.work"}
    done = [path for path in Path(".out.work").glob("*-*") if path.name != "settings.json"]
    assert len(done) == kept

    begun: list[int] = []
    make = translate_stream._Work.__call__

    def counted(self: Any, block: list[Any], line: int) -> Any:
        begun.append(line)
        return make(self, block, line)

    monkeypatch.setattr(translate_stream._Work, "__call__", counted)
    in_bulk(file_job(run_dir, search=replace(GREEDY, batch_tokens=50)))
    assert {path.name.partition("-")[0] for path in done}.isdisjoint(map(str, begun))
    assert Path("out").read_bytes() == streamed(job(run_dir))
    assert names() == {"out", ".out.json"}

    # A finished output is left.
    begun.clear()
    before = Path("out").stat()
    with caplog.at_level(logging.INFO):
        in_bulk(file_job(run_dir))
    assert "out is finished" in caplog.text
    assert (Path("out").stat(), begun) == (before, [])


OTHER: dict[str, tuple[dict[str, Any], str]] = {
    "beam": ({"search": replace(GREEDY, beam_size=2)}, "search.beam_size=1, not 2"),
    "penalty": ({"search": replace(GREEDY, length_penalty=1.0)}, "search.length_penalty=0.6, not 1.0"),
    "precision": ({"precision": Precision.fp64}, "precision=fp32, not fp64"),
    "tag": ({"tag": "<2de>"}, "tag=null, not <2de>"),
    "format": ({"format": LineFormat.tsv}, "format=text, not tsv"),
    "prefix": ({"prefix": "in"}, "prefix: sha256=null, not "),
    "input": ({"input": "shorter"}, "input: lines=40, not 3"),
    "ensemble": ({}, "weights="),
}


@pytest.mark.parametrize("is_finished", [False, True])
def test_translate_refuses_other_settings_for_what_it_began_or_finished(is_finished: bool, run_dir: Path) -> None:
    Path("shorter").write_text("a dog\n" * 3, encoding="utf-8")
    if is_finished:
        in_bulk(file_job(run_dir))
    else:
        stop_after(2, lambda: in_bulk(file_job(run_dir)))
    was = "was made with" if is_finished else "was begun with"
    for changes, message in OTHER.values():
        changes = changes or {"ensemble": [str(run_dir)]}
        with pytest.raises(InputError, match=f"{was} .*{re.escape(message)}"):
            in_bulk(file_job(run_dir, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output": "in"}, "it exists, but not as this command made it"),
        ({"output": "."}, "not a file"),
        ({"input": "nowhere"}, "nowhere: cannot be read"),
        ({"input": "pipe"}, "input=pipe: not a regular file"),
        ({"input": "bad.gz"}, "bad.gz:1: damaged .gz file"),
        ({"prefix": "short"}, "in has 40 lines, short has 1: each line must belong to"),
        ({"prefix": "long"}, "in has 40 lines, long has 41: each line must belong to"),
    ],
)
def test_translate_refuses_files_before_it_begins(changes: dict[str, Any], message: str, run_dir: Path) -> None:
    os.mkfifo("pipe")
    Path("bad.gz").write_bytes(b"no")
    Path("short").write_text("the\n", encoding="utf-8")
    Path("long").write_text("\n" * 41, encoding="utf-8")
    with pytest.raises(InputError, match=re.escape(message)):
        in_bulk(file_job(run_dir, **changes))
    assert Path("in").read_bytes() == TEXT
    assert names() == {"pipe", "bad.gz", "short", "long"}


def test_translate_removes_no_file_that_is_not_of_its_work(run_dir: Path) -> None:
    work = Path(".out.work")
    work.mkdir()
    for name in ("chapter1.tex", "1-x", "²-3"):
        (work / name).write_text("years of work", encoding="utf-8")
    in_bulk(file_job(run_dir))
    assert Path("out").read_bytes() == streamed(job(run_dir))
    assert sorted(path.name for path in work.iterdir()) == ["1-x", "chapter1.tex", "²-3"]
    assert (work / "chapter1.tex").read_text(encoding="utf-8") == "years of work"


def test_translate_refuses_an_output_that_was_edited_and_a_record_that_is_none(run_dir: Path) -> None:
    in_bulk(file_job(run_dir))
    with Path("out").open("a", encoding="utf-8") as file:
        file.write("more\n")
    with pytest.raises(InputError, match="not as this command made it"):
        in_bulk(file_job(run_dir))
    Path(".out.json").write_text("[]", encoding="utf-8")
    with pytest.raises(InputError, match=r"\.out\.json: cannot be read"):
        in_bulk(file_job(run_dir))
    Path("out").unlink()
    in_bulk(file_job(run_dir))
    assert Path("out").read_bytes() == streamed(job(run_dir))


def test_translate_keeps_nothing_of_an_input_that_changes(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = []

    def change(*_: Any, **__: Any) -> str:
        blocks.append(Path("in").write_bytes(TEXT + b" ."))
        return ""

    monkeypatch.setattr(translate_stream, "format_translations", change)
    with pytest.raises(InputError, match="in: it changed while being read"):
        in_bulk(file_job(run_dir))
    assert len(blocks) == 1, "seen at once, not after all the work"
    assert sorted(os.listdir(".out.work")) == ["claims", "settings.json"]


def test_translate_does_not_put_together_what_has_lost_a_part(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    join = bulk._join

    def lose_one(place: Any, cut: Any, texts: Any) -> Any:
        place.block(*cut[3]).unlink()
        return join(place, cut, texts)

    with monkeypatch.context() as patch:
        patch.setattr(bulk, "_join", lose_one)
        with pytest.raises(StorageError, match=r"lines \d+ to \d+ are gone"):
            in_bulk(file_job(run_dir))
    in_bulk(file_job(run_dir))
    assert Path("out").read_bytes() == streamed(job(run_dir))


def test_translate_names_the_lines_that_failed_and_keeps_the_others(run_dir: Path) -> None:
    lines = LINES.copy()
    lines[30] = "dog " * 300
    Path("in").write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(InputError, match=r"in: lines \d+ to \d+: line 31: \d+ pieces"):
        in_bulk(file_job(run_dir, strict=True))
    assert len([*Path(".out.work").glob("*-*")]) > 2
    assert not Path("out").exists()


# --- what is damaged, or foreign, or cannot be


def kept_blocks() -> list[Path]:
    found = [path for path in Path(".out.work").iterdir() if re.fullmatch(r"\d+-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.partition("-")[0]))


def lose_lines(block: Path, _: Path) -> None:
    block.write_bytes(b"\n".join(block.read_bytes().split(b"\n")[:3]) + b"\n")


def take_another(block: Path, other: Path) -> None:
    block.write_bytes(other.read_bytes())


def change_a_letter(block: Path, _: Path) -> None:
    data = bytearray(block.read_bytes())
    data[-2] ^= 1
    block.write_bytes(data)


def change_what_was_counted(block: Path, _: Path) -> None:
    block.write_bytes(block.read_bytes().replace(b"{}", b'{"kept": 7}', 1).replace(b": ", b": 1", 1))


def become(data: bytes) -> Callable[[Path, Path], None]:
    def write(block: Path, _: Path) -> None:
        block.write_bytes(data)

    return write


def become_a_pipe(path: Path, _: Path | None = None) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def become_a_link_to_itself(path: Path, _: Path | None = None) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


def be_lost(block: Path, _: Path) -> None:
    block.unlink()


DAMAGES: list[Callable[[Path, Path], None]] = [
    *(lose_lines, take_another, change_a_letter, change_what_was_counted, become_a_pipe, become_a_link_to_itself),
    *(be_lost, become(b""), become(b"{}\n\xff\n")),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_translate_makes_a_kept_block_again_that_does_not_fit(
    damage: Callable[[Path, Path], None], run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop_after(5, lambda: in_bulk(file_job(run_dir, format=LineFormat.jsonl)))
    damage(*kept_blocks()[1:3])
    in_bulk(file_job(run_dir, format=LineFormat.jsonl))
    assert Path("out").read_bytes() == streamed(job(run_dir, format=LineFormat.jsonl))
    assert ("made again" in caplog.text) == (damage is not be_lost)
    assert names() == {"out", ".out.json"}


def test_translate_makes_a_block_of_other_settings_again(run_dir: Path) -> None:
    stop_after(5, lambda: in_bulk(file_job(run_dir, format=LineFormat.tsv)))
    of_tsv = kept_blocks()[1].read_bytes()
    shutil.rmtree(".out.work")
    stop_after(5, lambda: in_bulk(file_job(run_dir)))
    kept_blocks()[1].write_bytes(of_tsv)
    in_bulk(file_job(run_dir))
    assert Path("out").read_bytes() == streamed(job(run_dir))


@pytest.mark.parametrize("name", ["1-2", "0-0", "5-1", "999-1000"])
def test_translate_minds_no_foreign_block(name: str, run_dir: Path) -> None:
    stop_after(2, lambda: in_bulk(file_job(run_dir)))
    Path(".out.work", name).write_bytes(b"{}\nx\ny\n")
    in_bulk(file_job(run_dir))
    assert Path("out").read_bytes() == streamed(job(run_dir))
    assert names() == {"out", ".out.json"}


@pytest.mark.parametrize("text", [None, b"", b"[" * 100_000, "pipe"])
def test_translate_goes_on_with_no_blocks_of_unknown_settings(text: bytes | str | None, run_dir: Path) -> None:
    changes: dict[str, Any] = {"search": replace(GREEDY, length_penalty=3.0)}
    stop_after(2, lambda: in_bulk(file_job(run_dir)))
    settings = Path(".out.work/settings.json")
    settings.unlink()
    if text == "pipe":
        os.mkfifo(settings)
    elif isinstance(text, bytes):
        settings.write_bytes(text)
    for _ in range(2):
        with pytest.raises(InputError, match=r"settings\.json.*: remove .*/\.out\.work to begin anew$"):
            in_bulk(file_job(run_dir, **changes))

    shutil.rmtree(".out.work")
    in_bulk(file_job(run_dir, **changes))
    assert Path("out").read_bytes() == streamed(job(run_dir, **changes))


def be_a_file(path: Path) -> None:
    path.write_bytes(b"years of work")


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


@pytest.mark.parametrize("make", [be_a_file, os.mkfifo, link_to("far"), link_to(".out.work"), link_to("nowhere")])
def test_translate_works_in_a_folder_of_its_own(make: Callable[[Path], None], run_dir: Path) -> None:
    Path("far").mkdir()
    make(Path(".out.work"))
    with pytest.raises(InputError, match=r"\.out\.work: not a folder, .*: remove it$"):
        in_bulk(file_job(run_dir))
    assert names() == {"far", ".out.work"}
    assert not os.listdir("far")
    Path(".out.work").unlink()
    in_bulk(file_job(run_dir))
    assert Path("out").read_bytes() == streamed(job(run_dir))


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, link_to("nowhere"), link_to("claims")])
def test_translate_says_to_remove_what_is_no_lock(make: Callable[[Path], None], run_dir: Path) -> None:
    stop_after(2, lambda: in_bulk(file_job(run_dir)))
    Path(".out.work/claims").unlink()
    make(Path(".out.work/claims"))
    with pytest.raises(StorageError, match=r"claims: cannot be used as a lock .*: remove it$"):
        in_bulk(file_job(run_dir))
    assert not Path(".out.work/nowhere").exists()


@pytest.mark.parametrize("make", [be_a_file, os.mkfifo, link_to("../in"), link_to("joined")])
def test_translate_joins_in_a_file_of_its_own(make: Callable[[Path], None], run_dir: Path) -> None:
    stop_after(2, lambda: in_bulk(file_job(run_dir)))
    make(Path(".out.work/joined"))
    in_bulk(file_job(run_dir))
    assert Path("out").read_bytes() == streamed(job(run_dir))
    assert Path("in").read_bytes() == TEXT
    assert names() == {"out", ".out.json"}


@pytest.mark.parametrize("name", ["joined", "finished.json", None])
def test_translate_removes_no_folder_in_the_place_of_a_file_of_its_own(name: str | None, run_dir: Path) -> None:
    stop_after(2, lambda: in_bulk(file_job(run_dir)))
    path = kept_blocks()[0] if name is None else Path(".out.work", name)
    path.unlink(missing_ok=True)
    path.mkdir()
    (path / "chapter1.tex").write_text("years of work", encoding="utf-8")
    with pytest.raises(InputError, match=rf"{path.name}: cannot be removed .*: remove .*\.out\.work to begin anew$"):
        in_bulk(file_job(run_dir))
    assert (path / "chapter1.tex").exists()


@pytest.mark.parametrize("output", ["/proc/x", "loop", "a\0b", "x" * 250, "x" * 300, "in/out", "loop/out"])
def test_translate_refuses_an_output_that_cannot_be(output: str, run_dir: Path) -> None:
    Path("loop").symlink_to("loop")
    with pytest.raises(InputError, match=r"output=.*: cannot be made: .*: name another") as refused:
        in_bulk(file_job(run_dir, output=output))
    assert "\n" not in str(refused.value)
    assert names() == {"loop"}


def test_translate_leaves_nothing_beside_the_output_when_it_is_killed(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a kill before any of its renames leaves is in its own folder, which the next command clears."""
    seen: list[set[str]] = []
    rename = os.replace

    def look(*paths: Any) -> None:
        seen.append(names())
        rename(*paths)

    monkeypatch.setattr(os, "replace", look)
    in_bulk(file_job(run_dir))
    assert len(seen) > 8
    assert set().union(*seen) == {".out.work", ".out.json"}
    assert names() == {"out", ".out.json"}


def test_translate_joins_nothing_of_an_input_that_changed_unseen(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that is changed in place, with its size and time of change as they were."""
    status = Path("in").stat()
    make = translate_stream._Work.__call__

    def write(text: bytes) -> None:
        with Path("in").open("r+b") as file:
            file.write(text)
        os.utime("in", ns=(status.st_atime_ns, status.st_mtime_ns))

    def change(self: Any, block: list[Any], line: int) -> Any:
        write(TEXT.replace(b"dog", b"cat"))
        return make(self, block, line)

    with monkeypatch.context() as patch:
        patch.setattr(translate_stream._Work, "__call__", change)
        with pytest.raises(InputError, match="in: it changed while being read: none of the new text is kept"):
            in_bulk(file_job(run_dir))
    assert not kept_blocks()
    assert not Path("out").exists()
    write(TEXT)
    in_bulk(file_job(run_dir))
    assert Path("out").read_bytes() == streamed(job(run_dir))


def test_translate_names_the_output_that_does_not_fit_on_the_disk(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file may grow beyond what a block has: as on a full disk, the system's error names none."""
    put_together = bulk._put_together
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_a_full_disk(place: Any, cut: Any) -> Any:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            return put_together(place, cut)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    with monkeypatch.context() as patch:
        patch.setattr(bulk, "_put_together", on_a_full_disk)
        words = rf"{re.escape(str(Path('out').resolve()))}: cannot be written: File too large \(\d+ bytes free\)"
        with pytest.raises(StorageError, match=words):
            in_bulk(file_job(run_dir))
    assert len(kept_blocks()) > 4
    assert not Path("out").exists()
    in_bulk(file_job(run_dir))
    assert Path("out").read_bytes() == streamed(job(run_dir))
    assert names() == {"out", ".out.json"}


@pytest.mark.parametrize("byte", [shared_work.ALONE, 1])
def test_translate_says_for_which_process_it_waits(byte: int, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one, as good as frozen, lets go when it has been named."""
    stop_after(0, lambda: in_bulk(file_job(run_dir)))
    holds, is_named = multiprocessing.Pipe(), multiprocessing.Event()

    def hold() -> None:
        with Path(".out.work/claims").open("r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX, 1, byte)
            holds[1].send("")
            is_named.wait()
        os._exit(0)

    other = multiprocessing.get_context("fork").Process(target=hold)
    other.start()
    holds[0].recv()
    said: list[str] = []

    class Named(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "waiting for process" in record.getMessage():
                said.append(record.getMessage())
                is_named.set()

    handler = Named()
    shared_work.log.addHandler(handler)
    monkeypatch.setattr(shared_work.log, "level", logging.INFO)
    monkeypatch.setattr(shared_work, "QUIET_SECONDS", 0.1)
    try:
        in_bulk(file_job(run_dir))
    finally:
        shared_work.log.removeHandler(handler)
        other.kill()
        other.join()
    assert len(said) == 1
    what = r".*/\.out\.work" if byte == shared_work.ALONE else r"lines 1 to \d+"
    assert re.match(rf"{what}: waiting for process {other.pid}, ", said[0])
    assert Path("out").read_bytes() == streamed(job(run_dir))


# --- ranks


def translate_on(size: int, job: TranslateJob, before: Callable[[], None] = lambda: None) -> list[int]:
    """The exit statuses of so many ranks; rank n leaves the lines that its blocks begin with in the file `by-n`."""
    make = translate_stream._Work.__call__

    def noted(self: Any, block: list[Any], line: int) -> Any:
        before()
        with Path(f"by-{os.environ['RANK']}").open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
        return make(self, block, line)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(translate_stream._Work, "__call__", noted)
        return ranks(size, lambda: in_bulk(job), Path())


def made_by(rank: int) -> list[int]:
    path = Path(f"by-{rank}")
    return [int(line) for line in path.read_text(encoding="utf-8").split()] if path.exists() else []


def test_ranks_share_the_blocks_and_make_each_once(run_dir: Path) -> None:
    assert translate_on(3, file_job(run_dir)) == [0, 0, 0]
    assert Path("out").read_bytes() == streamed(job(run_dir))
    made = [line for rank in range(3) for line in made_by(rank)]
    assert len(made) == len(set(made)) > 5
    assert not Path(".out.work").exists()


def test_ranks_do_what_one_that_was_killed_had_claimed(run_dir: Path) -> None:
    def be_killed() -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    assert translate_on(3, file_job(run_dir), be_killed) == [0, -signal.SIGKILL, 0]
    assert Path("out").read_bytes() == streamed(job(run_dir))


def test_ranks_need_a_file_to_write(run_dir: Path) -> None:
    assert translate_on(2, job(run_dir)) == [2, 2]
    assert "2 ranks cannot share one stream" in Path("rank-1").read_text(encoding="utf-8")


# --- scores


def test_score_writes_a_file_and_goes_on(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    Path("tgt").write_text("\n".join(reversed(LINES)), encoding="utf-8")
    to_stdout = ScoreJob(
        run_dir=str(run_dir), device=Device.cpu, precision=Precision.fp32, threads=1, src="in", tgt="tgt"
    )
    stdout = io.BytesIO()
    caplog.set_level(logging.INFO)
    score_stream.run(to_stdout, io.BytesIO(), stdout)
    said = [message for message in caplog.messages if "perplexity" in message]

    to_file = replace(to_stdout, output="out.zst")
    to_go_on = stop_after(3, lambda: score_stream.run(to_file, io.BytesIO(), io.BytesIO()))
    assert to_go_on.startswith("stopped; 18 of 40 pairs are kept")
    score_stream.run(to_file, io.BytesIO(), io.BytesIO())
    assert [*read_lines(Path("out.zst"))] == stdout.getvalue().decode().split("\n")[:-1]
    assert [message for message in caplog.messages if "perplexity" in message] == said * 2
    assert json.loads(Path(".out.zst.json").read_text(encoding="utf-8"))["src: lines"] == 40


def test_score_refuses_files_of_unequal_lengths_before_it_begins(run_dir: Path) -> None:
    Path("tgt").write_text("\n".join(LINES[1:]), encoding="utf-8")
    job = ScoreJob(run_dir=str(run_dir), device=Device.cpu, threads=1, src="in", tgt="tgt", output="out")
    with pytest.raises(InputError, match=r"in has 40 lines, tgt has 39: each line must belong to"):
        score_stream.run(job, io.BytesIO(), io.BytesIO())
    assert names() == {"tgt"}


def test_what_was_counted_may_be_infinite(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the sum of log-probabilities is where one underflows."""

    def infinite(*_: object) -> stream.Output:
        return stream.Output("-inf\n", {"log-probability": -math.inf})

    monkeypatch.setattr(score_stream._Work, "__call__", infinite)
    Path("tgt").write_bytes(TEXT)
    job = ScoreJob(run_dir=str(run_dir), device=Device.cpu, threads=1, src="in", tgt="tgt", output="out")
    score_stream.run(job, io.BytesIO(), io.BytesIO())
    assert Path("out").read_text(encoding="utf-8") == "-inf\n" * 7
    assert json.loads(Path(".out.json").read_text(encoding="utf-8"))["counted"] == {"log-probability": None}


# --- pairs to train on


def pairs_job(run_dir: Path, **changes: Any) -> TranslateJob:
    return file_job(run_dir, **{"output": "out.tsv", "keep": 0.5} | SAMPLES | changes)


def pairs_at_once(run_dir: Path, output: str) -> bytes:
    """What is written to this file where all lines are one block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "FIRST_BLOCK", len(TEXT) + 1)
        in_bulk(pairs_job(run_dir, output=output))
    text = Path(output).read_bytes()
    Path(output).unlink()
    return text


@pytest.mark.plugins
@pytest.mark.parametrize("suffix", [".tsv.gz", ".jsonl.zst"])
def test_translate_keeps_the_same_pairs_wherever_it_was_stopped(
    suffix: str, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    output = f"out{suffix}"
    at_once = "at-once.jsonl" if "jsonl" in suffix else "at-once.tsv"
    expected = pairs_at_once(run_dir, at_once).decode().split("\n")[:-1]
    with caplog.at_level(logging.INFO):
        stop_after(3, lambda: in_bulk(pairs_job(run_dir, output=output)))
        in_bulk(pairs_job(run_dir, output=output))
    assert [*read_lines(Path(output))] == expected

    counted = json.loads(Path(f".{output}.json").read_text(encoding="utf-8"))["counted"]
    assert sum(counted.values()) == len(LINES)
    assert caplog.messages[-1].startswith(f"kept {counted['kept']} of 40 lines as pairs to train on; dropped: empty ")
    assert counted["kept"] == len(expected) - ("tsv" in suffix) > 3


@pytest.mark.plugins
def test_translate_keeps_pairs_of_lines_and_their_translations_without_the_tag(run_dir: Path) -> None:
    in_bulk(pairs_job(run_dir, tag="<2de>"))
    header, *rows = [line.split("\t") for line in read_lines(Path("out.tsv"))]
    translations = streamed(job(run_dir, tag="<2de>", **SAMPLES)).decode().split("\n")
    lines = [line.removeprefix("\ufeff") for line in LINES]
    assert header == ["en", "de", "mean_log_prob", "line"]
    assert {tuple(row[:2]) for row in rows} <= set(zip(lines, translations[:-1], strict=True))


@pytest.mark.plugins
def test_ranks_keep_the_pairs_that_one_process_keeps(run_dir: Path) -> None:
    expected = pairs_at_once(run_dir, "at-once.tsv")
    assert translate_on(3, pairs_job(run_dir)) == [0, 0, 0]
    assert Path("out.tsv").read_bytes() == expected


@pytest.mark.plugins
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"output": "out.txt"},
            "output=out.txt: keep=0.5 leaves lines out, so it writes pairs: end the name in .tsv or",
        ),
        ({"output": "/dev/null"}, "output=/dev/null: not a file: keep=0.5 chooses only after everything is translated"),
    ],
)
def test_translate_keeps_no_pairs_in_other_files(changes: dict[str, Any], message: str, run_dir: Path) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        in_bulk(pairs_job(run_dir, **changes))
    assert names() == set()


@pytest.mark.plugins
def test_translate_refuses_another_share_for_what_it_began(run_dir: Path) -> None:
    stop_after(2, lambda: in_bulk(pairs_job(run_dir)))
    with pytest.raises(InputError, match=r"was begun with keep=0\.5, not 0\.9"):
        in_bulk(pairs_job(run_dir, keep=0.9))
