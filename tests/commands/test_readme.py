"""The README, taken at its word: its Python examples run as they stand, and its table of places is the package."""

import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from support.paths import ROOT
from support.source_code import imports
from transformer.config.keys import shipped

README = (ROOT / "README.md").read_text(encoding="utf-8")
SIZES = {"train": 200, "dev": 4, "test": 4, "test_compositional": 4}
REAL = ROOT / "data" / "demo"

Shipped = Callable[[str], Path]


@pytest.fixture
def small_demo(tmp_path: Path) -> Shipped:
    """Where the package finds what it ships with, but that the demo corpus is a few of its lines."""
    folder = tmp_path / "data" / "demo"
    folder.mkdir(parents=True)
    for name, size in SIZES.items():
        for language in ("en", "de"):
            with (REAL / f"{name}.{language}").open(encoding="utf-8") as lines:
                text = "".join(islice(lines, size))
            (folder / f"{name}.{language}").write_text(text, encoding="utf-8")
    return lambda name: tmp_path / "data" if name == "data" else shipped(name)


def test_the_python_examples_run(
    small_demo: Shipped, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One after the other in an empty folder, on one thread: the second one loads what the first one has trained."""
    monkeypatch.setattr("transformer.config.compose.shipped", small_demo)
    monkeypatch.setattr("transformer.training.resolve.resolve_threads", lambda threads: 1)
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    training, translating, attending = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)

    exec(training, {})
    assert Path("runs/demo/checkpoints/step-00000020").is_dir()
    lines = capsys.readouterr().out.split("\n")
    assert [line.split()[0] for line in lines[:-1]] == ["test", "test_compositional"]
    assert all("nrefs:1|case:mixed|eff:no|tok:13a" in line for line in lines[:-1])

    exec(translating, {})
    assert re.fullmatch(r"\[(['\"]).*\1, (['\"]).*\2\]\n", capsys.readouterr().out)

    exec(attending, {})
    # softmax of (1, 0, 1) / sqrt(2) and of (0, 1, 1) / sqrt(2)
    wanted = [["0.4011", "0.1978", "0.4011"], ["0.1978", "0.4011", "0.4011"]]
    printed = re.findall(r"\d\.\d{4}", capsys.readouterr().out)
    assert printed == wanted[0] + wanted[1]
    assert str(wanted).replace("'", "") in attending, "the comment says what is printed"


PLACES = [
    re.findall(r"`([^`]+)`", row)
    for row in re.findall(r"^\| (`.*?) \|", README.partition("## The code")[2], re.MULTILINE)
]


def test_the_table_of_places_is_the_package() -> None:
    named = [place for row in PLACES for place in row]
    found = [f"{path.name}/" if path.is_dir() else path.name for path in (ROOT / "transformer").iterdir()]
    assert sorted(named) == sorted(name for name in found if name.endswith(("/", ".py")) and not name.startswith("_"))


def test_the_table_of_places_goes_from_the_top_down() -> None:
    row_of = {re.sub(r"/|\.py", "", place): row for row, places in enumerate(PLACES) for place in places}
    wrong = [
        f"{found.module.name} imports {found.ours}"
        for found in imports()
        if found.ours and found.module.unit in row_of and row_of[found.module.unit] > row_of[found.ours.split(".")[0]]
    ]
    assert wrong == []
