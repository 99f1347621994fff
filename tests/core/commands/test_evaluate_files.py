"""`transformer evaluate hypotheses=... references=...`: files scored without a run."""

import gzip
import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

import pytest

from support.corpora import run_command, typed_in_a_child
from support.paths import CORPORA, needs_corpora
from transformer.cli.commands import compose
from transformer.config.jobs import EvaluateJob
from transformer.config.keys import keys_of

SCORES = CORPORA / "scores"

REFERENCES = "Der Hund läuft durch den tiefen Schnee.\nZwei Frauen lachen an der Ecke.\n"
OTHERS = "Der Hund rennt durch tiefen Schnee.\nAn der Ecke lachen zwei Frauen.\n"
HYPOTHESES = "Der Hund läuft durch tiefen Schnee.\nZwei Frauen lachen an der Ecke.\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in (("hyp", HYPOTHESES), ("ref", REFERENCES), ("other", OTHERS)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def evaluate(*overrides: str) -> None:
    run_command("evaluate", compose("evaluate", overrides))


def printed(capsys: pytest.CaptureFixture[str], *overrides: str) -> dict[str, Any]:
    evaluate(*overrides, "format=json")
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_evaluate_prints_scores_and_signatures_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One bigram, two trigrams and three 4-grams of the first sentence are wrong; it is one word short."""
    found = printed(capsys, "hypotheses=hyp", "references=ref", "data.tgt_lang=de")
    names = ("bleu", "chrf", "chrf_plus_plus", "ter", "paper_bleu")
    assert list(found) == [*(key for name in names for key in (name, f"{name}_signature")), "others", "judges"]
    assert (found["paper_bleu"], found["paper_bleu_signature"]) == (None, None)
    precisions = 14 / 14 * 11 / 12 * 8 / 10 * 5 / 8
    assert found["bleu"] == pytest.approx(100 * precisions**0.25 * 2.718281828459045 ** (1 - 15 / 14))
    version = importlib.metadata.version("sacrebleu")
    assert found["bleu_signature"] == f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{version}"
    assert found["chrf_signature"] == f"nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:{version}"
    assert found["chrf_plus_plus_signature"] == found["chrf_signature"].replace("nw:0", "nw:2")
    assert found["ter_signature"] == f"nrefs:1|case:lc|tok:tercom|norm:no|punct:yes|asian:no|version:{version}"


def test_evaluate_takes_several_references_gzip_and_standard_input(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = printed(capsys, "hypotheses=hyp", "references=ref", "data.tgt_lang=de")
    (folder / "ref.gz").write_bytes(gzip.compress(REFERENCES.encode()))
    assert printed(capsys, "hypotheses=hyp", "references=ref.gz", "data.tgt_lang=de") == one

    both = printed(capsys, "hypotheses=hyp", "references=[ref, other]", "data.tgt_lang=de")
    assert both["bleu_signature"].startswith("nrefs:2|")
    assert both["bleu"] > one["bleu"]

    command = ("evaluate", "hypotheses=-", "references=[ref,other]", "data.tgt_lang=de", "format=json")
    hypotheses = (folder / "hyp").read_text(encoding="utf-8")
    assert json.loads(typed_in_a_child(*command, cwd=folder, text=hypotheses).printed) == both


def test_evaluate_takes_a_reference_with_a_comma_in_quotes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = printed(capsys, "hypotheses=hyp", "references=ref", "data.tgt_lang=de")
    (folder / "a,b").write_bytes((folder / "ref").read_bytes())
    for quoted in ("""["a,b"]""", """ 'a,b' """):
        assert printed(capsys, "hypotheses=hyp", f"references={quoted}", "data.tgt_lang=de") == one


@pytest.mark.plugins
@pytest.mark.needs("sacremoses")
def test_evaluate_tells_the_two_bleus_apart(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = printed(capsys, "hypotheses=hyp", "references=ref", "data.tgt_lang=de")
    found = printed(capsys, "hypotheses=hyp", "references=ref", "data.tgt_lang=deu", "paper_bleu=true")
    assert {key: found[key] for key in plain if plain[key] is not None} == {
        key: value for key, value in plain.items() if value is not None
    }
    assert found["paper_bleu"] > 0
    assert "tok:moses-de+hyphens-split" in found["paper_bleu_signature"]

    evaluate("hypotheses=hyp", "references=ref", "data.tgt_lang=de", "paper_bleu=true", "lowercase=true")
    first, *others = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"BLEU \d+\.\d\d, chrF \d+\.\d\d, chrF\+\+ \d+\.\d\d, TER \d+\.\d\d, BLEU as papers count \d+\.\d\d", first
    )
    assert [line.split(": ")[0] for line in others] == [
        "  files",
        "  BLEU",
        "  chrF",
        "  chrF++",
        "  TER",
        "  BLEU as papers count",
    ]
    assert others[0] == "  files: hyp against ref"
    assert all("|case:lc|" in line for line in others[1:])


@needs_corpora
@pytest.mark.ci
def test_evaluate_gives_a_published_score(capsys: pytest.CaptureFixture[str]) -> None:
    """NVIDIA-NeMo of WMT 2021 against reference C."""
    folder = SCORES / "wmt21_en_de"
    rows = [line.split("\t") for line in (folder / "published.tsv").read_text(encoding="utf-8").split("\n") if line]
    (published,) = [float(bleu) for name, reference, bleu in rows if (name, reference) == ("NVIDIA-NeMo", "C")]
    files = [f"hypotheses={folder}/hyp.NVIDIA-NeMo.de", f"references={folder}/ref.C.de"]
    assert printed(capsys, *files, "data.tgt_lang=de")["bleu"] == pytest.approx(published, abs=1e-6)


def test_evaluate_has_few_keys() -> None:
    shared = ("run_dir", "checkpoint", "device", "precision", "threads", "search.", "plugins.")
    assert len([key for key in keys_of(EvaluateJob) if not key.startswith(shared)]) <= 24
