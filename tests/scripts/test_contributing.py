"""CONTRIBUTING.md's table of what comes from outside: each check and each test that it names is there."""

import ast
import re

import pytest

from support.paths import ROOT
from support.source_code import modules

TITLE = "| place | what comes in | its check | its test |"
DANGEROUS = {
    "subprocess.Popen",
    "subprocess.run",
    "shutil.rmtree",
    "os.system",
    "torch.load",
    "pickle.load",
    "eval",
    "exec",
}

# Directories of their own, from mkdtemp; and what each row's check calls.
TEMPORARY = {"integrations/engine/make.py", "integrations/engine/searcher.py"}


def rows_of(page: str) -> list[list[str]]:
    lines = page.partition(f"{TITLE}\n")[2].partition("\n\n")[0].split("\n")
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
ROWS = rows_of(PAGE)


def functions_in(text: str) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}


def faults_of(rows: list[list[str]]) -> list[str]:
    """The names in the table that are not there."""
    package = {str(path.relative_to(ROOT / "transformer")): path for path in (ROOT / "transformer").rglob("*.py")}
    tests = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    faults = []
    for place, what, checks, held_by in rows:
        named = re.findall(r"`([\w/]+\.py):(\w+)`", checks)
        tested = re.findall(r"`(test_\w+)`", held_by)
        if not (place and what and named and tested):
            faults.append(f"{place}: {what}: without a check or a test")
        for file, function in named:
            if file not in package or function not in functions_in(package[file].read_text(encoding="utf-8")):
                faults.append(f"{file}:{function}")
        faults += [name for name in tested if name not in tests]
    return faults


def test_contributing_names_checks_and_tests_that_are_there() -> None:
    assert len(ROWS) > 20
    assert faults_of(ROWS) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("`files.py:_check_replaceable`", "`files.py:_check_nothing`", "files.py:_check_nothing"),
        ("`data/hub.py:commit_of`", "`data/hubs.py:commit_of`", "data/hubs.py:commit_of"),
        ("`test_plain_stays_text`", "`test_plain_stays`", "test_plain_stays"),
    ],
)
def test_contributing_with_a_fault_is_found_out(old: str, new: str, fault: str) -> None:
    assert old in PAGE
    assert faults_of(rows_of(PAGE.replace(old, new))) == [fault]


def test_contributing_has_a_row_for_each_module_that_starts_or_removes() -> None:
    named = {file for row in ROWS for file in re.findall(r"`([\w/]+\.py):", row[2])} | TEMPORARY
    for module in modules():
        file = str(module.path.relative_to(ROOT / "transformer"))
        calls = {ast.unparse(node.func) for node in ast.walk(module.tree) if isinstance(node, ast.Call)}
        assert not calls & DANGEROUS or file in named, f"{file} calls {calls & DANGEROUS}: a row for it"


def test_pages_put_text_in_as_text() -> None:
    """No script of a page makes HTML of a text."""
    scripts = [path for path in (ROOT / "transformer").rglob("*.js") if path.is_file()]
    assert len(scripts) > 3
    for path in scripts:
        found = re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function",
            path.read_text(encoding="utf-8"),
        )
        assert found is None, f"{path}: {found}"
