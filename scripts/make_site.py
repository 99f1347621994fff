"""The site: docs/, the READMEs, what was measured and every key, as pages with a search.

python scripts/make_site.py [FOLDER]    make it in FOLDER/site (build/site if none is given); needs the extra `docs`

    stage    lay out the pages in FOLDER/docs, each link leading to where its page now lies, beside FOLDER/mkdocs.yml
    build    let Zensical make HTML of them, strictly; mkdocs-material reads the same file
    check    read the HTML: no link or anchor leads nowhere, nothing is fetched from elsewhere

Pages are written for GitHub. What its Markdown allows and Python-Markdown, which is used here, does not is mended:
headings get GitHub's anchors, and lists and tables an empty line before them. A link to a file that is no page leads to
the repository at the address in pyproject.toml; without one, the file is named instead.
"""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

from transformer.cli.commands import COMMANDS
from transformer.cli.overrides import HEADINGS, LIKE_TRAIN
from transformer.config.jobs import TrainJob
from transformer.config.keys import Key, choices_of, keys_of, names_in

ROOT = Path(__file__).resolve().parents[1]
OWN = "docs/site"  # what the site has of its own
FIRST = "README.md"  # the first page, into which the doors are put
PAGES = {
    FIRST: "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "data/README.md": "data.md",
    "scripts/null_gpu/README.md": "null_gpu.md",
}
FOLDERS = {"docs": "", "scripts/benchmark/results": "measured/"}  # each with the place of its pages
PICTURES = (".png", ".svg")
SCRIPT = "site.js"  # in the place of what the generator's search would fetch where pages are opened from a disk
FETCHED_SCRIPT = "https://unpkg.com/iframe-worker/shim"

FENCED = re.compile(r"^(```+)(\S*)([^\n]*)\n(.*?)^\1$", re.MULTILINE | re.DOTALL)
LINK_OR_CODE = re.compile(
    r"(?P<picture>!?)\[(?P<words>(?:`[^`]*`|!?\[[^\]]*\](?:\([^)]*\))?|[^\[\]`])*)\]\((?P<target>[^()\s]+)(?P<title>\s+\"[^\"]*\")?\)"
    r"|(?P<ticks>`+).+?(?P=ticks)",
    re.DOTALL,
)


# What help says in a line of its own.
GROUPS_OF_SETTINGS = {
    "recipe": "a file of settings, applied before any other; without one, the paper's",
    "experiment": "a file of settings that overrides those of the recipe; without one, the demo's",
}


class SiteError(Exception):
    """What is wrong with the pages, a line for each fault."""


# ---- staging --------------------------------------------------------------------------------------------------------


def stage(folder: Path, *, repository: str | None) -> None:
    """Lay out the pages in `folder`/docs, and what says how to make HTML of them. Raises SiteError."""
    docs = folder / "docs"
    shutil.rmtree(docs, ignore_errors=True)
    docs.mkdir(parents=True)
    pages = pages_of_repository()
    stager = Stager(docs, pages, repository)
    for source in pages:
        stager.add(source)
    for place, text in key_pages().items():
        stager.write(place, text)
    for name in ("site.css", SCRIPT):
        shutil.copy(ROOT / OWN / name, docs)

    # The navigation.
    settings = yaml.safe_load((ROOT / OWN / "mkdocs.yml").read_text(encoding="utf-8"))
    settings["nav"] = [_expanded(entry, docs) for entry in settings["nav"]]
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    there = sorted(path.relative_to(docs).as_posix() for path in docs.rglob("*.md"))
    placed = Counter(_places(settings["nav"]))
    faults = [f"{page} has no place in the navigation of {OWN}/mkdocs.yml" for page in there if page not in placed]
    faults += [
        f"{page} is in the navigation of {OWN}/mkdocs.yml, and is no page" for page in placed if page not in there
    ]
    faults += [f"{page} has {count} places in the navigation" for page, count in placed.items() if count > 1]
    if stager.faults or faults:
        raise SiteError("\n".join([*stager.faults, *faults]))


def pages_of_repository() -> dict[str, str]:
    """The path of each page's source in the repository, with that of its page."""
    pages = dict(PAGES)
    for folder, place in FOLDERS.items():
        for path in sorted((ROOT / folder).iterdir()):
            if path.suffix in (".md", ".ipynb"):
                name = "index" if path.stem == "README" else path.stem
                pages[path.relative_to(ROOT).as_posix()] = f"{place}{name}.md"
    return pages


class Stager:
    """Turns sources into pages, and gathers what is wrong with them."""

    def __init__(self, docs: Path, pages: dict[str, str], repository: str | None) -> None:
        self.docs = docs
        self.pages = pages
        self.repository = repository
        self.faults: list[str] = []

    def write(self, place: str, text: str) -> None:
        """Write a page."""
        path = self.docs / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def add(self, source: str) -> None:
        """Make the page of a source."""
        path, place = ROOT / source, self.pages[source]
        if path.suffix == ".ipynb":
            text, pictures = markdown_of_notebook(path)
            for name, picture in pictures.items():
                (self.docs / name).write_bytes(picture)
            shutil.copy(path, self.docs)
        else:
            text = path.read_text(encoding="utf-8")
        text = self.page(text, source, place)
        if source == FIRST:
            doors = self.page((ROOT / OWN / "doors.md").read_text(encoding="utf-8"), f"{OWN}/doors.md", place)
            head, mark, rest = text.partition("![")
            text = f"{head}{doors}\n{mark}{rest}"
        if not text.startswith("# "):
            text = f"# {title_of(path.stem)}\n\n{text}"
        self.write(place, text)

    def page(self, text: str, source: str, place: str) -> str:
        """Text written for GitHub, as it is written for the site; blocks of code stay, but for their tags."""
        parts: list[str] = []
        end = 0
        slugs: Counter[str] = Counter()
        for block in FENCED.finditer(text):
            parts.append(self._prose(text[end : block.start()], source, place, slugs))
            fence, language, _, code = block.groups()
            parts.append(f"{fence}{language}\n{code}{fence}")
            end = block.end()
        return "".join([*parts, self._prose(text[end:], source, place, slugs)])

    def _prose(self, text: str, source: str, place: str, slugs: Counter[str]) -> str:
        text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL)
        text = LINK_OR_CODE.sub(lambda found: self._link(found, source, place), text)
        text = re.sub(r"(?m)^(#+ )(.+)$", lambda found: f"{found[0]} {{#{_anchor(found[2], slugs)}}}", text)
        lists = r"(?m)^(?!- |\d+\. |  )(.+\n)(?=- |1\. )"
        tables = r"(?m)^(?!\|)(.+\n)(?=\|)"
        return re.sub(tables, r"\1\n", re.sub(lists, r"\1\n", text))

    def _link(self, found: re.Match[str], source: str, place: str) -> str:
        """A link from a page to where it leads on the site."""
        if found["ticks"]:
            return found[0].replace(r"\|", "|")  # which GitHub needs in tables
        if urlsplit(found["target"]).scheme:
            return found[0]
        words = LINK_OR_CODE.sub(lambda inner: self._link(inner, source, place), found["words"])
        path, sharp, anchor = found["target"].partition("#")
        named = os.path.normpath(Path(source).parent / path) if path else source
        if path == "" and source == f"{OWN}/doors.md":
            named = FIRST

        if named in self.pages:
            target = os.path.relpath(self.pages[named], Path(place).parent or ".") if path else ""
            return f"{found['picture']}[{words}]({target}{sharp}{anchor}{found['title'] or ''})"
        if not (ROOT / named).exists():
            self.faults.append(f"{source}: {found['target']} leads nowhere")
        elif named.endswith(PICTURES):
            picture = Path(named).name
            shutil.copy(ROOT / named, self.docs)
            return f"{found['picture']}[{words}]({os.path.relpath(picture, Path(place).parent or '.')})"
        elif self.repository:
            return f"[{words}]({self.repository}/blob/main/{named}{sharp}{anchor}{found['title'] or ''})"
        if found["title"]:  # a pointer shows it
            return f'<abbr title="{named}: {found["title"].strip()[1:-1]}">{words}</abbr>'
        return words if Path(named).name in words else f"{words} (`{named}`)"


def _anchor(heading: str, slugs: Counter[str]) -> str:
    """What GitHub calls a heading: lower case, hyphens, no punctuation, and a number where it comes again."""
    words = LINK_OR_CODE.sub(lambda found: found["words"] or found[0], heading)
    slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
    slugs[slug] += 1
    return slug if slugs[slug] == 1 else f"{slug}-{slugs[slug] - 1}"


def title_of(stem: str) -> str:
    """A title from the name of a file."""
    return stem.replace("-", " ").replace("_", " ").capitalize()


def _expanded(entry: dict[str, Any], docs: Path) -> dict[str, Any]:
    """An entry of the navigation, with every page of a folder in the place of the folder."""
    [(title, content)] = entry.items()
    if isinstance(content, list):
        return {title: [_expanded(inner, docs) for inner in content]}
    if not content.endswith("/"):
        return entry
    names = sorted(path.stem for path in (docs / content).glob("*.md"))
    pages: list[Any] = [f"{content}index.md"]
    return {title: pages + [{_entry(name, content): f"{content}{name}.md"} for name in names if name != "index"]}


def _entry(stem: str, folder: str) -> str:
    return stem if folder == "keys/" else title_of(stem)


def _places(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        content = entry if isinstance(entry, str) else next(iter(entry.values()))
        yield from [content] if isinstance(content, str) else _places(content)


def markdown_of_notebook(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and the pictures in it."""
    parts = []
    pictures: dict[str, bytes] = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {"text/plain": output.get("text", [])})
            if "image/png" in data:
                name = f"{path.stem}-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode(data["image/png"])
                parts.append(f'<img src="{name}" alt="What the cell draws">')
            else:
                parts.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
    head, *rest = "\n\n".join(parts).split("\n", 1)
    return f'{head}\n\n<a href="{path.name}" download>This notebook as a file</a>\n{"".join(rest)}\n', pictures


# ---- keys -----------------------------------------------------------------------------------------------------------


def key_pages() -> dict[str, str]:
    """A page on the keys of each command, and one that leads to them."""
    rows = [f"| [`{command}`]({command}.md) | {_text(row.help)} |" for command, row in COMMANDS.items()]
    index = (
        "# Keys {#keys}\n\nWhat each command can be told: `transformer COMMAND key=value ...`. These pages are made "
        "from the code, and say what `transformer COMMAND --help all` says.\n\n"
        "| command | what it does |\n| --- | --- |\n" + "\n".join(rows) + "\n"
    )
    return {"keys/index.md": index} | {f"keys/{command}.md": "".join(_key_page(command)) for command in COMMANDS}


def _key_page(command: str) -> Iterator[str]:
    row = COMMANDS[command]
    keys = keys_of(row.job)
    yield f"# Keys of `{command}` {{#keys-of-{command}}}\n\n`transformer {command} key=value ...`: {_text(row.help)}.\n"
    yield "\n```sh\n" + "".join(f"{example}\n" for example in row.examples) + "```\n"

    # What a command has from a training is explained there.
    if issubclass(row.job, TrainJob) and command != "train":
        of_train = keys_of(TrainJob)
        keys = {name: key for name, key in keys.items() if of_train.get(name) != key}
        yield "\nThe [keys of `train`](train.md) are keys of this command, too"
        yield "; these differ, or are its own.\n" if keys else ".\n"

    groups = {"general": ""}  # the entries of each group; first the keys without one
    for name, key in keys.items():
        last_part = name.rpartition(".")[2]
        if name.startswith(LIKE_TRAIN) and f"data.train.{last_part}" in keys:
            continue
        group = name.partition(".")[0] if "." in name else "general"
        groups[group] = groups.get(group, "") + _key(name, key)
        if name.startswith("data.train."):
            others = [f"{prefix}{last_part}" for prefix in LIKE_TRAIN if f"{prefix}{last_part}" in keys]
            anchors = ", ".join(f'<code id="{other}">{other}</code>' for other in others)
            groups[group] += f"\nThe same of other sets: {anchors}\n"
    if command == "train":
        groups["general"] += "".join(
            f"\n### {kind} {{#{kind}}}\n\nChoices: {_codes(names_in(kind, None))}\n\n{meaning}\n"
            for kind, meaning in GROUPS_OF_SETTINGS.items()
        )
    for group, entries in groups.items():
        if entries:
            yield f"\n## {_text(HEADINGS.get(group, group))} {{#group-{group}}}\n{entries}"


def _key(name: str, key: Key) -> str:
    """A key with its default, its choices and its meaning."""
    choices = choices_of(key.kind)
    meaning = key.help.removesuffix(f" [{', '.join(choices)}]") if choices else key.help
    default = f"`{key.default}`" if key.default else "none"
    said = f"Default: {default}" + (f" · choices: {_codes(choices)}" if choices else "")
    return f"\n### {_text(name)} {{#{name}}}\n\n{said}\n\n{_text(meaning)}\n"


def _codes(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _text(text: str) -> str:
    """What help says, as Markdown: nothing in it acts but spans of code."""
    acts = r"`[^`]+`|[\\`*\[\]<>&#{}]|(?<!\w)_|_(?!\w)"
    return re.sub(acts, lambda found: found[0] if len(found[0]) > 1 else f"&#{ord(found[0])};", text)


# ---- HTML -----------------------------------------------------------------------------------------------------------


def build(folder: Path) -> None:
    """Make HTML of what is staged. Raises SiteError."""
    site = folder / "site"
    shutil.rmtree(site, ignore_errors=True)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", "mkdocs.yml"]
    if subprocess.run(command, cwd=folder, check=False).returncode != 0:
        raise SiteError("Zensical has not made the site: pip install -e '.[docs]', or see above")
    for path in site.rglob("*.html"):
        script = os.path.relpath(site / SCRIPT, path.parent)
        path.write_text(path.read_text(encoding="utf-8").replace(FETCHED_SCRIPT, script), encoding="utf-8")


class Page(HTMLParser):
    """What a page of HTML refers to, and what in it can be referred to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []  # what a browser asks for when it shows the page
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Note what an element refers to."""
        values = {name: value or "" for name, value in attributes}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and values.get("rel") not in ("canonical", "next", "prev", "alternate"):
            self.fetched.append(values["href"])
        if tag != "a" and "src" in values:
            self.fetched.append(values["src"])


def check(site: Path) -> None:
    """Raise SiteError for a link or an anchor that leads nowhere, and for what is fetched from elsewhere."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    faults = [] if pages else [f"{site}: no pages"]
    for path, page in pages.items():
        name = path.relative_to(site)
        faults += [f"{name}: {url} is fetched from elsewhere" for url in page.fetched if urlsplit(url).netloc]
        for url in {*page.links, *page.fetched}:
            split = urlsplit(url)
            if split.scheme or split.netloc or name.name == "404.html":
                continue
            target = (path.parent / unquote(split.path)).resolve() if split.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(split.fragment)
            if not target.is_file():
                faults.append(f"{name}: {url} leads nowhere")
            elif anchor and target in pages and anchor not in pages[target].anchors | {"__top"}:
                faults.append(f"{name}: {url} has no such anchor")
    for path in site.rglob("*.css"):
        fetched = re.findall(r"(?:url\(|@import )[\"']?(https?:[^\"')]+|//[^\"')]+)", path.read_text(encoding="utf-8"))
        faults += [f"{path.relative_to(site)}: {url} is fetched from elsewhere" for url in fetched]
    if faults:
        raise SiteError("\n".join(faults))


def main() -> None:
    """Make the site."""
    folder = Path(*sys.argv[1:]) if sys.argv[1:] else ROOT / "build/site"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    try:
        stage(folder, repository=project.get("urls", {}).get("Repository"))
        build(folder)
        check(folder / "site")
    except SiteError as error:
        sys.exit(f"{error}\n")
    size = sum(path.stat().st_size for path in (folder / "site").rglob("*") if path.is_file())
    pages = len(list((folder / "site").rglob("*.html")))
    print(f"{folder / 'site'}/index.html: {pages} pages, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
