"""The pictures of the pages, docs/pictures: each drawn from what is in the repository, or of a run that this makes.

    python scripts/pictures.py              all but `browser`, which needs more; trains the demo, for minutes
    python scripts/pictures.py road speed   those two, at once

    drawn                            road, and from published measurements: speed, curve, table
    what a command prints            demo (a film, by `recording`), doctor
    pages, as a browser shows them   report, attention, browser

Work goes to build/pictures. There `demo` trains anew, and what shows a run shows that one, which is trained if it is
not there. `browser` shows --run, trained with `model.start=zeros model.positions=marian`, in --engine, the folder that
docs/last-mile.md unpacks. It needs `pip install -e '.[dev]' pyte`, and Chromium for pages.

An SVG has light colours and dark ones, as the reader's system asks for. A PNG is light, with as few colours as do.
"""

import argparse
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import recording
import yaml

from transformer.config.primitives import from_json
from transformer.tools.plots import as_svg, distinct_colors, new_figure
from transformer.tools.tables.format import write_table
from transformer.tools.tables.measured import Table

if TYPE_CHECKING:
    from support.browser import Browser

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs/pictures"
RESULTS = ROOT / "scripts/benchmark/results"
DEMO = ROOT / "data/demo"
WORK = ROOT / "build/pictures"
RUN = "runs/demo"  # in WORK

WIDTH = 640  # of most pages, in CSS pixels
PIXELS, COLORS = 960, 96  # of its picture
SANS = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
MONOSPACE = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


@dataclass(frozen=True)
class Settings:
    """What `browser` shows, and where."""

    run: str | None
    engine: str | None


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MAKERS)}")
    parser.add_argument("--run", help="browser: the run to show")
    parser.add_argument("--engine", help="browser: the folder of @browsermt/bergamot-translator")
    args = parser.parse_args(arguments)
    unknown = [name for name in args.names if name not in MAKERS]
    if unknown:
        parser.error(f"no such picture: {', '.join(unknown)}; there are {', '.join(MAKERS)}")

    WORK.mkdir(parents=True, exist_ok=True)
    for name in args.names or [name for name in MAKERS if name != "browser" or args.run]:
        content = MAKERS[name](Settings(args.run, args.engine))
        path = PICTURES / file_of(name)
        path.write_bytes(content)
        print(f"{path.relative_to(ROOT)}: {len(content):,} bytes")


def file_of(name: str) -> str:
    """The file of a picture, in PICTURES."""
    return f"{name}.{'png' if name in PAGES else 'svg'}"


# ---- drawn ----------------------------------------------------------------------------------------------------------

BOX_WIDTH, BOX_HEIGHT = 122, 90
ROAD = {
    "your text": ["two files, TMX,", "tables, the hub,", "corpora by name"],
    "prepare": ["filters,", "tokenizer,", "token ids"],
    "train": ["killed, it goes", "on from where", "it stopped"],
    "score": ["BLEU of the last", "checkpoints,", "averaged"],
}
WAYS_ON = {
    "look": ["report, compare,", "attention, table"],
    "translate": ["lines or whole files,", "also from Python"],
    "export": ["CTranslate2, ONNX,", "Argos, Hugging Face,", "Marian, a web page"],
}


ROAD_STYLE = f"""
:root {{ --paper: #ffffff; --ink: #1b1f24; --quiet: #4d5762; --line: #8a949f; --raised: #eef3f9; --accent: #0b5cad }}
@media (prefers-color-scheme: dark) {{
  :root {{ --paper: #14171a; --ink: #e7eaee; --quiet: #b3bcc6; --line: #77818c; --raised: #1f2a36; --accent: #6cb2ff }}
}}
text {{ font: 13px {SANS}; fill: var(--quiet); text-anchor: middle }}
.name {{ font: 600 16px {SANS}; fill: var(--ink) }}
.command {{ font: 600 15px {MONOSPACE}; fill: var(--accent) }}
.box {{ fill: var(--paper); stroke: var(--line) }}
.frame {{ fill: var(--raised); stroke: var(--accent) }}
.way {{ fill: none; stroke: var(--line); stroke-width: 1.5 }}
.head {{ fill: var(--line) }}
"""


def road(_: Settings) -> bytes:
    """The road from text to export: what `train` does in one go, and what one does with the run."""
    left, top, gap = 4, 40, 16
    step = BOX_WIDTH + gap
    width = 2 * left + len(ROAD) * step - gap
    across = top + BOX_HEIGHT + 40  # where the way leads to the boxes below
    below = across + 24
    height = below + BOX_HEIGHT + 2
    wide = (width - 2 * left - 2 * gap) / len(WAYS_ON)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
        f"<title>From text to a translation model, and on from there</title>\n<style>{ROAD_STYLE}</style>",
        f'<rect width="{width}" height="{height}" rx="8" fill="var(--paper)"/>',
    ]

    # One command takes all steps but the first.
    start = left + step - gap / 2
    middle, frame = (start + width) / 2, top + BOX_HEIGHT + 4
    lines += [
        f'<rect class="frame" x="{start:g}" y="4" width="{width - start - 1:g}" height="{frame}" rx="8"/>',
        f'<text class="command" x="{middle:g}" y="27">transformer train</text>',
    ]
    for number, (name, notes) in enumerate(ROAD.items()):
        x, y = left + number * step, top + BOX_HEIGHT // 2
        lines += _box(x, top, BOX_WIDTH, name, notes)
        if number:
            lines += _arrow(f"M{x - gap} {y} H{x - 7}", f"{x - 1},{y} {x - 9},{y - 4} {x - 9},{y + 4}")

    # From the run, the ways on.
    lines.append(f'<path class="way" d="M{middle:g} {top + BOX_HEIGHT + 8} V{across}"/>')
    lines.append(f'<text x="{middle + 95:g}" y="{across - 10}">a run: one folder, complete</text>')
    for number, (name, notes) in enumerate(WAYS_ON.items()):
        start = left + number * (wide + gap)
        center, y = start + wide / 2, below - 1
        lines += _box(start, below, wide, name, notes)
        head = f"{center:g},{y} {center - 4:g},{y - 8} {center + 4:g},{y - 8}"
        lines += _arrow(f"M{middle:g} {across} H{center:g} V{y - 6}", head)
    return "\n".join([*lines, "</svg>\n"]).encode()


def _box(x: float, y: float, width: float, name: str, notes: list[str]) -> Iterator[str]:
    """A box with a name, and notes below it."""
    middle = x + width / 2
    yield f'<rect class="box" x="{x:g}" y="{y:g}" width="{width:g}" height="{BOX_HEIGHT}" rx="6"/>'
    yield f'<text class="name" x="{middle:g}" y="{y + 22:g}">{name}</text>'
    for number, note in enumerate(notes):
        yield f'<text x="{middle:g}" y="{y + 43 + 17 * number:g}">{note}</text>'


def _arrow(path: str, head: str) -> Iterator[str]:
    """A way, and the head at its end."""
    yield f'<path class="way" d="{path}"/>'
    yield f'<polygon class="head" points="{head}"/>'


@dataclass(frozen=True)
class Ratio:
    """How many times as fast as the faster of the others: the median of the rounds, and their range."""

    label: str
    median: float
    least: float
    most: float


def speed(_: Settings) -> bytes:
    """Speed beside what one would take instead, as bars, with the range of the rounds."""
    rows = ratios()
    figure = _figure(height=0.9 + 0.42 * len(rows))
    axes = figure.add_subplot()
    for height, row in enumerate(rows):
        below, above = row.median - row.least, row.most - row.median
        color = distinct_colors(2)["bf16" in row.label]
        axes.barh(height, row.median, height=0.62, color=color, alpha=0.5)
        axes.errorbar(row.median, height, xerr=[[below], [above]], color="black", linewidth=1, capsize=3)
        axes.text(0.06, height, f"{row.median:.2f}", va="center", color="black", fontweight="bold")
    axes.axvline(1.0, color="black", linewidth=1, linestyle="dashed")
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("times the speed of the faster of the two others (dashed: 1)")
    axes.spines[["top", "right"]].set_visible(False)
    return _dark_too(as_svg(figure, text_as_text=False))


def ratios() -> list[Ratio]:
    """From the published tables: of both contenders, the one that is nearer to us."""
    found = []
    for precision in ("fp32", "bf16"):
        for size in ("small", "base"):
            text = (RESULTS / f"train-{size}-two-zen4-cores.md").read_text(encoding="utf-8")
            cells = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("|")]
            rows = [row for row in cells if row[1:3] == [size, precision] and row[5]]
            nearest = min(rows, key=lambda row: float(row[5]))
            least, most = map(float, nearest[6].split("–"))
            found.append(Ratio(f"{size}, {precision}", float(nearest[5]), least, most))
    return found


def curve(_: Settings) -> bytes:
    """BLEU and loss on the validation set of Multi30k over the steps, three seeds."""
    figure = _figure(height=4.6)
    above, below = figure.subplots(2, sharex=True)
    for number, points in enumerate(validations()):
        steps = [step for step, _, _ in points]
        style: dict[str, Any] = {
            "color": distinct_colors(3)[number],
            "marker": "o",
            "markersize": 3.5,
            "linewidth": 1.3,
        }
        above.plot(steps, [bleu for _, _, bleu in points], label=f"seed {number + 1}", **style)
        below.plot(steps, [loss for _, loss, _ in points], **style)
    above.set_ylabel("greedy BLEU")
    below.set_ylabel("loss")
    below.set_xlabel("steps")
    below.xaxis.set_major_formatter("{x:,.0f}")
    above.legend(loc="lower right")
    for axes in (above, below):
        axes.grid(color="lightgrey", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    return _dark_too(as_svg(figure, text_as_text=False))


def validations() -> list[list[tuple[int, float, float]]]:
    """Of each seed, the steps with their loss and BLEU, from the published page: its first table."""
    page = (RESULTS / "multi30k-two-zen4-cores.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\d,]+) \|(.+)\|$", page.partition("## `multi30k_en_de` with Adam")[0], re.MULTILINE)
    seeds: list[list[tuple[int, float, float]]] = [[], [], []]
    for step, cells in rows:
        for seed, cell in zip(seeds, cells.split("|"), strict=True):
            loss, bleu = map(float, cell.split(","))
            seed.append((int(step.replace(",", "")), loss, bleu))
    return seeds


def table(_: Settings) -> bytes:
    """What `transformer table table=3` draws, from the table that it wrote."""
    written = (RESULTS / "table3-demo-two-amx-cores.json").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        write_table(Path(folder), from_json(Table, json.loads(written)), "")
        return _dark_too((Path(folder) / "table.svg").read_bytes())


def _figure(*, height: float) -> Any:
    """A figure whose words can still be read on a telephone."""
    figure = new_figure(width=5.4, height=height)
    if figure is None:
        sys.exit("this picture needs matplotlib: pip install -e '.[dev]'")
    figure.set_layout_engine("constrained")
    return figure


def _dark_too(drawn: bytes) -> bytes:
    """A figure on white, which is turned over where the reader's system is dark; colours keep their hue."""
    style = b"<style>@media (prefers-color-scheme: dark) { svg { filter: invert(0.9) hue-rotate(180deg) } }</style>"
    return re.sub(rb"(<svg [^>]*>)", rb"\1" + style, drawn, count=1)


# ---- what a command prints ------------------------------------------------------------------------------------------


def demo(_: Settings) -> bytes:
    """The film of a training from its beginning: a run that is there would only go on."""
    shutil.rmtree(WORK / RUN, ignore_errors=True)
    film = WORK / "demo.svg"
    recorder = (sys.executable, str(ROOT / "scripts/recording.py"), str(film), "--columns=96", "--rows=30")
    _run(*recorder, "--", "transformer", "train")
    return film.read_bytes()


DOCTOR_COLUMNS = 72
DOCTOR_INDENT = 28  # of what doctor says of a check, behind its level and its name


def doctor(_: Settings) -> bytes:
    """What doctor finds in a copy of the demo into which three faults were put."""
    write_faulty(WORK)
    command = "transformer doctor --config-dir . experiment=mine text_only=true |\n    grep -v ^ok"
    said = subprocess.run(command, shell=True, cwd=WORK, capture_output=True, text=True, check=False)
    if "\nerror " not in said.stdout:
        sys.exit(f"error: {command}\n{said.stdout}{said.stderr}")
    return still(command, said.stdout, columns=DOCTOR_COLUMNS)


def write_faulty(folder: Path) -> None:
    """The demo's text with a target line lost, the dev set in the training text, and a test set in lower case."""
    lines = {path.name: path.read_text(encoding="utf-8").splitlines() for path in DEMO.glob("*.??")}
    lost = len(lines["train.de"]) * 3 // 4
    del lines["train.de"][lost], lines["train.en"][-1]
    for language in ("en", "de"):
        lines[f"train.{language}"] += lines[f"dev.{language}"][:200]
    lines["test.de"] = [line.lower() for line in lines["test.de"]]
    for name, text in lines.items():
        (folder / name).write_text("".join(f"{line}\n" for line in text), encoding="utf-8")

    sets = {name: {"src": f"{name}.en", "tgt": f"{name}.de"} for name in ("train", "dev", "test")}
    data = {"train": sets["train"], "dev": sets["dev"], "test": {"test": sets["test"]}}
    settings = {"run_dir": "runs/mine", "data": data, "tokenizer": {"vocab_size": 2000}}
    (folder / "experiment").mkdir(exist_ok=True)
    experiment = f"# @package _global_\n{yaml.safe_dump(settings)}"
    (folder / "experiment/mine.yaml").write_text(experiment, encoding="utf-8")


def still(command: str, printed: str, *, columns: int) -> bytes:
    """A terminal with what a command printed: nothing is changed but that long lines are broken between words."""
    rows = f"$ {command}".splitlines()
    for line in printed.splitlines():
        indent = DOCTOR_INDENT if not line.startswith(" ") else len(line) - len(line.lstrip()) + 2
        rows += textwrap.wrap(line, columns, subsequent_indent=" " * indent, break_on_hyphens=False) or [""]
    drawn = recording.draw([(0.0, tuple(rows))], columns, len(rows), 1.0)
    return ("\n".join(drawn) + "\n").encode()


def _run(*command: str) -> None:
    """Run a command in WORK, with its output here."""
    status = subprocess.run(command, cwd=WORK, check=False).returncode
    if status:
        sys.exit(f"error: {' '.join(command)} ended with status {status}")


# ---- pages ----------------------------------------------------------------------------------------------------------


# A picture shows parts of a page, so that they can be read on a telephone.
PARTS_OF_REPORT = """
for (const part of document.querySelectorAll("section"))
  part.hidden = !["Curves", "Scores"].includes(part.querySelector("h2").textContent);
for (const chart of document.querySelectorAll("figure[data-chart]"))
  chart.hidden = chart.dataset.chart !== "Dev scores";
for (const table of document.querySelectorAll(".blocks > :nth-child(n+3)"))
  table.hidden = true;
"""
PARTS_OF_EXPLORER = """
for (const part of document.querySelectorAll(".views > :nth-child(2), details"))
  part.hidden = true;
"""


def report(_: Settings) -> bytes:
    """The report of the demo's run: one of its curves, and scores with their intervals."""
    page = WORK / "report.html"
    _run("transformer", "report", _trained(), f"output={page}", "attention=0", "checkpoints=0")
    with chromium() as browser:
        browser.open(page, drawn=".curves svg")
        return picture_of(browser, PARTS_OF_REPORT)


def attention(_: Settings) -> bytes:
    """The explorer on the sentence of docs/experiments.md, at the head that looks from "it" to its noun."""
    sentence = "The old lamp in the kitchen is not very expensive, but it is beautiful."
    _run("transformer", "attention", f"run_dir={_trained()}", f"text={sentence}", "output=attention")
    with chromium() as browser:
        browser.open(WORK / "attention/attention.html", "role=encoder_self&layer=2&head=4&pin=13")
        return picture_of(browser, PARTS_OF_EXPLORER)


TYPED = """\
A man is sleeping on a green sofa.

Two dogs are running through the snow.

A woman in a red coat is talking to a man with a camera."""


def browser(settings: Settings) -> bytes:
    """The page of `export to=browser`, after three sentences were typed."""
    if settings.run is None or settings.engine is None:
        sys.exit("browser needs --run and --engine: see above")
    run_dir, engine = Path(settings.run).resolve(), Path(settings.engine).resolve()
    with tempfile.TemporaryDirectory() as folder:
        site = f"{folder}/site"
        arguments = (f"run_dir={run_dir}", "to=browser", "quantization=int8", f"engine={engine}", f"output={site}")
        _run("transformer", "export", *arguments, "sentences=20")
        with serving(site) as address, chromium() as opened:
            opened.visit(address, drawn="body[data-ready]")
            opened.call("Input.insertText", text=TYPED)
            paragraphs = TYPED.count("\n") + 1
            opened.wait_for(f"document.getElementById('target').children.length === {paragraphs}")
            opened.wait_for("document.querySelector('#target p.waiting') === null")
            opened.wait_for("document.getElementById('status').textContent.startsWith('Ready')")
            opened.evaluate("document.querySelector('details').open = true")
            return picture_of(opened, "", width=800, height=520)


def picture_of(browser: "Browser", choose: str, *, width: int = WIDTH, height: int = 300) -> bytes:
    """What is on a page after a script has chosen parts of it, as PNG in light colours."""
    browser.evaluate(choose)
    browser.choose_scheme("light")
    browser.resize(width, height, scale=PIXELS / width)
    return small_png(browser.screenshot())


def _trained() -> str:
    """The demo's run in WORK, which is trained where it is not there."""
    if not (WORK / RUN / "results.json").exists():
        _run("transformer", "train")
    return RUN


@contextmanager
def chromium() -> Iterator["Browser"]:
    """The browser that the tests of pages use."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support.browser import running_browser

    with tempfile.TemporaryDirectory() as profile, running_browser(Path(profile)) as found:
        yield found


@contextmanager
def serving(folder: str) -> Iterator[str]:
    """The address of a server of files, while it runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=folder))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def small_png(content: bytes) -> bytes:
    """The same picture with few colours."""
    from PIL import Image  # which matplotlib brings along

    with Image.open(io.BytesIO(content)) as picture:
        few = picture.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
    written = io.BytesIO()
    few.save(written, format="PNG", optimize=True)
    return written.getvalue()


PAGES: dict[str, Callable[[Settings], bytes]] = {"report": report, "attention": attention, "browser": browser}
MAKERS: dict[str, Callable[[Settings], bytes]] = {
    "road": road,
    "speed": speed,
    "curve": curve,
    "table": table,
    "demo": demo,
    "doctor": doctor,
    **PAGES,
}

if __name__ == "__main__":
    main(sys.argv[1:])
