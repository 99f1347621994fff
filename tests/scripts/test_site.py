"""The site's pages as they are laid out for the generator, which only the last test runs: links, keys, places."""

import html
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.browser import Browser, running_browser
from support.paths import ROOT
from support.scripts import load_script
from transformer.cli.commands import COMMANDS
from transformer.config.keys import choices_of, keys_of

make_site = load_script("make_site")

REPOSITORY = "https://example.org/project"


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("site")
    make_site.stage(folder, repository=None)
    return folder


def pages_in(staged: Path) -> dict[str, str]:
    """Each page with its text, without blocks of code."""
    docs = staged / "docs"
    return {
        path.relative_to(docs).as_posix(): re.sub(r"(?ms)^```.*?^```$", "", path.read_text(encoding="utf-8"))
        for path in docs.rglob("*.md")
    }


def links_in(text: str) -> list[str]:
    """Where the links of a page lead on the site."""
    found = re.findall(r"\]\(([^)\s]+)[^)]*\)|(?:src|href)=\"([^\"]+)\"", re.sub(r"`[^`\n]*`", "", text))
    return [target for target in map("".join, found) if not re.match(r"[a-z]+:", target)]


def anchors_in(text: str) -> set[str]:
    return set(re.findall(r"^#+ .* \{#(\S+)\}$", text, re.MULTILINE)) | set(re.findall(r'id="([^"]+)"', text))


def test_site_has_links_that_lead_somewhere(staged: Path) -> None:
    pages = pages_in(staged)
    links = [(page, target) for page, text in pages.items() for target in links_in(text)]
    assert len(links) > 100
    broken = []
    for page, target in links:
        path, _, anchor = target.partition("#")
        file = (staged / "docs" / page).parent / path if path else staged / "docs" / page
        if not file.is_file() or (anchor and anchor not in anchors_in(file.read_text(encoding="utf-8"))):
            broken.append((page, target))
    assert broken == []


def test_site_has_one_anchor_for_each_heading(staged: Path) -> None:
    for page, text in pages_in(staged).items():
        headings = re.findall(r"^#+ .*$", text, re.MULTILINE)
        named = re.findall(r"^#+ .* \{#(\S+)\}$", text, re.MULTILINE)
        assert len(set(named)) == len(named) >= len(headings) - 1, page  # a title that a page has not itself has none
        assert re.match(r"# .", text), page


def places_in(navigation: list[Any]) -> Iterator[str]:
    for entry in navigation:
        [content] = [entry] if isinstance(entry, str) else entry.values()
        if isinstance(content, str):
            yield content
        else:
            yield from places_in(content)


def test_site_has_a_place_in_the_navigation_for_each_page(staged: Path) -> None:
    navigation = yaml.safe_load((staged / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    places = list(places_in(navigation))
    assert sorted(places) == sorted(pages_in(staged))
    assert places[0] == "index.md"
    measured = {place.removeprefix("measured/") for place in places if place.startswith("measured/")}
    assert measured == {path.name for path in (ROOT / "scripts/benchmark/results").glob("*.md")} - {"README.md"} | {
        "index.md"
    }


def test_site_begins_with_four_doors(staged: Path) -> None:
    text = pages_in(staged)["index.md"]
    doors = re.findall(r"^- \*\*\[(.+)\]\((.+)\)\*\*$", text, re.MULTILINE)
    assert doors == [
        ("Train on your own text", "#your-own-text"),
        ("Fine-tune a published model", "models.md"),
        ("Reproduce the paper", "paper.md"),
        ("Change the code", "contributing.md"),
    ]
    assert text.index('class="grid cards"') < text.index("\n## ")


@pytest.mark.parametrize("command", COMMANDS)
def test_site_has_each_key_with_what_help_says(command: str, staged: Path) -> None:
    """With its default, its choices and its meaning; a key that is explained on the page of train leads there."""
    pages = pages_in(staged)
    own, of_train = pages[f"keys/{command}.md"], pages["keys/train.md"]
    train = keys_of(COMMANDS["train"].job)
    assert f"[`{command}`]({command}.md)" in pages["keys/index.md"]
    for name, key in keys_of(COMMANDS[command].job).items():
        is_of_train = name not in anchors_in(own)
        assert not is_of_train or (train[name] == key and "[keys of `train`](train.md)" in own), name
        text = html.unescape(of_train if is_of_train else own)
        entry = text.partition(f"\n### {name} {{#{name}}}\n")[2].partition("\n#")[0]
        if not entry:  # a set like data.train
            assert f'<code id="{name}">{name}</code>' in text
            continue
        default, meaning = entry.strip().split("\n")[:3:2]
        assert default.startswith(f"Default: `{key.default}`" if key.default else "Default: none"), name
        choices = choices_of(key.kind)
        assert [f"`{choice}`" for choice in choices] == re.findall("`[^`]+`", default.partition("choices:")[2]), name
        assert meaning + (f" [{', '.join(choices)}]" if choices else "") == key.help, name


def test_site_has_the_key_of_label_smoothing(staged: Path) -> None:
    assert (
        "\n### train.label_smoothing {#train.label_smoothing}\n\nDefault: `0.1`\n\n"
        "probability taken from the right piece and spread over the others\n"
    ) in pages_in(staged)["keys/train.md"]


def test_site_names_files_that_are_no_pages_where_there_is_no_repository(staged: Path) -> None:
    text = "[a rate](../transformer/training/optimizer.py) and [`loss.py`](../transformer/loss.py)"
    assert [target for page in pages_in(staged).values() for target in links_in(page) if target.endswith(".py")] == []
    assert page_of(text) == "a rate (`transformer/training/optimizer.py`) and `loss.py`"
    assert page_of('[a rule](../transformer/loss.py "test_loss")') == (
        '<abbr title="transformer/loss.py: test_loss">a rule</abbr>'
    )
    assert page_of(text, repository=REPOSITORY) == (
        f"[a rate]({REPOSITORY}/blob/main/transformer/training/optimizer.py) and "
        f"[`loss.py`]({REPOSITORY}/blob/main/transformer/loss.py)"
    )


def page_of(text: str, *, repository: str | None = None) -> str:
    """What becomes of a text in docs/training.md; `README.md` and `docs/runs.md` are pages beside it."""
    pages = {"README.md": "index.md", "docs/training.md": "training.md", "docs/runs.md": "deep/runs.md"}
    stager = make_site.Stager(Path(), pages, repository)
    page: str = stager.page(text, "docs/training.md", "training.md")
    if stager.faults:
        raise make_site.SiteError("\n".join(stager.faults))
    return page


@pytest.mark.parametrize(
    ("text", "page"),
    [
        ("[a](runs.md#b) [c\nd](../README.md) [e](#f)", "[a](deep/runs.md#b) [c\nd](index.md) [e](#f)"),
        ('[`a`](runs.md "title")', '[`a`](deep/runs.md "title")'),
        ("[a](https://example.org/x.md)", "[a](https://example.org/x.md)"),
        ("`[a](nowhere.md)`", "`[a](nowhere.md)`"),
        ("| `a\\|b` |", "| `a|b` |"),
        ("```sh shown: why\n# [a](b)\n- c\n```\n", "```sh\n# [a](b)\n- c\n```\n"),
        ("# Two `words`, [linked](runs.md)", "# Two `words`, [linked](deep/runs.md) {#two-words-linked}"),
        ("## A\n\n## A\n", "## A {#a}\n\n## A {#a-1}\n"),
        ("so:\n- a\n  b\n- c\n", "so:\n\n- a\n  b\n- c\n"),
        ("so:\n| a |\n| --- |\n| b |\n", "so:\n\n| a |\n| --- |\n| b |\n"),
        ("<!-- made -->\n| a |\n", "| a |\n"),
    ],
)
def test_site_mends_what_is_written_for_github(text: str, page: str) -> None:
    assert page_of(text) == page


def test_site_refuses_a_link_that_leads_nowhere() -> None:
    with pytest.raises(make_site.SiteError, match=r"^docs/training.md: gone.md leads nowhere$"):
        page_of("[a](gone.md)")


def test_site_refuses_a_page_without_a_place_and_a_place_without_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = make_site.PAGES | {"tests/data/README.md": "stray.md"}
    monkeypatch.setattr(make_site, "PAGES", {name: page for name, page in pages.items() if page != "changelog.md"})
    with pytest.raises(make_site.SiteError) as refused:
        make_site.stage(tmp_path, repository=None)
    assert str(refused.value).split("\n") == [
        "stray.md has no place in the navigation of docs/site/mkdocs.yml",
        "changelog.md is in the navigation of docs/site/mkdocs.yml, and is no page",
    ]


def test_site_has_notebooks_with_their_output(staged: Path) -> None:
    text = (staged / "docs/tour.md").read_text(encoding="utf-8")
    assert (
        '# From text to attention in ten cells {#from-text-to-attention-in-ten-cells}\n\n<a href="tour.ipynb" download>'
        in text
    )
    assert "```text\n2 + 2 layers of width 128\n```" in text
    assert '<img src="tour-1.png" alt="What the cell draws">' in text
    assert (staged / "docs/tour-1.png").read_bytes().startswith(b"\x89PNG")
    assert (staged / "docs/tour.ipynb").read_bytes() == (ROOT / "docs/tour.ipynb").read_bytes()


@pytest.mark.parametrize(
    ("element", "fault"),
    [
        ('<a href="gone.html">', "a.html: gone.html leads nowhere"),
        ('<a href="deep/b.html#gone">', "a.html: deep/b.html#gone has no such anchor"),
        ('<a href="#gone">', "a.html: #gone has no such anchor"),
        ('<img src="gone.png">', "a.html: gone.png leads nowhere"),
        ('<script src="https://example.org/x.js">', "a.html: https://example.org/x.js is fetched from elsewhere"),
        ('<link rel="stylesheet" href="//example.org/x.css">', "a.html: //example.org/x.css is fetched from elsewhere"),
        ('<link rel="preconnect" href="https://example.org">', "a.html: https://example.org is fetched from elsewhere"),
    ],
)
def test_site_check_finds(element: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/b.html").write_text('<h1 id="there">b</h1><a href="../a.html">', encoding="utf-8")
    (tmp_path / "a.html").write_text('<a href="deep/b.html#there"> <a href="https://example.org">', encoding="utf-8")
    make_site.check(tmp_path)
    (tmp_path / "a.html").write_text(element, encoding="utf-8")
    with pytest.raises(make_site.SiteError) as refused:
        make_site.check(tmp_path)
    assert str(refused.value) == fault


def test_site_check_finds_what_a_style_fetches(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text("", encoding="utf-8")
    (tmp_path / "a.css").write_text(
        "@import 'https://example.org/a.css'; b { c: url(data:x) url(d.png) }", encoding="utf-8"
    )
    with pytest.raises(make_site.SiteError, match=r"^a.css: https://example.org/a.css is fetched from elsewhere$"):
        make_site.check(tmp_path)


def test_site_check_finds_no_pages(tmp_path: Path) -> None:
    with pytest.raises(make_site.SiteError, match=r"no pages$"):
        make_site.check(tmp_path)


# ---- in a browser ---------------------------------------------------------------------------------------------------


def press(browser: Browser, key: str, code: int, *, modifiers: int = 0, text: str = "") -> None:
    """Press and release a key, with what it writes."""
    for kind in ("keyDown" if text else "rawKeyDown", "keyUp"):
        browser.call(
            "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, modifiers=modifiers, text=text
        )


@pytest.mark.ci
@pytest.mark.needs("zensical")
def test_site_is_searched_with_the_keyboard_alone_and_asks_nobody_else(tmp_path: Path) -> None:
    """As it is opened from a disk: a key is found by its name, and its entry shown."""
    subprocess.run([sys.executable, ROOT / "scripts/make_site.py", tmp_path], check=True)
    with running_browser(tmp_path / "profile") as browser:
        browser.open(tmp_path / "site/index.html", drawn=".md-search__button")
        browser.wait_for("document.readyState === 'complete'")
        press(browser, "k", 75, modifiers=2)  # with Ctrl
        focused = "document.activeElement.shadowRoot?.activeElement ?? document.activeElement"
        browser.wait_for(f"({focused}).tagName === 'INPUT'")
        for character in "label_smoothing":
            press(browser, character, ord(character.upper()), text=character)
        assert browser.evaluate(f"({focused}).value") == "label_smoothing"
        chosen = "[role=option][aria-selected=true][href$='?h=label_smoothing#train.label_smoothing']"
        browser.wait_for(f"document.activeElement.shadowRoot.querySelector({json.dumps(chosen)}) !== null")
        press(browser, "Enter", 13, text="\r")
        browser.wait_for("location.pathname.endsWith('/keys/train.html')")
        assert browser.evaluate("location.hash") == "#train.label_smoothing"
        assert browser.errors == []
        assert [url for url in browser.requests if not url.startswith(("file:", "data:", "about:"))] == []
