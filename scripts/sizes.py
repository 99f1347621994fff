"""How much code there is, by folder, in Python tokens: no comments, docstrings, line ends or indents.

    python scripts/sizes.py            print the table
    python scripts/sizes.py --write    bring the table in CONTRIBUTING.md up to date

Nothing limits these sizes: the table makes growth a line of a diff that a review can talk about.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- sizes: begin -->\n", "<!-- sizes: end -->\n"
SILENT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)

AROUND_THE_CORE = ("cli", "integrations", "tools")
OUTSIDE = ("scripts", "tests")


def tokens_by_line(text: str) -> Counter[int]:
    """The tokens of each line of a module, counted from 1; docstrings are none."""
    docstrings = set[int]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    tokens = _strings_whole(tokenize.generate_tokens(io.StringIO(text).readline))
    return Counter(token.start[0] for token in tokens if token.type not in SILENT and token.start[0] not in docstrings)


def _strings_whole(tokens: Iterable[tokenize.TokenInfo]) -> Iterator[tokenize.TokenInfo]:
    """An f-string is one token, as it was up to Python 3.11; template strings are cut as they are."""
    depth = 0
    for token in tokens:
        kind = tokenize.tok_name[token.type]
        if kind == "FSTRING_END":
            depth -= 1
        elif depth == 0:
            yield token
        if kind == "FSTRING_START":
            depth += 1


def sizes_of_tree() -> dict[str, int]:
    """The tokens of each folder of the package, of its parts, and of scripts and tests."""
    package = ROOT / "transformer"
    folders = sorted(path.name for path in package.iterdir() if path.is_dir() and any(path.glob("*.py")))
    core = [name for name in folders if name not in AROUND_THE_CORE]

    sizes = {f"transformer/{name}": _size((package / name).rglob("*.py")) for name in core}
    sizes["transformer/*.py"] = _size(package.glob("*.py"))
    sizes["the core"] = sum(sizes.values())
    sizes |= {f"transformer/{name}": _size((package / name).rglob("*.py")) for name in AROUND_THE_CORE}
    sizes["the package"] = sizes["the core"] + sum(sizes[f"transformer/{name}"] for name in AROUND_THE_CORE)
    sizes |= {name: _size((ROOT / name).rglob("*.py")) for name in OUTSIDE}
    return sizes


def _size(paths: Iterable[Path]) -> int:
    return sum(tokens_by_line(path.read_text(encoding="utf-8")).total() for path in paths)


def sizes_in(page: str) -> dict[str, int]:
    """The table that a page has between its two marks."""
    return dict(_rows(page.partition(BEGIN)[2].partition(END)[0]))


def _rows(table: str) -> Iterator[tuple[str, int]]:
    for row in table.strip().split("\n")[2:]:
        _, name, tokens, _ = row.split("|")
        yield name.strip(), int(tokens.replace(",", ""))


def format_sizes(sizes: dict[str, int]) -> str:
    """The table, as Markdown."""
    rows = [f"| {name} | {tokens:,} |\n" for name, tokens in sizes.items()]
    return "".join(["| folder | tokens |\n", "| --- | ---: |\n", *rows])


def main() -> None:
    """Print the table, or write it."""
    table = format_sizes(sizes_of_tree())
    if sys.argv[1:] == ["--write"]:
        page = PAGE.read_text(encoding="utf-8")
        before, _, rest = page.partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}{table}{END}{rest.partition(END)[2]}", encoding="utf-8", newline="\n")
    else:
        sys.stdout.write(table)


if __name__ == "__main__":
    main()
