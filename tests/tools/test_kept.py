"""What must arrive in a translation as it is: numbers, URLs, names in Latin script, tags."""

import pytest

from transformer.tools.compare.kept import KINDS, Lost, count_kept

FOUND = {
    "numbers": [
        ("It cost 1,000.50 in 2024, or 7.", ["100050", "2024", "7"]),
        ("B2B, 3D and x86", ["2", "3", "86"]),
        ("see https://a.b/2024 and <a href='7'>", []),
        ("１２ and 12 000", ["12000", "１２"]),
    ],
    "URLs": [
        ("See https://a.b/c?d=1, www.x.org/y. Or mail a.b@c.de!", ["https://a.b/c?d=1", "www.x.org/y", "a.b@c.de"]),
        ("no url: a.b", []),
    ],
    "tags": [("<b>x</b> {name} {{n}} %s 100% sure a < b", ["<b>", "</b>", "{name}", "{{n}}", "%s"])],
    "names in Latin script": [
        ("The man met Anna in New-York. He left.", ["Anna", "New-York"]),
        ('"We," said Ian, "are I."', ["Ian"]),
        ("彼はLondonへ", ["London"]),
        ("We saw https://A.B/C and <B>x", []),
    ],
}


@pytest.mark.parametrize(("kind", "text", "found"), [(kind, *case) for kind in FOUND for case in FOUND[kind]])
def test_count_kept_finds_what_must_stay(kind: str, text: str, found: list[str]) -> None:
    assert sorted(KINDS[kind](text).elements()) == sorted(found)


def test_count_kept_counts_what_arrives_in_each_system() -> None:
    sources = ["Call 110 or 1,000.5 and 110 again.", "See Anna at https://a.b/1 in London.", "<b>no</b>"]
    references = ["", "Siehe Anna auf https://a.b/1 in Londres.", ""]
    good = ["Ruf 110 oder 1.000,5 und 110.", "Anna: https://a.b/1", "<b>nein</b>"]
    bad = ["Ruf 110 oder 1000 an.", "Annas https://a.b/2", "nein"]
    rows = {row.kind: row for row in count_kept(sources, references, [good, bad])}
    assert {kind: (row.pieces, row.kept) for kind, row in rows.items()} == {
        "numbers": (3, [3, 1]),
        "URLs": (1, [1, 0]),
        "names in Latin script": (1, [1, 0]),
        "tags": (2, [2, 0]),
    }
    assert rows["numbers"].lost == [[], [Lost(1, ["10005", "110"], bad[0])]]
    assert rows["tags"].lost == [[], [Lost(3, ["</b>", "<b>"], "nein")]]


def test_count_kept_finds_a_name_at_the_beginning_and_between_other_letters() -> None:
    rows = count_kept(["I met Anna."] * 3, ["Anna traf ich."] * 3, [["Anna traf ich.", "我遇见了Anna。", "Annas Hand"]])
    assert [(row.pieces, row.kept) for row in rows] == [(3, [2])]


@pytest.mark.parametrize("part", ["a", "A b", "<a ", "1.", "www.a", "a@", "{a", "-A'", "\u00c0"])
def test_count_kept_takes_time_in_proportion_to_a_line(part: str) -> None:
    """What a pattern that looks back and forth would need for such a line is hours: the test's own limit ends it."""
    line = part * 100_000
    count_kept([line], [line], [[line]])


def test_count_kept_has_no_row_without_a_piece_and_few_examples() -> None:
    assert count_kept(["a", "b"], ["a", "b"], [["a", "b"]]) == []
    (row,) = count_kept(["1"] * 9, [""] * 9, [["x"] * 9])
    assert [lost.line for lost in row.lost[0]] == [1, 2, 3]
