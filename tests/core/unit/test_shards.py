"""What may name text and tables: a file, a pattern, a folder, or a list of these."""

from pathlib import Path

import pytest

from support.compressed import compressed
from transformer.config.settings import PairConfig
from transformer.data.shards import find_files, pair_up
from transformer.data.source import Source, resolve_source
from transformer.errors import InputError

FILES = (
    "a.en",
    "b.en",
    "b10.en",
    "b9.en",
    "in/c.en",
    "in/c.de",
    "in/d.en.gz",
    "in/.hidden.en",
    "all/x",
    "all/y",
    "[b].en",
)


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with FILES of one line each."""
    for name in FILES:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(compressed(f"{name}\n".encode(), path.suffix))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def find(dataset: str | list[str] | None = None, **given: object) -> Source:
    pair = PairConfig(dataset=dataset)
    for key, value in given.items():
        setattr(pair, key, value)
    return resolve_source(pair, "data.train", languages=("en", "de"), store_dir=Path("store"))


def write(name: str, content: str) -> str:
    Path(name).parent.mkdir(exist_ok=True, parents=True)
    Path(name).write_text(content, encoding="utf-8")
    return name


@pytest.mark.parametrize(
    ("names", "files"),
    [
        ("a.en", ["a.en"]),
        ("missing.en", ["missing.en"]),
        ("b*.en", ["b.en", "b10.en", "b9.en"]),
        ("[ab].en", ["a.en", "b.en"]),
        ("[b].en", ["[b].en"]),
        ("**/c.*", ["in/c.de", "in/c.en"]),
        ("*n*", ["[b].en", "a.en", "b.en", "b10.en", "b9.en"]),
        ("in", ["in/c.en", "in/d.en.gz"]),
        ("all", ["all/x", "all/y"]),
        (["b9.en", "a.en"], ["b9.en", "a.en"]),
        (["in/", "b1*", "a.en"], ["in/c.en", "in/d.en.gz", "b10.en", "a.en"]),
    ],
)
@pytest.mark.usefixtures("corpus")
def test_find_files_takes_a_file_a_pattern_a_folder_and_lists(names: str | list[str], files: list[str]) -> None:
    assert list(map(str, find_files(names, "data.train.src", language="en"))) == files


CHECK_IT = "check data.train.src and data.root"


@pytest.mark.parametrize(
    ("names", "remedy"),
    [
        ("*.fr", CHECK_IT),
        (["a.en", "*.fr"], CHECK_IT),
        ("all/*/", CHECK_IT),
        ("a.en,b.en", "a list has brackets, 'data.train.src=[a.en,b.en]'"),
    ],
)
@pytest.mark.usefixtures("corpus")
def test_find_files_names_what_stands_for_no_file(names: str | list[str], remedy: str) -> None:
    with pytest.raises(InputError) as caught:
        find_files(names, "data.train.src", language="en")
    name = names if isinstance(names, str) else names[-1]
    assert str(caught.value) == f"data.train.src={name}: there is no such file: {remedy}"


@pytest.mark.parametrize(
    ("sources", "targets", "lone"),
    [
        (["p-00.en", "p-02.en"], ["p-00.de", "p-01.de", "p-02.de"], "p-01.de"),
        (["p-1.en", "p-2.en", "p-10.en"], ["p-2.de"], "p-1.en"),
        (["a.en", "b.en", "c.en"], ["a.de", "b.de"], "c.en"),
    ],
)
def test_pair_up_names_a_file_without_a_counterpart(sources: list[str], targets: list[str], lone: str) -> None:
    with pytest.raises(InputError) as caught:
        pair_up([*map(Path, sources)], [*map(Path, targets)], "data.train")
    counts = f"data.train.src names {len(sources)} files, data.train.tgt {len(targets)}; each file must translate"
    assert str(caught.value).startswith(f"{lone}: it has no counterpart: {counts}")


@pytest.mark.parametrize(
    ("sources", "targets", "pair"),
    [
        (["p.1.en", "p.2.en", "p.4.en"], ["p.1.de", "p.3.de", "p.4.de"], "p.2.en and p.3.de"),
        (["p1.en", "p10.en", "p2.en"], ["p01.de", "p02.de", "p10.de"], "p10.en and p02.de"),
    ],
)
def test_pair_up_refuses_names_with_other_numbers(sources: list[str], targets: list[str], pair: str) -> None:
    with pytest.raises(
        InputError, match=rf"^{pair} would be paired, .* numbers in their names differ: .* data\.train\.src"
    ):
        pair_up([*map(Path, sources)], [*map(Path, targets)], "data.train")


@pytest.mark.parametrize("targets", [["p1.de", "p02.de"], ["a.de", "b.de"], ["x2024.de", "x2025.de"]])
def test_pair_up_takes_like_numbers_and_names_that_have_nothing_in_common(targets: list[str]) -> None:
    sources = [Path("p1.en"), Path("p2.en")]
    assert pair_up(sources, [*map(Path, targets)], "data.train") == [*zip(sources, map(Path, targets), strict=True)]


@pytest.mark.usefixtures("corpus")
def test_pair_up_takes_one_side_for_both_only_of_a_single_file() -> None:
    assert list(find(src="a.en", tgt="a.en").pairs()) == [("a.en", "a.en")]
    with pytest.raises(InputError, match=r"name the same files, b\.en and so on: name the files of one side in each$"):
        find(src="b*.en", tgt="b*.en")


@pytest.mark.usefixtures("corpus")
def test_source_reads_shards_one_after_the_other_and_names_each_file() -> None:
    write("t/1.en", "one\ntwo\n"), write("t/1.de", "eins\nzwei\n")
    write("t/2.en", "three"), write("t/2.de", "drei\n")
    for found in (find(src="t/*.en", tgt=["t/1.de", "t/2.de"]), find(src="t", tgt="t"), find("t")):
        assert list(found.pairs()) == [("one", "eins"), ("two", "zwei"), ("three", "drei")]
        assert {key: str(path) for key, path in found.files.items()} == {
            **{"src[0]": "t/1.en", "tgt[0]": "t/1.de"},
            **{"src[1]": "t/2.en", "tgt[1]": "t/2.de"},
        }

    write("t/1.de", "eins\nzwei\nzweieinhalb\n")  # three in all would do, if the other file had one less
    write("t/2.de", "")
    with pytest.raises(InputError, match=r"^t/1\.en has 2 lines, t/1\.de has 3: each line"):
        list(found.pairs())


@pytest.mark.parametrize(
    ("dataset", "pairs"),
    [
        ("t", [("one", "eins"), ("two", "zwei"), ("three", "drei")]),
        ("t/*.tsv", [("one", "eins"), ("two", "zwei"), ("three", "drei")]),
        (["t/b.tsv", "t/a.tsv"], [("three", "drei"), ("one", "eins"), ("two", "zwei")]),
    ],
)
@pytest.mark.usefixtures("corpus")
def test_source_reads_tables_one_after_the_other(dataset: str | list[str], pairs: list[tuple[str, str]]) -> None:
    write("t/README", "what it is")
    write("t/a.tsv", "de\ten\neins\tone\nzwei\ttwo\n")
    write("t/b.tsv", "en\tde\nthree\tdrei\n")
    found = find(dataset)
    assert list(found.pairs()) == pairs
    assert list(found.files) == ["dataset[0]", "dataset[1]"]

    write("t/b.tsv", "three\tdrei\n")  # without the first row that the other table has
    with pytest.raises(InputError, match=r"t/b\.tsv:1: no column 'en' in the first row"):
        list(find(["t/a.tsv", "t/b.tsv"]).pairs())


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            ["train.tsv", "test.tsv"],
            r"=t: a folder with test and train: name one of them by a pattern, such as t/train\*",
        ),
        (
            ["train.en", "train.de", "dev.en", "dev.de"],
            "=t: a folder with dev and train: name one of them by a pattern",
        ),
        (["a.tsv", "a.en", "a.de"], "=t: a folder with tables and text: name one of them by a pattern"),
        (["a.en", "a.fr"], r"\.split is not set: name a split of t, .*: it has no tables, nor text .* \.en and \.de$"),
        (
            ["a.en", "b.en", "a.de"],
            r"b\.en: it has no counterpart: data\.train\.src names 2 files, data\.train\.tgt 1;",
        ),
    ],
)
@pytest.mark.usefixtures("corpus")
def test_source_mixes_nothing_in_a_folder(files: list[str], message: str) -> None:
    for name in files:
        write(f"t/{name}", "a\tb\n")
    with pytest.raises(InputError, match=message):
        find("t")


@pytest.mark.parametrize(
    ("dataset", "given", "message"),
    [
        (
            ["a.en"],
            {},
            r"dataset=a\.en: not a \.tsv, .* or \.tmx file: name text files by data\.train\.src and",
        ),
        (["t/a.tsv", "owner/name"], {}, "dataset=owner/name: not a .tsv, .* or .tmx file"),
        (
            "t/*.tsv",
            {"src": ["1", "2"]},
            r"data\.train\.src=\['1', '2'\]: with data\.train\.dataset it names one column",
        ),
        ("t/*.tsv", {"split": "train"}, r"data\.train\.split=train does not apply to data\.train\.dataset=t/\*\.tsv"),
        ("t/*.jsonl", {}, r"data\.train\.dataset=t/\*\.jsonl: there is no such file"),
    ],
)
@pytest.mark.usefixtures("corpus")
def test_source_refuses_what_is_no_table(dataset: str | list[str], given: dict[str, object], message: str) -> None:
    write("t/a.tsv", "one\teins\n")
    with pytest.raises(InputError, match=message):
        find(dataset, **given)
