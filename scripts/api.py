"""docs/api.md: what a Python user calls and gets, from the docstrings.

python scripts/api.py            print the page
python scripts/api.py --write    bring the page up to date

A signature is laid out as in the source. What a field means, with its unit or shape, is the comment behind it or the
help of its key; programs that make such pages read docstrings alone.
"""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import transformer
from transformer import errors
from transformer.config.settings import SearchConfig
from transformer.decoding.output import Alignment, Scored, Translation
from transformer.records import Scores, Validation

PAGE = Path(__file__).resolve().parents[1] / "docs/api.md"
HEAD = """# The Python API

This page is made from the docstrings, by `python scripts/api.py --write`. Public are the names of
`transformer.__all__`, with what is described of them here, and the other classes below, which they take or give.
Anything else may change without notice. Examples are in the [README](../README.md#from-python) and in
[translating.md](translating.md#from-python).

`import transformer` waits neither for torch nor for Hydra: each name is imported when it is first used. Messages go to
Python's `logging`, and nothing to standard output. Sections and equations are the paper's. In shapes, `B` is the number
of sentences, `S` and `T` are the lengths of source and target, `H` is the number of heads, and `K` the width of each.
"""

# Each name with those of its members that are shown beside the fields of a dataclass.
SECTIONS: dict[str, dict[Any, list[str]]] = {
    "Train": {transformer.compose: [], transformer.train: []},
    "Any command": {transformer.run: []},
    "What a training gives": {transformer.Results: ["scores"], Scores: [], Validation: []},
    "Translate": {
        transformer.load: [],
        transformer.Translator: [
            *("search", "device", "precision", "engine"),
            *("translate", "translate_n_best", "sample", "score", "translate_sweep", "with_search"),
        ],
        SearchConfig: [],
    },
    "What a translator gives": {Translation: [], Alignment: [], Scored: []},
    "Attention": {transformer.attention_weights: [], transformer.Padded: ["of"]},
}
MADE_BY_LOAD = transformer.Translator  # whose fields nobody sets


class Source:
    """The source of a function or a class."""

    def __init__(self, entry: Any) -> None:
        self.lines = textwrap.dedent(inspect.getsource(entry)).split("\n")

    @cached_property
    def node(self) -> ast.FunctionDef | ast.ClassDef:
        """Its syntax tree."""
        [node] = ast.parse("\n".join(self.lines)).body
        assert isinstance(node, ast.FunctionDef | ast.ClassDef)
        return node

    @property
    def signature(self) -> str:
        """From `def` to what is returned."""
        lines = self.lines[self.node.lineno - 1 : self.node.body[0].lineno - 1]
        return "\n".join(lines).rstrip().removesuffix(":")

    @property
    def returned(self) -> str:
        """The type of what a function returns."""
        assert isinstance(self.node, ast.FunctionDef)
        assert self.node.returns is not None
        return ast.unparse(self.node.returns)

    @property
    def comments(self) -> dict[str, tuple[str, str]]:
        """The type of each field, and the comment behind it."""
        found = {}
        for node in self.node.body:
            if isinstance(node, ast.AnnAssign):
                comment = self.lines[(node.end_lineno or 0) - 1].partition("  # ")[2]
                found[ast.unparse(node.target)] = (ast.unparse(node.annotation), comment)
        return found


def page() -> str:
    """The page, as Markdown."""
    parts = [HEAD]
    for title, entries in SECTIONS.items():
        parts.append(f"\n## {title}\n")
        for entry, members in entries.items():
            parts += (
                _class(entry, members) if inspect.isclass(entry) else _function(entry, f"transformer.{entry.__name__}")
            )
    return "".join([*parts, *_errors()])


def _function(function: Any, name: str) -> Iterator[str]:
    """A function with its signature; a paragraph that explains its arguments, `name: meaning`, becomes a list."""
    yield f"\n### {name}\n\n```python shown: the signature\n{Source(function).signature}\n```\n"
    arguments = "|".join(inspect.signature(function).parameters)
    yield "\n" + re.sub(rf"^({arguments}): ", r"- `\1`: ", _text(function), flags=re.MULTILINE)


def _class(entry: type, members: list[str]) -> Iterator[str]:
    """A class with its fields and properties, then its methods."""
    is_public = entry.__name__ in transformer.__all__
    place = "transformer" if is_public else entry.__module__
    yield f"\n### {entry.__name__}\n\n`{place}.{entry.__name__}`: {_text(entry)}"

    properties = {name: getter.fget for name in members if isinstance(getter := getattr(entry, name), property)}
    held = list(_fields(entry)) if is_dataclass(entry) and entry is not MADE_BY_LOAD else []
    held += [f"- `{name}: {Source(getter).returned}`: {_text(getter)}" for name, getter in properties.items()]
    yield from ["\n", *held] if held else []

    for name in members:
        if name not in properties:
            yield from _function(getattr(entry, name), f"{entry.__name__}.{name}")


def _fields(entry: type) -> Iterator[str]:
    """A line for each field of a dataclass."""
    assert is_dataclass(entry)
    comments = Source(entry).comments
    for field in fields(entry):
        kind, comment = comments[field.name]
        meaning = field.metadata.get("help", comment)
        yield f"- `{field.name}: {kind}`{f': {meaning}' if meaning else ''}\n"


def _errors() -> Iterator[str]:
    """The classes of errors, with the exit status that a command has in their place."""
    yield "\n## Errors\n"
    yield from _class(transformer.TransformerError, [])
    yield "\nEach message is one line, with the remedy. These are its kinds, in `transformer.errors`:\n\n"
    yield "| class | exit status | meaning |\n| --- | ---: | --- |\n"
    for kind in transformer.TransformerError.__subclasses__():
        if kind.__module__ == errors.__name__:
            yield f"| `{kind.__name__}` | {kind.exit_status} | {inspect.getdoc(kind)} |\n"


def _text(entry: Any) -> str:
    return f"{inspect.getdoc(entry)}\n"


def main() -> None:
    """Print the page, or write it."""
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page(), encoding="utf-8", newline="\n")
    else:
        sys.stdout.write(page())


if __name__ == "__main__":
    main()
