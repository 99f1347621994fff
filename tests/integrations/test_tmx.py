"""Translation memories: pairs by language, markup left out and counted, and nothing that a file could do to us."""

import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from support.compressed import compressed
from transformer.data.source import Source
from transformer.data.table import read_table
from transformer.errors import InputError
from transformer.integrations import tmx
from transformer.integrations.tmx import INCOMPLETE, read_tmx

HEAD = '<?xml version="1.0" encoding="UTF-8"?>\n<!DOCTYPE tmx SYSTEM "tmx14.dtd">\n<tmx version="1.4">\n'


def unit(*segments: tuple[str, str]) -> str:
    inner = "".join(f'<tuv xml:lang="{language}"><note>n</note><seg>{text}</seg></tuv>' for language, text in segments)
    return f'<tu tuid="1"><prop type="x">p</prop>{inner}</tu>\n'


def document(*units: str) -> str:
    return f"{HEAD}<header srclang='en'><note>not text</note></header>\n<body>\n{''.join(units)}</body>\n</tmx>\n"


def write(folder: Path, text: str | bytes, name: str = "a.tmx") -> Path:
    path = folder / name
    path.write_bytes(compressed(text.encode() if isinstance(text, str) else text, path.suffix))
    return path


def read(path: Path, languages: tuple[str, str] = ("en", "de")) -> tuple[list[tuple[str, str]], dict[str, int]]:
    left_out = Counter[str]()
    return list(read_tmx(path, languages, left_out)), dict(left_out)


@pytest.mark.parametrize(
    ("segment", "text", "markup"),
    [
        ("a &lt;b&gt; &amp; &#252; c", "a <b> & ü c", 0),
        ('A <bpt i="1">&lt;b&gt;</bpt>red<ept i="1">&lt;/b&gt;</ept> house', "A red house", 2),
        ("<hi>all <hi>of</hi> it</hi> <ph/>is text", "all of it is text", 3),
        ('a<ph x="1">{0}<sub>in <hi>it</hi></sub>!</ph>b<it pos="begin">&lt;i></it><ut>{</ut>', "ab", 5),
        ("<![CDATA[1 < 2 &amp; 3]]><!-- no --><?no?> end", "1 < 2 &amp; 3 end", 0),
        ("one\ntwo\r\nthree\u2028four", "one two three\u2028four", 0),
        ("", "", 0),
    ],
)
def test_read_tmx_leaves_markup_out_and_counts_it(segment: str, text: str, markup: int, tmp_path: Path) -> None:
    path = write(tmp_path, document(unit(("en", segment), ("de", "x"))))
    assert read(path) == ([(text, "x")], {tmx.MARKUP: markup} if markup else {})


@pytest.mark.parametrize(
    ("languages", "pairs", "incomplete"),
    [
        (("en", "de"), [("one", "eins"), ("colour", "Farbe"), ("two", "zwei")], 1),
        (("de", "en"), [("eins", "one"), ("Farbe", "colour"), ("zwei", "two")], 1),
        (("en-us", "de"), [("color", "Farbe")], 3),
        (("EN_gb", "fr"), [("colour", "couleur")], 3),
        (("fr", "de"), [("couleur", "Farbe"), ("trois", "drei")], 2),
    ],
)
def test_read_tmx_knows_a_language_by_its_code(
    languages: tuple[str, str], pairs: list[tuple[str, str]], incomplete: int, tmp_path: Path
) -> None:
    units = [
        unit(("en", "one"), ("de", "eins"), ("de", "ein")),
        unit(("fr-CA", "couleur"), ("en-GB", "colour"), ("DE-at", "Farbe"), ("en-US", "color")),
        unit(("en", "two"), ("de", "zwei"), ("den", "no")),
        unit(("fr", "trois"), ("de", "drei")),
    ]
    assert read(write(tmp_path, document(*units)), languages) == (pairs, {tmx.INCOMPLETE: incomplete})


@pytest.mark.parametrize("size", [1, 7, 1 << 16])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "iso-8859-1", "windows-1252"])
def test_read_tmx_takes_encodings_in_pieces_of_any_size(
    encoding: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tmx, "_BUFFER", size)
    text = document(*(unit(("en", f"one <ph/>{n}"), ("de", f"käse {n}")) for n in range(20)))
    text = text.replace("UTF-8", encoding.removesuffix("-sig"))
    pairs, left_out = read(write(tmp_path, text.encode(encoding)))
    assert pairs == [(f"one {n}", f"käse {n}") for n in range(20)]
    assert left_out == {tmx.MARKUP: 20}


ASIAN = [
    ("gb2312", "gb18030", "国—镕"),  # with a character that only its successors have, which Windows writes all the same
    ("GBK", "gbk", "國鎔"),
    ("gb18030", "gb18030", "国𠮷"),
    ("Big5", "cp950", "國碁"),
    ("Shift_JIS", "cp932", "家①"),
    ("EUC-JP", "euc_jp", "家"),
    ("euc-kr", "cp949", "집똠"),
    ("johab", "johab", "집"),
    ("utf8", "utf-8", "집é"),
]


@pytest.mark.parametrize("size", [1, 7, 1 << 16])
@pytest.mark.parametrize(("declared", "codec", "word"), ASIAN)
def test_read_tmx_takes_encodings_of_several_bytes(
    declared: str, codec: str, word: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tmx, "_BUFFER", size)
    text = document(*(unit(("en", f"house {n}"), ("zh", f"{word} <ph/>{n}")) for n in range(20)))
    content = text.replace("UTF-8", declared).encode(codec)
    expected = [(f"house {n}", f"{word} {n}") for n in range(20)]
    assert read(write(tmp_path, content), ("en", "zh"))[0] == expected
    assert read(write(tmp_path, content, "a.tmx.gz"), ("en", "zh"))[0] == expected

    # A byte that is none of this encoding, a cut, and a text that is of another.
    bad = content.replace(word.encode(codec), word.encode(codec)[:-1] + b"\xff", 1)
    cut = content[: content.rindex(word.encode(codec)) + 1]
    for damage in (bad, cut):
        with pytest.raises(InputError, match=rf"^{tmp_path}/a\.tmx:\d+: not well-formed XML") as caught:
            read(write(tmp_path, damage), ("en", "zh"))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".xz", ".zst"])
def test_read_table_reads_compressed_tmx_and_names_where_it_is_cut(suffix: str, tmp_path: Path) -> None:
    text = document(*(unit(("en", f"one {n * n}"), ("de", f"eins {n * n}")) for n in range(500)))
    path = write(tmp_path, text, f"a.tmx{suffix}")
    assert list(read_table(path, ("de", "en")))[499] == (f"eins {499 * 499}", f"one {499 * 499}")
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(
        InputError, match=rf"^{tmp_path}/a\.tmx\{suffix}:\d+: (damaged \{suffix} file|not well-formed XML)"
    ):
        list(read_table(path, ("de", "en")))


LAUGHS = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 10))
REFUSED = {
    "billion laughs": (
        f'<!DOCTYPE tmx [<!ENTITY l0 "lol">{LAUGHS}]>\n{document(unit(("en", "&l9;"), ("de", "x")))[len(HEAD) - 21 :]}',
        ":1: it declares entities or the like, which are never expanded: remove its DOCTYPE",
    ),
    "external entity": (
        '<!DOCTYPE tmx [<!ENTITY f SYSTEM "file:///etc/passwd">]>\n<tmx><body/></tmx>',
        ":1: it declares entities or the like, which are never expanded: remove its DOCTYPE",
    ),
    "external parameter": (
        '<!DOCTYPE tmx [<!ENTITY % f SYSTEM "http://127.0.0.1:9/x.dtd"> %f;]>\n<tmx><body/></tmx>',
        ":1: it declares entities or the like, which are never expanded: remove its DOCTYPE",
    ),
    "default attributes": (
        '<!DOCTYPE tmx [<!ATTLIST seg x CDATA "y">]>\n<tmx><body/></tmx>',
        ":1: it declares entities or the like, which are never expanded: remove its DOCTYPE",
    ),
    "entity of the DTD": (
        document(unit(("en", "a&nbsp;b"), ("de", "x"))),
        ":6: the entity &nbsp; is not expanded: write the character itself",
    ),
    "entity in an attribute": (
        "<tmx><body><tu x='&nbsp;'/></body></tmx>",
        ":1: not well-formed XML (undefined entity): mend the file or fetch it again",
    ),
    "depth": (f"<tmx>{'<a>' * 200}", ":1: more than 100 elements within one another: it is no translation memory"),
    "HTML": ("<html><body/></html>", ":1: not TMX: the root is 'html': name a TMX file"),
    "text": ("one\teins\n", ":1: not well-formed XML (syntax error): mend the file or fetch it again"),
    "nothing": ("", ":1: not well-formed XML (no element found): mend the file or fetch it again"),
    "cut": (document(unit(("en", "a"), ("de", "b")))[:-9], ":7: not well-formed XML (unclosed token): mend"),
    "bad byte": (
        document(unit(("en", "a"), ("de", "\udcff"))),
        ":6: not well-formed XML (not well-formed (inv",
    ),
    "other languages": (
        document(unit(("en", "a"), ("fr", "b"))),
        ": no unit has both 'en' and 'de'; its languages are en, fr: name two of them by src and tgt",
    ),
}


OTHER_ENCODINGS = [
    *("ucs-4", "iso-2022-jp", "unknown-1", "x-mac-roman", "utf-7", "utf-32"),
    *("idna", "punycode", "rot13", "base64", "unicode_escape", "cp037", "undefined"),
]
REFUSED |= {
    f"encoded in {name}": (
        f'<?xml version="1.0" encoding="{name}"?>\n<tmx><body/></tmx>',
        f":1: the encoding {name!r} is not read: convert the file, by iconv -f {name} -t UTF-8, and write UTF-8 as the "
        "encoding into its first line",
    )
    for name in OTHER_ENCODINGS
}


@pytest.mark.parametrize("case", REFUSED)
def test_read_tmx_refuses_in_one_line(case: str, tmp_path: Path) -> None:
    text, message = REFUSED[case]
    path = write(tmp_path, text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}{message}")
    assert "\n" not in str(caught.value)


def test_source_takes_a_tmx_without_a_unit_after_one_with_incomplete_units(tmp_path: Path) -> None:
    first = write(tmp_path, document(unit(("en", "a"), ("de", "b")), unit(("en", "a"))))
    second = write(tmp_path, document(), "b.tmx")
    left_out = Counter[str]()
    assert list(Source([(first,), (second,)], ("en", "de")).pairs(left_out)) == [("a", "b")]
    assert left_out == {INCOMPLETE: 1}


OPEN = f"{HEAD}<body>"
SOURCE = "<tuv xml:lang='de'><seg/></tuv><tuv xml:lang='en'><seg>"


@pytest.mark.parametrize(
    ("before", "bit", "after", "message"),
    [
        (f"{OPEN}<!--", "x", "", r":4: a tag or comment without end: fetch the file again$"),
        (f"{OPEN}<tu x='", "x", "", r":4: a tag or comment without end: fetch the file again$"),
        pytest.param(
            f"{OPEN}<tu>",
            "<tuv xml:lang='en-x'><seg>x</seg></tuv>",
            "</tu></body></tmx>",
            ": no unit has both 'en' and",
            marks=pytest.mark.ci,
        ),
        (OPEN, unit(("en", "x" * 1000), ("de", "")), "</body></tmx>", None),
        (f"{OPEN}<tu>{SOURCE}", "é ", "</seg></tuv></tu></body></tmx>", None),
    ],
    ids=["comment", "attribute", "languages", "units", "segment"],
)
def test_read_tmx_takes_little_memory_whatever_a_file_has(
    before: str, bit: str, after: str, message: str | None, tmp_path: Path
) -> None:
    """Eight megabytes of it, in a few kilobytes on the disk; expat's memory is counted, too."""
    path = write(tmp_path, before + bit * ((8 << 20) // len(bit)) + after, "a.tmx.gz")
    refused = nullcontext() if message is None else pytest.raises(InputError, match=message)
    tracemalloc.start()
    try:
        with refused:
            assert drain(read_tmx(path, ("en", "de"), Counter())) <= 1 << 18
        assert tracemalloc.get_traced_memory()[1] < 6 << 20
    finally:
        tracemalloc.stop()


def drain(pairs: Iterator[tuple[str, str]]) -> int:
    """The size of the longest source, in bytes."""
    return max((len(source.encode()) for source, _ in pairs), default=0)
