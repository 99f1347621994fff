"""Language codes, against ISO 639 as its registration authorities publish it."""

import re

import pytest

from transformer.config.languages import language_of
from transformer.errors import InputError
from transformer.terminal import printable


@pytest.mark.parametrize(
    ("language", "codes"),
    [
        ("de", ["de", "deu", "ger", "DE", "de-DE", "de_AT", "deu_Latn", "de-1996"]),
        ("zh", ["zh", "zho", "chi", "cmn", "yue", "wuu", "lzh", "zh-Hans", "zh_CN", "zh-Hant-TW", "zho_Hant"]),
        ("ja", ["ja", "jpn", "ja-JP"]),
        ("ko", ["ko", "kor"]),
        ("fr", ["fr", "fra", "fre", "fr-CA"]),
        ("cs", ["cs", "ces", "cze"]),
        ("sr", ["sr", "srp", "sr-Latn"]),
        ("ceb", ["ceb", "CEB"]),  # Cebuano has three letters only
        ("gsw", ["gsw", "gsw-CH"]),
    ],
)
def test_language_of_is_the_shortest_code(language: str, codes: list[str]) -> None:
    assert {language_of(code, "data.tgt_lang") for code in codes} == {language}


@pytest.mark.parametrize(
    "code", ["chinese", "german", "jp", "cn", "uk-", "", "e", "e n", "zh.Hant", "z1", "de\n", "中文"]
)
def test_language_of_refuses_what_is_no_code(code: str) -> None:
    with pytest.raises(InputError) as refused:
        language_of(code, "data.src_lang")
    typed = re.escape(printable(code))
    expected = rf"data\.src_lang={typed}: not a code of ISO 639(: |; did you mean \w+\? )give two or three lett"
    assert re.match(expected, str(refused.value))


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("jp", "ja"), ("cn", "zh"), ("zn-CN", ""), ("GR", "el"), ("jp_JP", "ja"), ("german", "de"), ("Chinese", "zh")],
)
def test_language_of_says_what_was_meant(typed: str, meant: str) -> None:
    with pytest.raises(InputError, match=f"; did you mean {meant}[?] give" if meant else "639: give"):
        language_of(typed, "data.src_lang")
