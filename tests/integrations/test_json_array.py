"""Pairs from a JSON array: streamed, in one line or many, and refused with the line of what is wrong."""

import json
import random
from pathlib import Path

import pytest

from support.compressed import compressed
from transformer.data.corpus import Pair
from transformer.data.table import read_table
from transformer.errors import InputError
from transformer.integrations import json_array

COLUMNS = ("en", "de")


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(compressed(content, path.suffix))
    return path


@pytest.mark.parametrize("chunk", [1, 7, 1 << 16])
@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("indent", [None, 1])
def test_read_json_gives_back_what_python_wrote(
    indent: int | None, encoding: str, suffix: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever what is read at a time is cut."""
    monkeypatch.setattr(json_array, "_CHUNK", chunk)
    draw = random.Random(3)
    pairs = [("".join(draw.choices('ab "\\\\[]{},:\u2028😀é', k=draw.randrange(30))), str(n)) for n in range(40)]
    rows = [{"translation": {"en": source, "de": target}, "n": 1.5} for source, target in pairs]
    text = json.dumps(rows, indent=indent, ensure_ascii=draw.random() < 0.5)
    assert list(read_table(write(tmp_path / f"a{suffix}", text.encode(encoding)), COLUMNS)) == pairs


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[]", []),
        (" [ ]\n", []),
        ('\ufeff[{"en": "a\\nb", "de": null}]', [("a b", "")]),
        ('{"en": "a", "de": "b"}\n\n{"en": "c", "de": "d"}\n', [("a", "b"), ("", ""), ("c", "d")]),
    ],
)
def test_read_json_by_hand(content: str, expected: list[Pair], tmp_path: Path) -> None:
    assert list(read_table(write(tmp_path / "a.json", content.encode()), COLUMNS)) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", ":1: not valid JSON (it ends within the array): write one array of objects"),
        ('"a"', ":1: not valid JSON ('\"' in the place of '[')"),
        ('[\n{"en": "a", "de": "b"}', ":2: not valid JSON (it ends within the array)"),
        ('[{"en": "a", "de": "b"},\n]', ":2: not valid JSON (Expecting value)"),
        ('[{"en": "a", "de": "b"}\n\n{"en": "a", "de": "b"}]', ":3: not valid JSON ('{' in the place of ',')"),
        ('[{"en": "a",\n"de" "b"}]', ":2: not valid JSON (Expecting ':' delimiter)"),
        ('[{"en": "a",\n"de": "b}]', ":2: not valid JSON (Unterminated string starting at)"),
        ("[\n1]", ":2: row 1: expected an object"),
        ('[{"en": "a",\n"de": "b"},\n{"en": "a",\n"de": 7}]', ":3: row 2: column 'de' holds 7, not text"),
        ('[{"en": "a"}]', ":1: row 1: no column 'de', only 'en': name columns that it has"),
        ("[] x", ":1: not valid JSON (more text behind the array)"),
        ("[" * 100_000, ":1: not valid JSON ("),
        (f'[{{"en": {"9" * 5_000}, "de": "b"}}]', ":1: not valid JSON ("),
        (f'[{{"en": "{"a" * 600_000}", "de": "b"}}]', ":1: a row of more than 262144 bytes"),
        (b'[{"en": "\xe9", "de": "b"}]', ":1: not UTF-8 here, or soon"),
    ],
)
def test_read_json_names_the_line_of_what_is_wrong(content: str | bytes, message: str, tmp_path: Path) -> None:
    data = content if isinstance(content, bytes) else content.encode()
    path = write(tmp_path / "a.json", data)
    with pytest.raises(InputError) as caught:
        list(read_table(path, COLUMNS))
    assert str(caught.value).startswith(f"{path}{message}")
    assert "\n" not in str(caught.value)


def test_read_json_refuses_a_cut_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json.gz"
    path.write_bytes(compressed(json.dumps([{"en": "a", "de": "b"}] * 9).encode(), ".gz")[:-3])
    with pytest.raises(InputError, match=r"a\.json\.gz:1: damaged \.gz file \("):
        list(read_table(path, COLUMNS))
