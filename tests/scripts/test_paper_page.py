"""docs/paper.md, taken at its word: names, tests and results are there, and settings and figures are as it says."""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.command_line import flat
from support.paths import ROOT
from transformer.cli.commands import compose
from transformer.config.jobs import TrainJob
from transformer.config.primitives import from_json, to_json
from transformer.config.settings import ModelConfig
from transformer.cost import count_parameters
from transformer.tools.paper.published import TABLE_2, TABLE_3

PAGE = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
SECTIONS = ["3.1", "3.2.1", "3.2.2", "3.2.3", "3.3", "3.4", "3.5", "4", "5.1", "5.2", "5.3", "5.4", "6.1", "6.2"]
CLAIM = ["the paper", "code", "held by", "measured"]  # the titles of a table of claims
LINK = re.compile(r'\[([^\]]+)\]\(([^)\s]+)(?: "([^"]+)")?\)')
SETTING = re.compile(r"`((?:model|data|tokenizer|train|search)\.[\w.]+)=([^`]+)`")
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")


@dataclass(frozen=True)
class Row:
    """A row of a table: the section that it is in, and its cells by their titles."""

    section: str
    cells: dict[str, str]


def rows_of(page: str) -> Iterator[Row]:
    """Every row of every table, under the number, or the title, of the section."""
    section, titles = "", list[str]()
    for line in page.split("\n"):
        if line.startswith("## "):
            heading = line.removeprefix("## ")
            number = re.match(r"\d[\d.]*", heading)
            section = number[0] if number else heading
        if not line.startswith("|"):
            titles = []
        elif not titles:
            titles = cells_of(line)
        elif not line.startswith("| ---"):
            yield Row(section, dict(zip(titles, cells_of(line), strict=True)))


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split(" |")]


def faults_of(page: str) -> list[str]:
    """Everything that is not as the page says."""
    rows = list(rows_of(page))
    claims = [row for row in rows if list(row.cells) == CLAIM]
    found = list(dict.fromkeys(row.section for row in claims))
    faults = [] if found == SECTIONS else [f"the sections are {found}"]

    for label, target, title in LINK.findall(page):
        faults += faults_of_link(label, target, title)
    for row in rows:
        faults += faults_of_settings(row)
    for before, row in zip([None, *claims], claims, strict=False):
        faults += faults_of_claim(row, is_first=before is None or before.section != row.section)
    return faults + faults_of_table_2(rows) + faults_of_table_3(rows)


# ---- links ----------------------------------------------------------------------------------------------------------


def faults_of_link(label: str, target: str, title: str) -> list[str]:
    """A name of the package is in its file, a test by its title in its, and each figure of a result on its page."""
    path, _, _ = target.partition("#")
    if path.startswith("https:"):
        return []
    file = (ROOT / "docs" / path).resolve()
    if not file.exists():
        return [f"{path} is not there"]

    place = file.relative_to(ROOT)
    match place.parts[0]:
        case "transformer":
            name = label.strip("`")
            return [] if label != name and name in names_of(file) else [f"{place} defines no {label}"]
        case "tests":
            return [] if title in names_of_tests(file) else [f"{place} has no test {title!r}"]
        case "scripts" | "docs":
            text = file.read_text(encoding="utf-8")
            missing = [number for number in NUMBER.findall(label) if not occurs(number, text)]
            return [f"{place} has no {number}: {label}" for number in missing]
    return []


@cache
def names_of(file: Path) -> frozenset[str]:
    """The functions, classes, methods and constants that a module defines."""
    names = set[str]()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        match node:
            case ast.FunctionDef(name=name):
                names.add(name)
            case ast.ClassDef(name=name, body=body):
                names |= {name} | {f"{name}.{inner.name}" for inner in body if isinstance(inner, ast.FunctionDef)}
            case ast.Assign(targets=targets):
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(names)


@cache
def names_of_tests(file: Path) -> frozenset[str]:
    return frozenset(re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE))


def occurs(number: str, text: str) -> bool:
    """Whether a number is in a text, not as a part of another one."""
    return re.search(rf"(?<![\d.,]){re.escape(number)}(?![\d]|[.,]\d)", text) is not None


# ---- claims and settings --------------------------------------------------------------------------------------------


def faults_of_claim(row: Row, *, is_first: bool) -> list[str]:
    """A claim names its code and a test, or that of a row above, or says that nothing holds it; likewise measured."""
    claim, code, held, measured = row.cells.values()
    faults = []
    if not code:
        faults.append("it has no place in the code")
    is_held = held.startswith("the same") and not is_first
    if not is_held and not held.startswith("nothing") and not links_below("../tests/", held):
        faults.append("it does not say what holds it")
    is_explained = measured == "–" or measured.startswith(("not measured", "section 6.2"))
    if not is_explained and not links_below(("../scripts/benchmark/results/", "tried.md"), measured):
        faults.append("it does not say what was measured")
    return [f"{row.section}, {claim}: {fault}" for fault in faults]


def links_below(places: str | tuple[str, ...], cell: str) -> bool:
    return any(target.startswith(places) for _, target, _ in LINK.findall(cell))


def faults_of_settings(row: Row) -> list[str]:
    """A setting of the paper is that of the experiment beside it; any other one can be set."""
    faults = []
    for title, cell in row.cells.items():
        named = re.findall(r"`experiment=([\w/]+)`", cell)
        unknown = [name for name in named if not (ROOT / "configs" / "experiment" / f"{name}.yaml").exists()]
        if unknown:
            faults.append(f"there is no experiment {unknown}")
            continue

        for key, text in SETTING.findall(cell):
            if title != "the paper":
                faults += faults_of_job(key, typed(text))
                continue
            values = settings_of(named[0] if named else "base")
            if key not in values:
                faults.append(f"there is no {key}")
            elif values[key] != typed(text):
                faults.append(f"{key} is {values[key]}, not {text}")
    return faults


def faults_of_job(key: str, value: Any) -> list[str]:
    """What a training says of a value that it cannot take."""
    for name in reversed(key.split(".")):
        value = {name: value}
    try:
        from_json(TrainJob, value)
    except ValueError as error:
        return [str(error)]
    return []


@cache
def settings_of(experiment: str) -> dict[str, Any]:
    return flat(to_json(compose("train", [f"experiment={experiment}"])))


def typed(text: str) -> Any:
    """A setting's value as JSON has it; a name stays a name."""
    try:
        return json.loads(text)
    except ValueError:
        return text


# ---- the paper's figures --------------------------------------------------------------------------------------------


def faults_of_table_2(rows: list[Row]) -> list[str]:
    """BLEU and FLOPs of English-German, beside those that `transformer table table=2` prints."""
    shown = {
        row.cells["model"]: (float(row.cells["En-De"]), float(row.cells["FLOPs"]))
        for row in rows
        if "model" in row.cells
    }
    known = {name: (figures.bleu, figures.flops) for name, figures in TABLE_2.items()}
    return [] if shown == known else [f"Table 2: {shown} here, {known} in the package"]


def faults_of_table_3(rows: list[Row]) -> list[str]:
    """Every row beside what `transformer table table=3` prints of the paper, and the parameters of what it changes."""
    shown = {row.cells["row"]: row.cells for row in rows if "row" in row.cells}
    faults = [] if list(shown) == list(TABLE_3) else ["Table 3 has other rows"]
    for name, cells in shown.items():
        changes = {key.removeprefix("model."): typed(text) for key, text in SETTING.findall(cells["changes"])}
        model = from_json(ModelConfig, {key: value for key, value in changes.items() if "." not in key})
        counts = [f"{count_parameters(model, size).total / 1e6:.1f}" for size in (37_000, 41_000)]

        figures = TABLE_3[name]
        millions = "" if figures.millions is None else str(figures.millions)
        known = [f"{figures.perplexity:.2f}", f"{figures.bleu:.1f}", millions, *counts]
        if list(cells.values())[2:] != known:
            faults.append(f"Table 3, {name}: {list(cells.values())[2:]} here, {known} in the package")
    return faults


# ---- the tests ------------------------------------------------------------------------------------------------------


def test_paper_page_is_true() -> None:
    assert faults_of(PAGE) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("[`collate`]", "[`collated`]", "batch.py defines no `collated`"),
        ("[`AddNorm.forward`]", "[`AddNorm.backward`]", "layers.py defines no `AddNorm.backward`"),
        ("layers_are_torchs", "layers_are_ours", "test_model.py has no test 'test_transformer_layers_are_ours'"),
        ("_store.py", "_shop.py", "../tests/core/unit/test_shop.py is not there"),
        ("21.63 BLEU", "21.64 BLEU", "scores-demo-two-amx-cores.md has no 21.64"),
        ("-two-amx-cores.md", "-one-core.md", "-one-core.md is not there"),
        ("`model.d_ff=2048`", "`model.d_ff=2084`", "model.d_ff is 2048, not 2084"),
        ("`train.average=20`", "`train.average=5`", "train.average is 20, not 5"),
        ("`train.adam_eps=", "`train.adam_epsilon=", "there is no train.adam_epsilon"),
        (
            "`experiment=wmt14_en_fr_big`",
            "`experiment=wmt14_en_fr_huge`",
            "there is no experiment ['wmt14_en_fr_huge']",
        ),
        ("`model.norm=pre`", "`model.norm=before`", "TrainJob.model.norm='before' is not"),
        ("## 5.3 Optimizer", "Optimizer", "the sections are"),
        ("[a bound by hand]", "a bound by hand ", "it does not say what holds it"),
        ("| [torch's nn.Transformer]", "| the same ", "it does not say what holds it"),
        ("| [4,496,280 invented pairs]", "| 4,496,280 ", "it does not say what was measured"),
        ("| 27.3 |", "| 27.2 |", "Table 2: "),
        ("| 4.75 | 26.2 | 90 |", "| 4.75 | 26.3 | 90 |", "Table 3, C_ff4096: "),
        ("| 80 | 77.7 |", "| 80 | 77.6 |", "Table 3, C_n8: "),
    ],
)
def test_paper_page_with_a_fault_is_found_out(old: str, new: str, fault: str) -> None:
    assert old in PAGE
    assert any(fault in found for found in faults_of(PAGE.replace(old, new)))
