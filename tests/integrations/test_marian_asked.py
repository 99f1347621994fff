"""`export to=marian` asks Marian itself, where it is installed: a stand-in for it, which may fail, and the engine.

The stand-in has the names of `pymarian`, reads the arguments of its commands and answers from a file. With pymarian,
the marker `marian` and `TRANSFORMER_MARIAN_RUN`, a finished run, the engine itself is asked.
"""

import importlib.util
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import transformer
from support.corpora import as_a_command, run, run_command, tiny_job, write_corpus
from support.marian_own import SHAPES, random_translator
from support.translations import sentences
from transformer.config.settings import Positions, SearchOverride, Start
from transformer.data.tokenizer import Tokenizer, Tokenizers
from transformer.errors import InputError
from transformer.integrations.engine.peer import Peer
from transformer.integrations.export import marian_engine
from transformer.integrations.export.command import FORMATS, Exported, ParityError, export
from transformer.integrations.export.job import ExportJob, Target
from transformer.layout import Padded
from transformer.tools import program
from transformer.vocabulary import BOS, EOS

STAND_IN = """
import json, os, pathlib, sys, time

def main(words):
    how = json.loads(pathlib.Path(__file__).with_name("how.json").read_text("utf-8"))
    value = dict(zip(words, words[1:]))
    lines = how[words[0]]
    fault = how["fault"] if words[0] == how["at"] else ""
    if fault == "dies":
        said = "[now] Loading\\n[now] Error: no parameter\\n[now] Error: Aborted\\n[0x1]"
        pathlib.Path(value["--log"]).write_text(said)
        os.abort()
    if fault == "hangs": time.sleep(1000)
    if fault == "says nothing": return
    if fault == "loses": lines = lines[:-1]
    if fault == "bytes": lines = ["\\udcff"] * len(lines)
    if fault == "words": lines = ["no-piece", *lines[1:]]
    if fault == "no numbers": lines = ["-1.0 ||| WordScores= x", *lines[1:]]
    if fault == "fewer numbers": lines = [lines[0].rpartition(" ")[0], *lines[1:]]
    if fault == "other numbers": lines = [line.replace("-", "-1") for line in lines]
    if fault == "others": lines = lines[1:] + lines[:1]
    with open(value["-o"], "w", encoding="utf-8", errors="surrogateescape") as file:
        file.writelines(line + "\\n" for line in lines)
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that Marian's form can express."""
    folder = tmp_path_factory.mktemp("asked")
    model = {"start": Start.zeros, "positions": Positions.marian}
    return run(tiny_job(folder / "run", write_corpus(folder / "corpus"), model, max_steps=4))


def exported(run_dir: Path, output: Path, **changes: Any) -> Exported:
    """Greedily: so the stand-in has one list of translations."""
    keys: dict[str, Any] = {"sentences": 12, "search": SearchOverride(beam_size=1)} | changes
    with as_a_command():
        return export(ExportJob(run_dir=str(run_dir), to=Target.marian, output=str(output), threads=1, **keys))


StandIn = Callable[..., None]


@pytest.fixture
def stand_in(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Install one that answers as the run would; `fault` is what it does `at` a command."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "pymarian.py").write_text("__version__ = '9.9'\n", encoding="utf-8")
    (folder / "_pymarian.py").write_text(STAND_IN, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(folder)

    texts, references = (
        (run_dir / "hypotheses" / f"dev.{side}").read_text("utf-8").split("\n")[:12] for side in ("src", "ref")
    )
    ours = transformer.load(run_dir, device="cpu", precision="fp64", beam_size=1)
    pieces = ours.tokenizers.target.pieces()
    hypotheses = ours.hypotheses(ours.tokenizers.source.encode(texts), n_best=1)
    scored = ours.score(texts, references)

    def install(fault: str = "", at: str = "decode") -> None:
        how = {
            "fault": fault,
            "at": at,
            "decode": [" ".join(pieces[token] for token in best.tokens) for [best] in hypotheses],
            "score": [
                f"-1 ||| WordScores= {' '.join(f'{number:.5f}' for number in one.piece_log_probs or [])}"
                for one in scored
            ],
        }
        (folder / "how.json").write_text(json.dumps(how), encoding="utf-8")

    return install


def test_export_to_marian_asks_marian_itself(
    stand_in: StandIn, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line says what came of it, and `parity.json` keeps that."""
    stand_in()
    job = ExportJob(
        run_dir=str(run_dir),
        to=Target.marian,
        output=str(tmp_path / "out"),
        threads=1,
        sentences=12,
        search=SearchOverride(beam_size=1),
    )
    run_command("export", job)
    [line] = [line for line in capsys.readouterr().out.split("\n") if "engine itself" in line]
    assert re.fullmatch(
        r"the engine itself, pymarian 9\.9, on 12 sentences: greedy: 12 identical; "
        r"log-probabilities of \d+ tokens: at most \d\.\de-0[4-9] apart \(1e-03 allowed\)",
        line,
    )
    kept = json.loads((tmp_path / "out" / "parity.json").read_text("utf-8"))["engine"]
    assert kept["why_not"] is None
    assert kept["parity"]["versions"] == {"pymarian": "9.9"}
    assert [search["identical"] for search in kept["parity"]["searches"]] == [12]


FAULTS = {
    ("dies", "decode"): "decode: no parameter",
    ("dies", "score"): "score: no parameter",
    ("hangs", "decode"): r"decode: not done after 3 seconds \(the limit\)",
    ("says nothing", "score"): "score: what it wrote cannot be read: .*No such file",
    ("loses", "decode"): "decode: it wrote 11 lines for 12 sentences",
    ("loses", "score"): "score: it wrote 11 lines for 12 sentences",
    ("bytes", "decode"): "decode: what it wrote cannot be read: 'utf-8' codec",
    ("words", "decode"): "line 1 of its translations: 'no-piece' is no piece of the vocabulary",
    ("no numbers", "score"): "line 1 of its scores is none: '-1.0 ",
    ("fewer numbers", "score"): r"line 1 of its scores has \d+ for a reference of \d+ pieces and its end",
}


KEPT = {("dies", "decode"), ("loses", "score")}  # by the plain suite


@pytest.mark.parametrize(
    ("fault", "at"), [pytest.param(*fault, marks=[] if fault in KEPT else pytest.mark.ci) for fault in FAULTS]
)
def test_export_to_marian_is_refused_in_a_line_where_marian_fails(
    fault: str, at: str, stand_in: StandIn, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_program(words: list[str], folder: Path, *, seconds: float, **keys: Any) -> str:
        seconds = 3.0 if fault == "hangs" and at in words else seconds
        return program.run_program(words, folder, seconds=seconds, **keys)

    monkeypatch.setattr(marian_engine, "run_program", run_program)
    stand_in(fault, at)
    with pytest.raises(
        InputError, match=f"out: not written: the engine itself fails with it: {FAULTS[fault, at]}"
    ) as no:
        exported(run_dir, tmp_path / "out")
    assert "\n" not in str(no.value)
    assert [path.name for path in tmp_path.iterdir()] == ["site"]


@pytest.mark.parametrize(
    ("fault", "at", "problem"),
    [
        ("other numbers", "score", r"a log-probability differs by .* \(0\.001 allowed\)"),
        ("others", "decode", r"\d+ of 12 translations differ \(greedy\)"),
    ],
)
def test_export_to_marian_is_refused_where_marian_computes_something_else(
    fault: str, at: str, problem: str, stand_in: StandIn, run_dir: Path, tmp_path: Path
) -> None:
    stand_in(fault, at)
    with pytest.raises(ParityError, match=rf"not written: .*: {problem} \(with pymarian 9\.9\)"):
        exported(run_dir, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_export_to_marian_says_why_marian_was_not_asked(
    stand_in: StandIn,
    run_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where it is not installed, and where it cannot run on this machine: the export stands by our formulas."""
    (tmp_path / "site" / "_pymarian.py").write_text("raise ImportError('libcuda.so.1: no such file')", encoding="utf-8")
    broken = exported(run_dir, tmp_path / "a").engine
    assert broken.parity is None
    assert broken.why_not == (
        "warning: Marian itself was not asked: pymarian does not run here: it ended with status 1: "
        "ImportError: libcuda.so.1: no such file"
    )

    monkeypatch.setattr(marian_engine, "find_spec", lambda _: None)
    job = ExportJob(run_dir=str(run_dir), to=Target.marian, output=str(tmp_path / "b"), threads=1, sentences=2)
    run_command("export", job)
    last = capsys.readouterr().out.rstrip("\n").rpartition("\n")[2]
    assert re.fullmatch(r"Marian itself was not asked: pip install .*, in Python 3\.11, has it asked", last)
    assert json.loads((tmp_path / "b" / "parity.json").read_text("utf-8"))["engine"]["parity"] is None


def test_export_to_marian_asks_about_our_translations_where_there_is_no_reference(
    stand_in: StandIn, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scorer reads texts: what it is given is what we translate, without lines that we leave blank."""
    stand_in("fewer numbers", "score")
    read: list[str] = []

    def run_program(words: list[str], folder: Path, **keys: Any) -> str:
        if "score" in words:
            read.append((folder / "reference").read_text("utf-8"))
        return program.run_program(words, folder, **keys)

    monkeypatch.setattr(marian_engine, "run_program", run_program)
    ours = transformer.load(run_dir, device="cpu", precision="fp32", beam_size=1)
    texts = (run_dir / "hypotheses" / "dev.src").read_text("utf-8").split("\n")[:12]
    (tmp_path / "in.txt").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    with pytest.raises(InputError, match="the engine itself fails with it"):
        exported(run_dir, tmp_path / "out", src=str(tmp_path / "in.txt"))
    expected = [line for line in ours.translate(texts) if line]
    assert read == ["".join(f"{line}\n" for line in expected)]


# ---- how Marian searches --------------------------------------------------------------------------------------------


def plain_narrowing(model: Any, source: list[int], width: int, longest: int, exponent: float) -> list[int]:
    """The same rule without rows, states and tensors of hypotheses: each is read anew from its beginning."""
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []
    for length in range(1, longest + 1):
        continued = []
        for log_prob, written in live:
            tokens = torch.tensor([[BOS, *written]])
            rows = torch.tensor([[*source, EOS]])
            layouts = [Padded.of([read.shape[1]], read.shape[1]) for read in (rows, tokens)]
            with torch.no_grad():
                logits = model(rows, tokens, source_layout=layouts[0], target_layout=layouts[1])[0, -1].double()
            logits[[0, BOS]] = -math.inf
            scores = torch.log_softmax(logits, 0).tolist()
            continued += [(log_prob + score, [*written, piece]) for piece, score in enumerate(scores)]
        continued.sort(key=lambda one: -one[0])
        best = continued[:width]
        ended += [(log_prob / length**exponent, written[:-1]) for log_prob, written in best if written[-1] == EOS]
        live = [one for one in best if one[1][-1] != EOS]
        width = len(live)
        if not live:
            break
    ended += [(log_prob / longest**exponent, written) for log_prob, written in live]
    return max(ended)[1]


class Exponent:
    """As much of a Peer as a search asks."""

    def penalty(self, length: int) -> float:
        return float(length**0.45)


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("ends", [0.0, 4.0])
def test_narrowing_searches_loses_a_place_for_each_translation_that_ends(width: int, ends: float, spm: bytes) -> None:
    one = Tokenizer(spm)
    translator = random_translator(SHAPES["shared"], Tokenizers(one, one))
    assert translator.model.output_bias is not None
    with torch.no_grad():
        translator.model.output_bias[EOS] += ends
    translator = translator.with_search(translator.search)
    sources = translator.tokenizers.source.encode(sentences(5))
    peer: Any = Exponent()
    found = marian_engine.narrowing_searches(translator, peer, sources, beam_size=width)
    expected = [
        plain_narrowing(translator.model, source, width, translator.decoder.max_length(source), 0.45)
        for source in sources
    ]
    assert [hypothesis.tokens for hypothesis in found] == expected


# ---- the engine -----------------------------------------------------------------------------------------------------


@pytest.fixture
def engine() -> None:
    if importlib.util.find_spec("pymarian") is None:
        pytest.skip("pymarian is not installed here")


@pytest.mark.marian
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("engine")
def test_marian_itself_agrees_with_an_export(run_dir: Path, tmp_path: Path) -> None:
    """Of a run that has learnt nothing, whose translations end where they must; and of one that has, where there is."""
    for number, path in enumerate([str(run_dir), os.environ.get("TRANSFORMER_MARIAN_RUN")]):
        if path is None:
            continue
        found = exported(Path(path), tmp_path / str(number), sentences=100, search=SearchOverride()).engine.parity
        assert found is not None
        assert found.versions == {"pymarian": "1.12.42"}
        assert found.problems == []
        assert found.log_probs < 1e-3
        greedy, beam = found.searches
        assert greedy.others == 0
        assert beam.others <= 1


@pytest.mark.marian
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("engine")
def test_marian_itself_finds_a_model_that_is_damaged(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It aborts, and says why in a line."""

    def without_bias(original: Any, reader: Peer, folder: Path, threads: int) -> Any:
        with np.load(folder / "model.npz") as stored:
            arrays = {name: stored[name] for name in stored.files if name != "decoder_ff_logit_out_b"}
        np.savez(folder / "model.npz", **arrays)
        return ask(original, reader, folder, threads)

    ask = marian_engine.ask
    monkeypatch.setitem(FORMATS, Target.marian, replace(FORMATS[Target.marian], ask=without_bias))
    with pytest.raises(InputError, match=r"fails with it: decode: .*decoder_ff_logit_out_b"):
        exported(run_dir, tmp_path / "out")
