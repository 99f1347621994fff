"""The BLEU of papers: multi-bleu.perl's own figures, tensor2tensor's way of splitting, and what must be refused."""

import sys
from pathlib import Path

import pytest

from support.paths import CORPORA, needs_corpora
from transformer.errors import InputError
from transformer.evaluation.metrics import choose
from transformer.evaluation.score import choose_scorer, format_scores, format_signatures, score
from transformer.plugins import ScoreSettings
from transformer.tools.paper_bleu import multi_bleu, split_hyphens

SCORES = CORPORA / "scores"


def lines(path: Path) -> list[str]:
    return path.read_bytes().decode("utf-8").split("\n")[:-1]


@needs_corpora
def test_multi_bleu_is_that_of_the_perl_script() -> None:
    """BLEU = 22.58, 56.9/29.0/17.0/10.3 (BP=0.975, ratio=0.975, hyp_len=63211, ref_len=64807)."""
    found, signature = multi_bleu(
        lines(SCORES / "multi_bleu" / "hyp"), lines(SCORES / "multi_bleu" / "ref.tok"), lowercase=False
    )
    assert f"{found.score:.2f}" == "22.58"
    assert [f"{precision:.1f}" for precision in found.precisions] == ["56.9", "29.0", "17.0", "10.3"]
    assert (f"{found.bp:.3f}", found.sys_len, found.ref_len) == ("0.975", 63211, 64807)
    assert "|tok:none|smooth:none|" in signature


@pytest.mark.parametrize(
    ("references", "length", "bleu"),
    [
        (["a b c d e"], 5, 100.0),
        (["a b c d e f", "a b c d"], 4, 100.0),  # as close on both sides: the shorter one
        (["a b c d e f g", "x"], 7, 67.03),  # exp(1 - 7/5)
        (["a b c x e"], 5, 0.0),  # no 4-gram matches, and nothing is smoothed
    ],
)
def test_multi_bleu_by_hand(references: list[str], length: int, bleu: float) -> None:
    found, _ = multi_bleu(["a b c d e"], *([reference] for reference in references), lowercase=False)
    assert found.ref_len == length
    assert found.score == pytest.approx(bleu, abs=0.005)


def test_multi_bleu_ignores_case_only_if_told() -> None:
    pair = ["The Cat sat down"], ["the cat SAT down"]
    assert multi_bleu(*pair, lowercase=False)[0].score == 0.0
    assert multi_bleu(*pair, lowercase=True)[0].score == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("rich-text format", "rich ##AT##-##AT## text format"),
        ("a - b -c d-", "a - b -c d-"),
        ("Nord-Süd-Achse", "Nord ##AT##-##AT## Süd ##AT##-##AT## Achse"),
        ("a-b-c", "a ##AT##-##AT## b-c"),  # as Perl's s{(\S)-(\S)}{}g, which does not look at the b twice
        ("ä-ö-ü", "ä ##AT##-##AT## ö ##AT##-##AT## ü"),  # of two bytes each, which is what Perl sees
        ("a\u00a0-b", "a\u00a0 ##AT##-##AT## b"),  # no space in bytes
    ],
)
def test_split_hyphens_as_the_perl_line_does(text: str, split: str) -> None:
    assert split_hyphens(text) == split


@pytest.mark.needs("sacremoses")
def test_choose_scorer_puts_both_bleus_side_by_side() -> None:
    """Tokens: Ein schwarz ##AT##-##AT## weiß ##AT##-##AT## er Hund läuft . of 9; `Der` is wrong."""
    hypotheses, references = ["Der schwarz-weiß-er Hund läuft."], ["Ein schwarz-weiß-er Hund läuft."]
    both = choose_scorer(ScoreSettings("deu"), choose(["paper_bleu"]))(hypotheses, references)
    assert both.paper_bleu is not None
    assert both.paper_bleu_signature is not None
    plain = score(hypotheses, references, text=ScoreSettings("de"))
    assert (both.bleu, both.bleu_signature, both.chrf) == (plain.bleu, plain.bleu_signature, plain.chrf)

    # 8 of 9 words, 7 of 8 pairs, 6 of 7, 5 of 6
    assert both.paper_bleu == pytest.approx(100 * (8 / 9 * 7 / 8 * 6 / 7 * 5 / 6) ** 0.25)
    assert both.paper_bleu_signature.startswith("nrefs:1|case:mixed|eff:no|tok:moses-de+hyphens-split|sacremoses:")
    assert format_scores(both) == f"{format_scores(plain)}, BLEU as papers count {both.paper_bleu:.2f}"
    assert format_signatures(both) == [*format_signatures(plain), f"BLEU as papers count: {both.paper_bleu_signature}"]


@pytest.mark.ci
@pytest.mark.needs("sacremoses")
@needs_corpora
def test_split_hyphens_raise_a_real_score() -> None:
    """By about as much as papers say, 0.7 to 1.0: on newstest2021."""
    hypotheses, references = (lines(SCORES / "wmt21_en_de" / name) for name in ("hyp.Online-G.de", "ref.A.de"))
    both = choose_scorer(ScoreSettings("de"), choose(["paper_bleu"]))(hypotheses, references)
    assert both.paper_bleu is not None
    assert both.bleu == pytest.approx(27.0781, abs=1e-4)
    assert 0.3 < both.paper_bleu - both.bleu < 1.5


def test_choose_scorer_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    with pytest.raises(InputError, match=r"^paper_bleu needs Moses' tokenizer: pip install 'sacremoses>=\S+'$"):
        choose_scorer(ScoreSettings("de"), choose(["paper_bleu"]))
    assert choose_scorer(ScoreSettings("de"))(["a"], ["a"]).paper_bleu is None


@pytest.mark.parametrize("language", ["zh", "yue"])
def test_choose_scorer_refuses_languages_without_spaces(language: str) -> None:
    with pytest.raises(InputError, match="paper_bleu: Moses has no tokeniser for zh"):
        choose_scorer(ScoreSettings(language), choose(["paper_bleu"]))
