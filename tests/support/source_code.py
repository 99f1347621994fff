"""The source of the package: its modules, and what each of them imports."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from support.paths import ROOT

PACKAGE = ROOT / "transformer"


@dataclass(frozen=True)
class Module:
    """A source file: its dotted name inside the package, text and syntax tree."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def unit(self) -> str:
        """The package or single file on its floor that it belongs to."""
        return self.name.partition(".")[0]


@dataclass(frozen=True)
class Import:
    """One imported module, absolute, and whether a function imports it."""

    module: Module
    target: str
    inside: bool

    @property
    def ours(self) -> str:
        """The target inside the package, or nothing."""
        return self.target.removeprefix("transformer.") if self.target.startswith("transformer.") else ""


@cache
def modules() -> tuple[Module, ...]:
    """Every module, packages' `__init__` under the package's own name."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        found.append(Module(name, path, text, ast.parse(text)))
    return tuple(found)


@cache
def imports(*, typed: bool = False) -> tuple[Import, ...]:
    """Every import statement of the package, one entry for each module that it names; `typed`, also for checkers."""
    names = {module.name for module in modules()}
    return tuple(
        Import(module, resolve(target, names), inside)
        for module in modules()
        for target, inside in imported(module.tree, inside=False, typed=typed)
    )


def imported(node: ast.AST, *, inside: bool, typed: bool = False) -> Iterator[tuple[str, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, inside) for alias in child.names)
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING" and not child.orelse:
            if typed:  # for type checkers alone
                yield from imported(child, inside=inside, typed=True)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            yield from ((f"{child.module}.{alias.name}", inside) for alias in child.names)
        else:
            is_inside = inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from imported(child, inside=is_inside, typed=typed)


def resolve(target: str, names: set[str]) -> str:
    """`transformer.errors.InputError` -> `transformer.errors`; other packages' names are kept."""
    inner = target.removeprefix("transformer.")
    if inner == target:
        return target
    return f"transformer.{inner}" if inner in names else f"transformer.{inner}".rpartition(".")[0]
