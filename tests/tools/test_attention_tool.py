"""`transformer attention`: the weights are those of the model, and every file of a sentence shows them."""

import base64
import json
import re
import struct
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from support.corpora import run, run_command, tiny_job, write_corpus
from transformer.config.settings import DataConfig, ModelConfig, Norm, Precision, Score
from transformer.data.batch import collate
from transformer.data.store import Store
from transformer.layout import Packed
from transformer.model.attention import MultiHeadAttention
from transformer.model.transformer import Transformer
from transformer.tools.attention.command import attention
from transformer.tools.attention.figures import Panel, Picture, Words, draw_lines, draw_maps
from transformer.tools.attention.job import AttentionJob, WeightsFormat
from transformer.tools.inspection import AttentionMaps, Role, attention_maps
from transformer.tools.plots import fonts_for

SOURCE = [5, 9, 11, 4, 7]
TARGET = [8, 6, 12, 10, 5, 9, 4]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def trained(corpus: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two layers with two heads."""
    return run(tiny_job(tmp_path_factory.mktemp("run") / "a", corpus, {"n_layers": 2}, max_steps=4, validate_every=4))


def build(**settings: Any) -> Transformer:
    torch.manual_seed(7)
    sizes = {"n_layers": 2, "d_model": 16, "d_ff": 32, "n_heads": 2, "max_positions": 32, "dropout": 0.1}
    return Transformer(ModelConfig(**sizes | settings), vocab_size=20)


def maps_of(model: Transformer, precision: Precision = Precision.fp32) -> AttentionMaps:
    return attention_maps(model, SOURCE, TARGET, device=CPU, precision=precision)


# ---- the weights ----------------------------------------------------------------------------------------------------


def attentions(model: Transformer) -> list[tuple[Role, int, MultiHeadAttention]]:
    """Every attention module of the model, found by its name."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, MultiHeadAttention):
            side, layer, which = name.split(".")
            role = Role.cross if which == "cross_attention" else Role(f"{side}_self")
            found.append((role, int(layer), module))
    return found


def outputs_of(model: Transformer, *, is_packed: bool) -> dict[tuple[Role, int], tuple[Tensor, Tensor]]:
    """What each attention module is given as values, and gives, for SOURCE and TARGET, in either layout.

    In the packed one a second sentence pair lies behind them.
    """
    store = Store.from_pieces([SOURCE, [4, 5, 6]], [TARGET, [7, 8]])
    batch = collate(store, np.arange(2), (20, 20)) if is_packed else collate(store, np.arange(1))
    assert isinstance(batch.source_layout, Packed) == is_packed
    found = {}

    def remember(key: tuple[Role, int]) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
            queries = len(SOURCE) + 1 if key[0] is Role.encoder_self else len(TARGET) + 1
            keys = len(TARGET) + 1 if key[0] is Role.decoder_self else len(SOURCE) + 1
            values = args[1].values
            found[key] = (values[:keys], output[:queries]) if is_packed else (values[0], output[0])

        return hook

    model.eval()
    for role, layer, module in attentions(model):
        module.register_forward_hook(remember((role, layer)), with_kwargs=True)
    with torch.no_grad():
        layouts = {"source_layout": batch.source_layout, "target_layout": batch.target_layout}
        model(batch.source, batch.target_in, **layouts)
    return found


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("settings", [{}, {"norm": Norm.pre}, {"d_k": 4, "d_v": 6}, {"score": Score.additive}])
def test_attention_maps_give_what_the_modules_give(settings: dict[str, Any], is_packed: bool) -> None:
    """The weights times the values, through W_o, are the output of each module, in either layout."""
    model = build(**settings)
    maps = maps_of(model, Precision.fp64)
    outputs = outputs_of(model, is_packed=is_packed)
    assert len(outputs) == 6

    for role, layer, module in attentions(model):
        values, output = outputs[role, layer]
        weights = maps.of(role)[layer]  # (H, queries, keys)
        heads = [weights[head] @ values[:, head] for head in range(2)]
        expected = torch.cat(heads, dim=1) @ module.W_o.weight.T
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)


def test_attention_maps_hold_in_half_precision() -> None:
    """bf16 takes another fast path; its weights are fp32, and near those of fp32."""
    model = build()
    plain, half = maps_of(model), maps_of(model, Precision.bf16)
    for role in Role:
        assert half.of(role).dtype is torch.float32
        torch.testing.assert_close(half.of(role), plain.of(role), rtol=0, atol=0.02)


def test_attention_maps_are_rows_of_shares_without_a_view_ahead() -> None:
    maps = maps_of(build())
    shapes = [tuple(maps.of(role).shape) for role in Role]
    assert shapes == [(2, 2, 6, 6), (2, 2, 8, 8), (2, 2, 8, 6)]
    for role in Role:
        torch.testing.assert_close(maps.of(role).sum(-1), torch.ones(maps.of(role).shape[:-1]))
    assert maps.decoder_self.triu(1).count_nonzero() == 0


def test_attention_maps_leave_the_model_as_it_was() -> None:
    model = build().train()
    first, second = maps_of(model), maps_of(model)
    assert torch.equal(first.cross, second.cross), "no dropout"
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


# ---- figures --------------------------------------------------------------------------------------------------------

UNKNOWN = "\U00030ede"  # a Chinese character of seventy strokes that matplotlib's own font does not have


def panels_of(count: int, words: int) -> list[Panel]:
    return [Panel(f"head {n}", [("#1f77b4", np.full((words, words), 1 / words))]) for n in range(1, count + 1)]


@pytest.fixture
def fonts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The fonts of the machine, beside matplotlib's own: none, until a test adds one."""
    manager = pytest.importorskip("matplotlib.font_manager")
    paths: list[str] = []
    monkeypatch.setattr(manager, "findSystemFonts", lambda: paths)
    monkeypatch.setattr(manager.fontManager, "ttflist", [*manager.fontManager.ttflist])
    return paths


def write_font(path: Path, family: str, character: str) -> str:
    """A font of one character, which is empty."""
    from fontTools.fontBuilder import FontBuilder  # which comes with matplotlib
    from fontTools.pens.ttGlyphPen import TTGlyphPen

    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", "only"])
    builder.setupCharacterMap({ord(character): "only"})
    builder.setupGlyf(dict.fromkeys((".notdef", "only"), TTGlyphPen(None).glyph()))
    builder.setupHorizontalMetrics(dict.fromkeys((".notdef", "only"), (500, 0)))
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": family, "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(path)
    return str(path)


def test_fonts_for_names_the_characters_that_no_font_has(fonts: list[str], tmp_path: Path) -> None:
    assert fonts_for(f"abc é ▁ {UNKNOWN}") == (["DejaVu Sans"], {UNKNOWN})
    (tmp_path / "broken.ttf").write_bytes(b"no font")
    fonts += [str(tmp_path / "broken.ttf"), write_font(tmp_path / "strokes.ttf", "Strokes", UNKNOWN)]
    assert fonts_for(f"abc é ▁ {UNKNOWN}中") == (["DejaVu Sans", "Strokes"], {"中"})


@pytest.mark.usefixtures("fonts")
@pytest.mark.parametrize("draw_figure", [draw_lines, draw_maps])
def test_figures_show_any_text(draw_figure: Callable[..., Picture | None], caplog: pytest.LogCaptureFixture) -> None:
    """What is a formula to matplotlib, markup, controls, and a character without a font: its piece is numbered."""
    words = [f"▁{UNKNOWN}", "$x^{$", "$\\frac$", "<b>&amp;", "a\nb", "▁" + "long" * 30]
    picture = draw_figure(panels_of(2, len(words)), Words(words, words), title="$\\sum$ <title>")
    assert picture is not None
    text = picture.svg.decode()
    ElementTree.fromstring(text)
    for shown in (
        UNKNOWN,
        "$x^{$",
        "$\\frac$",
        "&lt;b&gt;&amp;amp;",
        "a·b",
        "longlonglonglonglonglon…",
        "$\\sum$ &lt;title&gt;",
    ):
        assert shown in text
    assert "no font for 1 characters" in caplog.text


@pytest.mark.needs("matplotlib")
@pytest.mark.parametrize("words", [1, 60])
def test_figures_stay_within_bounds(words: int) -> None:
    """Few words and many: at most 8,000 pixels a side, and a page's shape."""
    names = [f"▁w{n}" for n in range(words)]
    picture = draw_maps(panels_of(3, words), Words(names, names), title="many")
    assert picture is not None
    width, height = struct.unpack(">II", picture.png[16:24])
    assert max(width, height) <= 8000
    assert 0.5 < width / height < 4


# ---- the files ------------------------------------------------------------------------------------------------------


def job_of(run_dir: Path, output: Path, **settings: Any) -> AttentionJob:
    return AttentionJob(run_dir=str(run_dir), output=str(output), threads=1, **settings)


def page_data(path: Path) -> dict[str, Any]:
    [text] = re.findall(r'<script type="application/json">(.*?)</script>', path.read_text(encoding="utf-8"))
    data: dict[str, Any] = json.loads(text)
    return data


def unpack(packed: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(zlib.decompress(base64.b64decode(packed)), "<u2")


@pytest.mark.needs("matplotlib")
def test_attention_writes_the_same_weights_into_every_file(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of(trained, tmp_path, text="one two three", target="eins zwei drei", layers=[2])
    run_command("attention", replace(job, format=WeightsFormat.npz, word="drei"))
    run_command("attention", job)
    out = capsys.readouterr().out
    assert "source: one two three\ntranslation (given): eins zwei drei\n" in out

    written = json.loads((tmp_path / "weights.json").read_text(encoding="utf-8"))
    with np.load(tmp_path / "weights.npz", allow_pickle=False) as file:
        arrays = dict(file)
    data = page_data(tmp_path / "attention.html")
    assert written.keys() == arrays.keys() == {*(role.value for role in Role), "source", "reads", "predicts"}
    for name in ("source", "reads", "predicts"):
        assert written[name] == arrays[name].tolist() == data[name]
    assert (written["reads"][0], written["predicts"][-1], written["source"][-1]) == ("<s>", "</s>", "</s>")
    assert "".join(written["predicts"][:-1]) == "▁eins▁zwei▁drei"

    sizes = {"encoder_self": ("source", "source"), "decoder_self": ("reads", "reads"), "cross": ("predicts", "source")}
    for role, (queries, keys) in sizes.items():
        shape = (2, 2, len(written[queries]), len(written[keys]))
        assert arrays[role].shape == shape
        np.testing.assert_allclose(np.array(written[role]), arrays[role], atol=5e-7)
        shown = np.stack([unpack(layer) for layer in data["weights"][role]]).reshape(shape)
        np.testing.assert_allclose(shown / 1000, arrays[role], atol=5.001e-4)

    figures = {path.name for path in (tmp_path / "figures").iterdir()}
    assert figures == {
        f"{role}-2-{kind}.{end}" for role in sizes for kind in ("words", "map") for end in ("png", "svg")
    }
    for path in (tmp_path / "figures").iterdir():
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG") if path.suffix == ".png" else b"<svg" in content


@pytest.mark.needs("matplotlib")
def test_attention_draws_one_word_with_every_head(trained: Path, tmp_path: Path) -> None:
    """As the paper's Figures 3 and 4: a panel of all heads; no figure where a role does not have the word.

    Those of an earlier sentence are removed, and what else lies there stays.
    """
    folder = tmp_path / "figures"
    folder.mkdir()
    for name in ("encoder_self-1-map.png", "cross-2-words.svg", "mine.svg"):
        (folder / name).write_text("", encoding="utf-8")
    attention(job_of(trained, tmp_path, text="one two", target="eins zwei", word="zwei", layers=[1]))
    figures = {path.stem: path for path in (tmp_path / "figures").glob("*.svg")}
    assert figures.keys() == {"decoder_self-1-words", "cross-1-words", "mine"}
    assert not (folder / "encoder_self-1-map.png").exists()
    text = figures["cross-1-words"].read_text(encoding="utf-8")
    assert "“zwei”, heads 1, 2" in text
    assert "#1f77b4" in text
    assert "#ff7f0e" in text


def test_attention_reads_a_sentence_of_a_file(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Translated by the model, unless there are references."""
    (tmp_path / "in.en").write_text("one\nthree four\n", encoding="utf-8")
    (tmp_path / "in.de").write_text("eins\ndrei vier\n", encoding="utf-8")
    job = job_of(trained, tmp_path / "out", file=str(tmp_path / "in.en"), line=2, word="three", layers=[1])
    run_command("attention", job)
    assert "source: three four\ntranslation (the model's own): " in capsys.readouterr().out
    run_command("attention", replace(job, references=str(tmp_path / "in.de")))
    assert "translation (given): drei vier\n" in capsys.readouterr().out


def test_attention_needs_no_matplotlib(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with caplog.at_level("INFO"):
        attention(job_of(trained, tmp_path, text="one two", target="eins zwei"))
        attention(job_of(trained, tmp_path, sentences=2))
    assert {path.name for path in tmp_path.iterdir()} == {
        *("attention.html", "weights.json", "heads.json", "heads.md", "heads.csv")
    }
    assert "no plot: pip install 'matplotlib>=" in caplog.text
