"""Sentence pairs from a table: two columns of a .tsv, .jsonl or .parquet file.

TSV has no quoting: a tab ends a column, a newline a row, and a quotation mark is text. Its columns are numbers, from 1,
or names of its first row. Elsewhere a column may also be a key of the column `translation`, as the WMT sets of the hub
have it. A missing value is an empty text; a newline within a text becomes a space, since a sentence is a line.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from transformer.data.corpus import Pair, read_lines
from transformer.errors import InputError

BLOCK = 10_000  # rows in memory at a time
NESTED = "translation"
KINDS = r"\.(tsv|jsonl)(?:\.gz)?$|\.(?:parquet)$"

Columns = tuple[str, str]

_SURROGATE = re.compile("[\ud800-\udfff]")


def is_table(name: str) -> bool:
    """Whether a file is a table, by its name."""
    return re.search(KINDS, name) is not None


def read_table(path: Path, columns: Columns) -> Iterator[Pair]:
    """The pairs of a table. Raises InputError where it cannot be read, or a row has no such columns."""
    kind = re.search(KINDS, path.name)
    match kind and kind[1]:
        case "tsv":
            return read_tsv(path, columns)
        case "jsonl":
            return read_json_lines(path, columns)
        case _:
            return read_parquet(path, columns)


def default_columns(path: Path, languages: Columns) -> Columns:
    """The columns to read where none are named: those of the languages, or the first two of TSV without such names."""
    if not path.name.endswith((".tsv", ".tsv.gz")):
        return languages
    with closing(read_lines(path)) as lines:
        return languages if set(languages) <= set(next(lines, "").split("\t")) else ("1", "2")


def read_tsv(path: Path, columns: Columns) -> Iterator[Pair]:
    """Rows split at tabs; `columns` are numbers from 1, or names that the first row gives."""
    rows = enumerate(read_lines(path), start=1)

    # Find out which cells of a row are wanted.
    if all(column.isdecimal() and int(column) > 0 for column in columns):
        source, target = (int(column) - 1 for column in columns)
    else:
        header = next(rows, (1, ""))[1].split("\t")
        missing = [column for column in columns if column not in header]
        if missing:
            raise InputError(
                f"{path}:1: no column {missing[0]!r} in the first row, which has {', '.join(header)!r:.200}: "
                "name columns that it has, or number them from 1"
            )
        source, target = (header.index(column) for column in columns)

    needed = max(source, target) + 1
    for number, line in rows:
        cells = line.split("\t")
        if len(cells) >= needed:
            yield cells[source], cells[target]
        elif line.strip():
            raise InputError(f"{path}:{number}: {len(cells)} columns, not {needed}: one tab must part them")
        else:
            yield "", ""


def read_json_lines(path: Path, columns: Columns) -> Iterator[Pair]:
    """One JSON object a line."""
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            yield "", ""
            continue

        place = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{place}: not valid JSON ({error}): each line must be one JSON object") from None
        if not isinstance(row, dict):
            raise InputError(f"{place}: expected one JSON object per line")
        yield _text(row, columns[0], place), _text(row, columns[1], place)


def read_parquet(path: Path, columns: Columns) -> Iterator[Pair]:
    """The rows of a Parquet file, block by block."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            names = file.schema_arrow.empty_table().flatten().column_names
            read = 0
            for batch in file.iter_batches(BLOCK, columns=_places(columns, names, str(path))):
                yield from pairs_of(pyarrow.Table.from_batches([batch]), columns, str(path), before=read)
                read += len(batch)
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{path}: cannot be read as Parquet ({reason}): check the path or fetch it again") from error


def pairs_of(table: Any, columns: Columns, place: str, *, before: int) -> Iterator[Pair]:
    """The pairs of a pyarrow.Table, column by column: made row by row, they take four times as long.

    `before` rows of `place` came earlier. Raises InputError for a column that is not there, or holds no text.
    """
    table = table.flatten()
    sides = []
    for name in _places(columns, table.column_names, place):
        values = table[name].to_pylist()
        for row, text in enumerate(values, before + 1):
            if not isinstance(text, str | None):
                raise InputError(
                    f"{place}: row {row}: column {name!r} holds {text!r:.40}, not text: choose a text column"
                )
        sides.append(["" if text is None else text.replace("\n", " ") for text in values])
    return zip(*sides, strict=True)


def _places(columns: Columns, names: list[str], place: str) -> list[str]:
    """The columns' names in a table that is flat; a language may be one of a translation."""
    flat_names = [column if column in names else f"{NESTED}.{column}" for column in columns]
    missing = [column for column, name in zip(columns, flat_names, strict=True) if name not in names]
    if missing:
        raise InputError(f"{place}: no column {missing[0]!r}, but {', '.join(names)!r:.200}: name two that it has")
    return flat_names


def _text(row: Mapping[str, Any], column: str, place: str) -> str:
    """The text of a column, which may be a key of the column `translation`."""
    table = row
    if column not in row and NESTED in row:
        nested = row[NESTED]
        if nested is None:
            return ""
        if isinstance(nested, Mapping):
            table = nested

    if column not in table:
        names = ", ".join(map(str, table))
        raise InputError(f"{place}: no column {column!r}, but {names!r:.200}: name two that it has")
    text = table[column]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise InputError(f"{place}: column {column!r} holds {text!r:.40}, not text: choose a text column")
    return _SURROGATE.sub("\ufffd", text).replace(
        "\n", " "
    )  # JSON can spell half a surrogate pair, which is no character
