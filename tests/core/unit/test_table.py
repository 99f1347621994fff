"""Pairs from tables: whatever is in a cell stays in its pair, and whatever is wrong is one line that says where."""

import csv
import io
import json
import random
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from support.compressed import compressed
from transformer.data.corpus import LONGEST_LINE, Pair
from transformer.data.table import format_of, read_table
from transformer.errors import InputError

COLUMNS = ("en", "de")
STRANGE = [
    "a\u2028b",
    "c\x85d",
    "e\0f",
    "g\rh",
    "\x0b\x0c\x1c\x1d\x1e",
    "\u2029",
    '"',
    'say "so',
    "'",
    "\\t",
    "\ufeffz",
    "",
]
PAIRS = [(f"{text} {n}", f"{n} {text}") for n, text in enumerate(STRANGE)]


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(compressed(content, path.suffix))
    return path


def refusal(path: Path, columns: tuple[str, str] = COLUMNS) -> str:
    """What is said of a table that cannot be read: one line, which begins with its name."""
    with pytest.raises(InputError) as caught:
        list(read_table(path, columns))
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    assert len(message) < len(str(path)) + 500
    return message.removeprefix(str(path))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.tsv", True),
        ("b/a.tsv.gz", True),
        ("b/a.tsv.zst", True),
        ("a.jsonl", True),
        ("a.jsonl.gz", True),
        ("a.jsonl.zst", True),
        ("a.tsv.bz2", True),
        ("a.jsonl.xz", True),
        ("a.tsv.lz4", False),
        ("a.tmx", True),
        ("a.tmx.gz", True),
        ("a.parquet", True),
        ("a.parquet.gz", False),
        ("a.parquet.zst", False),
        ("a.json", True),
        ("a.csv", True),
        ("a.csv.zst", True),
        ("a.en.gz", False),
        ("a.en.zst", False),
        ("tsv", False),
        ("wmt/wmt14", False),
        ("a.tsv.en", False),
    ],
)
def test_format_of_goes_by_the_name(name: str, expected: bool) -> None:
    assert bool(format_of(name)) is expected


# ---- TSV ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".tsv", ".tsv.gz", ".tsv.bz2", ".tsv.xz", ".tsv.zst"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_read_table_takes_cells_of_a_tsv_as_they_are(bom: bytes, end: bytes, suffix: str, tmp_path: Path) -> None:
    rows = [f"{n}\t{target}\t{source}".encode() for n, (source, target) in enumerate(PAIRS)]
    path = write(tmp_path / f"a{suffix}", bom + end.join([b"id\tde\ten", *rows]) + end)
    assert list(read_table(path, COLUMNS)) == PAIRS
    assert list(read_table(path, ("3", "2"))) == [("en", "de"), *PAIRS]
    assert list(read_table(path, ("de", "id")))[3] == (PAIRS[3][1], "3")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", []),
        (b"a\tb", [("a", "b")]),
        (b"\na\tb\n\n", [("", ""), ("a", "b"), ("", "")]),
        (b" \n\t\n", [("", ""), ("", "")]),
        (b'"a\tb"\n"c\td\n', [('"a', 'b"'), ('"c', "d")]),
        (b" a \t b \textra\t\n", [(" a ", " b ")]),
        (b"a\t\n\tb\n", [("a", ""), ("", "b")]),
    ],
)
def test_read_table_knows_no_quoting_in_a_tsv(content: bytes, expected: list[Pair], tmp_path: Path) -> None:
    assert list(read_table(write(tmp_path / "a.tsv", content), ("1", "2"))) == expected


@pytest.mark.parametrize(
    ("content", "columns", "message"),
    [
        (b"a\tb\n\nc\n", ("1", "2"), ":3: 1 columns, not 2: "),
        (b"a\tb\n", ("2", "5"), ":1: 2 columns, not 5: "),
        (b"a\tb\n", ("5", "2"), ":1: 2 columns, not 5: "),
        (b"en\tde\na\tb\nc d\n", COLUMNS, ":3: 1 columns, not 2: "),
        (b"en\tfr\na\tb\n", COLUMNS, ":1: no column 'de' in the first row, which has 'en, fr': "),
        (b"", COLUMNS, ":1: no column 'en' in the first row, which has ''"),
        (b"a\tb\n", ("0", "1"), ":1: no column '0' in the first row, which has 'a, b'"),
        (b"a\tb\n", ("9" * 5000, "1"), ":1: no column '99999"),
        (b"a\tb\n", ("1", "²"), ":1: no column '1' in the first row, which has 'a, b'"),
        (b"a\tb\n" + b"x" * 100_000, ("x", "y"), ":1: no column 'x'"),
        (b"x" * 100_000, COLUMNS, ":1: no column 'en' in the first row, which has 'xxx"),
        (b"a\tb\na\tcaf\xe9\n", ("1", "2"), ":2: not UTF-8: byte 6 of the line is 0xe9"),
        (
            b"a\tb\n" + "ü".encode() * LONGEST_LINE + b"\tb",
            ("1", "2"),
            f":2: a row of more than {LONGEST_LINE} bytes: ",
        ),
    ],
)
def test_read_table_names_the_line_of_a_bad_tsv(
    content: bytes, columns: tuple[str, str], message: str, tmp_path: Path
) -> None:
    assert refusal(write(tmp_path / "a.tsv", content), columns).startswith(message)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_read_table_refuses_a_cut_tsv(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.tsv{suffix}"
    path.write_bytes(compressed(b"a\tb\n" * 9, suffix)[:-3])
    assert f": damaged {suffix} file (" in refusal(path, ("1", "2"))


# ---- CSV ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
@pytest.mark.parametrize(("delimiter", "suffix"), [(",", ".csv"), (";", ".csv.gz"), ("\t", ".csv.zst")])
def test_read_table_reads_csv_that_python_wrote(
    delimiter: str, suffix: str, quoting: Any, encoding: str, tmp_path: Path
) -> None:
    pairs = [*PAIRS, ("a, b; c", "d\te"), (";;;", ",,,"), ('"', '""')]
    text = io.StringIO(newline="")
    rows = [(target, str(n), source) for n, (source, target) in enumerate(pairs)]
    csv.writer(text, delimiter=delimiter, quoting=quoting).writerows([("de", "id", "en"), *rows])
    path = write(tmp_path / f"a{suffix}", text.getvalue().encode(encoding))
    assert list(read_table(path, COLUMNS)) == pairs
    assert list(read_table(path, ("3", "1"))) == [("en", "de"), *pairs]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", []),
        ("a,b", [("a", "b")]),
        ("a, b;c\nd;e, f\n", [("a, b", "c"), ("d", "e, f")]),
        ("a, b, c;d, e\nf;g\n", [("a, b, c", "d, e"), ("f", "g")]),
        ("a; b,c\nd,e\n", [("a; b", "c"), ("d", "e")]),
        ('a;"b\r\nc"\r\n', [("a", "b c")]),
        ('a,"b ""c"", d"\n', [("a", 'b "c", d')]),
        ("\n,\na,b\n", [("", ""), ("", ""), ("a", "b")]),
        ("a,b,\nc,d\n", [("a", "b"), ("c", "d")]),
        ("a,b\nc,d, ,\n", [("a", "b"), ("c", "d")]),
        ("sep=|\na|b; c; d\ne|f\n", [("a", "b; c; d"), ("e", "f")]),
        ("sep=,\r\na;b,c\r\nd;e,f\r\n", [("a;b", "c"), ("d;e", "f")]),
    ],
)
def test_read_table_of_csv_by_hand(content: str, expected: list[Pair], tmp_path: Path) -> None:
    assert list(read_table(write(tmp_path / "a.csv", content.encode()), ("1", "2"))) == expected


def test_read_table_of_csv_looks_at_its_first_lines_only(tmp_path: Path) -> None:
    """A cell goes on behind the lines that tell what separates columns."""
    content = "a,b\n" * 99 + 'c,"d\n' + "e\n" * 150 + 'f"\n'
    found = list(read_table(write(tmp_path / "a.csv", content.encode()), ("1", "2")))
    assert found == [("a", "b")] * 99 + [("c", f"d {'e ' * 150}f")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("en,fr\na,b\n", ":1: no column 'de' in the first row, which has 'en, fr': "),
        ("en,de\na\n", ":2: 1 columns, not 2: put a cell that has what separates columns between quotation marks"),
        ("en,de\n\na, b,c\n", ":3: 3 columns, where the first row has 2: put a cell that has "),
        ('en,de\n"a\nb",c\n"d" e,f\n', ":4: not valid CSV ("),
        ('en,de\na,b\n"c,d\ne,f\n', ":3: not valid CSV (unexpected end of data): inside a quoted cell"),
        ('en,de\n"' + "a\n" * 200_000, ":2: not valid CSV (field larger than field limit"),
        (b"en,de\nf\xfcr,c\n", ":2: not UTF-8: byte 2 of the line is 0xfc: "),
        ("en;de\nä;ö\nü".encode("utf-16")[:-1], ":3: not valid UTF-16, though the file begins"),
        ('sep="\nen,de\na,b\n', ":1: no column 'en' in the first row, which has 'sep=\"': "),  # Python 3.13 refuses
        ("sep=\r\r\nen,de\na,b\n", ":1: no column 'en' in the first row, which has 'sep='"),
        ("en,de\na,b".encode("utf-32"), ":1: not UTF-8: byte 1 of the line is 0xff: "),
        (b"\xff\xfee\0n\0\n\0\x00\xd8a\0", ":2: not valid UTF-16, though the file begins"),
    ],
)
def test_read_table_names_the_line_of_bad_csv(content: str | bytes, message: str, tmp_path: Path) -> None:
    data = content if isinstance(content, bytes) else content.encode()
    assert refusal(write(tmp_path / "a.csv", data)).startswith(message)


# ---- JSON lines -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.bz2", ".jsonl.xz", ".jsonl.zst"])
@pytest.mark.parametrize("escaped", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_read_table_keeps_texts_of_json_lines_in_their_pair(
    nested: bool, escaped: bool, suffix: str, tmp_path: Path
) -> None:
    rows: list[dict[str, Any]] = [{"id": n, "de": pair[1], "en": pair[0]} for n, pair in enumerate(PAIRS)]
    rows = [{"id": 1, "translation": row} for row in rows] if nested else rows
    lines = "".join(f"{json.dumps(row, ensure_ascii=escaped)}\r\n" for row in rows)
    path = write(tmp_path / f"a{suffix}", b"\xef\xbb\xbf" + lines.encode())
    assert list(read_table(path, COLUMNS)) == PAIRS
    assert list(read_table(path, ("de", "en"))) == [(target, source) for source, target in PAIRS]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"en": null, "de": "b"}', ("", "b")),
        ('{"en": "a\\nb\\n", "de": "c\\r\\nd"}', ("a b ", "c\r d")),  # a sentence is a line
        ('{"en": "x\\ud83d", "de": "\\ude00\\ud83dy"}', ("x\ufffd", "\ufffd\ufffdy")),
        ('{"en": "\\ud83d\\ude00", "de": "\\u0000"}', ("😀", "\0")),
        ('{"en": "a", "de": "b", "translation": {"en": "c"}}', ("a", "b")),
        ('{"en": "a", "translation": {"en": "c", "de": "d"}}', ("a", "d")),
        ('{"en": "a", "en": "b", "de": "c"}', ("b", "c")),
        (' \t{"en":"a","de":"b","n":1e999}  ', ("a", "b")),
        ("", ("", "")),
        (" ", ("", "")),
    ],
)
def test_read_table_of_a_json_line_by_hand(line: str, expected: Pair, tmp_path: Path) -> None:
    content = f'{{"en": "1", "de": "2"}}\n{line}\n{{"en": "3", "de": "4"}}'.encode()
    assert list(read_table(write(tmp_path / "a.jsonl", content), COLUMNS)) == [("1", "2"), expected, ("3", "4")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"en": "a", "de": 7}', "column 'de' holds 7, not text: choose a text column"),
        ('{"en": true, "de": "b"}', "column 'en' holds True"),
        ('{"en": NaN, "de": "b"}', "column 'en' holds nan"),
        ('{"en": {"a": "b"}, "de": "b"}', "column 'en' holds {'a': 'b'}"),
        ('{"en": -1e999, "de": "b"}', "column 'en' holds -inf"),
        (f'{{"en": {"9" * 4000}, "de": "b"}}', "column 'en' holds 999"),
        (f'{{"en": {"9" * 5000}, "de": "b"}}', "not valid JSON ("),
        ('{"en": "a", "fr": "b"}', "no column 'de', only 'en, fr': name columns that it has"),
        ('{"translation": {"en": "a"}}', "no column 'de', only 'en': name columns that it has"),
        ('{"translation": "a", "de": "b"}', "no column 'en', only 'translation, de': "),
        ("{}", "no column 'en', only '': "),
        ("[1, 2]", "expected one JSON object per line"),
        ("null", "expected one JSON object per line"),
        ('"a\tb"', "not valid JSON ("),
        ('{"en": "a", "de": "b"', "not valid JSON ("),
        ('{"en": "a", "de": "b"} {}', "not valid JSON ("),
        ("{'en': 'a'}", "not valid JSON ("),
        ("a\tb", "not valid JSON ("),
        ("[" * 100_000, "not valid JSON ("),
        ("\ufeff{}", "not valid JSON ("),
        (
            f'{{"en": "a", "de": "b", "text": "{"ü" * LONGEST_LINE}"}}',
            f"a row of more than {LONGEST_LINE} bytes: leave out",
        ),
    ],
)
def test_read_table_names_a_bad_json_line(line: str, message: str, tmp_path: Path) -> None:
    content = f'{{"en": "1", "de": "2"}}\n\n{line}\n'.encode()
    assert refusal(write(tmp_path / "a.jsonl", content)).startswith(f":3: {message}")


def test_read_table_refuses_a_deeply_nested_json_line_in_one_line(tmp_path: Path) -> None:
    """At some depths Python can still read it, and no longer write it."""
    path = tmp_path / "a.jsonl"
    for depth in range(700, 1_001):
        path.write_text(f'{{"en": {"[" * depth}{"]" * depth}, "de": "b"}}', encoding="utf-8")
        assert refusal(path).startswith((":1: not valid JSON (", ":1: column 'en' holds ["))


def test_read_table_names_every_cut_of_a_json_line(tmp_path: Path) -> None:
    line = json.dumps({"translation": {"en": 'a "b" \u2028 \n', "de": "é"}}, ensure_ascii=False).encode()
    for size in range(1, len(line)):
        message = refusal(write(tmp_path / "a.jsonl", b'{"en": "1", "de": "2"}\n' + line[:size]))
        assert message.startswith((":2: not valid JSON (", ":2: not UTF-8"))


# ---- Parquet --------------------------------------------------------------------------------------------------------


def write_parquet(path: Path, pairs: list[tuple[str | None, str | None]], **options: Any) -> Path:
    columns = {"en": [pair[0] for pair in pairs], "de": [pair[1] for pair in pairs], "id": range(len(pairs))}
    parquet.write_table(pyarrow.table(columns), path, **options)
    return path


@pytest.mark.parametrize("rows", [1, 5, 1000], ids=lambda rows: f"{rows} rows a group")
@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary", "translation"])
def test_read_table_keeps_texts_of_a_parquet_file_in_their_pair(
    kind: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformer.data.table.BLOCK", 7)  # rows are read by blocks across groups
    text = pyarrow.large_string() if kind == "large_string" else pyarrow.string()
    sides = [pyarrow.array([pair[side] for pair in PAIRS], text) for side in (1, 0)]
    sides = [side.dictionary_encode() for side in sides] if kind == "dictionary" else sides
    table = {"id": pyarrow.array(range(len(PAIRS))), "de": sides[0], "en": sides[1]}
    if kind == "translation":
        table = {"id": table["id"], "translation": pyarrow.StructArray.from_arrays(sides, ["de", "en"])}
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table(table), path, row_group_size=rows)
    assert list(read_table(path, COLUMNS)) == PAIRS
    assert list(read_table(path, ("de", "en"))) == [(target, source) for source, target in PAIRS]


def test_read_table_of_nulls_and_newlines_in_a_parquet_file(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [(None, "b"), ("a\nb", None), (None, None), ("c", "d")])
    assert list(read_table(path, COLUMNS)) == [("", "b"), ("a b", ""), ("", ""), ("c", "d")]
    rows = [{"translation": None, "de": "b"}, {"translation": {"en": "a"}, "de": "c"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows[1:]), path)
    assert list(read_table(path, COLUMNS)) == [("a", "c")]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert list(read_table(path, COLUMNS)) == [("", "b"), ("a", "c")]
    parquet.write_table(pyarrow.table({"en": pyarrow.array([], pyarrow.string()), "de": []}), path)
    assert list(read_table(path, COLUMNS)) == []


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (("en", "fr"), "no column 'fr', only 'en, de, id': name columns that it has"),
        (("fr", "de"), "no column 'fr', only 'en, de, id': name columns that it has"),
        (("x", "y"), "no column 'x', only 'en, de, id': name columns that it has"),
        (("en", "id"), "row 1: column 'id' holds 0, not text: choose a text column"),
    ],
)
def test_read_table_names_a_column_that_a_parquet_file_lacks(
    columns: tuple[str, str], message: str, tmp_path: Path
) -> None:
    path = write_parquet(tmp_path / "a.parquet", [("a", "b"), ("c", "d")])
    assert refusal(path, columns).endswith(f": {message}")


def test_read_table_names_a_column_that_a_parquet_file_has_twice(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table([["a"], ["b"], ["c"]], names=["en", "en", "de"]), path)
    assert refusal(path) == ": two columns have the name 'en': give one of them another name"


def test_read_table_names_a_key_that_a_translation_lacks(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"translation": [{"en": "a", "fr": "b"}], "id": [1]}), path)
    assert refusal(path) == ": no column 'de', only 'translation.en, translation.fr, id': name columns that it has"


@pytest.mark.parametrize("content", [b"", b"a\tb\n", b"PAR1", b"PAR1" * 20, b"\0" * 100, b"PAR1\xff\xff\xff\x7fPAR1"])
def test_read_table_refuses_what_is_no_parquet_file(content: bytes, tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", content)
    assert refusal(path).startswith(": cannot be read as Parquet (")


@pytest.mark.parametrize("name", ["a.parquet", "a.tsv", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_read_table_names_a_file_that_is_not_there(name: str, tmp_path: Path) -> None:
    absent = refusal(tmp_path / name, ("1", "2"))
    assert "No such file" in absent
    assert ": check the path" in absent
    (tmp_path / name).mkdir()
    assert ": cannot be read" in refusal(tmp_path / name, ("1", "2"))


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_read_table_names_every_cut_or_damaged_parquet_file(compression: str, checksums: bool, tmp_path: Path) -> None:
    """Where pages have checksums, no changed text comes out; where they have none, nothing but one line or text."""
    pairs: list[tuple[str | None, str | None]] = [(f"one {n} käse", f"eins {n}") for n in range(200)]
    path = tmp_path / "a.parquet"
    write_parquet(path, pairs, compression=compression, row_group_size=50, write_page_checksum=checksums)
    good, state = path.read_bytes(), random.Random(1)
    for size in [4, 8, len(good) - 1, *(state.randrange(len(good)) for _ in range(27))]:
        path.write_bytes(good[:size])
        assert refusal(path).startswith(": cannot be read as Parquet (")
    pages = range(4, len(good) - 8 - int.from_bytes(good[-8:-4], "little"))  # behind them is what describes them
    for part in (pages, range(pages.stop, len(good))):
        outcomes = [outcome(path, good, state.choice(part), 1 << state.randrange(8)) for _ in range(60)]
        assert sum(isinstance(found, str) for found in outcomes) >= 5
        if checksums and part is pages:
            assert [found for found in outcomes if not isinstance(found, str) and found != pairs] == []


def outcome(path: Path, good: bytes, place: int, bit: int) -> list[Pair] | str:
    """The pairs, or what is said in their stead, when a bit is changed."""
    bad = bytearray(good)
    bad[place] ^= bit
    path.write_bytes(bad)
    try:
        return list(read_table(path, COLUMNS))
    except InputError as error:
        message = str(error)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message
