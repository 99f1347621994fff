"""The site of `to=browser` in a real browser: with an engine that plays Bergamot's, and, nightly, with that itself."""

import html
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from support.browser import Browser, running_browser
from support.corpora import run, tiny_job, write_corpus
from support.paths import ROOT
from support.scripts import load_script
from transformer.config.settings import Positions, Quantization, Start
from transformer.errors import InputError
from transformer.integrations.export import browser as site_of
from transformer.integrations.export.command import export
from transformer.integrations.export.job import ExportJob, Target
from transformer.run_dir import RunDir

# As the engine's own: a translation is the text in capitals; of "slow", after the others; of "broken", none.
ENGINE = """
export class TranslatorBacking { constructor() {} }
export class BatchTranslator {
  constructor(options, backing) {
    this.backing = backing;
    this.asked = [];
    globalThis.engine = this;
  }
  async translate({ from, to, text, html }) {
    this.model ??= await this.backing.loadTranslationModel({ from, to });
    this.asked.push(text);
    if (text.includes("slow")) await new Promise((done) => setTimeout(done, 300));
    if (text.includes("broken")) throw new Error("no such word");
    return { target: { text: text.toUpperCase() } };
  }
  remove() {}
}
"""
MODEL = {"d_model": 64, "d_ff": 64, "n_heads": 4, "start": Start.zeros, "positions": Positions.marian}
READY = "body[data-ready]"


def write_engine(folder: Path) -> Path:
    (folder / "worker").mkdir(parents=True)
    (folder / "package.json").write_text(json.dumps({"name": site_of.PACKAGE, "version": "0.0.1<b>"}))
    for name in site_of.ENGINE_FILES:
        (folder / name).write_text(ENGINE if name == "translator.js" else "")
    return folder


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    data = replace(write_corpus(folder / "corpus"), tgt_lang="he")
    return run(tiny_job(folder / "a <b>run", data, MODEL, max_steps=2, average=1))


@pytest.fixture(scope="module")
def site(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    job = ExportJob(run_dir=str(run_dir), to=Target.browser, output=str(folder / "site"), threads=1, sentences=2)
    export(replace(job, engine=str(write_engine(folder / "engine"))))
    return folder / "site"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running_browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


class Quiet(SimpleHTTPRequestHandler):
    """`python -m http.server`, without its log."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def page(browser: Browser, site: Path) -> Iterator[Browser]:
    with served(site) as address:
        browser.resize(1100, 800)
        browser.errors.clear()
        browser.visit(address, drawn=READY)
        yield browser


def type_in(page: Browser, text: str) -> None:
    page.evaluate("document.getElementById('source').focus()")
    page.call("Input.insertText", text=text)


def wait_for_translation(page: Browser, paragraphs: list[str]) -> None:
    """Wait until these are shown, and none waits."""
    shown = "JSON.stringify([...document.querySelectorAll('#target p')].map(line => line.textContent))"
    none_waits = "document.querySelectorAll('#target p.waiting').length === 0"
    page.wait_for(f"{none_waits} && {shown} === JSON.stringify({json.dumps(paragraphs)})")


def test_site_translates_what_is_typed_by_paragraphs(page: Browser) -> None:
    """As many paragraphs as there are; one that has been translated is not asked for again."""
    type_in(page, "one\n\ntwo")
    wait_for_translation(page, ["ONE", "", "TWO"])
    type_in(page, " more\nthree")
    wait_for_translation(page, ["ONE", "", "TWO MORE", "THREE"])
    assert page.evaluate("engine.asked") == ["a", "one", "two", "two more", "three"]
    page.wait_for("document.getElementById('status').textContent.startsWith('Ready')")
    assert page.errors == []


def test_site_gives_the_engine_the_bytes_of_the_files(page: Browser, site: Path) -> None:
    sizes = page.evaluate("[engine.model.model.byteLength, ...engine.model.vocabs.map(one => one.byteLength)]")
    assert sizes == [(site / "model" / name).stat().st_size for name in ("model.enhe.bin", "vocab.enhe.spm")]
    assert page.evaluate("engine.model.config") == {"gemm-precision": "int8shiftAll"}
    assert page.evaluate("engine.model.shortlist.byteLength") == 0


def test_site_shows_what_is_newest(page: Browser) -> None:
    """A slow translation of an older text does not come over a newer one."""
    type_in(page, "slow")
    page.wait_for("engine.asked.includes('slow')")
    page.evaluate("document.getElementById('source').value = ''")
    type_in(page, "new")
    page.wait_for("engine.asked.includes('new')")
    page.evaluate("new Promise(done => setTimeout(done, 400))")
    wait_for_translation(page, ["NEW"])


def test_site_says_what_was_not_translated(page: Browser) -> None:
    type_in(page, "fine\nbroken")
    page.wait_for("document.getElementById('status').textContent === 'Not translated: no such word'")
    assert page.evaluate("document.querySelector('#target p').textContent") == "FINE"


def test_site_puts_text_in_as_text(page: Browser) -> None:
    type_in(page, "<img src=x onerror=alert(1)>")
    wait_for_translation(page, ["<IMG SRC=X ONERROR=ALERT(1)>"])
    assert page.evaluate("document.querySelectorAll('#target img').length") == 0


def test_export_to_browser_puts_what_a_run_says_in_as_text(page: Browser, run_dir: Path) -> None:
    """The name of the run, its scores and the version of the engine."""
    rows = page.evaluate("[...document.querySelectorAll('details tr')].map(row => row.textContent)")
    assert rows[0].startswith("Runa <b>run, averaged, begun 20")
    assert f"Engine{site_of.PACKAGE} 0.0.1<b>, MPL 2.0" in rows
    for name, scores in RunDir(run_dir).read_results().scores.items():
        assert f"BLEU, {name}{scores.bleu:.2f} ({scores.bleu_signature})" in rows
    assert page.evaluate("document.querySelectorAll('details b').length") == 0


def test_site_is_written_from_right_to_left_where_its_language_is(page: Browser) -> None:
    assert page.evaluate("getComputedStyle(document.getElementById('source')).direction") == "ltr"
    assert page.evaluate("getComputedStyle(document.getElementById('target')).direction") == "rtl"
    assert page.evaluate("document.getElementById('target').lang") == "he"


def test_site_is_for_a_keyboard(page: Browser) -> None:
    """The text has the focus first; Tab goes to the translation, the buttons and what the page says of itself."""
    order = []
    page.evaluate("document.getElementById('source').focus()")
    type_in(page, "one")
    wait_for_translation(page, ["ONE"])
    for _ in range(5):
        order.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        for kind in ("rawKeyDown", "keyUp"):
            page.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
    assert order == ["source", "target", "copy", "clear", "SUMMARY"]


def test_site_fits_a_narrow_window_and_a_dark_one(page: Browser) -> None:
    type_in(page, "averyverylongwordthatnolinecanhold" * 8)
    wait_for_translation(page, ["AVERYVERYLONGWORDTHATNOLINECANHOLD" * 8])
    page.resize(320, 640)
    assert page.evaluate("document.documentElement.scrollWidth") == 320
    tops = page.evaluate("['source', 'target'].map(id => document.getElementById(id).getBoundingClientRect().left)")
    assert tops[0] == tops[1]  # below each other
    colours = []
    for scheme in ("light", "dark"):
        page.choose_scheme(scheme)
        colours.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert colours == ["rgb(255, 255, 255)", "rgb(20, 23, 26)"]
    page.choose_scheme("light")


def test_site_says_in_words_that_there_is_no_webassembly(browser: Browser, site: Path) -> None:
    added = browser.call("Page.addScriptToEvaluateOnNewDocument", source="delete globalThis.WebAssembly")
    try:
        with served(site) as address:
            browser.visit(address, drawn="body[data-failed]")
    finally:
        browser.call("Page.removeScriptToEvaluateOnNewDocument", identifier=added["identifier"])
    words = "This browser has no WebAssembly, or it is switched off"
    assert browser.evaluate("document.getElementById('status').textContent").startswith(words)


def test_site_says_which_file_is_not_there(browser: Browser, site: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(site, tmp_path / "site")
    (folder / "model" / "vocab.enhe.spm").unlink()
    with served(folder) as address:
        browser.visit(address, drawn="body[data-failed]")
    words = "model/vocab.enhe.spm: the server says 404"
    assert browser.evaluate("document.getElementById('status').textContent") == words


def test_site_asks_for_its_own_files_alone_and_opens_without_a_network(browser: Browser, site: Path) -> None:
    """The second time with no server at all."""
    with served(site) as address:
        browser.requests.clear()
        browser.visit(address, drawn=READY)
        browser.evaluate("navigator.serviceWorker.ready.then(() => true)")
    assert {request.startswith((address, "data:")) for request in browser.requests} == {True}
    browser.call("Page.navigate", url="about:blank")
    browser.visit(address, drawn=READY)
    type_in(browser, "one")
    wait_for_translation(browser, ["ONE"])


def test_site_opened_as_a_file_says_how_to_serve_it(site: Path) -> None:
    page = (site / "index.html").read_text("utf-8")
    assert "serve the\nfolder, with <code>python -m http.server</code> for example" in page
    assert html.escape("a <b>run") in page
    assert "a <b>run" not in page
    assert str(site.parent) not in page


def replaced(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return change


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "package.json cannot be read (No such file or directory): npm pack"),
    "no worker": (
        lambda folder: (folder / "worker" / "translator-worker.js").unlink(),
        "translator-worker.js cannot be read",
    ),
    "a link": (
        replaced("translator.js", lambda path: path.symlink_to("/etc/hostname")),
        "translator.js cannot be read (Too many levels of symbolic links)",
    ),
    "a pipe": (replaced("translator.js", os.mkfifo), "cannot be read (not a regular file)"),
    "no JSON": (lambda folder: (folder / "package.json").write_text("{"), "package.json: not JSON"),
    "another package": (
        lambda folder: (folder / "package.json").write_text('{"name": "x"}'),
        "not the one of @browsermt",
    ),
    "a list": (lambda folder: (folder / "package.json").write_text("[]"), "package.json: not the one of @browsermt"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_export_to_browser_refuses_what_is_no_engine(case: str, run_dir: Path, tmp_path: Path) -> None:
    """In a line, and leaves nothing behind."""
    change, words = BROKEN[case]
    engine = write_engine(tmp_path / "engine")
    change(engine)
    job = ExportJob(run_dir=str(run_dir), to=Target.browser, output=str(tmp_path / "site"), threads=1, sentences=2)
    with pytest.raises(InputError) as refused:
        export(replace(job, engine=str(engine)))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "site").exists()


def test_export_to_browser_asks_for_an_engine(run_dir: Path, tmp_path: Path) -> None:
    job = ExportJob(run_dir=str(run_dir), to=Target.browser, output=str(tmp_path / "site"), threads=1, sentences=2)
    with pytest.raises(InputError, match="to=browser needs the engine: set engine to the folder of the package"):
        export(job)
    with pytest.raises(ValueError, match="engine is for to=browser: leave it out"):
        ExportJob(to=Target.marian, engine="package")


@pytest.mark.marian
@pytest.mark.timeout(1800)
def test_site_translates_with_the_engine_itself(browser: Browser, tmp_path: Path) -> None:
    """As node does with the same files, and on with the server gone.

    With stored scales: those of each product depend on which sentences are translated together.
    """
    engine = os.environ.get("TRANSFORMER_BERGAMOT")
    if engine is None or shutil.which("node") is None:
        pytest.skip("TRANSFORMER_BERGAMOT names no engine, or there is no node")
    models: Any = load_script("benchmark/marian_engine")
    script: Any = load_script("benchmark/last_mile")
    models.train("plain", tmp_path / "run", 300)
    job = ExportJob(
        run_dir=str(tmp_path / "run"), to=Target.browser, output=str(tmp_path / "site"), threads=1, sentences=100
    )
    export(replace(job, engine=engine, threads=1, quantization=Quantization.int8))
    texts = (ROOT / "data" / "demo" / "dev.en").read_text("utf-8").split("\n")[:8]
    expected = script.of_bergamot(tmp_path / "run", texts, Path(engine), "int8", tmp_path / "node").translations
    with served(tmp_path / "site") as address:
        browser.visit(address, drawn=READY)
        type_in(browser, "\n".join(texts[:4]))
        wait_for_translation(browser, expected[:4])
    type_in(browser, "\n" + "\n".join(texts[4:]))
    wait_for_translation(browser, expected)
    assert browser.errors == []
