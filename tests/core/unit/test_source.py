"""Data sets of the hub: a twin of wmt/wmt14 in a folder, and the same behind a server that plays the hub."""

import copy
import json
import multiprocessing
import re
import shutil
import time
import zipfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from support.compressed import compressed
from support.corpora import Shell, read, run, steps_of, tiny_job, write_corpus
from support.hub import COMMIT, DatasetHandler, Hub, serving
from support.observers import watch_disk
from transformer.config.jobs import EvaluateJob, TrainJob
from transformer.config.settings import ExtraConfig, PairConfig
from transformer.data import source
from transformer.data.prepare import prepare
from transformer.data.source import DatasetOrigin, Source, resolve_source, store_beside
from transformer.errors import CheckpointError, InputError, StorageError
from transformer.evaluation.sets import evaluate

SPLITS = {"train": 60, "validation": 5, "test": 3}
CARD = "---\nconfigs:\n- config_name: de-en\n  data_files:\n" + "".join(
    f"  - split: {split}\n    path: de-en/{split}-*\n" for split in SPLITS
)
NEXT_COMMIT = COMMIT[::-1]
LANGUAGES = ("en", "de")


def row(split: str, number: int) -> tuple[str, str]:
    """English and German; some with what a line cannot hold, or what is taken for a line's end."""
    strange = ["", "\u2028", " \x85 ", "\r ", '"', "\t"][number % 6]
    return f"one {split}{strange} {number}", f"{number} eins {strange}{split}"


def expected(split: str) -> list[tuple[str, str]]:
    return [row(split, number) for number in range(SPLITS[split])]


def write_twin(folder: Path) -> Path:
    """The layout of wmt/wmt14: a card, and a Parquet file for each split."""
    (folder / "de-en").mkdir(parents=True)
    (folder / "README.md").write_text(f"{CARD}---\n# twin\n", encoding="utf-8")
    for split in SPLITS:
        write_split(folder, split, [{"de": target, "en": text} for text, target in expected(split)])
    return folder


def write_split(folder: Path, split: str, rows: list[dict[str, Any]]) -> None:
    path = folder / "de-en" / f"{split}-00000-of-00001.parquet"
    parquet.write_table(pyarrow.table({"translation": rows}), path, row_group_size=16)


@pytest.fixture
def twin(tmp_path: Path) -> Path:
    return write_twin(tmp_path / "twin")


def find(dataset: object, store: Path, split: str | None = "train", **given: Any) -> Source:
    pair = PairConfig(dataset=str(dataset), split=split, **{"subset": "de-en", **given})
    return resolve_source(pair, "data.train", languages=LANGUAGES, store_dir=store)


def left_in(store: Path) -> list[str]:
    """What a failure left behind, but for locks."""
    return [path.name for path in store.rglob("*") if path.is_file() and path.suffix != ".lock"]


# ---- a folder -------------------------------------------------------------------------------------------------------


def test_resolve_source_reads_a_folder_in_both_directions(twin: Path, tmp_path: Path, home: Path) -> None:
    found = find(twin, tmp_path / "store")
    assert list(found.pairs()) == expected("train")
    assert found.origin == DatasetOrigin(str(twin), "de-en", "train", ["en", "de"], revision=None, corpus=None)
    about = json.loads(found.files["src"].with_name("about.json").read_bytes())
    assert about == {
        "origin": {
            "dataset": str(twin),
            "subset": "de-en",
            "split": "train",
            "columns": ["en", "de"],
            "revision": None,
            "corpus": None,
        },
        "bytes": [found.files[side].stat().st_size for side in ("src", "tgt")],
    }
    swapped = find(twin, tmp_path / "store", "validation", src="de", tgt="en")
    assert list(swapped.pairs()) == [(target, text) for text, target in expected("validation")]
    assert sum(path.stat().st_size for path in home.rglob("*") if path.is_file()) < 10_000


def test_resolve_source_copies_a_folder_once_until_it_changes(
    twin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = find(twin, tmp_path / "store")
    stamps = [(path.stat().st_ino, path.stat().st_mtime_ns) for path in first.files.values()]
    with monkeypatch.context() as patch:
        patch.setattr(source, "_copy", lambda *_, **__: pytest.fail("copied again"))
        again = find(twin, tmp_path / "store")
    assert again == first
    assert [(path.stat().st_ino, path.stat().st_mtime_ns) for path in again.files.values()] == stamps
    write_split(twin, "train", [{"de": "neu", "en": "new\nline"}, {"de": None, "en": "x"}])
    changed = find(twin, tmp_path / "store")
    assert list(changed.pairs()) == [("new line", "neu"), ("x", "")]
    assert list(first.pairs()) == expected("train")  # the older copy is as it was
    write_split(twin, "train", [{"de": "alt", "en": "new\nline"}, {"de": None, "en": "x"}])  # not a byte longer
    assert list(find(twin, tmp_path / "store").pairs()) == [("new line", "alt"), ("x", "")]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"subset": "fr-en"}, ["fr-en", "de-en"]),
        ({"split": "dev"}, ["dev", "train", "validation", "test"]),
        ({"split": "train[:3]"}, ["train[:3]", "validation"]),
        ({"split": None}, ["data.train.split is not set", "twin"]),
        ({"src": "translation"}, ["no column 'translation'", "translation.de, translation.en"]),
    ],
    ids=["subset", "split", "slice", "no split", "no column"],
)
def test_resolve_source_names_what_a_folder_does_not_have(
    given: dict[str, Any], words: list[str], twin: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as caught:
        find(twin, tmp_path / "store", **given)
    message = str(caught.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == [], message
    assert left_in(tmp_path / "store") == []


def test_resolve_source_names_a_column_that_a_folder_lacks_with_those_it_has(twin: Path, tmp_path: Path) -> None:
    place, names = re.escape(f"{twin} de-en train"), r"translation\.de, translation\.en"
    with pytest.raises(InputError, match=rf"^{place}: no column 'fr', only '{names}': name columns that it has$"):
        find(twin, tmp_path / "store", tgt="fr")
    assert left_in(tmp_path / "store") == []


def test_resolve_source_names_the_row_of_a_column_that_is_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "BLOCK", 2)
    (tmp_path / "set").mkdir()
    lines = [*['{"en": null, "de": "b"}\n'] * 3, '{"en": ["a"], "de": "b"}\n']
    (tmp_path / "set" / "train.jsonl").write_text("".join(lines), encoding="utf-8")
    with pytest.raises(
        InputError, match=r"set train: row 4: column 'en' holds \['a'\], not text: choose a text column$"
    ):
        find(tmp_path / "set", tmp_path / "store", subset=None)
    assert left_in(tmp_path / "store") == []


def test_resolve_source_names_the_row_before_what_cannot_be_read(
    twin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "BLOCK", 8)  # of the 60 rows of the first file, 56 are seven blocks
    (twin / "de-en" / "train-00001-of-00001.parquet").write_bytes(b"PAR1" + bytes(100))
    with pytest.raises(InputError, match=r"twin de-en train: after row 56: cannot be read \("):
        find(twin, tmp_path / "store")


def test_resolve_source_leaves_no_copy_of_a_damaged_folder(twin: Path, tmp_path: Path) -> None:
    path = twin / "de-en" / "train-00000-of-00001.parquet"
    good = path.read_bytes()
    path.write_bytes(good[:600] + bytes(200) + good[800:])
    with pytest.raises(InputError, match=r"twin de-en train.*: cannot be read \("):
        find(twin, tmp_path / "store")
    assert left_in(tmp_path / "store") == []
    path.write_bytes(good)
    assert list(find(twin, tmp_path / "store").pairs()) == expected("train")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")], ids=["stop", "full"])
def test_resolve_source_leaves_nothing_of_an_interrupted_copy(
    error: BaseException, twin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(file: Any, text: str) -> None:
        if file.tell() > 300:
            raise error
        file.write(text.encode() + b"\n")

    kind = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else StorageError
    with monkeypatch.context() as patch:
        patch.setattr(source, "_write", write)
        with pytest.raises(kind):
            find(twin, tmp_path / "store")
    assert left_in(tmp_path / "store") == []
    assert list(find(twin, tmp_path / "store").pairs()) == expected("train")


def test_resolve_source_names_a_copy_when_all_of_it_is_on_the_disk(
    twin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        events = watch_disk(patch)
        found = find(twin, tmp_path / "store")
    *inside, renamed, outside = events
    sizes = {path.name: path.stat().st_size for path in found.files["src"].parent.iterdir()}
    assert {path.name: size for _, path, size in inside} == sizes
    assert (len(sizes), renamed[0], outside) == (3, "rename", ("sync", tmp_path / "store" / "copies", 0))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff"])
def test_resolve_source_copies_again_where_about_json_is_bad(content: bytes, twin: Path, tmp_path: Path) -> None:
    found = find(twin, tmp_path / "store")
    about = found.files["src"].with_name("about.json")
    about.write_bytes(content)
    again = find(twin, tmp_path / "store")
    assert again == found
    assert list(again.pairs()) == expected("train")


@pytest.mark.parametrize("side", ["src", "tgt"])
def test_resolve_source_copies_again_what_is_not_whole(side: str, twin: Path, tmp_path: Path) -> None:
    found = find(twin, tmp_path / "store")
    path = found.files[side]
    path.write_bytes(path.read_bytes()[:100])
    assert list(find(twin, tmp_path / "store").pairs()) == expected("train")
    path.unlink()
    assert list(find(twin, tmp_path / "store").pairs()) == expected("train")


def test_resolve_source_copies_nothing_anew_for_what_is_no_data(twin: Path, tmp_path: Path) -> None:
    found = find(twin, tmp_path / "store")
    (twin / ".cache" / "huggingface").mkdir(parents=True)
    (twin / ".cache" / "huggingface" / "x.metadata").write_bytes(b"1")
    (twin / ".gitattributes").write_bytes(b"*")
    assert find(twin, tmp_path / "store") == found


@pytest.mark.parametrize("name", ["text", "json", "parquet"])
def test_resolve_source_takes_a_folder_that_is_called_like_a_format(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_twin(tmp_path / name)
    (tmp_path / "other.jsonl").write_bytes(b"not JSON\n")
    monkeypatch.chdir(tmp_path)
    assert list(find(name, tmp_path / "store").pairs()) == expected("train")


def test_a_data_set_whose_rows_are_not_utf_8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_bytes(b'{"en": "one", "de": "f\xfcr"}\n')
    pair = PairConfig(dataset=str(tmp_path / "set"), split="train")
    with pytest.raises(InputError, match=r"set train: after row 0: column 'de' is not UTF-8 \('utf-8' codec"):
        resolve_source(pair, "data.train", languages=("en", "de"), store_dir=tmp_path)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # datasets 5.1 closes no file
@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("train.tsv", 'en\tde\nzero\tnull\n"Yes\t"Ja\nNA\tNone\n"No" x\tNein"\n', ('"Yes', '"Ja', '"No" x', 'Nein"')),
        (
            "train.csv",
            'en,de\nzero,null\n"Yes, sir",Ja\nNA,None\n"a ""No""",Nein\n',
            ("Yes, sir", "Ja", 'a "No"', "Nein"),
        ),
        ("train.tsv", "en\tde\nzero\tnull\tnote\nYes\tJa\nNA\tNone\nNo\tNein\t\n", ("Yes", "Ja", "No", "Nein")),
        ("train.csv", "en,de\nzero,null,\nYes,Ja,\nNA,None,\nNo,Nein,\n", ("Yes", "Ja", "No", "Nein")),
    ],
)
def test_resolve_source_keeps_words_and_quotation_marks_of_a_folders_tables(
    name: str, content: str, texts: tuple[str, ...], tmp_path: Path
) -> None:
    """Readers of CSV take `null` for a missing value, a lone quotation mark of TSV for the start of a long cell, and
    the first column for the rows' names where a row has a cell more than the header."""
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / name).write_text(content, encoding="utf-8")
    found = find(tmp_path / "tables", tmp_path / "store", subset=None)
    assert list(found.pairs()) == [("zero", "null"), texts[:2], ("NA", "None"), texts[2:]]


# The path that a README names, where {outside} is a folder beside the data set; and what in the set leads there.
STRANGE = {
    "absolute": ("{outside}/secret.csv", None),
    "parent": ("../outside/secret.csv", None),
    "pattern": ("{outside}/*.csv", None),
    "text": ("{outside}/secret.txt", None),
    "URL": ("file://{outside}/secret.csv", None),
    "local": ("local://{outside}/secret.csv", None),
    "chain": ("zip://secret.csv::{outside}/secret.zip", None),
    "link": ("own.csv", "secret.csv"),
    "folder": ("own/secret.csv", "."),
}


@pytest.mark.parametrize("case", STRANGE)
def test_resolve_source_reads_no_file_outside_a_folder(case: str, tmp_path: Path) -> None:
    folder, outside = tmp_path / "set", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (outside / "secret.csv").write_text("en,de\nprivate,geheim\n", encoding="utf-8")
    (outside / "secret.txt").write_text("private\n", encoding="utf-8")
    with zipfile.ZipFile(outside / "secret.zip", "w") as archive:
        archive.write(outside / "secret.csv", "secret.csv")

    path, target = STRANGE[case]
    path = path.format(outside=outside)
    if target is not None:
        (folder / Path(path).parts[0]).symlink_to(outside / target)
    write_card(folder, path)
    with pytest.raises(InputError, match=r"set train: .* is not one of .*own files"):
        find(folder, tmp_path / "store", subset=None, src="text" if case == "text" else "en")
    assert left_in(tmp_path / "store") == []


def write_card(folder: Path, path: str) -> None:
    """A README that names one file of the split `train`."""
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: {path}\n---\n",
        encoding="utf-8",
    )


def test_resolve_source_reads_a_file_of_a_folder_by_any_way(tmp_path: Path) -> None:
    (tmp_path / "set" / "blobs").mkdir(parents=True)
    (tmp_path / "set" / "blobs" / "a.jsonl").write_text('{"en": "own", "de": "eigen"}\n', encoding="utf-8")
    (tmp_path / "set" / "a.jsonl").symlink_to("blobs/a.jsonl")
    (tmp_path / "also").symlink_to("set")
    write_card(tmp_path / "set", "a.jsonl")
    for name in ("set", "also"):
        found = find(tmp_path / name, tmp_path / "store", subset=None)
        assert list(found.pairs()) == [("own", "eigen")]


def test_resolve_source_refuses_a_format_whose_reader_opens_other_files(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "task.toml").write_text('[task]\ndescription = "x"\n', encoding="utf-8")
    (tmp_path / "secret").write_text("private", encoding="utf-8")
    (tmp_path / "set" / "instruction.md").symlink_to(tmp_path / "secret")
    write_card(tmp_path / "set", "task.toml")
    with pytest.raises(InputError, match="set train: of format harbor: only arrow, csv, json, parquet, text, webdata"):
        find(tmp_path / "set", tmp_path / "store", subset=None, src="instruction", tgt="description")
    assert left_in(tmp_path / "store") == []


@pytest.mark.parametrize(
    "file",
    [
        "/etc/passwd",
        f"hf://datasets/evil/other@{COMMIT}/a.csv",
        f"hf://datasets/evil/set@{COMMIT}/../../../../../etc/passwd",
        f"zip://a.csv::hf://datasets/evil/set@{COMMIT}/a.zip",
        f"hf://datasets/evil/set@{COMMIT}/a.csv::/etc/passwd",
    ],
)
def test_check_own_refuses_what_is_of_no_data_set_or_of_another(file: str) -> None:
    wanted = DatasetOrigin("evil/set", None, "train", ["en", "de"])
    source._check_own(f"hf://datasets/evil/set@{COMMIT}/data/a.csv", wanted, is_local=False)
    with pytest.raises(InputError, match=r"is not one of .*own files"):
        source._check_own(file, wanted, is_local=False)


@pytest.mark.parametrize(("run_dir", "expected"), [("runs/a", "runs"), ("runs/a/", "runs"), ("a", "."), (".", "..")])
def test_store_beside_is_beside_the_run(run_dir: str, expected: str) -> None:
    assert store_beside(run_dir) == Path(expected, ".store")


def test_resolve_source_takes_an_empty_name_for_none(tmp_path: Path) -> None:
    given = PairConfig("a.en", "a.de", dataset="", split="train")
    assert resolve_source(given, "data.dev", languages=LANGUAGES, store_dir=tmp_path).columns is None


def test_prepare_shows_small_faults_before_it_copies(twin: Path, tmp_path: Path) -> None:
    data = write_corpus(tmp_path / "text")
    data.train = PairConfig(dataset=str(twin), subset="de-en", split="train")
    data.test["other"].tgt = str(tmp_path / "nothing")
    remedy = r"check .*; where the experiment has brought this set, '~data\.test\.other' leaves it out$"
    with pytest.raises(InputError, match=rf"nothing: cannot be read .*: {remedy}"):
        prepare(tiny_job(tmp_path / "runs" / "a", data))
    data.test["other"].tgt = data.dev.src
    with pytest.raises(InputError, match=r"has 8 lines, .* has 16"):
        prepare(tiny_job(tmp_path / "runs" / "a", data))
    del data.test["other"]
    data.extra["more"] = ExtraConfig(data.dev.src, str(tmp_path / "nothing"))
    with pytest.raises(InputError, match=r"nothing: cannot be read .* check data\.extra\.more"):
        prepare(tiny_job(tmp_path / "runs" / "a", data))
    assert left_in(tmp_path) == [name for name in left_in(tmp_path) if name != "about.json"]


def find_slowly(folder: Path, builds: Path) -> None:
    original = source._copy

    def counted(*arguments: Any, **options: Any) -> None:
        with builds.open("a", encoding="utf-8") as file:
            file.write("copy\n")
        time.sleep(0.3)
        original(*arguments, **options)

    source._copy = counted
    assert list(find(folder / "twin", folder / "store").pairs()) == expected("train")


def test_resolve_source_copies_once_in_processes_that_start_together(twin: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=find_slowly, args=(tmp_path, tmp_path / "copies")) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    assert [process.exitcode for process in processes] == [0, 0]
    assert (tmp_path / "copies").read_text(encoding="utf-8") == "copy\n"


def test_resolve_source_uses_a_copy_where_nothing_can_be_written(twin: Path, tmp_path: Path) -> None:
    first = find(twin, tmp_path / "store")
    for lock in (tmp_path / "store").rglob("*.lock"):
        lock.unlink()
        lock.mkdir()
    assert find(twin, tmp_path / "store") == first


@pytest.mark.parametrize(
    "other", [{"dataset": "a/c"}, {"subset": None}, {"split": "test"}, {"src": "de", "tgt": "en"}, {"tgt": "fr"}]
)
def test_resolve_source_makes_a_copy_for_whatever_is_asked_for(
    other: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "dataset_revision", lambda name: COMMIT)
    monkeypatch.setattr(source, "_stream", lambda wanted, *_: [(json.dumps(asdict(wanted)), "")])
    given = {"dataset": "a/b", "subset": "c", "split": "train", "src": "en", "tgt": "de"}
    asked = [json.loads(next(find(store=tmp_path, **one).pairs())[0]) for one in (given, given | other, given)]
    assert asked[0] == asked[2] != asked[1]


@pytest.mark.parametrize(
    "name", ["../nowhere", "./corpus", "a/b/c", "corpus/train.en", "/no/where", "a b", "/" * 9 + "x" * 999]
)
def test_resolve_source_names_what_is_neither_a_data_set_nor_a_table(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without asking the hub: a file that exists has another format, and no name there has such a form."""
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "train.en").write_bytes(b"one\n")
    monkeypatch.chdir(tmp_path / "corpus" if name == "./corpus" else tmp_path)
    monkeypatch.setattr(source, "dataset_revision", lambda name: pytest.fail(f"asked for {name}"))
    with pytest.raises(InputError) as caught:
        find(name, tmp_path / "store")
    assert str(caught.value).startswith(f"data.train.dataset={name}: no such directory, nor a .tsv, ")


def test_resolve_source_tells_a_text_file_from_a_column_before_it_asks_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `experiment=wmt14_en_de_base data.train.src=train.en`, which leaves the data set as it is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.en").write_bytes(b"one\n")
    monkeypatch.setattr(source, "dataset_revision", lambda name: pytest.fail(f"asked for {name}"))
    with pytest.raises(
        InputError,
        match=r"^data\.train\.src=train\.en: with data\.train\.dataset=wmt/wmt14 it names a column, not a file: "
        r"set data\.train\.dataset=null to read the file$",
    ):
        find("wmt/wmt14", tmp_path / "store", src="train.en", tgt="train.de")

    # A file that happens to be called like the language's column is not meant.
    (tmp_path / "en").write_bytes(b"one\n")
    monkeypatch.setattr(source, "dataset_revision", lambda name: COMMIT)
    monkeypatch.setattr(source, "_stream", lambda wanted, *_: [(" ".join(wanted.columns), "")])
    assert next(find("wmt/wmt14", tmp_path / "store", src="en", tgt="de").pairs())[0] == "en de"


# ---- two text files, and tables -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "given", "columns"),
    [
        ("a.tsv", {}, ("1", "2")),
        ("a.tsv.gz", {"src": "3"}, ("3", "2")),
        ("a.tsv", {"src": "en", "tgt": "de"}, ("en", "de")),
        ("a.jsonl", {}, ("en", "de")),
        ("a.tsv.jsonl.gz", {}, ("en", "de")),
        ("a.tsv.zst", {}, ("1", "2")),
        ("a.tsv.bz2", {}, ("1", "2")),
        ("a.jsonl.xz", {}, ("en", "de")),
        ("a.parquet", {"tgt": "german"}, ("en", "german")),
    ],
)
def test_resolve_source_knows_the_usual_columns_of_a_table(
    name: str, given: dict[str, str], columns: tuple[str, str], tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(compressed(b"a\tb\tc\n", path.suffix))
    found = resolve_source(PairConfig(dataset=str(path), **given), "data.dev", languages=LANGUAGES, store_dir=tmp_path)
    assert (found.shards, found.columns) == ([(path,)], columns)


@pytest.mark.parametrize(
    ("name", "given", "languages", "column"),
    [
        ("a.tsv", {"src": "2"}, ("en", "de"), "2"),
        ("a.jsonl", {"tgt": "en"}, ("en", "de"), "en"),
        ("a.parquet", {}, ("en", "en"), "en"),
        ("folder", {"src": "de", "split": "train"}, ("en", "de"), "de"),
    ],
)
def test_resolve_source_never_makes_both_sides_one_column(
    name: str, given: dict[str, str], languages: tuple[str, str], column: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
    else:
        path.write_bytes(b"a\tb\n")
    with pytest.raises(InputError, match=f"data.dev: both sides would be column '{column}': set data.dev.src and"):
        resolve_source(PairConfig(dataset=str(path), **given), "data.dev", languages=languages, store_dir=tmp_path)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        (
            "a.tsv",
            {"split": "train"},
            r"^data\.dev\.split=train does not apply to .*a\.tsv: leave it out, or set data\.dev\.split=null$",
        ),
        ("a.jsonl", {"subset": "de-en"}, r"^data\.dev\.subset=de-en does not apply to data\.dev\.dataset=.*a\.jsonl:"),
        (
            "sacrebleu:wmt14",
            {"split": "test"},
            r"^data\.dev\.split=test does not apply to data\.dev\.dataset=sacrebleu:wmt14:",
        ),
        (
            "sacrebleu:wmt14",
            {"src": "en"},
            r"^data\.dev\.src=en does not apply to .*sacrebleu:wmt14: .* set data\.dev\.src=$",
        ),
    ],
)
def test_resolve_source_refuses_keys_that_say_nothing_about_this_kind_of_data(
    name: str, given: dict[str, str], message: str, tmp_path: Path
) -> None:
    dataset = name if name.startswith("sacrebleu") else str(tmp_path / name)
    with pytest.raises(InputError, match=message):
        resolve_source(PairConfig(dataset=dataset, **given), "data.dev", languages=LANGUAGES, store_dir=tmp_path)


def test_resolve_source_copies_a_column_where_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_bytes(b"one\teins\n")
    pair = PairConfig("2", "2", dataset=str(tmp_path / "a.tsv"))
    found = resolve_source(pair, "data.extra.copied", languages=LANGUAGES, store_dir=tmp_path)
    assert list(found.pairs()) == [("eins", "eins")]


def test_source_believes_a_first_row_that_names_the_languages(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(b"de\ten\nneu\tnew\n")
    for languages, expected_pair in ((("en", "de"), ("new", "neu")), (("de", "en"), ("neu", "new"))):
        found = resolve_source(PairConfig(dataset=str(path)), "data.train", languages=languages, store_dir=tmp_path)
        assert list(found.pairs()) == [expected_pair]
    found = resolve_source(PairConfig(dataset=str(path)), "data.train", languages=("en", "fr"), store_dir=tmp_path)
    assert list(found.pairs()) == [("de", "en"), ("neu", "new")]  # it names but one of these


@pytest.mark.parametrize(("delimiter", "columns"), [(";", ("en", "de")), (",", ("1", "2"))])
def test_resolve_source_reads_the_header_of_csv(delimiter: str, columns: tuple[str, str], tmp_path: Path) -> None:
    header = ("de", "en") if columns[0] == "en" else ("German", "English")
    rows = [header, ('"neu, alt; x"', "new")]
    path = tmp_path / "a.csv"
    path.write_text("".join(f"{delimiter.join(row)}\n" for row in rows), encoding="utf-8")
    found = resolve_source(PairConfig(dataset=str(path)), "data.train", languages=("en", "de"), store_dir=tmp_path)
    assert found.columns == columns


def test_source_load_refuses_a_set_without_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_bytes(b"")
    found = resolve_source(
        PairConfig(dataset=str(tmp_path / "a.tsv")), "data.dev", languages=LANGUAGES, store_dir=tmp_path
    )
    with pytest.raises(InputError, match=r"a\.tsv: there is no sentence in it: check data\.dev"):
        found.load("data.dev")


# ---- a run with extra corpora, and its tests ------------------------------------------------------------------------


def write_table(path: Path, count: int) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"one {n}\tein {n}\n" for n in range(count)), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainJob:
    """Two steps on a corpus with an extra one; what was trained on is in data.json."""
    folder = tmp_path_factory.mktemp("trained")
    data = write_corpus(folder / "corpus")
    data.extra["bt"] = ExtraConfig(dataset=write_table(folder / "bt.tsv", 40), weight=0.5)
    job = tiny_job(folder / "runs" / "a", data, max_steps=2, save_every=2, validate_every=2, average=1)
    run(job)
    return job


def test_train_tells_of_extra_corpora_in_data_json(trained: TrainJob) -> None:
    sets = read(Path(trained.run_dir) / "data.json")["sets"]
    assert sets["train"]["pairs_kept"] == 200
    assert {key: sets["extra.bt"][key] for key in ("columns", "pairs_kept", "weight")} == {
        "columns": ["1", "2"],
        "pairs_kept": 40,
        "weight": 0.5,
    }


def test_train_does_not_resume_with_other_extra_corpora(trained: TrainJob, tmp_path: Path) -> None:
    job = copy.deepcopy(trained)
    job.data.extra["bt"].weight = 1.5
    assert_not_resumed(job, "data.extra.bt.weight: 0.5 -> 1.5")
    job = copy.deepcopy(trained)
    job.data.extra["more"] = ExtraConfig(dataset=write_table(tmp_path / "more.tsv", 3))
    assert_not_resumed(job, "data.extra.more.weight: null -> 1.0", "the training data")
    job = copy.deepcopy(trained)
    job.data.extra.clear()
    assert_not_resumed(job, "data.extra.bt.weight: 0.5 -> null", "the training data")


def assert_not_resumed(job: TrainJob, *words: str) -> None:
    job.train.max_steps = 3
    with pytest.raises(CheckpointError) as caught:
        run(job)
    assert caught.value.exit_status == 4
    assert [word for word in words if word not in str(caught.value)] == []
    assert steps_of(Path(job.run_dir)) == [2]


def test_train_resumes_with_an_extra_corpus_that_moved(trained: TrainJob, tmp_path: Path) -> None:
    job = copy.deepcopy(trained)
    shutil.copytree(trained.run_dir, tmp_path / "runs" / "b")
    job.run_dir, job.train.max_steps = str(tmp_path / "runs" / "b"), 3
    job.data.extra["bt"].dataset = write_table(tmp_path / "elsewhere" / "moved.tsv", 40)
    assert steps_of(run(job)) == [2, 3]


def test_evaluate_reads_tables_and_data_sets(trained: TrainJob, twin: Path, tmp_path: Path) -> None:
    test = {
        "table": PairConfig(dataset=write_table(tmp_path / "test.tsv", 7)),
        "twin": PairConfig(dataset=str(twin), subset="de-en", split="test"),
    }
    results = evaluate(EvaluateJob(run_dir=trained.run_dir, test=test))
    assert sorted(results.test_sets) == ["table", "twin"]


@pytest.mark.parametrize(("key", "remedy"), [("data.dev", "set data.store_dir"), ("test.mine", "set store_dir")])
def test_resolve_source_names_a_remedy_that_the_command_has(key: str, remedy: str, twin: Path, tmp_path: Path) -> None:
    (tmp_path / "store").write_bytes(b"")
    pair = PairConfig(dataset=str(twin), subset="de-en", split="test")
    with pytest.raises(StorageError) as caught:
        resolve_source(pair, key, languages=LANGUAGES, store_dir=tmp_path / "store")
    assert str(caught.value).endswith(f"cannot be written (Not a directory): free space or {remedy}")


# ---- the hub, played by a server ------------------------------------------------------------------------------------


@pytest.fixture
def hub(twin: Path) -> Iterator[Hub]:
    with serving(twin, DatasetHandler) as server:
        yield server


def from_hub(name: str, run_dir: str) -> list[str]:
    keys = {"dataset": name, "subset": "de-en"}
    sets = {"train": keys | {"split": "train"}, "dev": keys | {"split": "validation"}}
    given = [f"data.{part}.{key}={value}" for part, pair in sets.items() for key, value in pair.items()]
    return ["prepare", "experiment=small", f"run_dir={run_dir}", "tokenizer.vocab_size=50", *given]


@pytest.mark.ci
def test_prepare_copies_from_the_hub_over_http(hub: Hub, tmp_path: Path) -> None:
    environment = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path / "home")}
    retries = "transformer.data.prepare, datasets, time; time.sleep = lambda seconds: None"
    with Shell(tmp_path, retries, **environment, HF_HUB_OFFLINE="0") as shell:
        for name, words in {"no/such": "check the name", "half/half": "cannot be read"}.items():
            status, log = shell.run(*from_hub(name, "bad/a"))
            assert_one_line(status, log, name, words)
            assert left_in(tmp_path / "bad") == []
        status, log = shell.run(*from_hub("wmt/wmt14", "runs/a"))
        assert (status, "Traceback" in log) == (0, False), log
        assert f"copying wmt/wmt14 de-en train, once (revision {COMMIT})" in log
        assert "data ready: 60 of 60 pairs" in log
        assert "HTTP" not in log
        newest = [path for path in hub.asked if "/wmt/wmt14" in path and COMMIT not in path]
        assert newest == ["/api/datasets/wmt/wmt14"] * 2  # which revision it is: all else is asked of that one
        hub.commit = NEXT_COMMIT
        (dev,) = [path for path in (tmp_path / "runs").rglob("source.txt") if path.stat().st_size < 500]
        dev.write_bytes(dev.read_bytes()[:-1])
        status, log = shell.run(*from_hub("wmt/wmt14", "runs/b"))
        assert status == 0
        copied = re.findall(r"copying (.*), once \(revision (.*)\)", log)
        assert copied == [("wmt/wmt14 de-en validation", NEXT_COMMIT)]  # and not the one that is whole
        hub.shutdown()
        hub.server_close()
        asked = len(hub.asked)
        assert shell.run(*from_hub("wmt/wmt14", "runs/c"))[0] == 0
        assert len(hub.asked) == asked
        status, log = shell.run(*from_hub("wmt/wmt14", "other/a"))
        assert_one_line(status, log, "wmt/wmt14", "cannot be reached", "transformer prepare", "text files")
        assert left_in(tmp_path / "other") == []
    abouts = [json.loads(path.read_bytes()) for path in (tmp_path / "runs").rglob("about.json")]
    assert sorted((about["origin"]["split"], about["origin"]["revision"]) for about in abouts) == [
        ("train", COMMIT),
        ("validation", NEXT_COMMIT),
    ]
    (train,) = [path for path in (tmp_path / "runs").rglob("source.txt") if path.stat().st_size > 500]
    assert train.read_bytes().decode() == "".join(f"{text}\n" for text, _ in expected("train"))
    assert sum(path.stat().st_size for path in (tmp_path / "home").rglob("*") if path.is_file()) < 10_000


def assert_one_line(status: int, log: str, *words: str) -> None:
    """Status 2; the error is the last line, and nothing comes before it but progress and what is tried again."""
    assert status == 2, log
    assert log.endswith("\n")
    lines = [line for line in log[:-1].split("\n") if re.search("^copying |Retrying in | thrown while ", line) is None]
    assert len(lines) == 1, log
    assert [word for word in ("transformer: error: ", *words) if word not in lines[0]] == [], log
