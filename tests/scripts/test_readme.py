"""The README, docs/ and data/README.md, taken at their word: examples run or compose as they stand, links lead
somewhere, the notebooks run from their first cell to their last, and the tables of commands and places are the package.

The fence of each block of code says what may be expected of it: `run`, it runs in an empty folder, one block after the
other; `compose`, its commands are complete and each sets what it says; `shown: REASON`, it is only to be looked at.
"""

import base64
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import transformer
from support.command_line import enter
from support.corpora import run_command
from support.paths import ROOT
from transformer.cli.commands import compose
from transformer.config.keys import shipped
from transformer.tools.summary.command import summarise
from transformer.tools.summary.job import SummaryJob

README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "data/README.md", *sorted((ROOT / "docs").glob("*.md"))]
SIZES = {"train": 200, "dev": 4, "test": 4, "test_compositional": 4}
REAL = ROOT / "data" / "demo"

Shipped = Callable[[str], Path]


@dataclass(frozen=True)
class Block:
    """A fenced block of code."""

    page: str  # its path in the repository
    line: int
    tag: str  # what follows the language
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    """Every fenced block of a page."""
    text = page.read_text(encoding="utf-8")
    for fence in re.finditer(r"^```(\S*)[ ]?([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        language, tag, code = fence.groups()
        yield Block(page.relative_to(ROOT).as_posix(), text.count("\n", 0, fence.start()) + 1, tag, language, code)


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


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


def test_pages_tag_each_block_of_code() -> None:
    untagged = [str(block) for block in BLOCKS if not re.fullmatch(r"run|compose|shown: .+", block.tag)]
    assert untagged == []
    assert {block.tag.partition(":")[0] for block in BLOCKS} == {"run", "compose", "shown"}
    assert all(block.language in ("sh", "python") for block in BLOCKS if block.tag == "run")


@pytest.mark.ci
def test_pages_have_examples_that_run(
    small_demo: Shipped, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One after the other in an empty folder, on one thread: the first one trains what the others load."""
    monkeypatch.setattr("transformer.config.compose.shipped", small_demo)
    monkeypatch.setattr("transformer.training.resolve.resolve_threads", lambda threads: 1)
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    training, translating, attending = (b.code for b in BLOCKS if (b.language, b.tag) == ("python", "run"))

    exec(training, {})
    assert Path("runs/try/checkpoints/step-00000020").is_dir()
    Path("runs/demo").symlink_to("try")  # in the place of what the first command of the README trains
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

    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    shells = [block for block in BLOCKS if (block.language, block.tag) == ("sh", "run")]
    assert shells
    for block in shells:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.code], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{block}: {done.stderr}"
        assert done.stdout.strip(), f"{block}: nothing is printed"


@pytest.mark.ci
@pytest.mark.parametrize("block", [block for block in BLOCKS if block.tag == "compose"], ids=str)
def test_pages_have_commands_that_compose(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command makes a job, though the files that it names are not there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("base: {}\n")
    (tmp_path / "heads.yaml").write_text("base: {}\n")
    commands = [shlex.split(line, comments=True) for line in block.code.replace("\\\n", " ").splitlines()]
    assert commands
    for command in commands:
        arguments = command[command.index("transformer") + 1 :]
        result = enter(*arguments)
        assert result.status == 0, f"{block}: {' '.join(command)}: {result.err}"
        assert len(result.jobs) == 1


def test_pages_have_links_that_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists() or (anchor and anchor not in anchors(file)):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def anchors(page: Path) -> set[str]:
    """What a heading of a page is linked by, as GitHub makes it: lower case, hyphens, no punctuation."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


TRAINING = (ROOT / "docs/training.md").read_text(encoding="utf-8")
HOURS = re.findall(r"^\| [^|]+ \| `(\w+)`[^|]* \| [^|]+ \| ([\d,]+) \|([^|]*)\|$", TRAINING, re.MULTILINE)


@pytest.mark.parametrize(("experiment", "pieces", "hours"), HOURS, ids=[row[0] for row in HOURS])
def test_training_page_has_the_hours_that_summary_tells(experiment: str, pieces: str, hours: str) -> None:
    """Those in hours, on two cores at the speed that is named there; minutes were measured."""
    (speed,) = re.findall(r"two cores at a measured ([\d,]+) target tokens", TRAINING)
    settings = [f"experiment={experiment}", "data.root=CORPORA", f"tokens_per_second={speed.replace(',', '')}"]
    job = compose("summary", settings)
    assert isinstance(job, SummaryJob)
    assert job.tokenizer.vocab_size == int(pieces.replace(",", ""))
    if hours.strip().endswith(" h"):
        (told,) = [pace.hours for pace in summarise(job).paces if "given" in pace.source]
        assert f"{told:.2g}" == hours.strip().removesuffix(" h")


def test_training_page_has_hours() -> None:
    assert len(HOURS) >= 7
    assert sum(row[2].strip().endswith(" h") for row in HOURS) >= 2


NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
CLAIMS = [
    (page, text, target.partition("#")[0])
    for page in (ROOT / "README.md", ROOT / "docs/results.md", ROOT / "docs/toolkits.md")
    for text, target in re.findall(r"\[([^\]]+)\]\((?!https?:)([^)\s]+\.md[^)\s]*)\)", page.read_text(encoding="utf-8"))
    if NUMBER.search(text)
]


@pytest.mark.parametrize(("page", "text", "target"), CLAIMS, ids=[text[:30] for _, text, _ in CLAIMS])
def test_pages_claim_what_the_linked_page_says(page: Path, text: str, target: str) -> None:
    """Each number in the words of a link stands in the page that it leads to, there perhaps with more digits."""
    there = [float(found.replace(",", "")) for found in NUMBER.findall((page.parent / target).read_text("utf-8"))]
    for claimed in NUMBER.findall(text):
        digits = len(claimed.partition(".")[2])
        assert float(claimed.replace(",", "")) in {round(number, digits) for number in there}, claimed


def test_pages_claim_something() -> None:
    assert len(CLAIMS) >= 12


PLACES = [
    re.findall(r"`([^`]+)`", row)
    for row in re.findall(r"^\| (`.*?) \|", CONTRIBUTING.partition("| place |")[2].partition("\n\n")[0], re.MULTILINE)
]


def test_contributing_table_of_places_is_the_package() -> None:
    named = [place for row in PLACES for place in row]
    found = [f"{path.name}/" if path.is_dir() else path.name for path in (ROOT / "transformer").iterdir()]
    assert sorted(named) == sorted(name for name in found if name.endswith(("/", ".py")) and not name.startswith("_"))


def test_contributing_leads_through_files_that_are_there() -> None:
    spine = CONTRIBUTING.partition("**The spine**")[2].partition("| place |")[0]
    named = re.findall(r"`([a-z_/]+\.py)`", spine)
    assert len(named) >= 18
    assert [name for name in named if not any((ROOT / "transformer").glob(f"**/{name}"))] == []


def test_commands_page_is_complete() -> None:
    page = (ROOT / "docs/commands.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `(\w+)` \| ", page, re.MULTILINE)
    listed = re.findall(r"^  (\w+) ", enter("--help").out, re.MULTILINE)
    assert sorted(named) == sorted(listed)


# ---- the notebooks --------------------------------------------------------------------------------------------------

TOUR = json.loads((ROOT / "docs/tour.ipynb").read_text(encoding="utf-8"))
OWN_TEXT = json.loads((ROOT / "docs/own_text.ipynb").read_text(encoding="utf-8"))
CELLS = [cell for cell in TOUR["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("notebook", [TOUR, OWN_TEXT], ids=["tour", "own_text"])
def test_notebooks_are_what_jupyter_reads(notebook: dict[str, Any]) -> None:
    """What Jupyter asks of version 4.5, without it."""
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    identifiers = [cell["id"] for cell in notebook["cells"]]
    assert len(set(identifiers)) == len(identifiers)
    assert all(re.fullmatch(r"[\w-]{1,64}", identifier) for identifier in identifiers)
    assert all(isinstance(cell["metadata"], dict) and all(map(str, cell["source"])) for cell in notebook["cells"])
    assert all(
        cell["cell_type"] == "markdown" or {"outputs", "execution_count"} <= set(cell) for cell in notebook["cells"]
    )


def test_tour_has_ten_cells_that_were_run() -> None:
    """The output is that of one run from the top."""
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, 11))
    outputs = [output for cell in CELLS for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} == {"stream", "execute_result", "display_data"}
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}
    [picture] = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert base64.b64decode(picture).startswith(b"\x89PNG")


@pytest.mark.ci
def test_tour_runs_from_text_to_attention(
    small_demo: Shipped, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its cells in order, on a few lines of the demo, for a few steps; a line of the shell is run in this process."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    monkeypatch.setattr("transformer.config.compose.shipped", small_demo)
    monkeypatch.setattr("transformer.training.resolve.resolve_threads", lambda threads: 1)
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")

    printed = []
    names: dict[str, Any] = {"shell": in_this_process}
    for cell in CELLS:
        source = "".join(cell["source"])
        assert ("steps = 1000" in source) == (cell is CELLS[0])
        source = source.replace("steps = 1000", "steps = 20")
        exec(re.sub(r"^!(.+)$", r"shell(f'''\1''')", source, flags=re.MULTILINE), names)
        printed.append(capsys.readouterr().out)
    matplotlib.pyplot.close("all")

    assert printed[1].startswith((REAL / "train.en").read_text(encoding="utf-8").partition("\n")[0] + "\n    ")
    assert printed[4].startswith("step   20: nll ")
    scores = dict(re.findall(r"^(\w+): (\d+\.\d) BLEU, nrefs:1\|case:mixed\|eff:no\|tok:13a", printed[5], re.MULTILINE))
    assert set(scores) == {"test", "test_compositional"}
    assert all(0.0 <= float(bleu) <= 100.0 for bleu in scores.values())

    assert names["translator"].search.beam_size == 4
    ranked = [float(line.partition("  ")[0]) for line in printed[7].splitlines()]
    assert len(ranked) == 3
    assert ranked == sorted(ranked, reverse=True)
    pieces = names["translator"].tokenizers.source.encode([names["sentence"]])[0]
    assert len(names["best"].alignment.source_pieces) == len(pieces)
    assert printed[8].count("\n") == len(names["best"].alignment.pieces)
    assert Path("runs/tour/attention/attention.html").stat().st_size > 10_000


def in_this_process(line: str) -> None:
    """What a line of the shell does, `transformer COMMAND ...`."""
    program, command, *arguments = shlex.split(line)
    assert program == "transformer"
    run_command(command, compose(command, arguments))


@pytest.mark.ci
def test_own_text_runs_from_two_files_to_a_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its cells in order but for the installation, on two small files; what is downloaded translates elsewhere."""
    monkeypatch.setattr("transformer.training.resolve.resolve_threads", lambda threads: 1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    for language in ("en", "de"):
        with (REAL / f"train.{language}").open(encoding="utf-8") as lines:
            text = list(islice(lines, 100))
        Path(f"text.{language}").write_text("".join([*text, text[0]]), encoding="utf-8")  # the last one comes again

    installation, settings, *cells = [
        "".join(cell["source"]) for cell in OWN_TEXT["cells"] if cell["cell_type"] == "code"
    ]
    assert "--constraint torch.txt" in installation
    assert not any(re.search("^[!%]", cell, re.MULTILINE) for cell in [settings, *cells])
    small = settings.replace('"small", 8000, 20000', '"small", 200, 2')
    assert small != settings
    names: dict[str, Any] = {}
    printed = []
    for cell in [small, *cells]:
        exec(cell, names)
        printed.append(capsys.readouterr().out)

    counts = dict(re.findall(r"^(\w+): (\d+) pairs$", printed[1], re.MULTILINE))
    assert counts == {"dev": "10", "test": "10", "train": "80"}
    held_out = {pair for name in ("dev", "test") for pair in names["sets"][name]}
    assert not held_out & set(names["sets"]["train"])
    assert Path("sets/train.de").read_text(encoding="utf-8").split("\n")[0] == names["sets"]["train"][0][1]
    assert re.fullmatch(r"\d+\.\d BLEU, nrefs:1\|case:mixed\|eff:no\|tok:13a.*\n", printed[3])

    shutil.unpack_archive("model.zip", "elsewhere")
    assert not Path("elsewhere/mine/checkpoints").exists()
    sources = [line for line, _ in names["examples"]]
    assert transformer.load("elsewhere/mine").translate(sources) == names["translations"]


def test_own_text_refuses_files_of_different_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.en").write_text("a\nb\n", encoding="utf-8")
    Path("text.de").write_text("a\n", encoding="utf-8")
    _, settings, dividing, *_ = ["".join(cell["source"]) for cell in OWN_TEXT["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    exec(settings, names)
    with pytest.raises(AssertionError, match=r"^text.en has 2 lines, and text.de has 1$"):
        exec(dividing, names)
