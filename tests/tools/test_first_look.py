"""The commonest faults of text are said at every start, and none of sound text."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from support.corpora import tiny_job
from support.paths import ROOT
from support.tiers import tiers
from transformer.config.settings import DataConfig, PairConfig, TokenizerConfig
from transformer.data.corpus import Pair
from transformer.data.prepare import prepare
from transformer.tools.first_look import warnings_of

DEMO = ROOT / "data" / "demo"


def pairs_of(name: str) -> list[Pair]:
    sides = [(DEMO / f"{name}.{side}").read_text(encoding="utf-8").split("\n")[:-1] for side in ("en", "de")]
    return list(zip(*sides, strict=True))


TRAIN, DEV = pairs_of("train"), pairs_of("dev")
EXCHANGED = "sources look like {1}, and its targets like {0}: exchange data.train.src and data.train.tgt"
COPIES = [(source, source) for source, _ in TRAIN]
JAPANESE = [("これは私の新しい本です。", "This is my new book.")] * 40


def said(train: list[Pair], dev: list[Pair] = DEV, *, codes: tuple[str, str] = ("en", "de")) -> list[str]:
    return warnings_of({"train": train, "dev": dev}, {"train": codes, "dev": codes})


def exchanged(pairs: list[Pair]) -> list[Pair]:
    return [(target, source) for source, target in pairs]


@pytest.mark.parametrize("codes", [("en", "de"), ("eng_Latn", "de_AT"), ("en", "fr"), ("xxx", "yyy"), ("en", "en")])
def test_sound_text_has_no_fault(codes: tuple[str, str]) -> None:
    """Nor has text whose languages are named wrongly: no side of it is in the language of the other.

    Copies of the source may be trained on beside the corpus (Currey et al., 2017, "Copied monolingual data").
    """
    assert said(TRAIN, codes=codes) == []
    assert warnings_of({"train": TRAIN, "extra.copies": COPIES}, {"train": codes, "extra.copies": codes}) == []
    assert warnings_of({"train": [], "dev": []}, {"train": codes, "dev": codes}) == []


@pytest.mark.parametrize(
    ("train", "dev", "codes", "words"),
    [
        (exchanged(TRAIN), DEV, ("en", "de"), EXCHANGED.format("en", "de")),
        (exchanged(TRAIN), DEV, ("eng", "deu"), EXCHANGED.format("eng", "deu")),
        (JAPANESE, JAPANESE[:1], ("en", "ja"), "data.train: its sources look like ja, and its targets like en"),
        (JAPANESE, JAPANESE[:1], ("ja", "en"), ""),
        (
            [("English", "German"), *TRAIN],
            DEV,
            ("en", "de"),
            "data.train: its first pair is a header (English / G",
        ),
        ([("source_text", "Target text"), *TRAIN], DEV, ("en", "de"), "(source_text / Target text)"),
        ([("de", "en"), *TRAIN], DEV, ("en", "de"), "a header (de / en)"),
        ([("source", "source"), *TRAIN], DEV, ("en", "de"), ""),
        ([("The source", "Die Quelle"), *TRAIN], DEV, ("en", "de"), ""),
        (exchanged(TRAIN), DEV, ("en", "xxx"), EXCHANGED.format("en", "xxx")),
        (exchanged(TRAIN), DEV, ("xxx", "de"), EXCHANGED.format("xxx", "de")),
        (COPIES, DEV, ("en", "de"), "data.train: 20,000 of 20,000 targets equal their sources: name the file of trans"),
        ([*COPIES[:9_000], *TRAIN[9_000:]], DEV, ("en", "de"), ""),
        ([*COPIES[:11_000], *TRAIN[11_000:]], DEV, ("en", "de"), "data.train: 11,000 of 20,000 targets equal"),
        (TRAIN, COPIES[:12], ("en", "de"), "data.dev: 12 of 12 targets equal their sources"),
        ([*TRAIN, *[("", "")] * 30_000], DEV, ("en", "de"), ""),
        (
            TRAIN,
            DEV,
            ("jp", "de"),
            "data.src_lang=jp: not a code of ISO 639; did you mean ja? give two or three letters",
        ),
        (TRAIN, [("en", "de"), *DEV], ("en", "de"), "data.dev: its first pair is a header (en / de)"),
        (TRAIN, TRAIN[:400], ("en", "de"), "pairs are among the first 20,000 of data.train: "),
        (TRAIN, [*DEV, *TRAIN[:3]], ("en", "de"), ""),
        (TRAIN, TRAIN[:20], ("en", "de"), ""),
    ],
)
def test_plain_faults_are_said(train: list[Pair], dev: list[Pair], codes: tuple[str, str], words: str) -> None:
    found = said(train, dev, codes=codes)
    assert len(found) == bool(words), found
    assert words in "".join(found)


def test_a_code_of_one_set_is_named_by_its_key() -> None:
    sets = {"devs.en_de": DEV[:5], "devs.ja_de": DEV[5:10]}
    [found] = warnings_of(sets, {"devs.en_de": ("en", "de"), "devs.ja_de": ("jp", "de")})
    assert found.startswith("data.devs.ja_de.src_lang=jp: not a code")


@pytest.mark.parametrize("is_checked", tiers([True], [False], pytest.mark.ci))
def test_prepare_says_them_unless_it_is_told_not_to(
    is_checked: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = PairConfig(str(DEMO / "train.de"), str(DEMO / "train.en"))
    job = tiny_job(tmp_path / "a", DataConfig(train=text, dev=text, check=is_checked))
    job = replace(job, tokenizer=TokenizerConfig(vocab_size=200))
    prepare(job)
    warnings = [line.getMessage() for line in caplog.records if line.levelno == logging.WARNING]
    faults = [text for text in warnings if text.endswith("(`transformer doctor` tells more)")]
    assert [text.partition(":")[0] for text in faults] == ["data.dev", "data.train", "data.dev"] * is_checked
