"""Text that others wrote, in Markdown: a parser finds it again, character by character, and nothing else."""

from typing import Any

import pytest

from transformer.tools.markdown import code, fenced, markdown_table, plain

TEXTS = [
    "train.en, with 12 sets",
    "snake_case *bold* _it_ ~~no~~ **b**",
    "<script>alert(1)</script> <b>x</b> &lt; <http://a.b>",
    "[a](http://a.b) ![i](http://a.b/c.png) http://a.b www.a.b me@a.b [x]: y",
    "`a` ``b`` ``` \\ \\` `",
    "a | b || c",
    "$x^2$ #1 !",
    "`",
    "```",
    "",
]
LINES = (
    "me\n\n# heading\n\n```\n- item\n\n---\n~~~\n> quote\n\n    code\n\n| a |\n|---|\n| b |\n<div>\n1. one\x1b[2J\u202e"
)


def parsed(text: str) -> Any:
    markdown_it = pytest.importorskip("markdown_it")
    return markdown_it.MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).parse(text)


def on_one_line(text: str) -> str:
    return " ".join(text.split()).replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")


@pytest.mark.parametrize("text", [*TEXTS, LINES])
def test_plain_stays_text(text: str) -> None:
    opening, inline, closing = parsed(f"Made of {plain(text)}.")
    assert (opening.type, closing.type) == ("paragraph_open", "paragraph_close")
    assert {token.type for token in inline.children} <= {"text", "text_special"}
    assert "".join(token.content for token in inline.children) == f"Made of {on_one_line(text)}."


@pytest.mark.parametrize("text", [*TEXTS, LINES])
def test_plain_stays_in_its_cell(text: str) -> None:
    table = "\n".join(markdown_table(["a", "b"], [[plain(text), "end"]], left={0}))
    cells = [token for token in parsed(table) if token.type == "inline"]
    assert ["".join(one.content for one in cell.children) for cell in cells] == ["a", "b", on_one_line(text), "end"]


@pytest.mark.parametrize("text", [*TEXTS[:-1], LINES])
def test_code_stays_code(text: str) -> None:
    _, inline, _ = parsed(f"By {code(text)}.")
    assert [(token.type, token.content) for token in inline.children] == [
        ("text", "By "),
        ("code_inline", on_one_line(text)),
        ("text", "."),
    ]


@pytest.mark.parametrize("text", [*TEXTS, LINES])
def test_fenced_ends_where_it_ends(text: str) -> None:
    block, _, inline, _ = parsed("\n".join([*fenced("sh", [text, "last"]), "", "after"]))
    assert (block.type, block.info) == ("fence", "sh")
    assert block.content == f"{text}\nlast\n".replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
    assert inline.content == "after"
