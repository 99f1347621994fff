"""Sentence pairs from a table: two columns of a .tsv, .csv, .jsonl or .parquet file, or of another format of `plugins`.

TSV has no quoting: a tab ends a column, a newline a row, and a quotation mark is text. CSV has: a cell in quotation
marks may hold what separates columns and rows, and a quotation mark as two. Their columns are numbers, from 1, or names
of the first row. In the other kinds a column is a name. It may also be a key of the column `translation`, as the WMT
sets of the hub are laid out: {"translation": {"de": ..., "en": ...}}.

A missing value is an empty text; a newline within a text becomes a space, since a sentence is a line.
"""

import csv
import json
import re
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from itertools import chain, islice
from pathlib import Path
from typing import Any

from transformer import registry
from transformer.data.compression import plain_name
from transformer.data.corpus import LONGEST_LINE, Pair, read_lines
from transformer.errors import InputError, in_a_line
from transformer.plugins import Format

BLOCK = 10_000  # rows in memory at a time
NESTED = "translation"

*_OTHERS, _LAST = [f".{name}" for name in registry.OWN["format"]]
TABLES = f"a {', '.join(_OTHERS)} or {_LAST}"  # file, for people

Columns = tuple[str, str]  # of the source and of the target

_SAMPLE = 100  # lines that tell what separates the columns of CSV
_SURROGATE = re.compile("[\ud800-\udfff]")


def format_of(name: str) -> str:
    """What the format of a table is called, by the file's name: `tmx` of `memory.tmx.gz`. Empty: it is no table."""
    plain = plain_name(name)
    _, dot, ending = plain.rpartition(".")
    is_table = dot and registry.is_known("format", ending) and (ending != "parquet" or plain == name)
    return ending if is_table else ""  # Parquet is compressed inside


def read_table(path: Path, columns: Columns, left_out: Counter[str] | None = None) -> Iterator[Pair]:
    """The pairs of a table; `left_out` counts what else it has, by kind.

    Raises InputError where it cannot be read, or a row has no such columns.
    """
    read: Format = registry.find("format", format_of(path.name))
    return read(path, columns, Counter() if left_out is None else left_out)


def default_columns(path: Path, languages: Columns) -> Columns:
    """The columns to read where none are named: those of the languages, or the first two where no row names these."""
    rows_of = {"tsv": _tsv_rows, "csv": _csv_rows}.get(format_of(path.name))
    if rows_of is None:
        return languages

    with closing(rows_of(path)) as rows:
        _, header = next(rows, (1, [""]))
    return languages if set(languages) <= set(header) else ("1", "2")


def check_whole(row: str, place: str) -> None:
    """Raise InputError for a row whose end was not read."""
    if len(row.encode()) > LONGEST_LINE - 4:
        raise InputError(f"{place}: a row of more than {LONGEST_LINE} bytes: leave out columns that hold no sentences")


# ---- TSV and CSV ----------------------------------------------------------------------------------------------------

Rows = Generator[tuple[int, list[str]], None, None]  # cells, and the line where a row begins


def read_tsv(path: Path, columns: Columns, left_out: Counter[str]) -> Iterator[Pair]:
    """Rows split at tabs; `columns` are numbers from 1, or names that the first row gives."""
    return _pairs_of_cells(_tsv_rows(path), columns, path, remedy="separate columns by one tab")


def read_csv(path: Path, columns: Columns, left_out: Counter[str]) -> Iterator[Pair]:
    """Rows as spreadsheets write them; `columns` are numbers from 1, or names that the first row gives."""
    remedy = "put a cell that has what separates columns between quotation marks"
    return _pairs_of_cells(_in_step(_csv_rows(path), path, remedy), columns, path, remedy=remedy)


def _tsv_rows(path: Path) -> Rows:
    for number, line in enumerate(read_lines(path), start=1):
        yield number, line.split("\t")


def _csv_rows(path: Path) -> Rows:
    """Rows of CSV. Raises InputError for quotation marks that are none."""
    with closing(read_lines(path)) as lines:
        head = list(islice(lines, _SAMPLE))
        first = re.fullmatch('sep=([^"\r])', head[0]) if head else None  # which Excel reads, and writes
        delimiter = _delimiter(head) if first is None else first[1]
        reader = csv.reader((f"{line}\n" for line in chain(head, lines)), delimiter=delimiter, strict=True)
        number = 1
        try:
            for cells in reader:
                if first is None or number > 1:
                    yield number, [cell.replace("\n", " ") for cell in cells]
                number = reader.line_num + 1
        except csv.Error as error:
            raise InputError(
                f"{path}:{number}: not valid CSV ({error}): inside a quoted cell, write each quotation mark twice"
            ) from None


def _delimiter(lines: list[str]) -> str:
    """What separates columns: what makes as many of every row, or else what the first line has most of."""
    for delimiter in "\t;,":
        reader = csv.reader((f"{line}\n" for line in lines), delimiter=delimiter, strict=True)
        widths = set[int]()
        try:
            widths.update(len(cells) for cells in reader if any(map(str.strip, cells)))
        except csv.Error:
            if reader.line_num < len(lines):  # else the last row goes on behind these lines
                continue
        if len(widths) == 1 and widths != {1}:
            return delimiter
    return max(",;\t", key=lines[0].count) if lines else ","


def _in_step(rows: Rows, path: Path, remedy: str) -> Rows:
    """The same rows. Raises InputError for a row with more cells than the first: it was split in a wrong place.

    Empty cells at the end of a row are none.
    """
    width = 0
    for number, cells in rows:
        width = width or len(cells)
        if any(map(str.strip, cells[width:])):
            raise InputError(f"{path}:{number}: {len(cells)} columns, where the first row has {width}: {remedy}")
        yield number, cells


def _pairs_of_cells(rows: Rows, columns: Columns, path: Path, *, remedy: str) -> Iterator[Pair]:
    """Two cells of each row; `columns` are numbers from 1, or names that the first row gives."""
    if all(column.isdecimal() and len(column) < 10 and int(column) > 0 for column in columns):  # no row has 10**9
        source, target = (int(column) - 1 for column in columns)
    else:
        _, header = next(rows, (1, [""]))
        source, target = _find_in_header(columns, header, path)

    needed = max(source, target) + 1
    for number, cells in rows:
        if len(cells) >= needed:
            yield cells[source], cells[target]
        elif not any(map(str.strip, cells)):
            yield "", ""
        else:
            check_whole("\t".join(cells), f"{path}:{number}")
            raise InputError(f"{path}:{number}: {len(cells)} columns, not {needed}: {remedy}")


def _find_in_header(columns: Columns, header: list[str], path: Path) -> tuple[int, int]:
    """Where the named columns stand in a row, counted from 0."""
    missing = [column for column in columns if column not in header]
    if missing:
        raise InputError(
            f"{path}:1: no column {missing[0]!r:.100} in the first row, which has {', '.join(header)!r:.200}: "
            "name columns that it has, or number them from 1"
        )
    return header.index(columns[0]), header.index(columns[1])


# ---- JSON lines -----------------------------------------------------------------------------------------------------


def read_json_lines(path: Path, columns: Columns, left_out: Counter[str]) -> Iterator[Pair]:
    """One JSON object a line."""
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            yield "", ""
            continue

        place = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            check_whole(line, place)
            raise InputError(f"{place}: not valid JSON ({error}): each line must be one JSON object") from None
        if not isinstance(row, dict):
            raise InputError(f"{place}: expected one JSON object per line")
        yield text_of(row, columns[0], place), text_of(row, columns[1], place)


def text_of(row: Mapping[str, Any], column: str, place: str) -> str:
    """The text of a column, which may be a key of the column `translation`."""
    holder = row
    if column not in row and NESTED in row:
        translation = row[NESTED]
        if translation is None:
            return ""
        if isinstance(translation, Mapping):
            holder = translation

    if column not in holder:
        raise _missing(column, map(str, holder), place)
    text = holder[column]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise InputError(f"{place}: column {column!r} holds {text!r:.40}, not text: choose a text column")

    text = _SURROGATE.sub("\ufffd", text)  # JSON can spell half a surrogate pair, which is no character
    return text.replace("\n", " ")


# ---- Parquet, and the tables of the hub -----------------------------------------------------------------------------


def read_parquet(path: Path, columns: Columns, left_out: Counter[str]) -> Iterator[Pair]:
    """The rows of a Parquet file, block by block."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            known_names = file.schema_arrow.empty_table().flatten().column_names
            names = _flat_names(columns, known_names, str(path))
            rows_read = 0
            for batch in file.iter_batches(BLOCK, columns=names):
                yield from pairs_of(pyarrow.Table.from_batches([batch]), columns, str(path), before=rows_read)
                rows_read += len(batch)
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        raise InputError(
            f"{path}: cannot be read as Parquet ({in_a_line(error)}): check the path or fetch it again"
        ) from error


def pairs_of(table: Any, columns: Columns, place: str, *, before: int) -> Iterator[Pair]:
    """The pairs of a pyarrow.Table, column by column: made row by row, they take four times as long.

    `before` rows of `place` came earlier. Raises InputError for a column that is not there, or holds no text.
    """
    table = table.flatten()
    sides = []
    for name in _flat_names(columns, table.column_names, place):
        try:
            texts = table[name].to_pylist()
        except UnicodeDecodeError as error:
            raise InputError(f"{place}: after row {before}: column {name!r} is not UTF-8 ({error})") from None
        for row, text in enumerate(texts, before + 1):
            if not isinstance(text, str | None):
                raise InputError(
                    f"{place}: row {row}: column {name!r} holds {text!r:.40}, not text: choose a text column"
                )
        sides.append(["" if text is None else text.replace("\n", " ") for text in texts])
    return zip(*sides, strict=True)


def _flat_names(columns: Columns, known_names: list[str], place: str) -> list[str]:
    """The columns' names in a flattened table, where the key `de` of `translation` is the column `translation.de`."""
    names = [column if column in known_names else f"{NESTED}.{column}" for column in columns]
    for column, name in zip(columns, names, strict=True):
        if name not in known_names:
            raise _missing(column, known_names, place)
        if known_names.count(name) > 1:
            raise InputError(f"{place}: two columns have the name {name!r}: give one of them another name")
    return names


def _missing(column: str, known_names: Iterable[str], place: str) -> InputError:
    return InputError(f"{place}: no column {column!r}, only {', '.join(known_names)!r:.200}: name columns that it has")
