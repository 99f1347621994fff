"""Sentence pairs from a JSON array of objects, `[{"en": ..., "de": ...}, ...]`, in one line or in many.

The file is streamed: an object at a time is in memory. A file that begins with an object has one a line.
"""

import io
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformer.data.compression import DAMAGE, damaged
from transformer.data.corpus import Pair, open_text
from transformer.data.table import Columns, check_whole, read_json_lines, text_of
from transformer.errors import InputError

_CHUNK = 1 << 16  # characters that are read at a time
_LONGEST_ESCAPE = len(r"\ud83d\ude00")
_SPACE = re.compile(r"[ \t\r\n]*")


def read_json(path: Path, columns: Columns, left_out: Counter[str]) -> Iterator[Pair]:
    """An array of JSON objects, which is streamed; what begins with an object is read as one a line."""
    text = _JsonText(path)
    try:
        with open_text(path) as file:
            text.file = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
            if text.next_character() == "{":
                yield from read_json_lines(path, columns, left_out)
                return
            for number, row in enumerate(text.elements(), start=1):
                place = f"{path}:{text.line}: row {number}"
                if not isinstance(row, dict):
                    raise InputError(f"{place}: expected an object: the array must have one for each pair")
                yield text_of(row, columns[0], place), text_of(row, columns[1], place)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}:{text.line}: not UTF-8 here, or soon after ({error.reason}): convert the file"
        ) from error
    except DAMAGE as error:
        raise damaged(path, text.line, error) from error


class _JsonText:
    """The text of a file of JSON, read as far as its parsing has come."""

    def __init__(self, path: Path) -> None:
        self.file: io.TextIOBase
        self.line = 1  # where the last element began, or what comes next
        self._path = path
        self._text = ""
        self._at = 0  # what of the text has been parsed
        self._newlines = 0  # within the last element
        self._decoder = json.JSONDecoder()

    def elements(self) -> Iterator[Any]:
        """The elements of the array. Raises InputError where it is none."""
        expected = "["
        while (found := self.next_character()) == expected:
            self._at += 1
            if not (expected == "[" and self.next_character() == "]"):
                yield self._element()
            expected = ","
        if found != "]" or expected == "[":
            raise self._error(f"{found!r} in the place of {expected!r}" if found else "it ends within the array")
        self._at += 1
        if self.next_character():
            raise self._error("more text behind the array")

    def next_character(self) -> str:
        """The next one that is no space; empty at the end."""
        self.line += self._newlines
        self._newlines = 0
        while True:
            space = _SPACE.match(self._text, self._at)
            assert space is not None
            self.line += space[0].count("\n")
            self._at = space.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read():
                return ""

    def _element(self) -> Any:
        self.next_character()
        while True:
            try:
                element, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                is_perhaps_cut = error.pos > len(self._text) - _LONGEST_ESCAPE or error.msg.startswith("Unterminated")
                if is_perhaps_cut:
                    check_whole(self._text[self._at :], f"{self._path}:{self.line}")
                if not (is_perhaps_cut and self._read()):
                    self.line += self._text.count("\n", self._at, error.pos)
                    raise self._error(error.msg) from None
            except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
                raise self._error(str(error)) from None
            else:
                self._newlines = self._text.count("\n", self._at, end)
                self._at = end
                return element

    def _read(self) -> bool:
        """Read on; False at the end."""
        chunk = self.file.read(_CHUNK)
        self._text = self._text[self._at :] + chunk
        self._at = 0
        return bool(chunk)

    def _error(self, what: str) -> InputError:
        return InputError(f"{self._path}:{self.line}: not valid JSON ({what}): write one array of objects")
