"""The pictures of the pages: each is made by scripts/pictures.py, stands on a page, and says in words what it shows."""

import io
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from support.paths import ROOT
from support.scripts import load_script
from transformer.tools.page import Component, format_page

pictures = load_script("pictures")

FILES = sorted(path.name for path in pictures.PICTURES.iterdir())
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTHING = pictures.Settings(run=None, engine=None)


def placed() -> list[tuple[str, str]]:
    """The words and the file of each picture on a page."""
    found = []
    for page in PAGES:
        for words, target in re.findall(r"!\[(.*?)\]\(([^)]+)\)", page.read_text(encoding="utf-8"), re.DOTALL):
            path = (page.parent / target).resolve()
            assert path.parent == pictures.PICTURES, f"{page.name}: {target}"
            found.append((words, path.name))
    return found


def test_pictures_are_those_that_the_program_makes() -> None:
    assert sorted(map(pictures.file_of, pictures.MAKERS)) == FILES


def test_pictures_each_stand_on_one_page_and_say_what_they_show() -> None:
    assert sorted(name for _, name in placed()) == FILES
    for words, name in placed():
        assert len(words.split()) >= 8, f"{name}: {words}"


def test_pictures_are_light() -> None:
    sizes = {name: (pictures.PICTURES / name).stat().st_size for name in FILES}
    assert sum(sizes.values()) < 600_000, sizes
    assert max(sizes.values()) < 120_000, sizes


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".svg")])
def test_pictures_fetch_nothing_and_run_nothing(name: str) -> None:
    text = (pictures.PICTURES / name).read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    assert re.search(r"<script|\son\w+=|<image|@import|url\((?!#)|href=\"(?!#)", text) is None


@pytest.mark.parametrize("name", ["road", "speed", "curve", "table", "doctor"])
def test_pictures_are_readable_in_the_dark(name: str) -> None:
    """Either they have colours for it, or a ground of their own."""
    text = (pictures.PICTURES / f"{name}.svg").read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in text or recorded_on_dark_ground(text)


def recorded_on_dark_ground(text: str) -> bool:
    return f'<rect width="100%" height="100%" rx="8" fill="{pictures.recording.GROUND}"/>' in text


def test_road_is_the_one_on_the_page() -> None:
    made = pictures.road(NOTHING)
    assert made == (pictures.PICTURES / "road.svg").read_bytes(), "python scripts/pictures.py road"


def test_ratios_are_those_of_the_page_of_results() -> None:
    page = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    said = re.findall(r"^\| `(small|base)`, (fp32|bf16) \| \[([\d.]+)\]", page, re.MULTILINE)
    assert said == [tuple([*row.label.split(", "), f"{row.median:.2f}"]) for row in pictures.ratios()]
    assert all(row.least <= row.median <= row.most for row in pictures.ratios())


def test_validations_are_three_seeds_of_eight() -> None:
    first, second, third = pictures.validations()
    assert first[0] == (1000, 3.131, 32.82)
    assert second[3] == (4000, 2.831, 38.36)
    assert third[-1] == (8000, 2.675, 41.58)
    assert [step for step, _, _ in third] == list(range(1000, 9000, 1000))


@pytest.mark.needs("matplotlib")
@pytest.mark.parametrize("name", ["speed", "curve", "table"])
def test_figures_are_drawn_in_both_schemes(name: str) -> None:
    made = pictures.MAKERS[name](NOTHING)
    assert made == pictures.MAKERS[name](NOTHING)
    root = ElementTree.fromstring(made)
    [style] = [child.text or "" for child in root if child.tag.endswith("style")]
    assert "prefers-color-scheme: dark" in style


def test_still_breaks_lines_between_words_and_changes_nothing() -> None:
    printed = "error    case    one two three four five six seven\n           remedy: a <b> & c\n"
    text = pictures.still("a |\n    b", printed, columns=34).decode()
    rows = [element.text for element in ElementTree.fromstring(text).iter() if element.tag.endswith("text")]
    assert [row for row in rows if row] == [
        "$ a |",
        "    b",
        "error    case    one two three",
        f"{'':28}four",
        f"{'':28}five",
        f"{'':28}six",
        f"{'':28}seven",
        "           remedy: a <b> & c",
    ]


@pytest.mark.ci
def test_doctor_finds_the_faults_that_were_put_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "WORK", tmp_path)
    made = pictures.doctor(NOTHING).decode()
    assert re.findall(r">error +(\w+(?: \w+)?)", made) == ["overlap", "case", "shifted lines"]
    assert str(tmp_path) not in made


@pytest.mark.ci
def test_picture_of_a_page_is_of_the_parts_that_were_chosen(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    parts = [Component("report/contents", name, None) for name in ("one", "two", "three")]
    page.write_text(format_page("title", parts), encoding="utf-8")
    image = pytest.importorskip("PIL.Image")
    with pictures.chromium() as browser:
        browser.open(page, drawn="section:nth-of-type(3)")
        browser.evaluate("document.body.style.height = '900px'")
        whole = pictures.picture_of(browser, "")
        part = pictures.picture_of(browser, "document.body.style.height = '600px'")
    sizes = []
    for content in (whole, part):
        with image.open(io.BytesIO(content)) as picture:
            assert picture.mode == "P"
            sizes.append(picture.size)
    assert [width for width, _ in sizes] == [960, 960]
    assert sizes[0][1] - sizes[1][1] == 450
