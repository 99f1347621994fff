"""Sentence pairs from translation memories: TMX, the exchange format of translators' tools and of OPUS.

    <tu><tuv xml:lang="en-GB"><seg>A <bpt i="1">&lt;b&gt;</bpt>red<ept i="1">&lt;/b&gt;</ept> house</seg></tuv> ...</tu>

Of each unit (`tu`) the segments of two languages are a pair. A language is named by its code, and `en` means `en-GB`,
too. Elements inside a segment are markup: they are left out and counted, with what is in them, except for `hi`, whose
content is text.

The file is streamed, and not trusted. A DTD is never read and no entity is ever expanded, so a file that declares
things of its own is refused, and so are elements within elements without end, and tags as long as a book.

The parser knows encodings of one byte a character, and UTF-8 and UTF-16. Those of Asian memories become UTF-8 before.
"""

import codecs
import io
import logging
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from xml.parsers import expat

from transformer.data.compression import DAMAGE, damaged, open_bytes
from transformer.data.corpus import LONGEST_LINE, Pair, cut_line
from transformer.errors import InputError

MARKUP = "inline markup"  # what is counted of a file, beside its pairs
INCOMPLETE = "units without both languages"

_BUFFER = 1 << 16
_LONGEST_TAG = 1 << 20  # bytes, of a comment, too: the parser keeps all of it
_DEEPEST = 100  # elements within one another
_MOST_LANGUAGES = 20  # that an error names, and varieties of the two that a unit may have
_NO_TEXT = ("bpt", "ept", "it", "ph", "ut")  # elements of a segment that hold codes of another format

_LONGEST_DECLARATION = 1 << 10  # bytes
_ENCODING = re.compile(rb"""(?:\xef\xbb\xbf)?<\?xml\s[^>]*?encoding\s*=\s*["']([A-Za-z][\w.-]*)["']""", re.ASCII)
_OF_THE_PARSER = ("utf-8", "utf-16", "utf-16le", "utf-16be", "iso-8859-1", "us-ascii")
# Python's name of an encoding, and the codec that reads it: with the characters that Windows writes under this name.
_RECODED = {
    **{"gb2312": "gb18030", "gbk": "gb18030", "gb18030": "gb18030"},
    **{"big5": "cp950", "cp950": "cp950", "big5hkscs": "big5hkscs"},
    **{"shift_jis": "cp932", "cp932": "cp932", "euc_jp": "euc_jp"},
    **{"euc_kr": "cp949", "cp949": "cp949", "johab": "johab"},
    "utf-8": "utf-8",  # under another of its names
}

log = logging.getLogger(__name__)


def read_tmx(path: Path, languages: tuple[str, str], left_out: Counter[str]) -> Iterator[Pair]:
    """The pairs of a TMX file. `left_out` counts elements inside segments, and units that are no pair.

    Raises InputError where the file is damaged or unsafe, or no unit has both languages.
    """
    reader = _Reader(path, languages, left_out)
    try:
        with open_bytes(path, _BUFFER) as file:
            for chunk in _pieces(file, path):
                yield from reader.feed(chunk)
            yield from reader.feed(b"", is_last=True)
    except expat.ExpatError as error:
        raise InputError(
            f"{path}:{error.lineno}: not well-formed XML ({expat.ErrorString(error.code)}): mend the file or fetch it "
            "again"
        ) from error
    except DAMAGE as error:
        raise damaged(path, reader.line, error) from error


def _pieces(file: io.BufferedReader, path: Path) -> Iterator[bytes]:
    """The bytes of a file, in an encoding that the parser knows. Raises InputError where that cannot be."""
    head = b""
    while b"?>" not in head and len(head) < _LONGEST_DECLARATION and (chunk := file.read1(_BUFFER)):
        head += chunk
    declared = _ENCODING.match(head)
    codec = None if declared is None else _codec(declared[1].decode(), path)
    if declared is None or codec is None:
        yield head
        while chunk := file.read1(_BUFFER):
            yield chunk
        return

    # What cannot be decoded becomes a character that XML does not have, so that the parser names its line.
    decoder = codecs.getincrementaldecoder(codec)("replace")
    chunk = head[: declared.start(1)] + b"UTF-8" + head[declared.end(1) :]
    while chunk:
        yield decoder.decode(chunk).replace("\ufffd", "\uffff").encode()
        chunk = file.read1(_BUFFER)
    yield decoder.decode(b"", final=True).replace("\ufffd", "\uffff").encode()


def _codec(encoding: str, path: Path) -> str | None:
    """The codec by which a file is recoded; None where the parser takes it as it is. Raises InputError."""
    if encoding.lower() in _OF_THE_PARSER:
        return None
    try:
        codec = _RECODED.get(codecs.lookup(encoding).name)
        # The parser wants a character for each byte, and those of ASCII in their places.
        is_simple = all(bytes([code]).decode(encoding) == chr(code) for code in range(128))
        if codec is None and not (is_simple and len(bytes(range(256)).decode(encoding, "replace")) == 256):
            raise LookupError
    except (LookupError, ValueError):
        raise InputError(
            f"{path}:1: the encoding {encoding!r:.40} is not read: convert the file, by iconv -f {encoding:.40} -t "
            "UTF-8, and write UTF-8 as the encoding into its first line"
        ) from None
    return codec


class _Reader:
    """Takes a file bit by bit, and gives the pairs of the units that are complete."""

    def __init__(self, path: Path, languages: tuple[str, str], left_out: Counter[str]) -> None:
        self._path = path
        self._wanted = [_normal(language) for language in languages]
        self._left_out = left_out
        self._known: dict[str, None] = {}  # languages that the file has
        self._has_pair = False
        self._has_incomplete = False  # a unit without both languages
        self._pairs: list[Pair] = []  # since the last call of `feed`
        self._fed = 0  # bytes

        # Where the parser is.
        self._open: list[str] = []  # the elements, from the root down
        self._segments: dict[str, str] = {}  # of the unit, by language
        self._language = ""  # of the segment
        self._text: list[str] | None = None  # of the segment, as far as it has been read; None: outside
        self._text_size = 0
        self._codes = 0  # elements that hold no text and are open

        self._parser = expat.ParserCreate()
        self._parser.buffer_text = True
        self._parser.StartDoctypeDeclHandler = self._begin_doctype
        self._parser.SkippedEntityHandler = self._refuse_entity
        self._parser.StartElementHandler = self._begin
        self._parser.EndElementHandler = self._end
        self._parser.CharacterDataHandler = self._add_text

    @property
    def line(self) -> int:
        """The line of the file that is read."""
        return self._parser.CurrentLineNumber

    def feed(self, chunk: bytes, *, is_last: bool = False) -> list[Pair]:
        """The pairs that end in these bytes, the next of the file. Raises InputError, and what expat does."""
        self._pairs = []
        self._parser.Parse(chunk, is_last)
        self._fed += len(chunk)
        if self._fed - self._parser.CurrentByteIndex > _LONGEST_TAG:
            raise self._error("a tag or comment without end", "fetch the file again")
        if is_last and self._has_incomplete and not self._has_pair:
            known = ", ".join(self._known) or "none"
            raise InputError(
                f"{self._path}: no unit has both {self._wanted[0]!r} and {self._wanted[1]!r}; its languages are "
                f"{known}: name two of them by src and tgt"
            )
        return self._pairs

    def _error(self, what: str, remedy: str) -> InputError:
        return InputError(f"{self._path}:{self.line}: {what}: {remedy}")

    # ---- what the parser calls ----

    def _begin_doctype(self, name: str, system: str | None, public: str | None, has_declarations: int) -> None:
        if has_declarations:
            raise self._error("it declares entities or the like, which are never expanded", "remove its DOCTYPE")

    def _refuse_entity(self, name: str, is_parameter: bool) -> None:
        raise self._error(f"the entity &{name:.40}; is not expanded", "write the character itself")

    def _begin(self, name: str, attributes: dict[str, str]) -> None:
        if not self._open and name != "tmx":
            raise self._error(f"not TMX: the root is {name!r:.40}", "name a TMX file")
        if len(self._open) == _DEEPEST:
            raise self._error(f"more than {_DEEPEST} elements within one another", "it is no translation memory")
        self._open.append(name)

        if self._text is not None:  # markup
            self._left_out[MARKUP] += 1
            self._codes += name in _NO_TEXT or self._codes > 0
        elif name == "tu":
            self._segments = {}
        elif name == "tuv":
            self._language = _normal(attributes.get("xml:lang", attributes.get("lang", "")))
            if len(self._known) < _MOST_LANGUAGES:
                self._known.setdefault(self._language[:20])
        elif name == "seg":
            self._text = []
            self._text_size = 0

    def _add_text(self, text: str) -> None:
        if self._text is not None and not self._codes and self._text_size <= LONGEST_LINE:
            self._text.append(text)
            self._text_size += len(text)

    def _end(self, name: str) -> None:
        self._open.pop()
        if self._text is not None:
            if self._codes:
                self._codes -= 1
            elif name == "seg":
                self._end_segment("".join(self._text))
                self._text = None
        elif name == "tu":
            self._end_unit()

    def _end_segment(self, text: str) -> None:
        """Keep the first segment of each language that may be asked for."""
        is_wanted = any(_is_of(self._language, wanted) for wanted in self._wanted)
        if is_wanted and len(self._segments) < _MOST_LANGUAGES:
            line = text.encode()
            if len(line) > LONGEST_LINE:
                place = f"{self._path}:{self.line}"
                log.warning("%s: longer than %d bytes: only its beginning is read", place, LONGEST_LINE)
                text = cut_line(line).decode()
            self._segments.setdefault(self._language, text.replace("\n", " "))

    def _end_unit(self) -> None:
        source, target = (_segment_in(wanted, self._segments) for wanted in self._wanted)
        self._segments = {}
        if source is None or target is None:
            self._has_incomplete = True
            self._left_out[INCOMPLETE] += 1
        else:
            self._has_pair = True
            self._pairs.append((source, target))


def _normal(language: str) -> str:
    return language.lower().replace("_", "-")


def _is_of(language: str, wanted: str) -> bool:
    """Whether a segment's language is the one that is asked for, or a variety of it."""
    return language == wanted or language.startswith(f"{wanted}-")


def _segment_in(wanted: str, segments: dict[str, str]) -> str | None:
    """The segment in this language, or else in the first variety of it."""
    if wanted in segments:
        return segments[wanted]
    return next((text for language, text in segments.items() if _is_of(language, wanted)), None)
