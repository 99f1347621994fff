"""Pairs from files: never a shifted pair, never a bare traceback, every dropped pair counted."""

import lzma
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from support.compressed import compressed
from support.paths import CORPORA, needs_corpora
from transformer.config.settings import FilterConfig
from transformer.data.corpus import (
    DUPLICATE,
    EMPTY,
    IDENTICAL,
    KEPT,
    digest_lines,
    digest_pairs,
    read_lines,
    read_pairs,
    screen_pairs,
    with_tag,
)
from transformer.errors import InputError

# What Python, Unicode or a text editor may take for the end of a line, and what else has shifted corpora before.
NO_ENDS = ["\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029", "\0", "\ufeff", "\u200b", "\u3000"]


def numbered(count: int, language: str) -> list[bytes]:
    return [f"{language} {number}".encode() for number in range(count)]


def write(path: Path, lines: list[bytes], end: bytes = b"\n") -> Path:
    content = b"".join(line + end for line in lines)
    path.write_bytes(compressed(content, path.suffix))
    return path


def number(text: str) -> str:
    return "".join(c for c in text if c.isdigit())


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_read_pairs_reads_utf16_behind_its_mark(
    suffix: str, encoding: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Beside a side in UTF-8; one line says so, though text is read twice; blocks are cut within characters."""
    caplog.set_level("INFO")
    lines = [f"ein {'ä€😀' * n} \u2028\x85 {n}" for n in range(400)]
    path = tmp_path / f"a.de{suffix}"
    path.write_bytes(compressed(("\ufeff" + "\r\n".join(lines)).encode(encoding), suffix))
    other = write(tmp_path / "a.en", numbered(400, "en"))
    for skip in (0, 390):
        pairs = list(read_pairs(path, other, skip=skip))
        assert pairs == [(line, f"en {n}") for n, line in enumerate(lines)][skip:]
    assert caplog.messages == [f"{path}: read as UTF-16, which Excel writes"]


def test_read_pairs_shifts_no_pair_whatever_strange_thing_is_in_one(tmp_path: Path) -> None:
    state = random.Random(1)
    for trial in range(100):
        sides = [numbered(20, "de"), numbered(20, "en")]
        side, line = state.randrange(2), state.randrange(20)
        words = sides[side][line].decode().split(" ")
        at = state.choice(["before", "between", "behind"])
        strange = state.choice(NO_ENDS) if at != "behind" else state.choice(NO_ENDS[1:])
        text = {
            "before": strange + " ".join(words),
            "between": strange.join(words),
            "behind": " ".join(words) + strange,
        }
        sides[side][line] = text[at].encode()
        suffix = state.choice(["", ".gz", ".bz2", ".xz", ".zst"])
        end = state.choice([b"\n", b"\r\n"])
        paths = [
            write(tmp_path / f"{trial}.{name}{suffix}", lines, end) for name, lines in zip("ab", sides, strict=True)
        ]
        pairs = list(read_pairs(*paths))
        assert [number(source) for source, _ in pairs] == [str(n) for n in range(20)]
        assert [number(target) for _, target in pairs] == [str(n) for n in range(20)]
        kept = pairs[line][side].removeprefix("\ufeff") if line == 0 else pairs[line][side]
        assert kept == (text[at].removeprefix("\ufeff") if line == 0 else text[at])


@pytest.mark.parametrize("size", [1, 16, 1 << 20])
def test_read_pairs_without_the_first_ones(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer.data.corpus._BUFFER", size)  # of less than a line, of some, or of all
    source = write(tmp_path / "a", [b"\xef\xbb\xbfeins", b"", b"", b"x" * 40, *numbered(20, "de"), b""], b"\r\n")
    target = write(tmp_path / "b.zst", [b"", b"one", b"y" * 20, b"\r", *numbered(20, "en"), b"end"])
    pairs = list(read_pairs(source, target))
    assert pairs[:4] == [("eins", ""), ("", "one"), ("", "y" * 20), ("x" * 40, "")]
    assert len(pairs) == 25
    for skip in range(26):
        assert list(read_pairs(source, target, skip=skip)) == pairs[skip:]

    longer = write(tmp_path / "c", numbered(27, "en"))
    with pytest.raises(InputError, match=r"a has 25 lines, .*c has 27: "):
        list(read_pairs(source, longer, skip=9))


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"a", ["a"]),  # no newline at the end
        (b"a\n\nb\n", ["a", "", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"a\r\r\nb\rc\n", ["a\r", "b\rc"]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", ["a", "\ufeffb"]),
        (b"\xef\xbb\xbf\xef\xbb\xbfa", ["\ufeffa"]),
        ("x\u2028y\x85z\n".encode(), ["x\u2028y\x85z"]),
        (b"\xf0\x9f\x98\x80 \n", ["\U0001f600 "]),
    ],
)
def test_read_lines_by_hand(content: bytes, expected: list[str], suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"text{suffix}"
    path.write_bytes(compressed(content, suffix))
    assert list(read_lines(path)) == expected


@pytest.mark.parametrize("difference", [-19, -1, 1, 25])
@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("size", [16, 1 << 20])
def test_read_pairs_refuses_unequal_files_with_both_counts(
    difference: int, suffix: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformer.data.corpus._BUFFER", size)  # of some lines, or all
    source = write(tmp_path / f"a{suffix}", numbered(20, "de"))
    target = write(tmp_path / f"b{suffix}", numbered(20 + difference, "en"))
    with pytest.raises(InputError) as caught:
        list(read_pairs(source, target))
    message = str(caught.value)
    assert message.startswith(f"{source} has 20 lines, {target} has {20 + difference}: ")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("bad", "byte", "value"),
    [
        (b"\xff", 4, "0xff"),
        (b"caf\xe9 \xe0 la carte", 7, "0xe9"),  # Latin-1
        (b"\xed\xa0\x80", 4, "0xed"),  # half a surrogate pair
        (b"\xc0\x80", 4, "0xc0"),  # an overlong zero
        (b"\xe2\x82", 4, "0xe2"),  # cut in the middle of a character
    ],
)
@pytest.mark.parametrize("line", [1, 3, 20])
def test_read_lines_names_what_is_not_utf8_by_line_and_byte(
    bad: bytes, byte: int, value: str, line: int, tmp_path: Path
) -> None:
    lines = numbered(20, "de")
    lines[line - 1] = b"abc" + bad
    path = write(tmp_path / "a", lines)
    with pytest.raises(InputError) as caught:
        list(read_pairs(path, write(tmp_path / "b", numbered(20, "en"))))
    assert str(caught.value).startswith(f"{path}:{line}: not UTF-8: byte {byte} of the line is {value}: ")


@pytest.mark.parametrize("size", [1, 2, 7, 64])
@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".xz", ".zst"])
def test_read_lines_gives_the_same_however_they_lie_in_blocks(
    size: int, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Characters, CRLF and lines across blocks, and the line number of what is wrong in a later one."""
    monkeypatch.setattr("transformer.data.corpus._BUFFER", size)
    lines = ["", "\ufeffé", "😀" * 20, "a\rb", "", "", "日本\u2028語 \x85", "x" * 200, "end"]
    path = write(tmp_path / f"a{suffix}", [line.encode() for line in lines], b"\r\n")
    assert list(read_lines(path)) == lines
    write(path, [*(line.encode() for line in lines), b"ok \xe9", b"behind"])
    with pytest.raises(InputError, match=r":10: not UTF-8: byte 4 of the line is 0xe9"):
        list(read_lines(path))


def lines_or_message(path: Path) -> list[str] | str:
    try:
        return list(read_lines(path))
    except InputError as error:
        return str(error)


def test_read_lines_takes_frames_of_zstd_end_to_end(tmp_path: Path) -> None:
    """As the zstd program writes them, and pzstd, which puts a frame to be skipped before each."""
    frame = bytes.fromhex("28b52ffd046851000065696e730a7a7765690ae1de44fc")
    skipped = bytes.fromhex("502a4d18040000000f000000")
    path = tmp_path / "a.zst"
    path.write_bytes(frame + skipped + frame)
    assert list(read_lines(path)) == ["eins", "zwei"] * 2


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
def test_read_lines_takes_compressed_files_end_to_end(suffix: str, tmp_path: Path) -> None:
    """As parallel compressors write them; of each part the end is checked, and what follows is none of it."""
    parts = [compressed(b"eins\nzw", suffix), compressed(b"", suffix), compressed(b"ei\ndrei", suffix)]
    path = tmp_path / f"a{suffix}"
    path.write_bytes(b"".join(parts))
    assert list(read_lines(path)) == ["eins", "zwei", "drei"]

    damaged = bytearray(parts[2])
    damaged[1] ^= 1  # of its magic number
    for behind in (b"x" * 40, bytes(damaged), parts[2][:-3]):
        path.write_bytes(parts[0] + behind)
        with pytest.raises(InputError, match=rf"a\{suffix}:\d: damaged \{suffix} file"):
            list(read_lines(path))


def test_read_lines_takes_xz_with_zeros_between_streams(tmp_path: Path) -> None:
    part, path = compressed(b"eins\n", ".xz"), tmp_path / "a.xz"
    path.write_bytes(part + bytes(4) + part + bytes(1 << 14) + part + bytes(8))
    assert list(read_lines(path)) == ["eins"] * 3


def test_read_lines_refuses_xz_that_asks_for_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.xz"
    path.write_bytes(lzma.compress(b"eins\n", filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 29, "mode": 1}]))
    with pytest.raises(InputError, match=r"a\.xz:1: damaged \.xz file \(Memory usage limit exceeded\): fetch or"):
        list(read_lines(path))


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_read_lines_refuses_every_cut_or_damaged_compressed_file(suffix: str, tmp_path: Path) -> None:
    """Cut to nothing, too."""
    state, path = random.Random(2), tmp_path / f"a{suffix}"
    good = compressed(b"\n".join(numbered(500, "de")), suffix)
    whole = [line.decode() for line in numbered(500, "de")]
    for size in [*range(30), *state.sample(range(30, len(good)), 30)]:
        path.write_bytes(good[:size])
        with pytest.raises(InputError, match=rf"a\{suffix}:\d+: damaged \{suffix} file"):
            list(read_lines(path))
    for _ in range(100):
        bad = bytearray(good)
        bad[state.randrange(len(bad))] ^= 1 << state.randrange(8)
        path.write_bytes(bad)
        outcome = lines_or_message(path)  # headers hold what means nothing: there a changed bit is no damage
        assert outcome == whole or str(outcome).startswith(f"{path}:")
    path.write_bytes(b"plain text\n")
    with pytest.raises(InputError, match=rf"a\{suffix}:1: damaged \{suffix} file"):
        list(read_lines(path))


def test_read_lines_names_what_cannot_be_opened(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path, tmp_path / "missing.gz", tmp_path / "missing.zst"):
        with pytest.raises(InputError) as caught:
            list(read_lines(path))
        assert str(caught.value).startswith(f"{path}: cannot be read (")


def test_read_lines_is_the_same_under_any_locale(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("Käse\u2028€\n".encode())
    code = (
        "import sys, pathlib; from transformer.data.corpus import read_lines\n"
        "print(ascii(list(read_lines(pathlib.Path(sys.argv[1])))))"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    result = subprocess.run([sys.executable, "-c", code, str(path)], env=environment, capture_output=True, check=True)
    assert result.stdout.strip() == rb"['K\xe4se\u2028\u20ac']"


def test_read_lines_streams() -> None:
    """A pipe that never ends can be read from: nothing waits for the end of the file."""
    reader, writer = os.pipe()
    os.write(writer, b"one\ntwo\n" + b"x" * (1 << 10) + b"\n")
    os.close(writer)
    lines: Iterator[str] = read_lines(Path(f"/proc/self/fd/{reader}"))
    assert next(lines) == "one"
    os.close(reader)


PAIRS = [
    ("a", "b"),
    ("", "b"),
    (" \t", "b"),
    ("a", "\u3000\xa0"),
    ("x", "x "),
    ("a", "b"),
    (" a", "b"),
    ("b", "a"),
    ("", ""),
]


@pytest.mark.parametrize("blank", ["", " ", "\t", "\u3000", "\u200b", "\x07", "\u2028", "\ufeff\u200e"])
def test_with_tag_leaves_a_blank_source_as_it_is(blank: str) -> None:
    assert with_tag(blank, "<bt>") == blank
    assert with_tag(blank, None) == blank


@pytest.mark.parametrize("source", ["a", " a ", ".", "<bt> a", "\u200ba"])
def test_with_tag_puts_a_tag_and_a_space_in_front(source: str) -> None:
    assert with_tag(source, "<bt>") == "<bt> " + source
    assert with_tag(source, None) == source


@pytest.mark.parametrize(
    ("identical", "duplicates", "dropped"),
    [
        (False, False, {}),
        (True, False, {4: IDENTICAL}),
        (False, True, {5: DUPLICATE, 6: DUPLICATE}),
        (True, True, {4: IDENTICAL, 5: DUPLICATE, 6: DUPLICATE}),
    ],
)
@pytest.mark.parametrize("border", [0, 1, 5, 6, 9])
def test_screen_pairs_judges_pairs_whole(
    identical: bool, duplicates: bool, dropped: dict[int, int], border: int
) -> None:
    """Wherever a second corpus begins, what came in the first is a duplicate in the second."""
    config = FilterConfig(drop_identical=identical, drop_duplicates=duplicates)
    expected = bytes(EMPTY if n in (1, 2, 3, 8) else dropped.get(n, KEPT) for n in range(9))
    assert screen_pairs([PAIRS[:border], PAIRS[border:]], config) == [expected[:border], expected[border:]]


def test_screen_pairs_keeps_the_first_of_many_duplicates() -> None:
    config = FilterConfig(drop_duplicates=True)
    pairs = [("x", str(n % 7)) for n in range(700)]
    assert screen_pairs([pairs[:500], pairs[500:]], config) == [
        bytes([KEPT] * 7 + [DUPLICATE] * 493),
        bytes([DUPLICATE] * 200),
    ]
    sides = [("ab", "c"), ("a", "bc"), ("a b", "c"), ("c", "ab")]  # the same letters, other pairs
    assert screen_pairs([sides], config) == [bytes([KEPT] * 4)]


@needs_corpora
@pytest.mark.parametrize(
    ("source", "target", "count"),
    [
        ("multi30k/val.en", "multi30k/val.de", 1_014),
        ("newstest2013/newstest2013.en", "newstest2013/newstest2013.de", 3_000),
        ("kftt/dev.ja.gz", "kftt/dev.en.gz", 1_166),
    ],
)
def test_read_pairs_of_real_corpora_has_their_published_sizes(source: str, target: str, count: int) -> None:
    assert sum(1 for _ in read_pairs(CORPORA / source, CORPORA / target)) == count


# ---- digests --------------------------------------------------------------------------------------------------------


def test_digest_pairs_is_that_of_two_text_files(tmp_path: Path) -> None:
    one, other = (
        write(tmp_path / "a", [b"a b", b"", b"\xc3\xa4 \xef\xbb\xbf."]),
        write(tmp_path / "b", [b"x", b"y", b"\r z"]),
    )
    assert digest_pairs(read_pairs(one, other)) == [sha256(path.read_bytes()).hexdigest() for path in (one, other)]
    assert digest_pairs([]) == [sha256(b"").hexdigest()] * 2


@pytest.mark.parametrize(
    ("content", "is_of_lines"),
    [
        *((b"", True), (b"a\nb\n", True), (b"a\rb\n\n", True), (b"a \xef\xbb\xbf\n", True)),
        *((b"a\nb", False), (b"a\nb\r", False), (b"a\nb\r\n", False), (b"\xef\xbb\xbfa\nb\n", False)),
        *((b"a\n\xef\xbb\xbfb\n", False), (b"a\n" + b"b" * (1 << 18) + b"\n", True)),
        (b"a\n" + b"b" * (1 << 18) + b"c\n", False),
        *(("\ufeffa\nb\n".encode("utf-16-be"), False), ("\ufeffa\n\u0a41".encode("utf-16-le"), False)),
        *((b"a\n" * ((1 << 17) - 1) + between, False) for between in (b"b\r\n", b"\n\n\xef\xbb\xbf\n")),  # two blocks
    ],
)
def test_digest_lines_says_whether_a_file_has_the_digest_of_its_lines(
    content: bytes, is_of_lines: bool, tmp_path: Path
) -> None:
    path = tmp_path / "a"
    path.write_bytes(content)
    digest, is_found = digest_lines(path)
    assert (digest.size, digest.sha256) == (len(content), sha256(content).hexdigest())
    assert is_found == is_of_lines
    assert is_of_lines == (digest_pairs((line, "") for line in read_lines(path))[0] == digest.sha256)


@pytest.mark.parametrize("text", ["a\r", "\ufeffa", "a" * 300_000])
def test_digest_pairs_of_a_line_that_no_text_file_gives_back_is_that_of_none(text: str, tmp_path: Path) -> None:
    """A table can have such lines: a file of the same bytes is read as others."""
    path = write(tmp_path / "a", [text.encode()])
    assert list(read_lines(path)) != [text]
    assert digest_pairs([(text, "b")])[0] != sha256(path.read_bytes()).hexdigest()
