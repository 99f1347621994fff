"""The page to explore attention weights: safe and small as a file, and in a real browser as people use it."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.browser import Browser, running_browser
from transformer.tools.attention.explorer import explorer
from transformer.tools.attention.sentence import Inspected
from transformer.tools.inspection import AttentionMaps, Role
from transformer.tools.page import Component, format_page

HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=document.title='taken'>"


def some_maps(
    source: int = 5, target: int = 4, *, layers: int = 2, decoder_layers: int | None = None, heads: int = 3
) -> AttentionMaps:
    """Random weights, which attention could have given."""
    decoder_layers = decoder_layers or layers
    torch.manual_seed(3)
    causal = torch.ones(target, target, dtype=torch.bool).tril()
    return AttentionMaps(
        torch.randn(layers, heads, source, source).softmax(-1),
        torch.randn(decoder_layers, heads, target, target).masked_fill(~causal, -torch.inf).softmax(-1),
        torch.randn(decoder_layers, heads, target, source).softmax(-1),
    )


def some_page(words: list[str], heading: str = "a sentence", maps: AttentionMaps | None = None) -> str:
    """The page of these maps, else of `some_maps`; the words are those of the source."""
    inspected = inspected_of(
        maps or some_maps(), source=words, reads=["<s>", "x", "y", "z"], predicts=["x", "y", "z", "</s>"]
    )
    return format_page(heading, [explorer(inspected, heading=heading)])


def inspected_of(
    maps: AttentionMaps, *, source: list[str], reads: list[str] | None = None, predicts: list[str]
) -> Inspected:
    return Inspected("", source, reads or [], predicts, "", is_forced=False, maps=maps)


def test_format_page_escapes_hostile_text() -> None:
    page = some_page([HOSTILE, "<!--", "&amp;", "\u2028", "</s>"], heading=HOSTILE)
    assert page.count("<script") == 2, "the data, and what draws them"
    assert page.count("</script>") == 2
    assert "<img" not in page
    assert "<!--" not in page


def test_format_page_names_nothing_outside_it() -> None:
    page = format_page(
        "two", [Component("attention/explorer", "one", {}), Component("attention/explorer", "other", {})]
    )
    assert page.count('component("attention/explorer"') == 1, "components of one kind share their script"
    assert re.search(r"\b(?:src|href|url|import|fetch)\s*[=(]", page) is None
    assert "default-src 'none'" in page


def test_explorer_grows_by_less_than_a_byte_and_a_half_for_each_weight() -> None:
    """The worst there is, weights without any order: a paper's base model and 60 pieces a side."""
    maps = some_maps(60, 60, layers=6, heads=8)
    data = explorer(inspected_of(maps, source=[], predicts=[]), heading="").data
    assert isinstance(data, dict)
    count = sum(maps.of(role).numel() for role in Role)
    size = sum(len(layer) for layers in data["weights"].values() for layer in layers)
    assert 0 < size < 1.5 * count


# ---- in a browser ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running_browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


def show(browser: Browser, folder: Path, fragment: str = "") -> None:
    """The page of `some_maps`, in a window of a desk's size."""
    path = folder / "attention.html"
    path.write_text(some_page(["\u2581one", "\u2581two", "\u2581three", "\u2581four", "</s>"]), encoding="utf-8")
    browser.resize(1200, 900)
    browser.choose_scheme("light")
    browser.open(path, fragment)


def shown_weights(browser: Browser) -> dict[str, float]:
    """What the page says of the heads at the place under the mouse."""
    found = browser.evaluate(
        "Object.fromEntries([...document.querySelectorAll('[data-weight]')]"
        ".map(shown => [shown.dataset.head, Number(shown.dataset.weight)]))"
    )
    return dict(found)


def test_explorer_shows_the_weight_under_the_mouse(browser: Browser, tmp_path: Path) -> None:
    """By hovering over a cell, and over a word while another is pinned; of the layer and the heads that are chosen."""
    maps = some_maps()
    show(browser, tmp_path, "role=cross&layer=2&pin=3")
    browser.move_to(*browser.middle_of("#key-2"))
    browser.wait_for("document.querySelectorAll('[data-weight]').length === 3")
    expected = {str(head + 1): pytest.approx(float(maps.cross[1, head, 2, 1]), abs=5.01e-4) for head in range(3)}
    assert shown_weights(browser) == expected

    show(browser, tmp_path, "role=encoder_self&layer=1&head=2")
    box = browser.evaluate(
        "(() => { const box = document.querySelector('.scroll canvas').getBoundingClientRect();"
        "return [box.right, box.bottom]; })()"
    )
    browser.move_to(box[0] - 5, box[1] - 5)  # the last key of the last query
    browser.wait_for("document.querySelectorAll('[data-weight]').length === 1")
    assert shown_weights(browser) == {"2": pytest.approx(float(maps.encoder_self[0, 1, 4, 4]), abs=5.01e-4)}
    assert browser.errors == []


def test_explorer_answers_keys_and_clicks(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path)
    browser.click(*browser.middle_of(".roles button:nth-of-type(1)"))
    browser.press("ArrowLeft", "ArrowLeft")
    browser.click(*browser.middle_of("#query-2"))
    browser.wait_for("location.hash === '#role=encoder_self&layer=1&pin=2'")
    browser.press("ArrowDown", "ArrowDown")
    browser.press("ArrowRight", "ArrowRight")
    browser.press("3", "Digit3")
    browser.wait_for("location.hash === '#role=encoder_self&layer=2&head=3&pin=3'")
    assert "Heat map of head 3" in browser.evaluate("document.querySelector('.views').textContent")
    browser.press("r", "KeyR")
    browser.press("0", "Digit0")
    browser.wait_for("location.hash === '#role=decoder_self&layer=2'")
    browser.click(*browser.middle_of(".roles button:nth-of-type(3)"))
    browser.click(*browser.middle_of(".heads button:nth-of-type(1)"))
    browser.wait_for("location.hash === '#role=cross&layer=2&head=1'")
    assert browser.errors == []


def test_explorer_has_the_layers_of_the_encoder_or_of_the_decoder(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "attention.html"
    page = some_page(["one", "two", "three", "four", "</s>"], maps=some_maps(layers=3, decoder_layers=1))
    path.write_text(page, encoding="utf-8")
    visible = "[...document.querySelectorAll('.layers button')].filter((one) => one.offsetWidth > 0).length"

    browser.open(path, "role=encoder_self&layer=3")
    assert browser.evaluate(visible) == 3
    browser.press("ArrowRight", "ArrowRight")
    browser.press("r", "KeyR")
    browser.wait_for("location.hash === '#role=decoder_self&layer=1'")
    assert browser.evaluate(visible) == 1

    browser.open(path, "role=cross&layer=2")
    assert browser.evaluate("location.hash") == "#role=cross&layer=1"
    assert browser.errors == []


@pytest.mark.parametrize("fragment", ["", "role=nowhere&layer=99&head=0,x&pin=-3", "layer=1e9&pin=NaN", "%00&&=&"])
def test_explorer_opens_on_one_word_of_the_last_cross_attention(
    browser: Browser, tmp_path: Path, fragment: str
) -> None:
    """The word that looks most clearly at one of the source: so does a bad address."""
    show(browser, tmp_path, fragment)
    mean = some_maps().cross[1].mean(0)
    clearest = 1 + max(range(3), key=lambda position: float(mean[position, :-1].max()))  # of x, y and z
    assert browser.evaluate("location.hash") == f"#role=cross&layer=2&pin={clearest}"
    assert browser.evaluate("document.querySelector('[aria-selected=true]').id") == f"query-{clearest}"
    assert browser.errors == []


@pytest.mark.parametrize(
    ("predicts", "pinned"),
    [
        (["\u2581ein", ".", "\u2581Mann", "</s>"], 2),
        (["\u2581ein", "\u2581Mann", ".", "</s>"], 0),
        ([".", "\u2581", "!", "</s>"], 0),
        (["</s>"], 0),
    ],
)
def test_explorer_pins_a_word_and_neither_eos_nor_punctuation(predicts: list[str], pinned: int) -> None:
    """The second piece looks at EOS, the third most at a word."""
    cross = torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.0, 0.9], [0.1, 0.8, 0.1], [1.0, 0.0, 0.0]])[: len(predicts)]
    maps = replace(some_maps(3, len(predicts), layers=1, heads=1), cross=cross[None, None])
    data = explorer(inspected_of(maps, source=["a", "b", "</s>"], predicts=predicts), heading="").data
    assert isinstance(data, dict)
    assert data["pinned"] == pinned


def test_explorer_shows_hostile_words_as_text(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "hostile.html"
    path.write_text(some_page([HOSTILE, "<b>", "{{x}}", "&lt;", "</s>"], heading=HOSTILE), encoding="utf-8")
    browser.requests.clear()
    browser.open(path)
    assert browser.evaluate("document.title") == HOSTILE
    assert browser.evaluate("document.querySelector('#key-1').textContent") == HOSTILE
    assert browser.evaluate("document.querySelector('h2').textContent") == HOSTILE
    assert browser.evaluate("document.querySelectorAll('img, b').length") == 0
    assert {address.partition("#")[0] for address in browser.requests} <= {"about:blank", path.as_uri()}
    assert browser.errors == []


@pytest.mark.parametrize("width", [360, 1200])
def test_explorer_fits_the_window_and_takes_the_scheme(browser: Browser, tmp_path: Path, width: int) -> None:
    show(browser, tmp_path, "role=cross")
    pictures = []
    for scheme in ("light", "dark"):
        browser.resize(width, 800)
        browser.choose_scheme(scheme)
        pictures.append(browser.screenshot())
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        colors = browser.evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        )
        light = ["rgb(255, 255, 255)", "rgb(27, 31, 36)"]
        assert (colors == light) == (scheme == "light")
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert pictures[0] != pictures[1]
